"""Run the tests in stages, the daily tier or the nightly one, and print the seconds of each stage.

    python tests/stages.py daily                       what `make test` runs after `make style`
    python tests/stages.py nightly                     all other stages, however long they take
    python tests/stages.py nightly --minutes 45 --run 7
        as many stages as fit into 45 minutes; run 7 begins two stages later than run 6, so that no stage is left out
        three times in a row

A stage that fails does not stop the next one. Exit code 0 if none failed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = [sys.executable, "-m", "pytest"]
# Files go to the workers in conftest.py's order: those of experiments first, so that no long one is left at the end.
TWO = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
# Two workers on two cores: what each starts computes on one thread, which takes a third less of their time.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
LESSONS = "--ignore=tests/test_lessons.py"
VENV = f"VENV={Path(sys.executable).parents[1]}"
# {stage: (about the minutes it takes on two cores, its command)}. What is timed has the machine alone.
DAILY = {
    "units": (4, [*PYTEST, *TWO, LESSONS, "-m", "not (browser or site or nightly or timed)"]),
    "lessons": (6, [*PYTEST, "tests/test_lessons.py", "-m", "not nightly"]),
}
# Hundreds of long tests beside each other: one that fails is run once more, and named as "RERUN" if it then passes. The
# daily tier has no such second run.
AGAIN = [*PYTEST, "--reruns", "1", "-raR"]
NIGHTLY = {
    "lessons": (14, [*AGAIN, "-m", "nightly and timed"]),
    "browser": (15, [*AGAIN, "-n", "2", "--dist", "loadgroup", "-m", "browser or site"]),
    "units": (28, [*AGAIN, *TWO, "-m", "nightly and not (browser or site or timed)"]),
    "levels": (6, ["make", "levels", VENV, "ARGS=--lowest"]),
    "rehearse": (8, ["make", "rehearsed", VENV]),
}


def chosen(stages: dict, minutes: float, run: int) -> Iterator[str]:
    """Yield the names of a run's stages in the order in which they start, without those that no longer fit.

    Args:
        stages: {name: (its minutes, ...)}.
        minutes: the time limit; 0: none, all stages run in the order of `stages`.
        run: number of the run; with a time limit, run n + 1 begins two stages later in the list than run n.
    """
    names = [*stages]
    first = 2 * run % len(names) if minutes else 0
    start = time.monotonic()
    for place, name in enumerate(names[first:] + names[:first]):
        passed = (time.monotonic() - start) / 60
        if minutes and place and passed + stages[name][0] > minutes:
            print(f"make test: {name} is left out: {passed:.0f} of {minutes:g} minutes have passed", flush=True)
        else:
            yield name


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tier", choices=["daily", "nightly"])
    parser.add_argument("--minutes", type=float, default=0, help="after which no stage is begun (default: no limit)")
    parser.add_argument("--run", type=int, default=0, help="number of this run, by which the first stage is chosen")
    given = parser.parse_args(arguments)
    stages, failed = DAILY if given.tier == "daily" else NIGHTLY, []
    for name in chosen(stages, given.minutes, given.run):
        start = time.monotonic()
        environment = os.environ | (ONE_THREAD if "-n" in stages[name][1] else {})
        if subprocess.run(stages[name][1], cwd=ROOT, env=environment).returncode:
            failed.append(name)
        print(f"make test: {name} took {time.monotonic() - start:.0f} seconds", flush=True)
    if failed:
        print(f"make test: failed in {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
