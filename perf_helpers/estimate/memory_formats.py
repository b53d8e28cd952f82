"""In which order CUDA's kernels want a tensor's elements: those that lie otherwise are copied first."""

from collections.abc import Sequence

import torch
from torch._prims_common import suggest_memory_format


def contiguous(tensor: torch.Tensor, layout: torch.memory_format = torch.contiguous_format) -> list[int]:
    """The bytes of the copy that puts a tensor into this order, if one is needed."""
    return [] if tensor.is_contiguous(memory_format=layout) else [tensor.nbytes]


def of_convolution(tensor: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The order in which a convolution works: channels last if the images or the weights lie so
    (ATen/native/ConvUtils.h: cudnn_conv_suggest_memory_format)."""
    if tensor.dim() != 4 or torch.float64 in (tensor.dtype, weight.dtype):
        return torch.contiguous_format
    suggested = suggest_memory_format(tensor), suggest_memory_format(weight)
    return torch.channels_last if torch.channels_last in suggested else torch.contiguous_format


def is_torchs_own_depthwise(
    tensor: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    """Whether torch convolves each channel by itself with its own kernel, and not with cuDNN's
    (ATen/native/Convolution.cpp: use_cudnn_depthwise, check_cudnn_depthwise_workload_with_filter)."""
    if groups == 1 or tensor.shape[1] != groups or weight.shape[0] % groups:
        return False
    if of_convolution(tensor, weight) is torch.channels_last:
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
