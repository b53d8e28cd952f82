"""Run rehearsals in a process of their own, with torch's CUDA build and the stub CUDA runtime."""

import contextlib
import difflib
import functools
import os
import pickle
import select
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import Any

import cloudpickle

from trainmem.cards import Card, card
from trainmem.core import optional_packages
from trainmem.core.task import Task
from trainmem.estimate.allocator_replay import place
from trainmem.measure import forked
from trainmem.measure.runner import Runner
from trainmem.records import Run
from trainmem.rehearsal import build, program_report
from trainmem.rehearsal.program_report import ProgramRun
from trainmem.texts import arguments_of_kind, positive, whole_number

SECONDS_TO_END = 30  # for a command that the user interrupted, e.g. to save its state


def rehearse(
    what: Task | Callable[[Task], Any],
    *,
    on: Card | str | None = None,
    compute_capability: tuple[int, int] | None = None,
    device_memory: int | float | str | None = None,
    task: Task | None = None,
    processes: int = 1,
    inference: bool = False,
    snapshot: str | os.PathLike | None = None,
    timeout: float = 600,
    **arguments,
) -> Run:
    """Rehearse a training or a function on a GPU that this machine need not have; return its memory.

    Args:
        what: the task to train with transformers' Trainer, or a function that takes `task`.
        on: a card or its name, e.g. "a100"; None: a GPU that the next two arguments describe, both of them required.
        compute_capability, device_memory: compute capability, e.g. (9, 0), and memory in bytes or as "16GB"; None: as
            of the card named by `on`.
        task: the task for the function; None: the default task of the "gpu" profile.
        processes: number of ranks, each on a separate device; 1 for `inference`.
        inference: if `what` is a task: run forward passes without gradients instead of a training.
        snapshot: a file for torch's own memory snapshot, see `Rehearsal`; None: no snapshot.
        timeout: seconds that the rehearsal may take.
        arguments: training arguments, as in `Runner.train`; only if `what` is a task.

    Returns:
        A run with the allocated and reserved bytes and the breakdown of the peak by category, but without times. If
        the training does not fit, the run's `status` is "out of memory" and its `message` is torch's.

    Raises:
        ValueError: an unknown argument, or a value out of range.
        RuntimeError: this machine cannot rehearse.
    """
    arguments_of_kind(rehearse, locals())
    whole_number("processes", processes, most=16)
    if inference and processes > 1:
        raise ValueError(f"processes={processes}: an inference runs in one process")
    if not isinstance(what, Task) and (inference or arguments):
        raise ValueError(f"{', '.join([*arguments]) or 'inference'}: only for a task; set it in the function instead")
    positive("timeout", timeout)
    chosen = on if isinstance(on, Card) else card(on, compute_capability, device_memory)
    with Rehearsal(replace(chosen, devices=max(chosen.devices, processes)), snapshot) as stage:
        runner = Runner("gpu", executor=stage, timeout=timeout)
        if not isinstance(what, Task):
            return runner.run(what, task=task, measure="memory", processes=processes)
        if inference:
            return runner.infer(str(what), task=what, **arguments)
        return runner.train(str(what), task=what, measure="memory", processes=processes, **arguments)


# The options of `perf-helpers rehearse` that apply to a user's command.
_FOR_A_COMMAND = ("--card", "--compute-capability", "--device-memory", "--processes", "--assume", "--json")


def own_command(typed: list[str]) -> list[str] | None:
    """Return the words after "--" in `typed`, the words of a command line; None if there is no "--".

    Raises:
        ValueError: an option before "--" that `perf-helpers rehearse` cannot combine with a command.
    """
    if "--" not in typed:
        if "--assume" in typed:
            raise ValueError("--assume needs a command of yours: put it after --, e.g. -- python train.py")
        return None
    place = typed.index("--")
    names = [word.partition("=")[0] for word in typed[:place] if word.startswith("--")]
    if ignored := [name for name in names if name not in _FOR_A_COMMAND]:
        name = ignored[0]
        if name in ("--model", "--function"):
            raise ValueError(f"{name} and a command after -- cannot both be rehearsed: leave one out")
        if near := difflib.get_close_matches(name, _FOR_A_COMMAND, 1, 0.8):
            raise ValueError(f"unknown option {name}. Did you mean {near[0]}?")
        inside = "in a command of yours call torch.cuda.memory._dump_snapshot"
        remedy = inside if name == "--snapshot" else "leave it out, or put it after --"
        raise ValueError(f"{name} needs --model or --function: {remedy}")
    return typed[place + 1 :]


def run(words: list[str], on: Card, *, assumes: bool = False, output: int | None = None) -> ProgramRun:
    """Run a command in a rehearsal of a card, and return how it ended and what memory it took.

    Args:
        words: the command; "python" is replaced by the Python that rehearses.
        on: the simulated card.
        assumes: whether code that reads an unknown value of a tensor gets a value assumed by fixed rules, so that the
            program continues; see `known_values`.
        output: file descriptor that gets what the program prints; None: standard output.

    Raises:
        ValueError: the command is empty, not found or not executable.
        RuntimeError: this machine cannot rehearse.
    """
    if not words:
        raise ValueError("no command follows --: give one, e.g. -- python train.py")
    with command(on) as (python, environment), tempfile.TemporaryDirectory(prefix="perf_helpers-report-") as folder:
        if words[0] in ("python", "python3"):
            words = [str(python), *words[1:]]
        about = {"REHEARSAL_REPORT": folder, "REHEARSAL_BEGAN": str(time.time()), "PYTHONFAULTHANDLER": "1"}
        about |= {"REHEARSAL_ASSUMES": "1"} if assumes else {}
        about |= {name: "disabled" for name in ("WANDB_MODE", "COMET_MODE") if name not in os.environ}
        try:
            code, interrupted = _ended(subprocess.Popen(words, env=environment | about, stdout=output))
        except OSError as error:  # not found, or not executable
            if words[0].endswith(".py"):
                raise ValueError(f"put python before {words[0]}: -- python {' '.join(words)}") from error
            if not isinstance(error, FileNotFoundError):
                raise ValueError(f"command {words[0]!r} cannot be run: {error.strerror}") from error
            raise ValueError(f"command {words[0]!r} was not found: give one that is on PATH, or its path") from error
        return program_report.read(folder, code, on, assumes, interrupted)


def _ended(process: subprocess.Popen) -> tuple[int, bool]:
    """Wait until a command ends; return its exit code, and whether Ctrl-C or SIGTERM interrupted this process."""

    def interrupt(*_) -> None:  # on SIGTERM, e.g. from `timeout` or a cancelled CI job
        process.send_signal(signal.SIGINT)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()  # only it may set what a signal does
    before = signal.signal(signal.SIGTERM, interrupt) if is_main else None
    try:
        return process.wait(), False
    except KeyboardInterrupt:  # Ctrl-C in a terminal interrupts the command, too
        try:
            return process.wait(SECONDS_TO_END), True
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            process.kill()
            return process.wait(), True
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def command(on: Card) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield (path of a Python for rehearsals, {name: value} of environment variables).

    A program that runs with these variables sees the simulated card `on`. The variables are valid inside this context.

    Raises:
        RuntimeError: this machine cannot rehearse.
    """
    python = build.set_up()
    library = build.library(python)
    if doubts := build.doubts(python, library):
        _warn(doubts)
    with tempfile.TemporaryDirectory(prefix="perf_helpers-rehearsal-") as folder:
        inside, tools = Path(__file__).with_name("inside"), [python.parent, library / "bin"]
        first = {"LD_LIBRARY_PATH": [library], "PYTHONPATH": [inside, *optional_packages.offered()], "PATH": tools}
        paths = {
            name: os.pathsep.join(filter(None, [*map(str, folders), os.environ.get(name)]))
            for name, folders in first.items()
        }
        variables = {
            "LD_PRELOAD": str(library / "librehearsal.so"),
            "CUDA_MODULE_LOADING": "LAZY",
            # What torch.compile writes in a rehearsal has no kernels: it must not be found by a later run on a card.
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "compiled")),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of processes: there are no kernels to compile
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),  # as in fresh subprocesses
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",  # lets torch, once imported, start to track values, see `inside`
        }
        kept = {name: os.environ[name] for name in os.environ.keys() - {"CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV"}}
        yield python, kept | paths | variables | variables_of(on, str(Path(folder, "ledger")))


@functools.cache
def _warn(doubts: str) -> None:
    """Warn the user with the text `doubts`, once per process and text."""
    warnings.warn(doubts, stacklevel=2)


def variables_of(card: Card, ledger: str) -> dict[str, str]:
    """Return {name: value} of the environment variables that native/device.h reads.

    `ledger`: path of the file that the processes of a rehearsal share.
    """
    return {
        "REHEARSAL_CAPABILITY": "{}{}".format(*card.capability),
        "REHEARSAL_BYTES": str(card.memory_bytes),
        "REHEARSAL_CONTEXT_BYTES": str(card.context_bytes),
        "REHEARSAL_DEVICES": str(card.devices),
        "REHEARSAL_NAME": f"rehearsed {card.name}",
        "REHEARSAL_LEDGER": ledger,
    }


class Rehearsal(ThreadPoolExecutor):
    """Run functions in a rehearsal of a card (see `trainmem.rehearsal`), as an executor.

    An example is `Lab(executor=Rehearsal(CARDS["a100"]))`. The rehearsal is a process of its own. It ends at the end of
    the executor's context, at `shutdown`, or when the process of the executor ends.

    Args:
        on: the simulated card.
        snapshot: a file to which torch writes the history of its allocator, for its viewer of memory snapshots, after
            each rehearsed experiment, even one that ran out of memory. If there are several ranks, rank 0 writes it.
            None: no snapshot.

    Raises:
        ValueError: `snapshot` cannot be written.
        RuntimeError: this machine cannot rehearse.
    """

    def __init__(self, on: Card, snapshot: str | os.PathLike | None = None):
        variables = {"REHEARSAL_SNAPSHOT": str(place(snapshot))} if snapshot is not None else {}
        super().__init__(1)  # one request at a time
        self._open = contextlib.ExitStack()
        python, environment = self._open.enter_context(command(on))
        self._channel, child_end = Pipe()
        with child_end:
            code = f"from trainmem.rehearsal import rehearsal_process; rehearsal_process.serve({child_end.fileno()})"
            # Its standard output goes to the caller's standard error, because its prints are not results.
            files = {"pass_fds": [child_end.fileno()], "stdin": subprocess.DEVNULL, "stdout": 2}
            self._process = subprocess.Popen([python, "-c", code], env=environment | variables, **files)

    def submit(self, function: Callable, /, *arguments, **options) -> Future:
        return super().submit(self._ask, cloudpickle.dumps((function, arguments, options)))

    def _ask(self, request: bytes) -> Any:
        try:
            self._channel.send_bytes(request)
            answer = self._channel.recv_bytes()
        except (EOFError, OSError) as error:
            raise BrokenExecutor(f"the rehearsal's process ended (exit code {self._process.wait(10)})") from error
        failed, value = pickle.loads(answer)
        if failed:
            raise value
        return value

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()  # if it has not ended yet
        self._process.wait()
        self._open.close()


def serve(descriptor: int) -> None:
    """Call the functions that a `Rehearsal` in another process sends, and send back their results or errors.

    This process ends when the connection closes. `descriptor`: file descriptor of this process's end of the connection.
    """
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()
    with connection.Connection(descriptor) as channel, contextlib.suppress(EOFError):
        while True:
            request = channel.recv_bytes()
            try:
                function, arguments, options = pickle.loads(request)
                answer = cloudpickle.dumps((False, function(*arguments, **options)))
            except Exception as error:
                answer = cloudpickle.dumps((True, error))
            channel.send_bytes(answer)


def _end_with(descriptor: int) -> None:
    """Wait until a connection's other end closes; then remove the rehearsal's folder, and end this process at once.

    `descriptor`: file descriptor of this process's end of the connection.
    """
    poll = select.poll()
    poll.register(descriptor, 0)  # with no events requested, poll still reports the hang-up
    poll.poll()
    forked.remove(str(Path(os.environ["REHEARSAL_LEDGER"]).parent))
    print(end="", flush=True)
    os._exit(0)
