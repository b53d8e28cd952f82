"""Profiles: the largest one that a machine can hold."""

from dataclasses import replace

import pytest
from machines import GOOD, PLAIN, T4

from perf_helpers.lab.profiles import PROFILES, TINY, choose_profile


def test_the_profile_follows_from_the_machine():
    small, large, cpu = replace(GOOD, gpus=(T4,)), GOOD, PLAIN
    assert [choose_profile("auto", each).name for each in (cpu, small, large)] == ["cpu", "t4", "gpu"]
    assert choose_profile("gpu", cpu) is PROFILES["gpu"]
    with pytest.raises(ValueError, match="auto, cpu, t4, gpu"):
        choose_profile("laptop")


def test_the_profile_for_tests_is_the_smallest_and_no_learner_is_offered_it():
    assert choose_profile("tiny") is TINY and "tiny" not in PROFILES
    for profile in PROFILES.values():
        assert TINY.task.parameters() < profile.task.parameters() and TINY.task.seq_len < profile.task.seq_len
        assert TINY.steps < profile.steps and TINY.turns <= profile.turns and TINY.micro_batch <= profile.micro_batch
    with pytest.raises(ValueError, match=r"one of auto, cpu, t4, gpu$"):
        choose_profile("laptop")


def test_the_gpu_profile_is_the_guides_set_up():
    task = PROFILES["gpu"].task
    assert (task.model, task.dataset_size, task.seq_len, PROFILES["gpu"].micro_batch) == (
        "bert-large-uncased",
        512,
        512,
        4,
    )
