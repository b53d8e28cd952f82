"""Where experiments are performed: here, or wherever an executor performs them; and what is known of that place."""

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
    """The machine that experiments see, and the packages that they run with: of this process, or of where an executor
    performs these questions."""
    if executor is None:
        return hardware.describe(), hardware.versions()
    return executor.submit(hardware.describe).result(), executor.submit(hardware.versions).result()


def submit(executor: Executor, function: Callable[..., Outcome], *arguments) -> "Future[Outcome]":
    """Have a function performed elsewhere; see `outcome_of`. It is always performed: Dask would hand out what an equal
    call gave before."""
    return executor.submit(perform, uuid.uuid4().hex, function, *arguments)


def outcome_of(future: "Future[Outcome]") -> Outcome:
    """The outcome of what was submitted; "killed" where whoever performed it ended. If the wait for it is interrupted,
    it is cancelled."""
    try:
        return future.result()
    except Exception as error:
        # Dask's own, when it has tried in vain as often as its scheduler allows; Dask need not be installed here.
        if not isinstance(error, BrokenExecutor) and type(error).__name__ != "KilledWorker":
            raise
        return Outcome("killed", str(error).split(". ")[0], attempts=getattr(error, "attempts", ()))
    except BaseException:
        future.cancel()
        raise


def perform(number: str, function: Callable[..., Outcome], *arguments) -> Outcome:
    """What `submit` has done: the outcome with its machine and versions and, by a worker of a cluster, the attempt. The
    `number` makes this call unlike any other.
    """
    began = now("milliseconds")
    outcome = function(*arguments)
    if worker := _worker():
        attempt = {"worker": str(worker.name), "address": worker.address, "began": began}
        attempt |= {"ended": now("milliseconds"), "status": outcome.status, "message": outcome.message}
        outcome = outcome.replace(attempts=(attempt,))
    return outcome.replace(machine=hardware.describe().to_dict(), versions=hardware.versions())


def measured(
    experiment: Experiment, meters: Sequence[str], timeout: float, on_step: Callable[[int], None] | None = None
) -> Iterator[Outcome]:
    """What is known of an experiment after each of the meters, one after another, until one of them fails.

    Args:
        meters: "memory", "time", "none" or "value" (see `Lab.run`), each in a clean process of its own. In a course
            other lessons wait while something is timed.
        timeout: seconds that each may take.
        on_step: as in `processes.execute`.
    """
    known = Outcome()
    for meter in meters:
        alone = meter == "none" or (meter == "time" and experiment.function)
        with quiet.experiment(quiet.Need.MACHINE if alone else quiet.Need.SHARE, experiment.processes):
            if meter == "memory":
                outcome = processes.account(experiment, timeout, on_step)
            elif meter == "time" and known.memory and hardware.is_rehearsal():
                outcome = worker.untimed(experiment)  # it ran, and there is no time to be had
            else:
                outcome = processes.execute(experiment, meter, timeout, on_step)
        known = known.joined(outcome)
        yield known
        if not known.ok:
            break


def measure(experiment: Experiment, meters: Sequence[str], timeout: float) -> Outcome:
    """What is known of an experiment when all meters have `measured` it, or one failed."""
    return [*measured(experiment, meters, timeout)][-1]


def _worker():
    """Dask's worker that this thread works for; None where there is none."""
    distributed = sys.modules.get("distributed")
    try:
        return distributed and distributed.get_worker()
    except ValueError:
        return None
