"""Find files of weights without values that a rehearsed program first saved into a buffer; torch is not needed."""

import os
import zipfile

MARK = "rehearsed-without-values"  # a record that `unwritten_files` adds to what torch.save writes into a buffer


def has_mark(path: str) -> bool:
    """Return whether a file holds weights without values that were saved into a buffer."""
    try:
        with zipfile.ZipFile(path) as file:
            return any(name.endswith(f"/{MARK}") for name in file.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def settle(opened: list[str], aside: dict[str, str]) -> tuple[list[str], list[str]]:
    """Remove the files of weights without values among the files that a process opened for writing, and put those that
    were moved aside for them back; return the paths of the files removed, and of those put back.

    `opened`, `aside`: as in `Files`.
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
