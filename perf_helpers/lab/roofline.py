"""Measure a device's two speed limits, count a model's FLOPs, and predict the gain of 16-bit matmuls from them.

The roofline model gives the least time of an operation. It is the longer of two times: the operation's FLOPs divided by
the device's matmul rate, and its moved bytes divided by the memory's rate. Source: Williams, Waterman and Patterson,
"Roofline: an insightful visual performance model for multicore architectures", CACM 52(4), 2009.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainmem.core.task import Task
from trainmem.measure.interleaving import in_turns
from trainmem.records import CPU, WALL, Ratio
from trainmem.unknown import NeedsValues, RunFailed

TRIES = {"product": 15, "copy": 6}
# Large enough that the cost of a launch does not matter; small enough for two seconds of one CPU core.
SIDE = {"cpu": 1024, "cuda": 8192}  # rows and columns of the square matrices
COPIED_BYTES = {"cpu": 2**28, "cuda": 2**30}  # at least, so that no cache holds the copy
OTHER_WORK = 0.5, 2.0  # 16-bit over fp32 seconds of all but matmuls: bytes may halve, casts may be added
SMALL_PRODUCTS = 1.3  # a model also has smaller matmuls than the measured ones: together they take at most this factor
TRAINER_SECONDS = 0.005  # the Trainer's loop adds at most this to a step
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")  # Linux


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The matmul rate (FLOP/s) and the copy rate (bytes/s) of a device, each the best of several tries."""

    flops_per_second: float  # of a large matmul in `dtype`; a multiplication and an addition are two operations
    bytes_per_second: float  # of a large copy; bytes read plus bytes written
    dtype: str
    device: str  # "cpu" or "cuda"
    threads: int | None  # CPU threads; None on a GPU

    @property
    def ridge(self) -> float:
        """Return the FLOPs per byte below which bandwidth limits an operation, and above which the matmul rate does."""
        return self.flops_per_second / self.bytes_per_second

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """Return an operation's least seconds by the roofline model; `moved_bytes`: bytes read plus bytes written."""
        return max(flops / self.flops_per_second, moved_bytes / self.bytes_per_second)


def ceilings(dtype: str = "float32", device: str | None = None) -> Ceilings:
    """Measure the matmul rate (FLOP/s) and the copy rate (bytes/s) in this process, with torch's current threads.

    Call it in a fresh subprocess (`Lab.run`). The fastest of several tries counts. With one CPU thread the clock is CPU
    time, which other load disturbs least; otherwise it is the wall clock.

    Args:
        dtype: type of the matmul: "float32" (on a GPU under the current tf32 setting), "bfloat16" or "float16".
        device: "cpu" or "cuda" (default: the GPU if there is one).

    Raises:
        NeedsValues: in a rehearsal, which has no times.
    """
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    side, kind = SIDE[device], getattr(torch, dtype)
    left, right = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    product = torch.empty(side, side, device=device, dtype=kind)
    source = torch.ones(_copied_bytes(device) // 4, device=device)
    target = torch.empty_like(source)
    threads = torch.get_num_threads() if device == "cpu" else None
    clock = CPU if threads == 1 else WALL

    def fastest(operation: str, work: Callable[[], object]) -> float:
        ((*taken,),) = in_turns([work], TRIES[operation])
        return min(seconds[clock] for seconds in taken)

    flops = 2 * side**3 / fastest("product", lambda: torch.mm(left, right, out=product))
    moved = 2 * source.nbytes / fastest("copy", lambda: target.copy_(source))
    return Ceilings(flops, moved, dtype, device, threads)


@dataclass(frozen=True, slots=True)
class Products:
    """The rate of 16-bit matmuls divided by that of fp32 ones, and the share of an fp32 step's time in matmuls."""

    dtype: str  # "bfloat16" or "float16"
    ratio: Ratio  # rate in `dtype` / rate in fp32; unknown in a rehearsal
    flops_per_second: float | None = None  # in fp32; on a CPU with one thread
    shares: tuple[float, float] = (0.0, 1.0)  # least and greatest share of an fp32 training step that matmuls take

    @property
    def usable(self) -> bool:
        """Return whether a training in 16 bits is worth a try; True if `ratio` is unknown.

        False if 16-bit matmuls run below a fifth of the fp32 rate; emulated ones run at about a tenth of the fp32 rate.
        """
        return not self.ratio.known or self.ratio.value > 0.2

    @property
    def step_speed(self) -> tuple[float, float]:
        """Return (least, greatest) speed of a training step in mixed precision, relative to fp32.

        Matmuls become `ratio` (16-bit rate / fp32 rate) times as fast; all other work takes 0.5 to 2 times as long
        (`OTHER_WORK`). Source: Amdahl's law, "Validity of the single processor approach", AFIPS 1967.
        """
        rates = self.ratio.low, self.ratio.high
        if not self.ratio.known:
            return rates
        speeds = [1 / (s / r + (1 - s) * other) for s in self.shares for r in rates for other in OTHER_WORK]
        return min(speeds), max(speeds)

    @property
    def half_speed(self) -> tuple[float, float]:
        """Return (least, greatest) speed of a training step wholly in 16 bits, relative to mixed precision.

        Matmuls take equally long in both; all other work takes 0.5 to 2 times as long in 16 bits (`OTHER_WORK`).
        """
        if not self.ratio.known:
            return self.ratio.low, self.ratio.high
        rests = [(1 - share) / (1 - share + share / self.ratio.value) for share in self.shares]
        speeds = [1 / (1 - rest + rest * other) for rest in rests for other in OTHER_WORK]
        return min(speeds), max(speeds)

    def __str__(self) -> str:
        if not self.ratio.known:
            return "matmuls: not measured"
        rate = f"{self.flops_per_second / 1e9:.3g} GFLOP/s"
        part = "{:.0%} to {:.0%} of a step".format(*self.shares)
        return f"matmuls in {self.dtype} run at {self.ratio} x fp32's rate of {rate}; matmuls take {part}"


def products(lab, dtype: str, task: Task, batch_size: int, use_cpu: bool = False) -> Products:
    """Measure the matmul rates in `dtype` and fp32, and the fp32 training step of a task, in three fresh subprocesses.

    On a CPU one thread computes. All three matmuls of a feed-forward layer in training (one forward, two backward) are
    timed, because an emulated 16-bit matmul's speed depends, up to fivefold, on which of its matrices is transposed.

    Args:
        lab: runs the subprocesses.
        dtype: "bfloat16" or "float16".
        task, batch_size: model and samples of the step, which is forward, backward and an AdamW update.
        use_cpu: measure the CPU even if there is a GPU.
    """

    def in_one_process(task: Task) -> list[list[tuple[float, float]]]:
        import torch

        device = "cuda" if torch.cuda.is_available() and not use_cpu else "cpu"
        if device == "cpu":
            torch.set_num_threads(1)
        model, batch = task.build_model().to(device), task.batch(batch_size, device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        kinds = torch.float32, getattr(torch, dtype)
        wide, narrow = ([torch.randn(*shape, device=device).to(kind) for shape in shapes] for kind in kinds)

        def layer(inputs, weight, gradient) -> tuple:
            return inputs @ weight.t(), gradient @ weight, gradient.t() @ inputs

        def step() -> None:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        both = [lambda: layer(*wide), lambda: layer(*narrow), lambda: layer(*wide)]
        return [*in_turns(both, 12), *in_turns([step], 3)]

    rows, width = batch_size * task.length(), task.build_config().hidden_size
    shapes, name = ((rows, width), (4 * width, width), (rows, 4 * width)), f"products, {dtype}"
    try:
        runs = [lab.run(in_one_process, name, task=task, measure=("none",), use_cpu=use_cpu) for _ in range(3)]
    except NeedsValues as error:
        return Products(dtype, Ratio.unknown(str(error)))
    if failed := [run.failure for run in runs if not run.ok]:
        return Products(dtype, Ratio.unknown(f"matmul rates not measured: {failed[0]}", RunFailed))
    taken = [run.value for run in runs]
    seconds, step = (min(turn[CPU] for process in taken for turn in process[which]) for which in (0, 3))
    rate = 3 * 2 * rows * width * 4 * width / seconds
    of_products = model_flops(task, batch_size) / rate
    shares = min(1.0, of_products / (step + TRAINER_SECONDS)), min(1.0, of_products / step * SMALL_PRODUCTS)
    ratio = Ratio.of_turns([process[:3] for process in taken], CPU, 1.05)
    return Products(dtype, ratio, rate, shares)


def _copied_bytes(device: str) -> int:
    """Return how many bytes to copy to measure a copy rate, so that source and target together exceed the cache."""
    least = COPIED_BYTES[device]
    if device == "cuda":
        return least
    sizes = (file.read_text().strip() for file in CACHES.glob("index*/size"))  # such as "32768K"
    largest = max((int(size[:-1]) * 2**10 for size in sizes if size.endswith("K")), default=0)
    return max(least, min(largest, psutil.virtual_memory().available // 8))


def model_flops(task: Task, samples: int = 1, *, training: bool = True) -> int:
    """Return the *model FLOPs* of `samples` samples: the floating-point operations of all matmuls that they need.

    torch's FlopCounterMode counts them over one forward pass and, for training, one backward pass on fake tensors, so
    nothing is computed. Attention counts as the matmuls it consists of, whichever kernel runs it. Recomputation by
    checkpointing is not counted, nor is any operation but a matmul (norms, activations, dropout, the optimizer). This
    is the definition of "model FLOPs utilization" in PaLM (Chowdhery et al. 2022, appendix B): a decoder needs 6 FLOPs
    per parameter and token, plus 12 x layers x width x length per token for attention.

    Raises:
        ValueError: torch's counter misses matmuls (grouped ones of experts), or the forward pass depends on values.
    """
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = task.build_config()
    if any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise ValueError(
            f"{task.model}: torch's FLOP counter ignores grouped matmuls of experts. Choose a model without experts"
        )
    # The counter knows the matmuls of plain attention, but not every fused kernel.
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(training):
        model, batch = task.build_model(), task.batch(samples)
        with FlopCounterMode(display=False) as counter:
            try:
                loss = model(**batch).loss
            except DataDependentOutputException as error:
                raise ValueError(
                    f"{task.model}: its forward depends on values of tensors ({error}). Choose another model"
                ) from None
            if training:
                loss.backward()
    return counter.get_total_flops()
