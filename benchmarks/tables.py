"""Format tables, sizes, versions and verdicts in Markdown for the pages."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from perf_helpers.course.ledger import Verdict
from perf_helpers.course.results import measured_text

MIB = 2**20


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown: `head` has the title of each column, a row its cells."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def mebibytes(found: Mapping[str, Any] | None) -> str:
    """Return a run's allocated (or counted) and, if known, reserved memory in MiB as text, e.g. "812 / 904".

    Return the status of a failed run, and "not measured" for None.

    `found`: the run's "status", "peak_bytes" and "reserved_bytes".
    """
    if found is None or found["status"] != "ok":
        return found["status"] if found else "not measured"
    sizes = [size for size in (found["peak_bytes"], found["reserved_bytes"]) if size is not None]
    return " / ".join(f"{size / MIB:.{0 if size >= 100 * MIB else 1}f}" for size in sizes)


def versions(data: Mapping[str, Any], *packages: str) -> str:
    """Return the versions of `packages` in a record (default: torch, transformers and bitsandbytes) as text, e.g.
    "torch 2.13.0, transformers 5.23.0".
    """
    packages = packages or ("torch", "transformers", "bitsandbytes")
    return ", ".join(f"{name} {data['versions'].get(name) or 'none'}" for name in packages)


def spread(errors: Sequence[float]) -> dict[str, float]:
    """Return {"median", "percentile_95", "worst"} of errors. The percentile is one of the errors, not interpolated."""
    ordered = sorted(errors)
    high = ordered[-(-95 * len(ordered) // 100) - 1]
    return {"median": statistics.median(ordered), "percentile_95": high, "worst": ordered[-1]}


def share(value: float | None) -> str:
    """Return a share in per cent as text, e.g. "12.50%" for 0.125; "none" if there is no value."""
    return "none" if value is None else f"{value:.2%}"


def verdict(decision: Mapping[str, Any] | None, absent: str) -> str:
    """Return a table cell with a claim's verdict and value; `absent` if there is no decision.

    `decision`: the claim's row in results.json, or None.
    """
    if decision is None or decision["verdict"] == Verdict.NOT_TESTABLE:
        return decision["verdict"] if decision else absent
    return f"**{decision['verdict']}** ({measured_text(decision)})"
