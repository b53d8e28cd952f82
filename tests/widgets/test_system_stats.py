"""What one look at the machine tells, with fake drivers: no test needs a GPU."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from watched import FIGURES, GPU

from perf_helpers import hardware
from perf_helpers.widgets import system_stats

pytestmark = pytest.mark.usefixtures("bare")


def read(times=1, gpu=None):
    """The figures of as many samples, read here and now."""
    with system_stats.reader(gpu) as look:
        return [look() for _ in range(times)]


@pytest.mark.parametrize(
    ("bitmask", "words"),
    [
        (0, []),
        (0x1, ["idle"]),
        (0x44, ["power limit (software)", "heat (hardware)"]),
        (0x400, ["limit for reliability"]),
        (0x1001, ["idle", "unknown reason 0x1000"]),
    ],
)
def test_reasons_are_words(bitmask, words):
    assert system_stats.reasons(bitmask) == words


def test_reasons_have_the_bits_of_nvml():
    pynvml = pytest.importorskip("pynvml")
    for name, word in (("SyncBoost", "kept in step"), ("HwPowerBrakeSlowdown", "brake (from"), ("GpuIdle", "idle")):
        (found,) = system_stats.reasons(getattr(pynvml, f"nvmlClocksThrottleReason{name}"))
        assert word in found


@pytest.mark.parametrize("query", FIGURES)
def test_a_query_that_fails_is_none_and_spares_the_others(gpu, query):
    gpu.fail(query)
    (figures,) = read(gpu=GPU)
    expected = {field: None if each == query else value for each, (field, _, value) in FIGURES.items()}
    assert {field: figures[field] for field in expected} == expected


@pytest.mark.parametrize(("code", "times"), [(3, 1), (4, 1), (13, 1), (15, 3)])  # 15: the GPU is lost, for now
def test_only_what_is_unsupported_is_asked_once(gpu, code, times):
    gpu.fail("nvmlDeviceGetPowerUsage", code)
    assert [figures["power_watts"] for figures in read(3, GPU)] == [None] * 3
    assert gpu.asked.count(("nvmlDeviceGetPowerUsage",)) == times


def test_an_old_driver_tells_its_throttle_reasons(gpu):
    gpu.fail("nvmlDeviceGetCurrentClocksEventReasons", 13)
    gpu.answer("nvmlDeviceGetCurrentClocksThrottleReasons", 0)
    assert [figures["clock_reasons"] for figures in read(2, GPU)] == [(), ()]


def test_without_a_gpu_the_host_is_read_with_its_children():
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        (figures,) = read()
        child.communicate(b"\n")
    assert figures["own_rss_bytes"] > 1e6 and figures["children_rss_bytes"] > 1e6
    assert figures["memory_available_bytes"] > 0 and figures["cpu_percent"] is None
    assert "device_used_bytes" not in figures


def test_cpu_utilisation_is_that_since_the_sample_before(monkeypatch, copied):
    seconds = ((10, 100), (13, 101), (13.1, 101), (13.1, 104.9))  # the third is too soon after the second
    times = [SimpleNamespace(user=user, idle=idle, iowait=1) for user, idle in seconds]
    times = [type("times", (tuple,), vars(each))(vars(each).values()) for each in times]
    planted = copied(system_stats.psutil, cpu_times=lambda: times.pop(0), cpu_count=lambda: 2)
    monkeypatch.setattr(system_stats, "psutil", planted)
    assert [figures["cpu_percent"] for figures in read(4)] == [None, 75, None, pytest.approx(2.5)]


def test_a_containers_limit_counts(monkeypatch):
    monkeypatch.setattr(hardware, "cgroup_limits", lambda: (2_000, 1_000, None))
    assert read()[0]["memory_available_bytes"] == 1_000


def test_what_the_host_refuses_is_none(monkeypatch):
    def refuse(*_, **__):
        raise system_stats.psutil.AccessDenied

    monkeypatch.setattr(system_stats.psutil.Process, "children", refuse)
    monkeypatch.setattr(system_stats.psutil, "cpu_times", refuse)
    (figures,) = read()
    assert figures["children_rss_bytes"] is None and figures["cpu_percent"] is None
    assert figures["own_rss_bytes"] > 0
