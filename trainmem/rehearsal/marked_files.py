"""Recognize, by a mark in the file, weights that a rehearsed program saved without values; import no torch."""

import mmap
import pickle
import zipfile

MARK = "rehearsed-without-values"  # a record that `unwritten_files` adds to what torch.save writes into a buffer


def has_mark(path: str) -> bool:
    """Return whether a file has `MARK`: its weights have no values, and were saved into a buffer or pickled."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                return any(name.endswith(f"/{MARK}") for name in file.namelist())
        with open(path, "rb") as file:
            is_pickle = file.read(1) == pickle.PROTO
            return is_pickle and mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).find(MARK.encode()) >= 0
    except (OSError, zipfile.BadZipFile):
        return False
