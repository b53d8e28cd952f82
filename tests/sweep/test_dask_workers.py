"""Dask's workers: one call per device at a time; the call of a killed worker runs once more on another one; nothing is
left behind.
"""

import itertools
import logging
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from machines import TINY

from perf_helpers.lab.lab import Lab
from perf_helpers.sweep import Workers, dask_workers
from trainmem.core.outcomes import Outcome
from trainmem.core.training import Experiment
from trainmem.measure import executors


def gone(pid):
    """Wait until a process has ended, or is a zombie that no parent collects; return True.

    The test's time limit ends the wait. `pid`: id of the process.
    """
    while psutil.pid_exists(pid):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return True


def spans(attempts):
    """Return {address of a worker: [(when a call began, when it ended)]}, the earliest call first.

    `attempts`: the calls, each a dict with "address" of the worker, "began" and "ended".
    """
    found = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt["began"]):
        found.setdefault(attempt["address"], []).append((attempt["began"], attempt["ended"]))
    return found


@pytest.mark.nightly
def test_workers_work_at_once_and_never_two_on_one_device(client):
    def nap():
        time.sleep(0.4)
        return Outcome()

    # Each worker has two threads, and two clients ask: only the resource keeps calls apart.
    with Workers(client) as first, Workers(client) as second:
        futures = [executors.submit(executor, nap) for executor in (first, second) * 3]
        outcomes = [executors.outcome_of(future) for future in futures]
    by_worker = spans(outcome.attempts[0] for outcome in outcomes)
    assert len(by_worker) == 2 and all(map(bool, by_worker.values()))
    for calls in by_worker.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(calls)), calls
    first_spans, second_spans = by_worker.values()
    assert any(a[0] < b[1] and b[0] < a[1] for a in first_spans for b in second_spans), "at no moment did both work"


@pytest.mark.nightly
def test_a_killed_workers_experiment_is_made_once_more_elsewhere_and_leaves_nothing(client, tmp_path):
    mark, release = tmp_path / "began", tmp_path / "release"

    def busy():
        while not release.exists():
            time.sleep(0.05)

    def experiment(_):
        if mark.exists():
            return "the second time"
        draft = mark.with_suffix(".tmp")
        draft.write_text(f"{os.getpid()} {os.getppid()}")
        draft.rename(mark)
        time.sleep(1000)

    reported, runs = [], []
    with Workers(client, tell=reported.append) as executor:
        lab = Lab("cpu", out=tmp_path, executor=executor)
        executor.submit(busy)
        thread = threading.Thread(target=lambda: runs.append(lab.run(experiment, "once", measure=("none",))))
        thread.start()
        while not mark.exists():
            time.sleep(0.05)
        clean, server = map(int, mark.read_text().split())
        before = set(client.nthreads())
        os.kill(psutil.Process(server).ppid(), signal.SIGKILL)  # the worker
        while not set(client.nthreads()) - before or len(executor.seen()) < 2:
            time.sleep(0.05)
        thread.join(1)
        assert thread.is_alive(), "the worker that was started in its place is not elsewhere"
        release.touch()
        thread.join()
    assert gone(clean) and gone(server)
    (run,) = runs
    assert run.ok and run.value == "the second time"
    killed, done = run.attempts
    assert (killed["status"], done["status"]) == ("killed", "ok") and "was killed" in killed["message"]
    assert killed["worker"] != done["worker"] and killed["address"] != done["address"]
    assert [line for line in reported if "once more elsewhere" in line and killed["address"] in line]
    assert lab.store.read() == [run]


@pytest.mark.nightly
def test_two_killed_workers_are_enough_and_the_others_go_on(client, tmp_path):
    starts = tmp_path / "starts"

    def deadly():
        with starts.open("a") as file:
            file.write("again\n")
        os.kill(os.getpid(), signal.SIGKILL)

    with Workers(client) as executor:
        deadly_one = executors.submit(executor, deadly)
        others = [executors.submit(executor, lambda n=n: Outcome(value=n)) for n in range(4)]
        outcome = executors.outcome_of(deadly_one)
        values = [executors.outcome_of(other).value for other in others]
    assert outcome.status == "killed" and outcome.message.count("was killed") == 2, outcome
    assert starts.read_text().splitlines() == ["again"] * 2
    assert [attempt["status"] for attempt in outcome.attempts] == ["killed"] * 2
    assert values == [0, 1, 2, 3]


@pytest.mark.nightly
def test_another_worker_at_the_same_address_does_not_pass_for_the_one_before(client):
    from dataclasses import replace

    with Workers(client) as executor:
        executor.submit(os.getpid).result()
        address, worker = next(iter(executor._workers.items()))  # the one that gets the next call
        executor._workers[address] = replace(worker, id="Worker-before")
        outcome = executors.outcome_of(executors.submit(executor, Outcome))
    assert outcome.ok and [attempt["status"] for attempt in outcome.attempts] == ["killed", "ok"]


@pytest.mark.nightly
def test_an_abandoned_call_is_ended_with_its_processes(client, tmp_path):
    endless = Experiment("endless", TINY, steps=10**6)

    def attended():
        from perf_helpers.sweep import dask_workers
        from trainmem.measure import forkserver

        return [*dask_workers._attended], [*forkserver.SERVER.measuring]

    with Workers(client) as executor:
        future = executors.submit(executor, executors.measure, endless, ("time",), 600)
        while not (running := [pid for _, pids in client.run(attended).values() for pid in pids]):
            time.sleep(0.1)
        assert future.cancel()
        assert all(map(gone, running))
        assert executor.submit(lambda: "free again").result() == "free again"
    while any(calls for calls, _ in client.run(attended).values()):
        time.sleep(0.1)


def test_a_run_has_the_machine_and_the_packages_of_where_it_ran(client, elsewhere, tmp_path):
    reported, one_elsewhere = [], min(client.nthreads())
    elsewhere(one_elsewhere)
    with Workers(client, tell=reported.append) as executor:
        outcomes = [executors.outcome_of(executors.submit(executor, Outcome)) for _ in range(2)]
        while {outcome.attempts[0]["address"] for outcome in outcomes} < set(client.nthreads()):
            outcomes.append(executors.outcome_of(executors.submit(executor, lambda: time.sleep(0.1) or Outcome())))
            futures = [executors.submit(executor, lambda: time.sleep(0.3) or Outcome()) for _ in range(2)]
            outcomes += map(executors.outcome_of, futures)
        lab = Lab("cpu", out=tmp_path, executor=executor)
        runs = [lab.keep(Experiment("kept", TINY), outcome) for outcome in outcomes]
    for run in runs:
        is_elsewhere = run.attempts[-1]["address"] == one_elsewhere
        assert (run.machine["name"] == "another machine") == is_elsewhere == (run.versions["torch"] == "1.0")
    (line,) = [line for line in reported if "do not compare" in line]
    assert "torch 1.0 (here" in line and "\n" not in line


@pytest.mark.nightly
def test_experiments_train_without_dasks_settings_each_on_its_part_of_the_cores(client, tmp_path):
    def look(_):
        import torch

        return [os.environ.get("OMP_NUM_THREADS"), os.environ.get("MALLOC_TRIM_THRESHOLD_"), torch.get_num_threads()]

    reported = []
    with Workers(client, tell=reported.append) as executor:
        lab = Lab("cpu", out=tmp_path, executor=executor)
        client.wait_for_workers(2)
        while len(executor.seen()) < 2:
            time.sleep(0.05)
        run = lab.run(look, measure=("none",))
    assert run.value == [None, None, max(1, lab.machine.cpu_cores // 2)], run
    assert run.attempts[-1]["sharing"] == 2 and [line for line in reported if "share the cores" in line]


def test_what_dask_sets_for_its_own_tasks_is_undone_and_what_a_user_sets_stays(monkeypatch):
    settings = {"OMP_NUM_THREADS": 1, "MKL_NUM_THREADS": 1}
    monkeypatch.setitem(sys.modules, "dask.config", SimpleNamespace(get=lambda name, default: settings))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MKL_NUM_THREADS", "4")
    dask_workers.without_dasks_settings()
    assert "OMP_NUM_THREADS" not in os.environ and os.environ["MKL_NUM_THREADS"] == "4"


def test_by_dasks_own_executor_equal_calls_are_two_experiments(client):
    def chance():
        import uuid

        return Outcome(value=uuid.uuid4().hex)

    futures = [executors.submit(client.get_executor(), chance) for _ in range(2)]
    first, second = map(executors.outcome_of, futures)
    assert first.value != second.value and first.attempts[0]["address"] in client.nthreads()


@pytest.mark.nightly
def test_dasks_own_executor_trains_and_compares_and_a_run_has_the_machine_that_performed_it(
    client, elsewhere, tmp_path
):
    elsewhere()
    executor = client.get_executor(pure=False, resources={"device": 1})
    lab = Lab("cpu", out=tmp_path, executor=executor)
    runs = [lab.train("afar", task=TINY, steps=2, per_device_train_batch_size=n) for n in (2, 2, 4)]
    comparison = lab.compare(runs[0], runs[2], turns=4)
    assert lab.machine.name == "another machine" and lab.versions["torch"] == "1.0"
    for run in runs:
        assert run.ok and run.peak_bytes and run.step_seconds
        assert run.machine["name"] == "another machine" and run.versions["torch"] == "1.0"
        (attempt,) = run.attempts
        assert attempt["address"] in client.nthreads() and attempt["began"] < attempt["ended"]
    assert runs[0].attempts != runs[1].attempts, "equal calls are two experiments"
    assert comparison.speed_ratio.known and comparison.memory_ratio == runs[2].peak_bytes / runs[0].peak_bytes


@pytest.fixture
def in_this_process():
    """Yield a function (number of workers, more options) that makes a Dask client with workers in this process, by
    default without the resource "device".
    """
    distributed = pytest.importorskip("distributed", reason="pip install perf-helpers[cluster]")
    made = []

    def make(count, **more):
        more |= {"dashboard_address": "127.0.0.1:0", "silence_logs": logging.CRITICAL}
        made.append(distributed.LocalCluster(n_workers=count, threads_per_worker=1, processes=False, **more))
        made.append(distributed.Client(made[-1], set_as_default=False))
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()


def test_workers_that_offer_no_device_are_refused_with_what_to_do(in_this_process):
    with (
        Workers(in_this_process(1)) as executor,
        pytest.raises(ValueError, match=r'offers no resource .device.: start workers with --resources "device=1"'),
    ):
        executor.submit(print).result()
    with pytest.raises(ValueError, match="offers no resource"):
        executor.submit(print)


def test_where_no_worker_comes_that_is_reported(in_this_process):
    with Workers(in_this_process(0), patience=0.3) as executor, pytest.raises(ValueError, match="raise --wait"):
        executor.submit(print).result()


@pytest.mark.nightly
def test_a_scheduler_that_ends_is_reported_to_whoever_waits(in_this_process, tmp_path):
    def long():
        (tmp_path / "began").touch()
        time.sleep(2)

    client = in_this_process(1, resources={"device": 1})
    with Workers(client) as executor:
        future = executor.submit(long)
        while not (tmp_path / "began").exists():
            time.sleep(0.05)
        client.cluster.close()
        with pytest.raises(ValueError, match="scheduler stopped answering"):
            future.result()


def test_a_client_that_is_closed_leaves_no_one_waiting(in_this_process):
    client = in_this_process(0)
    executor = Workers(client)
    future = executor.submit(print)
    client.close()
    with pytest.raises(ValueError, match="scheduler stopped answering"):
        future.result()
    executor.shutdown()
    with pytest.raises(ValueError, match="scheduler stopped answering"):
        executor.submit(print)
