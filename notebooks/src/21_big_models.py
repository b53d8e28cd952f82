# %% [markdown]
# # How much memory does it take to load a model that barely fits?
#
# A checkpoint of 14 GB, a machine with 16 GB: it should fit. Whether it does depends on the way it is loaded. And a model that runs need not be one that trains.
#
# **You will see**
# - why the usual way holds the weights twice, and where they are when a library seems to hold none
# - which arguments of `from_pretrained` change its memory, and which do nothing
# - a model with layers on disk that gives the same outputs, and of which the Trainer trains one half

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
    missing = "a rehearsal: it follows a GPU's memory, not the host's"

# %% [markdown]
# ## Idea
#
# Loading fills a model's weights from a file. For a moment the bytes may exist in two places: in the model, and in what was read. A process can hold bytes in two ways:
#
# - **private** memory is its own. The system cannot take it back.
# - **mapped** memory shows a file. A page of it (4 KB) is read when it is first touched. Under pressure the system drops it and reads it again later.
#
# Linux tells both: `RssAnon` is private, `RssFile` mapped, and `RssShmem` a file that lies in memory (as under `/dev/shm`, or `/tmp` on some systems). All of this is about the host's memory, so everything here runs on the CPU, with a GPU too.
#
# ## Predict
#
# The usual way in PyTorch: build the model, `torch.load` the file, `load_state_dict`.

# %%
asked = "How many times the bytes of the weights does the process hold at the peak?"
widgets.predict(lab, "usual way", asked, "x", 0, 5)

# %% [markdown]
# ## A model on disk
#
# A Llama of 12 layers with random weights, in a temporary folder: as `torch.save` writes it, in one safetensors file, and in shards of one layer each. Nothing here asks what the model says. A tiny one comes along.

# %%
SIZES = dict(vocab_size=1000, hidden_size=512, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=8)
temporary = tempfile.TemporaryDirectory()
home = Path(temporary.name)


def saved(name, sizes, **options):
    """A model with random weights in a folder of that name, in two formats."""
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
# Each way of loading gets a clean process. A thread looks at the process every millisecond. Before we begin, the tiny model is loaded in the same way and answers once: what libraries take for themselves is not counted. After loading, **the model must answer**: a file that was mapped and never read takes no memory, and proves nothing.


# %%
def held_now():
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    sizes = {line[0][:-1]: 1024 * int(line[1]) for line in lines if line[0].startswith("Rss")}
    return sizes["RssAnon"], sizes["RssFile"] + sizes["RssShmem"]  # private, mapped


def trimmed():
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc: give back what is free already
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
    above = {when: [now - before for now, before in zip(sizes, start)] for when, sizes in above.items()}
    return above | {"logits": logits[0, -1].tolist()}


# %%
def measured(name, way, folder="one"):
    """Bytes (private, mapped) at the peak, after loading, after an answer; {} if this machine cannot tell."""
    if missing:
        return {}
    run = lab.run(partial(watched, way, home / folder), name, measure="value", use_cpu=True)
    if not run.ok:
        print(run.failure)
    return run.value


def share(found, when, *kinds):  # of the weights' bytes: kind 0 is private, kind 1 mapped
    if not found:  # nothing could be measured here, or the run failed
        return math.nan if missing else found
    return sum(found[when][kind] for kind in kinds or (0, 1)) / WEIGHTS


# %% [markdown]
# ## By hand: the usual way, and without a second copy
#
# `LlamaForCausalLM(config)` allocates every weight and fills it with random numbers, only to be overwritten. Instead, build on the **meta** device, where a tensor has a shape and no bytes. Then let `load_state_dict` *assign* the tensors of the file rather than copy them, and let `torch.load` map the file rather than read it.


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
# `load_state_dict` found every key, and still something is missing. The frequencies of the rotary position embedding are a *buffer* that no checkpoint holds: they are computed when the module is built, and on the meta device nothing is computed. So that module has to be built anew.


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
# `from_pretrained` builds on meta too, and maps the safetensors file. Two variants change the bytes on their way in: another `dtype`, and four bits a weight. The others are the guides' advice: shards, and the flag `low_cpu_mem_usage`.

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
        "in the file; each page is read when it is first touched": "So the figure after loading measures laziness. The "
        "need shows when the model has answered, private and mapped together.",
        "nowhere: the model has random weights": "It gives the checkpoint's answers. The check is below, with layers on "
        "disk.",
    },
    right="in the file; each page is read when it is first touched",
)

# %% [markdown]
# ## Layers on disk, by hand
#
# A layer is needed only while it computes. A hook can fetch its weights before, and drop them afterwards. The rest of the model stays. We keep 4 of 12 layers, first by hand, then as the library does it, with a `device_map`.


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
def places(layers, kept):
    """A device_map: the first layers in memory, the others on disk."""
    rest = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    on_disk = {f"model.layers.{number}": "disk" if number >= kept else "cpu" for number in range(layers)}
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
ax.set(xlabel="host memory at the peak, through a first answer (% of the weights' bytes)", xlim=(0, 240))
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, loc="center right")
plt.show()

# %%
rows = []
for name in names:
    cells = [share(found[name], when, kind) for when in ("peak", "held") for kind in (0, 1)]
    rows.append([name, *(f"{cell:.2f}" for cell in [*cells, share(found[name], "trimmed", 0)])])
head = ["way", "private at the peak", "mapped", "private after an answer", "mapped", "private, trimmed"]
plots.Table(head, rows, "Shares of the weights' bytes in fp32")

# %% [markdown]
# Read the picture from above. The usual way holds two copies, both private. Then the weights are there once, in pages that the system may take back.
#
# Shards and the flag change nothing: where a file is mapped, no second copy is left to cap. `dtype=` and four bits do change something, in the other direction: new bytes are made, privately, while the file's pages are mapped. Some of the private bytes are free already, and glibc's allocator keeps them for later: the last column is what is left when it is asked to give them back. A checkpoint that was *saved* in the type you want has no such peak.
#
# With layers on disk the pages go as soon as a layer has computed. Are the answers the same? And what did the library put into `offload_folder`?

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
# The folder is empty. Since [transformers PR 20321](https://github.com/huggingface/transformers/pull/20321) layers on disk are read from the checkpoint itself, if it is in safetensors: no second copy on disk. But then the checkpoint must stay where it is.
#
# ## Two cards, and who decides what goes where
#
# With `device_map="auto"` a plan is made before anything is loaded. By hand it is one loop: layer after layer goes to the first card that has room, and what is left goes to the CPU. No card is needed to look at a plan: here is a Llama of 8B in bf16 on the meta device, and two cards that may hold so many GB each (`max_memory`).


# %%
def filled(sizes, limits, kept=0):
    """Bytes on each device; so many of the first one stay free."""
    held, device = [0] * len(limits), 0
    for size in sizes:
        while held[device] + size > limits[device] - (kept if device == 0 else 0):
            device += 1
        held[device] += size
    return held


def planned(model, parts, limits):
    """The same, by the library's plan."""
    room = dict(zip((0, 1, "cpu"), limits))
    plan = infer_auto_device_map(model, max_memory=room, no_split_module_classes=model._no_split_modules)
    assert set(plan) == set(parts), "a part was split"
    return [sum(size for name, size in parts.items() if plan[name] == device) for device in room]


# %%
import logging

logging.getLogger("accelerate").setLevel(logging.ERROR)  # it tells of cards that are not here
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
rows = [[f"{size}", *(f"{held / 1e9:.2f}" for held in [*auto, *ours])] for size, (auto, ours) in plans.items()]
heads = ["GB a card", "auto: card 0", "card 1", "CPU", "by hand: card 0", "card 1", "CPU"]
plots.Table(heads, rows, "GB of a Llama 8B's weights in bf16")

# %% [markdown]
# Nobody gets more than is allowed. But the first card is never filled: the plan keeps room there for the **largest part**, 1.05 GB of embeddings, so that what is left on the CPU can be fetched for its turn (`infer_auto_device_map` in accelerate's `utils/modeling.py`). It keeps it also where nothing would have to be left. The assertion above says so: by hand, with that much kept, the plan is the library's, byte for byte.
#
# So on two cards of 8.25 GB this model has its head, 1.05 GB, on the CPU, from where it travels at every token, although all of it fits. **The remedy**: write the `device_map` yourself, from the loop above.
#
# ## It runs. Does it train?
#
# The guide says of such a model that it "can still be used as a regular PyTorch model". A warning below adds that only inference is supported, since most of it happens under `torch.no_grad`. The Trainer takes such a model anyway. So: a small Llama of 8 layers, 4 of them on disk, and sentences in which each word has one that follows it. What changed is read from the checkpoint that the Trainer saves.


# %%
SMALL = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4)


def sentences(count=256, length=16):
    follows = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    words = [torch.arange(count) % 64]
    for _ in range(length - 1):
        words.append(follows[words[-1]])
    return [{"input_ids": row, "labels": row} for row in torch.stack(words, 1)]


# %%
def training(source, kept, steps, _, callbacks=(), freeze=False):
    torch.manual_seed(0)
    model = load(source, device_map=places(8, kept)) if kept < 8 else load(source)
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


def trained(name, *what, **options):
    if lab.machine.rehearsed:
        return None
    run = lab.run(partial(training, home / "small", *what, **options), name, measure="value", use_cpu=True)
    return run


runs = {"all in memory": trained("all in memory", 8, 40), "half on disk": trained("half on disk", 4, 40)}
for name, run in runs.items():
    if run and run.ok:
        losses, changed, untouched = (run.value[key] for key in ("losses", "changed", "untouched"))
        print(f"{name}: loss {losses[0]:.2f} to {losses[-1]:.2f}; {changed:.0%} of the parameters changed", end="")
        print(f"; layers {', '.join(untouched)} are as they were" if untouched else "")

# %% [markdown]
# No error, no word about it, a loss that falls. (In a terminal two lines appear, about *places*: parameters on the meta device, and a move that is skipped.) Half of the model learnt around the other half.
#
# ## Why
#
# An optimizer is given the model's parameters once, when it is made. Before each forward pass accelerate's hook (`AlignDevicesHook.pre_forward` in `hooks.py`) puts a **new** parameter into the layer, filled from disk. Afterwards `post_forward` puts a new one on meta in its place. The gradient belongs to the one in the middle, which is gone by then. Here are the three, for a layer in memory and one on disk.


# %%
def who_gets_the_gradient():
    model, used, linear = load(home / "small", device_map=places(8, 4)), [], torch.nn.functional.linear
    given = {number: model.model.layers[number].self_attn.q_proj.weight for number in (0, 7)}  # to an optimizer

    def noting(x, weight, bias=None):
        used.append(weight)
        return linear(x, weight, bias)

    ids = torch.stack([row["input_ids"] for row in sentences(4)])
    with mock.patch("torch.nn.functional.linear", noting):
        model(input_ids=ids, labels=ids).loss.backward()
    for number, weight in given.items():
        at_work = used[7 * number]  # a layer has seven products; q_proj is the first
        yield [number, str(weight.device), at_work is weight, at_work.grad is not None, weight.grad is not None]


heads = [
    "layer",
    "optimizer's weight is on",
    "it did the work",
    "what worked has a gradient",
    "optimizer's weight has one",
]
plots.Table(heads, list(who_gets_the_gradient()), "Before the forward pass, in it, and after the backward pass")

# %% [markdown]
# A weight without a gradient is skipped by every optimizer: that is how frozen weights work, so nobody complains. And nothing ran under `no_grad`: the gradient is there, on a tensor that nobody keeps. Two libraries share in it. accelerate replaces the tensors. transformers used to stop with a RuntimeError in `Trainer._move_model_to_device` (`trainer.py`); since [PR 41032](https://github.com/huggingface/transformers/pull/41032) it returns early for any model with a `hf_device_map`.
#
# It is known for accelerate's `cpu_offload` ([issue 3770](https://github.com/huggingface/accelerate/issues/3770), closed). So layers that lie on the CPU for a GPU to use are in danger too; that we did not measure.
#
# ## What to do about it
#
# **Ask before the first step**, in four lines. Then decide: leave the weights in the mapped file, without a `device_map`, and all of them train (each page that is updated becomes private). Or freeze what is on disk, on purpose, and say so.


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

# %%
exercises.question(
    lab,
    "loss",
    "A fine-tuning with layers on disk lowers the loss from 4.2 to 1.1. What does that show?",
    {
        "that all layers learn": "The run above lowered its loss as well, with half of the layers as they were. A loss says "
        "that something learns, not what.",
        "that something learns; which weights, a comparison with the checkpoint tells": "Load both and compare tensor by "
        "tensor. It takes a minute, once.",
        "nothing: layers on disk get no gradient at all, so it is noise": "The layers in memory do get gradients, through "
        "the ones on disk too. They learn.",
    },
    right="that something learns; which weights, a comparison with the checkpoint tells",
)

# %% [markdown]
# ## What held
#
# Memory is private plus mapped, at the peak through a first answer, above the start. `big-models` is decided so, too: after loading alone it would hold because nothing has been read.

# %% tags=["claim"]
peaks = {name: None if missing else share(sizes, "peak") for name, sizes in found.items()}


def against(name, other):
    return None if missing else peaks[name] / peaks[other]


checkpoint = "from_pretrained"
note = "nothing to see after loading: " + f"{share(found[checkpoint], 'loaded'):.2f}" if not missing else ""
display(claims.check("load-twice", peaks["torch.load, load_state_dict"], missing=missing))
display(claims.check("big-models", peaks[checkpoint], missing=missing, note=note))
display(claims.check("shards-cap", against("from_pretrained, shards", checkpoint), missing=missing))
flag = against("low_cpu_mem_usage=True", "low_cpu_mem_usage=False")
claims.check("low-cpu-mem-usage", flag, missing=missing)

# %% tags=["claim"]
display(claims.check("offload-same", None if missing else apart, missing=missing))
display(claims.check("offload-copies", None if missing else stored / (8 * LAYER), missing=missing))
four = None if missing or no_bnb else against("load_in_4bit", checkpoint)
note = "" if four is None else f"private alone {share(found['load_in_4bit'], 'peak', 0):.2f} of the weights"
display(claims.check("four-bit-load", four, missing=missing or no_bnb, note=note))
on_cards = {size: sum(auto[:2]) / sum(ours[:2]) for size, (auto, ours) in plans.items()}
note = f"with {min(on_cards, key=on_cards.get)} GB a card; the loop by hand puts it there"
display(claims.check("device-map-cards", min(on_cards.values()), note=note))
run, note = runs["two steps"], "two steps, layers 4 to 7 on disk"
claims.check("offload-trains", run and run.value["changed"], note=note, missing=missing if not run else None)

# %% [markdown]
# ## Explore
#
# Your model, by the shares measured here: which way of loading fits your memory? Private bytes alone have to fit; mapped ones may be read again and again.


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
    ax.set(xlabel="GB at the peak: filled private, hatched mapped")
    return ax


_ = widgets.explore(draw, billions=[7, 1, 3, 13, 70], bytes_a_parameter=[2, 4])

# %% [markdown]
# Nothing is measured here: it is the shares above times the size. (On a small model, what libraries take beside the weights is a larger share.)
#
# ## Exercise
#
# The model answers, and the process may hold at most **half** of the weights' bytes at the peak, private and mapped together. The answers must be those of the checkpoint. Give the arguments of `from_pretrained`. It is measured.

# %% tags=["exercise"]
display(
    exercises.hint(
        "Which ways in the table are below 0.5, at the peak and not only afterwards?",
        "How many layers may stay? A layer is about a twelfth of the weights; and one more comes and goes.",
        "`places(12, kept)` makes a `device_map`.",
    )
)
answer = None  # dict(...): arguments of from_pretrained, beside the folder


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
    said = f"{share(sizes, 'peak'):.2f} of the weights at the peak, answers off by {wrong_by:.1g}"
    if share(sizes, "peak") > 0.5:
        return exercises.wrong(f"{said}: more than half")
    return exercises.right(said) if wrong_by < 1e-4 else exercises.wrong(f"{said}: these are other answers")


exercises.check(lab, "half", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(check, solution=dict(device_map=places(12, 2)), mistake=dict(dtype=torch.bfloat16))

# %% [markdown]
# **Challenge.** Train *all* 8 layers of the small model with the weights in files. `torch.from_file(name, shared=True, size=...)` gives a tensor whose changes go into the file. Compare with the checkpoint afterwards: which share of the parameters changed? And what of the gradients?
#
# ## Mistakes that strangers make
#
# - *Resident memory is what the model needs.* It counts mapped pages, which the system may drop; and right after loading it counts too little.
# - *The loss falls, so the model trains.* Half of it may.
# - *bf16 takes half from the start.* Converted while loading, it takes more at the peak than fp32.
# - *`low_cpu_mem_usage=True`, to be safe.* It has been ignored since [PR 36963](https://github.com/huggingface/transformers/pull/36963).

# %%
temporary.cleanup()  # the checkpoints

# %% [markdown]
# ## Recap
#
# - The usual way held the weights twice. Built on meta and mapped, they were there once, in pages of the file, and only after the model had answered.
# - Shards and `low_cpu_mem_usage` changed nothing. Another `dtype` and four bits took more at the peak.
# - `device_map="auto"` left weights to the CPU that would have fitted on the cards: it keeps room for the largest part on the first.
# - Layers on disk gave the same answers, from the checkpoint itself. The Trainer trained what was in memory and said nothing; four lines ask before the first step.

# %% tags=["finish"]
claims.finish()
