# %% [markdown]
# # Can a model have ten times the parameters at the same arithmetic?
#
# Mixtral has 47 billion parameters, but a token is multiplied by only 13 billion of them. Which of the two numbers decides how much memory you need, how long a step takes, and how good the model gets?
#
# **You will see**
# - a gate, experts, dispatch and combine in a few lines, with the same output as the layer in transformers
# - what grows with the number of experts and what does not: parameters, memory, arithmetic, seconds, and the loss
# - experts in two processes, tokens that travel to them and back, and the bytes that they take
#
# **Time:** plan 60 minutes. The cells run for 1 to 2 minutes on two CPU cores.
#
# **Before you start:** lesson 01 (memory of a step), lesson 02 (counting operations) and lesson 15 (ranks).
#
# **What a CPU cannot show:** how long a GPU takes for many small experts, and for sending tokens to another GPU. Parameters, bytes, operations and losses do not depend on the device; seconds here are CPU time of one thread.

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import math
import os
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from statistics import median

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from IPython.display import display
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from perf_helpers import Claims, Lab, Task, exercises, hardware, interleaving, plots, widgets
from perf_helpers.lab import Ratio
from trainmem.estimate import estimate

lab = Lab(profile, strict=strict, out=out, lesson="18_mixture_of_experts")
claims = Claims(lab)
gpus2, cuda = hardware.supports("gpus2")[0], lab.machine.kind == "cuda"
torch.set_num_threads(1)  # in this notebook's own process, where all tensors are tiny

# %% [markdown]
# ## Idea
#
# In a transformer most parameters belong to the feed-forward networks (FFNs), and every token is multiplied by all of them. A **mixture of experts** has many FFNs in a layer, the *experts*. A small linear layer, the **gate** (or router), scores them for each token, and only the best *k* compute. The parameters are those of all experts. The arithmetic is that of *k* experts, however many there are. We say that a token *meets* a weight if it is multiplied by it.
#
# So the "8 experts" in a model's name do not tell its arithmetic, which depends on *k* and an expert's width.
#
# ## Predict
#
# The usual model, with one FFN per layer, is called *dense*. Below, a small dense model gets 32 experts in place of each FFN. Each expert is half as wide as that FFN, and each token goes to two of them.

# %%
question = "At the peak, how many times as much memory does training the mixture take as training the dense model?"
widgets.predict(lab, "peak", question, "x", 0.5, 40)

# %%
exercises.question(
    lab,
    "eight times",
    "A layer gets 8 experts, each exactly as wide as the FFN that it had, and a token goes to the best 2. How much "
    "arithmetic does a token cost there?",
    {
        "8 times as much": "Eight experts are there, and stay in memory. But a token is multiplied by the weights of two.",
        "about as much as before": "That would be true of one expert of that width for each token, or of two half as wide.",
        "about twice as much": "Two experts of the old width, and the gate's own matmul, which is small: one row per "
        "expert. The other six cost memory, not arithmetic.",
    },
    right="about twice as much",
)

# %% [markdown]
# ## By hand
#
# A mixture takes four steps:
#
# - **route**: score the experts, choose the best *k*, and divide their scores by the sum of these: the *routing weights*;
# - **dispatch**: collect the tokens of each expert;
# - **compute**: run each expert on its tokens;
# - **combine**: multiply the results by the routing weights, and add them up where the tokens came from.
#
# An expert here is Mixtral's FFN: three matrices, and SiLU as the activation function. Two of the matrices are stored as one tensor, `gate_up`. (This "gate" multiplies numbers inside an expert; it is not the router.)


# %%
def route(x, gate, k):
    """Return routing weights and chosen experts (tokens, k), scores (tokens, experts). x: (tokens, width)."""
    scores = (x @ gate.T).softmax(-1)
    weights, chosen = scores.topk(k)
    return weights / weights.sum(-1, keepdim=True), chosen, scores


def expert(x, gate_up, down):
    a, b = (x @ gate_up.T).chunk(2, -1)
    return (F.silu(a) * b) @ down.T


def mixture(x, gate, gate_up, down, k):
    weights, chosen, _ = route(x, gate, k)
    out = torch.zeros_like(x)
    for number in range(len(gate)):
        token, place = (chosen == number).nonzero(as_tuple=True)
        result = expert(x[token], gate_up[number], down[number])  # dispatch, and compute
        out = out.index_add(0, token, weights[token, place, None] * result)  # combine
    return out


# %% [markdown]
# Nothing so far keeps the gate from sending every token to the same two experts. So trainings of mixtures add a **balancing loss** to the task's loss, times a small factor (0.02 below). For each expert it multiplies the share of tokens that the expert got by the mean score that the gate gave it. The sum over the experts, times the number of experts, is the loss. It is smallest if both are even. (Only the scores get a gradient, because a share is a count. The larger the share of an expert, the more an update lowers its score.)
#
# The next cell compares our mixture and balancing loss with those of transformers, on a Mixtral layer's weights, and prints how transformers computes the experts:


# %%
def balancing(scores, chosen):
    """Return the loss of Switch Transformers, equations 4 to 6, with k choices per token."""
    share = F.one_hot(chosen, scores.shape[-1]).float().sum(1).mean(0)
    return scores.shape[-1] * (share * scores.mean(0)).sum()


def sparse(experts, k, width, seq_len=64, **config):
    """Return a small Mixtral; for one expert a Llama, the same without gate, sorting and copies of tokens."""
    config = {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 500, "head_dim": 32} | config
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": width} | config
    config["dtype"] = "float32"
    if experts == 1:
        return Task("llama-3-8b", seq_len, config=config)
    return Task("mixtral", seq_len, config=config | {"num_local_experts": experts, "num_experts_per_tok": k})


model = sparse(8, 2, 64).build_model()
block, x = model.model.layers[0].mlp, torch.randn(2, 64, 128)
weights = block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj
library, by_hand = block(x), mixture(x.flatten(0, 1), *weights, k=2)
torch.testing.assert_close(by_hand.view_as(x), library[0] if isinstance(library, tuple) else library)
_, chosen, scores = route(x.flatten(0, 1), weights[0], 2)
logits = (x.flatten(0, 1) @ weights[0].T,)
torch.testing.assert_close(balancing(scores, chosen), load_balancing_loss_func(logits, 8, 2))
print(type(block).__name__, "computes its experts by", model.config._experts_implementation)

# %% [markdown]
# Outputs and balancing losses are equal. `eager` is a loop like ours. `grouped_mm` sorts the tokens by expert and computes all matmuls in one call. `batched_mm` copies the weights for every token. `model.set_experts_implementation` switches between them.
#
# The gate sees the hidden vector of one token and nothing else. So equal vectors get the same experts at every position in the sequence.
#
# ### Which layers?
#
# "Every other FFN layer is replaced", say the guides. Their picture comes from the paper on the mixture GLaM, for which this is true. The table has each architecture's default configuration in full size, on torch's `meta` device (lesson 00):


# %%
def census(name):
    """Return the row of an architecture in the table below; parameters are in billions."""
    config = transformers.AutoConfig.for_model(name)
    families = ("CausalLM", "ForCausalLM", "ForConditionalGeneration")
    stem = type(config).__name__.removesuffix("TextConfig").removesuffix("Config")
    kind = next(found for end in families if (found := getattr(transformers, stem + end, None)))
    with torch.device("meta"):
        model = kind._from_config(config, dtype=torch.bfloat16)
    experts = [part for part in model.modules() if type(part).__name__.endswith("Experts")]
    inside = sum(weight.numel() for part in experts for weight in part.parameters())
    total = sum(weight.numel() for weight in model.parameters())
    many = next(value for key in COUNTS if (value := getattr(config, key, None)))
    k = next((value for key in CHOSEN if (value := getattr(config, key, None))), 2 if name == "nllb-moe" else 1)
    layers = sum(getattr(config, key, None) or 0 for key in LAYERS)
    return [name, len(experts), layers, many, k, total / 1e9, (total - inside * (1 - k / many)) / 1e9]


COUNTS = ("num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts")
CHOSEN, LAYERS = ("num_experts_per_tok", "moe_k"), ("num_hidden_layers", "decoder_layers", "num_decoder_layers")
NAMES = ["switch_transformers", "nllb-moe", "mixtral", "jamba", "qwen2_moe", "olmoe", "granitemoe", "phimoe"]
NAMES += ["deepseek_v3", "qwen3_moe", "gpt_oss", "ernie4_5_moe", "glm4_moe", "minimax"]
found = [census(name) for name in NAMES]
titles = ["architecture", "layers with experts", "all layers", "experts", "k", "parameters, 1e9", "a token meets, 1e9"]
display(plots.Table(titles, found))
every_other = sum(2 * sparse_ones == layers for _, sparse_ones, layers, *_ in found) / len(found)

# %% [markdown]
# Jamba replaces every other FFN, Switch and NLLB every fourth one. The others replace all FFNs, or all but those of the first one to three layers. (In 2022 most implementations were in TensorFlow, as the guides say; all of these are in PyTorch.)
#
# ## Baseline
#
# The dense model is a Llama of 4 layers, each with an FFN of width 512. (A Mixtral with one expert would not do: it pays for gate and sorting.)

# %%
dense = sparse(1, 1, 512)
base = lab.train("dense", task=dense, per_device_train_batch_size=4, measure=("memory",))
base

# %% [markdown]
# ## Change one thing
#
# The mixture has 32 experts of width 256. A token goes to two, so it meets as many weights as before.

# %%
many = sparse(32, 2, 256)  # new
mixed = lab.train("32 experts", task=many, per_device_train_batch_size=4, measure=("memory",))
_ = plots.memory([base, mixed], title="A training step of 4 sequences: the peak")


def of_tensors(measured):
    """Return the bytes at the peak without operator workspace, which on a GPU is as large for any model."""
    return measured.peak_bytes - measured.memory.breakdown["inside_operations"]


heavier, grown = of_tensors(mixed) / of_tensors(base), many.parameters() / dense.parameters()
inferred = {
    name: lab.infer(name, task=task, measure="peak")
    for name, task in {"dense, inference": dense, "experts, inference": many}.items()
}
at_inference = inferred["experts, inference"].peak_bytes / inferred["dense, inference"].peak_bytes
print(f"{grown:.1f} times the parameters; memory: {heavier:.1f} times in training, {at_inference:.1f} in inference")


def estimated_ratio():
    peaks = [of_tensors(estimate(each, per_device_train_batch_size=4)) for each in (many, dense)]
    return peaks[0] / peaks[1]


widgets.revealed(lab, "peak", heavier, estimate=lab.foresee(estimated_ratio))

# %% [markdown]
# Weights, gradients and optimizer states grow with *all* experts. Activations grow only with the experts that a token meets. So memory grows by a smaller factor than the parameters, and a larger batch lowers that factor. Inference needs all experts in memory, too: the next token may go to any of them. The guides name *distillation* as a way out: a dense model is trained on the mixture's outputs, so inference takes a dense model's memory (not measured here).
#
# And the arithmetic? torch's counter has a trap here (lesson 02): it knows matmuls by their names, and in torch 2.15 `_grouped_mm` is not among them. So the table also has the experts' part by formula: 3 matrices of 128 x 256, 6 operations per weight (2 in forward, 4 in backward), 2 experts, 4 layers.


# %%
def products(task, implementation="eager"):
    """Return the floating-point operations in matmuls per token, forward and backward."""
    model, batch = task.build_model(), task.batch(4)
    if hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation(implementation)
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    return counter.get_total_flops() / batch["input_ids"].numel()


cost = {name: products(task) for name, task in {"dense": dense, "32 experts": many}.items()}
grouped, by_formula = products(many, "grouped_mm"), 3 * 128 * 256 * (2 + 4) * 2 * 4
if grouped < cost["32 experts"]:
    assert grouped + by_formula == cost["32 experts"]
rows = [["dense", cost["dense"], 1.0], ["32 experts, eager", cost["32 experts"], cost["32 experts"] / cost["dense"]]]
rows += [["32 experts, grouped_mm, as counted", grouped, grouped / cost["dense"]]]
rows += [["the experts alone, by formula", float(by_formula), by_formula / cost["dense"]]]
plots.Table(["", "operations per token", "x dense"], rows)

# %% [markdown]
# If the third and the fourth row add up to the second, the counter missed the experts, and a utilization computed from its count is far too low. The mixture itself adds only the gate: one matmul with 32 rows.
#
# ### Seconds
#
# Equal arithmetic is not equal time. The next cells time training steps of both models in interleaved runs, the mixture with two implementations:


# %%
def in_turns(tasks, turns=6, samples=64, learns=True, implementations=()):
    """Return for each task (wall, CPU) seconds of each turn: of its step or its forward pass, on one thread."""

    def work(task, implementation):
        model, batch = task.build_model().to(DEVICE), task.batch(samples, DEVICE)
        if implementation:  # as in the table above
            model.set_experts_implementation(implementation)
        if not learns:
            return lambda: torch.no_grad()(model.eval())(input_ids=batch["input_ids"])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return lambda: (model(**batch).loss.backward(), optimizer.step(), optimizer.zero_grad())

    def measure(_):
        torch.set_num_threads(1)
        each = implementations or len(tasks) * [None]
        return interleaving.in_turns([work(*pair) for pair in zip(tasks, each)], turns)

    return lab.run(measure, "in turns", measure="value").value


# %%
def speed_of(processes, first, second, again):
    """Return how many times as fast as the first the second work is: a median with its interval. `again` is the
    first once more: their difference is noise."""
    return Ratio.of_turns(
        [[taken[which] for which in (first, second, again)] for taken in processes or []], CLOCK, FLOOR
    )


def small(experts, k, width, scale=1):
    """Return a model with one layer of width 64 x scale: each side of each matrix is scaled."""
    thin = {"hidden_size": 64 * scale, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 48 + 64}
    return sparse(experts, k, width * scale, 16, head_dim=16 * scale, **thin)


# CLOCK: 0 is wall time, 1 is CPU time. FLOOR: the noise of a ratio is at least this factor.
DEVICE, CLOCK, FLOOR = ("cuda", 0, 1.02) if cuda else ("cpu", 1, 1.05)
implementations = [None, "grouped_mm", "eager"]
taken = in_turns([dense, many, many], 3, samples=4, implementations=implementations)
rows = [[name or "dense", 1e3 * median(turn[CLOCK] for turn in each)] for name, each in zip(implementations, taken)]
plots.Table(["experts computed by", "ms per step"], rows)

# %% [markdown]
# Part of the difference is the update: AdamW goes over *every* parameter in each step, chosen or not. Another part is sorting, gathering, and matmuls with few rows each, which run at a lower rate.
#
# ## Does it learn more?
#
# The task has 48 "languages" with the same 64 words. In each language every word has a fixed successor. The first token of a sentence names its language, the second is a random word, and each further word is the successor of the word before it. This takes *remembering*, which suits experts.
#
# Dense models of several widths compete with a mixture of 8 experts and one of 64. The 64 experts train once more without the balancing loss. All train with the same steps, learning rate and three seeds, and are tested on fresh sentences.
#
# - A token goes to two experts. So in `8 experts` (of width 32) it meets as many weights as in the dense model of width 64, and in `64 experts` (of width 16) as many as in that of width 32.
# - The dense model of width 256 has about as many weights in all as the mixture of 8 experts.


# %%
def sentences(order, count, numbers):
    language, word = (torch.randint(high, (count,), generator=numbers) for high in order.shape)
    rows = [64 + language, word]
    while len(rows) < 16:
        rows.append(word := order[language, word])
    return torch.stack(rows, 1)


def guessed(expert, ids):
    """Return how often a token's expert is guessed right from one property of the token. The guess is the expert that
    was chosen most for that value in the first half of the sentences; the second half is the test. (The first word is
    left out: it is the language, so the word gives its place away.)"""
    expert, words, found = expert.view(ids.shape)[:, 1:].flatten(), ids[:, 1:].flatten(), {}
    places, half = torch.arange(1, ids.shape[1]).repeat(len(ids)), len(words) // 2
    for name, known in {"nothing": 0 * words, "its place": places, "its word": words}.items():
        counts = torch.zeros(int(known.max()) + 1, int(expert.max()) + 1)
        counts.index_put_((known[:half], expert[:half]), torch.ones(half), accumulate=True)
        found[name] = (counts.argmax(1)[known[half:]] == expert[half:]).float().mean().item()
    return found


# %%
def learn(task, seed, balance=0.02):
    numbers = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(64, generator=numbers) for _ in range(48)])
    model, losses, load = task.replace(seed=seed).build_model(), [], {}
    gates = {"output_router_logits": True} if hasattr(model.config, "num_local_experts") else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=0.0, fused=True)
    for step in range(STEPS + 1):
        ids = sentences(order, 64 if step < STEPS else 512, numbers)
        made = model(input_ids=ids, **gates)
        loss = F.cross_entropy(made.logits[:, 1:-1].flatten(0, 1), ids[:, 2:].flatten())
        losses.append(loss.item())
        if gates and step in (0, STEPS):
            load[step] = made.router_logits[0].topk(model.config.num_experts_per_tok).indices.flatten()
        (loss + balance * made.aux_loss if gates else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {"losses": losses[:-1], "unseen": losses[-1]}
    if gates:
        found["guessed"] = guessed(made.router_logits[0].argmax(-1), ids)
        load = [seen.bincount(minlength=model.config.num_local_experts) / len(seen) for seen in load.values()]
    return found | {"load": [shares.tolist() for shares in load]}


# %%
SEEDS, STEPS = (0, 1, 2), lab.sized(240, 4)
SHAPES = {f"dense, {width}": (1, 1, width) for width in (32, 64, 160, 256)}
SHAPES |= {"8 experts": (8, 2, 32), "64 experts": (64, 2, 16), "64, no balancing": (64, 2, 16)}


def all_of(shapes, seed, balance=0.02):
    def run(_):
        torch.set_num_threads(1)
        return {name: learn(small(*sizes), seed, balance * ("no" not in name)) for name, sizes in shapes.items()}

    return lab.run(run, f"seed {seed}", measure="value").value


with ThreadPoolExecutor(2) as pool:  # trainings side by side do not change what is learnt
    learnt = [*pool.map(partial(all_of, SHAPES), SEEDS)]
ends = {name: [seed[name]["unseen"] for seed in learnt] for name in SHAPES}
rows = [[name, small(*sizes).parameters(), sizes[1] * sizes[2], *ends[name]] for name, sizes in SHAPES.items()]
display(plots.Table(["", "parameters", "FFN width a token meets", *(f"loss, seed {seed}" for seed in SEEDS)], rows))
shown = {name: [seed[name]["losses"] for seed in learnt] for name in SHAPES if name not in ("dense, 64", "dense, 256")}
_ = plots.losses(shown, title="48 languages")

# %% [markdown]
# Compare models with the same *FFN width a token meets*: those with more experts end with a lower loss. What went wrong in the last row?
#
# ## Who gets the tokens?
#
# The left picture shows the load of each expert. The right one shows how many of the tokens' choices are lost if each expert accepts at most the mean per expert times a *capacity factor*. The table asks what a token's expert depends on: you know one thing about a token (its word, or its place in the sentence), and guess the expert that the gate scores highest. If you know nothing, you always guess the expert that is chosen most often.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10.5, 3.6), layout="constrained")
loads = {"before training": learnt[0]["64 experts"]["load"][0], "balancing loss": learnt[0]["64 experts"]["load"][1]}
loads["no balancing loss"] = learnt[0]["64, no balancing"]["load"][1]
sorted_loads = {name: [64 * share for share in sorted(load, reverse=True)] for name, load in loads.items()}
plots.lines(range(1, 65), sorted_loads, "expert, busiest first", "tokens / mean", axes[0], "Load", markers=False)
axes[0].set_yscale("symlog", linthresh=0.1)
factors = [1, 1.25, 1.5, 2, 3, 4, 6, 8]
lost = {name: [100 * sum(max(0, share - f / 64) for share in load) for f in factors] for name, load in loads.items()}
plots.lines(factors, lost, "capacity factor", "choices dropped (%)", axes[1], "What does not fit")
busiest = {name: [max(seed[name]["load"][1]) * SHAPES[name][0] for seed in learnt] for name in (*SHAPES,)[4:]}
for name, most in busiest.items():
    print(f"{name}: the busiest expert got {', '.join(f'{times:.1f}' for times in most)} times the mean")
guesses = {
    predictor: [seed["64 experts"]["guessed"][predictor] for seed in learnt]
    for predictor in learnt[0]["64 experts"]["guessed"]
}
rows = [[predictor, *(f"{share:.0%}" for share in shares)] for predictor, shares in guesses.items()]
display(
    plots.Table(
        ["what you know of a token", *(f"seed {seed}" for seed in SEEDS)], rows, "How often its best expert is guessed"
    )
)

# %% [markdown]
# An expert that is chosen often learns more, and is then chosen more often. With the task's loss alone, a few experts take nearly all tokens, and the others only cost memory. The balancing loss works against that. With 64 experts, this short training does not reach an even load.
#
# The right picture matters where buffers have a fixed size, as on TPUs. Tokens that do not fit are **dropped**: they pass by on the residual connection alone. Mixtral drops none, and waits for the busiest expert instead. (DeepSeek-V3 hardly uses a balancing loss. For the choice it adds a bias to each expert's score, and lowers the bias of experts with too many tokens.)
#
# The table tests a statement of the guides: the gate trains the experts "depending on the input token's position in a sequence". If you know only a token's place, you guess its expert about as often as if you know nothing. Its word helps most, so "depending on the token" would be right.
#
# ## What quality costs
#
# How does a mixture get as good as a large dense model? The guides give experts to a smaller dense model, the *base model*; a token meets as many weights as in the base model. With dozens of experts, the base model can be 5 times smaller than the large model; with a few, 2 to 3 times. Three dense models take part here (numbers: FFN widths):
#
# - *160* is the large model by the guides' factors, whatever its loss. In 8 experts a token meets a width of 64 (160 / 2.5), in 64 experts one of 32 (160 / 5). Both mixtures are compared with it in memory, but only 8 experts in seconds.
# - *of equal quality* would end with the loss of the 64 experts. Its FFN width is interpolated between two trained widths.
# - *32* is the base model of the 64 experts.
#
# The guides' figures come from papers with large models. So the comparison runs at three sizes: as trained (hidden vectors of width 64), four times as wide, and as wide as the smallest model in those papers, Switch-Base. Hidden vectors and FFNs are widened alike, but the names stay: four times as wide, *32* has an FFN of width 128. (We assume that equal quality stays equal.)
#
# Each row of the first table is one size. Its caption names the models that all columns but the last compare. In the last column a larger number is worse.
#
# > **On a GPU:** the largest size is 32 times as wide as trained.


# %%
def equal_width(seed):
    """Return the FFN width of a dense model that ends with the loss of the 64 experts, interpolated between two trained
    widths on logarithmic axes; None if no two losses enclose it."""
    target, tried = (
        ends["64 experts"][seed],
        [(SHAPES[name][2], ends[name][seed]) for name in SHAPES if "dense" in name],
    )
    for (narrow, high), (broad, low) in pairwise(tried):
        if high >= target >= low and high > low:
            return narrow * (broad / narrow) ** (math.log(high / target) / math.log(high / low))
    return None


def measured_at(scale, learns):
    tasks = [small(*sizes, scale=scale) for sizes in (RACERS + RACERS[:3] if learns else FORWARD + FORWARD[:1])]
    return [in_turns(tasks, 3, samples=512 if cuda else 64, learns=learns)]


LEAST = transformers.AutoConfig.for_model("switch_transformers").d_model
found = [equal_width(seed) for seed in range(len(SEEDS))]
equal = round(median(found)) if all(found) else 128
print(
    "FFN width of a dense model as good as 64 experts, by seed:",
    ", ".join(f"{width:.0f}" if width else "?" for width in found),
)

# %%
SCALES = [1] if STEPS < 240 else [1, 4, 32 if cuda else LEAST // 64]  # a GPU needs more work to be busy
FORWARD = [(1, 1, equal), (64, 2, 16)]
RACERS = [(1, 1, 160), (1, 1, equal), (1, 1, 32), (8, 2, 32), (64, 2, 16)]
races = {scale: [measured_at(scale, learns) for learns in (False, True)] for scale in SCALES}
rows, speeds = [], {}
for scale, (forward, step) in races.items():
    less = products(small(1, 1, equal, scale)) / products(small(64, 2, 16, scale))
    # places in RACERS; 5, 6 and 7 are its first three once more, for the noise
    few, slower = speed_of(step, 0, 3, 5), speed_of(step, 2, 4, 7)
    slower = Ratio(1 / slower.value, 1 / slower.high, 1 / slower.low) if slower.known else slower
    speeds[scale] = speed_of(forward, 0, 1, 2), speed_of(step, 1, 4, 6), few, slower
    rows.append([64 * scale, less, *map(str, speeds[scale])])
titles = ["width of vectors", "64 experts: times fewer operations", "64 experts: forward, times as fast"]
titles += ["64 experts: step, times as fast", "8 experts: step, times as fast"]
titles += ["64 experts against dense 32: times the seconds of a step"]
caption = "64 experts against the dense model of equal quality, 8 experts against dense 160"
display(plots.Table(titles, rows, caption))
peaks = {}
for name in ("dense, 160", "8 experts", "64 experts"):
    run = lab.train(name, task=small(*SHAPES[name]), per_device_train_batch_size=4, measure=("memory",))
    peaks[name] = of_tensors(run)
plots.Table(
    ["", "peak memory in training, x dense, 160"], [[name, peak / peaks["dense, 160"]] for name, peak in peaks.items()]
)

# %% [markdown]
# Read down the column of forward passes: the wider the models, the closer the gain in seconds comes to the gain in operations. In the first row, gate, sorting and gathering cost more than the narrow FFN saves. A step can gain less than a forward pass, as in the last row, because AdamW goes over *all* experts in each step. In large trainings, with a thousand times as many tokens per step, the update is a small part. The papers' figure, 4 to 5 times as fast, is out of reach here: the mixture does not save that many operations.
#
# ## Experts in two processes
#
# **Expert parallelism** is for experts that do not fit on one device: each rank gets some whole experts, and the tokens travel. Every rank has its own tokens, as in data parallelism, and its own copy of the gate. A layer then takes these steps:
#
# - Each rank sorts its tokens by expert, and tells every other rank how many tokens are coming.
# - In an **all-to-all**, each rank sends every other rank a part of its tokens, of any size. This is the dispatch.
# - The experts compute, and a second all-to-all returns the results. Each rank then combines the results of its tokens.
# - In backward the gradients take both ways back: two more all-to-alls. `Exchange` defines this for autograd.


# %%
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.counts = received, sent
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
        return arrived

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.counts), None, None


class Traffic(TorchDispatchMode):
    """Record the bytes that this rank sends to other ranks in each all-to-all of rows (a dispatch mode: lesson 15)."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "alltoall_base_" and args[1].is_floating_point():
            rows = [count for rank, count in enumerate(args[4]) if rank != dist.get_rank()]
            self.sent.append(sum(rows) * args[1].shape[1] * args[1].itemsize)
        return function(*args, **(kwargs or {}))


# %%
def in_parallel(x, gate, gate_up, down, k):
    """Compute `mixture` on all ranks: x has this rank's tokens, gate_up and down this rank's experts."""
    ranks, local_experts = dist.get_world_size(), len(down)
    weights, chosen, _ = route(x, gate, k)
    order = chosen.flatten().argsort(stable=True)  # choices by expert, so by rank; choice // k is the token
    outgoing = chosen.flatten().bincount(minlength=len(gate))
    incoming = torch.empty_like(outgoing)  # from each rank, for each expert of this rank
    dist.all_to_all_single(incoming, outgoing)
    sent, received = (counts.view(ranks, local_experts).sum(1).tolist() for counts in (outgoing, incoming))
    rows = Exchange.apply(x[order // k], sent, received)  # new
    # for each row that arrived: the number of its expert on this rank
    owners = torch.arange(local_experts, device=x.device).repeat(ranks).repeat_interleave(incoming)
    done = torch.zeros_like(rows)
    for number in range(local_experts):
        selected = (owners == number).nonzero().flatten()
        done = done.index_add(0, selected, expert(rows[selected], gate_up[number], down[number]))
    back = Exchange.apply(done, received, sent)  # new
    return torch.zeros_like(x).index_add(0, order // k, weights.flatten()[order, None] * back)


# %%
def layer_step(task, experts=16, k=2, width=64, inner=128, tokens=512):
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = f"cuda:{rank}" if gpus2 and ranks > 1 else "cpu"
    torch.manual_seed(0)
    sizes = [(tokens, width), (experts, 2 * inner, width), (experts, width, inner), (experts, width)]
    x, gate_up, down, gate = (0.3 * torch.randn(size) for size in sizes)
    if ranks > 1:
        dist.init_process_group("nccl" if gpus2 else "gloo")
        x, gate_up, down = (whole.chunk(ranks)[rank] for whole in (x, gate_up, down))
    parts = [part.to(device).clone().requires_grad_() for part in (x, gate, gate_up, down)]
    with Traffic() as traffic:
        out = (in_parallel if ranks > 1 else mixture)(*parts, k)
        out.square().mean().backward()  # as in a loss: the mean over this rank's own tokens
    if ranks > 1:
        dist.all_reduce(parts[1].grad)  # only the gate is on every rank
    for part in parts:
        part.grad /= ranks  # the mean over all tokens is the mean of the ranks' means
    found = {"out": out, "x": parts[0].grad, "gate": parts[1].grad, "experts": parts[3].grad}
    found = {name: values.detach().cpu().flatten(1).norm(dim=1).tolist() for name, values in found.items()}
    return found | {"sent": traffic.sent, "expert bytes": sum(part.nbytes for part in parts[2:])}


alone = lab.run(layer_step, "one process", measure="value").value
ranks = [rank["value"] for rank in lab.run(layer_step, "two", processes=2, measure="value").ranks]

# %%
exercises.question(
    lab,
    "all-to-all",
    "The layer of the last cell has 16 experts. It gets 64, each as wide as before, on the same two ranks. What do the "
    "all-to-alls of a step carry?",
    {
        "4 times as much": "The experts stay where they are. It is tokens that travel, each to k experts.",
        "as much as before": "Tokens x k x width x bytes x the share that goes elsewhere: neither the number of "
        "experts nor their width is in it. More ranks would send more: on N ranks that share is (N - 1) / N.",
        "less, since each expert gets fewer tokens": "Each gets fewer, and there are more of them: the sum is the same.",
    },
    right="as much as before",
)

# %%
for name in ("out", "x", "experts"):
    joined = ranks[0][name] + ranks[1][name]
    torch.testing.assert_close(joined, alone[name], rtol=1e-4, atol=1e-6)
torch.testing.assert_close(ranks[0]["gate"], alone["gate"], rtol=1e-4, atol=1e-6)
expected_bytes = 256 * 2 * 64 * 4 * (2 - 1) / 2  # explained below the table
ways = ["dispatch", "combine", "combine, backward", "dispatch, backward"]
rows = [[way, *(rank["sent"][number] for rank in ranks), expected_bytes] for number, way in enumerate(ways)]
rows += [["in all", *(sum(rank["sent"]) for rank in ranks), 4 * expected_bytes]]
display(plots.Table(["all-to-all", "bytes that leave rank 0", "bytes that leave rank 1", "by the formula"], rows))
held = [f"{values['expert bytes']:,}" for values in (alone, *ranks)]
print(f"bytes of expert weights: {held[0]} in one process, {held[1]} and {held[2]} on the two ranks")

# %% [markdown]
# A rank stores half of the experts and never sends them. The experts' gradients are not summed over the ranks either, because each expert has already computed the tokens of all ranks. But `layer_step` divides them by the number of ranks, N. Each rank has a loss of its own, the mean over its tokens, and an expert's gradient is the *sum* over the N losses. DDP takes the *mean* for the other weights. Without the division, experts' gradients would be N times too large. AdamW would hide this (it divides by the gradient's size); clipping by the norm would not.
#
# The last column's formula is: tokens of a rank x *k* x width x bytes per number x (N - 1) / N. It holds if the choice of experts is even. If the two ranks' dispatches differ, it is uneven: the rank that sends less has the more popular experts, so more of its own tokens stay. It also receives and computes more, and the other rank waits for it.
#
# ## What held
#
# ### A mixture against a dense model
#
# The dense model has as many FFN weights for a token in the first five checks, and equal quality in the last two. There its width differs by seed, so the intervals are wider than the table's. The range *predicted* for `moe-faster` comes from the interval of `moe-inference`. The low end is 40 % lower, because a step also updates all experts; the high end has a margin of 5 %.

# %% tags=["claim"]
inference, faster, few, slower = speeds[SCALES[-1]]
costs = [products(small(1, 1, round(width or equal))) / products(small(1, 1, equal)) for width in found]
faster, inference = (  # includes how much the width of equal quality differs by seed
    Ratio(speed.value, speed.low * min(costs), speed.high * max(costs)) if speed.known else speed
    for speed in (faster, inference)
)
narrow = f"needs a layer as wide as the papers' smallest model, {LEAST}" if 64 * SCALES[-1] < LEAST else None
unlike = None if all(found) else "needs dense models that end above and below the mixture's loss"
better = [dense / mixture for dense, mixture in zip(ends["dense, 32"], ends["64 experts"])]
display(claims.check("moe-params", grown))
note = f"the counter with grouped_mm saw {grouped:.0f}"
display(claims.check("moe-flops", cost["32 experts"] / cost["dense"], note=note))
display(claims.check("moe-seconds", slower, missing=narrow))
display(claims.check("moe-memory", heavier, note=f"in inference {at_inference:.1f}"))
display(claims.check("moe-quality", Ratio(median(better), min(better), max(better), tuple(better))))
predicted = (0.6 * inference.low, 1.05 * inference.high) if inference.known else inference
display(claims.check("moe-faster", faster, predicted=predicted, missing=narrow or unlike))
display(claims.check("moe-inference", inference, missing=narrow or unlike))

# %% [markdown]
# ### Few or many experts, and the gate
#
# For `moe-balanced`, *no effect* is 20 times the mean: about the busiest expert's load without the balancing loss.

# %% tags=["claim"]
display(claims.check("moe-few-speed", few, missing=narrow))
display(claims.check("moe-few-memory", peaks["8 experts"] / peaks["dense, 160"]))
display(claims.check("moe-many-memory", peaks["64 experts"] / peaks["8 experts"]))
note = f"8 experts with it {median(busiest['8 experts']):.1f}"
display(claims.check("moe-balanced", median(busiest["64 experts"]), note=note))
display(claims.check("moe-gate-alone", median(busiest["64, no balancing"])))
by_place = [place - nothing for place, nothing in zip(guesses["its place"], guesses["nothing"])]
display(claims.check("moe-position", Ratio(median(by_place), min(by_place), max(by_place), tuple(by_place))))
claims.check("moe-every-other", every_other)

# %% [markdown]
# ## Explore
#
# The picture shows a model with Mixtral's layers and width (32 and 4096). Change its experts: which bars grow with their number, and which with *k*? By the guides' count, AdamW in mixed precision takes 18 bytes per parameter (lesson 01), without activations. The GFLOP are those of a training step: 6 operations per parameter that a token meets.


# %% tags=["widget"]
def draw(experts, k, width):
    attention, FFN = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024), 32 * 3 * 4096
    fixed = attention + 2 * 32000 * 4096
    total, active = (fixed + 32 * 4096 * experts + FFN * number * width for number in (experts, k))
    dense = fixed + FFN * 14336
    _, axes = plt.subplots(figsize=(8, 2.6), dpi=110, layout="constrained")
    bars = axes.barh(["parameters", "parameters a token meets", "memory, AdamW"], [total, active, total], color="w")
    values = [total / dense, active / dense, total / dense]
    texts = [
        f" {total / 1e9:.1f}e9",
        f" {active / 1e9:.1f}e9, {6 * active / 1e9:.0f} GFLOP per token",
        f" {18 * total / 1e9:.0f} GB",
    ]
    for bar, value, colour, text in zip(bars, values, plots.SERIES, texts):
        bar.set(width=value, color=colour)
        axes.text(value, bar.get_y() + bar.get_height() / 2, text, va="center")
    axes.set(xlim=(0, 1.5 * max(values)), xlabel="times that of the dense model with an FFN of 14336")
    axes.set_title(f"{experts} experts of {width}, {k} for each token", loc="left")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return axes


_ = widgets.explore(draw, experts=[8, 1, 2, 16, 64, 256], k=[2, 1, 4, 8], width=[14336, 7168, 3584, 1792])

# %% [markdown]
# ## Exercise 1: sixteen times the parameters
#
# Replace an FFN by a mixture that meets three conditions:
#
# - its experts have at least 16 times the parameters of the FFN;
# - a token costs at most 5 % more operations than in the FFN, including the gate's;
# - a token can get at least 100,000 different sets of experts. (DeepSeekMoE's reason for narrow experts: the more sets, the better they can specialize.)
#
# Write a function that takes the FFN's width, a multiple of 64 from 512 up, and returns a dict with the number of experts, *k* and the width of an expert. The check draws new widths each time.

# %% jupyter={"source_hidden": true}
exercises.hint(
    "A token meets k x width. That may not be much more than the FFN's width.",
    "Call the model's width `hidden`. The gate has one row of `hidden` numbers for each expert. An expert has three "
    "matrices of `hidden` x its own width. So the gate's row costs a third of one unit of an expert's width.",
    "One wide expert for each token gives as many sets as there are experts. How many give k of n? `math.comb`.",
)

# %% tags=["exercise"]
answer = None  # for example lambda ffn: {"experts": 8, "k": 2, "width": ffn}


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted("replace None by a function of the FFN's width")
    for ffn in (512, *(64 * random.randint(9, 128) for _ in range(8))):
        experts, k, width = (answer(ffn)[name] for name in ("experts", "k", "width"))
        if not 0 < k <= experts:
            return exercises.wrong("k is at least 1 and at most the number of experts")
        more, cost = experts * width / ffn, (3 * k * width + experts) / (3 * ffn)
        sets = math.comb(experts, k)
        message = f"an FFN of {ffn}: {more:.1f} times the parameters, {cost:.2f} times the operations, {sets:,} sets"
        if more < 16 or cost > 1.05 or sets < 100_000:
            return exercises.wrong(message)
    return exercises.right(message)


exercises.check(lab, "sixteen", check, answer)


# %% tags=["solution"] jupyter={"source_hidden": true}
def one_wide_expert(ffn):
    return {"experts": 16, "k": 1, "width": ffn}


def narrow_ones(ffn):
    return {"experts": 64, "k": 4, "width": ffn // 4}


exercises.prove(check, solution=narrow_ones, mistake=one_wide_expert)

# %% [markdown]
# ## Exercise 2, the challenge: the best loss at a width of 32
#
# The check trains your mixture as above, with three seeds. A token may meet an FFN width of at most 32 (*k* x width), and there may be at most 128 experts. Find a mixture whose mean loss over the seeds is below that of the 64 experts above. Your answer is a dict, in which *balance* is the factor of the balancing loss.

# %% tags=["exercise"]
answer = None  # for example {"experts": 4, "k": 2, "width": 16, "balance": 0.02}


# %% tags=["check"]
def check_loss(answer):
    if answer is None:
        return exercises.not_attempted("replace None by a dict of experts, k, width and balance")
    experts, k, width = (answer[name] for name in ("experts", "k", "width"))
    if (experts, k, width) in SHAPES.values():
        return exercises.wrong("that one was trained above: find another")
    if k * width > 32 or not k <= experts <= 128:
        return exercises.wrong(
            f"a token meets a width of {k * width} (at most 32) of {experts} experts (at least k, at most 128)"
        )
    if STEPS < 240:
        return exercises.not_measured("so few steps teach nothing")
    sizes = {"answer": (experts, k, width)}
    with ThreadPoolExecutor(2) as pool:
        each = [*pool.map(partial(all_of, sizes, balance=answer.get("balance", 0.02)), SEEDS)]
    losses = [seed["answer"]["unseen"] for seed in each]
    goal = sum(ends["64 experts"]) / len(SEEDS)
    message = f"loss {sum(losses) / len(losses):.2f}; the goal is less than {goal:.2f}"
    return (exercises.right if sum(losses) / len(losses) < goal else exercises.wrong)(message)


exercises.check(lab, "best for 32", check_loss, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
solution = {"experts": 128, "k": 2, "width": 16, "balance": 0.02}
exercises.prove(check_loss, solution=solution, mistake={"experts": 64, "k": 2, "width": 16, "balance": 0.02})

# %% [markdown]
# ## Recap
#
# The numbers are those of a recorded run (AMD EPYC, 2 cores, 2026-11-29).
#
# - A gate, experts, dispatch and combine took a few lines, with the same output as the layer in transformers.
# - Parameters and memory grow with all experts, arithmetic with those that a token meets. 32 experts had 11.6 times the parameters, 7.4 times the peak and 1.015 times the operations of the dense model.
# - At the same arithmetic, more experts learn more: the dense model's loss was 2.2 times that of 64 experts. This needs a balancing loss: without it the busiest expert got 23 times the mean, with it 2.7 times.
# - The gain in seconds was smaller than the gain in operations, and needed wide layers. With hidden vectors of width 64, a step of 64 experts was 0.84 times as fast as that of the dense model of equal quality. At 768 it was 1.21 times as fast, with 2.1 times fewer operations.
# - With experts in two processes, outputs and gradients stayed those of one. By the formula, each of a step's four all-to-alls carries 65,536 bytes from a rank.

# %% tags=["finish"]
claims.finish()
