"""What operations allocate and free inside themselves, beyond their results: bytes that show on no tensor.

There is no rule for them. A CPU's matrix products lay their operands out anew, in buffers whose sizes jump from one
shape to the next and differ with strides, instructions and threads. So each operation is run on zeros, and the
allocator is asked what it did: at the operation's own size wherever that is affordable. Where it is not, it is run at
three smaller sizes; if what it hides there lies on a straight line, the line is followed to the operation's own size,
else the largest share of its operands is assumed, and told as an assumption.
"""

import bisect
import copy
import dataclasses
import faulthandler
import functools
import itertools
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import torch

from trainmem.estimate.trace_records import Operation, Spec, nested
from trainmem.measure import memory_meter
from trainmem.measure.watcher import MARK
from trainmem.texts import bytes_text

# Up to these bytes an operation is run at its own size without more ado. Products take time that grows faster than
# their size, random numbers take long.
_AT_ONCE_BYTES = 16 * 2**20
_AT_ONCE_SLOW_BYTES = 2**20
# What a larger one may take at its own size: memory for one, seconds for all that are asked for together.
OWN_SIZE_BYTES = 512 * 2**20
OWN_SIZE_SECONDS = 5.0
_FACTORS = (1, 2, 4)  # between the three smaller sizes
_SHORTEST = 2  # what is left at least of a length that is cut
_ON_LINE_BYTES = 64  # how far off a line a size may lie: allocators align their blocks
_GROWTH = 1.5  # time grows at most with this power of the bytes: that of a product whose sides all grow
_SLOW_BYTES_A_SECOND = 1e8  # of an operation that was never timed
_SLOW = ("mm.", "addmm.", "bmm.", "baddbmm.", "_grouped_mm.")
_HIDES_NOTHING = ("profiler.", "storage.", memory_meter.COLLECTIVES)  # what gloo takes for collectives is not counted
_AT_OWN_SIZE = ("fsdp.",)  # that work into a tensor which they are given, whose size follows from all others
# Their buffers follow no line, though three sizes may lie on one by chance: it is believed where they hide nothing.
_UNEVEN = (*_SLOW, "convolution", "_convolution", "mkldnn_", "_scaled_dot_product_")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one operation did when it was run."""

    bytes: int  # hidden: the highest total while it ran, less what its results take
    seconds: float


@dataclass(frozen=True, slots=True)
class Hidden:
    """The bytes that one operation allocates and frees inside itself, at its own size."""

    bytes: int | None  # None if it cannot be run by itself
    how: str  # "measured" at its own size, on a "line" through three smaller ones, "assumed", or "unknown"
    seconds: float = field(default=0.0, compare=False)  # that it took, if it was run at its own, large size


_UNKNOWN = Hidden(None, "unknown")


class Probe:
    """What operations hide, asked once and remembered.

    Args:
        threads: that the experiment computes on, for buffers are made for each thread; None: as many as torch takes.
    """

    def __init__(self, threads: int | None = None):
        self.threads = threads or torch.get_num_threads()
        self.known: dict[tuple, Any] = {}  # facts, also of other kinds; workspaces by (threads, *the signature)
        self._runner = Runner()

    def under(self, threads: int | None) -> "Probe":
        """A probe that shares what this one knows, for an experiment on so many threads."""
        other = copy.copy(self)
        other.threads = threads or torch.get_num_threads()
        return other

    def close(self) -> None:
        """End the process in which operations were run."""
        self._runner.close()

    def __getitem__(self, operation: Operation) -> Hidden:
        """Raises KeyError where it was never asked for."""
        if hidden := self.known.get(self._key(operation)):
            return hidden
        raise KeyError(operation.name)

    def _key(self, operation: Operation) -> tuple:
        return self.threads, *operation.signature

    def run(self, operations: Sequence[Operation]) -> None:
        """Find out what each of these operations hides, where it is not known yet. Time to run large ones at their own
        size is limited: the first ones matter most."""
        run = functools.partial(self._runner, threads=self.threads)
        tried: dict[tuple, _Tried] = {}
        for operation in operations:
            key = self._key(operation)
            if self.known.get(key):
                continue
            if operation.name.startswith(_HIDES_NOTHING) or operation.is_view:
                self.known[key] = Hidden(0, "measured")
            else:
                tried[key] = _Tried(operation, _at_first(operation))
        seen = iter(run([cut for each in tried.values() for cut in each.group]))
        for key, each in tried.items():
            each.seen = list(itertools.islice(seen, len(each.group)))
            if hidden := each.conclusion():
                self.known[key] = hidden
        # The largest of the smaller sizes once more: what a library prepares at the first run of a size is no part of
        # how long it takes.
        again = [each for key, each in tried.items() if not self.known.get(key) and each.seen and each.seen[0]]
        for each, warm in zip(again, run([each.group[0] for each in again]), strict=True):
            each.warm = warm
        left = OWN_SIZE_SECONDS
        for operation in operations:
            key = self._key(operation)
            if hidden := self.known.get(key):
                left -= hidden.seconds  # as when it was run, so that what is known changes no other result
                continue
            ran, seconds = None, tried[key].expected_seconds()
            if operation.bytes <= OWN_SIZE_BYTES and seconds <= left:
                (ran,) = run([operation])
                left -= ran.seconds if ran else seconds
            self.known[key] = Hidden(ran.bytes, "measured", ran.seconds) if ran else tried[key].assumption()


def assumptions(operations: Sequence[Operation], probe: Probe) -> list[str]:
    """In words what had to be assumed of these operations, a sentence for each name."""
    assumed: dict[str, int] = {}
    unknown: dict[str, None] = {}
    for operation in operations:
        hidden = probe[operation]
        if hidden.how == "assumed":
            assumed[operation.name] = max(hidden.bytes, assumed.get(operation.name, 0))
        elif hidden.how == "unknown":
            unknown[operation.name] = None
    return [
        *(
            f"{name} is assumed to allocate up to {bytes_text(size)} inside itself, the largest share of its operands "
            "found at smaller sizes: they do not extrapolate linearly, and its own size takes too long or too much"
            for name, size in assumed.items()
        ),
        *(f"the memory that {name} allocates inside itself is unknown and counted as 0 bytes" for name in unknown),
    ]


# ---- at what sizes an operation is run


def _at_first(operation: Operation) -> list[Operation]:
    """The operation itself or, if it is large, at three smaller sizes, the largest first; [] if it cannot be cut. One
    whose size does not matter is run on tensors of one element."""
    if _is_sizeless(operation):
        leaves = (
            Spec((1,) * len(leaf.shape), (1,) * len(leaf.shape), leaf.dtype) if type(leaf) is Spec else leaf
            for leaf in operation.leaves
        )
        return [dataclasses.replace(operation, leaves=tuple(leaves), made_bytes=0)]
    is_slow = _is(operation, _SLOW) or torch.Tag.nondeterministic_seeded in operation.function.tags  # random numbers
    limit = _AT_ONCE_SLOW_BYTES if is_slow else _AT_ONCE_BYTES
    if operation.name.startswith(_AT_OWN_SIZE):
        return [operation] if operation.bytes <= OWN_SIZE_BYTES else []
    return [operation] if operation.bytes <= limit else smaller(operation, limit)


def _is(operation: Operation, names: tuple[str, ...]) -> bool:
    return operation.name.removeprefix("aten.").removeprefix("mkldnn.").startswith(names)


def _is_sizeless(operation: Operation) -> bool:
    """Whether what the operation hides does not depend on sizes: element by element with no type to convert."""
    name = operation.name.removeprefix("aten.")
    in_lists = name.startswith(("_foreach_", "_fused_")) and "norm" not in name
    if torch.Tag.pointwise in operation.function.tags or in_lists:
        return len({spec.dtype for spec in operation.specs}) == 1
    return name in ("_to_copy.default", "empty_like.default", "zeros_like.default", "ones_like.default")


def smaller(operation: Operation, limit: int) -> list[Operation]:
    """The operation at three sizes of at most `limit` bytes, the largest first; [] where no lengths are left to cut.
    The same lengths are cut in all three, so that what grows with only some of them lies on no line."""
    factors: dict[int, int] = {}  # {length: what it is divided by}
    while (cut := resized(operation, factors)).bytes > limit:
        longest = [n for n in operation.lengths if n // (2 * factors.get(n, 1)) >= _SHORTEST * _FACTORS[-1]]
        if not longest:
            return []
        length = max(longest, key=lambda n: n // factors.get(n, 1))
        factors[length] = 2 * factors.get(length, 1)
    further = ({n: by * factor for n, by in factors.items()} for factor in _FACTORS[1:])
    return [cut, *(resized(operation, each) for each in further)]


def resized(operation: Operation, factors: dict[int, int]) -> Operation:
    """The operation with every length in `factors` divided by its factor, and what it then reads and makes."""
    part = dataclasses.replace(operation, leaves=tuple(_resized(leaf, factors) for leaf in operation.leaves))
    read, left = (sum(spec.bytes for spec in each.specs) for each in (operation, part))
    share = left / read if left < read else math.prod(1 / factor for factor in factors.values())
    return dataclasses.replace(part, made_bytes=int(operation.made_bytes * share))


def _resized(leaf: Any, factors: dict[int, int]) -> Any:
    """A tensor or a whole number with its lengths divided; dimensions keep their order in memory."""
    if type(leaf) is not Spec:
        return leaf // factors.get(leaf, 1) if type(leaf) is int else leaf
    shape = tuple(length // factors.get(length, 1) for length in leaf.shape)
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: leaf.stride[d]):
        if leaf.stride[dim]:
            strides[dim], step = step, step * shape[dim]
    return Spec(shape, tuple(strides), leaf.dtype)


# ---- what is concluded


@dataclass(slots=True)
class _Tried:
    """An operation, and how it did at the sizes at which it was run first."""

    operation: Operation
    group: list[Operation]  # the operation at those sizes, see `_at_first`
    seen: Sequence[Seen | None] = ()  # how it did at each; None where it could not be run
    warm: Seen | None = None  # how it did at the largest of them when it was run once more

    def conclusion(self) -> Hidden | None:
        """What it hides at its own size; None where these runs do not tell."""
        if len(self.group) == 1:  # at its own size, or where size does not matter
            return Hidden(self.seen[0].bytes, "measured") if self.seen[0] else _UNKNOWN
        if not self.group or None in self.seen:
            return None
        hidden = [each.bytes for each in self.seen]
        if not any(hidden):
            return Hidden(0, "line")
        if _is(self.operation, _UNEVEN):
            return None
        end = line([each.bytes for each in self.group], hidden, self.operation.bytes)
        return None if end is None else Hidden(end, "line")

    def assumption(self) -> Hidden:
        """The largest share of its operands that it hid at a smaller size, taken at its own size."""
        pairs = zip(self.group, self.seen, strict=True)
        shares = [seen.bytes / cut.bytes for cut, seen in pairs if seen and cut.bytes]
        return Hidden(round(max(shares) * self.operation.bytes), "assumed") if shares else _UNKNOWN

    def expected_seconds(self) -> float:
        """How long it would take at its own size; without a run to go by, as long as to move its bytes slowly."""
        if not self.warm:
            return self.operation.bytes / _SLOW_BYTES_A_SECOND
        return self.warm.seconds * (self.operation.bytes / max(self.group[0].bytes, 1)) ** _GROWTH


def line(sizes: Sequence[int], hidden: Sequence[int], wanted: int) -> int | None:
    """The bytes at the size `wanted` on the line through three points; None if there is none, or it goes below zero."""
    (a, b, c), (first, second, third) = sizes, hidden
    if not a > b > c:
        return None
    expected = second + (second - third) * (a - b) / (b - c)
    if abs(expected - first) > _ON_LINE_BYTES:
        return None
    end = round(first + (first - third) * (wanted - a) / (a - c))
    return end if end >= 0 else None


# ---- how an operation is run


class Runner:
    """Runs operations in a fork of this process, one for all: this one stays as it is, whatever they do."""

    def __init__(self):
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, operations: list[Operation], threads: int) -> list[Seen | None]:
        """How each operation did; None where it cannot be run without its data, or ends its process: a kernel may
        divide by a length that was cut to nothing."""
        if not operations:
            return []
        self._pool = self._pool or ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
        try:
            return self._pool.submit(_run, operations, threads).result()
        except BrokenProcessPool:  # each half by itself, until the culprit is alone
            self.close()
            half = len(operations) // 2
            return [*self(operations[:half], threads), *self(operations[half:], threads)] if half else [None]

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown()
            self._pool = None


def _run(operations: list[Operation], threads: int) -> list[Seen | None]:
    """How each operation did, in a process that nobody needs afterwards."""
    faulthandler.disable()  # should an operation end this process, that is an answer and no news
    torch.set_num_threads(threads)
    with memory_meter.profiled() as profile:
        for number, operation in enumerate(operations):
            _once(operation, f"{MARK} {number}")
    changes, ours = memory_meter.events(profile)
    times, totals = memory_meter.running(changes)
    found: list[Seen | None] = []
    for number in range(len(operations)):
        if f"{number} ends" not in ours:
            found.append(None)
            continue
        begin, end = (ours[f"{number} {which}"][0].begin for which in ("begins", "ends"))
        first, last = bisect.bisect_left(times, begin), bisect.bisect_left(times, end)
        found.append(Seen(max(totals[first : last + 1]) - totals[last], (end - begin) / 1e9))
    return found


def _once(operation: Operation, mark: str) -> None:
    """Run the operation on zeros between two marks of the profiler; without the second where it cannot be."""
    try:
        leaves = [
            torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype).zero_() if type(leaf) is Spec else leaf
            for leaf in operation.leaves
        ]
        args, kwargs = nested(leaves, operation.structure)
        with torch.no_grad(), torch._C._profiler._RecordFunctionFast(f"{mark} begins"):
            result = operation.function(*args, **kwargs)  # noqa: F841, held until the mark
            with torch._C._profiler._RecordFunctionFast(f"{mark} ends"):
                pass
    except Exception:
        pass
