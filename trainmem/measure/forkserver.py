"""Start a fork server, and let it fork a fresh subprocess for each job. This module runs in the caller, which has jobs.

A fresh interpreter takes seconds to import the libraries; a fork of an interpreter that has imported them takes
hundredths of a second, and nothing is left in it from an earlier job. The standard library's fork server is no
alternative: it imports the caller's `__main__` again and keeps the environment in which it was started. Each kind of
process has a module:

- the caller: this module. `SERVER` is its server, a `CleanProcess` is one job from its start to its end.
- the server: `server_process`. It has imported torch but touched no device; it forks, and collects ended processes.
- the fresh subprocess: `forked`. It receives the job, performs it, and sends the result.
- the server of a whole course: `course.course_server`. It forks the servers of the lessons, which share one import.

No process outlives its parent, even if the parent is killed. A fresh subprocess has a session of its own, and asks the
kernel to end it when the server ends. The server ends when the connection to its caller closes; it adopts and ends
processes that a fresh subprocess left in other sessions. Each fresh subprocess has a folder for its files. The caller
removes this folder when it closes the `CleanProcess`; if the caller ends before that, the server removes the folder.
"""

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, reduction
from typing import Any

import cloudpickle

from trainmem.core import optional_packages, outcomes, stack_dumps
from trainmem.measure import forked, quiet, server_process

# Modules that a server imports, with all that they import, so that each fresh subprocess has them without a wait.
PRELOAD = (
    "torch.distributed.launcher.api",
    "datasets",
    "transformers.trainer",
    "transformers.models.bert.modeling_bert",
    "trainmem.measure.memory_meter",
    "trainmem.measure.time_meter",
    "trainmem.estimate.cuda",
    "trainmem.estimate.device",
    "trainmem.estimate.peak_memory",
)
# A server imports bitsandbytes only before a job that names it, or one of its optimizers: this import takes a quarter
# of the time of all these, and touches the device if there is one.
_BITSANDBYTES = re.compile(rb"bitsandbytes|bnb|[48]bit|quantization_config|paged|lion|ademamix")
# Defaults of environment variables. A waiting OpenMP thread spins for milliseconds: on a machine with other load a step
# took 10 to 20 times as long (9.4 s instead of 0.4 s). glibc gives each thread a memory arena of its own: the third of
# three equal trainings in threads took 13 % more CPU time. Python iterates over sets of names in an order drawn per
# process, and transformers' models do so (ModernBERT, Gemma 3): without a fixed seed their reserved memory would vary.
_DEFAULTS = {"GOMP_SPINCOUNT": "3000", "MALLOC_ARENA_MAX": "1", "PYTHONHASHSEED": "0"}

Job = Callable[[Callable[[int], None]], Any]  # runs in the fresh subprocess; it gets a function to call after each step


class ForkServer:
    """Fork fresh subprocesses from one server: started on first use, replaced if it was killed, ended with the caller.

    If the caller forks, its child process starts a server of its own. `preload`: modules that a server imports.
    """

    def __init__(self, preload: Sequence[str]):
        self.measuring: set[int] = set()  # ids of fresh subprocesses with an active meter
        self.running: _RunningServer | None = None
        self._preload = preload
        self._lock = threading.RLock()

    def start(self, with_bitsandbytes: bool = False) -> None:
        """Start a server, without waiting for it, unless a usable one is running.

        A server that was started before the last call of `optional_packages.offer` is replaced, because its libraries
        cannot find the package that this call offered. The fresh subprocesses of the old server continue.

        Args:
            with_bitsandbytes: import bitsandbytes after the first fork, because later jobs will need it.
        """
        with self._lock:
            if self.running and self.running.is_up_to_date():
                return
            self._leave()
            self.running = _RunningServer(self._preload, with_bitsandbytes)

    def fork(self, descriptors: list[int], folder: str, job: bytes) -> "tuple[_RunningServer, int]":
        """Fork a fresh subprocess; return (the server that forked it, the subprocess's process id).

        Args:
            descriptors: file descriptors of the subprocess's channel, standard output and standard error.
            folder: folder for the subprocess's files.
            job: the pickled job; if its bytes name bitsandbytes, the server imports this package before the fork,
                unless the machine has GPUs.
        """
        with self._lock:
            try:
                return self._fork(descriptors, folder, job)
            except (OSError, EOFError):  # the server was killed: start a new one
                self._leave()
                return self._fork(descriptors, folder, job)
            except KeyboardInterrupt:  # the pending answer would be taken for the next request's
                if self.running:
                    self.running.end()
                self.running = None
                raise

    def _fork(self, descriptors: list[int], folder: str, job: bytes) -> "tuple[_RunningServer, int]":
        self.start()
        return self.running, self.running.fork(descriptors, folder, bool(_BITSANDBYTES.search(job)))

    def _leave(self) -> None:
        """Forget the present server, and end it unless one of its fresh subprocesses is still in use."""
        if self.running and not self.running.is_needed():
            self.running.end()
        self.running = None

    def forks(self) -> list[int]:
        """Return the process ids of the present server's fresh subprocesses whose `CleanProcess` is not closed yet."""
        return [*self.running.forks] if self.running else []

    def end_forks(self) -> None:
        """End all fresh subprocesses and the processes that they started; their experiments get status "killed"."""
        for pid in self.forks():
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


class _RunningServer:
    """Start one server, and send it requests through a connection.

    In a course the new server is a fork of the course's server. It is a fresh interpreter instead if this process has
    added packages by `optional_packages.offer`, because the course's server cannot find these packages.

    Args:
        preload: names of the modules that the server imports.
        with_bitsandbytes: import bitsandbytes, too, after the first fork.
    """

    def __init__(self, preload: Sequence[str], with_bitsandbytes: bool):
        self.forks: set[int] = set()  # ids of its fresh subprocesses, until `exit_code` is called for them
        self.process: subprocess.Popen | None = None  # None: a fork of the course's server
        self._owner = os.getpid()
        self._offered = optional_packages.offered()  # folders of packages that its libraries may use
        self._lock = threading.RLock()  # one request at a time
        self._control = None if self._offered else _joined_course()
        if not self._control:
            self._control, child_end = multiprocessing.Pipe()
            arguments = child_end.fileno(), [*preload], with_bitsandbytes
            self.process = start_interpreter(server_process.serve, *arguments, inherited=child_end.fileno())
            child_end.close()
        atexit.register(self.end)

    def is_up_to_date(self) -> bool:
        """Return whether the server is alive, belongs to this process, and was started after the last call of
        `optional_packages.offer`.
        """
        return self._lives() and self._offered == optional_packages.offered()

    def is_needed(self) -> bool:
        """Return whether the server is alive and has a fresh subprocess for which `exit_code` was not yet called."""
        return bool(self.forks) and self._lives()

    def _lives(self) -> bool:
        with self._lock:  # without a pending request the connection is readable only at its end
            return self._owner == os.getpid() and not self._control.closed and not self._control.poll()

    def fork(self, descriptors: list[int], folder: str, needs_bitsandbytes: bool) -> int:
        """Fork a fresh subprocess and return its process id.

        Args:
            descriptors: file descriptors of the subprocess's channel, standard output and standard error.
            folder: folder for the subprocess's files.
            needs_bitsandbytes: whether the job needs bitsandbytes.

        Raises:
            OSError, EOFError: the server was killed.
        """
        with self._lock:
            self._control.send(("fork", folder, needs_bitsandbytes))
            for descriptor in descriptors:
                reduction.send_handle(self._control, descriptor, None)
            self.forks.add(pid := self._control.recv())
            return pid

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of the ended fresh subprocess `pid` from the server; None if the server is gone."""
        with self._lock, contextlib.suppress(OSError, EOFError):
            self.forks.discard(pid)
            self._control.send(("collect", pid))
            return self._control.recv()
        return None

    def end(self) -> None:
        """End the server and its fresh subprocesses, and wait until their folders are removed.

        In a fork of the process that started the server, do nothing.
        """
        if self._owner != os.getpid() or self._control.closed:
            return
        if self.process and not self.forks:  # it may still be importing, and has no folders to remove
            self.process.kill()
        with contextlib.suppress(OSError, EOFError):  # it was killed, or has closed the connection
            self._control.send("end")
            while self._control.poll(5):
                self._control.recv()
        self._control.close()
        if self.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)


def start_interpreter(
    function: Callable, *arguments, inherited: int, environment: Mapping[str, str] | None = None
) -> subprocess.Popen:
    """Start a Python interpreter that calls a module's function, and return its process.

    Args:
        function: a function that can be imported by its module and name.
        arguments: the function's arguments, values that Python can write as literals.
        inherited: a file descriptor that the new process may use.
        environment: variables in addition to this process's; None: none.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom {function.__module__} import {function.__name__} as function"
    own = forked.NO_DEVICE_BEFORE_FORKS | {"TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        [sys.executable, "-c", f"{code}\nfunction(*{arguments!r})"],
        pass_fds=[inherited],
        env=_DEFAULTS | os.environ | (environment or {}) | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def connected_course(environment: Mapping[str, str]) -> connection.Connection | None:
    """Return a connection to a course's server, whose address is in the variables `environment`; None if there is no
    address, or no server answers at it.
    """
    with contextlib.suppress(OSError):
        if address := environment.get(forked.COURSE_SERVER):
            return connection.Client(address, "AF_UNIX")
    return None


def _joined_course() -> connection.Connection | None:
    """Return a connection to a new fork of the course's server that serves this process only; None without a course."""
    if control := connected_course(os.environ):
        with contextlib.suppress(OSError):  # it was killed
            control.send("serve")
            return control
    return None


SERVER = ForkServer(PRELOAD)


class CleanProcess(contextlib.AbstractContextManager):
    """Run one fresh subprocess, from its start to its end. Use it as a context manager: leaving it ends the process.

    Args:
        job: the function to run; sent by cloudpickle.
        turn: (warm-up steps, steps per turn): stop after the warm-up and after every `steps per turn` more steps, each
            time until `go` is called; None: never stop.
        measured: whether a meter is active. If so, the process's id is in `SERVER.measuring` until the process ends, so
            that other work can wait for the end.
        shares_cores: in a course, limit the process's threads to its lesson's share of the cores, unless the lesson has
            the machine for itself.
    """

    def __init__(
        self, job: Job, turn: tuple[int, int] | None = None, measured: bool = False, shares_cores: bool = True
    ):
        self.output, self.errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115, closed with this object
        self.code: int | None = None
        job, self.folder = cloudpickle.dumps(job), tempfile.mkdtemp(prefix="perf_helpers-")
        self._oom_kills = outcomes.oom_kills()
        self.channel, child_end = multiprocessing.Pipe()
        descriptors = [child_end.fileno(), self.output.fileno(), self.errors.fileno()]
        try:
            self._server, self.pid = SERVER.fork(descriptors, self.folder, job)
        except BaseException:
            forked.remove(self.folder)
            raise
        child_end.close()
        if measured:
            SERVER.measuring.add(self.pid)
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux: wait for the end of the channel instead
            self._descriptor = None
        surroundings = {"working_folder": os.getcwd(), "environment": dict(os.environ), "path": [*sys.path]}
        surroundings["threads"] = quiet.threads() if shares_cores else None
        assignment = forked.Assignment(job, turn, self.folder, **surroundings)
        with contextlib.suppress(BrokenPipeError):
            self.channel.send(assignment)

    def receive(self, timeout: float | None = None) -> tuple[str, Any]:
        """Return the next message of the process as (kind, content).

        - ("step", number of a finished step)
        - ("turn", number of the step after which the process stopped): the process waits until `go` is called
        - ("quiet", the part of the machine that the process requests, a `quiet.Need`): the process waits until `go` is
          called, but with `Need.SHARE`, which gives a part back, it continues at once
        - ("result", value that the job returned, or an `Outcome` that describes how the job or the process failed)

        Args:
            timeout: seconds to wait; None: no limit.

        Raises:
            TimeoutError: nothing came within `timeout` seconds.
        """
        watched = [self.channel] + ([self._descriptor] if self._descriptor is not None else [])
        if not (ready := connection.wait(watched, timeout)):
            raise TimeoutError
        with contextlib.suppress(EOFError, OSError):
            if self.channel in ready or self.channel.poll():
                kind, content = self.channel.recv()
                return kind, cloudpickle.loads(content) if kind == "result" else content
        self.close()
        return "result", outcomes.died(self.code, self._oom_kills)

    def go(self) -> None:
        """Let the process continue after it stopped and sent the message "turn" or "quiet", see `receive`."""
        with contextlib.suppress(BrokenPipeError):
            self.channel.send("go")

    def printed(self) -> tuple[str, str]:
        """Return (text on standard output, text on standard error) that the process wrote so far."""
        texts = []
        for file in (self.output, self.errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return texts[0], texts[1]

    def whereabouts(self) -> str:
        """Return a text that says in which line each rank of the process is now; "" if no rank answers."""
        return stack_dumps.described(stack_dumps.query(self.folder, self.pid)) if self.pid else ""

    def close(self) -> None:
        """End the process and all processes that it started, and remove its folder. No other process gets a signal."""
        if self.pid is None:
            return
        with _uninterrupted():
            SERVER.measuring.discard(self.pid)
            for kill in (os.killpg, os.kill):  # os.kill too: a fork that was not yet the leader of its session
                with contextlib.suppress(OSError):
                    kill(self.pid, signal.SIGKILL)
            self.code = self._server.exit_code(self.pid)
            self.pid = None
            forked.remove(self.folder)
            self.channel.close()
            if self._descriptor is not None:
                os.close(self._descriptor)

    def __exit__(self, *_):
        self.close()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until this context ends.

    An interruption in this context would leave an answer of the server unread, and a folder behind.
    """
    pressed, is_reached = [], threading.current_thread() is threading.main_thread()
    before = is_reached and signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        if is_reached:
            signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)
