# %% [markdown]
# # One answer or many: where do memory and time of inference go?
#
# Your fine-tuned model trains without trouble, then the evaluation runs out of memory. You put it behind an API, it answers one request at a time, and the processor is mostly waiting. Inference has no gradients and no optimizer states, so where do memory and time go?
#
# **Time:** about 50 minutes; the cells compute for one to three minutes. **Before it:** lesson 02 (two ceilings), lesson 11 (compiling) and lesson 17 (layers on several devices). **Machine:** everything here runs on the CPU, also if you have a GPU: bytes are counted, answers are compared, and times are the CPU seconds of one thread.
#
# **You will see**
# - how many bytes the keys and values of past tokens take, and that a cache changes no answer
# - how many bits a 4-bit weight really takes, why transformers reports too little memory for it, and whether such weights are faster
# - why sixteen answers at once take far less than sixteen times the time of one
# - how an evaluation can take more memory than the training, and how padding changes answers

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import copy
import itertools
import logging
import math
import tempfile
import time
from functools import partial
from statistics import median

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from torch._dynamo.utils import counters
from transformers import BitsAndBytesConfig, CompileConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from perf_helpers import Claims, Lab, Task, exercises, explorers, plots, widgets
from perf_helpers.lab import roofline
from trainmem.measure import interleaving
from trainmem.records import CPU, Ratio

lab = Lab(profile, strict=strict, out=out, lesson="20_inference")
claims = Claims(lab)
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it logs a cast at each matmul
torch.set_num_threads(1)  # in this notebook's own process, where all tensors are small

# %% [markdown]
# ## Idea
#
# A language model writes one token at a time. For each new token, attention reads the **keys** and **values** of all tokens before it. Once computed they do not change, so they are kept: this is the **KV cache**. It grows with every token, and with every answer that is written at the same time.
#
# ## Predict
#
# Our model is a small Llama: 4 layers, 8 heads for the queries, 2 heads for keys and values, head size 16, in fp32. Commit a number before you run on.

# %%
sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2)
special = dict(vocab_size=512, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=None)
config = LlamaConfig(**sizes, **special)
torch.manual_seed(0)
model = LlamaForCausalLM(config)
question = "How many KB does the cache of one answer take when it holds 63 tokens?"
widgets.predict(lab, "cache", question, "KB", 0, 600)

# %%
answers = ["a quarter", "the same", "four times as much"]
exercises.question(
    lab,
    "shared-heads",
    "With 8 heads for keys and values in place of 2, what would the cache take?",
    {
        answers[0]: "More heads make more keys and values, not fewer.",
        answers[1]: "The number of query heads stays the same, but queries are not kept. Keys and values are.",
        answers[2]: "Keys and values count, queries do not. That is why newer models let several query heads share one "
        "head of keys and values.",
    },
    right=answers[2],
)

# %% [markdown]
# ## A model that has learnt something
#
# With random weights, a rounding error is enough to change an answer. So we first train for some seconds. In our artificial language each word has one fixed successor, but one time in five a random word follows instead.


# %%
def text(rows, length, seed):
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randperm(480, generator=torch.Generator().manual_seed(0)) + 32
    words = [torch.randint(32, 512, (rows,), generator=generator)]
    for _ in range(length - 1):
        any_word = torch.randint(32, 512, (rows,), generator=generator)
        strays = torch.rand(rows, generator=generator) < 0.2
        words.append(torch.where(strays, any_word, follows[words[-1] - 32]))
    return torch.stack(words, 1)


optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(lab.sized(150, 30)):
    batch = text(16, 32, step)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
print(f"loss {loss.item():.2f}; guessing gives {torch.tensor(480.0).log().item():.2f}")

# %% [markdown]
# ## By hand: a cache in two tensors
#
# Take one attention layer and ten tokens. Without a cache, the whole sequence goes through the layer for every new token. With a cache, only the newest token does, and its key and value are appended to two tensors. The cell counts how many rows, one per token, are multiplied by the two matrices that make keys and values.

# %%
torch.manual_seed(0)
to_query, to_key, to_value = torch.randn(3, 16, 16) / 4
tokens = torch.randn(10, 16)


def attend(query, keys, values):
    return (query @ keys.T / 4).softmax(-1) @ values


keys, values = torch.empty(0, 16), torch.empty(0, 16)
rows = {"without": 0, "with": 0}
for count in range(1, 11):
    past, newest = tokens[:count], tokens[count - 1 : count]
    whole = attend(newest @ to_query, past @ to_key, past @ to_value)
    keys, values = torch.cat([keys, newest @ to_key]), torch.cat([values, newest @ to_value])  # new
    torch.testing.assert_close(attend(newest @ to_query, keys, values), whole)
    rows["without"] += 2 * count
    rows["with"] += 2
print(f"rows multiplied for keys and values: {rows['without']} without a cache, {rows['with']} with one")

# %% [markdown]
# ## The library's caches
#
# `generate` keeps a cache by default. In the result of `generate` this cache is called `cache` since transformers 5.24, and `past_key_values` before. We request 40 new tokens after a prompt of 24. The cache then holds 63 tokens, not 64: the last new token never goes through the model, so it has no key and no value. A **dynamic** cache grows with each token. A **static** cache is allocated at once for all tokens to come, so that its shapes stay fixed and a compiler can use them. We count the bytes of their tensors.


# %%
def cache_of(made):
    """Return the cache that `generate` kept. Before transformers 5.24 its name is `past_key_values`."""
    return made["cache"] if "cache" in made else made["past_key_values"]


def cache_bytes(cache):
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def write(model, prompt, new=40, **options):
    options = dict(max_new_tokens=new, do_sample=False, return_dict_in_generate=True) | options
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)


prompt = text(1, 24, seed=1000)
dynamic = write(model, prompt)
static = write(model, prompt, cache_implementation="static")
none = write(model, prompt, use_cache=False)
assert torch.equal(dynamic.sequences, static.sequences) and torch.equal(dynamic.sequences, none.sequences)
counted, fixed = cache_bytes(cache_of(dynamic)), cache_bytes(cache_of(static))
stored = cache_of(dynamic).get_seq_length()  # the last token is not in the cache: nothing followed it
formula = 2 * config.num_hidden_layers * config.num_key_value_heads * 16 * 4 * stored
print(f"{stored} tokens: dynamic {counted:,} bytes, static {fixed:,}, formula {formula:,}")
widgets.revealed(lab, "cache", counted / 1e3)

# %%
lengths = [8, 16, 32, 63]
grown = {}
for batch in (1, 4, 16):
    prompts = text(batch, 7, seed=1000)
    made = [write(model, prompts, new=length - 6) for length in lengths]
    grown[f"{batch} at once"] = [cache_bytes(cache_of(one)) / 1e3 for one in made]
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
_ = plots.lines(
    lengths, grown, "tokens in the cache", "KB of keys and values", ax, "The cache grows with tokens and answers"
)

# %% [markdown]
# When all tokens are written, the static and the dynamic cache take the same memory. A table in transformers' documentation calls the memory of a static cache high and that of a dynamic one medium. The static cache takes its memory *earlier*, and it is larger in the end only if you request room for tokens that never come. So request no more than you need.
#
# What is a static cache good for? The page with that table says that it turns on **compilation** (lesson 11) by itself. We count the graphs that are captured. (The backend `eager` only captures, so torch may warn that it ignores a compile option. That is expected.)

# %%
everywhere = CompileConfig(backend="eager")  # captures only, so that no C++ compiler is needed
everywhere._compile_all_devices = True  # new


def graphs(**options):
    torch._dynamo.reset()
    counters.clear()
    write(copy.deepcopy(model), prompt, new=4, **options)  # the copy keeps what is compiled
    return counters["stats"]["unique_graphs"]


compiled = graphs(cache_implementation="static")
allowed = graphs(cache_implementation="static", compile_config=everywhere)
print(f"graphs with a static cache: {compiled}; where all devices are allowed: {allowed}")

# %% [markdown]
# On a CPU nothing is compiled, and no warning says so. `GenerationMixin._valid_auto_compile_criteria` (`generation/utils.py`) has a list of devices: cuda, xpu, neuron and tpu. The second number shows that a CPU could compile too, but the attribute that allows it (`_compile_all_devices`) is private. On a CPU call `torch.compile` on the model yourself.
#
# > **On a GPU:** cuda is on that list, so the first number need not be 0 there.
#
# ## Four bits per weight
#
# **Quantized** weights are stored in few bits: `int8` takes 8 and `nf4` takes 4, and a scale turns them back into the weights. int8 has one scale per row of the matrix. In nf4 each block of 64 weights shares one scale, the block's largest absolute value in fp32. A scale is 32 bits for 64 weights, half a bit per weight. bitsandbytes stores weights in both ways, and works on a CPU. With *double quantization* it quantizes the scales too.


# %%
def quantized(model, **options):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = BitsAndBytesConfig(**options)
        return LlamaForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu").eval()


def scale_bytes(weight):  # with double quantization the scales are quantized too
    state = weight.quant_state
    return state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)


def four_bit_bytes(model):
    weights = [part.weight for part in model.modules() if type(part).__name__ == "Linear4bit"]
    packed, scales = sum(one.nbytes for one in weights), sum(map(scale_bytes, weights))
    return packed, scales, sum(one.quant_state.shape.numel() for one in weights)


# %%
four = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4")
nf4 = quantized(model, **four)
twice = quantized(model, **four, bnb_4bit_use_double_quant=True)
int8 = quantized(model, load_in_8bit=True)
packed, scales, count = four_bit_bytes(nf4)
bits = {"nf4": 8 * (packed + scales) / count, "nf4, scales quantized": 8 * sum(four_bit_bytes(twice)[:2]) / count}
share = (packed + scales) / (2 * count)  # of the same weights in 16 bits
footprint = nf4.get_memory_footprint()
held = footprint + scales
whole = model.get_memory_footprint()
print(f"bits per quantized weight: {bits}")
print(f"the library reports {footprint:,} bytes; with the scales the model holds {held:,}")
print(f"that is {held / whole:.0%} of the fp32 model: embeddings and head are not quantized")

# %% [markdown]
# `get_memory_footprint` adds up parameters and buffers. The scales are neither: they are an attribute of the weight. To get the right figure, add them, as the cell above does.
#
# Does the quantized model still know its language? We measure the loss on unseen text, sentence by sentence. Each sentence is compared with itself under the full weights, so that it does not matter which sentences are easy or hard. What the model has learnt is the difference between the loss of guessing and its own. The last column of the table has the share of this difference that is lost, as a 95 % interval. We also make a 2-bit model by hand, to show that this measurement can detect harm.


# %%
def two_bits(model, width=64):  # four values for each block of weights
    coarse = copy.deepcopy(model)
    for name, weight in coarse.named_parameters():
        if "proj" in name:
            blocks = weight.data.view(-1, width)
            scale = blocks.abs().amax(1, keepdim=True) / 1.5
            blocks.copy_(((blocks / scale + 0.5).round().clamp(-1, 2) - 0.5) * scale)
    return coarse


def sentence_losses(model, rows):
    with torch.no_grad():
        logits = model(input_ids=rows).logits.float()
    words = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none")
    return words.mean(1).double()


def lost(whole, other):
    """Return the share of what the model has learnt that is lost, with a 95 % interval over sentences."""
    off = (other - whole) / (math.log(480) - whole.mean())
    middle, error = off.mean().item(), 1.96 * off.std().item() / len(off) ** 0.5
    return Ratio(middle, middle - error, middle + error)


# %%
unseen = text(128, 32, seed=10**6)
forms = {"fp32": model, "bf16": copy.deepcopy(model).bfloat16(), "int8": int8, "nf4": nf4, "2 bits": two_bits(model)}
losses = {name: sentence_losses(form, unseen) for name, form in forms.items()}
gone = {name: lost(losses["fp32"], each) for name, each in losses.items() if name != "fp32"}
cells = {name: f"{100 * part.low:.2f} to {100 * part.high:.2f} %" for name, part in gone.items()}
rows = [[name, f"{each.mean().item():.4f}", cells.get(name, "")] for name, each in losses.items()]
plots.Table(["weights", "loss", "share lost of what was learnt"], rows)

# %% [markdown]
# bf16, int8 and nf4 lose next to nothing on this text. But this is a small model with a simple language, and its embeddings and head are not quantized. Repeat the measurement with your model and your text: it takes two cells.
#
# ## Time: each token reads all weights
#
# For each token a model reads *all* its weights. With one answer, each weight is used once per read. With 16 answers it is read once and used 16 times. So we time answers in fp32, bf16, nf4 and int8, 1, 4 and 16 at once. Our small model may fit into the processor's caches, so a wider one answers here. Its weights are random, because only the time matters. First we print what the two ceilings of lesson 02 allow in fp32:


# %%
WIDE = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2)


def answering(folder):  # random weights: only the time matters here
    LlamaForCausalLM(LlamaConfig(**WIDE, **special)).save_pretrained(folder)
    load, half = partial(LlamaForCausalLM.from_pretrained, folder, device_map="cpu"), torch.bfloat16
    in_four = BitsAndBytesConfig(**four, bnb_4bit_compute_dtype=half)
    in_eight = BitsAndBytesConfig(load_in_8bit=True)
    quick = {"nf4": in_four, "int8": in_eight}
    models = {name: load(dtype=half, quantization_config=config) for name, config in quick.items()}
    return {"fp32": load(dtype=torch.float32), "bf16": load(dtype=half)} | models


def matrices(model):
    """Return a function that sends one row through each matrix of the layers, as one token would."""
    parts = [part for name, part in model.named_modules() if name.endswith("_proj")]
    rows = [torch.randn(1, 1, part.in_features, dtype=model.dtype) for part in parts]
    return lambda: [torch.no_grad()(part)(row) for part, row in zip(parts, rows)]


# %%
NEW = 6  # tokens of an answer


def seconds(_):
    torch.set_num_threads(1)
    ceilings = roofline.ceilings("float32", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        models, start = answering(folder), torch.full((16, 1), 40)
        size = sum(weight.nbytes for weight in models["fp32"].model.layers.parameters())
        works = {
            f"{name}, {count}": partial(write, form.eval(), start[:count], NEW)
            for name, form in models.items()
            for count in (1, 4, 16)
        }
        # once more: the difference between equal runs is the noise
        works |= {f"{name}, again": works[f"{name}, 1"] for name in ("fp32", "bf16")}
        works |= {f"read {count}": partial(models["fp32"], start[:count].expand(-1, 64)) for count in (1, 16)}
        taken = dict(zip(works, interleaving.in_turns([torch.no_grad()(work) for work in works.values()], 4)))
        parts = interleaving.in_turns([matrices(form) for form in models.values()], 6)
        taken |= {f"{name}, matrices": each for name, each in zip(models, parts)}
        return taken, size, ceilings.bytes_per_second, ceilings.flops_per_second


# %%
taken, size, bytes_a_second, flops_a_second = lab.run(seconds, "answers", measure="value", use_cpu=True).value
step = {name: 1e3 * median(turn[CPU] for turn in turns) / NEW for name, turns in taken.items()}
read = 1e3 * size / bytes_a_second
print(f"in fp32 a token reads {size / 1e6:.0f} MB: {read:.1f} ms at least; its arithmetic", end=" ")
print(f"takes {1e3 * size / 2 / flops_a_second:.2f} ms for one answer, 16 times that for 16")
tokens = {
    name: [count / step[f"{name}, {count}"] * 1e3 for count in (1, 4, 16)] for name in ("fp32", "bf16", "nf4", "int8")
}
plots.lines([1, 4, 16], tokens, "answers at once", "tokens per CPU second", title="The same weights, read once")
table = [[name, *(f"{step[f'{name}, {count}']:.1f}" for count in (1, 4, 16))] for name in tokens]
plots.Table(["weights", "1 answer", "4", "16"], table, "ms until each answer has its next token")

# %% [markdown]
# Up to some number of answers, an additional answer costs little, because the weights are read anyway. But each *answer* waits longer for its next token: this is its **latency**, shown in the table. transformers' page on pipelines advises against batches on a CPU. We measured two cases. When answers are *written*, as in the picture above, the page is wrong. When prompts are *read*, it is closer to the truth: a model that reads a long prompt already uses each weight for many tokens, so a batch saves little. The next cell first prints the throughput of 16 prompts together, relative to one: a number near 1 means no gain.
#
# Fewer bits are fewer bytes to read, but the weights must be unpacked before each matmul. Which effect wins depends on the processor and on the library's kernels for it. bitsandbytes has a kernel for 4 bits on CPUs with AVX512-BF16 instructions (`backends/cpu/ops.py`); on others it unpacks a whole matrix first. So each claim on their speed, in *What held*, has a prediction. The predicted time in nf4 and int8 is the time of a token in bf16, minus the time of its bf16 matrices, plus the time of the quantized matrices. The table below has these matrices, timed alone. In a token they share the processor's caches with the rest, so the verdict shows a range: the prediction divided and multiplied by 1.5.


# %%
FLOOR = 1.1  # two processes of the same code differ by so much
matrix = {name: 1e3 * median(turn[CPU] for turn in taken[f"{name}, matrices"]) for name in tokens}
rest = max(0, step["bf16, 1"] - matrix["bf16"])


def faster(first, second, again, share=1):
    return Ratio.of_turns([[taken[name] for name in (first, second, again)]], CPU, FLOOR, share)


def predicted_ratio(name):  # from the matrices alone, one after another
    ratio = step["bf16, 1"] / (rest + matrix[name])
    return ratio / 1.5, ratio * 1.5  # in a token they follow one another, and share caches with the rest


reading = 16 * step["read 1"] / step["read 16"]
print(f"16 prompts of 64 tokens read together: {reading:.2f} times the throughput of one")
rows = [[name, f"{matrix[name]:.2f}", f"{step[f'{name}, 1']:.2f}"] for name in tokens]
plots.Table(["weights", "ms of the matrices", "ms of a token"], rows)

# %% [markdown]
# ## An evaluation that keeps everything
#
# Training holds gradients and optimizer states; evaluation does not. But the Trainer collects the **logits**, one number per word of the vocabulary at each position, of *all* samples before it calls `compute_metrics`. `preprocess_logits_for_metrics` can make them small first.


# %%
SAMPLES, LENGTH = lab.sized(512, 128), 64


def job(kind):
    def run(_):
        model, rows = LlamaForCausalLM(config), text(SAMPLES, LENGTH, seed=7)
        data = [{"input_ids": row, "labels": row} for row in rows]
        small = (lambda logits, labels: logits.argmax(-1)) if kind == "argmax" else None
        with tempfile.TemporaryDirectory() as folder:
            options = dict(per_device_train_batch_size=8, per_device_eval_batch_size=8, max_steps=2)
            quiet = dict(report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True)
            seen = []
            hooks = dict(
                compute_metrics=lambda found: seen.append(found.predictions.nbytes) or {},
                preprocess_logits_for_metrics=small,
            )
            args = TrainingArguments(folder, **options, **quiet)
            args._n_gpu = min(1, args.n_gpu)
            trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, **hooks)
            trainer.train() if kind == "train" else trainer.evaluate()
        return seen[0] if seen else None

    return run


# %%
kinds = {"train": "training", "logits": "evaluation, logits kept", "argmax": "evaluation, argmax first"}
runs = {kind: lab.run(job(kind), name, measure="peak", use_cpu=True) for kind, name in kinds.items()}
rows = [
    [kinds[kind], plots.bytes_text(run.peak_bytes), plots.bytes_text(run.value or (0 if run.ok else None))]
    for kind, run in runs.items()
]
print(
    f"logits by arithmetic: {SAMPLES * LENGTH * config.vocab_size * 4:,} bytes; passed to compute_metrics: {runs['logits'].value}"
)
plots.Table(["what", "peak", "bytes passed to compute_metrics"], rows)

# %% [markdown]
# The Trainer joins the logits of each batch to those that it has kept. For a moment the old and the new tensor both exist, so the peak has the logits about twice. Their memory grows with the number of samples: with few samples, evaluation does take less than training. On a GPU the logits stay there until the evaluation ends. With `eval_accumulation_steps` they move earlier, every few batches, to the computer's own memory (the *host*), which still has to hold all of them. The remedy is the argmax.
#
# ## Padding has a side
#
# To put prompts of unequal length into one batch, you fill up the short ones. The model writes the next token after the *last* position. If the padding is on the right, that position is padding.


# %%
def padded(prompts, side):
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        place = slice(longest - len(prompt), longest) if side == "left" else slice(len(prompt))
        ids[row, place], mask[row, place] = prompt, 1
    return ids, mask


def changed(side, prompts):
    alone = [write(model, one[None], new=12).sequences[0, len(one) :] for one in prompts]
    ids, mask = padded(prompts, side)
    together = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)[:, ids.shape[1] :]
    return sum(not torch.equal(one, other) for one, other in zip(alone, together))


prompts = [text(1, 5 + number, 2000 + number)[0] for number in range(20)]
apart = {side: changed(side, prompts) for side in ("left", "right")}
print(f"answers of 20 that padding changed, by its side: {apart}")

# %% [markdown]
# ## What held
#
# ### The cache and the quantized weights

# %% tags=["claim"]
display(claims.check("cache-bytes", counted / formula))
display(claims.check("static-cache-high", fixed / counted, note="the same tokens, and no room left unused"))
claims.check("static-cache-compiles", compiled, note=f"where all devices are allowed: {allowed}")

# %% tags=["claim"]
note = f"bits a weight: {bits['nf4']:.3f}, or {bits['nf4, scales quantized']:.3f}"
display(claims.check("nf4-bits", share, note=note))
claims.check("footprint-tells", footprint / held)

# %% tags=["claim"]
note = f"the measure sees harm: two bits lose {cells['2 bits']}"
display(claims.check("quantized-error", gone["int8"], note=note))
claims.check("nf4-error", gone["nf4"], note=note)

# %% [markdown]
# ### Time, evaluation and padding

# %% tags=["claim"]
together = faster("fp32, 1", "fp32, 16", "fp32, again", 16)
note = f"latency: {step['fp32, 16'] / step['fp32, 1']:.1f} times; prompts of 64 tokens read together: {reading:.2f}"
display(claims.check("batching-throughput", together, note=note))
for id, name in {"quantized-faster": "nf4", "int8-faster": "int8"}.items():
    display(claims.check(id, faster("bf16, 1", f"{name}, 1", "bf16, again"), predicted=predicted_ratio(name)))

# %% tags=["claim"]
peaks = {kind: run.peak_bytes for kind, run in runs.items()}
claims.check("eval-keeps-logits", peaks["logits"] and peaks["logits"] / peaks["train"])

# %% tags=["claim"]
claims.check("padding-side", (apart["right"] - apart["left"]) / len(prompts), note=f"changed: {apart}")

# %% [markdown]
# ## Explore
#
# How much memory would the cache of your own model take? The first picture shows the cache alone, the second the whole memory of a model, at first a Llama of 8B. In the second picture, try more new tokens per answer, and fewer bits per weight.


# %% tags=["widget"]
def draw(heads, answers):
    held = [2 * 32 * heads * 128 * 2 * answers * tokens / 1e9 for tokens in (1024, 4096, 16384)]
    title = f"32 layers, head size 128, bf16: {heads} heads of keys and values"
    return plots.lines([1024, 4096, 16384], {f"{answers} answers": held}, "tokens", "GB", title=title)


_ = widgets.explore(draw, heads=[4, 8, 32], answers=[1, 8, 64])
lab.foresee(
    explorers.memory, lab, Task("llama-3-8b", seq_len=1024, config={"dtype": "float32"}), of="inference", card="a100"
)

# %% [markdown]
# ## Exercise 1: serve 64 requests
#
# As in practice, many requests are short and some are long. Each answer must be the one that its request gets alone. You decide which requests share a batch, on which side the padding goes, and the type of the weights: your answer is a dict with these three arguments of `serve`, the function below. Two bad solutions set your limits, which are printed below. One request at a time is slow: you may take 0.75 of its time. All at once takes much memory: you may take a third of it. (The solution's cell also tries a wrong answer, on purpose. The warnings about padding below that cell come from it.)


# %%
lengths = (4 + 296 * torch.rand(64, generator=torch.Generator().manual_seed(1)) ** 4).long().tolist()
requests = [text(1, length, 3000 + number)[0] for number, length in enumerate(lengths)]


def serve(plan, side="left", dtype=torch.float32):
    """Return the answers, 8 tokens each. `plan` makes batches, lists of request numbers, from the lengths."""
    form, answers = copy.deepcopy(model).to(dtype), {}
    for numbers in plan(lengths):
        ids, mask = padded([requests[number] for number in numbers], side)
        made = form.generate(ids, attention_mask=mask, max_new_tokens=lab.sized(8, 3), do_sample=False)
        answers |= dict(zip(numbers, made[:, ids.shape[1] :].tolist()))
    return [answers.get(number) for number in range(64)]


def timed(**options):
    with lab.quiet():  # use the fastest of three
        moments = [time.process_time()]
        for _ in range(3):
            answers = serve(**options)
            moments.append(time.process_time())
    return answers, min(end - begin for begin, end in itertools.pairwise(moments))


# %%
def peak(**options):
    run = lab.run(lambda _: bool(serve(**options)), "served", measure="peak", use_cpu=True)
    return run.peak_bytes


alone, slow = timed(plan=lambda lengths: [[number] for number in range(64)])
large = peak(plan=lambda lengths: [range(64)])
bytes_limit, seconds_limit = large and large / 3, 0.75 * slow
if large:
    print(f"one by one {slow:.2f} s of computing; all at once {plots.bytes_text(large)}")
    print(f"your limits: {seconds_limit:.2f} s and {plots.bytes_text(bytes_limit)}")

# %% jupyter={"source_hidden": true}
exercises.hint(
    "What does a batch of one long and fifteen short requests compute for the short ones?",
    "The peak is that of the batch with the most tokens, padding included.",
    "Sort the numbers by length, then cut the list: `order[first : first + 8]`, and so on.",
)

# %% tags=["exercise"]
answer = None  # dict(plan=lambda lengths: [[0, 1], [2, 3], ...], side=..., dtype=...)


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    (answers, first), (_, again) = timed(**answer), timed(**answer)
    if different := sum(one != other for one, other in zip(answers, alone)):
        return exercises.wrong(f"{different} of 64 answers differ from those alone")
    if (took := min(first, again)) > seconds_limit:
        return exercises.wrong(f"{took:.2f} s of computing, more than {seconds_limit:.2f}")
    most = peak(**answer)
    if not (most and bytes_limit):
        return exercises.not_measured(lab["served"].failure or "memory was not measured here")
    message = f"{took:.2f} s of computing, {plots.bytes_text(most)}"
    return exercises.right(message) if most <= bytes_limit else exercises.wrong(f"{message}: too much memory")


exercises.check(lab, "serve", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
by_length = sorted(range(64), key=lambda number: lengths[number])
batches = [by_length[first : first + 16] for first in range(0, 64, 16)]
exercises.prove(check, solution=dict(plan=lambda _: batches), mistake=dict(plan=lambda _: batches, side="right"))

# %% [markdown]
# ## Exercise 2: the challenge
#
# Serve the same requests within a *tenth* of the memory of all at once, in at most 12 batches. Each answer must still be the one that its request gets alone. What can you hold constant in each batch, if not its number of requests? bf16 weights are allowed: does any answer change with them?

# %% jupyter={"source_hidden": true}
exercises.hint(
    "Which batch of your solution above has the most tokens, padding included? The others have room to spare.",
    "A batch has (number of requests) x (longest of them) tokens. Limit this product.",
    "Go through the numbers, sorted by length. Start a new batch when one more request would exceed the limit.",
)

# %% tags=["exercise"]
most = 12  # batches
answer = None  # dict(plan=lambda lengths: [[0, 1], [2, 3], ...], side=..., dtype=...)


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    batches = [[*numbers] for numbers in answer["plan"](lengths)]
    if len(batches) > most:
        return exercises.wrong(f"{len(batches)} batches, more than {most}: more short requests can share a batch")
    if different := sum(one != other for one, other in zip(serve(**answer), alone)):
        return exercises.wrong(f"{different} of 64 answers differ from those alone: which side, which type?")
    needed = peak(**answer)
    if not (needed and large):
        return exercises.not_measured(lab["served"].failure or "memory was not measured here")
    message = f"{len(batches)} batches, {plots.bytes_text(needed)}, {needed / large:.3f} of all at once"
    if needed > large / 10:
        tokens = max(len(numbers) * max(lengths[number] for number in numbers) for numbers in batches)
        return exercises.wrong(f"{message}: too much memory. Your largest batch has {tokens} tokens with padding")
    return exercises.right(message)


exercises.check(lab, "a tenth", check, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def by_tokens(lengths, limit=650):
    plan = [[]]
    for number in sorted(range(64), key=lambda number: lengths[number]):
        if (len(plan[-1]) + 1) * lengths[number] > limit and plan[-1]:
            plan.append([])
        plan[-1].append(number)
    return plan


exercises.prove(check, solution=dict(plan=by_tokens), mistake=dict(plan=lambda _: batches))

# %% [markdown]
# ## Common mistakes
#
# - *Padding on the right.* The library warns and goes on; the section above shows how many answers change.
# - *Metrics on a language model without `preprocess_logits_for_metrics`.* Memory grows with the data set. `eval_accumulation_steps` does not help: it moves the logits to the host, and keeps them all.
# - *4 bits for speed.* They save memory. Whether they are also faster depends on your processor.
# - *`device_map="auto"` for speed.* It puts layers one after another onto several devices, and only one device works at a time (lesson 17).
# - *`low_memory=True` for beam search* (generation that keeps several candidates at once). Older pages recommend this option to save memory; the library now refuses it.
#
# ## Recap
#
# The numbers are those of a recorded run (AMD EPYC, 2 cores, torch 2.15.0, 2026-11-29).
#
# - The cache took exactly the bytes of the formula: 2 x layers x heads of keys x head size x bytes x tokens, for each answer. It changed no answer.
# - A 4-bit weight takes 4.5 bits with its scale, and the library's figure leaves the scales out: it reports 0.96 of what the model holds.
# - Sixteen answers shared one reading of the weights: 6.5 times the throughput, 2.5 times the latency.
# - The kept logits made the evaluation's peak 4.6 times the training's. Take the argmax first.
# - Padding on the right changed 18 of 20 answers, padding on the left 0.

# %% tags=["finish"]
claims.finish()
