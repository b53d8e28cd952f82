"""Compile what a program gives to torch.compile, but none of its kernels.

The graphs are captured, divided and fused by torch.compile itself, so compiled code allocates what it allocates on a
card. A rehearsal runs no kernel, so none is compiled: `_Kernel` takes the place of each Triton kernel.
"""

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from trainmem.rehearsal.device_memory import memory_of
from trainmem.rehearsal.known_values import EXACT, WHY, Values
from trainmem.unknown import NeedsValues

TIMES = "times that the compiler measured, all equal"
_thread = threading.local()  # `is_inside`: whether this thread is in a call of compiled code


def compiling(plain: Callable, values: Values) -> Callable:
    """Return a replacement of `plain`, which is `torch.compile`, for a process whose known values are in `values`.

    The compiler would trace the function mode `values`. Therefore this mode is off while compiled code runs, and
    results of compiled code have unknown values.
    """

    @functools.wraps(plain)
    def compile_(model=None, *args, **kwargs):
        if model is None:
            return functools.partial(compile_, **kwargs)
        if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
            return model
        made = plain(model, *args, **kwargs)
        if not isinstance(made, torch.nn.Module):
            return _without(values, made)
        made.forward = _without(values, made.forward)
        return made

    return compile_


def is_traced() -> bool:
    """Return whether the compiler is tracing the code that calls this function, with tensors that have no memory."""
    return torch._guards.TracingContext.try_get() is not None


def _without(values: Values, function: Callable) -> Callable:
    """Wrap a function so that the function mode `values` is off while it runs."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        if torch.compiler.is_compiling():  # called by code that is compiled: it becomes a part of that code
            return function(*args, **kwargs)
        _install(values)  # not earlier: it imports the compiler, and libraries compile functions that few programs call
        with _off(values):
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def _off(values: Values) -> Iterator[None]:
    """Take the function mode `values` off this thread's stack of modes in this context."""
    from torch._dynamo.utils import set_torch_function_mode_stack  # imported by the first torch.compile

    before, was_inside = _get_current_function_mode_stack(), getattr(_thread, "is_inside", False)
    set_torch_function_mode_stack([mode for mode in before if mode is not values])
    _thread.is_inside = True
    try:
        yield
    finally:
        _thread.is_inside = was_inside
        set_torch_function_mode_stack(before)


@functools.cache
def _install(values: Values) -> None:
    """Let the compiler make a `_Kernel` in place of each kernel, measure no times, and read no unknown values."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder
    from torch._inductor.runtime.benchmarking import Benchmarker, InductorBenchmarker, TritonBenchmarker

    def benchmark(*_, **__) -> float:
        values.answers[TIMES] += 1
        return 1.0

    def read(tensor: torch.Tensor) -> bool | int | float:
        """Replace `aten._local_scalar_dense`, by which code without the function mode `values` reads a tensor."""
        if not getattr(_thread, "is_inside", False) or values.is_known(tensor) is True:
            return memory_of(tensor).item()
        if not values.assumes:
            raise NeedsValues(WHY)
        with values:
            return tensor.item()

    AsyncCompile.triton = lambda self, name, source, *_, **__: _Kernel(values, name, source)
    for kind in (Benchmarker, TritonBenchmarker, InductorBenchmarker):
        kind.benchmark = kind.benchmark_gpu = benchmark
    Folder.__init__, Folder.run = _on_host(Folder.__init__), _on_host(Folder.run)
    values.library.impl("_local_scalar_dense", read, "CUDA")


def _on_host(function: Callable) -> Callable:
    """Wrap a function so that it computes on the CPU: the compiler computes the values of constants on the device."""

    class OnHost(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            args, kwargs = tree_map_only(torch.Tensor, memory_of, (args, kwargs or {}))
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            return operation(*args, **kwargs)

    @functools.wraps(function)
    def run(*args, **kwargs):
        with OnHost():
            return function(*args, **kwargs)

    return run


class _Kernel:
    """Take the place of a Triton kernel that torch.compile wrote; launching it does nothing.

    Args:
        values: gets a note that the tensors which the kernel writes have unknown values.
        name, source: the kernel's name and the module that defines it, as torch.compile wrote them.
    """

    def __init__(self, values: Values, name: str, source: str):
        self.values = values
        parameters = re.search(rf"def (?:{name}|triton_)\((.*?)\)", source)  # by the compiler's setting for names
        names = [each.split(":")[0].strip() for each in parameters[1].split(",")] if parameters else []
        # A user's own kernel gives its parameters other names: all its floating-point tensors may be results.
        self.results = {place for place, each in enumerate(names) if each.startswith(("out_ptr", "in_out_ptr"))}

    def run(self, *arguments, **_) -> None:
        for place, each in enumerate(arguments):
            if isinstance(each, torch.Tensor) and (place in self.results or each.dtype not in EXACT):
                self.values.mark(False, each)

    def precompile(self, *_, **__) -> None:
        """Do nothing: there is nothing to compile."""
