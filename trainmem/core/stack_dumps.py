"""Where ranks are: the line of Python that each one's main thread has come to, asked from outside.

A rank that waits in a collective operation runs no Python, so it cannot be asked in Python: `faulthandler` writes its
stack down from the handler of a signal, in C.
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


def tell(folder: str, rank: int) -> None:
    """Let this process answer `ask`: on a signal it writes down where its threads are."""
    file = open(os.path.join(folder, f"{rank}.stack"), "w")  # noqa: SIM115, the handler's from now on
    file.write(f"{os.getpid()} {threading.main_thread().ident}\n")
    file.flush()
    faulthandler.register(_SIGNAL, file, all_threads=True)


def ask(folder: str, session: int, seconds: float = 2) -> dict[int, list[FrameSummary]]:
    """The functions that each rank's main thread is in, innermost first; a rank that gave no answer is left out.

    Args:
        folder: which they were to tell it in.
        session: id of theirs: nothing else is sent a signal.
        seconds: to wait for the answers.
    """
    found, asked = {}, {}
    for path in Path(folder).glob("*.stack"):
        with contextlib.suppress(OSError, ValueError):
            pid, thread = map(int, path.read_text().split()[:2])
            if os.getsid(pid) == session:
                os.kill(pid, _SIGNAL)
                asked[int(path.stem)] = path, thread
    until = time.monotonic() + seconds
    while asked and time.monotonic() < until:
        time.sleep(0.02)
        for rank, (path, thread) in [*asked.items()]:
            if frames := _main_thread(path.read_text(errors="replace"), thread):
                found[rank] = frames
                del asked[rank]
    return dict(sorted(found.items()))


def _main_thread(text: str, ident: int) -> list[FrameSummary]:
    """The frames of one thread, once all of them are written down."""
    for part in text.split("hread 0x")[1:]:  # "Thread 0x..." and "Current thread 0x..."
        head, _, lines = part.partition("\n")
        if int(re.match(r"[0-9a-f]+", head)[0], 16) == ident and re.search(r" in <module>\n|^  \.\.\.\n", lines, re.M):
            return [FrameSummary(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(lines)]
    return []


def described(ranks: dict[int, list[FrameSummary]]) -> str:
    """In words: which ranks wait for the others, and in which lines the ranks are."""
    places: dict[str, list[int]] = {}
    for rank, frames in ranks.items():
        places.setdefault(_place(frames), []).append(rank)
    return "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {place}" for place, who in places.items())


def _place(frames: list[FrameSummary]) -> str:
    """Where a rank is, in words: in the user's line, and in what that line called where ranks wait for each other."""
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
    """Whether a file is Python's, an installed package's or this one's, and not the user's own."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return file.startswith((_PACKAGE, *folders, "<frozen"))
