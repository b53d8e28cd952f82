"""The fork server: import the libraries once, fork a fresh subprocess per request and collect ended subprocesses.

`forkserver` starts this process with `serve`. A fork continues in `forked`. The server never touches a device, because
its forks could not use it afterwards.
"""

import contextlib
import gc
import importlib
import os
import signal
from collections.abc import Container, Iterable
from multiprocessing import connection, reduction
from typing import NoReturn
from unittest.mock import patch

import psutil

from trainmem.core import arguments, hardware, optional_packages
from trainmem.measure import forked


def serve(descriptor: int, preload: Iterable[str], with_bitsandbytes: bool) -> NoReturn:
    """Import the libraries, then serve the process at the other end of `descriptor`; never return.

    Args:
        descriptor: file descriptor of the channel to that process.
        preload: names of the modules to import.
        with_bitsandbytes: import bitsandbytes after the first fork, so that only later forks have it.
    """
    has_gpus = import_libraries(preload)
    serve_caller(connection.Connection(descriptor), has_gpus, with_bitsandbytes)


def import_libraries(preload: Iterable[str]) -> bool:
    """Import the libraries of trainings and the modules named in `preload`, so that every later fork has them already;
    return whether this machine has GPUs.
    """
    gc.disable()  # until all is imported, see `_import`
    has_gpus = bool(hardware.describe().gpus)
    if has_gpus:
        _import_torchao()
    optional_packages.import_peft()
    _import(preload)
    if not has_gpus:  # DeepSpeed looks for them
        _import(optional_packages.imported_by_trainings())
    arguments.known()  # reads transformers' source, once for all forks
    return has_gpus


def serve_caller(control: connection.Connection, has_gpus: bool, with_bitsandbytes: bool = False) -> NoReturn:
    """Fork and collect fresh subprocesses until the caller ends or sends "end"; then end them and remove their folders.

    Requests are ("fork", folder, whether the job needs bitsandbytes), followed by three descriptors (channel, output,
    errors) and answered with a process id; and ("collect", process id), answered with its exit code.

    Args:
        control: connection to the caller, from which the requests come.
        has_gpus: whether this machine has GPUs; then bitsandbytes, which queries them, is never imported here.
        with_bitsandbytes: import bitsandbytes after the first fork, so that only later forks have it.
    """
    bitsandbytes = () if has_gpus else ("bitsandbytes",)
    parent, folders = os.getppid(), {}  # the folder of each living fork
    forked.adopt_orphans()
    with contextlib.suppress(OSError, EOFError):
        while os.getppid() == parent:
            if not control.poll(2):
                continue
            match control.recv():
                case "fork", folder, needs_bitsandbytes:
                    if needs_bitsandbytes:
                        _import(bitsandbytes)
                    pid = _fork_clean_process(control)
                    folders[pid] = folder
                    control.send(pid)
                    if with_bitsandbytes:
                        _import(bitsandbytes)
                case "collect", pid:
                    folders.pop(pid, None)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    end_children(but=folders)
                    control.send(code)
                case "end":
                    break
    for pid, folder in folders.items():
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        forked.remove(folder)
    end_children()
    os._exit(0)


def _fork_clean_process(control: connection.Connection) -> int:
    """Receive a fresh subprocess's three file descriptors (channel, standard output, standard error) through `control`;
    fork the subprocess and return its process id.
    """
    descriptors = [reduction.recv_handle(control) for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        control.close()
        forked.be_clean_process(*descriptors)
    for inherited in descriptors:
        os.close(inherited)
    return pid


def end_children(but: Container[int] = ()) -> None:
    """End the children of this process except those whose ids are in `but`, and wait for them.

    The descendants of an ended child become children of this process (`forked.adopt_orphans`), and are ended as well.
    A fresh subprocess that is still alive keeps its descendants.
    """
    while left := [child for child in psutil.Process().children() if child.pid not in but]:
        for child in left:
            child.kill()
            os.waitpid(child.pid, 0)


def _import(names: Iterable[str]) -> None:
    """Import the modules called `names`, so that every later fork has them; skip those that cannot be imported."""
    gc.disable()  # collections during the imports would take a quarter of the time
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # so that a fork's collector does not write to, and thereby copy, shared memory
    gc.enable()


def _import_torchao() -> None:
    """Import torchao if it is installed, because transformers imports it, but hide the GPUs meanwhile.

    torchao would query the GPUs, and then no fork could use one.
    """
    import torch

    with patch.object(torch.cuda, "is_available", lambda *_, **__: False), contextlib.suppress(ImportError):
        importlib.import_module("torchao.quantization")
        importlib.import_module("torchao.prototype.safetensors.safetensors_support")
