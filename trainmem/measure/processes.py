"""Run experiments, interleaved experiments and functions in fresh subprocesses, within a time limit."""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from trainmem.core import hardware, outcomes
from trainmem.core.outcomes import Outcome
from trainmem.core.training import Experiment
from trainmem.measure import interleaving, quiet, worker
from trainmem.measure.forkserver import CleanProcess
from trainmem.texts import positive

_limit: ContextVar[tuple[float, float]] = ContextVar("limit", default=(float("inf"), 0.0))  # (deadline, seconds given)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit the total time of all experiments in this context to `seconds`; later experiments end as "timed out".

    Raises:
        ValueError: `seconds` are not above 0.
    """
    positive("timeout", seconds)
    token = _limit.set(min(_limit.get(), (time.monotonic() + seconds, seconds)))
    try:
        yield
    finally:
        _limit.reset(token)


def seconds_left() -> float:
    """Return the seconds that remain of the time limit set by `within`; infinity outside of that context."""
    return max(0.0, _limit.get()[0] - time.monotonic())


def execute(
    experiment: Experiment, measure: str, timeout: float = 600, on_step: Callable[[int], None] | None = None
) -> Outcome:
    """Perform an experiment in a fresh subprocess; return its outcome, even if it fails, with what it printed.

    Args:
        measure: the meter: "memory", "categories" or "time"; "none": no meter; "value": no meter, and the experiment's
            code must not read a clock. See `worker.perform`.
        timeout: seconds after which the process and all that it started are ended, with status "timed out".
        on_step: called with the number of a finished step, at most a few times a second; None: not called.
    """
    job, options = functools.partial(worker.perform, experiment, measure), {}
    if measure == "time":
        # In a course a training has the machine alone after its warm-up; a function, which may time anything, always.
        warm = quiet.is_in_course() and not experiment.function
        options = {"turn": _once(max(1, experiment.warmup_steps)) if warm else None}
    options["shares_cores"] = measure not in ("time", "none")  # what is timed has the machine, with all its threads
    with within(timeout), CleanProcess(job, measured=measure in ("memory", "time", "categories"), **options) as process:
        return _ended(process, on_step)


def _once(step: int) -> tuple[int, int]:
    """Return the value of `turn` that stops a `CleanProcess` only once: after `step` steps, until `go` is called."""
    return step, sys.maxsize  # steps to the stop, and to a second stop, which no training reaches


def account(experiment: Experiment, timeout: float = 600, on_step: Callable[[int], None] | None = None) -> Outcome:
    """Return the outcome of an experiment with its memory and the breakdown by category.

    If one run cannot measure both, a second run tracks every tensor for the breakdown. The two runs may overlap on a
    CPU (see `_may_be_paired`), because the number of bytes does not depend on other load.

    Args:
        timeout: seconds for both runs together.
        on_step: called with the number of a finished step, at most a few times a second; None: not called.
    """
    if quiet.is_untimed() and not experiment.arguments.compiles:  # the smallest sizes: only the breakdown is looked at
        return execute(experiment, "categories", timeout, on_step)
    watch = functools.partial(worker.perform, experiment, "categories")
    with within(timeout), contextlib.ExitStack() as stack:
        beside = stack.enter_context(CleanProcess(watch, measured=True)) if _may_be_paired(experiment) else None
        first = execute(experiment, "memory", timeout, on_step)
        if not first.ok or not first.memory or first.memory.breakdown or experiment.arguments.compiles:
            return first
        second = _ended(beside) if beside else execute(experiment, "categories", timeout, on_step)
    return _explained(first, second) if second.ok else first


def _explained(first: Outcome, second: Outcome) -> Outcome:
    """Return the first run's outcome with the second run's breakdown by category, also for each rank."""
    ranks = [_explained(*pair) for pair in zip(first.ranks, second.ranks, strict=True)]
    memory = first.memory.explained(second.memory) if first.memory and second.memory else first.memory
    return first.replace(memory=memory, ranks=tuple(ranks))


def _may_be_paired(experiment: Experiment) -> bool:
    """Return whether `account` may measure memory and breakdown in two runs at the same time, on several CPU cores."""
    machine = hardware.this_machine()
    # Two runs of a function could write to the same files. Compiled code has no breakdown. With ranks, DataLoader
    # workers or DeepSpeed, the first run has the breakdown.
    alone = experiment.function or experiment.arguments.compiles or experiment.is_counted_by_tensors
    alone = alone or quiet.is_in_course()  # other lessons use the other cores
    return machine.kind == "cpu" and (machine.cpu_cores or 1) > 1 and not alone


def call(function: Callable, *arguments, timeout: float, on_percent: Callable[[int], Any] | None = None) -> Any:
    """Call `function(*arguments, tell=...)` in a fresh subprocess, and return what it returns.

    Args:
        function: sent with its arguments by cloudpickle; its result is pickled. It may call `tell` with its progress in
            percent, from 0 to 100, which is passed to `on_percent`.
        timeout: seconds after which the process and all that it started are ended.
        on_percent: called with the progress in percent; None: not called.

    Raises:
        outcomes.Invalid: the function raised it.
        Failed: the function raised something else, or its process ended or took too long.
    """
    with within(timeout), CleanProcess(functools.partial(_called, function, arguments)) as process:
        outcome = _ended(process, on_percent)
    if outcome.ok:
        return outcome.value
    raise outcomes.Invalid(outcome.message) if outcome.status == "invalid" else Failed(outcome)


class Failed(RuntimeError):
    """Raised if no result of a function arrived from its fresh subprocess; `outcome` says why."""

    def __init__(self, outcome: Outcome):
        super().__init__(outcome.message)
        self.outcome = outcome


def _called(function: Callable[..., Any], arguments: tuple, tell: Callable[[int], None]) -> Outcome:
    return Outcome(value=function(*arguments, tell=tell))


def _ended(process: CleanProcess, on_step: Callable[[int], Any] | None = None) -> Outcome:
    """Return the outcome of a process, with what the process printed, once it has ended or its time is over."""
    with contextlib.ExitStack() as alone:
        while not (outcome := _until_stop(process, on_step)):  # stopped, e.g. after a warm-up in a course (`_once`)
            alone.enter_context(_quiet(quiet.Need.MACHINE))  # until the process ends
            process.go()
    return outcome


def _until_stop(process: CleanProcess, on_step: Callable[[int], Any] | None = None) -> Outcome | None:
    """Return None as soon as a process stops, or its outcome once it has ended or its time is over."""
    try:
        with contextlib.ExitStack() as reserved:
            while True:
                match process.receive(seconds_left()):
                    case "step", number:
                        if on_step:
                            on_step(number)
                    case "turn", _:
                        return None
                    case "quiet", quiet.Need.SHARE:
                        reserved.close()
                    case "quiet", need:
                        reserved.enter_context(_quiet(need))  # until `Need.SHARE`, or the return
                        process.go()
                    case "result", outcome:
                        return _with_output(process, outcome)
    except TimeoutError:
        text = f"no result within {_limit.get()[1]:g} s"
        where = process.whereabouts()  # the line of each rank, if there are ranks
        return _with_output(process, Outcome("timed out", f"{text}; {where}" if where else text))
    except KeyboardInterrupt as interruption:
        if where := process.whereabouts():
            interruption.add_note(where)
        raise


def _with_output(process: CleanProcess, outcome: Outcome) -> Outcome:
    output, errors = process.printed()
    if not outcome.ok:
        outcome = outcomes.explained(outcome, errors)
    return outcome.replace(output=output)


@contextlib.contextmanager
def _quiet(need: quiet.Need) -> Iterator[None]:
    """Reserve `need`, a part of the machine, in this context; waiting for it does not use up the time limit."""
    start = time.monotonic()
    with quiet.experiment(need):
        until, seconds = _limit.get()
        _limit.set((until + time.monotonic() - start, seconds))
        yield


def side_by_side(
    experiments: Sequence[Experiment],
    turns: int,
    steps_per_turn: int = 1,
    timeout: float = 600,
    on_turn: Callable[[int], Any] | None = None,
    processes: int = 1,
    at_once: int = 1,
) -> Outcome:
    """Interleave experiments on the CPU inside one fresh subprocess, and repeat this in several subprocesses.

    See `interleaving`. The outcome's value is a nested list: value[process][experiment][turn] is (wall-clock seconds,
    CPU seconds) of the turn's fastest step.

    Args:
        turns: turns per experiment and process. In a turn an experiment runs `steps_per_turn` steps, then stops for the
            next experiment.
        steps_per_turn: optimizer steps per turn; the fastest step represents the turn.
        timeout: time limit of all processes together, in seconds.
        on_turn: called from time to time with the number of finished turns, warm-up included; None: not called.
        processes: number of subprocesses in total.
        at_once: number of subprocesses that run at the same time, at most one per core. The subprocesses disturb each
            other, but all experiments equally, because these are interleaved inside each subprocess.
    """
    taken, report = [], on_turn or (lambda number: None)
    job = functools.partial(_in_threads, experiments, turns, steps_per_turn)
    warm = _once(len(experiments)) if quiet.is_in_course() else None
    with within(timeout):
        for first in range(0, processes, at_once):
            with contextlib.ExitStack() as stack:
                those = range(first, min(first + at_once, processes))
                living = [stack.enter_context(CleanProcess(job, turn=warm, measured=True)) for _ in those]
                if warm:
                    if early := [*filter(None, map(_until_stop, living))]:
                        return early[0]
                    stack.enter_context(_quiet(quiet.Need.MACHINE))
                    for process in living:
                        process.go()
                for number, process in zip(those, living, strict=True):
                    done = number * len(experiments) * (turns + 1)
                    outcome = _ended(process, lambda turn, done=done: report(done + turn))
                    if not outcome.ok:
                        return outcome
                    taken.append(outcome.value)
    return Outcome(value=taken)


def _in_threads(experiments: Sequence[Experiment], turns: int, steps_per_turn: int, on_turn) -> Outcome:
    players = []
    for experiment in experiments:
        first, steps = experiment.warmup_steps, turns * steps_per_turn
        perform = functools.partial(worker.perform, experiment.replace(steps=steps), "time")
        players.append(interleaving.ThreadPlayer(perform, range(first, first + steps, steps_per_turn)))
    return interleaving.play([each.name for each in experiments], players, turns, steps_per_turn, on_turn)


def alternate(
    experiments: Sequence[Experiment],
    turns: int,
    steps_per_turn: int = 1,
    timeout: float = 600,
    on_turn: Callable[[int], Any] | None = None,
) -> Outcome:
    """Interleave experiments, each in one fresh subprocess, which stops while the others run; return their times.

    If the experiments do not fit on the device together, start again with a new subprocess for every turn. The
    outcome's value is a nested list: value[0][experiment][turn] is (wall-clock seconds, CPU seconds) of the turn's
    fastest step. Use only the wall-clock seconds: CPU seconds leave out the work on a GPU and in other ranks.

    Args:
        turns: turns per experiment.
        steps_per_turn: optimizer steps per turn.
        timeout: time limit of all experiments together, in seconds.
        on_turn: called after each turn with the number of finished turns, warm-up included; None: not called.
    """
    names, report = [experiment.name for experiment in experiments], on_turn or (lambda number: None)
    with within(timeout):
        for player in (_stopping, _fresh_each_turn):
            with contextlib.ExitStack() as stack:
                each = (contextlib.closing(player(experiment, turns, steps_per_turn)) for experiment in experiments)
                players = [*map(stack.enter_context, each)]
                outcome = interleaving.play(names, players, turns, steps_per_turn, report)
            if outcome.status != "out of memory":
                break
    return outcome.replace(value=[outcome.value]) if outcome.ok else outcome


def _stopping(experiment: Experiment, turns: int, steps_per_turn: int) -> interleaving.Player:
    """Run an experiment in one process; yield None at each stop (after the warm-up and each turn), then the outcome."""
    job = functools.partial(_in_what_is_left, experiment.replace(steps=turns * steps_per_turn))
    with CleanProcess(job, turn=(experiment.warmup_steps, steps_per_turn), measured=True) as process:
        for turn in range(turns + 1):
            outcome = _until_stop(process)
            while turn == turns and not outcome:  # a function may have more steps than there are turns
                process.go()
                outcome = _until_stop(process)
            yield outcome
            process.go()


def _in_what_is_left(experiment: Experiment, on_step: Callable[[int], None]) -> Outcome:
    """Return the outcome of an experiment that is timed in turns with others, which keep their memory on the device."""

    def stepped(number: int) -> None:
        import torch

        # After a release of cached memory, the experiment would run more slowly than alone: status "out of memory".
        if torch.cuda.is_initialized() and torch.cuda.memory_stats().get("num_alloc_retries"):
            raise MemoryError("the runs do not fit on the device together")
        on_step(number)

    stepped.takes_turns = True
    return worker.perform(experiment, "time", stepped)


def _fresh_each_turn(experiment: Experiment, turns: int, steps_per_turn: int) -> interleaving.Player:
    """Run each turn in a new process; yield None after a turn, but an outcome after the last or a failed turn."""
    yield None  # the caller expects a yield for a warm-up, but here each turn has its own
    seconds: tuple[float, ...] = ()
    for turn in range(1, turns + 1):
        outcome = execute(experiment.replace(steps=steps_per_turn), "time", float("inf"))
        if outcome.ok and outcome.timing:
            seconds += outcome.timing.all_seconds[:steps_per_turn]
            timing = dataclasses.replace(outcome.timing, steps=len(seconds), all_seconds=seconds, all_cpu_seconds=())
            outcome = outcome.replace(timing=timing) if turn == turns else None  # the last has all times
        yield outcome
