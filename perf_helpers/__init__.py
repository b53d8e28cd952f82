"""A course you run: what training a transformer costs in memory and time, checked on your own machine.

`import perf_helpers` is quick and changes nothing: the names below, and torch and transformers behind them, are
loaded when they are first used.
"""

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["Lab", "Task", "claims", "exercises", "hardware", "plots", "widgets"]

_MODULE_OF = {"Lab": "lab", "Task": "task"}  # every other public name is a module


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it offers {', '.join(__all__)}")
    module = import_module(f".{_MODULE_OF.get(name, name)}", __name__)
    value = getattr(module, name) if name in _MODULE_OF else module
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
