"""The estimate for CUDA against torch's own allocator, over trainings of a set that is not the recorded one."""

import itertools
import sys
from pathlib import Path

import cloudpickle
import pytest

from perf_helpers import Lab, Task
from perf_helpers.estimate import estimate
from perf_helpers.rehearsal import Rehearsal, build, card

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import measure_cuda

cloudpickle.register_pickle_by_value(measure_cuda)
SEED = 20


@pytest.mark.parametrize("capability", measure_cuda.CAPABILITIES, ids=str)
def test_allocated_is_what_torchs_allocator_says(capability, tmp_path):
    found = []
    with Rehearsal(card(None, capability, measure_cuda.MEMORY)) as stage:
        lab = Lab("gpu", executor=stage)
        for number in range(400):
            one = measure_cuda.training(number, SEED)
            ordinary = one.processes == 1 and "torch_" not in one.arguments["optim"].removeprefix("adamw_torch_fused")
            if one.capability == capability and ordinary and len(found) < 4:
                row = measure_cuda.compare(lab, one, tmp_path)
                found += [row] if "rehearsed" in row else []
    assert len(found) == 4
    for row in found:
        assert row["estimated"]["allocated"] == row["rehearsed"]["allocated"], (row["architecture"], row["arguments"])
        assert row["estimated"]["reserved"] == pytest.approx(row["rehearsed"]["reserved"], rel=0.03)


LLAMA = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
WRITING = {
    "llama": Task("llama-2-7b", seq_len=20, config=LLAMA | {"num_key_value_heads": 2, "vocab_size": 512}),
    "gpt2": Task("gpt2", seq_len=33, config={"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 777}),
    "t5": Task("t5-small", seq_len=24, config={"d_model": 128, "num_layers": 2, "num_decoder_layers": 2, "d_ff": 256}),
}
OPTIONS = (
    {"max_new_tokens": 6},
    {"max_new_tokens": 5, "num_beams": 3, "per_device_eval_batch_size": 3},
    {"max_new_tokens": 9, "cache_implementation": "static", "dtype": "float16"},
    {"max_new_tokens": 4, "bf16": True, "attn_implementation": "eager"},
)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)], ids=str)
def test_what_writes_takes_what_torchs_allocator_says(capability):
    with Rehearsal(card(None, capability, measure_cuda.MEMORY)) as stage:
        lab = Lab("gpu", executor=stage)
        for task, options in itertools.product(WRITING.values(), OPTIONS):
            run = lab.infer(f"{task.model}, {options}", task=task, **options)
            said = estimate(task, device="cuda", compute_capability=capability, training=False, **options).memory
            found, said = ((each.peak_bytes, each.reserved_bytes) for each in (run.memory, said))
            assert said == found, (task.model, options)


@pytest.mark.parametrize("more", [{}, {"pad_to_multiple_of": 64}, {"packed": True}], ids=str)
def test_unequal_lengths_take_what_torchs_allocator_says(more):
    """Of whole sequences of steps: also what blocks of one shape leave behind for the next."""
    task = Task(
        "llama-2-7b", config=LLAMA | {"vocab_size": 5000}, lengths=(170, 30, 90, 12, 250, 41, 8, 260, 77), **more
    )
    options = {"per_device_train_batch_size": 2, "train_sampling_strategy": "group_by_length"}
    with Rehearsal(card(None, (8, 0), measure_cuda.MEMORY)) as stage:
        run = Lab("gpu", executor=stage).train("unequal", task=task, measure=("memory",), **options)
    said = estimate(task, device="cuda", compute_capability=(8, 0), **options).memory
    assert (said.peak_bytes, said.reserved_bytes) == (run.memory.peak_bytes, run.memory.reserved_bytes)
