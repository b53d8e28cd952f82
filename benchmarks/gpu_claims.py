"""Decide claims of the ledger from the GPU suite's rows: calculate each claim's value, and give the verdict."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from operator import methodcaller
from typing import Any

from gpu_rows import FIRST, NOT_TESTABLE, StoredRow

from perf_helpers.course.ledger import decide, load
from trainmem.core import hardware
from trainmem.core.hardware import Machine
from trainmem.records import Ratio

Value = float | Ratio
PRODUCTS_FLOOR = 1.02  # the lab's noise floor on CUDA


class Absent(Exception):
    """A row that a claim needs was not measured; the message says why."""


class Rows:
    """The measured rows of the GPU suite: `rows(part, name)` returns one, e.g. part "ten", name "vanilla".

    A row that is missing or failed raises Absent.

    Args:
        rows: {(part, name): row}.
    """

    def __init__(self, rows: Mapping[tuple[str, str], StoredRow]):
        self._rows = rows
        self.used: list[str] = []  # "part: name" of each requested row

    def __call__(self, part: str, name: str) -> StoredRow:
        self.used.append(f"{part}: {name}")
        row = self._rows.get((part, name))
        if row is None:
            raise Absent(f"{part}, {name}: not measured")
        if not row.ok:
            raise Absent(row.message if row.status == NOT_TESTABLE else f"{part}, {name}: {row.status}, {row.message}")
        return row

    def names(self, part: str, start: str = "") -> list[str]:
        """Return the names of the successful rows of a part that begin with the text `start`, in their order."""
        return [name for (of, name), row in self._rows.items() if of == part and name.startswith(start) and row.ok]

    def memory(self, part: str, name: str) -> dict[str, Any]:
        return self(part, name).runs[-1]["memory"]

    def peak(self, part: str, name: str) -> int:
        return self.memory(part, name)["peak_bytes"]

    def shrunk(self, part: str, name: str, baseline: str) -> float:
        """Return the peak of the row `name` of a part divided by the peak of the part's row `baseline`."""
        return self.peak(part, name) / self.peak(part, baseline)

    def faster(self, part: str, name: str, baseline: str) -> Ratio:
        return self(part, f"{name} against {baseline}").speed_ratio


faster, shrunk = partial(methodcaller, "faster"), partial(methodcaller, "shrunk")  # methods of `Rows`
THREE, ADA, EIGHT = "accumulation + checkpointing + half", "all + Adafactor", "all + 8-bit Adam"


def _eight_bit_memory(rows: Rows) -> float:
    vanilla = rows.peak("ten", "vanilla")
    return (vanilla - rows.peak("ten", "8-bit Adam")) / (vanilla - rows.peak("ten", "Adafactor"))


def _training_dwarfs(rows: Rows) -> float:
    memory = rows.memory("ten", "vanilla")
    return memory["peak_bytes"] / memory["breakdown"]["weights"]


def _batches(rows: Rows, number: int, baseline: int) -> Ratio:
    """Return the speed at one batch size divided by the speed at another, from the part "batch".

    Raises Absent if fewer than three batch sizes were measured.

    Args:
        number, baseline: the two batch sizes, as positions in the list of all that fit, smallest first (-1: the
            largest). The speed at `number` is divided by the speed at `baseline`.
    """
    sizes = [name for name in rows.names("batch", "batch ") if "against" not in name]
    if len(sizes) < 3:
        raise Absent("batch: fewer than three sizes were measured")
    return rows.faster("batch", sizes[number], sizes[baseline])


def _twice_by_batch(rows: Rows) -> Ratio:
    ratios = [rows.faster("fp16", f"{size}, fp16", f"{size}, fp32") for size in (8, 16, 32, 64)]
    return min(ratios, key=lambda ratio: ratio.value)


def _more(rows: Rows, size: str) -> float:
    """Return by how much the fp16 peak is larger than the fp32 peak, as a share of the fp32 peak.

    `size`: the beginning of both rows' names: the micro-batch, e.g. "1", or with two accumulation steps "64 x 2".
    """
    return rows.shrunk("fp16", f"{size}, fp16", f"{size}, fp32") - 1


def _saves_with_batch(rows: Rows) -> float:
    saved = [-_more(rows, f"{size} x 2") for size in (1, 8, 16, 32, 64)]
    return min(more - less for less, more in pairwise(saved))


def _at_ends(rows: Rows, kind: str, phase: str) -> float:
    """Return the bytes of a category at the end of a phase of the fp16 training, divided by those of the fp32 training.

    Both trainings have the micro-batch 64 and two accumulation steps.

    `rows`: the suite's rows; `kind`: the category.
    """
    half, full = (rows.memory("fp16", f"64 x 2, {name}")["phase_breakdowns"][phase] for name in ("fp16", "fp32"))
    return half[kind] / full[kind]


def _only_activations(rows: Rows) -> float:
    kinds = {"weights": "forward", "gradients": "backward", "optimizer_states": "step"}
    return max((_at_ends(rows, *pair) for pair in kinds.items()), key=lambda ratio: abs(ratio - 1))


def _products(fast: str) -> Callable[[Rows], Ratio]:
    def value(rows: Rows) -> Ratio:
        seconds = rows("tf32", "products").value
        pairs = [slow / quick for slow, quick in zip(seconds["fp32"], seconds[fast], strict=True)]
        return Ratio.of_pairs(pairs, PRODUCTS_FLOOR)

    return value


def _longest(rows: Rows) -> list[str]:
    """Return [SDPA's row name, plain attention's row name] at the longest sequence.

    Raises Absent if no sequence was measured.
    """
    lengths = [int(name.removeprefix("eager, ")) for name in rows.names("attention", "eager, ")]
    if not lengths:
        raise Absent("attention: nothing was measured")
    return [f"{name}, {max(lengths)}" for name in ("sdpa", "eager")]


def _fused_kernels(rows: Rows) -> float:
    found = rows("attention", "kernels").value
    return found["flash"] + found["efficient"]


def _before(rows: Rows, name: str) -> str:
    """Return the name of the recipe before the recipe `name` in lesson 14, where each recipe adds a technique.

    Raises Absent if the two recipes were not compared.
    """
    pairs = [pair for pair in rows.names("best", f"{name} against ") if not pair.endswith(FIRST)]
    if not pairs:
        raise Absent(f"best, {name}: not compared with the rung below")
    return pairs[0].removeprefix(f"{name} against ")


VALUES: dict[str, Callable[[Rows], Value]] = {
    "training-dwarfs-weights": _training_dwarfs,
    "accumulation-memory": shrunk("ten", "accumulation", "vanilla"),
    "accumulation-cost": faster("ten", "accumulation", "vanilla"),
    "checkpointing-memory": shrunk("ten", "+ checkpointing", "accumulation"),
    "checkpointing-cost": faster("ten", "+ checkpointing", "accumulation"),
    "checkpointing-cost-2022": faster("ten", "+ checkpointing", "accumulation"),
    "fp16-faster": faster("ten", "half precision", "vanilla"),
    "adafactor-memory": shrunk("ten", "Adafactor", "vanilla"),
    "adafactor-cost": faster("ten", "Adafactor", "vanilla"),
    "adam8bit-memory": _eight_bit_memory,
    "adam8bit-cost": faster("ten", "8-bit Adam", "vanilla"),
    "combined-half-memory": shrunk("ten", THREE, "vanilla"),
    "combined-speed": faster("ten", THREE, "vanilla"),
    "all-three-memory": shrunk("ten", ADA, "vanilla"),
    "all-three-speed": faster("ten", ADA, "vanilla"),
    "all-three-8bit-memory": shrunk("ten", EIGHT, "vanilla"),
    "all-three-8bit-speed": faster("ten", EIGHT, ADA),
    "accelerate-same": shrunk("ten", "Accelerate loop, all + 8-bit Adam", EIGHT),
    "larger-batch-faster": lambda rows: _batches(rows, -1, 0),
    "memory-to-the-limit": lambda rows: _batches(rows, -3, -1),
    "fp16-twice-by-batch": _twice_by_batch,
    "fp16-small-batch-costs": lambda rows: _more(rows, "1 x 2"),
    "fp16-below-eight-costs": lambda rows: _more(rows, "1"),
    "fp16-saves-with-batch": _saves_with_batch,
    "fp16-activations-halve": lambda rows: _at_ends(rows, "activations", "forward"),
    "mixed-saves-only-activations": _only_activations,
    "tf32-faster": _products("tf32"),
    "fp16-up-to-5x": _products("fp16"),
    "tf32-with-half": faster("tf32", "fp16 and tf32", "fp16"),
    "sdpa-memory": lambda rows: rows.shrunk("attention", *_longest(rows)),
    "sdpa-speed": lambda rows: rows.faster("attention", *_longest(rows)),
    "sdpa-fused-kernels": _fused_kernels,
    "compile": faster("compile", "inductor", "uncompiled"),
    "compile-debugging": faster("compile", "aot_eager", "uncompiled"),
    "table-accumulation-speed": faster("best", "accumulation alone", FIRST),
    "table-accumulation-memory": shrunk("best", "accumulation alone", FIRST),
    "table-checkpointing-speed": faster("best", "checkpointing alone", FIRST),
    "table-checkpointing-memory": shrunk("best", "checkpointing alone", FIRST),
    "table-half-speed": faster("best", "+ half precision", FIRST),
    "table-half-memory": shrunk("best", "+ half precision", FIRST),
    "table-batch-speed": faster("best", FIRST, "micro-batch 1"),
    "table-batch-memory": shrunk("best", "micro-batch 1", FIRST),
    "table-optimizer-speed": lambda rows: rows.faster("best", "+ fused AdamW", _before(rows, "+ fused AdamW")),
    "table-optimizer-memory": shrunk("best", "Adafactor alone", FIRST),
    "table-loader-memory": lambda rows: rows.shrunk("best", "+ workers", _before(rows, "+ workers")),
}


def decided(rows: Mapping[tuple[str, str], StoredRow], machine: Machine, profile: str) -> list[dict[str, Any]]:
    """Return a decision as JSON for each claim of `VALUES`, in the order of the ledger.

    A decision has the verdict on the measured value, or "not testable here" with the reason. A rehearsal decides claims
    about memory only.

    Args:
        rows: {(part, name): measured row}.
        machine, profile: the machine of the rows, and the name of their profile.
    """
    ledger, found = load(), []
    for claim in (claim for claim in ledger.values() if claim.id in VALUES):
        selected = Rows(rows)
        testable, missing = hardware.supports(claim.where, machine)
        if testable and machine.rehearsed and claim.decided_by != "memory":
            testable, missing = False, "a rehearsal: memory alone is known"
        try:
            value = VALUES[claim.id](selected) if testable else None
        except Absent as absent:
            testable, missing, value = False, str(absent), None
        number, interval = (value.value, (value.low, value.high)) if isinstance(value, Ratio) else (value, None)
        verdict = decide(claim, interval or number, testable)
        expected = claim.expected_on(machine.kind, profile)
        decision = {"id": claim.id, "lesson": claim.lesson, "quantity": claim.quantity, "verdict": verdict}
        decision |= {"expected": list(expected), "as_expected": not testable or verdict in expected, "value": number}
        decision |= {"interval": interval and list(interval), "missing": missing or None, "rows": selected.used}
        found.append(decision | {"rehearsed": machine.rehearsed})
    return found
