"""What a training needs of a device's memory, by the estimate."""

from collections.abc import Callable, Mapping
from typing import Any

from perf_helpers.estimate import MemoryEstimate, estimate
from perf_helpers.estimate.allocator import context_bytes
from perf_helpers.lab.task import Task

_UNKNOWN_CONTEXT_BYTES = context_bytes((7, 0))  # of a V100: left for the context of a GPU that nobody measured it on


class Peaks:
    """Estimates of one task on one device, counted."""

    def __init__(self, task: Task, kind: str, capability: tuple[int, int], processes: int):
        self.task, self.kind = task, kind
        self.count = 0  # estimates asked for so far
        self.assumptions: dict[str, None] = {}  # of all of them, each once, in order
        self.on_estimate: Callable[[], Any] = lambda: None  # called after each
        self._options: dict[str, Any] = {"device": kind, "compute_capability": capability, "processes": processes}

    def estimate(self, arguments: Mapping[str, Any], task: Task | None = None) -> MemoryEstimate:
        """The estimate for these training arguments, of another task where one is given."""
        self.count += 1
        estimated = estimate(task or self.task, **self._options, **arguments)
        self.assumptions |= dict.fromkeys(estimated.assumptions)
        self.on_estimate()
        return estimated

    def needed(self, estimated: MemoryEstimate) -> int:
        """The bytes that are compared with a device's memory: on CUDA what the allocator reserves, and the context."""
        memory = estimated.memory
        if self.kind == "cpu":
            return memory.peak_bytes
        return max(memory.reserved_bytes or 0, memory.peak_bytes) + (memory.context_bytes or _UNKNOWN_CONTEXT_BYTES)

    @property
    def note(self) -> str:
        """What `needed` stands for, in words."""
        if self.kind == "cpu":
            return "Needed is counted memory: what the interpreter and its libraries hold comes on top."
        return (
            "Needed is what the allocator reserves and the CUDA context; where that is not known, "
            f"{_UNKNOWN_CONTEXT_BYTES / 2**20:.0f} MiB are left for it, the guides' figure for a V100."
        )
