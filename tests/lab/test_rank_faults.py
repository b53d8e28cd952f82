"""Ranks that die, hang, disagree or run out of memory: each run reports it and leaves nothing behind."""

import contextlib
import gc
import os
import signal
import socket
import tempfile
import time
from datetime import timedelta
from multiprocessing import resource_tracker

import psutil
import pytest

from trainmem.core import outcomes, stack_dumps, training
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.measure import worker


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def provoke(lab, tmp_path, monkeypatch):
    """Yield a function that runs two ranks: each calls a given function with the rank's number, then both enter one
    more collective.

    Afterwards, check that nothing is left: no process, no open file or socket of this process, no temporary file.
    """
    pids, temporary = tmp_path / "pids", tmp_path / "tmp"
    pids.mkdir()
    temporary.mkdir()
    lab.run(lambda task: 1, measure=("none",))  # the server of forks is there
    resource_tracker.ensure_running()  # a library starts it at some time, and it keeps a pipe open
    gc.collect()  # what earlier tests left open
    opened = descriptors()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def run(fault, **options):
        def both(task):
            import torch

            (pids / str(os.getpid())).touch()
            (pids / str(os.getppid())).touch()
            torch.distributed.init_process_group("gloo")
            fault(torch.distributed.get_rank())
            torch.distributed.all_reduce(torch.ones(1))

        return lab.run(both, measure=("none",), processes=2, **options)

    yield run
    started = [int(path.name) for path in pids.iterdir()]
    assert len(started) >= 3, "the ranks and their launcher"
    until = time.monotonic() + 60
    while any(map(alive, started)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, started))
    assert [*temporary.iterdir()] == []
    now = descriptors()
    while len(now) > len(opened) and time.monotonic() < until:
        gc.collect()  # an exception that was caught holds what its frames had open; threads close theirs later
        time.sleep(0.05)
        now = descriptors()
    assert len(now) <= len(opened), {number: now[number] for number in now.keys() - opened.keys()}


def descriptors() -> dict[str, str]:
    """Return {number: target} of this process's open descriptors."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def on_rank_1(fault):
    return lambda rank: fault() if rank == 1 else None


def leave():
    raise SystemExit("enough")


def fill_the_disk():
    with open("/dev/full", "w") as file:  # the kernel's own answer of a disk that is full
        file.write("a checkpoint")


def run_out_of_memory():
    import torch

    torch.empty(10**15)


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed", "rank 1: the process was killed by SIGKILL"),
        (lambda: {}["lost"], "crashed", "rank 1: KeyError: 'lost' (line "),
        (leave, "crashed", "rank 1: SystemExit: enough (line "),
        (run_out_of_memory, "out of memory", "rank 1: RuntimeError: "),
        (fill_the_disk, "crashed", "rank 1: OSError: [Errno 28] No space left on device (line "),
    ],
    ids=["SIGKILL", "an exception", "sys.exit", "out of memory", "a full disk"],
)
def test_a_rank_that_ends_is_named_with_its_reason(provoke, fault, status, message):
    run = provoke(on_rank_1(fault))
    assert run.status == status and run.message.startswith(message), run


@pytest.mark.nightly
def test_a_rank_that_hangs_and_the_one_that_waits_for_it_are_reported_with_their_lines(provoke, tmp_path):
    def hang(rank):
        (tmp_path / f"reached {rank}").touch()
        if rank == 1:
            time.sleep(600)

    for seconds in (6, 24, 96):  # however slow the machine is, both get that far
        run = provoke(hang, timeout=seconds)
        if len([*tmp_path.glob("reached *")]) == 2 and "waits" in run.message:
            break
    assert run.status == "timed out" and run.message.startswith(f"no result within {seconds} s; "), run
    waiting, hanging = run.message.split("; ")[1:]
    assert waiting.startswith("rank 0: waits in all_reduce, in line ") and "of both" in waiting
    assert waiting.endswith("'torch.distributed.all_reduce(torch.ones(1))'")
    assert hanging.startswith("rank 1: in line ") and hanging.endswith("of hang, 'time.sleep(600)'")


def test_an_interrupted_run_tells_where_its_ranks_were(provoke, lab, tmp_path, monkeypatch):
    from trainmem.measure.forkserver import CleanProcess

    def hang(rank):
        (tmp_path / f"reached {rank}").touch()
        time.sleep(600)

    def interrupted(self, timeout=None):
        while len([*tmp_path.glob("reached *")]) < 2:
            time.sleep(0.05)
        time.sleep(0.2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr(CleanProcess, "receive", interrupted)
        provoke(hang)
    assert lab["both"].message.startswith("interrupted by the user; ranks 0, 1: in line ")
    assert caught.value.__notes__[0].endswith("of hang, 'time.sleep(600)'")


def test_ranks_whose_tensors_differ_in_size_are_reported(provoke):
    def disagree(rank):
        import torch

        torch.distributed.broadcast(torch.ones(6 - 2 * rank), src=0)

    run = provoke(disagree)
    assert run.status == "killed" and run.message.startswith("rank 1: ") and "SIGABRT" in run.message, run
    assert "24 bytes instead of 16" in run.message and "dtype" in run.message


@pytest.mark.nightly
def test_torch_reports_on_request_what_gloo_does_not_notice(provoke, monkeypatch):
    """If two ranks send tensors of one size and different types, both ranks continue, one with wrong numbers. The run
    fails only with torch's check, TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """

    def disagree(rank):
        import torch

        torch.distributed.all_reduce(torch.ones(4, dtype=(torch.float32, torch.int32)[rank]))

    assert provoke(disagree).ok
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    run = provoke(disagree)
    assert run.status == "crashed" and "Detected mismatch between collectives" in run.message, run


@pytest.mark.nightly
def test_a_rank_that_enters_fewer_collectives_is_distinguished_from_one_that_died(provoke):
    def one_more(rank):
        import torch

        if rank == 0:
            torch.distributed.all_reduce(torch.ones(1))
            torch.distributed.barrier()

    run = provoke(one_more)
    assert run.status == "crashed" and run.message.startswith("rank 0: "), run
    assert run.message.endswith("fewer collectives") and "; rank 1 " in run.message


def test_the_labs_own_port_is_free_whatever_the_environment_says(provoke, monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        assert provoke(lambda rank: None).ok


@pytest.mark.nightly
def test_a_port_of_ones_own_that_is_taken_is_reported(provoke):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def open_store(rank):
            import torch

            torch.distributed.TCPStore("127.0.0.1", port, is_master=True)

        run = provoke(on_rank_1(lambda: open_store(1)))
    assert run.status == "crashed" and str(port) in run.message and "EADDRINUSE" in run.message, run


def test_a_rank_that_gives_no_answer_is_left_out_and_no_other_process_is_signalled(tmp_path, monkeypatch):
    signalled = []
    monkeypatch.setattr(stack_dumps.os, "kill", lambda *arguments: signalled.append(arguments))
    (tmp_path / "0.stack").write_text(f"{os.getpid()} 1\n")
    assert stack_dumps.query(str(tmp_path), group=os.getpgid(0) + 1, seconds=0.1) == {} and signalled == []
    assert stack_dumps.query(str(tmp_path), group=os.getpgid(0), seconds=0.1) == {} and len(signalled) == 1
    assert stack_dumps.described({}) == ""


def test_an_outcome_that_gloo_did_not_end_keeps_its_message():
    outcome = outcomes.died(-6)
    assert outcomes.explained(outcome, "something else") == outcome


def test_ranks_that_never_met_are_launched_once_more(lab, tmp_path):
    def meet(task):
        rank = os.environ["RANK"]
        is_second = (tmp_path / rank).exists()
        (tmp_path / rank).touch()
        if rank == "1" and not is_second:
            raise RuntimeError(worker._NEVER_MET)
        if not is_second:
            time.sleep(60)  # as one that waits for the other
        return os.environ["RANK"]

    run = lab.run(meet, measure=("none",), processes=2)
    assert [rank["value"] for rank in run.ranks] == ["0", "1"], run.message


def test_ranks_get_another_port_if_a_process_takes_theirs(monkeypatch):
    import torch
    from torch.distributed.launcher import api

    endpoints = []

    def launch(config, _):
        endpoints.append(config.rdzv_endpoint)
        host, port = config.rdzv_endpoint.split(":")

        def start(*_):
            if len(endpoints) == 1:
                with socket.create_server((host, int(port))):
                    torch.distributed.TCPStore(host, int(port), is_master=True)
            return dict.fromkeys(range(2), outcomes.Outcome())

        return start

    monkeypatch.setattr(api, "elastic_launch", launch)
    two = training.Experiment("two", Task("bert-tiny"), processes=2, arguments=Arguments({"use_cpu": True}))
    assert worker._launch(two, "none", None).ok
    assert len(set(endpoints)) == 2


def test_an_option_of_gloo_that_a_newer_torch_has_is_passed_on(monkeypatch):
    from torch.distributed import distributed_c10d

    class Newer:
        def __init__(self, *where, **options):
            self.given = where, options

        def _set_default_timeout(self, timeout):
            self.timeout = timeout

    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", Newer)
    worker._meet_or_fail()
    half_an_hour, options = timedelta(minutes=30), {"enable_reconfigure": True}
    made = distributed_c10d.ProcessGroupGloo("store", 0, 2, timeout=half_an_hour, **options)
    assert made.given == (("store", 0, 2), {"timeout": worker._TO_MEET, **options}) and made.timeout == half_an_hour


def test_a_rank_waits_a_minute_for_others_to_connect_and_longer_for_what_they_send(lab):
    def alone(task):
        import torch
        import torch.distributed as dist

        worker._TO_MEET = timedelta(seconds=1)
        worker._meet_or_fail()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        patience = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        dist.destroy_process_group()
        start = time.monotonic()
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2)
        except RuntimeError as error:
            return [patience, worker._NEVER_MET in str(error), time.monotonic() - start < 20]

    run = lab.run(alone, measure=("none",), timeout=60)
    assert run.value == [1800, True, True], run.message
