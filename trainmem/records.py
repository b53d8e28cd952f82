"""Define the results of experiments (runs, ratios, comparisons), and the files that store them.

A figure that was not requested is None, a figure of a failed run is `Missing`, and a ratio with a missing figure is
`Unknown`. A missing measurement is never 0. Files store all of these as null.
"""

import contextlib
import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

from filelock import FileLock

from trainmem.unknown import Missing, NeedsValues, Unknown, is_measured

SCHEMA = 2  # version of a run in a file; version 1 had `samples_per_step` among the arguments


class Category(StrEnum):
    """Name the uses of live memory, in the order of tables and pictures."""

    WEIGHTS = "weights"  # trained weights; in inference all weights
    FROZEN_WEIGHTS = "frozen_weights"  # weights that the training does not change
    QUANTIZED_WEIGHTS = "quantized_weights"  # in 8 or 4 bits, with their scales and code books
    WEIGHT_COPIES = "weight_copies"  # casts of weights, e.g. autocast's
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer_states"
    ACTIVATIONS = "activations"  # made in the forward pass while gradients are recorded
    KEY_VALUE_CACHE = "key_value_cache"  # keys and values of the tokens that inference has read or written
    PREDICTIONS = "predictions"  # outputs, labels and losses that an evaluation keeps until its last batch
    INPUTS = "inputs"  # batches
    TEMPORARIES = "temporaries"
    INSIDE_OPERATIONS = "inside_operations"  # operator workspace, which no tensor shows

    __repr__ = str.__repr__  # a printed breakdown shows plain strings, as a file does


WALL, CPU = range(2)  # clocks

CATEGORIES = tuple(Category)
TENSOR_CATEGORIES = CATEGORIES[:-1]


class Phase(StrEnum):
    """Name the phases of a training; `tracker.TrainingHooks` detects the beginning and the end of each phase."""

    SETUP = "setup"  # before the first forward
    BEFORE = "before"  # between a step and the next forward: data are loaded
    FORWARD = "forward"
    AFTER_FORWARD = "after forward"
    BACKWARD = "backward"
    AFTER_BACKWARD = "after backward"  # gradients are clipped
    STEP = "step"
    REDUCER = "reducer"  # DistributedDataParallel makes its buckets, FSDP2 scatters gradients
    GATHER = "gathering"  # FSDP2 gathers weights
    EVALUATION = "evaluation"  # the Trainer evaluates, between steps or after the last
    SAVING = "saving"  # the Trainer writes a checkpoint
    LOADING = "loading"  # the Trainer reads the best checkpoint

    __repr__ = str.__repr__

    @property
    def shown(self) -> str:
        """The phase's name in results; clipping counts as the optimizer's step, data loading as the forward."""
        if self in (Phase.SETUP, Phase.BEFORE, Phase.AFTER_FORWARD):
            return Phase.FORWARD.value
        return Phase.STEP.value if self is Phase.AFTER_BACKWARD else self.value


APART = (Phase.EVALUATION, Phase.SAVING, Phase.LOADING)  # phases outside of the steps, whose peak is recorded
BEGIN = "begin "  # prefix of the label at the beginning of such a phase; the label at its end is the phase's name


def is_end(label: str) -> bool:
    """Return whether a mark's label says that a phase of a step ends: True for "forward" or "step", not for "start"."""
    return label != "start" and label not in APART and not label.startswith(BEGIN)


def stretches(labels: Iterable[str]) -> Iterator[tuple[Phase, int, int]]:
    """Yield (phase, index of its first mark, index of its last mark) for each evaluation, save and load in a training.

    A mark records that a phase begins or ends, and its label says which phase. `labels`: the labels of all marks of the
    training, in the order of time. Both indices are positions in `labels`.
    """
    begin = 0
    for number, label in enumerate(labels):
        if label.startswith(BEGIN):
            begin = number
        elif label in APART:
            yield Phase(label), begin, number


class Record:
    """Base of dataclasses stored as JSON.

    `to_dict` writes a record. `from_dict` reads one, even if another version of this package wrote it.
    """

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return {field: value} in JSON types; a figure that is `Unknown` or `Missing` becomes None."""
        return _as_json(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any] | None):
        """Return the record that `to_dict` wrote as `data`; None if `data` is None.

        Unknown keys of a newer file are ignored; missing keys get defaults.
        """
        known = [item for item in dataclasses.fields(cls) if item.name in (data or {})]
        return None if data is None else cls(**{item.name: _read(item.type, data[item.name]) for item in known})


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return None if isinstance(value, Unknown | Missing) else value


def _read(kind: Any, value: Any) -> Any:
    """Return the JSON value of a field in the type `kind`; raise ValueError for NaN in a field that is not a float."""
    if isinstance(value, list | tuple):
        return tuple(_read(kind, item) if isinstance(item, dict) else item for item in value)
    if isinstance(value, float) and math.isnan(value) and kind is not Any and float not in (kind, *get_args(kind)):
        raise ValueError("unexpected NaN: measure this row again")
    of = [part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, Record)]
    return of[0].from_dict(value) if of and isinstance(value, dict) else value


@dataclass(frozen=True, slots=True)
class Memory(Record):
    """Hold an experiment's memory in bytes: its peak, where the peak occurred, and breakdowns by category.

    The place of the peak is a phase, an operation and a module. A field that was not measured is None.
    """

    peak_bytes: int  # counted from the first forward pass on
    # "counted" (CPU: live bytes, from the allocator's own events), "allocated" (CUDA: what torch's caching allocator
    # handed out) or "estimated"
    kind: str
    peak_phase: str | None = None  # "forward", "backward" or "step"
    peak_operation: str | None = None  # e.g. "aten.mm.default"
    peak_module: str | None = None  # its name in the model; in backward, the module whose gradients are computed
    breakdown: dict[str, int] | None = None  # `peak_bytes` by `Category`; the parts sum to it
    # Live bytes at the end of each phase of the last recorded step; for evaluation, saving and loading their peak, if
    # it is above what was live before.
    phases: dict[str, int] | None = None
    phase_breakdowns: dict[str, dict[str, int]] | None = None  # `phases` by `Category`
    # The last recorded step as series: {"phase": [...], "operation": [...], "module": [...], "weights": [bytes, ...],
    # ...}, with one entry for each of some 200 stretches of operations, at the highest point of the stretch.
    timeline: dict[str, Any] | None = None
    parameters: int | None = None  # a count, not bytes
    trainable_parameters: int | None = None  # how many of these are trained
    reserved_bytes: int | None = None  # the most that the CUDA allocator held
    device_used_bytes: int | None = None  # used on the whole device as NVML reports it, contexts included
    context_bytes: int | None = None  # the CUDA context's part of it
    rss_bytes: int | None = None  # peak resident memory of the process: information only

    def explained(self, categories: "Memory") -> "Memory":
        """Return a copy of this memory with breakdowns by category.

        `categories`: the memory of a second run of the experiment, which tracked all tensors. The second run gives the
        bytes of tensors by category. The bytes of this memory that are in no tensor count as operator workspace.
        """
        if categories.breakdown is None:
            return self
        return dataclasses.replace(
            self,
            peak_phase=categories.peak_phase,
            peak_operation=categories.peak_operation,
            peak_module=categories.peak_module,
            breakdown=explain(categories.breakdown, self.peak_bytes),
            phase_breakdowns={
                phase: explain(parts, self.phases[phase])
                for phase, parts in categories.phase_breakdowns.items()
                if phase in self.phases
            },
            timeline=categories.timeline,
        )


def explain(live: dict[str, int], total: int) -> dict[str, int]:
    """Return {category: bytes} with the sum `total`.

    Tensors have their bytes in `live`, {category: bytes}. Operator workspace, which no tensor shows, has the rest.
    """
    seen = {category: live[category] for category in TENSOR_CATEGORIES}
    return seen | {Category.INSIDE_OPERATIONS: total - sum(seen.values())}


@dataclass(frozen=True, slots=True)
class Timing(Record):
    """Hold the seconds of each timed optimizer step, with their median and spread; warm-up steps are not timed."""

    step_seconds: float  # median
    spread_seconds: float  # interquartile range
    steps: int  # timed steps
    warmup_steps: int  # steps before these
    samples_per_second: float | None  # None if the samples per step are not known
    all_seconds: tuple[float, ...] = ()  # wall-clock seconds of each timed step
    all_cpu_seconds: tuple[float, ...] = ()  # CPU seconds of each, all threads of the process together
    all_waited_seconds: tuple[float, ...] = ()  # seconds of each in which the main thread was ready but had no core


# {status of a failed run: (what happened, what to do about it)}.
_FAILED = {
    "out of memory": ("ran out of memory", "Use a smaller batch, shorter sequences or a smaller model"),
    "timed out": ("timed out", "Give it more seconds with timeout=, or stop other work on this machine"),
    "killed": ("was killed", "See how much memory is free, and run it again"),
    "crashed": ("crashed", "Correct what the message names, and run it again"),
    "refused": ("was refused", "Change what the message names"),
}


@dataclass(frozen=True, slots=True)
class Run(Record):
    """Hold an experiment's result: arguments, task, status, memory in bytes, times in seconds, losses, machine.

    A figure that was not requested is None. A figure that is missing because the run failed counts as False in `if`;
    any other use of it raises `trainmem.unknown.RunFailed` with the run's `failure`.
    """

    name: str  # shown in tables and pictures
    status: str  # "ok", "out of memory", "crashed", "killed", "timed out" or "refused"
    message: str = ""  # why it is not "ok"
    kind: str = "training"  # "training" by the Trainer, "inference", or "function" of the user
    arguments: dict[str, Any] = field(default_factory=dict)  # as the user gave them, see `arguments.Arguments`
    task: dict[str, Any] = field(default_factory=dict)  # fields of the `Task`
    samples_per_step: int | None = None  # samples per optimizer step, over all processes
    memory: Memory | None = None
    timing: Timing | None = None
    losses: tuple[float, ...] | None = None  # one per optimizer step
    value: Any = None  # returned by a function
    weights: str | None = None  # their type and who chose it, e.g. "weights in bfloat16 (config.json)"
    ranks: tuple[Any, ...] | None = None  # {"peak_bytes", "breakdown", "value"} of each rank, if there are several
    processes: int = 1  # ranks
    profile: str = ""  # name of the lab's profile
    machine: dict[str, Any] = field(default_factory=dict)  # fields of the `hardware.Machine`
    versions: dict[str, str] = field(default_factory=dict)  # {package: version}
    # Attempts by workers of a cluster; the last one counts: {"worker", "address", "began", "ended" (ISO 8601, UTC),
    # "status", "message", "sharing" (experiments on that CPU at once)}; empty if the lab ran it itself.
    attempts: tuple[dict[str, Any], ...] = ()
    date: str = ""  # ISO 8601, UTC
    id: str = ""

    def __post_init__(self):
        if not self.ok:
            for name in ("memory", "timing", "losses", "value", *["ranks"] * (self.processes > 1)):
                if not is_measured(getattr(self, name)):
                    object.__setattr__(self, name, Missing(self.failure))

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def failure(self) -> str:
        """How the run failed, with its message and what to do about it; empty if the run is ok."""
        if self.ok:
            return ""
        how, remedy = _FAILED.get(self.status, (f"is {self.status}", "Run it again"))
        return f"{self.name!r} {how}{': ' * bool(self.message)}{self.message.rstrip('.')}. {remedy}."

    @property
    def experiment(self) -> str:
        """The experiment as text, equal for equal experiments.

        The text does not contain a measured function's code, so two functions with the same arguments have equal texts.
        """
        return json.dumps([self.kind, self.task, self.arguments, self.processes], sort_keys=True, default=str)

    @property
    def peak_bytes(self) -> int | Missing | None:
        return self.memory and self.memory.peak_bytes

    @property
    def step_seconds(self) -> float | Missing | None:
        return self.timing and self.timing.step_seconds

    @property
    def samples_per_second(self) -> float | Missing | None:
        return self.timing and self.timing.samples_per_second

    def __repr__(self) -> str:
        if not self.ok:
            return f"{self.name}: {self.status}{': ' * bool(self.message)}{self.message}"
        peak = "not measured" if self.peak_bytes is None else f"{self.peak_bytes / 1e6:.1f} MB {self.memory.kind}"
        rate = self.samples_per_second
        speed = "" if rate is None else ", speed not known" if isinstance(rate, Unknown) else f", {rate:.3g} samples/s"
        return f"{self.name}: {self.status}, {peak}{speed}"


@dataclass(frozen=True, slots=True)
class Ratio(Record):
    """Hold a measured ratio with its interval. If 1 is inside the interval, the effect is too small to tell."""

    value: float  # the median of the pairs
    low: float  # the bootstrap's interval, widened to the noise floor
    high: float
    pairs: tuple[float, ...] = ()  # the ratio of each pair of interleaved measurements
    floor: float | None = None  # the factor within which two speeds count as equal

    def __post_init__(self):
        for name in ("value", "low", "high"):
            if getattr(self, name) is None:  # a file stores an unknown number as null
                object.__setattr__(self, name, Unknown("it was not known when its file was written"))

    @classmethod
    def unknown(cls, why: str, error: type[RuntimeError] = NeedsValues) -> "Ratio":
        """Return a ratio that was not measured; it prints as "not measured", and comparing its value raises `error`.

        Args:
            why: why the ratio was not measured.
            error: class of the exception that is raised when code needs the ratio's value.
        """
        return cls(*[Unknown(why, error)] * 3)

    @classmethod
    def of_pairs(cls, pairs: Sequence[float], floor: float) -> "Ratio":
        """Return the median of measured ratios with a 95 % interval, or an unknown ratio if one of them is unknown.

        The interval comes from a bootstrap. It always includes the median divided by `floor`, and the median times
        `floor`.

        Args:
            pairs: the ratio of each pair of interleaved measurements, at least 3.
            floor: the noise floor, a factor within which two speeds count as equal.

        Raises:
            ValueError: fewer than 3 pairs.
        """
        for pair in pairs:
            if isinstance(pair, Unknown):
                return cls.unknown(pair.why)
        if len(pairs) < 3:
            raise ValueError(f"{len(pairs)} pairs are too few for an interval: give at least 3")
        return cls.of_processes([[pair] for pair in pairs], floor)

    @classmethod
    def of_processes(cls, groups: Sequence[Sequence[float]], floor: float) -> "Ratio":
        """Return the median of ratios that were measured in several processes, with a 95 % interval.

        The interval comes from a bootstrap. It always includes the median divided by `floor`, and the median times
        `floor`. Ratios of one process share its conditions, so the bootstrap draws processes first, then ratios of the
        drawn processes.

        Args:
            groups: for each process, a list of its measured ratios; all lists have the same length.
            floor: the noise floor, a factor within which two speeds count as equal.
        """
        import numpy as np

        values = np.asarray(groups, dtype=float)
        processes, pairs = values.shape
        rng = np.random.default_rng(0)
        which = rng.integers(processes, size=(2000, processes, 1))
        drawn = values[which, rng.integers(pairs, size=(2000, processes, pairs))]
        medians = np.median(drawn.reshape(2000, -1), axis=1)
        low, high = np.quantile(medians, [0.025, 0.975])
        value = float(np.median(values))
        every = tuple(map(float, values.flat))
        return cls(value, min(float(low), value / floor), max(float(high), value * floor), every, floor)

    @classmethod
    def of_turns(cls, taken: Sequence, clock: int, least_floor: float, per_sample: float = 1.0) -> "Ratio":
        """Return the speed of the second of two recipes, divided by the speed of the first.

        The recipes (e.g. two trainings) ran in several processes. In each process they ran alternately, a few steps at
        a time (a turn). The first recipe took part twice: the factor between its two results is the noise floor.

        Args:
            taken: taken[process][recipe][turn] is (wall-clock seconds, CPU seconds) of one turn (in a training: of the
                turn's fastest step); the recipes are first, second, first again.
            clock: the time to use, `WALL` or `CPU`.
            least_floor: lower limit of the noise floor.
            per_sample: samples per step of the second recipe, divided by samples per step of the first.
        """
        import numpy as np

        for turns in (turns for process in taken for turns in process if isinstance(turns, Unknown)):
            return cls.unknown(turns.why)
        first, second, again = np.moveaxis(np.asarray(taken, dtype=float)[..., clock], 1, 0)
        itself = abs(float(np.median(np.log(first / again))))
        floor = max(least_floor, math.exp(itself))
        return cls.of_processes((first + again) / 2 / second * per_sample, floor)

    @property
    def known(self) -> bool:
        return not isinstance(self.value, Unknown)

    def __truediv__(self, number: float) -> "Ratio":
        parts = (part / number for part in (self.value, self.low, self.high))
        return Ratio(*parts, tuple(pair / number for pair in self.pairs), self.floor)

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})" if self.known else "not measured"


@dataclass(frozen=True, slots=True)
class Comparison(Record):
    """Hold two runs with the ratios of their memory and speed: the value of `other` divided by that of `baseline`.

    A ratio that was not measured is unknown. A claim of the course that depends on this ratio is not testable.
    """

    baseline: Run
    other: Run
    memory_ratio: float  # other / baseline, in peak bytes
    speed_ratio: Ratio  # other / baseline, in samples per second; on a CPU by CPU time
    wall_ratio: Ratio | None = None  # the same by wall-clock time, if `speed_ratio` uses another clock
    step_seconds: tuple[float, float] | None = None  # the fastest step of each, by the clock of `speed_ratio`

    def __repr__(self) -> str:
        unknown = isinstance(self.memory_ratio, Unknown)
        memory = "memory not measured" if unknown else f"{self.memory_ratio:.3f} x the memory"
        speed = f"{self.speed_ratio} x the speed" if self.speed_ratio.known else "speed not measured"
        if self.wall_ratio:
            speed += f" by CPU time, {self.wall_ratio} by the clock"
        return f"{self.other.name} against {self.baseline.name}: {memory}, {speed}"


class Store:
    """Append and read records of one kind, e.g. runs or a learner's answers, in a file of JSON lines.

    Several notebooks may write to one file at once: a line is appended whole, under a lock, and flushed to disk. A line
    damaged by a crash or a full disk is skipped with a warning when the file is read.

    Args:
        path: the file; it and its folder are created with the first record.
        record: the class of the records.
    """

    def __init__(self, path: str | os.PathLike, record: type[Record] = Run):
        self.path, self._record = Path(path), record

    def append(self, record: Record) -> None:
        """Append a record; nothing is left half written.

        Raises:
            OSError: the file cannot be written.
        """
        line = json.dumps({"schema": SCHEMA} | record.to_dict(), allow_nan=True, default=str).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f".{self.path.name}.lock")), open(self.path, "a+b", 0) as file:
            start = file.seek(0, os.SEEK_END)
            file.seek(max(0, start - 1))
            if start and file.read() != b"\n":  # a writer died in mid-line: begin on a line of our own
                line = b"\n" + line
            try:
                while line:  # a nearly full disk may take only a part
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(start)
                raise

    def read(self) -> list[Any]:
        """Return all records in the order in which they were written; skip damaged lines with a warning."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records += [self._record.from_dict(json.loads(line) or {})] if line.strip() else []
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                warnings.warn(f"{self.path}, line {number} is damaged and was skipped ({error})", stacklevel=2)
        return records


def now(precision: str = "seconds") -> str:
    """Return the current time in UTC as ISO 8601, e.g. "2026-11-29T12:00:00+00:00".

    `precision`: a `timespec` of `datetime.isoformat`, e.g. "milliseconds".
    """
    return datetime.now(UTC).isoformat(timespec=precision)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers find the old content or the new one, never a part, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
