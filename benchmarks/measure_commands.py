"""Time commands from the shell to their last line, imports included, and estimates while the fork server runs already.

    python benchmarks/measure_commands.py [--rounds 3] [--builds . ../old] [--commands "estimate*" "advise*"]

The times are wall-clock seconds of alternating builds and commands, after a warm-up round, so use a quiet machine. A
build is a checkout; one with another environment is written FOLDER=PYTHON. The order of the builds is reversed in each
round. Each build has its own cache folder; commands that store results about operations are also timed with an empty
cache.
"""

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

from measure_builds import commit
from runner import Measurement

# {command: its exit code}
COMMANDS = {
    "--help": 0,
    "doctor": 0,
    "estimate --model bert-base-uncased --optmi adafactor": 2,  # a wrong argument
    "estimate --model bert-large --seq-len 512 --device cuda": 0,
    "estimate --model llama-3-8b --seq-len 512 --device cuda": 0,
    "measure --model bert-tiny --steps 2": 0,
    "advise --model llama-3-8b --card h100 --effective-batch 16": 0,
    "advise --model llama-3-8b --seq-len 2048 --card rtx-4090 --effective-batch 1 --may qlora --largest model": 0,
}
EMPTY = ", empty cache"
# Estimates by one fork server; the first is for another model, because it waits for the server to start.
SECOND = """
import time
from trainmem.core.task import Task
from trainmem.estimate import estimate
for model in ("bert-tiny", "bert-large", "llama-3-8b"):
    start = time.perf_counter()
    estimate(Task(model, seq_len=512), device="cuda")
    print(time.perf_counter() - start)
"""
RUNNING = ("bert-large, the server running", "llama-3-8b, the server running")


def seconds_of(build: str, words: list[str], home: str, code: int = 0) -> tuple[float, str]:
    """Run a process and return its seconds and its output.

    Args:
        build: folder of the checkout; or "FOLDER=PYTHON", the folder and the Python interpreter to run it with.
        words: the command, as arguments of Python.
        home: the cache folder.
        code: the expected exit code.

    Raises:
        SystemExit: the process ended with another exit code.
    """
    folder, _, python = build.partition("=")
    environment = os.environ | {"PYTHONPATH": str(Path(folder).resolve()), "PERF_HELPERS_HOME": home}
    start = time.perf_counter()
    command = [python or sys.executable, *words]  # in the build's folder, which comes first among the paths of imports
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    seconds = time.perf_counter() - start
    if done.returncode != code:
        raise SystemExit(f"{words} ended with {done.returncode}: {done.stderr}")
    return seconds, done.stdout


def cases(options) -> dict:
    rounds, builds = range(options.rounds + 1), options.builds or ["."]
    turns = ((number, build) for number in rounds for build in (builds if number % 2 else builds[::-1]))
    return {f"{number} {commit(build)}": (number, build) for number, build in turns}


def measure(turns, options):
    wanted = options.commands or ["*"]
    commands = {each: code for each, code in COMMANDS.items() if any(fnmatch(each, word) for word in wanted)}
    with tempfile.TemporaryDirectory() as homes:
        for name, (number, build) in turns.items():
            taken, home = {}, os.path.join(homes, commit(build))
            for each, code in commands.items():
                words = f"-m perf_helpers.cli {each}".split()
                taken[each] = seconds_of(build, words, home, code)[0]
                if each.startswith(("estimate", "advise")) and not code:
                    with tempfile.TemporaryDirectory() as empty:
                        taken[each + EMPTY] = seconds_of(build, words, empty)[0]
            if not options.commands:
                _, *later = map(float, seconds_of(build, ["-c", SECOND], home)[1].split())
                taken |= dict(zip(RUNNING, later, strict=True))
            yield name, {"number": name, "round": number, "build": commit(build), "seconds": taken}


def conclude(rows: list[dict], options) -> dict:
    """Return the median seconds of each command in each build (checkout), and their ratios to the first build.

    The result is {"medians": {build: {command: seconds}}, "ratios": {build other than the first: {command: ratio}}}.

    `rows`: one per round and build; `options`: the script's command-line options.
    """
    medians: dict[str, dict[str, float]] = {}
    for build, command in itertools.product(map(commit, options.builds or ["."]), rows[0]["seconds"]):
        counted = [row["seconds"][command] for row in rows if row["build"] == build and row["round"]]
        medians.setdefault(build, {})[command] = round(statistics.median(counted), 2)
    first, *others = medians
    ratios = {each: {name: round(medians[each][name] / s, 2) for name, s in medians[first].items()} for each in others}
    return {"medians": medians, "ratios": ratios}


COMMANDS_OF_THE_SHELL = Measurement(
    __doc__, "commands.json", cases, measure, conclude, {"rounds": 3, "builds": [], "commands": []}
)

if __name__ == "__main__":
    sys.exit(COMMANDS_OF_THE_SHELL.main())
