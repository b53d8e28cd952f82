# %% [markdown]
# # Are two devices twice as fast?
#
# Rarely, and never by themselves. This lesson starts two real processes and counts what they say to each other.
#
# **You will see**
# - two processes that train one model and stay equal to the last bit, first by hand, then with torch's DDP
# - what they send: 4 bytes a parameter in each step, and what a slow link makes of that
# - which single-GPU methods help two processes too, and what happens when a process dies, hangs or disagrees

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
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from IPython.display import display
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perf_helpers import Lab, Task, claims, exercises, hardware, plots, slow_link, widgets
from perf_helpers.lab import Ratio

lab = Lab(profile, strict=strict, out=out, lesson="15_dp_and_ddp")
gpus2 = hardware.supports("gpus2")[0]
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
task = Task("bert-small", seq_len=32, config=no_dropout | {"vocab_size": 2000})

# %% [markdown]
# ## Idea
#
# Data parallel training gives each device the whole model and its own part of the batch, all parts of one size. The gradient of a batch is the mean over its samples (lesson 05), so the mean of the devices' gradients is the gradient of all their samples together. If all devices start equal and apply the same gradient, they stay equal, and weights never have to be sent again.
#
# The devices here are two processes with half of the CPU's cores each, joined by gloo, torch's library for CPUs. On GPUs the library is NCCL; the words and the counts are the same. Each process is a **rank**.
#
# ## Predict
#
# The model of this lesson is printed below.

# %%
print(f"{task.parameters():,} parameters, float32")
asked = "How many MB of gradients will each rank hand over in one step, to be summed with those of the other?"
widgets.predict(lab, "sent", asked, "MB", 0, round(12 * task.parameters() / 1e6))
exercises.question(
    lab,
    "twice",
    "One device trains 100 samples a second. How many do two of them train together?",
    {
        "200": "If sending the gradients cost nothing. A step ends only when the sum of all gradients is there, and what "
        "backward cannot hide of the sending is added to it.",
        "100, since they share the batch": "With half of the batch each, a step is done sooner. With a whole batch each, "
        "it takes as long and counts twice. Either way there are more samples a second.",
        "fewer than 200; how many fewer depends on the work of a step and on the link": "The work is shared, the sending "
        "comes on top. With little work and a slow link, two may be slower than one.",
    },
    right="fewer than 200; how many fewer depends on the work of a step and on the link",
)

# %% [markdown]
# ## By hand
#
# One training function for everything that follows. `wrap(model)` says how the ranks cooperate: it returns what to call instead of the model, and what to do after backward. `Traffic` notes every collective operation, that is, every message in which all ranks take part. It is a *dispatch mode*: while its `with` block is open, torch hands each operation and its arguments to `__torch_dispatch__` before anything is computed, and this method looks at them and then carries the operation out. By hand, cooperation is two loops: at the start rank 0 hands its weights to all (`broadcast`), and after each backward the gradients are summed over the ranks (`all_reduce`) and divided.


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
def train(task, wrap, steps=3, link=None):
    if link:
        link.join()
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
# ### From a shell
#
# Here the lab started the ranks. A script of yours is started by `torchrun`, or by `accelerate launch`, which calls it: once for each rank, with `RANK`, `WORLD_SIZE` and a place to meet in the environment. Both are run here, and then the lab's own ranks on the same script.

# %%
import json
import runpy
import sys

SCRIPT = """
import json, datetime, torch
import torch.distributed as dist

def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    for rows in torch.randn(3, dist.get_world_size(), 16, 64):
        model(rows[dist.get_rank()]).square().mean().backward()
        norms.append(sum(weight.grad.square().sum() for weight in model.parameters()).sqrt().item())
        optimizer.step()
        optimizer.zero_grad()
    return {"rank": dist.get_rank(), "gradient norms": norms, "a weight": model.module[0].weight[0, 0].item()}

if __name__ == "__main__":
    print(json.dumps(main()) + "\\n", end="", flush=True)
    dist.destroy_process_group()
"""


# %%
import tempfile

LAUNCHERS = {  # the module behind the command, and its arguments
    "torchrun": ("torch.distributed.run", "--standalone --local-addr 127.0.0.1 --nproc-per-node 2"),
    "accelerate launch": ("accelerate.commands.launch", "--multi_gpu --num_processes 2 --num_machines 1 "
                          "--mixed_precision no --dynamo_backend no --main_process_port 0"),
}  # fmt: skip
here = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    path, started = Path(folder, "script.py"), {}
    path.write_text(SCRIPT)
    for name, (module, options) in LAUNCHERS.items():  # both at once, beside the lab's
        command = [sys.executable, "-m", module, *options.split(), str(path)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=here, cwd=folder)
        started[name] = stack.enter_context(subprocess.Popen(command, **pipes))
        stack.callback(started[name].kill)
    run = lab.run(lambda task: runpy.run_path(str(path))["main"](), "the lab", processes=2, measure=("none",))
    ranks = [rank["value"] for rank in run.ranks]
    for name, process in started.items():
        output, errors = process.communicate(timeout=120)
        print(f"$ {name} {LAUNCHERS[name][1]} script.py\n{output or errors[-800:]}")
        told = sorted(map(json.loads, re.findall(r"\{.*?\}", output)), key=lambda rank: rank["rank"])
        if told or strict:
            torch.testing.assert_close(told, ranks)

# %%
TWO_HOSTS = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id lesson --rdzv-endpoint 10.0.0.1:29500 "
TOLD = """AMD EPYC, 2 cores, torch 2.13.0, 2026-11-23:
{"rank": 0, "gradient norms": [0.6855310201644897, 0.5424984097480774, 0.562623918056488], "a weight": -0.0005694843712262809}
{"rank": 1, "gradient norms": [0.6855310201644897, 0.5424984097480774, 0.562623918056488], "a weight": -0.0005694843712262809}"""
if slow_link.missing():
    print(f"This machine {slow_link.missing()}. What two hosts printed elsewhere:\n{TOLD}")
else:
    with tempfile.TemporaryDirectory() as folder, slow_link.link() as cable, contextlib.ExitStack() as stack:
        path, started = Path(folder, "script.py"), []
        path.write_text(SCRIPT)
        there = here | {"GLOO_SOCKET_IFNAME": cable.device, "RES_OPTIONS": "timeout:1 attempts:1"}  # no name server
        for host, address in enumerate(cable.addresses):
            options = f"{TWO_HOSTS}--rdzv-conf is_host={1 - host} --local-addr {address}"
            command = cable.on(host, sys.executable, "-m", "torch.distributed.run", *options.split(), str(path))
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=there)
            started.append(stack.enter_context(subprocess.Popen(command, **pipes)))
            stack.callback(started[-1].kill)
            print(f"host {host + 1} $ torchrun {options} script.py")
        told = [process.communicate(timeout=120) for process in started]
    print(*(output or errors[-800:] for output, errors in told), sep="")
    torch.testing.assert_close(sorted((json.loads(output) for output, _ in told), key=lambda rank: rank["rank"]), ranks)

# %% [markdown]
# Whoever starts them, on one host or on two (network namespaces with a virtual cable), the ranks make the same steps: the cells assert it. `--multi_gpu` reads oddly on a CPU, but `accelerate launch --cpu --num_processes 2` starts *one* process unless MPI is there ([#2741](https://github.com/huggingface/accelerate/issues/2741)). The guides' `torch.distributed.launch` is torchrun's older name.
#
# ### While backward still runs
#
# The loop above waits until backward is done, and only then sends. But the last layer's gradients are finished first, long before the embeddings'. So send them early: put parameters into **buckets**, in the order in which backward finishes them; a hook on each parameter counts, and a full bucket leaves at once, in the background. That is the idea of DDP.


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
display(plots.Table(["", "when", "collectives", "bytes", "bytes / 4 B x parameters"], rows))
ddp = runs["DDP"].value
widgets.revealed(lab, "sent", sum(size for kind, size in ddp["traffic"][-1] if kind == "allreduce") / 1e6)

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
    model, batch = task.build_model(), task.batch(16)
    buckets = Buckets(model, bucket_bytes)
    for _ in range(3):
        loss = model(**batch).loss
        begin = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        buckets.finish()
    time.sleep(0.05)  # the last one's time is noted by another thread
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
# An orange bar begins where its bucket is handed over and ends where its sum is there. One big bucket cannot leave before the last gradient is finished, so all of the sending comes after backward. Small buckets leave during backward; what remains is the part that backward was too short to hide. The titles say how long that is here.
#
# ## Baseline
#
# Is it faster, then? First one process, with 1 or 8 samples in a step. (On a machine with two GPUs all of this runs there, with NCCL and the profile's own model.)
#
# ## Change one thing
#
# Then, in the cell after it, two processes, each with that many samples. Twice the throughput would be an efficiency of 100 %.


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
    steps = turns + lab.profile.warmup_steps
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
if any(item.speed_ratio.known and item.speed_ratio.low > 2 for item in speedups.values()):
    raise RuntimeError("two devices did more than twice the work: the quiz above has the wrong key")
series = {f"{n} samples each": [1, item.speed_ratio.value] for n, item in speedups.items()}
axes = plots.lines([1, 2], series | {"twice as fast": [1, 2]}, "processes", "throughput, times that of one process")
for row, item in enumerate(speedups.values()):
    axes.vlines(2 + 0.01 * row, item.speed_ratio.low, item.speed_ratio.high, color=plots.SERIES[row])
axes.set_title("What the second process is worth (bars: intervals)", loc="left")
_ = axes.set_xticks([1, 2])

# %% [markdown]
# The bytes of a step do not depend on the batch; the work does. So the second process is worth more, the **longer the work of a step is against the sending of its gradients**: compare the two lines. Read the intervals: on a CPU the ranks share the path to memory.
#
# ### The link
#
# On two TITAN RTX the 2022 guide measured 131 s without NVLink and 101 s with it, and adds a law: the more there is to synchronize, the more a slow link costs; little for DDP, which does so once a step, much for ZeRO-DP, which does so often. The law can be tried anywhere. Two ranks on two *hosts* (network namespaces with a virtual cable between them) train a large and a small model with DDP, then the small one with its weights sharded, as ZeRO does (lesson 16). The slow one is held to a rate at which the sum takes as long as twenty steps, or to 40 Mbit/s: little of that is hidden, and what it adds to a step can be told from bytes and rate.


# %%
def sharded(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.bert.encoder.layer, model):
        fully_shard(part, mesh=ranks)  # gathered before it is used, forward and backward, and given back after
    return model


large = task.replace(config={"hidden_size": 128, "intermediate_size": 512})
small, over, rate, hosts = large.replace(config={"num_hidden_layers": 1}), {}, None, None
recipes = {"DDP": (large, DDP), "DDP, small model": (small, DDP), "small, sharded": (small, sharded)}
with contextlib.ExitStack() as stack:
    for speed in () if missing else ("fast", "slow"):
        if speed == "slow":
            rate = max(40, round(32 * large.parameters() / (20 * over["fast", "DDP"].step_seconds) / 1e6))  # Mbit/s
        cable = stack.enter_context(slow_link.link(rate))
        for name, (model, wrap) in recipes.items():
            each = partial(loop, samples=2, wrap=wrap, link=cable, turns=4)
            over[speed, name] = lab.run(each, f"{name}, {speed} cable", task=model, processes=2, measure=("time",))
    if not missing:
        each = partial(train, wrap=with_ddp, link=cable)
        hosts = lab.run(each, "two hosts", task=small, processes=2, measure=("none",)).value

# %%
from statistics import median

law = often = None
if hosts:
    rows, added = [], {}
    for name, (model, _) in recipes.items():
        slow, fast = over["slow", name], over["fast", name]
        added[name] = [seconds - fast.step_seconds for seconds in slow.timing.all_seconds]
        MB = slow.value["sent in a step"] / 1e6
        rows.append([name, 4 * model.parameters() / 1e6, MB, fast.step_seconds, 8 * MB / rate, median(added[name])])
    titles = ["", "MB of gradients", "MB on the wire", "s a step, fast", "s to be added, told", "s added, seen"]
    display(plots.Table(titles, rows))
    pairs = [seconds / row[4] for row in rows[:2] for seconds in added[row[0]]]
    law = Ratio.of_pairs(pairs, 1.05)  # the median, its bootstrap, and 5 % at least
    pairs = [shards / whole for shards, whole in zip(added["small, sharded"], added["DDP, small model"])]
    often = Ratio.of_pairs(pairs, 1.05)
print(missing or f"the slow cable: {rate} Mbit/s")
print(f"the guide: {1 - 101 / 131:.0%} less time, so {131 / 101 - 1:.0%} more speed; {200 / 101.9:.2f} steps a second")
print(f"an RTX 3090's NVLink: 4 links of 14.0625 GB/s are {4 * 14.0625} GB/s each way, {8 * 14.0625} in all")

# %% [markdown]
# If this machine could lay the cables, the table confirms the count on the wire, headers included. (Two ranks sum a vector by exchanging halves twice, so each sends what it hands over; $n$ ranks send $2(n-1)/n$ times as much, never more than twice.)
#
# The last lines check the guide's own sums: its "23 % faster" is 23 % less time. What more or newer NVLinks are worth, or InfiniBand and Omni-Path between hosts, only a machine that has them can say.
#
# ### Send less
#
# A link cannot be changed, but what is sent can. With accumulation only the last micro-batch needs the sum, and `no_sync` keeps DDP quiet for the others. And a *communication hook* may send the gradients in another form: DDP hands it each full bucket, and waits for the future that it returns. Ours sends bf16. (torch has such a hook ready, `bf16_compress_hook`; it wants NCCL.) `economical` trains on a rule that can be learnt, and counts.


# %%
def in_bf16(_, bucket):
    half = bucket.buffer().to(torch.bfloat16) / dist.get_world_size()
    summed = dist.all_reduce(half, async_op=True).get_future()
    return summed.then(lambda done: bucket.buffer().copy_(done.value()[0]))  # its value: a list with the sum in it


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
            mine = {name: row[16 * number + rank : 16 * number + 16 : 2] for name, row in rows.items()}
            last = (number + 1) % accumulate == 0
            with traffic, model.no_sync() if quiet and not last else contextlib.nullcontext():
                (model(**mine).loss / accumulate).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(model.module.eval()(**{name: row[-256:] for name, row in rows.items()}).loss.item())
    return {"losses": losses, "MB": sum(size for kind, size in traffic.seen if kind == "allreduce") / 1e6 / len(seeds)}


# %%
rule = Task("bert-tiny", seq_len=16, data="learnable", config={"num_hidden_layers": 1, "vocab_size": 200})
for quiet in (False, True):
    each = partial(economical, accumulate=4, quiet=quiet)
    run = lab.run(each, task=rule, processes=2, measure=("none",))
    print(
        f"8 micro-batches, accumulation of 4, {'with' if quiet else 'without'} no_sync: {run.value['MB']:.2f} MB sent"
    )
for epoch in (0, 1):
    for rank in (0, 1):
        sampler = torch.utils.data.DistributedSampler(range(7), num_replicas=2, rank=rank)
        sampler.set_epoch(epoch)
        print(f"epoch {epoch}, rank {rank}: samples {[*sampler]}")

# %% [markdown]
# The lower lines are the other half of data parallel training, the **distributed sampler**. It deals a data set of 7 out to 2 ranks: each gets 4, so one sample is seen twice, since all ranks must take the same number of steps. Without `set_epoch` each epoch would have the order of the first. And mind the **effective batch**: micro-batch x accumulation x ranks. Whoever adds ranks trains with a larger batch and fewer steps.
#
# ### What DP does instead
#
# `nn.DataParallel` is the older way: one process, and the first device is in charge. Here is a step of it on two pretended devices, with everything counted that would cross between them: for our classifier, and for the guide's gpt2 with its sizes (on torch's `meta` device, where tensors have shapes but no numbers).


# %%
def data_parallel(model, batch, devices=2):
    moved, replicas, outputs = Counter(), [], []
    for device, ids in enumerate(batch["input_ids"].chunk(devices)):
        replicas.append(copy.deepcopy(model) if device else model)
        outputs.append(replicas[-1](input_ids=ids, attention_mask=torch.ones_like(ids)).logits)
        if device:
            moved["inputs"] += ids.nbytes
            moved["weights"] += sum(weight.nbytes for weight in model.parameters())
            moved["outputs"] += outputs[-1].nbytes
            moved["losses"] += outputs[-1].nbytes  # their gradient, on its way back
    torch.nn.functional.cross_entropy(torch.cat(outputs).flatten(0, -2), batch["labels"].flatten()).backward()
    for replica in replicas[1:]:
        for weight, other in zip(model.parameters(), replica.parameters()):
            weight.grad += other.grad
            moved["gradients"] += other.grad.nbytes
    return moved


# %%
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
rows += [["DDP: gradients, one way and the other", *(2 * counts["gradients"] / 1e6 for counts in (moved, language))]]
plots.Table(["crosses between the devices in each step", "MB, classifier", "MB, gpt2"], rows)

# %% [markdown]
# Five kinds instead of one: to the gradients come the weights, *in every step*, and all of it goes through device 0, which also has the sum and the only optimizer. For a classifier both methods move as many bytes; a language model's outputs make the difference. And one process drives all devices, by threads that share Python's lock, and cannot leave its machine.
#
# ### What goes wrong
#
# Rank 1 ends, hangs, or disagrees, each time before one more sum.


# %%
def fault(task, what):
    if what == "torch compares first":
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
        dist.set_debug_level_from_env()
    dist.init_process_group("gloo")
    faulty, numbers = dist.get_rank() == 1, torch.ones(4)
    if what in ("another dtype", "torch compares first") and faulty:
        numbers = numbers.int()
    elif what == "another size" and faulty:
        numbers = torch.ones(6)
    elif what == "one sum fewer" and faulty:
        return
    elif faulty:
        ENDS[what]()
    dist.all_reduce(numbers)
    return numbers.tolist()


ENDS = {"killed": lambda: os.kill(os.getpid(), 9), "an exception": lambda: {}["lost"]}
ENDS |= {"no memory": lambda: torch.empty(10**15), "the disk is full": lambda: Path("/dev/full").write_text("all")}


# %%
def unused(task, **options):
    dist.init_process_group("gloo")
    model = task.build_model()
    model.spare = torch.nn.Linear(8, 8)  # no forward comes here
    model = DDP(model, **options)
    for _ in range(2):
        model(**task.batch(2)).loss.backward()


ENDS |= {"hangs": lambda: time.sleep(600)}
rows = []
for what in (*ENDS, "one sum fewer", "another size", "another dtype", "torch compares first"):
    began = time.perf_counter()
    run = lab.run(partial(fault, what=what), what, processes=2, measure=("none",), timeout=8)
    told = run.message if len(run.message) < 240 else f"{run.message[:120]} ... {run.message[-110:]}"
    seen = told or str([rank["value"] for rank in run.ranks])
    rows.append([what, run.status, round(time.perf_counter() - began, 1), seen])
display(plots.Table(["rank 1", "status", "seconds", "what is seen"], rows))
print("unused:", lab.run(unused, task=rule, processes=2, measure=("none",)).message[:150])
remedy = lab.run(partial(unused, find_unused_parameters=True), task=rule, processes=2, measure=("none",))
print("remedy:", remedy.status)

# %% [markdown]
# - **Ends**: the launcher sees it, names the rank and ends the others. If a whole host is gone, they wait for the timeout: half an hour with gloo, ten minutes with NCCL. Here the lab's own limit ends a **hang** and asks each rank for its line.
# - **Disagrees**: a dtype of the same size is not even noticed: both ranks go on with wrong numbers. Under `TORCH_DISTRIBUTED_DEBUG=DETAIL` torch compares size and dtype before each collective. That costs messages; use it to search.
# - **Unused parameters**: DDP notices in the *second* step that a bucket never became full. `find_unused_parameters=True` looks for such parameters in each step; better is to freeze them. To find them, train one step on one process and list the parameters whose `grad` is `None`.
#
# ## What carries over
#
# Both index pages send you to the single-GPU methods first, since they extend to other setups. Here are five of them, on one CPU process and on two. (By timing, a rank's peak may have one more set of gradients in it; the smaller of the two ranks counts.) The pages also say that efficient training requires an accelerator; where there is one, the next section times it against the CPU.

# %%
TECHNIQUES = {
    "vanilla": {},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "Adafactor": {"optim": "adafactor"},
    "8-bit Adam": {"optim": "adamw_bnb_8bit"},
}
long, rows = Task("bert-tiny", seq_len=128, config=no_dropout | {"vocab_size": 2000}), []
for name, arguments in TECHNIQUES.items():
    given = {"task": long, "per_device_train_batch_size": 8, "use_cpu": True} | arguments
    on = [lab.train(f"{name}, {ranks}", processes=ranks, measure=("memory",), **given) for ranks in (1, 2)]
    peaks = [on[0].peak_bytes, min(rank["peak_bytes"] for rank in on[1].ranks)]
    first_row = rows[0] if rows else [name, *peaks]
    rows.append([name, *peaks, *(mine / vanilla for mine, vanilla in zip(peaks, first_row[1:]))])
carried = sum((one < 1) == (each_of_two < 1) for *_, one, each_of_two in rows[1:]) / len(rows[1:])
titles = ["", "peak, one process", "peak, each of two", "x vanilla, one process", "x vanilla, each of two"]
display(plots.Table(titles, [[name, *map(plots.bytes_text, row[:2]), *row[2:]] for name, *row in rows]))

# %% [markdown]
# ## What held
#
# The claims about NVLink, DP and topology need GPUs. With two of them, the next cell counts and times DP and DDP. The one after it reads what `nvidia-smi topo -m` prints: a matrix which says what joins each GPU to each other. Its two lines are the machines of the 2022 guide, the fast one and the slow one.


# %%
def count_dp(task):
    from torch.nn.parallel import comm

    kinds = {"scatter": ["inputs", "losses"], "broadcast_coalesced": ["weights", ""], "gather": ["outputs", ""]}
    kinds, moved, backward = kinds | {"reduce_add_coalesced": ["", "gradients"]}, Counter(), []

    def counted(name, plain, *args, **options):
        moved[kinds[name][len(backward)]] += sum(leaf.nbytes for leaf in tree_leaves(args) if hasattr(leaf, "nbytes"))
        return plain(*args, **options)

    for name in kinds:
        setattr(comm, name, partial(counted, name, getattr(comm, name)))
    model = torch.nn.DataParallel(task.build_model().cuda(), device_ids=[0, 1])
    optimizer, work = torch.optim.AdamW(model.parameters()), Counter()
    with torch.profiler.profile() as seen:
        loss = model(**task.batch(8)).loss.mean()
        backward.append(True)
        loss.backward()
        optimizer.step()
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "nccl" not in event.name:
            work[event.device_index] += event.self_device_time_total
    return {"moved": {kind: size for kind, size in moved.items() if kind}, "work": [work[0], work[1]]}


# %%
timings, crossing, dp_work = dict.fromkeys(("nvlink-quarter", "ddp-beats-dp", "dp-beats-slow-ddp")), None, None
if gpus2:
    crossing = lab.run(count_dp, task=timed, measure=("none",)).value
    dp_work = crossing["work"][0] / crossing["work"][1] if crossing["work"][1] else None
    given = {"task": timed, "measure": ("time",), "samples_per_step": 8}
    slow = {"environment": {"NCCL_P2P_DISABLE": "1"}}
    ddp2 = lab.run(partial(loop, samples=4, turns=4), "DDP", processes=2, **given)
    ddp2_slow = lab.run(partial(loop, samples=4, turns=4, **slow), "DDP, slow link", processes=2, **given)
    each = partial(loop, samples=8, wrap=partial(torch.nn.DataParallel, device_ids=[0, 1]), turns=4)
    dp = lab.run(each, "DP", **given)
    for name, pair in zip(timings, ((ddp2_slow, ddp2), (dp, ddp2), (dp, ddp2_slow))):
        timings[name] = lab.compare(*pair, turns=4).speed_ratio  # seconds of the first / of the second
accelerated = None
if lab.machine.kind == "cuda":
    longer = task.replace(seq_len=128, config={"num_hidden_layers": 2})
    given = {"task": longer, "per_device_train_batch_size": 8, "measure": ("time",), "steps": 5}
    both = [lab.train(f"use_cpu={use}", use_cpu=use, **given) for use in (True, False)]
    accelerated = lab.ratio([cpu / gpu for cpu, gpu in zip(*(run.timing.all_seconds for run in both))], *both)

# %%
LEGEND = {"X": "itself", "NV#": "a bond of # NVLinks", "PIX": "at most one PCIe bridge", "PXB": "several PCIe bridges"}
LEGEND |= {"PHB": "a PCIe host bridge, the CPU", "NODE": "several host bridges", "SYS": "the way between NUMA nodes"}


def explained(matrix):
    """What each GPU is joined to each GPU by, from what `nvidia-smi topo -m` prints."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    header = next(line for line in lines if "GPU0" in line)
    gpus = [word for word in header if re.fullmatch(r"GPU\d+", word)]
    rows = [line[1 : 1 + len(gpus)] for line in lines if line and line[0] in gpus and line is not header]
    entries = [entry for number, row in enumerate(rows) for entry in row[:number] + row[number + 1 :]]
    return [(entry, LEGEND.get(re.sub(r"\d+", "#", entry))) for entry in entries]  # of two different GPUs


for entry in ("NV2", "PHB"):
    print(explained(f"GPU0 GPU1 CPU Affinity\nGPU0 X {entry} 0-23\nGPU1 {entry} X 0-23"))
share = reason = None
if gpus2:
    try:
        joined = explained(
            subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True).stdout
        )
        share = sum(meaning is not None for _, meaning in joined) / len(joined)
    except (OSError, subprocess.CalledProcessError, StopIteration, ZeroDivisionError):
        reason = "needs an nvidia-smi that prints the topology"

# %% tags=["claim"]
last_step = ddp["traffic"][-1]
other = sum(size for kind, size in last_step if kind != "allreduce")
note = f"{Counter(kind for kind, _ in last_step)}; {other} bytes are not gradients but buffers"
display(claims.check("ddp-in-step", ddp["apart"]))
display(claims.check("ddp-traffic", sum(size for _, size in last_step) / parameter_bytes, note=note))
way = f"two hosts on this machine, gloo, {rate} Mbit/s" if hosts else ""
display(claims.check("link-matters", law, missing=missing, note=way))
display(claims.check("sync-often", often, missing=missing, note=way))
display(claims.check("ddp-many-machines", hosts and hosts["apart"], missing=missing))
for name, ratio in timings.items():
    display(claims.check(name, ratio))
display(claims.check("dp-traffic", crossing and len(crossing["moved"]), note=str(crossing or "")))
display(
    claims.check(
        "dp-first-device", dp_work, missing="needs a profiler that sees kernels" if crossing and not dp_work else None
    )
)
note = f"for the classifier: {sum(moved.values()) / (2 * moved['gradients']):.4f}"
display(claims.check("dp-exchanges-more", sum(language.values()) / (2 * language["gradients"]), note=note))
display(claims.check("single-gpu-carries-over", carried))
display(claims.check("accelerator-required", accelerated))
claims.check("topology-legend", share, missing=reason)

# %% [markdown]
# ## Explore
#
# How many ranks is a link worth? Computed from what was measured above: the time of one process, and the bytes of a step. The band lies between hiding nothing and hiding all that backward can hide.


# %% tags=["widget"]
def scaling(samples, megabits):
    ranks = [1, 2, 4, 8, 16]
    alone = first[samples].step_seconds
    sending = [2 * (n - 1) / n * parameter_bytes * 8 / megabits / 1e6 for n in ranks]
    hidden = [max(0, time - 0.6 * alone) for time in sending]  # backward is some 60 % of a step
    series = {"ideal": ranks}
    for name, times in {"backward hides what it can": hidden, "nothing is hidden": sending}.items():
        series[name] = [n * alone / (alone + time) for n, time in zip(ranks, times)]
    title = f"{samples} samples a rank, {megabits} Mbit/s"
    return plots.lines(ranks, series, "ranks", "throughput, times that of one", title=title)


_ = widgets.explore(scaling, megabits=[1000, 100, 200, 10000, 100000], samples=[8, 1])

# %% [markdown]
# ## Exercise, a challenge: half the bytes, the same loss
#
# Give arguments for `economical`, for example `{"accumulate": 2, "learning_rate": 1e-3}`, that send at most half the bytes of gradients for the same 40 micro-batches. The mean loss over three seeds must not be above the band: the worst of the same three seeds when everything is sent.

# %%
exercises.hint(
    "There are two ways to send less: less often, or each number in fewer bytes. Which one leaves the number of updates?",
    "Half as many updates learn less at the same rate. The other way changes no update by more than a rounding.",
    "`economical` has an argument for 16-bit gradients: look at its definition above.",
)

# %% tags=["exercise"]
answer = None


# %% tags=["check"]
def forty(answer):
    each = partial(economical, seeds=(0, 1, 2), micro_batches=40, **answer)
    return lab.run(each, f"economical {answer}", task=rule, processes=2, measure=("none",))


band = None


def check_bytes(answer):
    global band
    if answer is None:
        return exercises.not_attempted("replace None by a dict of arguments")
    band = band or forty({}).value
    run = forty(answer)
    if not run.ok:
        return exercises.wrong(run.message)
    part, loss = run.value["MB"] / band["MB"], sum(run.value["losses"]) / 3
    found = f"{part:.0%} of the bytes, loss {loss:.3f} where up to {max(band['losses']):.3f} is in the band"
    return (exercises.right if part <= 0.5 and loss <= max(band["losses"]) else exercises.wrong)(found)


exercises.check(lab, "half-bytes", check_bytes, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check_bytes, solution={"bf16": True}, mistake={"accumulate": 2})

# %% [markdown]
# ## Recap
#
# - Two processes trained one model and stayed equal to the last bit: by hand, with buckets of our own, and with DDP.
# - They sent 4 bytes a parameter in each step, and what backward could not hide of that was waited for. The slower the link and the shorter the step, the less the second device was worth; `no_sync` and bf16 sent less. The single-GPU methods were tried on both.
# - A dying rank was named by the launcher, a hanging one by its line, and unused parameters by DDP in the second step. Ranks of two dtypes went on with wrong numbers until torch was asked to compare.

# %% tags=["finish"]
claims.finish(lab)
