# %% [markdown]
# # How do you train with a batch that does not fit?
#
# You want to train with a batch of 32, but the device has memory for a batch of 4. Gradient accumulation processes the 32 samples a few at a time, and updates the weights once. Is it the same training? And what does it cost?
#
# **You will see**
# - how micro-batches reproduce the gradient of the whole batch, and four cases in which the two gradients differ
# - which bytes accumulation saves, which bytes it adds, and when it costs speed
# - whether the Trainer's accumulated gradient is right on your versions, and two remedies if it is not
#
# **Time:** 45 minutes. The cells run for 53 s on two CPU cores.
#
# **Before you start:** lessons 01 (memory) and 03 (a speed ratio with its interval).
#
# **What a CPU cannot show:** how much speed you lose with small micro-batches on a large device, with the guides' sequences of 512 tokens. A CPU tests all claims, but with shorter sequences.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import copy

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from torch.nn.functional import cosine_similarity, cross_entropy

from perf_helpers import Claims, Lab, Task, exercises, interleaving, plots, widgets
from trainmem.estimate import estimate

lab = Lab(profile, strict=strict, out=out, lesson="05_gradient_accumulation")
claims = Claims(lab)
torch.set_num_threads(1)  # for this notebook's own process, where all tensors are small

# %% [markdown]
# ## Idea
#
# The loss of a batch is a mean over its samples. A mean can be computed in parts: the gradient of the whole batch is the sum of the gradients of its parts, each multiplied by its share of the samples. PyTorch adds up gradients by default, because `backward()` *adds* to `.grad`, and only `zero_grad()` clears it.
#
# So divide the batch into **micro-batches**, run a *pass* (forward and backward) for each of them, one after the other, and let the optimizer update once at the end. Only the activations of one micro-batch exist at a time; this saves memory. We write *4 x 2* for micro-batches of 4 samples, accumulated 2 times: an **effective batch** of 8.
#
# ## Predict
#
# Below, a batch of 4 is trained as 4 x 1, then as 1 x 4. The activations fall to a quarter; weights and optimizer states stay the same.

# %%
widgets.predict(
    lab,
    "peak of 1 x 4",
    "What is the peak memory of 1 x 4, in percent of the peak of 4 x 1?",
    "%",
    0,
    120,
)

# %% [markdown]
# ## By hand
#
# We take a small network and eight samples. `gradient` runs all micro-batches and returns the accumulated gradient as one long vector. It multiplies the mean loss of each micro-batch by the factor `weight`. `against` compares this gradient with that of the whole batch, by two numbers: the ratio of their lengths (*norm ratio*), and the cosine of the angle between them. If the gradients are equal, both numbers are 1.


# %%
def network(norm):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), norm(32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def gradient(model, micro_batches, weight, loss_of=cross_entropy):
    model.zero_grad()
    for x, y in micro_batches:
        loss = loss_of(model(x), y) * weight
        loss.backward()  # adds to .grad
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def against(accumulated, reference):
    norm_ratio = accumulated.norm().item() / reference.norm().item()
    return [norm_ratio, cosine_similarity(accumulated, reference, dim=0).item()]


model = network(torch.nn.LayerNorm)
x, y = torch.randn(8, 16), torch.randint(4, (8,))
pairs = list(zip(x.split(2), y.split(2)))  # 4 micro-batches of 2
whole = gradient(model, [(x, y)], weight=1)
parts = gradient(model, pairs, weight=1 / 4)
torch.testing.assert_close(parts, whole)
"norm ratio {:.6f}, cosine {:.6f}".format(*against(parts, whole))

# %% [markdown]
# Both numbers are 1: the optimizer cannot see that the batch was divided.
#
# ### Break it: four experiments
#
# In each of the next four cells the accumulated gradient is no longer that of the whole batch. Compare the norm ratio and the cosine. The first experiment forgets to multiply by the share of a quarter.

# %%
rows = [["scaled by 1/4", *against(parts, whole)]]


def compare_gradients(name, accumulated, of_batch):
    rows.append([name, *against(accumulated, of_batch)])
    print("{}: norm ratio {:.3f}, cosine {:.3f}".format(*rows[-1]))


compare_gradients("scaling forgotten", gradient(model, pairs, weight=1), whole)

# %% [markdown]
# The second experiment replaces LayerNorm, which normalizes each sample by itself, by BatchNorm, which normalizes by the *other samples of the same pass*.

# %%
batch_norm = network(torch.nn.BatchNorm1d)
batch_norm_whole = gradient(batch_norm, [(x, y)], weight=1)
compare_gradients("BatchNorm", gradient(batch_norm, pairs, weight=1 / 4), batch_norm_whole)

# %% [markdown]
# The third experiment takes a contrastive loss: each sample has to recognize itself among all samples of its pass.


# %%
def contrast(outputs, _):
    similarities = outputs @ outputs.T  # of each sample with each sample of the pass
    return cross_entropy(similarities, torch.arange(len(outputs)))


contrastive = gradient(model, pairs, 1 / 4, contrast), gradient(model, [(x, y)], 1, contrast)  # accumulated, whole
compare_gradients("contrastive loss", *contrastive)

# %% [markdown]
# The fourth experiment takes a loss per token, and two sequences of unequal lengths: 12 tokens and 2 tokens.

# %%
tokens, targets = torch.randn(14, 16), torch.randint(4, (14,))
sequences = list(zip(tokens.split([12, 2]), targets.split([12, 2])))
by_token = gradient(model, [(tokens, targets)], weight=1)
compare_gradients("unequal lengths", gradient(model, sequences, weight=1 / 2), by_token)
plots.Table(["micro-batches", "norm ratio", "cosine"], rows)

# %% [markdown]
# - **Scaling forgotten**: the direction is right, but the gradient is four times too long.
# - **BatchNorm**: this is the gradient of another function, because each sample is now normalized with other samples. No value of `weight` repairs that.
# - **Contrastive loss**: the length and the direction are wrong. A question below asks why.
# - **Unequal lengths**: the mean of the two means gives the 2 tokens as much influence as the 12. A separate `weight` for each micro-batch does repair that; finding it is your first exercise.
#
# How bad is a gradient that is four times too long? It depends on the optimizer. The next cell moves a model by one step of SGD, and by one step of AdamW.


# %%
def moved(make_optimizer, factor):
    twin = copy.deepcopy(model)
    start = torch.nn.utils.parameters_to_vector(twin.parameters()).detach()
    for parameter, source in zip(twin.parameters(), model.parameters()):
        parameter.grad = factor * source.grad
    make_optimizer(twin.parameters()).step()
    return (torch.nn.utils.parameters_to_vector(twin.parameters()) - start).norm().item()


optimizers = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0),
}
for name, make in optimizers.items():
    print(f"{name}: a gradient 4 times as long moves the weights {moved(make, 4) / moved(make, 1):.2f} times as far")

# %% [markdown]
# Adam divides the gradient by a running average of the gradient's own size, so a constant factor cancels. With Adam such an error can therefore remain unnoticed. SGD multiplies the step by this factor, as if the learning rate were four times as high.
#
# Two effects remain with every optimizer, Adam included. A log that adds up the losses of the micro-batches, as the Trainer's does, shows a loss four times too high. And the Trainer's gradient clipping shortens too many gradients. By default it shortens each gradient whose norm is above 1. If all gradients are four times too long, it also shortens gradients whose correct norm is between a quarter and 1.

# %% jupyter={"source_hidden": true}
assert cosine_similarity(*contrastive, dim=0) < 0.99  # as the row above shows

# %%
exercises.question(
    lab,
    "contrastive",
    "A contrastive loss compares each image with all other images of its pass. You train it as 8 x 4, each loss divided by "
    "4, instead of 32 x 1. What do you get?",
    {
        "The gradient of the batch of 32, since each part has its share.": "The shares are right, but the parts are "
        "not parts of the same sum: the loss of an image depends on who else is in its pass.",
        "The gradient of another, easier problem: each image meets 7 others, not 31.": "As with BatchNorm, the loss "
        "is not a sum over samples. No value of `weight` repairs that.",
        "The right direction, at four times the length.": "A forgotten division does that. Here the loss is divided, "
        "but the comparisons between samples of different passes are missing.",
    },
    right="The gradient of another, easier problem: each image meets 7 others, not 31.",
)

# %% [markdown]
# ## Baseline
#
# We train the task of this machine's profile as 4 x 1: one micro-batch of 4 samples per update.
#
# > **On a GPU** the sequences have 512 tokens, as in the guides.

# %%
long = lab.task.replace(seq_len=512) if lab.machine.kind == "cuda" else lab.task
whole_batch = lab.train("4 x 1", task=long, per_device_train_batch_size=4, measure=("memory",))
whole_batch

# %% [markdown]
# ## Change one thing
#
# Now we train on the same four samples per step, one at a time. A third run with a single sample and no accumulation shows what accumulation itself adds.

# %%
accumulated = lab.train(
    "1 x 4",
    task=long,
    per_device_train_batch_size=1,  # new
    gradient_accumulation_steps=4,  # new
    measure=("memory",),
)
single = lab.train("1 x 1", task=long, per_device_train_batch_size=1, measure=("memory",))


def in_percent():
    cut = estimate(long, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    return 100 * cut.peak_bytes / estimate(long, per_device_train_batch_size=4).peak_bytes


measured = 100 * accumulated.peak_bytes / whole_batch.peak_bytes
display(widgets.revealed(lab, "peak of 1 x 4", measured, estimate=lab.foresee(in_percent)))
_ = plots.memory([whole_batch, accumulated, single], title="Peak memory: micro-batch x accumulation steps")
figure, axes = plt.subplots(2, 1, figsize=(8.5, 6), layout="constrained")
_ = plots.timeline(whole_batch, ax=axes[0], title="4 x 1: one large pass")
_ = plots.timeline(accumulated, ax=axes[1], title="1 x 4: four small passes, gradients kept")
_ = axes[1].set_ylim(axes[0].get_ylim())

# %% [markdown]
# Compare the bars category by category. From *4 x 1* to *1 x 4* the activations fall to a quarter. The temporaries of a pass shrink, too. Weights and optimizer states stay the same.
#
# Now compare *1 x 4* with *1 x 1*: accumulation **adds** gradients. Without accumulation, the gradients are freed before the next forward pass, so at the peak hardly any gradients are in memory. With accumulation, the sum of the gradients must be kept during all following passes, so one full set of gradients is part of the peak. In the timeline of 1 x 4 the gradients appear in the first pass and stay.

# %% jupyter={"source_hidden": true}
tail = dict(
    task=lab.task.replace(seq_len=32), optim="adamw_torch", measure=("memory",)
)  # short sequences: few activations
tails = [lab.train("2 x 1, update", per_device_train_batch_size=2, **tail)]
tails += [lab.train("1 x 2, update", per_device_train_batch_size=1, gradient_accumulation_steps=2, **tail)]
assert abs(tails[1].peak_bytes / tails[0].peak_bytes - 1) < 0.01  # measured: this is the answer

# %%
exercises.question(
    lab,
    "peak in the update",
    "A training has its peak in the optimizer's update, where the activations are gone. You divide its batch into "
    "micro-batches and accumulate. What happens to the peak?",
    {
        "Nothing: at the update there are no activations to save.": "Weights, gradients, states and the update's own "
        "temporaries are there as before. Find out where the peak is before you choose a remedy.",
        "It falls, but by less than the micro-batch does.": "Accumulation saves activations only, and this peak "
        "has none.",
        "It rises by one set of gradients.": "That set is added during the following passes, where it was not before. "
        "At the update the gradients are there in any case.",
    },
    right="Nothing: at the update there are no activations to save.",
)

# %% [markdown]
# ## What it costs
#
# The arithmetic is the same, only divided differently. A step consists of passes and one update. So nearly all of its time is the sum of their seconds. We call the seconds of one pass (for each micro-batch size) and of one update the *parts* of a step. The next two cells measure the parts, and the peak of four ways to make a batch of 8.
#
# `predicted_ratio` calculates from the parts how much faster one way is than another. The parts are timed without the Trainer, which makes each up to a fifth longer. It may slow down one way more than the other, so the function returns a range, a factor of 1.2 either way.
#
# > **On a CPU** the sequences have 64 tokens, to save your time.


# %%
def parts_of(task, sizes=(1, 2, 4, 8)):
    """Return the seconds of a pass, by micro-batch, and of an update (on a CPU: one thread, the least disturbed)."""

    def measured(task):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
        model = task.build_model().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        batches = [task.batch(size, device) for size in sizes]
        works = [lambda batch=batch: model(**batch).loss.backward() for batch in batches]
        calls = interleaving.in_turns([*works, optimizer.step], 3)  # of each call: (wall-clock, CPU) seconds
        return [min(cpu_seconds for _, cpu_seconds in each) for each in calls]

    return dict(zip((*sizes, "update"), lab.run(measured, "parts", task=task, measure="value").value))


def speed(micro_batch, steps, parts, factor=1):  # samples per second, if an update took `factor` times as long
    return micro_batch * steps / (steps * parts[micro_batch] + factor * parts["update"])


def predicted_ratio(before, after, parts):  # the Trainer adds up to a fifth to each part
    ratio = speed(*after, parts) / speed(*before, parts)
    return ratio / 1.2, ratio * 1.2


# %%
task = lab.task.replace(seq_len=64) if lab.machine.kind == "cpu" else lab.task
parts = parts_of(task)
sweep = {}
for size in (8, 4, 2, 1):
    arguments = dict(per_device_train_batch_size=size, gradient_accumulation_steps=8 // size)
    sweep[size] = lab.train(f"{size} x {8 // size}", task=task, measure=("memory",), **arguments)

figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.2), sharey=True, layout="constrained")
speeds = [speed(size, 8 // size, parts) for size in sweep]
left.barh(range(4), speeds, color=plots.SERIES[5], height=0.62)
for row, value in enumerate(speeds):
    left.text(value, row, f" {value:.3g}", va="center", fontsize=10)
left.set_xlim(0, 1.2 * max(speeds))
left.set_xlabel("samples per second, from the parts")
left.set_title("Speed", loc="left")
_ = plots.memory(list(sweep.values()), ax=right)

# %% [markdown]
# Read the rows from top to bottom: the same effective batch, made of smaller and smaller passes.
#
# - **Memory** (right): the peak falls with the micro-batch. From 8 x 1 to 4 x 2 it falls by less than the activations do, because accumulation adds a set of gradients. Weights and optimizer states stay the same. (If a bar has no activations, its peak is at another moment, after the activations were freed.)
# - **Speed** (left): if it falls from row to row, this fall is the price of accumulation. (Each part was timed only a few times; the comparisons with intervals come below.) A small pass may keep the device less busy than a large one, and then each sample costs more. How much more depends on your machine and your sequences, not on accumulation: the price is higher for short sequences and on large devices.
#
# So far the effective batch stayed the same. The next question changes only the number of accumulation steps.

# %%
exercises.question(
    lab,
    "slower",
    "One sample fits. For an effective batch of 4 you go from 1 x 1 to 1 x 4. What happens to the samples per second?",
    {
        "They fall to about a quarter: a step now has four passes.": "A step takes about four times as long, and has "
        "four times the samples. Count samples, not steps.",
        "They fall somewhat: smaller passes use the device less well.": "The passes are as large as before. You pay "
        "that price if you go from 4 x 1 to 1 x 4, and 4 x 1 does not fit.",
        "They stay or rise: the same passes, and one update for four of them.": "How much they rise depends on what an update "
        "costs compared with a pass. The claims below measure both comparisons.",
    },
    right="They stay or rise: the same passes, and one update for four of them.",
)

# %% [markdown]
# So accumulation can be compared with two other ways: with one large pass, or with *updating after each micro-batch*. In the second comparison, accumulation saves time, because it runs the update once instead of several times.
#
# ## Test the Trainer
#
# Does the Trainer's `gradient_accumulation_steps` give the same gradient as a loop over micro-batches, like the one in `gradient` above? Two models are tested: a BERT classifier with two layers, and a small language model.
#
# The loss of each micro-batch must be scaled, as in the first experiment. There are two ways. Either the model returns the mean loss of the micro-batch, and the Trainer divides it by the number of accumulation steps. Or the model adds up the losses of all labels in the micro-batch, and divides the sum by the number of labels in the whole effective batch. The Trainer counts these labels, and passes the count to the model as `num_items_in_batch`. Two facts decide the outcome:
#
# - *Does the Trainer trust the model to divide by the count?* If so, the Trainer does not divide the loss.
# - *Does the model divide by the count?* The test passes a wrong count to the model, and looks whether the loss changes.
#
# `trainer_gradient` trains one step with the Trainer and returns the gradient that the optimizer receives:
#
# 1. It makes a Trainer with a micro-batch and a number of accumulation steps, with dropout off, clipping off and exactly four samples.
# 2. A hook that torch calls before each optimizer step copies all gradients into one long vector.
# 3. It also returns `model_accepts_loss_kwargs`: whether the Trainer trusts the model.
#
# `trainer_test` takes the Trainer's gradient for 4 x 1 as the reference. It compares two others with the reference: the gradient of a loop over four samples (*by hand* in the table), and the Trainer's gradient for 1 x 4 (*by the Trainer*, with its cosine).


# %%
def trainer_gradient(task, micro_batch, steps, prepare=None):
    import tempfile

    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from transformers import PrinterCallback, Trainer

    from perf_helpers.lab import Arguments

    taken = []

    def keep(*_):
        taken.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]).double().cpu())

    settings = dict(per_device_train_batch_size=micro_batch, gradient_accumulation_steps=steps, max_steps=1)
    model = task.build_model()
    options = prepare(model) if prepare else {}
    with tempfile.TemporaryDirectory() as folder:
        training = Arguments(settings | {"max_grad_norm": 0.0}).build(folder)
        training._n_gpu = min(1, training.n_gpu)  # with several GPUs the Trainer would make a batch for each
        trainer = Trainer(model=model, args=training, train_dataset=task.dataset(), **options)
        trainer.remove_callback(PrinterCallback)
        hook = register_optimizer_step_pre_hook(keep)
        trainer.train()
        hook.remove()
    return taken[0], getattr(trainer, "model_accepts_loss_kwargs", None)


# %%
def trainer_test(prepare=None):
    def test(task):
        batch = task.batch(4)
        model = task.build_model()
        loss = model(**batch).loss.item()
        divides = abs(model(**batch, num_items_in_batch=torch.tensor(10**6)).loss.item() / loss - 1) > 0.01
        for i in range(4):  # the loop by hand: 1 x 4
            (model(**{name: values[i : i + 1] for name, values in batch.items()}).loss / 4).backward()
        by_hand = torch.cat([weight.grad.flatten() for weight in model.parameters()]).double()
        large, _ = trainer_gradient(task, 4, 1)
        torch.testing.assert_close(by_hand, large, rtol=0.01, atol=1e-3 * large.norm().item())
        small, trusted = trainer_gradient(task, 1, 4, prepare)
        return [trusted, divides, against(by_hand, large)[0], *against(small, large)]

    return test


no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
sizes = {"seq_len": 32, "dataset_size": 4}
classifier = lab.task.replace(**sizes, config={"num_hidden_layers": 2} | no_dropout)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 500, "dtype": "float32"}
language = Task("llama-3-8b", **sizes, config=shape | {"num_attention_heads": 2, "num_key_value_heads": 2})

# %%
tests = {
    "classifier": lab.run(trainer_test(), task=classifier, measure="value").value,
    "language model": lab.run(trainer_test(), task=language, measure="value").value,
}
trusted, divides, _, ratio, cosine = tests["classifier"]
if abs(ratio - 1) < 0.01:
    print("Here the Trainer's accumulated gradient equals that of the large batch. Nothing needs a remedy.")
else:
    print(
        f"Here the classifier's accumulated gradient is {ratio:.2f} times the large batch's: an error of the library."
    )
if trusted and not divides:
    print("The Trainer leaves the division to the model, and the model to the Trainer: neither divides.")
ratios = ["norm ratio by hand", "norm ratio by the Trainer", "cosine by the Trainer"]
header = ["model", "the Trainer trusts it", "it divides", *ratios]
plots.Table(header, [[name, *row] for name, row in tests.items()])

# %% [markdown]
# The Trainer trusts every model whose `forward` takes `**kwargs`, unless the model says otherwise. The language model does divide by the count. The BERT classifier of transformers 5 takes `**kwargs`, too, but it ignores the count and returns the mean over its micro-batch:
#
# - With 5.0.0, 5.15.0, 5.23.0 and 5.24.0 the ratio was 4.
# - In 4.57.6 the classifier did not take `**kwargs`. The Trainer divided, and the ratio was 1.
#
# [Issue 47688](https://github.com/huggingface/transformers/issues/47688) lists dozens of heads (the last layers of a model, which compute the loss) with the same fault; BERT's classification head is not yet among them. Test *your* model on your versions in the same way: if the two columns say *True* (trusted) and *False* (does not divide), its gradient is wrong. If only the ratio is wrong and the cosine is 1, AdamW hides the error, as you saw. The logged loss and the clipping are still wrong.
#
# The next cell tests two remedies in the same way:
#
# - Give the Trainer a loss function that divides by the count. The Trainer uses it instead of the model's loss, so it does not matter that the model still does not divide. This is exact, also for unequal lengths.
# - Tell the Trainer not to trust the model, in one line. The Trainer then takes the mean of the micro-batches' means, which is right if all micro-batches have the same number of labels.


# %%
def own_loss(model):
    def loss(outputs, labels, num_items_in_batch=None):
        return cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    return {"compute_loss_func": loss}  # new


def no_trust(model):
    model.accepts_loss_kwargs = False  # new
    return {}


remedies = {"compute_loss_func": own_loss, "accepts_loss_kwargs = False": no_trust}
for name, prepare in remedies.items():
    tests[name] = lab.run(trainer_test(prepare), task=classifier, measure="value").value
plots.Table(header, [[name, *row] for name, row in tests.items()])

# %% [markdown]
# ## What held
# ### Memory, and the Trainer's gradient

# %% tags=["claim"]
display(claims.check("accumulation-memory", accumulated.peak_bytes / whole_batch.peak_bytes))
others = ", ".join(f"{name} {row[3]:.4f}" for name, row in tests.items() if name != "classifier")
claims.check("accumulation-same-gradient", ratio, note=f"cosine {cosine:.6f}; norm ratio of the others: {others}")


# %% [markdown]
# ### Speed
#
# There are five claims, each about two runs. The two runs are interleaved, and the interval says whether this machine can decide the claim.
#
# | claim | compares | statement | tokens per sequence, on a CPU |
# |---|---|---|---|
# | `accumulation-cost` | 1 x 4 with 4 x 1 | 2023 guide: it costs a little speed | 256, with two layers (the guide's sequences are long, too) |
# | `accumulation-only-slows` | 4 x 2 with 8 x 1 | 2023 guide: if the batch fits, it only slows down | 32 |
# | `accumulation-cost-grows` | 1 x 4 with 1 x 1 | 2023 guide: more steps cost more | 64 |
# | `accumulation-fewer-updates` | 1 x 4 with 1 x 1 | 2022 guide: it brings 20 to 30 % more speed | 64 |
# | `accumulation-fill-first` | 4 x 2 with 1 x 8 | 2023 guide: fill the memory first (its batch is 64, ours 8; the micro-batches are the same) | 64 |


# %% tags=["claim"]
def timed(task, micro_batch, steps):
    arguments = dict(per_device_train_batch_size=micro_batch, gradient_accumulation_steps=steps)
    return lab.train(f"{micro_batch} x {steps}", task=task, measure=("time",), steps=1, **arguments)


on_cpu = lab.machine.kind == "cpu"
longer = lab.task.replace(config={"num_hidden_layers": 2}) if on_cpu else lab.task
shorter = lab.task.replace(seq_len=32) if on_cpu else lab.task
of_longer, of_shorter = parts_of(longer, (1, 4)), parts_of(shorter, (4, 8))
cost = lab.compare(timed(longer, 4, 1), timed(longer, 1, 4), turns=12).speed_ratio
display(claims.check("accumulation-cost", cost, predicted=predicted_ratio((4, 1), (1, 4), of_longer)))
slows = lab.compare(timed(shorter, 8, 1), timed(shorter, 4, 2), turns=8).speed_ratio
display(claims.check("accumulation-only-slows", slows, predicted=predicted_ratio((8, 1), (4, 2), of_shorter)))

more_steps = lab.compare(timed(task, 1, 1), timed(task, 1, 4), steps_per_turn=3).speed_ratio
display(claims.check("accumulation-cost-grows", more_steps, predicted=predicted_ratio((1, 1), (1, 4), parts)))
share = parts["update"] / (parts[1] + parts["update"])
note = f"the parts give {speed(1, 4, parts) / speed(1, 1, parts):.3f}: the update is {share:.1%} of a step of 1 x 1"
display(
    claims.check("accumulation-fewer-updates", more_steps, predicted=predicted_ratio((1, 1), (1, 4), parts), note=note)
)
fill_first = lab.compare(sweep[1], sweep[4], turns=4).speed_ratio  # the longest steps, so the fewest turns
claims.check(
    "accumulation-fill-first", fill_first, predicted=predicted_ratio((1, 8), (4, 2), parts), note="4 x 2 against 1 x 8"
)

# %% jupyter={"source_hidden": true}
assert not more_steps.known or more_steps.high > 1  # the answer to the question "slower"

# %% [markdown]
# The two guides contradict each other less than it seems. The 2022 guide keeps the micro-batch: the passes are the same, and there are fewer updates. The 2023 guide's examples keep the effective batch: more accumulation steps mean smaller passes. The guide also says in general that more accumulation steps cost more, but not which batch stays the same. `accumulation-cost-grows` tests this with the same micro-batch. The note of `accumulation-fewer-updates` gives the update's share of a step, from the parts. Accumulation saves only updates, however many micro-batches it adds up: if the update's share is *s*, the speed is at most 1 / (1 - *s*) times as high. The measured speed can be somewhat above this limit, because the parts do not include the Trainer's own work at each update.
#
# ### Learning
#
# Fewer updates are also fewer steps of learning. The 2022 guide warns that the learning rate and its warm-up may have to be adjusted, and that on a very short data set the loss becomes worse. The next cells use 512 sequences in which a marker token shows the label: in random data there is nothing to learn. They train one epoch in four ways:
#
# - 4 x 1: 128 steps
# - 4 x 8: 16 steps
# - 4 x 8 at 8 times the learning rate
# - 32 x 1, the batch that 4 x 8 replaces
#
# Dropout is off, and there are three seeds. The picture shows the training loss: a line is the median of the seeds, a band their range. The claims use the loss on sequences that were not trained on. (Warm-up is not measured: a warm-up of 100 steps would be longer than the whole training with 4 x 8, which has 16 steps.)

# %%
SEQUENCES = lab.sized(512, 64)


def one_epoch(task, base_rate=3e-4):
    device, results = "cuda" if torch.cuda.is_available() else "cpu", []  # results: the four ways, seed after seed
    torch.set_num_threads(1)  # more threads do not help with tensors this small
    for seed in range(3):
        train, unseen = (task.replace(seed=seed + more).batch(SEQUENCES, device) for more in (0, 100))
        for micro_batch, steps, factor in ((4, 1, 1), (4, 8, 1), (4, 8, 8), (32, 1, 1)):
            model, losses = task.replace(seed=seed).build_model().to(device), []
            optimizer = torch.optim.AdamW(model.parameters(), lr=base_rate * factor, fused=True)
            for i in range(0, SEQUENCES, micro_batch):
                loss = model(**{name: values[i : i + micro_batch] for name, values in train.items()}).loss / steps
                loss.backward()
                losses.append(loss.item() * steps)
                if i // micro_batch % steps == steps - 1:
                    optimizer.step()
                    optimizer.zero_grad()
            with torch.no_grad():
                end = model.eval()(**unseen).loss.item()
            curve = torch.tensor(losses).view(SEQUENCES // 32, -1).mean(1).tolist()  # mean of each 32 sequences
            results.append((curve, end))
    ways = [results[i::4] for i in range(4)]
    return [[curve for curve, _ in way] for way in ways], [[end for _, end in way] for way in ways]


# %% tags=["claim"]
learnable = Task("bert-tiny", 32, data="learnable", config=no_dropout | {"num_hidden_layers": 1, "vocab_size": 1000})
curves, ends = lab.run(one_epoch, task=learnable, measure="value").value
ax = plots.losses(dict(zip(["4 x 1", "4 x 8", "4 x 8, 8 times the rate", "32 x 1"], curves)), title="Three seeds")
_ = ax.set_xlabel("sequences seen, in units of 32")
difference = max(abs(a - b) for pair in zip(curves[1], curves[3]) for a, b in zip(*pair))
print(f"4 x 8 against 32 x 1: the losses differ by {difference:.1g} at most")
every, fewer, faster, _ = ends
note = "losses: " + ", ".join(f"{loss:.2f} and {other:.2f}" for loss, other in zip(every, fewer))
display(claims.check("accumulation-fewer-steps", lab.ratio([b / a for a, b in zip(every, fewer)]), note=note))
note = "losses at 8 times the rate: " + ", ".join(f"{loss:.2f}" for loss in faster)
claims.check("accumulation-learning-rate", lab.ratio([b / a for a, b in zip(fewer, faster)]), note=note)

# %% [markdown]
# The curve of the real batch of 32 coincides with that of 4 x 8: for the model both are the same training, and the printed line says how exactly. 4 x 1 learns differently for one reason: it takes eight times as many steps. The division into passes is not the reason.
#
# ## Explore
#
# This picture is calculated from the measured parts. Choose a micro-batch, then raise *update costs*: at which value do four accumulation steps bring the 20 to 30 % more speed that the 2022 guide reports? The gain is in the line's label. Such expensive updates exist: an optimizer that is offloaded to the CPU, or gradients that must first be summed over a slow network.


# %% tags=["widget"]
def draw(micro_batch, update_costs):
    steps = [1, 2, 4, 8, 16, 32]
    factor = int(update_costs.split()[0])
    values = [speed(micro_batch, count, parts, factor) for count in steps]
    label = f"micro-batch {micro_batch}, update {factor}x: {values[2] / values[0] - 1:+.0%} from 1 step to 4"
    lines = {label: values, "if updates were free": [micro_batch / parts[micro_batch]] * len(steps)}
    ax = plots.lines(steps, lines, "accumulation steps", "samples per second, from the parts")
    ax.set_xscale("log", base=2)
    ax.set_xticks(steps, [str(count) for count in steps])
    ax.set_ylim(0, 1.3 * micro_batch / parts[micro_batch])
    return ax


_ = widgets.explore(draw, micro_batch=[8, 1, 2, 4], update_costs=["1 x", "3 x", "10 x", "30 x"])

# %% [markdown]
# ## Exercise 1: unequal lengths
#
# Repair the last experiment, *unequal lengths*. Write a function that returns the weight of one micro-batch's *mean* loss. Its arguments are the number of tokens in this micro-batch, the number of tokens in the whole batch, and the number of micro-batches.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Write the mean over all tokens as a sum over micro-batches. What must each one's own mean be multiplied by?",
    "A mean times its number of tokens is a sum again.",
    "12 of 14 tokens should have 12/14 of the influence. The number of micro-batches does not matter.",
)

# %% tags=["exercise"]
answer = None  # lambda tokens_here, tokens_in_all, micro_batches: ...


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    accumulated = 0
    for x, y in sequences:
        accumulated = accumulated + gradient(model, [(x, y)], weight=answer(len(y), len(targets), len(sequences)))
    length, direction = against(accumulated, by_token)
    figures = f"norm ratio {length:.4f}, cosine {direction:.4f}"
    if abs(length - 1) < 1e-4 and direction > 0.9999:
        return exercises.right(f"{figures}: every token has the same influence again")
    return exercises.wrong(f"{figures}: does a token of the short sequence count as much as one of the long?")


exercises.check(lab, "unequal lengths", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(
    check, solution=lambda here, in_all, count: here / in_all, mistake=lambda here, in_all, count: 1 / count
)

# %% [markdown]
# ## Exercise 2: the challenge
#
# Train with an effective batch of **32** and a peak under the limit printed below, at the best speed: use the largest micro-batch that fits. Change only `per_device_train_batch_size` and `gradient_accumulation_steps`. The limit is slightly above the peak of *8 x 1*.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Two numbers whose product is 32. The larger the micro-batch, the fewer the passes.",
    "8 x 1 fits under the limit. Which bytes does 8 x 4 have in memory that 8 x 1 does not? Compare the bars of 1 x 4 and 1 x 1.",
    "Half a set of gradients is left above 8 x 1, and accumulating needs a whole one: take the next smaller size.",
)

# %% tags=["exercise"]
limit_bytes = sweep[8].peak_bytes + 2 * sweep[8].memory.parameters
print(f"limit: {plots.bytes_text(limit_bytes)}")
answer = None  # dict(per_device_train_batch_size=..., gradient_accumulation_steps=...)

# %% tags=["check"]
peaks = {size: sweep[size].peak_bytes for size in (1, 2, 4)}  # from 2 steps on the peak is the same


def peak(size):
    if size not in peaks:
        arguments = dict(per_device_train_batch_size=size, gradient_accumulation_steps=min(2, -(-32 // size)))
        peaks[size] = lab.train(f"{size} x 2", task=task, measure="peak", **arguments).peak_bytes or float("inf")
    return peaks[size]


def check(answer):
    if answer is None:
        return exercises.not_attempted()
    size, steps = answer.get("per_device_train_batch_size", 8), answer.get("gradient_accumulation_steps", 1)
    peaks_at = f"{size} x {steps} peaks at {plots.bytes_text(peak(size))}"
    if size * steps != 32:
        return exercises.wrong(f"{size} x {steps} is an effective batch of {size * steps}, not of 32")
    if peak(size) > limit_bytes:
        return exercises.wrong(f"{peaks_at}: over the limit. Which bytes are kept during each pass except the first?")
    if peak(2 * size) <= limit_bytes:
        return exercises.wrong(f"{peaks_at}, but {2 * size} x {steps // 2} fits too, with half the passes")
    return exercises.right(f"{peaks_at}; twice the micro-batch does not fit")


exercises.check(lab, "32 under a limit", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
# The limit is half a set of gradients above 8 x 1, and 8 x 4 keeps a whole set.
exercises.prove(
    check,
    solution=dict(per_device_train_batch_size=4, gradient_accumulation_steps=8),
    mistake=dict(per_device_train_batch_size=8, gradient_accumulation_steps=4),
)

# %% [markdown]
# ## Recap
#
# - **The same gradient:** four micro-batches of 2 gave the gradient of the batch of 8, with norm ratio 1 and cosine 1. With forgotten scaling, BatchNorm, a contrastive loss or unequal lengths the gradient was another one.
# - **The Trainer:** its gradient was tested on your versions. With BERT's classifier in transformers 5 it was 4 times too long, and two remedies brought it back to 1.
# - **Memory:** accumulation saves activations (and temporaries of the passes), and adds one set of gradients. 1 x 4 peaked at 61 % of 4 x 1 in the recorded runs below.
# - **Speed:** accumulation costs speed if a small pass cannot keep the device busy. It saves updates, which can bring the 2022 guide's 20 to 30 % if updates are expensive.
# - **Learning:** 4 x 8 takes 16 steps instead of 128 on the same data. Fewer updates may also mean less learning.
#
# Accumulation is the wrong tool in three cases:
#
# - The peak is not made of activations. Then there is little to save, and the gradients that accumulation keeps may take more than it saves. (Lessons 08 and 09 make optimizer states smaller.)
# - The loss compares samples of a batch with each other. Then the gradient is another one.
# - The small batch learns just as well. Then you do not need a larger one.

# %% tags=["finish"]
claims.finish()
