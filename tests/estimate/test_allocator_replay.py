"""Replay a log of allocations and frees on the allocator: peaks since the first forward pass, phases, and a card that
is too small.
"""

import numpy as np
import pytest

from trainmem.estimate import allocator_replay
from trainmem.estimate.trace_records import Label, Log, highest

MIB = 1 << 20
WEIGHT = Label("aten.empty.memory_format", "weights", "setup", "")
ACTIVATION = Label("aten.mm.default", "activations", "forward", "layer.*")
SCRATCH = Label("aten.sum.dim_IntList", "inside_operations", "backward", "")
# 30 MiB while it is loaded, a weight of 4, then activations of 11 and 1.5; the scratch makes the peak.
LOG = Log(
    [(30 * MIB, WEIGHT), (4 * MIB, WEIGHT), (11 * MIB, ACTIVATION), (3 * MIB // 2, ACTIVATION), (100, SCRATCH)],
    [0, ~0, 1, 2, 3, 4, ~4, ~3],
    [("start", 3), ("forward", 5), ("backward", 8)],
)


def test_peaks_count_from_the_first_forward_on():
    found = allocator_replay.replayed(LOG)
    memory = found.memory()
    # 4 and 11 MiB are cut from the free segment of 30 MiB, 1.5 too: what is left of it is larger than 1 MiB.
    assert memory.peak_bytes == (4 + 11) * MIB + 3 * MIB // 2 + 512
    assert memory.reserved_bytes == 30 * MIB + 2 * MIB
    assert (memory.peak_operation, memory.peak_phase) == ("aten.sum.dim_IntList", "backward")
    assert memory.phases == {"forward": (4 + 11) * MIB + 3 * MIB // 2, "backward": (4 + 11) * MIB}


def test_parts_sum_to_the_peak_and_scratch_lies_inside_operations():
    breakdown = allocator_replay.replayed(LOG).memory().breakdown
    assert breakdown["weights"] == 4 * MIB and breakdown["activations"] == 11 * MIB + 3 * MIB // 2
    assert breakdown["inside_operations"] == 512


def test_the_unsplit_rest_of_a_block_is_allocated():
    # 30 MiB are free; a block of 29.5 takes them whole, for less than 1 MiB would be left.
    log = Log([(30 * MIB, WEIGHT), (59 * MIB // 2, ACTIVATION)], [0, ~0, 1], [("start", 2)])
    assert allocator_replay.replayed(log).memory().peak_bytes == 30 * MIB


def test_a_card_that_is_too_small_is_reported_with_the_figures_of_a_large_one():
    assert not allocator_replay.replayed(LOG, capacity=32 * MIB).is_too_large
    small = allocator_replay.replayed(LOG, capacity=31 * MIB)
    assert small.is_too_large and small.reserved_peak == allocator_replay.replayed(LOG).reserved_peak


def test_near_a_full_card_cached_segments_are_given_back():
    log = Log([(30 * MIB, WEIGHT), (40 * MIB, ACTIVATION)], [0, ~0, 1], [("start", 2)])
    assert allocator_replay.replayed(log).reserved_peak == 70 * MIB
    found = allocator_replay.replayed(log, capacity=50 * MIB)
    assert not found.is_too_large and found.reserved_peak == 40 * MIB


def test_settings_are_torchs():
    # Two pages of 20 MiB and one of 2 for what is small.
    assert allocator_replay.replayed(LOG, "expandable_segments:True").reserved_peak == 42 * MIB
    with pytest.raises(ValueError, match="expandable_segments"):
        allocator_replay.replayed(LOG, "expandable:True")


def test_the_highest_during_each_operation():
    assert (highest(allocator_replay.replayed(LOG).allocated, np.array([3, 5, 8])) // MIB).tolist() == [16, 16]


def test_nothing_at_all_is_no_error():
    log = Log([(100, ACTIVATION)], [0], [])
    assert allocator_replay.replayed(log).memory().peak_bytes == 512
