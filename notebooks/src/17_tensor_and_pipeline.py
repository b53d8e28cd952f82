# %% [markdown]
# # What if a model fits no device?
#
# Then it is cut: through its layers, or between them. This lesson does both by hand, counts what each cut keeps and what it sends, and shows where the time goes.
#
# **You will see**
# - a block cut through its matrices and a model cut into stages: the same losses as the whole one, with about half of the bytes on each rank
# - what each cut sends, counted message by message, and therefore which group of ranks needs the fast link
# - the bubble of a pipeline, measured and drawn, and a schedule that holds fewer activations at the same bubble

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import os
import tempfile
import time
from collections import Counter
from functools import partial
from itertools import accumulate, pairwise, product
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from IPython.display import display
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from perf_helpers import Lab, Task, claims, exercises, hardware, plots, widgets
from perf_helpers.lab import Ratio

lab = Lab(profile, strict=strict, out=out, lesson="17_tensor_and_pipeline")
gpus2 = hardware.supports("gpus2")[0]
WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH = 128, 4, 4, 256, 64

# %% [markdown]
# ## Idea
#
# Data parallel training (lesson 15) gives every device the whole model. If the model does not fit, it must be distributed itself:
#
# - **Tensor parallelism** cuts *through* layers: each rank holds a part of every matrix, and all ranks work on the same tokens at the same time.
# - **Pipeline parallelism** cuts *between* layers: each rank holds a **stage**, some whole layers, and hands its output on to the next.
#
# (ZeRO, lesson 16, also spreads the weights, but gathers each layer before it computes. Here no weight ever moves.)
#
# ## Predict

# %%
asked = "Two ranks, each with half of the layers, and one batch. What percentage of the time do both compute at once?"
widgets.predict(lab, "together", asked, "%", 0, 100)
exercises.question(
    lab,
    "faster",
    "A model fits one device. Does distributing it over two make training faster?",
    {
        "yes, each device has half of the work": "Half of the work, but when? Stages wait for each other, and parts of a "
        "matrix wait for a sum in every layer. Only if the waiting is small against the work is there a gain.",
        "it may, but that is not what it is for": "It is for models that do not fit. What fits is usually trained "
        "faster by copies: they meet once a step, and not in every layer.",
        "no, it never can": "Two devices that both work are faster than one. How much of the time they do is measured "
        "below.",
    },
    right="it may, but that is not what it is for",
)

# %% [markdown]
# ## By hand: one matrix, two parts
#
# `linear` multiplies its input by a matrix. Cut the matrix **by columns**, that is by outputs, and each part makes some of the outputs from *all* inputs. Cut it **by rows**, by inputs, and each part takes some of the inputs and makes a *summand* of all outputs. (torch keeps a weight as outputs x inputs, so columns are its dimension 0.)

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
exercises.question(
    lab,
    "order",
    "The pair above cuts the first matrix by columns and the second by rows. Why not the other way round?",
    {
        "the matrices would not fit together": "They would: the sum of the first two parts could be cut for the second.",
        "gelu needs the sum, so there would be a message between them": "Cut by rows, the first matrix leaves two "
        "summands, and gelu(a) + gelu(b) is not gelu(a + b). Columns are finished numbers, each rank's own.",
    },
    right="gelu needs the sum, so there would be a message between them",
)

# %% [markdown]
# So the *pair* needs no message in its middle, and one sum at its end. Backward is the mirror image: the gradient of the pair's input has a summand on each rank, and needs one sum there. Megatron-LM made two functions of this, each the other's mirror; here they are. Attention is cut by heads: query, key and value by columns, the output by rows. (The blocks have no biases: one thing less to add only once.)
#
# Is it the same block? Two real processes, joined by gloo (NCCL where there are two GPUs), each compare their part with the whole. `Traffic`, lesson 15's dispatch mode, sees every operation before it is carried out, and notes those that talk to other ranks. (It lets a *DTensor*, a tensor made of the ranks' parts that we meet below, take itself apart first.)


# %%
def summed(x, group):
    dist.all_reduce(x := x.clone(memory_format=torch.contiguous_format), group=group)
    return x


class Into(torch.autograd.Function):  # each part takes all of x; backward, their gradients are summed
    @staticmethod
    def forward(context, x, group):
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return summed(gradient, context.group), None


class OutOf(torch.autograd.Function):  # their outputs are summed; backward, each takes all of the gradient
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
        mixed = scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts), is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def mlp(self, x):
        return self.down(gelu(self.up(x)))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def build(layers=LAYERS, width=WIDTH):
    torch.manual_seed(0)  # every rank builds the same model
    blocks = [Block(width) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))


# %%
CUT = {"query": 0, "key": 0, "value": 0, "up": 0, "output": 1, "down": 1}  # 0: by columns, 1: by rows


class CutBlock(Block):
    """This rank's part of a block."""

    def __init__(self, block, rank, parts, group=None):
        nn.Module.__init__(self)
        self.norm1, self.norm2, self.heads, self.group = block.norm1, block.norm2, block.heads // parts, group
        for name, dimension in CUT.items():
            whole = getattr(block, name).weight.detach()
            setattr(self, name, nn.Linear(1, 1, bias=False))
            getattr(self, name).weight = nn.Parameter(whole.chunk(parts, dimension)[rank].clone())

    def attention(self, x):
        return OutOf.apply(super().attention(Into.apply(x, self.group)), self.group)  # new

    def mlp(self, x):
        return OutOf.apply(super().mlp(Into.apply(x, self.group)), self.group)  # new


def cut_through(model, *place):
    return nn.Sequential(*(CutBlock(layer, *place) if isinstance(layer, Block) else layer for layer in model))


# %%
class Traffic(TorchDispatchMode):
    """Notes what this rank hands over: [operation, bytes]."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        name = function.overloadpacket.__name__.strip("_").replace("all_reduce", "allreduce")
        if "c10d" in function.namespace and not name.startswith(("recv", "wait", "wrap")):
            size = sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            self.seen.append([name, size])
        return function(*args, **(kwargs or {}))


def meet(gpus=gpus2):
    """Meet the other ranks: this one's number, how many there are, its device."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if gpus else "gloo")
    return rank, ranks, torch.device("cuda", rank) if gpus else torch.device("cpu")


# %%
def apart(one, other):
    """The largest difference, against the largest number there is."""
    return ((one - other).abs().max() / other.abs().max()).item()


def one_block(task, tokens):
    rank, ranks, device = meet()
    block, found = build(1)[1].to(device), []
    for count in tokens:
        part = CutBlock(block, rank, ranks)
        mine = torch.randn(1, count, WIDTH, generator=torch.Generator().manual_seed(count)).to(device).requires_grad_()
        theirs = mine.detach().clone().requires_grad_()
        block.zero_grad()
        with Traffic() as forward:
            y = part(mine)
        with Traffic() as backward:
            y.square().sum().backward()
        whole = block(theirs)
        whole.square().sum().backward()
        up, query = (getattr(block, name).weight.grad.chunk(ranks)[rank] for name in ("up", "query"))
        pairs = [(y, whole), (mine.grad, theirs.grad), (part.up.weight.grad, up), (part.query.weight.grad, query)]
        found.append({"forward": forward.seen, "backward": backward.seen, "apart": [apart(*pair) for pair in pairs]})
    return found


# %%
def two(function, name, task=None, processes=2, **options):
    """What each of two ranks returns."""
    run = lab.run(partial(function, **options), name, task=task, processes=processes, measure=("none",))
    if not run.ok:
        raise RuntimeError(f"{name}: {run.message}")
    return [rank["value"] for rank in run.ranks]


TOKENS = (64, 256, 1024)
blocks = two(one_block, "a block in two parts", tokens=TOKENS)[0]
names = ["output", "gradient of the input", "of an MLP weight", "of an attention weight"]
display(plots.Table(["largest difference from the whole block", ""], [*zip(names, blocks[0]["apart"])]))
torch.testing.assert_close([max(found["apart"]) for found in blocks], [0.0] * len(TOKENS), atol=1e-4, rtol=0)
rows = []
for tokens, found in zip(TOKENS, blocks):
    for phase in ("forward", "backward"):
        kinds, size = Counter(kind for kind, _ in found[phase]), sum(size for _, size in found[phase])
        said = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        rows.append([tokens, phase, said, size, size / (4 * tokens * WIDTH)])
plots.Table(["tokens", "phase", "messages", "bytes", "bytes / 4 B x tokens x width"], rows)

# %% [markdown]
# The last column is the law: two sums forward and two backward, each as large as the activations that pass. A copy (data parallelism) sends something else: one gradient a weight, whatever the tokens. A block has about 12 x width² weights, so the two cost the same at **3 x width tokens** a step. The next cell draws both and puts the counted bytes onto the lines.

# %%
weights = sum(weight.numel() for weight in build(1)[1].parameters())
counted = [sum(size for phase in ("forward", "backward") for _, size in found[phase]) for found in blocks]
grid = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
series = {"tensor parallel": [16 * tokens * WIDTH / 1e6 for tokens in grid], "data parallel": [4 * weights / 1e6] * 9}
axes = plots.lines(grid, series, "tokens in the step", "MB sent in a step", title="One block: what a rank hands over")
axes.plot(TOKENS, [size / 1e6 for size in counted], "s", color="black", markersize=9, label="counted")
axes.axvline(weights / WIDTH / 4, color="black", linestyle=":", linewidth=1)
axes.text(weights / WIDTH / 4 * 1.1, 0.06, f"{weights / WIDTH / 4:.0f} tokens", fontsize=10)
axes.set_xscale("log", base=2)
axes.set_yscale("log")
_ = axes.legend(frameon=False)

# %% [markdown]
# Left of the dotted line cutting sends less, right of it copying does, and real batches lie far to the right. The bytes are only half of it: copies meet once a step, while the next layer *waits* for each of these sums.
#
# ## By hand: stages
#
# A pipeline passes activations forward and their gradients back, one message each for a **micro-batch**, a part of the batch. What a stage does, and in which order, is its **schedule**. Two are common: first all forwards, then all backwards (GPipe), or one forward and one backward in turns as soon as possible (**1F1B**).


# %%
def schedule(name, stage, stages, micro_batches):
    """What a stage does, in order: ("F", micro-batch) or ("B", micro-batch)."""
    forward, backward = ([(kind, number) for number in range(micro_batches)] for kind in "FB")
    if name == "GPipe":
        return forward + backward
    ahead = min(stages - 1 - stage, micro_batches)  # forwards, before the first gradient can be back
    turns = [action for both in zip(forward[ahead:], backward) for action in both]
    return forward[:ahead] + turns + backward[micro_batches - ahead :]


for name in ("GPipe", "1F1B"):
    for stage in range(2):
        print(f"{name}, stage {stage}:", *(kind + str(number) for kind, number in schedule(name, stage, 2, 4)))


# %%
def received(shape, source, group, device):
    tensor = torch.empty(shape, device=device)
    dist.recv(tensor, source, group)
    return tensor


def now():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def stage_of(model, stage, stages):
    """Whole layers, as many blocks for each stage; and the ranks before and after it."""
    blocks = (len(model) - 2) // stages
    ends = [0, *(1 + blocks * number for number in range(1, stages)), len(model)]
    around = {"before": stage - 1 if stage else None, "after": stage + 1 if stage < stages - 1 else None}
    return model[ends[stage] : ends[stage + 1]], around


def sequences(device="cpu", samples=16):
    text = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1)).to(device)
    return text[:, :-1], text[:, 1:].contiguous()


# %%
def pipeline(layers, actions, ids, labels, before=None, after=None, ways=(None, None), width=WIDTH, seen=None):
    """A step of one stage. before, after: the ranks of its neighbours; ways: a group for each direction."""
    held, losses, sending = {}, [], []
    for kind, number in actions:
        if kind == "F":
            x = ids[number]
            if before is not None:
                x = received((*x.shape, width), before, ways[0], x.device).requires_grad_()
            begin, y = now(), layers(x)
            if after is None:
                y = cross_entropy(y.flatten(0, 1), labels[number].flatten()) / len(ids)
                losses.append(y.detach())
            held[number] = x, y
            message = y.detach(), after, ways[0]
        else:
            x, y = held.pop(number)
            gradient = None if after is None else received(y.shape, after, ways[1], y.device)
            begin, _ = now(), y.backward(gradient)
            message = x.grad, before, ways[1]
        if seen is not None:
            seen.append([kind, number, begin, now()])
        sending += [] if message[1] is None else [dist.isend(*message)]  # does not wait
    for work in sending:
        work.wait()
    return sum(losses).item() if after is None else None


# %%
def train(task, way="one", steps=5, order="1F1B", parts=1, gpus=gpus2, samples=16, frugal=False):
    rank, ranks, device = meet(gpus)
    model, place, around = build().to(device), (0, 1), {}
    ids, labels = sequences(device, samples)
    if way == "tensor":
        model = cut_through(model, rank, ranks)
    elif way == "pipeline":
        place = rank, ranks
        model, around = stage_of(model, *place)
    elif way == "data":
        model, ids, labels = DDP(model), ids[rank::ranks], labels[rank::ranks]
    for layer in model if frugal else ():
        if isinstance(layer, Block):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    optimizer = (torch.optim.Adafactor if frugal else torch.optim.AdamW)(model.parameters(), lr=1e-3)
    losses, actions = [], schedule(order, *place, parts)
    for _ in range(steps):
        with Traffic() as traffic:
            losses.append(pipeline(model, actions, ids.chunk(parts), labels.chunk(parts), **around))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "sent": sum(size for _, size in traffic.seen)}


# %% [markdown]
# ## Baseline, and four ways to use two devices
#
# The same model and the same 16 sequences: on one device, in two copies (data parallel), cut through, cut between, and the last once more in GPipe's order. The lab's meter counts the bytes of each rank; the losses say whether it is the same training.

# %%
WAYS = {
    "one device": {},
    "data parallel": {"way": "data"},
    "tensor parallel": {"way": "tensor"},
    "pipeline, GPipe": {"way": "pipeline", "parts": 8, "order": "GPipe"},
    "pipeline, 1F1B": {"way": "pipeline", "parts": 8},
}


def each_rank(name, steps=5, **options):
    given = {"processes": 1 + ("way" in options), "measure": ("memory",), "use_cpu": not gpus2}
    run = lab.run(partial(train, steps=steps, **options), name, **given)
    return run.ranks or [{"peak_bytes": run.peak_bytes, "breakdown": run.memory.breakdown, "value": run.value}]


runs, largest, losses, rows = {}, {}, {}, []
for name, options in WAYS.items():
    runs[name] = each_rank(name, **options)
    weights = [rank["breakdown"]["weights"] for rank in runs[name]]
    largest[name] = max(weights) / runs["one device"][0]["breakdown"]["weights"]
    losses[name] = runs[name][-1]["value"]["losses"]  # the last stage has the loss
    peak, sent = (max(values) / 1e6 for values in zip(*((r["peak_bytes"], r["value"]["sent"]) for r in runs[name])))
    rows.append([name, max(weights) / 1e6, largest[name], peak, sent, ", ".join(f"{x:.4f}" for x in losses[name][::2])])
plots.Table(["fuller rank of", "MB of weights", "/ one device", "peak, MB", "MB sent a step", "losses 1, 3, 5"], rows)

# %% [markdown]
# Each copy holds everything. Cut through or between, a rank holds about half, and the losses are the same. (Half and a bit: norms, the embedding and the head are not cut through here. Stages are as uneven as what stands at the ends of the model.) The "same losses" of data parallelism are those of one copy's samples: their mean over the copies would be equal (lesson 15).
#
# ### The bubble
#
# Bytes are not time. A stage can only begin when the one before it hands something on. While it waits, its device is idle: the **bubble**. With one micro-batch, one of two is always idle. More micro-batches fill the gap. Let us watch, on blocks twice as wide: each rank notes when it computes, on a clock that both share, and rank 0 also does all of it alone. First the tools: a picture, and a simulator of schedules, where messages take no time. It shows at once that both schedules obey one law, (p-1)/(m+p-1) idle for *p* stages and *m* micro-batches, if all actions of a kind take as long.


# %%
def seconds_of(by_rank):
    """From the first action to the end of the last one."""
    every = [action for seen in by_rank for action in seen]
    return max(end for *_, end in every) - min(begin for _, _, begin, _ in every)


def bubble(by_rank):
    """The share of the ranks' time in which they do nothing."""
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
    """Records like measured ones, if a forward and a backward take that long."""
    left = [list(schedule_of(stage, stages, micro_batches)) for stage in range(stages)]
    done, records = {}, [[] for _ in left]
    while any(left):
        for stage, actions in enumerate(left):
            while actions:
                kind, number = actions[0]
                source = stage - 1 if kind == "F" else stage + 1  # where its message comes from
                needed = (kind, source, number) if 0 <= source < stages else ("F", stage, number)
                if needed not in done and (kind, source) != ("F", -1):
                    break
                begin = max(done.get(needed, 0.0), records[stage][-1][-1] if records[stage] else 0.0)
                done[kind, stage, number] = begin + seconds[kind == "B"]
                records[stage].append([*actions.pop(0), begin, done[kind, stage, number]])
    return records


ORDERS = {name: partial(schedule, name) for name in ("GPipe", "1F1B")}
for order in ORDERS.values():
    for stages, parts in product((2, 4, 8), (1, 4, 32)):
        torch.testing.assert_close(bubble(simulate(order, stages, parts)), (stages - 1) / (parts + stages - 1))


# %%
LOOKED_AT = [("one device", 1), ("GPipe", 1), ("GPipe", 2), ("GPipe", 4), ("GPipe", 8), ("1F1B", 8)]


def watch(task, turns=6, width=2 * WIDTH):
    rank, ranks, device = meet()
    whole, found = build(width=width).to(device), []
    stage, around = stage_of(build(width=width).to(device), rank, ranks)
    if gpus2:
        around["ways"] = dist.new_group(), dist.new_group()  # NCCL: each direction in an order of its own
    ids, labels = sequences(device)
    for _ in range(turns):
        turn = []
        for name, parts in LOOKED_AT:
            dist.barrier()
            turn.append([])
            given = {"ids": ids.chunk(parts), "labels": labels.chunk(parts), "width": width, "seen": turn[-1]}
            if name != "one device":
                pipeline(stage, schedule(name, rank, ranks, parts), **around, **given)
            elif rank == 0:
                pipeline(whole, [("F", 0), ("B", 0)], **given)
        found.append(turn)
    return found[1:]  # the first turn warms up


# %%
both, timed = two(watch, "watched"), {}
for row, key in enumerate(LOOKED_AT):
    timed[key] = [[rank[turn][row] for rank in both] for turn in range(len(both[0]))]
rows, alone = [], [seconds_of(turn[:1]) for turn in timed.pop(LOOKED_AT[0])]
for (name, parts), turns in timed.items():
    shares = [bubble(turn) for turn in turns]
    every = [(kind, end - begin) for turn in turns for seen in turn for kind, _, begin, end in seen]
    took = [median(length for it, length in every if it == kind) for kind in "FB"]
    told = seconds_of(simulate(ORDERS[name], 2, parts, took))
    gain = Ratio.of_pairs([one / seconds_of(turn) for one, turn in zip(alone, turns)], 1.05)
    longer = Ratio.of_pairs([seconds_of(turn) / told for turn in turns], 1.05)
    spread = f"{median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"
    rows.append([name, parts, spread, f"{1 / (parts + 1):.0%}", str(longer), str(gain)])
titles = ["schedule", "micro-batches", "bubble", "the law", "seconds, measured / simulated", "speed, times one device"]
display(plots.Table(titles, rows))
figure, axes = plt.subplots(3, 1, figsize=(8, 5), layout="constrained", dpi=110)
for ax, key in zip(axes, [("GPipe", 1), ("GPipe", 8), ("1F1B", 8)]):
    turn = min(timed[key], key=seconds_of)
    gantt(ax, turn, f"{key[0]}, micro-batches: {key[1]}, idle: {bubble(turn):.0%}")
axes[-1].set_xlabel("seconds (blue: forward, orange: backward; the number: which micro-batch)")
widgets.revealed(lab, "together", 100 * max(0, 1 - 2 * median(bubble(turn) for turn in timed["GPipe", 1])))

# %% [markdown]
# With one micro-batch the devices take turns, so the second one brings nothing but its memory: the answer to "model parallel makes it faster". More micro-batches shrink the bubble. What the measured one has above the law are messages, actions that take longer than others, and, on a CPU, cores that others use as well; read the spread.
#
# Both orders have the same bubble. So why 1F1B? Because of what a stage must keep: the activations of each micro-batch that went forward and has not come back. Four ranks this time, on the CPU, counted by the lab's meter.

# %%
STAGES, grown = 4, {}


def most_held(actions):
    """Micro-batches whose activations a stage holds at once."""
    return max(accumulate(1 if kind == "F" else -1 for kind, _ in actions))


for order in ORDERS:
    each = partial(train, way="pipeline", steps=2, order=order, parts=8, gpus=False, samples=32)
    run = lab.run(each, f"{STAGES} stages, {order}", processes=STAGES, measure=("memory",), use_cpu=True)
    grown[order] = [rank["breakdown"]["activations"] / 1e6 for rank in run.ranks]
_, ax = plt.subplots(figsize=(7, 3.4), layout="constrained", dpi=110)
for row, (order, sizes) in enumerate(grown.items()):
    bars = ax.bar([stage + 0.38 * row for stage in range(STAGES)], sizes, 0.36, color=plots.SERIES[row], label=order)
    held = [most_held(schedule(order, stage, STAGES, 8)) for stage in range(STAGES)]
    ax.bar_label(bars, [f"{count} held" for count in held], fontsize=10)
ax.set_xticks([stage + 0.19 for stage in range(STAGES)], [f"stage {stage}" for stage in range(STAGES)])
ax.set(ylabel="activations at the peak (MB)", ylim=(0, 1.3 * max(map(max, grown.values()))))
ax.set_title("Eight micro-batches: what each stage holds", loc="left")
ax.spines[["top", "right"]].set_visible(False)
_ = ax.legend(frameon=False, ncols=2, loc="upper left")

# %% [markdown]
# GPipe holds all micro-batches on every stage; with 1F1B stage *s* of *p* never holds more than p - s, however many there are. So one may take many, for a small bubble, at no cost in memory. That is why large trainings use 1F1B or a descendant of it.
#
# ## Change one thing: the libraries
#
# torch has both. `parallelize_module` turns the weights of named layers into *DTensors*: tensors that know the whole shape, hold this rank's part, and talk when they must. They are laid out on a *DeviceMesh*, the ranks as a grid with named sides. `torch.distributed.pipelining` has the schedules.


# %%
def torch_tensor_parallel(task):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank, ranks, device = meet()
    block, columns, rows = build(1)[1].to(device), ColwiseParallel(), RowwiseParallel()
    x, mine = torch.randn(1, LENGTH, WIDTH).to(device), CutBlock(block, rank, ranks)  # drawn after the same seed
    block.heads, mesh = block.heads // ranks, init_device_mesh(device.type, (ranks,))
    parallelize_module(block, mesh, {name: rows if dimension else columns for name, dimension in CUT.items()})  # new
    sent, outputs = [], []
    for part in (mine, block):
        given = x.clone().requires_grad_()
        with Traffic() as traffic:
            y = part(given)
            y.square().sum().backward()
        sent.append(traffic.seen)
        outputs.append([y, given.grad, part.up.weight.grad])
    pairs = zip(outputs[0], (getattr(each, "_local_tensor", each) for each in outputs[1]))
    return {"sent": sent, "apart": [apart(*pair) for pair in pairs]}


library = two(torch_tensor_parallel, "parallelize_module")[0]
torch.testing.assert_close(library["apart"], [0.0] * 3, atol=1e-4, rtol=0)
for name, seen in zip(("by hand", "parallelize_module"), library["sent"]):
    print(f"{name}: {len(seen)} messages, {sum(size for _, size in seen):,} bytes for a block")


# %%
def torch_pipeline(task, micro_batches=8, order="1F1B"):
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, ranks, device = meet()
    (stage, _), last = stage_of(build().to(device), rank, ranks), rank == ranks - 1
    optimizer, losses, (ids, labels) = torch.optim.AdamW(stage.parameters(), lr=1e-3), [], sequences(device)
    plan = {"1F1B": schedules.Schedule1F1B, "GPipe": schedules.ScheduleGPipe}[order]

    def loss_of(outputs, labels):
        return cross_entropy(outputs.flatten(0, 1), labels.flatten())

    plan = plan(PipelineStage(stage, rank, ranks, device), micro_batches, loss_fn=loss_of)  # new
    for _ in range(5):
        parts = []
        plan.step(*([] if rank else [ids]), target=labels if last else None, losses=parts if last else None)  # new
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts) / micro_batches)
    return losses


for order in ORDERS:
    theirs = two(torch_pipeline, f"torch, {order}", order=order)[-1]
    torch.testing.assert_close(theirs, losses[f"pipeline, {order}"], rtol=1e-4, atol=0)
    print(f"torch's {order}: losses {', '.join(f'{loss:.4f}' for loss in theirs)}")

# %% [markdown]
# The same losses. `parallelize_module` sends more than we did: query, key and value each ask for the sum of their input's gradient, where one sum of all three would do (and does in ours). Count before you trust a plan.
#
# ### transformers
#
# A model of transformers brings its plan: which layers are cut, and how. `from_pretrained` follows it, and each rank reads its own part only. Random weights in a temporary folder stand for a checkpoint. (What was `tp_plan="auto"` is now `distributed_config=DistributedConfig(tp_size=2)`.) Newer versions also know `pp_size`, which makes stages.


# %%
def llama(task, folder, **sizes):
    import transformers
    from transformers.distributed import DistributedConfig

    _, ranks, _ = meet()
    options = {"distributed_config": DistributedConfig(**sizes)} if ranks > 1 else {}
    transformers.logging.disable_progress_bar()
    model = transformers.LlamaForCausalLM.from_pretrained(folder, **options).train()  # new
    # Tensor by tensor: on a GPU an update takes them as one list, which may not hold DTensors beside others.
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), []
    batch = {name: rows.to(model.device) for name, rows in task.batch(4).items()}
    for _ in range(3):
        loss = model(**batch).loss
        if loss is None:
            return {"losses": None}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    local = [getattr(weight, "_local_tensor", weight) for weight in model.parameters()]
    return {"losses": losses, "weights": sum(weight.nbytes for weight in local)}


# %%
from transformers.distributed import DistributedConfig

small = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
small_llama = Task("llama-3-8b", seq_len=32, config=small | {"num_key_value_heads": 4, "vocab_size": 512})
if lab.machine.kind == "cuda" and not gpus2:
    print("transformers would take a GPU for each of two ranks, and there is one")
else:
    with tempfile.TemporaryDirectory() as folder:
        small_llama.build_model().save_pretrained(folder)
        whole = lab.run(partial(llama, folder=folder), "llama", task=small_llama, measure=("none",)).value
        halves = two(llama, "llama, tensor parallel", small_llama, folder=folder, tp_size=2)
        torch.testing.assert_close(halves[0]["losses"], whole["losses"], rtol=1e-3, atol=0)
        print("tensor parallel: losses", *(f"{loss:.4f}" for loss in halves[0]["losses"]), "as on one device, with")
        print(f"{max(half['weights'] for half in halves) / whole['weights']:.0%} of the weights on the fuller rank")
        if hasattr(DistributedConfig, "pp_size"):
            stages = two(llama, "llama, stages", small_llama, folder=folder, pp_size=2)
            print("transformers' own pipeline: losses", stages[-1]["losses"])

# %% [markdown]
# Tensor parallelism trains. The pipeline of transformers gives no loss: it is a plain one for inference, whose pull request ([#47289](https://github.com/huggingface/transformers/pull/47289)) names backward among what is left to do. For training, take torch's schedules.
#
# ## All three at once
#
# Eight ranks, as a grid of 2 copies x 2 stages x 2 parts. Each rank talks in three groups: to the other part in each layer, to its neighbouring stage for each micro-batch, to its twin in the other copy once a step. That is **3D parallelism**, and it needs nothing new.


# %%
def three_d(task, grid=(2, 2, 2), parts=4):
    from torch.distributed.device_mesh import init_device_mesh

    meet(gpus=False)
    mesh = init_device_mesh("cpu", grid, mesh_dim_names=("data", "pipeline", "tensor"))
    copies, line, team = (mesh.get_group(name) for name in mesh.mesh_dim_names)
    (copy, stage, part), (_, stages, ranks) = mesh.get_coordinate(), grid
    layers, around = stage_of(build(), stage, stages)
    layers = cut_through(layers, part, ranks, team)
    around = {side: it if it is None else dist.get_global_rank(line, it) for side, it in around.items()}
    ids, labels = (rows[copy :: grid[0]].chunk(parts) for rows in sequences())
    optimizer, losses = torch.optim.AdamW(layers.parameters(), lr=1e-3), []
    for _ in range(3):
        with Traffic() as inside:
            losses.append(pipeline(layers, schedule("1F1B", stage, stages, parts), ids, labels, **around))
        with Traffic() as between:
            for weight in layers.parameters():
                dist.all_reduce(weight.grad, group=copies)
                weight.grad /= grid[0]
        optimizer.step()
        optimizer.zero_grad()
    words = {"tensor": "allreduce", "pipeline": "send"}
    sent = {name: [size for kind, size in inside.seen if kind == word] for name, word in words.items()}
    sent["data"] = [size for _, size in between.seen]
    return {"losses": losses, "weights": sum(weight.nbytes for weight in layers.parameters()), "sent": sent}


# %%
def talk(width, layers, weights, tokens, pipeline, parts, size=4):
    """Messages a step, and bytes of one, that a rank with so many weights hands over in each of its groups."""
    passed = size * width * tokens // parts  # activations of a micro-batch, or their gradient
    sums = 4 * layers // pipeline * parts
    return {"tensor": (sums, passed), "pipeline": (parts, passed), "data": (1, size * weights)}


grid = two(three_d, "2 x 2 x 2", processes=8)
told, rows = talk(WIDTH, LAYERS, grid[0]["weights"] // 4, 8 * LENGTH, pipeline=2, parts=4), []
for name, sizes in grid[0]["sent"].items():
    rows.append([name, len(sizes), sum(sizes), told[name][0] * told[name][1]])
    torch.testing.assert_close(*rows[-1][-2:])
display(plots.Table(["group", "messages, counted", "bytes, counted", "bytes, formula"], rows))
copies = [rank["losses"] for rank in grid if rank["losses"][0] is not None]
together = [sum(parts) / len(copies) for parts in zip(*copies)]
torch.testing.assert_close(together, losses["one device"][:3], rtol=1e-3, atol=0)

large = dict(width=8192, layers=80, tokens=2**20, pipeline=4, parts=64, size=2)  # and 8 parts: change the numbers
share = 12 * large["width"] ** 2 * large["layers"] // (8 * large["pipeline"])
rows = [[name, count, size / 1e6, count * size / 1e9] for name, (count, size) in talk(weights=share, **large).items()]
rows.sort(key=lambda row: -row[-1])
title = f"{share / 1e9:.1f} billion weights on a rank; fast link first"
plots.Table(["group", "messages a step", "MB each", "GB a step"], rows, title)

# %% [markdown]
# The formulas give what was counted, and the losses are those of one device, or the cell would have stopped. (Counted, the copies' messages are as many as weights; DDP would pack them. Their bytes decide.) So the second table may speak of a size that fits no laptop. The group that talks most, and whose every message is waited for, goes over the fastest link: inside a host. The others may cross hosts: stages send one message a micro-batch, and copies one sum a step, which backward can hide.
#
# ## What held
#
# The 2022 index asks whether each GPU has a full copy of the model, or the model itself is distributed. Answered above by the meter, in bytes. One more question of the guides: these methods are for what does not fit *with all the other tricks*. So both once more, with micro-batches of one sequence, checkpointing and Adafactor.

# %% tags=["claim"]
peaks, far = {}, {}
for name, options in {"one device": {}, "tensor": {"way": "tensor"}, "pipeline": {"way": "pipeline"}}.items():
    tricks = each_rank(f"{name}, all tricks", steps=2, parts=8, samples=8, frugal=True, **options)
    peaks[name] = max(rank["peak_bytes"] for rank in tricks)
one_device = runs["one device"][0]
copies = [rank["breakdown"]["weights"] / one_device["breakdown"]["weights"] for rank in runs["data parallel"]]
for name in WAYS:
    far[name] = max(abs(loss / whole - 1) for loss, whole in zip(losses[name], losses["one device"]))
display(claims.check("data-parallel-copies", min(copies)))
display(claims.check("tensor-parallel-splits", largest["tensor parallel"]))
display(claims.check("pipeline-parallel-splits", largest["pipeline, 1F1B"]))
display(claims.check("tensor-parallel-same", far["tensor parallel"]))
display(claims.check("pipeline-parallel-same", max(far["pipeline, 1F1B"], far["pipeline, GPipe"])))
beyond = min(peaks["tensor"], peaks["pipeline"]) / peaks["one device"]
display(claims.check("model-parallel-beyond-tricks", beyond, note=str(peaks)))
alone = min(largest["tensor parallel"], largest["pipeline, 1F1B"])
fullest = max(rank["weights"] for rank in grid) / one_device["breakdown"]["weights"]
claims.check("three-d-scales", fullest / alone)

# %% [markdown]
# ## Explore
#
# The simulator, for as many stages as you like.


# %% tags=["widget"]
def explore(stages, micro_batches, order):
    records = simulate(ORDERS[order], stages, micro_batches)
    _, axes = plt.subplots(figsize=(8, 0.8 + 0.4 * stages), layout="constrained", dpi=110)
    held = max(most_held(schedule(order, stage, stages, micro_batches)) for stage in range(stages))
    gantt(axes, records, f"{order}: {bubble(records):.0%} idle, at most {held} micro-batches held")
    axes.set_xlabel("time (a forward is 1, a backward 2)")
    return axes


_ = widgets.explore(explore, stages=[4, 2, 8], micro_batches=[8, 1, 2, 4, 16, 32], order=["1F1B", "GPipe"])

# %% [markdown]
# ## Exercise, a challenge: the cheapest cut that fits
#
# A model of layers of unequal widths is to be cut into two stages, so that no rank exceeds a limit of weights and the fewest bytes are sent. Write a function that takes the MB of each layer, the MB sent if the cut is *after* that layer, and the limit, and returns how many layers the first stage gets. Your cut of the first model below is then made, over two ranks, and counted.

# %%
MODELS = [([512, 768, 512, 128, 640, 896, 384, 896, 768], 7.5), ([64, 512, 512, 64, 512, 512, 128, 512], 2.0)]
ROWS = 256


def sizes_of(widths):
    layers_MB = [4 * (into + 1) * out / 1e6 for into, out in pairwise(widths)]
    return layers_MB, [2 * 4 * ROWS * width / 1e6 for width in widths[1:-1]]


def cut_in_two(task, cut, widths):
    rank, _, _ = meet(gpus=False)
    layers = [nn.Sequential(nn.Linear(into, out), nn.Tanh()) for into, out in pairwise(widths)]
    stage = nn.Sequential(*(layers[cut:] if rank else layers[:cut]))
    x = received((ROWS, widths[cut]), 0, None, "cpu").requires_grad_() if rank else torch.ones(ROWS, widths[0])
    with Traffic() as traffic:
        y = stage(x)
        dist.send(y.detach(), 1) if rank == 0 else y.sum().backward()
        y.backward(received(y.shape, 1, None, "cpu")) if rank == 0 else dist.send(x.grad, 0)
    return [sum(weight.nbytes for weight in stage.parameters()) / 1e6, sum(size for _, size in traffic.seen) / 1e6]


rows = [*zip(range(1, 8), *sizes_of(MODELS[0][0]))]
plots.Table(["layer", "MB of weights", "MB sent if cut after it"], rows, f"two ranks, at most {MODELS[0][1]} MB each")

# %% tags=["exercise"]
answer = None


# %% tags=["check"]
def check_cut(answer):
    if answer is None:
        return exercises.not_attempted("replace None by a function of layers_MB, sent_MB and limit_MB")
    for widths, limit in reversed(MODELS):
        layers_MB, sent_MB = sizes_of(widths)
        cuts = range(1, len(layers_MB))
        fitting = [cut for cut in cuts if max(sum(layers_MB[:cut]), sum(layers_MB[cut:])) <= limit]
        cut = answer(layers_MB, sent_MB, limit)
        if cut not in fitting:
            return exercises.wrong(f"{widths}, cut after {cut}: a rank has more than {limit} MB")
        if sent_MB[cut - 1] > min(sent_MB[other - 1] for other in fitting):
            return exercises.wrong(f"{widths}, cut after {cut}: it fits, but another one that fits sends less")
    kept, sent = zip(*two(cut_in_two, "your cut", cut=cut, widths=widths))
    return exercises.right(f"counted over two ranks: {max(kept):.2f} MB on the fuller one, {sum(sent):.2f} MB sent")


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
# - A block was cut through its matrices and a model into stages: the same losses as the whole one, with about half of the bytes on each rank.
# - What each cut sent was counted: sums of activations in every layer for tensor parallelism, one message a micro-batch for a pipeline, one sum of gradients a step for copies. The group that talked most gets the fast link.
# - The bubble of a pipeline was measured and drawn. More micro-batches shrank it, and 1F1B held fewer activations at the same bubble.

# %% tags=["finish"]
claims.finish(lab)
