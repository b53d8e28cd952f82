"""The contract of widgets: a cell that runs again closes its old element, and no error of a callback is lost. Run under
ipywidgets 8, and under 7.7.1, which Colab has.
"""

import os
import subprocess
import sys
from pathlib import Path

import ipywidgets
import nbformat
import pytest
from kernel import VIEW, alive, commit

from perf_helpers import exercises, learner_log, widgets
from perf_helpers.course import course
from perf_helpers.widgets.frame import OPEN, place, take

SEVEN = Path(__file__).resolve().parents[2] / "build" / "ipywidgets7"
ON_BOTH = ("frame", "guesses", "questions", "explorers", "learner_progress", "*_explorer")  # versions of ipywidgets


# ---- places


def test_what_comes_to_a_place_closes_what_stood_there():
    closed = []
    take("here", lambda: closed.append("first"))
    take("there", lambda: closed.append("other"))
    assert closed == []
    take("here", lambda: closed.append("second"))
    assert (list(OPEN), closed) == (["there", "here"], ["first"])


def test_a_box_is_ended_and_closed_with_all_that_it_contains(shown):
    before, ended = set(alive()), []
    button = ipywidgets.Button()
    parts = [ipywidgets.HBox([button])]
    place("here", parts, "<b>static</b>", "plain", at_end=lambda: ended.append(button.model_id in alive()))
    assert (shown[-1]["text/html"], shown[-1]["text/plain"]) == ("<b>static</b>", "plain") and VIEW in shown[-1]
    take("here", lambda: None)
    assert ended == [True] and set(alive()) <= before


def ask(lab, key):
    widgets.predict(lab, key, "the peak?", "%", 0, 200)


def test_keys_do_not_close_each_other(lab, shown):
    ask(lab, "why")
    one = len(alive())
    ask(lab, "speed")
    assert len(alive()) == 2 * one
    exercises.question(lab, "why", "Why?", {"x": "no", "y": "yes"}, right="y")
    assert len(alive()) > 2 * one
    commit(shown[:1], 40)
    assert learner_log.guess(learner_log.of(lab).read(), lab.lesson, "why") == 40


# ---- callbacks


LESSON_CELL = """
from pathlib import Path
from types import SimpleNamespace
from perf_helpers import exercises, widgets
from trainmem.records import Store
lab = SimpleNamespace(lesson="05_callbacks", store=Store(Path(out, "runs.jsonl")), guess_units={})
widgets.predict(lab, "peak", "how much?", "MB", 0, 100)
exercises.question(lab, "why", "why?", {"x": "no", "y": "yes"}, right="y")
display(widgets.revealed(lab, "peak", 50))
slider, _ = widgets.explore(lambda batch: print(1 / (batch - 2)), batch=[1, 2, 3]).children
"""
CLAIM = {"id": "x", "lesson": "05_callbacks", "verdict": "holds", "as_expected": True, "value": 0.5}
RECORD = {"lesson": "05_callbacks", "complete": True, "runs": [], "claims": [CLAIM]}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("batch", "verdict"), [(2, ("failed", "in a widget: ZeroDivisionError: division by zero")), (3, ("ok", ""))]
)
def test_an_error_in_a_callback_fails_the_course_run(tmp_path, monkeypatch, batch, verdict):
    write = f"slider.value = {batch}\nimport json\nPath(out, '05_callbacks.json').write_text(json.dumps({RECORD!r}))"
    sources = ["profile, strict, out = 'auto', False, ''", LESSON_CELL, write]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata.tags = ["parameters"]
    (tmp_path / "src").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "src" / "05_callbacks.ipynb")
    monkeypatch.setattr(course, "LESSONS", tmp_path / "src")
    result = course.run_course(out=tmp_path, timeout_per_lesson=90)
    (lesson,) = result["lessons"]
    assert (lesson["status"], lesson["message"]) == verdict
    executed = nbformat.read(tmp_path / "05_callbacks.ipynb", as_version=4)
    bundles = [output.get("data", {}) for output in executed.cells[-2].outputs]
    assert sum(VIEW in bundle and "text/html" in bundle for bundle in bundles) == 2  # a page without widgets reads it
    assert any("no guess" in bundle.get("text/html", "") for bundle in bundles)


# ---- the other version


@pytest.mark.nightly
@pytest.mark.skipif(ipywidgets.__version__ == "7.7.1", reason="this is the run against 7.7.1")
def test_the_same_under_ipywidgets_7():
    """Run the tests of the modules `ON_BOTH` once more with ipywidgets 7, from the folder that `make build/ipywidgets7`
    fills; the folder comes first on the import path.
    """
    if not SEVEN.is_dir():
        pytest.skip(f"no ipywidgets 7.7.1: make build/ipywidgets7 puts it into {SEVEN.relative_to(SEVEN.parents[1])}")
    path = os.pathsep.join([str(SEVEN), *filter(None, [os.environ.get("PYTHONPATH")])])
    version = [sys.executable, "-c", "import ipywidgets; print(ipywidgets.__version__)"]
    here = Path(__file__).parent
    files = [str(path) for name in ON_BOTH for path in sorted(here.glob(f"test_{name}.py"))]
    assert len(files) >= len(ON_BOTH)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    found, done = (
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        for command in (version, tests)
    )
    assert found.stdout.strip() == "7.7.1", found
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout
