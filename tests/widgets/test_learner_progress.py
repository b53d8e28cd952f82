"""The table of what a learner has done so far."""

import ipywidgets
from kernel import commit, latest

from perf_helpers import exercises, learner_log, widgets


def ask(lab):
    widgets.predict(lab, "peak", "the peak?", "%", 0, 200)


def choices(lab):
    exercises.question(lab, "why", "Why?", {"x": "no", "y": "yes"}, right="y")


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
    learner_log.keep(lab, "finished", claims={"a": "holds", "b": "not testable here"})
    table = widgets.progress(lab)
    (done, open_) = table.rows
    assert done[0] == "05 gradient accumulation" and done[1].startswith("✓ finished 20")
    assert done[2:] == ["1 of 2", "1 of 1 (off by 20%)", "1 of 1", "1 of 1 (0 right at once)"]
    assert open_ == ["06 gradient checkpointing", "not begun", "", "", "", ""]
    assert "<table" in table._repr_html_()


def test_progress_of_a_lesson_under_way(lab, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ask(lab)
    widgets.revealed(lab, "peak", 50)
    exercises.check(lab, "cut", lambda answer: exercises.not_attempted(), None)
    choices(lab)
    (row,) = widgets.progress(lab).rows
    assert row[1:] == ["begun", "", "0 of 1", "0 of 1", "0 of 1"]
