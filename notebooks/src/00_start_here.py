# %% [markdown]
# # What will my machine let me do?
#
# You have one machine, and guides full of advice that was measured on other machines. Which advice can you check here, and which of it is true here?
#
# Welcome. Plan 20 minutes for this lesson (the cells compute for about 1 of them), and another 10 for the two exercises at its end. You need to have trained a model once, no more. It needs no GPU: a claim that a CPU cannot decide is listed as *not testable here*. Run the cells one after the other (Shift + Enter), or all of them (menu *Run*, *Run All Cells*).
#
# **You will see**
# - what this machine has, and how many of the guides' statements it can put to the test
# - one experiment from end to end, in a process of its own that leaves nothing behind
# - a run, a comparison, a claim and a verdict: everything that a scoreboard is made of

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import gc
import os
import tempfile
from collections import Counter

import matplotlib.pyplot as plt
import numpy as np
import psutil
import torch

from perf_helpers import Claims, Lab, Task, doctor, exercises, hardware, plots, widgets
from perf_helpers.course.ledger import decide, load
from perf_helpers.lab import PROFILES
from trainmem.estimate import estimate

lab = Lab(profile, strict=strict, out=out, lesson="00_start_here")
claims = Claims(lab)
lab.task = lab.task.replace(seq_len=lab.task.seq_len // 2)  # half the length of the other lessons: a quick start

# %% [markdown]
# ## Idea
#
# Two guides of Hugging Face, from 2022 and 2023, say how to fit larger models into memory and train them faster. They give many figures, most of them taken on one GPU, a V100. Do they hold on *your* machine, with *your* versions? This course does not tell you. It measures, and you watch.
#
# Five words are enough to follow the course:
#
# - a **task** is a model with its data and sizes
# - an **experiment** trains a task under given arguments, or calls a function of yours
# - a **run** is the stored result of one experiment: what was measured, or why it failed
# - a **claim** is one statement of the guides, with the number that decides it
# - a **verdict** is what the measured number makes of the claim
#
# The text calls `lab` *the lab*: the object that runs experiments and stores their runs. All arguments of an experiment together are its *recipe*. You need not change `profile`, `strict` or `out` in the first code cell. Other terms are in [the glossary](../docs/words.md).
#
# ## Predict
#
# Each lesson asks you for a number before it shows one: being wrong first is how an intuition grows. Further down, a model is trained with a batch of 4 sequences, then with a batch of 8. Move the slider or type a number, and commit it.

# %%
question = "What is the peak memory of batch 8, in percent of that of batch 4?"
widgets.predict(lab, "batch", question, "%", 50, 300)

# %% [markdown]
# ## Your machine
#
# `doctor.diagnose` checks the device, its memory, the number formats that the device computes in, and the packages. (*fp32* has 32 bits per number, *fp16* and *bf16* have 16.) The command `perf-helpers doctor` prints the same in a terminal. Only a ✗ keeps lessons from running.

# %%
signs = {"ok": "✓", "note": "·", "warning": "!", "error": "✗"}
findings = doctor.diagnose(lab.machine)
rows = [[f"{signs[found.level]} {found.level}", found.subject, found.text, found.remedy] for found in findings]
plots.Table(["", "about", "what was found", "what to do"], rows, caption=lab.machine.name)

# %% [markdown]
# An experiment should take seconds on every machine, and a model that keeps a CPU busy is too small to show anything on a large card. So the sizes come in three **profiles**. `auto` picks `gpu` if the GPU has at least 20 GB of memory, `t4` if it has less, as Colab's T4 has, and `cpu` if torch can use no GPU. This lesson trains on sequences half as long as those in the table. (If a cell of a later lesson says `lab.sized(512, 64)`, read 512: the second value is for quick tests of the course itself.)

# %%
rows = []
for name, each in PROFILES.items():
    millions = each.task.parameters() / 1e6
    sizes = [each.task.model, f"{millions:.0f} M", each.task.seq_len, each.micro_batch]
    rows.append(["→ this one" if name == lab.profile.name else "", name, *sizes])
plots.Table(["", "profile", "model", "parameters", "tokens in a sequence", "batch"], rows)

# %% [markdown]
# And the question in the title: how many claims can be decided here? The others say what they would need. No lesson pretends: it reports "not testable here" and goes on.

# %%
needs = Counter(hardware.supports(claim.where)[1] or "can be decided here" for claim in load().values())
plots.Table(["claims", "on this machine"], [[count, reason] for reason, count in needs.most_common()])

# %% [markdown]
# ## By hand: what does a model weigh?
#
# One claim to start with: *in fp32, weights take 4 bytes per parameter.* A model is a collection of tensors, and a tensor knows how many numbers it has and how many bytes each one takes. On torch's `meta` device it has shapes and no numbers, so even a large model can be weighed at no cost.


# %%
def weigh(task):
    parameters = list(task.build_model(device="meta").parameters())
    count = sum(parameter.numel() for parameter in parameters)
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return [len(parameters), count, size]


by_hand = {task.model: weigh(task) for task in (lab.task, Task("bert-large-uncased"))}
rows = [[model, tensors, f"{count:,}", plots.bytes_text(size)] for model, (tensors, count, size) in by_hand.items()]
plots.Table(["model", "tensors", "parameters", "bytes"], rows)

# %% [markdown]
# bert-large is the guides' model. For this model the 2023 guide gives 1288 MB on a V100: the memory in use on the whole card with the model on it, minus the memory in use before, with 1 MB = 2^20 bytes. That is 1.35 GB in this course's units, where 1 MB = 10^6 bytes: within 1 % of the last row of the table.
#
# ## A fresh process
#
# You may have learnt to restart the kernel (the notebook's Python process) between two experiments, because otherwise the memory of the first is still taken when the second starts. The 2023 guide says so too. Here **each experiment runs in a process of its own**, which ends with it. Let us try to break that: one experiment hoards 400 MB and frees nothing, the next one looks for them.


# %%
def look(task):
    return [os.getpid(), round(psutil.Process().memory_info().rss / 1e6), hasattr(torch, "hoard")]


def hoard(task):
    torch.hoard = torch.ones(100_000_000)  # 400 MB, held by the module itself: nobody will free it
    return look(task)


rows = [["this notebook", *look(None)]]
for name, function in (("the hoarder", hoard), ("the next experiment", look)):
    rows.append([name, *lab.run(function, name, measure="value").value])
if len({row[1] for row in rows}) < 3 or rows[-1][-1]:
    raise RuntimeError(f"an experiment found what another one left: {rows}")
plots.Table(["who looks", "process id", "resident memory, MB", "sees the hoard"], rows)

# %% [markdown]
# Three process ids, and one process that sees the hoard: the one that made it. `lab.run` sent a function written in this notebook to a fresh process, called it there, and returned its result as the run's `value`. `measure` says what to measure meanwhile: memory, time, or only this value. *Resident memory* is what the system has given to a process. An experiment starts with torch and transformers loaded, hence not at 0.
#
# Was a restart ever *needed*? A tensor lives as long as something refers to it. The next cells test the guide's case: a process trains a model, deletes the Trainer, and does not end. They count the bytes of all live tensors twice: while the Trainer exists, and after it is deleted. The guide's claim, that a restart is needed, holds if more than 1 % of these bytes are left. The second cell prints the first verdict; *What held*, further down, explains such a box line by line.


# %%
def live_bytes():
    """Return the bytes of all tensors that Python knows of, with shared memory counted once."""
    storages = [thing.untyped_storage() for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def train_and_delete(task):
    from transformers import PrinterCallback, Trainer, TrainingArguments

    before = live_bytes()
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=1, **quiet)
    arguments._n_gpu = min(1, arguments.n_gpu)  # one GPU is enough
    trainer = Trainer(task.build_model(), arguments, train_dataset=task.dataset())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    held = live_bytes() - before
    del trainer
    gc.collect()  # objects that refer to each other are found by this
    return held, live_bytes() - before


# %% tags=["claim"]
held, left = lab.run(train_and_delete, task=lab.task.replace(seq_len=32), measure="value").value
note = f"{plots.bytes_text(held)} with its Trainer, {plots.bytes_text(left)} without"
claims.check("restart-needed", left / held, note=note)

# %% [markdown]
# (The line *why* also mentions GPUs. The *CUDA context* is what CUDA itself keeps on the GPU for each process. *cuBLAS* is CUDA's library for matrix multiplications.)
#
# In a notebook something often does refer to the Trainer: a variable of the cell before, the last output, the traceback of a failure. Then the memory stays taken until you clear that reference or restart the kernel.
#
# And a failure can be worse than a traceback: when memory runs out, the system often kills the process. Here an experiment kills its own process:

# %%
lab.run(lambda task: os.kill(os.getpid(), 9), "killed on purpose", measure="value")

# %% [markdown]
# The next cell is the first one that begins with `%%sealed`. Such a cell holds a question with its key, hints, a solution, or code that would give an answer away. Run it like any other. Hints open one by one, and a solution or code can be unfolded below its cell.

# %%
exercises.question(
    lab,
    "restart",
    "An experiment has run out of memory. What do you do before the next one?",
    {
        "restart the kernel": "That helps where experiments live in the notebook's own process. This one had a process of "
        "its own, and what it held went with it.",
        "`gc.collect()` and `torch.cuda.empty_cache()`": "Both act on the notebook's process, which never held the "
        "experiment's tensors.",
        "nothing": "The system takes back all that a process held when it ends, however it ended. The next experiment "
        "starts from the same state as the first.",
    },
    right="nothing",
)

# %% [markdown]
# The notebook is alive, and the failure is a run like any other, with a status and a reason. **You never need to restart the kernel**, and there is no variable, output or traceback to clear: what an experiment holds ends with its process.
#
# ## Baseline
#
# Now a real experiment: `lab.train` hands the lab's task and your arguments to transformers' `Trainer`. The arguments are those of `TrainingArguments`; a misspelt one is refused with the nearest valid name. Weights and data are random, so nothing is downloaded: they take the same bytes and the same time as real ones.

# %%
small = lab.train("batch 4", per_device_train_batch_size=4)
small

# %% [markdown]
# A run in one line: its name, whether it went well, the most memory that was in use at any moment, and the samples (here: sequences) trained per second. **Counted** memory (on a GPU: **allocated**) is the bytes of the live tensors: the same, to the byte, each time you run it. Time is another matter; more below.
#
# ## Change one thing
#
# One argument differs. In each lesson such lines are marked `# new`.

# %%
large = lab.train("batch 8", per_device_train_batch_size=8)  # new
comparison = lab.compare(small, large, turns=4)
comparison

# %% [markdown]
# `lab.compare` sets two runs side by side. Below them are the ratios, the second run divided by the first (1.00: no difference).
#
# - The memory ratio is exact.
# - The speed ratio comes with an **interval**, in brackets: the lab ran the two recipes once more, interleaved (a step of one, a step of the other, and so on; `turns` sets how often), and the interval shows how much such ratios vary.
# - On a CPU the speed ratio is given twice. *CPU time* counts only the seconds that the run computed, and it decides the claims. *Wall clock* also counts the waiting while other programs use the cores.

# %%
exercises.question(
    lab,
    "interval",
    "Somewhere else, batch 8 comes out at 1.05 (0.90 to 1.22) x the speed of batch 4. Which is faster?",
    {
        "batch 8, by 5 %": "1.05 is the best single guess, and a weak one: another interleaved run might as well have "
        "given 0.95. The interval says how far such numbers vary.",
        "that cannot be told": "The interval contains 1, so either may be the faster one. More interleaved steps or a quieter machine "
        "make it narrower.",
        "neither, they are equally fast": "That would be a finding too, and it needs a narrow interval around 1. This one "
        "also has room for a fifth more speed.",
    },
    right="that cannot be told",
)

# %% [markdown]
# If an interval contains 1, nobody can say which of the two is faster: the effect is *too small to tell*. On a busy CPU many effects are. Lesson 03 is about that.
#
# And your guess? The next cell shows it beside the measured value, with an *estimate*: the lab goes through a training step with tensors that have shapes but no contents, and adds up the bytes that they would take. It trains nothing. (`lab.foresee` requests the estimate. If there is none, it says so in one line and the lesson goes on.)


# %%
def in_percent():
    four, eight = (estimate(lab.task, per_device_train_batch_size=batch).peak_bytes for batch in (4, 8))
    return 100 * eight / four


widgets.revealed(lab, "batch", 100 * comparison.memory_ratio, estimate=lab.foresee(in_percent))

# %%
_ = plots.memory([small, large])

# %% [markdown]
# Twice the batch does not take 200 % of the memory. **Activations**, what the forward pass keeps for the backward pass, belong to the samples and double with them. Weights, and the two **optimizer states** that AdamW keeps for each of them, belong to the model: they are the same at any batch size. **Gradients** belong to the model, too; their bar may be short, because at the moment of the peak most of them may not exist yet. **Temporaries** are intermediate results that are freed soon after they are made. Lesson 01 takes all of this apart.
#
# ## What held
#
# The lab counted the weights of the running experiment, with no knowledge of our count by hand. The two counts must agree; the next cell checks that. But the lab's model has random weights, and you would load yours with `from_pretrained`, as the guides do. So the claim is decided by a model that was saved and loaded again.


# %%
def loaded(task):
    """Return {dtype of the checkpoint: bytes per parameter after from_pretrained}."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    found, model = {}, task.build_model()
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with tempfile.TemporaryDirectory() as checkpoint:
            model.to(dtype).save_pretrained(checkpoint)
            parameters = list(type(model).from_pretrained(checkpoint).parameters())  # without a dtype argument
        found[name] = sum(each.nbytes for each in parameters) / sum(each.numel() for each in parameters)
    return found


# %% tags=["claim"]
torch.testing.assert_close(small.memory.breakdown["weights"], by_hand[lab.task.model][-1], rtol=0.01, atol=0)
cost = lab.run(loaded, measure="value").value
claims.check("weights-cost", cost["fp32"], note=f"from a checkpoint in bf16: {cost['bf16']:g} B")

# %% [markdown]
# (The lab may have a few bytes more than our count: tables of position numbers, which are no parameters; on a GPU also the rounding of each tensor to 512 bytes.) The note under the claim is news since the guides: transformers 5 keeps the dtype of the checkpoint; older versions turned every checkpoint into fp32. So a model published in 16 bits is trained in 16 bits, unless you say `dtype=torch.float32`.
#
# The box with the ✓ or ✗ above is a **verdict**. Its line *measured* has the number from this machine, and *quantity* says how the number is computed (`/` is a division). *holds if* is the rule, *guide* is what the guide measured elsewhere, and *why* gives the reason if a claim does not hold. The text after *since* names the version that changed this, or the cases in which the reason is known to apply. There are five verdicts. (Both claims of this lesson measure a single number without an interval; it counts as an interval whose two ends are equal.)
#
# | | verdict | it means |
# |---|---|---|
# | ✓ | holds | the number, with its whole interval, satisfies the rule |
# | ↓ | smaller than promised | the effect is there, but too small: the whole interval is between *no effect* and the rule's limit |
# | ✗ | refuted | the whole interval lies where the claim is wrong: a finding, and the box says why |
# | ≈ | too small to tell | the interval reaches from one of the cases above into another: this measurement cannot decide |
# | – | not testable here | something is missing, and it is named |
#
# A claim that does not hold is no failure of yours. Guides age and libraries change; this course is for noticing that.
#
# ## Explore
#
# This picture shows how a verdict comes about, with invented numbers. Take the claim that gradient accumulation saves memory. The measured value is the peak with accumulation divided by the peak without: 1 is no effect, and the rule asks for a value clearly below 1. Move the measured value and the width of its interval. (The figures are not from your machine; lesson 05 measures them.)

# %% tags=["widget"]
claim = load()["accumulation-memory"]


def draw(measured, give_or_take):
    low, high = measured - give_or_take, measured + give_or_take
    _, ax = plt.subplots(figsize=(7.5, 2), layout="constrained")
    grid = np.linspace(0.5, 1.3, 801)
    verdicts = [decide(claim, float(value), True) for value in grid]
    for verdict, colour in zip(dict.fromkeys(verdicts), (2, 6, 1)):
        matches = [each == verdict for each in verdicts]
        ax.fill_between(grid, -1, 1.2, where=matches, color=plots.SERIES[colour], alpha=0.2, linewidth=0)
        ax.text(grid[matches].mean(), 0.7, verdict.replace(" than", "\nthan"), ha="center", va="center", fontsize=10)
    ax.plot([low, high], [0, 0], color="black", linewidth=3)
    ax.plot([measured], [0], "o", color="black", markersize=9)
    ax.set(xlim=(0.5, 1.3), ylim=(-1, 1.2), yticks=[], xlabel="peak memory with accumulation / without")
    ax.set_title(f"{measured:.2f} ({low:.2f} to {high:.2f}): {decide(claim, (low, high), True)}", loc="left")
    return ax


_ = widgets.explore(draw, measured=[0.7, 0.8, 0.85, 0.95, 1.05, 1.1], give_or_take=[0.03, 0.1, 0.15])

# %% [markdown]
# ## Exercise 1: the largest batch (challenge)
#
# The sealed cell below sets `limit`, a memory limit between the peak of batch 4 and that of batch 8. Find a batch size that stays within it and uses at least 90 % of it. Predict it from the two runs you have, then try: the check trains with your batch size.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "From batch 4 to batch 8 the peak grows by the same bytes with each sample.",
    "How many samples more than 4 can be paid with `limit - small.peak_bytes`?",
    "A sample costs `(large.peak_bytes - small.peak_bytes) / 4`. Samples come whole: round down.",
)

# %% jupyter={"source_hidden": true}
limit = small.peak_bytes + 0.65 * (large.peak_bytes - small.peak_bytes)

# %% tags=["exercise"]
print(f"batch 4: {small.peak_bytes:,} bytes\nlimit:   {limit:,.0f} bytes\nbatch 8: {large.peak_bytes:,} bytes")

answer = None  # a whole number

# %% tags=["check"]
tried = {4: small, 8: large}


def check(batch):
    if batch is None:
        return exercises.not_attempted()
    if batch not in tried:  # once is enough: counted memory does not vary
        tried[batch] = lab.train(f"batch {batch}", per_device_train_batch_size=batch, measure="memory")
    run = tried[batch]
    if not run.ok:
        return exercises.run_failed(run)
    used = run.peak_bytes / limit
    if used > 1:
        return exercises.wrong(f"batch {batch} takes {used:.0%} of the limit: more than there is")
    if used < 0.9:
        return exercises.wrong(f"batch {batch} fits, but takes only {used:.0%} of the limit: there is room for more")
    return exercises.right(f"batch {batch} takes {used:.1%} of the limit")


exercises.check(lab, "largest-batch", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
# From 4 to 8 the peak grows by the same amount with each sample. 65 % of the way is 4 + 0.65 * 4 = 6.6 samples, so 6.
exercises.prove(check, solution=6, mistake=8)

# %% [markdown]
# ## Exercise 2: read a scoreboard
#
# Five claims with invented measurements, each from another machine. Which verdict does each get? The last machine is a laptop without a GPU. The table that the exercise's cell prints shows each rule: not every rule names a value that means *no effect*. (The last two claims are measured in MiB of a GPU's memory; 1 MiB is 2^20 bytes.)

# %% jupyter={"source_hidden": true}
exercises.hint(
    "The verdict looks at both ends of an interval, not at its middle. A number alone is an interval of no width.",
    "Both ends satisfy the rule: holds. Both ends are between the rule's limit and no effect: smaller than promised. "
    "The two ends would get different verdicts: too small to tell.",
    "If nothing was measured, there is nothing to decide. The table of verdicts has a row for that, too.",
)

# %% tags=["exercise"]
answer = None  # a list of five verdicts, such as ["holds", "holds", "holds", "holds", "holds"]

ledger = load()
cases = {
    "accumulation-memory": 0.71,
    "accumulation-cost": (0.60, 0.96),
    "states-adafactor": 0.02,
    "first-tensor-cost": 400,
    "context-cost": None,
}
rows = [[ledger[id].says, ledger[id].threshold_text(), value] for id, value in cases.items()]
plots.Table(["the claim", "holds if", "measured"], rows)


# %% tags=["check"]
def check(verdicts):
    if verdicts is None:
        return exercises.not_attempted()
    if len(verdicts) != len(cases):
        return exercises.wrong(f"{len(cases)} claims need {len(cases)} verdicts; your list has {len(verdicts)}")
    for (id, value), answered in zip(cases.items(), verdicts):
        verdict = decide(ledger[id], value, value is not None)
        if answered != verdict:
            return exercises.wrong(f"{id}: {answered!r}? It holds if {ledger[id].threshold_text()}; measured: {value}")
    return exercises.right("you can read every scoreboard of the course")


exercises.check(lab, "verdicts", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
# The middle of 0.60 to 0.96 is inside the rule, and still nobody knows: an end reaches outside. 400 MiB are between the
# rule and no effect. The claim on Adafactor is about a size alone, without a "no effect": outside of it is refuted.
verdicts = ["holds", "too small to tell", "refuted", "smaller than promised", "not testable here"]
exercises.prove(check, solution=verdicts, mistake=["holds", "holds", "refuted", "refuted", "not testable here"])

# %% [markdown]
# ## How far you are
#
# The course remembers your guesses, answers and results, in a file on this machine and nowhere else. Come back after any lesson and run the next cell again.

# %%
widgets.progress(lab)

# %% [markdown]
# ## Recap
#
# - You saw what this machine has, and how many of the guides' statements it can put to the test. In fp32 each parameter takes 4 bytes, as the guides say.
# - One experiment went from end to end, in a process of its own that left nothing behind. A hoarder and a killed process left nothing behind either.
# - You met a run, a comparison, a claim and two of the 5 verdicts. An interval that contains 1 means *too small to tell*.
#
# The cell below closes the lesson, as it closes each one. Its **scoreboard** has a row for each claim: the verdict, what the guides say, what was measured *here* and what was measured *there*. It names the machine, the versions and the date, without which no figure is worth much. A source such as *2024 index* is the overview page of transformers' documentation in that year; [the bibliography](BIBLIOGRAPHY.md) has all sources. Above that cell each lesson lists what recorded runs measured. (A machine *held to AVX512_CORE* was allowed no newer vector instructions than these, as if its CPU were an older one.) `perf-helpers course` runs all lessons and puts their scoreboards on one page.
#
# Next: the 2023 guide trained a model whose weights take 1.3 GB, and then 15 GB of its GPU were in use. Lesson 01 asks what filled them.

# %% tags=["finish"]
claims.finish()
