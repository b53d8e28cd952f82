# %% [markdown]
# # What should the money buy?
#
# You have a budget and a deadline for a trained model, and three offers for cards by the hour. The data sheets name arithmetic, bandwidth and memory; the offers name prices. Which one do you rent, and is it the right one for serving the model too?
#
# **Time:** about 35 minutes; the cells compute for about 30 to 45 s. **Before it:** lesson 02 (two ceilings), lesson 11 (compiling) and lesson 20 (inference). **On a CPU:** costs, compilers and installations are measured or computed. Heat and power need a GPU.
#
# **You will see**
# - how to compute the cost of a million tokens on this machine from a price that you type, and why two cards have more than one break-even price
# - what a driver reports about heat and power, and what an installation by pip can and cannot build
# - how often a compiler for fixed shapes must compile again, and what padding does about it

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from IPython.display import display

from perf_helpers import Claims, Lab, Task, cards, exercises, hardware, plots, roofline, widgets
from perf_helpers.advise import advise
from trainmem.estimate import estimate

lab = Lab(profile, strict=strict, out=out, lesson="24_hardware")
claims = Claims(lab)
on_gpu = lab.machine.kind == "cuda" and not lab.machine.rehearsed  # rehearsed: a dry run on a stub CUDA runtime
logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it warns of limits that we reach on purpose

# %% [markdown]
# ## Idea
#
# Lesson 02 found two ceilings of a device: how many operations it can compute per second, and how many bytes it can move per second. A step cannot be faster than the slower of the two allows. Divide a price by the speed, and a ceiling becomes money:
#
# **price of a million tokens = price per hour / (tokens per second x 3600) x 1,000,000**
#
# Memory is the third number of a card. It decides whether a training runs at all.
#
# ## Predict
#
# Part of this lesson is about compilers, because a TPU (Google's accelerator) runs only compiled programs. A model receives texts of every length from 1 to 64.

# %%
question = "How many times does `torch.compile`, with its defaults, compile the model?"
widgets.predict(lab, "graphs", question, "times", 0, 64)

# %% [markdown]
# ## By hand: a million tokens on this machine
#
# We measure the tokens per second of a training here. You type the price: what an hour of this machine costs you, electricity included. Without your price the lesson cannot say anything about money.

# %%
price_an_hour = 1.00  # yours, in your currency


def price_of_million(price_an_hour, tokens_per_second):
    return price_an_hour / (tokens_per_second * 3600) * 1e6


run = lab.train("training", measure=("time",), per_device_train_batch_size=lab.profile.micro_batch)
speed = run.samples_per_second
tokens_per_second = speed * lab.task.length() if plots.is_measured(speed) else None
if plots.is_measured(tokens_per_second):
    million = price_of_million(price_an_hour, tokens_per_second)
    print(
        f"{lab.task.model}, {lab.task.length()} tokens per sequence: {tokens_per_second:,.0f} tokens/s, "
        f"{million:.2f} per million at {price_an_hour:.2f} per hour"
    )
else:
    print(run.failure or "no speed was measured here")

# %% [markdown]
# ## How much of the ceiling is that?
#
# Take the matmul FLOPs that the training needs per second, and divide them by the rate of one large matmul on this machine, in fp32. This share is the *utilization* of lesson 02. It connects a data sheet with your bill.


# %%
def ceiling(_):
    return roofline.ceilings("float32").flops_per_second


found = lab.run(ceiling, "ceiling", measure=("none",))
needed = roofline.model_flops(lab.task, 1)  # of a step with one sample
used = None
if found.ok and plots.is_measured(speed):
    used = needed * speed / found.value
    print(
        f"{needed / 1e9:.3g} GFLOP per sample, {found.value / 1e9:.3g} GFLOP/s at most: {used:.0%} of that rate is used"
    )
else:
    print(f"utilization is not known here: {found.failure or 'no speed was measured'}")

# %%
answers = [
    "the card with the lower price per hour",
    "the card with the higher peak TFLOP/s",
    "neither number decides it",
]
exercises.question(
    lab,
    "cheaper",
    "Two cards hold your training. Which one makes it cheaper?",
    {
        answers[0]: "A card at a third of the price that takes four times as long costs more in the end.",
        answers[1]: "Its price may be higher by more than its speed. And the peak may be with sparsity, or in 8 bits.",
        answers[2]: "A card is not better value in general: it depends on the kind of work. Compare the "
        "ratio of the prices with the ratio of the speeds, for this work, at the share of the "
        "ceiling that you reach on each card.",
    },
    right=answers[2],
)

# %% [markdown]
# ## Two cards, two ceilings
#
# Data sheets name the ceilings: matmul rates in 16 bits, and bytes per second. Take the number **without sparsity**. The number in large print is often the one with sparsity, twice as high. It applies if half of the weights are zero, which is not so in a training.
#
# - Training computes 6 FLOPs per parameter and token (forward and backward), in large matmuls. Arithmetic decides its speed.
# - Answering one question reads all weights for each token, 2 bytes per parameter in 16 bits. Bandwidth decides its speed. A batch of answers shares that reading.
#
# A card's **break-even price** is the price per hour at which it costs as much per token as another card, here an A100. If one card is three times as fast as an A100, its break-even price is three times the A100's price. The last three columns of the table have it for three kinds of work, as a multiple of the A100's price. (The code computes with a model of 1e9 parameters. Other sizes give the same ratios.)


# %%
class Card(NamedTuple):
    tflops: float  # of matmuls in 16 bits, dense
    gigabytes_per_second: float

    def tokens_per_second(self, parameters, batch=None):
        """Return the most that the ceilings allow in a training, or with `batch` answers at once."""
        if batch is None:
            return self.tflops * 1e12 / (6 * parameters)
        seconds = max(2 * parameters * batch / self.tflops / 1e12, 2 * parameters / self.gigabytes_per_second / 1e9)
        return batch / seconds


sheet = {"T4": Card(65, 320), "A100 40 GiB": Card(312, 1555), "H100 SXM": Card(989, 3350)}
rows = []
for name, card in sheet.items():
    a100 = sheet["A100 40 GiB"]
    ratios = [card.tokens_per_second(1e9, batch) / a100.tokens_per_second(1e9, batch) for batch in (None, 1, 1024)]
    rows.append([name, card.tflops, card.gigabytes_per_second, *(f"{ratio:.2f} x" for ratio in ratios)])
heads = ["card", "TFLOP/s", "GB/s", "training", "one answer", "1024 answers at once"]
plots.Table(heads, rows, "Break-even price as a multiple of the price of an A100, by the ceilings")

# %% [markdown]
# If an H100 costs less than 3.17 times the price of an A100, it trains a token for less money. But for single answers it must cost less than 2.15 times as much.

# %%
batches = [2**power for power in range(11)]
pairs = {"H100 SXM over A100": ("H100 SXM", "A100 40 GiB"), "A100 over T4": ("A100 40 GiB", "T4")}
lines = {}
for name, (one, other) in pairs.items():
    at = [sheet[one].tokens_per_second(1e9, size) / sheet[other].tokens_per_second(1e9, size) for size in batches]
    lines[name] = at
ax = plots.lines(batches, lines, "answers at once", "break-even price ratio", title="From bandwidth to arithmetic")
ax.set_xscale("log", base=2)

# %% [markdown]
# Read the line of the H100 over the A100. With few answers at once, the break-even price ratio is the ratio of the bandwidths; with hundreds, it is the ratio of the matmul rates. The T4 and the A100 have nearly the same balance of the two, so their line is flat. (The keys and values of lesson 20 must be read too. They are left out here.)

# %% [markdown]
# ## Heat and power
#
# The older of the two guides, of 2022, recommends cooling, and names temperatures. **NVML**, the driver's own library (behind `nvidia-smi`), reports your card's temperatures. There are three thresholds:
#
# - *operating*: from here on the card may go below its base clock, the frequency that its data sheet promises
# - *slowdown*: the hardware slows the card down (it *throttles*)
# - *shutdown*: the card switches off.
#
# Older cards report these thresholds as temperatures, but not always all three. Newer cards report a *margin*: how many degrees are left until the card first slows down. The hotter the card, the smaller its margin. These cards report the three thresholds as margins, too. A shutdown threshold of -8, for example, means that the card switches off when its margin has fallen to -8: 8 degrees hotter than at a margin of 0.


# %%
def thermal_limits(ask, handle):
    """Return a GPU's thresholds in degrees, or as margins (lower is hotter), and its power limit in watts."""
    known = {}
    for name, threshold, field in (("shutdown", 0, 193), ("slowdown", 1, 194), ("operating", 3, 196)):  # NVML's numbers
        known[name] = ask("nvmlDeviceGetTemperatureThreshold", handle, threshold) or None
        for value in ask("nvmlDeviceGetFieldValues", handle, [field]) or []:
            known[f"{name} margin"] = value.value.siVal if value.nvmlReturn == 0 else None
    limit = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    return known | {"margin now": ask("nvmlDeviceGetMarginTemperature", handle), "watts": limit and limit / 1000}


def above_slowdown(known):
    """Return by how many degrees shutdown is above slowdown; None if the driver reports neither."""
    for above, name in ((1, "{}"), (-1, "{} margin")):
        both = [known.get(name.format(threshold)) for threshold in ("shutdown", "slowdown")]
        if None not in both:
            return above * (both[0] - both[1])
    return None


with hardware.nvml() as (ask, reason):
    handle = ask("nvmlDeviceGetHandleByUUID", lab.machine.gpus[0].uuid) if on_gpu else None
    known = thermal_limits(ask, handle) if handle else {}
print(known or f"no thermometer here: {reason or 'this machine shows no GPU'}")

# %% [markdown]
# Watch the *reasons* that the driver gives for lower clocks, not only the temperature. A power limit is also a reason, and it is normal on most cards under load.
#
# > **On a GPU:** the next cell heats the card for twenty seconds and records reasons and speed.

# %%
THERMAL = 0x20 | 0x40  # the bits of NVML's reasons that mean heat: slowed down by the driver, or by the card itself


def heated(seconds, uuid, _):
    left, right = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.float16)
    rows, start = [], time.perf_counter()
    with hardware.nvml() as (ask, _):
        handle = ask("nvmlDeviceGetHandleByUUID", uuid)
        while time.perf_counter() - start < seconds:
            batch_start = time.perf_counter()
            for _ in range(40):
                left @ right
            torch.cuda.synchronize()
            rate = 40 * 2 * 8192**3 / (time.perf_counter() - batch_start)
            reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
            degrees, clock = ask("nvmlDeviceGetTemperature", handle, 0), ask("nvmlDeviceGetClockInfo", handle, 1)  # SMs
            rows.append([time.perf_counter() - start, rate, degrees, clock, reasons])
    return rows


# %%
def throttling(rows):
    """Return speeds under a thermal slowdown relative to the usual one, from rows (.., rate, .., reasons); or why not."""
    known = [row for row in rows if row[-1] is not None]
    hot = [row[1] for row in known if row[-1] & THERMAL]
    cool = [row[1] for row in known if not row[-1] & THERMAL]
    if len(hot) < 3 or not cool:  # an interval needs three
        few = f"the driver reported a slowdown for heat in {len(hot)} of {len(known)} readings"
        return None, few if known else "the driver reports no reasons for its clocks"
    return [rate / median(cool) for rate in hot], None


hot, not_hot = None, "needs a GPU to heat"
if on_gpu:
    seconds, uuid = lab.sized(20, 1), lab.machine.gpus[0].uuid
    load = lab.run(lambda task: heated(seconds, uuid, task), "load", measure=("none",))
    hot, not_hot = throttling(load.value) if load.ok else (None, load.failure)
    for row in (load.value or [])[:: max(1, len(load.value or []) // 8)]:
        print("{:.0f} s: {:.3g} FLOP/s, {} °C, {} MHz, reasons {}".format(*row))
print(not_hot or f"{len(hot)} readings under a slowdown")

# %% [markdown]
# If your card does slow down: clean it, give it air, or lower its power limit (`nvidia-smi -pl`). A "GPU-Util" of 100 % in `nvidia-smi` does not show this: a card that was slowed down is busy too.
#
# ## What pip installs, and what it cannot build
#
# The guides say that pip's torch brings enough of CUDA to run, but not enough to build extensions. An extension needs **nvcc**, NVIDIA's compiler. torch looks for it in three places (`_find_cuda_home` in `torch/utils/cpp_extension.py`): the variable `CUDA_HOME`, the search path, and `/usr/local/cuda`. A fresh subprocess calls that search with this machine's own toolkit hidden. NVIDIA also offers its compiler as a package for pip, `nvidia-cuda-nvcc`. The lesson does not install it, but puts an empty file `nvcc` into the folder in which this package has its `nvcc`. Does torch find it there?

# %%
SEARCH = """
import json, os, sys
exists = os.path.exists
os.path.exists = lambda path: not str(path).startswith("/usr/local/cuda") and exists(path)
import torch
torch.cuda.is_available = lambda: True  # it only decides about a warning
from torch.utils import cpp_extension as build
def ready():
    build.CUDA_HOME = home = build._find_cuda_home()
    try:
        build.CUDAExtension("x", ["x.cu"])
    except OSError as error:
        return [False, str(error)]
    return [exists(os.path.join(home, "bin", "nvcc")), home]
found = {"pip's torch": ready()}
sys.path.insert(0, sys.argv[1])
found["beside nvidia-cuda-nvcc"] = ready()
os.environ["CUDA_HOME"] = os.path.join(sys.argv[1], "nvidia", "cu13")
found["and CUDA_HOME"] = ready()
print(json.dumps(found))
"""


# %%
def searched():
    """Return whether torch can build a CUDA extension with no program on the path, and what it found."""
    hidden = ("CUDA_HOME", "CUDA_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    with tempfile.TemporaryDirectory() as folder:
        environment["PATH"] = folder
        compiler = Path(folder, "nvidia", "cu13", "bin", "nvcc")
        compiler.parent.mkdir(parents=True)
        compiler.touch(mode=0o755)
        command = [sys.executable, "-c", SEARCH, folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


brings = [
    line.split(";")[0] for line in importlib.metadata.requires("torch") or [] if "cuda" in line or "nvidia" in line
]
print("torch", torch.__version__, "requires", ", ".join(brings) or "nothing of CUDA: it is the CPU build")
ready = searched()
searches = ready if isinstance(ready, dict) else {"the search failed": [False, ready]}
names = dict(zip(searches, ["pip's torch", "pip's torch and nvidia-cuda-nvcc", "both, with CUDA_HOME set"]))
names = names if isinstance(ready, dict) else {"the search failed": "the search failed"}
rows = [[names[name], *row] for name, row in searches.items()]
plots.Table(["what is installed or set", "ready to build", "compiler found, or why not"], rows)

# %% [markdown]
# torch does not even find the compiler that pip installed, unless `CUDA_HOME` names its folder ([pytorch PR 197483](https://github.com/pytorch/pytorch/pull/197483), open, would look there). And that is not enough. With torch 2.13.0+cu130, `nvidia-cuda-nvcc` 13.0.88 and `CUDA_HOME` set we built a small extension (2026-11-25). It compiled, but then the linker said `cannot find -lcudart`: pip's package holds `libcudart.so.13`, and the linker looks for `libcudart.so`. After we had added a symbolic link of that name, the extension was built and imported. Others had the same error ([flashinfer issue 5064](https://github.com/flashinfer-ai/flashinfer/issues/5064)).
#
# The ways out, the easiest first:
#
# 1. a wheel (pip's kind of package) of the extension, already built
# 2. NVIDIA's **NGC images**: container images that bring everything (their release notes name the driver that they need)
# 3. NVIDIA's toolkit, in the CUDA version that torch was built with
# 4. the compiler from pip, with `CUDA_HOME` set and that symbolic link.
#
# The guides also name PyTorch's conda builds, which contained the toolkit. PyTorch 2.5 was the last release with such builds.
#
# ## Shapes that stay
#
# Besides GPUs, transformers' documentation offers Google's TPUs, with TensorFlow and its compiler XLA. transformers 5 has no TensorFlow. But one rule of the documentation's page on TPUs is useful without TensorFlow, too: XLA compiles for **fixed shapes**, so a model is compiled again for every length that it receives. `torch.compile` with `dynamic=False` does the same. We count the compilations: each one makes one *graph*, a compiled version of the model. The model here is one matmul with an activation function. By default torch limits the graphs of a function, so the first two rows of the table raise this limit, and the third keeps it.

# %%
weight = torch.randn(8, 8)


def network(x):
    return torch.nn.functional.gelu(x @ weight)


def graphs(lengths, limit=None, **options):
    """Return how many graphs torch.compile makes of the network for inputs of these lengths."""
    made = []

    def backend(graph, _):
        made.append(graph)
        return graph.forward  # unchanged, so that only capturing takes time

    torch._dynamo.reset()  # what was compiled before is forgotten
    with torch._dynamo.config.patch(recompile_limit=limit or torch._dynamo.config.recompile_limit):
        compiled = torch.compile(network, backend=backend, **options)
        for length in lengths:
            compiled(torch.zeros(1, length, 8))
    return len(made)


# %%
lengths = range(1, lab.sized(65, 9))
to_32 = [-(-length // 32) * 32 for length in lengths]
fixed = {"each length": graphs(lengths, 65, dynamic=False), "padded to 32": graphs(to_32, 65, dynamic=False)}
limited, default = graphs(lengths, dynamic=False), graphs(lengths)
rows = [["fixed shapes, each length", fixed["each length"]], ["fixed shapes, padded to 32", fixed["padded to 32"]]]
rows += [["fixed shapes, each length, torch's own limit", limited], ["torch.compile with its defaults", default]]
display(plots.Table(["what", "graphs"], rows, f"{len(lengths)} lengths"))
print(f"padding to 32 makes {sum(to_32) / sum(lengths) - 1:.0%} more tokens here")
widgets.revealed(lab, "graphs", default)

# %% [markdown]
# With fixed shapes every length costs a compilation. Padding leaves two shapes, but the model also computes on the padding, which is a large share of short texts. `torch.compile` with its defaults needs neither: when a size has changed once, it compiles a second time with that size left open (automatic dynamic shapes, since torch 2.1).
#
# Look at the third row too. After eight graphs torch stops compiling that function and continues uncompiled, with one warning (hidden here). "It is compiled" may be true only for the first eight lengths.
#
# ## What held
#
# ### Heat

# %% tags=["claim"]
degrees = known.get("slowdown")
margin = "" if known.get("margin now") is None else f"only a margin: {known['margin now']} degrees"
lower = known.get("operating")
note = f"from {lower} °C on the card may go below its base clock" if lower else ""
silent = None if degrees else margin or "the driver reports no temperature"
display(claims.check("cooling", degrees, missing=silent, note=note))
above = above_slowdown(known)
display(
    claims.check(
        "shutdown-temperature", above, missing=None if above is not None else "the driver reports no thresholds"
    )
)
claims.check("throttled", lab.ratio(hot) if hot else None, missing=not_hot)

# %% [markdown]
# ### Installations and shapes

# %% tags=["claim"]
count = int(ready["pip's torch"][0]) if isinstance(ready, dict) else None
note = "" if brings else "torch's search in the CPU's build, whose files are the same"
claims.check("wheels-build-nothing", count, note=note, missing=None if isinstance(ready, dict) else ready)

# %% tags=["claim"]
uncompiled = None if default else "torch.compile makes no graphs here"
shares = [made / len(lengths) if made else None for made in (fixed["each length"], default)]
display(claims.check("shapes-recompile", shares[0], note="torch.compile(dynamic=False)", missing=uncompiled))
note = f"{default} of {len(lengths)}"
display(claims.check("shapes-recompile-default", shares[1], note=note, missing=uncompiled))
padded = None if uncompiled else fixed["padded to 32"] / fixed["each length"]
claims.check("pad-to-multiple", padded, missing=uncompiled)

# %% [markdown]
# ## What cannot be measured here
#
# Sockets, prices and discontinued products cannot be measured. The course lists the guides' statements about them all the same, so that none is forgotten. (A *pigtail* is a cable with two plugs. In the boxes, *2022 index* and *2024 index* are the documentation's overviews of performance in these years.) Replace the right side of `prices` in the next cell by your prices per hour, and the ceilings tell you which card trains a token for the least money. (The dict in its comment shows the form.) But a data sheet's ceiling is not your utilization.

# %% tags=["claim"]
prices = dict.fromkeys(sheet)  # {"T4": 0.35, "A100 40 GiB": ..., "H100 SXM": ...}, yours
bill = {name: price_of_million(price, sheet[name].tokens_per_second(1e9)) for name, price in prices.items() if price}
note = f"at your prices, by the ceilings: {min(bill, key=bill.get)}" if len(bill) > 1 else "type your prices"
for id in ("cost-a-token", "gpu-choice", "power-sockets", "prebuilt-images", "conda-builds"):
    display(claims.check(id, note=note if id == "cost-a-token" else ""))
for id in ("tpu-tensorflow", "xla-tensorflow", "specialized-hardware"):
    display(claims.check(id))

# %% [markdown]
# ## Explore
#
# `price` is the price of an H100 as a multiple of the price of an A100. `used` is the utilization on the H100, in percent of that on the A100. For example, at 75 a program that uses 40 % of the A100's ceiling uses 30 % of the H100's. (A faster card is harder to keep busy.) Where the curve is below 100 % of the A100's price per token, the H100 is the cheaper card.


# %% tags=["widget"]
def draw(price, used):
    h100, a100 = sheet["H100 SXM"], sheet["A100 40 GiB"]
    bills = []
    for size in (None, *batches):
        faster = h100.tokens_per_second(1e9, size) / a100.tokens_per_second(1e9, size) * used / 100
        bills.append(100 * price / faster)
    title = f"H100 at {price} times the price, {used} % of the utilization: a training costs {bills[0]:.0f} %"
    lines = {"answers": bills[1:], "same price": [100] * len(batches)}
    ax = plots.lines(batches, lines, "answers at once", "price per token, % of the A100's", title=title)
    ax.set_xscale("log", base=2)
    return ax


_ = widgets.explore(draw, price=[2, 1.5, 2.5, 3, 4], used=[100, 90, 75, 50])

# %% [markdown]
# ## Exercise 1: the cheapest card that makes it in a day
#
# You have three offers with made-up figures. Solve the exercise with these figures, then try your own. Your model must train on five million samples within 24 hours, at an effective batch of 16 and with the recipe below. Which offer is the cheapest **in total**? Its card must have enough memory for the training, too. The cell below your answer defines `hours(offer)` and `fits(offer)`. `fits` counts the CUDA context, too, and keeps a margin.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Memory first: lab.foresee(estimate, my_task, device='cuda', compute_capability=(8, 0), **recipe).peak_bytes.",
    "Hours: samples x roofline.model_flops(my_task, 1) / (ceiling x share) / 3600.",
    "Then hours x price per hour. The highest price per hour need not be the highest bill.",
)

# %%
my_task = Task("gpt2-medium", seq_len=256)
samples, share = 5_000_000, 0.3  # the share of the ceiling that you expect to use
recipe = dict(per_device_train_batch_size=4, gradient_accumulation_steps=4, bf16=True)


class Offer(NamedTuple):
    tflops: float
    gibibytes: int
    price_an_hour: float


offers = {"small": Offer(60, 8, 0.20), "middle": Offer(125, 24, 1.00), "large": Offer(989, 80, 3.00)}

# %% tags=["exercise"]
answer = None  # "small", "middle" or "large"


# %%
on_card = dict(device="cuda", compute_capability=(8, 0))
estimated = lab.foresee(estimate, my_task, **on_card, **recipe)
flops = lab.foresee(roofline.model_flops, my_task, 1)


def hours(offer):
    return samples * flops / (offer.tflops * 1e12 * share) / 3600


def fits(offer):
    return estimated.peak_bytes + cards.CONTEXT_BYTES <= (1 - cards.MARGIN) * offer.gibibytes * 2**30


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if answer not in offers:
        return exercises.wrong(f"no offer is called {answer!r}; there are: {', '.join(offers)}")
    if estimated is None or flops is None:
        return exercises.not_measured("there is no estimate here")
    offer, need = offers[answer], plots.bytes_text(estimated.peak_bytes)
    if not fits(offer):
        return exercises.wrong(
            f"{need} of tensors and the context do not fit into {offer.gibibytes} GiB with this recipe"
        )
    if hours(offer) > 24:
        return exercises.wrong(f"{answer} takes {hours(offer):.0f} hours")
    bills = {name: hours(one) * one.price_an_hour for name, one in offers.items() if fits(one) and hours(one) <= 24}
    if min(bills, key=bills.get) != answer:
        return exercises.wrong(f"{bills[answer]:.2f} in total; another offer fits, makes it in a day and costs less")
    return exercises.right(f"{need} fit, {hours(offer):.1f} hours, {bills[answer]:.2f} in total")


exercises.check(lab, "offer", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check, solution="large", mistake="middle")

# %% [markdown]
# What does the course's advisor (`perf-helpers advise`) recommend for the card that you chose? (Without an answer the cell takes the card with the most memory.) It may find a better recipe than ours. The first line of its answer ends with the type of the weights (*preset*: from the course's own description of this model). In the table, *16 x 1*, for example, means a micro-batch of 16 and 1 accumulation step; *needs* and *free* are memory. *speed* is relative to the fastest recipe that fits. *costs* names what the recipe gives up, such as precision; it is no price. A line such as *Speed, bf16* says by which factor one technique changes the speed, and where this factor was measured.

# %%
chosen = offers.get(answer) or max(offers.values(), key=lambda offer: offer.gibibytes)  # the most memory
advice = lab.foresee(advise, my_task, memory=f"{chosen.gibibytes}GiB", effective_batch=16, most=1, **on_card)
advice

# %% [markdown]
# ## Exercise 2: the challenge
#
# Suppose that every started hour is billed in full. An offer counts only if its card has enough memory and the training ends within a day. Find two numbers; each may be off by 2 %:
#
# - `samples`: up to which number of samples is the middle offer the cheapest, at the prices above?
# - `price`: suppose that the large offer costs more per hour. From which price on is the middle offer the cheapest, for the five million samples?

# %% jupyter={"source_hidden": true}
exercises.hint(
    "`hours(offers['middle'])` gives the hours for all samples. What is the smallest bill of each offer?",
    "The large offer costs at least one hour, 3.00. How many started hours of the middle offer cost less?",
    "At five million samples, compare the started hours of both offers, not their speeds.",
)

# %% tags=["exercise"]
answer = None  # dict(samples=..., price=...)


# %%
def middle_is_cheapest(count, price):
    """Return whether the middle offer costs less than each other one that fits and ends within a day."""
    priced = offers | {"large": offers["large"]._replace(price_an_hour=price)}
    needed = {name: hours(offer) * count / samples for name, offer in priced.items() if fits(offer)}
    bills = {name: -(-time // 1) * priced[name].price_an_hour for name, time in needed.items() if time <= 24}
    return all(bills.get("middle", float("inf")) < bill for name, bill in bills.items() if name != "middle")


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if estimated is None or flops is None:
        return exercises.not_measured("there is no estimate here")
    count, price = answer["samples"], answer["price"]
    around = {part: middle_is_cheapest(part * count, offers["large"].price_an_hour) for part in (0.98, 1.02)}
    if around != {0.98: True, 1.02: False}:
        which = "not yet" if not around[0.98] else "still"
        which = "no longer" if not any(around.values()) else which
        return exercises.wrong(f"around {count:,.0f} samples the middle offer is {which} the cheapest: started hours?")
    around = {part: middle_is_cheapest(samples, part * price) for part in (0.98, 1.02)}
    if around != {0.98: False, 1.02: True}:
        which = "already" if any(around.values()) else "not yet"
        return exercises.wrong(
            f"around a price of {price:.2f} the middle offer is {which} the cheapest: started hours?"
        )
    return exercises.right(f"up to {count:,.0f} samples, or from {price:.2f} per hour of the large offer on")


exercises.check(lab, "started hours", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
times = {name: hours(offer) if flops else 1 for name, offer in offers.items()}
started = -(-times["middle"] // 1) / -(-times["large"] // 1)
two_hours = samples * 2 / times["middle"]  # 2.00, and each of the others costs 3.00
by_speed = offers["large"].tflops / offers["middle"].tflops  # right if minutes were billed
exercises.prove(
    check,
    solution=dict(samples=two_hours, price=started * offers["middle"].price_an_hour),
    mistake=dict(samples=two_hours, price=by_speed * offers["middle"].price_an_hour),
)

# %% [markdown]
# ## Common mistakes
#
# - *Reading a "GPU-Util" of 100 % as "the card is well used".* That number says that some kernel ran. Clocks, their reasons and the utilization of lesson 02 say how well.
# - *Expecting the 1,979 TFLOP/s of the H100's data sheet.* That rate needs sparsity: half of the weights are zero. Yours are not.
# - *Using one cable with two plugs (a pigtail) for a card with two power sockets.* Both sockets then share the power of one cable. Use one cable per socket.
# - *Renting the cheapest card per hour.* It may be too small, or so slow that the training costs more in total: compare the offers of the exercise.
# - *Trying to build a CUDA extension because pip installed CUDA.* pip installed what an extension needs to run, not all that is needed to build it.
#
# ## Recap
#
# - The price of a million tokens is the price per hour, divided by the millions of tokens per hour. By its ceilings an H100 is worth 3.17 times the price of an A100 for training, and 2.15 times for single answers.
# - The driver reports temperatures or margins, and the reasons for its clocks, on a GPU only. pip's torch could run, and found 0 compilers to build with.
# - With fixed shapes, each of 64 lengths cost a compilation; after padding to 32 there were 2 graphs. `torch.compile` with its defaults also needed 2.

# %% tags=["finish"]
claims.finish()
