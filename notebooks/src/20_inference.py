# %% [markdown]
# # One answer or many: where does the memory of inference go?
#
# No gradients, no optimizer states: inference should be the easy part. Yet it runs out of memory too, in places that training does not have.
#
# **You will see**
# - what the keys and values of past tokens take, to the byte, and that a cache changes no answer
# - what four bits a weight really are, and which number about them is wrong
# - how an evaluation comes to take more memory than the training, and how padding changes answers

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import logging
import tempfile

import matplotlib.pyplot as plt
import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from perf_helpers import Lab, claims, exercises, plots, widgets

lab = Lab(profile, strict=strict, out=out, lesson="20_inference")
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of a cast at each product
torch.set_num_threads(1)  # in this notebook's own process, where all tensors are small

# %% [markdown]
# ## Idea
#
# A language model writes one token at a time. For each new token, attention looks at the **keys** and **values** of all tokens before it. They do not change once computed, so they are kept: this is the **KV cache**. It grows with every token and every answer that is written at the same time.
#
# Everything here runs on the CPU, with a GPU too: bytes are counted, and answers are compared.
#
# ## Predict
#
# Our model is a small Llama: 4 layers, 8 heads for the queries, 2 for keys and values, head size 16, in fp32. Commit a number before you run on.

# %%
sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2)
special = dict(vocab_size=512, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=None)
config = LlamaConfig(**sizes, **special)
torch.manual_seed(0)
model = LlamaForCausalLM(config)
asked = "How many KB does the cache of one answer take when 63 tokens are in it?"
widgets.predict(lab, "cache", asked, "KB", 0, 600)

# %% [markdown]
# ## A model that has learnt something
#
# Random weights give answers that hang on a hair. So we train first, for some seconds. In our language each word has one that follows it, except that one time in five any word may come.


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
for step in range(150):
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
# One attention layer, ten tokens. Without a cache the whole sequence goes through it for every new token. With one, only the newest token does, and its key and value are appended to two tensors.

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
# `generate` keeps a cache by default. A **dynamic** cache grows by each token. A **static** one is allocated at once for all tokens to come, so that its shapes stay and a compiler can work with them. We count the bytes of their tensors.


# %%
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
counted, fixed = cache_bytes(dynamic.past_key_values), cache_bytes(static.past_key_values)
stored = dynamic.past_key_values.get_seq_length()  # the last token was written, and never read
formula = 2 * config.num_hidden_layers * config.num_key_value_heads * 16 * 4 * stored
print(f"{stored} tokens: dynamic {counted:,} bytes, static {fixed:,}, formula {formula:,}")
widgets.revealed(lab, "cache", counted / 1e3)

# %%
lengths = [8, 16, 32, 63]
grown = {}
for batch in (1, 4, 16):
    prompts = text(batch, 7, seed=1000)
    made = [write(model, prompts, new=length - 6) for length in lengths]
    grown[f"{batch} at once"] = [cache_bytes(one.past_key_values) / 1e3 for one in made]
figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
_ = plots.lines(
    lengths, grown, "tokens in the cache", "KB of keys and values", ax, "The cache grows with tokens and answers"
)

# %%
answers = ["a quarter", "the same", "four times as much"]
exercises.question(
    lab,
    "shared-heads",
    "With 8 heads for keys and values in place of 2, what would the cache take?",
    {
        answers[0]: "More heads make more keys and values, not fewer.",
        answers[1]: "The number of query heads stays; that of what is kept does not. Queries are not kept.",
        answers[2]: "Keys and values count, queries do not. That is why newer models let several query heads share one "
        "head of keys and values.",
    },
    right=answers[2],
)

# %% [markdown]
# Static and dynamic take the same when all tokens are out. The library's table calls the memory of a static cache high and that of a dynamic one medium. It is high *earlier*, and it stays higher only where room was asked for that no token used. Ask for what you need.
#
# ## Four bits a weight
#
# By hand: 64 weights at a time share one scale, their largest absolute value in fp32. That is 32 bits for 64 weights, half a bit each. bitsandbytes does the same, and works on a CPU.


# %%
def quantized(model, **options):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        how = BitsAndBytesConfig(**options)
        return LlamaForCausalLM.from_pretrained(folder, quantization_config=how, device_map="cpu").eval()


def scale_bytes(weight):  # the blocks' scales; with double quantization these are quantized too
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
said = nf4.get_memory_footprint()
held = said + scales
whole = model.get_memory_footprint()
print(f"bits a quantized weight: {bits}")
print(f"the library says {said:,} bytes; with the scales it holds {held:,}")
print(f"of the whole fp32 model {held / whole:.0%} stay: embeddings and head are not quantized")

# %% [markdown]
# `get_memory_footprint` adds up parameters and buffers. The scales are neither: they hang on the weight as an attribute. The remedy is in the cell above: add them.
#
# Does the model still know its language? The loss on text that it has not seen:

# %%
unseen = text(64, 32, seed=10**6)
losses = {}
for name, one in {"fp32": model, "int8": int8, "nf4": nf4}.items():
    with torch.no_grad():
        losses[name] = one(input_ids=unseen, labels=unseen).loss.item()
plots.Table(["weights", "loss"], [[name, f"{loss:.3f}"] for name, loss in losses.items()])

# %% [markdown]
# ## An evaluation that keeps everything
#
# Training holds gradients and states; evaluation does not. But the Trainer gathers the **logits**, one number for each word of the vocabulary at each position, of *all* samples before `compute_metrics` sees them. `preprocess_logits_for_metrics` makes them small first.


# %%
SAMPLES, LENGTH = 512, 64


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
runs = {kind: lab.run(job(kind), name, measure=("memory",), use_cpu=True) for kind, name in kinds.items()}
rows = [[kinds[kind], plots.bytes_text(run.peak_bytes), plots.bytes_text(run.value or 0)] for kind, run in runs.items()]
print(f"logits by arithmetic: {SAMPLES * LENGTH * config.vocab_size * 4:,} bytes; given: {runs['logits'].value}")
plots.Table(["what", "peak", "given to compute_metrics"], rows)

# %% [markdown]
# What is kept grows with the number of samples: with few, evaluation does take less than training. `eval_accumulation_steps` only moves the logits to the host earlier, and keeps them all there. The argmax is the cure.
#
# ## Padding has a side
#
# Prompts of unequal length share a batch when the short ones are filled up. The next token is written after the *last* position. With padding on the right, that is after the padding.


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
print(f"answers of 20 that differ from those alone: {apart}")

# %% [markdown]
# ## What held

# %% tags=["claim"]
claims.check("cache-bytes", counted / formula)

# %% tags=["claim"]
claims.check("static-cache-high", fixed / counted, note="the same tokens, and no room left unused")

# %% tags=["claim"]
claims.check("nf4-bits", share, note=f"bits a weight: {bits['nf4']:.3f}, or {bits['nf4, scales quantized']:.3f}")

# %% tags=["claim"]
claims.check("footprint-tells", said / held)

# %% tags=["claim"]
peaks = {kind: run.peak_bytes for kind, run in runs.items()}
ratio = peaks["logits"] / peaks["train"] if peaks["logits"] and peaks["train"] else None
claims.check("eval-keeps-logits", ratio)

# %% tags=["claim"]
claims.check("padding-side", (apart["right"] - apart["left"]) / len(prompts), note=f"changed: {apart}")

# %% [markdown]
# ## Explore
#
# What would the cache of a model of your own take?


# %% tags=["widget"]
def draw(heads, answers):
    held = [2 * 32 * heads * 128 * 2 * answers * tokens / 1e9 for tokens in (1024, 4096, 16384)]
    title = f"32 layers, head size 128, bf16: {heads} heads of keys"
    return plots.lines([1024, 4096, 16384], {f"{answers} answers": held}, "tokens", "GB", title=title)


_ = widgets.explore(draw, heads=[4, 8, 32], answers=[1, 8, 64])

# %% [markdown]
# ## Exercise: reckon a cache
#
# Write a function: from `(batch, tokens)` to the bytes that our model's cache takes. The check measures.

# %%
exercises.hint("Which tensors are kept, how many of them, and who shares them? Queries are not kept.")

# %% tags=["exercise"]
answer = None  # lambda batch, tokens: ...


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    for batch, tokens in ((1, 20), (3, 33)):
        kept = cache_bytes(write(model, text(batch, 10, 5), new=tokens - 9).past_key_values)
        if answer(batch, tokens) != kept:
            return exercises.wrong(f"{batch} x {tokens}: {kept:,} bytes are kept, you say {answer(batch, tokens):,}")
    return exercises.right("two tensors a layer, for the heads that are kept")


exercises.check(lab, "cache", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(
    check,
    solution=lambda batch, tokens: 2 * 4 * 2 * 16 * 4 * batch * tokens,
    mistake=lambda batch, tokens: 2 * 4 * 8 * 16 * 4 * batch * tokens,  # all heads, as if each kept its own
)

# %% [markdown]
# **A challenge.** Answer the 20 prompts in batches of at most 5, without a changed answer and with as little padding as you can. What order do you take them in?
#
# ## Mistakes that strangers make
#
# - *Padding on the right.* The library warns, and goes on; above you see what the answers are worth.
# - *Metrics on a language model without `preprocess_logits_for_metrics`.* Memory grows with the data set.
# - *`low_memory=True` for beam search.* Older pages name it as the remedy; the library now refuses it.
#
# ## Recap
#
# - The cache took what the formula says: layers, heads of keys, head size, tokens, answers. It changed no answer.
# - Four bits are four and a half with the scales, and the library's own number leaves these out.
# - Evaluation's peak is the logits, unless they are made small first. Pad on the left.

# %% tags=["finish"]
claims.finish(lab)
