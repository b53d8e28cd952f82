"""A quiet machine for what reads a clock, in a course that runs several lessons at once.

A lesson shares the machine with others until it times something: then the others wait. What is timed asks for it:
`Lab.compare`, `interleaving.in_turns` and the time meter once they are warm (`timing`), a function with measure="none"
from its first line. Between two experiments a lesson lets those go first that wait for a quiet machine. Experiments
that share the machine share its cores too: threads of one that wait for another's would take the time of both. The lock
is in the course's process (`served`); a lesson reaches it by a socket. Outside a course `experiment` does nothing.
"""

import contextlib
import functools
import itertools
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import connection
from unittest.mock import patch

from perf_helpers.lab import outcomes

LOCK = "PERF_HELPERS_QUIET"  # environment variable: see `entry`
UNTIMED = "PERF_HELPERS_UNTIMED"  # environment variable: no experiment's time means anything (the smallest sizes)


_CLOCKS = [f"{clock}{unit}" for clock in ("perf_counter", "process_time", "thread_time") for unit in ("", "_ns")]
_READERS = ("__main__", "perf_helpers.lab.interleaving")  # modules with a learner's functions, and the course's own


class Asking:
    """How a clean process gets a quiet machine: `ask` is called with whether it wants one, and returns when it has."""

    def __init__(self):
        self.ask: Callable[[bool], None] | None = None  # None: nobody can be asked
        self.is_granted = False


ASKING = Asking()


@contextlib.contextmanager
def timing() -> Iterator[None]:
    """Time something in this context, inside a clean process: other lessons wait until it ends. Elsewhere, or inside
    another such context, nothing happens."""
    if ASKING.is_granted or not ASKING.ask:
        yield
        return
    ASKING.ask(True)
    ASKING.is_granted = True
    try:
        yield
    finally:
        ASKING.is_granted = False
        ASKING.ask(False)


@contextlib.contextmanager
def no_clocks() -> Iterator[None]:
    """Refuse a function of a notebook's that reads a clock in this context, but not within `timing`: others may run
    beside it.

    Raises:
        outcomes.Invalid: it read one.
    """

    def refusing(name: str, clock: Callable[[], float]) -> Callable[[], float]:
        def read() -> float:
            if not ASKING.is_granted and sys._getframe(1).f_globals.get("__name__") in _READERS:
                raise outcomes.Invalid(f"it calls time.{name}, but other lessons may run beside it: measure='none'")
            return clock()

        return read

    with contextlib.ExitStack() as stack:
        for name in _CLOCKS:
            stack.enter_context(patch.object(time, name, refusing(name, getattr(time, name))))
        yield


class QuietLock:
    """A fair readers-writer lock: any number of lessons share the machine, or one is alone."""

    def __init__(self):
        self._changed = threading.Condition()
        self._sharing: set[str] = set()
        self._alone: str | None = None
        self._queue: dict[int, str] = {}  # who waits, in order of arrival
        self._number = itertools.count()
        self._began = 0.0
        self.alone_seconds: Counter[str] = Counter()  # that each lesson had the machine for itself
        self.waited_seconds: Counter[str] = Counter()  # and that it waited for others

    def take(self, lesson: str, alone: bool) -> None:
        """Give up what the lesson holds, then wait until it may share the machine or be alone.

        If the lesson leaves meanwhile it gets neither.
        """
        with self._changed:
            self._release(lesson)
            self._queue[number := next(self._number)] = lesson
            began = time.monotonic()

            def may_go() -> bool:
                is_free = self._alone is None and not (alone and self._sharing)
                return number not in self._queue or (is_free and next(iter(self._queue)) == number)

            self._changed.wait_for(may_go)
            self.waited_seconds[lesson] += time.monotonic() - began
            if self._queue.pop(number, None):
                if alone:
                    self._alone, self._began = lesson, time.monotonic()
                else:
                    self._sharing.add(lesson)
                self._changed.notify_all()

    def leave(self, lesson: str) -> None:
        """Give up what the lesson holds and what it waits for."""
        with self._changed:
            self._queue = {number: other for number, other in self._queue.items() if other != lesson}
            self._release(lesson)

    def _release(self, lesson: str) -> None:
        self._sharing.discard(lesson)
        if self._alone == lesson:
            self._alone = None
            self.alone_seconds[lesson] += time.monotonic() - self._began
        self._changed.notify_all()


def entry(lesson: str, threads: int, address: str) -> dict[str, str]:
    """The variable by which a lesson finds the course's lock. `threads`: of an experiment that shares the machine."""
    return {LOCK: f"{lesson} {threads} {address}"}


@contextlib.contextmanager
def short_folder() -> Iterator[str]:
    """A temporary folder for sockets, whose names may have about 100 bytes."""
    with tempfile.TemporaryDirectory(prefix="course-", dir="/tmp" if os.path.isdir("/tmp") else None) as folder:
        yield folder


@contextlib.contextmanager
def served(lock: QuietLock) -> Iterator[str]:
    """Let other processes take a lock of this one; yields its address, for `entry`."""
    with short_folder() as folder, connection.Listener(os.path.join(folder, "quiet"), "AF_UNIX") as listener:

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
    """Whether this process belongs to a lesson beside which others may run."""
    return LOCK in os.environ


class _Lesson:
    """This process's side of the lock; its threads share what the lesson holds."""

    def __init__(self):
        self._guard = threading.Lock()
        self._course: connection.Connection | None = None
        self._running: Counter[bool] = Counter()  # experiments under way, by whether each is alone

    @contextlib.contextmanager
    def experiment(self, alone: bool) -> Iterator[None]:
        """Perform an experiment in this context: `alone` on a quiet machine, or beside other lessons."""
        with self._guard:
            # To ask for a share again lets those go first that wait for a quiet machine.
            if not self._running[True] and (alone or not self._running[False]):
                self._take(alone)
            self._running[alone] += 1
        try:
            yield
        finally:
            with self._guard:
                self._running[alone] -= 1
                if alone and not self._running[True]:
                    self._take(alone=False)

    def threads(self) -> int | None:
        """How many threads a clean process that starts now computes with; None: as many as torch chooses."""
        return int(os.environ[LOCK].split(" ")[1]) if is_in_course() and not self._running[True] else None

    def _take(self, alone: bool) -> None:
        if not is_in_course():
            return
        name, _, address = os.environ[LOCK].split(" ", 2)
        with contextlib.suppress(EOFError, OSError):  # the course was killed
            self._course = self._course or connection.Client(address, "AF_UNIX")
            self._course.send((name, alone))
            self._course.recv()


_LESSON = _Lesson()
alone, threads = functools.partial(_LESSON.experiment, alone=True), _LESSON.threads


def is_untimed() -> bool:
    """Whether this process belongs to a lesson at the smallest sizes, where no time means anything."""
    return UNTIMED in os.environ


def experiment(alone: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context of an experiment; see `_Lesson.experiment`."""
    return _LESSON.experiment(alone and not is_untimed())
