"""Compare the requests that two releases of torch send to CUDA's allocator, operation by operation.

    python benchmarks/compare_torch.py --old PYTHON --new PYTHON [--capabilities 8.0 9.0]

Each PYTHON has the CUDA build of one release. It rehearses the operations below with their backward pass, the cases of
tests/estimate/kernel_cases.py, and the kernel that scaled_dot_product_attention selects for each call of
tests/estimate/attention_cases.py. The script prints each difference. A request is printed as the bytes of an
allocation, or as ~n if the n-th allocated block is freed.

Exit code 1 if anything differs: then the estimate needs a rule for the newer release, see docs/releases.md.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from perf_helpers.lab import Lab
from trainmem.rehearsal import Rehearsal, card

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests" / "estimate"))
import attention_cases  # noqa: E402
import kernel_cases  # noqa: E402

ASK = "--ask"  # the option for a Python that rehearses
CAPABILITIES = ("7.5", "8.0", "8.6", "9.0", "10.0", "12.0")
X, SQUARE, IMAGES = (64, 96, 128), (512, 512), (4, 16, 28, 28)
# {name: (shape of a tensor with a gradient, function to call with it)}
OPERATIONS: dict[str, tuple[tuple[int, ...], Callable]] = {
    **{
        name: (X, getattr(torch, name))
        for name in ("exp", "log", "tanh", "sigmoid", "sqrt", "rsqrt", "abs", "erf", "cos", "neg", "square")
    },
    **{
        name: (X, getattr(functional, name))
        for name in ("relu", "gelu", "silu", "elu", "leaky_relu", "hardswish", "softplus", "mish", "normalize")
    },
    "glu": (X, functional.glu),
    "dropout": (X, functional.dropout),
    "alpha_dropout": (X, functional.alpha_dropout),
    "softmax": (X, lambda x: x.softmax(-1)),
    "softmax of columns": (X, lambda x: x.softmax(0)),
    "log_softmax": (X, lambda x: x.log_softmax(-1)),
    "logsumexp": (X, lambda x: x.logsumexp(-1)),
    "layer_norm": (X, lambda x: functional.layer_norm(x, (128,))),
    "rms_norm": (X, lambda x: functional.rms_norm(x, (128,))),
    "group_norm": (IMAGES, lambda x: functional.group_norm(x, 4)),
    "batch_norm": (IMAGES, lambda x: functional.batch_norm(x, None, None, training=True)),
    "conv2d": (IMAGES, lambda x: functional.conv2d(x, x.new_zeros(8, 16, 3, 3))),
    "conv1d": (X, lambda x: functional.conv1d(x, x.new_zeros(8, 96, 3))),
    "max_pool2d": (IMAGES, lambda x: functional.max_pool2d(x, 2)),
    "avg_pool2d": (IMAGES, lambda x: functional.avg_pool2d(x, 2)),
    "adaptive_avg_pool2d": (IMAGES, lambda x: functional.adaptive_avg_pool2d(x, 7)),
    "interpolate": (IMAGES, lambda x: functional.interpolate(x, scale_factor=2)),
    "interpolate, bilinear": (IMAGES, lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear")),
    "pixel_shuffle": (IMAGES, lambda x: functional.pixel_shuffle(x, 2)),
    "unfold": (IMAGES, lambda x: functional.unfold(x, 3)),
    "grid_sample": (IMAGES, lambda x: functional.grid_sample(x, x.new_zeros(4, 9, 9, 2), align_corners=False)),
    "linear": (X, lambda x: functional.linear(x, x.new_zeros(60, 128), x.new_zeros(60))),
    "linear without bias": (X, lambda x: functional.linear(x, x.new_zeros(60, 128))),
    "bilinear": (X, lambda x: functional.bilinear(x, x, x.new_zeros(5, 128, 128))),
    "matmul": (X, lambda x: x @ x.transpose(1, 2)),
    "einsum": (X, lambda x: torch.einsum("bik,bjk->bij", x, x)),
    "cross_entropy": (SQUARE, lambda x: functional.cross_entropy(x, _positions(x, 512))),
    "cross_entropy, smoothed": (
        SQUARE,
        lambda x: functional.cross_entropy(x, _positions(x, 512), label_smoothing=0.1),
    ),
    "nll_loss": (SQUARE, lambda x: functional.nll_loss(x, _positions(x, 512))),
    "mse_loss": (SQUARE, lambda x: functional.mse_loss(x, torch.zeros_like(x))),
    "binary_cross_entropy": (
        SQUARE,
        lambda x: functional.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
    ),
    "kl_div": (SQUARE, lambda x: functional.kl_div(x, torch.zeros_like(x), reduction="batchmean")),
    "smooth_l1_loss": (SQUARE, lambda x: functional.smooth_l1_loss(x, torch.zeros_like(x))),
    "cosine_similarity": (SQUARE, lambda x: functional.cosine_similarity(x, torch.zeros_like(x))),
    "embedding": (SQUARE, lambda x: functional.embedding(_positions(x, 4000), x)),
    "embedding_bag": (SQUARE, lambda x: functional.embedding_bag(_positions(x, 4000).view(40, 100), x)),
    "index_select": (SQUARE, lambda x: x.index_select(0, _positions(x, 300))),
    "gather": (SQUARE, lambda x: x.gather(1, _positions(x, 512)[:, None])),
    "scatter_add": (SQUARE, lambda x: x.scatter_add(0, _positions(x, 512)[None], x[:1])),
    "index_add": (SQUARE, lambda x: x.index_add(0, _positions(x, 512), x)),
    "take_along_dim": (SQUARE, lambda x: torch.take_along_dim(x, _positions(x, 512)[:, None], 1)),
    "masked_fill": (SQUARE, lambda x: x.masked_fill(x.new_zeros(512, dtype=torch.bool), 1.0)),
    "where": (SQUARE, lambda x: torch.where(x.new_zeros(512, dtype=torch.bool), x, 0.0)),
    "topk": (SQUARE, lambda x: x.topk(8).values),
    "sort": (SQUARE, lambda x: x.sort().values),
    "cumsum": (SQUARE, lambda x: x.cumsum(-1)),
    "cumprod": (SQUARE, lambda x: x.cumprod(-1)),
    "sum": (SQUARE, torch.sum),
    "sum of rows": (SQUARE, lambda x: x.sum(0)),
    "mean": (SQUARE, lambda x: x.mean(-1)),
    "var": (SQUARE, lambda x: x.var(-1)),
    "amax": (SQUARE, lambda x: x.amax(-1)),
    "max": (SQUARE, lambda x: x.max(0).values),
    "norm": (SQUARE, torch.linalg.vector_norm),
    "prod": (SQUARE, lambda x: x.prod(-1)),
    "cat": (X, lambda x: torch.cat((x, x), 1)),
    "stack": (X, lambda x: torch.stack((x, x))),
    "split": (X, lambda x: x.split(32, -1)[1]),
    "repeat": (X, lambda x: x.repeat(1, 2, 1)),
    "repeat_interleave": (X, lambda x: x.repeat_interleave(3, 1)),
    "roll": (X, lambda x: x.roll(3, 1)),
    "flip": (X, lambda x: x.flip(1)),
    "pad": (X, lambda x: functional.pad(x, (1, 2))),
    "tril": (SQUARE, torch.tril),
    "clamp": (X, lambda x: x.clamp(-1, 1)),
    "pow": (X, lambda x: x.pow(3)),
    "add a scalar": (X, lambda x: x + 1),
    "multiply": (X, lambda x: x * x),
    "divide": (X, lambda x: x / (x + 1)),
    "cast": (X, lambda x: x.to(torch.float16)),
    "contiguous": (X, lambda x: x.transpose(0, 1).contiguous()),
    "attention": (IMAGES, lambda x: functional.scaled_dot_product_attention(x, x, x)),
    "causal attention": (IMAGES, lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True)),
    "checkpoint": (X, lambda x: torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False)),
}
FORMS = ({}, {"foreach": True}, {"fused": True})
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "ASGD", "Adadelta", "Rprop")
OPTIMIZERS += ("Muon", "Adafactor")


def _positions(x, count: int):
    return torch.zeros(count, dtype=torch.int64, device=x.device)


def recorded(run: Callable) -> list[int] | str:
    """Return the requests to the allocator during `run()`; if `run` fails, return the type of the error.

    A request is the bytes of an allocation, or ~n if block n is freed, see `kernel_cases.events`.
    """
    torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
    results = []
    try:
        results.append(run())
        entries = torch.cuda.memory._snapshot()["device_traces"][0]
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return type(error).__name__
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return kernel_cases.events(
        (entry["addr"], entry["size"] if entry["action"] == "alloc" else -entry["size"])
        for entry in entries
        if entry["action"] in ("alloc", "free_completed")
    )


def stepped(kind: str, form: dict) -> list[int] | str:
    """Return the requests to the allocator during two steps of one of torch's optimizers.

    A request is the bytes of an allocation, or ~n if block n is freed. If the optimizer cannot be created or fails,
    return the type of the error.

    Args:
        kind: name of the optimizer's class.
        form: its options, e.g. {"foreach": True}.
    """
    weights = [torch.zeros(size, size, device="cuda", requires_grad=True) for size in (16, 64, 300)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    try:
        optimizer = getattr(torch.optim, kind)(weights, **form)
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        return type(error).__name__
    return recorded(lambda: [optimizer.step() for _ in range(2)])


def requests() -> dict[str, list[int] | str]:
    """Return {name of a case: list of its requests to the allocator} in a rehearsal.

    A request is the bytes of an allocation, or ~n if block n is freed, see `kernel_cases.events`. If a case fails, its
    value is the type of the error. For a call of attention, the value is the letter of the kernel that torch selects,
    see `attention_cases.LETTERS`.
    """
    kernel_cases.place = "cuda"
    kernel_cases.warmed_up()
    found = {}
    capability = torch.cuda.get_device_capability()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for name, (shape, function) in OPERATIONS.items():
            x = torch.ones(shape, dtype=dtype, device="cuda", requires_grad=True)

            def both_ways(function=function, x=x):
                result = function(x)
                result.backward(torch.ones_like(result))

            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = recorded(both_ways)
    for kind in OPTIMIZERS:
        for form in FORMS:
            found[f"{kind} {form}"] = stepped(kind, form)
    for name, make in (kernel_cases.RUNS | kernel_cases.SINCE_2_14 | kernel_cases.DRAWN).items():
        if capability >= (8, 0) or ("flash" not in name and "bf16" not in name):
            with torch.no_grad():
                try:
                    run = make()
                except RuntimeError as error:
                    found[f"kernel case: {name}"] = type(error).__name__
                    continue
                found[f"kernel case: {name}"] = recorded(run)
    for number, call in enumerate(attention_cases.calls()):
        found[f"attention {number}: {call}"] = attention_cases.chosen(call)
    return found


def ask(capability: str) -> None:
    """Rehearse a GPU of a compute capability, e.g. "9.0", and print the result of `requests` there as JSON."""
    folder = str(HERE)

    def work(_):  # runs in the process of the rehearsal
        import sys

        sys.path.append(folder)
        import compare_torch

        return compare_torch.requests()

    major, minor = map(int, capability.split("."))
    with Rehearsal(card(None, (major, minor), "40GB")) as stage:
        run = Lab("gpu", executor=stage).run(work, measure="none")
    if not run.ok:
        raise SystemExit(f"{capability}: {run.status}, {run.message}")
    print(json.dumps({"torch": torch.__version__, "requests": run.value}))


def answered(python: str, capability: str) -> dict:
    done = subprocess.run([python, __file__, ASK, capability], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def differences(old: dict, new: dict) -> dict[str, tuple]:
    """Return {name: (requests of the old release, requests of the new release)} of the cases in which they differ.

    The requests are None if a release has no such case.

    `old`, `new`: {name of a case: its requests to the allocator} under each release.
    """
    names = [*old, *(name for name in new if name not in old)]
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", required=True, help="Python with the CUDA build of the newest release that is known")
    parser.add_argument("--new", required=True, help="Python with the CUDA build of the release to be compared")
    parser.add_argument("--capabilities", nargs="+", default=CAPABILITIES, help="default: %(default)s")
    options = parser.parse_args()
    seen: dict[tuple, list[str]] = {}
    count = 0
    for capability in options.capabilities:
        old, new = (answered(python, capability) for python in (options.old, options.new))
        count += len(new["requests"])
        for name, pair in differences(old["requests"], new["requests"]).items():
            seen.setdefault((name, *map(str, pair)), []).append(capability)
    for (name, before, after), where in seen.items():
        print(f"{name} ({', '.join(where)})\n  {before}\n  {after}")
    names = len({name for name, *_ in seen})
    print(f"torch {old['torch']} and {new['torch']}: {names} of {count // len(options.capabilities)} cases differ")
    return int(bool(seen))


if __name__ == "__main__":
    if ASK in sys.argv:
        ask(sys.argv[-1])
    else:
        sys.exit(main())
