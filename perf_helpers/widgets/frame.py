"""Widgets of the lessons. Each also leaves something static, for places without a front end.

Notable: a cell that is run again closes the widgets that it showed before, with their callbacks. Whatever a callback
raises is shown in place, in an Output widget, whose state is kept in the notebook, where the course run finds it.
"""

import html
import math
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perf_helpers import plots
from perf_helpers.course import journal
from perf_helpers.unknown import is_measured
from perf_helpers.widgets import feedback as feedbacks

WHOLE_WIDTH = {"width": "auto", "max_width": "100%"}
_shown: dict[Any, Any] = {}  # of this kernel: the box that stands at each place
_ends: dict[Any, Callable[[], None]] = {}  # what is called when the box at a place is closed


def guarded(function: Callable[..., None], output) -> Callable[..., None]:
    """`function` as a widget's callback that loses no error.

    What it displays, prints or raises goes to `output` (an `ipywidgets.Output` that the widget shows). Outside IPython
    the error is raised on, to whoever changed the widget.
    """

    def callback(*arguments):
        with output:
            function(*arguments)

    return callback


def explore(draw: Callable[..., Any], **choices: Sequence[Any]):
    """Show `draw(first choice of each)` as a picture, and under it a control for each choice that draws anew.

    Args:
        draw: takes one value of each choice, draws on axes of its own and returns them (or anything that displays).
        choices: for each keyword of `draw`, the values offered, the one to start with first.

    Returns:
        The box of controls (ipywidgets), already displayed.

    Raises:
        ValueError: a choice without values.
    """
    import ipywidgets
    from IPython.display import display

    for name, values in choices.items():
        if not list(values):
            raise ValueError(f"{name}: no values to choose from")
    _show(draw(**{name: values[0] for name, values in choices.items()}))
    output = ipywidgets.Output()
    controls = {
        name: ipywidgets.SelectionSlider(
            options=[(str(value), value) for value in values],
            description=name.replace("_", " "),
            style={"description_width": "initial"},
            layout={"max_width": "100%"},
            continuous_update=False,
        )
        for name, values in choices.items()
    }

    def redraw(_):
        output.clear_output(wait=True)
        _show(draw(**{name: control.value for name, control in controls.items()}))

    for control in controls.values():
        control.observe(guarded(redraw, output), names="value")
    box = ipywidgets.VBox([*controls.values(), output], layout={"max_width": "100%"})
    code = getattr(draw, "__code__", None)  # of the same cell, if it is run again
    _replace((getattr(code, "co_filename", ""), getattr(code, "co_firstlineno", repr(draw)), *choices), box)
    display(box)
    return box


_asked: dict[tuple[str, str], tuple[str, float | None]] = {}  # of this kernel: unit and estimate, by lesson and key


def predict(lab, key: str, question: str, unit: str, low: float, high: float, estimate: float | None = None) -> None:
    """Ask for a guess before an experiment: a slider and a number field, bound together, and a button that commits it.

    The guess is kept in the journal, and stands here again when the cell is run again. Without a front end: the
    question alone. A guess that is committed after `revealed` was called is kept too, but does not count.

    Args:
        key: names the question within the lesson.
        question: plain text; words between backticks are code.
        unit: the one a person would use, e.g. "MB", "%", "x".
        low, high: what can be guessed, in that unit.
        estimate: the figure of `perf_helpers.estimate.estimates`, in that unit; shown by `revealed`, not before.

    Raises:
        ValueError: `low` is not below `high`.
    """
    import ipywidgets

    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"low={low!r}, high={high!r}: give two numbers, the smaller one first")
    _asked[lab.lesson, key] = unit, estimate
    kept = journal.guess(journal.of(lab).read(), lab.lesson, key)
    start = min(max((low + high) / 2 if kept is None else kept, low), high)
    limits = {"min": low, "max": high, "value": start}
    slider = ipywidgets.FloatSlider(
        **limits,
        step=_step(low, high, 1000),  # it moves what is typed to the nearest step: fine ones hardly do
        readout=False,
        description="your guess",
        layout={"flex": "1 1 14em", "max_width": "100%"},
    )
    field = ipywidgets.BoundedFloatText(**limits, step=_step(low, high, 100), layout={"width": "9em"})
    ipywidgets.link((slider, "value"), (field, "value"))
    button = ipywidgets.Button(description="commit", tooltip="keep this guess", layout={"width": "7em"})
    state, output = ipywidgets.HTML(_guess_html(lab, key)), ipywidgets.Output()

    def commit(_):
        journal.keep(lab, "guess", key, guess=float(field.value), unit=unit)
        state.value = _guess_html(lab, key)

    button.on_click(guarded(commit, output))
    head = f"<div style='line-height:1.4'><b>Predict</b>: {feedbacks.prose_html(question)}</div>"
    row = ipywidgets.HBox(
        [slider, field, ipywidgets.Label(unit), button], layout={"flex_flow": "row wrap", **WHOLE_WIDTH}
    )
    box = ipywidgets.VBox([ipywidgets.HTML(head), row, state, output], layout=WHOLE_WIDTH)
    place(("predict", lab.lesson, key), box, head + _guess_html(lab, key), f"Predict: {question}")


def _guess_html(lab, key: str) -> str:
    """What is known of the learner's guess, in words."""
    entries, (unit, _) = journal.of(lab).read(), _asked[lab.lesson, key]
    kept, counted = (find(entries, lab.lesson, key) for find in (journal.guess, journal.counted_guess))
    if kept is None:
        return "<div>No guess yet. Commit one before you run on.</div>"
    shown = f"● Your guess: {html.escape(feedbacks.amount_text(kept, unit))}"
    if journal.is_revealed(entries, lab.lesson, key) and kept != counted:
        return f"<div>{shown}, after the fact: the measurement is out, so it is not scored.</div>"
    return f"<div>{shown}. It is kept.</div>"


def _step(low: float, high: float, parts: int) -> float:
    """A round step, 1, 2 or 5 times a power of ten, of which `parts` or more make the whole range."""
    most = (high - low) / parts
    power = math.floor(math.log10(most))
    return max(step for step in (float(f"{factor}e{power}") for factor in (1, 2, 5)) if step <= most * (1 + 1e-9))


def revealed(lab, key: str, measured: float | None, estimate: float | None = None) -> feedbacks.Feedback:
    """What became of a guess: the guess, the estimate's figure and the measured one in one picture, and a score.

    Only a guess that was committed before the first call counts. Without one, and without a front end, it says so.

    Args:
        key: as given to `predict`.
        measured: in the unit given to `predict`; None where nothing could be measured.
        estimate: as for `predict`, where it is known only now; None or unknown: none is shown.

    Raises:
        ValueError: this kernel has not asked for a guess under that key.
    """
    if (lab.lesson, key) not in _asked:
        raise ValueError(f"key={key!r}: no guess was asked for; run the cell with predict(lab, {key!r}, ...) first")
    entries, (unit, estimated) = journal.of(lab).read(), _asked[lab.lesson, key]
    estimate = estimated if estimate is None else estimate
    estimate = estimate if is_measured(estimate) else None
    kept, counted = (find(entries, lab.lesson, key) for find in (journal.guess, journal.counted_guess))
    if measured is None or not math.isfinite(measured):
        return feedbacks.score(counted, None)
    measured = float(measured)
    journal.keep(lab, "revealed", key, guess=counted, measured=measured, estimate=estimate, unit=unit)
    feedback = feedbacks.score(counted, measured, unit)
    text = feedback.text
    if estimate is not None:
        text += f". The estimate said {feedbacks.amount_text(estimate, unit)}"
        text += f": {journal.off(estimate, measured):.0%} off"
    if kept != counted:
        text += f". Your {feedbacks.amount_text(kept, unit)} came after the fact and does not count"
    bars = {"your guess": counted, "the estimate": estimate, "measured": measured}
    bars = {name: value for name, value in bars.items() if value is not None}
    return feedbacks.Feedback(feedback.status, text, _bars_html(bars, unit))


def _bars_html(values: Mapping[str, float], unit: str) -> str:
    """Figures of one quantity as bars, an <img> that a screen reader can read out."""
    from matplotlib.figure import Figure

    # Small with large letters: on a narrow page it is scaled down, and has to stay readable.
    figure = Figure(figsize=(4.6, 0.9 + 0.4 * len(values)), dpi=110, layout="constrained")
    ax = figure.subplots()
    colours = {"your guess": plots.SERIES[4], "the estimate": plots.SERIES[5], "measured": plots.SERIES[0]}
    bars = ax.barh(list(values), list(values.values()), color=[colours[name] for name in values], height=0.62)
    ax.bar_label(bars, [f" {feedbacks.amount_text(value, unit)}" for value in values.values()], fontsize=12)
    ax.margins(x=0.45)
    ax.locator_params(axis="x", nbins=4)
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=12)
    ax.set_xlabel(unit, fontsize=12)
    words = "; ".join(f"{name} {feedbacks.amount_text(value, unit)}" for name, value in values.items())
    return plots.image_html(plots.png(figure), words)


def choose(
    where: tuple[str, ...],
    text: str,
    answers: Mapping[str, feedbacks.Feedback],
    chosen: str | None,
    keep: Callable[[str], None],
) -> None:
    """Options with a button each that shows its answer; without a front end, a list with the answers folded.

    The front end of `exercises.question`. Buttons rather than radio buttons, where moving by the arrow keys chooses.

    Args:
        where: names the question among all widgets of this kernel; another one at that place is closed.
        answers: for each option what is shown when it is chosen.
        chosen: the option chosen last time, or None.
        keep: called with each option that is chosen.
    """
    import ipywidgets

    letters = dict(zip(string.ascii_lowercase, answers, strict=False))
    head = f"<div style='line-height:1.4'><b>Question</b>: {feedbacks.prose_html(text)}</div>"
    lines = "".join(f"<div>{letter}) {feedbacks.prose_html(option)}</div>" for letter, option in letters.items())
    answer, output = ipywidgets.HTML(), ipywidgets.Output()
    buttons = {
        option: ipywidgets.Button(description=letter, tooltip=option, layout={"width": "4em"})
        for letter, option in letters.items()
    }

    def show(option: str) -> None:
        line = f"Your choice: {buttons[option].description}) {feedbacks.prose_html(option)}"
        answer.value = f"<div style='line-height:1.4'>{line}{answers[option]._repr_html_()}</div>"

    def choose_it(option: str) -> Callable[..., None]:
        def choose(_):
            show(option)
            keep(option)

        return guarded(choose, output)

    for option, button in buttons.items():
        button.on_click(choose_it(option))
    if chosen is not None:
        show(chosen)
    row = ipywidgets.HBox(list(buttons.values()), layout={"flex_flow": "row wrap", **WHOLE_WIDTH})
    options = ipywidgets.HTML(f"<div style='line-height:1.6'>{lines}</div>")
    box = ipywidgets.VBox([ipywidgets.HTML(head), options, row, answer, output], layout=WHOLE_WIDTH)
    folded = "".join(
        f"<li>{feedbacks.prose_html(option)}<details><summary style='cursor:pointer'>is it?</summary>"
        f"{feedback._repr_html_()}</details></li>"
        for option, feedback in answers.items()
    )
    plain = "\n".join([f"Question: {text}", *(f"{letter}) {option}" for letter, option in letters.items())])
    place(where, box, f"{head}<ol type='a'>{folded}</ol>", plain)


def progress(lab, lessons: Sequence[str] | None = None) -> plots.Table:
    """What the learner has done so far, one row a lesson, from the journal on this machine. A static table.

    Args:
        lessons: their names; None: those of the notebooks in the working folder, and any other that the journal knows.
    """
    known = journal.progress(journal.of(lab).read())
    if lessons is None:
        here = {path.stem for path in Path.cwd().glob("[0-9][0-9]_*.ipynb")}
        lessons = sorted(here | {name for name in known if name})
    rows = [[name.replace("_", " "), *_progress_cells(known.get(name))] for name in lessons]
    return plots.Table(["lesson", "state", "claims decided", "guesses", "exercises right", "questions"], rows)


def _progress_cells(lesson: journal.Progress | None) -> list[str]:
    if lesson is None:
        return ["not begun", "", "", "", ""]
    decided = sum(verdict != "not testable here" for verdict in lesson.claims.values())
    errors = [error for error in lesson.errors.values() if error is not None]
    guesses = f"{len(errors)} of {len(lesson.errors)}"
    guesses += f" (off by {', '.join(f'{error:.0%}' for error in errors)})" if errors else ""
    right = sum(status == "right" for status in lesson.exercises.values())
    answered = [first for first in lesson.questions.values() if first is not None]
    questions = f"{len(answered)} of {len(lesson.questions)}"
    questions += f" ({sum(answered)} right at once)" if answered else ""
    return [
        f"✓ finished {lesson.finished[:10]}" if lesson.finished else "begun",
        f"{decided} of {len(lesson.claims)}" if lesson.finished else "",
        guesses if lesson.errors else "",
        f"{right} of {len(lesson.exercises)}" if lesson.exercises else "",
        questions if lesson.questions else "",
    ]


def place(where: Any, box, static: str, plain: str, at_end: Callable[[], None] | None = None) -> None:
    """Display a box where there is a front end, and `static` (HTML) or `plain` (text) where there is none.

    Args:
        where: names the place among all of this kernel; the box that stands there is closed.
        at_end: called when this box is closed.
    """
    from IPython.display import display

    _replace(where, box)
    if at_end:
        _ends[where] = at_end
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    bundle = {"text/plain": plain, "text/html": static, "application/vnd.jupyter.widget-view+json": view}
    display(bundle, raw=True)


def image(axes, words: str) -> str:
    """A picture as an <img> that a screen reader can read out; its figure is closed."""
    import matplotlib.pyplot as plt

    shown = plots.image_html(plots.png(axes.figure), words)
    plt.close(axes.figure)
    return shown


def _replace(where: Any, box) -> None:
    """Close the box that stands at a place, if any, and put this one there."""
    if where in _ends:
        _ends.pop(where)()
    if where in _shown:
        _close(_shown[where])
    _shown[where] = box


def _close(widget) -> None:
    for child in getattr(widget, "children", ()):
        _close(child)
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None), widget):
        if part is not None:
            part.close()


def _show(result: Any) -> None:
    import matplotlib.pyplot as plt
    from IPython.display import display

    figure = getattr(result, "figure", None)
    if figure is not None:
        display(figure)
        plt.close(figure)
    elif result is not None:
        display(result)
