"""How large each part of the repository is, and how large it may be: the budgets of `make check`.

    python tests/size.py          a table; exit code 1 if a part is larger than its budget

Whoever needs more room takes it from what is there: a budget is lowered after each step that makes a part smaller.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# (what, patterns of files, lines at most, files at most). What a lesson imports is lab, course, widgets and plots, and
# what stands below them. The aims are 15,500 lines in 80 modules for perf_helpers and 4,000 lines for what measures.
BUDGETS = (
    ("perf_helpers", ["perf_helpers/**/*.py"], 20_416, 97),
    ("  lab", ["perf_helpers/lab/*.py"], 5_494, 24),
    ("  sweep", ["perf_helpers/sweep/*.py"], 758, 3),
    ("  estimate", ["perf_helpers/estimate/*.py"], 5_708, 24),
    ("  rehearsal", ["perf_helpers/rehearsal/**/*.py"], 1_045, 6),
    ("  course", ["perf_helpers/course/*.py"], 1_307, 8),
    ("  compare", ["perf_helpers/compare/*.py"], 710, 4),
    ("  advise", ["perf_helpers/advise/*.py"], 1_871, 8),
    ("  widgets", ["perf_helpers/widgets/*.py"], 1_615, 11),
    ("  what all share", ["perf_helpers/*.py"], 1_908, 9),
    (
        "what a lesson imports",
        [f"perf_helpers/{room}" for room in ("lab/*.py", "course/*.py", "widgets/*.py", "[!c]*.py", "cards.py")],
        9_785,
        50,
    ),
    ("benchmarks", ["benchmarks/*.py"], 7_132, 40),
    ("website", [f"website/{kind}" for kind in ("*.py", "*.md", "*/*.j2", "_static/*.js", "_static/*.css")], 3_255, 23),
    ("README.md", ["README.md"], 140, 1),
    ("CONTRIBUTING.md", ["CONTRIBUTING.md"], 350, 1),
)


def sizes(root: Path = ROOT) -> list[tuple[str, int, int, int, int]]:
    """(what, its lines, at most, its files, at most) of each part."""
    rows = []
    for what, patterns, lines, files in BUDGETS:
        found = {path for pattern in patterns for path in root.glob(pattern)}
        rows.append((what, sum(len(path.read_text("utf-8").splitlines()) for path in found), lines, len(found), files))
    return rows


def problems(rows: list[tuple[str, int, int, int, int]]) -> list[str]:
    """What is larger than it may be, or counts nothing."""
    found = [f"{what.strip()}: {lines} lines, {most} at most" for what, lines, most, *_ in rows if lines > most]
    found += [f"{what.strip()}: {files} files, {most} at most" for what, _, _, files, most in rows if files > most]
    return found + [f"{what.strip()}: nothing to count" for what, lines, *_ in rows if not lines]


if __name__ == "__main__":
    rows = sizes()
    for what, lines, most_lines, files, most_files in rows:
        print(f"{what:<22} {lines:>7,} of {most_lines:>6,} lines {files:>5} of {most_files:>3} files")
    for line in problems(rows):
        print(f"over its budget: {line}", file=sys.stderr)
    sys.exit(bool(problems(rows)))
