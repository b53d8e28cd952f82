"""A rehearsal that is killed, and one whose caller is killed: the message is right, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from machines import TINY

from perf_helpers import Lab
from trainmem.rehearsal import CARDS, Rehearsal, build, rehearse

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Yield a folder for temporary files; afterwards, check that only torch's cache is left in it."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    assert not [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def wait_for(condition):
    until = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def hang_in(path):
    def hang(task):
        draft = path.with_suffix(".draft")
        draft.write_text(f"{os.getpid()} {os.getppid()} {psutil.Process(os.getppid()).ppid()}")
        draft.rename(path)
        time.sleep(600)

    return hang


@pytest.mark.nightly
def test_a_rehearsal_that_is_killed_is_a_run_that_says_so_and_the_next_one_is_undisturbed(temporary, tmp_path):
    def kill(task):
        os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
        time.sleep(600)

    expected = rehearse(TINY, on="t4")
    with Rehearsal(CARDS["t4"]) as stage:
        run = Lab("gpu", executor=stage, out=tmp_path / "out").run(kill, measure=("none",))
    assert run.status == "killed" and "exit code -9" in run.message
    after = rehearse(TINY, on="t4")
    assert after.ok and (after.memory.breakdown, after.memory.reserved_bytes) == (
        expected.memory.breakdown,
        expected.memory.reserved_bytes,
    )


CALLER = """
import sys
from pathlib import Path
sys.path[:] = {path!r}
from trainmem.rehearsal import rehearse
from test_rehearsal_faults import hang_in
rehearse(hang_in(Path({ready!r})), on="t4")
"""


@pytest.mark.nightly
def test_of_a_rehearsal_whose_caller_is_killed_nothing_survives(temporary, tmp_path):
    ready = tmp_path / "ready"
    caller = subprocess.Popen([sys.executable, "-c", CALLER.format(path=sys.path, ready=str(ready))])
    assert wait_for(lambda: ready.exists() or caller.poll() is not None) and caller.poll() is None
    pids = [*map(int, ready.read_text().split())]
    caller.kill()
    caller.wait()
    assert len(pids) == 3 and wait_for(lambda: not any(map(psutil.pid_exists, pids)))
    wait_for(lambda: not [*temporary.glob("perf_helpers*")])
