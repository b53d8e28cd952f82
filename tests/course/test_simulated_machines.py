"""The ledger on simulated CPUs of different speeds: correct measurements get an expected verdict on each of them, wrong
measurements do not.
"""

from pathlib import Path

import pytest
from simulated import AMD, CLAIMS, CPUS, simulated, within

from perf_helpers.course.ledger import Verdict, load
from perf_helpers.course.results import decided_again, load_results
from trainmem.records import Ratio

LEDGER = load()
TIMED = {id for id, claim in LEDGER.items() if claim.decided_by == "time"}
NOT_SIMULATED = {
    **dict.fromkeys(("link-matters", "sync-often"), "the rate of the link is chosen from what a step takes"),
}
RECORD = Path(__file__).resolve().parents[2] / "results" / "amd-epyc-2-cores" / "2026-11-23.json"  # of AMD's rates


def checked(claims, id, value, predicted=None):
    """Check a claim's value on a CPU, as a lesson does, and return the decision.

    Args:
        claims: the `Claims` of a lesson.
        id, value: the claim's id, and the measured value.
        predicted: the range of the value that other measurements predict, used if the claim has the field `predicted`
            in the ledger; None: there is no prediction.
    """
    if LEDGER[id].predicted:
        predicted = predicted or Ratio.unknown("nobody measured the parts")
        return claims.check(id, value, predicted=predicted, missing=None if value else "16 bits are emulated")
    return claims.check(id, value)


def test_every_timed_claim_that_a_cpu_can_decide_is_simulated():
    on_a_cpu = {id for id in TIMED if "cpu" in LEDGER[id].expected or LEDGER[id].predicted}
    assert on_a_cpu == CLAIMS.keys() | NOT_SIMULATED.keys() & on_a_cpu
    assert len(CPUS) >= 12 and len({cpu.name for cpu in CPUS}) == len(CPUS)


@pytest.mark.parametrize("id", CLAIMS)
def test_the_simulated_amd_gives_what_was_recorded_on_it(id):
    rows = {claim["id"]: claim for claim in decided_again(load_results(RECORD)["claims"])}
    if id not in rows:
        pytest.skip("its claim, or its quantity, is newer than the record")
    value, _ = simulated(id, AMD)
    assert 0.7 < value.value / rows[id]["value"] < 1.4


@pytest.mark.parametrize("cpu", CPUS, ids=[cpu.name for cpu in CPUS])
@pytest.mark.parametrize("id", CLAIMS)
def test_what_is_measured_rightly_is_expected_on_every_cpu(claims, id, cpu):
    decision = checked(claims, id, *simulated(id, cpu))
    assert decision.as_expected, decision


def wrong(id, right):
    """Yield (mistake, measurement) for measurements that a mistake would give in place of the right measurement.

    `id`: the claim; `right`: the claim's right measurement, a Ratio.
    """
    claim, floor = LEDGER[id], right.high / right.value
    yield "three times as much", within(3 * right.value, floor)
    yield "a third", within(right.value / 3, floor)
    yield "turned around", within(1 / right.value, floor)
    if claim.no_effect is not None:
        yield "no effect", within(claim.no_effect, 1.0)


@pytest.mark.parametrize("cpu", CPUS, ids=[cpu.name for cpu in CPUS])
@pytest.mark.parametrize("id", CLAIMS)
def test_what_is_measured_wrongly_is_not_expected_on_any_cpu(claims, id, cpu):
    right, predicted = simulated(id, cpu)
    if right is None:
        pytest.skip("its lesson measures nothing there")
    reported = {what: checked(claims, id, value, predicted).as_expected for what, value in wrong(id, right)}
    assert not all(reported.values()), reported


@pytest.mark.parametrize("id", ["half-precision-faster-cpu", "table-half-speed"])
def test_a_flag_decides_nothing_and_a_rate_does(claims, id):
    """Two CPUs have the same instruction (flag), but it makes one CPU faster and the other slower. So a prediction must
    use the rate measured on the same CPU; with the other CPU's rate it contradicts the measured speed-up.
    """
    quick, slow = AMD, next(cpu for cpu in CPUS if "slower than fp32" in cpu.name)
    (gain, of_quick), (loss, of_slow) = simulated(id, quick), simulated(id, slow)
    assert checked(claims, id, gain, of_quick).verdict is Verdict.HOLDS
    assert checked(claims, id, loss, of_slow).verdict is Verdict.REFUTED
    for value, predicted in ((gain, of_slow), (loss, of_quick)):
        decision = checked(claims, id, value, predicted)
        assert not decision.as_expected and "predict" in decision.headline()


def test_where_the_rates_are_alike_any_verdict_near_them_is_expected(claims):
    alike = next(cpu for cpu in CPUS if cpu.name == "bf16 as fast as fp32")
    _, predicted = simulated("half-precision-faster-cpu", alike)
    given = [checked(claims, "half-precision-faster-cpu", within(value), predicted) for value in (0.9, 1.0, 1.1)]
    assert {decision.verdict for decision in given} == {Verdict.REFUTED, Verdict.TOO_SMALL, Verdict.HOLDS}
    assert all(decision.as_expected for decision in given)
    assert not checked(claims, "half-precision-faster-cpu", within(4.0), predicted).as_expected
