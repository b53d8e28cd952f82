# %% [markdown]
# # Can a training of 15 GB fit into 5?
#
# The 2023 guide ends with ten recipes on a V100. The first takes 14949 MB, the smallest 4847 MB, at the same speed.
#
# **You will see**
# - all ten recipes on this machine, beside the V100's figures;
# - which bytes each technique takes away, what it costs, and why their savings do not simply add up;
# - what no recipe of the ten can take away, and one that can.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display

from perf_helpers import Lab, Task, claims, exercises, explorers, hardware, journal, plots, widgets
from perf_helpers.advise import advise, verify
from perf_helpers.estimate import estimate

lab = Lab(profile, strict=strict, out=out, lesson="14_all_together")
cuda = lab.machine.kind == "cuda"

# %% [markdown]
# ## Idea
#
# Each technique of part II attacks some of the bytes that are alive at the peak (lesson 01), and pays in another coin.
#
# | technique | takes away | pays with | lesson |
# |---|---|---|---|
# | accumulation | activations (a smaller micro-batch) | small operations; gradients that wait | 05 |
# | checkpointing | activations within layers | a second forward pass | 06 |
# | mixed precision | up to half of the activations | a half-precision copy of the weights | 07 |
# | Adafactor | nearly all optimizer states | convergence, perhaps | 08 |
# | 8-bit Adam | three quarters of the states | rounding of the states | 09 |
#
# Two techniques that attack the same bytes do not save twice. And what nobody attacks remains: the weights, and the
# gradients that accumulation keeps.
#
# The guide opens with such a table, of which method improves speed and which memory. Its rows are decided where they
# are measured: batch size (both) in lesson 04; accumulation and checkpointing (memory) in 05 and 06; mixed precision
# (speed; memory "(No)", not a main concern) in 07; the optimizer (both) in 08 to 10; the DataLoader (speed) in 12; ZeRO
# (memory) in 16.
#
# ## Predict
#
# Micro-batch 1 with four accumulation steps, checkpointing, half precision and Adafactor, all at once.

# %%
widgets.predict(lab, "all together", "To how many percent of the vanilla peak does all of it lead?", "%", 0, 120)

# %% [markdown]
# ## The task
#
# On a GPU we take the profile's task. A CPU emulates half precision slowly, so there we take a miniature, and go by its
# memory, which is exact on any CPU. The miniature has bert-large's proportions: embeddings under 10 % of the parameters, and at batch 4 several times as many bytes of activations as of weights.

# %%
sizes = {"vocab_size": 200, "max_position_embeddings": 128}
task = lab.task if cuda else Task("bert-tiny", seq_len=128, config=sizes)
half = {"fp16": True} if cuda else {"bf16": True}  # on a CPU the Trainer ignores fp16 without a word
print(f"{lab.machine.name}: {task}, {task.parameters() / 1e6:.2f} M parameters")

# %% [markdown]
# ## By hand
#
# The last of the ten recipes has no Trainer: a loop of one's own with everything switched on (lesson 13 builds it line
# by line). Each line that carries a technique says which.


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
        if isinstance(module, torch.nn.Embedding):  # as the Trainer does: embeddings keep states of 32 bits
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
# Vanilla: micro-batch 4, fp32, AdamW. The other nine follow with the same effective batch of 4. MB and samples/s are
# the 2023 guide's, from a V100 with 16 GB and bert-large. Speeds of this machine stand beside them only if it has a
# GPU: those of a miniature on a CPU, which may emulate half precision, say nothing about the guide's.

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
vanilla = lab.train("vanilla", task=task, **four)
print(vanilla)

# %% [markdown]
# ## Change one thing, then everything

# %%
for name, (arguments, _, _) in list(v100.items())[1:]:
    if arguments is None:
        lab.run(loop, name, task=task, measure=("memory",))
    else:
        lab.train(name, task=task, **arguments)
runs = {name: lab[name] for name in v100}
failed = {name: run.message for name, run in runs.items() if not run.ok}
share = {name: run.peak_bytes / vanilla.peak_bytes for name, run in runs.items() if run.ok}
header = ["recipe", "peak here", "of vanilla", "V100", "of vanilla", "samples/s, V100", *["here"] * cuda]
rows = []
for name, (_, megabytes, speed) in v100.items():
    here = [plots.bytes_text(runs[name].peak_bytes), f"{share.get(name, float('nan')):.0%}"]
    speeds = [speed, *[runs[name].samples_per_second] * cuda]
    rows.append([name, *here, f"{megabytes} MB", f"{megabytes / 14949:.0%}", *speeds])
combined = v100["all + Adafactor"][0]
plain = v100["vanilla"][0]
said = lab.foresee(lambda: 100 * estimate(task, **combined).peak_bytes / estimate(task, **plain).peak_bytes)
display(widgets.revealed(lab, "all together", 100 * share["all + Adafactor"], estimate=said))
plots.Table(header, rows, f"Ten recipes: {lab.machine.name}, beside the guide's V100. Failed: {failed or 'none'}")

# %%
plots.memory(list(runs.values()), title="What is alive at the peak")
gap = max(abs(share[name] - v100[name][1] / 14949) for name in share)
print(f"Shares of vanilla, here and on the V100: at most {100 * gap:.0f} points apart.")

# %% [markdown]
# Compare the two "of vanilla" columns. They measure different things: the V100's megabytes are device-used memory, with
# 1343 MB of context in each row and whatever the allocator kept; ours are tensors alive at the peak.
#
# Now the colours. Accumulation and checkpointing shrink the activations, Adafactor and 8-bit Adam the states, and half
# precision brings a colour of its own, the copies. Accumulation also brings one back: gradients that wait are whole at
# the peak, where vanilla's had hardly begun. And the weights are the same in every bar.
#
# ## The ladder
#
# One technique more on each rung. How much a rung saves depends on what the rungs before it have left.

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
_ = ax.legend(frameon=False)

# %%
steps = {label: 100 * (share[before] - share[name]) for label, before, name in zip(labels[1:], rungs, rungs[1:])}
theirs = {label: (v100[a][1] - v100[b][1]) / 149.49 for label, a, b in zip(labels[1:], rungs, rungs[1:])}
said = [f"*{label}* {points:+.0f} (V100: {theirs[label]:+.0f})" for label, points in steps.items()]
lowest = min(100 * share[name] for name in rungs)
Markdown(
    f"Points of vanilla's peak that each rung takes away: {', '.join(said)}. The largest step here is "
    f"**{max(steps, key=steps.get)}**, on the V100 **{max(theirs, key=theirs.get)}**. "
    f"The lowest rung, {lowest:.0f} %, is {'above' if lowest > floor else 'below'} the dashed line at {floor:.0f} %."
)

# %% [markdown]
# A rung finds only what the rungs before it have left. Half precision stands late: the activations that it would halve
# are mostly gone, and it adds copies of the weights, so it takes little away, or adds. The dashed line is what nobody
# attacks: 8 bytes a parameter, for fp32 weights and the gradients that accumulation keeps.
#
# Did the loop by hand need what the Trainer needs?

# %%
mine, trainers = runs["Accelerate loop, all + 8-bit Adam"].peak_bytes, runs["all + 8-bit Adam"].peak_bytes
print(f"loop {plots.bytes_text(mine)}, Trainer {plots.bytes_text(trainers)}, ratio {mine / trainers:.4f}")
torch.testing.assert_close(mine, trainers, rtol=0.02, atol=0)

# %% [markdown]
# ## What held
#
# The guide says of three combinations what they save, and how fast they are. These are two statements each: memory is
# decided anywhere, speed on a GPU.

# %% tags=["claim"]
three, ada, eight = "accumulation + checkpointing + half", "all + Adafactor", "all + 8-bit Adam"
for id, name in {"combined-half-memory": three, "all-three-memory": ada, "all-three-8bit-memory": eight}.items():
    display(claims.check(id, share.get(name), missing=failed.get(name)))

# %% tags=["claim"]
turns = {
    "combined-speed": ("vanilla", three),
    "all-three-speed": ("vanilla", ada),
    "all-three-8bit-speed": (ada, eight),
}
for id, (before, after) in turns.items():
    compared = lab.compare(runs[before], runs[after]) if cuda else None
    display(claims.check(id, compared and compared.speed_ratio))

# %% [markdown]
# ## Explore
#
# Two recipes above each other, moment by moment: which colours shrink, and which grow?

# %% tags=["widget"]
explorers.timeline(vanilla, runs["all + Adafactor"], *runs.values())

# %% [markdown]
# And all of them as memory against speed: choose a limit, and paste the best that fits. (On a CPU, which may emulate half
# precision, the order by speed is another than on a GPU; and one run of each is no comparison: lesson 03.)

# %% tags=["widget"]
explorers.recipes(lab)

# %%
activations, states = (
    vanilla.memory.breakdown[kind] / vanilla.peak_bytes for kind in ("activations", "optimizer_states")
)
in_bf16 = lab.train("bf16 weights", task=task, dtype="bfloat16", measure=("memory",), **four)
tried = {
    "Adafactor": (runs["Adafactor"], "It attacks the optimizer's states alone"),
    "accumulation with micro-batch 1": (runs["accumulation"], "A quarter of the activations stays, gradients wait"),
    "bf16 weights": (
        in_bf16,
        "They halve weights, gradients, states and most activations, at a risk for what is learnt",
    ),
}
left = {name: run.peak_bytes / vanilla.peak_bytes for name, (run, _) in tried.items() if run.ok}
options = {name: f"{tried[name][1]}: measured here, {part:.0%} of the peak is left." for name, part in left.items()}
text = (
    f"Of vanilla's peak here, activations are {activations:.0%} and AdamW's states {states:.0%}. "
    "Which of these alone takes away the most?"
)
exercises.question(lab, "single", text, options, right=min(left, key=left.get))

# %%
text = "A recipe needs 17 GB and the card has 16. What is the first thing to look at?"
options = {
    "a larger card": "It costs most, and a technique that attacks the largest part often frees more than 1 GB.",
    "the parts alive at its peak": "A technique helps only if its bytes are at the peak. Look, then choose.",
    "checkpointing": "It helps if the peak is activations. If the peak is in the optimizer's step, it frees nothing.",
}
exercises.question(lab, "first look", text, options, right="the parts alive at its peak")

# %% [markdown]
# ## The advisor
#
# Looking, choosing and trying again can be left to the estimate: it says which recipes fit, how fast they are expected to
# be and from which measurement, and why a faster one does not fit. Put **your own model** in the place of `task`
# (a preset, a config.json, a model folder), and your card in the place of `memory`, as in `memory="16GB"`.

# %%
used = max(vanilla.peak_bytes, vanilla.memory.reserved_bytes or 0) + (vanilla.memory.context_bytes or 0)
room = int(used * (0.8 if cuda else 0.5))  # of a GPU the context takes its part, whatever the recipe
advice = lab.foresee(advise, task, memory=room, effective_batch=16, seconds=120)
advice

# %% [markdown]
# Is it true? The first recipe is trained for two steps, and the peak held against what was said.

# %%
advice and advice.recipes and lab.foresee(verify, advice, lab)

# %% [markdown]
# ## Your guesses
#
# How far off were you, from the first lesson to this one? (Only guesses committed before the measurement count.)

# %%
guesses = journal.history(journal.of(lab).read())
if guesses:
    order = list(range(1, len(guesses) + 1))
    errors = {"your guesses": [100 * guess.error for guess in guesses]}
    _ = plots.lines(order, errors, "guess, in order", "off by (%)", title="Your intuition")
else:
    print("No guess was committed yet: a slider above each experiment takes one.")

# %% [markdown]
# ## On Monday
#
# Three questions, in this order. Stop as soon as the answer is yes: every technique has a price.
#
# | question | how to find out | if not, try in this order |
# |---|---|---|
# | **Does it fit?** | two steps at the batch you want (the second has the states); before that, 16 bytes a parameter for fp32 with AdamW, and activations | smaller micro-batch with accumulation; half precision, if activations are the larger part; 8-bit Adam or Adafactor, if states are; checkpointing; then several devices or offload |
# | **Is it fast?** | samples/s in steady state, several turns; where the time goes | half precision or tf32 where the hardware has it; fused attention; a larger micro-batch in the memory that is left; no checkpointing, if it fits without; DataLoader workers if the device waits; compile; then more devices |
# | **Does it learn?** | loss against the fp32 AdamW baseline, several seeds, same samples | bf16 in place of fp16; a learning rate of its own for each optimizer and each effective batch; full-precision weights; one technique fewer |
#
# The last two are the guide's two goals. For speed it would fill the memory to its limit; lesson 05 measures what that
# brings (`accumulation-fill-first`). For what is learnt no lesson can say which batch is best: that depends on your data,
# so find it first, and then make it fast.
#
# Two habits. Look at the peak's colours before choosing: a technique helps only if its bytes are at the peak. And
# measure after each change, one change at a time, as the ladder does.

# %% [markdown]
# ## Exercise
#
# Your card holds the share of vanilla's peak that is printed below. Which recipe of the ten fits and has the most
# samples/s? (On a CPU, go by the V100's samples/s.)

# %%
exercises.hint(
    "Only recipes with a share of at most the limit fit: read them off the table.",
    "Among those, look for the highest samples per second. `speed_of` below tells it.",
)

# %% tags=["exercise"]
limit = sorted(share.values())[3]  # the four smallest fit
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
    faster = [name for name in share if share[name] <= limit and speed_of(name) > speed_of(answer)]
    if faster:
        return exercises.wrong(f"{answer} fits, but so does one with more than {speed_of(answer):.4g} samples/s")
    return exercises.right(f"{answer}: {share[answer]:.0%} of the peak, {speed_of(answer):.4g} samples/s")


exercises.check(lab, "half the memory", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
fitting = [name for name in share if share[name] <= limit]
exercises.prove(check, solution=max(fitting, key=speed_of), mistake="half precision")

# %% [markdown]
# ## Final challenge
#
# The smallest peak at which this task still trains: at most three quarters of the smallest of the ten, at no less than the
# share of vanilla's speed that the check prints. Keep the effective batch of 4. Your answer is a dict of training
# arguments; `dtype` and `attn_implementation` are allowed too. Every recipe that meets the target is ranked below.

# %%
exercises.hint(
    "What is the largest part of the smallest bar of the ten? No technique of part II attacks it.",
    "Weights and gradients are left. Their size is a number of parameters times bytes each.",
    "`dtype` sets the bytes of a weight, and a gradient has the type of its weight.",
)

# %% tags=["exercise"]
answer = None  # {"per_device_train_batch_size": ..., ...}


# %% tags=["check"]
target = {
    "limit_bytes": 0.75 * min(run.peak_bytes for run in runs.values() if run.ok),
    "at_least_speed": 0.2 if cuda else 0.05,  # a slow host, a CPU that emulates half precision
}


def check(answer):
    return exercises.challenge(lab, "smallest", answer, baseline=vanilla, **target)


display(exercises.check(lab, "smallest", check, answer))
exercises.board(lab, "smallest")

# %% tags=["solution"] jupyter={"source_hidden": true}
# What is left is weights and gradients. Half-precision weights have half-precision gradients, and need no copies.
# Whether it learns is another question: small updates are lost in bf16 weights (lesson 07).
emulated = cuda and not hardware.supports("sm80")[0]  # an older GPU has 16-bit products for fp16 alone
smallest = saving | {"optim": "adafactor", "dtype": "float16" if emulated else "bfloat16"}
exercises.prove(check, solution=smallest, mistake=v100["all + Adafactor"][0])

# %% [markdown]
# ## Recap
#
# - All ten recipes ran on this machine, and their shares of vanilla's peak stood beside the V100's.
# - Each technique took away bytes of one colour and paid in another coin; a rung of the ladder saved what the rungs
#   before it had left.
# - fp32 weights and gradients, the dashed line, are what none of the ten attacks; weights in half precision do, at a risk
#   for learning.

# %% tags=["finish"]
claims.finish(lab)
