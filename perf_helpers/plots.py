"""Pictures and tables of runs. One palette and one order of categories everywhere; each picture returns its Axes.

The colours are those of Okabe and Ito, which colour-blind readers tell apart; dashes, markers and labels say the same.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perf_helpers.texts import bytes_text, name_text, seconds_text
from perf_helpers.unknown import is_measured

if TYPE_CHECKING:
    from perf_helpers.lab.runs import Comparison, Run

PALETTE = {
    "weights": "#0072B2",
    "weight_copies": "#56B4E9",
    "gradients": "#D55E00",
    "optimizer_states": "#E69F00",
    "activations": "#009E73",
    "inputs": "#000000",
    "temporaries": "#CC79A7",
    "inside_operations": "#999999",
    "context": "#F0E442",
}
CATEGORIES = tuple(name for name in PALETTE if name != "context")  # the order of `lab.runs.CATEGORIES`, by a test
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000")
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def memory(runs: Sequence[Run], ax=None, title: str = "Peak memory"):
    """Stacked bars of the breakdown at the peak, one bar a run, with the total at its end."""
    runs = [run for run in runs if run.memory and run.memory.breakdown]
    if not runs:
        raise ValueError("none of these runs has its memory measured: run them with measure=('memory',)")
    ax, scale, unit = _bars(len(runs), ax, max(run.peak_bytes for run in runs))
    left = [0.0] * len(runs)
    rows = range(len(runs))
    for category in CATEGORIES:
        sizes = [max(0, run.memory.breakdown.get(category, 0)) / scale for run in runs]
        if max(sizes) < 0.002 * max(run.peak_bytes for run in runs) / scale:
            continue
        ax.barh(rows, sizes, left=left, color=PALETTE[category], label=name_text(category), height=0.62)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, run in enumerate(runs):
        ax.text(left[row], row, f" {bytes_text(run.peak_bytes)}", va="center", fontsize=10)
    ax.set_yticks(rows, [run.name for run in runs])
    ax.invert_yaxis()
    ax.set_xlim(0, max(left) * 1.22)
    ax.set_xlabel(f"{runs[0].memory.kind} memory at the peak ({unit})")
    ax.set_title(title, loc="left")
    _legend(ax)
    return ax


def timeline(run: Run, ax=None, title: str | None = None):
    """Live memory by category through one step, from its first operation to the optimizer's last."""
    if not run.memory or not run.memory.timeline:
        raise ValueError(f"{run.name!r} has no timeline: run it with measure=('memory',)")
    series = run.memory.timeline
    moments = len(series["phase"])
    totals = [sum(series[category][i] for category in CATEGORIES) for i in range(moments)]
    ax, scale, unit = _axes(ax, (8, 3.4), max(totals))
    shown = [category for category in CATEGORIES if max(series[category]) > 0.002 * max(totals)]
    ax.stackplot(
        range(moments),
        [[max(0, size) / scale for size in series[category]] for category in shown],
        labels=[name_text(category) for category in shown],
        colors=[PALETTE[category] for category in shown],
        step="mid",
        linewidth=0,
    )
    peak = max(range(moments), key=totals.__getitem__)
    ax.plot([peak], [totals[peak] / scale], "v", color="black", markersize=7)
    side = "left" if peak < moments * 0.7 else "right"
    ax.annotate(f" peak {bytes_text(totals[peak])} ", (peak, totals[peak] / scale * 1.03), ha=side, fontsize=10)
    start = 0
    for i in range(1, moments + 1):
        if i == moments or series["phase"][i] != series["phase"][start]:
            if start:
                ax.axvline(start - 0.5, color="black", linewidth=0.7, linestyle=":")
            if i - start > moments * 0.05:
                ax.text((start + i) / 2, max(totals) / scale * 1.17, series["phase"][start], ha="center", fontsize=10)
            start = i
    ax.set_ylim(0, max(totals) / scale * 1.26)
    ax.set_xlim(0, moments - 1)
    ax.set_xticks([])
    ax.set_xlabel("operations of one step, in order")
    ax.set_ylabel(f"live memory ({unit})")
    ax.set_title(title or run.name, loc="left")
    _legend(ax)
    return ax


def speed(comparisons: Sequence[Comparison], ax=None, title: str = "Speed against the baseline"):
    """Speed ratios with their intervals, one row a comparison; the line at 1 is the baseline."""
    if not comparisons:
        raise ValueError("no comparison to draw: make one with lab.compare")
    ax, _, _ = _bars(len(comparisons), ax, 1)
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
    ax.set_yticks(range(len(comparisons)), [item.other.name for item in comparisons])
    ax.set_ylim(len(comparisons) - 0.4, -0.7)
    ax.set_xlabel(f"samples per second / those of {comparisons[0].baseline.name} (line: interval, ticks: pairs)")
    ax.set_title(title, loc="left")
    return ax


def tradeoff(runs: Sequence[Run], ax=None, title: str = "Memory and speed"):
    """Every run as a point: peak memory across, samples per second up."""
    runs = [run for run in runs if is_measured(run.peak_bytes) and is_measured(run.samples_per_second)]
    if not runs:
        raise ValueError("none of these runs has both its memory and its speed measured")
    ax, scale, unit = _axes(ax, (7, 4), max(run.peak_bytes for run in runs))
    for i, run in enumerate(runs):
        point = (run.peak_bytes / scale, run.samples_per_second)
        ax.plot(*point, _MARKERS[i % len(_MARKERS)], color=SERIES[i % len(SERIES)], markersize=9)
        ax.annotate(f"  {run.name}", point, va="center", fontsize=9)
    ax.margins(x=0.3, y=0.15)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"peak memory ({unit})")
    ax.set_ylabel("samples per second")
    ax.set_title(title, loc="left")
    return ax


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    ax=None,
    title: str = "",
    markers: bool = True,
):
    """Several series over one x, told apart by colour, dash and marker, each labelled in the legend."""
    ax, _, _ = _axes(ax, (7, 3.8), 1)
    for i, (label, values) in enumerate(series.items()):
        marker = _MARKERS[i % len(_MARKERS)] if markers else None
        ax.plot(x, values, _LINES[i % len(_LINES)], marker=marker, color=SERIES[i % len(SERIES)], label=label)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.set_title(title, loc="left")
    if len(series) > 1:
        ax.legend(frameon=False, fontsize=10)
    return ax


def losses(groups: Mapping[str, Sequence[Sequence[float]]], ax=None, title: str = "Loss by step"):
    """Loss curves: for each group the median over its seeds as a line, and the range of its seeds as a band."""
    import numpy as np

    ax, _, _ = _axes(ax, (7, 3.8), 1)
    for i, (label, curves) in enumerate(groups.items()):
        length = min(map(len, curves))
        values = np.array([curve[:length] for curve in curves], dtype=float)
        steps, colour = np.arange(1, length + 1), SERIES[i % len(SERIES)]
        ax.plot(steps, np.median(values, axis=0), _LINES[i % len(_LINES)], color=colour, label=label)
        if len(values) > 1:
            ax.fill_between(steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.18, linewidth=0)
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("training loss")
    ax.set_title(title, loc="left")
    ax.legend(frameon=False, fontsize=10)
    return ax


class Table:
    """Rows under a header, shown as HTML in a notebook and as aligned text in a terminal."""

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = ""):
        self.header, self.rows, self.caption = list(header), [[_cell(value) for value in row] for row in rows], caption

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = [
            "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip()
            for row in [self.header, ["-" * width for width in widths], *self.rows]
        ]
        return "\n".join(([self.caption] if self.caption else []) + lines)

    def _repr_html_(self) -> str:
        style = "style='text-align:left;white-space:normal'"
        head = "".join(f"<th {style}>{html.escape(name)}</th>" for name in self.header)
        body = "".join(
            "<tr>" + "".join(f"<td {style}>{html.escape(value)}</td>" for value in row) + "</tr>" for row in self.rows
        )
        caption = f"<caption style='text-align:left'>{html.escape(self.caption)}</caption>" if self.caption else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def table(runs: Sequence[Run], caption: str = "") -> Table:
    """Runs side by side: status, peak memory, where the peak fell, step time, samples per second."""
    rows = [
        [
            run.name,
            run.status,
            bytes_text(run.peak_bytes),
            (run.memory and run.memory.peak_phase) or "",
            seconds_text(run.step_seconds),
            f"{run.samples_per_second:.3g}" if is_measured(run.samples_per_second) else "not measured",
        ]
        for run in runs
    ]
    kind = next((run.memory.kind for run in runs if run.memory), "counted")
    return Table(["run", "status", f"peak ({kind})", "peak is in", "step", "samples/s"], rows, caption)


def comparison(item: Comparison) -> Table:
    """Two runs side by side, with their ratios."""
    shown = table([item.baseline, item.other])
    memory_ratio = f"{item.memory_ratio:.3f} x" if is_measured(item.memory_ratio) else "not measured"
    speed_ratio = f"{item.speed_ratio} x" if item.speed_ratio.known else "not measured"
    shown.rows.append(["ratio", "", memory_ratio, "", "", speed_ratio])
    return shown


def comparison_html(item: Comparison) -> str:
    """The table of a comparison and, where both breakdowns are known, the two peaks as a picture."""
    text = comparison(item)._repr_html_()
    runs = [item.baseline, item.other]
    if not all(run.memory and run.memory.breakdown for run in runs):
        return text
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.5), dpi=110, layout="constrained")
    memory(runs, ax=figure.subplots())
    peaks = " and ".join(f"{run.name} {bytes_text(run.peak_bytes)}" for run in runs)
    return text + image_html(png(figure), f"Peak memory: {peaks}")


def words(figure) -> str:
    """What a figure shows, for a screen reader: titles, axes, series, and the texts in it."""
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


def figure_html(figure) -> str:
    """A figure as an <img> with its words."""
    return image_html(png(figure), words(figure))


def png(figure) -> str:
    """A figure as PNG in base64, cut to what is drawn."""
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    return base64.b64encode(file.getvalue()).decode()


def image_html(png: str, words: str) -> str:
    """A PNG as an <img> that a screen reader can read out: JupyterLab takes an alternative text from nowhere else."""
    style = "display:block;max-width:100%;height:auto;background:white"  # a dark page would hide the letters
    return f'<img style="{style}" alt="{html.escape(words)}" src="data:image/png;base64,{png}">'


def _cell(value: Any) -> str:
    return "not measured" if not is_measured(value) else f"{value:.4g}" if isinstance(value, float) else str(value)


def _axes(ax, size: tuple[float, float], largest: float):
    import matplotlib.pyplot as plt

    if ax is None:
        # No rc_context here: the first figure loads the notebook's backend, which would be undone with the context, and
        # no later figure would be shown.
        _, ax = plt.subplots(figsize=size, dpi=110, layout="constrained")
        ax.spines[["top", "right"]].set_visible(False)
    scale, unit = (1e9, "GB") if largest >= 2e9 else (1e6, "MB")
    return ax, scale, unit


def _bars(rows: int, ax, largest: float):
    return _axes(ax, (8, 1.5 + 0.5 * rows), largest)


def _legend(ax) -> None:
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
