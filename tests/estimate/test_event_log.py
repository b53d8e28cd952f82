"""The log of births and deaths, as it is taken from a tracker."""

from types import SimpleNamespace

from perf_helpers.estimate import event_log
from perf_helpers.lab.tracker import Block


def test_a_tracker_is_recorded_until_its_last_birth_or_mark():
    one, other = (Block(size, "weights", "aten.empty") for size in (3, 5))
    log = event_log.recorded(
        SimpleNamespace(
            log=[(one, 1), (other, 1), (one, -1), (other, -1)],
            operations=[(1, "setup", "", ""), (3, "forward", "", "layers.1.mlp")],
            marks=[("start", 1, 1), ("forward", 3, 2)],
            emptied=[1],
        )
    )
    assert [size for size, _ in log.blocks] == [3, 5] and log.events == [0, 1, ~0]
    assert [label.phase + label.module for _, label in log.blocks] == ["setup", "forwardlayers.1.mlp"]
    assert log.marks == [("start", 1), ("forward", 3)] and log.emptied == (1,)
