"""Compare the estimate with other tools: error, time and memory of each on trainings that are measured here.

    python benchmarks/measure_estimate.py

Each tool predicts in its own process, with the libraries imported. DeepSpeed takes part if it is installed (see
CONTRIBUTING.md). The measured memory is the lab's count of bytes on a CPU. It is compared with those parts of a tool's
GPU figure that a CPU has too: weights, gradients, optimizer states and activations.
"""

import importlib.util
import sys

import tools
from runner import Measurement

from perf_helpers import Lab
from trainmem.core.task import Task
from trainmem.estimate import estimate

_VIT = {"num_hidden_layers": 4, "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
_LLAMA = {"vocab_size": 4000, "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 688}
_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "float32"}
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
LARGE = {
    "bert-large": Task("bert-large", seq_len=512),
    "llama-3-8b": Task("llama-3-8b", seq_len=512, config={"dtype": "float32"}),
}


NAMES = ["this estimate", *tools.TOOLS]
LARGE_BATCH = {"per_device_train_batch_size": 4}


def ask(lab: Lab, name: str, task: Task, arguments: dict) -> dict:
    """Return a tool's answer for a training, as `tools.query` does: bytes, seconds and memory, or why it has none.

    `name`: the tool, or "this estimate"; `arguments`: the training arguments.
    """
    if name == "this estimate":
        return tools.estimated(lambda: estimate(task, device="cpu", **arguments))
    if name == "DeepSpeed" and not importlib.util.find_spec("deepspeed"):
        return {"refused": "not installed"}
    return tools.query(lab, tools.TOOLS[name], task, arguments)


def cases(options) -> dict:
    """Return {name: (model, recipe)} of the trainings. The recipe of a large model is None, because only the time and
    memory that its estimate takes are measured.

    `options`: the script's command-line options.
    """
    trainings = {f"{task}, {recipe}": (task, recipe) for task in TASKS for recipe in RECIPES}
    return trainings | {name: (name, None) for name in LARGE}


def measure(cases, options):
    lab = Lab("cpu", out="build/measure_estimate")
    estimate(Task("bert-tiny"), device="cpu")  # import the libraries before timing
    for name, (model, recipe) in cases.items():
        if recipe is None:
            replies = {tool: ask(lab, tool, LARGE[model], LARGE_BATCH) for tool in NAMES[:2]}
            again = ask(lab, NAMES[0], LARGE[model], LARGE_BATCH | {"gradient_checkpointing": True})
            replies["this estimate, a second recipe"] = {part: again[part] for part in ("seconds", "own_bytes")}
            yield name, {f"{model}, {tool}": answer for tool, answer in replies.items()}
        else:
            arguments = {"per_device_train_batch_size": 8} | RECIPES[recipe]
            peak = lab.train(name, task=TASKS[model], measure="memory", **arguments).peak_bytes
            replies = {tool: ask(lab, tool, TASKS[model], arguments) for tool in NAMES}
            yield name, {"task": model, "recipe": recipe, "measured_bytes": peak} | replies


def conclude(rows: list[dict], options) -> dict:
    pairs = [row for row in rows if "recipe" in row]
    measured = [row["measured_bytes"] for row in pairs]
    cannot = {name: about["cannot"] for name, about in tools.ABOUT["cpu"].items()}
    table = [tools.row(name, [row[name] for row in pairs], measured, cannot[name]) for name in NAMES]
    return {
        "what": f"{len(pairs)} trainings: {len(TASKS)} models, {len(RECIPES)} recipes; counted bytes on a CPU",
        "table": [row for row in table if row["answered"]],
        "large": {name: replies for row in rows if "recipe" not in row for name, replies in row.items()},
        "pairs": pairs,
    }


ESTIMATE = Measurement(__doc__, "estimate.json", cases, measure, conclude, rows="", line=lambda row: ", ".join(row))

if __name__ == "__main__":
    sys.exit(ESTIMATE.main())
