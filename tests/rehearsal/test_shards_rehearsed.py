"""FSDP2 through the Trainer: one rank traced by the estimate, compared with torch's own allocator on two ranks and
more.
"""

import pytest

from trainmem.core.task import Task
from trainmem.estimate import estimate
from trainmem.rehearsal import build, rehearse

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)

GPT = Task("gpt2", seq_len=16, config={"n_layer": 5, "n_embd": 128, "n_head": 4, "vocab_size": 2001})
LLAMA = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = Task(
    "llama-3-8b", seq_len=32, config=LLAMA | {"num_key_value_heads": 2, "vocab_size": 1000, "dtype": "float32"}
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("task", "recipe"),
    [
        (GPT, {"processes": 2}),
        (GPT, {"processes": 2, "bf16": True, "gradient_accumulation_steps": 2}),
        (GPT, {"processes": 3, "fsdp": "shard_grad_op", "gradient_checkpointing": True}),
        (LLAMA, {"processes": 4, "bf16": True, "gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_a_rank_of_fsdp2_takes_what_torchs_allocator_says(task, recipe):
    recipe = {"fsdp": True, "per_device_train_batch_size": 4} | recipe
    run = rehearse(task, on="a100", **recipe)
    reported = estimate(task, device="cuda", compute_capability=(8, 0), **recipe)
    assert run.ok, run.message
    assert reported.peak_bytes == run.peak_bytes
    assert reported.memory.reserved_bytes == run.memory.reserved_bytes, "gathered and scattered on streams of their own"


@pytest.mark.nightly
def test_what_accelerate_cannot_shard_is_reported_by_both():
    """accelerate 1.15 shards BERT's input embedding although it has already sharded the module that contains it, so the
    training crashes. The estimate and the rehearsal must both report this error.
    """
    recipe = {"processes": 2, "fsdp": True, "per_device_train_batch_size": 2}
    bert = Task("bert-tiny", seq_len=16)
    run = rehearse(bert, on="a100", **recipe)
    assert run.status == "crashed" and "Invariant encountered" in run.message
    with pytest.raises(ValueError, match="Invariant encountered"):
        estimate(bert, device="cuda", compute_capability=(8, 0), **recipe)
