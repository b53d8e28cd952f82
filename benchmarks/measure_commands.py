"""How long commands take from the shell to their last line, imports included, and a second estimate in one Python.

    python benchmarks/measure_commands.py [--rounds 5] [--out results/commands.json]

Medians of the clock on the wall, the commands in turns: to be measured on a quiet machine.
"""

import datetime
import statistics
import subprocess
import sys
import time

import measuring

from perf_helpers.lab import hardware

# What is timed, and the exit code that it has.
COMMANDS = {
    "--help": 0,
    "doctor": 0,
    "estimate --model bert-base-uncased --optimm adafactor": 2,  # a wrong argument
    "estimate --model bert-large --seq-len 512 --device cuda": 0,
    "estimate --model llama-3-8b --seq-len 512 --device cuda": 0,
    "measure --model bert-tiny --steps 2": 0,
}
# Estimates by one process server, the first one for another model: it waits for the server.
SECOND = """
import time
from perf_helpers import Task
from perf_helpers.estimate import estimate
for model in ("bert-tiny", "bert-large", "llama-3-8b"):
    began = time.perf_counter()
    estimate(Task(model, seq_len=512), device="cuda")
    print(time.perf_counter() - began)
"""


def seconds_of(words: list[str], code: int) -> tuple[float, str]:
    """Seconds of a whole process, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode != code:
        raise SystemExit(f"{words} ended with {done.returncode}: {done.stderr}")
    return seconds, done.stdout


def main() -> None:
    options = measuring.options(__doc__, rounds=5)
    every: dict[str, list[float]] = {}
    for number in range(options.rounds + 1):  # the first round warms up
        taken = {}
        for command, code in COMMANDS.items():
            taken[command], _ = seconds_of(["-m", "perf_helpers.cli", *command.split()], code)
        _, *later = map(float, seconds_of(["-c", SECOND], 0)[1].split())
        taken |= zip(("bert-large, the server running", "llama-3-8b, the server running"), later, strict=True)
        for name, seconds in taken.items() if number else ():
            every.setdefault(name, []).append(seconds)
    report = {
        "what": "seconds of whole commands, medians",
        "seconds": {name: round(statistics.median(each), 2) for name, each in every.items()},
        "all": {name: [round(seconds, 2) for seconds in each] for name, each in every.items()},
        "machine": hardware.describe().name,
        "versions": hardware.versions(),
        "date": datetime.date.today().isoformat(),
    }
    measuring.keep(report, options.out)


if __name__ == "__main__":
    main()
