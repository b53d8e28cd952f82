"""Collect speed ratios for the advisor, from runs on this machine and from published measurements (`Published`)."""

import datetime
import itertools
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmem.core.arguments import COMPILING, Arguments
from trainmem.core.hardware import Machine
from trainmem.core.task import Task
from trainmem.measure.interleaving import NOISE_FLOOR
from trainmem.recipes import QUESTIONS, Technique
from trainmem.records import Ratio, Run
from trainmem.unknown import is_measured

MICRO_BATCH, ACCUMULATION_STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
_TOGETHER_SECONDS = 3600  # at most this long between two runs whose speeds are compared
_PAIRS = {"cpu": 3, "cuda": 1}  # least pairs for a ratio: on a shared CPU one pair gave 0.35 to 3.64 for equal code
_UNMEASURED = (None, "not measured")  # (ratio, source) of a `Factor`
_SILENT = {"max_steps", "num_train_epochs", "seed", "learning_rate", "lr_scheduler_type", "warmup_steps"}


@dataclass(frozen=True, slots=True)
class Factor:
    """Hold by how much a technique or a micro-batch changes the speed of a training, and the source of this ratio.

    The ratio of a technique is the speed with the technique / the speed of the same recipe without it. The ratio of a
    micro-batch is the speed with it / the speed with a larger micro-batch and the same effective batch.
    """

    name: str  # of the technique or other choice
    ratio: Ratio | None  # in samples per second; None: never measured
    source: str  # of the ratio

    @property
    def significant(self) -> float:
        """The ratio to multiply a speed with; 1 if the ratio is unknown, or if its confidence interval contains 1."""
        return self.ratio.value if self.ratio and not self.ratio.low <= 1 <= self.ratio.high else 1.0

    def __str__(self) -> str:
        if self.ratio is None:
            return f"{self.name}: {self.source}"
        small = "" if self.significant != 1 else ", too small to tell"
        return f"{self.name}: {self.ratio}{small}, {self.source}"


# A function that returns speed ratios of the course's claims: {claim id: (ratio, its source as text)}. Arguments: the
# machine (None: the device is elsewhere), "cpu" or "cuda", and the GPU's compute capability.
Published = Callable[[Machine | None, str, tuple[int, int]], Mapping[str, tuple[Ratio, str]]]


class Evidence:
    """Look up how much faster techniques, smaller micro-batches and torch.compile make a task's training, as `Factor`s.

    A factor is calculated from pairs of runs on this machine that differ only in the technique or the micro-batch.
    Pairs of other models count only if the task's model has no such pairs.

    Args:
        machine: this machine; runs of other machines are ignored.
        kind: "cpu" or "cuda", the device to advise for; all runs are ignored if this machine's device is of another
            kind.
        capability: compute capability of the GPU.
        task: the model and its data.
        runs: measured runs, from which the factors are calculated.
        published: function that returns published ratios for factors without runs (`Published`); None: there are none.
    """

    def __init__(
        self,
        machine: Machine,
        kind: str,
        capability: tuple[int, int],
        task: Task,
        runs: Sequence[Run],
        published: Published | None = None,
    ):
        self._kind, self._task, self._name = kind, task, machine.name
        here = machine.kind == kind
        counted = [run for run in runs if here and run.machine.get("name") == machine.name and _counts(run)]
        self._runs = [(run, _relevant(run)) for run in counted]
        self._of_claims = published(machine if here else None, kind, capability) if published else {}

    def of_technique(self, technique: Technique) -> Factor:
        """Return the factor: speed of a training with a technique / speed without the technique."""

        def has_it(given: dict[str, Any]) -> bool | None:
            values = {name: given[name] for name in technique.arguments if name in given}
            return values == technique.arguments if values in ({}, technique.arguments) else None

        measured = self._of_pairs(technique.name, self._pairs(technique.arguments, has_it))
        return measured or Factor(technique.name, *self._of_claims.get(technique.claims.get(self._kind), _UNMEASURED))

    def of_micro_batch(self, size: int, largest: int) -> Factor:
        """Return the factor: speed with a micro-batch of `size` samples / speed with a larger micro-batch.

        The factor comes from pairs of runs on this machine with equal effective batches. All micro-batches larger than
        `size` count. If there are too few pairs, the ratio of the returned factor is None, with one exception: for a
        `size` of 1 and a `largest` of at least 4, the published factor of micro-batch 1 against 4 is returned, if there
        is one.

        `largest`: samples of the largest micro-batch of any recipe.
        """

        def has_it(given: dict[str, Any]) -> bool | None:
            batch = given.get(MICRO_BATCH, 8)
            return batch == size if batch >= size else None

        name = f"micro-batch of {size} against more"
        if factor := self._of_pairs(name, self._pairs((MICRO_BATCH, ACCUMULATION_STEPS), has_it)):
            return factor
        if size == 1 and largest >= 4:
            return Factor(name, *self._of_claims.get("accumulation-cost", _UNMEASURED))
        return Factor("a smaller micro-batch, with accumulation", *_UNMEASURED)

    def of_compiling(self) -> tuple[Factor, float] | None:
        """Return (torch.compile's speed factor, largest ratio of the peak with torch.compile to the peak without).

        Both come from pairs of runs on this machine, one run with torch.compile and one without. Return None if no
        pair has measured peaks.
        """

        def has_it(given: dict[str, Any]) -> bool:
            return Arguments(given).compiles

        pairs = self._pairs(COMPILING, has_it)
        # A run with a breakdown was measured under hooks, by an older version, and therefore ran uncompiled.
        true = [pair for pair in pairs if all(run.memory for run in pair) and pair[0].memory.breakdown is None]
        peaks = [run.peak_bytes / partner.peak_bytes for run, partner in true]
        if not peaks:
            return None
        name = "torch.compile"
        return self._of_pairs(name, pairs) or Factor(name, None, "speed not measured here"), max(peaks)

    def _of_pairs(self, name: str, pairs: Sequence[tuple[Run, Run]]) -> Factor | None:
        """Return a factor called `name`: the median speed ratio of `pairs`, e.g. (run with a technique, run without).

        Return None if there are too few pairs.
        """
        if len(pairs) < _PAIRS[self._kind]:
            return None
        # Not the lab's bootstrap: these pairs were not interleaved, and there may be only one.
        ratios = [run.samples_per_second / partner.samples_per_second for run, partner in pairs]
        value, floor = statistics.median(ratios), NOISE_FLOOR[self._kind]
        ratio = Ratio(value, min(*ratios, value / floor), max(*ratios, value * floor), tuple(ratios))
        return Factor(name, ratio, f"{len(ratios)} pairs of runs on this machine, {self._name}")

    def _pairs(
        self, arguments: Collection[str], has_it: Callable[[dict[str, Any]], bool | None]
    ) -> list[tuple[Run, Run]]:
        """Return pairs (run with a choice, e.g. a technique, run without it) that differ only in `arguments`.

        The partner of a run with the choice is the run without it that is nearest in time, if less than an hour is
        between them. If some pairs are runs of the model to advise for, only these pairs are returned.

        Args:
            arguments: names of the training arguments that may differ between the two runs.
            has_it: takes a run's arguments; returns whether the run has the choice, or None to leave the run out.
        """
        groups: dict[tuple, tuple[list[Run], list[Run]]] = {}  # runs that agree in all else: (without it, with it)
        for run, given in self._runs:
            if (with_it := has_it(given)) is not None:
                rest = repr(sorted(item for item in given.items() if item[0] not in arguments))
                sizes = (run.task.get(name) for name in ("model", "seq_len", "architecture"))
                groups.setdefault((*sizes, run.processes, rest), ([], []))[with_it].append(run)
        pairs: dict[str, list[tuple[Run, Run]]] = {}  # by model
        for (model, *_), (without, having) in groups.items():
            for run in having if without else ():
                partner = min(without, key=lambda other: _apart(run, other))
                if _apart(run, partner) < _TOGETHER_SECONDS:
                    pairs.setdefault(model, []).append((run, partner))
        return pairs.get(self._task.model) or list(itertools.chain(*pairs.values()))


def respelt(arguments: Arguments) -> dict[str, Any]:
    """Return {name: value} of the arguments, with the names that `recipes.QUESTIONS` (the choices of a recipe) uses.

    For example, the newer name "activation_checkpointing" becomes "gradient_checkpointing", as in `QUESTIONS`. An
    argument that is not in `QUESTIONS` has the name that the installed transformers uses.
    """
    canonical = {next(iter(Arguments({name: None}).current)): name for name in itertools.chain(*QUESTIONS)}
    return {canonical.get(name, name): value for name, value in arguments.current.items()}


def _counts(run: Run) -> bool:
    """Return whether a run's speed can be compared: the Trainer, not a user's function, ran 3 or more steps."""
    return run.ok and run.kind == "training" and is_measured(run.samples_per_second) and run.timing.steps >= 3


def _apart(run: Run, other: Run) -> float:
    """Return the seconds between the dates of two runs, whichever is the earlier one."""
    one, another = (datetime.datetime.fromisoformat(each.date).timestamp() for each in (run, other))
    return abs(one - another)


def _relevant(run: Run) -> dict[str, Any]:
    """Return {name: value} of a run's arguments that affect its speed, plus an "effective batch" in samples.

    Arguments with their default are left out. A 16-bit type of the weights is included as "dtype", whether it was
    requested or is the model's own.
    """
    given = respelt(Arguments(run.arguments))
    if (dtype := given.pop("dtype", None)) != "float32":
        loaded = run.weights or f"in {dtype} "  # an older record does not name its weights
        given |= next(({"dtype": each} for each in ("bfloat16", "float16") if f"in {each} " in loaded), {})
    relevant = {name: value for name, value in given.items() if name not in _SILENT and value is not False}
    if str(relevant.get("optim", "")).startswith("adamw_torch"):
        del relevant["optim"]
    if relevant.get(ACCUMULATION_STEPS) == 1:
        del relevant[ACCUMULATION_STEPS]
    return relevant | {"effective batch": Arguments(run.arguments).samples_per_step()}
