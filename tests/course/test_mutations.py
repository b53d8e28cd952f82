"""Check every claim with measurements that are wrong in plausible ways (mutants); the list is made from the ledger.

The expected verdict follows from how the mutant is made; the rule under test is not used.
"""

import pytest

from perf_helpers.course import ledger
from perf_helpers.course.ledger import Verdict
from trainmem.records import Ratio

HOLDS, SMALLER, REFUTED, TOO_SMALL = Verdict.HOLDS, Verdict.SMALLER, Verdict.REFUTED, Verdict.TOO_SMALL
LEDGER = {id: claim for id, claim in ledger.load().items() if claim.where != "text"}


def promised(claim):
    """Return a value of a claim's quantity for which the claim is true: the guides' figure if there is one, otherwise a
    value well inside the range that the claim allows.
    """
    if claim.guide.value is not None:
        return claim.guide.value
    match claim.direction, claim.threshold:
        case "between", (low, high):
            return (low * high) ** 0.5 if low > 0 else (low + high) / 2
        case "equal", exactly:
            return exactly
        case direction, limit:
            step = abs(limit - claim.no_effect) if claim.no_effect not in (None, limit) else abs(limit) / 2 or 1
            return limit + (step if direction == "above" else -step)


def mutants(claim):
    """Yield (fault, value, expected verdict) for each value that a faulty measurement of a claim's quantity could give.

    The first one has no fault.
    """
    good, none = promised(claim), claim.no_effect
    yield "nothing", good, HOLDS
    if none is not None:
        least, most = claim.window()
        edge = least if none <= least else most  # what is asked for at least
        yield "the effect is absent", none, REFUTED
        yield "the effect is reversed", none - (good - none), REFUTED
        yield "half of the least that counts", (none + edge) / 2, SMALLER if none != edge else REFUTED
        if claim.direction == "between":
            half = (none + good) / 2  # a wide window has room for it
            falls_short = half < least if none <= least else half > most
            yield "the effect is half as large", half, SMALLER if falls_short else HOLDS
            yield "it goes far beyond", good + 4 * (good - none), REFUTED
        around = (none + edge) / 2
        wide = sorted((around - 2 * abs(good - none), around + 2 * abs(good - none)))
        yield "nobody could tell", tuple(wide), TOO_SMALL
    elif claim.direction == "equal":
        distance = 3 * claim.tolerance * (abs(claim.threshold) or 1) or abs(claim.threshold) / 2 or 1
        yield "half as large", claim.threshold / 2 or -distance, REFUTED
        yield "twice as large", claim.threshold * 2 or distance, REFUTED
        yield "a little more", claim.threshold + distance, REFUTED
        yield "a little less", claim.threshold - distance, REFUTED
    elif claim.direction == "between":
        low, high = claim.threshold
        yield "below it", low - (high - low), REFUTED
        yield "above it", high + (high - low), REFUTED
        yield "nobody could tell", (low - 1, high + 1), TOO_SMALL
    else:
        beyond = claim.threshold + (claim.threshold - good)
        yield "on the other side of the limit", beyond, REFUTED
        yield "nobody could tell", tuple(sorted((good, beyond))), TOO_SMALL


CASES = [(id, *mutant) for id, claim in LEDGER.items() for mutant in mutants(claim)]


def test_every_claim_has_its_mutants():
    assert {id for id, *_ in CASES} == LEDGER.keys()
    wrong = [case for case in CASES if case[1] != "nothing"]
    assert all(sum(case[0] == id for case in wrong) >= 2 for id in LEDGER)


@pytest.mark.parametrize(("id", "what", "value", "verdict"), CASES, ids=[f"{id}: {what}" for id, what, *_ in CASES])
def test_a_check_gives_the_verdict_that_its_measurement_deserves(claims, machine, id, what, value, verdict):
    machine.features |= {LEDGER[id].where} | ({"cuda"} if "cuda" in LEDGER[id].expected else set())
    low, high = value if isinstance(value, tuple) else (value, value)
    prediction = (promised(LEDGER[id]) * 0.99, promised(LEDGER[id]) * 1.01)
    predicted = {"predicted": prediction} if LEDGER[id].predicted else {}
    decision = claims.check(id, Ratio((low + high) / 2, low, high) if low < high else value, **predicted)
    assert decision.verdict is verdict
    agrees = low <= prediction[1] and prediction[0] <= high if predicted else verdict in decision.expected
    assert decision.as_expected == agrees, "a strict run fails by it, or passes"


@pytest.mark.parametrize("id", LEDGER)
def test_a_wrong_measurement_fails_a_strict_run(id):
    """A strict run fails at an unexpected verdict; so, on each kind of machine, at least one wrong measurement of the
    claim must get an unexpected verdict.
    """
    given = {verdict for _, _, verdict in mutants(LEDGER[id])}
    for kind, expected in LEDGER[id].expected.items():
        assert given - set(expected), f"{id} on {kind}: whatever is measured would be expected"
