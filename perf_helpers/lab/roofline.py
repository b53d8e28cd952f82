"""What bounds the time of an operation: the two ceilings of a device, measured, and a model's arithmetic, counted.

The roofline model is that of Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
multicore architectures", CACM 52(4), 2009: an operation takes at least its arithmetic at the rate of matrix products,
and at least its bytes at the rate of memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from perf_helpers.lab.runs import CPU, WALL
from perf_helpers.lab.stopwatch import in_turns
from perf_helpers.lab.task import Task

TRIES = {"product": 15, "copy": 6}
# Large enough that starting costs nothing; small enough for two seconds of one CPU core.
SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices
COPIED_BYTES = {"cpu": 2**28, "cuda": 2**30}  # at least; no cache holds the copy
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

    The fastest of several tries counts: by the seconds computed on one thread of a CPU, which neighbours disturb
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
        ValueError: a model whose products torch's counter does not see (grouped products of experts), or that asks for
            values.
    """
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = task.build_config()
    if any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise ValueError(f"{task.model}: torch's counter does not see the grouped products of experts")
    # The counter knows the products that plain attention is made of, and not every fused kernel.
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(training):
        model, batch = task.build_model(), task.batch(samples)
        with FlopCounterMode(display=False) as counter:
            try:
                loss = model(**batch).loss
            except DataDependentOutputException as error:
                raise ValueError(f"{task.model}: its forward asks for values ({error})") from None
            if training:
                loss.backward()
    return counter.get_total_flops()
