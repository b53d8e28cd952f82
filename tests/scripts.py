"""Import the scripts of benchmarks/ as modules for tests."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCHMARKS, RESULTS = ROOT / "benchmarks", ROOT / "results"


def script(name):
    """Import the script `name`.py of benchmarks/ as a new module and return it."""
    sys.path.insert(0, str(BENCHMARKS))  # for what the scripts share
    try:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look for it there
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))
