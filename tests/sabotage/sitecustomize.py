"""Goes on PYTHONPATH: in every Python started there, what the variable SABOTAGE names fails in one module.

"failed_comparison": no two runs can take turns, as on a machine where a comparison takes longer than it may.
"refused_estimate": no training can be followed on fake tensors, as on a library that nobody has tried yet.
"ignored_checkpointing": a transformers that accepts gradient checkpointing and silently does nothing about it.
"""

import importlib.machinery
import os
import sys


def failed_comparison(module):
    def refuse(*_, **__):
        return module.Outcome("timed out", "no result within 0 s")

    module.alternate = module.side_by_side = refuse


def refused_estimate(module):
    def follow(*_, **__):
        raise RuntimeError("this version is not known")

    module.follow = follow


def ignored_checkpointing(module):
    module.PreTrainedModel._set_gradient_checkpointing = lambda self, *_, **__: None


WAYS = {
    "failed_comparison": ("perf_helpers.lab.processes", failed_comparison),
    "refused_estimate": ("perf_helpers.estimate.trace", refused_estimate),
    "ignored_checkpointing": ("transformers.modeling_utils", ignored_checkpointing),
}
TARGET, SPOIL = WAYS.get(os.environ.get("SABOTAGE"), (None, None))


class Saboteur(importlib.machinery.PathFinder):
    """Finds modules like everybody else, and spoils the target once it is imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target) if name == TARGET else None
        if spec:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                SPOIL(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Saboteur)
