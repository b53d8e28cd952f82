"""Claims as a lesson uses them: `check` decides one by what was measured here, `finish` closes the lesson.

The claims stand in the ledger (claims.toml). A lesson measures the number that decides a claim and passes it on.
Notable: a refuted claim is a finding, not an error. What fails a strict run is a verdict that the ledger does not
expect, or a claim that nobody checked. In a rehearsal (see `Machine.rehearsed`) only memory is as it would be on the
machine that is rehearsed, so only claims about memory are decided, and marked.
"""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from perf_helpers.course import journal
from perf_helpers.course.decisions import Decision, Scoreboard
from perf_helpers.course.ledger import LESSONS_WITHOUT_CLAIMS, Claim, load
from perf_helpers.course.verdicts import against_the_ledger, decide, measurement
from perf_helpers.lab import hardware
from perf_helpers.lab.profiles import choose_profile
from perf_helpers.lab.runs import Ratio
from perf_helpers.lab.store import write_whole
from perf_helpers.texts import nearest_text

if TYPE_CHECKING:
    from perf_helpers.lab.lab import Lab

__all__ = ["NotReproduced", "check", "decide", "decisions", "finish", "load", "reset"]

# Where no kernel computes, a claim is decided by what needs none.
_NOT_IN_A_REHEARSAL = {
    "time": "a rehearsal: no kernel computes, so there is no time",
    "values": "a rehearsal: no kernel computes, so there are no values",
}


class NotReproduced(Exception):
    """A strict lesson did not give the verdicts that the ledger expects."""


class _Decided:
    """The decisions of this kernel, by lesson and claim.

    A check does not say which lesson it belongs to: its decision is open until the next `finish` files it under that
    lesson. So a notebook that is run twice replaces its decisions and never doubles them, and a second lesson in the
    same kernel is not charged with those of the first.
    """

    def __init__(self):
        self.open: dict[str, Decision] = {}  # by claim, since a lesson was last finished
        self.filed: dict[str, dict[str, Decision]] = {}  # by lesson and claim

    def file(self, lesson: str) -> dict[str, Decision]:
        """All decisions of a lesson, the open ones included, which are filed there. A change made in them is kept."""
        filed = self.filed.setdefault(lesson, {})
        filed |= self.open
        self.open = {}
        return filed


_decided = _Decided()


def check(id: str, value: float | Ratio | None = None, *, missing: str | None = None, note: str = "") -> Decision:
    """Decide a claim of the ledger by what was measured here.

    Args:
        id: the claim.
        value: its quantity, a number or a Ratio (value, low, high). Where it is unknown, as after a run that failed,
            the claim is "not testable here".
        missing: what is lacking here to measure it, e.g. "needs root to shape a link".
        note: whatever else the reader should see.

    Raises:
        ValueError: an unknown id, no value where one can be measured, or a value that is no number.
    """
    ledger = load()
    if id not in ledger:
        raise ValueError(f"no claim {id!r} in the ledger. {nearest_text(str(id), ledger)}")
    claim, machine = ledger[id], hardware.this_machine()
    met, lacking = hardware.supports(claim.where)
    if met and machine.rehearsed and claim.decided_by in _NOT_IN_A_REHEARSAL:
        value, missing = None, _NOT_IN_A_REHEARSAL[claim.decided_by]
    number, interval, why_unknown = measurement(id, value)
    missing = missing or why_unknown
    if met and not missing and number is None:
        if not machine.rehearsed:
            hint = f"pass {claim.quantity}; or missing='needs ...' and why"
            raise ValueError(f"claim {id!r} can be measured here: {hint}")
        missing = "a rehearsal, and it was not measured"
    verdict = decide(claim, interval or number, met and not missing)
    reasons = (claim.reason, claim.since and f"since: {claim.since}", claim.thread)
    decision = Decision(
        **{name: getattr(claim, name) for name in ("id", "lesson", "says", "quantity", "where", "guide")},
        **against_the_ledger(claim, verdict, choose_profile("auto", machine).name, machine.rehearsed),
        verdict=verdict,
        value=number,
        interval=interval,
        threshold=claim.threshold_text(),
        reason=" · ".join(filter(None, reasons)) or None,
        missing=(missing or None) if met else lacking,
        note=str(note),
        rehearsed=machine.rehearsed,
    )
    _decided.open[id] = decision
    return decision


def decisions() -> list[Decision]:
    """The decisions of this kernel, in the order in which their claims were first checked."""
    merged = {}
    for lesson in (*_decided.filed.values(), _decided.open):
        merged |= lesson
    return [*merged.values()]


def reset() -> None:
    """Forget every decision, as a fresh kernel would."""
    _decided.open, _decided.filed = {}, {}


def finish(lab: "Lab") -> None:
    """Close a lesson: show its scoreboard, write `<lab.out>/<lab.lesson>.json` if asked for, judge it if strict.

    Judged is by the lab's profile: a lesson may run a smaller one than its machine could hold.

    Raises:
        ValueError: results are to be written, and the lab has no lesson to name them after.
        NotReproduced: if lab.strict and a verdict is not an expected one, a claim of the lesson was not checked, one of
            another lesson was, or nothing was checked. The file is written all the same: a failed lesson has its
            results.
    """
    from IPython.display import display

    if lab.out and not lab.lesson:
        raise ValueError("results are kept under the lesson's name: make the lab with Lab(lesson='05_my_lesson', ...)")
    name, ledger, rehearsed = lab.lesson or "", load(), hardware.this_machine().rehearsed
    lesson = name[:2]
    if rehearsed:  # a claim whose statement needed values was left out with it
        decided = _decided.file(name)
        for claim in ledger.values():
            if claim.lesson == lesson and claim.id not in decided:
                check(claim.id, missing="a rehearsal: its cell needs values")
    decided = _decided.file(name)
    for id, decision in decided.items():
        expected = against_the_ledger(ledger[id], decision.verdict, lab.profile.name, decision.rehearsed)
        decided[id] = replace(decision, **expected)
    made, date = [*decided.values()], datetime.now(UTC).isoformat(timespec="seconds")
    problems = _problems(lesson, made, ledger)
    versions = [f"{name} {lab.versions[name]}" for name in ("torch", "transformers") if lab.versions.get(name)]
    title = " · ".join(filter(None, (lab.lesson, lab.machine.name, ", ".join(versions), date)))
    display(Scoreboard(title, tuple(made), tuple(problems)))
    if not rehearsed:  # the journal is the learner's, of what was measured
        journal.finished(lab, {decision.id: decision.verdict for decision in made})
    if lab.out:
        write_whole(Path(lab.out) / f"{lab.lesson}.json", json.dumps(_results(lab, date, made), indent=1))
    if lab.strict and problems:
        raise NotReproduced("; ".join(problems))


def _results(lab: "Lab", date: str, made: list[Decision]) -> dict:
    """The content of a lesson's own file, from which the course makes results.json."""
    return {
        "schema": 1,
        "lesson": lab.lesson,
        "profile": lab.profile.name,
        "machine": lab.machine.to_dict(),
        "versions": dict(lab.versions),
        "date": date,
        "claims": [decision.to_dict() for decision in made],
        "runs": [run.to_dict() for run in lab.runs],
        "complete": True,
    }


def _problems(lesson: str, made: list[Decision], ledger: dict[str, Claim]) -> list[str]:
    """What keeps a lesson (its two digits) from passing, one line each."""
    problems, checked = [], {decision.id for decision in made}
    for decision in made:
        if not decision.as_expected:
            why = f" ({decision.missing})" if decision.missing else ""
            problems.append(f"{decision.id}: {decision.verdict}, expected {' or '.join(decision.expected)}{why}")
    owned = [claim.id for claim in ledger.values() if claim.lesson == lesson]
    problems += [f"{id}: belongs to this lesson and was not checked" for id in owned if id not in checked]
    problems += [f"{d.id}: belongs to lesson {d.lesson}, not to this one" for d in made if d.lesson != lesson]
    if not made and lesson not in LESSONS_WITHOUT_CLAIMS:
        problems.append("nothing was checked: call claims.check before claims.finish")
    return problems
