"""Put on PYTHONPATH: a transformers that accepts gradient checkpointing and silently does nothing about it."""

import importlib.abc
import importlib.util
import sys


class _Saboteur(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "transformers.modeling_utils":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.PreTrainedModel._set_gradient_checkpointing = lambda self, *_, **__: None

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Saboteur())
