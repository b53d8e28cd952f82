"""Read and compute device tensors on the host, where their memory is in a rehearsal."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

# Functions of torch that make a tensor of nothing.
FACTORIES = {"zeros", "ones", "full", "arange", "tensor", "as_tensor", "eye", "linspace", "randint", "randperm"}
FACTORIES |= {"zeros_like", "ones_like", "full_like", "randint_like", "scalar_tensor", "tril_indices", "triu_indices"}
FACTORIES |= {"new_zeros", "new_ones", "new_full", "new_tensor"}


def tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among arguments or results that have memory behind them: no fake, meta, sparse or functorch ones."""
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and is_plain(each)]


def address(tensor: torch.Tensor) -> int:
    """Where its storage begins."""
    if is_traceable_wrapper_subclass(tensor) or not (there := tensor.data_ptr()):
        return tensor.untyped_storage()._cdata  # it has no memory of its own
    return there - tensor.storage_offset() * tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta or tensor.layout != torch.strided:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    if not tensor.is_cuda:
        return tensor.detach()
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = torch.frombuffer((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def on_cpu(function: Callable, args: tuple, kwargs: dict, values_of: Callable = memory) -> Any:
    """What a function returns for the same values on the CPU, or for those that `values_of` gives for a tensor."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "cuda"):
            return torch.device("cpu")
        return values_of(value) if isinstance(value, torch.Tensor) and is_plain(value) else value

    options = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if "device" in options or getattr(function, "__name__", "") in FACTORIES:
        options["device"] = "cpu"
    with out_of_sight():
        args, options = tree_map(moved, (args, options))
        return function(*args, **options)


def compute(function: Callable, args: tuple, kwargs: dict, fresh: list[torch.Tensor]) -> bool:
    """Do on the CPU what the device was asked for, in the memory of the results; False where that does not work."""
    try:
        made = on_cpu(function, args, kwargs)
        with out_of_sight():
            for tensor, value in zip(fresh, tensors(made) if fresh else [], strict=True):
                memory(tensor).copy_(value)
    except Exception:
        return False
    return True


@contextlib.contextmanager
def out_of_sight() -> Iterator[None]:
    """Where no dispatch mode sees what is computed on the CPU, nor autograd."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        yield
