"""Holds the estimate against figures that others measured on real GPUs, row by row.

python benchmarks/published.py                   predict every row of published.toml, write published.json
python benchmarks/published.py --rows "*Liger*"  only these rows; the others are kept
python benchmarks/published.py --rehearse        and run each row on torch's own CUDA allocator (make wheel first)
python benchmarks/build.py                       the table in results/README.md

published.toml has facts only: source, date, GPU, versions, set-up, quantity, figure, and by which loop or changed
training the row is predicted, which stands in a file of its source. Rows are kept whether they flatter or not.

Where the rehearsal gives the published figure and the estimate does not, the estimate is at fault; where it gives the
estimate's, version or set-up differ. A row that is not like for like says why.
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
NOWHERE = Task("bert-tiny", seq_len=32)  # of a rebuilt loop, which needs none
QUANTITIES = {"max allocated": "peak_bytes", "reserved": "reserved_bytes"}
KEPT = ("kind", "source", "date", "commit", "gpu", "versions", "setup", "quantity", "like_for_like", "reason", "older")


def functions(*sources) -> dict[str, Callable]:
    """What sources rebuild, by name."""
    return {name: made for source in sources for name, made in inspect.getmembers(source, inspect.isfunction)}


LOOPS = functions(published_liger, published_gpt)
CHANGES = functions(published_fms, published_guide)


def run_loop(loop: Callable, task: Task, **sizes) -> None:
    """Run a rebuilt loop, its tensors on the GPU if the process has one."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        loop(**sizes)


def changed(names: Sequence[str], model, arguments):
    """Make these changes to a model; an optimizer where one of them brings it, else None: the Trainer makes its own."""
    made = [CHANGES[name](model, arguments) for name in names]
    return next((optimizer for optimizer in made if optimizer is not None), None)


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure, and what predicts it."""

    name: str  # of the set and of the row's sizes
    facts: dict[str, Any]  # of its set: source, date, gpu, versions, setup, quantity, like_for_like, reason
    published: float  # MiB
    given: dict[str, Any]  # sizes of the rebuilt loop, or arguments of the training
    changes: tuple[str, ...]  # of its training

    @property
    def card(self) -> Card:
        """The card that is rehearsed, whose compute capability the estimate is for."""
        given = self.facts["card"]
        if isinstance(given, str):
            return CARDS[given]
        return Card(self.facts["gpu"], tuple(given["capability"]), int(given["gib"] * 2**30))

    @property
    def question(self) -> dict[str, Any]:
        """What `estimate` and a lab are asked alike: a loop of one's own, or a training with its changes."""
        if loop := self.facts.get("loop"):
            return {"function": functools.partial(run_loop, LOOPS[loop], **self.given)}
        return self.given | ({"optimizer": functools.partial(changed, self.changes)} if self.changes else {})

    def task(self, folder: Path) -> Task:
        """The task of its training; `folder` takes the configuration of a model that is no preset."""
        given = dict(self.facts.get("task", {}))
        if not given:
            return NOWHERE
        if model := given.pop("config_json", None):
            path = folder / f"{model['model_type']}.json"
            path.write_text(json.dumps(model))
            given["model"] = str(path)
        return Task(**given)


def rows() -> list[Row]:
    """Every row of the file of facts, in its order."""
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
    """Bytes that the estimate says of a row, by the rules of its versions and by today's; None: they are the same."""
    quantity, capability = QUANTITIES[row.facts["quantity"]], row.card.capability
    ask = functools.partial(estimate, row.task(folder), device="cuda", compute_capability=capability, timeout=900)
    then = getattr(ask(**row.question).memory, quantity)
    if not row.facts.get("older"):
        return then, None
    question = {key: value for key, value in row.question.items() if key != "optimizer"}
    return then, getattr(ask(**question).memory, quantity)


def rehearse(found: list[Row], folder: Path) -> dict[str, float | None]:
    """{row: MiB by torch's own allocator}, None where it did not end well.

    Raises:
        RuntimeError: no rehearsal is possible here.
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


def told(row: Row, said: tuple[int, int | None]) -> dict[str, Any]:
    """A row of the JSON: its facts, the figure and the prediction in MiB, and the error as a share of the figure."""
    predicted, today = said
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
    """Of the errors of rows that are like for like, all and by kind: how many, median, 95th percentile and worst."""
    errors: dict[str, list[float]] = {"all": []}
    for row in (row for row in made if row["like_for_like"]):
        for kind in ("all", row["kind"]):
            errors.setdefault(kind, []).append(abs(row["error"]))
    return {kind: {"rows": len(found)} | spread(found) for kind, found in errors.items()}


def measure(cases, options):
    """Each row is predicted, and rehearsed if that is asked for; else what was rehearsed before is kept."""
    before = {row["name"]: row["rehearsed"] for row in read_record(RESULT)["table"]}
    Arguments.of({})  # imports transformers, which two threads must not do at once
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        sizes = rehearse([*cases.values()], folder) if options.rehearse else before
        said = pool.map(lambda row: predict(row, folder), cases.values())
        for row, answer in zip(cases.values(), said, strict=True):
            yield row.name, told(row, answer) | {"rehearsed": sizes.get(row.name)}


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
