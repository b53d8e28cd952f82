"""The memory meter of an experiment. It is never on at the same time as the time meter.

It takes the total from the allocator itself and the categories from a dispatch mode that follows every tensor's storage
from birth to death; what one operation allocates inside itself, where no mode can see it, is reported as a part of its
own and never spread over the others.
"""

import bisect
import collections
import contextlib
import dataclasses
import itertools
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainmem.core import hardware
from trainmem.measure.tracker import Tracker, counted, name_of, watched
from trainmem.measure.watcher import MARK, Watcher
from trainmem.records import APART, BEGIN, CATEGORIES, Memory, explain, is_end, stretches

COLLECTIVES = "c10d."  # how the names of their operations begin


class MemoryMeter:
    """Peak memory of everything that runs inside `with MemoryMeter() as meter`.

    The peak is taken from the first forward on, so that building the model does not colour it. Enter it before the
    model is built: what was allocated earlier is not seen on CPU.

    Args:
        categories: follow every tensor, for the breakdown. Where a dispatch mode is on, torch does less in place (see
            `isTensorSubclassLike` in ATen/TensorSubclassLikeUtils.h: autograd's sums, the mask and the bias that
            plain attention and a linear layer add), and on a CPU each scalar among an operation's arguments becomes a
            tensor: so the total comes from a run without categories, and `Memory.explained` joins the two.
        on_cpu: the experiment uses the CPU although there is a GPU.
        by_tensors: on a CPU the total is what tensors take, with what each operation allocates inside itself, and one
            run does both. For several ranks: threads of gloo may free a tensor last, and the allocator tells the
            profiler of no other thread's. And for a data loader with workers: how many batches have come from them by
            now is a matter of time, and they lie in shared memory.
        compiling_steps: of compiled code: the steps at its beginning that do not count. Hooks on modules break a model
            into pieces for its compiler, and where operations are watched it gives up: what would be measured is the
            code uncompiled. So only the ends of steps are seen then, and there is no breakdown.
    """

    def __init__(
        self,
        categories: bool = False,
        on_cpu: bool = False,
        by_tensors: bool = False,
        compiling_steps: int | None = None,
    ):
        self._cuda = torch.cuda.is_available() and not on_cpu
        self._categories = categories or (by_tensors and not self._cuda)
        self._replay = _replayed_by_tensors if by_tensors else _replayed
        self._compiling_steps = compiling_steps

    def __enter__(self):
        self._context_bytes = _context_cost() if self._cuda else None
        self._stack = contextlib.ExitStack()
        if not self._cuda:
            self._tracker = _CpuTracker() if self._categories else Watcher()
            self._profile = self._stack.enter_context(profiled())
        else:
            self._tracker = _CudaTracker() if self._categories else _CudaWatcher()
            if (file := os.environ.get("REHEARSAL_SNAPSHOT")) and not self._categories:
                self._stack.enter_context(_recorded(file))
        watching = watched(self._tracker)
        if self._compiling_steps is not None:
            watching = _seen_from_outside(self._tracker, self._compiling_steps)
        self._parameters = self._stack.enter_context(watching)
        return self

    def __exit__(self, *error):
        self._device_used = hardware.device_used_bytes(torch.cuda.current_device()) if self._cuda else None
        if hardware.is_rehearsal():  # what a driver holds is assumed there
            self._device_used = self._context_bytes = None
        return self._stack.__exit__(*error)

    def result(self) -> Memory | None:
        """The memory figures, in bytes; breakdowns are None without `categories`. None where compiled code ended
        before its steps that compile."""
        tracker = self._tracker
        if self._compiling_steps is not None and all(label != "start" for label, *_ in tracker.marks):
            return None
        account = tracker.account() if self._cuda else self._replay(self._profile, tracker)
        totals = {mark[0]: total for mark, total in zip(tracker.marks, account.at_marks, strict=True)}
        totals = {label: total for label, total in totals.items() if is_end(label)}
        totals |= {phase: size for phase, (size, _) in account.apart.items()}
        parameters, trainable = counted(self._parameters.values())
        memory = Memory(
            peak_bytes=account.peak_bytes,
            kind="allocated" if self._cuda else "counted",
            phases=totals,
            parameters=parameters,
            trainable_parameters=trainable,
            reserved_bytes=account.reserved_bytes,
            device_used_bytes=self._device_used,
            context_bytes=self._context_bytes,
            rss_bytes=peak_rss_bytes(),
        )
        if account.peak_operation < 0 or not self._categories:
            return memory
        length, phase, name, module = tracker.operations[account.peak_operation]
        at = {label: position for label, position, _ in tracker.marks}
        at |= {phase: tracker.operations[operation][0] for phase, (_, operation) in account.apart.items()}
        return dataclasses.replace(
            memory,
            peak_phase=phase.shown,
            peak_operation=name,
            peak_module=module,
            breakdown=explain(tracker.live(length), account.peak_bytes),
            phase_breakdowns={label: explain(tracker.live(at[label]), total) for label, total in totals.items()},
            timeline=_timeline(tracker, account.at_operations),
        )


@contextlib.contextmanager
def _seen_from_outside(watcher: Watcher, compiling_steps: int) -> Iterator[dict[int, torch.Tensor]]:
    """Let a watcher see the ends of steps alone, of which those of steps that compile restart the measurement."""
    parameters: dict[int, torch.Tensor] = {}

    def stepped(optimizer, *_):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        parameters.update((id(weight), weight) for weight in weights)
        watcher.mark("start" if len(watcher.marks) < compiling_steps else "step")

    with register_optimizer_step_post_hook(stepped):
        yield parameters


# ---- what an allocator reports


@dataclass(slots=True)
class _Account:
    """What the allocator reports, in bytes."""

    peak_bytes: int
    peak_operation: int  # index of the operation it fell in; -1: before the first
    at_marks: list[int]  # the total at each mark
    at_operations: list[int]  # the highest total during each operation
    apart: dict[str, tuple[int, int]]  # of phases beside the steps: the peak, and the operation it fell in
    reserved_bytes: int | None = None  # the most that a CUDA allocator held


class _Change(NamedTuple):
    """Memory taken or given back."""

    when: int  # ns, as all times here
    bytes: int  # below 0: given back
    thread: int


class _Ran(NamedTuple):
    """When an operation ran, or another event was."""

    begin: int
    end: int
    thread: int


def _apart(tracker: Watcher, at_marks: list[int], highest: Callable) -> dict[str, tuple[int, int]]:
    """The peak of each phase beside the steps, and the operation it fell in, if it is above what was live before.

    `highest`: the two of the stretch between two marks, by their numbers.
    """
    found = {}
    for phase, begin, end in stretches(label for label, *_ in tracker.marks):
        peak = highest(begin, end)
        if peak[0] > max(at_marks[begin], found.get(phase, (0,))[0]):
            found[phase.value] = peak
    return found


def profiled() -> torch.profiler.profile:
    """torch's profiler, to which a CPU's allocator reports each change."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def events(profile: torch.profiler.profile) -> tuple[list[_Change], dict[str, list[_Ran]]]:
    """What the profiler saw, in the order of time: changes, and by the rest of their names events of our own."""
    changes, ours = [], collections.defaultdict(list)
    for event in profile.profiler.kineto_results.events():
        if (name := event.name()) == "[memory]":
            changes.append(_Change(event.start_ns(), event.nbytes(), event.start_thread_id()))
        elif name.startswith(MARK):
            ran = _Ran(event.start_ns(), event.end_ns(), event.start_thread_id())
            ours[name.removeprefix(f"{MARK} ")].append(ran)
    changes.sort(key=lambda change: change.when)
    for found in ours.values():
        found.sort()
    return changes, ours


def running(changes: list[_Change]) -> tuple[list[int], list[int]]:
    """When each change was, and the totals: before all, and after each."""
    return [change.when for change in changes], [0, *itertools.accumulate(change.bytes for change in changes)]


def _replayed(profile: torch.profiler.profile, tracker: Watcher) -> _Account:
    """The account of the CPU allocator, from the events that it gave to the profiler."""
    changes, ours = events(profile)
    times, totals = running(changes)
    begins, mark_times = ([ran.begin for ran in ours[name]] for name in ("op", "mark"))
    start = max((when for when, mark in zip(mark_times, tracker.marks, strict=True) if mark[0] == "start"), default=0)
    peak = max(range(bisect.bisect_left(times, start), len(totals)), key=totals.__getitem__)
    at_operations = []
    for begin, end in itertools.pairwise([*begins, float("inf")]):
        first, last = bisect.bisect_left(times, begin), bisect.bisect_left(times, end)
        at_operations.append(max(totals[first + 1 : last + 1], default=totals[first]))

    def operation(change: int) -> int:
        return bisect.bisect_right(begins, times[change - 1]) - 1 if change else -1

    def highest(begin: int, end: int) -> tuple[int, int]:
        first, last = (bisect.bisect_right(times, mark_times[number]) for number in (begin, end))
        top = max(range(first, last + 1), key=totals.__getitem__)
        return totals[top], operation(top)

    at_marks = [totals[bisect.bisect_right(times, when)] for when in mark_times]
    apart = _apart(tracker, at_marks, highest)
    return _Account(totals[peak], operation(peak), at_marks, at_operations, apart)


def _replayed_by_tensors(profile: torch.profiler.profile, tracker: "_CpuTracker") -> _Account:
    """The account of what tensors take, in the order of the tracker's log, and of what operations allocate inside
    themselves, which the profiler saw: how far it rose above where it stood when the operation had ended.

    What gloo takes for itself is left out: it works in threads of its own, and lets go of its buffers at no certain
    time.
    """
    changes, ours = events(profile)
    operations = ours["op"]
    times, totals = running([change for change in changes if operations and change.thread == operations[0].thread])
    live = [0, *itertools.accumulate(sign * block.bytes for block, sign in tracker.log)]
    at_operations = []
    for ran, before, (length, _, name, _) in zip(operations, tracker.begun, tracker.operations, strict=True):
        first, last = bisect.bisect_left(times, ran.begin), bisect.bisect_right(times, ran.end)
        inside = 0 if name.startswith(COLLECTIVES) else max(totals[first : last + 1]) - totals[last]
        at_operations.append(max(live[before : length + 1]) + inside)
    start = next((count for label, _, count in tracker.marks if label == "start"), 0)
    peak = max(range(start, len(at_operations)), key=at_operations.__getitem__, default=-1)
    at_marks = [live[length] for _, length, _ in tracker.marks]

    def highest(begin: int, end: int) -> tuple[int, int]:
        first, last = (tracker.marks[number][2] for number in (begin, end))
        top = max(range(first, last), key=at_operations.__getitem__, default=-1)
        return (at_operations[top], top) if top >= 0 else (0, top)

    apart = _apart(tracker, at_marks, highest)
    return _Account(at_operations[peak] if peak >= 0 else 0, peak, at_marks, at_operations, apart)


class _CpuTracker(Tracker):
    """Tells the profiler when each operation runs."""

    def __init__(self):
        super().__init__()
        self.begun: list[int] = []  # length of the log before each operation
        self._is_collective = False  # the last operation

    def execute(self, function, args, kwargs):
        if self._is_collective:
            _wait_for_gloo()
        self.begun.append(len(self.log))
        self._is_collective = function.namespace == "c10d"
        with torch._C._profiler._RecordFunctionFast(f"{MARK} op"):
            try:
                return function(*args, **kwargs)
            except BaseException:  # it was seen, though there is no result to follow
                self.operations.append((len(self.log), self.phase, name_of(function), self.modules.here()))
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
        stat = thread.read_text()
        return "(pt_gloo" in stat and ") S" not in stat and ") D" not in stat
    return False


class _CudaWatcher(Watcher):
    """Asks the CUDA allocator for its peak, also of each phase beside the steps, and at each mark for its total."""

    def __init__(self, **options):
        super().__init__(**options)
        self._at_marks: list[int] = []
        self._at_operations: list[int] = []
        self._peak, self._peak_operation = 0, -1  # since the last border
        self._peaks: list[tuple[int, int, int]] = []  # between borders: (allocated, its operation, reserved)
        self._ends: dict[int, int] = {}  # which of these ends at a mark

    def mark(self, label):
        super().mark(label)
        if label == "start" or label in APART or label.startswith(BEGIN):
            self._ends[len(self.marks) - 1] = len(self._peaks)
            self._close()
            if label == "start":
                self._peaks.clear()
            torch.cuda.reset_peak_memory_stats()
            self._peak, self._peak_operation = 0, -1
        self._at_marks.append(torch.cuda.memory_allocated())

    def _close(self) -> None:
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        self._peaks.append((peak, self._peak_operation, reserved))

    def account(self) -> _Account:
        apart = _apart(self, self._at_marks, lambda _, end: self._peaks[self._ends[end]][:2])
        self._close()
        highest = max(self._peaks, key=lambda peaks: peaks[0])
        reserved = max(size for *_, size in self._peaks)
        return _Account(*highest[:2], self._at_marks, self._at_operations, apart, reserved)


class _CudaTracker(_CudaWatcher, Tracker):
    """Asks it also after each operation whether its peak has moved."""

    def __init__(self):
        super().__init__(granularity=512, device="cuda")

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
    indices = highest(at_operations, first, last)
    lives = [tracker.live(tracker.operations[index][0]) for index in indices]
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
    """Device-used bytes that the first CUDA tensor of this process brings; None if NVML does not report them."""
    before = hardware.device_used_bytes(index := torch.cuda.current_device())
    torch.ones((1, 1), device="cuda")
    after = hardware.device_used_bytes(index)
    return None if before is None or after is None else after - before - torch.cuda.memory_reserved()


def peak_rss_bytes() -> int:
    """Peak resident memory of this process: information only, it mixes in what libraries and allocators keep."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
