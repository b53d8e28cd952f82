"""Lesson 19's findings in libraries: these tests fail as soon as a release fixes a finding or moves its code."""

import os
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
QUIET = dict(report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, use_cpu=True)
ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(64).reshape(8, 8)]


def trained(folder, model, **flags):
    """Train a model for two steps with the Trainer; return ({dtypes of a layer's outputs}, [logged losses]).

    `folder`: for the Trainer's files; `flags`: fields of `TrainingArguments`.
    """
    seen = []
    hook = partial(lambda seen, layer, inputs, output: seen.append(output.dtype), seen)
    model.model.layers[0].mlp.up_proj.register_forward_hook(hook)
    trainer = Trainer(model, TrainingArguments(str(folder), max_steps=2, **QUIET, **flags), train_dataset=ROWS)
    trainer.train()
    return set(seen), [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_a_half_precision_checkpoint_stays_so_and_is_trained_so_without_a_word(tmp_path, recwarn, caplog):
    LlamaForCausalLM(LlamaConfig(**SIZES)).half().save_pretrained(tmp_path / "half")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "half")
    types, _ = trained(tmp_path / "out", model)
    assert types == {torch.float16} == {weight.dtype for weight in model.parameters()}
    reported = [*map(str, (warning.message for warning in recwarn)), *caplog.messages]
    assert not [text for text in reported if re.search(r"fp16|float16|half|dtype", text)]
    remedy = LlamaForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    assert trained(tmp_path / "out", remedy)[0] == {torch.float32}


def test_on_a_cpu_fp16_is_taken_and_dropped_and_bf16_is_obeyed(tmp_path, recwarn, caplog):
    def under(**flags):
        torch.manual_seed(0)
        return trained(tmp_path, LlamaForCausalLM(LlamaConfig(**SIZES)), **flags)

    plain, fp16, bf16 = under(), under(fp16=True), under(bf16=True)
    assert fp16 == plain and plain[0] == {torch.float32}
    assert bf16[0] == {torch.bfloat16}
    reported = [*map(str, (warning.message for warning in recwarn)), *caplog.messages]
    assert not [text for text in reported if re.search(r"fp16|float16", text)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bf16_without_use_cpu_is_an_error_where_there_is_no_gpu_and_fp16_is_not(tmp_path):
    with pytest.raises(ValueError, match="use_cpu"):
        TrainingArguments(str(tmp_path), bf16=True)
    assert TrainingArguments(str(tmp_path), fp16=True).fp16


@pytest.mark.parametrize("flag", ["use_ipex", "jit_mode_eval", "no_cuda"])
def test_the_flags_of_older_pages_are_gone(tmp_path, flag):
    with pytest.raises(TypeError, match=flag):
        TrainingArguments(str(tmp_path), **{flag: True})


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "given", "expected"), [(2, None, "1"), (1, None, ""), (2, "3", "3")])
def test_torchrun_gives_each_of_several_processes_one_thread_by_default(tmp_path, ranks, given, expected):
    (path := tmp_path / "script.py").write_text("import os; print(f\"<{os.environ.get('OMP_NUM_THREADS', '')}>\")")
    unset = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(path)]
    environment = unset | ({"OMP_NUM_THREADS": given} if given else {})
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert re.findall("<(.*?)>", done.stdout) == [expected] * ranks, done.stderr
