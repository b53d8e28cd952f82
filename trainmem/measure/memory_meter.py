"""Measure the peak of an experiment's memory, by category; never at the same time as the time meter.

The total comes from the allocator itself, the categories from a dispatch mode that tracks every tensor's storage from
its allocation to its free. An operation's workspace, which no mode sees, is reported as a separate category.
"""

import bisect
import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainmem.core import hardware
from trainmem.measure.tracker import Parameters, Tracker, name_of, watched
from trainmem.measure.watcher import MARK, Recorded, Watcher
from trainmem.records import APART, BEGIN, CATEGORIES, Memory, explain, is_end, stretches

COLLECTIVES = "c10d."  # prefix of their operations' names


class MemoryMeter:
    """Measure the peak memory of what runs inside `with MemoryMeter() as meter`; `meter.result()` returns it.

    The peak counts from the first forward on, so that building the model does not affect it. Enter the meter before
    the model is built nevertheless: on a CPU the meter does not see memory that was allocated before it was entered.

    Args:
        categories: track every tensor, for the breakdown. On a CPU the total of such a run is too high. Therefore take
            the total from a run without categories, and add the breakdown of a run with categories to it by
            `Memory.explained`.
        on_cpu: whether the experiment uses the CPU although there is a GPU.
        by_tensors: on a CPU, take tensors plus each operation's workspace as the total. One run then gives the total
            and the breakdown, even if `categories` is False. Use it for several ranks and for a data loader with
            workers, because the profiler does not see all of their allocations.
        compiling_steps: for compiled code, the number of first steps that are not measured. Compiled code gets no
            breakdown. None: the code is not compiled.
    """

    # Why the total is too high with categories: while a dispatch mode is on, torch does less in place (autograd's sums,
    # the mask in plain attention, the bias in a linear layer; see `isTensorSubclassLike` in
    # ATen/TensorSubclassLikeUtils.h), and each scalar argument of an operation becomes a tensor.
    # Why some are counted by tensors: gloo's threads may free a tensor last, and the allocator does not report frees of
    # other threads to the profiler; a data loader's batches are in shared memory, and how many there are depends on
    # timing.
    # Why compiled code has no breakdown: hooks on modules would split the model into pieces for the compiler, and under
    # a dispatch mode it gives up, so that uncompiled code would be measured. Only the ends of steps are observed.
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
        if hardware.is_rehearsal():  # a driver's memory is only assumed there
            self._device_used = self._context_bytes = None
        return self._stack.__exit__(*error)

    def result(self) -> Memory | None:
        """Return the memory in bytes; the breakdowns are None if the meter tracked no tensors, see `MemoryMeter`.

        For compiled code, return None in two cases: no optimizer step has ended, or `compiling_steps` is 0.
        """
        tracker = self._tracker
        if self._compiling_steps is not None and all(label != "start" for label, *_ in tracker.marks):
            return None
        account = tracker.account() if self._cuda else self._replay(self._profile, tracker)
        totals = {mark[0]: total for mark, total in zip(tracker.marks, account.at_marks, strict=True)}
        totals = {label: total for label, total in totals.items() if is_end(label)}
        totals |= {phase: size for phase, (size, _) in account.apart.items()}
        parameters, trainable = self._parameters.counted()
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
def _seen_from_outside(watcher: Watcher, compiling_steps: int) -> Iterator[Parameters]:
    """Let a watcher observe only the ends of optimizer steps, and yield the parameters, known after the first step.

    `compiling_steps`: number of first steps that are not measured; the measurement starts when the last of them ends.
    """
    parameters = Parameters()

    def stepped(optimizer, *_):
        parameters.add(weight for group in optimizer.param_groups for weight in group["params"])
        watcher.mark("start" if len(watcher.marks) < compiling_steps else "step")

    with register_optimizer_step_post_hook(stepped):
        yield parameters


# ---- the allocator's account


@dataclass(slots=True)
class _Account:
    """Hold an allocator's totals during a training, in bytes; a mark is the begin or end of a phase."""

    peak_bytes: int
    peak_operation: int  # index of the operation in which it occurred; -1: before the first one
    at_marks: list[int]  # the total at each mark
    at_operations: list[int]  # the highest total during each operation
    apart: dict[str, tuple[int, int]]  # phase outside of the steps -> (its peak, index of the operation)
    reserved_bytes: int | None = None  # the most that a CUDA allocator reserved


class _Change(NamedTuple):
    """Hold the time in ns, bytes (negative: freed) and thread of an allocation or a free that the profiler saw."""

    when: int  # in ns, as all times here
    bytes: int  # negative: freed
    thread: int


class _Ran(NamedTuple):
    """Hold the time span in ns, and the thread, of an operation or of another event in the profiler."""

    begin: int
    end: int
    thread: int


def _apart(tracker: Watcher, at_marks: list[int], highest: Callable) -> dict[str, tuple[int, int]]:
    """Return {phase outside of the steps: (peak in bytes, index of the operation at the peak)}.

    Args:
        at_marks: live bytes at each of the tracker's marks, where phases begin and end.
        highest: function that returns (peak, index of the operation) between two marks, given by their indexes.
    """
    found = {}
    for phase, begin, end in stretches(label for label, *_ in tracker.marks):
        peak = highest(begin, end)
        if peak[0] > max(at_marks[begin], found.get(phase, (0,))[0]):  # above the live bytes at its start
            found[phase.value] = peak
    return found


@contextlib.contextmanager
def profiled() -> Iterator[torch.profiler.profile]:
    """Run torch's profiler in this context, and yield the profiler.

    The profiler records each allocation and free of the CPU allocator. Of all other events it records only those with
    the scope USER_SCOPE, e.g. the events of `Recorded`, because records of every operation would more than double the
    time of a small training.
    """
    scopes = {torch._C._profiler.RecordScope.USER_SCOPE}
    enable = functools.partial(torch.autograd.profiler._enable_profiler, scopes=scopes)
    with contextlib.ExitStack() as stack:
        with patch.object(torch.autograd.profiler, "_enable_profiler", enable):
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            stack.enter_context(profile)
        yield profile


def events(profile: torch.profiler.profile) -> tuple[list[_Change], dict[str, list[_Ran]]]:
    """Return (allocations and frees that the profiler saw, {name: time spans of code inside `with Recorded(name)`}).

    The first list, and the list of each name, is sorted by time.
    """
    changes, marked = [], collections.defaultdict(list)
    for event in profile.profiler.kineto_results.events():
        if (name := event.name()) == "[memory]":
            changes.append(_Change(event.start_ns(), event.nbytes(), event.start_thread_id()))
        elif name.startswith(MARK):
            ran = _Ran(event.start_ns(), event.end_ns(), event.start_thread_id())
            marked[name.removeprefix(f"{MARK} ")].append(ran)
    changes.sort(key=lambda change: change.when)
    for found in marked.values():
        found.sort()
    return changes, marked


def running(changes: list[_Change]) -> tuple[list[int], list[int]]:
    """Return (time in ns of each allocation or free, total of allocated bytes after each).

    The totals have one entry more than the times: they begin with 0, the total before all changes.
    """
    return [change.when for change in changes], [0, *itertools.accumulate(change.bytes for change in changes)]


def _replayed(profile: torch.profiler.profile, tracker: Watcher) -> _Account:
    """Return the CPU allocator's totals, computed from the allocations and frees that the profiler recorded."""
    changes, marked = events(profile)
    times, totals = running(changes)
    begins, mark_times = ([ran.begin for ran in marked[name]] for name in ("op", "mark"))
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
    """Return the totals of live tensors, computed from the tracker's log, plus each operation's workspace."""
    changes, marked = events(profile)
    operations = marked["op"]
    times, totals = running([change for change in changes if operations and change.thread == operations[0].thread])
    live = [0, *itertools.accumulate(sign * block.bytes for block, sign in tracker.log)]
    at_operations = []
    for ran, before, (length, _, name, _) in zip(operations, tracker.starts, tracker.operations, strict=True):
        first, last = bisect.bisect_left(times, ran.begin), bisect.bisect_right(times, ran.end)
        # The workspace: the highest total minus the last. For gloo 0: its threads free at irregular times.
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
    """Track tensors, and record in the profiler when each operation runs."""

    def __init__(self):
        super().__init__()
        self.starts: list[int] = []  # length of the log before each operation
        self._is_collective = False  # whether the last operation was a collective

    def execute(self, function, args, kwargs):
        if self._is_collective:
            _wait_for_gloo()
        self.starts.append(len(self.log))
        self._is_collective = function.namespace == "c10d"
        with Recorded("op"):
            try:
                return function(*args, **kwargs)
            except BaseException:  # the profiler has seen it, though there is no result to track
                self.operations.append((len(self.log), self.phase, name_of(function), self.modules.here()))
                raise

    def resized(self, storage):
        self.starts.append(len(self.log))
        with Recorded("op"):
            super().resized(storage)


def _wait_for_gloo() -> None:
    """Wait until gloo's threads sleep, at most some 0.1 s, so that the tensors of a finished collective are freed."""
    # A gloo thread holds the tensors until it runs once more after its work. On a busy machine it may wait for a core.
    for _ in range(100):
        time.sleep(0.001)
        if not any(map(_is_gloo_at_work, Path("/proc/self/task").glob("*/stat"))):  # there are none except on Linux
            return


def _is_gloo_at_work(thread: Path) -> bool:
    """Return whether a thread, given by its stat file in /proc, is gloo's and does not sleep; False if it has ended."""
    with contextlib.suppress(OSError):
        stat = thread.read_text()
        return "(pt_gloo" in stat and ") S" not in stat and ") D" not in stat
    return False


class _CudaWatcher(Watcher):
    """Watch a training; record the CUDA allocator's bytes at each mark, and its peaks in and outside of the steps."""

    def __init__(self, **options):
        super().__init__(**options)
        self._at_marks: list[int] = []
        self._at_operations: list[int] = []
        self._peak, self._peak_operation = 0, -1  # since the last reset of the allocator's peak
        self._peaks: list[tuple[int, int, int]] = []  # between resets: (allocated, its operation, reserved)
        self._ends: dict[int, int] = {}  # mark -> index of the entry in `_peaks` that ends there

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
    """Track tensors, and also check after each operation whether the CUDA allocator's peak has risen."""

    def __init__(self):
        super().__init__(granularity=512, device="cuda")

    def execute(self, function, args, kwargs):
        result = function(*args, **kwargs)
        # The nested form: the flat one, which max_memory_allocated() uses too, takes half a millisecond.
        known = torch.cuda.memory.memory_stats_as_nested_dict()
        if not known:  # a data loader's worker: a fork of this process with this mode, but without the GPU
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
    """Record the work of torch's CUDA allocator in this context; rank 0 writes torch's memory snapshot to `file`."""
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
    """Return the timeline of the last recorded step at the operations that `highest` chooses; see `series`.

    `at_operations`: the highest total in bytes during each operation that the tracker saw.
    """
    ends = [operations for label, _, operations in tracker.marks if label == "step"]
    first, last = (ends[-2] if len(ends) > 1 else 0), (ends[-1] if ends else len(tracker.operations))
    indices = highest(at_operations, first, last)
    lives = [*tracker.live_at(tracker.operations[index][0] for index in indices)]
    return series([tracker.operations[i][1:] for i in indices], lives, [at_operations[i] for i in indices])


def highest(totals: list[int], first: int, last: int, points: int = 200) -> list[int]:
    """Return the indexes of at most `points` operations that have high totals.

    The operations from `first` up to but not including `last` are divided into stretches of equal length. Of each
    stretch, the index of the operation with the highest total is returned. `totals`: bytes during each operation.
    """
    stretch = max(1, -(-(last - first) // points))
    return [
        max(range(begin, min(begin + stretch, last)), key=totals.__getitem__) for begin in range(first, last, stretch)
    ]


def series(where: list[tuple[str, str, str]], lives: list[dict[str, int]], totals: list[int]) -> dict[str, Any] | None:
    """Return a timeline: lists with one entry per operation, in a dict; None for fewer than two operations.

    The keys are "phase", "operation", "module", and each category, whose entries are bytes.

    Args:
        where: (phase, operation, module) of each entry.
        lives: {category: bytes of live tensors} of each entry.
        totals: all live bytes of each entry. The part of a total that exceeds the sum of the tensors' bytes in `lives`
            is operator workspace.
    """
    if len(where) < 2:
        return None
    parts = [explain(live, total) for live, total in zip(lives, totals, strict=True)]
    phases, operations, modules = map(list, zip(*where, strict=True))
    named = {"phase": [phase.shown for phase in phases], "operation": operations, "module": modules}
    return named | {category: [part[category] for part in parts] for category in CATEGORIES}


def _context_cost() -> int | None:
    """Return the bytes of the CUDA context: what a first CUDA tensor adds, minus what the allocator reserves for it."""
    before = hardware.device_used_bytes(index := torch.cuda.current_device())
    torch.ones((1, 1), device="cuda")
    after = hardware.device_used_bytes(index)
    return None if before is None or after is None else after - before - torch.cuda.memory_reserved()


def peak_rss_bytes() -> int:
    """Return this process's peak resident bytes, information only: they include libraries and what allocators keep."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
