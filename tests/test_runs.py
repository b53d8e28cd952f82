"""Runs in their file: several writers, damaged lines, disks that are full or read-only."""

import multiprocessing

import pytest

from perf_helpers.runs import CATEGORIES, Comparison, Memory, Ratio, Run, Store, Timing, explain

RUN = Run(
    name="vanilla",
    status="ok",
    arguments={"bf16": True},
    memory=Memory(peak_bytes=10, kind="counted", breakdown=dict.fromkeys(CATEGORIES, 1), phases={"step": 3}),
    timing=Timing(0.5, 0.1, 2, 1, 8.0, (0.4, 0.6)),
    losses=(1.0, 0.5),
    value=[1, 2],
)


def test_a_run_comes_back_as_it_was(tmp_path):
    store = Store(tmp_path / "deeper" / "runs.jsonl")
    store.append(RUN)
    (read,) = store.read()
    assert (read.memory, read.timing, read.losses) == (RUN.memory, RUN.timing, RUN.losses)


def test_a_comparison_comes_back_as_it_was():
    comparison = Comparison(RUN, RUN, 1.0, Ratio(1.0, 0.9, 1.1, (1.0,)))
    assert Comparison.from_dict(comparison.to_dict()).speed_ratio == comparison.speed_ratio


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


def test_a_newer_files_unknown_fields_are_left_out():
    assert Run.from_dict(RUN.to_dict() | {"from_the_future": 1}).name == "vanilla"


def test_unknown_reads_not_measured():
    assert "not measured" in repr(Run("x", "ok"))
    assert "killed: gone" in repr(Run("x", "killed", "gone"))


def test_parts_sum_to_the_total():
    parts = explain(dict.fromkeys(CATEGORIES, 5), 50)
    assert sum(parts.values()) == 50 and parts["inside_operations"] == 50 - 5 * (len(CATEGORIES) - 1)
