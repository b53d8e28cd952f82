"""A live monitor: what the GPU does while a block runs (NVML), or the CPU and memory where there is no GPU.

One background thread takes a sample now and then and draws it. It keeps itself under one percent of one core: a sample
that costs more makes the next one wait. A figure that the machine does not tell is None, never 0.
"""

import base64
import html
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from perf_helpers import plots
from perf_helpers.lab import hardware
from perf_helpers.texts import bytes_text, bytes_unit, number_text, seconds_text
from perf_helpers.widgets import svg
from perf_helpers.widgets.frame import view

SHARE = 0.006  # of one core's time that the thread may take
CLOSE_SECONDS = 20  # a broken driver can hold a query for ever; the block must end
HISTORY = 240  # samples that are kept, the latest; the summary is about all
# What a sample tells, by name, with its unit; and which of it each panel of the picture draws.
GPU_FIGURES = {"device memory used": "B", "GPU utilisation": "%", "power": "W", "clock of the cores": "MHz"}
GPU_PANELS = {"device memory used": ("device memory used",), "GPU utilisation": ("GPU utilisation",)}
OWN, CHILDREN = "memory of this process", "memory of its experiments"
HOST_FIGURES = {"CPU utilisation": "%", "memory available": "B", OWN: "B", CHILDREN: "B"}
HOST_PANELS = {"resident memory": (OWN, CHILDREN), "CPU utilisation, all cores": ("CPU utilisation",)}
_CLOCK_OF_THE_CORES = 1  # NVML's number of it

Figures = dict[str, float | None]  # of one sample, by name


class Monitor:
    """Watches this machine while a block runs: `with monitor.live() as m: ...`, then `m.summary()`.

    A background thread samples CUDA's first GPU where experiments run on one, else the host. In a notebook every sample
    is drawn, and the last picture stays; in a terminal nothing is drawn. What goes wrong meanwhile stands in the
    picture's place and is raised at the end of the block.

    Args:
        interval_seconds: from one sample to the next; more where a sample is so costly that it would exceed `SHARE`.

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
        self.figures, self._panels = (GPU_FIGURES, GPU_PANELS) if self.gpu else (HOST_FIGURES, HOST_PANELS)
        self.interval_seconds = interval_seconds
        # The latest, as (seconds since the start, figures); replaced as a whole: readers need no lock.
        self.samples: tuple[tuple[float, Figures], ...] = ()
        self.count = 0  # of all samples
        self.cpu_seconds = 0.0  # processor time of the thread so far, drawing included
        self.elapsed_seconds = 0.0
        self._totals: dict[str, tuple[float, float, int, float]] = {}  # by figure: least, sum, count, most
        self._error: Exception | None = None  # what ended the thread
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="perf_helpers monitor", daemon=True)
        self._widget = None  # of the live picture, in a notebook
        self._display = None  # the handle of the output in which the pictures stand

    def __enter__(self):
        if plots.in_a_notebook():
            self._show()
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self._end()
        except Exception as own:
            if error is None:
                raise
            error.add_note(f"and the monitor failed: {own}")

    def _end(self) -> None:
        """Stop the thread, wait for its end, and leave the picture."""
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        try:
            if self._thread.is_alive():
                raise RuntimeError(f"the GPU driver has not answered for {CLOSE_SECONDS} s: check it with `nvidia-smi`")
            if self._error:
                raise self._error
            kept = self._kept() if self._display else None
        except Exception as error:
            kept = _failure(error)
            raise
        finally:
            if self._display:
                self._display.update(kept, raw=True)
                self._widget.close()

    def summary(self) -> plots.Table:
        """Least, mean and most of each figure over all samples, each with its unit."""
        rows = []
        for figure, unit in self.figures.items():
            least, total, count, most = self._totals.get(figure, (None, None, 1, None))
            mean = None if total is None else total / count
            rows.append([figure, *(_text(value, unit) for value in (least, mean, most))])
        caption = f"{self.name}: {self.count} samples in {seconds_text(self.elapsed_seconds)}"
        return plots.Table(["figure", "min", "mean", "max"], rows, caption)

    def pictures(self) -> list[str]:
        """Memory, and utilisation, over the latest samples, each as SVG."""
        span, pictures = (self.samples[0][0], self.samples[-1][0] + 0.01), []
        for title, names in self._panels.items():
            most = max(figures.get(name) or 0 for _, figures in self.samples for name in names)
            unit = self.figures[names[0]]
            scale, unit = bytes_unit(most or 1e6) if unit == "B" else (1, unit)
            lines = {}
            for name in names:
                values = [(seconds, figures.get(name)) for seconds, figures in self.samples]
                if points := [(seconds, value / scale) for seconds, value in values if value is not None]:
                    lines[name] = points
            pictures.append(svg.panel(title, unit, lines, span))
        return pictures

    def live_html(self) -> str:
        """The pictures, and the latest of all other figures in words."""
        (_, latest), shown = self.samples[-1], {name for names in self._panels.values() for name in names}
        told = {name: unit for name, unit in self.figures.items() if name not in shown and latest.get(name) is not None}
        now = [f"{name} {_text(latest[name], unit)}" for name, unit in told.items()]
        return (
            f"<div style='display:flex;flex-wrap:wrap;gap:8px'>{''.join(self.pictures())}</div>"
            f"<div style='font-size:13px;line-height:1.4'>{html.escape(' · '.join([self.name, *now]))}</div>"
        )

    def description(self) -> str:
        """The picture that stays, in words."""
        rows = [row for row in self.summary().rows if "not measured" not in row]
        parts = "; ".join(f"{figure} {least} to {most}" for figure, least, _, most in rows)
        return f"{self.name} during {seconds_text(self.elapsed_seconds)}: {parts}"

    def _show(self) -> None:
        import ipywidgets
        from IPython.display import display

        self._widget = ipywidgets.HTML("The monitor starts ...")
        # Not display(widget): ipywidgets 7 then publishes it itself, without the id by which it is replaced.
        self._display = display({"text/plain": "the live monitor"} | view(self._widget), raw=True, display_id=True)

    def _kept(self) -> dict[str, str]:
        """What stays in the notebook. SVG as images: a notebook that is not trusted shows them too; on white, for an
        image knows no theme."""
        words, shown = self.description(), ""
        for number, picture in enumerate(self.pictures()):
            alone = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" ', 1)
            data = f"data:image/svg+xml;base64,{base64.b64encode(alone.encode()).decode()}"
            alt = "" if number else html.escape(words)  # which are about all of them
            shown += f'<img style="background:white;max-width:100%" src="{data}" alt="{alt}">'
        return {"text/plain": words, "text/html": f"<div style='display:flex;flex-wrap:wrap;gap:8px'>{shown}</div>"}

    def _work(self) -> None:
        """The thread: one sample at once, one at the end, and those between."""
        try:
            with reader(self.gpu) as read:
                start, last = time.monotonic(), False
                while not last:
                    last = self._stop.is_set()
                    self._add(time.monotonic() - start, read())
                    self.cpu_seconds, self.elapsed_seconds = time.thread_time(), time.monotonic() - start
                    self._stop.wait(max(self.interval_seconds, self.cpu_seconds / SHARE - self.elapsed_seconds))
        except Exception as error:
            self._error = error
            if self._widget:
                self._widget.value = _failure(error)["text/html"]

    def _add(self, seconds: float, figures: Figures) -> None:
        for name in self.figures:
            if (value := figures.get(name)) is not None:
                least, total, count, most = self._totals.get(name, (value, 0, 0, value))
                self._totals[name] = (min(least, value), total + value, count + 1, max(most, value))
        self.count += 1
        self.samples = (*self.samples, (seconds, figures))[-HISTORY:]
        if self._widget and not self._stop.is_set():
            self._widget.value = self.live_html()


live = Monitor  # as it is called in a lesson


def _text(value: float | None, unit: str) -> str:
    """A figure as it is shown: in two digits or whole, for more would flicker."""
    return bytes_text(value) if unit == "B" else number_text(value, unit, digits=2)


def _failure(error: Exception) -> dict[str, str]:
    """What stands in the picture's place where there is none."""
    message = f"The monitor stopped: {type(error).__name__}: {error}"
    return {"text/plain": message, "text/html": f"<pre>{html.escape(message)}</pre>"}


# ---- one look at the machine


@contextmanager
def reader(gpu: hardware.Gpu | None) -> Iterator[Callable[[], Figures]]:
    """Yield a function that reads the figures of one sample from a GPU; None: from the host."""
    if gpu is None:
        yield _host_reader()
        return
    with hardware.nvml() as (ask, _):  # one session, so that the inner ones of device_used_bytes cost nothing
        handle = ask("nvmlDeviceGetHandleByUUID", gpu.uuid)

        def read() -> Figures:
            rates, milliwatts = ask("nvmlDeviceGetUtilizationRates", handle), ask("nvmlDeviceGetPowerUsage", handle)
            return {
                "device memory used": hardware.device_used_bytes(gpu.index),  # by everybody, contexts included
                "GPU utilisation": None if rates is None else rates.gpu,  # time in which any kernel ran
                "power": None if milliwatts is None else milliwatts / 1000,
                "clock of the cores": ask("nvmlDeviceGetClockInfo", handle, _CLOCK_OF_THE_CORES),
            }

        yield read


def _host_reader() -> Callable[[], Figures]:
    """The CPU's and the memory's figures, each query guarded."""
    process, asked = psutil.Process(), time.monotonic()
    with suppress(psutil.Error, OSError):
        psutil.cpu_percent()  # it tells of the time since it was asked before

    def cpu_percent() -> float | None:
        """Of the time of all the machine's cores, since the sample before."""
        nonlocal asked
        if time.monotonic() - asked < 0.1:
            return None  # too soon: the kernel counts in hundredths of a second
        asked = time.monotonic()
        return psutil.cpu_percent()

    def children() -> int:
        """Resident memory added up over the descendants: a page that two share counts twice."""
        total = 0
        for child in process.children(recursive=True):
            with suppress(psutil.Error, OSError):  # it has ended meanwhile
                total += child.memory_info().rss
        return total

    queries = {
        "CPU utilisation": cpu_percent,
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
