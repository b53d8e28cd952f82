"""Replay a training's allocations and frees on the model of CUDA's caching allocator.

The result is the allocated and reserved memory, or a memory snapshot for torch's viewer (docs.pytorch.org/memory_viz).
A snapshot has the form of `torch.cuda.memory._snapshot()` of torch 2.13. Its history has the requested bytes of
each allocation; its segments have the bytes of each block, which the allocator rounded up. A snapshot differs from
torch's snapshots in three points: a block has an operation, module, phase and category instead of a stack; a block has
its category's colour; an entry of the history has its number as its time, because an estimate has no time.
"""

import contextlib
import functools
import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainmem.estimate.allocator import CachingAllocator, OutOfMemory, rounded
from trainmem.estimate.allocator_settings import Release, Settings
from trainmem.estimate.trace_records import Label, Log
from trainmem.records import BEGIN, TENSOR_CATEGORIES, Memory, Phase, explain, is_end, stretches
from trainmem.texts import name_text, shown

_ESTIMATED = "estimated by perf-helpers: nothing was run"
_PROTOCOL = 4  # of pickle: the newest that the viewer, which reads the file in JavaScript, can read
_SAME = {"stream": 0, "compile_context": "N/A", "pool_id": (0, 0), "user_metadata": _ESTIMATED}


@dataclass(frozen=True, slots=True)
class Replay:
    """Hold a replayed training's memory in bytes: allocated bytes after each event, and the reserved peak."""

    log: Log
    allocated: np.ndarray  # (events + 1,): bytes in use before the first event and after each
    reserved_peak: int  # from the first forward pass on
    is_too_large: bool = False  # whether the card is too small; the figures are then those without a limit

    @property
    def peak(self) -> int:
        """The number of events in the log up to the peak, at which the allocated bytes are highest.

        Events before the first forward pass are counted, but the peak is not searched among them.
        """
        first = self.log.position("start")
        return first + int(self.allocated[first:].argmax())

    def memory(self) -> Memory:
        """Return the peak, its breakdown and the reserved bytes as a `Memory`, the type of a measured memory."""
        positions = {label: position for label, position in self.log.marks if is_end(label)}
        for phase, *marks in stretches(label for label, _ in self.log.marks):
            begin, end = (self.log.marks[mark][1] for mark in marks)
            top = begin + int(self.allocated[begin : end + 1].argmax())
            if self.allocated[top] > max(self.allocated[begin], self.allocated[positions.get(phase, begin)]):
                positions[phase.value] = top
        events = self.log.events[: self.peak] or [0]
        label = self.log.blocks[events[-1] if events[-1] >= 0 else ~events[-1]][1]
        return Memory(
            peak_bytes=int(self.allocated[self.peak]),
            kind="estimated",
            peak_phase=Phase(label.phase).shown,
            peak_operation=label.operation,
            peak_module=label.module,
            breakdown=self._breakdown(self.peak),
            phases={label: int(self.allocated[position]) for label, position in positions.items()},
            phase_breakdowns={label: self._breakdown(position) for label, position in positions.items()},
            reserved_bytes=self.reserved_peak,
        )

    def _breakdown(self, position: int) -> dict[str, int]:
        """Return {category: bytes} after `position` events; bytes outside of tensors count as operator workspace."""
        live = dict.fromkeys(TENSOR_CATEGORIES, 0)
        for event in self.log.events[:position]:
            size, label = self.log.blocks[event if event >= 0 else ~event]
            if label.category in live:
                live[label.category] += rounded(size) if event >= 0 else -rounded(size)
        return explain(live, int(self.allocated[position]))


def replayed(log: Log, settings: str = "", capacity: int | None = None, rules: Release | None = None) -> Replay:
    """Replay the log on the model of torch's allocator, and return the memory over time.

    If the allocator runs out of memory, replay the log without a limit, and set `is_too_large` in the result.

    Args:
        log: the training's allocations and frees.
        settings: the value of PYTORCH_CUDA_ALLOC_CONF.
        capacity: bytes that the card has for segments; None: no limit.
        rules: the rules of a torch release, see `allocator_settings.release`; None: the installed release.

    Raises:
        ValueError: `settings` have an option or a value that torch refuses, or an option not supported here.
    """
    allocator = CachingAllocator(Settings.parse(settings), capacity, rules=rules)
    first, allocated = log.position("start"), []
    try:
        for number, _ in enumerate(_played(log, allocator)):
            if number == first:
                allocator.reset_peaks()
            allocated.append(allocator.allocated_bytes)
    except OutOfMemory:
        return replace(replayed(log, settings, rules=rules), is_too_large=True)
    allocated = np.array([*allocated, allocator.allocated_bytes], dtype=np.int64)
    return Replay(log, allocated, allocator.peak_reserved_bytes)


def _played(log: Log, allocator: CachingAllocator) -> Iterator[Label]:
    """Perform events on an allocator, which may raise OutOfMemory; before each event yield the label of its block."""
    emptied = set(log.emptied)
    for number, event in enumerate(log.events):
        block = event if event >= 0 else ~event
        size, label = log.blocks[block]
        yield label
        if number in emptied:
            allocator.empty_cache()
        if event >= 0:
            allocator.allocate(block, size, label.stream)
        else:
            allocator.free(block)


# ---- as a snapshot


def place(file: str | os.PathLike) -> Path:
    """Return the absolute path for a snapshot file; raise ValueError if no file can be written there."""
    path = Path(file).absolute()
    if len(path.name) > 255 or os.path.isdir(path) or not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"snapshot={shown(str(file))} cannot be written: give a file in a folder that can be written to"
        )
    return path


def save(file: Path, *of) -> None:
    """Write a memory snapshot to `file`, pickled as torch does it, for torch's viewer.

    Args:
        of: the arguments of `snapshot`: the log of allocations; then, optionally, the value of PYTORCH_CUDA_ALLOC_CONF,
            the bytes that the card has for segments (None: no limit), and the rules of a torch release.

    Raises:
        ValueError: the settings have an option or a value that torch refuses, or an option not supported here.
    """
    file.write_bytes(pickle.dumps(snapshot(*of), protocol=_PROTOCOL))


def snapshot(log: Log, settings: str = "", capacity: int | None = None, rules: Release | None = None) -> dict[str, Any]:
    """Return the allocator's history and final state in the form of `torch.cuda.memory._snapshot()`.

    If memory runs out, the history ends with an entry "oom", as in torch.

    Args:
        log: the training's allocations and frees.
        settings: the value of PYTORCH_CUDA_ALLOC_CONF.
        capacity: bytes that the card has for segments; None: no limit.
        rules: the rules of a torch release, see `allocator_settings.release`; None: the installed release.

    Raises:
        ValueError: `settings` have an option or a value that torch refuses, or an option not supported here.
    """
    trace: list[dict[str, Any]] = []
    frames = functools.cache(_frames)  # one list for all blocks of a label keeps the file small
    causes: dict[int, list[dict[str, Any]]] = {}  # the frames of segments, by address
    label = None  # of the block that is allocated or freed at the moment

    def note(action: str, address: int, size: int) -> None:
        # The viewer fails if there are categories but no "unknown": segments get it.
        category = name_text(label.category) if action in ("alloc", "free") else "unknown"
        if action in ("segment_alloc", "segment_map"):
            causes[address] = frames(label)
        where = {"device_free" if action == "oom" else "addr": address, "size": size}
        known = {**where, "frames": frames(label), "category": category, **_SAME}
        for name in ("free_requested", "free_completed") if action == "free" else (action,):
            trace.append({"action": name, "time_us": len(trace), **known})

    allocator = CachingAllocator(Settings.parse(settings), capacity, note, rules)
    lengths = []  # entry i: length of the trace after i events
    with contextlib.suppress(OutOfMemory):
        for label in _played(log, allocator):  # noqa: B007, `note` reads it
            lengths.append(len(trace))
        lengths.append(len(trace))
    marks = [(name, lengths[position]) for name, position in log.marks if position < len(lengths)]
    return {
        "segments": _segments(allocator, log, frames, causes),
        "device_traces": [trace],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": settings},
        "external_annotations": [
            {"stage": stage, "name": name, "device": 0, "time_us": time}
            for (_, begin), (name, end) in itertools.pairwise(marks)
            if not name.startswith(BEGIN)
            for stage, time in (("START", begin), ("END", end))
        ],
    }


def _frames(label: Label) -> list[dict[str, Any]]:
    """Return a block's label (operation, module, phase, category) in the form of stack frames, innermost first."""
    known = {**label._asdict(), "category": name_text(label.category)}
    names = ("operation", "module", "phase", "category")
    return [{"name": str(known[name]), "filename": name, "line": 0} for name in names if known[name]]


def _segments(allocator: CachingAllocator, log: Log, frames: Callable, causes: dict) -> list[dict[str, Any]]:
    """Return the allocator's final segments with their blocks, in the form of torch's snapshots.

    `frames`: as `_frames`; `causes`: {address of a segment: stack frames of the allocation that needed the segment}.
    """
    found = []
    for segment in allocator.segments():
        blocks = [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": "inactive" if block.is_free else "active_allocated",
                "frames": [] if block.is_free else frames(log.blocks[block.key][1]),
            }
            for block in segment.blocks
        ]
        used = sum(block["size"] for block in blocks if block["state"] != "inactive")
        found.append(
            {
                "device": 0,
                "address": segment.address,
                "total_size": segment.size,
                "allocated_size": used,
                "active_size": used,
                "requested_size": sum(block["requested_size"] for block in blocks),
                "stream": 0,
                "segment_type": "small" if segment.is_small else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": segment.is_expandable,
                "frames": causes.get(segment.address, []),
                "blocks": blocks,
            }
        )
    return found
