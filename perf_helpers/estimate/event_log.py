"""The births and deaths of a training's blocks in their order: what an allocator is asked for.

How the caching allocator cuts its memory depends on the whole sequence, from the loading of the model on.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Label(NamedTuple):
    """What a block is."""

    operation: str  # that made it
    category: str  # of `Category`
    phase: str  # of its birth
    module: str  # that it belongs to, by its name in the model
    stream: int = 0  # see `tracker.Block`


@dataclass(frozen=True, slots=True)
class Log:
    """Births and deaths of blocks in their order, from the loading of the model on."""

    blocks: list[tuple[int, Label]]  # (bytes, not rounded; what it is), in the order of birth
    events: list[int]  # n: the birth of block n; ~n: its death
    marks: list[tuple[str, int]]  # (label, how many events are before it): "start" of the first forward, ends of phases
    emptied: tuple[int, ...] = ()  # after how many events the allocator is told to give back what is free

    def played(self, allocator: Any) -> Iterator[tuple[int, Label]]:
        """Perform the log on an `allocator.CachingAllocator`; before each event come its number and its block's label.
        Raises OutOfMemory where there is no room."""
        emptied = set(self.emptied)
        for number, event in enumerate(self.events):
            block = event if event >= 0 else ~event
            size, label = self.blocks[block]
            yield number, label
            if number in emptied:
                allocator.empty_cache()
            if event >= 0:
                allocator.allocate(block, size, label.stream)
            else:
                allocator.free(block)


def recorded(tracker: Any) -> Log:
    """The log of a training that a `tracker.Tracker` has followed, without what dies after the last birth and mark."""
    entries, marks = list(tracker.log), [(label, position) for label, position, _ in tracker.marks]
    ends = [end for end, *_ in tracker.operations]
    numbers: dict[int, int] = {}  # of the blocks
    labels: dict[Label, Label] = {}  # one object for all that are equal, so that few are sent between processes
    blocks, events, length = [], [], max((position for _, position in marks), default=0)
    for position, (block, sign) in enumerate(entries):
        if sign < 0:
            events.append(~numbers[id(block)])
            continue
        _, phase, _, module = tracker.operations[min(bisect.bisect_right(ends, position), len(ends) - 1)]
        label = Label(block.operation, block.category, phase, module, block.stream)
        numbers[id(block)] = len(blocks)
        events.append(len(blocks))
        blocks.append((block.bytes, labels.setdefault(label, label)))
        length = max(length, len(events))
    return Log(blocks, events[:length], marks, tuple(tracker.emptied))
