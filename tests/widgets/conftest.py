"""Fixtures for the widgets' tests: a kernel without a front end, a lab without runs, and machines to monitor."""

import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from explored import TASK
from kernel import alive
from machines import GOOD, PLAIN, fake_nvml
from watched import FIGURES, GPU, threads

from perf_helpers.widgets import monitor
from perf_helpers.widgets.frame import OPEN
from trainmem.core import hardware
from trainmem.core.task import PROFILES
from trainmem.records import Store


def _close_all():
    while OPEN:
        OPEN.popitem()[1]()
    for widget in list(alive().values()):
        widget.close()


@pytest.fixture(autouse=True)
def fresh_kernel():
    _close_all()  # what a test elsewhere has shown, e.g. by running a lesson's cells
    yield
    _close_all()


@pytest.fixture
def lab(tmp_path):
    return SimpleNamespace(
        lesson="05_gradient_accumulation",
        store=Store(tmp_path / "runs.jsonl"),
        task=TASK,
        runs=[],
        guess_units={},
        profile=PROFILES["cpu"],
        machine=hardware.Machine("a machine", "cpu", memory_bytes=30_000_000),
    )


@pytest.fixture
def bare(monkeypatch):
    """Pretend a machine without a GPU; afterwards, check that no thread is left."""
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(hardware, "ask_driver", lambda visible, order: (None, None))
    monkeypatch.setattr(hardware, "describe", lambda: PLAIN)
    yield
    assert threads() == []


@pytest.fixture
def gpu(monkeypatch):
    """Pretend a GPU with NVML whose queries give fixed answers; return an object whose `fail(query)` makes this query
    raise NVML's error from then on.
    """
    module = fake_nvml(GPU)
    monkeypatch.setattr(hardware, "ask_driver", lambda visible, order: ([GPU], None))

    def answer(query, value):
        def replacement(handle, *arguments):
            assert (handle, arguments) == (GPU, (1,) if query == "nvmlDeviceGetClockInfo" else ())
            if isinstance(value, Exception):
                raise value
            return value

        setattr(module, query, replacement)

    def fail(query):
        answer(query, module.NVMLError(query))

    for query, (_, value, _) in FIGURES.items():
        answer(query, value)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(hardware, "describe", lambda: GOOD)
    return SimpleNamespace(fail=fail)


@pytest.fixture
def script(monkeypatch):
    """Return a function that gives the monitor the figures of its next samples, and returns an event that is set after
    the last sample.

    The function's arguments: one per sample, {name: value} or an exception to raise. The event is a threading.Event.
    """

    def install(*figures):
        left, done = list(figures), threading.Event()

        def look():
            if not left:
                done.set()
                return {}
            if isinstance(left[0], Exception):
                raise left.pop(0)
            return left.pop(0)

        monkeypatch.setattr(monitor, "reader", lambda gpu: nullcontext(look))
        return done

    return install
