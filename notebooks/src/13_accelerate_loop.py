# %% [markdown]
# # Can a loop of your own do all that the Trainer does?
#
# You need something in the training loop that the Trainer has no argument for: two losses, another sampler, a step that you skip. The lessons so far passed arguments to a loop that somebody else wrote. Here you write the loop. What do you lose?
#
# **You will see**
# - the memory and the losses of a loop of your own on Accelerate, beside those of the Trainer
# - a training that is killed and resumed, and the one line whose place decides whether it is still the same training
# - the same loop on two processes, and the three things that change there
#
# **Minutes:** about 10 of reading; the cells compute for less than 1 on two cores.
#
# **Before you start:** lesson 05 (accumulation). Lessons 06, 07 and 09 explain the other parts of the recipe.
#
# **On a CPU:** everything runs. Mixed precision is used only if the CPU has instructions for it, and the two processes share the machine's cores.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import itertools
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch

from perf_helpers import Claims, Lab, Task, exercises, monitor, plots, widgets

lab = Lab(profile, strict=strict, out=out, lesson="13_accelerate_loop")
claims = Claims(lab)
precision = "bf16" if lab.machine.native_bf16 else "fp16" if lab.machine.kind == "cuda" else "no"
task = lab.task if lab.machine.kind == "cuda" else lab.task.replace(seq_len=64, config={"vocab_size": 2000})
print(f"mixed precision on this machine: {precision}")

# %% [markdown]
# ## Idea
#
# Accelerate is often taken for another Trainer. It is the layer *below*: the Trainer itself is built on it. Accelerate has no loop. You pass four things to its method `prepare`, the model, the optimizer, the data loader and the schedule, and get back the same four in wrappers. The wrappers know how many processes there are, which precision you want, and whether this micro-batch is the last one before an optimizer update. The loop stays yours, every line of it.
#
# ## Predict
#
# We will run one recipe twice: accumulation of 4, checkpointing, mixed precision if this machine has it, 8-bit Adam, clipping, a schedule. (*Clipping* looks at the *norm* of the gradients: the length of all gradients taken as one vector. If the norm is above 1, all gradients are scaled down until it is 1.) The first time the Trainer runs it, the second time a loop of our own.

# %%
question = "What will the loop's peak be, in percent of the Trainer's?"
widgets.predict(lab, "peak", question, "%", 25, 150)

# %% [markdown]
# ## By hand
#
# What does such a wrapper do? For accumulation it is a counter. Here is one in plain PyTorch:


# %%
class Accumulate:
    """Divide the loss, and update after every n-th micro-batch; the others only add to the gradients."""

    def __init__(self, model, optimizer, n):
        self.model, self.optimizer, self.n, self.seen = model, optimizer, n, 0

    def micro_batch(self, loss):
        (loss / self.n).backward()
        self.seen += 1
        if self.seen % self.n == 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def toy():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), 4 * torch.randn(8, 8)


# %% [markdown]
# Now Accelerate's version of this counter, in a short loop that you will see below the question. Again there is one update for each group of four micro-batches. The optimizer has gone through `prepare`, so it is wrapped. The loop itself counts nothing: it runs the same lines for every micro-batch.

# %%
exercises.question(
    lab,
    "own-work",
    "Which of these would go wrong if the loop did it after every micro-batch, not only after the last of a group?",
    {
        "clipping": "It acts on the gradients at once. Clipped after each micro-batch, their sum is another gradient, so "
        "the loop asks `sync_gradients` first.",
        "`optimizer.step()`": "The wrapped optimizer does nothing unless this micro-batch ends a group. That is what "
        "`prepare` changed about it.",
        "`optimizer.zero_grad()`": "Also wrapped: the gradients of a group stay until its last micro-batch. With an "
        "optimizer that did not go through `prepare`, it would throw them away.",
    },
    right="clipping",
)

# %% [markdown]
# In the loop below, `step()` and `zero_grad()` are called for *every* micro-batch: the wrapped optimizer knows whether this micro-batch ends a group of four, and decides whether they do anything. Clipping is the exception: it acts on the gradients at once, so the loop itself must wait for the last micro-batch of a group, in which `accelerator.sync_gradients` is True. `accelerator.backward` divides the loss by 4, as our counter does.
#
# The second cell compares the loop with our counter. Then it makes an `Accelerator` as the 2023 guide did, and prints the error. The third cell prints nothing: it checks that clipping after every micro-batch would give other weights.

# %%
from accelerate import Accelerator


def by_library(clip_always=False):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, rows = toy()
    model, optimizer = accelerator.prepare(model, optimizer)
    for row in rows:
        with accelerator.accumulate(model):
            accelerator.backward(model(row).square().mean())
            if accelerator.sync_gradients or clip_always:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model.weight, optimizer


# %%
model, optimizer, rows = toy()
by_hand = Accumulate(model, optimizer, n=4)
for row in rows:
    by_hand.micro_batch(model(row).square().mean())
library_weight, optimizer = by_library()
torch.testing.assert_close(model.weight, library_weight, rtol=0, atol=0)
print(f"equal to the last bit; the optimizer is now an {type(optimizer).__name__}")
try:
    Accelerator(fp16=True)
except TypeError as error:
    print(error)

# %%
if torch.equal(by_library(clip_always=True)[0], model.weight):  # step() and zero_grad() are called every time anyway
    raise RuntimeError("clipping every micro-batch changed nothing")

# %% [markdown]
# The printed error is how the loop of the 2023 guide ends today. `Accelerator(fp16=True)` was removed in Accelerate 0.16; `mixed_precision=`, with `"no"`, `"fp16"` or `"bf16"`, replaced it ([#917](https://github.com/huggingface/accelerate/pull/917)). With `"fp16"`, `accelerator.backward` also scales the loss, and the wrapped optimizer skips the steps that overflow.
#
# ## The whole recipe
#
# First come the objects that are built once. Two lines are there for the sake of equal losses. With the line `dataloader_config=`, the data loader shuffles with a **seed of its own**, because otherwise the order of the data would depend on how many random numbers were drawn before. And `set_seed` comes *after* the model is built. The Trainer, too, sets the seed when it gets a model that is already built. Building draws random numbers for the initial weights. The seed that is set afterwards makes dropout draw the same numbers in both loops. (The line `cpu=` chooses the CPU if there are fewer GPUs than processes.)


# %%
def build(task, accumulate, steps, mixed_precision="no"):
    import os

    import bitsandbytes
    import torch
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed
    from transformers import get_linear_schedule_with_warmup

    accelerator = Accelerator(
        gradient_accumulation_steps=accumulate,
        mixed_precision=mixed_precision,
        cpu=torch.cuda.device_count() < int(os.environ.get("WORLD_SIZE", 1)),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    )
    model = task.build_model()
    model.gradient_checkpointing_enable()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=5e-5, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, steps * accelerator.num_processes)
    loader = torch.utils.data.DataLoader(task.dataset(), batch_size=1, shuffle=True)
    set_seed(0)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


# %% [markdown]
# Then the loop. Leave `folder` and `resume` aside for now: they are for the second half.


# %%
def train(task, accumulate=4, steps=3, folder=None, die_after=None, resume=None, **options):
    accelerator, model, optimizer, loader, schedule = build(task, accumulate, steps, **options)
    done, losses, total = 0, [], 0.0
    if resume:
        done = json.loads(Path(folder, "done.json").read_text())
    if resume == "before the first batch":
        accelerator.load_state(folder)
    for number, batch in enumerate(accelerator.skip_first_batches(loader, done * accumulate)):
        if number == 0 and resume == "after the first batch":
            accelerator.load_state(folder)
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += loss.detach() / accumulate
        if accelerator.sync_gradients:
            losses, total, done = [*losses, total.item()], 0.0, done + 1
            keep(accelerator, folder, done, losses, die_after)
            if done == steps:
                return losses


# %%
def keep(accelerator, folder, done, losses, die_after):
    """Write the losses after each step and a checkpoint after every second one; kill the process after `die_after`."""
    import os
    import signal

    if folder:
        Path(folder, "losses.json").write_text(json.dumps(losses))
        if done % 2 == 0:
            accelerator.save_state(folder)
            Path(folder, "done.json").write_text(json.dumps(done))
    if done == die_after:
        os.kill(os.getpid(), signal.SIGKILL)


# %% [markdown]
# ## Baseline
#
# The baseline is the Trainer with the same recipe. One more thing must be equal: the loss. Lesson 05 found that the Trainer may fail to divide an accumulated loss by the number of micro-batches for this class of model (with transformers 5.23 and 5.24 it does fail). Our loop does divide, in `accelerator.backward`. Without a remedy we would compare two different recipes, so the Trainer gets the remedy of lesson 05, in the line marked below.
#
# While it trains, a live monitor shows the state of the machine: on a GPU its memory, load, power and clocks, otherwise the host's memory and load, and the memory of this process and of its experiments (the training is one). The monitor stops at the end of its `with` block. Look at such a monitor in the first minutes of a training of hours.


# %%
def eight_bit_adam(model, args):
    import bitsandbytes

    model.accepts_loss_kwargs = False  # the remedy: the Trainer divides by the accumulation steps itself
    return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=args.learning_rate, weight_decay=0.0)


recipe = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "gradient_checkpointing": True}
recipe |= {"max_steps": 3, "bf16": precision == "bf16", "fp16": precision == "fp16"}
with monitor.live() as watch:
    trainer = lab.train("Trainer", task=task, optimizer=eight_bit_adam, **recipe)
print(trainer)
watch.summary()

# %% [markdown]
# ## Change one thing
#
# The recipe stays the same; our loop replaces the Trainer's.

# %%
loop = lab.run(partial(train, mixed_precision=precision), "own loop", task=task, samples_per_step=4)  # new
difference = max(abs(a - b) for a, b in zip(loop.value, trainer.losses))
for phase in trainer.memory.phases:
    live = [plots.bytes_text(run.memory.phases[phase]) for run in (trainer, loop)]
    print(f"live after {phase}: {live[0]} with the Trainer, {live[1]} in the loop")
print(f"largest difference between the losses of a step: {difference:.2g}")
close = 1e-3 if lab.machine.kind == "cpu" else 1e-2  # a GPU adds in varying order, and 16 bits make more of it
torch.testing.assert_close(loop.value, list(trainer.losses), rtol=close, atol=0)
widgets.revealed(lab, "peak", 100 * loop.peak_bytes / trainer.peak_bytes)

# %%
_ = plots.memory([trainer, loop], title="One recipe, two loops")
apart = {kind: size - trainer.memory.breakdown[kind] for kind, size in loop.memory.breakdown.items()}
kind = max(apart, key=lambda kind: abs(apart[kind]))
print(f"the category that differs most: {kind}, by {apart[kind] / loop.peak_bytes:+.2%} of the peak")

# %% [markdown]
# Both run the same operations on the same tensors, so any difference between the bars is what a loop costs or saves. Compare the losses printed above, too. If a loop of yours gives another loss than the Trainer, one of four things differs: the order of the data, the random numbers of dropout, the divisor of the loss, or the schedule.
#
# ## Killed and resumed
#
# A training of hours will be killed one day: by a full machine, by a queue's time limit, by you. We kill one for real, on a small task with dropout. The process gets SIGKILL after step 5, which leaves it no time to save anything; its last checkpoint is of step 4.

# %%
small = Task("bert-tiny", seq_len=32, data="learnable")
folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
eight_steps = partial(train, steps=8)

whole = lab.run(eight_steps, "never killed", task=small, measure="value")
killed = lab.run(partial(eight_steps, folder=folder.name, die_after=5), "killed", task=small, measure="value")
if killed.status != "killed":
    raise RuntimeError(killed.failure or "SIGKILL did not end it")
before = json.loads(Path(folder.name, "losses.json").read_text())
killed

# %% [markdown]
# This is what a killed run looks like from outside. Its losses are in a file, as they would be in a log. Before it is resumed, a question.

# %%
exercises.question(
    lab,
    "weights-only",
    "Suppose that the checkpoint held the weights alone, as `save_pretrained` writes them. What would the resumed "
    "training lack?",
    {
        "nothing: the weights are what has been learnt": "For using the model that is enough. Training goes on from more: "
        "Adam's averages would start at 0, and the learning rate at the beginning of its schedule.",
        "only the optimizer's states": "With them the steps would have their sizes again. But the schedule would start "
        "again, the first samples would come a second time, and dropout would draw other numbers.",
        "states, schedule, place in the data, random numbers": "`save_state` writes all but the place in the data, which "
        "is why the loop keeps `done.json` and skips batches.",
    },
    right="states, schedule, place in the data, random numbers",
)

# %% [markdown]
# Now the training is resumed in two ways, which differ in the place of one line: `load_state` is called before the loop fetches its first batch, or just after.

# %%
print("in the checkpoint:", *sorted(path.name for path in Path(folder.name).iterdir()))
resumed = {}
for place in ("before the first batch", "after the first batch"):
    copied = shutil.copytree(folder.name, f"{folder.name}/{place}")
    run = lab.run(partial(eight_steps, folder=copied, resume=place), place, task=small, measure="value")
    resumed[place] = run.value
    off = max(abs(a - b) for a, b in zip(run.value, whole.value[4:]))
    print(f"load_state {place}: the losses are off by up to {off:.2g}")
equal = [losses == whole.value[4:] for losses in resumed.values()]
if lab.machine.kind == "cpu" and equal != [False, True]:
    raise RuntimeError("only the second one should be the training that was killed")

nothing = float("nan")
series = {"never killed": whole.value, "killed after step 5": before + [nothing] * 3}
series |= {f"resumed, load_state {place}": [nothing] * 4 + losses for place, losses in resumed.items()}
_ = plots.lines(range(1, 9), series, "optimizer step", "loss", title="Killed, and resumed from step 4")

# %% [markdown]
# The first line printed lists the files that `save_state` and the loop wrote.
#
# With `load_state` after the first batch, the training goes on as if it had never been killed, and step 5 is simply done again; on a CPU the cell checks that each loss is the same. With `load_state` before the first batch the losses are different, by as much as is printed above, although weights, optimizer, schedule and data are the same. Dropout makes the difference: when a data loader starts, it draws a random number for its workers, even if it has none. So the random state must be restored *after* that. Without dropout both places would be right, and nobody would notice.
#
# Keep two habits for longer trainings. Save into a new folder, and rename it when it is complete, because a kill may also come in the middle of saving. And write down the step yourself, because `save_state` does not know how far the loop is in the data.
#
# ## Two processes
#
# The loop was written for one process. None of its lines changes for two: the lab starts the processes, and `prepare` distributes the batches among them. Each process is called a *rank*, and the ranks are numbered from 0. The two should cooperate, so two processes that accumulate 4 micro-batches each should train like one process that accumulates 8. Dropout is off here, because two processes draw other random numbers than one.

# %%
calm = small.replace(config={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
one = lab.run(partial(train, accumulate=8), "one process, 8 each", task=calm, measure="value")
two = lab.run(train, "two processes, 4 each", task=calm, processes=2, measure="value")  # new
mean = [sum(losses) / 2 for losses in zip(*(rank["value"] for rank in two.ranks))]
torch.testing.assert_close(mean, one.value, rtol=1e-3, atol=0)
rows = list(zip(range(1, 4), one.value, *(rank["value"] for rank in two.ranks), mean))
plots.Table(["step", "one process", "rank 0", "rank 1", "mean of the ranks"], rows)

# %%
exercises.question(
    lab,
    "drift",
    "In each step the two ranks have different losses. Are their weights different, too?",
    {
        "yes: each has learnt from samples of its own": "Their gradients differ, but no rank steps with its own. They are "
        "averaged over the ranks in backward.",
        "no: both step with the same mean gradient": "Equal weights and an equal step leave equal weights. The losses "
        "differ because each is that of the rank's own samples.",
        "yes, until the next `save_state` makes them equal": "Nothing is exchanged when a state is saved, and nothing has "
        "to be: what every rank holds is equal already, but for its random numbers.",
    },
    right="no: both step with the same mean gradient",
)

# %% [markdown]
# Each rank sees only the loss of its own samples. The mean over the ranks is the loss of the whole batch, and equals the loss of one process. The wrapped model combines the gradients of the ranks, so all of them take the same step. Three things change with two processes:
# - **The effective batch** doubles: 1 x 4 x 2. At a fixed number of epochs there are half as many steps.
# - **The schedule**, if it is wrapped, advances once *for each process* in every optimizer step: here by two. So plan its length as optimizer steps times processes, as `build` does with `steps * accelerator.num_processes`. Example: two processes that take 4 steps advance the schedule by 8. If its length were 4, it would end after step 2, and the rest of the training would run at a learning rate of zero.
# - **Printing and saving**: every process runs every line. Use `accelerator.print` and `if accelerator.is_main_process` to print once; `save_state` must be called by all.
#
# ## What held

# %% tags=["claim"]
claims.check(
    "accelerate-same",
    loop.peak_bytes / trainer.peak_bytes,
    note=f"losses of {len(loop.value)} steps: largest difference {difference:.2g}; mixed precision: {precision}",
)

# %% [markdown]
# ## Explore
#
# The table shows what one pass over 512 samples consists of. Find two settings with the same effective batch of 32, and see which rows differ.


# %% tags=["widget"]
def one_epoch(micro_batch, accumulate, processes):
    micro_batches = 512 // (micro_batch * processes)
    steps = -(-micro_batches // accumulate)
    rows = [["effective batch", micro_batch * accumulate * processes]]
    rows += [["micro-batches, each process", micro_batches], ["optimizer steps", steps]]
    rows += [["advances of the wrapped schedule", steps * processes]]
    rows += [["sums of gradients over the processes", steps if processes > 1 else 0]]
    return plots.Table(["one epoch of 512 samples", "count"], rows)


_ = widgets.explore(one_epoch, micro_batch=[4, 1, 2, 8], accumulate=[4, 1, 2, 8], processes=[2, 1, 4, 8])

# %% [markdown]
# ## Exercise 1: how many batches to skip?
#
# A training on two processes was killed. Its micro-batch was 2, it accumulated 4 micro-batches per step, and its checkpoint is of optimizer step 6. Which number must `skip_first_batches` get, on each of the processes? The check distributes 512 samples with Accelerate's own sampler, and finds the samples that your training would see twice, or never.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "`skip_first_batches` skips batches of the data loader: micro-batches, not optimizer steps.",
    "Each process has a data loader of its own, and skips in that one only.",
    "6 optimizer steps took 6 x 4 micro-batches from each process's loader.",
)

# %% tags=["exercise"]
answer = None  # a number of batches


# %% tags=["check"] jupyter={"source_hidden": true}
def check_skip(answer):
    from accelerate.data_loader import BatchSamplerShard

    if answer is None:
        return exercises.not_attempted()
    seen, rest = [], []
    for rank in range(2):
        batches = torch.utils.data.BatchSampler(range(512), 2, drop_last=False)
        shard = list(BatchSamplerShard(batches, num_processes=2, process_index=rank))
        seen += itertools.chain(*shard[: 6 * 4])
        rest += itertools.chain(*shard[answer:])
    twice, never = len({*seen} & {*rest}), 512 - len({*seen} | {*rest})
    if twice or never:
        return exercises.wrong(f"{twice} samples are seen twice, and {never} never")
    return exercises.right("each sample is seen once: 6 steps of 4 micro-batches, and each process skips its own")


exercises.check(lab, "skip", check_skip, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check_skip, solution=24, mistake=48)

# %% [markdown]
# ## Exercise 2, the challenge: log the gradient's norm for less than 2 % of a step
#
# Your answer is a function with the arguments `(model, norm, log)`. It is called after clipping in every step: `norm` is the value that `clip_grad_norm_` returned, and `log` is a list. Append to it the norm that the whole gradient had before it was clipped. After training, `[float(n) for n in log]` must be the norms, and the call may take 2 % of a step at most.
#
# No clock can measure a difference of 2 % between two runs on a busy CPU. A clock can measure which share of *one* step the call takes, so the check does that. The call also must not read a number back from the device. `item()`, `float()` and `print` do that, and on a GPU they make the program wait until the device has finished all queued work.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "The norm from before clipping has been computed already. By which function?",
    "`clip_grad_norm_` returns it, as a tensor. It must not become a number in each step, only at the end.",
    "Append the tensor itself, without the graph that computed it: `norm.detach()`.",
)


# %%
def cost_of(log_norm):
    def steps(task):
        import time

        model, log, exact, shares = task.build_model(), [], [], []
        optimizer, batch = torch.optim.AdamW(model.parameters()), task.batch(1)
        for _ in range(8):
            optimizer.zero_grad()
            begin = time.perf_counter()
            model(**batch).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = time.perf_counter()
            log_norm(model, norm, log)
            spent = time.perf_counter() - before
            optimizer.step()
            shares.append(spent / (time.perf_counter() - begin))
            exact.append(norm.item())
        with torch.profiler.profile() as seen:
            log_norm(model, norm, [])
        read = any(event.name == "aten::_local_scalar_dense" for event in seen.events())
        off = max(abs(a - b) for a, b in zip(map(float, log), exact, strict=True))
        return {"share": sorted(shares)[4], "read": read, "off": off}

    return lab.run(steps, task=Task("bert-small", seq_len=16), measure=("none",))


# %% tags=["exercise"]
answer = None  # def answer(model, norm, log): ...


# %% tags=["check"]
def check_log(answer):
    if answer is None:
        return exercises.not_attempted("replace None by a function of (model, norm, log)")
    run = cost_of(answer)
    if not run.ok:
        return exercises.run_failed(run)
    if run.value["off"] > 1e-3:
        return exercises.wrong("the log does not hold the norms from before clipping")
    cost = f"{run.value['share']:.2%} of a step"
    if run.value["read"] or run.value["share"] > 0.02:
        return exercises.wrong(f"{cost}{', and a number is read back in every step' * run.value['read']}")
    return exercises.right(f"{cost}, and nothing is read back before the end")


exercises.check(lab, "log-norm", check_log, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def again(model, norm, log):
    log.append(sum(p.grad.square().sum() for p in model.parameters()).sqrt().item())


exercises.prove(check_log, solution=lambda model, norm, log: log.append(norm.detach()), mistake=again)

# %% [markdown]
# ## Recap
#
# - **A loop of your own** on Accelerate had the memory of the Trainer (a ratio of 1.00 in all recorded runs) and its losses, once data order, dropout, divisor and schedule were the same. Accelerate is the Trainer's own foundation, without the loop.
# - **The killed training**, resumed from step 4, went on as if it had never been killed, because the random state was restored after the first batch was fetched. Restored before it, the training was a different one.
# - **Two processes** ran the same loop. The effective batch doubled from 4 to 8, and the schedule and the printing needed care.

# %% tags=["finish"]
folder.cleanup()
claims.finish()
