"""Find the operations of a backward that autograd would do in place in an untracked training.

Autograd writes a result into a tensor if it holds the only reference to the tensor, but never while a dispatch mode is
on. A `Tracker` is such a mode, so in a tracked training autograd allocates tensors that an untracked one does not need.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten
FORMS = {  # {operation: its form in place}
    aten.add.Tensor: aten.add_.Tensor,
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.logical_and.default: aten.logical_and_.default,  # combines clamp's two bounds
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.sub.Tensor: aten.sub_.Tensor,
}
# {operation: nodes of autograd that do it in place}; any node may do the other operations of `FORMS` in place.
_NODES = {
    aten.sub.Tensor: {"BinaryCrossEntropyWithLogitsBackward0"},
    aten.mul.Tensor: {"BinaryCrossEntropyWithLogitsBackward0"},
    aten.masked_fill.Scalar: {"MaximumBackward0", "MinimumBackward0", "FmaxBackward0", "FminBackward0"},
}
_WRAPPERS = ("torch._compile", "torch._dynamo")  # they wrap `__torch_dispatch__`


def form(function, args: Sequence[Any], is_temporary: Callable[[torch.Tensor], bool]):
    """Return the operator that autograd would run without a `Tracker`: `function`, or its in-place form (in `FORMS`).

    Args:
        function, args: an operation (a key of `FORMS`), and its positional arguments.
        is_temporary: function that returns whether a tensor was made in this backward. The operations in `_NODES` are
            done in place only by the autograd nodes listed there, and only in a tensor that was made in this backward.
    """
    target, other = args[:2]
    node = torch._C._current_autograd_node() if function in _NODES or function is aten.scatter_add.default else None
    if node is not None and node.name() == "ScatterReduceBackward0":
        return function  # its formula counts in a tensor of zeros, out of place
    if function in _NODES and (node is None or node.name() not in _NODES[function] or not is_temporary(target)):
        return function
    return FORMS[function] if _is_in_place(function, target, other) else function


def _is_in_place(function, target: Any, other: Any) -> bool:
    """Return whether autograd would write the result of `function` (in `FORMS`) into `target`, its first argument."""
    # In torch's csrc/autograd: `InputBuffer::accumulate`, and the formulas that check `areAnyTensorSubclassLike`.
    if torch.is_grad_enabled() or not isinstance(target, torch.Tensor) or not _is_autograds():
        return False
    if function is aten.add.Tensor:
        if not isinstance(other, torch.Tensor) or other.shape != target.shape:
            return False
        # Four: autograd's own reference, and three of this call. A checkpoint holds one more to its segment's result.
        if target._use_count() > 4:
            return False
    last = sum((length - 1) * step for length, step in zip(target.shape, target.stride(), strict=True))
    # Two: the target's own reference, and the one just created by `untyped_storage()`.
    return last + 1 == target.numel() and torch._C._storage_Use_Count(target.untyped_storage()._cdata) == 2


def _is_autograds() -> bool:
    """Return whether autograd's engine, not Python code in the backward, called the operation that runs now."""
    # The engine called it if no Python frame did (in a thread of the engine), or if the frame is the function that
    # starts the engine (in the thread that called `backward`).
    # Python code that may call it: e.g. the backward of a `torch.autograd.Function`.
    frame = sys._getframe(4)  # above `watch`, or `watch`
    while frame and (
        frame.f_code.co_name in ("__torch_dispatch__", "watch") or frame.f_globals["__name__"].startswith(_WRAPPERS)
    ):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"
