"""Compare the rehearsal and the estimate with a real GPU, on trainings that measure_cuda.py, measure_random.py and
measure_adapters.py generate.

    python benchmarks/measure_card.py --rehearse h100     first, on any machine: rehearse and estimate the trainings
    python benchmarks/measure_card.py                     then, on a machine with that GPU: measure the trainings

If the requested bytes are equal but the allocated ones are not, the allocator took another free block.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cloudpickle
import measure_adapters
import measure_cuda
import measure_random
from runner import Measurement, read_record, rehearsing

from perf_helpers.lab import Lab
from trainmem.rehearsal import card
from trainmem.unknown import NeedsValues

KINDS = {
    "ordinary": measure_cuda.training,
    "strangers": measure_random.random_training,
    "adapters": lambda number, seed: measure_adapters.training(number, seed, False),
}
SIZES = ("requested", "allocated", "reserved")


def name_of(_: int, row: dict) -> str:
    return f"{row['kind']} {row['number']}"


def cases(options) -> dict[str, tuple[str, measure_cuda.Training]]:
    """Return {"adapters 3": (kind, training), ...} of trainings on a GPU of compute capability 9.0; trainings that need
    torchao are left out.

    `options`: as in `runner.Measurement`.
    """
    made = {(kind, n): make(n, options.seed) for kind, make in KINDS.items() for n in range(options.count)}
    fit = {key: one for key, one in made.items() if one.arguments["optim"] in measure_random.WITHOUT_TORCHAO}
    return {f"{kind} {n}": (kind, replace(one, capability=(9, 0), processes=1)) for (kind, n), one in fit.items()}


def measure(cases, options) -> Iterator[tuple[str, dict]]:
    cloudpickle.register_pickle_by_value(measure_cuda)
    stored = read_record(options.out)["rows"] if options.out.exists() else []
    known = {name_of(number, row): row for number, row in enumerate(stored)}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lab = stack.enter_context(rehearsing(card(options.rehearse))) if options.rehearse else Lab(out=folder)
        for name, (kind, one) in cases.items():
            row = known.get(name, {"kind": kind} | one.to_dict())
            try:
                run = lab.run(measure_cuda.rehearsed(one.experiment(folder)), name, measure="none")
                found = run.value or {"left_out": run.message[-200:]}
                if options.rehearse and run.ok:
                    prediction = one.estimated(folder).memory
                    row["estimated"] = {"allocated": prediction.peak_bytes, "reserved": prediction.reserved_bytes}
            except (ValueError, NeedsValues) as error:
                found = {"left_out": str(error)[-200:]}
            yield name, row | {"rehearsed" if options.rehearse else "measured": found}


def against(rows: list[dict], prediction: str) -> dict:
    """Compare predicted with measured bytes.

    Return "trainings", the number of trainings, and "equal", the number of exact predictions; also, for each of
    `SIZES`, [number of exact predictions, worst error as a share].

    Args:
        rows: one per training, with its "measured" bytes.
        prediction: the field of a row that has the predicted bytes.
    """
    pairs = [(row.get(prediction, {}), row["measured"]) for row in rows]
    pairs = [pair for pair in pairs if all("allocated" in one for one in pair)]
    off = [{name: abs(summary[name] / true[name] - 1) for name in SIZES if name in summary} for summary, true in pairs]
    found = {"trainings": len(pairs), "equal": sum(not any(each.values()) for each in off)}
    shares = {name: [each[name] for each in off if name in each] for name in SIZES}
    return found | {name: [each.count(0), max(each)] for name, each in shares.items() if each}


def conclude(rows: list[dict], options) -> dict:
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    summary = {
        kind: {prediction: against(of, prediction) for prediction in ("rehearsed", "estimated")}
        for kind, of in kinds.items()
    }
    return {"what": "generated trainings on a real GPU, beside rehearsal and estimate", "told": summary}


OPTIONS = {"count": 70, "seed": 20261126, "rehearse": ""}
CARD = Measurement(__doc__, "card.json", cases, measure, conclude, OPTIONS, name_of=name_of)

if __name__ == "__main__":
    sys.exit(CARD.main())
