# %% [markdown]
# # Where do the microseconds go?
#
# Your training is too slow, and you can have a GPU that does twice the arithmetic per second. Will it halve the time of a step? A training step is hundreds of operations. Each takes its time for one of two reasons: it has numbers to compute, or bytes to move. Count both for each operation, and you know which of them a faster chip speeds up.
#
# **You will see**
# - how to predict the time of an operation, and in the challenge that of a model's step, from two measured speed limits of your machine
# - the FLOPs, the bytes and the seconds of every operation of a training step, in one picture
# - whether the guides order their three groups of operations rightly, and whether backward costs twice the forward in FLOPs and in time
# - how to read a trace, and what "100 % utilization" means
#
# **Time:** plan 45 minutes with code and exercises; the cells compute for one to three of them on two CPU cores. **Before this:** lesson 00. **Not on a CPU:** the claim that bandwidth usually limits activation functions, the rates of tensor cores, the driver's utilization counter.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import contextlib
import statistics
import time
from collections import namedtuple
from dataclasses import asdict, replace
from operator import attrgetter

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from torch.nn import attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from perf_helpers import Claims, Lab, Task, exercises, interleaving, plots, roofline, widgets
from trainmem.records import CPU, Ratio

lab = Lab(profile, strict=strict, out=out, lesson="02_anatomy_of_a_step")
claims = Claims(lab)
DEVICE = lab.machine.kind


def one_thread():
    if DEVICE == "cpu":
        torch.set_num_threads(1)  # one thread is disturbed least, and its seconds of computing can be counted


# %% [markdown]
# ## Idea
#
# A **FLOP** is one operation on floating-point numbers; a multiplication and an addition are two. A tensor operation reads its operands from memory, computes, and writes its result. Its **intensity** is its FLOPs divided by the bytes that it moves.
#
# A device has two speed limits, or *ceilings*: the FLOPs per second that it reaches in matrix multiplications (its **matrix rate**), and the bytes per second that its memory moves (its **bandwidth**). Unless a faster cache holds its tensors, no operation beats either. So it takes at least
#
# `max(FLOPs / matrix rate, bytes / bandwidth)`
#
# This is the **roofline** model ([Williams, Waterman and Patterson, 2009](https://doi.org/10.1145/1498765.1498785)). The **ridge** is the intensity at which the two terms are equal. An operation with a lower intensity is *bound by bandwidth*; one with a higher intensity is *bound by arithmetic*.
#
# ## Predict
#
# Matrix multiplications (**matmuls**) do more than 95 % of the arithmetic of a training step. How much of its time do they take?

# %%
widgets.predict(lab, "share of products", "What share of the step's time do matmuls take on this machine?", "%", 0, 100)

# %% [markdown]
# ## By hand: two ceilings
#
# We time a large copy, and a square matmul in each precision for which the device has instructions. The large copy exceeds every cache, so it shows the bandwidth of memory. A small copy stays inside a cache and shows the cache's bandwidth. The fastest try counts. On a CPU all timed work runs in one thread, so these are the limits of one core. Then the course's own `roofline.ceilings` measures the same limits (*by the library* in the table). From here on we use each precision's higher matrix rate and the highest bandwidth in the table.
#
# `interleaving.in_turns` calls each function of a list in turn, several times. For each call of each function it returns the seconds of the clock and the seconds spent computing.
#
# > **On a GPU:** *tensor cores* are the units of a GPU that do nothing but matmuls. Matmuls in fp32 do not use them here: by default, torch does not round their inputs to tf32, a shorter format (lesson 07).


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
    best = max(rate, each.flops_per_second)  # of all tries: no operation has beaten this rate
    ceilings[kind] = replace(each, flops_per_second=best, bytes_per_second=copied)
    measured = rate, each.flops_per_second, memory_rate, each.bytes_per_second
    of_a_number = getattr(torch, kind).itemsize * ceilings[kind].ridge
    rows.append([kind, *(value / 1e9 for value in measured), ceilings[kind].ridge, of_a_number])
roof = ceilings["float32"]
print(f"a copy that fits into a cache: {cache_rate / 1e9:.3g} GB/s")
header = [
    "matmuls in",
    "GFLOP/s by hand",
    "by the library",
    "copy GB/s by hand",
    "by the library",
    "ridge (FLOPs per byte)",
    "ridge (FLOPs per number)",
]
plots.Table(header, rows)

# %% [markdown]
# An operation with fewer FLOPs per byte than the *ridge* waits for memory. The last column is the same ridge per *number* moved. An operation does the same FLOPs per number in every precision, so compare the rows by this column. If its value is higher for a 16-bit format, more operations wait for memory in that format.
#
# ## By hand: three operations
#
# A matmul of *m x k* with *k x n* has 2mkn FLOPs. LayerNorm does about 8 per element: 3 for the variance, 1 each for mean, subtract, divide, scale, shift. GELU does 5, if an `erf` (the error function of statistics) counts as one. LayerNorm and GELU read each element once and write it once. All results go into existing tensors, because the system takes time to provide a new one.
#
# `Ratio.of_turns` divides the seconds of two functions that ran alternately, here GELU and a copy of as many bytes. It gives the median of the turns and an interval; the table has the fastest tries instead. (`CPU` selects the seconds spent computing.) The first function runs twice per turn; its two runs differ by noise. The interval reaches at least as far to each side as this noise, and at least 2 % (1.02 in the code).


# %%
m, k, n = (2048, 1024, 1536) if DEVICE == "cpu" else (8192, 4096, 12288)
elements = (2**25 if DEVICE == "cpu" else 2**28) // lab.sized(1, 32)
counts = {
    "matmul": (2 * m * k * n, 4 * (m * k + k * n + m * n)),
    "LayerNorm": (8 * elements, 2 * 4 * elements),
    "GELU": (5 * elements, 2 * 4 * elements),
}


def three_operations(task):
    one_thread()
    x = torch.randn(elements // 1024, 1024, device=DEVICE)
    y, mean, scale = torch.empty_like(x), *(torch.empty(len(x), 1, device=DEVICE) for _ in range(2))
    left, right = torch.randn(m, k, device=DEVICE), torch.randn(k, n, device=DEVICE)
    product = torch.empty(m, n, device=DEVICE)
    aten = attrgetter("ops.aten")(torch)  # these operators write the result into the tensor that you pass
    gelu = [lambda: aten.gelu.out(x, out=y)]
    works = [*gelu, lambda: y.copy_(x), *gelu, lambda: torch.mm(left, right, out=product)]
    works += [lambda: aten.native_layer_norm.out(x, [1024], None, None, 1e-5, out0=y, out1=mean, out2=scale)]
    return interleaving.in_turns(works, turns=6)


# %% tags=["claim"]
processes = [lab.run(three_operations, measure="value").value for _ in range(1 if DEVICE == "cpu" else 3)]
fastest = [min(computed for _, computed in taken) for taken in processes[0]]
measured = {"matmul": fastest[3], "LayerNorm": fastest[4], "GELU": min(fastest[0], fastest[2])}
rows = []
for name, (flops, moved) in counts.items():
    least = roof.seconds(flops, moved)
    bound = "bandwidth" if flops / moved < roof.ridge else "arithmetic"
    rows.append([name, flops / moved, bound, 1e3 * least, 1e3 * measured[name], measured[name] / least])
print(f"a copy of as many bytes as GELU moves took {1e3 * fastest[1]:.3g} ms")
header = ["operation", "FLOPs per byte", "bound by", "predicted (ms)", "measured (ms)", "measured / predicted"]
display(plots.Table(header, rows))

missing = None if DEVICE == "cuda" else "needs an NVIDIA GPU"
against_copy = Ratio.of_turns([taken[:3] for taken in processes], CPU, 1.02)  # how many times as fast the copy is
claims.check("activations-bandwidth", against_copy, missing=missing)


# %% [markdown]
# The model gives the *least* time. The last column divides the measured time by it:
#
# - **Near 1**: one ceiling explains the time.
# - **Well above 1**: a third limit sets it. One core computes an `erf`, or sums up rows, at another rate than that of matmuls.
# - **Below 1**: other load slowed the machine while we measured the ceiling.
#
# > **On a GPU:** thousands of cores share such work. The claim is judged only there.
#
# ## Baseline: a whole step, operation by operation
#
# The step is one of `lab.task`, the course's model, on 4 sequences, without the update. We sort all operations into the guides' three groups. *Contractions* are matmuls. *Normalizations* are LayerNorm and softmax. *Element-wise* operations are all others, such as an activation function, dropout or an addition.
#
# A **dispatch mode** is an object to which torch hands every operation of forward and backward, just before a *kernel* (the compiled function that does the work) runs it. The mode has to call the operation, and may inspect, count and time it. Ours counts FLOPs and bytes, and takes the seconds that this thread computed. An operation that is not a matmul gets a number of FLOPs per element of its largest tensor, from the table `PER_ELEMENT`.
#
# Attention runs in its plain form here, because a fused kernel would be a single operation. The names are torch's: `mm` is a matmul, `bmm` is many matmuls of one size, `addmm` is a matmul and an addition, and `bernoulli_` draws random zeros and ones.
#
# > **On a GPU:** the device's own clock is read before and after each kernel (CUDA *events*). A short sleep of the device comes first: the kernel is launched meanwhile, so its launch is not timed.

# %%
GROUPS = ("contraction", "normalization", "element-wise")
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # which operand is the left matrix
PER_ELEMENT = {  # FLOPs; an exp, erf or tanh counts one. An operation that is not listed does 1
    **{"native_layer_norm": 8, "native_layer_norm_backward": 13, "_softmax": 5, "_softmax_backward_data": 4},
    **{"gelu": 5, "gelu_backward": 11, "native_dropout": 3, "native_dropout_backward": 2, "tanh_backward": 3},
}
EXPS = {"_softmax": 1, "gelu": 1, "gelu_backward": 2, "tanh": 1}  # how many of them are an exp, erf or tanh
MOVES = "clone copy_ _to_copy embedding embedding_dense_backward gather cat select_backward zeros ones_like zeros_like"


class Row(namedtuple("Row", "phase name group flops bytes_read bytes_written seconds", defaults=[None])):
    moved = property(lambda row: row.bytes_read + row.bytes_written)


def group(name):
    if name in PRODUCTS:
        return "contraction"
    return "normalization" if "norm" in name or "softmax" in name else "element-wise"


def flops_of(name, given, made):
    if name in PRODUCTS:
        return 2 * made[0].numel() * given[PRODUCTS[name]].shape[-1]
    largest = max((part.numel() for part in (*given, *made)), default=0)
    return 0 if name in MOVES.split() else largest * PER_ELEMENT.get(name, 1)


# %%
def bytes_of(parts):  # in bytes; an expanded tensor has no more than its storage
    return sum(min(part.nbytes, part.untyped_storage().nbytes()) for part in parts)


def counted(phase, operation, given, made):
    name = operation.overloadpacket.__name__
    if operation.is_view or name.startswith(("empty", "new_empty", "_unsafe_view")):
        return [phase, name, group(name), 0, 0, 0]
    read = {"embedding": bytes_of(made), "bernoulli_": 0, "zero_": 0, "fill_": 0}.get(name, bytes_of(given))
    return [phase, name, group(name), flops_of(name, given, made), read, bytes_of(made)]


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
    return [min(tries) for tries in zip(*each)]  # for each operation the fastest of five: 4 turns and a warm-up


# %%
def with_seconds(rows, task):
    taken = lab.run(seconds, task=task, measure=("none",)).value
    return [row._replace(seconds=second) for row, second in zip(rows, taken, strict=True)]


def total(rows, column, **conditions):
    wanted = [row for row in rows if all(getattr(row, name) == value for name, value in conditions.items())]
    return sum(getattr(row, column) for row in wanted)


step = [Row(*row) for row in lab.run(count, measure=("none",)).value]
assert total(step, "flops", group="contraction") == roofline.model_flops(lab.task, 4)  # torch's own counter agrees
print(f"{len(step)} operations, {sum(row.moved > 0 for row in step)} of them move bytes")
timed = with_seconds(step, lab.task)


# %%
def shares(rows, column):
    return [100 * total(rows, column, group=name) / total(rows, column) for name in GROUPS]


def estimated_share():
    least = {name: 0.0 for name in GROUPS}
    for row in step:
        least[row.group] += roof.seconds(row.flops, row.moved)
    return 100 * least["contraction"] / sum(least.values())


assert shares(step, "flops")[0] > 95
share = shares(timed, "seconds")[0]
display(widgets.revealed(lab, "share of products", share, estimate=lab.foresee(estimated_share)))
names = {row.name for row in step}
dearest = {name: total(timed, "seconds", name=name) / total(timed, "seconds") for name in names}
top = sorted(dearest, key=dearest.get, reverse=True)[:5]
print("most time:", ", ".join(f"{name} {dearest[name]:.0%}" for name in top))
print(f"with twice the matrix rate and nothing else this step would be at most {1 / (1 - share / 200):.2f} x as fast")

# %% [markdown]
# (Operations that move no bytes only make views or empty tensors.) The estimate is the matmuls' share if every operation takes its least time on the roofline. The last printed line answers the question at the top: twice the matrix rate at best halves the matmuls' time, and changes no other (*Amdahl's law*).
#
# Each dot in the picture is an operation. Under the slope bandwidth is the limit, under the flat part arithmetic. A larger dot took more time. Operations without FLOPs (copies, embeddings) are not shown. The named dot is the longest operation that is not a matmul.


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
        group = [row for row in rows if row.group == name and row.flops]
        at = [row.flops / row.moved for row in group]
        sizes = [10 + 4e3 * row.seconds / total(rows, "seconds") for row in group]
        reached = [row.flops / row.seconds for row in group]
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
    parts = [shares(timed, column)[i] for column in ("flops", "moved", "seconds")]
    right.barh(["FLOPs", "bytes", "time"], parts, 0.6, begin, color=plots.SERIES[i], label=name)
    for row, part in enumerate(parts):
        if part > 4:
            right.text(begin[row] + part / 2, row, f"{part:.0f}", ha="center", va="center", color="white", fontsize=11)
    begin = [start + part for start, part in zip(begin, parts)]
right.invert_yaxis()
right.set(xlabel="share of the step (%)")
right.set_title("Each group's share of the FLOPs, the bytes and the time", loc="left")
_ = right.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)

# %% [markdown]
# Matmuls are on the right, under the flat roof. All others are on the left, orders of magnitude lower. They do few FLOPs per byte, so faster matmuls cannot help them. A dot *above* the black slope was served by a cache (the dotted slope), which holds the tensors of a small step.
#
# The guide has its three groups from [Ivanov et al., 2020](https://arxiv.org/abs/2007.00072). The first claim below is about all operations that are not matmuls: their share of the FLOPs is divided by their share of the bytes (1 means as many FLOPs per byte as the whole step). The second tests the order contractions, normalizations, element-wise: the FLOPs per byte of each group are divided by those of the next, and the smaller ratio counts. It leaves out copies and embeddings. An `exp` counts as one FLOP; the note also has the values for ten FLOPs.


# %% tags=["claim"]
def intensity(name, exp=1):
    """Return a group's FLOPs per byte moved, without copies and embeddings, which compute nothing."""
    rows = [row for row in step if row.group == name and row.flops]
    more = [row.flops * (exp - 1) * EXPS.get(row.name, 0) / PER_ELEMENT.get(row.name, 1) for row in rows]
    return (total(rows, "flops") + sum(more)) / total(rows, "moved")


def outside(column):
    return 1 - total(step, column, group="contraction") / total(step, column)


display(claims.check("op-classes", outside("flops") / outside("moved")))
per_byte = [intensity(name) for name in GROUPS]
note = "FLOPs per byte: " + ", ".join(f"{name} {value:.3g}" for name, value in zip(GROUPS, per_byte))
note += "; with an exp as ten: " + ", ".join(f"{intensity(name, 10):.3g}" for name in GROUPS)
with_copies = total(step, "flops", group="element-wise") / total(step, "moved", group="element-wise")
note += f"; element-wise with copies and embeddings: {with_copies:.3g}"
claims.check("op-groups-ordered", min(per_byte[0] / per_byte[1], per_byte[1] / per_byte[2]), note=note)

# %% [markdown]
# ## Change one thing: no dropout
#
# The guide says that linear layers have twice the FLOPs in backward, and that a backward pass generally takes about twice as long. Compare both passes, with dropout and without.

# %%
plain_task = lab.task.replace(config={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})  # new
plain = [Row(*row) for row in lab.run(count, task=plain_task, measure=("none",)).value]
timed_plain = with_seconds(plain, plain_task)


def backward_to_forward(rows, column, **conditions):
    return total(rows, column, phase="backward", **conditions) / total(rows, column, phase="forward", **conditions)


table = []
for label, rows in {"with dropout": timed, "without": timed_plain}.items():
    products = backward_to_forward(rows, "flops", group="contraction")
    spent = [1e3 * total(rows, "seconds", phase=phase) for phase in ("forward", "backward")]
    table.append([label, products, backward_to_forward(rows, "moved"), spent[1] / spent[0], *spent])
masks = {name: total(timed, "seconds", phase="forward", name=name) for name in ("bernoulli_", "native_dropout")}
drawn = sum(masks.values()) / total(timed, "seconds", phase="forward")
print(f"drawing dropout masks: {drawn:.0%} of the forward's time, and nothing of the backward's")
header = ["", "FLOPs of matmuls, ratio", "bytes, ratio", "time, ratio", "forward (ms)", "backward (ms)"]
plots.Table(header, table, "ratio: backward / forward")

# %% [markdown]
# - **FLOPs of matmuls**: 2, with or without dropout. For each matmul of forward, backward has two: one for the gradient of the left operand, one for that of the right.
# - **Bytes**: an activation function, for example, moves three tensors in backward and two in forward.
# - **Time**: each operation has its own limit, so the ratio need not be 2.
#
# Dropout draws its masks in forward; backward only multiplies by them. So dropout lowers the ratio of bytes. On a CPU, which draws random numbers one by one, drawing can take half as long as the forward's matmuls.
#
# ## What held
#
# ### Backward against forward
#
# The first claim counts FLOPs. The next two measure time: forward and backward run alternately in several fresh processes, with the attention that the library chooses, first without dropout, then with the model's own dropout. On a CPU the ratio with dropout is also predicted: dropout alone is timed, and its seconds in each pass are added to those without dropout.
#
# The last claim is about the matmuls alone. The guide says that backward is sometimes more than twice as slow because its sizes are more *awkward*. A device computes the result of a matmul in blocks, its *tiles*. It is fastest if the sizes are multiples of the tile's; awkward sizes are not. If backward's sizes are more awkward, one FLOP takes longer there than in forward: the claim's ratio is above 1.


# %%
def passes(model, batch, within=contextlib.nullcontext):
    saved = {}

    def forward():
        with within():
            saved["loss"] = model(**batch).loss

    def backward():
        model.zero_grad()
        saved["loss"].backward(retain_graph=True)

    forward()
    return backward, forward


def dropout_alone(config, samples, tokens):  # backward multiplies by the masks, forward draws them and multiplies
    layers, scores = config.num_hidden_layers, (config.num_attention_heads, tokens, tokens)
    shapes = [(samples, *scores)] * layers + [(samples, tokens, config.hidden_size)] * (2 * layers + 1)
    given, outputs = [torch.randn(shape, requires_grad=True) for shape in shapes], []

    def forward():
        outputs[:] = [torch.nn.functional.dropout(each, config.hidden_dropout_prob) for each in given]

    forward()
    return lambda: torch.autograd.grad(outputs, given, given, retain_graph=True), forward


# %% tags=["claim"]
def turns_of_a_step(task):
    one_thread()
    model, batch = task.build_model().to(DEVICE), task.batch(4, DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    backward, forward = passes(model, batch)
    works = [backward, forward, backward, optimizer.step]
    if DEVICE == "cpu" and task != plain_task:  # the parts; attention with dropout takes its plain form
        works += passes(plain_task.build_model(), batch, lambda: attention.sdpa_kernel(attention.SDPBackend.MATH))
        works += dropout_alone(task.build_config(), 4, task.length())
    return interleaving.in_turns(works, turns=4)


def of_parts(processes):
    def both(first, second):
        return [tuple(map(sum, zip(*pair))) for pair in zip(first, second)]

    if DEVICE == "cuda":
        return Ratio.unknown("a GPU drops scores inside its kernels")
    sums = [(both(backward, multiply), both(forward, draw)) for *_, backward, forward, multiply, draw in processes]
    # at least 10 % either way: by themselves, the parts may use the caches differently
    return Ratio.of_turns([[backward, forward, backward] for backward, forward in sums], CPU, 1.1)


# %% tags=["claim"]
step_turns = [lab.run(turns_of_a_step, task=plain_task, measure="value").value for _ in range(3)]
dropout_turns = [lab.run(turns_of_a_step, task=lab.task, measure="value").value for _ in range(3)]
floor, flops = 1.05 if DEVICE == "cpu" else 1.02, backward_to_forward(plain, "flops", group="contraction")
took, with_dropout = (Ratio.of_turns([each[:3] for each in all], CPU, floor) for all in (step_turns, dropout_turns))
display(claims.check("backward-twice-forward", flops))
note = f"FLOPs {flops:.2f}; bytes {backward_to_forward(plain, 'moved'):.2f}"
display(claims.check("backward-takes-twice", took, note=note))
claims.check("backward-twice-dropout", with_dropout, predicted=of_parts(dropout_turns))


# %% tags=["claim"]
def products_of_a_layer(task):
    """Time the matmuls of a layer's linear parts, into existing tensors: backward's, forward's, backward's again."""
    one_thread()
    config, rows, parts = task.build_config(), 4 * task.length(), []
    narrow, wide = config.hidden_size, config.intermediate_size
    for into, out in (*4 * [(narrow, narrow)], (narrow, wide), (wide, narrow)):
        shapes = (rows, into), (out, into), (rows, out)  # input, weight, and the gradient of the output
        parts.append([torch.randn(*shape, device=DEVICE) for shape in (*shapes, *shapes)])

    def forward():
        for x, w, _, _, _, y in parts:
            torch.mm(x, w.T, out=y)

    def backward():
        for x, w, gradient, of_x, of_w, _ in parts:
            torch.mm(gradient, w, out=of_x), torch.mm(gradient.T, x, out=of_w)

    return interleaving.in_turns([backward, forward, backward], turns=6)


of_products = [lab.run(products_of_a_layer, measure="value").value for _ in range(3)]
took = Ratio.of_turns([each[:3] for each in of_products], CPU, floor)  # seconds of twice the FLOPs
claims.check(
    "backward-sizes-awkward", took / 2, note=f"so a layer's matmuls take {took.value:.2f} x as long in backward"
)

# %% [markdown]
# ### Activation functions and convolutions
#
# Counting checks two more statements. *An activation function reads once and writes once in forward; in backward it reads twice, the gradient and the output of the forward, and writes once.* And *convolutions have twice the FLOPs in backward too*. The table's last column shows which tensor autograd really kept, found by its address.


# %%
def activation_counts(task):
    table, addresses = [], set()

    def seen_at(saved):
        addresses.add(saved.data_ptr())
        return saved

    for name in ("relu", "gelu", "silu", "tanh", "sigmoid"):
        x, gradient = torch.randn(4096, device=DEVICE, requires_grad=True), torch.ones(4096, device=DEVICE)
        function = getattr(torch.nn.functional, name)
        with torch.autograd.graph.saved_tensors_hooks(seen_at, lambda saved: saved):
            with Recorder("forward") as forward:
                y = function(x)
        saved_names = [name for name, each in {"input": x, "output": y}.items() if each.data_ptr() in addresses]
        addresses.clear()
        with Recorder("backward") as backward:
            y.backward(gradient)
        moved = [sum(row[i] for row in part.rows) / x.nbytes for part in (forward, backward) for i in (4, 5)]
        table.append([name, *moved, " and ".join(saved_names)])
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
outputs = [row[0] for row in activations if row[-1] == "output"]
display(claims.check("activation-keeps-output", len(outputs) / len(activations), note=", ".join(outputs)))
note = f"in a first layer, whose input needs no gradient: {convolution_flops(False):.2f}"
claims.check("convolution-backward-twice", convolution_flops(True), note=note)

# %% [markdown]
# ## Model FLOPs utilization
#
# The authors of PaLM, a language model ([Chowdhery et al., 2022, appendix B](https://arxiv.org/abs/2204.02311)), divide the FLOPs that the *model* needs by the FLOPs that the device could have done in the same time:
#
# `MFU = model FLOPs / (step seconds x matrix rate)`
#
# Model FLOPs count matmuls only. The rule of thumb is 6 FLOPs per parameter and token: 2 in forward, 4 in backward.
#
# The authors train in bf16 and take the rate from the data sheet. So compare only our bf16 line with a published MFU. We divide by a measured rate, which is lower, so our MFU is higher.


# %%
def steps_in_bf16(task):
    one_thread()
    model, batch = task.build_model().to(DEVICE), task.batch(4, DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step():
        with torch.autocast(DEVICE, torch.bfloat16):  # new
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return min(computed for _, computed in interleaving.in_turns([step], turns=4)[0])


def fastest_step(processes):
    backward, forward, again, update = (min(each[CPU] for one in processes for each in one[i]) for i in range(4))
    return min(backward, again) + forward + update


# %%
config, length = lab.task.build_config(), lab.task.length()
model_flops, rule = roofline.model_flops(lab.task, 4), 6 * lab.task.parameters() * 4 * length
# 2 matmuls per layer, each 2 * hidden_size * length FLOPs per token; once in forward, twice in backward
of_scores = 12 * config.num_hidden_layers * config.hidden_size * length * 4 * length
taken = {"float32": fastest_step(step_turns), "float32, with dropout": fastest_step(dropout_turns)}
if "bfloat16" in ceilings:
    taken["bfloat16"] = lab.run(steps_in_bf16, task=plain_task, measure="value").value
for label, spent in taken.items():
    reached = model_flops / (spent * ceilings[label.split(",")[0]].flops_per_second)
    print(f"MFU in {label}: {reached:.0%} of the measured rate")
print(
    f"{model_flops / 1e9:.4g} GFLOPs a step, {of_scores / 1e9:.3g} of them attention's; the rule says {rule / 1e9:.4g}"
)


# %% [markdown]
# The rule counts embeddings, which are never multiplied: in a small model it is too high. It leaves out attention, whose matmuls have no weights and grow with the length.
#
# Can you trust torch's FLOP counter? The next cell prints two pairs of lines, each pair for the same work.


# %%
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
print("attention by its matmuls:", seen(lambda: (heads @ heads.mT).softmax(-1) @ heads))
print("the same, fused, on a CPU:", seen(lambda: torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)))

# %% [markdown]
# If the two lines of a pair differ, the counter has missed matmuls. It knows them by name: an operation that it does not know counts 0, without a warning. So it may miss the matmuls of *experts* (parallel layers, of which each token uses a few; lesson 18) if they are done as one grouped matmul. Before torch 2.15 it also missed a CPU's fused attention. For these reasons `roofline.model_flops` refuses models with experts, and switches to plain attention.
#
# The next question is about *gradient checkpointing* (lesson 06): it keeps fewer activations, and computes the missing ones a second time in backward.

# %% jupyter={"source_hidden": true}
tiny = Task("bert-tiny", seq_len=32, config={"use_cache": False})
model = tiny.build_model()
getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
with FlopCounterMode(display=False) as executed:
    model(**tiny.batch(4)).loss.backward()
# Checkpointing executes more FLOPs than the model needs; the model FLOPs stay.
assert executed.get_total_flops() > 1.2 * roofline.model_flops(tiny, 4)

# %%
exercises.question(
    lab,
    "utilization and checkpointing",
    "You switch on gradient checkpointing, and a step takes a third longer. What happens to the model FLOPs utilization?",
    {
        "It rises: there is more to multiply.": "It has, but the model needs no more than before. What counts "
        "executed FLOPs is another figure, the hardware FLOPs utilization.",
        "It stays: more FLOPs in more time.": "Only the time grew. FLOPs done twice are counted once.",
        "It falls by a quarter: the same model FLOPs in 4/3 of the time.": "It measures progress, not how busy the device is.",
    },
    right="It falls by a quarter: the same model FLOPs in 4/3 of the time.",
)

# %% [markdown]
# ## A trace, read aloud
#
# `torch.profiler` records which kernels ran, and when. The picture shows the first operations of a forward pass, with 16 tokens per sequence and with all of them. A bar is a kernel at work; white is time in which no kernel works. The printed numbers count forward and backward.


# %%
def is_kernel(event):
    if DEVICE == "cuda":
        return event.device_type == torch.autograd.DeviceType.CUDA
    itself = event.self_cpu_time_total > event.cpu_time_total / 2  # other operators only call the one that computes
    return itself and event.name.removeprefix("aten::") in {row.name for row in step if row.moved}


def traced(task):
    """Return for each kernel the white before it and its bar, in microseconds (the least of three tries), and its name."""
    one_thread()
    model, found = task.build_model(attn_implementation="eager").to(DEVICE), []
    for tokens in (16, length):
        batch, tries = task.replace(seq_len=tokens).batch(4, DEVICE), []
        interleaving.in_turns([lambda batch=batch: model(**batch).loss.backward()], turns=1)
        for _ in range(3):
            with torch.profiler.profile() as profile:  # new
                model(**batch).loss.backward()
                _ = DEVICE == "cuda" and torch.cuda.synchronize()
            times = [(each.time_range, each.name) for each in profile.events() if is_kernel(each)]
            spans = sorted((time.start, time.end, name) for time, name in times)
            before = [spans[0][0], *(end for _, end, _ in spans)]
            tries.append([(max(0, start - last), end - start, name) for (start, end, name), last in zip(spans, before)])
        found.append([(min(white), min(bar), name[0]) for white, bar, name in (zip(*same) for same in zip(*tries))])
    return found


# %%
def kind(name):  # also of a GPU's kernels, which have names of their own
    return "contraction" if any(word in name for word in ("mm", "cutlass", "nvjet")) else group(name)


figure, axes = plt.subplots(2, 1, figsize=(10.5, 3.4), layout="constrained")
for ax, tokens, kernels in zip(axes, (16, length), lab.run(traced, measure="value").value):
    at, whole = 0, sum(white + bar for white, bar, _ in kernels)
    for white, bar, name in kernels[:40]:
        ax.barh(0, bar, left=at + white, color=plots.SERIES[GROUPS.index(kind(name))])
        at += white + bar
    parts = {name: sum(bar for _, bar, each in kernels if kind(each) == name) / whole for name in GROUPS}
    half = statistics.median(bar for _, bar, _ in kernels)
    parts_text = ", ".join(f"{name} {part:.0%}" for name, part in parts.items())
    print(f"4 x {tokens}: {len(kernels)} kernels in {whole / 1e3:.3g} ms, half of them under {half:.3g} us;")
    print(f"    of that time: {parts_text}, no kernel at work {1 - sum(parts.values()):.0%}")
    ax.set(title=f"4 x {tokens} tokens", yticks=[], xlim=(0, at))
for i, name in enumerate(GROUPS):
    axes[0].barh(0, 0, color=plots.SERIES[i], label=name)
axes[0].legend(frameon=False, fontsize=9, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
_ = axes[1].set_xlabel("microseconds")

# %% [markdown]
# Look for:
#
# - **White**: nothing computes, because the next kernel was not called yet. A step with much white and short bars is *launch-bound*. Fewer, larger operations help it: larger batches (lesson 04), fusing and CUDA graphs (lesson 11).
# - **Wide bars of matmuls**: the step is *compute-bound* (by arithmetic). A faster precision helps it (lesson 07).
# - **Wide bars of other operations**: the step is *memory-bound* (by bandwidth). Fewer bytes help it, unless the bars draw dropout's masks (on a CPU).
#
# A bar also contains the overhead of its call. The kernels in the lower picture process many more numbers. If one takes as many microseconds in both pictures (the axes differ), most of both bars is overhead.
#
# ## "My GPU is at 100 %"
#
# `nvidia-smi` and `torch.cuda.utilization` report the percentage of time in which [one or more kernels were executing](https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html): the bars of a trace, whatever they do. Below, "busy" is the share of the clock's time that the thread computed. The first of three loops only counts, in one thread. The second adds 1 to a large tensor. The third multiplies two matrices (*product*).
#
# > **On a GPU:** "busy" is the value that NVML reports (NVIDIA's library behind `nvidia-smi`).


# %%
def nvml_utilization(work):  # the mean reading while the work repeats for three seconds; None without readings
    readings, end = [], time.perf_counter() + 3
    while (now := time.perf_counter()) < end:
        while time.perf_counter() < now + 0.2:
            work()
        with contextlib.suppress(Exception):  # NVML is missing, or does not report part of a GPU
            readings.append(torch.cuda.utilization() / 100)
    return statistics.mean(readings[5:]) if readings else None  # a reading looks back for up to a second


def three_loops(task):
    one_thread()
    large, (left, right) = torch.ones(many, device=DEVICE), torch.randn(2, side, side, device=DEVICE)
    count = (lambda: sum(range(10**5))) if DEVICE == "cpu" else (lambda: torch.cuda._sleep(10**7))
    works = [count, lambda: large.add_(1), lambda: torch.mm(left, right)]
    taken = interleaving.in_turns(works, turns=15)
    busy = [max(computed / wall for wall, computed in each) for each in taken]
    return taken, busy if DEVICE == "cpu" else [nvml_utilization(work) for work in works]


# %%
many, side = (2**22, 512) if DEVICE == "cpu" else (2**28, 4096)  # short on a CPU, so that other load seldom cuts in
rows, work = [], {"count": (0, 0), "add 1": (many, 8 * many), "product": (2 * side**3, 12 * side**2)}
for (name, (flops, moved)), taken, busy in zip(work.items(), *lab.run(three_loops, measure=("none",)).value):
    fastest = min(computed for _, computed in taken)
    rates = flops / fastest / roof.flops_per_second, moved / fastest / roof.bytes_per_second
    rows.append([name, "not measured" if busy is None else f"{busy:.0%}", *(f"{rate:.1%}" for rate in rates)])
    assert name != "add 1" or rates[0] < 0.5
plots.Table(["loop", "busy", "of the matrix rate", "of the bandwidth"], rows)

# %% [markdown]
# All three are busy. (On a CPU 101 % is possible: its two clocks differ a little.) This says nothing about speed; the MFU and the trace do.
#
# (On a CPU, *add 1* can exceed 100 % of the bandwidth. First, a CPU reads memory into its cache before it overwrites it. So our copy moved three bytes for every two that we counted, and the true bandwidth is higher. Adding in place reads nothing extra. Second, this loop's 16 MB can stay in a large cache.)
#
# ## Explore
#
# The dot is a matmul, or a chain of three operations: add a bias, apply GELU, add the layer's input again (the *residual*). *one each* runs three kernels. *fused* runs the chain in one kernel, so its intermediate results never go to memory. Find a change that moves the dot to the right, one that lifts the roof over it, and one that does nothing.


# %% tags=["widget"]
def counts_of(operation, size, precision, kernels):
    width = 4 if precision == "float32" else 2  # bytes
    if operation == "matmul":
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


operations = ["bias + GELU + residual", "matmul"]
sizes, kernels = [512, 32, 128, 2048, 8192], ["one each", "fused"]
_ = widgets.explore(draw, operation=operations, size=sizes, precision=list(ceilings), kernels=kernels)


# %% [markdown]
# ## Exercise 1: which of the four can help?
#
# A step is bound by bandwidth: nearly all of its time goes to the chain above on tensors of 64 million numbers. Which of these changes can make it at least 10 % faster?
#
# **A** a matrix rate twice as high · **B** one fused kernel for the three · **C** activations in 16 bits · **D** a cheaper formula for GELU, with half the FLOPs

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Write the time as max(FLOPs / rate, bytes / bandwidth). Which of the two terms is larger here?",
    "A change that touches only the smaller term changes nothing.",
    "Two of them leave every byte where it is.",
)

# %% tags=["exercise"]
answer = None  # a set of letters, such as {"A"}


# %% tags=["check"] jupyter={"source_hidden": true}
CHANGES = {"A": (7, 28, 2), "B": (7, 12, 1)}  # per number: FLOPs, bytes; and how many times the matrix rate
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
# The model `unseen`, made below, has not been timed. It has half the layers, feed-forward layers half as wide, sequences half as long, and a batch of 8 instead of 4. How many milliseconds does one of its training steps take: forward, backward and AdamW's update, in fp32, without dropout? Predict it within 25 % before it runs. You have the seconds of the model above without dropout (`timed_plain` has those of each operation, the next cell prints those of a step and of its update) and the ceilings (`roof`), and you may count the operations of `unseen` with the function `count` from above.
#
# The check runs steps of both models alternately, and multiplies the ratio of their times by the milliseconds printed below. So a slowdown of the machine does not matter.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "8 sequences of half the length are as many tokens as before. Which operations are fewer, and which smaller?",
    "`[Row(*row) for row in lab.run(lambda task: count(task, 8), task=unseen, measure=('none',)).value]` lists the "
    "operations of `unseen` without timing them. The update takes time in proportion to `unseen.parameters()`.",
    "`timed_plain` says how many times as long as `roof.seconds(flops, moved)` the operations of each name take. With "
    "these factors, predict the seconds of all operations of `unseen`. Divide their sum by the sum of the seconds in "
    "`timed_plain`, and multiply the printed step without its update by this ratio. Then add the update of `unseen`.",
)

# %% tags=["exercise"]
halves = {name: getattr(config, name) // 2 for name in ("num_hidden_layers", "intermediate_size")}
unseen = plain_task.replace(seq_len=length // 2, config=halves)
reference, update = fastest_step(step_turns), min(each[CPU] for one in step_turns for each in one[3])
print(f"a step of the model above, with a batch of 4: {1e3 * reference:.4g} ms, its update {1e3 * update:.3g} ms")
answer = None  # milliseconds


# %%
def both_steps(task):
    """Return [(seconds of a step of the model above, seconds of one of `task`)], of steps that ran alternately."""

    def step_of(task, samples):
        model, batch = task.build_model().to(DEVICE), task.batch(samples, DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        return lambda: (model(**batch).loss.backward(), optimizer.step(), optimizer.zero_grad())

    one_thread()
    taken = interleaving.in_turns(4 * [step_of(plain_task, 4), step_of(task, 8)], turns=1)
    return [(above[CPU], other[CPU]) for (above,), (other,) in zip(taken[::2], taken[1::2])]


# %% tags=["check"]
side_by_side = []


def check(answer, tries=3):
    if answer is None:
        return exercises.not_attempted()
    if not side_by_side or tries < 3:
        side_by_side.extend(lab.run(both_steps, task=unseen, measure="value").value)
    above, other = (min(seconds) for seconds in zip(*side_by_side))
    measured = 1e3 * reference * other / above
    off = abs(answer - measured) / measured
    if 0.15 < off < 0.4 and tries > 1:  # near the limit, a moment's noise must not decide
        return check(answer, tries - 1)
    if off <= 0.25:
        return exercises.right(f"{answer:.4g} ms predicted, {measured:.4g} ms measured: {off:.0%} off")
    return exercises.wrong(f"{answer:.4g} ms is {off:.0%} off: which operations became fewer, and which smaller?")


exercises.check(lab, "unseen model", check, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
# An operation takes a call's time, and beyond it a multiple of its least, the same for all operations of its name.
def predicted(rows, passes_seconds):
    """Return the seconds of these operations, where those of `timed_plain` take `passes_seconds` together."""
    call, seconds = min(row.seconds for row in timed_plain if row.moved), 0.0
    for name in {row.name for row in rows}:
        both = [[row for row in each if row.name == name] for each in (rows, timed_plain)]
        spent, more = total(both[1], "seconds"), len(both[0]) / len(both[1])
        calls = min(spent, call * len(both[1]))
        least, timed_least = (sum(roof.seconds(row.flops, row.moved) for row in each) for each in both)
        seconds += calls * more + (spent - calls) * (least / timed_least if timed_least else more)
    above = total(timed_plain, "seconds")
    between = passes_seconds - above  # time between operations; below 0, the library's own attention is faster
    return seconds + between * (len(rows) / len(timed_plain) if between > 0 else seconds / above)


rows = [Row(*row) for row in lab.run(lambda task: count(task, 8), task=unseen, measure=("none",)).value]
whole = predicted(rows, reference - update) + update * unseen.parameters() / plain_task.parameters()
exercises.prove(check, solution=1e3 * whole, mistake=1e3 * reference)  # as many tokens, but not as long

# %% [markdown]
# ## Recap
#
# The times are those of an AMD EPYC with 2 cores (2026-11-29); yours are in the cells above.
#
# - **Two ceilings give the least time of an operation**, from its FLOPs and its bytes. A third limit can add to it: GELU took 2.1 times as long as a copy of as many bytes.
# - **Matmuls do nearly all the arithmetic of a step**, more than 95 % of its FLOPs.
# - **Backward has exactly 2 times the matmul FLOPs of forward.** In time the factor was 1.93 without dropout, and 1.26 with it.
# - **100 % utilization means that something ran.** A loop that only counts reaches it.
#
# Before you optimize, place your step on the roof. Bound by arithmetic: use a faster precision (lesson 07). Bound by bandwidth: move fewer bytes, by fusing (lesson 11) or by 16 bits. Bound by neither: use larger batches (lesson 04).

# %% tags=["finish"]
claims.finish()
