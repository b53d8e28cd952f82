# %% [markdown]
# # What is the baseline, exactly?
#
# A colleague reports that a flag made training 10 % faster. Faster than what, and would the same code have been 10 % faster than itself? Every claim of this course compares something with *vanilla training*: fp32, AdamW, a batch of 4, nothing switched on. Before you trust a comparison, know exactly which training is the baseline, and how much its own time varies.
#
# **You will see**
# - all that `lab.train` does, in ten lines of Trainer and in a plain PyTorch loop: their losses are equal, and the small difference in memory is explained
# - which of the guides' own lines still run today
# - how many times the weights' bytes a vanilla training takes
# - how much the time of one and the same code varies, and what follows from that for "it is faster"
#
# **Time:** plan 40 minutes with the code and the exercises: a quarter of an hour of reading, one to five minutes of computing on two CPU cores. **Before this:** lesson 00. **Not on a CPU:** two of the guides' lines, those with `bf16=True` and `tf32=True`, need a GPU.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from functools import partial
from importlib.metadata import version

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import display
from torch.utils.data import DataLoader, RandomSampler

from perf_helpers import Claims, Lab, Task, exercises, monitor, plots, widgets
from perf_helpers.lab.lab import PROCESSES
from trainmem.estimate import estimate

lab = Lab(profile, strict=strict, out=out, lesson="03_vanilla_training")
claims = Claims(lab)
# The same model; on a CPU half of it and short sequences, so that many repeats take little time.
half = {"num_hidden_layers": 2, "vocab_size": 4000}
short = lab.task.replace(seq_len=64, config=half) if lab.machine.kind == "cpu" else lab.task

# %% [markdown]
# ## Idea
#
# A measurement has two sides. You must know *what* was measured, to the last line; otherwise a difference may come from something that you did not see. You must also know *how much it varies*; otherwise any difference looks like an effect.
#
# Counted memory does not vary. Losses with the same seed do not vary either, except in their last digits on a GPU. So two trainings can be compared almost bit by bit. Time always varies. This lesson treats memory and losses as exact, and gives time an interval.
#
# ## Predict
#
# Put a number first; a guess that turns out wrong is what you will remember.

# %%
widgets.predict(
    lab,
    "vanilla peak",
    f"Vanilla training of {lab.task.model} on {lab.task.seq_len} tokens, 4 samples per step: how many times the bytes of "
    "its weights will it take at the peak?",
    "times",
    1,
    20,
)

# %% [markdown]
# ## By hand: ten lines of Trainer
#
# This is `lab.train` reduced to its core: a model with random weights, random data, transformers' `Trainer` with its defaults. Around it the lab adds a fresh process and a meter, and suppresses the output. Most cells train `short`: on a CPU a smaller version of the lab's task (two layers, 64 tokens), on a GPU that task itself.

# %%
STEPS, BATCH = 5, 4


def ten_lines(task, steps=STEPS):
    from transformers import PrinterCallback, Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, max_steps=steps, seed=0, logging_steps=1, **quiet
        )
        arguments._n_gpu = min(1, arguments.n_gpu)  # several would train one batch each (DataParallel, lesson 15)
        trainer = Trainer(task.build_model(), arguments, train_dataset=task.dataset())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


from_lab = lab.train("lab.train", task=short, per_device_train_batch_size=BATCH, max_steps=STEPS)
from_trainer = lab.run(ten_lines, task=short, measure="value").value
torch.testing.assert_close(from_trainer, list(from_lab.losses), rtol=0, atol=1e-3)

# %% [markdown]
# ## By hand: a plain loop
#
# What does the Trainer do by default? Five things are easily forgotten, and each can change the losses:
#
# - **two random generators**, both with the Trainer's seed (here 0). One draws the order of the data. Dropout uses the other one, torch's global generator, which the Trainer seeds again once the model is built.
# - **clipping.** The Trainer computes one norm of all gradients together. If it is above 1, all gradients are multiplied by the same factor, so that the norm becomes 1.
# - **AdamW, fused**, at a learning rate of 5e-5. The weight decay is 0 by default.
# - **a schedule.** The learning rate falls along a line, to 0 after the last step.
# - **the calls of a step**, in this order: backward, clip, step, schedule, zero.
#
# Later cells change the loop's options: `order` (the seed of the data's order), `rate` (the learning rate), `falling` (whether it falls), `clear` (whether gradients are zeroed) and `fetch` (how batches are fetched). With the defaults the loop does the same as the Trainer.


# %%
def plain_loop(task, steps=STEPS, *, order=0, rate=5e-5, falling=True, clear=True, fetch=iter):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, data = task.build_model().to(device), task.dataset()
    torch.manual_seed(0)  # dropout starts here
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(order))
    batches = fetch(DataLoader(data, batch_size=BATCH, sampler=sampler))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: (steps - done) / steps if falling else 1.0)
    losses, clocks = [], [(time.perf_counter(), time.process_time())]
    for _ in range(steps):
        batch = {name: tensor.to(device) for name, tensor in next(batches).items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if clear:
            optimizer.zero_grad()
        losses.append(loss.item())  # this waits for the device, so the clock tells the truth
        clocks.append((time.perf_counter(), time.process_time()))  # the time that passed, and the time computed
    return {"losses": losses, "seconds": np.diff(clocks, axis=0).T.tolist()}


# %%
from_loop = lab.run(plain_loop, task=short, measure="none").value["losses"]
rows = list(zip(range(1, STEPS + 1), from_lab.losses, from_trainer, from_loop))
apart = max(abs(loss - row[1]) for row in rows for loss in row[2:])
torch.testing.assert_close(from_loop, list(from_lab.losses), rtol=0, atol=1e-3)
caption = f"largest difference: {apart:g}"
plots.Table(
    ["step", "lab.train", "ten lines", "plain loop"],
    [[row[0], *map("{:.7f}".format, row[1:])] for row in rows],
    caption,
)

# %% [markdown]
# The cells accept differences up to 0.001; the line above the table gives the largest one. On one CPU it is 0: the same operations on the same numbers.
#
# > **On a GPU:** some sums are added up in whatever order the threads arrive, and the last digits may differ.
#
# ## By hand: the same memory?
#
# The losses agree, so the mathematics does. Do both hold the same tensors in memory? `accelerate`, the Trainer's engine, fetches **one batch ahead**: it must know which batch is the last one. We let the plain loop do so too, and compare peaks. The last column is the difference in bytes.


# %%
def one_ahead(loader):
    batches = iter(loader)
    waiting = next(batches)
    for following in batches:
        yield waiting
        waiting = following


loop = lab.run(lambda task: plain_loop(task, 2), "plain loop", task=short, measure="memory")
ahead = lab.run(lambda task: plain_loop(task, 2, fetch=one_ahead), "one ahead", task=short, measure="memory")
lines = lab.run(lambda task: ten_lines(task, 2), "ten lines", task=short, measure="memory")
one_batch = sum(tensor.numel() * tensor.element_size() for tensor in short.batch(BATCH).values())
print(f"one batch of data: {one_batch:,} bytes")
rows = [
    [run.name, f"{run.peak_bytes:,}", run.peak_bytes - from_lab.peak_bytes] for run in (from_lab, lines, loop, ahead)
]
plots.Table(["run", f"peak ({loop.memory.kind} bytes)", "against lab.train"], rows)

# %%
counted = from_lab.memory.kind == "counted"
explained = one_batch if counted else 0  # on a GPU the batch ahead waits in the host's memory
few = 128 if counted else 0.01 * loop.peak_bytes  # a GPU's allocator hands out blocks, often larger than requested
difference = from_lab.peak_bytes - loop.peak_bytes
if abs(lines.peak_bytes - from_lab.peak_bytes) > few or abs(difference - explained) > few:
    raise RuntimeError(f"lab.train holds {difference} bytes more than the loop; {explained} are explained")
batch_ahead = f"explains all but {difference - explained:,}" if counted else "waits in the host's memory"
print(f"lab.train holds {difference:,} bytes more than the loop; the batch ahead {batch_ahead}")

# %% [markdown]
# The bytes that remain are single numbers: how many labels the batch has, the loss as it is logged, its running sum. Apart from them and the batch ahead, the Trainer needs no more memory than the loop.
#
# > **On a GPU:** the batch ahead waits in the host's memory, and blocks are rounded up. The cell accepts a difference of 1 %.
#
# ## What the guides' code does today
#
# The guides train the same baseline with lines of their own. Do these lines still run? The table shows them, one argument or call each. *today* is the outcome of the guide's line, *instead* is the form that replaces it, and the last column is the outcome of that form. A line *runs*, *warns* of its coming removal, *raises* an error, or *differs*: it runs, but what the guide takes for granted is false. Every line is executed just as it is shown (`exec` runs a text), in a fresh process for each row.
#
# Some rows use short names:
#
# - `assert` states what a guide takes for granted
# - `args` makes `TrainingArguments`, and `command` reads them from a command line
# - `load` is `from_pretrained` on a checkpoint in fp16
# - `named` and `listed` are backends of `torch.compile` (a backend turns a model into faster code): those that the guide names, and those that torch lists
# - `program` is a program that does nothing
# - `ds` is a data set, `one` a tensor with a single number


# %%
def outcome(line, names):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(line, dict(names))
        except AssertionError as error:
            return f"differs: {error}"
        except (Exception, SystemExit) as error:
            return f"raises {type(error).__name__}"
    ending = any(issubclass(each.category, FutureWarning) for each in caught)  # how both libraries announce a removal
    return "warns" if ending else "runs"


# %%
def outcomes(*lines):
    def in_a_clean_process(task):
        import accelerate
        import transformers
        from transformers import HfArgumentParser, Trainer, TrainingArguments

        def load(**options):
            model.half().save_pretrained("half")
            return type(model).from_pretrained("half", **options)

        os.chdir(tempfile.mkdtemp())
        transformers.utils.logging.disable_progress_bar()
        model, parser = task.build_model(), HfArgumentParser(TrainingArguments)
        names = {"accelerate": accelerate, "transformers": transformers, "torch": torch, "np": np, "version": version}
        names |= {"model": model, "ds": task.dataset(), "one": torch.ones(1), "load": load, "Trainer": Trainer}
        names |= {"args": partial(TrainingArguments, "tmp", report_to="none")}
        names |= {"command": lambda text: parser.parse_args_into_dataclasses(text.split())}
        names |= {"named": BACKENDS, "listed": {*torch._dynamo.list_backends(None)}, "program": PROGRAM}
        return [outcome(line, names) for line in lines if line]

    return in_a_clean_process


# %%
BACKENDS = {"nvfuser", "aot_nvfuser", "aot_cudagraphs", "ofi", "fx2trt", "onnxrt", "ipex"}  # that the 2023 guide names
from_2023 = [
    ("version('nvidia-ml-py3')", "version('nvidia-ml-py')"),
    ("import datasets; datasets.Dataset.from_dict({'labels': [0]}).set_format('pt')", None),
    ("assert any(np.random.randint(0, 1, 512)), 'all labels are 0'", "assert any(np.random.randint(0, 2, 512))"),
    ("assert load().dtype == torch.float32, 'fp16 stays'", "assert load(dtype=torch.float32).dtype == torch.float32"),
    ("args(evaluation_strategy='steps')", "args(eval_strategy='steps')"),
    ("Trainer(model, args(eval_strategy='steps'), train_dataset=ds)", "Trainer(model, args(), train_dataset=ds)"),
    ("args(gradient_accumulation_steps=4, fp16=True)", None),
    ("args(gradient_checkpointing=True)", "args(activation_checkpointing=True)"),
    ("args(bf16=True)", "args(bf16=True, use_cpu=not torch.cuda.is_available())"),
    ("args(tf32=True)", "torch.set_float32_matmul_precision('high')"),
    ("args(optim='adamw_hf')", "args(optim='adamw_torch')"),
    ("args(optim='adamw_apex_fused')", "args(optim='adamw_torch_fused')"),
    ("import bitsandbytes; bitsandbytes.optim.Adam8bit(model.parameters())", "args(optim='adamw_bnb_8bit')"),
    ("from transformers.trainer_pt_utils import get_parameter_names", None),
    ("accelerate.Accelerator(fp16=True)", "accelerate.Accelerator(mixed_precision='fp16')"),
    ("model.to_bettertransformer()", "model.set_attn_implementation('sdpa')"),
    ("import torchdynamo; torchdynamo.list_backends()", "torch.compiler.list_backends()"),
    ("torch._dynamo.optimize('eager')(torch.sin)(one)", "torch.compile(torch.sin, backend='eager')(one)"),
    ("assert named <= listed, f'{len(named - listed)} of {len(named)} are gone'", "assert 'inductor' in listed"),
]

# %%
PROGRAM = ["--no-python", "--standalone", "true"]  # a program that does nothing, started as a training would be
from_2022 = [
    ("from torch.optim._multi_tensor import AdamW", "torch.optim.AdamW(model.parameters(), foreach=True)"),
    ("torch.cuda.amp.autocast(dtype=torch.bfloat16)", "torch.autocast('cuda', dtype=torch.bfloat16)"),
    ("transformers.file_utils.is_torch_bf16_available()", "transformers.utils.is_torch_bf16_gpu_available()"),
    ("torch.backends.cuda.matmul.allow_tf32 = True", "torch.backends.cuda.matmul.fp32_precision = 'tf32'"),
    ("command('--no_tf32')", "command('--tf32 0')"),
    ("command('--output_dir tmp --overwrite_output_dir')", "command('--output_dir tmp')"),
    ("command('--fp16 --fp16_full_eval')", None),
    ("model.gradient_checkpointing_enable()", "model.activation_checkpointing_enable()"),
    ("from torch.distributed.launch import main; main(['--use-env', *program])", "torch.distributed.run.main(program)"),
]
rows, toy = [], Task("bert-tiny", seq_len=16, dataset_size=8)
for year, pairs in (("2023", from_2023), ("2022", from_2022)):
    for pair in pairs:
        run = lab.run(outcomes(*pair), pair[0], task=toy, measure="value")
        words = [*(run.value or [run.status] * 2), ""]
        rows.append([year, pair[0], words[0], pair[1] or "", words[1]])
verdicts = Counter(row[2].split()[0].strip(":") for row in rows)
caption = f"{len(rows)} lines, today: " + ", ".join(f"{verdict} {number}" for verdict, number in verdicts.most_common())
plots.Table(["guide", "its line", "today", "instead", "outcome of it"], rows, caption)

# %% [markdown]
# A line that raises tells you that it no longer works, and a line that warns gives you time. If a line runs and still has a replacement, the replacement is simpler, public or newer. Look for the rows with *differs*: they run, and do something else than the guide says. Examples are labels of a single class, or a model in 16 bits that was meant as fp32. (On a CPU the lines with `bf16=True` and `tf32=True` raise an error only because no GPU is there. The scripts that the guides start, `run_glue.py` and others, are in transformers' repository and not run here.)
#
# ## Baseline
#
# `lab.train` runs the ten lines of Trainer from above, and runs them more than once: first under a memory meter, which slows the steps down, then in another process under a clock and nothing else. So neither measurement disturbs the other.
#
# Watch it work, once. The monitor looks at the machine from outside, twice a second, and stops when its cell has run. Which lines move, and which stay the same?

# %%
with monitor.live() as watch:
    vanilla = lab.train("vanilla", per_device_train_batch_size=4)
watch.summary()

# %% [markdown]
# The memory of the experiments moves, because they start and end as processes of their own; the notebook's stays as it was. The monitor sees all that the system gave to a process (or to the card): the libraries' code, reserves, leftovers. The lab counts tensors.

# %%
parts, phase = vanilla.memory.breakdown, vanilla.memory.peak_phase
times = vanilla.peak_bytes / parts["weights"]
print(f"{vanilla}\n{times:.1f} times its weights; the peak falls into the {phase}")
expected = lab.foresee(lambda: estimate(lab.task, per_device_train_batch_size=4).peak_bytes / parts["weights"])
display(widgets.revealed(lab, "vanilla peak", times, estimate=expected))
_ = plots.memory([vanilla], title="Where vanilla training peaks")

# %% [markdown]
# Weights and AdamW's two states together take three times the bytes of the weights, and all gradients would make it four. At a peak in backward most gradients may not exist yet: look at the picture. The rest is mostly activations, which depend on the batch. The guide's figure, 14949 MB against 1288 MB of weights, was read from the whole card: it includes a *CUDA context* (memory that CUDA takes for itself) of more than 1 GB, and memory that torch's allocator keeps in reserve. Ours counts tensors.
#
# ## "I timed it once"
#
# Now the clock. The same loop runs three times, each time in a fresh process. Nothing differs: neither the code, nor the data, nor the seed.

# %%
loops = {
    f"repeat {n}": lab.run(lambda task: plain_loop(task, 8), f"repeat {n}", task=short, measure="none")
    for n in (1, 2, 3)
}
seconds = {name: run.value["seconds"] for name, run in loops.items()}  # of each: by the clock, and computed
later = {name: [statistics.median(values[1:]) for values in both] for name, both in seconds.items()}
rows = [[name, *map(plots.seconds_text, (clock[0], *later[name]))] for name, (clock, _) in seconds.items()]
if any(run.value["losses"] != loops["repeat 1"].value["losses"] for run in loops.values()):
    print("the losses of the repeats differ in their last digits: this device adds in varying order")
plots.Table(
    ["", "first step", "median of the later steps", "median of their CPU time"], rows, "CPU time adds up all threads"
)

# %%
milliseconds = {name: [1000 * value for value in clock] for name, (clock, _) in seconds.items()}
ax = plots.lines(range(1, 9), milliseconds, "step", "milliseconds", title="One code, three times")
_ = ax.set_ylim(bottom=0)
apart = [max(medians) / min(medians) - 1 for medians in zip(*later.values())]
print(f"timed once each, the code may seem {apart[0]:.0%} faster than itself; by CPU time {apart[1]:.0%}")

# %% [markdown]
# Two things to see:
#
# - **Warm-up.** The first step has extra work: threads start, the system hands out memory for the first time, libraries choose their kernels, optimizer states are made. The lab does not time the first steps. Their number is `lab.profile.warmup_steps`. (The Trainer's argument of the same name is about the learning rate.) A run with `max_steps=1` measures a start, not a training.
# - **The rest varies too**, from step to step and from process to process: another program used the core, the CPU ran at a lower frequency, or the tensors were at other addresses in memory. None of it comes from the recipe. CPU time, the seconds that the process really computed, leaves out the wait for a core, but even by CPU time two processes differ.

# %%
exercises.question(
    lab,
    "timed once",
    "You time two steps of recipe A, then two steps of recipe B, in one process. B takes 30 % less. What do you know?",
    {
        "B is about 30 % faster.": "A's steps include the warm-up of the process, which B finds done. The code above "
        "was faster than itself as well.",
        "Nothing yet: the order and the noise alone can make such a difference.": "A paid for the warm-up, and one "
        "pair of times has no interval. Leave the first steps out, take turns, and look at the spread.",
        "B is faster; by how much would take more repeats.": "Even the sign is open: with the order exchanged, A might "
        "have won. An interval that contains 1 decides nothing.",
    },
    right="Nothing yet: the order and the noise alone can make such a difference.",
)

# %% [markdown]
# ## Change nothing, then one thing
#
# Before measuring an effect, measure no effect. On a CPU `lab.compare` deals with these variations as follows:
#
# - **Rounds inside one process**, on one thread. A *turn* is one step of a recipe. A *round* has three turns: two of the first recipe, the baseline, and one of the second. A slow minute slows all three turns, and so does a process that is slow as a whole.
# - **One ratio per round**: the mean time of the baseline's two turns, divided by the time of the second recipe's turn. Above 1 the second recipe is faster. This ratio is called a *pair*: it comes from a pair of times.
# - **Several processes.** A process can favour one of the recipes in all its rounds, for example by where its tensors are in memory. So the lab spreads the rounds over four processes. (The argument `turns` of `lab.compare` is the number of rounds: `turns=8` means 8 rounds in all, two in each process.)
# - **CPU time** decides. The ratio by the wall clock is shown beside it.
# - **Against itself.** The baseline's two turns in a round run the same code. Without noise their times would be equal. The lab divides one time by the other in each round, takes the median of these ratios, and inverts it if it is below 1. The result is this measurement's **noise floor**. If it is below 1.05, the lab takes 1.05.
#
# > **On a GPU:** no other program uses the GPU, so each recipe has a process of its own, the clock decides, and the floor is 1.02.
#
# The first comparison is between two runs of the same recipe. The second has one change that ought to show: sequences of a quarter of the length. (Do not compare the step times in the table: the trainings were timed one after the other, and *the same again* for a single step. The ratios come from the turns.)

# %%
again = lab.train("the same again", task=short, per_device_train_batch_size=4, steps=1)  # new: a name; one step timed
itself = lab.compare(from_lab, again, turns=8)
display(itself)
options = {"per_device_train_batch_size": 4, "measure": "time", "steps": 1}
quarter = lab.train("a quarter of the length", task=short.replace(seq_len=short.seq_len // 4), **options)  # new
effect = lab.compare(from_lab, quarter, turns=8)
_ = plots.speed([itself, effect])

# %% [markdown]
# Ticks are the pairs, the dot is their median, the line is the interval. A claim is decided by the *line*: if it is on one side of 1, one recipe is faster; if 1 is inside, the effect is **too small to tell**.

# %%
exercises.question(
    lab,
    "too small to tell",
    "A comparison says 1.04, from 0.90 to 1.19. Which sentence can you defend?",
    {
        "The change has no effect on the speed.": "Not seen is not the same as not there: 0.90 and 1.19 are both "
        "possible, and either would be an effect.",
        "It is most likely 4 % faster.": "1.04 is only the middle pair of a few. The dot decides nothing.",
        "If there is an effect, it is most likely no more than 10 % slower and no more than 19 % faster.": "That is "
        "what an interval is good for, even if it contains 1: it bounds the effect that you may have missed.",
    },
    right="If there is an effect, it is most likely no more than 10 % slower and no more than 19 % faster.",
)

# %% [markdown]
# So the line decides, never the dot. And *too small to tell* does not say that there is no effect. It says that this measurement, on this machine, cannot see it.
#
# ## By hand: the interval
#
# How well do these pairs determine their median? A **bootstrap** interval answers that by drawing again from what was measured:
#
# 1. Draw processes at random, as many as there were (four on a CPU). The same one may be drawn more than once.
# 2. From each process drawn, draw pairs (ratios) in the same way, as many as it has.
# 3. Take the median of all pairs drawn.
# 4. Repeat this 2000 times, and keep the middle 95 % of the medians.
#
# This interval may be narrower than the noise. So the lab widens it, if necessary, with the median and the noise floor:
#
# - Its lower end must be no higher than median / floor.
# - Its upper end must be no lower than median x floor.
#
# For example, a median of 1.00 and a floor of 1.05 give an interval that reaches at least from 0.95 to 1.05.


# %%
def groups(comparison):
    """Return the pairs of a comparison, a row for each process; on a GPU each pair is a row of its own."""
    pairs = comparison.speed_ratio.pairs
    return np.reshape(pairs, (PROCESSES if comparison.wall_ratio else len(pairs), -1))


def bootstrap(values):
    rng, (processes, pairs) = np.random.default_rng(0), values.shape
    which = rng.integers(processes, size=(2000, processes, 1))
    drawn = values[which, rng.integers(pairs, size=(2000, processes, pairs))]
    return np.quantile(np.median(drawn.reshape(2000, -1), axis=1), [0.025, 0.975])


def interval(values, floor):
    (low, high), middle = bootstrap(values), np.median(values)
    return min(low, middle / floor), max(high, middle * floor)


# %%
ratio, bounds, caption = itself.speed_ratio, {}, ""
if ratio.known:  # else there are no pairs to draw from
    bounds = {"bootstrap": bootstrap(groups(itself)), "lab": interval(groups(itself), ratio.floor)}
    torch.testing.assert_close(bounds["lab"], (ratio.low, ratio.high))
    caption = f"noise floor of this comparison: a factor of {ratio.floor:.3f}"
if itself.wall_ratio and itself.wall_ratio.known:
    bounds["by the wall clock"] = (itself.wall_ratio.low, itself.wall_ratio.high)
rows = [[name, *map("{:.3f}".format, ends)] for name, ends in bounds.items()]
plots.Table(["the same against itself", "from", "to"], rows, caption)

# %% [markdown]
# The lab moves an end of the bootstrap's interval only outwards. An end that is far enough out stays where it is, so the first two rows may be equal. Why the floor? The bootstrap knows only what varied *within* these pairs. If the same code differs from itself by a few percent, an effect of that size proves nothing, however narrow its interval is. And today's floor may be too low for tomorrow, when other programs run. So the lab never takes it to be less than a fixed factor (1.05 on a CPU). The last row is by the wall clock, which counts the waiting, too.
#
# ## What held

# %% tags=["claim"]
note = f"batch 4, {vanilla.memory.kind} memory; the peak falls into the {vanilla.memory.peak_phase}"
claims.check("training-dwarfs-weights", times, note=note)

# %% [markdown]
# This claim was decided by one number without an interval: counted bytes of equal code with equal data do not vary, as the peaks above showed. Time varies, and always gets an interval.
#
# ## Explore
#
# How many processes does a claim need? The picture computes the intervals of the two comparisons from the first process alone, then from the first two, and so on (on a GPU from the first pairs). The thick line is the bootstrap's interval, the thin one the lab's. More processes usually shorten the thick line; the thin line never gets shorter than the floor allows.

# %% tags=["widget"]
known = [comparison for comparison in (itself, effect) if comparison.speed_ratio.known]


def draw(first):
    _, ax = plt.subplots(figsize=(7.5, 2.2), layout="constrained")
    for row, comparison in enumerate(known):
        values = groups(comparison)[:first]
        ends = interval(values, comparison.speed_ratio.floor)
        ax.plot(ends, [row, row], color=plots.SERIES[6], linewidth=1.5)
        ax.plot(bootstrap(values), [row, row], color=plots.SERIES[0], linewidth=6, solid_capstyle="butt")
        ax.plot([np.median(values)], [row], "o", color="black", markersize=7)
    ax.axvline(1, color="black", linewidth=1)
    ax.set_yticks(range(len(known)), [comparison.other.name for comparison in known])
    ax.set(ylim=(1.6, -0.6), xlabel=f"speed ratio; processes used (on a GPU: pairs): {first}")
    return ax


_ = widgets.explore(draw, first=[*range(1, 1 + max((len(groups(each)) for each in known), default=1))])

# %% [markdown]
# ## Exercise 1: which loss is the first to differ?
#
# Here are four changes to the plain loop, one at a time. Each one changes the losses, but from which step on? Steps are counted from 1; a loss is taken *before* its step's update. The loop without a change trains at a learning rate of `1e-3` here. Think through `backward`, `step` and `schedule` before you answer.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Loss number n is computed from batch n and the weights after n - 1 updates. What does each change touch first?",
    "Other data are in loss 1 already. Another rate changes update 1, and the first loss after that is loss 2.",
    "The schedule's factor for update 1 is 1 either way. And before the first `backward` there is nothing to clear.",
)

# %% tags=["exercise"]
changes = {"another order": {"order": 1}, "twice the rate": {"rate": 2e-3},
           "constant rate": {"falling": False}, "no zero_grad": {"clear": False}}  # fmt: skip

answer = None  # a step for each change, such as {"another order": 1, "twice the rate": 1, "constant rate": 1, "no zero_grad": 1}


# %% tags=["check"] jupyter={"source_hidden": true}
def all_losses(task):
    return {
        name: plain_loop(task, **{"rate": 1e-3} | change)["losses"] for name, change in ({"none": {}} | changes).items()
    }


tiny = Task("bert-tiny", seq_len=32, dataset_size=64)
losses = lab.run(all_losses, "four changes", task=tiny, measure="none").value
differ = {name: [abs(a - b) > 1e-5 for a, b in zip(losses["none"], losses[name])].index(True) + 1 for name in changes}


def check(steps):
    if steps is None:
        return exercises.not_attempted()
    for name, step in differ.items():
        if steps.get(name) != step:
            return exercises.wrong(f"{name}: not step {steps.get(name)}; what does the update before that loss use?")
    return exercises.right("an update shows one loss later, and what changes the second update shows in the third")


exercises.check(lab, "first to differ", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
# Other data: at once. Another rate: after the first update, so in loss 2. The schedule starts at the full rate, and
# gradients pile up only from the second backward on: both change the second update, so loss 3.
steps = {"another order": 1, "twice the rate": 2, "constant rate": 3, "no zero_grad": 3}
exercises.prove(check, solution=steps, mistake=steps | {"constant rate": 2})

# %% [markdown]
# ## Exercise 2: which one is faster? (challenge)
#
# Two recipes differ in one argument: with gradient clipping, as by default, and without (`max_grad_norm=0`). Clipping takes the norm of all gradients at every step, so less work ought to be faster. Is it, here? Compare them with `lab.compare`, then answer with a word *and the interval that defends it* (see the comment in the cell below). The check measures again.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "`lab.compare(a, b)` returns a comparison. Its `speed_ratio` has the pairs, and their interval: `low` to `high`.",
    "1 inside the interval is an answer, too. Which one?",
    "Without a limit the Trainer still takes the norm, to log it: `_get_grad_norm` in transformers' trainer.py. What "
    "work is left out, then?",
)

# %% tags=["exercise"]
common = {"task": short, "per_device_train_batch_size": 4, "measure": "time", "steps": 1}
clipped = lab.train("clipped", **common)
unclipped = lab.train("unclipped", max_grad_norm=0, **common)


def faster(ratio):
    return "unclipped" if ratio.low > 1 else "clipped" if ratio.high < 1 else "too small to tell"


answer = None  # ("clipped" or "unclipped" or "too small to tell", lab.compare(clipped, unclipped).speed_ratio)

# %% tags=["check"]
measured_again = []


def check(answer):
    if answer is None:
        return exercises.not_attempted()
    word, ratio = answer
    if not getattr(ratio, "known", True):
        return exercises.not_measured(ratio.value.why)
    if len(getattr(ratio, "pairs", ())) < 5:
        return exercises.wrong(f"{ratio} has no interval, or too few pairs behind it: timed once is not measured")
    if word != faster(ratio):
        return exercises.wrong(f"your interval, {ratio}, says {faster(ratio)!r}: the dot decides nothing")
    if not measured_again:
        again = lab.compare(clipped, unclipped, turns=8).speed_ratio
        measured_again.append(lab.sized(again, ratio))  # a quick test times one turn, which decides nothing
    fresh = measured_again[0]
    if fresh.high < ratio.low or ratio.high < fresh.low:
        return exercises.wrong(f"measured again: {fresh}, which does not touch your {ratio}. What was running?")
    doubt = "" if faster(fresh) == word else f", which says {faster(fresh)!r}: an effect on the edge, so give both"
    return exercises.right(f"{word}: yours {ratio}, measured again {fresh}{doubt}")


exercises.check(lab, "which is faster", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
# The Trainer takes the norm of all gradients in any case, to report it (`_get_grad_norm`; transformers 5.15 to 5.24).
# So both recipes do the same work, and an honest measurement finds no winner.
ratio = lab.compare(clipped, unclipped, turns=8).speed_ratio
word = faster(ratio) if ratio.known else "not measured"
once = clipped.step_seconds / unclipped.step_seconds  # one step of each, once: that names a winner at any rate
exercises.prove(check, solution=(word, ratio), mistake=("unclipped", once))

# %% [markdown]
# ## Recap
#
# - **`lab.train` fits into ten lines of Trainer**, and into a plain PyTorch loop with equal losses. Their memory differs by a batch fetched ahead and a few single numbers. The table has today's form of each line of the guides that needs one.
# - **A vanilla training takes many times the bytes of its weights**: 9.2 times on an AMD EPYC with 2 cores (2026-11-29); your verdict above has your figure.
# - **The time of one and the same code varies**, so a ratio needs an interval. "Faster" means that the whole interval is on one side of 1; otherwise the effect is too small to tell. On a CPU no effect below a factor of 1.05 counts.
#
# Next: lesson 04 changes the first real thing, the size of the batch.

# %% tags=["finish"]
claims.finish()
