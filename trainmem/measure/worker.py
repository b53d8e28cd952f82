"""Run one experiment while one meter measures it, inside the fresh subprocess that `forkserver` made for it.

The process ends after `perform`, so nothing that is changed here needs to be restored.
"""

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from trainmem.core import adapters, hardware, optional_packages, outcomes, stack_dumps
from trainmem.core.families import bytes_of
from trainmem.core.outcomes import Invalid, Outcome
from trainmem.core.training import Experiment, infer, train
from trainmem.measure import forked, quiet
from trainmem.measure.interleaving import NO_TIME
from trainmem.records import Timing
from trainmem.texts import bytes_text
from trainmem.unknown import Unknown

# Steps of compiled code, of which the last counts: a model may be compiled again after its first call, because
# transformers' models complete their configuration in that call.
_METERED_COMPILED = 4


def perform(experiment: Experiment, measure: str, on_step: Callable[[int], None] | None = None) -> Outcome:
    """Perform an experiment while one meter measures it; always return an outcome, even if the experiment fails.

    Args:
        measure: the meter. "memory": the memory meter, for two optimizer steps (on a GPU three; for compiled code a
            few, of which the last counts). "categories": the memory meter, which tracks every tensor of two steps (see
            `memory_meter`). "time": the time meter, for the requested steps. "none": no meter. "value": no meter, and
            an error if the experiment's code reads a clock, because other lessons of a course may be running.
        on_step: called after each optimizer step with its number; None: not called.
    """
    try:
        outcome = (_launch if experiment.processes > 1 else _perform)(experiment, measure, on_step)
    except BaseException as error:
        outcome = outcomes.failed(error)
    with contextlib.suppress(Exception):  # if it fails, the outcome already is a failure that says why
        outcome = outcome.replace(weights=experiment.weights and str(experiment.weights))
    return outcome


def _perform(experiment: Experiment, measure: str, on_step) -> Outcome:
    import torch

    from trainmem.measure import memory_meter, time_meter

    if experiment.threads:
        torch.set_num_threads(experiment.threads)
    if refusal := _refusal(experiment):
        return Outcome("refused", refusal)
    with tempfile.TemporaryDirectory(prefix="perf_helpers-", dir=forked.own_folder()) as folder:
        on_cpu = bool(experiment.arguments.get("use_cpu"))
        if measure in ("memory", "categories"):
            if experiment.arguments.compiles:
                steps = min(experiment.arguments.get("max_steps", _METERED_COMPILED), _METERED_COMPILED)
                meter = memory_meter.MemoryMeter(on_cpu=on_cpu, compiling_steps=steps - 1)
            else:
                by_tensors = experiment.is_counted_by_tensors
                alone = measure == "memory" and torch.cuda.is_available() and not on_cpu
                steps = experiment.steps_on_a_gpu if alone else experiment.metered_steps
                meter = memory_meter.MemoryMeter(measure == "categories", on_cpu, by_tensors)
            with meter:
                outcome = _execute(experiment, folder, steps, keep_losses=False)
            return outcome.replace(memory=meter.result())
        if hardware.is_rehearsal():
            return _rehearse(experiment, folder, measure, on_step)
        if measure == "time":
            with time_meter.TimeMeter(experiment.warmup_steps, on_step) as meter:
                steps = experiment.steps + experiment.warmup_steps
                outcome = _execute(experiment, folder, steps, keep_losses=True, on_pass=meter.stepped)
            return outcome.replace(timing=meter.result(experiment.samples_per_step))
        with quiet.no_clocks() if measure == "value" else quiet.reserving():
            return _execute(experiment, folder, experiment.steps, keep_losses=True)


def _rehearse(experiment: Experiment, folder: str, measure: str, on_step) -> Outcome:
    """Perform an experiment in a rehearsal, without a memory meter; its losses and times, if any, are `Unknown`.

    `measure`: the requested meter, "time", "none" or "value".
    """
    from trainmem.measure import time_meter

    known, short = untimed(experiment, measure), experiment
    if known.losses:  # a training by the Trainer without `num_train_epochs`
        short = experiment.replace(arguments=experiment.arguments.replace(max_steps=min(len(known.losses), 2)))
    with time_meter.TimeMeter(1, on_step) as meter:
        outcome = _execute(short, folder, 2, keep_losses=True)
    timed = meter.result() is not None and measure == "time"
    return outcome.replace(losses=known.losses, timing=known.timing if timed else None)


def untimed(experiment: Experiment, measure: str = "time") -> Outcome:
    """Return an outcome whose times and losses are `Unknown`; the experiment does not run.

    The outcome has one unknown loss for each step of the training and, if `measure` is "time", for each warm-up step.
    """
    unknown, arguments, losses = Unknown(NO_TIME), experiment.arguments, None
    if not experiment.function and experiment.training and arguments.get("num_train_epochs") is None:
        steps = experiment.steps + (experiment.warmup_steps if measure == "time" else 0)
        losses = (unknown,) * arguments.get("max_steps", steps)
    every = (unknown,) * experiment.steps
    timing = Timing(unknown, unknown, experiment.steps, experiment.warmup_steps, unknown, every)
    return Outcome(timing=timing, losses=losses)


def _execute(experiment: Experiment, folder: str, steps: int, keep_losses: bool, on_pass=lambda: None) -> Outcome:
    if experiment.function:
        import cloudpickle

        return Outcome(value=_plain(cloudpickle.loads(experiment.function)(experiment.task)))
    if not experiment.training:
        infer(experiment, steps, on_pass)
        return Outcome()
    losses = train(experiment, folder, steps, keep_losses)
    return Outcome(losses=tuple(losses) if keep_losses else None)


def _plain(value: Any) -> Any:
    """Return a value in types that JSON can hold: tensors and arrays become lists and numbers.

    Raises:
        TypeError: a value of another type.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"the function returned a {type(value).__name__}, which JSON cannot store: return numbers or text")


def _refusal(experiment: Experiment) -> str | None:
    """Return why an experiment needs more than this machine's memory or /dev/shm; None: the experiment may start."""
    if experiment.function or hardware.is_rehearsal():  # the rehearsed card's allocator reports it itself
        return None
    import torch

    try:
        parameters, weights = experiment.task.parameters(), experiment.weights
        if weights.quantization:
            adapters.import_method(weights.quantization)  # what it allocates then does not belong to the training
    except ValueError as error:
        raise Invalid(str(error)) from error

    on_cpu = experiment.arguments.get("use_cpu") or not torch.cuda.is_available()
    if on_cpu and experiment.training and (why := optional_packages.needs_gpu(experiment.arguments.optimizer)):
        raise Invalid(why)
    machine = hardware.describe()
    available = machine.memory_available_bytes if on_cpu else max(gpu.memory_bytes or 0 for gpu in machine.gpus)
    arguments = experiment.arguments
    size = getattr(torch, weights.dtype).itemsize
    if weights.bits and not on_cpu:  # on a CPU the unquantized weights exist first
        size = weights.bits / 8
    alone = not experiment.training or bool(weights.bits or arguments.get("peft"))
    needed = size * parameters * (1 if alone else 2)
    if not available or needed <= available:
        return _refusal_of_workers(experiment, machine.shm_bytes)
    what = "weights" if alone else "weights and gradients"
    takes = f"its {what} alone take {needed / 1e9:.1f} GB, but only {available / 1e9:.1f} GB are available"
    return f"{experiment.task.model} has {parameters / 1e6:,.0f} M parameters: {takes}. Choose a smaller model"


def _refusal_of_workers(experiment: Experiment, free: int | None) -> str | None:
    """Return why the batches of DataLoader workers exceed `free`, the free bytes of /dev/shm; None: they fit."""
    task, of_trainer = experiment.task, experiment.arguments
    workers, size = of_trainer.get("dataloader_num_workers", 0), of_trainer.get("per_device_train_batch_size", 8)
    samples = min(task.dataset_size, workers * (of_trainer.get("dataloader_prefetch_factor") or 2) * size)
    # If they do not fit, torch could wait for a batch for ever. `free` is None: no /dev/shm.
    if not samples or free is None or (needed := bytes_of(task.arrays(samples))) <= free:
        return None
    return (
        f"dataloader_num_workers={workers}: prefetched batches take {bytes_text(needed)} of /dev/shm, but only "
        f"{bytes_text(free)} are free. Enlarge it (docker run --shm-size=2g), or set dataloader_num_workers=0"
    )


def threads_of(experiment: Experiment) -> int | None:
    """Return the number of threads with which each process of an experiment computes; None: torch's default.

    With several ranks, the number is `experiment.threads`, or if that is None, each rank's equal part of the cores.
    """
    if experiment.threads or experiment.processes == 1:
        return experiment.threads
    return max(1, (hardware.describe().cpu_cores or 1) // experiment.processes)


def _launch(experiment: Experiment, measure: str, on_step: Callable[[int], None] | None) -> Outcome:
    """Perform an experiment on its ranks, again if the ranks did not connect to each other; return the outcome."""
    outcome = _launch_once(experiment, measure, on_step)
    return _launch_once(experiment, measure, on_step) if _NEVER_MET in outcome.message else outcome


def _launch_once(experiment: Experiment, measure: str, on_step: Callable[[int], None] | None) -> Outcome:
    """Perform an experiment on its ranks by torch's elastic launcher; return rank 0's outcome or the first failure."""
    import multiprocessing

    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    devices = torch.cuda.device_count()
    if not experiment.function and not experiment.arguments.get("use_cpu") and 0 < devices < experiment.processes:
        text = (
            f"{experiment.processes} ranks need a GPU each, but there are {devices}: set use_cpu=True to train on CPU"
        )
        return Outcome("refused", text)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(address := server.getsockname(), timeout=10).close()
    except OSError as error:  # torch's launcher would retry for minutes
        return Outcome("refused", f"ranks cannot connect over loopback ({error}): run `ip link set lo up`")
    fork = multiprocessing.get_context("fork")
    barrier, ends = fork.Barrier(experiment.processes), fork.SimpleQueue()
    threads, oom_kills = threads_of(experiment), outcomes.oom_kills()
    with tempfile.TemporaryDirectory(prefix="perf_helpers-", dir=forked.own_folder()) as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=experiment.processes,
            run_id=f"perf_helpers-{os.getpid()}",
            # The default, c10d, names the caller of each event by inspect.stack(): with transformers imported these
            # calls take 40 % of a launch.
            rdzv_backend="static",
            rdzv_configs={"rank": 0},
            rdzv_endpoint="{}:{}".format(*address),
            local_addr="127.0.0.1",  # otherwise the machine's name is looked up, which may fail or take seconds
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            max_restarts=0,
            monitor_interval=0.05,
            start_method="fork",
        )
        try:
            ranks = elastic_launch(config, _rank)(
                experiment.replace(threads=threads), measure, on_step, folder, barrier, ends
            )
        except torch.distributed.DistNetworkError as error:  # another process took the port meanwhile
            return Outcome("crashed", f"{_NEVER_MET}: {error}")
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            ends_by_rank = {}
            while not ends.empty():
                ends_by_rank |= ends.get()
            return _failed_rank(rank, first.exitcode, ends_by_rank, oom_kills)
    every = tuple(ranks[rank] for rank in sorted(ranks))
    refused = next((outcome for outcome in every if not outcome.ok), None)
    return refused or every[0].replace(ranks=every)


def _failed_rank(rank: int, code: int, ends: dict[int, Outcome | None], oom_kills: int) -> Outcome:
    """Return the outcome of an experiment in which `rank` was the first rank to fail, with the exit code `code`.

    `ends`: {rank: its failure; None: a normal end}; `oom_kills`: `outcomes.oom_kills()` before the ranks began.
    """
    outcome = ends.get(rank) or outcomes.died(code, oom_kills)
    if outcome.status == "invalid":
        return outcome
    message = f"rank {rank}: {outcome.message}"
    early = [str(other) for other, end in sorted(ends.items()) if end is None]
    if early and _lost_connection(outcome):
        others = f"rank{'s' * (len(early) > 1)} {', '.join(early)}"
        message += f"; {others} had already ended, after fewer collectives"
    return outcome.replace(message=message)


def _lost_connection(outcome: Outcome) -> bool:
    return any(words in outcome.message.lower() for words in _LOST_CONNECTION)


def _rank(experiment: Experiment, measure: str, on_step, folder: str, barrier, ends) -> Outcome:
    """Perform an experiment as one rank, in a process that dies with its parent, and return the rank's outcome.

    Args:
        measure, on_step: as in `perform`; rank 0 calls `on_step`.
        folder: folder for the rank's files.
        barrier: barrier of all ranks.
        ends: queue that gets {rank: the outcome with which it failed, or None if it ended normally}.
    """
    import torch

    forked.die_with_parent()
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a Python handler, as the launcher's, would run after a collective
    stack_dumps.answer_signals(forked.own_folder() or folder, rank)
    _meet_or_fail()
    torch.distributed.set_debug_level_from_env()  # torch read the environment of the fork server when imported
    tempfile.tempdir = folder  # the launcher removes it, however this rank ends
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if os.path.exists("/sys/class/net/lo") else "lo0")
    if torch.cuda.device_count() >= experiment.processes:
        torch.cuda.set_device(rank)

    quiet.ASKING.ask = None  # ranks share one channel, so none of them may use it to ask

    def in_step(number: int) -> None:  # all ranks stop and continue together
        barrier.wait()
        if rank == 0:
            on_step(number)
        barrier.wait()

    takes_turns = getattr(on_step, "takes_turns", False)  # then it may block while other experiments run
    try:
        outcome = _perform(experiment, measure, in_step if takes_turns else on_step if rank == 0 else None)
    except BaseException as error:
        outcome = outcomes.failed(error)
        ends.put({rank: outcome})
        if _lost_connection(outcome):
            time.sleep(2)  # so that the rank at fault exits first: the launcher reports the first
        sys.stdout.flush()
        # The launcher then ends the other ranks, so that none waits in a collective for ever.
        os._exit(1)  # no destroy_process_group: it waits for the others
    ends.put({rank: None})
    if torch.distributed.is_initialized():
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()
    return outcome


def _meet_or_fail() -> None:
    """Make each new gloo group raise RuntimeError if the ranks have not connected after a minute."""
    # gloo connects all pairs of ranks. If one fails, all ranks wait silently until torch's timeout, half an hour.
    # Seen twice, in launches of eight ranks on two cores, and not in 450 further launches.
    from torch.distributed import distributed_c10d

    class Gloo(distributed_c10d.ProcessGroupGloo):
        def __init__(self, *where, timeout, **options):  # torch adds options between releases: 2.14 added one
            try:
                super().__init__(*where, timeout=min(timeout, _TO_MEET), **options)
            except RuntimeError as error:
                raise RuntimeError(f"{_NEVER_MET}: {error}") from error
            self._set_default_timeout(timeout)

    distributed_c10d.ProcessGroupGloo = Gloo


_TO_MEET = timedelta(seconds=60)
_NEVER_MET = "the ranks did not connect to each other"  # nothing has been measured at that point
_LOST_CONNECTION = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
