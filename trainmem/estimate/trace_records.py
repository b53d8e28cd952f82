"""Hold a traced training: its operations, the live bytes at each, and for CUDA the log of allocations and frees that is
replayed on the allocator model.

Reading a trace needs no torch. `trace` makes one.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainmem.records import Phase

if TYPE_CHECKING:
    import torch


class Spec(NamedTuple):
    """A tensor among the arguments of an operation, without its content."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    dtype: "torch.dtype"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# How `nested` puts arguments together: how many are positional, the names of the others, and for each the length of the
# list that it is, -1 for one that is no list.
Structure = tuple[int, tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator of torch and the arguments that it was called with: enough to run it again on other data."""

    name: str  # packet, operator and overload, e.g. "aten.mm.default"
    leaves: tuple[Any, ...]  # arguments one by one: tensors as `Spec`, plain values as they are, the rest as None
    structure: Structure  # how the leaves go together
    takes_list: bool  # it works on a list of tensors, as an optimizer does on all parameters at once
    made_bytes: int = 0  # of its results

    @property
    def function(self):
        """The operator itself."""
        import torch

        return functools.reduce(getattr, self.name.split("."), torch.ops)

    @property
    def is_view(self) -> bool:
        if self.name.startswith("storage."):  # no operator: see `tracker.RESIZE`
            return False
        return self.function.is_view or self.name == "aten._unsafe_view.default"

    @property
    def specs(self) -> list[Spec]:
        """The tensors among its arguments."""
        return [leaf for leaf in self.leaves if type(leaf) is Spec]

    @property
    def bytes(self) -> int:
        """Of what it reads and makes."""
        return self.made_bytes + sum(spec.bytes for spec in self.specs)

    @property
    def signature(self) -> tuple:
        """What it has in common with an operation that allocates exactly the same. Types are among it, for Python
        takes 1, 1.0 and True for equal."""
        return self.name, self.leaves, tuple(map(type, self.leaves))

    @property
    def lengths(self) -> list[int]:
        """Lengths of its tensors, and its whole numbers, which may be lengths too."""
        shapes = (leaf.shape if type(leaf) is Spec else (leaf,) for leaf in self.leaves)
        return [length for shape in shapes for length in shape if type(length) is int]


def flat(args: Sequence, kwargs: dict[str, Any]) -> tuple[list, Structure]:
    """Arguments of an operator one by one, and how `nested` puts them together. An operator's lists hold no lists."""
    leaves, lengths = [], []
    for value in itertools.chain(args, kwargs.values()):
        is_list = isinstance(value, list | tuple)
        lengths.append(len(value) if is_list else -1)
        leaves.extend(value) if is_list else leaves.append(value)
    return leaves, (len(args), tuple(kwargs), tuple(lengths))


def nested(leaves: Iterable, structure: Structure) -> tuple[list, dict[str, Any]]:
    """The arguments that `flat` took apart."""
    count, names, lengths = structure
    rest = iter(leaves)
    values = [next(rest) if length < 0 else list(itertools.islice(rest, length)) for length in lengths]
    return values[:count], dict(zip(names, values[count:], strict=True))


class Label(NamedTuple):
    """What a block is."""

    operation: str  # that made it
    category: str  # of `Category`
    phase: str  # of its birth
    module: str  # that it belongs to, by its name in the model
    stream: int = 0  # see `tracker.Block`


@dataclass(frozen=True, slots=True)
class Log:
    """Births and deaths of blocks in their order, from the loading of the model on."""

    blocks: list[tuple[int, Label]]  # (bytes, not rounded; what it is), in the order of birth
    events: list[int]  # n: the birth of block n; ~n: its death
    marks: list[tuple[str, int]]  # (label, how many events are before it): "start" of the first forward, ends of phases
    emptied: tuple[int, ...] = ()  # after how many events the allocator is told to give back what is free

    def position(self, label: str) -> int:
        """How many events are before the first mark of this label; 0 where there is none."""
        return next((position for own, position in self.marks if own == label), 0)


def highest(totals: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """The most during each operation: (operations,).

    Args:
        totals: (events + 1,): before the first event and after each.
        begins: (operations + 1,): how many events are before each operation, and how many there are.
    """
    begins = np.minimum(begins, len(totals) - 1)
    return np.maximum(np.maximum.reduceat(totals[: begins[-1] + 1], begins[:-1]), totals[begins[1:]])


@dataclass(frozen=True, slots=True)
class Trace:
    """One training as arrays over its operations (axis 0) and `records.TENSOR_CATEGORIES` (axis 1), in bytes. The index
    of an operation is its position in this trace, from the first forward on."""

    operations: list[Operation]
    phases: list[Phase]  # in which each runs
    modules: list[str]  # to which each belongs, by its name in the model; "" outside of all
    live: np.ndarray  # (operations, categories): what lives when it has ended
    high: np.ndarray  # (operations,): the highest total until the next one begins
    marks: dict[str, np.ndarray]  # {phase: (categories,)}: what lives at the phase's last end, if it is of a step
    parameters: int  # numbers in the model's weights
    trainable: int  # of these
    last_step: tuple[int, int]  # the operations of the last training step, as (first, last + 1)
    begins: np.ndarray  # (operations + 1,): events of the log before each, and all of them
    # Phases beside the steps: (phase, bytes that lived before, most bytes that lived, the last operation by then, the
    # phase's operations as in `last_step`). Not everything that lives is made by an operation.
    apart: tuple[tuple[Phase, int, int, int, tuple[int, int]], ...] = ()
    log: Log | None = None  # of births and deaths, where a device's memory is followed
    one_sided: "Trace | None" = None  # the same with another routing of tokens to experts, where values decide it
    witnessed: Any = None  # what `explanation.Witness` adds
