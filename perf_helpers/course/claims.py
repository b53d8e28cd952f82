"""Claims as a lesson uses them: `Claims.check` decides one from a measured value, `Claims.finish` closes the lesson.

The ledger (claims.toml) lists the claims. A lesson measures the number that decides a claim and passes it to
`Claims.check`. A decision displays itself in a notebook (claims.html.j2) and in a terminal, with the same words.

A claim that does not hold is a finding, not an error. A strict run fails if a verdict is not one that the ledger
expects, or if a claim was not checked. In a rehearsal (see `Machine.rehearsed`) only memory is measured as on the
rehearsed machine. Therefore only claims about memory are decided then, and their verdicts are marked "(rehearsed)".
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from perf_helpers.course import learner_log
from perf_helpers.course.ledger import Claim, Verdict, decide, load
from perf_helpers.course.results import expectation_text, interval_text, unexpected
from perf_helpers.lab import Lab
from perf_helpers.templates import template
from trainmem.core import hardware
from trainmem.records import Ratio, now, write_whole
from trainmem.texts import nearest_text, number_text
from trainmem.unknown import Missing, Unknown

__all__ = ["Claims", "Decision", "NotReproduced", "Scoreboard", "decide", "load"]

# A verdict is never shown by its colour alone: it always has its sign and its words.
SIGNS = {
    Verdict.HOLDS: "✓",
    Verdict.SMALLER: "↓",
    Verdict.REFUTED: "✗",
    Verdict.TOO_SMALL: "≈",
    Verdict.NOT_TESTABLE: "–",
}


@dataclass(frozen=True, slots=True, repr=False)
class Decision:
    """A claim, the value measured for it on this machine, and the verdict."""

    claim: Claim
    verdict: Verdict
    value: float | None  # in the unit of the claim's quantity; None: not measured
    interval: tuple[float, float] | None  # in the same unit; None: an exact count, or a single measurement
    missing: str | None  # what this machine lacks to measure the claim
    note: str  # a remark of the lesson
    predicted: tuple[float, float] | None  # range that other measurements of this run predict, in the same unit
    predicted_from: str | None  # these measurements, or why there is no prediction
    kind: str  # of this machine, "cpu" or "cuda"
    profile: str  # of the lab; it sets the sizes of the measurement
    rehearsed: bool  # the machine computes nothing, see Machine.rehearsed
    excused: bool  # the machine or the rehearsal cannot decide the claim, so no verdict is expected
    lesson: str | None = None  # the lesson that checked the claim

    @property
    def id(self) -> str:
        """Return the claim's id."""
        return self.claim.id

    @property
    def expected(self) -> tuple[Verdict, ...]:
        """Return the verdicts that the ledger expects here; () if the claim's value must agree with a prediction."""
        return self.claim.expected_on(self.kind, self.profile)

    @property
    def as_expected(self) -> bool:
        """Return whether the result is expected: the value as predicted, or the verdict as listed, or `excused`."""
        if self.predicted and self.verdict is not Verdict.NOT_TESTABLE:
            (low, high), (least, most) = self.predicted, self.interval or (self.value, self.value)
            return least <= high and low <= most  # the intervals overlap
        return self.excused or self.verdict in self.expected

    @property
    def reason(self) -> str:
        """Return why the claim does not hold, since when (e.g. "torch 2.0"), and a link; "" if the ledger has none."""
        claim = self.claim
        return " · ".join(filter(None, (claim.reason, claim.since and f"since: {claim.since}", claim.thread)))

    def to_dict(self) -> dict:
        """Return the decision as a "claims" entry of a lesson's or course's results, with JSON's types only."""
        row = {name: getattr(self, name) for name in ("lesson", "id", "verdict", "expected", "as_expected", "value")}
        row |= {name: getattr(self, name) for name in ("interval", "note", "rehearsed", "predicted", "predicted_from")}
        row |= {"says": self.claim.says, "quantity": self.claim.quantity, "threshold": self.claim.threshold_text()}
        row |= {"reference": asdict(self.claim.guide), "reason": self.missing or self.reason}
        return json.loads(json.dumps(row))

    def headline(self) -> str:
        """Return the verdict with its sign, e.g. "✓ holds"; if the verdict is unexpected, also what was expected."""
        words = f"{SIGNS[self.verdict]} {self.verdict}"
        if self.rehearsed and self.verdict is not Verdict.NOT_TESTABLE:
            words += " (rehearsed)"
        elif self.verdict is Verdict.REFUTED:
            words += ": not reproduced on this machine"
        return words if self.as_expected else f"{words} (unexpected: {expectation_text(self.expected, self.predicted)})"

    def measured(self) -> str:
        """Return the value with its interval as text, or "not measured"."""
        return number_text(self.value) + (f" ({interval_text(self.interval)})" if self.interval else "")

    def guide_text(self) -> str:
        """Return the guide's figure for the claim, or "no figure", with the guide's name and hardware (see `Guide`)."""
        guide = self.claim.guide
        value = [] if guide.value is None else [number_text(guide.value)]
        figure = ": ".join([*value, guide.text or "no figure"])
        return f"{figure} ({'; '.join(filter(None, (guide.source, guide.hardware)))})"

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines to show below the claim's statement as (name, text), e.g. ("measured", "0.58").

        The line "why" (why the claim does not hold) is left out if the claim holds as expected or was not tested.
        """
        tested, quantity = self.verdict is not Verdict.NOT_TESTABLE, self.claim.quantity
        finding = tested and not (self.verdict is Verdict.HOLDS and self.as_expected)
        rows = {
            "measured": quantity and self.measured(),
            "predicted": self.predicted and f"{interval_text(self.predicted)} on this machine: {self.predicted_from}",
            "quantity": quantity,
            "holds if": self.claim.threshold_text(),
            "guide": self.guide_text(),
            "missing": self.missing,
            "why": self.reason if finding else None,
            "note": self.note,
        }
        return [(name, text) for name, text in rows.items() if text]

    def __repr__(self) -> str:
        rows = [f"  {name:<9} {text}" for name, text in self.rows()]
        return "\n".join([f"{self.headline()} [{self.id}]", f"  {self.claim.says}", *rows])

    def _repr_html_(self) -> str:
        return template("course/claims.html.j2").module.decision(self)


@dataclass(frozen=True, slots=True, repr=False)
class Scoreboard:
    """Hold a lesson's decision on each checked claim, and problems (e.g. an unchecked claim) that fail a strict run."""

    title: str
    decisions: Sequence[Decision]
    problems: Sequence[str]  # one line each

    def counts(self) -> str:
        """Return the number of claims per verdict as text, e.g. "✓ 3 holds · ✗ 1 refuted"."""
        number = Counter(decision.verdict for decision in self.decisions)
        parts = [f"{sign} {number[verdict]} {verdict}" for verdict, sign in SIGNS.items() if number[verdict]]
        rehearsed = ["a rehearsal: no kernel computed"] if any(d.rehearsed for d in self.decisions) else []
        return " · ".join([*(parts or ["no claim was checked"]), *rehearsed])

    def __repr__(self) -> str:
        rows = [f"  {d.headline()} [{d.id}] {d.measured()}" for d in self.decisions]
        return "\n".join([self.title, self.counts(), *rows, *(f"  warning: {text}" for text in self.problems)])

    def _repr_html_(self) -> str:
        return template("course/claims.html.j2").module.scoreboard(self)


class NotReproduced(Exception):
    """Raised by `Claims.finish` in a strict run, e.g. if a verdict is not one that the ledger (claims.toml) expects."""


class Claims:
    """The claims that a lesson decides in its lab: `check` decides one of them, `finish` closes the lesson.

    Args:
        lab: the lab. Its machine determines which claims can be tested. Its machine and its `Profile`, which sets the
            sizes of the measurement, determine which verdicts are expected.
    """

    def __init__(self, lab: Lab):
        self.lab = lab
        self.decided: dict[str, Decision] = {}  # {claim id: decision}, in the order of their first checks

    def check(
        self,
        id: str,
        value: float | Ratio | None = None,
        *,
        predicted: tuple[float, float] | Ratio | None = None,
        missing: str | None = None,
        note: str = "",
    ) -> Decision:
        """Decide a claim of the ledger from a measured value, and return the decision, which a notebook displays.

        A later check of the same claim replaces the decision. The verdict depends on the value alone. For a claim
        with `predicted` in the ledger, the verdict is expected if the intervals of value and prediction overlap. For
        any other claim, the verdict is expected if the ledger lists this verdict for this kind of machine.

        Args:
            id: id of the claim in the ledger.
            value: the claim's quantity, a number or a Ratio (value, low, high). If the quantity is an `Unknown` or
                a `Missing`, e.g. because a run failed, the claim is "not testable here".
            predicted: (low, high) of the quantity, calculated from other measurements of this run; only for a claim
                with `predicted` in the ledger. If it is an unknown Ratio, there is no prediction.
            missing: what this machine lacks to measure the claim, e.g. "needs root to shape a link".
            note: any remark for the reader.

        Raises:
            ValueError: the id is unknown; neither `value` nor `missing` is given, but this machine can measure the
                claim; the value is not a number; or `predicted` is given but not in the ledger, or the reverse.
        """
        ledger, machine = load(), self.lab.machine
        if id not in ledger:
            raise ValueError(f"the ledger has no claim {id!r}. {nearest_text(str(id), ledger)}")
        claim = ledger[id]
        is_met, lacking = hardware.supports(claim.where, machine)
        if is_met and machine.rehearsed and claim.decided_by != "memory":
            absent = "is no time" if claim.decided_by == "time" else "are no values"
            value, missing = None, f"a rehearsal computes nothing, so there {absent}"
        number, interval, why_unknown = _measurement(id, value)
        range_, why_unpredicted = _prediction(claim, predicted, measured=is_met and number is not None and not missing)
        missing = missing or why_unknown
        if is_met and not missing and number is None:
            if not machine.rehearsed:
                remedy = f"give {claim.quantity}, or missing='needs ...' with the reason"
                raise ValueError(f"claim {id!r} has no value, but can be measured here: {remedy}")
            missing = "not measured in this rehearsal"
        verdict = decide(claim, interval or number, is_met and not missing)
        self.decided[id] = Decision(
            claim,
            verdict,
            value=number,
            interval=interval,
            missing=(missing or None) if is_met else lacking,
            note=str(note),
            predicted=range_,
            predicted_from=why_unpredicted or claim.predicted,
            kind=machine.kind,
            profile=self.lab.profile.name,
            rehearsed=machine.rehearsed,
            excused=not is_met or (machine.rehearsed and verdict is Verdict.NOT_TESTABLE),
            lesson=self.lab.lesson,
        )
        return self.decided[id]

    def finish(self) -> None:
        """Close the lesson: show its scoreboard and, if the lab has `out`, write `<lab.out>/<lab.lesson>.json`.

        Raises:
            ValueError: the lab has `out`, but no lesson name for the file.
            NotReproduced: in a strict lab, after the file is written: a verdict is unexpected, a claim of the lesson
                was not checked, a claim of another lesson was checked, or no claim was checked.
        """
        from IPython.display import display

        lab, ledger = self.lab, load()
        if lab.out and not lab.lesson:
            raise ValueError("the lab has no lesson to name the results after: use Lab(lesson='05_my_lesson', ...)")
        owned = [id for id, claim in ledger.items() if claim.lesson == lab.lesson[:2]]
        for id in owned if lab.machine.rehearsed else ():
            if id not in self.decided:  # its statement needed values and was skipped
                self.check(id, missing="its cell needs values, which a rehearsal does not compute")
        decisions, date = [*self.decided.values()], now()
        rows = [decision.to_dict() for decision in decisions]
        problems = unexpected(rows)
        problems += [f"{id}: belongs to this lesson, but was not checked" for id in owned if id not in self.decided]
        others = ((id, one.claim.lesson) for id, one in self.decided.items() if id not in owned)
        problems += [f"{id}: belongs to lesson {owner}, not to this one" for id, owner in others]
        if not decisions:
            problems.append("nothing was checked: call claims.check before claims.finish")
        versions = [f"{name} {lab.versions[name]}" for name in ("torch", "transformers") if lab.versions.get(name)]
        title = " · ".join(filter(None, (lab.lesson, lab.machine.name, ", ".join(versions), date)))
        display(Scoreboard(title, decisions, problems))
        if not lab.machine.rehearsed:  # the learner's journal is about measurements only
            learner_log.keep(lab, "finished", claims={decision.id: str(decision.verdict) for decision in decisions})
        if lab.out:
            content = {"schema": 1, "lesson": lab.lesson, "profile": lab.profile.name, "machine": lab.machine.to_dict()}
            content |= {"versions": dict(lab.versions), "date": date, "claims": rows}
            content |= {"runs": [run.to_dict() for run in lab.runs], "complete": True}
            write_whole(Path(lab.out) / f"{lab.lesson}.json", json.dumps(content, indent=1))
        if lab.strict and problems:
            raise NotReproduced("; ".join(problems))


def _measurement(id: str, value: float | Ratio | None) -> tuple[float | None, tuple[float, ...] | None, str | None]:
    """Return (number, interval, why the number is unknown) of a value passed to `Claims.check`; each may be None."""
    given = [value.value, value.low, value.high] if isinstance(value, Ratio) else [value]
    unknown = [part.why for part in given if isinstance(part, Unknown | Missing)]
    if value is None or unknown:
        return None, None, unknown[0] if unknown else None
    try:
        numbers = [math.nan if isinstance(part, bool | str) else float(part) for part in given]
    except (TypeError, ValueError, RuntimeError):  # raised by None, an array and a tensor
        numbers = [math.nan]
    if any(map(math.isnan, numbers)) or (len(numbers) == 3 and numbers[1] > numbers[2]):
        hint = "give a number or a Ratio; if it cannot be measured here, give missing='needs ...'"
        raise ValueError(f"claim {id!r}: {value!r} is not a measurement: {hint}")
    return numbers[0], tuple(numbers[1:]) or None, None


def _prediction(claim: Claim, predicted: tuple[float, float] | Ratio | None, measured: bool) -> tuple:
    """Return ((low, high) of a claim's prediction, why the prediction is unknown); each may be None."""
    if not claim.predicted:
        if predicted is not None:
            raise ValueError(f"claim {claim.id!r} is not `predicted` in the ledger: leave predicted= out")
        return None, None
    if predicted is None:
        if measured:
            raise ValueError(f"claim {claim.id!r} needs a prediction: give predicted=(low, high), {claim.predicted}")
        return None, None
    ends = (predicted.low, predicted.high) if isinstance(predicted, Ratio) else tuple(predicted)
    for end in ends:
        if isinstance(end, Unknown):
            return None, f"no prediction: {end.why}"
    low, high = map(float, ends)
    if not low <= high:  # also refuses nan
        raise ValueError(f"claim {claim.id!r}: predicted={predicted!r} is not a range: give (low, high)")
    return (low, high), None
