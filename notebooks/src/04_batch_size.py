# %% [markdown]
# # How large a batch, and why not larger?
#
# The batch size is the first number that everybody turns. It decides how fast samples go by, how many bytes live at the peak, and how many updates your data are worth.
#
# **You will see**
# - why a larger batch is faster up to a knee that you can compute, and hardly beyond it
# - two ways to find the largest batch that fits, one of which crashes for it, and the sizes at which time jumps
# - what a larger batch does to learning, by samples, by steps and by seconds

# %% tags=["parameters"]
profile = "auto"
strict = False
out = ""

# %% tags=["setup"]
import collections
import math
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import matplotlib.pyplot as plt
import torch
from IPython.display import display

from perf_helpers import Lab, Task, claims, exercises, interleaving, plots, roofline, widgets
from perf_helpers.advise import advise
from perf_helpers.estimate import estimate
from perf_helpers.records import CPU, WALL, Ratio

lab = Lab(profile, strict=strict, out=out, lesson="04_batch_size")
on_cpu = lab.machine.kind == "cpu"
CLOCK, FLOOR = (CPU, 1.05) if on_cpu else (WALL, 1.02)  # what decides, and what two speeds must differ by at least


def single_thread():
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # one thread is disturbed least by whatever else the machine does
    return "cuda" if torch.cuda.is_available() else "cpu"


# %% [markdown]
# ## Idea
#
# A matrix product reads its weights once, however many rows pass by them. With few rows that reading is all the time there is, and one more row is nearly free. With many rows the arithmetic takes longer than the reading, and one more row costs its full price. Between the two lies a **knee**. Beyond it a larger batch brings no speed; it still takes memory, and it makes fewer updates of the same data.
#
# ## Predict
#
# A batch of 4 fits, and just fits. You get a device with *twice* its peak.

# %%
if on_cpu:
    task = lab.task.replace(seq_len=32, config={"num_hidden_layers": 2})
else:
    task = lab.task.replace(dataset_size=2048)
widgets.predict(lab, "twice the memory", "Batch 4 just fits. What fits in twice its peak memory?", "samples", 4, 100)

# %% [markdown]
# ## By hand: one layer, more and more rows
#
# First the two ceilings of this machine, measured: the rate of arithmetic, and the rate at which bytes come from memory. The **ridge** is the number of operations for each byte at which both take equally long. For a linear layer, count both sides: 2 operations for each weight and row; the weights once, the rows in and out. Then the time is predicted before it is taken.


# %%
def one_layer(_):
    device = single_thread()
    found = roofline.ceilings("float32", device)
    with torch.no_grad():
        layer = torch.nn.Linear(width, width, bias=False, device=device)
        inputs = [torch.randn(rows, width, device=device) for rows in row_counts]
        taken = interleaving.in_turns([lambda x=x: layer(x) for x in inputs], 8)
    seconds = [min(each[CLOCK] for each in turns) for turns in taken]
    return [found.flops_per_second, found.bytes_per_second, seconds]


width = 2048 if on_cpu else 8192
row_counts = [2**power for power in range(10 if on_cpu else 13)]
flops_rate, bytes_rate, layer_seconds = lab.run(one_layer, measure=("none",)).value
ridge = flops_rate / bytes_rate


def predicted(rows, width, number_bytes=4):
    arithmetic = 2 * rows * width * width / flops_rate
    reading = number_bytes * (width * width + 2 * rows * width) / bytes_rate
    return max(arithmetic, reading)


# %%
knee = next(rows for rows in range(1, 10**5) if 2 * rows * width * width / flops_rate >= predicted(rows, width))
rates = {"predicted from the two ceilings": [rows / predicted(rows, width) for rows in row_counts]}
rates["measured"] = [rows / seconds for rows, seconds in zip(row_counts, layer_seconds)]
ax = plots.lines(row_counts, rates, "rows (tokens of the batch)", "rows per second", title="One linear layer")
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.axvline(knee, color="black", linestyle=":", linewidth=1)
_ = ax.text(knee, ax.get_ylim()[0] * 1.2, f" predicted knee: {knee} rows", fontsize=10)
most = max(rates["measured"])
enough = next(rows for rows, rate in zip(row_counts, rates["measured"]) if rate > 0.5 * most)
print(f"ceilings {flops_rate / 1e9:.3g} GFLOP/s, {bytes_rate / 1e9:.3g} GB/s: ridge at {ridge:.1f} FLOP a byte")
print(f"rows/s grow by {rates['measured'][-1] / rates['measured'][0]:.0f} x from 1 row to {row_counts[-1]}")
print(f"half of the most is reached at {enough} rows; the knee was predicted at {knee}")

# %% [markdown]
# Left of the dotted line the layer waits for its weights, right of it for arithmetic, and the curve is flat. The prediction has no free parameter. Where the measured line lies above it at few rows, the weights came from a cache, which is faster than memory. Where it lies below around the knee, kernels for few rows do not reach the ceiling.
#
# Rows are *tokens*: samples times sequence length. One sequence of 512 tokens may fill this layer by itself.

# %%
exercises.question(
    lab,
    "rows",
    "A layer's knee is at 100 rows. Your sequences have 512 tokens, and you train one at a time. What does batch 8 do "
    "to the speed of this layer?",
    {
        "It is nearly 8 times as fast: the weights are read once for 8 samples.": "They were read once for 512 rows "
        "already. Reading is no longer what takes the time.",
        "Hardly anything: 512 rows are past the knee.": "The layer is bound by arithmetic, and 8 samples have 8 times "
        "as much of it. What a larger batch still saves are updates, and launches of small operations.",
        "It is slower: 8 samples need 8 times the bandwidth.": "Activations take 8 times the bytes and there are 8 "
        "times the operations. The ratio that decides does not get worse.",
    },
    right="Hardly anything: 512 rows are past the knee.",
)

# %% [markdown]
# ## Baseline: the whole step
#
# A step is more than its products: small operations, and an update that costs the same whatever the batch. Each batch size takes turns with the others in one process, and again in two more. The smallest and the largest run twice a turn: what they differ from themselves is the noise.


# %%
def whole_steps(task):
    device = single_thread()
    model = task.build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def one_step(size):
        batch = task.batch(size, device)

        def step():
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    steps = [one_step(size) for size in (*batches, batches[0], batches[-1])]
    taken = interleaving.in_turns(steps, turns)
    model(**task.batch(1, device)).loss.backward()
    return taken + interleaving.in_turns([optimizer.step], turns)


# %%
if on_cpu:
    batches, turns = [1, 2, 4, 8, 16, 32], 3
else:
    batches, turns = [1, 2, 4, 8, 16] if lab.profile.name == "t4" else [1, 2, 4, 8, 16, 32], 6
taken = [lab.run(whole_steps, task=task, measure=("none",)).value for _ in range(3)]


def median(which):
    return statistics.median(each[CLOCK] for process in taken for each in process[which])


step_seconds = {size: median(number) for number, size in enumerate(batches)}
update_seconds = median(-1)
speeds = {size: size / seconds for size, seconds in step_seconds.items()}
without_update = {size: size / (seconds - update_seconds) for size, seconds in step_seconds.items()}

# %% [markdown]
# ## Change one thing
#
# Now the peak memory of the same steps, two sizes in the straight part of the line. Any other size follows from it; two runs check that.

# %%
sizes = (16, 32) if on_cpu else (8, 16)
runs = {}
for size in (4, *sizes):
    runs[size] = lab.train(f"batch {size}", task=task, per_device_train_batch_size=size, measure=("memory",))  # new
slope = (runs[sizes[1]].peak_bytes - runs[sizes[0]].peak_bytes) / (sizes[1] - sizes[0])
fixed = runs[sizes[1]].peak_bytes - sizes[1] * slope
limit_bytes = 2 * runs[4].peak_bytes
fitting = int((limit_bytes - fixed) / slope)
for size in (fitting, fitting + 1):
    runs[size] = lab.train(f"batch {size}", task=task, per_device_train_batch_size=size, measure=("memory",))
    fits = "fits" if runs[size].peak_bytes <= limit_bytes else "does not fit"
    print(f"batch {size}: {plots.bytes_text(runs[size].peak_bytes)}, {fits} into {plots.bytes_text(limit_bytes)}")


def largest_that_fits():
    low, high = (estimate(task, per_device_train_batch_size=size).peak_bytes for size in sizes)
    per_sample = (high - low) / (sizes[1] - sizes[0])
    return int(sizes[0] + (limit_bytes - low) / per_sample)


started = time.perf_counter()
estimated = lab.foresee(largest_that_fits)
estimate_seconds = time.perf_counter() - started
widgets.revealed(lab, "twice the memory", fitting, estimate=estimated)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.6), layout="constrained")
shown = {"whole step": list(speeds.values()), "without the update": list(without_update.values())}
plots.lines(batches, shown, "batch size", "samples per second", ax=left, title="Speed")
peaks = {"measured": [runs[size].peak_bytes / 1e6 if size in runs else None for size in batches]}
peaks["line through two sizes"] = [(fixed + size * slope) / 1e6 for size in batches]
plots.lines(batches, peaks, "batch size", "peak memory (MB)", ax=right, title="Memory")
for ax in (left, right):
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, [str(size) for size in batches])
    ax.set_ylim(0)
smallest, largest, quarter = batches[0], batches[-1], batches[-3]
gain, without = speeds[largest] / speeds[smallest], without_update[largest] / without_update[smallest]
by_updates = math.log(gain / without) / math.log(gain)
print(f"batch {largest} is {gain:.2f} x as fast as batch {smallest}; without the updates {without:.2f} x")
print(f"from batch {quarter} to {largest}: {speeds[largest] / speeds[quarter]:.2f} x the speed")

# %% [markdown]
# Twice the memory is not twice the batch. Weights, gradients and optimizer states are paid for once, and all of the second half is for samples. The smaller the batch you begin with, the more you win.
#
# Two effects add up on the left. The distance between the lines is the **update**: it is shared by more samples. What still rises without it is passes filling the device. On the right, memory goes on growing where speed has stopped. (Below the straight part the peak lies in the update, and the batch does not show at all.)
#
# ## How to find the largest that fits
#
# `auto_find_batch_size=True` tries: it trains, waits for an out-of-memory error, takes nine tenths of the batch and starts again. On a GPU we take away memory for real, by torch's own limit. On a CPU the error is planted: after a forward pass whose peak, by the line above, is over the limit, we ask the allocator for what no machine has. What it answers is the true error.


# %%
def tried_sizes(task):
    from transformers import PrinterCallback, Trainer

    from perf_helpers.lab import Arguments

    def enforce(module, args, kwargs, output):
        if fixed + len(kwargs["input_ids"]) * slope > limit_bytes:
            torch.empty(2**60)

    model, tried = task.build_model(), []
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.mem_get_info()[1])
    else:
        model.register_forward_hook(enforce, with_kwargs=True)
    arguments = dict(auto_find_batch_size=True, per_device_train_batch_size=2 * fitting, max_steps=2)  # new
    with tempfile.TemporaryDirectory() as folder:
        told = Arguments(arguments).build(folder)
        told._n_gpu = min(1, told.n_gpu)  # with several GPUs the Trainer would make a batch for each
        trainer = Trainer(model=model, args=told, train_dataset=task.dataset())
        trainer.remove_callback(PrinterCallback)
        inner = trainer._inner_training_loop
        trainer._inner_training_loop = lambda batch_size, **rest: tried.append(batch_size) or inner(batch_size, **rest)
        trainer.train()
    return tried


# %%
started = time.perf_counter()
tried = lab.run(tried_sizes, task=task, measure=("none",)).value
search_seconds = time.perf_counter() - started
samples = 2 ** int(math.log2(fitting)) * 2
without_search = lab.foresee(largest_that_fits)
started = time.perf_counter()
options = {"context_memory": 0} if not on_cpu else {}
advice = lab.foresee(
    advise,
    task,
    memory=limit_bytes,
    effective_batch=samples,
    avoid=["checkpointing", "bf16", "fp16", "bf16 weights", "Adafactor", "8-bit Adam", "SGD"],
    runs=[],
    **options,
)
advice_seconds = time.perf_counter() - started
recipe = advice.recipes[0].name if advice and advice.recipes else "none"
rows = [["auto_find_batch_size", ", ".join(map(str, tried)), tried[-1], len(tried) - 1, search_seconds]]
rows.append(["two estimates", "none", without_search, 0, estimate_seconds])
rows.append(["the advisor", "none", recipe, 0, advice_seconds])
print(f"Here the search took {search_seconds / estimate_seconds:.1f} x the seconds of two estimates.")
plots.Table(["way", "trained with", "answer", "out of memory", "seconds"], rows)

# %% [markdown]
# The search ends where it does for three reasons that have nothing to do with your training: the size it began with, the nine tenths, and luck. It seldom ends on a multiple of 8, and it may stop short of the largest that fits. (Before [pull request 3650](https://github.com/huggingface/accelerate/pull/3650) of 2025 it halved.) It changes the effective batch and leaves the learning rate as it was. The estimate and the advisor train nothing; the advisor keeps the effective batch and fills it up with accumulation. With a small model a crash is cheap, and the search may well be the quicker of the two; a failed attempt costs more the larger the model is.
#
# And it depends on *recognising* the error. accelerate reads the message:

# %%
from accelerate.utils.memory import should_reduce_batch_size

try:
    torch.empty(2**60)
    planted = ""
except RuntimeError as error:
    planted = str(error).splitlines()[0]
messages = {
    "torch's allocator on a CPU, just now": planted,
    "CUDA": "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "oneDNN, for want of memory": "could not create a primitive",
    "cuBLAS, for want of memory": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
}
rows = [
    [who, text[:70], "yes" if should_reduce_batch_size(RuntimeError(text)) else "no"] for who, text in messages.items()
]
plots.Table(["who", "message", "recognised"], rows)

# %% [markdown]
# Whatever runs out of memory elsewhere than in torch's allocator is no lack of memory to it, and your search ends in a crash. On Linux you can try it with a real limit (`resource.setrlimit`): BERT's first GELU said what oneDNN says in the table.
#
# ## Multiples of 8, of 64, and of what else
#
# A device works in **tiles**: a GPU in blocks of, say, 256 x 128 numbers, one for each of its multiprocessors at a time; a CPU in vectors of 16 numbers (AVX512), 8 (AVX2) or 4. What does not fill a tile costs one all the same (*tile quantization*), and a last round of tiles that does not fill the device costs a round (*wave quantization*). That can be written down. Let us do so, and say where time will jump, before we measure.


# %%
def waves(rows, columns, tile, at_once):
    """Rounds of tiles that a product with so many rows and columns takes."""
    tiles = math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
    return math.ceil(tiles / at_once)


features = lab.machine.cpu_features or ()
vector = 16 if "avx512f" in features else 8 if "avx2" in features else 4
if on_cpu:
    rows_here, depth, tile, at_once = 256, 256, (256, vector), 1
else:
    rows_here, depth, tile = 2048, 4096, (256, 128)
    count = lab.run(lambda _: torch.cuda.get_device_properties(0).multi_processor_count, measure=("none",)).value
    at_once = count
dtype = "float32" if on_cpu else "float16"  # tensor cores take fp16 from compute capability 7.0 on
edge = at_once // (rows_here // tile[0]) * tile[1]  # the most columns of one round
near = vector // 4 if on_cpu else 8
columns = [
    wave * edge + away for wave in (1, 2, 3, 4) for away in (-4 * near, -2 * near, -near, -1, 0, 1, near) if edge > 0
]
columns = sorted({number for number in columns if number > 0})
said = [waves(rows_here, number, tile, at_once) for number in columns]
print(f"prediction: {tile[1]} columns a tile, {at_once} tiles at once; time jumps after {edge}, {2 * edge}, {3 * edge}")


# %%
def repeats(shape):  # so that each takes long enough for the clock
    return max(1, 2 * 10**7 // math.prod(shape)) if on_cpu else 20


def products(shapes):
    def work(rows, columns, depth, times):
        left, weight = (torch.randn(size, depth).to(device, getattr(torch, dtype)) for size in (rows, columns))
        return lambda: [torch.nn.functional.linear(left, weight) for _ in range(times)]

    device = "cpu" if on_cpu else "cuda"
    return lambda _: single_thread() and interleaving.in_turns([work(*one, repeats(one)) for one in shapes], 15)


def least_seconds(shapes):
    found = lab.run(products(shapes), measure=("none",)).value
    return [min(turn[CLOCK] for turn in each) / repeats(shape) for each, shape in zip(found, shapes)]


of = dict(zip(columns, least_seconds([(rows_here, number, depth) for number in columns])))
scale = of[edge] / waves(rows_here, edge, tile, at_once)
series = {"measured": [1e6 * x for x in of.values()], "predicted": [1e6 * scale * x for x in said]}
plots.lines(columns, series, "columns", "microseconds", title="One product, scaled at the first edge").set_ylim(0)
for wave in (1, 2, 3, 4):
    jump = of[wave * edge + 1] / of[wave * edge]
    print(f"{wave * edge} -> {wave * edge + 1} columns: predicted {(wave + 1) / wave:.2f} x, measured {jump:.2f} x")


# %% [markdown]
# Jumps where the stairs have theirs confirm the tile. One that is lower than foretold means that the kernel has a cheaper way for the rest. The farther to the right, the smaller the share of one more tile: magic numbers matter where the remainder is a large share of the whole.
#
# Now every dimension of a larger product: rows M (samples x tokens), columns N (features out), depth K (features in). *n + 8*, with n a multiple of 64, tells a rule of 8 from a rule of 64. And the output layer of a language model: 30522 words, or padded to 30528.

# %%
base, rest = (4 * vector, 256) if on_cpu else (4096, 4096)
steps_away = (-1, 0, 1, 8)
grid = [tuple(base + away if at == which else rest for at in range(3)) for which in range(3) for away in steps_away]
words, hidden = 30522, task.build_config().hidden_size
language = Task("bert-small", architecture="BertForMaskedLM", config={"num_hidden_layers": 1, "vocab_size": words})
model = language.build_model()
before = sum(weight.numel() for weight in model.parameters())
model.resize_token_embeddings(pad_to_multiple_of=64, mean_resizing=False)  # new
more = sum(weight.numel() for weight in model.parameters()) - before
padded = model.config.vocab_size
print(f"{padded} words: {16 * more / 1e3:.0f} kB more of weights, gradients and AdamW's states")

found = least_seconds([*grid, (32, words, hidden), (32, padded, hidden)])
rows = []
for which, name in enumerate(("M, rows", "N, columns", "K, depth")):
    four = found[4 * which : 4 * which + 4]
    rows.append([name, *(four[1] / seconds * (base + away) / base for seconds, away in zip(four, steps_away))])
print(f"the output layer takes {found[-1] / found[-2]:.2f} x as long with {padded} words as with {words}")
plots.Table(["FLOP/s against n", f"n - 1 = {base - 1}", f"n = {base}", "n + 1", "n + 8"], rows)

# %%
exercises.question(
    lab,
    "seven",
    "Sequences of 512 tokens in fp16, hidden size 1024, vocabulary 50257. Which size do you change first?",
    {
        "The batch, from 7 to 8.": "7 x 512 tokens are 3584 rows, and 3584 = 56 x 64. The products see no 7.",
        "The vocabulary, from 50257 to 50304.": "50257 is odd, and it is the width of the largest product and the "
        "row length of its output. 50304 is a multiple of 64, at 47 unused rows.",
        "The hidden size, from 1024 to 1000.": "1024 is a multiple of every tile. 1000 is a multiple of 8 only.",
    },
    right="The vocabulary, from 50257 to 50304.",
)
assert 7 * 512 % 64 == 0 and 50257 % 2 == 1 and 50304 % 64 == 0

# %% [markdown]
# Padding costs next to nothing in bytes, so it is worth doing even for a small gain, in fp16 on a GPU above all. The rows M are samples *times tokens*: with 512 tokens a batch of 7 has 3584 rows, a multiple of 64. A transformer's batch need not be a multiple of 8 for the sake of its products; its widths and its vocabulary should be.
#
# ## What a larger batch does to learning
#
# The gradient of a batch is the true gradient plus noise, and the noise's variance falls as one over the batch. The squared length of a batch's gradient is therefore **signal + noise / batch**: two numbers, which gradients of two sizes of batch give. Their ratio, noise / signal, is the *simple noise scale* of [McCandlish et al.](https://arxiv.org/abs/1812.06162): the batch at which half of a gradient is noise. Well below it twice the batch is worth nearly two steps; well above it, nearly none.


# %%
def gradient_lengths(task):
    device = single_thread()
    data, model = task.batch(1024, device), task.build_model().to(device)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=base_rate), []

    def gradient(first, size):
        model.zero_grad()
        model(**{name: values[first : first + size] for name, values in data.items()}).loss.backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters()])

    for steps in (0, 24):
        for step in range(steps):
            gradient(32 * step % 1024, 32)
            optimizer.step()
        parts = [gradient(8 * i, 8) for i in range(128)]
        lengths = []
        for together in (1, 2, 4, 8, 16, 32, 64):  # batches of 8, 16, ... samples
            means = [sum(parts[i : i + together]) / together for i in range(0, 128, together)]
            lengths.append(sum(mean.square().sum().item() for mean in means) / len(means))
        found.append(lengths)
    return found


# %%
base_rate = 1e-3
shape = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
shape |= {"vocab_size": 200, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
learnable = Task("bert-tiny", seq_len=32, data="learnable", config=shape)
lengths = lab.run(gradient_lengths, task=learnable, measure=("none",)).value
together = [8, 16, 32, 64, 128, 256, 512]
figure, axes = plt.subplots(1, 2, figsize=(10.5, 3.4), layout="constrained")
scales = []
for ax, title, squared in zip(axes, ("At the start", "After 24 steps of 32"), lengths):
    noise = (squared[0] - squared[-1]) / (1 / together[0] - 1 / together[-1])
    signal = squared[-1] - noise / together[-1]
    scales.append(noise / signal)
    line = [signal + noise / size for size in together]
    plots.lines(together, {"measured": squared, "signal + noise / batch": line}, "batch size", "", ax=ax, title=title)
    ax.set(xscale="log", ylabel="squared length of the gradient")
    ax.set_yscale("log" if plots.is_measured(signal) else "linear")
    ax.set_xticks(together, [str(size) for size in together])
print("simple noise scale: {:.0f} samples at the start, {:.0f} after 24 steps".format(*scales))

# %% [markdown]
# The line has two numbers, taken from the ends, and comes close to the five points between. The scale is no constant: it changes as the model learns, which is one reason why no batch size is right for a whole training.
#
# Now train with 8, 32 and 128 samples. Every size gets three learning rates: for the larger ones the rate of 8 as it is, by the square root of the factor, and in proportion to it; for 8 the same multiples as for 32, to be fair. Three seeds, judged on sequences not seen.


# %%
def learning(sizes, seed):
    def learn(task):
        device, found = single_thread(), {}
        data, unseen = (task.replace(seed=seed).batch(size, device) for seed, size in ((50, 4096), (51, 192)))
        for size in sizes:
            for factor in factors[size]:
                found[f"{size} {factor} {seed}"] = trained(task, data, unseen, size, factor * base_rate, seed)
        return found

    return lab.run(learn, task=learnable, measure=("none",)).value


def trained(task, data, unseen, size, rate, seed, steps=None):
    model, steps = task.replace(seed=seed).build_model().to(data["labels"].device), steps or most_steps[size]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    order, losses = torch.Generator().manual_seed(seed), []
    for step in range(1, steps + 1):
        chosen = torch.randint(4096, (size,), generator=order).to(data["labels"].device)
        model(**{name: values[chosen] for name, values in data.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (4, 8, 16, 32, 64) or step == steps:
            with torch.no_grad():
                losses.append((step, model(**unseen).loss.item()))
    return losses


# %%
most_steps, seeds = {8: 64, 32: 32, 128: 32}, (0, 1, 2)
factors = {8: (1, 2, 4), 32: (1, 2, 4), 128: (1, 4, 16)}
with ThreadPoolExecutor(2 if on_cpu else 1) as pool:  # what is learnt does not depend on who computes beside it
    curves = dict(collections.ChainMap(*pool.map(learning, 3 * [(128,)] + 3 * [(8, 32)], 2 * seeds)))


def loss(size, factor, step, seed=None):  # of one seed, or the median over all
    each = seeds if seed is None else [seed]
    return statistics.median(dict(curves[f"{size} {factor} {one}"])[step] for one in each)


def best(size, step):
    return min(factors[size], key=lambda factor: loss(size, factor, step))


rows = []
for size in factors:
    for factor, how in zip(factors[size], ("as is", "square root", "in proportion") if size > 8 else 3 * [""]):
        last = [loss(size, factor, step) for step in (512 // size, 16, most_steps[size])]
        rows.append([size, f"{factor * base_rate:g}", how, *last])
plots.Table(["batch", "rate", "scaled", "512 samples", "16 steps", "end"], rows, "unseen loss, median of three seeds")


# %%
def seconds_of_step(sizes):
    def work(size, task, device):
        model, batch = task.build_model().to(device), task.batch(size, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=base_rate)
        return lambda: (model(**batch).loss.backward(), optimizer.step(), optimizer.zero_grad())

    def measure(task):
        device = single_thread()
        taken = interleaving.in_turns([work(size, task, device) for size in sizes], 10)
        return [statistics.median(turn[CLOCK] for turn in each) for each in taken]

    return lab.run(measure, task=learnable, measure=("none",)).value


step_of = dict(zip(factors, seconds_of_step([*factors])))
figure, axes = plt.subplots(1, 3, figsize=(11, 3.3), sharey=True, layout="constrained")
for ax, unit, per_step in zip(axes, ("samples", "steps", "seconds"), ({s: s for s in factors}, None, step_of)):
    for number, size in enumerate(factors):
        at = [step for step, _ in curves[f"{size} {best(size, 16)} 0"]]
        x, y = [step * (per_step or {}).get(size, 1) for step in at], [loss(size, best(size, 16), step) for step in at]
        ax.plot(x, y, plots.SERIES[number], marker="os^"[number], ls=("-", "--", "-.")[number], label=f"batch {size}")
    ax.set(xlabel=unit, ylim=(0, None))
axes[0].set_ylabel("loss on unseen sequences")
_ = axes[0].legend(frameon=False)

# %% [markdown]
# Three pictures, three winners. By *samples* the small batch: it makes the most updates of the same data. By *steps* the large one: each update is better informed. By *seconds* it depends on what a step of each costs here, and that was the first half of this lesson. Read the table too: a large batch at the small one's rate gives its advantage away, and one scaled in proportion may not learn at all. For Adam theory says [the square root](https://arxiv.org/abs/2205.10287).
#
# ## What held


# %% tags=["claim"]
def speed_of(first, second, again, samples):
    """How much faster the second of the steps timed above is, in samples."""
    picked = [[process[number] for number in (first, second, again)] for process in taken]
    return Ratio.of_turns(picked, CLOCK, FLOOR, samples)


def against(size, other, step, other_step):
    """Losses of one batch size over those of another, seed by seed, each at its best rate of three."""
    mine, its = best(size, step), best(other, other_step)
    pairs = [loss(size, mine, step, seed) / loss(other, its, other_step, seed) for seed in seeds]
    return Ratio.of_pairs(pairs, 1.05)


last = len(batches) - 1
ratio = speed_of(0, last, last + 1, largest / smallest)
note = f"{without:.2f} without the updates, which explain {by_updates:.0%} of the gain's logarithm"
display(claims.check("larger-batch-faster", ratio, note=note))
ratio = speed_of(last, last - 2, last + 2, quarter / largest)
display(claims.check("memory-to-the-limit", ratio, note=f"batch {quarter} against {largest}"))
display(claims.check("larger-batch-fewer-steps", against(128, 8, 16, 16), note="batch 128 and 8, 16 steps of each"))
display(claims.check("larger-batch-same-data", against(128, 8, 4, 64), note="batch 128 and 8, 512 samples"))
claims.check("larger-batch-ends-better", against(128, 8, 32, 64), note="4096 samples and 512, where neither falls on")


# %% tags=["claim"]
def three_times(function):
    return [lab.run(function, task=task, measure=("none",)).value for _ in range(3)]


def faster(shape, than):
    """FLOP/s of a product in fp16 / those of another; None without a GPU."""
    if on_cpu:
        return None
    return Ratio.of_turns(three_times(products([than, shape, than])), CLOCK, FLOOR, math.prod(shape) / math.prod(than))


cube = (4096,) * 3
display(claims.check("multiples-of-eight", faster(cube, (4097,) * 3)))
display(claims.check("multiples-of-64", faster(cube, (4104,) * 3)))
past = faster((rows_here, edge, depth), (rows_here, edge + 1, depth))
longer = past and past / (edge / (edge + 1))  # seconds of one column more / seconds, from FLOP/s
claims.check("tile-quantization", longer, note=f"predicted: {edge} columns are one round of tiles")


# %% tags=["claim"]
def both_formats(_):
    sides = [torch.randn(4097, 4097, device="cuda").to(kind) for kind in (torch.float32, torch.float16)]
    whole, half = (lambda side=side: [side @ side for _ in range(5)] for side in sides)
    return interleaving.in_turns([whole, half, whole], 8)


def around_eight(task):
    model = task.build_model().to("cuda")

    def passes(batch):
        with torch.autocast("cuda", torch.float16):
            model(**batch).loss.backward()
        model.zero_grad()

    batches = [task.batch(size, "cuda") for size in (7, 8, 9)]
    taken = interleaving.in_turns([lambda batch=batch: passes(batch) for batch in batches], 8)
    return [8 / t8[WALL] / ((7 / t7[WALL] + 9 / t9[WALL]) / 2) for t7, t8, t9 in zip(*taken)]


needs = None if on_cpu else Ratio.of_turns(three_times(both_formats), CLOCK, FLOOR)
eight = None if on_cpu else Ratio.of_processes(three_times(around_eight), FLOOR)
display(claims.check("fp16-needs-eights", needs))
claims.check("batch-multiple-of-eight", eight, note=f"{task.length()} tokens a sequence")

# %% [markdown]
# Faster and better are different questions. Throughput has a knee, and the memory beyond it buys little. In *steps* a larger batch converges faster, which is what the guide's sentence is true of; on the same *data* it does not, because it makes fewer updates; and where both end, they end alike. So the largest batch that fits is not the best one. It is an upper bound.
#
# ## Explore
#
# Tiles on GPUs that you may not have. Find the columns at which a card is filled exactly, and what the next one costs.


# %% tags=["widget"]
def draw(card, rows, tile):
    count, high_wide = int(card.split()[1]), tuple(map(int, tile.split(" x ")))
    columns = list(range(64, 8193, 64))
    rounds = [waves(rows, number, high_wide, count) for number in columns]
    used = [rows * number / (each * count * math.prod(high_wide)) for number, each in zip(columns, rounds)]
    ax = plots.lines(columns, {"used": [100 * x for x in used]}, "columns", "% of the tiles' arithmetic", markers=False)
    ax.set_title(f"{card} multiprocessors, {rows} rows, tiles of {tile}", loc="left")
    ax.set_ylim(0, 105)
    return ax


cards = ["H100: 132", "A100: 108", "V100: 80", "T4: 40"]
_ = widgets.explore(draw, card=cards, rows=[2048, 512, 4096], tile=["256 x 128", "128 x 128", "64 x 64"])

# %% [markdown]
# ## Exercise 1: columns for nothing
#
# A round of tiles that is begun is paid for. Write a function that returns the *most* columns that a product can have in as many rounds as one with `columns` columns takes.

# %% tags=["exercise"]
display(
    exercises.hint(
        "How many tiles fit into the rounds that are paid for?",
        "`waves(...)` rounds of `at_once` tiles. How many of them stand above each other in one column of tiles?",
        "Whole columns of tiles only: `rounds * at_once // tiles_high`, times the width of a tile.",
    )
)
answer = None  # lambda rows, columns, tile, at_once: ...


# %% tags=["check"]
def check(answer):
    if answer is None:
        return exercises.not_attempted()
    for case in ((2048, 2000, (256, 128), 132), (2048, 2049, (256, 128), 108), (512, 700, (128, 128), 40)):
        rounds, most = waves(*case), case[1]
        while waves(case[0], most + 1, *case[2:]) == rounds:  # by trying
            most += 1
        if answer(*case) != most:
            return exercises.wrong(
                f"{case}: {answer(*case)}, but {most} columns take {rounds} rounds, and one more does not"
            )
    return exercises.right("as found by trying, on three cards")


exercises.check(lab, "columns for nothing", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(
    check,
    solution=lambda rows, columns, tile, at_once: (
        waves(rows, columns, tile, at_once) * at_once // math.ceil(rows / tile[0]) * tile[1]
    ),
    mistake=lambda rows, columns, tile, at_once: math.ceil(columns / tile[1]) * tile[1],
)

# %% [markdown]
# ## Exercise 2: the challenge
#
# The lowest loss in a given time, under a memory limit. You name the batch size and the learning rate. You get as many steps as fit into the budget, at the seconds that a step of your size takes here, and the memory of batch 128. The target lies between guessing (a loss of 0.69) and what batch 32 had at its best rate after 16 steps; the budget is 24 such steps.

# %% tags=["exercise"]
display(
    exercises.hint(
        "Print `step_of`: how many steps does each size get?",
        "Too few steps learn nothing, and too small batches at a high rate jump about. Look at the third picture.",
        "Between the extremes, with a rate that is scaled up.",
    )
)
budget = 24 * step_of[32]
target = math.sqrt(loss(32, best(32, 16), 16) * math.log(2))
print(f"budget {1e3 * budget:.0f} ms, target {target:.2f}")
answer = None  # dict(batch_size=..., learning_rate=...)


def peak(size):
    return lab.train(f"{size}", task=learnable, per_device_train_batch_size=size, measure="memory").peak_bytes


# %% tags=["check"]
def after(size, rate, steps):
    def train(task):
        device = single_thread()
        data, unseen = (task.replace(seed=seed).batch(count, device) for seed, count in ((50, 4096), (51, 192)))
        return [trained(task, data, unseen, size, rate, seed, steps)[-1][1] for seed in seeds]

    return statistics.median(lab.run(train, task=learnable, measure=("none",)).value)


def check(answer):
    if answer is None:
        return exercises.not_attempted()
    size, rate = answer["batch_size"], answer["learning_rate"]
    if size > 128 and peak(size) > peak(128):
        return exercises.wrong(f"{plots.bytes_text(peak(size))}, and batch 128 takes {plots.bytes_text(peak(128))}")
    seconds = step_of[size] if size in step_of else seconds_of_step([size])[0]
    if not (steps := int(budget / seconds + 1e-9)):
        return exercises.wrong(f"not one step of batch {size} fits into the budget")
    said = f"{steps} steps of {size} at {rate:g}: loss {(found := after(size, rate, steps)):.2f}, target {target:.2f}"
    return exercises.right(said) if found <= target else exercises.wrong(f"{said}. Fewer samples, or a higher rate?")


exercises.check(lab, "lowest loss in a budget", check, answer)

# %% tags=["solution"] jupyter={"source_hidden": true}
exercises.prove(
    check,
    solution=dict(batch_size=32, learning_rate=best(32, 16) * base_rate),
    mistake=dict(batch_size=128, learning_rate=base_rate / 4),  # the largest, at a rate nobody scaled
)

# %% [markdown]
# ## Recap
#
# - A larger batch was faster up to a knee, which two measured ceilings foretold for a layer; in the whole step updates were shared as well.
# - The largest batch that fits was found by crashing, and without. Time jumped at the sizes that tiles foretold, in so far as your table says so, and padding was nearly free.
# - By steps the large batch learnt faster, by samples the small one, by seconds whoever your machine favoured; scaled learning rates decided how much.

# %% tags=["finish"]
claims.finish(lab)
