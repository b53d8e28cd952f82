"""Compare the estimate with figures that others measured on real GPUs, row by row.

python benchmarks/published.py                   predict every row of published.toml, write published.json
python benchmarks/published.py --rows "*Liger*"  predict these rows only; keep the others
python benchmarks/published.py --rehearse        also rehearse each row with torch's CUDA allocator (make wheel first)
python benchmarks/build.py                       the table in results/README.md

published.toml has facts only: source, date, GPU, versions, set-up, quantity, figure, and the loop or changed training
that predicts the row. The code of each source's loops or changes is in one file, published_*.py. Rows are kept even if
the estimate is far off.

If the rehearsal gives the published figure and the estimate does not, the estimate is wrong. If rehearsal and estimate
agree on another figure than the published one, the source used other versions or another set-up. If a row's figure
cannot fairly be compared with the estimate, the row is not `like_for_like` and gives the reason.
"""

import functools
import inspect
import json
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import published_fms
import published_gpt
import published_guide
import published_liger
import torch
from runner import RESULTS, Measurement, read_record, rehearsing
from tables import MIB, spread

from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.estimate import estimate
from trainmem.rehearsal import CARDS, Card

FACTS = Path(__file__).with_suffix(".toml")
RESULT = RESULTS / "published.json"
NOWHERE = Task("bert-tiny", seq_len=32)  # a placeholder for rebuilt loops, which need no task
QUANTITIES = {"max allocated": "peak_bytes", "reserved": "reserved_bytes"}
KEPT = ("kind", "source", "date", "commit", "gpu", "versions", "setup", "quantity", "like_for_like", "reason", "older")


def functions(*sources) -> dict[str, Callable]:
    """Return {name: function} of all functions in the modules `sources`: training loops, and changes to trainings."""
    return {name: made for source in sources for name, made in inspect.getmembers(source, inspect.isfunction)}


LOOPS = functions(published_liger, published_gpt)
CHANGES = functions(published_fms, published_guide)


def run_loop(loop: Callable, task: Task, **sizes) -> None:
    """Run a training loop that was rebuilt after its source, with its tensors on the GPU if the process has one.

    `sizes`: the loop's arguments; the task is not used.
    """
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        loop(**sizes)


def changed(names: Sequence[str], model, arguments):
    """Apply changes to a model. Return the optimizer that a change made; None: the Trainer makes its own.

    `names`: keys of `CHANGES`; `arguments`: the Trainer's `TrainingArguments`.
    """
    made = [CHANGES[name](model, arguments) for name in names]
    return next((optimizer for optimizer in made if optimizer is not None), None)


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure in MiB with its source, and the training or custom loop whose estimate should equal it."""

    name: str  # the set's name and the row's sizes
    facts: dict[str, Any]  # the set's source, date, gpu, versions, setup, quantity, like_for_like, reason
    published: float  # MiB
    given: dict[str, Any]  # sizes of the rebuilt loop, or arguments of the training
    changes: tuple[str, ...]  # names of changes to the training

    @property
    def card(self) -> Card:
        """Return the card to rehearse; the estimate is for its compute capability."""
        given = self.facts["card"]
        if isinstance(given, str):
            return CARDS[given]
        return Card(self.facts["gpu"], tuple(given["capability"]), int(given["gib"] * 2**30))

    @property
    def question(self) -> dict[str, Any]:
        """Return {name: value} of the arguments that describe the row's training, for `estimate` and for a lab.

        For a custom loop, the only argument is "function", the loop. Otherwise they are the training arguments; if the
        row changes the model, they include "optimizer", a function that makes the changes when the Trainer calls it.
        """
        if loop := self.facts.get("loop"):
            return {"function": functools.partial(run_loop, LOOPS[loop], **self.given)}
        return self.given | ({"optimizer": functools.partial(changed, self.changes)} if self.changes else {})

    def task(self, folder: Path) -> Task:
        """Return the training's task; write the configuration of a model that is not a preset into `folder`."""
        given = dict(self.facts.get("task", {}))
        if not given:
            return NOWHERE
        if model := given.pop("config_json", None):
            path = folder / f"{model['model_type']}.json"
            path.write_text(json.dumps(model))
            given["model"] = str(path)
        return Task(**given)


def rows() -> list[Row]:
    """Return every row of published.toml, in the order of the file."""
    found = []
    for facts in tomllib.loads(FACTS.read_text(encoding="utf-8"))["set"]:
        for figure in facts["figures"]:
            own = dict(figure)
            published, label = own.pop("published"), own.pop("row", None)
            reason, changes = own.pop("reason", None), own.pop("changes", facts.get("changes", []))
            about = {key: value for key, value in facts.items() if key not in ("figures", "sizes", "arguments")}
            if reason:
                about |= {"reason": reason, "like_for_like": False}
            name = label or ", ".join(f"{key} {value}" for key, value in own.items())
            given = facts.get("sizes" if "loop" in facts else "arguments", {}) | own
            found.append(Row(f"{facts['name']}: {name}", about, published, given, tuple(changes)))
    return found


def predict(row: Row, folder: Path) -> tuple[int, int | None]:
    """Return a row's estimated bytes by two sets of rules: (of the versions that the source used, of today's versions).

    The second is None if the rules are the same. `folder`: folder for the file with the model's configuration.
    """
    quantity, capability = QUANTITIES[row.facts["quantity"]], row.card.capability
    ask = functools.partial(estimate, row.task(folder), device="cuda", compute_capability=capability, timeout=900)
    then = getattr(ask(**row.question).memory, quantity)
    if not row.facts.get("older"):
        return then, None
    question = {key: value for key, value in row.question.items() if key != "optimizer"}
    return then, getattr(ask(**question).memory, quantity)


def rehearse(found: list[Row], folder: Path) -> dict[str, float | None]:
    """Return {name of a row: peak MiB that torch's own allocator reports}; the value is None if the rehearsal failed.

    `found`: the rows; `folder`: folder for the files with configurations.

    Raises:
        RuntimeError: this machine cannot rehearse.
    """
    sizes = {}
    for card in dict.fromkeys(row.card for row in found):
        with rehearsing(card, timeout=900) as lab:
            for row in (row for row in found if row.card == card):
                about = {"name": row.name, "task": row.task(folder), "measure": "memory"}
                run = (lab.run if "function" in row.question else lab.train)(**about, **row.question)
                size = getattr(run.memory, QUANTITIES[row.facts["quantity"]]) if run.memory else None
                sizes[row.name] = size and size / MIB
                print(row.name, sizes[row.name], run.message or "", file=sys.stderr, flush=True)
    return sizes


def row_of(row: Row, predictions: tuple[int, int | None]) -> dict[str, Any]:
    """Return a row for published.json: the source's facts, "published" and "predicted" in MiB, and "error".

    "error" is predicted / published - 1. "older_rules_add" is, in MiB, the prediction for the source's library versions
    minus the prediction for today's versions; None if no second value is given.

    `predictions`: (predicted bytes for the source's library versions, predicted bytes for today's versions). The second
    value is None if today's versions behave in the same way.
    """
    predicted, today = predictions
    return {
        "name": row.name,
        **{key: row.facts.get(key) for key in KEPT},
        "published": row.published,
        "predicted": predicted / MIB,
        "error": predicted / MIB / row.published - 1,
        "older_rules_add": None if today is None else (predicted - today) / MIB,
        "rehearsed": None,
    }


def summary(made: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return number, median, 95th percentile and worst of the absolute errors of the rows marked "like_for_like".

    The result has one entry for all these rows ("all"), and one for each kind of row, e.g. "layer" or "training". Rows
    without the mark have a reason why their figures cannot fairly be compared.

    `made`: the rows, see `row_of`.
    """
    errors: dict[str, list[float]] = {"all": []}
    for row in (row for row in made if row["like_for_like"]):
        for kind in ("all", row["kind"]):
            errors.setdefault(kind, []).append(abs(row["error"]))
    return {kind: {"rows": len(found)} | spread(found) for kind, found in errors.items()}


def measure(cases, options):
    """Predict each row, and rehearse it if requested, otherwise keep its earlier rehearsal; yield (name, row).

    `cases`: {name: row} to predict; `options`: the script's command-line options.
    """
    before = {row["name"]: row["rehearsed"] for row in read_record(RESULT)["table"]}
    Arguments.of({})  # import transformers now: two threads must not import it at once
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        sizes = rehearse([*cases.values()], folder) if options.rehearse else before
        predictions = pool.map(lambda row: predict(row, folder), cases.values())
        for row, answer in zip(cases.values(), predictions, strict=True):
            yield row.name, row_of(row, answer) | {"rehearsed": sizes.get(row.name)}


def conclude(table: list[dict], options) -> dict:
    what = "published measurements on real GPUs, in MiB, and what the estimate says of each"
    return {"what": what, "like_for_like": summary(table)}


PUBLISHED = Measurement(
    __doc__,
    "published.json",
    lambda options: {row.name: row for row in rows()},
    measure,
    conclude,
    {"rehearse": False},
    rows="table",
    name_of=lambda number, row: row["name"],
    line=lambda row: f"{row['published']:,.2f} MiB, predicted {row['error']:+.3%}",
)

if __name__ == "__main__":
    sys.exit(PUBLISHED.main())
