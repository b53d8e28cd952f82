"""Perform experiments, for `Runner`: in fresh subprocesses of this process, or of the workers of an executor."""

import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future

from trainmem.core import hardware
from trainmem.core.hardware import Machine
from trainmem.core.outcomes import Outcome
from trainmem.core.training import Experiment
from trainmem.measure import processes, quiet, worker
from trainmem.records import now


def seen_by(executor: Executor | None) -> tuple[Machine, dict[str, str | None]]:
    """Return (the machine on which experiments run, {package: version} of the packages installed there).

    `executor`: the executor that performs the experiments; its workers are asked. None: this machine performs them.
    """
    if executor is None:
        return hardware.describe(), hardware.versions()
    return executor.submit(hardware.describe).result(), executor.submit(hardware.versions).result()


def submit(executor: Executor, function: Callable[..., Outcome], *arguments) -> "Future[Outcome]":
    """Submit a call of `function` with `arguments` to an executor; return its future, which `outcome_of` reads.

    The call gets a unique argument, because Dask would otherwise return the result of an earlier equal call.
    """
    return executor.submit(perform, uuid.uuid4().hex, function, *arguments)


def outcome_of(future: "Future[Outcome]") -> Outcome:
    """Wait for a submitted function and return its outcome; an interruption cancels the call.

    The outcome is "killed" if the worker that performed the call died.
    """
    try:
        return future.result()
    except Exception as error:
        # Dask raises it after the retries that its scheduler allows; Dask need not be installed here.
        if not isinstance(error, BrokenExecutor) and type(error).__name__ != "KilledWorker":
            raise
        return Outcome("killed", str(error).split(". ")[0], attempts=getattr(error, "attempts", ()))
    except BaseException:
        future.cancel()
        raise


def perform(number: str, function: Callable[..., Outcome], *arguments) -> Outcome:
    """Call `function` with `arguments`, and return its outcome with the machine and the package versions added.

    On a Dask worker also add a record of this call: worker, start and end times, status. `number` only makes each call
    unique for Dask.
    """
    start = now("milliseconds")
    outcome = function(*arguments)
    if worker := _worker():
        attempt = {"worker": str(worker.name), "address": worker.address, "began": start}
        attempt |= {"ended": now("milliseconds"), "status": outcome.status, "message": outcome.message}
        outcome = outcome.replace(attempts=(attempt,))
    return outcome.replace(machine=hardware.describe().to_dict(), versions=hardware.versions())


def measured(
    experiment: Experiment, meters: Sequence[str], timeout: float, on_step: Callable[[int], None] | None = None
) -> Iterator[Outcome]:
    """Run an experiment with one meter after the other; after each, yield an outcome with all figures so far.

    Stop after the first meter that fails.

    Args:
        meters: names of meters, e.g. ["memory", "time"]; each runs the experiment in a fresh subprocess. "memory" may
            need a second subprocess; "peak", which is "memory" without the breakdown by category, needs only one.
            "none" and "value" run the experiment without a meter. With "none", the experiment's code may read a clock.
            With "value", reading a clock raises an error, because other lessons of a course may be running. In a
            course, other lessons wait while something is timed.
        timeout: seconds per meter.
        on_step: called with the number of a finished step, at most a few times a second; None: not called.
    """
    known = Outcome()
    for meter in meters:
        # One process that times itself reserves the machine when it first calls a clock (`quiet.reserving`).
        alone = (meter == "none" and experiment.processes > 1) or (meter == "time" and experiment.function)
        with quiet.experiment(quiet.Need.MACHINE if alone else quiet.Need.SHARE, experiment.processes):
            if meter == "memory":
                outcome = processes.account(experiment, timeout, on_step)
            elif meter == "peak":
                outcome = processes.execute(experiment, "memory", timeout, on_step)
            elif meter == "time" and known.memory and hardware.is_rehearsal():
                outcome = worker.untimed(experiment)  # the memory pass ran it, and a rehearsal has no times
            else:
                outcome = processes.execute(experiment, meter, timeout, on_step)
        known = known.joined(outcome)
        yield known
        if not known.ok:
            break


def measure(experiment: Experiment, meters: Sequence[str], timeout: float) -> Outcome:
    """Run an experiment with one meter after the other, until one fails; return an outcome with the figures of all.

    `meters`: names of meters, e.g. ["memory", "time"]. "none" and "value" run the experiment without a meter: with
    "none" its code may read a clock, with "value" it must not, see `measured`. `timeout`: seconds per meter.
    """
    return [*measured(experiment, meters, timeout)][-1]


def _worker():
    """Return the Dask worker that runs this thread, or None."""
    distributed = sys.modules.get("distributed")
    try:
        return distributed and distributed.get_worker()
    except ValueError:
        return None
