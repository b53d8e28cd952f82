"""What bounds the time of an operation: the ceilings of a device, measured, and a model's arithmetic, counted; and what
16-bit products can therefore gain.

The roofline model is that of Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
multicore architectures", CACM 52(4), 2009: an operation takes at least its arithmetic at the rate of matrix products,
and at least its bytes at the rate of memory.
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
# Large enough that starting costs nothing; small enough for two seconds of one CPU core.
SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices
COPIED_BYTES = {"cpu": 2**28, "cuda": 2**30}  # at least; no cache holds the copy
OTHER_WORK = 0.5, 2.0  # what is no product takes so many times its fp32 seconds: casts are added, or bytes are halved
SMALL_PRODUCTS = 1.3  # some of a model's products are smaller than the one measured: all take so much longer at most
TRAINER_SECONDS = 0.005  # that the Trainer's loop adds to a step at most
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")  # Linux


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The two rates of a device, each the best of several tries."""

    flops_per_second: float  # of a large matrix product in `dtype`: a multiplication and an addition are two
    bytes_per_second: float  # of a large copy, bytes read and bytes written together
    dtype: str
    device: str  # "cpu" or "cuda"
    threads: int | None  # of the CPU; None on a GPU

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which the two ceilings meet: an operation with fewer is bound by bandwidth."""
        return self.flops_per_second / self.bytes_per_second

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """The least that an operation can take by the roofline model."""
        return max(flops / self.flops_per_second, moved_bytes / self.bytes_per_second)


def ceilings(dtype: str = "float32", device: str | None = None) -> Ceilings:
    """Measure both, in this process, with the threads that torch has here. To be called in a clean process (`Lab.run`).

    The fastest of several tries counts: by the seconds computed on one thread of a CPU, which other load disturbs
    least, else by the clock.

    Args:
        dtype: of the matrix product: "float32" (on a GPU with whatever tf32 setting is on), "bfloat16", "float16".
        device: "cpu" or "cuda"; None: the GPU if there is one.

    Raises:
        NeedsValues: in a rehearsal.
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

    def fastest(what: str, work: Callable[[], object]) -> float:
        ((*taken,),) = in_turns([work], TRIES[what])
        return min(seconds[clock] for seconds in taken)

    flops = 2 * side**3 / fastest("product", lambda: torch.mm(left, right, out=product))
    moved = 2 * source.nbytes / fastest("copy", lambda: target.copy_(source))
    return Ceilings(flops, moved, dtype, device, threads)


@dataclass(frozen=True, slots=True)
class Products:
    """How fast a device multiplies in 16 bits against fp32, and how much of a training step its products are."""

    dtype: str  # "bfloat16" or "float16"
    ratio: Ratio  # rate in `dtype` / rate in fp32; unknown in a rehearsal
    flops_per_second: float | None = None  # in fp32; one thread of a CPU
    shares: tuple[float, float] = (0.0, 1.0)  # of a training step in fp32 that its products take, at least and at most

    @property
    def usable(self) -> bool:
        """Whether 16 bits are worth a training here: emulated, products take ten times as long. Unknown: True."""
        return not self.ratio.known or self.ratio.value > 0.2

    @property
    def step_speed(self) -> tuple[float, float]:
        """Between which factors mixed precision changes the speed of that step, by Amdahl's law: products go by the
        ratio of their rates, anything else by `OTHER_WORK`.

        Source: Amdahl, "Validity of the single processor approach", AFIPS 1967.
        """
        rates = self.ratio.low, self.ratio.high
        if not self.ratio.known:
            return rates
        speeds = [1 / (s / r + (1 - s) * other) for s in self.shares for r in rates for other in OTHER_WORK]
        return min(speeds), max(speeds)

    @property
    def half_speed(self) -> tuple[float, float]:
        """The same of a model wholly in 16 bits against mixed precision: their products are equal, so only the rest of
        what was left of the step can change."""
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
    """Measure the rates of products in `dtype` and fp32, and a training step of the task in fp32, in three clean
    processes of the lab, on one thread of a CPU. The products are the three of a feed-forward layer in training: where
    16 bits are emulated, one with its left or right matrix transposed can be five times as fast as the plain one.

    Args:
        dtype: "bfloat16" or "float16".
        task, batch_size: of the step; forward, backward and an update by AdamW.
        use_cpu: the CPU, although there is a GPU.
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
    """Bytes to copy: as many as the largest cache has, for source and target together are twice that. No more than an
    eighth of the memory that is free."""
    least = COPIED_BYTES[device]
    if device == "cuda":
        return least
    sizes = (file.read_text().strip() for file in CACHES.glob("index*/size"))  # such as "32768K"
    largest = max((int(size[:-1]) * 2**10 for size in sizes if size.endswith("K")), default=0)
    return max(least, min(largest, psutil.virtual_memory().available // 8))


def model_flops(task: Task, samples: int = 1, *, training: bool = True) -> int:
    """Floating-point operations of the matrix products that a model needs for some samples: its *model FLOPs*.

    Counted by torch's FlopCounterMode over one forward and, for training, one backward pass on fake tensors: nothing is
    computed. Attention counts as the products it is made of, whatever kernel takes it. What is recomputed by
    checkpointing is not counted, and what is no product (norms, activations, dropout, the optimizer) neither, as in the
    "model FLOPs utilization" of PaLM (Chowdhery et al. 2022, appendix B), where a decoder's are 6 a parameter and token
    and 12 x layers x width x length a token for attention.

    Raises:
        ValueError: a model whose products torch's counter does not see (grouped products of experts), or that needs
            values.
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
    # The counter knows the products that plain attention is made of, and not every fused kernel.
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
