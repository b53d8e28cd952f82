"""Questions: buttons are clicked, cells are run again; and the outputs without a front end."""

import re

import ipywidgets
import pytest
from kernel import alive, latest, state

from perf_helpers import exercises, learner_log

LESSON = "05_gradient_accumulation"


def choices(lab, key="why"):
    options = {"it `frees` them": "the optimizer steps < once", "it keeps them": "the sum has to survive"}
    exercises.question(lab, key, "What about gradients & co?", options, right="it keeps them")


def test_a_choice_shows_its_explanation_and_is_kept(lab, shown):
    choices(lab)
    first, second = latest(shown, ipywidgets.Button)
    assert [first.description, second.description] == ["a", "b"] and second.tooltip == "it keeps them"
    first.click()
    assert "✗ wrong" in state(shown) and "steps &lt; once" in state(shown) and "a) it <code>frees" in state(shown)
    second.click()
    assert "✓ right" in state(shown) and "steps" not in state(shown)
    answers = [entry.content for entry in learner_log.of(lab).read() if entry.content["choice"]]
    assert [(answer["choice"], answer["right"]) for answer in answers] == [
        ("it `frees` them", False),
        ("it keeps them", True),
    ]
    assert learner_log.progress(learner_log.of(lab).read())[LESSON].questions == {"why": False}


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
