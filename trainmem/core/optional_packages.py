"""Import packages that only some lessons use, on request, and report missing packages.

These packages would disturb the other lessons: if DeepSpeed is installed, for example, accelerate imports it in every
training of the Trainer. So `make` installs DeepSpeed and optuna into separate folders, and a lesson that needs such a
package calls `offer`.
"""

import contextlib
import importlib.util
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from trainmem.texts import install_text

# What a training with DeepSpeed imports, by accelerate and by its engine: two seconds in each process of it.
_IMPORTED_BY_TRAININGS = {"deepspeed": ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")}
FOLDER = Path(__file__).resolve().parents[2] / "build"  # the Makefile makes one folder in it per package and Python

# What is particular about optimizers of other packages, by patterns of `optim`.
OPTIMIZERS = tomllib.loads(Path(__file__).with_name("optimizers.toml").read_text(encoding="utf-8"))


def offer(package: str) -> str | None:
    """Let this process, and fresh subprocesses that it starts later, import a package from its separate folder.

    The project's Makefile installs such packages into folders of their own, outside of the usual packages. A package
    that is installed as usual is left alone. If a fork server (`trainmem.measure.forkserver`) is already running, the
    next measurement starts a new one, because the libraries in the old one have already looked for the package.

    Args:
        package: the import name, e.g. "deepspeed".

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


def imported_by_trainings() -> list[str]:
    """Return the names of the modules that a fork server imports once, so that its forks need not import them.

    These are the modules that a training imports from the packages whose folders `offer` added to the import path.
    """
    packages = [Path(folder).name.partition("-")[0] for folder in offered()]
    return [module for package in packages for module in _IMPORTED_BY_TRAININGS.get(package, ())]


def missing(package: str) -> str | None:
    """Return a text that says how to install a package; None if it can be imported."""
    if importlib.util.find_spec(package):
        return None
    first = "setuptools wheel && pip install --no-build-isolation " if package == "deepspeed" else ""
    here = f'make build/{package} and optional_packages.offer("{package}")'
    return f"needs {package} (pip install {first}{package}; or, in a checkout, {here})"


def about_optimizer(optim: str, table: str) -> list[Any]:
    """Return the entries in one table of `OPTIMIZERS` whose patterns match the optimizer `optim`; [] if none matches.

    Args:
        optim: the optimizer's name, as in `TrainingArguments`.
        table: the table's name, e.g. "packages" (entries: [import name, name for pip]) or "needs_gpu" (entries: texts).
    """
    return [value for pattern, value in OPTIMIZERS[table].items() if fnmatch(optim, pattern)]


def missing_of_optimizer(optim: str) -> str | None:
    """Return a text that names the missing package that the optimizer `optim` needs; None if no package is missing."""
    for package, name in about_optimizer(optim, "packages"):
        if not importlib.util.find_spec(package):
            return install_text(name, f"optim={optim!r}")
    return None


def needs_gpu(optim: str) -> str | None:
    """Return a text that says why the optimizer `optim` fails on a CPU; None if the optimizer works on a CPU.

    Also return None if a package is missing: the optimizer's own, or triton for "stable_adamw".
    """
    if missing_of_optimizer(optim) or (optim == "stable_adamw" and not importlib.util.find_spec("triton")):
        return None
    remedy = "choose another optimizer, or estimate this one for a card, e.g. card='t4'"
    return next((f"optim={optim!r} needs a GPU ({why}): {remedy}" for why in about_optimizer(optim, "needs_gpu")), None)


def import_peft() -> None:
    """Import peft, as the Trainer does, but hide bitsandbytes from peft, because bitsandbytes takes long to import."""
    if not importlib.util.find_spec("peft"):
        return
    hidden, sys.modules["bitsandbytes"] = sys.modules.pop("bitsandbytes", None), None
    with contextlib.suppress(ImportError, AttributeError):  # e.g. a folder named peft
        importlib.import_module("peft").import_utils.is_bnb_available.cache_clear()
    del sys.modules["bitsandbytes"]
    if hidden:
        sys.modules["bitsandbytes"] = hidden
