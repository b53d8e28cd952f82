"""Pictures of runs, with one palette and one order of categories; each picture function returns its Axes.

The colours are Okabe and Ito's, which colour-blind readers can distinguish; dashes, markers and labels differ too.
These pictures are drawn with matplotlib, so that a lesson can save them and draw into them. Pictures that are redrawn
while a slider moves are HTML (`perf_helpers.widgets.svg`), with the same palette, units, words and `Timeline`.
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from trainmem.records import CATEGORIES, Comparison, Run
from trainmem.tables import Table
from trainmem.tables import table as table  # lessons call plots.table
from trainmem.texts import bytes_text, bytes_unit, name_text, parts_text
from trainmem.texts import seconds_text as seconds_text  # lessons call plots.seconds_text
from trainmem.unknown import RunFailed, is_measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = {
    "weights": "#0072B2",
    "frozen_weights": "#332288",
    "quantized_weights": "#999933",
    "weight_copies": "#56B4E9",
    "gradients": "#D55E00",
    "optimizer_states": "#E69F00",
    "activations": "#009E73",
    "key_value_cache": "#882255",
    "predictions": "#661100",
    "inputs": "#000000",
    "temporaries": "#CC79A7",
    "inside_operations": "#999999",
    "context": "#F0E442",
}
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000")
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_TOO_THIN = 0.002  # a category whose share of the picture's largest total never exceeds this is not drawn


def memory(runs: Sequence[Run], ax: Axes | None = None, title: str = "Peak memory") -> Axes:
    """Draw stacked bars of the memory at the peak by category, one bar per run, labelled with its total.

    Args:
        runs: runs with a breakdown; others are left out.
        ax, title: the axes to draw into (None: new ones), and the text above them.

    Raises:
        ValueError: none of the runs has a breakdown. If one of them failed, RunFailed is raised instead.
    """
    measured = [run for run in runs if run.memory and run.memory.breakdown]
    if not measured:
        raise no_data_error(runs, "none of these runs has measured memory: run them with measure='memory'")
    runs = measured
    scale, unit = bytes_unit(max(run.peak_bytes for run in runs))
    ax = _axes(ax, title, f"{runs[0].memory.kind} memory at the peak ({unit})", rows=len(runs))
    ends, least = [0.0] * len(runs), _TOO_THIN * max(run.peak_bytes for run in runs) / scale
    for category in CATEGORIES:
        widths = [max(0, run.memory.breakdown.get(category, 0)) / scale for run in runs]
        if max(widths) >= least:
            ax.barh(range(len(runs)), widths, 0.62, ends, color=PALETTE[category], label=name_text(category))
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for row, (end, run) in enumerate(zip(ends, runs, strict=True)):
        ax.text(end, row, f" {bytes_text(run.peak_bytes)}", va="center", fontsize=10)
    ax.set_yticks(range(len(runs)), [run.name for run in runs], parse_math=False)
    ax.invert_yaxis()
    ax.set_xlim(0, max(ends) * 1.22)
    _legend(ax)
    return ax


def no_data_error(runs: Iterable[Run], otherwise: str) -> RunFailed | ValueError:
    """Return the exception to raise if none of the runs has the data that a picture needs.

    It is RunFailed with the first failure among the runs; if no run failed, ValueError with the text `otherwise`.
    """
    failed = next((run.failure for run in runs if not run.ok), None)
    return RunFailed(failed) if failed else ValueError(otherwise)


class Timeline:
    """Live bytes by category through one training step, as numbers and in words; used by every picture of a step.

    Args:
        series: {name: list}, as in `Memory.timeline`: a list of bytes for each category, and the lists "phase",
            "operation" and "module". Each list has about 200 elements, one per moment; methods take a moment's index.
    """

    def __init__(self, series: Mapping[str, Sequence]):
        self.series = series
        self.phases: Sequence[str] = series["phase"]
        self.totals = [sum(self.parts(index).values()) for index in range(len(self))]  # bytes
        self.peak = max(range(len(self)), key=self.totals.__getitem__)  # the index of the highest total
        self.highest_bytes = self.totals[self.peak]

    def __len__(self) -> int:
        return len(self.phases)

    def parts(self, index: int) -> dict[str, int]:
        """Return {category: live bytes} at moment `index` of the step."""
        return {category: self.series[category][index] for category in CATEGORIES if category in self.series}

    def where(self, index: int) -> dict[str, str]:
        """Return the names {"phase": ..., "operation": ..., "module": ...} at moment `index`; "" for unknown names."""
        return {name: self.series[name][index] for name in ("phase", "operation", "module")}

    def where_text(self, index: int) -> str:
        """Return phase, operation and module at moment `index` as text, e.g. "backward, aten.mm of layer.1"."""
        phase, operation, module = self.where(index).values()
        return phase + (f", {operation}" if operation else "") + (f" of {module}" if module else "")

    def text(self, index: int) -> str:
        """Describe moment `index` of the step: total bytes, phase, operation, module and bytes by category."""
        return f"{bytes_text(self.totals[index])} in {self.where_text(index)}: {parts_text(self.parts(index))}"

    def phase_ranges(self) -> list[tuple[str, int, int]]:
        """Return the phases in the order of time: (phase, index of its first moment, index after its last moment)."""
        edges = [i for i in range(1, len(self)) if self.phases[i] != self.phases[i - 1]]
        return [(self.phases[first], first, end) for first, end in itertools.pairwise([0, *edges, len(self)])]

    def shown(self, highest_bytes: float | None = None) -> list[str]:
        """Return the categories that exceed `_TOO_THIN` times `highest_bytes`, where the axis ends (None: the peak)."""
        least = _TOO_THIN * (highest_bytes or self.highest_bytes)
        return [category for category in CATEGORIES if max(self.series.get(category, [0])) > least]


def timeline(run: Run, ax: Axes | None = None, title: str | None = None) -> Axes:
    """Draw live memory by category through one step, from its first operation to the optimizer's last.

    Args:
        run: a run measured with measure="memory".
        ax, title: the axes to draw into (None: new ones), and the text above them (default: the run's name).

    Raises:
        ValueError: the run has no timeline. If the run failed, RunFailed is raised instead.
    """
    if not run.memory or not run.memory.timeline:
        raise no_data_error([run], f"run {run.name!r} has no timeline: run it with measure='memory'")
    steps = Timeline(run.memory.timeline)
    scale, unit = bytes_unit(steps.highest_bytes)
    ax = _axes(ax, title or run.name, "operations of one step, in order", f"live memory ({unit})", size=(8, 3.4))
    shown, top = steps.shown(), steps.highest_bytes / scale
    heights = [[max(0, size) / scale for size in steps.series[category]] for category in shown]
    named = {"labels": [*map(name_text, shown)], "colors": [PALETTE[category] for category in shown]}
    ax.stackplot(range(len(steps)), heights, **named, step="mid", linewidth=0)
    ax.plot([steps.peak], [top], "v", color="black", markersize=7)
    side = "left" if steps.peak < len(steps) * 0.7 else "right"
    ax.annotate(f" peak {bytes_text(steps.highest_bytes)} ", (steps.peak, top * 1.03), ha=side, fontsize=10)
    for phase, first, end in steps.phase_ranges():
        if first:
            ax.axvline(first - 0.5, color="black", linewidth=0.7, linestyle=":")
        if end - first > len(steps) * 0.05:
            ax.text((first + end) / 2, top * 1.17, phase, ha="center", fontsize=10)
    ax.set_ylim(0, top * 1.26)
    ax.set_xlim(0, len(steps) - 1)
    ax.set_xticks([])
    _legend(ax)
    return ax


def speed(comparisons: Sequence[Comparison], ax: Axes | None = None, title: str = "Speed against the baseline") -> Axes:
    """Draw speed ratios with their intervals, one row per comparison. The vertical line at 1 is the baseline.

    Args:
        comparisons: what `Lab.compare` returned.
        ax, title: the axes to draw into (None: new ones), and the text above them.

    Raises:
        ValueError: `comparisons` is empty.
    """
    if not comparisons:
        raise ValueError("no comparison to draw: make one with lab.compare")
    label = f"samples per second / those of {comparisons[0].baseline.name} (line: interval, ticks: pairs)"
    ax = _axes(ax, title, label, rows=len(comparisons))
    for row, item in enumerate(comparisons):
        ratio = item.speed_ratio
        if not ratio.known:
            ax.text(1, row, "not measured", ha="center", va="center", fontsize=10, backgroundcolor="white")
            continue
        ax.plot([ratio.low, ratio.high], [row, row], color=SERIES[0], linewidth=2.5, solid_capstyle="butt")
        ax.plot(ratio.pairs, [row] * len(ratio.pairs), "|", color="#777777", markersize=9)
        ax.plot([ratio.value], [row], "o", color=SERIES[0], markersize=8)
        ax.text(ratio.value, row - 0.2, f"{ratio.value:.2f} x", ha="center", va="bottom", fontsize=10)
    ax.axvline(1, color="black", linewidth=1)
    ax.set_yticks(range(len(comparisons)), [item.other.name for item in comparisons], parse_math=False)
    ax.set_ylim(len(comparisons) - 0.4, -0.7)
    return ax


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    ax: Axes | None = None,
    title: str = "",
    markers: bool = True,
) -> Axes:
    """Draw several series over one x axis, with different colours, dashes and markers, and a legend.

    A line has a gap where its value is None or unknown. The legend marks a series without a value as "not measured".

    Args:
        x: the position of each value on the x axis.
        series: {label: values}, each as long as `x`.
        xlabel, ylabel: titles of the axes, with units.
        ax, title: the axes to draw into (None: new ones), and the text above them.
        markers: whether to mark each value.
    """
    ax = _axes(ax, title, xlabel, ylabel)
    for i, (label, values) in enumerate(series.items()):
        values = [value if is_measured(value) else None for value in values]
        marker = _MARKERS[i % len(_MARKERS)] if markers else None
        ax.plot(x, values, marker=marker, **_style(i, label, values))
    if len(series) > 1:
        ax.legend(frameon=False, fontsize=10)
    return ax


def losses(
    groups: Mapping[str, Sequence[Sequence[float]]], ax: Axes | None = None, title: str = "Loss by step"
) -> Axes:
    """Draw one loss curve per group: the median over its seeds as a line, and the range over its seeds as a band.

    Args:
        groups: {label: for each seed its losses, one per optimizer step}; all are cut to the group's shortest list.
        ax, title: the axes to draw into (None: new ones), and the text above them.
    """
    import numpy as np

    ax = _axes(ax, title, "optimizer step", "training loss")
    for i, (label, curves) in enumerate(groups.items()):
        length = min(map(len, curves))
        values, steps = np.array([curve[:length] for curve in curves], dtype=float), range(1, length + 1)
        (line,) = ax.plot(steps, np.median(values, axis=0), **_style(i, label, itertools.chain.from_iterable(curves)))
        if len(values) > 1:
            ax.fill_between(steps, values.min(0), values.max(0), color=line.get_color(), alpha=0.18, linewidth=0)
    ax.legend(frameon=False, fontsize=10)
    return ax


def comparison(item: Comparison) -> Table:
    """Return a table of the two runs of the comparison `item`, with rows for their memory and speed ratios."""
    shown = table([item.baseline, item.other])
    memory_ratio = f"{item.memory_ratio:.3f} x" if is_measured(item.memory_ratio) else "not measured"
    speed_ratio = f"{item.speed_ratio} x" if item.speed_ratio.known else "not measured"
    clock = " by CPU time" if item.wall_ratio else ""
    shown.rows.append(["ratio", "", memory_ratio, "", "", f"{speed_ratio}{clock}"])
    if item.wall_ratio:
        shown.rows.append(["speed ratio, wall clock", "", "", "", "", f"{item.wall_ratio} x"])
    return shown


def comparison_html(item: Comparison) -> str:
    """Return the table of the comparison `item` as HTML, with a picture of the peaks if both runs have breakdowns."""
    text, runs = comparison(item)._repr_html_(), (item.baseline, item.other)
    if not all(run.memory and run.memory.breakdown for run in runs):
        return text
    peaks = " and ".join(f"{run.name} {bytes_text(run.peak_bytes)}" for run in runs)
    return text + picture_html(memory(runs), f"Peak memory: {peaks}")


Comparison._repr_html_ = comparison_html  # a notebook calls it; set here because `trainmem.records` imports no pictures


def words(figure: Figure) -> str:
    """Return a figure's titles, axis labels, series names and annotations as text for a screen reader."""
    parts = []
    for ax in figure.axes:
        rows = [label.get_text() for label in (*ax.get_yticklabels(), *ax.get_xticklabels())]
        named = [text for text in rows if text and not text.replace("\N{MINUS SIGN}", "").replace(".", "").isdigit()]
        series = ax.get_legend_handles_labels()[1]
        notes = [text.get_text().strip() for text in ax.texts]
        title = ax.get_title(loc="left") or ax.get_title()
        for text in (title, ax.get_ylabel(), ax.get_xlabel(), ", ".join(series), ", ".join(named), ", ".join(notes)):
            parts += [text] if text and text not in parts else []
    return "; ".join(" ".join(part.split()) for part in parts)[:600]


def in_a_notebook() -> bool:
    """Return whether this process is a Jupyter kernel, so that a front end may show pictures."""
    ipython = sys.modules.get("IPython")
    return bool(ipython and getattr(ipython.get_ipython(), "kernel", None))


def add_alternative_texts() -> None:
    """Make a Jupyter kernel show figures with an alternative text."""
    if in_a_notebook():
        from matplotlib.figure import Figure

        Figure._repr_html_ = image_html  # matplotlib's notebook backend removes formatters registered with the shell
        # The backend's own PNG would be a second copy, without the text, and take as long to draw.
        sys.modules["IPython"].get_ipython().config.InlineBackend.figure_formats = []


def picture_html(ax: Axes, text: str) -> str:
    """Return the picture on `ax` as an <img> for a static page, with the alternative `text`; close the figure."""
    import matplotlib.pyplot as plt

    shown = image_html(ax.figure, text)
    plt.close(ax.figure)
    return shown


def image_html(figure: Figure, text: str = "") -> str:
    """Return a figure, cropped, as an <img>, the only tag from which JupyterLab reads an alternative text.

    Args:
        text: the alternative text (default: `words(figure)`).
    """
    import matplotlib.pyplot as plt

    if plt.get_backend().endswith("inline"):
        plt.uninstall_repl_displayhook()  # it draws each figure after its cell once more, which nothing shows here
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    png = base64.b64encode(file.getvalue()).decode()
    style = "display:block;max-width:100%;height:auto;background:white"  # a dark page would hide the letters
    return f'<img style="{style}" alt="{html.escape(text or words(figure))}" src="data:image/png;base64,{png}">'


def _axes(
    ax: Axes | None, title: str, xlabel: str, ylabel: str = "", rows: int = 0, size: tuple[float, float] = (7, 3.8)
) -> Axes:
    """Set title and labels on `ax`, or on new axes if `ax` is None; return the axes.

    `size`: (width, height) of a new figure in inches; if `rows` is not 0, the height fits `rows` bars instead.
    """
    if ax is None:
        import matplotlib.pyplot as plt

        # No rc_context here: the first figure loads the notebook's backend, the end of the context would unload it, and
        # no later figure would be shown.
        size = (8, 1.5 + 0.5 * rows) if rows else size
        _, ax = plt.subplots(figsize=size, dpi=110, layout="constrained")
        ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(title, loc="left", parse_math=False)  # a name with two dollar signs is not a formula
    ax.set_xlabel(xlabel, parse_math=False)
    ax.set_ylabel(ylabel, parse_math=False)
    return ax


def _style(number: int, label: str, values: Iterable[float | None]) -> dict[str, str]:
    """Return {"linestyle", "color", "label"} of a series, as matplotlib's plot takes them.

    `number`: place of the series in its picture, which sets style and colour. `label`: the series' name;
    "(not measured)" is added if none of `values` is known.
    """
    label = label if any(map(is_measured, values)) else f"{label} (not measured)"
    return {"linestyle": _LINES[number % len(_LINES)], "color": SERIES[number % len(SERIES)], "label": label}


def _legend(ax: Axes) -> None:
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
