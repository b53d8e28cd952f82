"""Trace experiments on fake tensors and calculate their peak memory, in a fresh subprocess (see `fresh_process`).

The work has four parts. The experiment is brought into the form that is traced (`_as_traced`), and traced (`trace`).
The memory beyond the tensors is added: operator workspaces on a CPU (`operator_workspaces`), segments and workspaces on
CUDA (`allocator_replay`). The highest total is the peak.
Importing this module is quick: its functions import torch, in the subprocess.
"""

import contextlib
import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from trainmem import cards
from trainmem.core import adapters, evaluation, optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.outcomes import Invalid
from trainmem.core.training import Experiment
from trainmem.estimate import allocator_replay
from trainmem.estimate.allocator_settings import Release, is_tested, newest, release, untested_text
from trainmem.estimate.fresh_process import Tell
from trainmem.estimate.memory_estimate import Device, MemoryEstimate
from trainmem.estimate.trace_records import Log, Trace, highest
from trainmem.measure import worker
from trainmem.records import TENSOR_CATEGORIES, Memory, explain
from trainmem.texts import bytes_text

if TYPE_CHECKING:
    from trainmem.estimate.operator_workspaces import Probe
    from trainmem.estimate.routing import Routing


def estimate_experiment(
    experiment: Experiment, device: Device, with_log: bool, probe: "Probe", tell: Tell
) -> tuple[MemoryEstimate, Log | None]:
    """Return the estimate of an experiment and, if `with_log`, the log of CUDA's allocations and frees, else None.

    Call this function through `fresh_process.with_probe`, because it replaces parts of torch in its process.

    Args:
        experiment: the training, inference or function.
        device: the device whose memory is estimated.
        probe: measures operator workspaces.
        tell: function to call with the percentage of the work that is done.

    Raises:
        Invalid: the experiment cannot be built, or one of its operations cannot be traced.
    """
    (traced,) = trace_all([experiment], device, probe, tell)
    return estimate_of(experiment, traced, device), traced.trace.log if with_log else None


def estimate_of(experiment: Experiment, traced: "TracedExperiment", device: Device) -> MemoryEstimate:
    """Return the estimate of a traced experiment.

    On a CPU it is calculated from the total bytes during each operation. On CUDA the trace's log of allocations and
    frees is replayed on the allocator model.
    """
    from trainmem.measure import memory_meter

    on_cuda = device.kind == "cuda"
    rules = (device.rules or release()) if on_cuda else None
    memory, is_too_large = _on_cuda(traced.trace, device) if on_cuda else (memory_of(traced), False)
    return MemoryEstimate(
        name=experiment.name,
        task=experiment.task.to_dict(),
        arguments=dict(experiment.arguments.given),
        device=device.kind,
        memory=memory,
        assumptions=traced.assumptions,
        seconds=0.0,  # `api.estimate` fills it in
        own_bytes=memory_meter.peak_rss_bytes(),
        processes=experiment.processes,
        is_too_large=is_too_large,
        attention=attention_kernels(traced.trace),
        compute_capability=device.compute_capability if on_cuda else None,
        device_memory=device.memory_bytes if on_cuda else None,
        torch_rules=rules and (rules.torch if is_tested(rules) else newest()),
        untested_torch=rules.torch if rules and not is_tested(rules) else None,
        weights=experiment.weights and str(experiment.weights),
    )


# ---- the trace


@dataclass(frozen=True, slots=True)
class TracedExperiment:
    """Hold an experiment's trace, the peak bytes during each operation, and the assumptions that the estimate makes."""

    trace: Trace
    totals: np.ndarray  # (operations,): the highest total during each, with its workspace, in bytes
    assumptions: tuple[str, ...]


def trace_all(experiments: Sequence[Experiment], device: Device, probe: "Probe", tell: Tell) -> list[TracedExperiment]:
    """Trace experiments on fake tensors, many of them in parallel on all cores; return a `TracedExperiment` of each.

    Args:
        device: the device whose memory is estimated.
        probe: measures operator workspaces on a CPU. Its dictionary `probe.known` is also the cache of operations'
            results on fake tensors (`OperationCache`): the traces use it, and their new results are added.
        tell: called with the percentage of the work that is done: at most 80, because workspaces are measured last.

    Raises:
        Invalid: an experiment cannot be built, or one of its operations cannot be traced.
    """
    plain, settings = [_as_traced(each, device) for each in experiments], {"device": device, "known": probe.known}
    traces, run = [], map
    with contextlib.ExitStack() as stack:
        if len(plain) > _FEW or device.kind == "cpu":  # `Probe` runs operations in forks of this process
            fork, count = multiprocessing.get_context("fork"), min(len(plain), os.cpu_count() or 1)
            # Forks inherit the settings, which need not be pickled then.
            run = stack.enter_context(ProcessPoolExecutor(count, fork, _with.update, [settings])).map
        else:
            _with.update(settings)
        for number, (trace, facts) in enumerate(run(_trace_one, plain), 1):
            traces.append(trace)
            probe.known.update(facts)
            tell(80 * number // len(plain))
    return [_with_totals(each, trace, device, probe) for each, trace in zip(experiments, traces, strict=True)]


_FEW = 2  # up to this many experiments are traced in this process: forks that send traces back take as long
_with: dict[str, Any] = {}  # arguments of `trace_of` in the process that traces


def _as_traced(experiment: Experiment, device: Device) -> Experiment:
    """Return a copy of the experiment in the form that is traced, e.g. without data loader workers.

    Raises:
        Invalid: the model does not exist, or its optimizer needs a GPU.
    """
    try:
        _, weights = experiment.task.model_class(), experiment.weights
        _ = experiment.function or experiment.task.family()
        if weights and weights.quantization:  # subprocesses that run operations are forks of this one, and need it
            adapters.import_method(weights.quantization)
    except ValueError as error:
        raise Invalid(str(error)) from error
    arguments, task, processes = experiment.arguments, experiment.task, experiment.processes
    if arguments.get("dataloader_num_workers"):  # workers hold their batches in other processes
        arguments = arguments.without(*(f"dataloader_{name}" for name in _WORKER_ARGUMENTS))
    if device.kind == "cpu" or processes == 1:  # accelerate ignores fsdp's arguments
        arguments = arguments.without(*(name for name in arguments.given if name.startswith("fsdp")))
    if device.kind == "cuda":
        from trainmem.estimate import gpu_optimizers

        arguments = gpu_optimizers.traced(arguments)  # a missing optimizer may become one with the same states
    elif experiment.training and (why := optional_packages.needs_gpu(arguments.optimizer)):
        raise Invalid(why)
    if experiment.training and not experiment.function and not evaluation.evaluates(arguments):
        # No more samples than the traced steps use.
        task = task.replace(dataset_size=min(task.dataset_size, enough_samples(arguments, processes)))
    return experiment.replace(arguments=arguments, task=task)


_WORKER_ARGUMENTS = ("num_workers", "prefetch_factor", "persistent_workers")


def enough_samples(arguments: Arguments, processes: int = 1) -> int:
    """Return the number of samples that a trace of `processes` ranks needs: the samples of four steps.

    Three steps are traced, and the data loader fetches one batch ahead.
    """
    return 4 * arguments.samples_per_step(processes)


def _trace_one(experiment: Experiment) -> tuple[Trace, dict[tuple, Any]]:
    """Return (an experiment's trace, the entries that the trace added to the cache of operations' results)."""
    import torch

    torch.set_num_threads(1)
    gc.set_threshold(*gc.get_threshold()[:2], 10**6)  # full collections take a quarter of the time
    known = _with["known"]  # {key: how to rebuild an operation's result}
    before = set(known)
    trace = trace_of(experiment, **_with)
    return trace, {key: known[key] for key in known.keys() - before}


def trace_of(experiment: Experiment, device: Device, known: dict[tuple, Any] | None = None) -> Trace:
    """Return the trace of an experiment. Call it in a fresh subprocess, because it replaces parts of torch.

    If values decide which experts of a mixture the tokens choose, the trace assumes balanced routing. The trace's
    attribute `one_sided` is then a second trace, which assumes that all tokens choose the same experts.
    `known`: results of operations in earlier traces, see `OperationCache`; this trace adds its own. None: no results.

    Raises:
        Invalid: the experiment cannot be built, or an operation's result depends on tensor values, which are unknown.
    """
    from trainmem.estimate.routing import Routing
    from trainmem.estimate.trace import DependsOnValues

    try:
        return _traced(experiment, device, known)
    except (DependsOnValues, RuntimeError) as error:
        if not _has_experts(experiment):
            raise
        try:
            balanced, one_sided = (_traced(experiment, device, known, routing) for routing in Routing)
        except (DependsOnValues, RuntimeError):
            raise error from None
    return replace(balanced, one_sided=one_sided)


def _has_experts(experiment: Experiment) -> bool:
    """Return whether the model may be a mixture of experts; True for a user's function, which could build one."""
    return experiment.function is not None or "expert" in str(experiment.task.build_config().to_dict())


def _traced(
    experiment: Experiment, device: Device, known: dict[tuple, Any] | None, routing: "Routing | None" = None
) -> Trace:
    """Return the trace of an experiment.

    Args:
        known: results of operations in earlier traces; this trace adds its own. None: no results.
        routing: assumed routing of tokens to experts; None: the trace fails if a router's choice depends on values.
    """
    from trainmem.estimate import trace
    from trainmem.estimate.operation_cache import OperationCache

    if device.kind == "cpu":
        tracker = trace.FakeTracker(OperationCache(known, "cpu"))
        tracker.routing = routing
        return trace.follow(experiment, tracker)
    from trainmem.estimate import cuda
    from trainmem.estimate.device import DeviceTracker, NotSent
    from trainmem.estimate.device_arguments import Placement

    capability, rules = device.compute_capability, device.rules or release()
    cache = OperationCache(known, f"cuda, torch {rules.torch}")
    optim, is_function = experiment.arguments.optimizer, experiment.function is not None
    for from_the_start in (False, True):  # the second time only for a loop that never sends its model
        tracker = DeviceTracker(capability, is_function, from_the_start, cache, rules)
        tracker.routing = routing
        with contextlib.suppress(NotSent), _no_maps(), cuda.emulated(capability, rules), tracker.emulated(optim):
            found = trace.follow(experiment, tracker)
            if tracker.weights is Placement.DEVICE or not is_function:
                return found


@contextlib.contextmanager
def _no_maps() -> Iterator[None]:
    """Empty bitsandbytes' quantization maps in this context, as in a new process: earlier traces sent them to a GPU."""
    functions = sys.modules.get("bitsandbytes.functional")
    with patch.dict(functions.name2qmap, clear=True) if functions else contextlib.nullcontext():
        yield


def _library_assumptions(trace: Trace) -> list[str]:
    """Return the assumptions about those operations of a trace that NVIDIA's libraries, e.g. cuFFT, run on a GPU."""
    names = {each.name.partition(".")[2].partition(".")[0] for each in trace.operations}
    solved = {name for name in names if name.startswith(("linalg_", "_linalg_", "cholesky"))} - _NOT_SOLVED
    transforms = any(name.startswith("_fft_") for name in names)
    used = {_CUDNN_NOTE: trace.recurs, _CUFFT_NOTE: transforms, _CUSOLVER_NOTE: bool(solved)}
    return [note for note, is_used in used.items() if is_used]


def _with_totals(experiment: Experiment, trace: Trace, device: Device, probe: "Probe") -> TracedExperiment:
    """Return the trace with its assumptions and the total bytes during each operation.

    On a CPU the totals include operator workspaces, which `probe` measures.
    """
    assumptions = _rank_assumptions(experiment.arguments, device.kind == "cuda") if experiment.processes > 1 else []
    if experiment.training and not experiment.function and _drops_layers(experiment.task.build_config().to_dict()):
        assumptions.append(_LAYERDROP_NOTE)
    if evaluation.evaluates(experiment.arguments) and not evaluation.metrics(experiment.arguments):
        assumptions.append(_LOSS_NOTE)
    if trace.assumes_masks:
        assumptions.append(_MASKS_NOTE)
    if device.kind == "cuda":
        from trainmem.estimate import cuda, gpu_optimizers

        assumptions += [*cuda.assumptions(), _rules_assumption(device.rules or release())]
        of_optimizer = gpu_optimizers.assumptions(experiment.arguments)
        known = " ".join(of_optimizer)  # GaLore's names cuSOLVER
        assumptions += of_optimizer
        assumptions += [each for each in _library_assumptions(trace) if each.partition(":")[0] not in known]
        if experiment.weights and adapters.method_of(experiment.weights.quantization or {}) == "quanto":
            assumptions.append(_QUANTO_NOTE)
        if trace.one_sided:
            peaks = [int(each.high.max()) for each in (trace, trace.one_sided)]
            assumptions.append(_ROUTING_NOTE.format(*(bytes_text(peak, binary=True) for peak in peaks)))
        return TracedExperiment(trace, trace.high, tuple(assumptions))
    totals, unsure = _with_workspaces(trace, probe.under(worker.threads_of(experiment)))
    if trace.one_sided:
        other, _ = _with_workspaces(trace.one_sided, probe)
        peaks = [int(each.max()) for each in (totals, other)]
        assumptions.append(_ROUTING_NOTE.format(*map(bytes_text, peaks)))
    return TracedExperiment(trace, totals, (*assumptions, *unsure))


_ROUTING_NOTE = (
    "experts: routing depends on values; with balanced routing, which is assumed, the tensors peak at {}, and at {} if "
    "all tokens choose the same experts"
)
_LAYERDROP_NOTE = "layerdrop: no layer is left out; the training leaves out each with the configured probability"
_CUDNN_NOTE = (
    "cuDNN: what it allocates for recurrent layers (LSTM, GRU, RNN) is not known; the layers are traced step by step, "
    "as on a CPU"
)
_CUFFT_NOTE = "cuFFT: the workspace of Fourier transforms is not known, and not counted"
_CUSOLVER_NOTE = "cuSOLVER: the workspace of decompositions and solvers is not known, and not counted"
_NOT_SOLVED = {"linalg_vector_norm", "linalg_cross", "linalg_vecdot"}  # torch's own kernels
_MASKS_NOTE = "masks: values decide which elements some masks select; all are assumed to be selected"
_LOSS_NOTE = "evaluation computes the loss only: add prediction_loss_only=False if the training computes metrics"
_QUANTO_NOTE = (
    "quanto: its CUDA extension is not used, which has kernels for float8 and int4 in 16 bits from capability 8.0 on; "
    "the memory of its other kernels is modelled on their Python code"
)
_DDP_NOTE = "DistributedDataParallel: one rank is traced, with the reducer's buckets, without network buffers"
_FSDP_NOTE = "FSDP2: one rank is traced, as accelerate and torch shard and gather weights, without network buffers"
_ZERO_NOTE = "DeepSpeed: one rank is traced, as ZeRO shards, flattens and gathers; on a GPU with room for a flat copy"
_FSDP_IGNORED_NOTE = "fsdp: on a CPU accelerate ignores it and trains with DistributedDataParallel"


def _drops_layers(fields: dict[str, Any]) -> bool:
    """Return whether the fields of a configuration, or of a part of it, say that layers are left out at random."""
    own = any("layerdrop" in str(name) and value for name, value in fields.items())
    return own or any(_drops_layers(part) for part in fields.values() if isinstance(part, dict))


def _rank_assumptions(arguments: Arguments, on_cuda: bool) -> list[str]:
    """Return the assumptions made in tracing one of several ranks (DDP, FSDP2 or DeepSpeed), one sentence each."""
    if arguments.get("deepspeed"):
        return [_ZERO_NOTE]
    if arguments.get("fsdp"):
        return [_FSDP_NOTE] if on_cuda else [_DDP_NOTE, _FSDP_IGNORED_NOTE]
    return [_DDP_NOTE]


def _rules_assumption(rules: Release) -> str:
    """Return a sentence that names the modelled torch release and states its rules for free blocks and matmuls."""
    torch = f"torch {rules.torch}" if is_tested(rules) else untested_text(rules.torch)
    workspace = "cuBLAS' workspace" if rules.shares_workspace else "a workspace of its own, 1 MiB a thread"
    matmuls = f"cuBLASLt uses {workspace}" if rules.keeps_workspaces else "each matmul frees its workspace"
    return (
        f"{torch}: among free blocks of one size its allocator takes {_TAKEN[rules.ties]}, and {matmuls}; everything "
        "else is traced with the torch installed here."
    )


_TAKEN = {
    "address": "the one at the lowest address (newer segments have lower ones)",
    "block": "the one that it made first",
    "segment": "the one in the oldest segment",
}


def _with_workspaces(trace: Trace, probe: "Probe") -> tuple[np.ndarray, list[str]]:
    """Return (the peak bytes during each operation with its workspace, assumptions about the workspaces).

    The peaks are an array of shape (operations,).
    """
    from trainmem.estimate.operator_workspaces import assumptions

    # Operations with the same signature need the same workspace: each signature is measured once.
    numbers: dict[tuple, int] = {}  # {signature: number of its kind}
    kind = np.array([numbers.setdefault(each.signature, len(numbers)) for each in trace.operations])
    live = trace.live.sum(axis=1)
    first = np.unique(kind, return_index=True)[1]
    highest = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(highest, kind, live)
    operations = [trace.operations[index] for index in first]
    # The time for measuring is limited: signatures that run when most bytes are live come first.
    probe.run([operations[number] for number in np.argsort(-highest, kind="stable")])
    workspaces = np.array([probe[each].bytes or 0 for each in operations])
    return np.maximum(trace.high, live + workspaces[kind]), assumptions(operations, probe)


_KERNELS = {"flash": "flash", "efficient": "memory-efficient", "cudnn": "cuDNN"}


def attention_kernels(trace: Trace) -> tuple[str, ...]:
    """Return the fused attention kernels in a trace: "flash", "memory-efficient", "cuDNN".

    () means plain attention, because eager attention was requested or no fused kernel supports the inputs.
    """
    fused = (each.name.partition("_scaled_dot_product_")[2] for each in trace.operations)
    return tuple(dict.fromkeys(_KERNELS[kernel] for name in fused if (kernel := name.partition("_")[0]) in _KERNELS))


# ---- the memory


def memory_of(traced: TracedExperiment) -> Memory:
    """Return the memory of a traced experiment, in bytes.

    On CUDA the figures are the tensors' own bytes, which the allocator would round up.
    """
    trace, totals = traced.trace, traced.totals
    peak = int(totals.argmax())  # the index of the operation
    marks = {label: _by_category(live) for label, live in trace.marks.items()}
    phases = {label: sum(parts.values()) for label, parts in marks.items()}
    for phase, before, most, operation, of_phase in trace.apart:
        top = max(range(*of_phase), key=totals.__getitem__, default=operation)
        size, top = (int(totals[top]), top) if of_phase[0] <= top and totals[top] >= most else (most, operation)
        if size > max(before, phases.get(phase, 0)):
            marks[phase.value], phases[phase.value] = _by_category(trace.live[top]), size
    return Memory(
        peak_bytes=int(totals[peak]),
        kind="estimated",
        peak_phase=trace.phases[peak].shown,
        peak_operation=trace.operations[peak].name,
        peak_module=trace.modules[peak],
        breakdown=explain(_by_category(trace.live[peak]), int(totals[peak])),
        phases=phases,
        phase_breakdowns={label: explain(parts, phases[label]) for label, parts in marks.items()},
        timeline=_timeline(trace, totals),
        parameters=trace.parameters,
        trainable_parameters=trace.trainable,
    )


def _by_category(live: np.ndarray) -> dict[str, int]:
    return dict(zip(TENSOR_CATEGORIES, map(int, live), strict=True))


def _timeline(trace: Trace, totals: np.ndarray) -> dict[str, Any] | None:
    """Return the timeline of the last step, see `memory_meter.series`; None for fewer than two operations.

    `totals`: all live bytes during each operation of the trace, shape (operations,).
    """
    from trainmem.measure import memory_meter

    # At most 200 operations.
    picked = memory_meter.highest(totals.tolist(), *trace.last_step)
    where = [(trace.phases[index], trace.operations[index].name, trace.modules[index]) for index in picked]
    return memory_meter.series(where, [_by_category(live) for live in trace.live[picked]], totals[picked].tolist())


def _on_cuda(trace: Trace, device: Device) -> tuple[Memory, bool]:
    """Replay a trace on the allocator model; return (the memory, whether the memory exceeds `device.memory_bytes`)."""
    found = allocator_replay.replayed(trace.log, device.settings, device.memory_bytes, device.rules)
    memory, context = found.memory(), cards.context_bytes(device.compute_capability)
    memory = replace(
        memory,
        parameters=trace.parameters,
        trainable_parameters=trace.trainable,
        timeline=_timeline(trace, highest(found.allocated, trace.begins)),
        context_bytes=context,
        device_used_bytes=memory.reserved_bytes + context if context else None,
    )
    return memory, found.is_too_large
