"""Time each lesson of `make course` and each stage of `make test`, in two or more checkouts alternately.

    python benchmarks/measure_builds.py --builds . ../old [--commands course test] [--rounds 2]

A checkout that needs another environment is written FOLDER=VENV, as for `make VENV=...`. Set-up is not timed: each
checkout runs `make extras` first. The order of the checkouts is reversed in each round; the first round begins with the
last checkout. Use a quiet machine.
"""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from runner import Measurement, read_record

STAGE = re.compile(r"make test: (\w+) took (\d+) (second|minute)s")


def make(build: str, *targets: str) -> subprocess.CompletedProcess:
    """Run targets of a checkout's Makefile in the checkout's environment; return the ended process, with its output.

    PYTHONPATH is the checkout; VIRTUAL_ENV and MAKEFLAGS of this process are removed.

    `build`: folder of the checkout, or FOLDER=VENV.
    """
    folder, _, venv = build.partition("=")
    command = ["make", "-C", folder, *targets, *([f"VENV={Path(venv).resolve()}"] if venv else [])]
    environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "MAKEFLAGS")}
    environment["PYTHONPATH"] = str(Path(folder).resolve())  # the environment may belong to another checkout
    return subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def cases(options) -> dict:
    named = {}
    for number, command in itertools.product(range(1, options.rounds + 1), options.commands or ["course"]):
        builds = options.builds or ["."]
        for build in builds if number % 2 == 0 else builds[::-1]:
            named[f"{number} {command} {commit(build)}"] = (command, build)
    return named


def commit(build: str) -> str:
    folder = build.partition("=")[0]
    return subprocess.run(
        ["git", "-C", folder, "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
    ).stdout.strip()


def measure(runs, options):
    for build in {build for _, build in runs.values()}:
        if (done := make(build, "extras")).returncode:
            raise SystemExit(f"{build} could not be set up:\n{done.stdout[-2000:]}")
    for name, (command, build) in runs.items():
        start = time.monotonic()
        done = make(build, command)
        row = {"number": name, "command": command, "build": commit(build), "seconds": round(time.monotonic() - start)}
        yield name, row | {"exit_code": done.returncode} | of_course(build, command) | of_tests(done.stdout)


def of_course(build: str, command: str) -> dict:
    """Return the fields of a row about the last `make course`: versions, seconds per lesson, failed lessons, verdicts.

    If `command` is not "course", return {}. `build`: the checkout's FOLDER, or FOLDER=VENV with a virtual environment.
    """
    if command != "course":
        return {}
    results = read_record(Path(build.partition("=")[0]) / "build" / "course" / "results.json")
    verdicts = Counter(claim["verdict"] for claim in results["claims"])
    failed = [lesson["name"] for lesson in results["lessons"] if lesson["status"] != "ok"]
    unexpected = sorted(claim["id"] for claim in results["claims"] if not claim["as_expected"])
    seconds = {lesson["name"]: lesson["seconds"] for lesson in results["lessons"]}
    versions = {name: results["versions"][name] for name in ("torch", "transformers")}
    found = {"versions": versions, "lessons": seconds, "failed": failed}
    return found | {"verdicts": dict(verdicts), "unexpected": unexpected}


def of_tests(printed: str) -> dict:
    """Return {"stages": {name: seconds}} of a `make test` that printed `printed`; {} if it printed no stage."""
    found = {name: int(count) * (60 if unit == "minute" else 1) for name, count, unit in STAGE.findall(printed)}
    return {"stages": found} if found else {}


def conclude(rows: list[dict], options) -> dict:
    """Return the median seconds of each command in each build (checkout), and their ratios to the first build.

    The result is {"median_seconds": {command: {build: seconds}}, "ratios": {command: {build: ratio}}}.

    `rows`: one per timed command; `options`: not used.
    """
    taken: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        taken.setdefault(row["command"], {}).setdefault(row["build"], []).append(row["seconds"])
    medians, ratios = {}, {}
    for command, of_builds in taken.items():
        medians[command] = {build: statistics.median(seconds) for build, seconds in of_builds.items()}
        first = next(iter(medians[command].values()))
        ratios[command] = {build: round(seconds / first, 2) for build, seconds in medians[command].items()}
    return {"median_seconds": medians, "ratios": ratios}


BUILDS = Measurement(
    __doc__,
    "builds.json",
    cases,
    measure,
    conclude,
    {"rounds": 2, "builds": [], "commands": []},
    line=lambda row: json.dumps({name: row[name] for name in ("seconds", "exit_code")}),
)

if __name__ == "__main__":
    sys.exit(BUILDS.main())
