"""Lesson 24's functions without its measurements, for tests of its findings and of faults planted in it."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).resolve().parents[2] / "notebooks" / "src" / "24_hardware.py"
TAKEN = {"thermal_limits", "above_slowdown", "heated", "throttling", "searched", "network", "graphs", "Card"}
TAKEN |= {"price_of_million", "THERMAL", "SEARCH", "weight", "sheet"}


def functions():
    """Return the lesson's functions, by name, in a new scope, in which a test may plant a fault."""
    text, scope = SOURCE.read_text("utf-8"), {"__name__": "planted"}
    setup = next(cell for cell in re.split(r"(?m)^# %%.*\n", text) if "import torch" in cell)
    exec(setup[: setup.index("\nlab = ")], scope)
    named = [(getattr(node, "name", None) or _target(node), node) for node in ast.parse(text).body]
    taken = [node for name, node in named if name in TAKEN]
    assert {name for name, _ in named if name in TAKEN} == TAKEN
    exec(compile(ast.Module(taken, []), str(SOURCE), "exec"), scope)
    return SimpleNamespace(scope=scope, **{name: scope[name] for name in TAKEN})


def _target(node):
    return getattr(node.targets[0], "id", None) if isinstance(node, ast.Assign) else None
