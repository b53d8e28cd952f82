"""In a clean process, which the fork server has just forked: receive one job, perform it, and send its result.

The server (`server_process`) calls `be_clean_process`, which does not return. `forkserver` has the process that sends
the job and reads what this one sends.
"""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import NoReturn

import cloudpickle

from trainmem.core import outcomes
from trainmem.measure import quiet

# Without it a look at the number of GPUs would initialise CUDA, and no fork could use a GPU any more: neither the
# server's, nor the ranks that a clean process forks (torch's launcher looks).
NO_DEVICE_BEFORE_FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
COURSE_SERVER = "PERF_HELPERS_SERVER"  # environment variable: the address of a course's server, see `course_server`
_SHORT = 80  # bytes of a folder's name that leave room for a socket's in it


@dataclass(frozen=True, slots=True)
class Assignment:
    """All that a clean process receives: its job, and the surroundings of the caller in which it performs it."""

    job: bytes  # by cloudpickle
    turn: tuple[int, int] | None  # (warm-up steps, steps in a turn), to stop after each; None: never stop
    own_folder: str  # for its temporary files
    working_folder: str
    environment: Mapping[str, str]
    path: list[str]  # of Python's imports
    threads: int | None  # to compute with; None: as many as torch chooses


def be_clean_process(channel: int, output: int, errors: int) -> NoReturn:
    """Perform the job that comes through the channel, as the first function of a fork; does not return.

    The arguments are descriptors: of the channel, and of the files that get what is printed.
    """
    code = 1
    try:
        os.setsid()
        die_with_parent()
        adopt_orphans()
        os.dup2(output, 1)
        os.dup2(errors, 2)
        with contextlib.suppress(OSError):  # if memory runs out, the kernel should end this and not the notebook
            Path("/proc/self/oom_score_adj").write_text("800")
        _perform(connection.Connection(channel))
        code = 0
    finally:
        flush()
        os._exit(code)


def _perform(channel: connection.Connection) -> None:
    """Receive an assignment, perform its job, send the result."""
    assignment: Assignment = channel.recv()
    _move_to(assignment)
    on_step = _stopping(channel, *assignment.turn) if assignment.turn else _reporting(channel)
    quiet.ASKING.ask = functools.partial(_ask_for_a_quiet_machine, channel)
    try:
        result = cloudpickle.dumps(cloudpickle.loads(assignment.job)(on_step))
    except BaseException as error:  # whatever ended it, the caller gets a result
        result = cloudpickle.dumps(outcomes.failed(error))
    flush()  # before the result: whoever gets it reads what was printed
    channel.send(("result", result))


def _move_to(assignment: Assignment) -> None:
    """Take over the caller's surroundings: folder, environment, imports, threads."""
    os.chdir(assignment.working_folder)
    os.environ.clear()
    os.environ.update(assignment.environment | NO_DEVICE_BEFORE_FORKS)
    for name in (COURSE_SERVER, quiet.LOCK):  # the lesson's, not that of what it measures
        os.environ.pop(name, None)
    if assignment.threads:
        import torch

        torch.set_num_threads(assignment.threads)
    sys.path[:], tempfile.tempdir = assignment.path, None  # the server's may be another one
    multiprocessing.current_process()._config["tempdir"] = _short_name(assignment.own_folder)


def _short_name(folder: str) -> str:
    """Return another name of a folder if its own is too long for sockets (107 bytes): DataLoader's workers would hang
    (cpython issue 93852). Only Linux has one."""
    if len(os.fsencode(folder)) <= _SHORT or not os.path.isdir("/proc/self/fd"):
        return folder
    return f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_RDONLY)}"


def own_folder() -> str | None:
    """Return the folder for temporary files that ends with this clean process; None in a process that is not one.

    It is the one that `multiprocessing` knows, so that what its workers leave there is removed too. Ranks that a clean
    process forks have the same.
    """
    return multiprocessing.current_process()._config.get("tempdir")


def _ask_for_a_quiet_machine(channel: connection.Connection, need: quiet.Need) -> None:
    """Tell the caller what this process needs of the machine, and wait for it; nothing needs no wait."""
    channel.send(("quiet", need))
    if need:
        channel.recv()


def _reporting(channel: connection.Connection) -> Callable[[int], None]:
    """Return a function that sends the caller the numbers of steps, a few times a second."""
    last = 0.0

    def on_step(number: int) -> None:
        nonlocal last
        if time.monotonic() - last > 0.3:  # seldom: a parent that wakes up takes time from the steps
            last = time.monotonic()
            channel.send(("step", number))

    return on_step


def _stopping(channel: connection.Connection, warmup_steps: int, steps_per_turn: int) -> Callable[[int], None]:
    """Return a function that stops after each turn until the caller lets it go on."""

    def on_step(number: int) -> None:
        if number >= warmup_steps and (number - warmup_steps) % steps_per_turn == 0:
            import torch

            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            channel.send(("turn", number))
            channel.recv()

    on_step.takes_turns = True
    return on_step


# ---- also for other processes


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends (Linux; elsewhere nothing happens)."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parents end (Linux; elsewhere nothing happens)."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _prctl(option: int, value: int) -> None:
    getattr(ctypes.CDLL(None), "prctl", lambda *_: None)(option, value)


def flush() -> None:
    """Write out what this process has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def remove(folder: str) -> None:
    """Remove a folder into which processes that have just been killed may still write for a moment."""
    for _ in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.05)
