"""Real faults, e.g. a killed process or a full disk: the status and the message are right, no process or file is left,
and the next experiment gives the numbers of an undisturbed one.
"""

import gc
import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import psutil
import pytest
from machines import TINY

from perf_helpers.lab.lab import Lab
from trainmem.core.arguments import Arguments
from trainmem.core.training import Experiment
from trainmem.measure import worker
from trainmem.measure.forkserver import SERVER

MARK = f"FAULTS={uuid.uuid4().hex}"  # in the environment of whatever these tests start


def wait_for(condition, seconds=120):
    """Wait until a condition is true, for at most `seconds`; return its last value."""
    until = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def started_here():
    """Return every process that has this test module's environment variable, `MARK`, whatever its parent is.

    Zombies are left out.
    """
    found = []
    for process in psutil.process_iter():
        try:
            marked = MARK.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            found += [process] if marked and process.status() != psutil.STATUS_ZOMBIE else []
        except (OSError, psutil.Error):
            continue
    return found


def in_shared_memory():
    """Return the names of torch's files in /dev/shm whose process has ended."""
    names = os.listdir("/dev/shm")
    return {name for name in names if (of := re.match(r"torch_(\d+)", name)) and not psutil.pid_exists(int(of[1]))}


def numbers(lab):
    run = lab.train("undisturbed", task=TINY, measure=("memory", "none"), per_device_train_batch_size=2)
    return run.status, run.memory and (run.peak_bytes, run.memory.breakdown, run.memory.phases), run.losses


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Yield (lab, numbers): a lab, and the status, memory and losses of a training without any fault in this lab.

    The lab's fork server has the environment variable `MARK`, by which a test finds its processes.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*MARK.split("="))
        if SERVER.running:  # one of earlier tests is without the mark; and a server may be killed between experiments
            SERVER.running.process.kill()
        lab = Lab("cpu", out=tmp_path_factory.mktemp("a lab, größer"), timeout=300)
        yield lab, numbers(lab)


@pytest.fixture
def lab(undisturbed, tmp_path, monkeypatch):
    """Yield the lab of the fixture `undisturbed`, with a new folder for temporary files. Afterwards, check that a fault
    left nothing behind and that a training still gives the same numbers.
    """
    lab, expected = undisturbed
    gc.collect()
    opened, shared, temporary = len(os.listdir("/proc/self/fd")), in_shared_memory(), tmp_path / "tmp ü"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield lab
    assert numbers(lab) == expected
    servers = {SERVER.running.process.pid}
    assert wait_for(lambda: {process.pid for process in started_here()} <= servers, 20), started_here()
    left = {path.name for path in temporary.iterdir()} - {f"torchinductor_{getpass.getuser()}"}  # torch's cache
    assert left == set() and in_shared_memory() <= shared
    assert wait_for(lambda: gc.collect() is not None and len(os.listdir("/proc/self/fd")) <= opened, 20)


# ---- faults of one experiment


def read_by_workers(task, then=lambda: None):
    """Read batches that workers send through sockets in the folder of temporary files; return their number.

    `task`: not used; `then`: called after each batch.
    """
    import torch

    batches = torch.utils.data.DataLoader([torch.zeros(1000)] * 64, batch_size=4, num_workers=2)
    return len([(batch, then()) for batch in batches])


def kill_oneself_beside_workers(task):
    read_by_workers(task, partial(kill_oneself, task))


def read_address_zero(task):
    import ctypes

    ctypes.string_at(0)


def kill_oneself(task):
    os.kill(os.getpid(), signal.SIGKILL)


def limit_addresses(more):
    import resource

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more,) * 2)


def train_within_too_little(task):

    model, kept = task.build_model(), []
    limit_addresses(20_000_000)
    while True:  # copies, not steps: oneDNN, in a matmul, may report the same end as "could not create a primitive"
        kept.append([weight.clone() for weight in model.parameters()])


def build_lists_within_too_little(task):
    limit_addresses(50_000_000)
    numbers = [0]
    while True:
        numbers += numbers


def fill_the_disk(task):
    with open(os.path.join(tempfile.gettempdir(), "checkpoint"), "wb") as file:
        file.write(bytes(10_000_000))


def kill_the_server(task):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def kill_a_rank(task):
    import torch

    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def kill_the_server_of_ranks(task):
    if os.environ["RANK"] == "1":
        os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("fault", "status", "message"),
    [
        (kill_oneself, "killed", "SIGKILL"),
        (build_lists_within_too_little, "out of memory", "MemoryError"),
        (kill_a_rank, "killed", "rank 1: the process was killed by SIGKILL"),
        (kill_the_server, "killed", "parent process"),
        (kill_oneself_beside_workers, "killed", "SIGKILL"),
        (read_address_zero, "killed", "SIGSEGV"),
        (train_within_too_little, "out of memory", "DefaultCPUAllocator: can't allocate memory"),
        (kill_the_server_of_ranks, "killed", "parent process"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_experiment_that_is_ended_says_by_what(lab, fault, status, message):
    run = lab.run(fault, task=TINY, measure=("none",), processes=2 if "rank" in fault.__name__ else 1)
    assert (run.status, message in run.message) == (status, True), run


@pytest.mark.nightly
@pytest.mark.parametrize("processes", [1, 2])
def test_workers_under_a_folder_whose_name_is_too_long_for_sockets_do_not_hang(lab, tmp_path, monkeypatch, processes):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    run = lab.run(read_by_workers, measure=("none",), processes=processes, timeout=120)
    assert (run.status, run.value, os.listdir(folder)) == ("ok", 16, []), run


@pytest.fixture
def cgroup():
    """Yield the folder of a new memory cgroup with a limit of 100 MB; its parent is the cgroup of this process."""
    own = dict(line.split(":")[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    root = Path("/sys/fs/cgroup")
    parent = root / "memory" / own["memory"].strip("/") if "memory" in own else root / own.get("", "/").strip("/")
    folder = parent / f"faults-{os.getpid()}"
    try:
        folder.mkdir()
        limit = "memory.limit_in_bytes" if "memory" in own else "memory.max"
        (folder / limit).write_text("100000000")
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no cgroup can be made here: {error}")
    yield folder
    assert wait_for(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@pytest.mark.daily(1)
@pytest.mark.parametrize("processes", [1, 2])
def test_what_the_kernel_ends_for_its_memory_is_out_of_memory_and_this_process_lives(lab, cgroup, processes):
    def fill(task):
        import torch

        if os.environ.get("RANK", "0") == "0":
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))
            torch.ones(10**8)
        time.sleep(600)

    run = lab.run(fill, measure=("none",), processes=processes)
    assert run.status == "out of memory" and "SIGKILL" in run.message, run


@pytest.mark.nightly
def test_an_experiment_that_is_deaf_to_every_signal_ends_with_its_time(lab, tmp_path):
    def hang(task):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        (tmp_path / "deaf").touch()
        while True:
            time.sleep(600)

    for seconds in (3, 24, 96):  # however slow the machine is, it gets that far
        run = lab.run(hang, measure=("none",), timeout=seconds)
        if (tmp_path / "deaf").exists():
            break
    assert (run.status, run.message) == ("timed out", f"no result within {seconds} s")


def start_children_that_stay(task):
    """Start four processes that stay: one in this session, one in a new session, a daemon whose parent has ended, and a
    fork of this process in a new session. `task` is not used.
    """
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"], check=True)
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)


@pytest.mark.daily(1)
@pytest.mark.parametrize("end", [lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: None, lambda: 1 / 0])
def test_children_end_with_the_experiment_whatever_session_they_are_in_and_however_it_ends(lab, end):
    def start(task):
        start_children_that_stay(task)
        end()

    lab.run(start, measure=("none",))
    servers = {SERVER.running.process.pid}
    assert {process.pid for process in started_here()} <= servers, "at once, and not when the server ends"


def test_the_children_of_an_experiment_that_goes_on_are_not_ended_with_another_one(lab):
    """When an experiment ends, the children of another, running experiment stay. This holds even for children whose own
    parents have ended and which the running experiment has adopted.
    """
    from trainmem.measure.forkserver import CleanProcess

    def keep(on_step):
        start_children_that_stay(None)
        on_step(1)
        time.sleep(600)

    with CleanProcess(keep) as process:
        assert process.receive(300) == ("step", 1)
        children = psutil.Process(process.pid).children()
        assert lab.run(lambda task: 1, measure=("none",)).ok and len(children) == 4
        assert all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_an_experiment_on_a_disk_that_is_full_says_so(lab, disk, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("TMPDIR", str(folder := disk("200k")))
        patch.setattr(tempfile, "tempdir", None)
        run = lab.run(fill_the_disk, measure=("none",))
        assert run.status == "crashed" and "No space left on device" in run.message, run
        loud = lab.run(lambda task: print("x" * 10**6), measure=("none",))
        assert loud.status == "crashed" and "No space left on device" in loud.message, loud
        (folder / "checkpoint").unlink()
        assert [*folder.iterdir()] == []


SMALL_SHM = """
    import subprocess, sys
    sys.path[:] = {path!r}
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"], check=True)
    from perf_helpers.lab.lab import Lab
    from trainmem.core.task import Task

    def load(task):
        import torch
        collate = torch.stack if own else None
        rows = [torch.zeros(100_000)] * 8
        for _ in torch.utils.data.DataLoader(rows, batch_size=2, num_workers=workers, collate_fn=collate):
            pass

    lab = Lab("cpu", out={out!r})
    lab.run(lambda task: 1, measure=("none",))
    for seconds in (5, 60):  # however slow the machine is, it gets that far; torch waits for ever
        for own, workers in ((False, 1), (True, 1), (False, 0)):
            print(lab.run(load, measure=("none",), timeout=seconds))
        if "/dev/shm" in lab.runs[-2].message:
            break
    subprocess.run(["mount", "-o", "remount,size=1m", "/dev/shm"], check=True)
    few = {{"measure": ("none",), "per_device_train_batch_size": 64}}
    for workers in (4, 0):
        print(lab.train("trained", task=Task("bert-tiny", 512), dataloader_num_workers=workers, **few))
"""


@pytest.mark.nightly
def test_workers_that_find_no_room_in_shared_memory_are_reported_and_none_are_needed(lab, tmp_path):
    code = textwrap.dedent(SMALL_SHM).format(path=sys.path, out=str(tmp_path))
    words = ["unshare", "--mount", sys.executable, "-c", code]
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("/dev/shm can only be made small by root, and not in every container")
    done = subprocess.run(words, capture_output=True, text=True)
    torchs, own, without, *trained = done.stdout.splitlines()[-5:]
    assert re.match("load: crashed: RuntimeError: Caught RuntimeError in DataLoader .*; /dev/shm is full", torchs), done
    assert re.match("load: timed out: no result within [0-9]+ s; /dev/shm is full", own), done
    assert without == "load: ok, not measured"
    words = "trained: refused: dataloader_num_workers=4: prefetched batches take 2.1 MB of /dev/shm, but only 1.0"
    assert trained[0].startswith(words) and trained[1] == "trained: ok, not measured", trained


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({"dataloader_num_workers": 4}, 64),  # all samples of the data set, and no more
        ({"dataloader_num_workers": 2, "per_device_train_batch_size": 8}, 32),  # two batches a worker
        ({"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3, "per_device_train_batch_size": 4}, 12),
        ({"dataloader_num_workers": 0}, 0),
        ({}, 0),
    ],
)
def test_workers_need_room_for_the_batches_on_their_way(given, needed):
    experiment = Experiment("trained", TINY, Arguments.of(given))
    size = needed * (16 + 1) * 8  # tokens and a label
    assert worker._refusal_of_workers(experiment, size) is worker._refusal_of_workers(experiment, None) is None
    assert bool(worker._refusal_of_workers(experiment, size - 1)) == bool(needed)


NO_LOOPBACK = """
    import sys
    sys.path[:] = {path!r}
    from perf_helpers.lab.lab import Lab

    lab = Lab("cpu", out={out!r})
    print(lab.run(lambda task: 1, "ranks", measure=("none",), processes=2))
    print(lab.run(lambda task: 1, "alone", measure=("none",)))
"""


@pytest.mark.nightly
def test_ranks_without_a_loopback_interface_are_refused_before_torch_looks_for_it(lab, tmp_path):
    code = textwrap.dedent(NO_LOOPBACK).format(path=sys.path, out=str(tmp_path))
    if os.geteuid() or subprocess.run(["unshare", "--net", "true"]).returncode:
        pytest.skip("a network without a loopback interface needs root, and a container that allows it")
    done = subprocess.run(["unshare", "--net", sys.executable, "-c", code], capture_output=True, text=True)
    ranks, alone = done.stdout.splitlines()
    assert re.match("ranks: refused: .*loopback.*unreachable.*ip link set lo up", ranks), done
    assert alone.startswith("alone: ok"), done


SET_BACK = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <stdlib.h>
    #include <time.h>
    #include <unistd.h>

    int clock_gettime(clockid_t clock, struct timespec *now) {
        static int (*real)(clockid_t, struct timespec *);
        if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
        int code = real(clock, now);
        if (clock == CLOCK_REALTIME && !access(getenv("SET_BACK"), F_OK)) now->tv_sec -= 86400;
        return code;
    }
"""
BEFORE_AND_AFTER = """
    import os, sys, time
    from pathlib import Path
    sys.path[:] = {path!r}
    from perf_helpers.lab.lab import Lab
    from test_faults import TINY, numbers

    def set_back(task):
        import torch
        optimizer, before = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), time.time()
        for step in range(5):
            time.sleep(0.5)
            if step == 3:
                Path(os.environ["SET_BACK"]).touch()
            optimizer.step()
        return time.time() - before

    lab = Lab("cpu", out={out!r}, timeout=300)
    run = lab.run(set_back, measure=("time",))
    print(-86400 < run.value < -86300 and 0.4 < min(run.timing.all_seconds) and max(run.timing.all_seconds) < 30)
    print(numbers(lab))
    runs = lab.store.read()
    print([each.name for each in runs] == [each.name for each in lab.runs] and runs[0].date[:10])
"""


@pytest.mark.nightly
def test_a_clock_that_is_set_back_a_day_in_mid_run_changes_no_figure(lab, undisturbed, tmp_path):
    library, code = tmp_path / "set_back.so", tmp_path / "set_back.c"
    code.write_text(textwrap.dedent(SET_BACK))
    if not (compiler := shutil.which("cc")):
        pytest.skip("the clock is set back by a few lines of C, and there is no compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, code, "-ldl"], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "SET_BACK": str(tmp_path / "is set back")}
    script = textwrap.dedent(BEFORE_AND_AFTER).format(path=sys.path, out=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    set_back, figures, kept = done.stdout.splitlines()
    assert set_back == "True" and figures == f"{undisturbed[1]}", done
    yesterday = datetime.now(UTC) - timedelta(days=1)
    assert kept in {f"{yesterday:%Y-%m-%d}", f"{yesterday - timedelta(hours=1):%Y-%m-%d}"}, done


# ---- faults of the process that has the lab

KERNEL = """
    import os, subprocess, sys, time
    from pathlib import Path
    sys.path[:] = os.environ["PATHS"].split(os.pathsep)
    from perf_helpers.lab.lab import Lab
    from test_faults import numbers

    out = Path(os.environ["OUT"])

    def hang(task):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        (out / "draft").write_text(f"{os.getpid()} {os.getppid()}")
        (out / "draft").rename(out / "hangs")
        time.sleep(600)

    lab = Lab("cpu", out=out)
    for _ in range(2):
        try:
            lab.run(hang, measure=("none",))
        except KeyboardInterrupt:
            print(lab["hang"].status, lab["hang"].message, sep=", ", flush=True)
    print(numbers(lab), flush=True)
"""


@pytest.fixture
def kernel(lab, tmp_path):
    """Yield a process with its own lab, and a function that waits for an experiment there and returns [process id of
    the experiment, process id of its server].
    """
    environment = os.environ | {"OUT": str(tmp_path), "PATHS": os.pathsep.join(sys.path)}
    code = textwrap.dedent(KERNEL)
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)

    def hangs():
        reported = tmp_path / "hangs"
        assert wait_for(lambda: reported.exists() or process.poll() is not None) and process.poll() is None
        pids = [*map(int, reported.read_text().split())]
        reported.unlink()
        return pids

    yield process, hangs
    process.kill()
    process.communicate()


@pytest.mark.nightly
def test_of_a_kernel_that_is_killed_in_mid_run_nothing_survives(kernel):
    process, hangs = kernel
    hangs()
    process.kill()


def test_ctrl_c_and_a_second_one_while_the_first_is_obeyed(kernel, undisturbed):
    process, hangs = kernel
    hangs()
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "killed, interrupted by the user\n"
    _, server = hangs()
    os.kill(server, signal.SIGSTOP)  # so that the kernel has to wait for its answer
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # for the kernel to notice; whether it did changes nothing
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    os.kill(server, signal.SIGCONT)
    assert process.stdout.readline() == "killed, interrupted by the user\n"
    assert process.stdout.readline() == f"{undisturbed[1]}\n"
    assert process.wait() == 0
