"""What is done in clean processes, and for how long: one experiment, two in turns, any function."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

from perf_helpers.lab import hardware, interleaving, outcomes, worker
from perf_helpers.lab.forkserver import SERVER, CleanProcess
from perf_helpers.lab.outcomes import Outcome
from perf_helpers.lab.training import Experiment

Value = TypeVar("Value")

_limit: ContextVar[tuple[float, float]] = ContextVar("limit", default=(float("inf"), 0.0))  # (until when, of seconds)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Whatever is performed inside this context has so many seconds together: then it is ended as "timed out"."""
    token = _limit.set(min(_limit.get(), (time.monotonic() + seconds, seconds)))
    try:
        yield
    finally:
        _limit.reset(token)


def seconds_left() -> float:
    """What is left of `within`; infinity outside."""
    return max(0.0, _limit.get()[0] - time.monotonic())


def are_measuring() -> bool:
    """Whether an experiment is being measured just now: what can wait should not take time from it."""
    return bool(SERVER.measuring)


def execute(
    experiment: Experiment, measure: str, timeout: float = 600, on_step: Callable[[int], None] | None = None
) -> Outcome:
    """Perform an experiment in a clean process; always returns an outcome (see `worker.perform`), with what it printed.

    Args:
        timeout: seconds after which the process and all that it started are ended: status "timed out".
        on_step: called with the number of a finished step, a few times a second at most.
    """
    job = functools.partial(worker.perform, experiment, measure)
    return _done(job, timeout, on_step, measured=measure != "none")


def account(experiment: Experiment, timeout: float = 600, on_step: Callable[[int], None] | None = None) -> Outcome:
    """The memory of an experiment with its breakdown: where one pass cannot tell both, by a second one that follows
    every tensor. On a CPU with a core for each the two run beside each other, which changes no count.

    Args:
        timeout, on_step: as in `execute`.
    """
    if not _may_be_paired(experiment):
        first = execute(experiment, "memory", timeout, on_step)
        if not first.ok or first.memory is None or first.memory.breakdown or experiment.arguments.compiles:
            return first
        return first.explained(execute(experiment, "categories", timeout, on_step))
    with within(timeout), contextlib.ExitStack() as stack:
        jobs = [functools.partial(worker.perform, experiment, measure) for measure in ("memory", "categories")]
        first, second = (stack.enter_context(CleanProcess(job, measured=True)) for job in jobs)
        outcome = _ended(first, on_step)
        return outcome.explained(_ended(second)) if outcome.ok else outcome


def _may_be_paired(experiment: Experiment) -> bool:
    """A function could write what its second pass reads, and what is counted by tensors needs no second one."""
    machine = hardware.this_machine()
    alone = experiment.function or experiment.arguments.compiles or experiment.is_counted_by_tensors
    return machine.kind == "cpu" and (machine.cpu_cores or 1) > 1 and not alone


def call(
    function: Callable[..., Value], *arguments, timeout: float, on_percent: Callable[[int], Any] | None = None
) -> Value:
    """What `function(*arguments, tell=...)` returns from a clean process.

    Args:
        function: it and its arguments travel by cloudpickle, and what it returns by pickle. It may call `tell` with how
            far it is, from 0 to 100, which is passed on to `on_percent`.
        timeout: seconds after which the process and all that it started are ended.

    Raises:
        outcomes.Invalid: the function raised it.
        Failed: the function raised something else, or its process ended or took too long.
    """
    came = _done(functools.partial(_called, function, arguments), timeout, on_percent)
    if came.ok:
        return came.value
    raise outcomes.Invalid(came.message) if came.status == "invalid" else Failed(came)


class Failed(RuntimeError):
    """A function gave no answer in its clean process; `outcome` says in what way."""

    def __init__(self, outcome: Outcome):
        super().__init__(outcome.message)
        self.outcome = outcome


def _called(function: Callable[..., Any], arguments: tuple, tell: Callable[[int], None]) -> Outcome:
    return Outcome(value=function(*arguments, tell=tell))


def _done(job, timeout: float, on_step: Callable[[int], Any] | None, measured: bool = False) -> Outcome:
    """The outcome that a job returns in a clean process, or that of the process's end."""
    with within(timeout), CleanProcess(job, measured=measured) as process:
        return _ended(process, on_step)


def _ended(process: CleanProcess, on_step: Callable[[int], Any] | None = None) -> Outcome:
    """The outcome of a process, with what it printed, once it has come to its end or its time has.

    Where several ranks are ended before their time, the message says in which line each one is; the note of an
    interruption does so too.
    """
    try:
        outcome = _wait(process, on_step)
    except TimeoutError:
        outcome = _timed_out(process.whereabouts())
    except KeyboardInterrupt as interruption:
        if where := process.whereabouts():
            interruption.add_note(where)
        raise
    output, errors = process.printed()
    if not outcome.ok:
        outcome = outcomes.explained(outcome, errors)
    return outcome.replace(output=output, errors=errors[-4000:])


def _wait(process: CleanProcess, on_step: Callable[[int], Any] | None = None) -> Outcome | None:
    """Wait until the process has had its turn; its outcome where it ended instead."""
    while True:
        kind, content = process.receive(seconds_left())
        if kind != "step":
            return None if kind == "turn" else content
        if on_step:
            on_step(content)


def _timed_out(where: str = "") -> Outcome:
    """The outcome of what was ended because its time was over; `where` it was then, if that is known."""
    text = f"no result within {_limit.get()[1]:g} s"
    return Outcome("timed out", f"{text}; {where}" if where else text)


class _Early(Exception):
    """One of two experiments ended before its turns were over."""

    def __init__(self, which: int, outcome: Outcome):
        if outcome.ok:
            outcome = interleaving.TOO_SHORT
        self.outcome = Outcome(outcome.status, f"the {('first', 'second')[which]} one: {outcome.message}")


def side_by_side(
    first: Experiment,
    second: Experiment,
    count: int,
    processes: int,
    steps_per_turn: int = 1,
    timeout: float = 600,
    on_turn: Callable[[int], Any] | None = None,
    at_once: int = 1,
) -> Outcome:
    """Let two experiments on the CPU, and the first one once more, take turns inside one clean process, several times.

    The outcome's value: for each process, for each of the three and each turn, (seconds, seconds of the processor).

    Args:
        count: turns of each experiment in a process.
        processes: in all.
        steps_per_turn: optimizer steps in a turn; the fastest one stands for the turn.
        on_turn: called now and then with the number of turns taken.
        at_once: processes that run beside each other, as many as have a core each. They disturb each other as any
            neighbour would, and both recipes alike, which take turns inside each.
    """
    taken, tell = [], on_turn or (lambda number: None)
    three = (first, second, first)
    job = functools.partial(interleaving.take, three, count, steps_per_turn)
    with within(timeout):
        for begun in range(0, processes, at_once):
            with contextlib.ExitStack() as stack:
                those = range(begun, min(begun + at_once, processes))
                living = [stack.enter_context(CleanProcess(job, measured=True)) for _ in those]
                for number, process in zip(those, living, strict=True):
                    done = number * len(three) * (count + 1)
                    outcome = _ended(process, lambda turn, done=done: tell(done + turn))
                    if not outcome.ok:
                        return outcome
                    taken.append(outcome.value)
    return Outcome(value=taken)


def alternate(
    first: Experiment,
    second: Experiment,
    turns: int,
    steps_per_turn: int = 1,
    timeout: float = 600,
    together: bool = True,
    on_turn: Callable[[], Any] | None = None,
) -> Outcome:
    """Let two experiments take turns (A B, B A, A B, ...), each in its clean process, and time every turn.

    The outcome's value: seconds of each turn of the first one, and of the second.

    Args:
        turns: pairs of turns.
        steps_per_turn: optimizer steps in a turn; the fastest one stands for the turn.
        together: both processes exist at once, one stopped while the other runs. False: each turn has a process of its
            own, for two experiments that do not fit on the device together.
        on_turn: called after each turn.
    """
    take = _living if together else _one_by_one
    with within(timeout):
        try:
            return Outcome(value=take((first, second), turns, steps_per_turn, on_turn or (lambda: None)))
        except _Early as early:
            return early.outcome
        except TimeoutError:
            return _timed_out()


def _order(turns: int) -> Iterator[int]:
    """Whose turn it is: 0 1, 1 0, 0 1, ..., so that neither always runs on what the other left in the caches."""
    return itertools.chain.from_iterable((0, 1) if number % 2 == 0 else (1, 0) for number in range(turns))


def _living(pair, turns: int, steps_per_turn: int, on_turn) -> list[list[float]]:
    """Seconds of each turn, from two processes that live and stop in turns."""
    with contextlib.ExitStack() as stack:
        processes = []
        for which, experiment in enumerate(pair):
            job = functools.partial(worker.perform, experiment.replace(steps=turns * steps_per_turn), "time")
            process = CleanProcess(job, turn=(experiment.warmup_steps, steps_per_turn), measured=True)
            processes.append(stack.enter_context(process))
            if outcome := _wait(process):
                raise _Early(which, outcome)
        for which in _order(turns):
            processes[which].go()
            if outcome := _wait(processes[which]):
                raise _Early(which, outcome)
            on_turn()
        return [_fastest(process, which, turns, steps_per_turn) for which, process in enumerate(processes)]


def _fastest(process: CleanProcess, which: int, turns: int, steps_per_turn: int) -> list[float]:
    """Seconds of the fastest step of each turn, once the process has come to its end."""
    outcome = None
    while not outcome:  # a function may have more steps than there are turns
        process.go()
        outcome = _wait(process)
    if not outcome.ok:
        raise _Early(which, outcome)
    every = outcome.timing.all_seconds[: turns * steps_per_turn]
    return [min(every[i : i + steps_per_turn], key=float) for i in range(0, len(every), steps_per_turn)]


def _one_by_one(pair, turns: int, steps_per_turn: int, on_turn) -> list[list[float]]:
    """Seconds of each turn, each from a process of its own."""
    seconds: list[list[float]] = [[], []]
    for which in _order(turns):
        outcome = execute(pair[which].replace(steps=steps_per_turn), "time", seconds_left())
        if not outcome.ok:
            raise _Early(which, outcome)
        seconds[which].append(min(outcome.timing.all_seconds, key=float))
        on_turn()
    return seconds
