# %% [markdown]
# # Is the GPU waiting for you?
#
# A training step needs a batch. If the batch is not there when the step could begin, the device stands still, however fast it is.
#
# **You will see**
# - the time that each step waits for its batch, measured without a profiler, and what a thread and what workers can hide of it
# - when more workers help, when they hurt, and what each of them costs
# - batches made cheaper: tokenised before, padded less or packed, sent to a GPU from pinned memory

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import os
import queue
import random
import tempfile
import threading
import time

import matplotlib.pyplot as plt
import numpy as np
import psutil
import torch
from datasets import Dataset as ArrowDataset
from IPython.display import display
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from perf_helpers import Claims, Lab, Task, exercises, interleaving, plots, widgets

lab = Lab(profile, strict=strict, out=out, lesson="12_dataloader")
claims = Claims(lab)
on_gpu = lab.machine.kind == "cuda"
small = Task("bert-small", seq_len=128) if on_gpu else Task("bert-tiny", seq_len=32, config={"vocab_size": 500})
BATCH = 16 if on_gpu else 8

# %% [markdown]
# ## Idea
#
# Feeding and training are two jobs. One after the other, a step takes the *sum* of both. Side by side it takes the *longer* of the two, and then a reader that is quick enough costs nothing. A thread can work beside the training, or other processes can: the **workers** of PyTorch's `DataLoader`.
#
# ## Predict
#
# Below, a reader needs as long for a batch as the training needs for three steps, all of it spent waiting, as for a disk or a network. Then four workers read.

# %%
widgets.predict(
    lab, "four workers", "How many times as fast does training run with 4 workers as with none?", "x", 0, 10
)

# %% [markdown]
# ## By hand
#
# A reader that is slow on purpose. One kind *waits* and leaves the core to others. The other *computes in Python*, as a decoder may. Each sample tells who read it and when.
#
# A worker starts as a *fork*, a copy of the process with all that is in it. Python 3.14 starts new ones by another way (*forkserver*), where the data set is pickled and sent; this lesson is about forks, so `forked` asks for them.


# %%
class Reader(Dataset):
    def __init__(self, samples, seconds, computes=False):
        self.samples, self.computes = samples, computes
        self.seconds = seconds if callable(seconds) else lambda _: seconds  # for one sample

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        begin = time.perf_counter()
        if self.computes:
            end = time.thread_time() + self.seconds(index)
            while time.thread_time() < end:
                pass
        else:
            time.sleep(self.seconds(index))
        sample = {name: values[index % len(values)] for name, values in self.samples.items()}
        return sample | {"when": torch.tensor([os.getpid(), begin, time.perf_counter()], dtype=torch.float64)}


def forked(num_workers=0, **options):
    """Arguments of a DataLoader."""
    return {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None} | options


# %% [markdown]
# `follow` has the whole trick of measuring without a profiler: look at the clock when a step ends, and again when the next batch is in hand. A step has ended when its loss is known, so each step asks for it. (For measuring only: elsewhere a loop that asks for each loss keeps the host from running ahead of the GPU.)
#
# The cell after it is plumbing: skip it. `stepper` gives a training step of a small BERT, and its seconds, the unit below. `fed` lets several ways of feeding follow each other in one clean process.


# %%
def follow(batches, step, steps=8, skip=3):
    """What happened when: (who, what, begin, end), the first steps left out."""
    batches, bars, end = iter(batches), [], time.perf_counter()
    for _ in range(skip + steps):
        asked, batch = end, next(batches)
        begin = time.perf_counter()  # the batch is in hand
        step(batch)
        end = time.perf_counter()
        who, begins, ends = batch["when"].T.tolist()
        bars += [(int(who[0]), "read", begins[0], ends[-1])]
        bars += [(os.getpid(), "wait", asked, begin), (os.getpid(), "train", begin, end)]
    return bars[3 * skip :]


def total(bars, *what):
    """Seconds a step."""
    taken = [end - begin for _, did, begin, end in bars if did in what]
    return sum(taken) / sum(did == "train" for _, did, *_ in bars)


def waiting_share(bars):
    return total(bars, "wait") / total(bars, "wait", "train")


# %%
def stepper(task):
    torch.set_num_threads(1)
    model = task.build_model().to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(batch):
        loss = model(**{name: batch[name].to(model.device, non_blocking=True) for name in samples}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for the device

    samples = task.batch(32 * BATCH)
    ready = {name: values[:BATCH] for name, values in samples.items()}
    ((*turns,),) = interleaving.in_turns([lambda: step(ready)], 9)
    return step, samples, sorted(seconds for seconds, _ in turns)[4]


def fed(ways, steps=8, skip=3, turns=1):
    def job(task):
        step, samples, own = stepper(task)
        each = {name: lambda way=way: follow(way(samples, own), step, steps, skip) for name, way in ways.items()}
        return [{name: seen() for name, seen in each.items()} for _ in range(turns)]

    return lab.run(job, task=small, measure=("none",)).value


# %% [markdown]
# And here is the thread that fetches ahead. In the table a batch takes as long to read as *one* step, so side by side would be twice as fast as one after the other. Compare its columns for each kind of reader.


# %%
def reading(steps_long, computes=False, **options):
    """A way to feed: a DataLoader over a reader that needs so many steps' time for a batch."""
    return lambda samples, own: DataLoader(
        Reader(samples, steps_long * own / BATCH, computes), BATCH, **forked(**options)
    )


def threaded(way, depth=2):
    def ahead(batches):
        buffer = queue.Queue(depth)

        def fetch():
            for batch in batches:
                buffer.put(batch)

        threading.Thread(target=fetch, daemon=True).start()
        while True:
            yield buffer.get()

    return lambda samples, own: ahead(way(samples, own))


# %%
ways = {}
for kind, computes in {"waits": False, "computes": True}.items():
    ways |= {f"{kind}, no help": reading(1, computes), f"{kind}, a thread": threaded(reading(1, computes))}
    ways[f"{kind}, a worker"] = reading(1, computes, num_workers=1)
(by_hand,) = fed(ways)
both = {name: total(bars, "wait", "train") for name, bars in by_hand.items()}
for kind in ("waits", "computes"):
    saved = [1 - both[f"{kind}, {helper}"] / both[f"{kind}, no help"] for helper in ("a thread", "a worker")]
    changed = " and ".join(f"{abs(part):.0%} {'shorter' if part > 0 else 'longer'}" for part in saved)
    print(f"The reader {kind}: with a thread and with a worker a step was {changed} here.")
rows = [
    [name, f"{1e3 * total(bars, 'wait'):.1f}", f"{1e3 * total(bars, 'train'):.1f}", f"{1e3 * both[name]:.1f}"]
    for name, bars in by_hand.items()
]
plots.Table(["the reader", "waiting, ms a step", "training, ms a step", "both, ms"], rows)

# %% [markdown]
# A thread that sleeps, or waits for a disk, gives up Python's *global interpreter lock* (GIL), and the training goes on. A thread that computes in Python holds it. Then the wait in front of the step comes back *inside* the step, which now fights for the lock. A worker is a process with an interpreter and a lock of its own. What it needs is a core of its own; on a busy machine even that may be missing.

# %%
exercises.question(
    lab,
    "thread",
    "Your collate function spends 20 ms in plain Python loops, a step 20 ms in many small operations. You move "
    "loading into a thread. What becomes of the 40 ms?",
    {
        "About 20 ms: the two now overlap.": "So it would be with a disk. Two threads that both need the interpreter "
        "take turns, however many cores there are.",
        "About 40 ms, though the wait in front of the step is shorter.": "The time moved into the step, which waits "
        "for the lock. So look at the sum, and not at the waiting alone.",
        "About 60 ms: a thread costs as much again.": "Changing turns costs something, and not that much.",
    },
    right="About 40 ms, though the wait in front of the step is shorter.",
)

# %% [markdown]
# ## Baseline
#
# No workers: by default the process that trains also reads. The slow reader waits for the time of three steps.
#
# ## Change one thing
#
# One argument. The two take turns, so that whatever else the machine does happens to both.

# %%
baseline = reading(3)
four = reading(3, num_workers=4)  # new
pairs = fed({"none": baseline, "four": four}, steps=6, turns=5)
gains = [total(turn["none"], "wait", "train") / total(turn["four"], "wait", "train") for turn in pairs]
workers_help = lab.ratio(gains)
waited = [waiting_share(pairs[0][name]) for name in ("none", "four")]
print("share of the time spent waiting: {:.0%} with no workers, {:.0%} with four".format(*waited))

# %% [markdown]
# ## Why: a Gantt chart
#
# The rules of a `DataLoader` fit into a few lines. Batch `i` belongs to worker `i` modulo their number. At the start each worker is asked for `prefetch` batches, and for one more whenever a batch is handed out. Batches are handed out in order.


# %%
def simulate(loading, workers, prefetch=2, batches=24, step=1.0):
    """(who, what, begin, end) of a pipeline; `loading` is the seconds of a batch, or gives those of a batch's number."""
    free, taken, bars, end = [0.0] * workers, [], [], 0.0
    for batch in range(batches):
        seconds = loading(batch) if callable(loading) else loading
        who, ready = "main", end + seconds
        if workers:
            number = batch % workers
            asked = taken[batch - prefetch * workers] if batch >= prefetch * workers else 0.0
            who, ready = f"worker {number + 1}", max(free[number], asked) + seconds
            free[number] = ready
        taken.append(max(ready, end))
        bars += [(who, "read", ready - seconds, ready), ("main", "wait", end, taken[-1])]
        bars += [("main", "train", taken[-1], taken[-1] + step)]
        end = taken[-1] + step
    return bars


def faster(workers):
    none, some = (simulate(3, count)[36:] for count in (0, workers))
    return total(none, "wait", "train") / total(some, "wait", "train")


widgets.revealed(lab, "four workers", workers_help.value, estimate=lab.foresee(faster, 4))


# %%
def gantt(bars, ax, title, unit=1.0, most=24):
    start = min(begin for _, _, begin, _ in bars)
    rows = [*dict.fromkeys([bars[-1][0], *(who for who, *_ in bars)])]  # the last bar trains
    colors = {"read": plots.SERIES[5], "wait": "white", "train": plots.SERIES[2]}
    for who, what, begin, end in bars:
        style = dict(color=colors[what], edgecolor="black", linewidth=0.6, hatch="///" if what == "wait" else None)
        ax.barh(rows.index(who), (end - begin) / unit, left=(begin - start) / unit, height=0.7, **style)
    ax.set_yticks(range(len(rows)), ["main process", *(f"worker {row}" for row in range(1, len(rows)))])
    ax.invert_yaxis()
    ax.set(xlabel="time, in steps", xlim=(0, most))
    ax.set_title(title, loc="left")
    marks = [plt.Rectangle((0, 0), 1, 1, fc=color, ec="black") for color in colors.values()]
    marks[1].set_hatch("///")
    ax.legend(marks, colors, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=10)
    return ax


(measured,) = fed({"two": reading(3, num_workers=2)}, steps=12, skip=0)
pair, axes = [simulate(3, 2, batches=12), measured["two"]], plt.subplots(2, 1, figsize=(9, 4), layout="constrained")[1]
gantt(pair[0], axes[0], "two workers, by the rules")
gantt(pair[1], axes[1], "two workers, measured", unit=total(pair[1], "train"))
shares = [waiting_share(bars[12:]) for bars in pair]
print("share of the time spent waiting: {:.0%} by the rules, {:.0%} measured".format(*shares))

# %% [markdown]
# Two workers are not enough for three steps of reading: find the steps that wait, above by the rules alone, below as the clock saw it.
#
# ## More workers
#
# None to four workers, for a reader that waits for three steps, one that *computes* for one step, and one that has everything ready. What do you expect of the second with as many cores as yours?

# %%
lengths = {"waits, 3 steps long": 3, "computes, 1 step long": 1, "has it ready": 0}
ways = {
    f"{name} {count}": reading(steps_long, name.startswith("computes"), num_workers=count)
    for name, steps_long in lengths.items()
    for count in range(5)
}
(sweep,) = fed(ways, steps=4)
series = {name: [1e3 * total(sweep[f"{name} {count}"], "wait", "train") for count in range(5)] for name in lengths}
ax = plots.lines(range(5), series, "workers", "ms a step, waiting included", title="One step, by number of workers")
ax.set_xticks(range(5))
ax.set_ylim(0)
print(f"cores here: {lab.machine.cpu_cores:g}")

# %% [markdown]
# A reader that waits is hidden as soon as there are as many workers as it is steps long. One that computes needs cores: where none is left, workers take them from the training and from each other. And where the input is ready there is nothing to win: the problem is elsewhere.
#
# So how many are too many? Each worker is a process. It is started when an epoch begins, and has memory of its own: its *unique* memory is what would come back if it ended. Here the data set is a list of Python texts, or the same texts in one array. And batches lie in shared memory on their way, in `/dev/shm`: up to `workers x prefetch_factor` of them, those included that are being made, and the one in hand.


# %%
def cost_of(count):
    def job(_):
        texts, found = [f"sentence number {number}" for number in range(200_000)], []
        for data in (np.array(texts), texts):  # whatever has a length and items is a data set
            begin = time.perf_counter()
            batches = iter(DataLoader(data, 4000, shuffle=True, collate_fn=len, **forked(count)))
            next(batches)
            found.append(time.perf_counter() - begin)
            for _ in range(2 * count):
                next(batches)
            workers = [worker.memory_full_info().uss for worker in psutil.Process().children()]
            found.append(sum(workers[-count:]) / count if count else psutil.Process().memory_full_info().uss)
            del batches  # its workers end
        return found

    return lab.run(job, f"{count} workers", measure=("none",)).value


unhelped, *costs = (cost_of(count) for count in (0, 1, 4, 16))
shared, needed = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None, (8 * 2 + 1) * 4 * 64 * 3 * 224 * 224
free = plots.bytes_text(shared and shared.f_bavail * shared.f_frsize)
print(f"free in /dev/shm: {free}; 8 workers with 64 pictures a batch may need {plots.bytes_text(needed)}")
rows = [[n, f"{1e3 * c[0]:.0f}", f"{c[1] / 1e6:.1f}", f"{c[3] / 1e6:.1f}"] for n, c in zip((1, 4, 16), costs)]
plots.Table(["workers", "to the first batch, ms", "unique MB a worker, array", "unique MB a worker, list"], rows)

# %% [markdown]
# The start is paid again in every epoch, unless `persistent_workers=True` keeps the workers. And a fork shares its parent's memory only until one of the two writes. To *read* a Python object is to write: its reference count. Page by page each worker gets a copy of the list. An array, a tensor or Arrow has one count for all of its content.
#
# In a `/dev/shm` of 4 MB torch 2.13 ended with *unable to allocate shared memory ... No space left on device*; older versions died of a *bus error*. The remedy often given, `torch.multiprocessing.set_sharing_strategy("file_system")`, ended with the same message, for its files lie there too. (It is against *too many open files*.) More space helps, or fewer and smaller batches.
#
# ## Irregular readers
#
# Suppose that a batch takes half a step, but every seventh takes ten, because a file is opened. That is under two steps on average: three workers should do. But a late batch holds up all that follow. Look for the smallest `prefetch_factor` without waits.


# %%
def irregular(batch):
    return 10.0 if batch % 7 == 6 else 0.5


def uneven(factor):
    def way(samples, own):
        reader = Reader(samples, lambda index: irregular(index // BATCH) * own / BATCH)
        return DataLoader(reader, BATCH, **forked(3, prefetch_factor=factor))

    return way


(found,) = fed({str(factor): uneven(factor) for factor in (1, 2, 4, 8)}, steps=14, skip=14)
rules = [waiting_share(simulate(irregular, 3, int(factor), 28)[42:]) for factor in found]
rows = [[factor, f"{rule:.0%}", f"{waiting_share(found[factor]):.0%}"] for factor, rule in zip(found, rules)]
plots.Table(["prefetch_factor", "waiting, by the rules", "waiting, measured"], rows)

# %% [markdown]
# A prefetch bridges one late batch; it cannot make up for readers that are too slow on average. Where a batch always takes 2.5 steps, it takes three workers.
#
# ## What every worker has: random numbers, and the whole stream
#
# A fork copies the state of every random generator too. Do all workers draw the same numbers? Once that was a famous bug of augmentations. Four workers draw from four sources, in two epochs; look for less than 8 different numbers.
#
# Data that is too large to be picked from by number is *streamed*: it lies in files (*shards*) that are read from end to end, which disks and object stores do best (WebDataset's tar files, for one). Then nobody deals out numbers, and each worker has to pick its own shards. The second table shows what happens else.


# %%
class Draws(Dataset):
    def __init__(self, reseed=False):
        self.own, self.reseed = np.random.default_rng(0), reseed

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.reseed and get_worker_info():
            self.own, self.reseed = np.random.default_rng(get_worker_info().seed), False  # new
        return torch.tensor([random.random(), torch.rand(()).item(), np.random.rand(), self.own.random()])


def drawn(_):
    epochs = [[torch.cat([*DataLoader(Draws(reseed), **forked(4))]) for _ in range(2)] for reseed in (False, True)]
    return [[len(source.unique()) for source in torch.cat(two).T] for two in epochs]


numbers = lab.run(drawn, measure="value").value
sources = ["random", "torch", "numpy's global generator", "a generator that the data set holds"]
plots.Table(["drawn from", "different numbers of 8", "reseeded in each worker"], [*zip(sources, *numbers)])


# %%
class Stream(IterableDataset):
    def __init__(self, shards, split):
        self.shards, self.split = shards, split

    def __iter__(self):
        worker = get_worker_info()
        for shard in self.shards[worker.id :: worker.num_workers] if self.split else self.shards:  # new
            yield from shard


def streamed(split):
    shards = [range(first, first + 16) for first in range(0, 128, 16)]  # 8 files with 16 samples each
    samples = torch.cat([*DataLoader(Stream(shards, split), 16, **forked(4))])
    return [len(samples), len(samples.unique())]


alone, own = lab.run(lambda _: [streamed(False), streamed(True)], measure="value").value
rows = [["left alone", *alone], ["each takes its own shards", *own]]
plots.Table(["four workers over 128 samples", "read", "different"], rows)

# %% [markdown]
# The last row of the first table is the trap: each worker, in each epoch, gets a copy of a generator that in the main process never moves on. The DataLoader seeds `random`, torch and numpy's global generator (the last one since torch 1.9); it cannot know of one that your data set holds. Seed that one from `get_worker_info().seed`.
#
# ## Less to do: tokenise before
#
# Work that is the same in every epoch can be done once. A tokenizer is trained on generated text. Then an epoch is loaded in three ways: tokenised batch by batch, and from Arrow files that `map` wrote before, with rows as Python lists and as tensors.


# %%
def tokenised(_):
    chance = random.Random(0)
    texts = [" ".join(f"word{chance.randrange(400)}" for _ in range(chance.randint(4, 60))) for _ in range(2000)]
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["[PAD]", "[UNK]"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    with tempfile.TemporaryDirectory() as folder:
        began, data = time.process_time(), ArrowDataset.from_dict({"text": texts})
        numbered = data.map(lambda rows: {"input_ids": tokenizer(rows["text"])["input_ids"]}, batched=True)
        numbered.remove_columns("text").save_to_disk(folder)
        once, ready = time.process_time() - began, ArrowDataset.load_from_disk(folder)
        ways = [(texts, lambda rows: tokenizer(rows, padding=True, return_tensors="pt"))]
        ways += [(ready, lambda rows: tokenizer.pad(rows, return_tensors="pt"))]
        ways += [(ready.with_format("torch"), lambda rows: pad_sequence([row["input_ids"] for row in rows], True))]
        loaders = [DataLoader(source, 16, collate_fn=collate) for source, collate in ways]
        taken = interleaving.in_turns([lambda loader=loader: [*loader] for loader in loaders], 3)
    return [once, *(min(cpu for _, cpu in turns) for turns in taken)]


once, *epoch = lab.run(tokenised, measure=("none",)).value
saved = epoch[0] - epoch[2]
print(f"done once: {once:.2f} s, paid back after", f"{once / saved:.1f} epochs" if saved > 0 else "no number of epochs")
names = ["for each batch", "before, rows as lists", "before, rows as tensors"]
plots.Table(["tokenised", "CPU ms a batch of 16"], [[name, 1e3 * seconds / 125] for name, seconds in zip(names, epoch)])

# %% [markdown]
# Reading is not free either. Rows that come back as Python lists must become tensors again, batch after batch, and that eats some of what was saved, or all. So measure the whole way to the batch.
#
# ## Less to do: pad less
#
# A batch is a rectangle. Short sequences are filled up with padding, and the model computes on it. We count it for batches that are always 128 tokens wide, as wide as their longest sequence, and made of sequences of like length. (The Trainer's argument is `train_sampling_strategy="group_by_length"`; the sampler is the one that it uses.) And for *packed* ones, whose rows hold several sequences one behind the other, each of which sees only itself (lesson 11).


# %%
def packed(lengths, width=128):
    """Rows of several sequences each."""
    rows = []
    for length in lengths:
        room = [row for row in rows[-16:] if sum(row) + length <= width]
        if not room:
            room = [[]]
            rows += room
        room[0].append(length)
    return rows


def batches(rows, width=None):
    each = [rows[at : at + BATCH] for at in range(0, len(rows), BATCH)]
    return [(batch, width or max(map(sum, batch))) for batch in each]


def inputs_of(rows, width):
    """A batch, by the lengths of the sequences in each of its rows."""
    numbers = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
    numbers = pad_sequence([*numbers, torch.zeros(width, dtype=torch.long)], True, -1)[:-1]  # -1 is padding
    mask = (numbers >= 0).long()
    if max(map(len, rows)) > 1:  # a token sees those of its own sequence
        mask = numbers[:, None, :, None] == numbers[:, None, None, :]
    return {"input_ids": numbers.clamp(min=0), "attention_mask": mask, "labels": torch.zeros(len(rows)).long()}


# %%
def padding(task):
    lengths = np.clip(np.random.default_rng(0).lognormal(3.3, 0.7, 2048), 4, 128).astype(int).tolist()
    grouped = LengthGroupedSampler(BATCH, lengths=lengths, generator=torch.Generator().manual_seed(0))

    apart, alike = [[length] for length in lengths], [[lengths[number]] for number in grouped]
    ways = [batches(apart, 128), batches(apart), batches(alike), batches(packed(lengths), 128)]
    torch.set_num_threads(1)
    model = task.build_model().to("cuda" if on_gpu else "cpu")

    def train(way):
        for rows, width in way[:8]:
            model(**{name: x.to(model.device) for name, x in inputs_of(rows, width).items()}).loss.backward()

    shares = [1 - sum(lengths) / sum(len(rows) * width for rows, width in way) for way in ways]
    taken = interleaving.in_turns([lambda way=way: train(way) for way in ways], 2)
    tokens = [sum(sum(map(sum, rows)) for rows, _ in way[:8]) for way in ways]
    return shares, [number / min(cpu for _, cpu in turns) for number, turns in zip(tokens, taken)]


names = ["always 128 wide", "as wide as the longest", "grouped by length", "packed into 128"]
rows = zip(names, *lab.run(padding, task=small, measure=("none",)).value)
rows = [[name, f"{share:.0%}", f"{speed:,.0f}"] for name, share, speed in rows]
plots.Table(["batches", "share of padding", "tokens a second, without padding"], rows)

# %% [markdown]
# Sequences of like length make tight rectangles. The price: the order is less random, for a batch is all long or all short. Packed rows keep the order and need hardly any padding. Their price is the mask; and where a model gives one answer a row, it must be told which sequence is which. So it is language models that are packed.
#
# ## To the GPU
#
# A GPU fetches by itself only from **pinned** memory, which the operating system may not move. From elsewhere the host first copies to such a place, and waits. `non_blocking=True` lets the host go on, but only from pinned memory; and somebody has to pin: `DataLoader(pin_memory=True)` has a thread for it. Hence three rows: not pinned, pinned while the step waits, pinned before the clock starts. Without a GPU this only stands here.


# %%
def to_the_gpu(_):
    host = torch.ones(2**26)  # 256 MB
    pinned, device = host.pin_memory(), torch.empty(2**26, device="cuda")
    works = [lambda: device.copy_(host), lambda: device.copy_(pinned, non_blocking=True)]
    pictures = [torch.rand(64, 3, 224, 224) for _ in range(8)]
    before = [batch.pin_memory() for batch in pictures]
    weights = torch.rand(4096, 4096, device="cuda") / 4096

    def train(x):
        for _ in range(8):
            x = x.view(-1, 4096) @ weights

    works += [lambda: [train(batch.to("cuda")) for batch in pictures]]
    works += [lambda: [train(batch.pin_memory().to("cuda", non_blocking=True)) for batch in pictures]]
    works += [lambda: [train(batch.to("cuda", non_blocking=True)) for batch in before]]
    taken = interleaving.in_turns(works, 9)
    rates = [[host.nbytes / 1e9 / seconds for seconds, _ in turns] for turns in taken[:2]]
    return rates, [125 * min(wall for wall, _ in turns) for turns in taken[2:]]


rates, feeding = (lab.run(to_the_gpu, measure=("none",)).value if on_gpu else None) or (None, None)
names = ["from pageable memory", "pinned in the step, non_blocking", "pinned before, non_blocking"]
plots.Table(["39 MB a batch, to the GPU", "ms a batch"], [[*row] for row in zip(names, feeding or [None] * 3)])


# %%
def utilisation(task):  # in percent: with everything ready, and with a slow reader
    (step, samples, own), means = stepper(task), []
    ready = {name: values[:BATCH] for name, values in samples.items()} | {"when": torch.zeros(1, 3)}
    for batches, steps_long in ((iter(lambda: ready, None), 1), (reading(3)(samples, own), 4)):
        readings, stop = [], threading.Event()

        def look(readings=readings, stop=stop):
            while not stop.wait(0.2):
                readings.append(torch.cuda.utilization())

        (thread := threading.Thread(target=look, daemon=True)).start()
        follow(batches, step, steps=max(8, int(4 / own / steps_long)))
        stop.set()
        thread.join()
        means.append(sum(readings[5:]) / len(readings[5:]))  # a reading looks back for up to a second
    return means


# %% [markdown]
# ## The Trainer's own arguments
#
# Its defaults in your version (no prefetch factor means torch's own: 2), and a training with two of them changed, over a data set that waits 15 ms for each sample.


# %%
class Delayed(torch.utils.data.Subset):
    def __getitems__(self, indices):
        time.sleep(0.015 * len(indices))
        return super().__getitems__(indices)


class SlowTask(Task):
    def dataset(self):
        torch.multiprocessing.set_start_method("fork", force=True)  # in this clean process
        return Delayed(super().dataset(), range(self.dataset_size))


settings = dict(task=SlowTask(small.model, 64, config=small.config), per_device_train_batch_size=BATCH, steps=4)
settings["measure"] = ("time", "memory")
alone = lab.train("no workers", **settings)
helped = lab.train("4 workers", dataloader_num_workers=4, dataloader_persistent_workers=True, **settings)  # new
defaults = [(name, repr(field.default)) for name, field in TrainingArguments.__dataclass_fields__.items()]
display(plots.Table(["argument", "default"], [row for row in defaults if row[0].startswith("dataloader_")]))
plots.table([alone, helped])

# %% [markdown]
# ## What held
#
# Waiting is not computing, so the wall's clock decides here: both sides in turns, and on a CPU a ratio counts only beyond a factor of 1.3. How slow the reader is, we chose; each quantity says so. Whether *very* many workers help is asked of the slow reader too, once all of them are under way: where four keep up with the step, the problem is elsewhere for sixteen. Memory is two claims: what the training itself needs, and what the host has to give beside it.


# %% tags=["claim"]
def who_reads(_):
    loader = DataLoader(Reader({"x": torch.ones(64, 8)}, 0), BATCH)  # no other arguments
    batches = [batch["when"][:, 0] for batch, _ in zip(loader, range(8))]
    return (torch.cat(batches) == os.getpid()).double().mean().item()


crowds = {f"{count} workers": reading(3, num_workers=count) for count in (4, 16)}
turns = fed(crowds, steps=8, skip=10, turns=4)
beyond = [total(turn["4 workers"], "wait", "train") / total(turn["16 workers"], "wait", "train") for turn in turns]
display(claims.check("main-process-loads", lab.run(who_reads, measure=("none",)).value))
display(claims.check("workers-help", workers_help, note="pairs: " + ", ".join(f"{gain:.2f}" for gain in gains)))
left = f"waiting with 4 workers {waiting_share(turns[0]['4 workers']):.0%} of the time"
display(claims.check("workers-not-beyond", lab.ratio(beyond), note=left))
missing = helped.failure or alone.failure or None
memory = None if missing else helped.peak_bytes / alone.peak_bytes
display(claims.check("workers-no-memory", memory, missing=missing))
note = f"a worker {plots.bytes_text(costs[1][1])}, the process itself {plots.bytes_text(unhelped[1])}"
claims.check("workers-host-memory", 1 + 4 * costs[1][1] / unhelped[1], note=note)


# %% tags=["claim"]
def pinned_share(_):
    batch = next(iter(DataLoader(Reader({"x": torch.ones(64, 128)}, 0), pin_memory=True, **forked(1))))
    return sum(values.is_pinned() for values in batch.values()) / len(batch)


faster_copies = lab.ratio([pinned / pageable for pageable, pinned in zip(*rates)]) if rates else None
display(claims.check("pinned-memory", faster_copies))
preloaded = lab.run(pinned_share, measure=("none",)).value if on_gpu else None
display(claims.check("pinned-by-loader", preloaded))
watched = lab.run(utilisation, task=small, measure=("none",)) if on_gpu else None
busy = watched.value if watched else None
missing = f"needs NVML ({watched.failure})" if watched and not busy else None
note = f"utilisation {busy[0]:.0f} % with the input ready, {busy[1]:.0f} % with the slow reader" if busy else ""
claims.check("utilisation-shows-wait", busy[1] / busy[0] if busy else None, missing=missing, note=note)

# %% [markdown]
# On a GPU, look at its utilisation first, as the guide says: far from 100 % means that it stands still. It does not say *why*. The waiting share does: if that is small too, the step itself launches its work too slowly (lesson 02). And 100 % only means that something ran all the time.
#
# ## Explore
#
# The rules again, for a pipeline of your own. Find a reader for which a larger prefetch helps and more workers do not, and one for which it is the other way round.


# %% tags=["widget"]
def draw(loading, workers, prefetch_factor, step):
    loads = irregular if loading.startswith("irregular") else float(loading.split()[0])
    bars = simulate(loads, workers, prefetch_factor, 35, step=float(step))
    _, ax = plt.subplots(figsize=(9, 1.4 + 0.4 * max(1, workers)), layout="constrained")
    return gantt(bars, ax, f"{waiting_share(bars[42:]):.0%} of the time is spent waiting, once under way", most=36)


loadings = ["3 seconds", "0.5 seconds", "1 second", "6 seconds", "irregular: every 7th takes 10 s, the others 0.5 s"]
_ = widgets.explore(draw, loading=loadings, workers=[2, 0, 1, 3, 4, 8], prefetch_factor=[2, 1, 4, 8], step=[1, 0.5, 2])

# %% [markdown]
# ## Exercise: the challenge
#
# Reach **95 %** of the speed that synthetic data would give, with *at most 3 workers*. The reader takes one step's time for a batch, and eight for every fifth. It is measured, not simulated. So that nothing but the input decides, the device is a stand-in that takes 150 ms for a step.

# %% tags=["exercise"]
display(
    exercises.hint(
        "Its mean is 2.4 steps a batch. How many workers does that take at least?",
        "The late batch holds up those that follow. How many must lie ready to bridge eight steps?",
        "Above, `simulate` was asked for each of several prefetch factors, with `irregular`. Ask it with your reader.",
    )
)
answer = None  # dict(num_workers=..., prefetch_factor=...): arguments of DataLoader


# %% tags=["check"]
def speed(arguments):
    def job(_):
        reader = Reader({}, lambda index: 0.075 * (8 if index // 2 % 5 == 4 else 1))
        batches = DataLoader(reader, batch_size=2, **forked(**arguments))
        return 1 - waiting_share(follow(batches, lambda batch: time.sleep(0.15) or 1.0, steps=10, skip=10))

    return lab.run(job, "challenge", measure=("none",))


def check(answer, tries=4):
    if answer is None:
        return exercises.not_attempted()
    if answer.get("num_workers", 0) > 3:
        return exercises.wrong(f"{answer['num_workers']} workers: three are allowed, and enough")
    run = speed(answer)
    if not run.ok:
        return exercises.run_failed(run)
    if 0.88 < run.value < 0.95 and tries > 1:  # near the target, a moment's noise must not decide
        return check(answer, tries - 1)
    found = f"{run.value:.1%} of the speed of synthetic data"
    return exercises.right(found) if run.value >= 0.95 else exercises.wrong(f"{found}: draw where it waits")


exercises.check(lab, "95 percent", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check, solution=dict(num_workers=3, prefetch_factor=6), mistake=dict(num_workers=3))

# %% [markdown]
# ## Recap
#
# - Two looks at the clock told how long each step waited. A thread hid a reader that waits, not one that computes in Python; a worker can hide both where it finds a core.
# - More workers helped until nothing was left to wait for. Beyond that each cost its start, its memory and, where it computes, a core; a late batch called for more prefetch.
# - Batches got cheaper by tokenising before where reading back was cheap, by padding less or packing, and on a GPU by pinned memory.

# %% tags=["finish"]
claims.finish()
