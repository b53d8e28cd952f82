# %% [markdown]
# # How much memory does it take to load a model that barely fits?
#
# Your checkpoint has 14 GB and your machine 16 GB. It should fit, but one way of loading it is killed and another one works. And once the model runs, with some of its layers on disk, can you also train it?
#
# **Time:** about 40 minutes; the cells compute for about 20 s. **Before it:** lesson 01 (memory of a step). Lesson 25, later, has more on four bits. **Machine:** this lesson is about the memory of the computer itself (the *host*), not of a GPU. So everything runs on the CPU, also if you have a GPU. The memory figures need Linux. Layers that wait elsewhere until they compute are called *offloaded*. Here they wait on disk; the lesson does not measure layers that wait in the CPU's memory until a GPU needs them.
#
# **You will see**
# - how many copies of the weights the usual way of loading holds, and where the weights are when a library seems to hold none
# - which arguments of `from_pretrained` change its memory, and which do nothing
# - whether a model with layers on disk gives the same outputs, and which of its layers the Trainer trains

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import ctypes
import importlib.util
import math
import tempfile
import threading
from functools import partial
from pathlib import Path
from unittest import mock

import matplotlib.pyplot as plt
import torch
import transformers
from accelerate import infer_auto_device_map
from IPython.display import display
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from perf_helpers import Claims, Lab, exercises, plots, widgets

lab = Lab(profile, strict=strict, out=out, lesson="21_big_models")
claims = Claims(lab)
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # in this notebook's own process, where all tensors are small
missing = None if Path("/proc/self/status").exists() else "needs /proc/self/status, which Linux has"
if lab.machine.rehearsed:
    missing = "a rehearsal: it measures a GPU's memory, not the host's"

# %% [markdown]
# ## Idea
#
# Loading fills a model's weights from a file. On their way the bytes may pass through a buffer, and a process can hold bytes in two ways:
#
# - **private** memory belongs to the process alone. The system cannot take it back.
# - **mapped** memory has the content of a file. The system reads a page (4 KB) from the file when the program first uses it. If memory gets short, the system drops the page and reads it again later.
#
# Linux reports both: `RssAnon` is private memory, `RssFile` is mapped, and `RssShmem` is a file that is kept in memory (as under `/dev/shm`, or `/tmp` on some systems).
#
# ## Predict
#
# The usual way in PyTorch is: build the model, `torch.load` the file, `load_state_dict`.

# %%
question = "How many times the bytes of the weights does the process hold at the peak?"
widgets.predict(lab, "usual way", question, "x", 0, 5)

# %% [markdown]
# ## A model on disk
#
# We save a Llama of 12 layers with random weights into a temporary folder, in three forms: as `torch.save` writes it, in one file of safetensors (the Hub's format), and in safetensors shards of one layer each. Only the memory matters here, not what the model says. A tiny model is saved in the same way, for warming up.

# %%
SIZES = dict(vocab_size=1000, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8)
temporary = tempfile.TemporaryDirectory()  # deleted when the kernel ends
home = Path(temporary.name)


def saved(name, sizes, **options):
    """Save a model with random weights into a folder of that name, in two formats, and return it."""
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    model.save_pretrained(home / name, **options)
    torch.save(model.state_dict(), home / name / "model.bin")
    return model


saved("tiny", SIZES | {"hidden_size": 64, "intermediate_size": 64})
saved("shards", SIZES, max_shard_size="14MB")
model = saved("one", SIZES)
WEIGHTS = sum(weight.nbytes for weight in model.parameters())
LAYER = sum(weight.nbytes for weight in model.model.layers[0].parameters())
files = list((home / "shards").glob("*.safetensors"))
largest = max(file.stat().st_size for file in files)
print(f"{plots.bytes_text(WEIGHTS)} of weights; {len(files)} shards, the largest {plots.bytes_text(largest)}")
del model

# %% [markdown]
# ## How we measure
#
# Each way of loading runs in a fresh subprocess. A thread reads the memory of the process every millisecond. Before we begin, the tiny model is loaded in the same way and answers once, so that memory which the libraries take for themselves is not counted. After loading, **the model must answer**, so that it has used all of its weights. An *answer* is one forward pass of 64 tokens here.


# %%
def held_now():
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    sizes = {line[0][:-1]: 1024 * int(line[1]) for line in lines if line[0].startswith("Rss")}
    return sizes["RssAnon"], sizes["RssFile"] + sizes["RssShmem"]  # private, mapped


def trimmed():
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc: give free memory back
        trim(0)
    return held_now()


def answer_of(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(64)[None]).logits


# %%
def watched(way, folder, _):
    torch.set_num_threads(1)
    answer_of(way(home / "tiny"))
    seen, ended, start = [], threading.Event(), trimmed()

    def look():
        while not ended.wait(0.001):
            seen.append(held_now())

    (thread := threading.Thread(target=look, daemon=True)).start()
    model = way(folder)
    seen.append(loaded := held_now())
    logits = answer_of(model)
    seen.append(held := held_now())
    ended.set(), thread.join()
    above = {"peak": max(seen, key=sum), "loaded": loaded, "held": held, "trimmed": trimmed()}
    above = {moment: [now - before for now, before in zip(sizes, start)] for moment, sizes in above.items()}
    return above | {"logits": logits[0, -1].tolist()}


# %%
def measured(name, way, folder="one"):
    """Return bytes (private, mapped) at the peak, after loading, after an answer; {} if this machine cannot tell."""
    if missing:
        return {}
    run = lab.run(partial(watched, way, home / folder), name, measure="value", use_cpu=True)
    if not run.ok:
        print(run.failure)
    return run.value


def share(found, moment, *kinds):  # share of the weights' bytes; kind 0 is private, kind 1 mapped
    if not found:  # nothing could be measured here, or the run failed
        return math.nan if missing else found
    return sum(found[moment][kind] for kind in kinds or (0, 1)) / WEIGHTS


# %% [markdown]
# ## By hand: the usual way, and without a second copy
#
# `LlamaForCausalLM(config)` allocates every weight and fills it with random numbers, which are then overwritten. Instead, we do three things:
#
# - build the model on the **meta** device, where a tensor has a shape but no bytes
# - let `load_state_dict` *assign* the tensors of the file instead of copying them
# - let `torch.load` map the file instead of reading it.


# %%
def build(folder):
    return LlamaForCausalLM(LlamaConfig.from_pretrained(folder))


def usual(folder):
    model = build(folder)
    model.load_state_dict(torch.load(folder / "model.bin"))
    return model


def on_meta(folder):
    with torch.device("meta"):  # new
        model = build(folder)
    model.load_state_dict(torch.load(folder / "model.bin", mmap=True), assign=True)  # new
    return model


half_made = on_meta(home / "tiny")
print("still without bytes:", [name for name, buffer in half_made.named_buffers() if buffer.is_meta])
try:
    answer_of(half_made)
except NotImplementedError as error:
    print("NotImplementedError:", error)

# %% [markdown]
# `load_state_dict` found every key, and still something is missing. The frequencies of the rotary position embedding are a *buffer* that no checkpoint holds: they are computed when the module is built, and on the meta device nothing is computed. So we have to build that module again, on the CPU.


# %%
def mapped(folder):
    model = on_meta(folder)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)  # new: on the CPU
    return model


ways = {"torch.load, load_state_dict": usual, "meta, assign, mmap": mapped}
found = {name: measured(name, way) for name, way in ways.items()}
for name, sizes in found.items():
    print(f"{name}: {share(sizes, 'peak'):.2f} of the weights at the peak, {share(sizes, 'held'):.2f} after an answer")
twice = share(found["torch.load, load_state_dict"], "peak")
widgets.revealed(lab, "usual way", None if missing else twice)

# %% [markdown]
# ## The library
#
# `from_pretrained` also builds the model on the meta device. Two of the variants below change the bytes while they are loaded: another `dtype`, and four bits per weight. Others follow advice from the guides: shards, and the flag `low_cpu_mem_usage`.

# %%
load = LlamaForCausalLM.from_pretrained
four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
found["from_pretrained, shards"] = measured("from_pretrained, shards", load, "shards")
ways = {
    "from_pretrained": load,
    "low_cpu_mem_usage=True": partial(load, low_cpu_mem_usage=True),
    "low_cpu_mem_usage=False": partial(load, low_cpu_mem_usage=False),
    "dtype=torch.bfloat16": partial(load, dtype=torch.bfloat16),
    "load_in_4bit": partial(load, quantization_config=four_bits, device_map="cpu"),
}
no_bnb = None if importlib.util.find_spec("bitsandbytes") else "needs bitsandbytes"
if no_bnb:
    del ways["load_in_4bit"]
found |= {name: measured(name, way) for name, way in ways.items()}
just_loaded = found["from_pretrained"]
print(f"from_pretrained: {share(just_loaded, 'loaded'):.2f} of the weights when it returns,", end=" ")
print(
    f"{share(just_loaded, 'held'):.2f} once the model has answered, {share(just_loaded, 'held', 0):.2f} of it private"
)

# %%
exercises.question(
    lab,
    "where",
    "from_pretrained has returned, and the process holds a few percent of the weights' bytes. Where are the weights?",
    {
        "compressed in memory": "Nothing was compressed, and random numbers would not shrink. Look at the second number: "
        "after one answer all of it is there.",
        "in the file; each page is read when it is first touched": "`from_pretrained` maps the safetensors file, and a file "
        "that is mapped and not yet read takes no memory. So the figure after loading proves nothing. The "
        "need shows when the model has answered, private and mapped together.",
        "nowhere: the model has random weights": "It gives the checkpoint's answers. The check is below, with layers on "
        "disk.",
    },
    right="in the file; each page is read when it is first touched",
)

# %% [markdown]
# ## Layers on disk, by hand
#
# A layer is needed only while it computes. A hook (a function that PyTorch calls before or after a layer) can fetch its weights before, and drop them afterwards. The rest of the model stays in memory. We keep 4 of 12 layers in memory: first by hand, then as the library does it, with a `device_map`.


# %%
def fetching(layer, prefix, file):
    def fetch(layer, _):
        weights = torch.load(file, mmap=True)
        layer.load_state_dict({name: weights[prefix + name] for name in layer.state_dict()}, assign=True)

    layer.to("meta")
    layer.register_forward_pre_hook(fetch)
    layer.register_forward_hook(lambda layer, *_: layer.to("meta") and None)  # drops what was fetched


def hooked(folder):
    model = load(folder)
    for number in range(4, 12):
        fetching(model.model.layers[number], f"model.layers.{number}.", folder / "model.bin")
    return model


# %%
def places(layers, in_memory):
    """Return a device_map with the first layers in memory and the others on disk."""
    rest = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    on_disk = {f"model.layers.{number}": "disk" if number >= in_memory else "cpu" for number in range(layers)}
    return dict.fromkeys(rest, "cpu") | on_disk


def offloaded(folder):
    return load(folder, device_map=places(12, 4), offload_folder=home / "offload")  # new


ways = {"8 of 12 layers on disk, by hand": hooked, "8 of 12 layers on disk": offloaded}
found |= {name: measured(name, way) for name, way in ways.items()}

# %%
names = [name for name in found if found[name]]
_, ax = plt.subplots(figsize=(9, 0.42 * len(names) + 1.4), layout="constrained")
for row, name in enumerate(names):
    private, in_files = (100 * share(found[name], "peak", kind) for kind in (0, 1))
    ax.barh(row, private, color=plots.SERIES[1], label="private" if row == 0 else None)
    style = dict(color="white", edgecolor=plots.SERIES[0], hatch="///", label="mapped from files" if row == 0 else None)
    ax.barh(row, in_files, left=private, **style)
    ax.text(private + in_files + 2, row, f"{private + in_files:.0f}", va="center")
ax.axvline(100, color="black", linestyle="--", label="the weights, in fp32")
ax.set_yticks(range(len(names)), names)
ax.invert_yaxis()
ax.set(xlabel="host memory at the peak of loading and a first answer (% of the weights' bytes)", xlim=(0, 240))
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, loc="center right")
plt.show()

# %%
rows = []
for name in names:
    cells = [share(found[name], moment, kind) for moment in ("peak", "held") for kind in (0, 1)]
    rows.append([name, *(f"{cell:.2f}" for cell in [*cells, share(found[name], "trimmed", 0)])])
head = ["way", "private at the peak", "mapped at the peak", "private after an answer", "mapped after an answer"]
head += ["private, after glibc returned freed memory"]
plots.Table(head, rows, "Shares of the weights' bytes in fp32")

# %% [markdown]
# Read the picture from top to bottom. The usual way holds two copies, both private. The next way holds the weights once, in pages that the system may take back.
#
# Shards and the flag change nothing: if a file is mapped, there is no second copy whose size they could limit. `dtype=` and four bits take *more* memory, because at the peak the converted weights (private) and the file's pages (mapped) are there together. With four bits the pages even stay mapped after an answer: embeddings, norms and head are not quantized and still use the file. Some of the private bytes are no longer used, but glibc (the system's C library) keeps freed memory for later allocations. The table's last column shows what remains after we made glibc return that memory. A checkpoint that was *saved* in the type you want has no such peak.
#
# With layers on disk, the pages are dropped as soon as a layer has computed. Are the answers the same? And what did the library put into `offload_folder`?

# %%
plain, disk = found["from_pretrained"], found["8 of 12 layers on disk"]
apart = missing and math.nan
if not missing:
    apart = max(abs(a - b) for a, b in zip(plain["logits"], disk["logits"]))
    by_hand = max(abs(a - b) for a, b in zip(plain["logits"], found["8 of 12 layers on disk, by hand"]["logits"]))
    print(f"largest difference of 1,000 outputs: {apart} with the library, {by_hand} by hand")
folder = home / "offload"
stored = sum(file.stat().st_size for file in folder.rglob("*")) if folder.exists() else 0
print(f"in offload_folder: {stored} bytes, for {plots.bytes_text(8 * LAYER)} of weights on disk")

# %% [markdown]
# The folder is empty. Since [transformers PR 20321](https://github.com/huggingface/transformers/pull/20321) layers on disk are read from the checkpoint itself, if it is in safetensors. There is no second copy on disk, but the checkpoint must stay where it is.
#
# ## Two cards, and who decides what goes where
#
# With `device_map="auto"` a plan is made before anything is loaded. By hand the plan is one loop: each layer goes to the first card that has room, and the remaining layers go to the CPU. You need no card to look at a plan. Here it is for a Llama of 8B in bf16 on the meta device, and for two cards that may hold the given number of GB each (`max_memory`). `filled` is our loop; `planned` gets the library's plan.


# %%
def filled(sizes, limits, kept=0):
    """Return the bytes on each device; `kept` bytes of the first one stay free."""
    held, device = [0] * len(limits), 0
    for size in sizes:
        while held[device] + size > limits[device] - (kept if device == 0 else 0):
            device += 1
        held[device] += size
    return held


def planned(model, parts, limits):
    """Return the bytes on each device by the library's plan."""
    room = dict(zip((0, 1, "cpu"), limits))
    plan = infer_auto_device_map(model, max_memory=room, no_split_module_classes=model._no_split_modules)
    assert set(plan) == set(parts), "a part was split"
    return [sum(size for name, size in parts.items() if plan[name] == device) for device in room]


# %%
import logging

logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns about cards that are not here
EIGHT = dict(vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32)
with torch.device("meta"):
    eight = LlamaForCausalLM(LlamaConfig(**EIGHT, num_attention_heads=32, num_key_value_heads=8)).bfloat16()
layers = [f"model.layers.{number}" for number in range(32)]
names_of_parts = ["model.embed_tokens", *layers, "model.norm", "model.rotary_emb", "lm_head"]
parts = {name: sum(weight.nbytes for weight in eight.get_submodule(name).parameters()) for name in names_of_parts}
largest_part, plans = max(parts.values()), {}
for gigabytes in (6, 7, 8, 8.25, 8.5):
    limits = int(gigabytes * 1e9), int(gigabytes * 1e9), 10**12
    by_hand, plans[gigabytes] = filled(parts.values(), limits), planned(eight, parts, limits)
    assert filled(parts.values(), limits, kept=largest_part) == plans[gigabytes]
    plans[gigabytes] = [plans[gigabytes], by_hand]
rows = [[f"{size}", *(f"{held / 1e9:.2f}" for held in [*auto, *by_hand])] for size, (auto, by_hand) in plans.items()]
heads = ["GB per card", "auto: card 0", "card 1", "CPU", "by hand: card 0", "card 1", "CPU"]
plots.Table(heads, rows, "GB of a Llama 8B's weights in bf16")

# %% [markdown]
# No card gets more than it may hold. But the library's plan never fills the first card. It keeps room there for the **largest part**, 1.05 GB of embeddings, so that layers left on the CPU can be fetched when they are needed (`infer_auto_device_map` in accelerate's `utils/modeling.py`). It also keeps that room if no layer would have to be left on the CPU. The assertion above checks this: if our loop keeps the same room, its plan equals the library's, byte for byte.
#
# So on two cards of 8.25 GB this model's head, 1.05 GB, is on the CPU, and travels to a card at every token, although the whole model would fit. **The remedy**: write the `device_map` yourself, from the loop above.
#
# ## It runs. Does it train?
#
# The documentation of accelerate says that a model with layers on disk "can still be used as a regular PyTorch model". A warning below that sentence adds that only inference is supported, because most of the work runs under `torch.no_grad`. The Trainer accepts such a model anyway.

# %%
exercises.question(
    lab,
    "loss",
    "A fine-tuning with layers on disk lowers the loss from 4.2 to 1.1. What does that show?",
    {
        "that all layers learn": "The run below lowers its loss as well, with half of the layers as they were. A loss says "
        "that something learns, not what.",
        "that something learns; a comparison with the checkpoint shows which weights": "Load both and compare tensor by "
        "tensor. It takes a minute, once.",
        "nothing: layers on disk get no gradient at all, so it is noise": "The layers in memory do get gradients, through "
        "the ones on disk too. They learn.",
    },
    right="that something learns; a comparison with the checkpoint shows which weights",
)

# %% [markdown]
# We test it with a small Llama of 8 layers, 4 of them on disk, and sentences in which each word has one fixed successor. To see which weights changed, we read the checkpoint that the Trainer saves.


# %%
SMALL = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4)


def sentences(count=256, length=16):
    follows = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    words = [torch.arange(count) % 64]
    for _ in range(length - 1):
        words.append(follows[words[-1]])
    return [{"input_ids": row, "labels": row} for row in torch.stack(words, 1)]


# %%
def training(source, in_memory, steps, _, callbacks=(), freeze=False):
    torch.manual_seed(0)
    model = load(source, device_map=places(8, in_memory)) if in_memory < 8 else load(source)
    if freeze:
        for weight in model.parameters():
            weight.requires_grad_(not weight.is_meta)
    common = dict(use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=steps, learning_rate=3e-3, weight_decay=0.0, **common)
        arguments._n_gpu = min(1, arguments.n_gpu)
        trainer = Trainer(model, arguments, train_dataset=sentences(), callbacks=list(callbacks))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.save_model(folder)
        before, after = (load(path).state_dict() for path in (source, folder))
    same = [name for name in before if torch.equal(before[name], after[name])]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    changed = 1 - sum(before[name].numel() for name in same) / sum(weight.numel() for weight in before.values())
    untouched = sorted({name.split(".")[2] for name in same if ".layers." in name})
    return {"changed": changed, "untouched": untouched, "losses": [float(loss) for loss in losses]}


# %%
saved("small", SMALL)


def trained(name, *arguments, **options):
    if lab.machine.rehearsed:
        return None
    run = lab.run(partial(training, home / "small", *arguments, **options), name, measure="value", use_cpu=True)
    return run


runs = {"all in memory": trained("all in memory", 8, 40), "half on disk": trained("half on disk", 4, 40)}
for name, run in runs.items():
    if run and run.ok:
        losses, changed, untouched = (run.value[key] for key in ("losses", "changed", "untouched"))
        print(f"{name}: loss {losses[0]:.2f} to {losses[-1]:.2f}; {changed:.0%} of the parameters changed", end="")
        print(f"; layers {', '.join(untouched)} did not change" if untouched else "")

# %% [markdown]
# There is no error and no warning of the fault, and the loss falls. It may even end lower than with all layers in memory, so it does not show the fault. (In a terminal you would see two messages, that some parameters are on the meta device, and that the Trainer does not move the model to its device. Neither says that these parameters are not trained.) The half in memory learnt, while the half on disk stayed as it was.
#
# ## Why
#
# An optimizer gets the model's parameters once, when it is created. Before each forward pass, accelerate's hook (`AlignDevicesHook.pre_forward` in `hooks.py`) puts a **new** parameter into the layer, filled from disk. Afterwards `post_forward` replaces it by another new one, on meta. The gradient belongs to the parameter that was filled from disk, which is gone by then. The table follows these parameters for a layer in memory and for a layer on disk.


# %%
def gradient_owners():
    model, used, linear = load(home / "small", device_map=places(8, 4)), [], torch.nn.functional.linear
    given = {number: model.model.layers[number].self_attn.q_proj.weight for number in (0, 7)}  # to an optimizer

    def noting(x, weight, bias=None):
        used.append(weight)
        return linear(x, weight, bias)

    ids = torch.stack([row["input_ids"] for row in sentences(4)])
    with mock.patch("torch.nn.functional.linear", noting):
        model(input_ids=ids, labels=ids).loss.backward()
    for number, weight in given.items():
        at_work = used[7 * number]  # a layer has seven matmuls; q_proj is the first
        yield [number, str(weight.device), at_work is weight, at_work.grad is not None, weight.grad is not None]


heads = [
    "layer",
    "device of the optimizer's weight",
    "the forward pass used it",
    "the used weight has a gradient",
    "the optimizer's weight has a gradient",
]
plots.Table(heads, list(gradient_owners()), "The optimizer's weight, and the weight that the forward pass used")

# %% [markdown]
# Every optimizer skips a weight without a gradient. Frozen weights rely on this, so nothing warns. And the layers did not run under `no_grad`: the gradient exists, on a tensor that is thrown away. Two libraries contribute to the fault. accelerate replaces the tensors. transformers used to stop with a RuntimeError in `Trainer._move_model_to_device` (`trainer.py`); since [PR 41032](https://github.com/huggingface/transformers/pull/41032) this function no longer moves a model that has a `hf_device_map`, which `device_map` sets, so there is no error.
#
# The fault is known for accelerate's `cpu_offload` ([issue 3770](https://github.com/huggingface/accelerate/issues/3770), closed).
#
# > **On a GPU:** layers that wait in the CPU's memory are therefore in danger too. We did not measure that.
#
# ## What to do about it
#
# **Check before the first step**, in four lines. Then choose one of two remedies:
#
# - Leave the weights in the mapped file, without a `device_map`. Then all weights train. Each page that is updated becomes private, so in the end the whole model is in private memory.
# - Freeze the layers on disk on purpose, and say so.
#
# The trainings called *guarded* in the output make this check: with half of the layers on disk, with all in memory, and with those on disk frozen. *Two steps* is the training without the check, for a claim below.


# %%
class Whole(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **_):
        lost = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.is_meta]
        if lost:
            raise ValueError(f"{len(lost)} weights would not be trained: they are on disk, e.g. {lost[0]}")


runs["guarded"] = trained("guarded", 4, 2, callbacks=[Whole()])
runs["guarded, all in memory"] = trained("guarded, all in memory", 8, 2, callbacks=[Whole()])
runs["guarded, disk frozen"] = trained("guarded, disk frozen", 4, 2, callbacks=[Whole()], freeze=True)
runs["two steps"] = trained("two steps", 4, 2)
for name, run in runs.items():
    if run:
        print(f"{name}:", f"{run.value['changed']:.1%} of the parameters changed" if run.ok else run.failure)

# %% [markdown]
# ## What held
#
# Memory is private plus mapped bytes above the start, at the peak of loading and a first answer. This also decides `big-models`, the claim that a big model can be loaded without twice its memory. Right after loading, that claim would hold only because nothing has been read yet.
#
# ### Loading

# %% tags=["claim"]
peaks = {name: None if missing else share(sizes, "peak") for name, sizes in found.items()}


def against(name, other):
    return None if missing else peaks[name] / peaks[other]


checkpoint = "from_pretrained"
note = "right after loading: " + f"{share(found[checkpoint], 'loaded'):.2f}" if not missing else ""
display(claims.check("load-twice", peaks["torch.load, load_state_dict"], missing=missing))
display(claims.check("big-models", peaks[checkpoint], missing=missing, note=note))
display(claims.check("shards-cap", against("from_pretrained, shards", checkpoint), missing=missing))
flag = against("low_cpu_mem_usage=True", "low_cpu_mem_usage=False")
claims.check("low-cpu-mem-usage", flag, missing=missing)

# %% [markdown]
# ### Layers elsewhere

# %% tags=["claim"]
display(claims.check("offload-same", None if missing else apart, missing=missing))
display(claims.check("offload-copies", None if missing else stored / (8 * LAYER), missing=missing))
four = None if missing or no_bnb else against("load_in_4bit", checkpoint)
note = "" if four is None else f"private alone {share(found['load_in_4bit'], 'peak', 0):.2f} of the weights"
display(claims.check("four-bit-load", four, missing=missing or no_bnb, note=note))
on_cards = {size: sum(auto[:2]) / sum(by_hand[:2]) for size, (auto, by_hand) in plans.items()}
note = f"with {min(on_cards, key=on_cards.get)} GB per card, compared with the loop by hand"
display(claims.check("device-map-cards", min(on_cards.values()), note=note))
run, note = runs["two steps"], "two steps, layers 4 to 7 on disk"
claims.check("offload-trains", run and run.value["changed"], note=note, missing=missing if not run else None)

# %% [markdown]
# ## Explore
#
# Which way of loading your model fits your memory, by the shares measured here? Only the private bytes have to fit; mapped bytes can be read again and again.


# %% tags=["widget"]
def draw(billions, bytes_a_parameter):
    size = billions * bytes_a_parameter
    _, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
    ways = [name for name in names if "dtype" not in name and "4bit" not in name and "low_cpu" not in name]
    for row, name in enumerate(ways):
        private, in_files = (size * share(found[name], "peak", kind) for kind in (0, 1))
        ax.barh(row, private, color=plots.SERIES[1], label="private" if row == 0 else None)
        ax.barh(row, in_files, left=private, color="white", edgecolor=plots.SERIES[0], hatch="///")
    ax.set_yticks(range(len(ways)), ways)
    ax.invert_yaxis()
    ax.set(xlabel="GB at the peak: filled = private, hatched = mapped")
    return ax


_ = widgets.explore(draw, billions=[7, 1, 3, 13, 70], bytes_a_parameter=[2, 4])

# %% [markdown]
# The picture shows no new measurement: it multiplies the shares above by the size of your model. (For a small model, memory that the libraries themselves take is a larger share.)
#
# ## Exercise 1: half the weights in memory
#
# Load the model so that it answers, and the process holds at most **half** of the weights' bytes at the peak, private and mapped together. The answers must be those of the checkpoint. Your answer is the arguments of `from_pretrained`; the check measures it.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Which ways in the table are below 0.5, at the peak and not only afterwards?",
    "How many layers may stay? A layer is about a twelfth of the weights, and one more layer is in memory while it computes.",
    "`places(12, in_memory)` makes a `device_map`.",
)

# %% tags=["exercise"]
answer = None  # dict(...): the arguments of from_pretrained that follow the folder


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if missing:
        return exercises.not_measured(missing)
    sizes = measured("exercise", partial(load, **answer))
    if not sizes:
        return exercises.run_failed(lab["exercise"])
    wrong_by = max(abs(a - b) for a, b in zip(sizes["logits"], plain["logits"]))
    message = f"{share(sizes, 'peak'):.2f} of the weights at the peak, answers off by {wrong_by:.1g}"
    if share(sizes, "peak") > 0.5:
        return exercises.wrong(f"{message}: more than half")
    return (
        exercises.right(message)
        if wrong_by < 1e-4
        else exercises.wrong(f"{message}: these are not the checkpoint's answers")
    )


exercises.check(lab, "half", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check, solution=dict(device_map=places(12, 2)), mistake=dict(dtype=torch.bfloat16))

# %% [markdown]
# ## Exercise 2: the challenge
#
# Train *all* 8 layers of the small model with the weights in files. Write `answer(source, files)`: it loads the checkpoint in the folder `source` and returns a model whose weights are in files in the folder `files`. The check makes three SGD updates and then compares three things:
#
# - every weight has changed
# - the files hold the trained weights, byte for byte
# - the checkpoint is unchanged.
#
# `torch.from_file(name, shared=True, size=...)` returns a tensor whose changes go into the file. And where are the gradients? The check reports their bytes.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Nothing replaces a parameter here: it stays the one that the optimizer gets. Only its bytes move.",
    "`weight.data = tensor` gives a parameter other bytes. Copy the weight's values into the file's tensor first.",
    "`torch.from_file` returns one dimension: `.view_as(weight)`. Use one file per weight, e.g. `files / name`.",
)

# %% tags=["exercise"]
answer = None  # def answer(source, files): ...; return model


# %%
def in_files(answer, source, _):
    torch.set_num_threads(1)
    checkpoint = {file: file.read_bytes() for file in source.iterdir()}
    with tempfile.TemporaryDirectory() as name:
        files, before = Path(name), {key: weight.clone() for key, weight in load(source).named_parameters()}
        model, ids = answer(source, files), torch.stack([row["input_ids"] for row in sentences()])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        contents = [file.read_bytes() for file in files.rglob("*") if file.is_file()]
        after = {key: weight.detach() for key, weight in model.named_parameters()}
        held = [any(one.numpy().tobytes() in content for content in contents) for one in after.values()]
        changed = [not torch.equal(before[key], one) for key, one in after.items()]
        gradients = sum(weight.grad.nbytes for weight in model.parameters() if weight.grad is not None)
    is_kept = checkpoint == {file: file.read_bytes() for file in source.iterdir()}
    share = gradients / sum(one.nbytes for one in before.values())
    return {"of": len(before), "held": sum(held), "changed": sum(changed), "kept": is_kept, "gradients": share}


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if lab.machine.rehearsed:
        return exercises.not_measured(missing)
    run = lab.run(partial(in_files, answer, home / "small"), "challenge", measure="value", use_cpu=True)
    if not run.ok:
        return exercises.run_failed(run)
    made = run.value
    result = f"{made['changed']} of {made['of']} weights changed, the files hold {made['held']} of them"
    if not made["kept"]:
        return exercises.wrong(f"{result}. The checkpoint has changed: write into the folder `files`")
    if made["changed"] < made["of"]:
        return exercises.wrong(f"{result}. Does the optimizer have the parameters that do the work?")
    if made["held"] < made["of"]:
        return exercises.wrong(f"{result}. A page of a private mapping stays in memory when it changes: `shared=True`")
    return exercises.right(
        f"{result}. Their gradients are private memory: {made['gradients']:.2f} of the weights' bytes"
    )


exercises.check(lab, "trained in files", check, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def shared(source, files):
    model = load(source)
    for name, weight in model.named_parameters():
        in_file = torch.from_file(str(files / name), shared=True, size=weight.numel()).view_as(weight)
        weight.data = in_file.copy_(weight.data)
    return model


exercises.prove(check, solution=shared, mistake=lambda source, files: load(source))  # mapped, but privately

# %% [markdown]
# ## Common mistakes
#
# - *Taking resident memory for the memory that the model needs.* It counts mapped pages, which the system may drop; and right after loading it is too small.
# - *Concluding from a falling loss that the model trains.* Half of it may.
# - *Expecting bf16 to take half from the start.* A model that is converted while it loads takes more at the peak than in fp32.
# - *Passing `low_cpu_mem_usage=True`, to be safe.* It has been ignored since [PR 36963](https://github.com/huggingface/transformers/pull/36963).

# %% [markdown]
# ## Recap
#
# The numbers are those of a recorded run (AMD EPYC, 2 cores, torch 2.15.0, 2026-11-29).
#
# - The usual way held the weights 2.00 times. Built on meta and mapped, the weights took 1.04 times their bytes at the peak, which came with the first answer. When `from_pretrained` returned, they took only 0.04, because they had not been read yet.
# - Shards and `low_cpu_mem_usage` changed nothing: 0.99 and 1.00 times the memory. Four bits took 1.73 times, because the converted weights are private beside the mapped file.
# - With 6 GB per card, `device_map="auto"` put only 0.89 times as many bytes onto two cards as the loop by hand, because it keeps room for the largest part on the first card.
# - Layers on disk gave the same answers (a difference of 0), from the checkpoint itself.
# - The Trainer changed 51 % of the parameters and did not warn. Four lines check for that before the first step.

# %% tags=["finish"]
claims.finish()
