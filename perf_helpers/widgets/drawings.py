"""Pictures made of HTML and SVG, for what is drawn anew while a slider moves: quick, and in the theme's colours.

Each returns a string of HTML as wide as its cell. Text keeps its size (13 px, more than 9 pt) where the picture
shrinks, and a screen reader reads out the picture's words.
"""

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perf_helpers.lab.runs import CATEGORIES
from perf_helpers.plots import PALETTE, SERIES, bytes_text, name_text
from perf_helpers.unknown import is_measured

# Signs that differ in shape as well as in colour.
_SIGNS = ("●", "■", "▲", "◆", "▼", "★")
NO_SPEED = "speed not measured"
_TEXT = "font-size:13px;line-height:1.35;overflow-wrap:anywhere"
_OUTLINE = "stroke='currentColor' vector-effect='non-scaling-stroke' fill='none'"


def bar(parts: Mapping[str, int], limits: Mapping[str, int]) -> str:
    """Bytes by category as one stacked bar with a legend, and the limits (bytes by name) as lines across it."""
    total = sum(parts.values())
    above = min((size for size in limits.values() if size >= total), default=total)
    end = 1.08 * max(total, above if above < 8 * total else total)
    shown = {name: size for name, size in parts.items() if size > 0}
    segments = "".join(
        f"<div title='{_safe(name_text(name))} {bytes_text(size)}' "
        f"style='width:{100 * size / end:.3f}%;background:{PALETTE[name]}'></div>"
        for name, size in shown.items()
    )
    lines, free = "", -100.0
    for name, size in sorted(limits.items(), key=lambda item: item[1]):
        at = 100 * size / end
        if at > 100:
            continue
        label = f"<span style='position:absolute;top:0;transform:translateX(-50%)'>{_safe(name)}</span>"
        side = "" if at - free > 12 else "display:none"
        free = at if not side else free
        line = "position:absolute;top:18px;bottom:0;border-left:2px dashed currentColor"
        lines += (
            f"<div title='{_safe(name)}' style='position:absolute;left:{at:.2f}%;top:0;bottom:0;white-space:nowrap'>"
            f"<span style='{side}'>{label}</span><div style='{line}'></div></div>"
        )
    words = f"Peak {bytes_text(total)}: " + ", ".join(f"{name_text(n)} {bytes_text(size)}" for n, size in shown.items())
    legend = "".join(
        f"<span style='white-space:nowrap'>{_swatch(PALETTE[name])} {_safe(name_text(name))} {bytes_text(size)}"
        f" ({size / total:.0%})</span>"
        for name, size in shown.items()
    )
    return (
        f"<div role='img' aria-label='{_safe(words)}' style='{_TEXT};margin:4px 24px 4px 4px'>"
        f"<div style='position:relative;height:64px;border-bottom:1px solid currentColor'>"
        f"<div style='position:absolute;left:0;right:0;bottom:0;height:38px;display:flex'>{segments}</div>{lines}</div>"
        f"{_scale(end)}"
        f"<div style='display:flex;flex-wrap:wrap;gap:2px 16px;margin-top:6px'>{legend}</div></div>"
    )


def timeline(series: Mapping[str, Sequence], top: float, moment: int | None = None, title: str = "") -> str:
    """Live bytes by category through one step, as `runs.Memory.timeline` holds them.

    Args:
        top: bytes at the upper end of the axis: the same for two pictures that are to be compared.
        moment: where a line is to stand, as a place in the series.
    """
    count, totals, peak = len(series["phase"]), totals_of(series), peak_of(series)
    end, below, areas = 1.25 * top, [0] * count, ""
    for category in CATEGORIES:
        above = [low + max(0, size) for low, size in zip(below, series[category], strict=True)]
        if above != below:
            areas += f"<path d='{_band(below, above, end)}' fill='{PALETTE[category]}'/>"
        below = above
    hover = "".join(
        f"<rect x='{i}' y='0' width='1' height='1000' fill='transparent'><title>{_safe(moment_text(series, i))}</title>"
        "</rect>"
        for i in range(count)
    )
    phases = _stretches(series["phase"])
    edges = "".join(f"<path d='M{first} 0V1000' stroke-dasharray='2 3' {_OUTLINE}/>" for first, _ in phases[1:])
    chosen = "" if moment is None else f"<path d='M{moment + 0.5} 90V1000' stroke-width='2' {_OUTLINE}/>"
    names = "".join(
        f"<span style='position:absolute;top:0;left:{50 * (first + last) / count:.2f}%;transform:translateX(-50%);"
        f"white-space:nowrap'>{_safe(series['phase'][first])}</span>"
        for first, last in phases
        if last - first > 0.08 * count
    )
    at, side = 100 * (peak + 0.5) / count, "left" if peak < count / 2 else "right"
    shift = "" if side == "left" else "transform:translateX(-100%);"
    head = f"▼ peak {bytes_text(totals[peak])}" if side == "left" else f"peak {bytes_text(totals[peak])} ▼"
    mark = (
        f"<span style='position:absolute;left:{at:.2f}%;{shift}white-space:nowrap;font-weight:bold;"
        f"bottom:{100 * totals[peak] / end:.2f}%;margin-{side}:-6px'>{head}</span>"
    )
    words = f"{title}: peak {moment_text(series, peak)}"
    where = f"peak in {series['phase'][peak]}{_what_ran(series, peak)}"
    return (
        f"<div role='img' aria-label='{_safe(words)}' style='{_TEXT}'><b>{_safe(title)}</b>, {_safe(where)}"
        f"<div style='position:relative;height:190px;margin:2px 8px 4px 76px;border-bottom:1px solid currentColor;"
        f"border-left:1px solid currentColor'>{_levels(top, end)}"
        f"<svg viewBox='0 0 {count} 1000' preserveAspectRatio='none' width='100%' height='100%' "
        f"style='position:absolute;left:0;top:0'>{areas}{edges}{chosen}{hover}</svg>{names}{mark}</div></div>"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text; a row whose first word is a category has its colour."""
    style = "style='text-align:left;padding:1px 12px 1px 0;white-space:normal;overflow-wrap:anywhere'"
    head = "".join(f"<th {style}>{_safe(name)}</th>" for name in header)
    body = ""
    for first, *rest in rows:
        swatch = _swatch(PALETTE[first]) + " " if first in PALETTE else ""
        cells = "".join(f"<td {style}>{_safe(cell)}</td>" for cell in rest)
        body += f"<tr><th scope='row' {style}>{swatch}{_safe(name_text(first))}</th>{cells}</tr>"
    return f"<div style='{_TEXT}'><table style='table-layout:fixed;width:100%'><tr>{head}</tr>{body}</table></div>"


def moment_text(series: Mapping[str, Sequence], place: int) -> str:
    """One moment of a timeline in words: its total, where it is, and its parts."""
    parts = {name: series[name][place] for name in CATEGORIES}
    said = f"{bytes_text(sum(parts.values()))} in {series['phase'][place]}{_what_ran(series, place)}"
    shown = [f"{name_text(name)} {bytes_text(size)}" for name, size in parts.items() if size > 0]
    return f"{said}: {', '.join(shown)}"


def _what_ran(series: Mapping[str, Sequence], place: int) -> str:
    """The operation of a moment and its module, as far as they are known."""
    operation, module = ((series.get(name) or {place: ""})[place] for name in ("operation", "module"))
    return (f", {operation}" if operation else "") + (f" of {module}" if module else "")


def totals_of(series: Mapping[str, Sequence]) -> list[int]:
    """The bytes at each moment of a timeline."""
    return [sum(series[name][i] for name in CATEGORIES) for i in range(len(series["phase"]))]


def peak_of(series: Mapping[str, Sequence]) -> int:
    """The place of a timeline's highest moment."""
    totals = totals_of(series)
    return max(range(len(totals)), key=totals.__getitem__)


@dataclass(frozen=True, slots=True)
class Point:
    """A recipe in the picture of memory against speed: bytes, samples per second (None: not measured), and how it is
    shown."""

    name: str
    peak_bytes: int
    speed: float | None
    kind: int = 0  # which sign it has
    on_front: bool = False
    is_chosen: bool = False


def scatter(points: Sequence[Point], limits: Mapping[str, int], kinds: Sequence[str]) -> str:
    """Memory across, samples per second up; the best of both joined by a line, limits (bytes by name) as lines.

    Args:
        points: those without a speed stand by themselves in a strip below the others, at no height that could be read.
        kinds: what each sign stands for.
    """
    timed, untimed = ([p for p in points if is_measured(p.speed) is known] for known in (True, False))
    largest = max(point.peak_bytes for point in points)
    end = 1.12 * max([largest, *(size for size in limits.values() if size < 8 * largest)])
    fastest = 1.2 * max((point.speed for point in timed), default=1.0)
    front = sorted((p for p in timed if p.on_front), key=lambda p: p.peak_bytes)
    path = " ".join(f"{1000 * p.peak_bytes / end:.1f},{1000 - 1000 * p.speed / fastest:.1f}" for p in front)
    marks = "".join(
        _mark(point, f"{100 * point.speed / fastest:.2f}%", f"{point.speed:.3g} samples/s", end)
        for point in sorted(timed, key=lambda point: point.is_chosen)
    )
    edges = "border-bottom:1px solid currentColor;border-left:1px solid currentColor"
    picture = (
        f"<div style='position:relative;height:260px;{edges}'>{_ups(fastest)}"
        f"<svg viewBox='0 0 1000 1000' preserveAspectRatio='none' width='100%' height='100%' "
        f"style='position:absolute;left:0;top:0'><polyline points='{path}' stroke-width='1.5' {_OUTLINE}/></svg>"
        f"{marks}</div>"
    )
    top = 2 if timed else 20  # under the names of the limits
    chosen = "".join(f" (ringed: {_safe(point.name)})" for point in untimed if point.is_chosen)
    marks = "".join(_mark(point, "13px", NO_SPEED, end, named=False) for point in untimed)
    strip = (
        f"<div style='position:relative;height:{top + 46}px;{edges};background:rgba(127,127,127,0.12)'>"
        f"<span style='position:absolute;left:6px;right:0;top:{top}px;white-space:nowrap;overflow:hidden;"
        f"text-overflow:ellipsis'>{NO_SPEED}{chosen}</span>{marks}</div>"
    )
    lines = "".join(
        f"<div style='position:absolute;left:{100 * size / end:.2f}%;top:0;bottom:0;border-left:2px dashed'>"
        f"<span style='position:absolute;top:0;right:4px;white-space:nowrap'>{_safe(name)}</span></div>"
        for name, size in limits.items()
        if size <= end
    )
    words = [f"{label}: {_listed(group)}" for label, group in (("best of both", front), (NO_SPEED, untimed)) if group]
    signs = " ".join(
        f"<span style='white-space:nowrap'><span style='color:{SERIES[i]};font-size:16px'>{_SIGNS[i]}</span> "
        f"{_safe(name)}</span>"
        for i, name in enumerate(kinds)
    )
    best = "<span style='white-space:nowrap'>── nothing else is both smaller and faster</span>" if front else ""
    return (
        f"<div role='img' aria-label='{_safe('; '.join(['Memory and speed', *words]))}' style='{_TEXT}'>"
        f"{'<div>samples per second</div>' if timed else ''}"
        f"<div style='position:relative;margin:2px 16px 0 56px'>{picture if timed else ''}{strip if untimed else ''}"
        f"{lines}</div><div style='margin:0 16px 0 56px'>{_scale(end, 'peak memory')}</div>"
        f"<div style='display:flex;flex-wrap:wrap;gap:2px 16px'>{signs}{best}</div></div>"
    )


def _mark(point: Point, bottom: str, speed: str, end: float, named: bool = True) -> str:
    """The sign of a recipe, its name beside it where it is one of the best or chosen; `bottom` is a length of CSS.

    Args:
        named: False where signs stand in one row, and a name would cover the next one.
    """
    colour, sign = SERIES[point.kind % len(SERIES)], _SIGNS[point.kind % len(_SIGNS)]
    ring = "outline:2px solid currentColor;border-radius:50%;" if point.is_chosen else ""
    title = _safe(f"{point.name}: {bytes_text(point.peak_bytes)}, {speed}")
    place = f"left:{100 * point.peak_bytes / end:.2f}%;bottom:{bottom}"
    mark = (
        f"<span title='{title}' style='position:absolute;{place};transform:translate(-50%,50%);{ring}"
        f"color:{colour};font-size:16px;line-height:1;cursor:help'>{sign}</span>"
    )
    if named and (point.on_front or point.is_chosen):
        left = point.peak_bytes > 0.6 * end
        shift = "transform:translateX(-100%);margin-left:-12px" if left else "margin-left:12px"
        mark += (
            f"<span style='position:absolute;{place};{shift};white-space:nowrap;max-width:60%;overflow:hidden;"
            f"text-overflow:ellipsis'>{_safe(point.name)}</span>"
        )
    return mark


def _listed(points: Sequence[Point]) -> str:
    return ", ".join(f"{point.name} {bytes_text(point.peak_bytes)}" for point in points)


def _band(below: Sequence[float], above: Sequence[float], end: float) -> str:
    """A stretch between two step lines, closed."""

    def steps(values, places):
        for i in places:
            y = 1000 - 1000 * values[i] / end
            yield from ((i, y), (i + 1, y))

    there = list(steps(above, range(len(above))))
    back = list(steps(below, range(len(below))))[::-1]
    return "M" + "L".join(f"{x} {y:.1f}" for x, y in [*there, *back]) + "Z"


def _stretches(values: Sequence) -> list[tuple[int, int]]:
    """Runs of equal values, as (first, last + 1)."""
    edges = [0, *(i for i in range(1, len(values)) if values[i] != values[i - 1]), len(values)]
    return list(itertools.pairwise(edges))


def _nice(top: float, parts: int) -> list[float]:
    """Round numbers from 0 up to `top`, about `parts` of them."""
    step = 10 ** math.floor(math.log10(top / parts))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= top / parts)
    return [step * i for i in range(int(top / step) + 1)]


def _unit(top: float) -> tuple[float, str]:
    return (1e9, "GB") if top >= 2e9 else (1e6, "MB") if top >= 2e6 else (1e3, "kB")


def _scale(end: float, what: str = "") -> str:
    """An axis of bytes under a picture."""
    scale, unit = _unit(end)
    ticks = "".join(
        f"<span style='position:absolute;left:{100 * value * scale / end:.2f}%;transform:translateX(-50%);"
        f"white-space:nowrap'>{value:,g}</span>"
        for value in _nice(end / scale, 4)
    )
    return (
        f"<div style='position:relative;height:18px'>{ticks}</div>"
        f"<div style='text-align:right'>{_safe(f'{what} ({unit})'.strip())}</div>"
    )


def _levels(top: float, end: float) -> str:
    scale, unit = _unit(top)
    return "".join(
        f"<span style='position:absolute;right:100%;bottom:{100 * value * scale / end:.2f}%;margin-right:4px;"
        f"transform:translateY(50%);white-space:nowrap'>{value:,g} {unit}</span>"
        for value in _nice(top / scale, 3)
    )


def _ups(fastest: float) -> str:
    return "".join(
        f"<span style='position:absolute;right:100%;bottom:{100 * value / fastest:.2f}%;margin-right:4px;"
        f"transform:translateY(50%);white-space:nowrap'>{value:,g}</span>"
        for value in _nice(fastest, 4)
    )


def _swatch(colour: str) -> str:
    return f"<span style='display:inline-block;width:12px;height:12px;background:{colour};vertical-align:-1px'></span>"


def _safe(text: Any) -> str:
    return html.escape(str(text), quote=True)
