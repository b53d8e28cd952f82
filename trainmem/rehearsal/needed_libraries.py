"""Turn the error of a CUDA library that a rehearsal cannot run into `NeedsLibrary`: the library's memory is unknown."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainmem.rehearsal.device_memory import on_cpu
from trainmem.unknown import NeedsLibrary

# CUDA libraries by their names in torch's messages; the stub answers only the calls in answers.toml and libraries.cpp.
_LIBRARIES = {"cudnn": "cuDNN", "cufft": "cuFFT", "cusolver": "cuSOLVER", "cusparse": "cuSPARSE", "cublas": "cuBLAS"}


def explained(error: RuntimeError) -> RuntimeError:
    """Return a clearer error, `NeedsLibrary`, if `error` means that a CUDA library cannot be used in a rehearsal.

    The new error names the library. Any other error is returned unchanged.
    """
    text = str(error).lower()
    is_refusal = "not answered in a rehearsal" in text or any(f"{word} error" in text for word in _LIBRARIES)
    if not is_refusal or isinstance(error, NeedsLibrary):
        return error
    found = next((name for word, name in _LIBRARIES.items() if word in text), "the CUDA runtime")
    first = str(error).partition(". ")[0].partition("(")[0]
    return NeedsLibrary(f"a rehearsal does not know the memory that {found} takes here ({first})")


def shaped(function: Callable, args: tuple, kwargs: dict, why: str) -> Any:
    """Return the result of `function` as device tensors of the right shapes without values; call no CUDA library.

    Args:
        function, args, kwargs: the function, e.g. `torch.linalg.qr`, and its arguments.
        why: the message of `NeedsLibrary`.

    Raises:
        NeedsLibrary: torch does not know the shape of the result.
    """
    try:
        shapes = on_cpu(function, args, kwargs, lambda tensor: torch.empty_like(tensor, device="meta"))
    except (RuntimeError, TypeError) as error:
        raise NeedsLibrary(why) from error
    return tree_map_only(torch.Tensor, lambda each: torch.empty_like(each, device="cuda"), shapes)
