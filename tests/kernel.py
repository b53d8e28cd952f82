"""Inspect the widgets of a kernel that has no front end.

`shown` is the list of displayed objects, which the fixture of that name returns.
"""

import sys

import ipywidgets

VIEW = "application/vnd.jupyter.widget-view+json"


def alive() -> dict:
    """Return {model id: widget} of all widgets that are not closed."""
    module = sys.modules[ipywidgets.Widget.__module__]
    return module._instances if hasattr(module, "_instances") else ipywidgets.Widget.widgets


def box(shown):
    """Return the last box in `shown`, the list of displayed objects."""
    return alive()[shown[-1][VIEW]["model_id"]]


def inside(widget, kind: type) -> list:
    """Return the widgets of the class `kind` in the box `widget`, in order."""
    found = [widget] if isinstance(widget, kind) else []
    return found + [each for child in getattr(widget, "children", ()) for each in inside(child, kind)]


def latest(shown, kind: type) -> list:
    """Return the widgets of the class `kind` in the last displayed `Box`, in order; there must be at least one.

    `shown`: the list of displayed objects.
    """
    found = inside(box(shown), kind)
    assert found
    return found


def state(shown) -> str:
    """Return the text of the last HTML widget in the last box; `shown` is the list of displayed objects."""
    return latest(shown, ipywidgets.HTML)[-1].value


def commit(shown, value) -> None:
    """Enter the guess `value` into the slider of the last box in `shown`, the displayed objects, and commit it."""
    (slider,), (button,) = latest(shown, ipywidgets.FloatSlider), latest(shown, ipywidgets.Button)
    slider.value = value
    button.click()


def control(shown, name: str):
    """Return the widget with the description `name` in the last box; `shown` is the list of displayed objects."""
    return next(each for each in inside(box(shown), ipywidgets.DOMWidget) if getattr(each, "description", None) == name)


def text(shown) -> str:
    """Return the text of all HTML widgets in the last box; `shown` is the list of displayed objects."""
    return "".join(widget.value for widget in inside(box(shown), ipywidgets.HTML))
