"""Store the estimates of command-line commands, so that a repeated command takes a tenth of the time.

A stored estimate is called an answer, the function that makes it and its arguments are called the question. An answer's
key names everything that the answer depends on: the question, the installed libraries, this package's code, the CPU and
the environment. Only commands use stored answers (see `stored`); `estimate`, called from Python, always traces.
"""

import contextlib
import contextvars
import functools
import hashlib
import os
import pickle
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainmem.core import hardware
from trainmem.core.task import Task
from trainmem.core.training import Experiment
from trainmem.records import write_whole

SWITCH = "PERF_HELPERS_ANSWERS"  # environment variable; "0" turns stored answers off
_MOST_FILES = 300  # files to keep; the oldest are removed first
# Prefixes of environment variables that change what libraries do.
_DECIDING = ("ACCELERATE_", "ATEN_", "BNB_", "CUBLAS", "CUDA_", "DNNL_", "HF_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_")
_DECIDING += ("TORCH",)
_active: contextvars.ContextVar["Answers | None"] = contextvars.ContextVar("answers", default=None)


class Answers:
    """Read and write stored estimates ("answers"), one file per key in `folder`.

    `used` counts how many stored estimates `get` has returned. See the module's docstring for the key.
    """

    def __init__(self, folder: Path):
        self.used = 0
        self._folder = folder

    @property
    def note(self) -> str:
        """A text that says how many stored answers were used, and how to turn the store off; "" if none was used."""
        count = f"{self.used} stored answers" if self.used > 1 else "a stored answer"
        return f"used {count} to the same question ({SWITCH}=0 estimates again)" if self.used else ""

    def get(self, key: str) -> tuple[Any] | None:
        """Return (the stored answer,) for a key; None if there is no stored answer, or its file is damaged."""
        with contextlib.suppress(Exception):  # a damaged pickle may raise anything
            answer = pickle.loads((self._folder / key).read_bytes())
            self.used += 1
            return (answer,)
        return None

    def put(self, key: str, answer: Any) -> None:
        """Store an answer, unless the folder cannot be written to."""
        with contextlib.suppress(OSError):
            write_whole(self._folder / key, pickle.dumps(answer))
            for old in sorted(self._folder.iterdir(), key=os.path.getmtime)[:-_MOST_FILES]:
                old.unlink(missing_ok=True)


@contextlib.contextmanager
def stored() -> Iterator[Answers]:
    """Use and extend the stored estimates in this context, unless the environment variable PERF_HELPERS_ANSWERS is "0".

    Yield the `Answers`, whose count `used` of stored estimates stays 0 if the variable is "0".
    """
    answers = Answers(hardware.cache_folder() / "answers")
    token = _active.set(None if os.environ.get(SWITCH) == "0" else answers)
    try:
        yield answers
    finally:
        _active.reset(token)


def remembered(function: Callable, arguments: Sequence, ask: Callable[[], Any]) -> Any:
    """Return the stored result of `function` for `arguments`; if there is none, return and store the result of `ask()`.

    `ask` must return what `function` returns for `arguments`, e.g. from a subprocess. Outside of the context `stored`,
    or if the arguments have no unique text (see `_question`), `ask` is called and nothing is stored.
    """
    answers = _active.get()
    if answers is None or (question := _question(arguments)) is None:
        return ask()
    text = repr((function.__module__, function.__qualname__, question, _surroundings()))
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    if found := answers.get(key):
        return found[0]
    answer = ask()
    answers.put(key, answer)
    return answer


def _question(arguments: Sequence) -> list[str] | None:
    """Return texts that identify an estimate's arguments also in later processes; None if no text can."""
    parts = [repr(arguments)]
    for each in (part for argument in arguments for part in (argument if isinstance(argument, list) else [argument])):
        if isinstance(each, Experiment):
            if each.function or each.optimizer:  # the user's own
                return None
            named = [
                value for value in each.arguments.given.values() if isinstance(value, str) and os.path.isfile(value)
            ]
            parts += [f"{name} {os.stat(name).st_mtime_ns}" for name in named]
        task = each.task if isinstance(each, Experiment) else each
        if isinstance(task, Task):
            if not task.is_described_here():  # a model on the Hub
                return None
            parts.append(task.identity())
    return parts


@functools.cache
def _surroundings() -> str:
    """Return, as text, all that an answer depends on besides its arguments: libraries, code, CPU, environment."""
    code = sorted(each for each in Path(__file__).parents[1].rglob("*") if each.suffix in (".py", ".toml", ".json"))
    folders = [Path(each) for each in sys.path if each.endswith(("site-packages", "dist-packages"))]
    times = [(str(each), each.stat().st_mtime_ns) for each in (*code, *folders) if each.exists()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return repr((sys.version, platform.machine(), hardware.read_cpu(), cores, times, deciding_variables()))


def deciding_variables() -> list[tuple[str, str]]:
    """Return (name, value) of each environment variable that changes what libraries do, e.g. OMP_NUM_THREADS."""
    return sorted(pair for pair in os.environ.items() if pair[0].startswith(_DECIDING))
