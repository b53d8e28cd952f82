"""The learner's journal: guesses, answers, exercises and lessons, in one file on this machine.

Notable: the order of the lines is the order of events. A guess counts if its line stands before the one that revealed
the measurement, whatever the clocks say.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from os import PathLike
from typing import Any

from perf_helpers.lab import Lab
from trainmem.records import Record, Store, now

STATUSES = ("not attempted", "wrong", "right")  # of an exercise, from the least
# What a line of each kind holds, at least.
KINDS = {
    "guess": {"guess", "unit"},
    "revealed": {"guess", "measured", "estimate", "unit"},
    "question": {"choice", "right"},
    "exercise": {"status"},
    "board": {"peak_bytes", "arguments"},  # a recipe that met a challenge's target
    "finished": {"claims"},  # of a lesson that ran to its end: the verdict of each claim that was checked, by its id
}


@dataclass(frozen=True, slots=True)
class Entry(Record):
    """One thing that the learner did; ValueError for an unknown kind and for what is missing in the content."""

    kind: str  # one of KINDS
    lesson: str  # the notebook's name, e.g. "05_gradient_accumulation"
    key: str  # which guess, question, exercise or challenge of the lesson
    content: dict[str, Any]  # at least what KINDS says for the kind
    date: str  # ISO 8601, UTC

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: choose from {', '.join(KINDS)}")
        if missing := ", ".join(sorted(KINDS[self.kind] - self.content.keys())):
            raise ValueError(f"content={self.content!r}: for kind={self.kind!r} also give {missing}")

    @property
    def about(self) -> tuple[str, str, str]:
        """Which guess, question, exercise or challenge of which lesson, and what of it."""
        return self.kind, self.lesson, self.key


class Journal(Store):
    """Entries in a file of JSON lines, appended and read as a lab's runs are."""

    def __init__(self, path: str | PathLike):
        super().__init__(path, Entry)

    def reset(self) -> None:
        """Forget everything, e.g. before the next learner sits down at a workshop's machine."""
        self.path.unlink(missing_ok=True)


def of(lab: Lab) -> Journal:
    """The journal beside the lab's runs: in the user's cache folder, or in `lab.out`."""
    return Journal(lab.store.path.with_name("journal.jsonl"))


def keep(lab: Lab, kind: str, key: str = "", **content) -> None:
    """Append an entry (`Entry` says what it needs) under the lab's lesson; where the file cannot be written, say so."""
    journal = of(lab)
    try:
        journal.append(Entry(kind, lab.lesson, key, content, now()))
    except OSError as error:
        remedy = "Set PERF_HELPERS_HOME to a folder that can be written to."
        print(f"Your answer was not saved in {journal.path}: {error.strerror}. {remedy}", file=sys.stderr)


def guess(entries: Sequence[Entry], lesson: str, key: str) -> float | None:
    """The latest guess, or None."""
    return _latest(entries, ("guess", lesson, key), "guess")


def choice(entries: Sequence[Entry], lesson: str, key: str) -> str | None:
    """The latest choice in a question, or None."""
    return _latest(entries, ("question", lesson, key), "choice")


def counted_guess(entries: Sequence[Entry], lesson: str, key: str) -> float | None:
    """The latest guess that was committed before the measurement was revealed for the first time, or None."""
    before = takewhile(lambda entry: entry.about != ("revealed", lesson, key), entries)
    return guess([*before], lesson, key)


def _latest(entries: Sequence[Entry], about: tuple[str, str, str], field: str) -> Any:
    return next((entry.content[field] for entry in reversed(entries) if entry.about == about), None)


def off(guess: float, measured: float) -> float:
    """How far a guess is from what was measured, as a share of the latter (around 0: the distance itself)."""
    return abs(guess - measured) / (abs(measured) or 1)


@dataclass(frozen=True, slots=True)
class Scored:
    """A guess that counted, beside what was measured."""

    lesson: str
    key: str
    unit: str  # of the guess, what was measured, and the estimate
    guess: float
    measured: float
    estimate: float | None  # None where the lesson has none
    error: float  # of the guess, see `off`
    date: str  # on which the measurement was revealed


def history(entries: Sequence[Entry]) -> list[Scored]:
    """Every guess that counted, in the order in which the measurements were revealed; each question once."""
    first: dict[tuple, Entry] = {}
    for entry in entries:
        if entry.kind == "revealed":
            first.setdefault(entry.about, entry)
    scored = []
    for entry in first.values():
        facts = {name: entry.content[name] for name in ("unit", "guess", "measured", "estimate")}
        if facts["guess"] is not None:
            error = off(facts["guess"], facts["measured"])
            scored.append(Scored(entry.lesson, entry.key, **facts, error=error, date=entry.date))
    return scored


@dataclass(slots=True)
class Progress:
    """A lesson as far as the learner has come."""

    finished: str | None = None  # the date on which it last ran to its end
    claims: dict[str, str] = field(default_factory=dict)  # the verdicts it gave then, by claim
    errors: dict[str, float | None] = field(default_factory=dict)  # by key: of the guess that counted; None: no guess
    exercises: dict[str, str] = field(default_factory=dict)  # by key: the best status
    questions: dict[str, bool | None] = field(default_factory=dict)  # by key: is the first choice right? None: open


def progress(entries: Sequence[Entry]) -> dict[str, Progress]:
    """How far the learner has come in each lesson of which anything is known, in the order of their names."""
    lessons: dict[str, Progress] = {}
    for entry in entries:
        lesson, content = lessons.setdefault(entry.lesson, Progress()), entry.content
        match entry.kind:
            case "finished":
                lesson.finished, lesson.claims = entry.date, content["claims"]
            case "revealed" if entry.key not in lesson.errors:
                said, measured = content["guess"], content["measured"]
                lesson.errors[entry.key] = None if said is None else off(said, measured)
            case "exercise":
                statuses = (lesson.exercises.get(entry.key, "not attempted"), content["status"])
                lesson.exercises[entry.key] = max(statuses, key=STATUSES.index)
            case "question":
                if lesson.questions.get(entry.key) is None:
                    lesson.questions[entry.key] = content["right"]
    return dict(sorted(lessons.items()))
