"""The claims ledger and its verdicts.

A claim is written once, in claims.toml: what the guides say, which number decides it, and from where on it holds. A
lesson measures that number and calls `check`; the verdict follows from the ledger and the number alone. Notable: a
refuted claim is a finding, not an error. What fails a strict run is a verdict that the ledger does not expect, or a
claim that nobody checked. In a rehearsal (see `Machine.rehearsed`) only memory is as it would be on the machine that is
rehearsed, so only claims about memory are decided, and marked.
"""

import difflib
import json
import math
import re
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from html import escape
from pathlib import Path

from perf_helpers.course import journal
from perf_helpers.lab import hardware
from perf_helpers.lab.store import write_whole
from perf_helpers.lab.task import PROFILES, choose_profile
from perf_helpers.unknown import Unknown

LEDGER = Path(__file__).with_name("claims.toml")
WHERE = ("any", "cuda", "sm80", "gpus2", "cpu-bf16", "cuda-or-cpu-bf16", "text")
DECIDED_BY = ("memory", "time", "values")
GPU_PROFILES = tuple(name for name in PROFILES if name != "cpu")
LESSONS_WITHOUT_CLAIMS = ("20",)  # the only ones that may finish without having checked anything


class Verdict(StrEnum):
    HOLDS = "holds"
    REFUTED = "refuted"
    TOO_SMALL = "too small to tell"
    NOT_TESTABLE = "not testable here"


class NotReproduced(Exception):
    """A strict lesson did not give the verdicts that the ledger expects."""


@dataclass(frozen=True, slots=True)
class Guide:
    """Where a statement comes from; `value` in the unit of the claim's quantity, None where the guides give none."""

    source: str
    value: float | None = None
    text: str | None = None
    hardware: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the ledger; claims.toml explains the fields.

    `expected` maps "cpu", "cuda", and the profiles of GPUs that differ from "cuda", to accepted verdicts.
    """

    id: str
    section: str
    lesson: str
    says: str
    where: str
    guide: Guide
    quantity: str | None = None
    decided_by: str | None = None
    direction: str | None = None
    threshold: float | tuple[float, float] | None = None
    tolerance: float | None = None
    refuted_from: float | None = None
    expected: dict[str, tuple[Verdict, ...]] = field(default_factory=dict)
    reason: str | None = None
    since: str | None = None
    thread: str | None = None

    def threshold_text(self) -> str:
        """The rule in words, e.g. "below 0.9, refuted from 1"; empty for a text claim."""
        if self.direction == "between":
            return "between {} and {}".format(*map(_number, self.threshold))
        if self.direction == "equal":
            margin = f"{100 * self.tolerance:g} %" if self.threshold else f"{self.tolerance:g}"
            return f"equal to {_number(self.threshold)}" + (f", within {margin}" if self.tolerance else "")
        refuted = "" if self.refuted_from is None else f", refuted from {_number(self.refuted_from)}"
        return f"{self.direction} {_number(self.threshold)}{refuted}" if self.direction else ""


def load(path: str | Path | None = None) -> dict[str, Claim]:
    """Read the ledger (claims.toml by default) and check all of it.

    Raises ValueError naming the claim and the field that is wrong.
    """
    claims: dict[str, Claim] = {}
    for table in tomllib.loads(Path(path or LEDGER).read_text(encoding="utf-8")).get("claim", []):
        claim = _claim(table)
        if claim.id in claims:
            raise ValueError(f"claim {claim.id!r}, field 'id': written twice; give one of the two another id")
        claims[claim.id] = claim
    if not claims:
        raise ValueError(f"{path or LEDGER} holds no [[claim]] table: a ledger has at least one")
    return claims


def _claim(table: dict) -> Claim:
    """One [[claim]] table, checked field by field."""

    def need(condition, name: str, problem: str) -> None:
        if not condition:
            raise ValueError(f"claim {table.get('id', '(without id)')!r}, field {name!r}: {problem}")

    def need_fields(given: dict, kind: type, texts: list[str], prefix: str = "") -> None:
        known = [item.name for item in fields(kind)]
        for name in given:
            need(name in known, prefix + name, f"unknown; the fields are {', '.join(known)}")
        for name in texts:
            need(isinstance(given.get(name), str) and given[name].strip(), prefix + name, "write a text here")

    where, guide = table.get("where"), table.get("guide")
    measured = ["quantity", "direction"] * (where != "text")
    explained = [name for name in ("reason", "since", "thread") if name in table]
    need_fields(table, Claim, ["id", "section", "lesson", "says", "where", *measured, *explained])
    need(re.fullmatch(r"\d\d", table["lesson"]), "lesson", "two digits are needed, as in '05'")
    need(where in WHERE, "where", f"{where!r} is none of {', '.join(WHERE)}")
    need(isinstance(guide, dict), "guide", "write guide.source = '...', and guide.value where there is a figure")
    need_fields(guide, Guide, ["source", *["text", "hardware"] * ("value" in guide)], "guide.")
    need(_is_number(guide.get("value", 0)), "guide.value", "a finite number is needed, or none at all")
    if where == "text":
        for name in ("quantity", "decided_by", "direction", "threshold", "tolerance", "refuted_from", "expected"):
            need(name not in table, name, "a text claim has nothing to measure; leave it out")
        return Claim(**table | {"guide": Guide(**guide)})

    need(table.get("decided_by") in DECIDED_BY, "decided_by", f"{', '.join(DECIDED_BY)}: one of these is needed")
    direction, threshold, limit = (table.get(name) for name in ("direction", "threshold", "refuted_from"))
    need(direction in ("below", "above", "between", "equal"), "direction", "below, above, between or equal is needed")
    if direction == "between":
        pair = isinstance(threshold, list) and len(threshold) == 2 and all(map(_is_number, threshold))
        need(pair and threshold[0] < threshold[1], "threshold", "between needs [low, high] with low < high")
        threshold = tuple(threshold)
    need(direction == "between" or _is_number(threshold), "threshold", "a finite number is needed")
    tolerance = table.get("tolerance", -1)
    need(direction == "equal" or tolerance == -1, "tolerance", "only equal takes one")
    need(direction != "equal" or (_is_number(tolerance) and tolerance >= 0), "tolerance", "equal needs one, 0 or more")
    if limit is not None:
        need(direction in ("below", "above"), "refuted_from", "only below and above take one")
        beyond = _is_number(limit) and (limit >= threshold if direction == "below" else limit <= threshold)
        need(beyond, "refuted_from", "a number beyond the threshold is needed, where the claim does not hold")

    expected = table.get("expected")
    kinds = ["cuda"] if where in ("cuda", "sm80", "gpus2") else ["cpu", "cuda"]
    given = isinstance(expected, dict) and set(expected) - set(GPU_PROFILES) == set(kinds)
    need(given, "expected", f"exactly {kinds} are needed; {', '.join(GPU_PROFILES)} may say otherwise for a GPU")
    for kind, verdicts in expected.items():
        known = isinstance(verdicts, list) and verdicts and all(verdict in list(Verdict) for verdict in verdicts)
        need(known, f"expected.{kind}", f"a list is needed, out of: {', '.join(Verdict)}")
    expected = {kind: tuple(map(Verdict, verdicts)) for kind, verdicts in expected.items()}
    finding = any(Verdict.REFUTED in verdicts for verdicts in expected.values())
    need("reason" in table or not finding, "reason", "needed where a claim is expected to be refuted")
    return Claim(**table | {"guide": Guide(**guide), "threshold": threshold, "expected": expected})


def decide(claim: Claim, value: float | tuple[float, float] | None, machine_supports: bool) -> Verdict:
    """The verdict on one measured value, a number or an interval (low, high) in the unit of `claim.quantity`.

    The claim holds if the whole interval satisfies the rule, is refuted if the whole interval lies in the refuted
    region, and is too small to tell otherwise. Without the machine it needs, nothing is decided whatever the value.
    """
    if not machine_supports or claim.where == "text":
        return Verdict.NOT_TESTABLE
    low, high = value if isinstance(value, tuple) else (value, value)
    threshold = claim.threshold
    refuted_from = threshold if claim.refuted_from is None else claim.refuted_from
    if claim.direction == "below":
        holds, refuted = high < threshold, low >= refuted_from
    elif claim.direction == "above":
        holds, refuted = low > threshold, high <= refuted_from
    else:
        if claim.direction == "equal":
            margin = claim.tolerance * (abs(threshold) or 1)  # relative, but absolute around 0
            threshold = threshold - margin, threshold + margin
        least, most = threshold
        holds, refuted = least <= low and high <= most, high < least or most < low
    return Verdict.HOLDS if holds else Verdict.REFUTED if refuted else Verdict.TOO_SMALL


_SIGNS = {  # a verdict is never told by colour alone: its sign and its words go with it
    Verdict.HOLDS: ("✓", "var(--jp-success-color1, #388e3c)"),
    Verdict.REFUTED: ("✗", "var(--jp-error-color1, #d9534f)"),
    Verdict.TOO_SMALL: ("≈", "var(--jp-warn-color1, #c98a00)"),
    Verdict.NOT_TESTABLE: ("–", "var(--jp-border-color1, #8a8a8a)"),
}


def _box(verdict: Verdict, label: str, content: str) -> str:
    """A frame with a coloured edge; text and background stay those of the theme, light or dark."""
    style = f"border:1px solid var(--jp-border-color2, #8886);border-left:5px solid {_SIGNS[verdict][1]}"
    style += ";padding:.5em .8em;margin:.4em 0;overflow-x:auto"
    return f'<div role="group" aria-label="{escape(label)}" style="{style}">{content}</div>'


@dataclass(frozen=True, slots=True, repr=False)
class Decision:
    """A claim, what was measured here, and the verdict. Displays itself in a notebook and in a terminal."""

    id: str
    lesson: str
    says: str
    quantity: str | None
    where: str
    verdict: Verdict
    expected: tuple[Verdict, ...]
    as_expected: bool
    value: float | None
    interval: tuple[float, float] | None
    threshold: str
    guide: Guide
    reason: str | None
    missing: str | None
    note: str
    rehearsed: bool = False

    def to_dict(self) -> dict:
        """Types as JSON has them; `guide` becomes a table of source, value, text and hardware."""
        plain = {"verdict": str(self.verdict), "expected": [str(verdict) for verdict in self.expected]}
        return asdict(self) | plain | {"interval": list(self.interval) if self.interval else None}

    def headline(self) -> str:
        """The verdict with its sign, and what the ledger expected where that differs."""
        words = f"{_SIGNS[self.verdict][0]} {self.verdict}"
        if self.rehearsed:
            words += " (rehearsed)" * (self.verdict is not Verdict.NOT_TESTABLE)
        elif self.verdict is Verdict.REFUTED:
            words += ": not reproduced on this machine"
        return words if self.as_expected else f"{words} (unexpected, the ledger expects: {' or '.join(self.expected)})"

    def measured(self) -> str:
        """The value with its interval, or "not measured"."""
        interval = " ({} to {})".format(*map(_number, self.interval)) if self.interval else ""
        return "not measured" if self.value is None else _number(self.value) + interval

    def guide_text(self) -> str:
        """The guides' figure with its source and its hardware, or that there is none."""
        value = [] if self.guide.value is None else [_number(self.guide.value)]
        figure = ": ".join([*value, self.guide.text or "no figure"])
        return f"{figure} ({'; '.join(filter(None, (self.guide.source, self.guide.hardware)))})"

    def _rows(self) -> list[tuple[str, str]]:
        finding = self.verdict is not Verdict.HOLDS or not self.as_expected
        rows = {
            "measured": self.quantity and self.measured(),
            "quantity": self.quantity,
            "holds if": self.threshold,
            "guide": self.guide_text(),
            "missing": self.missing,
            "why": self.reason if finding and self.verdict is not Verdict.NOT_TESTABLE else None,
            "note": self.note,
        }
        return [(name, text) for name, text in rows.items() if text]

    def __repr__(self) -> str:
        rows = [f"  {name:<9} {text}" for name, text in self._rows()]
        return "\n".join([f"{self.headline()} [{self.id}]", f"  {self.says}", *rows])

    def _repr_html_(self) -> str:
        rows = "".join(f"<div><b>{name}</b> {escape(text)}</div>" for name, text in self._rows())
        head = f"<strong>{escape(self.headline())}</strong> · <code>{escape(self.id)}</code>"
        content = f'{head}<div style="margin:.2em 0 .4em">{escape(self.says)}.</div><div>{rows}</div>'
        return _box(self.verdict, f"{self.id}: {self.verdict}", content)


@dataclass(frozen=True, slots=True, repr=False)
class Scoreboard:
    """Every decision of a lesson, and what keeps the lesson from passing. Displays itself as a Decision does."""

    title: str
    decisions: tuple[Decision, ...]
    problems: tuple[str, ...]

    def _counts(self) -> str:
        counts = Counter(decision.verdict for decision in self.decisions)
        found = (f"{_SIGNS[verdict][0]} {counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
        counts = " · ".join(found) or "no claim was checked"
        return counts + " · a rehearsal: no kernel computed" * any(decision.rehearsed for decision in self.decisions)

    def __repr__(self) -> str:
        rows = [f"  {d.headline()} [{d.id}] {d.measured()}" for d in self.decisions]
        return "\n".join([self.title, self._counts(), *rows, *(f"  warning: {text}" for text in self.problems)])

    def _repr_html_(self) -> str:
        def row(tag: str, *cells: str) -> str:
            opening = f'<{tag} style="text-align:left;white-space:normal">'
            return "<tr>" + "".join(f"{opening}{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        rows = (row("td", d.headline(), d.says, d.measured(), d.guide_text(), d.id) for d in self.decisions)
        table = f"<table>{row('th', 'verdict', 'the guides say', 'here', 'there', 'claim')}{''.join(rows)}</table>"
        problems = "".join(f"<div><b>warning</b> {escape(text)}</div>" for text in self.problems)
        content = f"<strong>{escape(self.title)}</strong><div>{self._counts()}</div>{table * bool(self.decisions)}"
        return _box(Verdict.REFUTED if self.problems else Verdict.HOLDS, "scoreboard", content + problems)


_decisions: dict[str, Decision] = {}  # of this kernel, by id: running a notebook twice replaces, never doubles


# Where no kernel computes, a claim is decided by what needs none.
_NOT_IN_A_REHEARSAL = {
    "time": "a rehearsal: no kernel computes, so there is no time",
    "values": "a rehearsal: no kernel computes, so there are no values",
}


def check(id: str, value=None, *, missing: str | None = None, note: str = "") -> Decision:
    """Decide a claim of the ledger by what was measured here.

    id: the claim. value: its quantity, a number or a Ratio (value, low, high). Where it is unknown, as after a run that
    failed, the claim is "not testable here". missing: what is lacking here to measure it, e.g. "needs root to shape a
    link". note: whatever else the reader should see.

    Raises ValueError for an unknown id, for no value where one can be measured, and for a value that is no number.
    """
    ledger = load()
    if id not in ledger:
        nearest = difflib.get_close_matches(str(id), ledger, n=1, cutoff=0)[0]
        raise ValueError(f"no claim {id!r} in the ledger; the nearest is {nearest!r}")
    claim, rehearsed = ledger[id], _rehearsed()
    met, lacking = hardware.supports(claim.where)
    if met and rehearsed and claim.decided_by in _NOT_IN_A_REHEARSAL:
        value, missing = None, _NOT_IN_A_REHEARSAL[claim.decided_by]
    number, interval, why = _measured(id, value)
    missing = missing or why
    if met and not missing and number is None:
        if not rehearsed:
            hint = f"pass {claim.quantity}; or missing='needs ...' and why"
            raise ValueError(f"claim {id!r} can be measured here: {hint}")
        missing = "a rehearsal, and it was not measured"
    reasons = (claim.reason, claim.since and f"since: {claim.since}", claim.thread)
    decision = Decision(
        **{name: getattr(claim, name) for name in ("id", "lesson", "says", "quantity", "where", "guide")},
        verdict=decide(claim, interval or number, met and not missing),
        expected=(),
        as_expected=False,
        value=number,
        interval=interval,
        threshold=claim.threshold_text(),
        reason=" · ".join(filter(None, reasons)) or None,
        missing=(missing or None) if met else lacking,
        note=str(note),
        rehearsed=rehearsed,
    )
    _decisions[id] = _judged(decision, claim, choose_profile("auto", hardware.this_machine()).name)
    return _decisions[id]


def _rehearsed() -> bool:
    """Whether this machine only rehearses another one: torch's CUDA build without a GPU, on which nothing computes."""
    return hardware.this_machine().rehearsed


def _judged(decision: Decision, claim: Claim, profile: str) -> Decision:
    """The decision held against what the ledger expects of this kind of machine, under this profile."""
    nothing = (Verdict.NOT_TESTABLE,)
    if hardware.supports("cuda")[0]:
        expected = claim.expected.get(profile if profile in GPU_PROFILES else "cuda") or claim.expected.get("cuda")
    else:
        expected = claim.expected.get("cpu")
    excused = not hardware.supports(claim.where)[0] or (decision.rehearsed and decision.verdict in nothing)
    as_expected = excused or decision.verdict in (expected or nothing)
    return replace(decision, expected=expected or nothing, as_expected=as_expected)


def _measured(id: str, value) -> tuple[float | None, tuple[float, float] | None, str | None]:
    """The value as (number, interval, why it is unknown): no interval for a plain number, nothing for None."""
    if value is None:
        return None, None, None
    given = [value.value, value.low, value.high] if hasattr(value, "low") else [value]
    for number in given:
        if isinstance(number, Unknown):
            return None, None, number.why
    try:
        numbers = [math.nan if isinstance(number, bool | str) else float(number) for number in given]
    except (TypeError, ValueError, RuntimeError):  # what None, an array and a tensor raise
        numbers = [math.nan]
    if any(map(math.isnan, numbers)) or (len(numbers) == 3 and numbers[1] > numbers[2]):
        hint = "pass a number or a Ratio with its interval; if it cannot be measured here, missing='needs ...'"
        raise ValueError(f"claim {id!r}: {value!r} is no measurement; {hint}")
    return numbers[0], tuple(numbers[1:]) or None, None


def decisions() -> list[Decision]:
    """The decisions of this kernel, in the order in which their claims were first checked."""
    return list(_decisions.values())


def reset() -> None:
    """Forget every decision, as a fresh kernel would."""
    _decisions.clear()


def finish(lab) -> None:
    """Close a lesson: show its scoreboard, write `<lab.out>/<lab.lesson>.json` if asked for, judge it if strict.

    Judged is by the lab's profile: a lesson may run a smaller one than its machine could hold.

    Raises NotReproduced if lab.strict and a verdict is not an expected one, a claim of the lesson was not checked, one
    of another lesson was, or nothing was checked. The file is written all the same: a failed lesson has its results.
    """
    from IPython.display import display

    if lab.out and not lab.lesson:
        raise ValueError("results are kept under the lesson's name: make the lab with Lab(lesson='05_my_lesson', ...)")
    profile, ledger = getattr(lab.profile, "name", lab.profile), load()
    if _rehearsed():  # a claim whose statement needed values was left out with it
        for claim in ledger.values():
            if claim.lesson == (lab.lesson or "")[:2] and claim.id not in _decisions:
                check(claim.id, missing="a rehearsal: its cell needs values")
    _decisions.update({id: _judged(decision, ledger[id], profile) for id, decision in _decisions.items()})
    made, date = decisions(), datetime.now(UTC).isoformat(timespec="seconds")
    problems = _problems((lab.lesson or "")[:2], made)
    versions = ", ".join(f"{name} {lab.versions[name]}" for name in ("torch", "transformers") if lab.versions.get(name))
    title = " · ".join(filter(None, (lab.lesson, lab.machine.name, versions, date)))
    display(Scoreboard(title, tuple(made), tuple(problems)))
    if not _rehearsed():  # the journal is the learner's, of what was measured
        journal.finished(lab, {decision.id: decision.verdict for decision in made})
    if lab.out:
        content = {
            "schema": 1,
            "lesson": lab.lesson,
            "profile": profile,
            "machine": lab.machine.to_dict(),
        }
        content |= {"versions": dict(lab.versions), "date": date, "claims": [decision.to_dict() for decision in made]}
        content |= {"runs": [run.to_dict() for run in lab.runs], "complete": True}
        write_whole(Path(lab.out) / f"{lab.lesson}.json", json.dumps(content, indent=1))
    if lab.strict and problems:
        raise NotReproduced("; ".join(problems))


def _problems(lesson: str, made: list[Decision]) -> list[str]:
    """What keeps a lesson (its two digits) from passing, one line each."""
    checked = {decision.id for decision in made}
    owned = [claim.id for claim in load().values() if claim.lesson == lesson]
    unexpected = [decision for decision in made if not decision.as_expected]
    problems = [
        f"{d.id}: {d.verdict}, expected {' or '.join(d.expected)}" + f" ({d.missing})" * bool(d.missing)
        for d in unexpected
    ]
    problems += [f"{id}: belongs to this lesson and was not checked" for id in owned if id not in checked]
    problems += [f"{d.id}: belongs to lesson {d.lesson}, not to this one" for d in made if d.lesson != lesson]
    if not made and lesson not in LESSONS_WITHOUT_CLAIMS:
        problems.append("nothing was checked: call claims.check before claims.finish")
    return problems


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: float) -> str:
    """Short, yet 65504 stays apart from 65535."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
