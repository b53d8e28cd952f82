"""Model torch's CUDA caching allocator: how allocations and frees become segments of a GPU's memory.

Covers the segments, cuBLAS' workspaces, and every option of PYTORCH_CUDA_ALLOC_CONF that affects the device's memory.
Nothing here needs torch or a GPU. Comments and docstrings name the sources of numbers and rules; see also
`cuda.PARTS`. Not covered: private pools (CUDA graphs), the effects of `per_process_memory_fraction`, the allocator
`backend:cudaMallocAsync`.
"""

import bisect
import collections
import operator
import os
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainmem.estimate.allocator_settings import Release, Settings, is_since, release

KIB, MIB, GIB = 1024, 1024**2, 1024**3
SEGMENT_BYTES = 2 * MIB  # the smallest segment; larger ones are multiples of it
BLOCK_BYTES = 512  # blocks are multiples of it (c10/core/AllocatorConfig.h: kMinBlockSize)
UNLIMITED = 1 << 62
TOP_ADDRESS = 0x7F0000000000  # the end of the first segment


def next_multiple(size: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def rounded(size: int) -> int:
    """Return the bytes of the block that holds `size` bytes: the next multiple of 512, 0 for 0."""
    return next_multiple(size, BLOCK_BYTES)


def workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Return the bytes of one cuBLAS workspace, which the caching allocator holds from the first matmul on.

    Each thread that runs matmuls has a workspace: in a training, the thread of the forward pass and autograd's thread.
    The variable CUBLAS_WORKSPACE_CONFIG, which `full_determinism` sets, has the size in KiB and the number of the
    workspace's buffers. Without the variable, a workspace has 32 MiB on compute capability 9, 10 and 12, otherwise
    2 buffers of 4096 KiB and 8 of 16 KiB (ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize).
    """
    if buffers := re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")):
        return sum(int(size) * int(count) * KIB for size, count in buffers)
    return 32 * MIB if compute_capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * KIB


@dataclass(slots=True, eq=False)
class Part:
    """Hold a contiguous piece of a segment (torch: Block), in use or free, and links to the pieces beside it."""

    pool: "Pool"
    address: int
    size: int  # bytes
    base: int  # the segment's first address
    order: int  # the segment's number, counted in the order in which segments were taken
    age: int = 0  # the number of torch's Block object, in the order of creation; parts split off behind it keep it
    previous: "Part | None" = None
    next: "Part | None" = None
    is_mapped: bool = True  # False: addresses without memory, in an expandable segment
    requested: int = 0  # bytes that the program requested; 0 if the part is free
    key: Hashable | None = None  # the key that `allocate` got; None if the part is free

    @property
    def is_free(self) -> bool:
        return self.key is None

    @property
    def is_whole(self) -> bool:
        """Whether this part of a segment is the whole segment."""
        return self.previous is None and self.next is None

    def reach(self) -> int:
        """Return the bytes to which this part can grow: its own bytes plus the unmapped bytes directly behind it."""
        return self.size + (self.next.size if self.next is not None and not self.next.is_mapped else 0)

    def cut(self, size: int) -> "Part":
        """Keep the first `size` bytes of this part; return the remaining bytes as a new part."""
        rest = Part(self.pool, self.address + size, self.size - size, self.base, self.order, self.age)
        rest.is_mapped = self.is_mapped
        rest.previous, rest.next, self.next = self, self.next, rest
        if rest.next is not None:
            rest.next.previous = rest
        self.size = size
        return rest

    def absorb(self, behind: "Part") -> None:
        """Grow by the part `behind`, the next in the segment; the caller must not use `behind` afterwards."""
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
    """Keep the free parts of all small segments, or of all large ones, sorted (torch: BlockPool).

    Args:
        is_small: whether the pool has the small segments, for blocks of up to 1 MiB.
        page: bytes by which the pool's expandable segments grow.
        ties: which of several free parts of the same size comes first. "address": the one at the lowest address.
            "block": the one that torch created first. "segment": the one in the segment that was taken first from the
            device, and in one segment the one at the lowest address.
    """

    def __init__(self, is_small: bool, page: int, ties: str = "segment"):
        self.is_small = is_small
        self.page = page  # bytes by which expandable segments grow
        self._tie = TIES[ties]
        self.free: list[tuple[int, int, int, Part]] = []  # (bytes, tie breaker, address, part), sorted
        self.unmapped: list[tuple[int, Part]] = []  # (address, part), sorted

    def add(self, part: Part) -> None:
        """Add a free part to the pool."""
        if part.is_mapped:
            bisect.insort(self.free, (part.size, self._tie(part), part.address, part))
        else:
            bisect.insort(self.unmapped, (part.address, part))

    def remove(self, part: Part) -> None:
        """Remove a free part from the pool."""
        if part.is_mapped:
            del self.free[bisect.bisect_left(self.free, (part.size, self._tie(part), part.address))]
        else:
            del self.unmapped[bisect.bisect_left(self.unmapped, (part.address,))]

    def join(self, part: Part) -> Part:
        """Add a free part, merged with free neighbours of its kind (mapped or unmapped); return the merged part."""
        other, mapped = part.next, part.is_mapped
        if other is not None and other.is_free and other.is_mapped == mapped:
            self.remove(other)
            part.absorb(other)
        other = part.previous
        if other is not None and other.is_free and other.is_mapped == mapped:
            self.remove(other)
            other.absorb(part)
            other.age, part = part.age, other
        self.add(part)
        return part


class Addresses:
    """Give ranges of addresses to segments: each range is put at the highest free place, as Linux does.

    `top`: the address below which all ranges are.
    """

    def __init__(self, top: int):
        self._top = top
        self._taken: list[tuple[int, int]] = []  # (first address, the one after the last), highest first

    def take(self, size: int) -> int:
        """Reserve `size` bytes of addresses and return the first address."""
        end, place = self._top, 0
        while place < len(self._taken) and end - self._taken[place][1] < size:
            end, place = self._taken[place][0], place + 1
        self._taken.insert(place, (end - size, end))
        return end - size

    def free(self, address: int) -> None:
        """Free the range of addresses that begins at `address`."""
        self._taken = [taken for taken in self._taken if taken[0] != address]


class Segment(NamedTuple):
    """Hold one contiguous range of memory taken from the device, and its blocks.

    The range is a whole segment, or one contiguously mapped part of an expandable segment.
    """

    address: int
    size: int  # bytes
    is_small: bool  # whether it belongs to the pool for blocks of up to 1 MiB
    is_expandable: bool
    blocks: list[Part]


def segment_runs(head: Part, is_expandable: bool) -> list[Segment]:
    """Return the contiguously mapped ranges, with their blocks, of the segment whose first block is `head`.

    A segment that is not expandable is one such range. `is_expandable`: whether the segment is expandable.
    """
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
    """Raised if a request does not fit on the card, even after the cache has been freed."""


class CachingAllocator:
    """Model the segments and blocks of torch's CUDA allocator. Freed memory is reused only on the stream that freed it.

    Follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13: malloc, get_free_block, alloc_block, should_split,
    free_block, release_available_cached_blocks, release_cached_blocks and the expandable segments.
    `benchmarks/measure_allocator.py` compares every count and every block with torch's own.

    If several free blocks have the same size, `rules` say which one is taken. If several expandable segments can grow,
    the one at the lowest address grows. Addresses depend on where the driver puts segments. This class puts each
    segment below all earlier segments or in the highest gap, as Linux does, and as seen on a real T4
    (docs/upstream/lora-on-a-t4.md).

    Args:
        settings: the options of PYTORCH_CUDA_ALLOC_CONF, as torch reads them at its start; None: the defaults.
        capacity: bytes that the device has for segments: its memory minus the context and other uses. None: no limit.
            An expandable segment gets 9/8 of these bytes as addresses, as torch gives it 9/8 of the card's memory.
        on_event: called with (action, address, bytes) for each event, in order: "alloc" and "free" with the requested
            bytes, and "segment_alloc", "segment_free", "segment_map" and "segment_unmap" as in torch's snapshots. For
            "oom" the second value is the bytes that the device has left instead of an address.
        rules: the rules of a torch release, see `allocator_settings.release`; None: the installed release.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        capacity: int | None = None,
        on_event: Callable[[str, int, int], Any] = lambda *_: None,
        rules: Release | None = None,
    ):
        settings, rules = settings or Settings(), rules or release()
        ties, self._refuses_early = rules.ties, is_since("2.15", rules)
        self.allocated_bytes = self.peak_allocated_bytes = 0  # of all blocks in use
        self.reserved_bytes = self.peak_reserved_bytes = 0  # of all segments
        self.retries = 0  # how often the whole cache was freed for a request (torch: num_alloc_retries)
        self._on_event = on_event
        self._pages = SEGMENT_BYTES, settings.large_segment_size_mb * MIB  # of the pools for small and large blocks
        # Two pools per stream: for small blocks and for large ones.
        small, large = ((is_small, page, ties) for is_small, page in zip((True, False), self._pages, strict=True))
        self._pools = collections.defaultdict(lambda: (Pool(*small), Pool(*large)))
        self._used: dict[Hashable, Part] = {}
        self._heads: dict[int, Part] = {}  # the first block of each segment, by its address
        self._order = self._made = 0  # counts of segments taken and of blocks made
        self._spaces = Addresses(TOP_ADDRESS)
        self._device_bytes = 0  # taken from the device: segments rounded up to its pages
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
        """Allocate a block for `size` bytes under the name `key`, on a `stream` of the device.

        Raises:
            ValueError: the key is in use.
            OutOfMemory: there is no room, even after the cache has been freed.
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
        self._on_event("alloc", block.address, requested)

    def free(self, key: Hashable) -> None:
        """Free the block with the name `key` and merge it with free neighbours; ignore a key without a block."""
        block = self._used.pop(key, None)
        if block is None:
            return
        self._on_event("free", block.address, block.requested)
        self.allocated_bytes -= block.size
        block.requested, block.key = 0, None
        block.pool.join(block)

    def empty_cache(self) -> None:
        """Return unused segments to the device, and unused pages of expandable segments."""
        for pool in [pools[is_large] for is_large in (True, False) for pools in self._pools.values()]:
            for *_, block in list(pool.free):
                if self._expands:
                    self._unmap(block)
                elif block.is_whole:
                    self._release(block)

    def reset_peaks(self) -> None:
        """Restart the peaks of allocated and reserved bytes from the present values."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def segments(self) -> list[Segment]:
        """Return all segments with their blocks, sorted by address."""
        heads = sorted(self._heads.items())
        return [segment for _, head in heads for segment in segment_runs(head, self._expands)]

    def _divided(self, size: int) -> int:
        """Return a block's bytes under `roundup_power2_divisions` (torch: roundup_power2_next_division)."""
        steps = self._divisions[min(max(size.bit_length() - 21, 0), 15)]
        if steps <= 1 or size <= BLOCK_BYTES * steps:
            return rounded(size)
        step = (1 << (size.bit_length() - 1)) // steps
        return next_multiple(size, step)

    def _cached(self, pool: Pool, size: int) -> Part | None:
        """Take the smallest free block for `size` bytes out of `pool`; None: no block fits (torch: get_free_block)."""
        free = pool.free
        index = bisect.bisect_left(free, (size,))
        if index == len(free):
            return None
        if self._expands:  # a block's size includes the unmapped addresses behind it, into which it can grow
            while index + 1 < len(free) and free[index + 1][-1].reach() < free[index][-1].reach():
                index += 1
        found = free[index][0]
        if found >= (self._max_split if size < self._max_split else size + self._max_rounding):
            return None
        return free.pop(index)[-1]

    def _new(self, pool: Pool, size: int, requested: int) -> Part:
        """Return a block of `size` bytes in memory taken from the device (torch: malloc, if no cached block fits)."""
        block = self._taken(pool, size)
        if block is None and self._max_split != UNLIMITED and self._released_enough(pool, size):
            block = self._taken(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._taken(pool, size)
        if block is None:
            self._on_event("oom", self._capacity - self._device_bytes, size)
            now = f"{self.allocated_bytes} are allocated and {self.reserved_bytes} reserved"
            raise OutOfMemory(f"cannot allocate {requested} bytes: {now}")
        return block

    def _taken(self, pool: Pool, size: int) -> Part | None:
        """Return a block of `size` bytes in a new or grown segment of `pool`; None: no room (torch: alloc_block)."""
        if self._expands:
            return self._expanded(pool, size)
        segment = next_multiple(size, SEGMENT_BYTES) if size <= MIB or size >= 10 * MIB else self._pages[1]
        device_bytes = next_multiple(segment, SEGMENT_BYTES)
        if self._device_bytes + device_bytes > self._capacity:
            return None
        self._reserve(segment, device_bytes)
        block = self._new_segment(pool, segment)
        self._on_event("segment_alloc", block.address, segment)
        return block

    def _new_segment(self, pool: Pool, size: int) -> Part:
        address = self._spaces.take(next_multiple(size, SEGMENT_BYTES))
        self._order += 1
        block = self._heads[address] = Part(pool, address, size, address, self._order)
        return self._is_new(block)

    def _is_new(self, block: Part) -> Part:
        """Give a block the number of a newly created Block object of torch, and return the block."""
        self._made += 1
        block.age = self._made  # may decide which free block of one size is taken first, see `Pool`
        return block

    def _reserve(self, size: int, device_bytes: int) -> None:
        self.reserved_bytes += size
        self._device_bytes += device_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release(self, block: Part) -> None:
        """Return the memory of a segment to the device; `block` is free and is the whole segment."""
        block.pool.remove(block)
        del self._heads[block.address]
        self._spaces.free(block.address)
        self._reserve(-block.size, -next_multiple(block.size, SEGMENT_BYTES))
        self._on_event("segment_free", block.address, block.size)

    def _released_enough(self, pool: Pool, size: int) -> bool:
        """Release enough free blocks; return whether that succeeded (torch: release_available_cached_blocks)."""
        if self._expands:
            return False
        wanted, released = max(size, self._max_split), 0
        index = bisect.bisect_left(pool.free, (wanted,))
        if index < len(pool.free):  # the smallest block that has enough bytes
            self._release(pool.free[index][-1])
            return True
        # Otherwise blocks of at least max_split_size_mb, the largest first.
        while released < wanted and pool.free and pool.free[-1][0] >= self._max_split:
            released += pool.free[-1][0]
            self._release(pool.free[-1][-1])
        return released >= wanted

    # ---- expandable segments: addresses are reserved once, and memory is mapped to them page by page

    def _expanded(self, pool: Pool, size: int) -> Part | None:
        """Return a free block, grown to `size` bytes; None: no room (torch: try_allocate_expandable_block)."""
        # Too large for a segment: torch >= 2.15 takes none; older ones take one, and map all of it if there is room.
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
        """Return the first free block that can grow to `size` bytes, or a new one (torch: find_expandable_block)."""
        for _, block in pool.unmapped:  # the lowest address first
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
        """Map the first `size` bytes of an unmapped block; return the free block, None: no room (torch: map_block)."""
        page = block.pool.page
        size = next_multiple(size, page)
        if self._device_bytes + size > self._capacity:
            return None
        block.pool.remove(block)
        if size < block.size:
            block.pool.add(self._is_new(block.cut(size)))
        block.is_mapped = True
        self._reserve(size, size)
        self._on_event("segment_map", block.address, size)
        return block.pool.join(block)

    def _unmap(self, block: Part) -> None:
        """Unmap the whole pages of a free block; remove its segment if no mapped page is left (torch: unmap_block)."""
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
        self._on_event("segment_unmap", begin, end - begin)
        block = block.pool.join(block)
        if block.is_whole:
            block.pool.remove(block)
            del self._heads[block.address]
            self._spaces.free(block.address)
