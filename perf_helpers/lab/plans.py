"""What a sweep runs: one training a row, from a grid of arguments or row by row, read from TOML.

Everything is checked when the plan is made, before anything runs: names, values, the model, its sequence length.
"""

import itertools
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from perf_helpers.lab import arguments
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.task import Task
from perf_helpers.texts import nearest_text, whole_number

METERS = ("memory", "time")
OF_THE_TASK = ("model", "seq_len", "dataset_size", "architecture", "data", "config")
OF_THE_PLAN = ("task", "arguments", "grid", "rows", "measure", "steps", "processes", "timeout")
MOST_ROWS = 10_000  # a grid with more of them is a slip: at ten seconds each it would take more than a day


@dataclass(frozen=True)
class Row:
    """One training of a sweep."""

    name: str  # for people: what sets it apart from the others
    task: Task
    arguments: Arguments


@dataclass(frozen=True)
class Plan:
    """The trainings of a sweep, and how each is measured."""

    rows: tuple[Row, ...]
    measure: tuple[str, ...] = METERS
    steps: int | None = None  # optimizer steps that are timed; None: the profile's
    processes: int = 1  # ranks of each training
    timeout: float | None = None  # seconds that one training may take; None: the profile's

    @classmethod
    def read(cls, path: str | PathLike) -> "Plan":
        """The plan in a TOML file, see `of`.

        Raises:
            ValueError: the file cannot be read, is not TOML, or is no plan; in one line that begins with its name.
        """
        try:
            return cls.of(tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Plan":
        """The plan that these tables tell, as they stand in a file.

        Args:
            told: `measure` ("memory", "time" or both), `steps`, `processes` and `timeout` (seconds); the tables `task`
                (names of `Task`), `arguments` (training arguments of every row), `grid` (a list of values for each
                name: every combination is a row) and the list of tables `rows` (one row each, as it stands, with a
                `name`). Grid and rows may name fields of the task too, but for `config`.

        Raises:
            ValueError: an unknown name, with the nearest one that is known; a value that is not taken; no rows; a row
                twice. It says in which table.
        """
        _known(told, OF_THE_PLAN, "a plan")
        task, fixed, grid = (_table(told, name) for name in ("task", "arguments", "grid"))
        _known(task, OF_THE_TASK, "[task]")
        fixed = {name: _value("[arguments]", name, value, in_task=False) for name, value in fixed.items()}
        combinations = [*_combinations(grid, {*task, *fixed}), *_as_they_stand(_rows(told))]
        if not combinations:
            raise ValueError("it has no rows: give lists of values under [grid], or each row under [[rows]]")
        rows = tuple(_row(name, task, fixed, changes) for name, changes in combinations)
        _check_tasks(row.task for row in rows)
        _check_twice(rows)
        return cls(
            rows,
            _measure(told.get("measure", METERS)),
            _count(told, "steps", None),
            _count(told, "processes", 1),
            _seconds(told.get("timeout")),
        )


def _known(table: Mapping[str, Any], allowed: Iterable[str], where: str) -> None:
    for name in table:
        if name not in allowed:
            raise ValueError(f"{where} has no {name!r}. {nearest_text(name, allowed)}")


def _table(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = told.get(name, {})
    if not isinstance(table, Mapping):
        raise ValueError(f"{name}={table!r}: write it as a table, [{name}]")
    return dict(table)


def _rows(told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = told.get("rows", [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError("rows: write each as a table of its own, [[rows]]")
    return rows


def _combinations(grid: dict[str, Any], taken: set[str]) -> list[tuple[str, dict[str, Any]]]:
    """(name, what changes) of every combination of the grid's values, the last name's values changing fastest."""
    number = 1
    for name, values in grid.items():
        if name == "config":
            raise ValueError("[grid] has no 'config': it stands under [task]")
        if name in taken:
            raise ValueError(f"[grid]: {name!r} has one value in another table already: keep one of them")
        if not isinstance(values, list):
            raise ValueError(f"[grid]: {name}={values!r}: give a list of values, as in {name} = [{values!r}]")
        if not values:
            raise ValueError(f"[grid]: {name}=[]: give at least one value")
        grid[name] = [_value("[grid]", name, value) for value in values]
        number *= len(values)
    if number > MOST_ROWS:
        raise ValueError(f"[grid] has {number:,} combinations; {MOST_ROWS:,} rows are the most")
    changing = [name for name, values in grid.items() if len(values) > 1] or [*grid]
    made = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []
    return [(_name({name: each[name] for name in changing}), each) for each in made]


def _as_they_stand(rows: list[Mapping[str, Any]]) -> Iterable[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(rows, start=1):
        where, changes = f"[[rows]] {number}", {name: value for name, value in row.items() if name != "name"}
        changes = {name: _value(where, name, value) for name, value in changes.items()}
        name = row.get("name", _name(changes) or "as it stands")
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}: name={name!r}: give a text")
        yield name, changes


def _name(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def _value(where: str, name: str, value: Any, in_task: bool = True) -> Any:
    """The value of a training argument as transformers' own parser takes it; that of a field of the task as it is."""
    if name in OF_THE_TASK:
        if in_task and name != "config":
            return value
        raise ValueError(f"{where}: {name!r} is no training argument: it stands under [task]")
    if name in OF_THE_PLAN:  # in TOML, what comes after a table's head belongs to that table
        raise ValueError(f"{where}: {name!r} stands in the file's first lines, before any [table]")
    if name == "output_dir":
        raise ValueError(f"{where}: output_dir is not taken: each training has a folder of its own")
    try:
        read = arguments.parse(_words(name, value)).given.get(name, value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return read if isinstance(value, str) and isinstance(read, bool | int | float) else value


def _words(name: str, value: Any) -> list[str]:
    """An argument as it would be typed in a shell."""
    arguments.check_names([name], also=OF_THE_TASK)
    if isinstance(value, Mapping):
        return [f"--{name}={json.dumps(value)}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"{name}={value!r}: give a number, a text, true or false")
    return [f"--{name}={value}"]


def _row(name: str, task: dict[str, Any], fixed: dict[str, Any], changes: dict[str, Any]) -> Row:
    of_task = task | {key: value for key, value in changes.items() if key in OF_THE_TASK}
    of_training = fixed | {key: value for key, value in changes.items() if key not in OF_THE_TASK}
    if "model" not in of_task:
        raise ValueError("[task]: name a model, as in model = 'bert-tiny'")
    for key, kind in (("model", str), ("architecture", str), ("config", Mapping), ("data", str)):
        if key in of_task and not isinstance(of_task[key], kind):
            raise ValueError(f"{key}={of_task[key]!r}: give a {'table' if kind is Mapping else 'text'}")
    try:
        return Row(name, Task(**of_task), Arguments.of(of_training))
    except ValueError as error:
        raise ValueError(f"row {name!r}: {error}") from None


def _check_tasks(tasks: Iterable[Task]) -> None:
    for task in {repr(task): task for task in tasks}.values():
        task.family()
        task.length()


def _check_twice(rows: Iterable[Row]) -> None:
    seen: dict[str, str] = {}
    for row in rows:
        training = f"{row.task!r} {sorted(row.arguments.current.items())!r}"
        if training in seen:
            raise ValueError(f"rows {seen[training]!r} and {row.name!r} are the same training: keep one of them")
        seen[training] = row.name


def _measure(told: Any) -> tuple[str, ...]:
    meters = (told,) if isinstance(told, str) else tuple(told) if isinstance(told, list | tuple) else ()
    if not meters or set(map(str, meters)) - set(METERS) or len(set(meters)) < len(meters):
        raise ValueError(f"measure={told!r}: choose 'memory', 'time' or both, as in measure = ['memory', 'time']")
    return meters


def _count(told: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = told.get(name, default)
    return value if value is None else whole_number(name, value)


def _seconds(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ValueError(f"timeout={value!r}: give the seconds that one training may take")
    return value
