"""Find out where ranks are: query the Python line that each rank's main thread has reached, from another process.

A rank that waits in a collective operation runs no Python. `faulthandler` therefore writes the stack of the rank to a
file, from a signal handler in C.
"""

import contextlib
import faulthandler
import functools
import itertools
import os
import re
import signal
import sysconfig
import threading
import time
from pathlib import Path
from traceback import FrameSummary

_SIGNAL = signal.SIGUSR2
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_PACKAGE = str(Path(__file__).parents[1])
_COLLECTIVES = os.path.join("torch", "distributed") + os.sep
_LONGEST_LINE = 80  # characters of a line that is quoted


def answer_signals(folder: str, rank: int) -> None:
    """Let this process write the stacks of its threads to a file in `folder` whenever `query` sends a signal.

    `rank`: this process's rank, which names the file. The signal handler stays for the rest of the process.
    """
    file = open(os.path.join(folder, f"{rank}.stack"), "w")  # noqa: SIM115, the handler needs it open
    file.write(f"{os.getpid()} {threading.main_thread().ident}\n")
    file.flush()
    faulthandler.register(_SIGNAL, file, all_threads=True)


def query(folder: str, group: int, seconds: float = 2) -> dict[int, list[FrameSummary]]:
    """Return {rank: stack of its main thread, innermost frame first}; a rank that does not answer is left out.

    Args:
        folder: the folder that the ranks passed to `answer_signals`.
        group: id of the ranks' process group; no process of another group gets a signal.
        seconds: how long to wait for the answers.
    """
    found, waiting = {}, {}
    for path in Path(folder).glob("*.stack"):
        with contextlib.suppress(OSError, ValueError):
            pid, thread = map(int, path.read_text().split()[:2])
            if os.getpgid(pid) == group:
                os.kill(pid, _SIGNAL)
                waiting[int(path.stem)] = path, thread
    until = time.monotonic() + seconds
    while waiting and time.monotonic() < until:
        time.sleep(0.02)
        for rank, (path, thread) in [*waiting.items()]:
            if frames := _main_thread(path.read_text(errors="replace"), thread):
                found[rank] = frames
                del waiting[rank]
    return dict(sorted(found.items()))


def _main_thread(text: str, ident: int) -> list[FrameSummary]:
    """Return the frames of thread `ident` in faulthandler's dump `text`; [] if they are not all written yet."""
    for part in text.split("hread 0x")[1:]:  # "Thread 0x..." and "Current thread 0x..."
        head, _, lines = part.partition("\n")
        if int(re.match(r"[0-9a-f]+", head)[0], 16) == ident and re.search(r" in <module>\n|^  \.\.\.\n", lines, re.M):
            return [FrameSummary(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(lines)]
    return []


def described(ranks: dict[int, list[FrameSummary]]) -> str:
    """Return a text with the collective operation and line of each rank, from {rank: stack, innermost frame first}."""
    places: dict[str, list[int]] = {}
    for rank, frames in ranks.items():
        places.setdefault(_place(frames), []).append(rank)
    return "; ".join(f"rank{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}: {place}" for place, ids in places.items())


def _place(frames: list[FrameSummary]) -> str:
    """Return a rank's collective operation, and the user's line that called it, as text; `frames`: innermost first."""
    if not any(_is_of_worker(frame, "_rank") for frame in frames):
        return "has ended"
    inner = [*itertools.takewhile(lambda frame: not _is_of_worker(frame, "_execute"), frames)]
    own = next((number for number, frame in enumerate(inner) if not is_library(frame.filename)), None)
    called = inner[:own]
    waiting = (frame for frame in reversed(called) if _COLLECTIVES in frame.filename and frame.name != "wrapper")
    waiting_in = f"waits in {waits.name}, " if (waits := next(waiting, None)) else ""
    if own is None:
        last = called[0] if called else frames[0]
        return f"{waiting_in}in line {last.lineno} of {os.path.basename(last.filename)} ({last.name})"
    at = inner[own]
    quoted = (at.line or "")[:_LONGEST_LINE]
    return f"{waiting_in}in line {at.lineno} of {at.name}{quoted and f', {quoted!r}'}"


def _is_of_worker(frame: FrameSummary, name: str) -> bool:
    return frame.name == name and frame.filename == os.path.join(_PACKAGE, "measure", "worker.py")


@functools.cache
def is_library(file: str) -> bool:
    """Return whether a file belongs to Python, an installed package or this package, and not to the user."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return file.startswith((_PACKAGE, *folders, "<frozen"))
