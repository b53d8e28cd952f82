"""A live monitor of the GPU while a block of code runs (by NVML), or of CPU and memory if there is no GPU.

A background thread takes samples and draws them. A figure that the machine does not report is None, never 0.
"""

import html
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from perf_helpers import plots
from perf_helpers.widgets import svg
from perf_helpers.widgets.frame import view
from trainmem.core import hardware
from trainmem.measure.forkserver import SERVER
from trainmem.texts import bytes_text, bytes_unit, number_text, seconds_text

CLOSE_SECONDS = 20  # a broken driver can block a query forever, but the block of code must end
DRAWN = 240  # latest samples that the picture shows; the summary covers all
# The figures of a sample, by name, with their units.
GPU_FIGURES = {"device memory used": "B", "GPU utilization": "%", "power": "W", "clock of the cores": "MHz"}
OWN, CHILDREN = "memory of this process", "memory of its experiments"
HOST_FIGURES = {"CPU utilization": "%", "memory available": "B", OWN: "B", CHILDREN: "B"}
_CLOCK_OF_THE_CORES = 1  # NVML's number for this clock

Figures = dict[str, float | None]  # of one sample, by name


class Monitor:
    """Watch this machine while a block runs: `with monitor.live() as m: ...`, then `m.summary()`.

    A background thread samples CUDA's first GPU if NVML reports it, else the host. A notebook draws each sample and
    keeps the last picture; a terminal draws nothing. An error in the thread is raised when the block ends.

    Args:
        interval_seconds: pause before each sample; if the block takes less time than this, there is no sample.

    Raises:
        ValueError: an interval out of range.
    """

    def __init__(self, interval_seconds: float = 0.5):
        if not interval_seconds > 0:
            raise ValueError(f"interval_seconds={interval_seconds!r}: give seconds above 0, such as 0.5")
        machine = hardware.describe()
        gpus = machine.gpus if machine.kind == "cuda" else ()
        self.gpu = gpus[0] if gpus and gpus[0].uuid else None
        self.name = (self.gpu.name or "NVIDIA GPU") if self.gpu else machine.name
        if gpus and not self.gpu:
            self.name = f"the host, because NVML does not report the GPU ({machine.nvml_reason})"
        self.figures = GPU_FIGURES if self.gpu else HOST_FIGURES
        self.interval_seconds = interval_seconds
        self.samples: list[tuple[float, Figures]] = []  # (seconds since the start, figures)
        self._error: Exception | None = None  # what ended the thread
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="perf_helpers monitor", daemon=True)
        self._widget = self._display = None  # in a notebook: the picture, and the handle of its output

    def __enter__(self):
        if plots.in_a_notebook():
            import ipywidgets
            from IPython.display import display

            self._widget = ipywidgets.HTML("The monitor starts ...")
            # Not display(widget): ipywidgets 7 would publish it without the id that `update` needs.
            self._display = display({"text/plain": "the live monitor"} | view(self._widget), raw=True, display_id=True)
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            text = f"the GPU driver has not answered for {CLOSE_SECONDS} s: check it with `nvidia-smi`"
            self._error = RuntimeError(text)
        if self._display:
            self._display.update({"text/plain": repr(self.summary()), "text/html": self._widget.value}, raw=True)
            self._widget.close()
        if self._error and error is None:
            raise self._error
        if self._error:
            error.add_note(f"and the monitor failed: {self._error}")

    def summary(self) -> plots.Table:
        """Return the least, mean and greatest value of each figure over all samples, with units."""
        rows = []
        for figure, unit in self.figures.items():
            values = [figures[figure] for _, figures in self.samples if figures.get(figure) is not None]
            found = (min(values), statistics.fmean(values), max(values)) if values else (None, None, None)
            rows.append([figure, *(_text(value, unit) for value in found)])
        seconds = self.samples[-1][0] if self.samples else None
        caption = f"{self.name}: {len(self.samples)} readings in {seconds_text(seconds)}"
        return plots.Table(["figure", "min", "mean", "max"], rows, caption)

    def live_html(self) -> str:
        """Return the latest samples as SVG: a panel per quantity, e.g. memory in use, with a line over time."""
        samples, panels = self.samples[-DRAWN:], []
        for name, unit in self.figures.items():
            points = [(at, figures[name]) for at, figures in samples if figures.get(name) is not None]
            if unit == "B":
                scale, unit = bytes_unit(max((value for _, value in points), default=0) or 1e6)
                points = [(at, value / scale) for at, value in points]
            panels.append(svg.panel(name, unit, points, (samples[0][0], samples[-1][0] + 0.01)))
        caption = f"<div style='font-size:13px'>{html.escape(self.name)}</div>"
        return f"<div style='display:flex;flex-wrap:wrap;gap:8px'>{''.join(panels)}</div>{caption}"

    def _work(self) -> None:
        """Run the thread: take and draw samples until the monitor's `with` block ends."""
        try:
            with reader(self.gpu) as read:
                start = time.monotonic()
                while not self._stop.wait(self.interval_seconds):
                    self.samples.append((time.monotonic() - start, read()))
                    if self._widget:
                        self._widget.value = self.live_html()
        except Exception as error:
            self._error = error


live = Monitor  # its name in lessons


def _text(value: float | None, unit: str) -> str:
    """Return a value with its unit as text, e.g. "9.1 W" or "12 W"; "not measured" for None or `Unknown`."""
    return bytes_text(value) if unit == "B" else number_text(value, unit, digits=2)


# ---- reading one sample


@contextmanager
def reader(gpu: hardware.Gpu | None) -> Iterator[Callable[[], Figures]]:
    """Yield a function that samples the GPU (None: the host) and returns {name: figure}; unknown figures are None."""
    if gpu is None:
        yield _host_reader()
        return
    with hardware.nvml() as (ask, _):  # one session, so that the inner ones of device_used_bytes cost nothing
        handle = ask("nvmlDeviceGetHandleByUUID", gpu.uuid)

        def read() -> Figures:
            rates, milliwatts = ask("nvmlDeviceGetUtilizationRates", handle), ask("nvmlDeviceGetPowerUsage", handle)
            return {
                "device memory used": hardware.device_used_bytes(gpu.index),  # by everybody, contexts included
                "GPU utilization": None if rates is None else rates.gpu,  # time in which any kernel ran
                "power": None if milliwatts is None else milliwatts / 1000,
                "clock of the cores": ask("nvmlDeviceGetClockInfo", handle, _CLOCK_OF_THE_CORES),
            }

        yield read


def _host_reader() -> Callable[[], Figures]:
    """Return a function that reads {name: figure} of CPU and memory; a figure that cannot be read is None."""
    process = psutil.Process()
    with suppress(psutil.Error, OSError):
        psutil.cpu_percent()  # the first sample reports the time since this call

    def children() -> int:
        """Return the resident bytes of this process's descendants and experiments; a page shared by two counts twice.

        In a course an experiment is no descendant of its lesson: it is forked by the course's server.
        """
        found = set(process.children(recursive=True))
        for pid in SERVER.forks():
            with suppress(psutil.Error, OSError):
                found |= {fork := psutil.Process(pid), *fork.children(recursive=True)}
        total = 0
        for child in found:
            with suppress(psutil.Error, OSError):  # it has ended meanwhile
                total += child.memory_info().rss
        return total

    queries = {
        "CPU utilization": psutil.cpu_percent,  # of the time of all cores since the sample before
        # Of the machine, or left of the container's limit if that is less.
        "memory available": lambda: hardware.least(psutil.virtual_memory().available, hardware.cgroup_limits()[1]),
        OWN: lambda: process.memory_info().rss,
        CHILDREN: children,
    }

    def read() -> Figures:
        figures: Figures = dict.fromkeys(queries)
        for name, query in queries.items():
            with suppress(psutil.Error, OSError):
                figures[name] = query()
        return figures

    return read
