"""Speed ratios that somebody measured: on this machine, on the recorded machine nearest to it, by the guides."""

import datetime
import functools
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf_helpers.lab import arguments as training_arguments
from perf_helpers.lab import hardware
from perf_helpers.lab.lab import NOISE_FLOOR
from perf_helpers.lab.runs import Ratio, Run
from perf_helpers.lab.task import Task
from perf_helpers.lab.techniques import QUESTIONS, Technique
from perf_helpers.unknown import is_measured

_TOGETHER = 3600  # seconds between two runs whose speeds are compared
_PAIRS = {"cpu": 3, "cuda": 1}  # that make a ratio: on a shared CPU one pair alone gave 0.35 to 3.64 for equal code
_ONE_FIGURE = 1.1  # a figure that was published without an interval is not told from 1 within this factor
RECORDED = Path(__file__).resolve().parents[2] / "results"


@dataclass(frozen=True, slots=True)
class Factor:
    """How much faster a technique is than the plain choice, `ratio` None where nobody measured it, and who says so."""

    name: str
    ratio: Ratio | None
    source: str

    @property
    def told(self) -> float:
        """The ratio to reckon with: 1 where it is unknown, or too small to tell because its interval holds 1."""
        return self.ratio.value if self.ratio and not self.ratio.low <= 1 <= self.ratio.high else 1.0

    def __str__(self) -> str:
        if self.ratio is None:
            return f"{self.name}: {self.source}"
        small = "" if self.told != 1 else ", too small to tell"
        return f"{self.name}: {self.ratio}{small}, {self.source}"


class Evidence:
    """The factors of techniques and of smaller micro-batches for one task on one kind of device."""

    def __init__(self, machine, kind: str, capability: tuple[int, int], task: Task, runs: Sequence[Run]):
        self._kind, self._task, self._name = kind, task, machine.name
        self._factors: dict[Technique, Factor] = {}
        here = machine.kind == kind
        self._runs = [run for run in runs if here and run.machine.get("name") == machine.name and _counts(run)]
        self._recorded = _nearest(machine if here else None, kind, capability)

    def factor(self, technique: Technique) -> Factor:
        if technique not in self._factors:
            self._factors[technique] = self._found(technique)
        return self._factors[technique]

    def _found(self, technique: Technique) -> Factor:
        if not technique.cost:
            return Factor(technique.name, Ratio(1.0, 1.0, 1.0), "the plain choice")
        ratio = self._of_runs(functools.partial(_with_technique, technique))
        if ratio:
            return Factor(technique.name, ratio, f"{len(ratio.pairs)} pairs of runs on this machine, {self._name}")
        return self._published(technique.name, technique.claims.get(self._kind))

    def micro_batch(self, size: int, largest: int) -> Factor:
        """A micro-batch against larger ones at the same effective batch: known for sizes that were measured only."""
        name = f"micro-batch of {size} against more"
        ratio = self._of_runs(functools.partial(_with_micro_batch, size))
        if ratio:
            return Factor(name, ratio, f"{len(ratio.pairs)} pairs of runs on this machine, {self._name}")
        if size == 1 and largest >= 4:
            return self._published(name, "accumulation-cost")
        return Factor("a smaller micro-batch, with accumulation", None, "not measured here")

    def _of_runs(self, split: Callable[[dict[str, Any]], tuple[bool | None, dict[str, Any]]]) -> Ratio | None:
        """The median ratio of pairs of runs that differ in one thing only, of the same model if there are any.

        A run's partner is the plain one nearest in time. None where there are too few pairs to tell from noise.

        Args:
            split: arguments -> (whether the thing is done, None if the run says nothing about it; what else they say).
        """
        groups: dict[tuple, dict[bool, list[Run]]] = {}
        for run in self._runs:
            done, rest = split(_telling(run.arguments))
            sizes = (run.task.get(name) for name in ("model", "seq_len", "architecture"))
            key = (*sizes, run.processes, repr(sorted(rest.items())))
            if done is not None:
                groups.setdefault(key, {True: [], False: []})[done].append(run)
        pairs: dict[str, list[float]] = {}
        for (model, *_), group in groups.items():
            for run in group[True] if group[False] else ():
                partner = min(group[False], key=lambda other: abs(_moment(other) - _moment(run)))
                if abs(_moment(partner) - _moment(run)) < _TOGETHER:
                    pairs.setdefault(model, []).append(run.samples_per_second / partner.samples_per_second)
        ratios = pairs.get(self._task.model) or list(itertools.chain(*pairs.values()))
        if len(ratios) < _PAIRS[self._kind]:
            return None
        value, floor = statistics.median(ratios), NOISE_FLOOR[self._kind]
        return Ratio(value, min(*ratios, value / floor), max(*ratios, value * floor), tuple(ratios))

    def _published(self, name: str, claim: str | None) -> Factor:
        from perf_helpers.course import claims

        recorded = self._recorded or {"claims": []}
        for found in recorded["claims"]:
            if found["id"] == claim and found["value"] is not None:
                low, high = found.get("interval") or (found["value"], found["value"])
                where = f"{recorded['machine']['name']}, lesson {found['lesson'][:2]}, {recorded['date'][:10]}"
                return Factor(name, Ratio(found["value"], low, high), f"recorded on {where}")
        guide = claims.load()[claim].guide if claim and self._kind == "cuda" else None
        if guide and guide.value and guide.hardware:
            source = f"not measured here: {claim} of the {guide.source}, {guide.hardware}, taken as sure to a tenth"
            return Factor(name, Ratio(guide.value, guide.value / _ONE_FIGURE, guide.value * _ONE_FIGURE), source)
        return Factor(name, None, "not measured here")


def _counts(run: Run) -> bool:
    """Whether a run's speed says something: timed over some steps, of a Trainer (a function's speed is its own)."""
    timed = run.ok and is_measured(run.samples_per_second) and run.timing.steps >= 3
    return timed and "samples_per_step" not in run.arguments


def _with_technique(technique: Technique, given: dict[str, Any]) -> tuple[bool | None, dict[str, Any]]:
    rest = {name: value for name, value in given.items() if name not in technique.arguments}
    if rest == given:
        return False, rest
    return all(given.get(name) == value for name, value in technique.arguments.items()) or None, rest


def _with_micro_batch(size: int, given: dict[str, Any]) -> tuple[bool | None, dict[str, Any]]:
    rest = dict(given)
    batch, steps = rest.pop("per_device_train_batch_size", 8), rest.pop("gradient_accumulation_steps", 1)
    return (batch == size if batch >= size else None), rest | {"effective batch": batch * steps}


def _moment(run: Run) -> float:
    return datetime.datetime.fromisoformat(run.date).timestamp()


def _telling(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a run that bear on its speed, defaults left out."""
    silent = ("max_steps", "num_train_epochs", "seed", "learning_rate", "lr_scheduler_type", "warmup_steps")
    current = training_arguments.current(arguments)
    names = {training_arguments.current({ours: None}).popitem()[0]: ours for ours in itertools.chain(*QUESTIONS)}
    found = {
        names.get(name, name): value for name, value in current.items() if name not in silent and value is not False
    }
    found = {name: value for name, value in found.items() if name not in silent}
    if str(found.get("optim", "")).startswith("adamw_torch"):
        del found["optim"]
    if found.get("gradient_accumulation_steps") == 1:
        del found["gradient_accumulation_steps"]
    return found


def _nearest(machine, kind: str, capability: tuple[int, int]) -> dict[str, Any] | None:
    """The newest recorded course run of the same kind of device, on this machine or the one most like it."""
    from perf_helpers.course.results import load_results

    best = None
    for path in sorted(RECORDED.glob("*/*.json")):
        data = load_results(path)
        recorded = hardware.Machine.from_dict(data["machine"])
        if recorded.kind != kind or recorded.rehearsed:
            continue
        gpu = recorded.gpus[0].capability if kind == "cuda" else None
        same = (machine.name, machine.cpu_model) if machine else (None, None)
        apart = abs(10 * (gpu[0] - capability[0]) + gpu[1] - capability[1]) if gpu else 0
        rank = (recorded.name == same[0], -apart, recorded.cpu_model == same[1], data["date"])
        if best is None or rank > best[0]:
            best = rank, data
    return best and best[1]
