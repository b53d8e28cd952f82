"""Records of runs and ratios, with unknown values and in older files; the file that stores them, with several writers,
damaged lines, and full or read-only disks.
"""

import builtins
import dataclasses
import errno
import json
import multiprocessing
import os
import resource
import signal
import warnings

import pytest
from machines import RUN

from trainmem import records
from trainmem.records import CATEGORIES, Comparison, Ratio, Run, Store, Timing, explain
from trainmem.unknown import NeedsValues, Unknown


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
    with pytest.raises(NeedsValues, match="timed out") as caught:
        assert ratio.low > 1
    assert "is_measured" in caught.value.__notes__[0], "what to ask first"
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


def read_with_damage(store):
    """Return (ids of the records, numbers of the damaged lines) of a `Store`."""
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        return [run.id for run in store.read()], [
            int(str(each.message).partition(", line ")[2].split()[0]) for each in reported
        ]


def test_a_last_line_that_ends_anywhere_costs_nothing_but_itself(tmp_path):
    store = Store(tmp_path / "runs.jsonl")
    store.append(Run("a run", "ok", id="first"))
    start = store.path.stat().st_size
    store.append(Run("a run", "ok", id="second"))
    whole = store.path.read_bytes()
    for length in range(start, len(whole) + 1):
        store.path.write_bytes(whole[:length])
        is_whole = length >= len(whole) - 1  # but for the end of the line
        left = (["first", "second"], []) if is_whole else (["first"], [2] if length > start else [])
        assert read_with_damage(store) == left, length
        store.append(Run("a run", "ok", id="third"))
        assert read_with_damage(store) == (left[0] + ["third"], left[1]), length


NAN = json.dumps(RUN.to_dict()).replace("0.5", "NaN")
DAMAGED = ["NaN", "null", "[]", "{}", "0", "\0" * 500, "[" * 10_000, *(NAN.replace(*each) for each in (
    ('"peak_bytes": 10', '"peak_bytes": NaN'), ('"machine": {}', '"machine": NaN'), ('"status": "ok"', '"status": NaN'),
    ('"task": {}', '"task": NaN'), ('"processes": 1', '"processes": NaN'), ('"attempts": []', '"attempts": NaN'),
))]  # fmt: skip


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: line[:5] if line in DAMAGED[:7] else "a field")
def test_what_is_no_record_is_a_damaged_line_and_a_loss_may_be_nan(tmp_path, line):
    store = Store(tmp_path / "runs.jsonl")
    store.path.write_text(f"{NAN}\n{line}\n{NAN}\n")
    assert read_with_damage(store) == (["", ""], [2])
    with warnings.catch_warnings(action="ignore"):
        assert [str(run.losses) for run in store.read()] == ["(1.0, nan)"] * 2


def test_a_run_from_the_future_is_a_run_like_any_other_and_the_next_one_follows_it(tmp_path):
    store = Store(tmp_path / "runs.jsonl")
    for date in ("2999-01-01T00:00:00+00:00", "2026-01-01T00:00:00+00:00"):  # the clock was set back
        store.append(dataclasses.replace(RUN, date=date))
    assert [run.date[:4] for run in store.read()] == ["2999", "2026"]


def test_a_disk_that_is_full_gets_nothing_half_written_and_one_that_is_read_only_keeps_what_it_has(disk):
    folder = disk("32k")
    store, kept = Store(folder / "runs.jsonl"), 0
    with pytest.raises(OSError) as full:
        while True:
            store.append(RUN)
            kept += 1
    assert full.value.errno == errno.ENOSPC and kept > 3
    assert read_with_damage(store) == ([""] * kept, [])
    page = folder / "page.html"
    page.touch()
    with pytest.raises(OSError, match="No space left"):
        records.write_whole(page, "new " * 10_000)
    assert sorted(os.listdir(folder)) == [".runs.jsonl.lock", "page.html", "runs.jsonl"] and not page.read_text()
    disk("32k", "remount", "ro")
    for path in (store.path, folder / "deeper" / "runs.jsonl"):
        with pytest.raises(OSError, match="Read-only"):
            Store(path).append(RUN)
    assert len(store.read()) == kept


def test_no_file_is_no_runs(tmp_path):
    assert Store(tmp_path / "none.jsonl").read() == []


def _write(path, count):
    for _ in range(count):
        Store(path).append(RUN)


def _write_until_killed(path):
    """Append a run to the store at `path`, and let the kernel kill this process in the middle of the line, by a limit
    on the size of files.
    """

    def limited(file, *arguments):
        size = os.path.getsize(file)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100,) * 2)
        return builtins.open(file, *arguments)

    records.open = limited  # called when the lock is held
    Store(path).append(RUN)


def test_of_eight_writers_one_is_killed_in_mid_write_and_only_its_line_is_lost(tmp_path):
    path = tmp_path / "runs.jsonl"
    Store(path).append(RUN)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, 10)) for _ in range(7)]
    writers.insert(3, context.Process(target=_write_until_killed, args=(path,)))
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0, -signal.SIGXFSZ, 0, 0, 0, 0]
    runs, damage = read_with_damage(Store(path))
    assert len(runs) == 71 and len(damage) == 1
