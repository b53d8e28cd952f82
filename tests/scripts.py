"""The scripts of results/, as modules for tests."""

import importlib.util
import sys
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


def script(name):
    """A script of results/, executed anew."""
    sys.path.insert(0, str(RESULTS))  # for what the scripts share
    try:
        spec = importlib.util.spec_from_file_location(name, RESULTS / f"{name}.py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look for it there
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(RESULTS))
