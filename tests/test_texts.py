"""Numbers, sizes and names as text: the same everywhere, and an unknown value is never shown as a number."""

import pytest

from trainmem import cards, texts
from trainmem.unknown import Unknown


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1 / 3, "x", "0.3333 x"),
        (12345.6, "MB", "12,346 MB"),
        (0, "", "0"),
        (-2500, "", "-2,500"),
        (65504.0, "", "65,504"),
        (2.5e9, "", "2.5e+09"),
        (None, "MB", "not measured"),
        (Unknown(), "x", "not measured"),
    ],
)
def test_a_number_is_shown_in_four_digits_or_whole(value, unit, text):
    assert texts.number_text(value, unit) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.534, "2.53 W"), (75.34, "75.3 W"), (412.6, "413 W"), (1980.4, "1,980 W"), (0.04567, "0.0457 W")],
)
def test_a_number_has_as_many_digits_as_requested_or_is_whole(value, text):
    assert texts.number_text(value, "W", digits=3) == text


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        ("backward", "during the backward pass"),
        ("step", "during the optimizer update"),
        (None, "during an unknown phase"),
        ("gathering", "during gathering"),
    ],
)
def test_the_phase_of_a_peak_is_named_in_words(phase, text):
    assert texts.phase_text(phase) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "not measured"),
        (Unknown(), "not measured"),
        (0, "0 B"),
        (1536, "1.5 kB"),
        (198_395_296, "198.4 MB"),
        (14_949_000_000, "14.95 GB"),
    ],
)
def test_bytes_are_shown_in_a_persons_unit(size, text):
    assert texts.bytes_text(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "not measured"), (512, "512 B"), (1536, "1.5 KiB"), (530 << 20, "530.0 MiB"), (24 << 30, "24.00 GiB")],
)
def test_bytes_beside_a_card_are_in_the_units_that_cards_are_sold_in(size, text):
    assert texts.bytes_text(size, binary=True) == text


def test_no_card_is_named_in_decimal_units_and_old_names_are_still_known():
    for key, card in cards.CARDS.items():
        assert card.name.endswith(" GiB") and cards.named(card.name.replace("GiB", "GB")) == cards.CARDS[key]
    assert all(name.endswith(" GiB") for name in cards.SIZES)


@pytest.mark.parametrize(("largest", "unit"), [(100, "kB"), (1.9e6, "kB"), (2e6, "MB"), (1.9e9, "MB"), (2e9, "GB")])
def test_an_axis_of_bytes_has_more_than_one_whole_number(largest, unit):
    assert texts.bytes_unit(largest)[1] == unit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "not measured"), (Unknown(), "not measured"), (90, "90 s"), (0.0123, "12.3 ms"), (4e-6, "4 µs")],
)
def test_seconds_are_shown_in_a_persons_unit(seconds, text):
    assert texts.seconds_text(seconds) == text


def test_parts_are_named_as_in_a_legend_and_without_those_that_are_empty():
    parts = {"weights": 10, "optimizer_states": 2_000_000, "inputs": 0}
    assert texts.parts_text(parts) == "weights 10 B, optimizer states 2.0 MB"


def test_an_unknown_word_is_answered_with_the_nearest_or_with_all():
    assert texts.nearest_text("optimm", ["optim", "bf16", *(f"x{i}" for i in range(9))]) == "Did you mean 'optim'?"
    assert texts.nearest_text("zzz", ["b", "a"]) == "Choose from a, b."
    many = texts.nearest_text("zzz", [f"a-long-name-{n:02}" for n in range(99)])
    assert many.startswith("Choose from a-long-name-00, ") and many.endswith(", and more.") and len(many) < 520


@pytest.mark.parametrize(("memory", "size"), [("16GB", 16 * 10**9), ("16 GiB", 2**34), (5e6, 5_000_000)])
def test_bytes_are_read_from_text(memory, size):
    assert texts.parse_bytes(memory) == size


@pytest.mark.parametrize("memory", ["16", "16 gb", "-1GB", True, float("nan"), "1kB"])
def test_bytes_that_are_none_are_refused_with_an_example(memory):
    with pytest.raises(ValueError, match="such as '16GB'"):
        texts.parse_bytes(memory)
