"""What a GPU's memory holds besides tensors: the segments of the caching allocator, cuBLAS' workspaces, the context.

Covers how torch's CUDA allocator turns the births and deaths of tensors into segments taken from the device, with
every option of PYTORCH_CUDA_ALLOC_CONF that decides about the device's memory. Nothing here needs torch or a GPU. Each
figure names the source that it was read in: see also `cuda.PARTS`. Not covered: private pools (CUDA graphs), what
`per_process_memory_fraction` sets off, the allocator `backend:cudaMallocAsync`.
"""

import bisect
import collections
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainmem.estimate.allocator_settings import Release, Settings, is_since, release

KIB, MIB, GIB = 1024, 1024**2, 1024**3
SEGMENT_BYTES = 2 * MIB  # the smallest segment, and what larger ones are multiples of
BLOCK_BYTES = 512  # blocks are multiples of it (c10/core/AllocatorConfig.h: kMinBlockSize)
UNLIMITED = 1 << 62
TOP_ADDRESS = 0x7F0000000000  # where the first segment ends


def next_multiple(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def rounded(size: int) -> int:
    """Bytes of the block that holds `size` bytes: the next multiple of 512; 0 takes none."""
    return next_multiple(size, BLOCK_BYTES)


def workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Bytes of a workspace of cuBLAS, which the caching allocator holds from the first product on: each thread that
    multiplies has one, in a training the forward's and autograd's. On compute capability 9, 10 and 12 it is 32 MiB,
    else 2 buffers of 4096 KiB and 8 of 16 KiB (ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize)."""
    return 32 * MIB if compute_capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * KIB


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


class OutOfMemory(MemoryError):
    """The card does not hold the bytes asked for, whatever is freed of the cache."""


class CachingAllocator:
    """The segments and blocks of torch's CUDA allocator. What one stream gives back only that stream gets again.

    Follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13: malloc, get_free_block, alloc_block, should_split,
    free_block, release_available_cached_blocks, release_cached_blocks and the expandable segments.
    `benchmarks/measure_allocator.py` compares every count and every block with torch's own.

    Which of several free blocks of one size is taken, each release of torch decides in its own way. Where the address
    decides, as it always does of two expandable segments, it counts where the driver puts segments: each lies below all
    before, or in the highest gap, as Linux gives addresses. A real T4's fall so (docs/upstream/lora-on-a-t4.md).

    Args:
        settings: as torch reads them at its start; they stay.
        rules: of the release that is followed; None: the installed one's.
        capacity: bytes that the device has for segments: its memory less the context and whatever else holds of it.
            An expandable segment has 9/8 of them in addresses, as torch gives it 9/8 of the card's. None: no limit.
        tell: is told (action, address, bytes) of whatever happens, in its order: "alloc" and "free" with the bytes
            that were asked for, and what torch's snapshots call "segment_alloc", "segment_free", "segment_map" and
            "segment_unmap"; of "oom" it is told the bytes that the device has left instead of an address.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        capacity: int | None = None,
        tell: Callable[[str, int, int], Any] = lambda *_: None,
        rules: Release | None = None,
    ):
        settings, rules = settings or Settings(), rules or release()
        ties, self._refuses_early = rules.ties, is_since("2.15", rules)
        self.allocated_bytes = self.peak_allocated_bytes = 0  # of all blocks in use
        self.reserved_bytes = self.peak_reserved_bytes = 0  # of all segments
        self.retries = 0  # how often the whole cache was freed for a request (torch: num_alloc_retries)
        self._tell = tell
        self._pages = SEGMENT_BYTES, settings.large_segment_size_mb * MIB  # of pools for small blocks, and for large
        # By stream, for small blocks and for large ones.
        small, large = ((is_small, page, ties) for is_small, page in zip((True, False), self._pages, strict=True))
        self._pools = collections.defaultdict(lambda: (Pool(*small), Pool(*large)))
        self._used: dict[Hashable, Part] = {}
        self._heads: dict[int, Part] = {}  # the first block of each segment, by its address
        self._order = self._made = 0  # how many segments were taken; how many blocks were made
        self._spaces = Addresses(TOP_ADDRESS)
        self._device_bytes = 0  # taken of the device: segments in its pages
        self._capacity = UNLIMITED if capacity is None else capacity
        self._expands = settings.expandable_segments
        self._divisions = settings.roundup_power2_divisions
        self._max_split = settings.max_split_size_mb * MIB if settings.max_split_size_mb else UNLIMITED
        self._max_rounding = (settings.max_non_split_rounding_mb or settings.large_segment_size_mb) * MIB
        space = 4096 * GIB if capacity is None else capacity + capacity // 8
        if settings.expandable_segments_reserve is not None:
            space = min(space, int(settings.expandable_segments_reserve * GIB))
        self._space = {page: next_multiple(space, page) for page in self._pages}

    def allocate(self, key: Hashable, size: int, stream: int = 0) -> None:
        """Place `size` bytes under the name `key`, for what runs on a `stream` of the device.

        Raises:
            ValueError: the key is in use.
            OutOfMemory: there is no room, whatever is freed of the cache.
        """
        if key in self._used:
            raise ValueError(f"key={key!r} is already allocated: give each live block its own key")
        if not size:
            return
        requested, size = size, self._divided(size)
        pool = self._pools[stream][size > MIB]
        block = self._cached(pool, size) or self._new(pool, size, requested)
        rest = block.size - size
        if rest >= BLOCK_BYTES if pool.is_small or self._expands else rest > MIB and size < self._max_split:
            pool.add(block.cut(size))
            self._is_new(block)
        block.requested, block.key = requested, key
        self._used[key] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self._tell("alloc", block.address, requested)

    def free(self, key: Hashable) -> None:
        """Give the block back, joined with its free neighbours. A key that holds no bytes is passed over."""
        block = self._used.pop(key, None)
        if block is None:
            return
        self._tell("free", block.address, block.requested)
        self.allocated_bytes -= block.size
        block.requested, block.key = 0, None
        block.pool.join(block)

    def empty_cache(self) -> None:
        """Give segments without a block in use back to the device, and such pages of expandable ones."""
        for pool in [pools[is_large] for is_large in (True, False) for pools in self._pools.values()]:
            for *_, block in list(pool.free):
                if self._expands:
                    self._unmap(block)
                elif block.is_whole:
                    self._release(block)

    def reset_peaks(self) -> None:
        """Peaks count from what there is now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def segments(self) -> list[Segment]:
        """Every segment with its blocks, by address."""
        heads = sorted(self._heads.items())
        return [segment for _, head in heads for segment in shown(head, self._expands)]

    def _divided(self, size: int) -> int:
        """Bytes of a block where sizes are rounded to steps between powers of two (roundup_power2_next_division)."""
        steps = self._divisions[min(max(size.bit_length() - 21, 0), 15)]
        if steps <= 1 or size <= BLOCK_BYTES * steps:
            return rounded(size)
        step = (1 << (size.bit_length() - 1)) // steps
        return next_multiple(size, step)

    def _cached(self, pool: Pool, size: int) -> Part | None:
        """The smallest free block that holds so much, no longer in its pool (get_free_block)."""
        free = pool.free
        index = bisect.bisect_left(free, (size,))
        if index == len(free):
            return None
        if self._expands:  # a block counts with the addresses behind it, into which it can grow
            while index + 1 < len(free) and free[index + 1][-1].reach() < free[index][-1].reach():
                index += 1
        found = free[index][0]
        if found >= (self._max_split if size < self._max_split else size + self._max_rounding):
            return None
        return free.pop(index)[-1]

    def _new(self, pool: Pool, size: int, requested: int) -> Part:
        """A block of memory that is taken now (the rest of malloc)."""
        block = self._taken(pool, size)
        if block is None and self._max_split != UNLIMITED and self._released_enough(pool, size):
            block = self._taken(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._taken(pool, size)
        if block is None:
            self._tell("oom", self._capacity - self._device_bytes, size)
            now = f"{self.allocated_bytes} are allocated and {self.reserved_bytes} reserved"
            raise OutOfMemory(f"cannot allocate {requested} bytes: {now}")
        return block

    def _taken(self, pool: Pool, size: int) -> Part | None:
        """A block of a new segment, or of one that grows; None where there is no room (alloc_block)."""
        if self._expands:
            return self._expanded(pool, size)
        segment = next_multiple(size, SEGMENT_BYTES) if size <= MIB or size >= 10 * MIB else self._pages[1]
        device_bytes = next_multiple(segment, SEGMENT_BYTES)
        if self._device_bytes + device_bytes > self._capacity:
            return None
        self._reserve(segment, device_bytes)
        block = self._new_segment(pool, segment)
        self._tell("segment_alloc", block.address, segment)
        return block

    def _new_segment(self, pool: Pool, size: int) -> Part:
        address = self._spaces.take(next_multiple(size, SEGMENT_BYTES))
        self._order += 1
        block = self._heads[address] = Part(pool, address, size, address, self._order)
        return self._is_new(block)

    def _is_new(self, block: Part) -> Part:
        """torch makes a block of its own for it."""
        self._made += 1
        block.age = self._made
        return block

    def _reserve(self, size: int, device_bytes: int) -> None:
        self.reserved_bytes += size
        self._device_bytes += device_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release(self, block: Part) -> None:
        """Give a segment back that is one free block."""
        block.pool.remove(block)
        del self._heads[block.address]
        self._spaces.give(block.address)
        self._reserve(-block.size, -next_multiple(block.size, SEGMENT_BYTES))
        self._tell("segment_free", block.address, block.size)

    def _released_enough(self, pool: Pool, size: int) -> bool:
        """Give one block back that is too large to be split and holds so much, or several, the largest first; whether
        that was enough (release_available_cached_blocks)."""
        if self._expands:
            return False
        wanted, released = max(size, self._max_split), 0
        index = bisect.bisect_left(pool.free, (wanted,))
        if index < len(pool.free):
            self._release(pool.free[index][-1])
            return True
        while released < wanted and pool.free and pool.free[-1][0] >= self._max_split:
            released += pool.free[-1][0]
            self._release(pool.free[-1][-1])
        return released >= wanted

    # ---- expandable segments: addresses are reserved once, and memory is mapped to them page by page

    def _expanded(self, pool: Pool, size: int) -> Part | None:
        """A free block that has grown to hold so much (try_allocate_expandable_block). For what no segment's
        addresses hold, torch before 2.15 takes a segment in vain."""
        if self._refuses_early and size > self._space[pool.page]:
            return None
        block = self._expandable(pool, size)
        if not block.is_mapped:
            block = self._map(block, min(block.size, size))
        while block is not None and block.size < size:
            block = self._map(block.next, min(size - block.size, block.next.size)) if block.next is not None else None
        if block is not None:
            block.pool.remove(block)
        return block

    def _expandable(self, pool: Pool, size: int) -> Part:
        """The lowest block that can grow to so much (find_expandable_block)."""
        for _, block in pool.unmapped:
            if block.previous is not None and block.previous.is_free:
                block = block.previous
            reach, part = 0, block
            while reach < size and part is not None and part.is_free:
                reach += part.size
                part = part.next
            if reach >= size:
                return block
        block = self._new_segment(pool, self._space[pool.page])
        block.is_mapped = False
        pool.add(block)
        return block

    def _map(self, block: Part, size: int) -> Part | None:
        """Map memory to the first addresses of an unmapped block; the free block that holds it (map_block)."""
        page = block.pool.page
        size = next_multiple(size, page)
        if self._device_bytes + size > self._capacity:
            return None
        block.pool.remove(block)
        if size < block.size:
            block.pool.add(self._is_new(block.cut(size)))
        block.is_mapped = True
        self._reserve(size, size)
        self._tell("segment_map", block.address, size)
        return block.pool.join(block)

    def _unmap(self, block: Part) -> None:
        """Give the whole pages of a free block back, and its segment where nothing is left of it (unmap_block)."""
        page = block.pool.page
        begin = next_multiple(block.address - block.base, page) + block.base
        end = (block.address + block.size - block.base) // page * page + block.base
        if begin >= end:
            return
        block.pool.remove(block)
        if block.address < begin:
            before, block = block, block.cut(begin - block.address)
            block.pool.add(self._is_new(before))
        if end < block.address + block.size:
            block.pool.add(self._is_new(block.cut(end - block.address)))
        block.is_mapped = False
        self._reserve(begin - end, begin - end)
        self._tell("segment_unmap", begin, end - begin)
        block = block.pool.join(block)
        if block.is_whole:
            block.pool.remove(block)
            del self._heads[block.address]
            self._spaces.give(block.address)
