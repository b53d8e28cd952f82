"""Lesson 23's findings in libraries: these tests fail as soon as a release fixes a finding or moves its code."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.debug_utils import DebugUnderflowOverflow, detect_overflow

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
IDS = torch.arange(32).reshape(4, 8)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def trained(model, folder, **options):
    """Train a model for two steps with every label masked, and return the logged losses.

    `folder`: for the Trainer's files; `options`: fields of `TrainingArguments`.
    """
    rows = [{"input_ids": row, "labels": torch.full_like(row, -100)} for row in IDS]
    quiet = dict(use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, max_steps=2)
    trainer = Trainer(model, TrainingArguments(str(folder), **quiet, **options), train_dataset=rows)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_the_detector_passes_over_the_loss_of_a_model_that_returns_a_dict(model, capsys):
    DebugUnderflowOverflow(model)
    assert model(input_ids=IDS, labels=torch.full_like(IDS, -100)).loss.isnan()
    assert "nan" not in capsys.readouterr().out


def test_the_detector_sees_a_loss_in_a_tuple(capsys):
    class Tupled(torch.nn.Module):
        def forward(self, x):
            return x.sum() * float("nan"), x

    model = Tupled()
    DebugUnderflowOverflow(model)
    with pytest.raises(ValueError, match="inf/nan detected"):
        model(torch.ones(2))
    assert "nans" in capsys.readouterr().out


def test_the_detector_tests_for_no_underflow():
    assert not detect_overflow(torch.zeros(4), "zeros")
    assert not detect_overflow(torch.tensor([1e-7]).half(), "the least of fp16, rounded")


def test_a_nan_loss_is_logged_as_zero_unless_the_filter_is_off(model, tmp_path):
    assert trained(model, tmp_path) == [0.0, 0.0]
    off = trained(model, tmp_path, logging_nan_inf_filter=False)
    assert len(off) == 2 and all(loss != loss for loss in off)


def test_the_trainers_detector_says_nothing_of_it_either(model, tmp_path, capsys):
    assert trained(model, tmp_path, debug="underflow_overflow") == [0.0, 0.0]
    assert "Detected inf/nan" not in capsys.readouterr().out


def test_adamw_in_half_precision_divides_by_zero():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    weight.grad = torch.full_like(weight, 1e-4)  # finite, and its square is 0 in fp16
    torch.optim.AdamW([weight], lr=1e-3).step()
    assert not torch.isfinite(weight).all()


def test_anomaly_mode_stops_at_a_nan_that_reaches_nothing_and_passes_an_inf():
    x = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning), pytest.raises(RuntimeError, match="nan"):
        torch.where(x > 0, x.relu().log(), x).sum().backward()
    y = torch.zeros(1, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        y.sqrt().sum().backward()
    assert torch.isinf(y.grad).all()
