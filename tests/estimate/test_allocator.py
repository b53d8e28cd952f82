"""The caching allocator's segments against those counted by hand, and the workspaces and contexts that are known."""

import itertools
import random

import pytest

from perf_helpers.estimate import allocator
from perf_helpers.estimate.allocator import MIB, CachingAllocator


def reserved(*sizes):
    return allocator.reserved_peak((key, size, 1) for key, size in enumerate(sizes))


def test_blocks_are_multiples_of_512_bytes():
    assert [allocator.rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([10 * MIB - 512], 20 * MIB),
        ([10 * MIB], 10 * MIB),
        ([10 * MIB + 1], 12 * MIB),
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB),
        ([9 * MIB, 10 * MIB - 512, MIB + 512], 20 * MIB),  # a rest of more than 1 MiB is split off,
        ([9 * MIB, 10 * MIB, MIB + 512], 40 * MIB),  # one of 1 MiB stays with its block,
        ([9 * MIB, 10 * MIB - 512, MIB], 22 * MIB),  # and a small request never looks there
        ([0], 0),
    ],
)
def test_the_segments_of_requests_are_those_counted_by_hand(sizes, expected):
    assert reserved(*sizes) == expected


def test_a_rest_of_1_mib_counts_with_its_block():
    memory = CachingAllocator()
    memory.allocate("first", 9 * MIB)
    memory.allocate("second", 10 * MIB)
    assert memory.allocated_bytes == 20 * MIB


def test_the_smallest_free_block_that_fits_is_taken():
    log = [("a", 30 * MIB, 1), ("b", 20 * MIB, 1), ("a", 0, -1), ("b", 0, -1), ("c", 18 * MIB, 1), ("d", 30 * MIB, 1)]
    assert allocator.reserved_peak(log) == 50 * MIB


def test_free_neighbours_are_joined():
    log = [(key, 5 * MIB, 1) for key in "abcd"] + [("b", 0, -1), ("c", 0, -1), ("e", 9 * MIB, 1)]
    assert allocator.reserved_peak(log) == 20 * MIB
    log[4:6] = [("a", 0, -1), ("c", 0, -1)]
    assert allocator.reserved_peak(log) == 40 * MIB


def test_a_key_is_born_once():
    with pytest.raises(ValueError, match="key='a' is born twice"):
        allocator.reserved_peak([("a", 1, 1), ("a", 1, 1)])


@pytest.mark.parametrize("seed", range(20))
def test_blocks_never_overlap_and_everything_joins_again(seed):
    chance, memory, live = random.Random(seed), CachingAllocator(), {}
    for key in range(300):
        if live and chance.random() < 0.45:
            memory.free(gone := chance.choice([*live]))
            del live[gone]
        else:
            live[key] = int(2 ** chance.uniform(0, 26))
            memory.allocate(key, live[key])
        used = [(first, end - first) for first, end, _ in memory._used.values()]
        free = [(first, size) for pool in (memory._small, memory._large) for size, first in pool]
        blocks = sorted(used + free)
        assert {b - a - size for (a, size), (b, _) in itertools.pairwise(blocks)} <= {0, 1}, "a gap or an overlap"
        assert sum(size for _, size in blocks) == memory.reserved_bytes
        assert memory.allocated_bytes == sum(size for _, size in used) >= sum(live.values())
        assert all(end - first - allocator.rounded(live[key]) <= MIB for key, (first, end, _) in memory._used.items())
    for key in live:
        memory.free(key)
    assert memory.allocated_bytes == 0
    whole = sorted((first, size) for size, first in (*memory._small, *memory._large))
    assert all(a + size + 1 == b for (a, size), (b, _) in itertools.pairwise(whole)), "segments, one after the other"
    assert {size for size, _ in memory._small} == {2 * MIB}
    assert sum(size for _, size in whole) == memory.reserved_bytes


def test_the_workspaces_of_cublas_are_two_in_a_training():
    assert allocator.workspace_bytes((8, 0), training=False) == 8_519_680
    assert allocator.workspace_bytes((8, 0)) == 2 * 8_519_680
    assert [allocator.workspace_bytes((major, 0)) for major in (9, 10, 12)] == [64 * MIB] * 3


def test_an_unknown_context_is_none():
    assert allocator.context_bytes((9, 0)) is None
    assert allocator.context_bytes((7, 0)) == 1341 * MIB
