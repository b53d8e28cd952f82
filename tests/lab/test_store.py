"""Runs in their file: several writers, damaged lines, disks that are full or read-only."""

import multiprocessing

import pytest
from machines import RUN

from perf_helpers.lab.store import Store


def test_a_run_comes_back_as_it_was(tmp_path):
    store = Store(tmp_path / "deeper" / "runs.jsonl")
    store.append(RUN)
    (read,) = store.read()
    assert (read.memory, read.timing, read.losses) == (RUN.memory, RUN.timing, RUN.losses)


def test_a_damaged_line_is_reported_and_the_others_are_kept(tmp_path):
    store = Store(tmp_path / "runs.jsonl")
    store.append(RUN)
    with open(store.path, "ab") as file:
        file.write(b'{"name": "torn by a cra')
    store.append(RUN)
    with open(store.path, "ab") as file:
        file.write(b"[1, 2]\n\n\xff\xfe\n")
    with pytest.warns(UserWarning, match="line [0-9] is damaged") as warned:
        assert len(store.read()) == 2
    assert len(warned) == 3


def test_no_file_is_no_runs(tmp_path):
    assert Store(tmp_path / "none.jsonl").read() == []


def _write(path, count):
    for _ in range(count):
        Store(path).append(RUN)


def test_several_writers_lose_nothing(tmp_path):
    path = tmp_path / "runs.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, 50)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(Store(path).read()) == 200
