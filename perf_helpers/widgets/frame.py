"""The one contract of everything in a lesson that can be moved or clicked.

- It stands at a *place*, named by what it is and whose: `("predict", lesson, key)`. What comes to a place closes what
  stood there, its callbacks and threads with it, so that a cell that is run again leaves nothing twice: `take`.
- It is shown as three things at once: its widgets for a front end, HTML for a page without one, and text for a
  terminal: `place`.
- No error of a callback is lost: an Output widget that is one of its parts captures what each displays, prints or
  raises (`observe`, `Output.capture`). Its state is kept in the notebook, where the course run finds the error. Outside
  IPython an error is raised on, to whoever changed the widget.
- It is never wider than its cell: `WHOLE_WIDTH`, `html_box`.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipywidgets import HTML, Output, Widget

WHOLE_WIDTH = {"width": "auto", "max_width": "100%"}
ROW = {"display": "flex", "flex_flow": "row wrap", **WHOLE_WIDTH}  # of a Box whose children go to the next line


STANDING: dict[Hashable, Callable[[], None]] = {}  # what ends that which this kernel shows, by its place


def take(where: Hashable, close: Callable[[], None]) -> None:
    """Stand at a place, after what stood there before is closed; `close` is called when something else comes."""
    close_before = STANDING.pop(where, None)
    STANDING[where] = close
    if close_before:
        close_before()


def place(
    where: Hashable, parts: "Sequence[Widget]", static: str, plain: str, at_end: Callable[[], None] | None = None
) -> None:
    """Display parts under each other where there is a front end, `static` (HTML) or `plain` (text) where there is none.

    Args:
        where: names the place among all of this kernel; what stands there is closed.
        at_end: called before these parts are closed, e.g. to end a thread.
    """
    import ipywidgets
    from IPython.display import display

    box = ipywidgets.VBox(parts, layout=WHOLE_WIDTH)

    def close() -> None:
        if at_end:
            at_end()
        close_widget(box)

    take(where, close)
    display({"text/plain": plain, "text/html": static} | view(box), raw=True)


def view(widget: "Widget") -> dict[str, Any]:
    """What a front end is told to show a widget."""
    return {"application/vnd.jupyter.widget-view+json": widget.get_view_spec()}


def close_widget(widget: "Widget") -> None:
    """Close a widget, all that it contains, and their layouts and styles, which are widgets too."""
    for child in getattr(widget, "children", ()):
        close_widget(child)
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None), widget):
        if part is not None:
            part.close()


def observe(controls: "Iterable[Widget]", function: Callable[[Any], None], output: "Output") -> Callable[..., None]:
    """Call a function, captured by `output`, whenever one of these controls changes its value. Returns the callback."""
    callback = output.capture()(function)
    for control in controls:
        control.observe(callback, names="value")
    return callback


def html_box() -> "HTML":
    """A widget for HTML that is never wider than its cell."""
    import ipywidgets

    return ipywidgets.HTML(layout={**WHOLE_WIDTH, "min_width": "0", "overflow": "hidden"})
