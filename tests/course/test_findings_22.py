"""Lesson 22's findings in transformers' search: these tests fail once a release fixes a finding or moves its code."""

import math

import pytest
from lesson_22 import functions
from transformers import TrainingArguments


@pytest.fixture
def lesson(tmp_path):
    found = functions(tmp_path)
    if found.missing:
        pytest.skip(found.missing)
    return found


def test_after_one_evaluation_the_objective_is_a_time_and_the_remedy_is_the_loss(lesson):
    made = lesson.trainer_of(num_train_epochs=1)
    assert "eval_model_preparation_time" in made.evaluate()
    best, trials = lesson.search(made, lesson.rates_of, 3)
    assert best.run_id == "0" and len({trial.value for trial in trials}) == 1 and trials[0].value < 0.1
    made = lesson.trainer_of(num_train_epochs=1)
    made.evaluate()
    objective = {"compute_objective": lambda metrics: metrics["eval_loss"]}
    right, trials = lesson.search(made, lesson.rates_of, 3, **objective)
    assert right.objective == min(trial.value for trial in trials) > 1


def test_with_metrics_the_worst_trial_is_returned_unless_a_direction_is_given(lesson):
    best, trials = lesson.search(lesson.trainer_of(metrics=lesson.accuracy, num_train_epochs=1), lesson.rates_of, 4)
    values = [trial.value for trial in trials]
    assert best.objective == min(values) < max(values)
    made = lesson.trainer_of(metrics=lesson.accuracy, num_train_epochs=1)
    right, trials = lesson.search(made, lesson.rates_of, 4, direction="maximize")
    assert right.objective == max(trial.value for trial in trials)


def test_the_trainer_has_the_last_trials_settings_and_no_model(lesson):
    made = lesson.trainer_of(num_train_epochs=1)
    best, trials = lesson.search(made, lesson.rates_of, 4, seed=3)
    last = trials[-1].params["learning_rate"]
    assert made.args.learning_rate == last != best.hyperparameters["learning_rate"]
    assert made.model is None


def test_weights_and_states_are_held_until_their_holders_let_go(lesson):
    made = lesson.trainer_of(num_train_epochs=1)
    lesson.search(made, lesson.rates_of, 2)
    size = sum(weight.nbytes for weight in lesson.Net().parameters())
    assert made.callback_handler.model is not None and made.optimizer is not None
    before = lesson.held(size)
    lesson.freed(made)
    assert before - lesson.held(size) == pytest.approx(3, abs=0.05), "weights, and two states each"


def test_a_misspelt_name_is_no_error_and_a_careful_space_makes_it_one(lesson):
    made = lesson.trainer_of(num_train_epochs=1)
    _, trials = lesson.search(made, lambda trial: {"rate": trial.suggest_float("rate", 0.1, 0.2)}, 2)
    assert len({trial.value for trial in trials}) == 1
    made = lesson.trainer_of(num_train_epochs=1)
    with pytest.raises(ValueError, match="rate: no such training argument"):
        lesson.search(made, lesson.careful(lambda trial: {"rate": 0.1}, made.args), 1)


def test_a_value_is_cast_to_the_type_of_the_default(lesson):
    assert TrainingArguments("unused").warmup_steps == 0
    assert [used for _, used, _ in lesson.warmed_up()] == [0, 0, 0]
    assert all(requested == used for requested, used, _ in lesson.warmed_up(warmup_steps=0.0))
    made = lesson.trainer_of()
    with pytest.raises(ValueError, match="would become 0"):
        lesson.search(made, lesson.careful(lesson.warmups_of, made.args), 1)


def test_a_trial_runs_with_the_seed_of_the_one_before_and_the_remedy_with_its_own(lesson):
    short = dict(num_train_epochs=1, learning_rate=1e-2)
    _, trials = lesson.search(lesson.trainer_of(**short), lesson.seeds_of, 2, seed=1)
    one, other = (trial.params for trial in trials)
    size = {"per_device_train_batch_size": other["per_device_train_batch_size"]}
    assert math.isclose(trials[1].value, lesson.fresh_loss(one["seed"], **short, **size), rel_tol=1e-6)
    assert not math.isclose(trials[1].value, lesson.fresh_loss(other["seed"], **short, **size), rel_tol=1e-6)
    best, _ = lesson.search(lesson.trainer_of(lesson.seeded, **short), lesson.seeds_of, 2, seed=1)
    assert math.isclose(best.objective, lesson.fresh_loss(**short | best.hyperparameters), rel_tol=1e-6)


def test_the_batch_size_that_trains_stays_the_last_trials(lesson):
    made = lesson.trainer_of(num_train_epochs=1)
    _, trials = lesson.search(made, lesson.seeds_of, 3, seed=1)
    made.args.per_device_train_batch_size = 32
    assert made._train_batch_size == trials[-1].params["per_device_train_batch_size"] != 32
