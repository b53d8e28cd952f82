"""Allocate what flex attention's compiled kernels allocate, where a program compiles flex attention.

A rehearsal runs nothing that torch.compile compiles. Uncompiled, flex attention allocates all scores; its compiled
kernels allocate no scores. Source of the kernels' allocations: torch/_inductor/kernel/flex/flex_attention.py.
"""

import importlib
import sys
from collections import Counter

import torch


def install(answers: Counter[str]) -> None:
    """Replace flex attention on CUDA by functions that allocate what its compiled kernels allocate.

    Only calls that a program compiles are replaced, because a rehearsal runs them uncompiled. Calls that the program
    does not compile stay as they are. `answers`: counts what a rehearsal assumed; each replaced forward call adds 1 to
    the count about flex attention.
    """
    from torch._C import DispatchKey

    ops = importlib.import_module("torch._higher_order_ops.flex_attention")  # the package has the operator by this name

    key = DispatchKey.CompositeExplicitAutograd
    forward, backward = ops.flex_attention.py_kernels[key], ops.flex_attention_backward.py_kernels[key]
    if forward.__module__ == __name__:
        return  # installed already
    compiled: set[int] = set()  # addresses of the log-sum-exps of compiled calls, by which their backwards are known

    def fused(query, key, value, *rest):
        if not (query.is_cuda and _is_compiled()):
            made = forward(query, key, value, *rest)
            compiled.discard(made[1].data_ptr())
            return made
        answers["flex attention as its compiled kernels take memory"] += 1
        shape = query.shape[:-1]
        is_alike = query.shape[-1] == value.shape[-1]
        out = torch.empty_like(query) if is_alike else query.new_empty(*shape, value.shape[-1])
        sums, largest = (query.new_empty(shape, dtype=torch.float32) for _ in range(2))
        compiled.add(sums.data_ptr())
        return out, sums, largest

    def fused_backward(query, key, value, out, sums, *rest):
        if sums.data_ptr() not in compiled:
            return backward(query, key, value, out, sums, *rest)
        delta = query.new_empty(query.shape[:-1], dtype=torch.float32)
        gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
        *_, captured, _ = rest
        del delta  # held during the kernel
        return (*gradients, tuple(torch.zeros_like(each) if each.requires_grad else None for each in captured))

    for operator, kernel in ((ops.flex_attention, fused), (ops.flex_attention_backward, fused_backward)):
        operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()


def _is_compiled() -> bool:
    """Return whether a function that the program itself gave to torch.compile is running."""
    frame, count = sys._getframe(1), 0
    while frame is not None:
        count += frame.f_code.co_name == "compile_wrapper"
        frame = frame.f_back
    return count > 1  # 1: flex attention's own function, which an uncompiled call makes torch compile
