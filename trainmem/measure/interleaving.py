"""Turns: functions or experiments of which one runs at a time, so that what disturbs a machine disturbs all alike.

`in_turns` is for a lesson's own parts, an operation, an update, a pass, inside a function that `Lab.run` performs.
Whole trainings are compared by `Lab.compare`, which lets players take their turns: threads of one process here,
processes in `processes`.

Two processes of the same code differ by some 10 % in CPU time, by where their memory lies and what the system gives
them, and no number of turns takes that away. Inside one process both have the same luck (from one arena of memory, see
`forkserver`), and what is left differs from process to process: so a comparison takes several processes of such turns
(`processes.side_by_side`).
"""

import contextlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import psutil

from trainmem.core.hardware import is_rehearsal
from trainmem.core.outcomes import Outcome
from trainmem.measure import quiet
from trainmem.records import Timing
from trainmem.unknown import NeedsValues

NO_TIME = "a rehearsal measures no time, because no kernel computes"
# Effects below this factor cannot be told from noise in wall-clock time. On a shared 2-core CPU the same code, on one
# thread and interleaved with itself, gave ratios of 0.97 to 1.07 at best; with other load on the machine up to 1.3.
NOISE_FLOOR = {"cpu": 1.3, "cuda": 1.02}
TOO_SHORT = Outcome("crashed", "it ended before the comparison did: give it more steps")

Seconds = tuple[float, float]  # by the wall's clock, and that a process computed


def in_turns(works: Sequence[Callable[[], object]], turns: int = 8) -> list[list[Seconds]]:
    """Call each of several functions once a turn, and say what each call took.

    The order changes from turn to turn. A first turn warms up and is not told. The current CUDA device, if this process
    has used one, is waited for: both clocks then tell its seconds. On a CPU, set the number of threads first: one is
    disturbed least.

    With works [a, b, a] what several processes return is what `Ratio.of_turns` takes: b's speed against a's, with a's
    difference from itself as the noise floor.

    Args:
        works: functions without arguments.
        turns: calls of each that are told.

    Returns:
        For each function and each turn (seconds by the wall's clock, seconds that this process computed).

    Raises:
        ValueError: no function, or turns below 1.
        NeedsValues: in a rehearsal, after one turn that shows that they run.
    """
    if not works or turns < 1:
        raise ValueError(f"{len(works)} functions and turns={turns}: give at least one of each")
    ended = _ended_children()
    for work in works:
        work()
    if is_rehearsal():
        raise NeedsValues(NO_TIME)
    is_on_one_core = _threads() == 1 and _ended_children() == ended and not psutil.Process().children()
    counted = 1 if quiet.is_untimed() else turns  # where no time means anything one turn shows that they run
    taken: list[list[Seconds]] = [[] for _ in works]
    with quiet.timing(quiet.Need.CORE if is_on_one_core else quiet.Need.MACHINE):
        for which in _order(len(works), counted):
            taken[which].append(_seconds(works[which]))
    return [each * (turns // counted) for each in taken]


def _threads() -> int:
    """Return the number of threads that operations use, and those of Python beside this one."""
    import torch

    return torch.get_num_threads() + threading.active_count() - 1


def _ended_children() -> object:
    """Return what the processes that this one started and that have ended used; it changes when another one ends."""
    if sys.platform == "win32":
        return None  # no course runs several lessons there
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN)


def _order(count: int, turns: int) -> Iterator[int]:
    """Whose turn it is, so that nobody always follows the same one: in all the orders there are of a few, of more in
    some at random, always the same ones."""
    if count < 4:
        orders = itertools.cycle(itertools.permutations(range(count)))
    else:
        random_order = random.Random(0)
        orders = (random_order.sample(range(count), count) for _ in range(turns))
    return itertools.chain.from_iterable(itertools.islice(orders, turns))


def _seconds(work: Callable[[], object]) -> Seconds:
    import torch

    if not torch.cuda.is_initialized():
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        return time.perf_counter() - wall, time.process_time() - cpu
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return (begin.elapsed_time(end) / 1e3,) * 2


# An experiment that takes turns: each `next` lets it run to the end of one, the first time only to that of its warm-up,
# the last time to the end of all; it yields its outcome when it has one.
Player = Iterator[Outcome | None]


def play(
    names: Sequence[str], players: Sequence[Player], turns: int, steps_per_turn: int, on_turn: Callable[[int], Any]
) -> Outcome:
    """Let players take turns. The outcome's value: for each of them, and each turn, the `Seconds` of its fastest step.

    Args:
        names: of the players, for messages.
        on_turn: called after each turn with the number of turns taken; the one that warms up is one.
    """
    outcomes: dict[int, Outcome] = {}
    for number, which in enumerate((*range(len(players)), *_order(len(players), turns)), 1):
        if outcome := next(players[which]):
            if outcome.ok and (not outcome.timing or outcome.timing.steps < turns * steps_per_turn):
                outcome = TOO_SHORT
            if not outcome.ok:
                return outcome.replace(message=f"{names[which]}: {outcome.message}")
            outcomes[which] = outcome
        on_turn(number)
    return Outcome(value=[_fastest(outcomes[which].timing, turns, steps_per_turn) for which in range(len(players))])


def _fastest(timing: Timing, turns: int, steps_per_turn: int) -> list[Seconds]:
    clocks = timing.all_seconds, timing.all_cpu_seconds or timing.all_seconds  # no second one in a rehearsal
    parts = [slice(turn * steps_per_turn, (turn + 1) * steps_per_turn) for turn in range(turns)]
    return [tuple(min(clock[part], key=float) for clock in clocks) for part in parts]


class ThreadPlayer(threading.Thread):
    """A player in a thread of its own: of several in one process only one runs at a time.

    Args:
        perform: performs the experiment and gives its outcome; it is to call what it is given after each step, with the
            number of the step.
        stops: the steps after which it stops.
    """

    def __init__(self, perform: Callable[[Callable[[int], None]], Outcome], stops: range):
        super().__init__(daemon=True)
        self._perform, self._stops = perform, stops
        self._outcome: Outcome | None = None
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)

    def __next__(self) -> Outcome | None:
        if not self.ident:
            self.start()
        self._mine.release()
        self._theirs.acquire()
        return self._outcome

    def run(self) -> None:
        self._mine.acquire()
        with _put_away():
            self._outcome = self._perform(self._stepped)
        self._theirs.release()

    def _stepped(self, number: int) -> None:
        if number in self._stops:
            with _put_away():
                self._theirs.release()
                self._mine.acquire()


@contextlib.contextmanager
def _put_away() -> Iterator[None]:
    """Meanwhile accelerate has nothing of what it keeps for a whole process; then it has again what it had."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    with contextlib.ExitStack() as stack:
        for kind in (PartialState, AcceleratorState, GradientState):
            stack.enter_context(patch.dict(kind._shared_state, clear=True))
        yield
