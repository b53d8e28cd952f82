"""In the process that has jobs to do, the caller: start a fork server, and have a clean process forked for each job.

A fresh interpreter takes seconds to import the libraries; a fork of one that has them takes hundredths of a second and
is just as clean. The standard library's fork server does not serve: it imports the caller's `__main__` again and keeps
the environment that it was started in. Each kind of process has a module:

- the caller: this one. `SERVER` is its server, a `CleanProcess` is one job from its start to its end.
- the server: `server_process`. It has imported torch and never touched a device; it forks, and collects what ended.
- the clean process: `forked`. It receives the job, performs it, and sends the result.
- the server of a whole course: `course.course_server`. It forks the servers of the lessons, which share one import.

No process outlives its parent, whatever kills it: children are in a session of their own, ask the kernel to die with
the server, and the server ends when the connection to its caller closes, and adopts and ends what a child has left in
other sessions. Nor does a file: each clean process has a folder of its own, which whoever sees its end removes.
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

# What a server imports, and all that these import, so that a clean process has it at no cost.
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
# It joins them before a job that names it, or one of its optimizers: to import it takes a quarter of the time of all
# these, and touches the device where there is one.
_BITSANDBYTES = re.compile(rb"bitsandbytes|bnb|[48]bit|quantization_config|paged|lion|ademamix")
# Where nobody sets them. A thread of OpenMP that waits spins for milliseconds: on a machine with other work to do a
# step took 10 to 20 times as long (9.4 s instead of 0.4 s). glibc gives each thread an arena of its own: the third of
# equal trainings in threads took 13 % more CPU time. Python walks sets of names in an order drawn for each process,
# and models of transformers do so (ModernBERT, Gemma 3): what their trainings reserve would be drawn with it.
_DEFAULTS = {"GOMP_SPINCOUNT": "3000", "MALLOC_ARENA_MAX": "1", "PYTHONHASHSEED": "0"}

Job = Callable[[Callable[[int], None]], Any]  # called in the clean process with what it calls after each step


class ForkServer:
    """The caller's fork server: started when it is first needed, replaced if it was killed, ended with the caller.

    A fork of the caller has a server of its own. `preload`: modules that a server imports.
    """

    def __init__(self, preload: Sequence[str]):
        self.measuring: set[int] = set()  # clean processes that are under a meter just now
        self.running: _RunningServer | None = None
        self._preload = preload
        self._lock = threading.RLock()

    def start(self, with_bitsandbytes: bool = False) -> None:
        """Start a server, unless there is one, without waiting for it.

        A server that was started before a package was offered has libraries that lack it: it is replaced, and its
        clean processes go on.

        Args:
            with_bitsandbytes: whether the second job will need bitsandbytes.
        """
        with self._lock:
            if self.running and self.running.is_up_to_date():
                return
            self._leave()
            self.running = _RunningServer(self._preload, with_bitsandbytes)

    def fork(self, descriptors: list[int], folder: str, job: bytes) -> "tuple[_RunningServer, int]":
        """Fork a clean process that holds the descriptors (channel, output, errors) and has a folder, with what a
        pickled job needs; return the server that did it, and the process id."""
        with self._lock:
            try:
                return self._fork(descriptors, folder, job)
            except (OSError, EOFError):  # the server was killed: a new one
                self._leave()
                return self._fork(descriptors, folder, job)
            except KeyboardInterrupt:  # its answer would be taken for that to the next request
                if self.running:
                    self.running.end()
                self.running = None
                raise

    def _fork(self, descriptors: list[int], folder: str, job: bytes) -> "tuple[_RunningServer, int]":
        self.start()
        return self.running, self.running.fork(descriptors, folder, bool(_BITSANDBYTES.search(job)))

    def _leave(self) -> None:
        """Have no server; end the present one unless it still has clean processes."""
        if self.running and not self.running.is_needed():
            self.running.end()
        self.running = None

    def end_forks(self) -> None:
        """End every clean process that lives just now, and all it started; whoever waits for one gets its end."""
        for pid in [*self.running.forks] if self.running else ():
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


class _RunningServer:
    """One server that this process has started, or has joined in a course, and the connection to it."""

    def __init__(self, preload: Sequence[str], with_bitsandbytes: bool):
        self.forks: set[int] = set()  # ids of the clean processes that it has forked and not yet collected
        self.process: subprocess.Popen | None = None  # None: a fork of the course's server
        self._owner = os.getpid()
        self._offered = optional_packages.offered()  # packages that its libraries may use
        self._lock = threading.RLock()  # one request at a time
        self._control = None if self._offered else _joined_course()
        if not self._control:
            self._control, theirs = multiprocessing.Pipe()
            arguments = theirs.fileno(), [*preload], with_bitsandbytes
            self.process = start_interpreter(server_process.serve, *arguments, inherited=theirs.fileno())
            theirs.close()
        atexit.register(self.end)

    def is_up_to_date(self) -> bool:
        """Return whether it lives, is this process's own, and has looked at all packages that were offered."""
        return self._lives() and self._offered == optional_packages.offered()

    def is_needed(self) -> bool:
        """Return whether it lives and has clean processes."""
        return bool(self.forks) and self._lives()

    def _lives(self) -> bool:
        with self._lock:  # without a request under way only the end of the connection can be read
            return self._owner == os.getpid() and not self._control.closed and not self._control.poll()

    def fork(self, descriptors: list[int], folder: str, needs_bitsandbytes: bool) -> int:
        """Fork a clean process; return its id. Raises OSError or EOFError if the server was killed."""
        with self._lock:
            self._control.send(("fork", folder, needs_bitsandbytes))
            for descriptor in descriptors:
                reduction.send_handle(self._control, descriptor, None)
            self.forks.add(pid := self._control.recv())
            return pid

    def exit_code(self, pid: int) -> int | None:
        """Collect a clean process that has ended; None if the server is gone."""
        with self._lock, contextlib.suppress(OSError, EOFError):
            self.forks.discard(pid)
            self._control.send(("collect", pid))
            return self._control.recv()
        return None

    def end(self) -> None:
        """End it and its clean processes, and wait until their folders are removed. A fork of this process does not."""
        if self._owner != os.getpid() or self._control.closed:
            return
        if self.process and not self.forks:  # while it imports it reads no request, and there is nothing to remove
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
    """Start an interpreter that calls a function of a module, with arguments that are written as Python literals.

    Args:
        inherited: a descriptor that it may use.
        environment: variables beside those of this process.
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
    """Return a connection to the server of the course that an environment names; None if there is no such server."""
    with contextlib.suppress(OSError):
        if address := environment.get(forked.COURSE_SERVER):
            return connection.Client(address, "AF_UNIX")
    return None


def _joined_course() -> connection.Connection | None:
    """Return a connection to a fork of the course's server that serves this process alone; None outside a course."""
    if control := connected_course(os.environ):
        with contextlib.suppress(OSError):  # it was killed
            control.send("serve")
            return control
    return None


SERVER = ForkServer(PRELOAD)


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
        descriptors = [theirs.fileno(), self.output.fileno(), self.errors.fileno()]
        try:
            self._server, self.pid = SERVER.fork(descriptors, self.folder, job)
        except BaseException:
            forked.remove(self.folder)
            raise
        theirs.close()
        if measured:
            SERVER.measuring.add(self.pid)
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux: the end of the channel tells
            self._descriptor = None
        surroundings = {"working_folder": os.getcwd(), "environment": dict(os.environ), "path": [*sys.path]}
        surroundings["threads"] = quiet.threads() if shares_cores else None
        assignment = forked.Assignment(job, turn, self.folder, **surroundings)
        with contextlib.suppress(BrokenPipeError):
            self.channel.send(assignment)

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
    """Let Ctrl-C wait: it would leave the server's answer for the next request, and a folder."""
    pressed, is_reached = [], threading.current_thread() is threading.main_thread()
    before = is_reached and signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        if is_reached:
            signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)
