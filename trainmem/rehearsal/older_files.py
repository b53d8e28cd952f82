"""Keep a user's files: what a rehearsed program overwrites, renames or deletes is put back after the program's end.

A file that is older than the rehearsal may be a result of a real run, e.g. a checkpoint in the program's output folder.
Instead of overwriting or deleting such a file, a rehearsal renames it, so that nothing is left at the file's path. Only
changes by Python's own functions are noticed. Changes by a command that the program starts, e.g. `rm`, are not.
"""

import builtins
import contextlib
import functools
import io
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any


class OlderFiles:
    """Rename files from before the rehearsal that this process wants to overwrite or delete.

    `undo` has [present path, earlier path] of each renaming, in order: by this object, or by the program itself.
    `opened` has the paths of the files that the process opened to write bytes. `aside` has the present paths of the
    files and folders that this object renamed or copied. `install` replaces Python's functions by methods of this
    object; the argument `plain` of such a method is the function that the method replaces.

    Args:
        changed: called after each change of `undo`, with no arguments.
    """

    def __init__(self, changed: Callable[[], None]):
        self.changed = changed
        self.start = float(os.environ.get("REHEARSAL_BEGAN", "inf"))
        self.opened: set[str] = set()
        self.undo: list[list[str]] = []
        self.aside: set[str] = set()  # present paths of files and folders that the program has overwritten or deleted
        self.rename = os.rename

    def install(self) -> None:
        """Replace `open`, and the functions of `os` that rename and delete, by methods of this object, e.g. `move`."""
        builtins.open = io.open = _wrapped(self.open, open)
        os.rename, os.replace = _wrapped(self.move, os.rename), _wrapped(self.move, os.replace)
        os.unlink = os.remove = _wrapped(self.remove, os.unlink)
        os.rmdir = _wrapped(self.remove_folder, os.rmdir)

    def is_older(self, name: str) -> bool:
        """Return whether there is a file or link at `name` that is from before the rehearsal; False for a folder."""
        with contextlib.suppress(OSError):
            found = os.lstat(name)
            return name not in self.opened and not stat.S_ISDIR(found.st_mode) and found.st_mtime < self.start
        return False

    def is_aside(self, name: str) -> bool:
        """Return whether the path `name`, or the path of a folder above `name`, is in `aside` (see `OlderFiles`)."""
        return any(name == each or name.startswith(each + os.sep) for each in self.aside)

    def set_aside(self, path: Any) -> None:
        """Rename a file from before the rehearsal to an unused path, so that a new file can be written at `path`."""
        name = _absolute(path)
        if self.is_older(name) and os.path.isfile(name):
            self._rename(name)

    def _rename(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another rank has renamed it just now
            self.rename(name, now := _unused(name))
            self._note(now, name)

    def _note(self, now: str, before: str, is_aside: bool = True) -> None:
        self.undo.append([now, before])
        self.aside |= {now} if is_aside else set()
        self.changed()  # now, because this process may be killed

    def open(self, plain: Callable, file: Any, mode: str = "r", *args, **kwargs) -> Any:
        """Open `file` with `plain`; if it is from before the rehearsal, first rename (mode "w") or copy ("a") it."""
        if isinstance(file, str | os.PathLike) and isinstance(mode, str) and {*mode} & {"a", "w"}:
            name = _absolute(file)
            if "a" in mode and self.is_older(name) and os.path.isfile(name):
                shutil.copy2(name, copy := _unused(name))
                self._note(copy, name)
            if "w" in mode:
                self.set_aside(name)
                self.opened |= {name} if "b" in mode else set()
        return plain(file, mode, *args, **kwargs)

    def move(self, plain: Callable, src: Any, dst: Any, **kwargs) -> None:
        """Rename the file or folder `src` to `dst` with `plain`, the original `os.rename` or `os.replace`.

        If a file at `dst` is from before the rehearsal, that file first gets another path (see `set_aside`). If `src`,
        or a file in the folder `src`, is from before the rehearsal, add [`dst`, `src`] to `undo`.
        """
        if kwargs or isinstance(src, int) or isinstance(dst, int):
            return plain(src, dst, **kwargs)
        old, new = _absolute(src), _absolute(dst)
        inside = {os.path.join(folder, name) for folder, _, names in os.walk(old) for name in names}
        is_older = self.is_older(old) or any(map(self.is_older, inside)) or bool(inside & self.aside)
        if os.path.lexists(old) and old != new:
            self.set_aside(new)
        plain(src, dst)
        if is_older and old != new:
            self._note(new, old, is_aside=False)
        self.opened, self.aside = moved(self.opened - {new}, old, new), moved(self.aside, old, new)

    def remove(self, plain: Callable, path: Any, *, dir_fd: int | None = None) -> None:
        """Delete a file with `plain`; if the file is from before the rehearsal, rename it instead."""
        name = _absolute(path, dir_fd)
        if not self.is_aside(name):
            self._rename(name) if self.is_older(name) else plain(path, dir_fd=dir_fd)

    def remove_folder(self, plain: Callable, path: Any, *, dir_fd: int | None = None) -> None:
        """Delete an empty folder with `plain`; if it has entries, all of them in `aside`, rename the folder instead."""
        name = _absolute(path, dir_fd)
        inside = {os.path.join(name, each) for each in os.listdir(name)} if os.path.isdir(name) else set()
        if not self.is_aside(name):
            self._rename(name) if inside and inside <= self.aside else plain(path, dir_fd=dir_fd)


def moved(paths: Iterable[str], old: str, new: str) -> set[str]:
    """Return `paths` after the file or folder `old` was renamed to `new`: `old` and all paths in it are changed."""
    return {new + path[len(old) :] if path == old or path.startswith(old + os.sep) else path for path in paths}


def _wrapped(method: Callable, plain: Callable) -> Callable:
    return functools.wraps(plain)(functools.partial(method, plain))


def _absolute(path: Any, dir_fd: int | None = None) -> str:
    folder = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else ""
    return os.path.abspath(os.path.join(folder, os.fsdecode(path)))


def _unused(name: str) -> str:
    aside = f"{name}.before-rehearsal"
    while os.path.lexists(aside):  # from a rehearsal that was killed
        aside += "-"
    return aside


def put_back(undo: Iterable[Sequence[str]], start: float, opened: Collection[str]) -> list[str]:
    """Give renamed files and folders their earlier paths again, and return these earlier paths.

    What the program wrote to an earlier path is deleted. But a folder at an earlier path is left as it is if it has a
    file that is not the program's: a file that is older than `start` and not in `opened`.

    Args:
        undo: [present path, earlier path] of each renamed file or folder, in the order of the renamings. Present paths
            that do not exist any longer are skipped.
        start: when the rehearsal began, in seconds since 1970.
        opened: paths of the files that the program opened to write bytes.
    """
    found = []
    for now, before in reversed([*undo]):
        if not os.path.lexists(now):
            continue
        if os.path.isdir(before) and not os.path.islink(before):
            inside = {os.path.join(folder, name) for folder, _, names in os.walk(before) for name in names}
            if any(os.lstat(name).st_mtime < start for name in inside.difference(opened)):  # not the program's own
                continue
            shutil.rmtree(before)
        os.makedirs(os.path.dirname(before), exist_ok=True)
        os.replace(now, before)
        found.append(before)
    return found
