"""Functions that the GPU suite runs in fresh subprocesses in addition to trainings: kernels, rates, cold starts.

Each takes the task and returns a JSON value, as `Lab.run` requires. torch is imported inside the functions.
"""

from collections.abc import Callable
from typing import Any

from trainmem.core.task import Profile, Task

KERNELS = {"math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
PRECISIONS = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SIDE, TURNS = 8192, 12  # rows and columns of the square matrices; interleaved turns


def looped(model, arguments):
    """Return an AdamW without foreach and fused kernels, which loops over the tensors of a model.

    `arguments`: the Trainer's `TrainingArguments`.
    """
    import torch

    options = {"weight_decay": 0.0, "foreach": False, "fused": False}
    return torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, **options)


def products(task: Task) -> dict[str, list[float]]:
    """Return {precision: seconds of each run} of one large matmul in alternating precisions. The task is not used."""
    import torch

    from trainmem.measure.interleaving import in_turns
    from trainmem.records import WALL

    def product(name: str) -> Callable[[], None]:
        left, right = (torch.randn(SIDE, SIDE, device="cuda").to(getattr(torch, PRECISIONS[name])) for _ in range(2))
        out = torch.empty_like(left)

        def work() -> None:
            torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
            torch.mm(left, right, out=out)

        return work

    taken = in_turns([product(name) for name in PRECISIONS], TURNS)
    return {name: [turn[WALL] for turn in turns] for name, turns in zip(PRECISIONS, taken, strict=True)}


def kernels(task: Task) -> dict[str, bool]:
    """Return {SDPA kernel: whether it runs on this machine's GPU} for 16-bit inputs without a mask. The task is not
    used.
    """
    import warnings

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found = {}
    dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    for name, backend in KERNELS.items():
        inputs = [torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
        try:
            with warnings.catch_warnings(action="ignore"), sdpa_kernel([getattr(SDPBackend, backend)]):
                torch.nn.functional.scaled_dot_product_attention(*inputs).sum().backward()
            found[name] = True
        except RuntimeError:  # "No available kernel"
            found[name] = False
    return found


def forced(kernel: str, arguments: dict[str, Any], profile: Profile) -> Callable[[Task], None]:
    """Return a function that trains a task with the Trainer, while SDPA may only use `kernel`, a key of `KERNELS`.

    `arguments`: the training arguments; `profile`: sets the number of steps, `warmup_steps` + `turns` + 1.
    """
    steps = profile.warmup_steps + profile.turns + 1

    def work(task: Task) -> None:
        import tempfile

        from torch.nn.attention import SDPBackend, sdpa_kernel

        from trainmem.core.arguments import Arguments
        from trainmem.core.training import Experiment, train

        experiment = Experiment(kernel, task, Arguments.of(arguments))
        with tempfile.TemporaryDirectory() as folder, sdpa_kernel([getattr(SDPBackend, KERNELS[kernel])]):
            train(experiment, folder, steps, keep_losses=False)

    return work


def cold_start(task: Task) -> list[float]:
    """Return the seconds of the first steps (forward and backward) of a task's model that is not compiled yet.

    The first step includes the compilation: the cold start.
    """
    import os
    import tempfile
    import time

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
        import torch

        device, taken = "cuda" if torch.cuda.is_available() else "cpu", []
        model, batch = task.build_model().to(device), task.batch(4, device)
        compiled = torch.compile(model)
        for _ in range(5):
            start = time.perf_counter()
            compiled(**batch).loss.backward()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return taken


def rates(task: Task) -> dict[str, float]:
    """Return {type: floating-point operations per second} of a large matmul, measured by `roofline.ceilings`.

    "tf32" is fp32 with tf32 on. The task is not used.
    """
    import torch

    from perf_helpers.lab import roofline

    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # like the interleaved steps
        return {name: roofline.ceilings(name).flops_per_second for name in ("float32", "bfloat16")}
    found = {name: roofline.ceilings(name).flops_per_second for name in ("float32", "bfloat16", "float16")}
    torch.backends.cuda.matmul.allow_tf32 = True
    return found | {"tf32": roofline.ceilings("float32").flops_per_second}


def flops_of_a_sample(task: Task) -> int:
    """Return the counted floating-point operations of forward and backward for one sample of a task."""
    from perf_helpers.lab import roofline

    return roofline.model_flops(task, 1)
