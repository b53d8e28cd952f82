"""Guesses and exercises: what a learner answers, and the feedback on it. Nothing here stops Run All."""

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SHAPES = {"not attempted": "○", "wrong": "✗", "right": "✓", "no guess": "○", "guess": "●"}


@dataclass(frozen=True, slots=True)
class Feedback:
    """`status` is "not attempted", "wrong" or "right" for an exercise, "no guess" or "guess" for a prediction."""

    status: str
    text: str

    def __repr__(self) -> str:
        return f"{_SHAPES[self.status]} {self.status}: {self.text}"

    def _repr_html_(self) -> str:
        return (
            "<div style='border-left:4px solid #0072B2;padding:0.3em 0.8em'>"
            f"<b>{_SHAPES[self.status]} {self.status}</b>: {html.escape(self.text)}</div>"
        )


def not_attempted(what: str = "replace None by your answer and run the cell again") -> Feedback:
    return Feedback("not attempted", what)


def wrong(because: str) -> Feedback:
    return Feedback("wrong", because)


def right(text: str) -> Feedback:
    return Feedback("right", text)


def score(guess: float | None, measured: float | None, unit: str = "") -> Feedback:
    """A guess beside what was measured, and how far off it was.

    Raises:
        ValueError: the guess is no number.
    """
    if measured is None:
        return Feedback("no guess", "nothing was measured to hold a guess against")
    shown = f"measured {measured:.4g} {unit}".strip()
    if guess is None:
        return Feedback("no guess", f"{shown}; next time, put a number first")
    if isinstance(guess, bool) or not isinstance(guess, int | float):
        raise ValueError(f"guess={guess!r}: give a number{f' of {unit}' if unit else ''}, or None")
    off = abs(guess - measured) / abs(measured) if measured else abs(guess)
    return Feedback("guess", f"you said {guess:.4g} {unit}, {shown}: {off:.0%} off")


def prove(check: Callable[[Any], Feedback], *, solution: Any, mistake: Any) -> Feedback:
    """Hold a lesson's check against its own solution and a plausible mistake. This runs wherever the lesson runs.

    Args:
        check: takes an answer (None: not attempted) and returns its feedback.

    Raises:
        RuntimeError: the check takes the mistake for right, the solution for wrong, or None for an attempt.
    """
    verdict = check(solution)
    for answer, expected in ((None, "not attempted"), (mistake, "wrong"), (solution, "right")):
        found = verdict if answer is solution else check(answer)
        if found.status != expected:
            raise RuntimeError(f"this exercise's check calls {answer!r} {found.status}, not {expected}: {found.text}")
    return verdict
