"""The fork server: import the libraries once, fork a fresh subprocess per connection, and end it with the connection.

`forkserver` starts this process with `serve`. A fork continues in `forked`. The server never touches a device, because
its forks could not use it afterwards.
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from multiprocessing import connection, reduction
from typing import NoReturn
from unittest.mock import patch

import psutil

from trainmem.core import arguments, hardware, optional_packages
from trainmem.measure import forked


@dataclass(frozen=True, slots=True)
class Request:
    """Describe a process that the server is to fork."""

    function: Callable[..., int]  # called in the fork, returns the exit code
    arguments: tuple
    folder: str = ""  # removed when the fork has ended
    needs_bitsandbytes: bool = False


def serve(descriptor: int, parent: int, preload: Iterable[str], with_bitsandbytes: bool) -> NoReturn:
    """Import the libraries, then fork one process per connection until the parent process ends; never return.

    A caller connects and sends the tuple (a `Request`, number of file descriptors), then these descriptors: standard
    output and standard error of the fork, and any others for the request's function. The server answers with the
    fork's process id. When the caller sends another message, or closes the connection, the server ends the fork and
    all processes that the fork left behind. Then the server removes the folder `Request.folder`, and answers with the
    fork's exit code. If the fork ends by itself, the server still waits for the message or for the closing of the
    connection, and then sends the exit code.

    Args:
        descriptor: file descriptor of the listening socket. The folder of the socket's file is removed at the end.
        parent: process id of the parent process.
        preload: names of the modules to import.
        with_bitsandbytes: import bitsandbytes after the first fork, so that only later forks have it.
    """
    listener = socket.socket(fileno=descriptor)
    has_gpus = import_libraries(preload)
    bitsandbytes = () if has_gpus else ("bitsandbytes",)  # it queries them
    forks: dict[connection.Connection, tuple[int, str]] = {}  # (process id, folder) by connection
    forked.adopt_orphans()
    while os.getppid() == parent:
        for ready in connection.wait([listener, *forks], 2):
            if ready is not listener:
                _end(ready, forks)
                continue
            control = connection.Connection(listener.accept()[0].detach())
            with contextlib.suppress(OSError, EOFError):  # the caller has ended
                request, count = control.recv()
                descriptors = [reduction.recv_handle(control) for _ in range(count)]
                if request.needs_bitsandbytes:
                    _import(bitsandbytes)
                pid = _forked(request, descriptors, [listener, control, *forks])
                forks[control] = pid, request.folder
                control.send(pid)
                if with_bitsandbytes:
                    _import(bitsandbytes)
    for control in [*forks]:
        _end(control, forks)
    forked.remove(os.path.dirname(listener.getsockname()))
    os._exit(0)


def _forked(request: Request, descriptors: list[int], inherited: list[connection.Connection | socket.socket]) -> int:
    """Fork a process, in a process group of its own, that calls the request's function; return the process id.

    `descriptors`: standard output, standard error, others for the function; `inherited`: to be closed in the fork.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            forked.die_with_parent()
            forked.adopt_orphans()  # otherwise the server would end them when another of its forks ends
            for each in inherited:
                each.close()
            output, errors, *others = descriptors
            os.dup2(output, 1)
            os.dup2(errors, 2)
            code = request.function(*others, *request.arguments)
        finally:
            forked.flush()
            os._exit(code)
    os.setpgid(pid, pid)  # here: whoever gets the id may at once send a signal to the group
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _end(control: connection.Connection, forks: dict[connection.Connection, tuple[int, str]]) -> None:
    """End a fork and the processes that the fork left behind; send the exit code through the connection `control`."""
    pid, folder = forks.pop(control)
    with contextlib.suppress(OSError):  # it has ended
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    end_children(but=[pid for pid, _ in forks.values()])
    if folder:
        forked.remove(folder)
    with control, contextlib.suppress(OSError):  # the process that connected has ended
        control.send(code)


def end_children(but: Container[int] = ()) -> None:
    """End the children of this process except those whose ids are in `but`, and wait for them.

    The descendants of an ended child become children of this process (`forked.adopt_orphans`), and are ended as well.
    The descendants of a living fork of the server are not ended: if their parent ends, the fork becomes their parent.
    """
    while left := [child for child in psutil.Process().children() if child.pid not in but]:
        for child in left:
            child.kill()
            os.waitpid(child.pid, 0)


def import_libraries(preload: Iterable[str]) -> bool:
    """Import the libraries of trainings and the modules named in `preload`; return whether this machine has GPUs.

    Every later fork then has these modules already.
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


def _import(names: Iterable[str]) -> None:
    """Import the modules called `names`, so that every later fork has them; skip those that cannot be imported."""
    gc.disable()  # collections during the imports would take a quarter of the time
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # so that a fork's collector does not write to, and thereby copy, shared memory
    gc.enable()


def _import_torchao() -> None:
    """Import torchao with the GPUs hidden: if torchao queried a GPU, no fork could use it."""
    import torch

    with patch.object(torch.cuda, "is_available", lambda *_, **__: False), contextlib.suppress(ImportError):
        importlib.import_module("torchao.quantization")  # transformers imports torchao
        importlib.import_module("torchao.prototype.safetensors.safetensors_support")
