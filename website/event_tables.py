"""Make a table of one recipe from a few traces: all allocations and frees, at every micro-batch and length.

The order of a recipe's allocations and frees is the same at each size, except inside a few kernels: the gradients of
embeddings and of layer norms, and reductions such as sums. The table therefore stores one order of events and, for each
kind of block, its bytes as a sum of powers of micro-batch and length with integer coefficients. For these few kernels
it stores their arguments, from which `_static/events.js` calculates their workspace. A recipe is refused unless the
table is right to the byte at every traced point.
"""

import bisect
import collections
import functools
import itertools
import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from trainmem.estimate import reduction_scratch
from trainmem.estimate.allocator import BLOCK_BYTES
from trainmem.estimate.trace_records import Label, Operation, Trace, nested
from trainmem.records import CATEGORIES, Category, Phase

LENGTH_UNIT = 128  # tokens; lengths are multiples of it, because the attention kernels round up to them

Point = tuple[int, int]  # (micro-batch, length in units)
Sum = tuple[int, ...]  # the coefficients of 1, t, t², b, bt, bt²

# The programs of `events.js`.
_EMBEDDING, _REDUCTION, _NORM_BACKWARD, _WORKSPACE = "embedding", "reduction", "norm backward", "workspace"
_FLASH = "aten._scaled_dot_product_flash_attention.default"
_NORM = "aten.linalg_vector_norm.default"
_WITH_RULES = ("aten.embedding_dense_backward", "aten.native_layer_norm_backward", "aten.sum", "aten.mean")


class Unfit(ValueError):
    """No table can be made from the given traces; the message says why."""


class Program(NamedTuple):
    """A rule for the bytes of a kernel's workspace: its name in `events.js`, and its arguments.

    `constants` are the arguments that are the same at every micro-batch and length; `numbers` are the others.
    """

    rule: str
    constants: tuple[Any, ...]
    numbers: tuple[int, ...]  # may depend on micro-batch and length


@dataclass
class Events:
    """A trace in the form that a table stores: its blocks, allocations and frees, phases, and emptied caches."""

    blocks: list[tuple[int, Label, Program | None]] = field(default_factory=list)
    events: list[int] = field(default_factory=list)  # as in `Log.events`
    marks: list[tuple[str, int]] = field(default_factory=list)
    emptied: list[int] = field(default_factory=list)  # as in `Log.emptied`

    @functools.cached_property
    def order(self) -> tuple:
        """Return the parts of a trace that must not change with the micro-batch and the length, e.g. the order of its
        events. Ask for it when all events are there.
        """
        kinds = [(label, program and (*program[:2], len(program.numbers))) for _, label, program in self.blocks]
        return self.events, self.marks, self.emptied, kinds

    def is_like(self, other: "Events") -> bool:
        """Return whether `other` has the same events, apart from workspaces."""
        sizes = ([size for size, _, p in each.blocks if p is None or p.rule != _WORKSPACE] for each in (self, other))
        return self.order == other.order and [*next(sizes)] == [*next(sizes)]


def events_of(trace: Trace, capability: tuple[int, int]) -> Events:
    """Return the events of a trace, without the events of workspaces whose bytes a rule (`Program`) calculates instead.

    `capability`: compute capability of the traced GPU.

    Raises:
        Unfit: a rule calculates other workspaces than the trace has, a kernel with a rule returns several blocks, or
            the trace has a second stream.
    """
    log, found = trace.log, Events()
    if any(label.stream for _, label in log.blocks):
        raise Unfit("there is a second stream")
    operations = _operations(trace)
    numbers: dict[int, int] = {}  # {number of a block in the trace: its number in the table}
    scratch = collections.defaultdict(list)  # {one run of a kernel: bytes of the blocks that a program replaces}
    made: dict[Hashable, Program] = {}
    lengths = []
    for position, event in enumerate(log.events):
        lengths.append(len(found.events))
        if event < 0:
            if ~event in numbers:
                found.events.append(~numbers[~event])
            continue
        size, label = log.blocks[event]
        instance, operation = operations.get(event, (position, None))
        is_inside = label.category == Category.INSIDE_OPERATIONS
        if is_inside and size > BLOCK_BYTES and operation and operation.name == _FLASH:
            continue  # not a sum of powers; freed with the operation, long before a peak
        program = _program(operation, label)
        if program and program.rule == _NORM_BACKWARD and is_inside == (instance not in made):
            program = None  # a copy before the first result, or a further result: its bytes are a sum of powers
        elif program and program.rule != _WORKSPACE:
            if is_inside:
                scratch[instance].append(size)
                continue
            if instance in made:
                raise Unfit(f"{operation.name} makes several blocks")
            made[instance] = program
        numbers[event] = len(found.blocks)
        found.events.append(len(found.blocks))
        found.blocks.append((size, label, program))
    lengths.append(len(found.events))
    found.marks = [(label, lengths[position]) for label, position in log.marks]
    found.emptied = [lengths[position] for position in log.emptied]
    for instance, sizes in scratch.items():
        if sizes != _taken(made.get(instance), capability):
            raise Unfit(f"{made.get(instance)} takes {sizes}")
    return found


def _operations(trace: Trace) -> dict[int, tuple[Hashable, Operation]]:
    """Return {number of a block: (key, the operation that allocated the block)}.

    Blocks that one execution of an operation allocates have the same key. A trace records no operations before its
    first forward pass. A block that is allocated before it gets the operation that allocated a block for a later
    batch with the same operation in its label. Without such an operation, the block is left out.
    """
    log, begins = trace.log, trace.begins.tolist()
    born = {event: position for position, event in enumerate(log.events) if event >= 0}
    found, alike = {}, {}
    for block, (_, label) in enumerate(log.blocks):
        index = bisect.bisect_right(begins, born[block]) - 1
        if 0 <= index < len(trace.operations):
            found[block] = index, trace.operations[index]
            if label.phase == Phase.BEFORE:
                alike.setdefault(label.operation, trace.operations[index])
    count = 0
    for block, (_, label) in enumerate(log.blocks):
        if born[block] < begins[0] and label.operation in alike:
            count += label.category != Category.INSIDE_OPERATIONS
            found[block] = (Phase.SETUP, count), alike[label.operation]
    return found


def _program(operation: Operation | None, label: Label) -> Program | None:
    """Return the rule (`Program`) for the workspace of the kernel that allocated a block; None if no rule is needed.

    `operation`: the operation that allocated the block, None if it is not known; `label`: category and operation of the
    block.
    """
    if label.operation == "cuBLAS workspace":
        return Program(_WORKSPACE, (), ())
    if operation is None or label.operation != operation.name:
        return None
    kind = ".".join(operation.name.split(".")[:2])
    if kind not in _WITH_RULES and operation.name != _NORM:
        return None
    args, kwargs = nested(operation.leaves, operation.structure)
    if kind == "aten.embedding_dense_backward":
        gradient, indices, weights, _, by_frequency = args
        copies = [each.bytes for each in (gradient, indices) if not _is_contiguous(each)]
        count = math.prod(indices.shape)
        constants = weights, gradient.shape[-1], gradient.dtype.itemsize == 2, len(copies)
        return None if by_frequency else Program(_EMBEDDING, constants, (count, *copies))
    if kind == "aten.native_layer_norm_backward":
        gradient, tensor, shape, _, _, *weights, is_wanted = args
        sizes = tuple(each.bytes for each, wanted in zip(weights, is_wanted[1:], strict=True) if wanted)
        copies = [] if _is_contiguous(gradient) else [gradient.bytes]
        width = math.prod(shape)
        return Program(_NORM_BACKWARD, (width, sizes, len(copies)), (math.prod(tensor.shape) // width, *copies))
    tensor, *rest = args
    dim = kwargs.get("dim", next(iter(rest[1:] if operation.name == _NORM else rest), None))
    dims = range(len(tensor.shape)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    dims = tuple(sorted({each % max(len(tensor.shape), 1) for each in dims}))
    made = kwargs.get("dtype") or tensor.dtype
    item_bytes = made.itemsize if made.is_floating_point else 8  # whole numbers are summed as int64
    bytes_each = max(4, item_bytes)
    is_same = made is tensor.dtype and made.itemsize == item_bytes
    casts = operation.name != _NORM and tensor.dtype.itemsize != 2 and not is_same
    copies = [math.prod(tensor.shape) * item_bytes] if casts else []
    return Program(_REDUCTION, (dims, bytes_each, len(copies)), (*tensor.shape, *tensor.stride, *copies))


@functools.cache
def _taken(program: Program | None, capability: tuple[int, int]) -> list[int]:
    """Return the bytes of each workspace block that a kernel allocates in addition to its result, as its `program`
    calculates them.

    `program`: the kernel's rule, None: no workspace; `capability`: compute capability of the GPU.
    """
    if program is None:
        return []
    copies = list(program.numbers[len(program.numbers) - program.constants[-1] :])
    if program.rule == _REDUCTION:
        dims, bytes_each, _ = program.constants
        rank = (len(program.numbers) - len(copies)) // 2
        layout = program.numbers[:rank], program.numbers[rank : 2 * rank]
        gpu = reduction_scratch.processors(capability)
        return copies + reduction_scratch.scratch_bytes(*layout, dims, gpu, bytes_each)
    import torch

    from trainmem.estimate.kernels import Kernels

    types, aten = {2: torch.bfloat16, 4: torch.float32}, torch.ops.aten
    if program.rule == _NORM_BACKWARD:
        (width, sizes, _), rows = program.constants, program.numbers[0]
        tensor = torch.empty(rows, width, dtype=types[copies[0] // rows // width if copies else 4], device="meta")
        gradient = tensor.new_empty(width, rows).T if copies else tensor
        weights = [torch.empty(width, dtype=types[size // width], device="meta") for size in sizes]
        args = gradient, tensor, [width], None, None, None, None, [True, True, True]
        steps = Kernels(capability).program(aten.native_layer_norm_backward.default, args, {}, [tensor, *weights])
        return [step for step in steps if isinstance(step, int)]
    (weights, width, is_half, _), count = program.constants, program.numbers[0]
    gradient = torch.empty(count, width, dtype=types[2 if is_half else 4], device="meta")
    indices = torch.empty(count, dtype=torch.int64, device="meta")
    args = gradient, indices, weights, -1, False
    steps = Kernels(capability).program(aten.embedding_dense_backward.default, args, {}, gradient)
    return copies + [step for step in steps if isinstance(step, int)]


def _is_contiguous(spec) -> bool:
    sizes = [(size, step) for size, step in zip(spec.shape, spec.stride, strict=True) if size != 1]
    expected = [math.prod([size for size, _ in sizes[place + 1 :]]) for place in range(len(sizes))]
    return [step for _, step in sizes] == expected


# ---- sums of powers


def powers(point: Point) -> tuple[int, ...]:
    """Return the six products by which a `Sum` multiplies its coefficients, in their order.

    `point` is (b, n), micro-batch and length in units of 128 tokens; the products are 1, n, n^2, b, b n and b n^2.
    """
    size, length = point
    return (1, length, length**2, size, size * length, size * length**2)


def at(coefficients: Sum, point: Point) -> int:
    return sum(map(int.__mul__, coefficients, powers(point)))


@functools.cache
def fitted(values: tuple[int, ...], points: tuple[Point, ...]) -> Sum:
    """Return the `Sum`, with at most two terms, that equals each of the values at its point (micro-batch, length).

    A term is an integer times one of the products of `powers`.

    Raises:
        Unfit: there is no such sum, or more than one.
    """
    rows = [powers(point) for point in points]
    is_one = len({size for size, _ in points}) == 1
    for count in (1, 2):
        found = set()
        for chosen in itertools.combinations(range(3 if is_one else 6), count):
            solved = _solved([[row[n] for n in chosen] for row in rows], values)
            if solved:
                found.add(tuple(solved[chosen.index(n)] if n in chosen else 0 for n in range(6)))
        if len(found) > 1:
            raise Unfit(f"{values} at {points} are several sums")
        if found:
            return found.pop()
    raise Unfit(f"{values} at {points} are no sum of two powers")


def _solved(rows: list[list[int]], values: Sequence[int]) -> list[int] | None:
    """Solve x a = value (or x a + y b = value) at all points at once, and return the integers [x] or [x, y].

    Return None if there are no such integers, or if two columns a and b are proportional.

    Args:
        rows: [a] or [a, b] of each traced point (micro-batch, length).
        values: the value at each point.
    """
    if len(rows[0]) == 1:
        solved = [Fraction(values[0], rows[0][0])]
    else:
        a, b = rows[0]
        place = next((n for n, (c, d) in enumerate(rows) if a * d != b * c), None)
        if place is None:
            return None
        (c, d), first, other = rows[place], values[0], values[place]
        solved = [Fraction(first * d - b * other, a * d - b * c), Fraction(a * other - c * first, a * d - b * c)]
    fits = all(sum(x * y for x, y in zip(solved, row, strict=True)) == v for row, v in zip(rows, values, strict=True))
    return [int(each) for each in solved] if fits and all(each.denominator == 1 for each in solved) else None


# ---- the table


def table(traced: dict[Point, Events]) -> dict[str, Any]:
    """Return the table that `events.js` reads.

    `traced`: {(micro-batch, length in units of 128 tokens): the events of the trace there}.

    Raises:
        Unfit: the traces differ in more than the sizes of blocks, or no `Sum` gives the sizes of a block at all points.
    """
    points, every = (*traced,), [*traced.values()]
    for point, other in traced.items():
        if other.order != every[0].order:
            raise Unfit(f"at {point} the events are others than at {points[0]}: {_difference(every[0], other)}")
    sums: dict[Sum, int] = {}
    labels: dict[tuple, int] = {}
    programs: dict[tuple, int] = {}
    classes: dict[tuple, int] = {}

    def fit(values: Iterable[int]) -> int:
        found = fitted(tuple(values), points)
        return sums.setdefault(found, len(sums))

    kinds = []  # the class of each block
    for same in zip(*(each.blocks for each in every), strict=True):
        _, label, program = same[0]
        known = label.category, Phase(label.phase).shown, label.operation, re.sub(r"\b\d+\b", "*", label.module)
        key = [labels.setdefault(known, len(labels)), fit(size for size, *_ in same)]
        if program:
            numbers = tuple(map(fit, zip(*(of.numbers for _, _, of in same), strict=True)))
            key.append(programs.setdefault((program.rule, program.constants, numbers), len(programs)))
        kinds.append(classes.setdefault(tuple(key), len(classes)))
    tokens, ranks = _tokens(every[0].events, kinds)
    names = [str(category) for category in CATEGORIES]
    return {
        "sums": [*map(list, sums)],
        "labels": [[names.index(category), *rest] for category, *rest in labels],
        "programs": [*map(list, programs)],
        "classes": [*map(list, classes)],
        "tokens": tokens,
        "ranks": ranks,
        "marks": every[0].marks,
        "emptied": every[0].emptied,
    }


def _difference(one: Events, other: Events) -> str:
    """Describe the first block in which two traces, `one` and `other`, differ."""
    for number, (here, there) in enumerate(zip(one.order[-1], other.order[-1], strict=False)):
        if here != there:
            return f"block {number}: {here} and {there}"
    return f"{len(one.blocks)} and {len(other.blocks)} blocks, or their order"


def _tokens(events: list[int], kinds: list[int]) -> tuple[list[int], list[int]]:
    """Return (tokens, ranks) of the events.

    A token is n for the allocation of a block of class n, and ~n for a free. There is one rank per free. It says which
    live block of the class is freed, counted from the nearer end: 0, 1, ... from the youngest or -1, -2, ... from the
    oldest.

    Args:
        events: n for the allocation of block n, ~n for its free.
        kinds: the class of each block. Blocks are in one class if they have the same label, workspace rule, and size as
            a function of micro-batch and length.
    """
    living: dict[int, list[int]] = collections.defaultdict(list)
    tokens, ranks = [], []
    for event in events:
        kind = kinds[max(event, ~event)]
        here = living[kind]
        if event >= 0:
            tokens.append(kind)
            here.append(event)
            continue
        place = here.index(~event)
        from_youngest = len(here) - 1 - place
        ranks.append(from_youngest if from_youngest <= place else ~place)
        tokens.append(~kind)
        del here[place]
    return tokens, ranks
