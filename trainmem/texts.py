"""Format numbers and names as text for lessons, tables, pictures, reports and errors; check arguments."""

import contextlib
import difflib
import errno
import json
import math
import os
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from trainmem.unknown import is_measured

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
MOST = 2**32 - 1  # the largest whole number that an argument may be


def number_text(value: float | None, unit: str = "", digits: int = 4) -> str:
    """Return a number with its unit in `digits` significant digits, e.g. "0.3333 x".

    Numbers from 10 ** (`digits` - 1) to 1e9 are rounded to whole numbers and shown in full, e.g. "12,346 MB", so that
    65,504 differs from 65,535. None and unknown give "not measured".
    """
    if not is_measured(value):
        return "not measured"
    number = f"{value:,.0f}" if 10 ** (digits - 1) <= abs(value) < 1e9 else f"{value:.{digits}g}"
    return f"{number} {unit}".strip()


def bytes_text(size: float | None, binary: bool = False) -> str:
    """Return a number of bytes as text in a readable unit, e.g. "1.50 GB"; "not measured" for None or `Unknown`.

    Args:
        size: number of bytes.
        binary: use GiB, MiB and KiB (2^30, 2^20, 2^10), as makers of GPUs and torch do; default: GB, MB and kB. Use it
            wherever the text names a GPU, so that "24 GiB" can be compared with what a training needs.
    """
    if not is_measured(size):
        return "not measured"
    for unit in ("GiB", "MiB", "KiB") if binary else ("GB", "MB", "kB"):
        if abs(size) >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:,.{2 if unit[0] == 'G' else 1}f} {unit}"
    return f"{size:,.0f} B"


def phase_text(phase: str | None) -> str:
    """Return the text for a peak's phase, e.g. "during the backward pass".

    `phase`: a value of `records.Memory.peak_phase`; None: the phase is unknown.
    """
    names = {"step": "the optimizer update", None: "an unknown phase", "evaluation": "evaluation"}
    names |= {"saving": "the saving of a checkpoint", "loading": "the loading of the best checkpoint"}
    names |= {each: f"the {each} pass" for each in ("forward", "backward")}
    return f"during {names.get(phase, phase)}"


def bytes_unit(largest: float, binary: bool = False) -> tuple[float, str]:
    """Return (bytes of the unit, name of the unit) for an axis of bytes that ends at `largest`, e.g. (1e6, "MB").

    GB is used from 2 GB on, MB from 2 MB on, otherwise kB, so that the axis has several whole numbers. `binary`: use
    GiB, MiB and KiB in the same way.
    """
    large, middle, small = ("GiB", "MiB", "KiB") if binary else ("GB", "MB", "kB")
    unit = large if largest >= 2 * _UNITS[large] else middle if largest >= 2 * _UNITS[middle] else small
    return _UNITS[unit], unit


def seconds_text(seconds: float | None) -> str:
    """Return seconds as text in s, ms or µs; "not measured" if there is no measured number, see `is_measured`."""
    if not is_measured(seconds):
        return "not measured"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.1e} s"


def name_text(category: str) -> str:
    """Return a category as in a legend: "optimizer states" for "optimizer_states".

    "inside_operations", a category's name in records, gives "operator workspace".
    """
    return "operator workspace" if category == "inside_operations" else category.replace("_", " ")


def parts_text(parts: Mapping[str, int], binary: bool = False) -> str:
    """Return bytes by category as a screen reader reads them out: "weights 10.0 MB, gradients 5.0 MB".

    Categories of 0 bytes are left out. `binary`: use GiB, MiB and KiB.
    """
    return ", ".join(f"{name_text(name)} {bytes_text(size, binary)}" for name, size in parts.items() if size > 0)


def nearest_text(given: str, allowed: Iterable[str]) -> str:
    """Return a hint for the word `given`, which is not allowed: the most similar allowed words, at most two.

    An allowed word is similar if the whole word or only its beginning is like `given`. If fewer than nine words are
    allowed, the hint also lists all of them. If no word is similar, the hint only lists all allowed words; if a hundred
    or more are allowed, it is then empty. A list has at most 500 characters.
    """

    def alike(word: str) -> float:
        return max(difflib.SequenceMatcher(None, given, part).ratio() for part in (word, word[: len(given)]))

    allowed = sorted(allowed, key=lambda word: (alike(word), len(word) <= len(given)), reverse=True)
    near = [repr(word) for word in allowed[:2] if alike(word) >= 0.6]
    names = textwrap.shorten(", ".join(sorted(allowed)), 500, placeholder=" and more", break_on_hyphens=False)
    every = f"Choose from {names}." if len(allowed) < (9 if near else 100) else ""
    return " ".join(filter(None, [f"Did you mean {' or '.join(near)}?" if near else "", every]))


def check_known(where: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """Raise ValueError for the first name in `given` that is not in `allowed`, with the nearest allowed name.

    `where`: what the names belong to, for the message, e.g. "quantization_config".
    """
    for name in given:
        if name not in allowed:
            raise ValueError(f"{where} has no {name!r}. {nearest_text(str(name), allowed)}")


def shown(value: Any) -> str:
    """Return a value as text for a message: one line of at most 100 characters."""
    try:
        text = repr(value)
    except Exception:  # repr fails for integers of thousands of digits and for some objects
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def install_text(package: str, need: str) -> str:
    """Return a text that says how to install `package`, because transformers needs this package for `need`.

    `package`: a name for pip. `need`: e.g. "optim='lomo'".
    """
    return f"Install {package}: pip install {package}. transformers needs it for {need}"


def text_of(path: Path, most: int = 2**24) -> str:
    """Return the text in a file.

    Raises:
        OSError: before reading, if `path` is not a file or has more than `most` bytes.
    """
    if path.exists() and (not path.is_file() or path.stat().st_size > most):
        raise OSError(errno.EFBIG, f"not a file, or larger than {most:,} bytes")
    return path.read_text(encoding="utf-8")


def from_json(text: str, of_object: Callable[[dict], Any] | None = None) -> Any:
    """Return the content of a JSON text; `of_object`: function that replaces each object of it, see `json.loads`.

    Raises:
        ValueError: invalid JSON, NaN, Infinity, or too many nested brackets.
    """
    try:
        return json.loads(text, object_hook=of_object, parse_constant=int)  # int raises ValueError for NaN and Infinity
    except RecursionError:
        raise ValueError("too many nested brackets") from None


@contextlib.contextmanager
def reading(where: Any, kind: str, give: str) -> Iterator[None]:
    """Turn errors of reading settings into a ValueError of one line, in this context.

    Args:
        where: the text or path that the message gives as the place, e.g. the file's path, or "option=value".
        kind: the format of the settings, e.g. "JSON".
        give: the end of the error message, what the user should pass instead, e.g. "a JSON file".
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"{where}: cannot be read ({error.strerror}). Give {give}") from None
    except ValueError as error:
        raise ValueError(f"{where}: not {kind} ({error}). Give {give}") from None


def whole_number(name: str, value: Any, least: int = 1, most: int = MOST) -> int:
    """Return the value if it is a whole number from `least` to `most`.

    Raises:
        ValueError: anything else; the message names the argument by `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        wanted = f"from {least} to {most:,}" if isinstance(value, int) and value > most else f"of at least {least}"
        raise ValueError(f"{name}={shown(value)}: give a whole number {wanted}")
    return value


def positive(name: str, value: float) -> float:
    """Return the value if it is a number above 0; infinity is allowed.

    Raises:
        ValueError: any other value; the message names the argument by `name`.
    """
    of_kind(name, value, float)
    if not value > 0:
        raise ValueError(f"{name}={shown(value)}: give a number above 0")
    return value


# Names of types in messages, and the class to check against if it is not the annotated one.
_WORDS = {bool: "True or False", Integral: "a whole number", Real: "a number", str: "a text", Mapping: "a mapping"}
_WORDS |= {Callable: "a function", Sequence: "a list", Iterable: "a list", os.PathLike: "a path"}
_CLASSES = {int: Integral, float: Real, dict: Mapping, list: Sequence, tuple: Sequence}


def of_kind(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError if a value does not match an annotation; the message says what to give instead.

    The parts of a tuple of fixed length are checked, too. A bool is not a number, a text is not a list, and NaN matches
    nothing.

    Args:
        name: name of the argument, for the message.
        kind: the annotation, e.g. `int | None`.
    """
    wanted = []
    for each in typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else [kind]:
        origin, parts = typing.get_origin(each) or each or type(None), typing.get_args(each)
        base = _CLASSES.get(origin, origin)
        if base is Any or not isinstance(base, type):
            return
        exact = origin is tuple and ... not in parts
        other = isinstance(value, bool | str | bytes) and base in (Integral, Real, Sequence, Iterable)
        fits = isinstance(value, base) and not other and (not exact or [*map(type, value)] == [*parts])
        if fits and (base is not Real or value == math.inf or abs(value) < 1e300):
            return
        if base is not type(None):
            wanted.append(f"{len(parts)} numbers, as (9, 0)" if exact else _WORDS.get(base, f"a {base.__name__}"))
    raise ValueError(f"{name}={shown(value)}: give {' or '.join(dict.fromkeys(wanted))}")


def arguments_of_kind(function: Callable, given: Mapping[str, Any]) -> None:
    """Raise ValueError if an argument of a function, or a field of a dataclass, does not match its annotation.

    `given`: {name: value} of the arguments or fields.
    """
    for name in function.__annotations__.keys() & given:
        of_kind(name, given[name], function.__annotations__[name])


def parse_bytes(memory: int | float | str, name: str = "memory", least: float = 1e6) -> int:
    """Return bytes from a number of bytes, or a text such as "16GB" (10^9) or "16GiB" (2^30).

    Raises:
        ValueError: any other value, or fewer than `least` bytes; the message names the argument by `name`.
    """
    example, size = "give bytes, or a text such as '16GB', '16GiB' or '300MB'", memory
    if isinstance(memory, str) and (text := re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})", memory.strip())):
        size = float(text[1]) * _UNITS[text[2]]
    if isinstance(size, bool) or not isinstance(size, int | float) or not abs(size) < math.inf:
        raise ValueError(f"{name}={shown(memory)}: {example}")
    if not least <= size < 1e18:
        raise ValueError(f"{name}={shown(memory)} is too {'small' if size < least else 'large'}: {example}")
    return int(size)
