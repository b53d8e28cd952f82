"""Widgets of the lessons. Each also leaves a static picture, for places without a front end."""

import traceback
from collections.abc import Callable, Sequence
from typing import Any


def explore(draw: Callable[..., Any], **choices: Sequence[Any]):
    """Show `draw(first choice of each)` as a picture, and under it a control for each choice that draws anew.

    Args:
        draw: takes one value of each choice, draws on axes of its own and returns them (or anything that displays).
        choices: for each keyword of `draw`, the values offered, the one to start with first.

    Returns:
        The box of controls (ipywidgets), already displayed.

    Raises:
        ValueError: a choice without values.
    """
    import ipywidgets
    from IPython.display import display

    for name, values in choices.items():
        if not list(values):
            raise ValueError(f"{name}: no values to choose from")
    _show(draw(**{name: values[0] for name, values in choices.items()}))
    output = ipywidgets.Output()
    controls = {
        name: ipywidgets.SelectionSlider(
            options=[(str(value), value) for value in values],
            description=name.replace("_", " "),
            style={"description_width": "initial"},
            continuous_update=False,
        )
        for name, values in choices.items()
    }

    def redraw(_):
        output.clear_output(wait=True)
        with output:  # an error is shown here and kept in the notebook, where the course run finds it
            try:
                _show(draw(**{name: control.value for name, control in controls.items()}))
            except Exception:
                traceback.print_exc()
                raise

    for control in controls.values():
        control.observe(redraw, names="value")
    box = ipywidgets.VBox([*controls.values(), output])
    display(box)
    return box


def _show(result: Any) -> None:
    import matplotlib.pyplot as plt
    from IPython.display import display

    figure = getattr(result, "figure", None)
    if figure is not None:
        display(figure)
        plt.close(figure)
    elif result is not None:
        display(result)
