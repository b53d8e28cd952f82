"""Numbers and names in words: the same in lessons, tables, pictures, reports and errors."""

import difflib
from collections.abc import Iterable

from perf_helpers.unknown import is_measured


def number_text(value: float | None, unit: str = "") -> str:
    """A number in four digits or whole, so that 65,504 stays apart from 65,535: "0.3333 x", "12,346 MB"."""
    if not is_measured(value):
        return "not measured"
    number = f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    return f"{number} {unit}".strip()


def bytes_text(size: float | None) -> str:
    """Bytes in the unit a person would use (decimal: 1 MB = 10^6 bytes); None and unknown read "not measured"."""
    if not is_measured(size):
        return "not measured"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:,.2f} {unit}" if unit == "GB" else f"{size / scale:,.1f} {unit}"
    return f"{size:,.0f} B"


def seconds_text(seconds: float | None) -> str:
    """Seconds in the unit a person would use."""
    if not is_measured(seconds):
        return "not measured"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.1e} s"


def name_text(category: str) -> str:
    """A category as it stands in a legend."""
    return category.replace("_", " ")


def nearest_text(given: str, allowed: Iterable[str]) -> str:
    """What to say of a word that is none of those allowed: the two nearest, as a whole or in how they begin; where
    there are none, or few are allowed, all."""

    def alike(word: str) -> float:
        return max(difflib.SequenceMatcher(None, given, part).ratio() for part in (word, word[: len(given)]))

    allowed = sorted(allowed, key=alike, reverse=True)
    near = [repr(word) for word in allowed[:2] if alike(word) >= 0.6]
    every = f"Choose from {', '.join(sorted(allowed))}." if len(allowed) < 9 or not near else ""
    return " ".join(filter(None, [f"Did you mean {' or '.join(near)}?" if near else "", every]))
