"""A course you run: what training a transformer costs in memory and time, checked on your own machine.

`import perf_helpers` is quick and changes nothing: the names below, and torch and transformers behind them, are
loaded when they are first used.

Not covered: how one training is measured, estimated, rehearsed or advised (`trainmem`).
"""

from importlib import import_module

__version__ = "0.1.0"

# The package of each public name; plots, sweep and widgets are modules of this one.
_HOMES = {
    "perf_helpers.course": ("claims", "learner_log"),
    "perf_helpers.course.claims": ("Claims",),
    "perf_helpers.lab": ("Lab", "Task", "doctor", "roofline", "slow_link"),
    "perf_helpers.widgets": ("exercises", "explorers", "monitor"),
    "trainmem": ("cards",),
    "trainmem.core": ("arguments", "hardware", "optional_packages"),
    "trainmem.measure": ("interleaving",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted([*_HOME_OF, "plots", "sweep", "widgets"])


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Choose from {', '.join(__all__)}.")
    home = _HOME_OF.get(name, __name__)
    is_class = name[0].isupper()  # defined in the package; otherwise it is a module
    value = getattr(import_module(home), name) if is_class else import_module(f"{home}.{name}")
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})
