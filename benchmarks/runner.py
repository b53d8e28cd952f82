"""Run a measuring script, which declares a `Measurement`: its options, its rows and its record.

An interrupted measurement continues.
"""

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
RESULTS = HERE.parent / "results"  # records, and the page made from them
Named = Mapping[str, Any]


@dataclass(frozen=True)
class Draft(Record):
    """A measured row, kept until the record is written: its name, content, and the set-up in which it was measured."""

    name: str
    setup: dict[str, Any]  # machine, versions and options; rows of another setup are ignored
    row: dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """A measurement, row by row, and its record.

    Args:
        about: the script's docstring; its first line is the help text.
        record: the file's name in results/.
        cases: returns {name: case} of the rows to measure; a case is whatever `measure` needs.
        measure: yields (name, row) of the given cases, one after the other.
        conclude: returns the record's summary of all rows, in the order of the cases.
        options: {name: default} for `--name`; a default of False makes a switch, a list accepts several words.
        rows: the key of the rows in the record; "" if it has none.
        name_of: returns a row's name from (index, row) (default: its "number", otherwise its index).
        line: returns a line about a row for the terminal (default: the whole row).
        rehearsed: True: record the versions in the rehearsals' environment; False: those in this one.
        packages: further packages whose versions are recorded.
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
        """Measure the requested rows, write the record, and return the exit code.

        `arguments`: words of the command line; None: `sys.argv[1:]`.
        """
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
            given = "measure these rows again (* matches any letters), keep the others; no name: only summarize again"
            parser.add_argument("--rows", nargs="*", metavar="NAME", help=given)
        parser.add_argument("--out", type=Path, default=RESULTS / self.record, help="default: %(default)s")
        return parser.parse_args(arguments)

    @property
    def draft(self) -> Path:
        """Return the path of the file that keeps the rows of an unfinished measurement."""
        return RESULTS.parent / "build" / "measured" / f"{self.record}l"

    def measured(self, cases: Named, options: argparse.Namespace) -> dict[str, dict]:
        """Measure cases, and return {name: row}; each row is stored at once, so that a later call can continue.

        `cases`: {name of a row: the case that `measure` measures for it}; `options`: the script's options.
        """
        carry_modules()
        given = {name: value for name, value in vars(options).items() if name not in ("rows", "out")}
        setup = {"machine": hardware.describe().name, "versions": hardware.versions(), "options": given}
        store = Store(self.draft, Draft)
        found = {stored.name: stored.row for stored in store.read() if stored.name in cases and stored.setup == setup}
        for name, row in self.measure({name: case for name, case in cases.items() if name not in found}, options):
            store.append(Draft(name, setup, row))
            found[name] = json.loads(json.dumps(row))
            print(f"{len(found)} of {len(cases)}, {name}: {self.line(row)}", file=sys.stderr, flush=True)
        return found


@contextlib.contextmanager
def rehearsing(card: Card, **options) -> Iterator[Lab]:
    """Yield a lab that rehearses its experiments on a card; its files are deleted when the context ends.

    `options`: further arguments of `Lab`, e.g. `timeout`.
    """
    with Rehearsal(card) as stage, tempfile.TemporaryDirectory() as folder:
        yield Lab("gpu", executor=stage, out=folder, **options)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def stamp(rehearsed: bool = False) -> dict:
    """Return {"machine", "versions", "date"} for a record.

    `rehearsed`: return the versions in the environment in which rehearsals run, not those of this process.
    """
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
    """Pickle modules of this folder by value, because fresh subprocesses cannot import them."""
    for name, module in [*sys.modules.items()]:
        if name != "__main__" and Path(getattr(module, "__file__", None) or "/").resolve().parent == HERE:
            cloudpickle.register_pickle_by_value(module)


def elsewhere(module: str, function: str, *arguments, **variables: str) -> Any:
    """Call a module's function in a new Python; return its result by way of JSON.

    `arguments`: the function's arguments; `variables`: environment variables to add.
    """
    code = f"import json, sys; from {module} import {function}; found = {function}(*json.loads(sys.argv[1]))"
    paths = os.pathsep.join(filter(None, (variables.pop("PYTHONPATH", ""), str(HERE), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", f"{code}; print(json.dumps(found))", json.dumps(arguments)]
    environment = os.environ | variables | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])
