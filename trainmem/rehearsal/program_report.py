"""Report how much memory a rehearsed program took and how it ended, from files that `process_recorder` wrote."""

import contextlib
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainmem.cards import Card
from trainmem.rehearsal.marked_files import has_mark
from trainmem.rehearsal.older_files import put_back
from trainmem.texts import bytes_text

# How a program ended, and the exit code of its rehearsal; a program that failed otherwise keeps its own code.
CODES = {"finished": 0, "interrupted": 130, "needs values": 3, "needs a library": 3, "out of memory": 4}
_ENDS = {
    "finished": "it finished",
    "needs values": "it needed a value, and a rehearsal computes none",
    "needs a library": "it needed a CUDA library whose memory a rehearsal does not know",
    "out of memory": "it ran out of memory",
    "interrupted": "you interrupted it",
    "failed": "the program failed",
}
_REMEDIES = {
    "needs values": "leave this line out",
    "needs a library": "use another operation or run it on the CPU",
    "out of memory": "take a larger card, a smaller batch, or `perf-helpers advise`",
}
_ASSUMING = {  # comes before the remedy if values were not assumed
    "needs values": "add --assume, which assumes unknown values by fixed rules, or ",
    "needs a library": "add --assume, which counts no workspace of the library, or ",
}
_OF_THE_COMPILER = ("BackendCompilerFailed", "InductorError", "InternalTorchDynamoError", "Unsupported")  # its errors


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """Hold the result of a rehearsed program: how it ended, the peaks of its processes, and what was assumed.

    Args:
        status: "finished", "needs values", "needs a library", "out of memory", "interrupted" or "failed".
        code: the program's own exit code; negative for a signal.
        card: the card on which the program was rehearsed, as text.
        processes: one dict for each process that used a device or failed, e.g. with its "phases" and "error". The
            docstring of the module `process_recorder` lists all fields.
        assumptions: what the rehearsal assumed, one sentence each.
        assumes: whether unknown values were assumed (`--assume`).
    """

    status: str
    code: int
    card: str
    processes: tuple[dict[str, Any], ...]
    assumptions: tuple[str, ...]
    assumes: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code of `perf-helpers rehearse`, see `CODES`; a signal gives 128 plus its number, as in a shell."""
        return CODES.get(self.status, (128 - self.code if self.code < 0 else self.code) or 1)

    def to_dict(self) -> dict[str, Any]:
        return {"rehearsed": True, **asdict(self)}

    def __repr__(self) -> str:
        stack = "" if self.status == "interrupted" else "; its stack is above"
        how = f"signal {-self.code}{stack}" if self.code < 0 else f"exit code {self.code}"
        lines = [f"Rehearsed on {self.card}, not measured: {_ENDS[self.status]} ({how})"]
        for each in self.processes:
            lines += _lines(each)
        if remedy := self._remedy():
            lines.append(f"to go on: {remedy}")
        if not any(each["phases"] for each in self.processes):
            lines.append("No process allocated memory on a card.")
        return "\n".join([*lines, *(f"- {each}" for each in self.assumptions)])

    def _remedy(self) -> str:
        """Return advice on what to do after the program has ended with this `status`; "" if there is none."""
        messages = [each["error"]["message"] for each in self.processes if each["error"]]
        if self.status == "failed" and any("invalid device ordinal" in message for message in messages):
            return "the program uses more cards than there are: add --processes and their number before --"
        if self.status == "failed" and any(message.startswith(_OF_THE_COMPILER) for message in messages):
            return "set TORCH_COMPILE_DISABLE=1 to run uncompiled what the program gives to torch.compile"
        if self.status == "failed" and any(sum(each["answers"].values()) for each in self.processes):
            return "an assumed answer may be the cause, see below; leave out the lines that need values"
        return ("" if self.assumes else _ASSUMING.get(self.status, "")) + _REMEDIES.get(self.status, "")


def _lines(process: dict[str, Any]) -> list[str]:
    """Return lines of text about one process: its memory and how it ended.

    `process`: an entry of `ProgramRun.processes`.
    """
    label = f"Process {process['pid']}" + (f", rank {process['rank']}" if process["rank"] else "")
    steps = f"{process['steps']} optimizer update{'s' * (process['steps'] != 1)}"
    lines = [f"{label}, {steps}: {peaks_text(peaks_of(process))}"] if process["phases"] else [label]
    lines += [f"  {phase:<26} {peaks_text(peaks)}" for phase, peaks in process["phases"].items()]
    if process["devices"] > 1:
        lines.append(f"  on the fullest of {process['devices']} devices")
    if error := process["error"]:
        lines += [
            f"  ended by {error['message'].removesuffix(': ')}",
            *([f"  in {error['line']}"] if error["line"] else []),
        ]
    elif not process["ended"]:
        lines.append("  killed, or ended without an error message: figures of its last phase are missing")
    return lines


def peaks_of(process: dict[str, Any]) -> list[int]:
    """Return a process's peaks over all phases, [allocated, reserved] in bytes.

    `process`: an entry of `ProgramRun.processes`; its field "phases" is {phase: [allocated, reserved]}.
    """
    return [*map(max, zip(*process["phases"].values(), strict=True))]


def peaks_text(peaks: list[int]) -> str:
    """Return peaks in bytes, [allocated, reserved], as text, e.g. "peak 1.50 GiB allocated, 2.00 GiB reserved"."""
    allocated, reserved = (bytes_text(size, binary=True) for size in peaks)
    return f"peak {allocated} allocated, {reserved} reserved"


def read(folder: str | os.PathLike, code: int, card: Card, assumes: bool, interrupted: bool = False) -> ProgramRun:
    """Return how a rehearsed program ended and what memory its processes took, from the files in `folder`.

    Also delete the weight files that the program saved, unless all values in them were known. Also put back the user's
    files that the program overwrote, renamed or deleted.

    Args:
        folder: folder with one JSON file per process, written by `process_recorder`.
        code: the program's exit code; negative for a signal.
        card: the card on which the program was rehearsed.
        assumes: whether the rehearsal ran with `--assume`: code that read an unknown value then got an assumed value.
        interrupted: whether the program was interrupted, by Ctrl-C or SIGTERM.
    """
    processes = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    kinds = {error["kind"] for each in processes if (error := each["error"])}
    ends = ("out of memory", "needs values", "needs a library")
    status = "finished" if code == 0 else next((end for end in ends if end in kinds), "failed")
    status = "interrupted" if interrupted else status
    # Once for all processes: ranks may write the same file, and a fork has the entries of its parent.
    opened = {name for each in processes for name in each.pop("opened", [])}
    saved = sorted({*filter(has_mark, opened)}.union(*(each["saved"] for each in processes)))
    for name in saved:
        with contextlib.suppress(OSError):
            os.unlink(name)
    undo = dict.fromkeys((now, before) for each in processes for now, before in each.pop("undo", []))
    kept = put_back(undo, min((each.pop("began", 0) for each in processes), default=0), opened)
    assumptions = tuple(_assumptions(processes, card, assumes, saved, kept))
    return ProgramRun(status, code, card.name, tuple(processes), assumptions, assumes)


def assumed(card: Card) -> str:
    """Return, as text, the assumptions that every rehearsal on this card makes."""
    context = bytes_text(card.context_bytes, binary=True)
    return f"assumed: a CUDA context of {context}, no workspace for cuDNN's convolutions"


def _assumptions(processes: list[dict], card: Card, assumes: bool, saved: list[str], kept: list[str]) -> list[str]:
    found = [assumed(card)]
    answers = sum((Counter(each["answers"]) for each in processes), Counter())
    if assumes:
        given = "; ".join(f"{kind}: {count:,}" for kind, count in answers.most_common()) or "none was needed"
        found.append(f"values (--assume), answered by rule and not computed: {given}")
    if assumes and any(kind.startswith(("masks of", "sizes that")) for kind in answers):
        found.append("a mask without known values selects nothing: the peak is too low if much would be selected")
    if saved:
        how = "file of weights has no values and was" if len(saved) == 1 else "files of weights have no values and were"
        found.append(f"{len(saved)} {how} removed, e.g. {saved[0]}")
    if kept:
        how = "file or folder of yours was" if len(kept) == 1 else "files or folders of yours were"
        found.append(f"{len(kept)} {how} overwritten, renamed or deleted, and put back, e.g. {kept[0]}")
    return found
