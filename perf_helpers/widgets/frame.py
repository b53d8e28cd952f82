"""The contract of everything in a lesson that can be moved or clicked.

- An interactive element has a *place*, a key such as `("predict", lesson, key)`. A new element at the same place closes
  the old one with its callbacks and threads, so that running a cell again leaves no second copy (see `take`).
- An element is shown in three forms at once: widgets for a front end, HTML for a static page, and text for a terminal
  (see `place`).
- No error of a callback is lost: an Output widget, which is part of the element, captures everything that a callback
  displays, prints or raises (`observe`, `Output.capture`). The notebook stores the Output widget's state, in which the
  course run finds the error. Outside IPython the error is raised in the code that changed the widget.
- An element is never wider than its cell (see `WHOLE_WIDTH`, `html_box`).
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipywidgets import HTML, Output, Widget

WHOLE_WIDTH = {"width": "auto", "max_width": "100%"}
ROW = {"display": "flex", "flex_flow": "row wrap", **WHOLE_WIDTH}  # layout of a Box whose children wrap


OPEN: dict[Hashable, Callable[[], None]] = {}  # {place: the function that closes the element shown there}


def take(key: Hashable, close: Callable[[], None]) -> None:
    """Close the old element at the place `key`; store `close`, the function that will close the new element there."""
    close_before = OPEN.pop(key, None)
    OPEN[key] = close
    if close_before:
        close_before()


def place(
    key: Hashable, parts: "Sequence[Widget]", static: str, plain: str, at_end: Callable[[], None] | None = None
) -> None:
    """Display widgets below each other; a static page shows `static` (HTML) instead, and a terminal `plain` (text).

    Args:
        key: the place, unique within this kernel; widgets that were displayed at this place before are closed.
        parts: the widgets, from top to bottom.
        at_end: called before these widgets are closed, e.g. to end a thread.
    """
    import ipywidgets
    from IPython.display import display

    box = ipywidgets.VBox(parts, layout=WHOLE_WIDTH)

    def close() -> None:
        if at_end:
            at_end()
        close_widget(box)

    take(key, close)
    display({"text/plain": plain, "text/html": static} | view(box), raw=True)


def view(widget: "Widget") -> dict[str, Any]:
    """Return the MIME bundle, {MIME type: content}, that makes a front end show a widget."""
    return {"application/vnd.jupyter.widget-view+json": widget.get_view_spec()}


def close_widget(widget: "Widget") -> None:
    """Close a widget and its children, with their layouts and styles, which are widgets too."""
    for child in getattr(widget, "children", ()):
        close_widget(child)
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None), widget):
        if part is not None:
            part.close()


def observe(controls: "Iterable[Widget]", function: Callable[[Any], None], output: "Output") -> Callable[..., None]:
    """Register a callback that calls `function` with each change of a control's value; return this callback.

    `output` captures what `function` displays, prints or raises.
    """
    callback = output.capture()(function)
    for control in controls:
        control.observe(callback, names="value")
    return callback


def html_box() -> "HTML":
    """Return a widget for HTML that is never wider than the notebook cell that shows it."""
    import ipywidgets

    return ipywidgets.HTML(layout={**WHOLE_WIDTH, "min_width": "0", "overflow": "hidden"})
