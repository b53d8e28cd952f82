"""Find the largest preset of a model type, or longest sequence, that fits a device with the recipe of least memory."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from trainmem import recipes as known
from trainmem.advise.search import Candidate, RecipeSearch, ahead, largest_that_fits
from trainmem.core.families import positions
from trainmem.core.task import PRESETS, Task
from trainmem.estimate.depth import layers_of, parameters

_STEP = 64  # tokens; lengths are tried in multiples of it
_MOST_TOKENS = 1 << 20
LARGEST = ("model", "sequence")  # quantities that can be maximized

Found = tuple[RecipeSearch, Candidate, bool, str]  # a search for the task found, its recipe, whether it fits, a note


def largest(search: RecipeSearch, what: str) -> Found:
    """Find the largest preset of the task's model type, or the longest sequence, that fits the target device.

    Return (the search for the found task, the recipe, whether this task fits with this recipe, a note for the user).
    The recipe needs the least memory for the given task. If nothing fits, the found task is the smallest one.

    Args:
        search: the search for recipes of the given task.
        what: one of `LARGEST`: "model" to find the largest preset, "sequence" to find the longest sequence.

    Raises:
        ValueError: for "model": no preset of the task's model type takes sequences of the task's length; for
            "sequence": the model takes no sequences.
    """
    search = dataclasses.replace(search, of_the_leanest=True)
    return _model(search) if what == "model" else _sequence(search)


def _model(search: RecipeSearch) -> Found:
    alike = _alike(search.task)
    with ThreadPoolExecutor(1) as pool:
        counted = ahead(pool, parameters, [search.task, *alike])
        candidate = _leanest(search)
        (size, *sizes), needed = counted.result(), search.about(candidate)[1]
    sizes, rungs = zip(*sorted(zip(sizes, alike, strict=True), key=lambda row: (row[0], row[1].model)), strict=True)
    # Start at the size that would fit if every model needed as much per parameter as the task does.
    first = sum(needed / size * each <= search.target.room_bytes for each in sizes)
    search.trace_ahead((search.at(rung), candidate) for rung in rungs[max(first - 1, 0) : first + 1])
    found, reached = search.furthest(candidate, range(1, len(rungs) + 1), lambda number: rungs[number - 1], first)
    note = f"Tried: {', '.join(rung.model for rung in rungs)}."
    if found and found < len(rungs):
        note += _of_the_next(search.at(rungs[found]), candidate)
    return reached, candidate, bool(found), note


def _of_the_next(search: RecipeSearch, candidate: Candidate) -> str:
    """Return a note on the task of `search`, whose preset is the next in size after the largest that fits."""
    task = search.task
    if not (layers := layers_of(task)):  # the preset's memory by number of layers is not known
        return f" {task.model} does not fit."
    line, (_, needed) = search.line_of(candidate), search.about(candidate)
    room = search.target.room_bytes - search.target.context_bytes
    fewer = largest_that_fits(range(1, layers), lambda n: line.at(n)[1] <= room, layers // 2)
    note = f" {task.model} needs about {search.target.size_text(needed)}"
    if not fewer:
        return f"{note}."
    (size,) = parameters([task.with_text(num_hidden_layers=fewer)])
    return f"{note}; with {fewer} of its {layers} layers ({size / 1e9:.1f} billion parameters) it would just fit."


def _sequence(search: RecipeSearch) -> Found:
    task, candidate = search.task, _leanest(search)
    if not task.has_tokens:
        raise ValueError(f"largest='sequence': {task.model} takes images, not sequences. Use largest='model'")
    most = min(positions(task.build_config()) or _MOST_TOKENS, _MOST_TOKENS)
    lengths = range(min(max(_STEP, -(-task.shortest() // _STEP) * _STEP), most), most + 1, _STEP)
    found, reached = search.furthest(candidate, lengths, lambda n: task.replace(seq_len=n), task.length())
    note = f"Tried lengths in steps of {_STEP} tokens"
    note += f"; {task.model} has no more positions." if found == lengths[-1] else "."
    return reached, candidate, bool(found), note


def _alike(task: Task) -> Sequence[Task]:
    """Return a copy of the task for each preset of the same model type that takes the task's sequence length."""
    kind = task.build_config().model_type
    named = [dataclasses.replace(task, model=n, config={}) for n, it in PRESETS.items() if it["model_type"] == kind]
    length = task.length()
    named = [each for each in named if (positions(each.build_config()) or length) >= length]
    if not named:
        raise ValueError(
            f"largest='model': no preset is similar to {task.model} with {length} tokens. Use another model"
        )
    return named


def _leanest(search: RecipeSearch) -> Candidate:
    """Return the recipe (techniques and a micro-batch) that needs the least memory."""
    left = search.choices.candidates
    for technique in (*known.ADAPTERS, known.CHECKPOINTING):  # as far as the search allows them
        left = [each for each in left if technique in each.techniques] or left
    if not set(known.ADAPTERS).isdisjoint(left[0].techniques):  # few weights are trained: any optimizer is small
        left = [each for each in left if known.ADAMW in each.techniques] or left
    left = [each._replace(micro_batch=search.choices.micro_batches[0]) for each in left]
    search.trace_ahead((search, each) for each in left)
    return min(left, key=lambda each: search.about(each)[1]) if len(left) > 1 else left[0]
