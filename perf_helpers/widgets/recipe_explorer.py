"""The recipe explorer: a picture of memory against speed for all runs and estimates, with arguments to copy."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perf_helpers import plots
from perf_helpers.lab import Lab
from perf_helpers.widgets import svg
from perf_helpers.widgets.frame import ROW, WHOLE_WIDTH, html_box, observe, place
from trainmem.cards import SIZES
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.estimate import MemoryEstimate, estimates_so_far
from trainmem.records import Run
from trainmem.texts import bytes_text, number_text


def recipes(lab: Lab) -> None:
    """Show memory against throughput for all runs and estimates so far, and the arguments of the selected recipe.

    A run without a measured speed is drawn below the plot, one without measured memory to the left. Throughputs of
    different days are never in one picture; a menu offers the earlier runs of this machine by day.

    Raises:
        ValueError: nothing is measured yet, and no run failed.
        RunFailed: nothing is measured yet, and a run failed.
    """
    import ipywidgets

    groups = _groups(lab)
    if not groups:
        text = "no run has its memory or its speed measured yet: train something first"
        raise plots.no_data_error(lab.runs, text)
    wide = {"layout": {**WHOLE_WIDTH, "flex": "1 1 18em"}}
    group = ipywidgets.Dropdown(options=list(groups), description="runs of", **wide)
    card = ipywidgets.Dropdown(options=[("any", 0), *SIZES.items()], description="fits on", **wide)
    limit = ipywidgets.FloatText(value=0, description="or MB", tooltip="0: no limit", **wide)
    select = ipywidgets.Select(description="recipe", rows=8, layout=WHOLE_WIDTH)
    picture, text, output = html_box(), html_box(), ipywidgets.Output()

    def offer(_=None) -> None:
        offered, before = groups[group.value], select.value
        if limits := [size for size in (card.value, limit.value * 1e6) if size]:
            offered = [recipe for recipe in offered if recipe.is_sized and recipe.peak_bytes <= min(limits)]
        best = svg.best_of_both(offered)
        select.options = [(recipe.line(recipe in best), recipe) for recipe in offered]
        select.value = next(iter([*best, *offered]), None)
        if select.value is before:
            draw()

    def draw(_=None) -> None:
        chosen = select.value
        if chosen is None:
            picture.value, text.value = "Nothing fits.", ""
            return
        limits = SIZES | ({"limit": limit.value * 1e6} if limit.value else {})
        picture.value = svg.scatter([recipe for _, recipe in select.options], chosen, limits)
        code = html.escape(Arguments(chosen.arguments).to_python())
        text.value = f"<b>{html.escape(chosen.name)}</b>, {html.escape(chosen.task)}<pre>{code}</pre>"

    observe([group, card, limit], offer, output)
    observe([select], draw, output)
    offer()
    parts = [ipywidgets.Box([group, card, limit], layout=ROW), picture, select, text, output]
    table = _table(next(iter(groups.values())))
    place(("recipes", lab.lesson), parts, table._repr_html_(), repr(table))


@dataclass(frozen=True, slots=True, eq=False)
class Recipe(svg.Point):
    """A run or an estimate as a point of the explorer's picture, with its training arguments and its task."""

    arguments: dict[str, Any]  # training arguments
    task: str  # in words

    @classmethod
    def of(cls, source: Run | MemoryEstimate) -> "Recipe":
        kind = source.memory.kind if source.memory else "timed only"
        speed = getattr(source, "samples_per_second", None)  # no estimate has one
        task = str(Task.from_dict(source.task))
        return cls(source.name, kind, source.peak_bytes, speed, dict(source.arguments), task)

    @property
    def label(self) -> str:
        return f"{self.name} ({self.kind})"

    def line(self, is_best: bool) -> str:
        """Return the recipe's line in the list to select from, with a star if `is_best` (see `svg.best_of_both`)."""
        return f"{self.memory_text}, {self.speed_text}: {self.label}{' ★' if is_best else ''}"


def _groups(lab: Lab) -> dict[str, list[Recipe]]:
    """Return {label: recipes by peak}, a group per model and source: this notebook, or one day's earlier runs."""
    session, machine = {run.id for run in lab.runs}, lab.machine
    here = [run for run in lab.runs if run.ok]
    here += [estimate for estimate in estimates_so_far() if estimate.device == machine.kind]
    earlier = [run for run in lab.store.read() if run.ok and run.id not in session]
    sources = [("this notebook", source) for source in here]
    sources += [(run.date[:10], run) for run in earlier if run.machine.get("name") == machine.name]
    groups: dict[str, dict[tuple[str, str], Recipe]] = {}
    for when, source in sources:
        recipe = Recipe.of(source)
        if recipe.arguments and (recipe.is_sized or recipe.is_timed):
            group = groups.setdefault(f"{when}: {Task.from_dict(source.task).model}", {})
            group[recipe.label, repr(sorted(recipe.arguments.items()))] = recipe  # the later of two equal ones stays
    first = f"this notebook: {lab.task.model}"
    labels = sorted(groups, key=lambda label: (label != first, not label.startswith("this"), label))
    return {label: sorted(groups[label].values(), key=_size) for label in labels}


def _size(recipe: Recipe) -> float:
    return recipe.peak_bytes if recipe.is_sized else math.inf


def _table(recipes: Sequence[Recipe]) -> plots.Table:
    """Return the table of recipes that replaces the picture if there is no front end for widgets."""
    best, rows = svg.best_of_both(recipes), []
    for recipe in recipes:
        arguments = ", ".join(f"{name}={value!r}" for name, value in recipe.arguments.items())
        peak, speed = bytes_text(recipe.peak_bytes), number_text(recipe.samples_per_second, digits=3)
        rows.append([recipe.label, peak, speed, "yes" if recipe in best else "", arguments])
    return plots.Table(["recipe", "peak", "samples/s", "best of both", "arguments"], rows)
