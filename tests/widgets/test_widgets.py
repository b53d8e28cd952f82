"""Widgets on the kernel's side: values are set, buttons clicked, cells run again, callbacks fail; and what stands there
without a front end. Everything here holds for ipywidgets 8 and for 7.7.1, which Colab has.
"""

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ipywidgets
import nbformat
import pytest
from kernel import VIEW, alive, box, inside

from perf_helpers import exercises, journal, widgets
from perf_helpers.course import course
from perf_helpers.lab.store import Store
from perf_helpers.unknown import Unknown

LESSON = "05_gradient_accumulation"
SEVEN = Path(__file__).resolve().parents[2] / "build" / "ipywidgets7"


@pytest.fixture
def lab(tmp_path):
    return SimpleNamespace(lesson=LESSON, store=Store(tmp_path / "runs.jsonl"))


@pytest.fixture(autouse=True)
def fresh_kernel():
    widgets._shown.clear()
    widgets._asked.clear()
    for widget in list(alive().values()):
        widget.close()


def latest(shown, kind):
    """The widgets of a kind in the box that was displayed last, in order."""
    found = inside(box(shown), kind)
    assert found
    return found


def ask(lab, key="peak", **options):
    question = "the peak of `1 x 4`, in percent of < 4 x 1?"
    widgets.predict(lab, key, question, **{"unit": "%", "low": 0, "high": 200, **options})


def commit(shown, value):
    (slider,), (button,) = latest(shown, ipywidgets.FloatSlider), latest(shown, ipywidgets.Button)
    slider.value = value
    button.click()


def state(shown):
    return latest(shown, ipywidgets.HTML)[-1].value


def choices(lab, key="why"):
    options = {"it `frees` them": "the optimizer steps < once", "it keeps them": "the sum has to survive"}
    exercises.question(lab, key, "What about gradients & co?", options, right="it keeps them")


# ---- predict and revealed


def test_slider_and_field_are_bound_and_only_the_button_commits(lab, shown):
    ask(lab)
    (slider,), (field,) = latest(shown, ipywidgets.FloatSlider), latest(shown, ipywidgets.BoundedFloatText)
    slider.value = 40
    assert field.value == 40
    field.value = 62
    assert slider.value == 62
    assert journal.of(lab).read() == [] and "No guess yet" in state(shown)
    latest(shown, ipywidgets.Button)[0].click()
    assert journal.guess(journal.of(lab).read(), LESSON, "peak") == 62
    assert "62 %" in state(shown)


@pytest.mark.parametrize(("low", "high"), [(200, 500), (-20, -10), (0, 0.5), (1000, 80000)])
def test_any_range_can_be_guessed_in_round_steps(lab, shown, low, high):
    ask(lab, low=low, high=high)
    (slider,), (field,) = latest(shown, ipywidgets.FloatSlider), latest(shown, ipywidgets.BoundedFloatText)
    assert (slider.min, slider.max) == (field.min, field.max) == (low, high) and low < slider.value < high
    for control, parts in ((slider, 1000), (field, 100)):
        assert parts <= round((high - low) / control.step, 6) <= 2.5 * parts
        assert float(f"{control.step:.0e}") == control.step and f"{control.step:.0e}"[0] in "125"


@pytest.mark.parametrize(("low", "high"), [(5, 5), (9, 1), (0, float("inf"))])
def test_a_range_of_nothing_is_refused(lab, low, high):
    with pytest.raises(ValueError, match=f"high={high}"):
        ask(lab, low=low, high=high)


def test_a_committed_guess_is_scored_and_drawn_beside_the_estimate_and_the_measurement(lab, shown):
    ask(lab, estimate=70)
    commit(shown, 40)
    feedback = widgets.revealed(lab, "peak", 60.0)
    assert feedback.status == "guess"
    assert "you said 40 %, measured 60 %: 33% off. The estimate said 70 %: 17% off" in feedback.text
    assert pictured(feedback) == "your guess 40 %; the estimate 70 %; measured 60 %"
    (scored,) = journal.history(journal.of(lab).read())
    assert (scored.guess, scored.measured, scored.estimate, scored.unit) == (40, 60, 70, "%")


def test_an_estimate_that_is_unknown_is_not_shown(lab, shown):
    ask(lab)
    feedback = widgets.revealed(lab, "peak", 60.0, estimate=Unknown())
    assert pictured(feedback) == "measured 60 %" and "estimate" not in feedback.text


def pictured(feedback):
    """The alternative text of a feedback's picture, which must be there."""
    (image,) = re.findall(r"<img [^>]*>", feedback._repr_html_())
    assert "data:image/png;base64,iVBOR" in image and "max-width:100%" in image
    return html.unescape(re.search('alt="([^"]*)"', image)[1])


def test_the_picture_is_readable(lab, shown, monkeypatch):
    import matplotlib.figure
    import matplotlib.text

    figures, make = [], matplotlib.figure.Figure
    monkeypatch.setattr("matplotlib.figure.Figure", lambda **options: figures.append(make(**options)) or figures[-1])
    ask(lab, unit="MB", low=0, high=90000, estimate=70000)
    commit(shown, 40000)
    widgets.revealed(lab, "peak", 61234.5)
    (figure,) = figures
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text() and text.get_visible()]
    assert {"your guess", "the estimate", "measured", "MB", " 61,234 MB"} <= {text.get_text() for text in texts}
    assert min(text.get_fontsize() for text in texts) >= 9
    assert figure.get_facecolor() == (1, 1, 1, 1)  # whole, so that it is readable on a dark page too
    figure.canvas.draw()
    ends = [text.get_window_extent().x1 for text in figure.axes[0].texts]
    assert len(ends) == 3 and max(ends) <= figure.bbox.x1  # no number runs out of the picture


def test_without_a_guess_the_lesson_goes_on_and_says_so(lab, shown):
    ask(lab)
    feedback = widgets.revealed(lab, "peak", 60, estimate=54)
    assert feedback.status == "no guess" and "measured 60 %" in feedback.text and "10% off" in feedback.text
    assert pictured(feedback) == "the estimate 54 %; measured 60 %"
    assert journal.progress(journal.of(lab).read())[LESSON].errors == {"peak": None}


@pytest.mark.parametrize("measured", [None, float("nan")])
def test_nothing_measured_is_nothing_revealed(lab, shown, measured):
    ask(lab)
    commit(shown, 40)
    assert widgets.revealed(lab, "peak", measured).status == "no guess"
    assert widgets.revealed(lab, "peak", 50).status == "guess"


def test_a_guess_after_the_fact_is_kept_but_not_scored(lab, shown):
    ask(lab)
    widgets.revealed(lab, "peak", 60)
    commit(shown, 60)
    assert "after the fact" in state(shown)
    ask(lab)
    assert "after the fact" in state(shown)
    feedback = widgets.revealed(lab, "peak", 60)
    assert feedback.status == "no guess" and "60 % came after the fact" in feedback.text
    assert pictured(feedback) == "measured 60 %"
    assert journal.history(journal.of(lab).read()) == []


def test_a_second_guess_after_the_fact_leaves_the_first_one_scored(lab, shown):
    ask(lab)
    commit(shown, 40)
    widgets.revealed(lab, "peak", 60)
    commit(shown, 60)
    feedback = widgets.revealed(lab, "peak", 60)
    assert "you said 40 %" in feedback.text and "60 % came after the fact" in feedback.text


def test_a_key_that_nobody_asked_for_is_an_error(lab, shown):
    ask(lab)
    with pytest.raises(ValueError, match="'peek'"):
        widgets.revealed(lab, "peek", 60)


def test_a_cell_run_again_shows_the_kept_guess_and_one_widget(lab, shown):
    ask(lab)
    commit(shown, 40)
    before, (old,) = len(alive()), latest(shown, ipywidgets.Button)
    ask(lab)
    assert len(alive()) == before
    assert latest(shown, ipywidgets.FloatSlider)[0].value == 40 and "40 %" in state(shown)
    assert old.comm is None  # closed: no front end can click it
    widgets._asked.clear()  # a new kernel
    ask(lab, low=50)
    assert latest(shown, ipywidgets.FloatSlider)[0].value == 50 and "40 %" in state(shown)


def test_keys_do_not_close_each_other(lab, shown):
    ask(lab, key="why")
    one = len(alive())
    ask(lab, key="speed")
    assert len(alive()) == 2 * one
    choices(lab, key="why")
    assert len(alive()) > 2 * one
    commit(shown[:1], 40)
    assert journal.guess(journal.of(lab).read(), LESSON, "why") == 40


def test_a_question_without_a_front_end_is_text_that_escapes(lab, shown):
    ask(lab)
    static = shown[-1]["text/html"]
    assert "<code>1 x 4</code>, in percent of &lt; 4 x 1?" in static and "No guess yet" in static
    assert shown[-1]["text/plain"].startswith("Predict: the peak")


# ---- questions


def test_a_choice_shows_its_explanation_and_is_kept(lab, shown):
    choices(lab)
    first, second = latest(shown, ipywidgets.Button)
    assert [first.description, second.description] == ["a", "b"] and second.tooltip == "it keeps them"
    first.click()
    assert "✗ wrong" in state(shown) and "steps &lt; once" in state(shown) and "a) it <code>frees" in state(shown)
    second.click()
    assert "✓ right" in state(shown) and "steps" not in state(shown)
    answers = [entry.content for entry in journal.of(lab).read() if entry.content["choice"]]
    assert [(answer["choice"], answer["right"]) for answer in answers] == [
        ("it `frees` them", False),
        ("it keeps them", True),
    ]
    assert journal.progress(journal.of(lab).read())[LESSON].questions == {"why": False}


def test_a_question_run_again_shows_the_kept_answer_and_one_widget(lab, shown):
    choices(lab)
    latest(shown, ipywidgets.Button)[1].click()
    before = len(alive())
    choices(lab)
    assert len(alive()) == before and "✓ right" in state(shown)
    exercises.question(lab, "why", "asked anew", {"x": "no", "y": "yes"}, right="y")
    assert state(shown) == ""


def test_a_question_reads_without_a_front_end(lab, shown):
    choices(lab)
    static = shown[-1]["text/html"]
    assert "What about gradients &amp; co?" in static
    folds = re.findall(r"<li>(.*?)<details>(.*?)</details></li>", static)
    assert [option for option, _ in folds] == ["it <code>frees</code> them", "it keeps them"]
    assert "✗ wrong" in folds[0][1] and "✓ right" in folds[1][1]
    assert "a) it `frees` them" in shown[-1]["text/plain"]


@pytest.mark.parametrize(
    ("options", "right", "words"),
    [({"a": "x"}, "a", "at least two"), ({"a": "x", "b": " "}, "a", "explanation"), ({"a": "x", "b": "y"}, "c", "'c'")],
)
def test_a_question_that_cannot_be_answered_is_refused(lab, options, right, words):
    with pytest.raises(ValueError, match=words):
        exercises.question(lab, "why", "?", options, right)


# ---- explore, callbacks


def test_a_control_draws_anew_and_a_cell_run_again_leaves_one_box(shown):
    drawn = []

    def draw(batch, steps):
        if batch == 3:
            raise ZeroDivisionError("the third is broken")
        drawn.append((batch, steps))

    widgets.explore(draw, batch=[1, 2, 3], steps=[4, 8])
    count = len(alive())
    box = widgets.explore(draw, batch=[1, 2, 3], steps=[4, 8])
    assert len(alive()) == count
    widgets.explore(lambda batch: None, batch=[1, 2])
    assert len(alive()) > count  # another one does not close it
    batch, steps, _ = box.children
    steps.value = 8
    batch.value = 2
    assert drawn == [(1, 4), (1, 4), (1, 8), (2, 8)]
    with pytest.raises(ZeroDivisionError):
        batch.value = 3


LESSON_CELL = """
from pathlib import Path
from types import SimpleNamespace
from perf_helpers import exercises, runs, widgets
lab = SimpleNamespace(lesson="05_callbacks", store=runs.Store(Path(out, "runs.jsonl")))
widgets.predict(lab, "peak", "how much?", "MB", 0, 100)
exercises.question(lab, "why", "why?", {"x": "no", "y": "yes"}, right="y")
display(widgets.revealed(lab, "peak", 50))
slider, _ = widgets.explore(lambda batch: print(1 / (batch - 2)), batch=[1, 2, 3]).children
"""
RECORD = {"lesson": "05_callbacks", "complete": True, "runs": [], "claims": [{"id": "x", "verdict": "holds"}]}


@pytest.mark.parametrize(
    ("batch", "verdict"), [(2, ("failed", "in a widget: ZeroDivisionError: division by zero")), (3, ("ok", ""))]
)
def test_an_error_in_a_callback_fails_the_course_run(tmp_path, batch, verdict):
    write = f"slider.value = {batch}\nimport json\nPath(out, '05_callbacks.json').write_text(json.dumps({RECORD!r}))"
    sources = ["profile, strict, out = 'auto', False, ''", LESSON_CELL, write]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata.tags = ["parameters"]
    (tmp_path / "src").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "src" / "05_callbacks.ipynb")
    for _ in range(3):  # one time in twenty nbclient waits for ever for ipykernel 7, after output in an Output widget
        result = course.run_course(out=tmp_path, notebooks_dir=tmp_path / "src", timeout_per_lesson=90)
        (lesson,) = result.data["lessons"]
        if lesson["status"] != "timed out":
            break
    assert (lesson["status"], lesson["message"]) == verdict
    executed = nbformat.read(tmp_path / "05_callbacks.ipynb", as_version=4)
    bundles = [output.get("data", {}) for output in executed.cells[-2].outputs]
    assert sum(VIEW in bundle and "text/html" in bundle for bundle in bundles) == 2  # a page without widgets reads it
    assert any("no guess" in bundle.get("text/html", "") for bundle in bundles)


# ---- progress


def test_progress_shows_each_lesson_with_what_was_done(lab, shown, tmp_path, monkeypatch):
    (tmp_path / "05_gradient_accumulation.ipynb").write_text("")
    (tmp_path / "06_gradient_checkpointing.ipynb").write_text("")
    monkeypatch.chdir(tmp_path)
    ask(lab)
    commit(shown, 40)
    widgets.revealed(lab, "peak", 50)
    exercises.check(lab, "cut", lambda answer: exercises.right("yes"), 4)
    choices(lab)
    latest(shown, ipywidgets.Button)[0].click()
    journal.finished(lab, {"a": "holds", "b": "not testable here"})
    table = widgets.progress(lab)
    (done, open_) = table.rows
    assert done[0] == "05 gradient accumulation" and done[1].startswith("✓ finished 20")
    assert done[2:] == ["1 of 2", "1 of 1 (off by 20%)", "1 of 1", "1 of 1 (0 right at once)"]
    assert open_ == ["06 gradient checkpointing", "not begun", "", "", "", ""]
    assert "<table" in table._repr_html_()


def test_progress_of_a_lesson_under_way(lab, shown):
    ask(lab)
    widgets.revealed(lab, "peak", 50)
    exercises.check(lab, "cut", lambda answer: exercises.not_attempted(), None)
    choices(lab)
    (row,) = widgets.progress(lab, [LESSON]).rows
    assert row[1:] == ["begun", "", "0 of 1", "0 of 1", "0 of 1"]


# ---- the other version


@pytest.mark.skipif(ipywidgets.__version__ == "7.7.1", reason="this is the run against 7.7.1")
def test_the_same_under_ipywidgets_7():
    """This file and the explorers' once more, with the folder that `make build/ipywidgets7` fills before all else."""
    if not SEVEN.is_dir():
        pytest.skip(f"no ipywidgets 7.7.1: make build/ipywidgets7 puts it into {SEVEN.relative_to(SEVEN.parents[1])}")
    path = os.pathsep.join([str(SEVEN), *filter(None, [os.environ.get("PYTHONPATH")])])
    version = [sys.executable, "-c", "import ipywidgets; print(ipywidgets.__version__)"]
    files = [__file__, str(Path(__file__).with_name("test_explorers.py"))]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    found, done = (
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        for command in (version, tests)
    )
    assert found.stdout.strip() == "7.7.1", found
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout
