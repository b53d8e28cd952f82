"""The live monitor: its thread and what it keeps, its pictures with fake figures and in a real kernel. No test needs a
GPU or judges by a clock.
"""

import base64
import html
import json
import re
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from machines import GOOD, fake_nvml
from watched import FIGURES, GPU, threads

from perf_helpers import hardware, monitor

pytestmark = pytest.mark.usefixtures("bare")


# ---- the thread


def test_a_gpu_is_read_with_its_units(gpu):
    with monitor.Monitor(10) as watching:
        pass
    ((_, figures),) = watching.samples[:1]
    for figure, _, expected in FIGURES.values():
        assert figures[figure] == expected
    assert figures["clock of the cores"] == 1980
    assert figures["device memory used"] == GPU.memory_bytes - GPU.free_bytes
    assert not monitor.HOST_FIGURES.keys() & figures.keys()
    assert "NVIDIA H200: " in watching.summary().caption
    assert ["power", "412 W", "412 W", "412 W"] in watching.summary().rows


def test_the_gpu_is_found_by_its_uuid_and_not_by_nvmls_number(gpu, monkeypatch):
    other = hardware.Gpu(1, "GPU-cccc", "Tesla T4", 16_000_000_000, (7, 5), free_bytes=15_000_000_000)
    monkeypatch.setattr(hardware, "describe", lambda: replace(GOOD, gpus=(GPU, other)))
    monkeypatch.setattr(hardware, "ask_driver", lambda visible, order: ([GPU, other], None))
    module = fake_nvml(other, GPU)  # NVML's order is the other way round
    power = {other.uuid: 70_000, GPU.uuid: 700_000}
    module.nvmlDeviceGetPowerUsage = lambda handle: power[handle.uuid]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with monitor.Monitor(10) as watching:
        pass
    figures = watching.samples[0][1]
    assert (figures["power"], figures["device memory used"]) == (700, GPU.memory_bytes - GPU.free_bytes)


def test_a_gpu_that_nvml_does_not_know_leaves_the_host_and_says_so(monkeypatch):
    unknown = replace(GOOD, gpus=(hardware.Gpu(0),), nvml_reason="Driver/library version mismatch")
    monkeypatch.setattr(hardware, "describe", lambda: unknown)
    with monitor.Monitor(10) as watching:
        pass
    assert watching.samples[0][1][monitor.OWN] > 0
    assert "the host, because NVML does not report the GPU (Driver/library version mismatch)" in str(watching.summary())


def test_it_watches_from_the_blocks_beginning_to_its_end():
    watching = monitor.Monitor(10)
    assert threads() == []
    with watching:
        assert threads() == [watching._thread] and watching._thread.daemon
    assert threads() == []


def test_an_exception_in_the_block_stops_it():
    with pytest.raises(KeyError, match="mine"), monitor.Monitor(10) as watching:
        raise KeyError("mine")
    assert watching.samples and threads() == []


def test_a_reader_that_crashes_ends_the_thread_and_is_raised(script):
    script({}, OSError("broken"))
    with pytest.raises(OSError, match="broken"), monitor.Monitor(0.001) as watching:
        watching._thread.join()
    assert len(watching.samples) == 1


def test_the_blocks_own_exception_comes_first(script):
    script(OSError("broken"))
    with pytest.raises(KeyError) as caught, monitor.Monitor(10):
        raise KeyError("mine")
    assert caught.value.__notes__ == ["and the monitor failed: broken"]


def test_a_driver_that_never_answers_does_not_hold_the_cell(monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(monitor, "reader", lambda gpu: nullcontext(lambda: answer.wait() and {}))
    monkeypatch.setattr(monitor, "CLOSE_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="nvidia-smi"), monitor.Monitor() as watching:
        pass
    answer.set()
    watching._thread.join()


def test_the_history_is_bounded_and_the_summary_is_about_all(script, monkeypatch):
    monkeypatch.setattr(monitor, "HISTORY", 3)
    done = script(*({monitor.OWN: size * 1_000_000} for size in range(1, 10)))
    with monitor.Monitor(0.001) as watching:
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

    monkeypatch.setattr(monitor, "threading", SimpleNamespace(Event=Stop, Thread=threading.Thread))
    fake = SimpleNamespace(monotonic=lambda: clock.now, thread_time=lambda: clock.used)
    monkeypatch.setattr(monitor, "time", fake)
    with monitor.Monitor(0.5) as watching:
        watching._thread.join()
    assert watching.cpu_seconds < 0.01 * watching.elapsed_seconds + cost
    assert watching.count >= min(195, 100 * 0.9 * monitor.SHARE / cost)  # and it samples as often as that allows


def test_an_interval_out_of_range_is_named():
    with pytest.raises(ValueError, match="interval_seconds=0"):
        monitor.Monitor(0)


# ---- the pictures


@pytest.fixture
def watched(script):
    """A monitor that has seen two samples of a GPU-less machine."""
    done = script(
        {monitor.OWN: 500_000_000, monitor.CHILDREN: 1_500_000_000},
        {monitor.OWN: 600_000_000, monitor.CHILDREN: 2_500_000_000, "CPU utilisation": 75.0},
    )
    with monitor.live(0.001) as watched:
        done.wait()
    return watched


def test_the_live_picture_is_svg_with_words_for_it(watched):
    memory, cpu = ElementTree.fromstring(f"<all>{watched.live_html()}</all>").iter("svg")
    assert "memory of its experiments 2.5 GB" in memory.get("aria-label") and "75 %" in cpu.get("aria-label")
    assert [len(line.get("points").split()) for line in memory.findall("polyline")] == [2, 2]
    assert [len(line.get("points").split()) for line in cpu.findall("polyline")] == [1], "not measured is not 0"
    assert [each.find("text").text for each in (memory, cpu)] == [
        "resident memory (GB)",
        "CPU utilisation, all cores (%)",
    ]
    assert "memory of this process 500.0 MB to 600.0 MB; memory of its experiments 1.50 GB" in watched.description()


def test_a_gpu_without_utilisation_is_drawn_and_says_so(gpu):
    gpu.fail("nvmlDeviceGetUtilizationRates")
    with monitor.live(10) as watched:
        pass
    assert "GPU utilisation: not available" in watched.live_html()
    assert "power 412 W" in watched.live_html()


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_it_works_and_ends_in_a_plain_python():
    """No IPython, and one block that is left in its middle: the interpreter ends, and prints no complaint."""
    done = python(
        "import sys; sys.modules['IPython'] = None\n"
        "from perf_helpers import monitor\n"
        "with monitor.live(10) as m: pass\n"
        "print(m.summary())\n"
        "with monitor.live(0.01): sys.exit(3)\n"
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert "memory of this process" in done.stdout


def test_importing_it_loads_no_plotting_and_no_notebook():
    done = python(
        "import sys, perf_helpers.widgets.monitor\n"
        "print({'matplotlib', 'ipywidgets', 'IPython', 'torch', 'pynvml'} & set(sys.modules))"
    )
    assert done.stdout == "set()\n", done.stderr


CELLS = [
    "from perf_helpers import monitor; import threading",
    "with monitor.live(0.05) as m:\n    seen = [m]\n    while '<svg' not in m._widget.value: m._thread.join(0.01)",
    "m.summary()",
    "import json\n"
    "names = [thread.name for thread in threading.enumerate() if 'monitor' in thread.name]\n"
    "print(json.dumps([names, seen[0]._widget.value]))",
    "def broken(self): raise ZeroDivisionError('while drawing')\n"
    "monitor.Monitor.live_html = broken\n"
    "with monitor.live(0.05) as m:\n    m._thread.join()",
    "m._widget.value",
    "monitor.Monitor.live_html = lambda self: ''; monitor.Monitor.pictures = broken\n"
    "with monitor.live(0.05) as m:\n    pass",
]


@pytest.fixture(scope="module")
def cells():
    """The outputs of each cell, run in a kernel of this environment as the course runs one; some twice."""
    import nbformat
    from jupyter_client.channels import AsyncZMQSocketChannel
    from nbclient import NotebookClient

    from perf_helpers.course.lesson_process import asking

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
        patch.setattr(AsyncZMQSocketChannel, "get_msg", asking(AsyncZMQSocketChannel.get_msg))
        NotebookClient(notebook, kernel_name="python3", allow_errors=True, timeout=120).execute()
    return [cell.outputs for cell in notebook.cells]


def test_a_notebook_keeps_one_static_picture_with_its_words(cells):
    (picture,) = cells[1]
    shown, words = picture.data["text/html"], picture.data["text/plain"]
    assert f'alt="{html.escape(words)}"' in shown and "memory of this process" in words
    images = [base64.b64decode(data) for data in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", shown)]
    assert [ElementTree.fromstring(image).tag for image in images] == ["{http://www.w3.org/2000/svg}svg"] * 2
    assert shown.count("background:white") == 2, "readable on a dark page too"
    assert "application/vnd.jupyter.widget-view+json" not in picture.data
    (table,) = cells[2]
    assert "<th" in table.data["text/html"]


def test_nothing_is_left_of_it_and_its_live_picture_had_words(cells):
    names, drawn = json.loads(cells[3][0].text)
    assert names == []
    assert "<svg" in drawn and "aria-label" in drawn


@pytest.mark.parametrize("number", [4, 6])  # live, and in the picture that stays
def test_a_drawing_error_stands_in_place_and_fails_the_cell(cells, number):
    place = cells[number][0]
    assert "The monitor stopped: ZeroDivisionError: while drawing" in place.data["text/html"]
    assert [output.ename for output in cells[number] if output.output_type == "error"] == ["ZeroDivisionError"]


def test_a_drawing_error_is_shown_at_once(cells):
    assert "The monitor stopped: ZeroDivisionError: while drawing" in cells[5][0].data["text/plain"]


# ---- one look at the machine


def read(times=1, gpu=None):
    """The figures of as many samples, read here and now."""
    with monitor.reader(gpu) as look:
        return [look() for _ in range(times)]


@pytest.mark.parametrize("query", FIGURES)
def test_a_query_that_fails_is_none_and_spares_the_others(gpu, query):
    gpu.fail(query)
    (figures,) = read(gpu=GPU)
    expected = {figure: None if each == query else value for each, (figure, _, value) in FIGURES.items()}
    assert {figure: figures[figure] for figure in expected} == expected


def test_without_a_gpu_the_host_is_read_with_its_children():
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        (figures,) = read()
        child.communicate(b"\n")
    assert figures[monitor.OWN] > 1e6 and figures[monitor.CHILDREN] > 1e6
    assert figures["memory available"] > 0 and figures["CPU utilisation"] is None
    assert "device memory used" not in figures


def test_cpu_utilisation_is_that_since_the_sample_before(monkeypatch, copied):
    told, seconds = [0.0, 75.0, 2.5], [0, 0.01, 0.5, 0.5, 0.55, 1, 1]  # psutil's first figure is about nothing
    monkeypatch.setattr(monitor, "psutil", copied(monitor.psutil, cpu_percent=lambda: told.pop(0)))
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: seconds.pop(0)))
    assert [figures["CPU utilisation"] for figures in read(4)] == [None, 75, None, 2.5]


def test_a_containers_limit_counts(monkeypatch):
    monkeypatch.setattr(hardware, "cgroup_limits", lambda: (2_000, 1_000, None))
    assert read()[0]["memory available"] == 1_000


def test_what_the_host_refuses_is_none(monkeypatch):
    def refuse(*_, **__):
        raise monitor.psutil.AccessDenied

    monkeypatch.setattr(monitor.psutil.Process, "children", refuse)
    monkeypatch.setattr(monitor.psutil, "cpu_percent", refuse)
    (figures,) = read()
    assert figures[monitor.CHILDREN] is None and figures["CPU utilisation"] is None
    assert figures[monitor.OWN] > 0
