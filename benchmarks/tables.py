"""Tables, sizes, versions and verdicts as the pages have them, in Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from perf_helpers.course.ledger import Verdict
from perf_helpers.course.results import measured_text

MIB = 2**20


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def mebibytes(found: Mapping[str, Any] | None) -> str:
    """Allocated or counted, and reserved where there is such a thing, in MiB; the status of what did not end well."""
    if found is None or found["status"] != "ok":
        return found["status"] if found else "not measured"
    sizes = [size for size in (found["peak_bytes"], found["reserved_bytes"]) if size is not None]
    return " / ".join(f"{size / MIB:.{0 if size >= 100 * MIB else 1}f}" for size in sizes)


def versions(data: Mapping[str, Any], *packages: str) -> str:
    """The versions that a record's numbers stand with: "torch 2.13.0, transformers 5.23.0"."""
    packages = packages or ("torch", "transformers", "bitsandbytes")
    return ", ".join(f"{name} {data['versions'].get(name) or 'none'}" for name in packages)


def spread(errors: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile (one of them, so that it is an error that was made) and worst."""
    ordered = sorted(errors)
    high = ordered[-(-95 * len(ordered) // 100) - 1]
    return {"median": statistics.median(ordered), "percentile_95": high, "worst": ordered[-1]}


def share(value: float | None) -> str:
    """In per cent; "none" where there is no value."""
    return "none" if value is None else f"{value:.2%}"


def verdict(decision: Mapping[str, Any] | None, absent: str) -> str:
    """A decided claim in a cell, with what was measured; `absent` where there is none."""
    if decision is None or decision["verdict"] == Verdict.NOT_TESTABLE:
        return decision["verdict"] if decision else absent
    return f"**{decision['verdict']}** ({measured_text(decision)})"
