"""How far a comparison of two nights can be trusted: the same code against itself, and steps that were made slower.

    python benchmarks/measure_nights.py [--usual 20] [--slower 5] [--out results/nights.json]
    python benchmarks/measure_nights.py --usual 0 --out results/nights.json      count anew, with the rule of today

A night times a step of each of a few recipes, as `perf-helpers course` does. The same code is timed many times, every
other time beside a busy neighbour (a process that multiplies matrices on all cores but one); each night is held
against each other one: how often is anything called slower? Then each night is timed with optimizer steps that compute
for 10 % or 40 % of a training step longer (tests/sabotage), half of them beside the neighbour: how often is that found?
"""

import datetime
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import measuring
from measure_speed import neighbour

from perf_helpers.compare.compare import compare_steps
from perf_helpers.lab import hardware

SABOTAGE = Path(__file__).parents[1] / "tests" / "sabotage"
SLOWER = (0.1, 0.4)  # shares of a step
NIGHT = "import json; from perf_helpers.compare import step_times; print(json.dumps(step_times.tonight('cpu')))"


def night(busy: bool, slower: float = 0.0) -> dict:
    """The paces of one night, in a Python of its own."""
    environment = dict(os.environ)
    if slower:
        path = os.pathsep.join([str(SABOTAGE), *filter(None, [environment.get("PYTHONPATH")])])
        environment |= {"PYTHONPATH": path, "SABOTAGE": "slow_step", "SLOWER": str(slower)}
    with neighbour(busy):
        done = subprocess.run(
            [sys.executable, "-c", NIGHT], env=environment, stdout=subprocess.PIPE, check=True, text=True
        )
    return {
        "busy": busy,
        "slower": slower,
        "load": os.getloadavg()[0],
        "paces": json.loads(done.stdout.splitlines()[-1]),
    }


def is_called_slower(old: dict, new: dict) -> bool:
    return any(change["worse"] for change in compare_steps(old["paces"], new["paces"])[0])


def counted(pairs: list) -> str:
    return f"{sum(itertools.starmap(is_called_slower, pairs))} of {len(pairs)}"


def main() -> None:
    options = measuring.options(__doc__, usual=20, slower=5)
    if options.usual:
        nights = [night(number % 2 == 1) for number in range(options.usual)]
        nights += [night(number % 2 == 1, share) for share in SLOWER for number in range(options.slower)]
        about = {"machine": hardware.describe().name, "versions": hardware.versions()}
        about["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    else:
        kept = json.loads(options.out.read_text(encoding="utf-8"))
        nights, about = kept["nights"], {name: kept[name] for name in ("machine", "versions", "date")}
    usual = [each for each in nights if not each["slower"]]
    slowed = [each for each in nights if each["slower"]]
    pairs = list(itertools.permutations(usual, 2))
    quiet = [(a, b) for a, b in pairs if not (a["busy"] or b["busy"])]
    found = {}
    for share in SLOWER:
        after = [each for each in slowed if each["slower"] == share]
        found[f"{share:.0%}"] = {
            "all": counted([(a, b) for a in usual for b in after]),
            "quiet": counted([(a, b) for a in usual for b in after if not (a["busy"] or b["busy"])]),
        }
    counts = {"false alarms": {"all": counted(pairs), "quiet": counted(quiet)}, "found": found, "nights": nights}
    measuring.keep(about | counts, options.out, leave_out=("nights",))


if __name__ == "__main__":
    main()
