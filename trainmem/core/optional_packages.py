"""Packages that only some lessons use and that would disturb the others: import them on request, report missing ones.

accelerate imports DeepSpeed, for example, in each training of the Trainer if it is installed. So `make` installs it,
and optuna, into folders of their own, and a lesson that needs one calls `offer`.
"""

import contextlib
import importlib.util
import sys
from fnmatch import fnmatch
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build"  # the Makefile makes one folder in it per package and Python

# What transformers imports for an optimizer: (pattern of `optim`, import name, name for pip).
_OF_OPTIMIZERS = (
    ("galore_*", "galore_torch", "galore-torch"),
    ("apollo_*", "apollo_torch", "apollo-torch"),
    ("*lomo", "lomo_optim", "lomo-optim"),
    ("grokadamw", "grokadamw", "grokadamw"),
    ("stable_adamw", "optimi", "torch-optimi"),
    ("schedule_free_*", "schedulefree", "schedulefree"),
    ("adamw_torch_?bit", "torchao", "torchao"),
    ("adamw_torch_xla", "torch_xla", "torch_xla"),
    ("adamw_torch_npu_fused", "torch_npu", "torch-npu"),
    ("adamw_anyprecision", "torchdistx", "torchdistx"),
)
# Optimizers whose packages call CUDA, so that they fail on a CPU: (pattern of `optim`, package).
_NEEDS_GPU = (
    ("adalomo", "lomo-optim"),
    ("galore_adamw_8bit*", "galore-torch"),
    ("paged_ademamix*", "bitsandbytes"),
    ("stable_adamw", "torch-optimi, where Triton is installed,"),
)


def offer(package: str) -> str | None:
    """Let this process, and the fresh subprocesses that it starts afterwards, import a package from its own folder.

    A package that is installed as usual is left alone. The lab's fork server is replaced, because libraries look for
    optional packages when they are imported.

    Args:
        package: its import name, e.g. "deepspeed".

    Returns:
        A text that says what is missing, for `Claims.check(missing=)`; None if the package can be imported.
    """
    folder = FOLDER / "{}-{}.{}".format(package, *sys.version_info)
    if importlib.util.find_spec(package) is None and (folder / package).is_dir():
        sys.path.append(str(folder))  # at the end, so that installed packages come first
        importlib.invalidate_caches()
    return missing(package)


def offered() -> list[str]:
    """Return the folders that `offer` added to this process's import path."""
    return [path for path in sys.path if Path(path).parent == FOLDER]


def missing(package: str) -> str | None:
    """Return a text that says how to install a package; None if it can be imported."""
    if importlib.util.find_spec(package):
        return None
    first = "setuptools wheel && pip install --no-build-isolation " if package == "deepspeed" else ""
    here = f'make build/{package} and optional_packages.offer("{package}")'
    return f"needs {package} (pip install {first}{package}; or, in a checkout, {here})"


def missing_of_optimizer(optim: str) -> str | None:
    """Return a text that names the package that `optim` needs and that cannot be imported; None if there is none."""
    for pattern, package, name in _OF_OPTIMIZERS:
        if fnmatch(optim, pattern) and not importlib.util.find_spec(package):
            return f"Install {name}: pip install {name}. transformers needs it for optim={optim!r}"
    return None


def needs_gpu(optim: str) -> str | None:
    """Return a text that says why `optim` fails on a CPU; None if it does not, or if its package is missing."""
    if missing_of_optimizer(optim) or (optim == "stable_adamw" and not importlib.util.find_spec("triton")):
        return None
    package = next((name for pattern, name in _NEEDS_GPU if fnmatch(optim, pattern)), None)
    remedy = "choose another optimizer, or estimate this one for a card, e.g. card='t4'"
    return package and f"optim={optim!r} needs a GPU, because {package} calls CUDA: {remedy}"


def import_peft() -> None:
    """Import peft, as the Trainer does, but hide bitsandbytes from it, whose import takes long."""
    if not importlib.util.find_spec("peft"):
        return
    hidden, sys.modules["bitsandbytes"] = sys.modules.pop("bitsandbytes", None), None
    with contextlib.suppress(ImportError, AttributeError):  # e.g. a folder named peft
        importlib.import_module("peft").import_utils.is_bnb_available.cache_clear()
    del sys.modules["bitsandbytes"]
    if hidden:
        sys.modules["bitsandbytes"] = hidden
