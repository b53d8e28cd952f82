"""Make the calculator's tables with the estimate: one file for each recipe of each model, and an index of them.

    python website/calculator_tables.py [--changed] [--out website/_static/tables] [MODEL ...]

`calculator.toml` lists models and recipes. A table is kept as long as the libraries that it was traced with are those
installed, so an interrupted run continues; with --changed it must also be made by the present code. Tables are
committed, each with its versions, because all of them take hours: about half a minute of one core each. The file of a
table has about 10 kB.
"""

import argparse
import functools
import gzip
import hashlib
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent))
import event_tables
from event_tables import LENGTH_UNIT, Events, Point, Unfit, events_of

from perf_helpers.plots import PALETTE
from trainmem import cards
from trainmem import recipes as known
from trainmem.core import hardware, optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.families import positions
from trainmem.core.task import PRESETS, Task
from trainmem.core.training import Experiment
from trainmem.estimate import peak_memory
from trainmem.estimate.api import target
from trainmem.estimate.fresh_process import ask
from trainmem.records import CATEGORIES
from trainmem.texts import name_text

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = Path(__file__).with_name("calculator.toml")

# The choices of a visitor, with the technique of each.
_TECHNIQUES = {
    "method": {"full": None, "lora": known.LORA, "qlora": known.QLORA},
    "precision": {"fp32": None, "fp16": known.FP16, "bf16": known.BF16, "bf16-weights": known.BF16_WEIGHTS},
    "optimizer": {"adamw": known.ADAMW, "adamw-8bit": known.ADAM_8BIT, "adafactor": known.ADAFACTOR, "sgd": known.SGD},
    "checkpointing": {"off": None, "on": known.CHECKPOINTING},
}
QUESTIONS: dict[str, dict[str, dict[str, Any]]] = {
    question: {name: technique.arguments if technique else {} for name, technique in options.items()}
    for question, options in _TECHNIQUES.items()
}
# The type of the weights is always given, because a model's default may be another.
QUESTIONS["precision"] = {name: {"dtype": "float32"} | given for name, given in QUESTIONS["precision"].items()}
QUESTIONS |= {"accumulation": {str(count): {"gradient_accumulation_steps": count} for count in (1, 4)}}
# In 16 bits, attention uses one kernel on compute capability 9 and 10, another on 8 and 12, and in fp16 a third on 7.
# In fp32 all capabilities use the same kernel; the table is made for 9.0.
KERNELS = {"any": (9, 0), "9": (9, 0), "8": (8, 0), "7": (7, 5)}
OF_MAJOR = {"9": "9", "10": "9", "8": "8", "12": "8", "7": "7"}

# Fields of a configuration that change no byte of a training.
_NO_BYTES = re.compile(
    "_token_id$|_eps$|epsilon$|^rope_|^output_|^summary_|label|^layer_types$|^(transformers_version|architectures|"
    "return_dict|dtype|problem_type|initializer_range|use_cache|pretraining_tp|max_window_layers|_name_or_path)$"
)
_MOST_TOKENS = 2**18  # per micro-batch
_LONGEST = 8192  # tokens per sequence
_SECONDS = 1800.0  # time limit for the traces of a table
_OF_CORE = ("task.py", "configurations.py", "training.py", "arguments.py", "adapters.py")
_OF_MEASURE = ("tracker.py", "watcher.py")
_OF_TABLES = ("torch", "transformers", "accelerate", "bitsandbytes", "peft")


class Recipe(NamedTuple):
    """The recipe of a calculator's table: one choice for each of `QUESTIONS` (e.g. the precision), and `kernels`, a key
    of `KERNELS` that names the attention kernels which the GPU selects.
    """

    method: str
    precision: str
    optimizer: str
    checkpointing: str
    accumulation: str
    kernels: str

    @property
    def key(self) -> str:
        return ".".join(self)

    def arguments(self, micro_batch: int) -> dict[str, Any]:
        """Return the recipe's training arguments, as `estimate` takes them, for a micro-batch in samples."""
        given = {"per_device_train_batch_size": micro_batch}
        for name, options in QUESTIONS.items():
            given |= options[getattr(self, name)]
        return given

    def events(self, task: Task, points: tuple[Point, ...]) -> dict[Point, Events]:
        """Trace the training at some points, as `estimate` does, and return {point: its allocator events}.

        `points`: (micro-batch, length in units of 128 tokens) of each.
        """
        device, experiments = target("cuda", KERNELS[self.kernels]), []
        for micro_batch, length in points:
            arguments = Arguments.of(self.arguments(micro_batch))
            samples = peak_memory.enough_samples(arguments)
            at_point = task.replace(seq_len=length * LENGTH_UNIT, dataset_size=samples)
            experiments.append(Experiment(self.key, at_point, arguments))
        job = peak_memory.trace_all, experiments, device
        traced = ask(*job, model=task.model, timeout=_SECONDS)
        return {
            point: events_of(each.trace, device.compute_capability) for point, each in zip(points, traced, strict=True)
        }


def recipes_of(given: dict[str, list[str]]) -> Iterator[Recipe]:
    for answers in itertools.product(*(given[name] for name in QUESTIONS)):
        for kernels in KERNELS:
            if (kernels == "any") == (answers[1] == "fp32") and (kernels != "7" or answers[1] == "fp16"):
                yield Recipe(*answers, kernels)


def room_of(task: Task) -> tuple[int, int]:
    """Return (the largest micro-batch of a task's tables, the largest length in units of 128 tokens).

    A micro-batch of both sizes has at most `_MOST_TOKENS` tokens. The length stays below the model's sliding window,
    because longer sequences get another attention mask.
    """
    config = task.build_config()
    longest = min(positions(config) or _LONGEST, (getattr(config, "sliding_window", None) or 10**6) - 1, _LONGEST)
    return _MOST_TOKENS // longest, longest // LENGTH_UNIT


def table_of(task: Task, recipe: Recipe, before: dict[Recipe, tuple]) -> dict[str, Any]:
    """Return the table of one recipe: {"parts": [a table of events, or two]}.

    A part is valid from the micro-batch "least" on, up to the next part. There are two parts if one
    table cannot reproduce all traces: a micro-batch of 1 may differ, because some tensors of one sample need no copy.

    Args:
        before: {recipe: (its events, its table)} of the last recipe for which a table was made, {} at first. If the new
            recipe differs from the last one only in the kernels, and both have the same events at two micro-batches,
            the last recipe's table is returned. If not, the new recipe replaces the last one in `before`.

    Raises:
        Unfit: no table reproduces the traces.
    """
    most, longest = room_of(task)
    last = min(longest, 4)
    first = (1, last - 1), (3, last - 1)
    traced = recipe.events(task, first)
    for other, (events, table) in before.items():
        if other[:-1] == recipe[:-1] and all(events[point].is_like(traced[point]) for point in first):
            return table
    traced |= recipe.events(task, ((1, longest), (2, 1), (7, last), (most, longest)))
    try:
        parts = [{"least": 1} | event_tables.table(traced)]
    except Unfit:
        traced |= recipe.events(task, ((1, 1),))
        halves = {least: {point: traced[point] for point in traced if min(point[0], 2) == least} for least in (1, 2)}
        parts = [{"least": least} | event_tables.table(events) for least, events in halves.items()]
    before.clear()
    before[recipe] = traced, {"parts": parts}
    return {"parts": parts}


@functools.cache
def made_from(model: str) -> str:
    """Return a digest of the code, the preset and the library versions that the tables of a model depend on."""
    package = ROOT / "trainmem"
    files = [*sorted(package.glob("estimate/*.*"))]
    files += [package / part / name for part, names in (("core", _OF_CORE), ("measure", _OF_MEASURE)) for name in names]
    files.append(Path(event_tables.__file__))
    content = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    content.update(json.dumps([PRESETS[model], {name: hardware.version_of(name) for name in _OF_TABLES}]).encode())
    return content.hexdigest()[:16]


def versions() -> dict[str, str | None]:
    """Return {library: version} of the traced libraries; a version has no suffix for a device, e.g. "+cu130"."""
    return {name: (hardware.version_of(name) or "").partition("+")[0] or None for name in _OF_TABLES}


def read(file: Path) -> dict[str, Any]:
    """Read a table; return {} if the file does not exist."""
    return {"versions": _FIRST} | json.loads(gzip.decompress(file.read_bytes())) if file.exists() else {}


# Those of the tables that do not name their own.
_FIRST = {"torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0", "bitsandbytes": "0.50.2", "peft": None}


def build(model: str, given: dict[str, list[str]], folder: Path, changed: bool = False) -> Iterator[str]:
    """Write those tables of a model that are missing or made with other libraries, and yield a line of text for each.

    Args:
        model: a model of calculator.toml; its tables are written to `folder`/`model`.
        given: {question: the choices on offer}, as in calculator.toml.
        folder: the folder of all tables.
        changed: also write those that other code of this package made.
    """
    task, before, here = Task(model), {}, versions()
    for recipe in recipes_of(given):
        file = folder / model / f"{recipe.key}.json.gz"
        known = read(file)
        if known.get("versions") == here and (not changed or known["made_from"] == made_from(model)):
            continue
        try:
            table = table_of(task, recipe, before)
        except (Unfit, ValueError) as error:
            table = {"refused": str(error)}
        table = {"made_from": made_from(model), "versions": here} | table
        text = json.dumps(table, separators=(",", ":"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(text.encode(), mtime=0))
        yield f"{model} {recipe.key}: {file.stat().st_size:,} bytes{' ' + table.get('refused', '')[:300]}"


def index(published: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the index that the calculator's page loads before any table of a recipe.

    "models" has each model's sizes, its memory by other tools' formulas, and {name of a table: place of its versions in
    "versions"} as "recipes"; a model without a table in `folder` is left out. "versions" lists {library: version}.
    "questions" is {question: {choice: training arguments}}. "kernels" is {major compute capability: key of `KERNELS`}.
    "categories" lists [name, colour], "cards" the properties of each card.

    `published`: the content of calculator.toml.
    """
    models, made_with = {}, []
    for model in published["models"]:
        kept = {}
        for file in sorted((folder / model).glob("*.json.gz")):
            if "parts" in (table := read(file)):
                if table["versions"] not in made_with:
                    made_with.append(table["versions"])
                kept[file.name.removesuffix(".json.gz")] = made_with.index(table["versions"])
        if kept:
            most, longest = room_of(Task(model))
            config = Task(model).build_config()
            about = {"most": most, "longest": longest * LENGTH_UNIT, "parameters": Task(model).parameters()}
            about["dtype"] = Task(model).weights().dtype
            fields = sizing(config)
            about |= {"config": fields, "defaults": {name: getattr(type(config), name, None) for name in fields}}
            models[model] = about | {"formulas": formulas(Task(model)), "recipes": kept}
    return {
        "models": models,
        "questions": QUESTIONS,
        "kernels": OF_MAJOR,
        "categories": [[name_text(category), PALETTE[category]] for category in CATEGORIES],
        "cards": [
            {
                "key": key,
                "name": card.name,
                "capability": card.capability,
                "memory": card.memory_bytes,
                "limit": card.limit_bytes,
                "capacity": target(card=key).memory_bytes,
                "context": cards.context_bytes(card.capability) or card.context_bytes,
            }
            for key, card in cards.CARDS.items()
        ],
        "versions": made_with,
    }


def sizing(config) -> dict[str, Any]:
    """Return {field: value} of the fields of a configuration that affect a training's memory.

    The number of positions is left out for rotary positions, which have no weights.
    """
    fields = config.to_dict()
    return {
        name: value
        for name, value in fields.items()
        if not _NO_BYTES.search(name) and not (name == "max_position_embeddings" and "rope_parameters" in fields)
    }


def formulas(task: Task) -> dict[str, dict[str, int]]:
    """Return the memory of a training of a task by other tools' formulas: {tool: {precision: bytes}}.

    `benchmarks/tools.py` uses the same formulas.
    """
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    model = task.build_model(dtype="float32", device="meta")
    parameters, size = task.parameters(), calculate_maximum_sizes(model)[0]
    of_accelerate = {"fp32": (size, "float32"), "fp16": (size, "float16"), "bf16": (size, "bfloat16")}
    of_accelerate["bf16-weights"] = size // 2, "float32"
    return {
        "18 B/parameter": dict.fromkeys(QUESTIONS["precision"], 18 * parameters),
        "accelerate estimate-memory": {
            name: max(estimate_training_usage(*size_and_type).values()) for name, size_and_type in of_accelerate.items()
        },
        # runtime/zero/stage_1_and_2.py: estimate_zero2_model_states_mem_needs, for one GPU without offloading
        "DeepSpeed, ZeRO stage 2": dict.fromkeys(QUESTIONS["precision"], (2 + 18) * parameters),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="models in calculator.toml, e.g. gpt2 (default: all)"
    )
    parser.add_argument("--changed", action="store_true", help="also make the tables that other code made")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "_static" / "tables")
    options = parser.parse_args()
    published = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))
    optional_packages.offer("peft")
    for model in options.models or published["models"]:
        own = published["models"][model]
        for line in build(
            model, published["usual"] | published.get(own.get("like"), {}) | own, options.out, options.changed
        ):
            print(line, flush=True)
        content = json.dumps(index(published, options.out), separators=(",", ":"))
        (options.out / "index.json").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
