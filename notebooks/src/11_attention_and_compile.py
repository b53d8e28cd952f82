# %% [markdown]
# # Can you have the same numbers with fewer trips to memory?
#
# Two remedies leave the arithmetic as it is and change how often its results travel: fused attention, and a compiler for the whole model.
#
# **You will see**
# - attention computed tile by tile, equal to the plain one, and its square gone from memory
# - which attention kernel torch takes here, and what masks, dropout and padding do to the choice
# - what `torch.compile` captures, what its start costs, what it gives back, and after how many steps it has paid

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import itertools
import math
import os
import tempfile
import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from IPython.display import display
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention

from perf_helpers import Lab, Task, claims, exercises, hardware, interleaving, plots, widgets
from perf_helpers.estimate import estimate
from perf_helpers.records import CPU, Ratio
from perf_helpers.unknown import NeedsValues

lab = Lab(profile, strict=strict, out=out, lesson="11_attention_and_compile")
torch.set_num_threads(1)  # in this notebook's own process, where all tensors are small
on_cpu = lab.machine.kind == "cpu"
half = "bfloat16" if on_cpu or hardware.supports("sm80")[0] else "float16"

# %% [markdown]
# ## Idea
#
# Attention compares each token with each other one. The plain way writes all comparisons down, a square of *length x length* numbers for each head, reads them again for the softmax, writes the result, and reads that. The square is large and its arithmetic is little: the time goes into the trips.
#
# Nobody needs the square. What is needed is a weighted mean for each query, and a mean can be taken in parts. A **fused** kernel takes a tile of keys at a time, and no tile leaves the fast memory next to the processor.
#
# `torch.compile` does the same in general: it looks for operations that hand large results to one another, and makes one kernel of them.
#
# ## Predict
#
# Below, a small BERT is trained on long sequences (1024 tokens on a CPU, 2048 on a GPU), first with plain attention, then with torch's fused one. Weights and states count too.

# %%
widgets.predict(
    lab,
    "fused",
    "What is the peak with fused attention, in percent of the peak with plain attention?",
    "%",
    0,
    120,
)

# %% [markdown]
# ## By hand
#
# Plain attention is short. The second function sees `tile` keys at a time, and keeps three things for each query: the largest score so far, the sum of the exponentials, and the output so far. When a larger score turns up, sum and output were too large by a known factor: they *shrink* (online softmax, Milakov and Gimelshein 2018).


# %%
def plain(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # the square, for each head
    weights = scores.softmax(dim=-1)  # and another one
    return weights @ v


def tiled(q, k, v, tile=64):
    top = torch.full_like(q[..., :1], -math.inf)  # the largest score so far
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for keys, values in zip(k.split(tile, dim=-2), v.split(tile, dim=-2)):
        scores = q @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])  # length x tile
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink, weights = (top - higher).exp(), (scores - higher).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ values
        top = higher
    return out / total


torch.manual_seed(0)
q, k, v = (torch.randn(2, 4, 300, 32) for _ in range(3))  # batch, heads, length, numbers a head
torch.testing.assert_close(tiled(q, k, v), plain(q, k, v))
torch.testing.assert_close(tiled(q, k, v), scaled_dot_product_attention(q, k, v))
apart = (tiled(q, k, v) - scaled_dot_product_attention(q, k, v)).abs().max()
f"largest difference to torch's own: {apart.item():.1e}"

# %% [markdown]
# Equal up to rounding: another order of the same sums. Now memory and time against the length, forward and backward. `scaled_dot_product_attention` (SDPA) is a door with several rooms behind it; `sdpa_kernel` picks one, and those that this device does not have refuse. Peaks come from the allocator itself, as in the lab.


# %%
def peak_bytes(work):
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes), default=0)


def by_backend(backend):
    def attend(*inputs, **options):
        with warnings.catch_warnings(action="ignore"), attention.sdpa_kernel([getattr(attention.SDPBackend, backend)]):
            return scaled_dot_product_attention(*inputs, **options)

    return attend


# %%
BACKENDS = {"math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
WAYS = {"plain, by hand": plain, "tiles, by hand": tiled}
WAYS |= {f"SDPA, {name}": by_backend(backend) for name, backend in BACKENDS.items()}


def works(length, heads, width):
    """For each way that this device has, a function that computes attention and its gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else getattr(torch, half)
    inputs = [torch.randn(1, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    for name, way in WAYS.items():
        try:
            way(*inputs).sum().backward()  # from here on gradients exist: they do not count
        except RuntimeError:
            continue  # "No available kernel"
        yield name, lambda way=way: way(*inputs).sum().backward()


# %%
shape = dict(heads=2, width=32) if on_cpu else dict(heads=16, width=64)
lengths = [256, 512, 1024, 2048] if on_cpu else [512, 1024, 2048, 4096]


def memory_by_length(_):
    return {length: {name: peak_bytes(work) for name, work in works(length, **shape)} for length in lengths}


def time_by_length(_):
    if on_cpu:
        torch.set_num_threads(1)
    found = {}
    for length in lengths:
        names, each = zip(*works(length, **shape))
        found[length] = dict(zip(names, [min(turns)[0] for turns in interleaving.in_turns(each, 2)]))
    return found


def series(found):
    return {name: [found[str(length)][name] for length in lengths] for name in found[str(lengths[0])]}


# %%
memory = series(lab.run(memory_by_length, measure=("none",)).value)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
megabytes = {name: [size / 1e6 for size in sizes] for name, sizes in memory.items()}
_ = plots.lines(lengths, megabytes, "tokens", "peak (MB)", ax=left, title="Memory, forward and backward")
seconds = series(lab.run(time_by_length, measure=("none",)).value)
_ = plots.lines(lengths, seconds, "tokens", "seconds", ax=right, title="Time")
for ax in (left, right):
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths, lengths)
longer = math.log(lengths[-1] / lengths[0])
growth = {name: math.log(sizes[-1] / sizes[0]) / longer for name, sizes in memory.items()}
plots.Table(["attention", "memory grows as length to the power of"], [[n, f"{g:.2f}"] for n, g in growth.items()])

# %% [markdown]
# The exponents are those from the shortest to the longest sequence. Near 2 the square is there; near 1 it is gone (a bend on the way is scratch memory of the kernel). On log axes an exponent is a slope.
#
# Your tiles stand with the wrong group, and for a reason. Their forward holds no square. But autograd keeps each tile for the backward pass, and all tiles together are the square. FlashAttention's second idea (Dao and others 2022) mends that: keep the output and one number a query, and compute the tiles *again* in backward. That is lesson 06 inside a kernel.


# %%
def forward_only(_):
    inputs = [x.to("cuda" if torch.cuda.is_available() else "cpu") for x in (q, k, v)]
    with torch.no_grad():
        return {name: peak_bytes(lambda way=way: way(*inputs)) for name, way in (("plain", plain), ("tiles", tiled))}


held = lab.run(forward_only, measure=("none",)).value
assert held["tiles"] < 0.7 * held["plain"] and growth["tiles, by hand"] > 1.6  # measured: this is the answer
exercises.question(
    lab,
    "tiles under autograd",
    "You serve a model and need no gradients. Do the tiles that you wrote by hand save memory then?",
    {
        "No: the picture shows that they need as much as the plain way.": "The picture holds forward and backward. What "
        "fills it are tiles that autograd kept for the backward pass.",
        "Yes: without a backward pass a tile is dropped when the next one comes.": "Only a tile, the running maximum, "
        "the sum and the output are there at once. In training it takes a backward pass that computes them again.",
        "Only with a tile as long as the sequence.": "Then the tile is the square.",
    },
    right="Yes: without a backward pass a tile is dropped when the next one comes.",
)

# %% [markdown]
# ## Who takes what
#
# SDPA decides at each call. Let us ask: which kernels take a case, and which one is chosen? A padding mask hides the end of a short sequence; a *learnt bias* is added to the scores and wants a gradient; with *grouped queries* several heads share their keys.


# %%
def cases(device, dtype):
    options = dict(device=device, dtype=dtype)
    alone = [torch.randn(2, heads, 128, 64, requires_grad=True, **options) for heads in (4, 4, 4)]
    grouped = [torch.randn(2, heads, 128, 64, requires_grad=True, **options) for heads in (4, 2, 2)]
    padding = torch.arange(128, device=device).expand(2, 1, 128, 128) < 100
    bias = torch.zeros(1, 4, 128, 128, **options)
    yield "nothing special", alone, {}
    yield "causal", alone, {"is_causal": True}
    yield "padding mask", alone, {"attn_mask": padding}
    yield "learnt bias", alone, {"attn_mask": bias.requires_grad_()}
    yield "dropout 0.1", alone, {"dropout_p": 0.1}
    yield "grouped queries", grouped, {"enable_gqa": True}
    yield "grouped, padded", grouped, {"enable_gqa": True, "attn_mask": padding}


def takes(backend, inputs, options):
    try:
        by_backend(backend)(*inputs, **options)
        return True
    except RuntimeError:
        return False


# %%
def choices(_):
    device, found = "cuda" if torch.cuda.is_available() else "cpu", {"float32": {}, half: {}}
    values = {getattr(attention.SDPBackend, backend).value: name for name, backend in BACKENDS.items()}
    for dtype, table in found.items():
        for case, inputs, options in cases(device, getattr(torch, dtype)):
            chosen = values[torch._fused_sdp_choice(*inputs, **options)]
            table[case] = [chosen, *(takes(backend, inputs, options) for backend in BACKENDS.values())]
    return found


found = lab.run(choices, measure=("none",)).value
rows = [
    [case, dtype, chosen, *("yes" if taken else "-" for taken in each)]
    for dtype, table in found.items()
    for case, (chosen, *each) in table.items()
]
plots.Table(["case", "type", "torch takes", *BACKENDS], rows)

# %% [markdown]
# Read the third column downwards: *math* means the square is back. On a CPU there is one fused kernel, and dropout inside attention is one of the things it does not do; a BERT with its usual dropout of 0.1 trains there by the plain way, whatever it was told. On a GPU flash takes 16-bit numbers and no mask at all, and the memory-efficient kernel takes over where a batch is padded. transformers helps: it hands no mask over where nothing is padded. So *one short sequence in a batch* may change the kernel: sorting by length (lesson 12) saves more than the padding.

# %%
chosen = found["float32" if on_cpu else half]
fused_with_dropout = chosen["dropout 0.1"][0] != "math"
assert chosen["nothing special"][0] != "math"  # measured, as is the right answer below
yes = "It falls to what the first line of the table needs: dropout is done inside the kernel."
no = "Hardly: with dropout torch takes the plain way here, and the square is back."
exercises.question(
    lab,
    "dropout",
    "Your model has a dropout of 0.1 inside attention. You switch from eager to SDPA on this machine. Does the square go?",
    {
        yes: "So it is on GPUs, whose kernels draw the mask of a tile when they need it, and again in backward. Look at "
        "the row *dropout 0.1*.",
        no: "So it is on CPUs (torch 2.13). The flag is accepted, nothing is told, and nothing is saved. Look at the "
        "row *dropout 0.1*.",
        "SDPA refuses dropout.": "It never refuses. What no kernel takes, *math* does.",
    },
    right=yes if fused_with_dropout else no,
)

# %% [markdown]
# ## Baseline
#
# A BERT with few layers, room for long sequences and no dropout, trained with plain attention.

# %%
size = dict(num_hidden_layers=1, vocab_size=1000) if on_cpu else dict(num_hidden_layers=12)
no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
bert = Task("bert-small" if on_cpu else "bert-large", config=size | no_dropout | {"max_position_embeddings": 2048})
precision = {} if on_cpu else {"bf16": True} if half == "bfloat16" else {"fp16": True}
tokens = [256, 512, 1024] if on_cpu else [512, 1024, 2048]
options = dict(per_device_train_batch_size=1, measure=("memory",)) | precision
eager = [lab.train(f"eager, {n}", task=bert.replace(seq_len=n), attn_implementation="eager", **options) for n in tokens]
eager[-1]

# %% [markdown]
# ## Change one thing
#
# The same with `"sdpa"`, which is transformers' default. Look at which part of the bars is gone.

# %%
sdpa = [
    lab.train(f"sdpa, {n}", task=bert.replace(seq_len=n), attn_implementation="sdpa", **options)  # new
    for n in tokens
]


def in_percent():
    long = bert.replace(seq_len=tokens[-1])
    asked = dict(per_device_train_batch_size=1) | precision
    peaks = [estimate(long, attn_implementation=name, **asked).peak_bytes for name in ("sdpa", "eager")]
    return 100 * peaks[0] / peaks[1]


measured = 100 * sdpa[-1].peak_bytes / eager[-1].peak_bytes
_ = plots.memory([run for pair in zip(eager, sdpa) for run in pair], title="Peak memory by length")
widgets.revealed(lab, "fused", measured, estimate=lab.foresee(in_percent))

# %% [markdown]
# Activations and temporaries shrink; weights and states do not. At the shortest length the two hardly differ, for there the square is small, and maybe not even at the peak.
#
# ## What torch.compile captures
#
# `torch.compile(f)` watches Python run `f` once, notes the tensor operations in a **graph**, and hands the graph to a **backend**. A backend is a function: it takes a graph, and returns something to call in its place. Here is one that compiles nothing and counts.


# %%
def captured(function, *calls, **options):
    """The graphs that torch.compile makes of a function which is called with each of these inputs, one by one."""
    if lab.machine.rehearsed:
        raise NeedsValues("a rehearsal: nothing is captured there")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward  # runs the operations as they were noted

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, **options)
    with warnings.catch_warnings(action="ignore"):
        for call in calls:
            compiled(**call) if isinstance(call, dict) else compiled(call)
    return graphs


def gate(x):
    return torch.nn.functional.gelu(x) * x.sigmoid() + 1


(graph,) = captured(gate, torch.randn(8, 8))
[node.name for node in graph.graph.nodes]

# %% [markdown]
# As written, four operations read and write whole tensors. A compiler that sees them together makes one loop: one read, one write.
#
# What cannot be put into a graph *breaks* it: Python that must know a value before it can go on. Then there are two graphs, plain Python between them, and nothing fuses across. Breaks are silent: the result is right, only slower (`fullgraph=True` makes each an error). Here two are planted; `explain` finds them. The cell after it counts the graphs of real models, and of what you may want to combine: each row calls a model twice with the same batch.


# %%
def planted(x):
    y = torch.relu(x)
    print("mean", end=" ")
    if y.mean() > 0.5:
        y = y / 2
    return y.sin().exp()


def mended(x):
    y = torch.relu(x)
    y = torch.where(y.mean() > 0.5, y / 2, y)  # new: both sides are computed, and the choice is an operation
    return y.sin().exp()


x = torch.randn(64)
for function in (planted, mended):
    found_breaks = None if lab.machine.rehearsed else torch._dynamo.explain(function)(x)
    print(f"{function.__name__}: {len(captured(function, x))} graphs")
    for each in found_breaks.break_reasons:
        print("   breaks at", each.user_stack[-1].line, "|", each.reason.splitlines()[0])
torch.testing.assert_close(planted(x), mended(x))

# %%
small = Task("bert-tiny", seq_len=32, config=no_dropout | {"num_hidden_layers": 2})
told = small.replace(config={"problem_type": "single_label_classification"})


def graphs_of(task, prepare=lambda model: model):
    model, batch = prepare(task.build_model()), task.batch(2)
    return len(captured(model, batch, batch))


def checkpointed(model):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()  # the name changed in transformers 5
    return model


def cast(model):
    return torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)


graphs = {"as it comes": graphs_of(small)}
graphs["problem_type told"] = graphs_of(told)
graphs["with checkpointing"] = graphs_of(told, checkpointed)
graphs["with checkpointing, use_cache told"] = graphs_of(told.replace(config={"use_cache": False}), checkpointed)
graphs["with autocast"] = graphs_of(told, cast)
plots.Table(["BERT", "graphs of two equal calls"], list(graphs.items()))

# %% [markdown]
# Two graphs are a surprise each. The classifier notes its kind of problem in its own configuration during the first call; with checkpointing it switches a cache off there. The second call no longer fits what was compiled, and everything is compiled once more. Telling both beforehand halves the start. (`TORCH_LOGS=recompiles` prints what did not fit.) Autocast goes into the same graph.
#
# ## Lengths that change
#
# A graph holds for the shapes that it saw. Another length asks for another one; the second time, torch guesses that this dimension will go on changing, and compiles one graph for all lengths. Ten batches, each of another length:

# %%
gated = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
batch_lengths = [17, 19, 23, 29, 31, 37, 41, 47, 53, 64]
padded = [32 * math.ceil(n / 32) for n in batch_lengths]


def recompiled(lengths, **options):
    return len(captured(gated, *[torch.randn(4, n, 16) for n in lengths], **options))


recompilations = {"default": recompiled(batch_lengths), "dynamic=True": recompiled(batch_lengths, dynamic=True)}
recompilations["dynamic=False"] = recompiled(batch_lengths, dynamic=False)
recompilations["dynamic=False, padded to 32 or 64"] = recompiled(padded, dynamic=False)
limit = torch._dynamo.config.recompile_limit
print(f"a function is compiled {limit} times at most; after that it runs uncompiled, with a warning")
plots.Table(["lengths", "graphs"], list(recompilations.items()))

# %% [markdown]
# ## What it costs, what it gives
#
# Now a backend that does compile: `inductor`, the default, writes C++ for a CPU and Triton for a GPU. Three processes train the same model. The first finds an empty cache: a **cold start**. The others find what it left on disk: a **warm start**. In each, steps without a compiler and with three backends take turns. (Headers that torch compiles once a machine lie elsewhere: the very first start here may have been longer still.)


# %%
def step_of(model, batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        with torch.autocast("cuda", dtype=getattr(torch, half), enabled=torch.cuda.is_available()):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for the device

    return step


def started(step):
    began = time.perf_counter()
    loss = step()
    return [time.perf_counter() - began, loss]


ORDER = ["none", "inductor", "none", "aot_eager", "eager"]


# %%
def trained(task):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    device, batch_size = ("cuda", 8) if torch.cuda.is_available() else ("cpu", 4)
    if device == "cpu":
        torch.set_num_threads(1)
    batch, steps, first, missing = task.batch(batch_size, device), {}, {}, None
    for name in dict.fromkeys(ORDER):
        model = task.build_model().to(device)
        steps[name] = step_of(model if name == "none" else torch.compile(model, backend=name), batch)
        try:
            first[name] = started(steps[name])
        except (torch._inductor.exc.InductorError, torch._dynamo.exc.BackendCompilerFailed) as error:
            missing = f"needs a C++ compiler, on a GPU Triton ({str(error).splitlines()[0][:90]})"
            steps[name], first[name] = steps["none"], first["none"]
    turns = interleaving.in_turns([steps[name] for name in ORDER], 8)
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    return {"first": first, "turns": turns, "peaks": peaks, "missing": missing}


# %%
compiled_task = told.replace(seq_len=128, config={"num_hidden_layers": 1})
if not on_cpu:
    compiled_task = lab.task.replace(config=no_dropout | told.config | {"num_hidden_layers": 6})
cache = tempfile.TemporaryDirectory(prefix="inductor-")  # new at each run of this cell: what is told as cold is cold
folder = cache.name
processes = [lab.run(trained, task=compiled_task, measure=("none",)).value]
if on_cpu:  # two at once, a core each
    processes += [rank["value"] for rank in lab.run(trained, task=compiled_task, measure=("none",), processes=2).ranks]
else:
    processes += [lab.run(trained, task=compiled_task, measure=("none",)).value for _ in range(2)]
missing = processes[0]["missing"]
if missing:
    print(f"inductor compiles nothing here: it {missing}. The lesson goes on without.")


# %%
def against_none(number):
    """The speed of one of the works in turns against no compiler, and how much that differs from itself."""
    taken = [[each["turns"][0], each["turns"][number], each["turns"][2]] for each in processes]
    return Ratio.of_turns(taken, CPU, 1.05 if on_cpu else 1.02)


def step_seconds(number):
    return float(np.median([wall for wall, _ in processes[0]["turns"][number]]))


tried = {"aot_eager": 3, "eager": 4} if missing else {"inductor": 1, "aot_eager": 3, "eager": 4}
speeds = {name: against_none(number) for name, number in tried.items()}
cold, warm = (
    float(np.median([each["first"]["inductor"][0] for each in some])) for some in (processes[:1], processes[1:])
)
rows = []
for name, number in [("none", 0), *tried.items()]:
    first, loss = processes[0]["first"][name]
    assert abs(loss / processes[0]["first"]["none"][1] - 1) < 0.02  # the same numbers
    speed, peak = speeds.get(name, "1"), plots.bytes_text(processes[0]["peaks"][name])
    rows.append([name, f"{first:.2f}", f"{step_seconds(number):.4f}", f"{speed}", peak])
print("" if missing else f"inductor, warm start: {warm:.2f} s")
plots.Table(["backend", "first step, cold (s)", "later steps (s)", "speed", "peak of a step"], rows)

# %% [markdown]
# The last column is what a step needs beyond weights and states, from the allocator. Less is kept where a fused kernel can compute an element again in backward in place of reading it. `eager` and `aot_eager` take the graph and run its operations as they were: they tell you whether capturing or compiling is at fault when something breaks, and speed nothing up.
#
# After how many steps has the start paid? The start costs *cold - one step*, each step gives *step without - step with*:
#
# > break-even = (cold - step without) / (step without - step with)

# %%
if not missing:
    gain = step_seconds(0) - step_seconds(1)
    break_even = {name: (start - step_seconds(0)) / gain for name, start in (("cold", cold), ("warm", warm))}
    if gain <= 0:
        print("compiled steps were no faster here: the start never pays")
    else:
        print("; ".join(f"a {name} start has paid after {steps:,.0f} steps" for name, steps in break_even.items()))
        counts = np.linspace(0, 2 * break_even["cold"], 50)
        starts = {"cold": cold, "warm": warm}
        curves = {f"compiled, {name} start": start + counts * step_seconds(1) for name, start in starts.items()}
        curves["no compiler"] = counts * step_seconds(0)
        _ = plots.lines(counts, curves, "steps", "seconds", title="When compiling pays", markers=False)

# %%
exercises.question(
    lab,
    "free",
    "You try ten learning rates, a hundred steps each, every one in a new process with other lengths. A colleague says: "
    "*compile all of them, it is one line and makes steps faster*. What do you answer?",
    {
        "Do it: a faster step is faster for a hundred steps too.": "The start is paid in each process, and in full where "
        "the lengths, and so the kernels, are new.",
        "Compare a hundred steps with the break-even first.": "That number decides. Equal shapes would at least start "
        "warm.",
        "Never compile while tuning: compiled models learn differently.": "The losses agree to rounding. What differs is "
        "the time.",
    },
    right="Compare a hundred steps with the break-even first.",
)

# %% [markdown]
# ## The guide's list
#
# The 2023 guide switches fused attention on by `model.to_bettertransformer()`, and names ten backends of the compiler. What of that exists on your machine, without further packages?

# %%
GUIDE = {
    "debugging": ["eager", "aot_eager"],
    "training and inference": ["inductor", "nvfuser", "aot_nvfuser", "aot_cudagraphs"],
    "inference only": ["ofi", "fx2trt", "onnxrt", "ipex"],
}
TODAY = {"nvfuser": "inductor", "aot_nvfuser": "inductor", "aot_cudagraphs": "cudagraphs", "fx2trt": "the package "
         "torch_tensorrt", "ofi": "inductor, frozen weights", "onnxrt": "torch.onnx.export", "ipex": "inductor"}  # fmt: skip
has_it = hasattr(transformers.PreTrainedModel, "to_bettertransformer")
default = bert.build_model(device="meta").config._attn_implementation
exist = torch._dynamo.list_backends(exclude_tags=())
known = {use: [name for name in names if name in exist] for use, names in GUIDE.items()}
rows = [
    [name, use, *(["exists", ""] if name in known[use] else ["gone", TODAY.get(name, "")])]
    for use, names in GUIDE.items()
    for name in names
]
print(f"to_bettertransformer: {'exists' if has_it else 'gone'}; attention that models take unasked: {default}")
print("backends that are not for debugging, today:", ", ".join(torch._dynamo.list_backends()))
plots.Table(["backend of 2023", "for", f"torch {torch.__version__}", "today"], rows)

# %% [markdown]
# `to_bettertransformer` went away in transformers 5.0 ([pull request 41367](https://github.com/huggingface/transformers/pull/41367)): since 4.36 models call SDPA by themselves.
#
# And does inductor use CUDA graphs, as the guide says? They record all launches of a step once and replay them as one. torch's own table of modes tells which ones switch them on: `reduce-overhead` and `max-autotune`, not the default.
#
# In the Trainer all this is `torch_compile=True`, with `torch_compile_backend` and `torch_compile_mode`. Each timed run there must warm up for as many steps as it compiles.
#
# ## What held

# %% tags=["claim"]
display(claims.check("sdpa-memory", sdpa[-1].peak_bytes / eager[-1].peak_bytes))
timed = (
    dict(per_device_train_batch_size=1, measure=("time",), steps=2, task=bert.replace(seq_len=tokens[-1])) | precision
)
pair = [lab.train(name, attn_implementation=name, **timed) for name in ("eager", "sdpa")]
losses = list(zip(*(run.losses for run in pair)))
display(claims.check("sdpa-same", max(abs(b / a - 1) for a, b in losses), note=f"{len(losses)} steps"))
display(claims.check("sdpa-speed", lab.compare(*pair, turns=8).speed_ratio))
taken = dict(zip(BACKENDS, found[half]["nothing special"][1:]))
display(claims.check("sdpa-fused-kernels", taken["flash"] + taken["efficient"], note=f"{half}: {taken}"))
display(claims.check("better-transformer", int(has_it), note=f"the default here: {default}"))
if missing:
    display(claims.check("compile", missing=missing))
else:
    display(claims.check("compile", speeds["inductor"], note=f"cold start {cold:.1f} s, warm start {warm:.1f} s"))
display(claims.check("compile-debugging", speeds["aot_eager"], note=f"the eager backend: {speeds['eager']}"))
display(claims.check("compile-captures", graphs["problem_type told"] - 1, note=f"{graphs}"))
display(claims.check("backends-training", len(known["training and inference"])))
display(claims.check("backends-inference", len(known["inference only"]), note=f"debugging: {known['debugging']}"))
modes = torch._inductor.list_mode_options()
recording = [name for name, options in modes.items() if options.get("triton.cudagraphs")]
claims.check("compile-cudagraphs", int("default" in recording), note=f"modes that do: {', '.join(recording)}")

# %% [markdown]
# ## Explore
#
# Bytes of *one* square in one layer, and of what a fused kernel keeps in its place: the output and one number a query. Find the length from which the square is larger than the 16 GB of a T4.


# %% tags=["widget"]
def draw(batch, heads, bits):
    lengths = [2**power for power in range(7, 18)]
    square = [batch * heads * n * n * bits / 8 / 1e9 for n in lengths]
    kept = [batch * heads * n * (64 * bits / 8 + 4) / 1e9 for n in lengths]
    limit = next((f"{n:,} tokens" for n, size in zip(lengths, square) if size > 16), "no length here")
    curves = {f"one square ({limit}: over 16 GB)": square, "output and row sums": kept, "16 GB": [16] * len(lengths)}
    ax = plots.lines(lengths, curves, "tokens", "GB, heads of 64 numbers")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    return ax


_ = widgets.explore(draw, batch=[1, 4, 16, 64], heads=[16, 4, 12, 32], bits=[16, 32])

# %% [markdown]
# ## Exercise: the challenge
#
# Rewrite the function below with **no graph break**: the same outputs for every input, one graph. Breaks are counted by `explain`; inputs are tried that take both sides of each branch.


# %% tags=["exercise"]
def broken(x):
    scale = x.abs().max().item()
    if scale > 1:
        x = x / scale
    x = torch.nn.functional.gelu(x)
    if (x < 0).sum() > 10:
        x = x.clamp(min=0)
    return x * x.shape[0]


exercises.hint(
    "`explain` names the lines. Which ones turn a tensor into a Python number?",
    "A number that stays a tensor needs no `.item()`. A choice between two tensors is `torch.where`.",
    "`scale.clamp(min=1)` divides by 1 where the first branch is not taken.",
)

answer = None  # a function of x


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if lab.machine.rehearsed:
        raise NeedsValues("a rehearsal: nothing is captured there")
    torch.manual_seed(0)
    for x in (torch.randn(64), 0.1 * torch.rand(64), torch.rand(64), 0.1 * torch.randn(64)):
        if not torch.allclose(answer(x), broken(x), atol=1e-6):
            return exercises.wrong("for some inputs its output differs from that of `broken`")
    torch._dynamo.reset()
    breaks = torch._dynamo.explain(answer)(torch.randn(64)).graph_break_count
    if breaks:
        return exercises.wrong(f"equal outputs, and {breaks} break{'s' * (breaks > 1)} left")
    return exercises.right("equal outputs, one graph")


exercises.check(lab, "no breaks", check, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def whole(x):
    x = torch.nn.functional.gelu(x / x.abs().max().clamp(min=1))
    return torch.where((x < 0).sum() > 10, x.clamp(min=0), x) * x.shape[0]


def one_left(x):
    x = torch.nn.functional.gelu(x / x.abs().max().clamp(min=1))
    if (x < 0).sum() > 10:
        x = x.clamp(min=0)
    return x * x.shape[0]


exercises.prove(check, solution=whole, mistake=one_left)

# %% [markdown]
# ## Recap
#
# - Attention was computed tile by tile with a running maximum and sum: equal to the plain one, and the square was gone from memory, in training too where backward computed the tiles again.
# - torch chose its kernel at each call. Masks, dropout and a learnt bias changed the choice, and *math* is where the square comes back.
# - `torch.compile` captured the model in one graph where nothing broke it. Its start cost many steps, your break-even says how many, and changing lengths can make it pay again and again.
#
# Compiling is the wrong tool for short runs, for shapes that never repeat, and while you still change the code. Fused attention has no such price: it is the default, and what matters is to notice when it is not taken.

# %% tags=["finish"]
claims.finish(lab)
