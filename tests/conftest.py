"""For every test module: figures need no screen, and what is displayed can be looked at."""

import types

import matplotlib
import pytest

matplotlib.use("Agg")  # here only: a kernel that inherited MPLBACKEND would show no pictures in the lessons


@pytest.fixture
def shown(monkeypatch):
    """What was displayed, in order."""
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda *objects, **_: displayed.extend(objects))
    return displayed


def _copied(module, **changes):
    """A module of the library with these names changed, for one module of ours: the other threads keep theirs."""
    twin = types.ModuleType(module.__name__)
    vars(twin).update(vars(module), **changes)
    return twin


@pytest.fixture
def copied():
    return _copied
