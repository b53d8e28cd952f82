"""The report of the GPU suite: one JSON of all rows of one machine, with the claims that they decide.
benchmarks/build.py keeps it, if it was measured, holds the estimate against it, and shows it."""

import sys
from pathlib import Path
from typing import Any

import gpu_claims
from gpu_rows import Kept
from runner import write_record

from perf_helpers.lab.hardware import Machine
from perf_helpers.lab.profiles import TINY
from perf_helpers.lab.runs import Run
from perf_helpers.lab.store import Store

SCHEMA = 1
_OF_A_RUN = ("name", "status", "message", "kind", "task", "arguments", "samples_per_step", "memory", "timing", "losses")


def setup(machine: Machine, versions: dict[str, str | None], profile: str) -> dict[str, Any]:
    """What must be equal for two rows to be of one machine. With a GPU the host is not asked: speeds are compared only
    within a row."""
    gpus = [[gpu.name, gpu.memory_bytes, gpu.capability and list(gpu.capability)] for gpu in machine.gpus]
    about = {"machine": machine.name, "gpus": gpus, "rehearsed": machine.rehearsed}
    return about | {"versions": versions | {"torch": machine.torch_build}, "profile": profile}


def kept_of(run: Run) -> dict[str, Any]:
    """What is kept of a run: what stands in its row, and the pictures of its memory, are left out."""
    told = run.to_dict()
    if told["memory"]:
        told["memory"]["timeline"] = None
    if told["timing"]:
        told["timing"] |= {"all_seconds": [], "all_cpu_seconds": []}
    return {name: told[name] for name in _OF_A_RUN}


def line(kept: Kept) -> str:
    """A row in a line, for whoever waits."""
    if not kept.ok:
        return f"{kept.name}: {kept.status}, {kept.message}"
    if kept.speed_ratio:
        return f"{kept.name}: {kept.speed_ratio} x the speed"
    if kept.runs:
        return str(Run.from_dict(kept.runs[-1]))
    return f"{kept.name}: {kept.value}"


def content(rows: list[Kept]) -> dict[str, Any]:
    """The report of the machine that measured the last row. Of a row that was tried twice the last try counts.
    ValueError without rows."""
    if not rows:
        raise ValueError("no rows: run the suite first")
    last = rows[-1]
    latest = {(row.part, row.name): row for row in rows if row.setup == last.setup}
    machine, rehearsed = Machine.from_dict(last.machine), last.setup["rehearsed"]
    measured = "memory by torch's own CUDA allocator on a stand-in for the GPU; nothing was computed, nothing timed"
    return {
        "schema": SCHEMA,
        "suite": "gpu",
        "rehearsed": rehearsed,
        "what": measured if rehearsed else "measured by benchmarks/measure_gpu.py",
        "tiny": last.setup["profile"] == TINY.name,
        "machine": last.machine,
        "versions": last.setup["versions"],
        "profile": last.setup["profile"],
        "began": min(row.date for row in latest.values()),
        "date": max(row.date for row in latest.values()),
        "claims": gpu_claims.decided(latest, machine, last.setup["profile"]),
        "rows": [_shown(row) for row in latest.values()],
    }


def _shown(row: Kept) -> dict[str, Any]:
    left_out = {"setup", "machine", "settings"}
    told = {name: value for name, value in row.to_dict().items() if name not in left_out}
    for run in told["runs"]:
        for name in ("phase_breakdowns", "phases", "timeline"):
            if run["memory"]:
                run["memory"].pop(name, None)
    return told


def write(rows: Path, report: Path) -> int:
    """Write the report of what a file of rows holds; the exit code."""
    try:
        made = content(Store(rows, Kept).read())
    except ValueError as error:
        print(f"{rows}: {error}", file=sys.stderr)
        return 1
    write_record(report, made)
    print(report)
    return 0
