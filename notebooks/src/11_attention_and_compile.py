# %% [markdown]
# # Can you have the same numbers with fewer trips to memory?
#
# You doubled the sequence length, and the training that fitted now runs out of memory. Or it fits, and its steps are slower than the arithmetic explains. Two remedies leave the arithmetic as it is, and change how often results travel between the processor and memory: fused attention, and a compiler for the whole model.
#
# **You will see**
# - attention computed tile by tile, with the same output as plain attention and without a matrix of *length x length* scores
# - which attention kernel torch takes on your machine with masks, dropout or grouped queries, and what you gain by packing sequences into one row
# - what `torch.compile` captures, what its start costs, what it gains, and after how many steps it has paid for itself
#
# **Minutes:** plan 30 with the code and the exercise, about 15 of them for reading; the cells compute for about 1 on two cores.
#
# **Before you start:** lessons 01 (activations, peak) and 03 (intervals).
#
# **On a CPU:** memory and gradients are as real as on a GPU, and `torch.compile` works if there is a C++ compiler. There are no CUDA graphs. The speeds say nothing about a GPU.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import importlib.util
import itertools
import math
import os
import tempfile
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers
from IPython.display import display
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention

from perf_helpers import Claims, Lab, Task, exercises, hardware, interleaving, plots, widgets
from trainmem.estimate import estimate
from trainmem.records import CPU, Ratio
from trainmem.unknown import NeedsValues

lab = Lab(profile, strict=strict, out=out, lesson="11_attention_and_compile")
claims = Claims(lab)
torch.set_num_threads(1)  # in this notebook's own process, where all tensors are small
on_cpu = lab.machine.kind == "cpu"
half = "bfloat16" if on_cpu or hardware.supports("sm80")[0] else "float16"

# %% [markdown]
# ## Idea
#
# Attention computes three vectors for each token: a *query*, a *key* and a *value*. The query of one token times the key of another is their *score*. Plain attention writes all scores to memory: a square matrix of *length x length* numbers for each head. It reads them for the softmax, writes the resulting *attention weights*, and reads these to multiply the values. The square is large and needs little arithmetic, so most of the time goes into the trips to memory.
#
# The square itself is not needed. A query's output is a weighted mean of the values, and a mean can be computed in parts. A *kernel* is a compiled function that runs on the device; calling it is a *launch*. A **fused** kernel does scores, softmax and mean together, a few keys at a time. Their scores are one *tile* of the square, and a tile never leaves the fast memory next to the processor.
#
# `torch.compile` applies the same idea to a whole model: it looks for operations that pass large results to one another, and merges them into one kernel.
#
# ## Predict
#
# Below, a small BERT is trained on long sequences (1024 tokens on a CPU, 2048 on a GPU), first with plain attention, then with torch's fused attention. Each training's peak also contains the model's weights and optimizer states.

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
# Plain attention takes three lines. The second function sees `tile` keys at a time, and keeps three things for each query: the largest score so far, the sum of the exponentials so far, and the output so far. The function subtracts the largest score so far before it takes an exponential, so that none overflows. If a tile has a larger score, the sum and the output so far were computed with too small a maximum: the function multiplies both by `shrink`, which is exp(old maximum - new maximum) (online softmax, Milakov and Gimelshein 2018).


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
q, k, v = (torch.randn(2, 4, 300, 32) for _ in range(3))  # batch, heads, length, head size
torch.testing.assert_close(tiled(q, k, v), plain(q, k, v))
torch.testing.assert_close(tiled(q, k, v), scaled_dot_product_attention(q, k, v))
largest = (tiled(q, k, v) - scaled_dot_product_attention(q, k, v)).abs().max()
f"largest difference to torch's own: {largest.item():.1e}"

# %% [markdown]
# The outputs differ by rounding only: the same sums are computed in another order.
#
# Next, you measure memory and time for several lengths, forward and backward. `scaled_dot_product_attention` (SDPA) is one function with several kernels behind it; `sdpa_kernel` picks one of them: *math* computes attention in the plain way; *flash*, *efficient* (memory-efficient) and *cudnn* are fused. A kernel that your device lacks is missing from the results.


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
    """Yield (name, function) for each way that this device has; the function computes attention and its gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else getattr(torch, half)
    inputs = [torch.randn(1, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    for name, way in WAYS.items():
        try:
            way(*inputs).sum().backward()  # makes the gradients, so that they are not part of the measured peak
        except RuntimeError:
            continue  # "No available kernel"
        yield name, lambda way=way: way(*inputs).sum().backward()
    yield "tiles, no gradients", torch.no_grad()(lambda: tiled(*inputs))


# %%
shape = dict(heads=2, width=32) if on_cpu else dict(heads=16, width=64)
lengths = [512, 1024, 2048, 4096]
if on_cpu:
    lengths = lab.sized([256, 512, 1024, 2048], [64, 128, 256, 512])


def memory_by_length(_):
    return {length: {name: peak_bytes(work) / 1e6 for name, work in works(length, **shape)} for length in lengths}


def time_by_length(_):
    torch.set_num_threads(1 if on_cpu else torch.get_num_threads())
    found = {}
    for length in lengths:
        names, each = zip(*works(length, **shape))
        found[length] = dict(zip(names, [min(turns)[0] for turns in interleaving.in_turns(each, 2)]))
    return found


def series(job):
    found = lab.run(job, measure="value").value
    return {name: [found[str(length)][name] for length in lengths] for name in found[str(lengths[0])]}


# %%
memory, seconds = series(memory_by_length), series(time_by_length)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
_ = plots.lines(lengths, memory, "tokens", "peak (MB)", ax=left, title="Memory, forward and backward")
_ = plots.lines(lengths, seconds, "tokens", "seconds", ax=right, title="Time")
for ax in (left, right):
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths, lengths)
longer = math.log(lengths[-1] / lengths[0])
growth = {name: math.log(sizes[-1] / sizes[0]) / longer for name, sizes in memory.items()}
plots.Table(["attention", "memory grows as length to the power of"], [[n, f"{g:.2f}"] for n, g in growth.items()])

# %% [markdown]
# Each exponent is taken between the shortest and the longest sequence. An exponent near 2 means that the square is in memory; near 1, it is not.
#
# For *tiles* without gradients the exponent is near 1: the forward pass holds no square. With gradients it is near 2: for the backward pass autograd keeps each tile, and all tiles together are the square. FlashAttention (Dao and others 2022), on which the *flash* kernels are based, fixes that. It keeps only the output and one number per query, the logarithm of its sum of exponentials. With this number the backward pass computes each tile *again*.
#
# ## Which kernel takes which case
#
# SDPA chooses its kernel at each call, by the inputs and options of this call. The next two cells try seven *cases*: which kernels accept each, and which one does torch choose? Four cases need an explanation:
#
# - a *padding mask* hides the end of a short sequence;
# - a *learnt bias* is added to the scores and needs a gradient;
# - *dropout* sets some of the attention weights to 0;
# - with *grouped queries*, several heads share their keys and values.
#
# If torch chooses `math`, the square is back.


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


found = lab.run(choices, measure="value").value
rows = [
    [case, dtype, kernel, *("yes" if taken else "-" for taken in each)]
    for dtype, table in found.items()
    for case, (kernel, *each) in table.items()
]
chosen = found["float32" if on_cpu else half]
fused_with_dropout = chosen["dropout 0.1"][0] != "math"
assert chosen["nothing special"][0] != "math"
print(f"{len(rows)} cases tried; first a question, then the table")

# %%
yes = "Yes: a fused kernel applies the dropout itself."
no = "No: with dropout torch takes the plain way here, and the square is back."
exercises.question(
    lab,
    "dropout",
    "Your model has a dropout of 0.1 inside attention. You switch from plain attention to SDPA on this machine. Does this keep the square of scores out of memory?",
    {
        yes: "This is true of GPUs. Their kernels draw the dropout mask of a tile when they need it, and again in the "
        "backward pass. Look at the row *dropout 0.1* of the next table.",
        no: "This is true of CPUs (torch 2.15). The flag is accepted without a warning, and nothing is saved. Look at the "
        "row *dropout 0.1* of the next table.",
        "SDPA refuses dropout.": "It never refuses. If no fused kernel takes a case, `math` does.",
    },
    right=yes if fused_with_dropout else no,
)

# %% [markdown]
# The next cell shows two tables. The first has one row per case and type; its column *torch takes* has torch's choice.
#
# A CPU has one fused kernel, in the column *flash*. It differs from the GPU's flash kernel: it takes masks and fp32, but no dropout. A BERT with its usual dropout of 0.1 is therefore trained there with plain attention.
#
# > **On a GPU:** torch goes through its kernels in a fixed order and takes the first one that accepts the case. On most GPUs flash comes first. It takes 16-bit numbers and no mask; if a batch is padded, the memory-efficient kernel takes over. On compute capability 9.0 and 10.0 (H100, B200) cuDNN's kernel comes first, and it accepts masks ([torch's source](https://github.com/pytorch/pytorch/blob/001f694aef6f922b4fdf6d27d59162d27bf3df58/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)).
#
# The choice also depends on the version of torch. Before torch 2.14, no fused kernel took grouped queries (`enable_gqa=True`) in fp32 on an A100: the square was back, so people repeated keys and values by hand. Now the memory-efficient kernel takes them ([#191085](https://github.com/pytorch/pytorch/pull/191085)), and repeating only costs memory. The second table has estimates of the peak for this case, without the 192 MiB of the inputs: a batch of 4 sequences of 2048 tokens, with 32 heads for the queries and 8 for the keys and values.


# %%
def grouped(_, times):
    q, k, v = (torch.empty(4, heads, 2048, 128) for heads in (32, 8, 8))
    keys, values = (x.repeat_interleave(times, dim=1) if times > 1 else x for x in (k, v))
    with torch.no_grad():
        return scaled_dot_product_attention(q, keys, values, enable_gqa=times == 1)


def beyond_inputs(release, times):
    given = dict(function=lambda task: grouped(task, times), card="a100", torch_version=release)
    estimated = lab.foresee(estimate, Task("bert-tiny"), **given)
    return f"{estimated.peak_bytes / 2**20 - 192:,.0f}" if estimated else "no estimate"  # 192: the inputs


display(plots.Table(["case", "type", "torch takes", *BACKENDS], rows))
releases = ["2.13", "2.15"]
rows = [["enable_gqa=True", 1], ["repeated by hand", 4]]
rows = [[name, *(beyond_inputs(release, times) for release in releases)] for name, times in rows]
plots.Table(["MiB beyond the inputs, with torch", *releases], rows)

# %% [markdown]
# ## Sequences of unequal lengths: pack them
#
# transformers passes a mask to SDPA as soon as *one* sequence of a batch is padded. Sorting by length (lesson 12) only makes masks smaller.
#
# **Packing** removes them: all sequences are joined into a single row, and no token may attend to another sequence. Two kinds of kernel handle such a row:
#
# - a *varlen* kernel (for variable length) gets the position at which each sequence begins, and computes all of them in one launch (the function `varlen` below imitates it with one call per sequence);
# - FlexAttention gets a rule instead of a mask, and skips the blocks of 128 x 128 scores that the rule leaves empty.
#
# How many scores does each way compute?

# %%
from torch.nn.attention.flex_attention import create_block_mask

sequences = torch.tensor([300, 700, 150, 500, 250, 148])
document = torch.repeat_interleave(torch.arange(len(sequences)), sequences)  # of each token
q, k, v = (torch.randn(1, 4, len(document), 32) for _ in range(3))


def varlen(q, k, v, lengths):
    parts = zip(*(x.split(lengths, dim=-2) for x in (q, k, v)))
    return torch.cat([scaled_dot_product_attention(*part) for part in parts], dim=-2)


def same(batch, head, query, key):
    return document[query] == document[key]


blocks = create_block_mask(same, None, None, len(document), len(document), device="cpu")
masked = scaled_dot_product_attention(q, k, v, attn_mask=document[:, None] == document)
torch.testing.assert_close(varlen(q, k, v, sequences.tolist()), masked)
scores = {"padded to the longest, with a mask": len(sequences) * 700**2, "packed, with a mask": len(document) ** 2}
scores["packed, FlexAttention's blocks"] = round(len(document) ** 2 * (1 - blocks.sparsity() / 100))
scores["packed, varlen"] = int((sequences**2).sum())
plots.Table(["six sequences, 148 to 700 tokens", "scores of each head"], [[n, f"{c:,}"] for n, c in scores.items()])

# %% [markdown]
# Packing alone computes even more scores, because one long row has a large square. Packing saves memory and time only if the masked scores are skipped.
#
# > **On a GPU:** `varlen_attn` of `torch.nn.attention.varlen` skips them, in 16 bits. FlexAttention is a Python function that `torch.compile` turns into a kernel. Uncompiled, it holds the square.
#
# ## Baseline, and one change
#
# The model is a BERT with few layers, room for long sequences and no dropout. It is trained with plain attention (`"eager"`), then with `"sdpa"`, which is transformers' default. Compare the colours of the bars: which kind of bytes is smaller with `"sdpa"`?

# %%
size = dict(num_hidden_layers=1, vocab_size=1000) if on_cpu else dict(num_hidden_layers=12)
no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
bert = Task("bert-small" if on_cpu else "bert-large", config=size | no_dropout | {"max_position_embeddings": 2048})
precision = {} if on_cpu else {"bf16": True} if half == "bfloat16" else {"fp16": True}
tokens = [256, 512, 1024] if on_cpu else [512, 1024, 2048]
options = dict(per_device_train_batch_size=1) | precision


def trained_with(name, length):
    task = bert.replace(seq_len=length)
    return lab.train(f"{name}, {length}", task=task, attn_implementation=name, measure=("memory",), **options)


def in_percent():
    long = bert.replace(seq_len=tokens[-1])
    peaks = [estimate(long, attn_implementation=name, **options).peak_bytes for name in ("sdpa", "eager")]
    return 100 * peaks[0] / peaks[1]


eager, sdpa = ([trained_with(name, length) for length in tokens] for name in ("eager", "sdpa"))  # new: "sdpa"
measured = 100 * sdpa[-1].peak_bytes / eager[-1].peak_bytes
_ = plots.memory([run for pair in zip(eager, sdpa) for run in pair], title="Peak memory by length")
widgets.revealed(lab, "fused", measured, estimate=lab.foresee(in_percent))

# %% [markdown]
# At the longest length activations and temporaries are smaller; weights and states are not. At the shortest length the two peaks hardly differ. (The two peaks may be at different moments, so one kind of bytes can be larger although the peak is lower.)
#
# Does the model compute the same numbers? A loss cannot answer that: at the start of training it hardly depends on attention, so a kernel that returns zeros would pass. Compare the gradients of all weights instead, in a hard case: the weights are so large that each token attends to a few tokens only, half of one sequence is masked, and no tile size divides the length.


# %%
def gradients(task, implementation):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = task.build_model(attn_implementation=implementation).to(device)
    batch = task.batch(2, device)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, task.seq_len // 2 :] = 0
    model(**batch).loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def apart(task, first="eager", second="sdpa"):
    """Return the norm of the difference between the gradients of two kinds of attention / the norm of the first."""
    expected, found = gradients(task, first), gradients(task, second)
    return ((found - expected).norm() / expected.norm()).item()


sharp = bert.replace(seq_len=300, config={"num_hidden_layers": 1, "initializer_range": 0.1})
difference = lab.run(apart, task=sharp, measure="value").value
print(f"norm of the difference between the gradients / norm of the gradients: {difference:.0e}, in fp32")

# %% [markdown]
# ## What torch.compile captures
#
# `torch.compile(f)` watches Python run `f` once, records the tensor operations in a **graph**, and passes the graph to a **backend**. (This part of torch is Dynamo, `torch._dynamo` in the code.) A backend is a function that takes a graph and returns something to call in its place. The backend below compiles nothing; it only collects the graphs.


# %%
def captured(function, *calls, regions=(), **options):
    """Return, for each call, the graphs that torch.compile makes when the function is called with its inputs."""
    if lab.machine.rehearsed:  # a dry run for a GPU that this machine lacks (docs/rehearsal.md)
        raise NeedsValues("a rehearsal: nothing is captured there")
    graphs = []

    def backend(graph, inputs):
        graphs[-1].append(graph)
        return graph.forward  # runs the recorded operations unchanged

    torch._dynamo.reset()
    compiled = function if regions else torch.compile(function, backend=backend, **options)
    for region in regions:
        region.compile(backend=backend)
    for call in calls:
        graphs.append([])
        compiled(**call) if isinstance(call, dict) else compiled(call)
    return graphs


def gate(x):
    return torch.nn.functional.gelu(x) * x.sigmoid() + 1


[node.name for node in captured(gate, torch.randn(8, 8))[0][0].graph.nodes]

# %% [markdown]
# The list has the graph's input, four operations, and the output. Each of these operations reads and writes a whole tensor. A compiler that sees them together makes one loop of them.
#
# Some Python cannot be put into a graph, for example an `if` that must know a tensor's value before it can go on. It *breaks* the graph: the result is two graphs with plain Python between them, and nothing is fused across the break. Breaks are silent. The result is right, only slower. With `fullgraph=True` each break is an error, and the environment variable `TORCH_LOGS=graph_breaks` prints the breaks.
#
# The next cell has two planted breaks, and `explain` finds them. (The word *mean* in its output comes from the planted `print`.)


# %%
def planted(x):
    y = torch.relu(x)
    print("mean", end=" ")
    if y.mean() > 0.5:
        y = y / 2
    return y.sin().exp()


def fixed(x):
    y = torch.relu(x)
    y = torch.where(y.mean() > 0.5, y / 2, y)  # new: both sides are computed, and the choice is an operation
    return y.sin().exp()


x = torch.randn(64)
for function in (planted, fixed):
    found_breaks = None if lab.machine.rehearsed else torch._dynamo.explain(function)(x)
    print(f"{function.__name__}: {len(captured(function, x)[0])} graphs")
    for each in found_breaks.break_reasons:
        print("   breaks at", each.user_stack[-1].line, "|", each.reason.splitlines()[0])
torch.testing.assert_close(planted(x), fixed(x))

# %% [markdown]
# The next cell calls each of several models twice with the same batch. `problem_type` in a configuration tells a classifier which loss to compute; in the rows with *set* it is set beforehand. In the last row the layers are compiled one by one (*regional* compilation). The layers are alike, so the graph of the first one serves them all.

# %%
small = Task("bert-tiny", seq_len=32, config=no_dropout | {"num_hidden_layers": 4})
preset = small.replace(config={"problem_type": "single_label_classification"})


def looked_at(task, prepare=lambda model: model, regional=False):
    model, batch = prepare(task.build_model()), task.batch(2)
    first, second = captured(model, batch, batch, regions=model.bert.encoder.layer if regional else ())
    parts = [part for graph in first for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    operations = sum(node.op.startswith("call") for part in parts for node in part.graph.nodes)
    return {"breaks": len(first) - 1, "second": len(second), "operations": operations}


def checkpointed(model):
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()  # the name changed in transformers 5
    return model


graphs = {"BERT, as it comes": looked_at(small), "BERT, problem_type set": looked_at(preset)}
graphs["BERT, set, with checkpointing"] = looked_at(preset, checkpointed)
graphs["BERT, set, with autocast"] = looked_at(preset, lambda m: torch.autocast("cpu", dtype=torch.bfloat16)(m.forward))
graphs["GPT-2, as it comes"] = looked_at(Task("gpt2", 32, config=dict(n_layer=2, n_embd=64, n_head=2)))
graphs["BERT, set, layer by layer"] = looked_at(preset, regional=True)
rows = [[name, *row.values()] for name, row in graphs.items()]
plots.Table(["model", "breaks", "graphs made in a second call", "operations compiled"], rows)

# %% [markdown]
# BERT is captured in one graph. Two rows have a break, and in both the cause is a warning that transformers logs:
#
# - GPT-2's configuration does not name its loss;
# - checkpointing switches off the key/value cache, which only text generation needs (`use_cache=False` removes this break).
#
# Compiling *again* in the second call is another matter. A compiled graph is only valid for the settings with which it was captured. The first call writes `problem_type` into the configuration, so the second call has other settings. Set `problem_type` beforehand, and the model is compiled once. (`TORCH_LOGS=recompiles` prints what changed.)
#
# Layer by layer there is far less to compile, and the code between the layers runs as before.
#
# ## Lengths that change
#
# A graph is compiled for the shapes of its first call. Another length needs another graph. At the second length torch guesses that this dimension will go on changing, and compiles one graph for all lengths. With `dynamic=True` it does so from the first call on, with `dynamic=False` never. The ten batches below all differ in length:

# %%
gated = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
batch_lengths = [17, 19, 23, 29, 31, 37, 41, 47, 53, 64]
padded = [32 * math.ceil(n / 32) for n in batch_lengths]


def recompiled(lengths, **options):
    return sum(map(len, captured(gated, *[torch.randn(4, n, 16) for n in lengths], **options)))


recompilations = {"default": recompiled(batch_lengths), "dynamic=True": recompiled(batch_lengths, dynamic=True)}
recompilations["dynamic=False"] = recompiled(batch_lengths, dynamic=False)
recompilations["dynamic=False, padded to 32 or 64"] = recompiled(padded, dynamic=False)
limit = torch._dynamo.config.recompile_limit
print(f"a function is compiled {limit} times at most; after that it runs uncompiled, with a warning")
plots.Table(["setting", "graphs"], list(recompilations.items()))

# %% [markdown]
# ## What it costs, what it gains
#
# Now take a backend that does compile: `inductor`, the default, writes C++ for a CPU, and for a GPU Triton, a language for GPU kernels. Three processes train the same model. The first one finds an empty cache on disk: a **cold start**. The other two find the files that the first one left: a **warm start**. On a CPU both the training and the compiler use one thread.
#
# Each process runs five steps in turn: one for each of three backends, and the step without a compiler twice. (The other two backends, `aot_eager` and `eager`, are for debugging; this `eager` is not the attention of that name.) `Ratio.of_turns` compares a backend with the step without a compiler. The two steps without a compiler are the same code, so a difference between them is noise. No interval is narrower than this noise. The column *operations* counts torch's operations in a step, without the kernels that the compiler wrote.


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


def operations_of(step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step()
    return sum(event.name.startswith("aten::") for event in seen.events())


# %%
ORDER = ["none", "inductor", "none", "aot_eager", "eager"]


def trained(task):
    os.environ["TORCHINDUCTOR_CACHE_DIR"], cold = folder, not os.listdir(folder)
    device, batch_size = ("cuda", 8) if torch.cuda.is_available() else ("cpu", 4)
    if device == "cpu":
        torch.set_num_threads(1)
        importlib.import_module("torch._inductor.config").compile_threads = 1
    batch, steps, first, missing = task.batch(batch_size, device), {}, {}, None
    for name in dict.fromkeys(ORDER):
        model = task.build_model().to(device)
        steps[name] = step_of(model if name == "none" else torch.compile(model, backend=name), batch)
        try:
            (seconds, _), loss = interleaving.first_call(steps[name])
            first[name] = seconds, loss
        except (torch._inductor.exc.InductorError, torch._dynamo.exc.BackendCompilerFailed) as error:
            missing = f"needs a C++ compiler, on a GPU Triton ({str(error).splitlines()[0][:90]})"
            steps[name], first[name] = steps["none"], first["none"]
    turns = interleaving.in_turns([steps[name] for name in ORDER], 8)
    figures = {name: {"peak": peak_bytes(step), "operations": operations_of(step)} for name, step in steps.items()}
    to_show = torch.compile(gate), torch.randn(64, 64, device=device)
    code = torch._inductor.utils.get_code(*to_show)[0] if cold and not missing else ""
    return {"first": first, "turns": turns, "figures": figures, "missing": missing, "code": code}


# %%
compiled_task = preset.replace(seq_len=128, config={"num_hidden_layers": lab.sized(1, 0)})
if not on_cpu:
    compiled_task = lab.task.replace(config=no_dropout | preset.config | {"num_hidden_layers": 6})
cache = tempfile.TemporaryDirectory(prefix="inductor-")  # new at each run of this cell, so that a cold start is cold
folder = cache.name
processes = [lab.run(trained, task=compiled_task, measure="value").value]
if lab.sized(False, True):  # a quick test compiles once
    processes *= 3
elif on_cpu:  # two at once, on one core each
    processes += [rank["value"] for rank in lab.run(trained, task=compiled_task, measure=("none",), processes=2).ranks]
else:
    processes += [lab.run(trained, task=compiled_task, measure="value").value for _ in range(2)]
missing = processes[0]["missing"]
if missing:
    print(f"inductor compiles nothing here: it {missing}. The lesson goes on without it.")


# %%
def against_none(number):
    """Return the speed of one kind of step relative to steps without a compiler, with an interval."""
    taken = [[each["turns"][0], each["turns"][number], each["turns"][2]] for each in processes]
    return Ratio.of_turns(taken, CPU, 1.05 if on_cpu else 1.02)  # 1.05: assume at least 5 % of noise


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
    figures, speed = processes[0]["figures"][name], speeds.get(name, "1")
    shown = [f"{first:.2f}", f"{step_seconds(number):.4f}", f"{speed}", plots.bytes_text(figures["peak"])]
    rows.append([name, figures["operations"], *shown])
print("" if missing else f"inductor, warm start: {warm:.2f} s")
plots.Table(["backend", "operations", "first step, cold (s)", "later steps (s)", "speed", "peak of a step"], rows)

# %% [markdown]
# The last column is the memory that a step needs in addition to weights and states. A compiler can lower it: a fused kernel may compute an element again in the backward pass instead of keeping it.
#
# `eager` and `aot_eager` take the graph and run its operations unchanged, so they speed nothing up. Use them if something breaks: they show whether capturing or compiling is at fault.
#
# The next cell prints the code that inductor wrote for `gate`. Find the one place where this code reads, and the one where it writes. The lines below the code say after how many steps the start has paid for itself. The cost is how much longer the cold first step takes than a step without a compiler. The gain is how much less time each later step takes.
#
# > break-even = (cold first step - step without compiler) / (step without compiler - step with compiler)
#
# The gain has an interval, so the number of steps has one too. If the gain may be nothing, that interval has no upper end.


# %%
def steps_to_pay(start, step, gain):
    """Return after how many steps a start has paid for itself. `gain`: speed with the compiler / without (1: never)."""
    return (start - step) / (step - step / gain) if gain > 1 else math.inf


code = [line.strip() for line in processes[0]["code"].splitlines()]
print("\n".join(line for line in code if "tmp" in line) or "nothing was compiled")
if not missing:
    plain_step, speed = step_seconds(0), speeds["inductor"]
    for name, start in {"cold": cold, "warm": warm}.items():
        fewest, likely, most = (steps_to_pay(start, plain_step, gain) for gain in (speed.high, speed.value, speed.low))
        most = f"at most {most:,.0f}" if most < math.inf else "perhaps never"
        print(f"a {name} start pays for itself after some {likely:,.0f} steps (at least {fewest:,.0f}, {most})")

# %% [markdown]
# ## The guide's list
#
# The 2023 guide switches fused attention on with `model.to_bettertransformer()`, and names ten backends of the compiler. Which of them exist on your machine? torch's list contains the backends of torch itself, even if one needs a package that is not installed (`tvm` in the last printed line). It also contains backends that installed packages add.

# %%
GUIDE = {
    "debugging": ["eager", "aot_eager"],
    "training and inference": ["inductor", "nvfuser", "aot_nvfuser", "aot_cudagraphs"],
    "inference only": ["ofi", "fx2trt", "onnxrt", "ipex"],
}
TODAY = {"nvfuser": "inductor", "aot_nvfuser": "inductor", "aot_cudagraphs": "cudagraphs", "fx2trt": "the package "
         "torch_tensorrt", "ofi": "inductor, with its option freezing", "onnxrt": "torch.onnx.export", "ipex": "inductor"}  # fmt: skip
exists = hasattr(transformers.PreTrainedModel, "to_bettertransformer")
default = bert.build_model(device="meta").config._attn_implementation
exist = torch._dynamo.list_backends(exclude_tags=())
known = {use: [name for name in names if name in exist] for use, names in GUIDE.items()}
rows = [
    [name, use, *(["exists", ""] if name in known[use] else ["gone", TODAY.get(name, "")])]
    for use, names in GUIDE.items()
    for name in names
]
print(f"to_bettertransformer: {'exists' if exists else 'gone'}; the attention that models take by default: {default}")
print("backends of today that are not for debugging:", ", ".join(torch._dynamo.list_backends()))
print("tvm among them:", "tvm" in exist, "| its package is installed:", bool(importlib.util.find_spec("tvm")))
plots.Table(["backend of 2023", "for", f"torch {torch.__version__}", "today"], rows)

# %% [markdown]
# `to_bettertransformer` was removed in transformers 5.0 ([pull request 41367](https://github.com/huggingface/transformers/pull/41367)), because models call SDPA by themselves since 4.36.
#
# The Trainer's argument for compiling is `torch_compile=True`, with `torch_compile_backend` and `torch_compile_mode`. If you time such a training, leave out all steps in which it still compiles.
#
# ## What held
#
# ### CUDA graphs
#
# Does inductor use CUDA graphs, as the guide says? A CUDA graph records all kernel launches of a step once, and replays them as one launch. The mode `reduce-overhead` switches CUDA graphs on.
#
# > **On a GPU:** the next cell shows whether inductor launched a CUDA graph, and how much CUDA graphs gain in a model whose launches take nearly all the time: fifty tiny layers.


# %% tags=["claim"]
def replayed(_):
    """Return the CUDA graphs launched in a step in two modes of inductor, and the timings of both and of the first again."""
    device, steps, launched = "cuda" if torch.cuda.is_available() else "cpu", [], {}
    for mode in ("default", "reduce-overhead"):
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(50)]).to(device)
        compiled, batch = torch.compile(model, mode=mode), torch.randn(4, 64, device=device)

        def step(model=model, compiled=compiled, batch=batch):
            compiled(batch).sum().backward()
            model.zero_grad()

        [step() for _ in range(5)]  # compiles, then records
        with torch.profiler.profile() as seen:
            step()
        launched[mode] = sum("GraphLaunch" in event.name for event in seen.events())
        steps.append(step)
    return launched, interleaving.in_turns([steps[0], steps[1], steps[0]], 10)


watched = None if on_cpu or missing else lab.run(replayed, measure="value")
launched, turns = (watched and watched.value) or (None, None)
reason, note = watched.failure if watched and not watched.ok else missing, f"launched: {launched}" if launched else ""
display(claims.check("compile-cudagraphs", launched and int(launched["default"] > 0), missing=reason, note=note))
claims.check("compile-reduce-overhead", turns and Ratio.of_turns([turns], CPU, 1.02), missing=reason)

# %% [markdown]
# ### Fused attention
#
# Memory and gradients are those of the runs above; the speed comes from interleaved steps at the longest length.

# %% tags=["claim"]
display(claims.check("sdpa-memory", sdpa[-1].peak_bytes / eager[-1].peak_bytes))
display(claims.check("sdpa-same", difference))
timed = dict(task=bert.replace(seq_len=tokens[-1]), measure=("time",), steps=2, **options)
pair = [lab.train(name, attn_implementation=name, **timed) for name in ("eager", "sdpa")]
display(claims.check("sdpa-speed", lab.compare(*pair, turns=8).speed_ratio))
taken = dict(zip(BACKENDS, found[half]["nothing special"][1:]))
claims.check("sdpa-fused-kernels", taken["flash"] + taken["efficient"], note=f"{half}: {taken}")

# %% [markdown]
# ### `torch.compile`

# %% tags=["claim"]
note = f"cold start {cold:.1f} s, warm start {warm:.1f} s"
display(claims.check("compile", None if missing else speeds["inductor"], missing=missing, note=note))
display(claims.check("compile-debugging", speeds["aot_eager"], note=f"the eager backend: {speeds['eager']}"))
seen = {name: row["operations"] for name, row in processes[0]["figures"].items()}
display(claims.check("compile-eager", seen["eager"] / seen["none"], note=f"operations: {seen}"))
bert_row, gpt2_row = graphs["BERT, as it comes"], graphs["GPT-2, as it comes"]
note = f"new graphs in a second call: {bert_row['second']}; graph breaks of GPT-2: {gpt2_row['breaks']}"
claims.check("compile-captures", bert_row["breaks"], note=note)

# %% [markdown]
# ### What is left of the guide's list

# %% tags=["claim"]
display(claims.check("better-transformer", int(exists), note=f"the default here: {default}"))
display(claims.check("backends-training", len(known["training and inference"])))
claims.check("backends-inference", len(known["inference only"]), note=f"debugging: {known['debugging']}")

# %% [markdown]
# ## Explore
#
# The picture shows the bytes of one layer's scores, *one square* per head and sample, and of what a fused kernel keeps instead: the output and one number per query. The legend names the first length at which the scores exceed the 16 GiB of a T4. How far does it move if the batch is four times as large?


# %% tags=["widget"]
def draw(batch, heads, bits):
    lengths = [2**power for power in range(7, 18)]
    square = [batch * heads * n * n * bits / 8 / 2**30 for n in lengths]
    linear = [batch * heads * n * (64 * bits / 8 + 4) / 2**30 for n in lengths]
    limit = next((f"{n:,} tokens" for n, size in zip(lengths, square) if size > 16), "no length here")
    curves = {
        f"scores of one layer ({limit}: over 16 GiB)": square,
        "output and one number per query": linear,
        "16 GiB": [16] * len(lengths),
    }
    ax = plots.lines(lengths, curves, "tokens", "GiB (head size: 64)")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    return ax


_ = widgets.explore(draw, batch=[1, 4, 16, 64], heads=[16, 4, 12, 32], bits=[16, 32])

# %% [markdown]
# ## Exercise: the challenge
#
# The function `broken` below computes attention over packed documents: a token sees the tokens of its own document up to itself. `broken` splits the row at lengths that Python must *know*, so nothing is captured. Rewrite it so that it gives the same outputs for every packing, in **one graph**.


# %% jupyter={"source_hidden": true}
exercises.hint(
    "Which call turns a tensor into Python numbers? What could you mask instead of splitting the row?",
    "Number the tokens by document. A token sees the tokens that have its number and do not come later.",
    "`repeat_interleave` makes a tensor whose length depends on values, and breaks too. Which document does a "
    "position belong to, if you know where each document ends? `torch.bucketize` answers such questions.",
)


# %% tags=["exercise"]
def broken(q, k, v, lengths):  # lengths: a tensor of whole numbers, whose sum is the length of the row
    parts = zip(*(x.split(lengths.tolist(), dim=-2) for x in (q, k, v)))
    return torch.cat([scaled_dot_product_attention(*part, is_causal=True) for part in parts], dim=-2)


answer = None  # a function of q, k, v, lengths


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if lab.machine.rehearsed:
        raise NeedsValues("a rehearsal: nothing is captured there")
    torch.manual_seed(0)
    for lengths in ([10, 25, 5], [40], [1] * 20, torch.randint(1, 30, (8,)).tolist()):
        inputs = *(torch.randn(2, 2, sum(lengths), 8) for _ in range(3)), torch.tensor(lengths)
        if not torch.allclose(answer(*inputs), broken(*inputs), atol=1e-5):
            return exercises.wrong(f"documents of {lengths} tokens: the output differs from that of `broken`")
    torch._dynamo.reset()
    graphs = torch._dynamo.explain(answer)(*inputs).graph_count
    if graphs != 1:
        return exercises.wrong(f"equal outputs, but {graphs} graphs")
    return exercises.right("equal outputs, one graph")


exercises.check(lab, "no breaks", check, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def masked_to(document, q, k, v):
    mask = (document[:, None] == document) & torch.ones(len(document), len(document), dtype=torch.bool).tril()
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def whole(q, k, v, lengths):
    ends = lengths.cumsum(0)
    return masked_to(torch.bucketize(torch.arange(q.shape[-2]), ends, right=True), q, k, v)


def one_left(q, k, v, lengths):
    return masked_to(torch.repeat_interleave(torch.arange(len(lengths)), lengths), q, k, v)


exercises.prove(check, solution=whole, mistake=one_left)

# %% [markdown]
# ## Recap
#
# - **Attention without the square.** Computed tile by tile with a running maximum and sum, attention gave the same output and kept no square, in training too if the backward pass computed the tiles again. The peak of a small BERT at 1024 tokens fell to 55 % (AMD EPYC, 2 cores).
# - **The choice of kernel.** torch chose a kernel at each call. A CPU has one fused kernel: with dropout or a learnt bias torch took `math`, which brings the square back. On most GPUs a mask excludes the flash kernel.
# - **Packing.** Packed sequences needed no padding. Packing alone saved nothing: it paid only with a kernel that skips masked scores, e.g. in blocks of 128 x 128.
# - **The compiler.** `torch.compile` captured BERT in one graph. Its start took time, which the faster steps win back after many steps: your break-even says how many. If a length or a setting changes from call to call, torch compiles again, and you pay again.
#
# Compiling is the wrong tool for short runs, for shapes that never repeat, and while you still change the code. Fused attention has no such price. It is the default: check whether torch really takes it.

# %% tags=["finish"]
claims.finish()
