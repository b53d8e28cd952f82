"""What operations make of fake tensors, kept so that one seen before need not be asked again.

To ask torch what an operation makes of fake tensors takes most of the time of following a training. What comes out
depends on the arguments alone, so it is kept, and can travel to another process.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from perf_helpers.estimate.operations import Operation, Spec

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class View:
    """A result that lies on the memory of the operation's first argument."""

    spec: Spec
    offset: int  # in elements


# None: the operation works in place and returns its first argument, if anything.
Made = Spec | View | tuple[Spec | None, ...] | list[Spec | None] | None


class OperationCache:
    """{operation and arguments: what it makes}. Left out is whatever cannot be made again from a `Made`."""

    def __init__(self, known: dict[tuple, Made] | None = None):
        self.known: dict[tuple, Made] = dict(known or {})

    def result(self, operation: Operation, function, args: tuple, tensors: list, mode: FakeTensorMode, ask: Callable):
        """What the operation makes of fake tensors, with `ask` where it is not known yet.

        Args:
            tensors: all tensors among the arguments.
        """
        offset = args[0].storage_offset() if args and isinstance(args[0], torch.Tensor) else 0
        key = *operation.signature, operation.structure, offset  # all that the result depends on
        if key not in self.known:
            result = ask()
            self._keep(key, function, args, result, tensors)
            return result
        made = self.known[key]
        if made is None:
            return args[0] if function._schema.returns else None
        if type(made) in (tuple, list):
            return type(made)(part if part is None else _fake(part, mode) for part in made)
        return _fake(made, mode, args[0])

    def _keep(self, key: tuple, function, args: tuple, result: Any, tensors: list[torch.Tensor]) -> None:
        """Keep a result, if the next one can be made of it."""
        if torch.Tag.inplace_view in function.tags or key[0].startswith(("aten.resize", "aten.set")):
            return
        if function._schema.is_mutable:
            on_fake = tensors and isinstance(tensors[0], FakeTensor)
            if on_fake and ((result is None and not function._schema.returns) or result is args[0]):
                self.known[key] = None
        elif type(result) in (tuple, list):
            made = type(result)(None if part is None else _made(part, tensors) for part in result)
            if all(part is None or type(new) is Spec for part, new in zip(result, made, strict=True)):
                self.known[key] = made
        else:
            made = _made(result, tensors)
            if type(made) is Spec or (type(made) is View and args[0] is tensors[0]):
                self.known[key] = made


def _made(result: Any, tensors: list[torch.Tensor]) -> Spec | View | None:
    """How to make such a tensor again; None where it neither fills memory of its own nor lies on the first tensor's."""
    if not isinstance(result, FakeTensor) or result.requires_grad:
        return None
    spec = Spec(tuple(result.shape), tuple(result.stride()), result.dtype)
    storage = result.untyped_storage()
    shared = [tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors]
    if any(shared):
        on_first = shared[0] and tensors[0].dtype is result.dtype
        return View(spec, result.storage_offset()) if on_first else None
    last = sum((size - 1) * step for size, step in zip(result.shape, result.stride(), strict=True)) + 1
    fills = storage.nbytes() == last * result.itemsize * (result.numel() > 0)
    return spec if fills else None


def _fake(made: Spec | View, mode: FakeTensorMode, base: torch.Tensor | None = None) -> FakeTensor:
    """A fake tensor as it was described; a view lies on `base`."""
    if type(made) is View:
        with torch._C._DisableTorchDispatch():
            plain = torch.as_strided(base, made.spec.shape, made.spec.stride, made.offset)
    else:
        plain = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
    fake = torch.Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=_HOST)
    fake.__dict__.update(_state(mode))
    return fake


@functools.lru_cache(maxsize=1)
def _state(mode: FakeTensorMode) -> dict[str, Any]:
    """What every new fake tensor keeps in Python: to set it one by one takes longer than an operation."""
    return dict(FakeTensor(mode, torch.empty(0, device="meta"), _HOST).__dict__)
