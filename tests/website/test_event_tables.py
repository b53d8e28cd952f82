"""Tables of events: a block's bytes become a polynomial in micro-batch and length; traces that cannot be written so are
refused.
"""

import shutil
import sys
from pathlib import Path

import pytest
from test_events_js import answers

from trainmem import cards
from trainmem.estimate.allocator_replay import replayed
from trainmem.estimate.trace_records import Label, Log

sys.path.append(str(Path(__file__).parents[2] / "website"))
from event_tables import Events, Unfit, fitted, powers, table

POINTS = ((2, 1), (3, 3), (5, 2), (7, 4), (64, 8))


@pytest.mark.parametrize(
    "sum_", [(4096, 0, 0, 0, 0, 0), (0, 0, 0, -7, 9, 0), (0, 0, 0, 0, 12, 5), (8, 0, 256, 0, 0, 0)]
)
def test_the_one_sum_of_powers_is_found(sum_):
    values = tuple(sum(factor * power for factor, power in zip(sum_, powers(point), strict=True)) for point in POINTS)
    assert fitted(values, POINTS) == sum_
    wrong = (*values[:-1], values[-1] + 512)
    with pytest.raises(Unfit, match="no sum of two powers"):
        fitted(wrong, POINTS)


def test_what_no_whole_numbers_make_is_refused():
    halves = tuple(3 * size * length // 2 for size, length in ((2, 1), (4, 3), (6, 2)))
    with pytest.raises(Unfit, match="no sum of two powers"):
        fitted(halves, ((2, 1), (4, 3), (6, 2)))


def test_of_one_micro_batch_only_the_length_counts():
    assert fitted((11, 44, 176), ((1, 1), (1, 2), (1, 4))) == (0, 0, 11, 0, 0, 0)


def events(point, order, label="backward"):
    kinds = [
        (1000, Label("a", "weights", "setup", "layer.7.ln_1")),
        (8 * point[0], Label("b", "gradients", label, "layer.7.ln_1")),
    ]
    return Events([(*kinds[number % 2], None) for number in range(4)], order, [("start", 2)])


def test_a_free_names_a_block_by_its_age_among_its_kind():
    order = [0, 1, 2, 3, ~1, ~2, ~0]
    made = table({point: events(point, order) for point in POINTS})
    assert made["labels"] == [[0, "forward", "a", "layer.*.ln_1"], [4, "backward", "b", "layer.*.ln_1"]]
    assert made["sums"] == [[1000, 0, 0, 0, 0, 0], [0, 0, 0, 8, 0, 0]]
    assert (made["tokens"], made["ranks"]) == ([0, 1, 0, 1, ~1, ~0, ~0], [-1, 0, 0])


def test_points_whose_events_differ_make_no_table():
    order = [0, 1, 2, 3, ~1]
    other = {**{point: events(point, order) for point in POINTS}, (9, 1): events((9, 1), [0, 1, 2, ~1, 3])}
    with pytest.raises(Unfit, match=r"at \(9, 1\) the events are others"):
        table(other)
    named = {**{point: events(point, order) for point in POINTS}, (9, 1): events((9, 1), order, "step")}
    with pytest.raises(Unfit, match="block 1"):
        table(named)


@pytest.mark.skipif(not shutil.which("node"), reason="no node: apt-get install nodejs")
def test_where_what_is_free_is_given_back_the_page_does_so():
    """The calculator page's model of the allocator returns free segments to the device when the trace empties the
    cache, like the package's model. This happens while a 4-bit model is loaded: the segments of its 16-bit weights are
    returned before the training needs memory.
    """
    size, kept = 30 * 2**20, 10 * 2**20
    blocks = [(size, Label("a", "temporaries", "setup", "")), *[(kept, Label("b", "weights", "setup", ""))] * 2]
    order, marks, card, found = [0, ~0, 1, 2], [("start", 3), ("step", 4)], cards.CARDS["t4"], {}
    for emptied in ([], [2]):
        log = Log(blocks, order, marks, tuple(emptied))
        traced = {point: Events([(*each, None) for each in blocks], order, marks, emptied) for point in POINTS}
        where = {"capability": card.capability, "capacity": card.memory_bytes, "context": 0}
        where |= {"memory": card.memory_bytes, "limit": card.limit_bytes}
        given = {"recipe": {"parts": [{"least": 1} | table(traced)]}, "card": where, "categories": 1}
        (answer,) = answers([("memory", given | {"sizes": {"batch": 1, "length": 128, "expandable": False}})])
        found[bool(emptied)] = answer["reservedBytes"]
        assert answer["reservedBytes"] == replayed(log).reserved_peak
    assert found[True] != found[False]
