"""A sweep: the trainings of a plan, on as many workers as there are, kept in the lab's store, gone on with later."""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import as_completed
from dataclasses import dataclass
from os import PathLike
from typing import Any

from perf_helpers import plots
from perf_helpers.lab import executors
from perf_helpers.lab.dask_executor import TELLING
from perf_helpers.lab.lab import Lab
from perf_helpers.lab.outcomes import Outcome
from perf_helpers.lab.plans import Plan
from perf_helpers.lab.training import Experiment
from perf_helpers.records import Run


@dataclass(frozen=True)
class Sweep:
    """What became of the rows of a plan."""

    runs: tuple[Run, ...]  # one a row, in the plan's order
    reused: frozenset[str]  # ids of runs that were in the store before
    store: str  # the file that has them all

    @property
    def ok(self) -> bool:
        """Whether every row trained."""
        return all(run.ok for run in self.runs)

    def table(self) -> plots.Table:
        """The rows side by side: status, memory, speed, and where each was performed."""
        shown = plots.table(self.runs, f"{len(self.runs)} trainings, kept in {self.store}")
        several = len({run.machine.get("name") for run in self.runs}) > 1
        shown.header += ["performed by", *["machine"] * several]
        for row, run in zip(shown.rows, self.runs, strict=True):
            row += [self._performed(run), *[run.machine.get("name", "")] * several]
        return shown

    def _performed(self, run: Run) -> str:
        times = {2: ", second attempt"}.get(len(run.attempts), "")
        worker = run.attempts[-1]["worker"] if run.attempts else "this process"
        return f"{worker}{times}{' (earlier)' * (run.id in self.reused)}"

    def failures(self) -> list[str]:
        """A line for each row that did not train, with the reason."""
        return [f"{run.name}: {run.status}, {run.message}" for run in self.runs if not run.ok]

    def __repr__(self) -> str:
        return "\n".join([repr(self.table()), *self.failures()])

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """For JSON: every run as it stands in the store, and whether it was there before."""
        runs = [run.to_dict() | {"reused": run.id in self.reused} for run in self.runs]
        return {"status": "ok" if self.ok else "failed", "store": self.store, "reused": len(self.reused), "runs": runs}


def run(
    lab: Lab,
    plan: Plan | Mapping[str, Any] | str | PathLike,
    *,
    tell: Callable[[str], Any] = lambda line: None,
) -> Sweep:
    """Perform the rows of a plan: by the lab's executor, as many at once as that can; one after another without one.

    A row that trained before on the same task, arguments and versions, and on a machine that is here too, is not
    trained again: its run is in the lab's store. So a sweep that was interrupted goes on where it was. Every run is
    stored the moment it is known, by this process: workers need no folder in common.

    Args:
        lab: `Lab(executor=cluster.Workers(client))` for a cluster. Its `runs` get those of the sweep.
        plan: or a file, or tables, that tell one: `Plan.read`, `Plan.of`.
        tell: called with a line for people as the sweep goes on.

    Raises:
        ValueError: no plan; or no workers can be had.
    """
    if not isinstance(plan, Plan):
        plan = Plan.of(plan) if isinstance(plan, Mapping) else Plan.read(plan)
    experiments = [_experiment(lab, plan, row) for row in plan.rows]
    known = _known(lab, plan, experiments)
    if known:
        reason = "trained before on the same task, arguments, versions and machine"
        tell(f"{len(known)} of {len(experiments)} rows are in {lab.store.path} ({reason}): not trained again")
    found = dict(known)
    missing = {number: each for number, each in enumerate(experiments) if number not in known}
    try:
        for number, outcome in _outcomes(lab, plan, missing):
            found[number] = run = lab.keep(experiments[number], _final(outcome))
            tell(f"{len(found)}/{len(experiments)} {run!r}")
    except KeyboardInterrupt:
        done = f"{len(found)} of {len(experiments)} rows are in {lab.store.path}"
        tell(f"interrupted: {done}; the same sweep goes on from there")
        raise
    reused = frozenset(run.id for run in known.values())
    return Sweep(tuple(found[number] for number in range(len(experiments))), reused, str(lab.store.path))


def _experiment(lab: Lab, plan: Plan, row) -> Experiment:
    return Experiment(
        name=row.name,
        task=row.task,
        arguments=row.arguments,
        processes=plan.processes,
        steps=plan.steps or lab.profile.steps,
        warmup_steps=lab.profile.warmup_steps,
    )


def _outcomes(lab: Lab, plan: Plan, experiments: dict[int, Experiment]) -> Iterator[tuple[int, Outcome]]:
    """(number of the row, outcome), each as soon as it is known."""
    timeout = plan.timeout or lab.timeout
    if lab.executor is None:
        for number, experiment in experiments.items():
            yield number, executors.measure(experiment, plan.measure, timeout)
        return
    asked = (plan.measure, timeout)
    futures = {
        executors.submit(lab.executor, executors.measure, each, *asked): number for number, each in experiments.items()
    }
    try:
        for future in as_completed(futures):
            yield futures[future], executors.outcome_of(future)
    finally:  # interrupted, or no workers can be had: what nobody waits for is ended
        for future in futures:
            future.cancel()


def _final(outcome: Outcome) -> Outcome:
    """What the libraries refuse is an exception for who asks for one training; of a sweep it is one row's status."""
    return outcome.replace(status="refused") if outcome.status in ("invalid", "needs values") else outcome


def _known(lab: Lab, plan: Plan, experiments: list[Experiment]) -> dict[int, Run]:
    """By the number of the row: the latest run in the store that has what the row asks for."""
    places_here = getattr(lab.executor, "seen", lambda: [(lab.machine, lab.versions)])()
    here = {(machine.name, _telling(versions)) for machine, versions in places_here}
    stored = {
        _identity(run.task, run.arguments, run.processes): run
        for run in lab.store.read()
        if run.ok and run.kind == "training" and (run.machine.get("name"), _telling(run.versions)) in here
    }
    found = {}
    for number, experiment in enumerate(experiments):
        asked = (experiment.task.to_dict(), experiment.arguments.given, experiment.processes)
        run = stored.get(_identity(*asked))
        if run and _has(run, plan, experiment):
            found[number] = run
    return found


def _identity(task: Mapping[str, Any], arguments: Mapping[str, Any], processes: int) -> str:
    return json.dumps([task, arguments, processes], sort_keys=True, default=str)


def _telling(versions: Mapping[str, str | None]) -> tuple[str | None, ...]:
    return tuple(versions.get(name) for name in TELLING)


def _has(run: Run, plan: Plan, experiment: Experiment) -> bool:
    """Whether a run has all that the row is measured for, over as many steps."""
    told = {"max_steps", "num_train_epochs"} & experiment.arguments.given.keys()  # these say how many
    as_long = run.timing and (told or run.timing.steps == experiment.steps)
    return bool(("memory" not in plan.measure or run.memory) and ("time" not in plan.measure or as_long))
