"""Query other tools that predict the memory of a training, and summarize their answers.

Used by `measure_estimate.py`, `measure_cuda_tools.py` and `published_tools.py`. `tools.toml` lists each tool's claims;
`tools_pypi.py` queries tools that need an environment of their own.
"""

import contextlib
import statistics
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

ABOUT = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def accelerate_estimate(task, arguments: dict) -> int:
    """Return the answer of `accelerate estimate-memory` for a training of a task with Adam, in bytes.

    `arguments`: the training arguments.
    """
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    size = calculate_maximum_sizes(task.build_model(device="meta"))[0]
    if arguments.get("dtype") in ("bfloat16", "float16"):
        size //= 2
    half = "bfloat16" if arguments.get("bf16") else "float16" if arguments.get("fp16") else "float32"
    return max(estimate_training_usage(size, half).values())


def zero2(parameters: int) -> int:
    """Return the GPU bytes that DeepSpeed predicts for a model with `parameters` parameters: one GPU, ZeRO 2."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    return estimate_zero2_model_states_mem_needs(parameters, 1, 1, cpu_offload=False)[1]


def mem_tracker(task, arguments: dict, device: str = "cpu") -> int:
    """Run torch's MemTracker over a plain training loop on fake tensors, and return the peak in bytes.

    The loop follows those training arguments that a plain loop can follow: batch, accumulation, precision,
    checkpointing, attention and optimizer.

    `arguments`: the training arguments; `device`: "cpu" or "cuda".

    Raises:
        Exception: any error of an optimizer that reads values of its states, like those of bitsandbytes.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers import Trainer, TrainingArguments

    size, steps = arguments.get("per_device_train_batch_size", 8), arguments.get("gradient_accumulation_steps", 1)
    named = TrainingArguments(optim=arguments.get("optim", "adamw_torch_fused"), report_to="none")
    batch = task.batch(size)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = task.build_model(
            dtype=arguments.get("dtype"), device=device, attn_implementation=arguments.get("attn_implementation")
        )
        if arguments.get("gradient_checkpointing"):
            model.gradient_checkpointing_enable(arguments.get("gradient_checkpointing_kwargs"))
        batch = {name: torch.empty_like(value, device=device) for name, value in batch.items()}
        kind, options = Trainer.get_optimizer_cls_and_kwargs(named, model)
        optimizer, tracker = kind(model.parameters(), **options), MemTracker()
        tracker.track_external(model, optimizer, *batch.values())
        dtype = torch.bfloat16 if arguments.get("bf16") else torch.float16 if arguments.get("fp16") else None
        with tracker:
            for _ in range(2):
                for _ in range(steps):
                    with torch.autocast(device, dtype) if dtype else contextlib.nullcontext():
                        loss = model(**batch).loss
                    (loss / steps).backward()
                    tracker.reset_mod_stats()  # required before a second pass
                optimizer.step()
                optimizer.zero_grad()
        return max(found["Total"] for found in tracker.get_tracker_snapshot("peak").values())


TOOLS: dict[str, Callable] = {
    "MemTracker": mem_tracker,
    "accelerate": accelerate_estimate,
    "DeepSpeed": lambda task, arguments: zero2(task.parameters()),
    "18 B/parameter": lambda task, arguments: 18 * task.parameters(),
}


def query(lab, tool: Callable, *arguments) -> dict:
    """Query a tool in a fresh subprocess; return its answer.

    The keys are "bytes" (the predicted memory), "seconds" (the time that it took) and "own_bytes" (the tool's own peak
    memory), or only "refused", with the reason, if the tool has no answer.

    Args:
        lab: runs the subprocess.
        tool: function of `arguments` that returns bytes.
    """

    def work(_):
        from trainmem.measure import memory_meter

        start = time.perf_counter()
        try:
            reply = int(tool(*arguments))
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
        return {"bytes": reply, "seconds": time.perf_counter() - start, "own_bytes": memory_meter.peak_rss_bytes()}

    run = lab.run(work, measure="none")
    return run.value if run.ok else {"refused": f"{run.status}: {run.message}"[:200]}


def estimated(ask: Callable) -> dict:
    """Return this project's estimate in the form of a tool's answer, see `query`, or {"refused": reason}.

    "bytes" has the estimated allocated bytes, "total_bytes" the reserved ones. `ask`: function that returns the
    `MemoryEstimate`.
    """
    try:
        found = ask()
    except ValueError as error:
        return {"refused": str(error)[:200]}
    reply = {"bytes": found.peak_bytes, "total_bytes": found.memory.reserved_bytes, "seconds": found.seconds}
    return reply | {"own_bytes": found.own_bytes}


def errors(found: list[dict], measured: list[int | None], name: str = "bytes") -> list[float]:
    """Return |answer / measured - 1| of each training that was measured and has an answer.

    Args:
        found: the answer for each training, as `query` returns it.
        measured: bytes of each training; None: not measured.
        name: the field of an answer to compare, e.g. "total_bytes".
    """
    return [abs(reply[name] / peak - 1) for reply, peak in zip(found, measured, strict=True) if peak and name in reply]


def row(name: str, found: list[dict], measured: list[int], cannot: str) -> dict:
    """Return the table row of one tool over all trainings.

    Its keys are "tool" and "cannot_express" (as given), "asked" and "answered" (numbers of trainings), "median_error"
    and "worst_error" (see `errors`), "median_seconds" (of an answer), and "most_own_bytes": the most memory that the
    tool itself needed for an answer.

    Args:
        name: the tool's name.
        found: the tool's answer for each training, as `query` returns it.
        measured: the bytes of each training.
        cannot: the settings that the tool cannot express, in words.
    """
    wrong, answers = errors(found, measured), [reply for reply in found if "bytes" in reply]
    return {
        "tool": name,
        "answered": len(answers),
        "asked": len(found),
        "median_error": statistics.median(wrong) if wrong else None,
        "worst_error": max(wrong, default=None),
        "median_seconds": statistics.median([reply["seconds"] for reply in answers] or [0]),
        "most_own_bytes": max((reply["own_bytes"] or 0 for reply in answers), default=0),
        "cannot_express": cannot,
    }
