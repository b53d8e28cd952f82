"""Unknown figures: `Unknown`, a number that can be stored, shown and calculated with but never decides anything; and
`Missing`, in place of a figure or a value of a run that failed.
"""

from typing import NoReturn


class NeedsValues(RuntimeError):
    """A value was needed that is unknown, e.g. in a rehearsal, where no kernel computes."""


class RunFailed(RuntimeError):
    """A figure or a value was used that a run does not have because its experiment failed."""


def is_measured(value: "float | Missing | None") -> bool:
    """Return whether a value is a number: not None, unknown, or missing because a run failed."""
    return value is not None and not isinstance(value, Unknown | Missing)


class Unknown(float):
    """A float whose value is unknown, with the reason in `why`. Arithmetic with it gives an unknown float again.

    It is shown as "unknown". To libraries it is NaN; JSON has null (see `records.Record`).

    Args:
        why: the message of the error.
        error: `RunFailed` if it is unknown because a run failed.

    Raises:
        NeedsValues: (or `error`) the value would decide something: a comparison, its truth, a conversion to a whole
            number.
    """

    __slots__ = ("error", "why")

    def __new__(cls, why: str = "not measured", error: type[RuntimeError] = NeedsValues):
        self = super().__new__(cls, "nan")
        self.why, self.error = why, error
        return self

    def __reduce__(self):
        return type(self), (self.why, self.error)

    def __repr__(self) -> str:
        return "unknown"

    def __format__(self, spec: str) -> str:
        return "unknown"

    __str__ = __repr__

    def _more(self, *_) -> "Unknown":
        return self

    def _refuse(self, *_) -> NoReturn:
        raise self.error(self.why)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _more
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _more
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _refuse
    __int__ = __trunc__ = __floor__ = __ceil__ = _refuse
    __hash__ = object.__hash__

    def __round__(self, digits: int | None = None) -> "Unknown":
        return self._refuse() if digits is None else self


class Missing:
    """Takes the place of a figure or a value of a run that failed.

    It is false, so that `if run.memory` and `run.value or {}` work, and it is shown as "not measured". In files it is
    null.

    Args:
        why: which run failed, how, and what to do about it.

    Raises:
        RunFailed: on any other use, with `why` as its message.
    """

    __slots__ = ("why",)

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

    def __format__(self, spec: str) -> str:
        return "not measured"

    def __eq__(self, other) -> bool:
        return self.why == other.why if isinstance(other, Missing) else self._refuse()

    def __hash__(self) -> int:
        return hash(self.why)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # Python, IPython and numpy ask for what an object can do
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_) -> NoReturn:
        raise RunFailed(self.why)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _refuse
    __or__ = __ror__ = __and__ = __rand__ = __lt__ = __le__ = __gt__ = __ge__ = __round__ = _refuse
    __int__ = __float__ = __index__ = __trunc__ = __floor__ = __ceil__ = __array__ = _refuse
    __iter__ = __reversed__ = __len__ = __contains__ = __getitem__ = __setitem__ = __call__ = _refuse
