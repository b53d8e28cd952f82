"""Perform one job in a fresh subprocess, which the fork server has forked, and send the job's result.

The server (`server_process`) calls `perform`. The caller's side is in `forkserver`: it sends the job to the server, and
reads the result.
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

import cloudpickle

from trainmem.core import outcomes
from trainmem.measure import quiet

# Without it, counting the GPUs would initialize CUDA, and no fork could use a GPU afterwards: neither the server's
# forks nor the ranks that a fresh subprocess forks (torch's launcher counts GPUs).
NO_DEVICE_BEFORE_FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
COURSE_SERVER = "PERF_HELPERS_SERVER"  # environment variable: the address of a course's server, see `course_server`
_SHORT = 80  # bytes of a folder's path that leave room for a socket's name in it


@dataclass(frozen=True, slots=True)
class Assignment:
    """Hold what a fresh subprocess needs: its pickled job, its temporary folder, and the caller's settings.

    The settings are the working folder, the environment, the import path and the number of threads.
    """

    job: bytes  # pickled by cloudpickle
    turn: tuple[int, int] | None  # (warm-up steps, steps in a turn), to stop after each; None: never stop
    own_folder: str  # for its temporary files
    working_folder: str
    environment: Mapping[str, str]
    path: list[str]  # Python's import path
    threads: int | None  # to compute with; None: torch's default


def perform(channel: int, assignment: Assignment) -> int:
    """Perform a job in this newly forked process, send its result through the channel, and return the exit code.

    `channel`: the channel's file descriptor.
    """
    with contextlib.suppress(OSError):  # if memory runs out, the kernel should kill this process, not the notebook
        Path("/proc/self/oom_score_adj").write_text("800")
    caller = connection.Connection(channel)
    _move_to(assignment)
    on_step = _stopping(caller, *assignment.turn) if assignment.turn else _reporting(caller)
    quiet.ASKING.ask = functools.partial(_ask_for_a_quiet_machine, caller)
    try:
        result = cloudpickle.dumps(cloudpickle.loads(assignment.job)(on_step))
    except BaseException as error:  # the caller gets a result in any case
        result = cloudpickle.dumps(outcomes.failed(error))
    flush()  # before the result, because its receiver then reads the output
    caller.send(("result", result))
    return 0


def _move_to(assignment: Assignment) -> None:
    """Adopt the caller's working folder, environment, import path and number of threads."""
    os.chdir(assignment.working_folder)
    os.environ.clear()
    os.environ.update(assignment.environment | NO_DEVICE_BEFORE_FORKS)
    for name in (COURSE_SERVER, quiet.LOCK):  # these are for the lesson, not for the code that it measures
        os.environ.pop(name, None)
    if assignment.threads:
        import torch

        torch.set_num_threads(assignment.threads)
    sys.path[:], tempfile.tempdir = assignment.path, None  # the server's folder may be another one
    multiprocessing.current_process()._config["tempdir"] = _short_name(assignment.own_folder)


def _short_name(folder: str) -> str:
    """Return a folder's path, or a short alias if the path is too long for a socket's address (107 bytes)."""
    # With a longer path, the workers of a DataLoader hang (cpython issue 93852). Aliases, in /proc, need Linux.
    if len(os.fsencode(folder)) <= _SHORT or not os.path.isdir("/proc/self/fd"):
        return folder
    return f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_RDONLY)}"


def own_folder() -> str | None:
    """Return the temporary folder that is removed when this fresh subprocess ends; None in other processes.

    `multiprocessing` uses the same folder, so the files that its workers leave are removed, too. Ranks that a fresh
    subprocess forks share its folder.
    """
    return multiprocessing.current_process()._config.get("tempdir")


def _ask_for_a_quiet_machine(channel: connection.Connection, need: quiet.Need) -> None:
    """Ask the caller to reserve the part of the machine that `need` names, and wait until this part is granted."""
    channel.send(("quiet", need))
    if need:  # not `Need.SHARE`, with which the process may share the machine
        channel.recv()


def _reporting(channel: connection.Connection) -> Callable[[int], None]:
    """Return a function that sends a finished step's number through `channel`, at most a few times a second."""
    last = 0.0

    def on_step(number: int) -> None:
        nonlocal last
        if time.monotonic() - last > 0.3:  # not more often: a parent that wakes up takes time from the steps
            last = time.monotonic()
            channel.send(("step", number))

    return on_step


def _stopping(channel: connection.Connection, warmup_steps: int, steps_per_turn: int) -> Callable[[int], None]:
    """Return a function that pauses a training after its warm-up and each turn; call it with each step's number."""

    def on_step(number: int) -> None:
        if number >= warmup_steps and (number - warmup_steps) % steps_per_turn == 0:
            import torch

            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            channel.send(("turn", number))
            channel.recv()

    on_step.takes_turns = True
    return on_step


# ---- used by other processes, too


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends (Linux; elsewhere nothing happens)."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (Linux; elsewhere nothing happens)."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _prctl(option: int, value: int) -> None:
    getattr(ctypes.CDLL(None), "prctl", lambda *_: None)(option, value)


def flush() -> None:
    """Flush standard output and standard error."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def remove(folder: str) -> None:
    """Remove a folder; retry for two seconds, because processes that were just killed may still write into it.

    Never raise: a folder that cannot be removed stays.
    """
    for _ in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.05)
