"""What a GPU's memory holds besides tensors: the segments of the caching allocator, cuBLAS' workspaces, the context.

Covers how torch's CUDA allocator turns the births and deaths of tensors into segments taken from the device. Nothing
here needs torch or a GPU. Each figure names the source that it was read in: see also `cuda.PARTS`.
"""

import bisect
from collections.abc import Hashable, Iterable

KIB, MIB = 1024, 1024**2
BLOCK_BYTES = 512  # blocks are multiples of it (c10/core/AllocatorConfig.h: kMinBlockSize)
SEGMENT_BYTES = 2 * MIB  # the smallest segment, and what larger ones are multiples of
DEFAULT_CAPABILITY = (9, 0)  # the GPU that is meant where none is named and none is there: an H100


def rounded(size: int) -> int:
    """Bytes of the block that holds `size` bytes: the next multiple of 512; 0 takes none."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def in_segments(size: int) -> int:
    """Bytes of the segments that hold `size` bytes and nothing else: the next multiple of 2 MiB."""
    return -(-size // SEGMENT_BYTES) * SEGMENT_BYTES


def workspace_bytes(compute_capability: tuple[int, int], training: bool = True) -> int:
    """Bytes of cuBLAS' workspaces, which the caching allocator holds from the first product on: one for each thread
    that multiplies, in a training the forward's and autograd's. On compute capability 9, 10 and 12 it is 32 MiB, else 2
    buffers of 4096 KiB and 8 of 16 KiB (ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize)."""
    one = 32 * MIB if compute_capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * KIB
    return 2 * one if training else one


def context_bytes(compute_capability: tuple[int, int]) -> int | None:
    """Bytes of the CUDA context, which the device holds outside of the allocator; None where nobody has published or
    measured it. It depends on driver, CUDA and the kernels loaded. The one figure known is 1343 MiB on a V100 in "Model
    training anatomy" of transformers' documentation, taken there with one segment of 2 MiB."""
    return 1341 * MIB if compute_capability == (7, 0) else None


def reserved_peak(log: Iterable[tuple[Hashable, int, int]]) -> int:
    """Bytes that the caching allocator has taken from the device after these births and deaths.

    Segments are kept once taken, so the end is the peak: nothing empties the cache, and the device is taken to be large
    enough for the allocator never to do so itself.

    Args:
        log: (key, bytes, +1 at birth or -1 at death) in order, from the loading of the model on. ValueError is raised
            where a key is born twice.
    """
    allocator = CachingAllocator()
    for key, size, sign in log:
        if sign > 0:
            allocator.allocate(key, size)
        else:
            allocator.free(key)
    return allocator.reserved_bytes


class CachingAllocator:
    """The segments and blocks of torch's CUDA allocator for one stream, with its default settings.

    Follows c10/cuda/CUDACachingAllocator.cpp: malloc, get_free_block, should_split, free_block. Of two equally large
    free blocks it takes the one at the lower address; a new segment is taken to have the highest address.
    """

    def __init__(self):
        self.reserved_bytes = 0  # of all segments taken
        self.allocated_bytes = 0  # of all blocks in use
        self._used: dict[Hashable, tuple[int, int, list]] = {}  # (first address, address behind the last, its pool)
        self._small: list[tuple[int, int]] = []  # the pools: free blocks as (bytes, first address), sorted
        self._large: list[tuple[int, int]] = []
        # The other edge of each free block, by either edge: its first address, or the one behind its last. There is an
        # address between two segments, so that blocks of both never touch.
        self._edges: dict[int, int] = {}
        self._next = 0  # first address of the next segment

    def allocate(self, key: Hashable, size: int) -> None:
        """Place `size` bytes under the name `key`. Raises ValueError where it is in use."""
        if key in self._used:
            raise ValueError(f"key={key!r} is born twice: give each block a key of its own while it lives")
        size = rounded(size)
        if not size:
            return
        is_small = size <= MIB
        pool = self._small if is_small else self._large
        smallest = bisect.bisect_left(pool, (size,))  # the smallest free block that holds it
        first, end = self._taken(pool, smallest) if smallest < len(pool) else self._new_segment(size)
        rest = end - first - size
        if rest >= BLOCK_BYTES if is_small else rest > MIB:
            self._put(pool, first + size, end)
            end = first + size
        self.allocated_bytes += end - first
        self._used[key] = first, end, pool

    def free(self, key: Hashable) -> None:
        """Give the block back, joined with its free neighbours. A key that holds no bytes is passed over."""
        if key not in self._used:
            return
        first, end, pool = self._used.pop(key)
        self.allocated_bytes -= end - first
        if (other := self._edges.get(first)) is not None:
            first, _ = self._taken(pool, bisect.bisect_left(pool, (first - other, other)))
        if (other := self._edges.get(end)) is not None:
            _, end = self._taken(pool, bisect.bisect_left(pool, (other - end, end)))
        self._put(pool, first, end)

    def _new_segment(self, size: int) -> tuple[int, int]:
        segment = SEGMENT_BYTES if size <= MIB else 20 * MIB if size < 10 * MIB else in_segments(size)
        first, end = self._next, self._next + segment
        self.reserved_bytes += segment
        self._next = end + 1
        return first, end

    def _put(self, pool: list, first: int, end: int) -> None:
        bisect.insort(pool, (end - first, first))
        self._edges |= {first: end, end: first}

    def _taken(self, pool: list, index: int) -> tuple[int, int]:
        """The edges of a free block, which is free no more."""
        size, first = pool.pop(index)
        del self._edges[first], self._edges[first + size]
        return first, first + size
