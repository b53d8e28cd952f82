"""Run the course's lessons on rehearsed GPUs, two machines at a time.

    python tests/rehearsal/rehearse_lessons.py              every lesson on every machine of MACHINES
    python tests/rehearsal/rehearse_lessons.py core         what CI runs: each machine's `core`
    python tests/rehearsal/rehearse_lessons.py 05,06        these lessons

In a lesson, a statement that needs values is skipped and reported (`guarded_cells`). Each other exception, each verdict
that the ledger does not expect, and each machine on which nothing ran is printed as a problem; the exit code is then 1.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from guarded_cells import SKIPPED

from perf_helpers.course.course import find_lessons
from perf_helpers.course.results import load_results, problems
from trainmem.cards import Card, card
from trainmem.rehearsal import build, command


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine on which the course is rehearsed: its card, profile and lessons."""

    name: str  # of its folder
    card: Card  # with the number of its devices
    profile: str  # as `Lab` takes it
    core: tuple[str, ...]  # the lessons that CI rehearses: each branch for one GPU at least once, in a few minutes
    lessons: tuple[str, ...] = ()  # the only lessons that it is for; empty: all


MACHINES = (
    Machine("h100", card("h100"), "gpu", core=("01", "07")),
    Machine("a100", card("a100"), "gpu", core=()),
    Machine("t4", card("t4"), "t4", core=("03", "09")),
    Machine("two-a100", card("a100", devices=2), "gpu", core=("17",), lessons=("15", "16", "17", "18")),
)


@contextlib.contextmanager
def guarded(on: Card) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield (path of the Python interpreter, {environment variable: value}) for a rehearsal on a card.

    Kernels that are started with this interpreter and these variables skip statements that need values.
    """
    with command(on) as (python, environment), tempfile.TemporaryDirectory() as folder:
        startup = Path(folder, "profile_default", "startup", "guard.py")  # IPython runs it in each kernel
        startup.parent.mkdir(parents=True)
        startup.write_text("import guarded_cells\nguarded_cells.install(get_ipython())\n")
        paths = os.pathsep.join([str(Path(__file__).parent), environment["PYTHONPATH"]])
        yield python, environment | {"IPYTHONDIR": folder, "PYTHONPATH": paths}


def rehearse_lessons(wanted: str, out: Path) -> list[str]:
    """Run lessons on every machine of `MACHINES`, and print what happens.

    Args:
        wanted: "all", "core", or the lessons' numbers ("05,06").
        out: folder; each machine gets a folder in it, as `perf-helpers course` leaves it.

    Returns:
        One line for each problem.

    Raises:
        ValueError: a lesson does not exist.
    """
    if wanted not in ("all", "core"):
        find_lessons(wanted.split(","))
    build.library(build.set_up())  # once, before the machines ask for it
    with ThreadPoolExecutor(2) as pool:
        failed = pool.map(lambda machine: _rehearsed(machine, wanted, out / machine.name), MACHINES)
        return [line for lines in failed for line in lines]


def _rehearsed(machine: Machine, wanted: str, folder: Path) -> list[str]:
    """Run lessons on one machine; return one line for each problem.

    `wanted`: "all", "core", or the lessons' numbers ("05,06"); `folder`: the course writes its results and notebooks to
    it.
    """
    lessons = machine.core if wanted == "core" else wanted.split(",")
    lessons = machine.lessons if wanted == "all" else [x for x in lessons if x in (machine.lessons or lessons)]
    if wanted != "all" and not lessons:
        return []
    with guarded(machine.card) as (python, environment):
        words = [python, "-m", "perf_helpers.cli", "course", *lessons, "--profile", machine.profile, "--out", folder]
        environment |= {"OMP_NUM_THREADS": "1"}  # threads that wait take time from the other machine
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with subprocess.Popen(words, env=environment, text=True, **pipes) as process:
            for line in process.stderr:
                _say(machine, line)
    try:
        data = load_results(folder)
    except ValueError as error:
        return [f"{machine.name}: {error}"]
    for lesson in data["lessons"]:
        if count := skipped(folder / f"{lesson['name']}.ipynb"):
            _say(machine, f"{lesson['name']}: {count} statements need values")
    return [f"{machine.name}: {problem}" for problem in problems(data)]


def _say(machine: Machine, text: str) -> None:
    sys.stderr.write(f"{machine.name:>8}  {text.rstrip()}\n")  # in one call: two machines print at the same time


def skipped(notebook: Path) -> int:
    """Return how many statements of an executed notebook were skipped; 0 if the notebook does not exist."""
    return notebook.read_text(encoding="utf-8").count(f"{SKIPPED} (line ") if notebook.exists() else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lessons", nargs="?", default="all", help="all, core, or numbers, e.g. 05,06 (default: all)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/rehearsal"), help="output folder (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    failed = rehearse_lessons(given.lessons, given.out)
    print(*failed, f"rehearsal: {len(failed)} problems" if failed else f"rehearsal: passed, see {given.out}", sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
