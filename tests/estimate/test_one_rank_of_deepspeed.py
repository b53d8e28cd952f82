"""DeepSpeed's ZeRO: one rank traced on fake tensors, compared with the lab's measurement of both ranks."""

import subprocess
import sys

import pytest

from perf_helpers.lab import Lab
from trainmem.core import optional_packages
from trainmem.core.task import Task
from trainmem.estimate import depth, estimate

TASK = Task("bert-tiny", seq_len=16, config={"num_hidden_layers": 5})
no_deepspeed = optional_packages.missing("deepspeed") and not [*optional_packages.FOLDER.glob("deepspeed-*/deepspeed")]
needs_deepspeed = pytest.mark.skipif(bool(no_deepspeed), reason="no DeepSpeed: make build/deepspeed")


def zero(stage, **more):
    buckets = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    own = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    config = {"zero_optimization": {"stage": stage, **buckets, **more}, "train_micro_batch_size_per_gpu": "auto"}
    return {"deepspeed": config | own | {"gradient_accumulation_steps": "auto"}, "per_device_train_batch_size": 2}


@pytest.fixture
def offered(monkeypatch, tmp_path):
    """Make DeepSpeed importable in one test only; otherwise every training of later tests would import it.

    A killed compilation of DeepSpeed's shared-memory collectives leaves a lock file, for which the next compilation
    would wait forever. The fixture creates such a lock file; no test may wait for it.
    """
    (tmp_path / "deepspeed_shm_comm").mkdir()
    (tmp_path / "deepspeed_shm_comm" / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("sys.path", [*sys.path])
    assert optional_packages.offer("deepspeed") is None


@pytest.mark.nightly
@needs_deepspeed
@pytest.mark.parametrize(
    ("stage", "recipe"),
    [
        (2, {"processes": 2, "gradient_accumulation_steps": 3}),
        (3, {"processes": 2}),
    ],
    ids=str,
)
def test_a_rank_takes_on_a_cpu_what_is_measured(offered, tmp_path, stage, recipe):
    recipe = zero(stage) | recipe
    lab = Lab("cpu", out=tmp_path, lesson="tests")
    run = lab.train("DeepSpeed", task=TASK, measure="memory", use_cpu=True, **recipe)
    assert run.ok, run.message
    assert estimate(TASK, device="cpu", **recipe).peak_bytes == run.peak_bytes


@pytest.mark.nightly
@needs_deepspeed
def test_the_second_training_in_a_process_is_traced_as_if_it_were_alone(offered):
    recipe = zero(3) | {"processes": 2, "device": "cuda", "compute_capability": (8, 0), "max_steps": 2}
    shallow = depth.line(TASK, **recipe)  # of two layers, then of four
    alone = estimate(TASK.replace(config={"num_hidden_layers": 4}), **recipe)
    assert shallow.reserved[1] == alone.memory.reserved_bytes


@pytest.mark.nightly
@needs_deepspeed
def test_one_process_needs_no_launcher(offered, tmp_path):
    recipe = zero(2) | {"processes": 1}
    lab = Lab("cpu", out=tmp_path, lesson="tests")
    run = lab.train("DeepSpeed, alone", task=TASK, measure="memory", use_cpu=True, **recipe)
    assert run.ok, run.message
    assert estimate(TASK, device="cpu", **recipe).peak_bytes == run.peak_bytes


@pytest.mark.nightly
@needs_deepspeed
def test_on_a_gpu_a_stage_keeps_its_share_and_a_copy_of_it(offered):
    parameters = TASK.parameters()
    for stage, weights, states in ((0, 4, 8), (1, 4 + 4 / 4, 8 / 4), (3, 4 / 4, 8 / 4)):
        reported = estimate(TASK, device="cuda", processes=4, **zero(stage, stage3_param_persistence_threshold=0))
        after = reported.memory.phase_breakdowns["backward"]
        assert after["weights"] / parameters == pytest.approx(weights, rel=0.05), stage
        assert after["optimizer_states"] / parameters == pytest.approx(states, rel=0.05), stage
        assert any("DeepSpeed" in text for text in reported.assumptions)


@needs_deepspeed
@pytest.mark.nightly
def test_in_bf16_a_gpu_keeps_its_share_of_master_weights_and_states_in_float32(offered):
    recipe = zero(2)
    recipe["deepspeed"] |= {"bf16": {"enabled": "auto"}}
    reported = estimate(TASK, device="cuda", processes=4, bf16=True, **recipe)
    after = reported.memory.phase_breakdowns["backward"]
    assert after["weights"] / TASK.parameters() == pytest.approx(2 + 4 / 4, rel=0.05)
    assert after["optimizer_states"] / TASK.parameters() == pytest.approx(8 / 4, rel=0.05)


@needs_deepspeed
@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
@pytest.mark.nightly
def test_what_is_kept_on_the_host_is_refused_on_a_gpu(offered, name):
    with pytest.raises(ValueError, match=f"{name}: .*rehearse it"):
        estimate(TASK, device="cuda", processes=2, **zero(3, **{name: {"device": "cpu"}}))


WITHOUT = """
import sys
from trainmem.core.task import Task
from trainmem.estimate import estimate
from perf_helpers.lab import Lab

recipe = {"processes": 2, "deepspeed": {"zero_optimization": {"stage": 1}}}
if __name__ == "__main__":
    for ask in (estimate, lambda task, **recipe: Lab("cpu").train("", task=task, use_cpu=True, **recipe)):
        try:
            ask(Task("bert-tiny", seq_len=16), **recipe)
        except ValueError as error:
            print(error)
"""


@pytest.mark.nightly
def test_without_deepspeed_a_message_says_how_to_install_it(tmp_path):
    """Run the estimate and the training in a new Python process. In the tests' own process an earlier test may have
    made DeepSpeed importable.
    """
    if not optional_packages.missing("deepspeed"):
        pytest.skip("DeepSpeed is installed")
    script = tmp_path / "without.py"
    script.write_text(WITHOUT)
    answer = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path).stdout
    assert answer.count("needs deepspeed (") == answer.count("make build/deepspeed") == 2, answer
