"""Simulate CPUs with different speeds, and calculate the result of each timed claim of the course on them.

The time of a step is a sum: matmuls at a rate in FLOP/s (matmuls with few rows are slower), the bytes of all other
operations at the rate of memory or of a cache, a constant per call of an operation, and an update that reads and writes
every parameter. `AMD` has the rates of a real machine; test_simulated_machines.py compares the simulated results with
those recorded on that machine.
"""

from dataclasses import dataclass

from perf_helpers.lab.roofline import SMALL_PRODUCTS, TRAINER_SECONDS, Products
from trainmem.records import Ratio

FEW_ROWS = 24  # rows at which a product of AMD reaches half of its rate
OTHER_WORK = 2500  # bytes at a cache's rate in whose time a layer does what is no product, a token and unit of width
OTHER_BYTES = 100  # that it moves meanwhile, forward
SCORE_WORK, SCORE_BYTES = 90, 26  # the same of plain attention, for each of its scores
CALLS = 24  # of a layer, forward
DRAW = 3e-9  # seconds of AMD to draw whether a number is dropped
HIDDEN = 256  # of bert-small
CLOCK, WALL = 1.05, 1.3  # noise floors of the lab


@dataclass(frozen=True)
class Cpu:
    """A simulated CPU; its rates are those of one thread by default."""

    name: str
    fp32: float  # FLOP/s of a large product
    half: float  # the same in bf16
    memory: float = 35e9  # bytes/s of a large copy, read and written
    cache: float = 92e9
    cached: float = 4e6  # bytes of a tensor that stays in it
    call: float = 14e-6  # seconds of one operation beyond its work
    cores: float = 2  # that can be used: affinity, quota
    start: float = 0.05  # seconds to start one worker process
    link: float = 1.5e8  # bytes/s between two processes of this machine, by gloo


AMD = Cpu("AMD with AVX-512 and bf16", 97e9, 405e9)
CPUS = [
    AMD,
    Cpu("AMD without bf16", 60e9, 1e9, memory=25e9, cache=60e9, call=16e-6),
    Cpu("Intel with AMX", 150e9, 1200e9, memory=18e9, cache=80e9, call=12e-6),
    Cpu("Intel with avx512_bf16, slower than fp32", 245e9, 159e9, memory=18e9, cache=90e9, call=11e-6),
    Cpu("the same held to AVX512_CORE", 220e9, 55e9, memory=18e9, cache=90e9, call=11e-6),
    Cpu("the same held to AVX2", 208e9, 1e9, memory=18e9, cache=80e9, call=11e-6),
    Cpu("Arm without bf16", 40e9, 0.5e9, memory=20e9, cache=45e9, call=20e-6, cores=4),
    Cpu("Arm with bf16", 75e9, 260e9, memory=30e9, cache=70e9, call=15e-6, cores=64, start=0.01),
    Cpu("bf16 as fast as fp32", 120e9, 122e9),
    Cpu("one core", 70e9, 140e9, cores=1, start=0.08),
    Cpu("a quota of 1.5 cores", 90e9, 350e9, cores=1.5, start=0.06),
    Cpu("64 cores, fast memory", 130e9, 800e9, memory=60e9, cache=140e9, cores=64, start=0.012, call=11e-6),
    Cpu("two threads a core", 55e9, 210e9, memory=14e9, cache=50e9, call=25e-6, cores=4),
    Cpu("slow memory", 95e9, 380e9, memory=5e9, cache=60e9),
    Cpu("a slow disk, a cold page cache", 60e9, 1e9, memory=15e9, cache=50e9, start=0.4),
    Cpu("an old laptop without AVX-512", 35e9, 0.4e9, memory=9e9, cache=35e9, call=20e-6),
]


def _products(cpu: Cpu, flops: float, rows: float, rate: float | None = None) -> float:
    rate = rate or cpu.fp32
    few = FEW_ROWS * rate / 97e9  # the faster the unit, the more rows it needs
    return flops / rate * (1 + few / rows)


def _moved(cpu: Cpu, size: float, of_a_tensor: float) -> float:
    return size / (cpu.cache if of_a_tensor <= cpu.cached else cpu.memory)


def forward(cpu: Cpu, samples: int, tokens: int, layers: int = 4, hidden: int = HIDDEN, *, half=False, eager=False):
    """Return the seconds that (matmuls, other operations, calls of operations) take in a BERT's forward pass.

    Args:
        samples, tokens: the batch, and the tokens per sample.
        layers, hidden: number of layers, and the model's width.
        half: whether matmuls run in 16 bits.
        eager: whether attention is plain, not fused.
    """
    rows, scores = samples * tokens, samples * hidden // 64 * tokens**2
    flops = layers * (24 * rows * hidden**2 + 4 * rows * tokens * hidden)
    other = layers * (
        OTHER_WORK * rows * hidden / cpu.cache + _moved(cpu, OTHER_BYTES * rows * hidden, 16 * rows * hidden)
    )
    other += eager * layers * (SCORE_WORK * scores / cpu.cache + _moved(cpu, SCORE_BYTES * scores, 4 * scores))
    if half:  # half of the bytes, and as many again to cast to and fro where there are no quick instructions
        other *= 0.7 if cpu.half > cpu.fp32 / 2 else 1.1
    return (
        _products(cpu, flops, rows, cpu.half if half else None),
        other,
        (CALLS * layers + 12) * cpu.call * (1 + half / 3),
    )


def backward(cpu: Cpu, *sizes, **options) -> float:
    products, other, calls = forward(cpu, *sizes, **options)
    return 2 * products + 1.7 * other + 1.2 * calls


def one_pass(cpu: Cpu, *sizes, **options) -> float:
    return sum(forward(cpu, *sizes, **options)) + backward(cpu, *sizes, **options)


def parameters(layers: int = 4, vocabulary: int = 8000, hidden: int = HIDDEN) -> int:
    return hidden * vocabulary + layers * 12 * hidden**2


def update(cpu: Cpu, numbers: int, form: str = "fused") -> float:
    """Return the seconds of an optimizer's update of `numbers` parameters on a simulated CPU, with the Trainer's
    clipping of gradients.

    `form`: AdamW's implementation "fused", "foreach" or "loop"; or "adafactor".
    """
    sweeps = {"fused": 1.0, "foreach": 3.2, "loop": 2.9, "adafactor": 2.4}[form]
    return sweeps * 28 * numbers / cpu.memory + 100 * cpu.call


def step(
    cpu: Cpu, samples: int, tokens: int, layers: int = 4, steps: int = 1, vocabulary: int = 8000, **options
) -> float:
    return steps * one_pass(cpu, samples, tokens, layers, **options) + update(cpu, parameters(layers, vocabulary))


def products_of(cpu: Cpu, samples: int, tokens: int, layers: int = 4, vocabulary: int = 8000) -> Products:
    """Return the `Products` that `roofline.products` would measure for a BERT in bf16 on a simulated CPU.

    `Products` has the speed of bf16 matmuls relative to fp32, the fp32 rate in FLOP/s, and (least, greatest) share of a
    training step that matmuls take.

    Args:
        samples, tokens: the batch, and the tokens per sample.
        layers, vocabulary: numbers of layers and of words.
    """
    seconds = 3 * layers * 24 * samples * tokens * HIDDEN**2 / cpu.fp32
    whole = step(cpu, samples, tokens, layers, vocabulary=vocabulary)
    shares = seconds / (whole + TRAINER_SECONDS), min(1.0, seconds / whole * SMALL_PRODUCTS)
    return Products("bfloat16", within(cpu.half / cpu.fp32), cpu.fp32, shares)


def within(value: float, floor: float = CLOCK) -> Ratio:
    return Ratio(value, value / floor, value * floor)


def _by_parts(value: float) -> tuple[float, float]:
    """Return the range that lesson 05 predicts for a ratio of two speeds: (`value` / 1.2, `value` * 1.2).

    The lesson calculates `value` from passes and updates that it timed separately.
    """
    return value / 1.2, value * 1.2


def _larger_batch(cpu):
    return within(51 * step(cpu, 1, 32, 2) / step(cpu, 51, 32, 2))


def _by_updates(cpu):
    saved = step(cpu, 1, 32, 2) - step(cpu, 51, 32, 2) / 51
    return within(update(cpu, parameters(2)) * (1 - 1 / 51) / saved)


def _to_the_limit(cpu):
    return within(step(cpu, 51, 32, 2) / step(cpu, 12, 32, 2) * 12 / 51)


def _with_dropout(cpu, layers=4, rows=1024):
    numbers = layers * (4 * 4 * 256**2 + 2 * rows * HIDDEN) + rows * HIDDEN
    masks = DRAW * AMD.fp32 / cpu.fp32 * numbers  # one by one: as fast as a core is
    value = backward(cpu, 4, 256) / (sum(forward(cpu, 4, 256)) + masks)
    return within(value, 1.08), (value / 1.1, value * 1.1)  # what the parts say


def _awkward(cpu, rows=1024):
    flops = 2 * rows * HIDDEN**2
    of_input, of_weight = _products(cpu, flops, rows), _products(cpu, flops, HIDDEN)  # the second has a weight's rows
    return within((of_input + of_weight) / 2 / _products(cpu, flops, rows))


def _fewer_updates(cpu):
    value = 4 * step(cpu, 1, 64) / step(cpu, 1, 64, steps=4)
    return within(value), _by_parts(value / 1.08)  # clipping is no part


def _cost(cpu):
    value = step(cpu, 4, 256, 2) / step(cpu, 1, 256, 2, steps=4)
    return within(value), _by_parts(value)


def _only_slows(cpu):
    value = step(cpu, 8, 32) / step(cpu, 4, 32, steps=2)
    return within(value), _by_parts(value)


def _fill_first(cpu):
    value = step(cpu, 1, 64, steps=8) / step(cpu, 4, 64, steps=2)
    return within(value), _by_parts(value)


def _checkpointing(cpu, tokens=128, vocabulary=4000):
    once = step(cpu, 4, tokens, 2, vocabulary=vocabulary)
    return within(once / (once + sum(forward(cpu, 4, tokens, 2))))


def _half(cpu):
    quick = products_of(cpu, 4, 64).usable
    sizes = (4, 64) if quick else (16, 16, 1)
    return within(step(cpu, *sizes) / step(cpu, *sizes, half=True)), products_of(cpu, *sizes).step_speed


def _half_on_the_ladder(cpu):
    products = products_of(cpu, 4, 192, 2, 200)
    if not products.usable:
        return None, products.step_speed
    sizes = {"layers": 2, "vocabulary": 200, "eager": True}
    return within(step(cpu, 4, 192, **sizes) / step(cpu, 4, 192, **sizes, half=True)), products.step_speed


def _half_inference(cpu):
    products, other, calls = forward(cpu, 4, 64, half=True)
    casts = 6 * parameters(4, 1200) / cpu.memory
    return within((products + other + calls + casts) / (products + 0.9 * other + calls)), products_of(
        cpu, 4, 64
    ).half_speed


def _adafactor(cpu):
    passes, numbers = one_pass(cpu, 4, 512, 2), parameters(2, 150)
    return within((passes + update(cpu, numbers)) / (passes + update(cpu, numbers, "adafactor")), 1.01)


def _compiled(cpu, other=0.75, calls=0.5):
    whole, products = step(cpu, 4, 128, 1, vocabulary=1000), 3 * forward(cpu, 4, 128, 1)[0]
    rest, waiting = 2.7 * forward(cpu, 4, 128, 1)[1], 2.2 * forward(cpu, 4, 128, 1)[2]
    assert products + rest + waiting < whole
    return within(whole / (whole - (1 - other) * rest - (1 - calls) * waiting))


def _workers_help(cpu):
    own = 1 + 0.3 / cpu.cores  # collating takes what the training would have
    return within(4 / max(own, 0.8), WALL)


def _workers_not_beyond(cpu):
    crowded = 1 + 0.1 / cpu.cores  # sixteen processes wake up where four did
    return within(1 / crowded, WALL)


def _loader(cpu):
    return within(3 / (1.2 + 0.4 / cpu.cores), WALL)


def _zero(cpu):
    """Return the throughput of torch's ZeRO stage 1 on a simulated CPU as a share of DDP's.

    Each of two ranks updates half of the weights, and then sends them to the other rank.
    """
    numbers, passes = parameters(4, 2000), one_pass(cpu, 8, 32, 4) * max(1.0, 2 / cpu.cores)
    whole = passes + update(cpu, numbers) + 8 * numbers / cpu.link
    return within(whole / (passes + update(cpu, numbers) / 2 + 12 * numbers / cpu.link), WALL)


def _moe(cpu, ffn, experts=1, training=False, scale=12, samples=64):
    """Return the seconds of one layer of width 64 x `scale` on a simulated CPU: of a forward pass, or of a training
    step.

    Its feed-forward part has width `ffn` x `scale` for each expert. A token goes to at most two of the `experts`. Each
    of the `samples` has 16 tokens.
    """
    rows, chosen, hidden = samples * 16, min(experts, 2), 64 * scale
    one = 3 * hidden * ffn * scale  # weights of an expert
    passes = _products(cpu, 8 * rows * hidden**2, rows) + _products(
        cpu, 2 * rows * chosen * one, rows / experts * chosen
    )
    passes += rows * hidden * OTHER_WORK / cpu.cache / 2 + 60 * cpu.call
    if experts > 1:  # gate, sorting, gathering, adding up
        passes += 0.5 * experts * cpu.call + 24 * rows * chosen * hidden / cpu.memory
    numbers = 2 * hidden * 112 + 4 * hidden**2 + experts * one
    return passes if not training else 3.2 * passes + update(cpu, numbers)


def _moe_faster(cpu):
    forward = within(_moe(cpu, 122) / _moe(cpu, 16, 64), 1.1)
    training = within(_moe(cpu, 122, training=True) / _moe(cpu, 16, 64, training=True), 1.1)
    return training, (0.6 * forward.low, 1.05 * forward.high)


def _half_types(cpu):
    """Return (speed of fp16 relative to bf16, (low, high)) of a Llama's training step on a simulated CPU.

    (low, high) is the range that lesson 19 predicts from the times of a step's parts. Matmuls in fp16 are slow, because
    no simulated CPU has instructions for fp16.
    """
    of_products = {"bf16": 0.055 * 97e9 / cpu.half, "fp16": 0.055 * 97e9 / (0.06 * cpu.fp32)}
    rest = 0.06 * AMD.cache / cpu.cache
    low = (of_products["bf16"] + rest / 2) / (of_products["fp16"] + 2 * rest)
    high = (of_products["bf16"] + 2 * rest) / (of_products["fp16"] + rest / 2)
    return within((of_products["bf16"] + 1.2 * rest) / (of_products["fp16"] + 1.2 * rest)), (low, high)


def _threads(cpu, threads):
    """Return the seconds of a training step on 16 samples in one process with `threads` threads on a simulated CPU."""
    products, other, calls = forward(cpu, 16, 32, 2)
    speedup = min(threads, int(cpu.cores) or 1)
    return 3 * products / speedup + 2.7 * other / (1 + 0.8 * (speedup - 1)) + 2.2 * calls


def _crowded(cpu):
    return within(1.5 if cpu.cores > 1 else 1.2, WALL)  # threads that wait spin


def _one_fewer(cpu):
    cores = int(cpu.cores)
    if cores < 2:
        return None, (1 / WALL, WALL)
    return within(_threads(cpu, cores) / _threads(cpu, cores - 1), WALL), ((cores - 1) / cores / WALL, WALL)


def _many_cpus(cpu):
    half = max(1, int(cpu.cores) // 2)
    shared = 1.0 if cpu.cores >= 2 else 2 / max(1.0, cpu.cores)  # two processes on less than two cores
    silent = _threads(cpu, half) / 2 * shared * 1.05
    send = 4 * parameters(2, 200) / (4 * cpu.link)
    one = _threads(cpu, half)
    return within(one / (silent + 0.8 * send), WALL), (one / (silent + send) / WALL, one / silent * WALL)


def _detector(cpu, modules=32, tensors=2.7, looks=11):
    """Return the factor by which lesson 23's detector slows down a step on a simulated CPU.

    The detector checks `tensors` tensors in each of `modules` modules. Each check is `looks` operations, each of which
    takes the time of one call; an operation on a weight also takes the time to read the weight.
    """
    watching = modules * tensors * looks * cpu.call + looks * 4 * parameters(2, 64) / cpu.cache
    return within(1 + watching / step(cpu, 4, 32, 2, vocabulary=64))


def _adapters(cpu):
    """Return the speed of training with adapters, relative to training all weights, on a simulated CPU.

    Adapters save the gradients of weights and almost all of the update; each of four adapters adds ten calls.
    """
    products, other, calls = forward(cpu, 8, 64, 2)
    frozen = 2 * products + 2.7 * other + 2.2 * calls + 4 * 10 * cpu.call
    return within(step(cpu, 8, 64, 2, vocabulary=512) / frozen)


WEIGHTS = 25e6  # of lesson 20's wide Llama


def _batching(cpu):
    """Return the speed-up per token of 16 answers at once over one answer, on a simulated CPU.

    The weights are read once for all answers, unless the matmuls take longer than reading them.
    """
    one, many = (max(4 * WEIGHTS / cpu.memory, _products(cpu, 2 * WEIGHTS * rows, rows)) for rows in (1, 16))
    calls = 80 * cpu.call
    return within(16 * (one + calls) / (many + 1.5 * calls), 1.1)


def _fewer_bits(cpu, matrices):
    """Return (how fast a simulated CPU generates a text with quantized weights, relative to bf16; the predicted range).

    `matrices`: function of (CPU, seconds that a token's matmuls take in bf16) that returns the seconds that the same
    matmuls take with quantized weights.
    """
    half = max(2 * WEIGHTS / cpu.memory, 2 * WEIGHTS / cpu.half)
    ratio = (half + 80 * cpu.call) / (matrices(cpu, half) + 80 * cpu.call)
    return within(1.1 * ratio, 1.1), (ratio / 1.5, ratio * 1.5)


def _four_bits(cpu, half):
    unpacked = WEIGHTS / cpu.cache * 6  # each of them, where there is a kernel; else as a matrix of its own
    return 0.56 * WEIGHTS / cpu.memory + unpacked if cpu.half > cpu.fp32 else 3 * half + unpacked


def _eight_bits(cpu, half):
    return WEIGHTS / cpu.memory + 6 * WEIGHTS / cpu.cache + 14 * 12 * cpu.call


CLAIMS = {
    "batching-throughput": _batching,
    "quantized-faster": lambda cpu: _fewer_bits(cpu, _four_bits),
    "int8-faster": lambda cpu: _fewer_bits(cpu, _eight_bits),
    "cpu-fp16-as-bf16": _half_types,
    "oversubscription": _crowded,
    "threads-minus-one": _one_fewer,
    "many-cpus": _many_cpus,
    "backward-takes-twice": lambda cpu: within(backward(cpu, 4, 256) / sum(forward(cpu, 4, 256)), 1.08),
    "backward-twice-dropout": _with_dropout,
    "backward-sizes-awkward": _awkward,
    "larger-batch-faster": _larger_batch,
    "larger-batch-by-updates": _by_updates,
    "memory-to-the-limit": _to_the_limit,
    "accumulation-cost": _cost,
    "accumulation-cost-grows": _fewer_updates,
    "accumulation-only-slows": _only_slows,
    "accumulation-fill-first": _fill_first,
    "accumulation-fewer-updates": _fewer_updates,
    "checkpointing-cost": _checkpointing,
    "checkpointing-cost-2022": _checkpointing,
    "half-precision-faster-cpu": _half,
    "half-inference-speed": _half_inference,
    "adafactor-cost": _adafactor,
    "table-accumulation-speed": lambda cpu: within(
        step(cpu, 4, 192, 2, vocabulary=200, eager=True) / step(cpu, 1, 192, 2, 4, 200, eager=True)
    ),
    "table-checkpointing-speed": lambda cpu: _checkpointing(cpu, 192, 200),
    "table-half-speed": _half_on_the_ladder,
    "table-batch-speed": lambda cpu: within(
        4 * step(cpu, 1, 192, 2, vocabulary=200) / step(cpu, 4, 192, 2, vocabulary=200)
    ),
    "table-optimizer-speed": lambda cpu: within(
        1
        + (update(cpu, parameters(2, 200), "loop") - update(cpu, parameters(2, 200)))
        / step(cpu, 4, 192, 2, vocabulary=200)
    ),
    "table-loader-speed": _loader,
    "multi-tensor": lambda cpu: within((14 * cpu.call + 64 * 90 / cpu.cache) / (9 * cpu.call + 64 * 90 / cpu.cache)),
    "fused-fastest": lambda cpu: within(
        (one_pass(cpu, 1, 32) + update(cpu, parameters(4), "loop"))
        / (one_pass(cpu, 1, 32) + update(cpu, parameters(4)))
    ),
    "workers-help": _workers_help,
    "workers-not-beyond": _workers_not_beyond,
    "sdpa-speed": lambda cpu: within(
        step(cpu, 1, 1024, 1, vocabulary=1000, eager=True)
        / (step(cpu, 1, 1024, 1, vocabulary=1000) + 2 * 1024**2 * HIDDEN / cpu.fp32)  # scores are recomputed
    ),
    "compile": _compiled,
    "compile-debugging": lambda cpu: _compiled(cpu, 1.0, 0.95),
    "zero-slows-if-fits": _zero,
    "debug-cost": _detector,
    "lora-faster": _adapters,
    "moe-seconds": lambda cpu: within(_moe(cpu, 16, 64, training=True) / _moe(cpu, 32, training=True)),
    "moe-faster": _moe_faster,
    "moe-inference": lambda cpu: within(_moe(cpu, 122) / _moe(cpu, 16, 64), 1.1),
    "moe-few-speed": lambda cpu: within(_moe(cpu, 160, training=True) / _moe(cpu, 32, 8, training=True)),
}


def simulated(id: str, cpu: Cpu) -> tuple[Ratio | None, tuple[float, float] | None]:
    """Calculate what the lesson of the claim `id` would pass to `Claims.check` on this CPU.

    Returns:
        (the measured ratio, the predicted range of the ratio). The ratio is None if the lesson skips the claim on a
            CPU, the range is None if the lesson predicts nothing.
    """
    found = CLAIMS[id](cpu)
    return found if isinstance(found, tuple) else (found, None)
