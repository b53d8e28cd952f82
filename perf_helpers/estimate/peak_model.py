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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from perf_helpers import recipes
from perf_helpers.cards import DEFAULT_CAPABILITY
from perf_helpers.estimate import peak_fit
from perf_helpers.estimate.estimates import KNOWLEDGE, estimate, target
from perf_helpers.estimate.peak_fit import INPUTS, STATES, TOTAL, Point, Surface
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
# The type of the weights is always said: a model's own may be another.
PRECISIONS = {"fp32": {"dtype": "float32"}} | {
    technique.name: {"dtype": "float32"} | technique.arguments for technique in recipes.PRECISIONS
}
OPTIMIZERS = {technique.name: technique.arguments for technique in recipes.OPTIMIZERS}
ATTENTION = ("sdpa", "eager")
WEIGHTS = {  # of inference
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "8 bits": {"dtype": "bfloat16", "load_in_8bit": True},
    "4 bits": {"dtype": "bfloat16", "load_in_4bit": True},
}
NEW_TOKENS = (0, 2, 16, 64, 256, 1024)  # of an answer; 0: one forward pass
BEAMS = (1, 2, 4, 8)

_SCHEMA = 11  # of the file; to be raised where the estimate says something else than it did
_OF_ENCODERS = (
    "generation of an encoder-decoder cannot be interpolated. Estimate each size by itself: "
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

    @classmethod
    def as_loaded(cls, dtype: str) -> "Choice":
        """The plain recipe of a model that loads in this type; training in plain fp16 is not on offer."""
        return cls(BF16_WEIGHTS.name if dtype == "bfloat16" else "fp32")

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

    def traced(self) -> list["Choice"]:
        """The recipes whose traces answer this one: for its passes with the usual optimizer; for the update of another
        the simplest that makes it, which is traced at one point, for it is the same everywhere."""
        plain = replace(self, accumulation=min(self.accumulation, 2), optimizer=ADAMW.name)
        in_bf16 = self.precision == BF16_WEIGHTS.name
        simplest = Choice(BF16_WEIGHTS.name if in_bf16 else "fp32", optimizer=self.optimizer)
        return [plain] if self.optimizer == ADAMW.name else [plain, simplest]

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

    @classmethod
    def as_loaded(cls, dtype: str) -> "Inference":
        """A forward pass of a model that loads in this type."""
        return cls(next((name for name, given in WEIGHTS.items() if given["dtype"] == dtype), "fp32"))

    def arguments(self, micro_batch: int) -> dict[str, Any]:
        """As arguments of `Lab.infer`."""
        arguments = {"per_device_eval_batch_size": micro_batch, "attn_implementation": self.attention}
        beams = {"num_beams": self.beams} if self.beams > 1 else {}
        writing = {"max_new_tokens": self.new_tokens} | beams if self.new_tokens else {}
        return arguments | WEIGHTS[self.weights] | writing

    def traced(self) -> list["Inference"]:
        """The one way whose traces answer it: with two new tokens, for the last of many is written as the second after
        a longer prompt."""
        return [replace(self, new_tokens=min(self.new_tokens, 2), beams=self.beams if self.new_tokens else 1)]

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
        self.refused: dict[Way, str] = {}  # why a way could not be traced
        self.lengths: tuple[int, ...] = ()  # on offer, known after `prepare`; () for images
        self._room: int | None = None  # positions that the model has, likewise; None: as many as one likes
        self._options = {"device": device}
        if device == "cuda":
            self._options["compute_capability"] = compute_capability
        self._surfaces: dict[str, Surface] = {}  # by what was traced, as `repr` has it
        self._exact: dict[str, Answer] = {}  # by (way, micro-batch, length), likewise
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
        exact = self._exact.get(repr((choice, micro_batch, seq_len)))
        if exact or self._missing(choice) or self.refusal(choice, seq_len):
            return exact
        passes, *updates = (self._surfaces[repr(way)] for way in choice.traced())
        columns, where, is_update = passes.at(micro_batch, seq_len), passes.where, np.array(passes.updates)
        if choice.new_tokens:  # the last one comes after all that are before it
            columns[is_update] = passes.at(micro_batch, seq_len + choice.new_tokens - 2)[is_update]
        for update in updates:  # another optimizer: its states while the passes run, and its update after them
            own, inputs = update.at(micro_batch, seq_len)[update.updates], columns[is_update, INPUTS].max()
            own[:, TOTAL] += inputs - own[:, INPUTS]
            own[:, INPUTS] = inputs
            columns = columns[~is_update]
            more = np.where(columns[:, STATES] > passes.states / 2, update.states - passes.states, 0)  # 0: first step
            columns[:, [STATES, TOTAL]] += more[:, None]
            columns = np.concatenate([columns, own])
            where = [*itertools.compress(where, ~is_update), *itertools.compress(update.where, update.updates)]
        if choice.accumulation > 2:  # the Trainer fetches the batches of one update together
            sample = self.task.replace(seq_len=seq_len).arrays(1).values()
            more = (choice.accumulation - 2) * micro_batch * sum(array.nbytes for array in sample)
            columns[:, [INPUTS, TOTAL]] += more
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
        return next((self.refused[way] for way in choice.traced() if way in self.refused), None)

    def _missing(self, choice: Way) -> list[Way]:
        return [way for way in choice.traced() if repr(way) not in self._surfaces]

    # ---- learning

    def learn(self, choice: Way) -> None:
        """Trace what is missing to answer every point of the recipe. Takes seconds; refusals are kept in `refused`."""
        for way in self._missing(choice):
            points = self._points(way.new_tokens)[: None if way == choice.traced()[0] else 1]
            try:
                if choice.new_tokens and self.task.build_config().is_encoder_decoder:
                    raise ValueError(_OF_ENCODERS)
                self._surfaces[repr(way)] = self._fitted(way, points)
            except ValueError as error:
                self.refused[way] = str(error)
                break
        self._save()

    def trace(self, choice: Way, micro_batch: int, seq_len: int | None) -> Answer:
        """The exact answer at a point, traced if it has not been; raises ValueError where it cannot be followed."""
        key = repr((choice, micro_batch, seq_len))
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
        for point, memory in zip(points, memories, strict=True):
            self._exact[repr((choice, *point))] = Answer.traced(memory)
        return surface

    # ---- the file

    def _save(self) -> None:
        if self._file is None:
            return
        content = {
            "surfaces": {way: asdict(surface) for way, surface in self._surfaces.items()},
            "exact": {point: asdict(answer) for point, answer in self._exact.items()},
        }
        try:
            write_whole(self._file, json.dumps(content))
        except OSError:
            self._file = None  # it is only a memory: without it the next session traces again

    def _load(self) -> None:
        try:
            content = json.loads(self._file.read_text(encoding="utf-8")) if self._file else {}
            self._surfaces = {way: Surface(**surface) for way, surface in content.get("surfaces", {}).items()}
            self._exact = {point: Answer(**answer) for point, answer in content.get("exact", {}).items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self._surfaces, self._exact = {}, {}  # absent, damaged or of an older version


def precisions(device: str) -> list[str]:
    """The precisions that a device has: on a CPU the Trainer ignores fp16."""
    return [name for name in PRECISIONS if name != FP16.name or device == "cuda"]


def nearest(values: Sequence[int], wanted: int) -> int:
    """The value on offer that is nearest by ratio."""
    return min(values, key=lambda value: abs(math.log(value / wanted)))
