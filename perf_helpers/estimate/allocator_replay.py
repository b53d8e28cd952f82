"""The births and deaths of a training replayed on the CUDA caching allocator: what it allocates and reserves."""

import itertools
from dataclasses import dataclass, replace

import numpy as np

from perf_helpers.estimate.allocator import CachingAllocator, OutOfMemory, rounded
from perf_helpers.estimate.allocator_settings import Settings
from perf_helpers.estimate.event_log import Log
from perf_helpers.records import TENSOR_CATEGORIES, Memory, Phase, explain


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator says, in bytes."""

    log: Log
    allocated: np.ndarray  # (events + 1,): in use before the first event and after each
    reserved_peak: int  # from the first forward on
    requested_peak: int  # from the first forward on, of the bytes as they were asked for
    is_too_large: bool = False  # for the card: these are the figures of one without limit

    @property
    def peak(self) -> int:
        """After how many events most is allocated, from the first forward on."""
        first = self._position("start")
        return first + int(self.allocated[first:].argmax())

    def highest(self, begins: np.ndarray) -> np.ndarray:
        """The most that is allocated during each operation; `begins`: the events before each, and all of them."""
        begins = np.minimum(begins, len(self.allocated) - 1)
        return np.array([self.allocated[a : b + 1].max() for a, b in itertools.pairwise(begins)])

    def memory(self) -> Memory:
        """As a lab measures it."""
        positions = {label: position for label, position in self.log.marks if label != "start"}
        events = self.log.events[: self.peak] or [0]
        label = self.log.blocks[events[-1] if events[-1] >= 0 else ~events[-1]][1]
        return Memory(
            peak_bytes=int(self.allocated[self.peak]),
            kind="estimated",
            peak_phase=Phase(label.phase).shown,
            peak_operation=label.operation,
            peak_module=label.module,
            breakdown=self._breakdown(self.peak),
            phases={label: int(self.allocated[position]) for label, position in positions.items()},
            phase_breakdowns={label: self._breakdown(position) for label, position in positions.items()},
            reserved_bytes=self.reserved_peak,
        )

    def _position(self, label: str) -> int:
        return next((position for own, position in self.log.marks if own == label), 0)

    def _breakdown(self, position: int) -> dict[str, int]:
        """Bytes by category after so many events; what no tensor shows lies inside operations."""
        live = dict.fromkeys(TENSOR_CATEGORIES, 0)
        for event in self.log.events[:position]:
            size, label = self.log.blocks[event if event >= 0 else ~event]
            if label.category in live:
                live[label.category] += rounded(size) if event >= 0 else -rounded(size)
        return explain(live, int(self.allocated[position]))


def replayed(log: Log, settings: str = "", capacity: int | None = None) -> Replay:
    """The log on torch's allocator.

    Args:
        settings: as in PYTORCH_CUDA_ALLOC_CONF; ValueError where torch has no such option.
        capacity: bytes that the card has for segments; None: no limit.
    """
    allocator = CachingAllocator(Settings.parse(settings), capacity)
    first = next((position for label, position in log.marks if label == "start"), 0)
    allocated = []
    try:
        for number, _ in log.played(allocator):
            if number == first:
                allocator.reset_peaks()
            allocated.append(allocator.allocated_bytes)
    except OutOfMemory:
        return replace(replayed(log, settings), is_too_large=True)
    allocated = np.array([*allocated, allocator.allocated_bytes], dtype=np.int64)
    return Replay(log, allocated, allocator.peak_reserved_bytes, allocator.peak_requested_bytes)
