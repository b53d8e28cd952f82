# %% [markdown]
# # Are two devices twice as fast?
#
# You rent a second GPU and start your training on both. How much sooner is it done?
#
# **You will see**
# - two processes that train one model and stay equal to the last bit, first by hand, then with torch's DDP (`DistributedDataParallel`)
# - how many bytes they send in each step, and how much time a slow link adds
# - in part two: who starts the processes, what happens when one dies, and which single-GPU methods help two processes, too
#
# **Time:** plan 60 minutes in two parts. The cells run for 2 to 7 minutes on two CPU cores.
#
# **Before you start:** lessons 03 (intervals) and 05 (the gradient of a batch in parts).
#
# **What a CPU cannot show:** NVLink (a fast link between NVIDIA's GPUs), the traffic of NCCL (NVIDIA's library for messages between GPUs) and `nn.DataParallel`, torch's older method, on real devices: seven checks need two GPUs, and one needs a GPU. The slow links need Linux and root.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import contextlib
import copy
import os
import re
import subprocess
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from IPython.display import display
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perf_helpers import Claims, Lab, Task, exercises, hardware, plots, slow_link, widgets
from perf_helpers.lab import Ratio

lab = Lab(profile, strict=strict, out=out, lesson="15_dp_and_ddp")
claims = Claims(lab)
gpus2 = hardware.supports("gpus2")[0]
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
task = Task("bert-small", seq_len=32, config=no_dropout | {"vocab_size": 2000, "hidden_size": lab.sized(512, 128)})

# %% [markdown]
# ## Part one: DDP
#
# ### Idea
#
# Data parallelism gives each device a copy of the whole model (a *replica*) and its own part of the batch. All parts have the same size. The gradient of a batch is the mean over its samples (lesson 05), so the mean of the devices' gradients is the gradient of all their samples together. If all devices start with the same weights and apply the same gradient, they stay equal, and weights never have to be sent again.
#
# The devices here are two processes with half of the CPU's cores each. They communicate through gloo, torch's library for CPUs. Each process is a **rank**.
#
# > **On GPUs:** NCCL sends the same tensors.
#
# ### Predict
#
# This lesson's model, a small BERT classifier:

# %%
print(f"{task.parameters():,} parameters, float32")
question = "How many MB of gradients will each rank hand over in one step, to be summed with the other rank's?"
widgets.predict(lab, "sent", question, "MB", 0, round(12 * task.parameters() / 1e6))

# %%
exercises.question(
    lab,
    "twice",
    "One device trains 100 samples a second. How many do two of them train together?",
    {
        "200": "Only if sending the gradients costs nothing. A step ends when the sum of all gradients is there: "
        "the part of the sending that backward cannot hide is added to it.",
        "100, since they share the batch": "With half of the batch each, a step is done sooner. With a whole batch "
        "each, it takes as long and counts twice. Either way there are more samples per second.",
        "fewer than 200; how many fewer depends on the work of a step and on the link": "The work is shared, and "
        "the sending is added. With little work and a slow link, two may be slower than one.",
    },
    right="fewer than 200; how many fewer depends on the work of a step and on the link",
)

# %% [markdown]
# ### By hand
#
# `train` serves this section and the next.
#
# - `wrap(model)` decides how the ranks cooperate. It returns the model to call, perhaps wrapped, and a function to call after backward.
# - `Traffic` records every **collective operation**, a message in which all ranks take part. It is a *dispatch mode*: while its `with` block is open, torch passes each operation to `__torch_dispatch__` before it runs.
#
# At the start rank 0 sends its weights to all ranks (`broadcast`). After each backward the gradients are summed over the ranks (`all_reduce`) and divided.


# %%
class Traffic(TorchDispatchMode):
    """Record the collective operations: [name, bytes that this rank hands over]."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":  # torch's name for its collective operations
            size = sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            self.seen.append([function.overloadpacket.__name__.strip("_"), size])
        return function(*args, **(kwargs or {}))


def largest_difference(model):
    """Return the largest difference of any weight between any two ranks."""
    largest = 0.0
    for weight in model.parameters():
        high, low = weight.detach().clone(), weight.detach().clone()
        dist.all_reduce(high, dist.ReduceOp.MAX)
        dist.all_reduce(low, dist.ReduceOp.MIN)
        largest = max(largest, (high - low).max().item())
    return largest


# %%
def train(task, wrap, steps=3, link=None):
    if link:  # a slow network (see "The link"): move this process into it
        link.join()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    model = task.replace(seed=rank).build_model()  # every rank starts with other weights: wrap makes them equal
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    traffic = []
    with Traffic() as start:
        called, after_backward = wrap(model)
    for step in range(steps):
        batch = task.batch(4 * steps)
        # The ranks share the 4 samples of a step: of two ranks, each takes every second sample.
        shard = {name: rows[4 * step + rank : 4 * step + 4 : ranks] for name, rows in batch.items()}
        with Traffic() as sent:
            called(**shard).loss.backward()
            after_backward()
            optimizer.step()
            optimizer.zero_grad()
        traffic.append(sent.seen)
    some = torch.cat([weight.detach().flatten()[:9] for weight in model.parameters()])  # up to 9 numbers of each tensor
    apart = largest_difference(model) if ranks > 1 else None
    return {"start": start.seen, "traffic": traffic, "some weights": some.tolist(), "apart": apart}


# %%
def alone(model):
    return model, lambda: None


def by_hand(model):
    for weight in model.parameters():
        dist.broadcast(weight.data, src=0)

    def average():
        for weight in model.parameters():
            dist.all_reduce(weight.grad)  # a sum
            weight.grad /= dist.get_world_size()

    return model, average


one = lab.run(partial(train, wrap=alone), "one process", task=task, measure="value")
two = lab.run(partial(train, wrap=by_hand), "two, by hand", task=task, processes=2, measure="value")
torch.testing.assert_close(two.value["some weights"], one.value["some weights"], rtol=1e-3, atol=1e-5)
print(f"largest difference between the ranks after {len(two.value['traffic'])} steps: {two.value['apart']}")

# %% [markdown]
# Two processes with half of each batch made, up to rounding, the same steps as one process with the whole batch, as `assert_close` checks. The ranks agree to the last bit, because both receive the *same sum*.
#
# ### While backward still runs
#
# The loop above sends only after backward is done. But the last layer's gradients are finished first, long before those of the embeddings. So group the parameters into **buckets**, in the order in which backward finishes them. A hook on each parameter counts finished gradients. When all gradients of a bucket are finished, the bucket is sent at once, in the background. So backward *hides* a part of the time that sending takes. DDP does this.


# %%
class Buckets:
    def __init__(self, model, bucket_bytes=2_000_000):
        self.buckets, self.ready_ones, self.sent, self.times = [[]], Counter(), [], {}
        for weight in reversed([*model.parameters()]):  # about the order in which backward finishes them
            if sum(other.nbytes for other in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(weight)
            weight.register_post_accumulate_grad_hook(partial(self.ready, len(self.buckets) - 1))

    def ready(self, number, _):
        self.ready_ones[number] += 1
        if self.ready_ones[number] % len(self.buckets[number]) == 0:
            together = torch.cat([weight.grad.flatten() for weight in self.buckets[number]])
            work = dist.all_reduce(together, async_op=True)  # does not wait
            times = self.times[number] = [time.perf_counter()]
            work.get_future().add_done_callback(lambda _: times.append(time.perf_counter()))
            self.sent.append((self.buckets[number], together, work))

    def finish(self):
        for bucket, together, work in self.sent:
            work.wait()
            for weight, part in zip(bucket, together.split([weight.numel() for weight in bucket])):
                weight.grad = part.view_as(weight) / dist.get_world_size()
        self.sent = []


# %%
def in_buckets(model):
    for weight in model.parameters():
        dist.broadcast(weight.data, src=0)
    return model, Buckets(model).finish


def with_ddp(model):
    return DDP(model, bucket_cap_mb=2), lambda: None


runs = {"by hand": two}
for name, wrap in {"buckets by hand": in_buckets, "DDP": with_ddp}.items():  # new
    runs[name] = lab.run(partial(train, wrap=wrap), name, task=task, processes=2, measure=("none",))
rows, parameter_bytes = [], 4 * task.parameters()
for name, run in runs.items():
    for stage, seen in {"start": run.value["start"], "last step": run.value["traffic"][-1]}.items():
        kinds = Counter(kind for kind, _ in seen)
        size = sum(size for _, size in seen)
        rows.append([name, stage, ", ".join(f"{n} {kind}" for kind, n in kinds.items()), size, size / parameter_bytes])
    if run.value["some weights"] != two.value["some weights"]:
        print(f"{name}: the weights differ from those of the loop by hand")
display(plots.Table(["", "when", "collectives", "bytes", "bytes / (4 B x parameters)"], rows))
ddp = runs["DDP"].value
widgets.revealed(lab, "sent", sum(size for kind, size in ddp["traffic"][-1] if kind == "allreduce") / 1e6)

# %% [markdown]
# The weights are sent once, at the start. Then each step sends the gradients: 4 bytes per parameter (last column: 1), however they are packed. DDP sends slightly more (column *bytes*). Before each forward pass rank 0 broadcasts the model's *buffers* (tensors of the model that are not trained), unless you pass `broadcast_buffers=False`. At the start the ranks also check that they have the same model.
#
# ### When does DDP send, and when does a rank wait?
#
# A *communication hook* sends each full bucket in DDP's place. Ours also notes whether a gradient is still missing then; the next table has the percentage of bytes sent so early. In its last row one bucket has all gradients.
#
# Buckets take memory. DDP **copies** each gradient into its bucket, unless `gradient_as_bucket_view=True` makes the gradient a view of the bucket. (`TrainingArguments` cannot set this argument, accelerate's `DistributedDataParallelKwargs` can.) The copies take 4 bytes per parameter more: 20 instead of 16 with AdamW. (The next table has 12 instead of 8, because plain SGD has no states.) Since torch 2.15 `lazy_bucket_allocation=True` frees the buckets after backward.
#
# The picture after the table shows when the buckets of our class `Buckets` are sent. If this machine allows it, the ranks communicate over a slow link that Linux simulates: each rank is in a *network namespace*, which acts as a separate host, and a virtual cable of 400 Mbit/s connects the two.


# %%
def early(task, bucket_MB=2, **options):
    dist.init_process_group("gloo")
    model, handed = task.build_model(), []
    for weight in model.parameters():
        weight.register_hook(lambda _, weight=weight: pending.discard(weight))  # its gradient is there

    def hand_over(_, bucket):
        handed.append((bucket.buffer().nbytes, bool(pending)))  # early: while gradients are pending
        bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    ddp = DDP(model, bucket_cap_mb=bucket_MB, broadcast_buffers=False, **options)  # new
    ddp.register_comm_hook(None, hand_over)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)  # without states: only weights, gradients and buckets stay
    for _ in range(3):  # after the first step DDP sorts its buckets
        pending = {*model.parameters()}  # parameters whose gradients are not there yet
        handed.clear()
        with Traffic() as sent:
            ddp(**task.batch(1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    share = sum(size for size, is_early in handed if is_early) / sum(size for size, _ in handed)
    return {"early": share, "bytes": sum(size for _, size in sent.seen)}


# %%
in_steps, rows = {}, []
ways = {"buckets": {}, "gradients are views of them": {"gradient_as_bucket_view": True}}
if torch.__version__ >= (2, 15):
    ways["buckets are freed"] = {"lazy_bucket_allocation": True}
for name, options in (ways | {"one bucket": {"bucket_MB": 1000}}).items():
    run = lab.run(partial(early, **options), name, task=task, processes=2, measure=("memory",), use_cpu=True)
    in_steps[name] = run.value
    held = sum(run.memory.phase_breakdowns["backward"].values()) / task.parameters()
    rows.append([name, f"{run.value['early']:.0%}", run.value["bytes"] / parameter_bytes, held])
titles = [
    "DDP",
    "sent before the last gradient is there",
    "bytes / (4 B x parameters)",
    "bytes per parameter, after backward",
]
plots.Table(titles, rows)


# %%
def watch(task, bucket_bytes, link=None):
    if link:
        link.join()
    dist.init_process_group("gloo")
    model, batch = task.build_model(), task.batch(16)
    buckets = Buckets(model, bucket_bytes)
    for _ in range(3):
        loss = model(**batch).loss
        begin = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        buckets.finish()
    time.sleep(0.05)  # another thread notes the time of the last one
    return [[0, end - begin], *([moment - begin for moment in times] for _, times in sorted(buckets.times.items()))]


missing = slow_link.missing()
with contextlib.nullcontext() if missing else slow_link.link(400) as link:
    watched = {}
    for name, size in {"one bucket": 1e12, "buckets of 2 MB": 2e6}.items():
        experiment = partial(watch, bucket_bytes=size, link=link)
        watched[name] = lab.run(experiment, name, task=task, processes=2, measure=("none",)).value

# %%
import matplotlib.pyplot as plt

figure, both = plt.subplots(2, 1, figsize=(8, 4.2), sharex=True, layout="constrained")
for axes, (name, bars) in zip(both, watched.items()):
    for row, (begin, end) in enumerate(bars):
        axes.barh(row, end - begin, left=begin, color=plots.SERIES[row > 0], height=0.6)
    axes.set_yticks(range(len(bars)), ["backward", *(f"bucket {n}" for n in range(1, len(bars)))], fontsize=9)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    last = max(end for _, end in bars)
    axes.set_title(
        f"{name}: all sums are there after {last:.2f} s, {last - bars[0][1]:.2f} s after backward", loc="left"
    )
_ = both[1].set_xlabel(
    "seconds after backward began" + (f" (this machine {missing})" if missing else ", over 400 Mbit/s")
)

# %% [markdown]
# An orange bar begins when its bucket is handed over and ends when its sum is there. One big bucket leaves after the last gradient, most small ones leave during backward. After backward the ranks wait only for the buckets still on their way.
#
# ### Baseline
#
# First one process trains on all cores, with 1 or 8 samples per step.
#
# > **On two GPUs:** this section and the next train the lab's task; two processes use NCCL.
#
# ### Change one thing
#
# Then two processes train, with 1 or 8 samples each. In the printed percentage, 100 % is twice the throughput of one process. The explorer calculates the throughput of up to 16 ranks from the time of one process, a step's bytes and a link's speed.


# %%
def loop(task, samples, wrap=DDP, link=None, environment=(), turns=5):
    os.environ.update(environment)
    if link:
        link.join()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    model, batch, on_gpus = task.build_model(), task.batch(samples), gpus2 and not link
    if on_gpus:
        model, batch = model.to(rank), {name: rows.to(rank) for name, rows in batch.items()}
    if ranks > 1:
        dist.init_process_group("nccl" if on_gpus else "gloo")
    model = wrap(model) if ranks > 1 or wrap is not DDP else model
    optimizer, before = torch.optim.AdamW(model.parameters()), slow_link.bytes_sent() or 0
    steps = lab.sized(turns, 3) + lab.profile.warmup_steps
    for _ in range(steps):
        model(**batch).loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"sent in a step": ((slow_link.bytes_sent() or 0) - before) / steps}


timed = lab.task if gpus2 else task
first = {}
for samples in (1, 8):
    name, each = f"1 process, {samples} samples", partial(loop, samples=samples)
    first[samples] = lab.run(each, name, task=timed, measure=("time",), samples_per_step=samples)

# %%
speedups = {}
for samples, run in first.items():
    name, each = f"2 processes, {samples} samples each", partial(loop, samples=samples)
    second = lab.run(each, name, task=timed, processes=2, measure=("time",), samples_per_step=2 * samples)  # new
    speedups[samples] = lab.compare(run, second, turns=3)
for samples, comparison in speedups.items():
    print(f"{samples} samples each: {comparison.speed_ratio} times one process, {comparison.speed_ratio.value / 2:.0%}")
series = {f"{n} samples each": [1, item.speed_ratio.value] for n, item in speedups.items()}
axes = plots.lines([1, 2], series | {"twice as fast": [1, 2]}, "processes", "throughput, times that of one process")
for row, item in enumerate(speedups.values()):
    axes.vlines(2 + 0.01 * row, item.speed_ratio.low, item.speed_ratio.high, color=plots.SERIES[row])
axes.set_title("What the second process is worth (bars: intervals)", loc="left")
_ = axes.set_xticks([1, 2])


# %% tags=["widget"]
def scaling(samples, megabits):
    ranks = [1, 2, 4, 8, 16]
    alone = first[samples].step_seconds
    # An all-reduce sends 2 (n - 1) / n times the gradients' bytes (the end of the next section says why).
    sending = [2 * (n - 1) / n * 4 * timed.parameters() * 8 / megabits / 1e6 for n in ranks]
    # We assume that backward takes 60 % of a step. It can hide that much of the sending.
    visible = [max(0, time - 0.6 * alone) for time in sending]  # what backward cannot hide
    series = {"ideal": ranks}
    for name, times in {"backward hides what it can": visible, "nothing is hidden": sending}.items():
        series[name] = [n * alone / (alone + time) for n, time in zip(ranks, times)]
    title = f"{samples} samples per rank, {megabits} Mbit/s"
    return plots.lines(ranks, series, "ranks", "throughput, times that of one", title=title)


_ = widgets.explore(scaling, megabits=[1000, 100, 200, 10000, 100000], samples=[8, 1])

# %% [markdown]
# The batch changes the work of a step, not the bytes that it sends. So the second process helps more if **the work of a step takes long compared with the sending of its gradients**. On a CPU the ranks also share the path to memory, which slows both down. If the printed intervals overlap, the difference may be noise.
#
# ### The link
#
# On two TITAN RTX the 2022 guide measured 131 s for 200 steps without NVLink and 101 s (precisely 101.9 s) with it. The guide adds a rule: the more there is to synchronize, the more a slow link costs. DDP synchronizes once per step and pays little. ZeRO-DP, which divides the weights over the ranks (lesson 16), synchronizes often and pays much.
#
# A link can be slow in two ways. It carries few **bytes per second**, or each message takes long to **arrive**. Two ranks on two *hosts* (network namespaces) try both. Each recipe below runs first over a *fast* cable, without limit or delay, then over a worse one. The column *s added* says by how many seconds a step is then longer.
#
# - *Few bytes per second*: a large model and one with about half of its parameters. The cable is so slow that sending the large model's gradients takes twice as long as a step of this model over the fast cable.
# - *Late messages*: a tiny model, over a cable that does not limit the bytes per second, but delivers everything 10 ms later. Three methods train it: DDP; DDP that sends everything twice, in no more messages; and *sharding* of the weights over the ranks, as in ZeRO, by torch's FSDP2. Sharding sends more messages and bytes than DDP; sending everything twice takes even more bytes. If sharding still waits longer, the messages are the reason.


# %%
def sharded(model):
    from torch.distributed.fsdp import fully_shard

    ranks = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.bert.encoder.layer, model):
        fully_shard(part, mesh=ranks)  # gathered before use, in forward and backward, and freed afterwards
    return model


def sent_twice(model):
    """Return DDP with twice the bytes and not one message more."""

    def twice(_, bucket):
        both = torch.cat([bucket.buffer() / dist.get_world_size()] * 2)
        return dist.all_reduce(both, async_op=True).get_future().then(lambda done: done.value()[0].chunk(2)[0])

    model = DDP(model, broadcast_buffers=False)
    model.register_comm_hook(None, twice)
    return model


large = task.replace(config={"hidden_size": 128, "intermediate_size": 512})
small = large.replace(config={"num_hidden_layers": 1})
tiny = task.replace(config={"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 200})


# %%
few = {"DDP, large model": (large, DDP), "DDP, small model": (small, DDP)}
often = {"DDP": (tiny, partial(DDP, broadcast_buffers=False)), "DDP, all sent twice": (tiny, sent_twice)}
often["sharded"] = (tiny, sharded)
LATE, over, hosts, rate = lab.sized(0.01, 0.002), {}, None, None  # seconds; runs by (cable, recipe)
cables = {} if missing else {"fast": few | often, "slow": few, "late": often}
with contextlib.ExitStack() as stack:
    for speed, recipes in cables.items():
        if speed == "slow":  # Mbit/s at which the large model's gradients take as long as two steps
            rate = round(32 * large.parameters() / (2 * over["fast", "DDP, large model"].step_seconds) / 1e6)
        limits = (
            {"megabits_per_second": rate} if speed == "slow" else {"delay_seconds": LATE} if speed == "late" else {}
        )
        cable = stack.enter_context(slow_link.link(**limits))
        for name, (model, wrap) in recipes.items():
            turns = 10 if name in few else 4  # with four, one disturbed step decided about the ratio of two models
            each = partial(loop, samples=2, wrap=wrap, link=cable, turns=turns)
            over[speed, name] = lab.run(each, f"{name}, {speed} cable", task=model, processes=2, measure=("time",))
    if not missing:
        each = partial(train, wrap=with_ddp, link=cable)
        hosts = lab.run(each, "two hosts", task=small, processes=2, measure="value").value


# %%
from statistics import median

bytes_ratio = messages_ratio = None


def added(speed, name):
    """Return the seconds that a cable adds to each step, compared with the fast one."""
    return [seconds - over["fast", name].step_seconds for seconds in over[speed, name].timing.all_seconds]


def in_turns(speed, name, other):  # the median of the ratios with an interval, at least +-5 %, as in lesson 03
    return Ratio.of_pairs([one / two for one, two in zip(added(speed, name), added(speed, other))], 1.05)


if not missing:
    sent = {name: over["fast", name].value["sent in a step"] for name in few | often}
    rows = [[name, sent[name] / 1e6, 8 * sent[name] / rate / 1e6, median(added("slow", name))] for name in few]
    display(plots.Table(["", "MB on the wire", "s to send these MB", "s added"], rows, f"{rate} Mbit/s"))
    rows = [[name, sent[name] / 1e6, median(added("late", name)), median(added("late", name)) / LATE] for name in often]
    display(plots.Table(["", "MB on the wire", "s added", "s added / delay"], rows, "each message 10 ms later"))
    bytes_ratio, messages_ratio = in_turns("slow", *few), in_turns("late", "sharded", "DDP, all sent twice")
ratios = f"large / small model: {bytes_ratio}; sharded / DDP with all sent twice: {messages_ratio}"
print(missing or f"added seconds, {ratios}")
print(f"131 s and 101 s: {1 - 101 / 131:.0%} less time, {131 / 101 - 1:.0%} more speed; {200 / 101.9:.2f} steps/s")
print(f"an RTX 3090's NVLink: 4 links of 14.0625 GB/s are {4 * 14.0625} GB/s each way, {8 * 14.0625} in all")


# %% [markdown]
# With few bytes per second, the larger model waits longer (*s added*), because its bytes take longer and backward hides only part of that. With late messages, the seconds depend on how many messages a step **waits for, one after the other** (*s added / delay* is about this number), and hardly on the bytes. DDP's sum takes several messages. Sharded layers wait for their weights twice, in forward and in backward, and then for the sums of their gradients.
#
# Under DDP, *MB on the wire* is close to the bytes that a rank hands over. To sum a vector, each of two ranks sends half of its vector to the other, adds the half that it receives to the half that it kept, and sends this sum back. So it sends two halves: the bytes of one vector. With $n$ ranks, each rank sends $2(n-1)/n$ vectors.
#
# The last two printed lines repeat the guide's calculations: its two times in percent, steps per second, and the GB/s of an RTX 3090's NVLink. The guide's links between hosts, InfiniBand and Omni-Path, are not measured.
#
# ### Send less
#
# With accumulation each rank first adds up its own gradients. Only the last micro-batch needs the sum over the ranks, and `no_sync` keeps DDP from sending for the others. A communication hook may send bf16. (torch's own hook, `bf16_compress_hook`, needs NCCL.) `economical` trains on generated data with a learnable rule, so that losses can be compared, and counts the bytes.


# %%
def in_bf16(_, bucket):
    half = bucket.buffer().to(torch.bfloat16) / dist.get_world_size()
    summed = dist.all_reduce(half, async_op=True).get_future()
    return summed.then(lambda done: bucket.buffer().copy_(done.value()[0]))  # done.value(): a list with the sum in it


def economical(task, seeds=(0,), accumulate=1, quiet=True, bf16=False, learning_rate=1e-3, micro_batches=8):
    dist.init_process_group("gloo")
    losses, traffic, rank = [], Traffic(), dist.get_rank()
    for seed in seeds:
        rows = task.replace(seed=seed).batch(16 * micro_batches + 256)
        model = DDP(task.replace(seed=seed).build_model(), broadcast_buffers=False)
        if bf16:
            model.register_comm_hook(None, in_bf16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        for number in range(micro_batches):
            shard = {name: row[16 * number + rank : 16 * number + 16 : 2] for name, row in rows.items()}
            last = (number + 1) % accumulate == 0
            with traffic, model.no_sync() if quiet and not last else contextlib.nullcontext():
                (model(**shard).loss / accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(model.module.eval()(**{name: row[-256:] for name, row in rows.items()}).loss.item())
    return {"losses": losses, "MB": sum(size for kind, size in traffic.seen if kind == "allreduce") / 1e6 / len(seeds)}


# %%
rule = Task("bert-tiny", seq_len=16, data="learnable", config={"num_hidden_layers": 1, "vocab_size": 200})
for quiet in (False, True):
    each = partial(economical, accumulate=4, quiet=quiet)
    run = lab.run(each, task=rule, processes=2, measure="value")
    print(
        f"8 micro-batches, accumulation of 4, {'with' if quiet else 'without'} no_sync: {run.value['MB']:.2f} MB sent"
    )
for epoch in (0, 1):
    for rank in (0, 1):
        sampler = torch.utils.data.DistributedSampler(range(7), num_replicas=2, rank=rank)
        sampler.set_epoch(epoch)
        print(f"epoch {epoch}, rank {rank}: samples {[*sampler]}")

# %% [markdown]
# The lower lines show how a **distributed sampler** divides the samples. Each of 2 ranks gets 4 of 7 samples, so one sample is seen twice: all ranks must take the same number of steps. Without `set_epoch` each epoch would have the order of the first. The **effective batch** is micro-batch x accumulation x ranks: more ranks mean a larger batch and fewer steps.
#
# ### What DP does instead
#
# In the older `nn.DataParallel` (DP) one process drives all devices. The first device has the model and the optimizer; the others get their weights and their samples from it. The next cell runs a step of DP on two simulated devices, and counts the bytes that would cross between them: for the classifier, and for gpt2 with the guide's 4 x 1024 tokens per device (shapes only, on torch's `meta` device).


# %%
def data_parallel(model, batch):
    other, moved = copy.deepcopy(model), Counter()
    pairs = zip((model, other), batch["input_ids"].chunk(2))
    outputs = [each(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for each, ids in pairs]
    torch.nn.functional.cross_entropy(torch.cat(outputs).flatten(0, -2), batch["labels"].flatten()).backward()
    moved["inputs"] = batch["input_ids"].nbytes // 2
    moved["outputs"] = moved["losses"] = outputs[1].nbytes  # in forward, and their gradient in backward
    for weight, replica_weight in zip(model.parameters(), other.parameters()):
        weight.grad += replica_weight.grad
        moved.update({"weights": weight.nbytes, "gradients": replica_weight.grad.nbytes})
    return moved


plain, parallel, batch = task.build_model(), task.build_model(), task.batch(4)
moved = data_parallel(parallel, batch)
plain(**batch).loss.backward()
for one, other in zip(plain.parameters(), parallel.parameters()):
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6)
gpt2 = Task("gpt2", seq_len=1024)
shapes = {name: rows.to("meta") for name, rows in gpt2.batch(8).items()}
language = data_parallel(gpt2.build_model(attn_implementation="eager", device="meta"), shapes)
rows = [[kind, *(counts[kind] / 1e6 for counts in (moved, language))] for kind in moved]
rows += [["in all", *(sum(counts.values()) / 1e6 for counts in (moved, language))]]
rows += [["DDP: gradients, there and back", *(2 * counts["gradients"] / 1e6 for counts in (moved, language))]]
plots.Table(["crosses between the devices in each step", "MB, classifier", "MB, gpt2"], rows)

# %% [markdown]
# DP moves five kinds of data instead of one. Besides the gradients it moves the weights, *in every step*. All of it goes through device 0, which also adds up the gradients. For gpt2 the outputs are the largest kind: a number for each word of the vocabulary. (The row *losses*, named as in the guide, is the gradient of the outputs.) The totals count the bytes that both devices send. For the classifier they are equal, because its outputs are tiny. Under DP one device sends the weights and the other the gradients. Under DDP each sends half of its gradients and half of the sums. The threads of DP's one process share Python's lock, the GIL, which only one thread holds at a time, and they cannot leave their machine.
#
# ### What held
#
# > **Without two GPUs:** run the next three cells without reading them: they measure nothing. With two GPUs, the first cell counts a step of DP. The second reads from `nvidia-smi topo -m` what connects each pair of GPUs, and prints two examples, the two machines of the 2022 guide: in one the GPUs have NVLinks (`NV2`), in the other, a consumer's PC, they are connected through the CPU (`PHB`). (An NVLink joins two RTX 3090, never three.) If your GPUs have an NVLink, the third cell times it.


# %%
def count_dp(task):
    from torch.nn.parallel import comm

    model = torch.nn.DataParallel(task.build_model().cuda(), device_ids=[0, 1])
    kinds = {"scatter": ["inputs", "losses"], "broadcast_coalesced": ["weights", ""], "gather": ["outputs", ""]}
    kinds, moved, backward = kinds | {"reduce_add_coalesced": ["", "gradients"]}, Counter(), []
    ran, work = set(), Counter()  # (process, thread) of each replica; seconds of each device

    def counted(name, plain, *args, **options):
        moved[kinds[name][len(backward)]] += sum(leaf.nbytes for leaf in tree_leaves(args) if hasattr(leaf, "nbytes"))
        return plain(*args, **options)

    for name in kinds:
        setattr(comm, name, partial(counted, name, getattr(comm, name)))
    model.module.register_forward_pre_hook(lambda *_: ran.add((os.getpid(), threading.get_ident())))
    with torch.profiler.profile() as seen:
        loss = model(**task.batch(8)).loss.mean()
        backward.append(True)
        loss.backward()
        torch.optim.AdamW(model.parameters()).step()
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "nccl" not in event.name:
            work[event.device_index] += event.self_device_time_total
    moved.pop("", None)
    return {"moved": moved, "work": [work[0], work[1]], "processes": len({one for one, _ in ran}), "threads": len(ran)}


# %%
LEGEND = {"X": "itself", "NV#": "a bond of # NVLinks", "PIX": "at most one PCIe bridge", "PXB": "several PCIe bridges"}
LEGEND |= {"PHB": "a PCIe host bridge, the CPU", "NODE": "several host bridges", "SYS": "the way between NUMA nodes"}


def explained(matrix):
    """Return (entry, meaning) for each GPU and each other GPU, from the text of `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    rows = [line for line in lines if line and line[0].startswith("GPU") and "X" in line]
    entries = [entry for row in rows for entry in row[1 : 1 + len(rows)] if entry != "X"]
    return [(entry, LEGEND.get(re.sub(r"\d+", "#", entry))) for entry in entries]


for entry in ("NV2", "PHB"):
    print(explained(f"GPU0 GPU1 CPU Affinity\nGPU0 X {entry} 0-23\nGPU1 {entry} X 0-23"))
joined = []
if gpus2:
    with contextlib.suppress(OSError, subprocess.CalledProcessError, StopIteration):
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True).stdout
        joined = explained(topology)
no_topology = None if joined or not gpus2 else "needs an nvidia-smi that prints the topology"
no_nvlink = no_topology or (None if not gpus2 or joined[0][0].startswith("NV") else "needs an NVLink between the GPUs")


# %%
timings, crossing = dict.fromkeys(("nvlink-quarter", "ddp-beats-dp", "dp-beats-slow-ddp")), None
if gpus2:
    crossing = lab.run(count_dp, task=timed, measure=("none",)).value
if gpus2 and not no_nvlink:
    given = {"task": timed, "measure": ("time",), "samples_per_step": 8}
    slow = {"environment": {"NCCL_P2P_DISABLE": "1"}}
    ddp2 = lab.run(partial(loop, samples=4, turns=4), "DDP", processes=2, **given)
    ddp2_slow = lab.run(partial(loop, samples=4, turns=4, **slow), "DDP, slow link", processes=2, **given)
    each = partial(loop, samples=8, wrap=partial(torch.nn.DataParallel, device_ids=[0, 1]), turns=4)
    dp = lab.run(each, "DP", **given)
    for name, pair in zip(timings, ((ddp2_slow, ddp2), (dp, ddp2), (dp, ddp2_slow))):
        timings[name] = lab.compare(*pair, turns=4).speed_ratio  # seconds of the first / of the second


# %% [markdown]
# #### DDP: equal ranks, and what they send

# %% tags=["claim"]
usual, quiet = ddp["traffic"][-1], in_steps["buckets"]
note = (
    f"broadcast_buffers=True: {sum(size for kind, size in usual if kind != 'allreduce')} bytes more, in another message"
)
display(claims.check("ddp-in-step", ddp["apart"]))
display(claims.check("ddp-traffic", quiet["bytes"] / parameter_bytes, note=note))
display(claims.check("ddp-overlaps", quiet["early"], note="buckets of 2 MB"))

# %% [markdown]
# #### The link
#
# The last three checks need an NVLink between two GPUs. `NCCL_P2P_DISABLE=1` keeps NCCL from using it: the data then go through the CPU's memory.

# %% tags=["claim"]
display(
    claims.check("link-matters", bytes_ratio, missing=missing, note=f"two hosts on this machine, gloo, {rate} Mbit/s")
)
display(
    claims.check(
        "sync-often", messages_ratio, missing=missing, note="two hosts on this machine, gloo, messages 10 ms later"
    )
)
for name, ratio in timings.items():
    display(claims.check(name, ratio, missing=no_nvlink))

# %% [markdown]
# #### DP, and what connects the GPUs
#
# All checks but `dp-exchanges-more` need two GPUs.

# %% tags=["claim"]
display(claims.check("dp-traffic", crossing and len(crossing["moved"]), note=str(crossing or "")))
display(claims.check("dp-one-process", crossing and crossing["processes"]))
first_device = crossing and crossing["work"][1] and crossing["work"][0] / crossing["work"][1]
no_kernels = "needs a profiler that sees kernels" if crossing and not first_device else None
display(claims.check("dp-first-device", first_device or None, missing=no_kernels))
note = f"for the classifier: {sum(moved.values()) / (2 * moved['gradients']):.4f}"
display(claims.check("dp-exchanges-more", sum(language.values()) / (2 * language["gradients"]), note=note))
explains = sum(meaning is not None for _, meaning in joined) / len(joined) if joined else None
claims.check("topology-legend", explains, missing=no_topology)


# %% [markdown]
# ### Exercise, a challenge: half the bytes, the same loss
#
# `economical` trains on 40 micro-batches. Find arguments for it, e.g. `{"accumulate": 2, "learning_rate": 1e-3}`, that at least halve the bytes sent. The check first trains three seeds without your arguments; their losses are the *band*. Your mean loss over these seeds must not exceed the band's highest.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "There are two ways to send less: less often, or each number in fewer bytes. "
    "Which one leaves the number of updates as it is?",
    "Half as many updates learn less at the same rate. The other way changes no update by more than a rounding.",
    "`economical` has an argument for 16-bit gradients: look at its definition above.",
)

# %% tags=["exercise"]
answer = None  # a dict of arguments of `economical`


# %% tags=["check"]
def forty(answer):
    each = partial(economical, seeds=(0, 1, 2), micro_batches=40, **answer)
    return lab.run(each, f"economical {answer}", task=rule, processes=2, measure="value")


band = None


def check_bytes(answer):
    global band
    if answer is None:
        return exercises.not_attempted("replace None by a dict of arguments")
    band = band or forty({}).value
    run = forty(answer)
    if not run.ok:
        return exercises.run_failed(run)
    part, loss = run.value["MB"] / band["MB"], sum(run.value["losses"]) / 3
    found = f"{part:.0%} of the bytes, loss {loss:.3f}; the band ends at {max(band['losses']):.3f}"
    return (exercises.right if part <= 0.5 and loss <= max(band["losses"]) else exercises.wrong)(found)


exercises.check(lab, "half-bytes", check_bytes, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check_bytes, solution={"bf16": True}, mistake={"accumulate": 2})

# %% [markdown]
# ### Recap of part one
#
# Percentages and ratios: AMD EPYC, 2 cores, 2026-11-29.
#
# - Each rank computes on its own samples, and the mean of the gradients keeps all ranks equal: the largest difference was 0.
# - DDP sends 4 bytes per parameter per step, in buckets, 87 % of them while backward runs. Its buckets take 4 bytes per parameter of memory, unless gradients are views of them.
# - A step waits for what backward cannot hide. Over a link with few bytes per second, a model twice as large waited 1.62 times as long; with late messages, a sharded model waited 4.55 times as long as one under DDP that sent everything twice.
#
# ## Part two: launchers and faults
#
# Your training must run from a shell, perhaps on two hosts, and one morning it has stopped. Who starts the processes, and how do you learn which one failed?
#
# ### From a shell
#
# `torchrun` starts a script once for each rank. It puts `RANK`, `WORLD_SIZE` and the address at which the ranks find each other into environment variables. `accelerate launch` calls torchrun. So far the lab started the ranks; the next cells compare all three. On two hosts, start the same command on each. `--nnodes` is the number of hosts, `--nproc-per-node` that of ranks on each. *rdzv* is *rendezvous*, how the ranks find each other: the backend `c10d` is torch's own, `--rdzv-endpoint` is the address of one host, `--rdzv-id` any name:
#
# ```
# torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id lesson --rdzv-endpoint 10.0.0.1:29500 script.py
# ```

# %%
import json
import runpy
import sys
import tempfile

SCRIPT = """
import json, torch
import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1))
    for rows in torch.randn(3, dist.get_world_size(), 16, 64):
        model(rows[dist.get_rank()]).square().mean().backward()
    return {"rank": dist.get_rank(), "gradient": sum(weight.grad.sum() for weight in model.parameters()).item()}

if __name__ == "__main__":
    print(json.dumps(main()) + "\\n", end="", flush=True)
    dist.destroy_process_group()
"""


# %%
LAUNCHERS = {  # the module that the command runs, and its arguments
    "torchrun": ("torch.distributed.run", "--standalone --local-addr 127.0.0.1 --nproc-per-node 2"),
    "accelerate launch": (
        "accelerate.commands.launch",
        "--multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0",
    ),
}
environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    path, started = Path(folder, "script.py"), {}
    path.write_text(SCRIPT)
    for name, (module, options) in LAUNCHERS.items():  # both at once, beside the lab's
        command = [sys.executable, "-m", module, *options.split(), str(path)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=folder)
        started[name] = stack.enter_context(subprocess.Popen(command, **pipes))
        stack.callback(started[name].kill)
    run = lab.run(lambda task: runpy.run_path(str(path))["main"](), "the lab", processes=2, measure="value")
    for name, process in started.items():
        output, errors = process.communicate(timeout=120)
        print(f"$ {name} {LAUNCHERS[name][1]} script.py\n{output or errors[-800:]}")
        values = sorted(map(json.loads, re.findall(r"\{.*?\}", output)), key=lambda rank: rank["rank"])
        if values or strict:
            torch.testing.assert_close(values, [rank["value"] for rank in run.ranks])


# %% [markdown]
# Whoever starts them, the ranks compute the same gradients. `--multi_gpu` looks odd on a CPU. But `accelerate launch --cpu --num_processes 2` starts only *one* process unless MPI, another library for messages, is installed ([#2741](https://github.com/huggingface/accelerate/issues/2741)). The guides' `torch.distributed.launch` is torchrun's older name.
#
# ### What goes wrong
#
# The next cells start two ranks several times. Before an all-reduce, rank 1 ends, hangs, or disagrees with rank 0. In the row *one sum fewer* it skips the all-reduce. In *another size* it has more numbers. In the last two rows it has integers instead of floats; in *torch compares first* torch compares the ranks' calls before it sends.


# %%
def fault(task, kind):
    if kind == "torch compares first":
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
    dist.init_process_group("gloo")
    faulty, numbers = dist.get_rank() == 1, torch.ones(4)
    if kind in ("another dtype", "torch compares first") and faulty:
        numbers = numbers.int()
    elif kind == "another size" and faulty:
        numbers = torch.ones(6)
    elif kind == "one sum fewer" and faulty:
        return
    elif faulty:
        ENDS[kind]()
    dist.all_reduce(numbers)
    return numbers.tolist()


ENDS = {"killed": lambda: os.kill(os.getpid(), 9), "an exception": lambda: {}["lost"]}
ENDS |= {"no memory": lambda: torch.empty(10**15), "the disk is full": lambda: Path("/dev/full").write_text("all")}


# %%
def unused(task, **options):
    dist.init_process_group("gloo")
    model = task.build_model()
    model.spare = torch.nn.Linear(8, 8)  # no forward pass uses it
    model = DDP(model, **options)
    for _ in range(2):
        model(**task.batch(2)).loss.backward()


ENDS |= {"hangs": lambda: time.sleep(600)}
rows = []
for kind in (*ENDS, "one sum fewer", "another size", "another dtype", "torch compares first"):
    start = time.perf_counter()
    run = lab.run(partial(fault, kind=kind), kind, processes=2, measure="value", timeout=8)
    message = run.message if len(run.message) < 240 else f"{run.message[:120]} ... {run.message[-110:]}"
    seen = message or str([rank["value"] for rank in run.ranks])
    rows.append([kind, run.status, round(time.perf_counter() - start, 1), seen])
display(plots.Table(["rank 1", "status", "seconds", "the message"], rows))
print("unused parameters:", lab.run(unused, task=rule, processes=2, measure="value").message[:150])
remedy = lab.run(partial(unused, find_unused_parameters=True), task=rule, processes=2, measure="value")
print("with find_unused_parameters=True:", remedy.status)

# %% [markdown]
# - **Rank 1 ends**: the launcher (here the lab) names the rank and ends the others. If a whole host is gone, the others wait for the timeout: half an hour with gloo, ten minutes with NCCL.
# - **Rank 1 hangs**: here the lab's time limit ends the run, and the message names each rank's line of code.
# - **Rank 1 disagrees**: gloo aborts rank 0 if the sizes differ, but does not notice another dtype of the same size. Both ranks go on with wrong numbers, which the row shows instead of a message (each should be 2). Each rank reads the other's bytes in its own dtype (a float 1 has the bits of the integer 1065353216). With `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch compares before each collective, which takes more messages.
# - **Unused parameters**: DDP notices in the *second* step that a bucket never became full. `find_unused_parameters=True` looks for such parameters in each step; it is better to freeze them (`requires_grad=False`). You find them by their `grad`, which is still `None` after one step on one process.
#
# ### What carries over
#
# The index pages of the guides (2022 and 2024) send you to the single-GPU methods first, because these extend to other setups. The next cell measures the memory of five methods and of *vanilla*, the training without them. Each runs on one CPU process and on two (which also have DDP's buckets). The first check is about the two hosts of *The link*.
#
# > **On a GPU:** the last check times the GPU against the CPU.

# %% tags=["claim"]
TECHNIQUES = {"vanilla": {}, "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}}
TECHNIQUES |= {"checkpointing": {"gradient_checkpointing": True}, "bf16": {"bf16": True}}
TECHNIQUES |= {"Adafactor": {"optim": "adafactor"}, "8-bit Adam": {"optim": "adamw_bnb_8bit"}}
long, rows = Task("bert-tiny", seq_len=128, config=no_dropout | {"vocab_size": 2000}), []
for name, arguments in TECHNIQUES.items():
    given = {"task": long, "per_device_train_batch_size": 8, "use_cpu": True} | arguments
    on = [lab.train(f"{name}, {ranks}", processes=ranks, measure=("memory",), **given) for ranks in (1, 2)]
    peaks = [on[0].peak_bytes, max(rank["peak_bytes"] for rank in on[1].ranks)]
    first_row = rows[0] if rows else [name, *peaks]
    rows.append([name, *peaks, *(peak / vanilla for peak, vanilla in zip(peaks, first_row[1:]))])
titles = ["", "peak, one process", "peak, each of two", "x vanilla, one process", "x vanilla, each of two"]
display(plots.Table(titles, [[name, *map(plots.bytes_text, row[:2]), *row[2:]] for name, *row in rows]))
accelerated = None
if lab.machine.kind == "cuda":
    given |= {"task": task.replace(seq_len=128, config={"num_hidden_layers": 2}), "optim": "adamw_torch", "steps": 5}
    both = [lab.train(f"use_cpu={use}", measure=("time",), **given | {"use_cpu": use}) for use in (True, False)]
    accelerated = lab.ratio([cpu / gpu for cpu, gpu in zip(*(run.timing.all_seconds for run in both))], *both)
helped = sum(max(shares) < 0.97 for _, _, _, *shares in rows[1:]) / len(rows[1:])  # on one process and on each of two
display(claims.check("ddp-many-machines", hosts and hosts["apart"], missing=missing))
display(claims.check("single-gpu-carries-over", helped, note="peak memory"))
claims.check("accelerator-required", accelerated)


# %% [markdown]
# ## Recap
#
# Times and ratios: AMD EPYC, 2 cores, 2026-11-29.
#
# - The second process helped if a step was long: with 8 samples each, two processes were 1.55 times as fast as one. With 1 sample each, the effect was too small to tell: 1.02 times (0.78 to 1.33).
# - `no_sync` sent 2.45 MB instead of 9.81, and bf16 sent half.
# - DP moves more than DDP: 2.65 times the bytes for gpt2.
# - A killed rank was named after 4.2 s. A hanging rank was reported with its line of code, after the limit of 8 s. Ranks of two dtypes went on with wrong numbers until torch compared (`DETAIL`).
# - All five single-GPU methods saved memory on two processes, too: accumulation the most, with 0.63 times the peak.

# %% tags=["finish"]
claims.finish()
