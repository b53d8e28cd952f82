"""Helpers of the tests that plant a fault in a lesson."""

from perf_helpers.course.ledger import Verdict, decide, load
from trainmem.records import Ratio


def verdict(id: str, value: float | tuple[float, float] | Ratio) -> Verdict:
    """Return the ledger's verdict on a measurement, on a machine that has all the hardware that the claim needs.

    `id`: the claim's id; `value`: the measured value, or its interval (low, high).
    """
    return decide(load()[id], (value.low, value.high) if isinstance(value, Ratio) else value, True)
