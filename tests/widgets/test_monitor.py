"""The live monitor: its thread and its samples, its picture with fake figures, and in a real kernel. No test needs a
GPU or depends on a clock.
"""

import json
import os
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

from perf_helpers import monitor
from trainmem.core import hardware

pytestmark = pytest.mark.usefixtures("bare")


def one_sample():
    """Return a monitor that has taken at least one sample."""
    with monitor.Monitor(0.001) as watching:
        while not watching.samples and threads():
            watching._thread.join(0.001)
    return watching


# ---- the thread


def test_a_gpu_is_read_with_its_units(gpu):
    watching = one_sample()
    _, figures = watching.samples[0]
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
    _, figures = one_sample().samples[0]
    assert (figures["power"], figures["device memory used"]) == (700, GPU.memory_bytes - GPU.free_bytes)


def test_a_gpu_that_nvml_does_not_know_leaves_the_host_and_says_so(monkeypatch):
    unknown = replace(GOOD, gpus=(hardware.Gpu(0),), nvml_reason="Driver/library version mismatch")
    monkeypatch.setattr(hardware, "describe", lambda: unknown)
    watching = one_sample()
    assert watching.samples[0][1][monitor.OWN] > 0
    assert "the host, because NVML does not report the GPU (Driver/library version mismatch)" in str(watching.summary())


def test_it_watches_from_the_blocks_beginning_to_its_end():
    watching = monitor.Monitor(10)
    assert threads() == []
    with watching:
        assert threads() == [watching._thread] and watching._thread.daemon
    assert threads() == []


def test_a_block_shorter_than_the_pause_measures_nothing():
    with monitor.Monitor(10) as watching:
        pass
    assert {*watching.summary().rows[0][1:]} == {"not measured"}


def test_an_exception_in_the_block_stops_it():
    with pytest.raises(KeyError, match="mine"), monitor.Monitor(10):
        raise KeyError("mine")
    assert threads() == []


def test_a_reader_that_crashes_ends_the_thread_and_is_raised(script):
    script({}, OSError("broken"))
    with pytest.raises(OSError, match="broken"), monitor.Monitor(0.001) as watching:
        watching._thread.join()
    assert len(watching.samples) == 1


def test_the_blocks_own_exception_comes_first(script):
    script(OSError("broken"))
    with pytest.raises(KeyError) as caught, monitor.Monitor(0.001) as watching:
        watching._thread.join()
        raise KeyError("mine")
    assert caught.value.__notes__ == ["and the monitor failed: broken"]


def test_a_driver_that_never_answers_does_not_hold_the_cell(monkeypatch):
    requested, answer = threading.Event(), threading.Event()
    monkeypatch.setattr(monitor, "reader", lambda gpu: nullcontext(lambda: requested.set() or (answer.wait() and {})))
    monkeypatch.setattr(monitor, "CLOSE_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="nvidia-smi"), monitor.Monitor(0.001) as watching:
        requested.wait()
    answer.set()
    watching._thread.join()


def test_the_picture_has_the_latest_samples_and_the_summary_all(script, monkeypatch):
    monkeypatch.setattr(monitor, "DRAWN", 3)
    done = script(*({monitor.OWN: size * 1_000_000} for size in range(1, 10)))
    with monitor.Monitor(0.001) as watching:
        done.wait()
    del watching.samples[9:]
    assert ["memory of this process", "1.0 MB", "5.0 MB", "9.0 MB"] in watching.summary().rows
    assert ["CPU utilization", "not measured", "not measured", "not measured"] in watching.summary().rows
    assert [len(points) for points in lines(watching).values()] == [0, 0, 3, 0]


def test_an_interval_out_of_range_is_named():
    with pytest.raises(ValueError, match="interval_seconds=0"):
        monitor.Monitor(0)


# ---- the picture


def lines(watching):
    """Return {label: points} of each panel that a monitor draws; the points are texts "x,y"."""
    panels = ElementTree.fromstring(f"<all>{watching.live_html()}</all>").iter("svg")
    return {panel.get("aria-label"): panel.find("polyline").get("points").split() for panel in panels}


def test_the_live_picture_is_svg_with_words_for_it(script):
    done = script(
        {monitor.OWN: 500_000_000, monitor.CHILDREN: 1_500_000_000},
        {monitor.OWN: 600_000_000, monitor.CHILDREN: 2_500_000_000, "CPU utilization": 75.0},
    )
    with monitor.live(0.001) as watching:
        done.wait()
    drawn = {label: len(points) for label, points in lines(watching).items()}
    assert drawn == {
        "CPU utilization: 75 %": 1,  # a sample without it is no 0
        "memory available: not available": 0,
        "memory of this process: 600 MB": 2,
        "memory of its experiments: 2.5 GB": 2,
    }


def test_a_gpu_without_utilization_is_drawn_and_says_so(gpu):
    gpu.fail("nvmlDeviceGetUtilizationRates")
    drawn = lines(one_sample())
    assert "GPU utilization: not available" in drawn and "power: 412 W" in drawn


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_it_works_and_ends_in_a_plain_python():
    """Without IPython, `monitor.live` works; if sys.exit leaves its `with` block, Python prints no error message."""
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
]


@pytest.fixture(scope="module")
def cells():
    """Return the outputs of each cell of `CELLS`, run in a kernel that is started as the course starts its kernels;
    some cells are run twice.
    """
    import nbformat
    from jupyter_client.channels import AsyncZMQSocketChannel
    from nbclient import NotebookClient

    from perf_helpers.course.lesson_process import polling

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
        patch.setattr(AsyncZMQSocketChannel, "get_msg", polling(AsyncZMQSocketChannel.get_msg))
        NotebookClient(notebook, kernel_name="python3", allow_errors=True, timeout=120).execute()
    return [cell.outputs for cell in notebook.cells]


def test_a_notebook_keeps_the_last_picture_without_a_widget(cells):
    (picture,) = cells[1]
    names, drawn = json.loads(cells[3][0].text)
    assert names == [] and picture.data["text/html"] == drawn
    assert drawn.count("<svg") == 4 and "memory of this process" in picture.data["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" not in picture.data
    (table,) = cells[2]
    assert "<th" in table.data["text/html"]


def test_a_drawing_error_fails_the_cell(cells):
    assert [output.ename for output in cells[4] if output.output_type == "error"] == ["ZeroDivisionError"]


# ---- one look at the machine


def read(times=1, gpu=None):
    """Read the figures of a GPU, or of the host if `gpu` is None, `times` times in this thread; return [{name:
    value}].
    """
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
    assert figures["memory available"] > 0 and "device memory used" not in figures


def test_an_experiment_that_a_course_server_forked_is_one_of_the_experiments(monkeypatch):
    monkeypatch.setattr(monitor.psutil.Process, "children", lambda *_, **__: [])
    monkeypatch.setattr(monitor.SERVER, "running", SimpleNamespace(forks={os.getppid(), 2**30}))  # the last has ended
    (figures,) = read()
    assert figures[monitor.CHILDREN] > 1e6


def test_cpu_utilization_is_that_since_the_sample_before(monkeypatch, copied):
    readings = [0.0, 75.0, 2.5]  # psutil's first figure is about nothing
    monkeypatch.setattr(monitor, "psutil", copied(monitor.psutil, cpu_percent=lambda: readings.pop(0)))
    assert [figures["CPU utilization"] for figures in read(2)] == [75, 2.5]


def test_a_containers_limit_counts(monkeypatch):
    monkeypatch.setattr(hardware, "cgroup_limits", lambda: (2_000, 1_000, None))
    assert read()[0]["memory available"] == 1_000


def test_what_the_host_refuses_is_none(monkeypatch):
    def refuse(*_, **__):
        raise monitor.psutil.AccessDenied

    monkeypatch.setattr(monitor.psutil.Process, "children", refuse)
    monkeypatch.setattr(monitor.psutil, "cpu_percent", refuse)
    (figures,) = read()
    assert figures[monitor.CHILDREN] is None and figures["CPU utilization"] is None
    assert figures[monitor.OWN] > 0
