# %% [markdown]
# # It runs. Is it training?
#
# A training that stops with an error is the lucky case. Many go on: the loss is a number, the fan is loud, and nothing is learnt.
#
# **You will see**
# - a clinic: patients with one planted fault each, which you name before a tool of eighty lines does
# - what the libraries' own detectors find of these faults, and over which they pass
# - a log that says `loss 0.0` while every loss is NaN

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import contextlib
import io
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from IPython.display import display

# %%
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.debug_utils import DebugUnderflowOverflow
from transformers.trainer_callback import PrinterCallback

from perf_helpers import Lab, claims, exercises, plots, widgets
from perf_helpers.records import CPU, Ratio

lab = Lab(profile, strict=strict, out=out, lesson="23_troubleshooting")
torch.set_num_threads(1)  # in this notebook's own process, where all tensors are small
for known in ("Full backward hook is firing", "For backward hooks to be called", "This DataLoader will create"):
    warnings.filterwarnings("ignore", known)

# %% [markdown]
# ## Idea
#
# A step is a chain: data, labels, forward, loss, backward, gradients, update, weights. A fault breaks one link, and **shows** in another: weights that are NaN may come from a division three steps ago. So we look at every link, and believe the first that is broken.
#
# Everything here runs on the CPU, with a GPU too. The model is a small Llama of two layers, the text one in which each word has one that follows it.
#
# ## Predict
#
# All labels of a data set are masked by mistake (-100 means: this position does not count). The loss is then 0/0, NaN. The Trainer logs eight steps, with its defaults.

# %%
asked = "In how many of the eight lines of the log does the loss stand as NaN?"
widgets.predict(lab, "nan", asked, "lines", 0, 8)

# %% [markdown]
# ## One script, many faults
#
# All patients share this script. Each differs in one argument. `watch` is the only line that a doctor needs in it.


# %%
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, use_cache=False
)


def texts(count=6, rows=4, length=16):
    follows = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        words = [torch.randint(64, (rows,), generator=generator)]
        for _ in range(length - 1):
            words.append(follows[words[-1]])
        ids = torch.stack(words, 1)
        yield {"input_ids": ids, "labels": ids.clone()}


def healthy(model):
    return model


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


# %%
def script(
    watch, data=texts, build=healthy, dtype=None, optim=adam, late=healthy, log=None, scale=1, meant="", tests=()
):
    torch.manual_seed(0)
    model = build(LlamaForCausalLM(CONFIG).to(dtype or torch.float32))
    optimizer, schedule = optim(model), None
    if isinstance(optimizer, tuple):
        optimizer, schedule = optimizer
    watch(late(model), optimizer, meant=meant)
    kept = []
    for batch in data():
        loss = model(**batch).loss * scale
        loss.backward()
        optimizer.step()
        if schedule:
            schedule.step()
        optimizer.zero_grad()
        kept.append(log(model, batch) if log else loss.item())
    model.eval()
    for batch in tests:
        with torch.no_grad():
            kept.append(model(**batch).logits)
    return kept


# %% [markdown]
# ## By hand: the forward pass
#
# A **hook** is a function of yours that PyTorch calls when a module has done its work. Ours asks: was what went in finite (no inf, no NaN), and what came out not? The innermost module of which this is true *made* it. Notes are kept in a dict, `seen`; only the first break of the chain is noted.


# %%
def tensors(value):
    """All tensors in what a module takes or gives: a tensor, a list, a dict, the library's outputs."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def broken(value):
    return any(one.is_floating_point() and not torch.isfinite(one).all() for one in tensors(value))


def note(seen, phase, place):
    seen.setdefault("first break", (phase, place or "the loss", len(seen["tokens"])))


# %%
def watch_forward(seen, model):
    def before(module, given, named):
        seen["phase"] = "forward" if module.training else "evaluation"
        seen["now"] = named["input_ids"].numel()
        seen["live"].append(seen.get("live now", 0))
        if module.training and "began" not in seen:
            seen["began"] = time.perf_counter()
            seen["tokens"].append(seen["now"])
            seen["labels"].append((named["labels"] != -100).sum().item())
            seen["waits"] += [seen["began"] - seen["ended"]] if "ended" in seen else []

    def after(name, module, given, named, result):
        if broken(result) and not broken((given, named)) and not broken(list(module.parameters(recurse=False))):
            note(seen, "forward", name)
        made = tensors(result)
        if made and not any(one.any() for one in made) and any(one.any() for one in tensors((given, named))):
            seen["silent"].append(name)
        if module is model:
            seen["phase"] = "backward" if module.training else "evaluation"
            seen["losses"] += [result.loss.item()] if module.training and result.loss is not None else []

    model.register_forward_pre_hook(before, with_kwargs=True)
    for name, module in model.named_modules():
        module.register_forward_hook(partial(after, name), with_kwargs=True)


# %% [markdown]
# ## By hand: the backward pass and the update
#
# The same question in the other direction: a gradient came into the module finite, and leaves it broken. Before the update we look at the gradients of all weights, afterwards at the weights. And who was to learn at all?


# %%
def watch_backward(seen, model):
    def after(name, module, leaves, came):
        if broken(leaves) and not broken(came):
            note(seen, "backward", name)

    for name, module in model.named_modules():
        module.register_full_backward_hook(partial(after, name))


def watch_update(seen, model, optimizer, meant):
    def before(*_):
        seen["phase"] = "update"
        weights = {name: weight for name, weight in model.named_parameters() if meant in name}
        mine = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        seen["meant"] = len(weights)
        seen["frozen"] = [name for name, weight in weights.items() if not weight.requires_grad]
        seen["strangers"] = [
            name for name, weight in weights.items() if weight.requires_grad and id(weight) not in mine
        ]
        seen["rates"].append(max(group["lr"] for group in optimizer.param_groups))
        grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        for name in filter(lambda name: broken(grads[name]), grads):
            note(seen, "gradient", name)
        seen["zeros"].append(statistics.median([(one == 0).float().mean().item() for one in grads.values()] or [1]))
        seen["norms"].append(sum(one.float().norm() ** 2 for one in grads.values()) ** 0.5)

    def after(*_):
        for name, weight in model.named_parameters():
            if broken(weight):
                note(seen, "update", name)
        seen["held"].append(seen.get("live now", 0))
        seen["ended"] = time.perf_counter()
        seen["steps"].append(seen["ended"] - seen.pop("began"))

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


# %% [markdown]
# ## By hand: a card that is too small
#
# Some patients run out of memory. We have no card to fill, so here is a stand-in: a *dispatch mode* sees the result of every operation, adds up the bytes that are alive, and raises what a GPU would raise. It counts; it does not allocate like a GPU, and knows nothing of fragments.


# %%
class Card(TorchDispatchMode):
    def __init__(self, room, seen):
        super().__init__()
        self.room, self.seen, self.alive = room, seen, set()

    def freed(self, key, size):
        self.alive.discard(key)
        self.seen["live now"] -= size

    def __torch_dispatch__(self, operation, types, given=(), named=None):
        result = operation(*given, **(named or {}))
        for storage in (tensor.untyped_storage() for tensor in tensors(result)):
            if (key := id(storage)) not in self.alive:
                self.alive.add(key)
                self.seen["live now"] += storage.nbytes()
                weakref.finalize(storage, self.freed, key, storage.nbytes())
        phase, live = self.seen["phase"], self.seen["live now"]
        self.seen["peaks"][phase] = max(self.seen["peaks"].get(phase, 0), live)
        if live > self.room:
            raise torch.OutOfMemoryError(f"out of memory: the stand-in has {self.room / 1e6:.2f} MB")
        return result


# %% [markdown]
# ## By hand: the machine and the other ranks
#
# Two more places to look at. Loader workers hand their batches over in `/dev/shm`, so what they hold ready must fit there. And compiling an extension needs NVIDIA's toolkit, which PyTorch looks for once, as `CUDA_HOME`.


# %%
def watch_machine(seen, loader):
    from torch.utils import cpp_extension

    seen["CUDA_HOME"] = cpp_extension.CUDA_HOME
    if loader and loader.num_workers:
        sample = sum(one.nbytes for one in tensors(loader.dataset[0]))
        ready = sample * loader.batch_size * loader.num_workers * loader.prefetch_factor
        with contextlib.suppress(OSError):  # there is none on this system
            seen["shared"] = ready, shutil.disk_usage("/dev/shm").free


def examine(script, room=None):
    """Run a script under watch; what was seen, however it ended."""
    seen = defaultdict(list, {"phase": "build", "peaks": {}, "live now": 0})

    def watch(model=None, optimizer=None, meant="", loader=None):
        watch_machine(seen, loader)
        if model:
            watch_forward(seen, model), watch_backward(seen, model), watch_update(seen, model, optimizer, meant)

    try:
        with Card(room, seen) if room else contextlib.nullcontext():
            script(watch)
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
        seen["files"] = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return seen


# %% [markdown]
# Ranks wait for each other in a **collective operation**, here an all-reduce (lesson 15). Each rank notes the shape it brings *before* it calls. Two threads of a clean process stand for two ranks, with real messages (gloo) between them. After four seconds we ask where each one stands.


# %%
def two_ranks(script, folder, _):
    store, stands = dist.HashStore(), {}

    def rank_of(rank):
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

        def allreduce(tensor):
            with (Path(folder) / str(rank)).open("a") as file:
                print(*tensor.shape, file=file)  # new
            group.allreduce([tensor]).wait()

        script(rank, allreduce)

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(2)]
    [thread.start() for thread in threads]
    until = time.monotonic() + 4
    [thread.join(max(0, until - time.monotonic())) for thread in threads]
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            frames = traceback.extract_stack(sys._current_frames()[thread.ident])
            stands[str(rank)] = [frame.name for frame in frames][-3:]
    return stands


# %%
def examine_ranks(script, name):
    with tempfile.TemporaryDirectory() as folder:
        run = lab.run(partial(two_ranks, script, folder), name, measure=("none",), use_cpu=True)
        calls = {}
        for rank in range(2):
            file = Path(folder) / str(rank)
            calls[rank] = file.read_text().splitlines() if file.exists() else []
    seen = defaultdict(list, {"calls": calls, "stands": run.value if run.ok else {}})
    if not run.ok:
        seen["error"] = run.message
    return seen


# %% [markdown]
# ## From signs to a name
#
# Each rule takes what was seen, and gives a fault's name with its evidence. The order is that of the chain: the first rule that fits wins. What fits no rule and ended with an error is "not known". A tool that has a name for everything is worth nothing.


# %%
def machine_rules(seen):
    ready, free = seen["shared"] or (0, 0)
    if ready > free:
        yield "shared memory", f"workers hold {ready / 1e6:.0f} MB ready, /dev/shm has {free / 1e6:.0f} MB"
    if any(Path(file).name == "cpp_extension.py" for file in seen["files"]) and not seen["CUDA_HOME"]:
        yield "no toolkit", "it failed in torch's cpp_extension.py, and CUDA_HOME is None"
    calls, stands = seen["calls"] or {0: [], 1: []}, seen["stands"]
    pairs = list(zip(*calls.values()))
    for number, shapes in enumerate(pairs, 1):
        if len(set(shapes)) > 1:
            yield "unequal shapes", f"call {number}: shapes {' and '.join(shapes)}"
    counts = [len(made) for made in calls.values()]
    if stands:
        late = str(counts.index(min(counts)))
        yield "a rank is late", f"calls made {counts}; rank {late} stands in {stands.get(late, ['nothing'])[-1]}"


def memory_rules(seen):
    if "OutOfMemoryError" not in (seen["error"] or ""):
        return
    tokens, held, phase = seen["tokens"], seen["held"], seen["phase"]
    if phase == "evaluation":
        yield "kept in evaluation", f"in evaluation; live bytes a batch ago and now {seen['live'][-2:]}"
    if not held:
        states = phase == "update"
        yield "states" if states else "too large a batch", f"in the first {phase}, with {tokens[-1]} tokens"
    elif tokens[-1] > 1.5 * max(tokens[:-1]):
        yield "one long batch", f"{tokens[-1]} tokens, at most {max(tokens[:-1])} before"
    elif len(held) > 2 and held[-1] > 1.05 * held[0]:
        yield "a leak", f"held after each update, in MB: {[round(size / 1e6, 2) for size in held]}"


# %%
def number_rules(seen):
    phase, place, step = seen["first break"] or ("", "", 0)
    if seen["labels"] and not max(seen["labels"]):
        yield "labels masked", f"labels that count in each batch: {seen['labels']}"
    names = {"forward": "overflow", "backward": "NaN made in backward", "gradient": "NaN made in backward"}
    if phase:
        yield names.get(phase, "update too coarse"), f"first in the {phase} of step {step}, at {place}"
    if seen["silent"]:
        yield "activations vanish", f"only zeros come out of {seen['silent'][0]}"
    if seen["zeros"] and statistics.median(seen["zeros"]) > 0.5:
        yield "gradients vanish", f"share of gradients that are exactly 0: {statistics.median(seen['zeros']):.0%}"


def learning_rules(seen):
    if seen["frozen"]:
        yield "frozen", f"{len(seen['frozen'])} weights take no gradient, e.g. {seen['frozen'][0]}"
    if seen["strangers"]:
        yield "not in the optimizer", f"{len(seen['strangers'])} weights, e.g. {seen['strangers'][0]}"
    if seen["rates"] and max(seen["rates"]) == 0:
        yield "learning rate 0", f"in each of {len(seen['rates'])} steps"
    wait, step = (statistics.median(seen[name] or [0]) for name in ("waits", "steps"))
    if wait > step:
        yield "waits for data", f"{wait * 1e3:.0f} ms for a batch, {step * 1e3:.0f} ms for its step"


def diagnose(seen):
    for rules in (machine_rules, memory_rules, number_rules, learning_rules):
        for name, evidence in rules(seen):
            return name, evidence
    return ("not known", seen["error"]) if seen["error"] else ("healthy", "every link holds")


# %%
hale = {"as it is": script, "again, with a card": partial(script, tests=texts())}
measured = {name: examine(one, room=1e12 if "card" in name else None) for name, one in hale.items()}
peaks = measured["again, with a card"]["peaks"]
print({phase: f"{size / 1e6:.2f} MB" for phase, size in peaks.items()})
for name, seen in measured.items():
    print(f"{name}: {diagnose(seen)}, losses {[round(loss, 2) for loss in seen['losses']]}")

# %% [markdown]
# The healthy one is called healthy. That is the first thing to ask of a doctor.
#
# ## First ward: numbers
#
# Open the folded cell only when you are done: it has the faults. In each table a column is a reading, and a row a patient.


# %% jupyter={"source_hidden": true}
class Root(torch.nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x.sqrt(), 0.0)  # finite, and its gradient is not


def masked():
    for batch in texts():
        yield batch | {"labels": torch.full_like(batch["labels"], -100)}


def partly_masked():  # as for answers after a prompt
    for batch in texts():
        batch["labels"][:, :8] = -100
        yield batch


def overflowing(where):
    def build(model):
        model.get_submodule(where).weight.data.fill_(3e4)
        return model

    return build


def tiny(where):
    def build(model):
        model.get_submodule(where).weight.data.mul_(1e-6)  # as in a badly converted checkpoint
        return model

    return build


def with_root(layer, made=Root):
    def build(model):
        mlp = model.model.layers[layer].mlp
        mlp.act_fn = torch.nn.Sequential(mlp.act_fn, made())
        return model

    return build


# %% jupyter={"source_hidden": true}
def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


half = dict(dtype=torch.float16)
numbers = {
    "1": ("NaN made in backward", partial(script, build=with_root(1))),
    "2": ("healthy", partial(script, data=partly_masked)),
    "3": ("update too coarse", partial(script, **half)),
    "4": ("labels masked", partial(script, data=masked)),
    "5": ("gradients vanish", partial(script, optim=sgd, scale=1e-5, **half)),
    "6": ("overflow", partial(script, build=overflowing("model.layers.1.mlp.up_proj"), optim=sgd, **half)),
    "7": ("activations vanish", partial(script, build=tiny("model.layers.0.mlp.up_proj"), optim=sgd, **half)),
}
SIGNS = {
    "healthy": "Every link of the chain holds.",
    "labels masked": "No label counts in any batch: a mean over nothing, 0/0.",
    "overflow": "The first loss is broken already, although labels count: the forward pass made inf.",
    "NaN made in backward": "The first loss is fine, the first gradients are not.",
    "update too coarse": "First loss and first gradients are fine, the next loss is not. What lies between is the update: in "
    "fp16 AdamW's 1e-8 is 0, and it divides by it.",
    "activations vanish": "A module gives nothing but zeros, though something comes in.",
    "gradients vanish": "Nearly all gradients are exactly 0, too small for the type, and no number is broken.",
}


# %%
def numbers_text(values, form="{:.2f}"):
    return " ".join(form.format(float(value)) for value in list(values)[:3])


def ward(title, patients, heads, readings, rooms={}):
    """Examine the patients, show what a training's own log could tell, and ask for each what it has."""
    found = {}
    for key, (_, script) in patients.items():
        found[key] = script if isinstance(script, Mapping) else examine(script, rooms.get(key))
    display(plots.Table(["patient", *heads], [[key, *readings(seen)] for key, seen in found.items()], title))
    for key, (fault, _) in patients.items():
        names = {
            name: why for name, why in SIGNS.items() if name in {one for one, _ in patients.values()} | {"healthy"}
        }
        exercises.question(lab, f"patient {key}", f"What has patient {key}?", names, right=fault)
    return found


heads = ["loss of three steps", "gradient norm", "labels that count", "gradients that are 0", "modules of zeros"]
found = ward(
    "Numbers",
    numbers,
    heads,
    lambda seen: [
        numbers_text(seen["losses"]),
        numbers_text(seen["norms"]),
        numbers_text(seen["labels"], "{:.0f}"),
        numbers_text(seen["zeros"], "{:.0%}"),
        len({*seen["silent"]}),
    ],
)


# %% [markdown]
# Have you named them? Then the tool:


# %%
results = {}


def rounds(patients, found):
    rows = []
    for key, (fault, _) in patients.items():
        name, evidence = diagnose(found[key])
        results[key] = (fault, name)
        rows.append([key, "✓" if name == fault else f"✗ it is: {fault}", name, evidence])
    return plots.Table(["patient", "", "the tool says", "evidence"], rows)


rounds(numbers, found)

# %% [markdown]
# Patients 1, 3 and 6 log the same NaN from the second step on. They differ in the link that broke first: gradients, update, forward. The cures differ as well: mend the operation; keep fp32 weights (lesson 07); use bf16 or smaller activations.
#
# ## Second ward: nothing learns, or slowly


# %% jupyter={"source_hidden": true}
def freeze(model, but="lm_head"):
    for name, weight in model.named_parameters():
        weight.requires_grad_(but in name)
    return model


def new_head(model):
    model.lm_head = torch.nn.Linear(64, 64, bias=False)
    return model


def long_warmup(model):
    optimizer = adam(model)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 1000)


def slow_reader():
    for batch in texts():
        time.sleep(0.3)
        yield batch


def adapters(model):
    return freeze(model, but="self_attn")


learning = {
    "8": ("not in the optimizer", partial(script, late=new_head)),
    "9": ("learning rate 0", partial(script, optim=long_warmup)),
    "10": ("frozen", partial(script, build=freeze)),
    "11": ("waits for data", partial(script, data=slow_reader)),
    "12": ("healthy", partial(script, build=adapters, meant="self_attn")),
}

# %% jupyter={"source_hidden": true}
SIGNS |= {
    "not in the optimizer": "Weights take gradients, and the optimizer was made without them: fewer are updated than learn.",
    "learning rate 0": "All is there, and each step is multiplied by 0.",
    "frozen": "Fewer weights take gradients than are meant to learn.",
    "waits for data": "Most of the time goes by between two steps.",
}


def learners(seen):
    asked, without = seen["meant"], len(seen["frozen"])
    return f"{asked - without} of {asked}, updated {asked - without - len(seen['strangers'])}"


# %%
heads = ["loss of three steps", "learning rate", "weights with gradients, of those meant", "ms of wait / of step"]
found = ward(
    "Learning",
    learning,
    heads,
    lambda seen: [
        numbers_text(seen["losses"]),
        numbers_text(seen["rates"], "{:g}"),
        learners(seen),
        f"{1e3 * statistics.median(seen['waits']):.0f} / {1e3 * statistics.median(seen['steps']):.0f}",
    ],
)

# %%
rounds(learning, found)

# %% [markdown]
# Patient 12 has few weights that learn, as one with adapters does, and says so to the tool (`meant`). What is meant to learn no tool can know; lesson 21's patient, half of it on disk, shows in the same column.
#
# ## Third ward: memory
#
# Rooms of the stand-in are set by the healthy one's peaks. Out of memory: *when*, and with how many tokens?


# %% jupyter={"source_hidden": true}
def small(count=6):
    return texts(count, rows=1, length=8)


def one_long():
    yield from texts(count=4, rows=1, length=8)
    yield from texts(count=1, rows=1, length=128)


def own_loss(model, batch):  # a figure for the log, and nobody told autograd that it is one
    return model(**batch).loss


SIGNS |= {
    "too large a batch": "The very first forward or backward pass does not fit.",
    "states": "The first pass fits and the first update does not: it makes the optimizer's states.",
    "one long batch": "It went well until a batch came that was longer than all before.",
    "kept in evaluation": "Training is over, and each batch of the evaluation stays in memory.",
    "a leak": "Batches are alike, and after each update more is held than before.",
}
memory = {
    "13": ("one long batch", partial(script, data=one_long)),
    "14": ("states", partial(script, data=small)),
    "15": ("a leak", partial(script, data=partial(texts, count=40, rows=1, length=8), log=own_loss)),
    "16": ("kept in evaluation", partial(script, data=small, tests=[*texts(count=200)])),
    "17": ("too large a batch", script),
    "18": ("healthy", partial(script, data=small, tests=[*texts(count=5, rows=1)])),
}
once, always = (examine(partial(script, data=partial(small, count)), room=1e12)["peaks"] for count in (1, 6))
room = 1.2 * max(always.values())  # enough for the healthy one
before_states = (max(once["forward"], once["backward"]) + once["update"]) / 2
rooms = dict.fromkeys(memory, room) | {"14": before_states, "17": (peaks["build"] + once["forward"]) / 2}

# %%
found = ward(
    "Memory",
    memory,
    [
        "ended with",
        "in",
        "MB alive before the last passes",
        "tokens of the last batches",
        "MB held after the first updates",
    ],
    lambda seen: [
        "out of memory" if seen["error"] else "all done",
        f"{seen['phase']}, step {len(seen['tokens'])}",
        numbers_text([size / 1e6 for size in seen["live"][-3:]]),
        numbers_text(seen["tokens"][-3:], "{:.0f}"),
        numbers_text([size / 1e6 for size in seen["held"]]),
    ],
    rooms,
)

# %%
rounds(memory, found)

# %% [markdown]
# Halving the batch size is what everybody tries first. It is the cure for one of the five. The states do not depend on it (lessons 08 and 09), the long batch wants a cut or a sort by length (lesson 12), the leak `no_grad` and `.item()`, the evaluation its argmax (lesson 20).
#
# ## Fourth ward: the machine and the others
#
# Two of these are simulated. Filling `/dev/shm` would harm your other programs: instead the loader asks for much, and 64 MB are said to be free, as in a Docker container. And `CUDA_HOME` is taken away for the moment of the building.


# %% jupyter={"source_hidden": true}
def with_workers(watch, free=64 << 20, size=2**20):
    loader = DataLoader([{"pixels": torch.zeros(size)}] * 8, batch_size=8, num_workers=4, prefetch_factor=2)
    with mock.patch("shutil.disk_usage", return_value=SimpleNamespace(free=free)):
        watch(loader=loader)
    if size > 2**16:
        raise RuntimeError("DataLoader worker (pid 4711) is killed by signal: Bus error.")  # the loader's own words


def builder(watch):
    from torch.utils import cpp_extension

    with mock.patch.object(cpp_extension, "CUDA_HOME", None):
        watch()
        cpp_extension.CUDAExtension("kernels", ["kernels.cu"])


def save_checkpoint():
    time.sleep(30)


def saving(rank, allreduce):
    for step in range(3):
        if rank == 1 and step == 2:
            save_checkpoint()
        allreduce(torch.ones(4))


def ragged(rank, allreduce):
    for step in range(3):
        allreduce(torch.ones(5 if (rank, step) == (1, 1) else 4))


def even(rank, allreduce):
    for _ in range(3):
        allreduce(torch.ones(4))


# %% jupyter={"source_hidden": true}
SIGNS |= {
    "shared memory": "A worker was killed in mid-air: what the workers hold ready does not fit /dev/shm.",
    "no toolkit": "Nothing was trained: building needs the toolkit, which pip's torch does not bring.",
    "a rank is late": "One rank made fewer calls, and the other waits for it.",
    "unequal shapes": "Both made as many calls, and in the last one they did not bring the same.",
}
machines = {
    "19": ("a rank is late", saving),
    "20": ("shared memory", with_workers),
    "21": ("unequal shapes", ragged),
    "22": ("healthy", even),
    "23": ("no toolkit", builder),
    "24": ("healthy", partial(with_workers, size=2**10)),
}
with_ranks = {"19", "21", "22"}
machines = {
    key: (fault, examine_ranks(one, f"patient {key}") if key in with_ranks else one)
    for key, (fault, one) in machines.items()
}

# %%
found = ward(
    "Machine and ranks",
    machines,
    ["ended with", "collective calls of rank 0 / 1", "shapes of the last call"],
    lambda seen: [
        str(seen["error"] or ("waits for ever" if seen["stands"] else "all done"))[:90],
        " / ".join(str(len(made)) for made in (seen["calls"] or {}).values()),
        " / ".join(made[-1] for made in (seen["calls"] or {}).values() if made),
    ],
)

# %%
rounds(machines, found)


# %% [markdown]
# ## What the libraries' detectors find
#
# transformers has a detector: `debug="underflow_overflow"`, or `DebugUnderflowOverflow(model)` in a loop of your own. Its page says that it detects inf, NaN, underflow and `loss=NaN`. PyTorch has anomaly mode: it stops where an operation's backward made a NaN. Both get the same patients.


# %%
def detector(script):
    """(module, updates made before) that transformers' detector tells; None where it says no word."""
    text, updates = io.StringIO(), []

    def watch(model, optimizer, **_):
        DebugUnderflowOverflow(model)
        optimizer.register_step_post_hook(lambda *_: updates.append(1))

    with contextlib.redirect_stdout(text), contextlib.suppress(ValueError):
        script(watch)
    named = re.findall(r"(?m)^ {18}(\S+) \w+$", text.getvalue())  # its last frame is where it stopped
    return (named[-1], len(updates)) if "Detected" in text.getvalue() else None


def anomaly(script):
    """The operation that anomaly mode names; None where it says no word."""
    with warnings.catch_warnings(action="ignore"), torch.autograd.set_detect_anomaly(True):
        try:
            script(lambda *_, **__: None)
        except RuntimeError as error:
            return re.search(r"'(\w+)' returned nan", str(error))[1]


rows = []
for key, (fault, sick) in numbers.items():
    told = detector(sick)
    words = f"{told[0]}, after {told[1]} updates" if told else "no word"
    rows.append([key, fault, words, anomaly(sick) or "no word", diagnose(examine(sick))[1]])
plots.Table(["patient", "fault", "transformers' detector", "anomaly mode", "ours"], rows)

# %% [markdown]
# Read it by rows. The overflow is named rightly. Of masked labels, the NaN loss, the detector says nothing; nor of what vanishes, in either direction: it tests for inf and NaN alone (`detect_overflow` in `debug_utils.py`), whatever its name says. For the NaN made in backward, and for the coarse update, it speaks one update too late and of the embedding, whose weights are the first that the next forward meets.
#
# Why not of the NaN loss? Its hook, `create_frame`, looks into tensors and tuples. A model of the library returns neither, but a dict with names (`ModelOutput`): "not a tensor".
#
# Each statement, with more than one planted fault:

# %%
OVERFLOWS = [f"model.layers.{n}.{part}" for n, part in enumerate(["self_attn.q_proj", "mlp.up_proj"])]
OVERFLOWS += ["model.layers.0.mlp.gate_proj", "lm_head"]


def overflow(where):
    return partial(script, build=overflowing(where), optim=sgd, **half)


vanishing = [numbers["5"][1], numbers["7"][1]]
rightly = [detector(overflow(where)) == (where, 0) for where in OVERFLOWS]
assert all(examine(overflow(where))["first break"][1] == where for where in OVERFLOWS)
underflows = [detector(sick) is not None for sick in vanishing]
begun = [detector(partial(script, build=with_root(layer))) for layer in (0, 1)]
where_it_began = [told == (f"model.layers.{layer}.mlp.act_fn.1", 0) for layer, told in enumerate(begun)]
print(f"overflows {rightly}, underflows {underflows}, backward {begun}")


# %% [markdown]
# And the Trainer's log, of a training in which every label is masked:


# %%
class Opening(DebugUnderflowOverflow):
    def create_frame(self, module, given, result):  # new: a dict is opened
        super().create_frame(module, given, tuple(result.values()) if isinstance(result, Mapping) else result)


def logged(steps=8, opening=False, **options):
    """(losses logged, losses that were NaN, whether the detector spoke) of a training whose labels are all masked."""
    torch.manual_seed(0)
    model, nan = LlamaForCausalLM(CONFIG), []
    if opening:
        Opening(model)
    model.register_forward_hook(lambda _, __, result: nan.append(result[0].isnan().item()))
    rows = [{name: one[0] for name, one in batch.items()} for batch in masked()] * steps
    quiet = dict(report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, logging_steps=1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(folder, max_steps=steps, **quiet, **options)
        arguments._n_gpu = min(1, arguments.n_gpu)
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        except ValueError as error:
            return [], sum(nan), "DebugUnderflowOverflow" in str(error)
    return [float(row["loss"]) for row in trainer.state.log_history if "loss" in row], sum(nan), False


# %%
ways = {
    "the defaults": {},
    "logging_nan_inf_filter=False": dict(logging_nan_inf_filter=False),
    "debug": dict(debug="underflow_overflow"),
    "a detector that opens dicts": dict(opening=True),
}
logs = {name: logged(**options) for name, options in ways.items()}
rows = [[name, " ".join(map(str, lines)), nan, "yes" if spoke else "no"] for name, (lines, nan, spoke) in logs.items()]
display(plots.Table(["way", "loss in the log", "losses that were NaN", "the detector spoke"], rows))
lines, nan, _ = logs["the defaults"]
seen_as_nan = sum(line != line for line in lines)
widgets.revealed(lab, "nan", seen_as_nan)

# %% [markdown]
# Where a loss is NaN the Trainer logs the mean of the valid ones since the last line (`logging_nan_inf_filter`, on by default). There are none, so it is 0.0. It came for speech models, [off by default](https://github.com/huggingface/transformers/pull/13619); people still [lose runs](https://github.com/huggingface/trl/issues/6702) to it. The cure is in the second row. The last row is a detector of four more lines, which opens dicts: it stops at the first NaN loss.
#
# ## Anomaly mode, and what watching costs


# %%
class Power(torch.nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x**0.5, x)


class Share(torch.nn.Module):
    def forward(self, x):
        whole = x.sum(-1, keepdim=True) * 0
        return torch.where(whole > 0, x / whole, x)  # guarded, one would think


class Log(torch.nn.Module):
    def forward(self, x):
        positive = x.relu()  # whose backward puts a 0 wherever x is not above 0
        return torch.where(x > 0, positive.log(), x)


made = {Root: "SqrtBackward0", Power: "PowBackward0", Share: "DivBackward0", Log: "LogBackward0"}
sick = {one: partial(script, build=with_root(1, one)) for one in made}
operations = {one: anomaly(sick[one]) for one in made}
rows = [[one.__name__, operations[one], *diagnose(examine(sick[one]))] for one in made]
plots.Table(["planted", "anomaly mode names", "the tool says", "evidence"], rows)

# %% [markdown]
# All four are named, with the line of the forward pass (here hidden; it comes as a warning). The last alarm is false: that NaN is discarded one operation later, and no weight ever sees it. And anomaly mode tests for NaN alone: a gradient of inf passes.


# %%
WIDE = LlamaConfig(**CONFIG.to_diff_dict() | dict(hidden_size=256, intermediate_size=512))


def step_seconds(prepare, steps=3):
    """CPU seconds of the fastest of some steps."""
    torch.manual_seed(0)
    model, seconds = LlamaForCausalLM(WIDE), []
    optimizer = torch.optim.AdamW(model.parameters())
    context = prepare(model, optimizer) or contextlib.nullcontext()
    with warnings.catch_warnings(action="ignore"), context:
        for batch in texts(count=steps + 1, rows=8, length=32):
            began = time.thread_time()
            model(**batch).loss.backward()
            optimizer.step(), optimizer.zero_grad()
            seconds.append(time.thread_time() - began)
    return min(seconds[1:])


def ours(model, optimizer):
    examine(lambda watch: watch(model, optimizer))


# %%
ways = {
    "no watch": lambda *_: None,
    "transformers' detector": lambda model, _: DebugUnderflowOverflow(model) and None,
    "anomaly mode": lambda *_: torch.autograd.set_detect_anomaly(True),
    "ours": ours,
}
turns = [{name: step_seconds(way) for name, way in ways.items()} for _ in range(7)]
costs = {name: Ratio.of_pairs([turn[name] / turn["no watch"] for turn in turns], 1.05) for name in ways}
rows = [[name, f"{cost.value:.2f}", f"{cost.low:.2f} to {cost.high:.2f}"] for name, cost in costs.items()]
plots.Table(["way", "CPU time of a step, in times that without", "interval"], rows)

# %% [markdown]
# Watching is for some steps, not for all. On a GPU each `.item()` also waits for the device. The detector's share shrinks as batches grow, since much of its work is with the weights.
#
# ## What held

# %% tags=["claim"]
planted = [names for names in results.values() if names[0] != "healthy"]
alarms = sum(said != "healthy" for fault, said in results.values() if fault == "healthy")
named = sum(fault == said for fault, said in planted) - alarms
note = f"{len(planted)} faults, {len(results) - len(planted)} healthy patients, {alarms} false alarms"
display(claims.check("troubleshooting", named / len(planted), note=note))
display(claims.check("debug-overflow", sum(rightly) / len(rightly), note=", ".join(OVERFLOWS)))
display(claims.check("debug-underflow", sum(underflows) / len(underflows), note="a word of any kind would count"))
ways_spoken = [detector(numbers["4"][1]) is not None, logs["debug"][2]]
display(claims.check("debug-nan-loss", sum(ways_spoken) / 2, note="a loop of one's own, and the Trainer"))
claims.check("debug-backward", sum(where_it_began) / 2, note=f"named after one update: {begun[0][0]}")

# %% tags=["claim"]
display(claims.check("nan-is-logged", seen_as_nan / nan, note=f"logged: {lines}"))
right_names = sum(operations[one] == name for one, name in made.items())
display(
    claims.check(
        "anomaly-names-it", right_names / len(made), note="NaN made in backward; of other faults it says nothing"
    )
)
claims.check("debug-cost", costs["transformers' detector"], note=f"anomaly mode {costs['anomaly mode'].value:.2f}")

# %% [markdown]
# ## Explore
#
# In which type, and at which scale of the loss, do gradients vanish? A **loss scaler** (lesson 07) multiplies the loss for that reason.


# %% tags=["widget"]
def draw(dtype, layer):
    scales, shares = [10.0**-power for power in range(8)], []
    for scale in scales:
        torch.manual_seed(0)
        model = LlamaForCausalLM(CONFIG).to(getattr(torch, dtype))
        (model(**next(texts())).loss * scale).backward()
        zeros = [(weight.grad == 0).float().mean().item() for weight in model.model.layers[layer].parameters()]
        shares.append(100 * statistics.mean(zeros))
    labels = [f"1e-{power}" for power in range(8)]
    return plots.lines(
        labels, {dtype: shares}, "the loss is multiplied by", "% of gradients that are 0", title=f"layer {layer}"
    )


_ = widgets.explore(draw, dtype=["float16", "bfloat16", "float32"], layer=[0, 1])

# %% [markdown]
# ## Exercise: three at once
#
# This script runs, and three things are wrong with it. The task: after four given words, say the twelve that follow, with a head of one's own.


# %%
def reader():
    for batch in texts(rows=8):
        until = time.thread_time() + 0.1  # a tokenizer at work
        while time.thread_time() < until:
            pass
        yield batch


def job(watch):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.lm_head = torch.nn.Linear(64, 64, bias=False)
    watch(model, optimizer)
    for _ in range(10):
        for batch in reader():
            batch["labels"][:, 1:] = -100  # the prompt does not count
            model(**batch).loss.backward()
            optimizer.step(), optimizer.zero_grad()
    return model


display(diagnose(examine(job)))
exercises.hint(
    "Mend what the tool names, and examine again. It tells one fault at a time.",
    "Four words are given. Which labels must not count? And which weights does the optimizer know?",
    "How often is each batch tokenized? Keep a list.",
)


# %% [markdown]
# Give a mended `job`. It is graded by measurement: the loss on unseen answers below 1, at half the speed of a loop without any reader or more (samples for each CPU second), and healthy.

# %% tags=["exercise"]
answer = None  # def job(watch): ..., then: answer = job


# %% tags=["check"]
def samples_per_second(script, samples=480):
    began, made = time.thread_time(), []
    seen = examine(lambda watch: made.append(script(watch)))
    return samples / (time.thread_time() - began), seen, made


def check(answer):
    if answer is None:
        return exercises.not_attempted()
    speed, seen, made = samples_per_second(answer)
    if seen["error"] or not isinstance(made[0], torch.nn.Module):
        return exercises.wrong(seen["error"] or "the job must return its model")
    with mock.patch.dict(globals(), reader=lambda ready=[*reader()]: iter(ready)):
        best, *_ = samples_per_second(job)  # as sick as before, and its reader is free
    unseen = [*texts(count=12, rows=8)][-1]
    unseen["labels"][:, :4] = -100
    with torch.no_grad():
        loss = made[0].eval()(**unseen).loss.item()
    fault, evidence = diagnose(seen)
    said = f"loss {loss:.2f}, {speed / best:.2f} of the speed, the tool says: {fault}"
    if loss < 1 and speed > best / 2 and fault == "healthy":
        return exercises.right(said)
    return exercises.wrong(f"{said} ({evidence})")


exercises.check(lab, "three", check, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def mended(watch, keep=True):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    model.lm_head = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch(model, optimizer)
    ready = [*reader()] if keep else None
    for _ in range(10):
        for batch in ready or reader():
            batch["labels"][:, :4] = -100
            model(**batch).loss.backward()
            optimizer.step(), optimizer.zero_grad()
    return model


exercises.prove(check, solution=mended, mistake=partial(mended, keep=False))

# %% [markdown]
# **Challenge.** Plant a fault that the tool calls healthy: shuffled labels, say, or a model left in `eval()`. Then write the reading and the rule that find it, and see that no healthy patient is called sick by it.
#
# ## Mistakes that strangers make
#
# - *"Loss 0.0, so it has learnt."* Above, eight lines of it were eight NaN.
# - *`torch.cuda.empty_cache()` in the loop, against out of memory.* It gives back what no tensor uses. Each of the five faults above is about bytes in use.
# - *Half the batch size, whatever ran out.* It was the cure for one of five.
# - *The module that is named is the culprit.* The embedding was named for what another layer had done one update before.
# - *Anomaly mode left on.* Look at what it costs.
#
# Left out: faults of NCCL and of cards (a hot one, a broken link) need what we do not have. In a terminal, `perf-helpers doctor` tells what the machine has; a lab that runs into its time limit says in which line each rank stood.
#
# ## Recap
#
# - Every link was looked at, and the first that broke was believed. All planted faults were named by their evidence, and no healthy patient was called sick.
# - The detector named overflows, and passed over underflow and the NaN loss of the library's own models. What began in backward it told one update late.
# - The Trainer logged 0.0 for each NaN. `logging_nan_inf_filter=False` shows them.

# %% tags=["finish"]
claims.finish(lab)
