# %% [markdown]
# # How few bits does training need?
#
# Your fine-tuning in fp16 logs a loss of NaN after some steps. The same script in bf16 trains well. Both formats have 16 bits, so why? Part 1 finds the cause in the bits, and builds the remedy. Part 2 measures what 16 bits save, in memory and time.
#
# **You will see**
#
# - what fp32, bf16 and fp16 can hold, bit by bit, and a loss scaler written by hand that rescues the gradients that fp16 loses
# - which bytes of a training step halve in mixed precision, which stay, which are added, and from which batch size on it pays
# - where half precision is faster, and how to tell whether the loss and an evaluation are still as good
#
# **Time:** 50 minutes in two parts. The cells run for 41 s on two CPU cores.
#
# **Before you start:** lessons 01 (memory) and 03 (a speed ratio with its interval).
#
# **What a CPU cannot show:** tf32 (a format for matmuls on NVIDIA's GPUs), and the speed of fp16. Of the lesson's 29 claims, 9 need a GPU.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import copy
import math
import tempfile
from collections import Counter
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer

from perf_helpers import Claims, Lab, Task, exercises, hardware, plots, roofline, widgets
from trainmem.estimate import estimate

lab = Lab(profile, strict=strict, out=out, lesson="07_mixed_precision")
claims = Claims(lab)
on_gpu = lab.machine.kind == "cuda"
torch.set_num_threads(1)  # for this kernel, which trains tiny networks; experiments run in other processes
mixed = {"fp16": True} if on_gpu else {"bf16": True}
half = "float16" if on_gpu else "bfloat16"
print(f"{lab.machine.name}: mixed precision is {mixed}")

# %% [markdown]
# ## Part 1: NaN in fp16, fine in bf16
# ### Idea
#
# A number in fp32 takes four bytes. Two bytes are half as much to store and to move, and chips with 16-bit units multiply such numbers several times as fast. But 16 bits distinguish fewer numbers. *Mixed precision* therefore keeps weights, gradients and optimizer states in fp32, and lets the large matmuls work on 16-bit copies. In torch, *autocast* makes these copies.
#
# > **On a GPU** mixed precision in this lesson is `fp16=True`, on a CPU `bf16=True`. Part 1 tries the formats and the loss scaler on the CPU everywhere.
#
# ### By hand: the formats
#
# A floating-point number has a sign, an exponent (which power of two) and a mantissa (the digits). The picture shows the bits of one number as they are stored. tf32 is never stored: it is fp32 whose last mantissa bits are left out inside a matmul (13 of them on Ampere, NVIDIA's first GPUs with tf32).
#
# The printed line tries the 2023 guide's largest fp16 number, 65535, and three smaller ones. The table shows how large a number can get, and at which number a sum of ones stops growing.


# %%
def draw_bits(value=0.1):
    """Draw the sign, exponent and mantissa bits of one number in four formats, and the number that each holds."""
    _, ax = plt.subplots(figsize=(9, 2.4), layout="constrained")
    rows = {"fp32": (torch.float32, torch.int32, 8, 32), "tf32": (torch.float32, torch.int32, 8, 19)}
    rows |= {"bf16": (torch.bfloat16, torch.int16, 8, 16), "fp16": (torch.float16, torch.int16, 5, 16)}
    for row, (name, (dtype, integer, exponent, width)) in enumerate(rows.items()):
        stored = torch.tensor(value).to(dtype)
        pattern = stored.view(integer).item() % 2 ** (8 * dtype.itemsize)
        if name == "tf32":  # round to the bits that are left
            pattern = (pattern + 2**12) >> 13
            stored = torch.tensor(pattern << 13).to(integer).view(dtype)
        for place, bit in enumerate(f"{pattern:0{width}b}"):
            colour = plots.SERIES[7 if place == 0 else 1 if place <= exponent else 0]
            ax.text(place, row, bit, ha="center", va="center", color="white", fontsize=10, backgroundcolor=colour)
        ax.text(-1.2, row, name, ha="right", va="center")
        ax.text(32.5, row, f"holds {stored.item():.9g}", va="center")
    ax.set(xlim=(-4, 44), ylim=(3.6, -0.8))
    ax.set_title(f"{value:g} in bits: 1 sign (black), exponent (orange), mantissa (blue)", loc="left")
    ax.axis("off")
    return ax


_ = draw_bits()


# %%
def largest(dtype, integer, mantissa):
    """Return the largest finite number: every bit set except the sign and the last bit of the exponent."""
    return torch.tensor(2 ** (8 * dtype.itemsize - 1) - 1 - 2**mantissa, dtype=integer).view(dtype).item()


def stall(dtype):
    """Return the number at which a running sum of ones stops growing: the first power of two n with n + 1 == n."""
    n = torch.ones((), dtype=dtype)
    while n + 1 != n:
        n = n * 2
    return n.item()


forms = {"fp32": (torch.float32, torch.int32, 23), "bf16": (torch.bfloat16, torch.int16, 7)}
forms |= {"fp16": (torch.float16, torch.int16, 10)}
limits = {name: (largest(*form), stall(form[0])) for name, form in forms.items()}
for name, (dtype, _, _) in forms.items():  # the library must say the same
    torch.testing.assert_close(limits[name][0], torch.finfo(dtype).max, rtol=0, atol=0)
print("65504, 65519, 65520 and 65535 in fp16:", torch.tensor([65504.0, 65519.0, 65520.0, 65535.0]).half().tolist())
rows = [[name, f"{top:.6g}", f"{end:.0f}"] for name, (top, end) in limits.items()]
plots.Table(["format", "largest number", "a sum of ones stops at"], rows)

# %% [markdown]
# The next picture shows the range of each format, from its smallest positive number to its largest. (Numbers in the lighter part, *subnormal* ones, have fewer digits.) Two values are marked: a gradient of 2e-8, and an activation of 66246 that a user met in the language model T5. Which format holds which of them?

# %%
_, ax = plt.subplots(figsize=(9, 2.6), layout="constrained")
for row, (dtype, _, mantissa) in enumerate(forms.values()):
    least, normal, top = torch.finfo(dtype).tiny / 2**mantissa, torch.finfo(dtype).tiny, torch.finfo(dtype).max
    left, middle, right = map(math.log10, (least, normal, top))
    ax.barh(row, middle - left, 0.6, left, color=plots.SERIES[row], alpha=0.4)
    ax.barh(row, right - middle, 0.6, middle, color=plots.SERIES[row])
    ax.text(40, row, f"{least:.0e} to {top:.5g}", va="center")
for value, name in ((2e-8, "a gradient: 2e-8"), (66246, "an activation: 66246")):
    ax.axvline(math.log10(value), color="black", linestyle=":")
    ax.text(math.log10(value), -0.7, name, ha="right" if value < 1 else "left", va="center")
ax.set_yticks(range(len(forms)), [*forms])
ax.set(xlabel="power of ten", xlim=(-47, 66), ylim=(2.5, -1.1))
_ = ax.set_title("Range of the formats", loc="left")

# %% [markdown]
# fp16 holds neither of them. 66246 becomes `inf`, and later operations turn it into `nan` (inf - inf); 2e-8 becomes 0, and a weight without a gradient does not learn. bf16 holds both, because it has the range of fp32. It pays with digits: a running sum of ones gets stuck at 256, in fp16 at 2048.
#
# The guides mention bf16 only for Ampere and TPUs (note 1 at the end is about their check). Newer CPUs have instructions for it, and other machines emulate it.
#
# ### Does bf16 cause the overflow?
#
# The 2022 guide says that a model trained in bf16 is likely to overflow when it is fine-tuned in fp16. Its case is T5 ([transformers#5651](https://github.com/huggingface/transformers/issues/5651)). Here small networks learn house prices instead: in bf16, in fp16 (with the loss scaler of the next section), and in fp32 as a control. Then each network is trained further in fp16. In the table's upper row the prices reach half of fp16's largest number, in the lower row nine tenths of it. While a network learns, its predictions overshoot the prices. If bf16 is the cause, its column is far above the others in both rows.


# %%
def train(net, x, y, dtype, scaler=None, steps=50, rate=3.0, weight=1.0, bad_step=None):
    """Train under autocast, with gradients clipped to norm 1; return the loss and the loss scale of each step."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    optimizer, losses, scales = torch.optim.Adam(net.parameters(), lr=rate), [], []
    for step in range(steps):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = F.smooth_l1_loss(net(x).float(), y)
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        factor = weight * (2.0**40 if step == bad_step else 1)
        scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return losses, scales


# %%
def overflow_share(dtype, part, then=torch.float16, seeds=5):
    """Return the share of nets that overflow in the format `then`, after they were trained in the format `dtype`."""
    rooms, overflows = torch.rand(64, 8, generator=torch.manual_seed(0)), 0
    price = (rooms @ torch.arange(8.0, 0, -1))[:, None]
    price *= part * limits["fp16"][0] / price.max()
    for seed in range(seeds):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        train(net, rooms, price, dtype)
        losses, _ = train(net, rooms, price, then, steps=20)  # fine-tuning
        overflows += not all(map(math.isfinite, losses))  # an activation of inf makes the loss inf or nan
    return overflows / seeds


shares = {part: {name: overflow_share(form[0], part) for name, form in forms.items()} for part in (0.5, 0.9)}
stayed = overflow_share(torch.bfloat16, 0.9, then=torch.bfloat16)
rows = [[f"{part:.0%} of fp16's largest number", *map("{:.0%}".format, row.values())] for part, row in shares.items()]
display(
    plots.Table(["prices up to", *(f"from {name}" for name in forms)], rows, "Nets that overflow, fine-tuned in fp16")
)
print(f"trained in bf16 on prices up to 90%, and fine-tuned in bf16: {stayed:.0%} overflow")

# %% [markdown]
# (Each percentage is of five nets.) If nets from fp32 overflow in the lower row too, and no net does in the upper row, the cause is the size of the numbers, not training in bf16.
#
# ### By hand: the loss scaler
#
# Gradients are small, and fp16 has no number between 0 and about 6e-8. How many become 0 depends on their size. So the next table multiplies the loss of a small network by smaller and smaller factors, called *loss weights*. Every gradient shrinks by the same factor. (A side task, which should count less, has such a weight.)
#
# The remedy is to multiply the loss by a large number, the *loss scale*. This multiplies every gradient, and before the update the gradients are divided by it again. The right scale is found by trying:
#
# - if a gradient is `inf`, the step is skipped and the scale is halved;
# - after some *good* steps, steps without an `inf`, the scale is doubled.
#
# The third cell tests our scaler in two trainings: one with a loss weight of 1e-5, and one with a single bad step, whose gradient is 2^40 times too large.

# %%
inputs = torch.randn(128, 64, generator=torch.manual_seed(0))
targets = torch.tanh(inputs @ torch.randn(64, 64) / 8)


def small_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def gradients(dtype, weight, scale=1.0):
    net = small_net()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = F.mse_loss(net(inputs), targets)
    (loss * weight * scale).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()]) / scale


def lost(dtype, weight, scale=1.0):  # the share of nonzero fp32 gradients that are 0 in `dtype`
    exact, rounded = gradients(torch.float32, weight), gradients(dtype, weight, scale)
    return ((exact != 0) & (rounded == 0)).sum().item() / (exact != 0).sum().item()


ways = {"fp16": (torch.float16, 1.0), "fp16, loss x 65536": (torch.float16, 2.0**16), "bf16": (torch.bfloat16, 1.0)}
rows = [[f"{w:g}", *[f"{lost(t, w, x):.1%}" for t, x in ways.values()]] for w in (1, 1e-3, 1e-4, 1e-5)]
plots.Table(["loss weight", *(f"lost in {way}" for way in ways)], rows)


# %%
class LossScaler:  # has the methods of torch.amp.GradScaler
    def __init__(self, init_scale, growth_interval):
        self.factor, self.interval, self.good = init_scale, growth_interval, 0

    def get_scale(self):
        return self.factor

    def scale(self, loss):
        return loss * self.factor

    def unscale_(self, optimizer):
        grads = [p.grad.div_(self.factor) for group in optimizer.param_groups for p in group["params"]]
        self.finite = all(grad.isfinite().all() for grad in grads)

    def step(self, optimizer):
        if self.finite:
            optimizer.step()  # otherwise skip this step

    def update(self):
        self.good = self.good + 1 if self.finite else 0
        if not self.finite:
            self.factor /= 2  # back off
        elif self.good % self.interval == 0:
            self.factor *= 2  # grow


# %%
def try_scaler(scale, title, **case):
    def run(dtype, scaler=None):
        return train(small_net(), inputs, targets, dtype, scaler, rate=3e-3, **case)

    start, steps = {"init_scale": scale, "growth_interval": 5}, range(1, 51)
    bare = run(torch.float16, torch.amp.GradScaler("cpu", enabled=False))[0]
    scaled, scales = run(torch.float16, LossScaler(**start))
    library = run(torch.float16, torch.amp.GradScaler("cpu", **start))  # must give the same
    torch.testing.assert_close([scaled, scales], list(library), rtol=1e-6, atol=0)
    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
    curves = {name: run(forms[name][0])[0] for name in ("fp32", "bf16")}
    curves |= {"fp16, no scaler": bare, "fp16, our scaler": scaled}
    plots.lines(steps, curves, "step", "loss", ax=left, title=title, markers=False)
    end = sum(map(math.isfinite, bare))  # from there on every loss is nan
    left.plot(end, bare[end - 1], "X", color=plots.SERIES[2], markersize=10)
    skipped = [step for step in steps[:-1] if scales[step] < scales[step - 1]]
    right.step(steps, torch.tensor(scales).log2(), where="mid", label="loss scale")
    right.plot(skipped, [math.log2(scales[step - 1]) for step in skipped], "x", label="step skipped")
    right.set(xlabel="step", ylabel="log2 of the loss scale")
    right.legend(frameon=False)
    print(f"{title}: without a scaler it ends at {bare[-1]:.4f}, with it at {scaled[-1]:.4f}; steps skipped: {skipped}")


try_scaler(2.0**42, "Small gradients (loss weight 1e-5)", weight=1e-5)
try_scaler(2.0**16, "One bad step, the 26th", bad_step=25)

# %% [markdown]
# **Small gradients** (first picture): without scaling fp16 learns nothing, because all its gradients are 0. (The cross marks its last finite loss.) With scaling the loss follows that of fp32, some steps later. The scale starts too high on purpose: steps are skipped until it fits. Then it grows until a gradient overflows, and is halved.
#
# **One bad step** (second picture): without a scaler one `inf` makes every weight `nan`. The scaler discards that step, halves its scale, and doubles it again five good steps later. fp32 and bf16 can hold such a gradient, and clipping makes it harmless.
#
# The losses and scales equal those of `torch.amp.GradScaler`, which the Trainer's `fp16=True` uses. No scaler helps if an activation overflows: use bf16.
#
# ### By hand: what autocast casts
#
# `torch.autocast` acts inside its `with` block, a *region*. It decides for each operation: some run in half precision, some in fp32, and the others keep the type of their inputs. CPU and GPU differ, so the cell tries it on your device.
#
# How do you see a cast? torch passes each operation to a *dispatch mode* before the operation runs. Ours counts them; a cast is called `_to_copy`. One weight is used twice. How often is it cast? And if it is changed between the two uses, as an optimizer would do, does the second matmul see the change? The cell also tests a LayerNorm whose sum overflows fp16, and lists the types of results.


# %%
class Seen(TorchDispatchMode):
    """Count operations by name, type of the first tensor, and whether this tensor is the watched weight."""

    def __init__(self, weight=None):
        super().__init__()
        self.weight, self.count = weight, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        first = next(iter(args), None)
        self.count[function.overloadpacket.__name__, getattr(first, "dtype", None), first is self.weight] += 1
        return function(*args, **(kwargs or {}))


def casts_per_region(device, cache, regions=3):
    """Return the casts per region of a weight used twice, and by how much the second matmul follows a change."""
    weight, x = nn.Parameter(torch.randn(64, 64, device=device)), torch.randn(8, 64, device=device)
    with Seen(weight) as seen:
        for _ in range(regions):
            with torch.autocast(device, dtype=torch.float16, cache_enabled=cache):
                first = x @ weight
                with torch.no_grad():
                    weight.add_(1)
                second = x @ weight
    return seen.count["_to_copy", torch.float32, True] / regions, (second - first).abs().max().item()


# %%
def autocast_facts(task):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(8, 64, device=device)
    h, layer, norm = x.half(), nn.Linear(64, 64).to(device), nn.LayerNorm(64).to(device)
    with torch.autocast(device, dtype=torch.float16):
        results = {"linear (input fp32)": layer(x), "GELU": F.gelu(h), "softmax": h.softmax(-1), "LayerNorm": norm(h)}
        results |= {"residual: fp16 + fp32": h + x, "cross-entropy": F.cross_entropy(h, torch.arange(8).to(device))}
    types = {name: str(result.dtype).removeprefix("torch.") for name, result in results.items()}
    x = (1000 + torch.randn(64, 1024, device=device)).half()
    exact = F.layer_norm(x.double(), (1024,))
    error = (F.layer_norm(x, (1024,)) - exact).abs().max() / exact.abs().max() / torch.finfo(torch.float16).eps
    total = sum(x[0].cpu(), torch.zeros((), dtype=torch.float16))  # one after the other, in fp16
    flag = torch.cuda.is_bf16_supported() if device == "cuda" else torch.amp.is_autocast_available(device)
    return types, [casts_per_region(device, cache) for cache in (True, False)], error.item(), str(total.item()), flag


facts = lab.run(autocast_facts, "autocast", measure="value")
types, ((casts, follows), (casts_without, follows_without)), norm_error, plain_sum, flag = facts.value
print(f"casts of a weight that is used twice: {casts:g} per region, {casts_without:g} without the cache")
print(f"changing the weight changes the second result by {follows:.2f}, without the cache by {follows_without:.2f}")
print(f"1024 numbers near 1000, added in fp16: {plain_sum}; error of their LayerNorm: {norm_error:.2f} eps at most")
plots.Table(["operation (input fp16)", f"its result on {lab.machine.kind}"], list(types.items()))

# %% [markdown]
# - **Copies:** a weight is cast once per region. A cache keeps the copy until the region ends; autograd keeps it until backward, if backward needs it.
# - **Stale copies:** a copy does not follow its weight. With the cache, the second matmul's result did not change when the weight did (second printed line). So each iteration has to make new copies. Put a region around one forward pass, and nothing else.
# - **LayerNorm** is right although the sum that it needs overflows fp16: inside, it adds in fp32. (The error is in units of *eps*, the distance from 1 to the next number in fp16.)
# - **The residual sum**, fp16 + fp32, is fp32.
#
# ### Explore
#
# Try numbers near the limits: bf16 cannot hold 257, nor fp16 2049. 65519 is the last integer that fp16 rounds to 65504, not to `inf`. 2e-8 is less than half of fp16's smallest number, so it becomes 0.

# %% tags=["widget"]
_ = widgets.explore(draw_bits, value=[0.1, 1.0, 257.0, 2049.0, 65519.0, 65520.0, 6e-8, 2e-8, 3e38])

# %% [markdown]
# ### What held: formats, scaling and autocast

# %% tags=["claim"]
display(claims.check("fp16-range", limits["fp16"][0], note="65535 and all from 65520 on become inf"))
digits_lost = f"a sum of ones stops at {limits['bf16'][1]:.0f} in bf16, at {limits['fp16'][1]:.0f} in fp16"
display(claims.check("bf16-range", limits["bf16"][0], note=digits_lost))
vanished = lost(torch.float16, 1e-4) - lost(torch.bfloat16, 1e-4)
rescued = f"fp16 with the loss x 65536: {lost(torch.float16, 1e-4, 2.0**16):.1%}"
display(claims.check("bf16-no-scaling", vanished, note=rescued))
by_bf16 = shares[0.5]["bf16"] - shares[0.5]["fp16"]
display(claims.check("bf16-then-fp16", by_bf16, note=f"near the limit: {shares[0.9]}"))
overflowed = shares[0.9]["bf16"]
none = None if overflowed else "no net overflowed in fp16"
display(claims.check("bf16-prevents-overflow", stayed / overflowed if overflowed else None, missing=none))

# %% tags=["claim"]
display(claims.check("autocast-cache", casts, note=f"{casts_without:g} with the cache off"))
display(claims.check("autocast-stale", follows / follows_without))
claims.check("layernorm-accumulates-fp32", norm_error, note=f"the plain sum in fp16 is {plain_sum}")

# %% [markdown]
# ### Exercise 1: choose a loss scale
#
# With a loss weight of 1e-9 even 65536, the scale that torch's scaler starts with, is too small. Find a scale (a power of two) with which fp16 loses less than 1 % of the gradients and none overflows.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "With a weight of 1 hardly any gradient was lost. Which scale makes up for a weight of 1e-9?",
    "1e9 is about 2 to the power of 30.",
    "`2.0**30` makes the gradients as large as with a weight of 1. A slightly larger scale rescues the smallest ones.",
)

# %% tags=["exercise"]
my_scale = None  # e.g. 2.0**16


# %% tags=["check"]
def check_scale(answer):
    if answer is None:
        return exercises.not_attempted()
    if not gradients(torch.float16, 1e-9, answer).isfinite().all():
        return exercises.wrong("a gradient overflows: choose a smaller scale")
    share = lost(torch.float16, 1e-9, answer)
    if share >= 0.01:
        return exercises.wrong(f"{share:.1%} of the gradients still vanish: choose a larger scale")
    return exercises.right(f"{share:.2%} vanish, none overflows")


exercises.check(lab, "loss scale", check_scale, my_scale)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check_scale, solution=2.0**32, mistake=2.0**16)

# %% [markdown]
# **Part 1 ends here.** If you continue in a new kernel, run the cells above again.
#
# ## Part 2: memory, speed and inference
#
# Your training does not fit the card, so you switch on mixed precision: half the bits. How much of the peak is saved, is the step faster, and is the model still as good?
#
# ### Predict
#
# A BERT is trained below in fp32 and in mixed precision, with micro-batches of 1 to 64 samples. Guess the peak for micro-batch 64.

# %%
widgets.predict(
    lab,
    "mixed peak",
    "How large is the peak in mixed precision, in percent of the fp32 peak?",
    "%",
    0,
    120,
)

# %% [markdown]
# ### Baseline, then change one thing
#
# This is the 2022 guide's experiment: bert-base on 128 tokens, with more and more samples. The recipes are fp32, mixed precision, and *pure* half precision, whose weights have 16 bits. Each step accumulates two micro-batches: while the second is computed, the gradients of the first are in memory. (In the legend of the next picture, *operator workspace* is memory that an operation uses internally.)
#
# > **On a CPU** a miniature of bert-base is trained, with about the same ratio of a sample's activations to the weights. `estimate` calculates the peaks of bert-base on a GPU.

# %%
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
learnable = Task("bert-tiny", seq_len=16, data="learnable", config=shape)
original = Task("bert-base-uncased", seq_len=128)
small_shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
miniature = Task("bert-tiny", seq_len=24, config=small_shape | {"vocab_size": 850, "max_position_embeddings": 32})
task, batches = original if on_gpu else miniature, (1, 8, 16, 32, 64)
small, large = batches[0], batches[-1]
timed_task, batch = lab.task if on_gpu else Task(lab.sized("bert-small", "bert-tiny"), 64), lab.profile.micro_batch
in_step = roofline.products(lab, half, timed_task, batch)  # for the part on speed: rates and share of matmuls
if not (quick := in_step.usable):  # this machine emulates 16 bits
    timed_task, batch = learnable, 16
    in_step = roofline.products(lab, half, timed_task, batch)
recipes = {"fp32": {}, "mixed": mixed, "pure half": {"dtype": half}}  # new: the last two


def peak(recipe, batch, accumulate=2, **more):
    arguments = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}
    return lab.train(f"{batch}: {recipe}", task=task, measure=("memory",), **arguments, **recipes[recipe], **more)


runs = {(recipe, batch): peak(recipe, batch) for batch in batches for recipe in ("fp32", "mixed")}
runs |= {("pure half", batch): peak("pure half", batch) for batch in (small, large)}
alone = {recipe: peak(recipe, small, accumulate=1).peak_bytes for recipe in ("fp32", "mixed")}


# %%
def estimated_peaks(task, batch, device=None, recipe=mixed):
    """Return the estimated peaks in fp32 and in mixed precision, in bytes."""
    common = {"device": device, "per_device_train_batch_size": batch, "gradient_accumulation_steps": 2}
    return [estimate(task, **common, **arguments).peak_bytes for arguments in ({}, recipe)]


def saved(fp32, mixed):
    return 100 * (1 - mixed / fp32)


peaks = {batch: [runs[recipe, batch].peak_bytes for recipe in ("fp32", "mixed")] for batch in batches}
measured = 100 * peaks[large][1] / peaks[large][0]
display(
    widgets.revealed(
        lab, "mixed peak", measured, estimate=lab.foresee(lambda: 100 - saved(*estimated_peaks(task, large)))
    )
)
ends = [runs[recipe, batch] for batch in (small, large) for recipe in recipes]
_ = plots.memory(ends, title=f"Peak at micro-batch {small} and {large}")

# %%
guide = {8: (4247, 4163), 16: (4971, 4793), 32: (6827, 6207), 64: (10037, 8061)}  # MB, by nvidia-smi
shown = {"measured here" if on_gpu else "measured here, the miniature": peaks, "2022 guide, bert-base on 2 GPUs": guide}
if not on_gpu:
    sizes = {batch: lab.foresee(estimated_peaks, original, batch, "cuda", {"fp16": True}) for batch in (8, large)}
    shown["estimated: bert-base on a GPU"] = {batch: found for batch, found in sizes.items() if found}
_, (left_side, right_side) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
for i, (name, found) in enumerate(shown.items()):
    heights = [saved(*pair) for pair in found.values()]
    left_side.plot([*map(str, found)], heights, "os^"[i] + "-", color=plots.SERIES[i], label=name)
bars = {1: torch.zeros(len(batches)), -1: torch.zeros(len(batches))}  # tops of what is saved, and of what is added
for kind, colour in plots.PALETTE.items():
    parts = [[runs[r, batch].memory.breakdown.get(kind, 0) for batch in batches] for r in ("fp32", "mixed")]
    share = 100 * (torch.tensor(parts[0]) - torch.tensor(parts[1])) / torch.tensor([fp32 for fp32, _ in peaks.values()])
    for sign, bottom in bars.items() if share.abs().max() > 0.2 else ():
        height = share.clamp(min=0) if sign > 0 else share.clamp(max=0)
        name = plots.name_text(kind) if (sign > 0) == (share.sum() > 0) else None
        right_side.bar(list(map(str, batches)), height.tolist(), bottom=bottom.tolist(), color=colour, label=name)
        bottom += height
for ax, title in ((left_side, "Peak memory saved by mixed precision"), (right_side, "Measured here, by category")):
    ax.use_sticky_edges = False  # a margin around the bars
    ax.set_title(title, loc="left")
    ax.set(xlabel="micro-batch", ylabel="saved (% of the fp32 peak)")
    ax.axhline(0, color="black", linewidth=1)
    ax.legend(frameon=False, fontsize=9)

# %% jupyter={"source_hidden": true}
rises = runs["mixed", small].peak_bytes > runs["fp32", small].peak_bytes  # where activations are few

# %%
exercises.question(
    lab,
    "what halves",
    "A model has 1 GB of fp32 weights, and almost no activations. It is trained with accumulation. What does mixed "
    "precision do to the peak?",
    {
        "It halves it: 16 bits instead of 32.": "That is pure half precision. Mixed precision keeps weights, gradients "
        "and optimizer states in fp32.",
        "It changes nothing: all that is left is kept in fp32.": "These bytes do stay as they are, but something is "
        "added. What do the matmuls work on?",
        "It rises, by up to 0.5 GB.": "The matmuls need 16-bit copies of their weights beside the fp32 ones. Only "
        "smaller activations can make up for that, so it pays from a certain batch size on.",
    },
    right="It rises, by up to 0.5 GB." if rises else "It changes nothing: all that is left is kept in fp32.",
)

# %% [markdown]
# Below the black line mixed precision costs memory. The bars show why: the weight copies take the same bytes at every batch size, while smaller activations and temporaries save more, the larger the batch. Weights, gradients and states are those of fp32; only pure half precision halves them. The guide's curve, read from nvidia-smi, rises from 84 of 4247 MB saved at batch 8 to 1976 of 10037 MB at 64.
#
# **Below batch 8**, the guide says, mixed precision takes more memory. This is true only if all gradients exist together with the copies:
#
# - In 2022 they always did: `zero_grad` kept gradients and filled them with zeros. Since torch 2.0 it frees them ([pytorch#92731](https://github.com/pytorch/pytorch/pull/92731)).
# - Today this happens only under accumulation.
# - Without accumulation, backward frees the copies while it makes the gradients. At the end of backward, where a small batch has its peak, no copies are left. So the peak does not rise.
#
# ### Do activations halve?
#
# The guides say that what autograd keeps for backward, the activations, halves. The next cells list these tensors by the module that keeps them (BERT's names: `self` is attention, `dense` a linear layer, `intermediate_act_fn` the GELU), and add them up.


# %%
def only_casts(node):
    """Return whether a tensor is a copy of a parameter: only casts and transposes made it."""
    while node is not None and node.name() in ("ToCopyBackward0", "TBackward0"):  # a cast, a transpose
        node = node.next_functions[0][0]  # the operation before
    return node is not None and "AccumulateGrad" in node.name()  # autograd's graph begins at a parameter


def kept_for_backward(model, batch, device, dtype):
    """Return the bytes that autograd keeps for each module, without parameters and their copies."""
    storages, saved, names = {p.untyped_storage().data_ptr(): p for p in model.parameters()}, {}, [""]

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages and not only_casts(tensor.grad_fn):
            storages[storage.data_ptr()] = storage  # keep it alive, so that no address is used twice
            saved[names[-1]] = saved.get(names[-1], 0) + storage.nbytes()
        return tensor

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: names.append(name.split(".")[-1]))
        module.register_forward_hook(lambda *_: names.__delitem__(-1))  # back to the module around it
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            model(**batch)
    return saved


# %%
def account(task):
    device, dtypes = "cuda" if torch.cuda.is_available() else "cpu", (torch.float32, getattr(torch, half))
    batch, model = task.batch(large, device=device), task.build_model().to(device)
    saved = [kept_for_backward(task.build_model().to(device), batch, device, dtype) for dtype in dtypes]
    with Seen() as seen:
        with torch.autocast(device, dtype=dtypes[1]):
            loss = model(**batch).loss
        loss.backward()
    products = {key: n for key, n in seen.count.items() if key[0] in ("mm", "addmm", "bmm", "baddbmm")}
    return *saved, sum(n for key, n in products.items() if key[1] == torch.float32), sum(products.values())


in_fp32, in_mixed, left_fp32, products = lab.run(account, "kept for backward", task=task, measure="value").value
held = {recipe: runs[recipe, large].memory.phase_breakdowns["forward"]["activations"] for recipe in recipes}
torch.testing.assert_close(float(sum(in_fp32.values())), float(held["fp32"]), rtol=0.05, atol=0)  # the meter's count
names = [name for name, size in in_mixed.items() if size > 0.01 * held["mixed"]]
rows = [[name, in_fp32.get(name, 0) / 1e6, in_mixed[name] / 1e6] for name in names]
rows.append(["all, by the memory meter", held["fp32"] / 1e6, held["mixed"] / 1e6])
display(plots.Table(["kept for", "fp32 (MB)", "mixed (MB)"], rows))
print(f"matmuls of a step under autocast: {left_fp32} of {products} run in fp32")

eager = {recipe: peak(recipe, 8, attn_implementation="eager") for recipe in recipes}
eager_held = {recipe: run.memory.phase_breakdowns["forward"]["activations"] for recipe, run in eager.items()}
rows = [[recipe, held[recipe] / held["fp32"], eager_held[recipe] / eager_held["fp32"]] for recipe in recipes]
plots.Table(["activations against fp32", "default attention", "attn_implementation='eager'"], rows)

# %% [markdown]
# Three reasons why the sum need not halve:
#
# - **`LayerNorm`** keeps its input, a residual sum, which stays fp32. The embeddings' `dropout` works in fp32, too.
# - **`query`, `key` and `value`** take the same tensor, which fp32 keeps once. Under autocast each of the three casts it again (the cache is for weights only), and three copies of half the size are more than the original.
# - **`self`**, attention, is by default one torch function. With dropout on a CPU it uses a plain kernel, which computes in fp32 inside ([pytorch#128922](https://github.com/pytorch/pytorch/pull/128922)): these are the fp32 matmuls of the printed line. `attn_implementation='eager'` selects transformers' own attention instead. On a CPU it computes in 16 bits and keeps less (second table).
#
# With 16-bit weights and eager attention nothing is fp32, and everything halves. Why not always train with 16-bit weights? In bf16, a weight of 1 plus an update of 0.001 is 1: small updates are lost. Pure fp16 also has its small range.
#
# ### Is it fast, and does it still learn?
#
# A task that can be learnt is trained in fp32 and in mixed precision, with three seeds each. A *final loss* is the mean of the last 10 steps. In the picture each recipe is a band of three curves.
#
# > **On a GPU** from Ampere on, tf32 is trained too. **On a CPU**, one run with `fp16=True` is added.

# %%
settings = {"per_device_train_batch_size": 16, "learning_rate": 3e-3, "lr_scheduler_type": "constant"}


def learn(name, recipe, seed=0, steps=50):
    arguments = settings | {"seed": seed} | recipe
    return lab.train(name, task=learnable.replace(seed=seed), measure="value", steps=steps + 1, **arguments)


def final(run):
    return sum(run.losses[-10:]) / 10


learners = {"fp32": {}, "mixed": mixed} | ({"tf32": {"tf32": True}} if hardware.supports("sm80")[0] else {})
seeds = {name: [learn(name, recipe, seed) for seed in range(3)] for name, recipe in learners.items()}
finals = {recipe: [round(final(run), 3) for run in three] for recipe, three in seeds.items()}
print("final losses:", finals)
flagged = (seeds["mixed"][0] if on_gpu else learn("fp16=True", {"fp16": True}, steps=10)).losses
same = flagged == seeds["fp32"][0].losses[: len(flagged)]
print(f"fp16=True gives the losses of fp32 to the last digit: {same}")
_ = plots.losses(
    {recipe: [run.losses for run in three] for recipe, three in seeds.items()}, title="Loss by step, three seeds each"
)


# %%
def timed(name, recipe, task=timed_task):
    return lab.train(name, task=task, measure=("time",), steps=1, per_device_train_batch_size=batch, **recipe)


in_turns = timed("fp32, timed", {}), timed("mixed, timed", mixed)
speed = lab.compare(*in_turns).speed_ratio
print(f"instructions for bf16: {lab.machine.native_bf16}; measured: {in_step}")
print(
    "so mixed precision should train {:.2f} to {:.2f} x as fast as fp32;".format(*in_step.step_speed),
    f"measured: {speed}",
)

# %%
exercises.question(
    lab,
    "a flag",
    f"Here torch says of bf16: supported = {flag}. What would that alone tell you about the speed?",
    {
        "Nothing.": "The flag says that torch can compute the results in some way. The chip's instructions "
        "decide how fast: look them up, or measure.",
        "bf16 is faster than fp32, by how much is open.": "Emulated bf16 is slower: each value is widened, "
        "multiplied in fp32 and rounded again. The flag is set all the same.",
        "bf16 is no slower than fp32: otherwise torch would use fp32.": "torch computes in the format that you request, also if it is slower.",
    },
    right="Nothing.",
)

# %% [markdown]
# **Does it learn?** If the bands overlap, mixed precision learns as fp32 does.
#
# **Is it faster?** The rate of the chip's matmuls decides, not a flag:
#
# - torch answers "yes" to bf16 wherever it can be *computed*, also on a T4, which has no bf16 units ([pytorch#148322](https://github.com/pytorch/pytorch/pull/148322)).
# - Without 16-bit instructions torch takes a slow path ([pytorch#118499](https://github.com/pytorch/pytorch/issues/118499)).
# - With these instructions a CPU may be slower too: of three CPUs tried that have them (`avx512_bf16`), one multiplies in bf16 at 0.65 of fp32's rate ([table](../docs/trust.md#cpus-tried)).
# - The range after *mixed precision should train* is calculated from two parts of the step, whose times are added (Amdahl's law). The matmuls speed up by the ratio of their rates. All other work takes half to twice its time: its bytes are halved, but casts are added. The matmuls' share of a step is not known exactly, because small matmuls may run below the printed rate, and the Trainer adds work.
#
# > **On a CPU** `fp16=True` has no effect if the line about its losses says True. accelerate applies this argument on accelerators only.
#
# ### Inference: the whole model in 16 bits
#
# Inference has no small updates to add, so the whole model may have 16 bits. The guide compares this with mixed precision, which keeps fp32 weights *and* 16-bit copies: 6 bytes per parameter. (Autocast makes no copies of embeddings, so the models below have small embeddings.)
#
# The Trainer's switches are `--fp16_full_eval` and `--bf16_full_eval`. The third of the next cells evaluates two models that compute the same function in fp32: a trained model, and its twin. A feed-forward layer has two weight matrices, here with a ReLU between them, which passes a positive factor on. In the twin the first is multiplied by 2^18, and the second is divided by 2^18. So only the activations between the two matrices are larger.

# %%
served = lab.task
if not on_gpu:
    model, vocabulary = ("bert-small", 1200) if quick else ("bert-tiny", 250)
    served = Task(model, seq_len=64, config={"vocab_size": vocabulary, "max_position_embeddings": 64})
inference = {"task": served, "per_device_eval_batch_size": 4, "measure": ("memory",)}
by_autocast = lab.infer("inference by autocast", **mixed, **inference)
all_half = lab.infer("inference, pure half", dtype=half, **inference)  # new
parts = [run.memory.breakdown for run in (by_autocast, all_half)]
weighed = [part["weights"] + part["weight_copies"] for part in parts]
served_speed = lab.compare(by_autocast, all_half).speed_ratio
print(f"pure half against autocast: {weighed[1] / weighed[0]:.3f} x the bytes of weights, {served_speed} x the speed")


def tf32_facts(task):  # for the section on tf32
    from transformers import TrainingArguments

    default, changed = torch.get_float32_matmul_precision(), 0
    for setting in ("highest", "high"):  # the second allows tf32 in matmuls
        torch.set_float32_matmul_precision(setting)
        TrainingArguments(tempfile.mkdtemp(), use_cpu=not torch.cuda.is_available())
        changed += torch.get_float32_matmul_precision() != setting
    return default, changed


tf32_default, tf32_changed = lab.run(tf32_facts, measure="value").value


# %%
def evaluated(task):
    """Return the weights' type during training; per flag: bytes per parameter, loss and accuracy of model and twin."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    common = settings | {"use_cpu": not torch.cuda.is_available(), "per_device_eval_batch_size": 64}
    common |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}

    def trainer(model, **more):
        args = TrainingArguments(tempfile.mkdtemp(), **common, **more)
        args._n_gpu = min(1, args.n_gpu)
        data = {"train_dataset": task.dataset(), "eval_dataset": task.replace(seed=100, dataset_size=256).dataset()}
        accuracy = {"compute_metrics": lambda found: {"accuracy": (found[0].argmax(-1) == found[1]).mean().item()}}
        made = Trainer(model, args, **data, **accuracy)
        made.remove_callback(PrinterCallback)
        return made

    model, inside = task.build_model(), []
    model.register_forward_pre_hook(lambda model, _: None if model.training else inside.append(str(model.dtype)))
    trainer(model, max_steps=100, eval_strategy="steps", eval_steps=100, fp16_full_eval=True).train()
    return inside[0], {name: scores(trainer, model, flags) for name, flags in evaluations.items()}


# %%
def scores(trainer, model, flags):
    results = []
    for factor in (1.0, 2.0**18):
        twin = copy.deepcopy(model)
        for layer in twin.bert.encoder.layer if factor > 1 else ():
            for weight in (layer.intermediate.dense.weight, layer.intermediate.dense.bias):
                weight.data *= factor
            layer.output.dense.weight.data /= factor
        found = trainer(twin, **flags).evaluate()
        results += [found["eval_loss"], found["eval_accuracy"]]
    bytes_each = sum(p.nbytes for p in twin.parameters()) / sum(p.numel() for p in twin.parameters())
    return [bytes_each, *results]


evaluations = {"fp32": {}, "mixed precision": mixed, "bf16_full_eval": {"bf16_full_eval": True}}
evaluations["fp16_full_eval"] = {"fp16_full_eval": True}  # new: the last two
plain_task = learnable.replace(config={"hidden_act": "relu"})  # without it a factor would not cancel
inside, evals = lab.run(evaluated, task=plain_task, measure="value").value
print(f"fp16_full_eval, evaluated while train() runs: the weights are {inside}")
header = ["evaluation", "bytes per parameter afterwards", "loss", "accuracy", "twin's loss", "twin's accuracy"]
plots.Table(header, [[name, *map(float, row)] for name, row in evals.items()])

# %% [markdown]
# bf16 gives the twin exactly the model's losses, because a power of two changes no mantissa bit. fp16 gives `nan`, as it did in T5's feed-forward layers. `argmax` of `nan` outputs is 0, so the twin always answers class 0. Two traps:
#
# - After evaluating with a flag, your model *is* 16-bit: save it before.
# - While `train()` runs, the flags are ignored: the printed type shows it.
#
# ### tf32
#
# tf32 needs only permission: `torch.set_float32_matmul_precision("high")`, or the Trainer's `tf32=True` (note 2 at the end). Under fp16, tf32 can only speed up the matmuls that are left in fp32; they were counted above.
#
# ### What held: memory

# %% tags=["claim"]
remedy = f"attn_implementation='eager': {eager_held['mixed'] / eager_held['fp32']:.2f}"
display(claims.check("fp16-activations-halve", held["mixed"] / held["fp32"], note=remedy))
kinds = {"weights": "forward", "gradients": "backward", "optimizer_states": "step"}
ends = {recipe: runs[recipe, large].memory.phase_breakdowns for recipe in recipes}
ratios = {r: [ends[r][end][kind] / ends["fp32"][end][kind] for kind, end in kinds.items()] for r in recipes}
farthest = max(ratios["mixed"], key=lambda ratio: abs(ratio - 1))
display(claims.check("mixed-saves-only-activations", farthest, note=f"pure half: {max(ratios['pure half']):.2f}"))
shares_saved = [saved(*pair) / 100 for pair in peaks.values()]
display(claims.check("fp16-small-batch-costs", -shares_saved[0]))
display(claims.check("fp16-below-eight-costs", alone["mixed"] / alone["fp32"] - 1))
growth = [more - less for less, more in pairwise(shares_saved)]
by_size = ", ".join(f"{share:.1%} at {batch}" for share, batch in zip(shares_saved, batches))
claims.check("fp16-saves-with-batch", min(growth), note=f"saved: {by_size}")

# %% [markdown]
# ### What held: inference

# %% tags=["claim"]
display(claims.check("half-inference", weighed[1] / weighed[0]))
display(claims.check("full-eval-weights", max(evals[flag][0] for flag in ("bf16_full_eval", "fp16_full_eval"))))
fallen = [evals["fp32"][place] - evals["fp16_full_eval"][place] for place in (2, 4)]  # of the model and of its twin
display(claims.check("half-eval-depends", fallen[1] - fallen[0]))
claims.check("half-inference-speed", served_speed, predicted=in_step.half_speed)

# %% [markdown]
# ### What held: speed
#
# The 2022 guide's "up to 5x" was seen in Megatron-DeepSpeed, a program that trains very large models. Such a model's step is mostly large matmuls, so on a GPU the cell times one in fp32 and in fp16.


# %%
def product_facts(task, size=4096):
    """Return the bits that a matmul keeps with tf32 (mantissa, exponent), and pairs of a large one's speed, fp32 = 1."""
    from transformers import TrainingArguments

    one, a, by_trainer = torch.eye(256, device="cuda"), torch.randn(size, size, device="cuda"), None

    def mantissa():
        values = ((1 + torch.arange(2**16, device="cuda").view(256, 256) / 2**16) @ one).unique()
        return math.log2((values < 2).sum())

    def seconds(precision, b):
        torch.set_float32_matmul_precision(precision)
        return Timer("b @ b", globals={"b": b}).timeit(10).median  # waits for the GPU

    if torch.cuda.get_device_capability() >= (8, 0):
        TrainingArguments(tempfile.mkdtemp(), tf32=True)  # new: tf32 on, the Trainer's way
        by_trainer = mantissa()
    torch.set_float32_matmul_precision("high")  # new: torch's way
    powers = 2.0 ** torch.arange(-128, 128, device="cuda").clamp(-126, 127)  # fp32's normal ones, 254
    values = (powers.expand(256, 256) @ one)[0].unique()
    exponent = math.log2((values.isfinite() & (values > 0)).sum() + 2)  # two bit patterns are for 0, inf and nan
    turns = [[seconds(*way) for way in (("highest", a), ("high", a), ("highest", a.half()))] for _ in range(8)]
    return by_trainer, mantissa(), exponent, *[[turn[0] / turn[way] for turn in turns[1:]] for way in (1, 2)]


# %% tags=["claim"]
display(claims.check("fp16-faster", speed if on_gpu else None))
every = [lab.compare(runs["fp32", b], runs["mixed", b], turns=3).speed_ratio for b in batches[1:]] if on_gpu else []
least = min(every, key=lambda ratio: ratio.value if ratio.known else 0, default=None)
display(claims.check("fp16-twice-by-batch", least, note=", ".join(map(str, every))))
on_cpu = [seeds["fp32"][0], seeds["mixed"][0]]
if on_gpu:
    on_cpu = [learn(f"CPU, {recipe}", recipe | {"use_cpu": True}) for recipe in ({}, {"bf16": True})]
works = on_cpu[0].losses != on_cpu[1].losses and abs(final(on_cpu[1]) / final(on_cpu[0]) - 1) < 0.1
note = "final losses of fp32 and bf16 on this CPU: {:.3f}, {:.3f}".format(*map(final, on_cpu))
display(claims.check("bf16-ampere-only", int(works), note=note))

# %% tags=["claim"]
of_cpu, cpu_speed = in_step, speed
if on_gpu:
    of_cpu = roofline.products(lab, "bfloat16", learnable, batch, use_cpu=True)
    on_cpu = [timed(f"CPU, {recipe}", recipe | {"use_cpu": True}, learnable) for recipe in ({}, {"bf16": True})]
    cpu_speed = lab.compare(*on_cpu).speed_ratio
display(claims.check("half-precision-faster-cpu", cpu_speed, predicted=of_cpu.step_speed, note=str(of_cpu)))
by_trainer = mantissa = exponent = tf32_product = fp16_product = tf32_losses = tf32_mixed = None
if on_gpu:
    by_trainer, mantissa, exponent, *pairs = lab.run(product_facts, "products", measure=("none",)).value
    tf32_product, fp16_product = map(lab.ratio, pairs)
claims.check("fp16-up-to-5x", fp16_product)

# %% [markdown]
# ### What held: tf32

# %% tags=["claim"]
display(claims.check("tf32-default", tf32_changed, note=f"torch's default is {tf32_default!r}"))
note = f"torch has a dtype named tf32: {hasattr(torch, 'tf32')}"
if "tf32" in seeds:
    note += f"; training step {lab.compare(in_turns[0], timed('tf32, timed', {'tf32': True})).speed_ratio} x"
    tf32_mixed = lab.compare(in_turns[1], timed("mixed and tf32", mixed | {"tf32": True})).speed_ratio
    tf32_losses = sum(map(final, seeds["tf32"])) / sum(map(final, seeds["fp32"]))
display(claims.check("tf32-layout", mantissa, note=note))
display(claims.check("tf32-range", exponent))
display(claims.check("tf32-trainer-flag", by_trainer))
display(claims.check("tf32-faster", tf32_product, note=note))
left = f"{left_fp32} of {products} matmuls of a step are left in fp32"
display(claims.check("tf32-with-half", tf32_mixed, note=left))
claims.check("tf32-convergence", tf32_losses, note=f"final losses: {finals}")

# %% [markdown]
# ## Exercise 2: the challenge
#
# Find the fastest recipe on this machine that still learns as fp32 does. Your answer is a dict of training arguments, such as `{"bf16": True}`, `{"dtype": "float16"}`, or `{}` for fp32. The final loss may be at most a tenth above that of the worst fp32 seed. The speed must be at least 0.8 of that of fp32 or of mixed precision, whichever is faster.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "You have already measured two candidates: their losses over three seeds, and their speeds in interleaved runs.",
    "Pure half precision moves the fewest bytes. Look at what Adam divides by: can fp16 hold a squared gradient?",
    "If `speed` above is more than 1, mixed precision is the safe answer; otherwise `{}` is.",
)

# %% tags=["exercise"]
my_recipe = None


# %% tags=["check"]
def check_recipe(answer):
    if answer is None:
        return exercises.not_attempted("give a dict of training arguments; {} is fp32")
    run = seeds["mixed"][0] if answer == mixed else learn("yours", answer)
    if not run.ok:
        return exercises.run_failed(run)
    if not final(run) <= 1.1 * max(map(final, seeds["fp32"])):  # true for nan, too
        return exercises.wrong(f"final loss {final(run):.3g}, outside the band of the fp32 seeds, {finals['fp32']}")
    ratio = speed if answer == mixed else lab.compare(in_turns[0], timed("yours, timed", answer)).speed_ratio
    target = 0.8 * max(1, speed.value)
    if ratio.high < target:
        return exercises.wrong(f"it learns, at {ratio} of the speed of fp32; the target is {target:.2f}")
    return exercises.right(f"final loss {final(run):.3f} at {ratio} of the speed of fp32")


exercises.check(lab, "fastest recipe", check_recipe, my_recipe)

# %% tags=["solution"] jupyter={"source_hidden": true}
# Pure fp16 with AdamW fails on a CPU: its second moment, a squared gradient, is 0 in fp16, and the step divides by it.
# (A GPU's fused kernel computes in fp32 inside.) SGD keeps no such moment, and at this rate hardly moves.
solution = mixed if speed.known and speed.value > 1 else {}
exercises.prove(check_recipe, solution=solution, mistake={"dtype": half, "optim": "sgd"})

# %% [markdown]
# ## Recap
#
# - **Formats:** bf16 has the range of fp32 (up to 3.39e38) with few digits. fp16 has more digits, but its largest number is 65504, not the guide's 65535: a larger activation becomes `inf`, then NaN.
# - **Loss scaling:** our scaler rescued the gradients that fp16 loses below about 6e-8. bf16 needs none.
# - **Memory:** weights, gradients and states stay in fp32, and copies of the weights are added: 6 bytes per parameter in inference. Activations shrink by less than the 50 % that the guides promise. So mixed precision pays only from a certain batch size on.
# - **Speed:** it depends on the chip's 16-bit matmuls, whatever a flag says. One CPU with the instructions ran bf16 matmuls at 0.65 of fp32's rate.
# - **Quality:** compare the loss with a band of 3 fp32 seeds. With 16-bit weights, evaluate before you trust: the fp16 twin gave `nan`.
#
# **Note 1, bf16.** The guide's check, `transformers.file_utils.is_torch_bf16_available()`, is gone. Its successor, `transformers.utils.is_torch_bf16_gpu_available()`, asks accelerators only.
#
# **Note 2, tf32.** torch allowed tf32 by default from 1.7 on and stopped with 1.12 ([transformers#16588](https://github.com/huggingface/transformers/issues/16588)); cuDNN's convolutions still use it. Since 2.9 there is also `torch.backends.fp32_precision = "tf32"`, which the Trainer's `tf32=True` sets. This setting does nothing if `"highest"` was set before, and makes `torch.get_float32_matmul_precision()` raise an error ([pytorch#179445](https://github.com/pytorch/pytorch/issues/179445)).

# %% tags=["finish"]
claims.finish()
