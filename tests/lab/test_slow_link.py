"""The slow link exists, is slow, connects two ranks, and is gone afterwards, whatever happens."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from perf_helpers import slow_link
from perf_helpers.lab.lab import Lab

needs_link = pytest.mark.skipif(slow_link.missing() is not None, reason=f"this machine {slow_link.missing()}")


def within(link, host, *command):
    """Return the standard output of a command on one of the two hosts of a link; `host` is 0 or 1."""
    entered = ["nsenter", "--target", str(link.holders[host]), "--net", *command]
    return subprocess.run(entered, capture_output=True, text=True, check=True).stdout


def gone(pid):
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}/ns/net"):
        if time.monotonic() > deadline:
            return False
        try:
            os.readlink(f"/proc/{pid}/ns/net")
        except OSError:  # a zombie has no namespace any more
            return True
        time.sleep(0.05)
    return True


@needs_link
def test_either_end_is_shaped_and_the_machine_itself_is_untouched():
    before = os.listdir("/sys/class/net")
    with slow_link.link(200) as link, slow_link.link() as other:
        for host in (0, 1):
            assert "tbf" in within(link, host, "tc", "qdisc", "show", "dev", "link0")
            assert "rate 200Mbit" in within(link, host, "tc", "qdisc", "show", "dev", "link0")
            assert "tbf" not in within(other, host, "tc", "qdisc", "show", "dev", "link0")
        assert os.listdir("/sys/class/net") == before
    assert all(gone(pid) for pid in link.holders + other.holders)


@needs_link
def test_two_ranks_meet_over_the_link_and_their_bytes_are_counted(tmp_path):
    lab = Lab("cpu", out=tmp_path, timeout=120)
    with slow_link.link(400) as link:

        def send(task):
            import torch

            link.join()
            torch.distributed.init_process_group("gloo")
            before = slow_link.bytes_sent()
            payload = torch.full((1_000_000,), 1.0)
            torch.distributed.all_reduce(payload)
            torch.distributed.barrier()  # the other one is done: nothing waits in the socket any more
            return [payload[0].item(), slow_link.bytes_sent() - before]

        run = lab.run(send, measure=("none",), processes=2)
    assert run.ok, run.message
    for rank in run.ranks:
        total, sent = rank["value"]
        assert total == 2.0
        assert 4e6 < sent < 4.8e6  # half a vector to scatter, half to gather, and headers


@needs_link
def test_an_error_inside_removes_the_link():
    with pytest.raises(KeyboardInterrupt), slow_link.link(100) as link:
        raise KeyboardInterrupt
    assert all(gone(pid) for pid in link.holders)


@needs_link
def test_a_killed_program_leaves_nothing_behind():
    code = """
        from perf_helpers import slow_link
        with slow_link.link(100) as link:
            print(*link.holders, flush=True)
            import time; time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        holders = [int(pid) for pid in program.stdout.readline().split()]
        assert len(holders) == 2
        program.send_signal(signal.SIGKILL)
    assert all(gone(pid) for pid in holders)


def test_what_is_missing_is_reported_in_words(monkeypatch):
    monkeypatch.setattr(slow_link.sys, "platform", "darwin")
    with pytest.raises(slow_link.Unavailable, match="needs Linux"), slow_link.link():
        pass
    monkeypatch.setattr(slow_link.sys, "platform", "linux")
    monkeypatch.setattr(slow_link.os, "geteuid", lambda: 1000, raising=False)
    with pytest.raises(slow_link.Unavailable, match="needs root"), slow_link.link():
        pass
    monkeypatch.setattr(slow_link.os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(slow_link.shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(slow_link.Unavailable, match="needs the commands tc"), slow_link.link():
        pass


def test_a_namespace_that_is_forbidden_is_reported_in_words(monkeypatch, tmp_path):
    """Some containers forbid new namespaces. `link` must then raise `Unavailable` with the message of `unshare`."""
    fake = tmp_path / "unshare"
    fake.write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slow_link, "_lacking", lambda: None)
    with pytest.raises(slow_link.Unavailable, match=r"unshare.*Operation not permitted"), slow_link.link():
        pass


@pytest.mark.parametrize("rate", [0, -1, True, "200", float("nan")])
def test_a_speed_and_a_delay_are_positive_numbers(rate):
    for name in ("megabits_per_second", "delay_seconds"):
        with pytest.raises(ValueError, match=f"{name}=.*give a number"), slow_link.link(**{name: rate}):
            pass


@needs_link
def test_a_late_link_leaves_no_thread_and_no_namespace():
    before = threading.active_count()
    with slow_link.link(delay_seconds=0.01) as link:
        assert threading.active_count() == before + 1
    assert all(gone(pid) for pid in link.holders)
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before


def test_bytes_of_a_device_that_is_not_there_are_unknown(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-device")
    assert slow_link.bytes_sent() is None
