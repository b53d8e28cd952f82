# %% [markdown]
# # Why does every rank keep the same bytes?
#
# With DDP (lesson 15) each rank holds all weights, gradients and optimizer states, and all hold the same. ZeRO, the *zero redundancy optimizer*, cuts them up. Here it is built by hand.
#
# **You will see**
# - optimizer states, gradients and weights cut up among ranks, one after the other: equal losses, and the bytes that a formula says
# - what each cut sends, and what no cut makes smaller: activations
# - FSDP2 and DeepSpeed doing the same, states kept on the host or in a file, and when none of it is worth it

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
sizes = {"num_hidden_layers": 4, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 4}
task = Task("bert-small", seq_len=32, config=no_dropout | sizes)
parameters = task.parameters()

# %% [markdown]
# ## Idea
#
# In fp32 with AdamW a parameter takes 16 bytes: 4 of weight, 4 of gradient, 8 of states (lesson 01). With *P* parameters every rank that trains alike holds 16 P. (torch's DDP holds 20 P unless told otherwise: its buckets, lesson 15.) Only one of the *N* ranks has to hold each of them. Large models often keep weights and gradients in bf16, and a copy of the weights in fp32 with the states: 2 + 2 + 12. The sum is the same, and stage 1 has more to cut.
#
# | stage | cut up | bytes a rank, 4 + 4 + 8 | 2 + 2 + 12 |
# |---|---|---|---|
# | 0 | nothing | 16 P | 16 P |
# | 1 | optimizer states | 8 P + 8 P/N | 4 P + 12 P/N |
# | 2 | gradients too | 4 P + 12 P/N | 2 P + 14 P/N |
# | 3 | weights too | 16 P/N | 16 P/N |
#
# What a rank does not hold it receives when it is needed. Two messages do that, in which all ranks take part: **reduce-scatter** sums a row of numbers over the ranks and leaves each rank its *share* of the sum, and **all-gather** joins the shares to the whole row again.
#
# ## Predict

# %%
widgets.predict(lab, "stage1", "Two ranks, stage 1: what is left of DDP's 16 bytes a parameter, in %?", "%", 0, 100)

# %%
exercises.question(
    lab,
    "halves",
    "Two ranks, stage 3, the same samples on each rank as with DDP. What of the peak halves?",
    {
        "all of it": "Each rank still computes every layer for its own samples. What its layers keep for backward is its own.",
        "weights, gradients and states, and not the activations": "The activations belong to the samples of a rank, and "
        "no other rank has them. Besides, the layer that is in use is there whole.",
        "the weights alone": "Stage 3 has the cuts of stages 1 and 2 as well.",
    },
    right="weights, gradients and states, and not the activations",
)

# %% [markdown]
# ## By hand
#
# `Traffic` notes the messages. It is a *dispatch mode*: torch hands it each operation before it is carried out. `Row` lays the weights of one module into a row, of which this rank owns one share; the optimizer gets the shares and nothing else. A weight becomes a view of its piece of the row, so the model notices nothing.


# %%
class Traffic(TorchDispatchMode):
    """Notes the collective operations: [name, bytes of the whole row]."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # FSDP2's tensors: they go on with the piece that lies here, which comes by again
        if function.namespace == "c10d":
            size = max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            self.seen.append([function.overloadpacket.__name__.strip("_"), size])
        return function(*args, **(kwargs or {}))


def in_a_row(tensors, length):
    """The same numbers in one row, with zeros up to the length, and for each tensor a view of its piece."""
    row, views, at = torch.zeros(length), [], 0
    for tensor in tensors:
        views.append(row[at : at + tensor.numel()].view_as(tensor).copy_(tensor))
        at += tensor.numel()
    return row, views


# %%
class Row:
    def __init__(self, module, stage):
        self.stage, self.weights, self.missing = stage, [*module.parameters()], 0
        self.ranks = dist.get_world_size()
        self.length = -(-sum(weight.numel() for weight in self.weights) // self.ranks) * self.ranks
        self.row, views = in_a_row([weight.data for weight in self.weights], self.length)
        for weight, view in zip(self.weights, views):
            weight.data = view
        dist.broadcast(self.row, src=0)
        own = self.row.chunk(self.ranks)[dist.get_rank()]
        self.share = torch.nn.Parameter(own.clone() if stage == 3 else own)  # all that the optimizer sees
        if stage == 1:
            self.gradients, views = in_a_row([torch.zeros_like(weight) for weight in self.weights], self.length)
            for weight, view in zip(self.weights, views):
                weight.grad = view
        else:
            for weight in self.weights:
                weight.register_post_accumulate_grad_hook(self.one_more)  # stage 2: during backward
        if stage == 3:
            self.free()
            module.register_forward_pre_hook(self.gather)  # there while it is used, forward
            module.register_forward_hook(self.free)
            module.register_full_backward_pre_hook(self.gather)  # and backward


# %%
class Part(Row):  # what is done with it, step by step
    def one_more(self, _):
        self.missing = (self.missing or len(self.weights)) - 1
        if not self.missing:  # the last gradient of this module is there
            row, _ = in_a_row([weight.grad for weight in self.weights], self.length)
            for weight in self.weights:
                weight.grad = None
            self.reduce(row)
            if self.stage == 3:
                self.free()

    def reduce(self, row):
        mine = row.chunk(self.ranks)[dist.get_rank()] if self.stage == 1 else torch.empty_like(self.share)
        dist.reduce_scatter_tensor(mine, row)
        mine = mine.div_(self.ranks)  # the mean over the ranks
        self.share.grad = mine if self.share.grad is None else self.share.grad.add_(mine)

    def gather(self, *_):
        self.row.untyped_storage().resize_(4 * self.length)
        dist.all_gather_into_tensor(self.row, self.share.data)

    def free(self, *_):
        self.row.untyped_storage().resize_(0)


# %%
def train(task, stage, steps=3, samples=4, accumulate=1, link=None):
    if link:
        link.join()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    model, losses, gradients = task.build_model(), [], []
    modules = [model.bert.embeddings, *model.bert.encoder.layer, model.bert.pooler, model.classifier]
    parts = [Part(module, stage) for module in modules] if stage else []
    optimizer = torch.optim.AdamW([part.share for part in parts] or model.parameters())
    for step in range(steps):
        before, sent = slow_link.bytes_sent() or 0, Traffic()
        rows = {name: row[samples * step :][rank:samples:ranks] for name, row in task.batch(samples * steps).items()}
        for number in range(accumulate):
            with sent:
                loss = model(**{name: row[number::accumulate] for name, row in rows.items()}).loss / accumulate
                loss.backward()
        gradients.append(finish(model, parts, optimizer, sent, stage, ranks))
        wire = (slow_link.bytes_sent() or 0) - before
        losses.append(loss.item() * accumulate)
    return {"losses": losses, "gradients": gradients, "sent": sent.seen, "wire": wire}


# %%
def finish(model, parts, optimizer, sent, stage, ranks):
    """Sum what is not yet summed, update, and hand round what is new; returns the norm of the whole gradient."""
    with sent:
        for weight in model.parameters() if stage == 0 and ranks > 1 else ():
            dist.all_reduce(weight.grad.div_(ranks))
        for part in parts if stage == 1 else ():
            part.reduce(part.gradients)
    square = sum(weight.grad.square().sum() for group in optimizer.param_groups for weight in group["params"])
    if parts:
        dist.all_reduce(square)  # for the comparison alone: each rank has its share
    with sent:
        optimizer.step()
        optimizer.zero_grad()
        for part in parts if stage in (1, 2) else ():
            dist.all_gather_into_tensor(part.row, part.share.data)
            if stage == 1:
                part.gradients.zero_()
    return square.sqrt().item()


# %% [markdown]
# ## Baseline
#
# One process with all samples, and two ranks that hold everything (stage 0).

# %%
counting = {"measure": ("memory",), "use_cpu": True}  # on CPU ranks, also where there is a GPU: bytes are bytes
# Where it can be had, a network of the ranks' own, whose device counts bytes, until the lesson ends.
link = None if slow_link.missing() else (network := slow_link.link()).__enter__()
one = lab.run(partial(train, stage=0), "one process", task=task, **counting)
runs = {0: lab.run(partial(train, stage=0, link=link), "stage 0", task=task, processes=2, **counting)}


def same(run):
    """Stops unless losses and gradients are those of one process."""
    ranks = [rank["value"] for rank in run.ranks]
    losses = [sum(step) / len(ranks) for step in zip(*(rank["losses"] for rank in ranks))]
    torch.testing.assert_close(losses, one.value["losses"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ranks[0]["gradients"], one.value["gradients"], rtol=1e-2, atol=0.0)


same(runs[0])

# %% [markdown]
# ## Change one thing
#
# Then one cut after the other. The cell stops if a loss or the gradient's norm differs from that of one process. (Losses alone would not do: AdamW divides by the gradient's size, and hides it if all are twice too large.)

# %%
for stage in (1, 2, 3):
    each = partial(train, stage=stage, link=link)
    runs[stage] = lab.run(each, f"stage {stage}", task=task, processes=2, **counting)
    same(runs[stage])

KINDS = ("weights", "gradients", "optimizer_states")


def formula(stage, ranks):
    """Bytes a parameter of weights, gradients and states on each rank."""
    cut = [4 / ranks if stage >= least else 4 for least in (3, 2)]
    return [*cut, 8 / ranks if stage >= 1 else 8]


def counted(run, kinds=KINDS):
    """The same as counted after backward, where all of them are there."""
    return [run.memory.phase_breakdowns["backward"][kind] / parameters for kind in kinds]


rows, names = [], ["weights", "gradients", "states"]
for stage, run in runs.items():
    told, seen = formula(stage, 2), counted(run)
    rows.append([run.name, *(f"{a:.3f} ({b:g})" for a, b in zip(seen, told)), sum(seen), sum(told)])
display(plots.Table(["bytes a parameter: counted (formula)", *names, "counted", "formula"], rows))
widgets.revealed(lab, "stage1", 100 * sum(counted(runs[1])) / 16)

# %%
axes = plots.memory([*runs.values()], title="Peak of a rank, two ranks, by hand")

# %% [markdown]
# The table holds what lies there between backward and the step. The picture shows the peak: it also has a few temporaries, what operations need for themselves while they run (*inside operations*), and in stage 3 the weights of the module that is in use.
#
# ### What no cut makes smaller
#
# Now 32 samples of 128 tokens, 16 for each rank.

# %%
longer, rows = task.replace(seq_len=128, config={"num_hidden_layers": 2}), []
for stage in (0, 3):
    each = partial(train, stage=stage, steps=2, samples=32)
    run = lab.run(each, f"long, {stage}", task=longer, processes=2, **counting)
    forward = run.memory.phase_breakdowns["forward"]
    rows.append([f"stage {stage}", *(plots.bytes_text(forward[kind]) for kind in (*KINDS, "activations"))])
    rows[-1].append(plots.bytes_text(run.peak_bytes))
plots.Table(["after forward", "weights", "gradients", "states", "activations", "peak"], rows)

# %% [markdown]
# The activations are the same with and without ZeRO. What helps against them is lesson 06.
#
# ### What it sends
#
# A ring hands over (N-1)/N of a row for a reduce-scatter or an all-gather, and twice that for an all-reduce, which is both. So in units of 4 P(N-1)/N bytes, by this formula and as the network's own counter saw it:

# %%
UNITS = {"allreduce": 2, "reduce_scatter_base": 1, "allgather_base": 1}


def volume(run, task=task):
    """What a rank sends in a step, in units of the weights' bytes x (ranks - 1) / ranks."""
    return sum(UNITS[kind] * size for kind, size in run.value["sent"]) / (4 * task.parameters())


rows = []
for run in runs.values():
    kinds = Counter(kind for kind, _ in run.value["sent"])
    wire = run.value["wire"] / (4 * parameters / 2) if link else slow_link.missing()
    rows.append([run.name, ", ".join(f"{n} {kind}" for kind, n in kinds.items()), volume(run), wire])
plots.Table(["", "messages in a step", "volume, times the weights", "on the wire"], rows)

# %% [markdown]
# By the formula stages 1 and 2 send what DDP sends: its all-reduce is taken apart, and the update put in between. Stage 3 gathers the weights twice, so it sends half as much again ([Rajbhandari and others](https://arxiv.org/abs/1910.02054)). And it cannot wait until the end: each module stops for its weights. **The wire says more**: gloo, the library of these CPU ranks, sends a reduce-scatter as a whole all-reduce. NCCL, on GPUs, sends it as a ring.
#
# ### More ranks, and accumulation
#
# The crosses in the picture are counted: here, and with four ranks of a smaller model. These four make each step of two micro-batches.

# %%
little = Task("bert-tiny", seq_len=16, config=no_dropout | {"num_hidden_layers": 2})
four, dots, rows = {}, {}, [["DDP with no_sync", 2, 2]]
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
axes = plots.lines(ranks, series, "ranks", "bytes a parameter on each rank", title="Lines: formula. Crosses: counted")
for values in dots.values():
    axes.plot(values.keys(), values.values(), "x", color="black", markersize=11, zorder=5)
axes.set_xscale("log", base=2)
_ = axes.set_xticks(ranks, ranks)

# %% [markdown]
# Stages 1 and 2 approach a floor: 8 and 4 bytes a parameter. Only stage 3 has none, so only it lets a model grow with the number of devices. And accumulation is cheap for stage 1 alone: whoever does not keep whole gradients has to sum them after every micro-batch, and stage 3 gathers the weights for each.
#
# ### The library: FSDP2
#
# torch's `fully_shard` is stage 3. Each weight becomes a *DTensor*, a tensor that knows which piece of it lies on which rank; a *device mesh* names the ranks.


# %%
def with_fsdp(task, steps=3, samples=4, reshard=True, copies=1):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model, losses, gradients, rank, ranks = task.build_model(), [], [], dist.get_rank(), dist.get_world_size()
    sides = {"copies": copies, "shares": ranks // copies} if copies > 1 else {"shares": ranks}
    mesh = dist.init_device_mesh("cpu", (*sides.values(),), mesh_dim_names=(*sides,))
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
kept = lab.run(partial(with_fsdp, reshard=False), "kept after forward", task=task, processes=2, **counting)
hybrid = lab.run(partial(with_fsdp, copies=2), "four ranks, 2 x 2", task=little, processes=4, **counting)
same(fsdp), same(kept)
rows = []
for run, its in ((runs[3], task), (fsdp, task), (kept, task), (hybrid, little)):
    kinds = Counter(kind for kind, _ in run.value["sent"])
    parts = [run.memory.phase_breakdowns["backward"][kind] / its.parameters() for kind in KINDS]
    rows.append(
        [run.name, *parts, ", ".join(f"{n} {kind}" for kind, n in kinds.items()), plots.bytes_text(run.peak_bytes)]
    )
plots.Table(["bytes a parameter", *names, "messages in a step", "peak"], rows)

# %% [markdown]
# Ours and torch's keep the same and send nearly the same; torch leaves the outermost module gathered between forward and backward. Two choices more:
#
# - `reshard_after_forward=False` keeps the gathered weights until backward. One gather less, and the whole weights in the peak: worth it where they fit and the link is slow.
# - **HSDP**, hybrid sharding, has a mesh with two sides: 2 x 2 here. Weights are shared out within a row, by the fast link inside a host, and the rows hold copies of each other. Between the rows, over the slow link, only the shares of the gradients are summed. It takes 16 P over the ranks *of a row*.
#
# In the Trainer the switch is `TrainingArguments(fsdp=True)`. It needs accelerators: accelerate 1.15 passes over it on CPU ranks, and trains with DDP (the lab warns). What would a GPU take? The estimate follows one rank, of FSDP2 and of DeepSpeed, which is next:


# %%
def zero(stage, bucket=500_000, **more):
    """DeepSpeed's configuration of a stage, with buckets of so many numbers."""
    stages = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, **more}
    torchs_adamw = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {"zero_optimization": stages, "train_micro_batch_size_per_gpu": "auto", **torchs_adamw}


gpt2, rows = Task("gpt2", seq_len=128, config={"num_hidden_layers": 4}), []
on_gpus = {"device": "cuda", "compute_capability": (8, 0), "per_device_train_batch_size": 4}
setups = [(f"FSDP2, GPUs: {ranks}", 3, ranks, {"fsdp": ranks > 1}) for ranks in (1, 4)]
setups += [
    (f"DeepSpeed, stage {n}, GPUs: 4", n, 4, {"deepspeed": zero(n)}) for n in (() if no_deepspeed else (1, 2, 3))
]
for name, stage, ranks, recipe in setups:
    told = lab.foresee(estimate, gpt2, processes=ranks, **recipe, **on_gpus)
    if told:
        after = [told.memory.phase_breakdowns["backward"][kind] / gpt2.parameters() for kind in KINDS]
        rows.append([name, *after, sum(formula(stage, ranks)), plots.bytes_text(told.peak_bytes)])
plots.Table(
    ["", *names, "formula, in all", "peak of a rank"], rows, "GPT-2 of 4 layers by the Trainer, bytes a parameter"
)

# %% [markdown]
# In rehearsals of small GPT-2s and Llamas on two and four A100 the allocator handed out what the estimate says, to the byte but for one number of an accumulated loss. With accelerate 1.15 the switch `fsdp` is not for every model: BERT and ViT stop with an error (the input embedding would be divided twice), T5 does (its embedding is shared), and so do Adafactor and 8-bit Adam, which know no DTensors.
#
# ### DeepSpeed
#
# `TrainingArguments(deepspeed={...})` does the same for a Trainer. DeepSpeed is an extra of this course. The function below is a *deployment in a notebook* too: for one process the variables that a launcher sets are set by hand. Mind a default there: DeepSpeed 0.19 clips gradients at 1.0.


# %%
def with_deepspeed(task, stage, **more):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():  # a launcher has set them already
        os.environ.setdefault(name, value)
    if "nvme" in str(more):
        import ctypes

        ctypes.CDLL("libaio.so.1", ctypes.RTLD_GLOBAL)  # DeepSpeed's extension was not linked with it
    import deepspeed
    from transformers import PrinterCallback, Trainer, TrainingArguments

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first, for minutes
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
        why = f"{run.status}: {run.message.strip().splitlines()[-1][-60:]}"
        rows.append([run.name, why, "", "", "", sum(formula(stage, ranks)), ""])
titles = ["DeepSpeed, bytes a parameter", *names, "with all else", "formula", "peak of a rank"]
print(no_deepspeed) if no_deepspeed else display(plots.Table(titles, rows))

# %% [markdown]
# If it is here, compare with the table of our own stages. DeepSpeed's optimizer keeps an fp32 copy of its share of the weights, even when the weights are fp32: 4/N bytes more. Small weights stay whole in stage 3, and buffers come on top: the default `reduce_bucket_size` of 5 x 10^8 numbers is 2 GB in fp32.
#
# ### States on the host
#
# **Offload** keeps what is cut off not on another device but in the host's memory (`offload_optimizer` and `offload_param`, above): the first remedy of the guide's tree. By hand: the host has a copy of the weights, and the optimizer; gradients go there, new weights come back. Only a GPU, whose memory is not the host's, can show what it saves.


# %%
def on_the_host(task, offload, steps=3):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = task.build_model().to(device)
    weights = [*model.parameters()]
    masters = [weight.detach().to("cpu", copy=True) for weight in weights] if offload else weights
    optimizer = torch.optim.AdamW(masters)  # its states lie where its weights lie
    for step in range(steps):
        rows = {name: row[4 * step : 4 * step + 4].to(device) for name, row in task.batch(4 * steps).items()}
        model(**rows).loss.backward()
        for weight, master in zip(weights, masters) if offload else ():
            master.grad = weight.grad.to("cpu")  # new: over PCIe
        optimizer.step()
        for weight, master in zip(weights, masters) if offload else ():
            weight.data.copy_(master)  # new: and back
        model.zero_grad()


on_gpu, on_host = None, None
if lab.machine.kind == "cuda":
    both = [
        lab.run(partial(on_the_host, offload=o), f"offload={o}", task=task, measure=("memory",)) for o in (False, True)
    ]
    on_gpu, on_host = (run.memory.phases["forward"] for run in both)

# %% [markdown]
# A gradient crosses PCIe once and a weight once, in each step, whatever the batch. As with stage 3: does a step compute for as long as its bytes take? A token costs some 6 FLOPs a parameter (lesson 02), so *P* drops out, and what is left is a number of **tokens a card and step**: below it the link binds. In bf16 stage 3 sends 3 x 2 bytes a parameter, offload moves 2 there and 2 back.
#
# ## Explore
#
# On how many tokens is a link enough?


# %% tags=["widget"]
RATES = {"DDP": 2 * 2, "stage 3": 3 * 2, "offload of the states": 2 + 2}  # bytes a parameter and step, bf16, many ranks


def binding(link_GB_s, busy_TFLOPs):
    tokens = [2**n for n in range(8, 18)]  # of a card in a step
    computing = [6 * n / (busy_TFLOPs * 1e12) for n in tokens]  # seconds, a parameter
    series = {}
    for name, size in RATES.items():
        series[f"{name}: {size / 6 * busy_TFLOPs / link_GB_s * 1000:,.0f} tokens"] = [
            100 * seconds / max(seconds, size / (link_GB_s * 1e9)) for seconds in computing
        ]
    axes = plots.lines(tokens, series, "tokens a card and step", "% of the step computing", title=f"{link_GB_s} GB/s")
    axes.set_xscale("log", base=2)
    return axes


_ = widgets.explore(binding, link_GB_s=[50, 16, 32, 450], busy_TFLOPs=[400, 60, 150, 1000])

# %% [markdown]
# Nothing is measured here: these are bytes over rates, of a step that hides its sending perfectly (16 and 32 GB/s are PCIe 3 and 4, 50 a 400 Gbit/s network, 450 an H100's NVLink, which keeps some 400 of 989 TFLOP/s busy). The number of tokens stands beside each name. Accumulation multiplies the tokens of DDP and of offload, and not those of stage 3.
#
# ### States in a file
#
# DeepSpeed's second remedy is `{"device": "nvme", "nvme_path": ...}`, an extension that is compiled against libaio (`make build/deepspeed DS_BUILD_AIO=1`, some minutes; where it was built, its row is above). The principle can be tried anywhere: `numpy.memmap` makes an array whose bytes are a file's. Are they still in memory? What counts is memory that the system cannot take back (`RssAnon` in `/proc/self/status`; a file in `/dev/shm` counts too).


# %%
def resident(*kinds):
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return 1024 * sum(int(line[1]) for line in lines if line[0].rstrip(":") in kinds)


def offloaded(task, in_file, steps=3):
    import numpy as np

    model, arrays = task.build_model(), []
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
        kept, pages = resident("RssAnon", "RssShmem"), [resident("RssFile")]
        for array in arrays:
            array.flush(), array.base.madvise(mmap.MADV_DONTNEED)  # as the system may, whenever it needs room
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
    print(
        f"{saved:.2f} of the states' bytes less that must stay in memory; pages of files: {pages[0]}, dropped: {pages[1]}"
    )

# %% [markdown]
# While there is room, the system keeps the pages of the file (the *page cache*), so the process looks no smaller, and is no slower. Under pressure they go, and each step reads and writes the disk.
#
# ## What held
#
# Is it worth it for a model that fits? The guide says that ZeRO only slows such a training down. DDP, stage 1 (torch's `ZeroRedundancyOptimizer`) and stage 3 (FSDP2) each take the batch that suits them best, of 2 and 8 samples a rank; then each stage takes turns with DDP. (Two GPUs, where there are two, with NCCL.)


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
    for _ in range(turns + lab.profile.warmup_steps):
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
if libraries:  # by DeepSpeed: what goes away with a second rank, over half of what the stage cuts up, 4 bytes more each
    cut = {
        stage: (libraries[stage, 1] - libraries[stage, 2]) / (size / 2) for stage, size in ((1, 12), (2, 16), (3, 20))
    }
else:  # by torch
    cut = {3: (16 - sum(counted(fsdp))) / (16 / 2)}
note = f"two ranks, {'DeepSpeed' if libraries else 'FSDP2'}: {', '.join(f'stage {n} {part:.2f}' for n, part in cut.items())}"
display(claims.check("zero-saves", min(cut.values()), note=note))
display(claims.check("partitioned-states-save", runs[1].peak_bytes / runs[0].peak_bytes, note="two ranks, by hand"))
display(claims.check("offload-to-host", on_gpu and (on_gpu - on_host) / (8 * parameters), note="AdamW's states"))
no_proc = None if saved is not None else "needs /proc/self/status, which Linux has"
display(claims.check("offload-to-file", saved, missing=no_proc, note="AdamW's states in memory-mapped files"))
one_gpu = "needs two GPUs" if lab.machine.kind == "cuda" and not gpus2 else None
note = "; ".join(f"{best[stage].name} against {best[0].name}: {ratio}" for stage, ratio in slower.items())
claims.check("zero-slows-if-fits", None if one_gpu else fastest, missing=one_gpu, note=note)

# %% [markdown]
# ### The decision tree
#
# The guide's tree has two branches: the model and a small batch fit one device, then no ZeRO; else ZeRO, with offload. Here it is as a function, with the stages in between. It takes the first that fits, for each further one sends more or waits longer. Whatever is cut up, a card needs room for its activations and for the largest layer, whole; and what is moved off the card has to lie somewhere.
#
# `parallelism` walks the same tree for a real model, without the formula: it traces a rank of each layout, so the bytes are the estimate's, and what a rank sends is a ring's. The simplest layout that fits is chosen; over a slow link the one that sends least. Where no shards fit, it names the next branch, and how many bytes no number of cards makes smaller. After the function: an 8B model on eight cards, over a fast and a slow link, and on cards that are too small.


# %%
def choose(parameters, cards, card=80 * 2**30, activations=10e9, largest_layer=0.05, host=1e12, disk=8e12):
    """The first that fits, and bytes a card. Limits in bytes, host and disk for all cards; a layer's share of all."""
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
plots.Table(["parameters", "cards of 80 GiB", "choice", "bytes a card"], rows)

# %%
large = Task("llama-3-8b", seq_len=1024)
recipe = {"per_device_train_batch_size": 4, "bf16": True, "gradient_checkpointing": True, "dtype": "float32"}
for question in ({"card_bytes": "80GB"}, {"card_bytes": "80GB", "slow_link": True}, {"card_bytes": "8GB"}):
    display(lab.foresee(parallelism, large, cards=8, **question, **recipe))

# %% [markdown]
# ## Exercise, a challenge: the least memory for a given traffic
#
# Write `answer(ranks, link, pcie)`. A step may send `link` bytes a parameter to other ranks and move `pcie` bytes a parameter over PCIe. In fp32 with AdamW, which stage (0 to 3) takes the least device memory a rank, and should its states be offloaded? Return the two, for example `(0, False)`. Offload moves the gradients of a rank's share there and its weights back. Cases are drawn anew each time, from 2 to 64 ranks.

# %%
exercises.hint(
    "How many bytes does each stage send at N ranks? The table of volumes has the unit 4 (N-1)/N bytes a parameter.",
    "Offload takes the states of a rank's share off its device. What is a rank's share in stage 0, and in the others?",
    "Try all eight pairs, leave out those that send or move too much, and take the least memory of the rest.",
)

# %% tags=["exercise"]
answer = None


# %% tags=["check"]
def costs(stage, offload, ranks):
    """Bytes a parameter: on the device, to other ranks, over PCIe; volumes are those of the table."""
    share = 1 if stage == 0 else 1 / ranks
    states = formula(stage, ranks)[2]
    sent = sends[stage] * 4 * (ranks - 1) / ranks
    return sum(formula(stage, ranks)) - offload * states, sent, offload * 8 * share


def check_choice(answer):
    if answer is None:
        return exercises.not_attempted("replace None by a function")
    draw = random.Random()
    for _ in range(200):
        ranks, link, pcie = draw.choice([2, 4, 8, 64]), draw.uniform(4, 14), draw.choice([0, draw.uniform(0, 10)])
        every = {(s, o): costs(s, o, ranks) for s in range(4) for o in (False, True)}
        able = {pair: cost[0] for pair, cost in every.items() if cost[1] <= link and cost[2] <= pcie}
        if able and able.get(pair := answer(ranks, link, pcie), 99) > min(able.values()) + 1e-9:
            said = "is over its limits" if pair not in able else f"takes {able[pair]:.2f} bytes a parameter"
            return exercises.wrong(
                f"{ranks} ranks, link {link:.2f}, pcie {pcie:.2f}: {pair} {said}; the least is {min(able.values()):.2f}"
            )
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
# - States, gradients and weights were cut up one after the other: the losses stayed those of one process, and the bytes a rank were the formula's.
# - By the formula stages 1 and 2 sent what DDP sends, stage 3 half as much again; the wire showed what gloo makes of it. The activations stayed.
# - FSDP2 kept what ours keeps, DeepSpeed was tried where it is installed. States in a file left the memory that must stay. Whether ZeRO was worth it for a model that fits, the claim above says.

# %% tags=["finish"]
claims.finish()
