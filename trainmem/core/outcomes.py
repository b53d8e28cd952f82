"""What performing an experiment once, under one meter, yielded: figures, or the way in which it failed."""

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
    """What the user asked for cannot be built, or cannot be followed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One experiment, performed once. Every figure is None where nobody asked for it."""

    # One of `records.Run.status`, or "invalid" or "needs values", which become exceptions of the caller.
    status: str = "ok"
    message: str = ""  # why it is not "ok"
    memory: Memory | None = None
    timing: Timing | None = None
    losses: tuple[float, ...] | None = None  # of each optimizer step
    value: Any = None  # what a function returned, as JSON holds it
    weights: str | None = None  # their type, and who chose it; None: a function makes its own
    ranks: tuple["Outcome", ...] = ()  # of a training on several processes, by rank; this one is then rank 0's
    output: str = ""  # what was printed
    traceback: str = ""  # of the exception that ended it
    machine: dict[str, Any] | None = None  # that it was performed on, of `hardware.Machine`; None: the lab's
    versions: dict[str, str | None] | None = None  # of packages there
    attempts: tuple[dict[str, Any], ...] = ()  # as `records.Run.attempts`

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def replace(self, **changes) -> "Outcome":
        return dataclasses.replace(self, **changes)

    def joined(self, later: "Outcome") -> "Outcome":
        """What two meters say of one experiment: the later one's word counts where it has any, rank by rank."""
        its = {field.name: getattr(later, field.name) for field in dataclasses.fields(later)}
        known = {name: value for name, value in its.items() if value is not None}
        ranks = later.ranks or self.ranks
        if later.ranks and self.ranks:
            ranks = tuple(a.joined(b) for a, b in zip(self.ranks, later.ranks, strict=True))
        return self.replace(**known | {"ranks": ranks})


_OUT_OF_MEMORY = ("out of memory", "defaultcpuallocator: can't allocate", "not enough memory")


def failed(error: BaseException) -> Outcome:
    """The outcome of an experiment that an exception ended."""
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
    """The line that raised it, in brackets: the user's own, where there is one, for what it called is in the traceback.

    A function is named, and not its file: a notebook's cell has a number for a name.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    own = next((frame for frame in reversed(frames) if not stack_dumps.is_library(frame.filename)), None)
    if own:
        return f" (line {own.lineno} of {own.name})"
    return f" (line {frames[-1].lineno} of {os.path.basename(frames[-1].filename)})"


def oom_kills() -> int:
    """How many processes the kernel has ended so far because memory ran out, the machine's or a cgroup's (Linux)."""
    found = re.search(r"^oom_kill (\d+)", hardware.read(hardware.ROOT / "proc/vmstat"), re.MULTILINE)
    return int(found[1]) if found else 0


def died(code: int | None, kills_before: float = float("inf")) -> Outcome:
    """The outcome of a process that ended without giving one; `code` is negative for a signal, None if nobody is left
    to tell it; `kills_before` are the `oom_kills` when it began."""
    if code is None:
        return Outcome("killed", "the process ended because its parent process did")
    if code == -signal.SIGKILL and oom_kills() > kills_before:
        return Outcome("out of memory", "the system ran out of memory and killed the process (SIGKILL)")
    if code < 0:
        name = signal.Signals(-code).name if -code in [*signal.Signals] else f"signal {-code}"
        reason = "; the system may have run out of memory" if -code == 9 else ""
        return Outcome("killed", f"the process was killed by {name}{reason}")
    return Outcome("crashed", f"the process ended with exit code {code} before it returned a result")


# What gloo writes before it ends the process: "... op.preamble.length <= op.nbytes. 24 vs 16".
_TOO_LONG = re.compile(r"preamble\.length <= \S*nbytes\.? (\d+) vs (\d+)")


def explained(outcome: Outcome, errors: str) -> Outcome:
    """The outcome with what its processes wrote to the standard error, where that tells why they ended, or waited."""
    if "unable to allocate shared memory" in errors + outcome.traceback:  # torch may wait for ever for that batch
        return outcome.replace(
            message=f"{outcome.message}; /dev/shm is full: enlarge it, or set dataloader_num_workers=0"
        )
    if found := _TOO_LONG.search(errors):
        sent, expected = found.groups()
        what = f"gloo received {sent} bytes instead of {expected}: give all ranks tensors of one size and dtype"
        return outcome.replace(message=f"{outcome.message}; {what}")
    return outcome
