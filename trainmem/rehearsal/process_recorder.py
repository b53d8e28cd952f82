"""Record a rehearsed program from inside its processes: its memory by phase, and how it ends. Make its uploads fail.

A process writes a JSON file if it used a device, failed, renamed a user's file, or saved weights without values. The
file is rewritten at each change of phase, after such a file operation, and when the process ends. `program_report`
reads the file, which has these fields:

    pid, rank, arguments     of the process
    devices, steps           number of devices that it uses; optimizer updates so far
    phases                   {phase: [allocated, reserved]}, the peaks in bytes on the fullest device
    ended, error             whether the process came to its end; the error that ended it: {kind, message, line}
    answers                  {what the rehearsal assumed, e.g. "comparisons of tensors, false": how often}
    saved                    files of weights that the program wrote, and that have no values
    opened                   files that the program opened for writing
    began                    when the rehearsal began, in seconds since 1970
    undo                     renamed files that are older than the rehearsal, each as [present path, path before]

The peaks in `phases` count from the first use of the device, even if the program resets torch's statistics. The program
itself reads the statistics that it would read on a card.
"""

import atexit
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainmem.core import stack_dumps
from trainmem.rehearsal import compiled_code, unwritten_files
from trainmem.unknown import NeedsLibrary, NeedsValues

KINDS = {NeedsValues: "needs values", NeedsLibrary: "needs a library", torch.OutOfMemoryError: "out of memory"}
SET_UP, FORWARD, BACKWARD, UPDATE = "set-up", "forward pass", "backward pass", "optimizer update"
BETWEEN, INFERENCE = "between steps", "evaluation and generation"
# HTTP methods that may change something elsewhere, and addresses of the Hub that use such a method only to query.
_CHANGES, _ASKS = {"POST", "PUT", "PATCH", "DELETE"}, ("/paths-info/", "/objects/batch")
_HERE = {"localhost", "127.0.0.1", "::1"}


class Uploads(PermissionError):
    """Raised if a rehearsed program tries to send something to another machine."""


class Recorder:
    """Record the peaks of this process's devices at each change of phase, in a JSON file of the process.

    Args:
        folder: folder for the files of all processes.
        values: the process's `Values`, which counts how often an unknown value was assumed.
    """

    def __init__(self, folder: str, values):
        self.folder, self.values = folder, values
        self.read, self.reset = torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
        self.files = unwritten_files.Files(self.write)
        self.begin()

    def begin(self) -> None:
        """Start recording with empty statistics. Called again in each process that is forked from this process."""
        self.path = Path(self.folder, f"{os.getpid()}.json")
        self.phase, self.steps, self.forwards, self.backwards, self.ended = SET_UP, 0, 0, 0, False
        self.has_gradients = True  # new ones since the last update
        self.phases: dict[str, list[int]] = {}
        self.seen: dict[int, dict] = {}  # device -> torch's statistics since the program last reset them
        self.devices: set[int] = set()
        self.inherited = self.files.count()

    def turn(self, phase: str) -> None:
        """Record the peaks of the phase that ends, and begin `phase`, e.g. "forward pass"."""
        if torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                found = self.read(device)
                self.seen[device] = _largest(self.seen.get(device), found)
                peaks = [found[name]["all"]["peak"] for name in ("allocated_bytes", "reserved_bytes")]
                if peaks[1]:
                    self.devices.add(device)
                    self.phases[self.phase] = [*map(max, peaks, self.phases.get(self.phase, peaks))]
                self.reset(device)
        if phase != self.phase:
            self.phase = phase
            self.write()

    def statistics(self, device: int) -> dict:
        """Return torch's memory statistics of the device with this index; peaks count from the program's last reset."""
        return _largest(self.seen.get(device), self.read(device))

    def forget(self, device: int) -> None:
        """Reset the peaks that the program sees for the device with this index; the recorded peaks are kept."""
        self.turn(self.phase)
        self.seen.pop(device, None)

    def before_forward(self, *_) -> None:
        if torch.compiler.is_compiling():
            return
        if not self.backwards and not self.forwards:
            self.turn(FORWARD if torch.is_grad_enabled() else INFERENCE)
        self.forwards += not self.backwards

    def after_forward(self, *_) -> None:
        if not torch.compiler.is_compiling():
            self.forwards = max(0, self.forwards - (not self.backwards))  # a compiled step may run backward inside

    def backward(self, plain: Callable, *args, **kwargs) -> Any:
        if compiled_code.is_traced():  # the compiler records a backward pass
            return plain(*args, **kwargs)
        if not self.backwards:
            self.turn(BACKWARD)
        self.backwards, self.has_gradients = self.backwards + 1, True
        try:
            return plain(*args, **kwargs)
        finally:
            self.backwards -= 1
            self.forwards = 0 if not self.backwards else self.forwards

    def before_update(self, *_) -> None:
        self.turn(UPDATE)

    def after_update(self, *_) -> None:
        self.steps += self.has_gradients  # DeepSpeed calls the optimizer once for each group of parameters
        self.has_gradients = False
        self.turn(BETWEEN)

    def compile_(self, plain: Callable, model: Any = None, *args, **kwargs) -> Any:
        """Compile a function with `plain`, which is torch.compile; each call of the result is a forward pass."""
        if model is None:
            return lambda model: self.compile_(plain, model, **kwargs)
        made = plain(model, *args, **kwargs)
        if isinstance(made, torch.nn.Module):
            return made  # hooks on modules see its calls

        @functools.wraps(made)
        def called(*args, **kwargs):
            if torch.compiler.is_compiling() or self.phase == UPDATE:
                return made(*args, **kwargs)
            self.before_forward()
            try:
                return made(*args, **kwargs)
            finally:
                self.after_forward()

        return called

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.turn(self.phase)
            self.write()

    def write(self) -> None:
        """Write this process's JSON file, but only if one of the reasons in the module's docstring applies."""
        error = getattr(sys, "last_value", None) if self.ended else None
        if not self.phases and error is None and self.files.count() == self.inherited:
            return
        found = {
            "pid": os.getpid(),
            "rank": os.environ.get("RANK"),
            "arguments": sys.argv,
            "devices": len(self.devices),
            "steps": self.steps,
            "phases": self.phases,
            "ended": self.ended,
            "error": error and described(error),
            "answers": self.values.answers,
            "saved": [*self.files.saved],
            "opened": [*self.files.older.opened],
            "began": self.files.older.start,
            "undo": self.files.older.undo,
        }
        with contextlib.suppress(OSError):  # the folder disappears with the rehearsal
            draft = self.path.with_suffix(".draft")
            draft.write_text(json.dumps(found))
            draft.replace(self.path)  # atomic: the file is complete even if this process is killed now


def described(error: BaseException) -> dict[str, str]:
    """Return {"kind": e.g. "out of memory", "message": text of the error, "line": the program's line that failed}.

    The described error is the first of a class in `KINDS` among `error` and its causes, or else `error` itself, with
    the kind "failed". "line" is a text made by `_line`.
    """
    chain, cause = [], error
    while cause is not None and not any(cause is each for each in chain):
        chain.append(cause)
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__  # the compiler's first
    kinds = [(each, kind) for each in chain for of, kind in KINDS.items() if isinstance(each, of)]
    # The message of an error of `torch.multiprocessing.spawn` is the traceback of another process.
    kinds += [(each, kind) for each in chain for of, kind in KINDS.items() if f"{of.__name__}: " in str(each)]
    kinds += [(each, KINDS[NeedsLibrary]) for each in chain if "not answered in a rehearsal" in str(each)]
    cause, kind = kinds[0] if kinds else (error, "failed")
    lines = [line for line in str(cause).strip().splitlines() if any(map(str.isalnum, line))] or [""]
    first = " ".join(lines[: 1 + lines[0].endswith(":")])  # with what follows a colon, e.g. why an import failed
    elsewhere = [
        traceback.FrameSummary(file, int(line), name, line=code)
        for file, line, name, code in _FRAME.findall(str(cause))
    ]
    frames = [frame for each in reversed(chain) for frame in reversed(traceback.extract_tb(each.__traceback__))]
    text = lines[-1] if elsewhere else f"{type(cause).__name__}: {first}"
    return {"kind": kind, "message": text[:500], "line": _line([*reversed(elsewhere), *frames])}


_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)\n\s+(.+)')


def _line(frames: list[traceback.FrameSummary]) -> str:
    """Return the program's innermost line as "file, line N, in function: code"; `frames`: innermost first."""
    own = (frame for frame in frames if not stack_dumps.is_library(frame.filename))
    # If all lines belong to libraries: the innermost one outside of torch and this package.
    frame = next(own, None) or next((frame for frame in frames if not _is_below(frame.filename)), None)
    return f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" if frame else ""


def _is_below(file: str) -> bool:
    """Return whether a file belongs to torch or this package."""
    return file.startswith((os.path.dirname(torch.__file__), str(Path(__file__).parents[1]), "<frozen"))


def _largest(seen: Any, new: Any) -> Any:
    """Return the allocator's statistics `new`, with each peak replaced by the one in `seen` if that is higher.

    `seen`: earlier statistics; None: there are none.
    """
    if not isinstance(new, dict) or not seen:
        return new
    return {
        key: max(value, seen[key]) if key == "peak" else _largest(seen.get(key), value) for key, value in new.items()
    }


def install(values, folder: str) -> None:
    """Start to record this process's memory peaks, and how the process ends, in a JSON file in `folder`.

    From now on, HTTP requests that would change something on another machine (e.g. uploads to the Hub) raise `Uploads`.
    `values`: the `Values` of this process, which tracks which tensors have known contents.
    """
    recorder = Recorder(folder, values)
    modules = torch.nn.modules.module
    modules.register_module_forward_pre_hook(recorder.before_forward)
    modules.register_module_forward_hook(recorder.after_forward, always_call=True)
    register_optimizer_step_pre_hook(recorder.before_update)
    register_optimizer_step_post_hook(recorder.after_update)
    for name in ("_cuda_memoryStats", "_accelerator_getDeviceStats"):
        _replace(torch._C, name, lambda plain, device: recorder.statistics(device))
    for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
        _replace(torch._C, name, lambda plain, device: recorder.forget(device))
    _replace(torch.autograd.graph, "_engine_run_backward", recorder.backward)
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward

    _replace(torch, "compile", recorder.compile_)
    warnings.filterwarnings("ignore", ".*when there are global hooks on modules")  # these are the recorder's
    _refuse_uploads()
    unwritten_files.install(recorder.files, values)
    os.register_at_fork(after_in_child=recorder.begin)
    atexit.register(recorder.end)

    def leave(plain, code):
        recorder.end()
        plain(code)

    _replace(os, "_exit", leave)


def _replace(owner: Any, name: str, replacement: Callable) -> None:
    """Replace the function `name` of `owner` by one that calls `replacement(original function, *arguments)`."""
    if plain := getattr(owner, name, None):
        setattr(owner, name, functools.wraps(plain)(functools.partial(replacement, plain)))


def _refuse_uploads() -> None:
    """Make HTTP requests that change another machine raise `Uploads`, whose message says to leave uploads out."""
    for module, kinds in {"requests": ["Session"], "httpx": ["Client", "AsyncClient"]}.items():
        if importlib.util.find_spec(module):
            for kind in kinds:
                owner = getattr(importlib.import_module(module), kind)
                owner.send = _asking_only(owner.send)


def _asking_only(plain: Callable) -> Callable:
    @functools.wraps(plain)
    def send(client, request, *args, **kwargs):
        address = str(request.url)
        is_elsewhere = urlsplit(address).hostname not in _HERE and not any(words in address for words in _ASKS)
        if request.method in _CHANGES and is_elsewhere:
            raise Uploads(
                f"a rehearsal sends nothing to other machines ({request.method} {address}): leave uploads out, e.g. "
                "push_to_hub and report_to"
            )
        return plain(client, request, *args, **kwargs)

    return send
