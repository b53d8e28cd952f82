"""Measure on a GPU everything that the course cannot measure without one, part by part, in calls of a few minutes.

    python benchmarks/measure_gpu.py --list                       the parts, their rows, how long a call may take
    python benchmarks/measure_gpu.py --part ten [--seconds 470]   run one part, by name or number (default: all)
    python benchmarks/build.py --suite build/gpu/gpu.jsonl        keep the results, and make their pages

It needs perf_helpers and the libraries for training, but no notebook. A row is one measurement. A call begins no new
row after --seconds, and ends at most 100 seconds later. Every row is written to a file as soon as it is measured, so
the same command continues, even after it was killed. Out of memory is a result; a later call tries a crashed row once
more. Exit code 0: no requested row is left; 3: rows are left, call again; 1: it could not begin.

    python benchmarks/measure_gpu.py --tiny                       test everything on a CPU, at meaningless sizes
    python benchmarks/measure_gpu.py --tiny --rehearse a100       rehearse memory on a machine without such a card
"""

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from gpu_rows import FAILED, NOT_TESTABLE, PARTS, Here, Known, Row, StoredRow
from runner import carry_modules, now

from perf_helpers.lab.lab import Lab
from trainmem.core.hardware import Machine
from trainmem.core.task import TINY
from trainmem.measure import processes
from trainmem.records import Run, Store
from trainmem.unknown import NeedsValues

carry_modules()

SECONDS = 470  # default time in which a call begins new rows
LAST_SECONDS = 100  # time limit of the last row after that; it is then killed, and begins again in the next call
ROW_SECONDS = 300  # time limit of a row; after it the row is "timed out"
NEEDED = ("torch", "transformers", "accelerate", "datasets")  # packages that a training imports
WISHED = {"bitsandbytes": "8-bit Adam's rows are not testable", "pynvml": "device-used memory is not measured"}
TRIES = 2  # of a row that crashes
OF_A_RUN = ("name", "status", "message", "kind", "task", "arguments", "samples_per_step", "memory", "timing", "losses")


class Suite:
    """The rows of the suite on one machine, and the file that keeps them.

    Args:
        lab: runs the rows. Its profile sets the number of steps and how often compared runs alternate; in a rehearsal,
            its executor rehearses.
        file: JSON lines; rows of other machines, versions or profiles in it are ignored.
        ends: the time, by `monotonic`, after which no row begins.
    """

    def __init__(self, lab: Lab, file: Path, ends: float):
        self.lab, self.store, self.ends = lab, Store(file, StoredRow), ends
        self.here = Here(lab.machine, lab.versions, lab.profile)
        self.setup = setup_of(lab.machine, lab.versions, lab.profile.name)
        self._rows = self.store.read()
        self._tried: set[tuple[str, str]] = set()  # (part, name) of rows that this call has tried
        self._runs: dict[str, Run] = {}  # {description: run} of this lab

    def known(self, part: str) -> Known:
        """Return {name: row} of the stored rows of a part that need not be measured again.

        They were measured with the same machine, packages and settings, and succeeded or failed too often to be tried
        again.
        """
        known, failures = {}, {}
        for stored in self._rows:
            if stored.part == part and stored.setup == self.setup:
                failures[stored.name] = failures.get(stored.name, 0) + (stored.status in FAILED)
                if stored.status not in FAILED or failures[stored.name] >= TRIES:
                    known[stored.name] = stored
        while other := {row.name for row in PARTS[part](self.here, known) if _is_another(row, known)}:
            known = {name: stored for name, stored in known.items() if name not in other}
        return known

    def left(self, part: str) -> list[Row]:
        """Return the rows of a part that can be measured now: not yet measured, and not waiting for another result."""
        known = self.known(part)
        return [row for row in PARTS[part](self.here, known) if row.name not in known]

    def run(self, part: str) -> None:
        """Measure the remaining rows of a part while there is time."""
        while (row := self._next(part)) and monotonic() < self.ends:
            self._tried.add((part, row.name))
            self._do(part, row)

    def _next(self, part: str) -> Row | None:
        return next((row for row in self.left(part) if (part, row.name) not in self._tried), None)

    def _do(self, part: str, row: Row) -> None:
        """Measure one row of a part and store its result; store nothing if the suite's time ends first."""
        start = monotonic()
        seconds = max(1.0, min(ROW_SECONDS, self.ends + LAST_SECONDS - start))
        with processes.within(seconds):
            found = self._found(row)
        took = monotonic() - start
        if seconds < ROW_SECONDS and took >= seconds:
            print(f"{part}: {row.name}: cut off at the end of this call", file=sys.stderr, flush=True)
            return
        about = {"part": part, "name": row.name, "settings": row.settings(), "setup": self.setup}
        about |= {"machine": self.lab.machine.to_dict(), "seconds": round(took, 2)}
        stored = StoredRow(**about, **found, date=now())
        self.store.append(stored)
        self._rows.append(stored)
        print(f"{part}: {line(stored)}", file=sys.stderr, flush=True)

    def _found(self, row: Row) -> dict[str, Any]:
        """Measure a row; return the fields of `StoredRow` that the measurement sets, by name."""
        if row.lacks:
            return {"status": NOT_TESTABLE, "message": row.lacks}
        kinds = {"run": self._run, "pair": self._pair, "question": self._ask}
        try:
            return kinds[row.kind](row)
        except NeedsValues as error:
            return {"status": NOT_TESTABLE, "message": f"needs values: {error}"}
        except ValueError as error:
            return {"status": "refused", "message": str(error)[:500]}

    def _run(self, row: Row) -> dict[str, Any]:
        run = self._performed(row, row.measure)
        return {"status": run.status, "message": run.message, "runs": (kept_of(run),)}

    def _performed(self, row: Row, measure: tuple[str, ...]) -> Run:
        """Perform the run of a row in this lab, and return it. A rehearsal has no times, so only its memory is
        measured.

        `measure`: the things to measure, e.g. ("memory", "time").
        """
        measure = ("memory",) if self.lab.machine.rehearsed else measure
        options = {"task": row.task, "measure": measure}
        if row.function:
            run = self.lab.run(row.function, row.name, **options)
        else:
            more = {"optimizer": row.optimizer, "steps": row.steps}
            run = self.lab.train(row.name, **options, **more, **row.arguments)
        self._runs[_what(row)] = run
        return run

    def _pair(self, row: Row) -> dict[str, Any]:
        """Interleave the two runs of a row, and return {"status", "runs", "speed_ratio", "wall_ratio"}.

        A run that is known only from an earlier process is first repeated without timing, because `Lab.compare` takes
        only runs of its own lab. If a run or the comparison failed, there is a "message" instead of ratios.
        """
        pair = [self._runs.get(_what(one)) or self._performed(one, ("memory",)) for one in row.of]
        runs = tuple(map(kept_of, pair))
        for run in pair:
            if not run.ok:
                return {"status": run.status, "message": f"{run.name}: {run.message}", "runs": runs}
        compared = self.lab.compare(*pair)
        ratio = compared.speed_ratio
        if not ratio.known:
            status = "timed out" if "timed out" in ratio.value.why else "crashed"
            return {"status": status, "message": ratio.value.why, "runs": runs}
        return {"status": "ok", "runs": runs, "speed_ratio": ratio, "wall_ratio": compared.wall_ratio}

    def _ask(self, row: Row) -> dict[str, Any]:
        run = self.lab.run(row.function, row.name, task=row.task, measure=("none",))
        return {"status": run.status, "message": run.message, "value": run.value if run.ok else None}


def setup_of(machine: Machine, versions: dict[str, str | None], profile: str) -> dict[str, Any]:
    """Return the properties that must be equal for two rows to count as measured on one machine.

    The keys are "machine", "gpus", "rehearsed", "versions" and "profile". The GPU's host is not among them, because
    speeds are compared only within a row, i.e. on one host.
    """
    gpus = [[gpu.name, gpu.memory_bytes, gpu.capability and list(gpu.capability)] for gpu in machine.gpus]
    about = {"machine": machine.name, "gpus": gpus, "rehearsed": machine.rehearsed}
    return about | {"versions": versions | {"torch": machine.torch_build}, "profile": profile}


def kept_of(run: Run) -> dict[str, Any]:
    """Return {field: value} of a run for the fields that `OF_A_RUN` names, without the timeline of its memory and
    without the seconds of each step.
    """
    listing = run.to_dict()
    if listing["memory"]:
        listing["memory"]["timeline"] = None
    if listing["timing"]:
        listing["timing"] |= {"all_seconds": [], "all_cpu_seconds": []}
    return {name: listing[name] for name in OF_A_RUN}


def line(stored: StoredRow) -> str:
    """Return a line of text about a row, for the terminal."""
    if not stored.ok:
        return f"{stored.name}: {stored.status}, {stored.message}"
    if stored.speed_ratio:
        return f"{stored.name}: {stored.speed_ratio} x the speed"
    if stored.runs:
        return str(Run.from_dict(stored.runs[-1]))
    return f"{stored.name}: {stored.value}"


def _what(row: Row) -> str:
    """Return the settings of a row as JSON, without the number of steps and the list of things to measure."""
    listing = {name: value for name, value in row.settings().items() if name not in ("measure", "steps")}
    return json.dumps(listing, sort_keys=True)


def _is_another(row: Row, known: Known) -> bool:
    """Return whether `known`, {name: row}, has a row with the name of `row`, but measured with other settings."""
    return row.name in known and known[row.name].settings != json.loads(json.dumps(row.settings()))


def listing(suite: Suite, parts: list[str], seconds: float) -> str:
    """Return a text with the parts, their rows, and the most seconds that one call of the command takes for each part.

    Args:
        suite: the rows of the suite on this machine.
        parts: names of the parts to list.
        seconds: how long a call begins new rows; its last row may take `LAST_SECONDS` more.
    """
    lines = []
    for number, (name, plan) in enumerate(PARTS.items(), 1):
        if name in parts:
            known = suite.known(name)
            rows = [*plan(suite.here, known)]
            left = [row for row in rows if row.name not in known]
            most = seconds + LAST_SECONDS if left else 0
            head = (
                f"{number} {name}: {plan.__doc__.splitlines()[0]} {len(rows)} rows as far as is known, {len(left)} left"
            )
            lines += [f"{head}; a call takes {most:.0f} s at most"]
            lines += [f"    {row.name}{f' ({NOT_TESTABLE}: {row.lacks})' if row.lacks else ''}" for row in rows]
    return "\n".join(lines)


def _chosen(names: list[str] | None) -> list[str]:
    """Return the names of parts, given by name or number; None: all parts. Raises ValueError for an unknown name."""
    numbered = {str(number): name for number, name in enumerate(PARTS, 1)}
    chosen = [numbered.get(name, name) for name in names or PARTS]
    if unknown := [name for name in chosen if name not in PARTS]:
        raise ValueError(f"no part {', '.join(unknown)}: choose from {', '.join(PARTS)}, or their numbers")
    return chosen


def _check_packages() -> None:
    """Print which packages rows will lack. Raises ValueError if nothing can be trained, before GPU time is spent."""
    absent = [name for name in (*NEEDED, *WISHED) if importlib.util.find_spec(name) is None]
    if missing := [name for name in absent if name in NEEDED]:
        raise ValueError(f"this Python has no {', '.join(missing)}: install them, or carry their wheels")
    for name in absent:
        print(f"without {name} {WISHED[name]}", file=sys.stderr)


@contextlib.contextmanager
def _lab(options: argparse.Namespace, folder: str) -> Iterator[Lab]:
    """Yield the lab for the script's options; if the lab rehearses, the rehearsal ends when the context ends.

    Raises ValueError if this machine cannot run the requested suite. `folder`: folder for the lab's runs.
    """
    with contextlib.ExitStack() as stack:
        more: dict[str, Any] = {"out": folder, "timeout": ROW_SECONDS}
        if options.rehearse:
            from trainmem.rehearsal import Rehearsal, card

            more["executor"] = stack.enter_context(Rehearsal(card(options.rehearse)))
        lab = Lab(TINY.name if options.tiny else "auto", **more)
        if lab.profile.name == "cpu":
            reason = lab.machine.cuda_reason
            raise ValueError(f"no GPU here ({reason}): --tiny tries the suite on a CPU, --rehearse CARD its memory")
        yield lab


def main(arguments: list[str] | None = None) -> int:
    """Run or list parts; return the exit code.

    `arguments`: words of the command line; None: `sys.argv[1:]`.
    """
    start = monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", metavar="PART", help=f"{', '.join(PARTS)}, or 1 to {len(PARTS)}")
    parser.add_argument("--list", action="store_true", help="tell the rows, run none")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"in which rows are begun; default {SECONDS}")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="DIR")
    parser.add_argument("--tiny", action="store_true", help="meaningless sizes, to test that everything runs")
    parser.add_argument("--rehearse", metavar="CARD", help="memory alone, on a card that is not here")
    options = parser.parse_args(arguments)
    label = "-".join(filter(None, (options.tiny and "tiny", options.rehearse and f"rehearsed-{options.rehearse}")))
    rows = options.out / f"{label or 'gpu'}.jsonl"
    try:
        parts = _chosen(options.part)
        _check_packages()
        with tempfile.TemporaryDirectory() as folder, _lab(options, folder) as lab:
            suite = Suite(lab, rows, start + options.seconds)
            if options.list:
                print(listing(suite, parts, options.seconds))
                return 0
            for part in parts:
                suite.run(part)
            left = {part: len(suite.left(part)) for part in parts}
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    missing = ", ".join(f"{part} {number}" for part, number in left.items() if number)
    print(f"rows left: {missing}; the same command goes on" if missing else "nothing is left", file=sys.stderr)
    return 3 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
