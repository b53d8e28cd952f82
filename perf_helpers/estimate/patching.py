"""Parts of torch, accelerate and transformers replaced for a while, and the private names of torch that this needs."""

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside this context the attribute `name` of a module or class is `value`; afterwards it is what it was."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def private(path: str) -> Any:
    """A private name of torch, e.g. "torch.library._scoped_library".

    Raises:
        RuntimeError: the installed version lacks it; the message says which versions have it.
    """
    try:
        return operator.attrgetter(path.removeprefix("torch."))(torch)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no {path}, which the emulation of CUDA stands on: use torch 2.11 to 2.14"
        ) from None


def overload(name: str) -> torch._ops.OpOverload:
    """An operator of aten by its name, e.g. "sum.dim_IntList"; "mm" is short for "mm.default"."""
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), which or "default")
