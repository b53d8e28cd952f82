"""The ledger: every statement of the guides about memory and speed, from claims.toml, and the rule that decides it."""

import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from trainmem.core import hardware
from trainmem.core.task import PROFILES
from trainmem.texts import number_text

LEDGER = Path(__file__).with_name("claims.toml")
WHERE = hardware.FEATURES  # what a claim may need of a machine
GPU_PROFILES = tuple(name for name in PROFILES if name != "cpu")


class Verdict(StrEnum):
    """What a measurement says of a claim."""

    HOLDS = "holds"
    SMALLER = "smaller than promised"
    REFUTED = "refuted"
    TOO_SMALL = "too small to tell"
    NOT_TESTABLE = "not testable here"


@dataclass(frozen=True, slots=True)
class Guide:
    """What the guides say, and where."""

    source: str
    value: float | None = None  # in the unit of the claim's quantity; None where the guides give no figure
    text: str | None = None  # the figure in the guides' own words
    hardware: str | None = None  # on which they measured it


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the ledger. The header of claims.toml explains the fields to whoever writes a row."""

    id: str
    section: str
    lesson: str  # two digits
    says: str  # the statement, paraphrased
    where: str  # the machine it needs, one of WHERE
    guide: Guide
    quantity: str | None = None  # what is measured, over what, in which unit; None for a text claim, as in what follows
    decided_by: str | None = None  # "memory", "time" or "values"
    direction: str | None = None  # "below", "above", "between" or "equal"
    threshold: float | Sequence[float] | None = None  # in the unit of the quantity; [low, high] for "between"
    tolerance: float | None = None  # for "equal": a share of the threshold, or the distance itself around 0
    no_effect: float | None = None  # the quantity where the technique does nothing; None: there is no such value
    predicted: str | None = None  # from which measurements of the same run the quantity follows, and how
    expected: dict[str, tuple[Verdict, ...]] = field(default_factory=dict)  # by "cpu", "cuda" or one of GPU_PROFILES
    reason: str | None = None  # why it does not hold today
    since: str | None = None  # the version that changed it
    thread: str | None = None  # where that was discussed

    def window(self) -> tuple[float, float]:
        """Between which values of the quantity the claim holds, in its unit; an open end is infinite."""
        match self.direction:
            case "between":
                return tuple(self.threshold)
            case "equal":
                margin = self.tolerance * (abs(self.threshold) or 1)  # relative, but absolute around 0
                return self.threshold - margin, self.threshold + margin
            case "below":
                return -math.inf, self.threshold
            case _:
                return self.threshold, math.inf

    def expected_on(self, kind: str, profile: str) -> tuple[Verdict, ...]:
        """What is expected on a kind of machine ("cpu" or "cuda") at a profile's sizes; nothing, where its quantity is
        predicted and it does not say."""
        expected = self.expected.get(kind, () if self.predicted else (Verdict.NOT_TESTABLE,))
        return self.expected.get(profile, expected) if kind == "cuda" and profile in GPU_PROFILES else expected

    def threshold_text(self) -> str:
        """The rule in words, e.g. "below 0.9; 1 is no effect"; empty for a text claim."""
        if not self.direction:
            return ""
        if self.direction == "between":
            rule = "between {} and {}".format(*map(number_text, self.threshold))
        elif self.direction == "equal":
            margin = f"{100 * self.tolerance:g} %" if self.threshold else f"{self.tolerance:g}"
            rule = f"equal to {number_text(self.threshold)}" + (f", within {margin}" if self.tolerance else "")
        else:
            rule = f"{self.direction} {number_text(self.threshold)}"
        return rule if self.no_effect is None else f"{rule}; {number_text(self.no_effect)} is no effect"


@functools.cache
def load() -> Mapping[str, Claim]:
    """The claims of the ledger (claims.toml) by id, in the order of the file."""
    return MappingProxyType(read(LEDGER.read_text(encoding="utf-8")))


def read(text: str) -> dict[str, Claim]:
    """The claims of a ledger's text by id. That its fields are right is tested (tests/course/ledger_rules.py)."""
    return {table["id"]: _claim(table) for table in tomllib.loads(text)["claim"]}


def _claim(table: dict) -> Claim:
    expected = {kind: tuple(map(Verdict, verdicts)) for kind, verdicts in table.get("expected", {}).items()}
    return Claim(**table | {"guide": Guide(**table["guide"]), "expected": expected})


def decide(claim: Claim, value: float | tuple[float, float] | None, machine_supports: bool) -> Verdict:
    """The verdict on one measured value, a number or an interval (low, high) in the unit of `claim.quantity`.

    It is that of every value in the interval, or "too small to tell" where they differ: a value inside the window
    holds; one between it and `no_effect` is smaller than promised; any other is refuted. Without the machine it needs,
    nothing is decided whatever the value.
    """
    if not machine_supports or claim.where == "text":
        return Verdict.NOT_TESTABLE
    ends = value if isinstance(value, tuple) else (value, value)
    least, most = claim.window()
    at_one_end, at_the_other = (_verdict_on(number, least, most, claim) for number in ends)
    holds_between_them = ends[0] < least and most < ends[1]
    return Verdict.TOO_SMALL if holds_between_them or at_one_end is not at_the_other else at_one_end


def _verdict_on(number: float, least: float, most: float, claim: Claim) -> Verdict:
    if claim.direction in ("below", "above"):  # the threshold itself does not hold
        inside = least < number < most
    else:
        inside = least <= number <= most
    none = claim.no_effect
    smaller = none is not None and (none < number <= least or most <= number < none)
    return Verdict.HOLDS if inside else Verdict.SMALLER if smaller else Verdict.REFUTED
