"""A night of the course: its lessons, a step of each of a few recipes, and what is worse than on an earlier night."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf_helpers.compare import step_times
from perf_helpers.compare.compare import AXES, Change, Changes, compare
from perf_helpers.course import report as pages
from perf_helpers.course.course import run_course
from perf_helpers.course.results import load_results
from perf_helpers.records import write_whole


def run_night(
    out: str | Path = "build/course",
    baseline: str | Path | None = None,
    fail_on: Sequence[str] = AXES,
    speeds: bool = True,
    **options,
) -> tuple[dict[str, Any], list[Change]]:
    """Run the course and hold it against an earlier run; return its results, and what is worse.

    Args:
        out, options: as `run_course` takes them.
        baseline: the earlier run, as results.json or its folder.
        fail_on: in what the night must not be worse, of "memory", "verdict" and "speed".
        speeds: also time a step of a few recipes, by which `compare` tells speeds of different days apart.

    Raises:
        ValueError: a damaged baseline; or as `run_course`.
    """
    old = load_results(baseline) if baseline else None
    data = run_course(out=out, **options)
    data["paces"] = step_times.tonight(data["profile"]) if speeds else None
    changes = compare(old, data) if old else None
    data.update(baseline=changes and changes.to_dict(), fail_on=list(fail_on))
    write_whole(Path(out) / "results.json", json.dumps(data, indent=1, ensure_ascii=False))
    if changes:
        report(out)
    return data, changes.worse(fail_on) if changes else []


def report(directory: str | Path) -> Path:
    """Make a course's pages (`course.report`), with what changed since its baseline where it has one.

    Raises:
        ValueError: no results.json in the folder, or a damaged one.
    """
    data = load_results(directory)
    if not data.get("baseline"):
        return pages.report(directory)
    changes = Changes(**data["baseline"])
    return pages.report(directory, changes.to_html("section"), changes.cases(data.get("fail_on", AXES)))
