"""From a measurement to its verdict: what was measured, what the claim's rule says of it, what the ledger expected.

Notable: a verdict follows from the ledger and the number alone.
"""

import math

from perf_helpers.course.ledger import GPU_PROFILES, Claim, Verdict
from perf_helpers.lab import hardware
from perf_helpers.lab.runs import Ratio
from perf_helpers.unknown import Unknown


def decide(claim: Claim, value: float | tuple[float, float] | None, machine_supports: bool) -> Verdict:
    """The verdict on one measured value, a number or an interval (low, high) in the unit of `claim.quantity`.

    The claim holds if the whole interval satisfies the rule, is refuted if the whole interval lies in the refuted
    region, and is too small to tell otherwise. Without the machine it needs, nothing is decided whatever the value.
    """
    if not machine_supports or claim.where == "text":
        return Verdict.NOT_TESTABLE
    low, high = value if isinstance(value, tuple) else (value, value)
    threshold = claim.threshold
    refuted_from = threshold if claim.refuted_from is None else claim.refuted_from
    if claim.direction == "below":
        holds, refuted = high < threshold, low >= refuted_from
    elif claim.direction == "above":
        holds, refuted = low > threshold, high <= refuted_from
    else:
        if claim.direction == "equal":
            margin = claim.tolerance * (abs(threshold) or 1)  # relative, but absolute around 0
            threshold = threshold - margin, threshold + margin
        least, most = threshold
        holds, refuted = least <= low and high <= most, high < least or most < low
    return Verdict.HOLDS if holds else Verdict.REFUTED if refuted else Verdict.TOO_SMALL


def measurement(id: str, value: float | Ratio | None) -> tuple[float | None, tuple[float, float] | None, str | None]:
    """What was passed to a check, as (number, interval, why it is unknown).

    A plain number has no interval; None and an unknown value have neither.

    Raises:
        ValueError: no number and no ratio, or one whose interval is the wrong way round; names the claim.
    """
    if value is None:
        return None, None, None
    given = [value.value, value.low, value.high] if hasattr(value, "low") else [value]
    for part in given:
        if isinstance(part, Unknown):
            return None, None, part.why
    try:
        numbers = [math.nan if isinstance(part, bool | str) else float(part) for part in given]
    except (TypeError, ValueError, RuntimeError):  # what None, an array and a tensor raise
        numbers = [math.nan]
    if any(map(math.isnan, numbers)) or (len(numbers) == 3 and numbers[1] > numbers[2]):
        hint = "pass a number or a Ratio with its interval; if it cannot be measured here, missing='needs ...'"
        raise ValueError(f"claim {id!r}: {value!r} is no measurement; {hint}")
    return numbers[0], tuple(numbers[1:]) or None, None


def against_the_ledger(claim: Claim, verdict: Verdict, profile: str, rehearsed: bool) -> dict:
    """What the ledger expects of this kind of machine under this profile, and whether the verdict is that.

    Returns:
        {"expected": verdicts, "as_expected": bool}, two fields of a Decision. What the machine lacks is always
        excused, and so is what a rehearsal cannot measure.
    """
    nothing = (Verdict.NOT_TESTABLE,)
    if hardware.supports("cuda")[0]:
        expected = claim.expected.get(profile if profile in GPU_PROFILES else "cuda") or claim.expected.get("cuda")
    else:
        expected = claim.expected.get("cpu")
    excused = not hardware.supports(claim.where)[0] or (rehearsed and verdict in nothing)
    return {"expected": expected or nothing, "as_expected": excused or verdict in (expected or nothing)}
