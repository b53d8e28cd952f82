"""Speeds for the advisor: measured here, otherwise on the nearest recorded machine, otherwise from the guides; and the
order of the recipes by these speeds.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from perf_helpers.course import published_speedups
from trainmem.records import Timing
from trainmem.unknown import Unknown

MB = 10**6


@pytest.fixture
def recorded(followed, monkeypatch, tmp_path):
    """Let the advisor use the speed-ups of one recorded CPU, on whatever CPU the tests run.

    Return {claim id: value measured on the recorded CPU}.
    """
    folder = tmp_path / "intel-xeon-2-cores"
    shutil.copytree(Path(__file__).resolve().parents[2] / "results/intel-xeon-2-cores", folder)
    monkeypatch.setattr(published_speedups, "RECORDED", tmp_path)
    path = max(folder.glob("*.json"))
    data = json.loads(path.read_text())
    for claim in data["claims"]:
        if claim["id"] == "adafactor-cost":
            claim["interval"] = [0.9, 1.1]
    path.write_text(json.dumps(data))
    return {claim["id"]: claim["value"] for claim in data["claims"]}


@pytest.fixture
def by_name(ask):
    """Return a function that takes runs and returns {recipe: relative speed}, as `advise` derives it from the runs.
    8-bit Adam is left out, because its speed on a CPU was never measured.
    """
    return lambda runs, memory=420: {
        recipe.name: recipe.speed
        for recipe in ask(memory=memory * MB, avoid=["adamw_bnb_8bit"], runs=list(runs)).recipes
    }


SILENT = {"AdamW, 2 x 32": 1.0, "checkpointing, AdamW, 64 x 1": None, "Adafactor, 16 x 4": None}


def test_speed_is_what_runs_of_this_machine_say_and_unknown_where_they_are_silent(by_name, pairs):
    assert by_name([]) == SILENT
    slower = by_name(pairs(5.0, gradient_checkpointing=True))
    assert slower["checkpointing, AdamW, 64 x 1"] == 0.5 and slower["Adafactor, 16 x 4"] is None
    assert by_name(pairs(5.0, count=2, gradient_checkpointing=True)) == SILENT, "two pairs are not told from noise"
    alike = by_name(pairs(9.0, gradient_checkpointing=True))
    assert alike["checkpointing, AdamW, 64 x 1"] == 1.0, "10 % is too small to tell"


def test_a_smaller_micro_batch_has_the_speed_that_was_measured_of_it(by_name, pairs, timed):
    one_by_four = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    small = [run for n in range(3) for run in (timed(10.0, 2 * n), timed(4.0, 2 * n + 1, **one_by_four))]
    known = by_name(small + pairs(10.0, optim="adafactor"), memory=410)
    assert known["AdamW, 1 x 64"] == 0.4 and known["Adafactor, 16 x 4"] == 1.0


def test_runs_whose_speed_says_nothing_are_left_out(by_name, pairs):
    runs = pairs(5.0, optim="adafactor")
    assert by_name(runs)["Adafactor, 16 x 4"] == 0.5
    for change, reason in [
        ({"machine": {"name": "another"}}, "another machine's"),
        ({"timing": Timing(*[Unknown()] * 5)}, "of a rehearsal nobody knows the time"),
        ({"kind": "function", "value": 1}, "of a function, not of the Trainer"),
        ({"status": "crashed"}, "crashed"),
    ]:
        assert by_name([dataclasses.replace(run, **change) for run in runs]) == SILENT, reason


def test_it_is_reported_that_there_is_no_measurement(ask):
    (_, recipe, *_) = ask(memory=420 * MB, avoid=["adamw_bnb_8bit"]).recipes
    assert "checkpointing: not measured" in recipe.speed_source


def test_where_nothing_ran_here_the_nearest_recorded_machine_speaks(recorded, ask):
    found = {recipe.name: recipe for recipe in ask(memory=420 * MB).recipes}
    source = " ".join(found["checkpointing, AdamW, 64 x 1"].speed_source)
    assert found["checkpointing, AdamW, 64 x 1"].speed == pytest.approx(recorded["checkpointing-cost"])
    assert "recorded on Intel Xeon, 2 cores" in source
    assert found["Adafactor, 16 x 4"].speed == 1.0 and "too small" in " ".join(found["Adafactor, 16 x 4"].speed_source)


def test_what_was_recorded_of_another_quantity_is_not_taken(recorded, ask, tmp_path):
    path = max(tmp_path.glob("*/*.json"))
    path.write_text(path.read_text().replace("throughput with gradient_checkpointing", "what was asked for once"))
    found = {recipe.name: recipe for recipe in ask(memory=420 * MB).recipes}
    assert "checkpointing: not measured" in found["checkpointing, AdamW, 64 x 1"].speed_source


def test_no_ratio_of_a_cpu_is_taken_for_a_gpu(recorded, ask):
    advice = ask(memory="4GB", device="cuda", most=99)
    sources = {source for recipe in advice.recipes for source in recipe.speed_source}
    assert sources and not any("recorded on" in source for source in sources)
    assert any("fp16-faster" in source and "V100-SXM2 16 GB" in source for source in sources)
    free = 4 * 10**9 - 530 * 2**20
    assert all(recipe.peak_bytes + recipe.headroom_bytes == free for recipe in advice.recipes)


# ---------------------------------------------------------------------------- the order of recipes


def test_a_recipe_that_only_adds_costs_is_left_out(ask, followed):
    (plain,) = ask(memory="64GB").recipes
    assert plain.costs == () and plain.arguments["per_device_train_batch_size"] == 64 and len(followed) == 1


def test_measured_comes_before_not_measured_and_the_faster_first(ask, pairs):
    options = {"memory": 420 * MB, "avoid": ["adamw_bnb_8bit"]}
    silent = ask(**options)
    assert [recipe.speed for recipe in silent.recipes] == [1.0, None, None]
    slow = ask(**options, runs=pairs(5.0, optim="adafactor"))
    assert [recipe.speed for recipe in slow.recipes] == [1.0, 0.5, None]
    fast = ask(**options, runs=pairs(20.0, optim="adafactor"))
    assert fast.recipes[0].name == "Adafactor, 16 x 4" and fast.recipes[1].speed == 0.5
    assert fast.recipes[0].why_not_next.startswith("Adafactor, 32 x 2 needs")


def test_what_all_recipes_share_makes_none_of_them_slower(ask, pairs):
    (recipe,) = ask(must={"optim": "adafactor"}, avoid=["checkpointing"], runs=pairs(5.0, optim="adafactor")).recipes
    assert recipe.speed == 1.0 and "plain recipe" in " ".join(recipe.speed_source)
