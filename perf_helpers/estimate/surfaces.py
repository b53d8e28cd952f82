"""Peak memory over micro-batch and length, from a few exact traces: what lets an explorer answer at once.

Every moment of a training holds bytes that grow in a straight line with the micro-batch and at most with the square of
the length. Six traces of a recipe therefore fix each of its moments everywhere, and its peak is the highest of them.
An optimizer leaves the forward and the backward as they are but for its states, so one more trace gives each other
optimizer. What was traced at the very point that is asked for is told as traced, the rest as interpolated.
"""

import contextlib
import difflib
import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perf_helpers.estimate import estimates as estimate
from perf_helpers.lab import hardware
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.runs import CATEGORIES, Memory
from perf_helpers.lab.store import write_whole
from perf_helpers.lab.task import Task, positions
from perf_helpers.lab.techniques import ADAFACTOR, ADAM_8BIT, ADAMW, BF16, BF16_WEIGHTS, CHECKPOINTING, FP16, SGD
from perf_helpers.lab.training import Experiment

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ACCUMULATION = (1, 2, 4, 8, 16, 32)
PRECISIONS = {"fp32": {}} | {technique.name: technique.arguments for technique in (BF16, FP16, BF16_WEIGHTS)}
OPTIMIZERS = {technique.name: technique.arguments for technique in (ADAMW, ADAFACTOR, ADAM_8BIT, SGD)}
ATTENTION = ("sdpa", "eager")

_SCHEMA = 3  # of the file; to be raised where the estimate says something else than it did
_PASSES, _UPDATE = "passes", "update"
_FOLLOWED = CATEGORIES[:-1]
_STATES, _INPUTS = CATEGORIES.index("optimizer_states"), CATEGORIES.index("inputs")
_SEEN = len(_FOLLOWED)  # the column after the categories: the total, with what is hidden inside operations


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe but for its micro-batch and its length. `accumulation` counts micro-batches for each update."""

    precision: str = "fp32"
    checkpointing: bool = False
    accumulation: int = 1
    optimizer: str = ADAMW.name
    attention: str = ATTENTION[0]

    def arguments(self, micro_batch: int) -> dict[str, Any]:
        """As training arguments."""
        arguments = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": self.accumulation}
        arguments |= PRECISIONS[self.precision] | OPTIMIZERS[self.optimizer]
        arguments |= CHECKPOINTING.arguments if self.checkpointing else {}
        return arguments | {"attn_implementation": self.attention}

    @property
    def kind(self) -> tuple:
        """What decides how forward and backward go: with any accumulation as with one of two, but for the inputs."""
        return self.precision, self.checkpointing, self.accumulation > 1, self.attention

    @property
    def update(self) -> tuple:
        """What decides how the update goes."""
        return self.optimizer, self.precision == BF16_WEIGHTS.name


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes by category at the peak, where it is, and whether it was "traced" or "interpolated"."""

    breakdown: dict[str, int]
    phase: str
    operation: str
    how: str

    @property
    def peak_bytes(self) -> int:
        return sum(self.breakdown.values())


@dataclass(frozen=True, slots=True)
class Surface:
    """The moments of one recipe that hold the peak somewhere.

    `coefficients` has the shape (terms, moments, columns), `after_backward` (terms, columns): what the terms of
    `_terms` are multiplied by. The columns are the categories followed and the total, in bytes. `hidden` is what each
    moment's operation hides, which follows no curve: bytes at each of the `points` (micro-batch, length) on offer.
    `apart` is what is added to every total, such as a workspace.
    """

    phases: list[str]
    operations: list[str]
    updates: list[bool]  # whether the moment belongs to the optimizer's update
    coefficients: list
    after_backward: list
    hidden: list
    points: list
    states: int
    apart: int


class Fits:
    """What is known of one model on one device, kept in a file from one session to the next.

    Args:
        task: the model; its length is set aside.
        device: "cpu" or "cuda".
        compute_capability: of the GPU.
        folder: where the file is; None: nothing is kept.
    """

    def __init__(
        self,
        task: Task,
        device: str = "cpu",
        compute_capability: tuple[int, int] = (9, 0),
        folder: Path | None = None,
    ):
        self.device = device
        self.task = task.replace(seq_len=None)
        self._options = {"device": device}
        if device == "cuda":
            self._options["compute_capability"] = compute_capability
        versions = {name: hardware.versions().get(name) for name in ("torch", "transformers", "bitsandbytes")}
        identity = json.dumps([_SCHEMA, self.task.identity(), self._options, versions], sort_keys=True, default=list)
        self._file = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json" if folder else None
        self._surfaces: dict[tuple, Surface] = {}
        self._exact: dict[tuple, Answer] = {}
        self._samples: dict[int | None, int] = {}
        self.refused: dict[tuple, str] = {}
        self.lengths: tuple[int, ...] = ()  # on offer, known after `prepare`; () for images
        self._load()

    # ---- what is on offer

    def prepare(self) -> None:
        """Find out what lengths the model can take.

        Raises:
            ValueError: there is no such model.
        """
        if self.task.family() == "vision":
            return
        config = self.task.build_config()
        offered = [length for length in LENGTHS if self._can_take(length, config)]
        self.lengths = tuple(offered[: LENGTHS.index(2048) + 1] if positions(config) is None else offered) or (
            self.task.length(config),
        )

    def _can_take(self, length: int, config) -> bool:
        try:
            return self.task.replace(seq_len=length).length(config) == length
        except ValueError:
            return False

    def choices(self, first: Choice) -> Iterator[Choice]:
        """Every choice on offer, each way of training once, those nearest to `first` first."""
        ways = itertools.product(precisions(self.device), (False, True), (1, 2), OPTIMIZERS, ATTENTION)
        every = [Choice(*way) for way in ways]
        yield from sorted(every, key=lambda other: _distance(first, other))

    # ---- answers

    def answer(self, choice: Choice, micro_batch: int, seq_len: int | None) -> Answer | None:
        """The peak at a point; None where nothing is known of the recipe yet. No process is started."""
        key = _key(choice, micro_batch, seq_len)
        if key in self._exact:
            return self._exact[key]
        return self._interpolated(choice, micro_batch, seq_len)

    def is_known(self, choice: Choice) -> bool:
        """Whether every point of the recipe is answered, or it is known that none can be."""
        return self.refusal(choice) is not None or not self._missing(choice)

    def _missing(self, choice: Choice) -> list[tuple]:
        return [key for key in _surfaces_of(choice) if key not in self._surfaces]

    def refusal(self, choice: Choice) -> str | None:
        """Why the recipe cannot be answered, or None."""
        return next((self.refused[key] for key in _surfaces_of(choice) if key in self.refused), None)

    def _interpolated(self, choice: Choice, micro_batch: int, seq_len: int | None) -> Answer | None:
        if self._missing(choice):
            return None
        base, *updates = (self._surfaces[key] for key in _surfaces_of(choice))
        terms = _terms(micro_batch, seq_len)
        moments = np.tensordot(terms, np.asarray(base.coefficients), axes=1)
        phases, operations = base.phases, base.operations
        apart = max(surface.apart for surface in (base, *updates))
        hidden = np.asarray(base.hidden)[:, _nearest_point(base.points, micro_batch, seq_len)]
        for update in updates:
            after = terms @ np.asarray(base.after_backward)
            moments, phases, operations = _with_update(moments, base, after, update)
            hidden = np.append(hidden[[not is_update for is_update in base.updates]], np.zeros(len(update.phases)))
        if choice.accumulation > 2:  # the Trainer fetches the batches of one update together
            moments[:, [_INPUTS, _SEEN]] += (choice.accumulation - 2) * micro_batch * self._sample_bytes(seq_len)
        moments[:, _SEEN] = np.maximum(moments[:, _SEEN], moments[:, :_SEEN].sum(axis=1) + hidden)
        place = int(moments[:, _SEEN].argmax())
        live = {name: max(0, round(size)) for name, size in zip(_FOLLOWED, moments[place], strict=False)}
        total = round(moments[place, _SEEN]) + apart
        inside = max(0, total - sum(live.values()))
        return Answer(live | {CATEGORIES[-1]: inside}, phases[place], operations[place], "interpolated")

    def _sample_bytes(self, seq_len: int | None) -> int:
        if seq_len not in self._samples:
            arrays = self.task.replace(seq_len=seq_len).arrays(1).values()
            self._samples[seq_len] = sum(array.nbytes for array in arrays)
        return self._samples[seq_len]

    # ---- learning

    def learn(self, choice: Choice) -> None:
        """Trace what is missing to answer every point of the recipe. Takes seconds; refusals are kept in `refused`."""
        for key in self._missing(choice):
            nodes = self._nodes(_surfaces_of(choice)[key])
            try:
                self._surfaces[key] = self._traced(nodes if key[0] == _PASSES else nodes[:1])
            except ValueError as error:
                self.refused[key] = str(error)
                break
        self._save()

    def trace(self, choice: Choice, micro_batch: int, seq_len: int | None) -> Answer:
        """The exact answer at a point, traced if it has not been.

        Raises:
            ValueError: the training cannot be followed.
        """
        key = _key(choice, micro_batch, seq_len)
        if key not in self._exact:
            task = self._task(choice, micro_batch, seq_len)
            found = estimate.estimate(task, **self._options, **choice.arguments(micro_batch)).memory
            self._exact[key] = Answer(found.breakdown, found.peak_phase, found.peak_operation, "traced")
            self._save()
        return self._exact[key]

    def _nodes(self, choice: Choice) -> list[tuple[Choice, int, int | None]]:
        """Points at which a recipe is traced: as many as there are terms, as far apart as the sliders go."""
        if not self.lengths:
            return [(choice, size, None) for size in MICRO_BATCHES[1:3]]  # images are many numbers
        first, middle, last = self.lengths[0], self.lengths[len(self.lengths) // 2], self.lengths[-1]
        if len(self.lengths) < 3:
            first, middle = last // 4, last // 2
        return [(choice, size, length) for size in MICRO_BATCHES[1:5:3] for length in (first, middle, last)]

    def _task(self, choice: Choice, micro_batch: int, seq_len: int | None) -> Task:
        enough = estimate.enough_samples(choice.arguments(micro_batch))
        return self.task.replace(seq_len=seq_len, dataset_size=enough)

    def _traced(self, nodes: Sequence[tuple[Choice, int, int | None]]) -> Surface:
        experiments = [
            Experiment("fit", self._task(choice, size, length), Arguments(choice.arguments(size)))
            for choice, size, length in nodes
        ]
        points = [(size, length) for _, size, length in nodes]
        asked = list(itertools.product(MICRO_BATCHES, self.lengths or (None,)))
        device = estimate.target(**self._options)
        found = estimate.in_clean_process(
            functools.partial(_surface, experiments, device, points, asked), self.task, timeout=300
        )
        for (choice, size, length), memory in zip(nodes, found.pop("exact"), strict=True):
            memory = Memory.from_dict(memory)
            answer = Answer(memory.breakdown, memory.peak_phase, memory.peak_operation, "traced")
            self._exact[_key(choice, size, length)] = answer
        return Surface(**{name: found[name] for name in Surface.__slots__})

    # ---- the file

    def _save(self) -> None:
        if self._file is None:
            return
        content = {
            "surfaces": [[list(key), asdict(surface)] for key, surface in self._surfaces.items()],
            "exact": [[list(key), asdict(answer)] for key, answer in self._exact.items()],
        }
        try:
            write_whole(self._file, json.dumps(content))
        except OSError:
            self._file = None  # it is only a memory: without it the next session traces again

    def _load(self) -> None:
        try:
            content = json.loads(self._file.read_text(encoding="utf-8")) if self._file else {}
            self._surfaces = {tuple(key): Surface(**surface) for key, surface in content.get("surfaces", [])}
            self._exact = {tuple(key): Answer(**answer) for key, answer in content.get("exact", [])}
        except (OSError, ValueError, TypeError):
            self._surfaces, self._exact = {}, {}  # absent, damaged or of an older version


def precisions(device: str) -> list[str]:
    """The precisions that a device has: on a CPU the Trainer ignores fp16."""
    return [name for name in PRECISIONS if name != FP16.name or device == "cuda"]


def _key(choice: Choice, micro_batch: int, seq_len: int | None) -> tuple:
    return *choice.kind, choice.accumulation, choice.optimizer, micro_batch, seq_len


def _surfaces_of(choice: Choice) -> dict[tuple, Choice]:
    """What answers a recipe, by key, each with the recipe to trace: its passes, and its update if that is another."""
    surfaces = {(_PASSES, *choice.kind): _plain(choice)}
    if choice.optimizer != ADAMW.name:
        surfaces[(_UPDATE, *choice.update)] = _for_update(choice)
    return surfaces


def _plain(choice: Choice) -> Choice:
    return Choice(choice.precision, choice.checkpointing, min(choice.accumulation, 2), ADAMW.name, choice.attention)


def _for_update(choice: Choice) -> Choice:
    """The simplest recipe that makes the same update."""
    return Choice(BF16_WEIGHTS.name if choice.update[1] else "fp32", False, 1, choice.optimizer, choice.attention)


def _distance(one: Choice, other: Choice) -> int:
    """How many controls have to be moved; another optimizer is nearly free."""
    differs = [a != b for a, b in zip(one.kind, other.kind, strict=True)]
    return 10 * sum(differs) + (one.optimizer != other.optimizer)


def _terms(micro_batch: int, seq_len: int | None) -> np.ndarray:
    """What a moment's bytes are a sum of, scaled to be near 1."""
    size, length = micro_batch / 64, (seq_len or 0) / 1024
    terms = [1, size] if seq_len is None else [1, length, length**2, size, size * length, size * length**2]
    return np.array(terms, dtype=float)


def _with_update(moments: np.ndarray, base: Surface, after: np.ndarray, update: Surface):
    """The moments with another optimizer: other states while the passes run, and its own update after them."""
    passes = [i for i, is_update in enumerate(base.updates) if not is_update]
    kept = moments[passes].copy()
    holds = kept[:, _STATES] > base.states / 2  # not in the first step, before there are any
    more = np.where(holds, update.states - kept[:, _STATES], 0)
    kept[:, _STATES] += more
    kept[:, _SEEN] += more
    own = np.asarray(update.coefficients)[0].copy()
    moved = after - np.asarray(update.after_backward)[0]
    moved[_STATES] = 0
    moved[_SEEN] = moved[:_SEEN].sum()
    own += moved
    phases = [base.phases[i] for i in passes] + update.phases
    operations = [base.operations[i] for i in passes] + update.operations
    return np.concatenate([kept, own]), phases, operations


def _surface(experiments: Sequence[Experiment], device, points, asked, results, probe) -> dict[str, Any]:
    """A `Surface` as a dict, and the exact memory at each point. To be called in a clean process."""
    from perf_helpers.lab import meters

    with contextlib.suppress(AttributeError, OSError):
        os.nice(19)  # nobody waits for it, and others may be measuring
    found = estimate.all_followed(experiments, device, False, results, probe)
    places = _in_all([each.moments for each in found])
    single = len(points) == 1  # an update alone: it is carried over, not fitted
    matrix = np.array([[1.0]]) if single else np.stack([_terms(*point) for point in points])
    wanted = np.ones((len(asked), 1)) if single else np.stack([_terms(*point) for point in asked])
    table = np.stack([_table(each, here, smooth=not single) for each, here in zip(found, places, strict=True)])
    ends = np.stack([_after_backward(each) for each in found])
    coefficients, after = (
        np.linalg.solve(matrix, each.reshape(len(points), -1)).reshape(each.shape) for each in (table, ends)
    )
    own = [found[0].moments.phases[i] for i in places[0]]
    phases, is_step = [meters.PHASE_NAMES.get(phase, phase) for phase in own], np.array([p == "step" for p in own])
    live, high = wanted @ coefficients[:, :, :_SEEN].sum(axis=2), wanted @ coefficients[:, :, _SEEN]
    hidden = np.zeros(high.shape, dtype=np.int64)
    if device.kind == "cpu" and not single:
        hidden = _hidden(found, places, matrix, wanted, live, high, probe)
    heights, kept = np.maximum(high, live + hidden), set()
    for here in [is_step] if single else [is_step, ~is_step]:
        if here.any():
            kept |= {int(np.flatnonzero(here)[place]) for place in heights[:, here].argmax(axis=1)}
    kept = sorted(kept)
    pairs = zip(found, experiments, strict=True)
    exact = [estimate.memory_of(each, experiment, device)[0] for each, experiment in pairs]
    return {
        "phases": [phases[place] for place in kept],
        "operations": [found[0].moments.calls[places[0][place]].name for place in kept],
        "updates": is_step[kept].tolist(),
        "coefficients": coefficients[:, kept].tolist(),
        "after_backward": after.tolist(),
        "hidden": hidden[:, kept].T.tolist(),
        "points": asked,
        "states": int(found[0].moments.live[:, _STATES].max()),
        "apart": max(0, exact[0].peak_bytes - int(found[0].totals.max())),
        "exact": [memory.to_dict() | {"timeline": None} for memory in exact],
    }


def _in_all(trainings: Sequence[Any]) -> list[list[int]]:
    """For each training the places of the operations that all of them have: which kernel is chosen, how data are
    fetched and what is a view differs from size to size.

    Raises:
        estimate.Invalid: they have hardly the same operations.
    """
    every = [_that_hold(moments) for moments in trainings]
    words = [
        [(moments.calls[i].name, moments.modules[i]) for i in here]
        for moments, here in zip(trainings, every, strict=True)
    ]
    matches = []
    for other in words[1:]:
        blocks = difflib.SequenceMatcher(None, words[0], other, autojunk=False).get_matching_blocks()
        matches.append({block.a + i: block.b + i for block in blocks for i in range(block.size)})
    common = [i for i in range(len(words[0])) if all(i in match for match in matches)]
    if len(common) < 0.95 * max(map(len, words)):
        raise estimate.Invalid("its operations differ too much from one size to another: nothing can be fitted to them")
    chosen = [common, *([match[i] for i in common] for match in matches)]
    return [[here[i] for i in picked] for here, picked in zip(every, chosen, strict=True)]


def _that_hold(moments) -> list[int]:
    """The operations of which one may hold the peak."""
    fetching = ("setup", "before")
    return [i for i, call in enumerate(moments.calls) if moments.phases[i] not in fetching and not call.is_view]


def _table(found, places: list[int], smooth: bool) -> np.ndarray:
    """Live bytes by category at the places, and the highest total from each to the next; `smooth`: without what the
    operations at these places hide."""
    totals = found.totals.copy()
    if smooth:
        totals[places] = found.moments.high[places]
    highest = np.maximum.reduceat(totals, places)
    return np.column_stack([found.moments.live[places, :_SEEN], highest]).astype(float)


def _hidden(found, places, matrix, wanted, live, high, probe) -> np.ndarray:
    """What the operations at these places hide at every point on offer, by running them there: (points, places) bytes.

    Only those are run that were seen to hide something and may hold the peak by it: `live` is what lives when each has
    ended, `high` the highest total without what is hidden.
    """
    probe = probe.under(None)
    hidden = np.zeros(high.shape, dtype=np.int64)
    highest = high.max(axis=1)
    asked: dict[tuple[int, int], Any] = {}  # the operation at a point and a place
    for place, here in enumerate(zip(*places, strict=True)):
        calls = [each.moments.calls[at] for each, at in zip(found, here, strict=True)]
        shares = [(probe[call].bytes or 0) / max(call.bytes, 1) for call in calls]
        if not any(shares):
            continue
        for point, call in enumerate(_at_points(calls, matrix, wanted)):
            # Twice the largest share seen: it jumps from size to size.
            if call and live[point, place] + 2 * max(shares) * call.bytes > highest[point]:
                asked[point, place] = call
    probe.run([asked[key] for key in sorted(asked, key=lambda key: asked[key].bytes)])
    for key, call in asked.items():
        hidden[key] = probe[call].bytes or 0
    return hidden


def _at_points(calls: Sequence[Any], matrix: np.ndarray, wanted: np.ndarray) -> list:
    """The same operation at other points: each of its lengths is a sum of terms too. None where one is no number."""
    numbers = [call.numbers for call in calls]
    if len({len(each) for each in numbers}) > 1:
        return [None] * len(wanted)
    there = wanted @ np.linalg.solve(matrix, np.array(numbers, dtype=float))
    whole = np.abs(there - there.round()) < 0.01
    return [
        calls[0].with_numbers(row.round().astype(int).tolist()) if right.all() else None
        for row, right in zip(there, whole, strict=True)
    ]


def _after_backward(found) -> np.ndarray:
    live = found.moments.marks["backward"][:_SEEN].astype(float)
    return np.append(live, live.sum())


def nearest(values: Sequence[int], wanted: int) -> int:
    """The value on offer that is nearest by ratio."""
    return min(values, key=lambda value: abs(math.log(value / wanted)))


def _nearest_point(points: Sequence, micro_batch: int, seq_len: int | None) -> int:
    """The place of the point that is nearest by ratio."""

    def apart(place: int) -> float:
        size, length = points[place]
        return abs(math.log(size / micro_batch)) + (abs(math.log(length / seq_len)) if seq_len else 0)

    return min(range(len(points)), key=apart)
