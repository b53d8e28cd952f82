"""Find the files without values that a rehearsed program wrote from a buffer of saved weights; import no torch."""

import os
import zipfile
from collections.abc import Iterable

MARK = "rehearsed-without-values"  # a record that `unwritten_files` adds to what torch.save writes into a buffer


def has_mark(path: str) -> bool:
    """Return whether a file holds weights without values that were saved into a buffer."""
    try:
        with zipfile.ZipFile(path) as file:
            return any(name.endswith(f"/{MARK}") for name in file.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def settle(opened: Iterable[str], aside: dict[str, str]) -> tuple[list[str], list[str]]:
    """Remove the marked files (weights without values) that a process wrote, and put back the files they replaced.

    A file that was moved aside is put back if the new file at its path is marked or does not exist. Otherwise the
    program has really replaced it, and it is deleted.

    Args:
        opened: paths of the files that the process opened for writing.
        aside: {path: where the earlier file with this path was moved}.

    Returns:
        The paths of the removed files that had replaced no file, and the paths of the files that were put back.
    """
    unwritten = [name for name in opened if has_mark(name)]
    removed, kept = [name for name in unwritten if name not in aside], []
    for name in removed:
        os.unlink(name)
    for name, old in aside.items():
        if name in unwritten or not os.path.exists(name):
            os.replace(old, name)
            kept.append(name)
        else:
            os.unlink(old)
    return removed, kept
