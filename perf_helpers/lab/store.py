"""Records in a file of JSON lines: runs here, what a learner did in the course's journal.

Several notebooks may write one file at once. A line is appended whole, under a lock, and flushed to the disk. A line
that a crash or a full disk damaged is reported when the file is read, and skipped; the lines around it are kept.
"""

import contextlib
import json
import os
import warnings
from pathlib import Path
from typing import Generic, TypeVar

from filelock import FileLock

from perf_helpers.lab.runs import SCHEMA, Record, Run

Kept = TypeVar("Kept", bound=Record)


class Store(Generic[Kept]):
    """Records of one kind in a file.

    Args:
        path: the file; it and its folder are made when the first record is kept.
        record: the kind, which reads what its `to_dict` wrote.
    """

    def __init__(self, path: str | os.PathLike, record: type[Kept] = Run):
        self.path, self._record = Path(path), record

    def append(self, record: Kept) -> None:
        """Raises OSError where the file cannot be written; nothing is left half written then."""
        line = json.dumps({"schema": SCHEMA} | record.to_dict(), allow_nan=True, default=str).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f".{self.path.name}.lock")), open(self.path, "ab") as file:
            start = file.seek(0, os.SEEK_END)
            # A writer that died in mid-line leaves no newline: begin on a line of our own.
            if start and not _ends_with_newline(self.path):
                line = b"\n" + line
            try:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(start)
                raise

    def read(self) -> list[Kept]:
        """All records in the order in which they were written; a damaged line is reported as a warning and skipped."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return []
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records += [self._record.from_dict(json.loads(line))] if line.strip() else []
            except (ValueError, TypeError, AttributeError) as error:
                warnings.warn(f"{self.path}, line {number} is damaged and was skipped ({error})", stacklevel=2)
        return records


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash at any moment, finds the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
