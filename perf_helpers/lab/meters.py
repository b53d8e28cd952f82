"""The two meters of an experiment. They are never on at the same time.

The time meter sees each optimizer step through torch's global hooks, so the code that is measured needs no measuring
code in it. The memory meter takes the total from the allocator itself and the categories from a dispatch mode that
follows every tensor's storage from birth to death; what one operation allocates inside itself, where no mode can see
it, is reported as a part of its own and never spread over the others.
"""

import bisect
import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from perf_helpers.lab import hardware
from perf_helpers.lab.allocator_trace import MARK, Account, events, replayed, replayed_by_tensors
from perf_helpers.lab.tracker import Tracker, Watcher, watched
from perf_helpers.records import CATEGORIES, TENSOR_CATEGORIES, Memory, Timing, explain

_timed: dict[int, "TimeMeter"] = {}  # by thread: the meters that are on


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
        self._cpu_seconds: list[float] = []
        self._waited_seconds: list[float] = []
        self._begin = self._cpu_begin = self._waited_begin = None
        self._optimizer = None
        self._seen = 0

    def __enter__(self):
        if not _timed:  # experiments in turns share the hook: torch goes through its hooks while others begin
            TimeMeter._hook = register_optimizer_step_post_hook(TimeMeter._after_step)
        _timed[threading.get_ident()] = self
        return self

    def __exit__(self, *_):
        del _timed[threading.get_ident()]
        if not _timed:
            TimeMeter._hook.remove()

    @staticmethod
    def _after_step(optimizer, *_):
        if meter := _timed.get(threading.get_ident()):
            meter._stepped_by(optimizer)

    def _stepped_by(self, optimizer) -> None:
        # A loop may step several optimizers: the first one seen is the one that counts steps.
        self._optimizer = self._optimizer or weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self.stepped()

    def stepped(self) -> None:
        """A step has ended: the hook's, or a forward pass, where nothing steps an optimizer."""
        end, cpu_end, waited_end = _now(), time.process_time(), _waited()
        if self._begin is not None:
            self._intervals.append((self._begin, end))
            self._cpu_seconds.append(cpu_end - self._cpu_begin)
            if waited_end is not None:
                self._waited_seconds.append(waited_end - self._waited_begin)
        self._seen += 1
        if self.on_step:
            self.on_step(self._seen)
        self._waited_begin = _waited()
        self._begin, self._cpu_begin = _now(), time.process_time()

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
            all_cpu_seconds=tuple(self._cpu_seconds[self.warmup_steps - 1 :]),
            all_waited_seconds=tuple(self._waited_seconds[self.warmup_steps - 1 :]),
        )


def _now():
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _waited() -> float | None:
    """Seconds that this thread has been ready to go on and had no core, by the kernel's scheduler; None where it does
    not tell."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def _elapsed(begin, end) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin if isinstance(begin, float) and isinstance(end, float) else float("nan")
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class MemoryMeter:
    """Peak memory of everything that runs inside `with MemoryMeter() as meter`.

    The peak is taken from the first forward on, so that building the model does not colour it. Enter it before the
    model is built: what was allocated earlier is not seen on CPU.

    Args:
        categories: follow every tensor, for the breakdown. On a CPU following tensors allocates too, for the dispatch
            mode wraps each scalar among an operation's arguments in an 8-byte tensor: so the total comes from a run
            without categories, and `Memory.explained` joins the two. On CUDA those wraps lie on the host, and one run
            does both. None: what one run can do.
        on_cpu: the experiment uses the CPU although there is a GPU.
        by_tensors: on a CPU the total is what tensors take, with what each operation allocates inside itself, and one
            run does both. For several ranks: threads of gloo may free a tensor last, and the allocator tells the
            profiler of no other thread's. And for a data loader with workers: how many batches have come from them by
            now is a matter of time, and they lie in shared memory.
    """

    def __init__(self, categories: bool | None = None, on_cpu: bool = False, by_tensors: bool = False):
        self._cuda = torch.cuda.is_available() and not on_cpu
        self._by_tensors = by_tensors and not self._cuda
        self._categories = self._cuda or self._by_tensors if categories is None else categories

    def __enter__(self):
        self._context_bytes = _context_cost() if self._cuda else None
        self._stack = contextlib.ExitStack()
        if self._cuda:
            self._tracker = _CudaTracker()
            if file := os.environ.get("REHEARSAL_SNAPSHOT"):
                self._stack.enter_context(_recorded(file))
        else:
            self._tracker = _CpuTracker() if self._categories else _CpuWatcher()
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
        replay = replayed_by_tensors if self._by_tensors else replayed
        account = tracker.account() if self._cuda else replay(self._profile, tracker)
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
            peak_phase=phase.shown,
            peak_operation=name,
            peak_module=module,
            breakdown=explain(tracker.live(length), account.peak_bytes),
            phase_breakdowns={label: explain(tracker.live(at[label]), total) for label, total in totals.items()},
            timeline=_timeline(tracker, account.at_operations),
        )


class CompiledMemoryMeter:
    """Peak memory of the last optimizer step inside `with CompiledMemoryMeter() as meter`, for compiled code.

    Hooks on modules break a model into pieces for its compiler, and where operations are watched it gives up: what
    would be measured is the code uncompiled. So only the ends of steps are seen here, there is no breakdown, and
    earlier steps, which compile, do not count.

    Args:
        on_cpu: the experiment uses the CPU although there is a GPU.
    """

    def __init__(self, on_cpu: bool = False):
        self._cuda = torch.cuda.is_available() and not on_cpu
        self._peaks: list[int] = []  # on CUDA, of each step
        self._parameters = 0

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        if not self._cuda:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            self._profile = self._stack.enter_context(torch.profiler.profile(activities=kinds, profile_memory=True))
        self._stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
        return self

    def __exit__(self, *error):
        return self._stack.__exit__(*error)

    def _stepped(self, optimizer, *_):
        self._parameters = sum(weight.numel() for group in optimizer.param_groups for weight in group["params"])
        if self._cuda:
            self._peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        with torch._C._profiler._RecordFunctionFast(f"{MARK} mark"):
            pass

    def result(self) -> Memory | None:
        """The memory figures, in bytes; None if there were fewer than two steps."""
        if self._cuda:
            peak = self._peaks[-1] if len(self._peaks) > 1 else None
        else:
            changes, _, ends = events(self._profile)
            times = [change.when for change in changes]
            totals = list(itertools.accumulate(change.bytes for change in changes))
            last = [bisect.bisect_right(times, when) for when in ends[-2:]]
            peak = max(totals[max(0, last[0] - 1) : last[1]], default=None) if len(last) > 1 else None
        return peak and Memory(
            peak_bytes=peak,
            kind="allocated" if self._cuda else "counted",
            parameters=self._parameters,
            reserved_bytes=torch.cuda.max_memory_reserved() if self._cuda else None,
            rss_bytes=peak_rss_bytes(),
        )


class _CpuWatcher(Watcher):
    """Leaves its marks among the profiler's events, so that both are told in one order."""

    failed: Collection[int] = ()  # numbers of operations that raised an error, of which there is no result

    def mark(self, label):
        super().mark(label)
        with torch._C._profiler._RecordFunctionFast(f"{MARK} mark"):
            pass


class _CpuTracker(_CpuWatcher, Tracker):
    """Leaves a mark on each operation too."""

    def __init__(self):
        super().__init__()
        self.begun: list[int] = []  # length of the log before each operation
        self.failed: set[int] = set()
        self._is_collective = False  # the last operation

    def execute(self, function, args, kwargs):
        if self._is_collective:
            _wait_for_gloo()
        self.begun.append(len(self.log))
        self._is_collective = function.namespace == "c10d"
        with torch._C._profiler._RecordFunctionFast(f"{MARK} op"):
            try:
                return function(*args, **kwargs)
            except BaseException:
                self.failed.add(len(self.begun) - 1)
                raise

    def resized(self, storage):
        self.begun.append(len(self.log))
        with torch._C._profiler._RecordFunctionFast(f"{MARK} op"):
            super().resized(storage)


def _wait_for_gloo() -> None:
    """Until gloo's threads sleep: one that has done its work still holds the tensors, for a moment or until a busy
    machine gives it its turn."""
    for _ in range(100):
        time.sleep(0.001)
        if not any(map(_is_gloo_at_work, Path("/proc/self/task").glob("*/stat"))):  # none but on Linux
            return


def _is_gloo_at_work(thread: Path) -> bool:
    """Whether this is a thread of gloo that does not sleep; one that has just ended does not."""
    with contextlib.suppress(OSError):
        told = thread.read_text()
        return "(pt_gloo" in told and ") S" not in told and ") D" not in told
    return False


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
        known = torch.cuda.memory.memory_stats_as_nested_dict()
        if not known:  # a data loader's worker, a fork of this process: it has this mode, and no GPU
            return result
        allocated = known["allocated_bytes"]["all"]
        if allocated["peak"] > self._peak:
            self._peak, self._peak_operation = allocated["peak"], len(self.operations)
        self._at_operations.append(allocated["current"])
        return result

    def resized(self, storage):
        super().resized(storage)
        self._at_operations.append(torch.cuda.memory_allocated())

    def mark(self, label):
        super().mark(label)
        if label == "start":
            torch.cuda.reset_peak_memory_stats()
            self._peak = 0
        self._at_marks.append(torch.cuda.memory_allocated())

    def account(self) -> Account:
        return Account(torch.cuda.max_memory_allocated(), self._peak_operation, self._at_marks, self._at_operations)


@contextlib.contextmanager
def _recorded(file: str):
    """Torch's own memory snapshot of what its allocator does meanwhile; of several ranks the first one writes it."""
    memory = torch.cuda.memory
    memory._set_memory_metadata("rehearsed by perf-helpers: nothing was computed")
    memory._record_memory_history(stacks="python")
    try:
        yield
    finally:
        if os.environ.get("RANK", "0") == "0":
            memory._dump_snapshot(file)
        memory._record_memory_history(None)


def _timeline(tracker: Tracker, at_operations: list[int]) -> dict[str, Any] | None:
    """The last step recorded, see `series`."""
    ends = [operations for label, _, operations in tracker.marks if label == "step"]
    first, last = (ends[-2] if len(ends) > 1 else 0), (ends[-1] if ends else len(tracker.operations))
    indices, lives, live, position = highest(at_operations, first, last), [], dict.fromkeys(TENSOR_CATEGORIES, 0), 0
    for index in indices:
        length = tracker.operations[index][0]
        for block, sign in itertools.islice(tracker.log, position, length):
            live[block.category] += sign * block.bytes
        position = length
        lives.append(dict(live))
    return series([tracker.operations[i][1:] for i in indices], lives, [at_operations[i] for i in indices])


def highest(totals: list[int], first: int, last: int, points: int = 200) -> list[int]:
    """Indices of at most `points` operations from `first` to `last`, each the highest of its stretch."""
    stretch = max(1, -(-(last - first) // points))
    return [
        max(range(begin, min(begin + stretch, last)), key=totals.__getitem__) for begin in range(first, last, stretch)
    ]


def series(where: list[tuple[str, str, str]], lives: list[dict[str, int]], totals: list[int]) -> dict[str, Any] | None:
    """A timeline as `records.Memory` keeps it.

    Args:
        where: phase, operation and module of each entry.
        lives: bytes of live tensors by category, one dict an entry.
        totals: all live bytes, one number an entry.
    """
    if len(where) < 2:
        return None
    parts = [explain(live, total) for live, total in zip(lives, totals, strict=True)]
    phases, operations, modules = map(list, zip(*where, strict=True))
    named = {"phase": [phase.shown for phase in phases], "operation": operations, "module": modules}
    return named | {category: [part[category] for part in parts] for category in CATEGORIES}


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
