"""In which order CUDA's kernels ask for memory: results, and what they need for themselves while they run.

A result of several tensors is not always made in the order in which it is returned, and some kernels take memory that
no tensor shows. Each rule is what torch 2.13's own CUDA build was seen to ask its allocator for in a rehearsal; the
sources name why. What has no rule here makes its results in order and takes nothing else.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from perf_helpers.estimate import reductions
from perf_helpers.estimate.allocator import workspace_bytes

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
WORD = 8  # bytes of an index


class Free(NamedTuple):
    """One of the blocks held is given back before the operation ends."""

    index: int


Step = torch.Tensor | int | Free  # a result that is made, or bytes that are held until the operation ends


class Kernels:
    """The kernels of a GPU of one compute capability."""

    def __init__(self, capability: tuple[int, int]):
        self.workspace_bytes = workspace_bytes(capability)
        self._processors = reductions.processors(capability)
        self._unique = {7: (300, 21), 8: (380, 85)}.get(capability[0], (380, 500))  # see `_scan_bytes`
        self._sorted_at_once = {7: 2816, 8: 3840}.get(capability[0], 4608)  # by a block, see `_sort_bytes`

    def program(self, function, args: Sequence, kwargs: dict, result) -> Iterable[Step]:
        """What the operation asks for, in order."""
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        packet = function.overloadpacket
        if rule := _RULES.get(packet):
            return rule(self, made, *args, **kwargs)
        if packet in _REDUCTIONS and isinstance(result, torch.Tensor):
            return [*made, *self._reduction(_REDUCTIONS[packet], made[0], *args, **kwargs)]
        return made

    def _norm(self, made, tensor, order=2, dim=None, *_, **__):
        return [*made, *self._reduction(4, made[0], tensor, dim)]

    def _reduction(self, bytes_each: int, made, tensor, dim=None, keepdim=False, *_, dtype=None, **__) -> list[Step]:
        """A sum, a mean, ... along some dimensions: whole numbers are widened first, several blocks share a result."""
        if not tensor.numel():
            return []
        dims = range(tensor.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
        dims = {each % max(tensor.dim(), 1) for each in dims}
        wider = bytes_each or (4 if made.dtype.is_floating_point else made.element_size())
        casts = not bytes_each and tensor.dtype not in HALF and tensor.dtype is not made.dtype
        copy = [tensor.numel() * made.element_size()] if casts else []
        return copy + reductions.scratch_bytes(tensor.shape, tensor.stride(), dims, self._processors, wider)

    # ---- attention

    def _efficient_backward(self, made, gradient, query, key, value, bias, *_, **__):
        """Row sums, then tiles of dQ in fp32 with a header of 16 bytes each; in fp32 a product comes before the tiles
        (mem_eff_attention/kernel_backward.h)."""
        batch, heads, length, head = query.shape
        side = 64 if head <= 64 else 128
        tiles = -(-length // side) * -(-head // side)
        rows = 4 * batch * heads * length
        tiled = batch * heads * tiles * (16 + 4 * side * side)
        copies = _contiguous(gradient.transpose(1, 2))
        first = len(copies)
        if query.dtype in HALF:
            return [*copies, *made, rows, tiled, Free(first), Free(first)]
        sums = [rows * value.shape[-1], rows, rows, Free(first + 1), Free(first)]
        return [*copies, *made, *sums, tiled, Free(first)]

    def _flash_forward(self, made, query, key, value, dropout_p=0.0, *_, **__):
        return [*made, 16] if dropout_p else made

    def _flash_backward(self, made, gradient, query, key, value, out, *_, **__):
        """fp32 sums of dQ and of each row, and under grouped queries dK and dV for each query head
        (flash_attn/flash_api.cpp: mha_bwd)."""
        batch, heads, length, head = query.shape
        rows = batch * heads * (-(-length // 128) * 128)
        wide = -(-head // 32) * 32 if head <= 192 else 256
        copies = [bytes_ for each in (gradient, out) for bytes_ in _contiguous(each.transpose(1, 2))]
        grouped = [batch * key.shape[2] * heads * head * query.element_size()] * 2 if heads != key.shape[1] else []
        return [*copies, *made, 4 * rows, 4 * rows * wide, *grouped]

    def _cudnn_forward(self, made, *_, **__):
        """Seed and offset come first."""
        return [*made[2:], *made[:2]]

    def _cudnn_backward(self, made, gradient, query, key, value, out, *_, **__):
        """fp32 sums of dQ and of each row (NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h:
        get_fe_workspace_size_node)."""
        return [*made, 4 * query.numel() + 4 * query[..., 0].numel()]

    # ---- sorts and what is sorted

    def _embedding(self, made, weight, indices, *_, **__):
        return [*_contiguous(indices), *made]

    def _embedding_backward(self, made, gradient, indices, weights, padding, scale_by_frequency, *_, **__):
        """Indices sorted, and a sum in fp32 for each run of up to 10 equal ones; few indices need neither
        (cuda/Embedding.cu, cuda/EmbeddingBackwardKernel.cu)."""
        count = indices.numel()
        copies = [*_contiguous(gradient), *_contiguous(indices)]
        if count <= 3072 and not scale_by_frequency:
            return [*copies, *made]
        runs = min(count, weights)
        sums = count // 10 + runs
        first = len(copies)
        ordered = [count * WORD] * 3 + [self._sort_bytes(count, weights), Free(first + 3), Free(first + 2)]
        differ = _scan_bytes(count, *self._unique)
        unique = [count * WORD, WORD, count * WORD, differ, Free(first + 5), Free(first + 4)]
        parts = [runs * WORD, runs * WORD, _scan_bytes(runs), Free(first + 6)]
        return [*copies, *ordered, *made, *unique, *parts, WORD, sums * WORD, sums * gradient.shape[-1] * 4]

    def _index(self, made, tensor, indices, *_, **__):
        """Indices of 32 bits are widened (TensorAdvancedIndexing.cpp: make_info)."""
        narrow = [index for index in indices if index is not None and index.dtype is torch.int32]
        return [*(index.numel() * WORD for index in narrow), *made]

    def _put(self, made, tensor, indices, values, accumulate=False, *_, **__):
        """Values that are added are sorted by their index first (cuda/Indexing.cu: index_put_with_sort_kernel)."""
        positions = [index for index in indices if index is not None]
        if not accumulate or not positions or positions[0].dtype not in (torch.int64, torch.int32):
            return made
        count = math.prod(torch.broadcast_shapes(*(index.shape for index in positions)))
        rows = math.prod(size for size, index in zip(tensor.shape, indices, strict=False) if index is not None)
        sort = self._sort_bytes(count, rows) if count > 2304 else 1
        return [*made, count * WORD, count * WORD, Free(1), *_contiguous(values), *[count * WORD] * 3, sort]

    def _sort(self, made, tensor, *_, **__):
        if tensor.dim() != 1:
            return made
        count = tensor.numel()
        sort = [self._sort_bytes(count, 1 << 62)] if count > 4096 else []
        return [*made, count * WORD, *sort]

    def _scan(self, made, tensor, dim, *_, **__):
        cast = [] if tensor.dtype is made[0].dtype else [tensor.numel() * made[0].element_size()]
        is_one = tensor.dim() and tensor.numel() == tensor.shape[dim]  # else each row is summed by itself
        narrow = (190, 210) if made[0].dtype is torch.int32 else ()
        return [*made, *cast, *([_scan_bytes(tensor.numel(), *narrow)] if is_one else [])]

    def _safe_softmax(self, made, tensor, dim, *_, **__):
        """Which rows are masked as a whole, and the zero that is written there (native/SoftMax.cpp)."""
        return [*made, tensor.numel(), tensor.numel() // tensor.shape[dim], made[0].element_size()]

    def _sort_bytes(self, count: int, largest: int) -> int:
        """Of a radix sort of indices with their positions: both once more, the bins of each pass over 8 bits, and how
        far each block's share is (NVIDIA/cccl, cub/device/dispatch/dispatch_radix_sort.cuh)."""
        passes = -(-max(largest - 1, 1).bit_length() // 8)
        shares = -(-count // self._sorted_at_once)
        return 2 * (-(-count * WORD // 256) * 256) + 1024 * shares + 2048 * passes + 511

    # ---- others

    def _softmax_backward(self, made, gradient, *_, **__):
        """Gradient times output (cuda/SoftMax.cu: softmax_backward_cuda_out)."""
        return [*made, gradient.numel() * gradient.element_size()]

    def _isinf(self, made, tensor, *_, **__):
        """Whether the absolute value is infinite."""
        return [tensor.numel() * tensor.element_size(), *made, Free(0)]

    def _group_norm_backward(self, made, gradient, tensor, mean, deviation, weight, size, channels, _, groups, *__):
        """Sums for each sample and channel, and for each sample and group (cuda/group_norm_kernel.cu)."""
        each, group = 4 * size * channels, 4 * size * groups
        return [*made, each, each, group, group, each]

    def _convolution_backward(self, made, gradient, *_, **__):
        copies, bias = _contiguous(gradient), []
        if made[-1].dim() == 1:  # of the bias
            dims = [0, *range(2, gradient.dim())]
            bias = reductions.scratch_bytes(gradient.shape, gradient.stride(), dims, self._processors)
        return [*copies, *made[:-1], *[Free(0)] * len(copies), made[-1], *bias]

    def _norms(self, made, tensors, *_, **__):
        """A partial norm for each chunk of 65,536 elements, for all tensors as many as for the largest
        (cuda/ForeachReduceOp.cu)."""
        chunks = -(-max(tensor.numel() for tensor in tensors) // 65536)
        return [4 * len(tensors) * chunks, *made]

    def _dropout(self, made, *_, **__):
        return made[::-1]


def on_host(function, result) -> list[torch.Tensor]:
    """The results that lie on the host: seeds and offsets of random numbers."""
    return list(result[2:]) if function is aten._scaled_dot_product_efficient_attention.default else []


def multiplies(function) -> bool:
    """Whether cuBLAS does it."""
    return function.overloadpacket in _PRODUCTS


def _contiguous(tensor: torch.Tensor) -> list[int]:
    """The bytes of the copy that makes a tensor contiguous, if one is needed."""
    return [] if tensor.is_contiguous() else [tensor.nbytes]


def _scan_bytes(count: int, base: int = 380, each: int = 70) -> int:
    """Of a running sum over so many whole numbers by CUB, as seen from 4,096 to 262,144 of them."""
    return 767 + -(-(base + count // each) // 256) * 256


_RULES: dict[torch._ops.OpOverloadPacket, Callable[..., Iterable[Step]]] = {
    aten.native_dropout: Kernels._dropout,
    aten.embedding: Kernels._embedding,
    aten.embedding_dense_backward: Kernels._embedding_backward,
    aten.index: Kernels._index,
    aten._index_put_impl_: Kernels._put,
    aten.index_put_: Kernels._put,
    aten.index_put: Kernels._put,
    aten._unsafe_index_put: Kernels._put,
    aten.linalg_vector_norm: Kernels._norm,
    aten.sort: Kernels._sort,
    aten._safe_softmax: Kernels._safe_softmax,
    aten._softmax_backward_data: Kernels._softmax_backward,
    aten.convolution_backward: Kernels._convolution_backward,
    aten.native_group_norm_backward: Kernels._group_norm_backward,
    aten.isinf: Kernels._isinf,
    aten.cumsum: Kernels._scan,
    aten._foreach_norm: Kernels._norms,
    aten._scaled_dot_product_flash_attention: Kernels._flash_forward,
    aten._scaled_dot_product_flash_attention_backward: Kernels._flash_backward,
    aten._scaled_dot_product_efficient_attention_backward: Kernels._efficient_backward,
    aten._scaled_dot_product_cudnn_attention: Kernels._cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward: Kernels._cudnn_backward,
}
# Bytes of one number that a reduction accumulates; 0: those of its result, but for half of fp32, and whole numbers are
# widened first.
_REDUCTIONS = {aten.sum: 0, aten.mean: 0, aten.nansum: 0, aten.any: 1, aten.all: 1, aten.amax: 4, aten.amin: 4}
_REDUCTIONS |= {aten.max: 4, aten.min: 4}
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear, aten._addmm_activation, aten.dot, aten.mv}
_PRODUCTS |= {aten.addmv, aten.addbmm, aten._scaled_mm}
