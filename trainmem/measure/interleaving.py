"""Interleave functions or experiments: they run alternately, so that other load on the machine affects all equally.

`in_turns` is for the parts of a lesson (an operation, an update, a pass), inside a function that `Lab.run` performs.
`Lab.compare` compares whole trainings. Each training is a player, and the players run alternately: as threads of one
process (this module), or as one process each (module `processes`). A turn is the steps that one player runs before the
next player continues.

Two processes of the same code differ by some 10 % in CPU time, because of where their memory is and what the system
gives them, and no number of turns removes that. Inside one process all players share these conditions (and one memory
arena, see `forkserver`). The measured ratio still varies a little from process to process, so a comparison repeats the
turns in several processes (`processes.side_by_side`).
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
# Effects below this factor cannot be distinguished from noise in wall-clock time. On a shared 2-core CPU the same code,
# on one thread and interleaved with itself, gave ratios of 0.97 to 1.07 at best; with other load up to 1.3.
NOISE_FLOOR = {"cpu": 1.3, "cuda": 1.02}
TOO_SHORT = Outcome("crashed", "it ended before the comparison did: give it more steps")

Seconds = tuple[float, float]  # wall-clock seconds, CPU seconds of the process


def in_turns(works: Sequence[Callable[[], object]], turns: int = 8) -> list[list[Seconds]]:
    """Call several functions alternately, each `turns` times, and return the seconds of each call.

    The order changes from turn to turn. A first, untimed turn warms up. On a CPU, call `torch.set_num_threads(1)`
    first, because other load on the machine disturbs a single thread least.

    `Ratio.of_turns` takes the results for [a, b, a] from several processes: it returns b's speed relative to a's, with
    the difference between the two a's as the noise floor.

    Args:
        works: functions without arguments.
        turns: timed calls of each function.

    Returns:
        For each function, a list with (wall-clock seconds, CPU seconds of this process) of each timed call. If this
        process has used CUDA, both numbers are the seconds that the current device measured for the call.

    Raises:
        ValueError: no function, or turns below 1.
        NeedsValues: in a rehearsal, after one turn that shows that the functions run.
    """
    if not works or turns < 1:
        raise ValueError(f"{len(works)} functions and turns={turns}: give at least one of each")
    ended = _ended_children()
    for work in works:
        work()
    if is_rehearsal():
        raise NeedsValues(NO_TIME)
    is_on_one_core = quiet.computing_threads() == 1 and _ended_children() == ended and not psutil.Process().children()
    counted = 1 if quiet.is_untimed() else turns  # if times mean nothing, one turn shows that the functions run
    taken: list[list[Seconds]] = [[] for _ in works]
    with quiet.timing(quiet.Need.CORE if is_on_one_core else quiet.Need.MACHINE):
        for which in _order(len(works), counted):
            taken[which].append(_seconds(works[which]))
    return [each * (turns // counted) for each in taken]


def first_call(work: Callable[[], Any]) -> tuple[Seconds, Any]:
    """Call a function once, without a warm-up; return its seconds, as in `in_turns`, and its result.

    The seconds include work that the function does only in its first call, e.g. compiling. In a course the call
    reserves a part of the machine: one core if this process computes with one thread, otherwise the whole machine.

    Raises:
        NeedsValues: in a rehearsal, after the call.
    """
    results = []
    if is_rehearsal():
        work()
        raise NeedsValues(NO_TIME)
    with quiet.timing(quiet.Need.CORE if quiet.computing_threads() == 1 else quiet.Need.MACHINE):
        seconds = _seconds(lambda: results.append(work()))
    return seconds, results[0]


def _ended_children() -> object:
    """Return a value that changes when a child of this process ends: the resource usage of all ended children."""
    if sys.platform == "win32":
        return None  # no course runs several lessons there
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN)


def _order(count: int, turns: int) -> Iterator[int]:
    """Return indexes of players (functions or trainings that run alternately) in the order in which they run.

    In each round every player runs once, and the order varies from round to round: for up to three players, through all
    permutations; for more players, at random with a fixed seed.

    Args:
        count: number of players.
        turns: number of turns of each player.
    """
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


# An experiment that takes turns. The first `next` runs it to the end of its warm-up, later ones to the end of a turn,
# the last one to its end; each yields the outcome if there is one by then.
Player = Iterator[Outcome | None]


def play(
    names: Sequence[str], players: Sequence[Player], turns: int, steps_per_turn: int, on_turn: Callable[[int], Any]
) -> Outcome:
    """Run players (interleaved trainings) alternately, a few steps each, and return an outcome with their times.

    The outcome's value is a nested list: value[player][turn] is the `Seconds` of the turn's fastest step. If a player
    fails, `play` returns that player's outcome.

    Args:
        names: names of the players, for messages.
        players: iterators, see `Player`. The first `next` of a player runs its warm-up, each later `next` a turn.
            `next` returns the outcome of the training if the training has ended, otherwise None.
        turns: timed turns per player.
        steps_per_turn: steps in a turn.
        on_turn: called after each warm-up and each turn. Its argument is how many warm-ups and turns are finished, of
            all players together.
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
    clocks = timing.all_seconds, timing.all_cpu_seconds or timing.all_seconds  # a rehearsal has no CPU seconds
    parts = [slice(turn * steps_per_turn, (turn + 1) * steps_per_turn) for turn in range(turns)]
    return [tuple(min(clock[part], key=float) for clock in clocks) for part in parts]


class ThreadPlayer(threading.Thread):
    """Run one of several interleaved experiments in a thread that pauses after given steps.

    `next` lets the thread run until its next pause, or until the experiment ends. `next` returns the outcome if the
    experiment has ended, otherwise None.

    Args:
        perform: function that performs the experiment and returns its outcome. Its argument is a function, which it
            must call with the number of each finished step.
        stops: the numbers of the steps after which to pause.
    """

    def __init__(self, perform: Callable[[Callable[[int], None]], Outcome], stops: range):
        super().__init__(daemon=True)
        self._perform, self._stops = perform, stops
        self._outcome: Outcome | None = None
        self._turn, self._other_turn = threading.Semaphore(0), threading.Semaphore(0)

    def __next__(self) -> Outcome | None:
        if not self.ident:
            self.start()
        self._turn.release()
        self._other_turn.acquire()
        return self._outcome

    def run(self) -> None:
        self._turn.acquire()
        with _put_away():
            self._outcome = self._perform(self._stepped)
        self._other_turn.release()

    def _stepped(self, number: int) -> None:
        if number in self._stops:
            with _put_away():
                self._other_turn.release()
                self._turn.acquire()


@contextlib.contextmanager
def _put_away() -> Iterator[None]:
    """Empty accelerate's process-wide state in this context, then restore it.

    Several trainings run alternately in this process, and each of them needs a separate state.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    with contextlib.ExitStack() as stack:
        for kind in (PartialState, AcceleratorState, GradientState):
            stack.enter_context(patch.dict(kind._shared_state, clear=True))
        yield
