"""Start a fork server, and let it fork a fresh subprocess for each job. This module runs in the caller, which has jobs.

A fresh interpreter takes seconds to import the libraries; a fork of an interpreter that has imported them takes
hundredths of a second, and nothing is left in it from an earlier job. The standard library's fork server is no
alternative: it imports the caller's `__main__` again and keeps the environment in which it was started. Each kind of
process has a module:

- the caller: this module. `SERVER` is its server, a `CleanProcess` is one job from its start to its end.
- the server: `server_process`. It has imported torch but touched no device; it forks, and collects ended processes.
- the fresh subprocess: `forked`. It performs the job, and sends the result.
- the server of a whole course: `course.course_server`. It forks for all lessons, which share one import.

Each fresh subprocess has its own connection between caller and server. No process outlives its caller, even if the
caller is killed: a fresh subprocess ends with its connection, and the server with the caller. A fresh subprocess has a
process group of its own, and asks the kernel to end it when the server ends. The server adopts and ends processes that
a fresh subprocess left in other groups, and removes the folder that each fresh subprocess has for its files.
"""

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
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
        self.running: RunningServer | None = None
        self._preload = preload
        self._lock = threading.Lock()

    def start(self, with_bitsandbytes: bool = False) -> "RunningServer":
        """Return a usable server; if there is none, start one, without waiting for it.

        A server that was started before the last call of `optional_packages.offer` is replaced, because its libraries
        cannot find the package that `offer` added. The fresh subprocesses of the old server continue.

        Args:
            with_bitsandbytes: a new server imports bitsandbytes after its first fork, because later jobs will need it.
        """
        with self._lock:
            if not self.running or not self.running.is_up_to_date():
                if self.running and not self.running.forks:
                    self.running.end()
                # The course's server cannot find packages that this process has added.
                address = "" if optional_packages.offered() else course_address(os.environ)
                self.running = RunningServer(self._preload, with_bitsandbytes, address=address)
            return self.running

    def fork(
        self, request: server_process.Request, descriptors: list[int]
    ) -> "tuple[RunningServer, connection.Connection, int]":
        """Fork a fresh subprocess; return (its server, its connection, its process id), see `requested`."""
        server = self.start()
        try:
            return server, *requested(server.address, request, descriptors)
        except (OSError, EOFError):  # the server was killed: start a new one
            with self._lock:
                self.running = None if self.running is server else self.running
            server = self.start()
            return server, *requested(server.address, request, descriptors)

    def forks(self) -> list[int]:
        """Return the process ids of the fresh subprocesses of `running`, the server that forks now, until closed."""
        return [*self.running.forks] if self.running else []

    def end_forks(self) -> None:
        """End all fresh subprocesses and the processes that they started; their experiments get status "killed"."""
        for pid in self.forks():
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


class RunningServer:
    """Start a server that ends with this process, or use a server that is already running.

    Args:
        preload: names of the modules that the server imports.
        with_bitsandbytes: import bitsandbytes, too, after the first fork.
        environment: the server's environment variables in addition to this process's; None: none.
        address: use the server at this address; "": start one.
    """

    def __init__(
        self,
        preload: Sequence[str],
        with_bitsandbytes: bool = False,
        environment: Mapping[str, str] | None = None,
        address: str = "",
    ):
        self.forks: dict[int, CleanProcess] = {}  # by process id, until they are closed
        self.address = address
        self.process: subprocess.Popen | None = None  # None: the server of another process
        self._owner = os.getpid()
        self._offered = optional_packages.offered()  # folders of packages that its libraries may use
        if not address:
            self._start([*preload], with_bitsandbytes, environment or {})
            atexit.register(self.end)

    def _start(self, preload: list[str], with_bitsandbytes: bool, environment: Mapping[str, str]) -> None:
        self.address = os.path.join(tempfile.mkdtemp(prefix="perf_helpers-", dir=quiet.short_folder()), "server")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            arguments = listener.fileno(), self._owner, preload, with_bitsandbytes
            code = f"import sys; sys.path[:] = {sys.path!r}; from {server_process.__name__} import serve"
            own = forked.NO_DEVICE_BEFORE_FORKS | {"TOKENIZERS_PARALLELISM": "false"}
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{code}; serve(*{arguments!r})"],
                pass_fds=[listener.fileno()],
                env=_DEFAULTS | os.environ | environment | own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def is_up_to_date(self) -> bool:
        """Return whether this process can still use the server.

        This process started or joined it after the last call of `optional_packages.offer`, and has not seen it end.
        """
        if self._owner != os.getpid() or self._offered != optional_packages.offered():
            return False
        return not self.process or self.process.poll() is None

    def end(self) -> None:
        """End the server and all fresh subprocesses that this process started from it, and remove their folders.

        Do nothing if another process started the server, e.g. if this process is a fork of that process.
        """
        if self.process and self._owner == os.getpid():
            for fork in [*self.forks.values()]:
                fork.close()
            self.process.kill()
            self.process.wait()
            forked.remove(os.path.dirname(self.address))


def requested(
    address: str, request: server_process.Request, descriptors: list[int]
) -> tuple[connection.Connection, int]:
    """Request a fork from a server; return (the connection to the server for this fork, the fork's process id).

    The fork is ended by `exit_code`, or by closing the connection.

    Args:
        address: address of the server.
        request: what the fork does.
        descriptors: file descriptors for the fork: of its standard output, of its standard error, then those that the
            request's function gets as its first arguments.

    Raises:
        OSError, EOFError: the server was killed.
    """
    control = connection.Client(address, "AF_UNIX")
    try:
        control.send((request, len(descriptors)))
        for descriptor in descriptors:
            reduction.send_handle(control, descriptor, None)
        return control, control.recv()
    except BaseException:
        control.close()
        raise


def exit_code(control: connection.Connection) -> int | None:
    """End a fork, and close the connection `control`; return the fork's exit code, or None if the server was killed.

    If the fork has already ended, only the processes that it left behind are ended. In both cases the server removes
    the fork's folder. `control`: the fork's connection, from `requested`.
    """
    with control, contextlib.suppress(OSError, EOFError):
        control.send("end")
        return control.recv()
    return None


def course_address(environment: Mapping[str, str]) -> str:
    """Return the address of a course's server, as given by the environment variables `environment`.

    Return "" if they give no address, or if no server answers at the address.
    """
    if address := environment.get(forked.COURSE_SERVER):
        with contextlib.suppress(OSError), connection.Client(address, "AF_UNIX"):
            return address
    return ""


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
        surroundings = {"working_folder": os.getcwd(), "environment": dict(os.environ), "path": [*sys.path]}
        surroundings["threads"] = quiet.threads() if shares_cores else None
        assignment = forked.Assignment(job, turn, self.folder, **surroundings)
        needs_bitsandbytes = bool(_BITSANDBYTES.search(job))
        request = server_process.Request(forked.perform, (assignment,), self.folder, needs_bitsandbytes)
        self._oom_kills = outcomes.oom_kills()
        self.channel, child_end = multiprocessing.Pipe()
        try:
            with child_end:
                descriptors = [self.output.fileno(), self.errors.fileno(), child_end.fileno()]
                self._server, self._control, self.pid = SERVER.fork(request, descriptors)
        except BaseException:
            forked.remove(self.folder)
            raise
        self._server.forks[self.pid] = self
        if measured:
            SERVER.measuring.add(self.pid)
        self._at_end: list[int] = []  # a descriptor that becomes readable when the process ends; []: this is not Linux
        with contextlib.suppress(AttributeError, OSError):
            self._at_end.append(os.pidfd_open(self.pid))

    def receive(self, timeout: float | None = None) -> tuple[str, Any]:
        """Return the next message of the process as (kind, content).

        - ("step", number of a finished step)
        - ("turn", number of the step after which the process stopped): the process waits until `go` is called
        - ("quiet", part of the machine that the process requests, as a `quiet.Need`): the process waits until `go` is
          called. `Need.SHARE` is an exception: the process gives its part back, and continues at once
        - ("result", value that the job returned, or an `Outcome` that describes how the job or the process failed)

        Args:
            timeout: seconds to wait; None: no limit.

        Raises:
            TimeoutError: nothing came within `timeout` seconds.
        """
        if not (ready := connection.wait([self.channel, *self._at_end], timeout)):
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
        pid, self.pid = self.pid, None
        SERVER.measuring.discard(pid)
        self._server.forks.pop(pid, None)
        self.code = exit_code(self._control)
        forked.remove(self.folder)  # if the server was killed
        self.channel.close()
        for descriptor in self._at_end:
            os.close(descriptor)

    def __exit__(self, *_):
        self.close()
