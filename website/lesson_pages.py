"""Make a page of the site from a lesson that a recorded course run executed; no kernel is needed."""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import latex2mathml.converter
import nbformat
from markupsafe import Markup
from recorded_lessons import INLINE_PICTURE

from perf_helpers.course.results import measured_text
from perf_helpers.widgets import sealed

_DECISION = re.compile(r'\s*<div role="group"[^>]* aria-label="([a-z0-9-]+): ')
_FORMULA = re.compile(r"(?<![\\$\w])\$([^$\n`]+)\$(?!\w)")
_NO_GUESS = re.compile(
    r"<b>○ no guess</b>: m(easured .*?); next time, put a number first"
)  # the recorded run had no guess
_FOLDED = {"setup": "Imports and set-up", "solution": "The solution", "question": "Code that holds an answer"}


def page(
    notebook: nbformat.NotebookNode, head: str, elsewhere: Mapping[str, str], pictures: Path
) -> nbformat.NotebookNode:
    """Return a recorded lesson in the form that Sphinx reads.

    Args:
        notebook: an executed lesson; it is changed.
        head: Markdown to put below the title.
        elsewhere: {claim id: HTML to put after the place where the lesson decides the claim}.
        pictures: folder for the lesson's inline pictures, which become files named by their content.
    """
    for cell in notebook.cells:
        tags = cell.metadata.setdefault("tags", [])
        if cell.cell_type == "markdown":
            cell.source = _FORMULA.sub(lambda found: latex2mathml.converter.convert(found[1]), cell.source)
            continue
        if "parameters" in tags:
            tags.append("remove-cell")
        hidden = cell.metadata.get("jupyter", {}).get("source_hidden")
        if cell.source.startswith(sealed.MAGIC):
            tags.append("remove-input")  # if readers may see the source, the output has it, folded
        elif kind := next((tag for tag in tags if tag in _FOLDED), "question" if hidden else None):
            tags.append("hide-input")
            cell.metadata["mystnb"] = {"code_prompt_show": _FOLDED[kind], "code_prompt_hide": _FOLDED[kind]}
        for output in cell.outputs:
            if shown := output.get("data", {}).get("text/html"):
                shown = INLINE_PICTURE.sub(lambda found: _file_of(found[1], pictures), _NO_GUESS.sub(r"M\1", shown))
                decided = _DECISION.match(shown)
                output.data["text/html"] = shown + (elsewhere.get(decided[1], "") if decided else "")
    notebook.cells[0].source = notebook.cells[0].source.replace("\n", f"\n\n{head}\n", 1)
    return notebook


def _file_of(encoded: str, folder: Path) -> str:
    """Write a picture, given as base64 text, to a file in a folder if the file does not exist yet; return the file's
    address relative to the folder's parent.
    """
    content = base64.b64decode(encoded)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(content).hexdigest()[:16]}.png"
    if not path.exists():
        path.write_bytes(content)
    return f"{folder.name}/{path.name}"


def badge(verdict: str, text: str = "") -> Markup:
    """Return a verdict as HTML: its words, with a class that sets its colour in the style sheet.

    `text`: shown after the verdict, e.g. the measured value.
    """
    shown = Markup('<span class="verdict {}">{}</span>').format(verdict.replace(" ", "-"), verdict)
    return shown + Markup(" {}").format(text) if text else shown


def everywhere(rows: Sequence[tuple[str, Mapping[str, Any]]], address: str) -> str:
    """Return a claim's verdicts on all machines as HTML.

    Args:
        rows: (machine and date, the claim's row in the results) per machine.
        address: link to the claim's page.
    """
    lines = Markup("").join(
        Markup("<li>{}: {}</li>").format(machine, badge(row["verdict"], measured_or_empty(row)))
        for machine, row in rows
    )
    shown = '<summary>Verdicts on every machine</summary><ul>{}</ul><a href="{}">History of this claim</a>'
    return str(Markup(f'<details class="everywhere">{shown}</details>\n').format(lines, address))


def measured_or_empty(row: Mapping[str, Any]) -> str:
    """Return the measured value of a claim as text; empty if there is none.

    `row`: the claim's row in the results.
    """
    return "" if row["value"] is None else measured_text(row)
