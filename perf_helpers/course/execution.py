"""A lesson executed in a process of its own, of which nothing is left when it has ended.

Notable: the process is marked in its environment, and what it starts inherits the mark. So all of it can be found and
ended, also what outlived a killed kernel.
"""

import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WATCH_SECONDS = 10  # how often `watch` is called
MARKER = "PERF_HELPERS_COURSE"  # environment variable, with a value of its own for each executed lesson


def execute(command: list[str], log: Path, timeout: float, watch: Callable[[], None] = lambda: None) -> int | None:
    """Run a command to its end; nothing that it started survives it.

    Args:
        command: the words of the command.
        log: the file for what it prints.
        timeout: in seconds.
        watch: called every few seconds meanwhile.

    Returns:
        The exit code, None if it was killed after `timeout` seconds.
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
def _interruptible() -> Iterator[None]:
    """A SIGTERM (a cancelled CI job) interrupts as Ctrl-C does, so that the lesson under way is ended, not orphaned."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


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
