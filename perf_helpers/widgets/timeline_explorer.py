"""The timeline explorer: live memory during a training step of one run, or of two runs in two pictures."""

from collections.abc import Sequence

from perf_helpers import plots
from perf_helpers.widgets import svg
from perf_helpers.widgets.frame import ROW, WHOLE_WIDTH, html_box, observe, place
from trainmem.estimate import MemoryEstimate
from trainmem.records import Run
from trainmem.texts import bytes_text


def timeline(*runs: Run | MemoryEstimate) -> None:
    """Show live memory by category through a step of one or two runs, one below the other; a slider selects a moment.

    Args:
        runs: the runs (measured with measure="memory") or estimates to choose from; at first the first two are shown.

    Raises:
        ValueError: none of the runs has a timeline. If one of them failed, RunFailed is raised instead.
    """
    import ipywidgets

    usable = {run.name: run for run in runs if run.memory and run.memory.timeline}
    if not usable:
        raise plots.no_data_error(runs, "none of these runs has a timeline: run them with measure='memory'")
    steps = {name: plots.Timeline(run.memory.timeline) for name, run in usable.items()}
    names, last = list(steps), max(map(len, steps.values())) - 1
    wide = {**WHOLE_WIDTH, "flex": "1 1 18em"}
    upper = ipywidgets.Dropdown(options=names, value=names[0], description="above", layout=wide)
    lower = ipywidgets.Dropdown(options=["", *names], value=[*names, ""][1], description="below", layout=wide)
    slider = ipywidgets.IntSlider(min=0, max=last, description="moment", readout=False, layout=WHOLE_WIDTH)
    picture, output = html_box(), ipywidgets.Output()

    def draw(_=None) -> None:
        shown = [(name, steps[name]) for name in (upper.value, lower.value) if name]
        picture.value = _picture(shown, slider.value / last)

    def to_the_peak(_=None) -> None:
        above = steps[upper.value]
        value = round(last * above.peak / (len(above) - 1))
        if slider.value == value:
            draw()
        slider.value = value

    button = ipywidgets.Button(description="to the peak", tooltip="move to the peak of the upper run")
    button.on_click(output.capture()(to_the_peak))
    observe([upper, lower, slider], draw, output)
    to_the_peak()
    top = ipywidgets.Box([upper, lower, button] if len(names) > 1 else [button], layout=ROW)
    words = {name: f"{name}: peak {steps[name].text(steps[name].peak)}" for name in names[:2]}
    static = "".join(plots.picture_html(plots.timeline(usable[name]), text) for name, text in words.items())
    place(("timeline", *names), [top, slider, picture, output], static, "\n".join(words.values()))


def _picture(shown: Sequence[tuple[str, plots.Timeline]], share: float) -> str:
    """Return HTML: timelines on one scale, a line at `share` of each (0: start, 1: end), and a table of that moment."""
    top = max(steps.highest_bytes for _, steps in shown)
    indices = [round(share * (len(steps) - 1)) for _, steps in shown]
    pictures, columns = "", []
    for (name, steps), index in zip(shown, indices, strict=True):
        pictures += svg.timeline(steps, top, index, name)
        parts = steps.parts(index) | {"total": steps.totals[index]}
        columns.append(steps.where(index) | {key: bytes_text(size) for key, size in parts.items()})
    seen = [category for category in plots.CATEGORIES if any(category in steps.shown(top) for _, steps in shown)]
    rows = [[key, *(column[key] for column in columns)] for key in ("phase", "operation", "module", "total", *seen)]
    return pictures + svg.table(["at the line", *(name for name, _ in shown)], rows)
