"""Advise which training arguments fit a model into a memory, for a given effective batch, the fastest first.

Memory comes from the estimate (see `search`), speed from measured ratios only (see `measured_speedups`); a speed that
was never measured is reported as such.
"""

import contextlib
import dataclasses
import functools
import html
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmem.advise import target
from trainmem.advise.changes import Change, helpful_changes
from trainmem.advise.largest import LARGEST
from trainmem.advise.largest import largest as largest_of
from trainmem.advise.measured_speedups import Evidence, Published
from trainmem.advise.search import Candidate, Choices, Once, Ranking, RecipeSearch, native_precisions
from trainmem.cards import DEFAULT_CAPABILITY, MARGIN, memory_of_card
from trainmem.cards import card as card_like
from trainmem.core import hardware, progress
from trainmem.core.arguments import Arguments
from trainmem.core.configurations import Weights
from trainmem.core.families import text_of
from trainmem.core.task import PRESETS, Task
from trainmem.estimate import depth, estimate
from trainmem.estimate.allocator_settings import untested_text
from trainmem.measure.processes import within
from trainmem.measure.runner import Runner
from trainmem.recipes import LORA
from trainmem.records import Run, Store
from trainmem.rehearsal import build, rehearse
from trainmem.tables import Table
from trainmem.texts import arguments_of_kind, bytes_text, shown, whole_number

# Families with a matmul as wide as the vocabulary.
_FROM_VOCABULARY = {"causal", "masked", "sequence to sequence", "image-text", "speech"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hold a recipe of an `Advice`: training arguments, the memory that they take, their costs and their speed.

    `peak_bytes` counts live tensors; `needed_bytes` is the memory that the device must have. `speed` is a fraction of
    the speed of the fastest recipe that fits. `costs` are disadvantages in time, precision or convergence, as texts.
    """

    name: str  # techniques, micro-batch x accumulation: "checkpointing, AdamW, 4 x 2"
    arguments: dict[str, Any]  # training arguments
    peak_bytes: int  # estimated bytes of live tensors
    needed_bytes: int  # compared with the memory
    headroom_bytes: int  # memory minus `needed_bytes`; below the margin, or negative, if the recipe does not fit
    speed: float | None  # relative to the fastest recipe that fits; None: one of its factors was never measured
    speed_source: tuple[str, ...]  # the source of each factor of the speed
    costs: tuple[str, ...]  # its techniques' costs in time, precision or convergence; empty: a plain recipe
    why_not_next: str  # the next recipe that would probably be faster, and the bytes by which it does not fit

    @property
    def text(self) -> str:
        """The recipe as Python code to paste."""
        return Arguments(self.arguments).to_python()


class Shown:
    """Show a result as HTML in a notebook and as text in a terminal; a subclass has `_parts`, see `Advice._parts`."""

    __slots__ = ()

    def __repr__(self) -> str:
        head, table, paste, lines = self._parts()
        return "\n".join(filter(None, [head, repr(table), paste, *lines]))

    def _repr_html_(self) -> str:
        head, table, paste, lines = self._parts()
        shown = f"<strong>{html.escape(head)}</strong>{table._repr_html_()}"
        shown += f"<pre style='font-family: monospace'>{html.escape(paste)}</pre>" if paste else ""
        items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
        return f'<div style="overflow-x:auto">{shown}<ul>{items}</ul></div>'


@dataclass(frozen=True, slots=True, repr=False)
class Advice(Shown):
    """Hold what `advise` returns, shown as a table: the device, the recipes that fit, the fastest first, and notes.

    If no recipe fits, it holds the smallest recipe and changes that would help. Sizes are in bytes.
    """

    task: Task
    weights: str  # the type in which the model is loaded unless a recipe sets another, and who chose it
    memory_bytes: int  # of one device
    effective_batch: int  # samples per update
    processes: int  # ranks, one device each
    device: str  # "cpu" or "cuda"
    compute_capability: tuple[int, int] | None  # of the GPU; None: a CPU
    context_bytes: int  # of the memory, kept for the CUDA context; 0 on a CPU
    margin_bytes: int  # of the memory, kept free
    recipes: tuple[Recipe, ...]  # empty if nothing fits
    smallest: Recipe | None  # if nothing fits: the recipe that needs least
    changes: tuple[Change, ...]  # if nothing fits: changes that would help the smallest
    notes: tuple[str, ...]  # what the figures mean, and what was not tried
    assumptions: tuple[str, ...]  # of the estimates
    estimates: int  # number of estimates that were made

    @property
    def status(self) -> str:
        """ "ok" or "nothing fits"."""
        return "ok" if self.recipes else "nothing fits"

    @property
    def _says_dtype(self) -> bool:
        return any("dtype" in recipe.arguments for recipe in (*self.recipes, self.smallest) if recipe)

    def to_dict(self) -> dict[str, Any]:
        """Return {field: value} of every field, and the "status"; sizes are in bytes."""
        recipes = [dataclasses.asdict(recipe) | {"text": recipe.text} for recipe in self.recipes]
        return {"status": self.status} | dataclasses.asdict(self) | {"recipes": recipes}

    def _parts(self) -> tuple[str, Table, str, list[str]]:
        """Return (headline, table, Python code to paste or "" if nothing fits, lines to print below the table)."""
        size = functools.partial(bytes_text, binary=self.device == "cuda")
        length = f" with {self.task.seq_len:,} tokens" if self.task.seq_len else ""
        head = f"{self.task.model}{length}, {self.effective_batch} samples per update, {size(self.memory_bytes)} "
        head += f"on {self.device}" + (f", {self.processes} processes" if self.processes > 1 else "")
        head += f", {self.weights}" + " unless a recipe sets dtype" * self._says_dtype
        notes = list(self.notes)
        if self.assumptions:
            notes.append(f"The estimates make {len(self.assumptions)} assumptions: see `assumptions` in --json.")
        if not self.recipes:
            needed, over = self.smallest.needed_bytes, self.margin_bytes - self.smallest.headroom_bytes
            head += f": nothing fits. The smallest ({self.smallest.name}) needs {size(needed)}, "
            head += f"{size(over)} over"
            rows = [
                [change.name, "fits" if change.fits else "does not fit", size(change.needed_bytes), change.text]
                for change in self.changes
            ]
            assumed = [change.assumption for change in self.changes if change.assumption]
            return head, Table(["change", "", "needs", "how"], rows), "", assumed + notes
        rows = [
            [
                recipe.name,
                size(recipe.needed_bytes),
                size(recipe.headroom_bytes),
                "not measured" if recipe.speed is None else f"{recipe.speed:.2f} x",
                "; ".join(dict.fromkeys(cost.partition(":")[0] for cost in recipe.costs)) or "nothing",
            ]
            for recipe in self.recipes
        ]
        first = self.recipes[0]
        lines = [*(f"Its cost: {cost}" for cost in first.costs), f"Faster recipes: {first.why_not_next}"]
        sources = dict.fromkeys(f"Speed, {source}" for recipe in self.recipes for source in recipe.speed_source)
        return head, Table(["recipe", "needs", "free", "speed", "costs"], rows), first.text, [*lines, *sources, *notes]


@dataclass(frozen=True, slots=True)
class Verification:
    """Hold the predicted and the measured (or rehearsed) peak of an advice's first recipe, in bytes.

    `run` is the training that was measured or rehearsed. `run.memory.kind` says what both peaks count: "counted" (live
    bytes, on a CPU) or "allocated" (bytes that torch's CUDA allocator handed out).
    """

    recipe: Recipe
    run: Run  # measured, or rehearsed on a card like the advice's
    predicted_bytes: int
    found_bytes: int | None  # None if the run failed
    difference_bytes: int | None  # predicted minus found

    @property
    def is_rehearsed(self) -> bool:
        return bool(self.run.machine.get("rehearsed"))

    def to_dict(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in ("predicted_bytes", "found_bytes", "difference_bytes")}
        about = {"status": self.run.status, "message": self.run.message, "rehearsed": self.is_rehearsed}
        return about | {"kind": self.run.memory and self.run.memory.kind} | figures

    def __repr__(self) -> str:
        where = f"on a {self.run.machine['name']}" if self.is_rehearsed else "measured"
        if self.found_bytes is None:
            return f"{self.recipe.name}, {where}: {self.run.status}, {self.run.message}"
        share = self.difference_bytes / self.found_bytes
        return (
            f"{self.recipe.name}, {where}: predicted {self.predicted_bytes:,} bytes, {self.run.memory.kind} "
            f"{self.found_bytes:,}, difference {self.difference_bytes:+,} ({share:+.2%})"
        )


def advise(
    task: Task,
    *,
    effective_batch: int,
    memory: int | float | str | None = None,
    card: str | None = None,
    margin: float = MARGIN,
    must: Mapping[str, Any] | None = None,
    avoid: Iterable[str] = (),
    may: Iterable[str] = (),
    largest: str | None = None,
    device: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    context_memory: int | float | str | None = None,
    processes: int = 1,
    runs: Sequence[Run] | None = None,
    published: Published | None = None,
    most: int = 5,
    machine: hardware.Machine | None = None,
    timeout: float = 300,
) -> Advice:
    """Return the recipes that fit a memory, ranked by the speed to expect from measurements.

    A recipe chooses checkpointing, precision and optimizer, and takes the largest micro-batch that then fits. The
    attention kernel is the library's choice, unless `must` sets it. The advice's `notes` report the kernel, compiled
    code, and sizes that should be padded.

    A technique may cost time, precision or convergence. Let recipe A fit, and rank above recipe B. B is left out if B
    has all costly techniques of A, at least one more, and no larger micro-batch. Exception: B is kept if A and B differ
    in precision and the speed of B was never measured.

    On a CPU a recipe fits if the peak of its tensors is at most `memory` minus the margin; the interpreter and its
    libraries are not counted. On CUDA the training's allocations and frees are replayed on the caching allocator of a
    card with that memory, minus the context and the margin; the training fits if the allocator does not run out.
    Fragmentation is included.

    `results/advice.json` records how often such advice was right.

    Args:
        task: the model and its data.
        effective_batch: samples per update: micro-batch x accumulation steps x processes.
        memory: bytes of one device, or a text such as "16GB"; None: the card's.
        card: a GPU model of `cards.CARDS`, e.g. "h100"; sets memory and compute capability.
        margin: fraction of the memory that a recipe leaves free.
        must: training arguments to keep, e.g. {"optim": "sgd"}.
        avoid: techniques or arguments to leave out, e.g. ["checkpointing", "adafactor", "accumulation"].
        may: techniques to allow that are otherwise not offered: "LoRA", "QLoRA", and others of `recipes.ON_DEMAND`.
        largest: "model" or "sequence": find the largest preset of the task's model type, or the longest sequence, that
            fits with the recipe that needs the least memory. The advice's `task` is then the task found. None: advise
            for `task`.
        device: "cpu" or "cuda"; None: a GPU if one is named, if this machine has one, or if `memory` is a size that
            GPUs are sold with (a note says so); otherwise this machine's CPU.
        compute_capability: compute capability of the GPU, e.g. (8, 0); None: the card's, otherwise this machine's,
            otherwise (9, 0).
        context_memory: bytes of `memory` kept for the CUDA context, or a text such as "450MiB"; 0 if `memory` excludes
            the context already. None: `CONTEXT_BYTES`, 530 MiB, from published out-of-memory messages.
        processes: ranks of a data-parallel training, one device each.
        runs: measured runs to take speed ratios from; None: the runs kept in the user's cache.
        published: function that returns published speed ratios, for techniques without runs, see
            `measured_speedups.Published`; None: nothing is published.
        most: largest number of recipes to return.
        machine: the machine whose precisions and measured speeds count; None: this one.
        timeout: time limit of all estimates together, in seconds; a note lists what was skipped.

    Raises:
        ValueError: an argument that is unknown or out of range, a model that cannot be traced, or no estimate within
            `timeout`.
    """
    limit, named = memory_of_card(card, memory, compute_capability)  # first: its message explains how to give a memory
    arguments_of_kind(advise, locals())
    machine = machine or hardware.describe()
    on = target.find(machine, limit, named, device, context_memory, margin, processes)
    for name, value in (("effective_batch", effective_batch), ("processes", processes), ("most", most)):
        whole_number(name, value)
    if largest not in (None, *LARGEST):
        raise ValueError(f"largest={shown(largest)}: choose one of {', '.join(map(repr, LARGEST))}")
    if effective_batch % processes:
        raise ValueError(
            f"effective_batch={effective_batch} is not a multiple of processes={processes}: change one of the two"
        )
    must, weights, notes = _of_saved_quantized(task, must or {})
    native, base = native_precisions(machine, on.kind, on.capability), _base(task, weights, largest)
    choices = Choices(effective_batch // processes, must, avoid, native, may, base)
    if runs is None:
        runs = Store(hardware.cache_folder() / "runs.jsonl").read()
    evidence = Evidence(machine, on.kind, on.capability or DEFAULT_CAPABILITY, task, runs, published)
    ranking = Ranking(choices, evidence)
    options = {"device": on.kind, "processes": processes, "compute_capability": on.capability}
    predict = functools.partial(estimate, device_memory=on.allocator_bytes, **options)
    line = functools.partial(depth.line, **options)
    with progress.bar("advising", bar_format="{desc}: look {n}, {elapsed}{postfix}") as bar, within(timeout):
        enough = _with_enough_data(task, effective_batch)
        search = RecipeSearch(enough, on, choices, ranking, Once(bar), predict, line)
        if largest is None:
            fitting = search.find(most)
            smallest = None if fitting else search.smallest()
        else:
            search, leanest, does_fit, found = largest_of(search, largest)
            task, notes = search.task.replace(dataset_size=task.dataset_size), (*notes, found)
            fitting, smallest = ([leanest], None) if does_fit else ([], leanest)
        changes = helpful_changes(search, smallest) if smallest else ()
        beside = _notes(search, fitting[0], evidence, on.capability) if fitting else ()
    newer = dict.fromkeys(each.untested_torch for each in search.made if each.untested_torch)
    untested = [f"{untested_text(version)}." for version in newer]
    measured = [ranking.speed(candidate) for candidate in fitting if not ranking.unknown(candidate)]
    return Advice(
        task=task,
        weights=str(weights),
        memory_bytes=on.memory_bytes,
        effective_batch=effective_batch,
        processes=processes,
        device=on.kind,
        compute_capability=on.capability,
        context_bytes=on.context_bytes,
        margin_bytes=on.margin_bytes,
        recipes=tuple(_recipe(each, search, max(measured, default=None)) for each in fitting),
        smallest=smallest and _recipe(smallest, search, None),
        changes=changes,
        notes=(*on.notes, *notes, *on.kept, *search.notes, *untested, *beside),
        assumptions=tuple(dict.fromkeys(itertools.chain(*(each.assumptions for each in search.made)))),
        estimates=len(search.made),
    )


def _of_saved_quantized(task: Task, must: Mapping[str, Any]) -> tuple[dict[str, Any], Weights, tuple[str, ...]]:
    """Return (arguments in `must`, with LoRA if needed; type of the model's weights; notes for the user)."""
    fixed = Arguments.of(must)
    weights = task.weights(fixed.get("dtype"), fixed.quantization)
    if not weights.bits or fixed.quantization or "peft" in must:
        return dict(must), weights, ()
    # The model was saved quantized, and the user requires neither an adapter nor a quantization.
    note = f"{task.model} was saved in {weights.bits} bits, so only adapters can be trained: LoRA, rank 16."
    return dict(must) | LORA.arguments, weights, (note,)


def _base(task: Task, weights: Weights, largest: str | None) -> dict[str, Any]:
    """Return {"dtype": "float32"}, the default of every recipe; {} for a model that is quantized or loads in float32.

    `weights`: the type in which the task's model loads; `largest`: as in `advise`.
    """
    # Float32 is the default because techniques are described and ranked by how they change a model in float32.
    kind = task.build_config().model_type
    of_presets = {preset.get("dtype") for preset in PRESETS.values() if preset["model_type"] == kind}
    # With largest="model", all presets of the model type are candidates, so all must load in float32.
    loads_in_float32 = weights.dtype == "float32" and not (largest == "model" and of_presets != {None})
    return {} if loads_in_float32 or weights.bits else {"dtype": "float32"}


def verify(advice: Advice, runner: Runner | None = None) -> Verification:
    """Train a few steps with an advice's first recipe; return the measured peak next to the predicted peak, in bytes.

    If this machine (or the runner's) lacks the GPU that the advice is for, the training is rehearsed on a card with the
    advice's memory and CUDA context (see `trainmem.rehearsal`; its first use may take minutes).

    Args:
        advice: what `advise` returned.
        runner: trains the recipe, perhaps on another machine; None: a new `Runner`. A rehearsal does not use it.

    Raises:
        ValueError: the advice has no recipe, or is for a device that this machine neither has nor can rehearse.
        RuntimeError: a rehearsal cannot be set up; the message has the reason.
    """
    if not advice.recipes:
        raise ValueError("no recipe fits, so there is none to verify: apply one of `advice.changes` first")
    recipe, machine = advice.recipes[0], runner.machine if runner else hardware.describe()
    task = _with_enough_data(advice.task, advice.effective_batch)
    options = {"processes": advice.processes, **recipe.arguments}
    if _has_device(machine, advice):
        run = (runner or Runner()).train(recipe.name, task=task, measure="memory", **options)
    elif advice.device == "cpu" or (why := build.problem()):
        also = "" if advice.device == "cpu" else f"; {why}"
        raise ValueError(
            f"the advice is for {advice.device}, but this machine is {machine.name}: verify it where it will run{also}"
        )
    else:
        like = card_like(None, advice.compute_capability, advice.memory_bytes, advice.processes)
        run = rehearse(task, on=dataclasses.replace(like, context_bytes=advice.context_bytes), **options)
    predicted, found = recipe.peak_bytes, run.peak_bytes
    return Verification(recipe, run, predicted, found, None if found is None else predicted - found)


def _has_device(machine: hardware.Machine, advice: Advice) -> bool:
    """Return whether a machine has the device that an advice is for."""
    if advice.device != "cuda" or machine.kind != "cuda":
        return machine.kind == advice.device
    return any(gpu.capability in (None, advice.compute_capability) for gpu in machine.gpus)


def _with_enough_data(task: Task, effective_batch: int) -> Task:
    """Return a copy of the task with data for at least two updates of `effective_batch` samples."""
    # With less data, the last micro-batches of an epoch could have fewer samples than the recipe's micro-batch.
    return task.replace(dataset_size=max(task.dataset_size, 2 * effective_batch))


def _recipe(candidate: Candidate, search: RecipeSearch, best: float | None) -> Recipe:
    """Return the `Recipe` for a candidate found by `search`; its `speed` is relative to `best`.

    `best`: the highest known speed among the recipes that fit; None: no speed is known.
    """
    choices, ranking, size = search.choices, search.ranking, candidate.micro_batch
    needed, passes = search.needed(candidate), choices.samples // size
    costs = candidate.costs
    if passes > 1:
        costs.append(f"accumulation: {passes} passes of {size} per update, on smaller kernels")
    sources = tuple(map(str, ranking.factors(candidate)))
    why_not_next = "none of the recipes that need too much memory is expected to be faster"
    if search.of_the_leanest:
        why_not_next = "only the recipe that needs least was tried; without largest= other recipes are tried too"
    if faster := [other for other in search.too_large if ranking.key(other) < ranking.key(candidate)]:
        following = max(faster, key=ranking.key)
        its_needs = search.too_large[following]
        size_text, over = search.target.size_text, its_needs - search.target.room_bytes
        why_not_next = f"{choices.name(following)} needs {size_text(its_needs)}, {size_text(over)} too much"
    return Recipe(
        name=choices.name(candidate),
        arguments=choices.arguments(candidate),
        peak_bytes=search.estimates[candidate].peak_bytes,
        needed_bytes=needed,
        headroom_bytes=search.target.memory_bytes - needed,
        speed=ranking.speed(candidate) / best if best and not ranking.unknown(candidate) else None,
        speed_source=sources or ("the plain recipe: the one that others are compared with",),
        costs=tuple(costs),
        why_not_next=why_not_next,
    )


# ---- notes: techniques that recipes do not choose


def _notes(search: RecipeSearch, best: Candidate, evidence: Evidence, capability: tuple[int, int] | None) -> list[str]:
    """Return notes about the attention kernel, compiled code and padding for the best recipe that fits.

    `evidence`: measured effects of torch.compile; `capability`: of the GPU; None: a CPU, which needs no padding.
    """
    lines = [_attention(search.estimates[best].attention), _compiling(evidence)]
    return [*lines, *(_padding(search, best, 64 if capability >= (8, 0) else 8) if capability else ())]


def _attention(kernels: tuple[str, ...]) -> str:
    if kernels:
        return f"Attention uses the {' and '.join(kernels)} kernel, which stores no matrix of length x length."
    return "Attention uses no fused kernel: its matrix of length x length is among the activations."


def _compiling(evidence: Evidence) -> str:
    if (measured := evidence.of_compiling()) is None:
        how = "Measure it with lab.train(..., torch_compile=True); later advice uses the result"
        return f"The recipes leave torch.compile out, because the memory of compiled code cannot be estimated. {how}."
    speed, memory = measured
    return f"{speed}: at most {memory:.2f} x the peak. The recipes leave it out, because its memory is not estimated."


def _padding(search: RecipeSearch, best: Candidate, multiple: int) -> list[str]:
    """Return notes on a vocabulary that is no multiple of `multiple`, and a sequence length that is no multiple of 8.

    A GPU's matrix units need such multiples.
    """
    task, lines = search.task, []
    if task.family() in _FROM_VOCABULARY and (padded := task.with_padded_vocabulary(multiple)) != task:
        line = (
            f"The vocabulary is not a multiple of {multiple}: resize_token_embeddings(pad_to_multiple_of={multiple}) "
        )
        line += f"makes it {text_of(padded.build_config()).vocab_size}"
        with contextlib.suppress(ValueError):  # no time is left
            padded_peak = search.estimate(padded, search.choices.arguments(best)).peak_bytes
            line += f", and the peak changes by {(padded_peak - search.estimates[best].peak_bytes) / 1e6:+.3g} MB"
        lines.append(f"{line}.")
    if task.has_tokens and task.length() % 8:
        lines.append(f"{task.length()} tokens are not a multiple of 8: pad to {-(-task.length() // 8) * 8}.")
    return lines
