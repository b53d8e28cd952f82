"""Describe how an experiment ended, by figures or a failure, for the meters and `Runner` of `trainmem.measure`."""

import dataclasses
import os
import re
import signal
import traceback
from dataclasses import dataclass
from typing import Any

from trainmem.core import hardware, stack_dumps
from trainmem.records import Memory, Timing
from trainmem.unknown import NeedsValues


class Invalid(ValueError):
    """Raised if a training cannot be built or traced because of an argument or a missing package."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold the result of one experiment: status, message, memory, timing, losses and output.

    The figures come from one meter (of memory or time, see `trainmem.measure`); `joined` adds those of another meter.
    A figure that was not requested is None.
    """

    # A `records.Run.status`, or "invalid" or "needs values", for which the runner raises an exception.
    status: str = "ok"
    message: str = ""  # why it is not "ok"
    memory: Memory | None = None
    timing: Timing | None = None
    losses: tuple[float, ...] | None = None  # one per optimizer step
    value: Any = None  # returned by a function, as JSON types
    weights: str | None = None  # their type and who chose it; None: a function
    ranks: tuple["Outcome", ...] = ()  # by rank, for a training on several processes; this one is then rank 0's
    output: str = ""  # printed to standard output
    traceback: str = ""  # of the exception that ended it
    machine: dict[str, Any] | None = None  # where it ran, a `hardware.Machine`; None: the lab's machine
    versions: dict[str, str | None] | None = None  # {package: version} there
    attempts: tuple[dict[str, Any], ...] = ()  # as `records.Run.attempts`

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def replace(self, **changes) -> "Outcome":
        return dataclasses.replace(self, **changes)

    def joined(self, later: "Outcome") -> "Outcome":
        """Return a copy of this outcome with the fields of `later`, except those that are None in `later`.

        Both are outcomes of the same experiment. If both have `ranks`, the outcomes in `ranks` are joined rank by rank.
        """
        figures = {field.name: getattr(later, field.name) for field in dataclasses.fields(later)}
        known = {name: value for name, value in figures.items() if value is not None}
        ranks = later.ranks or self.ranks
        if later.ranks and self.ranks:
            ranks = tuple(a.joined(b) for a, b in zip(self.ranks, later.ranks, strict=True))
        return self.replace(**known | {"ranks": ranks})


_OUT_OF_MEMORY = ("out of memory", "defaultcpuallocator: can't allocate", "not enough memory")


_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)$', re.MULTILINE)


def failed(error: BaseException) -> Outcome:
    """Return the outcome of an experiment that an exception ended."""
    if isinstance(error, Invalid):
        return Outcome("invalid", str(error))
    if isinstance(error, NeedsValues):
        return Outcome("needs values", str(error))
    text = f"{type(error).__name__}: {error}".strip()
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return Outcome(
        status="out of memory" if named or any(words in text.lower() for words in _OUT_OF_MEMORY) else "crashed",
        message=text.split("\n")[0][:1000] + _where(error),
        traceback="".join(traceback.format_exception(error))[-4000:],
    )


def _where(error: BaseException) -> str:
    """Return the user's line that led to an exception, e.g. " (line 3 of train)"; "" without a traceback."""
    frames = _frames(error)
    if not frames:
        return ""
    own = next((frame for frame in reversed(frames) if not stack_dumps.is_library(frame.filename)), None)
    if own:  # without the file: that of a notebook's cell has only a number as its name
        return f" (line {own.lineno} of {own.name})"
    return f" (line {frames[-1].lineno} of {os.path.basename(frames[-1].filename)})"


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an exception's traceback, outermost first, without the code that tracks operations."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(text := getattr(error.__cause__, "tb", None), str):  # by `concurrent.futures`
        # A subprocess sends its traceback as text.
        lines = _FRAME.findall(text.rpartition("Traceback (most recent call last)")[2])  # the last of a chain
        frames = [traceback.FrameSummary(file, int(line), name) for file, line, name in lines]
    own = next((n for n, frame in enumerate(frames) if n and frame.name == "__torch_dispatch__"), None)
    return frames[:own]  # frames inside `__torch_dispatch__` belong to the code that tracks operations


def oom_kills() -> int:
    """Return the number of processes that the kernel killed for lack of memory since it booted (Linux; 0 elsewhere)."""
    found = re.search(r"^oom_kill (\d+)", hardware.read(hardware.ROOT / "proc/vmstat"), re.MULTILINE)
    return int(found[1]) if found else 0


def died(code: int | None, kills_before: float = float("inf")) -> Outcome:
    """Return the outcome of a process that ended without a result.

    Args:
        code: the process's exit code, negative for a signal; None: the process ended because its parent
            process ended.
        kills_before: the number that `oom_kills` returned when the process began. If the number has grown since then, a
            SIGKILL is reported as "out of memory", otherwise as "killed". Default: always as "killed".
    """
    if code is None:
        return Outcome("killed", "the process ended because its parent process did")
    if code == -signal.SIGKILL and oom_kills() > kills_before:
        return Outcome("out of memory", "the system ran out of memory and killed the process (SIGKILL)")
    if code < 0:
        name = signal.Signals(-code).name if -code in [*signal.Signals] else f"signal {-code}"
        reason = "; the system may have run out of memory" if -code == 9 else ""
        return Outcome("killed", f"the process was killed by {name}{reason}")
    return Outcome("crashed", f"the process ended with exit code {code} before it returned a result")


# The error that gloo prints before it ends the process: "... op.preamble.length <= op.nbytes. 24 vs 16".
_TOO_LONG = re.compile(r"preamble\.length <= \S*nbytes\.? (\d+) vs (\d+)")


def explained(outcome: Outcome, errors: str) -> Outcome:
    """Return the outcome, and add the cause and a remedy to the message if the cause is known.

    Known causes are a full /dev/shm, and ranks that send tensors of different sizes through gloo.

    `errors`: the standard error of the experiment's processes.
    """
    if "unable to allocate shared memory" in errors + outcome.traceback:  # torch may wait for that batch for ever
        return outcome.replace(
            message=f"{outcome.message}; /dev/shm is full: enlarge it, or set dataloader_num_workers=0"
        )
    if found := _TOO_LONG.search(errors):
        sent, expected = found.groups()
        what = f"gloo received {sent} bytes instead of {expected}: give all ranks tensors of one size and dtype"
        return outcome.replace(message=f"{outcome.message}; {what}")
    return outcome
