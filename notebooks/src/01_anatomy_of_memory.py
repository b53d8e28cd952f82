# %% [markdown]
# # Where did 15 GB go when the model has 1.3?
#
# The weights of your model are far smaller than your GPU, and the training still runs out of memory. The 2023 guide
# shows the same: it put bert-large on a V100 (1288 MB of weights), trained it at batch 4, and then read 14949 MB. Which
# tensors fill the rest?
#
# **You will see**
# - that every byte has one of six jobs, and that a count by hand agrees with what torch's allocator (the part of torch
#   that provides memory for tensors) really hands out;
# - that the optimizer sets the bytes that a parameter costs, and the batch sets the rest;
# - that the peak is a moment inside the step, and how mixed precision, `zero_grad` and `nvidia-smi` change what you see
#   of it.
#
# **Minutes:** plan 55 for reading and trying; the cells compute for about 1 on two cores.
#
# **Before you start:** lesson 00.
#
# **On a CPU:** every tensor is counted, to the byte. Three things exist only on a GPU: the memory that CUDA takes for
# itself (its *context*), the memory that the allocator keeps in reserve, and the readings of `nvidia-smi`.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import math
import os
import subprocess
import weakref

import matplotlib.pyplot as plt
import torch
from IPython.display import display

from perf_helpers import Claims, Lab, Task, exercises, explorers, plots, widgets
from trainmem.estimate import estimate

lab = Lab(profile, strict=strict, out=out, lesson="01_anatomy_of_memory")
claims = Claims(lab)
cuda = lab.machine.kind == "cuda"
torch.set_num_threads(1)  # in this notebook's own process, where all tensors are small
print(f"{lab.machine.name}: {lab.task}, {lab.task.parameters() / 1e6:.1f} M parameters")

# %% [markdown]
# ## Idea
#
# A training step holds six kinds of tensors, and each lives for a different stretch of the step.
#
# | kind | allocated | freed |
# |---|---|---|
# | weights | when the model is made | never |
# | gradients | in backward | in `zero_grad` |
# | optimizer states | in the first `step` | never |
# | activations | in forward | in backward |
# | temporaries: intermediate results | by an operation | once the operation that needs them has run |
# | inputs | with each batch | with the batch |
#
# Memory runs out at the **peak**: the moment at which the most bytes are alive. So there are two questions. How many
# bytes does each kind take? And which kinds are alive together?
#
# ## Predict
#
# The setup cell printed the task: the model, the number of sequences x the tokens in each, and the number of parameters.
# The lab is about to train this model in fp32, with AdamW and a batch of 4. How many MB does it take at the peak?

# %%
question = "fp32, AdamW, batch 4: how many MB at the peak?"
widgets.predict(lab, "peak", question, "MB", 0, 12 * 4 * lab.task.parameters() / 1e6)

# %% [markdown]
# ## By hand
#
# We count the bytes ourselves, on a toy BERT. A tensor is a view of a *storage*, which is the memory itself. Two tensors
# may share a storage, so we count storages.
#
# Weights, gradients and states can be looked up. Activations are harder: forward leaves them in the autograd graph for
# backward. `saved_tensors_hooks` calls our function `pack` for each tensor that is saved. A stack of module names shows
# which module saved it. We keep *weak references* to these tensors: an ordinary reference would keep a tensor alive, a
# weak one only shows whether it still is.

# %%
toy = Task("bert-tiny", seq_len=32, config={"vocab_size": 200, "max_position_embeddings": 128})
model, batch = toy.build_model(), toy.batch(4)


def held(tensors):
    """Bytes of memory behind some tensors, shared memory counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


count = sum(parameter.numel() for parameter in model.parameters())
size = held(model.parameters())
print(f"{count:,} parameters take {size:,} bytes, {size / count:g} each: fp32 is 32 bits")


# %%
def forward(model, batch):
    """Run a forward pass; return the loss and, for each tensor saved for backward, (module, weak reference)."""
    stack, saved = [""], []
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), *batch.values()]}

    def leave(*_):
        stack.pop()

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:  # weights and inputs are counted elsewhere
            saved.append((stack[-1], weakref.ref(tensor)))
        return tensor

    handles = []
    for name, module in model.named_modules():
        enter = module.register_forward_pre_hook(lambda *_, name=name: stack.append(name))
        handles += [enter, module.register_forward_hook(leave)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    for handle in handles:
        handle.remove()
    return loss, saved


# %% [markdown]
# Two ordinary training steps follow. After every line we write down which bytes are alive: this is the *account*.
#
# Is the account true? The lab then trains the same toy with the Trainer, in a process of its own, and counts what the
# allocator really hands out. Weights, gradients and states must agree to the byte (on CUDA to 2 %: there the allocator
# rounds each tensor up to 512 bytes), activations to 1 %: the lab also counts loss and logits. (The weights include
# *buffers*, tensors of the model that are not trained, and the states include a step counter for each parameter.)

# %%
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
saved, account = [], {}


def write_down(moment):
    account[moment] = {
        "weights": held([*model.parameters(), *model.buffers()]),
        "optimizer_states": held(value for state in optimizer.state.values() for value in state.values()),
        "gradients": held(parameter.grad for parameter in model.parameters()),
        "activations": held(reference() for _, reference in saved),
    }


write_down("load")
for step in (1, 2):
    loss, saved = forward(model, batch)
    write_down(f"forward {step}")
    loss.backward()
    write_down(f"backward {step}")
    optimizer.step()
    write_down(f"step {step}")
    optimizer.zero_grad()
    write_down(f"zero_grad {step}")

# %%
counted = lab.train("toy", task=toy, measure=("memory",), per_device_train_batch_size=4)
allocated_in = {"weights": "forward", "optimizer_states": "step", "gradients": "backward", "activations": "forward"}
for kind, moment in allocated_in.items():
    by_hand, by_lab = account[f"{moment} 2"][kind], counted.memory.phase_breakdowns[moment][kind]
    print(f"{plots.name_text(kind):17} after {moment:9} by hand {by_hand:>10,}   lab {by_lab:>10,} bytes")
    if kind != "activations" or not cuda:  # a GPU's attention kernel saves other tensors than a CPU's
        torch.testing.assert_close(by_lab, by_hand, rtol=0.02 if cuda else 0.01 * (kind == "activations"), atol=0)

_, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
bottom = [0.0] * len(account)
for kind in allocated_in:
    heights = [parts[kind] / 1e6 for parts in account.values()]
    ax.bar(range(len(account)), heights, bottom=bottom, color=plots.PALETTE[kind], label=plots.name_text(kind))
    bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
ax.axhline(counted.peak_bytes / 1e6, color="black", linestyle="--", label="peak (lab)")
ax.set_xticks(range(len(account)), [moment.replace(" ", "\n") for moment in account])
ax.set_ylabel("memory (MB)")
ax.set_title("What is alive after each line of two training steps", loc="left")
_ = ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))

# %% [markdown]
# The states appear in the first `step` and stay, so the bar of forward 2 is higher than that of forward 1: a training can survive its
# first step and run out of memory in the second. Activations and gradients are never both in memory in full, because
# backward frees activations while it makes gradients. And no bar reaches the dashed line: the peak is *inside* backward,
# and temporaries are part of it. We only looked between two lines of code, so we could not see it.
#
# Which modules saved the activations of one layer?

# %%
loss, saved = forward(model, batch)
tensors = {reference().data_ptr(): (module, reference()) for module, reference in reversed(saved)}
rows = [
    [module.split("layer.0.")[1], "x".join(map(str, tensor.shape)), f"{held([tensor]) / 1e3:.0f} kB"]
    for module, tensor in reversed(tensors.values())
    if "layer.0." in module
]
plots.Table(["saved by", "shape", "memory"], rows, "Saved in the first layer (batch 4, length 32, width 128)")

# %% [markdown]
# Nearly every tensor has batch x length x width elements (4 x 32 x 128, or four times as many in the feed-forward layer).
# The shapes differ because the code joins dimensions: 128x128 is (batch and length) x width, and 8x32x64 is (batch and
# heads) x length x (width of a head). Attention adds tables of length x length for each sample and head. Nothing here
# depends on the optimizer.
#
# ## Baseline
#
# Now the lab's own task in fp32 with AdamW, and your guess beside it. The table shows what other instruments say about
# the same run, and the last picture shows one of its steps.

# %%
vanilla = lab.train("vanilla", measure=("memory",), per_device_train_batch_size=4)
predicted = lab.foresee(lambda: estimate(lab.task, per_device_train_batch_size=4).peak_bytes / 1e6)
display(widgets.revealed(lab, "peak", vanilla.peak_bytes / 1e6, estimate=predicted))
plots.timeline(vanilla, title=f"One step of {lab.task.model}, batch 4, length {lab.task.length()}")
memory = vanilla.memory
readings = [
    ["weights", memory.breakdown["weights"], "the model and nothing else"],
    [f"peak, {memory.kind}", memory.peak_bytes, f"tensors alive, in {memory.peak_phase}, at {memory.peak_operation}"],
    ["reserved", memory.reserved_bytes, "what the CUDA allocator keeps for later tensors"],
    ["context", memory.context_bytes, "what CUDA takes before the first tensor"],
    ["device-used", memory.device_used_bytes, "what NVML sees: all of it, and other programs"],
    ["peak resident", memory.rss_bytes, "host memory of the process, libraries included"],
]
plots.Table(["reading", "size", "what it is"], [[name, plots.bytes_text(size), text] for name, size, text in readings])

# %% [markdown]
# In the picture of the step, from left to right, activations pile up in forward, and are freed in backward while the
# gradients grow. Weights and states are there all the time. The narrow strip at the right edge is the optimizer's `step`.
# (*Operator workspace* in the legend: memory that an operation uses internally, and that no tensor shows. The table names
# the operation at the peak as torch does: `aten.sum`, for example, is a sum.)
#
# The guides report *device-used* memory: the reading of NVML, NVIDIA's library for the state of its GPUs. It is more than
# your tensors take, because it includes the context and whatever the allocator keeps. This course counts tensors, and says
# so.
#
# > **On a GPU:** functions in fresh subprocesses now check the guides' statements about that reading. How much memory do
# > CUDA and its *kernels* (the functions that run on the GPU) take once a first tensor is there? Does `nvidia-smi` show
# > the same as NVML? Does a model take more than the bytes of its weights, as the guide says about newer GPUs? On a CPU
# > there is nothing to read.

# %%
gpu = lab.machine.gpus[0].uuid if cuda else None


def device_readings(task):
    import pynvml

    from perf_helpers import hardware

    before = hardware.device_used_bytes()
    torch.ones((1, 1), device="cuda")
    after = hardware.device_used_bytes()
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    shown = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * 2**20
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
    old, new = [pynvml.nvmlDeviceGetMemoryInfo(handle, version).used for version in (None, pynvml.nvmlMemory_v2)]
    model = task.build_model()
    model.to("cuda")
    grown = (hardware.device_used_bytes() - after) / held([*model.parameters(), *model.buffers()])
    differences = {"old": abs(old - shown) / old, "new": abs(new - shown) / new}
    return {"context": (after - before) / 2**20, "grown": grown} | differences


# %% tags=["claim"]
def all_kernels(task):
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # load every kernel at once, as before CUDA 11.7
    return device_readings(task)


runs = [lab.run(function, measure="value") for function in (device_readings, all_kernels) if cuda]
found, eager = [run.value or {} for run in runs] or ({}, {})
missing = f"needs NVML and nvidia-smi ({runs[0].failure})" if cuda and not found else None
contexts = [reading["context"] for reading in (found, eager) if reading]
note = f"by default, and with every kernel: {', '.join(f'{size:.0f} MiB' for size in contexts)}" if contexts else ""
display(claims.check("context-cost", max(contexts, default=None), missing=missing, note=note))
display(claims.check("first-tensor-cost", found.get("context"), missing=missing))
display(claims.check("weights-grow-on-gpu", found.get("grown"), missing=missing))
note = f"with NVML's newer call: {found['new']:.4f}" if found else ""
claims.check("nvml-agrees", found.get("old"), missing=missing, note=note)

# %% [markdown]
# ## Change one thing: the optimizer
#
# The next cells count the states of one model after one step of six optimizers:
#
# - **AdamW** keeps a running mean of the gradients (the *first moment*) and one of their squares.
# - **SGD** keeps no state, and with **momentum** a running sum of the gradients.
# - **8-bit AdamW**, from the library bitsandbytes, stores most states in 8 bits (lesson 09). The parameters with 8-bit
#   states are also counted separately.
# - **Adafactor** replaces the mean of the squares by a summary (lesson 08). The Trainer makes it without a first moment; the
#   row *Adafactor, beta1* adds one.
#
# The last of these cells counts the states of t5-3b, the guide's example of a large model, for three of the optimizers.


# %%
def states(task):
    """Return, for each optimizer, [parameters, bytes of state] of the part stored in 8 bits, and of the rest."""
    import tempfile

    from transformers import Adafactor, Trainer, TrainingArguments

    model, found = task.build_model(), {}
    for name, options in optimizers.items():
        trainer = Trainer(model, TrainingArguments(tempfile.mkdtemp(), report_to="none", **(options or {})))
        optimizer = trainer.create_optimizer()
        if options is None:
            optimizer = Adafactor(model.parameters(), 1e-3, beta1=0.9, scale_parameter=False, relative_step=False)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
        parts = {"8 bits": ([], []), "rest": ([], [])}
        for parameter, state in optimizer.state.items():
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            counts, states = parts["8 bits" if torch.uint8 in {tensor.dtype for tensor in tensors} else "rest"]
            counts.append(parameter.numel())
            states.extend(tensors)
        found[name] = {part: [sum(counts), held(states)] for part, (counts, states) in parts.items()}
    return found


# %% tags=["claim"]
optimizers = {
    "AdamW": {},
    "SGD": {"optim": "sgd"},  # new
    "SGD, momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},  # new
    "8-bit AdamW": {"optim": "adamw_bnb_8bit"},  # new
    "Adafactor": {"optim": "adafactor"},  # new
    "Adafactor, beta1": None,  # with a first moment, which the Trainer does not offer
}
found = lab.run(states, measure="value").value
total = {name: sum(size for _, size in parts.values()) / lab.task.parameters() for name, parts in found.items()}
counts, size = found["8-bit AdamW"]["8 bits"]
total["8-bit AdamW, its 8-bit part"] = size / counts
guides = {"AdamW": 8, "SGD, momentum": 4, "8-bit AdamW, its 8-bit part": 2, "Adafactor": "slightly over 4"}
rows = [[name, f"{size:.2f}", guides.get(name, "")] for name, size in total.items()]
display(
    plots.Table(["optimizer", "state bytes per parameter", "2023 guide"], rows, f"{lab.task.model}, after one step")
)
display(claims.check("states-adamw", total["AdamW"]))
display(claims.check("states-sgd-momentum", total["SGD, momentum"], note=f"without momentum: {total['SGD']:g} B"))
note = f"all parameters together: {total['8-bit AdamW']:.2f} B"
display(claims.check("states-8bit", total["8-bit AdamW, its 8-bit part"], note=note))
claims.check("states-adafactor", total["Adafactor"], note=f"with a first moment: {total['Adafactor, beta1']:.2f} B")


# %% tags=["claim"]
def gigabytes(task):
    """Return {optimizer: GB of state after one step}, counted on the meta device, where tensors have shapes only."""
    import bitsandbytes
    from transformers import Adafactor

    parameters, found = list(task.build_model(device="meta").parameters()), {}
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    for optimizer in (
        torch.optim.AdamW(parameters),
        Adafactor(parameters, 1e-3, scale_parameter=False, relative_step=False),  # as the Trainer makes it
        bitsandbytes.optim.AdamW8bit(parameters),
    ):
        optimizer.step()
        tensors = [value for state in optimizer.state.values() for value in state.values() if hasattr(value, "nbytes")]
        found[type(optimizer).__name__] = sum({id(tensor): tensor.nbytes for tensor in tensors}.values()) / 1e9
    return found


giant = lab.run(gigabytes, task=Task("t5-3b"), measure="value").value
display(claims.check("t5-3b-adamw", giant["AdamW"], note=f"{Task('t5-3b').parameters() / 1e9:.2f} billion parameters"))
display(claims.check("t5-3b-adafactor", giant["Adafactor"]))
claims.check("t5-3b-8bit", giant["AdamW8bit"])

# %% [markdown]
# Two optimizers deserve a second look. 8-bit AdamW: bitsandbytes leaves the states of embeddings and of tensors under 4096
# elements in 32 bits, so its total depends on how much of a model is embeddings. And Adafactor: as the Trainer makes it, it
# keeps only sums of rows and columns, without a first moment. The guide's figure is that of an Adafactor with a first
# moment (`beta1`).
#
# The three figures for t5-3b were counted on torch's `meta` device, where tensors have shapes and no numbers. So a
# machine without room for 23 GB of states can count them all the same.
#
# ## Change one thing: the precision
#
# In *mixed precision* the weights stay in fp32, and the matmuls compute in a type of 16 bits (*half precision*: fp16 or
# bf16; lesson 07). torch's `autocast` arranges that: a linear layer computes with a half-precision cast of its weight, and
# backward needs that cast again. So there is a second copy of the weights, half as large. Per parameter, the guides
# add 6 bytes of weights (4 in fp32 and 2 in half precision), 8 of states and 4 of gradients, and get 18.
#
# Two runs follow. *mixed* is the Trainer's. *mixed, zeros kept* is a loop of our own that does what torch did before
# 2.0: `zero_grad` does not free the gradients, it fills them with zeros and keeps them.
#
# A CPU without half-precision instructions emulates them slowly, so on a CPU we stay with the toy. Autocast never casts
# embeddings, so they have no second copy. They are under 10 % of the parameters, in the toy as in bert-large. So the
# toy's bytes per parameter can be compared with the guides'.

# %%
half = {"fp16": True} if cuda else {"bf16": True}  # on a CPU the Trainer ignores fp16 without a warning
task = lab.task if cuda else toy


def prepared(task, batch_size):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    autocast = torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16)
    return task.build_model().to(device), task.batch(batch_size, device), autocast


def keep_zeros(task):
    """Mixed precision as before torch 2.0: zero_grad fills the gradients with zeros and keeps them."""
    model, batch, autocast = prepared(task, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        with autocast:
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # new


# %% tags=["claim"]
mixed = lab.train("mixed", task=task, measure=("memory",), per_device_train_batch_size=4, **half)  # new
zeros = lab.run(keep_zeros, "mixed, zeros kept", task=task, measure=("memory",))


def per_parameter(run, moment="peak"):
    """Return the bytes per parameter of weights, their copies, gradients and states: at the end of a phase, or at the peak."""
    parts = run.memory.breakdown if moment == "peak" else run.memory.phase_breakdowns[moment]
    kinds = ("weights", "weight_copies", "gradients", "optimizer_states")
    return [parts[kind] / run.memory.parameters for kind in kinds]


rows, phases = [], ("forward", "backward", "step")
for run in (mixed, zeros):
    for moment in (*phases, "peak"):
        sizes = per_parameter(run, moment)
        rows.append([run.name, moment, *(f"{size:.2f}" for size in [*sizes, sum(sizes)])])
header = ["run", "after", "weights", "copies", "gradients", "states", "sum"]
display(plots.Table(header, rows, "Bytes per parameter in mixed precision"))
weights = {moment: sum(per_parameter(mixed, moment)[:2]) for moment in phases}
display(claims.check("weights-mixed", max(weights.values()), note=f"after backward: {weights['backward']:.2f} B"))
display(claims.check("gradients-cost", per_parameter(mixed, "backward")[2]))
note = f"gradients kept as zeros: {sum(per_parameter(zeros)):.2f} B"
claims.check("eighteen-bytes", sum(per_parameter(mixed)), note=note)

# %% [markdown]
# A row *peak* is for the moment of the peak. There the activations are large, and the table leaves them out, so its sum
# can be below that of another row. The copies take a little less than 2 bytes, because embeddings have none.
#
# In *mixed*, the copies are complete after forward and gone after backward. The gradients do not exist after forward and
# are complete after backward. During backward copies are freed while gradients are made, so a moment such as the peak
# has some of both. But all copies and all gradients are never there at the same time, because today's `zero_grad` frees
# the gradients before the next forward: the sum stays at 16 or less. In *zeros kept* the gradients stay through the next
# forward. For such a step 18 is right, as the last row shows.
#
# ## Change one thing: what the model is used for
#
# Three uses of a model, each with a claim:
#
# - **Inference.** Without a backward pass there are no gradients and no states; autocast still keeps its casts until the
#   end of its `with` block.
# - **Functions that need memory of their own.** Beam search generates several texts at once (its *beams*) and returns the
#   likeliest. It holds inputs, and a cache of earlier tokens' keys and values, for every beam. *Greedy* search, with which
#   it is compared, has one beam.
# - **A temporary that you hold yourself.** In a training loop the variable `output` refers to the model's logits. In a
#   language model they are large, and they stay in memory during backward, unless you delete `output` before. The
#   claim's note has the peak with `output` kept, then the peak with `output` deleted.


# %% tags=["claim"]
def infer(task):
    model, batch, autocast = prepared(task, 4)
    with torch.no_grad(), autocast:
        model.eval()(**batch)


def beam_search(beams):
    def generate(task):
        model, batch, _ = prepared(task, 1)
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        model.eval().generate(batch["input_ids"], num_beams=beams, **options)  # new: num_beams

    return generate


inference = lab.run(infer, task=task, measure=("memory",))
config = {"n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 2000, "n_positions": 128}
speaker = Task("gpt2", seq_len=64, config=config)
runs = [lab.run(beam_search(n), f"{n} beams", task=speaker, measure=("memory",)) for n in (1, 4)]
kinds = ("inputs", "activations", "temporaries")  # neither the weights nor a GPU's workspaces, larger than this model
greedy, beams = [sum(run.memory.breakdown[kind] for kind in kinds) for run in runs]
display(claims.check("inference-six-bytes", sum(per_parameter(inference))))
note = f"inputs, activations and temporaries: {plots.bytes_text(greedy)} greedy, {plots.bytes_text(beams)} with 4 beams"
claims.check("functional-memory", beams / greedy, note=note)


# %% tags=["claim"]
def two_steps(frees_output):
    def train(task):
        model, batch, _ = prepared(task, 4)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            output = model(**batch)
            loss = output.loss
            if frees_output:
                del output  # new
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


wordy = speaker.replace(config=config | {"vocab_size": 20000})
named = {"keeps its output": False, "deletes it": True}
retained, freed = [lab.run(two_steps(frees), name, task=wordy, measure=("memory",)) for name, frees in named.items()]
note = f"at the peak: {plots.bytes_text(retained.peak_bytes)} and {plots.bytes_text(freed.peak_bytes)}"
claims.check("temporaries-freed", freed.peak_bytes / retained.peak_bytes, note=note)

# %% [markdown]
# ## What activations depend on
#
# The next cell calls `forward` from above on this machine's device. Of the sizes batch, length and width it doubles one,
# then doubles it again, while the other two stay. (Width: the hidden size, and the feed-forward layer with it.)


# %% tags=["claim"]
def saved_bytes(task, batch_size):
    model, batch, _ = prepared(task, batch_size)
    result = forward(model, batch)  # with the loss, which keeps the graph alive
    return held(reference() for _, reference in result[1])


def activations(task):
    found = {"batch": [], "length": [], "width": []}
    for axis, sizes in found.items():
        for factor in (1, 2, 4):
            times = {name: factor if name == axis else 1 for name in found}
            config = {"hidden_size": 128 * times["width"], "intermediate_size": 512 * times["width"]}
            sized = task.replace(seq_len=task.seq_len * times["length"], config=config)
            sizes.append(saved_bytes(sized, 4 * times["batch"]) / 1e6)
    return found


grown = lab.run(activations, task=toy, measure="value").value
plots.lines([1, 2, 4], grown, "size / the toy's", "saved for backward (MB)", title="Activations, one size at a time")
slopes = {axis: math.log2(sizes[-1] / sizes[0]) / 2 for axis, sizes in grown.items()}
note = "exponents: " + ", ".join(f"{axis} {slope:.2f}" for axis, slope in slopes.items())
claims.check("activations-scale", min(slopes.values()), note=note)

# %% [markdown]
# The claim's note has an exponent for each size: activations grow as the size to this power. An exponent of 1 is a straight
# line: twice the batch, twice the bytes. The exponent of the length is above 1 if attention keeps its tables of
# length x length.
#
# ## Predicted without training
#
# Bytes that follow such simple rules can be computed without training. `estimate` traces the step on *fake* tensors, which have
# shapes and no bytes, and counts what would be alive. Here are the techniques of the course, predicted before they run.

# %%
course = {
    "03 vanilla": {},
    "05 accumulation": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "06 checkpointing": {"gradient_checkpointing": True},
    "07 bf16": {"bf16": True},
    "08 Adafactor": {"optim": "adafactor"},
    "09 8-bit Adam": {"optim": "adamw_bnb_8bit"},
    "10 AdamW, one tensor at a time": {"optim": "adamw_torch"},
    "11 attention by hand": {"attn_implementation": "eager"},
}
small = lab.task if cuda else Task("bert-tiny", seq_len=128)
course = {name: {"per_device_train_batch_size": 4} | recipe for name, recipe in course.items()}
forecast = {name: lab.foresee(estimate, small, name=name, **recipe) for name, recipe in course.items()}
if estimates := [found for found in forecast.values() if found]:
    _ = plots.memory(estimates, title=f"{small.model}, estimated: nothing was trained")

# %% [markdown]
# Now run them, and compare the measured peaks with three predictions: by the estimate, by `accelerate estimate-memory`
# (a command of the library accelerate, which looks only at the model and its precision), and by the guides' 18 bytes per
# parameter. The table shows how far each prediction is above (+) or below (-) the measured peak.


# %%
def other_ways(task):
    from accelerate.commands.estimate import estimate_training_usage

    weights = 4 * task.parameters()
    found = {kind: max(estimate_training_usage(weights, kind).values()) for kind in ("float32", "bfloat16")}
    return found | {"rule": 18 * task.parameters()}


others, rows = lab.run(other_ways, task=small, measure="value").value, []
for name, recipe in course.items():
    run = lab.train(name, task=small, measure=("memory",), **recipe)
    ways = [
        forecast[name] and forecast[name].peak_bytes,
        others["bfloat16" if "bf16" in recipe else "float32"],
        others["rule"],
    ]
    off = [f"{way / run.peak_bytes - 1:+.2%}" if run.ok and way else "not known" for way in ways]
    rows.append([name, plots.bytes_text(run.peak_bytes) if run.ok else run.status, *off])
plots.Table(["experiment", "measured peak", "estimate", "accelerate estimate-memory", "18 B per parameter"], rows)

# %% [markdown]
# On a CPU estimate and measurement are equal to the byte, because the same code runs, the Trainer included. For a GPU the
# estimate follows written rules: how much memory each CUDA kernel requests, and how torch's allocator rounds and places
# the requests. (On a GPU, `forecast["03 vanilla"].assumptions` lists these rules.) The two other predictions are
# fixed numbers of bytes per parameter. The library accelerate computes four sizes (model, gradients, optimizer states, the
# whole step) and reports the largest. In fp32 that is the step, the sum of the other three: 16. With bf16 accelerate
# takes the states alone as the step, and no size is larger: only 8. Both predictions ignore the batch, the length and
# the optimizer, which decide the peak of a small model. The same comparison over more trainings and tools, for a CPU and
# for GPUs: [the estimate](../docs/estimate.md).

# %% jupyter={"source_hidden": true}
alone = lab.train("one sample", measure=("memory",), per_device_train_batch_size=1).memory.breakdown
if max(alone, key=alone.get) != "optimizer_states":
    raise RuntimeError(f"the answer below is not true here: {alone}")

# %%
text = f"{lab.task.model} in fp32 with AdamW, batch 1: which part of its peak is the largest?"
options = {
    "weights": "Weights are 4 bytes per parameter: half of what AdamW keeps beside them.",
    "optimizer states": "Two numbers per weight, 8 bytes per parameter: the largest part until the batch grows.",
    "activations": "At a large batch they are. At batch 1 they are small: they grow with the batch, states do not.",
}
exercises.question(lab, "largest", text, options, right="optimizer states")

# %% [markdown]
# ## Explore
#
# The first picture shows one step of two runs, one above the other. Move the line: in which module is the peak, and which
# kinds are alive all the time? The run with Adafactor hardly has any optimizer states: what fills its `step`
# instead? (On a CPU, that run trained the smaller model bert-tiny.)
#
# The second picture is an estimate for any model and recipe. It starts with the lab's model on a GPU, whether you own one
# or not. (A CPU runs other operations, so its peak differs.) Find a setting that halves the activations, then one that
# halves the states. Each setting is traced by itself; the whole picture is grey while the trace runs.

# %% tags=["widget"]
explorers.timeline(lab["08 Adafactor"], vanilla, *lab.runs)
lab.foresee(explorers.memory, lab, device="cuda")

# %% [markdown]
# (Adafactor's `step` holds temporaries: intermediate results of the update of a parameter.)
#
# ## Exercise 1: the bytes of two micro-batches
#
# Mixed precision with `gradient_accumulation_steps=2`: the Trainer runs forward and backward on two small batches
# (*micro-batches*), adds up their gradients, and only then updates the weights. So the second micro-batch runs while the
# first one's gradients wait. The model is that of the table *Bytes per parameter in mixed precision* above, which has the
# numbers that you need. How many bytes per parameter do weights, copies, gradients and states take together at the peak?
# An answer within 2 % is right.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Which of the four kinds are whole in the second forward pass? List weights, copies, gradients, states.",
    "The gradients of the first micro-batch wait for the second: they are whole, and so are the copies.",
    "Take the bytes per parameter that plain mixed precision holds in forward, and add 4 for the gradients in fp32.",
)

# %% tags=["exercise"]
answer = None  # bytes per parameter


# %% tags=["check"]
def measured(name, task, **arguments):
    """Return the run of that name; train it if it does not exist yet."""
    known = [run for run in lab.runs if run.name == name]
    return known[0] if known else lab.train(name, task=task, measure=("memory",), **arguments)


def check(answer):
    if answer is None:
        return exercises.not_attempted()
    run = measured("accumulated", task, per_device_train_batch_size=4, gradient_accumulation_steps=2, **half)
    size = sum(per_parameter(run))
    if abs(answer - size) > 0.02 * size:
        return exercises.wrong(f"measured {size:.2f}: which of the four are alive in the second forward pass?")
    return exercises.right(f"measured {size:.2f}")


exercises.check(lab, "accumulated", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
# All are alive in the second forward: weights, copies and states as in a plain step, and the gradients of the first.
# So where gradients wait, the guides' 18 bytes are back.
exercises.prove(check, solution=sum(per_parameter(mixed, "forward")) + 4, mistake=sum(per_parameter(mixed)))

# %% [markdown]
# ## Exercise 2: the challenge
#
# A task you have not seen: the lab's task with two more layers and half the length (`unseen` in the cell below), batch 16, fp32, AdamW. Predict its peak in MB, within 10 %, before it is trained. You may count parameters, and you may run a forward pass at batch 1, both in a cell that you add.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "At which moment is most alive? In forward the activations pile up, in backward they go as gradients come.",
    "When backward begins, weights, states and all activations are in memory, but hardly any gradients.",
    "`saved_bytes(task, 1)` from above gives one sample's activations, and 16 samples keep 16 times as much.",
)

# %% tags=["exercise"]
layers = lab.task.build_config().num_hidden_layers
unseen = lab.task.replace(seq_len=lab.task.length() // 2, config={"num_hidden_layers": layers + 2})
answer = None  # MB


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    peak = measured("unseen", unseen, per_device_train_batch_size=16).peak_bytes / 1e6
    off = abs(answer - peak) / peak
    if off > 0.1:
        return exercises.wrong(f"{answer:.0f} MB is {off:.0%} off: which kinds are alive at the peak?")
    return exercises.right(f"{answer:.0f} MB predicted, {peak:.0f} MB measured: {off:.1%} off")


exercises.check(lab, "unseen", check, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
# The peak is where backward begins: weights (4 B), states (8 B), and activations, which grow with the batch.
each = lab.run(lambda task: saved_bytes(task, 1), "one sample", task=unseen, measure="value").value
exercises.prove(check, solution=(12 * unseen.parameters() + 16 * each) / 1e6, mistake=16 * unseen.parameters() / 1e6)

# %% [markdown]
# ## Recap
#
# - Every byte had one of six jobs, and the account kept by hand agreed with the allocator: on a CPU to the byte, and
#   for activations to 1 %.
# - The optimizer set the bytes that a parameter cost: AdamW's states 8, SGD's momentum 4. Batch, length and width set the
#   rest.
# - The peak was a moment inside the step. On a CPU, bert-small at batch 4 took 198.4 MB: activations 125.9, states 43.2,
#   weights 21.6, temporaries 6.3 and gradients 1.3.
# - Mixed precision added copies of the weights, which were freed as gradients came. `zero_grad`
#   decided whether copies and gradients met: today the sum stays at 16 bytes per parameter or less, not the guides' 18.
# - `nvidia-smi` answers a different question than "what do my tensors take?" Of the guide's 14949 MB the context took
#   1343, the weights 1288 and AdamW's states twice as much, 2576. The reading does not say how activations, gradients and
#   the allocator's reserve share the rest. On an H100 the same recipe took 7159 MB of tensors
#   ([all recipes](../docs/rehearsal.md#the-guides-ten-recipes-on-several-cards), in MB of 2^20 bytes): today's attention
#   saves less for backward, and `zero_grad` frees the gradients.

# %% tags=["finish"]
claims.finish()
