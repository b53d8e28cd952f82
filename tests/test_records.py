"""Runs and ratios: what is unknown, what an older file holds, what they say of themselves; and their file: several
writers, damaged lines, disks that are full or read-only."""

import json
import multiprocessing

import pytest
from machines import RUN

from perf_helpers.records import CATEGORIES, Comparison, Ratio, Run, Store, Timing, explain
from perf_helpers.unknown import NeedsValues, Unknown


def test_a_ratio_comes_back_as_it_was():
    ratio = Ratio(1.0, 0.9, 1.1, (1.0,))
    assert Ratio.from_dict(ratio.to_dict()) == ratio


def test_what_is_unknown_is_null_in_a_file_and_unknown_again():
    run = Run("rehearsed", "ok", losses=(Unknown(), 0.5), value={"share": [Unknown()]}, timing=Timing(*[Unknown()] * 5))
    plain = json.loads(json.dumps(run.to_dict(), allow_nan=False))
    assert (plain["losses"], plain["value"], plain["timing"]["step_seconds"]) == ([None, 0.5], {"share": [None]}, None)
    assert Run.from_dict(plain).losses == (None, 0.5)
    failed = json.loads(json.dumps(Comparison(run, run, Unknown("gone"), Ratio.unknown("gone")).to_dict()))
    assert failed["memory_ratio"] is None and not Ratio.from_dict(failed["speed_ratio"]).known


def test_an_unknown_ratio_is_carried_along_and_decides_nothing():
    ratio = Ratio.unknown("timed out") / 2
    assert str(ratio) == "not measured" and not ratio.known and ratio.pairs == ()
    assert (ratio.value.why, ratio.low.why, ratio.high.why) == ("timed out",) * 3
    with pytest.raises(NeedsValues, match="timed out"):
        assert ratio.low > 1
    assert not (Ratio(1.0, 0.9, 1.1, (1.0,)) / Unknown("gone")).known


def test_a_ratio_over_a_number_is_one():
    assert Ratio(1.0, 0.5, 2.0, (1.0, 3.0)) / 0.5 == Ratio(2.0, 1.0, 4.0, (2.0, 6.0))


def test_a_comparison_that_failed_says_so_and_shows_no_number():
    shown = repr(Comparison(RUN, RUN, Unknown("gone"), Ratio.unknown("gone")))
    assert shown == "vanilla against vanilla: memory not measured, speed not measured"
    assert "speed not known" in repr(Run("x", "ok", timing=Timing(*[Unknown()] * 5)))


def test_a_newer_files_unknown_fields_are_left_out():
    assert Run.from_dict(RUN.to_dict() | {"from_the_future": 1}).name == "vanilla"


def test_unknown_reads_not_measured():
    assert "not measured" in repr(Run("x", "ok"))
    assert "killed: gone" in repr(Run("x", "killed", "gone"))


def test_parts_sum_to_the_total():
    parts = explain(dict.fromkeys(CATEGORIES, 5), 50)
    assert sum(parts.values()) == 50 and parts["inside_operations"] == 50 - 5 * (len(CATEGORIES) - 1)


def test_a_run_of_the_first_schema_is_read():
    """It kept the samples of a function's step among the training arguments."""
    old = RUN.to_dict() | {"arguments": {"samples_per_step": 8}}
    del old["kind"], old["samples_per_step"]
    run = Run.from_dict(old)
    assert (run.kind, run.samples_per_step, run.arguments) == ("function", 8, {})
    assert Run.from_dict(RUN.to_dict()).arguments == {"bf16": True}


# ---- their file


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
