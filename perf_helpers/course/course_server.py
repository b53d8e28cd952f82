"""The server of a course run: it imports the libraries once, and the processes of lessons are forked from it.

The course process starts the server (`shared`): a fork server (`server_process`) that the course's processes reach by a
socket. The server forks the lessons' experiments and, on Linux, each lesson's papermill process and kernel
(`python_module`).
"""

import atexit
import contextlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import connection

from trainmem.measure import forked, forkserver, server_process

# ---- these run in the course process, and in the papermill process of a lesson


@contextlib.contextmanager
def shared(preload: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Start a server that imports the libraries once for all processes of a course run; end it with the context.

    Args:
        preload: modules that the server imports in addition to `forkserver.PRELOAD`.
        environment: environment variables that affect these imports.

    Yields:
        The environment variable, as {name: value}, by which a process finds the server.
    """
    server = forkserver.RunningServer([*forkserver.PRELOAD, *preload, __name__], environment=environment)
    try:
        yield {forked.COURSE_SERVER: server.address}
    finally:
        server.end()


def python_module(
    name: str, arguments: list[str], environment: Mapping[str, str], output: int, folder: str
) -> "subprocess.Popen | ForkedModule":
    """Start `python -m name` in its own process group: as a fork of the course's server or as a new Python process.

    It is a fork if this is Linux and a server answers at the address in `environment` (see `shared`). A fork has the
    libraries imported already, and ends with the caller's process.

    Args:
        name, arguments, folder: the module, its command-line arguments and its working directory.
        environment: all environment variables of the started process.
        output: descriptor of the file for standard output and standard error.
    """
    # Linux only: on other systems system libraries may not work after a fork.
    if sys.platform == "linux" and (address := forkserver.course_address(environment)):
        request = server_process.Request(_run_module, (name, arguments, dict(environment), folder))
        with contextlib.suppress(OSError, EOFError):
            return ForkedModule(*forkserver.requested(address, request, [output, output]))
    options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-m", name, *arguments], env=dict(environment), cwd=folder, **options)


class ForkedModule:
    """Control a Python module that runs as a program in a fork of the course's server, like a `subprocess.Popen`.

    Only the methods that the course uses exist. The process that called `python_module` has this object. `control`: the
    connection from this process to the server, see `server_process.serve`; `pid`: the fork's process id.
    """

    stdin = stdout = stderr = None

    def __init__(self, control: connection.Connection, pid: int):
        self._control, self.pid = control, pid
        self._descriptor = os.pidfd_open(pid)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code of the module; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the module and return its exit code.

        Raises:
            subprocess.TimeoutExpired: the module has not ended within `timeout` seconds.
        """
        if self.returncode is None:
            if not connection.wait([self._descriptor], timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode = forkserver.exit_code(self._control)
            if self.returncode is None:  # the server was killed
                self.returncode = -signal.SIGKILL
            os.close(self._descriptor)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


# ---- this runs in the module's process


def _run_module(name: str, arguments: list[str], environment: dict[str, str], folder: str) -> int:
    """Run `python -m name` with these arguments and only these environment variables; return the exit code.

    `folder`: working directory, also on the import path.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, tempfile.tempdir = [name, *arguments], None
    sys.path.insert(0, folder)
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        atexit._run_exitfuncs()
