"""Lessons in a rehearsal: what needs values is left out of a cell and told; the course, several machines at a time."""

import ast
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from perf_helpers.cards import Card, card
from perf_helpers.course.course import find_lessons
from perf_helpers.course.results import load_results, problems
from perf_helpers.rehearsal import build
from perf_helpers.rehearsal.rehearsal_process import command
from perf_helpers.unknown import NeedsValues, Unknown

TOLD = "cannot be rehearsed: needs values"  # how the line begins that stands where a statement was left out
_ADDING = {"append", "extend", "insert", "add", "update", "setdefault"}
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


class _NoAttributeKnown(NeedsValues, AttributeError):
    """Both, so that code that only asks whether there is such an attribute hears no."""


class Unassigned(Unknown):
    """What a statement that could not be rehearsed would have assigned: unknown, and maybe not even a number."""

    __slots__ = ()

    def __getattr__(self, name: str):
        raise _NoAttributeKnown(self.why)

    __call__ = __getitem__ = __setitem__ = __iter__ = __len__ = __contains__ = __enter__ = __exit__ = Unknown._refuse


class Guard(ast.NodeTransformer):
    """Puts each statement of a cell under `__rehearsed__` (see `install`), which ends it where it needs values."""

    def visit_Module(self, module: ast.Module) -> ast.Module:
        module.body = [part for node in module.body for part in _guarded(node)]
        return module


def _guarded(node: ast.stmt) -> list[ast.stmt]:
    if isinstance(node, _DEFINITIONS):
        return [node]
    if not isinstance(node, ast.Expr):
        (guard,) = ast.parse(f"with __rehearsed__({node.lineno}, {_changed(node)!r}): ...").body
        guard.body = [node]
        return [guard]
    # An expression has to follow, for a cell displays its last one; what it shows is not held.
    source = f"with __rehearsed__({node.lineno}, []) as __shown__: __shown__.append(0)\n__shown__.pop()"
    guard, shown = ast.parse(source).body
    guard.body[0].value.args = [node.value]
    return [guard, shown]


def _changed(statement: ast.stmt) -> list[str]:
    """The names that a statement assigns or whose parts it assigns: how far it came before it ended is not known."""
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING:
            node = node.func
        elif not isinstance(getattr(node, "ctx", None), ast.Store):
            continue
        while isinstance(node, ast.Subscript | ast.Attribute | ast.Starred):
            node = node.value
        if isinstance(node, ast.Name):
            names.add(node.id)
    return sorted(names)


def needs_values(error: BaseException | None) -> NeedsValues | None:
    """The `NeedsValues` that is the reason of an error, if one is."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, NeedsValues):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def install(shell) -> None:
    """Guard the cells of an IPython shell."""

    @contextlib.contextmanager
    def rehearsed(line: int, names: list[str]) -> Iterator[list]:
        try:
            yield [None]
        except Exception as error:
            if (reason := needs_values(error)) is None:
                raise
            print(f"{TOLD} (line {line} of this cell: {reason})")
            shell.user_ns.update((name, Unassigned(f"{name} could not be rehearsed")) for name in names)

    shell.ast_transformers.append(Guard())
    shell.user_ns["__rehearsed__"] = rehearsed


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that the course is rehearsed on."""

    name: str  # of its folder
    card: Card  # with the number of its devices
    profile: str  # as `Lab` takes it
    core: tuple[str, ...]  # the lessons that CI rehearses: each branch for one GPU at least once, in a few minutes
    lessons: tuple[str, ...] = ()  # those that it is for; none named: all of them


MACHINES = (
    Machine("gpu-9.0", card("h100"), "gpu", core=("01", "07")),
    Machine("gpu-8.0", card("a100"), "gpu", core=()),
    Machine("t4", card("t4"), "t4", core=("03", "09")),
    Machine("two-gpus", card("a100", devices=2), "gpu", core=("17",), lessons=("15", "16", "17", "18")),
)


def rehearse_lessons(wanted: str = "all", out: str | Path = "build/rehearsal") -> list[str]:
    """Run lessons on every machine of `MACHINES`, and say what happened.

    Args:
        wanted: "all", "core", or the lessons' numbers ("05,06").
        out: folder; each machine has one in it, as `perf-helpers course` leaves it.

    Returns:
        What failed, one line each: an exception other than for want of values (with lesson, cell and line), a verdict
        that the ledger does not expect, a machine on which nothing ran.

    Raises:
        ValueError: a lesson that does not exist.
    """
    if wanted not in ("all", "core"):
        find_lessons(wanted.split(","))
    build.library(build.set_up())  # once, before the machines ask for it
    with ThreadPoolExecutor(2) as pool:
        failed = pool.map(lambda machine: _rehearsed(machine, wanted, Path(out) / machine.name), MACHINES)
        return [line for lines in failed for line in lines]


def _rehearsed(machine: Machine, wanted: str, folder: Path) -> list[str]:
    """What failed of the lessons wanted on one machine, one line each."""
    lessons = machine.core if wanted == "core" else wanted.split(",")
    lessons = machine.lessons if wanted == "all" else [x for x in lessons if x in (machine.lessons or lessons)]
    if wanted != "all" and not lessons:
        return []
    with command(machine.card) as (python, environment):
        words = [python, "-m", "perf_helpers.cli", "course", *lessons, "--profile", machine.profile, "--out", folder]
        environment |= {"OMP_NUM_THREADS": "1"}  # threads that wait take the time of the machine beside
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with subprocess.Popen(words, env=environment, text=True, **pipes) as process:
            for line in process.stderr:
                _say(machine, line)
    try:
        data = load_results(folder)
    except ValueError as error:
        return [f"{machine.name}: {error}"]
    for lesson in data["lessons"]:
        if count := left_out(folder / f"{lesson['name']}.ipynb"):
            _say(machine, f"{lesson['name']}: {count} statements need values")
    return [f"{machine.name}: {problem}" for problem in problems(data)]


def _say(machine: Machine, text: str) -> None:
    sys.stderr.write(f"{machine.name:>8}  {text.rstrip()}\n")  # in one piece: machines speak at the same time


def left_out(notebook: Path) -> int:
    """How many statements of an executed notebook were left out, for they need values; 0 for one that is not there."""
    return notebook.read_text(encoding="utf-8").count(f"{TOLD} (line ") if notebook.exists() else 0
