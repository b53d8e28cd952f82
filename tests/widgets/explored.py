"""Make runs that explorers can show."""

from trainmem.core.task import Task
from trainmem.records import CATEGORIES, Memory, Run, Timing
from trainmem.unknown import Unknown

TASK = Task("bert-tiny", seq_len=64)
UNKNOWN = Timing(*[Unknown("a rehearsal")] * 5)  # as in a rehearsal


def series(*totals):
    """Return a timeline that has only weights, `totals` bytes at each operation. The first two thirds are forward, the
    last third is backward.
    """
    empty = {name: [0] * len(totals) for name in CATEGORIES}
    phases = ["forward" if 3 * i < 2 * len(totals) else "backward" for i in range(len(totals))]
    named = {"phase": phases, "operation": ["aten.mm"] * len(totals), "module": ["layer.1"] * len(totals)}
    return named | empty | {"weights": list(totals)}


def run(name, peak=None, speed=None, **changes):
    """Return a run with a peak in bytes and a speed in samples per second; None: not measured.

    `name`: the run's name, optimizer and id; `changes`: further fields.
    """
    parts = {"weights": peak}
    memory = peak and Memory(peak, "counted", "forward", "aten.mm", "layer.1", parts, timeline=series(1, peak, 2))
    timing = Timing(1.0, 0.0, 3, 1, speed) if speed else None
    values = {"arguments": {"optim": name}, "task": TASK.to_dict(), "machine": {"name": "a machine"}, "id": name}
    return Run(name, "ok", memory=memory, **(values | {"timing": timing} | changes))
