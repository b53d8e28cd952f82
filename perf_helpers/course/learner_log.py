"""The learner's journal: guesses, answers, exercises and finished lessons, in one file on this machine.

The order of the lines is the order of events. A guess counts if its line is above the line that revealed the
measurement, whatever the dates of both.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from os import PathLike
from typing import Any

from perf_helpers.lab import Lab
from trainmem.records import Record, Store, now

STATUSES = ("not attempted", "wrong", "right")  # of an exercise, the best last
# {kind of a line: the least content that it needs}
KINDS = {
    "guess": {"guess", "unit"},
    "revealed": {"guess", "measured", "estimate", "unit"},
    "question": {"choice", "right"},
    "exercise": {"status"},
    "board": {"peak_bytes", "arguments"},  # a recipe that met a challenge's target
    "finished": {"claims"},  # a lesson ran to its end; {claim id: verdict} of the checked claims
}


@dataclass(frozen=True, slots=True)
class Entry(Record):
    """One event in a learner's work, e.g. a guess: its kind, lesson, key, content and date.

    Raises:
        ValueError: the kind is unknown, or `content` lacks a value that this kind needs (see `KINDS`).
    """

    kind: str  # one of KINDS
    lesson: str  # the notebook's name, e.g. "05_gradient_accumulation"
    key: str  # names the guess, question, exercise or challenge within the lesson
    content: dict[str, Any]  # at least the keys that KINDS lists for the kind
    date: str  # ISO 8601, UTC

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: choose from {', '.join(KINDS)}")
        if missing := ", ".join(sorted(KINDS[self.kind] - self.content.keys())):
            raise ValueError(f"content={self.content!r}: for kind={self.kind!r} also give {missing}")

    @property
    def about(self) -> tuple[str, str, str]:
        """Return (kind, lesson, key), which all entries about the same guess, question, exercise or challenge share."""
        return self.kind, self.lesson, self.key


class Journal(Store):
    """Append a learner's entries (`Entry`) to a file of JSON lines, and read them back."""

    def __init__(self, path: str | PathLike):
        super().__init__(path, Entry)

    def reset(self) -> None:
        """Delete all entries, e.g. before the next learner uses a workshop's machine."""
        self.path.unlink(missing_ok=True)


def of(lab: Lab) -> Journal:
    """Return the journal next to the lab's runs, in the folder `lab.out` (if it is "": in the user's cache folder)."""
    return Journal(lab.store.path.with_name("journal.jsonl"))


def keep(lab: Lab, kind: str, key: str = "", **content) -> None:
    """Append an entry for the lab's lesson to the journal; print a warning if the file cannot be written.

    Args:
        lab: gives the name of the lesson; decides in which file the journal is (see `of`).
        kind: one of `KINDS`.
        key: names the guess, question, exercise or challenge within the lesson; "" for "finished", which needs no name.
        content: the entry's values by name; `KINDS` lists the names that each kind needs.

    Raises:
        ValueError: an unknown kind, or content that its kind needs is missing.
    """
    journal = of(lab)
    try:
        journal.append(Entry(kind, lab.lesson, key, content, now()))
    except OSError as error:
        remedy = "Set PERF_HELPERS_HOME to a folder that can be written to."
        print(f"Your answer was not saved in {journal.path}: {error.strerror}. {remedy}", file=sys.stderr)


def guess(entries: Sequence[Entry], lesson: str, key: str) -> float | None:
    """Return the latest guess in `entries` for question `key` of a lesson, in the question's unit; None: no guess."""
    return _latest(entries, ("guess", lesson, key), "guess")


def choice(entries: Sequence[Entry], lesson: str, key: str) -> str | None:
    """Return the option that the learner chose last in question `key` of a lesson; None if the learner chose none."""
    return _latest(entries, ("question", lesson, key), "choice")


def counted_guess(entries: Sequence[Entry], lesson: str, key: str) -> float | None:
    """Return the latest guess for a lesson's question `key` that was committed before the measurement was revealed.

    Return None if there is no such guess. `entries`: all entries of the journal, the earliest first.
    """
    before = takewhile(lambda entry: entry.about != ("revealed", lesson, key), entries)
    return guess([*before], lesson, key)


def _latest(entries: Sequence[Entry], about: tuple[str, str, str], field: str) -> Any:
    return next((entry.content[field] for entry in reversed(entries) if entry.about == about), None)


def off(guess: float, measured: float) -> float:
    """Return |guess - measured| / |measured|, e.g. 0.1 if 10 % off; |guess - measured| itself if `measured` is 0."""
    return abs(guess - measured) / (abs(measured) or 1)


@dataclass(frozen=True, slots=True)
class Scored:
    """Hold a guess (the last before the value was revealed), its error, the measured value and trainmem's estimate."""

    lesson: str
    key: str
    unit: str  # of guess, measured value and estimate
    guess: float
    measured: float
    estimate: float | None  # None if the lesson has no estimate
    error: float  # of the guess, as a share of the measured value, see `off`
    date: str  # when the measurement was revealed


def history(entries: Sequence[Entry]) -> list[Scored]:
    """Return a `Scored` for each question that was guessed before its value was revealed, in the order of revealing."""
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
    """Hold a learner's progress in a lesson: verdicts of `Claims`, guess errors, results of exercises and questions."""

    finished: str | None = None  # the date on which it last ran to its end
    claims: dict[str, str] = field(default_factory=dict)  # {claim id: verdict} of that run
    errors: dict[str, float | None] = field(default_factory=dict)  # {key: error of the guess that counted, or None}
    exercises: dict[str, str] = field(default_factory=dict)  # {key: best status}
    questions: dict[str, bool | None] = field(default_factory=dict)  # {key: was the first choice right}; None: open


def progress(entries: Sequence[Entry]) -> dict[str, Progress]:
    """Return {lesson: its progress} of each lesson that has entries in the journal, sorted by name."""
    lessons: dict[str, Progress] = {}
    for entry in entries:
        lesson, content = lessons.setdefault(entry.lesson, Progress()), entry.content
        match entry.kind:
            case "finished":
                lesson.finished, lesson.claims = entry.date, content["claims"]
            case "revealed" if entry.key not in lesson.errors:
                guessed, measured = content["guess"], content["measured"]
                lesson.errors[entry.key] = None if guessed is None else off(guessed, measured)
            case "exercise":
                statuses = (lesson.exercises.get(entry.key, "not attempted"), content["status"])
                lesson.exercises[entry.key] = max(statuses, key=STATUSES.index)
            case "question":
                if lesson.questions.get(entry.key) is None:
                    lesson.questions[entry.key] = content["right"]
    return dict(sorted(lessons.items()))
