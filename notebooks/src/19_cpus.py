# %% [markdown]
# # No GPU: what can this CPU really train?
#
# More than people think, and not with the settings they copy.
#
# **You will see**
# - three ceilings of your CPU, in fp32, bf16 and fp16, and what they make of a training step
# - which of the Trainer's flags a CPU obeys, and which it takes without a word and drops
# - processes against threads on the same cores, and what threads cost that only wait

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
# A CPU has a few **cores**. A **thread** is one line of work; a core does one at a time. torch splits a large product among several threads. A **process** has its own memory and its own threads. Two processes can train together, each with half of the batch (lesson 15).
#
# And a core multiplies numbers of each type at another rate. Everything here runs on the CPU, with a GPU too.
#
# ## Predict
#
# A small Llama is trained with all of its weights in fp16, on one thread.

# %%
WALL, CPU = 0, 1  # two clocks: on the wall, and the seconds that processors computed
CORES = lab.machine.cpu_cores or 1
HALF = max(1, CORES // 2)
turns = 3 if lab.profile.name == "tiny" else 7
asked = "How many times as long as in fp32 does one training step take in fp16, on this CPU?"
widgets.predict(lab, "fp16", asked, "x", 0, 40)

# %% [markdown]
# ## By hand: three ceilings
#
# A linear layer computes three products in a training step: its output, and in the backward pass the gradient of its input and that of its weight. In the second and the third, other sides of the matrices meet. We time each, in each type.
#
# `in_turns` calls each function once a turn, so that a busy neighbour disturbs all alike. It gives two clocks: the one on the wall, and the seconds that processors computed. On one thread we take the second: waiting for a core does not count.

# %%
F = torch.nn.functional
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def products(kind, rows=128, inputs=128, outputs=256):
    """The three products of a linear layer in a step: output, gradient of the input, gradient of the weight."""
    x, weight, back = (torch.randn(*shape).to(kind) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    return [lambda: F.linear(x, weight), lambda: back @ weight, lambda: back.T @ x]


def rates(_):
    """GFLOP/s of each, in each type, on one thread."""
    torch.set_num_threads(1)
    taken = {name: in_turns(products(kind), turns) for name, kind in KINDS.items()}
    flops = 2 * 128 * 128 * 256
    return {name: [flops / min(turn[CPU] for turn in one) / 1e9 for one in three] for name, three in taken.items()}


by_type = lab.run(rates, measure="value", use_cpu=True).value
heads = ["type", "output", "gradient of the input", "gradient of the weight"]
plots.Table(heads, [[name, *map(float, three)] for name, three in by_type.items()], "GFLOP/s of one thread")

# %% [markdown]
# Where a row is far below fp32's, the core has no instruction for that type. The library then **emulates**: it widens each number, multiplies in fp32 and rounds again. Its slow path need not be equally slow for the three products.
#
# Names and flags of a CPU do not tell. So the lesson predicts from what it just measured, and then looks.
#
# ## A step is the sum of its parts
#
# The parts that a type changes most are the linear layers and attention. We time them by themselves, in each type. The rest of the step, measured in fp32, may take half of its time (half of the bytes) or twice (more casts). That gives a range.

# %%
SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)
LINEAR = {(128, 128): 8, (128, 256): 5, (256, 128): 2}  # inputs, outputs: how many, the head included


def backward_of(function, *shapes, kind):
    """A function that goes forward and backward through `function`, all of its tensors in one type."""
    tensors = [torch.randn(*shape).to(kind).requires_grad_() for shape in shapes]
    with torch.no_grad():
        back = torch.ones_like(function(*tensors))
    return lambda: torch.autograd.grad(function(*tensors), tensors, back)


def parts(kind):
    """(how many, function) of each product of a step: 4 samples of 32 tokens."""
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
    """By type: seconds of the parts; turns of a whole step; the type that a checkpoint is loaded in; what was said."""
    torch.set_num_threads(1)
    ids, models = torch.randint(0, 256, (4, 32)), {}
    with warnings.catch_warnings(record=True) as said, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        for name, kind in KINDS.items():
            LlamaForCausalLM(LlamaConfig(**SIZES)).to(kind).save_pretrained(Path(folder, name))
            models[name] = LlamaForCausalLM.from_pretrained(Path(folder, name))  # as people write it
        steps = [step_of(models[name], ids) for name in (*KINDS, "bf16")]
        named = [(name, *part) for name, kind in KINDS.items() for part in parts(kind)]
        taken = in_turns([*steps, *(work for *_, work in named)], turns)  # a slow minute meets the parts and the whole
    seconds = dict.fromkeys(KINDS, 0.0)
    for (name, number, _), each in zip(named, taken[4:]):
        seconds[name] += number * min(turn[CPU] for turn in each)
    loaded = {name: str(model.dtype) for name, model in models.items()}
    return {"parts": seconds, "turns": taken[:4], "loaded": loaded, "said": [str(each.message) for each in said]}


# %%
types = lab.run(in_types, measure="value", use_cpu=True).value


def foretold(parts, fp32_step):
    """Between which values the speed of a step in fp16 against bf16 lies, by the parts."""
    rest = max(0.0, fp32_step - parts["fp32"])
    return (parts["bf16"] + rest / 2) / (parts["fp16"] + 2 * rest), (parts["bf16"] + 2 * rest) / (
        parts["fp16"] + rest / 2
    )


fp32_turns, bf16_turns, fp16_turns, again = types["turns"]
least = {name: min(turn[CPU] for turn in each) for name, each in zip(KINDS, types["turns"])}
expected = foretold(types["parts"], least["fp32"])
slower = Ratio.of_turns([[bf16_turns, fp16_turns, again]], CPU, 1.05)
rows = [[name, types["loaded"][name], 1e3 * types["parts"][name], 1e3 * least[name]] for name in KINDS]
display(plots.Table(["checkpoint", "loaded as", "its products (ms)", "a training step (ms)"], rows))
print(f"speed of fp16, bf16 = 1: foretold {expected[0]:.2f} to {expected[1]:.2f}, measured {slower}")
print(f"warnings: {types['said']}")
widgets.revealed(lab, "fp16", least["fp16"] / least["fp32"])

# %% [markdown]
# Read the column "loaded as". A checkpoint that was saved in fp16, as many on the Hub are, *stays* in fp16: since transformers 5 the default of `from_pretrained` is `dtype="auto"` (`modeling_utils.py`), where older versions gave fp32. On a GPU that is welcome. On a CPU without fp16 instructions it crawls, and nobody says why ([issue 34692](https://github.com/huggingface/transformers/issues/34692), [issue 41867](https://github.com/huggingface/transformers/issues/41867); both closed).
#
# The remedy is one argument: `from_pretrained(..., dtype=torch.float32)`, and `bf16=True` where the table above says that bf16 is fast.
#
# ## The library's switches
#
# The guide's switch for a CPU is `TrainingArguments(use_cpu=True, bf16=True)`. Older editions name fp16 beside it, and older ones yet `use_ipex`, `jit_mode_eval` and `no_cuda`. Does each do something? A hook on a linear layer tells in which type it really multiplies.


# %%
QUIET = dict(report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1)


def note_type(seen, layer, inputs, output):
    seen.append(str(output.dtype))


def flagged(_):
    """By flag: the type that comes out of a linear layer while the Trainer trains, and the losses."""
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(256).reshape(16, 16)]
    found = {}
    for flag in (None, "bf16", "fp16"):
        torch.manual_seed(0)
        model, seen = LlamaForCausalLM(LlamaConfig(**SIZES)), []
        model.model.layers[0].mlp.up_proj.register_forward_hook(partial(note_type, seen))
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(folder, max_steps=3, use_cpu=True, **QUIET, **({flag: True} if flag else {}))
            arguments._n_gpu = min(1, arguments.n_gpu)
            trainer = Trainer(model, arguments, train_dataset=rows)
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
        found[str(flag)] = {"type": seen[-1], "losses": losses}
    return found


# %%
flags = lab.run(flagged, measure="value", use_cpu=True).value
rows = [[flag, each["type"], str(each["losses"])] for flag, each in flags.items()]
display(plots.Table(["flag, with use_cpu=True", "a linear layer computes in", "losses"], rows))
obeyed = sum(flags[flag]["type"] == str(KINDS[flag]) for flag in ("bf16", "fp16")) / 2


# %%
def taken(flag):
    """Whether TrainingArguments takes a flag."""
    try:
        TrainingArguments(tempfile.mkdtemp(), **{flag: True})
    except (TypeError, ValueError) as error:
        print(f"{flag}: {type(error).__name__}: {error}")
        return False
    return True


accepted = {flag: taken(flag) for flag in ("use_ipex", "jit_mode_eval", "no_cuda")}
print(f"bf16 without use_cpu is taken: {taken('bf16')}")

# %% [markdown]
# `bf16=True` without `use_cpu` is an error on a machine without a GPU. `fp16=True` with `use_cpu` is taken, and the losses are fp32's to the last digit: accelerate (`Accelerator.__init__` in `accelerator.py`) switches fp16 on for devices other than "cpu" only, and says nothing about the rest. The three older flags are gone.
#
# ## Does bf16 save memory?
#
# The guide says that bf16 mixed precision on a CPU "reduces memory usage". Bytes are counted exactly, so four batches suffice.

# %%
memory = {}
small = Task("bert-tiny", seq_len=64)
for batch in (1, 4, 16, 64):
    for name, more in {"fp32": {}, "bf16": {"bf16": True}}.items():
        given = {"per_device_train_batch_size": batch, "use_cpu": True} | more
        memory[batch, name] = lab.train(f"{name}, batch {batch}", task=small, measure=("memory",), **given)
peaks = {key: run.peak_bytes for key, run in memory.items()}
shares = {batch: peaks[batch, "bf16"] / peaks[batch, "fp32"] for batch in (1, 4, 16, 64)}
rows = [[batch, *(plots.bytes_text(peaks[batch, n]) for n in ("fp32", "bf16")), shares[batch]] for batch in shares]
plots.Table(["micro-batch", "peak in fp32", "peak with bf16=True", "ratio"], rows)

# %% [markdown]
# The ratio begins at 1. Mixed precision keeps weights, gradients and states in fp32 (lesson 07), and with a small batch the peak is the optimizer's step, where these are all there is. What shrinks is activations: with large batches it pays.
#
# ## Who decides how many threads?
#
# Three people may: you, by `OMP_NUM_THREADS` or `torch.set_num_threads`; torch, which takes a thread for each core; and the launcher. `torchrun` below starts two processes, and so does plain Python. Nothing is set.

# %%
SCRIPT = "import os, torch; print(f'<{torch.get_num_threads()}>', flush=True)"
unset = {name: text for name, text in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
unset |= {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
with tempfile.TemporaryDirectory() as folder:
    (path := Path(folder, "script.py")).write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    commands = {"torchrun": [[*launcher, str(path)]], "plain Python, twice": [[str(path)]] * 2}
    threads = {}
    for name, each in commands.items():
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=unset)
        started = [subprocess.Popen([sys.executable, *command], **pipes) for command in each]
        told = "".join(process.communicate(timeout=180)[0] for process in started)
        threads[name] = [int(number) for number in re.findall(r"<(\d+)>", told)]
        print(f"{name}: threads of each process {threads[name]}, for {CORES} cores")

# %% [markdown]
# torchrun gives each process **one** thread ("to avoid your system being overloaded"), in `torch/distributed/run.py`. On two cores that is right. On 64 cores, 62 idle. Plain processes, and `mpirun`, take all cores *each*. Neither shares the cores out. So set it: `OMP_NUM_THREADS` = cores / processes.
#
# ## Processes times threads
#
# Now train, in every layout, in turns. Each **update** takes 16 samples in all, whoever computes them: else two processes would be compared at twice the batch, a common mistake. A process takes micro-batches and accumulates (lesson 05); two processes sum their gradients once an update.


# %%
def an_update(model, rows, ranks, micro, bf16=False, samples=16):
    """A function that makes one update of so many samples in all, and gives this process's mean loss."""
    accumulate = samples // (micro * ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    called = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    batches = itertools.cycle(range(len(rows["labels"]) // samples))

    def update():
        first, mean = samples * next(batches), 0.0
        mine = slice(first + (dist.get_rank() if ranks > 1 else 0), first + samples, ranks)
        for number in range(accumulate):
            called.require_backward_grad_sync = number == accumulate - 1  # what DDP's no_sync() sets
            few = {name: part[mine][number * micro : (number + 1) * micro] for name, part in rows.items()}
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
    """Turns of an update by each recipe (bf16, processes, threads, micro-batch) and of some parts; by one of two ranks."""
    dist.init_process_group("gloo")
    rank, rows, works, losses = dist.get_rank(), task.batch(160), {}, {}

    def add(name, work, ranks, threads):
        def run():
            torch.set_num_threads(threads)
            if rank < ranks:
                losses[name] = work()
            dist.barrier()  # who has nothing to do waits here, asleep

        works[name] = run

    for bf16, ranks, threads, micro in recipes:
        update = an_update(task.build_model(), rows, ranks, micro, bf16)
        add(str((bf16, ranks, threads, micro)), update, ranks, threads)
    gradients, (left, right) = torch.zeros(task.parameters()), (torch.randn(256, 256), torch.randn(256, 1024))
    add("silent", an_update(task.build_model(), rows, 1, 8, samples=8), 2, HALF)
    add("sum", lambda: dist.all_reduce(gradients) and None, 2, HALF)
    wide = left @ right
    for threads in sorted({CORES, max(1, CORES - 1)}):
        add(f"product, {threads}", lambda: [left @ right for _ in range(40)] and None, 1, threads)
        add(f"other work, {threads}", lambda: [F.gelu(wide) for _ in range(40)] and None, 1, threads)
    return {"turns": dict(zip(works, in_turns([*works.values()], turns))), "losses": losses}


# %% [markdown]
# Two things are timed beside the layouts. *Silent* processes train and send nothing, and the sum is timed by itself: from these follows what DDP can be worth here. And a product and an element-wise operation, by all threads and by one fewer, tell what a thread is worth.

# %%
PLACES = [(1, HALF), (1, CORES), (2, HALF)]  # processes, threads of each
crowded = (False, 2, max(2, CORES), 8)  # as many threads in each process as there are cores
fewer = (False, 1, CORES - 1, 8)
grid = [(bf16, *place, micro) for bf16 in (False, True) for place in dict.fromkeys(PLACES) for micro in (8, 2)]
recipes = list(dict.fromkeys([*grid, crowded, *([fewer] if CORES > 1 else [])]))
work = Task("bert-small", seq_len=32, data="learnable", config={"num_hidden_layers": 2, "vocab_size": 200})
run = lab.run(partial(layouts, recipes=recipes), "layouts", task=work, processes=2, measure=("none",), use_cpu=True)
both = [rank["value"] for rank in run.ranks]


def seconds(name, clock=WALL):
    """Of each turn: by the wall of rank 0, or computed by both ranks together."""
    ones = [rank["turns"][str(name)] for rank in both]
    return (
        [turn[WALL] for turn in ones[0]] if clock == WALL else [sum(turn[CPU] for turn in pair) for pair in zip(*ones)]
    )


def faster(name, than, clock=WALL):
    """How many times as fast, with an interval."""
    return lab.ratio([slow / quick for slow, quick in zip(seconds(than, clock), seconds(name, clock))])


# %%
shown = [recipe for recipe in recipes if not recipe[0] and recipe[3] == 8]
names = [f"{ranks} x {threads}" for _, ranks, threads, _ in shown]
speeds = [16 / median(seconds(recipe)) for recipe in shown]
costs = [1e3 * median(seconds(recipe, CPU)) / 16 for recipe in shown]
_, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained", sharey=True)
for ax, values, label in zip(axes, (speeds, costs), ("samples/s", "CPU milliseconds a sample")):
    ax.barh(names, values, color=plots.SERIES[label != "samples/s"])
    for row, value in enumerate(values):
        ax.text(value, row, f" {value:.3g}", va="center")
    ax.set(xlabel=label, xlim=(0, 1.2 * max(values)))
    ax.spines[["top", "right"]].set_visible(False)
axes[0].invert_yaxis()
axes[0].set_title("Processes x threads of each, fp32", loc="left")
plt.show()

# %% [markdown]
# Left: more is better. Right: less is better. Compare `1 x all` with two processes of half of the threads: both use every core. And look at the crowded layout on the right. A thread that has finished its part waits for the others by *spinning*: it asks again and again, and a processor is busy with that. The work is the same, the CPU time is not. On a rented machine you pay for it.

# %%
alone, together = (False, 1, HALF, 8), (False, 2, HALF, 8)
scaled, silent = faster(together, alone), faster("silent", alone)
with_sum = lab.ratio([one / (two + s) for one, two, s in zip(*map(seconds, (alone, "silent", "sum")))])
rival = faster((False, 1, CORES, 8), alone)
print(f"two processes {scaled} x one; silent they would be {silent}, with all of the sum on top {with_sum}")
print(f"the honest rival, one process with all {CORES} threads: {rival}")
waste = lab.ratio([a / b for a, b in zip(seconds(crowded, CPU), seconds(together, CPU))])
print(f"CPU seconds a sample, crowded / shared out: {waste}")
left_free = faster(fewer, (False, 1, CORES, 8)) if CORES > 1 else None
of_parts = [faster(f"{part}, {max(1, CORES - 1)}", f"{part}, {CORES}") for part in ("product", "other work")]
print(f"one thread fewer: {left_free} x the speed; products alone {of_parts[0]}, other work alone {of_parts[1]}")

# %%
exercises.question(
    lab,
    "quota",
    "A container may use 2 of a host's 64 cores (a quota). torch sees 64. How many threads does it start?",
    {
        "2: the container has 2": "A quota is time, not cores: 64 threads run for a moment, then all of them are stopped "
        "until the next period. torch does not read it. The course's `doctor` does.",
        "64, and they share the time of 2": "So set `OMP_NUM_THREADS=2`. The doctor tells you when the two differ.",
        "1, to be safe": "Only torchrun does that, and for several processes alone.",
    },
    right="64, and they share the time of 2",
)

# %% [markdown]
# ## What held
#
# Timed claims are held against what was foretold above, from parts that were measured in the same run.

# %% tags=["claim"]
display(claims.check("cpu-fp16-as-bf16", slower, predicted=expected, note="one thread, CPU time"))

# %% tags=["claim"]
note = ", ".join(f"{share:.2f} at {batch}" for batch, share in shares.items())
display(claims.check("cpu-bf16-memory", max(shares.values()), note=f"peak in bf16 / fp32: {note}"))

# %% tags=["claim"]
same = flags["fp16"]["losses"] == flags["None"]["losses"]
display(claims.check("cpu-flags-alike", obeyed, note=f"fp16=True gives the losses of fp32: {same}"))
display(claims.check("ipex-flags", sum(accepted.values())))

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
# On the page itself two sentences disagree: one core less than the socket has, says the tip, and the Kubernetes part says as many threads as units of CPU. Of few cores, one is a lot.
#
# ## Explore


# %% tags=["widget"]
def draw(micro, kind):
    """Samples/s of the layouts that were measured."""
    found = [16 / median(seconds((kind == "bf16", *place, micro))) for place in dict.fromkeys(PLACES)]
    _, ax = plt.subplots(figsize=(6, 2.2), layout="constrained")
    ax.barh([f"{ranks} x {threads}" for ranks, threads in dict.fromkeys(PLACES)], found, color=plots.SERIES[0])
    ax.set(xlabel="samples/s", xlim=(0, 16 / min(median(seconds(recipe)) for recipe in grid)))
    ax.set_title(f"{kind}, micro-batch {micro}", loc="left")
    return ax


_ = widgets.explore(draw, micro=[8, 2], kind=["fp32", "bf16"])

# %% [markdown]
# ## Exercise: the best recipe for this CPU
#
# `Trainer(use_cpu=True)` starts in fp32, one process, all cores. Choose better: dtype, processes, threads and micro-batch, for updates of 16 samples. Asked are 90 % of the samples/s of the best recipe measured above, with a band for a busy machine, and a loss that is as near to fp32's as another seed would be.

# %%
exercises.hint(
    "Which row of the first table is the fastest? That decides the dtype. Then move the explorer: the larger micro-batch first, then the layouts."
)

# %% tags=["exercise"]
answer = None  # dict(dtype="fp32", processes=1, threads=CORES, micro_batch=8)


# %%
def seeds(task):
    """The loss of the last update of `layouts`, by seed."""
    torch.set_num_threads(1)
    models = [task.replace(seed=seed).build_model() for seed in range(3)]
    updates = [an_update(model, task.batch(160), 1, 8) for model in models]
    return [[update() for _ in range(turns + 1)][-1] for update in updates]


def loss_of(recipe):
    return sum(rank["losses"][str(recipe)] for rank in both[: recipe[1]]) / recipe[1]


of_seeds = lab.run(seeds, task=work, measure="value", use_cpu=True).value
band = max(of_seeds) - min(of_seeds)
best = min(grid, key=lambda recipe: median(seconds(recipe)))
print(f"losses by seed {of_seeds}, a band of {band:.3f}")


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if answer.get("dtype") not in ("fp32", "bf16"):
        return exercises.wrong("on a CPU the Trainer knows fp32 and bf16: fp16=True trains in fp32")
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
# **A challenge.** Save the small Llama in fp16. Train it by the Trainer on this CPU as fast as fp32 does, without touching the checkpoint's file.
#
# ## Mistakes that strangers make
#
# - *An fp16 checkpoint, loaded as it is.* Ask `model.dtype` before the first step.
# - *One process's samples/s called the total*, or two processes compared at twice the global batch. Here each update has 16 samples, and one clock times both.
# - *A container's quota.* torch counts the host's cores. `perf-helpers doctor` tells of both.
# - *Intel's list*: oneCCL, Intel MPI, tcmalloc, libiomp. They are libraries to preload or launchers of their own; nothing here measured them. IPEX, which most old pages begin with, has [no releases any more](https://github.com/intel/intel-extension-for-pytorch/issues/867).
#
# ## Recap
#
# - Three ceilings were measured. They foretold what fp16 and bf16 make of a step, where no flag did.
# - bf16 was obeyed, fp16 taken and dropped, and an fp16 checkpoint stayed fp16. bf16 saved memory with large batches only.
# - torchrun gave each process one thread, plain processes all cores. On the same cores processes and threads were compared at one batch, and threads that waited cost CPU time.

# %% tags=["finish"]
claims.finish()
