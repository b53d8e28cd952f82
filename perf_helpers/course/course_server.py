"""The server of a course run: it imports the libraries once, and the processes of lessons are forked from it.

The course process starts the server (`shared`). For each process that connects to it to run experiments, the server
forks a fork server (module `forkserver`), which forks the experiments of that process. On Linux, papermill and the
kernel of a lesson are forked too (`python_module`): the server forks a process called keeper for each of them. The
keeper forks papermill or the kernel, waits until this fork ends, and sends the fork's exit code to its requester.
"""

import atexit
import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import connection, reduction
from typing import NoReturn

from trainmem.measure import forked, forkserver, quiet, server_process

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
    with quiet.short_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := os.path.join(folder, "server"))
        listener.listen(64)
        arguments = listener.fileno(), [*forkserver.PRELOAD, *preload]
        process = forkserver.start_interpreter(serve, *arguments, inherited=listener.fileno(), environment=environment)
        try:
            yield {forked.COURSE_SERVER: address}
        finally:
            process.kill()
            process.wait()


def python_module(
    name: str, arguments: list[str], environment: Mapping[str, str], output: int, folder: str
) -> "subprocess.Popen | ForkedModule":
    """Start `python -m name` in a session of its own, as a fork of the course's server or as a new Python process.

    It is a fork if this is Linux and a server answers at the address in `environment` (see `shared`). A fork has the
    libraries imported already, and ends with the caller's process.

    Args:
        name, arguments, folder: the module, its command-line arguments and its working directory.
        environment: all environment variables of the started process.
        output: descriptor of the file for standard output and standard error.
    """
    # Linux only: on other systems system libraries may not work after a fork, and there is no pidfd.
    if hasattr(os, "pidfd_open") and (control := forkserver.connected_course(environment)):
        with contextlib.suppress(OSError, EOFError):
            control.send(("module", name, arguments, dict(environment), folder))
            reduction.send_handle(control, output, None)
            return ForkedModule(control, pid=control.recv())
    options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-m", name, *arguments], env=dict(environment), cwd=folder, **options)


class ForkedModule:
    """A module that runs in a fork of the course's server, with the methods of `subprocess.Popen` that the course uses.

    `control`: connection to the module's keeper, the process that sends the exit code; `pid`: the module's process id.
    """

    stdin = stdout = stderr = None

    def __init__(self, control: connection.Connection, pid: int):
        self._control, self.pid = control, pid
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
            if not self._control.poll(timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            try:
                self.returncode = self._control.recv()
            except (EOFError, OSError):  # its keeper was killed
                self.returncode = -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


# ---- these run in the course's server


def serve(descriptor: int, preload: Iterable[str]) -> NoReturn:
    """Run the server of a course in this process, which `shared` has started: fork once per connection to the socket.

    A caller sends "serve" to get a fork server of its own. Or it sends ("module", name, arguments, environment, folder)
    and then a descriptor for the output; it receives the process id and, at the end, the exit code of `python -m name`.

    Args:
        descriptor: the listening socket.
        preload: the modules to import before the first fork.
    """
    forked.die_with_parent()
    has_gpus = server_process.import_libraries(preload)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for these forks, so they must not become zombies
    listener = socket.socket(fileno=descriptor)
    while True:
        joined = connection.Connection(listener.accept()[0].detach())
        if os.fork() == 0:
            listener.close()
            _serve_one(joined, has_gpus)
        joined.close()


def _serve_one(joined: connection.Connection, has_gpus: bool) -> NoReturn:
    """Become a fork server or a module's keeper, as the first message from the connection `joined` requests.

    A keeper (`_keep`) runs a Python module in a fork, and sends its exit code. `has_gpus`: whether there are GPUs.
    """
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        match joined.recv():
            case "serve":
                forked.die_with_parent()
                server_process.serve_caller(joined, has_gpus)
            case "module", *arguments:
                _keep(joined, reduction.recv_handle(joined), *arguments)
    finally:
        os._exit(1)


# ---- this runs in the keeper of a module


def _keep(joined: connection.Connection, output: int, *module) -> NoReturn:
    """Run a module in a fork, wait for its end, end all processes that it leaves behind, and send its exit code.

    If the caller closes the connection `joined`, the module is killed. `output`: descriptor of the module's output;
    `module`: its name, command-line arguments, environment and working directory, as `_be_module` takes them.
    """
    forked.adopt_orphans()
    if (pid := os.fork()) == 0:
        joined.close()
        _be_module(output, *module)
    os.close(output)
    joined.send(pid)
    descriptor = os.pidfd_open(pid)
    if joined in connection.wait([joined, descriptor]):
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    server_process.end_children()
    with contextlib.suppress(OSError):
        joined.send(code)
    os._exit(0)


# ---- this runs in the module's process


def _be_module(output: int, name: str, arguments: list[str], environment: dict[str, str], folder: str) -> NoReturn:
    """Run `python -m name` with these arguments and only these environment variables in this fork; never return.

    `output`: descriptor for standard output and errors; `folder`: working directory, also on the import path.
    """
    os.setsid()
    forked.die_with_parent()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, tempfile.tempdir = [name, *arguments], None
    sys.path.insert(0, folder)
    code = 1
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        forked.flush()
        os._exit(code)
