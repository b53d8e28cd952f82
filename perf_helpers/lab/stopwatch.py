"""Seconds of pieces of code that take turns in one process: an operation, an update, a pass.

For a lesson's own parts, inside a function that `Lab.run` performs; whole trainings are compared by `Lab.compare`.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

from perf_helpers.lab.hardware import is_rehearsal
from perf_helpers.unknown import NeedsValues

NO_TIME = "a rehearsal: no kernel computes, so there is no time"


def in_turns(works: Sequence[Callable[[], object]], turns: int = 8) -> list[list[tuple[float, float]]]:
    """Call each of several functions once a turn, and say what each call took.

    The order changes from turn to turn, so that nobody always follows the same one. A first
    turn warms up and is not told. The current CUDA device, if this process has used one, is waited for: both clocks
    then tell its seconds. On a CPU, set the number of threads first: one is disturbed least.

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
        raise ValueError(f"{len(works)} functions, turns={turns}: at least one of each")
    for work in works:
        work()
    if is_rehearsal():
        raise NeedsValues(NO_TIME)
    taken: list[list[tuple[float, float]]] = [[] for _ in works]
    for order in itertools.islice(_orders(len(works)), turns):
        for which in order:
            taken[which].append(_seconds(works[which]))
    return taken


def _orders(count: int) -> Iterator[Sequence[int]]:
    """Orders of so many functions without end: all there are of a few, of more some at random, always the same ones."""
    if count < 4:
        return itertools.cycle(itertools.permutations(range(count)))
    random_order = random.Random(0)
    return (random_order.sample(range(count), count) for _ in itertools.count())


def _seconds(work: Callable[[], object]) -> tuple[float, float]:
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
