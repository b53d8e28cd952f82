"""What would help where nothing fits: shorter sequences, sharding over more devices, optimizer states on the host.

Each is worked out for the smallest recipe from its estimate: nothing is trained, and what was assumed is said.
"""

import math
from dataclasses import dataclass

from perf_helpers.advise.choices import Candidate
from perf_helpers.advise.search import UNKNOWN_CONTEXT_BYTES, RecipeSearch, Search
from perf_helpers.texts import bytes_text

_SHARDED = ("weights", "gradients", "optimizer_states")
_STEP = 8  # tokens: lengths are tried in multiples of it


@dataclass(frozen=True, slots=True)
class Change:
    """A change to the smallest recipe, and whether it would fit then."""

    name: str  # "fewer tokens", "sharding" or "offload"
    text: str  # what exactly to change
    fits: bool
    needed_bytes: int  # on one device after the change; where no size of it would do, after the largest
    assumption: str = ""  # behind `needed_bytes`, where that is not estimated but calculated


def remedies(search: RecipeSearch, smallest: Candidate) -> tuple[Change, ...]:
    """What would make a recipe fit, what does first."""
    changes = [remedy(search, smallest) for remedy in (_shorter, _sharded, _offloaded)]
    return tuple(sorted(filter(None, changes), key=lambda change: not change.fits))


def _shorter(search: RecipeSearch, smallest: Candidate) -> Change | None:
    """The longest sequence that fits; None where a task has no length to shorten."""
    task = search.task
    if task.family() == "vision" or task.length() <= _STEP:
        return None
    arguments, lengths = search.choices.arguments(smallest), range(_STEP, task.length(), _STEP)

    def needed(length: int) -> int:
        return search.estimate(arguments, seq_len=length).needed_bytes(UNKNOWN_CONTEXT_BYTES)

    shorter = Search(lengths, needed, search.limit)
    index = shorter.run()
    if index < 0:
        return Change("fewer tokens", f"no length would do: this is for {_STEP} tokens", False, shorter.at(0))
    text = f"seq_len={lengths[index]} instead of {task.length()}, the longest by steps of {_STEP}"
    return Change("fewer tokens", text, True, shorter.at(index))


def _sharded(search: RecipeSearch, smallest: Candidate) -> Change:
    """Weights, gradients and optimizer states divided by the number of devices, wherever they are known."""
    breakdowns, on_top = _breakdowns(search, smallest)
    limit, samples, size = search.limit, search.choices.samples, smallest.micro_batch
    shared = [sum(parts.get(name, 0) for name in _SHARDED) for parts in breakdowns]
    whole = [sum(parts.values()) - part + on_top for parts, part in zip(breakdowns, shared, strict=True)]
    assumption = (
        "Sharding: weights, gradients and optimizer states are divided by the number of devices and nothing else; "
        "the layer that is gathered for its turn is not counted."
    )
    if max(whole) >= limit:
        text = "no number of devices would do: this is for what cannot be divided"
        return Change("sharding", text, False, max(whole), assumption)
    least = max(2, *(math.ceil(part / (limit - rest)) for part, rest in zip(shared, whole, strict=True)))
    devices = next((count for count in range(least, samples + 1) if samples % count == 0), None)
    needed = max(round(part / (devices or least)) + rest for part, rest in zip(shared, whole, strict=True))
    text = f"over {devices or least} devices, at most {size} {'sample' if size == 1 else 'samples'} each at a time"
    if devices is None:
        text += f": {samples} samples a step cannot be shared by so many, the effective batch grows too"
    return Change("sharding", text, devices is not None, needed, assumption)


def _offloaded(search: RecipeSearch, smallest: Candidate) -> Change | None:
    """The optimizer states on the host; None where there are none."""
    breakdowns, on_top = _breakdowns(search, smallest)
    states = max(parts["optimizer_states"] for parts in breakdowns)
    if not states:
        return None
    needed = max(sum(parts.values()) - parts["optimizer_states"] for parts in breakdowns) + on_top
    assumption = "Offload: the optimizer states and their update are on the host, and nothing else moves."
    text = f"optimizer states off the device: {bytes_text(states)} on the host"
    return Change("offload", text, needed <= search.limit, needed, assumption)


def _breakdowns(search: RecipeSearch, smallest: Candidate) -> tuple[list[dict[str, int]], int]:
    """Bytes by category at the peak and at the end of each phase, and what is needed on top of what is alive."""
    estimated = search.estimates[smallest]
    breakdowns = [estimated.memory.breakdown, *(estimated.memory.phase_breakdowns or {}).values()]
    return breakdowns, search.needed(smallest) - estimated.peak_bytes
