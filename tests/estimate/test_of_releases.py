"""Changes in transformers and torch releases that affect memory; docs/releases.md names these tests.

Each test passes under every supported release: it tests the behaviour of the installed one.
"""

import json
import sys
from functools import partial

import cloudpickle
import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils.flop_counter import FlopCounterMode

from perf_helpers import Lab
from perf_helpers.lab import roofline
from trainmem.core.task import Task
from trainmem.estimate import estimate

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SINCE_5_24 = Version(transformers.__version__) >= Version("5.24")
SINCE_2_15 = torch.__version__ >= (2, 15)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
SMALL["num_key_value_heads"] = 4
GPT_J = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "vocab_size": 100, "n_positions": 256, "n_ctx": 256}
DEEPSEEK = SMALL | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 32}
DEEPSEEK |= {"first_k_dense_replace": 1, "moe_intermediate_size": 32, "max_position_embeddings": 64}
DEEPSEEK |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
ERNIE = SMALL | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab("cpu", out=tmp_path_factory.mktemp("lab"))


def task_of(folder, kind, architecture, sizes, seq_len):
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": kind, "architectures": [architecture]} | sizes))
    return Task(str(file), seq_len=seq_len)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "architecture"), [("gptj", "GPTJForCausalLM"), ("codegen", "CodeGenForCausalLM")])
def test_gpt_j_has_fused_attention_since_transformers_5_24(lab, tmp_path, kind, architecture):
    task = task_of(tmp_path, kind, architecture, GPT_J, seq_len=256)
    peaks = {}
    for name in ("eager", None):
        chosen = {"attn_implementation": name} if name else {}
        found = estimate(task, device="cpu", per_device_train_batch_size=2, **chosen)
        run = lab.train(f"{kind}, {name}", task=task, per_device_train_batch_size=2, measure=("memory",), **chosen)
        assert run.ok, run.message
        assert (found.peak_bytes, found.memory.breakdown) == (run.peak_bytes, run.memory.breakdown)
        peaks[name] = run.peak_bytes
    square = 4 * 2 * 4 * 256 * 256  # bytes of a layer's scores: of two samples, four heads
    if SINCE_5_24:
        assert peaks["eager"] - peaks[None] > 2 * square
    else:
        assert peaks["eager"] == peaks[None]


@pytest.mark.parametrize(
    ("kind", "architecture", "sizes", "stays"),
    [
        ("deepseek_v3", "DeepseekV3ForCausalLM", DEEPSEEK, SINCE_5_24),
        ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", ERNIE, True),
    ],
)
def test_routers_that_stay_in_fp32_are_built_as_from_pretrained_loads_them(tmp_path, kind, architecture, sizes, stays):
    task = task_of(tmp_path, kind, architecture, sizes, seq_len=16)
    built = task.build_model(dtype="bfloat16")
    built.save_pretrained(tmp_path / "saved")
    loaded = type(built).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    types = {name: weight.dtype for name, weight in loaded.named_parameters()}
    assert {name: weight.dtype for name, weight in built.named_parameters()} == types
    routers = {dtype for name, dtype in types.items() if name.endswith("mlp.gate.weight")}
    assert routers == {torch.float32 if stays else torch.bfloat16}


def test_accelerate_names_the_type_in_which_fsdp_reduces_gradients():
    """Since torch 2.15 FSDP2 reduces gradients in the type of the parameters by default. Under the Trainer this default
    has no effect, because accelerate always names the type: the one in which FSDP2 computes.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin

    policy = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16").mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.bfloat16)


def in_buckets(task, **options):
    """Run three steps of DistributedDataParallel on a task, with an optimizer that has no states.

    Only weights, gradients and buckets stay in memory. `options`: arguments of DistributedDataParallel.
    """
    torch.distributed.init_process_group("gloo")
    ddp = torch.nn.parallel.DistributedDataParallel(task.build_model(), broadcast_buffers=False, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        ddp(**task.batch(1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


LAZY = pytest.param({"lazy_bucket_allocation": True}, 2, marks=pytest.mark.skipif(not SINCE_2_15, reason="torch 2.15"))


@pytest.mark.parametrize(("options", "sets"), [({}, 3), ({"gradient_as_bucket_view": True}, 2), LAZY], ids=str)
@pytest.mark.nightly
def test_buckets_of_ddp_are_a_set_of_gradients_unless_they_are_views_or_freed(lab, options, sets):
    """The buckets of DistributedDataParallel take as many bytes as the gradients, unless one of two options is on.

    `sets` is the memory after backward divided by 4 bytes per parameter: 1 for the weights, 1 for the gradients, 1 for
    the buckets. Each option, off by default, saves the bytes of the buckets.
    """
    task = Task("bert-tiny", seq_len=8)
    run = lab.run(partial(in_buckets, **options), task=task, processes=2, measure=("memory",), use_cpu=True)
    assert run.ok, run.message
    assert round(sum(run.memory.phase_breakdowns["backward"].values()) / task.parameters() / 4, 1) == sets


@pytest.mark.nightly
def test_model_flops_do_not_depend_on_what_the_counter_knows_of_attention(monkeypatch):
    """Since torch 2.15 FlopCounterMode counts the FLOPs of fused attention on a CPU; before, it counted 0 for them.
    `model_flops` must give the same number with both.
    """
    task = Task("llama-3-8b", seq_len=16, config={**SMALL, "head_dim": 16})
    requested, batch = roofline.model_flops(task), task.batch(1)
    with FlopCounterMode(display=False) as fused:
        task.build_model(attn_implementation="sdpa")(**batch).loss.backward()
    with FlopCounterMode(display=False) as plain:
        task.build_model(attn_implementation="eager")(**batch).loss.backward()
    assert plain.get_total_flops() == requested
    assert (fused.get_total_flops() < requested) == (not SINCE_2_15)
