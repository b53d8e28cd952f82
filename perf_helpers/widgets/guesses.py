"""Guesses: numbers that a learner commits before an experiment, and their comparison with the measurement."""

import html
import math
from collections.abc import Mapping
from xml.sax.saxutils import quoteattr

from perf_helpers import plots
from perf_helpers.course import learner_log
from perf_helpers.lab import Lab
from perf_helpers.widgets.exercises import Feedback, prose_html
from perf_helpers.widgets.frame import ROW, place
from perf_helpers.widgets.svg import round_step
from trainmem.texts import number_text
from trainmem.unknown import is_measured

_COLOURS = {"your guess": plots.SERIES[4], "the estimate": plots.SERIES[5], "measured": plots.SERIES[0]}


def predict(lab: Lab, key: str, question: str, unit: str, low: float, high: float) -> None:
    """Ask for a guess before an experiment: show a slider, a linked number field, and a button that commits the guess.

    The journal keeps the guess, and running the cell again shows it. Without a front end, only the question is shown. A
    guess that is committed after `revealed` has shown the measured value is kept too, but does not count.

    Args:
        key: names the question within the lesson.
        question: plain text; words between backticks are code.
        unit: unit of the guess, e.g. "MB", "%", "x".
        low, high: smallest and largest possible guess, in this unit.

    Raises:
        ValueError: `low` is not below `high`.
    """
    import ipywidgets

    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"low={low!r}, high={high!r}: give two numbers, the smaller one first")
    kept, _ = _guesses(lab, key)
    start = min(max((low + high) / 2 if kept is None else kept, low), high)
    limits = {"min": low, "max": high, "value": start, "style": {"description_width": "initial"}}
    limits["layout"] = {"flex": "1 1 14em", "max_width": "100%"}
    fine = round_step((high - low) / 2500)  # the slider rounds a typed number to its steps, so these must be fine
    slider = ipywidgets.FloatSlider(**limits, step=fine, readout=False, description="your guess")
    field = ipywidgets.BoundedFloatText(**limits, step=round_step((high - low) / 250), description=f"in {unit}")
    ipywidgets.link((slider, "value"), (field, "value"))
    button = ipywidgets.Button(description="commit", tooltip="keep this guess", layout={"width": "7em"})
    state, output = ipywidgets.HTML(_state_html(lab, key, unit)), ipywidgets.Output()

    def commit(_):
        learner_log.keep(lab, "guess", key, guess=float(field.value), unit=unit)
        state.value = _state_html(lab, key, unit)

    button.on_click(output.capture()(commit))
    head = f"<div style='line-height:1.4'><b>Predict</b>: {prose_html(question)}</div>"
    row = ipywidgets.HBox([slider, field, button], layout=ROW)
    parts = [ipywidgets.HTML(head), row, state, output]
    about = f"data-guess={quoteattr(key)} data-unit={quoteattr(unit)} data-low={low} data-high={high}"  # for the site
    static = f"<div {about}>{head}{state.value}</div>"
    place(("predict", lab.lesson, key), parts, static, f"Predict: {question}")
    lab.guess_units[key] = unit


def revealed(lab: Lab, key: str, measured: float | None, estimate: float | None = None) -> Feedback:
    """Return the feedback on a guess: its error, and a picture of guess, estimate and measured value.

    A guess counts only if it was committed before the value was first shown. If none counts, the feedback says so.

    Args:
        key: the key that was given to `predict`.
        measured: the measured value, in the unit of `predict`; None or unknown: it could not be measured.
        estimate: the value of `trainmem.estimate.estimate` in the same unit; None or unknown: it is not shown.

    Raises:
        ValueError: this lab has not asked for a guess with this key.
    """
    if key not in lab.guess_units:
        raise ValueError(f"key={key!r}: no guess was made yet. Run the cell with predict(lab, {key!r}, ...) first")
    unit = lab.guess_units[key]
    estimate = estimate if is_measured(estimate) and math.isfinite(estimate) else None
    kept, counted = _guesses(lab, key)
    if not is_measured(measured) or not math.isfinite(measured):
        return Feedback("no guess", "nothing was measured, so a guess cannot be scored")
    measured = float(measured)
    learner_log.keep(lab, "revealed", key, guess=counted, measured=measured, estimate=estimate, unit=unit)
    text = f"measured {number_text(measured, unit)}"
    if counted is None:
        text += "; next time, put a number first"
    else:
        text = f"your guess was {number_text(counted, unit)}, {text}: {learner_log.off(counted, measured):.0%} off"
    if estimate is not None:
        text += f". The estimate was {number_text(estimate, unit)}: {learner_log.off(estimate, measured):.0%} off"
    if kept != counted:
        text += f". Your {number_text(kept, unit)} came after the fact and does not count"
    figures = {"your guess": counted, "the estimate": estimate, "measured": measured}
    known = {name: value for name, value in figures.items() if value is not None}  # only these get a bar
    about = f"data-revealed={quoteattr(key)} data-unit={quoteattr(unit)} data-measured={measured}"
    return Feedback("no guess" if counted is None else "guess", text, f"<div {about}>{_bars_html(known, unit)}</div>")


def _guesses(lab: Lab, key: str) -> tuple[float | None, float | None]:
    """Return the latest guess, and the latest guess that counts, i.e. that came before the measurement was revealed.

    Each is None if there is none. `key` names the guess within the lab's lesson.
    """
    entries = learner_log.of(lab).read()
    return learner_log.guess(entries, lab.lesson, key), learner_log.counted_guess(entries, lab.lesson, key)


def _state_html(lab: Lab, key: str, unit: str) -> str:
    """Return HTML with the guess in `unit`, and whether it came too late to count; or HTML that says there is none."""
    kept, counted = _guesses(lab, key)
    if kept is None:
        return "<div>No guess yet. Commit one before you run on.</div>"
    late = ", after the fact: the measurement was already revealed, so this guess is not scored."
    text = f"● Your guess: {number_text(kept, unit)}{'. It is kept.' if kept == counted else late}"
    return f"<div role='status'>{html.escape(text)}</div>"


def _bars_html(values: Mapping[str, float], unit: str) -> str:
    """Return a bar chart of {name: value}, in the given unit, as an <img> with an alternative text."""
    from matplotlib.figure import Figure

    # A small figure with large letters stays readable when a narrow page scales it down.
    figure = Figure(figsize=(4.6, 0.9 + 0.4 * len(values)), dpi=110, layout="constrained")
    ax, texts = figure.subplots(), {name: number_text(value, unit) for name, value in values.items()}
    bars = ax.barh(list(values), list(values.values()), color=[_COLOURS[name] for name in values], height=0.62)
    ax.bar_label(bars, [f" {text}" for text in texts.values()], fontsize=12)
    ax.margins(x=0.45)
    ax.locator_params(axis="x", nbins=4)
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=12)
    ax.set_xlabel(unit, fontsize=12, parse_math=False)
    return plots.image_html(figure, "; ".join(f"{name} {text}" for name, text in texts.items()))
