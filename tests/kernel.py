"""Widgets as a kernel has them, without a front end."""

import sys

import ipywidgets

VIEW = "application/vnd.jupyter.widget-view+json"


def alive() -> dict:
    """Every widget that is not closed, by model id."""
    module = sys.modules[ipywidgets.Widget.__module__]
    return module._instances if hasattr(module, "_instances") else ipywidgets.Widget.widgets


def box(shown):
    """The box that was displayed last."""
    return alive()[shown[-1][VIEW]["model_id"]]


def inside(widget, kind: type) -> list:
    """The widgets of a kind in a box, in order."""
    found = [widget] if isinstance(widget, kind) else []
    return found + [each for child in getattr(widget, "children", ()) for each in inside(child, kind)]


def latest(shown, kind: type) -> list:
    """The widgets of a kind in the box that was displayed last, in order; there is one at least."""
    found = inside(box(shown), kind)
    assert found
    return found


def state(shown) -> str:
    """The HTML that stands last in the box that was displayed last."""
    return latest(shown, ipywidgets.HTML)[-1].value


def commit(shown, value) -> None:
    """Commit a guess."""
    (slider,), (button,) = latest(shown, ipywidgets.FloatSlider), latest(shown, ipywidgets.Button)
    slider.value = value
    button.click()


def control(shown, name: str):
    """The widget with that description in the box that was displayed last."""
    return next(each for each in inside(box(shown), ipywidgets.DOMWidget) if getattr(each, "description", None) == name)


def text(shown) -> str:
    """All HTML of the box that was displayed last."""
    return "".join(widget.value for widget in inside(box(shown), ipywidgets.HTML))
