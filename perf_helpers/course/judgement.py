"""Whether an executed lesson is ok: the checks that papermill does not make.

Notable: papermill's word is not trusted. A killed kernel leaves cells that never ran marked as completed, and an error
in a widget's callback leaves the notebook green. So each executed notebook is read again, and a lesson is ok only if
every cell ran, nothing raised, and its results are there, complete and its own.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from perf_helpers.course.ledger import LESSONS_WITHOUT_CLAIMS
from perf_helpers.course.results import UNDECIDED

WIDGETS = "application/vnd.jupyter.widget-state+json"

Cell = dict[str, Any]  # as nbformat has it
Notebook = dict[str, Any]


class Judgement(NamedTuple):
    """What became of a lesson."""

    status: str  # "ok", "failed", "crashed" or "timed out"
    message: str  # what went wrong, and where; empty if it is ok
    record: dict[str, Any]  # the lesson's own JSON if it is complete and its own, also where it then failed; else {}


def judge(name: str, folder: Path, code: int | None, timeout: float = 0) -> Judgement:
    """Judge an executed lesson by what it left in its folder: <name>.ipynb, <name>.json and <name>.log.

    Args:
        name: of the lesson.
        folder: the course's output.
        code: papermill's exit code; None if it was killed after `timeout` seconds.
    """
    record, trouble = _record(name, folder / f"{name}.json")
    notebook, log = _notebook(folder / f"{name}.ipynb"), folder / f"{name}.log"
    cells = code_cells(notebook)
    if code is None:
        cell = running(cells)
        where = first_line(cell) if cell else "no cell"
        return Judgement("timed out", f"killed after {timeout:g} s in: {where}", record)
    if notebook is None:
        return Judgement("crashed", f"no executed notebook (exit code {code}); {_last_line(log)}", record)
    if raised := _raised(cells):
        return Judgement("failed", raised, record)
    if died := _died(cells, code, log):
        return Judgement("crashed", died, record)
    if errors := widget_errors(notebook):
        return Judgement("failed", f"in a widget: {errors[0]}", record)
    return Judgement("failed" if trouble else "ok", trouble, record)


def widget_errors(notebook: Notebook) -> list[str]:
    """What the callbacks of an executed notebook's widgets raised, from the state that is kept in it."""
    widgets = notebook["metadata"].get("widgets", {}).get(WIDGETS, {}).get("state", {}).values()
    return [error for widget in widgets for error in _errors(widget.get("state", {}).get("outputs", ()))]


def code_cells(notebook: Notebook | None) -> list[Cell]:
    """The cells of a notebook that have code to run; none of one that is not there."""
    cells = notebook["cells"] if notebook else []
    return [cell for cell in cells if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]


def running(cells: list[Cell]) -> Cell | None:
    """The cell that was running when papermill last wrote the notebook; it does when a cell begins."""
    return next((cell for cell in cells if cell["metadata"].get("papermill", {}).get("status") == "running"), None)


def first_line(cell: Cell) -> str:
    """The first line of a cell's source, to name the cell by."""
    return "".join(cell["source"]).strip().splitlines()[0]


def _record(name: str, path: Path) -> tuple[dict[str, Any], str]:
    """The lesson's own JSON, and why it cannot be used ({} then) or decides nothing; "" where all is well."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=str)  # "NaN": a diverged loss, not unknown
        complete, lesson, runs = record["complete"], record["lesson"], record["runs"]
        decided = [claim["id"] for claim in record["claims"] if claim["verdict"] != UNDECIDED]
    except FileNotFoundError:
        return {}, f"it wrote no {path.name}: its last cell is claims.finish(lab)"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return {}, f"{path.name} is damaged ({type(error).__name__}: {error})"
    if not complete or lesson != name or not isinstance(runs, list):
        return {}, f"{path.name} is {f'that of {lesson}' if complete else 'not complete'}: in the lesson, Lab({name!r})"
    # A rehearsal decides by memory alone, and some lessons have no such claim.
    excused = name[:2] in LESSONS_WITHOUT_CLAIMS or record.get("machine", {}).get("rehearsed")
    return record, "" if decided or excused else "it decided no claim"


def _notebook(path: Path) -> Notebook | None:
    """The executed notebook; None where it is not there, or was cut off."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        code_cells(notebook)
    except (OSError, ValueError, LookupError):
        return None
    return notebook


def _raised(cells: list[Cell]) -> str:
    """The first exception in a cell, with the cell's number and line; "" where none was raised."""
    for cell in cells:
        if errors := _errors(cell["outputs"]):
            return f"In [{cell['execution_count']}]{_line(cell['outputs'])}: {errors[0]}"
    return ""


def _died(cells: list[Cell], code: int, log: Path) -> str:
    """How the kernel died: papermill failed though nothing was raised, or cells never ran; "" where it lived."""
    never = [first_line(cell) for cell in cells if cell["execution_count"] is None]
    if not code and not never:
        return ""
    what = f"the kernel died (exit code {code}), {len(never)} of {len(cells)} cells never ran"
    return f"{what}, the first: {never[0]}" if never else f"{what}; {_last_line(log)}"


def _errors(outputs: list[dict]) -> list[str]:
    return [f"{o.get('ename')}: {o.get('evalue')}" for o in outputs if o.get("output_type") == "error"]


def _line(outputs: list[dict]) -> str:
    """ ", line 3" where a traceback names the line of the cell."""
    traces = ("\n".join(output.get("traceback", ())) for output in outputs if output.get("output_type") == "error")
    match = re.search(r"Cell In\[\d+\], line (\d+)", re.sub(r"\x1b\[[0-9;]*m", "", next(traces, "")))
    return f", line {match[1]}" if match else ""


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return f"{log.name}: {lines[-1].strip() if lines else 'empty'}"
