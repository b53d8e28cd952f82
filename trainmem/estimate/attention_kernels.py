"""List the memory requests of CUDA's attention kernels in their order: results, and buffers used during the operation.

Each rule returns one operation's requests in order: a tensor is a result, a number the bytes of a buffer that is held
until the operation ends, and `Free` frees a buffer earlier. The kernels are torch's flash, memory-efficient and cuDNN
attention, forward and backward. A rule gets the GPU, `made` (a list of the operation's results on fake tensors) and
the operation's arguments. Queries, keys and values have the shape (batch, heads, length, head dimension).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from trainmem.estimate.allocator import next_multiple
from trainmem.estimate.allocator_settings import Release
from trainmem.estimate.reduction_scratch import Processors

WORD = 8  # bytes of an index
CUB_BYTES = 256  # CUB's buffers consist of parts that are multiples of it
HALF = (torch.float16, torch.bfloat16)


class Free(NamedTuple):
    """Free a buffer before the operation ends: number `index` of the buffers still held, from the oldest (0) on."""

    index: int


Step = torch.Tensor | int | Free  # a result, bytes of a buffer held until the operation ends, or an earlier free


@dataclass(frozen=True, slots=True)
class Gpu:
    """Hold the properties of a GPU and of torch on which the memory requested by kernels depends.

    Args:
        capability: compute capability, e.g. (9, 0).
        processors: how many streaming multiprocessors the GPU has, and how many threads each of them runs at once.
        rules: how the modelled torch release differs from others, e.g. in sharing cuBLAS workspaces.
    """

    capability: tuple[int, int]
    processors: Processors
    rules: Release


def scan_bytes(count: int, tile: int = 896, each: int = 16) -> int:
    """Return the bytes of the buffer with which CUB computes a running sum over `count` elements.

    The buffer has `each` bytes for every tile of `tile` elements, and for 32 more tiles (NVIDIA/cccl,
    cub/agent/single_pass_scan_operators.cuh).
    """
    return next_multiple(each * (-(-count // tile) + 32), CUB_BYTES) + 511


def contiguous_copy(tensor: torch.Tensor, layout: torch.memory_format = torch.contiguous_format) -> list[int]:
    """Return [bytes of a copy of the tensor in the memory format `layout`]; [] if it has this format already."""
    return [] if tensor.is_contiguous(memory_format=layout) else [tensor.nbytes]


def efficient_forward(gpu: Gpu, made, query, key, value, *_, **__):
    """Return the memory requests of memory-efficient attention's forward: result tensors, then a buffer's bytes.

    For queries in fp16 or bf16, and values with a head dimension above 128, one buffer holds the result in fp32
    (mem_eff_attention/kernel_forward.h: kNeedsOutputAccumulatorBuffer). `made`: the results on fake tensors.
    """
    wide = query.dtype in HALF and value.shape[-1] > 128
    sums = [4 * query[..., 0].numel() * value.shape[-1]] if wide else []
    return [*made[2:], *made[:2], *sums] if gpu.rules.seeds_on_device else [*made, *sums]


def efficient_backward(gpu: Gpu, made, gradient, query, key, value, bias, *rest, **__):
    """Return the memory requests of memory-efficient attention's backward, in the order in which a GPU makes them.

    A tensor is a result, a number is the bytes of a buffer, and a `Free` releases a buffer. The buffers hold, in order:
    - a contiguous copy of the gradient, if needed
    - for grouped queries: dK and dV per query head, in two buffers
    - for inputs in fp32: the product of gradient and output
    - the sum of this product for each query row
    - dQ in fp32 in tiles, each with a header of 16 bytes; for fp16 or bf16 inputs with a head dimension above a limit
      (128, 96 or 64, by the GPU and dropout), also dK and dV in fp32. The GPU's shared memory decides a tile's size
    Source: mem_eff_attention/kernel_backward.h. `made`: the results on fake tensors.
    """
    batch, heads, length, head = query.shape
    half, roomy = query.dtype in HALF, gpu.capability == (8, 0) or gpu.capability[0] in (9, 10)
    tight = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability[0] == 12
    dropout = rest[4]
    # The widest heads whose dK and dV stay in registers; the kernel for 96 does not support dropout.
    in_registers = 128 if not tight else 96 if gpu.capability[0] == 8 and not dropout else 64
    is_small = head <= 64 or (in_registers < head <= 128 if half else not roomy)
    side = 64 if is_small else 128
    across = 128 if half and roomy and 64 < head <= 128 else 64
    tiles = -(-length // side) * -(-head // across) * (16 + 4 * side * across)
    wide = next_multiple(head, side) + next_multiple(value.shape[-1], side)
    sums = 4 * next_multiple(key.shape[2], 64) * wide if half and head > in_registers else 0
    rows, tiled = 4 * batch * heads * length, batch * heads * (tiles + sums)
    copies = contiguous_copy(gradient.transpose(1, 2))
    grouped = heads != key.shape[1]  # dK and dV are computed for each query head, then summed for each group
    of_heads = [heads * each[:, 0].numel() * each.element_size() for each in (key, value)] if grouped else []
    made = [*copies, *made[:3], *of_heads, *made[3:]]
    first = len(copies) + len(of_heads)
    if half:
        return [*made, rows, tiled, Free(first), Free(first)]
    products = [rows * value.shape[-1], rows, rows, Free(first + 1), Free(first)]
    return [*made, *products, tiled, Free(first)]


def flash_forward(gpu: Gpu, made, query, key, value, dropout_p=0.0, *_, **__):
    """Return the memory requests of flash attention's forward in order: tensors are results, numbers are buffer bytes.

    If there are too few query rows to keep the GPU busy, the kernel splits the keys into parts, and holds each part's
    result in fp32 until it combines them (flash_attn/flash_api.cpp: set_params_splitkv, num_splits_heuristic).
    `made`: the results on fake tensors.
    """
    if dropout_p:
        return [*made[:2], 16, *made[:1:-1]]
    batch, heads, length, head = query.shape
    if length == 1 and heads > key.shape[1]:  # the kernel makes rows of grouped queries
        heads, length = key.shape[1], heads // key.shape[1]
    keys = 256 if head <= 64 else 128 if head <= 128 else 64
    parts = _parts(batch * heads * -(-length // 64), 2 * gpu.processors.count, -(-key.shape[2] // keys))
    rows = 4 * parts * batch * heads * length
    wide = next_multiple(head, 32 if head <= 128 else 64)
    return [*made[:2], rows, rows * wide, *made[2:]] if parts > 1 else made


def flash_backward(gpu: Gpu, made, gradient, query, key, value, out, *_, **__):
    """Return the memory requests of flash attention's backward: bytes of copies, result tensors, bytes of buffers.

    Contiguous copies of the gradient and of the output come first, if needed. The first buffer after the results holds
    one fp32 sum per query row, the second dQ in fp32. If torch's algorithms are deterministic, the second buffer holds
    one dQ for each part of the keys. For grouped queries, two further buffers hold dK and dV per query head
    (flash_attn/flash_api.cpp: mha_bwd). `made`: the results on fake tensors.
    """
    batch, heads, length, head = query.shape
    parts = -(-gpu.processors.count // (batch * heads)) if torch.are_deterministic_algorithms_enabled() else 1
    rows = batch * heads * next_multiple(length, 128)
    wide = next_multiple(head, 32 if head <= 128 else 64)
    copies = [bytes_ for each in (gradient, out) for bytes_ in contiguous_copy(each.transpose(1, 2))]
    grouped = [batch * key.shape[2] * heads * head * query.element_size()] * 2 if heads != key.shape[1] else []
    return [*copies, *made, 4 * rows, 4 * rows * wide * parts, *grouped]


def cudnn_forward(gpu: Gpu, made, *_, **__):
    """Return the results of cuDNN attention's forward, in the order in which a GPU allocates them.

    First come seed and offset of the dropout, then the output and the log-sum-exp of each query row.
    `made`: the results on fake tensors, in the order in which the operator returns them.
    """
    return [*made[2:], *made[:2]]


def cudnn_backward(gpu: Gpu, made, gradient, query, key, value, out, *_, **__):
    """Return the memory requests of cuDNN attention's backward, in order: result tensors, and the bytes of one buffer.

    The buffer holds, in fp32, the gradient of the query (dQ) and one sum for each query row. For heads of width 256 on
    compute capability 10, it holds only the sums. `made`: the results on fake tensors.
    Source: NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h: get_fe_workspace_size_node.
    """
    rows, of_queries = 4 * query[..., 0].numel(), 4 * query.numel()
    return [*made, rows if gpu.capability[0] == 10 and query.shape[-1] == 256 else of_queries + rows]


def _parts(blocks: int, places: int, most: int) -> int:
    """Return the number of parts into which flash attention splits the keys; 1 if no split is needed.

    A split into n parts makes n times as many blocks. Blocks run in waves of `places` blocks, and the last wave may be
    partly empty. The usage of a split is the number of its blocks divided by the number of places in all its waves.
    Return the smallest number of parts whose usage is at least 85% of the best usage.

    Args:
        blocks: number of blocks without a split.
        places: number of blocks that run at once.
        most: number of key blocks, the largest possible number of parts.
    """
    if blocks >= 0.8 * places:
        return 1
    counts = range(1, min(128, places, most) + 1)
    eligible = [n for n in counts if n == 1 or -(-most // n) != -(-most // (n - 1))]
    filled = {n: blocks * n / places / -(-blocks * n // places) for n in eligible}
    return next(n for n in eligible if filled[n] >= 0.85 * max(filled.values()))


_NAME = "_scaled_dot_product_{}_attention{}"
RULES = {
    getattr(torch.ops.aten, _NAME.format(kernel, way)): rule
    for kernel, way, rule in (
        ("flash", "", flash_forward),
        ("flash", "_backward", flash_backward),
        ("efficient", "", efficient_forward),
        ("efficient", "_backward", efficient_backward),
        ("cudnn", "", cudnn_forward),
        ("cudnn", "_backward", cudnn_backward),
    )
}
