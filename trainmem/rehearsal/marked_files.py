"""Find the files without values that a rehearsed program wrote from a buffer of saved weights; import no torch."""

import contextlib
import mmap
import os
import pickle
import zipfile
from collections.abc import Iterable

MARK = "rehearsed-without-values"  # a record that `unwritten_files` adds to what torch.save writes into a buffer


def has_mark(path: str) -> bool:
    """Return whether a file holds weights without values that were saved into a buffer or pickled."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                return any(name.endswith(f"/{MARK}") for name in file.namelist())
        with open(path, "rb") as file:
            is_pickle = file.read(1) == pickle.PROTO
            return is_pickle and mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).find(MARK.encode()) >= 0
    except (OSError, zipfile.BadZipFile):
        return False


def settle(opened: Iterable[str], aside: dict[str, str]) -> tuple[list[str], list[str]]:
    """Remove the marked files (weights without values) that a process wrote, and put back the files that were replaced.

    Args:
        opened: paths of the files that the process opened for writing.
        aside: {path: where the earlier file with this path was moved}.

    Returns:
        The paths of the removed files that had replaced no file, and the paths of the files that were put back.
    """
    removed = [name for name in opened if name not in aside and has_mark(name)]
    for name in removed:
        os.unlink(name)
    for name, old in aside.items():
        with contextlib.suppress(FileNotFoundError):  # the program may have deleted the folder
            os.replace(old, name)
    return removed, [*aside]
