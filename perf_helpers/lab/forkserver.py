"""Clean processes: one for each job, forked from a server that has imported torch and never touched a device.

A fresh interpreter takes seconds to import the libraries; a fork of one that has them takes hundredths of a second and
is just as clean. The standard library's fork server does not serve: it imports the caller's `__main__` again and keeps
the environment that it was started in. Where there is no fork (Windows), a fresh interpreter is spawned.

No process outlives its parent, whatever kills it: children are in a session of their own, ask the kernel to die with
the server, and the server ends when the connection to its parent closes, and adopts and ends what a child has left in
other sessions. Nor does a file: each has a folder of its own, which whoever sees its end removes.

The lessons of a course share one import: the course starts a server (`shared`) that forks a server for each lesson,
and its kernel (`python_module`).
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any

import cloudpickle
import psutil

from perf_helpers.lab import forked, optional_packages, outcomes, quiet, stack_dumps

HAS_FORK = hasattr(os, "fork") and reduction.HAVE_SEND_HANDLE

# It joins them before a job that names it, or one of its optimizers: to import it takes a quarter of the time of all
# these, and touches the device where there is one.
_BITSANDBYTES = re.compile(rb"bitsandbytes|bnb|[48]bit|quantization|paged|lion|ademamix")
# Where nobody sets them. A thread of OpenMP that waits spins for milliseconds: on a machine with other work to do a
# step took 10 to 20 times as long (9.4 s instead of 0.4 s). glibc gives each thread an arena of its own: the third of
# equal trainings in threads took 13 % more CPU time. Python walks sets of names in an order drawn for each process,
# and models of transformers do so (ModernBERT, Gemma 3): what their trainings reserve would be drawn with it.
_DEFAULTS = {"GOMP_SPINCOUNT": "3000", "MALLOC_ARENA_MAX": "1", "PYTHONHASHSEED": "0"}

Job = Callable[[Callable[[int], None]], Any]  # called in the clean process with what it calls after each step


class ForkServer:
    """This process's fork server: started when it is first needed, replaced if it was killed, ended with this process.

    A fork of this process has a server of its own.
    """

    def __init__(self):
        self.measuring: set[int] = set()  # clean processes that are under a meter just now
        self._lock = threading.RLock()
        self._process: subprocess.Popen | _Fork | None = None
        self._owner = 0  # the process that started it
        self._offered: list[Path] = []  # what was offered by then
        self._forked: set[int] = set()  # by the server of now

    def start(self, with_bitsandbytes: bool = False, unused: tuple[str, ...] = ()) -> None:
        """Start it, if there is none, without waiting for it. One that was started before a package was offered has
        libraries that lack it: it is replaced, its forks go on.

        Args:
            with_bitsandbytes: whether its second job has bitsandbytes.
            unused: packages that libraries do not find while they are imported.
        """
        with self._lock:
            is_ours = self._process is not None and self._owner == os.getpid()
            lives = is_ours and self._process.poll() is None
            if not HAS_FORK or (lives and self._offered == optional_packages.OFFERED):
                return
            if is_ours and not (lives and self._forked):
                self._end()
            self._process, self._control = _joined() or _started(with_bitsandbytes, unused)
            self._owner, self._forked = os.getpid(), set()
            self._offered = [*optional_packages.OFFERED]
            self._end = functools.partial(_end, self._process, self._control, self._owner, self._forked)
            atexit.register(self._end)

    def fork(self, descriptors: list[int], folder: str, job: bytes) -> int:
        """Process id of a fresh fork that holds the descriptors (connection, output, errors), has a folder, and what a
        pickled job needs."""
        try:
            return self._asked_to_fork(descriptors, folder, job)
        except (OSError, EOFError):  # the server was killed: a new one
            self._process = None
            return self._asked_to_fork(descriptors, folder, job)
        except KeyboardInterrupt:  # its answer would be taken for that to the next question
            if self._process:
                self._end()
            self._process = None
            raise

    def _asked_to_fork(self, descriptors: list[int], folder: str, job: bytes) -> int:
        with self._lock:
            self.start()
            self._control.send(("fork", folder, bool(_BITSANDBYTES.search(job))))
            for descriptor in descriptors:
                reduction.send_handle(self._control, descriptor, self._process.pid)
            self._forked.add(pid := self._control.recv())
            return pid

    def exit_code(self, pid: int) -> int | None:
        """Collect an ended fork; None where the server that forked it is gone."""
        with self._lock, contextlib.suppress(OSError, EOFError, KeyError):
            self._forked.remove(pid)
            self._control.send(("wait", pid))
            return self._control.recv()
        return None

    def end_forks(self) -> None:
        """End every fork that lives just now, and everything it started; whoever waits for one gets its end."""
        for pid in [*self._forked]:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


def _started(with_bitsandbytes: bool, unused: tuple[str, ...]) -> tuple[subprocess.Popen, connection.Connection]:
    """Start a server of this process's own; return it and the connection to it."""
    ours, theirs = multiprocessing.Pipe()
    process = _python(f"serve({theirs.fileno()}, {with_bitsandbytes}, {unused})", theirs.fileno())
    theirs.close()
    return process, ours


def _python(call: str, descriptor: int, environment: Mapping[str, str] | None = None) -> subprocess.Popen:
    """Start an interpreter that calls a function of this module and inherits the descriptor."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\nfrom {forked.__name__} import *; {call}"],
        pass_fds=[descriptor],
        env=_DEFAULTS
        | os.environ
        | (environment or {})
        | forked.NO_DEVICE_BEFORE_FORKS
        | {"TOKENIZERS_PARALLELISM": "false"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _joined() -> "tuple[_Fork, connection.Connection] | None":
    """Ask the course's server for a fork. None outside a course, or if a package was offered that its imports lack."""
    control = None if optional_packages.OFFERED else _connected(os.environ)
    if control is not None:
        with contextlib.suppress(OSError):  # it was killed
            control.send("serve")
            return _Fork(control), control
    return None


def _connected(environment: Mapping[str, str]) -> connection.Connection | None:
    """Connect to the course's server. None where there is none, or it was killed."""
    with contextlib.suppress(OSError):
        if address := environment.get(forked.COURSE_SERVER):
            return connection.Client(address, "AF_UNIX")
    return None


class _Fork:
    """A fork of the course's server, with the methods of `subprocess.Popen` that are used."""

    stdin = stdout = stderr = None

    def __init__(self, control: connection.Connection):
        self._control = control
        self._pid: int | None = None
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Its process id, its first message: the course's server may still be importing."""
        if self._pid is None:
            self._pid = self._control.recv()
        return self._pid

    def poll(self) -> int | None:
        if self.returncode is None and self._pid is not None and not psutil.pid_exists(self._pid):
            self.returncode = -signal.SIGKILL  # that of a server tells nobody
            with contextlib.suppress(EOFError, OSError):
                self.returncode = self._control.recv()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self._pid:
            with contextlib.suppress(OSError):
                os.kill(self._pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        if self._pid:
            try:
                psutil.Process(self._pid).wait(timeout)
            except psutil.TimeoutExpired:
                raise subprocess.TimeoutExpired(str(self._pid), timeout) from None
            except psutil.Error:
                pass
        return self.poll()


def python_module(
    name: str, arguments: list[str], environment: Mapping[str, str], output: int, folder: str
) -> "subprocess.Popen | _Fork":
    """Start `python -m name` in a session of its own: a fork of the course's server if the environment names one.

    A fork has imported the libraries, and ends with this process.

    Args:
        output: the descriptor of the file that gets what it prints.
    """
    # Elsewhere than on Linux a kernel that is forked may find its system's libraries broken, and there is no pidfd.
    if hasattr(os, "pidfd_open") and (control := _connected(environment)):
        with contextlib.suppress(OSError, EOFError):
            control.send(("module", name, arguments, dict(environment), folder))
            reduction.send_handle(control, output, None)
            if (started := _Fork(control)).pid:
                return started
    options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-m", name, *arguments], env=dict(environment), cwd=folder, **options)


@contextlib.contextmanager
def shared(preload: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Start a server for the processes of a course, which import the libraries once for all of them.

    Args:
        preload: modules that it imports too.
        environment: variables that these look at when they are imported.

    Yields:
        The environment variable by which a process finds it; {} where there is no fork.
    """
    if not HAS_FORK:
        yield {}
        return
    with quiet.short_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := os.path.join(folder, "server"))
        listener.listen(64)
        process = _python(f"serve_course({listener.fileno()}, {[*preload]})", listener.fileno(), environment)
        try:
            yield {forked.COURSE_SERVER: address}
        finally:
            process.kill()
            process.wait()


def _end(process: "subprocess.Popen | _Fork", control: connection.Connection, owner: int, forked: set[int]) -> None:
    """End a server that this process, its `owner`, started; a fork of this process only closes its own connection."""
    control.close()  # by which it ends, and removes what is left of its forks
    if owner == os.getpid():
        if not forked:  # nothing is left, and while it imports it does not look at the connection
            process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)


SERVER = ForkServer()


class CleanProcess(contextlib.AbstractContextManager):
    """One clean process, from its start to its end. Use as a context manager: leaving it ends the process.

    Args:
        job: what it does; it travels by cloudpickle.
        turn: (warm-up steps, steps in a turn): stop after each turn until `go`.
        shares_cores: whether it computes on its lesson's share of the cores, if the lesson shares the machine.
        measured: whether a meter is on: `SERVER.measuring` tells others that can wait.
    """

    def __init__(
        self, job: Job, turn: tuple[int, int] | None = None, measured: bool = False, shares_cores: bool = True
    ):
        self.output, self.errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115, closed with this object
        self.code: int | None = None
        job, self.folder = cloudpickle.dumps(job), tempfile.mkdtemp(prefix="perf_helpers-")
        self._oom_kills = outcomes.oom_kills()
        self.channel, theirs = multiprocessing.Pipe()
        if HAS_FORK:
            descriptors = [theirs.fileno(), self.output.fileno(), self.errors.fileno()]
            try:
                self.pid = SERVER.fork(descriptors, self.folder, job)
            except BaseException:
                forked.remove(self.folder)
                raise
            theirs.close()
        else:
            self._process = multiprocessing.get_context("spawn").Process(
                target=forked.main, args=(theirs,), daemon=False
            )
            self._process.start()
            self.pid = self._process.pid
        if measured:
            SERVER.measuring.add(self.pid)
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux: the end of the channel tells
            self._descriptor = None
        place = {"folder": os.getcwd(), "environment": dict(os.environ), "path": [*sys.path], "own": self.folder}
        place["threads"] = quiet.threads() if shares_cores else None
        with contextlib.suppress(BrokenPipeError):
            self.channel.send((place, job, turn))

    def receive(self, timeout: float | None = None) -> tuple[str, Any]:
        """The next message: ("step", n), ("turn", n), ("quiet", whether it wants a quiet machine: `go` gives it) or
        ("result", what the job returned). Of a job that raised, and of a process that ended without a result, the
        result is an `Outcome` that says so.

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
        """Let it have its next turn."""
        with contextlib.suppress(BrokenPipeError):
            self.channel.send("go")

    def printed(self) -> tuple[str, str]:
        """What the process wrote to its standard output and errors so far."""
        texts = []
        for file in (self.output, self.errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return texts[0], texts[1]

    def whereabouts(self) -> str:
        """Where its ranks are just now, in words; empty where it has none, or none answers."""
        return stack_dumps.described(stack_dumps.ask(self.folder, self.pid)) if self.pid else ""

    def close(self) -> None:
        """End the process and everything it started, and remove its folder. Only ids of our own are signalled."""
        if self.pid is None:
            return
        with _uninterrupted():
            SERVER.measuring.discard(self.pid)
            if HAS_FORK:
                for kill in (os.killpg, os.kill):  # os.kill too: a fork that was not yet the leader of its session
                    with contextlib.suppress(OSError):
                        kill(self.pid, signal.SIGKILL)
                self.code = SERVER.exit_code(self.pid)
            else:
                self._process.kill()
                self._process.join()
                self.code = self._process.exitcode
            self.pid = None
            forked.remove(self.folder)
            self.channel.close()
            if self._descriptor is not None:
                os.close(self._descriptor)

    def __exit__(self, *_):
        self.close()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait: it would leave the server's answer for the next question, and a folder."""
    pressed, is_reached = [], threading.current_thread() is threading.main_thread()
    before = is_reached and signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        if is_reached:
            signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)
