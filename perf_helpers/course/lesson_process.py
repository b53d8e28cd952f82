"""One lesson, executed in a process of its own and judged by what it left.

Notable: the process is marked in its environment, and what it starts inherits the mark. So all of it can be found and
ended, also what outlived a killed kernel; its temporary files go with it. papermill's word is not trusted: a killed
kernel leaves cells that never ran marked as completed, and an error in a widget's callback leaves the notebook green.
So each executed notebook is read again, and a lesson is ok only if every cell ran, nothing raised, and its results are
there, complete and its own. As a module this is papermill's command, with a client that hears of each reply (`asking`).
"""

import ast
import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

from perf_helpers.course import course_server
from perf_helpers.course.ledger import Verdict
from perf_helpers.course.results import NEEDED
from trainmem.measure.forked import COURSE_SERVER

PARAMETERS = {"profile", "strict", "out"}  # what papermill sets in a lesson
LONG_SECONDS = 60  # a cell that runs so long is told
WATCH_SECONDS = 10  # how often it is looked for
STOP_SECONDS = 0.5  # how soon a lesson hears that the course was interrupted
MARKER = "PERF_HELPERS_COURSE"  # environment variable, with a value of its own for each executed lesson
ASK_SECONDS = 1.0  # how long a reply of the kernel may lie in the socket unheard of
WIDGETS = "application/vnd.jupyter.widget-state+json"

Cell = dict[str, Any]  # as nbformat has it


class Judgement(NamedTuple):
    """What became of a lesson."""

    status: str  # "ok", "failed", "crashed" or "timed out"
    message: str  # what went wrong, and where; empty if it is ok
    record: dict[str, Any]  # the lesson's own JSON if it is complete and its own, also where it then failed; else {}


def run_lesson(
    source: Path,
    out: Path,
    profile: str,
    strict: bool,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    stopped: threading.Event | None = None,
) -> Judgement:
    """Execute the lesson at `source` into the folder `out` and judge it.

    Args:
        timeout: seconds after which the lesson is ended.
        environment: variables that it gets beside those of this process.
        stopped: ends the lesson, as its timeout would, once it is set.
    """
    import nbformat

    for suffix in (".ipynb", ".json", ".html"):
        (out / f"{source.stem}{suffix}").unlink(missing_ok=True)
    try:
        missing = PARAMETERS - _parameters(nbformat.read(source, as_version=4))
    except Exception as error:  # nbformat raises its own, json's and attribute errors for a file that is no notebook
        return Judgement("failed", f"{source} is not a notebook: {error}", {})
    if missing := ", ".join(sorted(missing)):
        return Judgement("failed", f"no cell tagged parameters sets {missing}: it would run with its own", {})
    target = out / source.name
    command = [source, target, "--cwd", source.parent, "--no-progress-bar"]
    command += ["--kernel", "python3", "--language", "python", "--start-timeout", 120]
    command += ["--execution-timeout", int(min(timeout, 1e6)) + 60]  # a limit even if this process is gone
    command += ["-r", "profile", profile, "-p", "strict", strict, "-r", "out", out]
    own = environment or {}, stopped or threading.Event()
    code = _execute([str(part) for part in command], target.with_suffix(".log"), timeout, _Watch(target), *own)
    return judge(source.stem, out, code, timeout)


def code_of(source: Path) -> str | None:
    """A short digest of a lesson's code: where it is another one, its functions measure something else. None for what
    is no notebook."""
    try:
        cells = json.loads(source.read_text(encoding="utf-8"))["cells"]
        code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, LookupError):
        return None
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:12]


def judge(name: str, folder: Path, code: int | None, timeout: float = 0) -> Judgement:
    """Judge an executed lesson by what it left in its folder: <name>.ipynb, <name>.json and <name>.log.

    `code` is papermill's exit code; None if it was killed after `timeout` seconds.
    """
    record, trouble = _record(name, folder / f"{name}.json")
    try:
        notebook = json.loads((folder / f"{name}.ipynb").read_text(encoding="utf-8"))
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
    except (OSError, ValueError, LookupError):  # not there, or cut off
        notebook, cells = None, []
    if code is None:
        where = _first_line(cell) if (cell := _running(cells)) else "no cell"
        return Judgement("timed out", f"killed after {timeout:g} s in: {where}", record)
    if notebook is None:
        return Judgement("crashed", f"no executed notebook (exit code {code}); {_last_line(folder, name)}", record)
    for cell in cells:
        if errors := _errors(cell["outputs"]):
            trace = "\n".join(line for output in cell["outputs"] for line in output.get("traceback", ()))
            line = re.search(r"Cell In\[\d+\](, line \d+)", re.sub(r"\x1b\[[0-9;]*m", "", trace))
            where = f"In [{cell['execution_count']}]" + (line[1] if line else "")
            return Judgement("failed", f"{where}: {errors[0]}", record)
    never = [_first_line(cell) for cell in cells if cell["execution_count"] is None]
    if code or never:
        what = f"the kernel died (exit code {code}), {len(never)} of {len(cells)} cells never ran"
        what += f", the first: {never[0]}" if never else f"; {_last_line(folder, name)}"
        return Judgement("crashed", what, record)
    if errors := widget_errors(notebook):
        trouble = f"in a widget: {errors[0]}"
    return Judgement("failed" if trouble else "ok", trouble, record)


def widget_errors(notebook: dict[str, Any]) -> list[str]:
    """What the callbacks of an executed notebook's widgets raised, from the state that is kept in it."""
    widgets = notebook["metadata"].get("widgets", {}).get(WIDGETS, {}).get("state", {}).values()
    return [error for widget in widgets for error in _errors(widget.get("state", {}).get("outputs", ()))]


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
            cell = _running(json.loads(self._target.read_text(encoding="utf-8"))["cells"])
        except (OSError, ValueError, LookupError):  # not there yet, or half written
            return
        now = time.monotonic()
        if cell and cell["id"] != self._cell:
            self._cell, self._since, self._next = cell["id"], now, LONG_SECONDS
        elif cell and now - self._since >= self._next:
            self._next = 2 * (now - self._since)
            say(f"        running for {now - self._since:.0f} s in this cell: {_first_line(cell)}")


def say(text: str) -> None:
    """Tell how far the course is."""
    print(text, file=sys.stderr, flush=True)


def _execute(
    command: list[str],
    log: Path,
    timeout: float,
    watch: Callable[[], None],
    environment: Mapping[str, str],
    stopped: threading.Event,
) -> int | None:
    """Run papermill for at most `timeout` seconds, what it prints goes into `log`; nothing that it started survives it.

    `watch` is called every few seconds meanwhile. Returns the exit code, None if it was killed.
    """
    marker = f"{os.getpid()}-{secrets.token_hex(8)}"
    code = None
    with log.open("wb") as stream, tempfile.TemporaryDirectory("-lesson", ignore_cleanup_errors=True) as folder:
        # The kernel is this environment's own, and shows pictures whatever backend the shell is set to.
        own = {MARKER: marker, "TMPDIR": folder, "JUPYTER_PREFER_ENV_PATH": "1", "MPLBACKEND": ""}
        own = {**os.environ, **environment, **own}
        process = course_server.python_module(__name__, command, own, stream.fileno(), os.getcwd())
        try:
            end, next_look = time.monotonic() + timeout, time.monotonic() + WATCH_SECONDS
            while code is None and not stopped.is_set() and (left := end - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(min(left, STOP_SECONDS))
                if time.monotonic() >= next_look:
                    watch()
                    next_look += WATCH_SECONDS
        finally:
            if code is None:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)  # which ends a kernel that the course's server has forked
            _end(marker, grace_seconds=0 if code is None else 3)
            process.wait()
    return code


def _end(marker: str, grace_seconds: float) -> None:
    """Kill every process that carries the marker, whoever its parent is now; first let it end by itself."""
    import psutil

    def marked(process: psutil.Process) -> bool:
        with suppress(psutil.Error, OSError):
            return process.environ().get(MARKER) == marker
        return False

    for _ in range(5):  # one that was forked meanwhile is found in the next round
        if not (processes := [process for process in psutil.process_iter() if marked(process)]):
            return
        _, alive = psutil.wait_procs(processes, timeout=grace_seconds)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=2)
        grace_seconds = 0


def _record(name: str, path: Path) -> tuple[dict[str, Any], str]:
    """The lesson's own JSON, and why it cannot be used ({} then) or decides nothing; "" where all is well."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=str)  # "NaN": a diverged loss, not unknown
        complete, lesson, runs = record["complete"], record["lesson"], record["runs"]
        rows = [{field: claim[field] for field in NEEDED["claims"]} for claim in record["claims"]]
        decided = [row["id"] for row in rows if row["verdict"] != Verdict.NOT_TESTABLE]
    except FileNotFoundError:
        return {}, f"it wrote no {path.name}: its last cell is claims.finish()"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return {}, f"{path.name} is damaged ({type(error).__name__}: {error})"
    if not complete or lesson != name or not isinstance(runs, list):
        return {}, f"{path.name} is {f'that of {lesson}' if complete else 'not complete'}: in the lesson, Lab({name!r})"
    rehearsed = record.get("machine", {}).get("rehearsed")  # by memory alone, and some lessons have no such claim
    return record, "" if decided or rehearsed else "it decided no claim"


def _running(cells: list[Cell]) -> Cell | None:
    """The cell that was running when papermill last wrote the notebook; it does when a cell begins."""
    return next((cell for cell in cells if cell["metadata"].get("papermill", {}).get("status") == "running"), None)


def _first_line(cell: Cell) -> str:
    return "".join(cell["source"]).strip().splitlines()[0]


def _last_line(folder: Path, name: str) -> str:
    log = folder / f"{name}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return f"{log.name}: {lines[-1].strip() if lines else 'empty'}"


def _errors(outputs: list[dict]) -> list[str]:
    return [f"{o.get('ename')}: {o.get('evalue')}" for o in outputs if o.get("output_type") == "error"]


def asking(get_msg: Callable) -> Callable:
    """The `get_msg` of Jupyter's channels, made to look into its socket every second, whatever it has been told of.

    ZeroMQ tells an event loop of a message once, and whoever sends on the same socket takes that news along
    (https://github.com/jupyter/nbclient/issues/312). nbclient sends whenever an Output widget shows something, and then
    waits, now and then, for ever: for a reply that lies in the socket. On a busy machine two of eighty toy lessons with
    such a widget hung so.
    """

    async def ask(channel, timeout: float | None = None, *args, **options) -> dict[str, Any]:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while (left := end - time.monotonic()) > ASK_SECONDS:
            with suppress(Empty):
                return await get_msg(channel, ASK_SECONDS, *args, **options)
        return await get_msg(channel, max(0.0, left), *args, **options)

    return ask


def forking(launch_kernel: Callable) -> Callable:
    """The `launch_kernel` of Jupyter's local provisioner, made to fork the kernel from the course's server, if there is
    one: it has imported torch, matplotlib and the rest, which a kernel of its own does for some eight seconds."""

    def launch(cmd: list[str], *args, env: Mapping[str, str] | None = None, cwd: str | None = None, **options) -> Any:
        if not env or COURSE_SERVER not in env or "-m" not in cmd:
            return launch_kernel(cmd, *args, env=env, cwd=cwd, **options)
        name, *arguments = cmd[cmd.index("-m") + 1 :]
        return course_server.python_module(name, arguments, env, sys.stdout.fileno(), cwd or os.getcwd())

    return launch


if __name__ == "__main__":
    from jupyter_client.channels import AsyncZMQSocketChannel
    from jupyter_client.provisioning import local_provisioner
    from papermill.cli import papermill

    AsyncZMQSocketChannel.get_msg = asking(AsyncZMQSocketChannel.get_msg)
    local_provisioner.launch_kernel = forking(local_provisioner.launch_kernel)
    papermill(prog_name="papermill")
