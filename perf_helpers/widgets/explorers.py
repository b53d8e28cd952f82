"""Explorers: pictures of memory and speed that follow their controls, each in a module of its own; and `explore`, for a
picture that a lesson's own function draws.

The contract of an explorer, beside that of `frame`:

- It is one public function, which takes a lab or runs, shows itself with `frame.place` and returns None. It raises
  ValueError where there is nothing to explore, before anything is shown.
- What is shown is computed by plain functions, which tests call without a widget, and drawn by `svg`. A move of a
  control answers within 150 ms, with a greyed picture if a thread has to compute first. The picture says its values
  and units in words too.
- Without a front end a static picture or table of where it started stays, from `plots`.
- What takes longer than a glance is done by one thread in the background. It begins when a control is first moved,
  waits while an experiment is measured (`SERVER.measuring`), and ends with its widget (`at_end` of `place`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from perf_helpers.widgets.frame import close_widget, observe, take
from perf_helpers.widgets.memory_explorer import memory
from perf_helpers.widgets.recipe_explorer import recipes
from perf_helpers.widgets.timeline_explorer import timeline

if TYPE_CHECKING:
    from ipywidgets import VBox

__all__ = ["explore", "memory", "recipes", "timeline"]


def explore(draw: Callable[..., Any], **choices: Sequence[Any]) -> "VBox":
    """Show `draw(first choice of each)` as a picture, and under it a control for each choice that draws anew.

    Without a front end the first picture stays.

    Args:
        draw: takes one value of each choice, draws on axes of its own and returns them (or anything that displays).
        choices: for each keyword of `draw`, the values offered, the one to start with first.

    Returns:
        The box of controls, already displayed.

    Raises:
        ValueError: a choice without values.
    """
    import ipywidgets
    from IPython.display import display

    if empty := [name for name, values in choices.items() if not list(values)]:
        raise ValueError(f"{empty[0]} is empty: give at least one value to choose from")
    _show(draw(**{name: values[0] for name, values in choices.items()}))
    output, styled = ipywidgets.Output(), {"style": {"description_width": "initial"}, "layout": {"max_width": "100%"}}
    controls = {}
    for name, values in choices.items():
        named = {"options": [(str(value), value) for value in values], "description": name.replace("_", " ")}
        controls[name] = ipywidgets.SelectionSlider(**named, **styled, continuous_update=False)

    def redraw(_):
        output.clear_output(wait=True)
        _show(draw(**{name: control.value for name, control in controls.items()}))

    observe(controls.values(), redraw, output)
    box = ipywidgets.VBox([*controls.values(), output], layout={"max_width": "100%"})
    code = getattr(draw, "__code__", None)  # of the same cell, if it is run again
    where = getattr(code, "co_filename", ""), getattr(code, "co_firstlineno", repr(draw)), *choices
    take(where, partial(close_widget, box))
    display(box)
    return box


def _show(result: Any) -> None:
    """Display a picture and close its figure, or display anything else but None."""
    import matplotlib.pyplot as plt
    from IPython.display import display

    figure = getattr(result, "figure", None)
    if figure is not None:
        display(figure)
        plt.close(figure)
    elif result is not None:
        display(result)
