"""A course you run: what training a transformer costs in memory and time, checked on your own machine.

`import perf_helpers` is quick and changes nothing: the names below, and torch and transformers behind them, are
loaded when they are first used.
"""

from importlib import import_module

__version__ = "0.1.0"

# The subpackage of each public name; plots, sweep and widgets are modules of this package.
_ROOMS = {"Lab": "lab", "Task": "lab", "arguments": "lab", "doctor": "lab", "hardware": "lab", "slow_link": "lab"}
_ROOMS |= {"roofline": "lab", "interleaving": "lab", "optional_packages": "lab"}
_ROOMS |= {"Claims": "course.claims", "claims": "course", "learner_log": "course"}
_ROOMS |= {"exercises": "widgets", "explorers": "widgets", "monitor": "widgets"}
__all__ = sorted([*_ROOMS, "plots", "sweep", "widgets"])


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Choose from {', '.join(__all__)}.")
    home = f"{__name__}.{_ROOMS[name]}" if name in _ROOMS else __name__
    is_class = name[0].isupper()  # defined in the subpackage; otherwise it is a module
    value = getattr(import_module(home), name) if is_class else import_module(f"{home}.{name}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
