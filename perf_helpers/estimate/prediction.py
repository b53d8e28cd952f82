"""What happens in the clean process: experiments are followed on fake tensors, and their peak memory is predicted.

The way of one experiment: it is put into the form in which it can be followed, with few layers where its layers are all
alike; traces are made in forks of this process (`trace`), and that of the full model is put together from them
(`layers`); what no tensor shows is added, bytes inside operations on a CPU (`probe`), segments and workspaces on CUDA
(`allocator`); the highest total is the peak.

Importing this module is quick: torch and what stands on it are imported by the functions, in the clean process.
"""

import contextlib
import itertools
import multiprocessing
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from perf_helpers.estimate import allocator, deepening, layers, replay
from perf_helpers.estimate.operations import Trace
from perf_helpers.lab import worker
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.outcomes import Invalid
from perf_helpers.lab.runs import TENSOR_CATEGORIES, Memory, explain
from perf_helpers.lab.task import Task
from perf_helpers.lab.training import Experiment

if TYPE_CHECKING:
    from perf_helpers.estimate.probe import Probe
    from perf_helpers.estimate.trace import OperationCache

Tell = Callable[[int], Any]  # is told how far the work is, from 0 to 100


@dataclass(frozen=True, slots=True)
class Device:
    """Whose memory is predicted."""

    kind: str  # "cpu", as it is counted, or "cuda", as `cuda.PARTS` model it
    compute_capability: tuple[int, int] = allocator.DEFAULT_CAPABILITY  # of the GPU
    parts: tuple[str, ...] = ()  # names of `cuda.PARTS` that are modelled
    settings: str = ""  # of torch's allocator, as in PYTORCH_CUDA_ALLOC_CONF
    memory_bytes: int | None = None  # that the card has for segments; None: enough


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a clean process says of one experiment."""

    memory: Memory
    assumptions: tuple[str, ...]  # in words, what was modelled or left out
    traced: str  # in words, which layers were followed
    own_bytes: int | None  # peak memory of the clean process
    is_too_large: bool = False  # for the card whose memory was given
    log: deepening.Log | None = None  # on CUDA: what it was predicted from
    attention: tuple[str, ...] = ()  # see `attention_kernels`


def predict(
    experiment: Experiment, device: Device, every_layer: bool, with_log: bool, known: "Known", tell: Tell
) -> Prediction:
    """Predict the memory of one experiment. To be called by `with_known`: it replaces parts of torch.

    Raises:
        Invalid: the experiment cannot be built, or one of its operations cannot be followed.
    """
    from perf_helpers.lab import meters

    if device.kind == "cuda":
        said = _on_cuda(experiment, device, every_layer, known, tell)
        return said if with_log else replace(said, log=None)  # it would travel with every estimate
    (followed,) = follow_all([experiment], device, every_layer, known, tell)
    kernels = attention_kernels(followed.trace)
    return Prediction(
        memory_of(followed), followed.assumptions, followed.traced, meters.peak_rss_bytes(), attention=kernels
    )


def with_known(function: Callable, arguments: Sequence, learned: Sequence[bytes], tell: Tell) -> tuple[Any, bytes]:
    """What `function(*arguments, known, tell)` returns in this clean process, and the news of what it learnt (see
    `Known`). `learned`: the news of earlier clean processes."""
    with Known(learned) as known:
        return function(*arguments, known, tell), known.news()


class Known(contextlib.AbstractContextManager):
    """What is known in a clean process, with what earlier ones learnt. As a context manager it ends what it started."""

    def __init__(self, learned: Sequence[bytes] = ()):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake tensors are on a CPU, whatever they stand for: no GPU is touched
        from perf_helpers.estimate.probe import Probe
        from perf_helpers.estimate.trace import OperationCache

        self.caches = {"cpu": OperationCache(), "cuda": OperationCache()}  # what operations make, by the device
        self.probe = Probe()  # what operations hide
        self.parameters: dict[str, int] = {}  # of models, by their task's identity
        self._all = *(cache.known for cache in self.caches.values()), self.probe.known, self.parameters
        for news in learned:
            for known, more in zip(self._all, pickle.loads(news), strict=True):
                known.update(more)
        self._before = [set(known) for known in self._all]

    def news(self) -> bytes:
        """What was learnt here; b"" where it is nothing. Only clean processes can read it: it holds types of torch."""
        pairs = zip(self._all, self._before, strict=True)
        news = [{key: known[key] for key in known.keys() - before} for known, before in pairs]
        return pickle.dumps(news) if any(news) else b""

    def parameters_of(self, task: Task) -> int:
        """How many numbers the weights of the task's model are."""
        key = task.replace(seq_len=None, dataset_size=1).identity()
        if key not in self.parameters:
            self.parameters[key] = task.parameters()
        return self.parameters[key]

    def __exit__(self, *_):
        self.probe.close()


# ---- an experiment is followed


@dataclass(frozen=True, slots=True)
class Followed:
    """A training that was followed."""

    trace: Trace
    totals: np.ndarray  # the highest total at each operation, with what is hidden inside it, in bytes
    assumptions: tuple[str, ...]
    traced: str  # which layers were followed
    is_extrapolated: bool  # from few layers to all


def follow_all(
    experiments: Sequence[Experiment], device: Device, every_layer: bool, known: Known, tell: Tell
) -> list[Followed]:
    """Follow experiments on fake tensors, as many at once as there are cores; raises Invalid as `predict` does."""
    plain = [_plain(each, device) for each in experiments]
    # {field of the configuration: layers} of those that are extrapolated; {}: every layer is followed.
    depths = [{} if every_layer or each.function else _repeated(each) for each in plain]
    shallow = [
        each.replace(task=each.task.replace(config=few))
        for each, depth in zip(plain, depths, strict=True)
        for few in layers.few_layers(depth)
    ]
    traces = iter(_traces(shallow, device, known.caches[device.kind], tell))
    followed: list[Followed | None] = []
    for experiment, depth in zip(experiments, depths, strict=True):
        base, *deeper = itertools.islice(traces, 1 + len(depth))
        full = layers.extrapolated(base, deeper, depth) if depth else base
        if depth and (full is None or full.parameters != known.parameters_of(experiment.task)):
            followed.append(None)  # its layers turn out not to be alike
        else:
            followed.append(_followed(experiment, full, depth, device, known.probe))
    rest = [experiment for experiment, each in zip(experiments, followed, strict=True) if each is None]
    again = iter(follow_all(rest, device, True, known, tell) if rest else ())
    return [each or next(again) for each in followed]


def _plain(experiment: Experiment, device: Device) -> Experiment:
    """The experiment as it is followed: with no workers, no shards where nobody shards, and no more samples than it
    reaches. Raises Invalid where there is no such model."""
    try:
        experiment.task.model_class()
    except ValueError as error:
        raise Invalid(str(error)) from error
    arguments, task, processes = experiment.arguments, experiment.task, experiment.processes
    if arguments.get("dataloader_num_workers"):  # workers hold their batches elsewhere
        arguments = arguments.without(*(f"dataloader_{name}" for name in _OF_WORKERS))
    if device.kind == "cpu" or processes == 1:  # accelerate passes over it
        arguments = arguments.without(*(name for name in arguments.given if name.startswith("fsdp")))
    if experiment.training and not experiment.function:
        task = task.replace(dataset_size=min(task.dataset_size, enough_samples(arguments, processes)))
    return experiment.replace(arguments=arguments, task=task, processes=processes)


_OF_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers")


def enough_samples(arguments: Arguments, processes: int = 1) -> int:
    """With how many samples a training is followed: those of two steps, and some left, for a batch is fetched ahead."""
    return 4 * arguments.samples_per_step(processes)


def _repeated(experiment: Experiment) -> dict[str, int]:
    """The depths that can be extrapolated, {field of the configuration: layers}; {} where every layer is followed, for
    there are few, they differ (a field of the configuration lists something for each), or checkpoints hold several."""
    config = experiment.task.build_config()
    depth = layers.depths(config)
    differ = any(
        isinstance(value, list) and len(value) in depth.values() and len({str(item) for item in value}) > 1
        for value in config.to_dict().values()
    )
    options = experiment.arguments.get("gradient_checkpointing_kwargs") or {}
    if differ or options.get("every_n_layers", 1) > 1:
        return {}
    return depth if max(depth.values(), default=0) > 3 else {}


def _traces(experiments: Sequence[Experiment], device: Device, cache: "OperationCache", tell: Tell) -> list[Trace]:
    """The traces of experiments, made in forks of this process. What is learnt there goes into the cache. 80 of 100 per
    cent of the work are done then."""
    traces = []
    fork, count = multiprocessing.get_context("fork"), min(len(experiments), os.cpu_count() or 1)
    # A fork has these from the start: they need not travel.
    with ProcessPoolExecutor(count, fork, _fork.update, [{"device": device, "cache": cache}]) as pool:
        for number, (trace, learned) in enumerate(pool.map(_follow_in_fork, experiments), 1):
            traces.append(trace)
            cache.known |= learned
            tell(80 * number // len(experiments))
    return traces


_fork: dict[str, Any] = {}  # filled in forks only: what one follows with, from one experiment to the next


def _follow_in_fork(experiment: Experiment) -> tuple[Trace, dict]:
    """The trace of an experiment, and what was learnt of operations."""
    import torch

    from perf_helpers.estimate import trace

    torch.set_num_threads(1)
    device, cache = _fork["device"], _fork["cache"]
    before = set(cache.known)
    if device.kind == "cuda":
        followed = trace_of(experiment, device, cache)
    else:
        followed = trace.follow(experiment, trace.FakeTracker(cache=cache))
    return followed, {key: cache.known[key] for key in cache.known.keys() - before}


def trace_of(experiment: Experiment, device: Device, cache: "OperationCache | None" = None) -> Trace:
    """The trace of an experiment on CUDA, every layer followed, with the log of its births and deaths. To be called in
    a clean process: it replaces parts of torch."""
    from perf_helpers.estimate import cuda, trace
    from perf_helpers.estimate.device import DeviceTracker

    is_function = experiment.function is not None
    tracker = DeviceTracker(device.compute_capability, device.parts, is_function, cache)
    paged = str(experiment.arguments.get("optim", "")).startswith("paged")
    with cuda.emulated(device.parts, compute_capability=device.compute_capability), tracker.emulated(paged):
        followed = trace.follow(experiment, tracker)
    return followed.replace(log=deepening.recorded(tracker))


def _followed(experiment: Experiment, trace: Trace, depth: dict[str, int], device: Device, probe: "Probe") -> Followed:
    """An experiment's trace with what is added to it: sharding, and what operations hide on a CPU. `depth`: the layers
    that the trace was extrapolated to; {} where all were followed."""
    assumptions = []
    if experiment.processes > 1:
        assumptions += _shared_out(experiment.arguments, on_cuda=False)
    totals = trace.high
    if device.kind == "cpu":
        totals, unsure = _with_hidden(trace, probe.under(worker.threads_of(experiment)))
        assumptions += unsure
    told = _layers_told(depth, layers.few_layers(depth))
    return Followed(trace, totals, tuple(assumptions), told, bool(depth))


_OF_REPLICAS = "DistributedDataParallel: one rank, with the reducer's buckets and without a network's buffers"
_OF_SHARDS = "FSDP2: one rank, as accelerate and torch divide and gather its weights, without a network's buffers"
_OF_ZERO = "DeepSpeed: one rank, as its ZeRO optimizers divide, flatten and gather; on a GPU with room for a flat copy"
_NOT_TAKEN_UP = "fsdp: accelerate takes it up on accelerators only, and on a CPU trains with DistributedDataParallel"


def _shared_out(arguments: Arguments, on_cuda: bool) -> list[str]:
    """How what several ranks share out was followed."""
    if arguments.get("deepspeed"):
        return [_OF_ZERO]
    if arguments.get("fsdp"):
        return [_OF_SHARDS] if on_cuda else [_OF_REPLICAS, _NOT_TAKEN_UP]
    return [_OF_REPLICAS]


def _layers_told(depth: dict[str, int], few: Sequence[dict[str, int]]) -> str:
    if not depth:
        return "every layer followed"
    followed = " and ".join(map(str, sorted({count for each in few for count in each.values()})))
    return f"{followed} layers followed, of {', '.join(f'{count} {name}' for name, count in depth.items())}"


def _with_hidden(trace: Trace, probe: "Probe") -> tuple[np.ndarray, list[str]]:
    """The highest total at each operation, with the bytes hidden inside it; and what of these had to be assumed.

    Operations with one signature hide the same, so each kind is asked for once; those that run when most is alive come
    first, for time to ask is limited.
    """
    from perf_helpers.estimate.probe import assumptions

    numbers: dict[tuple, int] = {}  # of the kinds
    kind = np.array([numbers.setdefault(each.signature, len(numbers)) for each in trace.operations])
    live = trace.live.sum(axis=1)
    first = np.unique(kind, return_index=True)[1]
    highest = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(highest, kind, live)
    operations = [trace.operations[index] for index in first]
    probe.run([operations[number] for number in np.argsort(-highest, kind="stable")])
    hidden = np.array([probe[each].bytes or 0 for each in operations])
    return np.maximum(trace.high, live + hidden[kind]), assumptions(operations, probe)


_KERNELS = {"flash": "flash", "efficient": "memory-efficient", "cudnn": "cuDNN"}


def attention_kernels(trace: Trace) -> tuple[str, ...]:
    """The fused kernels that scaled_dot_product_attention takes: "flash", "memory-efficient", "cuDNN"; () where it
    is plain, because that was asked for (eager) or no kernel takes these inputs."""
    fused = (each.name.partition("_scaled_dot_product_")[2] for each in trace.operations)
    return tuple(dict.fromkeys(_KERNELS[kernel] for name in fused if (kernel := name.partition("_")[0]) in _KERNELS))


# ---- the memory


def memory_of(followed: Followed) -> Memory:
    """The memory of a training that was followed; on CUDA before it is laid out in segments."""
    trace, totals = followed.trace, followed.totals
    peak = int(totals.argmax())  # the index of the operation
    marks = {label: _by_category(live) for label, live in trace.marks.items()}
    return Memory(
        peak_bytes=int(totals[peak]),
        kind="estimated",
        peak_phase=trace.phases[peak].shown,
        peak_operation=trace.operations[peak].name,
        peak_module=trace.modules[peak],
        breakdown=explain(_by_category(trace.live[peak]), int(totals[peak])),
        phases={label: sum(parts.values()) for label, parts in marks.items()},
        phase_breakdowns={label: explain(parts, sum(parts.values())) for label, parts in marks.items()},
        timeline=None if followed.is_extrapolated else _timeline(trace, totals),
        parameters=trace.parameters,
    )


def _by_category(live: np.ndarray) -> dict[str, int]:
    return dict(zip(TENSOR_CATEGORIES, map(int, live), strict=True))


def _timeline(trace: Trace, totals: np.ndarray) -> dict[str, Any] | None:
    """The last step as a series, see `runs.Memory`."""
    from perf_helpers.lab import meters

    picked = meters.highest(totals.tolist(), *trace.last_step)
    where = [(trace.phases[index], trace.operations[index].name, trace.modules[index]) for index in picked]
    return meters.series(where, [_by_category(live) for live in trace.live[picked]], totals[picked].tolist())


# ---- on CUDA

_DEEPEST = max(max(each.values()) for each in deepening.shallow({"layers": 0}))  # of the shallow models


def _on_cuda(experiment: Experiment, device: Device, every_layer: bool, known: Known, tell: Tell) -> Prediction:
    """A training on CUDA: its births and deaths, those of few layers repeated where layers are alike, are replayed on
    the allocator."""
    from perf_helpers.estimate import cuda
    from perf_helpers.lab import meters

    plain = _plain(experiment, device)
    as_a_whole = plain.function or plain.arguments.get("deepspeed")  # its buckets do not end where a layer does
    depth = {} if every_layer or as_a_whole else _repeated(plain)
    if max(depth.values(), default=0) <= _DEEPEST:
        depth = {}
    few = deepening.shallow(depth) if depth else [{}]
    traces = _traces(
        [plain.replace(task=plain.task.replace(config=each)) for each in few], device, known.caches[device.kind], tell
    )
    log, parameters = traces[0].log, traces[0].parameters
    if depth:
        log = deepening.deepened([trace.log for trace in traces], depth)
        each = [trace.parameters - parameters for trace in traces[1:]]
        grown = zip(depth.values(), each, strict=True)
        parameters += sum((count - deepening.FEW) * more for count, more in grown) // (_DEEPEST - deepening.FEW)
        if log is None or parameters != known.parameters_of(experiment.task):
            return _on_cuda(experiment, device, True, known, tell)
    assumptions = []
    if experiment.processes > 1:
        assumptions += _shared_out(plain.arguments, on_cuda=True)
    if "segments" in device.parts:
        found = replay.replayed(log, device.settings, device.memory_bytes)
    else:
        found = replay.summed(log, allocator.BLOCK_BYTES if "rounding" in device.parts else 1)
    memory = found.memory()
    context = allocator.context_bytes(device.compute_capability) if "context" in device.parts else None
    memory = replace(
        memory,
        parameters=parameters,
        timeline=None if depth else _timeline(traces[0], found.highest(traces[0].begins)),
        context_bytes=context,
        device_used_bytes=memory.reserved_bytes + context if memory.reserved_bytes and context else None,
    )
    told = (*assumptions, *cuda.assumptions(device.parts))
    kernels, layers_told = attention_kernels(traces[0]), _layers_told(depth, few)
    return Prediction(memory, told, layers_told, meters.peak_rss_bytes(), found.is_too_large, log, kernels)
