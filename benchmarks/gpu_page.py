"""What the pages show of the GPU suite: its reports, kept as results/<machine>/gpu/<date>.json, and their tables.

Only what was measured on a GPU is kept. What was rehearsed, or ran at tiny sizes, is refused.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gpu_report
import recipes
from gpu_rows import FIRST, NOT_TESTABLE
from tables import MIB, mebibytes, table

from perf_helpers.lab.hardware import Machine
from perf_helpers.lab.task import Task
from perf_helpers.records import Ratio, write_whole
from perf_helpers.texts import number_text

NONE = "No GPU has run it: not measured."
TOLD = ("torch", "transformers", "bitsandbytes")
BY_HALF = {"bf16": "bfloat16", "fp16": "float16"}
Rows = dict[tuple[str, str], dict[str, Any]]


def read(path: Path) -> dict[str, Any]:
    """A report of the suite.

    Raises:
        ValueError: it is none, or was not measured on a GPU at the sizes of one.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if (data["suite"], data["schema"]) != ("gpu", gpu_report.SCHEMA):
            raise ValueError(f"suite {data['suite']!r}, schema {data['schema']!r}")
        rehearsed, tiny, machine = data["rehearsed"], data["tiny"], Machine.from_dict(data["machine"])
        [row[name] for row in data["rows"] for name in ("part", "name", "status", "runs")]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no report of the GPU suite ({type(error).__name__}: {error})") from None
    if rehearsed is not False or machine.rehearsed:
        raise ValueError(f"{path} was rehearsed, not measured")
    if tiny or machine.kind != "cuda":
        raise ValueError(f"{path} was made at tiny sizes, or without a GPU: it says nothing of one")
    return data


def keep(path: Path, results: Path) -> Path:
    """Keep a report as results/<machine>/gpu/<date>.json; ValueError as `read`."""
    data = read(path)
    target = results / Machine.from_dict(data["machine"]).slug / "gpu" / f"{data['date'][:10]}.json"
    write_whole(target, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return target


def suites(results: Path) -> dict[str, dict[str, Any]]:
    """The newest report of each machine, by its folder; ValueError as `read`."""
    return {path.parents[1].name: read(path) for path in sorted(results.glob("*/gpu/*.json"))}


def recipes_of(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each of the guides' ten recipes took, by name: status, and bytes allocated and reserved."""
    rows = by_name(data)
    return {name: _sizes(rows[part, name]) for part, name in rows if part == "ten" and name in recipes.ROWS}


def caption(data: Mapping[str, Any]) -> str:
    """The machine, versions and dates that its numbers stand with."""
    versions = ", ".join(f"{name} {data['versions'].get(name) or 'none'}" for name in TOLD)
    driver = next((gpu.get("driver") for gpu in data["machine"]["gpus"]), None)
    about = f"{data['machine']['name']}, driver {driver or 'unknown'}, {versions}"
    return f"{about}, profile {data['profile']}, {data['began'][:16]} to {data['date'][:16]} UTC"


def by_name(data: Mapping[str, Any]) -> Rows:
    return {(row["part"], row["name"]): row for row in data["rows"]}


def section(name: str, data: Mapping[str, Any], cards: Mapping[str, dict]) -> str:
    """The tables of one machine. `cards`: what is rehearsed, by card."""
    rows = by_name(data)
    parts = [f"### {name}", caption(data)]
    for title, made in (
        ("The guides' ten recipes", _ten(rows, data, cards)),
        ("By batch size", _batches(rows)),
        ("fp16 against fp32 by micro-batch, as in the 2022 guide", _fp16(rows)),
        ("One thing switched on, in turns with the same without it", _pairs(rows)),
        ("From the guides' vanilla to the best recipe", _ladder(rows)),
    ):
        if made:
            parts.append(f"**{title}**\n\n{made}")
    facts = [*_facts(rows), *_utilisation(rows), *_not_well(data)]
    return "\n\n".join([*parts, "\n".join(f"- {fact}" for fact in facts)])


def _sizes(row: Mapping[str, Any]) -> dict[str, Any]:
    memory = (row["runs"][-1]["memory"] if row["runs"] else None) or {}
    names = ("peak_bytes", "reserved_bytes", "device_used_bytes")
    return {"status": row["status"]} | {name: memory.get(name) for name in names}


def _samples(row: Mapping[str, Any] | None) -> str:
    timing = row["runs"][-1]["timing"] if row and row["runs"] else None
    return number_text(timing and timing["samples_per_second"])


def _ratio(row: Mapping[str, Any] | None) -> str:
    """A pair's ratio of speeds with its interval; what became of a pair without one."""
    if row is None:
        return "not measured"
    return str(Ratio.from_dict(row["speed_ratio"])) if row["speed_ratio"] else row["status"]


def _ten(rows: Rows, data: Mapping[str, Any], cards: Mapping[str, dict]) -> str:
    """Beside the V100's megabytes, and what cards of the same capability and task were rehearsed to take."""
    if not (runs := rows.get(("ten", "vanilla"), {"runs": ()})["runs"]):
        return ""
    (run,) = runs
    gpu = Machine.from_dict(data["machine"]).gpus[0]
    alike = {
        card: {row["name"]: row for row in told["rows"]}
        for card, told in cards.items()
        if tuple(told["capability"]) == gpu.capability and told["task"] == run["task"]
    }
    head = ["recipe", "MB, V100 (guide)", "MiB allocated / reserved", "MiB device-used", "samples/s", "against vanilla"]
    lines = []
    for name, (_, megabytes) in recipes.ROWS.items():
        row = rows.get(("ten", name))
        sizes = _sizes(row) if row else None
        used = sizes and sizes["device_used_bytes"]
        cells = [name, str(megabytes), mebibytes(sizes), f"{used / MIB:.0f}" if used else "not measured", _samples(row)]
        cells.append("1" if name == "vanilla" else _ratio(rows.get(("ten", f"{name} against vanilla"))))
        lines.append([*cells, *(mebibytes(column.get(name)) for column in alike.values())])
    told = f"{Task.from_dict(run['task'])}; throughput against vanilla's, in turns, with its interval."
    return f"{told}\n\n" + table([*head, *(f"{card}, rehearsed" for card in alike)], lines)


def _batches(rows: Rows) -> str:
    lines = []
    for (part, name), row in rows.items():
        if part == "batch" and "against" not in name:
            lines.append([name.removeprefix("batch "), mebibytes(_sizes(row)), _samples(row)])
    pairs = [f"{name}: {_ratio(row)} x" for (part, name), row in rows.items() if part == "batch" and "against" in name]
    head = ["batch", "MiB allocated / reserved", "samples/s"]
    return lines and table(head, lines) + "\n\n" + "; ".join([*pairs, "in turns, with its interval."])


def _fp16(rows: Rows) -> str:
    lines = []
    for steps in ("", " x 2"):
        for size in (1, 8, 16, 32, 64):
            full, half = (rows.get(("fp16", f"{size}{steps}, {kind}")) for kind in ("fp32", "fp16"))
            if full and half:
                sizes = [_sizes(row) for row in (full, half)]
                peaks = [each["peak_bytes"] for each in sizes]
                saved = f"{1 - peaks[1] / peaks[0]:.1%}" if all(peaks) else "not measured"
                speed = _ratio(rows.get(("fp16", f"{size}{steps}, fp16 against {size}{steps}, fp32")))
                lines.append([f"{size}{steps}", *map(mebibytes, sizes), saved, speed])
    head = ["micro-batch x steps", "fp32, MiB allocated / reserved", "fp16", "saved", "throughput, fp16 / fp32"]
    return lines and table(head, lines)


def _pairs(rows: Rows) -> str:
    lines = []
    for (part, name), row in rows.items():
        if part in ("tf32", "bf16", "attention", "compile") and " against " in name:
            peaks = [run["memory"] and run["memory"]["peak_bytes"] for run in row["runs"]]
            memory = number_text(peaks[1] / peaks[0]) if len(peaks) == 2 and all(peaks) else "not measured"
            lines.append([part, name, memory, _ratio(row)])
    return lines and table(["part", "what", "peak allocated, ratio", "throughput, ratio"], lines)


def _ladder(rows: Rows) -> str:
    first = rows.get(("best", FIRST))
    whole = first and _sizes(first)["peak_bytes"]
    lines = []
    for (part, name), row in rows.items():
        if part == "best" and name.startswith((FIRST, "+ ")) and " against " not in name:
            peak = _sizes(row)["peak_bytes"]
            share = f"{peak / whole:.0%}" if peak and whole else "not measured"
            ratio = "1" if name == FIRST else _ratio(rows.get((part, f"{name} against {FIRST}")))
            lines.append([name, mebibytes(_sizes(row)), share, ratio])
    head = ["rung", "MiB allocated / reserved", "of the guides' vanilla", "throughput against it"]
    return lines and table(head, lines)


def _facts(rows: Rows) -> Iterator[str]:
    """What functions answered, in words: rates, kernels, starts."""
    answers = {key: row["value"] for key, row in rows.items() if row["status"] == "ok" and row["value"] is not None}
    if found := answers.get(("tf32", "products")):
        fastest = {name: min(seconds) for name, seconds in found.items()}
        told = ", ".join(f"{name} {fastest['fp32'] / seconds:.1f} x" for name, seconds in fastest.items())
        yield f"a large product, the fastest of its turns, against fp32: {told}"
    if found := answers.get(("attention", "kernels")):
        yield f"attention kernels for 16 bits: {', '.join(name for name, runs in found.items() if runs) or 'none'}"
    if found := answers.get(("compile", "cold start")):
        yield f"torch.compile: {found[0]:.1f} s for a cold forward and backward, {min(found):.3f} s for a later one"


def _utilisation(rows: Rows) -> Iterator[str]:
    """Model FLOPs utilisation of the first recipe and the best, by the rate of a large product in their precision."""
    asked = (rows.get(("best", name)) for name in ("rates", "model FLOPs of a sample"))
    rates, flops = (row["value"] if row and row["status"] == "ok" else None for row in asked)
    for which in ("first", "best"):
        row = rows.get(("best", f"{which}, timed"))
        if rates and flops and row and row["status"] == "ok":
            (run,) = row["runs"]
            by_half = (kind for name, kind in BY_HALF.items() if run["arguments"].get(name))
            kind = next(by_half, "tf32" if run["arguments"].get("tf32") else "float32")
            share = flops * run["timing"]["samples_per_second"] / rates[kind]
            told = f"{_samples(row)} samples/s, {share:.1%} of {rates[kind] / 1e12:.3g} TFLOP/s ({kind})"
            yield f"model FLOPs utilisation, the {which} recipe ({json.dumps(run['arguments'])}): {told}"


def _not_well(data: Mapping[str, Any]) -> Iterator[str]:
    for row in data["rows"]:
        if row["status"] not in ("ok", NOT_TESTABLE):
            yield f"{row['part']}, {row['name']}: {row['status']} ({row['message'][:200]})"
    lacking = sum(row["status"] == NOT_TESTABLE for row in data["rows"])
    yield f"{len(data['rows'])} rows, {lacking} of them not testable here"
