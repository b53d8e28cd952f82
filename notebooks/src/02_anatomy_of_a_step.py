# %% [markdown]
# # Where do the microseconds go?
#
# A training step is hundreds of operations. Each takes its time for one of two reasons: it has numbers to compute, or bytes to move. Count both, and you know beforehand which operations a faster chip will help and which it will leave as they are.
#
# **You will see**
# - two ceilings of your machine, measured, and the time of an operation predicted from them
# - every operation of a training step with its FLOPs, its bytes and its seconds, on one picture
# - the guides' three groups put in order, and "backward costs twice the forward" decided in FLOPs, bytes and time

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import time
from collections import namedtuple
from dataclasses import asdict, replace
from operator import attrgetter

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from perf_helpers import Lab, Task, claims, exercises, interleaving, plots, roofline, widgets
from perf_helpers.records import CPU, Ratio

lab = Lab(profile, strict=strict, out=out, lesson="02_anatomy_of_a_step")
DEVICE = lab.machine.kind


def one_thread():
    if DEVICE == "cpu":
        torch.set_num_threads(1)  # one thread is disturbed least, and its seconds of computing can be counted


# %% [markdown]
# ## Idea
#
# A **FLOP** is one operation on floating-point numbers; a multiplication and an addition are two. An operation reads its operands from memory, computes, and writes its result. Its **intensity** is its FLOPs per byte moved.
#
# A device has two ceilings: the FLOPs a second of its matrix unit, and the bytes a second of its memory. Neither is beaten, so an operation takes at least
#
# `max(FLOPs / matrix rate, bytes / bandwidth)`
#
# This is the **roofline** model ([Williams, Waterman and Patterson, 2009](https://doi.org/10.1145/1498765.1498785)). Where the two are equal lies the **ridge**: with fewer FLOPs per byte an operation is bound by bandwidth, with more by arithmetic.
#
# ## Predict
#
# Matrix products do more than 95 % of the arithmetic of a training step.

# %%
widgets.predict(lab, "share of products", "What share of the step's time do they take on this machine?", "%", 0, 100)

# %% [markdown]
# ## By hand: two ceilings
#
# A large copy, and a square matrix product in each precision that the device has instructions for. The copy is larger than any cache; a second, small one stays inside. Of several tries the fastest counts.


# %%
def two_ceilings(task):
    one_thread()
    side, far, near = (1024, 2**26, 2**18) if DEVICE == "cpu" else (8192, 2**28, 2**22)
    source, target = torch.ones(far, device=DEVICE), torch.zeros(far, device=DEVICE)
    small = source[:near].clone(), target[:near].clone()
    works = [lambda: target.copy_(source), lambda: [small[0].copy_(small[1]) for _ in range(50)]]
    for kind in kinds:
        left, right = (torch.randn(side, side, device=DEVICE).to(getattr(torch, kind)) for _ in range(2))
        works.append(lambda left=left, right=right: left @ right)
    seconds = [min(computed for _, computed in taken) for taken in interleaving.in_turns(works, turns=6)]
    bandwidths = [2 * 4 * far / seconds[0], 50 * 2 * 4 * near / seconds[1]]  # bytes read and bytes written
    return bandwidths, [2 * side**3 / each for each in seconds[2:]]


def ceilings_of_library(task):
    one_thread()
    return [asdict(roofline.ceilings(kind, DEVICE)) for kind in kinds]


kinds = ["float32"] + ["float16"] * (DEVICE == "cuda") + ["bfloat16"] * bool(lab.machine.native_bf16)
(memory_rate, cache_rate), rates = lab.run(two_ceilings, measure=("none",)).value
library = lab.run(ceilings_of_library, measure=("none",)).value

# %%
found = {each["dtype"]: roofline.Ceilings(**each) for each in library}
copied = max(memory_rate, *(each.bytes_per_second for each in found.values()))
ceilings, rows = {}, []
for rate, (kind, each) in zip(rates, found.items()):
    best = max(rate, each.flops_per_second)  # of all tries: a ceiling is what was never beaten
    ceilings[kind] = replace(each, flops_per_second=best, bytes_per_second=copied)
    measured = rate, each.flops_per_second, memory_rate, each.bytes_per_second
    rows.append([kind, *(value / 1e9 for value in measured), ceilings[kind].ridge])
roof = ceilings["float32"]
print(f"a copy that fits into a cache: {cache_rate / 1e9:.3g} GB/s")
header = ["products in", "GFLOP/s by hand", "by roofline.ceilings", "copy GB/s by hand", "by the library", "ridge"]
plots.Table(header, rows)

# %% [markdown]
# Read the last column: so many FLOPs a byte an operation needs before arithmetic, not memory, sets its time. A faster precision raises the ridge, and leaves more operations waiting for memory.
#
# ## By hand: three operations
#
# Count first. A product of *m x k* with *k x n* has 2mkn FLOPs. LayerNorm does about 8 for each element (mean, variance, subtract, divide, scale, shift). GELU does 5, if an `erf` counts as one. Both read each element once and write it once. The results go into tensors that exist already, for a new one of this size would also cost the operating system's page faults.


# %%
m, k, n = (2048, 1024, 1536) if DEVICE == "cpu" else (8192, 4096, 12288)
elements = (2**25 if DEVICE == "cpu" else 2**28) // (1 if lab.profile.name != "tiny" else 32)
counts = {
    "matrix product": (2 * m * k * n, 4 * (m * k + k * n + m * n)),
    "LayerNorm": (8 * elements, 2 * 4 * elements),
    "GELU": (5 * elements, 2 * 4 * elements),
}


def three_operations(task):
    one_thread()
    x = torch.randn(elements // 1024, 1024, device=DEVICE)
    y, mean, scale = torch.empty_like(x), *(torch.empty(len(x), 1, device=DEVICE) for _ in range(2))
    left, right = torch.randn(m, k, device=DEVICE), torch.randn(k, n, device=DEVICE)
    product = torch.empty(m, n, device=DEVICE)
    aten = attrgetter("ops.aten")(torch)  # its operations can be told where the result goes
    gelu = [lambda: aten.gelu.out(x, out=y)]
    works = [*gelu, lambda: y.copy_(x), *gelu, lambda: torch.mm(left, right, out=product)]
    works += [lambda: aten.native_layer_norm.out(x, [1024], None, None, 1e-5, out0=y, out1=mean, out2=scale)]
    return interleaving.in_turns(works, turns=6)


# %% tags=["claim"]
processes = [lab.run(three_operations, measure=("none",)).value for _ in range(1 if DEVICE == "cpu" else 3)]
fastest = [min(computed for _, computed in taken) for taken in processes[0]]
measured = {"matrix product": fastest[3], "LayerNorm": fastest[4], "GELU": min(fastest[0], fastest[2])}
rows = []
for name, (flops, moved) in counts.items():
    least = roof.seconds(flops, moved)
    bound = "bandwidth" if flops / moved < roof.ridge else "arithmetic"
    rows.append([name, flops / moved, bound, 1e3 * least, 1e3 * measured[name], measured[name] / least])
print(f"a copy of as many bytes as GELU moves took {1e3 * fastest[1]:.3g} ms")
header = ["operation", "FLOPs per byte", "bound by", "predicted (ms)", "measured (ms)", "measured / predicted"]
display(plots.Table(header, rows))

missing = None if DEVICE == "cuda" else "needs an NVIDIA GPU"
against_copy = Ratio.of_turns([taken[:3] for taken in processes], CPU, 1.02)  # the copy's speed against GELU's
claims.check("activations-bandwidth", against_copy, missing=missing)


# %% [markdown]
# The model gives the *least* time; the last column says how close each kernel comes. Near 1, one ceiling explains it. (Below 1, a neighbour had part of the core while the ceiling was measured, or the library likes this size better.) Well above 1, a third thing does: one core that computes an `erf` or sums up rows is slower than the matrix unit, which is the only rate that we measured. On a GPU thousands of cores share that work, and the guides say that activations are usually limited by bandwidth.
#
# ## Baseline: a whole step, operation by operation
#
# A **dispatch mode** is an object to which torch hands every operation, of forward and backward alike, just before a kernel takes it; it may look, count and time, and has to call the operation. Ours counts. What is not a product gets a number of FLOPs for each element of its largest tensor, from a table that anybody can check on paper.
#
# The same mode takes the time. On a CPU: the seconds that this thread computed. On a GPU: two events around the kernel, behind a short sleep on the device. While the device sleeps the kernel gets into its queue, so that its launch is not timed. Attention runs in its plain form here, for a fused kernel would be a single operation.

# %%
GROUPS = ("contraction", "normalization", "element-wise")
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # which operand is the left matrix
PER_ELEMENT = {  # simple operations, then exp, erf and tanh
    **{"native_layer_norm": (8, 0), "native_layer_norm_backward": (13, 0)},
    **{"_softmax": (4, 1), "_softmax_backward_data": (4, 0), "tanh": (0, 1), "tanh_backward": (3, 0)},
    **{"gelu": (4, 1), "gelu_backward": (9, 2), "native_dropout": (3, 0), "native_dropout_backward": (2, 0)},
}
MOVES = "clone copy_ _to_copy embedding embedding_dense_backward gather cat select_backward zeros ones_like zeros_like"
OVERWRITES = ("bernoulli_", "zero_", "fill_")  # they do not read the tensor that they change
FIELDS = "phase name group flops special bytes_read bytes_written seconds"


class Row(namedtuple("Row", FIELDS, defaults=[None])):
    moved = property(lambda row: row.bytes_read + row.bytes_written)


def group(name):
    if name in PRODUCTS:
        return "contraction"
    return "normalization" if "norm" in name or "softmax" in name else "element-wise"


# %%
def counted(phase, operation, given, made):
    name = operation.overloadpacket.__name__
    if operation.is_view or name.startswith(("empty", "new_empty", "_unsafe_view")):
        return [phase, name, group(name), 0, 0, 0, 0]  # no byte moves
    read, written = (
        sum(min(part.nbytes, part.untyped_storage().nbytes()) for part in parts) for parts in (given, made)
    )
    if name == "embedding":
        read = written  # the rows that it returns, not the whole table
    if name in OVERWRITES:
        read = 0
    largest = max((part.numel() for part in (*given, *made)), default=0)
    if name in PRODUCTS:
        simple, special = 2 * made[0].numel() * given[PRODUCTS[name]].shape[-1], 0
    else:
        simple, special = (
            largest * each for each in PER_ELEMENT.get(name, (0, 0) if name in MOVES.split() else (1, 0))
        )
    return [phase, name, group(name), simple + special, special, read, written]


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# %%
def moment():
    if DEVICE == "cpu":
        return time.thread_time()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Recorder(TorchDispatchMode):
    def __init__(self, phase):
        super().__init__()
        self.phase, self.rows, self.moments = phase, [], []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if DEVICE == "cuda":
            torch.cuda._sleep(200_000)  # cycles, some 0.1 ms
        begin = moment()
        result = operation(*args, **(kwargs or {}))
        self.moments.append((begin, moment()))
        self.rows.append(counted(self.phase, operation, tensors((args, kwargs)), tensors(result)))
        return result

    def seconds(self):
        return [end - begin if DEVICE == "cpu" else begin.elapsed_time(end) / 1e3 for begin, end in self.moments]


# %%
def one_step(task, samples):
    one_thread()
    model = task.build_model(attn_implementation="eager").to(DEVICE)
    batch = task.batch(samples, DEVICE)

    def recorded():
        model.zero_grad()
        with Recorder("forward") as forward:
            loss = model(**batch).loss
        with Recorder("backward") as backward:
            loss.backward()
        return forward, backward

    return recorded


def count(task, samples=4):
    return [row for part in one_step(task, samples)() for row in part.rows]


def seconds(task):
    recorded, passes = one_step(task, 4), []
    interleaving.in_turns([lambda: passes.append(recorded())], turns=4)
    each = [[taken for part in both for taken in part.seconds()] for both in passes]
    return [min(tries) for tries in zip(*each)]  # the fastest of five, operation by operation


# %%
def with_seconds(rows, task):
    taken = lab.run(seconds, task=task, measure=("none",)).value
    return [row._replace(seconds=second) for row, second in zip(rows, taken, strict=True)]


def total(rows, what, **where):
    wanted = [row for row in rows if all(getattr(row, name) == value for name, value in where.items())]
    return sum(getattr(row, what) for row in wanted)


step = [Row(*row) for row in lab.run(count, measure=("none",)).value]
assert total(step, "flops", group="contraction") == roofline.model_flops(lab.task, 4)  # torch's own counter agrees
print(f"{len(step)} operations, {sum(row.moved > 0 for row in step)} of them move bytes")
timed = with_seconds(step, lab.task)


# %%
def shares(rows, what):
    return [100 * total(rows, what, group=name) / total(rows, what) for name in GROUPS]


def foreseen():
    least = {name: 0.0 for name in GROUPS}
    for row in step:
        least[row.group] += roof.seconds(row.flops, row.moved)
    return 100 * least["contraction"] / sum(least.values())


assert shares(step, "flops")[0] > 95
share = shares(timed, "seconds")[0]
display(widgets.revealed(lab, "share of products", share, estimate=lab.foresee(foreseen)))
names = {row.name for row in step}
dearest = {name: total(timed, "seconds", name=name) / total(timed, "seconds") for name in names}
top = sorted(dearest, key=dearest.get, reverse=True)[:5]
print("most time:", ", ".join(f"{name} {dearest[name]:.0%}" for name in top))
print(f"with twice the matrix rate and nothing else this step would be at most {1 / (1 - share / 200):.2f} x as fast")

# %% [markdown]
# The last line is Amdahl's law: what is not a product takes as long as before. Now the picture. Each operation is a dot: how many FLOPs per byte, and how many FLOPs a second it reached. Under the slope bandwidth is the limit, under the flat part arithmetic. The larger a dot, the more time it takes. What has no FLOPs (copies, embeddings) has no place on it. One dot has a name: no single operation outside the products takes longer.


# %%
def draw_roofs(ax, kinds):
    x = [2 ** (power / 8) for power in range(-32, 81)]
    for kind, style in zip(kinds, ("-", "--", "-.")):
        flat = ceilings[kind].flops_per_second
        ax.loglog(x, [min(flat, at * roof.bytes_per_second) for at in x], "k", ls=style, lw=1.4, label=f"roof, {kind}")
    near = [min(roof.flops_per_second, at * cache_rate) for at in x]
    ax.loglog(x, near, color="dimgray", ls=":", lw=1.4, label="float32, from a cache")
    ax.set(xlabel="FLOPs per byte moved", ylabel="FLOP/s")


def draw_dots(ax, rows):
    for i, name in enumerate(GROUPS):
        mine = [row for row in rows if row.group == name and row.flops]
        at = [row.flops / row.moved for row in mine]
        sizes = [10 + 4e3 * row.seconds / total(rows, "seconds") for row in mine]
        reached = [row.flops / row.seconds for row in mine]
        ax.scatter(at, reached, sizes, color=plots.SERIES[i], marker="os^"[i], alpha=0.5)
        ax.plot([], [], "os^"[i], color=plots.SERIES[i], label=name)
    longest = max((row for row in rows if row.flops and row.group != "contraction"), key=lambda row: row.seconds)
    at = longest.flops / longest.moved, longest.flops / longest.seconds
    ax.annotate(longest.name, at, (12, -3), textcoords="offset points", fontsize=10)
    ax.legend(frameon=False, fontsize=9, loc="upper left")


# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.6), width_ratios=[3, 2], layout="constrained")
draw_roofs(left, kinds)
draw_dots(left, [row for row in timed if row.seconds > 5e-4 * total(timed, "seconds")])
left.set_title("One training step on the roofline", loc="left")
begin = [0, 0, 0]
for i, name in enumerate(GROUPS):
    parts = [shares(timed, what)[i] for what in ("flops", "moved", "seconds")]
    right.barh(["FLOPs", "bytes", "time"], parts, 0.6, begin, color=plots.SERIES[i], label=name)
    for row, part in enumerate(parts):
        if part > 4:
            right.text(begin[row] + part / 2, row, f"{part:.0f}", ha="center", va="center", color="white", fontsize=11)
    begin = [start + part for start, part in zip(begin, parts)]
right.invert_yaxis()
right.set(xlabel="share of the step (%)")
right.set_title("Who has the FLOPs, who the bytes, who the time", loc="left")
_ = right.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)


# %% tags=["claim"]
def intensity(name, special=1):
    flops = total(step, "flops", group=name) + (special - 1) * total(step, "special", group=name)
    return flops / total(step, "moved", group=name)


def outside(what):
    return 1 - total(step, what, group="contraction") / total(step, what)


display(claims.check("op-classes", outside("flops") / outside("moved")))
per_byte = [intensity(name) for name in GROUPS]
note = "FLOPs per byte: " + ", ".join(f"{name} {value:.3g}" for name, value in zip(GROUPS, per_byte))
note += "; with an exp as ten: " + ", ".join(f"{intensity(name, 10):.3g}" for name in GROUPS)
claims.check("op-groups-ordered", min(per_byte[0] / per_byte[1], per_byte[1] / per_byte[2]), note=note)

# %% [markdown]
# Products stand on the right, under the flat roof; everything else on the left, orders of magnitude lower: few FLOPs for each byte, so no matrix unit can help it. A dot *above* the black slope was served by a cache, which holds the tensors of a small step.
#
# The three groups are those of [Ivanov et al., 2020](https://arxiv.org/abs/2007.00072), from whom the guide has them. Its order is put to the test in FLOPs per byte. One number in our table is a convention: what an `exp` counts. The note has the order if it counts ten.
#
# ## Change one thing: no dropout
#
# The guide says that linear layers have twice the FLOPs in backward, and that a backward is generally about twice as slow. Look at forward and backward apart, first as it was, then with dropout off.

# %%
plain_task = lab.task.replace(config={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})  # new
plain = [Row(*row) for row in lab.run(count, task=plain_task, measure=("none",)).value]
timed_plain = with_seconds(plain, plain_task)


def backward_to_forward(rows, what, **where):
    return total(rows, what, phase="backward", **where) / total(rows, what, phase="forward", **where)


table = []
for label, rows in {"with dropout": timed, "without": timed_plain}.items():
    products = backward_to_forward(rows, "flops", group="contraction")
    spent = [1e3 * total(rows, "seconds", phase=phase) for phase in ("forward", "backward")]
    table.append([label, products, backward_to_forward(rows, "moved"), spent[1] / spent[0], *spent])
masks = {name: total(timed, "seconds", phase="forward", name=name) for name in ("bernoulli_", "native_dropout")}
drawn = sum(masks.values()) / total(timed, "seconds", phase="forward")
print(f"drawing dropout masks: {drawn:.0%} of the forward's time, and nothing of the backward's")
where = [dict(group="contraction", phase=phase) for phase in ("forward", "backward")]
speeds = [total(timed_plain, "flops", **at) / 1e9 / total(timed_plain, "seconds", **at) for at in where]
print("products reach {:.0f} GFLOP/s in forward, {:.0f} in backward".format(*speeds))
header = ["backward / forward", "FLOPs of products", "bytes", "time", "forward (ms)", "backward (ms)"]
plots.Table(header, table)

# %% [markdown]
# Three ratios, three answers. The FLOPs of the products: 2, with or without. The bytes grow by another factor, and time follows whatever each operation is bound by. Dropout draws its masks in forward; backward only multiplies by them. What drawing costs, the first line says: where random numbers are drawn one by one, as on a CPU, it can be as much as the products themselves.

# %%
numbers = [sum(row.name in PRODUCTS for row in plain if row.phase == phase) for phase in ("forward", "backward")]
assert numbers[1] == 2 * numbers[0]  # counted: this is the answer
exercises.question(
    lab,
    "why twice",
    "Why do products have exactly twice the FLOPs in backward?",
    {
        "Backward computes each product again before it differentiates it.": "It reads what forward has kept. "
        "Computing again is what gradient checkpointing adds (lesson 06).",
        "For each product there are two: one gives the gradient of its left operand, one that of its right.": "Both "
        "are needed: the weight's for the optimizer, the input's to go on backwards. Both have the sizes m, k and n.",
        "A gradient has two numbers for each weight.": "It has one. The optimizer's states are two (lesson 01).",
    },
    right="For each product there are two: one gives the gradient of its left operand, one that of its right.",
)

# %% [markdown]
# ## What held
#
# The FLOPs are counted. For the time, forward and backward take turns in several clean processes, attention as the library chooses it.


# %% tags=["claim"]
def turns_of_a_step(task):
    one_thread()
    model, batch, kept = task.build_model().to(DEVICE), task.batch(4, DEVICE), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def forward():
        kept["loss"] = model(**batch).loss

    def backward():
        model.zero_grad()
        kept["loss"].backward(retain_graph=True)

    forward()
    return interleaving.in_turns([backward, forward, backward, optimizer.step], turns=3)


step_turns = [lab.run(turns_of_a_step, task=plain_task, measure=("none",)).value for _ in range(4)]
dropout_turns = [lab.run(turns_of_a_step, task=lab.task, measure=("none",)).value]
floor, flops = 1.05 if DEVICE == "cpu" else 1.02, backward_to_forward(plain, "flops", group="contraction")
took, with_dropout = (Ratio.of_turns([each[:3] for each in all], CPU, floor) for all in (step_turns, dropout_turns))
display(claims.check("backward-twice-forward", flops))
note = f"with dropout {with_dropout.value:.2f}; FLOPs {flops:.2f}; bytes {backward_to_forward(plain, 'moved'):.2f}"
claims.check("backward-takes-twice", took, note=note)

# %% [markdown]
# Two more statements of the guide are counts. *An activation reads once and writes once in forward; in backward it reads twice, the gradient and the output of the forward, and writes once.* And *convolutions have twice the FLOPs in backward too*. The last column asks autograd which tensor it really kept.


# %%
def activation_counts(task):
    table = []
    for name in ("relu", "gelu", "silu", "tanh", "sigmoid"):
        x, gradient = torch.randn(4096, device=DEVICE, requires_grad=True), torch.ones(4096, device=DEVICE)
        function = getattr(torch.nn.functional, name)
        with Recorder("forward") as forward:
            y = function(x)
        kept = "its output" if hasattr(y.grad_fn, "_saved_result") else "its input"
        with Recorder("backward") as backward:
            y.backward(gradient)
        moved = [sum(row[i] for row in part.rows) / x.nbytes for part in (forward, backward) for i in (5, 6)]
        table.append([name, *moved, kept])
    return table


activations = lab.run(activation_counts, measure=("none",)).value
header = ["activation", "forward reads", "writes", "backward reads", "writes", "kept for backward"]
plots.Table(header, activations, caption="in units of the activation's own bytes")


# %% tags=["claim"]
def convolution_flops(input_needs_gradient):
    image = torch.randn(1, 8, 16, 16, requires_grad=input_needs_gradient)
    layer = torch.nn.Conv2d(8, 16, 3)
    with FlopCounterMode(display=False) as forward:
        result = layer(image).sum()
    with FlopCounterMode(display=False) as backward:
        result.backward()
    return backward.get_total_flops() / forward.get_total_flops()


_, *gelu, _ = next(row for row in activations if row[0] == "gelu")
others = ", ".join(f"{row[0]} {sum(row[3:5]) / sum(row[1:3]):.2f}" for row in activations if row[0] != "gelu")
display(claims.check("activation-backward-reads", sum(gelu[2:]) / sum(gelu[:2]), note=f"the others: {others}"))
note = f"of a first layer, whose input needs no gradient: {convolution_flops(False):.2f}"
claims.check("convolution-backward-twice", convolution_flops(True), note=note)

# %% [markdown]
# ReLU, tanh and sigmoid keep their output; GELU and SiLU cannot be undone from it and keep their input. Either way two tensors are read.
#
# ## Model FLOPs utilization
#
# How much of the matrix unit does a whole step use? PaLM's authors ([Chowdhery et al., 2022, appendix B](https://arxiv.org/abs/2204.02311)) divide the FLOPs that the *model* needs by what the device could have done in that time:
#
# `MFU = model FLOPs / (step seconds x matrix rate)`
#
# They take the rate of the data sheet; we take the one measured above, so ours comes out higher. Model FLOPs are products only, without what checkpointing computes again. The rule of thumb for them is 6 FLOPs for each parameter and token: 2 forward, 4 backward.

# %%
config, samples = lab.task.build_config(), 4
tokens, length = samples * lab.task.length(), lab.task.length()
layers = lab.task.build_model(device="meta").named_modules()
linear = {name: layer.weight.numel() for name, layer in layers if isinstance(layer, torch.nn.Linear)}
head = sum(size for name, size in linear.items() if "encoder" not in name)  # sees one token of each sequence
parts = {
    "6 x weights of the layers' products x tokens": 6 * (sum(linear.values()) - head) * tokens,
    "6 x weights of the head x sequences": 6 * head * samples,
    "attention: 12 x layers x width x length x tokens": 12
    * config.num_hidden_layers
    * config.hidden_size
    * length
    * tokens,
}
model_flops = roofline.model_flops(lab.task, samples)
assert sum(parts.values()) == model_flops  # to the last FLOP
rule = 6 * lab.task.parameters() * tokens
rows = [[name, f"{value / 1e9:.4g}"] for name, value in parts.items()]
rows += [["model FLOPs", f"{model_flops / 1e9:.4g}"], ["6 x all parameters x tokens", f"{rule / 1e9:.4g}"]]
plots.Table(["a training step of 4 sequences", "GFLOPs"], rows)


# %%
def utilization(processes):
    fastest = [[min(computed for _, computed in taken) for taken in process] for process in processes]
    backward, forward, again, update = (min(column) for column in zip(*fastest))
    return model_flops / ((forward + min(backward, again) + update) * roof.flops_per_second)


for label, processes in {"without dropout": step_turns, "with dropout": dropout_turns}.items():
    print(f"MFU {label}: {utilization(processes):.0%} of the measured matrix rate in float32")


def seen(work):
    with FlopCounterMode(display=False) as counter:
        try:
            work()
        except (RuntimeError, NotImplementedError) as error:
            return f"not on this machine ({type(error).__name__})"
    return f"{counter.get_total_flops():,} FLOPs"


tokens_in, experts = torch.randn(64, 32, dtype=torch.bfloat16), torch.randn(4, 32, 16, dtype=torch.bfloat16)
ends, heads = torch.tensor([16, 32, 48, 64], dtype=torch.int32), torch.randn(1, 2, 64, 16)
print("4 experts one by one:", seen(lambda: [part @ each for part, each in zip(tokens_in.split(16), experts)]))
print("the same, grouped:", seen(lambda: torch._grouped_mm(tokens_in, experts, offs=ends)))
print("attention by its products:", seen(lambda: (heads @ heads.mT).softmax(-1) @ heads))
print("the same, fused, on a CPU:", seen(lambda: torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)))

# %%
tiny = Task("bert-tiny", seq_len=32, config={"use_cache": False})
model = tiny.build_model()
getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
with FlopCounterMode(display=False) as executed:
    model(**tiny.batch(4)).loss.backward()
assert executed.get_total_flops() > 1.2 * roofline.model_flops(tiny, 4)  # counted: more is executed, no more is needed
exercises.question(
    lab,
    "utilization and checkpointing",
    "You switch on gradient checkpointing, and a step takes a third longer. What happens to the model FLOPs utilization?",
    {
        "It rises: the matrix unit has more to do.": "It has, but the model needs no more than before. What counts "
        "executed FLOPs is another figure, the hardware FLOPs utilization.",
        "It stays: more FLOPs in more time.": "Only the time grew. FLOPs done twice are counted once.",
        "It falls by a quarter: the same model FLOPs in 4/3 of the time.": "It measures progress, not business.",
    },
    right="It falls by a quarter: the same model FLOPs in 4/3 of the time.",
)

# %% [markdown]
# The rule misses twice. It counts embeddings, which are looked up and never multiplied, and it leaves out attention, whose products have no weights and grow with the length. In a large model with short sequences both are small.
#
# The other lines plant two blind spots of torch's own counter. It knows products by name, and a name that it does not know counts 0, without a warning. So the products of mixture-of-experts layers, done as one grouped product, may be missed, and so may an attention kernel. `roofline.model_flops` refuses the first and asks for plain attention.
#
# ## "My GPU is at 100 %"
#
# `nvidia-smi` and `torch.cuda.utilization` tell the percentage of time in which [one or more kernels were executing](https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html). Here is a loop that adds 1 to a large tensor, on your device, beside a product. (More than 100 % of the bandwidth? A CPU fetches a line before it writes to it, so our copy moved three bytes for two that we counted. Adding in place does not.)


# %%
def two_loops(task):
    one_thread()
    large, (left, right) = torch.ones(many, device=DEVICE), torch.randn(2, side, side, device=DEVICE)
    return interleaving.in_turns([lambda: large.add_(1), lambda: torch.mm(left, right)], turns=30)


many, side = (2**22, 512) if DEVICE == "cpu" else (2**28, 4096)  # short on a CPU, so that nobody cuts in
rows, work = [], {"add 1": (many, 8 * many), "product": (2 * side**3, 12 * side**2)}
for (name, (flops, moved)), taken in zip(work.items(), lab.run(two_loops, measure=("none",)).value):
    busy, fastest = max(computed / wall for wall, computed in taken), min(computed for _, computed in taken)
    rates = flops / fastest / roof.flops_per_second, moved / fastest / roof.bytes_per_second
    rows.append([name, f"{busy:.0%}", *(f"{rate:.1%}" for rate in rates)])
    assert name != "add 1" or rates[0] < 0.5  # measured: this is the answer below
display(plots.Table(["loop", "busy", "of the matrix rate", "of the bandwidth"], rows))
exercises.question(
    lab,
    "100 percent",
    "A training shows 100 % utilization. What do you know?",
    {
        "The matrix unit is busy: a faster one helps.": "The first loop was as busy, at a fraction of its rate.",
        "It is never idle. Whether it computes or moves bytes you do not know.": "The MFU of above would tell.",
        "Memory bandwidth is exhausted.": "A product is as busy, and hardly moves a byte.",
    },
    right="It is never idle. Whether it computes or moves bytes you do not know.",
)


# %% [markdown]
# ## Explore
#
# Move the dot. Fusing does a chain of operations in one kernel, so that what lies between never goes to memory. Find a change that moves the dot to the right, one that lifts the roof over it, and one that does nothing at all.


# %% tags=["widget"]
def counts_of(operation, size, precision, kernels):
    width = 4 if precision == "float32" else 2  # bytes
    if operation == "matrix product":
        return 2 * size**3, 3 * size**2 * width
    accesses = 7 if kernels == "one each" else 3  # bias: 2, GELU: 2, residual: 3; fused: read both, write one
    return 7 * size**2, accesses * size**2 * width


def draw(operation, size, precision, kernels):
    flops, moved = counts_of(operation, size, precision, kernels)
    own = ceilings[precision]
    seconds = max(flops / own.flops_per_second, moved / roof.bytes_per_second)
    _, ax = plt.subplots(figsize=(7, 3.8), dpi=110, layout="constrained")
    draw_roofs(ax, [precision])
    bound = "arithmetic" if flops / own.flops_per_second > moved / roof.bytes_per_second else "bandwidth"
    label = f"{operation}, {size} x {size}: {1e6 * seconds:.3g} us, bound by {bound}"
    ax.plot([flops / moved], [flops / seconds], "o", ms=12, color=plots.SERIES[1], label=label)
    ax.legend(frameon=False, fontsize=9, loc="upper left")
    ax.set_ylim(top=20 * own.flops_per_second)
    return ax


operations = ["bias + GELU + residual", "matrix product"]
sizes, kernels = [512, 32, 128, 2048, 8192], ["one each", "fused"]
_ = widgets.explore(draw, operation=operations, size=sizes, precision=list(ceilings), kernels=kernels)


# %% [markdown]
# ## Exercise 1: which of the four can help?
#
# A step is bound by bandwidth: nearly all of its time goes to bias, GELU and residual, on tensors of 64 million numbers. Which of these can make it at least 10 % faster?
#
# **A** a matrix unit twice as fast · **B** one fused kernel for the three · **C** activations in 16 bits · **D** a cheaper formula for GELU, with half the FLOPs

# %% tags=["exercise"]
exercises.hint(
    "Write the time as max(FLOPs / rate, bytes / bandwidth). Which of the two terms is larger here?",
    "A change that touches only the smaller term changes nothing.",
    "Two of them leave every byte where it is.",
)
answer = None  # a set of letters, such as {"A"}


# %% tags=["check"]
CHANGES = {"A": (7, 28, 2), "B": (7, 12, 1)}  # FLOPs and bytes for each number, and how many times the matrix rate
CHANGES |= {"C": (7, 14, 1), "D": (4.5, 28, 1)}


def seconds_with(flops, moved, faster=1):
    return 2**26 * max(flops / (faster * roof.flops_per_second), moved / roof.bytes_per_second)


def check(answer):
    if answer is None:
        return exercises.not_attempted()
    before = seconds_with(7, 28)
    saved = {letter: 1 - seconds_with(*change) / before for letter, change in CHANGES.items()}
    wanted = {letter for letter, part in saved.items() if part > 0.1}
    if set(answer) == wanted:
        return exercises.right("; ".join(f"{letter} saves {part:.0%}" for letter, part in saved.items()))
    wrong = min(set(answer) ^ wanted)
    return exercises.wrong(f"look at {wrong} again: does it change the bytes, or only the FLOPs or their rate?")


exercises.check(lab, "four optimizations", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check, solution={"B", "C"}, mistake={"A", "C"})

# %% [markdown]
# ## Exercise 2: the challenge
#
# Predict, within **25 %**, how long forward and backward take for a model that you have not timed. You get its operations, counted but not timed, and what was `known` in the process that timed it: the two ceilings, and the seconds of the step of this lesson (`timed_plain` has that step's operations with their seconds). Write a function that returns seconds. All of them took turns in several processes; your function is asked once for each.

# %%
width, heads = 3 * config.hidden_size // 2, 3 * config.num_attention_heads // 2
wider = dict(hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width)
wider |= dict(num_hidden_layers=config.num_hidden_layers // 2)
unseen_task, unseen_samples = plain_task.replace(config=wider), 4
if DEVICE == "cuda":  # enough work for a GPU: half the layers, half the length, four times the sequences
    half = {"num_hidden_layers": config.num_hidden_layers // 2}
    unseen_task, unseen_samples = plain_task.replace(seq_len=length // 2, config=half), 16
found = lab.run(lambda task: count(task, unseen_samples), "count", task=unseen_task, measure=("none",))
unseen = [Row(*row) for row in found.value]


def sealed(task):
    one_thread()
    steps = []
    for each, count in ((plain_task, 4), (unseen_task, unseen_samples)):
        model, batch = each.build_model(attn_implementation="eager").to(DEVICE), each.batch(count, DEVICE)
        steps.append(lambda model=model, batch=batch: (model.zero_grad(), model(**batch).loss.backward()))
    (left, right), source = torch.randn(2, 1024, 1024, device=DEVICE), torch.ones(2**26, device=DEVICE)
    target = torch.zeros_like(source)
    works = [*steps, lambda: torch.mm(left, right), lambda: target.copy_(source)]
    own, other, product, copy = (min(s for _, s in taken) for taken in interleaving.in_turns(works, turns=3))
    return {"own seconds": own, "rate": 2 * 1024**3 / product, "bandwidth": 2**29 / copy, "sealed": other}


# %% tags=["exercise"]
exercises.hint(
    "Sum max(row.flops / known['rate'], row.moved / known['bandwidth']) over the rows.",
    "That is the least time. How far above its own least time was this lesson's step? Take that factor along.",
    "Groups differ: take a factor for each from timed_plain, then scale all by known['own seconds'].",
)
processes = [lab.run(sealed, measure=("none",)).value for _ in range(3)]
answer = None  # lambda rows, known: seconds


# %% tags=["check"]
def least(row, known):
    return max(row.flops / known["rate"], row.moved / known["bandwidth"])


explained = max(sum(least(row, known) for row in plain) / known["own seconds"] for known in processes)


def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if explained < 0.4:
        return exercises.not_measured(f"the ceilings explain {explained:.0%} of this step: the rest is spent on starts")
    told = [{name: process[name] for name in ("rate", "bandwidth", "own seconds")} for process in processes]
    pairs = [answer(unseen, known) / process["sealed"] for known, process in zip(told, processes)]
    found = Ratio.of_pairs(pairs, 1.05)
    said = f"predicted / measured: {found}"
    if 0.75 <= found.value <= 1.25:
        return exercises.right(said)
    if found.high < 0.75 or found.low > 1.25:
        return exercises.wrong(f"{said}. Which part of the time has no term in your sum?")
    return exercises.not_measured(f"{said}: too close to the limit to tell")


exercises.check(lab, "an unseen model", check, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def by_group(rows, known):
    seconds = 0
    for name in GROUPS:
        mine = sum(least(row, known) for row in timed_plain if row.group == name)
        factor = total(timed_plain, "seconds", group=name) / mine
        seconds += factor * sum(least(row, known) for row in rows if row.group == name)
    return seconds * known["own seconds"] / total(timed_plain, "seconds")


larger = unseen_task.parameters() / plain_task.parameters()
exercises.prove(check, solution=by_group, mistake=lambda rows, known: 2 * larger * known["own seconds"])

# %% [markdown]
# ## Recap
#
# - Two ceilings were measured. An operation's time was predicted from its FLOPs and its bytes, and where that fell short, a third limit was found.
# - A step was taken apart: products had nearly all the FLOPs, the rest most of the bytes, and the picture showed who had the time.
# - The groups were ordered, "twice" was decided in FLOPs, bytes and time, and 100 % utilization meant that something ran, not that it computed.
#
# Before you optimize, place your step on the roof. Bound by arithmetic: a faster precision (lesson 07). Bound by bandwidth: fewer bytes, by fusing (11) or by 16 bits. Bound by neither: larger batches (04).

# %% tags=["finish"]
claims.finish(lab)
