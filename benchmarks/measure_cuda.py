"""Compare the estimate for CUDA with torch's own allocator in rehearsals, over generated trainings.

    python benchmarks/measure_cuda.py [--count 190] [--seed 2]
    python benchmarks/measure_cuda.py --difference NUMBER   # the first different allocation or free of a training

Allocated and reserved bytes, and bytes by category, are compared. Another seed gives other trainings. Only a training
that cannot run is left out: its model refuses the recipe, or needs the values of tensors, which a rehearsal does not
compute.
"""

import difflib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from architectures import ARCHITECTURES, CAPABILITIES, configuration, task_of
from runner import Measurement, rehearsing

from perf_helpers.lab import Lab
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.core.training import Experiment, train
from trainmem.estimate import estimate
from trainmem.estimate.allocator import rounded
from trainmem.estimate.memory_estimate import Device
from trainmem.estimate.peak_memory import trace_of
from trainmem.estimate.trace_records import Log
from trainmem.measure import processes
from trainmem.records import Record
from trainmem.rehearsal import card
from trainmem.unknown import NeedsValues

MEMORY = 300 << 30  # per card; enough for all trainings, so that the cache is never emptied
LENGTHS = (64, 128, 200, 256, 333, 512, 768, 1024, 1500, 2048, 4096)
MOST_TOKENS = 12288  # per micro-batch
PRECISIONS = ({}, {}, {"fp16": True}, {"fp16": True}, {"bf16": True}, {"bf16": True}, {"dtype": "bfloat16"})
PRECISIONS += ({"dtype": "float16"},)
CHECKPOINTS = ({}, {}, {}, {"gradient_checkpointing": True})
CHECKPOINTS += ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},)
OPTIMIZERS = (
    "adamw_torch_fused",
    "adamw_torch",
    "sgd",
    "adafactor",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "lion_32bit",
)
OPTIMIZERS += ("lion_8bit", "rmsprop", "adagrad", "ademamix", "adamw_torch_8bit", "adamw_torch_4bit")


@dataclass(frozen=True)
class Training(Record):
    """One generated training: the model's configuration, the training arguments, and the GPUs to rehearse."""

    number: int
    architecture: str
    config: dict
    seq_len: int | None  # None for images
    arguments: dict
    capability: tuple[int, int]
    processes: int

    def task(self, folder: Path) -> Task:
        """Return the task of this training; write the model's configuration into `folder`."""
        return task_of(self.config, self.seq_len, folder / f"{self.number}.json")

    def experiment(self, folder: Path) -> Experiment:
        given = Arguments.of(self.arguments)
        return Experiment(str(self.number), task=self.task(folder), arguments=given, processes=self.processes)

    def estimated(self, folder: Path):
        """Return the estimate for this training; its configuration is written into `folder`.

        Raises ValueError if the estimate refuses the training.
        """
        options = {"device": "cuda", "compute_capability": self.capability, "processes": self.processes}
        return estimate(self.task(folder), **options, **self.arguments)


def training(number: int, seed: int) -> Training:
    """Return training `number` of the series that `seed` generates; successive ones rotate through architectures."""
    draw = random.Random(f"{seed} {number}")
    architecture = [*ARCHITECTURES][number % len(ARCHITECTURES)]
    config = configuration(architecture, draw)
    vision = "image_size" in config
    length = None if vision else draw.choice(LENGTHS)
    size = draw.choice([size for size in (1, 2, 3, 4, 8) if size * (length or 256) <= MOST_TOKENS])
    arguments = {"per_device_train_batch_size": size, "optim": draw.choice(OPTIMIZERS)}
    arguments |= draw.choice(PRECISIONS) | draw.choice(CHECKPOINTS)
    arguments |= {"attn_implementation": "eager"} if draw.random() < 0.2 else {}
    arguments |= {"gradient_accumulation_steps": draw.choice((2, 4))} if draw.random() < 0.25 else {}
    arguments |= {"max_grad_norm": 0.0} if draw.random() < 0.1 else {}
    ranks = 2 if draw.random() < 0.08 else 1
    return Training(number, architecture, config, length, arguments, draw.choice(CAPABILITIES), ranks)


# ---- the reference


def rehearsed(experiment: Experiment, events: Path | None = None):
    """Return a function that trains an experiment as a user would, without any meter, in a rehearsal's fresh process.

    The function returns torch's peaks since the first forward pass, {"allocated", "reserved", "requested": bytes}.

    `events`: file for every allocation and free; None: none is written.
    """

    def work(_):
        import torch

        peaks = []

        def first(*_):
            if not peaks:
                peaks.append(torch.cuda.memory_allocated())
                torch.cuda.reset_peak_memory_stats()

        torch.nn.modules.module.register_module_forward_pre_hook(first)
        if events:
            torch.cuda.memory._record_memory_history(max_entries=10**8, stacks="python", context="alloc")
        with tempfile.TemporaryDirectory() as folder:
            train(experiment, folder, steps=experiment.steps_on_a_gpu, keep_losses=False)
        stats = torch.cuda.memory_stats()
        if events and os.environ.get("RANK", "0") == "0":
            events.write_text(json.dumps(torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]))
        names = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "requested": "requested_bytes"}
        return {name: stats[f"{key}.all.peak"] for name, key in names.items()}

    return work


def compare(lab: Lab, one: Training, folder: Path) -> dict:
    """Rehearse and estimate a training; return its record: "rehearsed" and "estimated" bytes, or why it was "left_out".

    Args:
        lab: rehearses on a card of the training's compute capability.
        folder: folder for the file with the model's configuration.
    """
    experiment, row = one.experiment(folder), one.to_dict()
    # A thread of NCCL may keep sent data a little longer: with two ranks, the smallest of several runs counts.
    tries = 3 if one.processes > 1 else 1
    options = {"task": experiment.task, "measure": "memory", "processes": one.processes} | one.arguments
    try:
        runs = [lab.run(rehearsed(experiment), measure="none", processes=one.processes) for _ in range(tries)]
        watched = [lab.train(f"{one.number}, {number}", **options) for number in range(tries)]
    except NeedsValues as error:
        return row | {"left_out": f"cannot be rehearsed: {error}"}
    if failed := next((run for run in (*runs, *watched) if not run.ok), None):
        return row | {"left_out": f"cannot be trained: {failed.message[-200:]}"}
    reported = [rank["value"] for run in runs for rank in run.ranks or ()] or [runs[0].value]
    row["rehearsed"] = dict(min(reported, key=lambda value: value["allocated"]))
    row["rehearsed"]["breakdown"] = min((run.memory for run in watched), key=lambda memory: memory.peak_bytes).breakdown
    try:
        found = one.estimated(folder)
    except ValueError as error:
        return row | {"estimated": {"refused": str(error)[:300]}}
    row["estimated"] = {"allocated": found.peak_bytes, "reserved": found.memory.reserved_bytes}
    row["estimated"] |= {"seconds": found.seconds, "breakdown": found.memory.breakdown}
    return row


# ---- summary


def summary(rows: list[dict]) -> dict:
    """Return the summary of a comparison of estimates with rehearsals.

    "compared" and "left_out" are numbers of trainings. "estimated" has the numbers of answered, refused and exactly
    equal estimates, the worst error in the allocated bytes of the peak, and the median and worst error in the reserved
    bytes. An error is |estimated / rehearsed - 1|; it is None if no training was answered.

    Args:
        rows: one per training; rows without "rehearsed" are counted as left out.
    """
    rehearsed = [row for row in rows if "rehearsed" in row]
    pairs = [(row["estimated"], row["rehearsed"]) for row in rehearsed if "allocated" in row["estimated"]]
    errors = {
        what: [abs(reported[what] / reference[what] - 1) for reported, reference in pairs]
        for what in ("allocated", "reserved")
    }
    found = {
        "answered": len(pairs),
        "refused": len(rehearsed) - len(pairs),
        "allocated_equal": errors["allocated"].count(0),
        "allocated_worst": max(errors["allocated"], default=None),
        "reserved_median": statistics.median(errors["reserved"]) if pairs else None,
        "reserved_worst": max(errors["reserved"], default=None),
    }
    return {"compared": len(rehearsed), "left_out": len(rows) - len(rehearsed), "estimated": found}


# ---- the first difference of a training


def lives(changes: Iterable[tuple[object, int, str]]) -> list[tuple[int, str]]:
    """Return (bytes as the allocator rounds them, code that allocated the block) for each allocation and each free.

    The result is in the order of the events. The bytes of a free are negative. Frees between two allocations have no
    order and are sorted by size. Frees after the last allocation, at the end of the process, are left out, and so are
    frees of blocks without an allocation in `changes`.

    Args:
        changes: (block, bytes, code) of each event. The block is its address or another key. The bytes of a free are
            negative. The code is e.g. "trainer.py:12". For a free, the number of bytes and the code are ignored: the
            result has the bytes and the code of the block's allocation.
    """
    found, dead, living = [], [], {}
    for which, size, where in changes:
        if size > 0:
            living[which] = rounded(size), where
            found += [*sorted(dead), living[which]]
            dead.clear()
        elif which in living:
            size, where = living.pop(which)
            dead.append((-size, where))
    return found


def difference(one: Training, most: int = 12) -> None:
    """Print the first allocations and frees in which the estimate and torch's allocator differ, if any.

    `most`: how many differences to print.
    """
    on = card(None, one.capability, MEMORY, one.processes)
    with tempfile.TemporaryDirectory() as name, rehearsing(on) as lab:
        events, experiment = Path(name, "events.json"), one.experiment(Path(name))
        lab.run(rehearsed(experiment, events), measure="none", processes=one.processes)
        history = json.loads(events.read_text())
        log = processes.call(_log, experiment, one.capability, timeout=300)
    real = lives(
        (
            entry["addr"],
            entry["size"] if entry["action"] == "alloc" else -entry["size"],
            " < ".join(f"{Path(frame['filename']).name}:{frame['line']}" for frame in entry.get("frames", [])[1:5]),
        )
        for entry in history
        if entry["action"] in ("alloc", "free_completed")
    )
    blocks = ((event, *log.blocks[event]) if event >= 0 else (~event, -1, None) for event in log.events)
    estimated = lives(
        (which, size, f"{label.phase} {label.module} {label.operation}" if label else "")
        for which, size, label in blocks
    )
    sizes = ([size for size, _ in side] for side in (real, estimated))
    matcher = difflib.SequenceMatcher(None, *sizes, autojunk=False)
    apart = [edges for tag, *edges in matcher.get_opcodes() if tag != "equal"]
    for edges in apart[:most]:
        for source, side in (("torch", real[slice(*edges[:2])]), ("estimate", estimated[slice(*edges[2:])])):
            for size, where in side[:6]:
                print(f"{source:>9} {size:+14,d}  {where}")
        print()


def _log(experiment: Experiment, capability: tuple[int, int], tell) -> Log:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return trace_of(experiment, Device("cuda", capability)).log


# ---- the record


def cases(options) -> dict[str, Training]:
    trainings = [training(number, options.seed) for number in range(options.count)]
    return {str(one.number): one for one in trainings}


def of_a_kind(one: Training) -> tuple:
    """Return (compute capability, processes) of a training; trainings for which these are equal are
    rehearsed together.
    """
    return one.capability, one.processes


def measure(cases, options):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for (capability, count), trainings in itertools.groupby(sorted(cases.values(), key=of_a_kind), of_a_kind):
            with rehearsing(card(None, capability, MEMORY, count)) as lab:
                for one in trainings:
                    yield str(one.number), compare(lab, one, folder)


def conclude(rows: list[dict], options) -> dict:
    what = "the estimate for CUDA beside torch's own allocator in a rehearsal; bytes, from the first forward on"
    return {"what": what, "seed": options.seed, "summary": summary(rows)}


def line(row: dict) -> str:
    if "allocated" not in row.get("estimated", {}):
        return row.get("left_out") or row["estimated"]["refused"]
    off = {what: row["estimated"][what] - row["rehearsed"][what] for what in ("allocated", "reserved")}
    return f"{row['architecture']}, off by {off} bytes"


CUDA = Measurement(__doc__, "cuda.json", cases, measure, conclude, {"count": 190, "seed": 2}, line=line, rehearsed=True)

if __name__ == "__main__":
    if "--difference" in sys.argv:
        difference(training(int(sys.argv[-1]), CUDA.options["seed"]))
    else:
        sys.exit(CUDA.main())
