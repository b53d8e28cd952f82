"""What the scripts share: where records are kept, their options, and how a report is told and kept."""

import argparse
import json
from pathlib import Path

from perf_helpers.records import write_whole

RESULTS = Path(__file__).parents[1] / "results"  # records, and the page made of them


def options(description: str, **defaults: float) -> argparse.Namespace:
    """The options of a script: `--out` for a file, and one for each number, e.g. rounds=9 for `--rounds`.

    Of the description, the script's docstring, the first line is shown.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def keep(report: dict, out: Path | None, leave_out: tuple[str, ...] = ()) -> None:
    """Print a report as JSON, but for what is too long to read, and write all of it to a file if one is named."""
    print(json.dumps({name: value for name, value in report.items() if name not in leave_out}, indent=1))
    if out:
        write_whole(out, json.dumps(report, indent=1) + "\n")
