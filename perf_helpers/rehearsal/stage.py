"""Where rehearsals happen: a process of its own, with torch's CUDA build and the stand-in for the device."""

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle

from perf_helpers.lab import hardware
from perf_helpers.lab.runs import Run
from perf_helpers.lab.task import Task
from perf_helpers.rehearsal import build
from perf_helpers.rehearsal.cards import Card, card

_SIZE = struct.Struct("q")


@contextlib.contextmanager
def command(on: Card) -> Iterator[tuple[Path, dict[str, str]]]:
    """The Python that rehearses and the environment in which any program meets the card, for as long as this is open.

    Raises:
        RuntimeError: no rehearsal is possible here; with what is missing.
    """
    python = build.set_up()
    library = build.library(python)
    with tempfile.TemporaryDirectory(prefix="perf_helpers-rehearsal-") as folder:
        inside = [str(Path(__file__).with_name("inside")), os.environ.get("PYTHONPATH", "")]
        path = [str(python.parent), str(library / "bin"), os.environ.get("PATH", "")]
        libraries = [str(library), os.environ.get("LD_LIBRARY_PATH", "")]
        variables = {
            "LD_PRELOAD": str(library / "librehearsal.so"),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "PYTHONPATH": os.pathsep.join(filter(None, inside)),
            "PATH": os.pathsep.join(path),
            "IPYTHONDIR": str(Path(folder, "ipython")),
            "CUDA_MODULE_LOADING": "LAZY",
        }
        hidden = {"CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV"}
        kept = {name: value for name, value in os.environ.items() if name not in hidden}
        _write_startup(Path(folder, "ipython"))
        yield python, kept | variables | on.variables(str(Path(folder, "ledger")))


def run(words: list[str], on: Card) -> int:
    """Run a command where it meets the card; its exit code. "python" is the one that rehearses.

    Raises:
        ValueError: no command, or one that is not found.
        RuntimeError: no rehearsal is possible here; with what is missing.
    """
    if not words:
        raise ValueError("name a command after --, e.g. python train.py")
    with command(on) as (python, environment):
        if words[0] in ("python", "python3"):
            words = [str(python), *words[1:]]
        try:
            return subprocess.run(words, env=environment).returncode
        except FileNotFoundError as error:
            raise ValueError(f"no command {words[0]!r}") from error


def _write_startup(folder: Path) -> None:
    """Let each IPython kernel of a rehearsal go on where a cell needs values."""
    startup = folder / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "rehearsal.py").write_text("from perf_helpers.rehearsal import notebook\nnotebook.install()\n")


class Rehearsal(Executor):
    """Performs what it is given on a rehearsed card: `Lab(executor=Rehearsal(CARDS["a100"]))`.

    Use as a context manager, or `shutdown` it: the process behind it ends with it, and with this process.

    Raises:
        RuntimeError: no rehearsal is possible here; with what is missing.
    """

    def __init__(self, on: Card):
        self.card = on
        self._open = contextlib.ExitStack()
        python, environment = self._open.enter_context(command(on))
        self._process = subprocess.Popen(
            [
                python,
                "-c",
                f"import sys; sys.path[:0] = {_paths()!r}; from perf_helpers.rehearsal import stage; stage.serve()",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._threads = ThreadPoolExecutor(1)

    def submit(self, function: Callable, /, *arguments, **options) -> Future:
        return self._threads.submit(self._ask, cloudpickle.dumps((function, arguments, options)))

    def machine(self) -> hardware.Machine:
        """The machine that experiments see."""
        return self.submit(hardware.describe).result()

    def versions(self) -> dict[str, str | None]:
        """The packages that experiments run with."""
        return self.submit(hardware.versions).result()

    def _ask(self, request: bytes) -> Any:
        try:
            self._process.stdin.write(_SIZE.pack(len(request)) + request)
            self._process.stdin.flush()
            head = self._process.stdout.read(_SIZE.size)
            answer = self._process.stdout.read(_SIZE.unpack(head)[0])
        except (OSError, struct.error) as error:
            raise RuntimeError(f"the rehearsal ended (exit code {self._process.wait(10)})") from error
        failed, value = pickle.loads(answer)
        if failed:
            raise value
        return value

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._open.close()


def serve() -> None:
    """The other side of `Rehearsal`: answers requests from standard input until it closes."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no answer
    while len(head := requests.read(_SIZE.size)) == _SIZE.size:
        try:
            function, arguments, options = pickle.loads(requests.read(_SIZE.unpack(head)[0]))
            answer = cloudpickle.dumps((False, function(*arguments, **options)))
        except Exception as error:
            answer = cloudpickle.dumps((True, error))
        answers.write(_SIZE.pack(len(answer)) + answer)
        answers.flush()


def _paths() -> list[str]:
    """Where a request's functions may be found: the folder that the caller runs in."""
    return [os.getcwd()]


def rehearse(
    what: Task | Callable[[Task], Any],
    *,
    on: Card | str | None = None,
    compute_capability: tuple[int, int] | None = None,
    device_memory: int | float | str | None = None,
    task: Task | None = None,
    processes: int = 1,
    inference: bool = False,
    timeout: float = 600,
    **arguments,
) -> Run:
    """What a training takes on a card that is not here: allocated, reserved, the breakdown, or torch's own error.

    Args:
        what: the task to train with transformers' Trainer, or a function that takes `task`.
        on: a card or its name; or say `compute_capability` and `device_memory`, in bytes or as "16GB".
        processes: ranks, each on a device of its own.
        inference: forward passes without gradients.
        timeout: seconds.
        arguments: training arguments, as `Lab.train` takes them.

    Returns:
        A run as the lab's, with memory and without time; `status` is "out of memory" where it does not fit, and
        `message` torch's words.

    Raises:
        ValueError: unknown or wrong arguments.
        RuntimeError: no rehearsal is possible here; with what is missing.
    """
    from perf_helpers.lab.lab import Lab

    chosen = on if isinstance(on, Card) else card(on, compute_capability, device_memory)
    with Rehearsal(chosen.replace(devices=max(chosen.devices, processes))) as stage:
        lab = Lab("gpu", executor=stage, timeout=timeout)
        if not isinstance(what, Task):
            return lab.run(what, task=task, measure="memory", processes=processes)
        if inference:
            return lab.infer(str(what), task=what, **arguments)
        return lab.train(str(what), task=what, measure="memory", processes=processes, **arguments)
