"""For every test module: figures need no screen, and what is displayed can be looked at."""

import matplotlib
import pytest

matplotlib.use("Agg")  # here only: a kernel that inherited MPLBACKEND would show no pictures in the lessons


@pytest.fixture
def shown(monkeypatch):
    """What was displayed, in order."""
    displayed = []
    monkeypatch.setattr("IPython.display.display", lambda *objects, **_: displayed.extend(objects))
    return displayed
