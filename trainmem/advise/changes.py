"""Calculate, if no recipe of an advice fits, which changes would make the recipe with the least memory fit."""

import math
from dataclasses import dataclass

from trainmem.advise.search import Candidate, RecipeSearch
from trainmem.estimate.depth import STATES

_STEP = 8  # tokens: lengths are tried in multiples of it


@dataclass(frozen=True, slots=True)
class Change:
    """Hold one change of the recipe that needs the least memory, the bytes needed after the change, and if they fit.

    If no sequence length makes the recipe fit, `needed_bytes` is for the shortest length. If sharding can never make it
    fit, `needed_bytes` are the bytes that cannot be divided among devices. In both cases `text` says so.
    """

    name: str  # "fewer tokens", "sharding" or "offload"
    text: str  # what exactly to change
    fits: bool
    needed_bytes: int  # on one device after the change
    assumption: str = ""  # what the calculation of `needed_bytes` assumes; empty if they were estimated


def helpful_changes(search: RecipeSearch, smallest: Candidate) -> tuple[Change, ...]:
    """Return changes that reduce the memory of the recipe `smallest`; changes with which the recipe fits come first."""
    needed, estimated = search.needed(smallest), search.estimates[smallest]
    # {category: live bytes} at the peak and at the end of each phase; bytes needed on top, e.g. for the CUDA context.
    breakdowns = [estimated.memory.breakdown, *(estimated.memory.phase_breakdowns or {}).values()]
    on_top = needed - estimated.peak_bytes
    changes = [_shorter(search, smallest), _sharded(search, smallest.micro_batch, breakdowns, on_top)]
    changes.append(_offloaded(search, breakdowns, on_top))
    return tuple(sorted(filter(None, changes), key=lambda change: not change.fits))


def _shorter(search: RecipeSearch, smallest: Candidate) -> Change | None:
    """Return the change that shortens sequences until the recipe `smallest` fits; None if they cannot be shortened."""
    task = search.task
    if not task.has_tokens or task.length() <= _STEP:
        return None
    lengths = range(-(-task.shortest() // _STEP) * _STEP, task.length(), _STEP)
    if not lengths:
        return None
    length, reached = search.furthest(smallest, lengths, lambda n: task.replace(seq_len=n), task.length() // 2)
    text = f"seq_len={length} instead of {task.length()}, the longest multiple of {_STEP} that fits"
    if not length:
        text = f"no length fits; the bytes are those of {lengths[0]} tokens"
    return Change("fewer tokens", text, bool(length), reached.needed(smallest))


def _sharded(search: RecipeSearch, size: int, breakdowns: list[dict[str, int]], on_top: int) -> Change:
    """Return the change that divides weights, gradients and optimizer states among the fewest devices that suffice.

    `size`: samples of the micro-batch; `breakdowns`, `on_top`: see `helpful_changes`.
    """
    assumption = (
        "Sharding: only weights, gradients and optimizer states are divided by the number of devices; the layer "
        "that is gathered at a time is not counted."
    )
    limit, samples = search.target.room_bytes, search.choices.samples
    shared = [sum(parts.get(name, 0) for name in STATES) for parts in breakdowns]
    both = [(part, sum(parts.values()) - part + on_top) for part, parts in zip(shared, breakdowns, strict=True)]
    undivided = max(rest for _, rest in both)
    if undivided >= limit:
        text = "no number of devices suffices; the bytes are those that cannot be sharded"
        return Change("sharding", text, False, undivided, assumption)
    least = max(2, *(math.ceil(part / (limit - rest)) for part, rest in both))
    devices = next((count for count in range(least, samples + 1) if samples % count == 0), None)
    needed = max(round(part / (devices or least)) + rest for part, rest in both)
    text = f"over {devices or least} devices, at most {size} {'sample' if size == 1 else 'samples'} each at a time"
    if devices is None:
        text += f": {samples} samples per update are too few for so many devices, raise the effective batch"
    return Change("sharding", text, devices is not None, needed, assumption)


def _offloaded(search: RecipeSearch, breakdowns: list[dict[str, int]], on_top: int) -> Change | None:
    """Return the change that keeps the optimizer states on the host; None if there are no such states.

    `breakdowns`, `on_top`: see `helpful_changes`.
    """
    states = max(parts["optimizer_states"] for parts in breakdowns)
    if not states:
        return None
    needed = max(sum(parts.values()) - parts["optimizer_states"] for parts in breakdowns) + on_top
    assumption = "Offload: only the optimizer states and their update move to the host."
    text = f"optimizer states off the device: {search.target.size_text(states)} on the host"
    return Change("offload", text, needed <= search.target.room_bytes, needed, assumption)
