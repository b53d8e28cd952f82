"""Let a trace run the optimizers of other packages as on a GPU, on a machine without one.

Some packages call CUDA in Python, query the device, or launch kernels of their own. Here these calls are replaced by
calls that request the same memory. `assumptions` lists what is assumed about an optimizer.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch

from trainmem.core import optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.outcomes import Invalid
from trainmem.measure.tracker import calling

if TYPE_CHECKING:
    from trainmem.estimate.device import DeviceTracker

# Kernels of bitsandbytes for states of 32 bits that do not take gradients in bfloat16 (backends/cuda/ops.py).
_NOT_IN_BFLOAT16 = {"momentum", "rmsprop", "adagrad", "lars"}
_PAGED = 100_000  # bitsandbytes pages states from this many elements on (optim/optimizer.py: get_state_buffer)


def traced(arguments: Arguments) -> Arguments:
    """Return the training arguments with which a training is traced for a GPU.

    If the optimizer's package is missing, `optim` is replaced by another optimizer that has the same states.
    """
    is_missing = optional_packages.missing_of_optimizer(arguments.optimizer)
    same = optional_packages.about_optimizer(arguments.optimizer, "same_states") if is_missing else []
    return arguments.replace(optim=same[0]) if same else arguments


def assumptions(arguments: Arguments) -> list[str]:
    """Return what an estimate for a GPU assumes about the optimizer, one sentence each."""
    found = optional_packages.about_optimizer(arguments.optimizer, "assumed")
    if (other := traced(arguments).optimizer) != arguments.optimizer:
        same = "keeps the same states if weights are in float32"
        found.append(f"{arguments.optimizer}: its package is missing; {other} was traced, which {same}")
    return found


def replacements(tracker: "DeviceTracker", optim: str) -> Iterator[tuple[Any, str, Callable]]:
    """Yield (module or class, name of its function, replacement) for functions to replace while `optim` is traced."""
    yield torch.cuda, "synchronize", lambda *_, **__: None
    if fnmatch(optim, "paged*") or fnmatch(optim, "*_bnb*") or fnmatch(optim, "galore_*8bit*"):
        importlib.import_module("bitsandbytes")
    if bitsandbytes := sys.modules.get("bitsandbytes"):
        functional, kind = bitsandbytes.functional, bitsandbytes.optim.optimizer.Optimizer8bit
        yield functional, "optimizer_update_32bit", calling(_update_32bit, functional.optimizer_update_32bit)
        paged = functools.partial(_paged, tracker)
        yield kind, "get_state_buffer", calling(paged, kind.get_state_buffer)
        yield bitsandbytes.optim.AdEMAMix, "_get_state_double_buffer", calling(paged, _double_buffer)
    if optim == "stable_adamw" and not optional_packages.missing_of_optimizer(optim):
        optimi = importlib.import_module("optimi.stableadamw")
        yield optimi, "_default_to_triton", lambda *_, **__: True
        yield optimi, "stableadamw", lambda *_, step, **__: step.add_(1)


def _update_32bit(plain, optimizer: str, gradient, weight, *args, max_unorm: float = 0.0, **options):
    """Call `plain`, bitsandbytes' 32-bit update, with its arguments; raise Invalid if bitsandbytes lacks the kernel."""
    if optimizer in _NOT_IN_BFLOAT16 and gradient.dtype is torch.bfloat16:
        raise Invalid(
            f"this training fails on a GPU: bitsandbytes has no kernel for {optimizer} with gradients in bfloat16. "
            "Give dtype='float32', or another optimizer"
        )
    norm = torch.norm(weight.data.float()) if max_unorm > 0 else None  # noqa: F841, as on a GPU, held during the update
    return plain(optimizer, gradient, weight, *args, **options)


def _double_buffer(_, weight, dtype=torch.float32):
    """Return the buffer for AdEMAMix' two averages of the gradient: zeros of (2, *shape of the weight)."""
    return torch.zeros((2, *weight.shape), dtype=dtype, device=weight.device)


def _paged(tracker: "DeviceTracker", plain, optimizer, weight, *args, **options):
    """Return an optimizer's state for `weight`, made by `plain`, a function of bitsandbytes."""
    is_paged = optimizer.is_paged and weight.numel() >= _PAGED
    with tracker.placing(paged=is_paged):  # the driver pages this memory: it does not count as the device's
        return plain(optimizer, weight, *args, **options)
