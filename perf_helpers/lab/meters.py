"""The two meters of an experiment. They are never on at the same time.

The time meter sees each optimizer step through torch's global hooks, so the code that is measured needs no measuring
code in it. The memory meter takes the total from the allocator itself and the categories from a dispatch mode that
follows every tensor's storage from birth to death; what one operation allocates inside itself, where no mode can see
it, is reported as a part of its own and never spread over the others.
"""

import bisect
import contextlib
import dataclasses
import functools
import itertools
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from perf_helpers.lab import hardware
from perf_helpers.lab.runs import CATEGORIES, Memory, Timing, explain

# What autograd does in place, unless a dispatch mode is on: the sum of two gradients, and writing into fresh zeros.
_IN_PLACE = {
    torch.ops.aten.add.Tensor: torch.ops.aten.add_.Tensor,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter.value: torch.ops.aten.scatter_.value,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
}
_SCALING = tuple(getattr(torch.ops.aten, name).Tensor for name in ("mul", "mul_", "div", "div_"))

# How the moments between the phases are called in a result: clipping belongs to the step, loading to the forward.
PHASE_NAMES = {"setup": "forward", "before": "forward", "after forward": "forward", "after backward": "step"}
_MARK = "perf_helpers"  # prefix of our own events among the profiler's


class TimeMeter:
    """Seconds of each optimizer step, device work included.

    Args:
        warmup_steps: steps left out at the start, at least 1 (the first one has no beginning to be measured from).
        on_step: called after each step, outside of what is timed; may block (that is how two runs take turns).

    On CUDA the clock is the device's own events, so that measuring adds no synchronisation to the steps.
    """

    def __init__(self, warmup_steps: int = 1, on_step: Callable[[int], None] | None = None):
        self.warmup_steps = max(1, warmup_steps)
        self.on_step = on_step
        self._intervals: list[tuple[Any, Any]] = []
        self._begin = None
        self._optimizer = None
        self._seen = 0

    def __enter__(self):
        self._hook = register_optimizer_step_post_hook(self._stepped)
        return self

    def __exit__(self, *_):
        self._hook.remove()

    def _stepped(self, optimizer, *_):
        # A loop may step several optimizers: the first one seen is the one that counts steps.
        self._optimizer = self._optimizer or weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        end = _now()
        if self._begin is not None:
            self._intervals.append((self._begin, end))
        self._seen += 1
        if self.on_step:
            self.on_step(self._seen)
        self._begin = _now()

    def seconds(self) -> tuple[float, ...]:
        """Seconds of every step after the first, warm-up included."""
        return tuple(_elapsed(begin, end) for begin, end in self._intervals)

    def result(self, samples_per_step: int | None = None) -> Timing | None:
        """Median and spread after the warm-up; None if there were too few steps to time one."""
        seconds = self.seconds()[self.warmup_steps - 1 :]
        if not seconds:
            return None
        median = statistics.median(seconds)
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (median,) * 3
        return Timing(
            step_seconds=median,
            spread_seconds=quartiles[2] - quartiles[0],
            steps=len(seconds),
            warmup_steps=self.warmup_steps,
            samples_per_second=samples_per_step / median if samples_per_step else None,
            all_seconds=seconds,
        )


def _now():
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed(begin, end) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin if isinstance(begin, float) and isinstance(end, float) else float("nan")
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


@dataclass(slots=True, eq=False)
class Block:
    """One live storage: its bytes, and what they are for. The category may become known after the birth: a tensor born
    in backward turns out to be a gradient."""

    bytes: int
    category: str
    operation: str


class Modules:
    """Which module an operation belongs to, by its name in the model: in backward, the one whose forward made the node.

    Autograd numbers its nodes as they are made, so that a module's nodes are those between two numbers.
    """

    def __init__(self):
        self._names: dict[int, str] = {}
        self._inside: list[str] = []
        # By how many backwards were running, for a checkpoint's second forward may be on a thread with its own count.
        self._entered: list[tuple[list[int], list[str]]] = [([], [])]

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
        """The module of this moment, "" outside of all."""
        if self._inside or len(self._entered) == 1:
            return self._inside[-1] if self._inside else ""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        numbers, names = self._entered[-2]
        place = bisect.bisect_right(numbers, node._sequence_nr()) - 1
        return names[place] if place >= 0 else ""

    def _note(self, name: str) -> None:
        numbers, names = self._entered[-1]
        numbers.append(torch._C._autograd._get_sequence_nr())
        names.append(name)


class Watcher:
    """Marks the ends of the phases and follows nothing: watching with it changes no allocation."""

    def __init__(self):
        self.phase = "setup"
        self.log: list[tuple[Block, int]] = []  # (block, +1 born or -1 dead)
        self.operations: list[tuple[int, str, str, str]] = []  # (length of the log after it, phase, operation, module)
        self.marks: list[tuple[str, int, int]] = []  # (label, length of the log, operations so far)
        self.modules = Modules()

    def mark(self, label: str) -> None:
        self.marks.append((label, len(self.log), len(self.operations)))

    def tag(self, tensor: Any, category: str, keep: tuple[str, ...] = ()) -> None:
        """Say what a tensor (or a nest of them) is for; blocks whose category is in `keep` stay as they are."""

    def born(self, tensor: Any, operation: str) -> None:
        """Follow a tensor that no operation made."""


class Tracker(Watcher, TorchDispatchMode):
    """Births and deaths of storages in the order of the operations, each with a category.

    Works on real and on fake tensors alike. The rules, by the moment of birth: from a module's forward to backward
    (also when checkpointing runs the forward again inside backward): activations; a cast of a weight there: weight
    copies; in backward: temporaries, unless they end up as a parameter's gradient; in the optimizer's step:
    temporaries, unless they end up in the optimizer's state; before a forward: inputs; else: temporaries.
    """

    def __init__(self, granularity: int = 1, device: str = "cpu"):
        Watcher.__init__(self)
        TorchDispatchMode.__init__(self)
        self.granularity = granularity  # the allocator rounds each block up to a multiple of this
        self.device = device  # what lies elsewhere (a batch on the host, say) is not followed
        self._blocks: dict[int, tuple[Block, weakref.ref]] = {}
        self._scaled: weakref.ref | None = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.watch(function, args, kwargs)

    def watch(self, function, args, kwargs):
        """Carry out an operation and follow what it makes."""
        self._see_number()
        if function in _IN_PLACE and self.phase == "backward" and _in_place(function, *args[:2]):
            function = _IN_PLACE[function]
        result = self.execute(function, args, kwargs or {})
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, function, args, kwargs)
        self.operations.append((len(self.log), self.phase, name_of(function), self.modules.here()))
        if function in _SCALING and torch.is_grad_enabled() and not isinstance(args[1], torch.Tensor):
            # A view that is changed in place: to ask for its history within the next operation, which may be the one
            # that writes it, would wait for ever.
            self._scaled = None if result._is_view() else weakref.ref(result)
        return result

    def _see_number(self):
        """Autograd keeps the number by which a tensor was multiplied, as a tensor that no operation returned."""
        if self._scaled is None:
            return
        result, self._scaled = self._scaled(), None
        number = getattr(getattr(result, "grad_fn", None), "_saved_other", None)
        if number is not None:
            self.born(number, "a number kept for backward")

    def execute(self, function, args, kwargs):
        return function(*args, **kwargs)

    def block(self, tensor: torch.Tensor) -> Block | None:
        """The block that holds the tensor's storage, if it is followed."""
        storage = self._storage(tensor)
        found = self._blocks.get(storage._cdata) if storage is not None else None
        return found[0] if found else None

    def tag(self, tensor, category, keep=()):
        for leaf in tree_iter(tensor):
            if isinstance(leaf, torch.Tensor):
                block = self.block(leaf)
                if block is None and category == "weights" and (storage := self._storage(leaf)) is not None:
                    self._follow(storage, category, "before")
                elif block is not None and block.category not in keep:
                    block.category = category

    def mark(self, label):
        self._see_number()
        super().mark(label)

    def born(self, tensor, operation):
        storage = self._storage(tensor)
        if storage is not None and storage._cdata not in self._blocks:
            self._follow(storage, self._category(None, ()), operation)

    def live(self, position: int) -> dict[str, int]:
        """Bytes by category after the first `position` entries of the log."""
        total = dict.fromkeys(CATEGORIES[:-1], 0)
        for block, sign in itertools.islice(self.log, position):
            total[block.category] += sign * block.bytes
        return total

    def _see(self, tensor, function, args, kwargs):
        storage = self._storage(tensor)
        if storage is None or storage._cdata in self._blocks or not storage.nbytes():
            return
        fresh = function is torch.ops.aten.lift_fresh.default or not any(
            (own := self._storage(leaf)) is not None and own._cdata == storage._cdata
            for value in (*args, *(kwargs or {}).values())
            for leaf in (value if isinstance(value, list | tuple) else (value,))
            if isinstance(leaf, torch.Tensor)
        )
        if fresh:  # else memory that is not the allocator's: numpy's, a mapped file's, another process's
            self._follow(storage, self._category(function, args), name_of(function))

    def _category(self, function, args) -> str:
        if self.phase == "reducer":
            return "gradients"
        recorded = torch.is_grad_enabled() and self.phase in ("forward", "after forward", "backward")
        if recorded or self.phase == "forward":
            if function is torch.ops.aten._to_copy.default:
                source = self.block(args[0])
                if source is not None and source.category == "weights":
                    return "weight_copies"
            return "activations"
        return "inputs" if self.phase in ("setup", "before") else "temporaries"

    def _storage(self, tensor: torch.Tensor):
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have none
            return None
        return storage if storage.device.type == self.device else None

    def _follow(self, storage, category, operation):
        size = -(-storage.nbytes() // self.granularity) * self.granularity
        block = Block(size, category, operation)
        key, log, blocks = storage._cdata, self.log, self._blocks

        def died(_):
            blocks.pop(key, None)
            log.append((block, -1))

        self._blocks[key] = (block, weakref.ref(storage, died))
        log.append((block, +1))


@functools.cache
def name_of(function) -> str:
    """An operator's name, e.g. "aten.mm.default"."""
    return str(function)


def _in_place(function, target: Any, other: Any) -> bool:
    """Whether autograd, unwatched, would do this in place.

    It does where it holds the only reference (`InputBuffer::accumulate`, and the formulas that ask for
    `areAnyTensorSubclassLike`, in torch's csrc/autograd), but never while a dispatch mode is on: the watched training
    would have a tensor more than the unwatched one.
    """
    if torch.is_grad_enabled() or not isinstance(target, torch.Tensor):
        return False
    if function is torch.ops.aten.add.Tensor:
        if not isinstance(other, torch.Tensor) or other.shape != target.shape:
            return False
        # Four: autograd's own reference, and three of this call. A checkpointed segment holds one more to its result's.
        if target._use_count() > 4:
            return False
    last = sum((length - 1) * step for length, step in zip(target.shape, target.stride(), strict=True))
    # Two: the target's own reference, and the one just asked for.
    return last + 1 == target.numel() and torch._C._storage_Use_Count(target.untyped_storage()._cdata) == 2


@contextlib.contextmanager
def watched(tracker: Watcher):
    """Follow a training with a watcher or a tracker: global hooks find phases, parameters, gradients and states.

    Works for any code that calls modules, `backward` and an optimizer's `step`: a Trainer, an Accelerate loop.
    """
    state = {"modules": 0, "backwards": 0}
    parameters: dict[int, torch.Tensor] = {}

    def before_forward(module, _):
        tracker.modules.enter(module)
        if state["backwards"]:
            return
        if not state["modules"]:
            if tracker.phase == "setup":
                tracker.mark("start")
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                parameters[id(tensor)] = tensor
                tracker.tag(tensor, "weights")
            tracker.phase = "forward"
        state["modules"] += 1

    def after_forward(module, _, __):
        tracker.modules.leave()
        if state["backwards"]:
            return
        state["modules"] -= 1
        if not state["modules"]:
            tracker.mark("forward")
            tracker.phase = "after forward"

    plain_backward, plain_rng_state = torch.autograd.backward, torch.get_rng_state

    def rng_state():  # checkpointing keeps one for each block; it is made below where operations are seen
        state = plain_rng_state()
        tracker.born(state, "get_rng_state")
        return state

    def backward(*args, **kwargs):
        if not state["backwards"]:
            tracker.mark("forward")
            tracker.phase = "backward"
        state["backwards"] += 1
        tracker.modules.enter_backward()
        try:
            return plain_backward(*args, **kwargs)
        finally:
            state["backwards"] -= 1
            tracker.modules.leave_backward()
            if not state["backwards"]:
                state["modules"] = 0
                tag_gradients()
                tracker.mark("backward")
                tracker.phase = "after backward"

    def tag_gradients():
        for parameter in parameters.values():
            if parameter.grad is not None:
                tracker.tag(parameter.grad, "gradients")

    def before_step(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameters[id(parameter)] = parameter
                tracker.tag(parameter, "weights")
        tag_gradients()
        tracker.phase = "step"

    def after_step(optimizer, *_):
        tracker.tag([*optimizer.state.values()], "optimizer_states", keep=("weights", "gradients"))
        tracker.mark("step")
        tracker.phase = "before"

    parallel = torch.nn.parallel.DistributedDataParallel
    plain_parallel = {name: getattr(parallel, name) for name in ("__init__", "_pre_forward")}

    def in_reducer(function):  # it makes its buckets, a second set of gradients, when it is built and once more later
        def reducing(*args, **kwargs):
            phase, tracker.phase = tracker.phase, "reducer"
            try:
                return function(*args, **kwargs)
            finally:
                tracker.phase = phase

        return reducing

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(before_forward),
        torch.nn.modules.module.register_module_forward_hook(after_forward, always_call=True),
        register_optimizer_step_pre_hook(before_step),
        register_optimizer_step_post_hook(after_step),
    ]
    torch.autograd.backward, torch.get_rng_state = backward, rng_state
    for name, function in plain_parallel.items():
        setattr(parallel, name, in_reducer(function))
    try:
        with tracker if isinstance(tracker, TorchDispatchMode) else contextlib.nullcontext():
            yield parameters
    finally:
        torch.autograd.backward, torch.get_rng_state = plain_backward, plain_rng_state
        for name, function in plain_parallel.items():
            setattr(parallel, name, function)
        for hook in hooks:
            hook.remove()


class MemoryMeter:
    """Peak memory of everything that runs inside `with MemoryMeter() as meter`.

    The peak is taken from the first forward on, so that building the model does not colour it. Enter it before the
    model is built: what was allocated earlier is not seen on CPU.

    Args:
        categories: follow every tensor, for the breakdown. On CPU that itself allocates: each number among an
            operation's arguments is wrapped once more, 8 bytes for the time of the operation. So there the total comes
            from a pass without categories, and `Memory.explained` joins the two; on CUDA, where such wraps lie on the
            host, one pass does both. None: what one pass can do.
        on_cpu: the experiment uses the CPU although there is a GPU.
    """

    def __init__(self, categories: bool | None = None, on_cpu: bool = False):
        self._cuda = torch.cuda.is_available() and not on_cpu
        self._categories = self._cuda if categories is None else categories

    def __enter__(self):
        self._context_bytes = _context_cost() if self._cuda else None
        if self._cuda:
            self._tracker = _CudaTracker()
        else:
            self._tracker = _CpuTracker() if self._categories else _CpuWatcher()
        self._stack = contextlib.ExitStack()
        if not self._cuda:
            self._profile = self._stack.enter_context(
                torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            )
        self._parameters = self._stack.enter_context(watched(self._tracker))
        return self

    def __exit__(self, *error):
        self._device_used = hardware.device_used_bytes(torch.cuda.current_device()) if self._cuda else None
        if hardware.is_rehearsal():  # what a driver holds is assumed there
            self._device_used = self._context_bytes = None
        return self._stack.__exit__(*error)

    def result(self) -> Memory:
        """The memory figures, in bytes; breakdowns are None without `categories`."""
        tracker = self._tracker
        account = tracker.account() if self._cuda else _replay(self._profile, tracker)
        totals = {mark[0]: total for mark, total in zip(tracker.marks, account.at_marks, strict=True)}
        totals.pop("start", None)
        memory = Memory(
            peak_bytes=account.peak_bytes,
            kind="allocated" if self._cuda else "counted",
            phases=totals,
            parameters=sum(p.numel() for p in self._parameters.values() if isinstance(p, torch.nn.Parameter)),
            reserved_bytes=torch.cuda.max_memory_reserved() if self._cuda else None,
            device_used_bytes=self._device_used,
            context_bytes=self._context_bytes,
            rss_bytes=peak_rss_bytes(),
        )
        if account.peak_operation < 0 or not self._categories:
            return memory
        length, phase, name, module = tracker.operations[account.peak_operation]
        at = {label: position for label, position, _ in tracker.marks}
        return dataclasses.replace(
            memory,
            peak_phase=PHASE_NAMES.get(phase, phase),
            peak_operation=name,
            peak_module=module,
            breakdown=explain(tracker.live(length), account.peak_bytes),
            phase_breakdowns={label: explain(tracker.live(at[label]), total) for label, total in totals.items()},
            timeline=_timeline(tracker, account.at_operations),
        )


class _CpuWatcher(Watcher):
    """Leaves its marks among the profiler's events, so that both are told in one order."""

    def mark(self, label):
        super().mark(label)
        with torch._C._profiler._RecordFunctionFast(f"{_MARK} mark"):
            pass


class _CpuTracker(_CpuWatcher, Tracker):
    """Leaves a mark before each operation too."""

    def execute(self, function, args, kwargs):
        with torch._C._profiler._RecordFunctionFast(f"{_MARK} op"):
            return function(*args, **kwargs)


class _CudaTracker(Tracker):
    """Asks the CUDA allocator after each operation whether its peak has moved."""

    def __init__(self):
        super().__init__(granularity=512, device="cuda")
        self._peak, self._peak_operation = 0, -1
        self._at_marks: list[int] = []
        self._at_operations: list[int] = []

    def execute(self, function, args, kwargs):
        result = function(*args, **kwargs)
        # The nested form: the flat one, which max_memory_allocated() makes too, takes half a millisecond.
        allocated = torch.cuda.memory.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
        if allocated["peak"] > self._peak:
            self._peak, self._peak_operation = allocated["peak"], len(self.operations)
        self._at_operations.append(allocated["current"])
        return result

    def mark(self, label):
        super().mark(label)
        if label == "start":
            torch.cuda.reset_peak_memory_stats()
            self._peak = 0
        self._at_marks.append(torch.cuda.memory_allocated())

    def account(self) -> "_Account":
        return _Account(torch.cuda.max_memory_allocated(), self._peak_operation, self._at_marks, self._at_operations)


@dataclass(slots=True)
class _Account:
    """What the allocator says, in bytes: the peak and the operation it fell in, the total at each mark, and the highest
    total during each operation."""

    peak_bytes: int
    peak_operation: int
    at_marks: list[int]
    at_operations: list[int]


def _timeline(tracker: Tracker, at_operations: list[int]) -> dict[str, Any] | None:
    """The last step recorded, see `series`."""
    ends = [operations for label, _, operations in tracker.marks if label == "step"]
    first, last = (ends[-2] if len(ends) > 1 else 0), (ends[-1] if ends else len(tracker.operations))
    places, lives, live, position = highest(at_operations, first, last), [], dict.fromkeys(CATEGORIES[:-1], 0), 0
    for place in places:
        length = tracker.operations[place][0]
        for block, sign in itertools.islice(tracker.log, position, length):
            live[block.category] += sign * block.bytes
        position = length
        lives.append(dict(live))
    return series([tracker.operations[place][1:] for place in places], lives, [at_operations[p] for p in places])


def highest(totals: list[int], first: int, last: int, points: int = 200) -> list[int]:
    """At most `points` places from `first` to `last`, each the highest of its stretch."""
    stretch = max(1, -(-(last - first) // points))
    return [
        max(range(begin, min(begin + stretch, last)), key=totals.__getitem__) for begin in range(first, last, stretch)
    ]


def series(where: list[tuple[str, str, str]], lives: list[dict[str, int]], totals: list[int]) -> dict[str, Any] | None:
    """A timeline as `runs.Memory` keeps it.

    Args:
        where: phase, operation and module of each moment.
        lives: bytes by category, and
        totals: all bytes, at each.
    """
    if len(where) < 2:
        return None
    parts = [explain(live, total) for live, total in zip(lives, totals, strict=True)]
    phases, operations, modules = map(list, zip(*where, strict=True))
    named = {"phase": [PHASE_NAMES.get(phase, phase) for phase in phases], "operation": operations, "module": modules}
    return named | {category: [part[category] for part in parts] for category in CATEGORIES}


def _replay(profile, tracker: Tracker) -> _Account:
    """The account of the CPU allocator, from the events that it gave to the profiler."""
    changes, starts, mark_times = [], [], []
    for event in profile.profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
        elif name == f"{_MARK} op":
            starts.append(event.start_ns())
        elif name == f"{_MARK} mark":
            mark_times.append(event.start_ns())
    changes.sort(key=lambda change: change[0])
    starts.sort()
    mark_times.sort()
    times = [when for when, _ in changes]
    totals = list(itertools.accumulate(size for _, size in changes))
    start = next((i for i, (label, _, _) in enumerate(tracker.marks) if label == "start"), None)
    first = bisect.bisect_left(times, mark_times[start]) if start is not None else 0
    window = range(max(0, first - 1), len(totals))
    peak = max(window, key=totals.__getitem__, default=None)
    at_marks = [totals[max(0, bisect.bisect_right(times, when) - 1)] if totals else 0 for when in mark_times]
    at_operations = []
    for begin, end in itertools.pairwise([*starts, float("inf")]):
        here = range(bisect.bisect_left(times, begin), bisect.bisect_left(times, end))
        before = totals[here.start - 1] if here.start else 0
        at_operations.append(max((totals[i] for i in here), default=before))
    if peak is None:
        return _Account(0, -1, at_marks, at_operations)
    operation = bisect.bisect_right(starts, times[peak]) - 1
    return _Account(totals[peak], operation, at_marks, at_operations)


def _context_cost() -> int | None:
    """Device-used bytes that the first CUDA tensor of this process brings; None where NVML does not tell."""
    before = hardware.device_used_bytes(index := torch.cuda.current_device())
    torch.ones((1, 1), device="cuda")
    after = hardware.device_used_bytes(index)
    return None if before is None or after is None else after - before - torch.cuda.memory_reserved()


def peak_rss_bytes() -> int | None:
    """Peak resident memory of this process: information only, it mixes in what libraries and allocators keep."""
    try:
        import resource
    except ImportError:  # Windows
        return None

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
