"""Run the cells of a lesson while every one of its experiments fails.

    python tests/failing_lessons.py 13 25      print what each cell raises (default: all lessons)

A cell that needs an experiment must go on, or end with an error that has the run's status and message: `RunFailed`. The
names that a failed cell would have assigned are absent afterwards, so a later cell may end with a `NameError`.
"""

import ast
import contextlib
import io
import linecache
import sys
from pathlib import Path
from unittest import mock

import jupytext

from perf_helpers.lab import Lab
from trainmem.core.outcomes import Outcome
from trainmem.unknown import RunFailed

SOURCES = sorted((Path(__file__).resolve().parents[1] / "notebooks" / "src").glob("[0-9][0-9]_*.py"))
MESSAGE = "no result within 0.5 s"


def run(source: Path, folder: Path) -> list[tuple[int, Exception]]:
    """Run the code cells of a lesson, while each experiment times out at once and each estimate is refused.

    Args:
        source: path of the lesson's source.
        folder: where the lesson's lab writes.

    Returns:
        (number of the cell, what it raised) of the cells that failed.
    """

    def timed_out(*_):
        yield Outcome("timed out", MESSAGE)

    cells = [cell for cell in jupytext.read(source).cells if cell.cell_type == "code"]
    namespace = {"__name__": "__main__", "display": lambda *_, **__: None}
    failed = []
    patches = [mock.patch.object(Lab, "_measured", timed_out), mock.patch.object(Lab, "foresee", lambda *_, **__: None)]
    patches += [mock.patch("IPython.display.display", lambda *_, **__: None)]
    patches += [mock.patch("trainmem.measure.runner.SERVER")]
    patches += [mock.patch("time.process_time", lambda: 0.0)]  # lesson 20 limits the seconds that an answer computes
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with contextlib.ExitStack() as stack:
        for each in (*patches, *quiet):
            stack.enter_context(each)
        for number, cell in enumerate(cells):
            name, text = f"<cell {number} of {source.stem}>", cell.source
            if cell.metadata.get("tags") == ["parameters"]:
                text += f"\nout = {str(folder)!r}\n"
            linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name  # for inspect.getsource
            try:
                exec(compile(text, name, "exec"), namespace)
            except Exception as error:
                failed.append((number, error))
                for absent in _assigned(text, error.__traceback__.tb_next.tb_lineno):
                    namespace.pop(absent, None)
    return failed


def _assigned(text: str, line: int) -> set[str]:
    """Return the names that the statements of a cell assign from a line on, including functions and classes.

    `text`: the cell's source; `line`: number of the line, from 1.
    """
    found, rest = set(), [node for node in ast.parse(text).body if node.end_lineno >= line]
    while rest:
        node = rest.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        rest.extend(ast.iter_child_nodes(node))
        if isinstance(getattr(node, "ctx", None), ast.Store):
            while isinstance(node, ast.Subscript | ast.Attribute):  # a part of something is assigned
                node = node.value
            found |= {node.id} if isinstance(node, ast.Name) else set()
    return found


def problems(failed: list[tuple[int, Exception]]) -> list[str]:
    """Return one line for each unexpected error in a lesson. An error is expected if it says how a run failed, or if it
    is about a name or a run that is missing because an earlier cell failed.

    `failed`: [(number of the cell, its exception)], as `run` returns it.
    """
    return [f"cell {number}: {type(error).__name__}: {error}" for number, error in failed if not _is_expected(error)]


def _is_expected(error: Exception) -> bool:
    if MESSAGE in str(error):
        return isinstance(error, RuntimeError)  # `RunFailed`, or the lesson's own
    return isinstance(error, NameError) or (isinstance(error, KeyError) and "no run " in str(error))


if __name__ == "__main__":
    import os
    import tempfile
    import time

    import matplotlib

    matplotlib.use("Agg")
    os.chdir(SOURCES[0].parents[1])
    for source in SOURCES:
        if sys.argv[1:] and source.stem[:2] not in sys.argv[1:]:
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            failed = run(source, Path(folder))
        count = sum(isinstance(error, RunFailed) for _, error in failed)
        print(f"{source.stem}: {time.monotonic() - start:.1f} s, {count} cells end with RunFailed", flush=True)
        print(*problems(failed), sep="\n", end="\n" * bool(problems(failed)), flush=True)
