"""Traces of one recipe at several points: which operations they have in common, and what is a sum of what."""

import numpy as np
import pytest

from perf_helpers.estimate import peak_fit
from perf_helpers.estimate.operator_workspaces import Hidden
from perf_helpers.estimate.trace_records import Operation, Spec, Trace
from perf_helpers.lab.outcomes import Invalid
from perf_helpers.records import TENSOR_CATEGORIES, Phase


def trace(*operations, phase=Phase.FORWARD):
    """Of operations given as (name, module)."""
    zeros = np.zeros(len(operations), dtype=np.int64)
    return Trace(
        operations=[Operation(f"aten.{name}", (), (0, (), ()), False) for name, _ in operations],
        phases=[phase] * len(operations),
        modules=[module for _, module in operations],
        live=np.zeros((len(operations), len(TENSOR_CATEGORIES)), dtype=np.int64),
        high=zeros,
        marks={},
        parameters=0,
        trainable=0,
        last_step=(0, len(operations)),
        begins=np.arange(len(operations) + 1),
    )


MM, ADD, VIEW = "mm.default", "add.Tensor", "view.default"


def test_operations_are_aligned_by_name_and_module_where_kernels_and_views_differ():
    many = [(MM, f"layer.{n}") for n in range(30)]
    one = trace(*many, (ADD, "head"), (VIEW, "head"), (MM, "loss"))
    other = trace((VIEW, "layer.0"), *many, (MM, "head"), (MM, "loss"))
    assert peak_fit.aligned([one, other]) == [[*range(30), 32], [*range(1, 31), 32]]


def test_other_trainings_are_refused():
    with pytest.raises(Invalid, match="estimate each size"):
        peak_fit.aligned([trace((MM, "a"), (ADD, "a")), trace((MM, "a"), (ADD, "b"))])


def test_what_fetches_data_holds_no_peak():
    both = [trace((MM, "a"), phase=phase) for phase in (Phase.BEFORE, Phase.SETUP)]
    assert peak_fit.aligned(both) == [[], []]


def test_there_are_as_many_terms_as_a_recipe_is_traced_at_points():
    points = [(size, length) for size in (2, 16) for length in (32, 128, 512)]
    matrix = np.stack([peak_fit.terms(*point) for point in points])
    assert np.linalg.matrix_rank(matrix) == len(points)
    images = np.stack([peak_fit.terms(size, None) for size in (2, 4)])
    assert np.linalg.matrix_rank(images) == 2


def test_an_operation_at_another_point_has_the_lengths_that_it_would_have_there():
    import torch

    def at(size, length, scale=0.125):
        tensor = Spec((size, length, 8), (length * 8, 8, 1), torch.float32)
        return Operation("aten.mul.Scalar", (tensor, scale), (2, (), (-1, -1)), False, size * length * 32)

    points, wanted = [(size, length) for size in (2, 16) for length in (32, 128, 512)], [(4, 64), (256, 8192)]
    traced_at, wanted_at = (np.stack([peak_fit.terms(*point) for point in each]) for each in (points, wanted))
    hides = {at(size, length): Hidden(64, "measured") for size, length in points}
    uneven = [at(size, length + (length == 128)) for size, length in points]
    hides |= dict.fromkeys(uneven, Hidden(64, "measured"))
    bytes_there = np.array([[at(*point).bytes] for point in wanted])
    there = peak_fit._may_be_peak(
        [(at(*point), other) for point, other in zip(points, uneven, strict=True)],
        *(traced_at, wanted_at, np.repeat(bytes_there, 2, axis=1), np.repeat(bytes_there, 2, axis=1), hides),
    )
    assert [there[number, 0] for number in range(2)] == [at(*point) for point in wanted]
    assert (0, 1) not in there, "a length that would be no whole number"


def test_what_is_hidden_lies_on_straight_lines_between_points_on_offer():
    points = [[size, length] for size in (4, 8) for length in (64, 128)]
    nothing = [[[0.0] * (peak_fit.TOTAL + 1)]]
    surface = peak_fit.Surface([("forward", "mm")], [False], nothing, [[a * b] for a, b in points], points, 0)
    hidden = [surface.at(*point)[0, peak_fit.TOTAL] for point in ((4, 64), (6, 100), (8, 128), (2, 32), (99, 100))]
    assert hidden == [4 * 64, 6 * 100, 8 * 128, 4 * 64, 8 * 100], "beyond them all the last one's"
    images = peak_fit.Surface([("forward", "mm")], [False], nothing, [[10], [30]], [[1, None], [3, None]], 0)
    assert images.at(2, None)[0, peak_fit.TOTAL] == 20
