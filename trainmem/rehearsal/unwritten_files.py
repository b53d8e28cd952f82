"""Let rehearsed programs save files of weights with the weights' names, shapes and sizes, but without their values.

A rehearsal has no values to write. Such a file is a hole on the disk that reads as zeros, so that the program can load
it again; `program_report` removes it at the end. A file that existed before the rehearsal is left unchanged. A file
with known values only, such as a scheduler's state, is written as usual.

A program may also save into a buffer and write the buffer to a file, as Lightning does. Only its content can show
that this file has no values, so the save puts a mark into the buffer; so does pickle for each tensor. Each file that is
opened for writing is noted; if it is from before the rehearsal, it is moved aside first: what a rehearsal writes must
not replace a result of a real run. At the end `program_report` removes the files that have the mark, and puts all files
from before the rehearsal back.
"""

import builtins
import functools
import importlib
import importlib.util
import io
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainmem.rehearsal.marked_files import MARK, has_mark


class Files:
    """Track the files of weights that this process saves.

    `saved` has the paths of the files that the process wrote without values. `kept` has the paths of files that are
    older than the rehearsal: the process wanted to overwrite them, but they were left unchanged. `opened` has the paths
    of files that the process opened to write bytes. `aside` is {path: where the earlier file with this path was moved}.

    Args:
        changed: called after each file that was moved aside or written without values.
    """

    def __init__(self, changed: Callable[[], None]):
        self.changed = changed
        self.opened: set[str] = set()
        self.aside: dict[str, str] = {}
        self.start = float(os.environ.get("REHEARSAL_BEGAN", "inf"))
        self.saved: set[str] = set()  # written without values
        self.kept: set[str] = set()  # left as they were
        self.has_holes = False  # whether the file that is being saved has any
        self.has_file = True  # whether it is saved by its path
        self.rename = os.rename

    def count(self) -> int:
        """Return how many files were moved aside or written without values, also by processes that forked this one."""
        return len(self.aside) + len(self.saved)

    def keeps(self, path: Any) -> bool:
        """Return whether a file existed before the rehearsal, so that it must not be overwritten; if so, remember its
        name in `kept`.
        """
        name = os.path.abspath(os.fspath(path))
        if name in self.saved or not self._is_older(name):
            return False
        self.kept.add(name)
        return True

    def _is_older(self, name: str) -> bool:
        return os.path.isfile(name) and os.path.getmtime(name) < self.start

    def open(self, plain: Callable, file: Any, mode: str = "r", *args, **kwargs) -> Any:
        """Call `plain`, Python's `open`, and return its result. Note the path in `opened` if the mode has "w" and "b".

        If the call would overwrite a file from before the rehearsal, move this file aside first.
        """
        if isinstance(file, str | os.PathLike) and isinstance(mode, str) and "w" in mode:
            name = os.path.abspath(os.fspath(file))
            if self._is_older(name) and os.access(name, os.W_OK) and os.access(os.path.dirname(name), os.W_OK):
                self.aside[name] = f"{name}.before-rehearsal"
                self.rename(name, self.aside[name])
                self.changed()
            if "b" in mode:
                self.opened.add(name)
        return plain(file, mode, *args, **kwargs)

    def note(self, path: Any) -> None:
        self.saved.add(os.path.abspath(os.fspath(path)))
        self.changed()  # now, because this process may be killed

    def move(self, plain: Callable, source: Any, target: Any, *args, **kwargs) -> Any:
        """Call `plain`, which renames, links or copies `source` to `target`, and return its result.

        If `source` is a file in `saved` (written without values), or a folder with such files, add their new paths to
        `saved`. Exception: if `source` is in `saved` and `target` is a file from before the rehearsal, do not call
        `plain`, so that the user's file is not overwritten, and return `target`.
        """
        if not isinstance(source, str | os.PathLike) or not isinstance(target, str | os.PathLike):
            return plain(source, target, *args, **kwargs)
        old, new = (os.path.abspath(os.fspath(path)) for path in (source, target))
        if old in self.opened and has_mark(old):
            self.saved.add(old)
        if old in self.saved and self.keeps(new):
            return target
        self.saved |= {new + name[len(old) :] for name in self.saved if name == old or name.startswith(old + os.sep)}
        return plain(source, target, *args, **kwargs)


class _Records:
    """Write torch's zip files, but with holes in place of storages with unknown values; `holes` counts such storages.

    Args:
        writer: torch's own writer, which writes everything else.
        values: the `Values` that this process tracks.
        has_file: whether the writer was given a file's path. If not, e.g. for a buffer, which may not be able to skip
            bytes, storages with unknown values are written in full, and the caller adds a record that marks the file.
    """

    def __init__(self, writer, values, has_file: bool):
        self.writer, self.values, self.has_file, self.holes = writer, values, has_file, 0

    def __getattr__(self, name: str):
        return getattr(self.writer, name)

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Write the record `name` of torch's zip file: the `size` bytes of `data`, or a hole of `size` bytes.

        A hole is written if the values of `data` are unknown and the writer was given a file's path.
        """
        if isinstance(data, torch.UntypedStorage) and self.values.is_unknown_block(data.data_ptr()):
            self.holes += 1
            if self.has_file:
                return self.writer.write_record_metadata(name, size)
        return self.writer.write_record(name, data, size)


def install(files: Files, values) -> None:
    """Make torch.save and safetensors write holes for unknown values, which `values` (`Values`) identifies."""
    write, save, copy = torch.serialization._save, torch.save, torch.UntypedStorage.cpu

    @functools.wraps(write)
    def write_known(obj, zip_file, *args, **kwargs):
        records = _Records(zip_file, values, files.has_file)
        write(obj, records, *args, **kwargs)
        files.has_holes = records.holes > 0
        if files.has_holes and not files.has_file:
            zip_file.write_record(MARK, b"1", 1)

    @functools.wraps(save)
    def save_known(obj, f, *args, **kwargs):
        path = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
        if path is f and files.keeps(path):
            return
        files.has_holes, files.has_file = False, path is f
        # The older format has no records; pickle writes a tensor in it.
        save(obj, f, *args[:2], **kwargs | {"_use_new_zipfile_serialization": True})
        if files.has_holes and isinstance(path, str | os.PathLike):
            files.note(path)

    @functools.wraps(copy)
    def copied(storage):
        host = copy(storage)
        values.note_copy(storage, host)
        return host

    torch.serialization._save, torch.save, torch.UntypedStorage.cpu = write_known, save_known, copied
    torch.serialization.save = save_known
    builtins.open = io.open = functools.wraps(open)(functools.partial(files.open, open))
    for owner, name in ((os, "rename"), (os, "replace"), (os, "link"), (shutil, "copyfile")):
        plain_move = getattr(owner, name)
        setattr(owner, name, functools.wraps(plain_move)(functools.partial(files.move, plain_move)))
    if not importlib.util.find_spec("safetensors"):
        return
    safetensors = importlib.import_module("safetensors")
    plain = safetensors.serialize_file

    @functools.wraps(plain)
    def serialize_known(tensors, filename, metadata=None):
        if files.keeps(filename):
            return
        if not any(values.is_unknown_block(getattr(each, "data_ptr", 0)) for each in tensors.values()):
            return plain(tensors, filename, metadata=metadata)
        write_header(tensors, filename, metadata)
        files.note(filename)

    safetensors.serialize_file = serialize_known


def write_header(tensors: dict, filename: str | os.PathLike, metadata: dict | None) -> None:
    """Write a safetensors file that has a header, and a hole (no disk space, read as zeros) in place of its tensors.

    Args:
        tensors: {name: object with the tensor's `dtype`, `shape` and `data_len` (bytes)}.
        filename: path of the file.
        metadata: {name: text} to put into the header; None: none.
    """
    header, end = {"__metadata__": dict(metadata)} if metadata else {}, 0
    for name, each in tensors.items():
        header[name] = {"dtype": str(each.dtype), "shape": [*each.shape], "data_offsets": [end, end + each.data_len]}
        end += each.data_len
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Path(filename).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
