# %% [markdown]
# # Are two devices twice as fast?
#
# Rarely, and never by themselves. This lesson starts two real processes and counts what they say to each other.
#
# **You will see**
# - two processes that train one model and stay equal to the last bit, first by hand, then with torch's DDP
# - what they send: 4 bytes a parameter in each step, and when a link is too slow for that
# - what happens when a process dies, comes late, or leaves parameters unused

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
import time
from collections import Counter
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from IPython.display import display
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perf_helpers import Lab, Task, claims, exercises, hardware, network, plots, widgets

lab = Lab(profile, strict=strict, out=out, lesson="15_dp_and_ddp")
gpus2 = hardware.supports("gpus2")[0]
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
task = Task("bert-small", seq_len=32, config=no_dropout | {"vocab_size": 2000})

# %% [markdown]
# ## Idea
#
# Data parallel training gives each device the whole model and its own part of the batch. The gradient of a batch is the mean over its samples (lesson 05), so the mean of the devices' gradients is the gradient of all their samples together. If all devices start equal and apply the same gradient, they stay equal, and weights never have to be sent again.
#
# The devices here are two processes with one CPU core each, joined by gloo, torch's library for CPUs. On GPUs the library is NCCL; the words and the counts are the same. Each process is a **rank**.
#
# ## Predict
#
# The model of this lesson is printed below. How many MB of gradients will each rank hand over in one step, to be summed with those of the other?

# %%
print(f"{task.parameters():,} parameters, float32")
guess = None  # MB

# %% [markdown]
# ## By hand
#
# One training function for everything that follows. `wrap(model)` says how the ranks cooperate: it returns what to call instead of the model, and what to do after backward. `Traffic` notes every collective operation, that is, every message in which all ranks take part.

# %%
class Traffic(TorchDispatchMode):
    """Notes the collective operations that pass by: [name, bytes that this rank hands over]."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            size = sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            self.seen.append([function.overloadpacket.__name__.strip("_"), size])
        return function(*args, **(kwargs or {}))


def largest_difference(model):
    """Between any two ranks, in any weight."""
    largest = 0.0
    for weight in model.parameters():
        high, low = weight.detach().clone(), weight.detach().clone()
        dist.all_reduce(high, dist.ReduceOp.MAX)
        dist.all_reduce(low, dist.ReduceOp.MIN)
        largest = max(largest, (high - low).max().item())
    return largest

# %%
def train(task, wrap, steps=3):
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    model = task.replace(seed=rank).build_model()  # every rank starts elsewhere: wrap has to see to that
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    traffic = []
    with Traffic() as start:
        called, after_backward = wrap(model)
    for step in range(steps):
        batch = task.batch(4 * steps)
        mine = {name: rows[4 * step + rank : 4 * step + 4 : ranks] for name, rows in batch.items()}
        with Traffic() as sent:
            called(**mine).loss.backward()
            after_backward()
            optimizer.step()
            optimizer.zero_grad()
        traffic.append(sent.seen)
    some = torch.cat([weight.detach().flatten()[:9] for weight in model.parameters()])
    apart = largest_difference(model) if ranks > 1 else None
    return {"start": start.seen, "traffic": traffic, "some weights": some.tolist(), "apart": apart}

# %% [markdown]
# By hand, cooperation is two loops: rank 0 hands its weights to all at the start, and after each backward the gradients are summed and divided. `broadcast` and `all_reduce` are all it takes.

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


one = lab.run(partial(train, wrap=alone), "one process", task=task, measure=("none",))
two = lab.run(partial(train, wrap=by_hand), "two, by hand", task=task, processes=2, measure=("none",))
torch.testing.assert_close(two.value["some weights"], one.value["some weights"], rtol=1e-3, atol=1e-5)
print(f"largest difference between the ranks after {len(two.value['traffic'])} steps: {two.value['apart']}")

# %% [markdown]
# Two processes with half of each batch made the same steps as one with all of it; `assert_close` would have stopped us otherwise. And the ranks agree to the last bit: both receive the *same sum*, so both compute the same step.
#
# ### While backward still runs
#
# The loop above waits until backward is done, and only then sends. But the last layer's gradients are finished first, long before the embeddings'. So send them early: put parameters into **buckets**, in the order in which backward finishes them; a hook on each parameter counts, and a full bucket leaves at once, in the background.

# %%
class Buckets:
    def __init__(self, model, bucket_bytes=2_000_000):
        self.buckets, self.sent, self.times = [[]], [], {}
        for weight in reversed([*model.parameters()]):  # about the order in which backward finishes them
            if sum(other.nbytes for other in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(weight)
            weight.register_post_accumulate_grad_hook(partial(self.ready, len(self.buckets) - 1))
        self.missing = [len(bucket) for bucket in self.buckets]

    def ready(self, number, _):
        self.missing[number] -= 1
        if self.missing[number] == 0:
            together = torch.cat([weight.grad.flatten() for weight in self.buckets[number]])
            work = dist.all_reduce(together, async_op=True)  # does not wait
            self.sent.append((number, together, work))
            times = self.times[number] = [time.perf_counter()]
            work.get_future().add_done_callback(lambda _: times.append(time.perf_counter()))

    def finish(self):
        for number, together, work in self.sent:
            work.wait()
            bucket = self.buckets[number]
            for weight, part in zip(bucket, together.split([weight.numel() for weight in bucket])):
                weight.grad = part.view_as(weight) / dist.get_world_size()
            self.missing[number] = len(bucket)
        self.sent = []

# %% [markdown]
# That is the whole idea of DDP. Now both, and the table of what was sent:

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
plots.Table(["", "when", "collectives", "bytes", "bytes / 4 B x parameters"], rows)

# %%
ddp = runs["DDP"].value
exercises.score(guess, sum(size for kind, size in ddp["traffic"][-1] if kind == "allreduce") / 1e6, "MB")

# %% [markdown]
# Read the last column. At the start the weights are sent once, and then, in each step, the gradients: 4 bytes a parameter, however they are packed. DDP sends a little more. Before each forward pass rank 0 broadcasts the model's *buffers* (here: the position numbers, always the same), unless `broadcast_buffers=False` says that nobody needs that; and at the start the ranks check that they have the same model.
#
# ### When is it sent?
#
# Once with buckets of 2 MB, once with one bucket for all. Where this machine allows it, the ranks talk over a real slow link: each in a network namespace of its own, with a virtual cable of 400 Mbit/s between them.

# %%
def watch(task, bucket_bytes, link=None):
    if link:
        link.join()
    dist.init_process_group("gloo")
    model, batch = task.build_model(), task.batch(4)
    buckets = Buckets(model, bucket_bytes)
    for _ in range(3):
        loss = model(**batch).loss
        begin = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        buckets.finish()
    time.sleep(0.05)  # the last one's time is noted by another thread
    return [[0, end - begin], *([moment - begin for moment in times] for _, times in sorted(buckets.times.items()))]


missing = network.missing()
with contextlib.nullcontext() if missing else network.link(400) as link:
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
    last = max(end for _, end in bars)
    axes.set_title(f"{name}: all sums are there after {last:.2f} s, {last - bars[0][1]:.2f} s after backward", loc="left")
both[1].set_xlabel("seconds after backward began" + (f" (this machine {missing})" if missing else ", over 400 Mbit/s"));

# %% [markdown]
# An orange bar begins where its bucket is handed over and ends where its sum is there. One big bucket cannot leave before the last gradient is finished, so all of the sending comes after backward. Small buckets leave during backward. What remains visible is the part that backward was too short to hide; the numbers above each picture say how long it was.

# %% [markdown]
# ## Baseline
#
# Is it faster, then? One process, with 1 or 8 samples in a step. On a machine with two GPUs this runs there, with NCCL and the profile's model.

# %%
def loop(task, samples, wrap=DDP, link=None, p2p=True):
    if link:
        link.join()
    if not p2p:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    model, batch = task.build_model(), task.batch(samples)
    if gpus2:
        model, batch = model.to(rank), {name: rows.to(rank) for name, rows in batch.items()}
    if ranks > 1:
        dist.init_process_group("nccl" if gpus2 else "gloo")
    if ranks > 1 or wrap is not DDP:
        model = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters())
    before = network.bytes_sent() or 0
    for step in range(14):
        model(**batch).loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"sent in a step": ((network.bytes_sent() or 0) - before) / 14}


timed = lab.task if gpus2 else task
first = {}
for samples in (1, 8):
    name, each = f"1 process, {samples} samples", partial(loop, samples=samples)
    first[samples] = lab.run(each, name, task=timed, measure=("time",), samples_per_step=samples)

# %% [markdown]
# ## Change one thing
#
# Two processes, each with that many samples. Twice the throughput would be an efficiency of 100 %.

# %%
speedups = {}
for samples, run in first.items():
    name, each = f"2 processes, {samples} samples each", partial(loop, samples=samples)
    second = lab.run(each, name, task=timed, processes=2, measure=("time",), samples_per_step=2 * samples)  # new
    speedups[samples] = lab.compare(run, second)
for samples, comparison in speedups.items():
    print(f"{samples} samples each: {comparison.speed_ratio} times one process, {comparison.speed_ratio.value / 2:.0%}")
series = {f"{n} samples each": [1, item.speed_ratio.value] for n, item in speedups.items()}
series["as many times as fast"] = [1, 2]
axes = plots.lines([1, 2], series, "processes", "throughput, times that of one", title="What the second process is worth")
axes.set_xticks([1, 2]);

# %% [markdown]
# The bytes of a step do not depend on the batch; the work does. With one sample each, the ranks spend their time on summing gradients and on the optimizer, and the second process is worth little. With eight, more of the time is work that is shared. Two devices come close to twice the speed only where **the work of a step is long against the sending of its gradients**. (A CPU has one more reason: its cores share the path to memory. The intervals printed are wide on a busy machine; read them before you believe the lines.)
#
# ### The link
#
# The guide of 2022 measured 131 s without NVLink and 101 s with it, on two TITAN RTX. Here is the same training over a fast and a slow link. Two GPUs: with and without direct access to each other. Else: two network namespaces again, the virtual cable once as fast as the machine copies and once held to 400 Mbit/s by a token bucket.

# %%
rate = 400  # Mbit/s
with contextlib.ExitStack() as links:
    matters = None
    ways = {"fast": {"p2p": True}, "slow": {"p2p": False}} if gpus2 else {}
    if not gpus2 and not missing:
        ways = {"fast": {"link": links.enter_context(network.link())}}
        ways["slow"] = {"link": links.enter_context(network.link(rate))}
    over = {}
    for name, way in ways.items():
        each = partial(loop, samples=4, **way)
        over[name] = lab.run(each, f"{name} link", task=timed, processes=2, measure=("time",), samples_per_step=8)
    if ways:
        matters = lab.compare(over["slow"], over["fast"])
        print(f"seconds over the slow link / over the fast link: {matters.speed_ratio}")
    if over and not gpus2:
        sent = over["slow"].value["sent in a step"]
        print(f"on the wire: {sent / 1e6:.2f} MB a rank and step, {sent / parameter_bytes:.3f} x 4 B x parameters")
        print(f"at {rate} Mbit/s that takes {sent * 8 / rate / 1e6:.2f} s; the slow step took {over['slow'].step_seconds:.2f} s")
print(missing or "")

# %% [markdown]
# The kernel's own counter of the cable confirms the count from above, headers included. (Two ranks sum a vector by exchanging halves twice, so that each sends as much as it hands over; $n$ ranks send $2(n-1)/n$ times as much, never more than twice.) And the time can be told in advance: bits to send through bits a second, less what backward hides.
#
# ### Send less often
#
# With accumulation, only the last micro-batch needs the sum. `no_sync` keeps DDP quiet for the others:

# %%
def accumulated(task, quiet):
    dist.init_process_group("gloo")
    model = DDP(task.build_model(), broadcast_buffers=False)
    batch = task.batch(4)
    for step in range(3):
        with Traffic() as sent:
            for micro_batch in range(4):
                with model.no_sync() if quiet and micro_batch < 3 else contextlib.nullcontext():
                    (model(**batch).loss / 4).backward()
            model.zero_grad()
    return sum(size for _, size in sent.seen)


for quiet in (False, True):
    run = lab.run(partial(accumulated, quiet=quiet), task=task, processes=2, measure=("none",))
    print(f"4 micro-batches, no_sync {quiet}: {run.value / 1e6:.1f} MB")
sampler = [torch.utils.data.DistributedSampler(range(7), num_replicas=2, rank=rank, seed=0) for rank in (0, 1)]
for epoch in (0, 1):
    sampler[0].set_epoch(epoch), sampler[1].set_epoch(epoch)
    print(f"epoch {epoch}: rank 0 takes {[*sampler[0]]}, rank 1 takes {[*sampler[1]]}")
