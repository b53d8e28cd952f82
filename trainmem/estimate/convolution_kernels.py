"""List the memory requests of CUDA's kernels for convolutions and batch norms, see `kernels`.

Each rule gets `made`, the list of the operation's results on fake tensors. A tensor in another memory format than the
kernel's is copied into a buffer before the kernel runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from trainmem.estimate import reduction_scratch
from trainmem.estimate.attention_kernels import WORD, Free, Gpu, Step, contiguous_copy

aten = torch.ops.aten


def _convolution(gpu: Gpu, made, tensor, weight, *_, **__) -> list[Step]:
    layout = _layout_of_convolution(tensor, weight)
    return [*contiguous_copy(tensor, layout), *made, *contiguous_copy(weight, layout)]


def _convolution_backward(
    gpu: Gpu, made, gradient, tensor, weight, biases, stride, padding, dilation, transposed, extra, groups, wanted, **__
) -> list[Step]:
    """Return the memory requests of `convolution_backward`, in the order in which a GPU makes them.

    A tensor is a result (one of `made`), a number is the bytes of a buffer, and a `Free` releases a buffer. The results
    are the gradients of images, weights and bias, in this order; but torch's own depthwise kernel makes the weights'
    gradient before the images' gradient. A tensor in another memory format than the kernel's is copied into a buffer.
    The last buffers, after all results, hold partial sums of the bias' gradient
    (native/Convolution.cpp: convolution_backward).
    """
    layout = _layout_of_convolution(tensor, weight)
    rest = iter(made)
    images, weights, bias = (next(rest) if each else None for each in wanted)
    copies = contiguous_copy(gradient, layout)
    whole = contiguous_copy(tensor) if tensor.dim() == 3 else []  # held to the end
    if wanted[1] and not whole:
        copies += contiguous_copy(tensor, layout)
    of_images, of_weights = ([] if each is None else [each] for each in (images, weights))
    if not transposed and _is_torchs_own_depthwise(tensor, weight, stride, dilation, groups):
        steps = [*whole, *copies, *of_weights, *[Free(len(whole))] * len(copies), *of_images]
    else:
        turned = contiguous_copy(weight, layout) if wanted[0] else []
        steps = [*whole, *copies, *of_images, *turned, *[Free(len(whole + copies))] * len(turned), *of_weights]
        steps += [Free(len(whole))] * len(copies)
    if bias is None:
        return steps
    dims = [0, *range(2, gradient.dim())]
    shared = reduction_scratch.scratch_bytes(gradient.shape, gradient.stride(), dims, gpu.processors)
    return [*steps, bias, *shared]


def _layout_of_convolution(tensor: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Return the memory format in which cuDNN runs a convolution: channels last or contiguous.

    The format is channels last if `tensor` has 4 dimensions, neither tensor is in float64, and images or weights are
    channels last (ATen/native/ConvUtils.h: cudnn_conv_suggest_memory_format)."""
    if tensor.dim() != 4 or torch.float64 in (tensor.dtype, weight.dtype):
        return torch.contiguous_format
    suggested = suggest_memory_format(tensor), suggest_memory_format(weight)
    return torch.channels_last if torch.channels_last in suggested else torch.contiguous_format


def _is_torchs_own_depthwise(
    tensor: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    """Return whether torch's own depthwise kernel, not cuDNN's, runs a convolution in 1 or 2 dimensions.

    In a depthwise convolution each channel has its own filters. In 1 or 2 dimensions, torch's own kernel makes the
    weights' gradient before the images' gradient. In 3 dimensions (volumes), this function returns False for either
    kernel, because torch's own kernel then makes the images' gradient first, as cuDNN does.
    Source: ATen/native/Convolution.cpp: use_cudnn_depthwise, check_cudnn_depthwise_workload_with_filter.
    """
    if groups == 1 or tensor.shape[1] != groups or weight.shape[0] % groups:
        return False
    if _layout_of_convolution(tensor, weight) is torch.channels_last:
        return False
    if tensor.dim() == 5:  # torch's own kernel for volumes makes the images' gradient first
        return False
    height, width = (1, tensor.shape[2]) if tensor.dim() == 3 else tensor.shape[2:]
    step, side = stride[-1], weight.shape[-1]
    fits = tensor.dtype is torch.float16 and set(dilation) == {1} and groups >= 32
    if not fits or not (stride[0] == step or height == 1):
        return True
    if height == 1 and step == 1:
        return False
    if tensor.dim() == 3 or weight.shape[2] != side or side not in (1, 3, 5) or width < 7 or step > 2:
        return True
    if step == 1:
        return False
    if tensor.shape[0] == 1:
        return side == 1 and width > 28
    if side == 1:
        return not (tensor.shape[0] <= 16 and groups >= 128 and width <= 7)
    return not (groups >= 512 or (groups >= 256 and width >= 28))


def runs_cudnn(tensor, weight, bias, mean, variance, trains: bool) -> bool:
    """Return whether cuDNN, not torch's own kernel, runs a batch norm, or its backward.

    The arguments are those of `native_batch_norm` (native/Normalization.cpp: _select_batch_norm_backend).
    """
    if tensor.dim() < 3 or weight is None or bias is None or (mean is None and not trains):
        return False
    fits = tensor.dtype is not torch.float16 or weight.dtype is torch.float32
    return (
        fits and torch.bfloat16 not in (tensor.dtype, weight.dtype) and tensor.shape[0] <= (880801, 65535)[not trains]
    )


def _batch_norm(gpu: Gpu, made, tensor, *rest, **__) -> list[Step]:
    """Return the memory requests of `native_batch_norm`, in the order in which a GPU makes them.

    A tensor is a result (one of `made`), a number is the bytes of a buffer. In training, torch's own kernel requests
    buffers after the results, for the partial sums of its blocks of threads, see `_shared_sums`
    (cuda/Normalization.cuh). For cuDNN, an input that is neither contiguous nor channels last is copied into a buffer
    before the results.
    """
    if runs_cudnn(tensor, *rest[:5]):
        return [*contiguous_copy(tensor, suggest_memory_format(tensor)), *made]
    return [*made, *(_shared_sums(tensor, 4) if rest[4] else [])]


def _batch_norm_backward(
    gpu: Gpu, made, gradient, tensor, weight, mean, variance, _, inverse, trains, __, wanted, **___
) -> list[Step]:
    """Return the memory requests of `native_batch_norm_backward`, in the order in which a GPU makes them.

    A tensor is a result (one of `made`), a number is the bytes of a buffer, and a `Free` releases a buffer. cuDNN,
    which runs in training only, computes all three gradients; each gradient that is not wanted takes a buffer. If
    images are contiguous and their gradient is wanted, torch's own kernel takes no buffers. torch's kernels for
    channels last make two sums per channel, which take buffers, then the gradients of weight and bias, and last the
    input's gradient (cuda/Normalization.cu: batch_norm_backward_cuda).
    """
    # torch's fake kernel returns the input's gradient even if it is not wanted.
    of_input, of_weights, channels = made[: wanted[0]], made[len(made) - sum(wanted[1:]) :], 4 * tensor.shape[1]
    if trains and runs_cudnn(tensor, weight, weight, mean, variance, trains):
        unwanted = [channels] * (2 - len(of_weights))
        copies = contiguous_copy(gradient, suggest_memory_format(tensor))
        return [*copies, *(of_input or [tensor.nbytes]), *of_weights, *unwanted]
    has_channels_last = _has_channels_last(tensor)
    if wanted[0] and not has_channels_last:
        return made
    sums = [channels] * (2 if has_channels_last and (trains or of_weights) else 0)
    first = [*([] if inverse is not None and inverse.numel() else [channels]), *sums]  # the inverse deviations
    shared = _shared_sums(tensor, 2) if sums and _has_channels_last(gradient) else []
    return [*first, *of_weights, *shared, *[Free(len(first))] * len(shared), *of_input]


def _has_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 or (tensor.dim() > 3 and suggest_memory_format(tensor) is not torch.contiguous_format)


def _shared_sums(tensor: torch.Tensor, numbers: int) -> list[Step]:
    """Return the bytes of two buffers that a batch norm requests: one for partial sums, then one for counters.

    Each block of threads makes partial sums. Return [] if the layout is not channels last, or if the rows need fewer
    than 8 blocks. `tensor`: rows or images. `numbers`: how many numbers each block keeps per channel, e.g. 4
    (cuda/Normalization.cuh: flexible_launch_configs).
    """
    if not _has_channels_last(tensor):
        return []
    columns = tensor.shape[1]
    rows = tensor.numel() // max(columns, 1)
    wide = min(reduction_scratch.power_of_2(columns), 32)
    high = min(reduction_scratch.power_of_2(-(-rows // 16)), 512 // wide)
    wide = min(reduction_scratch.power_of_2(columns), 512 // high)
    blocks = min(-(-rows // (16 * high)), 128)
    return [] if blocks < 8 else [4 * numbers * columns * blocks, 4 * -(-columns // wide)]


def _unfold_backward(gpu: Gpu, made, gradient, shape, dim, *_, **__) -> list[Step]:
    """Return the memory requests of the backward of `Tensor.unfold`: the result in `made`, then a buffer's bytes.

    The buffer holds the positions along the dimension `dim`, 8 bytes each (native/UnfoldBackward.h)."""
    return [*made, WORD * shape[dim]]


RULES: dict[Any, Callable[..., list[Step]]] = {  # {operator packet: its rule}
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten.native_batch_norm: _batch_norm,
    aten.native_batch_norm_backward: _batch_norm_backward,
    aten.unfold_backward: _unfold_backward,
}
