"""The estimate for CUDA compared with torch's own allocator, on other trainings than the recorded ones."""

import functools
import itertools
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

from perf_helpers import Lab
from trainmem.core import optional_packages
from trainmem.core.task import Task
from trainmem.estimate import estimate
from trainmem.rehearsal import Rehearsal, build, card

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import measure_cuda

for module in (measure_cuda, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)
SEED = 20


@pytest.mark.nightly
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


QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
QWEN3 |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8000, "tie_word_embeddings": True}


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [(7, 5), (9, 0)], ids=str)
def test_a_training_has_one_peak_however_it_is_requested(capability, tmp_path):
    """A training's peak must be equal without a memory meter, with a memory meter, and in the estimate.

    Plain attention with grouped queries in fp32 adds the mask to the scores in place. While a meter tracks tensors,
    torch would make a new tensor instead; the reported peak must not contain it.
    """
    arguments = {"per_device_train_batch_size": 4, "optim": "adafactor"}
    one = measure_cuda.Training(0, "Qwen3", QWEN3, 192, arguments, capability, 1)
    with Rehearsal(card(None, capability, measure_cuda.MEMORY)) as stage:
        lab = Lab("gpu", executor=stage)
        program = lab.run(measure_cuda.rehearsed(one.experiment(tmp_path)), measure="none").value
        by_arguments = lab.train("by arguments", task=one.task(tmp_path), measure="memory", **arguments).memory
    answer = [(each.peak_bytes, each.reserved_bytes) for each in (by_arguments, one.estimated(tmp_path).memory)]
    assert answer == [(program["allocated"], program["reserved"])] * 2
    assert sum(by_arguments.breakdown.values()) == by_arguments.peak_bytes


WIDE = {"hidden_size": 512, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE |= {"num_key_value_heads": 2, "vocab_size": 64}
SPARSE = Task("llama-2-7b", seq_len=8, config=WIDE)


@pytest.mark.nightly
@pytest.mark.parametrize("arguments", [{}, {"dtype": "bfloat16", "gradient_checkpointing": True}], ids=str)
def test_adapters_with_random_masks_take_what_torchs_allocator_says(arguments):
    if reason := optional_packages.offer("peft"):
        pytest.skip(reason)
    peft = {"peft_type": "SHIRA", "r": 32, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    given = {"dtype": "float32", "per_device_train_batch_size": 1, "peft": peft} | arguments
    with Rehearsal(card("a100")) as stage:
        lab = Lab("gpu", executor=stage)
        run = lab.train("shira", task=SPARSE, measure="memory", **given)
        frod = {"peft_type": "FROD", "target_modules": ["q_proj"], "progressbar": False}
        sparse = lab.train("frod", task=SPARSE, measure="memory", **given | {"peft": frod})
    rehearsed = [(peft, run)]
    if "dtype" in arguments:
        rehearsed.append((frod, sparse))
    else:  # in fp32 its product with a sparse matrix needs cuSPARSE
        assert "cuSPARSE" in sparse.message
    for adapter, counted in rehearsed:
        answer = estimate(SPARSE, card="a100", **given | {"peft": adapter}).memory
        assert (answer.peak_bytes, answer.reserved_bytes) == (counted.peak_bytes, counted.memory.reserved_bytes)


MODERN = {"model_type": "modernbert", "hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 6}
MODERN |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


@pytest.mark.nightly
def test_a_third_step_may_be_handed_more_than_the_second(tmp_path):
    """In the third step, one allocation finds no free block of its size and gets a block that is 512 KiB larger. So the
    peak is higher than in the second step; the estimate must find this peak.
    """
    config = MODERN | {"intermediate_size": 1152, "vocab_size": 50368}
    one = measure_cuda.Training(0, "ModernBERT", config, 256, {"per_device_train_batch_size": 4}, (8, 0), 1)
    with Rehearsal(card(None, (8, 0), measure_cuda.MEMORY)) as stage:
        run = Lab("gpu", executor=stage).run(measure_cuda.rehearsed(one.experiment(tmp_path)), measure="none").value
    answer = one.estimated(tmp_path).memory
    assert (answer.peak_bytes, answer.reserved_bytes) == (run["allocated"], run["reserved"])


LLAMA = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
LLAMA |= {"dtype": "float32"}
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


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)], ids=str)
def test_what_writes_takes_what_torchs_allocator_says(capability):
    with Rehearsal(card(None, capability, measure_cuda.MEMORY)) as stage:
        lab = Lab("gpu", executor=stage)
        for task, options in itertools.product(WRITING.values(), OPTIONS):
            run = lab.infer(f"{task.model}, {options}", task=task, **options)
            answer = estimate(task, device="cuda", compute_capability=capability, training=False, **options).memory
            found, answer = ((each.peak_bytes, each.reserved_bytes) for each in (run.memory, answer))
            assert answer == found, (task.model, options)


@pytest.mark.nightly
@pytest.mark.parametrize("shared", ["0", "1"])
def test_cublaslts_workspace_is_its_own_or_shared_as_the_variable_says(shared, monkeypatch):
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", shared)
    task = Task("bert-tiny", seq_len=24, config={"hidden_size": 64, "intermediate_size": 128, "vocab_size": 300})
    recipe = {"per_device_train_batch_size": 2, "gradient_checkpointing": True, "optim": "sgd", "fp16": True}
    with Rehearsal(card("t4")) as stage:
        found = Lab("gpu", executor=stage).train("lt", task=task, measure=("memory",), **recipe).memory
    answer = estimate(task, card="t4", **recipe).memory
    assert (answer.peak_bytes, answer.reserved_bytes) == (found.peak_bytes, found.reserved_bytes)


@pytest.mark.nightly
@pytest.mark.parametrize("more", [{}, {"pad_to_multiple_of": 64}, {"packed": True}], ids=str)
def test_unequal_lengths_take_what_torchs_allocator_says(more):
    """If batches have different shapes, a batch reuses free blocks that an earlier batch left. The estimate must then
    have the same peak and reserved bytes as torch's own allocator.
    """
    task = Task(
        "llama-2-7b", config=LLAMA | {"vocab_size": 5000}, lengths=(170, 30, 90, 12, 250, 41, 8, 260, 77), **more
    )
    options = {"per_device_train_batch_size": 2, "train_sampling_strategy": "group_by_length"}
    with Rehearsal(card(None, (8, 0), measure_cuda.MEMORY)) as stage:
        run = Lab("gpu", executor=stage).train("unequal", task=task, measure=("memory",), **options)
    answer = estimate(task, device="cuda", compute_capability=(8, 0), **options).memory
    assert (answer.peak_bytes, answer.reserved_bytes) == (run.memory.peak_bytes, run.memory.reserved_bytes)


def loop_that_empties(task):
    """Run two steps of training on a task and empty torch's cache before each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batch = task.build_model().to(device), task.batch(2, device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        torch.cuda.empty_cache()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.nightly
def test_what_was_free_is_given_back_where_the_training_says_so():
    task = Task("gpt2", seq_len=64, config={"n_layer": 2, "n_embd": 512, "n_head": 8, "vocab_size": 8000})
    ways = [
        {"torch_empty_cache_steps": every, "gradient_accumulation_steps": count, "optim": optimizer}
        for every, count, optimizer in ((None, 1, "adafactor"), (1, 1, "adafactor"), (2, 2, "adamw_torch_fused"))
    ]
    answer, found = [], []
    with Rehearsal(card("t4")) as stage:
        lab = Lab("gpu", executor=stage)
        for way in ways:
            found.append(lab.train(repr(way), task=task, measure="memory", per_device_train_batch_size=2, **way).memory)
            answer.append(estimate(task, card="t4", per_device_train_batch_size=2, **way).memory)
        found.append(lab.run(loop_that_empties, task=task, measure="memory").memory)
        answer.append(estimate(task, card="t4", function=loop_that_empties).memory)
    answer, found = ([(each.peak_bytes, each.reserved_bytes) for each in memories] for memories in (answer, found))
    assert answer == found and answer[0] != answer[1], "the option tells, and the estimate knows it"


def loop_that_checkpoints(task):
    """Run one training step on a task, with each layer checkpointed. A checkpoint keeps the layer's inputs, including
    position ids that the model makes on the device.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batch = task.build_model(attn_implementation="eager").to(device), task.batch(2, device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()(**batch).loss.backward()


@pytest.mark.nightly
def test_what_a_model_makes_on_its_device_is_there_in_a_loop_too():
    task = Task("llama-2-7b", seq_len=640, config=LLAMA | {"vocab_size": 777})
    with Rehearsal(card("t4")) as stage:
        found = Lab("gpu", executor=stage).run(loop_that_checkpoints, task=task, measure="memory").memory
    answer = estimate(task, card="t4", function=loop_that_checkpoints).memory
    assert (answer.peak_bytes, answer.phases["forward"]) == (found.peak_bytes, found.phases["forward"])


def loop_that_autocasts(task, dtype, attention):
    """Run three steps of mixed precision as in PyTorch's guide: autocast of "cuda" to `dtype`, and a GradScaler for
    fp16.

    `attention`: name of the model's attention implementation.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, batch = task.build_model(attn_implementation=attention).to(device).train(), task.batch(2, device)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(enabled=dtype is torch.float16)
    for _ in range(3):
        with torch.autocast("cuda", dtype):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.nightly
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_loop_of_ones_own_autocasts_as_on_a_gpu(dtype, attention):
    task = Task("bert-tiny", seq_len=256, config={"num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 999})
    loop = functools.partial(loop_that_autocasts, dtype=dtype, attention=attention)
    with Rehearsal(card("t4")) as stage:
        found = Lab("gpu", executor=stage).run(loop, task=task, measure="memory").memory
    answer = estimate(task, card="t4", function=loop).memory
    assert (answer.peak_bytes, answer.phases) == (found.peak_bytes, found.phases)


EVALUATED = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "eval_strategy": "epoch"}
EVALUATIONS = (
    {},
    {"prediction_loss_only": False, "bf16": True},
    {"prediction_loss_only": False, "eval_accumulation_steps": 2},
    {"batch_eval_metrics": True},
    {"save_strategy": "epoch", "load_best_model_at_end": True},
)


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [(7, 5), (9, 0)], ids=str)
def test_an_evaluation_takes_what_torchs_allocator_says(capability):
    config = LLAMA | {"vocab_size": 3000, "num_key_value_heads": 2}
    tasks = Task("llama-2-7b", seq_len=32, dataset_size=22, config=config), WRITING["t5"].replace(dataset_size=10)
    with Rehearsal(card(None, capability, measure_cuda.MEMORY)) as stage:
        lab = Lab("gpu", executor=stage)
        for task, options in itertools.product(tasks, EVALUATIONS):
            recipe = EVALUATED | options
            found = lab.train(f"{task.model}, {options}", task=task, measure=("memory",), **recipe).memory
            estimated = estimate(task, device="cuda", compute_capability=capability, **recipe).memory
            estimated, found = ((each.peak_bytes, each.reserved_bytes, each.phases) for each in (estimated, found))
            assert estimated == found and "evaluation" in found[2], (task.model, options)
