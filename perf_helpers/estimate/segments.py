"""What a caching allocator keeps books of: segments, the blocks that they are cut into, and the pools of free blocks.

Covers cutting, joining and finding. Not covered: when that is done (`allocator`).
"""

import bisect
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

MIB = 1024**2
SEGMENT_BYTES = 2 * MIB  # the smallest segment, and what larger ones are multiples of


def next_multiple(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


@dataclass(slots=True, eq=False)
class Part:
    """A part of a segment, linked with its neighbours: a block in use, or what is free."""

    pool: "Pool"
    address: int
    size: int  # bytes
    base: int  # the segment's first address
    order: int  # how many segments were taken up to this one
    age: int = 0  # how many blocks torch had made up to this one; what is split off behind it keeps it
    previous: "Part | None" = None
    next: "Part | None" = None
    is_mapped: bool = True  # False: addresses without memory, in an expandable segment
    requested: int = 0  # bytes of it that were asked for; 0 where it is free
    key: Hashable | None = None  # who holds it; None where it is free

    @property
    def is_free(self) -> bool:
        return self.key is None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.previous is None and self.next is None

    def reach(self) -> int:
        """Bytes, with those of the unmapped addresses behind it."""
        return self.size + (self.next.size if self.next is not None and not self.next.is_mapped else 0)

    def cut(self, size: int) -> "Part":
        """Keep the first `size` bytes; the rest, a part of its own."""
        rest = Part(self.pool, self.address + size, self.size - size, self.base, self.order, self.age)
        rest.is_mapped = self.is_mapped
        rest.previous, rest.next, self.next = self, self.next, rest
        if rest.next is not None:
            rest.next.previous = rest
        self.size = size
        return rest

    def take_in(self, behind: "Part") -> None:
        """Grow by the next part, which is none any more."""
        self.size += behind.size
        self.next = behind.next
        if behind.next is not None:
            behind.next.previous = self


TIES: dict[str, Callable[[Part], int]] = {
    "address": lambda part: 0,
    "block": operator.attrgetter("age"),
    "segment": operator.attrgetter("order"),
}


class Pool:
    """The free parts of small segments, or of large ones: BlockPool in torch. `ties`: by what parts of one size are
    ordered, see `allocator_settings.Release`."""

    def __init__(self, is_small: bool, page: int, ties: str = "segment"):
        self.is_small = is_small
        self.page = page  # bytes by which expandable segments grow
        self._tie = TIES[ties]
        self.free: list[tuple[int, int, int, Part]] = []  # (bytes, what decides a tie, address, part), sorted
        self.unmapped: list[tuple[int, Part]] = []  # (address, part), sorted

    def add(self, part: Part) -> None:
        """A free part can be found from now on."""
        if part.is_mapped:
            bisect.insort(self.free, (part.size, self._tie(part), part.address, part))
        else:
            bisect.insort(self.unmapped, (part.address, part))

    def remove(self, part: Part) -> None:
        """A part cannot be found any more."""
        if part.is_mapped:
            del self.free[bisect.bisect_left(self.free, (part.size, self._tie(part), part.address))]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, (part.address,))]

    def join(self, part: Part) -> Part:
        """Add a free part, joined with its neighbours if they are as free and as mapped; what became of it."""
        other, mapped = part.next, part.is_mapped
        if other is not None and other.is_free and other.is_mapped == mapped:
            self.remove(other)
            part.take_in(other)
        other = part.previous
        if other is not None and other.is_free and other.is_mapped == mapped:
            self.remove(other)
            other.take_in(part)
            other.age, part = part.age, other
        self.add(part)
        return part


class Addresses:
    """Ranges of addresses, each in the highest free place: Linux' order, which rehearsals have."""

    def __init__(self, top: int):
        self._top = top
        self._taken: list[tuple[int, int]] = []  # (first address, the one behind the last), from the top down

    def take(self, size: int) -> int:
        """The first address of a free range, which is taken from now on."""
        end, place = self._top, 0
        while place < len(self._taken) and end - self._taken[place][1] < size:
            end, place = self._taken[place][0], place + 1
        self._taken.insert(place, (end - size, end))
        return end - size

    def give(self, address: int) -> None:
        """The range that begins there is free again."""
        self._taken = [taken for taken in self._taken if taken[0] != address]


class Segment(NamedTuple):
    """Neighbouring memory that was taken from the device; of an expandable segment, a part without a hole."""

    address: int
    size: int  # bytes
    is_small: bool  # of the pool for up to 1 MiB
    is_expandable: bool
    blocks: list[Part]


def shown(head: Part, is_expandable: bool) -> list[Segment]:
    """A segment with its blocks from its first part on; of an expandable one, each part without a hole."""
    found, run, part = [], [], head
    while part is not None:
        if part.is_mapped:
            run.append(part)
        if run and (part.next is None or not part.next.is_mapped):
            size = sum(block.size for block in run)
            found.append(Segment(run[0].address, size, head.pool.is_small, is_expandable, run))
            run = []
        part = part.next
    return found
