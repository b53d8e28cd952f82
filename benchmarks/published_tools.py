"""Compare the estimate for CUDA with other tools, on trainings that others measured on real cards.

    .venv/bin/python benchmarks/published_tools.py --pythons PYTHON ...   # PYTHON: see measure_cuda_tools.py

It needs peft. The trainings are those of published.toml, published_lora.toml and published_preflight.toml. A prediction
of tensors' bytes is compared with allocated bytes, a prediction of total bytes with reserved bytes; if the tool reports
the size of the CUDA context, this size is subtracted from the total. The estimates of published.toml are in
published.json; for the other two files the estimate traces the loop that the source describes.
"""

import functools
import json
import statistics
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import published
import published_lora
import tools
import tools_pypi
import torch
from measure_cuda import Training
from measure_cuda_tools import of_pypi, question
from runner import Measurement, read_record
from tables import MIB

from trainmem.core import hardware
from trainmem.estimate import estimate

PREFLIGHT = tomllib.loads(Path(__file__).with_name("published_preflight.toml").read_text(encoding="utf-8"))
ABOUT = tools.ABOUT["published"]
FIGURES = {"allocated": "bytes", "reserved": "total_bytes"}  # {published figure: field of an answer}
T4, A100 = (7, 5), (8, 0)


@dataclass(frozen=True)
class Row:
    """A training that others measured on a real card: its measured bytes, and the description that each tool gets."""

    name: str
    file: str  # the file with its facts
    figures: dict[str, int]  # bytes, by the names of FIGURES
    training: Training
    known: dict[str, dict] = field(default_factory=dict)  # recorded answers of our own methods
    more: dict = field(default_factory=dict)  # further fields of the question
    loop: Callable | None = None  # the loop that the estimate traces
    release: str = ""  # torch release


def training(config: dict, length: int, capability: tuple[int, int], **arguments) -> Training:
    return Training(0, "", config, length, {"optim": "adamw_torch"} | arguments, capability, processes=1)


def of_lora(rank: int, config: dict) -> dict:
    """Return the fields of a `tools_pypi.Question` about LoRA on q, k, v and o.

    `rank`: LoRA's rank; `config`: fields of the model's configuration.
    """
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    keys = width * config["num_key_value_heads"] // config["num_attention_heads"]
    return {"method": "lora", "rank": rank, "trained": rank * layers * (6 * width + 2 * keys)}


def rows() -> Iterator[Row]:
    """Yield every training of published.toml, published_lora.toml and published_preflight.toml, file by file."""
    replies = {row["name"]: row for row in read_record(published.RESULT)["table"]}
    for row in (row for row in published.rows() if row.facts["kind"] == "training"):
        figure = "reserved" if row.facts["quantity"] == "reserved" else "allocated"
        columns = {"this estimate": "predicted", "rehearsal": "rehearsed"}
        known = {tool: {FIGURES[figure]: round(replies[row.name][column] * MIB)} for tool, column in columns.items()}
        task, given = row.facts.get("task") or row.facts["like"], row.given
        if "like" in row.facts:  # a loop; tools get this equivalent training
            attention = {} if given.get("flash") else {"attn_implementation": "eager"}
            given = {"per_device_train_batch_size": 8, "dtype": given.get("dtype", "float32")} | attention
        one = training(task["config_json"], task["seq_len"], A100, **given)
        more = of_lora(16, task["config_json"]) if "lora" in row.changes else {}
        yield Row(row.name, "published", {figure: round(row.published * MIB)}, one, known, more)
    facts, predicted = published_lora.facts(), published_lora.predictions()["2.11.0"]["rows"]
    known = {row["name"]: {what: row[figure] for figure, what in FIGURES.items()} for row in predicted}
    for name, figures in (facts["trainings"] | PREFLIGHT["trainings"]).items():
        model, *named, sizes = name.split(", ")
        attention = named[0] if named else "eager"  # torch-preflight's rows use plain attention, see `preflight_loop`
        size, length = map(int, sizes.split(" x "))
        arguments = {"per_device_train_batch_size": size, "attn_implementation": attention}
        if named:
            config, arguments = facts["models"][model], arguments | {"dtype": "float16", "gradient_checkpointing": True}
            one, more = training(config, length, T4, **arguments), of_lora(32, config)
            loop = functools.partial(lambda task, name: published_lora.train(name), name=name)
            yield Row(name, "published_lora", figures, one, {"rehearsal": known[name]}, more, loop, "2.10")
        else:
            one = training({"model_type": model}, length, T4, bf16=True, **arguments)
            more = dict.fromkeys(("parameters", "trained"), PREFLIGHT["parameters"][model])
            loop = functools.partial(preflight_loop, model, size, length)
            yield Row(name, "published_preflight", figures, one, {}, more, loop, "2.11")


def preflight_loop(kind: str, size: int, length: int, task) -> None:
    """Run two steps as torch-preflight's program does, in bf16.

    A T4 emulates bf16, and its scaled_dot_product_attention has only the plain implementation for it.

    Args:
        kind: the model type, e.g. "gpt2".
        size, length: samples, and tokens per sample.
        task: not used.
    """
    import transformers
    from transformers.initialization import no_init_weights

    config, is_causal = transformers.AutoConfig.for_model(kind), kind == "gpt2"
    made = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
    with no_init_weights():  # their values are not used
        model = made.from_config(config).train()
    model.tie_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, config.vocab_size - 1, (size, length))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            output = model(input_ids=ids, **({"labels": ids} if is_causal else {}))
            loss = output.loss if is_causal else output.last_hidden_state.float().pow(2).mean()
        loss.backward()
        optimizer.step()

    for _ in range(2):
        step()


def own_answers(tool: str, row: Row) -> dict:
    """Return this project's answer for a training: the recorded one, otherwise the estimate for the training's loop.

    A recorded answer has only bytes, in the fields that `FIGURES` names; an estimate has the fields of
    `tools.estimated`. A rehearsal is never run here: if none is recorded, return {"refused": "not rehearsed"}.

    Args:
        tool: "rehearsal", or the name of the estimate, "this estimate".
        row: the training, with its recorded answers and its loop.
    """
    if tool in row.known or tool == "rehearsal":
        return row.known.get(tool, {"refused": "not rehearsed"})
    options = {"device": "cuda", "compute_capability": T4, "torch_version": row.release, "timeout": 600}
    return tools.estimated(lambda: estimate(published.NOWHERE, function=row.loop, **options))


def measure(cases, options):
    """Yield (tool, row) per tool; a row has "tool", "version" and "said": the tool's answer to each training, in order.

    `cases`: the tools to query, by name; `options`: the script's command-line options.
    """
    found, version = [*rows()], hardware.versions()["torch"]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        path = Path(name, "questions.json")
        questions = [question(replace(one.training, number=n), path.parent) | one.more for n, one in enumerate(found)]
        path.write_text(json.dumps(questions))
        for tool in cases:
            if tool not in tools_pypi.TOOLS:
                replies = [*pool.map(functools.partial(own_answers, tool), found)]
                yield tool, {"tool": tool, "version": "of record" if tool == "rehearsal" else version, "said": replies}
            elif answers := of_pypi(tool, options.pythons, path):
                for replies in answers["said"]:
                    if "bytes" in replies:
                        replies["total_bytes"] -= replies["context_bytes"]
                yield tool, {"tool": tool} | answers


def row(answers: dict, found: list[Row], left_out: str | None) -> dict:
    """Return one tool's row of the table: its errors over the trainings.

    Args:
        answers: the tool's row, see `measure`; "said" has the tool's answers.
        found: the trainings, in the order of the answers.
        left_out: file whose trainings are left out, because the tool was fitted to them; None: every training counts.
    """
    summary = {"tool": answers["tool"], "version": answers["version"], "left_out": left_out}
    for figure, what in FIGURES.items():
        measured = [None if one.file == left_out else one.figures.get(figure) for one in found]
        wrong = tools.errors(answers["said"], measured, what)
        summary[figure] = {"answered": len(wrong), "asked": sum(size is not None for size in measured)}
        summary[figure] |= {"median": statistics.median(wrong), "worst": max(wrong)} if wrong else {}
    return summary | {
        "refused": Counter(replies["refused"] for replies in answers["said"] if "refused" in replies).most_common(3)
    }


def conclude(answers: list[dict], options) -> dict:
    """Return the summary for the record: "table" has one row per tool, "pairs" one row per training.

    A row of "pairs" has the measured bytes of the training and "said": {tool: its answer}.

    `answers`: the rows that `measure` yielded; `options`: not used.
    """
    found, pairs = [*rows()], []
    for number, one in enumerate(found):
        replies = {
            each["tool"]: {what: each["said"][number].get(what) for what in FIGURES.values()} for each in answers
        }
        pairs.append({"name": one.name, "file": one.file, **one.figures, "said": replies})
    own = ABOUT["fitted"]  # a tool fitted to these trainings has a second row without them
    table = [row(each, found, file) for each in answers for file in dict.fromkeys((None, own.get(each["tool"])))]
    what = f"{len(found)} trainings that others measured on a real A100 or T4"
    return {"what": what, "table": table, "not_run": ABOUT["not_run"], "note": ABOUT["note"], "pairs": pairs}


PUBLISHED_TOOLS = Measurement(
    __doc__,
    "published_tools.json",
    lambda options: dict.fromkeys([*ABOUT["tools"], *filter(tools_pypi.TOOLS.get, tools.ABOUT["cuda"])]),
    measure,
    conclude,
    {"pythons": []},
    rows="",
    line=lambda row: f"{sum('refused' not in reply for reply in row['said'])} answers",
    packages=("peft",),
)

if __name__ == "__main__":
    sys.exit(PUBLISHED_TOOLS.main())
