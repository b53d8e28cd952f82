"""Failed runs: code that uses a missing figure or value gets an error that names the run, the failure and
the remedy.
"""

import copy
import json
import math
import operator
import pickle
import statistics
import time

import numpy as np
import pytest
import torch

from perf_helpers import plots
from perf_helpers.widgets import explorers
from trainmem.records import Comparison, Ratio, Run, Store
from trainmem.texts import bytes_text, seconds_text
from trainmem.unknown import Missing, NeedsValues, RunFailed, Unknown, is_measured

FIGURES = ("memory", "timing", "losses", "value", "peak_bytes", "step_seconds", "samples_per_second")


def crash(task):
    return {}["width"]


def sleep(task):
    time.sleep(600)


def fill_the_memory(task):
    raise MemoryError("no room for 3 GB")


def kill_rank_1(task):
    import os
    import signal

    if os.environ.get("RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


WAYS = {
    "crashes": (crash, {}, "'crashes' crashed: KeyError: 'width' (line ", "Correct what the message names"),
    "sleeps": (sleep, {"timeout": 1}, "'sleeps' timed out: no result within 1 s. ", "seconds with timeout="),
    "fills": (fill_the_memory, {}, "'fills' ran out of memory: MemoryError: no room for 3 GB ", "smaller batch"),
    "loses a rank": (kill_rank_1, {"processes": 2}, "'loses a rank' was killed: rank 1: ", "how much memory is free"),
}


@pytest.fixture(scope="module")
def failed(lab):
    """Return a function that takes a key of `WAYS` (a way to fail) and returns a run that failed in this way. Each run
    is made once for all tests.
    """
    runs = {}

    def run(way):
        function, options, *_ = WAYS[way]
        runs[way] = runs.get(way) or lab.run(function, way, measure=("none",), **options)
        return runs[way]

    return run


@pytest.mark.parametrize("way", WAYS)
def test_a_value_of_a_run_that_failed_says_how_it_failed(failed, way):
    *_, begins, remedy = WAYS[way]
    run = failed(way)
    assert not run.ok and run.failure.startswith(begins) and remedy in run.failure
    for name in (*FIGURES, *["ranks"] * (run.processes > 1)):
        assert not getattr(run, name) and not is_measured(getattr(run, name)) and f"{getattr(run, name):,}"
        with pytest.raises(RunFailed) as caught:
            list(getattr(run, name))
        assert str(caught.value) == run.failure


USES = {
    "unpacked": lambda x: operator.itemgetter(0)(*x),
    "of a key": lambda x: x["losses"],
    "sliced": lambda x: x[4:],
    "asked for": lambda x: "key" in x,
    "in pairs": lambda x: list(zip(x, [1], strict=True)),
    "an attribute": lambda x: x.breakdown,
    "asked for one": lambda x: hasattr(x, "breakdown"),
    "called": lambda x: x(),
    "divided": lambda x: x / 1e6,
    "dividing": lambda x: 100 * 3 / x,
    "subtracted": lambda x: 3 - x,
    "negated": operator.neg,
    "summed": lambda x: sum([x, 1]),
    "averaged": lambda x: statistics.mean([x, 1]),
    "compared": lambda x: x > 3,
    "the largest": lambda x: max([1, x]),
    "sorted": lambda x: sorted([1, x]),
    "equal": lambda x: x == [1.0],
    "in a list": lambda x: 1.0 in [x],
    "rounded": round,
    "a whole number": int,
    "a number": float,
    "isnan": math.isnan,
    "a length": len,
    "a dict": dict,
    "merged": lambda x: {} | x,
    "keywords": lambda x: dict(**x),
    "an array": np.asarray,
    "a median": lambda x: np.median([x, 1.0]),
    "a tensor": torch.tensor,
    "pairs of a ratio": lambda x: Ratio.of_pairs(x, 1.05),
    "turns of a ratio": lambda x: Ratio.of_turns([x], 0, 1.05),
    "a curve": lambda x: plots.losses({"lost": [x]}),
}
LACKING = Run("lost", "timed out", "no result within 1 s", processes=2)


@pytest.mark.parametrize("use", USES)
def test_each_use_of_what_a_failed_run_lacks_raises_the_runs_failure(use):
    with pytest.raises(RunFailed) as caught:
        USES[use](LACKING.value)
    assert str(caught.value) == LACKING.failure


def test_what_looks_at_failed_runs_goes_on(tmp_path):
    assert (LACKING.value or {}) == {} and not LACKING.ranks and not (LACKING.memory and LACKING.memory.breakdown)
    assert f"{LACKING.peak_bytes:,} {LACKING.value}" == "not measured not measured"
    assert bytes_text(LACKING.peak_bytes) == seconds_text(LACKING.step_seconds) == "not measured"
    assert repr(LACKING) == "lost: timed out: no result within 1 s" and LACKING.failure in repr(LACKING.value)
    assert plots.table([LACKING]).rows == [["lost", "timed out", *["not measured"] * 1, "", *["not measured"] * 2]]
    drawn = plots.lines([1, 2], {"some": [3.0, LACKING.peak_bytes], "none": [LACKING.value] * 2}, "", "")
    assert [line.get_label() for line in drawn.lines] == ["some", "none (not measured)"]


def test_a_failed_run_is_the_same_after_a_file_a_copy_and_a_pickle(tmp_path):
    record = json.loads(json.dumps(LACKING.to_dict()))
    assert [record[name] for name in ("memory", "timing", "losses", "value", "ranks")] == [None] * 5
    store = Store(tmp_path / "runs.jsonl")
    store.append(LACKING)
    every = [*store.read(), Run.from_dict(record), copy.deepcopy(LACKING), pickle.loads(pickle.dumps(LACKING))]
    assert every == [LACKING] * 4
    for again in every:
        with pytest.raises(RunFailed, match="'lost' timed out: no result within 1 s"):
            again.value["losses"]


def test_what_a_failed_run_has_is_kept_and_what_was_not_requested_is_none():
    half = Run("half", "timed out", losses=(1.0,), value=[2], ranks=({"value": 1},), processes=2)
    assert (half.losses, half.value, half.ranks) == ((1.0,), [2], ({"value": 1},))
    assert isinstance(half.memory, Missing) and isinstance(half.peak_bytes, Missing)
    whole = Run("whole", "ok")
    assert [getattr(whole, name) for name in FIGURES] == [None] * len(FIGURES) and whole.failure == ""
    assert Run("one process", "crashed").ranks is None


def test_a_comparison_with_a_failed_run_is_shown_and_decides_nothing(lab, failed):
    fine = lab.run(lambda task: 1, "fine", measure=("none",))
    found = lab.compare(fine, failed("crashes"))
    assert isinstance(found, Comparison) and repr(found).endswith("memory not measured, speed not measured")
    for ratio in (found.memory_ratio, 100 * found.memory_ratio, found.speed_ratio.value, 1 / found.speed_ratio.low):
        assert isinstance(ratio, Unknown)
        with pytest.raises(RunFailed, match="not measured: 'crashes' crashed: KeyError: 'width'"):
            ratio > 1  # noqa: B015


def test_a_comparison_whose_turns_fail_names_both_runs(lab):
    two = [lab.run(sleep_unless_alone, name, measure=("none",)) for name in ("first", "second")]
    ratio = lab.compare(*two, turns=4, timeout=1).speed_ratio
    with pytest.raises(RunFailed, match="speed not measured: 'first and second in turns' timed out: no result"):
        max([1.0, ratio.value])


def sleep_unless_alone(task):
    import threading

    if threading.current_thread() is not threading.main_thread():
        time.sleep(600)


def test_a_rehearsal_leaves_out_what_needs_such_a_comparison(lab, failed, monkeypatch):
    fine = lab.run(lambda task: 1, "fine", measure=("none",))
    crashed = failed("crashes")
    monkeypatch.setattr(type(lab.machine), "rehearsed", True)
    with pytest.raises(NeedsValues, match="'crashes' crashed"):
        lab.compare(fine, crashed).memory_ratio > 1  # noqa: B015


@pytest.mark.parametrize(
    "picture",
    [lambda run: plots.memory([run]), plots.timeline, explorers.timeline],
    ids=["bars", "timeline", "explorer"],
)
def test_a_picture_of_a_failed_run_says_how_it_failed(picture):
    with pytest.raises(RunFailed, match="'lost' timed out"):
        picture(LACKING)
    with pytest.raises(ValueError, match="measure="):
        picture(Run("only timed", "ok"))
