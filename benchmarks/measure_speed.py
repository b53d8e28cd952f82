"""Measure how reliable speed comparisons on a CPU are: recipes against themselves, and claims decided many times.

    python benchmarks/measure_speed.py [--itself 200] [--turns 200] [--times 20]

If a recipe is compared with itself, how often is an effect reported (how often does the interval of the speed ratio
exclude 1)? How often does `in_turns` report an effect if it compares a forward and backward pass with itself, running
the two in turns within one process? Also, some claims about speed (see `CLAIMS`) are decided in 20 rounds, with the
recipes and sizes of their lessons: which verdicts do they get? Half of the comparisons run under other load: a process
that multiplies matrices on all cores but one. After every ten comparisons, and for every round, a new Python process
begins, with a fork server of its own, as each lesson has one. The whole measurement takes about two hours on 2 cores.
"""

import contextlib
import itertools
import os
import subprocess
import sys
from collections import Counter

from runner import RESULTS, Measurement, elsewhere

from perf_helpers.course.ledger import decide, load

TEN = 10


def _steps(count: int) -> dict:
    return {"gradient_accumulation_steps": count}


IN_TURNS = "passes in turns"  # interleaved inside a function, as in lessons 02, 04, 10 and 18
ONE, FOUR = ({"per_device_train_batch_size": size} for size in (1, 4))
ITSELF = {  # recipes that are compared with themselves
    "4 x 1": FOUR,
    "1 x 4": ONE | _steps(4),
    "checkpointing": FOUR | {"gradient_checkpointing": True},
    "Adafactor": FOUR | {"optim": "adafactor"},
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
HALF = {"num_hidden_layers": 2, "vocab_size": 4000}  # a smaller model
# {claim: (changes of the task, baseline, other recipe, options of the comparison)}, as in its lesson
CLAIMS = {
    "accumulation-cost": ({"config": {"num_hidden_layers": 2}}, FOUR, ITSELF["1 x 4"], {"turns": 12}),
    "accumulation-fill-first": ({"seq_len": 64}, ONE | _steps(8), FOUR | _steps(2), {"turns": 4}),
    "accumulation-fewer-updates": ({"seq_len": 64}, ONE | _steps(1), ITSELF["1 x 4"], {"steps_per_turn": 3}),
    "checkpointing-cost": ({"seq_len": 128, "config": HALF | NO_DROPOUT}, FOUR, ITSELF["checkpointing"], {}),
}
NEIGHBOUR = """
import time, torch
torch.set_num_threads({threads})
a = torch.randn(2000, 2000)
while True:
    a = (a @ a).sin()
"""


@contextlib.contextmanager
def other_load(wanted: bool):
    """If `wanted`, let another process keep all cores but one, and their caches, busy while the context is open."""
    if not wanted:
        yield
        return
    code = NEIGHBOUR.format(threads=max(1, (os.cpu_count() or 2) - 1))
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield
        finally:
            process.kill()


def by_parts() -> dict:
    """Return a row of the report for the claim "adafactor-cost", measured by the code of lesson 08.

    The lesson's cells measure the parts of a step, from which they calculate the variable `cost`.
    """
    import jupytext

    notebook = jupytext.read(RESULTS.parent / "notebooks/src/08_adafactor.py")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    wanted = [cell for cell in cells if {"parameters", "setup"} & {*cell.metadata.get("tags", ())}]
    wanted += [cell for cell in cells if "def parts(" in cell.source or "def throughput(" in cell.source]
    names: dict = {"display": print}
    for cell in wanted:
        exec(cell.source, names)
    found = [names["cost"].value, names["cost"].low, names["cost"].high]
    return {"name": "adafactor-cost", "floor": names["floor"], "load": os.getloadavg()[0], "cpu": found}


def passes_in_turns(task) -> list:
    """Time three interleaved copies of the same forward and backward pass of a task, on one thread.

    Return, for each copy, a list of (wall-clock seconds, CPU seconds) of its eight runs.
    """
    import torch

    from trainmem.measure.interleaving import in_turns

    torch.set_num_threads(1)
    model, batch = task.build_model(), task.batch(4)
    return in_turns([lambda: model(**batch).loss.backward()] * 3, 8)


def of_passes(task) -> dict:
    """Compare a forward and backward pass of a task with itself, interleaved in each of three processes.

    Return a row: "name", "floor" (the factor within which speeds count as equal), "load" (the system's load average),
    and "cpu" and "wall": [speed ratio, low, high] by CPU time and by wall-clock time.
    """
    from perf_helpers import Lab
    from trainmem.records import CPU, WALL, Ratio

    lab = Lab("cpu")
    taken = [lab.run(passes_in_turns, task=task, measure="value").value for _ in range(3)]
    ratios = {clock: Ratio.of_turns(taken, which, 1.05) for clock, which in (("cpu", CPU), ("wall", WALL))}
    row = {"name": IN_TURNS, "floor": ratios["cpu"].floor, "load": os.getloadavg()[0]}
    return row | {clock: [ratio.value, ratio.low, ratio.high] for clock, ratio in ratios.items()}


def compared(pairs: list) -> list[dict]:
    """Compare the speed of pairs of recipes in this process; return a row of the report for each pair.

    A row has "name", "floor" (the factor within which speeds count as equal), "load" (the system's load average), and
    "cpu" and "wall": [speed ratio, low, high] by CPU time and by wall-clock time. If the pairs belong to `CLAIMS`, a
    row "adafactor-cost" follows, which `by_parts` measures.

    `pairs`: each [name, changes of the task, training arguments of the baseline, training arguments of the other
    recipe, options of `Lab.compare`].
    """
    from perf_helpers import Lab

    lab, rows = Lab("cpu"), []
    for name, changes, baseline, other, options in pairs:
        task = lab.task.replace(**changes)
        if name == IN_TURNS:
            rows.append(of_passes(task))
            continue
        runs = [lab.train(name, task=task, measure=("none",), steps=1, **each) for each in (baseline, other)]
        found = lab.compare(*runs, **options)
        row = {"name": name, "floor": found.speed_ratio.floor, "load": os.getloadavg()[0]}
        for clock, ratio in (("cpu", found.speed_ratio), ("wall", found.wall_ratio)):
            row[clock] = [ratio.value, ratio.low, ratio.high]
        rows.append(row)
    return rows if pairs[0][0] not in CLAIMS else [*rows, by_parts()]


def is_effect(ratio: list[float]) -> bool:
    return not ratio[1] <= 1 <= ratio[2]


def cases(options) -> dict:
    """Return {name: (comparisons, whether another process loads the machine)}; each entry is measured in one process.

    A comparison is [name, changes of the task, training arguments of the baseline, training arguments of the other
    recipe, options of `Lab.compare`]. It compares a recipe with itself, or the two recipes of a claim.

    `options`: the script's command-line options.
    """
    found = {}
    for of, names in (("itself", itertools.cycle(ITSELF)), ("turns", itertools.repeat(IN_TURNS))):
        pairs = [
            [name, {"seq_len": 64}, ITSELF.get(name), ITSELF.get(name), {}]
            for name in itertools.islice(names, getattr(options, of))
        ]
        tens = [pairs[start : start + TEN] for start in range(0, len(pairs), TEN)]
        found |= {f"{of} {number}": (ten, number % 2 == 1) for number, ten in enumerate(tens)}
    claims = [[name, *sizes] for name, sizes in CLAIMS.items()]
    return found | {f"claims {number}": (claims, number % 2 == 1) for number in range(options.times)}


def measure(cases, options):
    for name, (pairs, busy) in cases.items():
        with other_load(busy):
            found = elsewhere("measure_speed", "compared", pairs)
        yield name, {"of": name.split()[0], "found": [row | {"busy": busy} for row in found]}


def conclude(rows: list[dict], options) -> dict:
    itself, turns, claims = (
        [each for row in rows if row["of"] == of for each in row["found"]] for of in ("itself", "turns", "claims")
    )
    ledger, verdicts = load(), {}
    for row in claims:
        row["verdict"] = decide(ledger[row["name"]], tuple(row["cpu"][1:]), True)
        verdicts.setdefault(row["name"], Counter())[row["verdict"]] += 1
    called = {"called an effect": effects(itself), "turns called an effect": effects(turns)}
    return called | {"verdicts": verdicts, "itself": itself, "turns": turns, "claims": claims}


def effects(rows: list[dict]) -> dict[str, str]:
    """Return, for each clock, in how many comparisons an effect was reported, e.g. {"cpu": "3 of 200"}.

    `rows`: one per comparison, with [ratio, low, high] by each clock.
    """
    return {clock: f"{sum(is_effect(row[clock]) for row in rows)} of {len(rows)}" for clock in ("cpu", "wall")}


def line(row: dict) -> str:
    return ", ".join(f"{found['name']} {found['cpu'][0]:.3f}" for found in row["found"])


SPEED = Measurement(
    __doc__, "speed.json", cases, measure, conclude, {"itself": 200, "turns": 200, "times": 20}, rows="", line=line
)

if __name__ == "__main__":
    sys.exit(SPEED.main())
