"""List the memory requests of CUDA's kernels that sort, select and draw, see `kernels`.

Each rule (a function in `RULES`) gets the GPU, `made` (the results on fake tensors) and the operation's arguments. The
rule returns the requests in the order in which the kernel makes them. A request is a tensor (a result), a number (the
bytes of a buffer) or a `Free` (the release of a buffer). Most of these kernels sort with CUB, in a buffer whose size
depends on the GPU's compute capability.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false

from trainmem.estimate import reduction_scratch
from trainmem.estimate.allocator import next_multiple
from trainmem.estimate.attention_kernels import CUB_BYTES, HALF, WORD, Free, Gpu, Step, contiguous_copy, scan_bytes

aten = torch.ops.aten

# (rows, numbers in a row): up to so many rows, and from this length on, several blocks search one row (TensorTopK.cu).
_SHARED_ROWS = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (math.inf, 400))


def _unique_at_once(gpu: Gpu) -> int:
    """Return the `tile` for `scan_bytes` in a search for distinct values: the sorted elements per thread block."""
    return 4928 if gpu.capability >= (9, 0) else 1344 if gpu.capability == (8, 0) else 320


def _sorted_at_once(gpu: Gpu) -> dict[int, int]:
    """Return {bytes of a key: elements that a thread block sorts at once}; `sort_bytes` explains the key 0."""
    of_words = {7: (2816, 2816, 2816), 8: (3840, 3072, 3840)}.get(gpu.capability[0], (5760, 5376, 4608))
    return dict(zip((0, 4, 8), of_words, strict=True)) | ({1: 3456, 2: 5632} if gpu.capability >= (9, 0) else {})


def sort_bytes(gpu: Gpu, count: int, largest: int, key: int = WORD) -> int:
    """Return the bytes of the buffer in which CUB sorts `count` keys, and their positions with them, by radix sort.

    Each pass sorts by 8 bits. The buffer holds the bins of each pass and the progress of each thread block; if
    there is more than one pass, it also holds a second copy of the keys and positions.
    Source: NVIDIA/cccl, cub/device/dispatch/dispatch_radix_sort.cuh.

    Args:
        count: number of keys.
        largest: a number that is larger than all keys.
        key: bytes of a key; 0: keys of 8 bytes without positions.
    """
    passes = -(-max(largest - 1, 1).bit_length() // 8)
    shares = -(-count // _sorted_at_once(gpu)[key])
    again = next_multiple(count * key, CUB_BYTES) + next_multiple(count * WORD, CUB_BYTES) if passes > 1 else 0
    return again + 1024 * shares + 2048 * passes + 511


def _keys_bytes(gpu: Gpu, count: int, key: int) -> int:
    """Return the bytes of the buffer in which CUB sorts `count` numbers of `key` bytes, together with positions."""
    if key in _sorted_at_once(gpu):
        return sort_bytes(gpu, count, 1 << (8 * key - 2), key)
    # Before capability 9.0, numbers of 8 or 16 bits: separate bins for each multiprocessor.
    again = next_multiple(count * key, CUB_BYTES) + next_multiple(count * WORD, CUB_BYTES)
    return again + (10_240 if key > 1 else 2560) * gpu.processors.count + 45_311


def _sort(gpu: Gpu, made, tensor, dim=-1, *_, **options) -> list[Step]:
    """Return the memory requests of `sort`, in the kernel's order (cuda/SortStable.cu, Sort.cpp)."""
    dim = options.get("dim", dim)
    size = tensor.shape[dim] if tensor.dim() else 1
    if not tensor.numel() or size == 1:
        return made
    if size <= 4096:
        return [*made, size * WORD]  # the positions 0, 1, 2 and so on of a row
    count, key, rows = tensor.numel(), tensor.element_size(), tensor.numel() // size
    is_dense = is_non_overlapping_and_dense_or_false(tensor) and tensor.stride(dim) == 1
    # Copies of the input and of the results, if the numbers of a row do not lie next to each other.
    copies = [] if is_dense else [tensor.nbytes, *(each.nbytes for each in made)]
    places, n = count * WORD, len(copies)
    if rows == 1 or size >= 10**6:  # CUB sorts each row on its own
        return [*made, *copies, size * WORD, _keys_bytes(gpu, size, key)]
    if rows >= 128:  # CUB sorts the rows as segments of one array
        twice = next_multiple(count * key, CUB_BYTES) + next_multiple(places, CUB_BYTES)
        return [*made, *copies, places, twice + 255]
    # CUB sorts all rows together: by the value of their numbers, and then by row.
    first = [places, places, count * key, _keys_bytes(gpu, count, key), Free(n + 3), Free(n + 2)]
    return [*made, *copies, *first, sort_bytes(gpu, count, rows, key=0)]


def _topk(gpu: Gpu, made, tensor, k, dim=-1, largest=True, ordered=True, *_, **__) -> list[Step]:
    """Return the memory requests of `topk`, in the kernel's order (cuda/TensorTopK.cu: mbtopk, TensorTopK.cpp)."""
    size = tensor.shape[dim] if tensor.dim() else 1
    rows, buffers = tensor.numel() // max(size, 1), []
    # Several thread blocks search a long row by radix select: counts of each digit's values, and their running sums.
    if size >= next(length for most, length in _SHARED_ROWS if rows <= most):
        threads = gpu.processors.count * 6 * 256
        each = min(max(-(-tensor.numel() // threads), 4), 64)
        blocks = rows * -(-size // (256 * each))
        buffers = [tensor.element_size() * rows, WORD * rows, WORD * rows, 512 * blocks, 1024 * rows]
        buffers += [4 * blocks, 4 * blocks, scan_bytes(blocks), Free(7), scan_bytes(blocks), *[Free(0)] * 8]
    if not ordered or k <= 4096:
        return [*made, *buffers]
    results = [each.nbytes for each in reversed(made)]  # buffers to sort them
    sort = [Free(step.index + 2) if isinstance(step, Free) else step for step in _sort(gpu, [], made[0], dim)]
    left = sum(-1 if isinstance(step, Free) else 1 for step in sort)
    return [*made, *buffers, *results, *sort, *[Free(2)] * left, results[0]]


def _randperm(gpu: Gpu, made, *_, **__) -> list[Step]:
    """Return the memory requests of `randperm`, which sorts positions by random keys (cuda/Randperm.cu)."""
    count = made[0].numel()
    bits = math.ceil(math.log2(count - (6 * count**2 + 1) / (12 * math.log(0.9)))) if count else 0
    key = 4 if bits <= 32 else WORD
    sort = sort_bytes(gpu, count, 1 << bits, key) if count > (2304 if key == WORD else 2048) else 1
    return [*made, WORD, Free(0), count * WORD, count * key, count * key, sort] if count else made


def _multinomial(gpu: Gpu, made, tensor, count, replacement=False, *_, **__) -> list[Step]:
    """Return the memory requests of `multinomial`, in the kernel's order.

    Source: native/Distributions.cpp, cuda/MultinomialKernel.cu.
    """
    if replacement and count > 1:
        return [*made, tensor.nbytes, tensor.nbytes]
    # Small buffers to check the probabilities, then `tensor.nbytes` for a random number for each probability.
    number, rows = tensor.itemsize, tensor.numel() // tensor.shape[-1]
    every = range(tensor.dim())
    shared = reduction_scratch.scratch_bytes(tensor.shape, tensor.stride(), every, gpu.processors, number)
    checks = [number, *shared, *[Free(1)] * len(shared), number, *shared, *[Free(2)] * len(shared), 1, 1, 1]
    sums = [rows * number, rows, 1, Free(4), Free(3)] if tensor.dim() > 1 else [number, 1, Free(3)]
    chosen = [] if count == 1 else [made[0].numel() * number]  # one number for each sample
    return [*made, *checks, Free(2), Free(2), *sums, 1, Free(4), tensor.nbytes, *chosen]


def _embedding_backward(
    gpu: Gpu, made, gradient, indices, weights, padding, scale_by_frequency, *_, in_parts=False, **__
) -> list[Step]:
    """Return the memory requests of `embedding_dense_backward`, in the kernel's order.

    `in_parts`: always use partial sums.
    Source: cuda/Embedding.cu, EmbeddingBackwardKernel.cu.
    """
    count, width = indices.numel(), gradient.shape[-1]
    copies = [*contiguous_copy(gradient), *contiguous_copy(indices)]
    if count <= 3072 and not scale_by_frequency:  # the indices are not sorted
        return [*copies, *made]
    rows = min(count, weights)
    sums = count // 10 + rows  # partial sums, each of up to 10 gradients of equal indices
    first = len(copies)
    sort = sort_bytes(gpu, count, weights) if count > 2304 else 1
    # The indices are sorted before the result is allocated.
    ordered = [*[count * WORD] * 3, sort, Free(first + 3), Free(first + 2)]
    differ = scan_bytes(count, _unique_at_once(gpu))
    unique = [count * WORD, WORD, count * WORD, differ, Free(first + 5), Free(first + 4)]
    parts = [rows * WORD, rows * WORD, scan_bytes(rows), Free(first + 6), WORD, sums * WORD]
    if not in_parts and rows < 4 * gpu.processors.count and count // 10 > 3 * rows:
        # Few rows, each named often: the gradients are added to the rows, in fp32 if the result has 16 bits.
        parts += [sums * WORD, *([weights * width * 4] if gradient.dtype in HALF else [])]
    else:
        parts += [sums * width * 4]  # the partial sums in fp32, which are added to the rows
    return [*copies, *ordered, *made, *unique, *parts]


def _embedding_bag_backward(gpu: Gpu, made, gradient, indices, *rest, **__) -> list[Step]:
    """Return the memory requests of `_embedding_bag_backward`, in the kernel's order (cuda/EmbeddingBag.cu)."""
    weights, mode = rest[4], rest[6]  # mode: 0 for sums, 1 for means, 2 for maxima of the bags
    # In modes 0 and 1 the indices are always sorted (the argument True).
    return made if mode == 2 else _embedding_backward(gpu, made, gradient, indices, weights, -1, True, in_parts=True)


def _embedding_bag(gpu: Gpu, made, *_, **__) -> list[Step]:
    """Return the memory requests of `_embedding_bag`: the results, in the kernel's order (cuda/EmbeddingBag.cu)."""
    sums, bags, sizes, maxima = made  # `bags`: the bag of each index; `maxima`: positions
    return [sizes, bags, sums, maxima]


RULES: dict[Any, Callable[..., list[Step]]] = {  # {operator packet: its rule}
    aten._embedding_bag: _embedding_bag,
    aten._embedding_bag_backward: _embedding_bag_backward,
    aten._embedding_bag_forward_only: _embedding_bag,
    aten.embedding_dense_backward: _embedding_backward,
    aten.multinomial: _multinomial,
    aten.randperm: _randperm,
    aten.sort: _sort,
    aten.topk: _topk,
}
