"""Holds the estimate against figures that others measured on real GPUs, row by row.

python benchmarks/published.py                        predict every row of published.toml, write published.json
python benchmarks/published.py --only Liger           only the sets with that word in their name; the rest is kept
python benchmarks/published.py --rehearse             and run each row on torch's own CUDA allocator (make wheel first)
python benchmarks/build.py                            the table in results/README.md

published.toml has facts only: source, date, GPU, versions, set-up, quantity, figure, and by which training or rebuilt
loop (published_loops.py, published_changes.py) the row is predicted. Rows are kept whether they flatter or not.

Where the rehearsal gives the published figure and the estimate does not, the estimate is at fault; where it gives the
estimate's, version or set-up differ. A row that is not like for like says why.
"""

import argparse
import functools
import json
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import cloudpickle

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import published_changes  # noqa: E402
import published_loops  # noqa: E402
import published_trainings  # noqa: E402
from runner import RESULTS  # noqa: E402

from perf_helpers.estimate import estimate  # noqa: E402
from perf_helpers.lab import Arguments, Lab, Task, hardware  # noqa: E402
from perf_helpers.lab.runs import Memory  # noqa: E402
from perf_helpers.lab.store import write_whole  # noqa: E402
from perf_helpers.rehearsal import CARDS, Card, Rehearsal  # noqa: E402

FACTS = HERE / "published.toml"
RESULT = RESULTS / "published.json"
MIB = 2**20
NOWHERE = Task("bert-tiny", seq_len=32)  # of a rebuilt loop, which ignores it
QUANTITIES = {"max allocated": "peak_bytes", "reserved": "reserved_bytes"}

LOOPS = vars(published_loops) | vars(published_trainings)
for module in (published_changes, published_loops, published_trainings):  # other processes cannot import them
    cloudpickle.register_pickle_by_value(module)


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure, and what predicts it."""

    name: str  # of the set and of the row's sizes
    facts: dict[str, Any]  # of its set: source, date, gpu, versions, setup, quantity, like_for_like, reason
    published: float  # MiB
    sizes: dict[str, Any] = field(default_factory=dict)  # of the rebuilt loop
    arguments: dict[str, Any] = field(default_factory=dict)  # of the training
    changes: tuple[str, ...] = ()  # see `published_changes`

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
            return {"function": functools.partial(LOOPS[loop], **self.sizes)}
        if not self.changes:
            return dict(self.arguments)
        return {"optimizer": functools.partial(published_changes.of, self.changes), **self.arguments}

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


def rows(path: Path = FACTS) -> list[Row]:
    """Every row of the file of facts, in its order.

    Raises:
        ValueError: a quantity or a change that is not known.
    """
    found = []
    for facts in tomllib.loads(path.read_text(encoding="utf-8"))["set"]:
        if facts["quantity"] not in QUANTITIES:
            raise ValueError(f"{facts['name']}: quantity={facts['quantity']!r}, choose from {', '.join(QUANTITIES)}")
        for figure in facts["figures"]:
            own = dict(figure)
            published, label = own.pop("published"), own.pop("row", None)
            reason, changes = own.pop("reason", None), own.pop("changes", facts.get("changes", []))
            if unknown := set(changes) - published_changes.CHANGES.keys():
                raise ValueError(f"{facts['name']}: no changes called {', '.join(sorted(unknown))}")
            about = {key: value for key, value in facts.items() if key not in ("figures", "sizes", "arguments")}
            if reason:
                about |= {"reason": reason, "like_for_like": False}
            name = label or ", ".join(f"{key} {value}" for key, value in own.items())
            is_loop = "loop" in facts
            found.append(
                Row(
                    name=f"{facts['name']}: {name}",
                    facts=about,
                    published=published,
                    sizes=facts.get("sizes", {}) | own if is_loop else {},
                    arguments={} if is_loop else facts.get("arguments", {}) | own,
                    changes=tuple(changes),
                )
            )
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


def rehearse(found: list[Row], folder: Path) -> Iterator[tuple[Row, Memory | None, str]]:
    """Each row on torch's own allocator, with what it said where it did not end well.

    Raises:
        RuntimeError: no rehearsal is possible here.
    """
    for card in dict.fromkeys(row.card for row in found):
        with Rehearsal(card) as stage, tempfile.TemporaryDirectory() as out:
            lab = Lab("gpu", executor=stage, out=out, timeout=900)
            for row in found:
                if row.card == card:
                    task, question = row.task(folder), row.question
                    run = (
                        lab.run(question["function"], name=row.name, task=task, measure="memory")
                        if "function" in question
                        else lab.train(name=row.name, task=task, measure="memory", **question)
                    )
                    yield row, run.memory, run.message


def told(row: Row, said: tuple[int, int | None]) -> dict[str, Any]:
    """A row of the JSON: its facts, the figure and the prediction in MiB, and the error as a share of the figure."""
    predicted, today = said
    kept = (
        "kind",
        "source",
        "date",
        "commit",
        "gpu",
        "versions",
        "setup",
        "quantity",
        "like_for_like",
        "reason",
        "older",
    )
    return {
        "name": row.name,
        **{key: row.facts.get(key) for key in kept},
        "published": row.published,
        "predicted": predicted / MIB,
        "error": predicted / MIB / row.published - 1,
        "older_rules_add": None if today is None else (predicted - today) / MIB,
        "rehearsed": None,
    }


def summary(made: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of the errors of rows that are like for like, all and by kind: how many, median, 95th percentile and worst."""
    alike = [row for row in made if row["like_for_like"]]
    kinds = {"all": alike} | {
        kind: [row for row in alike if row["kind"] == kind] for kind in dict.fromkeys(row["kind"] for row in alike)
    }
    said = {}
    for kind, chosen in kinds.items():
        errors = sorted(abs(row["error"]) for row in chosen)
        high = errors[-(-95 * len(errors) // 100) - 1]  # one of them, so that it is an error that was made
        said[kind] = {
            "rows": len(errors),
            "median": statistics.median(errors),
            "percentile_95": high,
            "worst": errors[-1],
        }
    return said


def main(arguments=None) -> int:
    """Predict, rehearse if asked, write; the exit code."""
    parser = argparse.ArgumentParser(description="Hold the estimate against published measurements.")
    parser.add_argument("--only", default="", metavar="WORD", help="sets with this in their name; others are kept")
    parser.add_argument("--rehearse", action="store_true", help="run each row on torch's own CUDA allocator too")
    options = parser.parse_args(arguments)
    Arguments.of({})  # imports transformers, which two threads must not do at once
    everything = rows()
    chosen = [row for row in everything if options.only.lower() in row.name.lower()]
    before = {row["name"]: row for row in json.loads(RESULT.read_text())["table"]} if RESULT.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ThreadPoolExecutor(2) as pool:
            said = pool.map(lambda row: predict(row, folder), chosen)
            made = {row.name: told(row, answer) for row, answer in zip(chosen, said, strict=True)}
        for row in made.values():
            row["rehearsed"] = before.get(row["name"], {}).get("rehearsed")
        if options.rehearse:
            for row, memory, message in rehearse(chosen, folder):
                size = getattr(memory, QUANTITIES[row.facts["quantity"]]) if memory else None
                made[row.name]["rehearsed"] = size and size / MIB
                print(row.name, size and size / MIB, message or "", file=sys.stderr, flush=True)
    table = [made.get(row.name) or before[row.name] for row in everything if row.name in made or row.name in before]
    report = {
        "what": "published measurements on real GPUs, in MiB, and what the estimate says of each",
        "versions": hardware.versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "like_for_like": summary(table),
        "table": table,
    }
    write_whole(RESULT, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(report["like_for_like"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
