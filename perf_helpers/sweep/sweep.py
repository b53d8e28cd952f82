"""Run the trainings of a plan on all available workers; a `Lab`'s store keeps the runs, so that a sweep can continue.

A plan is a grid of arguments, or a list of rows, read from TOML. Names, values, the model and its sequence length are
checked when the plan is made, before anything runs.
"""

import itertools
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import as_completed
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from perf_helpers import plots
from perf_helpers.lab.lab import Lab
from perf_helpers.sweep.dask_workers import DECISIVE_PACKAGES
from trainmem.core import arguments
from trainmem.core.arguments import Arguments
from trainmem.core.outcomes import Outcome
from trainmem.core.task import Task
from trainmem.core.training import Experiment
from trainmem.measure import executors
from trainmem.records import Run
from trainmem.texts import check_known, positive, reading, shown, text_of, whole_number

METERS = ("memory", "time")
TASK_FIELDS = ("model", "seq_len", "dataset_size", "architecture", "data", "config")
TASK_FIELDS += ("image_size", "audio_seconds", "objective")
PLAN_FIELDS = ("task", "arguments", "grid", "rows", "measure", "steps", "processes", "timeout")
MOST_ROWS = 10_000  # a larger grid is probably a mistake: at ten seconds per row it would take more than a day


@dataclass(frozen=True)
class Plan:
    """The trainings of a sweep, and how to measure each."""

    rows: tuple[Experiment, ...]  # `run` sets how many steps each takes
    measure: tuple[str, ...] = METERS
    steps: int | None = None  # timed optimizer steps; None: the profile's
    timeout: float | None = None  # seconds per training; None: the profile's

    @classmethod
    def read(cls, path: str | PathLike) -> "Plan":
        """Read a plan from a TOML file; the docstring of `Plan.of` lists the tables that the file may have.

        Raises:
            ValueError: the file cannot be read, is not TOML, or is not a plan; the message begins with its path.
        """
        with reading(path, "TOML", "a plan in TOML"):
            tables = tomllib.loads(text_of(Path(path)))
        try:
            return cls.of(tables)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def of(cls, tables: Mapping[str, Any]) -> "Plan":
        """Make a plan from the tables of a plan file.

        Args:
            tables: `measure` ("memory", "time" or both), `steps`, `processes` and `timeout` (seconds); the tables
                `task` (fields of `Task`), `arguments` (training arguments of every row) and `grid` (a list of values
                per name; every combination is a row); and the list of tables `rows` (one row each, with an optional
                `name`). `grid` and `rows` may set fields of the task too, except `config`.

        Raises:
            ValueError: an unknown name, an invalid value, no rows, or a repeated row; the message names the table.
        """
        check_known("a plan", tables, PLAN_FIELDS)
        task, fixed, grid = (_table(tables, name) for name in ("task", "arguments", "grid"))
        check_known("[task]", task, TASK_FIELDS)
        fixed = {name: _value("[arguments]", name, value, in_task=False) for name, value in fixed.items()}
        combinations = [*_combinations(grid, {*task, *fixed}), *_listed(_rows(tables))]
        if not combinations:
            raise ValueError("the plan has no rows: give lists of values under [grid], or each row under [[rows]]")
        processes = whole_number("processes", tables.get("processes", 1))
        rows = tuple(_row(name, task, fixed, changes, processes) for name, changes in combinations)
        _check(rows)
        kinds = {"steps": whole_number, "timeout": positive}
        lengths = {name: check(name, tables[name]) for name, check in kinds.items() if tables.get(name) is not None}
        return cls(rows, _measure(tables.get("measure", METERS)), **lengths)


@dataclass(frozen=True)
class Sweep:
    """The results of a sweep: a run per row of the plan, and which of the runs an earlier sweep had stored."""

    runs: tuple[Run, ...]  # one per row, in the plan's order
    reused: frozenset[str]  # ids of runs that were in the store before the sweep
    store: str  # path of the file that keeps the runs

    @property
    def ok(self) -> bool:
        """Return whether the training of every row ended without an error."""
        return all(run.ok for run in self.runs)

    def table(self) -> plots.Table:
        """Return a table with a row per training: its status, memory and speed, and the worker that ran it."""
        shown = plots.table(self.runs, f"{len(self.runs)} trainings, kept in {self.store}")
        several = len({run.machine.get("name") for run in self.runs}) > 1
        shown.header += ["worker", *["machine"] * several]
        for row, run in zip(shown.rows, self.runs, strict=True):
            row += [self._performed(run), *[run.machine.get("name", "")] * several]
        return shown

    def _performed(self, run: Run) -> str:
        times = {2: ", second attempt"}.get(len(run.attempts), "")
        worker = run.attempts[-1]["worker"] if run.attempts else "this process"
        return f"{worker}{times}{' (earlier)' * (run.id in self.reused)}"

    def failures(self) -> list[str]:
        """Return one line per row that did not train: its name, status and reason."""
        return [f"{run.name}: {run.status}, {run.message}" for run in self.runs if not run.ok]

    def __repr__(self) -> str:
        return "\n".join([repr(self.table()), *self.failures()])

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Return {"status", "store", "reused": count of reused runs, "runs"} for JSON; a run has a boolean "reused"."""
        runs = [run.to_dict() | {"reused": run.id in self.reused} for run in self.runs]
        return {"status": "ok" if self.ok else "failed", "store": self.store, "reused": len(self.reused), "runs": runs}


def run(
    lab: Lab,
    plan: Plan | Mapping[str, Any] | str | PathLike,
    *,
    tell: Callable[[str], Any] = lambda line: None,
) -> Sweep:
    """Run a plan's rows (in parallel if the lab has an executor, else one by one); return a `Sweep` with a run per row.

    A row is not repeated if the lab's store has a run of the same task, arguments and package versions, on a machine
    that is available now. An interrupted sweep therefore continues when it is run again. This process stores each run
    as soon as it ends, so workers need no common folder.

    Args:
        lab: runs the rows; use `Lab(executor=Workers(client))` for a cluster. `lab.runs` gets the sweep's runs.
        plan: a `Plan`, the path of a plan file (`Plan.read`), or its tables (`Plan.of`).
        tell: called with a line of text about the progress.

    Raises:
        ValueError: an invalid plan, or no worker is available.
    """
    if not isinstance(plan, Plan):
        plan = Plan.of(plan) if isinstance(plan, Mapping) else Plan.read(plan)
    lengths = {"steps": plan.steps or lab.profile.steps, "warmup_steps": lab.profile.warmup_steps}
    experiments = [row.replace(**lengths) for row in plan.rows]
    known = _known(lab, plan, experiments)
    if known:
        reason = "trained before on the same task, arguments, versions and machine"
        tell(f"{len(known)} of {len(experiments)} rows are taken from {lab.store.path} ({reason})")
    found = dict(known)
    missing = {number: each for number, each in enumerate(experiments) if number not in known}
    try:
        for number, outcome in _outcomes(lab, plan, missing):
            if outcome.status in ("invalid", "needs values"):  # a single training raises an exception for these
                outcome = outcome.replace(status="refused")
            found[number] = run = lab.keep(experiments[number], outcome)
            tell(f"{len(found)}/{len(experiments)} {run!r}")
    except KeyboardInterrupt:
        done = f"{len(found)} of {len(experiments)} rows are saved in {lab.store.path}"
        tell(f"interrupted: {done}. Run the same command to continue")
        raise
    reused = frozenset(run.id for run in known.values())
    return Sweep(tuple(found[number] for number in range(len(experiments))), reused, str(lab.store.path))


def _outcomes(lab: Lab, plan: Plan, experiments: dict[int, Experiment]) -> Iterator[tuple[int, Outcome]]:
    """Run the rows `experiments`, {number of the row: experiment}; yield (number, outcome) as soon as each row ends."""
    timeout = plan.timeout or lab.timeout
    if lab.executor is None:
        for number, experiment in experiments.items():
            yield number, executors.measure(experiment, plan.measure, timeout)
        return
    options = (plan.measure, timeout)
    futures = {
        executors.submit(lab.executor, executors.measure, each, *options): number
        for number, each in experiments.items()
    }
    try:
        for future in as_completed(futures):
            yield futures[future], executors.outcome_of(future)
    finally:  # after an interrupt, or if there are no workers, end the calls that have not finished
        for future in futures:
            future.cancel()


def _known(lab: Lab, plan: Plan, experiments: list[Experiment]) -> dict[int, Run]:
    """Return {index in `experiments`: stored run} for the rows of the plan that need not run again."""
    places_here = getattr(lab.executor, "seen", lambda: [(lab.machine, lab.versions)])()
    current = {(machine.name, _decisive_versions(versions)) for machine, versions in places_here}  # available now
    stored: dict[str, dict[str, Run]] = {}  # {experiment: {name: run}}, the latest run last
    for run in lab.store.read():
        if run.ok and (run.machine.get("name"), _decisive_versions(run.versions)) in current:
            runs = stored.setdefault(run.experiment, {})
            runs.pop(run.name, None)
            runs[run.name] = run
    found = {}
    for number, experiment in enumerate(experiments):
        of_row = {"task": experiment.task.to_dict(), "arguments": dict(experiment.arguments.given)}
        runs = stored.get(Run(experiment.name, "asked for", processes=experiment.processes, **of_row).experiment, {})
        run = runs.get(experiment.name) or next(reversed(runs.values()), None)  # of the same name, or the latest
        if run and _has(run, plan, experiment):
            found[number] = run
    return found


def _decisive_versions(versions: Mapping[str, str | None]) -> tuple[str | None, ...]:
    return tuple(versions.get(name) for name in DECISIVE_PACKAGES)


def _has(run: Run, plan: Plan, experiment: Experiment) -> bool:
    """Return whether a run has all measurements that the plan requests, over the steps that `experiment` requests."""
    sets_length = {"max_steps", "num_train_epochs"} & experiment.arguments.given.keys()
    as_long = run.timing and (sets_length or run.timing.steps == experiment.steps)
    return bool(("memory" not in plan.measure or run.memory) and ("time" not in plan.measure or as_long))


# --------------------------------------------------------------------------------------------------- reading a plan


def _table(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, Mapping):
        raise ValueError(f"{name}={shown(table)} is not a table: write it as [{name}]")
    return dict(table)


def _rows(tables: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = tables.get("rows", [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError("rows is not a list of tables: write each row under its own [[rows]]")
    return rows


def _combinations(grid: dict[str, Any], taken: set[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, {setting: value}) for every combination of the grid's values; the last setting varies fastest.

    Args:
        grid: {setting: list of values}; each list is replaced by its checked and converted values.
        taken: settings of the plan's other tables, which the grid must not repeat.
    """
    for name, values in grid.items():
        if name == "config":
            raise ValueError("[grid] cannot have 'config': move it to [task]")
        if name in taken:
            raise ValueError(f"[grid]: {name!r} is set in another table too: keep one of the two")
        if not isinstance(values, list):
            raise ValueError(f"[grid]: {name}={values!r}: give a list of values, e.g. {name} = [{values!r}]")
        if not values:
            raise ValueError(f"[grid]: {name}=[]: give at least one value")
        grid[name] = [_value("[grid]", name, value) for value in values]
    if (number := math.prod(map(len, grid.values()))) > MOST_ROWS:
        raise ValueError(f"[grid] has {number:,} combinations: give at most {MOST_ROWS:,}")
    changing = [name for name, values in grid.items() if len(values) > 1] or [*grid]
    made = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []
    return [(_name({name: each[name] for name in changing}), each) for each in made]


def _listed(rows: list[Mapping[str, Any]]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield (name, {setting: value}) of each row under [[rows]]; raise ValueError, naming the row, if it is invalid."""
    for number, row in enumerate(rows, start=1):
        place, changes = f"[[rows]] {number}", {name: value for name, value in row.items() if name != "name"}
        changes = {name: _value(place, name, value) for name, value in changes.items()}
        name = row.get("name", _name(changes) or "no changes")
        if not isinstance(name, str) or not name:
            raise ValueError(f"{place}: name={shown(name)}: give a text")
        yield name, changes


def _name(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def _value(place: str, name: str, value: Any, in_task: bool = True) -> Any:
    """Return a plan's value, checked and converted; raise ValueError if the name or the value is not accepted.

    `place`: the table of the value, for messages; `in_task`: whether `name` may be a field of the task, too.
    """
    if name in TASK_FIELDS:
        if in_task and name != "config":
            return value
        raise ValueError(f"{place}: {name!r} is not a training argument: give it under [task]")
    if name in PLAN_FIELDS:  # in TOML, a key below a table's header belongs to that table
        raise ValueError(f"{place}: {name!r} does not belong here: give it at the top of the file, before any [table]")
    if name == "output_dir":
        raise ValueError(f"{place}: output_dir cannot be set, each training has its own folder: leave it out")
    try:
        arguments.check_names([name], also=TASK_FIELDS)
        if not isinstance(value, str):
            return Arguments.of({name: value}).given.get(name)
        read = arguments.parse([f"--{name}={value}"]).given.get(name)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    # A text becomes the number or the boolean that transformers' parser reads in it.
    return read if isinstance(read, bool | int | float) else value


def _row(name: str, task: dict[str, Any], fixed: dict[str, Any], changes: dict[str, Any], processes: int) -> Experiment:
    of_task = task | {key: value for key, value in changes.items() if key in TASK_FIELDS}
    of_training = fixed | {key: value for key, value in changes.items() if key not in TASK_FIELDS}
    if "model" not in of_task:
        raise ValueError("[task] has no model: name one, e.g. model = 'bert-tiny'")
    try:
        return Experiment(name, Task(**of_task), Arguments.of(of_training), processes=processes)
    except ValueError as error:
        raise ValueError(f"row {name!r}: {error}") from None


def _check(rows: Iterable[Experiment]) -> None:
    """Raise ValueError for an unknown model, a length that the model does not support, or a repeated training."""
    tasks, names = {}, {}
    for row in rows:
        task = repr(row.task)
        training = f"{task} {sorted(row.arguments.current.items())!r}"
        if training in names:
            raise ValueError(f"rows {names[training]!r} and {row.name!r} are the same training: keep one of them")
        tasks[task], names[training] = row.task, row.name
    for task in tasks.values():
        task.family()
        task.length()


def _measure(value: Any) -> tuple[str, ...]:
    meters = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not meters or set(map(str, meters)) - set(METERS) or len(set(meters)) < len(meters):
        raise ValueError(f"measure={shown(value)}: choose 'memory', 'time' or both, e.g. measure = ['memory', 'time']")
    return meters
