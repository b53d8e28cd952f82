"""The memory of a deep model, extrapolated from two shallow ones, compared with a trace of all its layers."""

import pytest

from trainmem.core import optional_packages
from trainmem.core.task import Task
from trainmem.estimate import depth, estimate

LAYERS = 10
NARROW = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
NARROW |= {"dtype": "float32"}
TASK = Task(
    "llama-3-8b", seq_len=48, config=NARROW | {"vocab_size": 6000, "num_hidden_layers": LAYERS}, dataset_size=32
)
RECIPES = {
    "the loss is the peak of the shallow ones, and not of the deep one": {"optim": "adamw_torch_fused"},
    "accumulation": {"optim": "adafactor", "gradient_checkpointing": True, "gradient_accumulation_steps": 4},
    "adapters": {"peft": {"r": 4, "target_modules": "all-linear"}, "bf16": True, "gradient_checkpointing": True},
}
STATES = ("weights", "frozen_weights", "quantized_weights", "gradients", "optimizer_states")


@pytest.mark.nightly
@pytest.mark.parametrize(("recipe", "device"), [*zip(RECIPES, ["cuda", "cuda", "cpu"], strict=True)])
def test_two_shallow_models_tell_the_peak_of_a_deep_one_to_a_hundredth(recipe, device):
    arguments = {"per_device_train_batch_size": 2} | RECIPES[recipe]
    if "peft" in arguments and (reason := optional_packages.offer("peft")):
        pytest.skip(reason)
    target = {"device": device} | ({"compute_capability": (8, 0)} if device == "cuda" else {})
    line, whole = depth.line(TASK, **target, **arguments), estimate(TASK, **target, **arguments)
    alive, reserved = line.at(LAYERS)
    assert alive == pytest.approx(whole.peak_bytes, rel=0.01)
    assert alive <= reserved == pytest.approx(whole.memory.reserved_bytes or whole.peak_bytes, rel=0.15)
    states = [sum(parts[name] for name in STATES) for parts in whole.memory.phase_breakdowns.values()]
    assert 0.98 * max(states) <= line.states_at(LAYERS) <= 1.001 * max(states)  # at least so many: never more


@pytest.mark.parametrize(
    ("model", "config", "layers"),
    [
        ("llama-3-70b", {}, 80),
        ("bert-base-uncased", {}, None),
        ("t5-3b", {"num_layers": 30}, None),
        ("gpt2-xl", {}, 48),
    ],
)
def test_only_a_model_with_many_layers_in_one_row_is_deep(model, config, layers):
    assert depth.layers_of(Task(model, config=config)) == layers
