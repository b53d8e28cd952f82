"""Fixtures for the tests of the lab."""

import pytest

from perf_helpers.lab.lab import Lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Return one lab for all tests of a module."""
    return Lab("cpu", out=tmp_path_factory.mktemp("lab"), timeout=120)
