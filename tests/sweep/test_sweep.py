"""Sweeps from a user's view: rows on several workers, stored runs, continued sweeps; and the command."""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from types import SimpleNamespace

import psutil
import pytest
from machines import GOOD, H200
from test_dask_workers import gone, spans

from perf_helpers import sweep
from perf_helpers.lab.lab import Lab
from perf_helpers.sweep import Plan, Workers, dask_workers
from trainmem.core import hardware
from trainmem.core.outcomes import Outcome
from trainmem.measure import executors
from trainmem.records import Memory, Store

TASK = {"model": "bert-tiny", "seq_len": 16, "dataset_size": 64}
FOUR = {
    "task": TASK,
    "measure": "memory",
    "grid": {"per_device_train_batch_size": [2, 4], "optim": ["sgd", "adamw_torch"]},
}


@pytest.fixture
def quick(monkeypatch):
    """Return a function that replaces the training of a sweep's rows by a stub, which takes no time and returns a peak.

    The function's argument is called with each row's name before the stub returns.
    """

    def replace(before=lambda name: None):
        def measure(experiment, meters, timeout):
            before(experiment.name)
            return Outcome(memory=Memory(1, "counted"))

        monkeypatch.setattr(executors, "measure", measure)

    return replace


@pytest.mark.nightly
def test_a_sweep_is_performed_by_several_workers_at_once_and_kept_in_one_store(client, tmp_path):
    messages = []
    with Workers(client, tell=messages.append) as executor:
        lab = Lab("cpu", out=tmp_path, executor=executor)
        found = sweep.run(lab, FOUR, tell=messages.append)
        again = sweep.run(Lab("cpu", out=tmp_path, executor=executor), FOUR, tell=messages.append)
    assert found.ok and [run.name for run in found.runs] == [row.name for row in Plan.of(FOUR).rows]
    peaks = {run.name: run.peak_bytes for run in found.runs}
    assert peaks["per_device_train_batch_size=2, optim=adamw_torch"] > peaks["per_device_train_batch_size=2, optim=sgd"]
    assert all(sum(run.memory.breakdown.values()) == run.peak_bytes for run in found.runs)
    by_worker = spans(run.attempts[0] for run in found.runs)
    assert len(by_worker) == 2 and all(len(run.attempts) == 1 for run in found.runs)
    for calls in by_worker.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(calls)), calls
    assert {run.id for run in lab.runs} == {run.id for run in found.runs}
    assert {run.id for run in Store(tmp_path / "runs.jsonl").read()} == {run.id for run in lab.runs}
    assert again.runs == found.runs and len(again.reused) == 4, "and nothing was trained again"
    assert [line for line in messages if line.startswith("4 of 4 rows are taken")]
    workers = {run.attempts[0]["worker"] for run in found.runs}
    assert all(worker in repr(found) for worker in workers) and "(earlier)" in repr(again)


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path, quick, monkeypatch):
    performed, messages = [], []
    quick(performed.append)

    def interrupt(line):
        messages.append(line)
        if line.startswith("2/4"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep.run(Lab("cpu", out=tmp_path), FOUR, tell=interrupt)
    assert messages[-1].startswith("interrupted: 2 of 4 rows") and len(performed) == 2
    found = sweep.run(Lab("cpu", out=tmp_path), FOUR, tell=messages.append)
    assert found.ok and len(performed) == len(set(performed)) == 4 and len(found.reused) == 2
    assert any(line.startswith("2 of 4 rows are taken") for line in messages)
    sweep.run(Lab("cpu", out=tmp_path), FOUR)
    assert len(performed) == 4
    versions = hardware.versions() | {"torch": "1.0"}
    monkeypatch.setattr(hardware, "versions", lambda: versions)
    assert not sweep.run(Lab("cpu", out=tmp_path), FOUR).reused and len(performed) == 8, "another torch, other figures"
    longer = FOUR | {"task": TASK | {"seq_len": 32}}
    assert not sweep.run(Lab("cpu", out=tmp_path), longer).reused, "another task"
    timed = sweep.run(Lab("cpu", out=tmp_path), FOUR | {"measure": ["memory", "time"]})
    assert not timed.reused, "their time is not known yet"


def test_a_row_is_taken_from_a_run_of_its_name_before_one_of_another(quick, tmp_path):
    quick()
    lab = Lab("cpu", out=tmp_path)
    first = sweep.run(lab, FOUR).runs[0]
    lab.store.append(dataclasses.replace(first, name="the same, trained by itself", id="later"))
    assert sweep.run(Lab("cpu", out=tmp_path), FOUR).runs[0] == first


def test_what_failed_is_tried_again_and_what_the_libraries_refuse_is_a_row_that_failed(tmp_path, monkeypatch):
    statuses = iter(["crashed", "invalid", "ok", "ok"])
    monkeypatch.setattr(executors, "measure", lambda *_: Outcome(next(statuses), "why", Memory(1, "counted")))
    plan = {"task": TASK, "measure": "memory", "grid": {"optim": ["sgd", "adafactor"]}}
    first = sweep.run(Lab("cpu", out=tmp_path), plan)
    assert [run.status for run in first.runs] == ["crashed", "refused"]
    assert first.failures() == ["optim=sgd: crashed, why", "optim=adafactor: refused, why"]
    assert sweep.run(Lab("cpu", out=tmp_path), plan).ok


@pytest.mark.nightly
def test_an_interrupted_sweep_ends_what_its_workers_do(client, tmp_path):
    plan = {"task": TASK, "measure": "time", "rows": [{"name": "short", "max_steps": 2}, {"name": "endless"}]}
    plan |= {"steps": 10**6, "timeout": 600}

    def interrupt(line):
        if line.startswith("1/2"):
            raise KeyboardInterrupt

    def measured():
        from trainmem.measure import forkserver

        return [*dask_workers._attended], [*forkserver.SERVER.measuring]

    with Workers(client) as executor:
        with pytest.raises(KeyboardInterrupt):
            sweep.run(Lab("cpu", out=tmp_path, executor=executor), plan, tell=interrupt)
        while any(any(lists) for lists in client.run(measured).values()):
            time.sleep(0.1)
    (run,) = Store(tmp_path / "runs.jsonl").read()
    assert run.name == "short" and run.ok


@pytest.mark.nightly
def test_a_row_that_kills_its_workers_fails_and_the_others_are_performed(client, tmp_path, quick):
    starts = tmp_path / "starts"

    def before(name):
        if name == "deadly":
            with starts.open("a") as file:
                file.write(f"{os.getpid()}\n")
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "deadly once" and not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    quick(before)
    names = ["deadly", "fine", "deadly once", "also fine"]
    rows = [{"name": name, "max_steps": n} for n, name in enumerate(names, 1)]
    with Workers(client) as executor:
        found = sweep.run(
            Lab("cpu", out=tmp_path, executor=executor), {"task": TASK, "measure": "memory", "rows": rows}
        )
    assert not found.ok and [run.status for run in found.runs] == ["killed", "ok", "ok", "ok"]
    assert [len(run.attempts) for run in found.runs] == [2, 1, 2, 1] and len(starts.read_text().split()) == 2
    assert "second attempt" in repr(found) and found.failures()[0].startswith("deadly: killed, worker ")
    assert found.to_dict()["status"] == "failed"
    assert {run.id: run for run in Store(tmp_path / "runs.jsonl").read()} == {run.id: run for run in found.runs}


def test_without_dask_one_row_follows_another_and_it_is_reported_how_to_have_more(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    messages = []
    with dask_workers.connected(tell=messages.append) as executor:
        assert executor is None
    assert len(messages) == 1 and "one by one" in messages[0] and dask_workers.INSTALL in messages[0]
    for options in ({"workers": 2}, {"scheduler": "tcp://127.0.0.1:9"}):
        with pytest.raises(ValueError, match="need Dask: pip install"), dask_workers.connected(**options):
            pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "workers=0: give a whole number"),
        ({"workers": 2, "scheduler": "tcp://127.0.0.1:9"}, "keep one of the two"),
        ({"scheduler": "tcp://127.0.0.1:9"}, "no scheduler answers at 'tcp://127.0.0.1:9'"),
        ({"scheduler": "nowhere"}, "no scheduler answers at 'nowhere'"),
    ],
)
def test_a_cluster_that_cannot_be_had_is_one_line(monkeypatch, options, words):
    pytest.importorskip("distributed", reason="pip install perf-helpers[cluster]")
    monkeypatch.setattr(dask_workers, "PATIENCE_SECONDS", 0.5)
    with pytest.raises(ValueError) as refused, dask_workers.connected(**options):
        pass
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("visible", "uuids", "wanted"),
    [
        (None, ("GPU-a", "GPU-b"), ["GPU-a", "GPU-b"]),
        ("4,6", (None, None), ["4", "6"]),
        (None, (None,) * 2, ["0", "1"]),
    ],
)
def test_every_gpu_has_a_worker_that_sees_it_alone(monkeypatch, visible, uuids, wanted):
    pytest.importorskip("distributed", reason="pip install perf-helpers[cluster]")
    from dataclasses import replace

    gpus = tuple(replace(H200, index=number, uuid=uuid) for number, uuid in enumerate(uuids))
    monkeypatch.setattr(hardware, "describe", lambda: replace(GOOD, gpus=gpus))
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    made = []

    class Cluster:
        def __init__(self, workers, **_):
            made.append([worker["options"] for worker in workers.values()])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    distributed = SimpleNamespace(SpecCluster=Cluster, Nanny=None, Scheduler=None)
    for count in (None, 1):
        with dask_workers._own_cluster(distributed, count):
            pass
    every, one = made
    assert [options["env"]["CUDA_VISIBLE_DEVICES"] for options in every] == wanted and len(one) == 1
    assert all(options["resources"] == {"device": 1} and options["nthreads"] == 1 for options in every)
    with pytest.raises(ValueError, match=r"workers=3: .*at most 2"):
        dask_workers._own_cluster(distributed, 3).__enter__()


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def command(tmp_path):
    """Return two functions: one starts `perf-helpers sweep` on a plan, one lists the processes of the sweep."""
    mark = uuid.uuid4().hex

    def start(plan, *words):
        (tmp_path / "plan.toml").write_text(plan)
        line = [sys.executable, "-m", "perf_helpers.cli", "sweep", str(tmp_path / "plan.toml"), *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        environment = os.environ | {"MARK_OF_THE_TEST": mark}
        return subprocess.Popen([*line, "--out", str(tmp_path / "out")], env=environment, **pipes)

    def left():
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("MARK_OF_THE_TEST") == mark:
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    return start, left


HEAD = "measure = 'memory'\n[task]\nseq_len = 16\n"


@pytest.mark.nightly
def test_the_command_prints_one_object_says_what_failed_and_leaves_nothing(command, tmp_path):
    pytest.importorskip("distributed", reason="pip install perf-helpers[cluster]")
    start, left = command
    process = start(HEAD + "[grid]\nmodel = ['bert-tiny', 'mixtral-8x7b']", "--json")
    printed, errors = process.communicate()
    assert process.returncode == 1, errors
    result = json.loads(printed)
    assert result["status"] == "failed" and [run["status"] for run in result["runs"]] == ["ok", "refused"]
    assert [run["attempts"][0]["worker"] for run in result["runs"]] == ["cpu-0"] * 2 or hardware.describe().gpus
    assert result["runs"][0]["memory"]["peak_bytes"] > 0 and "1/2 " in errors and "Traceback" not in errors
    assert all(map(gone, left()))


@pytest.mark.nightly
def test_an_interrupted_command_is_exit_code_130_and_leaves_nothing(command, tmp_path):
    pytest.importorskip("distributed", reason="pip install perf-helpers[cluster]")
    start, left = command
    plan = "steps = 1000000\ntimeout = 600\nmeasure = 'time'\n[task]\nmodel = 'bert-tiny'\nseq_len = 16\n"
    process = start(plan + "[[rows]]\nname = 'short'\nmax_steps = 2\n[[rows]]\nname = 'endless'\n", "--workers", "1")
    for line in process.stderr:
        if line.startswith("1/2 short: ok"):
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    printed, errors = process.communicate()
    assert (process.returncode, printed) == (130, ""), errors
    assert "interrupted: 1 of 2 rows" in errors and "Traceback" not in errors, errors
    assert all(map(gone, left()))
