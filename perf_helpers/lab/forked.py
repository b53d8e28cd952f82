"""The fork server, and what a fork of it does first; see `forkserver` for the process that they serve.

The server has imported what jobs need and touched no device. A fork of it receives where it is and what to do, does it,
and sends what came of it.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import connection, reduction
from pathlib import Path
from unittest.mock import patch

import cloudpickle
import psutil

from perf_helpers.lab import hardware, optional_packages, outcomes, quiet

# What the server imports, and all that these import, so that a clean process has it at no cost.
PRELOAD = (
    "torch.distributed.launcher.api",
    "datasets",
    "transformers.trainer",
    "transformers.models.bert.modeling_bert",
    "perf_helpers.lab.memory_meter",
    "perf_helpers.lab.time_meter",
    "perf_helpers.estimate.cuda",
    "perf_helpers.estimate.device",
    "perf_helpers.estimate.prediction",
)
# Without it a look at the number of GPUs would initialise CUDA, and no fork could use a GPU any more: neither the
# server's, nor the ranks that a clean process forks (torch's launcher looks).
NO_DEVICE_BEFORE_FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# The environment variable with the socket of a course's server.
COURSE_SERVER = "PERF_HELPERS_SERVER"

own_folder: str | None = None  # of the clean process that this is; None: this is none


def serve(descriptor: int, with_bitsandbytes: bool, unused: Iterable[str]) -> None:
    """Be the server of one process. `unused`: packages that libraries would import although no job uses them."""
    has_gpus = _import_libraries(unused)
    _serve(connection.Connection(descriptor), has_gpus, with_bitsandbytes)


def serve_course(descriptor: int, preload: Iterable[str]) -> None:
    """Be the server of a course: fork for each process that connects to the socket.

    A fork is what it is asked for: "serve", a server of the process that asks; or ("module", name, arguments,
    environment, folder) and then a descriptor for what it prints, `python -m name`, whose keeper sends its exit code.
    It first sends its process id.

    Args:
        preload: further modules to import.
    """
    die_with_parent()
    has_gpus = _import_libraries()
    _preload(preload)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody collects them: no zombies
    listener = socket.socket(fileno=descriptor)
    while True:
        joined = connection.Connection(listener.accept()[0].detach())
        if os.fork() == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                match joined.recv():
                    case "serve":
                        die_with_parent()
                        joined.send(os.getpid())
                        _serve(joined, has_gpus)
                    case "module", *what:
                        _keep(joined, reduction.recv_handle(joined), *what)
            finally:
                os._exit(1)
        joined.close()


def _keep(joined: connection.Connection, output: int, *what) -> None:
    """Fork a module, wait for its end, end all that it leaves, and send its exit code. The end of the connection ends
    the module."""
    _prctl(36, 1)  # as the server of one process
    if (pid := os.fork()) == 0:
        joined.close()
        os.setsid()
        die_with_parent()
        _be_module(output, *what)
    os.close(output)
    joined.send(pid)
    descriptor = os.pidfd_open(pid)
    if joined in connection.wait([joined, descriptor]):
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _end_children()
    with contextlib.suppress(OSError):
        joined.send(code)
    os._exit(0)


def _be_module(output: int, name: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Do in this fork what `python -m name` does; does not return."""
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
        _flush()
        os._exit(code)


def _import_libraries(unused: Iterable[str] = ()) -> bool:
    """Import what jobs need; return whether there are GPUs."""
    gc.disable()  # until all is imported, see `_preload`
    hidden = dict.fromkeys(unused)  # what is None here counts as not installed
    sys.modules.update(hidden)
    has_gpus = bool(hardware.describe().gpus)
    if has_gpus:
        _import_torchao()
    optional_packages.import_peft()
    _preload(PRELOAD)
    for name in hidden:
        sys.modules.pop(name, None)
    return has_gpus


def _serve(control: connection.Connection, has_gpus: bool, with_bitsandbytes: bool = False) -> None:
    """The fork server's loop: forks when asked to, and collects those that ended. The end of its connection ends and
    removes everything."""
    parent, children = os.getppid(), {}
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: become the parent of what descendants leave
    with contextlib.suppress(OSError, EOFError):
        while os.getppid() == parent:
            if not control.poll(2):
                continue
            match control.recv():
                case "fork", folder, needs_bitsandbytes:
                    if needs_bitsandbytes and not has_gpus:
                        _preload(["bitsandbytes"])
                    descriptors = [reduction.recv_handle(control) for _ in range(3)]
                    pid = os.fork()
                    if pid == 0:
                        control.close()
                        _child(*descriptors)
                    for inherited in descriptors:
                        os.close(inherited)
                    children[pid] = folder
                    control.send(pid)
                    if with_bitsandbytes and not has_gpus:
                        _preload(["bitsandbytes"])
                case "wait", pid:
                    children.pop(pid, None)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    _end_children(but=children)
                    control.send(code)
    for pid, folder in children.items():
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        remove(folder)
    _end_children()
    os._exit(0)


def _end_children(but: Iterable[int] = ()) -> None:
    """End children, and what they leave: while a fork lives it adopts its own's, so that none of these comes here."""
    while left := [child for child in psutil.Process().children() if child.pid not in but]:
        for child in left:
            child.kill()
            os.waitpid(child.pid, 0)


def _preload(names: Iterable[str]) -> None:
    """Import what jobs need; a module that this version of a library lacks is left out."""
    gc.disable()  # it would go through all that is imported, again and again: a quarter of the time
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # so that a fork's collector does not copy what it shares
    gc.enable()


def _import_torchao() -> None:
    """transformers imports torchao where it is installed, which asks a GPU what it can do: no fork could use the GPU
    afterwards. Here it finds none to ask."""
    import torch

    with patch.object(torch.cuda, "is_available", lambda *_, **__: False), contextlib.suppress(ImportError):
        importlib.import_module("torchao.quantization")
        importlib.import_module("torchao.prototype.safetensors.safetensors_support")


def _child(channel: int, output: int, errors: int) -> None:
    """The first lines of a fork; does not return."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        _prctl(36, 1)  # as the server
        os.dup2(output, 1)
        os.dup2(errors, 2)
        with contextlib.suppress(OSError):  # if memory runs out, the kernel should end this and not the notebook
            Path("/proc/self/oom_score_adj").write_text("800")
        main(connection.Connection(channel))
        code = 0
    finally:
        _flush()
        os._exit(code)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends (Linux; elsewhere nothing happens)."""
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _prctl(option: int, value: int) -> None:
    getattr(ctypes.CDLL(None), "prctl", lambda *_: None)(option, value)


def main(channel: connection.Connection) -> None:
    """Receive where we are and what to do, do it, send what came of it."""
    global own_folder
    place, job, turn = channel.recv()
    own_folder = place["own"]
    os.chdir(place["folder"])
    os.environ.clear()
    os.environ.update(place["environment"] | NO_DEVICE_BEFORE_FORKS)
    for name in (COURSE_SERVER, quiet.LOCK):  # the lesson's, not that of what it measures
        os.environ.pop(name, None)
    if place["threads"]:
        import torch

        torch.set_num_threads(place["threads"])
    sys.path[:], tempfile.tempdir = place["path"], None  # the server's may be another one
    # DataLoader's workers keep sockets there, and leave them when they are killed. Where a socket's name is over 107
    # bytes, as under a long TMPDIR, they hang (cpython issue 93852): on Linux the folder has a short name.
    short = f"/proc/{os.getpid()}/fd/{os.open(own_folder, os.O_RDONLY)}" if os.path.isdir("/proc/self/fd") else None
    multiprocessing.current_process()._config["tempdir"] = short or own_folder
    on_step = _turns(channel, *turn) if turn else _reporter(channel)
    quiet.ASKING.ask = functools.partial(_ask, channel)
    try:
        result = cloudpickle.dumps(cloudpickle.loads(job)(on_step))
    except BaseException as error:  # whatever ended it, the caller gets a result
        result = cloudpickle.dumps(outcomes.failed(error))
    _flush()  # before the result: whoever gets it reads what was printed
    channel.send(("result", result))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _ask(channel, is_wanted: bool) -> None:
    """Ask whoever waits for this process for a quiet machine, or give it back."""
    channel.send(("quiet", is_wanted))
    if is_wanted:
        channel.recv()


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


def remove(folder: str) -> None:
    """Remove a folder into which processes that have just been killed may still write for a moment."""
    for _ in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.05)
