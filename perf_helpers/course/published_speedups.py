"""Speed ratios for `advise`: from a course run on the machine most like this one, or from guides (see claims.toml).

Course runs are read from `results/`. An installed wheel has no such folder, so only the guides' figures remain.
"""

from pathlib import Path
from typing import Any

from perf_helpers.course.ledger import load
from perf_helpers.course.results import decided_again, recorded
from trainmem.core.hardware import Machine
from trainmem.records import Ratio

RECORDED = Path(__file__).resolve().parents[2] / "results"
_WITHOUT_INTERVAL = 1.1  # a figure that was published without an interval is assumed right within this factor


def published(machine: Machine | None, kind: str, capability: tuple[int, int]) -> dict[str, tuple[Ratio, str]]:
    """Return {claim id: (value, its source in words)}; a value was measured in a course run or published in a guide.

    The course run is the one that `nearest_recorded` returns. For "cuda", a claim without a value in this run gets the
    guide's figure, if the guide names the GPU of its measurement. Other claims are left out. Some values are ratios of
    memory.

    Args:
        machine: the machine that has the device; None: unknown, so `capability` alone decides which run is used.
        kind: "cpu" or "cuda".
        capability: compute capability of the GPU; not used for "cpu".
    """
    found = {}
    for claim in load().values() if kind == "cuda" else ():
        if (guide := claim.guide) and guide.value and guide.hardware:
            ratio = Ratio(guide.value, guide.value / _WITHOUT_INTERVAL, guide.value * _WITHOUT_INTERVAL)
            source = f"not measured here: claim {claim.id} of the {guide.source}, on a {guide.hardware}, assumed +-10 %"
            found[claim.id] = ratio, source
    if nearest := nearest_recorded(machine, kind, capability):
        name, date = nearest["machine"]["name"], nearest["date"][:10]
        for claim in decided_again(nearest["claims"]):
            if claim["value"] is not None:
                low, high = claim.get("interval") or (claim["value"], claim["value"])
                source = f"recorded on {name}, lesson {claim['lesson'][:2]}, {date}"
                found[claim["id"]] = Ratio(claim["value"], low, high), source
    return found


def nearest_recorded(machine: Machine | None, kind: str, capability: tuple[int, int]) -> dict[str, Any] | None:
    """Return the newest recorded course run of a machine, or of the most similar machine with the same kind of device.

    The run is a dict, its results.json; None if no recorded machine has a device of this kind. The most similar machine
    is one of the same name, then one with the nearest compute capability, then one with the same CPU model.

    Args:
        machine: the machine; None: the GPU's compute capability alone decides which machine is similar.
        kind: the device, "cpu" or "cuda".
        capability: compute capability of the GPU; not used for "cpu".
    """

    def likeness(results: dict[str, Any]) -> tuple[bool, int, bool, str]:
        other = Machine.from_dict(results["machine"])
        major, minor = other.gpus[0].capability if kind == "cuda" else capability
        distance = abs(10 * (major - capability[0]) + minor - capability[1])
        same = (machine.name == other.name, machine.cpu_model == other.cpu_model) if machine else (False, False)
        return same[0], -distance, same[1], results["date"]

    candidates = [results for results in recorded(RECORDED).values() if results["machine"]["kind"] == kind]
    return max(candidates, key=likeness, default=None)
