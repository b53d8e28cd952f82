"""Many course runs as lines over time: each claim's value, each run's bytes and seconds, and where a line changed.

Bytes are exact: they changed wherever they differ. Values with noise are cut into stretches of one median by PELT
(Killick, Fearnhead and Eckley 2012), from the library ruptures, with the absolute distance as cost, which a single odd
night does not move. A cut must explain more than noise would in one of 100 pages of so many lines (Bonferroni).
"""

import importlib
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

from perf_helpers.compare.compare import differences, keyed
from perf_helpers.compare.step_times import fastest
from perf_helpers.course.results import load_results
from perf_helpers.records import Run, write_whole
from perf_helpers.texts import template
from perf_helpers.unknown import is_measured

FEWEST = 4  # points that a line with noise needs before anything is said of it
FALSE_CUTS = 0.01  # pages with a cut that noise made
# What shows neither in intervals nor in the differences of neighbouring nights, relative: less is no change.
LEAST = 0.02


@dataclass(frozen=True, slots=True)
class Point:
    """One course run's figure."""

    date: str
    value: float
    interval: tuple[float, float] | None = None
    verdict: str | None = None


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """From this run on a line is another."""

    date: str
    before: float  # the median of the stretch before, or the bytes
    after: float
    differences: list[str]  # of machine and versions, against the run before


@dataclass(frozen=True, slots=True)
class Line:
    """One figure over the course runs that have it."""

    kind: str  # "claim", "memory" or "speed"
    id: str
    unit: str  # "B", seconds, or the claim's quantity
    points: list[Point]
    changes: list[ChangePoint] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class History:
    """The lines of one machine under one profile."""

    machine: str
    profile: str
    dates: list[str]
    lines: list[Line]

    @property
    def changed(self) -> list[Line]:
        """Lines with a change point, the latest first."""
        return sorted((line for line in self.lines if line.changes), key=lambda x: x.changes[-1].date, reverse=True)


def read(folder: str | Path) -> tuple[list[History], list[str]]:
    """The histories of all results below a folder, one for each machine and profile, and what could not be read.

    Raises:
        ValueError: no results below it; or ruptures is not installed.
    """
    runs, unread = [], []
    for path in sorted(Path(folder).rglob("*.json")):
        try:
            runs.append(load_results(path))
        except ValueError as error:
            text = path.read_text(encoding="utf-8", errors="replace")
            if '"schema"' in text and '"lessons"' in text:  # one that was cut off, or of another version
                unread.append(str(error))
    if not runs:
        raise ValueError(f"no results of a course in {folder} or below: name a folder that contains results.json files")
    groups: dict[tuple[str, str], list[dict]] = {}
    for run in sorted(runs, key=lambda run: run["date"]):
        groups.setdefault((_machine_text(run["machine"]), str(run.get("profile"))), []).append(run)
    return [_history(*key, group) for key, group in groups.items()], unread


def write(folder: str | Path, page: str | Path) -> list[History]:
    """Write the page of a folder's histories; return them.

    Raises:
        ValueError: as `read`.
    """
    histories, unread = read(folder)
    shown = template("compare/history.html.j2").render(histories=histories, unread=unread, sketch=sketch)
    write_whole(Path(page), shown)
    return histories


def _machine_text(machine: dict) -> str:
    """What a machine is called where its runs are told apart from another's."""
    gpus = [gpu.get("name") or "GPU" for gpu in machine.get("gpus") or ()]
    parts = [machine.get("name") or "", machine.get("cpu_model") or "", *gpus]
    told = [part for number, part in enumerate(parts) if part and not any(part in other for other in parts[:number])]
    return " · ".join([*told, *(["rehearsed"] if machine.get("rehearsed") else [])])


def _history(machine: str, profile: str, runs: list[dict]) -> History:
    points: dict[tuple[str, str, str], list[Point]] = {}
    for run in runs:
        for key, point in _figures(run):
            points.setdefault(key, []).append(point)
    by_date = {run["date"]: run for run in runs}
    lines = [Line(*key, found, _changes(key[0], found, by_date, len(points))) for key, found in points.items()]
    return History(machine, profile, [*by_date], lines)


def _figures(data: dict) -> Iterator[tuple[tuple[str, str, str], Point]]:
    """((kind, id, unit), point) of each figure of one course run."""
    date = data["date"]
    for claim in data["claims"]:
        if claim["value"] is not None:
            interval = tuple(claim["interval"]) if claim.get("interval") else None
            point = Point(date, claim["value"], interval, claim["verdict"])
            yield ("claim", claim["id"], str(claim.get("quantity"))), point
    for id, row in keyed(data["runs"]):
        run = Run.from_dict(row)
        if is_measured(run.peak_bytes):
            yield ("memory", id, "B"), Point(date, run.peak_bytes)
    for recipe, seconds in fastest(data.get("paces")):
        yield ("speed", recipe, "s, the fastest step"), Point(date, seconds)


def _changes(kind: str, points: list[Point], runs: dict[str, dict], lines: int) -> list[ChangePoint]:
    """Where a line of so many changed; `runs` are the course runs by date."""
    noisy = kind == "speed" or any(point.interval for point in points)
    changes = []
    for start, before, after in _stretches(points, lines) if noisy else _steps(points):
        a, b = (runs[points[number].date] for number in (start - 1, start))
        told = differences(a["machine"], b["machine"]) + differences(a["versions"], b["versions"])
        changes.append(ChangePoint(points[start].date, before, after, told))
    return changes


def _steps(points: list[Point]) -> Iterator[tuple[int, float, float]]:
    """(where, before, after) of every difference between neighbours."""
    for start, (a, b) in enumerate(itertools.pairwise(points), start=1):
        if a.value != b.value:
            yield start, a.value, b.value


def _stretches(points: list[Point], lines: int) -> Iterator[tuple[int, float, float]]:
    """(where, median before, median after) of the ends of stretches with one median."""
    values = [point.value for point in points]
    if len(values) < FEWEST or len(set(values)) == 1:
        return
    try:
        ruptures = importlib.import_module("ruptures")  # of an extra, not of every installation
    except ImportError as error:
        raise ValueError("change points need ruptures: install it with pip install 'perf-helpers[history]'") from error
    import numpy as np

    far = NormalDist().inv_cdf(1 - FALSE_CUTS / 2 / (lines * len(values)))
    # Half the squared distance is the log likelihood that a cut must gain; the cost is in units of the noise's mean
    # absolute distance, a standard deviation / sqrt(2) of Laplace's. A single odd night is no stretch: one has two.
    penalty = _deviation(points) * far**2 / 2 / math.sqrt(2)
    search = ruptures.Pelt(model="l1", min_size=2, jump=1)
    ends = search.fit(np.asarray(values, dtype=float)[:, None]).predict(pen=penalty)
    medians = [statistics.median(values[a:b]) for a, b in itertools.pairwise([0, *ends])]
    for start, (before, after) in zip(ends, itertools.pairwise(medians), strict=False):
        yield start, before, after


def _deviation(points: list[Point]) -> float:
    """The standard deviation of a line's noise: by the differences of neighbours, which one change moves little (the
    median absolute one), and no less than by the intervals."""
    values = [point.value for point in points]
    steps = [abs(b - a) for a, b in itertools.pairwise(values)]
    half_widths = [(point.interval[1] - point.interval[0]) / 2 for point in points if point.interval]
    by_intervals = statistics.median(half_widths) / 1.96 if half_widths else 0.0
    least = LEAST * max(map(abs, values))
    few = 1 + 4 / len(values)  # of a few differences the median is often too small
    return max(few * statistics.median(steps) / 0.6745 / math.sqrt(2), by_intervals, least)


def sketch(line: Line, dates: Iterable[str]) -> dict[str, Any]:
    """A line's picture: {"width", "height", "points": [(x, y)], "marks": [x of each change]}, in pixels."""
    width, height = 260, 40
    places = {date: number for number, date in enumerate(dates)}
    values = [point.value for point in line.points]
    low, high = min(values), max(values)
    across, up = max(1, len(places) - 1), (high - low) or 1.0

    def x(date: str) -> float:
        return round(6 + (width - 12) * places[date] / across, 1)

    def y(value: float) -> float:
        return round(height - 6 - (height - 12) * ((value - low) / up if high > low else 0.5), 1)

    points = [(x(point.date), y(point.value)) for point in line.points]
    return {"points": points, "marks": [x(change.date) for change in line.changes], "width": width, "height": height}
