"""Predict a training's peak memory without running it: the functions for users of the package.

`estimate` calls `peak_memory.estimate_experiment` in a fresh subprocess (`fresh_process`), which traces the training on
fake tensors (`trace`) and measures the operator workspaces (`operator_workspaces`).
"""

import dataclasses
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

from trainmem import cards
from trainmem.core import hardware, progress
from trainmem.core.arguments import Arguments
from trainmem.core.dropped_settings import dropped
from trainmem.core.task import Task
from trainmem.core.training import Experiment
from trainmem.estimate import peak_memory
from trainmem.estimate.allocator_replay import place, save
from trainmem.estimate.allocator_settings import Settings, release
from trainmem.estimate.fresh_process import ask
from trainmem.estimate.memory_estimate import Device, MemoryEstimate
from trainmem.texts import arguments_of_kind, shown, whole_number


def estimate(
    task: Task | str,
    *,
    name: str = "",
    card: str | None = None,
    device: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    device_memory: int | None = None,
    allocator_settings: str = "",
    torch_version: str | None = None,
    training: bool = True,
    optimizer: Callable | None = None,
    function: Callable[[Task], Any] | None = None,
    processes: int = 1,
    snapshot: str | os.PathLike | None = None,
    timeout: float = 300,
    **arguments,
) -> MemoryEstimate:
    """Predict the peak memory of a training, or of inference, without running it.

    On "cpu" it predicts what `Lab.train` counts. On "cuda" it predicts the peak of torch's caching allocator on a GPU
    that this machine need not have; `assumptions` lists what was modelled. In one process, a repeated call returns the
    earlier result.

    Args:
        task: the model and its data, or the name of a model.
        name: the estimate's name in tables and pictures; empty: the model's.
        card: a GPU model of `cards.CARDS`, e.g. "h100"; sets device, compute_capability and device_memory. None: no
            card.
        device: "cpu" or "cuda"; None: this machine's.
        compute_capability: compute capability of the GPU, e.g. (9, 0) for an H100; None: the card's, otherwise this
            machine's, otherwise (9, 0).
        device_memory: bytes that the GPU has for the allocator, without the context. Near this limit the allocator
            frees cached segments; `is_too_large` says whether the training exceeds this limit. None: the card's, or no
            limit.
        allocator_settings: the value of PYTORCH_CUDA_ALLOC_CONF to assume, e.g. "expandable_segments:True".
        torch_version: release whose CUDA allocator and workspaces are modelled, e.g. "2.12" (see
            `allocator_settings.RELEASES`); everything else is as in the installed torch. None: the installed release.
            For a release newer than all known releases the newest rules are used, with a warning.
        training: False: forward passes without gradients on `per_device_eval_batch_size` samples.
        optimizer: function (model, training arguments) -> torch optimizer, for an optimizer that `optim` cannot name;
            None: the optimizer that `optim` names.
        function: a training loop of your own that takes the task, as in `Lab.run`; None: the Trainer's.
        processes: ranks of a data-parallel training; the figures describe one rank.
        snapshot: a file to write a memory snapshot to, for torch's viewer (https://docs.pytorch.org/memory_viz); on
            "cuda" only. The snapshot begins before the model is loaded, and ends if memory runs out. None: no snapshot.
        timeout: time limit of the estimate in seconds.
        arguments: names of `transformers.TrainingArguments`, plus `attn_implementation` and `dtype`.

    Raises:
        ValueError: an unknown argument, a value out of range, a model or an operator that cannot be traced, compiled
            code, or no estimate within `timeout` or the time limit of an enclosing `processes.within`.
    """
    import cloudpickle

    arguments_of_kind(estimate, locals())
    task = Task(task) if isinstance(task, str) else task
    target_device = target(device, compute_capability, device_memory, allocator_settings, torch_version, card)
    experiment = Experiment(
        name=name or task.model,
        task=task,
        arguments=Arguments.of(arguments, also=estimate.__annotations__),
        function=cloudpickle.dumps(function) if function else None,
        optimizer=cloudpickle.dumps(optimizer) if optimizer else None,
        training=training,
        processes=processes,
    )
    if experiment.arguments.compiles:
        raise ValueError(COMPILED_ERROR)
    for text in dropped(experiment.arguments.training):
        warnings.warn(text, stacklevel=2)
    key = (repr(experiment.replace(name="")), task.identity(), target_device)
    made, file = _made.get(key), None
    if snapshot is not None:
        file = place(snapshot)
        if target_device.kind != "cuda":
            raise ValueError("snapshot= needs CUDA's allocator: add device='cuda' or card=")
    if not made or file:
        start, job = time.perf_counter(), (peak_memory.estimate_experiment, experiment, target_device, bool(file))
        with progress.percent(f"estimating {task.model}") as bar:
            more = {"timeout": timeout, "on_percent": lambda percent: bar.update(percent - bar.n)}
            made, log = ask(*job, model=task.model, **more)
        made = dataclasses.replace(made, seconds=time.perf_counter() - start)
        if file:
            save(file, log, target_device.settings, target_device.memory_bytes, target_device.rules)
    _made[key] = dataclasses.replace(made, name=experiment.name)  # listed under its latest name
    return _made[key]


COMPILED_ERROR = (
    "torch_compile cannot be estimated, because the compiler decides what compiled code keeps. Measure it with "
    "lab.train(..., torch_compile=True), rehearse it (perf-helpers rehearse), or leave torch_compile out"
)


def estimates_so_far() -> list[MemoryEstimate]:
    """Return every `MemoryEstimate` that this process has made, each once, in the order in which they were made."""
    return list(_made.values())


def target(
    device: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    device_memory: int | None = None,
    allocator_settings: str = "",
    torch_version: str | None = None,
    card: str | None = None,
) -> Device:
    """Return the device to estimate for, with its allocator's settings and rules; the arguments are as in `estimate`.

    Raises:
        ValueError: an unknown card, device, torch release or allocator setting, or a value out of range.
    """
    arguments_of_kind(target, locals())
    if card is not None:
        known = cards.named(card)
        device, compute_capability = "cuda" if device is None else device, compute_capability or known.capability
        device_memory = known.memory_bytes - known.context_bytes if device_memory is None else device_memory
    cards.check_capability(compute_capability or cards.DEFAULT_CAPABILITY)
    machine = hardware.describe()
    kind = machine.kind if device is None else device
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={shown(device)}: choose 'cpu' or 'cuda'")
    if kind == "cpu":
        if torch_version is not None:
            raise ValueError(f"torch_version={torch_version!r} selects a CUDA allocator: add device='cuda' or card=")
        return Device(kind)
    here = next((gpu.capability for gpu in machine.gpus if gpu.capability), cards.DEFAULT_CAPABILITY)
    capability, rules = tuple(compute_capability or here), release(torch_version)
    Settings.parse(allocator_settings, rules.torch)  # raises ValueError if they are wrong
    if device_memory is not None:
        whole_number("device_memory", device_memory, 0, 2**60)
    return Device(kind, capability, allocator_settings, device_memory, rules)


_made: dict[tuple, MemoryEstimate] = {}  # this process's estimates, in order, by (experiment, task, device)
