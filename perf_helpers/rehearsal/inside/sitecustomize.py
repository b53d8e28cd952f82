"""Found by every Python of a rehearsal at its start: values are followed from torch's import on."""

import importlib.machinery
import sys


class _AfterTorch(importlib.machinery.PathFinder):
    """Finds torch like everybody else, and lets `values.install` follow its import."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target) if name == "torch" else None
        if spec and spec.loader:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                from perf_helpers.rehearsal import values

                values.install()

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _AfterTorch)
