"""Packages that only some lessons use and that the others are better off without: where they are, and what is missing.

DeepSpeed is one: where it is installed, accelerate imports it in each training of the Trainer. So `make` puts it, and
optuna, into folders of their own, and the lesson that wants one says so.
"""

import contextlib
import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build"  # with one for each package and Python, made by the Makefile


def offer(package: str) -> str | None:
    """Let this process, and the clean processes of a lab that it makes afterwards, import a package from its folder.

    One that is installed as any other is left as it is. The libraries that a lab's processes share look for their
    extras when they are imported, so these are imported again.

    Args:
        package: as it is imported, e.g. "deepspeed".

    Returns:
        What is missing, in words, as `Claims.check(missing=)` takes it; None where the package can be imported.
    """
    folder = FOLDER / "{}-{}.{}".format(package, *sys.version_info)
    if importlib.util.find_spec(package) is None and (folder / package).is_dir():
        sys.path.append(str(folder))  # at the end: what is installed comes first
        importlib.invalidate_caches()
    return missing(package)


def offered() -> list[str]:
    """Return the folders that were offered to this process, from the paths of its imports."""
    return [path for path in sys.path if Path(path).parent == FOLDER]


def missing(package: str) -> str | None:
    """What is missing, in words; None where the package can be imported."""
    if importlib.util.find_spec(package):
        return None
    first = "setuptools wheel && pip install --no-build-isolation " if package == "deepspeed" else ""
    here = f'make build/{package} and optional_packages.offer("{package}")'
    return f"needs {package} (pip install {first}{package}; or, in a checkout, {here})"


def import_peft() -> None:
    """The Trainer imports peft where that is installed, and peft bitsandbytes, which takes long: hidden here."""
    if not importlib.util.find_spec("peft"):
        return
    hidden, sys.modules["bitsandbytes"] = sys.modules.pop("bitsandbytes", None), None
    with contextlib.suppress(ImportError, AttributeError):  # a folder of that name, say
        importlib.import_module("peft").import_utils.is_bnb_available.cache_clear()
    del sys.modules["bitsandbytes"]
    if hidden:
        sys.modules["bitsandbytes"] = hidden
