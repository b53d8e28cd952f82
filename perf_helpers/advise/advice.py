"""The recipe that fits: training arguments for a model, a memory and an effective batch, and why not others.

Memory comes from the estimate. With two micro-batches or more a step, its peak is the highest of several moments that
each grow linearly with the micro-batch: a line through two estimates lies above the peaks between them and below those
beyond. So a few estimates find the largest micro-batch, and what is proposed is always estimated itself. Speed comes
from measured ratios only; what nobody measured is called so.
"""

import dataclasses
import difflib
import functools
import html
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perf_helpers.advise.search import CLOSE, Search
from perf_helpers.advise.speeds import Evidence, Factor
from perf_helpers.estimate.estimates import MemoryEstimate, estimate
from perf_helpers.lab import arguments as training_arguments
from perf_helpers.lab import hardware, progress
from perf_helpers.lab.lab import Lab
from perf_helpers.lab.processes import seconds_left, within
from perf_helpers.lab.runs import Run
from perf_helpers.lab.task import Task
from perf_helpers.lab.techniques import (
    ACCUMULATION,
    ADAM_8BIT,
    ADAMW,
    BF16,
    BF16_WEIGHTS,
    FP16,
    QUESTIONS,
    SGD,
    Technique,
    techniques,
)
from perf_helpers.texts import parse_bytes

_FAR = 1.2  # beyond the limit by this factor, an optimizer's difference seen elsewhere is believed


# ----------------------------------------------------------------------------------------------------- what is answered


@dataclass(frozen=True, slots=True)
class Recipe:
    """Training arguments that fit. Bytes throughout; `needed_bytes` is the figure that is compared with the memory.

    `speed` is relative to the fastest recipe that fits, None where a factor of it was never measured; `speed_source`
    says where each factor comes from. `why_not_next`: the next recipe that is expected to be faster and does not fit.
    """

    name: str
    arguments: dict[str, Any]
    peak_bytes: int
    needed_bytes: int
    headroom_bytes: int
    speed: float | None
    speed_source: tuple[str, ...]
    costs: tuple[str, ...]
    why_not_next: str

    @property
    def text(self) -> str:
        """The recipe as Python, to paste."""
        return training_arguments.to_python(self.arguments)


@dataclass(frozen=True, slots=True)
class Change:
    """What would make the smallest recipe fit. `needed_bytes` is None where no size of the change would do."""

    name: str
    text: str
    fits: bool
    needed_bytes: int | None
    assumption: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Advice:
    """The recipes that fit, the fastest first. Shows itself as a table; `to_dict` has bytes.

    Where nothing fits, `recipes` is empty, `smallest` the recipe that needs least, its `headroom_bytes` negative, and
    `changes` what would make it fit. `assumptions` are those of the estimates, of which `estimates` were made.
    """

    task: Task
    memory_bytes: int
    effective_batch: int
    processes: int
    device: str
    recipes: tuple[Recipe, ...]
    smallest: Recipe | None
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    assumptions: tuple[str, ...]
    estimates: int

    @property
    def status(self) -> str:
        return "ok" if self.recipes else "nothing fits"

    def to_dict(self) -> dict[str, Any]:
        recipes = [dataclasses.asdict(recipe) | {"text": recipe.text} for recipe in self.recipes]
        return {"status": self.status} | dataclasses.asdict(self) | {"recipes": recipes}

    def __repr__(self) -> str:
        head, table, paste, lines = self._parts()
        return "\n".join([head, *([repr(table)] if table.rows else []), *([paste] if paste else []), *lines])

    def _repr_html_(self) -> str:
        head, table, paste, lines = self._parts()
        shown = [f"<strong>{html.escape(head)}</strong>", table._repr_html_() * bool(table.rows)]
        shown.append(f"<pre style='font-family: monospace'>{html.escape(paste)}</pre>" * bool(paste))
        items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
        return f'<div style="overflow-x:auto">{"".join(shown)}<ul>{items}</ul></div>'

    def _parts(self):
        """A headline, a table, what to paste, and lines below."""
        from perf_helpers import plots

        size, notes = plots.bytes_text, list(self.notes)
        if self.assumptions:
            notes.append(f"The estimate assumes {len(self.assumptions)} things: see `assumptions`.")
        head = f"{self.task.model}, {self.effective_batch} samples a step, {size(self.memory_bytes)} on {self.device}"
        if self.processes > 1:
            head += f", {self.processes} processes"
        if not self.recipes:
            least, need = self.smallest, self.smallest.needed_bytes
            over = size(-least.headroom_bytes)
            head += f": nothing fits. The smallest ({least.name}) needs {size(need)}, {over} over"
            rows = [[c.name, "fits" if c.fits else "does not", size(c.needed_bytes), c.text] for c in self.changes]
            table = plots.Table(["change", "", "needs", "what"], rows)
            return head, table, "", [*(c.assumption for c in self.changes if c.assumption), *notes]
        rows = [
            [
                recipe.name,
                size(recipe.needed_bytes),
                size(recipe.headroom_bytes),
                "not measured here" if recipe.speed is None else f"{recipe.speed:.2f} x",
                "; ".join(dict.fromkeys(cost.partition(":")[0] for cost in recipe.costs)) or "nothing",
            ]
            for recipe in self.recipes
        ]
        table = plots.Table(["recipe", "needs", "free", "speed", "costs"], rows)
        first = self.recipes[0]
        lines = [f"It costs {cost}" for cost in first.costs] + [f"Why not more: {first.why_not_next}"]
        sources = dict.fromkeys(source for recipe in self.recipes for source in recipe.speed_source)
        return head, table, first.text, [*lines, *(f"Speed, {source}" for source in sources), *notes]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The largest micro-batch that fits; None where not even one sample does.

    `needed_bytes` is the predicted figure, `next_bytes` that of one sample more (None: no more was asked for). `runs`
    are the real trainings that confirmed it; `tried` the micro-batches that were estimated.
    """

    micro_batch: int | None
    needed_bytes: int
    next_bytes: int | None
    memory_bytes: int
    tried: tuple[int, ...]
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """The first recipe, predicted and measured, in bytes of the same kind (`kind`: "counted" or "allocated")."""

    recipe: Recipe
    run: Run
    predicted_bytes: int

    @property
    def measured_bytes(self) -> int | None:
        return self.run.peak_bytes

    @property
    def difference_bytes(self) -> int | None:
        return None if self.measured_bytes is None else self.predicted_bytes - self.measured_bytes

    def to_dict(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in ("predicted_bytes", "measured_bytes", "difference_bytes")}
        memory = self.run.memory
        return {"status": self.run.status, "message": self.run.message, "kind": memory and memory.kind} | figures

    def __repr__(self) -> str:
        if self.measured_bytes is None:
            return f"{self.recipe.name}: {self.run.status}, {self.run.message}"
        share = self.difference_bytes / self.measured_bytes
        return (
            f"{self.recipe.name}: predicted {self.predicted_bytes:,} bytes, {self.run.memory.kind} "
            f"{self.measured_bytes:,}, difference {self.difference_bytes:+,} ({share:+.2%})"
        )


# -------------------------------------------------------------------------------------------------------- the questions


def advise(
    task: Task,
    *,
    memory: int | float | str,
    effective_batch: int,
    must: Mapping[str, Any] | None = None,
    avoid: Iterable[str] = (),
    device: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    processes: int = 1,
    runs: Sequence[Run] | None = None,
    most: int = 5,
    machine: hardware.Machine | None = None,
    timeout: float = 300,
) -> Advice:
    """The recipes that fit a memory, ranked by the speed that measurements let expect.

    A recipe answers three questions, checkpointing, precision and optimizer, and takes the largest micro-batch that
    then fits; attention is the library's choice. One that only adds costs to a recipe that fits whole is left out.
    On a CPU the counted peak is compared with `memory`, without the interpreter and its libraries; on CUDA what the
    allocator reserves and the context.

    Args:
        memory: bytes of one device, or a text such as "16GB".
        effective_batch: samples an update sees: micro-batch x accumulation x processes.
        must: training arguments that are fixed, e.g. {"optim": "sgd"}; each settles its question.
        avoid: techniques or arguments that are not wanted, e.g. ["checkpointing", "adafactor", "accumulation"].
        device: "cpu" or "cuda"; None: this machine's.
        compute_capability: of the GPU, e.g. (8, 0); None: this machine's, else (9, 0).
        processes: ranks of a data-parallel training, one device each.
        runs: measured runs to take speed ratios from; None: those kept in the user's cache.
        most: recipes to propose at most.
        machine: whose precisions and measured speeds count, e.g. one described elsewhere; None: this one.
        timeout: seconds for all estimates together; what was not looked at by then is told.

    Raises:
        ValueError: an argument that is unknown or out of range, a model that the estimate cannot follow, or not one
            estimate within `timeout`.
    """
    limit = parse_bytes(memory)
    for name, value in (("effective_batch", effective_batch), ("processes", processes), ("most", most)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number of at least 1")
    if effective_batch % processes:
        raise ValueError(f"effective_batch={effective_batch} does not divide by processes={processes}")
    machine = machine or hardware.describe()
    kind = device or machine.kind
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: choose 'cpu' or 'cuda'")
    capability = _capability(machine, kind, compute_capability)
    fixed, avoided = _checked(must or {}, avoid)
    families = _families(fixed, avoided, _precisions(machine, kind, capability))
    sizes = _sizes(effective_batch // processes, fixed, avoided)
    peaks = _Peaks(_with_enough_data(task, effective_batch), kind, capability, processes)
    evidence = Evidence(machine, kind, capability, task, Lab().store.read() if runs is None else runs)
    search = _Space(peaks, limit, effective_batch // processes, sizes, fixed, evidence)
    smallest, changes = None, ()
    with progress.bar("advising", unit="estimate") as bar, within(timeout):
        peaks.on_estimate = bar.update
        found = search.find(families, most)
        if not found:
            smallest, changes = search.smallest()
    return Advice(
        task=task,
        memory_bytes=limit,
        effective_batch=effective_batch,
        processes=processes,
        device=kind,
        recipes=found,
        smallest=smallest,
        changes=changes,
        notes=(peaks.note, *search.notes),
        assumptions=tuple(peaks.assumptions),
        estimates=peaks.count,
    )


def largest_micro_batch(
    task: Task,
    *,
    memory: int | float | str,
    confirm: bool = False,
    most: int | None = None,
    device: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    processes: int = 1,
    lab: Lab | None = None,
    **arguments,
) -> MicroBatch:
    """The largest `per_device_train_batch_size` that fits, from the estimate.

    Args:
        memory: bytes of one device, or a text such as "16GB".
        confirm: train with it, and should it need more than `memory`, once more with what that run says must fit.
        most: the largest micro-batch to think of; None: the task's data set for each process.
        lab: what trains; None: a new one.
        arguments: the other training arguments.

    Raises:
        ValueError: as `advise`; to confirm what this machine cannot run; two real runs that both need too much.
    """
    limit = parse_bytes(memory)
    training_arguments.check(arguments)
    if "per_device_train_batch_size" in training_arguments.current(arguments):
        raise ValueError("per_device_train_batch_size is what is looked for: leave it out")
    machine = hardware.describe()
    kind = device or machine.kind
    if confirm and kind != machine.kind:
        raise ValueError(f"confirm=True: this machine has no {kind}; confirm where the training will run")
    peaks = _Peaks(task, kind, _capability(machine, kind, compute_capability), processes)
    sizes = range(1, (most or max(1, task.dataset_size // processes)) + 1)
    search = Search(
        sizes, lambda size: peaks.needed(peaks.of(arguments | {"per_device_train_batch_size": size})), limit
    )
    place = search.run()
    micro_batch, done = (sizes[place] if place >= 0 else None), []
    if confirm and micro_batch:
        lab = lab or Lab()
        for _ in range(2):
            settings = arguments | {"per_device_train_batch_size": micro_batch}
            run = lab.train("confirm", task=task, measure="memory", processes=processes, **settings)
            done.append(run)
            over = _measured(run) - limit if run.ok else limit * CLOSE
            if over <= 0 or micro_batch == 1:
                break
            smaller = [size for size in sizes[: micro_batch - 1] if search.line(size) + over <= limit]
            micro_batch = max(smaller, default=1)
        if not done[-1].ok or _measured(done[-1]) > limit:
            raise ValueError(f"not confirmed: {done[-1]!r}, and {limit:,} bytes are given")
        place = micro_batch - 1
    if place < 0:
        return MicroBatch(None, search.known[1], search.known[1], limit, tuple(search.known))
    following = search.at(place + 1) if place + 1 < len(sizes) else None
    return MicroBatch(micro_batch, search.at(place), following, limit, tuple(search.known), tuple(done))


def verify(advice: Advice, lab: Lab | None = None) -> Verification:
    """Train with the first recipe of an advice for a few steps in a clean process: predicted against measured.

    Raises:
        ValueError: the advice has no recipe, or is for a device that this machine does not have.
    """
    if not advice.recipes:
        raise ValueError("nothing fits, so there is no recipe to verify: make one of `advice.changes` first")
    lab = lab or Lab()
    if lab.machine.kind != advice.device:
        raise ValueError(f"the advice is for {advice.device}, this is {lab.machine.name}: verify it where it will run")
    recipe = advice.recipes[0]
    task = _with_enough_data(advice.task, advice.effective_batch)
    run = lab.train(recipe.name, task=task, measure="memory", processes=advice.processes, **recipe.arguments)
    return Verification(recipe, run, recipe.peak_bytes)


def _measured(run: Run) -> int:
    """The figure of a run that `memory` is compared with."""
    memory = run.memory
    return max(memory.reserved_bytes or 0, memory.peak_bytes) + (memory.context_bytes or 0)


def _with_enough_data(task: Task, effective_batch: int) -> Task:
    """Two whole updates need as much data: the last micro-batches of an epoch would be smaller."""
    return task.replace(dataset_size=max(task.dataset_size, 2 * effective_batch))


def _capability(machine, kind: str, given: tuple[int, int] | None) -> tuple[int, int]:
    known = machine.gpus[0].capability if machine.kind == kind == "cuda" else None
    return tuple(given or known or (9, 0))


def _precisions(machine, kind: str, capability: tuple[int, int]) -> set[Technique]:
    """The lower precisions that the device computes in by itself."""
    if kind == "cpu":
        native = machine.native_bf16
    else:
        native = capability >= (8, 0)
    return {BF16, BF16_WEIGHTS} if native else {FP16} if kind == "cuda" else set()


def _checked(must: Mapping[str, Any], avoid: Iterable[str]) -> tuple[dict[str, Any], set[str]]:
    """What is fixed, under the names that this module uses, and what is avoided, under one spelling."""
    training_arguments.check(must)
    training_arguments.check_values(must)
    fixed = training_arguments.current(must)
    for ours in itertools.chain(*QUESTIONS):
        (name,) = training_arguments.current({ours: None})
        if name in fixed:
            fixed[ours] = fixed.pop(name)
    if isinstance(avoid, str):
        raise ValueError(f"avoid={avoid!r}: give a list of names")
    known = set(ACCUMULATION).union(*(option.words for option in techniques()))
    lower = {name.lower(): name for name in known}
    avoided = set()
    for name in avoid:
        if str(name).lower() not in lower:
            near = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(sorted(known))}"
            raise ValueError(f"avoid={name!r} is no technique: {hint}")
        avoided.add(lower[str(name).lower()])
    return fixed, avoided


def _families(fixed: Mapping[str, Any], avoided: set[str], precisions: set[Technique]) -> list[tuple[Technique, ...]]:
    """Every combination of answers that is allowed."""
    installed = hardware.versions()["bitsandbytes"] is not None
    left_out = {SGD} | ({BF16, FP16, BF16_WEIGHTS} - precisions) | (set() if installed else {ADAM_8BIT})
    answers = []
    for names, options in QUESTIONS.items():
        if set(names) & fixed.keys():
            same = [o for o in options if o and all(fixed.get(name) == value for name, value in o.arguments.items())]
            if clash := [o.name for o in same if o.words & avoided]:
                raise ValueError(f"{clash[0]!r} is both in must and in avoid: keep one")
            answers.append(same[:1] or [None])
            continue
        allowed = [option for option in options if option not in left_out and not (option and option.words & avoided)]
        if not allowed:
            raise ValueError(f"avoid leaves no answer for {', '.join(names)}: fix one with must")
        answers.append(allowed)
    return [tuple(filter(None, family)) for family in itertools.product(*answers)]


def _sizes(samples: int, fixed: Mapping[str, Any], avoided: set[str]) -> list[int]:
    """The micro-batches that make `samples` a process and update."""
    batch, steps = (fixed.get(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    if avoided & set(ACCUMULATION):
        steps = steps or 1
        if steps > 1:
            raise ValueError(f"gradient_accumulation_steps={steps} is in must and accumulation in avoid: keep one")
    found = [size for size in range(1, samples + 1) if samples % size == 0]
    found = [size for size in found if size == (batch or size) and samples // size == (steps or samples // size)]
    if not found:
        given = " x ".join(str(value) for value in (batch, steps) if value)
        raise ValueError(f"no micro-batch x accumulation makes {samples} samples a process with {given} in must")
    return found


# --------------------------------------------------------------------------------------------------------------- memory


class _Peaks:
    """Estimates of one task on one device, counted."""

    def __init__(self, task: Task, kind: str, capability: tuple[int, int], processes: int):
        self.task, self.kind, self.count = task, kind, 0
        self.on_estimate: Callable[[], Any] = lambda: None
        self._options = {"device": kind, "processes": processes}
        if kind == "cuda":
            self._options["compute_capability"] = capability
        self.assumptions: dict[str, None] = {}

    def of(self, arguments: Mapping[str, Any], task: Task | None = None) -> MemoryEstimate:
        self.count += 1
        found = estimate(task or self.task, **self._options, **arguments)
        self.assumptions |= dict.fromkeys(found.assumptions)
        self.on_estimate()
        return found

    def needed(self, found: MemoryEstimate) -> int:
        """The bytes that are compared with the memory."""
        memory = found.memory
        if self.kind == "cpu":
            return memory.peak_bytes
        return max(memory.reserved_bytes or 0, memory.peak_bytes) + (memory.context_bytes or _context_margin())

    @property
    def note(self) -> str:
        """What the figure stands for."""
        if self.kind == "cpu":
            return "Needed is counted memory: what the interpreter and its libraries hold comes on top."
        return (
            "Needed is what the allocator reserves and the CUDA context; where that is not known, "
            f"{_context_margin() / 2**20:.0f} MiB are left for it, the guides' figure for a V100."
        )


def _context_margin() -> int:
    from perf_helpers.estimate import allocator

    return allocator.context_bytes((7, 0))


# --------------------------------------------------------------------------------------------------------------- search


_Family = tuple[Technique, ...]


class _Space:
    """The families of recipes, what was estimated of them, and how they rank."""

    def __init__(self, peaks: _Peaks, limit: int, samples: int, sizes: list[int], fixed, evidence: Evidence):
        self._peaks, self._limit, self._samples, self._sizes = peaks, limit, samples, sizes
        self._fixed, self._evidence = fixed, evidence
        self._odd = sizes[-1] if sizes[-1] == samples and len(sizes) > 1 else None
        self._estimates: dict[tuple[_Family, int], MemoryEstimate] = {}
        self._searches: dict[_Family, Search] = {}
        self._lacking: dict[tuple[_Family, int], float] = {}  # what does not fit, and the bytes that it needs
        self.notes: list[str] = []

    def find(self, families: Sequence[_Family], most: int) -> tuple[Recipe, ...]:
        """The best recipes that fit."""
        self._common = set(families[0]).intersection(*families)
        fitting: list[tuple[_Family, int]] = []
        failures: list[ValueError] = []
        ranked = sorted(families, key=lambda family: self._rank(family, self._sizes[-1]))
        for place, family in enumerate(ranked):
            if len(fitting) == most:
                break
            if self._estimates and not seconds_left(math.inf):
                self.notes.append(f"The time was up: {len(ranked) - place} ways of training were not looked at.")
                break
            beaten = [size for other, size in fitting if self._only_adds(family, other)]
            if self._sizes[-1] in beaten:
                continue
            try:
                size = self._largest(family, above=max(beaten, default=0))
            except ValueError as error:
                failures.append(error)
                self.notes.append(f"{self._name(family)} was left out: {error}")
                continue
            if size:
                fitting.append((family, size))
        if not self._estimates:
            raise failures[0]
        fitting.sort(key=lambda pair: self._rank(*pair))
        best = max((self._speed(*pair) for pair in fitting if self._unknown(pair[0]) == 0), default=None)
        return tuple(self._recipe(*pair, best) for pair in fitting)

    # ---- how they rank

    def _factors(self, family: _Family) -> list[Factor]:
        return [self._evidence.factor(technique) for technique in family if technique not in self._common]

    def _unknown(self, family: _Family) -> int:
        return sum(factor.ratio is None for factor in self._factors(family))

    def _speed(self, family: _Family, size: int) -> float:
        """The product of the factors that can be told."""
        factors = self._factors(family)
        if size < self._sizes[-1]:
            factors.append(self._evidence.micro_batch(size, self._sizes[-1]))
        return math.prod(factor.told for factor in factors)

    def _rank(self, family: _Family, size: int) -> tuple:
        """Measured before not measured, then faster, then cheaper, then a larger micro-batch."""
        return self._unknown(family), -self._speed(family, size), len(_costs(family)), -size

    def _only_adds(self, family: _Family, other: _Family) -> bool:
        """Whether a family has the costs of one that ranks before it and more: only a larger micro-batch counts then.

        A precision of unknown speed counts by itself: it may be the faster one.
        """
        known = self._precision(family) == self._precision(other) or not self._unknown(family)
        return known and _costs(family) > _costs(other)

    @staticmethod
    def _precision(family: _Family) -> set[Technique]:
        return {BF16, FP16, BF16_WEIGHTS} & set(family)

    # ---- what fits

    def _arguments(self, family: _Family, size: int) -> dict[str, Any]:
        arguments = {"per_device_train_batch_size": size, "gradient_accumulation_steps": self._samples // size}
        for technique in family:
            arguments |= technique.arguments
        return arguments | self._fixed

    def _needed(self, family: _Family, size: int) -> int:
        key = family, size
        if key not in self._estimates:
            self._estimates[key] = self._peaks.of(self._arguments(family, size))
        needed = self._peaks.needed(self._estimates[key])
        if needed > self._limit:
            self._lacking[key] = needed
        return needed

    def _largest(self, family: _Family, above: int) -> int | None:
        """The largest micro-batch of a family that fits; None where none does, or none above `above`."""
        low = self._sizes.index(above) if above else -1
        others = [other for other in self._searches if set(other) - set(_OPTIMIZERS) == set(family) - set(_OPTIMIZERS)]
        slope = model = None
        first = low + 1 if above else None
        for other in others:
            if (guess := self._guess(other, family)) is not None and self._hopeless(guess, other):
                self._lacking[family, self._sizes[0]] = guess
                return None
            slope, model = (self._searches[other].slope(), other) if slope is None else (slope, model)
            fits = [size for size, needed in self._searches[other].known.items() if needed <= self._limit]
            first = max([first or 0, *(self._sizes.index(size) for size in fits)])
        needed, sure = functools.partial(self._needed, family), functools.partial(self._same_moment, family, model)
        search = Search(self._sizes, needed, self._limit, slope, self._odd, sure)
        place = search.run(first, low)
        self._searches[family] = search
        if place + 1 < len(self._sizes) and (family, self._sizes[place + 1]) not in self._lacking:
            self._lacking[family, self._sizes[place + 1]] = search.line(self._sizes[place + 1])
        if self._whole_may_fit(family) and search.at(len(self._sizes) - 1) <= self._limit:
            return self._odd
        return self._sizes[place] if place > low else None

    def _same_moment(self, family: _Family, other: _Family | None, size: int) -> bool:
        """Whether a family peaks in the same operation as another at the end of the line that is known of it."""
        if other is None:
            return False
        last = max(point for point in self._searches[other].known if point != self._odd)
        found = self._estimates[family, size].memory, self._estimates[other, last].memory
        return len({(memory.peak_phase, memory.peak_operation) for memory in found}) == 1

    def _whole_may_fit(self, family: _Family) -> bool:
        """Whether one micro-batch may need less than several, whose gradients wait while the next is forward."""
        search = self._searches[family]
        if self._odd is None or self._odd in search.known:
            return False
        gradients = max(
            found.memory.breakdown["gradients"] for key, found in self._estimates.items() if key[0] == family
        )
        return (search.line(self._odd) or max(search.known.values())) - gradients <= self._limit

    def _hopeless(self, guess: float, other: _Family) -> bool:
        """Whether a guess for the smallest micro-batch is too far off to be looked at, in one micro-batch neither."""
        gradients = self._estimates[other, self._sizes[0]].memory.breakdown["gradients"] if self._odd else 0
        return guess > _FAR * self._limit and guess - gradients > self._limit

    def _guess(self, other: _Family, family: _Family) -> float | None:
        """What the family needs at least, if an optimizer makes the same difference here as it does elsewhere."""
        size = self._sizes[0]
        mine, theirs = ({*one} & {*_OPTIMIZERS} for one in (family, other))
        for one, each in itertools.product(self._searches, repeat=2):
            alike = {*one} - mine == {*each} - theirs and mine <= {*one} and theirs <= {*each}
            if alike and all((found, size) in self._estimates for found in (one, each, other)):
                return self._needed(other, size) + self._needed(one, size) - self._needed(each, size)
        return None

    # ---- what is said

    def _name(self, family: _Family, size: int | None = None) -> str:
        words = [technique.name for technique in family]
        if size:
            words.append(f"{size} x {self._samples // size}")
        return ", ".join(words) or "the plain recipe"

    def _recipe(self, family: _Family, size: int, best: float | None) -> Recipe:
        needed = self._needed(family, size)
        unknown = best is None or self._unknown(family)
        factors = [str(factor) for factor in self._factors(family) if factor.name != ADAMW.name]
        if size < self._sizes[-1]:
            factors.append(str(self._evidence.micro_batch(size, self._sizes[-1])))
        costs = [technique.cost for technique in family if technique.cost]
        if size < self._samples:
            costs.append(f"accumulation: {self._samples // size} passes of {size} for each update, on smaller kernels")
        return Recipe(
            name=self._name(family, size),
            arguments=self._arguments(family, size),
            peak_bytes=self._estimates[family, size].peak_bytes,
            needed_bytes=needed,
            headroom_bytes=self._limit - needed,
            speed=None if unknown else self._speed(family, size) / best,
            speed_source=tuple(factors) or ("the plain recipe: what the others are compared with",),
            costs=tuple(costs),
            why_not_next=self._why_not_next(family, size),
        )

    def _why_not_next(self, family: _Family, size: int) -> str:
        from perf_helpers.plots import bytes_text

        mine = self._rank(family, size)
        better = {pair: rank for pair in self._lacking if (rank := self._rank(*pair)) < mine}
        if not better:
            return "nothing that is expected to be faster was left out"
        pair = max(better, key=better.get)
        needed = self._lacking[pair]
        return f"{self._name(*pair)} needs {bytes_text(needed)}, {bytes_text(needed - self._limit)} more than there is"

    # ---- nothing fits

    def smallest(self) -> tuple[Recipe, tuple[Change, ...]]:
        """The recipe that needs least, and what would make it fit."""
        while (key := min(self._lacking, key=self._lacking.get)) not in self._estimates:  # it was only guessed
            self._needed(*key)
        changes = [change for change in (self._shorter(*key), self._sharded(*key), self._offloaded(*key)) if change]
        return self._recipe(*key, None), tuple(sorted(changes, key=lambda change: not change.fits))

    def _shorter(self, family: _Family, size: int) -> Change | None:
        task = self._peaks.task
        if task.family() == "vision" or task.length() <= 8:
            return None
        arguments, lengths = self._arguments(family, size), range(8, task.length(), 8)
        search = Search(
            lengths, lambda n: self._peaks.needed(self._peaks.of(arguments, task.replace(seq_len=n))), self._limit
        )
        place = search.run()
        if place < 0:
            return Change("fewer tokens", "no length would do: this is for 8 tokens", False, search.known[8])
        text = f"seq_len={lengths[place]} instead of {task.length()}, the longest by steps of 8"
        return Change("fewer tokens", text, True, search.at(place))

    def _sharded(self, family: _Family, size: int) -> Change:
        """Weights, gradients and states divided by the number of devices, at each moment whose parts are known."""
        moments, rest = self._moments(family, size)
        shared = [sum(parts.get(name, 0) for name in _SHARDED) for parts in moments]
        whole = [sum(parts.values()) - part + rest for parts, part in zip(moments, shared, strict=True)]
        assumption = (
            "Sharding: weights, gradients and optimizer states are divided by the number of devices and nothing else; "
            "the layer that is gathered for its turn is not counted."
        )
        if max(whole) >= self._limit:
            text = "no number of devices would do: this is for what cannot be divided"
            return Change("sharding", text, False, max(whole), assumption)
        least = max(math.ceil(part / (self._limit - other)) for part, other in zip(shared, whole, strict=True))
        shares = range(max(2, least), self._samples + 1)
        devices = next((share for share in shares if self._samples % share == 0), None)
        needed = max(round(part / (devices or least)) + other for part, other in zip(shared, whole, strict=True))
        text = f"over {devices or least} devices, at most {size} sample{'s' * (size > 1)} each at a time"
        if devices is None:
            text += f": {self._samples} samples a step cannot be shared by so many, the effective batch grows too"
        return Change("sharding", text, devices is not None, needed, assumption)

    def _offloaded(self, family: _Family, size: int) -> Change | None:
        moments, rest = self._moments(family, size)
        states = max(parts["optimizer_states"] for parts in moments)
        if not states:
            return None
        needed = max(sum(parts.values()) - parts["optimizer_states"] for parts in moments) + rest
        assumption = "Offload: the optimizer states and their update are on the host, and nothing else moves."
        text = f"optimizer states off the device: {states / 1e6:,.1f} MB on the host"
        return Change("offload", text, needed <= self._limit, needed, assumption)

    def _moments(self, family: _Family, size: int) -> tuple[list[dict[str, int]], int]:
        """The parts of memory at the peak and at the end of each phase, and what the needed figure has on top."""
        found = self._estimates[family, size]
        moments = [found.memory.breakdown, *(found.memory.phase_breakdowns or {}).values()]
        return moments, self._peaks.needed(found) - found.peak_bytes


_OPTIMIZERS = QUESTIONS[("optim",)]
_SHARDED = ("weights", "gradients", "optimizer_states")


def _costs(family: Collection[Technique]) -> set[str]:
    return {technique.name for technique in family if technique.cost}
