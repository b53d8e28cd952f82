"""Sealed cells, whose code is encoded, in a real kernel: they run as the code would, and some then show it."""

import re

import nbclient
import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from perf_helpers.widgets import sealed

SOURCE = "def half(x):\n    return x / 2  # <b> ä\n\nhalf(answer)"


def executed(*sources):
    """Return the outputs of each cell, after a first cell that loads the extension.

    `sources`: the sources of the cells.
    """
    cells = [
        nbformat.v4.new_code_cell(each) for each in ("%load_ext perf_helpers.widgets.sealed\nanswer = 8", *sources)
    ]
    return [cell.outputs for cell in nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells)).execute().cells[1:]]


def test_a_sealed_cell_does_what_its_source_does_and_a_question_stays_closed():
    cells = [sealed.seal(SOURCE, kind, "src/05.py") for kind in ("question", "solution", "code")]
    question, solution, code, after = executed(*cells, "half(3)")
    assert [output.data["text/plain"] for output in question] == ["4.0"]
    assert after[0].data["text/plain"] == "1.5", "its names are the notebook's"
    for outputs, title in ((solution, "The solution"), (code, "Code that holds an answer")):
        value, fold = outputs if outputs[0].output_type == "execute_result" else reversed(outputs)
        assert value.data["text/plain"] == "4.0"
        shown = fold.data["text/html"]
        assert shown.startswith(f"<details><summary>{title}</summary>") and "# &lt;b&gt; ä" in shown
        assert "half" not in fold.data["text/plain"], "in a terminal nothing folds"


def test_an_error_has_its_line_and_unfolds_nothing():
    with pytest.raises(CellExecutionError) as reported:
        executed(sealed.seal("x = 0\n1 / x", "solution", "src/05.py"))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(reported.value)).splitlines()
    assert (
        "----> 2 1 / x" in lines
        and lines[-1] == "ZeroDivisionError: division by zero"
        and "details" not in "".join(lines)
    )


@pytest.mark.nightly
def test_without_the_extension_it_says_so():
    cell = nbformat.v4.new_code_cell(sealed.seal(SOURCE, "question", "src/05.py"))
    with pytest.raises(CellExecutionError, match=r"%%sealed.* not found"):
        nbclient.NotebookClient(nbformat.v4.new_notebook(cells=[cell])).execute()


def test_what_is_not_sealed_is_left_alone():
    assert sealed.opened(SOURCE) == SOURCE and sealed.opened("") == ""
    line = sealed.seal(SOURCE, "question", "src/05.py").splitlines()
    assert len(line) == 2 and "half" not in "".join(line) and "src/05.py" in line[0]
