"""The thread that samples the machine, and what it keeps: no test needs a GPU, and none judges by a clock."""

import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from machines import GOOD, fake_nvml
from watched import FIGURES, GPU, threads

from perf_helpers import hardware
from perf_helpers.widgets import readings, sampler

pytestmark = pytest.mark.usefixtures("bare")


def test_a_gpu_is_read_with_its_units(gpu):
    with sampler.Sampler(10) as watching:
        pass
    sample = watching.samples[0]
    for field, _, expected in FIGURES.values():
        assert getattr(sample, field) == expected
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz) == (1980, 2619)
    assert sample.device_used_bytes == GPU.memory_bytes - GPU.free_bytes
    assert sample.cpu_percent is None and sample.own_rss_bytes is None
    assert "NVIDIA H200: " in watching.summary().caption
    assert "clocks: power limit (software) in 100%" in watching.summary().caption
    assert ["power", "412 W", "412 W", "412 W"] in watching.summary().rows


def test_the_gpu_is_found_by_its_uuid_and_not_by_nvmls_number(gpu, monkeypatch):
    other = hardware.Gpu(1, "GPU-cccc", "Tesla T4", 16_000_000_000, (7, 5), free_bytes=15_000_000_000)
    monkeypatch.setattr(hardware, "describe", lambda: replace(GOOD, gpus=(GPU, other)))
    monkeypatch.setattr(hardware, "ask_driver", lambda visible, order: ([GPU, other], None))
    module = fake_nvml(other, GPU)  # NVML's order is the other way round
    power = {other.uuid: 70_000, GPU.uuid: 700_000}
    module.nvmlDeviceGetPowerUsage = lambda handle: power[handle.uuid]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    seen = []
    for index in (0, 1):
        with sampler.Sampler(10, gpu_index=index) as watching:
            pass
        seen.append((watching.samples[0].power_watts, watching.samples[0].device_used_bytes))
    assert seen == [(700, GPU.memory_bytes - GPU.free_bytes), (70, 1_000_000_000)]


def test_a_gpu_that_nvml_does_not_know_leaves_the_host_and_says_so(monkeypatch):
    unknown = replace(GOOD, gpus=(hardware.Gpu(0),), nvml_reason="Driver/library version mismatch")
    monkeypatch.setattr(hardware, "describe", lambda: unknown)
    with sampler.Sampler(10) as watching:
        pass
    assert watching.samples[0].own_rss_bytes > 0
    assert "the host, since NVML gives nothing about the GPU (Driver/library version mismatch)" in str(
        watching.summary()
    )


def test_starting_another_leaves_one_thread():
    first = sampler.Sampler(10)
    with sampler.Sampler(10) as second:
        assert threads() == [second._thread]
        assert not first._thread.is_alive() and second._thread.daemon
    first.close()  # again does no harm


def test_an_exception_in_the_block_stops_it():
    with pytest.raises(KeyError, match="mine"), sampler.Sampler(10) as watching:
        raise KeyError("mine")
    assert watching.samples and threads() == []


def test_a_reader_that_crashes_ends_the_thread_and_is_raised_once(script):
    script({}, OSError("broken"))
    watching = sampler.Sampler(0.001)
    watching._thread.join()
    with pytest.raises(OSError, match="broken"):
        watching.close()
    watching.close()
    assert len(watching.samples) == 1


def test_the_blocks_own_exception_comes_first(script):
    script(OSError("broken"))
    with pytest.raises(KeyError) as caught, sampler.Sampler(10):
        raise KeyError("mine")
    assert caught.value.__notes__ == ["and the monitor failed: broken"]


def test_a_driver_that_never_answers_does_not_hold_the_cell(monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(readings, "reader", lambda gpu: nullcontext(lambda: answer.wait() and {}))
    monkeypatch.setattr(sampler, "CLOSE_SECONDS", 0.01)
    watching = sampler.Sampler()
    with pytest.raises(RuntimeError, match="nvidia-smi"):
        watching.close()
    answer.set()
    watching._thread.join()


def test_the_history_is_bounded_and_the_summary_is_about_all(script):
    done = script(*({"own_rss_bytes": size * 1_000_000} for size in range(1, 10)))
    with sampler.Sampler(0.001, history=3) as watching:
        done.wait()
    assert len(watching.samples) == 3
    assert ["memory of this process", "1.0 MB", "5.0 MB", "9.0 MB"] in watching.summary().rows
    assert ["CPU utilisation", "not measured", "not measured", "not measured"] in watching.summary().rows


@pytest.mark.parametrize("cost", [0.0001, 0.003, 0.02])  # processor seconds of a sample and its drawing
def test_a_costly_sample_makes_the_next_one_wait(script, monkeypatch, cost):
    """With clocks of its own: the thread's time stays under one percent, but for one sample."""
    script()
    clock = SimpleNamespace(now=0.0, used=0.0)

    class Stop:
        def is_set(self):
            clock.now += cost  # a sample starts
            clock.used += cost
            return clock.now > 100

        def wait(self, seconds):
            clock.now += seconds

        def set(self):
            pass

    monkeypatch.setattr(sampler, "threading", SimpleNamespace(Event=Stop, Thread=threading.Thread))
    fake = SimpleNamespace(monotonic=lambda: clock.now, thread_time=lambda: clock.used)
    monkeypatch.setattr(sampler, "time", fake)
    with sampler.Sampler(0.5) as watching:
        watching._thread.join()
    assert watching.cpu_seconds < 0.01 * watching.elapsed_seconds + cost
    assert watching.count >= min(195, 100 * 0.9 * sampler.SHARE / cost)  # and it samples as often as that allows


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"interval_seconds": 0}, "interval_seconds=0"), ({"history": 1}, "history=1"), ({"gpu_index": 1}, "gpu_index=1")],
)
def test_a_value_out_of_range_is_named_and_starts_nothing(arguments, name):
    with pytest.raises(ValueError, match=name):
        sampler.Sampler(**arguments)
