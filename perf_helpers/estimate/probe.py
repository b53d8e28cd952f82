"""What operations allocate and free inside themselves, beyond their results: bytes that show on no tensor.

There is no rule for them. A CPU's matrix products lay their operands out anew, in buffers whose sizes jump from one
shape to the next and differ with strides, instructions and threads. So each operation is run, on zeros, and the
allocator is asked: at its own size wherever that is affordable. Where it is not, three smaller sizes must lie on one
line, which is then followed to its own size; what lies on no line is assumed, and told as an assumption.
"""

import bisect
import copy
import dataclasses
import faulthandler
import functools
import itertools
import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch

from perf_helpers.estimate.trace import Call, Spec, nested

# Up to these bytes an operation is run at its own size without more ado. Products take time that grows faster than
# their size, random numbers take long.
_AT_ONCE_BYTES = 16 * 2**20
_AT_ONCE_SLOW_BYTES = 2**20
# What a larger one may take at its own size: memory for one, seconds for all that are asked for together.
_OWN_SIZE_BYTES = 512 * 2**20
_OWN_SIZE_SECONDS = 5.0
_FACTORS = (1, 2, 4)  # between the three sizes
_SHORTEST = 2  # what is left at least of a length that is cut
_ON_LINE_BYTES = 64  # how far off a line a size may lie: allocators align their blocks
_GROWTH = 1.5  # time grows at most with this power of the bytes: that of a product whose sides all grow
_SLOW_BYTES_A_SECOND = 1e8  # of an operation that was never timed
_SLOW = ("mm.", "addmm.", "bmm.", "baddbmm.", "_grouped_mm.")
# Their buffers follow no line, though three sizes may lie on one by chance: it is believed where they hide nothing.
_UNEVEN = (*_SLOW, "convolution", "_convolution", "mkldnn_", "_scaled_dot_product_")


@dataclass(frozen=True, slots=True)
class Hidden:
    """What one operation hides at its own size: `bytes`, None where it cannot be run by itself.

    `how`: "measured" at its own size, on a "line" through three smaller ones, "assumed", or "unknown".
    """

    bytes: int | None
    how: str


_NOTHING = Hidden(0, "measured")
_UNKNOWN = Hidden(None, "unknown")


class Probe:
    """What operations hide, remembered: `known` is {(threads, the call's signature): Hidden}.

    Args:
        threads: of the experiment that is followed, for buffers are made for each; None: as many as torch takes.
    """

    def __init__(self, threads: int | None = None):
        self.threads = threads or torch.get_num_threads()
        self.known: dict[tuple, Hidden] = {}
        self._runner = _Runner()

    def under(self, threads: int | None) -> "Probe":
        """A probe that shares what this one knows, for an experiment on so many threads."""
        other = copy.copy(self)
        other.threads = threads or torch.get_num_threads()
        return other

    def close(self) -> None:
        """End the process in which operations were run."""
        self._runner.close()

    def __getitem__(self, call: Call) -> Hidden:
        return self.known[self.threads, call.signature]

    def run(self, calls: Sequence[Call]) -> None:
        """Find out what each of these operations hides that is not known yet; the first ones matter most."""
        new = {key: call for call in calls if (key := (self.threads, call.signature)) not in self.known}
        self.known |= {key: _NOTHING for key, call in new.items() if call.is_view or call.name.startswith("profiler.")}
        sizes = {key: _at_first(call) for key, call in new.items() if key not in self.known}
        run = functools.partial(self._runner, threads=self.threads)
        found = run({(key, place): call for key, group in sizes.items() for place, call in enumerate(group)})
        larger = {}
        for key, group in sizes.items():
            seen = [found.get((key, place)) for place in range(len(group))]
            if group in ([new[key]], [shrunk(new[key])]):
                self.known[key] = Hidden(seen[0].bytes, "measured") if seen[0] else _UNKNOWN
            elif (told := _on_line(new[key], group, seen)) is not None:
                self.known[key] = Hidden(told, "line")
            else:
                larger[key] = group, seen
        # Once more: what a library prepares at the first call of a size is no part of how long it takes.
        warm = run({key: group[0] for key, (group, seen) in larger.items() if seen and seen[0]})
        whole = _at_own_size(new, larger, warm, run)
        for key, (group, seen) in larger.items():
            self.known[key] = Hidden(whole[key].bytes, "measured") if key in whole else _assumed(new[key], group, seen)


def assumptions(calls: Sequence[Call], probe: Probe) -> list[str]:
    """In words what had to be assumed of these operations, a sentence for each name."""
    assumed: dict[str, int] = {}
    unknown: dict[str, None] = {}
    for call in calls:
        hidden = probe[call]
        if hidden.how == "assumed":
            assumed[call.name] = max(hidden.bytes, assumed.get(call.name, 0))
        elif hidden.how == "unknown":
            unknown[call.name] = None
    return [
        *(
            f"what {name} allocates inside itself is taken as up to {size / 1e6:,.1f} MB, the largest share of its "
            "operands that it took at smaller sizes: these lie on no line, and its own takes too long or too much"
            for name, size in assumed.items()
        ),
        *(f"what {name} allocates inside itself was not found out and is left out: 0 bytes" for name in unknown),
    ]


# ------------------------------------------------------------------------------------------------------ at what sizes


def _at_first(call: Call) -> list[Call]:
    """The operation itself or, if it is large, at three smaller sizes, the largest first; [] if it cannot be cut."""
    if _sizeless(call):
        return [shrunk(call)]
    limit = _AT_ONCE_SLOW_BYTES if _is(call, _SLOW) or _is_random(call) else _AT_ONCE_BYTES
    return [call] if call.bytes <= limit else smaller(call, limit)


def _is(call: Call, names: tuple[str, ...]) -> bool:
    return call.name.removeprefix("aten.").removeprefix("mkldnn.").startswith(names)


def _is_random(call: Call) -> bool:
    return torch.Tag.nondeterministic_seeded in call.function.tags


def _sizeless(call: Call) -> bool:
    """Whether what the operation hides does not depend on sizes: element by element with no type to convert."""
    name = call.name.removeprefix("aten.")
    types = {leaf.dtype for leaf in call.leaves if type(leaf) is Spec}
    if torch.Tag.pointwise in call.function.tags or (name.startswith(("_foreach_", "_fused_")) and "norm" not in name):
        return len(types) == 1
    return name in ("_to_copy.default", "empty_like.default", "zeros_like.default", "ones_like.default")


def shrunk(call: Call) -> Call:
    """The call on tensors of one element."""
    leaves = (Spec((1,) * len(x.shape), (1,) * len(x.shape), x.dtype) if type(x) is Spec else x for x in call.leaves)
    return dataclasses.replace(call, leaves=tuple(leaves), made=0)


def smaller(call: Call, limit: int) -> list[Call]:
    """The call at three sizes of at most `limit` bytes, the largest first: the same lengths are cut in all, so that
    what grows with only some of them lies on no line. [] where no lengths are left to cut."""
    factors: dict[int, int] = {}
    while (cut := resized(call, factors)).bytes > limit:
        longest = [n for n in call.lengths if n // (2 * factors.get(n, 1)) >= _SHORTEST * _FACTORS[-1]]
        if not longest:
            return []
        length = max(longest, key=lambda n: n // factors.get(n, 1))
        factors[length] = 2 * factors.get(length, 1)
    further = ({n: by * factor for n, by in factors.items()} for factor in _FACTORS[1:])
    return [cut, *(resized(call, each) for each in further)]


def resized(call: Call, factors: dict[int, int]) -> Call:
    """The call with every such length divided by its factor, and what it then reads and makes."""
    part = dataclasses.replace(call, leaves=tuple(_resized(leaf, factors) for leaf in call.leaves))
    read, left = (sum(leaf.bytes for leaf in each.leaves if type(leaf) is Spec) for each in (call, part))
    share = left / read if left < read else math.prod(1 / factor for factor in factors.values())
    return dataclasses.replace(part, made=int(call.made * share))


def _resized(leaf: Any, factors: dict[int, int]) -> Any:
    if type(leaf) is not Spec:
        return leaf // factors.get(leaf, 1) if type(leaf) is int else leaf
    shape = tuple(length // factors.get(length, 1) for length in leaf.shape)
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: leaf.stride[d]):  # in the same order
        if leaf.stride[dim]:
            strides[dim], step = step, step * shape[dim]
    return Spec(shape, tuple(strides), leaf.dtype)


# -------------------------------------------------------------------------------------------------- what is concluded


@dataclass(frozen=True, slots=True)
class _Seen:
    """One operation that was run: what it hid, and how long it took."""

    bytes: int
    seconds: float


def _on_line(call: Call, group: Sequence[Call], seen: Sequence[_Seen | None]) -> int | None:
    """What the operation hides at its own size if three sizes lie on one line; None if they do not.

    A line that leads below zero is none.
    """
    if not group or None in seen:
        return None
    hidden = [each.bytes for each in seen]
    if not any(hidden):
        return 0
    return None if _is(call, _UNEVEN) else line([each.bytes for each in group], hidden, call.bytes)


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


def _at_own_size(calls: dict, larger: dict, warm: dict, run: Callable[[dict], dict]) -> dict:
    """Those of the larger operations that fit into memory and time, run at their own size.

    Args:
        warm: how each did at the largest of its smaller sizes, from which it is known how long it may take.
    """
    found, left = {}, _OWN_SIZE_SECONDS
    for key, (group, _) in larger.items():
        call = calls[key]
        if key in warm:
            seconds = warm[key].seconds * (call.bytes / max(group[0].bytes, 1)) ** _GROWTH
        else:  # nothing is known but how much it moves
            seconds = call.bytes / _SLOW_BYTES_A_SECOND
        if call.bytes <= _OWN_SIZE_BYTES and seconds <= left:
            found |= (ran := run({key: call}))
            left -= ran[key].seconds if ran else seconds
    return found


def _assumed(call: Call, group: Sequence[Call], seen: Sequence[_Seen | None]) -> Hidden:
    """The largest share of its operands that the operation hid at a smaller size, at its own."""
    shares = [each.bytes / small.bytes for small, each in zip(group, seen, strict=True) if each and small.bytes]
    return Hidden(round(max(shares) * call.bytes), "assumed") if shares else _UNKNOWN


# ------------------------------------------------------------------------------------------------------- how it is run


class _Runner:
    """Runs operations in a fork of this process, one for all: this one stays as it is, whatever they do."""

    def __init__(self):
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, calls: dict[Any, Call], threads: int) -> dict[Any, _Seen]:
        """What operations did. One that cannot be run without its data is missing from what is returned, and so is one
        that ends its process: a kernel may divide by a length that was cut to nothing.
        """
        if not calls:
            return {}
        self._pool = self._pool or ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
        keys = list(calls)
        try:
            found = self._pool.submit(_run, list(calls.values()), threads).result()
        except BrokenProcessPool:
            self.close()
            half = len(keys) // 2
            parts = ({key: calls[key] for key in some} for some in (keys[:half], keys[half:])) if half else ()
            return {key: seen for part in parts for key, seen in self(part, threads).items()}
        return {key: seen for key, seen in zip(keys, found, strict=True) if seen}

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown()
            self._pool = None


def _run(calls: list[Call], threads: int) -> list[_Seen | None]:
    """What each operation hid, and how long it took, in a process that nobody needs afterwards."""
    faulthandler.disable()  # should an operation end this process, that is an answer and no news
    torch.set_num_threads(threads)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for number, call in enumerate(calls):
            _once(call, str(number))
    found = _between_marks(profile)
    return [found.get(str(number)) for number in range(len(calls))]


def _once(call: Call, mark: str) -> None:
    """Run the operation between two marks of the profiler; the second is missing where that is not possible."""
    try:
        args, kwargs = nested([_tensor(leaf) for leaf in call.leaves], call.structure)
        with torch.no_grad(), torch._C._profiler._RecordFunctionFast(f"{mark} begins"):
            result = call.function(*args, **kwargs)  # noqa: F841, held until the mark
            with torch._C._profiler._RecordFunctionFast(f"{mark} ends"):
                pass
    except Exception:
        pass


def _tensor(leaf: Any) -> Any:
    return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype).zero_() if type(leaf) is Spec else leaf


def _between_marks(profile) -> dict[str, _Seen]:
    """For each pair of marks: the highest total between them, less what is left at the end."""
    times, memory = {}, []
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            memory.append((event.start_ns(), event.nbytes()))
        elif event.name().endswith((" begins", " ends")):
            times[event.name()] = event.start_ns()
    memory.sort(key=lambda change: change[0])
    when = [time for time, _ in memory]
    found = {}
    for name, begin in times.items():
        mark, _, kind = name.partition(" ")
        if kind == "begins" and (end := times.get(f"{mark} ends")) is not None:
            here = memory[bisect.bisect_left(when, begin) : bisect.bisect_left(when, end)]
            totals = [0, *itertools.accumulate(size for _, size in here)]
            found[mark] = _Seen(max(totals) - totals[-1], (end - begin) / 1e9)
    return found
