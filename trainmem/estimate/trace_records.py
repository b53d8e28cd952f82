"""Hold a traced training: its operations, the live bytes at each operation, and CUDA's log of allocations and frees.

`allocator_replay` replays that log on the allocator model. Reading a trace needs no torch. `trace` makes traces.
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
    """Hold the shape, strides (in elements) and type of a tensor among an operation's arguments, without content."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    dtype: "torch.dtype"

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SparseSpec(NamedTuple):
    """Hold the shape, number of stored elements and type of a sparse tensor (COO) among an operation's arguments."""

    shape: tuple[int, ...]
    count: int
    dtype: "torch.dtype"
    is_coalesced: bool

    @property
    def bytes(self) -> int:
        return self.count * (self.dtype.itemsize + 8 * len(self.shape))  # a value, and its position in 64 bits


# How `nested` groups arguments: (number of positional ones, names of the others, for each the length of the list that
# it is, or -1 if it is no list).
Structure = tuple[int, tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Operation:
    """Hold a torch operator and its arguments, so that the operator can be run again on other data.

    Each tensor among the arguments is replaced by a `Spec` (its shape, strides and type).
    """

    name: str  # packet, operator and overload, e.g. "aten.mm.default"
    leaves: tuple[Any, ...]  # arguments one by one: tensors as `Spec`, plain values as they are, others as None
    structure: Structure  # how `nested` groups the leaves
    takes_list: bool  # whether it works on a list of tensors, as an optimizer does on all parameters at once
    made_bytes: int = 0  # bytes of its results

    @property
    def function(self):
        """The operator object, found by its name in `torch.ops`."""
        import torch

        return functools.reduce(getattr, self.name.split("."), torch.ops)

    @property
    def is_view(self) -> bool:
        if self.name.startswith("storage."):  # no operator: see `tracker.RESIZE`
            return False
        return self.function.is_view or self.name == "aten._unsafe_view.default"

    @property
    def specs(self) -> list[Spec | SparseSpec]:
        """The `Spec`s of the tensors among the operation's arguments."""
        return [leaf for leaf in self.leaves if type(leaf) in (Spec, SparseSpec)]

    @property
    def takes_sparse(self) -> bool:
        return any(type(leaf) is SparseSpec for leaf in self.leaves)

    @property
    def bytes(self) -> int:
        """Bytes of the operation's operands and results together."""
        return self.made_bytes + sum(spec.bytes for spec in self.specs)

    @property
    def signature(self) -> tuple:
        """A key that is equal for operations with equal allocations.

        The key includes the arguments' types, because 1, 1.0 and True are equal in Python.
        """
        return self.name, self.leaves, tuple(map(type, self.leaves))

    @property
    def lengths(self) -> list[int]:
        """The lengths of the tensor arguments' dimensions, and the whole-number arguments, which may be lengths."""
        shapes = (leaf.shape if type(leaf) in (Spec, SparseSpec) else (leaf,) for leaf in self.leaves)
        return [length for shape in shapes for length in shape if type(length) is int]


def flat(args: Sequence, kwargs: dict[str, Any]) -> tuple[list, Structure]:
    """Return (flat list of an operator's arguments, structure from which `nested` restores the arguments).

    The flat list has each item of a list among the arguments as its own entry. Such a list must not contain lists.
    """
    leaves, lengths = [], []
    for value in itertools.chain(args, kwargs.values()):
        is_list = isinstance(value, list | tuple)
        lengths.append(len(value) if is_list else -1)
        leaves.extend(value) if is_list else leaves.append(value)
    return leaves, (len(args), tuple(kwargs), tuple(lengths))


def nested(leaves: Iterable, structure: Structure) -> tuple[list, dict[str, Any]]:
    """Return (positional arguments, named arguments) of a call; this undoes `flat`.

    `leaves`: the flat list of values; `structure`: how the values are grouped; both as `flat` returned them.
    """
    count, names, lengths = structure
    rest = iter(leaves)
    values = [next(rest) if length < 0 else list(itertools.islice(rest, length)) for length in lengths]
    return values[:count], dict(zip(names, values[count:], strict=True))


class Label(NamedTuple):
    """Hold the origin of an allocated block: operation, category, phase, module and stream."""

    operation: str  # that allocated it
    category: str  # a value of `Category`
    phase: str  # in which it was allocated
    module: str  # that it belongs to, by its name in the model
    stream: int = 0  # see `tracker.Block`


@dataclass(frozen=True, slots=True)
class Log:
    """Hold allocations and frees in order of time, from the model's loading on, with each block's bytes and origin."""

    blocks: list[tuple[int, Label]]  # (bytes, not rounded; origin), in the order of allocation
    events: list[int]  # n: block n is allocated; ~n: it is freed
    marks: list[tuple[str, int]]  # (label, number of events before it): "start" of the first forward, ends of phases
    emptied: tuple[int, ...] = ()  # numbers of events after which the allocator's cache is emptied

    def position(self, label: str) -> int:
        """Return the number of events before the log's first mark with this `label`, e.g. "start"; 0 if it has none."""
        return next((position for own, position in self.marks if own == label), 0)


def highest(totals: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return the highest total of bytes during each operation, (operations,).

    Args:
        totals: (events + 1,): bytes before the first event and after each event.
        begins: (operations + 1,): the number of events before each operation, and last the number of all events.
    """
    begins = np.minimum(begins, len(totals) - 1)
    return np.maximum(np.maximum.reduceat(totals[: begins[-1] + 1], begins[:-1]), totals[begins[1:]])


@dataclass(frozen=True, slots=True)
class Trace:
    """Hold one traced training, from the first forward pass on: its operations and the live bytes at each of them.

    The array `live` has the shape (operations, categories); the categories are `records.TENSOR_CATEGORIES`.
    """

    operations: list[Operation]
    phases: list[Phase]  # the phase of each operation
    modules: list[str]  # the module of each operation, by its name in the model; "" outside of all
    live: np.ndarray  # (operations, categories): live bytes at the end of each operation
    high: np.ndarray  # (operations,): the highest total until the next operation begins
    marks: dict[str, np.ndarray]  # {phase of a step: (categories,)}: live bytes at the phase's last end
    parameters: int  # numbers in the model's weights
    trainable: int  # of these, numbers that are trained
    last_step: tuple[int, int]  # the operations of the last training step, as (first, last + 1)
    begins: np.ndarray  # (operations + 1,): events of the log before each operation, then all events
    # Phases outside the steps: (phase, live bytes before it, most live bytes, the last operation by then, the phase's
    # operations as in `last_step`). Not everything that is live is made by an operation.
    apart: tuple[tuple[Phase, int, int, int, tuple[int, int]], ...] = ()
    log: Log | None = None  # of allocations and frees, on CUDA only
    one_sided: "Trace | None" = None  # the same with all tokens at the same experts, if values decide the routing
    assumes_masks: bool = False  # whether masks of unknown values were assumed to select all elements
    recurs: bool = False  # whether recurrent layers ran, which cuDNN runs on a GPU
    witnessed: Any = None  # added by `explanation.Witness`
