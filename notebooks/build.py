"""Builds the lessons that readers open from the sources that authors edit, and checks their shape.

    python notebooks/build.py            notebooks/src/NN_slug.py (jupytext percent format) -> notebooks/NN_slug.ipynb
    python notebooks/build.py --check    writes nothing; exit code 1 names what is stale, missing or orphaned

Both lint every lesson, and exit with 1 if one is out of shape. The bytes are a function of the source alone: no
outputs, no versions, and cell ids made from the cell's own text, so that a cell inserted in the source is the only one
in the diff. Before the last cell stands what recorded runs (results/<machine>/) measured for the lesson's claims.
Cells that hold an answer are sealed (`perf_helpers.widgets.sealed`).
"""

import argparse
import ast
import hashlib
import re
import sys
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path

import jupytext
import nbformat

from perf_helpers.widgets.sealed import opened, seal

HERE = Path(__file__).parent
LESSONS = "[0-9][0-9]_*"

MAX_CODE_LINES = 25  # a cell and its output fit one laptop screen
MAX_SETUP_LINES = 26  # the setup cell shows nothing
MIN_CELLS, MAX_CELLS = 20, 60  # fewer hides steps in long cells, more is two lessons
MAX_WORDS = 2600  # some 20 minutes of reading; a lesson of two parts has a break
PARAMETERS = {"profile": "auto", "strict": False, "out": ""}  # what a course run injects: papermill ignores the others

# What trains nothing must not end a lesson.
FORESEEN = ("estimate", "advise", "verify", "parallelism", "explorers.memory")

# A notebook shows the results of these only as the last expression of a cell, or by display(...).
RESULTS = ("widgets.revealed", "claims.check", "exercises.check", "plots.Table", "plots.table")

ONCE = ("parameters", "setup", "finish")
EXERCISE = ("exercise", "check", "solution")
RECORDED = "recorded"  # the cell that is made here, from recorded runs; it counts neither as a cell nor as prose
TAGS = {*ONCE, *EXERCISE, "claim", "widget", RECORDED}  # any other tag is a misspelt one
QUESTION = re.compile(r"^exercises\.question\(", re.MULTILINE)
SEEN = ("print(", "_ = ", "plots.", "assert ", "import ", "from ")  # what a learner is to read or see
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form"}  # as JupyterLab spells it, and as Colab does
OPENS = "# for the cells of this lesson that hold an answer\n%load_ext perf_helpers.widgets.sealed"


def build(source: str, recorded: str = "", name: str = "NN_slug") -> str:
    """Return the notebook (JSON text) of a lesson's source (percent format): always the same bytes.

    `recorded` is markdown that goes before the last cell.
    """
    seen, cells = Counter(), []
    parsed = jupytext.reads(source, fmt="py:percent").cells
    if recorded:
        parsed.insert(-1, nbformat.v4.new_markdown_cell(recorded, metadata={"tags": [RECORDED]}))
    for cell in parsed:
        metadata = {"tags": tags(cell)} if tags(cell) else {}
        text = f"{cell.cell_type}\n{cell.source}"
        seen[text] += 1
        new = getattr(nbformat.v4, f"new_{cell.cell_type}_cell")(cell.source, metadata=metadata)
        new.id = hashlib.sha256(f"{text}\n{seen[text]}".encode()).hexdigest()[:12]
        if kind := _answer_in(cell):
            new.source = seal(cell.source, kind, f"notebooks/src/{name}.py")
            new.metadata |= FOLDED
        elif "setup" in tags(cell):
            new.source += f"\n\n{OPENS}"
        cells.append(new)
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells, metadata=metadata), version=4) + "\n"


def _answer_in(cell) -> str:
    """Return which answer a cell contains: "question" (its key), "solution", "hint", "code", or "" if it contains none.

    Hints and code are found by `source_hidden`, which the author sets.
    """
    if cell.cell_type != "code":
        return ""
    if "solution" in tags(cell):
        return "solution"
    if _asks(cell):
        return "question"
    if not cell.metadata.get("jupyter", {}).get("source_hidden"):
        return ""
    return "hint" if cell.source.startswith("exercises.hint(") else "code"


def recorded_text(lesson: str, results: Path = HERE.parent / "results") -> str:
    """Return, as markdown, what the newest recorded run of each machine measured for a lesson's claims; "" without
    any. Verdicts by a rule that the ledger has changed since are left out, and counted.
    """
    from perf_helpers.course.results import measured_text

    parts, changed = [], 0
    for data in _recorded(results).values():
        claims = [claim for claim in data["claims"] if claim["lesson"][:2] == lesson[:2]]
        rows = [claim for claim in claims if _is_by_the_present_rule(claim, bool(data["machine"]["gpus"]))]
        changed += len(claims) - len(rows)
        if rows:
            versions = ", ".join(f"{name} {data['versions'][name]}" for name in ("torch", "transformers"))
            head = f"On {data['machine']['name']} ({versions}, profile {data['profile']}, {data['date'][:10]}):"
            lines = [f"| `{claim['id']}` | {claim['verdict']} | {measured_text(claim)} |" for claim in rows]
            parts.append("\n".join([head, "", "| claim | verdict | measured |", "|---|---|---|", *lines]))
    if any("held to" in part for part in parts):
        parts.append("*Held to* an instruction set: the environment allowed torch no newer CPU instructions.")
    if changed:
        parts.append(f"Left out because the claim's rule has changed since: {changed} of the verdicts.")
    return "\n\n".join(["**What recorded runs measured**, to compare with yours.", *parts]) if parts else ""


def _is_by_the_present_rule(claim: dict, has_gpu: bool) -> bool:
    """Return whether the ledger still has the rule of a recorded claim; `has_gpu`: whether its machine has a GPU."""
    from perf_helpers.course.ledger import Verdict, load

    present = load().get(claim["id"])
    if present is None or claim["threshold"] != present.threshold_text():
        return False
    return has_gpu or present.where == "any" or claim["verdict"] == Verdict.NOT_TESTABLE


@cache
def _recorded(results):
    from perf_helpers.course.results import recorded

    return recorded(results)  # read once for all lessons


def tags(cell) -> list[str]:
    """Return the papermill tags of a cell."""
    return list(cell.metadata.get("tags", []))


def lint(notebook) -> list[str]:
    """Return what is wrong with the shape of a lesson (an nbformat 4 notebook), one line each; empty if nothing is."""
    cells = [cell.copy() for cell in notebook.cells]  # as the author wrote them
    for cell in cells:
        cell.source = opened(cell.source).removesuffix(f"\n\n{OPENS}")
    return [*_lint_tags(cells), *_lint_code(cells), *_lint_prose(cells)]


def _lint_tags(cells):
    place = {tag: number for number, cell in enumerate(cells) for tag in tags(cell)}
    count = Counter(tag for cell in cells for tag in tags(cell))
    for tag in ONCE:
        if count[tag] != 1:
            yield f"exactly one cell is tagged {tag}; here {count[tag]}"
    for tag in ("claim", *EXERCISE):
        if not count[tag]:
            yield f"no cell is tagged {tag}"
    if len({count[tag] for tag in EXERCISE}) > 1:
        yield f"each exercise has one check and one solution; here {', '.join(f'{count[t]} {t}' for t in EXERCISE)}"
    for tag in sorted(set(count) - TAGS):
        yield f"unknown tag {tag}; known: {', '.join(sorted(TAGS))}"
    if place.get("parameters", 0) > place.get("setup", len(cells)):
        yield "the parameters cell comes before the setup cell"
    if not cells or "finish" not in tags(cells[-1]):
        yield "the last cell is not the one tagged finish"


def _lint_code(cells):
    for number, cell in enumerate(cells, 1):
        if cell.cell_type != "code":
            continue
        most = MAX_SETUP_LINES if "setup" in tags(cell) else MAX_CODE_LINES
        if (lines := len(cell.source.splitlines())) > most:
            yield f"cell {number} has {lines} lines; at most {most}"
        if cell.outputs or cell.execution_count is not None:
            yield f"cell {number} has outputs; lessons are kept without"
        for name in _unguarded(cell.source):
            yield f"cell {number} calls {name}(...): ask by lab.foresee({name}, ...), which goes on without an answer"
        for name in _lost(cell.source):
            yield f"cell {number} loses the result of {name}(...): write display({name}(...))"
        if _asks(cell) and any(line.startswith(SEEN) for line in cell.source.splitlines()):
            yield f"cell {number} asks a question and does more: a question has a cell of its own, which is sealed"
        if "parameters" in tags(cell) and _assignments(cell.source) != PARAMETERS:
            expected = "; ".join(f"{name} = {value!r}" for name, value in PARAMETERS.items())
            yield f"cell {number}: the parameters are exactly {expected}"


def _asks(cell) -> bool:
    """Return whether a cell asks a question: its source has the key and each explanation."""
    return cell.cell_type == "code" and QUESTION.search(cell.source) is not None


def _unguarded(source):
    """Return the names of FORESEEN that a cell calls itself: inside a function they are called by somebody else."""
    found, rest = [], []
    with suppress(SyntaxError):
        rest = [ast.parse(source)]
    while rest:
        node = rest.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FORESEEN:
            found.append(ast.unparse(node.func))
        rest.extend(ast.iter_child_nodes(node))
    return found


def _lost(source):
    """Return the names of RESULTS that a cell calls without displaying what they return."""
    with suppress(SyntaxError):
        tree = ast.parse(source)
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        lost = (ast.unparse(node.value.func) for node in calls if node is not tree.body[-1])
        return [name for name in lost if name in RESULTS]
    return []


def _assignments(source):
    """Return {name: value} if the source is nothing but assignments of constants, else None."""
    try:
        return {line.targets[0].id: ast.literal_eval(line.value) for line in ast.parse(source).body}
    except (AttributeError, SyntaxError, ValueError):
        return None


def _lint_prose(cells):
    cells = [cell for cell in cells if RECORDED not in tags(cell) and _answer_in(cell) not in ("question", "hint")]
    if not MIN_CELLS <= len(cells) <= MAX_CELLS:
        yield f"{len(cells)} cells; {MIN_CELLS} to {MAX_CELLS}"
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    words = len(re.findall(r"\w[\w'’.,%/-]*", re.sub(r"\]\([^)]*\)", "]", text)))  # of a link, its text alone is read
    if words > MAX_WORDS:
        yield f"{words} words of prose; at most {MAX_WORDS}"
    unfenced = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^# +(.+?) *$", unfenced, flags=re.MULTILINE)
    if len(titles) != 1:
        yield f"exactly one heading of level one; here {len(titles)}"
    if not (cells and cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")):
        yield "the first cell starts with the title (# ...)"
    if titles and not titles[0].endswith("?"):
        yield f"the title is a question; here: {titles[0]}"


def main(arguments=None, folder: Path = HERE) -> int:
    """Build all lessons of a folder (with --check: only compare), lint them, and return the exit code."""
    parser = argparse.ArgumentParser(description="Build the lessons from their sources and check their shape.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a notebook is not up to date")
    check = parser.parse_args(arguments).check
    sources = sorted((folder / "src").glob(f"{LESSONS}.py"))
    problems = [] if sources else [f"no lessons in {folder / 'src'} (files NN_slug.py)"]
    for source in sources:
        target = folder / f"{source.stem}.ipynb"
        text = build(source.read_text(encoding="utf-8"), recorded_text(source.stem), source.stem)
        if not target.exists() or target.read_bytes() != text.encode():
            if check:
                state = "stale" if target.exists() else "missing"
                problems.append(f"{target.name}: {state}; run python notebooks/build.py")
            else:
                target.write_bytes(text.encode())
                print(f"wrote {target.name}")
        problems += [f"{source.name}: {problem}" for problem in lint(nbformat.reads(text, as_version=4))]
    for name in sorted({p.stem for p in folder.glob(f"{LESSONS}.ipynb")} - {p.stem for p in sources}):
        problems.append(f"{name}.ipynb: orphaned, there is no src/{name}.py; delete it or add its source")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
