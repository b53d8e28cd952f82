"""Unknown numbers: they can be stored, shown and calculated with, but never decide anything."""

from typing import NoReturn


class NeedsValues(RuntimeError):
    """A value was needed that is unknown, e.g. in a rehearsal, where no kernel computes."""


def is_measured(value: float | None) -> bool:
    """Return whether a value is a number: neither None nor unknown."""
    return value is not None and not isinstance(value, Unknown)


class Unknown(float):
    """A float whose value is unknown, with the reason in `why`. Arithmetic with it gives an unknown float again.

    It is shown as "unknown". To libraries it is NaN; JSON has null (see `records.Record`).

    Raises:
        NeedsValues: the value would decide something: a comparison, its truth, a conversion to a whole number.
    """

    __slots__ = ("why",)

    def __new__(cls, why: str = "not measured"):
        self = super().__new__(cls, "nan")
        self.why = why
        return self

    def __reduce__(self):
        return type(self), (self.why,)

    def __repr__(self) -> str:
        return "unknown"

    def __format__(self, spec: str) -> str:
        return "unknown"

    __str__ = __repr__

    def _more(self, *_) -> "Unknown":
        return self

    def _refuse(self, *_) -> NoReturn:
        raise NeedsValues(self.why)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _more
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _more
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _refuse
    __int__ = __trunc__ = __floor__ = __ceil__ = _refuse
    __hash__ = object.__hash__

    def __round__(self, digits: int | None = None) -> "Unknown":
        return self._refuse() if digits is None else self
