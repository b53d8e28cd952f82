"""Compare the estimate for CUDA with other tools; the reference is torch's allocator in rehearsals.

    .venv/bin/python benchmarks/measure_cuda_tools.py --pythons PYTHON ... [--count 110] [--note TEXT]

The trainings are those of results/cuda.json. PYTHON: interpreters with tools from PyPI (listed in CONTRIBUTING.md);
tools that no interpreter has are skipped. The note is a remark for readers of the record. Each tool answers in its own
process, with the libraries imported. Two figures are compared with the reference: a tool's bytes of tensors with the
peak of allocated bytes, and its total with the peak of reserved bytes. The total includes the tool's additions for
context, fragmentation and safety.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import tools
import tools_pypi
from measure_cuda import MEMORY, Training
from runner import RESULTS, Measurement, read_record, rehearsing

from perf_helpers.lab import Lab
from trainmem.core import hardware
from trainmem.rehearsal import card

CARDS = {(7, 5): "T4", (8, 0): "A100", (8, 6): "RTX 3090", (9, 0): "H100"}
SIZES = {"width": "hidden_size", "depth": "num_hidden_layers", "heads": "num_attention_heads"}


def question(one: Training, folder: Path) -> dict:
    """Return a training as a dict with the fields of `tools_pypi.Question`; write its config.json into a folder."""
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
    count = sum(weight.numel() for weight in model.parameters())
    own = [sum(weight.numel() for weight in module.parameters(recurse=False)) for module in model.modules()]
    query = tools_pypi.Question(
        folder=str(place),
        fields=fields,
        parameters=count,
        trained=count,
        largest_layer=max(own),
        **{name: getattr(config, attribute, None) for name, attribute in SIZES.items()},
        tokens=one.seq_len,
        size=arguments["per_device_train_batch_size"],
        precision=computed,
        mixed=weights is None and computed != "fp32",
        optimizer=arguments["optim"],
        checkpointing=arguments.get("gradient_checkpointing", False),
        flash=arguments.get("attn_implementation") != "eager",
        card=CARDS[one.capability],
    )
    return dataclasses.asdict(query)


def tracked(trainings: list[Training], folder: Path) -> list[dict]:
    """Return MemTracker's answer for each training: {"bytes", "seconds", "own_bytes"} or {"refused": reason}.

    `tools.query` explains the keys. MemTracker uses fake tensors on a rehearsed card with the training's compute
    capability.

    `folder`: folder for the files with configurations.
    """
    found = {}
    for capability in CARDS:
        with rehearsing(card(None, capability, MEMORY)) as lab:
            for one in (one for one in trainings if one.capability == capability):
                found[one.number] = tools.query(lab, tools.mem_tracker, one.task(folder), one.arguments, "cuda")
    return [found[one.number] for one in trainings]


def of_pypi(tool: str, pythons: list[str], path: Path) -> dict | None:
    """Query a PyPI tool in the first interpreter that has it; return None if none has it.

    The keys of the result are "version" (the tool's) and "said" (its answers, a list in the order of the questions; see
    `tools_pypi.answer`).

    Args:
        tool: name of the tool.
        pythons: paths of the interpreters.
        path: file with the questions.

    Raises:
        RuntimeError: the tool's process failed.
    """
    for python in pythons:
        run = subprocess.run([python, tools_pypi.__file__, tool, path], capture_output=True, text=True)
        if run.returncode not in (0, tools_pypi.ABSENT):
            raise RuntimeError(f"{tool}: {run.stderr[-2000:]}")
        if not run.returncode:
            return json.loads(run.stdout)
    return None


def row(name: str, version: str, replies: list[dict], rows: list[dict]) -> dict:
    """Return one tool's row of the table: its errors over all trainings.

    It has the fields of `tools.row`, whose errors compare the tool's bytes with allocated bytes. It also has the error
    on dense decoders only ("..._decoders"), because many tools claim to support only these, and the error of the tool's
    total compared with reserved bytes ("..._reserved").

    Args:
        name, version: name and version of the tool.
        replies: the tool's answer for each training.
        rows: the trainings, in the same order, with their rehearsed bytes.
    """
    claims, cannot = (tools.ABOUT["cuda"][name][what] for what in ("claims", "cannot"))
    reference = {what: [one["rehearsed"][what] for one in rows] for what in ("allocated", "reserved")}
    summary = tools.row(name, replies, reference["allocated"], cannot) | {"version": version, "claims": claims}
    decoders = [n for n, one in enumerate(rows) if one["architecture"] in tools.ABOUT["dense_decoders"]]
    wrong = tools.errors([replies[n] for n in decoders], [reference["allocated"][n] for n in decoders])
    in_all = tools.errors(replies, reference["reserved"], "total_bytes")
    summary |= {"median_error_decoders": statistics.median(wrong) if wrong else None, "answered_decoders": len(wrong)}
    summary |= {"median_error_reserved": statistics.median(in_all) if in_all else None}
    summary |= {"worst_error_reserved": max(in_all, default=None)}
    return summary | {"refused": Counter(one["refused"] for one in replies if "refused" in one).most_common(4)}


def rows_of(options) -> list[dict]:
    """Return the rows of results/cuda.json of the requested trainings, which measure_cuda.py has rehearsed.

    `options`: the script's options.
    """
    rows = [one for one in read_record(RESULTS / "cuda.json")["rows"] if "rehearsed" in one]
    return rows[: options.count or None]


def measure(cases, options):
    """Yield (tool, row) per tool; a row has "tool", "version" and "said", the tool's answers in the trainings' order.

    `cases`: the tools to query, by name; `options`: the script's command-line options.
    """
    versions, trainings = hardware.versions(), [Training.from_dict(one) for one in rows_of(options)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab, path = Lab("cpu", out=folder / "lab"), folder / "questions.json"
        path.write_text(json.dumps([question(one, folder) for one in trainings]))
        trainings[0].estimated(folder)  # import the libraries before timing
        for tool in cases:
            if tool in tools_pypi.TOOLS:
                if found := of_pypi(tool, options.pythons, path):
                    yield tool, {"tool": tool} | found
                continue
            if tool == "this estimate":
                replies = [tools.estimated(lambda one=one: one.estimated(folder)) for one in trainings]
            elif tool == "MemTracker":
                replies = tracked(trainings, folder)
            else:
                replies = [tools.query(lab, tools.TOOLS[tool], one.task(folder), one.arguments) for one in trainings]
            version = {"accelerate": versions["accelerate"], "18 B/parameter": ""}.get(tool, versions["torch"])
            yield tool, {"tool": tool, "version": version, "said": replies}


def conclude(answers: list[dict], options) -> dict:
    """Return the summary for the record: "table" has one row per tool, "pairs" one row per training.

    A row of "pairs" has the rehearsed bytes of the training and {tool: bytes that it predicts}.

    `answers`: the rows that `measure` yielded; `options`: the script's command-line options.
    """
    rows, pairs = rows_of(options), []
    for n, one in enumerate(rows):
        pair = {"number": one["number"]} | {what: one["rehearsed"][what] for what in ("allocated", "reserved")}
        pairs.append(pair | {found["tool"]: found["said"][n].get("bytes") for found in answers})
    return {
        "what": f"{len(rows)} trainings, {len({one['architecture'] for one in rows})} architectures; "
        "bytes by torch's own allocator in a rehearsal, from the first forward on",
        "table": [row(found["tool"], found["version"], found["said"], rows) for found in answers],
        "not_run": tools.ABOUT["not_run"],
        "pairs": pairs,
        "note": options.note,
    }


CUDA_TOOLS = Measurement(
    __doc__,
    "cuda_tools.json",
    lambda options: dict.fromkeys(tools.ABOUT["cuda"]),
    measure,
    conclude,
    {"pythons": [], "count": 0, "note": ""},
    rows="",
    line=lambda row: f"{sum('bytes' in reply for reply in row['said'])} answers",
)

if __name__ == "__main__":
    sys.exit(CUDA_TOOLS.main())
