"""Guesses: values are entered, the button is clicked, cells are run again; also, outputs if no front end shows the
widgets.
"""

import html
import re

import ipywidgets
import pytest
from kernel import alive, commit, latest, state

from perf_helpers import learner_log, widgets
from perf_helpers.widgets.frame import OPEN
from trainmem.unknown import Unknown

LESSON = "05_gradient_accumulation"


def ask(lab, key="peak", **options):
    question = "the peak of `1 x 4`, in percent of < 4 x 1?"
    widgets.predict(lab, key, question, **{"unit": "%", "low": 0, "high": 200, **options})


def test_slider_and_field_are_bound_and_only_the_button_commits(lab, shown):
    ask(lab)
    (slider,), (field,) = latest(shown, ipywidgets.FloatSlider), latest(shown, ipywidgets.BoundedFloatText)
    slider.value = 40
    assert field.value == 40
    field.value = 62
    assert slider.value == 62
    assert learner_log.of(lab).read() == [] and "No guess yet" in state(shown)
    latest(shown, ipywidgets.Button)[0].click()
    assert learner_log.guess(learner_log.of(lab).read(), LESSON, "peak") == 62
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
    ask(lab)
    commit(shown, 40)
    feedback = widgets.revealed(lab, "peak", 60.0, estimate=70)
    assert feedback.status == "guess"
    assert "your guess was 40 %, measured 60 %: 33% off. The estimate was 70 %: 17% off" in feedback.text
    assert pictured(feedback) == "your guess 40 %; the estimate 70 %; measured 60 %"
    (scored,) = learner_log.history(learner_log.of(lab).read())
    assert (scored.guess, scored.measured, scored.estimate, scored.unit) == (40, 60, 70, "%")


def test_an_estimate_that_is_unknown_is_not_shown(lab, shown):
    ask(lab)
    feedback = widgets.revealed(lab, "peak", 60.0, estimate=Unknown())
    assert pictured(feedback) == "measured 60 %" and "estimate" not in feedback.text


def pictured(feedback):
    """Return the alternative text of a feedback's picture; fail if it has no picture."""
    (image,) = re.findall(r"<img [^>]*>", feedback._repr_html_())
    assert "data:image/png;base64,iVBOR" in image and "max-width:100%" in image
    return html.unescape(re.search('alt="([^"]*)"', image)[1])


def test_the_picture_is_readable(lab, shown, monkeypatch):
    import matplotlib.figure
    import matplotlib.text

    figures, make = [], matplotlib.figure.Figure
    monkeypatch.setattr("matplotlib.figure.Figure", lambda **options: figures.append(make(**options)) or figures[-1])
    ask(lab, unit="MB", low=0, high=90000)
    commit(shown, 40000)
    widgets.revealed(lab, "peak", 61234.5, estimate=70000)
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
    assert learner_log.progress(learner_log.of(lab).read())[LESSON].errors == {"peak": None}


@pytest.mark.parametrize("measured", [None, float("nan"), Unknown()])
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
    assert learner_log.history(learner_log.of(lab).read()) == []


def test_a_second_guess_after_the_fact_leaves_the_first_one_scored(lab, shown):
    ask(lab)
    commit(shown, 40)
    widgets.revealed(lab, "peak", 60)
    commit(shown, 60)
    feedback = widgets.revealed(lab, "peak", 60)
    assert "your guess was 40 %" in feedback.text and "60 % came after the fact" in feedback.text


def test_an_unknown_key_is_an_error(lab, shown):
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
    OPEN.pop(("predict", LESSON, "peak"))()  # a new kernel
    ask(lab, low=50)
    assert latest(shown, ipywidgets.FloatSlider)[0].value == 50 and "40 %" in state(shown)


def test_a_question_without_a_front_end_is_text_that_escapes(lab, shown):
    ask(lab)
    static = shown[-1]["text/html"]
    assert "<code>1 x 4</code>, in percent of &lt; 4 x 1?" in static and "No guess yet" in static
    assert shown[-1]["text/plain"].startswith("Predict: the peak")
