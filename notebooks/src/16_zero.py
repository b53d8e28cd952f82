# %% [markdown]
# # Why does every rank keep the same bytes?
#
# With DDP (lesson 15) each rank holds all weights, all gradients and all optimizer states, and all ranks hold the same. ZeRO, the *zero redundancy optimizer*, cuts them up. Here it is built by hand.
#
# **You will see**
# - optimizer states, gradients and weights cut up among ranks, one after the other: equal losses, and the bytes that a formula says
# - what each cut sends, and what no cut makes smaller: activations
# - FSDP2 and DeepSpeed doing the same, states kept in a file, and when none of it is worth it

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import ctypes
import os
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

from perf_helpers import Lab, Task, claims, exercises, optional_packages, plots, widgets
from perf_helpers.advise import parallelism
from perf_helpers.estimate import estimate

no_deepspeed = optional_packages.offer("deepspeed")
lab = Lab(profile, strict=strict, out=out, lesson="16_zero")
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 2000}
sizes = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
task = Task("bert-small", seq_len=32, config=no_dropout | sizes)
parameters = task.parameters()

# %% [markdown]
# ## Idea
#
# In fp32 with AdamW a parameter takes 16 bytes: 4 of weight, 4 of gradient, 8 of states (lesson 01). With *P* parameters every rank of DDP holds 16 P. Only one of the *N* ranks has to hold each of them:
#
# | stage | cut up | bytes a rank |
# |---|---|---|
# | 0 | nothing (DDP) | 16 P |
# | 1 | optimizer states | 8 P + 8 P/N |
# | 2 | gradients too | 4 P + 12 P/N |
# | 3 | weights too | 16 P/N |
#
# What a rank does not hold it receives when it is needed. Two messages do that, in which all ranks take part: **reduce-scatter** sums a row of numbers over the ranks and leaves each rank its *share* of the sum, and **all-gather** joins the shares to the whole row again.
#
# ## Predict

# %%
widgets.predict(lab, "stage1", "Two ranks, stage 1: what is left of DDP's 16 bytes a parameter, in %?", "%", 0, 100)
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
            return NotImplemented  # a tensor made of tensors: what it does with these comes by again
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
        self.share.grad = mine.div_(self.ranks)

    def gather(self, *_):
        self.row.untyped_storage().resize_(4 * self.length)
        dist.all_gather_into_tensor(self.row, self.share.data)

    def free(self, *_):
        self.row.untyped_storage().resize_(0)


# %%
def train(task, stage, steps=3, samples=4):
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    model, losses = task.build_model(), []
    modules = [model.bert.embeddings, *model.bert.encoder.layer, model.bert.pooler, model.classifier]
    parts = [Part(module, stage) for module in modules] if stage else []
    optimizer = torch.optim.AdamW([part.share for part in parts] or model.parameters())
    for step in range(steps):
        rows = {name: row[samples * step :][rank:samples:ranks] for name, row in task.batch(samples * steps).items()}
        with Traffic() as sent:
            loss = model(**rows).loss
            loss.backward()
            for weight in model.parameters() if stage == 0 and ranks > 1 else ():
                dist.all_reduce(weight.grad.div_(ranks))
            for part in parts if stage == 1 else ():
                part.reduce(part.gradients)
            optimizer.step()
            optimizer.zero_grad()
            for part in parts if stage in (1, 2) else ():
                dist.all_gather_into_tensor(part.row, part.share.data)
                if stage == 1:
                    part.gradients.zero_()
        losses.append(loss.item())
    return {"losses": losses, "sent": sent.seen, "elements": sum(part.length for part in parts)}


# %% [markdown]
# ## Baseline
#
# One process with all samples, and two ranks that hold everything (stage 0).

# %%
counting = {"measure": ("memory",), "use_cpu": True}  # on CPU ranks, also where there is a GPU: bytes are bytes
one = lab.run(partial(train, stage=0), "one process", task=task, **counting)
runs = {0: lab.run(partial(train, stage=0), "stage 0", task=task, processes=2, **counting)}


def loss_of(run):
    """The loss of each step, the mean over its ranks."""
    ranks = [rank["value"]["losses"] for rank in run.ranks or ()] or [run.value["losses"]]
    return [sum(step) / len(ranks) for step in zip(*ranks)]


torch.testing.assert_close(loss_of(runs[0]), loss_of(one), rtol=1e-3, atol=1e-4)

# %% [markdown]
# ## Change one thing
#
# Then one cut after the other. The cell stops if a loss differs from that of one process.

# %%
for stage in (1, 2, 3):
    runs[stage] = lab.run(partial(train, stage=stage), f"stage {stage}", task=task, processes=2, **counting)
    torch.testing.assert_close(loss_of(runs[stage]), loss_of(one), rtol=1e-3, atol=1e-4)

KINDS = ("weights", "gradients", "optimizer_states")


def formula(stage, ranks):
    """Bytes a parameter of weights, gradients and states on each rank."""
    cut = [4 / ranks if stage >= least else 4 for least in (3, 2)]
    return [*cut, 8 / ranks if stage >= 1 else 8]


def counted(run, kinds=KINDS):
    """The same as counted after backward, where all of them are there."""
    return [run.memory.phase_breakdowns["backward"][kind] / parameters for kind in kinds]


rows = []
for stage, run in runs.items():
    told, seen = formula(stage, 2), counted(run)
    rows.append([run.name, *(f"{a:.3f} ({b:g})" for a, b in zip(seen, told)), sum(seen), sum(told)])
names = ["weights", "gradients", "states"]
display(plots.Table(["bytes a parameter: counted (formula)", *names, "counted", "formula"], rows))
widgets.revealed(lab, "stage1", 100 * sum(counted(runs[1])) / 16)

# %%
axes = plots.memory([*runs.values()], title="Peak of a rank, two ranks, by hand")

# %% [markdown]
# The table holds what lies there between backward and the step. The picture shows the peak: it also has a few temporaries, and in stage 3 the weights of the module that is in use.
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
# A ring hands over (N-1)/N of a row for a reduce-scatter or an all-gather, and twice that for an all-reduce, which is both. So in units of 4 P(N-1)/N bytes:

# %%
UNITS = {"allreduce": 2, "reduce_scatter_base": 1, "allgather_base": 1}


def volume(run):
    """What a rank sends in a step, in units of the weights' bytes x (ranks - 1) / ranks."""
    return sum(UNITS[kind] * size for kind, size in run.value["sent"]) / (4 * parameters)


rows = []
for run in runs.values():
    kinds = Counter(kind for kind, _ in run.value["sent"])
    rows.append([run.name, ", ".join(f"{n} {kind}" for kind, n in kinds.items()), volume(run)])
plots.Table(["", "messages in a step", "volume, times the weights"], rows)

# %% [markdown]
# Stages 1 and 2 send what DDP sends: its all-reduce is taken apart, and the update put in between. Stage 3 gathers the weights twice, so it sends half as much again ([Rajbhandari and others](https://arxiv.org/abs/1910.02054)). And it cannot wait until the end: each module stops for its weights.
#
# ### More ranks
#
# The crosses are counted: here, and with four ranks of a smaller model.

# %%
little = Task("bert-tiny", seq_len=16, config=no_dropout | {"num_hidden_layers": 2})
four, dots = {}, {}
for stage in (1, 2, 3):
    four[stage] = lab.run(partial(train, stage=stage, steps=2), f"four, {stage}", task=little, processes=4, **counting)
    four_bytes = sum(four[stage].memory.phase_breakdowns["backward"][kind] for kind in KINDS) / little.parameters()
    dots[stage] = {2: sum(counted(runs[stage])), 4: four_bytes}
ranks = [1, 2, 4, 8, 16, 32, 64]
series = {f"stage {stage}": [sum(formula(stage, n)) for n in ranks] for stage in range(4)}
axes = plots.lines(ranks, series, "ranks", "bytes a parameter on each rank", title="Lines: formula. Crosses: counted")
for values in dots.values():
    axes.plot(values.keys(), values.values(), "x", color="black", markersize=11, zorder=5)
axes.set_xscale("log", base=2)
_ = axes.set_xticks(ranks, ranks)

# %% [markdown]
# Stages 1 and 2 approach a floor: 8 and 4 bytes a parameter. Only stage 3 has none, so only it lets a model grow with the number of devices.
#
# ### The library: FSDP2
#
# torch's `fully_shard` is stage 3. Each weight becomes a *DTensor*, a tensor that knows which piece of it lies on which rank; a *device mesh* names the ranks.


# %%
def with_fsdp(task, steps=3, samples=4):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model, losses, rank, ranks = task.build_model(), [], dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    for part in (model.bert.embeddings, *model.bert.encoder.layer, model):
        fully_shard(part, mesh=mesh)  # new
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        rows = {name: row[samples * step :][rank:samples:ranks] for name, row in task.batch(samples * steps).items()}
        with Traffic() as sent:
            loss = model(**rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "sent": sent.seen}


fsdp = lab.run(with_fsdp, "FSDP2", task=task, processes=2, **counting)
torch.testing.assert_close(loss_of(fsdp), loss_of(one), rtol=1e-3, atol=1e-4)
rows = [[run.name, *counted(run), volume(run), plots.bytes_text(run.peak_bytes)] for run in (runs[3], fsdp)]
plots.Table(["bytes a parameter", *names, "volume", "peak"], rows)

# %% [markdown]
# Ours and torch's keep the same and send nearly the same; torch leaves the outermost module gathered between forward and backward. In the Trainer the switch is `TrainingArguments(fsdp=True)`. It needs accelerators: accelerate 1.15 passes over it on CPU ranks, and trains with DDP (the lab warns). What would a GPU take? The estimate follows one rank, of FSDP2 and of DeepSpeed, which is next:


# %%
def zero(stage, bucket=500_000, **more):
    """DeepSpeed's configuration of a stage, with buckets of so many numbers."""
    stages = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket, **more}
    torchs_adamw = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {"zero_optimization": stages, "train_micro_batch_size_per_gpu": "auto", **torchs_adamw}


gpt2, rows = Task("gpt2", seq_len=128, config={"num_hidden_layers": 4}), []
on_gpus = {"device": "cuda", "compute_capability": (8, 0), "per_device_train_batch_size": 4}
setups = [(f"FSDP2, GPUs: {ranks}", 3, ranks, {"fsdp": ranks > 1}) for ranks in (1, 2, 4, 8)]
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
# `TrainingArguments(deepspeed={...})` does the same for a Trainer. DeepSpeed is an extra of this course. The function below is a *deployment in a notebook* too: for one process the variables that a launcher sets are set by hand. The one after it does without the Trainer. Mind a default there: DeepSpeed 0.19 clips gradients at 1.0, and with that its losses were not those of one process.


# %%
def with_deepspeed(task, stage, **more):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():  # a launcher has set them already
        os.environ.setdefault(name, value)
    if "nvme" in str(more):
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
def with_engine(task, stage, steps=3, samples=4):
    """A loop of one's own: `initialize` wraps model and optimizer, and the engine has backward and step."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from torch.optim import AdamW

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    model, losses, rank, ranks = task.build_model(), [], dist.get_rank(), dist.get_world_size()
    config = zero(stage) | {"train_micro_batch_size_per_gpu": samples // ranks, "gradient_clipping": 0.0}  # not 1.0
    engine, *_ = deepspeed.initialize(model=model, optimizer=AdamW(model.parameters()), config=config)  # new
    for step in range(steps):
        rows = {name: row[samples * step :][rank:samples:ranks] for name, row in task.batch(samples * steps).items()}
        loss = engine(**rows).loss
        engine.backward(loss)  # new
        engine.step()  # new
        losses.append(loss.item())
    return {"losses": losses}


# %%
host, files, rows = {"device": "cpu"}, tempfile.TemporaryDirectory(), []
states = {"offload_optimizer": host}
in_files = {"offload_optimizer": {"device": "nvme", "nvme_path": files.name}}
tried = [(with_deepspeed, 1, 2, "", {}), (with_deepspeed, 2, 2, "", {}), (with_deepspeed, 3, 2, "", {})]
tried += [(with_engine, 3, 2, ", own loop", {}), (with_deepspeed, 2, 1, "", {})]
tried += [(with_deepspeed, 2, 2, ", states on the host", states)]
tried += [(with_deepspeed, 3, 2, ", states and weights on the host", states | {"offload_param": host})]
if not no_deepspeed and [*Path(find_spec("deepspeed").origin).parent.glob("ops/aio/async_io_op*")]:
    tried += [(with_deepspeed, 3, 2, ", states in files", in_files)]
for function, stage, ranks, where, more in () if no_deepspeed else tried:
    name, call = f"stage {stage}, ranks: {ranks}{where}", partial(function, stage=stage, **more)
    run = lab.run(call, f"DeepSpeed, {name}", task=task, processes=ranks, **counting)
    if function is with_engine and run.ok:
        torch.testing.assert_close(loss_of(run), loss_of(one), rtol=1e-3, atol=1e-4)
    parts = counted(run) if run.ok else [run.message.strip().splitlines()[-1][-60:], "", ""]
    rows.append([name, *parts, sum(formula(stage, ranks)), plots.bytes_text(run.peak_bytes)])
titles = ["DeepSpeed, bytes a parameter", *names, "formula, in all", "peak of a rank"]
print(no_deepspeed) if no_deepspeed else display(plots.Table(titles, rows))

# %% [markdown]
# If it is here, compare with the table of our own stages. DeepSpeed's optimizer keeps an fp32 copy of its share of the weights, even when the weights are fp32: 4/N bytes more. And mind `reduce_bucket_size`: its default of 5 x 10^8 numbers is 2 GB in fp32, more than such a model takes in all. Stage 3 has further buffers of its own, for weights that it fetches ahead.
#
# ### States in a file
#
# **Offload** keeps what is cut off not on another device but on the host (`offload_optimizer` and `offload_param`, above), or in files on an NVMe disk. On a CPU device and host are the same memory, so the first saves nothing here, and its buffers come on top. The second is `{"device": "nvme", "nvme_path": ...}`, an extension that is compiled against libaio (`make build/deepspeed DS_BUILD_AIO=1`, some minutes; where it was built, its row is above: hardly any states are left). The principle can be tried anywhere: `numpy.memmap` makes an array whose bytes are a file's.


# %%
def offloaded(task, in_file, steps=3):
    import numpy as np

    model, losses = task.build_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with tempfile.TemporaryDirectory() as folder:
        for number, weight in enumerate(model.parameters() if in_file else ()):
            state = optimizer.state[weight] = {"step": torch.tensor(0.0)}
            for name in ("exp_avg", "exp_avg_sq"):  # new
                file = Path(folder, f"{name}-{number}")
                state[name] = torch.from_numpy(np.memmap(file, np.float32, "w+", shape=tuple(weight.shape)))
        for step in range(steps):
            rows = {name: row[4 * step : 4 * step + 4] for name, row in task.batch(4 * steps).items()}
            loss = model(**rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return {"losses": losses, "in files": sum(file.stat().st_size for file in Path(folder).iterdir())}


# %%
kept = {name: lab.run(partial(offloaded, in_file=name == "in files"), name, task=task, **counting)
        for name in ("in memory", "in files")}  # fmt: skip
torch.testing.assert_close(kept["in files"].value["losses"], kept["in memory"].value["losses"], rtol=1e-4, atol=1e-5)
saved = kept["in memory"].peak_bytes - kept["in files"].peak_bytes
print(
    f"{saved / parameters:.2f} bytes a parameter less at the peak; files: {kept['in files'].value['in files'] / 1e6:.0f} MB"
)

# %% [markdown]
# ### Is it worth it for a model that fits?
#
# The guide says that ZeRO only slows such a training down. Both take turns, step by step.


# %%
def timed(task, shard, turns=5):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model, batch = task.build_model(), task.batch(2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.bert.encoder.layer, model) if shard else ():
        fully_shard(part, mesh=mesh)
    called = model if shard else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(turns + lab.profile.warmup_steps):
        called(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


options = {"task": task, "processes": 2, "measure": ("time",), "samples_per_step": 4, "use_cpu": True}
ddp, sharded = (lab.run(partial(timed, shard=shard), name, **options) for shard, name in ((0, "DDP"), (1, "stage 3")))
slower = lab.compare(ddp, sharded, turns=5).speed_ratio
print(f"stage 3 against DDP: {slower} times the throughput")

# %% [markdown]
# ## What held

# %% tags=["claim"]
errors = [abs(a / b - 1) for stage in (1, 2, 3) for a, b in zip(counted(runs[stage]), formula(stage, 2))]
display(claims.check("zero-saves", max(errors), note=f"two ranks, by hand; FSDP2 keeps {sum(counted(fsdp)):.3f} B"))
display(claims.check("partitioned-states-save", runs[1].peak_bytes / runs[0].peak_bytes, note="two ranks, by hand"))
display(claims.check("offload-to-file", saved / (8 * parameters), note="AdamW's states in memory-mapped files"))
claims.check("zero-slows-if-fits", slower, note="FSDP2 against DDP, two ranks")

# %% [markdown]
# ### The decision tree
#
# The guide's tree has two branches: the model and a small batch fit one device, then no ZeRO; else ZeRO, with offload. Here it is as a function, with the stages in between. It takes the first that fits, for each further one sends more or waits longer.


# %%
def choose(parameters, card_bytes, cards, activations=0):
    """The first of DDP and stages 1 to 3 that fits, else stage 3 with offload."""
    for stage in range(4):
        needed = sum(formula(stage, cards)) * parameters + activations
        if needed <= card_bytes:
            return f"stage {stage}" if stage else "DDP", needed
    return "stage 3 and offload", card_bytes


rows = [
    [f"{billions} G", cards, *choose(billions * 1e9, 80e9, cards)] for billions in (1, 7, 30) for cards in (1, 8, 64)
]
plots.Table(
    ["parameters", "cards of 80 GB", "choice", "bytes a card"], [[*row[:3], plots.bytes_text(row[3])] for row in rows]
)

# %% [markdown]
# Later guides ask two more questions: does the largest layer fit, and how fast are the links? Then the model itself may be cut (lesson 17). `parallelism` has that tree. It takes the bytes of one card and of a copy from the estimate, reckons the other layouts from these as above, and of those that fit it names the one that should take the least time by a plain model of arithmetic and links. The same model on the same cards, over a fast and over a slow link:

# %%
large = Task("llama-3-8b", seq_len=1024)
recipe = {"per_device_train_batch_size": 4, "bf16": True, "gradient_checkpointing": True}
for link in (2400, 64):  # NVLink of an A100; a PCIe slot of version 3 has 128 at best
    display(lab.foresee(parallelism, large, cards=8, card_bytes="80GB", link_gbits=link, **recipe))

# %% [markdown]
# ## Explore
#
# How many billion parameters fit? Weights, gradients and AdamW's states in fp32, activations left out.


# %% tags=["widget"]
def largest(card_GB, share_for_activations):
    ranks, room = [1, 2, 4, 8, 16, 32, 64], card_GB * (1 - share_for_activations)
    series = {f"stage {stage}": [room / sum(formula(stage, n)) for n in ranks] for stage in range(4)}
    axes = plots.lines(ranks, series, "ranks", "billion parameters that fit", title=f"Cards of {card_GB} GB")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks, ranks)
    return axes


_ = widgets.explore(largest, card_GB=[80, 16, 24, 40, 141], share_for_activations=[0.25, 0.0, 0.5])

# %% [markdown]
# ## Exercise, a challenge: the least memory at DDP's traffic
#
# A link allows what DDP sends, and no more. Which stage (0 to 3) takes the least memory a rank under that budget? Your answer is judged by what was counted above.

# %%
exercises.hint(
    "Look at the table of volumes: which stages send no more than stage 0?",
    "Among these, which one has the shortest bar?",
)

# %% tags=["exercise"]
answer = None


# %% tags=["check"]
def check_stage(answer):
    if answer is None:
        return exercises.not_attempted("replace None by 0, 1, 2 or 3")
    run = runs[answer]
    if volume(run) > 1.05 * volume(runs[0]):
        return exercises.wrong(f"stage {answer} sends {volume(run):.2f}, the budget is {volume(runs[0]):.2f}")
    allowed = [other for other in runs.values() if volume(other) <= 1.05 * volume(runs[0])]
    best = min(sum(counted(other)) for other in allowed)
    found = f"{sum(counted(run)):.2f} bytes a parameter, {volume(run):.2f} times the weights sent"
    return (exercises.right if sum(counted(run)) <= 1.001 * best else exercises.wrong)(found)


exercises.check(lab, "least-memory", check_stage, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check_stage, solution=2, mistake=3)

# %% [markdown]
# ## Recap
#
# - States, gradients and weights were cut up one after the other: the losses stayed those of one process, and the bytes a rank were the formula's.
# - Stages 1 and 2 sent what DDP sends, stage 3 half as much again, and the activations stayed.
# - FSDP2 kept what ours keeps, DeepSpeed was tried where it is installed, and states in a file left the host's memory. Whether stage 3 was worth it for a model that fits, the claim above says.

# %% tags=["finish"]
claims.finish(lab)
