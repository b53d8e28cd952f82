"""What every test module may use: the repository's root, and figures that need no screen."""

from pathlib import Path

import matplotlib
import pytest

matplotlib.use("Agg")  # here only: a kernel that inherited MPLBACKEND would show no pictures in the lessons


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parents[1]
