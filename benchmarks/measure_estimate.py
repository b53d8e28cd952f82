"""How good the estimate is beside other tools: error, time and memory of each on trainings that are measured here.

    python benchmarks/measure_estimate.py [--out results/estimate.json]

Each tool predicts in a process of its own, the libraries already imported. DeepSpeed takes part where it is installed
(CONTRIBUTING.md says how). Memory is counted bytes on a CPU: a figure that a tool gives for a GPU is
compared as far as it says the same, weights, gradients, optimizer states and activations.
"""

import importlib.util

import cloudpickle
import measuring
import tools

from perf_helpers import Lab, Task
from perf_helpers.estimate import estimate

cloudpickle.register_pickle_by_value(tools)  # a clean process does not know this folder

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


def ask(lab: Lab, name: str, task: Task, arguments: dict) -> dict:
    """What a tool says."""
    if name == "this estimate":
        found = estimate(task, device="cpu", **arguments)
        return {"bytes": found.peak_bytes, "seconds": found.seconds, "own_bytes": found.own_bytes}
    return tools.asked(lab, tools.TOOLS[name], task, arguments)


def main() -> None:
    options = measuring.options(__doc__)
    lab = Lab("cpu", out="build/measure_estimate")
    absent = set() if importlib.util.find_spec("deepspeed") else {"DeepSpeed"}
    names = ["this estimate", *(name for name in tools.TOOLS if name not in absent)]
    pairs = [(task, recipe) for task in TASKS for recipe in RECIPES]
    estimate(Task("bert-tiny"), device="cpu")  # the libraries are imported once
    measured, found = [], {name: [] for name in names}
    for task, recipe in pairs:
        arguments = {"per_device_train_batch_size": 8} | RECIPES[recipe]
        measured.append(lab.train(f"{task}, {recipe}", task=TASKS[task], measure="memory", **arguments).peak_bytes)
        for name in names:
            found[name].append(ask(lab, name, TASKS[task], arguments))
    speed = {}
    for model, task in LARGE.items():
        for name in names[:2]:
            speed[f"{model}, {name}"] = ask(lab, name, task, {"per_device_train_batch_size": 4})
        again = estimate(task, device="cpu", per_device_train_batch_size=4, gradient_checkpointing=True)
        speed[f"{model}, this estimate, a second recipe"] = {"seconds": again.seconds, "own_bytes": again.own_bytes}
    report = {
        "what": f"{len(pairs)} trainings: {len(TASKS)} models, {len(RECIPES)} recipes; counted bytes on a CPU",
        "machine": lab.machine.name,
        "versions": lab.versions,
        "date": lab.runs[-1].date,
        "table": [tools.row(name, found[name], measured, tools.CANNOT[name]) for name in names],
        "large": speed,
        "pairs": [
            {"task": task, "recipe": recipe, "measured_bytes": peak} | {name: found[name][n] for name in names}
            for n, ((task, recipe), peak) in enumerate(zip(pairs, measured, strict=True))
        ],
    }
    measuring.keep(report, options.out, leave_out=("versions", "date", "pairs"))


if __name__ == "__main__":
    main()
