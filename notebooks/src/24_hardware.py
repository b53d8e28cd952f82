# %% [markdown]
# # What should the money buy?
#
# Nobody needs a GPU. What you need is a trained model, by a certain day, for a certain sum. Cards differ in arithmetic, bandwidth, memory and price, and so does what you ask of them.
#
# **You will see**
# - what a million tokens cost on this machine, from a price that you type, and why two cards have more than one break-even price
# - what a driver tells of heat and power, and what an installation by pip can and cannot build
# - how often a compiler for fixed shapes has to start anew, and what padding does about it

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
on_gpu = lab.machine.kind == "cuda" and not lab.machine.rehearsed
logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # it tells of limits that we reach on purpose

# %% [markdown]
# ## Idea
#
# Lesson 02 found two ceilings of a device: how many products it can compute in a second, and how many bytes it can move. A step cannot be faster than the slower of the two allows. Divide a price by the speed, and a ceiling becomes money:
#
# **price of a million tokens = price an hour / (tokens a second x 3600) x 1,000,000**
#
# Memory is the third number of a card. It decides whether a training runs at all.
#
# ## Predict
#
# Part of this lesson is about compilers, because a TPU runs nothing that was not compiled. A model gets texts of every length from 1 to 64.

# %%
asked = "How many times does `torch.compile`, as it comes, compile the model?"
widgets.predict(lab, "graphs", asked, "times", 0, 64)

# %% [markdown]
# ## By hand: a million tokens on this machine
#
# Tokens a second of a training here, measured. The price is yours: what the machine costs you an hour, electricity and all. Without it the course says nothing about money.

# %%
price_an_hour = 1.00  # yours, in your currency


def price_of_million(price_an_hour, tokens_per_second):
    return price_an_hour / (tokens_per_second * 3600) * 1e6


run = lab.train("training", measure=("time",), per_device_train_batch_size=lab.profile.micro_batch)
speed = run.samples_per_second
tokens_per_second = speed * lab.task.length() if plots.is_measured(speed) else None
if plots.is_measured(tokens_per_second):
    million = price_of_million(price_an_hour, tokens_per_second)
    print(f"{lab.task}: {tokens_per_second:,.0f} tokens/s, {million:.2f} for a million at {price_an_hour:.2f} an hour")
else:
    print(run.failure or "no speed was measured here")

# %% [markdown]
# ## How much of the ceiling is that?
#
# The products that the training needs a second, over the rate of one large product on this machine, in fp32. This share is the *utilisation* of lesson 02. It links a data sheet to your bill.


# %%
def ceiling(_):
    return roofline.ceilings("float32").flops_per_second


found = lab.run(ceiling, "ceiling", measure=("none",))
needed = roofline.model_flops(lab.task, 1)
used = None
if found.ok and plots.is_measured(speed):
    used = needed * speed / found.value
    print(f"{needed / 1e9:.3g} GFLOP a sample, {found.value / 1e9:.3g} GFLOP/s at most: {used:.0%} are used")
else:
    print(f"utilisation is not known here: {found.failure or 'no speed was measured'}")

# %% [markdown]
# ## Two cards, two ceilings
#
# Data sheets name the ceilings: products in 16 bits, and bytes. Take the number **without sparsity**. The one in large print is often that with it, twice as high: it holds where half of the weights are zero, which a training does not have.
#
# - Training computes 6 FLOPs a parameter and token (forward and backward), in large products: arithmetic decides.
# - Answering one question reads all weights, 2 bytes a parameter in 16 bits, for a single token: bandwidth decides. A batch of answers shares that reading.


# %%
class Card(NamedTuple):
    tflops: float  # products in 16 bits, dense
    gigabytes_per_second: float

    def tokens_per_second(self, parameters, batch=None):
        """The most that the ceilings allow: a training, or so many answers at once."""
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
heads = ["card", "TFLOP/s", "GB/s", "training", "one answer", "1024 at once"]
plots.Table(heads, rows, "Worth so many times the price of an A100, by the ceilings")

# %% [markdown]
# These are **break-even prices**. At less than 3.17 times the price of an A100 an H100 trains a token for less money; but for single answers it must cost less than 2.15 times as much. One card is not "better value" than another: it is so for a kind of work.

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
# Read the blue line. With few answers at once the H100 is worth what its bandwidth is worth; with hundreds, what its arithmetic is. The T4 and the A100 have nearly the same balance of the two, so their line is flat. (Keys and values of lesson 20 have to be read as well. They are left out here.)

# %%
answers = ["the card with the lower price an hour", "the card with the higher peak TFLOP/s", "neither number says it"]
exercises.question(
    lab,
    "cheaper",
    "Two cards hold your training. Which one makes it cheaper?",
    {
        answers[0]: "A card at a third of the price that takes four times as long costs more in the end.",
        answers[1]: "It may cost more than it is faster. And the peak may be one with sparsity, or in 8 bits.",
        answers[2]: "It is the ratio of prices against the ratio of speeds, for this work, at the share of the ceiling "
        "that you reach on each of them.",
    },
    right=answers[2],
)

# %% [markdown]
# ## Heat and power
#
# The 2022 guide asks for cooling, and names temperatures. **NVML**, the driver's own library (behind `nvidia-smi`), tells them for your card. Older ones tell two temperatures. Newer ones tell a *margin*, how many degrees are left; their thresholds are margins, too. There are three: from *operating* on the card may go below its base clock, at *slowdown* the hardware brakes, at *shutdown* it goes off.


# %%
def told_by_driver(ask, handle):
    """Degrees at which a GPU goes slower, brakes and shuts down, or the margins (lower is hotter), and what it may draw."""
    known = {}
    for name, threshold, field in (("shutdown", 0, 193), ("slowdown", 1, 194), ("operating", 3, 196)):
        known[name] = ask("nvmlDeviceGetTemperatureThreshold", handle, threshold) or None
        for value in ask("nvmlDeviceGetFieldValues", handle, [field]) or []:
            known[f"{name} margin"] = value.value.siVal if value.nvmlReturn == 0 else None
    limit = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    return known | {"margin now": ask("nvmlDeviceGetMarginTemperature", handle), "watts": limit and limit / 1000}


def above_slowdown(known):
    """By how many degrees shutting down lies above slowing down; None where the driver does not tell."""
    for above, name in ((1, "{}"), (-1, "{} margin")):
        both = [known.get(name.format(what)) for what in ("shutdown", "slowdown")]
        if None not in both:
            return above * (both[0] - both[1])
    return None


with hardware.nvml() as (ask, why):
    handle = ask("nvmlDeviceGetHandleByUUID", lab.machine.gpus[0].uuid) if on_gpu else None
    known = told_by_driver(ask, handle) if handle else {}
print(known or f"no thermometer here: {why or 'this machine shows no GPU'}")

# %% [markdown]
# Watch the *reasons* that the driver gives for lower clocks, not the temperature alone. A power limit is a reason as well: on most cards under load that is normal. On a GPU we heat it for twenty seconds, and note reasons and speed.

# %%
THERMAL = 0x20 | 0x40  # slowed down for heat, by the driver or by the card itself


def heated(seconds, uuid, _):
    left, right = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.float16)
    rows, began = [], time.perf_counter()
    with hardware.nvml() as (ask, _):
        handle = ask("nvmlDeviceGetHandleByUUID", uuid)
        while time.perf_counter() - began < seconds:
            start = time.perf_counter()
            for _ in range(40):
                left @ right
            torch.cuda.synchronize()
            rate = 40 * 2 * 8192**3 / (time.perf_counter() - start)
            reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
            degrees, clock = ask("nvmlDeviceGetTemperature", handle, 0), ask("nvmlDeviceGetClockInfo", handle, 1)
            rows.append([time.perf_counter() - began, rate, degrees, clock, reasons])
    return rows


# %%
def throttling(rows):
    """Speeds under a thermal slowdown over the usual one, of rows (.., rate, .., reasons); or why there are none."""
    told = [row for row in rows if row[-1] is not None]
    hot = [row[1] for row in told if row[-1] & THERMAL]
    cool = [row[1] for row in told if not row[-1] & THERMAL]
    if len(hot) < 3 or not cool:  # an interval needs three
        few = f"the driver told of a slowdown for heat in {len(hot)} of {len(told)} readings"
        return None, few if told else "the driver tells no reasons for its clocks"
    return [rate / median(cool) for rate in hot], None


hot, not_hot = None, "needs a GPU to heat"
if on_gpu:
    seconds, uuid = 20 if lab.profile.name != "tiny" else 1, lab.machine.gpus[0].uuid
    load = lab.run(lambda task: heated(seconds, uuid, task), "load", measure=("none",))
    hot, not_hot = throttling(load.value) if load.ok else (None, load.failure)
    for row in (load.value or [])[:: max(1, len(load.value or []) // 8)]:
        print("{:.0f} s: {:.3g} FLOP/s, {} °C, {} MHz, reasons {}".format(*row))
print(not_hot or f"{len(hot)} readings under a slowdown")

# %% [markdown]
# If your card does slow down: clean it, give it air, lower its power limit (`nvidia-smi -pl`). A "GPU-Util" of 100 % shows nothing of this: a card that crawls is busy as well.
#
# ## What pip installs, and what it cannot build
#
# The guides say of pip's torch that it brings enough of CUDA to run, and not enough to build extensions. An extension needs **nvcc**, NVIDIA's compiler. torch looks for it in three places (`_find_cuda_home` in `torch/utils/cpp_extension.py`): the variable `CUDA_HOME`, the search path, `/usr/local/cuda`. A clean process asks that very search, without a toolkit of this machine. Then we put an empty `nvcc` where pip's own package `nvidia-cuda-nvcc` has it.

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
    """Whether torch is ready to build a CUDA extension where no program is on the path, and what it found."""
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
print("torch", torch.__version__, "asks for", ", ".join(brings) or "nothing of CUDA: it is the CPU's build")
ready = searched()
searches = ready if isinstance(ready, dict) else {"the search failed": [False, ready]}
plots.Table(["what is there", "ready to build", "found, or why not"], [[name, *row] for name, row in searches.items()])

# %% [markdown]
# Not even pip's own compiler is found, unless `CUDA_HOME` names its folder ([pytorch PR 197483](https://github.com/pytorch/pytorch/pull/197483), open, would look there). And that is not all. With torch 2.13.0+cu130, `nvidia-cuda-nvcc` 13.0.88 and `CUDA_HOME` set we built a small extension (2026-11-25): it compiled, and then the linker said `cannot find -lcudart`. pip's package holds `libcudart.so.13`, the linker wants `libcudart.so`. With a link of that name beside it, it was built and imported. Others met the same ([flashinfer issue 5064](https://github.com/flashinfer-ai/flashinfer/issues/5064)).
#
# The ways out, the easiest first: a wheel that is built already; NVIDIA's **NGC images**, which bring everything (read in their release notes which driver they need); a toolkit of the same CUDA version; pip's compiler with the two repairs above. The guides' other way, PyTorch's own conda builds, ended with torch 2.5.
#
# ## Shapes that stay
#
# Beside GPUs the index pages offer TPUs, with TensorFlow and XLA. transformers 5 has no TensorFlow. But one rule of that page holds beyond it: XLA compiles for **fixed shapes**, so a model is compiled anew for every length that it meets. So does `torch.compile` with `dynamic=False`. We count.

# %%
weight = torch.randn(8, 8)


def network(x):
    return torch.nn.functional.gelu(x @ weight)


def graphs(lengths, limit=None, **options):
    """How many graphs torch.compile makes of the network for inputs of these lengths."""
    made = []

    def backend(graph, _):
        made.append(graph)
        return graph.forward  # as it is, so that only the capturing takes time

    torch._dynamo.reset()  # what was compiled before is forgotten
    with torch._dynamo.config.patch(recompile_limit=limit or torch._dynamo.config.recompile_limit):
        compiled = torch.compile(network, backend=backend, **options)
        for length in lengths:
            compiled(torch.zeros(1, length, 8))
    return len(made)


# %%
lengths = range(1, 65) if lab.profile.name != "tiny" else range(1, 9)
to_32 = [-(-length // 32) * 32 for length in lengths]
fixed = {"each length": graphs(lengths, 65, dynamic=False), "padded to 32": graphs(to_32, 65, dynamic=False)}
limited, default = graphs(lengths, dynamic=False), graphs(lengths)
rows = [["fixed shapes, each length", fixed["each length"]], ["fixed shapes, padded to 32", fixed["padded to 32"]]]
rows += [["fixed shapes, each length, torch's own limit", limited], ["torch.compile as it comes", default]]
display(plots.Table(["what", "graphs"], rows, f"{len(lengths)} lengths"))
print(f"padding to 32 adds {sum(to_32) / sum(lengths) - 1:.0%} of tokens here")
widgets.revealed(lab, "graphs", default)

# %% [markdown]
# With fixed shapes every length costs a compilation. Padding leaves two shapes; it also computes on padding, which for short texts is a lot. `torch.compile` as it comes needs neither: when a size has changed once, it compiles a second time with that size left open (automatic dynamic shapes, since torch 2.1).
#
# And look at the third row. After eight graphs torch stops compiling that function and goes on without, with one warning. "It is compiled" may be true for the first eight lengths alone.
#
# ## What held

# %% tags=["claim"]
degrees = known.get("slowdown")
margin = "" if known.get("margin now") is None else f"it tells a margin of {known['margin now']} degrees"
lower = known.get("operating")
note = f"below its base clock it may go from {lower} °C on" if lower else ""
silent = None if degrees else margin or "the driver tells no temperature"
display(claims.check("cooling", degrees, missing=silent, note=note))
above = above_slowdown(known)
display(claims.check("shutdown-temperature", above, missing=None if above is not None else "the driver tells none"))
claims.check("throttled", lab.ratio(hot) if hot else None, missing=not_hot)

# %% tags=["claim"]
count = int(ready["pip's torch"][0]) if isinstance(ready, dict) else None
note = "" if brings else "torch's search in the CPU's build, whose files are the same"
claims.check("wheels-build-nothing", count, note=note, missing=None if isinstance(ready, dict) else ready)

# %% tags=["claim"]
uncompiled = None if default else "torch.compile makes no graphs here"  # in a rehearsal it does nothing
shares = [made / len(lengths) if made else None for made in (fixed["each length"], default)]
display(claims.check("shapes-recompile", shares[0], note="torch.compile(dynamic=False)", missing=uncompiled))
note = f"{default} of {len(lengths)}"
display(claims.check("shapes-recompile-default", shares[1], note=note, missing=uncompiled))
padded = None if uncompiled else fixed["padded to 32"] / fixed["each length"]
claims.check("pad-to-multiple", padded, missing=uncompiled)

# %% [markdown]
# ## What cannot be measured here
#
# Sockets, prices and products that have ended. They stand in the ledger as text, so that none is forgotten. Type your prices an hour, and the ceilings say which card trains a token for the least; a data sheet's ceiling is not your utilisation.

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
# How many times the price of an A100 does an H100 cost you? And how much of its ceiling does your code use, against the A100's? A faster card is harder to keep busy. Below 100 % the H100 is cheaper a token.


# %% tags=["widget"]
def draw(price, used):
    h100, a100 = sheet["H100 SXM"], sheet["A100 40 GiB"]
    bills = []
    for size in (None, *batches):
        faster = h100.tokens_per_second(1e9, size) / a100.tokens_per_second(1e9, size) * used / 100
        bills.append(100 * price / faster)
    title = f"H100 at {price} times the price, {used} % of the use: a training costs {bills[0]:.0f} %"
    lines = {"answers": bills[1:], "as dear": [100] * len(batches)}
    ax = plots.lines(batches, lines, "answers at once", "price of a token, % of the A100's", title=title)
    ax.set_xscale("log", base=2)
    return ax


_ = widgets.explore(draw, price=[2, 1.5, 2.5, 3, 4], used=[100, 90, 75, 50])

# %% [markdown]
# ## Exercise: the cheapest card that makes it in a day
#
# Three offers; the figures are made up, put in your own. Your model shall see five million samples within 24 hours, at an effective batch of 16 and with the recipe below. Which offer is the cheapest **in all**? Does your model fit it?

# %%
mine = Task("gpt2-medium", seq_len=256)
samples, share = 5_000_000, 0.3  # the share of the ceiling that you expect to use
recipe = dict(per_device_train_batch_size=4, gradient_accumulation_steps=4, bf16=True)


class Offer(NamedTuple):
    tflops: float
    gibibytes: int
    price_an_hour: float


offers = {"small": Offer(60, 8, 0.20), "middle": Offer(125, 24, 1.00), "large": Offer(989, 80, 3.00)}
exercises.hint(
    "Memory first: lab.foresee(estimate, mine, device='cuda', compute_capability=(8, 0), **recipe).peak_bytes.",
    "Hours: samples x roofline.model_flops(mine, 1) / (ceiling x share) / 3600.",
    "Then hours x price an hour. The dearest an hour need not be the dearest in all.",
)

# %% tags=["exercise"]
answer = None  # "small", "middle" or "large"


# %%
on_card = dict(device="cuda", compute_capability=(8, 0))
said = lab.foresee(estimate, mine, **on_card, **recipe)
flops = lab.foresee(roofline.model_flops, mine, 1)


def hours(offer):
    return samples * flops / (offer.tflops * 1e12 * share) / 3600


def fits(offer):
    return said.peak_bytes + cards.CONTEXT_BYTES <= (1 - cards.MARGIN) * offer.gibibytes * 2**30


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if answer not in offers:
        return exercises.wrong(f"no offer is called {answer!r}; there are: {', '.join(offers)}")
    if said is None or flops is None:
        return exercises.not_measured("there is no estimate here")
    offer, need = offers[answer], plots.bytes_text(said.peak_bytes)
    if not fits(offer):
        return exercises.wrong(f"{need} of tensors and the context do not fit {offer.gibibytes} GiB with this recipe")
    if hours(offer) > 24:
        return exercises.wrong(f"{answer} takes {hours(offer):.0f} hours")
    bills = {name: hours(one) * one.price_an_hour for name, one in offers.items() if fits(one) and hours(one) <= 24}
    if min(bills, key=bills.get) != answer:
        return exercises.wrong(f"{bills[answer]:.2f} in all; another offer fits, makes it in a day and costs less")
    return exercises.right(f"{need} fit, {hours(offer):.1f} hours, {bills[answer]:.2f} in all")


exercises.check(lab, "offer", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check, solution="large", mistake="middle")

# %% [markdown]
# What does the advisor make of that card? It may find a better recipe than ours.

# %%
chosen = offers.get(answer or "large", offers["large"])
advice = lab.foresee(advise, mine, memory=f"{chosen.gibibytes}GiB", effective_batch=16, most=1, **on_card)
advice

# %% [markdown]
# **Challenge.** For which number of samples does the middle offer become the right answer? And at which price of the large one? Say both before you compute them.
#
# ## Mistakes that strangers make
#
# - *The card is at 100 %, so it is well.* That number says that some kernel ran. Clocks, their reasons and the utilisation of lesson 02 say how.
# - *The data sheet says 1,979 TFLOP/s.* With sparsity, where half of the weights are zero. Yours are not.
# - *One cable with two plugs.* A pigtail gives one cable's power to two sockets.
# - *The cheapest card an hour.* The exercise showed what that costs.
# - *pip installed CUDA, so I can compile.* It installed what runs.
#
# ## Recap
#
# - A million tokens cost the price an hour over the tokens an hour. Two cards had one break-even price for training, and another for single answers.
# - The driver told temperatures or margins, and reasons for its clocks, where there was a GPU; pip's torch could run and had nothing to build with.
# - Fixed shapes compiled once for every length, and twice after padding. `torch.compile` as it comes needed two graphs.

# %% tags=["finish"]
claims.finish()
