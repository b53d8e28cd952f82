# %% [markdown]
# # No GPU: what can this CPU really train?
#
# You want to fine-tune a small model on a server or a laptop without a GPU. You copy `fp16=True` from a GPU recipe, start one process per core, and it takes hours. How much of that is the CPU, and how much the settings?
#
# **Time:** about 40 minutes; the cells compute for about a minute. **Before it:** lesson 05 (accumulation), lesson 07 (number formats) and lesson 15 (two processes that train together). **Machine:** everything here runs on the CPU, also if you have a GPU. With one core some comparisons are left out.
#
# **You will see**
# - how fast your CPU multiplies in fp32, bf16 and fp16, and how that sets the time of a training step
# - which of the Trainer's flags a CPU obeys, and which it accepts and silently ignores
# - how processes compare with threads on the same cores, and how much CPU time waiting threads use

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import itertools
import os
import re
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from IPython.display import display
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from perf_helpers import Claims, Lab, Task, exercises, plots, widgets
from perf_helpers.lab import Ratio
from trainmem.measure.interleaving import in_turns

lab = Lab(profile, strict=strict, out=out, lesson="19_cpus")
claims = Claims(lab)
torch.set_num_threads(1)  # in this notebook's own process
print(lab.machine.name)

# %% [markdown]
# ## Idea
#
# A CPU has a few **cores**. A **thread** is a sequence of work; a core runs one at a time. torch splits a large matmul among several threads. A **process** has its own memory and its own threads. Two processes can train together, each on half of the batch (lesson 15).
#
# A core also has a different speed for each number type.
#
# ## Predict
#
# A small Llama is trained with all of its weights in fp16, on one thread.

# %%
WALL, CPU = 0, 1  # two clocks: on the wall, and the seconds that processors computed
CORES = lab.machine.cpu_cores or 1
HALF_CORES = max(1, CORES // 2)
turns = lab.sized(7, 3)
question = "How many times as long does one training step take in fp16 as in fp32, on this CPU?"
widgets.predict(lab, "fp16", question, "x", 0, 40)

# %% [markdown]
# ## By hand: three matmuls in three types
#
# A linear layer computes three matmuls in a training step: its output, and in the backward pass the gradient of its input and the gradient of its weight. Each matmul sums over a different dimension, so their speeds may differ. We time each matmul in each type. The table shows *GFLOP/s*: billions of multiplications and additions per second.
#
# `in_turns` calls each function once per turn, so that other load on the machine slows all of them equally. It reads two clocks: wall-clock time, and the seconds that the processor computed. On one thread we use the second clock, because it does not count the time that the thread waits for a core.

# %%
F = torch.nn.functional
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def matmuls(kind, rows=128, inputs=128, outputs=256):
    """Return the three matmuls of a linear layer in a step: output, gradient of the input, gradient of the weight."""
    x, weight, back = (torch.randn(*shape).to(kind) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    return [lambda: F.linear(x, weight), lambda: back @ weight, lambda: back.T @ x]


def rates(_):
    """Return the GFLOP/s of each matmul, in each type, on one thread."""
    torch.set_num_threads(1)
    taken = {name: in_turns(matmuls(kind), turns) for name, kind in KINDS.items()}
    flops = 2 * 128 * 128 * 256
    return {name: [flops / min(turn[CPU] for turn in one) / 1e9 for one in three] for name, three in taken.items()}


by_type = lab.run(rates, measure="value", use_cpu=True).value
heads = ["type", "output", "gradient of the input", "gradient of the weight"]
plots.Table(heads, [[name, *map(float, three)] for name, three in by_type.items()], "GFLOP/s of one thread")

# %% [markdown]
# If a row is far below fp32's, the core has no instruction for that type. The library then **emulates** it: it widens each number, multiplies in fp32 and rounds again. This slow path need not be equally slow for the three matmuls.
#
# Neither the name of a CPU nor the list of its instruction sets tells you how fast each type is. The lesson therefore measures the parts of a step in each type, predicts from them how fast a whole step is in fp16, and then measures the step.
#
# ## A step is the sum of its parts
#
# The type of the numbers changes the time of linear layers and attention most. So we time these *parts* alone, in each type. The whole step is a training step of a small Llama: forward and backward, without the optimizer's update. The model is loaded from three checkpoints, one in each type.
#
# The prediction for a step in fp16 or bf16 is the time of its parts plus the *rest*: the step in fp32 minus the parts in fp32. In a 16-bit type the rest may take half as long (half of the bytes) or twice as long (more casts), so the prediction is a range. The line below the table has the predicted and the measured speed of a step in fp16, relative to a step in bf16: one of the claims is about these two types. (Your guess compares fp16 with fp32.)
#
# The fastest type in the table below need not be the fastest one in the table above. The table above has three matmuls of one size. The parts in the table below include attention and smaller matmuls.

# %%
SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
LINEAR = {(128, 128): 8, (128, 256): 5, (256, 128): 2}  # inputs, outputs: how many, the head included


def backward_of(function, *shapes, kind):
    """Return a function that runs `function` forward and backward, with all of its tensors in one type."""
    tensors = [torch.randn(*shape).to(kind).requires_grad_() for shape in shapes]
    with torch.no_grad():
        back = torch.ones_like(function(*tensors))
    return lambda: torch.autograd.grad(function(*tensors), tensors, back)


def parts(kind):
    """Return (how many, function) for each matmul of a step and for attention: 4 samples of 32 tokens."""
    linear = [(n, backward_of(F.linear, (128, a), (b, a), kind=kind)) for (a, b), n in LINEAR.items()]
    attend = partial(F.scaled_dot_product_attention, is_causal=True)
    return [*linear, (2, backward_of(attend, *[(4, 4, 32, 32)] * 3, kind=kind))]


# %%
def step_of(model, ids):
    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    return step


def in_types(_):
    """Return by type: seconds of the parts, turns of a whole step, the type of the loaded checkpoint; and all warnings."""
    torch.set_num_threads(1)
    ids, models = torch.randint(0, 256, (4, 32)), {}
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        for name, kind in KINDS.items():
            LlamaForCausalLM(LlamaConfig(**SIZES)).to(kind).save_pretrained(Path(folder, name))
            models[name] = LlamaForCausalLM.from_pretrained(Path(folder, name))  # as people write it
        steps = [step_of(models[name], ids) for name in (*KINDS, "bf16")]
        named = [(name, *part) for name, kind in KINDS.items() for part in parts(kind)]
        taken = in_turns([*steps, *(work for *_, work in named)], turns)  # other load slows all of them alike
    seconds = dict.fromkeys(KINDS, 0.0)
    for (name, number, _), each in zip(named, taken[4:]):
        seconds[name] += number * min(turn[CPU] for turn in each)
    loaded = {name: str(model.dtype) for name, model in models.items()}
    return {"parts": seconds, "turns": taken[:4], "loaded": loaded, "said": [str(each.message) for each in caught]}


# %%
types = lab.run(in_types, measure="value", use_cpu=True).value


def predicted_speed(parts, fp32_step):
    """Predict from the parts the range of fp16's speed in a step, relative to bf16."""
    rest = max(0.0, fp32_step - parts["fp32"])
    return (parts["bf16"] + rest / 2) / (parts["fp16"] + 2 * rest), (parts["bf16"] + 2 * rest) / (
        parts["fp16"] + rest / 2
    )


fp32_turns, bf16_turns, fp16_turns, again = types["turns"]
least = {name: min(turn[CPU] for turn in each) for name, each in zip(KINDS, types["turns"])}
expected = predicted_speed(types["parts"], least["fp32"])
slower = Ratio.of_turns([[bf16_turns, fp16_turns, again]], CPU, 1.05)  # bf16 again: its noise, at least 5 %
rows = [[name, types["loaded"][name], 1e3 * types["parts"][name], 1e3 * least[name]] for name in KINDS]
display(plots.Table(["checkpoint", "loaded as", "its matmuls and attention (ms)", "a training step (ms)"], rows))
print(f"speed of fp16, bf16 = 1: predicted {expected[0]:.2f} to {expected[1]:.2f}, measured {slower}")
print(f"warnings: {types['said']}")
widgets.revealed(lab, "fp16", least["fp16"] / least["fp32"])

# %% [markdown]
# Read the column "loaded as". Many checkpoints on the Hub were saved in fp16. Such a checkpoint *stays* in fp16: since transformers 5 the default of `from_pretrained` is `dtype="auto"` (`modeling_utils.py`); older versions loaded it as fp32. On a CPU without fp16 instructions the training then crawls, and no warning says why ([issue 34692](https://github.com/huggingface/transformers/issues/34692), [issue 41867](https://github.com/huggingface/transformers/issues/41867); both closed).
#
# > **On a GPU:** weights that stay in fp16 do not make a step slow, because a GPU has instructions for fp16. (Whether they train well is another question: lesson 07.)
#
# The remedy is one argument: `from_pretrained(..., dtype=torch.float32)`. Add `bf16=True` if bf16 makes a step faster. The last column of the table is only a hint: its bf16 model is wholly in bf16. `bf16=True` keeps the weights in fp32 and casts them in each step, which takes time. *Explore*, below, compares this mixed precision with fp32.
#
# ## The library's switches
#
# The guide in transformers' documentation on training with a CPU names `TrainingArguments(use_cpu=True, bf16=True)`. Older editions of that guide also name fp16, and still older ones `use_ipex`, `jit_mode_eval` and `no_cuda`. (IPEX is Intel's extension for PyTorch.) Does each of them do something? A **hook**, a function that PyTorch calls after a layer has computed, records the type in which a linear layer really multiplies.


# %%
QUIET = dict(report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1)


def note_type(seen, layer, inputs, output):
    seen.append(str(output.dtype))


def flagged(_):
    """Return by flag the output type of a linear layer while the Trainer trains, and the losses."""
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(256).reshape(16, 16)]
    found = {}
    for flag in (None, "bf16", "fp16"):
        torch.manual_seed(0)
        model, seen = LlamaForCausalLM(LlamaConfig(**SIZES)), []
        model.model.layers[0].mlp.up_proj.register_forward_hook(partial(note_type, seen))
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(folder, max_steps=3, use_cpu=True, **QUIET, **({flag: True} if flag else {}))
            arguments._n_gpu = min(1, arguments.n_gpu)  # at most one GPU; with use_cpu none
            trainer = Trainer(model, arguments, train_dataset=rows)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
        found[str(flag)] = {"type": seen[-1], "losses": losses}
    return found


# %%
flags = lab.run(flagged, measure="value", use_cpu=True).value
rows = [["no flag" if flag == "None" else flag, each["type"], str(each["losses"])] for flag, each in flags.items()]
display(plots.Table(["flag, with use_cpu=True", "a linear layer computes in", "losses"], rows))
obeyed = sum(flags[flag]["type"] == str(KINDS[flag]) for flag in ("bf16", "fp16")) / 2


# %%
def taken(flag):
    """Return whether TrainingArguments accepts a flag."""
    try:
        TrainingArguments(tempfile.mkdtemp(), **{flag: True})
    except (TypeError, ValueError) as error:
        print(f"{flag}: {type(error).__name__}: {error}")
        return False
    return True


accepted = {flag: taken(flag) for flag in ("use_ipex", "jit_mode_eval", "no_cuda")}
print(f"bf16 without use_cpu is accepted: {taken('bf16')}")

# %% [markdown]
# `bf16=True` without `use_cpu` is an error on a machine without a GPU. `fp16=True` with `use_cpu` is accepted, and the losses equal fp32's to the last digit: accelerate (`Accelerator.__init__` in `accelerator.py`) switches fp16 on only for devices other than "cpu", and does not warn. The three older flags are gone.
#
# ## Does bf16 save memory?
#
# The guide says that bf16 mixed precision on a CPU "reduces memory usage". We compare the peaks at four batch sizes. Bytes are counted exactly, so one run of each is enough.

# %%
memory = {}
small = Task("bert-tiny", seq_len=64)
for batch in (1, 4, 16, 64):
    for name, more in {"fp32": {}, "bf16": {"bf16": True}}.items():
        given = {"per_device_train_batch_size": batch, "use_cpu": True} | more
        memory[batch, name] = lab.train(f"{name}, batch {batch}", task=small, measure="peak", **given)
peaks = {key: run.peak_bytes for key, run in memory.items()}
shares = {batch: peaks[batch, "bf16"] / peaks[batch, "fp32"] for batch in (1, 4, 16, 64)}
rows = [[batch, *(plots.bytes_text(peaks[batch, n]) for n in ("fp32", "bf16")), shares[batch]] for batch in shares]
plots.Table(["micro-batch", "peak in fp32", "peak with bf16=True", "ratio"], rows)

# %% [markdown]
# The ratio begins at 1. Mixed precision keeps weights, gradients and optimizer states in fp32 (lesson 07). With a small batch the peak is in the optimizer update, when hardly any activations are in memory. Only activations shrink, so bf16 saves memory with large batches.
#
# ## Who decides how many threads?
#
# The number of threads can come from three places:
#
# - from you, by `OMP_NUM_THREADS` or `torch.set_num_threads`
# - from torch, which starts one thread per core
# - from the launcher.
#
# Below, `torchrun` starts two processes, and so does plain Python. Neither is given a number of threads.

# %%
SCRIPT = "import os, torch; print(f'<{torch.get_num_threads()}>', flush=True)"
unset = {name: text for name, text in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
# the processes exchange messages on this machine only
unset |= {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
with tempfile.TemporaryDirectory() as folder:
    (path := Path(folder, "script.py")).write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    commands = {"torchrun": [[*launcher, str(path)]], "plain Python, twice": [[str(path)]] * 2}
    threads = {}
    for name, each in commands.items():
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=unset)
        started = [subprocess.Popen([sys.executable, *command], **pipes) for command in each]
        output = "".join(process.communicate(timeout=180)[0] for process in started)
        threads[name] = [int(number) for number in re.findall(r"<(\d+)>", output)]
        print(f"{name}: threads of each process {threads[name]}, for {CORES} cores")

# %% [markdown]
# torchrun gives each process **one** thread ("to avoid your system being overloaded"), in `torch/distributed/run.py`. For two processes on two cores that is right. On 64 cores, two processes leave 62 idle. Plain processes use all cores *each*. Neither torchrun nor Python divides the cores among the processes. (accelerate's `PartialState` in `state.py` divides them if several processes train on a CPU. But it does so only if `OMP_NUM_THREADS` is not set, and torchrun sets it.) So set the number yourself: `OMP_NUM_THREADS` = cores / processes.
#
# ## Processes times threads
#
# A *layout* is a number of processes and the number of threads of each. Now every layout trains, in interleaved runs. Each **update** uses 16 samples in total, however many processes compute them. Otherwise two processes would be compared at twice the batch, a common mistake. A process accumulates micro-batches (lesson 05); two processes sum their gradients once per update by an all-reduce, and DDP divides by the number of processes (lesson 15).


# %%
def an_update(model, rows, ranks, micro, bf16=False, samples=16):
    """Return a function that makes one update of `samples` samples in total and returns this process's mean loss."""
    accumulate = samples // (micro * ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    called = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    batches = itertools.cycle(range(len(rows["labels"]) // samples))

    def update():
        first, mean = samples * next(batches), 0.0
        shard = slice(first + (dist.get_rank() if ranks > 1 else 0), first + samples, ranks)
        for number in range(accumulate):
            called.require_backward_grad_sync = number == accumulate - 1  # what DDP's no_sync() sets
            few = {name: part[shard][number * micro : (number + 1) * micro] for name, part in rows.items()}
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                loss = called(**few).loss / accumulate
            loss.backward()
            mean += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return update


# %%
def layouts(task, recipes):
    """Time, on each of two ranks, an update by each recipe (bf16, processes, threads, micro-batch), and some parts."""
    dist.init_process_group("gloo")
    rank, rows, works, losses = dist.get_rank(), task.batch(160), {}, {}

    def add(name, work, ranks, threads):
        def run():
            torch.set_num_threads(threads)
            if rank < ranks:
                losses[name] = work()
            dist.barrier()  # a rank without work sleeps here

        works[name] = run

    for bf16, ranks, threads, micro in recipes:
        update = an_update(task.build_model(), rows, ranks, micro, bf16)
        add(str((bf16, ranks, threads, micro)), update, ranks, threads)
    gradients, (left, right) = torch.zeros(task.parameters()), (torch.randn(256, 256), torch.randn(256, 1024))
    add("silent", an_update(task.build_model(), rows, 1, 8, samples=8), 2, HALF_CORES)
    add("sum", lambda: dist.all_reduce(gradients) and None, 2, HALF_CORES)
    wide = left @ right
    for threads in sorted({CORES, max(1, CORES - 1)}):
        add(f"matmul, {threads}", lambda: [left @ right for _ in range(40)] and None, 1, threads)
        add(f"other work, {threads}", lambda: [F.gelu(wide) for _ in range(40)] and None, 1, threads)
    return {"turns": dict(zip(works, in_turns([*works.values()], turns))), "losses": losses}


# %% [markdown]
# The next cell trains all layouts. It also times two more things:
#
# - Two processes train without exchanging anything (*silent* in the code). Each takes 8 samples per update, as with DDP. The all-reduce that sums the gradients of two processes is timed alone. From these two times we predict how much DDP can gain here.
# - A matmul and an element-wise operation run with all threads and with one fewer. From these times we predict how much one thread is worth.

# %%
PLACES = [(1, HALF_CORES), (1, CORES), (2, HALF_CORES)]  # processes, threads of each
crowded = (False, 2, max(2, CORES), 8)  # as many threads in each process as there are cores
fewer = (False, 1, CORES - 1, 8)
grid = [(bf16, *place, micro) for bf16 in (False, True) for place in dict.fromkeys(PLACES) for micro in (8, 2)]
recipes = list(dict.fromkeys([*grid, crowded, *([fewer] if CORES > 1 else [])]))
few = {"num_hidden_layers": 2, "vocab_size": 200}
work = Task(lab.sized("bert-small", "bert-tiny"), seq_len=32, data="learnable", config=few)
run = lab.run(partial(layouts, recipes=recipes), "layouts", task=work, processes=2, measure=("none",), use_cpu=True)
both = [rank["value"] for rank in run.ranks]


def seconds(name, clock=WALL):
    """Return the seconds of each turn: wall-clock time of rank 0, or CPU time of both ranks together."""
    ones = [rank["turns"][str(name)] for rank in both]
    return (
        [turn[WALL] for turn in ones[0]] if clock == WALL else [sum(turn[CPU] for turn in pair) for pair in zip(*ones)]
    )


def faster(name, than, clock=WALL):
    """Return how many times as fast as `than` it is, with an interval."""
    return lab.ratio([slow / quick for slow, quick in zip(seconds(than, clock), seconds(name, clock))])


# %%
shown = [recipe for recipe in recipes if not recipe[0] and recipe[3] == 8]
names = [f"{ranks} x {threads}" for _, ranks, threads, _ in shown]
speeds = [16 / median(seconds(recipe)) for recipe in shown]
costs = [1e3 * median(seconds(recipe, CPU)) / 16 for recipe in shown]
_, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained", sharey=True)
for ax, values, label in zip(axes, (speeds, costs), ("samples/s", "CPU milliseconds per sample")):
    ax.barh(names, values, color=plots.SERIES[label != "samples/s"])
    for row, value in enumerate(values):
        ax.text(value, row, f" {value:.3g}", va="center")
    ax.set(xlabel=label, xlim=(0, 1.2 * max(values)))
    ax.spines[["top", "right"]].set_visible(False)
axes[0].invert_yaxis()
axes[0].set_title("Processes x threads of each, fp32", loc="left")
plt.show()

# %% [markdown]
# Left: more is better. Right: less is better. Compare one process that uses all threads with two processes that use half of the threads each: both layouts use every core.
#
# Then look on the right at the *crowded* layout: two processes with as many threads *each* as there are cores. (On two cores its bar is `2 x 2`, on eight `2 x 8`.) A thread that has finished its part waits for the others by *spinning*: it checks again and again, and keeps a core busy with that. The work is the same, the CPU time is not, and the extra time is lost to other work on the machine.
#
# The next cell prints these comparisons as ratios, each with its interval. The first two lines are speeds relative to *one* process with half as many threads as there are cores.
#
# - First line: two such processes with DDP. The line ends with two more speeds, between which we expect DDP's. The best case is *without exchange* of gradients. The worst case is *with the sum of all gradients*: it adds the whole time of the all-reduce, as if no part of the all-reduce ran during backward. DDP's middle value, the number before the brackets, may still be outside. If its interval overlaps the interval of one of the two cases, noise can explain that.
# - Second line: one process with all threads. This comparison with DDP is fair, because the one process uses as many cores as the two.
# - Third line: the CPU time of the crowded layout, relative to two processes that divide the cores.
# - Last line: one thread fewer, relative to all threads, in training, in a matmul and in an element-wise operation (*other work*).

# %%
alone, together = (False, 1, HALF_CORES, 8), (False, 2, HALF_CORES, 8)
scaled, silent = faster(together, alone), faster("silent", alone)
with_sum = lab.ratio([one / (two + s) for one, two, s in zip(*map(seconds, (alone, "silent", "sum")))])
rival = faster((False, 1, CORES, 8), alone)
print(f"two processes: {scaled} x one; without exchange {silent}, with the sum of all gradients {with_sum}")
print(f"the fair comparison, one process with all {CORES} threads: {rival}")
waste = lab.ratio([a / b for a, b in zip(seconds(crowded, CPU), seconds(together, CPU))])
print(f"CPU seconds per sample, crowded / cores divided: {waste}")
left_free = faster(fewer, (False, 1, CORES, 8)) if CORES > 1 else None
of_parts = [faster(f"{part}, {max(1, CORES - 1)}", f"{part}, {CORES}") for part in ("matmul", "other work")]
print(f"one thread fewer: {left_free} x the speed; matmuls alone {of_parts[0]}, other work alone {of_parts[1]}")

# %%
exercises.question(
    lab,
    "quota",
    "A container may use 2 of a host's 64 cores (a quota). How many threads does torch start in it?",
    {
        "2: the container has 2": "A quota is time, not cores: 64 threads run for a moment, then all of them are stopped "
        "until the next period. torch does not read it. `perf-helpers doctor` does.",
        "64, and they share the time of 2": "torch sees all cores of the host. So set `OMP_NUM_THREADS=2`. The doctor warns you if the two numbers differ.",
        "1, to be safe": "Only torchrun does that, and for several processes alone.",
    },
    right="64, and they share the time of 2",
)

# %% [markdown]
# ## What held
#
# Three of the four timed claims are compared with a prediction from parts that the same run measured. (*oversubscription* has none.) For `threads-minus-one` the predicted range covers the intervals of the two operations in the last line above. It also covers 1, because a step also contains work that one thread does alone, and that work is as fast with one thread fewer.
#
# In the boxes, *CPU page* and *many CPUs page* are pages of transformers' documentation on training with one CPU and with several. (The *CPU page of 4.49* is an older edition, of version 4.49.) The *2024 index* is the documentation's overview of performance in that year. A *socket* is the place of one processor; a server may have two.
#
# ### Number types and flags

# %% tags=["claim"]
display(claims.check("cpu-fp16-as-bf16", slower, predicted=expected, note="one thread, CPU time"))

# %% tags=["claim"]
note = ", ".join(f"{share:.2f} at {batch}" for batch, share in shares.items())
display(claims.check("cpu-bf16-memory", max(shares.values()), note=f"peak in bf16 / fp32: {note}"))

# %% tags=["claim"]
same = flags["fp16"]["losses"] == flags["None"]["losses"]
display(claims.check("cpu-flags-alike", obeyed, note=f"fp16=True gives the losses of fp32: {same}"))
display(claims.check("ipex-flags", sum(accepted.values())))

# %% [markdown]
# ### Threads and processes

# %% tags=["claim"]
note = f"plain processes: {threads['plain Python, twice']}, for {CORES} cores"
display(claims.check("torchrun-threads", max(threads["torchrun"]), note=note))

# %% tags=["claim"]
display(claims.check("oversubscription", waste))
one_core = None if CORES > 1 else "needs two cores"
range_ = min(1.0, *(part.low for part in of_parts)), max(1.0, *(part.high for part in of_parts))
display(claims.check("threads-minus-one", left_free, predicted=range_, missing=one_core))
display(
    claims.check("many-cpus", scaled, predicted=(with_sum.low, silent.high), note=f"one process, all cores: {rival}")
)

# %% [markdown]
# The CPU page contradicts itself. A tip recommends one thread fewer than a socket has cores. The part on Kubernetes recommends as many threads as the CPU units that a container gets; a unit is one physical or virtual core. On a machine with few cores, the core that is left free is a large share of the machine.
#
# ## Explore
#
# The picture shows the samples/s of the layouts that were measured. Does the same layout win with micro-batch 2 as with 8, and in bf16 as in fp32?


# %% tags=["widget"]
def draw(micro, kind):
    """Plot the samples/s of the layouts that were measured."""
    found = [16 / median(seconds((kind == "bf16", *place, micro))) for place in dict.fromkeys(PLACES)]
    _, ax = plt.subplots(figsize=(6, 2.2), layout="constrained")
    ax.barh([f"{ranks} x {threads}" for ranks, threads in dict.fromkeys(PLACES)], found, color=plots.SERIES[0])
    ax.set(xlabel="samples/s", xlim=(0, 16 / min(median(seconds(recipe)) for recipe in grid)))
    ax.set_title(f"{kind}, micro-batch {micro}", loc="left")
    return ax


_ = widgets.explore(draw, micro=[8, 2], kind=["fp32", "bf16"])

# %% [markdown]
# ## Exercise 1: the best recipe for this CPU
#
# With `TrainingArguments(use_cpu=True)` a training starts in fp32, with one process and all cores. Choose better values for the dtype, the processes, the threads and the micro-batch, for updates of 16 samples. Choose among the layouts and the micro-batches (8 and 2) that the explorer shows. Your recipe must reach 90 % of the samples/s of the best of these; the upper end of the interval decides. Its loss may differ from fp32's by no more than another seed would change it.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Move the explorer: compare the two types first, then the micro-batches. The longest bar of all names the recipe."
)

# %% tags=["exercise"]
answer = None  # dict(dtype="fp32", processes=1, threads=CORES, micro_batch=8)


# %%
def seeds(task):
    """Return the loss of the last update of `layouts`, by seed."""
    torch.set_num_threads(1)
    models = [task.replace(seed=seed).build_model() for seed in range(3)]
    updates = [an_update(model, task.batch(160), 1, 8) for model in models]
    return [[update() for _ in range(turns + 1)][-1] for update in updates]


def loss_of(recipe):
    return sum(rank["losses"][str(recipe)] for rank in both[: recipe[1]]) / recipe[1]


of_seeds = lab.run(seeds, task=work, measure="value", use_cpu=True).value
band = max(of_seeds) - min(of_seeds)
best = min(grid, key=lambda recipe: median(seconds(recipe)))
print(f"losses by seed {of_seeds}: the largest is {band:.3f} above the smallest")


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if answer.get("dtype") not in ("fp32", "bf16"):
        return exercises.wrong("on a CPU the Trainer obeys fp32 and bf16 only; fp16=True trains in fp32")
    recipe = (answer["dtype"] == "bf16", *(answer[name] for name in ("processes", "threads", "micro_batch")))
    if recipe not in grid:
        return exercises.wrong(f"not measured; processes and threads are one of {PLACES}, micro-batches 8 and 2")
    apart = abs(loss_of(recipe) - loss_of(alone))
    if apart > band:
        return exercises.wrong(f"its loss is {apart:.3f} from fp32's; seeds differ by {band:.3f}")
    of_best = faster(recipe, best)
    if of_best.high < 0.9:
        return exercises.wrong(f"{of_best} of the best recipe's samples/s")
    return exercises.right(f"{of_best} of the best recipe's samples/s, and its loss is {apart:.3f} from fp32's")


exercises.check(lab, "recipe", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
within = [recipe for recipe in grid if abs(loss_of(recipe) - loss_of(alone)) <= band]
bf16, ranks, count, micro = min(within, key=lambda recipe: median(seconds(recipe)))
kind = "bf16" if bf16 else "fp32"
exercises.prove(
    check,
    solution=dict(dtype=kind, processes=ranks, threads=count, micro_batch=micro),
    mistake=dict(dtype="fp16", processes=1, threads=CORES, micro_batch=8),  # a GPU's habit
)

# %% [markdown]
# ## Exercise 2: the challenge
#
# A colleague sends you an fp16 checkpoint and wants a trained one back, in fp16 again. Write `answer(folder, train)`. It loads the checkpoint from `folder`, calls `train(model)`, which runs the Trainer on this CPU, and returns the trained model. The check measures four things:
#
# - the files in `folder` are unchanged
# - the returned weights take as many bytes as those of the checkpoint
# - at least 90 % of the returned weights are what a training in fp32 gives, once its result is rounded to fp16
# - the training runs at 0.8 of the speed of an fp32 model or faster, by CPU time; the upper end of the interval decides.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Which argument of `from_pretrained` sets the type in which the weights are trained?",
    "AdamW keeps squares of gradients. The smallest fp16 number above 0 is 0.00000006. What is the square of 0.0001?",
    "The type that is trained and the type that is returned need not be the same: `model.half()` gives fp16.",
)

# %% tags=["exercise"]
import copy

answer = None  # def answer(folder, train): ...; return model


def by_trainer(model, steps):
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(256).reshape(16, 16)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=steps, use_cpu=True, learning_rate=1e-4, **QUIET)
        arguments._n_gpu = min(1, arguments.n_gpu)
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


# %% jupyter={"source_hidden": true}
def returned(answer, _):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder, load, given = Path(name), LlamaForCausalLM.from_pretrained, []
        LlamaForCausalLM(LlamaConfig(**SIZES)).half().save_pretrained(folder)
        files = {file: file.read_bytes() for file in folder.iterdir()}
        plain, other = (load(folder, dtype=torch.float32) for _ in range(2))
        made = answer(folder, partial(by_trainer, steps=10)).state_dict()
        is_kept = files == {file: file.read_bytes() for file in folder.iterdir()}
        by_trainer(other, steps=10)
        wanted = other.half().state_dict()
        answer(folder, lambda model: given.append(copy.deepcopy(model)))  # as it is trained
        taken = in_turns([partial(by_trainer, model, steps=4) for model in (plain, given[0], plain)], turns)
    equal = sum((made[name] == weight).sum().item() for name, weight in wanted.items())
    sizes = [sum(weight.nbytes for weight in weights.values()) for weights in (made, wanted)]
    count = sum(weight.numel() for weight in wanted.values())
    return {"kept": is_kept, "equal": equal / count, "size": sizes[0] / sizes[1], "turns": taken}


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    run = lab.run(partial(returned, answer), "challenge", measure="value", use_cpu=True)
    if not (run.ok or lab.machine.rehearsed):
        return exercises.run_failed(run)
    found, speed = run.value, Ratio.of_turns([run.value["turns"]], CPU, 1.05)
    message = f"{found['equal']:.0%} of the weights are fp32's, {found['size']:g} x the bytes, {speed} x the speed"
    if not found["kept"]:
        return exercises.wrong(f"{message}. The files in `folder` were changed: convert the model, not its checkpoint")
    if found["size"] != 1:
        return exercises.wrong(f"{message}. Your colleague wants fp16 back")
    if found["equal"] < 0.9:
        return exercises.wrong(f"{message}. In which type are the weights and AdamW's states while they are trained?")
    if speed.high < 0.8:
        return exercises.wrong(f"{message}. Too slow: which type had the shortest training step, above?")
    return exercises.right(message)


exercises.check(lab, "fp16 back", check, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def through_fp32(folder, train):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    train(model)
    return model.half()


def as_it_is(folder, train):
    model = LlamaForCausalLM.from_pretrained(folder)  # trained in fp16
    train(model)
    return model


exercises.prove(check, solution=through_fp32, mistake=as_it_is)

# %% [markdown]
# ## Common mistakes
#
# - *Loading an fp16 checkpoint without a dtype.* Print `model.dtype` before the first step.
# - *Reporting one process's samples/s as the total*, or comparing two processes at twice the global batch. Here each update has 16 samples in total, and the clock of one process times the whole update, whether one process trains or two.
# - *Ignoring a container's quota.* torch counts the host's cores. `perf-helpers doctor` reports these cores and the quota.
# - *Following Intel's list of tools for CPUs*: oneCCL, Intel MPI, tcmalloc, libiomp. These are libraries to preload or separate launchers. This lesson measured none of them, so measure before you adopt one. IPEX, with which most old pages begin, has [no releases any more](https://github.com/intel/intel-extension-for-pytorch/issues/867).
#
# ## Recap
#
# The numbers are those of a recorded run (AMD EPYC, 2 cores, torch 2.15.0, 2026-11-29).
#
# - A training step in fp16 ran at 0.18 of bf16's speed, within the range predicted from the measured parts. The CPU's list of instruction sets does not predict this speed.
# - The Trainer obeyed bf16 and ignored fp16: 1 flag of 2. An fp16 checkpoint stays fp16 unless you pass a `dtype`.
# - bf16 reduced the peak to 0.80 at micro-batch 64, and not at all at micro-batch 1.
# - torchrun gave each process 1 thread, plain processes took all cores. Too many threads cost 1.77 times the CPU time for the same work.

# %% tags=["finish"]
claims.finish()
