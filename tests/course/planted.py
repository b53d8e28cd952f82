"""What the tests share that plant something wrong in a lesson."""

from perf_helpers.course.ledger import Verdict, decide, load
from trainmem.records import Ratio


def verdict(id: str, value: float | tuple[float, float] | Ratio) -> Verdict:
    """What the ledger says of a measurement, on a machine that has what the claim needs."""
    return decide(load()[id], (value.low, value.high) if isinstance(value, Ratio) else value, True)
