"""What a GPU's memory holds besides tensors: the segments of the caching allocator, cuBLAS' workspaces, the context.

Covers how torch's CUDA allocator turns the births and deaths of tensors into segments taken from the device. Nothing
here needs torch or a GPU. Each figure names the source that it was read in: see also `cuda.PARTS`.
"""

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

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
    """Bytes of cuBLAS' workspaces, which the caching allocator holds from the first product on.

    There is one for each thread that multiplies: a training has two, the forward's and autograd's. On compute
    capability 9, 10 and 12 it is 32 MiB, elsewhere `:4096:2:16:8`, 2 buffers of 4096 KiB and 8 of 16 KiB
    (ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize).
    """
    one = 32 * MIB if compute_capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * KIB
    return 2 * one if training else one


def context_bytes(compute_capability: tuple[int, int]) -> int | None:
    """Bytes of the CUDA context, which the device holds outside of the allocator; None where nobody has published or
    measured it.

    It depends on driver, CUDA and the kernels loaded. The one figure known is 1343 MiB on a V100 in "Model training
    anatomy" of transformers' documentation, taken there with one segment of 2 MiB.
    """
    return 1341 * MIB if compute_capability == (7, 0) else None


def reserved_peak(log: Iterable[tuple[Hashable, int, int]]) -> int:
    """Bytes that the caching allocator has taken from the device after these births and deaths.

    Segments are kept once taken, so the end is the peak: nothing empties the cache, and the device is taken to be large
    enough for the allocator never to do so itself.

    Args:
        log: (key, bytes, +1 at birth or -1 at death) in order, from the loading of the model on.

    Raises:
        ValueError: a key is born twice.
    """
    allocator = CachingAllocator()
    for key, size, sign in log:
        if sign > 0:
            allocator.allocate(key, size)
        else:
            allocator.free(key)
    return allocator.reserved_bytes


@dataclass(slots=True, eq=False)
class _Block:
    address: int  # bytes from the beginning of the first segment
    bytes: int
    pool: list[tuple[int, int, "_Block"]]  # the free blocks that it joins when it is freed: small or large ones
    free: bool = False
    before: "_Block | None" = None  # its neighbours in the segment
    after: "_Block | None" = None


class CachingAllocator:
    """The segments and blocks of torch's CUDA allocator for one stream, with its default settings.

    Follows c10/cuda/CUDACachingAllocator.cpp: malloc, get_free_block, should_split, free_block. Of two equally large
    free blocks it takes the one at the lower address; a new segment is taken to have the highest address.
    """

    def __init__(self):
        self.reserved_bytes = 0  # of all segments taken
        self.allocated_bytes = 0  # of all blocks in use
        self._small: list[tuple[int, int, _Block]] = []  # free blocks as (bytes, address, block), sorted
        self._large: list[tuple[int, int, _Block]] = []
        self._used: dict[Hashable, _Block] = {}

    def allocate(self, key: Hashable, size: int) -> None:
        """Place `size` bytes under the name `key`.

        Raises:
            ValueError: the key is in use.
        """
        if key in self._used:
            raise ValueError(f"key={key!r} is born twice: give each block a key of its own while it lives")
        size = rounded(size)
        if not size:
            return
        is_small = size <= MIB
        pool = self._small if is_small else self._large
        smallest = bisect.bisect_left(pool, (size,))  # the smallest free block that holds it
        block = pool.pop(smallest)[2] if smallest < len(pool) else self._new_segment(size, pool)
        block.free = False
        rest = block.bytes - size
        if rest >= BLOCK_BYTES if is_small else rest > MIB:
            self._split(block, size)
        self.allocated_bytes += block.bytes
        self._used[key] = block

    def free(self, key: Hashable) -> None:
        """Give the block back, joined with its free neighbours. A key that holds no bytes is passed over."""
        block = self._used.pop(key, None)
        if block is None:
            return
        self.allocated_bytes -= block.bytes
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._join(block, neighbour)
        self._put_back(block)

    def _new_segment(self, size: int, pool: list) -> _Block:
        if size <= MIB:
            segment = SEGMENT_BYTES
        elif size < 10 * MIB:
            segment = 20 * MIB
        else:
            segment = in_segments(size)
        block = _Block(self.reserved_bytes, segment, pool)
        self.reserved_bytes += segment
        return block

    def _split(self, block: _Block, size: int) -> None:
        """Leave `size` bytes to the block; what is behind them becomes a free block."""
        rest = _Block(block.address + size, block.bytes - size, block.pool, before=block, after=block.after)
        if block.after:
            block.after.before = rest
        block.after, block.bytes = rest, size
        self._put_back(rest)

    def _join(self, block: _Block, neighbour: _Block) -> None:
        """Take a free neighbour out of its pool and its bytes into the block."""
        neighbour.pool.pop(bisect.bisect_left(neighbour.pool, (neighbour.bytes, neighbour.address)))
        block.bytes += neighbour.bytes
        if neighbour is block.before:
            block.address, block.before = neighbour.address, neighbour.before
            if block.before:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after:
                block.after.before = block

    def _put_back(self, block: _Block) -> None:
        block.free = True
        bisect.insort(block.pool, (block.bytes, block.address, block))
