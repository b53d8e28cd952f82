# %% [markdown]
# # What if a model fits no device?
#
# Then it is cut: through its layers, or between them. This lesson does both by hand, counts what each cut keeps and what it sends, and shows where the time goes.
#
# **You will see**
# - a block cut through its matrices and a model cut into stages: the same gradients as the whole one, with about half of the bytes on each rank
# - what each cut sends, counted message by message, and therefore which group of ranks needs the fast link
# - the bubble of a pipeline, measured and drawn, and a schedule that holds fewer activations at the same bubble

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

# %%
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

# %%
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
# So the *pair* needs no message in its middle, and one sum at its end. Backward is the mirror image: the gradient of the pair's input has a summand on each rank, and needs one sum there. Megatron-LM made two functions of this, each the other's mirror. Attention is cut by heads: query, key and value by columns, the output by rows.
#
# What do the parts send? Two real processes, joined by gloo (NCCL where there are two GPUs). `Traffic`, lesson 15's dispatch mode, sees every operation before it is carried out, and notes those that talk to other ranks.


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


# %%
class Traffic(TorchDispatchMode):
    """Notes what this rank hands over: [operation, bytes]."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of others, as torch's DTensor below: its parts will come by here
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
def one_block(task, tokens):
    rank, ranks, device = meet()
    part, found = CutBlock(build(1)[1].to(device), rank, ranks), []
    for count in tokens:
        with Traffic() as forward:
            y = part(torch.randn(1, count, WIDTH, device=device).requires_grad_())
        with Traffic() as backward:
            y.square().sum().backward()
        found += [[count, "forward", forward.seen], [count, "backward", backward.seen]]
    return found


def two(function, name, task=None, processes=2, measure="value", **options):
    """What each of two ranks returns; measure="none" if it reads a clock."""
    run = lab.run(partial(function, **options), name, task=task, processes=processes, measure=measure)
    return [rank["value"] for rank in run.ranks]


rows = [[*row, [size for _, size in seen]] for *row, seen in two(one_block, "half a block", tokens=(64, 256, 1024))[0]]
rows = [[count, phase, len(sizes), sum(sizes), sum(sizes) / (4 * count * WIDTH)] for count, phase, sizes in rows]
plots.Table(["tokens", "phase", "sums", "bytes", "bytes / 4 B x tokens x width"], rows)

# %% [markdown]
# The last column is the law: two sums forward and two backward, each as large as the activations that pass. A copy (data parallelism) sends something else: one gradient a weight, whatever the tokens.
#
# ### Words, too
#
# Embedding and head have a row for each word. They are cut by words: a rank looks up those that it has, and the sum is the embedding. Of the scores each rank has its own words', and no rank needs all: the loss takes their largest, their sum and the right one's, three numbers a token.


# %%
class CutWords(nn.Module):
    """This rank's words: of an embedding, or of a head."""

    def __init__(self, layer, rank, parts, group=None):
        super().__init__()
        self.group, self.is_head, self.first = group, isinstance(layer, nn.Linear), rank * len(layer.weight) // parts
        for name, whole in layer.named_parameters():
            setattr(self, name, nn.Parameter(whole.detach().chunk(parts)[rank].clone()))

    def forward(self, x):
        if self.is_head:
            return linear(Into.apply(x, self.group), self.weight, self.bias)
        return OutOf.apply(pick(self.weight, x - self.first), self.group)


def pick(rows, number):
    """Of each number its row; zero where another rank has it."""
    here = (number >= 0) & (number < len(rows))
    return rows[number.clamp(0, len(rows) - 1)] * here[..., None]


def cut_through(model, *place):
    kinds = {Block: CutBlock, nn.Embedding: CutWords, nn.Linear: CutWords}
    return nn.Sequential(*(kinds[type(layer)](layer, *place) for layer in model))


# %%
def stage_of(model, stage, stages):
    """Whole layers, as many blocks for each stage; and the ranks before and after it."""
    blocks = (len(model) - 2) // stages
    ends = [0, *(1 + blocks * number for number in range(1, stages)), len(model)]
    around = {"before": stage - 1 if stage else None, "after": stage + 1 if stage < stages - 1 else None}
    return model[ends[stage] : ends[stage + 1]], around


def fullest(stages, parts, words=VOCABULARY):
    """MB of weights on the fullest of stages x parts ranks; None where there are not so many blocks, or heads."""
    if LAYERS % stages or HEADS % parts:
        return None
    every = [stage_of(build(words=words), stage, stages)[0] for stage in range(stages)]
    every = [cut_through(layers, part, parts) for layers in every for part in range(parts)]
    return max(sum(weight.nbytes for weight in layers.parameters()) for layers in every) / 1e6


shares = {words: fullest(1, 2, words) / fullest(1, 1, words) for words in (VOCABULARY, 8000, 32000)}
blocks = 4 * 12 * LAYERS * WIDTH**2 / 1e6  # MB; only these are halved if the words stay whole
rows = [[words, 1 - blocks / 2 / fullest(1, 1, words), share] for words, share in shares.items()]
plots.Table(["words", "only blocks cut", "words, too"], rows, "weights on the fuller of two ranks / all")

# %% [markdown]
# ## By hand: stages
#
# A pipeline passes activations forward and their gradients back, one message each for a **micro-batch**, a part of the batch. What a stage does, and in which order, is its **schedule**. Two are common: first all forwards, then all backwards (GPipe), or one forward and one backward in turns as soon as possible (**1F1B**). A third, **interleaved**, gives each rank two shorter pieces of the model instead of a long one: its neighbour begins sooner, and there are twice as many messages.


# %%
def schedule(name, stage, stages, micro_batches):
    """What a stage does, in order: ("F" or "B", micro-batch, which of its pieces)."""
    pieces = 2 if name == "interleaved" else 1
    count = pieces * micro_batches  # interleaved: as many micro-batches as there are stages for each piece in turn
    every = [(k // (stages * pieces) * stages + k % stages, k // stages % pieces) for k in range(count)]
    forward = [("F", number, piece) for number, piece in every]
    backward = [("B", number, pieces - 1 - piece) for number, piece in every]
    behind = stages - 1 - stage  # how many come after it
    # Forwards before the first gradient can be back:
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
    """Cross entropy where each rank has the scores of its own words."""
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
    """A step of one stage. before, after: the ranks of its neighbours; ways: a group for each direction."""
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
def place(way, order="1F1B", parts=1, gpus=gpus2, samples=16):  # a rank's layers, and what else `pipeline` takes
    rank, ranks, device = meet(gpus)
    model, (ids, labels), stage, given = build().to(device), sequences(device, samples), (0, 1), {}
    if way == "tensor":
        model, given = cut_through(model, rank, ranks), {"loss": loss_in_parts}
    elif way == "data":
        model, ids, labels = DDP(model), ids[rank::ranks], labels[rank::ranks]
    elif way == "pipeline":
        model, given = stage_of(model, *(stage := (rank, ranks)))
        given["ways"] = dist.new_group(), dist.new_group()  # NCCL wants each direction in an order of its own
    given |= {"ids": ids.chunk(parts), "labels": labels.chunk(parts)}
    return model, given | {"actions": schedule(order, *stage, parts)}


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
    """Of each way the largest difference of a gradient from that on one device / the largest number in that gradient."""
    rank, ranks, device = meet()
    whole, (ids, labels), found = build().to(device), sequences(device), {}
    cross_entropy(whole(ids).flatten(0, 1), labels.flatten()).backward()  # plainly, and all of it
    for way, options in ways.items():
        layers, given = place(**options)
        pipeline(layers, **given)
        found[way] = []
        for name, weight in layers.named_parameters():
            name = name.removeprefix("module.")  # as DDP calls them
            truth, layer = whole.get_parameter(name).grad, name.split(".")[-2]
            dimension = 0 if layer.isdigit() else CUT.get(layer)  # embedding and head have a number for a name
            if options["way"] == "tensor" and dimension is not None:
                truth = truth.chunk(ranks, dimension)[rank]
            found[way].append(apart(weight.grad, truth))
    return {way: max(each) for way, each in found.items()}


def apart(one, other):
    """The largest difference, against the largest number there is."""
    return ((one - other).abs().max() / other.abs().max()).item()


# %% [markdown]
# ## Baseline, and four ways to use two devices
#
# The same model and the same 16 sequences: on one device, in two copies (data parallel), cut through, cut between, and the last once more in GPipe's order. The lab's meter counts the bytes of each rank. Is it the same training? Losses under AdamW would not tell: it divides by the gradient's size, and one 16 times too large trains alike. So each rank compares its gradients with those of one device.

# %%
WAYS = {"data parallel": {"way": "data"}, "tensor parallel": {"way": "tensor"}}
WAYS |= {f"pipeline, {order}": {"way": "pipeline", "parts": 8, "order": order} for order in ("GPipe", "1F1B")}


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
display(plots.Table(["fuller rank of", "MB of weights", "/ one device", "peak, MB", "MB sent", "5th loss"], rows))
far = two(gradients, "gradients", measure="none", ways=WAYS)
far = {name: max(rank[name] for rank in far) for name in WAYS}
plots.Table(["gradients, against one device", "apart by"], [[name, f"{most:.0e}"] for name, most in far.items()])

# %% [markdown]
# Each copy holds everything. Cut through or between, a rank holds about half, and the gradients are those of one device. (The loss of data parallelism is that of one copy's samples.)
#
# ### The bubble
#
# A stage can only begin when the one before it hands something on. While it waits, its device is idle: the **bubble**. With one micro-batch, one of two is always idle. More micro-batches fill the gap. Let us watch, on blocks twice as wide: each rank notes when it computes, and rank 0 also does all of it alone. First the tools: a picture, and a simulator of schedules, where messages take no time. By it GPipe and 1F1B obey one law: with *p* stages and *m* micro-batches (p-1)/(m+p-1) of the time is idle. (Papers also write (p-1)/m: idle time over *busy* time.) Interleaved, in two pieces, it is (p-1)/(2m+p-1).


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
    """Records like measured ones, if a forward and a backward of all of a rank's layers take that long."""
    left, done, records = [list(schedule_of(stage, stages, micro_batches)) for stage in range(stages)], {}, []
    pieces, records = 1 + max(piece for *_, piece in left[0]), [[] for _ in left]
    while any(left):
        for stage, actions in enumerate(left):
            while actions:
                kind, number, piece = actions[0]
                here = piece * stages + stage  # which piece of the whole model
                source = here - 1 if kind == "F" else here + 1  # where its message comes from
                needed = (kind, source, number) if 0 <= source < pieces * stages else ("F", here, number)
                if needed not in done and (kind, source) != ("F", -1):
                    break
                begin = max(done.get(needed, 0.0), records[stage][-1][-1] if records[stage] else 0.0)
                done[kind, here, number] = begin + seconds[kind == "B"] / pieces
                records[stage].append([kind, number, begin, done[kind, here, number]])
                actions.pop(0)
    return records


ORDERS = {name: partial(schedule, name) for name in ("GPipe", "1F1B", "interleaved")}
for order, stages, parts in product(ORDERS, (2, 4, 8), (8, 32)):
    told = (stages - 1) / ((1 + (order == "interleaved")) * parts + stages - 1)
    torch.testing.assert_close(bubble(simulate(ORDERS[order], stages, parts)), told)


# %%
LOOKED_AT = [("one device", 1), ("GPipe", 1), ("GPipe", 2), ("GPipe", 4), ("GPipe", 8), ("1F1B", 8)]
LOOKED_AT += [("copies", 1), ("cut through", 1)]


def watch(task, turns=6, width=2 * WIDTH):
    rank, ranks, device = meet()
    (ids, labels), found, alone = sequences(device), [], schedule("GPipe", 0, 1, 1)
    whole, copy, parts_of, staged = (build(width=width).to(device) for _ in range(4))
    stage, around = stage_of(staged, rank, ranks)
    if gpus2:
        around["ways"] = dist.new_group(), dist.new_group()
    ways = {"one device": (whole, {}), "copies": (DDP(copy), {})}
    ways["cut through"] = cut_through(parts_of, rank, ranks), {"loss": loss_in_parts}
    for _, (name, parts) in product(range(turns), LOOKED_AT):
        dist.barrier()
        found.append([])
        layers, given = ways.get(name, (stage, around))
        actions = alone if name in ways else schedule(name, rank, ranks, parts)
        mine = (each[rank::ranks] if name == "copies" else each for each in (ids, labels))
        if name != "one device" or rank == 0:
            pipeline(layers, actions, *(each.chunk(parts) for each in mine), width=width, seen=found[-1], **given)
    return found[len(LOOKED_AT) :]  # the first turn warms up


# %%
both, timed, rows = two(watch, "watched", measure="none"), {}, []
for row, key in enumerate(LOOKED_AT):
    timed[key] = [[rank[turn] for rank in both] for turn in range(row, len(both[0]), len(LOOKED_AT))]
alone = [seconds_of(turn[:1]) for turn in timed.pop(LOOKED_AT[0])]
for (name, parts), turns in timed.items():
    gain = Ratio.of_pairs([one / seconds_of(turn) for one, turn in zip(alone, turns)], 1.05)  # median and interval
    shares_idle = [bubble(turn) for turn in turns]
    said = f"{median(shares_idle):.0%} ({min(shares_idle):.0%} to {max(shares_idle):.0%})", f"{1 / (parts + 1):.0%}"
    rows.append([name, parts, *(said if name in ORDERS else ("", "")), str(gain)])
display(plots.Table(["way", "micro-batches", "bubble", "the law", "speed, times one device"], rows))
figure, axes = plt.subplots(3, 1, figsize=(8, 5), layout="constrained", dpi=110)
for ax, key in zip(axes, [("GPipe", 1), ("GPipe", 8), ("1F1B", 8)]):
    turn = min(timed[key], key=seconds_of)
    gantt(ax, turn, f"{key[0]}, micro-batches: {key[1]}, idle: {bubble(turn):.0%}")
axes[-1].set_xlabel("seconds (blue: forward, orange: backward; the number: which micro-batch)")
widgets.revealed(lab, "together", 100 * max(0, 1 - 2 * median(bubble(turn) for turn in timed["GPipe", 1])))

# %% [markdown]
# With one micro-batch the devices take turns, so the second one brings nothing but its memory. More micro-batches shrink the bubble. But a batch of fixed size is cut finer, and smaller products are slower ones: read the last column for where more stops helping. What the measured bubble has above the law are messages, actions that take longer than others, and busy cores. The last two rows answer the question above: on the same batch, copies meet once a step, parts in every layer.
#
# Both orders have the same bubble. So why 1F1B? Because of what a stage must keep: the activations of each micro-batch that went forward and has not come back. Four ranks this time, on the CPU, counted by the lab's meter. Below it the simulator, for as many stages as you like.

# %%
STAGES, grown = 4, {}


def most_held(actions):
    """Micro-batches whose activations a stage holds at once."""
    return max(accumulate(1 if kind == "F" else -1 for kind, *_ in actions))


for order in ("GPipe", "1F1B"):
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


# %% tags=["widget"]
def explore(stages, micro_batches, order):
    if order == "interleaved":  # in rounds of as many micro-batches as there are stages
        micro_batches = stages * max(1, micro_batches // stages)
    records = simulate(ORDERS[order], stages, micro_batches)
    _, axes = plt.subplots(figsize=(8, 0.8 + 0.4 * stages), layout="constrained", dpi=110)
    held = max(most_held(schedule(order, stage, stages, micro_batches)) for stage in range(stages))
    held /= 1 + (order == "interleaved")  # pieces of half a rank's layers
    title = f"{order}, {micro_batches} micro-batches: {bubble(records):.0%} idle, at most {held:g} held"
    gantt(axes, records, title)
    axes.set_xlabel("time (a forward is 1, a backward 2)")
    return axes


_ = widgets.explore(
    explore, stages=[4, 2, 8], micro_batches=[8, 1, 2, 4, 16, 32], order=["1F1B", "GPipe", "interleaved"]
)

# %% [markdown]
# GPipe holds all micro-batches on every stage; with 1F1B stage *s* of *p* never holds more than p - s, however many there are. So a *larger batch* of equal micro-batches shrinks the bubble at no cost in memory.
#
# ## Change one thing: the libraries
#
# torch has both. `parallelize_module` turns the weights of named layers into *DTensors*: tensors that know the whole shape, hold this rank's part, and talk when they must. They are laid out on a *DeviceMesh*, the ranks as a grid with named sides. `torch.distributed.pipelining` has the schedules.
#
# Four plans for a block. The last is **sequence parallelism**. What lies *between* the pairs, norms and the residual connection, was whole on every rank so far. Now it is cut along the tokens. The sum that ends a pair goes out in parts (reduce-scatter), and what begins the next pair is gathered (all-gather). A ring carries a sum as just these two, so the bytes on the wire stay. (The norms' own gradients must then be summed over the ranks.)


# %%
def plans():
    """Of each plan the steps; a step says how each named layer is to be cut, or its output laid out."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    rows, columns, norms = parallel.RowwiseParallel, parallel.ColwiseParallel, ("norm1", "norm2")
    weights = {name: rows() if dimension else columns() for name, dimension in CUT.items()}
    tokens = {name: rows(output_layouts=Shard(1)) if dimension else columns() for name, dimension in CUT.items()}
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
    """This rank's part of a tensor of all ranks, and any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def kept(block, x):
    """A block's output, and the bytes that it keeps for its backward, weights left out."""
    own, found = {local(weight).untyped_storage().data_ptr() for weight in block.parameters()}, {}

    def note(tensor):
        memory = local(tensor).untyped_storage()
        found[memory.data_ptr()] = memory  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = block(x)
    return y, sum(memory.nbytes() for place, memory in found.items() if place not in own)


# %%
def torch_tensor_parallel(task):
    from torch.distributed.tensor.parallel import parallelize_module

    rank, ranks, device = meet()
    mesh, found, outputs = dist.device_mesh.init_device_mesh(device.type, (ranks,)), [], []
    for name, steps in ({"one device": [], "by hand": []} | plans()).items():
        block = build(1)[1].to(device)
        x = torch.randn(1, LENGTH, WIDTH).to(device)  # drawn after the same seed
        block = CutBlock(block, rank, ranks) if name == "by hand" else block
        for step in steps:
            parallelize_module(block, mesh, step)  # new
        block.heads //= ranks if steps else 1
        given = (x.chunk(ranks, 1)[rank] if name == "tokens" else x).requires_grad_()
        with Traffic() as traffic:
            y, size = kept(block, given)
            y.square().sum().backward()
        outputs.append(local(y.detach()) if name == "tokens" else y.detach().chunk(ranks, 1)[rank])
        wire = sum(size // 2 if "scatter" in kind else size for kind, size in traffic.seen)  # by rings of two ranks
        found.append([name, len(traffic.seen), wire, size, apart(outputs[-1], outputs[0])])
    return found


rows = two(torch_tensor_parallel, "parallelize_module")[0]
torch.testing.assert_close([far_off for *_, far_off in rows], [0.0] * 5, atol=1e-4, rtol=0)
plots.Table(["plan", "messages", "bytes on the wire", "bytes kept", "output apart by"], rows, "one block, two ranks")


# %%
def torch_pipeline(task, order, micro_batches=8):
    from torch.distributed.pipelining import PipelineStage, schedules

    (rank, ranks, device), (ids, labels) = meet(), sequences(meet()[2])
    pieces = 2 if order == "interleaved" else 1
    numbers = range(rank, pieces * ranks, ranks)  # of the pieces that this rank has
    layers = nn.ModuleList(stage_of(build().to(device), number, pieces * ranks)[0] for number in numbers)
    stages = [PipelineStage(each, number, pieces * ranks, device) for each, number in zip(layers, numbers)]
    plan = schedules.ScheduleInterleaved1F1B if pieces > 1 else schedules.Schedule1F1B
    plan = plan(stages if pieces > 1 else stages[0], micro_batches, lambda y, right: cross_entropy(y.mT, right))  # new
    optimizer, losses, given = torch.optim.AdamW(layers.parameters(), lr=1e-3), [], [] if rank else [ids]
    for _ in range(5):
        parts = []
        plan.step(*given, **({"target": labels, "losses": parts} if rank == ranks - 1 else {}))  # new
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts) / micro_batches)
    return losses


for order in ("1F1B", "interleaved"):
    theirs = two(torch_pipeline, f"torch, {order}", order=order)[-1]
    torch.testing.assert_close(theirs, losses["pipeline, 1F1B"], rtol=1e-4, atol=0)
    print(f"torch's {order}: losses {', '.join(f'{loss:.4f}' for loss in theirs)}")


# %%
def llama(task, folder, sizes=None):
    import transformers

    meet()
    given = {"distributed_config": transformers.distributed.DistributedConfig(**sizes)} if sizes else {}
    model = transformers.LlamaForCausalLM.from_pretrained(folder, **given).train()  # new
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), []  # DTensors stand beside others
    for _ in range(3):
        losses.append(model(**task.batch(4, model.device)).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses], sum(local(weight).nbytes for weight in model.parameters())


small = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512, "dtype": "float32"}
small = Task("llama-3-8b", 32, config=small | {"num_attention_heads": 4, "num_key_value_heads": 4})
sizes = {"tp_size": 2} if gpus2 else {"tp_size": 2, "fsdp_size": 2}
if lab.machine.kind != "cuda" or gpus2:  # it takes a GPU for each rank where there is one
    with tempfile.TemporaryDirectory() as folder:
        small.build_model().save_pretrained(folder)  # random weights, in place of a checkpoint
        whole, weights = lab.run(partial(llama, folder=folder), "llama", task=small, measure="value").value
        cut = two(llama, "llama, cut", small, processes=2 if gpus2 else 4, folder=folder, sizes=sizes)
    torch.testing.assert_close(cut[0][0], whole, rtol=1e-3, atol=0)
    print(f"{sizes}: the losses of one device; of the weights {max(mine for _, mine in cut) / weights:.0%} on a rank")

# %% [markdown]
# The same outputs and losses. A plan of weights alone sends more than we did: query, key and value each ask for the sum of their input's gradient, where one sum of all three would do. Told that the norm's output is one tensor of all ranks, torch sums once. Count a plan. Cut along the tokens, too, a rank keeps less, but not half: what was gathered is kept whole. Megatron gathers it once more in backward instead. (Without sequence parallelism, its authors count, 10 of 34 bytes stay whole.)
#
# ### transformers, and two ways at once
#
# The last cell was transformers. A model brings its plan, `from_pretrained` follows it, and each rank reads its own part only. The four ranks were a **2D mesh**: two parts (`tp_size`) in each of two shards (`fsdp_size`), FSDP2's division (lesson 16) of what the parts left. (Both shards got the same rows, so that losses can be compared. `pp_size` makes stages, for inference: its pull request, [#47289](https://github.com/huggingface/transformers/pull/47289), names backward among what is left to do.)
#
# ## All three at once
#
# Eight ranks, as a grid of 2 copies x 2 stages x 2 parts. Each rank talks in three groups: to the other part in each layer, to its neighbouring stage for each micro-batch, to its twin in the other copy once a step. That is **3D parallelism**, and it needs nothing new. The grid's last side is neighbouring ranks, which share a host: its order decides who talks over which link.


# %%
def three_d(task, grid=(2, 2, 2), parts=4):
    meet(gpus=False)
    mesh = dist.device_mesh.init_device_mesh("cpu", grid, mesh_dim_names=("data", "pipeline", "tensor"))
    copies, line, team = (mesh.get_group(name) for name in mesh.mesh_dim_names)
    (copy, stage, part), (_, stages, ranks) = mesh.get_coordinate(), grid
    layers, around = stage_of(build(), stage, stages)
    layers = cut_through(layers, part, ranks, team)
    around = {side: it if it is None else dist.get_global_rank(line, it) for side, it in around.items()}
    around["loss"] = partial(loss_in_parts, group=team)
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
    """Messages a step, and bytes of one, that a rank of the first stage hands over in each of its groups."""
    passed = size * width * tokens // parts  # activations of a micro-batch, or their gradient
    sums = (4 * layers // pipeline + 1) * parts  # and one for the embedding
    return {"tensor": (sums, passed), "pipeline": (parts, passed), "data": (1, size * weights)}


grid = two(three_d, "2 x 2 x 2", processes=8, measure="none")
told, rows = talk(WIDTH, LAYERS, grid[0]["weights"] // 4, 8 * LENGTH, pipeline=2, parts=4), []
for name, sizes in grid[0]["sent"].items():
    rows.append([name, len(sizes), sum(sizes), told[name][0] * told[name][1]])
    torch.testing.assert_close(*rows[-1][-2:])
display(plots.Table(["group", "messages, counted", "bytes, counted", "bytes, formula"], rows))
copies = [rank["losses"] for rank in grid if rank["losses"][0] is not None]
together = [sum(parts) / len(copies) for parts in zip(*copies)]
torch.testing.assert_close(together, losses["one device"][:3], rtol=1e-3, atol=0)

# %%
# In 8 parts and 16 copies: change the numbers. A ring carries a sum over n ranks 2 (n - 1) / n times.
large = dict(width=8192, layers=80, tokens=2**20, pipeline=4, parts=64, size=2)
share = 12 * large["width"] ** 2 * large["layers"] // (8 * large["pipeline"])
wire = {"tensor": 2 * 7 / 8, "pipeline": 1, "data": 2 * 15 / 16}
rows = [[name, count, wire[name] * count * size / 1e9] for name, (count, size) in talk(weights=share, **large).items()]
rows.sort(key=lambda row: -row[-1])
title = f"{share / 1e9:.1f} billion weights on a rank; fast link first"
display(plots.Table(["group", "messages a step", "GB a step on a rank's wire"], rows, title))

links = {"NVLink": 450e9, "400 Gbit/s": 50e9}  # bytes a second in each direction, from one H100 (989e12 operations)
rows = [[name, 989e12 / link, 1 + 3 * 8192 * link / 989e12] for name, link in links.items()]
display(plots.Table(["H100s over", "copies: tokens on each, at least", "parts, at most"], rows, "width 8192, bf16"))

limits = {}
for ranks in (1, 2, 4, 8, 16):
    both_ways = [fullest(stages, ranks // stages) for stages in (1, 2, 4, 8, 16) if stages <= ranks]
    limits[ranks] = both_ways[0], both_ways[-1], min(size for size in both_ways if size)
rows = [[ranks, *(f"{size:.3f}" if size else "not possible" for size in sizes)] for ranks, sizes in limits.items()]
plots.Table(["ranks", "parts alone", "stages alone", "best of all cuts"], rows, "MB of weights on the fullest rank")

# %% [markdown]
# The formulas give what was counted, and the losses are those of one device, or the cell would have stopped. So the second table may speak of a size that fits no laptop. The group that talks most, and whose every message is waited for, goes over the fastest link. The others may cross hosts: stages send one message a micro-batch, and copies one sum a step, which backward can hide.
#
# *When does a link hold the devices up?* Let a device compute F operations a second, and its link carry B bytes a second. For copies, backward takes 4 operations for each weight and token, and may hide the sum of that weight's gradient: 2 bytes in bf16, carried twice. So each needs **F / B tokens** at least. (ZeRO 3's gathers ask for as many.) Of *n* parts each computes 24 width² / n for a token of a block, forward, then waits for two sums of `width` numbers. Tokens stand on both sides: it is the *number of parts* that is bounded, by about **3 x width x B / F**. That is the third table.
#
# The last one says what 3D is for. On as many ranks one way alone holds about as little. But each ends: parts at the number of heads and at the fast link, stages at the number of blocks and at the bubble. Together they go on.
#
# ## What held
#
# The 2022 index asks whether each GPU has a full copy of the model, or the model itself is distributed: answered above, in bytes. And these methods are for what does not fit *with all the other tricks*, say the guides. So both once more, with micro-batches of one sequence, checkpointing and Adafactor.

# %% tags=["claim"]
peaks = {}
for name, options in {"one device": {}, "tensor": {"way": "tensor"}, "pipeline": {"way": "pipeline"}}.items():
    tricks = each_rank(f"{name}, all tricks", steps=2, parts=8, samples=8, frugal=True, **options)
    peaks[name] = max(rank["peak_bytes"] for rank in tricks)
one_device = runs["one device"][0]
copies = [rank["breakdown"]["weights"] / one_device["breakdown"]["weights"] for rank in runs["data parallel"]]
display(claims.check("data-parallel-copies", min(copies)))
display(claims.check("tensor-parallel-splits", max(largest["tensor parallel"], *shares.values())))
display(claims.check("pipeline-parallel-splits", largest["pipeline, 1F1B"]))
display(claims.check("tensor-parallel-same", far["tensor parallel"]))
display(claims.check("pipeline-parallel-same", max(far["pipeline, 1F1B"], far["pipeline, GPipe"])))
beyond = min(peaks["tensor"], peaks["pipeline"]) / peaks["one device"]
display(claims.check("model-parallel-beyond-tricks", beyond, note=str(peaks)))
alone = min(size for ranks in (1, 2, 4, 8) for size in limits[ranks][:2] if size)
claims.check("three-d-scales", limits[8][2] / alone, note=f"alone {alone:.3f} MB, on at most 8 ranks")

# %% [markdown]
# ## Exercise, a challenge: the cheapest cut that fits
#
# A model of layers of unequal widths is to be cut into two stages, so that no rank exceeds a limit of weights and the fewest bytes are sent. Write a function that takes the MB of each layer, the MB sent if the cut is *after* that layer, and the limit, and returns how many layers the first stage gets. It is tried on models drawn anew each time, each with a limit that some cut meets.

# %% tags=["exercise"]
exercises.hint(
    "If the first stage gets `cut` layers, the ranks hold `sum(layers_MB[:cut])` and `sum(layers_MB[cut:])`.",
    "What that cut sends is `sent_MB[cut - 1]`. Which cuts are allowed at all? `range(1, len(layers_MB))`.",
    "First keep the cuts at which both ranks are within the limit. Then ask which of these sends least.",
)
answer = None


# %% tags=["check"]
def drawn():
    """A model of 5 to 9 layers: MB of each, MB sent after each but the last, a limit."""
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
# - A block was cut through its matrices and a model into stages: the same gradients as the whole one, with about half of the bytes on each rank.
# - What each cut sent was counted: sums of activations in every layer for tensor parallelism, one message a micro-batch for a pipeline, one sum of gradients a step for copies. The group that talked most gets the fast link.
# - The bubble of a pipeline was measured and drawn. More micro-batches shrank it, at smaller products, and 1F1B held fewer activations at the same bubble.

# %% tags=["finish"]
claims.finish()
