# %% [markdown]
# # How few bits does training need?
#
# **You will see**
#
# - what fp32, bf16 and fp16 can hold, bit by bit, and a loss scaler written by hand that rescues the gradients fp16
#   loses;
# - which bytes of a training step halve in mixed precision, which stay, which are added, and from which batch on it
#   pays;
# - where half precision is faster, and how to tell whether the loss is still as good.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import math

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer

from perf_helpers import Lab, Task, claims, exercises, hardware, plots, widgets
from perf_helpers.estimate import estimate

lab = Lab(profile, strict=strict, out=out, lesson="07_mixed_precision")
on_gpu = lab.machine.kind == "cuda"
torch.set_num_threads(1)  # of this kernel, which trains tiny networks; experiments have processes of their own
native, lacking = hardware.supports("cuda-or-cpu-bf16")  # are there instructions for 16-bit products?
mixed = {"fp16": True} if on_gpu else {"bf16": True}
half = "float16" if on_gpu else "bfloat16"
print(f"{lab.machine.name}: mixed precision is {mixed}, 16-bit products are {'native' if native else 'emulated'}")

# %% [markdown]
# ## Idea
#
# A number in fp32 takes four bytes. Two bytes are half as much to hold and to move, and chips with 16-bit units
# multiply them several times as fast. But two bytes tell fewer numbers apart. *Mixed precision* therefore keeps
# weights, gradients and optimizer states in fp32, and lets the large matrix products work on 16-bit copies.
#
# ## Predict
#
# A BERT is trained below in fp32 and in mixed precision, with several micro-batches. The guess is about the largest.

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
# ## By hand: the formats
#
# A floating-point number is a sign, an exponent (which power of two) and a mantissa (the digits). The picture shows the
# bits as they lie in memory. tf32 is never stored: it is fp32 whose last digits (13 on Ampere) are left out inside a matrix product.
#
# The table answers two questions: how large can a number get, and from where on does adding 1 change nothing?


# %%
def draw_bits(value=0.1):
    """The sign, exponent and mantissa bits of one number in four formats, and the number that each of them holds."""
    _, ax = plt.subplots(figsize=(9, 2.4), layout="constrained")
    rows = {"fp32": (torch.float32, torch.int32, 8, 32), "tf32": (torch.float32, torch.int32, 8, 19)}
    rows |= {"bf16": (torch.bfloat16, torch.int16, 8, 16), "fp16": (torch.float16, torch.int16, 5, 16)}
    for row, (name, (dtype, integer, exponent, width)) in enumerate(rows.items()):
        stored = torch.tensor(value).to(dtype)
        pattern = stored.view(integer).item() % 2 ** (8 * dtype.itemsize)
        if name == "tf32":  # round to the digits that are left
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
    """The largest finite number: every bit set but the sign and the last of the exponent."""
    return torch.tensor(2 ** (8 * dtype.itemsize - 1) - 1 - 2**mantissa, dtype=integer).view(dtype).item()


def stall(dtype):
    """The power of two from which on n + 1 is n."""
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
plots.Table(["format", "largest number", "n + 1 is n from"], rows)

# %% [markdown]
# bf16 has the range of fp32 and the fewest digits: a running sum of ones gets stuck where the table says, however many
# follow. fp16 has more digits and little range: what is larger than its largest number becomes `inf`.
#
# bf16 is no longer for Ampere and TPUs alone: newer CPUs have instructions for it (`lab.machine.native_bf16` tells of
# this machine). The guide's one-line check, `transformers.file_utils.is_torch_bf16_available()`, is gone; its heir,
# `transformers.utils.is_torch_bf16_gpu_available()`, asks about accelerators only.
#
# What grew up in bf16 is likely to overflow in fp16, says the 2022 guide. Its case is T5, where somebody met 66246
# ([transformers#5651](https://github.com/huggingface/transformers/issues/5651)); those weights are not downloaded here. Instead small nets learn house prices in bf16, in fp16
# with the loss scaler of the next section, and in fp32 for control. Each is then trained on in fp16. The prices reach
# half of fp16's largest number, then nine tenths of it. If bf16 is to blame, its column differs from the others.


# %%
def train(net, x, y, dtype, scaler=None, steps=50, rate=3.0, weight=1.0):
    """Train under autocast; returns the loss and the loss scale of each step."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    optimizer, losses, scales = torch.optim.Adam(net.parameters(), lr=rate), [], []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = F.smooth_l1_loss(net(x).float(), y)
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        scaler.scale(loss * weight).backward()
        scaler.step(optimizer)
        scaler.update()
    return losses, scales


# %%
def overflow_share(dtype, part, seeds=5):
    """The share of nets, trained in a format on prices up to a part of fp16's largest number, that overflow in fp16."""
    rooms, overflows = torch.rand(64, 8, generator=torch.manual_seed(0)), 0
    price = (rooms @ torch.arange(8.0, 0, -1))[:, None]
    price *= part * limits["fp16"][0] / price.max()
    for seed in range(seeds):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        train(net, rooms, price, dtype)
        losses, _ = train(net, rooms, price, torch.float16, steps=20)  # fine-tuning
        overflows += not all(map(math.isfinite, losses))  # an activation that is inf makes the loss inf or nan
    return overflows / seeds


shares = {part: {name: overflow_share(form[0], part) for name, form in forms.items()} for part in (0.5, 0.9)}
by_bf16 = shares[0.5]["bf16"] - shares[0.5]["fp16"]
rows = [[f"{part:.0%} of fp16's largest number", *map("{:.0%}".format, row.values())] for part, row in shares.items()]
plots.Table(["prices up to", *(f"from {name}" for name in forms)], rows, "Nets that overflow when fine-tuned in fp16")


# %%
def off(text, dtype):
    return abs(torch.tensor(float(text)).to(dtype).double().item() - float(text))


exercises.question(
    lab,
    "range and digits",
    "Which of these numbers does fp16 hold better than bf16?",
    {
        "100000": "It is beyond fp16's largest number and becomes `inf`. bf16 has 99840, which is close.",
        "1.001": "fp16 has 10 digits after the leading one, so it comes within 0.0001; bf16 has 7, and holds 1.",
        "1e-9": "It is less than half of fp16's smallest number and becomes 0. bf16 reaches down as far as fp32.",
    },
    right=min(("100000", "1.001", "1e-9"), key=lambda text: off(text, torch.float16) - off(text, torch.bfloat16)),
)

# %% [markdown]
# ## By hand: the loss scaler
#
# Gradients are small, and fp16 has nothing between 0 and about 6e-8. How many vanish? The table takes a small network
# and multiplies its loss by a small weight, as that of a side task is.
#
# The cure: multiply the loss by a large number, which multiplies every gradient, and divide before the step. Which
# number? It is found by trying. An overflow shows as `inf`: then the step is skipped and the scale halved. After some
# good steps it is doubled.

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


def lost(dtype, weight, scale=1.0):  # the share of gradients that are nonzero in fp32 and 0 in `dtype`
    exact, rounded = gradients(torch.float32, weight), gradients(dtype, weight, scale)
    return ((exact != 0) & (rounded == 0)).sum().item() / (exact != 0).sum().item()


ways = {"fp16": (torch.float16, 1.0), "fp16, loss x 65536": (torch.float16, 2.0**16), "bf16": (torch.bfloat16, 1.0)}
rows = [[f"{w:g}", *[f"{lost(t, w, x):.1%}" for t, x in ways.values()]] for w in (1, 1e-3, 1e-4, 1e-5)]
plots.Table(["loss weight", *(f"lost in {way}" for way in ways)], rows)


# %%
class LossScaler:
    """Used as torch.amp.GradScaler is."""

    def __init__(self, init_scale, growth_interval):
        self.factor, self.interval, self.good = init_scale, growth_interval, 0

    def get_scale(self):
        return self.factor

    def scale(self, loss):
        return loss * self.factor

    def step(self, optimizer):
        grads = [p.grad.div_(self.factor) for group in optimizer.param_groups for p in group["params"]]
        self.finite = all(grad.isfinite().all() for grad in grads)
        if self.finite:
            optimizer.step()  # otherwise this step is skipped

    def update(self):
        self.good = self.good + 1 if self.finite else 0
        if not self.finite:
            self.factor /= 2  # back off
        elif self.good == self.interval:
            self.factor, self.good = self.factor * 2, 0  # grow


# %%
def train_small(dtype, scaler=None):
    return train(small_net(), inputs, targets, dtype, scaler, rate=3e-3, weight=1e-5)


start, no_scaler = {"init_scale": 2.0**42, "growth_interval": 5}, torch.amp.GradScaler("cpu", enabled=False)
plain, bare = train_small(torch.float32)[0], train_small(torch.float16, no_scaler)[0]
scaled, scales = train_small(torch.float16, LossScaler(**start))
theirs, their_scales = train_small(torch.float16, torch.amp.GradScaler("cpu", **start))
torch.testing.assert_close(scaled, theirs, rtol=1e-6, atol=0)  # the library must do the same
torch.testing.assert_close(scales, their_scales, rtol=0, atol=0)
_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
curves = {"fp32": plain, "fp16, no scaling": bare, "fp16, our scaler": scaled}
steps, height = range(1, len(plain) + 1), torch.tensor(scales).log2()
plots.lines(steps, curves, "step", "loss", ax=left, title="Small gradients (loss weight 1e-5)", markers=False)
right.step(steps, height, where="mid", color=plots.SERIES[0], label="loss scale")
skipped = [i for i in range(len(scales) - 1) if scales[i + 1] < scales[i]]
right.plot([i + 1 for i in skipped], height[skipped], "x", color=plots.SERIES[1], markersize=9, label="step skipped")
right.set(xlabel="step", ylabel="log2 of the loss scale")
right.yaxis.get_major_locator().set_params(integer=True)
right.set_title("The scale finds its place", loc="left")
_ = right.legend(frameon=False)

# %% [markdown]
# Without scaling fp16 learns nothing here: all its gradients are 0. With it the loss follows fp32. The scale starts too
# high on purpose: steps are skipped until it fits, then it climbs, overflows and backs off again. Losses and scales
# equal those of `torch.amp.GradScaler`. bf16 needs none of this.
#
# ## By hand: what autocast casts
#
# `torch.autocast` decides operation by operation: some run in half precision, some in fp32, the rest take what they
# get. CPU and GPU differ, so the device itself is asked, in a clean process.
#
# How to see a cast? Every operation passes a point where torch picks the kernel for it, the dispatcher. A *dispatch
# mode* stands there: while it is on, it is called with each operation and its tensors, may look at them, and then lets
# the operation run. This one counts how often one weight is copied to another type (`aten._to_copy`). Between two uses
# the weight is changed, as an optimizer would: does the second product notice?


# %%
class Casts(TorchDispatchMode):
    """Counts the casts of one weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.count = weight, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += str(function) == "aten._to_copy.default" and args[0] is self.weight
        return function(*args, **(kwargs or {}))


def casts_per_region(device, cache, regions=3):
    """Casts of a weight that is used twice a region, and how much the second product follows a change in between."""
    weight, x = nn.Parameter(torch.randn(64, 64, device=device)), torch.randn(8, 64, device=device)
    with Casts(weight) as casts:
        for _ in range(regions):
            with torch.autocast(device, dtype=torch.float16, cache_enabled=cache):
                first = x @ weight
                with torch.no_grad():
                    weight.add_(1)
                second = x @ weight
    return casts.count / regions, (second - first).abs().max().item()


# %%
def autocast_facts(task):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(8, 64, device=device)
    h, layer, norm = x.half(), nn.Linear(64, 64).to(device), nn.LayerNorm(64).to(device)
    with torch.autocast(device, dtype=torch.float16):
        results = {"linear layer": layer(x), "GELU": F.gelu(h), "softmax": h.softmax(-1), "LayerNorm": norm(h)}
        results |= {"residual: fp16 + fp32": h + x, "cross-entropy": F.cross_entropy(h, torch.arange(8).to(device))}
    types = {name: str(result.dtype).removeprefix("torch.") for name, result in results.items()}
    x = (1000 + torch.randn(64, 1024, device=device)).half()
    exact = F.layer_norm(x.double(), (1024,))
    error = (F.layer_norm(x, (1024,)) - exact).abs().max() / exact.abs().max() / torch.finfo(torch.float16).eps
    total = sum(x[0].cpu(), torch.zeros((), dtype=torch.float16))  # one by one, in fp16
    flag = torch.cuda.is_bf16_supported() if device == "cuda" else torch.amp.is_autocast_available(device)
    return types, [casts_per_region(device, cache) for cache in (True, False)], error.item(), str(total.item()), flag


facts = lab.run(autocast_facts, "autocast", measure=("none",))
types, ((casts, follows), (casts_without, follows_without)), norm_error, plain_sum, flag = facts.value
print(f"casts of a weight that is used twice: {casts:g} a region, {casts_without:g} without the cache")
print(f"the second product follows its weight by {follows:.2f}, {follows_without:.2f} without the cache")
print(f"1024 numbers near 1000, added in fp16: {plain_sum}; LayerNorm of them: off by {norm_error:.2f} eps at most")
plots.Table(["operation on fp16 under autocast", f"its result on {lab.machine.kind}"], list(types.items()))

# %% [markdown]
# A weight is cast once in a region, and the copy is kept until the region ends or backward is done with it: these
# copies are the price of mixed precision. They do not follow the weight, so each iteration has to make them anew: a
# region around the forward pass, and no more. LayerNorm is right although the sum it needs overflows fp16: inside, it
# adds up in fp32. And mark the residual sum, fp16 + fp32: it will matter.
#
# ## Baseline, then change one thing
#
# A BERT, two micro-batches a step (the 2023 guide accumulated four), so that the gradients of the first are there while
# the second is computed. Three recipes: fp32, mixed precision, and *pure* half precision, whose weights
# themselves are 16-bit.

# %%
task = lab.task if on_gpu else Task("bert-tiny", seq_len=48)
batches = (1, 2, 4 if lab.profile.name == "gpu" else 6)
small, large = batches[0], batches[-1]
recipes = {"fp32": {}, "mixed": mixed, "pure half": {"dtype": half}}  # new: the last two


def peak(recipe, batch, accumulate=2, **more):
    arguments = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}
    return lab.train(f"{batch}: {recipe}", task=task, measure=("memory",), **arguments, **recipes[recipe], **more)


runs = {(recipe, batch): peak(recipe, batch) for batch in batches for recipe in recipes}


def in_percent():
    common = {"per_device_train_batch_size": large, "gradient_accumulation_steps": 2}
    mixed, fp32 = (estimate(task, **common, **recipes[name]).peak_bytes for name in ("mixed", "fp32"))
    return 100 * mixed / fp32


measured = 100 * runs["mixed", large].peak_bytes / runs["fp32", large].peak_bytes
widgets.revealed(lab, "mixed peak", measured, estimate=lab.foresee(in_percent))

# %%
_ = plots.memory(list(runs.values()), title="Peak by micro-batch and recipe")
change = {
    recipe: [100 * (runs[recipe, batch].peak_bytes / runs["fp32", batch].peak_bytes - 1) for batch in batches]
    for recipe in ("mixed", "pure half")
}
ax = plots.lines(batches, change, "micro-batch", "peak against fp32 (%)", title="From which batch on does it pay?")
ax.axhline(0, color="black", linewidth=1)
ax.set_xticks(batches)
alone = {recipe: peak(recipe, small, accumulate=1).peak_bytes for recipe in ("fp32", "mixed")}
without = f"{alone['mixed'] / alone['fp32'] - 1:+.1%} without accumulation"
print(f"mixed precision at micro-batch {small}: {change['mixed'][0]:+.1f}%, {without}")

# %%
rises = runs["mixed", small].peak_bytes > runs["fp32", small].peak_bytes  # where activations are few
exercises.question(
    lab,
    "what halves",
    "A model has 1 GB of fp32 weights, and next to no activations. It is trained with accumulation. What does mixed "
    "precision do to the peak?",
    {
        "It halves it: 16 bits instead of 32.": "That is pure half precision. Mixed precision keeps weights, gradients "
        "and optimizer states in fp32.",
        "It changes nothing: all that is left is kept in fp32.": "What was there stays as it was, but something is "
        "added. What do the matrix products work on?",
        "It rises, by up to 0.5 GB.": "The products need 16-bit copies of their weights beside the fp32 ones. Only "
        "activations can pay for that, so there is a batch from which on it pays.",
    },
    right="It rises, by up to 0.5 GB." if rises else "It changes nothing: all that is left is kept in fp32.",
)

# %% [markdown]
# Above the black line mixed precision costs memory: the copies of the weights are there whatever the batch, and a small
# batch saves less than they take. Weights, gradients and states are those of fp32. Only pure half precision halves
# them. The 2022 guide saw the same growth with bert-base on two GPUs: 84 MB saved at batch 8, 1976 MB at batch 64. It
# adds that fp16 was twice as fast at each; below, speed is measured at one batch, the profile's.
#
# Without accumulation the printed line shows less of a cost, or none. Backward drops the copies as it goes, and the
# gradients, twice as large, take their place. Since torch 2.0 `zero_grad` frees gradients instead of setting them to
# zero ([pytorch#92731](https://github.com/pytorch/pytorch/pull/92731)), so copies and gradients meet only under accumulation.
#
# What shrinks is what autograd keeps for backward, the activations. To half, as the guides say? Let us list them by the
# module that keeps them, and add up.


# %%
def only_casts(node):
    """Whether a tensor is a parameter's copy: going back from it, nothing but casts and transposes lead there."""
    while node is not None and node.name() in ("ToCopyBackward0", "TBackward0"):  # a cast, a transpose
        node = node.next_functions[0][0]  # the operation before
    return node is not None and "AccumulateGrad" in node.name()  # where autograd's graph begins: at a parameter


def kept_for_backward(model, batch, device, dtype):
    """Bytes that autograd keeps, by the module that asks; parameters and their copies left out."""
    storages, kept, names = {p.untyped_storage().data_ptr(): p for p in model.parameters()}, {}, [""]

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages and not only_casts(tensor.grad_fn):
            storages[storage.data_ptr()] = storage  # held on to, so that no address comes twice
            kept[names[-1]] = kept.get(names[-1], 0) + storage.nbytes()
        return tensor

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: names.append(name.split(".")[-1]))
        module.register_forward_hook(lambda *_: names.__delitem__(-1))  # back to the module around it
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            model(**batch)
    return kept


# %%
def account(task):
    device, dtypes = "cuda" if torch.cuda.is_available() else "cpu", (torch.float32, getattr(torch, half))
    batch = task.batch(large, device=device)
    return [kept_for_backward(task.build_model().to(device), batch, device, dtype) for dtype in dtypes]


in_fp32, in_mixed = lab.run(account, "kept for backward", task=task, measure=("none",)).value
held = {recipe: runs[recipe, large].memory.phase_breakdowns["forward"]["activations"] for recipe in recipes}
torch.testing.assert_close(float(sum(in_fp32.values())), float(held["fp32"]), rtol=0.05, atol=0)  # what the meter saw
names = [name for name, size in in_mixed.items() if size > 0.01 * held["mixed"]]
rows = [[name, in_fp32.get(name, 0) / 1e6, in_mixed[name] / 1e6] for name in names]
rows.append(["all, by the memory meter", held["fp32"] / 1e6, held["mixed"] / 1e6])
display(plots.Table(["kept for", "fp32 (MB)", "mixed (MB)"], rows))

eager = {recipe: peak(recipe, large, attn_implementation="eager") for recipe in recipes}
eager_held = {recipe: run.memory.phase_breakdowns["forward"]["activations"] for recipe, run in eager.items()}
rows = [[recipe, held[recipe] / held["fp32"], eager_held[recipe] / eager_held["fp32"]] for recipe in recipes]
plots.Table(["activations against fp32", "default attention", "attn_implementation='eager'"], rows)

# %% [markdown]
# Why all of it together need not halve:
#
# - `LayerNorm` keeps its input, a residual sum, and that stays fp32;
# - `query`, `key` and `value` take one and the same tensor, which fp32 keeps once. Under autocast each of the three
#   casts it anew (the cache is for weights only), and three copies of half the size are more than the original;
# - on a CPU, attention with dropout (`self`) falls back on torch's plain kernel, which computes in fp32 inside
#   ([pytorch#128922](https://github.com/pytorch/pytorch/pull/128922)). The model's own "eager" attention does not: a remedy, as the second table shows for a CPU.
#
# With 16-bit weights and that attention nothing is fp32, and everything halves. Why not always? A weight of 1 plus an
# update of 0.001 is 1 in bf16: small updates are lost, and pure fp16 has its range besides. Exercise 2 tries both.
#
# ## Is it fast, and does it still learn?
#
# Three seeds of a task that can be learnt, in fp32, in mixed precision, and in tf32 where there is any; and, on a CPU,
# `fp16=True`.

# %%
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
learnable = Task("bert-tiny", seq_len=16, data="learnable", config=shape)
settings = {"per_device_train_batch_size": 16, "learning_rate": 3e-3, "lr_scheduler_type": "constant"}


def learn(name, recipe, seed=0):
    arguments = settings | {"seed": seed} | recipe
    return lab.train(name, task=learnable.replace(seed=seed), measure=("time",), steps=50, **arguments)


def final(run):
    return sum(run.losses[-10:]) / 10


learners = {"fp32": {}, "mixed": mixed} | ({"tf32": {"tf32": True}} if hardware.supports("sm80")[0] else {})
seeds = {name: [learn(name, recipe, seed) for seed in range(3)] for name, recipe in learners.items()}
finals = {recipe: [round(final(run), 3) for run in three] for recipe, three in seeds.items()}
print("final losses:", finals)
flagged = seeds["mixed"][0] if on_gpu else learn("fp16=True", {"fp16": True})
print(f"fp16=True gives the losses of fp32 to the last digit: {flagged.losses == seeds['fp32'][0].losses}")
_ = plots.losses(
    {recipe: [run.losses for run in three] for recipe, three in seeds.items()}, title="Loss by step, three seeds each"
)

# %%
timed_task = lab.task if on_gpu else Task("bert-small", seq_len=64) if native else learnable
batch = lab.profile.micro_batch if native else 16


def timed(name, recipe, task=timed_task):
    return lab.train(name, task=task, measure=("time",), per_device_train_batch_size=batch, **recipe)


in_turns = timed("fp32, timed", {}), timed("mixed, timed", mixed)
speed = lab.compare(*in_turns).speed_ratio
print(f"torch says that bf16 can be used: {flag}. 16-bit products: {'native' if native else lacking}")
print(f"speed of mixed precision, fp32 = 1: {speed}")

# %%
exercises.question(
    lab,
    "a flag",
    "On some machine torch's flag says that bf16 is supported. What do you know about the speed?",
    {
        "Nothing.": "The flag says that the results can be computed, by whatever path. The instructions of the chip "
        "decide how fast, so ask for them, or measure.",
        "bf16 is faster than fp32 there, though by how much is open.": "Emulated bf16 is slower than fp32: each value "
        "is widened, multiplied in fp32 and rounded again. The flag is set all the same.",
        "bf16 is no slower than fp32: otherwise torch would use fp32.": "torch does what it is told. It computes in "
        "the format that was asked for, at whatever price.",
    },
    right="Nothing.",
)

# %% [markdown]
# Where the bands lie on each other, mixed precision learns as fp32 does. Whether it is faster depends on the chip. torch
# says "yes" to bf16 wherever it can be *computed*, a T4 included ([pytorch#148322](https://github.com/pytorch/pytorch/pull/148322)). Without 16-bit instructions it takes
# a slow path that is there to be right, not fast ([pytorch#118499](https://github.com/pytorch/pytorch/issues/118499)).
#
# And on a CPU `fp16=True` is accepted and ignored where the printed line says that its losses are those of fp32:
# accelerate applies fp16 on accelerators only. A flag is not a measurement.
#
# ## Inference and tf32
#
# Without training nothing small has to add up, so the whole model may be 16-bit, if it does not overflow. The guide's
# comparison is with mixed precision, which keeps fp32 weights *and* their copies: 6 bytes a parameter. Autocast never
# casts embeddings; in the models below they are as small a share as in bert-large, or less.
#
# tf32 needs no change to a model, only leave: torch gave it by default from 1.7 on and took it back with 1.12
# ([transformers#16588](https://github.com/huggingface/transformers/issues/16588)); cuDNN's convolutions keep it. The Trainer leaves torch's default alone unless told.

# %%
served = lab.task
if not on_gpu:
    model, vocabulary = ("bert-small", 1200) if native else ("bert-tiny", 250)
    served = Task(model, seq_len=64, config={"vocab_size": vocabulary, "max_position_embeddings": 64})
inference = {"task": served, "per_device_eval_batch_size": 4, "measure": ("memory",)}
by_autocast = lab.infer("inference by autocast", **mixed, **inference)
all_half = lab.infer("inference, pure half", dtype=half, **inference)  # new
held_weights = [
    sum(run.memory.breakdown[kind] for kind in ("weights", "weight_copies")) for run in (by_autocast, all_half)
]
served_speed = lab.compare(by_autocast, all_half).speed_ratio
print(f"pure half against autocast: {held_weights[1] / held_weights[0]:.3f} x the bytes of weights and their copies,")
print(
    f"{served_speed} x the speed. fp32 products are taken as {torch.get_float32_matmul_precision()!r}: tf32 is 'high'"
)


# %%
def product_facts(task, size=4096):
    """Mantissa and exponent bits that a product keeps with tf32 on, and a large one's speed in tf32 and fp16, fp32 = 1."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    one, a = torch.eye(256, device=device), torch.randn(size, size, device=device)
    torch.set_float32_matmul_precision("high")  # new: tf32 on
    kept = ((1 + torch.arange(2**16, device=device).view(256, 256) / 2**16) @ one).unique()
    mantissa = math.log2((kept < 2).sum())
    powers = 2.0 ** torch.arange(-128, 128, device=device).clamp(-126, 127)  # fp32's normal ones, 254
    kept = (powers.expand(256, 256) @ one)[0].unique()
    exponent = math.log2((kept.isfinite() & (kept > 0)).sum() + 2)  # two patterns of bits are for 0, inf and nan
    ways = {"fp32": ("highest", a), "tf32": ("high", a), "fp16": ("highest", a.half())}
    turns = []
    for _ in range(8):
        took = {}
        for way, (precision, b) in ways.items():
            torch.set_float32_matmul_precision(precision)
            timer = Timer("b @ b", globals={"b": b})  # waits for the GPU
            took[way] = timer.timeit(10).median
        turns.append(took)
    pairs = {way: [took["fp32"] / took[way] for took in turns[1:]] for way in ways}  # the first turn is warm-up
    return mantissa, exponent, pairs["tf32"], pairs["fp16"]


# %% [markdown]
# ## What held
#
# One finding is to be expected on any machine: 65535 is the largest unsigned 16-bit *integer*, not a number of fp16. The
# boxes give the reasons for the others. The 5x of the 2022 guide was seen in Megatron-DeepSpeed, which is not run here:
# a GPU's largest products alone say whether fp16 *can* be that fast.

# %% tags=["claim"]
display(claims.check("fp16-range", limits["fp16"][0], note="65535 and all from 65520 on become inf"))
digits_lost = f"n + 1 is n from {limits['bf16'][1]:.0f} on in bf16, {limits['fp16'][1]:.0f} in fp16"
display(claims.check("bf16-range", limits["bf16"][0], note=digits_lost))
vanished = lost(torch.float16, 1e-4) - lost(torch.bfloat16, 1e-4)
rescued = f"fp16 with the loss x 65536: {lost(torch.float16, 1e-4, 2.0**16):.1%}"
display(claims.check("bf16-no-scaling", vanished, note=rescued))
display(claims.check("bf16-then-fp16", by_bf16, note=f"near the limit: {shares[0.9]}"))
display(claims.check("autocast-cache", casts, note=f"{casts_without:g} with the cache off"))
display(claims.check("autocast-stale", follows / follows_without))
display(claims.check("layernorm-accumulates-fp32", norm_error, note=f"the plain sum in fp16 is {plain_sum}"))
remedy = f"attn_implementation='eager': {eager_held['mixed'] / eager_held['fp32']:.2f}"
display(claims.check("fp16-activations-halve", held["mixed"] / held["fp32"], note=remedy))
kinds = {"weights": "forward", "gradients": "backward", "optimizer_states": "step"}
ends = {recipe: runs[recipe, large].memory.phase_breakdowns for recipe in recipes}
kept = {r: [ends[r][end][kind] / ends["fp32"][end][kind] for kind, end in kinds.items()] for r in recipes}
farthest = max(kept["mixed"], key=lambda ratio: abs(ratio - 1))
display(claims.check("mixed-saves-only-activations", farthest, note=f"pure half: {max(kept['pure half']):.2f}"))
display(claims.check("fp16-small-batch-costs", change["mixed"][0] / 100, note=without))
growth = [(less - more) / 100 for less, more in zip(change["mixed"], change["mixed"][1:], strict=False)]
claims.check("fp16-saves-with-batch", min(growth), note=f"{change['mixed'][-1]:+.1f}% at micro-batch {large}")

# %% tags=["claim"]
display(claims.check("fp16-faster", speed if on_gpu else None))
cpu_speed = None if on_gpu else speed
if on_gpu:
    cpu_task = Task("bert-small", seq_len=64) if hardware.supports("cpu-bf16")[0] else learnable
    on_cpu = [timed(f"CPU, {recipe}", recipe | {"use_cpu": True}, cpu_task) for recipe in ({}, {"bf16": True})]
    cpu_speed = lab.compare(*on_cpu).speed_ratio
display(claims.check("half-precision-faster-cpu", cpu_speed))
display(claims.check("half-inference", held_weights[1] / held_weights[0]))
display(claims.check("half-inference-speed", served_speed))
mantissa = exponent = tf32_product = fp16_product = tf32_losses = tf32_mixed = None
if on_gpu:
    mantissa, exponent, *pairs = lab.run(product_facts, "products", measure=("none",)).value
    tf32_product, fp16_product = map(lab.ratio, pairs)
note = f"there is a torch.tf32: {hasattr(torch, 'tf32')}"
if "tf32" in seeds:
    note += f"; training step {lab.compare(in_turns[0], timed('tf32, timed', {'tf32': True})).speed_ratio} x"
    tf32_mixed = lab.compare(in_turns[1], timed("mixed and tf32", mixed | {"tf32": True})).speed_ratio
    tf32_losses = sum(map(final, seeds["tf32"])) / sum(map(final, seeds["fp32"]))
display(claims.check("fp16-up-to-5x", fp16_product))
display(claims.check("tf32-layout", mantissa, note=note))
display(claims.check("tf32-range", exponent))
display(claims.check("tf32-faster", tf32_product, note=note))
display(claims.check("tf32-with-half", tf32_mixed))
claims.check("tf32-convergence", tf32_losses, note=f"final losses: {finals}")

# %% [markdown]
# ## Explore
#
# Numbers near the edges: 257 is not in bf16, 2049 not in fp16; 65519 is the last integer that fp16 can round down, and
# 2e-8 is less than half of its smallest number.

# %% tags=["widget"]
_ = widgets.explore(draw_bits, value=[0.1, 1.0, 257.0, 2049.0, 65519.0, 65520.0, 6e-8, 2e-8, 3e38])

# %% [markdown]
# ## Exercise 1: choose a loss scale
#
# With a loss weight of 1e-9 even the usual start of 65536 is too small. Find a scale (a power of two) at which fp16
# loses less than 1 % of the gradients and none overflows.

# %%
exercises.hint(
    "With a weight of 1 hardly any gradient was lost. Which scale makes up for a weight of 1e-9?",
    "1e9 is about 2 to the power of 30.",
    "`2.0**30` puts the gradients where fp16 held them at a weight of 1. A little above leaves more room below.",
)

# %% tags=["exercise"]
my_scale = None  # e.g. 2.0**16


# %% tags=["check"]
def check_scale(answer):
    if answer is None:
        return exercises.not_attempted()
    if not gradients(torch.float16, 1e-9, answer).isfinite().all():
        return exercises.wrong("a gradient overflows: smaller")
    share = lost(torch.float16, 1e-9, answer)
    if share >= 0.01:
        return exercises.wrong(f"{share:.1%} of the gradients still vanish: larger")
    return exercises.right(f"{share:.2%} vanish, none overflows")


exercises.check(lab, "loss scale", check_scale, my_scale)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check_scale, solution=2.0**32, mistake=2.0**16)

# %% [markdown]
# ## Exercise 2: the challenge
#
# Give the fastest recipe on this machine whose loss stays in the band: training arguments such as `{"bf16": True}`,
# `{"dtype": "float16"}`, or `{}` for fp32. Target: a final loss at most a tenth above the worst fp32 seed's, at 0.8 of the
# speed of the faster of fp32 and mixed precision or more.

# %%
exercises.hint(
    "You have measured two candidates already: their losses over three seeds, and their speeds in turns.",
    "Pure half precision moves the fewest bytes. Look at what Adam divides by: can fp16 hold a squared gradient?",
    "Where `speed` above is more than 1, mixed precision is the safe answer; where it is less, `{}` is.",
)

# %% tags=["exercise"]
my_recipe = None


# %% tags=["check"]
def check_recipe(answer):
    if answer is None:
        return exercises.not_attempted("give a dict of training arguments; {} is fp32")
    yours = learn("yours", answer)
    if not yours.ok:
        return exercises.wrong(yours.message)
    if not final(yours) <= 1.1 * max(map(final, seeds["fp32"])):  # nan is no loss either
        return exercises.wrong(f"final loss {final(yours):.3g}, outside of the fp32 seeds' {finals['fp32']}")
    ratio = lab.compare(in_turns[0], timed("yours, timed", answer)).speed_ratio
    target = 0.8 * max(1, speed.value)
    if ratio.high < target:
        return exercises.wrong(f"it learns, at {ratio} of the speed of fp32; the target is {target:.2f}")
    return exercises.right(f"final loss {final(yours):.3f} at {ratio} of the speed of fp32")


exercises.check(lab, "fastest recipe", check_recipe, my_recipe)

# %% tags=["solution"] jupyter={"source_hidden": true}
# Pure fp16 with AdamW fails on a CPU: its second moment, a squared gradient, is 0 in fp16, and the step divides by it.
# (A GPU's fused kernel computes in fp32 inside.) SGD keeps no such moment, and at this rate hardly moves.
solution = mixed if speed.known and speed.value > 1 else {}
exercises.prove(check_recipe, solution=solution, mistake={"dtype": half, "optim": "sgd"})

# %% [markdown]
# ## Recap
#
# - You saw what the formats hold: bf16 the range of fp32 with few digits, fp16 more digits and a largest number of
#   65504, not the 65535 of the guide; and your loss scaler rescued the gradients that fp16 loses, as torch's does.
# - You saw that the activations shrink, though not by half, that weights, gradients and states stay, that copies of the
#   weights are added, and that it pays only from a certain batch on.
# - You saw that half precision is fast where the chip has the instructions for it, whatever a flag says, and that the
#   loss is judged against a band of seeds.

# %% tags=["finish"]
claims.finish(lab)
