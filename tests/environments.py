"""Make Python environments for tests, with other installed packages than this environment has."""

import importlib.metadata
import shutil
import venv
from pathlib import Path


def make(folder, without=(), **versions):
    """Return the Python of a new environment that links to this environment's packages.

    Args:
        folder: folder of the new environment.
        without: packages to leave out.
        versions: {package: version to record for it in place of its real one}.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    gone = {"__pycache__"}
    for package in (*without, *versions):
        files = map(str, importlib.metadata.distribution(package).files)
        gone |= {Path(file).parts[0] for file in files if package in without or ".dist-info" in file}
    for place in {Path(importlib.metadata.distribution(name).locate_file("")) for name in ("pip", "torch", "typer")}:
        for path in place.iterdir():
            if path.name not in gone and not (site(python) / path.name).exists():
                (site(python) / path.name).symlink_to(path)
    for package, version in versions.items():
        record(python, package, version)
    return str(python)


def site(python):
    (found,) = Path(python).parents[1].glob("lib/python*/site-packages")
    return found


def record(python, package, version):
    """Make the metadata of an environment say that exactly this version of a package is installed.

    `python`: the Python of the environment.
    """
    for old in site(python).glob(f"{package}-*.dist-info"):
        old.unlink() if old.is_symlink() else shutil.rmtree(old)
    folder = site(python) / f"{package}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (folder / "RECORD").touch()
