"""What happens inside the clean process: one experiment is performed once, under one meter.

The process that calls `perform` is fresh and will end after it: nothing needs to be put back.
"""

import contextlib
import dataclasses
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from perf_helpers.lab import arguments as training_arguments
from perf_helpers.lab import hardware
from perf_helpers.lab.runs import Timing
from perf_helpers.lab.training import Experiment, Invalid, infer, train
from perf_helpers.unknown import NeedsValues, Unknown

NO_TIME = "a rehearsal: no kernel computes, so there is no time"

# Imported by the fork server once, so that a clean process has them at no cost. bitsandbytes is among them
# only where there is no device: importing it touches one.
PRELOAD = (
    "torch",
    "torch.profiler",
    "torch.distributed.launcher.api",
    "numpy",
    "datasets",
    "accelerate",
    "transformers",
    "transformers.trainer",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "cloudpickle",
    "perf_helpers.estimate.trace",
)


def perform(experiment: Experiment, measure: str, on_step: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Perform an experiment under one meter; the outcome is a dict with `status`, `message` and what was measured.

    Args:
        measure: "memory" (two optimizer steps under the memory meter), "categories" (the same, followed tensor by
        tensor,
            see `meters.MemoryMeter`), "time" (the steps asked for, under the time meter alone) or "none".
        on_step: called after each optimizer step with its number.
    """
    global _on_step
    _on_step = on_step
    try:
        if experiment.processes > 1:
            return _launch(experiment, measure, on_step)
        return _perform(experiment, measure, on_step)
    except BaseException as error:  # whatever ended it, the caller gets a result
        return failure(error)


_on_step: Callable[[int], None] | None = None


def report(number: int) -> None:
    """From an experiment that is a function: how far it is, told as a finished step is."""
    if _on_step:
        _on_step(number)


def failure(error: BaseException) -> dict[str, Any]:
    """The outcome of an experiment that an exception ended."""
    if isinstance(error, Invalid):
        return {"status": "invalid", "message": str(error)}
    if isinstance(error, NeedsValues):
        return {"status": "needs values", "message": str(error)}
    text = f"{type(error).__name__}: {error}".strip()
    lowered = text.lower()
    out_of_memory = (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "out of memory" in lowered
        or "defaultcpuallocator: can't allocate" in lowered
        or "not enough memory" in lowered
    )
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (line {frames[-1].lineno} of {os.path.basename(frames[-1].filename)})" if frames else ""
    return {
        "status": "out of memory" if out_of_memory else "crashed",
        "message": text.split("\n")[0][:1000] + where,
        "traceback": "".join(traceback.format_exception(error))[-4000:],
    }


def _perform(experiment: Experiment, measure: str, on_step) -> dict[str, Any]:
    import torch

    from perf_helpers.lab import meters

    if experiment.threads:
        torch.set_num_threads(experiment.threads)
    if refusal := _refusal(experiment):
        return {"status": "refused", "message": refusal}
    outcome: dict[str, Any] = {"status": "ok", "message": ""}
    with tempfile.TemporaryDirectory(prefix="perf_helpers-") as folder:
        if measure in ("memory", "categories"):
            categories = True if measure == "categories" else None
            with meters.MemoryMeter(categories, on_cpu=bool(experiment.arguments.get("use_cpu"))) as meter:
                outcome |= _execute(experiment, folder, steps=2, keep_losses=False)
            outcome["memory"] = meter.result().to_dict()
        elif hardware.is_rehearsal():
            outcome |= _rehearse(experiment, folder, measure, on_step)
        elif measure == "time":
            with meters.TimeMeter(experiment.warmup_steps, on_step) as meter:
                outcome |= _execute(experiment, folder, experiment.steps + experiment.warmup_steps, keep_losses=True)
            samples = training_arguments.samples_per_step(experiment.arguments, experiment.processes)
            if experiment.function:
                samples = experiment.arguments.get("samples_per_step")
            timing = meter.result(samples)
            outcome["timing"] = timing.to_dict() if timing else None
        else:
            outcome |= _execute(experiment, folder, experiment.steps, keep_losses=True)
    return outcome


def _rehearse(experiment: Experiment, folder: str, measure: str, on_step) -> dict[str, Any]:
    """What an experiment yields in a rehearsal without the memory meter: nothing is known of its time.

    It runs, two steps long where the Trainer makes the steps.
    """
    from perf_helpers.lab import meters

    known, short = untimed(experiment, measure), experiment
    if known.get("losses"):
        short = experiment.replace(arguments=experiment.arguments | {"max_steps": min(len(known["losses"]), 2)})
    with meters.TimeMeter(1, on_step) as meter:
        outcome = _execute(short, folder, 2, keep_losses=True)
    timed = meter.result() is not None and measure == "time"
    return outcome | {key: value for key, value in known.items() if key == "losses" or timed}


def untimed(experiment: Experiment, measure: str = "time") -> dict[str, Any]:
    """What is known of an experiment's time, and of its losses, where it need not even run: that they are unknown."""
    unknown, arguments = Unknown(NO_TIME), experiment.arguments
    every = (unknown,) * experiment.steps
    timing = Timing(unknown, unknown, experiment.steps, experiment.warmup_steps, unknown, every)
    outcome: dict[str, Any] = {"timing": dataclasses.asdict(timing)}  # not to_dict, which writes null for the unknown
    if not experiment.function and experiment.training and "num_train_epochs" not in arguments:
        steps = experiment.steps + (experiment.warmup_steps if measure == "time" else 0)
        outcome["losses"] = [Unknown(NO_TIME)] * arguments.get("max_steps", steps)
    return outcome


def _execute(experiment: Experiment, folder: str, steps: int, keep_losses: bool) -> dict[str, Any]:
    if experiment.function:
        import cloudpickle

        return {"value": _plain(cloudpickle.loads(experiment.function)(experiment.task))}
    if not experiment.training:
        infer(experiment)
        return {}
    losses = train(experiment, folder, steps, keep_losses)
    return {"losses": losses} if keep_losses else {}


def _plain(value: Any) -> Any:
    """The value as JSON holds it: tensors and arrays become lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"the function returned a {type(value).__name__}, which JSON cannot hold: return numbers or text")


def _refusal(experiment: Experiment) -> str | None:
    """Why the experiment is not even started: weights and gradients alone exceed this machine's memory."""
    if experiment.function or hardware.is_rehearsal():  # there the card's allocator says so, in its own words
        return None
    import torch

    try:
        parameters = experiment.task.parameters()
    except ValueError as error:
        raise Invalid(str(error)) from error

    training, model = training_arguments.split(experiment.arguments)
    on_cpu = training.get("use_cpu") or not torch.cuda.is_available()
    machine = hardware.describe()
    available = machine.memory_available_bytes if on_cpu else max(gpu.memory_bytes or 0 for gpu in machine.gpus)
    size = 4 if model.get("dtype") in (None, "float32") else 2
    needed = 2 * size * parameters
    if not available or needed <= available:
        return None
    return (
        f"{experiment.task.model} has {parameters / 1e6:,.0f} M parameters: its weights and gradients alone take "
        f"{needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB are available"
    )


def threads_of(experiment: Experiment) -> int | None:
    """Threads that an experiment computes on: ranks share the cores; None: as many as torch takes."""
    if experiment.threads or experiment.processes == 1:
        return experiment.threads
    return max(1, (hardware.describe().cpu_cores or 1) // experiment.processes)


def _launch(experiment: Experiment, measure: str, on_step: Callable[[int], None] | None) -> dict[str, Any]:
    """Perform the experiment on `processes` ranks under torch's elastic launcher; rank 0 speaks for all."""
    import multiprocessing

    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings, _ = training_arguments.split(experiment.arguments)
    devices = torch.cuda.device_count()
    if not experiment.function and not settings.get("use_cpu") and 0 < devices < experiment.processes:
        text = f"{experiment.processes} ranks need a GPU each, and there are {devices}: use_cpu=True trains on the CPU"
        return {"status": "refused", "message": text}
    fork = multiprocessing.get_context("fork")
    barrier, failures = fork.Barrier(experiment.processes), fork.SimpleQueue()
    threads = threads_of(experiment)
    with tempfile.TemporaryDirectory(prefix="perf_helpers-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=experiment.processes,
            run_id=f"perf_helpers-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",  # else the machine's name is looked up, which may fail or take seconds
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            max_restarts=0,
            monitor_interval=0.05,
            start_method="fork",
        )
        try:
            ranks = elastic_launch(config, _rank)(
                experiment.replace(threads=threads), measure, on_step, folder, barrier, failures
            )
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            told = {}
            while not failures.empty():
                told |= failures.get()
            outcome = told.get(rank) or died(first.exitcode)
            where = "" if outcome["status"] == "invalid" else f"rank {rank}: "
            return outcome | {"message": where + outcome["message"]}
    outcomes = [ranks[rank] for rank in sorted(ranks)]
    refused = next((outcome for outcome in outcomes if outcome["status"] != "ok"), None)
    return refused or outcomes[0] | {"ranks": outcomes}


def _rank(experiment: Experiment, measure: str, on_step, folder: str, barrier, failures) -> dict[str, Any]:
    """One rank: a process of its own that dies with its parent.

    A rank that fails says why and ends with an error, so that the launcher ends the others instead of leaving them in a
    collective. The launcher keeps the first one that ends, which should be the one at fault: a rank that merely lost
    its connection waits a moment. When runs take turns, all ranks of one stop and go together.
    """
    import torch

    die_with_parent()
    rank = int(os.environ["RANK"])
    tempfile.tempdir = folder  # whatever ends this rank, the launcher removes what it leaves
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if os.path.exists("/sys/class/net/lo") else "lo0")
    if torch.cuda.device_count() >= experiment.processes:
        torch.cuda.set_device(rank)

    def in_step(number: int) -> None:
        barrier.wait()
        if rank == 0:
            on_step(number)
        barrier.wait()

    takes_turns = getattr(on_step, "takes_turns", False)
    try:
        outcome = _perform(experiment, measure, in_step if takes_turns else on_step if rank == 0 else None)
    except BaseException as error:
        outcome = failure(error)
        failures.put({rank: outcome})
        if any(words in outcome["message"].lower() for words in _LOST_CONNECTION):
            time.sleep(2)
        sys.stdout.flush()
        os._exit(1)  # no destroy_process_group: it waits for the others
    if torch.distributed.is_initialized():
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()
    return outcome


_LOST_CONNECTION = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")


def died(code: int | None) -> dict[str, Any]:
    """The outcome of a process that ended without giving one; `code` is negative for a signal, None if unknown."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in [*signal.Signals] else f"signal {-code}"
        reason = "; often the system's way to end a process when memory runs out" if -code == 9 else ""
        return {"status": "killed", "message": f"the process was ended by {name}{reason}"}
    return {"status": "crashed", "message": f"the process ended with exit code {code} and without a result"}


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends (Linux; elsewhere nothing happens)."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG


def preload() -> None:
    """Import what experiments need; a module that this version of a library lacks is left out."""
    for name in PRELOAD + (() if hardware.describe().gpus else ("bitsandbytes",)):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
