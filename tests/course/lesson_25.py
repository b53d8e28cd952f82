"""Lesson 25's functions without its measurements, for tests of faults planted in it."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).resolve().parents[2] / "notebooks" / "src" / "25_adapters.py"
TAKEN = {"Adapter", "adapt", "learning", "fewer", "llama", "with_peft", "filled", "apart", "code_book", "quantize"}
TAKEN |= {"dequantize", "error", "scale_bits", "stepping", "text", "train", "score", "learnt", "gains", "interval"}
TAKEN |= {"with_gradient", "SMALL", "WIDER", "MATRICES", "RATES", "ways", "task", "counted", "part", "over"}
MEASURES = ("\nfull = ", 'found["lora-states"]', "\nbase_runs = ", "fewer_kept = ")  # cells, by a lab of a test


def functions(lab=None):
    """Return the lesson's functions, by name, in a new scope, in which a test may plant a fault.

    `lab`: the lab that the functions use; None: they cannot train.
    """
    text, scope = SOURCE.read_text("utf-8"), {"__name__": "planted", "lab": lab}
    setup = next(cell for cell in re.split(r"(?m)^# %%.*\n", text) if "import torch" in cell)
    exec(re.sub(r"(?m)^(lab|logging|torch)\b.*", "", setup), scope)  # the lab is the test's, and so is the process
    missing = scope["no_peft"]
    named = [(getattr(node, "name", None) or _target(node), node) for node in ast.parse(text).body]
    taken = [node for name, node in named if name in TAKEN]
    assert {name for name, _ in named if name in TAKEN} == TAKEN
    exec(compile(ast.Module(taken, []), str(SOURCE), "exec"), scope)
    return SimpleNamespace(scope=scope, missing=missing, **{name: scope[name] for name in TAKEN})


def measured(lab, chosen=MEASURES, replaced=()):
    """Run the lesson's cells without their pictures, and return {claim id: measured value}.

    A value is a ratio of bytes; for the claim "full-16-bits" it is bytes per parameter.

    Args:
        lab: the lab that trains.
        chosen: texts; the cells that contain one of them are run.
        replaced: pairs (old text, new text) to replace in the cells.
    """
    lesson = functions(lab)
    text = SOURCE.read_text("utf-8")
    code = [cell for cell in re.split(r"(?m)^# %%.*\n", text) if any(map(cell.count, chosen))]
    assert len(code) == len(chosen) and all(sum(cell.count(old) for cell in code) == 1 for old, _ in replaced)
    shown = SimpleNamespace(memory=print, Table=lambda *_: None, bytes_text=str, revealed=print)
    lesson.scope |= dict(found={}, notes={}, display=print, plots=shown, widgets=shown)
    for cell in code:
        before = "\n" * text[: text.index(cell)].count("\n")  # an error names the line of the source
        for old, new in replaced:
            cell = cell.replace(old, new)
        exec(compile(before + cell, str(SOURCE), "exec"), lesson.scope)
    found = lesson.scope["found"]
    return found | {"full-16-bits": lesson.scope["bytes_each"]} if "bytes_each" in lesson.scope else found


def _target(node):
    return getattr(node.targets[0], "id", None) if isinstance(node, ast.Assign) else None
