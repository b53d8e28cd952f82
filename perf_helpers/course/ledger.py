"""The ledger: every statement of the guides about memory and speed, from claims.toml, and the rule that decides it.

Notable: the checks are written out rather than declared to a validation library. Most are about two fields at once (a
rule's direction and its threshold, a machine and the verdicts expected of it), and say what to write there.
"""

import functools
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from perf_helpers.lab import hardware
from perf_helpers.lab.task import PROFILES
from perf_helpers.texts import number_text

LEDGER = Path(__file__).with_name("claims.toml")
WHERE = hardware.FEATURES  # what a claim may need of a machine
DECIDED_BY = ("memory", "time", "values")
GPU_PROFILES = tuple(name for name in PROFILES if name != "cpu")

Need = Callable[[object, str, str], None]  # need(what must be true, field, what to write there), or it raises


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
    decided_by: str | None = None  # one of DECIDED_BY
    direction: str | None = None  # one of DIRECTIONS
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
    """The ledger (claims.toml), read and checked once: the claims by id, in the order of the file."""
    return MappingProxyType(read(LEDGER.read_text(encoding="utf-8")))


def read(text: str) -> dict[str, Claim]:
    """The claims of a ledger's text by id, all of it checked.

    Raises:
        ValueError: names the claim and the field that is wrong, and says what to write there.
    """
    claims: dict[str, Claim] = {}
    for table in tomllib.loads(text).get("claim", []):
        claim = _read(table)
        if claim.id in claims:
            raise ValueError(f"claim {claim.id!r}, field 'id': written twice; give one of the two another id")
        claims[claim.id] = claim
    if not claims:
        raise ValueError("no [[claim]] table: a ledger has at least one")
    return claims


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


def _read(table: dict) -> Claim:
    """One [[claim]] table, checked: what every claim has, then what a claim with something to measure has."""

    def need(met: object, name: str, what_to_write: str) -> None:
        if not met:
            raise ValueError(f"claim {table.get('id', '(without id)')!r}, field {name!r}: {what_to_write}")

    _check_statement(table, need)
    values = table | {"guide": Guide(**table["guide"])}
    if table["where"] == "text":
        rule = ("quantity", "decided_by", "direction", "threshold", "tolerance", "no_effect", "predicted", "expected")
        for name in rule:
            need(name not in table, name, "a text claim has nothing to measure; leave it out")
        return Claim(**values)
    _check_rule(table, need)
    values["expected"] = {kind: tuple(map(Verdict, verdicts)) for kind, verdicts in table.get("expected", {}).items()}
    return Claim(**values)


def _check_statement(table: dict, need: Need) -> None:
    """A text wherever one belongs; the lesson and the machine are of those that there are; the guide has a source."""
    measured = [] if table.get("where") == "text" else ["quantity", "direction"]
    explained = [name for name in ("predicted", "reason", "since", "thread") if name in table]
    _check_names(table, Claim, ["id", "section", "lesson", "says", "where", *measured, *explained], "", need)
    need(re.fullmatch(r"\d\d", table["lesson"]), "lesson", "two digits are needed, as in '05'")
    need(table["where"] in WHERE, "where", f"{table['where']!r} is not one of {', '.join(WHERE)}")
    guide = table.get("guide")
    need(isinstance(guide, dict), "guide", "write guide.source = '...', and guide.value where there is a figure")
    with_a_figure = ["text", "hardware"] if "value" in guide else []  # how the guides put it, and where they measured
    _check_names(guide, Guide, ["source", *with_a_figure], "guide.", need)
    need(_is_number(guide.get("value", 0)), "guide.value", "a finite number is needed, or none at all")


def _check_names(given: dict, kind: type, texts: list[str], prefix: str, need: Need) -> None:
    """What is given are fields of that kind of record, and the named ones hold a text."""
    known = [item.name for item in fields(kind)]
    for name in given:
        need(name in known, prefix + name, f"unknown; the fields are {', '.join(known)}")
    for name in texts:
        need(isinstance(given.get(name), str) and given[name].strip(), prefix + name, "write a text here")


def _check_rule(table: dict, need: Need) -> None:
    """A direction with the threshold that it takes and nothing else; verdicts for each machine that can decide it."""
    direction, threshold = table["direction"], table.get("threshold")
    need(table.get("decided_by") in DECIDED_BY, "decided_by", f"{', '.join(DECIDED_BY)}: one of these is needed")
    need(direction in ("below", "above", "between", "equal"), "direction", "below, above, between or equal is needed")
    if direction == "between":
        pair = isinstance(threshold, list) and len(threshold) == 2 and all(map(_is_number, threshold))
        need(pair and threshold[0] < threshold[1], "threshold", "between needs [low, high] with low < high")
    else:
        need(_is_number(threshold), "threshold", "a finite number is needed")
    if direction == "equal":
        tolerance = table.get("tolerance")
        need(_is_number(tolerance) and tolerance >= 0, "tolerance", "equal needs one, 0 or more")
    else:
        need("tolerance" not in table, "tolerance", "only equal takes one")
    if "no_effect" in table:
        need(direction != "equal", "no_effect", "a size that is exact has none")
        none, ends = table["no_effect"], threshold if direction == "between" else [threshold]
        outside = _is_number(none) and {
            "below": none >= ends[0], "above": none <= ends[0], "between": none < ends[0] or ends[-1] < none
        }[direction]  # fmt: skip
        need(outside, "no_effect", "a number is needed, on the side where the claim does not hold")
    expected = table.get("expected", {} if "predicted" in table else None)
    kinds = {"cuda"} if table["where"] in ("cuda", "sm80", "gpus2") else {"cpu", "cuda"}
    given = set(expected) - set(GPU_PROFILES) if isinstance(expected, dict) else None
    complete = given == kinds or ("predicted" in table and given is not None and given < kinds)
    what = (
        f"exactly {sorted(kinds)} are needed (fewer where it is predicted); {', '.join(GPU_PROFILES)} may say otherwise"
    )
    need(complete, "expected", what)
    for kind, verdicts in expected.items():
        known = isinstance(verdicts, list) and verdicts and all(verdict in list(Verdict) for verdict in verdicts)
        need(known, f"expected.{kind}", f"a list is needed, out of: {', '.join(Verdict)}")
        both = {Verdict.HOLDS, Verdict.REFUTED} <= set(verdicts)
        need(not both, f"expected.{kind}", "holds or refuted, not both: nothing could contradict it")
    finding = any({Verdict.REFUTED, Verdict.SMALLER} & set(verdicts) for verdicts in expected.values())
    need("reason" in table or not finding, "reason", "needed where a claim is expected not to hold")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
