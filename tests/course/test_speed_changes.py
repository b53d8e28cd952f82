"""The pace of recipes then and now: one that moved, all that moved, noise that hides it, and nights without any."""

import copy

import pytest

from perf_helpers.course.speed_changes import moved

ARGUMENTS = {"per_device_train_batch_size": 4}
QUIET = (0.100, 0.101, 0.104)
NOISY = (0.100, 0.140, 0.160)


def paces(seconds=QUIET, recipes=5, threads=1, **fields):
    rows = {f"recipe {n}": {"arguments": ARGUMENTS, "computed": seconds, "passed": seconds} for n in range(recipes)}
    return {"task": {"model": "bert-tiny"}, "threads": threads, "recipes": rows} | fields


def times(night, factor, *names, clocks=("computed", "passed")):
    """The night with these recipes (all, if none are named) slower by a factor."""
    slower = copy.deepcopy(night)
    for name, pace in slower["recipes"].items():
        for clock in clocks if not names or name in names else ():
            pace[clock] = tuple(seconds * factor for seconds in pace[clock])
    return slower


def test_all_recipes_that_take_longer_are_told_once_with_the_factor():
    (change,), notes = moved(paces(), times(paces(), 1.4))
    assert change.recipe == "" and change.is_slower and change.ratio == pytest.approx(1.4)
    assert change.text == "a step computes 1.40 x as long" and "5 recipes" in notes[0]


def test_one_recipe_that_takes_longer_is_told_by_its_name():
    (change,), _ = moved(paces(), times(paces(), 1.4, "recipe 2"))
    assert change.recipe == "recipe 2" and change.text == "100 ms -> 140 ms, a step computes 1.40 x as long"
    (change,), _ = moved(times(paces(), 1.4, "recipe 2"), paces())
    assert not change.is_slower


def test_one_recipe_stays_behind_when_all_others_are_faster():
    changes, _ = moved(times(paces(), 1.5), times(paces(), 1.5, "recipe 1"))
    assert [change.is_slower for change in changes] == [False, True]


def test_a_step_that_waits_is_seen_by_the_other_clock():
    (change,), _ = moved(paces(), times(paces(), 1.5, clocks=("passed",)))
    assert change.text == "a step takes 1.50 x as long"


def test_beside_a_busy_neighbour_less_is_told_and_it_says_how_much():
    found, notes = moved(paces(), times(paces(NOISY), 1.4))
    assert not found and moved(paces(), times(paces(), 1.4))[0]
    limits = [int(note.split(" beyond ")[1].split("%")[0]) for note in (notes[0], moved(paces(), paces())[1][0])]
    assert limits[0] > 40 > limits[1]


@pytest.mark.parametrize("old", [None, paces(threads=2), paces(task={"model": "gpt2"}), paces(recipes=0)])
def test_what_cannot_be_compared_is_said(old):
    found, (note,) = moved(old, paces())
    assert not found and note.startswith("speed not compared")


def test_a_recipe_of_other_arguments_or_that_failed_is_left_out():
    other = times(paces(), 2.0, "recipe 0", "recipe 1")
    other["recipes"]["recipe 0"]["arguments"] = {"bf16": True}
    other["recipes"]["recipe 1"] |= {"computed": (), "passed": (), "message": "crashed"}
    found, notes = moved(paces(), other)
    assert not found and "3 recipes" in notes[0]
