"""List the size of each part of the repository and its limit: the budgets of `make check`.

    python tests/size.py          a table; exit code 1 if a part is larger than its budget

In Python files only lines of code count, not docstrings, comments and blank lines. In other files every line counts. If
you need more lines, first make something smaller; lower a budget when its part has become smaller.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
# (part, patterns of its files, lines at most, files at most)
BUDGETS = (
    ("trainmem", ["trainmem/**/*.py"], 13_303, 100),
    ("  core", ["trainmem/core/*.py"], 2_143, 15),
    ("  measure", ["trainmem/measure/*.py"], 2_190, 15),
    ("  estimate", ["trainmem/estimate/*.py"], 4_944, 37),
    ("  rehearsal", ["trainmem/rehearsal/**/*.py"], 1_772, 16),
    ("  advise", ["trainmem/advise/*.py"], 1_103, 8),
    ("  what all share", ["trainmem/*.py"], 1_151, 9),
    ("perf_helpers", ["perf_helpers/**/*.py"], 4_044, 38),
    ("  lab", ["perf_helpers/lab/*.py"], 617, 5),
    ("  course", ["perf_helpers/course/*.py"], 1_007, 10),
    ("  compare", ["perf_helpers/compare/*.py"], 455, 4),
    ("  sweep", ["perf_helpers/sweep/*.py"], 512, 3),
    ("  widgets", ["perf_helpers/widgets/*.py"], 1_010, 11),
    ("benchmarks", ["benchmarks/*.py"], 5_945, 46),
    ("website", [f"website/{kind}" for kind in ("*.py", "*.md", "*/*.j2", "_static/*.js", "_static/*.css")], 3_245, 25),
    ("README.md", ["README.md"], 200, 1),
    ("CONTRIBUTING.md", ["CONTRIBUTING.md"], 455, 1),
)


def code_lines(source: str) -> int:
    """Return the number of lines of code in a Python source, without docstrings, comments and blank lines."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= {*range(node.lineno, node.end_lineno + 1)}
    return len(lines)


def lines_of(path: Path) -> int:
    """Return the number of lines of a file that count towards the limit of its part of the repository."""
    text = path.read_text("utf-8")
    return code_lines(text) if path.suffix == ".py" else len(text.splitlines())


def sizes(root: Path = ROOT) -> list[tuple[str, int, int, int, int]]:
    """Return (part, its number of lines, lines allowed, its number of files, files allowed) for each part of the
    repository.

    `root`: the repository's folder.
    """
    rows = []
    for what, patterns, lines, files in BUDGETS:
        found = {path for pattern in patterns for path in root.glob(pattern)}
        rows.append((what, sum(map(lines_of, found)), lines, len(found), files))
    return rows


def problems(rows: list[tuple[str, int, int, int, int]]) -> list[str]:
    """Return one line for each part that exceeds its limit or has no files.

    `rows`: (part, its number of lines, lines allowed, its number of files, files allowed) of each part, as `sizes`
    returns them.
    """
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
