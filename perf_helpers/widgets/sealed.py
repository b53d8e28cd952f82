"""Cells whose source is not in sight, in any front end: questions with their keys, solutions, planted faults.

JupyterLab and Colab fold a cell by the notebook's own metadata, VS Code does not (microsoft/vscode issue 158716).
notebooks/build.py seals such cells, and the kernel opens them before it runs them: errors have their lines.
"""

import base64
import html

MAGIC = "%%sealed"
_SHOWN = {"solution": "The solution", "code": "Code that holds an answer"}  # folded below; of a question nothing


def seal(source: str, kind: str, where: str) -> str:
    """Return a cell's source as one that nobody reads by chance.

    Args:
        kind: "question", "solution" or "code".
        where: the file that has it in plain text.
    """
    return f"{MAGIC} {kind}: run this cell; in plain text: {where}\n{base64.b64encode(source.encode()).decode()}"


def opened(cell: str) -> str:
    """Return the plain source of a cell, sealed or not."""
    head, _, body = cell.partition("\n")
    return base64.b64decode(body).decode() if head.startswith(MAGIC) else cell


def load_ipython_extension(shell) -> None:
    """`%load_ext perf_helpers.widgets.sealed`: from now on the kernel opens sealed cells."""
    shell.input_transformers_cleanup.append(lambda lines: opened("".join(lines)).splitlines(keepends=True))
    shell.events.register("post_run_cell", _show)


def _show(result) -> None:
    """Let a learner who ran a sealed cell unfold its source."""
    from IPython.display import display

    head, _, _ = result.info.raw_cell.partition("\n")
    if head.startswith(MAGIC) and result.success and (title := _SHOWN.get(head.split()[1].rstrip(":"))):
        source = html.escape(opened(result.info.raw_cell))
        folded = f"<details><summary>{title}</summary><pre style='word-break:normal'>{source}</pre></details>"
        display({"text/html": folded, "text/plain": f"{title}, folded"}, raw=True)
