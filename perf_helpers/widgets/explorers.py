"""Explorers: pictures of memory and speed that change with their controls, each in a module of its own.

A lesson turns its own function that draws a picture into an explorer with `explore`.

An explorer keeps these rules, in addition to those in the docstring of `frame`:

- It is one public function with a `Lab`, or one or several `Run`s, as arguments. The function shows the explorer with
  `frame.place` and returns None. If there is nothing to explore, the function raises ValueError and shows nothing.
- Plain functions compute the content, so that tests need no widget; `svg` draws the content. The picture changes within
  150 ms after a control moves. If a thread must compute the new content first, the old picture is greyed out until
  then. A text also gives the values in the picture, with their units.
- Without a front end, `plots` draws a static picture or table for the first values of the controls.
- Slow work is done by one background thread. The thread begins when a control is first moved, waits while an experiment
  is measured (`SERVER.measuring`), and ends with its widget (`at_end` of `place`).
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
    """Show the picture that `draw` makes, and below it a control per keyword; a move of a control redraws the picture.

    Return the box of controls, already displayed. Without a front end only the first picture is shown.

    Args:
        draw: takes one value per keyword, draws on new axes and returns them (or anything that can be displayed).
        choices: {keyword of `draw`: the values on offer, beginning with the first one to show}.

    Raises:
        ValueError: a keyword has no values.
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
    code = getattr(draw, "__code__", None)  # its file and line are the same if the cell is run again
    key = getattr(code, "co_filename", ""), getattr(code, "co_firstlineno", repr(draw)), *choices
    take(key, partial(close_widget, box))
    display(box)
    return box


def _show(result: Any) -> None:
    """Display a picture and close its figure; display any other result unless it is None."""
    import matplotlib.pyplot as plt
    from IPython.display import display

    figure = getattr(result, "figure", None)
    if figure is not None:
        display(figure)
        plt.close(figure)
    elif result is not None:
        display(result)
