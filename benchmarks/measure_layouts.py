"""The arithmetic of `advise.parallelism`: live bytes of a rank whose model is cut, beside ranks that were followed.

    python benchmarks/measure_layouts.py

The ranks are built as lessons 17 and 18 build them: torch's tensor parallelism with vocabulary-parallel embedding and
head, alone and under FSDP2 on a second side of the mesh; the first of several stages, with the passes that it holds
(1F1B); and a rank with its part of the experts, to which as many tokens come as it sends. Each is followed on fake
tensors, alone and with checkpointing. Minutes on two cores.
"""

import functools
import sys
from dataclasses import replace

from runner import Measurement

from perf_helpers import Task
from perf_helpers.advise.parallel_layouts import Layout, Planner
from perf_helpers.estimate import estimate

SMALL = {
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "dtype": "float32",
}
TASKS = {
    "llama": Task("llama-3-8b", seq_len=1024, config=SMALL | {"num_attention_heads": 16, "num_key_value_heads": 8}),
    "llama, wide": Task("llama-3-8b", seq_len=2048, config={"num_hidden_layers": 4, "dtype": "float32"}),
    "qwen2": Task("qwen2.5-7b", seq_len=1024, config=SMALL | {"num_attention_heads": 16, "num_key_value_heads": 8}),
    "bert": Task("bert-large", seq_len=512, config={"num_hidden_layers": 8}),
    "mixtral": Task("mixtral", seq_len=512, config=SMALL | {"num_attention_heads": 16, "num_key_value_heads": 8}),
}
BATCH = 4
BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query", "key", "value", "intermediate.dense")
BY_ROWS = ("o_proj", "down_proj", "output.dense")


def blocks_of(model):
    return model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers


def train(model, batches, half, weights):
    """Two updates, each of one pass over every batch: in the order of the first stage, all forward, then backward."""
    import contextlib

    import torch

    weights = [*weights]
    kinds = dict.fromkeys(type(weight.data) for weight in weights)  # DTensors and others are not updated together
    groups = [{"params": [weight for weight in weights if type(weight.data) is kind]} for kind in kinds]
    optimizer = torch.optim.AdamW(groups, fused=True)
    for _ in range(2):
        held = []
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16) if half else contextlib.nullcontext():
                held.append(model(batch))
        while held:
            held.pop(0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def followed(task, made, half):
    """A rank of a layout, trained: what `estimate` follows."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    depth = -(-task.build_config().num_hidden_layers // made.pipeline)
    changes = {"num_hidden_layers": depth}
    if made.expert > 1:
        changes["num_local_experts"] = task.build_config().num_local_experts // made.expert
    model = task.replace(config=changes).build_model(device="cpu")
    if made.checkpointing:
        model.gradient_checkpointing_enable()
    if made.tensor * made.data > 1:
        mesh = init_device_mesh("cpu", (made.data, made.tensor), mesh_dim_names=("data", "tensor"))
    if made.tensor > 1:
        plan = {}
        for name, part in model.named_modules():
            if name.endswith(BY_COLUMNS):
                plan[name] = ColwiseParallel()
            elif name.endswith("lm_head"):
                plan[name] = ColwiseParallel(output_layouts=Replicate())
            elif name.endswith(BY_ROWS):
                plan[name] = RowwiseParallel()
            elif isinstance(part, torch.nn.Embedding) and part.num_embeddings > 1000:
                plan[name] = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, mesh["tensor"], plan)
    if made.sharing == "FSDP":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if half else MixedPrecisionPolicy()
        whole = None  # each rank has its experts to itself
        if made.expert > 1:
            whole = {weight for weight in model.parameters() if weight.dim() == 3}
        for part in (*blocks_of(model), model):
            fully_shard(part, mesh=mesh["data"], mp_policy=policy, ignored_params=whole)
    if made.pipeline > 1:  # the first stage: no head, and gradients come from the next one
        inner = model.bert if hasattr(model, "bert") else model.model
        rows = [{name: row[:1] for name, row in task.batch(1).items() if name != "labels"}] * made.pipeline
        train(lambda batch: inner(**batch).last_hidden_state, rows, half, inner.parameters())
    else:
        rows = [task.batch(BATCH)]
        train(lambda batch: model(**batch).loss, rows, half, model.parameters())


def cases(options):
    made = {}
    for name in TASKS:
        is_mixture = name == "mixtral"
        ways = [Layout(1, tensor=ways) for ways in (2, 4, 8)] * (not is_mixture)
        ways += [Layout(4, tensor=2, sharing="FSDP")] * (not is_mixture)
        ways += [Layout(1, pipeline=stages) for stages in (2, 4)]
        ways += [Layout(ways, expert=ways, sharing="FSDP") for ways in (2, 4)] * is_mixture
        for layout in ways:
            for half in (False, True):
                made[f"{name}, {layout.name}{', bf16' * half}"] = (name, layout, half, False)
            made[f"{name}, {layout.name}, bf16, checkpointing"] = (name, layout, True, True)
    return made


def measure(cases, options):
    for name, (task, layout, half, checkpointing) in cases.items():
        made, task = replace(layout, checkpointing=checkpointing), TASKS[task]
        ranks = made.data * made.tensor * made.pipeline
        device = {"device": "cuda", "compute_capability": (9, 0)}
        arguments = {"per_device_train_batch_size": BATCH, "bf16": half, "max_grad_norm": 0.0}
        planner = Planner(task, arguments, (9, 0), cards=ranks)
        told = planner.live_bytes(made, planner.one(checkpointing), 1)
        run = functools.partial(followed, made=made, half=half)
        options = {"processes": ranks} if made.tensor * made.data > 1 else {}
        found = estimate(task, function=run, **device, **options).peak_bytes
        kind = "tensor and FSDP" if made.tensor > 1 and made.data > 1 else layout.name.split()[0]
        yield name, {"name": name, "kind": kind, "followed": found, "arithmetic": round(told)}


def conclude(rows, options):
    errors = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        off = [row["arithmetic"] / row["followed"] - 1 for row in rows if row["kind"] == kind]
        errors[kind] = {"count": len(off), "least": min(off), "most": max(off)}
    return {"what": "live bytes of a rank whose model is cut: arithmetic, and followed", "errors": errors}


LAYOUTS = Measurement(__doc__, "layouts.json", cases, measure, conclude, name_of=lambda number, row: row["name"])

if __name__ == "__main__":
    sys.exit(LAYOUTS.main())
