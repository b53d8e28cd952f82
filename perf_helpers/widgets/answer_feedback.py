"""What is said to an answer, and of a guess: a status with its sign, a text, perhaps a picture."""

import html
import re
from dataclasses import dataclass

from perf_helpers.course import learner_log
from perf_helpers.texts import number_text
from perf_helpers.unknown import is_measured

_SIGNS = {  # of each status; told by sign and words as well as by colour, which is the theme's
    "not attempted": ("○", "var(--jp-border-color1, #8a8a8a)"),
    "wrong": ("✗", "var(--jp-error-color1, #d9534f)"),
    "right": ("✓", "var(--jp-success-color1, #388e3c)"),
    "not measured": ("–", "var(--jp-border-color1, #8a8a8a)"),
    "no guess": ("○", "var(--jp-border-color1, #8a8a8a)"),
    "guess": ("●", "var(--jp-brand-color1, #1976d2)"),
}


@dataclass(frozen=True, slots=True)
class Feedback:
    """What is said to an answer or a guess."""

    status: str  # of an exercise "not attempted", "wrong", "right", "not measured"; of a guess "no guess", "guess"
    text: str  # words between backticks are code
    picture: str = ""  # HTML to show under it, if any

    def __repr__(self) -> str:
        return f"{_SIGNS[self.status][0]} {self.status}: {self.text}"

    def _repr_html_(self) -> str:
        sign, colour = _SIGNS[self.status]
        style = f"border-left:4px solid {colour};padding:0.3em 0.8em;overflow-x:auto"
        return f"<div style='{style}'><b>{sign} {self.status}</b>: {prose_html(self.text)}{self.picture}</div>"


def not_attempted(what: str = "replace None by your answer and run the cell again") -> Feedback:
    return Feedback("not attempted", what)


def wrong(because: str) -> Feedback:
    return Feedback("wrong", because)


def right(text: str) -> Feedback:
    return Feedback("right", text)


def not_measured(why: str) -> Feedback:
    """An answer that cannot be judged, because what it is held against is unknown. It is not kept in the journal."""
    return Feedback("not measured", why)


def prose_html(text: str) -> str:
    """Plain text as HTML; words between backticks become code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def score(guess: float | None, measured: float | None, unit: str = "") -> Feedback:
    """A guess beside what was measured, and how far off it was.

    Raises:
        ValueError: the guess is no number.
    """
    if not is_measured(measured):
        return Feedback("no guess", "nothing was measured to hold a guess against")
    shown = f"measured {number_text(measured, unit)}"
    if guess is None:
        return Feedback("no guess", f"{shown}; next time, put a number first")
    if isinstance(guess, bool) or not isinstance(guess, int | float):
        raise ValueError(f"guess={guess!r}: give a number{f' of {unit}' if unit else ''}, or None")
    return Feedback(
        "guess", f"you said {number_text(guess, unit)}, {shown}: {learner_log.off(guess, measured):.0%} off"
    )
