"""The ledger: the guides' claims about memory and speed, read from claims.toml, and the rule that decides a claim."""

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
WHERE = hardware.FEATURES  # hardware that a claim may need
GPU_PROFILES = tuple(name for name in PROFILES if name != "cpu")


class Verdict(StrEnum):
    """The result of testing a claim by a measurement."""

    HOLDS = "holds"
    SMALLER = "smaller than promised"
    REFUTED = "refuted"
    TOO_SMALL = "too small to tell"
    NOT_TESTABLE = "not testable here"


@dataclass(frozen=True, slots=True)
class Guide:
    """The value that a guide (e.g. a page of transformers' documentation) gives for a claim, and the guide's name."""

    source: str
    value: float | None = None  # in the unit of the claim's quantity; None if the guides give no value
    text: str | None = None  # the value in the guides' own words
    hardware: str | None = None  # the machine on which the guides measured it


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of the ledger: a claim's statement, quantity and rule. The header of claims.toml explains the fields."""

    id: str
    section: str
    lesson: str  # two digits
    says: str  # the statement, paraphrased
    where: str  # the hardware it needs, one of WHERE
    guide: Guide
    # A text claim has none of the following fields.
    quantity: str | None = None  # the measured quantity, its reference and its unit
    decided_by: str | None = None  # "memory", "time" or "values"
    direction: str | None = None  # "below", "above", "between" or "equal"
    threshold: float | Sequence[float] | None = None  # in the unit of the quantity; [low, high] for "between"
    tolerance: float | None = None  # for "equal": a share of the threshold; if the threshold is 0, the distance
    no_effect: float | None = None  # the quantity if the technique does nothing; None: there is no such value
    predicted: str | None = None  # how the quantity follows from other measurements of the same run
    expected: dict[str, tuple[Verdict, ...]] = field(default_factory=dict)  # by "cpu", "cuda" or one of GPU_PROFILES
    reason: str | None = None  # why the claim does not hold today
    since: str | None = None  # the version from which on the claim does not hold
    thread: str | None = None  # a link to the discussion

    def window(self) -> tuple[float, float]:
        """Return (low, high): the claim holds between these values of the quantity. An open end is infinite."""
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
        """Return the verdicts that the ledger expects on a `kind` of machine, "cpu" or "cuda".

        On "cuda", verdicts listed for the `profile` of sizes ("t4" or "gpu", see `PROFILES`) replace those for "cuda".
        If the ledger lists no verdicts, return () for a claim with a prediction, because the measured value must then
        agree with the prediction. Return (NOT_TESTABLE,) for a claim without a prediction.
        """
        expected = self.expected.get(kind, () if self.predicted else (Verdict.NOT_TESTABLE,))
        return self.expected.get(profile, expected) if kind == "cuda" and profile in GPU_PROFILES else expected

    def threshold_text(self) -> str:
        """Return the claim's rule in words, e.g. "below 0.9; 1 is no effect"; "" for a claim without a rule."""
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
    """Return {id: claim} of the ledger (claims.toml), in the order of the file."""
    return MappingProxyType(read(LEDGER.read_text(encoding="utf-8")))


def read(text: str) -> dict[str, Claim]:
    """Return {id: claim} of a ledger's text, in TOML. The claims are validated only in tests/course/ledger_rules.py."""
    return {table["id"]: _claim(table) for table in tomllib.loads(text)["claim"]}


def _claim(table: dict) -> Claim:
    expected = {kind: tuple(map(Verdict, verdicts)) for kind, verdicts in table.get("expected", {}).items()}
    return Claim(**table | {"guide": Guide(**table["guide"]), "expected": expected})


def decide(claim: Claim, value: float | tuple[float, float] | None, machine_supports: bool) -> Verdict:
    """Return the verdict on a claim: "holds" if the measured value is in the claim's range, `claim.window()`.

    A value outside is "smaller than promised" if it is between the range and `claim.no_effect`, otherwise "refuted". An
    interval is "too small to tell" if its ends get different verdicts, or if it extends beyond both ends of the range.

    Args:
        value: number or interval (low, high), in the unit of `claim.quantity`; None only if the claim is not testable.
        machine_supports: whether the machine has the hardware that the claim needs; if not, the claim is not testable.
    """
    if not machine_supports or claim.where == "text":
        return Verdict.NOT_TESTABLE
    ends = value if isinstance(value, tuple) else (value, value)
    least, most = claim.window()
    at_one_end, at_the_other = (_verdict_on(number, least, most, claim) for number in ends)
    holds_between = ends[0] < least and most < ends[1]
    return Verdict.TOO_SMALL if holds_between or at_one_end is not at_the_other else at_one_end


def _verdict_on(number: float, least: float, most: float, claim: Claim) -> Verdict:
    if claim.direction in ("below", "above"):  # the threshold itself does not hold
        inside = least < number < most
    else:
        inside = least <= number <= most
    none = claim.no_effect
    smaller = none is not None and (none < number <= least or most <= number < none)
    return Verdict.HOLDS if inside else Verdict.SMALLER if smaller else Verdict.REFUTED
