"""Compare the estimate for adapters and quantized bases with measurements, over generated trainings.

Quantized bases have 8 or 4 bits. On a CPU, the reference is the lab's count by category. For CUDA, it is torch's
allocator in rehearsals.

    python benchmarks/measure_adapters.py [--count 112] [--seed 1]

Another seed gives other trainings. A training that cannot run is left out: its model refuses the method, or needs the
values of tensors, which a rehearsal does not compute. Rehearsals therefore also assume that no activation exceeds
LLM.int8's threshold.
"""

import random
import sys
import tempfile
from pathlib import Path

import cloudpickle
import measure_cuda
from architectures import ARCHITECTURES, CAPABILITIES, configuration
from measure_cuda import CHECKPOINTS, PRECISIONS, Training
from runner import Measurement, rehearsing

from perf_helpers.lab import Lab
from trainmem.core import optional_packages
from trainmem.estimate import estimate
from trainmem.rehearsal import card

EVERY = {"target_modules": "all-linear"}
METHODS = (
    {"r": 8},
    {"r": 16, "lora_dropout": 0.1} | EVERY,
    {"r": 8, "use_rslora": True, "bias": "all"} | EVERY,
    {"r": 8, "use_dora": True} | EVERY,
    {"peft_type": "VERA", "r": 16} | EVERY,
    {"peft_type": "LOHA"} | EVERY,
    {"peft_type": "LOKR"} | EVERY,
    {"peft_type": "OFT"} | EVERY,
    {"peft_type": "ADALORA", "total_step": 100} | EVERY,
    {"peft_type": "IA3"},
    {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 7},
)
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
BASES = (
    {},
    {},
    {"load_in_4bit": True},
    {"quantization_config": NF4},
    {"quantization_config": NF4 | {"bnb_4bit_compute_dtype": "bfloat16"}, "dtype": "bfloat16"},
    {"load_in_8bit": True},
    {"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 0.0}, "dtype": "float16"},
)
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "paged_adamw_8bit", "adamw_bnb_8bit", "adafactor", "sgd")


def training(number: int, seed: int, on_cpu: bool) -> Training:
    """Return training `number` of the series that `seed` generates; successive trainings rotate through architectures.

    `on_cpu`: draw sizes and precisions for a CPU.
    """
    draw = random.Random(f"adapters {seed} {number}")
    language = [name for name, given in ARCHITECTURES.items() if given.get("family") != "vision" and name != "Swin"]
    architecture = language[number % len(language)]
    config = configuration(architecture, draw)
    lengths = (16, 33, 64) if on_cpu else (64, 128, 200, 333, 512, 1024)
    arguments = {"per_device_train_batch_size": draw.choice((1, 2, 4)), "optim": draw.choice(OPTIMIZERS)}
    arguments |= draw.choice(PRECISIONS[:7] if on_cpu else PRECISIONS) | draw.choice(CHECKPOINTS)
    arguments |= {"peft": draw.choice(METHODS)} | draw.choice(BASES)
    arguments |= {"gradient_accumulation_steps": 2} if draw.random() < 0.2 else {}
    return Training(number, architecture, config, draw.choice(lengths), arguments, draw.choice(CAPABILITIES), 1)


def counted(lab: Lab, one: Training, folder: Path) -> dict:
    """Run a training on the CPU; return its record, with the lab's count in "counted" and the estimate in "estimated".

    Both are {"peak": bytes, category: bytes, ...}. If the training cannot run, "left_out" has the reason; if the
    estimate refuses the training, "estimated" is {"refused": reason}.

    `folder`: folder for the file with the model's configuration.
    """
    row, task = {"device": "cpu"} | one.to_dict(), one.task(folder)
    try:
        run = lab.train(str(one.number), task=task, measure="memory", **one.arguments)
    except ValueError as error:
        return row | {"left_out": f"refused: {str(error)[-200:]}"}
    if not run.ok:
        return row | {"left_out": f"cannot be trained: {run.message[-200:]}"}
    row["counted"] = {"peak": run.peak_bytes} | run.memory.breakdown
    try:
        found = estimate(task, device="cpu", **one.arguments).memory
    except ValueError as error:
        return row | {"estimated": {"refused": str(error)[:300]}}
    return row | {"estimated": {"peak": found.peak_bytes} | found.breakdown}


def rehearsed(lab: Lab, one: Training, folder: Path) -> dict:
    try:
        return measure_cuda.compare(lab, one, folder)
    except ValueError as error:
        return one.to_dict() | {"left_out": f"refused: {str(error)[-200:]}"}


def cases(options) -> dict[str, Training]:
    """Return {"cpu 0": training, "cuda 0": training, ...}, a CPU and a CUDA training per number.

    `options`: the script's command-line options.
    """
    kinds = {"cpu": True, "cuda": False}
    numbers = range(options.count)
    return {f"{kind} {n}": training(n, options.seed, on_cpu) for kind, on_cpu in kinds.items() for n in numbers}


def measure(cases, options):
    if reason := optional_packages.offer("peft"):
        raise SystemExit(f"measure_adapters: {reason}")
    cloudpickle.register_pickle_by_value(measure_cuda)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab = Lab("cpu", out=folder / "lab")
        for name, one in cases.items():
            if name.startswith("cpu"):
                yield name, counted(lab, one, folder)
        for capability in CAPABILITIES:
            own = {name: one for name, one in cases.items() if "cuda" in name and one.capability == capability}
            if own:
                with rehearsing(card(None, capability, measure_cuda.MEMORY)) as lab:
                    for name, one in own.items():
                        yield name, {"device": "cuda"} | rehearsed(lab, one, folder)


def conclude(rows: list[dict], options) -> dict:
    on_cpu = [row for row in rows if row["device"] == "cpu"]
    compared = [row for row in on_cpu if "counted" in row]
    equal = sum(row["counted"] == row["estimated"] for row in compared)
    summary = {
        "cpu": {"compared": len(compared), "left_out": len(on_cpu) - len(compared), "equal_in_every_category": equal},
        "cuda": measure_cuda.summary([row for row in rows if row["device"] == "cuda"]),
    }
    return {
        "what": "adapters and quantized bases: the estimate beside what is counted or rehearsed; bytes",
        "seed": options.seed,
    } | {"summary": summary}


def line(row: dict) -> str:
    outcome = row.get("left_out") or [row.get("counted", row.get("rehearsed")), row["estimated"]]
    if row["device"] == "cpu" and isinstance(outcome, list) and outcome[0] == outcome[1]:
        outcome = "equal"
    return f"{row['architecture']}, {row['arguments']}: {outcome}"


ADAPTERS = Measurement(
    __doc__,
    "adapters.json",
    cases,
    measure,
    conclude,
    {"count": 112, "seed": 1},
    name_of=lambda number, row: f"{row['device']} {row['number']}",
    line=line,
    rehearsed=True,
    packages=("peft",),
)

if __name__ == "__main__":
    sys.exit(ADAPTERS.main())
