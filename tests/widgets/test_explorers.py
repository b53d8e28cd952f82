"""A picture with a control for each argument of the function that draws it."""

import pytest
from kernel import alive

from perf_helpers import widgets


def test_a_control_redraws_and_a_cell_run_again_leaves_one_box(shown):
    drawn = []

    def draw(batch, steps):
        if batch == 3:
            raise ZeroDivisionError("the third is broken")
        drawn.append((batch, steps))

    widgets.explore(draw, batch=[1, 2, 3], steps=[4, 8])
    count = len(alive())
    box = widgets.explore(draw, batch=[1, 2, 3], steps=[4, 8])
    assert len(alive()) == count
    widgets.explore(lambda batch: None, batch=[1, 2])
    assert len(alive()) > count  # another one does not close it
    batch, steps, _ = box.children
    steps.value = 8
    batch.value = 2
    assert drawn == [(1, 4), (1, 4), (1, 8), (2, 8)]
    with pytest.raises(ZeroDivisionError):  # an error in it is not swallowed
        batch.value = 3


def test_a_choice_without_values_is_refused():
    with pytest.raises(ValueError, match="is empty: give"):
        widgets.explore(lambda batch: None, batch=[])
