"""The course as a test: every lesson executed, every claim's verdict in one place.

Notable: a lesson runs in a process of its own, marked in its environment, so that whatever it started can be found and
ended, also what outlived a killed kernel. papermill's word is not trusted: a killed kernel leaves cells that never ran
marked as completed, and an error in a widget's callback leaves the notebook green. So each executed notebook is read
again, and a lesson is ok only if every cell ran, nothing raised, and its results are there, complete and its own.
"""

import ast
import difflib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from perf_helpers.course import claims
from perf_helpers.course.results import SCHEMA, UNDECIDED, VERDICTS, Changes, compare, load_results, problems, report
from perf_helpers.lab import hardware
from perf_helpers.lab.store import write_whole
from perf_helpers.lab.task import choose_profile

__all__ = ["CourseResult", "compare", "find_lessons", "load_results", "report", "run_course"]

LESSONS = "[0-9][0-9]_*.ipynb"
PARAMETERS = {"profile", "strict", "out"}
LONG_SECONDS, WATCH_SECONDS = 60, 10  # a cell that runs so long is told; how often it is looked for
MARKER = "PERF_HELPERS_COURSE"  # environment variable, with a value of its own for each executed lesson
WIDGETS = "application/vnd.jupyter.widget-state+json"


@dataclass(frozen=True, slots=True)
class CourseResult:
    """What a course run yielded: `data` is the content of results.json, `changes` the comparison with a baseline."""

    out: Path
    data: dict
    changes: Changes | None = None

    @property
    def problems(self) -> list[str]:
        """What keeps the run from being ok, one line each."""
        return problems(self.data)

    @property
    def ok(self) -> bool:
        """Every lesson ran, every verdict is an expected one, and at least one claim was decided."""
        return not self.problems


def run_course(
    lessons=None,
    profile="auto",
    strict=False,
    out="build/course",
    baseline=None,
    timeout_per_lesson=900,
    notebooks_dir=None,
) -> CourseResult:
    """Execute lessons one after the other and write the report into `out`; go on after one that fails or hangs.

    `lessons` are numbers ("05"), names or paths; None is all of them. `baseline` is an older run (results.json or its
    folder) to compare with; `timeout_per_lesson` is in seconds, many times what a lesson takes. ValueError for a
    lesson or a profile that does not exist, for a damaged baseline, and if `out` is the folder of the lessons.
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
        decided = [_claim(source.stem, decision) for decision in record.get("claims", [])]
        data["lessons"].append({"name": source.stem, "status": status, "seconds": seconds, "message": message})
        data["claims"] += decided
        data["runs"] += [{"lesson": source.stem, **run} for run in record.get("runs", [])]
        count = Counter(claim["verdict"] for claim in decided)
        verdicts = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict]) or "no verdict"
        _say(f"        {status} in {seconds:.0f} s: {verdicts}" + f"\n        {message}" * bool(message))
    changes = compare(old, data) if old else None
    data["baseline"] = changes.to_dict() if changes else None
    write_whole(out / "results.json", json.dumps(data, indent=1, ensure_ascii=False))
    report(out)
    return CourseResult(out, data, changes)


def find_lessons(lessons=None, notebooks_dir=None) -> list[Path]:
    """Return the notebooks of the lessons named by number, name or path, in order; ValueError names the nearest."""
    here = Path(notebooks_dir or Path(__file__).resolve().parents[2] / "notebooks")
    known = {path.stem: path.resolve() for path in sorted(here.glob(LESSONS))}
    if not known and not lessons:
        raise ValueError(f"no lessons (NN_name.ipynb) in {here}: run `make lessons`, or name the folder that has them")
    found = {}
    for lesson in [lessons] if isinstance(lessons, str | Path) else lessons or known:
        path = Path(lesson)
        if path.suffix == ".ipynb" and path.is_file():
            found[path.stem] = path.resolve()
            continue
        number = f"{int(path.name):02}_" if path.name.isdecimal() else "?"
        match = [name for name in known if name.startswith(number) or path.name in (name, name.partition("_")[2])]
        found |= {name: known[name] for name in match}
        if not match:
            near = difflib.get_close_matches(path.stem, [*known, *(n.partition("_")[2] for n in known)], 1, 0.4)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
            raise ValueError(f"no lesson {str(lesson)!r} in {here}: {hint}")
    return [found[name] for name in sorted(found)]


def _run_lesson(source, out, profile, strict, timeout):
    """Execute one lesson and judge it: (status, message, what the lesson wrote or {})."""
    import nbformat

    target, record, log = (out / f"{source.stem}{suffix}" for suffix in (".ipynb", ".json", ".log"))
    for stale in (target, record, out / f"{source.stem}.html"):
        stale.unlink(missing_ok=True)
    try:
        missing = PARAMETERS - _parameters(nbformat.read(source, as_version=4))
    except Exception as error:  # nbformat raises its own, json's and attribute errors for a file that is no notebook
        return "failed", f"{source} is not a notebook: {error}", {}
    if missing:
        return "failed", f"no cell tagged parameters sets {', '.join(sorted(missing))}: it would run with its own", {}
    command = [sys.executable, "-m", "papermill", source, target, "--cwd", source.parent, "--no-progress-bar"]
    command += ["--kernel", "python3", "--language", "python", "--start-timeout", 120]
    command += ["--execution-timeout", int(timeout) + 60]  # a limit even if this process is gone
    command += ["-r", "profile", profile, "-p", "strict", strict, "-r", "out", out]
    code = _execute([str(part) for part in command], log, timeout, _Watch(target))
    return judge(source.stem, code, target, record, log, timeout)


def _parameters(notebook):
    """Return the names that the one cell tagged parameters assigns: papermill ignores a misspelt one and exits 0."""
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

    def __init__(self, target):
        self._target, self._cell, self._since, self._next = target, None, 0.0, LONG_SECONDS

    def __call__(self) -> None:
        cell, now = self._running(), time.monotonic()
        if cell is None:
            return
        if cell["id"] != self._cell:
            self._cell, self._since, self._next = cell["id"], now, LONG_SECONDS
        elif now - self._since >= self._next:
            self._next = 2 * (now - self._since)
            _say(f"        for {now - self._since:.0f} s now in: {_first_line(cell)}")

    def _running(self):
        try:
            cells = json.loads(self._target.read_text(encoding="utf-8"))["cells"]
        except (OSError, ValueError, LookupError):  # not there yet, or half written
            return None
        running = (cell for cell in cells if cell["metadata"].get("papermill", {}).get("status") == "running")
        return next(running, None)


def _execute(command, log, timeout, watch=lambda: None):
    """Return the exit code, None after `timeout` seconds; nothing that the command started survives it.

    `watch` is called every few seconds meanwhile.
    """
    marker = f"{os.getpid()}-{secrets.token_hex(8)}"
    # The kernel is this environment's own, and shows pictures whatever backend the shell is set to.
    environment = {**os.environ, MARKER: marker, "JUPYTER_PREFER_ENV_PATH": "1", "MPLBACKEND": ""}
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
    code = None
    with log.open("wb") as stream, _interruptible():
        process = subprocess.Popen(command, stdout=stream, env=environment, **options)
        try:
            end = time.monotonic() + timeout
            while code is None and (left := end - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(left, WATCH_SECONDS))
                watch()
        finally:
            _end(marker, grace_seconds=0 if code is None else 3)
            process.wait()
    return code


@contextmanager
def _interruptible():
    """A SIGTERM (a cancelled CI job) interrupts as Ctrl-C does, so that the lesson under way is ended, not orphaned."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


def _end(marker, grace_seconds):
    """Kill every process that carries the marker, whoever its parent is now; first let it end by itself."""
    import psutil

    def marked(process):
        with suppress(psutil.Error, OSError):
            return process.environ().get(MARKER) == marker

    for _ in range(5):  # one that was forked meanwhile is found in the next round
        if not (found := [process for process in psutil.process_iter() if marked(process)]):
            return
        _, alive = psutil.wait_procs(found, timeout=grace_seconds)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=2)
        grace_seconds = 0


def judge(name, code, notebook_path, record_path, log_path, timeout=0):
    """Return (status, message, record) of an executed lesson: the checks that papermill does not make.

    `code` is papermill's exit code, None if it was killed after `timeout` seconds. The record is the lesson's own JSON
    if it is complete and the lesson's, also where the lesson failed afterwards (strict); else {}.
    """
    record, trouble = _record(name, record_path)
    try:
        notebook = json.loads(notebook_path.read_text(encoding="utf-8"))
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
    except (OSError, ValueError, LookupError):
        notebook, cells = None, []
    if code is None:
        running = [c for c in cells if c["metadata"].get("papermill", {}).get("status") == "running"]
        return (
            "timed out",
            f"killed after {timeout:g} s in: {_first_line(running[0]) if running else 'no cell'}",
            record,
        )
    if notebook is None:
        return "crashed", f"no executed notebook (exit code {code}); {_last_line(log_path)}", record
    for cell in cells:
        if errors := _errors(cell["outputs"]):
            where = f"In [{cell['execution_count']}]{_line(cell['outputs'])}"
            return "failed", f"{where}: {errors[0]}", record
    if code or any(cell["execution_count"] is None for cell in cells):
        never = [_first_line(cell) for cell in cells if cell["execution_count"] is None]
        what = f"the kernel died (exit code {code}), {len(never)} of {len(cells)} cells never ran"
        return "crashed", f"{what}, the first: {never[0]}" if never else f"{what}; {_last_line(log_path)}", record
    if errors := widget_errors(notebook):
        return "failed", f"in a widget: {errors[0]}", record
    return ("failed", trouble, record) if trouble else ("ok", "", record)


def widget_errors(notebook) -> list[str]:
    """What the callbacks of an executed notebook's widgets raised, from the state that is kept in it."""
    widgets = notebook["metadata"].get("widgets", {}).get(WIDGETS, {}).get("state", {}).values()
    return [error for widget in widgets for error in _errors(widget.get("state", {}).get("outputs", ()))]


def _record(name, path):
    """Return (the lesson's own JSON, ""); where it cannot be used or decides nothing, the second says so."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=str)  # "NaN": a diverged loss, not unknown
        complete, lesson, runs = record["complete"], record["lesson"], record["runs"]
        decided = [claim["id"] for claim in record["claims"] if claim["verdict"] != UNDECIDED]
    except FileNotFoundError:
        return {}, f"it wrote no {path.name}: its last cell is claims.finish(lab)"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return {}, f"{path.name} is damaged ({type(error).__name__}: {error})"
    if not complete or lesson != name or not isinstance(runs, list):
        return {}, f"{path.name} is {f'that of {lesson}' if complete else 'not complete'}: in the lesson, Lab({name!r})"
    # A rehearsal decides by memory alone, and some lessons have no such claim.
    excused = name[:2] in claims.LESSONS_WITHOUT_CLAIMS or record.get("machine", {}).get("rehearsed")
    return record, "" if decided or excused else "it decided no claim"


def _claim(lesson, decision):
    fields = ("id", "says", "quantity", "verdict", "expected", "as_expected", "value", "interval", "threshold", "note")
    fields += ("rehearsed",)  # by a machine that computes nothing, see Machine.rehearsed
    claim = {"lesson": lesson, **{field: decision.get(field) for field in fields}}
    reason = decision.get("missing") or decision.get("reason") or ""
    return claim | {"reference": decision.get("guide"), "reason": reason}


def _errors(outputs):
    return [f"{o.get('ename')}: {o.get('evalue')}" for o in outputs if o.get("output_type") == "error"]


def _line(outputs):
    """ ", line 3" where a traceback names the line of the cell."""
    traces = ("\n".join(output.get("traceback", ())) for output in outputs if output.get("output_type") == "error")
    found = re.search(r"Cell In\[\d+\], line (\d+)", re.sub(r"\x1b\[[0-9;]*m", "", next(traces, "")))
    return f", line {found[1]}" if found else ""


def _first_line(cell):
    return "".join(cell["source"]).strip().splitlines()[0]


def _last_line(log):
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return f"{log.name}: {lines[-1].strip() if lines else 'empty'}"


def _say(text):
    print(text, file=sys.stderr, flush=True)
