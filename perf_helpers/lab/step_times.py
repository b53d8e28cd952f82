"""The pace of a few recipes: what one step takes, measured so that another day's can be held against it.

Seconds of other days differ by the neighbours of that day. So on a CPU a step is taken on one thread, and what counts
is the fastest step of each of several processes, by two clocks that a neighbour does not move: seconds that the process
computed, and seconds on the wall less those in which its thread had no core. The second one also sees a step that
waits. On a GPU the device's own events count.
"""

import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from perf_helpers.lab import hardware, processes
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.forkserver import SERVER
from perf_helpers.lab.outcomes import Outcome
from perf_helpers.lab.task import Task
from perf_helpers.lab.training import Experiment

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


@dataclass(frozen=True, slots=True)
class Pace:
    """The fastest step of each process, in seconds."""

    computed: tuple[float, ...] = ()  # by the processor's clock; on a GPU none
    passed: tuple[
        float, ...
    ] = ()  # on the wall, less what the thread waited for a core; on a GPU by the device's events
    message: str = ""  # why there are none

    def joined(self, outcome: Outcome, on_cpu: bool) -> "Pace":
        """With one more process."""
        if self.message or not outcome.ok:
            return Pace(message=self.message or f"{outcome.status}, {outcome.message}")
        timing = outcome.timing
        computed = min(timing.all_cpu_seconds) if on_cpu else None
        waited = timing.all_waited_seconds if on_cpu else (0.0,) * timing.steps
        passed = min(map(operator.sub, timing.all_seconds, waited)) if len(waited) == timing.steps else None
        return Pace(self.computed + ((computed,) if computed else ()), self.passed + ((passed,) if passed else ()))

    @property
    def is_settled(self) -> bool:
        """Whether another process is not needed: two have seen the same fastest step, or one failed."""
        pairs = (sorted(seconds)[:2] for seconds in (self.computed, self.passed) if seconds)
        return bool(self.message) or all(len(pair) > 1 and pair[1] <= pair[0] * SEEN_TWICE for pair in pairs)


def measure(task: Task, say: Callable[[str], None] = lambda text: None, timeout: float = 120) -> dict[str, Any]:
    """Time every recipe on this machine: {"task", "threads", "recipes": {name: {"arguments", "computed", ...}}}.

    On a CPU two processes run beside each other where there are two cores, so that each always has a neighbour. The
    order goes round the recipes: who disturbs for a while disturbs them alike. A recipe is timed in more processes
    until two agree on its fastest step.

    Args:
        task: what is trained.
        say: told of a recipe that fails.
        timeout: seconds that one process may take.
    """
    machine = hardware.this_machine()
    on_cpu = machine.kind == "cpu"
    SERVER.start()
    options = {"steps": STEPS, "warmup_steps": 2, "threads": 1 if on_cpu else None}
    experiments = {name: Experiment(name, task, Arguments.of(given), **options) for name, given in RECIPES.items()}
    paces = dict.fromkeys(experiments, Pace())
    with ThreadPoolExecutor(min(2, machine.cpu_cores or 1) if on_cpu else 1) as pool:
        for number in range(PROCESSES[1]):
            left = [name for name in paces if number < PROCESSES[0] or not paces[name].is_settled]
            done = pool.map(lambda name: processes.execute(experiments[name], "time", timeout), left)
            for name, outcome in zip(left, done, strict=True):
                paces[name] = paces[name].joined(outcome, on_cpu)
    for name, pace in paces.items():
        if pace.message:
            say(f"{name}: {pace.message}")
    rows = {name: {"arguments": RECIPES[name]} | asdict(pace) for name, pace in paces.items()}
    return {"task": task.to_dict(), "threads": options["threads"], "recipes": rows}
