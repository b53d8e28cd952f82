"""The live monitor's pictures, with fake figures and in a real kernel: no test needs a GPU or judges by a clock."""

import io
import json
from xml.etree import ElementTree

import pytest
from watched import python

from perf_helpers import monitor
from perf_helpers.plots import SERIES

pytestmark = pytest.mark.usefixtures("bare")


@pytest.fixture
def watched(script):
    """A monitor that has seen two samples of a GPU-less machine."""
    done = script(
        {"own_rss_bytes": 500_000_000, "children_rss_bytes": 1_500_000_000},
        {"own_rss_bytes": 600_000_000, "children_rss_bytes": 2_500_000_000, "cpu_percent": 75.0},
    )
    with monitor.live(0.001) as watched:
        done.wait()
    return watched


def test_the_static_picture_has_units_and_readable_text(watched):
    figure = watched.picture()
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "resident memory (GB)",
        "CPU utilisation, all cores (%)",
    ]
    memory, cpu = figure.axes
    assert [list(line.get_ydata()) for line in memory.lines] == [[0.5, 0.6], [1.5, 2.5]]
    assert [list(line.get_ydata()) for line in cpu.lines] == [[75]]
    assert memory.lines[0].get_linestyle() != memory.lines[1].get_linestyle()
    assert {line.get_color() for line in memory.lines} <= set(SERIES)
    assert min(text.get_fontsize() for text in figure.findobj(lambda it: hasattr(it, "get_fontsize"))) >= 9
    figure.savefig(io.BytesIO())
    assert "memory of this process 500.0 MB to 600.0 MB; memory of its experiments 1.50 GB" in watched.description()


def test_the_live_picture_is_svg_with_words_for_it(watched):
    memory, cpu = ElementTree.fromstring(f"<all>{watched.live_html()}</all>").iter("svg")
    assert "memory of its experiments 2.5 GB" in memory.get("aria-label") and "75 %" in cpu.get("aria-label")
    assert [len(line.get("points").split()) for line in memory.findall("polyline")] == [2, 2]
    assert [len(line.get("points").split()) for line in cpu.findall("polyline")] == [1], "not measured is not 0"


def test_a_gpu_without_utilisation_is_drawn_and_says_so(gpu):
    gpu.fail("nvmlDeviceGetUtilizationRates", 3)
    with monitor.live(10) as watched:
        pass
    assert [text.get_text() for text in watched.picture().axes[1].texts] == ["not available"]
    assert "GPU utilisation: not available" in watched.live_html()
    assert "temperature 61 °C" in watched.live_html() and "clocks: power limit (software)" in watched.live_html()


def test_it_works_and_ends_in_a_plain_python():
    """No IPython, nothing closed: the interpreter ends, and prints no complaint."""
    done = python(
        "import atexit, sys; sys.modules['IPython'] = None\n"
        "atexit.register(lambda: print('alive:', left._thread.is_alive()))\n"  # registered first, called last
        "from perf_helpers import monitor\n"
        "with monitor.live(10) as m: pass\n"
        "print(m.summary())\n"
        "left = monitor.live(0.01)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "memory of this process" in done.stdout and "alive: False" in done.stdout


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
    "m = monitor.live(0.05); again = monitor.live(0.05)",  # ended by the cell
    "from ipywidgets import Widget; import json\n"
    "names = [thread.name for thread in threading.enumerate() if 'monitor' in thread.name]\n"
    "hooks = get_ipython().events.callbacks['post_run_cell']\n"
    "print(json.dumps([names, len([hook for hook in hooks if '_cell_ended' in repr(hook)]), seen[0]._widget.value]))",
    "def broken(self): raise ZeroDivisionError('while drawing')\n"
    "monitor.Monitor.live_html = broken\n"
    "with monitor.live(0.05) as m:\n    m._thread.join()",
    "m._widget.value",
    "m = monitor.live(0.05); m._thread.join()",
    "monitor.Monitor.live_html = lambda self: ''; monitor.Monitor.picture = broken\n"
    "with monitor.live(0.05) as m:\n    pass",
]


@pytest.fixture(scope="module")
def cells():
    """The outputs of each cell, run in a kernel of this environment as the course runs one; some twice."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
        NotebookClient(notebook, kernel_name="python3", allow_errors=True, timeout=120).execute()
    return [cell.outputs for cell in notebook.cells]


def test_a_notebook_keeps_one_static_picture_with_its_words(cells):
    (picture,) = cells[1]
    assert picture.data["image/png"].startswith("iVBOR")
    assert 'alt="' in picture.data["text/html"] and "memory of this process" in picture.data["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" not in picture.data
    (table,) = cells[2]
    assert "<th" in table.data["text/html"]


def test_the_cells_end_stops_it_and_leaves_its_picture(cells):
    assert ["image/png" in output.data for output in cells[3]] == [True, True]
    names, hooks, drawn = json.loads(cells[4][0].text)
    assert (names, hooks) == ([], 0)
    assert "<svg" in drawn and "aria-label" in drawn


@pytest.mark.parametrize("number", [5, 7, 8])  # in a block, in a cell, and in the picture that stays
def test_a_drawing_error_stands_in_place_and_fails_the_cell(cells, number):
    place = cells[number][0]
    assert "The monitor stopped: ZeroDivisionError: while drawing" in place.data["text/html"]
    assert [output.ename for output in cells[number] if output.output_type == "error"] == ["ZeroDivisionError"]


def test_a_drawing_error_is_shown_at_once(cells):
    assert "The monitor stopped: ZeroDivisionError: while drawing" in cells[6][0].data["text/plain"]
