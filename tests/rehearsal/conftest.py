"""Fixtures for rehearsed tests."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def measure():
    """Yield benchmarks/measure_allocator.py as a module."""
    scripts = Path(__file__).parents[2] / "benchmarks"
    sys.path.insert(0, str(scripts))  # for what the measuring scripts share
    spec = importlib.util.spec_from_file_location("measure_allocator", scripts / "measure_allocator.py")
    sys.modules["measure_allocator"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(scripts))
