"""Numbers and names in words: the same in lessons, tables, pictures, reports and errors."""

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf_helpers.unknown import is_measured

if TYPE_CHECKING:
    import jinja2

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def number_text(value: float | None, unit: str = "", digits: int = 4) -> str:
    """A number with its unit, in so many digits: "0.3333 x". Where these are not enough it is written out to the whole,
    so that 65,504 stays apart from 65,535: "12,346 MB". None and unknown read "not measured"."""
    if not is_measured(value):
        return "not measured"
    number = f"{value:,.0f}" if 10 ** (digits - 1) <= abs(value) < 1e9 else f"{value:.{digits}g}"
    return f"{number} {unit}".strip()


def bytes_text(size: float | None) -> str:
    """Bytes in the unit a person would use (decimal: 1 MB = 10^6 bytes); None and unknown read "not measured"."""
    if not is_measured(size):
        return "not measured"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= scale:
            return f"{size / scale:,.2f} {unit}" if unit == "GB" else f"{size / scale:,.1f} {unit}"
    return f"{size:,.0f} B"


def bytes_unit(largest: float) -> tuple[float, str]:
    """The unit for an axis of bytes that ends at `largest`, as (bytes, name). It changes at twice the unit, so that the
    axis has more than one whole number."""
    return (1e9, "GB") if largest >= 2e9 else (1e6, "MB") if largest >= 2e6 else (1e3, "kB")


def seconds_text(seconds: float | None) -> str:
    """Seconds in the unit a person would use."""
    if not is_measured(seconds):
        return "not measured"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.1e} s"


def name_text(category: str) -> str:
    """A category as it stands in a legend: "optimizer states" for "optimizer_states"."""
    return category.replace("_", " ")


def parts_text(parts: Mapping[str, int]) -> str:
    """Bytes by category as a screen reader reads them out: "weights 10.0 MB, gradients 5.0 MB". Without what is 0."""
    return ", ".join(f"{name_text(name)} {bytes_text(size)}" for name, size in parts.items() if size > 0)


def nearest_text(given: str, allowed: Iterable[str]) -> str:
    """What to say of a word that is none of those allowed: the two nearest, as a whole or in how they begin; where
    there are none, or few are allowed, all. Nothing of more than a hundred of which none is near."""

    def alike(word: str) -> float:
        return max(difflib.SequenceMatcher(None, given, part).ratio() for part in (word, word[: len(given)]))

    allowed = sorted(allowed, key=lambda word: (alike(word), len(word) <= len(given)), reverse=True)
    near = [repr(word) for word in allowed[:2] if alike(word) >= 0.6]
    every = f"Choose from {', '.join(sorted(allowed))}." if len(allowed) < (9 if near else 100) else ""
    return " ".join(filter(None, [f"Did you mean {' or '.join(near)}?" if near else "", every]))


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """The value, if it is a whole number of at least that much.

    Raises:
        ValueError: it is anything else; it calls the argument by its `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: give a whole number of at least {least}")
    return value


def parse_bytes(memory: int | float | str, name: str = "memory", least: float = 1e6) -> int:
    """Bytes from a number of bytes or a text such as "16GB" (10^9) or "16GiB" (2^30).

    Raises:
        ValueError: anything else, and fewer than `least`; it calls the argument by its `name`.
    """
    example, size = "give bytes, or a text such as '16GB', '16GiB' or '300MB'", memory
    if isinstance(memory, str) and (text := re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})", memory.strip())):
        size = float(text[1]) * _UNITS[text[2]]
    if isinstance(size, bool) or not isinstance(size, int | float) or not math.isfinite(size):
        raise ValueError(f"{name}={memory!r}: {example}")
    if size < least:
        raise ValueError(f"{name}={memory!r} is {size:g} bytes, which is too few: {example}")
    return int(size)


@functools.cache
def template(path: str) -> "jinja2.Template":
    """A Jinja template of this package, e.g. "course/report.html.j2"; what it is given is escaped."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number_text, "bytes": bytes_text, "name": name_text, "percent": "{:.2%}".format}
    return environment.get_template(path)
