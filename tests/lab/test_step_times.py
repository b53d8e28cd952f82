"""The pace of a few recipes: as many processes as it takes to see the fastest step twice, by two clocks."""

import pytest

from perf_helpers.lab import Task, step_times
from perf_helpers.lab.outcomes import Outcome
from perf_helpers.lab.step_times import PROCESSES, Pace
from perf_helpers.records import Timing


def an_outcome(cpu=(0.1, 0.2), wall=(0.3, 0.4), waited=(0.15, 0.25)):
    return Outcome(timing=Timing(0.3, 0.0, len(wall), 1, None, wall, cpu, waited))


def test_the_fastest_step_counts_and_a_thread_that_had_no_core_did_not_take_that_long():
    pace = Pace().joined(an_outcome(), on_cpu=True)
    assert pace.computed == (0.1,) and pace.passed == pytest.approx((0.15,))
    assert Pace().joined(an_outcome(), on_cpu=False) == Pace((), (0.3,))


def test_without_the_schedulers_word_one_clock_is_left():
    assert Pace().joined(an_outcome(waited=()), on_cpu=True) == Pace((0.1,), ())


def test_a_recipe_that_fails_once_has_no_pace_and_says_why():
    pace = Pace((0.1,), (0.1,)).joined(Outcome("crashed", "why"), True).joined(an_outcome(), True)
    assert pace == Pace(message="crashed, why") and pace.is_settled


def test_it_is_settled_when_two_processes_agree_by_both_clocks():
    assert not Pace((0.1,), (0.1,)).is_settled
    assert Pace((0.1, 0.2, 0.101), (0.1, 0.2, 0.101)).is_settled
    assert not Pace((0.1, 0.101), (0.1, 0.2)).is_settled
    assert not Pace((0.1, 0.2), (0.1, 0.101)).is_settled


def test_recipes_are_timed_until_they_are_settled(monkeypatch):
    asked = []

    def execute(experiment, meter, timeout):
        asked.append(experiment.name)
        number = asked.count(experiment.name)
        restless = experiment.name == "vanilla"
        seconds = (1.0 / number if restless else 1.0,)
        return an_outcome(seconds, seconds, (0.0,))

    monkeypatch.setattr(step_times.processes, "execute", execute)
    monkeypatch.setattr(step_times.SERVER, "start", lambda: None)
    found = step_times.measure(Task("bert-tiny", seq_len=8, dataset_size=8))
    least, most = PROCESSES
    assert {name: asked.count(name) for name in step_times.RECIPES} == dict.fromkeys(step_times.RECIPES, least) | {
        "vanilla": most
    }
    assert len(found["recipes"]["vanilla"]["computed"]) == most and found["threads"] == 1


def test_every_recipe_runs_and_has_its_seconds(monkeypatch):
    monkeypatch.setattr(step_times, "PROCESSES", (1, 1))
    monkeypatch.setattr(step_times, "STEPS", 2)
    found = step_times.measure(Task("bert-tiny", seq_len=8, dataset_size=16))["recipes"]
    assert found.keys() == step_times.RECIPES.keys()
    for pace in found.values():
        assert not pace["message"] and 0 < pace["computed"][0] < 10 and pace["arguments"]
