"""Pictures made of HTML and SVG, for what is drawn anew while a slider moves: quick, and in the theme's colours.

Each function says what is to be seen and where, and returns a string of HTML; the markup stands in drawings.html.j2. A
picture is as wide as its cell, and a screen reader reads out its words. What is not measured is never drawn as 0.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perf_helpers.plots import PALETTE, SERIES, Timeline
from perf_helpers.texts import bytes_text, bytes_unit, name_text, number_text, parts_text
from perf_helpers.unknown import is_measured

CARDS = {f"{size} GB": size * 2**30 for size in (8, 16, 24, 40, 80, 141)}  # as they are sold: 8 GB are 8 * 2^30 bytes
DASHES = ((), (6, 3))  # of a panel's first and second line, in points
_SIGNS = ("●", "■", "▲", "◆", "▼", "★")  # of kinds of points, which differ in shape as well as in colour
_FAR = 8  # a limit so many times larger than what is shown does not stretch the axis


def bar(parts: Mapping[str, int], limits: Mapping[str, int]) -> str:
    """Bytes by category as one stacked bar with a legend, and the limits (bytes by name) as lines across it."""
    total = sum(parts.values())
    above = min((size for size in limits.values() if size >= total), default=total)
    end = 1.08 * max(total, above if above < _FAR * total else total)
    lines, named_at = _limits(dict(sorted(limits.items(), key=lambda item: item[1])), end), -1.0
    for line in lines:
        line["is_named"] = line["at"] - named_at > 0.12  # a name nearer to the last one would cover it
        named_at = line["at"] if line["is_named"] else named_at
    words = f"Peak {bytes_text(total)}: {parts_text(parts)}"
    return _draw("bar", words=words, parts=parts, total=total, end=end, limits=lines, axis=_axis(end))


def timeline(steps: Timeline, top: float, index: int | None = None, title: str = "") -> str:
    """Live bytes by category through one step.

    Args:
        top: bytes at the upper end of the axis: the same for two pictures that are to be compared.
        index: of the stretch of operations at which a line is to stand.
    """
    end, below, areas = 1.25 * top, [0] * len(steps), {}
    for category in steps.shown():
        above = [low + max(0, size) for low, size in zip(below, steps.series[category], strict=True)]
        areas[category], below = _area(below, above, end), above
    scale, unit = bytes_unit(top)
    levels = _ticks(end / scale, 3, unit, top / scale)
    return _draw("timeline", steps=steps, title=title, index=index, end=end, areas=areas, levels=levels)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text; a row whose first word is a category has its colour."""
    return _draw("table", header=header, rows=rows)


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A recipe in the picture of memory against speed."""

    name: str
    kind: str  # how its memory was found, e.g. "counted": each kind has its sign
    peak_bytes: int | None  # None or unknown: not measured
    samples_per_second: float | None  # None or unknown: not measured

    @property
    def memory_text(self) -> str:
        return bytes_text(self.peak_bytes) if is_measured(self.peak_bytes) else "memory not measured"

    @property
    def speed_text(self) -> str:
        speed = self.samples_per_second
        return number_text(speed, "samples/s", digits=3) if is_measured(speed) else "speed not measured"


def best_of_both(points: Sequence[Point]) -> list[Point]:
    """The points for which no other is both smaller and faster, the smallest first; none whose memory or speed is not
    measured, and none is beaten by such a one."""
    known = {
        point: (point.peak_bytes, point.samples_per_second)
        for point in points
        if is_measured(point.peak_bytes) and is_measured(point.samples_per_second)
    }
    best = [
        point
        for point, (size, speed) in known.items()
        if not any(
            other_size <= size and other_speed >= speed and (other_size, other_speed) != (size, speed)
            for other_size, other_speed in known.values()
        )
    ]
    return sorted(best, key=lambda point: point.peak_bytes)


def scatter(points: Sequence[Point], chosen: Point | None, limits: Mapping[str, float]) -> str:
    """Memory across, samples per second up; the best of both joined by a line, limits (bytes by name) as lines.

    A point without a speed stands in a strip below the others, one without a memory in a strip on their left: at its
    memory or its speed, and at no place of the other axis. A point without either is not drawn.
    """
    has_size = [point for point in points if is_measured(point.peak_bytes)]
    has_speed = [point for point in points if is_measured(point.samples_per_second)]
    unsized = [point for point in has_speed if point not in has_size]
    untimed = [point for point in has_size if point not in has_speed]
    sized = [point for point in has_size if point in has_speed]
    best = best_of_both(points)
    largest = max((point.peak_bytes for point in has_size), default=0)
    end = 1.12 * max([largest, *(size for size in limits.values() if size < _FAR * largest)])
    fastest = 1.2 * max((point.samples_per_second for point in has_speed), default=0)
    kinds = list(dict.fromkeys(point.kind for point in points))

    def mark(point: Point, is_named: bool = True, name_width: str = "60%") -> dict[str, Any]:
        return _sign(kinds.index(point.kind)) | {
            "title": f"{point.name}: {point.memory_text}, {point.speed_text}",
            "x": point.peak_bytes / end if point in has_size else 0.5,
            "bottom": _percent(point.samples_per_second / fastest) if point in has_speed else "13px",
            "is_chosen": point is chosen,
            "name": point.name if is_named and (point in best or point is chosen) else "",
            "name_width": name_width,
        }

    words = [
        f"{label}: {', '.join(f'{point.name} {text(point)}' for point in group)}"
        for label, group, text in (
            ("best of both", best, lambda point: point.memory_text),
            ("speed not measured", untimed, lambda point: point.memory_text),
            ("memory not measured", unsized, lambda point: point.speed_text),
        )
        if group
    ]
    ringed = f" (ringed: {chosen.name})" if chosen in untimed else ""  # in one row a name would cover the next sign
    return _draw(
        "scatter",
        words="; ".join(["Memory and speed", *words]),
        speeds=_ticks(fastest, 4) if has_speed else [],
        sized=[mark(point) for point in sorted(sized, key=lambda point: point is chosen)],
        unsized=[mark(point, name_width="300px") for point in unsized],
        untimed=[mark(point, is_named=False) for point in untimed],
        unsized_note="memory not measured",
        untimed_note=f"speed not measured{ringed}",
        front=" ".join(
            f"{1000 * p.peak_bytes / end:.1f},{1000 - 1000 * p.samples_per_second / fastest:.1f}" for p in best
        ),
        limits=_limits(limits, end) if has_size else [],
        axis=_axis(end, "peak memory") if has_size else None,
        kinds=[_sign(number) | {"label": kind} for number, kind in enumerate(kinds)],
    )


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over time: what the monitor's live picture and the one that it leaves both show."""

    title: str
    unit: str  # of the values
    lines: Mapping[
        str, Sequence[tuple[float, float]]
    ]  # by label: (seconds, value); a sample without the value is left out
    span: tuple[float, float]  # seconds at the left and the right end of the axis

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})"

    @property
    def top(self) -> float:
        """Where the axis of the values ends."""
        if self.unit == "%":
            return 100.0
        return 1.15 * max((value for points in self.lines.values() for _, value in points), default=0) or 1.0


def panel(shown: Panel) -> str:
    """A panel as SVG, with the latest value of each line in words."""
    left, right, top, bottom = 46, 320, 58, 138  # pixels; the axes stand there in the markup too
    across, up = (right - left) / (shown.span[1] - shown.span[0]), (bottom - top) / shown.top
    latest = {
        label: f"{label} {number_text(points[-1][1], shown.unit, digits=3)}" for label, points in shown.lines.items()
    } or {shown.title: "not available"}
    lines = [
        {
            "label": text,
            "colour": SERIES[number],
            "dashes": " ".join(map(str, DASHES[number])) or "none",
            "points": " ".join(
                f"{left + (seconds - shown.span[0]) * across:.1f},{bottom - value * up:.1f}"
                for seconds, value in shown.lines.get(label, ())
            ),
        }
        for number, (label, text) in enumerate(latest.items())
    ]
    start, end = (f"{seconds:.0f} s" for seconds in shown.span)
    return _draw(
        "panel",
        words=f"{shown.title}: {', '.join(latest.values())}",
        heading=shown.heading,
        top=number_text(shown.top, digits=3),
        start=start,
        end=end,
        lines=lines,
    )


# What stands where ---------------------------------------------------------------------------------------------------


def _limits(limits: Mapping[str, float], end: float) -> list[dict[str, Any]]:
    """The limits that an axis up to `end` has, with their places as a share of it."""
    return [{"label": name, "at": size / end} for name, size in limits.items() if size <= end]


def _axis(end: float, what: str = "") -> dict[str, Any]:
    """An axis of bytes under a picture."""
    scale, unit = bytes_unit(end)
    return {"ticks": _ticks(end / scale, 4), "caption": f"{what} ({unit})".strip()}


def _ticks(end: float, parts: int, unit: str = "", top: float | None = None) -> list[dict[str, Any]]:
    """Round numbers on an axis from 0 to `end`, about `parts` of them up to `top`; their places are shares of `end`."""
    top = top or end
    step = 10 ** math.floor(math.log10(top / parts))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= top / parts)
    values = [step * i for i in range(int(top / step) + 1)]
    return [{"label": f"{value:,g} {unit}".strip(), "at": value / end} for value in values]


def _area(below: Sequence[float], above: Sequence[float], end: float) -> str:
    """What lies between two step lines, as the path of an SVG 1000 units high, in which an operation is 1 unit wide."""

    def corners(values: Sequence[float]) -> Iterator[str]:
        for i, value in enumerate(values):
            y = f"{1000 - 1000 * value / end:.1f}"
            yield from (f"{i} {y}", f"{i + 1} {y}")

    return "M" + "L".join([*corners(above), *reversed([*corners(below)])]) + "Z"


def _sign(number: int) -> dict[str, str]:
    return {"colour": SERIES[number % len(SERIES)], "sign": _SIGNS[number % len(_SIGNS)]}


def _percent(share: float) -> str:
    """A share of a picture's width or height, as a length of CSS."""
    return f"{share:.2%}"


def _draw(picture: str, **facts) -> str:
    """A macro of drawings.html.j2, filled in."""
    return str(getattr(_markup(), picture)(**facts))


@functools.cache
def _markup():
    """The macros of drawings.html.j2, which escape whatever they are given."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("perf_helpers", "widgets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"percent": _percent, "bytes": bytes_text, "name": name_text}
    environment.globals["PALETTE"] = PALETTE
    return environment.get_template("drawings.html.j2").module
