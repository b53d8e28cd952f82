"""The account of a CPU's allocator, from what it told torch's profiler while a tracker followed the operations."""

import bisect
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from perf_helpers.lab.tracker import Tracker

COLLECTIVES = "c10d."  # how the names of their operations begin
MARK = "perf_helpers"  # prefix of our own events among the profiler's


@dataclass(slots=True)
class Account:
    """What the allocator says, in bytes."""

    peak_bytes: int
    peak_operation: int  # index of the operation it fell in; -1: before the first
    at_marks: list[int]  # the total at each mark
    at_operations: list[int]  # the highest total during each operation


class Change(NamedTuple):
    """Memory taken or given back."""

    when: int  # ns, as all times here
    bytes: int  # below 0: given back
    thread: int


class Ran(NamedTuple):
    """When an operation ran."""

    begin: int
    end: int
    thread: int


def events(profile, failed: Collection[int] = ()) -> tuple[list[Change], list[Ran], list[int]]:
    """What the profiler saw, in the order of time: changes, operations but those with the numbers `failed`, and when
    there were marks."""
    changes, operations, marks = [], [], []
    for event in profile.profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            changes.append(Change(event.start_ns(), event.nbytes(), event.start_thread_id()))
        elif name == f"{MARK} op":
            operations.append(Ran(event.start_ns(), event.end_ns(), event.start_thread_id()))
        elif name == f"{MARK} mark":
            marks.append(event.start_ns())
    changes.sort(key=lambda change: change.when)
    ended = [operation for number, operation in enumerate(sorted(operations)) if number not in failed]
    return changes, ended, sorted(marks)


def replayed(profile, tracker: Tracker) -> Account:
    """The account of the CPU allocator, from the events that it gave to the profiler."""
    changes, operations, mark_times = events(profile, tracker.failed)
    times, starts = [change.when for change in changes], [operation.begin for operation in operations]
    totals = list(itertools.accumulate(change.bytes for change in changes))
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
        return Account(0, -1, at_marks, at_operations)
    operation = bisect.bisect_right(starts, times[peak]) - 1
    return Account(totals[peak], operation, at_marks, at_operations)


def replayed_by_tensors(profile, tracker: Tracker) -> Account:
    """The account of what tensors take, in the order of the tracker's log, and of what operations allocate inside
    themselves, which the profiler saw: how far it rose above where it stood when the operation had ended.

    What gloo takes for itself is left out: it works in threads of its own, and lets go of its buffers at no certain
    time.
    """
    changes, operations, _ = events(profile, tracker.failed)
    own = [change for change in changes if operations and change.thread == operations[0].thread]
    times, totals = [change.when for change in own], [0, *itertools.accumulate(change.bytes for change in own)]
    live = [0, *itertools.accumulate(sign * block.bytes for block, sign in tracker.log)]
    begun = [length for number, length in enumerate(tracker.begun) if number not in tracker.failed]
    at_operations = []
    for ran, before, (length, _, name, _) in zip(operations, begun, tracker.operations, strict=True):
        first, last = bisect.bisect_left(times, ran.begin), bisect.bisect_right(times, ran.end)
        inside = 0 if name.startswith(COLLECTIVES) else max(totals[first : last + 1]) - totals[last]
        at_operations.append(max(live[before : length + 1]) + inside)
    start = next((count for label, _, count in tracker.marks if label == "start"), 0)
    peak = max(range(start, len(at_operations)), key=at_operations.__getitem__, default=-1)
    at_marks = [live[length] for _, length, _ in tracker.marks]
    return Account(at_operations[peak] if peak >= 0 else 0, peak, at_marks, at_operations)
