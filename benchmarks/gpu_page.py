"""Keep reports of the GPU suite as results/<machine>/gpu/<date>.json, and make their tables.

A report has the rows of one machine, and the claims that they decide. Only measurements on a GPU are kept: rehearsals
and runs at tiny sizes are refused.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gpu_claims
import recipes
from gpu_rows import NOT_TESTABLE, PARTS, StoredRow
from measure_card import SIZES, against
from runner import RESULTS, read_record, write_record
from tables import MIB, mebibytes, share, table, versions

from trainmem.core.hardware import Machine
from trainmem.core.task import TINY
from trainmem.records import Ratio, Store
from trainmem.texts import number_text

NONE = "No GPU has run it: not measured."
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "tf32": "tf32"}  # {argument: the type whose matmul rate applies}
Rows = dict[tuple[str, str], dict[str, Any]]


def content(rows: list[StoredRow]) -> dict[str, Any]:
    """Return the suite's report for the machine, versions and profile of the last row.

    Rows of other machines, versions or profiles are left out. If a row was measured several times, its last result
    counts.

    `rows`: all rows of the suite's file, in order. Raises ValueError if there are none.
    """
    if not rows:
        raise ValueError("no rows: run the suite first")
    last = rows[-1]
    latest = {(row.part, row.name): row for row in rows if row.setup == last.setup}
    machine, profile = Machine.from_dict(last.machine), last.setup["profile"]
    rehearsed = "memory by torch's own CUDA allocator on a stand-in for the GPU; nothing was computed, nothing timed"
    return {
        "what": rehearsed if machine.rehearsed else "measured by benchmarks/measure_gpu.py",
        "machine": last.machine,
        "versions": last.setup["versions"],
        "profile": profile,
        "began": min(row.date for row in latest.values()),
        "date": max(row.date for row in latest.values()),
        "claims": gpu_claims.decided(latest, machine, profile),
        "rows": [_shown(row) for row in latest.values()],
    }


def _shown(row: StoredRow) -> dict[str, Any]:
    left_out = {"setup", "machine", "settings"}
    shown = {name: value for name, value in row.to_dict().items() if name not in left_out}
    for run in shown["runs"]:
        for name in ("phase_breakdowns", "phases", "timeline"):
            if run["memory"]:
                run["memory"].pop(name, None)
    return shown


def measured(data: dict[str, Any]) -> dict[str, Any]:
    """Return a report of the GPU suite unchanged.

    Raises:
        ValueError: the report was rehearsed, run without a GPU, or run at tiny sizes.
    """
    machine = Machine.from_dict(data["machine"])
    if machine.rehearsed:
        raise ValueError("what was rehearsed was not measured, and is not kept")
    if data["profile"] == TINY.name or machine.kind != "cuda":
        raise ValueError("what ran at tiny sizes, or without a GPU, says nothing of one")
    return data


def keep(rows: Path, results: Path) -> Path:
    """Store a file of the suite's rows as results/<machine>/gpu/<date>.json, and return that path.

    `rows`: the file; `results`: the folder results/.

    Raises:
        ValueError: the file has no rows, or its rows were rehearsed, run without a GPU, or run at tiny sizes.
    """
    data = measured(content(Store(rows, StoredRow).read()))
    target = results / Machine.from_dict(data["machine"]).slug / "gpu" / f"{data['date'][:10]}.json"
    write_record(target, data)
    return target


def suites(results: Path) -> dict[str, dict[str, Any]]:
    """Return {machine's folder: its newest report of the GPU suite} in the folder results/.

    Raises:
        ValueError: a report was rehearsed, run without a GPU, or run at tiny sizes.
    """
    return {path.parents[1].name: measured(read_record(path)) for path in sorted(results.glob("*/gpu/*.json"))}


def beside_a_card(suites: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of how exactly rehearsals and estimates predicted the memory that an H100 then used.

    Its rows are the suite's runs (rehearsed only) and each kind of generated training (rehearsed, and estimated).

    `suites`: {machine: its newest report of the GPU suite}.
    """
    record, before = read_record(RESULTS / "card.json"), read_record(RESULTS / "h100_suite_predictions.json")
    predicted = {(row["part"], row["name"]): {name: row[name] for name in SIZES[1:]} for row in before["rows"]}
    runs = [(key, _sizes(row)) for data in suites.values() for key, row in by_name(data).items()]
    suite = [
        {
            "rehearsed": predicted[key],
            "measured": {"allocated": found["peak_bytes"], "reserved": found["reserved_bytes"]},
        }
        for key, found in runs
        if key in predicted and found["peak_bytes"]
    ]
    kinds = {"strangers": "random configurations"}  # {name in the record: name on the page}
    shown = {"the suite's runs": {"rehearsed": against(suite, "rehearsed")}} | record["told"]
    rows = []
    for kind, by in shown.items():
        for method, found in by.items():
            of = found["trainings"]
            cells = [f"{found[n][0]} of {of}, worst {share(found[n][1])}" if n in found else "" for n in SIZES]
            rows.append([kinds.get(kind, kind), method, f"{found['equal']} of {of}", *cells])
    head = ["trainings", "method", "all sizes equal", *SIZES]
    return f"{record['machine']}, {versions(record)}, {record['date'][:10]}.\n\n{table(head, rows)}"


def recipes_of(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {name: status and memory} of each of the guides' ten recipes in a report of the GPU suite.

    The keys of an entry are "status", "peak_bytes", "reserved_bytes" and "device_used_bytes".
    """
    rows = by_name(data)
    return {name: _sizes(rows[part, name]) for part, name in rows if part == "ten" and name in recipes.ROWS}


def caption(data: Mapping[str, Any]) -> str:
    """Return machine, versions and dates of a report of the GPU suite as text."""
    driver = next((gpu.get("driver") for gpu in data["machine"]["gpus"]), None)
    about = f"{data['machine']['name']}, driver {driver or 'unknown'}, {versions(data)}"
    return f"{about}, profile {data['profile']}, {data['began'][:16]} to {data['date'][:16]} UTC"


def by_name(data: Mapping[str, Any]) -> Rows:
    return {(row["part"], row["name"]): row for row in data["rows"]}


def _sizes(row: Mapping[str, Any]) -> dict[str, Any]:
    memory = (row["runs"][-1]["memory"] if row["runs"] else None) or {}
    names = ("peak_bytes", "reserved_bytes", "device_used_bytes")
    return {"status": row["status"]} | {name: memory.get(name) for name in names}


def _samples(row: Mapping[str, Any]) -> str:
    timing = row["runs"][-1]["timing"] if row["runs"] else None
    return number_text(timing and timing["samples_per_second"])


def section(name: str, data: Mapping[str, Any], cards: Mapping[str, dict]) -> str:
    """Return the tables of one machine, one per part of the GPU suite.

    Args:
        name: the heading, e.g. the machine's name.
        data: the machine's report.
        cards: {card: its rehearsal}.
    """
    rows = by_name(data)
    made = [f"### {name}", caption(data)]
    for part, plan in PARTS.items():
        found = _part(part, rows, _alike(rows, data, cards) if part == "ten" else {})
        if found and part != "estimate":  # another table has the errors of the estimate
            made.append(f"**{plan.__doc__.splitlines()[0]}**\n\n{found}")
    facts = [*_facts(rows), *_utilization(rows), *_not_well(data)]
    return "\n\n".join([*made, "\n".join(f"- {fact}" for fact in facts)])


def _part(part: str, rows: Rows, alike: Mapping[str, Mapping[str, dict]]) -> str:
    """Return a table of one part (group of rows) of the GPU suite, with memory, speed and comparisons of each run.

    In the part "ten", the guide's ten recipes, the table also has each recipe's megabytes according to the guide, and
    its memory in rehearsals of similar cards. The result is empty if the part has no run.

    `alike`: {card: {recipe: rehearsed row}}, see `_alike`.
    """
    lines = []
    for (of, name), row in rows.items():
        if of == part and row["runs"] and " against " not in name:
            used = _sizes(row)["device_used_bytes"]
            cells = [name, mebibytes(_sizes(row)), f"{used / MIB:.0f}" if used else "not measured", _samples(row)]
            against = (pair for where, pair in rows if where == part and pair.startswith(f"{name} against "))
            cells.append("; ".join(_against(pair, rows[part, pair]) for pair in against))
            guide = [str(recipes.ROWS[name][1])] if part == "ten" else []
            lines.append([*cells, *guide, *(mebibytes(column.get(name)) for column in alike.values())])
    head = ["run", "MiB allocated / reserved", "MiB device-used", "samples/s", "against"]
    head += ["MB, V100 (guide)"] if part == "ten" else []
    return table([*head, *(f"{card}, rehearsed" for card in alike)], lines) if lines else ""


def _against(pair: str, row: Mapping[str, Any]) -> str:
    """Describe a comparison of two runs: the speed ratio with its interval, and the ratio of the peaks.

    `row`: the stored row of the pair; `pair`: its name, "run against baseline".
    """
    baseline = pair.partition(" against ")[2]
    if not row["speed_ratio"]:
        return f"{baseline}: {row['status']}"
    first, second = (run["memory"] and run["memory"]["peak_bytes"] for run in row["runs"])
    memory = f", memory {number_text(second / first)} x" if first and second else ""
    return f"{baseline}: {Ratio.from_dict(row['speed_ratio'])} x{memory}"


def _alike(rows: Rows, data: Mapping[str, Any], cards: Mapping[str, dict]) -> dict[str, dict[str, dict]]:
    """Return {card: {recipe: rehearsed row}} for cards like the measured GPU.

    A card is like the GPU if it has the same compute capability, and if its rehearsal trained the same task as the part
    "ten".

    Args:
        rows: the measured rows by part.
        data: the record of the measurement, with its machine.
        cards: {card: its rehearsal}.
    """
    gpu, found = Machine.from_dict(data["machine"]).gpus[0], rows.get(("ten", "vanilla"), {"runs": ()})["runs"]
    return {
        card: {row["name"]: row for row in shown["rows"]}
        for card, shown in cards.items()
        if found and tuple(shown["capability"]) == gpu.capability and shown["task"] == found[0]["task"]
    }


def _facts(rows: Rows) -> Iterator[str]:
    """Yield a line of text for each measured function (not training): matmuls, attention kernels, cold starts."""
    answers = {key: row["value"] for key, row in rows.items() if row["status"] == "ok" and row["value"] is not None}
    if found := answers.get(("tf32", "products")):
        fastest = {name: min(seconds) for name, seconds in found.items()}
        shown = ", ".join(f"{name} {fastest['fp32'] / seconds:.1f} x" for name, seconds in fastest.items())
        yield f"a large product, the fastest of its turns, against fp32: {shown}"
    if found := answers.get(("attention", "kernels")):
        yield f"attention kernels for 16 bits: {', '.join(name for name, runs in found.items() if runs) or 'none'}"
    if found := answers.get(("compile", "cold start")):
        yield f"torch.compile: {found[0]:.1f} s for a cold forward and backward, {min(found):.3f} s for a later one"


def _utilization(rows: Rows) -> Iterator[str]:
    """Yield a line about model FLOPs utilization for lesson 14's first recipe, and one for its fastest recipe.

    The utilization is a share of the rate that a large matmul reaches in the recipe's precision.
    """
    needed = (rows.get(("best", name)) for name in ("rates", "model FLOPs of a sample"))
    rates, flops = (row["value"] if row and row["status"] == "ok" else None for row in needed)
    for which in ("first", "best"):
        row = rows.get(("best", f"{which}, timed"))
        if rates and flops and row and row["status"] == "ok":
            (run,) = row["runs"]
            kind = next((kind for name, kind in PRECISIONS.items() if run["arguments"].get(name)), "float32")
            share = flops * run["timing"]["samples_per_second"] / rates[kind]
            shown = f"{_samples(row)} samples/s, {share:.1%} of {rates[kind] / 1e12:.3g} TFLOP/s ({kind})"
            yield f"model FLOPs utilization, the {which} recipe ({json.dumps(run['arguments'])}): {shown}"


def _not_well(data: Mapping[str, Any]) -> Iterator[str]:
    for row in data["rows"]:
        if row["status"] not in ("ok", NOT_TESTABLE):
            yield f"{row['part']}, {row['name']}: {row['status']} ({row['message'][:200]})"
    lacking = sum(row["status"] == NOT_TESTABLE for row in data["rows"])
    yield f"{len(data['rows'])} rows, {lacking} of them not testable here"
