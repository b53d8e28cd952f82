"""Measure how reliable a comparison of two nightly runs is: equal code against itself, and against slowed-down steps.

    python benchmarks/measure_nights.py [--usual 20] [--slower 5]
    python benchmarks/measure_nights.py --rows      compare the recorded runs again, by the current rule

A simulated nightly run times a step of a few recipes, as `perf-helpers course` does. The same code is timed many times,
every second time under other load (a process that multiplies matrices on all cores but one). Each run is compared with
every other run: how often is a recipe reported as slower? In more runs, half of them under other load, a planted fault
(tests/sabotage) adds 10 % or 40 % to each training step: how often is the fault found?
"""

import itertools
import os
import sys

from measure_speed import other_load
from runner import RESULTS, Measurement, elsewhere

from perf_helpers.compare.compare import compare_steps

SABOTAGE = RESULTS.parent / "tests" / "sabotage"
SLOWER = (0.1, 0.4)  # slow-downs, as shares of a step


def cases(options) -> dict:
    """Return {name: (whether another process loads the machine, slowdown)} of simulated nightly runs; a slowdown of 0.1
    makes each step 10 % longer.

    `options`: the script's command-line options.
    """
    nights = [(number % 2 == 1, 0.0) for number in range(options.usual)]
    nights += [(number % 2 == 1, share) for share in SLOWER for number in range(options.slower)]
    return {str(number): night for number, night in enumerate(nights)}


def measure(cases, options):
    for name, (busy, slower) in cases.items():
        sabotage = {"PYTHONPATH": str(SABOTAGE), "SABOTAGE": "slow_step", "SLOWER": str(slower)} if slower else {}
        with other_load(busy):
            paces = elsewhere("perf_helpers.compare.step_times", "measure_here", "cpu", **sabotage)
        yield name, {"busy": busy, "slower": slower, "load": os.getloadavg()[0], "paces": paces}


def is_called_slower(old: dict, new: dict) -> bool:
    return any(change["worse"] for change in compare_steps(old["paces"], new["paces"])[0])


def counted(pairs) -> dict[str, str]:
    """Return {"all": text, "quiet": text}: how many pairs call the second run slower than the first, e.g. "1 of 90".

    "quiet" covers the pairs without other load. `pairs`: (first, second) rows of simulated nightly runs.
    """
    pairs = [*pairs]
    quiet = [(a, b) for a, b in pairs if not (a["busy"] or b["busy"])]
    groups = {"all": pairs, "quiet": quiet}
    return {name: f"{sum(itertools.starmap(is_called_slower, of))} of {len(of)}" for name, of in groups.items()}


def conclude(nights: list[dict], options) -> dict:
    usual = [night for night in nights if not night["slower"]]
    slowed = {share: [night for night in nights if night["slower"] == share] for share in SLOWER}
    found = {f"{share:.0%}": counted(itertools.product(usual, after)) for share, after in slowed.items()}
    return {"false alarms": counted(itertools.permutations(usual, 2)), "found": found}


NIGHTS = Measurement(
    __doc__,
    "nights.json",
    cases,
    measure,
    conclude,
    {"usual": 20, "slower": 5},
    rows="nights",
    line=lambda night: f"busy: {night['busy']}, slower: {night['slower']:.0%}",
)

if __name__ == "__main__":
    sys.exit(NIGHTS.main())
