"""List the memory requests of CUDA's kernels, in the order in which a kernel makes them.

Some kernels make several results in another order than they return them, and some take memory that no tensor shows.
Each rule lists the requests that torch 2.13's CUDA build makes in a rehearsal (a dry run on a stub CUDA runtime); the
rule's docstring and comments say what the kernel does. An operation without a rule requests only its results, in the
order in which it returns them. A rule gets `made`, the results on fake tensors, and the operation's arguments. The rule
returns a list of tensors (results), numbers (bytes of buffers) and `Free`s. A buffer is used during the operation: it
is held until a `Free` releases it, otherwise until the operation ends.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false, suggest_memory_format
from torch.utils._pytree import tree_leaves

from trainmem.estimate import (
    attention_kernels,
    convolution_kernels,
    loss_kernels,
    quantized_kernels,
    reduction_scratch,
    sort_kernels,
    sparse,
)
from trainmem.estimate.allocator import workspace_bytes
from trainmem.estimate.allocator_settings import LT_WORKSPACE_BYTES, WORKSPACES, Release, release
from trainmem.estimate.attention_kernels import HALF, WORD, Free, Gpu, Step, contiguous_copy, scan_bytes

aten = torch.ops.aten


class Kernels:
    """List the memory requests that an operation's kernels make on a GPU of one compute capability: see `program`.

    Args:
        capability: the GPU's compute capability, e.g. (9, 0).
        is_on_device: function that returns whether a tensor, its argument, is on the GPU. Default: each tensor is.
        rules: the rules of a torch release, see `allocator_settings.release`; None: the installed release.
        is_on_host: function that returns whether a tensor is on the host. It returns True only if a user's own training
            loop says where its tensors are. Default: no tensor is on the host.
    """

    def __init__(
        self,
        capability: tuple[int, int],
        is_on_device: Callable[[torch.Tensor], bool] = lambda _: True,
        rules: Release | None = None,
        is_on_host: Callable[[torch.Tensor], bool] = lambda _: False,
    ):
        self._is_on_device, self._is_on_host = is_on_device, is_on_host
        self._gpu = Gpu(capability, reduction_scratch.processors(capability), rules or release())

    def program(self, function, args: Sequence, kwargs: dict, result) -> Iterable[Step]:
        """Return the memory requests of an operation, in order: a tensor is a result, a number the bytes of a buffer.

        A buffer is held until a `Free` in the list releases it, otherwise until the operation ends.

        Args:
            function: the torch operator that the traced training calls on fake CPU tensors, e.g. grid_sampler_2d for
                `grid_sample`. If a GPU would run another operator, `cuda.py` has already replaced it.
            args, kwargs: the operation's arguments.
            result: what the operation returned on fake tensors.
        """
        made = [result] if isinstance(result, torch.Tensor) else [*filter(torch.is_tensor, tree_leaves(result))]
        packet = function.overloadpacket
        if rule := _RULES_OF_GPU.get(packet):
            return rule(self._gpu, made, *args, **kwargs)
        if rule := _RULES.get(packet):
            return rule(self, made, *args, **kwargs)
        if rule := sparse.RULES.get(packet):
            return rule(made, *args, **kwargs)
        if function.namespace == "bitsandbytes":
            copied, steps, _ = self._bitsandbytes_program(function, made, args, kwargs)
            return [*(bytes_ for each in copied for bytes_ in contiguous_copy(each)), *steps]
        if function.namespace == "quanto" and function._opname == "qbytes_mm":
            return _product_of_quanto(made, *args)
        if (
            packet in _MATRICES
            and not self._is_tritons(packet, args)
            and not any(each.is_sparse for each in args if torch.is_tensor(each))
        ):
            return [*made, *(each.nbytes for each in args[_MATRICES[packet] :][:2] if not _is_for_cublas(each))]
        if packet in _COPIED:
            before, after = _COPIED[packet]
            layout = torch.contiguous_format
            if packet in _ON_IMAGES:
                layout = suggest_memory_format(args[max(before + after)])
            first, last = (
                [size for n in each for size in contiguous_copy(args[n], layout)] for each in (before, after)
            )
            return [*first, *made, *last]
        if packet in _REDUCTIONS and isinstance(result, torch.Tensor):
            return [*made, *self._reduction(_REDUCTIONS[packet], made[0], *args, **kwargs)]
        return made

    def _bitsandbytes_program(self, function, made, args, kwargs):
        gpu = self._gpu.processors.count, self._gpu.capability
        return quantized_kernels.program(gpu, function._opname, made, *args, **kwargs)

    def multiplies(self, function, args: Sequence, kwargs: dict) -> bool:
        """Return whether cuBLAS or cuBLASLt runs the operation."""
        if function.namespace == "bitsandbytes":
            return self._bitsandbytes_program(function, [args[0]] * 3, args, kwargs)[2]
        if function.overloadpacket is aten._grouped_mm:  # without a kernel of its own: one matmul per group
            return not self._has_grouped_kernel(args[0])
        if self._is_tritons(function.overloadpacket, args):
            return False
        if function.overloadpacket is aten.mm and args[0].is_sparse:  # cuSPARSE does
            return False
        if function.namespace == "quanto":
            return function._opname == "qbytes_mm"
        return function.overloadpacket in _PRODUCTS or function.namespace == "transformers"  # experts one by one

    def _is_tritons(self, packet, args) -> bool:
        """Return whether Triton runs `packet`: only for outer products (torch/_native/ops/bmm_outer_product)."""
        return packet is aten.bmm and args[0].shape[-1] == 1 and not self._gpu.rules.keeps_workspaces

    def workspaces(self, function, args: Sequence, kwargs: dict) -> list[tuple[str, int]]:
        """Return (name, bytes) of each workspace that cuBLAS or cuBLASLt requests; [] if the operation is no matmul."""
        if not self.multiplies(function, args, kwargs):
            return []
        rules = self._gpu.rules
        by_lt = not (rules.keeps_workspaces and rules.shares_workspace) and _is_lt(function, args, kwargs)
        blas, lt = (WORKSPACES[0], workspace_bytes(self._gpu.capability)), (WORKSPACES[1], LT_WORKSPACE_BYTES)
        both = rules.keeps_workspaces and rules.lt_takes_both
        return [*([blas] if both or not by_lt else []), *([lt] if by_lt else [])]

    def _has_grouped_kernel(self, tensor: torch.Tensor) -> bool:
        return self._gpu.capability[0] in (9, 10) and tensor.dtype is torch.bfloat16

    def _grouped(self, made, first, second, offsets=None, *_, **__):
        """Return the memory requests of `_grouped_mm`: the results (`made`), then bytes of buffers."""
        if not self._has_grouped_kernel(first):
            return made
        # Buffers: each group's sizes, strides and pointers; a workspace per multiprocessor (cuda/GroupMM.cu).
        groups = first.shape[0] if offsets is None else offsets.numel()
        return [*made, 60 * groups, self._gpu.processors.count * (512 if self._gpu.capability[0] == 9 else 5376)]

    def on_host(self, function, args: Sequence, result) -> list[torch.Tensor]:
        """Return the tensors in `result` that are on the host: seed and offset of efficient attention's dropout."""
        if function is not aten._scaled_dot_product_efficient_attention.default:
            return []
        dropout = args[5] if len(args) > 5 else 0.0
        return [] if self._gpu.rules.seeds_on_device and not dropout else list(result[2:])

    def _norm(self, made, tensor, order=2, dim=None, *_, **__):
        return [*made, *self._reduction(max(4, made[0].element_size()), made[0], tensor, dim)]

    def _reduction(self, bytes_each: int, made, tensor, dim=None, keepdim=False, *_, dtype=None, **__) -> list[Step]:
        """Return the bytes of each buffer that a reduction requests in addition to its result, `made`.

        `bytes_each`: bytes of one number of the partial results; 0: the size follows from the result's type.
        """
        if not tensor.numel():
            return []
        dims = range(tensor.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
        dims = {each % max(tensor.dim(), 1) for each in dims}
        wider = bytes_each or (max(4, made.element_size()) if made.dtype.is_floating_point else made.element_size())
        casts = not bytes_each and tensor.dtype not in HALF and tensor.dtype is not made.dtype
        copy = [tensor.numel() * made.element_size()] if casts else []  # the converted input, e.g. integers as int64
        # If several thread blocks compute one element of the result, buffers hold their partial results.
        return copy + reduction_scratch.scratch_bytes(tensor.shape, tensor.stride(), dims, self._gpu.processors, wider)

    # ---- indexing, scans and reductions

    def _index(self, made, tensor, indices, *_, **__):
        """Return the memory requests of `index`, an indexing by tensors: bytes of buffers, then the result (`made`)."""
        # Indices on the host are copied to the device, 32-bit ones to 64 bits (TensorAdvancedIndexing.cpp: make_info).
        given = [index for index in indices if index is not None]
        on_host = [*filter(self._is_on_host, given)]
        count = math.prod(torch.broadcast_shapes(*(index.shape for index in given)))
        narrow = [index for index in given if index.dtype is torch.int32]
        return [*[count * WORD] * len(on_host), *(index.numel() * WORD for index in narrow), *made]

    def _put(self, made, tensor, indices, values, accumulate=False, unsafe=False, *_, **__):
        """Return the memory requests of `index_put`: the result (`made`), then bytes and `Free`s of buffers."""
        positions = [index for index in indices if index is not None]
        if not accumulate or not positions or positions[0].dtype not in (torch.int64, torch.int32):
            return made
        # Autograd's own formula puts gradients into zeros, and checks no bounds.
        is_checked = torch.is_grad_enabled() and not unsafe
        checks = [step for index in positions for step in self._bounds(index)] if is_checked else []
        count = math.prod(torch.broadcast_shapes(*(index.shape for index in positions)))
        rows = math.prod(size for size, index in zip(tensor.shape, indices, strict=False) if index is not None)
        # The values are sorted by index, then added (cuda/Indexing.cu: index_put_with_sort_kernel).
        sort = sort_kernels.sort_bytes(self._gpu, count, rows) if count > 2304 else 1
        each = count * WORD
        place = [each, each, Free(0), *[each, each, Free(1), Free(1)] * (len(positions) - 1)]
        return [*made, *checks, *place, *contiguous_copy(values), each, each, each, sort]

    def _bounds(self, index: torch.Tensor) -> list[Step]:
        """Return the memory requests of a check that all indices are within bounds: bytes and `Free`s of buffers."""
        # One pass finds the smallest and the largest index; then both are compared with the bounds.
        shared = reduction_scratch.scratch_bytes(
            index.shape, index.stride(), range(index.dim()), self._gpu.processors, 2 * WORD
        )
        return [WORD, WORD, *shared, *[Free(2)] * len(shared), 1, Free(2), 1, Free(2), Free(1), Free(0)]

    def _scan(self, made, tensor, dim, *_, **__):
        """Return the memory requests of `cumsum` and `cumprod`: the result (`made`), then bytes of buffers."""
        # Tokens per expert: fp32 on a CPU, so in a trace; int32 on a GPU: no cast (transformers/integrations/moe.py).
        dtype, counted = made[0].dtype, made[0].dtype is torch.int32 and tensor.dtype is torch.float32
        cast = [] if counted or tensor.dtype is dtype else [tensor.numel() * dtype.itemsize]
        copy = [] if cast else contiguous_copy(tensor)
        is_one = tensor.dim() and tensor.numel() == tensor.shape[dim]  # otherwise each row is a scan of its own
        tile = (1920, 8) if dtype.itemsize == 4 else (7680, 16) if dtype in HALF else ()
        return [*made, *cast, *copy, *([scan_bytes(tensor.numel(), *tile)] if is_one else [])]

    def _logsumexp(self, made, tensor, dim, *_, **__):
        """Return the memory requests of `logsumexp`: bytes and `Free`s of buffers, the result (`made`), buffers."""
        (result,) = made
        small, each = result.nbytes, result.itemsize
        maxima = self._reduction(each, result, tensor, dim)
        if not result.numel() or tensor.dtype is not result.dtype:
            return made
        infinite = [small, result.numel(), Free(1), Free(1)]
        # Maxima, which of them are infinite, exponentials; after the result partial sums (native/ReduceOps.cpp).
        return [
            small,
            *maxima,
            *[Free(1)] * len(maxima),
            *infinite,
            tensor.nbytes,
            result,
            *self._reduction(0, result, tensor, dim),
        ]

    def _extreme(self, made, tensor, dim=None, *_, **__):
        """Return the memory requests of `amax`, `amin`, `max`, `min`: results (`made`), buffers of partial results."""
        # `max` and `min` along a dimension have two results and need no buffers.
        return [*made, *self._reduction(made[0].element_size(), made[0], tensor, dim)] if len(made) == 1 else made

    def _variance(self, made, tensor, dim=None, *_, **__):
        """Return the memory requests of `var`, `std`, `var_mean`: results (`made`), then buffers of partial results."""
        return [*made, *self._reduction(16, made[0], tensor, dim)]  # a partial result is four numbers (Welford's)

    def _distances(self, made, first, second):
        """Return the memory requests of distances between rows: bytes and `Free`s of buffers, the result (`made`)."""
        # A matmul of all rows, each extended by its squared length and a 1 (native/Distance.cpp: _euclidean_dist).
        one, other = (each.nbytes // each.shape[-1] for each in (first, second))
        lengths = [first.nbytes, one, Free(0), one, second.nbytes, other, Free(2), other]
        rows = [first.nbytes, first.nbytes + 2 * one, Free(0), Free(0), Free(2), second.nbytes + 2 * other]
        return [*lengths, *rows, Free(0), Free(0), *made]

    def _distances_backward(self, made, gradient, first, second, *_, **__):
        """Return the memory requests of `_cdist_backward`: the result (`made`), then bytes of buffers."""
        # A row per pair of input rows, then partial sums of these rows (cuda/DistanceKernel.cu).
        pairs = *first.shape[:-2], second.shape[-2], *first.shape[-2:]
        like = torch.empty(pairs, dtype=first.dtype, device="meta")
        return [*made, like.nbytes, *self._reduction(0, made[0], like, -3)]

    def _unfold(self, made, tensor, *_, **__):
        return [*contiguous_copy(tensor), tensor.nbytes, *made]

    def _safe_softmax(self, made, tensor, dim, *_, **__):
        """Return the memory requests of `_safe_softmax`, which gives 0 in rows that are masked completely."""
        # Buffers: a mask of elements, a mask of rows, and the 0 that fills masked rows (native/SoftMax.cpp).
        return [*made, tensor.numel(), tensor.numel() // tensor.shape[dim], made[0].element_size()]

    def _cell(self, made, *_, **__):
        """Return the memory requests of an LSTM's or a GRU's cell: its results (`made`), the last one first."""
        return [made[-1], *made[:-1]]  # first the result that is kept for the backward pass (cuda/RNN.cu)

    def _fold(self, made, tensor, *_, **__):
        return [*made, *contiguous_copy(tensor)]

    # ---- others

    def _where(self, made, condition, *values, **__):
        """Return the memory requests of `where`: bytes of a buffer per number on the host, then the result (`made`)."""
        on_host = [not torch.is_tensor(each) or not (each.dim() or self._is_on_device(each)) for each in values]
        return [*[made[0].element_size()] * sum(on_host), *made]  # native/TensorCompare.cpp: where_self_out

    def _power(self, made, base, *_, **__):
        """Return the memory requests of `pow`: the result (`made`), a buffer if `base` is a number (native/Pow.cpp)."""
        return made if torch.is_tensor(base) else [*made, WORD]

    def _copy(self, made, target, source, *_, **__):
        """Return the memory requests of `copy_`: the result (`made`), then the bytes of at most one buffer."""
        if self._is_on_host(target) is self._is_on_host(source):
            return made
        if target.stride() == source.stride() and is_non_overlapping_and_dense_or_false(target):
            return made
        # The tensor on the device, if strided, needs a contiguous copy there (cuda/Copy.cu: copy_requires_temporaries).
        return [*made, *contiguous_copy(source.expand_as(target) if self._is_on_host(target) else target)]

    def _scatter_reduce(self, made, tensor, dim, index, source, reduce, *_, **__):
        """Return the memory requests of `scatter_reduce`: the result (`made`), then bytes of a mean's buffers."""
        # Ones, the counts of the values that were added, and a mask (native/TensorAdvancedIndexing.cpp).
        return [*made, *([source.nbytes, tensor.nbytes, tensor.numel()] if reduce == "mean" else [])]

    def _masked_scatter(self, made, tensor, *_, **__):
        """Return the memory requests of `masked_scatter`: the result (`made`), then bytes of buffers."""
        # A running count of selected elements (cuda/IndexKernel.cu: masked_scatter_kernel).
        return [*made, WORD * tensor.numel(), scan_bytes(tensor.numel())]

    def _softmax_backward(self, made, gradient, output, *_, **__):
        """Return the memory requests of `_softmax_backward_data`: the result (`made`), then bytes of buffers."""
        copies = [*contiguous_copy(gradient), *contiguous_copy(output)]
        # The last buffer holds gradient times output (cuda/SoftMax.cu: softmax_backward_cuda_out).
        return [*made, *copies, gradient.numel() * gradient.element_size()]

    def _isinf(self, made, tensor, *_, **__):
        """Return the memory requests of `isinf`: a buffer of absolute values, result (`made`), the buffer's `Free`."""
        return [tensor.numel() * tensor.element_size(), *made, Free(0)]

    def _norm_backward(self, made, gradient, tensor, shape, *rest, **__):
        """Return the memory requests of a layer or RMS norm's backward: results (`made`), buffers and `Free`s."""
        before, after, is_wanted = contiguous_copy(tensor), contiguous_copy(gradient), rest[-1]
        width = math.prod(shape)
        rows, columns = tensor.numel() // width, -(-width // 32)
        if rows <= 2**16 or width // 32 >= self._gpu.processors.count // 2:
            return [*before, *made, *after]
        # Many narrow rows: two steps (cuda/layer_norm_kernel.cu: LaunchGammaBetaBackwardCUDAKernel).
        of_input, of_weights = made[: is_wanted[0]], made[is_wanted[0] :]
        parts = min(-(-rows // 32), 2**15 // columns)
        shared = reduction_scratch.scratch_bytes((parts, width), (width, 1), [0], self._gpu.processors)
        steps = [*before, *of_input, *(each.nbytes for each in of_weights), *after]
        steps += [parts * each.nbytes for each in of_weights]  # step 1: partial sums, each over 32 rows or more
        # Step 2: each gradient is allocated again, as the sum of its partial sums; its first allocation is freed.
        for number, each in enumerate(of_weights):
            held = len(before) + len(after) + 2 * len(of_weights) - number
            steps += [each, *shared, *[Free(held)] * len(shared), Free(len(before))]
        return steps

    def _group_norm(self, made, tensor, weight, bias, size, channels, *_, **__):
        """Return the memory requests of `native_group_norm`: the results (`made`), then its buffers in bytes.

        `size`: number of samples; `channels`: number of channels of a sample.
        """
        wide = [2 * made[1].nbytes] * 2 if made[1].dtype in HALF else []  # mean and deviation in fp32
        # With weights: a factor and a shift per sample and channel (cuda/group_norm_kernel.cu).
        return [*made, *wide, *([4 * size * channels] * 2 if weight is not None else [])]

    def _group_norm_backward(self, made, gradient, tensor, mean, deviation, weight, size, channels, _, groups, *__):
        """Return the requests of `native_group_norm_backward`: the results (`made`), then its buffers in bytes."""
        # Sums per sample and channel, and per sample and group (cuda/group_norm_kernel.cu).
        each, group = 4 * size * channels, 4 * size * groups
        return [*made, each, each, group, group, each]

    def _roll(self, made, tensor, shifts, dims=(), *_, **__):
        """Return the memory requests of `roll`: bytes and `Free`s of buffers, then the result (`made`)."""
        steps: list[Step] = contiguous_copy(tensor)
        for _ in dims[1:]:  # each dimension but the last: a new buffer (TensorTransformations.h: roll_common)
            steps += [tensor.nbytes, Free(0)] if steps else [tensor.nbytes]
        return [*steps, *made]

    def _norms(self, made, tensors, *_, **__):
        """Return the memory requests of `_foreach_norm`: bytes of buffers, then the results (`made`)."""
        chunks = [-(-tensor.numel() // 65536) for tensor in tensors]  # partial norms (cuda/ForeachReduceOp.cu)
        if self._gpu.rules.compacts_norms:  # since torch 2.15; first the offset of each nonempty tensor
            return [WORD * (1 + sum(map(bool, chunks))), 4 * sum(chunks), *made]
        return [4 * len(chunks) * max(chunks), *made]  # each tensor gets as many as the largest one

    def _dropout(self, made, *_, **__):
        return made[::-1]


def _is_for_cublas(matrix: torch.Tensor) -> bool:
    """Return whether cuBLAS can read a matrix, or a batch of matrices, without a copy."""
    # Otherwise torch copies it, e.g. an expanded gradient (cuda/Blas.cpp: prepare_matrix_for_cublas).
    (high, wide), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    fits = (down == 1 and right >= max(1, high)) or (right == 1 and down >= max(1, wide))
    return fits or (is_non_overlapping_and_dense_or_false(matrix) if matrix.dim() == 2 else matrix.is_contiguous())


def _product_of_quanto(made, tensor, codes, scales) -> list[Step]:
    """Return the memory requests of quanto's 8-bit matmul: bytes and `Free`s of buffers, then the result (`made`)."""
    # Codes (8-bit weights) times scales; floating-point codes are first cast (optimum-quanto 0.2.7, qbytes_mm.py).
    whole = codes.numel() * scales.itemsize
    cast = [] if tensor.dtype is scales.dtype else [tensor.numel() * scales.itemsize]
    return [*cast, *([whole, whole, Free(len(cast))] if codes.is_floating_point() else [whole]), *made]


def _is_lt(function, args, kwargs) -> bool:
    """Return whether cuBLASLt, not cuBLAS, runs the matmul (native/cuda/Blas.cpp: isInputCompliesAddmmCudaLt)."""
    if function.namespace == "bitsandbytes":  # weights of 4 bits are dequantized for `linear`
        bias = kwargs.get("bias", args[6] if len(args) > 6 else None)
        return bias is not None and (args[0].dim() == 2 or args[0].is_contiguous())
    if function.overloadpacket not in (aten.addmm, aten._addmm_activation):
        return False
    bias, rows, columns = args[:3]
    shape, beta = (rows.shape[0], columns.shape[1]), kwargs.get("beta", 1)
    if min(columns.shape) < 2:
        return False
    if bias.numel() == shape[1] == bias.shape[-1:].numel():  # one number per column
        return beta == 1 and bias.is_contiguous()
    # A whole matrix is added only in 16-bit types, or if an activation follows.
    takes_matrix = bias.dtype in HALF or function.overloadpacket is aten._addmm_activation
    return takes_matrix and bias.shape == shape and bool(beta) and bias.stride(1) == 1 and bias.stride(0) >= shape[1]


# ---- the rules by operation

_RULES_OF_GPU = attention_kernels.RULES | convolution_kernels.RULES | loss_kernels.RULES | sort_kernels.RULES
_RULES: dict[torch._ops.OpOverloadPacket, Callable[..., Iterable[Step]]] = {
    aten.native_dropout: Kernels._dropout,
    aten.index: Kernels._index,
    aten._index_put_impl_: Kernels._put,
    aten.index_put_: Kernels._put,
    aten.index_put: Kernels._put,
    aten._unsafe_index_put: Kernels._put,
    aten._thnn_fused_lstm_cell: Kernels._cell,
    aten._thnn_fused_gru_cell: Kernels._cell,
    aten.col2im: Kernels._fold,
    aten.linalg_vector_norm: Kernels._norm,
    aten.logsumexp: Kernels._logsumexp,
    aten.im2col: Kernels._unfold,
    aten._euclidean_dist: Kernels._distances,
    aten._cdist_backward: Kernels._distances_backward,
    **dict.fromkeys((aten.amax, aten.amin, aten.max, aten.min), Kernels._extreme),
    **dict.fromkeys((aten.var, aten.std, aten.var_mean, aten.std_mean), Kernels._variance),
    aten._safe_softmax: Kernels._safe_softmax,
    aten.where: Kernels._where,
    aten.pow: Kernels._power,
    aten.copy_: Kernels._copy,
    aten.scatter_reduce: Kernels._scatter_reduce,
    aten.masked_scatter: Kernels._masked_scatter,
    aten.masked_scatter_: Kernels._masked_scatter,
    aten._softmax_backward_data: Kernels._softmax_backward,
    aten.native_layer_norm_backward: Kernels._norm_backward,
    aten._fused_rms_norm_backward: Kernels._norm_backward,
    aten.native_group_norm: Kernels._group_norm,
    aten.roll: Kernels._roll,
    aten.native_group_norm_backward: Kernels._group_norm_backward,
    aten.isinf: Kernels._isinf,
    **dict.fromkeys((aten.cumsum, aten.cumprod), Kernels._scan),
    aten._grouped_mm: Kernels._grouped,
    aten._foreach_norm: Kernels._norms,
}
# Operations whose only rule is that some arguments must be contiguous: positions of those that are copied before the
# results are made, and of those copied after.
_COPIED = {
    aten.embedding: ((1,), ()),
    aten.native_layer_norm: ((0,), ()),
    aten._fused_rms_norm: ((0,), ()),
    aten._softmax: ((), (0,)),
    aten._log_softmax: ((), (0,)),
    aten._log_softmax_backward_data: ((), (0, 1)),
    aten.max_pool2d_with_indices: ((), (0,)),
    aten.max_pool2d_with_indices_backward: ((), (0, 1)),
    aten.avg_pool2d: ((), (0,)),
    aten.avg_pool2d_backward: ((), (0, 1)),
    aten._adaptive_avg_pool2d: ((0,), ()),
    aten.upsample_nearest2d: ((), (0,)),
    aten.upsample_nearest2d_backward: ((), (0,)),
    aten.upsample_bilinear2d_backward: ((), (0,)),
    aten.reflection_pad1d: ((), (0,)),
}
_ON_IMAGES = {aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward, aten._adaptive_avg_pool2d}
_ON_IMAGES |= {aten.avg_pool2d, aten.avg_pool2d_backward, aten.upsample_nearest2d}
# Bytes of one accumulated number of a reduction; 0: those of the result's type, but fp32 for 16 bits, and integers are
# widened first.
_REDUCTIONS = {aten.sum: 0, aten.mean: 0, aten.nansum: 0, aten.any: 1, aten.all: 1, aten.prod: 0}
_MATRICES = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # where the first of two matrices is
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear, aten._addmm_activation, aten.dot, aten.mv}
_PRODUCTS |= {
    aten._euclidean_dist,
    aten.addmv,
    aten.addbmm,
    aten._scaled_mm,
    aten.addmm_,
    aten.baddbmm_,
    aten.addmv_,
    aten.addbmm_,
    aten.vdot,
}
