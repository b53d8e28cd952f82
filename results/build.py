"""Keeps recorded course runs, and makes the README's scoreboard and pictures from them.

python results/build.py --record build/course    keep a course run as results/<machine>/<date>.json, then build
python results/build.py                          pictures and the README's scoreboard, from the newest run of a machine
python results/build.py --check                  writes nothing; exit code 1 if the README is not up to date
"""

import argparse
import json
import re
import sys
from pathlib import Path

from perf_helpers import claims, plots
from perf_helpers.hardware import Machine
from perf_helpers.results import load_results, measured
from perf_helpers.runs import Run, write_whole

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- scoreboard: made by results/build.py -->", "<!-- end of scoreboard -->"
SUMMARY_LESSON = "14"  # the guides' ten recipes, side by side


def record(course: Path) -> Path:
    """Copy a course run's results.json to results/<machine>/<date>.json, without the timelines of its runs."""
    data = load_results(course)
    for run in data["runs"]:
        if run.get("memory"):
            run["memory"]["timeline"] = None
    target = HERE / Machine.from_dict(data["machine"]).slug / f"{data['date'][:10]}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return target


def newest() -> dict[str, dict]:
    """{folder name: the newest recorded run of that machine}."""
    files = {path.parent.name: path for path in sorted(HERE.glob("*/*.json"))}
    return {name: load_results(path) | {"file": path} for name, path in files.items()}


def caption(data: dict) -> str:
    """The machine, versions and date that its numbers stand with."""
    versions = ", ".join(f"{name} {data['versions'][name]}" for name in ("torch", "transformers", "bitsandbytes"))
    return f"{data['machine']['name']}, {versions}, profile {data['profile']}, {data['date'][:10]}"


def picture(data: dict) -> Path | None:
    """The peak memory of the guides' recipes on one machine, beside the recorded run; None if it has no such runs."""
    import matplotlib

    matplotlib.use("Agg")
    runs = [Run.from_dict(run) for run in data["runs"] if run["lesson"].startswith(SUMMARY_LESSON)]
    named = {run.name: run for run in runs if run.memory and run.memory.breakdown and run.name != "yours"}
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
    lines += [
        "",
        "| lesson | claim | the guides say | " + " | ".join(machines) + " |",
        "|---|---|---|" + "---|" * len(machines),
    ]
    for claim in sorted(ledger.values(), key=lambda claim: claim.lesson):
        decisions = [found[name].get(claim.id) for name in machines]
        if any(decisions):
            guide = claim.says + (f" ({claim.guide.text})" if claim.guide.text else "")
            cells = [_cell(decision) for decision in decisions]
            lines.append(f"| {claim.lesson} | `{claim.id}` | {guide} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(decision: dict | None) -> str:
    if decision is None:
        return "not measured"
    if decision["verdict"] == claims.Verdict.NOT_TESTABLE:
        return "not testable here"
    return f"**{decision['verdict']}** ({measured(decision)})"


def readme(recorded: dict[str, dict]) -> str:
    """The README with its scoreboard made anew."""
    text = README.read_text(encoding="utf-8")
    block = f"{BEGIN}\n{scoreboard(recorded)}\n{END}"
    new, count = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: block, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"README.md has {count} places for the scoreboard ({BEGIN} ... {END}); it needs one")
    return new


def main(arguments=None) -> int:
    """Record, build or check; the exit code."""
    parser = argparse.ArgumentParser(description="Keep course runs; make the README's scoreboard and pictures.")
    parser.add_argument("--record", type=Path, metavar="DIR", help="folder of a course run to keep")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the README is not up to date")
    options = parser.parse_args(arguments)
    if options.record:
        print(record(options.record))
    recorded = newest()
    if not recorded:
        print("no recorded runs in results/<machine>/", file=sys.stderr)
        return 1
    text = readme(recorded)
    if options.check:
        if text != README.read_text(encoding="utf-8"):
            print("README.md: the scoreboard is stale; run python results/build.py", file=sys.stderr)
            return 1
        return 0
    write_whole(README, text)
    for data in recorded.values():
        picture(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
