# %% [markdown]
# # Why does every rank keep the same bytes?
#
# Your training runs out of memory on one GPU. You rent a second one, start DDP (lesson 15), and it runs out of memory again. DDP gives each rank its own samples, but also a full copy of all weights, gradients and optimizer states. ZeRO, the *zero redundancy optimizer*, keeps one copy, divided among the ranks.
#
# **You will see**
# - optimizer states, gradients and weights sharded one after the other: the losses stay equal, and a formula predicts the bytes
# - how much each stage sends, and which part of the peak no stage makes smaller
# - the same in FSDP2 and DeepSpeed, optimizer states kept on the host or in a file, and when none of it is worth it
#
# **Time:** 40 minutes in two parts. The cells run for 70 s on two CPU cores, 120 s with DeepSpeed.
#
# **Before you start:** lessons 01 (memory) and 15 (DDP).
#
# **What a CPU cannot show:** what offload to the host's memory saves on a GPU, and what NCCL sends between GPUs. The ranks of part 1 are processes on your CPU even if you have a GPU: they store the same bytes.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import mmap
import os
import random
import tempfile
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from IPython.display import display
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perf_helpers import Claims, Lab, Task, exercises, hardware, optional_packages, plots, slow_link, widgets
from perf_helpers.advise import parallelism
from trainmem.estimate import estimate

no_deepspeed = optional_packages.offer("deepspeed")
lab = Lab(profile, strict=strict, out=out, lesson="16_zero")
claims = Claims(lab)
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 2000}
sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 4}
task = Task("bert-small", seq_len=32, config=no_dropout | sizes | {"num_hidden_layers": lab.sized(4, 2)})
parameters = task.parameters()

# %% [markdown]
# ## Part 1: divide the copies
# ### Idea
#
# In fp32 with AdamW, a parameter takes 16 bytes: 4 for the weight, 4 for the gradient and 8 for the optimizer states (lesson 01). With *P* parameters, each rank of a data-parallel training stores 16 P. (torch's DDP stores 20 P by default, because of its buckets: lesson 15.) One copy among all ranks would be enough: each of *N* ranks stores an *N*-th of it, its **shard**. ZeRO's stage 1 shards the optimizer states, stage 2 the gradients too, and stage 3 the weights too.
#
# When a rank needs bytes that it does not store, it receives them. Two messages do this; all ranks take part in each:
#
# - **reduce-scatter** sums a tensor over the ranks, and leaves each rank its shard of the sum;
# - **all-gather** joins the shards into the whole tensor, on every rank.
#
# ### Predict

# %%
widgets.predict(
    lab, "stage1", "Two ranks, stage 1: how many % of DDP's 16 bytes per parameter does a rank store?", "%", 0, 100
)

# %%
exercises.question(
    lab,
    "halves",
    "Two ranks, stage 3, as many samples per rank as with DDP. Which part of the peak halves?",
    {
        "all of it": "Each rank still computes every layer for its own samples, and keeps their activations "
        "for backward.",
        "weights, gradients and states, but not the activations": "The activations belong to the samples of one rank, "
        "so there is no second copy to remove. Besides, the weights of the layer in use are there whole.",
        "only the weights": "Stage 3 also shards what stages 1 and 2 shard: the states and the gradients.",
    },
    right="weights, gradients and states, but not the activations",
)

# %% [markdown]
# ### What is stored where
#
# | stage | sharded | bytes per rank, 4 + 4 + 8 (weight, gradient, states) | bytes per rank, 2 + 2 + 12 |
# |---|---|---|---|
# | 0 | nothing | 16 P | 16 P |
# | 1 | optimizer states | 8 P + 8 P/N | 4 P + 12 P/N |
# | 2 | gradients too | 4 P + 12 P/N | 2 P + 14 P/N |
# | 3 | weights too | 16 P/N | 16 P/N |
#
# The last column is for large models, which often have weights and gradients in bf16. The optimizer then keeps an fp32 copy of the weights: 12 is this copy and the states, 4 + 8 bytes. The sum is the same, but stage 1 has more to shard.
#
# In the picture, a filled box is stored on that rank; a dotted box is not.

# %%
import matplotlib.pyplot as plt

_, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
boxes = {"weights": (4, 3), "gradients": (4, 2), "optimizer_states": (8, 1)}  # bytes per parameter, sharded from stage
ticks = {2.6 * stage + rank: (stage, rank) for stage in range(4) for rank in range(2)}
for row, (stage, rank) in ticks.items():
    start = 0
    for kind, (size, least) in boxes.items():
        part = size / 2 if stage >= least else size
        ax.barh(row, size, 0.8, start, fill=False, edgecolor="black", linestyle=":")
        ax.barh(row, part, 0.8, start + rank * (size - part), color=plots.PALETTE[kind])
        if not row:
            ax.text(start + size / 2, -0.9, plots.name_text(kind), ha="center", va="center")
        start += size
ax.set_yticks([*ticks], [f"{f'stage {stage}' if stage else 'DDP'}, rank {rank}" for stage, rank in ticks.values()])
ax.set(xlabel="bytes per parameter", xlim=(-0.2, 16.2), ylim=(9.4, -1.5))
_ = ax.set_title("What each of two ranks stores (fp32, AdamW)", loc="left")

# %% [markdown]
# ### By hand
#
# All weights of a module are joined into one long tensor, a **flat parameter**; each rank owns one shard of it.
#
# - `Traffic` records the messages. It is a *dispatch mode*: torch passes it each operation before the operation runs.
# - `FlatParameter` makes the flat parameter of a module (`whole`) and this rank's `shard`. A weight becomes a view of its piece of the flat parameter, so the model's own code does not change. The optimizer gets the shards and nothing else.
# - `ShardedParameter` adds the messages. It reduce-scatters gradients: in stage 1 after backward (in `finish`), in stages 2 and 3 during backward. In stage 3 it also gathers weights before a module runs and frees them afterwards.


# %%
class Traffic(TorchDispatchMode):
    """Record the collective operations: [name, bytes of the whole tensor]."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # FSDP2's tensors call the operation again, with the shard
        if function.namespace == "c10d":  # torch.distributed's own operations
            size = max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            self.seen.append([function.overloadpacket.__name__.strip("_"), size])
        return function(*args, **(kwargs or {}))


def flatten(tensors, length):
    """Return one flat tensor of that length with all tensors, padded with zeros, and a view of each tensor's piece."""
    flat, views, at = torch.zeros(length), [], 0
    for tensor in tensors:
        views.append(flat[at : at + tensor.numel()].view_as(tensor).copy_(tensor))
        at += tensor.numel()
    return flat, views


# %%
class FlatParameter:
    def __init__(self, module, stage):
        self.stage, self.weights, self.pending = stage, [*module.parameters()], 0  # pending: gradients still to come
        self.ranks = dist.get_world_size()
        # The number of weights, rounded up to a multiple of the ranks: all shards have the same size.
        self.length = -(-sum(weight.numel() for weight in self.weights) // self.ranks) * self.ranks
        self.whole, views = flatten([weight.data for weight in self.weights], self.length)
        for weight, view in zip(self.weights, views):
            weight.data = view
        dist.broadcast(self.whole, src=0)  # all ranks start from the weights of rank 0
        own = self.whole.chunk(self.ranks)[dist.get_rank()]
        self.shard = torch.nn.Parameter(own.clone() if stage == 3 else own)  # all that the optimizer sees
        if stage == 1:
            self.gradients, views = flatten([torch.zeros_like(weight) for weight in self.weights], self.length)
            for weight, view in zip(self.weights, views):
                weight.grad = view  # backward adds into the flat tensor
        else:
            for weight in self.weights:
                weight.register_post_accumulate_grad_hook(self.count_gradient)  # stages 2 and 3: during backward
        if stage == 3:
            self.free()
            module.register_forward_pre_hook(self.gather)  # whole while it is used: in forward
            module.register_forward_hook(self.free)
            module.register_full_backward_pre_hook(self.gather)  # and in backward


# %%
class ShardedParameter(FlatParameter):  # the messages of a flat parameter in a step
    def count_gradient(self, _):
        # The module's first gradient starts the count, each one lowers it by 1.
        self.pending = (self.pending or len(self.weights)) - 1
        if not self.pending:  # this was the last gradient of the module
            gradients, _ = flatten([weight.grad for weight in self.weights], self.length)
            for weight in self.weights:
                weight.grad = None
            self.reduce(gradients)
            if self.stage == 3:
                self.free()

    def reduce(self, gradients):
        own = gradients.chunk(self.ranks)[dist.get_rank()] if self.stage == 1 else torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(own, gradients)  # own: this rank's shard of the sum
        own = own.div_(self.ranks)  # the mean over the ranks
        self.shard.grad = own if self.shard.grad is None else self.shard.grad.add_(own)

    def gather(self, *_):
        # Room again, 4 bytes per number; also for the weights, which are views of it.
        self.whole.untyped_storage().resize_(4 * self.length)
        dist.all_gather_into_tensor(self.whole, self.shard.data)

    def free(self, *_):
        self.whole.untyped_storage().resize_(0)  # frees the bytes and keeps the tensor


# %%
def train(task, stage, steps=3, samples=4, accumulate=1, link=None):
    if link:
        link.join()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    model, losses, gradients = task.build_model(), [], []
    modules = [model.bert.embeddings, *model.bert.encoder.layer, model.bert.pooler, model.classifier]
    flat_parameters = [ShardedParameter(module, stage) for module in modules] if stage else []
    optimizer = torch.optim.AdamW([flat.shard for flat in flat_parameters] or model.parameters())
    for step in range(steps):
        before, sent = slow_link.bytes_sent() or 0, Traffic()
        # The ranks share the samples of a step: of two ranks, each takes every second sample.
        rows = {name: row[samples * step :][rank:samples:ranks] for name, row in task.batch(samples * steps).items()}
        for number in range(accumulate):
            with sent:
                loss = model(**{name: row[number::accumulate] for name, row in rows.items()}).loss / accumulate
                loss.backward()
        gradients.append(finish(model, flat_parameters, optimizer, sent, stage, ranks))
        wire = (slow_link.bytes_sent() or 0) - before
        losses.append(loss.item() * accumulate)
    return {"losses": losses, "gradients": gradients, "sent": sent.seen, "wire": wire}


# %%
def finish(model, flat_parameters, optimizer, sent, stage, ranks):
    """Reduce the remaining gradients, update, gather the new weights; return the norm of the whole gradient."""
    with sent:
        for weight in model.parameters() if stage == 0 and ranks > 1 else ():
            dist.all_reduce(weight.grad.div_(ranks))
        for flat in flat_parameters if stage == 1 else ():
            flat.reduce(flat.gradients)
    square = sum(weight.grad.square().sum() for group in optimizer.param_groups for weight in group["params"])
    if flat_parameters:
        dist.all_reduce(square)  # only for the comparison: each rank has the sum of squares of its shard
    with sent:
        optimizer.step()
        optimizer.zero_grad()
        for flat in flat_parameters if stage in (1, 2) else ():
            dist.all_gather_into_tensor(flat.whole, flat.shard.data)
            if stage == 1:
                flat.gradients.zero_()
    return square.sqrt().item()


# %% [markdown]
# ### Baseline
#
# First one process trains on all samples. Then two ranks train, and each stores everything (stage 0).

# %%
counting = {"measure": ("memory",), "use_cpu": True}  # CPU ranks, also if there is a GPU: the bytes are the same
# If the machine allows it, the ranks get a network of their own, whose device counts bytes, until the lesson ends.
link = None if slow_link.missing() else (network := slow_link.link()).__enter__()
one = lab.run(partial(train, stage=0), "one process", task=task, **counting)
runs = {0: lab.run(partial(train, stage=0, link=link), "stage 0", task=task, processes=2, **counting)}


def same(run):
    """Stop unless losses and gradients are those of one process."""
    ranks = [rank["value"] for rank in run.ranks]
    losses = [sum(step) / len(ranks) for step in zip(*(rank["losses"] for rank in ranks))]
    torch.testing.assert_close(losses, one.value["losses"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ranks[0]["gradients"], one.value["gradients"], rtol=1e-2, atol=0.0)


same(runs[0])

# %% [markdown]
# ### Change one thing
#
# The next cell stops if the losses or the norm of the gradient differ from those of one process. (Losses alone are not enough: AdamW divides by the gradient's size, which hides a gradient that is twice too large.)

# %%
for stage in (1, 2, 3):
    each = partial(train, stage=stage, link=link)
    runs[stage] = lab.run(each, f"stage {stage}", task=task, processes=2, **counting)
    same(runs[stage])

KINDS = ("weights", "gradients", "optimizer_states")


def formula(stage, ranks):
    """Return the bytes per parameter of weights, gradients and states on each rank."""
    weights, gradients = (4 / ranks if stage >= least else 4 for least in (3, 2))  # sharded from this stage on
    return [weights, gradients, 8 / ranks if stage >= 1 else 8]


def counted(run, kinds=KINDS):
    """Return the same, counted after backward, when all of them exist."""
    return [run.memory.phase_breakdowns["backward"][kind] / parameters for kind in kinds]


rows, names = [], ["weights", "gradients", "states"]
for stage, run in runs.items():
    expected, seen = formula(stage, 2), counted(run)
    rows.append([run.name, *(f"{a:.3f} ({b:g})" for a, b in zip(seen, expected)), sum(seen), sum(expected)])
display(plots.Table(["bytes per parameter: counted (formula)", *names, "sum, counted", "sum, formula"], rows))
widgets.revealed(lab, "stage1", 100 * sum(counted(runs[1])) / 16)

# %%
axes = plots.memory([*runs.values()], title="Peak of a rank, two ranks, by hand")

# %% [markdown]
# The table counts the bytes between backward and the optimizer update. Its *weights* include the model's small buffers (tensors that are not trained), which the formula leaves out. The picture shows the peak, which also contains temporaries and, in stage 3, the gathered weights of the module in use.
#
# ### What no stage makes smaller
#
# The next cell trains a model with 2 layers on longer inputs, in stages 0 and 3: 32 samples of 128 tokens, 16 for each rank.

# %%
longer, rows = task.replace(seq_len=128, config={"num_hidden_layers": 2}), []
for stage in (0, 3):
    each = partial(train, stage=stage, steps=2, samples=lab.sized(32, 8))
    run = lab.run(each, f"long, {stage}", task=longer, processes=2, **counting)
    forward = run.memory.phase_breakdowns["forward"]
    rows.append([f"stage {stage}", *(plots.bytes_text(forward[kind]) for kind in (*KINDS, "activations"))])
    rows[-1].append(plots.bytes_text(run.peak_bytes))
plots.Table(["after forward", "weights", "gradients", "states", "activations", "peak of the step"], rows)

# %% [markdown]
# The activations are the same with and without ZeRO. Gradient checkpointing makes them smaller (lesson 06).
#
# ### What each stage sends
#
# Usually ranks send in a *ring*: each to the next one. In a reduce-scatter or an all-gather each sends N-1 of a tensor's N shards. An all-reduce does both, so it sends twice as much. The table's unit, "times the weights", is one all-gather of all weights: 4 P(N-1)/N bytes. The *volume* is calculated from the messages; the last column comes from the network device's byte counter.

# %%
UNITS = {"allreduce": 2, "reduce_scatter_base": 1, "allgather_base": 1}  # by torch's names


def volume(run, task=task):
    """Return what a rank sends in a step, in units of one all-gather of all weights.

    Both have the factor (N - 1) / N, which cancels.
    """
    return sum(UNITS[kind] * size for kind, size in run.value["sent"]) / (4 * task.parameters())


sent = runs[3].value["sent"]
for kind, size in sent:
    if size == sent[0][1]:  # the first module's messages have a size of their own
        print(f"stage 3, embeddings: {kind} of {plots.bytes_text(size)}")
rows = []
for run in runs.values():
    kinds = Counter(kind for kind, _ in run.value["sent"])
    wire = run.value["wire"] / (4 * parameters / 2) if link else slow_link.missing()
    rows.append([run.name, ", ".join(f"{n} {kind}" for kind, n in kinds.items()), volume(run), wire])
plots.Table(["", "messages in a step", "volume, times the weights", "on the wire"], rows)

# %% [markdown]
# The printed lines:
#
# 1. Before the embeddings run in forward, an all-gather joins their weights. Afterwards each rank keeps only its shard.
# 2. Backward needs the whole weights again: the same all-gather.
# 3. When the embeddings' last gradient is there, a reduce-scatter leaves each rank its shard of the sum.
#
# Each module sends these three messages, so stage 3 sends 3 times the weights. By the formula, stages 1 and 2 send what DDP sends: they split its all-reduce into a reduce-scatter and an all-gather, and put the update in between. Stage 3 sends 1.5 times as much ([Rajbhandari and others](https://arxiv.org/abs/1910.02054)).
#
# Stage 0 has no flat parameters: it sends one message per weight.
#
# **The wire carries more than the formula**: gloo, the library that connects these CPU ranks, sends a reduce-scatter as a whole all-reduce.
#
# > **On a GPU:** NCCL sends a reduce-scatter as a ring, as the formula assumes.
#
# ### More ranks, and accumulation
#
# The next cell trains a smaller model on four ranks, with two micro-batches per step. The table's last column shows what they send. The picture's crosses are counted with two and four ranks.

# %%
little = Task("bert-tiny", seq_len=16, config=no_dropout | {"num_hidden_layers": 2})
four, dots, rows = {}, {}, [["DDP with no_sync (sends once per step), by the formula", 2, 2]]
sends = {0: round(volume(runs[0]))}  # by stage, times the weights
for stage in (1, 2, 3):
    each = partial(train, stage=stage, steps=2, samples=8, accumulate=2)
    four[stage] = lab.run(each, f"four, {stage}", task=little, processes=4, **counting)
    four_bytes = sum(four[stage].memory.phase_breakdowns["backward"][kind] for kind in KINDS) / little.parameters()
    dots[stage] = {2: sum(counted(runs[stage])), 4: four_bytes}
    sends[stage] = round(volume(runs[stage]))
    rows.append([f"stage {stage}", volume(runs[stage]), volume(four[stage], little)])
display(plots.Table(["volume of a step, times the weights", "1 micro-batch", "2 micro-batches"], rows))
ranks = [1, 2, 4, 8, 16, 32, 64]
series = {f"stage {stage}": [sum(formula(stage, n)) for n in ranks] for stage in range(4)}
axes = plots.lines(ranks, series, "ranks", "bytes per parameter on each rank", title="Lines: formula. Crosses: counted")
for values in dots.values():
    axes.plot(values.keys(), values.values(), "x", color="black", markersize=11, zorder=5)
axes.set_xscale("log", base=2)
_ = axes.set_xticks(ranks, ranks)

# %% [markdown]
# - **More ranks:** stages 1 and 2 approach a floor of 8 and 4 bytes per parameter. Stage 3 has no floor: only it lets the model grow with the number of devices.
# - **Accumulation:** with two micro-batches, stages 2 and 3 send more. A rank that does not keep whole gradients has to reduce them after every micro-batch, and stage 3 also gathers the weights for each micro-batch.
#
# ### The library: FSDP2
#
# FSDP2, torch's *fully sharded data parallel*, is stage 3; its function is `fully_shard`. Each weight becomes a *DTensor*, a tensor that knows which rank stores which shard of it; a *device mesh* lists the ranks.


# %%
def with_fsdp(task, steps=3, samples=4, reshard=True, replicas=1):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model, losses, gradients, rank, ranks = task.build_model(), [], [], dist.get_rank(), dist.get_world_size()
    sizes = {"replicas": replicas, "shards": ranks // replicas} if replicas > 1 else {"shards": ranks}
    mesh = dist.init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    for part in (model.bert.embeddings, *model.bert.encoder.layer, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)  # new
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        rows = {name: row[samples * step :][rank:samples:ranks] for name, row in task.batch(samples * steps).items()}
        with Traffic() as sent:
            loss = model(**rows).loss
            loss.backward()
        gradients.append(sum(weight.grad.full_tensor().square().sum() for weight in model.parameters()).sqrt().item())
        with sent:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "gradients": gradients, "sent": sent.seen}


# %%
fsdp = lab.run(with_fsdp, "FSDP2", task=task, processes=2, **counting)
no_reshard = lab.run(partial(with_fsdp, reshard=False), "kept after forward", task=task, processes=2, **counting)
same(fsdp), same(no_reshard)


def fsdp_row(run, model_task=task):
    kinds = Counter(kind for kind, _ in run.value["sent"])
    parts = [run.memory.phase_breakdowns["backward"][kind] / model_task.parameters() for kind in KINDS]
    return [run.name, *parts, ", ".join(f"{n} {kind}" for kind, n in kinds.items()), plots.bytes_text(run.peak_bytes)]


head = ["bytes per parameter", *names, "messages in a step", "peak"]
plots.Table(head, [fsdp_row(run) for run in (runs[3], fsdp, no_reshard)])

# %% [markdown]
# Our stage 3 and torch's store the same bytes. torch sends fewer messages, because we let it gather pooler and classifier together.
#
# `reshard_after_forward=False` keeps gathered weights until backward, which frees them before the table counts. This saves one all-gather per module, but the peak contains the whole weights: use it if they fit and the link is slow.
#
# > **On a GPU:** the Trainer's switch is `TrainingArguments(fsdp=True)`. It needs accelerators: on CPU ranks accelerate 1.15 ignores it and trains with DDP.
#
# The *estimate* (lesson 00) traces one rank of FSDP2 on GPUs, and one of DeepSpeed (next section). DeepSpeed stores more than the formula says; the list before *What held: bytes* says why.


# %%
def zero(stage, bucket=500_000, **more):
    """Return DeepSpeed's configuration of a stage; a bucket is the size of a message buffer, in numbers."""
    stages = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, **more}
    torchs_adamw = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {"zero_optimization": stages, "train_micro_batch_size_per_gpu": "auto", **torchs_adamw}


gpt2, rows = Task("gpt2", seq_len=128, config={"num_hidden_layers": 4}), []
on_gpus = {"device": "cuda", "compute_capability": (8, 0), "per_device_train_batch_size": 4}
# On one GPU the Trainer runs without FSDP2: nothing is sharded.
setups = [(f"FSDP2, GPUs: {ranks}", 3, ranks, {"fsdp": ranks > 1}) for ranks in (1, 4)]
setups += [
    (f"DeepSpeed, stage {n}, GPUs: 4", n, 4, {"deepspeed": zero(n)}) for n in (() if no_deepspeed else (1, 2, 3))
]
for name, stage, ranks, recipe in setups:
    estimated = lab.foresee(estimate, gpt2, processes=ranks, **recipe, **on_gpus)
    if estimated:
        after = [estimated.memory.phase_breakdowns["backward"][kind] / gpt2.parameters() for kind in KINDS]
        rows.append([name, *after, sum(formula(stage, ranks)), plots.bytes_text(estimated.peak_bytes)])
plots.Table(
    ["", *names, "formula, in all", "peak of a rank"], rows, "GPT-2 of 4 layers by the Trainer, bytes per parameter"
)

# %% [markdown]
# We compared the estimate with *rehearsals*: dry runs of torch's CUDA build on a stub CUDA runtime, a library that allocates memory as a GPU would and computes nothing. For small GPT-2s and Llamas on two and four A100, estimate and rehearsal agreed to the byte, except for 512 unexplained bytes in DeepSpeed's stage 3.
#
# With accelerate 1.15 some trainings stop with an error if `fsdp` is on:
#
# - BERT and ViT, because the input embedding would be sharded twice;
# - T5, because its embedding is shared;
# - any model with Adafactor or 8-bit Adam, because these optimizers do not support DTensors.
#
# ### The library: DeepSpeed
#
# `TrainingArguments(deepspeed={...})` switches on the same stages in DeepSpeed, an optional package. A notebook has no launcher, so the function below sets a launcher's environment variables itself. By default, DeepSpeed 0.19 clips gradients at 1.0, whatever the Trainer's `max_grad_norm` is. With `"gradient_clipping": "auto"` it takes the Trainer's value.


# %%
def with_deepspeed(task, stage, **more):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():  # with several processes the launcher has set them
        os.environ.setdefault(name, value)
    if "nvme" in str(more):
        import ctypes

        ctypes.CDLL("libaio.so.1", ctypes.RTLD_GLOBAL)  # because DeepSpeed's extension was not linked with it
    import deepspeed
    from transformers import PrinterCallback, Trainer, TrainingArguments

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it is compiled first, for minutes
    options = {"max_steps": 3, "report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    options["per_device_train_batch_size"] = 2
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, deepspeed=zero(stage, **more), **options)  # new
        args._n_gpu = min(1, args.n_gpu)
        trainer = Trainer(task.build_model(), args, train_dataset=task.dataset())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


# %%
files, libraries, rows = tempfile.TemporaryDirectory(), {}, []
states = {"offload_optimizer": {"device": "cpu"}}
tried = [(stage, ranks, "", {}) for stage in (1, 2, 3) for ranks in (1, 2)]
tried += [(3, 2, ", states and weights on the host", states | {"offload_param": {"device": "cpu"}})]
if not no_deepspeed and [*Path(find_spec("deepspeed").origin).parent.glob("ops/aio/async_io_op*")]:
    tried += [(3, 2, ", states in files", {"offload_optimizer": {"device": "nvme", "nvme_path": files.name}})]
for stage, ranks, where, more in () if no_deepspeed else tried:
    call = partial(with_deepspeed, stage=stage, **more)
    run = lab.run(call, f"stage {stage}, ranks: {ranks}{where}", task=task, processes=ranks, **counting)
    if run.ok:
        parts = counted(run, run.memory.phase_breakdowns["backward"])
        libraries |= {} if where else {(stage, ranks): sum(parts)}
        rows.append([run.name, *counted(run), sum(parts), sum(formula(stage, ranks)), plots.bytes_text(run.peak_bytes)])
    else:
        reason = f"{run.status}: {run.message.strip().splitlines()[-1][-60:]}"
        rows.append([run.name, reason, "", "", "", sum(formula(stage, ranks)), ""])
titles = ["DeepSpeed, bytes per parameter", *names, "total", "formula", "peak of a rank"]
print(no_deepspeed) if no_deepspeed else display(plots.Table(titles, rows))

# %% [markdown]
# Compared with our stages (if DeepSpeed is installed):
#
# - DeepSpeed's optimizer keeps an fp32 copy of its shard of the weights, even if the weights are fp32: 4/N bytes more per parameter. In stage 3 on two ranks, this copy is only in *total*.
# - In stage 3, small weights stay whole.
# - A *bucket*, a buffer for messages, has 500,000 numbers here; the default `reduce_bucket_size`, 5 x 10^8 numbers, takes 2 GB in fp32. Only *total* has buffers.
# - In stage 2, *gradients* also has the word embedding's whole gradient, too large for a bucket. (The estimate's table has it twice. On two ranks 0.2 more is unexplained.) In stage 3 the gradient shard is a buffer, so *gradients* has only the embedding's.
# - The row *on the host* saves nothing here: a CPU rank's memory is the host's. Its *gradients* has the host's copy of the gradient shard, 4/N bytes.
#
# ### What held: bytes
#
# `zero-saves` is 1 if, with a second rank, each rank saves exactly half of what the stage shards. It is above 1 if buffers shrink too.

# %% tags=["claim"]
if libraries:  # DeepSpeed: bytes that a second rank saves / half of the bytes that the stage shards, fp32 copy included
    saved_parts = {  # 12 = states 8 + fp32 copy 4; 16 and 20: with gradients 4, and with weights 4
        stage: (libraries[stage, 1] - libraries[stage, 2]) / (size / 2) for stage, size in ((1, 12), (2, 16), (3, 20))
    }
else:  # FSDP2
    saved_parts = {3: (16 - sum(counted(fsdp))) / (16 / 2)}
parts = ", ".join(f"stage {n} {part:.2f}" for n, part in saved_parts.items())
note = f"two ranks, {'DeepSpeed' if libraries else 'FSDP2'}: {parts}"
display(claims.check("zero-saves", min(saved_parts.values()), note=note))
claims.check("partitioned-states-save", runs[1].peak_bytes / runs[0].peak_bytes, note="two ranks, by hand")

# %% [markdown]
# **Part 1 ends here.** In a new kernel, run the cells above again.
#
# ## Part 2: when shards alone do not help
#
# ### Slow links between hosts: HSDP
#
# **HSDP**, hybrid sharding, arranges the ranks in a two-dimensional mesh: here in 2 rows of 2 ranks. The ranks of a row, joined by a fast link inside a host, shard the weights. The rows are replicas. Over the slow link between the rows only the shards of the gradients are summed. A rank stores 16 P divided by the number of ranks *in a row*.

# %%
hybrid = lab.run(partial(with_fsdp, replicas=2), "four ranks, 2 x 2", task=little, processes=4, **counting)
plots.Table(head, [fsdp_row(hybrid, little)])

# %% [markdown]
# The messages are those of one row, plus one all-reduce between the rows for each sharded module.
#
# ### States on the host
#
# **Offload** moves bytes into the host's memory (`offload_optimizer` and `offload_param` in DeepSpeed's table above). By hand: the optimizer and a copy of the weights are on the host. In each step the gradients go to the host, and new weights come back, over PCIe, the card's link.
#
# > **On a GPU:** only here can you see what offload saves, because the GPU's memory is not the host's.


# %%
def on_the_host(task, offload, steps=3):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = task.build_model().to(device)
    weights = [*model.parameters()]
    # The host's copy of the weights:
    masters = [weight.detach().to("cpu", copy=True) for weight in weights] if offload else weights
    optimizer = torch.optim.AdamW(masters)  # its states are stored where its weights are
    for step in range(steps):
        rows = {name: row[4 * step : 4 * step + 4].to(device) for name, row in task.batch(4 * steps).items()}
        model(**rows).loss.backward()
        for weight, master in zip(weights, masters) if offload else ():
            master.grad = weight.grad.to("cpu")  # new: over PCIe
        optimizer.step()
        for weight, master in zip(weights, masters) if offload else ():
            weight.data.copy_(master)  # new: and back over PCIe
        model.zero_grad()


on_gpu, on_host = None, None
if lab.machine.kind == "cuda":
    both = [
        lab.run(partial(on_the_host, offload=o), f"offload={o}", task=task, measure=("memory",)) for o in (False, True)
    ]
    on_gpu, on_host = (run.memory.phases["forward"] for run in both)

# %% [markdown]
# The batch size does not change the bytes that cross PCIe in a step. Which takes longer, computing or sending? A token costs some 6 FLOPs per parameter (lesson 02). The bytes grow with the parameters too, so the model's size does not matter. The number of **tokens per card per step** does: with too few, the link is the bottleneck. In bf16, stage 3 sends 3 x 2 bytes per parameter; offload moves 2 bytes to the host and 2 back.
#
# ### Explore
#
# How many tokens does your link need? `busy_TFLOPs` is the rate that a card really reaches.

# %% tags=["widget"]
# A message has 2 bytes per parameter: DDP sends two, stage 3 three; offload moves one to the host and one back.
RATES = {"DDP": 2 * 2, "stage 3": 3 * 2, "offload of the states": 2 + 2}  # bytes per parameter, bf16, many ranks


def binding(link_GB_s, busy_TFLOPs):
    tokens = [2**n for n in range(8, 18)]  # per card and step
    computing = [6 * n / (busy_TFLOPs * 1e12) for n in tokens]  # seconds per parameter
    series = {}
    for name, size in RATES.items():
        series[f"{name}: {size / 6 * busy_TFLOPs / link_GB_s * 1000:,.0f} tokens"] = [
            100 * seconds / max(seconds, size / (link_GB_s * 1e9)) for seconds in computing
        ]
    axes = plots.lines(tokens, series, "tokens per card per step", "% of the step computing", title=f"{link_GB_s} GB/s")
    axes.set_xscale("log", base=2)
    return axes


_ = widgets.explore(binding, link_GB_s=[50, 16, 32, 450], busy_TFLOPs=[400, 60, 150, 1000])

# %% [markdown]
# The curves are calculated for a step that overlaps its messages with computing perfectly. Per parameter, computing takes 6 x tokens / rate, sending takes bytes / link. The legend shows from how many tokens on computing takes longer. With accumulation, DDP and offload send once for the tokens of all micro-batches; stage 3 sends in every micro-batch.
#
# 16 and 32 GB/s are PCIe 3 and 4, 50 GB/s is a 400 Gbit/s network, and 450 GB/s is an H100's NVLink. An H100 reaches some 400 of its 989 TFLOP/s.
#
# ### States in a file
#
# DeepSpeed offloads to files with `{"device": "nvme", "nvme_path": ...}`. This needs an extension that is compiled against libaio (`make build/deepspeed DS_BUILD_AIO=1`, some minutes). With it, DeepSpeed's table above has a row for files.
#
# Without DeepSpeed, `numpy.memmap` makes an array whose bytes are those of a file. The cell counts memory that the system cannot drop when it needs room. In `/proc/self/status` this is `RssAnon` (memory without a file) and `RssShmem` (files in `/dev/shm`, which are on no disk).


# %%
def resident(*kinds):
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return 1024 * sum(int(line[1]) for line in lines if line[0].rstrip(":") in kinds)


def offloaded(task, in_file, steps=3):
    import numpy as np

    at_start, model, arrays = resident("RssAnon", "RssShmem"), task.build_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with tempfile.TemporaryDirectory() as folder:
        for number, weight in enumerate(model.parameters() if in_file else ()):
            state = optimizer.state[weight] = {"step": torch.tensor(0.0)}
            for name in ("exp_avg", "exp_avg_sq"):  # new
                arrays.append(np.memmap(Path(folder, f"{name}-{number}"), np.float32, "w+", shape=tuple(weight.shape)))
                state[name] = torch.from_numpy(arrays[-1])
        for step in range(steps):
            model(**{name: row[4 * step : 4 * step + 4] for name, row in task.batch(4 * steps).items()}).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        kept, pages = resident("RssAnon", "RssShmem") - at_start, [resident("RssFile")]
        for array in arrays:
            array.flush(), array.base.madvise(mmap.MADV_DONTNEED)  # as the system may do whenever it needs room
        pages.append(resident("RssFile"))
        return {"loss": model(**task.batch(4)).loss.item(), "kept": kept, "pages": pages}


# %%
saved = None
if Path("/proc/self/status").exists():
    ways = {in_file: lab.run(partial(offloaded, in_file=in_file), f"in a file: {in_file}", task=task, measure="value")
            for in_file in (False, True)}  # fmt: skip
    torch.testing.assert_close(ways[True].value["loss"], ways[False].value["loss"], rtol=1e-4, atol=1e-5)
    saved = (ways[False].value["kept"] - ways[True].value["kept"]) / (8 * parameters)
    pages = [plots.bytes_text(size) for size in ways[True].value["pages"]]
    print(f"memory that the system cannot drop: lower by {saved:.2f} times the bytes of the states")
    print(f"pages of files in memory: {pages[0]}; after the system has dropped the states' pages: {pages[1]}")

# %% [markdown]
# The first printed number need not be 1: it compares all memory of two processes. The pages that remain are those of program libraries.
#
# While there is room, the system keeps the pages of the file in memory (the *page cache*), so the process looks no smaller and is no slower. If memory runs short, the system drops the pages, and each step reads and writes the disk.
#
# ### What held: offload

# %% tags=["claim"]
display(claims.check("offload-to-host", on_gpu and (on_gpu - on_host) / (8 * parameters), note="AdamW's states"))
no_proc = None if saved is not None else "needs /proc/self/status, which Linux has"
claims.check("offload-to-file", saved, missing=no_proc, note="AdamW's states in memory-mapped files")

# %% [markdown]
# ### What held: time
#
# Is ZeRO worth it for a model that fits? DDP, stage 1 (torch's `ZeroRedundancyOptimizer`) and stage 3 (FSDP2) each get the batch size that suits them best, 2 or 8 samples per rank. Then each stage is timed against DDP in interleaved runs.
#
# > **On a GPU:** with two GPUs the ranks use them, with NCCL.

# %%
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

gpus2, best = hardware.supports("gpus2")[0], {}


def timed(task, stage, samples, turns=3):
    dist.init_process_group("nccl" if gpus2 else "gloo")
    device = f"cuda:{dist.get_rank()}" if gpus2 else "cpu"
    model, batch = task.build_model().to(device), {name: row.to(device) for name, row in task.batch(samples).items()}
    mesh = dist.init_device_mesh("cuda" if gpus2 else "cpu", (dist.get_world_size(),))
    for part in (*model.bert.encoder.layer, model) if stage == 3 else ():
        fully_shard(part, mesh=mesh)
    called = model if stage == 3 else DDP(model)
    adamw = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW) if stage == 1 else torch.optim.AdamW
    optimizer = adamw(model.parameters(), lr=1e-3)
    for _ in range(lab.sized(turns, 1) + lab.profile.warmup_steps):
        called(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# %% tags=["claim"]
fits = task.replace(config={"hidden_size": 256, "intermediate_size": 1024})
options = {"task": fits, "processes": 2, "measure": ("time",), "use_cpu": not gpus2}
for stage in (0, 1, 3):
    each = [(partial(timed, stage=stage, samples=n), f"stage {stage}, {n} samples", 2 * n) for n in (2, 8)]
    tried = [lab.run(call, name, samples_per_step=in_all, **options) for call, name, in_all in each]
    best[stage] = max(tried, key=lambda run: run.samples_per_second or 0)
slower = {stage: lab.compare(best[0], best[stage], turns=3).speed_ratio for stage in (1, 3)}
fastest = max(slower.values(), key=lambda ratio: ratio.value if ratio.known else 0)
one_gpu = "needs two GPUs" if lab.machine.kind == "cuda" and not gpus2 else None
note = "; ".join(f"{best[stage].name} against {best[0].name}: {ratio}" for stage, ratio in slower.items())
claims.check("zero-slows-if-fits", None if one_gpu else fastest, missing=one_gpu, note=note)

# %% [markdown]
# ### The decision tree
#
# The guide's tree: if the model and a small batch fit one device, use no ZeRO; otherwise use ZeRO, with offload. The function below also tries the stages in between, and takes the first choice that fits. Each later one sends more or waits longer. (Stage 1 sends as much as DDP, but gathers the weights after the update.) A card always needs room for its activations, in stage 3 also for the gathered largest layer. With offload, the host or a disk needs room for the bytes that leave the card.
#
# `parallelism` walks the same tree for a real model. Instead of a formula it uses the estimate, which traces one rank of each *layout* (DDP, FSDP, ...). It picks the simplest layout that fits, and over a slow link the one that sends least. (*FSDP, gathered once* is FSDP with `reshard_after_forward=False`.) If no sharding fits, it says what to try next, and how many bytes stay on a card, however many you add. The second cell calls it for an 8B model on eight cards of one host (nothing goes *between hosts*): over a fast link, over a slow link, and on cards that are too small. (With bf16, FSDP sends 16-bit numbers and DDP fp32 gradients: here DDP sends more.)


# %%
def choose(parameters, cards, card=80 * 2**30, activations=10e9, largest_layer=0.05, host=1e12, disk=8e12):
    """Return the first choice that fits, and its bytes per card.

    Limits are in bytes, of host and disk for all cards; `largest_layer` is a fraction of the parameters.
    The default sizes are assumptions: 10 GB of activations, a largest layer of 5 %, 1 TB of host memory, 8 TB of disk.
    """
    for stage in range(4):
        whole = 8 * largest_layer * parameters if stage == 3 else 0  # its weights and gradients, gathered
        needed = sum(formula(stage, cards)) * parameters + whole + activations
        if needed <= card:
            return f"stage {stage}" if stage else "DDP", needed
    needed = 8 * largest_layer * parameters + activations
    if needed > card:
        return "cut the layers themselves (lesson 17)", needed
    for place, room in (("the host", host), ("a disk", disk)):
        if 16 * parameters <= room:
            return f"stage 3, offload to {place}", needed
    return "more cards", needed


rows = []
for billions, cards in ((1, 1), (7, 1), (7, 8), (30, 1), (30, 8), (100, 8), (300, 8), (1000, 8)):
    choice, needed = choose(billions * 1e9, cards)
    rows.append([f"{billions} G", cards, choice, plots.bytes_text(needed)])
plots.Table(["parameters", "cards of 80 GiB", "choice", "bytes per card"], rows)

# %%
large = Task("llama-3-8b", seq_len=1024, config=lab.sized({}, {"num_hidden_layers": 2}))
recipe = {"per_device_train_batch_size": 4, "bf16": True, "gradient_checkpointing": True, "dtype": "float32"}
for question in ({"card_bytes": "80GB"}, {"card_bytes": "80GB", "slow_link": True}, {"card_bytes": "8GB"}):
    display(lab.foresee(parallelism, large, cards=8, **question, **recipe))

# %% [markdown]
# ## Exercise, the challenge: the least memory for a given traffic
#
# Write `answer(ranks, link, pcie)` for fp32 with AdamW. In each step, a rank may send at most `link` bytes per parameter to other ranks, and move at most `pcie` bytes per parameter over PCIe. Which stage (0 to 3) takes the least device memory per rank, and should its states be offloaded? Return both, for example `(0, False)`.
#
# Offload moves the gradients of a rank's shard to the host, and the weights of this shard back. In stage 0 all gradients and weights move. A step has one micro-batch. The check draws new cases each time, from 2 to 64 ranks, and skips cases that no stage meets.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "How many bytes does each stage send at N ranks? The table of volumes has the unit 4 (N-1)/N bytes per parameter.",
    "Offload takes the states of a rank's shard off its device. How large is a shard in stage 0, and in the others?",
    "Try all eight pairs, leave out those that send or move too much, and take the least memory of the rest.",
)

# %% tags=["exercise"]
answer = None  # def answer(ranks, link, pcie): ...


# %% tags=["check"] jupyter={"source_hidden": true}
def costs(stage, offload, ranks):
    """Return the bytes per parameter on the device, to other ranks, over PCIe; the volumes are those of the table."""
    shard = 1 if stage == 0 else 1 / ranks
    states = formula(stage, ranks)[2]
    sent = sends[stage] * 4 * (ranks - 1) / ranks
    return sum(formula(stage, ranks)) - offload * states, sent, offload * 8 * shard


def check_choice(answer):
    if answer is None:
        return exercises.not_attempted("replace None by a function")
    draw = random.Random()
    for _ in range(200):
        ranks, link, pcie = draw.choice([2, 4, 8, 64]), draw.uniform(4, 14), draw.choice([0, draw.uniform(0, 10)])
        every = {(s, o): costs(s, o, ranks) for s in range(4) for o in (False, True)}
        able = {pair: cost[0] for pair, cost in every.items() if cost[1] <= link and cost[2] <= pcie}
        if able and able.get(pair := answer(ranks, link, pcie), 99) > min(able.values()) + 1e-9:
            fault = "is over its limits" if pair not in able else f"takes {able[pair]:.2f} bytes per parameter"
            question = f"{ranks} ranks, link {link:.2f}, pcie {pcie:.2f}"
            return exercises.wrong(f"{question}: {pair} {fault}; the least is {min(able.values()):.2f}")
    return exercises.right("the least memory in 200 drawn cases")


exercises.check(lab, "least-memory", check_choice, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def least(ranks, link, pcie):
    sent = {0: 8, 1: 8, 2: 8, 3: 12}
    stages = [stage for stage in sent if sent[stage] * (ranks - 1) / ranks <= link]
    pairs = [(stage, offload) for stage in stages for offload in (False, True)]
    able = [(s, o) for s, o in pairs if not o or 8 / (ranks if s else 1) <= pcie]
    return min(able, key=lambda pair: costs(*pair, ranks)[0], default=(0, False))


exercises.prove(check_choice, solution=least, mistake=lambda ranks, link, pcie: (2, False))

# %% [markdown]
# ## Recap
#
# - **Memory:** sharding states, gradients and weights left the losses of one process unchanged. By the formula, two ranks store 12, 10 and 8 bytes per parameter in stages 1, 2 and 3, instead of 16.
# - **Traffic:** by the formula, stages 1 and 2 send 2 times the weights, as DDP does; stage 3 sends 3 times.
# - **Activations:** no stage makes them smaller, because each rank computes all layers for its own samples (16 of the 32 here).
# - **Libraries:** FSDP2 stores what our stage 3 stores. DeepSpeed adds an fp32 copy of the shard, 4/N bytes per parameter.
# - **Offload:** if states are in a file, the system can drop their 8 bytes per parameter from memory.
# - **When not to use it:** a step with too few tokens waits for its link: at 400 TFLOP/s and a link of 50 GB/s, stage 3 needs 8,000 tokens per card.

# %% tags=["finish"]
claims.finish()
