"""Record a training's phases and running module, for the memory meter and estimates, without changing allocations."""

import bisect
from dataclasses import dataclass
from typing import Any

import torch

from trainmem.records import Phase

MARK = "perf_helpers"  # prefix of our own events among those of torch's profiler


class Recorded:
    """Record in torch's profiler when the code inside `with Recorded(name)` begins and ends.

    The record has the scope USER_SCOPE, the only one that `memory_meter.profiled` keeps.
    """

    __slots__ = ("_name", "_record")

    def __init__(self, name: str):
        self._name = f"{MARK} {name}"

    def __enter__(self):
        self._record = torch._C._autograd._record_function_with_args_enter(self._name)

    def __exit__(self, *_):
        torch._C._autograd._record_function_with_args_exit(self._record)


@dataclass(slots=True, eq=False)
class Block:
    """Hold the bytes, category, operation and stream of one storage, from its allocation to its free."""

    bytes: int  # as the allocator rounds them
    category: str  # a `Category`; it may change: a temporary turns out to be a gradient
    operation: str  # the operation that allocated it
    stream: int = 0  # stream of the device on which it was allocated; 0: the default stream


class Modules:
    """Find the name of the module to which the present operation belongs.

    In backward this is the module whose forward made the autograd node that runs now. Autograd numbers its nodes in the
    order in which they are made. This class notes the current number whenever a module's forward begins or ends. A
    node's number therefore identifies the module.
    """

    def __init__(self):
        self._names: dict[int, str] = {}
        self._inside: list[str] = []
        # One entry per nested backward, because a checkpoint's second forward may run on a thread with its own numbers.
        self._entered: list[tuple[list[int], list[str]]] = [([], [])]

    @property
    def runs_forward(self) -> bool:
        """Whether a module's forward runs now, in the forward pass or where a checkpoint repeats it in backward."""
        return bool(self._inside)

    def enter(self, module) -> None:
        if not self._inside and id(module) not in self._names:
            kind = type(module).__name__
            self._names |= {id(part): name.removeprefix("module.") or kind for name, part in module.named_modules()}
        self._inside.append(self._names.get(id(module)) or type(module).__name__)
        self._note(self._inside[-1])

    def leave(self) -> None:
        if self._inside:
            self._inside.pop()
            self._note(self._inside[-1] if self._inside else "")

    def enter_backward(self) -> None:
        self._entered.append(([], []))

    def leave_backward(self) -> None:
        self._entered.pop()
        if len(self._entered) == 1:
            self._inside.clear()
            self._entered = [([], [])]

    def here(self) -> str:
        """Return the name of the module whose forward or backward runs now; "" if none does."""
        if self._inside or len(self._entered) == 1:
            return self._inside[-1] if self._inside else ""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        numbers, names = self._entered[-2]
        index = bisect.bisect_right(numbers, node._sequence_nr()) - 1
        return names[index] if index >= 0 else ""

    def _note(self, name: str) -> None:
        numbers, names = self._entered[-1]
        numbers.append(torch._C._autograd._get_sequence_nr())
        names.append(name)


class Watcher:
    """Note where a training's phases end, without changing what the training allocates.

    The subclass `Tracker` also tracks tensors.
    """

    def __init__(self):
        self.phase = Phase.SETUP
        self.log: list[tuple[Block, int]] = []  # (block, +1 allocated or -1 freed)
        self.operations: list[tuple[int, str, str, str]] = []  # (length of the log after it, phase, operation, module)
        self.marks: list[tuple[str, int, int]] = []  # (label, length of the log, operations so far)
        self.modules = Modules()

    def mark(self, label: str) -> None:
        """Record in `marks`, and in torch's profiler, that a phase begins or ends now.

        `label`: if a phase ends, its name, e.g. "forward"; if an evaluation, a save or a load begins, "begin
        evaluation", "begin saving" or "begin loading"; if the measurement starts, "start".
        """
        self.marks.append((label, len(self.log), len(self.operations)))
        with Recorded("mark"):
            pass  # torch's profiler records the mark too, which puts it in order with the allocations

    def tag(self, tensor: Any, category: str, keep: tuple[str, ...] = ()) -> None:
        """Set the category of a tensor, or of nested tensors, unless a tensor's present category is in `keep`.

        A watcher does nothing in this method, because it tracks no tensors; `Tracker` overrides it.
        """

    def track_unlisted(self, tensor: Any, operation: str) -> None:
        """Track a tensor that no operation returned. `operation`: text that says where the tensor comes from.

        A watcher does nothing in this method, because it tracks no tensors; `Tracker` overrides it.
        """
