"""Time a step of a few fixed recipes, so that course runs of different days can be compared.

Other load on the machine differs from day to day. On a CPU, each step therefore runs on one thread, and the fastest
step of each of several processes counts. A step's time is its wall-clock time less the time in which its thread waited
for a core. Other load does not change this time; sleeping and waiting for data are part of it. If the system does not
report the time of waiting for a core, CPU time is used instead. On a GPU the times come from CUDA events.
"""

import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perf_helpers.course.lesson_process import notify
from trainmem.core import hardware
from trainmem.core.arguments import Arguments
from trainmem.core.outcomes import Outcome
from trainmem.core.task import Task, choose_profile
from trainmem.core.training import Experiment
from trainmem.measure import processes
from trainmem.measure.forkserver import SERVER

WHOLE = {"per_device_train_batch_size": 4}
RECIPES = {
    "vanilla": WHOLE,
    "accumulation": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "checkpointing": WHOLE | {"gradient_checkpointing": True},
    "Adafactor": WHOLE | {"optim": "adafactor"},
    "8-bit Adam": WHOLE | {"optim": "adamw_bnb_8bit"},
    "plain attention": WHOLE | {"attn_implementation": "eager"},
}
STEPS = 16
# Least and greatest number of processes per recipe; between them, measuring ends when two processes agree on the
# fastest step. With three processes, two sometimes agreed on a step that was not the fastest.
PROCESSES = (6, 10)
SEEN_TWICE = 1.02  # the factor within which two processes agree
TIMEOUT_SECONDS = 120  # per process
CLOCKS = ("passed", "computed")  # wall clock less waiting, and CPU time; the first that a recipe has is used


def measure_here(profile: str) -> dict[str, Any] | None:
    """Time every recipe on this machine, and return the result of `measure`; None in a rehearsal, which has no times.

    On a GPU, `profile` (the sizes, e.g. "t4") sets the model. On a CPU the model is tiny, so that the steps are short:
    other load on the machine slows only some of many short steps.
    """
    machine = hardware.this_machine()
    if machine.rehearsed:
        return None
    notify("[speed] a step of each of a few recipes, for comparisons with other days ...")
    task = Task("bert-tiny", seq_len=128) if machine.kind == "cpu" else choose_profile(profile).task
    return measure(task.replace(dataset_size=64))


def measure(task: Task) -> dict[str, Any]:
    """Time a step of every recipe of `RECIPES` on this machine, with the model of a task.

    On a CPU with two cores or more, two processes run at a time, so that each always runs under the same load. The
    recipes alternate, so that other load affects all of them alike.

    Returns:
        {"task", "threads", "recipes": {name: {"arguments", "passed", "computed", "message"}}}. "passed" has, for each
        process, the seconds of its fastest step; on a CPU, the seconds of waiting for a core are subtracted. If the
        system does not report this waiting, "computed" has the CPU seconds of the fastest step instead. If the recipe
        failed, both are [], and "message" says why.
    """
    machine = hardware.this_machine()
    on_cpu = machine.kind == "cpu"
    SERVER.start()
    options = {"steps": STEPS, "warmup_steps": 2, "threads": 1 if on_cpu else None}
    experiments = {name: Experiment(name, task, Arguments.of(given), **options) for name, given in RECIPES.items()}
    rows = {name: {"arguments": RECIPES[name], "passed": [], "computed": [], "message": ""} for name in RECIPES}
    with ThreadPoolExecutor(min(2, machine.cpu_cores or 1) if on_cpu else 1) as pool:
        for number in range(PROCESSES[1]):
            left = [name for name in rows if number < PROCESSES[0] or not is_settled(rows[name])]
            done = pool.map(lambda name: processes.execute(experiments[name], "time", TIMEOUT_SECONDS), left)
            for name, outcome in zip(left, done, strict=True):
                keep(rows[name], outcome, on_cpu)
    for name, row in rows.items():
        if row["message"]:
            notify(f"{name}: {row['message']}")
    return {"task": task.to_dict(), "threads": options["threads"], "recipes": rows}


def keep(row: dict[str, Any], outcome: Outcome, on_cpu: bool) -> None:
    """Add the time of a process's fastest step to its recipe's row; if the process failed, keep only its message.

    Args:
        row: the recipe's entry in the result of `measure`; it is changed.
        outcome: outcome of the process that timed the steps.
        on_cpu: whether the steps ran on a CPU; then the time in which their thread waited for a core is subtracted.
    """
    if not row["message"] and outcome.ok:
        timing, waited = outcome.timing, outcome.timing.all_waited_seconds
        if not on_cpu:
            row["passed"].append(min(timing.all_seconds))
        elif len(waited) == timing.steps:
            # Next to two dozen other programs, the system reported more waiting than there was. The result is therefore
            # never less than half of the CPU time.
            passed = map(operator.sub, timing.all_seconds, waited)
            row["passed"].append(min(map(max, passed, (seconds / 2 for seconds in timing.all_cpu_seconds))))
        else:
            row["computed"].append(min(timing.all_cpu_seconds))
    elif not row["message"]:
        row |= {"passed": [], "computed": [], "message": f"{outcome.status}, {outcome.message}"}


def is_settled(row: dict[str, Any]) -> bool:
    """Return whether a recipe's row is final: its two shortest times agree (`SEEN_TWICE`), or a process failed."""
    pairs = (sorted(row[clock])[:2] for clock in CLOCKS if row[clock])
    return bool(row["message"]) or all(len(pair) > 1 and pair[1] <= pair[0] * SEEN_TWICE for pair in pairs)


def common_seconds(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Return {recipe: (old, new)}: two lists, with the seconds of each process's fastest step in the two course runs.

    Both lists are read from the same clock, the first of `CLOCKS` that has times in both course runs. A recipe is left
    out if there is no such clock, or if the recipe's arguments differ.
    """
    found = {}
    for name, now in new["recipes"].items():
        then = old["recipes"].get(name, {"arguments": None})
        clock = next((clock for clock in CLOCKS if all(min(row.get(clock) or [0]) > 0 for row in (then, now))), None)
        if clock and then["arguments"] == now["arguments"]:
            found[name] = then[clock], now[clock]
    return found


def fastest(paces: dict[str, Any] | None) -> Iterator[tuple[str, float]]:
    """Yield (recipe, seconds of its fastest step) from `paces`, a result of `measure`; nothing if `paces` is None."""
    for name, row in ((paces or {}).get("recipes") or {}).items():
        if seconds := next((row[clock] for clock in CLOCKS if row.get(clock)), None):
            yield name, min(seconds)
