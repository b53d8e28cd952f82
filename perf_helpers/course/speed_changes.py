"""The pace of recipes then and now (`lab/step_times.py`): which steps became slower, beyond the noise of both.

A night's noise is how far the two fastest processes of a recipe lie apart, in the mean of its recipes. A recipe, and
all of them together, have moved where they differ by more than FAR times the noise of both nights beyond LEAST: so much
the same code differed at other times (results/README.md, "Nights").
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from perf_helpers.texts import seconds_text

LEAST = {"one": 1.15, "all": 1.08}  # the factor that counts at least, of one recipe and of all together
FAR = 3.0
CLOCKS = {"computed": "computes", "passed": "takes"}
MANY = 3  # recipes that are "all together"


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """A recipe whose step takes longer or shorter; or all of them, on the whole."""

    recipe: str  # empty: all of them
    old: str
    new: str
    ratio: float  # new / old seconds
    is_slower: bool  # one recipe: than all of them together became
    text: str


def moved(old: dict[str, Any] | None, new: dict[str, Any] | None) -> tuple[list[SpeedChange], list[str]]:
    """What moved between the paces of two nights, and notes on what was compared and how well it could be told.

    Args:
        old, new: of `paces.measure`; None where a night has none.
    """
    if not old or not new:
        return [], ["speed not compared: " + ("the old run" if not old else "this run") + " timed no recipes"]
    if old["task"] != new["task"] or old["threads"] != new["threads"]:
        return [], ["speed not compared: another task was timed"]
    changes: dict[str, SpeedChange] = {}  # by recipe; a step that computes for longer also takes longer: told once
    notes = []
    for clock, verb in CLOCKS.items():
        found = _of_clock(old["recipes"], new["recipes"], clock)
        if not found:
            continue
        ratios, far = found
        whole = statistics.median(ratios.values())
        limit = {"one": math.log(LEAST["one"]) + FAR * far, "all": math.log(LEAST["all"]) + FAR * far / 2}
        one, every = (f"{math.exp(limit[name]) - 1:.0%}" for name in ("one", "all"))
        told = f"a change is told beyond {one} of one, {every} of all together"
        notes.append(f"speed, seconds that a step {verb}: {len(ratios)} recipes; {told}")
        if len(ratios) >= MANY and abs(whole) > limit["all"]:
            changes.setdefault("", _change("", whole, 0.0, "", "", verb))
        else:
            whole = 0.0
        for name, ratio in ratios.items():
            if abs(ratio - whole) > limit["one"]:
                seconds = [seconds_text(min(paces[name][clock])) for paces in (old["recipes"], new["recipes"])]
                changes.setdefault(name, _change(name, ratio, whole, *seconds, verb))
    return [*changes.values()], notes or ["speed not compared: no recipe was timed in both"]


def _of_clock(old: dict, new: dict, clock: str) -> tuple[dict[str, float], float] | None:
    """By recipe the logarithm of new / old seconds, by the fastest of all processes; and the noise of both nights."""
    both = [name for name in new if name in old and old[name].get(clock) and new[name].get(clock)]
    both = [name for name in both if old[name]["arguments"] == new[name]["arguments"]]
    if not both:
        return None
    ratios = {name: math.log(min(new[name][clock]) / min(old[name][clock])) for name in both}
    return ratios, math.hypot(*(_noise([paces[name][clock] for name in both]) for paces in (old, new)))


def _noise(seconds: list[list[float]]) -> float:
    """How far the fastest process of a recipe lies from the next one, in the mean of all recipes, as a logarithm."""
    pairs = (sorted(each)[:2] for each in seconds)
    return statistics.fmean(math.log(pair[-1] / pair[0]) for pair in pairs)


def _change(recipe: str, ratio: float, whole: float, old: str, new: str, verb: str) -> SpeedChange:
    between = f"{old} -> {new}, " if old else ""
    text = f"{between}a step {verb} {math.exp(ratio):.2f} x as long"
    text += f", where all together take {math.exp(whole):.2f} x" if whole else ""
    return SpeedChange(recipe, old, new, math.exp(ratio), ratio > whole, text)


def fastest(paces: dict[str, Any] | None) -> Iterator[tuple[str, float]]:
    """(recipe, seconds of its fastest step) of a night, by the clock that sees all of a step where there is one."""
    for name, pace in ((paces or {}).get("recipes") or {}).items():
        if seconds := pace.get("passed") or pace.get("computed"):
            yield name, min(seconds)
