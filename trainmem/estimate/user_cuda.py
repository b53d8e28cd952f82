"""Let a user's own training loop find the GPU that an estimate for CUDA assumes.

Such a loop chooses its device with `torch.cuda.is_available()` or by the name "cuda". In an estimate all tensors report
the device "cpu". Libraries must therefore not see a GPU: only calls from the user's own files get the answers of a
machine with a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainmem.core import stack_dumps

THE_DEVICE = torch.device("cpu")  # what an estimate takes for the GPU; the text "cpu" means the host


def device_argument(value: Any) -> Any:
    """Return `THE_DEVICE`, which represents the modelled GPU, for a value that names a GPU; else the value.

    A GPU's names are e.g. "cuda:0", `torch.device("cuda")`, or a whole number.
    """
    is_gpu = type(value) in (str, torch.device) and str(value).partition(":")[0] == "cuda"
    return THE_DEVICE if is_gpu or type(value) is int else value


def replacements(capability: tuple[int, int]) -> Iterator[tuple[Any, str, Callable]]:
    """Yield (module, name, replacement) for each function by which a loop asks for a GPU or waits for one.

    `capability`: the GPU's compute capability, e.g. (9, 0).
    """
    answers = {
        "is_available": True,
        "is_bf16_supported": capability >= (8, 0),
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": capability,
        **dict.fromkeys(("set_device", "synchronize", "reset_peak_memory_stats", "ipc_collect")),
    }
    yield torch.cuda, "Event", _Event
    for name, answer in answers.items():
        yield torch.cuda, name, _for_users(getattr(torch.cuda, name), answer)
    accelerator = {"is_available": True, "device_count": 1, "current_accelerator": torch.device("cuda")}
    for name, answer in (accelerator | {"synchronize": None}).items():
        yield torch.accelerator, name, _for_users(getattr(torch.accelerator, name), answer)


class _Event:
    """Stand for a `torch.cuda.Event`, by which loops time their steps: no time passes between two events."""

    def __init__(self, *args, **options):
        pass

    def record(self, *args) -> None:
        """Do nothing, because no stream runs; this class's `wait` and `synchronize` are the same function."""

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return 0.0


def _for_users(plain: Callable, answer: Any) -> Callable:
    """Return a function that returns `answer` to the user's own code, and calls `plain` for libraries."""

    def replaced(*args, **options):
        is_library = stack_dumps.is_library(sys._getframe(1).f_code.co_filename)
        return plain(*args, **options) if is_library else answer

    return replaced
