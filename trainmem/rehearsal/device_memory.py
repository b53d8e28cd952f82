"""Read and write the memory of a rehearsed device's tensors, which is host memory, and compute in it on the CPU."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

# Names of torch's functions that create tensors.
FACTORIES = {"zeros", "ones", "full", "arange", "tensor", "as_tensor", "eye", "linspace", "randint", "randperm"}
FACTORIES |= {"zeros_like", "ones_like", "full_like", "randint_like", "scalar_tensor", "tril_indices", "triu_indices"}
FACTORIES |= {"new_zeros", "new_ones", "new_full", "new_tensor", "asarray", "new"}


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Return the tensors in `values`, e.g. arguments, that have memory: no fake, meta, sparse or functorch tensors."""
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and is_plain(each)]


def address_of(tensor: torch.Tensor) -> int:
    """Return the address at which a tensor's storage begins."""
    if is_traceable_wrapper_subclass(tensor) or not (address := tensor.data_ptr()):
        return tensor.untyped_storage()._cdata  # it has no memory of its own
    return address - tensor.storage_offset() * tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own: it is not fake, meta, sparse, lazy or one of functorch's."""
    if isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta or tensor.layout != torch.strided:
        return False
    if torch.nn.parameter.is_lazy(tensor):  # of a lazy module that has not run yet
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor that uses the memory of a tensor on the rehearsed device."""
    if not tensor.is_cuda:
        return tensor.detach()
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    raw = torch.frombuffer((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
    alias = torch.empty(0, dtype=tensor.dtype, device="cpu")  # whatever the default device is
    return alias.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def on_cpu(function: Callable, args: tuple, kwargs: dict, values_of: Callable = memory_of) -> Any:
    """Call a function on the CPU instead of the rehearsed device, and return its result.

    Each tensor among the function's arguments that has memory (see `is_plain`) is replaced by `values_of(tensor)`: by
    default a CPU tensor that uses the same memory. An argument that is a device, e.g. "cuda:0", is replaced by the CPU.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "cuda"):
            return torch.device("cpu")
        return values_of(value) if isinstance(value, torch.Tensor) and is_plain(value) else value

    if getattr(function, "__name__", "") == "cuda":  # it takes no device but a GPU
        return values_of(args[0])
    options = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if "device" in options or getattr(function, "__name__", "") in FACTORIES:
        options["device"] = "cpu"
    with out_of_sight():
        args, options = tree_map(moved, (args, options))
        return function(*args, **options)


def compute(function: Callable, args: tuple, kwargs: dict, fresh: list[torch.Tensor]) -> bool:
    """Compute an operation of the rehearsed device on the CPU, and return whether the computation succeeded.

    The results are copied into `fresh`, the operation's result tensors.
    """
    try:
        made = on_cpu(function, args, kwargs)
        with out_of_sight():
            for tensor, value in zip(fresh, tensors_of(made) if fresh else [], strict=True):
                memory_of(tensor).copy_(value)
    except Exception:
        return False
    return True


@contextlib.contextmanager
def out_of_sight() -> Iterator[None]:
    """Hide computations on the CPU from dispatch modes and autograd in this context."""
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        yield
