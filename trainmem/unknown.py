"""Define placeholders for figures that are not known: `Unknown`, `Missing` and `Assumed`.

`Unknown` is a number without a value. `Missing` is a figure that a failed run lacks. Both have the reason as `why`.
Neither can decide a verdict: code that needs the value gets an error with the reason.

`Assumed` is an unknown number in a rehearsal whose program must reach its end (`known_values.Values(assumes=True)`).
The number raises no error: code that needs the value gets 1. In a comparison with infinity the number counts as 1. A
comparison with any other number is false; in a check, the comparison has the truth value that passes the check, see
`passing_answer`.

|                                        | `Unknown`                  | `Missing`         |
|----------------------------------------|----------------------------|-------------------|
| shown as                               | "unknown"                  | "not measured"    |
| in a file                              | null                       | null              |
| as a float, for a library              | NaN                        | raises            |
| arithmetic, `round(value, digits)`     | is unknown again           | raises            |
| `if value`                             | raises                     | is false          |
| `<`, `==`, `int(value)`                | raises                     | raises            |
| `value != value`                       | is true, as for NaN        | is false          |

`is_measured` tests for a value without raising an error.
"""

import collections
import dis
import functools
import math
import sys
from collections.abc import Callable
from numbers import Number
from types import CodeType, FrameType
from typing import NoReturn

CHECKS = "checks, passed"  # a kind of assumed answers


class NeedsValues(RuntimeError):
    """Raised if a value is needed that is unknown, e.g. in a rehearsal, where no kernel computes anything."""


class NeedsLibrary(RuntimeError):
    """Raised if a rehearsal would need a library of CUDA whose memory use is unknown, e.g. cuFFT."""


class RunFailed(RuntimeError):
    """Raised if code uses a figure or a value that is missing in a run, because the run's experiment failed."""


def is_measured(value: "float | Missing | None") -> bool:
    """Return whether a value is a measured number: neither None nor `Unknown`, `Assumed` or `Missing`."""
    return value is not None and not isinstance(value, _WithoutValue | Assumed)


def passing_answer(frame: FrameType) -> bool | None:
    """Return the truth value that passes the check that `frame` is executing; None if `frame` executes no check.

    A check is code such as `assert x` or `if not x: raise`: for the other truth value, the code raises an error at
    once. If the function of `frame` returns the value at once (`return a < b`), the caller's frame is examined
    instead: the caller may check the returned value.
    """
    found: bool | FrameType | None = frame
    while isinstance(found, FrameType):
        found = found.f_back if (answer := _branch(found.f_code, found.f_lasti)) == "returned" else answer
    return found


@functools.lru_cache(1 << 12)
def _branch(code: CodeType, place: int) -> bool | str | None:
    """Return the truth value passing the check at byte `place` of `code`; None: no check; "returned": a `return`."""
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("EXTENDED_ARG", "NOT_TAKEN")]
    index = max(index for index, each in enumerate(steps) if each.offset <= place)
    index += steps[index].opname == "PRECALL"  # Python 3.11: it may do the work of the CALL behind it
    index += "JUMP" not in steps[index].opname  # the instruction makes the value, the next one uses it
    index += steps[index].opname == "TO_BOOL"
    jump = steps[index]
    if jump.opname == "RETURN_VALUE":
        return "returned"
    if not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None

    def raises(first: int) -> bool:
        ends = (each.opname for each in steps if each.offset >= first)
        last = next(
            (name for name in ends if "JUMP" in name or name.startswith(("RAISE", "RETURN", "FOR_", "SEND"))), ""
        )
        return last == "RAISE_VARARGS"

    without_jump, with_jump = raises(steps[index + 1].offset), raises(jump.argval)
    return None if without_jump == with_jump else jump.opname.endswith("IF_TRUE") == without_jump


class _WithoutValue:
    """Raise an error from each operation that needs a value: comparisons, `bool`, conversions to whole numbers."""

    __slots__ = ()
    why: str  # the message of `error`; subclasses set both
    error: type[RuntimeError]

    def _refuse(self, *_) -> NoReturn:
        error = self.error(self.why)
        error.add_note("A value was needed here, but there is none: check `trainmem.unknown.is_measured` first.")
        raise error

    def __format__(self, spec: str) -> str:
        return str(self)

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _refuse
    __int__ = __trunc__ = __floor__ = __ceil__ = __round__ = _refuse


class _InFormulas:
    """Make all arithmetic with an unknown number return the number; texts show the number as `word` ("unknown")."""

    __slots__ = ()
    word: str

    def __repr__(self) -> str:
        return self.word

    def __format__(self, spec: str) -> str:
        return self.word

    def _again(self, *_):
        return self

    __str__, __hash__ = __repr__, object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _again
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _again


class Unknown(_InFormulas, _WithoutValue, float):
    """Stand for a number whose value is unknown, e.g. a time in a rehearsal.

    Arithmetic with this number gives an unknown number again; comparisons, `if` and `int(value)` raise `error`.

    Args:
        why: the message of `error`.
        error: the exception that an operation raises if it needs the value.
    """

    __slots__ = ("error", "why")
    word = "unknown"

    def __new__(cls, why: str = "not measured", error: type[RuntimeError] = NeedsValues):
        self = super().__new__(cls, "nan")
        self.why, self.error = why, error
        return self

    def __reduce__(self):
        return type(self), (self.why, self.error)

    def __ne__(self, other) -> bool:
        """Return True if `other` is this same object, as NaN does; for any other object raise an exception (`error`).

        `json` finds NaN by the test `x != x`, and must be able to write this number.
        """
        return other is self or self._refuse()

    def __round__(self, digits: int | None = None) -> "Unknown":
        return self._refuse() if digits is None else self


class Assumed(_InFormulas, float):
    """Stand for a number whose value a rehearsal does not know: libraries and files get 1, a print shows "assumed".

    Arithmetic gives an assumed number again. A comparison with a finite number or NaN is false, except in a check (an
    `assert`, or an `if` that raises): there it has the truth value that passes the check, see `passing_answer`. In a
    comparison with infinity, this number counts as 1: many programs start a search for the best loss at `float("inf")`.

    Args:
        answers: a Counter {kind of assumption: how often}, e.g. `Values.answers` of a rehearsal; None: a new Counter.
            Each comparison of this number with a finite number or NaN adds 1: in a check to the entry `CHECKS`,
            otherwise to the entry for false comparisons.
    """

    __slots__ = ("answers",)
    word = "assumed"

    def __new__(cls, answers: collections.Counter | None = None):
        self = super().__new__(cls, 1)
        self.answers = collections.Counter() if answers is None else answers
        return self

    def __reduce__(self):
        return type(self), ()

    def _compared(name: str) -> Callable:
        """Return the comparison method `name`, e.g. "__lt__", of an assumed number."""

        def compare(self, other) -> bool:
            if isinstance(other, float) and math.isinf(other):
                return getattr(float, name)(1.0, other)
            if not isinstance(other, Number):
                return NotImplemented
            passing = passing_answer(sys._getframe(1))  # None outside of a check: the comparison is false
            self.answers["comparisons of an assumed number, false" if passing is None else CHECKS] += 1
            return bool(passing)

        return compare

    def __round__(self, digits: int | None = None) -> "Assumed | int":
        return 1 if digits is None else self

    __hash__ = object.__hash__
    __lt__, __le__, __gt__, __ge__, __eq__, __ne__ = map(
        _compared, ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
    )


class Missing(_WithoutValue):
    """Stand for a figure that a failed run lacks.

    A missing figure counts as False, so that `if run.memory` and `run.value or {}` work.

    Args:
        why: which run failed, how, and what to do about it.
    """

    __slots__ = ("why",)
    error = RunFailed

    def __init__(self, why: str):
        self.why = why

    def __reduce__(self):
        return type(self), (self.why,)

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"not measured: {self.why}"

    def __str__(self) -> str:
        return "not measured"

    def __eq__(self, other) -> bool:
        return self.why == other.why if isinstance(other, Missing) else self._refuse()

    __ne__ = object.__ne__  # the opposite of __eq__

    def __hash__(self) -> int:
        return hash(self.why)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Python, IPython and numpy probe objects for protocols
            raise AttributeError(name)
        self._refuse()

    _refuse = _WithoutValue._refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _refuse
    __or__ = __ror__ = __and__ = __rand__ = __float__ = __index__ = __array__ = _refuse
    __iter__ = __reversed__ = __len__ = __contains__ = __getitem__ = __setitem__ = __call__ = _refuse
