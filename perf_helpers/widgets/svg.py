"""Draw pictures as HTML and SVG, which are redrawn quickly while a slider moves and have the theme's colours.

Each function chooses content and scale and returns HTML; the markup is in drawings.html.j2. A picture is as wide as its
cell, and has a text for screen readers. A value that was not measured is never drawn as 0.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perf_helpers.plots import PALETTE, SERIES, Timeline
from perf_helpers.templates import template
from trainmem.texts import bytes_text, bytes_unit, number_text, parts_text
from trainmem.unknown import is_measured

_SIGNS = ("●", "■", "▲", "◆", "▼", "★")  # kinds of points differ in shape as well as in colour
_FAR = 8  # a limit more than this many times larger than the values does not stretch the axis


def bar(title: str, parts: Mapping[str, int], limits: Mapping[str, int]) -> str:
    """Draw bytes by category, in GiB, as HTML: a stacked bar with a legend, and a line across the bar for each limit.

    Args:
        title: the name of the bar, e.g. "Peak", for screen readers.
        parts: {category: bytes}, one section of the bar each.
        limits: {name: bytes}, e.g. the names and memory of cards.
    """
    total = sum(parts.values())
    above = min((size for size in limits.values() if size >= total), default=total)
    end = 1.08 * max(total, above if above < _FAR * total else total)
    words = f"{title} {bytes_text(total, binary=True)}: {parts_text(parts, binary=True)}"
    return _draw("bar", words=words, parts=parts, total=total, limits=limits, end=end)


def timeline(steps: Timeline, top: float, index: int, title: str) -> str:
    """Draw live bytes by category through one training step, as HTML.

    Args:
        steps: the live bytes of each category at each operation of the step.
        top: bytes at the upper end of the axis; give two pictures the same value to compare them.
        index: the operation at which a vertical line is drawn.
        title: shown above the picture.
    """
    end, heights, areas = 1.25 * top, [0] * len(steps), {}
    for category in steps.shown():  # each area reaches down to 0, and the lower categories are drawn over it
        heights = [height + max(0, size) for height, size in zip(heights, steps.series[category], strict=True)]
        stairs = (f"V{1000 - 1000 * height / end:.1f}H{right}" for right, height in enumerate(heights, start=1))
        areas[category] = f"M0 1000{''.join(stairs)}V1000Z"
    return _draw("timeline", steps=steps, title=title, index=index, top=top, end=end, areas=areas)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Draw a table of text as HTML.

    A row whose first text is a category of memory in `plots.PALETTE`, e.g. "weights", gets a mark of that colour.

    Args:
        header: the title of each column.
        rows: for each row, a text per column.
    """
    return _draw("table", header=header, rows=rows)


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A recipe (a run or an estimate) as a point of `scatter`: its name, peak in bytes, and samples per second."""

    name: str
    kind: str  # of its memory, e.g. "counted"; each kind has its sign
    peak_bytes: int | None  # None or unknown: not measured
    samples_per_second: float | None  # None or unknown: not measured

    @property
    def is_sized(self) -> bool:
        return is_measured(self.peak_bytes)

    @property
    def is_timed(self) -> bool:
        return is_measured(self.samples_per_second)

    @property
    def memory_text(self) -> str:
        return bytes_text(self.peak_bytes) if self.is_sized else "memory not measured"

    @property
    def speed_text(self) -> str:
        return number_text(self.samples_per_second, "samples/s", digits=3) if self.is_timed else "speed not measured"


def best_of_both(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point beats in both memory and speed (the Pareto front), least memory first.

    Points without a measured memory or speed are ignored.
    """
    costs = {p: (p.peak_bytes, -p.samples_per_second) for p in points if p.is_sized and p.is_timed}

    def is_beaten(size: float, slowness: float) -> bool:
        return any(cost != (size, slowness) and cost[0] <= size and cost[1] <= slowness for cost in costs.values())

    return [point for point in sorted(costs, key=costs.get) if not is_beaten(*costs[point])]


def scatter(points: Sequence[Point], chosen: Point | None, limits: Mapping[str, float]) -> str:
    """Draw recipes (runs and estimates) as points, by memory on the x axis and samples/s on the y axis, as HTML.

    A line joins the Pareto front. Recipes without a measured speed are in a strip below the plot, recipes without a
    measured memory in a strip on its left. Recipes without both are not drawn.

    Args:
        points: one per recipe.
        chosen: the point to highlight; None: none.
        limits: {name: bytes}, e.g. the names and memory of cards; each is a vertical line.
    """
    best, both = best_of_both(points), [point for point in points if point.is_sized and point.is_timed]
    untimed = [point for point in points if point.is_sized and not point.is_timed]
    unsized = [point for point in points if point.is_timed and not point.is_sized]
    words = ["Memory and speed"]
    for label, group in {"best of both": best, "speed not measured": untimed, "memory not measured": unsized}.items():
        figures = [f"{point.name} {point.memory_text if point.is_sized else point.speed_text}" for point in group]
        words += [f"{label}: {', '.join(figures)}"] if group else []
    largest = max((point.peak_bytes for point in points if point.is_sized), default=0)
    plot = {
        "kinds": list(dict.fromkeys(point.kind for point in points)),
        "end": 1.12 * max([largest, *(size for size in limits.values() if size < _FAR * largest)]),  # bytes
        "fastest": 1.2 * max((point.samples_per_second for point in points if point.is_timed), default=0),
    }
    both.sort(key=lambda point: point is chosen)  # drawn last, over the others
    plot |= {"best": best, "both": both, "untimed": untimed, "unsized": unsized, "chosen": chosen, "limits": limits}
    return _draw("scatter", words="; ".join(words), plot=plot)


def panel(title: str, unit: str, points: Sequence[tuple[float, float]], span: tuple[float, float]) -> str:
    """Draw a line over time as SVG, with its latest value in words.

    Args:
        title, unit: the name of the quantity, and the unit of its values.
        points: (seconds, value) of each sample that has a value.
        span: seconds at the left and right end of the axis.
    """
    highest = 100.0 if unit == "%" else 1.15 * max((value for _, value in points), default=0) or 1.0
    left, right, top, bottom = 46, 320, 42, 122  # pixels; drawings.html.j2 uses the same numbers
    across, up = (right - left) / (span[1] - span[0]), (bottom - top) / highest
    line = " ".join(f"{left + (at - span[0]) * across:.1f},{bottom - value * up:.1f}" for at, value in points)
    latest = number_text(points[-1][1], unit, digits=2) if points else "not available"
    return _draw("panel", title=title, unit=unit, highest=highest, span=span, line=line, latest=latest)


def round_step(least: float) -> float:
    """Return the smallest number >= `least` that is 1, 2 or 5 times a power of ten, as a step of an axis or slider."""
    power = math.floor(math.log10(least))
    steps = (float(f"{factor}e{power}") for factor in (1, 2, 5, 10))
    return next(step for step in steps if step >= least * (1 - 1e-9))


def _ticks(end: float, parts: int, unit: str = "", top: float | None = None) -> dict[str, float]:
    """Return {label: position} of about `parts` round numbers from 0 to `top`; position 1 is the value `end`."""
    top = top or end
    step = round_step(top / parts)
    return {f"{step * i:,g} {unit}".strip(): step * i / end for i in range(int(top / step) + 1)}


def _draw(picture: str, **facts) -> str:
    """Return the HTML of the macro `picture` in drawings.html.j2; `facts` are the macro's arguments."""
    return str(getattr(_markup(), picture)(**facts))


@functools.cache
def _markup():
    """Return the Jinja macros of drawings.html.j2, with the constants and functions that these macros use."""
    given = {"PALETTE": PALETTE, "SERIES": SERIES, "SIGNS": _SIGNS}
    return template("widgets/drawings.html.j2").make_module(given | {"ticks": _ticks, "bytes_unit": bytes_unit})
