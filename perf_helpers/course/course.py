"""The course as a test: every lesson executed and judged, every claim's verdict in one place.

A lesson that fails or hangs does not stop the others. What the run yields is written to results.json, and the report is
made from that.
"""

import ast
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perf_helpers.course.comparison import Changes, compare
from perf_helpers.course.execution import execute
from perf_helpers.course.judgement import Judgement, first_line, judge, running
from perf_helpers.course.report import report
from perf_helpers.course.results import LESSON, SCHEMA, VERDICTS, claim_row, load_results, problems
from perf_helpers.lab import hardware
from perf_helpers.lab.profiles import choose_profile
from perf_helpers.lab.store import write_whole
from perf_helpers.texts import nearest_text

LESSONS = "[0-9][0-9]_*.ipynb"
PARAMETERS = {"profile", "strict", "out"}  # what papermill sets in a lesson
LONG_SECONDS = 60  # a cell that runs so long is told


@dataclass(frozen=True, slots=True)
class CourseResult:
    """What a course run yielded."""

    out: Path  # the folder with the report
    data: dict[str, Any]  # the content of results.json
    changes: Changes | None = None  # against a baseline, if one was given

    @property
    def problems(self) -> list[str]:
        """What keeps the run from being ok, one line each."""
        return problems(self.data)

    @property
    def ok(self) -> bool:
        """Every lesson ran, every verdict is an expected one, and at least one claim was decided."""
        return not self.problems


def run_course(
    lessons: str | Path | Sequence[str | Path] | None = None,
    profile: str = "auto",
    strict: bool = False,
    out: str | Path = "build/course",
    baseline: str | Path | None = None,
    timeout_per_lesson: float = 900,
    notebooks_dir: str | Path | None = None,
) -> CourseResult:
    """Execute lessons one after the other and write the report into `out`; go on after one that fails or hangs.

    Args:
        lessons: numbers ("05"), names or paths; None is all of them.
        profile: the lessons' sizes, "auto" by the machine's memory.
        strict: let a lesson fail for a verdict that the ledger does not expect.
        out: folder for the executed lessons and the report.
        baseline: an older run (results.json or its folder) to compare with.
        timeout_per_lesson: in seconds, many times what a lesson takes.
        notebooks_dir: the folder of the lessons, if not this repository's.

    Raises:
        ValueError: a lesson or a profile that does not exist, a damaged baseline, or `out` is the lessons' own folder.
    """
    sources = find_lessons(lessons, notebooks_dir)
    choose_profile(profile)
    old = load_results(baseline) if baseline else None
    out = Path(out).resolve()
    if any(source.parent == out for source in sources):
        raise ValueError(f"{out} holds the lessons themselves: name another folder for the executed ones")
    out.mkdir(parents=True, exist_ok=True)
    data = {"schema": SCHEMA, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    data |= {"machine": hardware.describe().to_dict(), "versions": hardware.versions()}
    data |= {"profile": profile, "strict": strict, "lessons": [], "claims": [], "runs": []}
    for number, source in enumerate(sources, 1):
        _say(f"[{number:2}/{len(sources)}] {source.stem} ...")
        started = time.monotonic()
        status, message, record = _run_lesson(source, out, profile, strict, timeout_per_lesson)
        seconds = round(time.monotonic() - started, 1)
        decided = [claim_row(source.stem, decision) for decision in record.get("claims", [])]
        data["lessons"].append(dict(zip(LESSON, (source.stem, status, seconds, message), strict=True)))
        data["claims"] += decided
        data["runs"] += [{"lesson": source.stem, **run} for run in record.get("runs", [])]
        count = Counter(claim["verdict"] for claim in decided)
        verdicts = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict]) or "no verdict"
        _say(f"        {status} in {seconds:.0f} s: {verdicts}")
        if message:
            _say(f"        {message}")
    changes = compare(old, data) if old else None
    data["baseline"] = changes.to_dict() if changes else None
    write_whole(out / "results.json", json.dumps(data, indent=1, ensure_ascii=False))
    report(out)
    return CourseResult(out, data, changes)


def find_lessons(
    lessons: str | Path | Sequence[str | Path] | None = None, notebooks_dir: str | Path | None = None
) -> list[Path]:
    """The notebooks of the lessons named by number, name or path, in order; None: of all lessons.

    Raises:
        ValueError: no such lesson, with the nearest; or a folder without lessons.
    """
    here = Path(notebooks_dir or Path(__file__).resolve().parents[2] / "notebooks")
    known = {path.stem: path.resolve() for path in sorted(here.glob(LESSONS))}
    found = {}
    for lesson in [lessons] if isinstance(lessons, str | Path) else lessons or known:
        path = Path(lesson)
        if path.suffix == ".ipynb" and path.is_file():
            found[path.stem] = path.resolve()
            continue
        number = f"{int(path.name):02}_" if path.name.isdecimal() else "?"
        match = [name for name in known if name.startswith(number) or path.name in (name, name.partition("_")[2])]
        found |= {name: known[name] for name in match}
        if known and not match:
            raise ValueError(f"no lesson {str(lesson)!r} in {here}. {nearest_text(path.stem, known)}")
    if not found:
        raise ValueError(f"no lessons (NN_name.ipynb) in {here}: run `make lessons`, or name the folder that has them")
    return [found[name] for name in sorted(found)]


def _run_lesson(source: Path, out: Path, profile: str, strict: bool, timeout: float) -> Judgement:
    """Execute one lesson and judge it."""
    import nbformat

    target, log = out / source.name, out / f"{source.stem}.log"
    for suffix in (".ipynb", ".json", ".html"):
        (out / f"{source.stem}{suffix}").unlink(missing_ok=True)
    try:
        missing = PARAMETERS - _parameters(nbformat.read(source, as_version=4))
    except Exception as error:  # nbformat raises its own, json's and attribute errors for a file that is no notebook
        return Judgement("failed", f"{source} is not a notebook: {error}", {})
    if missing:
        names = ", ".join(sorted(missing))
        return Judgement("failed", f"no cell tagged parameters sets {names}: it would run with its own", {})
    command = [sys.executable, "-m", "papermill", source, target, "--cwd", source.parent, "--no-progress-bar"]
    command += ["--kernel", "python3", "--language", "python", "--start-timeout", 120]
    command += ["--execution-timeout", int(timeout) + 60]  # a limit even if this process is gone
    command += ["-r", "profile", profile, "-p", "strict", strict, "-r", "out", out]
    code = execute([str(part) for part in command], log, timeout, _Watch(target))
    return judge(source.stem, out, code, timeout)


def _parameters(notebook) -> set[str]:
    """The names that the one cell tagged parameters assigns: papermill ignores a misspelt one and exits 0."""
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    try:
        nodes = ast.walk(ast.parse(cells[0].source)) if len(cells) == 1 else ()
    except SyntaxError:
        nodes = ()
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


class _Watch:
    """Says which cell of a lesson has been running for long: papermill writes the notebook when a cell begins.

    Called now and then; a cell is told once, and again whenever the time it has run has doubled.
    """

    def __init__(self, target: Path):
        self._target, self._cell, self._since, self._next = target, None, 0.0, LONG_SECONDS

    def __call__(self) -> None:
        try:
            cell = running(json.loads(self._target.read_text(encoding="utf-8"))["cells"])
        except (OSError, ValueError, LookupError):  # not there yet, or half written
            return
        now = time.monotonic()
        if cell is None:
            return
        if cell["id"] != self._cell:
            self._cell, self._since, self._next = cell["id"], now, LONG_SECONDS
        elif now - self._since >= self._next:
            self._next = 2 * (now - self._since)
            _say(f"        for {now - self._since:.0f} s now in: {first_line(cell)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
