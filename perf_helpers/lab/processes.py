"""Clean processes: one for each experiment, forked from a server that has imported torch and never touched a device.

A fresh interpreter takes seconds to import the libraries; a fork of one that has them takes hundredths of a second and
is just as clean. Where there is no fork (Windows), a fresh interpreter is spawned. No process outlives its parent,
whatever kills it: children are in a session of their own, ask the kernel to die with the server, and the server ends
when the socket to its parent closes.
"""

import atexit
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from multiprocessing import connection
from typing import Any

import cloudpickle

from perf_helpers.lab import hardware, worker
from perf_helpers.lab.training import Experiment

HAS_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds")
_INT = struct.Struct("q")
# Without it a look at the number of GPUs would initialise CUDA, and no fork could use a GPU any more: neither the
# server's, nor the ranks that a clean process forks (torch's launcher looks).
_NO_DEVICE_BEFORE_FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Ended(Exception):
    """The process ended without an outcome; `code` is its exit status, negative for a signal, None if unknown."""

    def __init__(self, code: int | None):
        super().__init__(code)
        self.code = code


# --------------------------------------------------------------------------------------------------------- the server


class _Server:
    """The parent's side of the fork server. Started by the first call of `_server()`, ended with this process."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self.socket, self.lock, self.owner = ours, threading.Lock(), os.getpid()
        # By default a thread of OpenMP that waits for another spins for milliseconds: on a machine with other work to
        # do a step then took 10 to 20 times as long (9.4 s instead of 0.4 s).
        environment = (
            {"GOMP_SPINCOUNT": "3000"}
            | os.environ
            | {
                **_NO_DEVICE_BEFORE_FORKS,
                "TOKENIZERS_PARALLELISM": "false",
            }
        )
        code = f"import sys; sys.path[:] = {sys.path!r}\n"
        code += f"from perf_helpers.lab.processes import _serve; _serve({theirs.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.close)

    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def fork(self, descriptors: list[int]) -> int:
        """Process id of a fresh fork that holds the descriptors (connection, output, errors)."""
        with self.lock:
            socket.send_fds(self.socket, [b"f"], descriptors)
            return self._answer()

    def exit_code(self, pid: int) -> int | None:
        """Collect an ended fork."""
        with self.lock:
            self.socket.sendall(b"w" + _INT.pack(pid))
            return self._answer()

    def _answer(self) -> int:
        answer = b""
        while len(answer) < _INT.size:
            part = self.socket.recv(_INT.size - len(answer))
            if not part:
                raise OSError("the fork server has ended")
            answer += part
        return _INT.unpack(answer)[0]

    def close(self) -> None:
        self.socket.close()
        if self.owner == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)


_current: _Server | None = None
_starting = threading.Lock()


def _server() -> _Server:
    global _current
    with _starting:
        if _current is None or not _current.alive():
            _current = _Server()
        return _current


def start() -> None:
    """Start the fork server, if there is none, without waiting for it."""
    if HAS_FORK:
        _server()


def _serve(descriptor: int) -> None:
    """The fork server's loop: 'f' forks, 'w' waits for one, the end of the socket ends everything."""
    import gc

    worker.preload()
    gc.collect()
    gc.freeze()  # so that a fork's collector does not copy what it shares
    control = socket.socket(fileno=descriptor)
    parent, children = os.getppid(), set()
    control.settimeout(2)
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 3)
        except TimeoutError:
            if os.getppid() != parent:
                break
            continue
        except OSError:
            break
        if message == b"f":
            pid = os.fork()
            if pid == 0:
                control.close()
                _child(*descriptors)
            for inherited in descriptors:
                os.close(inherited)
            children.add(pid)
            control.sendall(_INT.pack(pid))
        elif message == b"w":
            pid = _INT.unpack(control.recv(_INT.size, socket.MSG_WAITALL))[0]
            children.discard(pid)
            control.sendall(_INT.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        else:
            break
    for pid in children:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _child(channel: int, output: int, errors: int) -> None:
    """The first lines of a fork; does not return."""
    code = 1
    try:
        os.setsid()
        worker.die_with_parent()
        os.dup2(output, 1)
        os.dup2(errors, 2)
        _volunteer()
        _main(connection.Connection(channel))
        code = 0
    finally:
        _flush()
        os._exit(code)


def _volunteer() -> None:
    """If memory runs out, the kernel should end the experiment and not the notebook."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("800")


def _main(channel: connection.Connection) -> None:
    """Receive where we are and what to do, do it, send the outcome."""
    place, payload, measure, turn = channel.recv()
    os.chdir(place["folder"])
    os.environ.clear()
    os.environ.update(place["environment"] | _NO_DEVICE_BEFORE_FORKS)
    sys.path[:] = place["path"]
    on_step = _turns(channel, *turn) if turn else _reporter(channel)
    try:
        outcome = worker.perform(cloudpickle.loads(payload), measure, on_step)
        outcome = cloudpickle.dumps(outcome)
    except Exception as error:
        outcome = cloudpickle.dumps(worker.failure(error))
    _flush()  # before the outcome: whoever gets it reads what was printed
    channel.send(("outcome", outcome))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _reporter(channel) -> Callable[[int], None]:
    last = 0.0

    def on_step(number: int) -> None:
        nonlocal last
        if time.monotonic() - last > 0.3:  # seldom: a parent that wakes up takes time from the steps
            last = time.monotonic()
            channel.send(("step", number))

    return on_step


def _turns(channel, warmup_steps: int, steps_per_turn: int) -> Callable[[int], None]:
    def on_step(number: int) -> None:
        if number >= warmup_steps and (number - warmup_steps) % steps_per_turn == 0:
            import torch

            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            channel.send(("turn", number))
            channel.recv()

    on_step.takes_turns = True
    return on_step


# --------------------------------------------------------------------------------------------------- the parent's side


_measuring: set[int] = set()  # clean processes of this one that are under a meter


def are_measuring() -> bool:
    """Whether an experiment is being measured just now: what can wait should not take time from it."""
    return bool(_measuring)


class CleanProcess:
    """One clean process, from its start to its end. Use as a context manager: leaving it ends the process.

    Args:
        measure: see `worker.perform`.
        turn: (warm-up steps, steps in a turn): stop after each turn until `go`.
    """

    def __init__(self, experiment: Experiment, measure: str, turn: tuple[int, int] | None = None):
        self.output, self.errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115, closed with this object
        self.code: int | None = None
        if HAS_FORK:
            ours, theirs = socket.socketpair()
            descriptors = [theirs.fileno(), self.output.fileno(), self.errors.fileno()]
            try:
                self._server = _server()
                self.pid = self._server.fork(descriptors)
            except OSError:  # the server was killed: a new one
                self._server = _server()
                self.pid = self._server.fork(descriptors)
            theirs.close()
            self.channel = connection.Connection(ours.detach())
        else:
            import multiprocessing

            self.channel, theirs = multiprocessing.Pipe()
            self._process = multiprocessing.get_context("spawn").Process(target=_main, args=(theirs,), daemon=False)
            self._process.start()
            self.pid = self._process.pid
        if measure != "none":
            _measuring.add(self.pid)
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not Linux: the end of the channel tells
            self._descriptor = None
        place = {"folder": os.getcwd(), "environment": dict(os.environ), "path": [*sys.path]}
        with contextlib.suppress(BrokenPipeError):
            self.channel.send((place, cloudpickle.dumps(experiment), measure, turn))

    def receive(self, timeout: float | None = None) -> tuple[str, Any]:
        """The next message: ("step", n), ("turn", n) or ("outcome", dict).

        Raises:
            TimeoutError: nothing came within `timeout` seconds.
            Ended: the process ended without an outcome.
        """
        watched = [self.channel] + ([self._descriptor] if self._descriptor is not None else [])
        if not (ready := connection.wait(watched, timeout)):
            raise TimeoutError
        try:
            if self.channel in ready or self.channel.poll():
                kind, content = self.channel.recv()
                return kind, cloudpickle.loads(content) if kind == "outcome" else content
        except (EOFError, OSError):
            pass
        self.close()
        raise Ended(self.code)

    def go(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.channel.send("go")

    def printed(self) -> tuple[str, str]:
        """What the process wrote to its standard output and errors so far."""
        texts = []
        for file in (self.output, self.errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return texts[0], texts[1]

    def close(self) -> None:
        """End the process and everything it started. Only ids of our own are signalled."""
        if self.pid is None:
            return
        _measuring.discard(self.pid)
        if HAS_FORK:
            for kill in (os.killpg, os.kill):  # os.kill too: a fork that was not yet the leader of its session
                with contextlib.suppress(OSError):
                    kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                self.code = self._server.exit_code(self.pid)
        else:
            self._process.kill()
            self._process.join()
            self.code = self._process.exitcode
        self.pid = None
        self.channel.close()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


_given: ContextVar[tuple[float, float]] = ContextVar("given", default=(float("inf"), 0.0))  # (until when, seconds)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Whatever is performed inside this context has so many seconds together: then it is ended as "timed out"."""
    token = _given.set(min(_given.get(), (time.monotonic() + seconds, seconds)))
    try:
        yield
    finally:
        _given.reset(token)


def seconds_left(timeout: float) -> float:
    """The seconds that an experiment may take: `timeout`, or what is left of `within`, whichever is less."""
    return max(0.0, min(timeout, _given.get()[0] - time.monotonic()))


def _timed_out(timeout: float) -> dict[str, Any]:
    """The outcome of what was ended because its time was over."""
    until, seconds = _given.get()
    return {
        "status": "timed out",
        "message": f"no result within {seconds if until <= time.monotonic() else timeout:g} s",
    }


def execute(
    experiment: Experiment, measure: str, timeout: float = 600, on_step: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Perform an experiment in a clean process; always returns an outcome (see `worker.perform`), with what it printed.

    Args:
        timeout: seconds after which the process and all that it started are ended: status "timed out".
        on_step: called with the number of a finished step, a few times a second at most.
    """
    deadline = time.monotonic() + seconds_left(timeout)
    with CleanProcess(experiment, measure) as process:
        try:
            while True:
                kind, content = process.receive(max(0.0, deadline - time.monotonic()))
                if kind == "outcome":
                    break
                if on_step:
                    on_step(content)
        except TimeoutError:
            content = _timed_out(timeout)
        except Ended as end:
            content = worker.died(end.code)
        output, errors = process.printed()
    return content | {"output": output, "errors": errors[-4000:]}


def alternate(
    first: Experiment,
    second: Experiment,
    turns: int,
    steps_per_turn: int = 1,
    timeout: float = 600,
    together: bool = True,
    on_turn: Callable[[], Any] | None = None,
) -> dict[str, Any]:
    """Let two experiments take turns (A B, B A, A B, ...), each in its clean process, and time every turn.

    Args:
        turns: pairs of turns.
        steps_per_turn: optimizer steps in a turn; the fastest one stands for the turn.
        together: both processes exist at once, one stopped while the other runs. False: each turn has a process of its
            own, for two experiments that do not fit on the device together.
        on_turn: called after each turn.

    Returns:
        {"first": seconds of each turn, "second": ..., "status", "message"}: a list is shorter than `turns` where an
        experiment ended early.
    """
    if hardware.is_rehearsal() and turns > 1:  # one turn shows all that can be seen
        found = alternate(first, second, 1, 1, timeout, together, on_turn)
        return found | {name: turns * found[name] for name in ("first", "second")}
    if hardware.is_rehearsal():
        first, second = (experiment.replace(warmup_steps=1) for experiment in (first, second))
    seconds: dict[str, list[float]] = {"first": [], "second": []}
    experiments = {"first": first, "second": second}
    deadline, on_turn = time.monotonic() + seconds_left(timeout), on_turn or (lambda: None)
    status = {"status": "ok", "message": ""}

    def outcome_of(name: str, process: CleanProcess) -> dict[str, Any]:
        while True:
            kind, content = process.receive(max(0.0, deadline - time.monotonic()))
            if kind != "step":
                return {} if kind == "turn" else content

    try:
        if together:
            with contextlib.ExitStack() as stack:
                processes = {}
                for name, experiment in experiments.items():
                    turn = (experiment.warmup_steps, steps_per_turn)
                    processes[name] = stack.enter_context(
                        CleanProcess(experiment.replace(steps=turns * steps_per_turn), "time", turn)
                    )
                    outcome = outcome_of(name, processes[name])
                    if outcome:
                        return _early(name, outcome)
                for number in range(turns):
                    for name in ("first", "second") if number % 2 == 0 else ("second", "first"):
                        processes[name].go()
                        if outcome := outcome_of(name, processes[name]):
                            return _early(name, outcome)
                        on_turn()
                for name, process in processes.items():
                    outcome = {}
                    while not outcome:  # a function may have more steps than there are turns
                        process.go()
                        outcome = outcome_of(name, process)
                    if outcome["status"] != "ok":
                        return _early(name, outcome)
                    every = outcome["timing"]["all_seconds"][: turns * steps_per_turn]
                    seconds[name] = [
                        min(every[i : i + steps_per_turn], key=float) for i in range(0, len(every), steps_per_turn)
                    ]
        else:
            for number in range(turns):
                for name in ("first", "second") if number % 2 == 0 else ("second", "first"):
                    outcome = execute(
                        experiments[name].replace(steps=steps_per_turn), "time", deadline - time.monotonic()
                    )
                    if outcome["status"] != "ok":
                        return _early(name, outcome)
                    seconds[name].append(min(outcome["timing"]["all_seconds"], key=float))
                    on_turn()
    except TimeoutError:
        status = _timed_out(timeout)
    except Ended as end:
        status = worker.died(end.code)
    return seconds | status


def _early(name: str, outcome: dict[str, Any]) -> dict[str, Any]:
    status, message = outcome.get("status", "crashed"), outcome.get("message", "")
    if status == "ok":
        status, message = "crashed", "it ended before its turns were over: give it more steps"
    return {"first": [], "second": [], "status": status, "message": f"the {name} one: {message}"}
