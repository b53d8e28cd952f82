"""Peak memory of a training, predicted without running it: the step is followed on fake tensors and its bytes counted.

Repeated layers are followed at two small depths and extrapolated: between two neighbouring depths every moment of the
training changes by what one layer adds, so the moments of the full model lie on straight lines.
"""

import base64
import dataclasses
import functools
import itertools
import multiprocessing
import os
import pickle
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from perf_helpers.lab import arguments as training_arguments
from perf_helpers.lab import hardware, processes, progress, worker
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.runs import CATEGORIES, Memory, explain
from perf_helpers.lab.task import Task
from perf_helpers.lab.training import Experiment, Invalid

# How configurations call their number of layers. Of a pair (encoder, decoder) each is a depth of its own.
_DEPTHS = (
    ("encoder_layers", "decoder_layers"),
    ("num_layers", "num_decoder_layers"),
    ("num_hidden_layers",),
    ("n_layer",),
    ("n_layers",),
    ("num_layers",),
)


_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_MEASURES = ("live", "before", "high", "born")
_SEGMENT = 2 * 2**20  # what the CUDA allocator asks for at least
_ALONE = 8  # operations that may be without a partner; more, and the two depths are different trainings


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The predicted peak of one experiment. `memory` has the same fields, in bytes, as that of a measured run.

    `assumptions` says in words what was modelled or left out, `traced` which layers were followed, `seconds` how long
    the prediction took, `own_bytes` the peak memory of the process that made it.
    """

    name: str
    task: dict[str, Any]
    arguments: dict[str, Any]
    device: str
    memory: Memory
    assumptions: tuple[str, ...]
    traced: str
    seconds: float
    own_bytes: int | None
    processes: int = 1

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        from perf_helpers.plots import bytes_text

        return f"{self.name}: would peak at {bytes_text(self.peak_bytes)} on {self.device} ({self.traced})"


def depths(config) -> dict[str, int]:
    """The fields of a configuration that say how often a layer is repeated, where the layers are all alike."""
    fields = config.to_dict()
    for names in _DEPTHS:
        found = {name: fields[name] for name in names if isinstance(fields.get(name), int)}
        if len(found) == len(names):
            return found
    return {}


def _segments(trace) -> list[tuple[int, int]]:
    """Stretches of operations of one phase, as (first, last + 1)."""
    edges = [0, *(i for i in range(1, len(trace.phases)) if trace.phases[i] != trace.phases[i - 1]), len(trace.phases)]
    return list(itertools.pairwise(edges))


def _certain(shallow: list, deep: list) -> dict[int, int]:
    """Pairs of places that must belong together: where an operation comes first, and where the layer more has none."""
    places: list[dict] = [{}, {}]
    for found, keys in zip(places, (shallow, deep), strict=True):
        for place, key in enumerate(keys):
            found.setdefault(key, []).append(place)
    pairs = {}
    for key, here in places[0].items():
        there = places[1].get(key, [])
        pairs |= zip(here, there, strict=True) if len(here) == len(there) else zip(here[:1], there[:1], strict=False)
    return pairs


def _matched(shallow, deep, here: range, there: range) -> Iterator[tuple[int, int]]:
    """Pairs of places in two corresponding stretches, counted from where the ranges begin.

    From a certain pair on the operations go together one by one as long as they look alike and the layer more adds
    the same bytes to each: where it does not, they only look alike.
    """
    keys = [shallow.calls[place].key for place in here], [deep.calls[place].key for place in there]
    certain, offset, added = _certain(*keys), None, None
    for place, key in enumerate(keys[0]):
        if place in certain:
            offset = certain[place] - place
            added = deep.live[there[certain[place]]] - shallow.live[here[place]]
        elif offset is not None:
            other = place + offset
            alike = other < len(there) and keys[1][other] == key
            if not alike or not _adds(added, shallow, here[place], deep, there[other]):
                offset = None
        if offset is not None:
            yield here[place], there[place + offset]


def _adds(added: np.ndarray, shallow, place: int, deep, other: int) -> bool:
    """Whether the deep training has these bytes more at that place: when the operation ends, begins and is highest."""
    more = deep.high[other] - shallow.high[place], deep.before[other] - shallow.before[place]
    return (deep.live[other] - shallow.live[place] == added).all() and set(more) == {added.sum()}


@dataclass(frozen=True, slots=True)
class Growth:
    """What one layer more adds to each moment of a training, in two ways: {"places": which, "live": bytes, ...}.

    The first way counts from the front of each phase, where the layer more comes later, the second from its back,
    where it has been. `between` are the moments that only the deeper training has, for its middle layer does what
    neither the first nor the last does (it adds to a gradient that all layers share): {"places": which, "before" and
    "after": the moments of the shallow one around them}.
    """

    ways: list[dict[str, np.ndarray]]
    between: dict[str, np.ndarray]


def _rows(way: dict[str, np.ndarray], places: np.ndarray) -> np.ndarray:
    """Where a way has its figures of these places; -1 for a place that it does not have."""
    order = np.argsort(way["places"])
    found = np.minimum(np.searchsorted(way["places"], places, sorter=order), len(order) - 1)
    return np.where(way["places"][order[found]] == places, order[found], -1)


def growth(shallow, deep) -> Growth | None:
    """What one layer more adds; None where the trainings differ by more than a layer put in between."""
    parts = _segments(shallow), _segments(deep)
    phases = [[t.phases[first] for first, _ in segments] for t, segments in zip((shallow, deep), parts, strict=True)]
    if phases[0] != phases[1]:
        return None
    front, back = (np.full(len(shallow.calls), -1) for _ in range(2))
    for here, there in zip(*parts, strict=True):
        here, there = range(*here), range(*there)
        for place, other in _matched(shallow, deep, here, there):
            front[place] = other
        for place, other in _matched(shallow, deep, here[::-1], there[::-1]):
            back[place] = other
    alone = np.flatnonzero((front < 0) & (back < 0))
    # An operation between the two ways (the first update after the last state was made) goes with the one before it.
    if len(alone) > _ALONE or (np.diff(alone) == 1).any() or (len(alone) and alone[0] == 0):
        return None
    found = []
    for way in (front, back):
        places = np.flatnonzero(way >= 0)
        found.append({"places": places})
        for name in _MEASURES:
            found[-1][name] = getattr(deep, name)[way[places]] - getattr(shallow, name)[places]
    for place in alone:
        for way in found:
            if len(before := np.flatnonzero(way["places"] == place - 1)):
                live = way["live"][before[0]]
                added = {"places": place, "live": live, "before": live.sum(), "high": live.sum(), "born": 0}
                for name, value in added.items():
                    way[name] = np.concatenate([way[name], [value]])
    between = _between(shallow, deep, front, back)
    return Growth(found, between) if between else None


def _between(shallow, deep, front: np.ndarray, back: np.ndarray) -> dict[str, np.ndarray] | None:
    """The moments that only the deeper training has, see `Growth`; None where they are in no common phase."""
    places = np.setdiff1d(np.arange(len(deep.calls)), np.concatenate([front, back]))
    starts, ends = np.flatnonzero(front >= 0), np.flatnonzero(back >= 0)
    before = np.searchsorted(front[starts], places) - 1
    after = np.searchsorted(back[ends], places)
    if len(places) and (before.min() < 0 or after.max() >= len(ends)):
        return None
    before, after = starts[before], ends[after]
    around = zip(places, before, after, strict=True)
    if any(len({deep.phases[place], shallow.phases[a], shallow.phases[b]}) > 1 for place, a, b in around):
        return None
    return {"places": places, "before": before, "after": after}


def extrapolated(base, deeper: Sequence, layers: Sequence[int]) -> Any:
    """The moments of the full model from a base and, for each depth, the same with one layer more.

    Args:
        layers: for each of `deeper`, how many layers the full model has more than the base.
    """
    grown = [growth(base, other) for other in deeper]
    if any(each is None for each in grown):
        return None
    parts, where = [], []
    for ways in itertools.product(*(each.ways for each in grown)):
        here = functools.reduce(np.intersect1d, [way["places"] for way in ways])
        values = {name: getattr(base, name)[here] for name in _MEASURES}
        for way, count in zip(ways, layers, strict=True):
            rows = _rows(way, here)
            for name in _MEASURES:
                values[name] = values[name] + count * way[name][rows]
        parts.append(values)
        where += [(base, place) for place in here]
    for number, other in enumerate(deeper):
        if layers[number] and len(grown[number].between["places"]):
            values = _of_middle_layers(number, grown, deeper, layers)
            if values is None:
                return None
            parts += values
            where += 2 * [(other, place) for place in grown[number].between["places"]]
    marks = {
        label: at + sum(count * (other.marks[label] - at) for other, count in zip(deeper, layers, strict=True))
        for label, at in base.marks.items()
    }
    return dataclasses.replace(
        base,
        calls=[trace.calls[place] for trace, place in where],
        phases=[trace.phases[place] for trace, place in where],
        modules=[_LAYER_NUMBER.sub(".*", trace.modules[place]) for trace, place in where],  # which layer is not known
        **{name: np.concatenate([values[name] for values in parts]) for name in _MEASURES},
        marks=marks,
        parameters=base.parameters
        + sum(count * (other.parameters - base.parameters) for other, count in zip(deeper, layers, strict=True)),
        reserved_bytes=None,  # how blocks fall into segments does not lie on a line
    )


def _of_middle_layers(number: int, grown: Sequence[Growth], deeper: Sequence, layers: Sequence[int]) -> Any:
    """The moments that only middle layers have, in the first and in the last of them; None where it is not known
    what layers of the other kinds add to them."""
    between = grown[number].between
    found = []
    # The front way knows the moments before those between, the back way those after.
    for way, near in zip(grown[number].ways, ("before", "after"), strict=True):
        rows, values = _rows(way, between[near]), {}
        for name in _MEASURES:
            values[name] = getattr(deeper[number], name)[between["places"]] + (layers[number] - 1) * way[name][rows]
        found.append(values)
    for other, each in enumerate(grown):
        if other == number:
            continue
        added: dict[str, np.ndarray] = {}
        for way, near in itertools.product(each.ways, ("before", "after")):
            rows = _rows(way, between[near])
            if (rows < 0).any():
                continue
            if added and any((way[name][rows] != added[name]).any() for name in ("live", "before")):
                return None
            added = added or {name: way[name][rows] for name in _MEASURES}
        if not added:
            return None
        for values, name in itertools.product(found, _MEASURES):
            values[name] = values[name] + layers[other] * added[name]
    return found


@dataclass(frozen=True, slots=True)
class Device:
    """Whose memory is predicted: "cpu" as it is counted, or "cuda" as `cuda.PARTS` model it."""

    kind: str
    compute_capability: tuple[int, int] = (9, 0)
    parts: tuple[str, ...] = ()


def estimate(
    task: Task,
    *,
    name: str = "",
    device: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    parts: Collection[str] | None = None,
    training: bool = True,
    optimizer: Callable | None = None,
    function: Callable[[Task], Any] | None = None,
    processes: int = 1,
    every_layer: bool = False,
    timeout: float = 300,
    **arguments,
) -> MemoryEstimate:
    """Predict the peak memory of a training, or of inference, without running it.

    On "cpu" the prediction is what `Lab.train` counts. On "cuda" it is the allocator's peak on a GPU that need not be
    there; `assumptions` names what was modelled.

    Args:
        name: what the estimate is called in tables and pictures.
        device: "cpu" or "cuda"; None: this machine's.
        compute_capability: of the GPU, e.g. (9, 0) for an H100; None: this machine's, else (9, 0).
        parts: names from `cuda.PARTS` that are modelled; None: all.
        training: False: forward passes without gradients on `per_device_eval_batch_size` samples.
        optimizer: function (model, training arguments) -> torch optimizer, for one that `optim` does not name.
        function: a loop of one's own that takes the task, as `Lab.run` does.
        processes: ranks of a data-parallel training; the figures are those of one rank.
        every_layer: follow every layer instead of extrapolating from a few.
        timeout: seconds that the prediction may take.
        arguments: names of `transformers.TrainingArguments`, plus `attn_implementation` and `dtype`.

    Raises:
        ValueError: an unknown argument, a value out of range, a model or an operation that cannot be followed, or no
            prediction within `timeout` (or within what `processes.within` leaves).
    """
    import cloudpickle

    told = Arguments.of(arguments)
    whose = target(device, compute_capability, parts)
    experiment = Experiment(
        name=name or task.model,
        task=task,
        arguments=told,
        function=cloudpickle.dumps(function) if function else None,
        optimizer=cloudpickle.dumps(optimizer) if optimizer else None,
        training=training,
        processes=processes,
    )
    key = (repr(experiment.replace(name="")), task.identity(), whose, every_layer)
    if not (found := _made.get(key)):
        with progress.percent(f"estimating {task.model}") as bar:
            found = _predicted(experiment, whose, every_layer, timeout, lambda part: bar.update(part - bar.n))
    _made[key] = dataclasses.replace(found, name=experiment.name)  # listed under its latest name
    return _made[key]


_made: dict[tuple, MemoryEstimate] = {}
_learned: list[str] = []  # of operations, by earlier estimates; opened in clean processes only, for it needs torch


def estimates_so_far() -> list[MemoryEstimate]:
    """Every estimate that this process has made, in order."""
    return list(_made.values())


def target(
    device: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    parts: Collection[str] | None = None,
) -> Device:
    """Whose memory is to be predicted; the arguments are those of `estimate`."""
    machine = hardware.describe()
    kind = device or machine.kind
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: choose 'cpu' or 'cuda'")
    if kind == "cpu":
        return Device(kind)
    known = [gpu.capability for gpu in machine.gpus if gpu.capability]
    return Device(kind, tuple(compute_capability or [*known, (9, 0)][0]), _parts(parts))


def _predicted(
    experiment: Experiment, device: Device, every_layer: bool, timeout: float, on_percent: Callable[[int], Any]
) -> MemoryEstimate:
    """Predict in a clean process."""
    began = time.perf_counter()
    work = functools.partial(predict, experiment, device, every_layer)
    value = in_clean_process(work, experiment.task, timeout, on_percent)
    return MemoryEstimate(
        name=experiment.name,
        task=experiment.task.to_dict(),
        arguments=dict(experiment.arguments.given),
        device=device.kind,
        memory=Memory.from_dict(value["memory"]),
        assumptions=tuple(value["assumptions"]),
        traced=value["traced"],
        seconds=time.perf_counter() - began,
        own_bytes=value["own_bytes"],
        processes=experiment.processes,
    )


def in_clean_process(
    work: Callable[..., dict[str, Any]], task: Task, timeout: float, on_percent: Callable[[int], Any] | None = None
) -> dict[str, Any]:
    """What `work(results, probe)` returns, with "own_bytes" added, from a clean process that knows what others learnt.

    Args:
        results: `trace.Results`, and
        probe: `probe.Probe`: what is known of operations.
        on_percent: called with how far the work is, from 0 to 100.

    Raises:
        ValueError: `work` raised `Invalid`, the task names no model, or the process failed or took too long.
    """
    job = functools.partial(_with_what_is_known, work, _learned)
    try:
        value = processes.call(job, task, timeout=timeout, on_percent=on_percent)
    except processes.Failed as failed:
        if failed.outcome.status == "timed out":
            raise ValueError(f"{task.model} was given up, {failed}: give it more time with timeout=") from None
        raise ValueError(f"{task.model} cannot be followed on fake tensors: {failed}") from None
    if "invalid" in value:
        raise ValueError(value["invalid"])
    _learned.append(value.pop("learned"))
    return value


def _with_what_is_known(work: Callable[..., dict[str, Any]], learned: Sequence[str], task: Task, tell) -> dict[str, Any]:
    _in_fork["tell"] = tell
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake tensors are on a CPU, whatever they stand for; no GPU is touched
    from perf_helpers.estimate import trace
    from perf_helpers.estimate.probe import Probe
    from perf_helpers.lab import meters

    results, probe = trace.Results(), Probe()
    every = results.known, probe.known, _counts
    for earlier in learned:
        for known, more in zip(every, pickle.loads(base64.b64decode(earlier)), strict=True):
            known |= more
    old = [set(known) for known in every]
    try:
        _check_task(task)
        outcome = work(results, probe)
    except Invalid as error:
        return {"invalid": str(error)}
    finally:
        probe.close()
    new = [{key: known[key] for key in known.keys() - keys} for known, keys in zip(every, old, strict=True)]
    return outcome | {
        "own_bytes": meters.peak_rss_bytes(),
        "learned": base64.b64encode(pickle.dumps(new)).decode(),
    }


def _check_task(task: Task) -> None:
    try:
        task.model_class()
    except ValueError as error:
        raise Invalid(str(error)) from error


def _parts(names: Collection[str] | None) -> tuple[str, ...]:
    from perf_helpers.estimate import cuda

    names = tuple(cuda.PARTS) if names is None else tuple(names)
    cuda.assumptions(names)  # which knows the names
    return names


@dataclass(frozen=True, slots=True)
class Followed:
    """A training that was followed: its moments (a `trace.Trace`), the highest total at each, and how it was done."""

    moments: Any
    totals: np.ndarray
    assumptions: tuple[str, ...]
    traced: str
    is_extrapolated: bool


def predict(experiment: Experiment, device: Device, every_layer: bool, results, probe) -> dict[str, Any]:
    """Follow an experiment on fake tensors and find its peak. To be called in a clean process: it patches torch.

    Returns:
        {"memory": of `Memory`, "assumptions": [...], "traced": which layers were followed}.
    """
    (found,) = all_followed([experiment], device, every_layer, results, probe)
    memory, more = memory_of(found, experiment, device)
    return {"memory": memory.to_dict(), "assumptions": [*found.assumptions, *more], "traced": found.traced}


def all_followed(
    experiments: Sequence[Experiment], device: Device, every_layer: bool, results, probe
) -> list[Followed]:
    """Follow experiments on fake tensors, as many at once as there are cores. To be called in a clean process."""
    plain = [_with_little_data(_unsharded(_without_workers(experiment))) for experiment in experiments]
    layers = [{} if every_layer or each.function else _repeated(each) for each in plain]
    parts = [_of_few_layers(each, depth) for each, depth in zip(plain, layers, strict=True)]
    done = iter(_traces([part for group in parts for part in group], device, results))
    found = [
        _extended(each, depth, [next(done) for _ in group])
        for each, depth, group in zip(plain, layers, parts, strict=True)
    ]
    whole = iter(
        _traces([each for each, moments in zip(plain, found, strict=True) if moments is None], device, results)
    )
    told = []
    for experiment, depth, moments in zip(experiments, layers, found, strict=True):
        extrapolated = bool(depth) and moments is not None
        moments = next(whole) if moments is None else moments
        assumptions = []
        if shards := _shards(experiment):
            count = sum(depth.values()) if extrapolated else 0
            moments, assumption = _sharded(moments, experiment.processes, shards, count)
            assumptions.append(assumption)
        elif experiment.processes > 1:
            assumptions.append(
                "DistributedDataParallel: one rank, with the reducer's buckets and without a network's buffers"
            )
        totals, unknown = moments.high, []
        if device.kind == "cpu":
            totals, unknown = _with_hidden(moments, probe.under(worker.threads_of(experiment)))
        traced = "every layer followed"
        if extrapolated:
            traced = f"2 and 3 layers followed, of {', '.join(f'{count} {name}' for name, count in depth.items())}"
        told.append(Followed(moments, totals, (*assumptions, *unknown), traced, extrapolated))
    return told


def memory_of(found: Followed, experiment: Experiment, device: Device) -> tuple[Memory, list[str]]:
    """The memory of a training that was followed, and what was assumed of the device."""
    from perf_helpers.lab import meters

    moments, totals = found.moments, found.totals
    peak = int(totals.argmax())
    live = {label: dict(zip(CATEGORIES, map(int, at), strict=False)) for label, at in moments.marks.items()}
    memory = Memory(
        peak_bytes=int(totals[peak]),
        kind="estimated",
        peak_phase=meters.PHASE_NAMES.get(moments.phases[peak], moments.phases[peak]),
        peak_operation=moments.calls[peak].name,
        peak_module=moments.modules[peak],
        breakdown=explain(dict(zip(CATEGORIES, map(int, moments.live[peak]), strict=False)), int(totals[peak])),
        phases={label: sum(parts.values()) for label, parts in live.items()},
        phase_breakdowns={label: explain(parts, sum(parts.values())) for label, parts in live.items()},
        timeline=None if found.is_extrapolated else _timeline(moments, totals),
        parameters=moments.parameters,
    )
    if device.kind == "cuda":
        return _on_cuda(memory, moments, device, experiment.training)
    return memory, []


_OF_WORKERS = ("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers")
_SHARDED = {
    "full_shard": ("weights", "gradients", "optimizer_states"),
    "shard_grad_op": ("gradients", "optimizer_states"),
}


def _shards(experiment: Experiment) -> tuple[str, ...]:
    """The categories that the Trainer's `fsdp` divides among the ranks."""
    settings, _ = training_arguments.split(experiment.arguments)
    words = settings.get("fsdp") or ""
    words = words.split() if isinstance(words, str) else ["full_shard"] if words is True else [str(w) for w in words]
    return next((parts for name, parts in _SHARDED.items() if name in words), ())


def _without_workers(experiment: Experiment) -> Experiment:
    """The experiment with its batches made in the process itself: workers hold theirs elsewhere."""
    if not experiment.arguments.get("dataloader_num_workers"):
        return experiment
    return experiment.replace(arguments=experiment.arguments.without(*_OF_WORKERS))


def enough_samples(arguments: dict[str, Any], processes: int = 1) -> int:
    """With how many samples a training is followed: those of two steps, and some left, for a batch is fetched ahead."""
    return 4 * training_arguments.samples_per_step(arguments, processes)


def _with_little_data(experiment: Experiment) -> Experiment:
    """The experiment with no more samples than are followed."""
    if experiment.function or not experiment.training:
        return experiment
    enough = enough_samples(experiment.arguments, experiment.processes)
    if experiment.task.dataset_size <= enough:
        return experiment
    return experiment.replace(task=experiment.task.replace(dataset_size=enough))


def _unsharded(experiment: Experiment) -> Experiment:
    """The experiment as one process runs it, where it would be sharded."""
    if not _shards(experiment):
        return experiment
    sharding = [name for name in experiment.arguments.given if name.startswith("fsdp")]
    return experiment.replace(arguments=experiment.arguments.without(*sharding), processes=1)


def _sharded(moments, ranks: int, shards: tuple[str, ...], layers: int) -> tuple[Any, str]:
    """The moments of one rank of a sharded training: arithmetic on the training of one process.

    A rank keeps its share; of what is divided it gathers, while it computes, two layers (the next one is fetched
    ahead), taken as the mean layer, where weights are divided too.
    """
    places = [CATEGORIES.index(name) for name in shards]
    spared = moments.live[:, places].sum(axis=1) * (ranks - 1) // ranks
    live = moments.live.copy()
    live[:, places] //= ranks
    gathered = 0
    if "weights" in shards:
        gathered = int(2 * moments.live[:, CATEGORIES.index("weights")].max() // max(layers, 2))
        live[:, CATEGORIES.index("weight_copies")] += gathered
    changed = {name: getattr(moments, name) - spared + gathered for name in ("before", "high")}
    told = f"sharding: {', '.join(shards)} divided by {ranks} by arithmetic, {gathered / 1e6:.0f} MB gathered at a time"
    return dataclasses.replace(moments, live=live, **changed), told


def _on_cuda(memory: Memory, moments, device: Device, training: bool) -> tuple[Memory, list[str]]:
    """The memory with what no tensor shows on a GPU: workspaces, segments, the context."""
    from perf_helpers.estimate import allocator, cuda

    workspace = (
        allocator.workspace_bytes(device.compute_capability, training) if "cublas_workspace" in device.parts else 0
    )
    reserved = context = None
    told = cuda.assumptions(device.parts)
    if moments.reserved_bytes is None:
        told.append("reserved: not predicted from a few layers; with every layer followed it is.")
    elif "segments" in device.parts:
        reserved = moments.reserved_bytes + -(-workspace // _SEGMENT) * _SEGMENT
    if "context" in device.parts:
        context = allocator.context_bytes(device.compute_capability)
    peak = memory.peak_bytes + workspace
    changed = dataclasses.replace(
        memory,
        peak_bytes=peak,
        breakdown=explain(memory.breakdown, peak),
        reserved_bytes=reserved,
        context_bytes=context,
        device_used_bytes=reserved + context if reserved and context else None,
    )
    return changed, told


def _timeline(moments, totals: np.ndarray) -> dict[str, Any] | None:
    from perf_helpers.lab import meters

    picked = meters.highest(totals.tolist(), *moments.last_step)
    live = [dict(zip(CATEGORIES, map(int, moments.live[place]), strict=False)) for place in picked]
    where = [(moments.phases[place], moments.calls[place].name, moments.modules[place]) for place in picked]
    return meters.series(where, live, [int(totals[place]) for place in picked])


def _of_few_layers(experiment: Experiment, layers: dict[str, int]) -> list[Experiment]:
    """The experiment with two layers and, of each kind of layer, with three; itself where there is no kind.

    The first and the last layer may differ from those between.
    """
    if not layers:
        return [experiment]
    shapes = [dict.fromkeys(layers, 2), *({name: 2 + (name == other) for name in layers} for other in layers)]
    return [experiment.replace(task=experiment.task.replace(config=shape)) for shape in shapes]


def _extended(experiment: Experiment, layers: dict[str, int], traces: Sequence[Any]) -> Any:
    """The moments of the full model from the traces of `_of_few_layers`; None where its layers differ."""
    base, *deeper = traces
    if not layers:
        return base
    full = extrapolated(base, deeper, [count - 2 for count in layers.values()])
    return full if full and full.parameters == _parameters(experiment.task) else None


_counts: dict[str, int] = {}  # of parameters, by model


def _parameters(task: Task) -> int:
    key = task.replace(seq_len=None, dataset_size=1).identity()
    if key not in _counts:
        _counts[key] = task.parameters()
    return _counts[key]


def _traces(experiments: Sequence[Experiment], device: Device, results) -> list:
    """The traces of experiments, followed in forks of this process, as many at once as there are cores."""
    if not experiments:
        return []
    _in_fork.update(known=results.known, device=device)
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(len(experiments), os.cpu_count() or 1), mp_context=fork) as pool:
        done = []
        for number, each in enumerate(pool.map(_follow, experiments), 1):
            done.append(each)
            _in_fork["tell"](80 * number // len(experiments))  # per cent: what hides in operations is found after it
    for _, new in done:
        results.known |= new
    return [trace for trace, _ in done]


_in_fork: dict[str, Any] = {}  # what a fork begins with, and what it has learnt


def _follow(experiment: Experiment) -> tuple[Any, dict]:
    """A trace, and what was learned of operations."""
    import torch

    from perf_helpers.estimate import allocator, cuda, trace

    torch.set_num_threads(1)
    known, device = _in_fork["known"], _in_fork["device"]
    if device.kind == "cpu":
        results = trace.Results(known)
        followed = trace.follow(experiment, trace.FakeTracker(results=results))
        new = {key: results.known[key] for key in results.known.keys() - known.keys()}
        _in_fork["known"] = results.known
        return dataclasses.replace(followed, log=[]), new
    tracker = trace.FakeTracker(512 if "rounding" in device.parts else 1, follow_host="host_data" not in device.parts)
    with cuda.emulated(device.parts, compute_capability=device.compute_capability, sent=tracker.sent):
        followed = trace.follow(experiment, tracker)
    return dataclasses.replace(followed, log=[], reserved_bytes=allocator.reserved_peak(followed.log)), {}


def _repeated(experiment: Experiment) -> dict[str, int]:
    """The depths that can be extrapolated: {field of the configuration: layers}; {} where every layer is followed."""
    config = experiment.task.build_config()
    found = depths(config)
    uneven = any(
        isinstance(value, list) and len(value) in found.values() and len({str(item) for item in value}) > 1
        for value in config.to_dict().values()
    )
    settings, _ = training_arguments.split(experiment.arguments)
    options = settings.get("activation_checkpointing_kwargs") or settings.get("gradient_checkpointing_kwargs") or {}
    if uneven or options.get("every_n_layers", 1) > 1:
        return {}
    return found if max(found.values(), default=0) > 3 else {}


def _with_hidden(moments, probe) -> tuple[np.ndarray, list[str]]:
    """The highest total at each moment, bytes hidden inside operations included; and what of it had to be assumed."""
    from perf_helpers.estimate.probe import assumptions

    numbers: dict[tuple, int] = {}
    signatures = {id(call): call.signature for call in {id(call): call for call in moments.calls}.values()}
    # Same call, same bytes.
    kind = np.array([numbers.setdefault(signatures[id(call)], len(numbers)) for call in moments.calls])
    end = moments.live.sum(axis=1)
    first = np.unique(kind, return_index=True)[1]
    highest = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(highest, kind, end)
    calls = [moments.calls[place] for place in first]
    probe.run([calls[number] for number in np.argsort(-highest, kind="stable")])
    hidden = np.array([probe[call].bytes or 0 for call in calls])
    return np.maximum(moments.high, end + hidden[kind]), assumptions(calls, probe)
