# %% [markdown]
# # What if a model fits no device?
#
# Your model, its gradients and its optimizer states need more memory than any of your GPUs has, even with micro-batches of one sample, checkpointing and Adafactor. The model itself must then be split over several GPUs: through its layers, or between them. Which split sends less, and which one needs the fast link?
#
# **You will see**
# - a block split through its matrices and a model split into stages: the same gradients as the whole model, with about half of the weights on each rank
# - the messages that each split sends, and therefore which group of ranks needs the fast link
# - how much of the time the devices of a pipeline compute, and an order of micro-batches that stores fewer activations in the same time
#
# **Time:** plan 60 minutes. The cells run for 1 to 2 minutes on two CPU cores.
#
# **Before you start:** lesson 05 (micro-batches), lesson 15 (DDP, all-reduce) and lesson 16 (ZeRO, shards).
#
# **What a CPU cannot show:** the seconds of GPUs and of the links between them. The ranks are processes that share cores and memory, but their bytes, messages and gradients are real.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import os
import random
import tempfile
import time
from functools import partial
from itertools import accumulate, pairwise, product
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from IPython.display import display
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from perf_helpers import Claims, Lab, Task, exercises, hardware, plots, widgets
from perf_helpers.lab import Ratio

lab = Lab(profile, strict=strict, out=out, lesson="17_tensor_and_pipeline")
claims = Claims(lab)
gpus2 = hardware.supports("gpus2")[0]
WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 128, 4, 4, 256, 64

# %% [markdown]
# ## Idea
#
# Data parallelism (lesson 15) puts a full copy of the model, a *replica*, on every device. If the model does not fit there, the model itself must be distributed, in two ways:
#
# - **Tensor parallelism** splits *through* layers: each rank stores a shard of every matrix, and all ranks work on the same tokens at once.
# - **Pipeline parallelism** splits *between* layers: each rank stores some whole layers, a **stage** (not one of ZeRO's), and sends its output to the next rank.
#
# (ZeRO, lesson 16, also shards the weights, but gathers each layer before the layer computes. Here no weight ever moves.)
#
# ## Predict

# %%
question = (
    "Two ranks have half of the layers each, and train one batch. "
    "For what percentage of the time do both compute at the same moment?"
)
widgets.predict(lab, "together", question, "%", 0, 100)

# %%
exercises.question(
    lab,
    "faster",
    "A model fits one device. Does distributing it over two make training faster?",
    {
        "yes, each device has half of the work": "Half of the work, but when? Stages wait for each other, and shards "
        "of a matrix wait for a sum in every layer. There is a gain only if the waiting is short compared with "
        "the work.",
        "it may, but that is not what it is for": "It is for models that do not fit. A model that fits is usually "
        "trained faster by data parallelism: its replicas exchange messages once per step, not in every layer.",
        "no, it never can": "Two devices that both work are faster than one. How much of the time they do is measured "
        "below.",
    },
    right="it may, but that is not what it is for",
)

# %% [markdown]
# ## By hand: one matrix, two shards
#
# `linear` multiplies its input by a matrix, which can be split in two ways:
#
# - **by columns**, that is by outputs: each shard computes some of the outputs, from *all* inputs;
# - **by rows**, that is by inputs: each shard takes some of the inputs, and computes a *partial sum* of every output.
#
# (The names belong to a matrix of inputs x outputs. torch stores its transpose, outputs x inputs, so a split by columns splits torch's dimension 0.)
#
# The cell below splits one matrix in each way, then two matrices with a gelu between them. It prints nothing if every result equals that of the whole matrices.

# %%
torch.manual_seed(0)
x, up, down = torch.randn(6, 8), nn.Linear(8, 32), nn.Linear(32, 8)
columns = [linear(x, weight, bias) for weight, bias in zip(up.weight.chunk(2), up.bias.chunk(2))]
torch.testing.assert_close(torch.cat(columns, -1), up(x))  # side by side
hidden = gelu(up(x))
rows = [linear(part, weight) for part, weight in zip(hidden.chunk(2, -1), down.weight.chunk(2, 1))]
torch.testing.assert_close(sum(rows) + down.bias, down(hidden))  # added, and the bias once
pair = [linear(gelu(part), weight) for part, weight in zip(columns, down.weight.chunk(2, 1))]
torch.testing.assert_close(sum(pair) + down.bias, down(gelu(up(x))))

# %%
exercises.question(
    lab,
    "order",
    "The pair above splits the first matrix by columns and the second by rows. Why not the other way round?",
    {
        "the matrices would not fit together": "They would: the sum of the first two results could be split for "
        "the second.",
        "gelu needs the sum, so there would be a message between them": "Split by rows, the first matrix gives two "
        "partial sums, and gelu(a) + gelu(b) is not gelu(a + b). Split by columns, it gives each rank finished "
        "outputs.",
    },
    right="gelu needs the sum, so there would be a message between them",
)

# %% [markdown]
# So this *pair* of matrices needs no message in its middle, and one all-reduce (a sum over the ranks) at its end. Backward is the mirror image: each rank computes a partial sum of the gradient of the pair's input, and one all-reduce adds them up. As in NVIDIA's Megatron-LM, each end of a pair has a function. `Into`, at the pair's start, passes the input on unchanged in forward, and sums the gradients in backward. `OutOf`, at the pair's end, sums the outputs in forward, and passes the gradient on unchanged in backward. Attention is such a pair, too: query, key and value are split by columns, so that each rank has whole heads (each head attends by itself), and the output matrix by rows.
#
# The next four cells define a transformer block (attention and MLP) and a rank's shard of it. Then two processes, connected by gloo, run the block in shards. `Traffic`, the dispatch mode of lesson 15, records the operations that send something to other ranks.


# %%
def summed(x, group):
    dist.all_reduce(x := x.clone(memory_format=torch.contiguous_format), group=group)
    return x


class Into(torch.autograd.Function):  # each shard takes all of x; backward sums their gradients
    @staticmethod
    def forward(context, x, group):
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return summed(gradient, context.group), None


class OutOf(torch.autograd.Function):  # sums the shards' outputs; in backward each takes the whole gradient
    @staticmethod
    def forward(context, x, group):
        return summed(x, group)

    @staticmethod
    def backward(context, gradient):
        return gradient, None


# %%
class Block(nn.Module):
    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def attention(self, x):
        parts = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def mlp(self, x):
        return self.down(gelu(self.up(x)))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def build(layers=LAYERS, width=WIDTH, words=VOCABULARY):
    torch.manual_seed(0)  # every rank builds the same model
    blocks = [Block(width) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(words, width), *blocks, nn.Linear(width, words))


# %%
SPLITS = {"query": 0, "key": 0, "value": 0, "up": 0, "output": 1, "down": 1}  # 0: by columns, 1: by rows


class ShardedBlock(Block):
    """This rank's tensor-parallel shard of a block."""

    def __init__(self, block, rank, shards, group=None):
        nn.Module.__init__(self)
        self.norm1, self.norm2, self.heads, self.group = block.norm1, block.norm2, block.heads // shards, group
        for name, dimension in SPLITS.items():
            whole = getattr(block, name).weight.detach()
            setattr(self, name, nn.Linear(1, 1, bias=False))  # gets its weight, a shard, in the next line
            getattr(self, name).weight = nn.Parameter(whole.chunk(shards, dimension)[rank].clone())

    def attention(self, x):
        return OutOf.apply(super().attention(Into.apply(x, self.group)), self.group)  # new

    def mlp(self, x):
        return OutOf.apply(super().mlp(Into.apply(x, self.group)), self.group)  # new


# %%
class Traffic(TorchDispatchMode):
    """Record what this rank sends: [operation, bytes]."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor of tensors, such as the DTensors below: those inside are seen next
        name = function.overloadpacket.__name__.strip("_").replace("all_reduce", "allreduce")
        if "c10d" in function.namespace and not name.startswith(("recv", "wait", "wrap")):
            size = sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            self.seen.append([name, size])
        return function(*args, **(kwargs or {}))


def join_ranks(gpus=gpus2):
    """Join the other ranks; return this rank's number, how many ranks there are, and its device."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if gpus else "gloo")
    return rank, ranks, torch.device("cuda", rank) if gpus else torch.device("cpu")


# %%
def one_block(task, tokens):
    rank, ranks, device = join_ranks()
    part, found = ShardedBlock(build(1)[1].to(device), rank, ranks), []
    for count in tokens:
        with Traffic() as forward:
            y = part(torch.randn(1, count, WIDTH, device=device).requires_grad_())
        with Traffic() as backward:
            y.square().sum().backward()
        found += [[count, "forward", forward.seen], [count, "backward", backward.seen]]
    return found


def on_ranks(function, name, task=None, processes=2, measure="value", **options):
    """Run a function on two or more ranks and return their results; measure="none" if it reads a clock."""
    run = lab.run(partial(function, **options), name, task=task, processes=processes, measure=measure)
    return [rank["value"] for rank in run.ranks]


counted = on_ranks(one_block, "half a block", tokens=(64, 256, 1024))[0]
rows = [[*row, [size for _, size in seen]] for *row, seen in counted]
rows = [[count, phase, len(sizes), sum(sizes), sum(sizes) / (4 * count * WIDTH)] for count, phase, sizes in rows]
plots.Table(["tokens", "phase", "all-reduces", "bytes", "bytes / (4 B x tokens x width)"], rows)

# %% [markdown]
# The last column divides the bytes by the size of the activations that pass through the block. It is 2 in every row, because forward and backward each have two all-reduces of that size. Data parallelism instead sends one gradient per weight, however many tokens there are.
#
# ### Embedding and head
#
# Embedding and head (the last layer) have a row for each word of the vocabulary, and each rank stores the rows of some words.
#
# - *Embedding*: a rank looks up the words that it stores, and writes zeros for the others. The sum over the ranks is the embedding.
# - *Head*: a rank computes the scores of its own words. No rank needs all scores, because the loss needs only three numbers per token: the largest score (subtracted first, to prevent overflow), the sum of the exponentials, and the score of the right word.
#
# In the table below the vocabulary grows. Compare what a rank stores if only the blocks are split, and if embedding and head are, too.


# %%
class ShardedWords(nn.Module):
    """This rank's rows of an embedding or a head: those of its words."""

    def __init__(self, layer, rank, shards, group=None):
        super().__init__()
        self.group, self.is_head, self.first = group, isinstance(layer, nn.Linear), rank * len(layer.weight) // shards
        for name, whole in layer.named_parameters():
            setattr(self, name, nn.Parameter(whole.detach().chunk(shards)[rank].clone()))

    def forward(self, x):
        if self.is_head:
            return linear(Into.apply(x, self.group), self.weight, self.bias)
        return OutOf.apply(pick(self.weight, x - self.first), self.group)


def pick(rows, number):
    """Return the row of each number, or zeros if another rank stores it."""
    stored = (number >= 0) & (number < len(rows))
    return rows[number.clamp(0, len(rows) - 1)] * stored[..., None]


def shard_layers(model, *place):  # place: rank, shards, group
    kinds = {Block: ShardedBlock, nn.Embedding: ShardedWords, nn.Linear: ShardedWords}
    return nn.Sequential(*(kinds[type(layer)](layer, *place) for layer in model))


# %%
def stage_of(model, stage, stages):
    """Return the layers of a stage, as many blocks for each, and the ranks before and after it."""
    blocks = (len(model) - 2) // stages
    ends = [0, *(1 + blocks * number for number in range(1, stages)), len(model)]
    around = {"before": stage - 1 if stage else None, "after": stage + 1 if stage < stages - 1 else None}
    return model[ends[stage] : ends[stage + 1]], around


def fullest(stages, shards, words=VOCABULARY):
    """Return the MB of weights on the fullest of stages x shards ranks; None if there are too few blocks or heads."""
    if LAYERS % stages or HEADS % shards:
        return None
    every = [stage_of(build(words=words), stage, stages)[0] for stage in range(stages)]
    every = [shard_layers(layers, shard, shards) for layers in every for shard in range(shards)]
    return max(sum(weight.nbytes for weight in layers.parameters()) for layers in every) / 1e6


shares = {words: fullest(1, 2, words) / fullest(1, 1, words) for words in (VOCABULARY, 8000, 32000)}
blocks = 4 * 12 * LAYERS * WIDTH**2 / 1e6  # MB; only these are halved if embedding and head stay whole
rows = [[words, 1 - blocks / 2 / fullest(1, 1, words), share] for words, share in shares.items()]
plots.Table(
    ["words", "only blocks split", "embedding and head, too"], rows, "weights on the fuller of two ranks / all weights"
)

# %% [markdown]
# ## By hand: stages
#
# A pipeline sends activations forward and their gradients back, one message each per **micro-batch**. The **schedule** of a stage is the order in which it computes. Two schedules are common, and with a third the ranks wait less:
#
# - **GPipe** runs all forward passes, then all backward passes.
# - **1F1B** ("one forward, one backward") alternates forward and backward passes as soon as possible.
# - **Interleaved** gives each rank two shorter pieces of the model instead of one long piece, so the next rank can begin sooner. The price is more messages: if the first of two ranks has pieces 0 and 2, activations change ranks three times instead of once.
#
# The next cell prints the first two for two stages and four micro-batches: `F0` is the forward pass of micro-batch 0, `B0` its backward pass. You can skip its code and the next four cells: they receive and send, train, and compare gradients.


# %%
def schedule(name, stage, stages, micro_batches):
    """Return what a stage computes, in order: ("F" or "B", micro-batch, which of its pieces)."""
    pieces = 2 if name == "interleaved" else 1
    count = pieces * micro_batches  # interleaved: the pieces alternate after as many micro-batches as there are stages
    every = [(k // (stages * pieces) * stages + k % stages, k // stages % pieces) for k in range(count)]
    forward = [("F", number, piece) for number, piece in every]
    backward = [("B", number, pieces - 1 - piece) for number, piece in every]
    behind = stages - 1 - stage  # stages after this one
    # Forward passes before the first gradient can arrive:
    ahead = min(count, {"GPipe": count, "1F1B": behind, "interleaved": 2 * behind + stages}[name])
    turns = [action for both in zip(forward[ahead:], backward) for action in both]
    return forward[:ahead] + turns + backward[count - ahead :]


for name in ("GPipe", "1F1B"):
    for stage in range(2):
        print(f"{name}, stage {stage}:", *(kind + str(number) for kind, number, _ in schedule(name, stage, 2, 4)))


# %%
def received(shape, source, group, device):
    tensor = torch.empty(shape, device=device)
    dist.recv(tensor, source, group)
    return tensor


def now():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def loss_in_parts(logits, labels, group=None):
    """Return the cross entropy if each rank has the scores of its own words."""
    dist.all_reduce(top := logits.detach().amax(-1), dist.ReduceOp.MAX, group=group)
    total = OutOf.apply((logits - top[:, None]).exp().sum(-1), group)
    number = labels - dist.get_rank(group) * logits.shape[1]
    here = (number >= 0) & (number < logits.shape[1])
    right = logits.gather(1, number.clamp(0, logits.shape[1] - 1)[:, None])[:, 0] * here
    return (total.log() + top - OutOf.apply(right, group)).mean()


def sequences(device="cpu", samples=16):
    text = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1)).to(device)
    return text[:, :-1], text[:, 1:].contiguous()


# %%
def pipeline(
    layers, actions, ids, labels, before=None, after=None, ways=(None, None), width=WIDTH, seen=None, loss=cross_entropy
):
    """Run a step of one stage. before, after: the neighbouring ranks; ways: a group for each direction."""
    held, losses, sending, seen = {}, [], [], [] if seen is None else seen
    for kind, number, _ in actions:
        if kind == "F":
            x = ids[number]
            if before is not None:
                x = received((*x.shape, width), before, ways[0], x.device).requires_grad_()
            begin, y = now(), layers(x)
            if after is None:
                y = loss(y.flatten(0, 1), labels[number].flatten()) / len(ids)
                losses.append(y.detach())
            held[number], message = (x, y), (y.detach(), after, ways[0])
        else:
            x, y = held.pop(number)
            gradient = None if after is None else received(y.shape, after, ways[1], y.device)
            begin, _ = now(), y.backward(gradient)
            message = x.grad, before, ways[1]
        seen.append([kind, number, begin, now()])
        sending += [] if message[1] is None else [dist.isend(*message)]  # does not wait
    for work in sending:
        work.wait()
    return sum(losses).item() if after is None else None


# %%
def place(way, order="1F1B", micro_batches=1, gpus=gpus2, samples=16):  # layers, and other arguments of `pipeline`
    rank, ranks, device = join_ranks(gpus)
    model, (ids, labels), stage, given = build().to(device), sequences(device, samples), (0, 1), {}
    if way == "tensor":
        model, given = shard_layers(model, rank, ranks), {"loss": loss_in_parts}
    elif way == "data":
        model, ids, labels = DDP(model), ids[rank::ranks], labels[rank::ranks]
    elif way == "pipeline":
        model, given = stage_of(model, *(stage := (rank, ranks)))
        given["ways"] = dist.new_group(), dist.new_group()  # NCCL needs a separate order for each direction
    given |= {"ids": ids.chunk(micro_batches), "labels": labels.chunk(micro_batches)}
    return model, given | {"actions": schedule(order, *stage, micro_batches)}


def train(task, way="one", steps=5, frugal=False, **options):
    model, given = place(way, **options)
    for block in [layer for layer in model if isinstance(layer, Block)] if frugal else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer, losses = (torch.optim.Adafactor if frugal else torch.optim.AdamW)(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        with Traffic() as traffic:
            losses.append(pipeline(model, **given))
        optimizer.step()
        optimizer.zero_grad()
    return losses, sum(size for _, size in traffic.seen)


# %%
def gradients(task, ways):
    """Return for each way the largest difference from a gradient on one device / the largest number in it."""
    rank, ranks, device = join_ranks()
    whole, (ids, labels), found = build().to(device), sequences(device), {}
    cross_entropy(whole(ids).flatten(0, 1), labels.flatten()).backward()  # the whole batch on one device
    for way, options in ways.items():
        layers, given = place(**options)
        pipeline(layers, **given)
        found[way] = []
        for name, weight in layers.named_parameters():
            name = name.removeprefix("module.")  # DDP adds this
            truth, layer = whole.get_parameter(name).grad, name.split(".")[-2]
            dimension = 0 if layer.isdigit() else SPLITS.get(layer)  # embedding and head have a number for a name
            if options["way"] == "tensor" and dimension is not None:
                truth = truth.chunk(ranks, dimension)[rank]
            found[way].append(relative_difference(weight.grad, truth))
    return {way: max(each) for way, each in found.items()}


def relative_difference(one, other):
    """Return the largest difference / the largest number in `other`."""
    return ((one - other).abs().max() / other.abs().max()).item()


# %% [markdown]
# ## Baseline, and four ways to use two devices
#
# The same model is trained on the same 16 sequences in five ways: on one device, as two replicas (data parallel), with tensor parallelism, and as a two-stage pipeline of eight micro-batches, with the schedules GPipe and 1F1B. The first table has the bytes of the fullest rank.
#
# Is it the same training? Losses would not tell: AdamW divides by the size of the gradient, so even gradients 16 times too large give nearly the same losses. Therefore each rank compares its gradients with those of one device.

# %%
WAYS = {"data parallel": {"way": "data"}, "tensor parallel": {"way": "tensor"}}
WAYS |= {f"pipeline, {order}": {"way": "pipeline", "micro_batches": 8, "order": order} for order in ("GPipe", "1F1B")}


def each_rank(name, steps=5, **options):
    given = {"processes": 1 + ("way" in options), "measure": ("memory",), "use_cpu": not gpus2}
    run = lab.run(partial(train, steps=steps, **options), name, **given)
    return run.ranks or [{"peak_bytes": run.peak_bytes, "breakdown": run.memory.breakdown, "value": run.value}]


runs, largest, losses, rows = {}, {}, {}, []
for name, options in {"one device": {}, **WAYS}.items():
    runs[name] = each_rank(name, **options)
    weights = [rank["breakdown"]["weights"] for rank in runs[name]]
    largest[name] = max(weights) / runs["one device"][0]["breakdown"]["weights"]
    losses[name], _ = runs[name][-1]["value"]  # the last stage has the loss
    peak, sent = (max(values) / 1e6 for values in zip(*((rank["peak_bytes"], rank["value"][1]) for rank in runs[name])))
    rows.append([name, max(weights) / 1e6, largest[name], peak, sent, losses[name][-1]])
titles = ["way", "weights, MB", "weights / one device", "peak, MB", "sent per step, MB", "loss, 5th step"]
display(plots.Table(titles, rows))
differences = on_ranks(gradients, "gradients", measure="none", ways=WAYS)
differences = {name: max(rank[name] for rank in differences) for name in WAYS}
rows = [[name, f"{most:.0e}"] for name, most in differences.items()]
plots.Table(["way", "largest difference / largest gradient"], rows)

# %% [markdown]
# Each replica stores all weights. With tensor or pipeline parallelism a rank stores about half of the weights, and the gradients are those of one device. (Loss and peak of data parallelism are those of one replica, which has half of the samples.)
#
# ### The bubble
#
# A stage can begin only after the stage before it has sent something. Until then its device is idle: the **bubble**. With one micro-batch, one of two stages is always idle.
#
# Each rank records when it computes, on blocks twice as wide, and rank 0 also runs the whole model alone. First come a drawing tool and a simulator of schedules in which messages take no time. In a step, each of *p* stages computes *m* micro-batches, and waits for the other stages as long as *p* - 1 micro-batches take. The simulator's cell checks the idle share of the time:
#
# - GPipe and 1F1B: (p-1)/(m+p-1). (Papers also write (p-1)/m: idle over *busy* time.)
# - interleaved, with two pieces per rank: (p-1)/(2m+p-1), because the wait is half as long.


# %%
def seconds_of(by_rank):
    """Return the seconds from the first action to the end of the last one."""
    every = [action for seen in by_rank for action in seen]
    return max(end for *_, end in every) - min(begin for _, _, begin, _ in every)


def bubble(by_rank):
    """Return the share of the ranks' time in which they are idle."""
    busy = sum(end - begin for seen in by_rank for _, _, begin, end in seen)
    return 1 - busy / (len(by_rank) * seconds_of(by_rank))


def gantt(axes, by_rank, title):
    start = min(begin for seen in by_rank for _, _, begin, _ in seen)
    for rank, seen in enumerate(by_rank):
        for kind, number, begin, end in seen:
            color = plots.SERIES[kind == "B"]
            axes.barh(rank, end - begin, left=begin - start, color=color, edgecolor="white", height=0.7)
            if end - begin > 0.03 * seconds_of(by_rank):
                axes.text((begin + end) / 2 - start, rank, number, ha="center", va="center", color="white", fontsize=10)
    axes.set_yticks(range(len(by_rank)), [f"stage {rank}" for rank in range(len(by_rank))])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)


# %%
def simulate(schedule_of, stages, micro_batches, seconds=(1.0, 2.0)):
    """Return records like measured ones; seconds: of a forward and a backward pass of all of a rank's layers."""
    left, done, records = [list(schedule_of(stage, stages, micro_batches)) for stage in range(stages)], {}, []
    pieces, records = 1 + max(piece for *_, piece in left[0]), [[] for _ in left]
    while any(left):
        for stage, actions in enumerate(left):
            while actions:
                kind, number, piece = actions[0]
                piece_number = piece * stages + stage  # which piece of the whole model
                source = piece_number - 1 if kind == "F" else piece_number + 1  # the piece that sends its message
                needed = (kind, source, number) if 0 <= source < pieces * stages else ("F", piece_number, number)
                if needed not in done and (kind, source) != ("F", -1):
                    break
                begin = max(done.get(needed, 0.0), records[stage][-1][-1] if records[stage] else 0.0)
                done[kind, piece_number, number] = begin + seconds[kind == "B"] / pieces
                records[stage].append([kind, number, begin, done[kind, piece_number, number]])
                actions.pop(0)
    return records


ORDERS = {name: partial(schedule, name) for name in ("GPipe", "1F1B", "interleaved")}
for order, stages, count in product(ORDERS, (2, 4, 8), (8, 32)):
    formula = (stages - 1) / ((1 + (order == "interleaved")) * count + stages - 1)
    torch.testing.assert_close(bubble(simulate(ORDERS[order], stages, count)), formula)


# %%
LOOKED_AT = [("one device", 1), ("GPipe", 1), ("GPipe", 2), ("GPipe", 4), ("GPipe", 8), ("1F1B", 8)]
LOOKED_AT += [("data parallel", 1), ("tensor parallel", 1)]


def watch(task, turns=6, width=2 * WIDTH):
    rank, ranks, device = join_ranks()
    (ids, labels), found, alone = sequences(device), [], schedule("GPipe", 0, 1, 1)
    whole, replica, sharded, staged = (build(width=width).to(device) for _ in range(4))
    stage, around = stage_of(staged, rank, ranks)
    if gpus2:
        around["ways"] = dist.new_group(), dist.new_group()
    ways = {"one device": (whole, {}), "data parallel": (DDP(replica), {})}
    ways["tensor parallel"] = shard_layers(sharded, rank, ranks), {"loss": loss_in_parts}
    for _, (name, count) in product(range(turns), LOOKED_AT):
        dist.barrier()
        found.append([])
        layers, given = ways.get(name, (stage, around))
        actions = alone if name in ways else schedule(name, rank, ranks, count)
        shard = (each[rank::ranks] if name == "data parallel" else each for each in (ids, labels))
        if name != "one device" or rank == 0:
            pipeline(layers, actions, *(each.chunk(count) for each in shard), width=width, seen=found[-1], **given)
    return found[len(LOOKED_AT) :]  # the first turn is a warm-up


# %%
both = on_ranks(watch, "watched", measure="none", **lab.sized({}, {"turns": 4, "width": WIDTH}))
timed, rows = {}, []
for row, key in enumerate(LOOKED_AT):
    timed[key] = [[rank[turn] for rank in both] for turn in range(row, len(both[0]), len(LOOKED_AT))]
alone = [seconds_of(turn[:1]) for turn in timed.pop(LOOKED_AT[0])]
for (name, count), turns in timed.items():
    gain = Ratio.of_pairs([one / seconds_of(turn) for one, turn in zip(alone, turns)], 1.05)  # median and interval
    shares_idle = [bubble(turn) for turn in turns]
    texts = f"{median(shares_idle):.0%} ({min(shares_idle):.0%} to {max(shares_idle):.0%})", f"{1 / (count + 1):.0%}"
    rows.append([name, count, *(texts if name in ORDERS else ("", "")), str(gain)])
display(plots.Table(["way", "micro-batches", "bubble (least to most)", "formula", "speed, times one device"], rows))
figure, axes = plt.subplots(3, 1, figsize=(8, 5), layout="constrained", dpi=110)
for ax, key in zip(axes, [("GPipe", 1), ("GPipe", 8), ("1F1B", 8)]):
    turn = min(timed[key], key=seconds_of)
    gantt(ax, turn, f"{key[0]}, micro-batches: {key[1]}, idle: {bubble(turn):.0%}")
axes[-1].set_xlabel("seconds (blue: forward, orange: backward; the number: which micro-batch)")
widgets.revealed(lab, "together", 100 * max(0, 1 - 2 * median(bubble(turn) for turn in timed["GPipe", 1])))

# %% [markdown]
# With one micro-batch the devices work one after the other, so the second device adds only its memory. More micro-batches shrink the bubble. But the batch has a fixed size, so its micro-batches become smaller, and smaller matmuls run at a lower rate: the last column shows from which number on more micro-batches no longer help. If the measured bubble is larger than the formula's, the rest is time for messages, passes of unequal length, and other work on the same cores. (The table has the median of several runs, each picture the fastest run.)
#
# The last two rows answer whether two devices make a training faster. Replicas exchange messages once per step, tensor-parallel shards in every layer.
#
# ### What a stage stores
#
# GPipe and 1F1B have the same bubble, but 1F1B needs less memory. A stage must *hold* the activations of each micro-batch from its forward to its backward pass, which 1F1B runs sooner. The next cell counts the activations of four ranks on the CPU. After it, try other schedules in the simulator.

# %%
STAGES, grown = 4, {}


def most_held(actions):
    """Return the most micro-batches whose activations a stage holds at once."""
    return max(accumulate(1 if kind == "F" else -1 for kind, *_ in actions))


for order in ("GPipe", "1F1B"):
    each = partial(train, way="pipeline", steps=2, order=order, micro_batches=8, gpus=False, samples=32)
    run = lab.run(each, f"{STAGES} stages, {order}", processes=STAGES, measure=("memory",), use_cpu=True)
    grown[order] = [rank["breakdown"]["activations"] / 1e6 for rank in run.ranks]
_, ax = plt.subplots(figsize=(7, 3.4), layout="constrained", dpi=110)
for row, (order, sizes) in enumerate(grown.items()):
    bars = ax.bar([stage + 0.38 * row for stage in range(STAGES)], sizes, 0.36, color=plots.SERIES[row], label=order)
    held = [most_held(schedule(order, stage, STAGES, 8)) for stage in range(STAGES)]
    ax.bar_label(bars, [f"{count} held" for count in held], fontsize=10)
ax.set_xticks([stage + 0.19 for stage in range(STAGES)], [f"stage {stage}" for stage in range(STAGES)])
ax.set(ylabel="activations at the peak (MB)", ylim=(0, 1.3 * max(map(max, grown.values()))))
ax.set_title("Eight micro-batches: activations that each stage holds", loc="left")
ax.spines[["top", "right"]].set_visible(False)
_ = ax.legend(frameon=False, ncols=2, loc="upper left")


# %% tags=["widget"]
def explore(stages, micro_batches, order):
    if order == "interleaved":  # it needs a multiple of the number of stages
        micro_batches = stages * max(1, micro_batches // stages)
    records = simulate(ORDERS[order], stages, micro_batches)
    _, axes = plt.subplots(figsize=(8, 0.8 + 0.4 * stages), layout="constrained", dpi=110)
    held = max(most_held(schedule(order, stage, stages, micro_batches)) for stage in range(stages))
    held /= 1 + (order == "interleaved")  # each piece has half of a rank's layers
    title = f"{order}, {micro_batches} micro-batches: {bubble(records):.0%} idle, at most {held:g} held"
    gantt(axes, records, title)
    axes.set_xlabel("time (a forward is 1, a backward 2)")
    return axes


_ = widgets.explore(
    explore, stages=[4, 2, 8], micro_batches=[8, 1, 2, 4, 16, 32], order=["1F1B", "GPipe", "interleaved"]
)

# %% [markdown]
# With GPipe every stage holds the activations of all micro-batches. With 1F1B, stage *s* (from 0) of *p* never holds those of more than p - s, however many the batch has. So a *larger batch*, with more micro-batches of the same size, shrinks the bubble and takes no more memory.
#
# ## Change one thing: the libraries
#
# - *Tensor parallelism*: `parallelize_module` takes a *plan*, which says how to split each named layer, and turns the layers' weights into *DTensors*. A DTensor knows its whole shape, stores this rank's shard, and communicates when it must. The ranks form a *DeviceMesh*, a grid with named dimensions.
# - *Pipelines*: `torch.distributed.pipelining` has the schedules.
#
# The next table compares one device with our shards and with three plans. Its *bytes kept* are the activations that a block stores for backward. The rows are:
#
# - *by hand*: the block from above;
# - *weights*: a plan that splits the same weights; query, key and value each make a DTensor of their input;
# - *and norm1*: the same plan, but these three share one DTensor, the first norm's output;
# - *tokens*: a plan with **sequence parallelism**. So far each rank computed whatever is *between* the pairs (the norms and the residual connection) for all tokens. Now it computes this for its own tokens only. The all-reduce that ends a pair becomes a reduce-scatter, and an all-gather begins the next pair. A ring all-reduce consists of just these two, so the bytes on the wire stay the same. (The gradients of the norms' weights must then be summed over the ranks.)
#
# Two more cells train our model in torch's pipelines, and split a small Llama of transformers.


# %%
def plans():
    """Return the steps of each plan; a step says how to split each named layer or how to lay out its output."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    rows, columns, norms = parallel.RowwiseParallel, parallel.ColwiseParallel, ("norm1", "norm2")
    weights = {name: rows() if dimension else columns() for name, dimension in SPLITS.items()}
    tokens = {name: rows(output_layouts=Shard(1)) if dimension else columns() for name, dimension in SPLITS.items()}
    tokens |= {name: parallel.SequenceParallel() for name in norms}
    whole = {"desired_output_layouts": Replicate(), "use_local_output": False}
    once, gather = (parallel.PrepareModuleOutput(output_layouts=now, **whole) for now in (Replicate(), Shard(1)))
    return {
        "weights": [weights],
        "and norm1": [weights, {"norm1": once}],
        "tokens": [tokens, dict.fromkeys(norms, gather)],
    }


# %%
def local(tensor):
    """Return this rank's shard of a DTensor; any other tensor is returned as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def kept(block, x):
    """Return a block's output, and the bytes that it keeps for backward, without weights."""
    own, found = {local(weight).untyped_storage().data_ptr() for weight in block.parameters()}, {}

    def note(tensor):
        memory = local(tensor).untyped_storage()
        found[memory.data_ptr()] = memory  # keeps it alive: its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = block(x)
    return y, sum(memory.nbytes() for place, memory in found.items() if place not in own)


# %%
def torch_tensor_parallel(task):
    from torch.distributed.tensor.parallel import parallelize_module

    rank, ranks, device = join_ranks()
    mesh, found, outputs = dist.device_mesh.init_device_mesh(device.type, (ranks,)), [], []
    for name, steps in ({"one device": [], "by hand": []} | plans()).items():
        block = build(1)[1].to(device)
        x = torch.randn(1, LENGTH, WIDTH).to(device)  # drawn after the same seed
        block = ShardedBlock(block, rank, ranks) if name == "by hand" else block
        for step in steps:
            parallelize_module(block, mesh, step)  # new
        block.heads //= ranks if steps else 1
        given = (x.chunk(ranks, 1)[rank] if name == "tokens" else x).requires_grad_()
        with Traffic() as traffic:
            y, size = kept(block, given)
            y.square().sum().backward()
        outputs.append(local(y.detach()) if name == "tokens" else y.detach().chunk(ranks, 1)[rank])
        wire = sum(size // 2 if "scatter" in kind else size for kind, size in traffic.seen)  # in a ring of two ranks
        found.append([name, len(traffic.seen), wire, size, relative_difference(outputs[-1], outputs[0])])
    return found


rows = on_ranks(torch_tensor_parallel, "parallelize_module")[0]
torch.testing.assert_close([far_off for *_, far_off in rows], [0.0] * 5, atol=1e-4, rtol=0)
plots.Table(["plan", "messages", "bytes on the wire", "bytes kept", "output differs by"], rows, "one block, two ranks")


# %%
def torch_pipeline(task, order, micro_batches=8):
    from torch.distributed.pipelining import PipelineStage, schedules

    (rank, ranks, device), (ids, labels) = join_ranks(), sequences(join_ranks()[2])
    pieces = 2 if order == "interleaved" else 1
    numbers = range(rank, pieces * ranks, ranks)  # of this rank's pieces
    layers = nn.ModuleList(stage_of(build().to(device), number, pieces * ranks)[0] for number in numbers)
    stages = [PipelineStage(each, number, pieces * ranks, device) for each, number in zip(layers, numbers)]
    pipe = schedules.ScheduleInterleaved1F1B if pieces > 1 else schedules.Schedule1F1B
    pipe = pipe(stages if pieces > 1 else stages[0], micro_batches, lambda y, right: cross_entropy(y.mT, right))  # new
    optimizer, losses, given = torch.optim.AdamW(layers.parameters(), lr=1e-3), [], [] if rank else [ids]
    for _ in range(5):
        found = []  # the micro-batches' losses, on the last rank
        pipe.step(*given, **({"target": labels, "losses": found} if rank == ranks - 1 else {}))  # new
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in found) / micro_batches)
    return losses


for order in ("1F1B", "interleaved"):
    torch_losses = on_ranks(torch_pipeline, f"torch, {order}", order=order)[-1]
    torch.testing.assert_close(torch_losses, losses["pipeline, 1F1B"], rtol=1e-4, atol=0)
    print(f"torch's {order}: losses {', '.join(f'{loss:.4f}' for loss in torch_losses)}")


# %%
def llama(task, folder, sizes=None):
    import transformers

    join_ranks()
    given = {"distributed_config": transformers.distributed.DistributedConfig(**sizes)} if sizes else {}
    model = transformers.LlamaForCausalLM.from_pretrained(folder, **given).train()  # new
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), []  # not all are DTensors
    for _ in range(3):
        losses.append(model(**task.batch(4, model.device)).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses], sum(local(weight).nbytes for weight in model.parameters())


small = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512, "dtype": "float32"}
small = Task("llama-3-8b", 32, config=small | {"num_attention_heads": 4, "num_key_value_heads": 4})
sizes = {"tp_size": 2} if gpus2 else {"tp_size": 2, "fsdp_size": 2}
if lab.machine.kind != "cuda" or gpus2:  # each rank needs a GPU of its own
    with tempfile.TemporaryDirectory() as folder:
        small.build_model().save_pretrained(folder)  # random weights, in place of a checkpoint
        whole, weights = lab.run(partial(llama, folder=folder), "llama", task=small, measure="value").value
        split = on_ranks(llama, "llama, cut", small, processes=2 if gpus2 else 4, folder=folder, sizes=sizes)
    torch.testing.assert_close(split[0][0], whole, rtol=1e-3, atol=0)
    print(f"{sizes}: equal losses; a rank stores {max(size for _, size in split) / weights:.0%} of the weights at most")

# %% [markdown]
# Outputs and losses are those of one device. Traffic and memory depend on the plan:
#
# - *weights* sends more than our block: the gradient of each of the three DTensors is summed over the ranks. With *and norm1* torch adds the three gradients first, and sums over the ranks once. So count a plan's messages.
# - *tokens* keeps only slightly fewer bytes than *weights*, because gathered tensors are kept whole. Megatron keeps only the shard, and gathers again in backward.
#
# ### transformers, and two methods at once
#
# In transformers a model brings its own plan, `from_pretrained` applies it, and each rank reads only its own shard. The last cell's four ranks were a **2D mesh**: two tensor-parallel shards (`tp_size`), each of which FSDP2 (lesson 16) divides again in two (`fsdp_size`). Both FSDP shards got the same samples, so losses can be compared.
#
# A third size, `pp_size`, makes pipeline stages, for inference: its pull request, [#47289](https://github.com/huggingface/transformers/pull/47289), lists backward as remaining work.
#
# > **On a GPU:** each rank needs a GPU of its own. On two GPUs the cell uses `tp_size` alone; on one it trains nothing.
#
# ## All three at once
#
# Eight ranks form a grid of 2 replicas x 2 stages x 2 tensor-parallel shards. Each rank communicates in three groups:
#
# - with the other shard of its layers: in each layer;
# - with the neighbouring stage: for each micro-batch;
# - with the rank of the same weights in the other replica: once per step.
#
# The next cell builds this **3D parallelism** from the functions above. The grid's last dimension is the tensor-parallel one, so ranks 0 and 1 are shards of the same layers. On real machines, consecutive ranks share a host, so the order of the dimensions decides which group uses which link.
#
# The two cells after it print the counted messages and three tables, explained below.


# %%
def three_d(task, grid=(2, 2, 2), micro_batches=4):
    join_ranks(gpus=False)
    mesh = dist.device_mesh.init_device_mesh("cpu", grid, mesh_dim_names=("data", "pipeline", "tensor"))
    data_group, pipeline_group, tensor_group = (mesh.get_group(name) for name in mesh.mesh_dim_names)
    (replica, stage, shard), (replicas, stages, shards) = mesh.get_coordinate(), grid
    layers, around = stage_of(build(), stage, stages)
    layers = shard_layers(layers, shard, shards, tensor_group)
    ranks = {side: rank for side, rank in around.items() if rank is not None}
    around |= {side: dist.get_global_rank(pipeline_group, rank) for side, rank in ranks.items()}
    around["loss"] = partial(loss_in_parts, group=tensor_group)
    ids, labels = (rows[replica::replicas].chunk(micro_batches) for rows in sequences())
    optimizer, losses = torch.optim.AdamW(layers.parameters(), lr=1e-3), []
    for _ in range(3):
        with Traffic() as inside:
            losses.append(pipeline(layers, schedule("1F1B", stage, stages, micro_batches), ids, labels, **around))
        with Traffic() as between:
            for weight in layers.parameters():
                dist.all_reduce(weight.grad, group=data_group)
                weight.grad /= replicas
        optimizer.step()
        optimizer.zero_grad()
    words = {"tensor": "allreduce", "pipeline": "send"}
    sent = {name: [size for kind, size in inside.seen if kind == word] for name, word in words.items()}
    sent["data"] = [size for _, size in between.seen]
    return {"losses": losses, "weights": sum(weight.nbytes for weight in layers.parameters()), "sent": sent}


# %%
def traffic_formula(width, layers, weights, tokens, pipeline, micro_batches, size=4):
    """Return (messages per step, bytes of each) that a rank of the first stage sends in each of its groups."""
    passed = size * width * tokens // micro_batches  # activations of a micro-batch, or their gradient
    sums = (4 * layers // pipeline + 1) * micro_batches  # 2 in forward and 2 in backward per block, 1 for the embedding
    return {"tensor": (sums, passed), "pipeline": (micro_batches, passed), "data": (1, size * weights)}


grid = on_ranks(three_d, "2 x 2 x 2", processes=8, measure="none")
rows, weights = [], grid[0]["weights"] // 4  # 4 bytes each
expected = traffic_formula(WIDTH, LAYERS, weights, 8 * LENGTH, pipeline=2, micro_batches=4)
for name, sizes in grid[0]["sent"].items():
    rows.append([name, len(sizes), sum(sizes), expected[name][0] * expected[name][1]])
    torch.testing.assert_close(*rows[-1][-2:])
display(plots.Table(["group", "messages, counted", "bytes, counted", "bytes, formula"], rows))
last_stages = [rank["losses"] for rank in grid if rank["losses"][0] is not None]
together = [sum(step) / len(last_stages) for step in zip(*last_stages)]
torch.testing.assert_close(together, losses["one device"][:3], rtol=1e-3, atol=0)

# %%
# 8 shards, 4 stages, 16 replicas: to change 8 or 16, change each of them below (7 is 8 - 1, 15 is 16 - 1).
# A ring sends a sum over n ranks 2 (n - 1) / n times.
large = dict(width=8192, layers=80, tokens=2**20, pipeline=4, micro_batches=64, size=2)
shard = 12 * large["width"] ** 2 * large["layers"] // (8 * large["pipeline"])
wire = {"tensor": 2 * 7 / 8, "pipeline": 1, "data": 2 * 15 / 16}
expected = traffic_formula(weights=shard, **large)
rows = [[name, count, wire[name] * count * size / 1e9] for name, (count, size) in expected.items()]
rows.sort(key=lambda row: -row[-1])
title = f"{shard / 1e9:.1f} billion weights on a rank; the fast link is for the first group"
display(plots.Table(["group", "messages per step", "GB per step on a rank's wire"], rows, title))

links = {"NVLink": 450e9, "400 Gbit/s": 50e9}  # bytes per second and direction of an H100 (989e12 operations)
rows = [[name, 989e12 / link, 1 + 3 * 8192 * link / 989e12] for name, link in links.items()]
display(plots.Table(["H100s over", "tokens per replica, at least", "shards, at most"], rows, "width 8192, bf16"))

limits = {}
for ranks in (1, 2, 4, 8, 16):
    sizes = [fullest(stages, ranks // stages) for stages in (1, 2, 4, 8, 16) if stages <= ranks]
    limits[ranks] = sizes[0], sizes[-1], min(size for size in sizes if size)  # the first is 1 stage, the last 1 shard
rows = [[ranks, *(f"{size:.3f}" if size else "not possible" for size in sizes)] for ranks, sizes in limits.items()]
plots.Table(["ranks", "tensor parallel", "pipeline", "best grid"], rows, "MB of weights on the fullest rank")

# %% [markdown]
# The formulas give the counted bytes, and the losses are those of one device. The table *GB per step* applies the formulas to a large model: 80 blocks of width 8192, on 16 replicas x 4 stages x 8 shards, with 2^20 tokens and 64 micro-batches per replica and step. The group that sends the most, and that waits for every message, should use the fastest link. The other groups may cross hosts: stages send one message per micro-batch, and replicas one sum per step, which backward can hide. (The first table counts 21 messages of *data*, because our loop sums each gradient separately. DDP joins them in buckets.)
#
# ### When does a link hold the devices up?
#
# Let a device compute F operations, and its link carry B bytes, per second. Each weight takes 2 operations per token in forward, and 4 in backward. The table *H100s over* has both limits.
#
# - *Replicas*: during backward the gradients are summed: for each weight, 2 bytes (bf16) are sent twice, in 4 / B seconds. Backward takes 4 x tokens / F seconds, at least as long if each replica has **F / B tokens** or more.
# - *Tensor-parallel shards*: a block has 12 width² weights. So in forward, each of *n* shards computes 24 width² / n operations for a token, then waits for two sums of `width` numbers of 2 bytes. A ring sends each sum 2 (n - 1) / n times: in all 8 x width x (n - 1) / n bytes. Arithmetic and messages both grow with the tokens, so more tokens do not help. Only the *number of shards* counts: the messages take as long as the arithmetic if *n* is **1 + 3 x width x B / F**.
#
# The last table shows why 3D parallelism exists. On the same number of ranks, one method alone stores about as little per rank as a grid. But each method has a limit: for tensor parallelism the number of heads (4 here) and the fast link, for the pipeline the number of blocks (4) and the bubble.
#
# ## What held
#
# The index page of the 2022 guide asks whether each GPU has a full copy of the model, or the model itself is distributed. The guides add that distributed models are for what does not fit *with all the other tricks*.
#
# ### Where are the weights?

# %% tags=["claim"]
one_device = runs["one device"][0]
replicas = [rank["breakdown"]["weights"] / one_device["breakdown"]["weights"] for rank in runs["data parallel"]]
display(claims.check("data-parallel-copies", min(replicas)))
display(claims.check("tensor-parallel-splits", max(largest["tensor parallel"], *shares.values())))
display(claims.check("pipeline-parallel-splits", largest["pipeline, 1F1B"]))

# %% [markdown]
# ### Is it the same training?

# %% tags=["claim"]
display(claims.check("tensor-parallel-same", differences["tensor parallel"]))
display(claims.check("pipeline-parallel-same", max(differences["pipeline, 1F1B"], differences["pipeline, GPipe"])))

# %% [markdown]
# ### How far does it go?
#
# For the first check both methods train once more, with micro-batches of one sequence, checkpointing and Adafactor. The second compares eight ranks in a grid of stages x shards with one method alone.

# %% tags=["claim"]
peaks = {}
for name, options in {"one device": {}, "tensor": {"way": "tensor"}, "pipeline": {"way": "pipeline"}}.items():
    tricks = each_rank(f"{name}, all tricks", steps=2, micro_batches=8, samples=8, frugal=True, **options)
    peaks[name] = max(rank["peak_bytes"] for rank in tricks)
beyond = min(peaks["tensor"], peaks["pipeline"]) / peaks["one device"]
display(claims.check("model-parallel-beyond-tricks", beyond, note=f"peak bytes: {peaks}"))
alone = min(size for ranks in (1, 2, 4, 8) for size in limits[ranks][:2] if size)
claims.check("three-d-scales", limits[8][2] / alone, note=f"one method alone, at best: {alone:.3f} MB")

# %% [markdown]
# ## Exercise, the challenge: the cheapest split that fits
#
# A model has layers of unequal widths. Split it into two stages so that no rank stores more weights than a limit allows, and the fewest bytes are sent. Write a function `answer(layers_MB, sent_MB, limit_MB)` that returns how many layers the first stage gets. It takes
#
# - the MB of each layer,
# - for each layer but the last, the MB that are sent if the split is *after* it,
# - the limit in MB.
#
# The check draws new models, each with a limit that some split meets.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "If the first stage gets `cut` layers, the ranks hold `sum(layers_MB[:cut])` and `sum(layers_MB[cut:])`.",
    "What that cut sends is `sent_MB[cut - 1]`. Which cuts are allowed at all? `range(1, len(layers_MB))`.",
    "First keep the cuts at which both ranks are within the limit. Then take the one that sends least.",
)

# %% tags=["exercise"]
answer = None  # def answer(layers_MB, sent_MB, limit_MB): ...


# %% tags=["check"] jupyter={"source_hidden": true}
def drawn():
    """Draw a model of 5 to 9 layers: MB of each, MB sent after each but the last, a limit."""
    widths = [64 * random.randint(1, 16) for _ in range(random.randint(6, 10))]
    layers_MB = [4 * (into + 1) * out / 1e6 for into, out in pairwise(widths)]
    fullest = sorted(max(sum(layers_MB[:cut]), sum(layers_MB[cut:])) for cut in range(1, len(layers_MB)))
    return layers_MB, [2 * 4 * 256 * width / 1e6 for width in widths[1:-1]], random.choice(fullest[:3])


def check_cut(answer):
    if answer is None:
        return exercises.not_attempted("replace None by a function of layers_MB, sent_MB and limit_MB")
    for layers_MB, sent_MB, limit in (drawn() for _ in range(50)):
        cuts = range(1, len(layers_MB))
        fitting = [cut for cut in cuts if max(sum(layers_MB[:cut]), sum(layers_MB[cut:])) <= limit]
        cut, model = answer(layers_MB, sent_MB, limit), f"layers of {[round(size, 2) for size in layers_MB]} MB"
        if cut not in fitting:
            return exercises.wrong(f"{model}, cut after {cut}: a rank has more than {limit:.2f} MB")
        if sent_MB[cut - 1] > min(sent_MB[other - 1] for other in fitting):
            return exercises.wrong(f"{model}, cut after {cut}: it fits, but another one that fits sends less")
    return exercises.right("the cheapest cut of 50 models")


exercises.check(lab, "cheapest-cut", check_cut, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def cheapest(layers_MB, sent_MB, limit_MB):
    cuts = range(1, len(layers_MB))
    fitting = [cut for cut in cuts if max(sum(layers_MB[:cut]), sum(layers_MB[cut:])) <= limit_MB]
    return min(fitting, key=lambda cut: sent_MB[cut - 1])


def most_even(layers_MB, sent_MB, limit_MB):
    return min(range(1, len(layers_MB)), key=lambda cut: max(sum(layers_MB[:cut]), sum(layers_MB[cut:])))


exercises.prove(check_cut, solution=cheapest, mistake=most_even)

# %% [markdown]
# ## Recap
#
# - A block split through its matrices and a model split into stages had the gradients of the whole model, with half its weights on each rank.
# - Tensor parallelism sends sums of activations in every layer, a pipeline one message per micro-batch, data parallelism one sum of gradients per step. In the grid of eight ranks these were 2.36 MB, 0.26 MB and 0.86 MB per rank and step. The group that sends most gets the fast link.
# - Two stages with one micro-batch are idle 50 % of the time; with eight the formula gives 11 %. More micro-batches shrink the bubble, but their matmuls are smaller.
# - 1F1B has the same bubble as GPipe and stores less: the first of four stages held 4 micro-batches instead of 8.
# - If a model fits, replicas are usually faster: 1.70 times the speed of one device, against 1.43 with the best pipeline and 1.21 with tensor parallelism, whose interval includes 1 (AMD EPYC, 2 cores, 2026-11-29).

# %% tags=["finish"]
claims.finish()
