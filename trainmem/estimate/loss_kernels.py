"""List the memory requests of CUDA's kernels for losses, see `kernels`.

`RULES` gives each operator a function, called its rule. A rule gets the GPU, `made` (a list of the results, as fake
tensors) and the operation's arguments. It returns the requests in the order in which the kernel makes them: a tensor is
a result, a number is the bytes of a buffer, and a `Free` releases a buffer. With reduction="none" the result of a loss
has dimensions, and fewer buffers are needed than for a mean or a sum.
"""

from collections.abc import Callable
from typing import Any

import torch

from trainmem.estimate import reduction_scratch
from trainmem.estimate.attention_kernels import WORD, Free, Gpu, Step

aten = torch.ops.aten


def _shares(gpu: Gpu, tensor, target) -> list[int]:
    """Return the bytes of each buffer for partial sums that a GPU needs to add the losses of all elements.

    `tensor`, `target`: the two tensors that the loss compares. Broadcast to one shape, they give the elements.
    """
    each = torch.empty(torch.broadcast_shapes(tensor.shape, target.shape), device="meta")
    return reduction_scratch.scratch_bytes(each.shape, each.stride(), range(each.dim()), gpu.processors)


def _loss(gpu: Gpu, made, tensor, target, *_, **__) -> list[Step]:
    """Return the memory requests of a loss such as `mse_loss`: the result, then the bytes of each buffer.

    If the result is a mean or a sum, it still takes the memory of one number per element. One buffer of the same size
    then holds the losses of all elements, and further buffers hold partial sums (native/Loss.cpp).
    `made`: a list of one fake tensor, the result.
    """
    (result,) = made
    return made if result.dim() else [result, result.untyped_storage().nbytes(), *_shares(gpu, tensor, target)]


def _summed_loss(gpu: Gpu, made, tensor, target, *_, **__) -> list[Step]:
    """Return the memory requests of a loss such as `soft_margin_loss`: the result, then the bytes of each buffer.

    The kernel writes the loss of each element into the result. If a mean or a sum is requested, a buffer of one number
    holds the mean or sum, and further buffers hold partial sums. The mean or sum is then copied into the result, which
    still takes the memory of one number per element (cuda/Loss.cu, native/Loss.cpp: soft_margin_loss).
    `made`: a list of one fake tensor, the result.
    """
    (result,) = made
    return made if result.dim() else [result, result.itemsize, *_shares(gpu, tensor, target)]


def _huber_loss(gpu: Gpu, made, tensor, target, *_, **__) -> list[Step]:
    """Return the memory requests of `huber_loss`, in the order in which the kernel makes them.

    With reduction="none" there is only the result. For a mean or a sum, a buffer before the result holds the losses of
    all elements, and buffers after the result hold partial sums (native/BinaryOps.cpp).
    `made`: a list of one fake tensor, the result.
    """
    (result,) = made
    count = torch.broadcast_shapes(tensor.shape, target.shape).numel()
    return made if result.dim() else [count * result.itemsize, result, *_shares(gpu, tensor, target)]


def _loss_of_logits(gpu: Gpu, made, tensor, target, weight=None, positive=None, *_, **__) -> list[Step]:
    """Return the memory requests of `binary_cross_entropy_with_logits`, in the order in which the kernel makes them.

    The first buffer holds the log-sigmoid. If the positive class has weights (`positive`), the next two buffers hold
    factors made from these weights, and are freed before the next request. If the result is a mean or a sum, the next
    buffer holds the losses of all elements. Then comes the result. After a mean or a sum, the last buffers hold
    partial sums (native/Loss.cpp).
    `made`: a list of one fake tensor, the result.
    """
    (result,) = made
    weighted = [positive.nbytes, tensor.nbytes, Free(1), Free(1)] if positive is not None else []
    if result.dim():
        return [tensor.nbytes, *weighted, result]
    return [tensor.nbytes, *weighted, tensor.nbytes, result, *_shares(gpu, tensor, target)]


def _ctc_loss(gpu: Gpu, made, scores, *_, **__) -> list[Step]:
    """Return the memory requests of `_ctc_loss`: first the bytes of three buffers, then the results.

    The buffers hold the inputs' and targets' lengths and the targets' offsets, copied from the host (cuda/LossCTC.cu).
    `made`: the results, as fake tensors, in the order in which the operator returns them. A GPU allocates the results
    in the reverse order.
    """
    return [*[WORD * scores.shape[1]] * 3, *made[::-1]]


def _ctc_loss_backward(
    gpu: Gpu, made, gradient, scores, targets, inputs, lengths, loss, alignments, *_, **__
) -> list[Step]:
    """Return the memory requests of `_ctc_loss_backward`, in the order in which the kernel makes them.

    The first three buffers hold the lengths and offsets, as in `_ctc_loss`. The fourth holds the alignments'
    probabilities, which the kernel computes from the last time step to the first. Then comes the result. Only large
    inputs (by steps, batch and classes) need buffers after the result: for them, the blanks' gradient is a separate
    `logsumexp` over every second state.
    `made`: a list of one fake tensor, the result; `inputs`, `lengths`: lengths of the inputs, and of the targets.
    """
    steps, batch, classes = scores.shape
    held = [*[WORD * batch] * 3, alignments.nbytes, *made]
    if 2 * steps + 24 * batch // 10 + 2 * classes // 10 <= 450:
        return held
    each = made[0].itemsize * batch * steps
    blanks = each * (alignments.shape[-1] // 2 + 1)
    return [*held, blanks, each, each, batch * steps, Free(6), Free(6), blanks, each]


RULES: dict[Any, Callable[..., list[Step]]] = {  # {operator packet: its rule}
    aten._ctc_loss: _ctc_loss,
    aten._ctc_loss_backward: _ctc_loss_backward,
    aten.binary_cross_entropy: _summed_loss,
    aten.binary_cross_entropy_with_logits: _loss_of_logits,
    aten.huber_loss: _huber_loss,
    aten.mse_loss: _loss,
    aten.smooth_l1_loss: _loss,
    aten.soft_margin_loss: _summed_loss,
}
