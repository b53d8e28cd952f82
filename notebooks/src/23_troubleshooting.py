# %% [markdown]
# # It runs. Is it training?
#
# Your training has run for an hour. There was no error, the loss is a number, the fan is loud. Does it learn anything? A training that stops with an error is the lucky case. Many go on and learn nothing, and the fault shows far from its cause. In this lesson you build a tool that checks every link of a training step, and try it on patients with planted faults.
#
# **You will see**
# - a clinic: patients (training scripts) with at most one planted fault each, which you name before your own tool does
# - which of these faults the libraries' own detectors find, and which they pass over
# - what the Trainer's log shows if every loss is NaN
#
# **Time:** plan 60 minutes. The cells run for half a minute on two CPU cores.
#
# **Before you start:** lesson 07 (fp16, the loss scaler) and, for the faults of several ranks, lesson 15.
#
# **What a CPU cannot show:** how a GPU's allocator fragments memory (without a GPU the lesson shows an estimate), and failures of NCCL or of hot and broken cards. All patients are examined on the CPU, even if there is a GPU.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import contextlib
import io
import re
import shutil
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from IPython.display import display
from transformers import LlamaConfig, LlamaForCausalLM

from perf_helpers import Claims, Lab, Task, exercises, plots, widgets
from trainmem.estimate import estimate

lab = Lab(profile, strict=strict, out=out, lesson="23_troubleshooting")
claims = Claims(lab)
torch.set_num_threads(1)  # in this notebook's own process, where all tensors are small
warnings.filterwarnings("ignore", "(Full backward hook is firing|For backward hooks|This DataLoader will create)")

# %% [markdown]
# ## Idea
#
# A step is a chain: data, labels, forward, loss, backward, gradients, update, weights. A fault breaks one link, and **shows** in another: weights that are NaN may come from a division one step earlier. So the tool looks at every link, and believes the first that is broken.
#
# All patients share one script. They differ in its arguments, for example the data, the optimizer, or a change of the model before the optimizer is created (`build`) or after it (`late`). The tool needs only one line of the script: the call of `watch`. The model is a small Llama of two layers. In the training texts each word determines the next word.
#
# ## Predict
#
# All labels of a data set are masked by mistake (-100 means that a position does not count). The loss is a mean over the positions that count. No position counts, so the loss is 0/0, which is NaN. The Trainer trains eight steps and logs each of them, otherwise with its defaults.

# %%
question = "In how many of the eight lines of the log is the loss NaN?"
widgets.predict(lab, "nan", question, "lines", 0, 8)

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
CONFIG = LlamaConfig(vocab_size=64, use_cache=False, **SIZES)


def texts(count=6, rows=4, length=16):
    follows = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        words = [torch.randint(64, (rows,), generator=generator)]
        for _ in range(length - 1):
            words.append(follows[words[-1]])
        ids = torch.stack(words, 1)
        yield {"input_ids": ids, "labels": ids.clone()}


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


# %%
def script(watch, data=texts, build=None, half=False, optim=adam, late=None, log=None, scale=1, meant="", tests=()):
    """Train a model on the batches of `data()`, then evaluate it on the batches `tests`.

    half: train in fp16; scale: a factor of the loss; log: a function that returns what a step adds to the log;
    meant: a part of the names of the weights that are meant to learn ("": all of them).
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(torch.float16 if half else torch.float32)
    if build:
        build(model)
    optimizer = optim(model)
    if late:
        late(model)
    watch(model, optimizer, meant=meant)
    log_entries = []
    for batch in data():
        loss = model(**batch).loss * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log_entries.append(log(model, batch) if log else loss.item())
    model.eval()
    for batch in tests:
        with torch.no_grad():
            log_entries.append(model(**batch).logits)


# %% [markdown]
# ## By hand: look at every link
#
# A **hook** is a function of yours that PyTorch calls when a module has done its work. Our hooks compare a module's inputs and outputs. If the inputs and the module's own weights are finite (no inf, no NaN) and the outputs are not, the module *made* the break. The hooks of inner modules run first, and the tool keeps only the first break: so it names the innermost module. Backward works in the same way: a finite gradient comes in, and a broken one goes out. Before the update the tool looks at all gradients, after the update at the weights. It also checks which weights are meant to learn, and whether they do. The notes go into a dict, `seen`.


# %%
def tensors(value):
    """Return all tensors in a module's input or output: a tensor, a list, a dict, the library's outputs."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def broken(*values):
    return any(one.is_floating_point() and not torch.isfinite(one).all() for one in tensors(values))


def is_zero(*values):
    return not any(one.any() for one in tensors(values))


def note(seen, phase, place):
    seen.setdefault("first break", (phase, place or "the loss", len(seen["tokens"])))


# %%
def watch_steps(seen, model):
    def before(module, given, named):
        seen["phase"] = "forward" if module.training else "evaluation"
        seen["train" if module.training else "eval"].append(seen["bytes now"])  # alive when the pass begins
        if module.training and "began" not in seen:
            seen["began"] = time.perf_counter()
            seen["tokens"].append(named["input_ids"].numel())
            seen["labels"].append((named["labels"][:, 1:] != -100).sum().item())  # no word comes before the first
            seen["waits"] += [seen["began"] - seen["ended"]] if "ended" in seen else []

    def after(module, given, result):
        if module.training:
            seen["phase"] = "backward"
            seen["losses"].append(result.loss.item())

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)


# %%
def watch_modules(seen, model):
    def forward(name, module, given, named, result):
        if broken(result) and not broken(given, named, [*module.parameters(recurse=False)]):
            note(seen, "forward", name)
        if tensors(result) and is_zero(result) and not is_zero(given, named):
            seen["only zeros"].append(name)

    def backward(name, module, outgoing, incoming):
        if broken(outgoing) and not broken(incoming):
            note(seen, "backward", name)

    for name, module in model.named_modules():
        module.register_forward_hook(partial(forward, name), with_kwargs=True)
        module.register_full_backward_hook(partial(backward, name))


# %%
def watch_update(seen, model, optimizer, meant):
    def before(*_):
        seen["phase"] = "update"
        optimized = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        learners = {name: weight for name, weight in model.named_parameters() if meant in name}
        seen["meant"] = len(learners)
        seen["frozen"] = [name for name, weight in learners.items() if not weight.requires_grad]
        seen["left out"] = [name for name, one in learners.items() if one.requires_grad and id(one) not in optimized]
        seen["rates"].append(max(group["lr"] for group in optimizer.param_groups))
        grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        [note(seen, "gradient", name) for name, one in grads.items() if broken(one)]
        seen["zeros"].append(median([(one == 0).float().mean().item() for one in grads.values()] or [1]))
        seen["norms"].append(sum(one.float().norm().item() ** 2 for one in grads.values()) ** 0.5)

    def after(*_):
        [note(seen, "update", name) for name, weight in model.named_parameters() if broken(weight)]
        seen["held"].append(seen["bytes now"])  # alive after the update
        seen["ended"] = time.perf_counter()
        seen["steps"].append(seen["ended"] - seen.pop("began"))

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


# %% [markdown]
# ## By hand: memory, the machine, the other ranks
#
# - **Memory.** Some patients run out of it. The lesson fills no real card. A *dispatch mode* simulates one with a capacity in bytes. It sees the result of every operation, adds up the bytes that are alive, and raises the error that a GPU would raise. It counts bytes and knows nothing of fragmentation.
# - **The machine.** The workers of a DataLoader pass batches through shared memory (the folder `/dev/shm`), so the batches that they hold ready must fit there. Compiling an extension, a module of your own in C++ or CUDA, needs NVIDIA's toolkit, whose folder PyTorch keeps in `CUDA_HOME`.
# - **Other ranks.** Ranks wait for each other in a **collective operation**, here an all-reduce (lesson 15). Each rank notes the shape of its tensor *before* the call. Two threads of a fresh subprocess play two ranks, with real messages (gloo) between them. After four seconds the tool looks up in which function each thread is.
#
# **From signs to a name.** Each rule takes the notes, and returns a fault's name with its evidence. The function `diagnose` asks the rules for the machine and the ranks first, then those for memory, then those for the chain. The first rule that fits wins. If a script ended with an error and no rule fits, the fault is "not known": a tool that has a name for everything is no use.

# %%
import weakref

from torch.utils._python_dispatch import TorchDispatchMode


class Card(TorchDispatchMode):
    def __init__(self, capacity, seen):
        super().__init__()
        self.capacity, self.seen, self.alive = capacity, seen, set()

    def freed(self, key, size):
        self.alive.discard(key)
        self.seen["bytes now"] -= size

    def __torch_dispatch__(self, operation, types, given=(), named=None):
        result, seen = operation(*given, **(named or {})), self.seen
        for storage in (tensor.untyped_storage() for tensor in tensors(result)):
            if (key := id(storage)) not in self.alive:
                self.alive.add(key)
                seen["bytes now"] += storage.nbytes()
                weakref.finalize(storage, self.freed, key, storage.nbytes())
        seen["peaks"][seen["phase"]] = max(seen["peaks"].get(seen["phase"], 0), seen["bytes now"])
        if seen["bytes now"] > self.capacity:
            raise torch.OutOfMemoryError(f"out of memory: the simulated card has {self.capacity / 1e6:.2f} MB")
        return result


# %%
from torch.utils import cpp_extension  # its warning, if there is no CUDA, is no fault here


def examine(script, capacity=None):
    """Run a script under watch; return the notes, however it ended."""
    seen = defaultdict(list, {"phase": "build", "peaks": {}, "calls": {}, "bytes now": 0})

    def watch(model=None, optimizer=None, meant="", loader=None):
        seen["CUDA_HOME"] = cpp_extension.CUDA_HOME
        if loader and loader.num_workers:
            sample = sum(one.nbytes for one in tensors(loader.dataset[0]))
            seen["ready"] = sample * loader.batch_size * loader.num_workers * loader.prefetch_factor
            with contextlib.suppress(OSError):  # not on every system
                seen["free"] = shutil.disk_usage("/dev/shm").free
        if model:
            watch_steps(seen, model), watch_modules(seen, model), watch_update(seen, model, optimizer, meant)

    try:
        with Card(capacity, seen) if capacity else contextlib.nullcontext():
            script(watch)
    except Exception as error:
        seen["error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
        seen["files"] = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return seen


# %%
import sys
import threading


def two_ranks(script, folder, _):
    store, patience = torch.distributed.HashStore(), torch.distributed.constants.default_pg_timeout

    def rank_of(rank):
        group = torch.distributed.ProcessGroupGloo(store, rank, 2, patience)

        def allreduce(tensor):
            with (folder / str(rank)).open("a") as file:
                print(*tensor.shape, file=file)  # before the call, which may never return
            group.allreduce([tensor]).wait()

        script(rank, allreduce)

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(2)]
    [thread.start() for thread in threads]
    until, stuck_at = time.monotonic() + 4, {}
    for rank, thread in enumerate(threads):
        thread.join(max(0, until - time.monotonic()))
        if thread.is_alive():
            stuck_at[str(rank)] = traceback.extract_stack(sys._current_frames()[thread.ident])[-1].name
    return stuck_at


# %%
def examine_ranks(script, name):
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        run = lab.run(partial(two_ranks, script, folder), name, measure="value", use_cpu=True)
        files = {rank: folder / str(rank) for rank in range(2)}
        calls = {rank: file.read_text().splitlines() if file.exists() else [] for rank, file in files.items()}
    seen = defaultdict(list, {"calls": calls, "stuck": run.value if run.ok else {}})
    seen["error"] = [] if run.ok else run.message
    return seen


# %%
def outside_rules(seen):
    if seen["free"] and seen["ready"] > seen["free"]:
        yield "shared memory", f"workers hold {seen['ready'] / 1e6:.0f} MB ready, {seen['free'] / 1e6:.0f} are free"
    if any(Path(file).name == "cpp_extension.py" for file in seen["files"]) and not seen["CUDA_HOME"]:
        yield "no toolkit", "it failed in torch's cpp_extension.py, and CUDA_HOME is None"
    for number, shapes in enumerate(zip(*seen["calls"].values()), 1):
        if len(set(shapes)) > 1:
            yield "unequal shapes", f"call {number}: shapes {' and '.join(shapes)}"
    if seen["stuck"]:
        late, made = min(seen["calls"].items(), key=lambda item: len(item[1]))
        yield "a rank is late", f"{len(made)} calls of rank {late}; it is in {seen['stuck'].get(str(late), 'nothing')}"


def memory_rules(seen):
    tokens, held, kept = seen["tokens"], seen["held"], seen["eval"]
    if "OutOfMemory" not in str(seen["error"]):
        return
    if len(kept) > 2 and kept[-1] > kept[0]:
        yield "kept in evaluation", f"{kept[0]:,} bytes before its first batch, {kept[-1]:,} before its last"
    elif not held or kept:
        yield "states" if seen["phase"] == "update" else "too large a batch", f"in the first {seen['phase']}"
    elif tokens[-1] > 1.5 * max(tokens[:-1]):
        yield "one long batch", f"{tokens[-1]} tokens, at most {max(tokens[:-1])} before"
    elif held[-1] > 1.05 * held[0]:
        yield "a leak", f"{held[0]:,} bytes are held after the first update, {held[-1]:,} after the last"


# %%
def chain_rules(seen):
    phase, place, step = seen["first break"] or ("", "", 0)
    if 0 in seen["labels"][: step or None]:  # before the first break, or with it
        yield "labels masked", f"no label counts in {seen['labels'].count(0)} of {len(seen['labels'])} batches"
    if phase:
        kind = {"forward": "overflow", "update": "update too coarse"}.get(phase, "NaN made in backward")
        yield kind, f"first in the {phase} of step {step}, at {place}"
    if seen["only zeros"]:
        yield "activations vanish", f"only zeros come out of {seen['only zeros'][0]}"
    if seen["zeros"] and median(seen["zeros"]) > 0.5:
        yield "gradients vanish", f"{median(seen['zeros']):.0%} of gradients are exactly 0"
    for kind, names in {"frozen": seen["frozen"], "not in the optimizer": seen["left out"]}.items():
        if names:
            yield kind, f"{len(names)} of {seen['meant']} weights, e.g. {names[0]}"
    if seen["rates"] and not any(seen["rates"]):
        yield "learning rate 0", f"in each of {len(seen['rates'])} steps"
    if seen["waits"] and (wait := median(seen["waits"])) > (step := median(seen["steps"])):
        yield "waits for data", f"{wait * 1e3:.0f} ms for a batch, {step * 1e3:.0f} ms for its step"


def diagnose(seen):
    for rules in (outside_rules, memory_rules, chain_rules):
        for name, evidence in rules(seen):
            return name, evidence
    return ("not known", seen["error"]) if seen["error"] else ("healthy", "every link holds")


# %%
def three(values, form="{:.2f}"):
    return " ".join(form.format(value) for value in values[:3])


READINGS = {
    "loss": lambda seen: three(seen["losses"]),
    "gradient norm": lambda seen: three(seen["norms"]),
    "labels that count": lambda seen: three(seen["labels"], "{}"),
    "gradients that are 0": lambda seen: three(seen["zeros"], "{:.0%}"),
    "modules that give only 0": lambda seen: len({*seen["only zeros"]}),
    "learning rate": lambda seen: three(seen["rates"], "{:g}"),
    "weights meant to learn": lambda seen: seen["meant"],
    "of these, with a gradient": lambda seen: seen["meant"] - len(seen["frozen"]),
    "of these, in the optimizer": lambda seen: seen["meant"] - len(seen["frozen"]) - len(seen["left out"]),
    "ms of wait": lambda seen: f"{1e3 * median(seen['waits']):.0f}",
    "ms of a step": lambda seen: f"{1e3 * median(seen['steps']):.0f}",
    "how it ended": lambda seen: str(seen["error"] or ("never" if seen["stuck"] else "as it should"))[:100],
    "where it ended": lambda seen: f"{seen['phase']}, step {len(seen['tokens'])}",
    "tokens, last batches": lambda seen: three(seen["tokens"][-3:], "{}"),
    "KB alive, last passes": lambda seen: three([size / 1e3 for size in (seen["train"] + seen["eval"])[-3:]], "{:.0f}"),
    "KB held after updates": lambda seen: three([size / 1e3 for size in seen["held"]], "{:.0f}"),
    "calls of ranks": lambda seen: " / ".join(str(len(made)) for made in seen["calls"].values()),
    "last shapes": lambda seen: " / ".join(made[-1] for made in seen["calls"].values() if made),
}

# %% [markdown]
# ## The clinic
#
# The faults are in sealed cells. Run these cells, and unfold their code only when you are done. (They also define helpers that later cells use, such as `masked`, `small` and `new_head`.) A *ward* is a group of patients. Its table has a row for each patient and a column for each reading, most of them from the first three steps. Each step gets another batch, so the loss changes a little even if no weight does. *Weights* are counted as tensors: the model has 21. Some signs are consequences of others: a module whose input is NaN may give only zeros. The questions ask what each patient has, and the answer also shows what the tool says. Some patients are healthy. The next cell prints what the tool says of a healthy one, and the peak memory of that patient in each phase.
#
# Three names of faults need a word. *Overflow*: the forward pass makes the first inf or NaN. *Update too coarse*: the optimizer update makes it, here because the weights are in fp16. This type is too coarse for AdamW's epsilon, and rounds it to 0. *States*: the optimizer states do not fit into memory.


# %%
results = {}


def ward(title, patients, columns, capacities=None):
    """Examine the patients, show some readings, and ask what each of them has."""
    found = {}
    for key, (_, one) in patients.items():
        found[key] = one if isinstance(one, Mapping) else examine(one, (capacities or {}).get(key))
    names = list(READINGS)
    heads = [name for column in columns for name in names[column]]
    rows = [[key, *(READINGS[head](seen) for head in heads)] for key, seen in found.items()]
    display(plots.Table(["patient", *heads], rows, title))
    for key, (fault, _) in patients.items():
        name, evidence = diagnose(found[key])
        results[key] = [key, fault, name, evidence]
        options = {kind: SIGNS[kind] for kind in sorted({kind for kind, _ in patients.values()})}
        options[fault] += f" The tool says: {name}; {evidence}."
        exercises.question(lab, f"patient {key}", f"What does patient {key} have?", options, right=fault)


peaks = examine(partial(script, tests=texts()), capacity=1e12)["peaks"]
print("healthy:", diagnose(examine(script)), {phase: f"{size / 1e6:.2f} MB" for phase, size in peaks.items()})

# %% jupyter={"source_hidden": true}
SIGNS = {
    "healthy": "Every link of the chain holds.",
    "labels masked": "In a batch no label counts: a mean over nothing, 0/0.",
    "overflow": "The first loss is broken already, although labels count: the forward pass made inf.",
    "NaN made in backward": "The first loss is fine, the first gradients are not.",
    "update too coarse": "First loss and gradients are fine, the next loss is not. Between them is the update: in fp16 AdamW's "
    "1e-8 is 0, and it divides by it.",
    "gradients vanish": "Gradients are exactly 0, too small for the type, and no number is broken.",
    "activations vanish": "A module gives nothing but zeros, though something comes in.",
    "not in the optimizer": "A weight takes gradients, and the optimizer was made without it.",
    "learning rate 0": "Gradients are there, and each update is multiplied by 0.",
    "frozen": "Fewer weights take gradients than are meant to learn.",
    "waits for data": "Most of the time goes by between two steps.",
    "too large a batch": "The very first forward or backward pass does not fit.",
    "states": "The first pass fits and the first update does not: it makes the optimizer's states.",
    "one long batch": "It went well until a batch came that was longer than all before.",
    "kept in evaluation": "Training is over, and each batch of the evaluation stays in memory.",
    "a leak": "Batches are alike, and after each update more is held than before.",
    "shared memory": "A worker was killed: the batches that workers hold ready do not fit /dev/shm.",
    "no toolkit": "Building needs the toolkit, which pip's torch does not bring.",
    "a rank is late": "One rank made fewer calls, and the other waits for it.",
    "unequal shapes": "Both ranks made as many calls, and the last one had different shapes.",
}


# %% jupyter={"source_hidden": true}
class Root(torch.nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x.sqrt(), 0.0)  # finite, and its gradient is not


def masked(until=16):
    for batch in texts():
        batch["labels"][:, :until] = -100
        yield batch


def filled(model, where, value):
    weight = model.get_submodule(where).weight.data
    weight.fill_(value) if value > 1 else weight.mul_(value)


def with_module(model, layer, made):
    mlp = model.model.layers[layer].mlp
    mlp.act_fn = torch.nn.Sequential(mlp.act_fn, made())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# %% jupyter={"source_hidden": true}
halved, up_projs = partial(script, half=True, optim=sgd), [f"model.layers.{layer}.mlp.up_proj" for layer in (0, 1)]
numbers = {
    "1": ("NaN made in backward", partial(script, build=partial(with_module, layer=1, made=Root))),
    "2": ("healthy", partial(script, data=partial(masked, 8))),  # as for answers after a prompt
    "3": ("update too coarse", partial(script, half=True)),
    "4": ("labels masked", partial(script, data=masked)),
    "5": ("gradients vanish", partial(halved, scale=1e-5)),
    "6": ("overflow", partial(halved, build=partial(filled, where=up_projs[1], value=3e4))),
    "7": ("activations vanish", partial(halved, build=partial(filled, where=up_projs[0], value=1e-6))),
}
ward("First ward: numbers", numbers, [slice(5)])

# %% [markdown]
# Besides the patient whose labels are masked, three patients of this ward log NaN, at the latest from the second step on. In each of the three a different link broke first, so the cures differ, too. If the gradients broke first, fix the operation that made the NaN. If the update did, keep the weights in fp32 (lesson 07). If the forward pass did, use bf16 or smaller activations.
#
# **Explore** the vanishing gradients: in which type, and at which scale of the loss, do they become 0? A *loss scaler* (lesson 07) multiplies the loss for that reason.


# %% tags=["widget"]
def draw(dtype, layer):
    shares, labels = [], [f"1e-{power}" for power in range(8)]
    for scale in map(float, labels):
        torch.manual_seed(0)
        model = LlamaForCausalLM(CONFIG).to(getattr(torch, dtype))
        (model(**next(texts())).loss * scale).backward()
        zeros = [(weight.grad == 0).float().mean().item() for weight in model.model.layers[layer].parameters()]
        shares.append(100 * sum(zeros) / len(zeros))
    return plots.lines(range(8), {dtype: shares}, "loss multiplied by 10^-n, n =", "% of gradients that are 0")


_ = widgets.explore(draw, dtype=["float16", "bfloat16", "float32"], layer=[0, 1])


# %% jupyter={"source_hidden": true}
def freeze(model, but):
    for name, weight in model.named_parameters():
        weight.requires_grad_(but in name)


def new_head(model):
    model.lm_head = torch.nn.Linear(64, 64, bias=False)


def warmed_up(model, steps=0):
    return torch.optim.AdamW(model.parameters(), lr=3e-3 * (steps // 1000))


def slow_reader():
    for batch in texts():
        time.sleep(0.3)
        yield batch


heads, attention = partial(freeze, but="lm_head"), partial(freeze, but="self_attn")
learning = {"8": ("not in the optimizer", partial(script, late=new_head))}
learning |= {"9": ("learning rate 0", partial(script, optim=warmed_up)), "10": ("frozen", partial(script, build=heads))}
learning |= {"11": ("waits for data", partial(script, data=slow_reader))}
learning |= {"12": ("healthy", partial(script, build=attention, meant="self_attn"))}
ward("Second ward: nothing learns, or slowly", learning, [slice(1), slice(5, 11)])

# %% [markdown]
# One patient of this ward trains only a few weights on purpose, as with adapters (lesson 25), and declares this to the tool (`meant`). No tool can know what is meant. The columns about weights would also show the fault of lesson 21, where half of the model is on disk and does not learn.
#
# In the third ward each patient gets a simulated card. The lesson computes the card's capacity from the peaks of healthy patients. *When* did a patient run out of memory, and with how many tokens? The column *KB alive* has the bytes that are alive at the start of the last three forward passes, the column *KB held* those after the first three updates. The script keeps the logits of each evaluated batch, so *KB alive* grows in every evaluation. That is a fault only if memory runs out.


# %% jupyter={"source_hidden": true}
def small(count=6):
    return texts(count, rows=1, length=8)


def one_long():
    yield from [*small(4), *texts(count=1, rows=1, length=128)]


def own_loss(model, batch):  # a figure for the log, which keeps its graph alive
    return model(**batch).loss


memory = {
    "13": ("one long batch", partial(script, data=one_long)),
    "14": ("states", partial(script, data=small)),
    "15": ("a leak", partial(script, data=partial(small, 40), log=own_loss)),
    "16": ("kept in evaluation", partial(script, data=small, tests=[*texts(count=200)])),
    "17": ("too large a batch", script),
    "18": ("healthy", partial(script, data=small, tests=[*texts(count=5, rows=1)])),
}
once, always = (examine(partial(script, data=partial(small, count)), capacity=1e12)["peaks"] for count in (1, 6))
capacities = dict.fromkeys(memory, 1.2 * max(always.values()))  # enough for the healthy one
capacities |= {"14": (max(once["forward"], once["backward"]) + once["update"]) / 2, "17": 1.1 * peaks["build"]}
ward("Third ward: memory", memory, [slice(11, 16)], capacities)

# %% [markdown]
# Halving the batch size is what everybody tries first. It is the cure for one of the five faults of this ward. Optimizer states do not depend on the batch (lessons 08 and 09). Against one long batch, truncate the texts or sort them by length (lesson 12). Against the leak, log `loss.item()` instead of the loss. In the evaluation, keep the argmax instead of the logits (lesson 20).
#
# ### It fitted, and does not fit when it is resumed
#
# A training fitted into memory, but runs out of it when it resumes from its checkpoint. The Trainer is not the cause: its peak is the same from scratch and resumed, as the next code cell shows. A loop of your own may be the cause: if it leaves the loaded checkpoint in a variable, it holds the weights twice. [nanoGPT had that fault](https://github.com/karpathy/nanoGPT/pull/236). `del` the variable.
#
# ### Much memory is free, and it runs out
#
# Our simulated card counts bytes. A real allocator takes *segments* from the card, and cuts blocks from them for tensors. If batches change their lengths, free blocks are too small for the next tensor, and the allocator takes another segment. The error then says that much memory is "reserved by PyTorch but unallocated", and advises `expandable_segments:True`: segments that grow in place. No batch is too large in this case. The sign of this fault is a large difference between reserved and allocated bytes, which the five faults above do not show.
#
# > **On a GPU:** the second code cell below measures this. Without a GPU the course's estimate applies the allocator's own rules.
#
# ### The fourth ward
#
# The next two code cells measure what the last two sections say. Then comes the fourth ward, and below it a table of what the tool says of all patients. The tool's rules are not made for these patients only: a test of the course plants faults in other layers, steps and ranks.


# %%
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

logging.disable_progress_bar()


def resumable(folder, resume, _=None):
    rows = [{name: one[0] for name, one in batch.items()} for batch in small(16)]
    quiet = dict(use_cpu=True, report_to="none", disable_tqdm=True, logging_strategy="no")
    arguments = TrainingArguments(folder, max_steps=4, save_steps=2, **quiet)
    arguments._n_gpu = min(1, arguments.n_gpu)
    trainer = Trainer(LlamaForCausalLM(CONFIG), arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)


def peaks_of(train):
    """Return the peaks of a training from scratch and of one that resumes from its checkpoint."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        both = [examine(partial(train, folder, resume), capacity=1e12) for resume in (False, True)]
    assert not any(seen["error"] for seen in both), [seen["error"] for seen in both]
    return [seen["peaks"]["build"] for seen in both]  # without watch, all passes are in the first phase


scratch, resumed = peaks_of(resumable)
print(f"the Trainer from scratch: {scratch:,} bytes, resumed: {resumed:,}")

# %%
lengths = [90, 60, 350, 80, 120, 40, 500, 260, 60, 450]  # two per step
uneven = Task("gpt2", lengths=lengths, config=dict(n_layer=2, n_embd=256, n_head=4, vocab_size=30000))


def with_settings(settings):
    common = dict(per_device_train_batch_size=2)
    if lab.machine.kind != "cuda":
        return estimate(uneven, device="cuda", allocator_settings=settings, **common).memory
    with mock.patch.dict("os.environ", PYTORCH_CUDA_ALLOC_CONF=settings):  # new: before the process starts
        return lab.train(settings or "segments as they are", task=uneven, measure=("memory",), **common).memory


fragments = {}
for name, settings in {"as it is": "", "expandable": "expandable_segments:True"}.items():
    memory = with_settings(settings)
    fragments[name] = memory.reserved_bytes - memory.peak_bytes
    print(f"{name}: {plots.bytes_text(memory.peak_bytes)} of tensors at the peak, reserved", end=" ")
    print(f"{plots.bytes_text(memory.reserved_bytes)}: {plots.bytes_text(fragments[name])} more")


# %% jupyter={"source_hidden": true}
def with_workers(watch, size=2**20):
    rows = [{"pixels": torch.zeros(size)}] * 8
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=64 << 20)):
        watch(loader=torch.utils.data.DataLoader(rows, batch_size=8, num_workers=4))
    if size > 2**16:
        raise RuntimeError("DataLoader worker (pid 4711) is killed by signal: Bus error.")  # as a loader raises it


def builder(watch):
    with mock.patch.object(cpp_extension, "CUDA_HOME", None):
        watch()
        cpp_extension.CUDAExtension("kernels", ["kernels.cu"])


def save_checkpoint():
    time.sleep(30)


def ranks(rank, allreduce, saves=None, grows=None):
    for step in range(3):
        if (rank, step) == saves:
            save_checkpoint()
        allreduce(torch.ones(5 if (rank, step) == grows else 4))


# %% jupyter={"source_hidden": true}
machine = {
    "19": ("a rank is late", examine_ranks(partial(ranks, saves=(1, 2)), "patient 19")),
    "20": ("shared memory", with_workers),
    "21": ("unequal shapes", examine_ranks(partial(ranks, grows=(1, 1)), "patient 21")),
    "22": ("healthy", examine_ranks(ranks, "patient 22")),
    "23": ("no toolkit", builder),
    "24": ("healthy", partial(with_workers, size=2**10)),
}
ward("Fourth ward: the machine and the ranks", machine, [slice(11, 12), slice(16, 18)])


def named_rightly(results):
    """Return (faults named correctly - healthy patients called sick) / faults planted."""
    faults = [row for row in results.values() if row[1] != "healthy"]
    alarms = sum(row[2] != "healthy" for row in results.values() if row[1] == "healthy")
    return (sum(row[1] == row[2] for row in faults) - alarms) / len(faults)


rows = [[key, "✓" if fault == name else f"✗ {fault}", name, reason] for key, fault, name, reason in results.values()]
plots.Table(["patient", "", "the tool says", "evidence"], rows)

# %% [markdown]
# Two faults of the fourth ward are simulated. Filling `/dev/shm` would harm your other programs. Instead, the loader requests much, and the tool reads that only 64 MiB are free, as in a Docker container. `CUDA_HOME` is removed while an extension is built.
#
# ## What the libraries' detectors find
#
# - **transformers' detector** is `debug="underflow_overflow"`, or `DebugUnderflowOverflow(model)` in a loop of your own. The debugging page of transformers' documentation says that it detects inf, NaN, underflow and `loss=NaN`.
# - PyTorch's **anomaly mode** stops if the backward pass of an operation made a NaN.
#
# Both examine the patients of the first ward, and four more. Each of the four has a module (`Root`, `Power`, `Share` or `Log`) behind an activation function, and its backward pass makes a NaN. The table's second column has the module that transformers' detector names, and the number of updates that were made before.

# %%
from transformers.debug_utils import DebugUnderflowOverflow


def detector(script):
    """Return (module, updates made before) that transformers' detector reports; None if it reports nothing."""
    text, updates = io.StringIO(), []

    def watch(model, optimizer, **_):
        DebugUnderflowOverflow(model)
        optimizer.register_step_post_hook(lambda *_: updates.append(1))

    with contextlib.redirect_stdout(text), contextlib.suppress(ValueError):
        script(watch)
    named = re.findall(r"(?m)^ {18}(\S+) \w+$", text.getvalue())  # its last frame is where it stopped
    return (named[-1], len(updates)) if "Detected" in text.getvalue() else None


def anomaly(script):
    """Return the operation that anomaly mode names; None if it names none."""
    with warnings.catch_warnings(action="ignore"), torch.autograd.set_detect_anomaly(True):
        try:
            script(lambda *_, **__: None)
        except RuntimeError as error:
            return re.search(r"'(\w+)' returned nan", str(error))[1]


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
        return torch.where(x > 0, x.relu().log(), x)


made = {Root: "SqrtBackward0", Power: "PowBackward0", Share: "DivBackward0", Log: "LogBackward0"}
backward = {one: partial(script, build=partial(with_module, layer=n % 2, made=one)) for n, one in enumerate(made)}
tried = [(fault, one) for fault, one in numbers.values()] + [
    (f"backward: {one.__name__}", backward[one]) for one in made
]
rows = [
    [label, detector(one) or "nothing", anomaly(one) or "nothing", diagnose(examine(one))[1]] for label, one in tried
]
plots.Table(["planted", "transformers' detector: module, updates before", "anomaly mode", "ours"], rows)

# %% [markdown]
# Read the table column by column.
#
# *transformers' detector* names the overflow's module correctly. It reports neither the NaN loss nor anything that vanishes: whatever its name says, it tests for inf and NaN alone (`detect_overflow` in `debug_utils.py`). It reports a NaN made in backward, and the coarse update, only after the update, in the next forward pass. In both cases it names the embedding, whose weights this forward pass meets first.
#
# Why does it miss the NaN loss? `create_frame` looks into tensors and tuples. A model of the library returns neither, but a dict with names (`ModelOutput`), which it calls "not a tensor".
#
# *Anomaly mode* names the right operation in every row with a NaN made in backward. It also shows the line of the forward pass (in a warning, hidden here). But its alarm in the last row (the logarithm) is false: relu's backward discards that NaN, and no weight sees it. The mode tests for NaN alone, so a gradient of inf passes. For overflow and coarse update it names the loss's softmax, where a NaN from elsewhere comes in.
#
# Next: the Trainer's log if every label is masked. `Opening` is transformers' detector with three more lines, which let it look into a dict. If it finds a NaN, it stops the training. The third cell below times a step with each detector and with our tool.


# %%
class Opening(DebugUnderflowOverflow):
    def create_frame(self, module, given, result):  # new: a dict is opened
        super().create_frame(module, given, tuple(result.values()) if isinstance(result, Mapping) else result)


def logged(steps=8, watch=lambda model: None, **options):
    """Return (losses logged, losses that were NaN, whether a detector reported) if all labels are masked."""
    model, nan, text = LlamaForCausalLM(CONFIG), [], io.StringIO()
    model.register_forward_hook(lambda _, __, result: nan.append(result.loss.isnan().item()))
    watch(model)
    rows = [{name: one[0] for name, one in batch.items()} for batch in masked()] * steps
    quiet = dict(report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, logging_steps=1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(text):
        arguments = TrainingArguments(folder, max_steps=steps, **quiet, **options)
        arguments._n_gpu = min(1, arguments.n_gpu)
        trainer = Trainer(model, arguments, train_dataset=rows)
        with contextlib.suppress(ValueError):
            trainer.train()
    losses = [float(row["loss"]) for row in trainer.state.log_history if "loss" in row]
    return losses, sum(nan), "Detected inf/nan" in text.getvalue()


# %%
ways = {"the defaults": {}, "logging_nan_inf_filter=False": dict(logging_nan_inf_filter=False)}
ways |= {'debug="underflow_overflow"': dict(debug="underflow_overflow"), "Opening": dict(watch=Opening)}
logs = {name: logged(**options) for name, options in ways.items()}
rows = [
    [name, " ".join(map(str, lines)), nan, "yes" if warned else "no"] for name, (lines, nan, warned) in logs.items()
]
display(plots.Table(["way", "loss in the log", "losses that were NaN", "a detector reported"], rows))
lines, nan, _ = logs["the defaults"]
lines_of_nan = sum(line != line for line in lines)
widgets.revealed(lab, "nan", lines_of_nan)

# %%
from trainmem.records import Ratio

WIDE = LlamaConfig(vocab_size=64, use_cache=False, **SIZES | dict(hidden_size=256, intermediate_size=512))


def step_seconds(prepare, steps=3):
    torch.manual_seed(0)
    model, seconds = LlamaForCausalLM(WIDE), []
    optimizer = adam(model)
    with prepare(model, optimizer) or contextlib.nullcontext():
        for batch in texts(steps, length=32):
            start = time.thread_time()
            model(**batch).loss.backward()
            optimizer.step(), optimizer.zero_grad()
            seconds.append(time.thread_time() - start)
    return min(seconds[1:])


watches = {"none": lambda *_: None, "transformers' detector": lambda model, _: DebugUnderflowOverflow(model) and None}
watches["anomaly mode"] = lambda *_: torch.autograd.set_detect_anomaly(True)
watches["ours"] = lambda *both: examine(lambda watch: watch(*both)) and None
turns = [{name: step_seconds(one) for name, one in watches.items()} for _ in range(5)]
costs = {name: Ratio.of_pairs([turn[name] / turn["none"] for turn in turns], 1.05) for name in watches}  # 1.05: noise
rows = [[name, f"{cost.value:.2f} ({cost.low:.2f} to {cost.high:.2f})"] for name, cost in costs.items()]
plots.Table(["watch", "CPU time of a step / without watch"], rows)

# %% [markdown]
# Instead of a NaN the Trainer logs the mean of the valid losses since the last line (`logging_nan_inf_filter`, on by default). Here no loss is valid, so it logs 0.0. The filter was proposed for speech models; the proposal had it [off by default](https://github.com/huggingface/transformers/pull/13619). It can [hide a ruined training](https://github.com/huggingface/trl/issues/6702). In the table of logs, the second row has the cure. `Opening` stops at the first NaN loss, so its log is empty.
#
# The last table has the cost of watching: CPU time of a step, four ways in interleaved runs. Watch some steps, not all. The detector's share shrinks as batches grow, because much of its work is on the weights.
#
# > **On a GPU:** each `.item()` also waits for the device.
#
# ## What held
#
# Most statements about faults are tested on several planted faults. In the boxes, *2021 page* is the debugging page of transformers 4.8, and *2024 index* is the documentation's overview of performance in 2024.
#
# ### transformers' detector
#
# The first and the last check require that the detector names the right module. For the two others any report counts.

# %% tags=["claim"]
module_names = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.gate_proj",
    "model.layers.1.mlp.up_proj",
    "lm_head",
]
reports = [detector(partial(halved, build=partial(filled, where=name, value=3e4))) for name in module_names]
named = sum(one == (name, 0) for one, name in zip(reports, module_names))
display(claims.check("debug-overflow", named / len(module_names), note=", ".join(module_names)))
vanishing = [detector(numbers[key][1]) is not None for key in ("5", "7")]
display(claims.check("debug-underflow", sum(vanishing) / 2, note="gradients, and activations"))
found_nan = [detector(numbers["4"][1]) is not None, logs['debug="underflow_overflow"'][2]]
display(claims.check("debug-nan-loss", sum(found_nan) / 2, note="a loop of one's own, and the Trainer"))
reports = {one: detector(backward[one]) for one in (Root, Power, Share)}
matches = [reports[one] == (f"model.layers.{n}.mlp.act_fn.1", 0) for one, n in zip(reports, (0, 1, 0))]
display(
    claims.check(
        "debug-backward", sum(matches) / 3, note=f"reported: {reports[Root][0]}, after {reports[Root][1]} update"
    )
)

# %% [markdown]
# ### The clinic, the log, anomaly mode and the cost
#
# The first check subtracts each healthy patient that the tool called sick.

# %% tags=["claim"]
healthy = sum(fault == "healthy" for _, fault, *_ in results.values())
counts = f"{len(results) - healthy} faults and {healthy} healthy patients"
display(claims.check("troubleshooting", named_rightly(results), note=counts))
display(claims.check("nan-is-logged", lines_of_nan / nan, note=f"logged: {lines}"))
rightly = sum(anomaly(backward[one]) == name for one, name in made.items())
display(claims.check("anomaly-names-it", rightly / len(made), note=", ".join(made.values())))
display(claims.check("debug-cost", costs["transformers' detector"]))

# %% [markdown]
# ### Memory
#
# The second check needs a GPU.

# %% tags=["claim"]
display(claims.check("resume-peak", resumed / scratch))
ratio = fragments["expandable"] / fragments["as it is"]
on_gpu = lab.machine.kind == "cuda"
reason = "" if on_gpu else f"{ratio:.2f} by the estimate, which applies the allocator's own rules"
claims.check("oom-fragments", ratio if on_gpu else None, note=reason)

# %% [markdown]
# ## Exercise 1: three at once
#
# The script below runs, but three things are wrong with it. Its task is to predict, after four given words, the twelve that follow, with a new head: `new_head(model)` puts an untrained output layer into the model. Write a repaired copy that returns its model. Give it another name, e.g. `repaired(watch, epochs=10)`: the check still needs `job`. The copy passes if
#
# - the loss on unseen answers is below 1;
# - the tool calls it healthy;
# - its speed, in samples per CPU second, is at least 0.6 of what `job` reaches with a reader that makes each batch only once.


# %%
def reader():
    for batch in texts(rows=8):
        sum(len(str(number)) for number in range(300_000))  # a tokenizer at work
        yield batch


def job(watch, epochs=10):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = adam(model)
    new_head(model)
    watch(model, optimizer)
    for _ in range(epochs):
        for batch in reader():
            batch["labels"][:, 1:] = -100  # the given words do not count
            model(**batch).loss.backward()
            optimizer.step(), optimizer.zero_grad()
    return model


diagnose(examine(partial(job, epochs=1)))

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Fix what the tool names, and examine again: it names one fault at a time.",
    "Which labels must not count? And which weights does the optimizer know?",
    "How often is each batch tokenized? Keep a list.",
)

# %% tags=["exercise"]
answer = None  # def repaired(watch, epochs=10): ..., then: answer = repaired


# %% tags=["check"]
def trained(job, samples=480):
    start = time.thread_time()
    model = job(lambda *_: None)
    return model, samples / (time.thread_time() - start)


def check(answer):
    if answer is None:
        return exercises.not_attempted()
    model, speed = trained(answer)
    kept, plain, unseen = [], reader, [*texts(count=12, rows=8)][-1]
    with mock.patch.dict(globals(), reader=lambda: kept or kept.extend(plain()) or kept):
        _, best = trained(job)  # with its faults, but each batch is read once
    unseen["labels"][:, :4] = -100
    with torch.no_grad():
        loss = model.eval()(**unseen).loss.item()
    fault, evidence = diagnose(examine(partial(answer, epochs=1)))
    message = f"loss {loss:.2f}, {speed / best:.2f} of the speed, the tool says: {fault}, {evidence}"
    return (exercises.right if loss < 1 and speed > 0.6 * best and fault == "healthy" else exercises.wrong)(message)


exercises.check(lab, "three", check, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def repaired(watch, epochs=10, keep=True):
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    new_head(model)
    optimizer = adam(model)
    watch(model, optimizer)
    ready = [*reader()] if keep else None
    for _ in range(epochs):
        for batch in ready or reader():
            batch["labels"][:, :4] = -100
            model(**batch).loss.backward()
            optimizer.step(), optimizer.zero_grad()
    return model


exercises.prove(check, solution=repaired, mistake=partial(repaired, keep=False))

# %% [markdown]
# ## Exercise 2: the challenge
#
# Find a blind spot of the tool, and close it. You give three things:
#
# - `plant`: a dict with the arguments of `script` that plant your fault. The tool must call this patient healthy. An example is `data`, a function that yields batches whose labels belong to other texts;
# - `reading(seen, model)`: called once before training; it registers a hook of yours that writes into `seen`. This is a new `defaultdict(list)`, not the tool's notes;
# - `rule(seen)`: returns the evidence as a text, or an empty text if the patient is healthy.
#
# The check trains ten times as many batches as a patient gets. Your fault must make the loss on unseen text worse by at least 1. Your rule must find it, and must not call a healthy patient of the clinic sick.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "With labels of other texts every number is finite and every weight learns. What do the labels no longer agree with?",
    "`model.register_forward_pre_hook(hook, with_kwargs=True)` calls `hook(module, given, named)`; the batch is in `named`.",
    "In this task a label is its own input, unless it is -100. Count the labels of which that is not true.",
)

# %% tags=["exercise"]
answer = None  # dict(plant=dict(data=...), reading=..., rule=...)


# %%
def unseen_loss(data=texts, **options):
    """Return the loss on unseen text after ten times as many batches."""
    models, many = [], [batch for _ in range(10) for batch in data()]
    script(lambda model, *_, **__: models.append(model), data=lambda: many, **options)
    with torch.no_grad():
        return models[0](**[*texts(count=12, rows=8)][-1]).loss.item()


def diagnoses(one, reading, rule):
    """Return what the tool says of a script, and what the new rule says of it."""
    notes = defaultdict(list)

    def read_too(watch, model=None, optimizer=None, **more):
        watch(model, optimizer, **more)
        reading(notes, model)

    return diagnose(examine(lambda watch: one(partial(read_too, watch))))[0], rule(notes)


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    plant, *new = (answer[name] for name in ("plant", "reading", "rule"))
    fault, evidence = diagnoses(partial(script, **plant), *new)
    if fault != "healthy":
        return exercises.wrong(f"the tool names it already: {fault}. Which link does none of its rules compare?")
    if not (harmed := unseen_loss(**plant)) > (well := unseen_loss()) + 1:
        return exercises.wrong(f"loss {harmed:.2f} on unseen text, healthy {well:.2f}: does this fault do any harm?")
    if not evidence:
        return exercises.wrong("your rule does not find it: print `seen` of this patient beside that of a healthy one")
    healthy = [one for kind, one in (*numbers.values(), *learning.values()) if kind == "healthy"]
    alarms = [alarm for _, alarm in (diagnoses(one, *new) for one in (script, *healthy)) if alarm]
    if alarms:
        return exercises.wrong(f"{len(alarms)} healthy patients are called sick, e.g. {alarms[0]}")
    return exercises.right(f"loss {harmed:.2f} instead of {well:.2f}; the tool says healthy, your rule: {evidence}")


exercises.check(lab, "blind spot", check, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def of_others():
    for batch in texts():
        yield batch | {"labels": batch["labels"].roll(1, 0)}  # each text has the labels of another one


def compare_labels(seen, model):
    def look(module, given, named):
        labels, ids = named["labels"], named["input_ids"]
        seen["others"].append(((labels != ids) & (labels != -100)).sum().item())
        seen["labels"].append((labels != -100).sum().item())

    model.register_forward_pre_hook(look, with_kwargs=True)


def labels_of_others(seen):
    return f"{sum(seen['others'])} of {sum(seen['labels'])} labels are not their inputs" if sum(seen["others"]) else ""


solution = dict(plant=dict(data=of_others), reading=compare_labels, rule=labels_of_others)
losses = lambda seen, model: model.register_forward_hook(lambda _, __, made: seen["losses"].append(made.loss.item()))  # noqa: E731
high = lambda seen: "the loss is above 3" if seen["losses"][-1] > 3 else ""  # noqa: E731  so is that of the healthy
exercises.prove(check, solution=solution, mistake=solution | dict(reading=losses, rule=high))

# %% [markdown]
# ## Common mistakes
#
# - *"Loss 0.0, so it has learnt."* Above, eight lines of 0.0 were eight NaN losses.
# - *`torch.cuda.empty_cache()` in the loop, against out of memory.* It returns memory that no tensor uses. In each of the third ward's five faults, tensors use the memory.
# - *Half the batch size, whatever ran out.* It was the cure for one of these five faults, and not for fragmentation.
# - *The module that is named is the culprit.* The embedding was named for what another layer had done one update before.
# - *Anomaly mode left on.* Look at its cost in the table.
#
# The lesson leaves out faults that need cards, such as NCCL's failures and hot or broken GPUs. `perf-helpers doctor` reports what a machine has. If a run of the lab takes too long, the run's message names the line in which each rank was.
#
# ## Recap
#
# Times: AMD EPYC, 2 cores, 2026-11-29.
#
# - The tool looked at every link, and believed the first that broke. It named 19 of 19 planted faults by their evidence, and called no healthy patient sick.
# - transformers' detector named the module of all 4 overflows, and passed over both kinds of underflow and the NaN loss of the library's own models. It reported faults of backward 1 update late.
# - The Trainer logged 0.0 for each of 8 NaN losses. `logging_nan_inf_filter=False` shows them.
# - Watching costs time: a step took 1.6 times the CPU time with transformers' detector, 1.9 with our tool and 3.2 in anomaly mode.

# %% tags=["finish"]
claims.finish()
