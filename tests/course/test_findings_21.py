"""Lesson 21's findings in libraries: these tests fail as soon as a release fixes a finding or moves its code."""

import inspect

import pytest
import torch
from accelerate.hooks import AlignDevicesHook
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

CONFIG = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2)
PLACES = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
PLACES |= {f"model.layers.{number}": "disk" if number > 1 else "cpu" for number in range(4)}


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_trainer_trains_what_is_not_on_disk_and_says_nothing(checkpoint, tmp_path, recwarn):
    model = LlamaForCausalLM.from_pretrained(checkpoint, device_map=PLACES)
    ids = torch.arange(64).reshape(8, 8)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    quiet = dict(use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True)
    trainer = Trainer(model, TrainingArguments(str(tmp_path / "out"), max_steps=2, **quiet), train_dataset=rows)
    trainer.train()
    assert not [warning for warning in recwarn if "train" in str(warning.message).lower()]
    trainer.save_model(str(tmp_path / "trained"))
    before, after = (LlamaForCausalLM.from_pretrained(path).state_dict() for path in (checkpoint, tmp_path / "trained"))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if ".layers.2." in name or ".layers.3." in name}


def test_the_hook_of_a_layer_on_disk_leaves_another_parameter_behind(checkpoint):
    model = LlamaForCausalLM.from_pretrained(checkpoint, device_map=PLACES)
    part = model.model.layers[3].self_attn.q_proj
    given = part.weight
    part._hf_hook.pre_forward(part, torch.ones(1, 32))
    at_work = part.weight
    assert isinstance(part._hf_hook, AlignDevicesHook) or part._hf_hook.hooks
    assert at_work is not given and not at_work.is_meta
    part._hf_hook.post_forward(part, torch.ones(1, 32))
    assert part.weight is not at_work and part.weight.is_meta


def test_the_trainer_returns_early_for_any_model_with_a_device_map():
    source = inspect.getsource(Trainer._move_model_to_device)
    assert "hf_device_map" in source and "return" in source[: source.index("model.to(device)")]


@pytest.mark.parametrize("flag", [True, False])
def test_low_cpu_mem_usage_is_taken_and_ignored(checkpoint, monkeypatch, flag):
    seen = []
    build = LlamaForCausalLM.__init__

    def noting(self, config, *args, **kwargs):
        build(self, config, *args, **kwargs)
        seen.append({weight.device.type for weight in self.parameters()})

    monkeypatch.setattr(LlamaForCausalLM, "__init__", noting)
    LlamaForCausalLM.from_pretrained(checkpoint, low_cpu_mem_usage=flag)
    assert seen == [{"meta"}]


def test_nothing_is_put_into_the_offload_folder(checkpoint, tmp_path):
    LlamaForCausalLM.from_pretrained(checkpoint, device_map=PLACES, offload_folder=tmp_path / "offload")
    assert not [*(tmp_path / "offload").rglob("*")]
