"""Show many course runs as lines over time: each claim's value, each experiment's bytes, each recipe's step time.

An exact line (bytes, and values without an interval) has a change wherever two consecutive runs differ. A noisy line
(seconds, and values with an interval) shows two medians: of its latest five runs, and of the five runs before these.
A recipe is one of the fixed trainings that each course run times, see `step_times`.
"""

import itertools
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf_helpers.compare.compare import differences, keyed
from perf_helpers.compare.step_times import fastest
from perf_helpers.course.results import load_results
from perf_helpers.templates import template
from trainmem.records import Run, write_whole
from trainmem.unknown import is_measured

RUNS_PER_MEDIAN = 5


@dataclass(frozen=True, slots=True)
class Point:
    """A value in one course run, with the run's date; `interval` and `verdict` are None if the value has none."""

    date: str
    value: float
    interval: tuple[float, float] | None = None
    verdict: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Hold a change of an exact value (one without noise) between two consecutive course runs, with both values."""

    date: str  # of the later course run
    before: float
    after: float
    differences: list[str]  # of machine and package versions between the two course runs


@dataclass(frozen=True, slots=True)
class Line:
    """Hold one quantity over time: its value in each course run, e.g. a claim's value or the peak of a lesson's run.

    Bytes, and values without an interval, are exact: the line lists each change from one course run to the next.
    Seconds, and values with an interval, are noisy: the line has medians of its values over several course runs.
    """

    kind: str  # "claim", "memory" or "speed"
    id: str
    unit: str  # "B", seconds, or the claim's quantity
    points: list[Point]
    changes: list[Change] = field(default_factory=list)  # exact lines only
    median: float | None = None  # over the latest RUNS_PER_MEDIAN runs of a noisy line; None: the line is exact
    median_before: float | None = None  # over the RUNS_PER_MEDIAN runs before these; None if there are fewer

    @property
    def shift(self) -> float:
        """Return |median of latest 5 values / median of 5 before - 1|; 0 for an exact line or fewer than 10 values."""
        return abs(self.median - self.median_before) / abs(self.median_before) if self.median_before else 0.0


@dataclass(frozen=True, slots=True)
class History:
    """Hold course runs of one machine and profile (sizes): a `Line` per claim, per run's peak and per timed recipe."""

    machine: str
    profile: str
    dates: list[str]
    lines: list[Line]

    @property
    def changed(self) -> list[Line]:
        """Return a `Line` per exact quantity (bytes, values without interval) that changed, the latest change first."""
        return sorted((line for line in self.lines if line.changes), key=lambda x: x.changes[-1].date, reverse=True)

    @property
    def noisy(self) -> list[Line]:
        """Return a `Line` per noisy quantity (step time, value with an interval), the largest `Line.shift` first."""
        return sorted((line for line in self.lines if line.median is not None), key=lambda x: x.shift, reverse=True)

    @property
    def steady(self) -> list[Line]:
        """Return a `Line` for each exact quantity (bytes, values without interval) that never changed."""
        return [line for line in self.lines if not line.changes and line.median is None]


def read(folder: str | Path) -> tuple[list[History], list[str]]:
    """Read the results below a folder; return (a `History` per machine and profile, a message per unreadable file).

    Raises:
        ValueError: there are no results below the folder.
    """
    runs, unread = [], []
    for path in sorted(Path(folder).rglob("*.json")):
        try:
            runs.append(load_results(path))
        except ValueError as error:
            text = path.read_text(encoding="utf-8", errors="replace")
            if '"schema"' in text and '"lessons"' in text:  # a results file that is cut off or of another version
                unread.append(str(error))
    if not runs:
        raise ValueError(f"no results of a course in {folder} or below: name a folder that contains results.json files")
    groups: dict[tuple[str, str], list[dict]] = {}
    for run in sorted(runs, key=lambda run: run["date"]):
        groups.setdefault((_machine_text(run["machine"]), str(run.get("profile"))), []).append(run)
    return [_history(*key, group) for key, group in groups.items()], unread


def write(folder: str | Path, page: str | Path) -> list[History]:
    """Write the histories of all course runs below a folder to the HTML file `page`, and return the histories.

    Raises:
        ValueError: there are no results below the folder.
    """
    histories, unread = read(folder)
    shown = template("compare/history.html.j2").render(histories=histories, unread=unread, sketch=sketch)
    write_whole(Path(page), shown)
    return histories


def _machine_text(machine: dict) -> str:
    """Return a text to group runs by: the names of machine, CPU and GPUs, but no name that an earlier one contains."""
    gpus = [gpu.get("name") or "GPU" for gpu in machine.get("gpus") or ()]
    parts = [machine.get("name") or "", machine.get("cpu_model") or "", *gpus]
    names = [part for number, part in enumerate(parts) if part and not any(part in other for other in parts[:number])]
    return " · ".join([*names, *(["rehearsed"] if machine.get("rehearsed") else [])])


def _history(machine: str, profile: str, runs: list[dict]) -> History:
    points: dict[tuple[str, str, str], list[Point]] = {}
    for run in runs:
        for key, point in _figures(run):
            points.setdefault(key, []).append(point)
    by_date = {run["date"]: run for run in runs}
    return History(machine, profile, [*by_date], [_line(*key, found, by_date) for key, found in points.items()])


def _figures(data: dict) -> Iterator[tuple[tuple[str, str, str], Point]]:
    """Yield ((kind, id, unit), point) for each value of one course run; `data`: the content of its results.json."""
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


def _line(kind: str, id: str, unit: str, points: list[Point], runs: dict[str, dict]) -> Line:
    """Return the `Line` of one quantity; `runs`: {date of a course run: content of its results.json}."""
    if kind == "speed" or any(point.interval for point in points):  # noisy
        latest, before = points[-RUNS_PER_MEDIAN:], points[-2 * RUNS_PER_MEDIAN : -RUNS_PER_MEDIAN]
        median_before = _median(before) if len(before) == RUNS_PER_MEDIAN else None
        return Line(kind, id, unit, points, median=_median(latest), median_before=median_before)
    changes = []
    for before, after in itertools.pairwise(points):
        if before.value != after.value:
            a, b = runs[before.date], runs[after.date]
            found = differences(a["machine"], b["machine"]) + differences(a["versions"], b["versions"])
            changes.append(Change(after.date, before.value, after.value, found))
    return Line(kind, id, unit, points, changes)


def _median(points: list[Point]) -> float:
    return statistics.median(point.value for point in points)


def sketch(line: Line, dates: Iterable[str]) -> dict[str, Any]:
    """Return the picture of a line in pixels: {"width", "height", "points": [(x, y)], "marks": [x of each change]}.

    Each point is a value (y) at the date of its course run (x). `dates`: of the history's course runs, oldest first.
    """
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
