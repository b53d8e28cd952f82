"""Keeps recorded course runs, and makes the README's tables and pictures from them.

python results/build.py --record build/course    keep a course run as results/<machine>/<date>.json, then build
python results/build.py --estimates              hold the estimate against the recorded GPU runs, then build
python results/build.py                          pictures and the README's tables, from the newest run of a machine
python results/build.py --check                  writes nothing; exit code 1 if the README is not up to date

What was measured and what was rehearsed (results/rehearsed/, by rehearse.py) stay apart: no file of the one is read as
the other, and no column has both.
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

from perf_helpers import claims, plots
from perf_helpers.course.results import load_results, measured
from perf_helpers.estimate import estimate
from perf_helpers.lab.hardware import Machine
from perf_helpers.lab.runs import CATEGORIES, Run
from perf_helpers.lab.store import write_whole
from perf_helpers.lab.task import Task

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- scoreboard: made by results/build.py -->", "<!-- end of scoreboard -->"
REHEARSED = "<!-- rehearsed: made by results/build.py -->", "<!-- end of rehearsed -->"
ESTIMATE = "<!-- estimate: made by results/build.py -->", "<!-- end of estimate -->"
BESIDE = HERE / "estimate.json"  # by tests/measure_estimate.py
ON_GPUS = HERE / "estimate_cuda.json"  # by --estimates
SUMMARY_LESSON = "14"  # the guides' ten recipes, side by side
MIB = 2**20


def record(course: Path) -> Path:
    """Copy a course run's results.json to results/<machine>/<date>.json, without the timelines of its runs.

    Raises:
        ValueError: no results, or those of a rehearsal.
    """
    data = load_results(course)
    if data["machine"].get("rehearsed"):
        raise ValueError(f"{course} was rehearsed, not measured: keep it by results/rehearse.py --course")
    for run in data["runs"]:
        if run.get("memory"):
            run["memory"]["timeline"] = None
    target = HERE / Machine.from_dict(data["machine"]).slug / f"{data['date'][:10]}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return target


def newest() -> dict[str, dict]:
    """{folder name: the newest recorded run of that machine}; what was rehearsed is none.

    Raises:
        ValueError: a file that is not a course's results.
    """
    files = {path.parent.name: path for path in sorted(HERE.glob("*/*.json"))}
    found = {name: load_results(path) | {"file": path} for name, path in files.items()}
    return {name: data for name, data in found.items() if not data["machine"].get("rehearsed")}


def rehearsals() -> dict[str, dict]:
    """{card: its newest rehearsal}.

    Raises:
        ValueError: a file that does not say that it was rehearsed.
    """
    files = {path.parent.name: path for path in sorted(HERE.glob("rehearsed/*/*.json"))}
    found = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in files.values()]
    for path, data in found:
        if data.get("rehearsed") is not True:
            raise ValueError(f"{path} is no rehearsal")
    return {data["card"]: data for _, data in found}


def caption(data: dict) -> str:
    """The machine, versions and date that its numbers stand with."""
    versions = ", ".join(f"{name} {data['versions'][name]}" for name in ("torch", "transformers", "bitsandbytes"))
    return f"{data['machine']['name']}, {versions}, profile {data['profile']}, {data['date'][:10]}"


def picture(data: dict) -> Path | None:
    """The peak memory of the guides' recipes on one machine, beside the recorded run; None if it has no such runs."""
    import matplotlib

    matplotlib.use("Agg")
    named = {name: run for name, run in _ten(data).items() if run.memory and run.memory.breakdown and name != "yours"}
    if not named:
        return None
    target = data["file"].with_suffix(".png")
    axes = plots.memory(list(named.values()), title="Peak memory of the guides' ten recipes")
    axes.figure.supxlabel(caption(data), fontsize=9, x=0.01, ha="left")
    axes.figure.savefig(target, dpi=120, metadata={"Software": None})
    return target


def scoreboard(recorded: dict[str, dict]) -> str:
    """The README's table: each claim of the lessons, the guide's figure, and each machine's value and verdict."""
    ledger, machines = claims.load(), [*recorded]
    found = {name: {claim["id"]: claim for claim in data["claims"]} for name, data in recorded.items()}
    lines = [f"- **{name}**: {caption(recorded[name])}" for name in machines]
    lines += ["", *_head("lesson", "claim", "the guides say", *machines)]
    for claim in sorted(ledger.values(), key=lambda claim: claim.lesson):
        decisions = [found[name].get(claim.id) for name in machines]
        if any(decisions):
            lines.append(_line(*_said(claim), *map(_cell, decisions)))
    return "\n".join(lines)


def rehearsed_tables(cards: dict[str, dict], recorded: dict[str, dict]) -> str:
    """The guides' table on rehearsed cards, beside what was published and what was measured; then the memory claims.

    Args:
        cards: as `rehearsals` finds them.
        recorded: the measured runs, as `newest` finds them; each is a column of its own.
    """
    lines = []
    if not any(data["machine"]["kind"] == "cuda" for data in recorded.values()):
        lines = ["No GPU has run the course: memory rehearsed by torch's own allocator; speed not measured.", ""]
    if not cards:
        return "\n".join([*lines, "No card is rehearsed yet."])
    one = next(iter(cards.values()))
    there, context = one["guide"]["hardware"], one["guide"]["context_mb"]
    columns = {f"{name}, rehearsed": {row["name"]: row for row in data["rows"]} for name, data in cards.items()}
    measured_on = {name: runs for name, data in recorded.items() if (runs := _ten(data))}
    for name, runs in measured_on.items():
        found = {run.name: {"status": run.status} | (run.to_dict()["memory"] or {}) for run in runs.values()}
        columns[f"{name}, measured"] = found
    lines += [
        f"- **{there}**, published: {one['guide']['source']}, MB (of 2**20 bytes) by NVML; in brackets less the "
        f"{context} MB that it gives for the CUDA context",
        *(f"- **{name}**, rehearsed: {_rehearsed_caption(data)}" for name, data in cards.items()),
        *(f"- **{name}**, measured: {_sizes(runs, one['task'])}" for name, runs in measured_on.items()),
        "",
        *_head("recipe", f"{there}, published", *columns),
    ]
    for row in one["rows"]:
        cells = [_mebibytes(column.get(row["name"])) for column in columns.values()]
        lines.append(_line(row["name"], f"{row['guide_mb']} ({row['guide_mb'] - context})", *cells))
    return "\n".join([*lines, "", *_rehearsed_claims(cards)])


def _rehearsed_claims(cards: dict[str, dict]) -> list[str]:
    """The memory claims that a rehearsed course decided, with their numbers: one row a claim, one column a card."""
    courses = {name: data["course"] for name, data in cards.items() if data["course"]}
    if not courses:
        return ["No course is rehearsed yet: no claim has a rehearsed number."]
    found = {name: {claim["id"]: claim for claim in course["claims"]} for name, course in courses.items()}
    told = "; ".join(f"{name}: profile {course['profile']}, {course['date'][:10]}" for name, course in courses.items())
    lines = [f"The claims about memory, by the rehearsed course ({told}):", ""]
    lines += _head("lesson", "claim", "the guides say", *(f"{name}, rehearsed" for name in courses))
    for claim in sorted(claims.load().values(), key=lambda claim: claim.lesson):
        decisions = [found[name].get(claim.id) for name in courses]
        if any(decisions):
            cells = [_cell(decision) if decision else "not decided" for decision in decisions]
            lines.append(_line(*_said(claim), *cells))
    return lines


def _rehearsed_caption(data: dict) -> str:
    """The card, versions and date that its numbers stand with."""
    versions = ", ".join(f"{name} {data['versions'][name]}" for name in ("torch", "transformers", "bitsandbytes"))
    card = "compute capability {}.{}, {:.4g} GiB".format(*data["capability"], data["memory_bytes"] / 2**30)
    about = f"{card}, {Task.from_dict(data['task'])}, {versions}, {data['date'][:10]}"
    return f"{about}; MiB allocated / reserved, without the context"


def _ten(data: dict) -> dict[str, Run]:
    """A recorded course's runs of the guides' recipes, by name."""
    runs = [Run.from_dict(run) for run in data["runs"] if run["lesson"].startswith(SUMMARY_LESSON)]
    return {run.name: run for run in runs}


def _sizes(runs: dict[str, Run], rehearsed: dict) -> str:
    """What a measured column holds: the task, its precision, the kind of memory."""
    first = next(iter(runs.values()))
    task = Task.from_dict(first.task)
    half = ", bf16 as half precision" * any(run.arguments.get("bf16") for run in runs.values())
    counted = first.memory is None or first.memory.kind == "counted"
    what = "MiB counted" if counted else "MiB allocated / reserved, without the context"
    other = "" if task.to_dict() == rehearsed else "; **another model**: to be read downwards, not across"
    return f"{task}{''.join(f', {name} {value}' for name, value in task.config.items())}{half}; {what}{other}"


def _mebibytes(found: dict | None) -> str:
    """Allocated or counted, and reserved where there is such a thing; the status of what did not end well."""
    if found is None or found["status"] != "ok":
        return found["status"] if found else "not measured"
    sizes = [size for size in (found["peak_bytes"], found["reserved_bytes"]) if size is not None]
    return " / ".join(f"{size / MIB:.{0 if size >= 100 * MIB else 1}f}" for size in sizes)


def _said(claim: claims.Claim) -> tuple[str, str, str]:
    guide = claim.says + (f" ({claim.guide.text})" if claim.guide.text else "")
    return claim.lesson, f"`{claim.id}`", guide


def _head(*names: str) -> list[str]:
    return [_line(*names), "|" + "---|" * len(names)]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(decision: dict | None) -> str:
    if decision is None:
        return "not measured"
    if decision["verdict"] == claims.Verdict.NOT_TESTABLE:
        return "not testable here"
    return f"**{decision['verdict']}** ({measured(decision)})"


def held_against(recorded: dict[str, dict]) -> list[dict]:
    """Each recorded training on a GPU beside its estimate, in bytes: allocated, reserved, device-used, categories."""
    rows = []
    for data in recorded.values():
        machine = Machine.from_dict(data["machine"])
        trainings = (Run.from_dict(run) for run in data["runs"] if machine.kind == "cuda")
        for run in trainings:
            if not run.ok or run.memory is None or run.memory.kind != "allocated" or not _of_a_trainer(run):
                continue
            options = {"compute_capability": machine.gpus[0].capability, "processes": run.processes}
            task = Task.from_dict(run.task)
            said = estimate(task, device="cuda", every_layer=True, **options, **run.arguments).memory
            row = {"machine": machine.name, "name": run.name, "task": run.task, "arguments": run.arguments}
            for name in ("peak_bytes", "reserved_bytes", "device_used_bytes", "breakdown"):
                row[name] = [getattr(said, name), getattr(run.memory, name)]
            rows.append(row)
    return rows


def _of_a_trainer(run: Run) -> bool:
    """Whether the arguments say all: a loop of one's own or an optimizer of one's own stands in no argument."""
    return bool(run.arguments) and "samples_per_step" not in run.arguments and run.value is None


def error_table(rows: list[dict]) -> str:
    """Median, 95th percentile and worst of the estimate's errors on GPUs, as shares of what was measured."""
    if not rows:
        return "On a GPU: not yet checked. Memory rehearsed by torch's own allocator; speed not measured."
    errors = {"allocated": "peak_bytes", "reserved": "reserved_bytes", "device-used": "device_used_bytes"}
    found = {
        label: [abs(said / true - 1) for said, true in (row[name] for row in rows) if said and true]
        for label, name in errors.items()
    }
    for category in CATEGORIES:
        pairs = [(row["breakdown"], row["peak_bytes"][1]) for row in rows if all(row["breakdown"])]
        found[f"{category}, share of the peak"] = [
            abs(said.get(category, 0) - true.get(category, 0)) / peak for (said, true), peak in pairs
        ]
    lines = [
        f"On GPUs, {len(rows)} trainings:",
        "",
        "| | trainings | median | 95th percentile | worst |",
        "|---|---|---|---|---|",
    ]
    for label, values in found.items():
        if values:
            high = sorted(values)[max(0, -(-95 * len(values) // 100) - 1)]
            figures = " | ".join(f"{value:.2%}" for value in (statistics.median(values), high, max(values)))
            lines.append(f"| {label.replace('_', ' ')} | {len(values)} | {figures} |")
    return "\n".join(lines)


def beside_others(report: dict) -> str:
    """The estimate and other tools on the same trainings, and how long large models take."""
    versions = ", ".join(f"{name} {report['versions'][name]}" for name in ("torch", "transformers"))
    lines = [
        f"{report['what']}. {report['machine']}, {versions}, {report['date'][:10]}.",
        "",
        "| tool | answered | median error | worst | seconds, median | own memory, at most | cannot express |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["table"]:
        errors = " | ".join(_share(row[name]) for name in ("median_error", "worst_error"))
        own = f"{row['median_seconds']:.1f} | {row['most_own_bytes'] / 2**20:.0f} MiB"
        lines.append(
            f"| {row['tool']} | {row['answered']} of {row['asked']} | {errors} | {own} | {row['cannot_express']} |"
        )
    large = [
        f"{name} {found['seconds']:.1f} s, {found['own_bytes'] / 2**20:.0f} MiB"
        if "seconds" in found
        else f"{name} none"
        for name, found in report["large"].items()
    ]
    return "\n".join([*lines, "", f"Large models at 512 tokens, the libraries imported: {'; '.join(large)}."])


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.2%}"


def readme(recorded: dict[str, dict]) -> str:
    """The README with its tables made anew."""
    rows = json.loads(ON_GPUS.read_text(encoding="utf-8")) if ON_GPUS.exists() else []
    said = beside_others(json.loads(BESIDE.read_text(encoding="utf-8"))) + "\n\n" + error_table(rows)
    text = README.read_text(encoding="utf-8")
    tables = {(BEGIN, END): scoreboard(recorded), REHEARSED: rehearsed_tables(rehearsals(), recorded), ESTIMATE: said}
    for (begin, end), content in tables.items():
        block = f"{begin}\n{content}\n{end}"
        text, count = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, b=block: b, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"README.md has {count} places for {begin} ... {end}; it needs one")
    return text


def main(arguments=None) -> int:
    """Record, build or check; the exit code."""
    parser = argparse.ArgumentParser(description="Keep course runs; make the README's tables and pictures.")
    parser.add_argument("--record", type=Path, metavar="DIR", help="folder of a course run to keep")
    parser.add_argument("--estimates", action="store_true", help="hold the estimate against recorded GPU runs")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the README is not up to date")
    options = parser.parse_args(arguments)
    if options.record:
        print(record(options.record))
    recorded = newest()
    if not recorded:
        print("no recorded runs in results/<machine>/", file=sys.stderr)
        return 1
    if options.estimates:
        write_whole(ON_GPUS, json.dumps(held_against(recorded), indent=1) + "\n")
    text = readme(recorded)
    if options.check:
        if text != README.read_text(encoding="utf-8"):
            print("README.md: its tables are stale; run python results/build.py", file=sys.stderr)
            return 1
        return 0
    write_whole(README, text)
    for data in recorded.values():
        picture(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
