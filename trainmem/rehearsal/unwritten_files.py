"""Let rehearsed programs save files of weights with the weights' names, shapes and sizes, but without their values.

A rehearsal has no values to write. Such a file is a hole on the disk that reads as zeros, so that the program can load
it again; `program_report` removes it at the end. A file with known values only, such as a scheduler's state, is written
as usual.

A program may also save into a buffer and write the buffer to a file, as Lightning does. Only the file's content can
show that the file has no values. `torch.save` therefore puts a mark into the buffer. A pickled file has the mark too,
because pickle calls `torch.save` for each tensor. At the end `program_report` removes the files that were opened for
writing and have the mark.
"""

import functools
import importlib
import importlib.util
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainmem.rehearsal.marked_files import MARK, has_mark
from trainmem.rehearsal.older_files import OlderFiles, moved
from trainmem.unknown import Assumed, Unknown


class Files:
    """Track the files of weights that this process saves.

    `saved` has the paths of the files that the process wrote without values.

    Args:
        changed: called, without arguments, after a file was written without values, or when `older` (`OlderFiles`) has
            noted a renamed file.
    """

    def __init__(self, changed: Callable[[], None]):
        self.changed = changed
        self.older = OlderFiles(changed)
        self.saved: set[str] = set()  # written without values
        self.has_holes = False  # whether the file that is being saved has any
        self.has_file = True  # whether it is saved by its path

    def count(self) -> int:
        """Return how many files this process, or a parent before it forked, has renamed or written without values."""
        return len(self.older.undo) + len(self.saved)

    def note(self, path: Any) -> None:
        self.saved.add(os.path.abspath(os.fspath(path)))
        self.changed()  # now, because this process may be killed

    def move(self, plain: Callable, src: Any, dst: Any, *args, **kwargs) -> Any:
        """Call `plain`, which renames, links or copies `src` to `dst`, and return its result.

        If `src` is a file in `saved` (written without values), or a folder with such files, add their new paths to
        `saved`.
        """
        if not isinstance(src, str | os.PathLike) or not isinstance(dst, str | os.PathLike):
            return plain(src, dst, *args, **kwargs)
        old, new = (os.path.abspath(os.fspath(path)) for path in (src, dst))
        if old in self.older.opened and has_mark(old):
            self.saved.add(old)
        self.saved -= {new}
        self.saved |= moved(self.saved, old, new)
        return plain(src, dst, *args, **kwargs)


class _Records:
    """Write torch's zip files, but with holes in place of storages with unknown values; `holes` counts such storages.

    `writer`: torch's own; `values`: the `Values` that this process tracks; `has_file`: whether the writer got a path.
    """

    def __init__(self, writer, values, has_file: bool):
        self.writer, self.values, self.has_file, self.holes = writer, values, has_file, 0

    def __getattr__(self, name: str):
        return getattr(self.writer, name)

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Write the record `name` of torch's zip file: the `size` bytes of `data`, or a hole of `size` bytes."""
        if isinstance(data, torch.UntypedStorage) and self.values.is_unknown_block(data.data_ptr()):
            self.holes += 1
            if self.has_file:  # another object, e.g. a buffer, may not be able to skip bytes
                return self.writer.write_record_metadata(name, size)
        return self.writer.write_record(name, data, size)


def install(files: Files, values) -> None:
    """Make torch.save and safetensors write holes (zeros) for values unknown to `Values`; note the files in `files`."""
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
        if path is f:
            files.older.set_aside(f)
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
    save_script = torch.jit.RecursiveScriptModule.save

    @functools.wraps(save_script)
    def save_script_known(module, f, **kwargs):
        files.older.set_aside(f)
        save_script(module, f, **kwargs)
        if not all(map(values.is_known, (*module.parameters(), *module.buffers()))):
            files.note(f)

    # A traced module has a method of its own. Exported programs are written by this class, too.
    torch.jit.RecursiveScriptModule.save = torch.jit.ScriptModule.save = save_script_known

    save_program = torch.export.save

    @functools.wraps(save_program)
    def save_program_known(program, f, **kwargs):
        save_program(program, f, **kwargs)
        weights = [each for each in program.state_dict.values() if isinstance(each, torch.Tensor)]
        if isinstance(f, str | os.PathLike) and not all(map(values.is_known, weights)):
            files.note(f)

    torch.export.save = save_program_known

    class Writer(torch._C.PyTorchFileWriter):
        def __init__(self, target, *args, **kwargs):
            if isinstance(target, str | os.PathLike):
                files.older.set_aside(target)
            super().__init__(target, *args, **kwargs)

    torch._C.PyTorchFileWriter = Writer
    torch.serialization.add_safe_globals([Assumed, Unknown])  # a checkpoint may hold a loss
    files.older.install()
    for owner, name in ((os, "rename"), (os, "replace"), (os, "link"), (shutil, "copyfile")):
        plain_move = getattr(owner, name)
        setattr(owner, name, functools.wraps(plain_move)(functools.partial(files.move, plain_move)))
    if not importlib.util.find_spec("safetensors"):
        return
    safetensors = importlib.import_module("safetensors")
    plain = safetensors.serialize_file

    @functools.wraps(plain)
    def serialize_known(tensors, filename, metadata=None):
        files.older.set_aside(filename)
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
