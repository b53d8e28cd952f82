"""Measuring, estimating, explaining and advising work in an environment without the packages of the extra "course"."""

import importlib.metadata
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
ONLY_COURSE = ["ipykernel", "IPython", "ipywidgets", "jupyterlab", "matplotlib", "nbconvert", "nbformat", "papermill"]
SMALL = ["--model", "bert-tiny", "--seq-len", "32", "--per_device_train_batch_size", "2"]
TWO = [*SMALL, "--then", "--gradient_checkpointing"]
COMMANDS = {
    "estimate": ["estimate", *SMALL],
    "measure": ["measure", "--memory-only", *SMALL],
    "explain": ["explain", *TWO],
    "advise": ["advise", "--model", "bert-tiny", "--seq-len", "32", "--memory", "2GB", "--effective-batch", "4"],
}


def required(distribution: str, found: set[str] | None = None) -> set[str]:
    """Return the names of all distributions that `distribution` needs without its extras, directly or by way of others.

    `found`: the set to extend; callers leave it out.
    """
    found = set() if found is None else found
    for requirement in map(Requirement, importlib.metadata.requires(distribution) or ()):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if (name := canonicalize_name(requirement.name)) not in found:
            found.add(name)
            required(name, found)
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return the path of the Python of a new environment that has only this project and what it requires, as links.

    The requirements are those in pyproject.toml without the extras.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    here = Path(sysconfig.get_paths()["purelib"])
    for distribution in map(importlib.metadata.distribution, required("perf-helpers")):
        for name in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if (here / name).exists() and not (site / name).exists():
                (site / name).symlink_to(here / name)
    for package in ("trainmem", "perf_helpers"):
        (site / package).symlink_to(ROOT / package)
    return python


def command(python, *words):
    done = subprocess.run([python, "-m", "perf_helpers.cli", *words], capture_output=True, text=True, cwd=python.parent)
    return done.returncode, done.stdout, done.stderr


def test_the_environment_lacks_what_only_the_course_needs(python):
    code = f"import importlib.util; print(*(n for n in {ONLY_COURSE} if importlib.util.find_spec(n)))"
    assert subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


@pytest.mark.parametrize(
    "verb", ["estimate", *(pytest.param(v, marks=pytest.mark.nightly) for v in COMMANDS if v != "estimate")]
)
def test_what_needs_no_lesson_runs_without_the_course(python, verb):
    code, output, errors = command(python, *COMMANDS[verb], "--json")
    assert code == 0, errors[-2000:]
    assert json.loads(output)


@pytest.mark.parametrize("words", [["course", "05"], ["report", "."]])
def test_the_course_says_what_to_install(python, words):
    code, _, errors = command(python, *words)
    assert code == 2 and "papermill" in errors and "pip install 'perf-helpers[course]'" in errors
