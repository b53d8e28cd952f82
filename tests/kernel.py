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
