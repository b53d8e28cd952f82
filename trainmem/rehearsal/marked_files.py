"""Recognize by a mark in a file that a rehearsed program saved weights without values; torch is not imported."""

import mmap
import pickle
import zipfile

# A record that `unwritten_files` adds if torch.save writes weights without values into a buffer. A pickled file has the
# mark too, because pickle calls torch.save for each tensor. A file that torch.save writes by its path has no mark.
MARK = "rehearsed-without-values"


def has_mark(path: str) -> bool:
    """Return whether a file has `MARK`, the mark of weights without values; False if the file cannot be read."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                return any(name.endswith(f"/{MARK}") for name in file.namelist())
        with open(path, "rb") as file:
            is_pickle = file.read(1) == pickle.PROTO
            return is_pickle and mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).find(MARK.encode()) >= 0
    except (OSError, zipfile.BadZipFile):
        return False
