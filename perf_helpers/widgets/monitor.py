"""A live monitor: what the GPU does while a cell runs (NVML), or the CPU and memory where there is no GPU.

One background thread takes a sample now and then and draws it. It keeps itself under one percent of one core: a sample
that costs more makes the next one wait. A figure that the machine does not tell is None, never 0.
"""

import atexit
import base64
import html
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from perf_helpers import plots
from perf_helpers.lab import hardware
from perf_helpers.texts import bytes_text, bytes_unit, number_text, seconds_text
from perf_helpers.widgets import svg
from perf_helpers.widgets.frame import PLACES, view

SHARE = 0.006  # of one core's time that the thread may take
REDRAW_SECONDS = 0.5  # at least, from one live picture to the next
CLOSE_SECONDS = 20  # a broken driver can hold a query for ever; the cell must end
HISTORY = 240  # samples that are kept, the latest; the summary is about all
# What a sample tells, by name, with its unit; and which of it each panel of the picture draws.
GPU_FIGURES = {"device memory used": "B", "GPU utilisation": "%", "power": "W", "clock of the cores": "MHz"}
GPU_PANELS = {"device memory used": ("device memory used",), "GPU utilisation": ("GPU utilisation",)}
OWN, CHILDREN = "memory of this process", "memory of its experiments"
HOST_FIGURES = {"CPU utilisation": "%", "memory available": "B", OWN: "B", CHILDREN: "B"}
HOST_PANELS = {"resident memory": (OWN, CHILDREN), "CPU utilisation, all cores": ("CPU utilisation",)}
CLOCKS = "clocks"  # in a GPU's sample: what sets its clocks, see `reasons`
_PLACE = "monitor"  # there is one at most


class Monitor:
    """Watches this machine while a cell runs: `with monitor.live() as m: ...`, then `m.summary()`.

    A background thread samples it from now until the `with` block, the cell or Python ends: CUDA's GPU `gpu_index`
    where experiments run on one, else the host. There is one at most: starting another stops the first. A picture is
    drawn twice a second at most where there is a notebook, and the last one stays; in a terminal nothing is drawn. What
    goes wrong while it draws stands in the picture's place and is raised at the end.

    Args:
        interval_seconds: from one sample to the next; more where a sample is so costly that it would exceed `SHARE`.
        gpu_index: as CUDA numbers GPUs.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(self, interval_seconds: float = 0.5, *, gpu_index: int = 0):
        if not interval_seconds > 0:
            raise ValueError(f"interval_seconds={interval_seconds!r}: give seconds above 0, such as 0.5")
        machine = hardware.describe()
        gpus = machine.gpus if machine.kind == "cuda" else ()
        if gpu_index not in range(max(1, len(gpus))):
            raise ValueError(f"gpu_index={gpu_index!r}: this machine has {len(gpus)} GPUs that can be used, from 0 on")
        self.gpu = gpus[gpu_index] if gpus and gpus[gpu_index].uuid else None
        self.name = (self.gpu.name or "NVIDIA GPU") if self.gpu else machine.name
        if gpus and not self.gpu:
            self.name = f"the host, since NVML gives nothing about the GPU ({machine.nvml_reason})"
        self.figures, self._panels = (GPU_FIGURES, GPU_PANELS) if self.gpu else (HOST_FIGURES, HOST_PANELS)
        self.interval_seconds = interval_seconds
        # The latest, as (seconds since the start, {figure: value}); replaced as a whole: readers need no lock.
        self.samples: tuple[tuple[float, dict[str, Any]], ...] = ()
        self.count = 0  # of all samples
        self.cpu_seconds = 0.0  # processor time of the thread so far, drawing included
        self.elapsed_seconds = 0.0
        self._totals: dict[str, tuple[float, float, int, float]] = {}  # by figure: least, sum, count, most
        self._reasons: Counter[str] = Counter()  # in how many samples each reason held the clocks
        self._error: Exception | None = None  # what ended the thread
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="perf_helpers monitor", daemon=True)
        self._widget = None  # of the live picture, in a notebook
        self._display = None  # the handle of the output in which the pictures stand
        self._drawn_seconds = float("-inf")  # when the live picture was drawn last, since the start
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        self._cell_events = getattr(shell, "events", None)  # they tell when a cell has ended
        PLACES.free(_PLACE)  # before this one is shown, so that the first one's picture comes first
        if getattr(shell, "kernel", None):
            self._show()
        PLACES.take(_PLACE, self.close)
        if self._cell_events:
            self._cell_events.register("post_run_cell", self._cell_ended)
        self._thread.start()

    def __enter__(self):
        self._forget_cell()  # the block decides, also where it runs cells of its own
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.close()
        except Exception as own:
            if error is None:
                raise
            error.add_note(f"and the monitor failed: {own}")

    def close(self) -> None:
        """Stop the thread, wait for its end, and leave the picture.

        Raises:
            RuntimeError: the thread does not end.
            Exception: what went wrong in the thread, once.
        """
        display, self._display = self._display, None
        try:
            self._end()
            if display:
                words = self.description()
                display.update({"text/html": _kept_html(self.pictures(), words), "text/plain": words}, raw=True)
        except Exception as error:
            if display:
                display.update(_failure(error), raw=True)
            raise
        finally:
            if self._widget:
                self._widget.close()

    def _end(self) -> None:
        self._stop.set()
        self._forget_cell()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(f"the driver has not answered the monitor for {CLOSE_SECONDS} s: try `nvidia-smi`")
        error, self._error = self._error, None
        if error:
            raise error

    def summary(self) -> plots.Table:
        """Least, mean and most of each figure over all samples, each with its unit."""
        rows = []
        for figure, unit in self.figures.items():
            least, total, count, most = self._totals.get(figure, (None, None, 1, None))
            mean = None if total is None else total / count
            rows.append([figure, *(_text(value, unit) for value in (least, mean, most))])
        where = f"{self.name}: {self.count} samples in {seconds_text(self.elapsed_seconds)}"
        held = ", ".join(f"{reason} in {n / self.count:.0%}" for reason, n in self._reasons.most_common())
        return plots.Table(["figure", "min", "mean", "max"], rows, where + (f"; clocks: {held}" if held else ""))

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
        if latest.get(CLOCKS):
            now.append(f"clocks: {', '.join(latest[CLOCKS])}")
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

    def _add(self, seconds: float, figures: dict[str, Any]) -> None:
        for name in self.figures:
            if (value := figures.get(name)) is not None:
                least, total, count, most = self._totals.get(name, (value, 0, 0, value))
                self._totals[name] = (min(least, value), total + value, count + 1, max(most, value))
        self._reasons.update(figures.get(CLOCKS) or ())
        self.count += 1
        self.samples = (*self.samples, (seconds, figures))[-HISTORY:]
        if self._widget and seconds - self._drawn_seconds >= REDRAW_SECONDS and not self._stop.is_set():
            self._drawn_seconds = seconds
            try:
                self._widget.value = self.live_html()
            except Exception as error:
                self._widget.value = _failure(error)["text/html"]
                raise

    def _cell_ended(self, *_) -> None:
        self.close()

    def _forget_cell(self) -> None:
        if self._cell_events:
            with suppress(ValueError):  # it is not registered any more
                self._cell_events.unregister("post_run_cell", self._cell_ended)


live = Monitor  # as it is called in a lesson
atexit.register(PLACES.free, _PLACE)


def _text(value: float | None, unit: str) -> str:
    """A figure as it is shown: in two digits or whole, for more would flicker."""
    return bytes_text(value) if unit == "B" else number_text(value, unit, digits=2)


def _kept_html(pictures: list[str], words: str) -> str:
    """SVG as images, which a notebook shows that is not trusted too; on white, for an image knows no theme."""
    shown = ""
    for number, picture in enumerate(pictures):
        alone = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" ', 1)
        data = f"data:image/svg+xml;base64,{base64.b64encode(alone.encode()).decode()}"
        alt = "" if number else html.escape(words)  # which are about all of them
        shown += f'<img style="background:white;max-width:100%" src="{data}" alt="{alt}">'
    return f"<div style='display:flex;flex-wrap:wrap;gap:8px'>{shown}</div>"


def _failure(error: Exception) -> dict[str, str]:
    """What stands in the picture's place where there is none."""
    message = f"The monitor stopped: {type(error).__name__}: {error}"
    return {"text/plain": message, "text/html": f"<pre>{html.escape(message)}</pre>"}


# ---- one look at the machine

# nvml.h, nvmlClocksEventReasons (before R535: nvmlClocksThrottleReasons). The last two are in newer drivers only.
REASONS = (
    "idle",
    "clocks set by an application",
    "power limit (software)",
    "slowdown (hardware: heat, power or brake)",
    "kept in step with other GPUs",
    "heat (software)",
    "heat (hardware)",
    "power brake (from outside the card)",
    "clocks set for a display",
    "limit of the board",
    "limit for reliability",
)
_CLOCK_OF_THE_CORES = 1  # NVML's number of it
_NEVER = (3, 4, 13)  # NVML's codes: not supported, no permission, function not found


def reasons(bitmask: int) -> list[str]:
    """NVML's reasons for the present clocks in words; empty where nothing holds them back."""
    set_bits = [bit for bit in range(bitmask.bit_length()) if bitmask >> bit & 1]
    return [REASONS[bit] if bit < len(REASONS) else f"unknown reason {1 << bit:#x}" for bit in set_bits]


@contextmanager
def reader(gpu: hardware.Gpu | None) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield a function that reads the figures of one sample from a GPU; None: from the host."""
    if gpu is None:
        yield _Host().read
    else:
        with hardware.nvml() as (ask, _):  # one session, so that the inner ones of device_used_bytes cost nothing
            yield _Device(gpu.index, ask("nvmlDeviceGetHandleByUUID", gpu.uuid)).read


class _Device:
    """One GPU's figures from NVML, each query guarded; one that is not supported is asked once."""

    def __init__(self, index: int, handle: Any):
        self._index, self._handle = index, handle
        self._unsupported: set[tuple] = set()

    def read(self) -> dict[str, Any]:
        rates, power = self._ask("nvmlDeviceGetUtilizationRates"), self._ask("nvmlDeviceGetPowerUsage")
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:
            mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")  # its name before R535
        return {
            "device memory used": hardware.device_used_bytes(self._index),  # by everybody, contexts included
            "GPU utilisation": None if rates is None else rates.gpu,  # time in which any kernel ran
            "power": None if power is None else power / 1000,
            "clock of the cores": self._ask("nvmlDeviceGetClockInfo", _CLOCK_OF_THE_CORES),
            CLOCKS: None if mask is None else tuple(reasons(mask)),
        }

    def _ask(self, *query):
        if query in self._unsupported:
            return None
        import pynvml

        try:
            return getattr(pynvml, query[0])(self._handle, *query[1:])
        except Exception as error:  # not only NVMLError, as in hardware.nvml
            if isinstance(error, AttributeError) or getattr(error, "value", None) in _NEVER:
                self._unsupported.add(query)
            return None


class _Host:
    """The CPU's and the memory's figures, each query guarded."""

    def __init__(self):
        self._process = psutil.Process()
        self._limited = hardware.cgroup_limits()[1] is not None
        self._busy = None  # (busy, all) seconds of the cores at the sample before

    def read(self) -> dict[str, Any]:
        read, queries = {}, {"CPU utilisation": self._cpu_percent, "memory available": self._available}
        queries |= {OWN: lambda: self._process.memory_info().rss, CHILDREN: self._children}
        for name, query in queries.items():
            read[name] = None
            with suppress(psutil.Error, OSError):
                read[name] = query()
        return read

    def _cpu_percent(self) -> float | None:
        """Of the time of all the machine's cores, since the sample before."""
        times = psutil.cpu_times()
        everything = sum(times) - getattr(times, "guest", 0) - getattr(times, "guest_nice", 0)  # counted in user
        now = everything - times.idle - getattr(times, "iowait", 0), everything
        before = self._busy
        if before and now[1] - before[1] < 0.1 * (psutil.cpu_count() or 1):
            return None  # too soon: the kernel counts in hundredths of a second
        self._busy = now
        return 100 * min(1.0, max(0.0, (now[0] - before[0]) / (now[1] - before[1]))) if before else None

    def _available(self) -> int:
        """Of the machine, or left of the container's limit if that is less."""
        left = hardware.cgroup_limits()[1] if self._limited else None
        return hardware.least(psutil.virtual_memory().available, left)

    def _children(self) -> int:
        """Resident memory added up over the descendants: a page that two share counts twice."""
        total = 0
        for child in self._process.children(recursive=True):
            with suppress(psutil.Error, OSError):  # it has ended meanwhile
                total += child.memory_info().rss
        return total
