"""A surface fitted in the clean process: the bytes at each operation over micro-batch and length, from a few traces.

At each operation of a training there live bytes that grow in a straight line with the micro-batch and at most with the
square of the length. Six traces of a recipe therefore fix them everywhere (two where there is no length). What an
operation hides inside itself follows no such curve: it is asked for at every point on offer.
"""

import contextlib
import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from perf_helpers.estimate.prediction import Device, Followed, Tell, follow_all, memory_of
from perf_helpers.estimate.trace_records import Operation, Trace
from perf_helpers.lab.outcomes import Invalid
from perf_helpers.lab.training import Experiment
from perf_helpers.records import TENSOR_CATEGORIES, Category, Memory, Phase

if TYPE_CHECKING:
    from perf_helpers.estimate.operator_workspaces import Probe

Point = tuple[int, int | None]  # (micro-batch, length); None for images
Points = Sequence[Point]

STATES = TENSOR_CATEGORIES.index(Category.OPTIMIZER_STATES)
TOTAL = len(TENSOR_CATEGORIES)  # the column after the categories that are followed: the total

_LEAST_COMMON = 0.95  # share of the operations that all traces must have


@dataclass(frozen=True, slots=True)
class Surface:
    """The operations of one recipe that hold the peak somewhere. Columns are the categories that are followed, and the
    total, in bytes. The names are those of the file."""

    phases: list[str]  # of each operation
    operations: list[str]  # their names
    updates: list[bool]  # whether it belongs to the optimizer's update; in inference to the second pass, of one token
    coefficients: list  # (terms, operations, columns): what `terms` are multiplied by
    after_backward: list  # (terms, columns): the same for what lives when the backward has ended
    hidden: list  # (operations, points): bytes inside the operation at each of the points on offer
    points: list  # on offer, as (micro-batch, length)
    states: int  # bytes of the optimizer's states


def terms(micro_batch: int, seq_len: int | None) -> np.ndarray:
    """What an operation's bytes are a sum of: (terms,), scaled to be near 1."""
    size, length = micro_batch / 64, (seq_len or 0) / 1024
    powers = [1] if seq_len is None else [1, length, length**2]
    return np.array([*powers, *(size * power for power in powers)], dtype=float)


def fit(
    experiments: Sequence[Experiment], device: Device, points: Points, offered: Points, probe: "Probe", tell: Tell
) -> tuple[Surface, list[Memory]]:
    """The surface through some trainings of one recipe, and their memories, without timelines. To be called by
    `prediction.with_known`.

    Args:
        experiments: one at each of `points`: as many as there are `terms`. A single one is not fitted: its update is
            the same wherever it is, and is carried over as it was traced.
        offered: points at which answers will be asked for.

    Raises:
        Invalid: a training cannot be followed, or their operations differ too much from one point to another.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.nice(19)  # nobody waits for it, and others may be measuring
    followed = follow_all(experiments, device, probe, tell)
    memories = [replace(memory_of(each), timeline=None) for each in followed]
    return _surface(followed, device, points, offered, probe), memories


def _surface(followed: Sequence[Followed], device: Device, points: Points, offered: Points, probe: "Probe") -> Surface:
    is_fitted = len(points) > 1
    # (points, terms); what is not fitted has one term
    both = ([terms(*point) if is_fitted else np.ones(1) for point in each] for each in (points, offered))
    traced_at, wanted_at = map(np.stack, both)
    trace, indices = followed[0].trace, aligned([each.trace for each in followed])
    tables = [_table(each, here, with_hidden=not is_fitted) for each, here in zip(followed, indices, strict=True)]
    coefficients = _solved(traced_at, tables)
    live, high = wanted_at @ coefficients[:, :, :TOTAL].sum(axis=2), wanted_at @ coefficients[:, :, TOTAL]
    hidden = np.zeros(high.shape, dtype=np.int64)  # (points on offer, operations), as are `live` and `high`
    if device.kind == "cpu" and is_fitted:
        hidden = _hidden(followed, indices, traced_at, wanted_at, live, high, probe)
    is_update = np.array([trace.phases[index] == Phase.STEP for index in indices[0]])
    if Phase.BACKWARD not in trace.marks:  # inference: a prompt's pass and one token's in turn
        forward = np.array([phase == Phase.FORWARD for phase in trace.phases])
        passes = np.cumsum(forward & ~np.roll(forward, 1))[indices[0]]
        is_update = passes % 2 == 0
    # Kept are the operations that hold the peak, of the passes or of the update, at any point on offer.
    heights = np.maximum(high, live + hidden)
    groups = (np.flatnonzero(group) for group in ([is_update, ~is_update] if is_fitted else [is_update]))
    kept = sorted({int(group[i]) for group in groups if len(group) for i in heights[:, group].argmax(axis=1)})
    nothing = np.zeros(TOTAL)  # has lived when no backward has ended
    at_end = [each.trace.marks.get(Phase.BACKWARD, nothing)[:TOTAL].astype(float) for each in followed]
    return Surface(
        phases=[trace.phases[indices[0][number]].shown for number in kept],
        operations=[trace.operations[indices[0][number]].name for number in kept],
        updates=is_update[kept].tolist(),
        coefficients=coefficients[:, kept].tolist(),
        after_backward=_solved(traced_at, [np.append(each, each.sum()) for each in at_end]).tolist(),
        hidden=hidden[:, kept].T.tolist(),
        points=list(offered),
        states=int(trace.live[:, STATES].max()),
    )


def _solved(traced_at: np.ndarray, values: Sequence[np.ndarray]) -> np.ndarray:
    """The coefficients of the terms, for values of any shape at each of the points traced: (terms, *shape)."""
    stacked = np.stack(values)
    return np.linalg.solve(traced_at, stacked.reshape(len(stacked), -1)).reshape(stacked.shape)


def aligned(traces: Sequence[Trace]) -> list[list[int]]:
    """For each trace the indices of the operations that all of them have, in order.

    They are aligned by the names of operations and modules, as texts are compared: which kernel is chosen, how data are
    fetched and what is a view differs here and there. Raises Invalid where they have hardly the same operations.
    """
    fetching = Phase.SETUP, Phase.BEFORE  # what is done there holds no peak, and no view does
    every = [
        [i for i, each in enumerate(trace.operations) if trace.phases[i] not in fetching and not each.is_view]
        for trace in traces
    ]
    words = [[(t.operations[i].name, t.modules[i]) for i in here] for t, here in zip(traces, every, strict=True)]
    matches = []
    for other in words[1:]:
        blocks = difflib.SequenceMatcher(None, words[0], other, autojunk=False).get_matching_blocks()
        matches.append({block.a + i: block.b + i for block in blocks for i in range(block.size)})
    common = [i for i in range(len(words[0])) if all(i in match for match in matches)]
    if len(common) < _LEAST_COMMON * max(map(len, words)):
        raise Invalid("its operations differ too much from one size to another: nothing can be fitted to them")
    chosen = [common, *([match[i] for i in common] for match in matches)]
    return [[here[i] for i in picked] for here, picked in zip(every, chosen, strict=True)]


def _table(followed: Followed, indices: list[int], with_hidden: bool) -> np.ndarray:
    """(operations, columns): live bytes by category, and the highest total from each operation to the next. Without
    what these operations hide, unless `with_hidden`; what those between them hide is always in it."""
    totals = followed.totals.copy()
    if not with_hidden:
        totals[indices] = followed.trace.high[indices]
    highest = np.maximum.reduceat(totals, indices)
    return np.column_stack([followed.trace.live[indices, :TOTAL], highest]).astype(float)


# ---- what operations hide where they were not traced


def _hidden(
    followed: Sequence[Followed],
    indices: list[list[int]],
    traced_at: np.ndarray,
    wanted_at: np.ndarray,
    live: np.ndarray,
    high: np.ndarray,
    probe: "Probe",
) -> np.ndarray:
    """What the operations hide at every point on offer, by running them there: (points, operations) bytes. Only those
    are run that were seen to hide something and may hold the peak by it.

    Args:
        live, high: (points, operations): what lives when each has ended, and the highest total without what is hidden.
    """
    highest = high.max(axis=1)
    asked: dict[tuple[int, int], Operation] = {}  # by point and number of the operation
    grown: dict[tuple, tuple[float, list]] = {}  # by what was seen: each layer has the same operations
    for number, here in enumerate(zip(*indices, strict=True)):
        seen = [each.trace.operations[index] for each, index in zip(followed, here, strict=True)]
        key = tuple(map(id, seen))  # a trace has one object for all that are equal
        if key not in grown:
            share = max((probe[each].bytes or 0) / max(each.bytes, 1) for each in seen)
            grown[key] = share, _at_points(seen, traced_at, wanted_at) if share else []
        share, operations = grown[key]
        for point, there in enumerate(operations):
            # Twice the largest share seen: it jumps from size to size.
            if there and live[point, number] + 2 * share * there.bytes > highest[point]:
                asked[point, number] = there
    probe.run(sorted(asked.values(), key=lambda operation: operation.bytes))
    hidden = np.zeros(high.shape, dtype=np.int64)
    for key, operation in asked.items():
        hidden[key] = probe[operation].bytes or 0
    return hidden


def _at_points(seen: Sequence[Operation], traced_at: np.ndarray, wanted_at: np.ndarray) -> list[Operation | None]:
    """The same operation at other points: each of its lengths is a sum of terms too. None where a length would not be a
    whole number, or where the operation takes other arguments from trace to trace."""
    numbers = [operation.numbers for operation in seen]
    if len({len(each) for each in numbers}) > 1:
        return [None] * len(wanted_at)
    there = wanted_at @ _solved(traced_at, numbers)
    is_whole = (np.abs(there - there.round()) < 0.01).all(axis=1)
    return [
        seen[0].with_numbers(row.round().astype(int).tolist()) if right else None
        for row, right in zip(there, is_whole, strict=True)
    ]
