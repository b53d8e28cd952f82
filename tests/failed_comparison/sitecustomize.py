"""Goes on PYTHONPATH: no two runs can take turns, as on a machine where a comparison takes longer than it may."""

import importlib.abc
import importlib.machinery
import sys


class Finder(importlib.abc.MetaPathFinder):
    """Lets every `alternate` of perf_helpers.lab.processes time out."""

    def find_spec(self, name, path=None, target=None):
        if name != "perf_helpers.lab.processes":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)

            def alternate(*_, **__):
                return {"first": [], "second": [], "status": "timed out", "message": "no result within 0 s"}

            module.alternate = alternate

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
