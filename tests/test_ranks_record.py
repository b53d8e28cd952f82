"""Check results/ranks.json: the memory of a rank of 2 or 4 rehearsed GPUs, next to the estimate and ZeRO's formulas."""

import json
from pathlib import Path

import pytest
from scripts import script

RECORD = json.loads((Path(__file__).parents[1] / "results" / "ranks.json").read_text(encoding="utf-8"))
TRAINED = [row for row in RECORD["rows"] if "rehearsed" in row]
FOLLOWED = [row for row in TRAINED if "estimated" in row]


def test_every_setup_was_tried_on_two_and_on_four():
    setups = {name for name, _, _ in script("measure_ranks").SETUPS}
    assert {(row["setup"], row["ranks"]) for row in RECORD["rows"]} == {(name, n) for name in setups for n in (2, 4)}
    assert RECORD["trained"] == len(TRAINED) >= 30 and RECORD["followed"] == len(FOLLOWED) >= 28


def test_allocated_and_reserved_are_equal_to_the_byte_but_for_one_number_of_zero_3():
    for row in FOLLOWED:
        assert row["estimated"]["reserved"] == row["rehearsed"]["reserved"], row["setup"]
        off = row["estimated"]["allocated"] - row["rehearsed"]["allocated"]
        assert off == (-512 if row["setup"].startswith("DeepSpeed, stage 3") else 0), row["setup"]


def test_a_rank_keeps_what_the_formula_says():
    for row in TRAINED:
        if row["arguments"].get("gradient_accumulation_steps") is None and "deepspeed" not in row["arguments"]:
            assert row["kept"] == pytest.approx(row["formula"], rel=0.05, abs=0.001), row["setup"]


def test_a_rank_of_deepspeed_keeps_the_formulas_states_and_a_copy_of_its_share():
    rows = [row for row in FOLLOWED if row["setup"] in (f"DeepSpeed, stage {stage}" for stage in (1, 2, 3))]
    assert len(rows) == 6
    for row in rows:
        (weights, _, states), (by_formula, _, by_formula_states) = row["kept"], row["formula"]
        copy = 4 / row["ranks"] if by_formula == 4 else 0  # stage 3 has it elsewhere
        assert states == pytest.approx(by_formula_states, rel=0.01)
        assert weights == pytest.approx(by_formula + copy, rel=0.01)


def test_what_is_kept_on_the_host_is_rehearsed_and_not_traced():
    rows = [row for row in TRAINED if "estimated" not in row]
    assert rows and all("rehearse it" in row["estimate_error"] for row in rows)
    assert all(row["kept"][2] < 0.01 for row in rows)


def test_what_does_not_train_fails_alike():
    failed = [row for row in RECORD["rows"] if "rehearsed" not in row]
    for row in failed:
        words = row["error"].split(": ", 2)[-1].split(" (line ")[0]
        assert words[:60] in row["estimate_error"], (row["setup"], row["error"], row["estimate_error"])


def test_the_page_has_every_row():
    page = script("cuda_page").ranks()
    assert page.count("\n| ") == len(TRAINED) + 1 and f"in {RECORD['equal']} of {RECORD['followed']}" in page
