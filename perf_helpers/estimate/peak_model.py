"""Peak memory over micro-batch and length: what lets an explorer answer at once.

A few exact traces of a recipe fix its peak everywhere (see `peak_fit`). An optimizer leaves the forward and the
backward as they are but for its states, so one more trace gives each other optimizer. What was traced at the very point
that is asked for is told as traced, the rest as interpolated. On CUDA what is interpolated is the sum of blocks: what
the allocator hands out beyond them, because it does not split a block for less than 1 MiB, shows where the point is
traced.
"""

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from perf_helpers import recipes
from perf_helpers.cards import DEFAULT_CAPABILITY
from perf_helpers.estimate import peak_fit
from perf_helpers.estimate.estimates import KNOWLEDGE, estimate, target
from perf_helpers.estimate.peak_fit import STATES, TOTAL, Point, Surface, terms
from perf_helpers.estimate.prediction import enough_samples
from perf_helpers.lab import hardware
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.task import Task, positions
from perf_helpers.lab.training import Experiment
from perf_helpers.recipes import ADAMW, BF16_WEIGHTS, CHECKPOINTING, FP16
from perf_helpers.records import TENSOR_CATEGORIES, Category, Memory, write_whole

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
ACCUMULATION = (1, 2, 4, 8, 16, 32)
PRECISIONS = {"fp32": {}} | {technique.name: technique.arguments for technique in recipes.PRECISIONS}
OPTIMIZERS = {technique.name: technique.arguments for technique in recipes.OPTIMIZERS}
ATTENTION = ("sdpa", "eager")
WEIGHTS = {  # of inference
    "fp32": {},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "8 bits": {"dtype": "bfloat16", "load_in_8bit": True},
    "4 bits": {"dtype": "bfloat16", "load_in_4bit": True},
}
NEW_TOKENS = (0, 2, 16, 64, 256, 1024)  # of an answer; 0: one forward pass
BEAMS = (1, 2, 4, 8)

_SCHEMA = 9  # of the file; to be raised where the estimate says something else than it did
_PASSES, _UPDATE = "passes", "update"  # what a surface is of: a whole training, or an optimizer's update alone
_INPUTS = TENSOR_CATEGORIES.index(Category.INPUTS)
_OF_ENCODERS = (
    "an encoder-decoder's answers do not lengthen its prompt, and nothing is fitted to them. Ask for a point: "
    "estimate(task, training=False, max_new_tokens=...)"
)
_SECONDS = 300.0  # that the traces of one surface may take


@dataclass(frozen=True, slots=True)
class Choice:
    """A recipe but for its micro-batch and its length."""

    precision: str = "fp32"  # one of `PRECISIONS`
    checkpointing: bool = False
    accumulation: int = 1  # micro-batches for each update
    optimizer: str = ADAMW.name  # one of `OPTIMIZERS`
    attention: str = ATTENTION[0]
    new_tokens = 0  # a training writes none

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

    def at(self, micro_batch: int, seq_len: int | None) -> tuple:
        """The recipe at a point, as a key."""
        return *self.kind, self.accumulation, self.optimizer, micro_batch, seq_len

    def surfaces(self) -> dict[tuple, "Choice"]:
        """The surfaces that answer the recipe: {key: recipe that is traced for it}. One is of its passes, with the
        usual optimizer; another has one of its update, traced with the simplest recipe that makes the same update."""
        plain = Choice(self.precision, self.checkpointing, min(self.accumulation, 2), ADAMW.name, self.attention)
        if self.optimizer == ADAMW.name:
            return {(_PASSES, *self.kind): plain}
        in_bf16 = self.precision == BF16_WEIGHTS.name
        simplest = Choice(BF16_WEIGHTS.name if in_bf16 else "fp32", False, 1, self.optimizer, self.attention)
        return {(_PASSES, *self.kind): plain, (_UPDATE, self.optimizer, in_bf16): simplest}

    def near(self, device: str) -> list["Choice"]:
        """Every choice on offer, each way of training once, those nearest first: 10 for each control that has to be
        moved, 1 for another optimizer, which is nearly free."""

        def distance(other: Choice) -> int:
            differs = [mine != its for mine, its in zip(self.kind, other.kind, strict=True)]
            return 10 * sum(differs) + (self.optimizer != other.optimizer)

        ways = itertools.product(precisions(device), (False, True), (1, 2), OPTIMIZERS, ATTENTION)
        return sorted((Choice(*way) for way in ways), key=distance)

    def experiment(self, task: Task, micro_batch: int) -> Experiment:
        """The training, with as many samples as are followed."""
        arguments = Arguments(self.arguments(micro_batch))
        return Experiment("fit", task.replace(dataset_size=enough_samples(arguments)), arguments)


@dataclass(frozen=True, slots=True)
class Inference:
    """A way of inference but for its prompts: how many there are together, and their length."""

    weights: str = "fp32"  # one of `WEIGHTS`
    new_tokens: int = 0  # that each answer gets; 0: one forward pass
    beams: int = 1  # answers kept beside each other while one is searched
    attention: str = ATTENTION[0]
    accumulation = 1  # inference has no updates

    def arguments(self, micro_batch: int) -> dict[str, Any]:
        """As arguments of `Lab.infer`."""
        arguments = {"per_device_eval_batch_size": micro_batch, "attn_implementation": self.attention}
        beams = {"num_beams": self.beams} if self.beams > 1 else {}
        writing = {"max_new_tokens": self.new_tokens} | beams if self.new_tokens else {}
        return arguments | WEIGHTS[self.weights] | writing

    def at(self, micro_batch: int, seq_len: int | None) -> tuple:
        """The way at a point, as a key."""
        return "inference", *astuple(self), micro_batch, seq_len

    def surfaces(self) -> dict[tuple, "Inference"]:
        """The one surface that answers it, {key: what is traced for it}: with two new tokens, for the last of many is
        written as the second after a longer prompt."""
        plain = replace(self, new_tokens=min(self.new_tokens, 2), beams=self.beams if self.new_tokens else 1)
        return {(_PASSES, "inference", *astuple(plain)): plain}

    def near(self, device: str) -> list["Inference"]:
        """Itself: another way of inference is traced when it is asked for."""
        return [self]

    def experiment(self, task: Task, micro_batch: int) -> Experiment:
        """The inference, as it is followed."""
        return Experiment("fit", task, Arguments.of(self.arguments(micro_batch)), training=False)


Way = Choice | Inference


@dataclass(frozen=True, slots=True)
class Answer:
    """The peak of a recipe at a point."""

    breakdown: dict[str, int]  # bytes by category
    phase: str  # in which it is
    operation: str  # at which it is
    how: str  # "traced" or "interpolated"
    attention: Sequence[str] | None = None  # the fused kernels, as `MemoryEstimate` has them; None: not looked at

    @classmethod
    def traced(cls, memory: Memory, attention: Sequence[str] | None = None) -> "Answer":
        return cls(memory.breakdown, memory.peak_phase, memory.peak_operation, "traced", attention)

    @property
    def peak_bytes(self) -> int:
        return sum(self.breakdown.values())


class Surfaces:
    """What is known of one model on one device ("cpu" or "cuda"), kept in a file from one session to the next.

    Args:
        task: the model; its length is set aside.
        folder: where the file is; None: nothing is kept.
    """

    def __init__(
        self,
        task: Task,
        device: str = "cpu",
        compute_capability: tuple[int, int] = DEFAULT_CAPABILITY,
        folder: Path | None = None,
    ):
        self.device = device
        self.task = task.replace(seq_len=None)
        self.refused: dict[tuple, str] = {}  # why a surface could not be made, by its key
        self.lengths: tuple[int, ...] = ()  # on offer, known after `prepare`; () for images
        self._room: int | None = None  # positions that the model has, likewise; None: as many as one likes
        self._options = {"device": device}
        if device == "cuda":
            self._options["compute_capability"] = compute_capability
        self._surfaces: dict[tuple, Surface] = {}  # by the keys of `Choice.surfaces`
        self._exact: dict[tuple, Answer] = {}  # by `Choice.at`
        versions = {name: hardware.versions().get(name) for name in ("torch", "transformers", "bitsandbytes")}
        identity = json.dumps([_SCHEMA, self.task.identity(), self._options, versions], sort_keys=True, default=list)
        self._file = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json" if folder else None
        self._load()

    # ---- what is on offer

    def prepare(self) -> None:
        """Find out what lengths the model can take. Raises ValueError where there is no such model."""
        if self.task.family() == "vision":
            return
        config, offered = self.task.build_config(), []
        self._room = positions(config)
        for length in LENGTHS if self._room else LENGTHS[:7]:  # 2048 where a model takes any length
            with contextlib.suppress(ValueError):
                offered.append(self.task.replace(seq_len=length).length(config))
        self.lengths = tuple(offered) or (self.task.length(config),)

    # ---- answers

    def answer(self, choice: Way, micro_batch: int, seq_len: int | None) -> Answer | None:
        """The peak at a point; None where nothing is known of the recipe yet. No process is started."""
        exact = self._exact.get(choice.at(micro_batch, seq_len))
        if exact or self._missing(choice) or self.refusal(choice, seq_len):
            return exact
        passes, *updates = (self._surfaces[key] for key in choice.surfaces())
        columns, at_end = _at(passes, micro_batch, seq_len)
        if choice.new_tokens:  # the last one comes after all that are before it
            last, _ = _at(passes, micro_batch, seq_len + choice.new_tokens - 2)
            columns[passes.updates] = last[passes.updates]
        where = list(zip(passes.phases, passes.operations, strict=True))
        for update in updates:  # another optimizer: its states while the passes run, and its update after them
            kept = np.flatnonzero(np.logical_not(passes.updates))
            own, its_end = _at(update, micro_batch, seq_len)
            has_states = columns[kept, STATES] > passes.states / 2  # not so in the first step
            columns[kept[has_states], TOTAL] += update.states - columns[kept[has_states], STATES]
            columns[kept[has_states], STATES] = update.states
            # What lives when the backward ends differs between this recipe and the one the update was traced with.
            moved = at_end - its_end
            moved[STATES] = 0
            moved[TOTAL] = moved[:TOTAL].sum()
            columns = np.concatenate([columns[kept], own + moved])
            where = [*(where[number] for number in kept), *zip(update.phases, update.operations, strict=True)]
        if choice.accumulation > 2:  # the Trainer fetches the batches of one update together
            sample = self.task.replace(seq_len=seq_len).arrays(1).values()
            more = (choice.accumulation - 2) * micro_batch * sum(array.nbytes for array in sample)
            columns[:, [_INPUTS, TOTAL]] += more
        peak = int(columns[:, TOTAL].argmax())
        sizes = zip(TENSOR_CATEGORIES, columns[peak, :TOTAL], strict=True)
        live = {category: max(0, round(size)) for category, size in sizes}
        total = round(columns[peak, TOTAL])
        breakdown = live | {Category.INSIDE_OPERATIONS: max(0, total - sum(live.values()))}
        return Answer(breakdown, *where[peak], "interpolated")

    def is_known(self, choice: Way) -> bool:
        """Whether every point of the recipe is answered, or it is known that none can be."""
        return self.refusal(choice) is not None or not self._missing(choice)

    def refusal(self, choice: Way, seq_len: int = 0) -> str | None:
        """Why the recipe cannot be answered, there or anywhere; or None."""
        if self._room and (seq_len or 0) + choice.new_tokens > self._room:
            return f"{self.task.model} has positions for {self._room} tokens, not for {seq_len} + {choice.new_tokens}"
        return next((self.refused[key] for key in choice.surfaces() if key in self.refused), None)

    def _missing(self, choice: Way) -> list[tuple]:
        return [key for key in choice.surfaces() if key not in self._surfaces]

    # ---- learning

    def learn(self, choice: Way) -> None:
        """Trace what is missing to answer every point of the recipe. Takes seconds; refusals are kept in `refused`."""
        for key in self._missing(choice):
            points = self._points(min(choice.new_tokens, 2))[: None if key[0] == _PASSES else 1]
            try:
                if choice.new_tokens and self.task.build_config().is_encoder_decoder:
                    raise ValueError(_OF_ENCODERS)
                self._surfaces[key] = self._fitted(choice.surfaces()[key], points)
            except ValueError as error:
                self.refused[key] = str(error)
                break
        self._save()

    def trace(self, choice: Way, micro_batch: int, seq_len: int | None) -> Answer:
        """The exact answer at a point, traced if it has not been; raises ValueError where it cannot be followed."""
        key = choice.at(micro_batch, seq_len)
        if key not in self._exact:
            asked = choice.experiment(self.task.replace(seq_len=seq_len), micro_batch)
            said = estimate(asked.task, training=asked.training, **self._options, **choice.arguments(micro_batch))
            self._exact[key] = Answer.traced(said.memory, said.attention)
            self._save()
        return self._exact[key]

    def _points(self, new_tokens: int) -> list[Point]:
        """Points at which a recipe is traced: as many as there are terms, as far apart as the sliders go, with room for
        new tokens."""
        if not self.lengths:
            return [(size, None) for size in MICRO_BATCHES[1:3]]  # images are many numbers
        first, middle, last = self.lengths[0], self.lengths[len(self.lengths) // 2], self.lengths[-1]
        if len(self.lengths) < 3:
            first, middle = last // 4, last // 2
        lengths = [length - new_tokens for length in (first, middle, last)]
        return [(size, length) for size in MICRO_BATCHES[1:5:3] for length in lengths]

    def _fitted(self, choice: Way, points: Sequence[Point]) -> Surface:
        """The surface through the traces at these points, which are kept as exact answers too."""
        experiments = [choice.experiment(self.task.replace(seq_len=length), size) for size, length in points]
        offered = list(itertools.product(MICRO_BATCHES, self.lengths or (None,)))
        job = peak_fit.fit, experiments, target(**self._options), points, offered
        surface, memories = KNOWLEDGE.ask(*job, model=self.task.model, timeout=_SECONDS)
        self._exact |= {choice.at(*point): Answer.traced(each) for point, each in zip(points, memories, strict=True)}
        return surface

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
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self._surfaces, self._exact = {}, {}  # absent, damaged or of an older version


def precisions(device: str) -> list[str]:
    """The precisions that a device has: on a CPU the Trainer ignores fp16."""
    return [name for name in PRECISIONS if name != FP16.name or device == "cuda"]


def nearest(values: Sequence[int], wanted: int) -> int:
    """The value on offer that is nearest by ratio."""
    return min(values, key=lambda value: abs(math.log(value / wanted)))


def _at(surface: Surface, micro_batch: int, seq_len: int | None) -> tuple[np.ndarray, np.ndarray]:
    """A surface at one point, in bytes: the columns of its operations, with what they hide in their totals; and what
    lives when the backward has ended."""
    here = terms(micro_batch, seq_len) if len(surface.coefficients) > 1 else np.ones(1)  # an update has one term only
    columns = np.tensordot(here, surface.coefficients, axes=1)
    ratios = [(size / micro_batch, length / seq_len if seq_len else 1) for size, length in surface.points]
    hidden = np.asarray(surface.hidden)[:, np.abs(np.log(ratios)).sum(axis=1).argmin()]  # at the nearest one on offer
    columns[:, TOTAL] = np.maximum(columns[:, TOTAL], columns[:, :TOTAL].sum(axis=1) + hidden)
    return columns, here @ np.asarray(surface.after_backward)
