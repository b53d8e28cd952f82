"""Rehearse programs whose projects publish their peak memory on real cards, and compare, row by row.

    .venv/bin/python benchmarks/published_programs.py                    all of benchmarks/published_programs.toml
    .venv/bin/python benchmarks/published_programs.py --rows "*phi*"     these rows; the others are kept

The programs train models of full size, from checkpoints without values (`empty_checkpoints.py`). They are fetched as in
measure_programs.py and run unmodified, but for the two changes of `run_litgpt.py`. Two numbers are reduced: optimizer
updates to at most three, and, with litgpt, micro-batches per update to at most two.
"""

import argparse
import functools
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import measure_programs
from runner import HERE, RESULTS, Measurement, Named, read_record
from tables import spread, table, versions

FACTS = Path(__file__).with_suffix(".toml")
FAR = 0.05  # a row whose figure differs by more needs a reason
OUT_OF_MEMORY = "out of memory"


def cases(_) -> Named:
    """Return {"table: row": (the table, the row)} of published_programs.toml; "project" of a table is the project."""
    tables = [each | {"project": facts()["project"][each["project"]]} for each in facts()["table"]]
    return {f"{each['name']}: {row['name']}": (each, row) for each in tables for row in each["rows"]}


@functools.cache
def facts() -> dict[str, Any]:
    return tomllib.loads(FACTS.read_text(encoding="utf-8"))


def because(name: str) -> str | None:
    """Return the key of the reason why a row ("table: row") differs by more than 5 %; None: it does not."""
    return cases(None)[name][1].get("because")


def program(published: Named, row: Named) -> dict[str, Any]:
    """Return the program of a published row, as an entry of programs.toml.

    `published`: the row's table.
    """
    project = published["project"]
    fields = {"benchmarks": str(HERE)} | {name: str(value) for name, value in row.items()}
    words = [*project["command"], *published["command"], *row.get("more", ())]
    setup = [str(HERE / "empty_checkpoints.py"), *project["setup"]]
    kept = {key: project[key] for key in ("source", "packages", "paths", "beside", "variables") if key in project}
    return kept | {"command": words, "setup": [setup], "fields": fields}


def measure(rows: Named, _: argparse.Namespace) -> Iterable[tuple[str, dict]]:
    """Yield (name, row): the published and the rehearsed figure in the table's unit, and how the rehearsal ended.

    `rows`: as `cases` returns them.
    """
    measure_programs.inputs(measure_programs.INPUTS)
    for name, (published, row) in rows.items():
        options = argparse.Namespace(card=published["card"], plain=False)
        folder = re.sub(r"\W+", "-", name)
        found = measure_programs.row(folder, program(published, row), options)
        about = {"name": name, "published": row["published"], "status": found["status"], "code": found.get("code")}
        about |= {key: found[key] for key in ("steps", "minutes", "message", "answers") if key in found}
        if "peaks" in found:
            allocated, reserved = (size / published["unit"] for size in found["peaks"])
            about |= {"allocated": round(allocated, 3), "reserved": round(reserved, 3)}
            if row["published"] != OUT_OF_MEMORY and found["status"] != OUT_OF_MEMORY:
                about["error"] = round(about[published["quantity"]] / row["published"] - 1, 4)
        yield name, about


def conclude(rows: list[dict], _) -> dict:
    errors = sorted(abs(row["error"]) for row in rows if "error" in row)
    agreed = sum((row["published"] == OUT_OF_MEMORY) == (row["status"] == OUT_OF_MEMORY) for row in rows)
    return {
        "rows_with_figures": len(errors),
        "fits_as_published": agreed,
        "within_5_percent": sum(e <= FAR for e in errors),
    }


def page() -> str:
    """Return, in Markdown, a table for each published table: its figures, those of the rehearsal, and reasons."""
    record = read_record(RESULTS / PROGRAMS.record)
    found, parts, reasons = {row["name"]: row for row in record["rows"]}, [], facts()["because"]
    for published in facts()["table"]:
        rows = []
        for row in published["rows"]:
            here = found.get(f"{published['name']}: {row['name']}", {})
            figure = here.get("status", "not rehearsed")
            if figure == "finished":
                figure = f"{here[published['quantity']]:.2f}"
            off = f"{here['error']:+.1%}" if "error" in here else ""
            rows.append([row["name"], str(row["published"]), figure, off, row.get("because", "").replace("_", " ")])
        unit = "GiB" if published["unit"] == 2**30 else "GB"
        about = f"{published['place']} at {published['commit']}, {published['date']}; {published['versions']}."
        head = ["training", f"{published['gpu']}, published, {unit}", f"rehearsed, {unit}", "difference", "why"]
        parts.append(f"**{published['name']}.** {about}\n\n{table(head, rows)}")
    errors = sorted(abs(row["error"]) for row in record["rows"] if "error" in row and not because(row["name"]))
    about = (
        f"Rehearsed {record['date'][:10]}, {versions(record)}. Of the {len(errors)} rows without a reason the median"
    )
    about += f" difference is {spread(errors)['median']:.1%} and the largest {errors[-1]:.1%}."
    notes = "\n".join(f"- *{key.replace('_', ' ')}*: {reason}" for key, reason in reasons.items())
    return "\n\n".join([f"{about} The reasons:", notes, *parts])


PROGRAMS = Measurement(
    __doc__,
    "published_programs.json",
    cases,
    measure,
    conclude,
    name_of=lambda number, row: row["name"],
    line=lambda row: (
        f"{row['status']}, {row['published']} published, {row.get('allocated')} ({row.get('error', 0):+.1%})"
    ),
)

if __name__ == "__main__":
    sys.exit(PROGRAMS.main())
