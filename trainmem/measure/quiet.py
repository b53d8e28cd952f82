"""Keep the machine quiet for code that reads a clock, in a course that runs several lessons at once.

A lesson shares the machine with other lessons until it times something. Then it requests the part of the machine that
it needs (`Need`): `Lab.compare`, `interleaving.in_turns` and the time meter send this request after their warm-up. For
a function that runs without a meter and may time itself (measure="none"), the request is sent when the function first
calls a clock (`reserving`). If the function has several ranks, the request is sent before the function starts. Between
two of its experiments, a lesson releases its cores and waits in the queue again, so that lessons that already wait for
a quiet machine can go first.

Each experiment runs in the context `experiment`, which does nothing outside a course. Experiments that run at the same
time each use only a part of the cores, because threads that wait for a core would slow down all of them. A `QuietLock`
in the course's process divides the cores among the lessons, which reach it by a socket (`served`).
"""

import contextlib
import itertools
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import IntEnum
from multiprocessing import connection
from unittest.mock import patch

from trainmem.core import outcomes

LOCK = "PERF_HELPERS_QUIET"  # environment variable: see `entry`
PASSED_SECONDS = 60  # for which other lessons may overtake one that waits for a quiet machine
UNTIMED = "PERF_HELPERS_UNTIMED"  # environment variable: times mean nothing (the smallest sizes)


_CLOCKS = [f"{clock}{unit}" for clock in ("perf_counter", "process_time", "thread_time") for unit in ("", "_ns")]
_READERS = ("__main__", "trainmem.measure.interleaving")  # modules with a learner's functions, and the course's timer


class Need(IntEnum):
    """Name the part of the machine that an experiment needs for itself: none (others may run), one core, or all."""

    SHARE = 0  # nothing is timed: any number of lessons may run at the same time
    CORE = 1  # one thread is timed: it has a core for itself, and others compute on the rest
    MACHINE = 2  # several threads are timed: nothing else runs


class Asking:
    """Let a fresh subprocess request a quiet machine: `ask(need)` returns once this `Need` is granted.

    `ask` is None in a process that cannot send this request: in a rank, and in any process that is no fresh subprocess
    (see `forked`). `is_granted` is True inside `timing`, while the requested part of the machine is reserved.
    """

    def __init__(self):
        self.ask: Callable[[Need], None] | None = None  # None: in a rank, or not in a fresh subprocess
        self.is_granted = False


ASKING = Asking()


@contextlib.contextmanager
def timing(need: Need = Need.MACHINE) -> Iterator[None]:
    """Reserve a part of the machine for the code in this context, which reads a clock; wait until the part is free.

    `need`: the part, e.g. `Need.CORE`. Enter the context in a fresh subprocess: in other processes, and inside another
    `timing`, it does nothing.
    """
    if ASKING.is_granted or not ASKING.ask:
        yield
        return
    ASKING.ask(need)
    ASKING.is_granted = True
    try:
        yield
    finally:
        ASKING.is_granted = False
        ASKING.ask(Need.SHARE)


@contextlib.contextmanager
def no_clocks() -> Iterator[None]:
    """Make clock functions raise in this context if a notebook's function calls them outside `timing`.

    `timing` reserves the machine. Outside `timing` other lessons may be running, so the times would be wrong.

    Raises:
        outcomes.Invalid: a notebook's function called a clock.
    """

    def refuse(name: str) -> None:
        raise outcomes.Invalid(f"it calls time.{name}, but other lessons may be running: use measure='none'")

    with _on_reading(refuse):
        yield


@contextlib.contextmanager
def reserving() -> Iterator[None]:
    """Reserve the machine, or one of its cores, from the first call of a clock in this context to the context's end.

    What runs before this call, e.g. building a model, runs beside other lessons. One core is reserved if two conditions
    hold: the clock counts computing time, and only one thread computes. Otherwise the whole machine is reserved.
    Outside a fresh subprocess, nothing is reserved.
    """
    process = os.getpid()

    def reserve(name: str) -> None:
        if os.getpid() == process:  # its forks, e.g. a DataLoader's workers, share its connection to the caller
            is_on_one_core = not name.startswith("perf_counter") and computing_threads() == 1
            reserved.enter_context(timing(Need.CORE if is_on_one_core else Need.MACHINE))

    with contextlib.ExitStack() as reserved, _on_reading(reserve) if ASKING.ask else contextlib.nullcontext():
        yield


def computing_threads() -> int:
    """Return how many threads of this process may compute: torch's, plus Python's except the main one and tqdm's."""
    import torch
    from tqdm import TMonitor  # the thread that redraws progress bars

    threads = [thread for thread in threading.enumerate() if not isinstance(thread, TMonitor)]
    return torch.get_num_threads() + len(threads) - 1


@contextlib.contextmanager
def _on_reading(react: Callable[[str], object]) -> Iterator[None]:
    """In this context, call `react(name)` each time a notebook's code is about to read the clock `time.<name>`.

    Clocks that are read inside `with timing(...)` do not count.
    """

    def watched(name: str, clock: Callable[[], float]) -> Callable[[], float]:
        def read() -> float:
            if not ASKING.is_granted and sys._getframe(1).f_globals.get("__name__") in _READERS:
                react(name)
            return clock()

        return read

    with contextlib.ExitStack() as stack:
        for name in _CLOCKS:
            stack.enter_context(patch.object(time, name, watched(name, getattr(time, name))))
        yield


class QuietLock:
    """Divide the machine's cores among lessons: `take` waits for cores and takes them, `leave` releases them.

    Lessons get cores in the order in which they began to wait, with one exception: a later lesson may start first if
    other lessons are running, and if its own cores and theirs together use the whole machine. It may do so only until
    the first in the queue has waited for `PASSED_SECONDS`.

    Args:
        cores: number of cores.
    """

    def __init__(self, cores: int = 2):
        self._cores = cores
        self._changed = threading.Condition()
        self._held: dict[str, tuple[Need, int]] = {}  # lesson -> (its need, cores that it computes on)
        self._queue: dict[int, tuple[str, Need, int, float]] = {}  # number -> (lesson, need, cores, waiting since)
        self._number = itertools.count()
        self._alone_since = 0.0
        self.alone_seconds: Counter[str] = Counter()  # for which each lesson had the machine alone
        self.waited_seconds: Counter[str] = Counter()  # for which each lesson waited for others

    def take(self, lesson: str, need: Need, cores: int = 1) -> None:
        """Release the cores that a lesson holds, then wait until the lesson gets the cores that it requests.

        If `leave` is called for the lesson while it waits, the lesson gets no cores.

        Args:
            lesson: name of the lesson.
            need: the part of the machine that the lesson needs for itself: none, one core or all (`Need`).
            cores: number of cores on which the lesson's experiments compute.
        """
        with self._changed:
            self._release(lesson)
            since, number = time.monotonic(), next(self._number)
            self._queue[number] = lesson, need, cores, since
            self._changed.wait_for(lambda: number not in self._queue or self._may_go(number))
            self.waited_seconds[lesson] += time.monotonic() - since
            if self._queue.pop(number, None):
                self._held[lesson] = need, cores
                if need is Need.MACHINE:
                    self._alone_since = time.monotonic()
                self._changed.notify_all()

    def leave(self, lesson: str) -> None:
        """Release the cores of a lesson. A call of `take` that still waits for this lesson returns without cores."""
        with self._changed:
            self._queue = {number: entry for number, entry in self._queue.items() if entry[0] != lesson}
            self._release(lesson)

    def _may_go(self, number: int) -> bool:
        """Return whether the waiting lesson with this `number` in the queue may start.

        There must be room for the lesson (`_has_room`). If other lessons have waited longer, three more conditions
        apply: some lesson holds cores now; no core would be idle after the start; and the first in the queue has waited
        less than `PASSED_SECONDS`.
        """
        _, need, cores, _ = self._queue[number]
        earlier = [since for other, (*_, since) in self._queue.items() if other < number]
        others = sum(cores for _, cores in self._held.values())
        keeps_busy = self._held and others + cores >= self._cores
        may_pass = not earlier or (keeps_busy and time.monotonic() - earlier[0] < PASSED_SECONDS)
        return may_pass and self._has_room(need, others + cores)

    def _has_room(self, need: Need, used: int) -> bool:
        """Return whether a lesson may start beside the lessons that hold cores now.

        `need`: the part of the machine that the lesson needs for itself. `used`: number of cores in use once the lesson
        runs.
        """
        held = {held for held, _ in self._held.values()}
        if Need.MACHINE in held or (need is Need.MACHINE and held):
            return False
        return used <= self._cores or not (need is Need.CORE or Need.CORE in held)

    def _release(self, lesson: str) -> None:
        if self._held.pop(lesson, (None,))[0] is Need.MACHINE:
            self.alone_seconds[lesson] += time.monotonic() - self._alone_since
        self._changed.notify_all()


def entry(lesson: str, threads: int, address: str) -> dict[str, str]:
    """Return {name: value} of the environment variable by which a lesson's processes find the lock.

    Args:
        lesson: name of the lesson.
        threads: number of threads of each experiment that shares the machine.
        address: address of the lock, see `served`.
    """
    return {LOCK: f"{lesson} {threads} {address}"}


def short_folder() -> str | None:
    """Return "/tmp" as the folder for sockets, whose paths are limited to about 100 bytes.

    If /tmp cannot be written to, return None, which means the usual folder for temporary files.
    """
    return "/tmp" if os.access("/tmp", os.W_OK) else None


@contextlib.contextmanager
def served(lock: QuietLock) -> Iterator[str]:
    """Serve a lock to other processes in this context; yield the address of its socket, to be passed to `entry`."""
    temporary = tempfile.TemporaryDirectory(prefix="perf_helpers-", dir=short_folder())
    with temporary as folder, connection.Listener(os.path.join(folder, "quiet"), "AF_UNIX") as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):  # the listener was closed
                while True:
                    threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()

        def answer(lesson: connection.Connection) -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    lock.take(*lesson.recv())
                    lesson.send(None)

        threading.Thread(target=accept, daemon=True).start()
        yield listener.address


def is_in_course() -> bool:
    """Return whether this process belongs to a lesson of a course that runs several lessons at once."""
    return LOCK in os.environ


class _Lesson:
    """Let this process's experiments wait until the course's `QuietLock` grants the part of the machine that they need.

    If several experiments run at the same time in threads of this process, the process holds one part for all of them:
    the largest part that one of them needs. Outside a course no experiment waits.
    """

    def __init__(self):
        self._guard = threading.Lock()
        self._course: connection.Connection | None = None
        self._running: Counter[Need] = Counter()  # experiments under way

    @contextlib.contextmanager
    def experiment(self, need: Need, cores: int = 1) -> Iterator[None]:
        """Wait until an experiment may run; reserve its part of the machine until this context ends.

        Args:
            need: the part of the machine that the experiment needs for itself.
            cores: number of cores that the experiment computes on, if it shares the machine.
        """
        with self._guard:
            if need is Need.CORE and self._running.total() > 1:
                need = Need.MACHINE  # the lesson itself computes at the same time
            before = max(+self._running, default=None)
            # Requesting a share again lets lessons go first that wait for a quiet machine.
            if before is None or need > before:
                self._take(need, cores)
            self._running[need] += 1
        try:
            yield
        finally:
            with self._guard:
                self._running[need] -= 1
                after = max(+self._running, default=Need.SHARE)
                if after < need:
                    self._take(after, 1)

    def threads(self) -> int | None:
        """Return how many threads the next fresh subprocess should use; None: torch's default."""
        alone = self._running[Need.MACHINE]
        return int(os.environ[LOCK].split(" ")[1]) if is_in_course() and not alone else None

    def _take(self, need: Need, cores: int) -> None:
        if not is_in_course():
            return
        name, threads, address = os.environ[LOCK].split(" ", 2)
        with contextlib.suppress(EOFError, OSError):  # the course was killed
            self._course = self._course or connection.Client(address, "AF_UNIX")
            self._course.send((name, need, cores if need else cores * int(threads)))
            self._course.recv()


_LESSON = _Lesson()
threads = _LESSON.threads


def is_untimed() -> bool:
    """Return whether this process belongs to a lesson with the smallest model sizes, where times mean nothing."""
    return UNTIMED in os.environ


def experiment(need: Need, cores: int = 1) -> contextlib.AbstractContextManager[None]:
    """Return the context in which to perform an experiment: it holds the part of the machine that `need` names.

    `cores`: number of cores that the experiment computes on, if it shares the machine.
    """
    return _LESSON.experiment(Need.SHARE if is_untimed() else need, cores)
