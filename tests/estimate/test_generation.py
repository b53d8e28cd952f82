"""Inference that generates text: its key value cache, compared with a formula and with a plain `generate`; also the
requests that are refused.
"""

import sys

import cloudpickle
import pytest
from typer.testing import CliRunner

from perf_helpers import Lab, cli
from trainmem.core import optional_packages
from trainmem.core.task import Task
from trainmem.estimate import estimate

cloudpickle.register_pickle_by_value(sys.modules[__name__])
needs_peft = pytest.mark.skipif(optional_packages.offer("peft") is not None, reason="needs peft")
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
LLAMA = Task("llama-2-7b", seq_len=20, config=SIZES | {"vocab_size": 64, "dtype": "float32"})


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab("cpu", out=tmp_path_factory.mktemp("lab"))


def cache_bytes(tokens, answers):
    return 2 * 3 * 2 * 16 * 4 * tokens * answers  # keys and values, layers, heads, head size, bytes


@pytest.mark.daily(1)
@pytest.mark.parametrize(("beams", "batch", "new"), [(4, 2, 12), (1, 5, 30)])
def test_the_cache_takes_what_the_formula_says(lab, beams, batch, new):
    options = {"max_new_tokens": new, "num_beams": beams, "per_device_eval_batch_size": batch}
    run = lab.infer(f"{beams} beams", task=LLAMA, **options)
    tokens, answers = 20 + new - 1, batch * beams  # the last token is written and never read
    most = max(run.memory.timeline["key_value_cache"])
    copies = most - cache_bytes(tokens, answers)
    # Where a layer's keys get another token, or another order of beams, those that were before are still there.
    assert copies == cache_bytes(tokens - 1, answers) / 6 if beams == 1 else 0 < copies <= cache_bytes(tokens, answers)
    assert max(estimate(LLAMA, device="cpu", training=False, **options).memory.timeline["key_value_cache"]) == most


@needs_peft
@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "PROMPT_TUNING"])
def test_a_prompt_that_was_learnt_is_in_the_cache_once_or_an_old_peft_is_named(lab, kind):
    prompt = {"peft": {"peft_type": kind, "num_virtual_tokens": 4, "num_layers": 3, "num_attention_heads": 2}}
    prompt["peft"] |= {"token_dim": 32} if kind == "PREFIX_TUNING" else {}  # keys and values have two heads of 16
    options = {"max_new_tokens": 9, "per_device_eval_batch_size": 1} | prompt
    try:
        run = lab.infer(kind, task=LLAMA, **options)
    except ValueError as error:
        assert "is too old for transformers" in str(error)
        return
    most, tokens = max(run.memory.timeline["key_value_cache"]), 4 + 20 + 9 - 1
    assert cache_bytes(tokens, 1) <= most < cache_bytes(tokens + 1, 1) * 7 / 6, "one layer's keys are copied"
    assert estimate(LLAMA, device="cpu", training=False, **options).peak_bytes == run.peak_bytes


@pytest.mark.nightly
@needs_peft
@pytest.mark.parametrize("beams", [1, 3])
def test_a_model_with_lora_writes_as_many_tokens(lab, beams):
    options = {"max_new_tokens": 9, "num_beams": beams, "per_device_eval_batch_size": 2}
    run = lab.infer("lora", task=LLAMA, peft={"r": 4}, **options)
    without = max(lab.infer("plain", task=LLAMA, **options).memory.timeline["key_value_cache"])
    assert max(run.memory.timeline["key_value_cache"]) == without >= cache_bytes(20 + 9 - 1, 2 * beams)
    assert estimate(LLAMA, device="cpu", training=False, peft={"r": 4}, **options).peak_bytes == run.peak_bytes


@pytest.mark.nightly
def test_a_static_cache_is_as_large_from_the_start_and_never_copied(lab):
    run = lab.infer("static", task=LLAMA, max_new_tokens=30, cache_implementation="static")
    assert max(run.memory.timeline["key_value_cache"]) == cache_bytes(20 + 30 - 1, answers=8)


def _plain(task):
    """Generate text with a task's model as a user's code without this project would; return the shape of the result."""
    import torch

    model = task.build_model().eval()
    model.generation_config.eos_token_id = None
    prompts = task.batch(8)["input_ids"]  # a prompt has no labels
    options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 9, "do_sample": False}
    with torch.no_grad():
        model.generate(prompts, **options)
        return [*model.generate(prompts, **options).shape]


@pytest.mark.nightly
def test_it_counts_what_a_plain_generate_takes(lab):
    plain = lab.run(_plain, "plain", task=LLAMA, measure=("memory",), use_cpu=True)
    assert plain.value == [8, 29]
    assert lab.infer("ours", task=LLAMA, max_new_tokens=9, use_cpu=True).peak_bytes == plain.peak_bytes


def test_a_training_has_no_cache(lab):
    run = lab.train("t", task=LLAMA, measure=("memory",), per_device_train_batch_size=2)
    assert run.memory.breakdown["key_value_cache"] == 0 < run.memory.breakdown["activations"]


@pytest.mark.parametrize(
    ("task", "options", "reason"),
    [
        (LLAMA, {"num_beams": 3}, "num_beams needs max_new_tokens"),
        (LLAMA, {"max_new_tokens": 0}, "max_new_tokens=0"),
        (LLAMA, {"max_new_tokens": 3, "cache_implementation": "paged"}, "Choose from dynamic, static"),
        (Task("gpt2", seq_len=1000), {"max_new_tokens": 30}, "max_new_tokens=30 .*1024 .*1000"),
        (
            Task("bert-tiny", seq_len=16, architecture="BertForSequenceClassification"),
            {"max_new_tokens": 3},
            "generate",
        ),
    ],
)
def test_what_cannot_write_is_refused(task, options, reason):
    with pytest.raises(ValueError, match=reason):
        estimate(task, device="cpu", training=False, **options)


def test_a_training_that_is_to_write_is_refused(lab):
    with pytest.raises(ValueError, match=r"max_new_tokens .*--inference"):
        lab.train("t", task=LLAMA, max_new_tokens=3)
    words = ["estimate", "--model", "gpt2", "--max_new_tokens", "3"]
    assert "--inference" in str(CliRunner().invoke(cli.app, words).exception)


@pytest.mark.nightly
def test_the_command_line_shows_the_cache():
    words = ["estimate", "--model", "gpt2", "--seq-len", "300", "--inference", "--device", "cpu"]
    result = CliRunner().invoke(cli.app, [*words, "--max_new_tokens", "2", "--num_beams", "2"])
    assert result.exit_code == 0 and "key value cache" in result.stdout
