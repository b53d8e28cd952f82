"""The one contract of everything in a lesson that can be moved or clicked.

- It stands at a *place*, named by what it is and whose: `("predict", lesson, key)`. What comes to a place closes what
  stood there, its callbacks and threads with it, so that a cell that is run again leaves nothing twice: `PLACES`.
- It is shown as three things at once: its box of widgets for a front end, HTML for a page without one, and text for a
  terminal: `place`.
- No error of a callback is lost: each is `guarded` by an Output widget that is part of the box. Its state is kept in
  the notebook, where the course run finds the error.
- It is never wider than its cell: `WHOLE_WIDTH`, `html_box`.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ipywidgets import HTML, Output, Widget

WHOLE_WIDTH = {"width": "auto", "max_width": "100%"}
ROW = {"display": "flex", "flex_flow": "row wrap", **WHOLE_WIDTH}  # of a Box whose children go to the next line


@dataclass(frozen=True, slots=True)
class _Standing:
    close: Callable[[], None]  # ends it
    about: Any  # what a later cell asks of it


class Places:
    """What this kernel shows or runs, by its place. All methods may be called from any thread."""

    def __init__(self):
        self._standing: dict[Hashable, _Standing] = {}
        self._lock = threading.Lock()

    def take(self, where: Hashable, close: Callable[[], None], about: Any = None) -> None:
        """Stand at a place, after what stood there before is closed.

        Args:
            close: called when something else comes to this place.
            about: what `self.about(where)` answers as long as nothing else does.
        """
        self._put(where, _Standing(close, about))

    def free(self, where: Hashable) -> None:
        """Close what stands at a place, if anything does."""
        self._put(where, None)

    def about(self, where: Hashable) -> Any:
        """What is known about that which stands at a place; None where nothing stands there."""
        standing = self._standing.get(where)
        return standing.about if standing else None

    def __iter__(self) -> Iterator[Hashable]:
        return iter(tuple(self._standing))

    def _put(self, where: Hashable, standing: _Standing | None) -> None:
        with self._lock:
            before = self._standing.pop(where, None)
            if standing:
                self._standing[where] = standing
        if before:
            before.close()


PLACES = Places()  # of this kernel


def place(
    where: Hashable,
    box: "Widget",
    static: str,
    plain: str,
    *,
    at_end: Callable[[], None] | None = None,
    about: Any = None,
) -> None:
    """Display a box where there is a front end, and `static` (HTML) or `plain` (text) where there is none.

    Args:
        where: names the place among all of this kernel; what stands there is closed.
        at_end: called before this box is closed, e.g. to end a thread.
        about: what a later cell can ask of it, see `Places.about`.
    """
    from IPython.display import display

    def close() -> None:
        if at_end:
            at_end()
        close_widget(box)

    PLACES.take(where, close, about)
    view = {"version_major": 2, "version_minor": 0, "model_id": box.model_id}
    bundle = {"text/plain": plain, "text/html": static, "application/vnd.jupyter.widget-view+json": view}
    display(bundle, raw=True)


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


def html_box() -> "HTML":
    """A widget for HTML that is never wider than its cell."""
    import ipywidgets

    return ipywidgets.HTML(layout={**WHOLE_WIDTH, "min_width": "0", "overflow": "hidden"})
