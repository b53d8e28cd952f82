"""Experiments in turns inside one process: each in a thread of its own, of which only one runs at a time.

Two processes of the same code differ by some 10 % in CPU time, by where their memory lies and what the system gives
them, and no number of turns takes that away. Inside one process both have the same luck (from one arena of memory, see
`forkserver`), and what is left differs from process to process: so a comparison takes several processes of such turns
(`processes.side_by_side`).
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

from perf_helpers.lab import worker
from perf_helpers.lab.outcomes import Outcome
from perf_helpers.lab.training import Experiment

TOO_SHORT = Outcome("crashed", "it ended before its turns were over: give it more steps")


def take(experiments: Sequence[Experiment], turns: int, steps_per_turn: int, on_turn: Callable[[int], None]) -> Outcome:
    """Let experiments on the CPU take turns. The outcome's value: for each of them, and each turn, (seconds by the
    wall's clock, seconds of the processor) of its fastest step.

    Args:
        turns: of each experiment.
        steps_per_turn: optimizer steps in a turn.
        on_turn: called after each turn with the number of turns taken.
    """
    length = turns * steps_per_turn
    players = [_Player(experiment.replace(steps=length), steps_per_turn) for experiment in experiments]
    taken = itertools.count(1)
    for which in [*range(len(players)), *_order(len(players), turns)]:  # at first each one warms up
        players[which].take_turn()
        if (outcome := players[which].outcome) and not outcome.ok:
            return outcome.replace(message=f"{players[which].name}: {outcome.message}")
        on_turn(next(taken))
    return Outcome(value=[_fastest(player.outcome, turns, steps_per_turn) for player in players])


def _order(count: int, turns: int) -> Iterator[int]:
    """Whose turn it is: in every order once before an order comes again, so that nobody always follows the same one."""
    rounds = itertools.cycle(itertools.permutations(range(count)))
    return itertools.chain.from_iterable(itertools.islice(rounds, turns))


def _fastest(outcome: Outcome, turns: int, steps_per_turn: int) -> list[tuple[float, float]]:
    wall, cpu = outcome.timing.all_seconds, outcome.timing.all_cpu_seconds
    slices = [slice(i * steps_per_turn, (i + 1) * steps_per_turn) for i in range(turns)]
    return [(min(wall[part]), min(cpu[part])) for part in slices]


class _Player(threading.Thread):
    """One experiment, which stops after each turn until it is let go on."""

    def __init__(self, experiment: Experiment, steps_per_turn: int):
        super().__init__(name=experiment.name, daemon=True)
        self.outcome: Outcome | None = None
        self._experiment, self._steps_per_turn = experiment, steps_per_turn
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)

    def take_turn(self) -> None:
        """Run to the end of the next turn; the last one goes to the end of the experiment."""
        if not self.ident:
            self.start()
        if not self.outcome:
            self._mine.release()
            self._theirs.acquire()

    def run(self) -> None:
        self._mine.acquire()
        with _put_away():
            outcome = worker.perform(self._experiment, "time", self._stepped)
        if outcome.ok and (not outcome.timing or outcome.timing.steps < self._experiment.steps):
            outcome = TOO_SHORT
        self.outcome = outcome
        self._theirs.release()

    def _stepped(self, number: int) -> None:
        done = number - self._experiment.warmup_steps
        if 0 <= done < self._experiment.steps and done % self._steps_per_turn == 0:
            with _put_away():
                self._theirs.release()
                self._mine.acquire()


@contextlib.contextmanager
def _put_away() -> Iterator[None]:
    """Meanwhile accelerate has nothing of what it keeps for a whole process; then it has again what it had."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    shared = [kind._shared_state for kind in (PartialState, AcceleratorState, GradientState)]
    kept = [dict(state) for state in shared]
    for state in shared:
        state.clear()
    try:
        yield
    finally:
        for state, mine in zip(shared, kept, strict=True):
            state.clear()
            state.update(mine)
