"""The estimate for CUDA beside other tools, on the trainings of results/cuda.json: what torch's allocator said in their
rehearsal is the truth.

    .venv/bin/python benchmarks/measure_cuda_tools.py --tools-python PYTHON ... [--out results/cuda_tools.json]

PYTHON: interpreters with tools of PyPI (CONTRIBUTING.md says which); those that one has take part. Each tool answers in
a process of its own, the libraries imported. Two figures are held against the truth: what tensors take, against the
most that was allocated; and all that a tool tells, with what it adds for the context, fragmentation and safety, against
the most that was reserved.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import tempfile
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path

import cloudpickle
import measuring
import tools
import tools_pypi
from measure_cuda import MEMORY, Training
from measuring import RESULTS

from perf_helpers.estimate import estimate
from perf_helpers.lab import Lab, hardware
from perf_helpers.rehearsal import Rehearsal, card

cloudpickle.register_pickle_by_value(tools)  # a clean process does not know this folder

CARDS = {(7, 5): "T4", (8, 0): "A100", (8, 6): "RTX 3090", (9, 0): "H100"}
DECODERS = {
    "GPT-2",
    "GPT-NeoX",
    "OPT",
    "BLOOM",
    "Falcon",
    "Phi",
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Gemma",
    "Gemma 2",
}
DECODERS |= {"Granite", "StableLM", "OLMo 2"}
SIZES = {"width": "hidden_size", "depth": "num_hidden_layers", "heads": "num_attention_heads"}
STATES = "weights, gradients and optimizer states"
CLAIMS = {  # what its figure is of, by its documentation; what it cannot express
    "this estimate": ("what torch's allocator hands out and reserves, by category", tools.CANNOT["this estimate"]),
    "MemTracker": (
        "tensors of a loop, by category; here on fake tensors of a rehearsed card",
        "the Trainer (GradScaler, DDP); optimizers that read values; workspaces; what is reserved",
    ),
    "accelerate": (f"{STATES} of Adam", tools.CANNOT["accelerate"]),
    "18 B/parameter": (f"{STATES} of mixed-precision AdamW", tools.CANNOT["18 B/parameter"]),
    "DeepSpeed, ZeRO stage 2": (f"{STATES} of mixed-precision Adam", tools.CANNOT["18 B/parameter"]),
    "DeepSpeed, ZeRO stage 3": (f"{STATES} of mixed-precision Adam", tools.CANNOT["18 B/parameter"]),
    "vramcalc": (
        "torch's allocated memory, dense decoders",
        "all but Llama, Mistral, Qwen2, Gemma 1 and 2; optimizers but AdamW and SGD; reentrant checkpoints; reserved",
    ),
    "fitcheck-llm": (
        "peak memory on the card, decoders like Llama",
        "mixtures of experts, encoders, images; weights in fp32 under autocast; optimizers but AdamW, 8-bit Adam, SGD",
    ),
    "canifinetune": (
        "torch's peak reserved memory, decoders",
        "images; weights in fp32 under autocast; optimizers but AdamW, 8-bit AdamW, SGD",
    ),
    "llm-analysis": ("memory of a GPU, transformers", "images; models newer than transformers 4.31; dropout's kinds"),
    "fitscout": (
        "peak memory on the card, decoders",
        "images; attention's kind; accumulation; optimizers but AdamW and 8-bit AdamW",
    ),
    "ftuneai": ("memory on the card, decoders", "images; precision; optimizers but Adam, 8-bit Adam, SGD, Adafactor"),
    "llmcalculator": (
        "memory on the card, decoders",
        "images; any optimizer but Adam with fp32 master weights; attention",
    ),
    "torch-kitsune": (
        "peak memory of any module",
        "checkpointing, attention, mixed precision, loss; optimizers but Adam, SGD, Adagrad, RMSprop",
    ),
    "ml-memguard": ("peak memory, decoders", "images; optimizers but Adam, SGD, Adafactor, Lion"),
    "gpu-estimator": ("memory on the card, from the number of parameters", "attention; optimizers but Adam and SGD"),
    "qmemcalc": ("memory on the card, from width and depth", "attention; 8-bit optimizers; images"),
    "trainkit-vp": (
        "memory on the card, from width and depth",
        "attention, vocabulary; any optimizer but Adam; images",
    ),
    "memscale": (
        "memory on the card, from the number of parameters",
        "checkpointing; optimizers but Adam and SGD; images",
    ),
    "alloc": ("memory on the card, from the number of parameters", "checkpointing; attention; paged optimizers' place"),
    "vram-check": (
        "memory on the card, from the number of parameters",
        "length; checkpointing; optimizers but Adam, SGD",
    ),
    "hf-vram-calc": ("memory on the card, from the number of parameters", "batch, length, checkpointing; only Adam"),
}
NOT_RUN = {  # looked at, and why they take no part
    "blink-gpu 0.2.0, cfit 0.1.0.post1, llm-mem-planner 0.2.2, hf-mem, gpu-fit-llm, fitgpu": "inference only",
    "torchinfo 1.8.0": "sizes of a forward pass's outputs, no optimizer; not told as a GPU's memory",
    "tinyforge 0.1.2": "its own GPT and LoRA only",
    "deepview-predict, batch-finder, batch-probe, pytorch-memlab, stormlog": "measure on a GPU",
    "xMem, VeritasEst, DNNMem": "published, not on PyPI: the names there are other projects",
}


def question(one: Training, folder: Path) -> dict:
    """A training as `tools_pypi` asks for it; its config.json goes to a folder."""
    task, arguments = one.task(folder), one.arguments
    weights = arguments.get("dtype")
    model, config = task.build_model(device="meta"), task.build_config()
    config.architectures = [type(model).__name__]
    fields = json.loads(config.to_json_string(use_diff=False))
    fields |= dict.fromkeys(("dtype", "torch_dtype"), weights or "float32")
    place = folder / f"model-{one.number}"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(fields))
    half = {"fp16": "fp16", "bf16": "bf16"} | {"float16": "fp16", "bfloat16": "bf16"}
    computed = next((half[name] for name in (*arguments, weights) if name in half), "fp32")
    own = [sum(weight.numel() for weight in module.parameters(recurse=False)) for module in model.modules()]
    asked = tools_pypi.Question(
        folder=str(place),
        fields=fields,
        parameters=sum(weight.numel() for weight in model.parameters()),
        largest_layer=max(own),
        **{name: getattr(config, ours, None) for name, ours in SIZES.items()},
        tokens=one.seq_len,
        size=arguments["per_device_train_batch_size"],
        precision=computed,
        mixed=weights is None and computed != "fp32",
        optimizer=arguments["optim"],
        checkpointing=arguments.get("gradient_checkpointing", False),
        eager=arguments.get("attn_implementation") == "eager",
        card=CARDS[one.capability],
    )
    return dataclasses.asdict(asked)


def ours(one: Training, folder: Path) -> dict:
    """What the estimate says."""
    options = {"device": "cuda", "compute_capability": one.capability, "processes": one.processes}
    try:
        found = estimate(one.task(folder), **options, **one.arguments)
    except ValueError as error:
        return {"refused": str(error)[:200]}
    said = {"bytes": found.peak_bytes, "total_bytes": found.memory.reserved_bytes, "seconds": found.seconds}
    return said | {"own_bytes": found.own_bytes}


def tracked(trainings: list[Training], folder: Path) -> list[dict]:
    """What MemTracker says, on fake tensors of a rehearsed card of each compute capability."""
    found, kinds = {}, defaultdict(list)
    for one in trainings:
        kinds[one.capability].append(one)
    for capability, those in kinds.items():
        with Rehearsal(card(None, capability, MEMORY)) as stage:
            lab = Lab("gpu", executor=stage, out=folder / "lab")
            for one in those:
                found[one.number] = tools.asked(lab, tools.mem_tracker, one.task(folder), one.arguments, "cuda")
    return [found[one.number] for one in trainings]


def of_pypi(pythons: list[str], trainings: list[Training], folder: Path) -> dict[str, dict]:
    """What the tools say that each of these interpreters has: {tool: its version, what it said of each training}."""
    path, found = folder / "questions.json", {}
    path.write_text(json.dumps([question(one, folder) for one in trainings]))
    for tool in tools_pypi.TOOLS:
        for python in pythons:
            command = [python, tools_pypi.__file__, tool, path]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode not in (0, tools_pypi.ABSENT):
                raise RuntimeError(f"{tool}: {run.stderr[-2000:]}")
            if not run.returncode:
                found[tool] = json.loads(run.stdout)
    return found


def row(name: str, version: str, said: list[dict], rows: list[dict]) -> dict:
    """One tool over all trainings: `tools.row`; its error on dense decoders alone, which is all that many claim; and
    all that it tells against what was reserved.
    """
    claims, cannot = CLAIMS[name]
    truth = {what: [one["rehearsed"][what] for one in rows] for what in ("allocated", "reserved")}
    kept = tools.row(name, said, truth["allocated"], cannot) | {"version": version, "claims": claims}
    decoders = [n for n, one in enumerate(rows) if one["architecture"] in DECODERS]
    wrong = tools.errors([said[n] for n in decoders], [truth["allocated"][n] for n in decoders])
    in_all = tools.errors(said, truth["reserved"], "total_bytes")
    kept |= {"median_error_decoders": statistics.median(wrong) if wrong else None, "answered_decoders": len(wrong)}
    kept |= {"median_error_reserved": statistics.median(in_all) if in_all else None}
    kept |= {"worst_error_reserved": max(in_all, default=None)}
    return kept | {"refused": Counter(one["refused"] for one in said if "refused" in one).most_common(4)}


def answers(trainings: list[Training], pythons: list[str]) -> dict[str, tuple[str, list[dict]]]:
    """{tool: its version, what it says of each training}."""
    versions, said = hardware.versions(), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours(trainings[0], folder)  # the libraries are imported once
        said["this estimate"] = versions["torch"], [ours(one, folder) for one in trainings]
        said["MemTracker"] = versions["torch"], tracked(trainings, folder)
        lab = Lab("cpu", out=folder / "lab")
        tasks = [(one.task(folder), one.arguments) for one in trainings]
        for tool, version in (("accelerate", versions["accelerate"]), ("18 B/parameter", "")):
            said[tool] = version, [tools.asked(lab, tools.TOOLS[tool], *task) for task in tasks]
        for tool, found in of_pypi(pythons, trainings, folder).items():
            said[tool] = found["version"], found["said"]
    return said


def conclude(rows: list[dict], said: dict[str, tuple[str, list[dict]]]) -> dict:
    """The report: `rows` of measure_cuda.py that were rehearsed, and what each tool says of each."""
    pairs = []
    for n, one in enumerate(rows):
        kept = {"number": one["number"]} | {what: one["rehearsed"][what] for what in ("allocated", "reserved")}
        pairs.append(kept | {tool: found[n].get("bytes") for tool, (_, found) in said.items()})
    return {
        "what": f"{len(rows)} trainings, {len({one['architecture'] for one in rows})} architectures; "
        "bytes by torch's own allocator in a rehearsal, from the first forward on",
        "machine": hardware.describe().name,
        "versions": hardware.versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "table": [row(tool, version, found, rows) for tool, (version, found) in said.items()],
        "not_run": NOT_RUN,
        "pairs": pairs,
    }


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, default=RESULTS / "cuda.json", help="by benchmarks/measure_cuda.py")
    parser.add_argument(
        "--tools-python", nargs="*", default=[], metavar="PYTHON", help="interpreters with tools of PyPI"
    )
    parser.add_argument("--count", type=int, help="trainings that are asked, from the first on; else all")
    parser.add_argument("--note", default="", help="what a reader should know of this record, e.g. of the seconds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    rows = [one for one in json.loads(options.truth.read_text(encoding="utf-8"))["rows"] if "rehearsed" in one]
    rows = rows[: options.count]
    names = [field.name for field in dataclasses.fields(Training)]
    trainings = [Training(**{name: one[name] for name in names}) for one in rows]
    trainings = [dataclasses.replace(one, capability=tuple(one.capability)) for one in trainings]
    report = conclude(rows, answers(trainings, options.tools_python)) | {"note": options.note}
    measuring.keep(report, options.out, leave_out=("versions", "date", "pairs"))


if __name__ == "__main__":
    main()
