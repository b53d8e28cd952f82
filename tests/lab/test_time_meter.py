"""Seconds of steps, as the lab tells them."""

import pytest
from machines import TINY


def test_steps_are_timed_with_the_warm_up_left_out(lab):
    run = lab.train("timed", task=TINY, measure=("time",), steps=3, per_device_train_batch_size=2)
    assert run.timing.steps == 3 == len(run.timing.all_seconds)
    assert run.samples_per_second == pytest.approx(2 / run.step_seconds)
    assert len(run.losses) == 3 + run.timing.warmup_steps
    assert run.memory is None


def test_an_experiment_without_steps_has_no_time(lab):
    run = lab.run(lambda task: 1, measure=("time",))
    assert run.ok and run.timing is None and run.samples_per_second is None
