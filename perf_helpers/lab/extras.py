"""Packages that only some lessons use and that the others are better off without: where they are, and what is missing.

DeepSpeed is one: where it is installed, accelerate imports it in each training of the Trainer. So `make` puts it into
a folder of its own, and the lesson that wants it says so.
"""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build"  # one folder for each package, made by the Makefile


def offer(package: str, folder: Path | None = None) -> str | None:
    """Let this process, and the clean processes of a lab that it makes afterwards, import a package from its folder.

    One that is installed as any other is left as it is. Call it before the first `Lab`: the libraries that the lab's
    processes share look for their extras when they are imported.

    Args:
        package: as it is imported, e.g. "deepspeed".
        folder: that has it; None: `build/<package>` of this project.

    Returns:
        What is missing, in words, as `claims.check(missing=)` takes it; None where the package can be imported.
    """
    folder = folder or FOLDER / package
    if importlib.util.find_spec(package) is None and (folder / package).is_dir():
        sys.path.append(str(folder))  # at the end: what is installed comes first
        importlib.invalidate_caches()
    if importlib.util.find_spec(package):
        return None
    how = f"make build/{package}, or pip install setuptools wheel && pip install --no-build-isolation {package}"
    return f"needs {package} ({how})"
