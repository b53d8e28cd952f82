"""results/build.py: the estimate held against recorded GPU runs, here against runs with errors that are known."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from perf_helpers.estimate import estimate
from perf_helpers.hardware import Gpu, Machine
from perf_helpers.runs import Run
from perf_helpers.task import Task

TASK = Task("bert-tiny", seq_len=32)


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("build", Path(__file__).parents[1] / "results" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded(kind="cuda", **changes):
    """A course run of a GPU on which a training took 1 % more than it is said to, and 2 % more reserved."""
    gpu = Gpu(0, name="NVIDIA A100", memory_bytes=80 * 2**30, capability=(8, 0))
    machine = Machine("NVIDIA A100", kind, gpus=(gpu,))
    arguments = {"per_device_train_batch_size": 2}
    said = estimate(TASK, device="cuda", compute_capability=(8, 0), every_layer=True, **arguments).memory
    memory = dataclasses.replace(
        said, kind="allocated", peak_bytes=said.peak_bytes * 101 // 100, reserved_bytes=said.reserved_bytes * 102 // 100
    )
    run = Run("vanilla", "ok", arguments=arguments, task=TASK.to_dict(), memory=memory, **changes)
    return {"a100": {"machine": dataclasses.asdict(machine), "runs": [run.to_dict()]}}


def test_recorded_gpu_runs_make_the_table_of_errors(build):
    rows = build.held_against(recorded())
    table = build.error_table(rows)
    assert "On GPUs, 1 trainings" in table
    assert "| allocated | 1 | 0.99% | 0.99% | 0.99% |" in table and "| reserved | 1 | 1.96% | 1.96% | 1.96% |" in table
    assert "device-used" not in table, "the context of this GPU is not known"
    assert "| optimizer states, share of the peak | 1 | 0.00% |" in table


def test_what_is_no_training_of_a_gpu_is_left_out(build):
    assert build.held_against(recorded(kind="cpu")) == []
    assert build.held_against(recorded(value={"of a function": 1})) == []
    assert "not yet checked" in build.error_table([])


def test_the_percentile_is_one_of_the_errors(build):
    rows = [
        {"peak_bytes": [100 + n, 100], "reserved_bytes": [None, 1], "device_used_bytes": [None, 1]} for n in range(20)
    ]
    table = build.error_table([row | {"breakdown": [None, {}]} for row in rows])
    assert "| allocated | 20 | 9.50% | 18.00% | 19.00% |" in table
