"""Seconds per step, as the time meter reports them."""

import pytest
import torch
from machines import TINY

from trainmem.measure.time_meter import TimeMeter


def test_steps_are_timed_with_the_warm_up_left_out(lab):
    run = lab.train("timed", task=TINY, measure=("time",), steps=3, per_device_train_batch_size=2)
    assert run.timing.steps == 3 == len(run.timing.all_seconds)
    assert run.samples_per_second == pytest.approx(2 / run.step_seconds)
    assert len(run.losses) == 3 + run.timing.warmup_steps
    assert run.memory is None


def test_an_experiment_without_steps_has_no_time(lab):
    run = lab.run(lambda task: 1, measure=("time",))
    assert run.ok and run.timing is None and run.samples_per_second is None


@pytest.mark.parametrize(("kind", "options"), [("Adafactor", {}), ("AdamW", {}), ("AdamW", {"fused": True})])
def test_a_step_that_the_scaler_skips_is_a_step(kind, options):
    """The meter counts a step that the gradient scaler skips. Before it counted such steps, a timed training in fp16
    with Adafactor or 8-bit Adam ended on an H100 before enough steps were counted.
    """
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1, **options)
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=2.0**127), []
    plain = torch.amp.GradScaler.step
    with TimeMeter(1, seen.append) as meter:
        for _ in range(4):
            scaler.scale(weight.sum() * 3).backward()  # 3 x 2^127 overflows, 3 x 2^126 does not
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert optimizer.state[weight]["step"] == 3, "nothing was skipped: this test would say nothing"
    assert seen == [1, 2, 3, 4] and len(meter.result().all_seconds) == 3
    assert torch.amp.GradScaler.step is plain
