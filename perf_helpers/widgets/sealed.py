"""Seal cells whose source has answers (questions, hints, solutions, planted bugs), so that no front end shows them.

JupyterLab and Colab fold a cell if the notebook's metadata say so, VS Code does not (microsoft/vscode issue 158716).
notebooks/build.py therefore encodes such cells. The kernel decodes a cell before the cell runs, so that errors show the
right lines.
"""

import base64
import html

MAGIC = "%%sealed"
_SHOWN = {"solution": "The solution", "code": "Code that holds an answer"}  # titles of the folded source, by kind


def seal(source: str, kind: str, path: str) -> str:
    """Return a cell's source encoded, so that a learner does not read it by accident.

    Args:
        source: the plain source.
        kind: "question", "hint", "solution" or "code".
        path: the file that has the source in plain text; the encoded cell names it.
    """
    return f"{MAGIC} {kind}: run this cell; in plain text: {path}\n{base64.b64encode(source.encode()).decode()}"


def opened(cell: str) -> str:
    """Return the plain source of a cell: decoded if the cell is sealed (see `seal`), otherwise unchanged."""
    head, _, body = cell.partition("\n")
    return base64.b64decode(body).decode() if head.startswith(MAGIC) else cell


def load_ipython_extension(shell) -> None:
    """Let an IPython shell run sealed (encoded) cells from now on; `%load_ext perf_helpers.widgets.sealed` calls it."""
    shell.input_transformers_cleanup.append(lambda lines: opened("".join(lines)).splitlines(keepends=True))
    shell.events.register("post_run_cell", _show)


def _show(result) -> None:
    """Show, folded, the source of a sealed "solution" or "code" cell that ran; `result`: an `ExecutionResult`."""
    from IPython.display import display

    head, _, _ = result.info.raw_cell.partition("\n")
    if head.startswith(MAGIC) and result.success and (title := _SHOWN.get(head.split()[1].rstrip(":"))):
        source = html.escape(opened(result.info.raw_cell))
        folded = f"<details><summary>{title}</summary><pre style='word-break:normal'>{source}</pre></details>"
        display({"text/html": folded, "text/plain": f"{title}, folded"}, raw=True)
