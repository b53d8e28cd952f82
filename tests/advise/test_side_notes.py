"""What an advice says beside its recipes: attention's kernel, compiled code, sizes that should be padded."""

import dataclasses

import pytest

from perf_helpers import Task
from perf_helpers.records import Memory

GPU = {"device": "cuda", "compute_capability": (8, 0)}


def said(advice, word):
    return [note for note in advice.notes if word in note]


@pytest.mark.parametrize(
    ("kernels", "words"), [(("flash",), "takes the flash kernel"), ((), "is plain"), (("cuDNN", "flash"), "and flash")]
)
def test_attentions_kernel_is_told(ask, attending, kernels, words):
    attending(*kernels)
    (line,) = said(ask(), "Attention")
    assert words in line


def test_compiled_code_is_told_once_it_was_measured_with_its_memory(ask, pairs):
    (line,) = said(ask(runs=pairs(13.0, torch_compile=True)), "torch.compile")
    assert "cannot be estimated" in line, "the runs have no memory"

    def with_peak(run):
        peak = 120 if run.arguments.get("torch_compile") else 100
        return dataclasses.replace(run, memory=Memory(peak, "counted"))

    runs = [with_peak(run) for run in pairs(20.0, torch_compile=True)]
    (line,) = said(ask(runs=runs), "torch.compile")
    assert "2.00" in line and "1.20 x the peak" in line and "3 pairs" in line
    (line,) = said(ask(runs=runs[:2]), "torch.compile")
    assert "speed not measured" in line and "1.20 x the peak" in line, "one pair says nothing of speed"


def test_a_vocabulary_is_padded_where_a_product_is_as_wide_and_the_device_wants_multiples(ask):
    language, classifier = Task("gpt2", seq_len=32), Task("bert-tiny", seq_len=32)
    (line,) = said(ask(task=language, **GPU), "vocabulary")
    assert "pad_to_multiple_of=64" in line and "50304" in line and "MB" in line
    (line,) = said(ask(task=language, device="cuda", compute_capability=(7, 5)), "vocabulary")
    assert "pad_to_multiple_of=8" in line and "50264" in line
    assert not said(ask(task=language), "vocabulary"), "a CPU"
    assert not said(ask(task=classifier, **GPU), "vocabulary"), "it is looked up, not multiplied"
    assert not said(ask(task=language.replace(config={"vocab_size": 50304}), **GPU), "vocabulary")


def test_a_length_is_padded_to_eight(ask):
    (line,) = said(ask(task=Task("bert-tiny", seq_len=30), **GPU), "tokens are no multiple")
    assert "pad to 32" in line
    assert not said(ask(task=Task("bert-tiny", seq_len=32), **GPU), "tokens are no multiple")


def test_plain_attention_and_unfused_adamw_are_for_who_asks(ask):
    names = {name for recipe in ask(memory=10**12, most=99).recipes for name in recipe.arguments.values()}
    assert not {"eager", "adamw_torch"} & names
    asked = ask(memory=10**12, must={"attn_implementation": "eager", "optim": "adamw_torch"})
    first = asked.recipes[0]
    assert first.arguments["attn_implementation"] == "eager" and first.arguments["optim"] == "adamw_torch"
    assert any("square of length x length" in cost for cost in first.costs)
    assert any("foreach" in cost for cost in first.costs)
