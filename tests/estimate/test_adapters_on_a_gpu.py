"""The estimate models the differences between a GPU and a CPU in peft and bitsandbytes."""

import contextlib

import pytest
import torch
from packaging.version import Version

from trainmem.core import optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.core.training import Experiment
from trainmem.estimate import estimate, peak_memory
from trainmem.estimate.api import target
from trainmem.estimate.operator_workspaces import Probe
from trainmem.measure import processes

SIZES = {
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
}
TASK = Task("llama-2-7b", seq_len=16, config=SIZES | {"num_key_value_heads": 4})
EVERY = {"target_modules": "all-linear"}
ADAPTERS = 2 * 7  # of each layer's seven matrices


@pytest.fixture(autouse=True)
def adapting():
    if missing := optional_packages.offer("peft"):
        pytest.skip(missing)


def learning(device, **base):
    adalora = {"peft_type": "ADALORA", "total_step": 10} | EVERY
    return estimate(TASK, device=device, peft=adalora, **base).memory.trainable_parameters


@pytest.mark.nightly
def test_ranks_of_adalora_learn_where_peft_sends_them_to_a_quantized_base():
    assert learning("cuda", load_in_4bit=True) == learning("cuda") + ADAPTERS
    assert learning("cpu", load_in_4bit=True) == learning("cuda")


@pytest.mark.nightly
def test_dora_reads_weights_of_8_bits_after_their_scales_went_to_the_layer():
    memory = estimate(TASK, device="cuda", peft={"use_dora": True} | EVERY, load_in_8bit=True).memory
    assert memory.peak_bytes > memory.breakdown["quantized_weights"] > 0


CPT = {"peft_type": "CPT"} | {f"cpt_{name}": [1, 2] for name in ("token_ids", "mask", "tokens_type_mask")}
# Peak, and live bytes at the end of each phase, in rehearsals of an A100: torch 2.15.0, transformers 5.24.0, peft
# 0.21.2, 2026-11-30. CPT computes with the base before it is sent, and keeps tokens and masks on the host. SHADOW's
# base layers are whole blocks, without a weight. aLoRA makes a mask, which a checkpoint's second forward makes again.
REHEARSED = {
    "CPT": ({"peft": CPT}, 9_278_464, (745_984, 469_504, 468_480)),
    "SHADOW": ({"peft": {"peft_type": "SHADOW"}}, 10_100_736, (1_548_288, 1_232_896, 1_231_872)),
    "aLoRA": (
        {"peft": {"alora_invocation_tokens": [3, 4]}, "gradient_checkpointing": True},
        9_177_600,
        (581_120, 552_448, 535_040),
    ),
}


@pytest.mark.parametrize("kind", REHEARSED)
def test_what_adapters_make_on_the_host_is_copied_in_each_step(kind):
    if Version(torch.__version__) < Version("2.15"):
        pytest.skip("rehearsed with torch 2.15")
    given, peak, phases = REHEARSED[kind]
    on = {"device": "cuda", "compute_capability": (8, 0), "torch_version": "2.15"}
    memory = estimate(TASK.replace(dataset_size=64), per_device_train_batch_size=2, **on, **given).memory
    assert (memory.peak_bytes, *memory.phases.values()) == (peak, *phases)


def trace_twice(tell):
    """Trace QLoRA twice in one process; return the number of blocks of each trace. `tell`: as of `trace_all`."""
    four_bits = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    given = {"quantization_config": four_bits, "dtype": "bfloat16", "peft": {"r": 4} | EVERY}
    training = Experiment("qlora", TASK, Arguments(given))
    with contextlib.closing(Probe()) as probe:
        traced = peak_memory.trace_all([training, training], target("cuda", (9, 0)), probe, tell)
    return [len(each.trace.log.blocks) for each in traced]


def test_a_second_trace_makes_the_maps_of_quantized_weights_again():
    one, other = processes.call(trace_twice, timeout=300)
    assert one == other
