"""What happens in the clean process: experiments are followed on fake tensors, and their peak memory is predicted.

The way of one experiment: it is put into the form in which it can be followed; its trace is made (`trace`); what no
tensor shows is added, bytes inside operations on a CPU (`operator_workspaces`), segments and workspaces on CUDA
(`allocator_replay`); the highest total is the peak.

Importing this module is quick: torch and what stands on it are imported by the functions, in the clean process.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from perf_helpers import cards
from perf_helpers.estimate import allocator_replay
from perf_helpers.estimate.allocator_settings import Release, is_tested, newest, release, untested_text
from perf_helpers.estimate.trace_records import Log, Trace, highest
from perf_helpers.lab import worker
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.outcomes import Invalid
from perf_helpers.lab.training import Experiment
from perf_helpers.records import TENSOR_CATEGORIES, Memory, explain
from perf_helpers.texts import bytes_text
from perf_helpers.unknown import Unknown

if TYPE_CHECKING:
    from perf_helpers.estimate.knowledge import Fact, Knowledge
    from perf_helpers.estimate.operator_workspaces import Probe

Tell = Callable[[int], Any]  # is told how far the work is, from 0 to 100


@dataclass(frozen=True, slots=True)
class Device:
    """Whose memory is predicted."""

    kind: str  # "cpu", as it is counted, or "cuda", as `cuda.PARTS` model it
    compute_capability: tuple[int, int] = cards.DEFAULT_CAPABILITY  # of the GPU
    settings: str = ""  # of torch's allocator, as in PYTORCH_CUDA_ALLOC_CONF
    memory_bytes: int | None = None  # that the card has for segments; None: enough
    rules: Release | None = None  # of torch's allocator; None: the installed one's


@dataclass(frozen=True, slots=True)
class Fits:
    """Whether a training fits a card. `bool` gives the answer; of one that is unknown it raises `unknown.NeedsValues`
    with the reason."""

    what: str  # the estimate's name
    card: cards.Card
    answer: bool | Unknown
    needed_bytes: int  # reserved by the allocator, and the context
    context_bytes: int  # of these, assumed

    def __bool__(self) -> bool:
        return bool(self.answer)

    def to_dict(self) -> dict[str, Any]:
        answer = None if isinstance(self.answer, Unknown) else self.answer
        limit = {"limit_bytes": self.card.limit_bytes, "text": repr(self)}
        return {"fits": answer, "needed_bytes": self.needed_bytes} | limit

    def __repr__(self) -> str:
        """One sentence: what is needed, what is there, and the margin."""
        why = self.answer.why if isinstance(self.answer, Unknown) else ""
        answer = "it is UNKNOWN whether it fits" if why else "fits" if self.answer else "does not fit"
        context = f" (including {bytes_text(self.context_bytes, True)} assumed for the CUDA context)" * bool(
            self.context_bytes
        )
        kind = "board" if self.card.is_board else "card"
        sizes = (self.needed_bytes, self.card.memory_bytes, self.card.limit_bytes)
        needed, total, limit = (bytes_text(size, binary=True) for size in sizes)
        text = f"{self.what}: {answer} the {self.card.name}: it needs {needed}{context}"
        board = f" and the {1 - cards.OF_BOARD:.0%} that torch may be unable to use" * self.card.is_board
        text += f"; the {kind} has {total}, {limit} after a safety margin of {cards.MARGIN:.0%}{board}"
        return text + f"; {why}" * bool(why)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The predicted peak of one experiment."""

    name: str  # what it is called in tables and pictures
    task: dict[str, Any]  # see `Task.to_dict`
    arguments: dict[str, Any]  # training arguments, as they were given
    device: str  # "cpu" or "cuda"
    memory: Memory  # with the same fields, in bytes, as that of a measured run
    assumptions: tuple[str, ...]  # in words, what was modelled or left out
    seconds: float  # that the prediction took
    own_bytes: int | None  # peak memory of the process that made it
    processes: int = 1  # ranks of the training; the figures are those of one rank
    is_too_large: bool = False  # for the card whose memory was given: the figures are those on a card without limit
    attention: tuple[str, ...] = ()  # the fused kernels that it takes, e.g. "flash"; empty: it is plain
    compute_capability: tuple[int, int] | None = None  # that was asked for; None on a CPU
    device_memory: int | None = None  # bytes for the allocator that were asked for; None: enough for anything
    torch_rules: str | None = None  # the release of torch whose rules of CUDA's memory were used; None on a CPU
    untested_torch: str | None = None  # the newer release that they were used for; None: they are that release's own
    weights: str | None = None  # their type and who chose it, e.g. "weights in bfloat16 (config.json)"

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    def needed_bytes(self, context_bytes: int = 0) -> int:
        """Bytes that the device must have: what the allocator reserves, or the peak where that is not known, and the
        CUDA context, or `context_bytes` where that is not known; a CPU has none."""
        reserved = max(self.memory.reserved_bytes or 0, self.memory.peak_bytes)
        return reserved + (self.memory.context_bytes or (context_bytes if self.device == "cuda" else 0))

    def fits(self, card: str | cards.Card) -> Fits:
        """Whether it fits a card, by its name (`cards.CARDS`), with `cards.MARGIN` of its memory free.

        True and False are said of the card that was asked for, or one of its compute capability. What fits without the
        margin and not with it is unknown, and so is every other card: its attention kernels and workspaces differ.

        Raises:
            ValueError: an unknown card.
        """
        card = cards.named(card) if isinstance(card, str) else card
        context = (self.memory.context_bytes or card.context_bytes) * (self.device == "cuda")
        needed, memory = self.needed_bytes(context), card.memory_bytes
        if self.compute_capability != card.capability:
            where = "the {}.{}".format(*card.capability) + f" of the {card.name}"
            made = "a CPU" if self.device == "cpu" else "compute capability {}.{}".format(*self.compute_capability)
            answer = Unknown(f"this was estimated for {made}, not for {where}: use estimate(..., card={card.name!r})")
        elif self.peak_bytes + context > memory or (self.is_too_large and self.device_memory >= memory - context):
            answer = False
        elif needed > card.limit_bytes:
            answer = Unknown("it fits only without the margin, or only if the allocator frees cached segments")
        else:
            answer = True
        return Fits(self.name, card, answer, needed, context)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __repr__(self) -> str:
        peak = bytes_text(self.peak_bytes, binary=self.device == "cuda")
        return f"{self.name}: estimated peak {peak} on {self.device}"


def predict(
    experiment: Experiment, device: Device, with_log: bool, probe: "Probe", tell: Tell
) -> tuple[MemoryEstimate, Log | None]:
    """The estimate of one experiment, and the births and deaths on CUDA that it was made from where they are wanted.
    To be called by `with_known`: it replaces parts of torch.

    Raises:
        Invalid: the experiment cannot be built, or one of its operations cannot be followed.
    """
    (followed,) = follow_all([experiment], device, probe, tell)
    return estimated(experiment, followed, device), followed.trace.log if with_log else None  # not with every estimate


def estimated(experiment: Experiment, followed: "Followed", device: Device) -> MemoryEstimate:
    """The estimate of an experiment that was followed."""
    from perf_helpers.lab import memory_meter

    on_cuda = device.kind == "cuda"
    memory, is_too_large = _on_cuda(followed.trace, device) if on_cuda else (memory_of(followed), False)
    return MemoryEstimate(
        name=experiment.name,
        task=experiment.task.to_dict(),
        arguments=dict(experiment.arguments.given),
        device=device.kind,
        memory=memory,
        assumptions=followed.assumptions,
        seconds=0.0,  # whoever waits for this process knows
        own_bytes=memory_meter.peak_rss_bytes(),
        processes=experiment.processes,
        is_too_large=is_too_large,
        attention=attention_kernels(followed.trace),
        compute_capability=device.compute_capability if on_cuda else None,
        device_memory=device.memory_bytes if on_cuda else None,
        **_rules_used(device.rules or release() if on_cuda else None),
        weights=experiment.weights and str(experiment.weights),
    )


def with_known(function: Callable, arguments: Sequence, is_saved: bool, tell: Tell) -> Any:
    """Return `function(*arguments, probe, tell)` in this clean process, which knows what earlier ones stored.

    Args:
        is_saved: whether to store what is learned. No: a user's own code may change what operations return.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake tensors are on a CPU, whatever they stand for: no GPU is touched
    from perf_helpers.estimate.knowledge import Knowledge
    from perf_helpers.estimate.operator_workspaces import Probe

    known = Knowledge.load()
    with contextlib.closing(Probe(known=known)) as probe:
        answer = function(*arguments, probe, tell)
    if is_saved:
        known.save()
    return answer


# ---- an experiment is followed


@dataclass(frozen=True, slots=True)
class Followed:
    """A training that was followed."""

    trace: Trace
    totals: np.ndarray  # the highest total at each operation, with what is hidden inside it, in bytes
    assumptions: tuple[str, ...]


def follow_all(experiments: Sequence[Experiment], device: Device, probe: "Probe", tell: Tell) -> list[Followed]:
    """Follow experiments on fake tensors, of many as many at once as there are cores. 80 of 100 per cent of the work
    are done when all have their traces. Raises Invalid as `predict` does."""
    plain, settings = [_plain(each, device) for each in experiments], {"device": device, "known": probe.known}
    traces, follow = [], map
    with contextlib.ExitStack() as stack:
        if len(plain) > _FEW or device.kind == "cpu":  # whose operations run in this process' forks, see `Probe`
            fork, count = multiprocessing.get_context("fork"), min(len(plain), os.cpu_count() or 1)
            # A fork has these from the start: they need not travel.
            follow = stack.enter_context(ProcessPoolExecutor(count, fork, _with.update, [settings])).map
        else:
            _with.update(settings)
        for number, (trace, news) in enumerate(follow(_follow, plain), 1):
            traces.append(trace)
            probe.known.learn(news)
            tell(80 * number // len(plain))
    return [_followed(each, trace, device, probe) for each, trace in zip(experiments, traces, strict=True)]


_FEW = 2  # experiments that are followed in this process: a fork, and a trace's way back, take as long
_with: dict[str, Any] = {}  # what a process that follows does so with, from one experiment to the next


def _plain(experiment: Experiment, device: Device) -> Experiment:
    """The experiment as it is followed: with no workers, no shards where nobody shards, and no more samples than it
    reaches. Raises Invalid where there is no such model."""
    try:
        _, weights = experiment.task.model_class(), experiment.weights
    except ValueError as error:
        raise Invalid(str(error)) from error
    if weights and weights.bits:  # processes that run its operations are forks of this one, and need them
        importlib.import_module("bitsandbytes")
    arguments, task, processes = experiment.arguments, experiment.task, experiment.processes
    if arguments.get("dataloader_num_workers"):  # workers hold their batches elsewhere
        arguments = arguments.without(*(f"dataloader_{name}" for name in _OF_WORKERS))
    if device.kind == "cpu" or processes == 1:  # accelerate passes over it
        arguments = arguments.without(*(name for name in arguments.given if name.startswith("fsdp")))
    if experiment.training and not experiment.function:
        task = task.replace(dataset_size=min(task.dataset_size, enough_samples(arguments, processes)))
    return experiment.replace(arguments=arguments, task=task)


_OF_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers")


def enough_samples(arguments: Arguments, processes: int = 1) -> int:
    """With how many samples a training is followed: those of three steps, and more, for a batch is fetched ahead."""
    return 4 * arguments.samples_per_step(processes)


def _follow(experiment: Experiment) -> tuple[Trace, "dict[tuple, Fact]"]:
    """The trace of an experiment, and what was learnt of operations."""
    import torch

    torch.set_num_threads(1)
    gc.set_threshold(*gc.get_threshold()[:2], 10**6)  # going through all that is kept takes a quarter of the time
    learned = _with["known"].learned
    before = set(learned)
    trace = trace_of(experiment, **_with)
    return trace, {key: learned[key] for key in learned.keys() - before}


def trace_of(experiment: Experiment, device: Device, known: "Knowledge | None" = None) -> Trace:
    """The trace of an experiment. To be called in a clean process: it replaces parts of torch."""
    from perf_helpers.estimate import trace
    from perf_helpers.estimate.operation_cache import OperationCache

    if device.kind == "cpu":
        return trace.follow(experiment, trace.FakeTracker(OperationCache(known, "cpu")))
    from perf_helpers.estimate import cuda
    from perf_helpers.estimate.device import DeviceTracker, NotSent

    capability, rules = device.compute_capability, device.rules or release()
    cache = OperationCache(known, f"cuda, torch {rules.torch}")
    paged, is_function = str(experiment.arguments.get("optim", "")).startswith("paged"), experiment.function is not None
    for from_the_start in (False, True):  # again only a loop that sends nothing
        tracker = DeviceTracker(capability, is_function, from_the_start, cache, rules)
        with contextlib.suppress(NotSent), cuda.emulated(capability, rules), tracker.emulated(paged):
            found = trace.follow(experiment, tracker)
            if tracker.is_there or not is_function:
                return found


def _followed(experiment: Experiment, trace: Trace, device: Device, probe: "Probe") -> Followed:
    """An experiment's trace with what is assumed, and on a CPU with what operations hide."""
    assumptions = _shared_out(experiment.arguments, device.kind == "cuda") if experiment.processes > 1 else []
    if device.kind == "cuda":
        from perf_helpers.estimate import cuda

        return Followed(trace, trace.high, (*assumptions, *cuda.assumptions(), _answers_for(device.rules or release())))
    totals, unsure = _with_hidden(trace, probe.under(worker.threads_of(experiment)))
    return Followed(trace, totals, (*assumptions, *unsure))


def _rules_used(rules: Release | None) -> dict[str, str | None]:
    """The fields of an estimate that name the rules; none on a CPU."""
    if rules is None:
        return {}
    return (
        {"torch_rules": rules.torch} if is_tested(rules) else {"torch_rules": newest(), "untested_torch": rules.torch}
    )


def _answers_for(rules: Release) -> str:
    """Of which torch the memory is, in words."""
    torch = f"torch {rules.torch}" if is_tested(rules) else untested_text(rules.torch)
    workspace = "cuBLAS' workspace" if rules.shares_workspace else "a workspace of its own, 1 MiB a thread"
    matmuls = f"cuBLASLt uses {workspace}" if rules.keeps_workspaces else "each matmul frees its workspace"
    return (
        f"{torch}: among free blocks of one size its allocator takes {_TAKEN[rules.ties]}, and {matmuls}; everything "
        "else is traced with the torch installed here."
    )


_TAKEN = {
    "address": "the one at the lowest address, as addresses descend",
    "block": "the one that it made first",
    "segment": "the one in the oldest segment",
}
_OF_REPLICAS = "DistributedDataParallel: one rank is traced, with the reducer's buckets, without network buffers"
_OF_SHARDS = "FSDP2: one rank is traced, as accelerate and torch shard and gather weights, without network buffers"
_OF_ZERO = "DeepSpeed: one rank is traced, as ZeRO shards, flattens and gathers; on a GPU with room for a flat copy"
_NOT_TAKEN_UP = "fsdp: on a CPU accelerate ignores it and trains with DistributedDataParallel"


def _shared_out(arguments: Arguments, on_cuda: bool) -> list[str]:
    """How what several ranks share out was followed."""
    if arguments.get("deepspeed"):
        return [_OF_ZERO]
    if arguments.get("fsdp"):
        return [_OF_SHARDS] if on_cuda else [_OF_REPLICAS, _NOT_TAKEN_UP]
    return [_OF_REPLICAS]


def _with_hidden(trace: Trace, probe: "Probe") -> tuple[np.ndarray, list[str]]:
    """The highest total at each operation, with the bytes hidden inside it; and what of these had to be assumed.

    Operations with one signature hide the same, so each kind is asked for once; those that run when most is alive come
    first, for time to ask is limited.
    """
    from perf_helpers.estimate.operator_workspaces import assumptions

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
        timeline=_timeline(trace, totals),
        parameters=trace.parameters,
        trainable_parameters=trace.trainable,
    )


def _by_category(live: np.ndarray) -> dict[str, int]:
    return dict(zip(TENSOR_CATEGORIES, map(int, live), strict=True))


def _timeline(trace: Trace, totals: np.ndarray) -> dict[str, Any] | None:
    """The last step as a series, see `records.Memory`."""
    from perf_helpers.lab import memory_meter

    picked = memory_meter.highest(totals.tolist(), *trace.last_step)
    where = [(trace.phases[index], trace.operations[index].name, trace.modules[index]) for index in picked]
    return memory_meter.series(where, [_by_category(live) for live in trace.live[picked]], totals[picked].tolist())


# ---- on CUDA


def _on_cuda(trace: Trace, device: Device) -> tuple[Memory, bool]:
    """What the allocator makes of the births and deaths of a training, and whether it is too large for the card."""
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
