"""How long commands take from the shell to their last line, imports included, and a second estimate in one Python.

    python benchmarks/measure_commands.py [--rounds 5]

Seconds of the clock on the wall, the commands in turns, after a round that warms up: for a quiet machine.
"""

import statistics
import subprocess
import sys
import time

from runner import Measurement

# What is timed, and the exit code that it has.
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
RUNNING = ("bert-large, the server running", "llama-3-8b, the server running")


def seconds_of(words: list[str], code: int = 0) -> tuple[float, str]:
    """Seconds of a whole process, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode != code:
        raise SystemExit(f"{words} ended with {done.returncode}: {done.stderr}")
    return seconds, done.stdout


def cases(options) -> dict:
    return {str(number): number for number in range(options.rounds + 1)}


def measure(rounds, options):
    for name in rounds:
        taken = {each: seconds_of(f"-m perf_helpers.cli {each}".split(), code)[0] for each, code in COMMANDS.items()}
        _, *later = map(float, seconds_of(["-c", SECOND])[1].split())
        yield name, taken | dict(zip(RUNNING, later, strict=True))


def conclude(rounds: list[dict], options) -> dict:
    _, *counted = rounds
    return {"medians": {name: round(statistics.median(each[name] for each in counted), 2) for name in counted[0]}}


COMMANDS_OF_THE_SHELL = Measurement(__doc__, "commands.json", cases, measure, conclude, {"rounds": 5}, rows="rounds")

if __name__ == "__main__":
    sys.exit(COMMANDS_OF_THE_SHELL.main())
