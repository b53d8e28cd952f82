"""Compare step times of two course runs: one recipe changed, all changed, a change within the noise, and course runs
without step times.
"""

import copy
import re

import pytest

from perf_helpers.compare.compare import compare_steps

ARGUMENTS = {"per_device_train_batch_size": 4}
QUIET = (0.100, 0.101, 0.104)
NOISY = (0.100, 0.140, 0.160)


def paces(seconds=QUIET, recipes=5, threads=1, **fields):
    rows = {f"recipe {n}": {"arguments": ARGUMENTS, "passed": seconds, "computed": ()} for n in range(recipes)}
    return {"task": {"model": "bert-tiny"}, "threads": threads, "recipes": rows} | fields


def times(night, factor, *names, clocks=("passed", "computed")):
    """Return the step times of a nightly run with some recipes slower by a factor.

    Args:
        night: the step times to change, as `step_times.measure` returns them; a copy is changed.
        factor: factor on the seconds of the slower recipes.
        names: the slower recipes (default: all).
        clocks: the clocks that show the change, keys of a recipe's row.
    """
    slower = copy.deepcopy(night)
    for name, pace in slower["recipes"].items():
        for clock in clocks if not names or name in names else ():
            pace[clock] = tuple(seconds * factor for seconds in pace[clock])
    return slower


def test_all_recipes_that_take_longer_are_reported_once_with_the_factor():
    (change,), notes = compare_steps(paces(), times(paces(), 1.4))
    assert change["id"] == "all recipes" and change["worse"] and change["axis"] == "speed"
    assert change["text"].endswith("all recipes: a step takes 1.40 x as long") and "5 recipes" in notes[0]


def test_one_recipe_that_takes_longer_is_reported_by_its_name():
    (change,), _ = compare_steps(paces(), times(paces(), 1.4, "recipe 2"))
    assert (change["id"], change["old"], change["new"]) == ("recipe 2", "100 ms", "140 ms")
    assert change["text"].endswith("recipe 2: 100 ms -> 140 ms, a step takes 1.40 x as long")
    (change,), _ = compare_steps(times(paces(), 1.4, "recipe 2"), paces())
    assert change["worse"] is False


def test_one_recipe_stays_behind_when_all_others_are_faster():
    changes, _ = compare_steps(times(paces(), 1.5), times(paces(), 1.5, "recipe 1"))
    assert [change["worse"] for change in changes] == [False, True]


def test_the_clock_counts_that_both_runs_have():
    """Compare "passed" (wall-clock time minus waiting for a core) if both runs have it, or else "computed" (CPU time).

    A course run records one of the two times: "passed" if the system reports how long a thread waits for a core,
    otherwise "computed". Results of earlier versions have both.
    """
    both, computed = times(paces(), 1.0), times(paces(), 1.0)
    for row in both["recipes"].values():
        row["computed"] = (9.0, 9.0)
    for row in computed["recipes"].values():
        row |= {"passed": (), "computed": QUIET}
    (change,), _ = compare_steps(both, times(both, 1.5, clocks=("passed",)))
    assert "takes 1.50 x" in change["text"] and not compare_steps(both, times(both, 1.5, clocks=("computed",)))[0]
    assert compare_steps(computed, times(computed, 1.5))[0] and not compare_steps(computed, computed)[0]
    assert "no recipe was timed in both" in compare_steps(paces(), computed)[1][0]
    both["recipes"]["recipe 0"]["passed"] = (-0.1, 0.1)  # the system reported more waiting than the step took
    assert not compare_steps(both, both)[0]


def test_under_other_load_less_is_reported_and_it_says_how_much():
    found, notes = compare_steps(paces(), times(paces(NOISY), 1.4))
    assert not found and compare_steps(paces(), times(paces(), 1.4))[0]
    listed = (notes[0], compare_steps(paces(), paces())[1][0])
    limits = [int(re.search(r"(\d+)% of one recipe", note)[1]) for note in listed]
    assert limits[0] > 40 > limits[1]


@pytest.mark.parametrize("old", [None, paces(threads=2), paces(task={"model": "gpt2"}), paces(recipes=0)])
def test_what_cannot_be_compared_is_reported(old):
    found, (note,) = compare_steps(old, paces())
    assert not found and note.startswith("speed not compared")


def test_a_recipe_of_other_arguments_or_that_failed_is_left_out():
    other = times(paces(), 2.0, "recipe 0", "recipe 1")
    other["recipes"]["recipe 0"]["arguments"] = {"bf16": True}
    other["recipes"]["recipe 1"] |= {"computed": (), "passed": (), "message": "crashed"}
    found, notes = compare_steps(paces(), other)
    assert not found and "3 recipes" in notes[0]
