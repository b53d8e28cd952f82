"""Lesson 22's functions without its measurements, for tests of its findings and of faults planted in it."""

import ast
import gc
import re
from pathlib import Path
from types import SimpleNamespace

SOURCE = Path(__file__).resolve().parents[2] / "notebooks" / "src" / "22_hyperparameter_search.py"
TAKEN = {"text", "Net", "train", "score", "expected_lead", "random_search", "lost_lead", "halving", "trainer_of"}
TAKEN |= {"search"}
TAKEN |= {"rates_of", "Steps", "accuracy", "held", "freed", "Noted", "warmups_of", "warmed_up", "careful", "seeds_of"}
TAKEN |= {"seeded", "fresh_loss", "interval"}
DATA = ("training", "validation", "unseen")


def functions(folder):
    """Return the lesson's functions, by name, in a new scope, in which a test may plant a fault.

    `folder`: folder for the Trainer's files.
    """
    text, scope = SOURCE.read_text("utf-8"), {"__name__": "planted", "temporary": SimpleNamespace(name=str(folder))}
    setup = next(cell for cell in re.split(r"(?m)^# %%.*\n", text) if "import torch" in cell)
    exec(setup[: setup.index("\nlab = ")], scope)
    gc.freeze()  # as the lesson does: after each trial the library looks for garbage, three times
    missing = scope["no_optuna"] = scope["optional_packages"].offer("optuna")
    if not missing:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        scope["optuna"] = optuna
    taken = [node for node in ast.parse(text).body if getattr(node, "name", None) in TAKEN]
    assert {node.name for node in taken} == TAKEN
    for node in sorted(taken, key=lambda node: node.name != "text"):  # the first makes the data of the others
        exec(compile(ast.Module([node], []), str(SOURCE), "exec"), scope)
        if node.name == "text":
            scope |= {name: scope["text"](256, seed) for seed, name in enumerate(DATA, 1)}
    scope["RECIPE"] = dict(learning_rate=1e-2, per_device_train_batch_size=16, num_train_epochs=4)
    return SimpleNamespace(scope=scope, missing=missing, **{name: scope[name] for name in TAKEN})
