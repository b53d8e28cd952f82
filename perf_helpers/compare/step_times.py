"""What a step of each of a few recipes takes, measured so that another night's can be held against it.

Seconds of other days differ by the neighbours of that day. So on a CPU a step is taken on one thread, and what counts
is the fastest step of each of several processes, in seconds on the wall less those in which its thread had no core: a
neighbour does not move these, and a step that waits shows in them. Where the system does not tell the latter, it is the
seconds that the process computed. On a GPU the device's own events count.
"""

import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from perf_helpers.course.lesson_process import say
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
# Of each recipe at least, and at most, until its fastest step has been seen twice. Of three processes two agreed now
# and then on what was not the fastest.
PROCESSES = (6, 10)
SEEN_TWICE = 1.02  # the factor within which two processes have seen the same
TIMEOUT_SECONDS = 120  # of one process
CLOCKS = ("passed", "computed")  # of a recipe's seconds; the first that is there counts


def tonight(profile: str) -> dict[str, Any] | None:
    """`measure` at the size for this machine and profile; None in a rehearsal, which has no time. On a CPU the model is
    small: of many short steps the fastest is one that nobody disturbed."""
    machine = hardware.this_machine()
    if machine.rehearsed:
        return None
    say("[speed] a step of each of a few recipes, for comparisons with other days ...")
    task = Task("bert-tiny", seq_len=128) if machine.kind == "cpu" else choose_profile(profile).task
    return measure(task.replace(dataset_size=64))


def measure(task: Task) -> dict[str, Any]:
    """Time every recipe on this machine: {"task", "threads", "recipes": {name: {"arguments", "passed", "computed",
    "message"}}}, the fastest step of each process by one of the two clocks, or why there is none.

    On a CPU two processes run beside each other where there are two cores, so that each always has a neighbour. The
    order goes round the recipes: who disturbs for a while disturbs them alike.
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
            say(f"{name}: {row['message']}")
    return {"task": task.to_dict(), "threads": options["threads"], "recipes": rows}


def keep(row: dict[str, Any], outcome: Outcome, on_cpu: bool) -> None:
    """Add what one more process took to a recipe's row; a recipe that failed once has no seconds."""
    if not row["message"] and outcome.ok:
        timing, waited = outcome.timing, outcome.timing.all_waited_seconds
        if not on_cpu:
            row["passed"].append(min(timing.all_seconds))
        elif len(waited) == timing.steps:
            # Beside two dozen programs the system told of more waiting than there was: half of what was computed is the
            # least that is believed.
            passed = map(operator.sub, timing.all_seconds, waited)
            row["passed"].append(min(map(max, passed, (seconds / 2 for seconds in timing.all_cpu_seconds))))
        else:
            row["computed"].append(min(timing.all_cpu_seconds))
    elif not row["message"]:
        row |= {"passed": [], "computed": [], "message": f"{outcome.status}, {outcome.message}"}


def is_settled(row: dict[str, Any]) -> bool:
    """Whether another process is not needed: two have seen the same fastest step, or one failed."""
    pairs = (sorted(row[clock])[:2] for clock in CLOCKS if row[clock])
    return bool(row["message"]) or all(len(pair) > 1 and pair[1] <= pair[0] * SEEN_TWICE for pair in pairs)


def of_both(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """The seconds of each recipe then and now, by the first clock that both nights have; without recipes that one of
    them lacks or trained with other arguments."""
    found = {}
    for name, now in new["recipes"].items():
        then = old["recipes"].get(name, {"arguments": None})
        clock = next((clock for clock in CLOCKS if all(min(row.get(clock) or [0]) > 0 for row in (then, now))), None)
        if clock and then["arguments"] == now["arguments"]:
            found[name] = then[clock], now[clock]
    return found


def fastest(paces: dict[str, Any] | None) -> Iterator[tuple[str, float]]:
    """(recipe, seconds of its fastest step) of a night, of each recipe that has some."""
    for name, row in ((paces or {}).get("recipes") or {}).items():
        if seconds := next((row[clock] for clock in CLOCKS if row.get(clock)), None):
            yield name, min(seconds)
