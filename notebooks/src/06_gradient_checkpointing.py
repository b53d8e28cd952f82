# %% [markdown]
# # Why keep what you can compute again?
#
# Your batch does not fit, and activations take most of the memory. The forward pass saves them because the backward pass needs them. Gradient checkpointing throws most of them away and computes them a second time, just before they are needed. How much does that save, and what does it cost?
#
# **You will see**
# - that every forward runs twice and the gradient stays the same, dropout included
# - how far apart checkpoints should be, and where the square root in the textbooks comes from
# - what the library's flag saves and costs, which layers are worth recomputing, and when the flag saves nothing
#
# **Time:** plan 40 minutes with the code and the exercises: ten minutes of reading, one to three minutes of computing on two CPU cores. **Before this:** lesson 01; for one comparison lesson 05. **Not on a CPU:** checkpoints that are moved from the GPU to the CPU's memory.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import inspect
import math
import time
import weakref
from collections import Counter

import numpy as np
import torch
from IPython.display import display
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from perf_helpers import Claims, Lab, Task, exercises, explorers, plots, widgets
from trainmem.estimate import estimate

lab = Lab(profile, strict=strict, out=out, lesson="06_gradient_checkpointing")
claims = Claims(lab)
torch.set_num_threads(1)  # in this notebook's own process, where all tensors are tiny
bert = Task("bert-small", seq_len=256)  # the model to look into

# %% [markdown]
# ## Idea
#
# A block of a network takes an input, makes a dozen tensors, and passes on one output. We call the tensors that a block makes and saves for backward its *inside*. Normally the insides of all blocks wait in memory for the backward pass. With checkpointing only the block's *input* is kept. When backward reaches the block, the block runs forward once more from that input. This makes its inside again; backward uses the inside and frees it.
#
# So during backward, memory holds the inputs of all blocks and the inside of *one* block. The price is a second forward pass.
#
# ## Predict
#
# Below, the task of this machine is trained with a batch of 4, without and with checkpointing of every layer. Weights, gradients and optimizer states count too.

# %%
widgets.predict(
    lab,
    "every layer",
    "What is the peak with every layer checkpointed, in percent of the peak without?",
    "%",
    0,
    120,
)

# %% [markdown]
# ## By hand
#
# This block counts how often it runs. It has `inside` linear layers, each followed by a Tanh, and ends with dropout. Each pair saves one tensor as large as the block's input. So without dropout the block's inside is `inside` times as large as its input. `step` runs a training step over a list of segments (here each segment is one block) and returns the gradient as one long vector. (`use_reentrant=False` selects torch's current mechanism of recomputation, not its older one.)


# %%
class Block(torch.nn.Module):
    def __init__(self, inside=4, width=16, dropout=0.0):
        super().__init__()
        pairs = [(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(inside)]
        self.layers = torch.nn.Sequential(*[layer for pair in pairs for layer in pair], torch.nn.Dropout(dropout))
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.layers(x)


def step(segments, x, recompute=True, **options):
    torch.manual_seed(1)  # the same dropout in every call
    for segment in segments:
        x = checkpoint(segment, x, use_reentrant=False, **options) if recompute else segment(x)
    x.square().mean().backward()
    gradients = [weight.grad for segment in segments for weight in segment.parameters()]
    vector = torch.cat([gradient.flatten() for gradient in gradients])
    for gradient in gradients:
        gradient.zero_()
    return vector


# %%
torch.manual_seed(0)
x = torch.randn(512, 16)
blocks = [Block(dropout=0.1) for _ in range(3)]
plain = step(blocks, x, recompute=False)
print("forward runs without checkpoint:", [block.runs for block in blocks])
recomputed = step(blocks, x)
print("forward runs with checkpoint:   ", [block.runs - 1 for block in blocks])  # minus the run of `plain`
torch.testing.assert_close(recomputed, plain)

other_dropout = step(blocks, x, preserve_rng_state=False)
print(f"same gradient to the last bit: {torch.equal(recomputed, plain)}")
print(f"off by {(other_dropout - plain).norm() / plain.norm():.0%} if the random state is not put back")

# %% [markdown]
# With `checkpoint` each block ran twice, and the gradient is the same, although dropout draws random numbers. `checkpoint` saves the state of the random generator before the first run and puts it back for the second. With `preserve_rng_state=False` (a little faster) dropout sets *other* elements to zero in the second run than in the first: the gradient is wrong, and there is no error message.
#
# ## How far apart?
#
# A checkpointed *segment* may contain one block or several. To see which is best we count the bytes of all live tensors. While a **dispatch mode** (lesson 02) is active, torch hands each operation to it, also the operations of backward and of recomputation. Our mode, `LiveBytes`, runs the operation, adds the bytes of the tensors that the operation returns, and subtracts them when the tensors are freed. (A view shares the storage of another tensor, and adds nothing.)
#
# `blocks_each` is the number of blocks in a segment (None: no checkpoints). `peak_by_hand` returns the peak as a multiple of the bytes of a block's input.


# %%
class LiveBytes(TorchDispatchMode):
    now = peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        old = {id(given.untyped_storage()) for given in args if isinstance(given, torch.Tensor)}
        for made in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(made, torch.Tensor) and id(storage := made.untyped_storage()) not in old:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.died, storage.nbytes())
        return result

    def died(self, size):
        self.now -= size


def peak_by_hand(depth, blocks_each, inside=4):
    blocks = [Block(inside) for _ in range(depth)]
    segments = [torch.nn.Sequential(*blocks[i : i + (blocks_each or 1)]) for i in range(0, depth, blocks_each or 1)]
    for weight in torch.nn.ModuleList(blocks).parameters():
        weight.grad = torch.zeros_like(weight)  # allocated here, so they do not count
    with LiveBytes() as live:
        step(segments, x, recompute=blocks_each is not None)
    return live.peak / x.nbytes


# %%
segment_sizes = [1, 2, 3, 4, 6, 9, 12, 18, 36]
curves = {inside: [peak_by_hand(36, size, inside) for size in segment_sizes] for inside in (1, 4)}
for inside, peaks in curves.items():
    best = segment_sizes[np.argmin(peaks)]
    print(
        f"inside {inside}: least memory with {best} blocks per segment; sqrt(36 / {inside}) = {math.sqrt(36 / inside):g}"
    )
labels = {f"each block saves {inside} tensor{'s' * (inside > 1)}": peaks for inside, peaks in curves.items()}
axis_labels = "blocks in a checkpointed segment", "peak (inputs of a block)"
_ = plots.lines(segment_sizes, labels, *axis_labels, title="36 blocks")

# %% [markdown]
# Each curve has a minimum. There are *n* blocks, *k* of them per segment, and the inside of a block is *I* times as large as its input. So *n / k* checkpoints (the segments' inputs) are kept. While a segment is recomputed, the insides of its *k* blocks are in memory as well: as many bytes as *k I* inputs. The sum *n / k + k I* is smallest where both parts are equal, *n / k = k I*, which gives
#
# > k = √(n / I)
#
# With I = 1 this *k* is the textbooks' square root of the depth, √n. Both parts of the sum are then √n, so the peak grows like √n. With a larger inside the segments should be shorter.
#
# The right end of the curves is one segment for all 36 blocks. It keeps a single input, but then its recomputation makes all insides at once. The 2023 guide mentions another extreme: *forget all* activations, and recompute each when it is needed. Then only the input of the first block is kept. So for each block in backward you run all blocks before it again, and keep the inside of this one block only. For 16 blocks the last block takes 16 forwards, the one before it 15, the first one 1: together 136 instead of 16. A backward has the matmuls of two forwards (lesson 02), so expect (136 + 32) / (16 + 32) = 3.5 times the matmuls.


# %%
def forget_all(blocks, x):
    gradient = None
    for number in reversed(range(len(blocks))):
        with torch.no_grad():
            h = torch.nn.Sequential(*blocks[:number])(x)  # from x again: nothing was kept
        out = blocks[number](h.requires_grad_(number > 0))
        out.backward(2 * out.detach() / out.numel() if gradient is None else gradient)  # first: of the mean square
        gradient = h.grad
    return torch.cat([weight.grad.flatten() for block in blocks for weight in block.parameters()])


sixteen, gradients, matmul_flops = [Block() for _ in range(16)], {}, {}
step(sixteen, x)  # allocates the gradients, so they do not count
ways = {"kept": lambda: step(sixteen, x, recompute=False), "forgotten": lambda: forget_all(sixteen, x)}
for name, work in ways.items():
    with LiveBytes() as live:
        gradients[name] = work()
    with FlopCounterMode(display=False) as counter:
        work()
    matmul_flops[name] = counter.get_total_flops()
    print(f"16 blocks, all {name}: peak {live.peak / x.nbytes:.0f} inputs")
torch.testing.assert_close(gradients["forgotten"], gradients["kept"])
more_matmuls = matmul_flops["forgotten"] / matmul_flops["kept"]
print(f"all forgotten: {more_matmuls:.2f} times the FLOPs of matmuls")

# %% jupyter={"source_hidden": true}
sixes = [Block(inside=1) for _ in range(36)]
step([torch.nn.Sequential(*sixes[i : i + 6]) for i in range(0, 36, 6)], x)
assert {block.runs for block in sixes} == {2}  # measured: this is the answer

# %%
exercises.question(
    lab,
    "longer segments",
    "36 blocks, in segments of 6 instead of 1. How often does each block run forward in a training step?",
    {
        "Twice, as with segments of 1.": "Each segment is run again once, from its own input, and every block is in "
        "one segment. The distance changes the memory, not the arithmetic.",
        "Up to 7 times: to have a block's inside, all blocks before it in the segment run again.": "That would be "
        "so if every block were recomputed by itself. The segment runs again as one, and keeps all its insides.",
        "Fewer times than with segments of 1: there are only 6 checkpoints.": "Fewer inputs are kept. What is not kept "
        "is computed again, and that is still every block.",
    },
    right="Twice, as with segments of 1.",
)

# %% [markdown]
# Next we draw the peak against the number of blocks, with I = 4 and three ways: nothing checkpointed, every block checkpointed, and segments of √n blocks. (√n is the textbooks' length; for I = 4 the best length is half of it.)

# %%
depths = [4, 9, 16, 36, 64]
schemes = {"none": lambda depth: None, "every block": lambda depth: 1, "segments of √n blocks": math.isqrt}
growth = {name: [peak_by_hand(depth, size_of(depth)) for depth in depths] for name, size_of in schemes.items()}
ax = plots.lines(depths, growth, "blocks", "peak (inputs of a block)", title="Memory against depth")
ax.loglog()
ax.minorticks_off()
ax.set_xticks(depths, depths)
ax.yaxis.set_major_formatter("{x:g}")


def slope(depths, peaks):
    return np.polyfit(np.log(depths), np.log(peaks), 1)[0]


for name, peaks in growth.items():
    print(f"{name}: memory grows as depth to the power of {slope(depths, peaks):.2f}")

# %% [markdown]
# *Every block* keeps n inputs, which grow with the depth, and one inside, which does not. So its printed power is below 1; with very many blocks it approaches 1. (*None* is slightly below 1 as well, because the temporaries of backward do not grow with the depth.) Look for the number of blocks at which the curve of *every block* meets that of the segments. A model with fewer blocks needs less memory with *every block* than with segments of √n blocks, because a segment has several insides. The larger the inside, the more blocks it takes until the curves meet. In a transformer the inside of a layer is very large, so there the curves would meet only at very many layers.
#
# ## Baseline
#
# We train with a batch of 4, nothing checkpointed.

# %%
vanilla = lab.train("none", per_device_train_batch_size=4, measure=("memory",))
vanilla

# %% [markdown]
# ## Change one thing
#
# You set one flag, `gradient_checkpointing=True`. The library then runs each layer of the model through the same `checkpoint` function that you used.

# %%
every = lab.train(
    "every layer",
    per_device_train_batch_size=4,
    gradient_checkpointing=True,  # new
    measure=("memory",),
)
explorers.timeline(vanilla, every)


def in_percent():
    checkpointed = estimate(lab.task, per_device_train_batch_size=4, gradient_checkpointing=True)
    return 100 * checkpointed.peak_bytes / estimate(lab.task, per_device_train_batch_size=4).peak_bytes


measured = 100 * every.peak_bytes / vanilla.peak_bytes
widgets.revealed(lab, "every layer", measured, estimate=lab.foresee(in_percent))

# %% [markdown]
# - **Without checkpointing**, activations grow through the forward pass and are freed in backward.
# - **With it**, each layer's inside is freed again during the forward pass, and only the layer's input stays: the curve rises in low steps. Then backward has one hump for each layer that is recomputed.
#
# Checkpointing has a limit, too: if the peak has no activations, there is nothing to gain. The next cell shows this with a single sequence of 32 tokens. It also replaces the default optimizer, a fused AdamW, by an AdamW that needs large temporaries (`adamw_torch`). So the peak is in the optimizer's update (phase `step` in the table):

# %%
short = dict(task=lab.task.replace(seq_len=32), optim="adamw_torch", measure=("memory",), per_device_train_batch_size=1)
small = [lab.train("short, none", **short), lab.train("short, every layer", gradient_checkpointing=True, **short)]
print(f"{1 - small[1].peak_bytes / small[0].peak_bytes:z.1%} saved")
plots.table(small)

# %% jupyter={"source_hidden": true}
assert vanilla.peak_bytes - every.peak_bytes < vanilla.memory.breakdown["activations"]  # measured: this is the answer

# %%
exercises.question(
    lab,
    "what it shrinks",
    "A training peaks in backward: 60 % of it are weights, gradients and optimizer states, 40 % are activations. What "
    "is the most that checkpointing every layer can save?",
    {
        "Nearly all of it: only one layer at a time is in memory.": "One layer's inside at a time, but the weights of "
        "all layers, with their gradients and states, stay where they are.",
        "About half of the whole.": "There is no such rule. What can be saved depends on what the peak is made of.",
        "Somewhat less than 40 %.": "Only the activations shrink, and the layers' inputs and one layer's inside are "
        "left of them. The rest needs other means: lessons 08 and 09.",
    },
    right="Somewhat less than 40 %.",
)

# %% [markdown]
# So weights, gradients and optimizer states are untouched: *checkpointing shrinks activations and nothing else*.
#
# ## Which layers are worth recomputing
#
# Recomputing a part of the model is a good trade if it frees many bytes and needs little arithmetic. Which parts of a transformer save the bytes, and which do the matmuls? The next cell finds out for one forward pass. Hooks keep the list `at_work`: the parts whose forward is running now, from the outermost to the innermost. torch calls `count_bytes` with each tensor that it saves for backward. Each saved byte and each FLOP is counted for the innermost part.


# %%
model, at_work, saved, flops, in_layers = bert.build_model(), ["outside"], Counter(), Counter(), Counter()
seen = {weight.data_ptr() for weight in model.parameters()}


def count_bytes(tensor):
    size = tensor.nbytes * (tensor.data_ptr() not in seen)
    saved[at_work[-1]] += size
    in_layers["BertLayer" in at_work] += size
    seen.add(tensor.data_ptr())
    return tensor


def count_flops(module, *results):
    flops[at_work[-1]] += counter.get_total_flops() - flops.total()
    at_work.pop() if len(results) == 2 else at_work.append(type(module).__name__)


for module in model.modules():
    module.register_forward_pre_hook(count_flops)  # calls count_flops(module, inputs)
    module.register_forward_hook(count_flops)  # calls count_flops(module, inputs, output)
with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(count_bytes, lambda x: x):
    model(**bert.batch(4))
rows = [[part, f"{size / saved.total():.0%}", f"{flops[part] / flops.total():.0%}"] for part, size in saved.items()]
print(f"each of the 4 layers saves about {in_layers[True] / 4 / (4 * 256 * 256 * 4):.0f} times its input")  # in bytes
plots.Table(["part", "of the saved bytes", "of the matmuls' FLOPs"], sorted(rows, key=lambda row: -saved[row[0]])[:5])

# %% [markdown]
# A part is worth recomputing if its share of the saved bytes is larger than its share of the FLOPs. The counter of FLOPs knows only matmuls. So operations that work element by element (normalization, dropout, the activation function) have 0 %: they do little arithmetic, although on a CPU they take some time. What attention saves grows with the square of the sequence length, so checkpointing saves most for long sequences. Methods that choose single operations, not whole layers, recompute only the operations that are worth it. (A fused attention kernel saves less for backward in any case: lesson 11.)
#
# Does the position matter, too? The inside of the *last* layer is freed at the end of the forward pass and made again at the start of backward. At that moment everything else still waits in memory. So the peak contains the last layer's inside with or without a checkpoint: recomputing the last layer costs time and saves nothing. You will use this in the challenge.
#
# ## The library's ways
#
# The Trainer's argument `gradient_checkpointing_kwargs` offers variants:
#
# - `use_reentrant=True` uses torch's older mechanism of recomputation.
# - `every_n_layers` checkpoints only each n-th layer, since transformers 5.16 ([#48200](https://github.com/huggingface/transformers/pull/48200)). `every_n_layers=2` checkpoints every other layer, and the other layers keep their whole inside: this takes more memory and is faster. It does not make segments of two layers.
# - `offload` moves the checkpoints from the GPU to the *host's* memory, that of the CPU. It came with 5.17 and needs a GPU ([#48444](https://github.com/huggingface/transformers/pull/48444)).
#
# With older versions the picture has no bars for the last two variants; without a GPU it has no bar for `offload`.

# %%
enable = getattr(PreTrainedModel, "activation_checkpointing_enable", PreTrainedModel.gradient_checkpointing_enable)
takes = inspect.signature(enable).parameters
ways = {"every layer, reentrant": {"use_reentrant": True}}
if "every_n_layers" in takes:
    ways["every 2nd layer"] = {"every_n_layers": 2}
if "offload" in takes and lab.machine.kind == "cuda":
    ways["every layer, offloaded"] = {"offload": True}
runs = [vanilla, every]
for name, options in ways.items():
    arguments = dict(per_device_train_batch_size=4, gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
    runs.append(lab.train(name, measure=("memory",), **arguments))
_ = plots.memory(runs)

# %% [markdown]
# ## What held
#
# ### Memory and cost
#
# The 2023 guide measured memory with accumulation switched on, so we do too: 4 x 2, two passes of 4 samples per step (lesson 05). For the cost, the steps of two runs alternate. On a CPU the model has half of its layers and the sequences have 128 tokens, to save your time.
#
# Look closely at how a cost is stated. The 2023 guide's own figures, 85.47 s with checkpointing against 66.03 s without, and 5.99 samples/s against 7.75, are 29 % more time *and* 23 % less throughput: the same fact twice.
#
# What would you expect? A backward pass has twice the matmuls of its forward pass, so a step is three parts: one forward, two backward. Recomputing runs the forward again and makes it four parts: 25 % less throughput. But seconds need not follow the matmuls. So the note of each claim about the cost gives two more numbers. The first is the forward's share of the seconds of forward and backward, without the optimizer's update. The second is a prediction. It takes the seconds of forward, backward and update, adds one more forward, and gives the fraction of the throughput that is left. Two things change these numbers:
#
# - Dropout makes the forward pass longer on a CPU, which draws random numbers slowly; on a GPU they take hardly any time. So the runs on a CPU leave dropout out. The note of the second claim about the cost (`checkpointing-cost-2022`) gives the forward's share with dropout.
# - The optimizer's update takes as long with recomputation as without. The larger the update's share of the step, the smaller the cost in percent. With short sequences this share is larger.

# %% tags=["claim"]
stacked = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2, measure="peak")
before = lab.train("4 x 2", **stacked)
after = lab.train("4 x 2, every layer", gradient_checkpointing=True, **stacked)
note = f"without accumulation: {every.peak_bytes / vanilla.peak_bytes:.3f}"
claims.check("checkpointing-memory", after.peak_bytes / before.peak_bytes, note=note)


# %% tags=["claim"]
def parts(task):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())  # as in the comparison
    model, batch, rows = task.build_model().to(device), task.batch(4, device), []
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(8):
        rows.append([time.perf_counter()])
        loss = model(**batch).loss
        for work in (lambda: None, loss.backward, optimizer.step):  # the first time is that of the forward above
            work()
            torch.cuda.synchronize() if device == "cuda" else None
            rows[-1].append(time.perf_counter())
    return np.diff(rows[2:]).min(0).tolist()  # the shortest time of each part; the first two steps warm up


def predicted(task):
    forward, backward, update = lab.run(parts, task=task, measure=("none",)).value
    throughput = 1 / (1 + forward / (forward + backward + update))
    return (
        f"forward is {forward / (forward + backward):.0%} of forward and backward; "
        f"one more forward predicts {throughput:.2f} of the throughput"
    )


# %% tags=["claim"]
task = plain = lab.task
if lab.machine.kind == "cpu":
    half = {"num_hidden_layers": 2, "vocab_size": 4000}  # a small vocabulary: the update keeps its share
    task = lab.task.replace(seq_len=128, config=half)
    plain = task.replace(config={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
timed = dict(task=plain, per_device_train_batch_size=4, measure=("time",), steps=1)
recomputed = lab.train("every layer", gradient_checkpointing=True, **timed)
speed = lab.compare(lab.train("none", **timed), recomputed).speed_ratio
note = f"{speed.value - 1:+.0%} throughput is {1 / speed.value - 1:+.0%} time; {predicted(plain)}"
display(claims.check("checkpointing-cost", speed, note=note))
claims.check("checkpointing-cost-2022", speed, note=f"with dropout {predicted(task)}")

# %%
exercises.question(
    lab,
    "time and throughput",
    "A training does 3 samples in the time in which it did 4 before: 25 % less throughput. Its 3 days become ...",
    {
        "3.75 days: 25 % more.": "25 % is the share of the old speed that is missing. At three quarters of the speed, "
        "the time is divided by 3/4.",
        "4 days: 33 % more.": "The same fact stated the other way, and the larger number of the two. Ask which one a "
        "report means before you compare two reports.",
        "3 days or less: the memory saved allows a larger batch, which makes up for it.": "It may be, if a "
        "larger batch is faster per sample. But that is another recipe, and has to be measured as one.",
    },
    right="4 days: 33 % more.",
)


# %% [markdown]
# ### The same training
#
# Now a small model trains with three seeds, in three ways: without checkpoints, with every layer checkpointed, and with every layer checkpointed but the random state not put back.


# %%
def learnt(task, steps=30):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    ways, losses, gradients = (None, {}, {"preserve_rng_state": False}), [[], [], []], []
    for seed in range(3):
        for options, curves in zip(ways, losses):
            own = task.replace(seed=seed)
            model, data = own.build_model().to(device), own.batch(16 * steps, device)
            if options is not None:
                enable(model, {"use_reentrant": False} | options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
            torch.manual_seed(seed)
            curves.append([])
            for start in range(0, 16 * steps, 16):
                loss = model(**{name: rows[start : start + 16] for name, rows in data.items()}).loss
                loss.backward()
                if len(gradients) < 3 and start == 0:  # of the first step, the three ways
                    gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
                optimizer.step()
                optimizer.zero_grad()
                curves[-1].append(loss.item())
    return losses, [((other - gradients[0]).norm() / gradients[0].norm()).item() for other in gradients[1:]]


# %% tags=["claim"]
thin = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 200}
learnable = Task("bert-tiny", seq_len=32, data="learnable", config=thin)  # dropout is on
losses, (restored, reset) = lab.run(learnt, task=learnable, measure="value").value
curves = dict(zip(["no checkpoints", "every layer", "every layer, random state lost"], losses))
_ = plots.losses(curves, title="Three seeds: the median and their range")
off = [np.abs(np.subtract(other, losses[0])).max() for other in losses[1:]]
print(f"largest difference from a step's loss without checkpoints: {off[0]:g}; random state lost: {off[1]:.2g}")
claims.check("checkpointing-same-gradient", restored, note=f"{reset:.3f} if the random state is not put back")


# %% [markdown]
# Equal gradients are equal trainings: the first two curves and their bands coincide, and the first number of the printed line says how exactly. With the random state lost it was another training, and no message said so. (The note of the claim has this gradient's relative error for the BERT. The percentage in *By hand* was for the three blocks.)
#
# ### The square root, and the flag
#
# The square root comes from the paper that proposed checkpoints in segments of √n blocks. The next cell measures how the activations grow in this scheme, with the lab's own meter. The meter counts activations only. `LiveBytes` also counts the temporaries of backward, which do not grow with the depth, so its power (*by hand*) is lower.


# %% tags=["claim"]
def stack(depth):
    def one_step(task):
        torch.manual_seed(0)
        h = x.to("cuda" if torch.cuda.is_available() else "cpu")
        blocks, each = [Block().to(h.device) for _ in range(depth)], math.isqrt(depth)
        for i in range(0, depth, each):
            h = checkpoint(torch.nn.Sequential(*blocks[i : i + each]), h, use_reentrant=False)
        h.sum().backward()

    return one_step


runs = [lab.run(stack(depth), f"{depth} blocks", measure=("memory",)) for depth in (4, 16, 64)]
power = slope([4, 16, 64], [run.memory.breakdown["activations"] for run in runs])
note = f"by the lab's meter; {slope(depths, growth['segments of √n blocks']):.2f} by hand"
claims.check("checkpointing-sqrt", power, note=note)

# %% [markdown]
# The 2022 guide promises the square root for the library's flag as well, and the 2023 guide says that only a fraction of the activations is computed again. The next cell decides three claims. The first two are about a BERT under the flag:
#
# - How fast do the bytes that wait for backward, after the forward pass, grow with the number of layers?
# - What share of the layers runs forward twice?
#
# The third claim is about *forget all*, and uses the matmuls that were counted above.


# %% tags=["claim"]
def flagged(depth):
    thin = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": depth, "use_cache": False}
    model, runs = Task("bert-tiny", seq_len=32, config=thin).build_model(), Counter()
    enable(model, {"use_reentrant": False})
    for number, layer in enumerate(model.base_model.encoder.layer):
        layer.attention.register_forward_pre_hook(lambda *_, number=number: runs.update([number]))
    with LiveBytes() as live:
        loss = model(**Task("bert-tiny", seq_len=32).batch(8)).loss
    return live.now, runs, loss  # these bytes have to wait for backward


layers = 8, 32, 128
waiting, runs, losses = zip(*[flagged(depth) for depth in layers])
losses[0].backward()
display(claims.check("checkpointing-flag-sqrt", slope(layers, waiting)))
display(claims.check("checkpointing-fraction", sum(count == 2 for count in runs[0].values()) / layers[0]))
claims.check("checkpointing-forget-all", more_matmuls)

# %% [markdown]
# ## Explore
#
# Apply the formula to any number of layers and any inside. The curve *together* is the sum of the other two: the kept checkpoints and the insides. The best segment is where this curve is lowest. Leave the inside at its first value, about that of the transformer layers above, and change only the number of layers. With few layers, segments of one layer are best. From how many layers on are longer segments better?


# %% tags=["widget"]
def draw(layers, inside):
    counts = [count for count in range(1, layers + 1) if layers % count == 0]
    lines = {"checkpoints kept": [layers / count for count in counts], "insides": [count * inside for count in counts]}
    lines["together"] = [stored + recomputed for stored, recomputed in zip(*lines.values())]
    title = f"√(n / I) = {math.sqrt(layers / inside):.2g} layers per segment; no checkpoints: {layers * inside} inputs"
    ax = plots.lines(counts, lines, "layers in a segment", "inputs of a layer", title=title)
    ax.loglog()
    ax.minorticks_off()
    ax.set_xticks(counts, counts)
    ax.yaxis.set_major_formatter("{x:g}")
    return ax


_ = widgets.explore(draw, layers=[24, 4, 12, 48, 96, 256], inside=[30, 15, 4, 1])

# %% [markdown]
# ## Exercise 1: place the checkpoints
#
# 48 blocks, each of which saves 3 tensors as large as its input. How many blocks should a segment have? (The check measures the peak with `peak_by_hand`, so its result contains temporaries as well.)

# %% jupyter={"source_hidden": true}
exercises.hint(
    "There are 48 / k inputs to keep, and k blocks' insides while one segment is recomputed.",
    "The sum is smallest where both parts are equal: k = √(n / I). What is I?",
    "n / I is 48 / 3.",
)

# %% tags=["exercise"]
answer = None  # a divisor of 48


# %% tags=["check"]
tried = {}  # the peak, by the number of blocks in a segment


def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if answer not in range(1, 49) or 48 % answer:
        return exercises.wrong(f"{answer} does not divide 48")
    for count in {2, 3, 4, 6, 8, answer} - tried.keys():
        tried[count] = peak_by_hand(48, count, 3)
    if tried[answer] <= min(tried.values()):
        return exercises.right(f"the peak is {tried[answer]:.1f} inputs, the least of all")
    return exercises.wrong(
        f"the peak is {tried[answer]:.1f} inputs; the best has {min(tried.values()):.1f}. What is I?"
    )


exercises.check(lab, "place the checkpoints", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check, solution=4, mistake=8)

# %% [markdown]
# ## Exercise 2: the challenge
#
# A model has 8 layers, numbered from 0. Save at least half of the memory that checkpointing all layers saves. That is, your peak must not exceed the limit that the answer's cell prints. The limit is halfway between the peak with no layer checkpointed and the peak with all of them. And recompute **at most half** of the layers. (Half of a forward pass is a sixth of the matmuls of a step.) Which layers do you checkpoint?

# %% jupyter={"source_hidden": true}
exercises.hint(
    "It is not only how many. Where is the peak: at which moment of backward is most in memory?",
    "Backward begins with the last layer. If that one is recomputed, which insides are waiting at that moment?",
    "A layer's inside may come back once those of the layers after it are gone: checkpoint the early ones.",
)

# %% tags=["exercise"]
answer = None  # a list of layer numbers, e.g. [0]
layers, eight_layers = 8, Task("bert-tiny", seq_len=64, config={"num_hidden_layers": 8})


def peak_with(chosen):
    def one_step(task):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model, batch = task.build_model().to(device), task.batch(16, device)
        enable(model, {"use_reentrant": False})
        for number, layer in enumerate(model.base_model.encoder.layer):
            layer.gradient_checkpointing = number in chosen  # the flag of this one layer
        model(**batch).loss.backward()

    return lab.run(one_step, f"layers {list(chosen)}", task=eight_layers, measure="peak").peak_bytes


limit_bytes = (peak_with([]) + peak_with(range(layers))) / 2
print(f"limit: {plots.bytes_text(limit_bytes)}")


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if len(set(answer)) > layers // 2:
        return exercises.wrong(f"{len(set(answer))} of {layers} layers run twice: more than half")
    peak = peak_with(answer)
    if peak > limit_bytes:
        return exercises.wrong(f"{plots.bytes_text(peak)}: over the limit. Which layer is recomputed at the peak?")
    return exercises.right(f"{plots.bytes_text(peak)} with {len(set(answer))} of {layers} layers running twice")


exercises.check(lab, "half the layers", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check, solution=list(range(layers // 2)), mistake=list(range(layers - layers // 2, layers)))

# %% [markdown]
# ## Recap
#
# The measured numbers are those of an AMD EPYC with 2 cores (2026-11-29); yours are in the cells above.
#
# - **Every forward runs twice and gives the same gradient**, if the random state is put back. Otherwise the small BERT's gradient was 1.1 % off.
# - **The best segment has √(n / I) blocks.** With segments of √n blocks, activations grew as the depth to the power of 0.50 (by the lab's meter). The inside of a transformer layer is so large that a checkpoint at every layer is best, unless the model has very many layers.
# - **The flag saves activations and nothing else**, for one more forward of every layer: 0.58 times the peak, at 0.76 times the throughput. The bytes that wait for backward grow with the number of layers.
# - **Checkpointing is worth most for long sequences**, and nothing for the last layer. If the peak has no activations, there is nothing to save.

# %% tags=["finish"]
claims.finish()
