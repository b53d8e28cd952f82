"""How good the estimate is beside other tools: error, time and memory of each on trainings that are measured here.

    python results/measure_estimate.py [--out results/estimate.json]

Each tool predicts in a process of its own, the libraries already imported. DeepSpeed takes part where it is installed
(CONTRIBUTING.md says how). Memory is counted bytes on a CPU: a figure that a tool gives for a GPU is
compared as far as it says the same, weights, gradients, optimizer states and activations.
"""

import importlib.util
import statistics
import time

import measuring

from perf_helpers import Lab, Task
from perf_helpers.estimate import estimate

_VIT = {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
_LLAMA = {"vocab_size": 4000, "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 688}
_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_T5 = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 256, "d_ff": 1024, "vocab_size": 4000}
TASKS = {
    "bert": Task("bert-small", seq_len=128),
    "gpt2": Task("gpt2", seq_len=128, config={"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8000}),
    "t5": Task("t5-small", seq_len=32, config=_T5),
    "vit": Task("vit-base", config=_VIT | {"image_size": 96}),
    "llama": Task("llama-3-8b", seq_len=128, config=_LLAMA),
    "mixtral": Task("mixtral-8x7b", seq_len=64, config=_LLAMA | {"num_local_experts": 4}),
}
RECIPES = {
    "vanilla": {},
    "checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "bf16": {"bf16": True},
    "bf16 weights": {"dtype": "bfloat16"},
    "Adafactor": {"optim": "adafactor"},
    "8-bit Adam": {"optim": "adamw_bnb_8bit"},
}
LARGE = {"bert-large": Task("bert-large", seq_len=512), "llama-3-8b": Task("llama-3-8b", seq_len=512)}
CANNOT = {
    "this estimate": "what a worker of a data loader holds; compiled code",
    "MemTracker": "the Trainer: it follows a loop that you write; what an operation allocates inside itself",
    "accelerate": "micro-batch, length, checkpointing, accumulation, attention, any optimizer but Adam; activations",
    "DeepSpeed": "the same; its figure is for weights, gradients and states of mixed-precision Adam in ZeRO stage 2",
    "18 B/parameter": "the same; a figure for mixed-precision AdamW",
}


def accelerate_estimate(task, arguments):
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    size = calculate_maximum_sizes(task.build_model(device="meta"))[0]
    if arguments.get("dtype") == "bfloat16":
        size //= 2
    return max(estimate_training_usage(size, "bfloat16" if arguments.get("bf16") else "float32").values())


def deepspeed_estimate(task, arguments):
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    return estimate_zero2_model_states_mem_needs(task.parameters(), 1, 1, cpu_offload=False)[1]


def mem_tracker(task, arguments):
    """torch's own tracker over a plain loop on fake tensors, with what of the recipe a loop can say."""
    import contextlib

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from transformers.optimization import Adafactor

    if "bnb" in arguments.get("optim", ""):
        raise NotImplementedError("bitsandbytes reads values of its states")
    size, steps = arguments.get("per_device_train_batch_size", 8), arguments.get("gradient_accumulation_steps", 1)
    kind = Adafactor if arguments.get("optim") == "adafactor" else torch.optim.AdamW
    options = {"lr": 1e-3, "relative_step": False} if kind is Adafactor else {"fused": True}
    batch = task.batch(size, "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = task.build_model(dtype=arguments.get("dtype"))
        if arguments.get("gradient_checkpointing"):
            model.gradient_checkpointing_enable()
        batch = {name: torch.empty_like(value) for name, value in batch.items()}
        optimizer, tracker = kind(model.parameters(), **options), MemTracker()
        tracker.track_external(model, optimizer, *batch.values())
        half = torch.autocast("cpu", torch.bfloat16) if arguments.get("bf16") else contextlib.nullcontext()
        with tracker:
            for _ in range(2):
                for _ in range(steps):
                    with half:
                        loss = model(**batch).loss
                    (loss / steps).backward()
                    tracker.reset_mod_stats()  # it refuses a second pass without
                optimizer.step()
                optimizer.zero_grad()
        return max(found["Total"] for found in tracker.get_tracker_snapshot("peak").values())


TOOLS = {
    "MemTracker": mem_tracker,
    "accelerate": accelerate_estimate,
    "DeepSpeed": deepspeed_estimate,
    "18 B/parameter": lambda task, arguments: 18 * task.parameters(),
}


def timed(tool, task, arguments):
    """A function for a clean process: the bytes a tool says, its seconds and its peak memory; or why it says none."""

    def work(_):
        from perf_helpers.lab import meters

        began = time.perf_counter()
        try:
            said = int(tool(task, arguments))
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}"[:200]}
        return {"bytes": said, "seconds": time.perf_counter() - began, "own_bytes": meters.peak_rss_bytes()}

    return work


def asked(lab, name, task, arguments):
    """What a tool says."""
    if name == "this estimate":
        found = estimate(task, device="cpu", **arguments)
        return {"bytes": found.peak_bytes, "seconds": found.seconds, "own_bytes": found.own_bytes}
    run = lab.run(timed(TOOLS[name], task, arguments), measure="none")
    return run.value if run.ok else {"refused": f"{run.status}: {run.message}"[:200]}


def row(name, found, measured):
    """One tool over all pairs."""
    pairs = [(said, peak) for said, peak in zip(found, measured, strict=True) if "bytes" in said]
    errors = [abs(said["bytes"] / peak - 1) for said, peak in pairs]
    return {
        "tool": name,
        "answered": len(pairs),
        "asked": len(found),
        "median_error": statistics.median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "median_seconds": statistics.median([said["seconds"] for said, _ in pairs] or [0]),
        "most_own_bytes": max((said["own_bytes"] or 0 for said, _ in pairs), default=0),
        "cannot_express": CANNOT[name],
    }


def main() -> None:
    options = measuring.options(__doc__)
    lab = Lab("cpu", out="build/measure_estimate")
    tools = ["this estimate", *(name for name in TOOLS if name != "DeepSpeed" or importlib.util.find_spec("deepspeed"))]
    pairs = [(task, recipe) for task in TASKS for recipe in RECIPES]
    estimate(Task("bert-tiny"), device="cpu")  # the libraries are imported once
    measured, found = [], {name: [] for name in tools}
    for task, recipe in pairs:
        arguments = {"per_device_train_batch_size": 8} | RECIPES[recipe]
        measured.append(lab.train(f"{task}, {recipe}", task=TASKS[task], measure="memory", **arguments).peak_bytes)
        for name in tools:
            found[name].append(asked(lab, name, TASKS[task], arguments))
    speed = {}
    for model, task in LARGE.items():
        for name in tools[:2]:
            speed[f"{model}, {name}"] = asked(lab, name, task, {"per_device_train_batch_size": 4})
        again = estimate(task, device="cpu", per_device_train_batch_size=4, gradient_checkpointing=True)
        speed[f"{model}, this estimate, a second recipe"] = {"seconds": again.seconds, "own_bytes": again.own_bytes}
    report = {
        "what": f"{len(pairs)} trainings: {len(TASKS)} models, {len(RECIPES)} recipes; counted bytes on a CPU",
        "machine": lab.machine.name,
        "versions": lab.versions,
        "date": lab.runs[-1].date,
        "table": [row(name, found[name], measured) for name in tools],
        "large": speed,
        "pairs": [
            {"task": task, "recipe": recipe, "measured_bytes": peak} | {name: found[name][n] for name in tools}
            for n, ((task, recipe), peak) in enumerate(zip(pairs, measured, strict=True))
        ],
    }
    measuring.keep(report, options.out, leave_out=("versions", "date", "pairs"))


if __name__ == "__main__":
    main()
