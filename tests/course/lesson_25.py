"""Lesson 25's functions without its measurements, for the tests of what is planted in them."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).resolve().parents[2] / "notebooks" / "src" / "25_adapters.py"
TAKEN = {"Adapter", "adapt", "learning", "fewer", "llama", "with_peft", "filled", "apart", "code_book", "quantize"}
TAKEN |= {"dequantize", "error", "scale_bits", "stepping", "text", "train", "score", "learnt", "gains", "interval"}
TAKEN |= {"with_gradient", "SMALL", "WIDER", "MATRICES", "RATES", "ways", "counted", "task", "words", "nf4", "part"}
MEASURES = {"counted", "task", "words", "nf4", "part"}  # by a lab, which a test brings


def functions(lab=None):
    """Each call gives a scope of its own, in which a test may plant something."""
    text, scope = SOURCE.read_text("utf-8"), {"__name__": "planted", "lab": lab}
    setup = next(cell for cell in re.split(r"(?m)^# %%.*\n", text) if "import torch" in cell)
    exec(setup[: setup.index("\nlab = ")], scope)
    missing = scope["no_peft"] = scope["optional_packages"].offer("peft")
    if not missing:
        import peft

        scope["peft"] = peft
    named = [(getattr(node, "name", None) or _target(node), node) for node in ast.parse(text).body]
    taken = [node for name, node in named if name in TAKEN]
    assert {name for name, _ in named if name in TAKEN} == TAKEN
    exec(compile(ast.Module(taken, []), str(SOURCE), "exec"), scope)
    return SimpleNamespace(scope=scope, missing=missing, **{name: scope[name] for name in TAKEN})


def _target(node):
    return getattr(node.targets[0], "id", None) if isinstance(node, ast.Assign) else None
