"""The recipes that fit: training arguments for a model, a memory and an effective batch, and why not others.

Memory comes from the estimate (see `search`), speed from measured ratios only (see `speeds`): what nobody measured is
called so.
"""

import dataclasses
import functools
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perf_helpers.advise.choices import Candidate, Choices, native_precisions
from perf_helpers.advise.remedies import Change, remedies
from perf_helpers.advise.search import UNKNOWN_CONTEXT_BYTES, RecipeSearch
from perf_helpers.advise.speeds import Evidence, Ranking
from perf_helpers.estimate import DEFAULT_CAPABILITY, estimate
from perf_helpers.lab import hardware, progress
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.lab import Lab
from perf_helpers.lab.processes import within
from perf_helpers.lab.runs import Run
from perf_helpers.lab.store import Store
from perf_helpers.lab.task import Task
from perf_helpers.plots import Table
from perf_helpers.texts import bytes_text, parse_bytes

_NEEDED = {  # what `needed_bytes` stands for
    "cpu": "Needed is counted memory: what the interpreter and its libraries hold comes on top.",
    "cuda": "Needed is what the allocator reserves and the CUDA context; where that is not known, "
    f"{UNKNOWN_CONTEXT_BYTES / 2**20:.0f} MiB are left for it, the guides' figure for a V100.",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Training arguments that fit."""

    name: str  # techniques, micro-batch x accumulation: "checkpointing, AdamW, 4 x 2"
    arguments: dict[str, Any]  # of the training
    peak_bytes: int  # of live tensors, as the estimate says
    needed_bytes: int  # what is compared with the memory
    headroom_bytes: int  # memory less `needed_bytes`; negative where it does not fit
    speed: float | None  # relative to the fastest recipe that fits; None: a factor of it was never measured
    speed_source: tuple[str, ...]  # where each factor of the speed comes from
    costs: tuple[str, ...]  # of its techniques in time, precision or convergence; empty: a plain recipe
    why_not_next: str  # the next recipe that is expected to be faster, and by how much it does not fit

    @property
    def text(self) -> str:
        """The recipe as Python, to paste."""
        return Arguments(self.arguments).to_python()


@dataclass(frozen=True, slots=True, repr=False)
class Advice:
    """The recipes that fit, the fastest first, or what would help where none does. Shows itself as a table."""

    task: Task
    memory_bytes: int  # of one device
    effective_batch: int  # samples that an update sees
    processes: int  # ranks, one device each
    device: str  # "cpu" or "cuda"
    recipes: tuple[Recipe, ...]  # empty where nothing fits
    smallest: Recipe | None  # where nothing fits: the recipe that needs least
    changes: tuple[Change, ...]  # where nothing fits: what would make the smallest fit
    notes: tuple[str, ...]  # what the figures stand for, and what was not looked at
    assumptions: tuple[str, ...]  # of the estimates
    estimates: int  # how many were made

    @property
    def status(self) -> str:
        """ "ok" or "nothing fits"."""
        return "ok" if self.recipes else "nothing fits"

    def to_dict(self) -> dict[str, Any]:
        """Every field, sizes in bytes."""
        recipes = [dataclasses.asdict(recipe) | {"text": recipe.text} for recipe in self.recipes]
        return {"status": self.status} | dataclasses.asdict(self) | {"recipes": recipes}

    def __repr__(self) -> str:
        head, table, paste, lines = self._parts()
        return "\n".join(filter(None, [head, repr(table), paste, *lines]))

    def _repr_html_(self) -> str:
        head, table, paste, lines = self._parts()
        shown = f"<strong>{html.escape(head)}</strong>{table._repr_html_()}"
        shown += f"<pre style='font-family: monospace'>{html.escape(paste)}</pre>" if paste else ""
        items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
        return f'<div style="overflow-x:auto">{shown}<ul>{items}</ul></div>'

    def _parts(self) -> tuple[str, Table, str, list[str]]:
        """What is shown: a headline, a table, Python to paste (empty where nothing fits), and the lines below."""
        head = f"{self.task.model}, {self.effective_batch} samples a step, {bytes_text(self.memory_bytes)} "
        head += f"on {self.device}" + (f", {self.processes} processes" if self.processes > 1 else "")
        notes = list(self.notes)
        if self.assumptions:
            notes.append(f"The estimate assumes {len(self.assumptions)} things: see `assumptions`.")
        if not self.recipes:
            needed, over = bytes_text(self.smallest.needed_bytes), bytes_text(-self.smallest.headroom_bytes)
            head += f": nothing fits. The smallest ({self.smallest.name}) needs {needed}, {over} over"
            rows = [
                [change.name, "fits" if change.fits else "does not", bytes_text(change.needed_bytes), change.text]
                for change in self.changes
            ]
            assumed = [change.assumption for change in self.changes if change.assumption]
            return head, Table(["change", "", "needs", "what"], rows), "", assumed + notes
        rows = [
            [
                recipe.name,
                bytes_text(recipe.needed_bytes),
                bytes_text(recipe.headroom_bytes),
                "not measured here" if recipe.speed is None else f"{recipe.speed:.2f} x",
                "; ".join(dict.fromkeys(cost.partition(":")[0] for cost in recipe.costs)) or "nothing",
            ]
            for recipe in self.recipes
        ]
        first = self.recipes[0]
        lines = [*(f"It costs {cost}" for cost in first.costs), f"Why not more: {first.why_not_next}"]
        sources = dict.fromkeys(f"Speed, {source}" for recipe in self.recipes for source in recipe.speed_source)
        return head, Table(["recipe", "needs", "free", "speed", "costs"], rows), first.text, [*lines, *sources, *notes]


@dataclass(frozen=True, slots=True)
class Verification:
    """The first recipe of an advice, predicted and measured; its run says what kind of bytes both are."""

    recipe: Recipe
    run: Run
    predicted_bytes: int
    measured_bytes: int | None  # None where the run failed
    difference_bytes: int | None  # predicted less measured

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
    here = machine.gpus[0].capability if machine.kind == kind == "cuda" else None
    capability = tuple(compute_capability or here or DEFAULT_CAPABILITY)
    choices = Choices(effective_batch // processes, must or {}, avoid, native_precisions(machine, kind, capability))
    if runs is None:
        runs = Store(hardware.cache_folder() / "runs.jsonl").read()
    ranking = Ranking(choices, Evidence(machine, kind, capability, task, runs))
    predict = functools.partial(estimate, device=kind, compute_capability=capability, processes=processes)
    with progress.bar("advising", unit="estimate") as bar, within(timeout):
        task_to_fit = _with_enough_data(task, effective_batch)
        search = RecipeSearch(task_to_fit, predict, limit, choices, ranking, on_estimate=bar.update)
        fitting = search.find(most)
        smallest = None if fitting else search.smallest()
        changes = remedies(search, smallest) if smallest else ()
    measured = [ranking.speed(candidate) for candidate in fitting if not ranking.unknown(candidate.family)]
    return Advice(
        task=task,
        memory_bytes=limit,
        effective_batch=effective_batch,
        processes=processes,
        device=kind,
        recipes=tuple(_recipe(candidate, search, max(measured, default=None)) for candidate in fitting),
        smallest=smallest and _recipe(smallest, search, None),
        changes=changes,
        notes=(_NEEDED[kind], *search.notes),
        assumptions=tuple(search.assumptions),
        estimates=search.count,
    )


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
    predicted, measured = recipe.peak_bytes, run.peak_bytes
    return Verification(recipe, run, predicted, measured, None if measured is None else predicted - measured)


def _with_enough_data(task: Task, effective_batch: int) -> Task:
    """Two whole updates need as much data: the last micro-batches of an epoch would be smaller."""
    return task.replace(dataset_size=max(task.dataset_size, 2 * effective_batch))


def _recipe(candidate: Candidate, search: RecipeSearch, best: float | None) -> Recipe:
    """What is said of a recipe; `best` is the highest speed of those that fit, as far as any is known."""
    choices, ranking, size = search.choices, search.ranking, candidate.micro_batch
    needed, passes = search.needed(candidate), choices.samples // size
    costs = [technique.cost for technique in candidate.family if technique.cost]
    if passes > 1:
        costs.append(f"accumulation: {passes} passes of {size} for each update, on smaller kernels")
    sources = tuple(map(str, ranking.factors(candidate)))
    why_not_next = "nothing that is expected to be faster was left out"
    if faster := [other for other in search.too_large if ranking.key(other) < ranking.key(candidate)]:
        following = max(faster, key=ranking.key)
        its_needs = search.too_large[following]
        why_not_next = f"{choices.name(following)} needs {bytes_text(its_needs)}, "
        why_not_next += f"{bytes_text(its_needs - search.limit)} more than there is"
    return Recipe(
        name=choices.name(candidate),
        arguments=choices.arguments(candidate),
        peak_bytes=search.estimates[candidate].peak_bytes,
        needed_bytes=needed,
        headroom_bytes=search.limit - needed,
        speed=ranking.speed(candidate) / best if best and not ranking.unknown(candidate.family) else None,
        speed_source=sources or ("the plain recipe: what the others are compared with",),
        costs=tuple(costs),
        why_not_next=why_not_next,
    )
