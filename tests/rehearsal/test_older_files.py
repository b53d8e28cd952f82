"""A rehearsed program's view of its files, and what is left of the user's files after it."""

import builtins
import io
import os
import random
import shutil
from pathlib import Path

import pytest

from trainmem.rehearsal.older_files import OlderFiles, put_back

NAMES = ("a", "b", "c/a", "c/b", "c/d/a", "e/a")


def tree(folder):
    """Return {relative path: text} of the files below a folder, without those that a rehearsal has renamed."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "before-rehearsal" not in str(path))
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def users_folder(folder):
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"user {name}")
        os.utime(folder / name, (0, 0))
    return folder


@pytest.fixture
def older(monkeypatch):
    """Install and return an `OlderFiles`: files from before September 2001 are renamed, not overwritten or deleted."""
    for owner, names in (
        (builtins, ["open"]),
        (io, ["open"]),
        (os, ["rename", "replace", "unlink", "remove", "rmdir"]),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setenv("REHEARSAL_BEGAN", "1e9")
    guard = OlderFiles(lambda: None)
    guard.install()

    def settle(folder):
        """End the guard; put back the older files below a folder, as a rehearsal's report does; return their paths."""
        monkeypatch.undo()
        undo = [each for each in guard.undo if each[0].startswith(str(folder))]
        return put_back(undo, guard.start, guard.opened)

    guard.settle = settle
    return guard


def act(folder, draw):
    """Do something to a folder that a program may do: write, append, copy, rename or delete."""
    one, other = (folder / draw.choice(NAMES) for _ in range(2))
    folders = [folder / name for name in ("c", "c/d", "e", "f")]
    action = draw.choice(["write", "append", "copy", "delete", "replace", "delete folder", "rename folder", "make"])
    if action == "write" and one.parent.is_dir():
        one.write_text(f"new {draw.random()}")
    elif action == "append" and one.exists():
        with one.open("a") as file:
            file.write("more")
    elif action == "copy" and one.exists() and other.parent.is_dir() and one != other:
        shutil.copy2(one, other)
    elif action == "delete" and one.exists():
        os.remove(path=one)
    elif action == "replace" and one.exists() and other.parent.is_dir():
        os.replace(src=one, dst=other)
    elif action == "make":
        one.parent.mkdir(parents=True, exist_ok=True)
    elif "folder" in action and (old := draw.choice(folders)).exists():
        new = draw.choice(folders)
        if action == "delete folder":
            shutil.rmtree(old)
        elif not new.exists() and new.parent.exists() and not new.is_relative_to(old):
            shutil.move(old, new)


@pytest.mark.parametrize("seed", range(100))
def test_a_program_sees_its_own_changes_and_the_user_gets_all_files_back(tmp_path, older, seed):
    guarded, plain = users_folder(tmp_path / "guarded"), tmp_path / "plain"
    before = tree(guarded)
    actions, twin = random.Random(seed), random.Random(seed)
    shutil.copytree(guarded, plain)
    for path in plain.rglob("*"):
        os.utime(path)  # new files: nothing of this folder is kept
    for step in range(25):
        act(guarded, actions), act(plain, twin)
        assert tree(guarded) == tree(plain), step
    older.settle(guarded)
    assert before.items() <= tree(guarded).items()
    assert not [path for path in tmp_path.rglob("*") if "before-rehearsal" in path.name]


def test_a_link_is_kept_and_a_temporary_folder_goes(tmp_path, older):
    users_folder(tmp_path / "mine")
    shutil.copytree(tmp_path / "mine", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy")  # the copies have the age of their originals, but they are the program's own
    assert not older.undo and not (tmp_path / "copy").exists()
    (tmp_path / "link").symlink_to(tmp_path / "mine" / "a")
    os.utime(tmp_path / "link", (0, 0), follow_symlinks=False)
    (tmp_path / "link").unlink()
    assert not os.path.lexists(tmp_path / "link")
    assert older.settle(tmp_path) == [str(tmp_path / "link")] and (tmp_path / "link").is_symlink()


def test_an_earlier_rehearsals_renamed_file_is_not_overwritten(tmp_path, older):
    users_folder(tmp_path)
    (tmp_path / "a.before-rehearsal").write_text("of a rehearsal that was killed")
    Path(tmp_path, "a").write_text("new")
    assert older.settle(tmp_path) == [str(tmp_path / "a")] and (tmp_path / "a").read_text() == "user a"
    assert (tmp_path / "a.before-rehearsal").read_text() == "of a rehearsal that was killed"


def test_a_folder_with_files_that_are_not_the_rehearsals_is_left(tmp_path, older):
    users_folder(tmp_path)
    os.rename(tmp_path / "c", tmp_path / "f")
    users_folder(tmp_path)  # as a command would that the program starts: the guard does not see it
    os.utime(tmp_path / "c" / "b", (0, 0))
    older.settle(tmp_path)
    assert (tmp_path / "f" / "b").read_text() == (tmp_path / "c" / "b").read_text() == "user c/b"
