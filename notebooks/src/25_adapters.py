# %% [markdown]
# # Must every parameter learn?
#
# You fine-tune with LoRA to save memory, and the peak hardly moves. A colleague uses QLoRA, and it takes *more* than LoRA. Both reports are right. Training holds four numbers for each parameter that learns: the weight, its gradient and two of AdamW's. Adapters let few parameters learn, and keep the rest in few bits. Which of the bytes in your training does that remove?
#
# **Time:** about 45 minutes; the cells compute for about a minute. **Before it:** lesson 01 (memory of a step), lessons 04 to 06 (activations) and lesson 09 (code books). **Machine:** everything here runs on the CPU, also if you have a GPU. The comparison with the library needs peft (`make course` installs it). The first code cell may print that a kernel of `kernels-community` was not loaded: you need not install it.
#
# **You will see**
# - how an adapter works in nine lines, how few parameters it trains, and what it does not change: activations and frozen weights
# - how four bits per weight work, what double quantization saves, and how training on a quantized model can take more memory than on one in 16 bits
# - what adapters cost and gain: seconds by parts, the loss of a model that was trained before, outputs after merging
# - how a training with checkpointing can leave all adapters untrained, without an error

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import copy
import logging
import statistics
import time
import warnings
from itertools import pairwise

import torch

from perf_helpers import Claims, Lab, Task, exercises, interleaving, optional_packages, plots, widgets
from trainmem.core import adapters
from trainmem.records import CPU, Ratio

no_peft = optional_packages.offer("peft")
lab = Lab(profile, strict=strict, out=out, lesson="25_adapters")  # its processes import libraries while this one does
claims = Claims(lab)

import bitsandbytes as bnb
import matplotlib.pyplot as plt
from IPython.display import display
from transformers import LlamaConfig, LlamaForCausalLM

if not no_peft:
    import peft
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it logs a cast at each matmul
torch.set_num_threads(1)  # in this notebook's own process, where all tensors are small

# %% [markdown]
# ## Idea
#
# A weight matrix of `out x in` numbers stays **frozen**. Beside it is an **adapter** of two thin matrices: `down`, `rank x in`, and `up`, `out x rank`. You choose the *rank*, a small number (the ranks of lesson 15 are something else). The layer's input also passes through `down` and then `up`. The result is scaled by alpha / rank (*alpha* is a number that you choose, here 8) and added to the layer's output. Only these two matrices learn. This is **LoRA** ([Hu and others, 2021](https://arxiv.org/abs/2106.09685)). `up` begins with zeros, so that the model starts unchanged. The model of frozen weights is called the *base*.
#
# A frozen weight is only read. So it can be stored in 4 bits: **QLoRA** ([Dettmers and others, 2023](https://arxiv.org/abs/2305.14314)).
#
# ## Predict
#
# Our Llama has 4 layers. Either all its weights learn, or only adapters of rank 4 beside the matrices for queries and values: one parameter in 250. The batch is 8 texts of 64 tokens.

# %%
question = "What percentage of full training's peak memory does training with these adapters take?"
widgets.predict(lab, "peak", question, "%", 0, 110)

# %% [markdown]
# ## By hand: an adapter


# %%
class Adapter(torch.nn.Module):
    def __init__(self, layer, rank, alpha=8):
        super().__init__()
        self.layer, self.scale = layer, alpha / rank
        where = dict(device=layer.weight.device)
        self.down = torch.nn.Parameter(torch.randn(rank, layer.in_features, **where) / layer.in_features**0.5)
        self.up = torch.nn.Parameter(torch.zeros(layer.out_features, rank, **where))

    def forward(self, x):
        return self.layer(x) + self.scale * (x @ self.down.T) @ self.up.T


def adapt(model, rank, names=("q_proj", "v_proj")):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for part in list(model.modules()):
        for name, layer in list(part.named_children()):
            if name in names:
                setattr(part, name, Adapter(layer, rank))
    return model


def learning(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# %% [markdown]
# How few parameters is that? LoRA's paper says 10,000 times fewer for GPT-3: 96 layers, 12,288 wide, rank 4 beside the matrices for queries and values. We build the attention of that size on the device `meta`, where tensors have shapes but no bytes.


# %%
def fewer(layers=96, width=12288, rank=4, words=50257):
    """Return all parameters of a GPT-3 over those that learn; per layer its MLP has 8 x width^2 weights, its attention 4."""
    with torch.device("meta"):
        layer = {name: torch.nn.Linear(width, width) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        attention = torch.nn.ModuleDict(layer)
    own = sum(parameter.numel() for parameter in attention.parameters())
    trained = sum(parameter.numel() for parameter in learning(adapt(attention, rank)))
    return (layers * (own + 8 * width**2) + words * width) / (layers * trained)


times_fewer = fewer()
print(f"{times_fewer:,.0f} times fewer parameters learn; with rank 64, {fewer(rank=64):,.0f} times fewer")

# %% [markdown]
# ## The library's adapters
#
# peft does the same, and offers more kinds of adapters. With our `down` and `up`, its model gives the same outputs as ours. Then `merge_and_unload` adds the product of the two to the frozen weight, and the adapters are gone. Are the outputs still the same? The last of the next cells prints the largest difference between two models' logits, divided by the largest logit. (Two of peft's other kinds are learnt prompts and prefixes. peft 0.21.2 handles these two wrongly in `generate` with transformers 5.24, which renamed the argument `past_key_values` to `cache`. LoRA is not affected.)


# %%
SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)


def llama(**sizes):
    torch.manual_seed(0)
    made = dict(vocab_size=128, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None) | SMALL
    return LlamaForCausalLM(LlamaConfig(**made | sizes))


warnings.filterwarnings("ignore", ".*is_gradient_checkpointing")  # an old name, which peft asks for


def with_peft(model, rank=4):
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


# %%
def filled(model):
    """Fill the adapters with random numbers, as if they had learnt; the same numbers for ours and for peft's."""
    torch.manual_seed(1)
    for parameter in learning(model):
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def apart(one, other, rows):
    """Return the largest difference of two models' logits, over the largest logit."""
    with torch.no_grad():
        first, second = (model.eval()(input_ids=rows).logits for model in (one, other))
    return ((first - second).abs().max() / first.abs().max()).item()


# %%
found, notes = {}, {}  # by claim; a value that was not measured is absent
rows = torch.randint(1, 128, (4, 16), generator=torch.Generator().manual_seed(0))
if not no_peft:
    by_hand, by_peft = filled(adapt(llama(), 4)), filled(with_peft(llama()))
    print(f"ours and peft's differ by {apart(by_hand, by_peft, rows):.1e}")
    found["merged-same"] = apart(by_peft, copy.deepcopy(by_peft).merge_and_unload(), rows)
    four = filled(with_peft(adapters.quantized(llama(), {"load_in_4bit": True}, "cpu")))  # as from_pretrained does it
    with warnings.catch_warnings(action="ignore"):  # peft warns that they may differ
        in_four = apart(four, copy.deepcopy(four).merge_and_unload(), rows)
    notes["merged-same"] = f"into a 4-bit base: {in_four:.1%}"
    print(f"merged and not merged differ by {found['merged-same']:.1e}; {notes['merged-same']}")

# %% [markdown]
# Merged into a base that is not quantized, the adapters give the same outputs up to rounding, and cost nothing more. Merged into a 4-bit base, the sum must be quantized again, and part of what the adapters learnt is rounded away. So merge into the base in 16 bits.
#
# ## Where the bytes go
#
# We run the same training three times: with all weights, with adapters of rank 4, and with rank 32. Your guess was about the second bar divided by the first. Each bar shows the moment of the peak, when gradients may not exist yet. The table below the bars shows the end of the forward pass, and for gradients the end of the backward pass. Its column *weights* has the weights that learn (and some small buffers).

# %%
WIDER = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
task = Task("llama-2-7b", seq_len=64, config=WIDER | dict(vocab_size=2000, dtype="float32"))


def counted(name, rank=None, task=task, **arguments):
    lora = dict(peft={"r": rank, "target_modules": ["q_proj", "v_proj"]}) if rank else {}
    common = dict(per_device_train_batch_size=8, use_cpu=True)
    return lab.train(name, task=task, measure=("memory",), **common | lora | arguments)


def part(run, kind, phase=None):
    """Return the bytes of a category, at the peak or at the end of a phase; None if not measured."""
    if run.ok and not (run.peak_bytes and run.memory.breakdown):
        return None
    return (run.memory.phase_breakdowns[phase] if phase else run.memory.breakdown)[kind]


def over(one, other):
    """Return one / other; None if one of them was not measured."""
    return one / other if one is not None and other else None


full = counted("all weights")
runs = [full] if no_peft else [full, counted("rank 4", 4), counted("rank 32", 32)]
_ = plots.memory(runs)

# %%
kinds = ("weights", "frozen_weights", "gradients", "optimizer_states", "activations")
rows = [[run.name, *(plots.bytes_text(part(run, kind, "backward" if kind == "gradients" else "forward") or 0)
                     for kind in kinds)] for run in runs]  # fmt: skip
display(plots.Table(["what learns", *(kind.replace("_", " ") for kind in kinds)], rows))
if not no_peft:
    few, more = runs[1:]
    sizes = [sum(part(run, kind, "backward") or 0 for kind in ("gradients", "optimizer_states")) for run in (full, few)]
    trained = few.memory.trainable_parameters if few.peak_bytes else None
    found["lora-states"] = over(sizes[1] or None, trained and 12 * trained)
    found["lora-memory"] = over(few.peak_bytes or None, full.peak_bytes)
    found["lora-activations"] = over(part(few, "activations", "forward"), part(full, "activations", "forward"))
    found["lora-rank"] = over(part(more, "activations", "forward"), part(few, "activations", "forward"))
    if trained:
        assert not more.peak_bytes or more.memory.trainable_parameters > trained  # otherwise the rank was ignored
        share = trained / few.memory.parameters
        print(f"{share:.2%} of the parameters learn; gradients and states: {sizes[1]:,} bytes, before {sizes[0]:,}")
        display(widgets.revealed(lab, "peak", 100 * found["lora-memory"]))

# %%
answers = ["a rank of 1", "half of the tokens in a batch", "adapters beside more matrices"]
exercises.question(
    lab,
    "next-step",
    "Adapters of rank 4 still do not fit. What makes the peak of this lesson's model much smaller?",
    {
        answers[0]: "The adapters' own bytes are already the smallest part, and activations hardly depend on the "
        "rank: each token keeps `rank` more numbers beside each adapter.",
        answers[1]: "Activations grow with the tokens, and they are the largest part here (lessons 04 to 06).",
        answers[2]: "More adapters keep more inputs: the peak grows.",
    },
    right=answers[1],
)

# %% [markdown]
# Gradients and optimizer states are almost gone. Look at what remains:
#
# - **Frozen weights** stay whole: the forward pass reads them.
# - **Activations** are what a layer keeps for its backward pass. The *first* adapter is the one nearest to the input. A gradient on its way to this adapter passes through all later layers, so attention, norms and activation functions keep what they kept before. The inputs of the frozen matrices are an exception: they would serve only for the gradients of these matrices, which are not computed, so they are not kept.
#
# So people report "LoRA saves little" if activations were the peak: with long texts, large batches, large vocabularies. And LoRA saves much if weights and optimizer states were the peak: with large models and few tokens.

# %% [markdown]
# ## By hand: four bits
#
# Lesson 09 had a code book of 256 values and blocks of 256 numbers. Here the book has 16 values, and a block has 64 numbers. Weights are distributed like a bell curve, so the book takes its **quantiles**: the values are dense where weights are frequent. This is **NF4**. The second cell below prints the relative error of our NF4. For comparison it prints the errors with one scale for the whole matrix, and with 16 evenly spaced values.


# %%
def code_book():
    """Return NF4: quantiles of the bell curve, eight above 0, seven below, and 0 itself."""
    ends = (31 / 32 + 29 / 30) / 2  # the outermost quantile, as bitsandbytes chooses it
    above, below = (torch.special.ndtri(torch.linspace(ends, 0.5, n + 1).double())[:-1] for n in (8, 7))
    book = torch.cat([above, torch.zeros(1), -below]).sort().values
    return (book / book.abs().max()).float()


def quantize(tensor, book, block=64):
    blocks = tensor.view(-1, block)
    absmax = blocks.abs().amax(1, keepdim=True)
    return torch.bucketize(blocks / absmax, (book[1:] + book[:-1]) / 2), absmax


def dequantize(codes, absmax, book, shape):
    return (book[codes] * absmax).view(shape)


def error(weight, block, book=None):
    book = code_book() if book is None else book
    return ((dequantize(*quantize(weight, book, block), book, weight.shape) - weight).norm() / weight.norm()).item()


# %%
NF4 = code_book()
weight = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0)) / 45
once = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
restored = dequantize(*quantize(weight, NF4), NF4, weight.shape)
same = torch.isclose(restored, bnb.functional.dequantize_4bit(*once), atol=1e-6).float().mean().item()
assert same > 0.999  # a number midway between two values may be rounded either way
even = torch.linspace(-1, 1, 16)
print(f"{same:.3%} of the numbers equal the library's; error {error(weight, 64):.1%}, with one scale", end=" ")
print(f"{error(weight, weight.numel()):.1%}, with even steps {error(weight, 64, even):.1%}")

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(8, 3.5), sharex=True, height_ratios=[3, 1], layout="constrained")
above.hist((weight.view(-1, 64) / once[1].absmax.view(-1, 1))[:2000].flatten().numpy(), 120, color=plots.SERIES[0])
above.set(ylabel="weights", title="weights / the largest of their block")
for row, book in enumerate((even, NF4)):
    below.plot(book, [row] * 16, "|", color=plots.SERIES[row + 1], markersize=14)
below.set(yticks=[0, 1], yticklabels=["even steps", "NF4"], ylim=(-0.6, 1.6), xlabel="value")
plt.show()

# %% [markdown]
# A block's scale has 32 bits, half a bit for each of 64 weights. **Double quantization** stores the scales themselves in 8 bits, with one scale of 32 bits per 256 of them. The next cell prints the bits per weight that the library keeps for the scales, and a calculation *by hand* with these sizes. (The library has slightly more, because it also keeps the code book of the 8-bit scales.)


# %%
def scale_bits(weight, double):
    """Return the bits per weight that are kept beside the codes."""
    _, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
    parts = [state.absmax, *([state.state2.absmax, state.state2.code, state.offset] if double else [])]
    return 8 * sum(part.nbytes for part in parts) / weight.numel()


beside = [scale_bits(weight, double) for double in (False, True)]
print(f"bits per weight for scales: {beside[0]:.3f}, quantized {beside[1]:.3f}, by hand {8 / 64 + 32 / 64 / 256:.3f}")

# %% [markdown]
# ## Why QLoRA can take more
#
# Now we use a model whose vocabulary is a large part of it, as in today's small models. Its weights are in bf16, or in 4 bits. peft's guide tells you to call `prepare_model_for_kbit_training` after quantizing. The first row of the table trains all weights: the claim `full-16-bits` below counts the bytes per parameter of this training. The other rows train adapters of rank 4 on a base in bf16 or in 4 bits. The table leaves gradients and optimizer states out.

# %%
# Narrow, with few tokens: many CPUs have no 16-bit arithmetic and emulate it.
narrow = dict(hidden_size=128, intermediate_size=352, vocab_size=8000, dtype="float32")
large_vocabulary = Task("llama-2-7b", seq_len=6, config=WIDER | narrow)
nf4 = dict(load_in_4bit=True, quantization_config={"bnb_4bit_quant_type": "nf4"})
base_runs = [counted("all weights, bf16", task=large_vocabulary, dtype="bfloat16")]
if not no_peft:
    base_runs.append(counted("bf16", 4, large_vocabulary, dtype="bfloat16"))
    for prepare in (True, False):
        name = "4 bits, prepared" if prepare else "4 bits, not prepared"
        changes = dict(prepare_model_for_kbit_training=prepare, dtype="bfloat16")
        base_runs.append(counted(name, 4, large_vocabulary, **nf4 | changes))
kinds = ("weights", "frozen_weights", "quantized_weights", "activations", "temporaries")
rows = [[run.name, plots.bytes_text(run.peak_bytes or 0), *(plots.bytes_text(part(run, kind) or 0) for kind in kinds)]
        for run in base_runs]  # fmt: skip
display(plots.Table(["base", "peak", *(kind.replace("_", " ") for kind in kinds)], rows))
whole = sum(part(base_runs[0], kind, "backward") or 0 for kind in ("weights", "gradients", "optimizer_states"))
bytes_each = over(whole or None, base_runs[0].memory.parameters if base_runs[0].peak_bytes else None)
if not no_peft:
    found["qlora-less"] = over(base_runs[2].peak_bytes or None, base_runs[1].peak_bytes)
    if found["qlora-less"]:
        assert part(base_runs[2], "quantized_weights")  # a base that stayed whole would not take less either
        not_prepared = base_runs[3].peak_bytes / base_runs[1].peak_bytes
        notes["qlora-less"] = f"not prepared: {not_prepared:.2f}"
        print(f"peak of 4 bits / bf16: prepared {found['qlora-less']:.2f}, {notes['qlora-less']}")

# %% [markdown]
# The layers shrank to about a quarter. (Subtract the *frozen weights* of *4 bits, not prepared* from those of *bf16*, and compare the result with the *quantized weights*.) But embeddings and head are not quantized, and the preparation casts them and the norms **from 16 bits up to 32** (`prepare_model_for_kbit_training` in `peft/utils/other.py`). Then the activations are fp32 too, logits included. In addition, each matmul first expands its 4-bit weight to one that is not quantized, which is freed afterwards. With a vocabulary this large, all this outweighs what the layers save. Skip the preparation, or cast back, and check that the loss stays good.
#
# In a model of 7 billion parameters it is the other way round: the vocabulary is 4 % of the weights, and the layers decide.
#
# **Can such numbers be trusted?** Other people published the memory of seventeen trainings with LoRA on a Tesla T4. We repeated all of them in a *rehearsal*, with torch 2.11. A rehearsal is a dry run without a GPU: a stub library replaces the CUDA runtime, torch's own allocator works as on a GPU, and nothing is computed. The peak of the allocated bytes is equal to the published peak in all seventeen, **to the byte**. The memory that torch *reserved* from the driver is equal in fourteen, and 2 MiB too high in three. The base was always in fp16. (For a base in 4 bits no such agreement can be expected: its memory varies by some MiB from run to run, even on one card.)
#
# One statement of the publication does not fit: it names torch 2.14 for thirteen of the seventeen. We also rehearsed six of these thirteen with 2.14. Five of the six reserved a different amount of memory. So the numbers agree far better with 2.11 than with 2.14: [the publication most likely names the wrong version](../docs/upstream/lora-on-a-t4.md).
#
# ## Seconds, by parts
#
# A step has three parts: forward, backward, update. An adapter adds to the first, takes from the second (no gradients of the frozen weights), and almost removes the third. The row *4 bits* trains adapters on a 4-bit base, which is expanded in each matmul. The row *all, again* repeats the first row: their difference is noise.


# %%
def stepping(model, spent, rows=8, tokens=64):
    optimizer = torch.optim.AdamW(learning(model), lr=1e-4)
    batch = torch.randint(1, 512, (rows, tokens), generator=torch.Generator().manual_seed(0))

    def step():
        moments = [time.process_time()]
        loss = model(input_ids=batch, labels=batch).loss
        moments.append(time.process_time())
        loss.backward()
        moments.append(time.process_time())
        optimizer.step()
        optimizer.zero_grad()
        moments.append(time.process_time())
        spent.append([end - begin for begin, end in pairwise(moments)])

    return step


# %%
def seconds(_):
    torch.set_num_threads(1)
    sizes = WIDER | dict(vocab_size=512, num_hidden_layers=2)
    models = {name: llama(**sizes) for name in ("all", "adapters", "all, again")}
    models["adapters"] = adapt(models["adapters"], 4)
    models["4 bits"] = adapt(adapters.quantized(llama(**sizes), {"load_in_4bit": True}, "cpu"), 4)
    spent = {name: [] for name in models}
    taken = interleaving.in_turns([stepping(model, spent[name]) for name, model in models.items()], 8)
    parts = {name: [statistics.median(each) for each in zip(*rows[1:])] for name, rows in spent.items()}
    return dict(zip(models, taken)), parts


# %%
taken, parts = lab.run(seconds, "steps", measure=("none",), use_cpu=True).value
FLOOR = 1.1  # two processes of the same code differ by this factor
quicker = Ratio.of_turns([[taken[name] for name in ("all", "adapters", "all, again")]], CPU, FLOOR)
rows = [[name, *(f"{1e3 * each:.1f}" for each in (*spent, sum(spent)))] for name, spent in parts.items()]
plots.Table(["what learns", "forward", "backward", "update", "step"], rows, "ms of CPU time, one thread")

# %% [markdown]
# ## Do few parameters learn as well?
#
# A model first learns a language: each word has one fixed successor, but one time in five a random word follows instead. Then it meets a dialect, in which some words have other successors. We train all weights, or adapters beside *all* matrices of the layers, as QLoRA's authors advise. Each method gets the best of three learning rates, and is then scored with fresh seeds.


# %%
def text(rows, seed, dialect=False):
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    if dialect:
        follows[:12] = follows[:12].roll(1)  # twelve words in 96
    words = [torch.randint(96, (rows,), generator=generator)]
    for _ in range(23):
        strays = torch.rand(rows, generator=generator) < 0.2
        words.append(torch.where(strays, torch.randint(96, (rows,), generator=generator), follows[words[-1]]))
    return torch.stack(words, 1) + 32


# %%
def train(model, rate, steps, seed, dialect):
    optimizer = torch.optim.AdamW(learning(model), lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        batch = text(16, 1000 * seed + step, dialect)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def score(model, rows):
    with torch.no_grad():
        return model(input_ids=rows, labels=rows).loss.item()


# %%
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RATES = {"all": (1e-3, 3e-3, 1e-2), 16: (3e-3, 1e-2, 3e-2)}  # by rank


def learnt(base, rank, rate, seed, steps=25):
    torch.manual_seed(seed)
    model = copy.deepcopy(base)
    model = model if rank == "all" else adapt(model, rank, MATRICES)
    return score(train(model, rate, steps, seed, dialect=True), text(128, 10**6, dialect=True))


def gains(base, ranks, seeds=range(2, 6)):
    """Return how much each method lowers the loss in the dialect, per seed, with its best learning rate."""
    before, best = score(base, text(128, 10**6, dialect=True)), {}
    for rank in ranks:
        best[rank] = min(RATES[rank], key=lambda rate: learnt(base, rank, rate, seed=1))
    return before, {rank: [before - learnt(base, rank, best[rank], seed) for seed in seeds] for rank in ranks}


def interval(ratios):
    """Return the mean of four ratios with Student's 95 % interval."""
    middle, half = statistics.mean(ratios), 3.18 * statistics.stdev(ratios) / 2
    return Ratio(middle, middle - half, middle + half)


# %%
base = train(llama(), 5e-3, 150, seed=0, dialect=False)
before, gained = gains(base, ("all", 16))
rows = [["before", f"{before:.3f}"], *([key, f"{before - statistics.mean(each):.3f}"] for key, each in gained.items())]
display(plots.Table(["what learns: all, or rank", "loss in the dialect"], rows))
as_good = interval([one / other for one, other in zip(gained[16], gained["all"])])
print(f"adapters get {as_good.low:.3f} to {as_good.high:.3f} of the gain of all weights")

# %% [markdown]
# ## Checkpointing that trains no adapter
#
# Checkpointing (lesson 06) runs a layer without recording it, and runs it again in the backward pass. torch has two kinds. The **reentrant** kind records nothing for a layer if none of its *inputs* needs a gradient. A frozen embedding produces just such inputs, and adapters *inside* the layer do not count. If the head learns too, the loss still depends on something that learns, so the backward pass runs without an error. How many adapters get a gradient? (*Frozen inputs* in the table: no input of a layer needs a gradient.)


# %%
def with_gradient(reentrant, inputs):
    """Return the share of adapters that get a gradient while the head learns too, and the warnings."""
    model = adapt(llama(), 4).train()
    model.lm_head.weight.requires_grad_(True)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if not inputs:
        model.disable_input_require_grads()  # new
    with warnings.catch_warnings(record=True, action="always") as caught:
        batch = text(4, 0)
        model(input_ids=batch, labels=batch).loss.backward()
    adapters = [layer.up for layer in model.modules() if isinstance(layer, Adapter)]
    warned = "; ".join({str(one.message)[:80] for one in caught}) or "nothing"
    return sum(up.grad is not None for up in adapters) / len(adapters), warned


ways = {
    "reentrant, frozen inputs": (True, False),
    "reentrant": (True, True),
    "not reentrant, frozen inputs": (False, False),
}
reached = {name: with_gradient(*way) for name, way in ways.items()}
silent = 1 - reached["reentrant, frozen inputs"][0]
plots.Table(
    ["checkpointing", "share of adapters with a gradient", "warning"], [[name, *one] for name, one in reached.items()]
)

# %% [markdown]
# The first row is the fault: there is a warning, and only the head is trained. Two settings fix it:
#
# - `enable_input_require_grads` makes the embedding's output need a gradient. transformers now calls it itself when it switches checkpointing on (`_activation_checkpointing_enable` in `modeling_utils.py`); we had to undo this to show the fault.
# - `use_reentrant=False`, the default of transformers, also works if no input needs a gradient.
#
# In a loop of your own, with `torch.utils.checkpoint`, neither is done for you.
#
# And what does checkpointing keep? According to peft's page on memory it keeps "every nth gradient between layers". The next cell counts what is kept when the forward pass ends, before any gradient exists.

# %%
if not no_peft:
    fewer_kept = counted("checkpointing", 4, gradient_checkpointing=True)
    held = [part(fewer_kept, kind, "forward") for kind in ("gradients", "activations")]
    found["checkpointing-keeps"] = over(held[0], sum(held)) if None not in held else None
    assert None in held or held[1] < part(runs[1], "activations", "forward")  # otherwise nothing was checkpointed
    print(f"kept for the backward pass: {held[0] or 0:,} bytes of gradients, {held[1] or 0:,} of activations")
    _ = plots.memory([runs[1], fewer_kept])

# %% [markdown]
# ## What held
#
# ### Parameters, bytes and speed

# %% tags=["claim"]
display(claims.check("lora-parameters", times_fewer))
for id in ("lora-states", "lora-memory", "lora-activations", "lora-rank"):
    display(claims.check(id, found.get(id), missing=no_peft, note=notes.get(id, "")))
claims.check("lora-faster", quicker)

# %% [markdown]
# ### Quality, four bits and checkpointing

# %% tags=["claim"]
display(claims.check("lora-quality", as_good))
display(claims.check("double-quantization", beside[0] - beside[1]))
display(claims.check("full-16-bits", bytes_each))
for id in ("merged-same", "qlora-less", "checkpointing-keeps"):
    display(claims.check(id, found.get(id), missing=no_peft, note=notes.get(id, "")))
note = f"as transformers sets it up, {reached['reentrant'][0]:.0%} of the adapters get a gradient"
claims.check("checkpointing-silent", silent, note=note)

# %% [markdown]
# ## Explore
#
# How much memory does a model of 7 billion parameters take before the first activation, and with the activations? `bits` are those of a frozen weight: 4.5 means four bits and half a bit for the scale; 4.127 means the same with double quantization. This picture is computed, not measured.


# %% tags=["widget"]
def draw(bits, tokens):
    layers, width, others = 32, 4096, 262e6  # others: embeddings and head, in 16 bits
    matrices, ranks = 6.48e9, [4, 16, 64, 256]
    frozen = (matrices * bits / 8 + 2 * others) / 1e9
    learns = [16 * layers * rank * 4 * width / 1e9 for rank in ranks]  # 16 bytes; down and up beside two matrices
    activations = tokens * layers * width * 34 / 1e9  # some 34 bytes a token and unit of width, without scores
    series = {"frozen": [frozen] * 4, "what learns, with its states": learns, "activations, about": [activations] * 4}
    return plots.lines(ranks, series, "rank", "GB", title=f"7 billion parameters, {bits} bits, {tokens} tokens")


_ = widgets.explore(draw, bits=[16, 8, 4.5, 4.127], tokens=[2048, 512, 8192])

# %% [markdown]
# ## Exercise 1: half of it
#
# The training with adapters of rank 4 must fit into **half of its peak**. Keep eight samples per update, fp32, and adapters of at least rank 4 beside queries and values. Your answer is a dict of arguments of `counted`: the `rank`, and arguments of the Trainer.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Which part of the second bar is the largest?",
    "Neither rank nor bits of the base touch that part.",
    "Lessons 05 and 06 are about it. Two arguments of the Trainer, or one.",
)

# %% tags=["exercise"]
answer = None  # dict(rank=4, ...)


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if no_peft or not runs[-1].peak_bytes:
        return exercises.not_measured(no_peft or "memory was not measured here")
    batch, times = answer.get("per_device_train_batch_size", 8), answer.get("gradient_accumulation_steps", 1)
    if batch * times != 8:
        return exercises.wrong(f"{batch * times} samples per update, not 8")
    if answer.get("dtype") or (answer.get("rank") or 0) < 4:
        return exercises.wrong("fp32, and a rank of 4 or more")
    run = counted("yours", **answer)
    if not run.ok:
        return exercises.run_failed(run)
    result = f"{plots.bytes_text(run.peak_bytes)} of {plots.bytes_text(runs[1].peak_bytes)}"
    return (
        exercises.right(result) if run.peak_bytes <= runs[1].peak_bytes / 2 else exercises.wrong(f"{result}: too much")
    )


exercises.check(lab, "half", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(
    check,
    solution=dict(rank=4, per_device_train_batch_size=2, gradient_accumulation_steps=4),
    mistake=dict(rank=4, **nf4),  # the base is the smaller part
)

# %% [markdown]
# ## Exercise 2: the challenge
#
# The same model with adapters of rank 4, but one text at a time (micro-batch 1). From which length on do activations take more memory than the frozen weights, when the forward pass ends? Predict the number of tokens from the table under *Where the bytes go*, whose batch is 8 texts of 64 tokens. The check trains with your length and with nine tenths of it: activations must take more than the frozen weights with the first, and not with the second. (To do the same for your own model, use the options `--peft`, `--load_in_4bit` and `--freeze` of `perf-helpers estimate`.)

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Frozen weights do not depend on the batch. How do activations depend on the number of tokens?",
    "The row `rank 4` of the table: divide its activations by the tokens of that batch.",
    "Tokens = frozen weights / activations per token.",
)

# %% tags=["exercise"]
answer = None  # a number of tokens


# %% tags=["check"]
def activations_per_frozen(tokens):
    """Return the bytes of activations over those of frozen weights, when the forward pass ends."""
    run = counted(f"{tokens} tokens", 4, task.replace(seq_len=tokens), per_device_train_batch_size=1)
    return over(*(part(run, kind, "forward") for kind in ("activations", "frozen_weights")))


def check(answer):
    if answer is None:
        return exercises.not_attempted()
    if no_peft or not runs[-1].peak_bytes:
        return exercises.not_measured(no_peft or "memory was not measured here")
    here = activations_per_frozen(int(answer))
    if here <= 1:
        return exercises.wrong(f"activations are {here:.2f} of the frozen weights: how many texts are in the batch?")
    below = activations_per_frozen(int(0.9 * answer))
    message = f"activations are {here:.2f} of the frozen weights, and {below:.2f} with nine tenths of the tokens"
    return exercises.wrong(f"{message}: a shorter text is enough") if below > 1 else exercises.right(message)


exercises.check(lab, "length", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
frozen, activations = (no_peft or part(few, kind, "forward") for kind in ("frozen_weights", "activations"))
tokens = 64 if no_peft or not activations else frozen / (activations / (8 * 64))
exercises.prove(check, solution=1.05 * tokens, mistake=tokens / 8)  # as if the batch still had eight texts

# %% [markdown]
# ## Common mistakes
#
# - *Lowering the rank to save memory.* It saves the adapters' own bytes, the smallest part.
# - *Choosing QLoRA because it is smaller than LoRA.* Compare the peaks, after the preparation.
# - *Merging into the quantized base.* What the adapters learnt is rounded to 16 values.
# - *Using full training's learning rate.* Adapters want a larger one, often about ten times as large. (This lesson tried rates that are three times as large.)
# - *Reading "trainable%: 0.1", which peft prints, as a thousandth of the memory.* It is a thousandth of gradients and optimizer states only.
#
# ## Recap
#
# The numbers are those of a recorded run (AMD EPYC, 2 cores, torch 2.15.0, 2026-11-29).
#
# - Adapters trained one parameter in 9,249 of a GPT-3. Gradients and optimizer states went, frozen weights and most activations stayed: here the peak was 0.57 of full training's, and rank 32 kept 1.01 times the activations of rank 4.
# - Four bits are 16 quantiles and a scale for 64 weights. Double quantization saved 0.37 bits per weight, as its paper says.
# - The preparation cast a large vocabulary up to 32 bits, and QLoRA took 1.30 times as much as LoRA; without it 0.90.
# - A step with adapters was 1.45 times as fast. Merging changed the outputs by less than 0.000001 in a base that is not quantized, and by 20.1 % in a 4-bit base.
# - Reentrant checkpointing with frozen inputs trained 0 adapters, with only a warning.

# %% tags=["finish"]
claims.finish()
