# %% [markdown]
# # Can Adam remember in a quarter of the bits?
#
# AdamW's states do not fit into your memory, and you want to keep AdamW's recipe. Its two running averages take 8 bytes per parameter of the model. 8-bit Adam keeps both, and stores each in one byte instead of four.
#
# **You will see**
# - how 256 values and one scale per block of 256 numbers store a state, and what one outlier does to it
# - which tensors stay in 32 bits, which library decides this and why, counted to the byte
# - why fewer bytes of states do not always mean a lower peak, and how much the peak falls on your machine
#
# **Time:** plan 35 minutes with the code and the exercises: ten minutes of reading, about a minute of computing on two CPU cores. **Before this:** lesson 08. **Not on a CPU:** the claim about speed, which is about CUDA's kernels.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import math
import statistics

import bitsandbytes as bnb
import matplotlib.pyplot as plt
import torch
from IPython.display import display
from transformers import Trainer

from perf_helpers import Claims, Lab, Task, exercises, plots, widgets
from perf_helpers.lab import Ratio

lab = Lab(profile, strict=strict, out=out, lesson="09_8bit_adam")
claims = Claims(lab)
torch.set_num_threads(1)  # in this notebook's own process, where all tensors are small

# %% [markdown]
# ## Idea
#
# (If the cell above printed that a package `kernels` is missing, ignore it: bitsandbytes needs this package for 4-bit matmuls, which this lesson does not use.)
#
# Adafactor (lesson 08) discards most of the numbers in Adam's states. **8-bit Adam** ([Dettmers and others, 2021](https://arxiv.org/abs/2110.02861)) keeps all of them, but less exactly: each number becomes the nearest of 256 values, and only the index of that value is stored, in one byte. The package bitsandbytes implements it; this lesson calls the package *the library*.
#
# ## Predict
#
# AdamW keeps 8 bytes per parameter. The Trainer's flag for 8-bit AdamW is `optim="adamw_bnb_8bit"`.
#
# The flag does not treat embeddings as it treats the other parameters, so the answer depends on the share of parameters in embeddings. In bert-large this share is 9.5 %. On a CPU this lesson uses a small model with a short vocabulary, so that the share is nearly the same.

# %%
cuda = lab.machine.kind == "cuda"
task = lab.task if cuda else lab.task.replace(config={"vocab_size": 800})
meta, parameters = task.build_model(device="meta"), task.parameters()
embeddings = {id(module.weight) for module in meta.modules() if isinstance(module, torch.nn.Embedding)}
part = sum(parameter.numel() for parameter in meta.parameters() if id(parameter) in embeddings) / parameters
print(f"{task}: {parameters:,} parameters, {part:.1%} of them in embeddings (bert-large: 9.5%)")
print(f"AdamW's states take {plots.bytes_text(8 * parameters)}")
question = "How many bytes per parameter will the flag keep on this lesson's model, on average over all parameters?"
widgets.predict(lab, "states", question, "bytes per parameter", 0, 12)

# %% [markdown]
# ## By hand: the map
#
# The **map** is the list of the 256 values. Which values should it have? Adam's two running averages are called moments: the *first moment* is the average of the gradients, the *second moment* that of their squares. Each number is first divided by the largest one of its tensor, so the values run from 0 to 1 (or, with a sign, from -1 to 1). Second moments within one tensor differ by many powers of ten. Equal steps would place nearly all of the 256 values among the few large moments, and hardly any among the many small ones. The *dynamic* map divides the range from $10^{-7}$ up to 1 into seven *decades*, i.e. factors of ten; each decade has twice as many values as the decade below it. The first moment gets a signed map. The second gets an unsigned map, which has twice the values in each decade.


# %%
def code_book(signed):
    decades = []
    for decade in range(7):
        count = 2**decade if signed else 2 * 2**decade
        within = 0.1 + 0.9 * (torch.arange(count) + 0.5) / count  # middles of equal slices of 0.1 to 1
        decades.append(10.0 ** (decade - 6) * within)
    positive = torch.cat(decades)
    return torch.cat([-positive if signed else positive[:0], torch.tensor([0.0, 1.0]), positive]).sort().values


SIGNED, UNSIGNED = code_book(signed=True), code_book(signed=False)
for book, signed in ((SIGNED, True), (UNSIGNED, False)):
    torch.testing.assert_close(book, bnb.functional.create_dynamic_map(signed=signed), rtol=1e-5, atol=1e-8)
print(f"{len(SIGNED)} and {len(UNSIGNED)} values, as the library has them")

# %% [markdown]
# Does the map suit a real state? We take the second moment of one weight matrix of a small BERT after ten batches, divide it by its largest entry, and count the entries that round to 0. For a second moment 0 is the worst error: the step is *divided* by its root.

# %%
toy = Task("bert-tiny", seq_len=32, data="learnable", dataset_size=160)
model, data = toy.build_model(), toy.batch(160)
weight = model.bert.encoder.layer[0].intermediate.dense.weight
second = torch.zeros_like(weight)
for start in range(0, 160, 16):
    model.zero_grad()
    model(**{name: tensor[start : start + 16] for name, tensor in data.items()}).loss.backward()
    second = 0.999 * second + 0.001 * weight.grad**2
share = (second / second.max()).flatten()
equal_steps = torch.linspace(0, 1, 256)
figure, (above, below) = plt.subplots(2, 1, figsize=(8, 4), sharex=True, height_ratios=[3, 1], layout="constrained")
above.hist(share.log10().numpy(), bins=80, color=plots.SERIES[0])
above.set(ylabel="entries", title="a second moment / its largest entry")
for row, (name, book) in enumerate({"equal steps": equal_steps, "dynamic map": UNSIGNED}.items()):
    below.plot(book[1:].log10(), [row] * 255, "|", color=plots.SERIES[row + 1], markersize=14)
    to_zero = (share < book[1] / 2).float().mean().item()
    print(f"{name}: {to_zero:.1%} of the entries round to 0")
below.set(yticks=[0, 1], yticklabels=["equal steps", "dynamic map"], ylim=(-0.6, 1.6), xlabel="log10 of the value")
plt.show()

# %% [markdown]
# Each tick below the histogram is a value that a byte can represent. An entry becomes the value of the nearest tick, or 0. (0 is one of the 256 values, but has no tick, because the axis is logarithmic.) An entry becomes 0 if it is smaller than half of the smallest tick. The two printed lines say which share of the entries that is. The ticks of the dynamic map begin further to the left than the entries; those of equal steps do not.
#
# ## By hand: the block
#
# So far the scale was the largest entry of the *tensor*. The library cuts a tensor into **blocks** of 256 numbers instead, each with a scale of its own (its largest absolute value, *absmax*). The next cell does this to 4096 numbers: they take one byte each, and each of the 16 scales takes 4 bytes.
#
# Why blocks? The cell after that defines `errors`. It makes one of the numbers an outlier, quantizes all of them in blocks of a given size, and dequantizes them again. It returns the mean error of each *stretch* of 256 consecutive numbers: always 16 stretches, whatever the size of a block. A question then asks what the outlier does; the picture after the question shows the errors.


# %%
def quantize(tensor, book, block=256):
    flat = tensor.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    absmax = blocks.abs().amax(dim=1, keepdim=True)
    middles = (book[1:] + book[:-1]) / 2
    codes = torch.bucketize(blocks / absmax.clamp(min=1e-38), middles)
    return codes.to(torch.uint8), absmax


def dequantize(codes, absmax, book, shape):
    return (book[codes.long()] * absmax).flatten()[: math.prod(shape)].view(shape)


state = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
codes, absmax = quantize(state, SIGNED)
library_codes, library = bnb.functional.quantize_blockwise(state, code=SIGNED, blocksize=256)
same = (codes.flatten() == library_codes.flatten()).float().mean().item()
torch.testing.assert_close(absmax.flatten(), library.absmax)
if same < 0.99:  # a number midway between two values may fall either way
    raise RuntimeError(f"only {same:.1%} of the codes are the library's")
print(f"{same:.2%} of the codes are the library's; {codes.nbytes + absmax.nbytes:,} bytes instead of {state.nbytes:,}")


# %%
def errors(outlier, block):
    """Return the mean error in each of 16 stretches of 256 numbers, with one outlier in the sixth."""
    numbers = state.flatten().clone()
    numbers[1300] *= outlier / numbers[1300].abs()
    back = dequantize(*quantize(numbers, SIGNED, block), SIGNED, numbers.shape)
    return (back - numbers).abs().view(16, 256).mean(dim=1).tolist()


worse = [after > 2 * before for before, after in zip(errors(1, 256), errors(1000, 256))]  # of 16 stretches

# %%
answers = {0: "the 1000, since it is off the map", 1: "the other 255 of its block", 16: "all the others"}
exercises.question(
    lab,
    "outlier",
    "A tensor has 4096 numbers: 4095 are about 1 in size, and one is 1000. The library quantizes them in blocks of 256. "
    "Which numbers does it store much less exactly than it would if the 1000 were about 1, too?",
    {
        answers[0]: "It is the absmax of its block, so it becomes 1.0 times the scale. 1.0 is one "
        "of the 256 values: it comes back as it was.",
        answers[16]: "That would be true with one scale for the tensor. Here 15 of the 16 blocks have scales of their "
        "own, which never saw the outlier.",
        answers[1]: "Divided by 1000, these 255 are near 0.001, where the map has 8 or 16 values for a power "
        "of ten; near 1 it has 64. No other block knows of the outlier.",
    },
    right=answers[sum(worse)],
)

# %%
stretches = range(1, 17)
series = {"one scale for the tensor": errors(1000, 4096), "a scale for each block": errors(1000, 256)}
ax = plots.lines(stretches, series, "stretch of 256 numbers", "mean error", title="4096 numbers, one of them 1000")
ax.set_yscale("log")

# %% [markdown]
# All 4096 numbers come from one distribution, about 1 in size, except for a single one of 1000. This outlier makes the scale large, so all other numbers with the same scale become small, and there the map is coarse. With one scale the whole tensor becomes less exact; with blocks only the block of the outlier does.
#
# ## By hand: the step
#
# `adam8_step` is one optimizer step whose states come and go as bytes: read it line by line. Then three optimizers take 100 steps on the same gradients: `adam8_step`, the library's 8-bit Adam, and exact Adam.


# %%
def adam8_step(weight, gradient, memory, step, rate):
    zero = torch.zeros_like(weight)
    first = dequantize(*memory["first"], SIGNED, weight.shape) if memory else zero
    second = dequantize(*memory["second"], UNSIGNED, weight.shape) if memory else zero
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient**2
    memory["first"], memory["second"] = quantize(first, SIGNED), quantize(second, UNSIGNED)
    return weight - rate * first / (1 - 0.9**step) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)


torch.manual_seed(0)
start = by_hand = torch.zeros(64, 64)
by_library, exact = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
optimizers = [bnb.optim.Adam8bit([by_library], lr=0.01), torch.optim.Adam([exact], lr=0.01)]
memory, trend = {}, torch.randn(64, 64)
for step in range(1, 101):
    gradient = trend + torch.randn(64, 64)
    by_hand = adam8_step(by_hand, gradient, memory, step, rate=0.01)
    for parameter, optimizer in zip((by_library, exact), optimizers):
        parameter.grad = gradient.clone()
        optimizer.step()
way = exact.detach().norm().item()

# %%
exercises.question(
    lab,
    "in-8-bits",
    "In a training with 8-bit Adam, what is in 8 bits?",
    {
        "weights, gradients and states": "That would be training in 8 bits, which is another matter (fp8, on recent "
        "GPUs). This name is about what the optimizer remembers; the next cell prints the dtypes.",
        "the states, from one step to the next": "They are expanded for the update and written back as bytes. `adam8_step` "
        "does just that, in its first and its last lines.",
        "the states, and the arithmetic of the update": "`adam8_step` computes with what `dequantize` returns, numbers "
        "of 32 bits, and rounds the new states only when it writes them back.",
    },
    right="the states, from one step to the next",
)

# %%
off_library, off_exact = ((by_hand - other).norm().item() / way for other in (by_library.detach(), exact.detach()))
print("difference between the weights, in % of the distance that exact Adam moved them:")
print(f"by hand against the library {off_library:.2%}; by hand against exact Adam {off_exact:.2%}")
if off_library > 0.01 or off_exact > 0.05:
    raise RuntimeError("the step by hand has lost its way")
states = optimizers[0].state[by_library]
types = {
    "weight": by_library.dtype,
    "gradient": by_library.grad.dtype,
    "state": states["state1"].dtype,
    "scale": states["absmax1"].dtype,
}
if [name for name, dtype in types.items() if dtype.itemsize == 1] != ["state"]:
    raise RuntimeError("more than the states is in 8 bits: the answer above is wrong")
print(types)

# %% [markdown]
# The name promises more than the optimizer does. For the update, a state is expanded to 32 bits, used, and written back as bytes. One byte is for what the optimizer *remembers*, and for nothing more: weights, gradients, activations and all arithmetic stay what they were.
#
# ## Baseline
#
# We train with the Trainer's default, the fused AdamW (lesson 10), at the micro-batch of this profile.

# %%
common = dict(task=task, per_device_train_batch_size=lab.profile.micro_batch, measure=("memory",))
vanilla = lab.train("AdamW", **common)

# %% [markdown]
# ## Change one thing, in two ways
#
# Today 8-bit Adam is a flag. In 2023 the guide built the optimizer itself, with two groups of parameters: weights with weight decay, biases and norms without. You can still build the optimizer and pass it to the Trainer: the function `grouped` below makes it. (bitsandbytes' `Adam8bit` decays weights as AdamW does, so the update is the same in both ways. The measurement shows what is different.)


# %%
def grouped(model, args):
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    spared = [parameter for parameter in model.parameters() if parameter.ndim < 2]  # biases and norms
    groups = [dict(params=decayed, weight_decay=args.weight_decay), dict(params=spared, weight_decay=0.0)]
    betas = (args.adam_beta1, args.adam_beta2)
    return bnb.optim.Adam8bit(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)


flag = lab.train("8-bit, by the flag", optim="adamw_bnb_8bit", **common)  # new
by_hand = lab.train("8-bit, grouped by hand", optimizer=grouped, **common)  # new
adafactor = lab.train("Adafactor", optim="adafactor", **common)  # of lesson 08, to compare with

decay_names = set(Trainer.get_decay_parameter_names(None, meta))
print("the Trainer groups as `grouped` does:", decay_names == {n for n, p in meta.named_parameters() if p.ndim >= 2})
widgets.revealed(lab, "states", flag.memory.breakdown["optimizer_states"] / parameters)

# %% [markdown]
# So the flag groups parameters as the guide did. Do both ways keep the same bytes of states? Two rules decide:
#
# - The *library* leaves tensors of fewer than 4096 numbers in 32 bits: there is little to save, and norms and biases are few and sensitive.
# - The *Trainer*, behind the flag, requests 32 bits for every embedding. Most rows of an embedding get no gradient in most steps and a large one in some, and 8-bit embeddings made pretraining unstable ([the discussion](https://github.com/huggingface/transformers/issues/14819)).
#
# The next cell counts the bytes by these rules, then compares the count with the measurement.

# %%
account = {"embeddings": [], "fewer than 4096": [], "all others": []}
for parameter in meta.parameters():
    small = "fewer than 4096" if parameter.numel() < 4096 else "all others"
    account["embeddings" if id(parameter) in embeddings else small].append(parameter.numel())


def state_bytes(sizes, bits):
    return sum(8 * n if bits == 32 or n < 4096 else 2 * n + 2 * 4 * math.ceil(n / 256) for n in sizes)


rows, counted = [], [0, 0]
for kind, sizes in account.items():
    expected = [state_bytes(sizes, 32 if kind == "embeddings" else 8), state_bytes(sizes, 8)]
    counted = [total + size for total, size in zip(counted, expected)]
    rows.append([kind, len(sizes), f"{sum(sizes):,}", *(size / sum(sizes) for size in expected)])
rows.append(["all", "", f"{parameters:,}", *(total / parameters for total in counted)])
measured = [run.memory.breakdown["optimizer_states"] for run in (flag, by_hand)]
torch.testing.assert_close(measured, counted, rtol=0.01, atol=0)
print("flag, by hand: counted", *map(plots.bytes_text, counted), "- measured:", *map(plots.bytes_text, measured))
plots.Table(["tensors", "how many", "parameters", "flag: bytes/parameter", "by hand: bytes/parameter"], rows)

# %% [markdown]
# The guide says "2 bytes a parameter if all states are quantized". The column *by hand* is a little more than 2, because it includes the scales and the small tensors. The larger the share of embeddings, the further the flag is from 2. In a small model with a long vocabulary, embeddings can be half of all parameters.
#
# ## States are not the peak
#
# The first picture shows the peaks. The second one shows all operations of a training step: with AdamW and, below it, with the flag. In the table, *highest in the step* means the last phase of the training step only: the optimizer's step.

# %%
_ = plots.memory([vanilla, flag, by_hand, adafactor])
figure, axes = plt.subplots(2, 1, figsize=(8, 6.4), layout="constrained")
for ax, run in zip(axes, (vanilla, flag)):
    plots.timeline(run, ax)


def highest(run, phase):
    """Return the bytes at the highest moment of a phase, at least those that are live at its end."""
    series = run.memory.timeline
    moments = [i for i, name in enumerate(series["phase"]) if name == phase]
    return max([run.memory.phases[phase], *(sum(series[kind][i] for kind in run.memory.breakdown) for i in moments)])


quantized = sum(account["all others"])
saved, adafactors = (vanilla.peak_bytes - run.peak_bytes for run in (flag, adafactor))
print(f"the flag's peak is lower by {plots.bytes_text(saved)}, Adafactor's by {plots.bytes_text(adafactors)}")
print(f"that is {saved / quantized:.2f} bytes for each quantized parameter")
names = ["states", "highest in backward", "highest in the step", "peak is in"]
rows = []
for run in (vanilla, flag, by_hand, adafactor):
    sizes = [run.memory.breakdown["optimizer_states"], highest(run, "backward"), highest(run, "step")]
    rows.append([run.name, *map(plots.bytes_text, sizes), run.memory.peak_phase])
plots.Table(["run", *names], rows)

# %% [markdown]
# States are in memory all the time, so saving them lowers the peak in any phase. If the peak is in the backward pass, the flag lowers it by nearly 6 bytes per quantized parameter (8 bytes become a little more than 2); Adafactor lowers it by nearly 8 per parameter, embeddings included.
#
# In the optimizer's step the peak also depends on the backend, bitsandbytes' code for your device. Its [CPU backend](https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1901) works on whole tensors: states expanded to 32 bits, copies of gradient and weight, intermediate results. The second picture shows these bytes in grey, as *operator workspace*; the largest tensor decides their height. Compare the last two columns of bytes in the table: as long as *highest in the step* is below *highest in backward*, the intermediate results cost nothing. Exercise 1 asks what a small batch changes.
#
# > **On a GPU:** one CUDA kernel expands a state in registers, a few numbers at a time, so the update needs no memory of its own.
#
# ## Does it learn as well?
#
# The task is the look-up of lesson 08: name each token's class, for a thousand rare tokens. This is a hard test for the states of embeddings. Here even these states are in 8 bits: the loop makes bitsandbytes' optimizer itself, so the Trainer's rule for embeddings does not apply. Both optimizers try the same four learning rates on one seed. Then both train with AdamW's best rate on five other seeds.

# %%
classes = dict(hidden_size=64, num_hidden_layers=1, intermediate_size=256, vocab_size=1000, num_labels=8)
look_up = Task("bert-tiny", 16, dataset_size=30 * 16, architecture="BertForTokenClassification", config=classes)


def learn(task, make, seed, batch=16):
    """Return the losses of a training with the optimizer `make(parameters)`, and its states' bytes per parameter."""
    torch.set_num_threads(1)  # tensors this small gain nothing from more
    task, steps = task.replace(seed=seed), task.dataset_size // batch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, data = task.build_model().to(device), task.batch(task.dataset_size, device)
    optimizer = make(model.parameters())
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    losses = []
    for start in range(0, task.dataset_size, batch):
        loss = model(**{key: tensor[start : start + batch] for key, tensor in data.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
        losses.append(loss.detach())
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    unique = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.ndim}  # a map is shared: count it once
    return [float(loss) for loss in losses], sum(unique.values()) / sum(p.numel() for p in model.parameters())


# %%
RATES = [0.004, 0.008, 0.016, 0.032]


def final(losses):
    return statistics.mean(losses[-5:])


def contest(task):
    makers = {
        "AdamW": lambda rate: lambda given: torch.optim.AdamW(given, lr=rate, weight_decay=0, fused=True),
        "8-bit": lambda rate: lambda given: bnb.optim.AdamW8bit(given, lr=rate, weight_decay=0),
    }
    trials = {name: [learn(task, make(rate), 0)[0] for rate in RATES] for name, make in makers.items()}
    rate = min(RATES, key=lambda rate: final(trials["AdamW"][RATES.index(rate)]))
    judged = {name: [learn(task, make(rate), seed)[0] for seed in range(1, 6)] for name, make in makers.items()}
    return {"trials": trials, "rate": rate, "judged": judged}


found = lab.run(contest, task=look_up, measure="value").value

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
ends = {name: [final(losses) for losses in trials] for name, trials in found["trials"].items()}
plots.lines(RATES, ends, "learning rate", "final loss", left, "four rates, one seed")
left.set_xscale("log", base=2)
left.set_xticks(RATES, RATES)
plots.losses(found["judged"], right, f"both at {found['rate']}, five seeds")
for ax in (left, right):
    ax.set_yscale("log")
finals = {name: [final(losses) for losses in runs] for name, runs in found["judged"].items()}
pairs = [b / a for a, b in zip(finals["AdamW"], finals["8-bit"])]
ratio = Ratio(statistics.median(pairs), min(pairs), max(pairs), tuple(pairs))
print(f"final loss of 8-bit / AdamW, seed by seed: median and range {ratio}")
print(f"AdamW alone, from seed to seed: {min(finals['AdamW']):.3f} to {max(finals['AdamW']):.3f}")

# %% [markdown]
# In the left picture, one curve should cover the other: 8-bit Adam needs Adam's learning rate, unlike Adafactor. (At a rate so high that the model does not learn, the curves may part.) In the right picture a line is the median of the five seeds, and the shaded area is their range. Compare the two printed lines: how far is the ratio from 1, and how much does AdamW's own loss differ from seed to seed?
#
# ## What held

# %% tags=["claim"]
note = f"{plots.bytes_text(saved)} against {plots.bytes_text(adafactors)}"
display(claims.check("adam8bit-memory", saved / adafactors, note=note))
comparison = lab.compare(vanilla, flag) if cuda else None  # the claim is about CUDA's kernels
display(claims.check("adam8bit-cost", comparison and comparison.speed_ratio))
claims.check("adam8bit-convergence", ratio)


# %% [markdown]
# ## Explore
#
# Change the size of the outlier and the size of a block. Small blocks confine the damage, and need more scales: 4 bytes each.


# %% tags=["widget"]
def draw(block, outlier):
    title = f"outlier {outlier}, blocks of {block}: {1 + 4 / block:.3f} bytes per number"
    ax = plots.lines(stretches, {"error": errors(outlier, block)}, "stretch of 256 numbers", "mean error", title=title)
    ax.set(yscale="log", ylim=(3e-3, 0.3))
    return ax


_ = widgets.explore(draw, block=[256, 64, 1024, 4096], outlier=[1000, 1, 10, 100])

# %% [markdown]
# ## Exercise 1: the small batch
#
# A step trains one sequence of 32 tokens, so hardly any activations are left. What is the flag's peak divided by AdamW's? Answer to within 10 %. Everything that you need has been printed.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Weights and states do not depend on the batch, activations do. Without them, is the peak still in backward?",
    "The table under 'States are not the peak' has a column for the step's highest moment. The update works on whole tensors "
    "and does not know how long the sequences were.",
    "The flag's highest moment in the step, divided by AdamW's.",
)

# %% tags=["exercise"]
answer = None  # a number


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    options = dict(task=task.replace(seq_len=32, dataset_size=8), per_device_train_batch_size=1, measure="peak")
    if not small_peaks:
        small_peaks.append(lab.train("AdamW, 1 x 32", **options).peak_bytes)
        small_peaks.append(lab.train("8-bit, 1 x 32", optim="adamw_bnb_8bit", **options).peak_bytes)
    measured = small_peaks[1] / small_peaks[0]
    if abs(answer / measured - 1) < 0.1:
        return exercises.right(f"{measured:.2f}, from {' and '.join(map(plots.bytes_text, small_peaks))}")
    return exercises.wrong(
        "which phase holds the peak without activations? See the table under 'States are not the peak'"
    )


small_peaks = []
exercises.check(lab, "small-batch", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(
    check,
    solution=highest(flag, "step") / highest(vanilla, "step"),
    mistake=measured[0] / vanilla.memory.breakdown["optimizer_states"],  # the states alone
)

# %% [markdown]
# ## Exercise 2: the challenge
#
# Keep as few bytes of states per parameter as you can, without a worse loss. Your answer is a function that takes the model's parameters and returns an optimizer. It is tried on the look-up task. Two limits apply. The optimizer's states may take **2.5** bytes per parameter at most. The final loss, the median of three seeds, may be up to a tenth higher than AdamW's highest final loss of the five seeds above. The cell below the hints prints this second limit. If your answer is right, try to find one with still fewer bytes.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "The embeddings are most of this model, and the Trainer's flag spares them. Which optimizer above did not?",
    "bitsandbytes' classes spare small tensors only: `bnb.optim.AdamW8bit(parameters, lr=..., weight_decay=0)`.",
    "Use AdamW's own rate, which is printed below. To go lower still: bitsandbytes has 8-bit optimizers that keep one "
    "state instead of two. They need rates of their own.",
)

# %% tags=["exercise"]
band = 1.1 * max(finals["AdamW"])
print(f"final loss: at most {band:.3f}; AdamW's rate was {found['rate']}")
answer = None  # lambda parameters: ...


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    run = lab.run(
        lambda task: [learn(task, answer, seed) for seed in (1, 2, 3)], "challenge", task=look_up, measure="value"
    )
    if not run.ok:
        return exercises.run_failed(run)
    loss, size = statistics.median(final(losses) for losses, _ in run.value), run.value[0][1]
    figures = f"{size:.2f} bytes per parameter, final loss {loss:.3f}"
    if loss > band:
        return exercises.wrong(f"{figures}: the loss is above {band:.3f}")
    if size > 2.5:
        return exercises.wrong(f"{figures}: it learns, but it keeps too much")
    return exercises.right(figures)


exercises.check(lab, "fewest-bytes", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(
    check,
    solution=lambda parameters: bnb.optim.AdamW8bit(parameters, lr=found["rate"], weight_decay=0),
    mistake=lambda parameters: torch.optim.SGD(parameters, lr=0.1),  # keeps nothing, and learns accordingly
)

# %% [markdown]
# ## Recap
#
# The numbers are those of a recorded run (AMD EPYC, 2 cores, 2026-11-29); yours are in the cells above.
#
# - **256 values and one scale per block store a state closely enough for Adam.** The final loss was 1.02 times that of AdamW. An outlier spoils its own block of 256 numbers and no other.
# - **Some tensors stay in 32 bits**: those of fewer than 4096 numbers by the library's rule, embeddings by the Trainer's. The optimizer built by hand quantized embeddings too, and kept fewer bytes than the flag.
# - **Saved states lower the peak if it is in the backward pass**: the flag saved 0.68 times as many bytes at the peak as Adafactor. If the peak is in the optimizer's step, the saving depends on the backend.
#
# 8-bit Adam saves little if activations are most of the peak. On a CPU, if the peak is in the optimizer's step, the peak falls by fewer bytes than the states do (exercise 1). 8-bit Adam is the right tool if AdamW's recipe must stay as it is.

# %% tags=["finish"]
claims.finish()
