"""Execute one lesson in a process of its own, and judge it by the files that it wrote.

An environment variable marks the process and, by inheritance, all processes that it starts. They can therefore all be
found and ended, even those that outlive a killed kernel. The lesson's temporary files are deleted with them.

papermill's exit code is not enough: after a killed kernel, cells that never ran are marked as completed, and an error
in a widget's callback is not reported. Each executed notebook is therefore read, and a lesson is ok only if every cell
ran, nothing raised, and the lesson wrote complete results of its own.

Run as a module, this file is papermill's command line with two changes to Jupyter: see `polling` and `forking`.
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

PARAMETERS = {"profile", "strict", "out"}  # the variables that papermill sets in a lesson
LONG_SECONDS = 60  # a cell that runs this long is reported
WATCH_SECONDS = 10  # interval between checks for such a cell
STOP_SECONDS = 0.5  # a lesson ends within this time after the course was interrupted
MARKER = "PERF_HELPERS_COURSE"  # environment variable with a unique value for each executed lesson
POLL_SECONDS = 1.0  # longest delay before a reply of the kernel is read
WIDGETS = "application/vnd.jupyter.widget-state+json"

Cell = dict[str, Any]  # as in nbformat


class Judgement(NamedTuple):
    """The outcome of an executed lesson: its status, a message, and the JSON that the lesson wrote."""

    status: str  # "ok", "failed", "crashed" or "timed out"
    message: str  # what went wrong and in which cell; empty if the lesson is ok
    record: dict[str, Any]  # the JSON that the lesson wrote, even if it failed afterwards; {} if it cannot be used


def run_lesson(
    source: Path,
    out: Path,
    profile: str,
    strict: bool,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    stopped: threading.Event | None = None,
) -> Judgement:
    """Execute the lesson at `source` into the folder `out`; return its status, a message, and the JSON that it wrote.

    Args:
        profile: name of the sizes of models and batches, or "auto", as in `run_course`.
        strict: whether the lesson fails if the verdict on a claim is not one that claims.toml (the ledger) expects.
        timeout: seconds after which the lesson is killed.
        environment: environment variables in addition to those of this process.
        stopped: an event that, once set, kills the lesson as its timeout would.
    """
    import nbformat

    for suffix in (".ipynb", ".json", ".html"):
        (out / f"{source.stem}{suffix}").unlink(missing_ok=True)
    try:
        # papermill ignores a parameter that the notebook does not assign, and exits 0.
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
    """Return a short digest of a lesson's code, or None if the file is not a notebook.

    If the digests of two course runs differ, the lesson's code has changed; the lesson's values may not be comparable.
    """
    try:
        cells = json.loads(source.read_text(encoding="utf-8"))["cells"]
        code = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, LookupError):
        return None
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:12]


def judge(name: str, folder: Path, code: int | None, timeout: float = 0) -> Judgement:
    """Judge an executed lesson by the files in its folder: <name>.ipynb, <name>.json and <name>.log.

    Args:
        code: papermill's exit code; None if it was killed.
        timeout: the time limit, in seconds, after which papermill was killed; only the message uses it.
    """
    record, trouble = _record(name, folder / f"{name}.json")
    try:
        notebook = json.loads((folder / f"{name}.ipynb").read_text(encoding="utf-8"))
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
    except (OSError, ValueError, LookupError):  # missing, or cut off
        notebook, cells = None, []
    if code is None:
        place = _first_line(cell) if (cell := _running(cells)) else "no cell"
        return Judgement("timed out", f"killed after {timeout:g} s in: {place}", record)
    if notebook is None:
        return Judgement("crashed", f"no executed notebook (exit code {code}); {_last_line(folder, name)}", record)
    for cell in cells:
        if errors := _errors(cell["outputs"]):
            trace = "\n".join(line for output in cell["outputs"] for line in output.get("traceback", ()))
            line = re.search(r"Cell In\[\d+\](, line \d+)", re.sub(r"\x1b\[[0-9;]*m", "", trace))
            place = f"In [{cell['execution_count']}]" + (line[1] if line else "")
            return Judgement("failed", f"{place}: {errors[0]}", record)
    never = [_first_line(cell) for cell in cells if cell["execution_count"] is None]
    if code or never:
        message = f"the kernel died (exit code {code}), {len(never)} of {len(cells)} cells never ran"
        message += f", the first: {never[0]}" if never else f"; {_last_line(folder, name)}"
        return Judgement("crashed", message, record)
    if errors := widget_errors(notebook):
        trouble = f"in a widget: {errors[0]}"
    return Judgement("failed" if trouble else "ok", trouble, record)


def widget_errors(notebook: dict[str, Any]) -> list[str]:
    """Return the errors that callbacks of widgets raised, from the widget state in an executed notebook."""
    widgets = notebook["metadata"].get("widgets", {}).get(WIDGETS, {}).get("state", {}).values()
    return [error for widget in widgets for error in _errors(widget.get("state", {}).get("outputs", ()))]


def _parameters(notebook) -> set[str]:
    """Return the names that the notebook's only cell tagged "parameters" assigns; empty if there is not exactly one."""
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    try:
        nodes = ast.walk(ast.parse(cells[0].source)) if len(cells) == 1 else ()
    except SyntaxError:
        nodes = ()
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


class _Watch:
    """Print a line when a cell has run for `LONG_SECONDS`, and again each time its running time has doubled."""

    def __init__(self, target: Path):
        self._target, self._cell, self._since, self._next = target, None, 0.0, LONG_SECONDS

    def __call__(self) -> None:
        try:  # papermill writes the notebook each time a cell begins
            cell = _running(json.loads(self._target.read_text(encoding="utf-8"))["cells"])
        except (OSError, ValueError, LookupError):  # missing, or partly written
            return
        now = time.monotonic()
        if cell and cell["id"] != self._cell:
            self._cell, self._since, self._next = cell["id"], now, LONG_SECONDS
        elif cell and now - self._since >= self._next:
            self._next = 2 * (now - self._since)
            notify(f"        running for {now - self._since:.0f} s in this cell: {_first_line(cell)}")


def notify(text: str) -> None:
    """Print a line about the progress of the course on standard error."""
    print(text, file=sys.stderr, flush=True)


def _execute(
    command: list[str],
    log: Path,
    timeout: float,
    watch: Callable[[], None],
    environment: Mapping[str, str],
    stopped: threading.Event,
) -> int | None:
    """Run papermill for at most `timeout` seconds, then end all its processes; return its exit code, None if killed.

    `command`: papermill's arguments; `environment`: variables besides this process's; `stopped`: once set, end the run.
    """
    marker = f"{os.getpid()}-{secrets.token_hex(8)}"
    code = None
    with log.open("wb") as stream, tempfile.TemporaryDirectory("-lesson", ignore_cleanup_errors=True) as folder:
        # Use the kernel of this environment, and matplotlib's notebook backend whatever the shell sets.
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
                    os.killpg(process.pid, signal.SIGKILL)  # also ends a kernel that the course's server has forked
            _end(marker, grace_seconds=0 if code is None else 3)
            process.wait()
    return code


def _end(marker: str, grace_seconds: float) -> None:
    """Wait `grace_seconds`, then kill each process, whatever its parent, that has `marker` in its environment."""
    import psutil

    def marked(process: psutil.Process) -> bool:
        with suppress(psutil.Error, OSError):
            return process.environ().get(MARKER) == marker
        return False

    for _ in range(5):  # a process that was forked during one round is found in the next
        if not (processes := [process for process in psutil.process_iter() if marked(process)]):
            return
        _, alive = psutil.wait_procs(processes, timeout=grace_seconds)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=2)
        grace_seconds = 0


def _record(name: str, path: Path) -> tuple[dict[str, Any], str]:
    """Return (the JSON of lesson `name` in `path`, {} if unusable; a text on what is wrong with the JSON, or "")."""
    try:
        # A NaN stays the text "NaN": it is a diverged loss, not an unknown value.
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=str)
        complete, lesson, runs = record["complete"], record["lesson"], record["runs"]
        rows = [{field: claim[field] for field in NEEDED["claims"]} for claim in record["claims"]]
        decided = [row["id"] for row in rows if row["verdict"] != Verdict.NOT_TESTABLE]
    except FileNotFoundError:
        return {}, f"it wrote no {path.name}: its last cell is claims.finish()"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return {}, f"{path.name} is damaged ({type(error).__name__}: {error})"
    if not complete or lesson != name or not isinstance(runs, list):
        return {}, f"{path.name} is {f'that of {lesson}' if complete else 'not complete'}: in the lesson, Lab({name!r})"
    rehearsed = record.get("machine", {}).get("rehearsed")  # decides memory only; some lessons have no such claim
    return record, "" if decided or rehearsed else "it decided no claim"


def _running(cells: list[Cell]) -> Cell | None:
    """Return the cell that papermill marked as running when it last wrote the notebook; None if there is none."""
    return next((cell for cell in cells if cell["metadata"].get("papermill", {}).get("status") == "running"), None)


def _first_line(cell: Cell) -> str:
    return "".join(cell["source"]).strip().splitlines()[0]


def _last_line(folder: Path, name: str) -> str:
    log = folder / f"{name}.log"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return f"{log.name}: {lines[-1].strip() if lines else 'empty'}"


def _errors(outputs: list[dict]) -> list[str]:
    return [f"{o.get('ename')}: {o.get('evalue')}" for o in outputs if o.get("output_type") == "error"]


def polling(get_msg: Callable) -> Callable:
    """Wrap `get_msg` of Jupyter's channels so that it reads its socket every `POLL_SECONDS`.

    ZeroMQ notifies an event loop of a message only once, and sending on the same socket can consume the notification
    (https://github.com/jupyter/nbclient/issues/312). nbclient sends whenever an Output widget shows something, and then
    sometimes waits forever for a reply that is already in the socket: on a busy machine in two of eighty toy lessons.
    """

    async def ask(channel, timeout: float | None = None, *args, **options) -> dict[str, Any]:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while (left := end - time.monotonic()) > POLL_SECONDS:
            with suppress(Empty):
                return await get_msg(channel, POLL_SECONDS, *args, **options)
        return await get_msg(channel, max(0.0, left), *args, **options)

    return ask


def forking(launch_kernel: Callable) -> Callable:
    """Wrap `launch_kernel` of Jupyter's local provisioner so that it forks the kernel from a server.

    This server (`course_server`) has imported torch, matplotlib and other libraries already; a new kernel needs about
    eight seconds for these imports. Without a server, the kernel is launched as usual.
    """

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

    AsyncZMQSocketChannel.get_msg = polling(AsyncZMQSocketChannel.get_msg)
    local_provisioner.launch_kernel = forking(local_provisioner.launch_kernel)
    papermill(prog_name="papermill")
