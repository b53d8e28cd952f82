"""Claims as a lesson uses them: `check` decides one by what was measured here, `finish` closes the lesson.

The claims stand in the ledger (claims.toml). A lesson measures the number that decides a claim and passes it on. What
was decided displays itself in a notebook (claims.html.j2) and in a terminal, with the same words.
Notable: a claim that does not hold is a finding, not an error. What fails a strict run is a verdict that the ledger
does not expect, or a claim that nobody checked. In a rehearsal (see `Machine.rehearsed`) only memory is as it would be
on the machine that is rehearsed, so only claims about memory are decided, and marked.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from perf_helpers.course import learner_log
from perf_helpers.course.ledger import (
    GPU_PROFILES,
    LESSONS_WITHOUT_CLAIMS,
    Claim,
    Guide,
    Verdict,
    decide,
    load,
    recorded_since,
)
from perf_helpers.course.report import template
from perf_helpers.course.results import claim_row, expectation_text, interval_text, unexpected
from perf_helpers.lab import hardware
from perf_helpers.lab.task import choose_profile
from perf_helpers.records import Ratio, write_whole
from perf_helpers.texts import nearest_text, number_text
from perf_helpers.unknown import Unknown

if TYPE_CHECKING:
    from perf_helpers.lab.lab import Lab

__all__ = ["Decision", "NotReproduced", "Scoreboard", "check", "decide", "decisions", "finish", "load", "reset"]

# A verdict is never told by colour alone: its sign and its words go with it.
SIGNS = {
    Verdict.HOLDS: "✓",
    Verdict.SMALLER: "↓",
    Verdict.REFUTED: "✗",
    Verdict.TOO_SMALL: "≈",
    Verdict.NOT_TESTABLE: "–",
}


@dataclass(frozen=True, slots=True, repr=False)
class Decision:
    """A claim, what was measured here, and the verdict."""

    id: str
    lesson: str  # that owns the claim, two digits
    says: str
    quantity: str | None  # None for a text claim
    where: str  # the machine that the claim needs
    verdict: Verdict
    expected: tuple[Verdict, ...]  # by the ledger, of this kind of machine; empty where the quantity is predicted
    as_expected: bool
    value: float | None  # in the unit of the quantity; None: not measured
    interval: tuple[float, float] | None  # in the same unit; None: an exact count, or a single measurement
    threshold: str  # the rule in words
    guide: Guide
    reason: str | None  # the ledger's, where a claim is expected not to hold
    missing: str | None  # what is lacking here to measure it
    note: str  # the lesson's own
    rehearsed: bool = False  # whether the machine computes nothing, see Machine.rehearsed
    since: str | None = None  # with which libraries it came out otherwise, where the library matrix saw that
    predicted: tuple[float, float] | None = None  # what other measurements of this run let expect, in the same unit
    predicted_from: str | None = None  # which these are

    def to_dict(self) -> dict:
        """Types as JSON has them; `guide` becomes a table of source, value, text and hardware."""
        return json.loads(json.dumps(asdict(self)))

    def headline(self) -> str:
        """The verdict with its sign, and what the ledger expected where that differs."""
        words = f"{SIGNS[self.verdict]} {self.verdict}"
        if self.rehearsed and self.verdict is not Verdict.NOT_TESTABLE:
            words += " (rehearsed)"
        elif self.verdict is Verdict.REFUTED:
            words += ": not reproduced on this machine"
        return words if self.as_expected else f"{words} (unexpected: {expectation_text(self.expected, self.predicted)})"

    def measured(self) -> str:
        """The value with its interval, or "not measured"."""
        return number_text(self.value) + (f" ({interval_text(self.interval)})" if self.interval else "")

    def guide_text(self) -> str:
        """The guides' figure with its source and its hardware, or that there is none."""
        value = [] if self.guide.value is None else [number_text(self.guide.value)]
        figure = ": ".join([*value, self.guide.text or "no figure"])
        return f"{figure} ({'; '.join(filter(None, (self.guide.source, self.guide.hardware)))})"

    def rows(self) -> list[tuple[str, str]]:
        """What is shown below the statement, as (name, text); the reason only where the claim does not simply hold."""
        finding = self.verdict is not Verdict.HOLDS or not self.as_expected
        rows = {
            "measured": self.quantity and self.measured(),
            "predicted": self.predicted and f"{interval_text(self.predicted)} on this machine: {self.predicted_from}",
            "quantity": self.quantity,
            "holds if": self.threshold,
            "guide": self.guide_text(),
            "missing": self.missing,
            "why": self.reason if finding and self.verdict is not Verdict.NOT_TESTABLE else None,
            "since": self.since if self.verdict is not Verdict.NOT_TESTABLE else None,
            "note": self.note,
        }
        return [(name, text) for name, text in rows.items() if text]

    def __repr__(self) -> str:
        rows = [f"  {name:<9} {text}" for name, text in self.rows()]
        return "\n".join([f"{self.headline()} [{self.id}]", f"  {self.says}", *rows])

    def _repr_html_(self) -> str:
        return template("claims.html.j2").module.decision(self)


@dataclass(frozen=True, slots=True, repr=False)
class Scoreboard:
    """Every decision of a lesson, and what keeps the lesson from passing."""

    title: str
    decisions: Sequence[Decision]
    problems: Sequence[str]  # one line each

    def counts(self) -> str:
        """How many claims have which verdict, e.g. "✓ 3 holds · ✗ 1 refuted"."""
        number = Counter(decision.verdict for decision in self.decisions)
        parts = [f"{sign} {number[verdict]} {verdict}" for verdict, sign in SIGNS.items() if number[verdict]]
        rehearsed = ["a rehearsal: no kernel computed"] if any(d.rehearsed for d in self.decisions) else []
        return " · ".join([*(parts or ["no claim was checked"]), *rehearsed])

    def __repr__(self) -> str:
        rows = [f"  {d.headline()} [{d.id}] {d.measured()}" for d in self.decisions]
        return "\n".join([self.title, self.counts(), *rows, *(f"  warning: {text}" for text in self.problems)])

    def _repr_html_(self) -> str:
        return template("claims.html.j2").module.scoreboard(self)


class NotReproduced(Exception):
    """A strict lesson did not give the verdicts that the ledger expects."""


# The decisions of this kernel, by lesson and claim. A check does not say which lesson it belongs to: its decision
# stands under None until the next `finish` files it under that lesson. So a notebook that is run twice replaces its
# decisions and never doubles them, and a second lesson in the same kernel is not charged with those of the first.
_decided: dict[str | None, dict[str, Decision]] = {}


def check(
    id: str,
    value: float | Ratio | None = None,
    *,
    predicted: tuple[float, float] | Ratio | None = None,
    missing: str | None = None,
    note: str = "",
) -> Decision:
    """Decide a claim of the ledger by what was measured here.

    The verdict comes from the value alone. Whether it is the expected one: by the ledger for this kind of machine; or,
    where the claim is `predicted`, by whether value and prediction, with their intervals, agree.

    Args:
        id: the claim.
        value: its quantity, a number or a Ratio (value, low, high). Where it is unknown, as after a run that failed,
            the claim is "not testable here".
        predicted: (low, high) of the quantity as it follows from other measurements of this run, for a claim that the
            ledger calls `predicted`; a Ratio that is unknown predicts nothing.
        missing: what is lacking here to measure it, e.g. "needs root to shape a link".
        note: whatever else the reader should see.

    Raises:
        ValueError: an unknown id, no value where one can be measured, a value that is no number, or no prediction
            where the ledger asks for one.
    """
    ledger = load()
    if id not in ledger:
        raise ValueError(f"no claim {id!r} in the ledger. {nearest_text(str(id), ledger)}")
    claim, machine = ledger[id], hardware.this_machine()
    met, lacking = hardware.supports(claim.where)
    if met and machine.rehearsed and claim.decided_by != "memory":
        what = "is no time" if claim.decided_by == "time" else "are no values"
        value, missing = None, f"a rehearsal: no kernel computes, so there {what}"
    number, interval, why_unknown = _measurement(id, value)
    range_, why_unpredicted = _prediction(claim, predicted, measured=met and number is not None and not missing)
    missing = missing or why_unknown
    if met and not missing and number is None:
        if not machine.rehearsed:
            what = f"pass {claim.quantity}; or missing='needs ...' and why"
            raise ValueError(f"claim {id!r} can be measured here: {what}")
        missing = "a rehearsal, and it was not measured"
    verdict = decide(claim, interval or number, met and not missing)
    reasons = (claim.reason, claim.since and f"since: {claim.since}", claim.thread)
    decision = Decision(
        **{name: getattr(claim, name) for name in ("id", "lesson", "says", "quantity", "where", "guide")},
        verdict=verdict,
        expected=(),
        as_expected=False,
        value=number,
        interval=interval,
        threshold=claim.threshold_text(),
        reason=" · ".join(filter(None, reasons)) or None,
        missing=(missing or None) if met else lacking,
        note=str(note),
        rehearsed=machine.rehearsed,
        since=recorded_since().get(id),
        predicted=range_,
        predicted_from=why_unpredicted or claim.predicted,
    )
    decision = _judged(decision, claim, choose_profile("auto", machine).name)
    _decided.setdefault(None, {})[id] = decision
    return decision


def decisions() -> list[Decision]:
    """The decisions of this kernel, in the order in which their claims were first checked."""
    return [*{id: decision for made in _decided.values() for id, decision in made.items()}.values()]


def reset() -> None:
    """Forget every decision, as a fresh kernel would."""
    _decided.clear()


def finish(lab: "Lab") -> None:
    """Close a lesson: show its scoreboard, write `<lab.out>/<lab.lesson>.json` if asked for, judge it if strict.

    Judged is by the lab's profile: a lesson may run a smaller one than its machine could hold.

    Raises:
        ValueError: results are to be written, and the lab has no lesson to name them after.
        NotReproduced: if lab.strict and a verdict is not an expected one, a claim of the lesson was not checked, one of
            another lesson was, or nothing was checked. The file is written all the same.
    """
    from IPython.display import display

    if lab.out and not lab.lesson:
        raise ValueError("results are kept under the lesson's name: make the lab with Lab(lesson='05_my_lesson', ...)")
    name, ledger, rehearsed = lab.lesson or "", load(), hardware.this_machine().rehearsed
    owned = [id for id, claim in ledger.items() if claim.lesson == name[:2]]
    decided = _decided.setdefault(name, {})
    decided |= _decided.get(None, {})
    for id in owned if rehearsed else ():
        if id not in decided:  # the statement needed values, and the claim was left out with it
            check(id, missing="a rehearsal: its cell needs values")
    decided |= _decided.pop(None, {})
    for id, one in decided.items():
        decided[id] = _judged(one, ledger[id], lab.profile.name)
    made, date = [*decided.values()], datetime.now(UTC).isoformat(timespec="seconds")
    rows = [decision.to_dict() for decision in made]
    problems = unexpected([claim_row(name, row) for row in rows])
    problems += [f"{id}: belongs to this lesson and was not checked" for id in owned if id not in decided]
    problems += [f"{d.id}: belongs to lesson {d.lesson}, not to this one" for d in made if d.lesson != name[:2]]
    if not made and name[:2] not in LESSONS_WITHOUT_CLAIMS:
        problems.append("nothing was checked: call claims.check before claims.finish")
    versions = [f"{name} {lab.versions[name]}" for name in ("torch", "transformers") if lab.versions.get(name)]
    title = " · ".join(filter(None, (lab.lesson, lab.machine.name, ", ".join(versions), date)))
    display(Scoreboard(title, made, problems))
    if not rehearsed:  # the journal is the learner's, of what was measured
        learner_log.finished(lab, {decision.id: decision.verdict for decision in made})
    if lab.out:
        content = {"schema": 1, "lesson": lab.lesson, "profile": lab.profile.name, "machine": lab.machine.to_dict()}
        content |= {"versions": dict(lab.versions), "date": date, "claims": rows}
        content |= {"runs": [run.to_dict() for run in lab.runs], "complete": True}
        write_whole(Path(lab.out) / f"{lab.lesson}.json", json.dumps(content, indent=1))
    if lab.strict and problems:
        raise NotReproduced("; ".join(problems))


def _measurement(id: str, value: float | Ratio | None) -> tuple[float | None, tuple[float, ...] | None, str | None]:
    """What was passed to a check, as (number, interval if it has one, why it is unknown)."""
    given = [value.value, value.low, value.high] if hasattr(value, "low") else [value]
    unknown = [part.why for part in given if isinstance(part, Unknown)]
    if value is None or unknown:
        return None, None, unknown[0] if unknown else None
    try:
        numbers = [math.nan if isinstance(part, bool | str) else float(part) for part in given]
    except (TypeError, ValueError, RuntimeError):  # what None, an array and a tensor raise
        numbers = [math.nan]
    if any(map(math.isnan, numbers)) or (len(numbers) == 3 and numbers[1] > numbers[2]):
        hint = "pass a number or a Ratio with its interval; if it cannot be measured here, missing='needs ...'"
        raise ValueError(f"claim {id!r}: {value!r} is no measurement; {hint}")
    return numbers[0], tuple(numbers[1:]) or None, None


def _prediction(claim: Claim, predicted: tuple[float, float] | Ratio | None, measured: bool) -> tuple:
    """What was predicted, as ((low, high) or None, why it is not known)."""
    if not claim.predicted:
        if predicted is not None:
            raise ValueError(f"claim {claim.id!r} is not `predicted` in the ledger: leave predicted= out")
        return None, None
    if predicted is None:
        if measured:
            raise ValueError(f"claim {claim.id!r}: pass predicted=(low, high), {claim.predicted}")
        return None, None
    ends = (predicted.low, predicted.high) if isinstance(predicted, Ratio) else tuple(predicted)
    for end in ends:
        if isinstance(end, Unknown):
            return None, f"no prediction: {end.why}"
    low, high = map(float, ends)
    if not low <= high:  # nan is no prediction either
        raise ValueError(f"claim {claim.id!r}: predicted={predicted!r} is no range (low, high)")
    return (low, high), None


def _judged(decision: Decision, claim: Claim, profile: str) -> Decision:
    """The decision with what is expected of this kind of machine under this profile, and whether it came out so.

    What the machine lacks is always excused, and so is what a rehearsal cannot measure.
    """
    kind = "cuda" if hardware.supports("cuda")[0] else "cpu"
    expected = claim.expected.get(kind, () if claim.predicted else (Verdict.NOT_TESTABLE,))
    if kind == "cuda" and profile in GPU_PROFILES:
        expected = claim.expected.get(profile, expected)
    untested = decision.verdict is Verdict.NOT_TESTABLE
    if decision.predicted and not untested:
        (low, high), (least, most) = decision.predicted, decision.interval or (decision.value, decision.value)
        as_expected = least <= high and low <= most
    else:
        as_expected = decision.verdict in expected
    excused = not hardware.supports(claim.where)[0] or (decision.rehearsed and untested)
    return replace(decision, expected=expected, as_expected=excused or as_expected)
