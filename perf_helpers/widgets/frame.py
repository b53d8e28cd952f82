"""The one contract of everything in a lesson that can be moved or clicked.

- It stands at a *place*, named by what it is and whose: `("predict", lesson, key)`. What comes to a place closes what
  stood there, its callbacks and threads with it, so that a cell that is run again leaves nothing twice: `take`.
- It is shown as three things at once: its widgets for a front end, HTML for a page without one, and text for a
  terminal: `place`.
- No error of a callback is lost: each is `guarded` by an Output widget that is one of its parts. Its state is kept in
  the notebook, where the course run finds the error.
- It is never wider than its cell: `WHOLE_WIDTH`, `html_box`.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipywidgets import HTML, Output, Widget

WHOLE_WIDTH = {"width": "auto", "max_width": "100%"}
ROW = {"display": "flex", "flex_flow": "row wrap", **WHOLE_WIDTH}  # of a Box whose children go to the next line


# What this kernel shows, by its place: what ends it, and what is known of it.
STANDING: dict[Hashable, tuple[Callable[[], None], Any]] = {}


def take(where: Hashable, close: Callable[[], None], about: Any = None) -> None:
    """Stand at a place, after what stood there before is closed; `close` is called when something else comes. Until
    then, `about_place(where)` answers `about`."""
    close_before, _ = STANDING.pop(where, (None, None))
    STANDING[where] = close, about
    if close_before:
        close_before()


def about_place(where: Hashable) -> Any:
    """What is known about that which stands at a place; None where nothing stands there."""
    return STANDING.get(where, (None, None))[1]


def place(
    where: Hashable,
    parts: "Sequence[Widget]",
    static: str,
    plain: str,
    at_end: Callable[[], None] | None = None,
    about: Any = None,
) -> None:
    """Display parts under each other where there is a front end, `static` (HTML) or `plain` (text) where there is none.

    Args:
        where: names the place among all of this kernel; what stands there is closed.
        at_end: called before these parts are closed, e.g. to end a thread.
        about: what a later cell can ask of it, see `about_place`.
    """
    import ipywidgets
    from IPython.display import display

    box = ipywidgets.VBox(parts, layout=WHOLE_WIDTH)

    def close() -> None:
        if at_end:
            at_end()
        close_widget(box)

    take(where, close, about)
    display({"text/plain": plain, "text/html": static} | view(box), raw=True)


def view(widget: "Widget") -> dict[str, Any]:
    """What a front end is told to show a widget."""
    content = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": content}


def close_widget(widget: "Widget") -> None:
    """Close a widget, all that it contains, and their layouts and styles, which are widgets too."""
    for child in getattr(widget, "children", ()):
        close_widget(child)
    for part in (getattr(widget, "layout", None), getattr(widget, "style", None), widget):
        if part is not None:
            part.close()


def guarded(function: Callable[..., None], output: "Output") -> Callable[..., None]:
    """`function` as a widget's callback that loses no error.

    What it displays, prints or raises goes to `output`, which the widget has to show. Outside IPython the error is
    raised on, to whoever changed the widget.
    """

    def callback(*arguments):
        with output:
            function(*arguments)

    return callback


def observe(controls: "Iterable[Widget]", function: Callable[[Any], None], output: "Output") -> Callable[..., None]:
    """Call a function, guarded, whenever one of these controls changes its value. Returns the callback."""
    callback = guarded(function, output)
    for control in controls:
        control.observe(callback, names="value")
    return callback


def html_box() -> "HTML":
    """A widget for HTML that is never wider than its cell."""
    import ipywidgets

    return ipywidgets.HTML(layout={**WHOLE_WIDTH, "min_width": "0", "overflow": "hidden"})
