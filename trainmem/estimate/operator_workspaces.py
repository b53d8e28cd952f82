"""Measure operator workspaces on a CPU: memory that operations allocate and free internally, and that no tensor shows.

No rule gives their sizes. A CPU's matmuls copy their operands into another layout, in buffers whose sizes jump from one
shape to the next and differ with strides, instruction sets and threads. Each operation is therefore run on zeros under
the allocator's profiler, at its own size if that is affordable. Otherwise it is run at three smaller sizes: if the
three workspaces are on a straight line, the line is extrapolated to the operation's own size; otherwise the largest
ratio of workspace to operands is used, and reported as an assumption.
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

from trainmem.estimate.trace_records import Operation, SparseSpec, Spec, nested
from trainmem.measure import memory_meter
from trainmem.measure.watcher import Recorded
from trainmem.texts import bytes_text

# Operations up to these bytes are run at their own size. The limit is lower for matmuls, whose time grows faster than
# their size, and for random numbers, which are slow.
_AT_ONCE_BYTES = 16 * 2**20
_AT_ONCE_SLOW_BYTES = 2**20
# Limits for larger operations at their own size: memory for each one, seconds for all of a call together.
OWN_SIZE_BYTES = 512 * 2**20
OWN_SIZE_SECONDS = 5.0
_FACTORS = (1, 2, 4)  # between the three smaller sizes
_SHORTEST = 2  # the least that a length is cut to
_ON_LINE_BYTES = 64  # how far a size may be off the line: allocators align their blocks
_GROWTH = 1.5  # time grows at most with this power of the bytes, as in a matmul in which all sides grow
_SLOW_BYTES_A_SECOND = 1e8  # assumed speed of an operation that was never timed
_SLOW = ("mm.", "addmm.", "bmm.", "baddbmm.", "_grouped_mm.")
_HIDES_NOTHING = ("profiler.", "storage.", memory_meter.COLLECTIVES)  # gloo's buffers for collectives are not counted
_AT_OWN_SIZE = ("fsdp.",)  # they write into a given tensor, whose size follows from all the others
# Their workspaces follow no line, although three sizes may be on one by chance: it is believed only if it is 0.
_UNEVEN = (*_SLOW, "convolution", "_convolution", "mkldnn_", "_scaled_dot_product_")


@dataclass(frozen=True, slots=True)
class Seen:
    """Hold the bytes of workspace and the seconds of one operation that was run."""

    bytes: int  # workspace: the highest total while it ran, minus its results
    seconds: float


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hold the workspace bytes of an operation at the size that the training uses, and how they were found."""

    bytes: int | None  # None if the operation cannot be run by itself
    how: str  # "measured" at its own size, on a "line" through three smaller ones, "assumed", or "unknown"
    seconds: float = field(default=0.0, compare=False)  # time of the run at its own size if that is large


_UNKNOWN = Hidden(None, "unknown")


class Probe:
    """Measure and remember operator workspaces: `run` measures, `probe[operation]` looks one up.

    Args:
        threads: number of threads that torch uses, each with its own buffers; None: torch's default.
    """

    def __init__(self, threads: int | None = None):
        self.threads = threads or torch.get_num_threads()
        self.known: dict[tuple, Any] = {}  # facts, also of other kinds; workspaces by (threads, *the signature)
        self._runner = Runner()

    def under(self, threads: int | None) -> "Probe":
        """Return a probe for another number of threads that shares this probe's results and its subprocess.

        Each result is stored with its number of threads. `threads`: the number; None: torch's default.
        """
        other = copy.copy(self)
        other.threads = threads or torch.get_num_threads()
        return other

    def close(self) -> None:
        """End the subprocess that runs the operations."""
        self._runner.close()

    def __getitem__(self, operation: Operation) -> Hidden:
        """Return an operation's workspace; raise KeyError if `run` was not called with it."""
        if hidden := self.known.get(self._key(operation)):
            return hidden
        raise KeyError(operation.name)

    def _key(self, operation: Operation) -> tuple:
        return self.threads, *operation.signature

    def run(self, operations: Sequence[Operation]) -> None:
        """Determine the workspaces of these operations, except those that are known already.

        Large operations whose workspace cannot be extrapolated are run at full size, in the order of `operations`, for
        `OWN_SIZE_SECONDS` in total. If too little time is left for such an operation, its workspace is assumed.
        `operations` should therefore begin with the most important ones.
        """
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
        # Time the largest of the smaller sizes again: the first run of a size includes a library's preparations.
        again = [each for key, each in tried.items() if not self.known.get(key) and each.seen and each.seen[0]]
        for each, warm in zip(again, run([each.group[0] for each in again]), strict=True):
            each.warm = warm
        left = OWN_SIZE_SECONDS
        for operation in operations:
            key = self._key(operation)
            if hidden := self.known.get(key):
                left -= hidden.seconds  # also if run earlier, so that cached results do not change other ones
                continue
            ran, seconds = None, tried[key].expected_seconds()
            if operation.bytes <= OWN_SIZE_BYTES and seconds <= left:
                (ran,) = run([operation])
                left -= ran.seconds if ran else seconds
            self.known[key] = Hidden(ran.bytes, "measured", ran.seconds) if ran else tried[key].assumption()


def assumptions(operations: Sequence[Operation], probe: Probe) -> list[str]:
    """Return what had to be assumed about the workspaces of these operations, one sentence per operator.

    `probe`: the probe that has measured these workspaces.
    """
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
            f"{name} is assumed to allocate up to {bytes_text(size)} internally, by the largest ratio to its operands "
            "at smaller sizes: these do not extrapolate linearly, and its own size takes too much time or memory"
            for name, size in assumed.items()
        ),
        *(f"the memory that {name} allocates internally is unknown and counted as 0 bytes" for name in unknown),
    ]


# ---- the sizes at which an operation is run


def _at_first(operation: Operation) -> list[Operation]:
    """Return an operation's forms to run first: itself or, if large, three smaller ones, largest first; [] if none."""
    if _is_sizeless(operation):  # one element per tensor is enough
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
    """Return whether the workspace does not depend on the sizes of the operation's tensors."""
    name = operation.name.removeprefix("aten.")
    in_lists = name.startswith(("_foreach_", "_fused_")) and "norm" not in name
    if torch.Tag.pointwise in operation.function.tags or in_lists:
        if operation.takes_sparse:
            return False
        return len({spec.dtype for spec in operation.specs}) == 1
    return name in ("_to_copy.default", "empty_like.default", "zeros_like.default", "ones_like.default")


def smaller(operation: Operation, limit: int) -> list[Operation]:
    """Return three forms of an operation with smaller tensors, the largest form first; [] if that is impossible.

    All three forms have the same dimensions shortened. Operands and results of a form have at most `limit` bytes
    together.
    """
    # If the workspace depends on only some of these dimensions, it is no linear function of the bytes of operands and
    # results, and `line` returns None.
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
    """Return a smaller form of an operation, so that running it takes less memory and time.

    The bytes of the results (`made_bytes`) are not traced again: they shrink by the same ratio as the sum of the bytes
    of all tensor arguments. If no tensor argument shrinks, `made_bytes` is divided by the product of all factors.

    Args:
        operation: the operation; it is not changed.
        factors: {length: factor}. Each dimension that equals `length` is divided by `factor`, and so is each
            whole-number argument that equals `length`.
    """
    part = dataclasses.replace(operation, leaves=tuple(_resized(leaf, factors) for leaf in operation.leaves))
    read, left = (sum(spec.bytes for spec in each.specs) for each in (operation, part))
    share = left / read if left < read else math.prod(1 / factor for factor in factors.values())
    return dataclasses.replace(part, made_bytes=int(operation.made_bytes * share))


def _resized(leaf: Any, factors: dict[int, int]) -> Any:
    """Return an argument with its lengths (dimensions, or a whole number) divided by `factors`, {length: factor}."""
    if type(leaf) is SparseSpec:
        shape = tuple(length // factors.get(length, 1) for length in leaf.shape)
        # The fraction of stored elements stays.
        return leaf._replace(shape=shape, count=leaf.count * math.prod(shape) // math.prod(leaf.shape))
    if type(leaf) is not Spec:
        return leaf // factors.get(leaf, 1) if type(leaf) is int else leaf
    shape = tuple(length // factors.get(length, 1) for length in leaf.shape)
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: leaf.stride[d]):  # their order in memory stays
        if leaf.stride[dim]:
            strides[dim], step = step, step * shape[dim]
    return Spec(shape, tuple(strides), leaf.dtype)


# ---- conclusions


@dataclass(slots=True)
class _Tried:
    """Hold an operation with its first runs; calculate from them the workspace at full size, as in the training."""

    operation: Operation
    group: list[Operation]  # the operation at the sizes of these runs, see `_at_first`
    seen: Sequence[Seen | None] = ()  # the run at each size; None if it failed
    warm: Seen | None = None  # a second run at the largest of these sizes

    def conclusion(self) -> Hidden | None:
        """Return the operation's workspace at full size; None if the first runs (`seen`) do not determine it."""
        if len(self.group) == 1:  # at its own size, or size does not matter
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
        """Return a workspace assumed by the largest ratio to operands and results in `seen`; unknown if all failed."""
        pairs = zip(self.group, self.seen, strict=True)
        shares = [seen.bytes / cut.bytes for cut, seen in pairs if seen and cut.bytes]
        return Hidden(round(max(shares) * self.operation.bytes), "assumed") if shares else _UNKNOWN

    def expected_seconds(self) -> float:
        """Return the seconds expected at full size, from the time of `warm` or an assumed speed."""
        if not self.warm:
            return self.operation.bytes / _SLOW_BYTES_A_SECOND
        return self.warm.seconds * (self.operation.bytes / max(self.group[0].bytes, 1)) ** _GROWTH


def line(sizes: Sequence[int], hidden: Sequence[int], wanted: int) -> int | None:
    """Extrapolate an operation's workspace linearly: return its bytes at the size `wanted`, from three measured sizes.

    Return None if the three workspaces do not lie on one straight line over the sizes, or if the line is below zero at
    `wanted`.

    Args:
        sizes: bytes of the operands and results at the three measured sizes, largest first.
        hidden: bytes of workspace at each of these sizes.
        wanted: bytes of the operands and results for which the workspace is returned.
    """
    (a, b, c), (first, second, third) = sizes, hidden
    if not a > b > c:
        return None
    expected = second + (second - third) * (a - b) / (b - c)
    if abs(expected - first) > _ON_LINE_BYTES:
        return None
    end = round(first + (first - third) * (wanted - a) / (a - c))
    return end if end >= 0 else None


# ---- running operations


class Runner:
    """Run operations in one fork, so that they cannot change or crash this process; after a crash, use a new fork."""

    def __init__(self):
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, operations: list[Operation], threads: int) -> list[Seen | None]:
        """Run operations on zeros in a fork; return their results in order, None for an operation that failed."""
        if not operations:
            return []
        self._pool = self._pool or ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
        try:
            return self._pool.submit(_run, operations, threads).result()
        except BrokenProcessPool:  # run each half separately until the culprit is alone
            # E.g. an attention kernel divides by zero if `resized` leaves fewer query heads than key heads.
            self.close()
            half = len(operations) // 2
            return [*self(operations[:half], threads), *self(operations[half:], threads)] if half else [None]

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown()
            self._pool = None


def _run(operations: list[Operation], threads: int) -> list[Seen | None]:
    """Run each operation on zeros; return its workspace in bytes and its seconds, or None if it failed.

    Call this function in a disposable process, because an operation may crash the process.
    """
    faulthandler.disable()  # an operation may crash this process, which is no error to report
    torch.set_num_threads(threads)
    with memory_meter.profiled() as profile:
        for number, operation in enumerate(operations):
            _once(operation, str(number))
    changes, marked = memory_meter.events(profile)
    times, totals = memory_meter.running(changes)
    found: list[Seen | None] = []
    for number in range(len(operations)):
        if f"{number} ends" not in marked:
            found.append(None)
            continue
        begin, end = (marked[f"{number} {which}"][0].begin for which in ("begins", "ends"))
        first, last = bisect.bisect_left(times, begin), bisect.bisect_left(times, end)
        found.append(Seen(max(totals[first : last + 1]) - totals[last], (end - begin) / 1e9))
    return found


def _sparse(spec: SparseSpec) -> torch.Tensor:
    """Return a sparse tensor as in `spec`; its stored elements are zeros at the first positions, in row-major order."""
    positions = torch.stack(torch.unravel_index(torch.arange(spec.count), spec.shape))
    values = torch.zeros(spec.count, dtype=spec.dtype)
    return torch.sparse_coo_tensor(
        positions, values, spec.shape, is_coalesced=spec.is_coalesced, check_invariants=False
    )


def _once(operation: Operation, mark: str) -> None:
    """Run the operation on zeros between the profiler marks "{mark} begins" and, if it succeeds, "{mark} ends"."""
    try:
        leaves = [
            torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype).zero_()
            if type(leaf) is Spec
            else _sparse(leaf)
            if type(leaf) is SparseSpec
            else leaf
            for leaf in operation.leaves
        ]
        args, kwargs = nested(leaves, operation.structure)
        with torch.no_grad(), Recorded(f"{mark} begins"):
            result = operation.function(*args, **kwargs)  # noqa: F841, held until the mark
            with Recorded(f"{mark} ends"):
                pass
    except Exception:
        pass
