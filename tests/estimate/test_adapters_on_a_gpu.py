"""The estimate models the differences between a GPU and a CPU in peft and bitsandbytes."""

import pytest

from trainmem.core import optional_packages
from trainmem.core.task import Task
from trainmem.estimate import estimate

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
