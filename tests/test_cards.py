"""GPU models: how they are found by name or figures, how large a CUDA context is, and whether a training fits a
card.
"""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainmem import cards
from trainmem.cards import CARDS, MARGIN, OF_BOARD, card, context_bytes, named
from trainmem.estimate import MemoryEstimate
from trainmem.records import Memory
from trainmem.unknown import NeedsValues, Unknown


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "give a card"),
        ({"name": "a1000"}, "Did you mean 'a100'"),
        ({"compute_capability": (8, 0)}, "memory"),
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
    assert "8.0, 14.9 GiB" in own.name
    assert card("a100", device_memory="20GiB").memory_bytes == 20 * 2**30


def test_an_unknown_context_is_none():
    assert context_bytes((8, 0)) is None
    assert (context_bytes((7, 0)), context_bytes((9, 0))) == (1341 * 2**20, 767 * 2**20)


SOLD = re.compile(r" (\d+) GiB$")  # how a name ends


def test_forty_cards_have_a_source_and_no_more_memory_than_they_are_sold_with():
    entries = tomllib.loads(Path(cards.__file__).with_name("cards.toml").read_text(encoding="utf-8"))
    assert len(CARDS) >= 40
    for key, each in CARDS.items():
        sold = int(SOLD.search(each.name)[1]) * 2**30
        assert 0.9 < each.memory_bytes / sold < 1.01, key
        assert re.search(r"issue \d+|\(.+[\d.]+ ?Mi?B", entries[key]["source"]), key
        assert (7, 0) <= each.capability <= (12, 1), key
        assert named(key) == named(each.name) == each


@pytest.mark.parametrize(
    "key, spellings",
    {
        "t4": ["T4", "Tesla T4", "NVIDIA T4"],
        "4090": ["RTX 4090", "RTX_4090", "rtx4090", "NVIDIA GeForce RTX 4090", "4090 24GB"],
        "a100": ["A100 80GB", "a100-80gb", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"],
        "a100-40": ["A100 40 GB", "A100 40 GiB", "NVIDIA A100-SXM4-40GB", "a100_40gb"],
        "v100-32": ["Tesla V100-SXM2-32GB", "V100 32GB"],
        "h100": ["NVIDIA H100 80GB HBM3"],
        "4070-ti-super": ["NVIDIA GeForce RTX 4070 Ti SUPER"],
        "4060-laptop": ["NVIDIA GeForce RTX 4060 Laptop GPU"],
    }.items(),
)
def test_a_card_is_known_by_what_people_and_torch_call_it(key, spellings):
    assert {named(spelling) for spelling in spellings} == {CARDS[key]}


@pytest.mark.parametrize("name, nearest", [("rtx 5090 ti", "5090"), ("RTX 5060 Ti", "5060-ti-16"), ("p100", "v100")])
def test_an_unknown_card_gets_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"'{nearest}'"):
        named(name)


def estimated(peak, reserved=None, capability=(7, 5), device="cuda", **more):
    memory = Memory(peak_bytes=peak, kind="estimated", reserved_bytes=reserved)
    about = {"task": {}, "arguments": {}, "assumptions": (), "seconds": 0.0, "own_bytes": None}
    return MemoryEstimate("m", device=device, memory=memory, compute_capability=capability, **about, **more)


T4 = CARDS["t4"]
ROOM = T4.memory_bytes - T4.context_bytes  # for the allocator
MARGIN_BYTES = int(MARGIN * T4.memory_bytes)


def test_fits_with_the_margin_or_does_not_and_says_both():
    fits = estimated(10**9, ROOM - MARGIN_BYTES - 1).fits("Tesla T4")
    assert fits and fits.answer is True
    words = ("fits the T4 16 GiB", "13.83 GiB", "530.0 MiB", "CUDA context", "14.56 GiB, 13.83 GiB after", "5%")
    assert all(each in repr(fits) for each in words), fits
    assert not estimated(ROOM + 1, ROOM + 1).fits(T4)
    assert "does not fit the T4" in repr(estimated(ROOM + 1).fits("t4"))


@pytest.mark.parametrize(
    "found, reason",
    [
        (estimated(10**9, ROOM - MARGIN_BYTES + 1), "without the margin"),
        (estimated(ROOM, 2 * ROOM), "cached segments"),  # what is allocated fits, what is cached does not
        (estimated(10**9, 10**9, (8, 0)), r"compute capability 8.0, not for the 7.5 of the T4.*card='T4 16 GiB'"),
        (estimated(10**9, None, None, "cpu"), "for a CPU"),
    ],
)
def test_an_answer_near_the_edge_or_for_another_card_is_unknown(found, reason):
    fits = found.fits("t4")
    assert isinstance(fits.answer, Unknown) and re.search(f"UNKNOWN.*{reason}", repr(fits))
    with pytest.raises(NeedsValues, match=reason):
        bool(fits)


def test_what_was_too_large_for_a_card_may_fit_a_larger_one():
    tight = estimated(10**9, 15 * 10**9, is_too_large=True, device_memory=ROOM)  # by fragmentation, say
    assert tight.fits("t4").answer is False
    assert tight.fits("Quadro RTX 8000").answer is True


def test_a_card_of_which_only_the_board_is_known_keeps_more_free():
    known = dataclasses.replace(T4, is_board=True)
    size = int(T4.memory_bytes * (1 - MARGIN) * OF_BOARD) - T4.context_bytes
    assert estimated(1, size).fits(known) and isinstance(estimated(1, size + 2).fits(known).answer, Unknown)
    reported = repr(estimated(1, size).fits(known))
    assert "the board has" in reported and "6%" in reported
    assert not any(each in repr(estimated(1).fits(T4)) for each in ("board", "6%"))


def test_the_three_lines_need_neither_a_gpu_nor_bitsandbytes():
    code = "import sys; sys.modules['bitsandbytes'] = None; from trainmem.estimate import estimate"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": ""})
    assert done.stdout == "False\n", done.stderr
