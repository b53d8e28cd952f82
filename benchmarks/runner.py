"""How things are measured here: a script declares a `Measurement`, which reads its options, goes on where it was
stopped, tells each row and writes the record."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import cloudpickle

from perf_helpers.lab import Lab
from trainmem.core import hardware
from trainmem.records import Record, Store, write_whole
from trainmem.rehearsal import CARDS, Card, Rehearsal

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"  # records, and the page made of them
Named = Mapping[str, Any]


@dataclass(frozen=True)
class Draft(Record):
    """A row as soon as it is measured."""

    name: str
    setup: dict[str, Any]  # machine, versions and options: of another setup nothing is taken
    row: dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """What is measured, against what, row by row, and the record of it.

    Args:
        about: the script's docstring; the first line is shown as help.
        record: the file's name in results/.
        cases: the rows to measure, by name; what `measure` takes of each is up to the script.
        measure: yields (name, row) of the cases that it is given, one after the other.
        conclude: what the record says of all rows, in the order of the cases.
        options: {name: default}, for `--name`; a default of False makes a switch, a list takes several words.
        rows: the name of the rows in the record, "" where it has none.
        name_of: the name of a recorded row, by its place and itself; default: its "number", else its place.
        line: a row for whoever waits; default: all of it.
        rehearsed: whether the versions are those of the environment that rehearses.
        packages: further ones whose versions are recorded.
    """

    about: str
    record: str
    cases: Callable[[argparse.Namespace], Named]
    measure: Callable[[Named, argparse.Namespace], Iterable[tuple[str, dict]]]
    conclude: Callable[[list[dict], argparse.Namespace], dict]
    options: Named = field(default_factory=dict)
    rows: str = "rows"
    name_of: Callable[[int, dict], str] = lambda number, row: str(row.get("number", number))
    line: Callable[[dict], str] = json.dumps
    rehearsed: bool = False
    packages: tuple[str, ...] = ()

    def main(self, arguments: list[str] | None = None) -> int:
        """Measure what is asked for, and write the record; the exit code."""
        options = self.parsed(arguments)
        cases, record, known = self.cases(options), {}, {}
        if self.rows and options.rows is not None:
            record = read_record(options.out)
            known = {self.name_of(number, row): row for number, row in enumerate(record[self.rows])}
            known = {name: row for name, row in known.items() if not any(fnmatch(name, word) for word in options.rows)}
        new = {name: case for name, case in cases.items() if name not in known}
        if new:
            known |= self.measured(new, options)
            record |= stamp(self.rehearsed)
            record["versions"] |= {name: importlib.metadata.version(name) for name in self.packages}
            if self.rows and options.rows is not None:
                record["again"] = [*dict.fromkeys([*map(str, record.get("again", ())), *new])]  # after the others
        rows = [known[name] for name in cases if name in known]
        record |= self.conclude(rows, options) | ({self.rows: rows} if self.rows else {})
        write_record(options.out, record)
        print(json.dumps({name: value for name, value in record.items() if not isinstance(value, list)}, indent=1))
        self.draft.unlink(missing_ok=True)
        return 0

    def parsed(self, arguments: list[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=self.about.splitlines()[0])
        for name, default in self.options.items():
            kind = {"nargs": "*"} if isinstance(default, list) else {"type": type(default)}
            kind = {"action": "store_true"} if default is False else kind | {"default": default}
            parser.add_argument(f"--{name}", **kind, help=f"default: {default}")
        if self.rows:
            told = "measure these anew (* for any letters) and keep the record's others; no name: conclude anew"
            parser.add_argument("--rows", nargs="*", metavar="NAME", help=told)
        parser.add_argument("--out", type=Path, default=RESULTS / self.record, help="default: %(default)s")
        return parser.parse_args(arguments)

    @property
    def draft(self) -> Path:
        """The rows of what has not come to its end."""
        return RESULTS.parent / "build" / "measured" / f"{self.record}l"

    def measured(self, cases: Named, options: argparse.Namespace) -> dict[str, dict]:
        """{name: row} of these cases; each is kept at once, for a call that goes on where this one is stopped."""
        carry_modules()
        told = {name: value for name, value in vars(options).items() if name not in ("rows", "out")}
        setup = {"machine": hardware.describe().name, "versions": hardware.versions(), "options": told}
        store = Store(self.draft, Draft)
        found = {kept.name: kept.row for kept in store.read() if kept.name in cases and kept.setup == setup}
        for name, row in self.measure({name: case for name, case in cases.items() if name not in found}, options):
            store.append(Draft(name, setup, row))
            found[name] = json.loads(json.dumps(row))
            print(f"{len(found)} of {len(cases)}, {name}: {self.line(row)}", file=sys.stderr, flush=True)
        return found


@contextlib.contextmanager
def rehearsing(card: Card, **options) -> Iterator[Lab]:
    """A lab, with these options, whose experiments are rehearsed on a card; its files go when it is left."""
    with Rehearsal(card) as stage, tempfile.TemporaryDirectory() as folder:
        yield Lab("gpu", executor=stage, out=folder, **options)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def stamp(rehearsed: bool = False) -> dict:
    """What the numbers of a record stand with. `rehearsed`: with the versions of the environment that rehearses."""
    versions = hardware.versions()
    if rehearsed:
        with rehearsing(CARDS["a100"]) as lab:
            versions = lab.versions
    return {"machine": hardware.describe().name, "versions": versions, "date": now()}


def read_record(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_record(path: Path, record: Any) -> None:
    write_whole(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def carry_modules() -> None:
    """Clean processes do not know this folder: what is loaded from it travels with what they are given."""
    for name, module in [*sys.modules.items()]:
        if name != "__main__" and Path(getattr(module, "__file__", None) or "/").resolve().parent == HERE:
            cloudpickle.register_pickle_by_value(module)


def elsewhere(module: str, function: str, *arguments, **variables: str) -> Any:
    """What a function of a module returns in a Python of its own, with more variables in its environment; as JSON."""
    code = f"import json, sys; from {module} import {function} as asked; found = asked(*json.loads(sys.argv[1]))"
    paths = os.pathsep.join(filter(None, (variables.pop("PYTHONPATH", ""), str(HERE), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", f"{code}; print(json.dumps(found))", json.dumps(arguments)]
    environment = os.environ | variables | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])
