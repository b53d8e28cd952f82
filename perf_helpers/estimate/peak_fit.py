"""A surface fitted in the clean process: the bytes at each operation over micro-batch and length, from a few traces.

At each operation of a training there live bytes that grow in a straight line with the micro-batch and at most with the
square of the length. Six traces of a recipe therefore fix them everywhere (two where there is no length). What an
operation hides inside itself follows no such curve: it is asked for at every point on offer.
"""

import contextlib
import os
from collections import Counter
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

INPUTS, STATES = (TENSOR_CATEGORIES.index(each) for each in (Category.INPUTS, Category.OPTIMIZER_STATES))
TOTAL = len(TENSOR_CATEGORIES)  # the column after the categories that are followed: the total
_LEAST_COMMON = 0.95  # share of the operations that all traces must have


@dataclass(frozen=True, slots=True)
class Surface:
    """The operations of one recipe that hold the peak somewhere. Columns are the categories that are followed, and the
    total, in bytes. The names are those of the file."""

    where: list  # (phase, name) of each operation
    updates: list[bool]  # whether it belongs to the optimizer's update; in inference to the second pass, of one token
    coefficients: list  # (terms, operations, columns): what `terms` are multiplied by
    hidden: list  # (points, operations): bytes inside the operation at each of the points on offer
    points: list  # on offer
    states: int  # bytes of the optimizer's states

    def at(self, micro_batch: int, seq_len: int | None) -> np.ndarray:
        """(operations, columns) at a point; what is hidden is on straight lines between points on offer."""
        columns = np.tensordot(terms(micro_batch, seq_len)[: len(self.coefficients)], self.coefficients, axes=1)
        near = np.ones(len(self.points))  # how much each point on offer counts
        for offered, wanted in zip(zip(*self.points, strict=True), (micro_batch, seq_len or 0), strict=True):
            values, which = np.unique([each or 0 for each in offered], return_inverse=True)
            near *= np.array([np.interp(wanted, values, alone) for alone in np.eye(len(values))])[which]
        columns[:, TOTAL] = np.maximum(columns[:, TOTAL], columns[:, :TOTAL].sum(axis=1) + near @ self.hidden)
        return columns


def terms(micro_batch: int, seq_len: int | None) -> np.ndarray:
    """What an operation's bytes are a sum of: (terms,), scaled to be near 1. Of what was traced at fewer points, the
    first: at one it is the same everywhere."""
    size, length = micro_batch / 64, (seq_len or 0) / 1024
    powers = [1] if seq_len is None else [1, length, length**2]
    return np.array([*powers, *(size * power for power in powers)], dtype=float)


def fit(
    experiments: Sequence[Experiment],
    device: Device,
    points: Sequence[Point],
    offered: Sequence[Point],
    probe: "Probe",
    tell: Tell,
) -> tuple[Surface, list[Memory]]:
    """The surface through the trainings of one recipe at some points, and their memories, without timelines. `offered`:
    points at which answers will be asked for. To be called by `prediction.with_known`.

    Raises:
        Invalid: a training cannot be followed, or their operations differ too much from one point to another.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.nice(19)  # nobody waits for it, and others may be measuring
    followed = follow_all(experiments, device, probe, tell)
    trace, indices = followed[0].trace, aligned([each.trace for each in followed])
    traced_at, wanted_at = (np.stack([terms(*point)[: len(points)] for point in each]) for each in (points, offered))
    coefficients = _solved(traced_at, [_table(each, here) for each, here in zip(followed, indices, strict=True)])
    live, high = wanted_at @ coefficients[:, :, :TOTAL].sum(axis=2), wanted_at @ coefficients[:, :, TOTAL]
    hidden = np.zeros(high.shape, dtype=np.int64)  # (points on offer, operations), as are `live` and `high`
    operations = [[each.trace.operations[i] for i in here] for each, here in zip(followed, indices, strict=True)]
    asked = _may_be_peak(operations, traced_at, wanted_at, live, high, probe) if device.kind == "cpu" else {}
    probe.run(sorted(asked.values(), key=lambda operation: operation.bytes))
    for place, operation in asked.items():
        hidden[place] = probe[operation].bytes or 0
    is_update = np.array([trace.phases[index] == Phase.STEP for index in indices[0]])
    if Phase.BACKWARD not in trace.marks:  # inference: a prompt's pass and one token's in turn
        forward = np.array([phase == Phase.FORWARD for phase in trace.phases])
        is_update = np.cumsum(forward & ~np.roll(forward, 1))[indices[0]] % 2 == 0
    # Kept are the operations that hold the peak, of the passes or of the update, at any point on offer.
    heights = np.maximum(high, live + hidden)
    groups = [np.flatnonzero(group) for group in (is_update, ~is_update)]
    kept = sorted({int(group[i]) for group in groups if len(group) for i in heights[:, group].argmax(axis=1)})
    places = [indices[0][number] for number in kept]
    surface = Surface(
        where=[(trace.phases[place].shown, trace.operations[place].name) for place in places],
        updates=is_update[kept].tolist(),
        coefficients=coefficients[:, kept].tolist(),
        hidden=hidden[:, kept].tolist(),
        points=list(offered),
        states=int(trace.live[:, STATES].max()),
    )
    return surface, [replace(memory_of(each), timeline=None) for each in followed]


def aligned(traces: Sequence[Trace]) -> list[list[int]]:
    """For each trace the indices of the operations that all of them have: the first of a name in a module and a phase,
    the second, and so on. Which kernel is chosen, how data are fetched and what is a view differs here and there.
    Raises Invalid where they have hardly the same operations."""
    every: list[dict[tuple, int]] = []
    for trace in traces:
        seen, found = Counter(), {}
        for index, (phase, operation, module) in enumerate(
            zip(trace.phases, trace.operations, trace.modules, strict=True)
        ):
            if phase in (Phase.SETUP, Phase.BEFORE) or operation.is_view:
                continue  # what is done there holds no peak, and no view does
            place = phase, operation.name, module
            found[*place, seen[place]] = index
            seen[place] += 1
        every.append(found)
    common = [place for place in every[0] if all(place in found for found in every)]
    if len(common) < _LEAST_COMMON * max(map(len, every)):
        raise Invalid("its operations differ too much between sizes to interpolate: estimate each size by itself")
    return [[found[place] for place in common] for found in every]


def _table(followed: Followed, indices: list[int]) -> np.ndarray:
    """(operations, columns): live bytes by category, and the highest total from each operation to the next. Without
    what these operations hide; what those between them hide is in it."""
    totals = followed.totals.copy()
    totals[indices] = followed.trace.high[indices]
    return np.column_stack([followed.trace.live[indices, :TOTAL], np.maximum.reduceat(totals, indices)]).astype(float)


def _solved(traced_at: np.ndarray, values: Sequence) -> np.ndarray:
    """The coefficients of the terms, for values of any shape at each of the points traced: (terms, *shape)."""
    stacked = np.stack(values)
    return np.linalg.solve(traced_at, stacked.reshape(len(stacked), -1)).reshape(stacked.shape)


def _may_be_peak(
    operations: Sequence[Sequence[Operation]],
    traced_at: np.ndarray,
    wanted_at: np.ndarray,
    live: np.ndarray,
    high: np.ndarray,
    probe: "Probe",
) -> dict[tuple[int, int], Operation]:
    """The operations that may hold the peak of a point on offer by what they hide, as they are there, by (point, number
    of the operation): each of their lengths is a sum of terms too. Left out is what takes other arguments from trace to
    trace, or would have a length that is no whole number.

    Args:
        operations: of each trace.
        live, high: (points, operations): what lives when each has ended, and the highest total without what is hidden.
    """
    found, highest = {}, high.max(axis=1)
    for number, seen in enumerate(zip(*operations, strict=True)):
        share = max((probe[each].bytes or 0) / max(each.bytes, 1) for each in seen)
        if not share or len({len(each.numbers) for each in seen}) > 1:
            continue
        numbers = wanted_at @ _solved(traced_at, [each.numbers for each in seen])
        sizes = wanted_at @ _solved(traced_at, [each.bytes for each in seen])
        is_whole = (np.abs(numbers - numbers.round()) < 0.01).all(axis=1)
        # Twice the largest share seen: it jumps from size to size.
        for point in np.flatnonzero(is_whole & (live[:, number] + 2 * share * sizes > highest)).tolist():
            found[point, number] = seen[0].with_numbers(numbers[point].round().astype(int).tolist())
    return found
