# %% [markdown]
# # Can a training of 15 GB fit into 5?
#
# Each technique of lessons 05 to 09 saved memory. You want to use all of them at once: how much memory do they save together,
# and which of them are worth their price? The 2023 guide ends with ten recipes on a V100. The first takes 14949 MB, the
# smallest 4847 MB, at the same speed.
#
# **You will see**
# - all ten recipes on this machine beside the V100's figures, and why their savings do not simply add up;
# - a ladder of speed from the guides' vanilla to the best recipe in no more memory, and the rungs that gain nothing;
# - the guide's own table of what improves speed and what saves memory, decided cell by cell;
# - a grid of recipes on several workers.
#
# **Minutes:** plan 60 for reading, trying and the final challenge; the cells compute for about 1 on two cores.
#
# **Before you start:** lesson 01 (what is alive at the peak), 03 (intervals) and 05. The table below names the lessons
# of the other techniques.
#
# **On a CPU:** memory is counted exactly. The speed of the ten recipes is not measured, and the ladder of speed leaves
# out tf32, compiling and, if the CPU emulates them, 16-bit matmuls.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import functools
import itertools
import math
import shutil
import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Markdown, display

from perf_helpers import Claims, Lab, Task, exercises, explorers, hardware, learner_log, plots, roofline, widgets
from perf_helpers.advise import advise, verify
from perf_helpers.lab import Ratio
from trainmem.estimate import estimate

lab = Lab(profile, strict=strict, out=out, lesson="14_all_together")
claims = Claims(lab)
cuda = lab.machine.kind == "cuda"

# %% [markdown]
# ## Idea
#
# Each technique of the table removes some of the bytes that are alive at the peak (lesson 01), and each has its own
# kind of price.
#
# | technique | removes | price | lesson |
# |---|---|---|---|
# | accumulation | activations (a smaller micro-batch) | less speed (small operations); gradients kept between micro-batches | 05 |
# | checkpointing | activations within layers | a second forward pass | 06 |
# | mixed precision | up to half of the activations | a half-precision copy of the weights | 07 |
# | Adafactor | nearly all optimizer states | convergence, perhaps | 08 |
# | 8-bit Adam | three quarters of the states | rounding of the states | 09 |
#
# Two techniques that remove the same bytes do not save twice. And some bytes are removed by none of them: the weights,
# and the gradients that accumulation keeps.
#
# ## Predict
#
# The question's *all of it* means four techniques together: micro-batch 1 with four accumulation steps, checkpointing, half
# precision and Adafactor. (The guide's megabytes are those of the whole card. Your number is for the tensors alive at
# the peak.)

# %%
widgets.predict(lab, "all together", "What is the peak with all of it, in percent of vanilla's peak?", "%", 0, 120)

# %% [markdown]
# ## The task
#
# On a GPU we use the profile's task. Most CPUs emulate half precision slowly, so on a CPU we use a miniature and
# compare memory, which is exact on any CPU. The miniature has bert-large's proportions: embeddings are under 10 % of
# the parameters, and at batch 4 activations take several times as many bytes as weights.

# %%
sizes = {"vocab_size": 200, "max_position_embeddings": 128}
task = lab.task if cuda else Task("bert-tiny", seq_len=128, config=sizes)
# half: an argument of the Trainer; its name, fp16 or bf16, is also what Accelerator takes below
half = {"fp16": True} if cuda else {"bf16": True}  # on a CPU the Trainer ignores fp16 without a warning
print(f"{lab.machine.name}: {task}, {task.parameters() / 1e6:.2f} M parameters")

# %% [markdown]
# ## By hand
#
# The last of the ten recipes uses no Trainer. It is a loop of our own with everything switched on (lesson 13 builds it
# line by line). A comment marks each line that switches a technique on.


# %%
def loop(task):
    import bitsandbytes
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(mixed_precision=next(iter(half)), gradient_accumulation_steps=4)  # half, accumulation
    model = task.build_model()
    model.gradient_checkpointing_enable()  # checkpointing
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=5e-5)  # 8-bit states
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):  # as the Trainer does: states of embeddings keep 32 bits
            manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(task.dataset(), batch_size=1))
    for _, batch in zip(range(micro_batches), batches, strict=False):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


micro_batches = 8  # two optimizer steps

# %% [markdown]
# ## Baseline
#
# Vanilla is micro-batch 4, fp32 and AdamW. The other nine recipes have the same effective batch of 4. *+ checkpointing* is
# accumulation with checkpointing, and *all* in a name is accumulation, checkpointing and half precision. The MB and
# samples/s in the code are the 2023 guide's, measured on a V100 with 16 GiB and bert-large.
#
# > **On a GPU:** the speed of each recipe is measured too. On a CPU it is not: the speed of a miniature on a CPU, which may emulate half precision, says nothing about the guide's.

# %%
four = {"per_device_train_batch_size": 4}
one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
saving = one | {"gradient_checkpointing": True}
v100 = {  # recipe: (arguments, MB, samples/s)
    "vanilla": (four, 14949, 8.86),
    "accumulation": (one, 8681, 7.75),  # new
    "+ checkpointing": (saving, 6775, 5.99),  # new
    "half precision": (four | half, 13939, 18.64),  # new
    "accumulation + checkpointing + half": (saving | half, 7275, 10.09),
    "Adafactor": (four | {"optim": "adafactor"}, 12295, 7.96),  # new
    "all + Adafactor": (saving | half | {"optim": "adafactor"}, 4847, 9.06),
    "8-bit Adam": (four | {"optim": "adamw_bnb_8bit"}, 13085, 9.15),  # new
    "all + 8-bit Adam": (saving | half | {"optim": "adamw_bnb_8bit"}, 5363, 10.35),
    "Accelerate loop, all + 8-bit Adam": (None, 5363, None),
}
meters = ("memory", "time") if cuda else ("memory",)
vanilla = lab.train("vanilla", task=task, measure=meters, **four)
vanilla

# %% [markdown]
# ## Change one thing, then everything

# %%
for name, (arguments, _, _) in list(v100.items())[1:]:
    if arguments is None:
        lab.run(loop, name, task=task, measure=("memory",))
    else:
        lab.train(name, task=task, measure=meters, **arguments)
runs = {name: lab[name] for name in v100}
failed = {name: run.failure for name, run in runs.items() if not run.ok}
whole = float(vanilla.peak_bytes)
share = {name: run.peak_bytes / whole if run.ok else run.peak_bytes for name, run in runs.items()}
header = ["recipe", "here", "here / vanilla", "V100", "V100 / vanilla", "samples/s, V100", *["here"] * cuda]
rows = []
for name, (_, megabytes, speed) in v100.items():
    here = [plots.bytes_text(runs[name].peak_bytes), f"{share[name]:.0%}"]
    speeds = [speed, *[runs[name].samples_per_second] * cuda]
    rows.append([name, *here, f"{megabytes} MB", f"{megabytes / 14949:.0%}", *speeds])
combined = v100["all + Adafactor"][0]
plain = v100["vanilla"][0]
estimated = lab.foresee(lambda: 100 * estimate(task, **combined).peak_bytes / estimate(task, **plain).peak_bytes)
display(widgets.revealed(lab, "all together", 100 * share["all + Adafactor"], estimate=estimated))
display(plots.Table(header, rows, f"{lab.machine.name}, beside the guide's V100. Failed: {failed or 'none'}"))
plots.memory(list(runs.values()), title="What is alive at the peak")
gap = max(abs(part - v100[name][1] / 14949) for name, part in share.items() if part)
print(f"Shares of vanilla, here and on the V100: at most {100 * gap:.0f} percentage points apart.")

# %% [markdown]
# Compare the two "/ vanilla" columns. They measure different things: the V100's megabytes are device-used memory, which
# includes 1343 MB of CUDA's context in each row, and freed memory that torch's allocator keeps for later; ours are the
# tensors alive at the peak.
#
# Now compare the colours. Accumulation and checkpointing shrink the activations. Adafactor and 8-bit Adam shrink the
# optimizer states. Half precision adds a colour of its own, the weight copies. Accumulation adds gradients: those of
# the previous micro-batches wait for the next one, so a full set exists at the peak. Vanilla's peak is early in backward,
# when hardly any gradient exists. The weights are the same in every bar.
#
# ## The ladder
#
# Each rung adds one technique. How much a rung saves depends on what the rungs before it have left.

# %%
rungs = ["vanilla", "accumulation", "+ checkpointing", "accumulation + checkpointing + half", "all + Adafactor"]
labels = ["vanilla", "+ accumulation", "+ checkpointing", "+ half precision", "+ Adafactor"]
_, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
for offset, colour, label, values in (
    (-0.2, plots.SERIES[0], "here, counted", [100 * share[name] for name in rungs]),
    (0.2, plots.SERIES[6], "V100, device-used (2023 guide)", [v100[name][1] / 149.49 for name in rungs]),
):
    bars = ax.bar([rung + offset for rung in range(len(rungs))], values, 0.38, color=colour, label=label)
    ax.bar_label(bars, fmt="%.0f", fontsize=10)
floor = 100 * 8 * task.parameters() / vanilla.peak_bytes
ax.axhline(floor, color="black", linestyle="--", label="fp32 weights and gradients")
ax.set_xticks(range(len(rungs)), labels)
ax.set_ylabel("peak (% of vanilla)")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()
steps = {label: 100 * (share[before] - share[name]) for label, before, name in zip(labels[1:], rungs, rungs[1:])}
v100_steps = {label: (v100[a][1] - v100[b][1]) / 149.49 for label, a, b in zip(labels[1:], rungs, rungs[1:])}
points_text = [f"*{label}* {-points:+z.0f} (V100: {-v100_steps[label]:+z.0f})" for label, points in steps.items()]
lowest = min(100 * share[name] for name in rungs)
Markdown(
    f"Each rung changes the peak, in percentage points of vanilla's: {', '.join(points_text)}. The largest step here is "
    f"**{max(steps, key=steps.get)}**, on the V100 **{max(v100_steps, key=v100_steps.get)}**. "
    f"The lowest rung, {lowest:.0f} %, is {'above' if lowest > floor else 'below'} the dashed line at {floor:.0f} %."
)

# %% [markdown]
# A rung can remove only what the rungs before it have left. Half precision comes late: the activations that it would
# halve are mostly gone, and it adds copies of the weights. So it removes little, or even adds to the peak. The dashed
# line shows the bytes that none of the ten recipes removes: 8 bytes per parameter, for fp32 weights and for the
# gradients that accumulation keeps.
#
# ## The ladder of speed
#
# The guide is also about speed. The vanilla recipe above is today's: the library uses fused attention and a fused
# AdamW by default. The guides' vanilla had plain ("eager") attention, and an AdamW that updates the tensors one by one
# in a loop. We start from there, and each rung adds one technique: tf32 and 16-bit matmuls (lesson 07), SDPA (11),
# fused AdamW (10), a batch as large as fits into the memory that was freed (04), DataLoader workers (12), torch.compile
# (11). If a batch takes more memory than the guides' vanilla, a printed line says that it is left out.
#
# Techniques that the machine lacks are left out: on a CPU tf32, compiling (it takes long) and, if the CPU emulates
# them, 16-bit matmuls. The CPU's task has two layers and no dropout in attention, because with that dropout SDPA
# falls back to plain attention on a CPU (11). It is not the task of the ten recipes, so its megabytes
# differ. And *vanilla* is now the guides' vanilla.
#
# On a CPU the next cell prints how fast 16-bit matmuls are, and the share of a step that matmuls take.


# %%
def looped(model, arguments):
    return torch.optim.AdamW(
        model.parameters(), lr=arguments.learning_rate, weight_decay=0.0, foreach=False, fused=False
    )


wide = {"num_hidden_layers": 2, "vocab_size": 200, "max_position_embeddings": 256, "attention_probs_dropout_prob": 0.0}
speed_task = lab.task if cuda else Task("bert-small", seq_len=192, dataset_size=64, config=wide)
sm80 = hardware.supports("sm80")[0]
sixteen = {"fp16": True} if cuda and not sm80 else {"bf16": True}
products = None if cuda else roofline.products(lab, "bfloat16", speed_task, 4)
print(products or "on a GPU, lesson 07 measures this")
compiles = cuda and not lab.machine.rehearsed and any(map(shutil.which, ("cc", "gcc", "clang")))
start = four | {"attn_implementation": "eager", "optimizer": looped}
rungs_of_speed = {  # rung: (options, of which the last that fits is taken; whether this machine has them)
    "+ tf32": ([{"tf32": True}], sm80),
    "+ half precision": ([sixteen], cuda or products.usable),
    "+ SDPA": ([{"attn_implementation": "sdpa"}], True),
    "+ fused AdamW": ([{"optimizer": None, "optim": "adamw_torch_fused"}], True),
    "+ larger batch": ([{"per_device_train_batch_size": size} for size in (6, 8, 12, 16, 24, 32)], True),
    "+ workers": ([{"dataloader_num_workers": 2}], True),
    "+ compile": ([{"torch_compile": True}], compiles),
}

# %%
alone = {  # one technique each, for the guide's table below
    "accumulation alone": start | one,
    "checkpointing alone": start | {"gradient_checkpointing": True},
    "micro-batch 1": start | {"per_device_train_batch_size": 1},
    "Adafactor alone": start | {"optimizer": None, "optim": "adafactor"},
}


def counted(name, recipe):
    return lab.train(name, task=speed_task, measure="peak", **recipe)  # the peak alone, without its colours


recipes = {"guides' vanilla": start}
ran = {name: counted(name, recipe) for name, recipe in (recipes | alone).items()}
room = ran["guides' vanilla"].peak_bytes
for name, (options, is_here) in rungs_of_speed.items():
    before = recipes[next(reversed(recipes))]
    for change in options if is_here else ():
        run = counted(name, before | change)
        if not run.ok or (len(options) > 1 and run.peak_bytes > room):
            print(f"{name}, {change}: {plots.bytes_text(run.peak_bytes) if run.ok else run.failure}, left out")
            break
        recipes[name], ran[name] = before | change, run

# %% [markdown]
# Now the seconds.
#
# - **On a CPU**, `lab.compare` interleaves the steps of all recipes inside one process, on one thread, and repeats
#   this in four processes. The first recipe takes part twice: its two times show the noise. CPU time decides.
#   Workers are the exception: they save waiting, which CPU time does not include, so wall-clock time decides for
#   them, with its larger noise.
# - **On a GPU**, each pair of recipes is interleaved by itself.

# %%
climb, first = list(recipes), "guides' vanilla"
racing = recipes | {name: recipe for name, recipe in alone.items() if name != "Adafactor alone"}
beside_first, fastest = {}, {}  # each compared with the guides' vanilla; the fastest step of each
if not cuda:
    others = [ran[name] for name in racing if name != first]
    beside_first = {found.other.name: found for found in lab.compare(ran[first], *others, turns=16)}
    for name, found in beside_first.items():
        fastest |= zip((first, name), found.step_seconds or ())


# %%
@functools.cache
def faster(first, second):  # samples per second of the second recipe over those of the first
    if not {first, second} <= racing.keys():
        return Ratio.unknown("this machine lacks what the recipe needs")
    if cuda:
        return lab.compare(ran[first], ran[second], turns=5).speed_ratio
    found = {name: beside_first[name] for name in (first, second) if name in beside_first}
    if unknown := [each.speed_ratio for each in found.values() if not each.speed_ratio.known]:
        return unknown[0]
    clock, floor = ("wall_ratio", lab.noise_floor()) if second == "+ workers" else ("speed_ratio", 1)
    ratios = {name: getattr(each, clock) for name, each in found.items()}
    # Both ratios contain the seconds of the same steps of vanilla, which cancel in the quotient.
    before, after = (np.array(ratios[name].pairs) if name in ratios else 1 for name in (first, second))
    return Ratio.of_processes((after / before).reshape(4, -1), max(floor, *(each.floor for each in ratios.values())))


to_before = {name: faster(below, name) for below, name in itertools.pairwise(climb)}
to_first = {name: faster(first, name) for name in climb[1:]}
rows = []
for name in climb:
    peak, batch = ran[name].peak_bytes, recipes[name]["per_device_train_batch_size"]
    ratios = to_before.get(name, 1), to_first.get(name, 1)
    rows.append([name, batch, plots.bytes_text(peak), f"{peak / room:.0%}", *ratios])
header = ["rung", "batch", "peak", "peak / vanilla's", "speed against the rung before", "against vanilla"]
plots.Table(header, rows, "Speed with its interval; on a CPU by CPU time, workers by wall-clock time")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.5 * len(climb) + 1.6), layout="constrained")
left.barh(climb, [100 * ran[name].peak_bytes / room for name in climb], 0.62, color=plots.SERIES[0])
left.bar_label(left.containers[0], fmt=" %.0f", fontsize=10)
left.set(xlim=(0, 120), xlabel="peak (% of the guides' vanilla)", title="Memory")
right.plot(1, 0, "o", color="black", markersize=8)
for row, ratio in enumerate(to_first.values(), 1):
    if not ratio.known:
        right.text(1, row, "speed not measured", va="center", fontsize=10)
        continue
    right.plot([ratio.low, ratio.high], [row, row], color=plots.SERIES[1], linewidth=2.5)
    right.plot(ratio.value, row, "o", color=plots.SERIES[1], markersize=8)
    right.text(ratio.value, row - 0.2, f"{ratio.value:.2f} x", ha="center", va="bottom", fontsize=10)
right.axvline(1, color="black", linewidth=1)
right.set(yticks=[], xlabel="samples per second / those of the guides' vanilla (line: interval)", title="Speed")
right.set_ylim(len(climb) - 0.4, -0.7)
left.set_ylim(right.get_ylim())
for ax in (left, right):
    ax.spines[["top", "right"]].set_visible(False)

# %%
known = {name: ratio for name, ratio in to_before.items() if ratio.known}
nothing = [name for name, ratio in known.items() if ratio.low <= 1 <= ratio.high]
costly = [name for name, ratio in known.items() if ratio.high < 1]
fits = [name for name in climb if ran[name].peak_bytes <= room]
surely = {name: to_first[name].low for name in fits[1:] if to_first[name].known}
best = max(surely | {first: 1.0}, key=(surely | {first: 1.0}).get) if surely else fits[-1]
summary = f"No measurable gain here: **{', '.join(nothing) or 'none'}**. "
summary += f"Slower than the rung before: **{', '.join(costly) or 'none'}**."
Markdown(
    f"{summary if known else 'No speed was measured here.'} The best recipe in no more memory than the guides' vanilla has all rungs up to **{best}**: "
    f"{ran[best].peak_bytes / room:.0%} of the peak, {to_first.get(best, 1)} x the throughput."
)

# %% [markdown]
# The *best* recipe is the one whose speed against vanilla has the highest lower end of its interval. So a recipe with a
# larger single value and a wider interval can come second.
#
# If a rung gains nothing, its technique is not useless: on this task there was nothing for it to speed up. If the
# input is ready, workers have nothing to hide, and short sequences gain little from SDPA. A rung can even be slower:
# fused attention computes the scores again in the backward pass (lesson 11), which can cost more time than it saves.
# A larger batch is a different training: lesson 04 says how it changes learning.
#
# ## How far is that from the hardware?
#
# **Model FLOPs utilization** ([PaLM, appendix B](https://arxiv.org/abs/2204.02311)) compares a training with the
# hardware. Take the FLOPs of the matmuls that the model needs for a sample (recomputation does not count). Multiply
# them by the samples per second, and divide by the FLOP rate of the hardware. PaLM divides by the data sheet's rate. We
# divide by the rate of a large matmul, measured here in the recipe's precision. So a faster recipe can have a lower
# utilization: in half precision the hardware's rate is also higher. This course's goal for a GPU: 10 times the
# throughput of the guides' vanilla, in no more memory, at a utilization of 50 % or more.


# %%
def matrix_rates(task):
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # as in the interleaved steps
    return [roofline.ceilings(dtype).flops_per_second for dtype in dtypes]


def samples_per_second(name):
    if cuda:
        run = lab.train(name, task=speed_task, measure=("time",), **recipes[name])
        return run.samples_per_second
    return ran[name].samples_per_step / fastest.get(name, math.nan)


in_half = {"bf16": "bfloat16", "fp16": "float16"}
dtypes = ["float32", next((dtype for name, dtype in in_half.items() if recipes[best].get(name)), "float32")]
rates = lab.run(matrix_rates, task=speed_task, measure=("none",)).value
needed = roofline.model_flops(speed_task, 1)
utilization = {}
for name, dtype, rate in zip((first, best), dtypes, rates):
    utilization[name] = needed * samples_per_second(name) / rate
    print(f"{name}: {utilization[name]:.1%} of {rate / 1e12:.3g} TFLOP/s ({dtype})")
print(f"goal: 10 x the throughput at 50 %; reached here: {to_first.get(best, 1)} x at {utilization[best]:.1%}")

# %% [markdown]
# ## What held
#
# ### Three combinations
#
# For three combinations of techniques, the guide says how much memory they save and how fast they are. Each is two claims:
# memory is decided on any machine, speed only on a GPU. The cell ends with an error if the peaks of the loop by hand
# and of the Trainer differ by over 2 %.

# %% tags=["claim"]
three, ada, eight = "accumulation + checkpointing + half", "all + Adafactor", "all + 8-bit Adam"
for id, name in {"combined-half-memory": three, "all-three-memory": ada, "all-three-8bit-memory": eight}.items():
    display(claims.check(id, share[name]))
by_hand, by_trainer = runs["Accelerate loop, all + 8-bit Adam"].peak_bytes, runs[eight].peak_bytes
torch.testing.assert_close(by_hand, by_trainer, rtol=0.02, atol=0)

turns = {
    "combined-speed": ("vanilla", three),
    "all-three-speed": ("vanilla", ada),
    "all-three-8bit-speed": (ada, eight),
}
for id, (before, after) in turns.items():
    compared = lab.compare(runs[before], runs[after]) if cuda else None
    display(claims.check(id, compared and compared.speed_ratio))

# %% [markdown]
# ### The guide's own table
#
# The guide opens with a table of seven methods: can the method improve speed, and can it reduce memory? Each cell of
# that table, a yes or a no, is one claim: a box below. The runs of the ladder decide most. (The seventh method,
# DeepSpeed ZeRO, divides a training's memory among several processes: lesson 16.) "(No)" in brackets means, in the guide's words,
# "usually either not a main concern or negligible".
#
# For the row on workers, the input is slow on purpose: loading one sample takes half the time of a step, so loading a
# batch of 4 takes the time of two steps.


# %%
def slow_input(task):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    model, batch = task.build_model().to(device), task.batch(4, device)

    class Slow(list):
        def __getitem__(self, index):
            time.sleep(pause)
            return index

    def seconds(batches):
        start = time.perf_counter()
        for _ in batches:
            model(**batch).loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(range(1))
    pause, pairs = seconds(range(4)) / 4 / 2, []
    for _ in range(3):
        none, two = (iter(torch.utils.data.DataLoader(Slow(range(20)), 4, num_workers=n)) for n in (0, 2))
        next(none), next(two)  # the workers have started
        pairs.append(seconds(none) / seconds(two))
    return pairs


# %% tags=["claim"]
slow = lab.run(slow_input, task=task.replace(seq_len=64), measure=("none",))
workers = lab.ratio(slow.value) if slow.ok else Ratio.unknown(slow.failure)
under = dict(zip(climb[1:], climb))
cells = {  # row of the guide's table: (speed: which run over which, memory: which run over which)
    "accumulation": (("accumulation alone", first), ("accumulation alone", first)),
    "checkpointing": (("checkpointing alone", first), ("checkpointing alone", first)),
    "half": (("+ half precision", first), ("+ half precision", first)),
    "batch": ((first, "micro-batch 1"), ("micro-batch 1", first)),
    "optimizer": (("+ fused AdamW", under.get("+ fused AdamW")), ("Adafactor alone", first)),
    "loader": (None, ("+ workers", under.get("+ workers"))),
}
predicted = products.step_speed if products else Ratio.unknown("the rung below may have tf32")
for row, (of_speed, of_memory) in cells.items():
    emulated = row == "half" and products and not products.usable
    lacking = f"needs 16-bit matmuls at a tenth of fp32's rate or more: {products}" if emulated else None
    of_rates = {"predicted": predicted} if row == "half" else {}
    speed = faster(*reversed(of_speed)) if of_speed else workers
    display(claims.check(f"table-{row}-speed", speed, missing=lacking, **of_rates))
    absent = [ran[x].failure if x in ran else f"no {x} here" for x in of_memory if x not in ran or not ran[x].ok]
    peaks = None if absent else ran[of_memory[0]].peak_bytes / ran[of_memory[1]].peak_bytes
    missing = lacking or "; ".join(absent) or None
    display(claims.check(f"table-{row}-memory", peaks, missing=missing))
for cell, claim in {"speed": "zero-slows-if-fits", "memory": "zero-saves"}.items():
    display(claims.check(f"table-zero-{cell}", note=f"one process has nothing to shard: lesson 16, {claim}"))

# %% [markdown]
# The claims on the speed and the memory of "batch size" go in two directions: a larger batch is faster, a smaller one
# takes less memory. And a yes means that some training gains, not that yours does.
#
# ## Explore
#
# The first picture shows two recipes above each other, moment by moment: which colours shrink, and which grow? The
# second one lists the recipes of one task (menu *runs of*). Choose a memory limit (*fits on*, *or MB*), and copy the
# arguments of a recipe that fits. A star marks a recipe that no other recipe beats in both memory and speed. Without
# live widgets you see a table, with *yes* under *best of both* instead of a star. (*+ larger batch* is listed once per
# size, including the one left out above.)
#
# - **On a CPU** this notebook's runs counted memory only, so they have no speed and no star. The ladder's speeds are
#   ratios from interleaved runs.
# - **On a GPU** the list also has speeds of single runs. They have no interval, so they do not say which recipe is
#   faster (lesson 03).

# %% tags=["widget"]
explorers.timeline(vanilla, runs["all + Adafactor"], *runs.values())
explorers.recipes(lab)

# %%
activations, states = (
    vanilla.memory.breakdown[kind] / vanilla.peak_bytes for kind in ("activations", "optimizer_states")
)
in_bf16 = lab.train("bf16 weights", task=task, dtype="bfloat16", measure="peak", **four)
tried = {
    "Adafactor": runs["Adafactor"],
    "accumulation with micro-batch 1": runs["accumulation"],
    "bf16 weights": in_bf16,
}
left = {name: run.peak_bytes / vanilla.peak_bytes for name, run in tried.items()}

# %%
reasons = {
    "Adafactor": "It shrinks only the optimizer's states",
    "accumulation with micro-batch 1": "A quarter of the activations stays, and gradients wait",
    "bf16 weights": "They halve weights, gradients, states and most activations, at a risk for learning",
}
options = {name: f"{reasons[name]}: measured here, {part:.0%} of the peak is left." for name, part in left.items()}
text = (
    f"Of vanilla's peak here, activations are {activations:.0%} and AdamW's states {states:.0%}. "
    "Which of these techniques alone saves the most?"
)
exercises.question(lab, "single", text, options, right=min(left, key=left.get))

# %%
text = "A recipe needs 17 GiB and the card has 16 GiB. What is the first thing to look at?"
options = {
    "a larger card": "It costs most, and a technique that shrinks the largest part often frees more than 1 GiB.",
    "the parts alive at its peak": "A technique helps only if the bytes that it removes are at the peak. Look, then choose.",
    "checkpointing": "It helps if the peak is activations. If the peak is in the optimizer update, it frees nothing.",
}
exercises.question(lab, "first look", text, options, right="the parts alive at its peak")

# %% [markdown]
# ## The advisor
#
# The advisor chooses for you: it runs the estimate for many recipes, without training any. It lists the recipes that
# fit, how fast each should be (relative to the fastest of them) and which measurement says so, and why a faster recipe
# does not fit. Put **your own model** in the place of `task`, for example `Task("bert-base")`, or `Task("...")` with the
# path of a config.json or of a model folder; and your card's memory in the place of `room`, for example
# `memory="16GB"`. (Here `room` is half of what the first vanilla took, on a GPU four fifths. The effective batch is 16,
# not 4. In the table, *2 x 8* is a micro-batch of 2, accumulated 8 times.) Afterwards the first recipe is trained for two
# steps, and its peak is compared with the prediction.

# %%
used = max(vanilla.peak_bytes, vanilla.memory.reserved_bytes or 0) + (vanilla.memory.context_bytes or 0)
room = int(used * (0.8 if cuda else 0.5))  # on a GPU the context takes its part, whatever the recipe
advice = lab.foresee(advise, task, memory=room, effective_batch=lab.sized(16, 4), most=lab.sized(3, 1), seconds=120)
display(advice)
advice and advice.recipes and lab.foresee(verify, advice, lab)

# %% [markdown]
# ## Your guesses
#
# How far off were your guesses, from the first lesson to this one? (Only guesses that you committed before the
# measurement count.)

# %%
guesses = learner_log.history(learner_log.of(lab).read())
if guesses:
    order = list(range(1, len(guesses) + 1))
    errors = {"your guesses": [100 * guess.error for guess in guesses]}
    _ = plots.lines(order, errors, "guess, in order", "off by (%)", title="Your intuition")
else:
    print("You have not committed a guess yet: each lesson has a slider above its experiment.")

# %% [markdown]
# ## On Monday
#
# Ask three questions in this order. If the answer is no, try the techniques of the last column from left to right, and
# stop as soon as the answer is yes, because every technique has a price.
#
# | question | how to find out | if not, try in this order |
# |---|---|---|
# | **Does it fit?** | estimate first: 16 bytes per parameter (fp32, AdamW) plus activations; then train two steps at the batch you want (the second one has the optimizer states) | smaller micro-batch with accumulation; half precision, if activations are the larger part; 8-bit Adam or Adafactor, if states are; checkpointing; then several devices or offload |
# | **Is it fast?** | measure samples/s in steady state, several times, interleaved; find where the time goes | half precision or tf32 if the hardware has it; fused attention; a larger micro-batch in the memory that is left; no checkpointing, if it fits without; DataLoader workers if the device waits; compile; then more devices |
# | **Does it learn?** | compare the loss with the fp32 AdamW baseline, several seeds, same samples | bf16 instead of fp16; a learning rate of its own for each optimizer and each effective batch; full-precision weights; one technique fewer |
#
# For speed, the guide would fill the memory to its limit; lesson 05 measures what that gains
# (`accumulation-fill-first`). For learning, no lesson can say which batch is best, because that depends on your data.
# So find the best batch first, and then make it fast.
#
# Keep two habits. Look at the peak's colours before you choose a technique. Measure after each change, one change at a
# time.
#
# ## Exercise
#
# Your card holds the share of vanilla's peak that is printed below. Which of the ten recipes fits and has the most
# samples/s? (On a CPU, use the V100's samples/s. The table above is rounded; `share` has the exact values.)

# %% jupyter={"source_hidden": true}
exercises.hint(
    "A recipe fits if its share is at most the limit: find these recipes in the table.",
    "Among these, look for the most samples per second. `speed_of` below returns it.",
)

# %% tags=["exercise"]
limit = sorted(filter(None, share.values()))[3]  # the four smallest fit
print(f"The card holds {limit:.1%} of vanilla's peak.")
answer = None  # the name of a recipe, as in the table


# %% tags=["check"]
def speed_of(name):
    speed = runs[name].samples_per_second if cuda else v100[name][2]
    return speed if plots.is_measured(speed) else 0.0  # the loop by hand was not timed


def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if answer not in share:
        return exercises.wrong(f"no recipe is called {answer!r}; there are: {', '.join(share)}")
    if share[answer] > limit:
        return exercises.wrong(f"{answer} takes {share[answer]:.0%} of vanilla's peak: it does not fit")
    if not any(map(speed_of, share)):
        return exercises.not_measured("no recipe was timed here")
    faster = [name for name, part in share.items() if part and part <= limit and speed_of(name) > speed_of(answer)]
    if faster:
        return exercises.wrong(f"{answer} fits, but so does one with more than {speed_of(answer):.4g} samples/s")
    return exercises.right(f"{answer}: {share[answer]:.0%} of the peak, {speed_of(answer):.4g} samples/s")


exercises.check(lab, "half the memory", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
fitting = [name for name, part in share.items() if part and part <= limit]
exercises.prove(check, solution=max(fitting, key=speed_of), mistake="half precision")

# %% [markdown]
# ## Final challenge
#
# Find the smallest peak at which this task still trains. The target is at most three quarters of the smallest peak of
# the ten. Your recipe may be slow, but its speed must be at least a small share of vanilla's: `at_least_speed` in the
# cell of the check. Keep the effective batch of 4. Your answer is a dict of training arguments; `dtype` and
# `attn_implementation` are allowed too. Every recipe that meets the target is ranked below.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "What is the largest part of the smallest bar of the ten? No technique of lessons 05 to 09 shrinks it.",
    "Weights and gradients are left. Their size is a number of parameters times bytes each.",
    "`dtype` sets the bytes of a weight, and a gradient has the type of its weight.",
)

# %% tags=["exercise"]
answer = None  # {"per_device_train_batch_size": ..., ...}

# %% tags=["check"]
target = {
    "limit_bytes": 0.75 * whole * min(filter(None, share.values())),
    "at_least_speed": 0.2 if cuda else 0.05,  # a slow host, a CPU that emulates half precision
}


def check(answer):
    return exercises.challenge(lab, "smallest", answer, baseline=vanilla, **target)


display(exercises.check(lab, "smallest", check, answer))
exercises.board(lab, "smallest")

# %% tags=["solution"] jupyter={"source_hidden": true}
# Weights and gradients are left. Half-precision weights have half-precision gradients, and need no copies.
# Whether it learns is another question: small updates are lost in bf16 weights (lesson 07).
emulated = cuda and not hardware.supports("sm80")[0]  # an older GPU has 16-bit matmuls for fp16 alone
smallest = saving | {"optim": "adafactor", "dtype": "float16" if emulated else "bfloat16"}
exercises.prove(check, solution=smallest, mistake=v100["all + Adafactor"][0])

# %% [markdown]
# ## Outgrowing one machine
#
# A **sweep** runs one training (a *row*) for each combination of a grid of values. None of the trainings needs another one's
# result, so they can run anywhere. `perf-helpers sweep FILE` reads the grid from a TOML file and distributes it to
# workers of [Dask](https://distributed.dask.org/en/latest/resources.html), one training at a time per device. Here
# there are two workers. Each is a process, which could run on another machine. Before you run the cell: how
# many rows will each worker train?

# %%
from perf_helpers import sweep

grid = {
    "task": {"model": "bert-tiny", "seq_len": 64},
    "measure": ["memory"],
    "grid": {"per_device_train_batch_size": [4, 16], "optim": ["adamw_torch", "adafactor"]},  # new
}
try:
    if lab.machine.rehearsed:
        raise ValueError("a rehearsal has no workers")
    with sweep.connected(workers=None if cuda else 2, tell=print) as team:  # None: one for each GPU
        found = sweep.run(Lab(profile, out=out, executor=team), grid, tell=print)
    display(found)
    remote = found.runs[0]
    local = lab.train("here", task=Task(**grid["task"]), measure="peak", **remote.arguments)
    print(
        f"The first row's peak: {remote.peak_bytes} bytes by {remote.attempts[-1]['worker']}, {local.peak_bytes} here."
    )
except ValueError as missing:
    print(f"No sweep here: {missing}")

# %% [markdown]
# A worker that is free takes the next row. Each run is stored in this lab's file, with its worker's machine and
# versions. A run that is already in the file is not trained again, so an interrupted sweep goes on. If a worker is
# killed, its row is tried once more on another worker.
#
# On a cluster of your own the grid file stays the same, and Dask's own deployments start the workers: dask-jobqueue for
# Slurm, dask-kubernetes, or `dask worker` over ssh. Then run `perf-helpers sweep FILE --scheduler ADDRESS` ([a few
# lines for each](../docs/sweeps.md#on-several-machines)). Watch for four things:
#
# - **one worker per GPU**: start it with `--resources "device=1"`, which each row requests; otherwise two rows share
#   one GPU;
# - **the same environment** on all machines: the sweep warns you about a worker that runs another version of torch;
# - **models** by names that mean the same on all machines, e.g. the course's presets such as `bert-tiny`, not paths
#   to local folders (results need no shared folder: the process that starts the sweep writes them);
# - **speed**: compare it only between equal machines.
#
# ## Recap
#
# - **All ten recipes** ran on this machine beside the V100's figures. With everything and Adafactor, about 30 % of
#   vanilla's peak was left (AMD EPYC and Intel Xeon, 2 cores each). A rung removed only what the rungs before it had
#   left. None of the ten removes fp32 weights and gradients, the dashed line. Weights in half precision do, at a risk
#   for learning.
# - **The ladder of speed** led from the guides' vanilla to the best recipe in no more memory, and named the rungs that
#   gained nothing here. The hardware decides what a rung gains: half precision trained 1.6 times as fast as fp32 on
#   an AMD EPYC (2026-11-29), and at 0.53 of fp32's speed when oneDNN (torch's library for bf16 matmuls on CPUs) was
#   limited to the instruction set AVX512_CORE, which has no bf16 instructions (2026-11-24).
# - **The guide's own table** was decided cell by cell on this machine. On an AMD EPYC one of its 14 cells was refuted:
#   half precision took 18 % off the peak, which the guide calls negligible.
# - **A grid of recipes** went to several workers. On a cluster only the workers change.

# %% tags=["finish"]
claims.finish()
