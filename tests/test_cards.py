"""Kinds of GPU: by name, by their figures, and what their contexts take."""

import pytest

from perf_helpers.cards import CARDS, card, context_bytes


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "name a card"),
        ({"name": "a1000"}, "Did you mean 'a100'"),
        ({"compute_capability": (8, 0)}, "and a memory"),
        ({"compute_capability": (5, 2), "device_memory": "16GB"}, "compute capability 5.2"),
        ({"name": "t4", "device_memory": "16 apples"}, "16GiB"),
        ({"name": "t4", "devices": 0}, "devices=0"),
    ],
)
def test_a_card_that_is_none_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        card(**given)


def test_a_card_by_name_by_its_figures_and_by_both():
    assert card("T4") == CARDS["t4"]
    own = card(compute_capability=(8, 0), device_memory="16GB", devices=2)
    assert (own.capability, own.memory_bytes, own.devices) == ((8, 0), 16_000_000_000, 2)
    assert "8.0, 16 GB" in own.name
    assert card("a100", device_memory="20GiB").memory_bytes == 20 * 2**30


def test_an_unknown_context_is_none():
    assert context_bytes((9, 0)) is None
    assert context_bytes((7, 0)) == 1341 * 2**20
