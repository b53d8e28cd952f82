"""Step times of recipes: a recipe is timed in one new process after another until two agree on its fastest step."""

import pytest

from perf_helpers.compare import step_times
from perf_helpers.compare.step_times import PROCESSES, is_settled, keep
from trainmem.core.outcomes import Outcome
from trainmem.core.task import Task
from trainmem.records import Timing


def an_outcome(cpu=(0.1, 0.2), wall=(0.3, 0.4), waited=(0.15, 0.25)):
    return Outcome(timing=Timing(0.3, 0.0, len(wall), 1, None, wall, cpu, waited))


def a_row(passed=(), computed=()):
    return {"arguments": {}, "passed": [*passed], "computed": [*computed], "message": ""}


def kept(outcome, on_cpu=True, row=None):
    keep(row := row or a_row(), outcome, on_cpu)
    return [round(x, 9) for x in row["passed"]], row["computed"], row["message"]


def test_the_fastest_step_counts_and_a_thread_that_had_no_core_did_not_take_that_long():
    assert kept(an_outcome()) == ([0.15], [], "")
    assert kept(an_outcome(), on_cpu=False) == ([0.3], [], "")


def test_a_step_takes_no_less_than_half_of_what_it_computes():
    """The time of a step without its waiting for a core is never below half of the step's CPU time. The bound is
    needed: with two dozen other programs on two cores, the system once reported more waiting than the step's time.
    """
    assert kept(an_outcome(waited=(0.35, 0.45))) == ([0.05], [], "")


def test_without_the_schedulers_word_what_was_computed_counts():
    assert kept(an_outcome(waited=())) == ([], [0.1], "")


def test_a_recipe_that_fails_once_has_no_seconds_and_says_why():
    row = a_row([0.1])
    assert kept(Outcome("crashed", "why"), row=row) == ([], [], "crashed, why") == kept(an_outcome(), row=row)
    assert is_settled(row)


def test_it_is_settled_when_two_processes_agree():
    assert not is_settled(a_row([0.1])) and not is_settled(a_row([0.1, 0.2]))
    assert is_settled(a_row([0.1, 0.2, 0.101])) and is_settled(a_row(computed=[0.1, 0.2, 0.101]))


def test_recipes_are_timed_until_they_are_settled(monkeypatch):
    requested = []

    def execute(experiment, meter, timeout):
        requested.append(experiment.name)
        number = requested.count(experiment.name)
        restless = experiment.name == "vanilla"
        seconds = (1.0 / number if restless else 1.0,)
        return an_outcome(seconds, seconds, (0.0,))

    monkeypatch.setattr(step_times.processes, "execute", execute)
    monkeypatch.setattr(step_times.SERVER, "start", lambda: None)
    found = step_times.measure(Task("bert-tiny", seq_len=8, dataset_size=8))
    least, most = PROCESSES
    assert {name: requested.count(name) for name in step_times.RECIPES} == dict.fromkeys(step_times.RECIPES, least) | {
        "vanilla": most
    }
    assert len(found["recipes"]["vanilla"]["passed"]) == most and found["threads"] == 1


@pytest.mark.nightly
def test_every_recipe_runs_and_has_its_seconds(monkeypatch):
    monkeypatch.setattr(step_times, "PROCESSES", (1, 1))
    monkeypatch.setattr(step_times, "STEPS", 2)
    found = step_times.measure(Task("bert-tiny", seq_len=8, dataset_size=16))["recipes"]
    assert found.keys() == step_times.RECIPES.keys()
    for pace in found.values():
        (seconds,) = pace["passed"] or pace["computed"]
        assert not pace["message"] and 0 < seconds < 10 and pace["arguments"]
