"""A live monitor: what the GPU does while a cell runs (NVML), or the CPU and memory where there is no GPU.

One background thread takes a sample now and then and draws it. It keeps itself under one percent of one core: a sample
that costs more makes the next one wait. The live picture is therefore an SVG of a few lines written here; matplotlib,
which takes a hundred times as long, draws only the picture that stays when the cell has ended.
"""

import atexit
import html
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from perf_helpers import plots
from perf_helpers.lab import hardware

SHARE = 0.006  # of one core's time that the thread may take
REDRAW_SECONDS = 0.5
CLOSE_SECONDS = 20  # a broken driver can hold a query for ever; the cell must end

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
_CLOCK_SM, _CLOCK_MEMORY, _TEMPERATURE_GPU = 1, 2, 0  # NVML's numbers of what is asked for
_NEVER = (3, 4, 13)  # NVML's codes: not supported, no permission, function not found

GPU_FIGURES = {
    "device_used_bytes": ("device memory used", "B"),
    "gpu_percent": ("GPU utilisation", "%"),
    "power_watts": ("power", "W"),
    "temperature_celsius": ("temperature", "°C"),
    "sm_clock_mhz": ("clock of the cores", "MHz"),
    "memory_clock_mhz": ("clock of the memory", "MHz"),
}
HOST_FIGURES = {
    "cpu_percent": ("CPU utilisation", "%"),
    "memory_available_bytes": ("memory available", "B"),
    "own_rss_bytes": ("memory of this process", "B"),
    "children_rss_bytes": ("memory of its experiments", "B"),
}
GPU_PANELS = (("device memory used", ("device_used_bytes",)), ("GPU utilisation", ("gpu_percent",)))
HOST_PANELS = (
    ("resident memory", ("own_rss_bytes", "children_rss_bytes")),
    ("CPU utilisation, all cores", ("cpu_percent",)),
)
_DASHES = ((), (6, 3))  # of a panel's first and second line, in points


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the machine; None for what it does not tell. Either the GPU's figures or the host's are there."""

    time_seconds: float  # since the sampler started
    device_used_bytes: int | None = None  # by everybody, contexts included
    gpu_percent: float | None = None  # time in which any kernel ran
    power_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    clock_reasons: tuple[str, ...] | None = None  # what sets the clocks, see `reasons`
    cpu_percent: float | None = None  # of the time of all the machine's cores, since the sample before
    memory_available_bytes: int | None = None  # of the machine, or left of the container's limit if that is less
    own_rss_bytes: int | None = None  # resident memory of this process
    children_rss_bytes: int | None = None  # added up over its descendants: a page that two share counts twice


def reasons(bitmask: int) -> list[str]:
    """NVML's reasons for the present clocks in words; empty where nothing holds them back.

    Source: nvml.h, nvmlClocksEventReasons.
    """
    set_bits = [bit for bit in range(bitmask.bit_length()) if bitmask >> bit & 1]
    return [REASONS[bit] if bit < len(REASONS) else f"unknown reason {1 << bit:#x}" for bit in set_bits]


# The sampler ---------------------------------------------------------------------------------------------------------


class Sampler:
    """Samples this machine in a background thread, from now until the `with` block, the cell or Python ends.

    There is one at most: starting another stops the first. It reads CUDA's GPU `gpu_index` where experiments run on
    one, else the host.

    Args:
        interval_seconds: from one sample to the next; more where a sample is so costly that it would exceed `SHARE`.
        history: the number of samples kept, the latest; `summary` is about all.
        gpu_index: as CUDA numbers GPUs.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(self, interval_seconds: float = 0.5, history: int = 240, *, gpu_index: int = 0):
        if not interval_seconds > 0:
            raise ValueError(f"interval_seconds={interval_seconds!r}: give seconds above 0, such as 0.5")
        if history < 2:
            raise ValueError(f"history={history!r}: keep at least 2 samples")
        machine = hardware.describe()
        gpus = machine.gpus if machine.kind == "cuda" else ()
        if gpu_index not in range(max(1, len(gpus))):
            raise ValueError(f"gpu_index={gpu_index!r}: this machine has {len(gpus)} GPUs that can be used, from 0 on")
        self.gpu = gpus[gpu_index] if gpus and gpus[gpu_index].uuid else None
        self.name = (self.gpu.name or "NVIDIA GPU") if self.gpu else machine.name
        if gpus and not self.gpu:
            self.name = f"the host, since NVML gives nothing about the GPU ({machine.nvml_reason})"
        self.interval_seconds, self.history = interval_seconds, history
        self.samples: tuple[Sample, ...] = ()
        self.cpu_seconds = 0.0  # processor time of the thread so far, drawing included
        self.elapsed_seconds = 0.0
        self._figures = GPU_FIGURES if self.gpu else HOST_FIGURES
        self._panels = GPU_PANELS if self.gpu else HOST_PANELS
        self._totals: dict[str, tuple[float, float, int, float]] = {}  # least, sum, count, most
        self._reasons: Counter[str] = Counter()
        self._count = 0
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="perf_helpers monitor", daemon=True)
        self._events = _cell_events()
        _only(None)
        self._show()
        _only(self)
        if self._events:
            self._events.register("post_run_cell", self._cell_ended)
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
        """Stop the thread and wait for its end.

        Raises:
            RuntimeError: the thread does not end.
            Exception: what went wrong in the thread, once.
        """
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
        for field, (label, unit) in self._figures.items():
            least, total, count, most = self._totals.get(field, (None, None, 1, None))
            mean = None if total is None else total / count
            rows.append([label, *(_text(value, unit) for value in (least, mean, most))])
        where = f"{self.name}: {self._count} samples in {plots.seconds_text(self.elapsed_seconds)}"
        held = ", ".join(f"{reason} in {n / self._count:.0%}" for reason, n in self._reasons.most_common())
        return plots.Table(["figure", "min", "mean", "max"], rows, where + (f"; clocks: {held}" if held else ""))

    def _work(self) -> None:
        """The thread: one sample at once, one at the end, and those between."""
        try:
            with _reader(self.gpu) as read:
                start, last = time.monotonic(), False
                while not last:
                    last = self._stop.is_set()
                    self._add(Sample(time.monotonic() - start, **read()))
                    self.cpu_seconds, self.elapsed_seconds = time.thread_time(), time.monotonic() - start
                    self._stop.wait(max(self.interval_seconds, self.cpu_seconds / SHARE - self.elapsed_seconds))
        except Exception as error:
            self._error = error

    def _show(self) -> None:
        """Nothing: `Monitor` does."""

    def _add(self, sample: Sample) -> None:
        for field in self._figures:
            if (value := getattr(sample, field)) is not None:
                least, total, count, most = self._totals.get(field, (value, 0, 0, value))
                self._totals[field] = (min(least, value), total + value, count + 1, max(most, value))
        self._reasons.update(sample.clock_reasons or ())
        self._count += 1
        self.samples = (*self.samples, sample)[-self.history :]  # a new tuple: readers need no lock

    def _cell_ended(self, *_) -> None:
        self.close()

    def _forget_cell(self) -> None:
        if self._events:
            with suppress(ValueError):  # it is not registered any more
                self._events.unregister("post_run_cell", self._cell_ended)


_current: Sampler | None = None
_lock = threading.Lock()


def _only(sampler: Sampler | None) -> None:
    """Make this the one sampler, after the one before it has stopped."""
    global _current
    with _lock:
        before, _current = _current, sampler
    if before:
        before.close()


atexit.register(_only, None)


def _cell_events():
    """IPython's events, where there is an IPython."""
    shell = _shell()
    return shell.events if shell else None


def _shell():
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return get_ipython()


# What is read --------------------------------------------------------------------------------------------------------


@contextmanager
def _reader(gpu: hardware.Gpu | None) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield a function that reads one sample's figures, for the thread that calls it."""
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
            "device_used_bytes": hardware.device_used_bytes(self._index),
            "gpu_percent": None if rates is None else rates.gpu,
            "power_watts": None if power is None else power / 1000,
            "temperature_celsius": self._ask("nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", _CLOCK_SM),
            "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
            "clock_reasons": None if mask is None else tuple(reasons(mask)),
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
    """The CPU's and the memory's figures."""

    def __init__(self):
        self._process = psutil.Process()
        self._limited = hardware.cgroup_limits()[1] is not None
        self._busy = None  # (busy, all) seconds of the cores at the sample before

    def read(self) -> dict[str, Any]:
        return {
            "cpu_percent": _guarded(self._cpu_percent),
            "memory_available_bytes": _guarded(self._available),
            "own_rss_bytes": _guarded(_rss, self._process),
            "children_rss_bytes": _guarded(self._children),
        }

    def _cpu_percent(self) -> float | None:
        times = psutil.cpu_times()
        everything = sum(times) - getattr(times, "guest", 0) - getattr(times, "guest_nice", 0)  # counted in user
        now = everything - times.idle - getattr(times, "iowait", 0), everything
        before = self._busy
        if before and now[1] - before[1] < 0.1 * (psutil.cpu_count() or 1):
            return None  # too soon: the kernel counts in hundredths of a second
        self._busy = now
        return 100 * min(1.0, max(0.0, (now[0] - before[0]) / (now[1] - before[1]))) if before else None

    def _available(self) -> int:
        left = hardware.cgroup_limits()[1] if self._limited else None
        return hardware.least(psutil.virtual_memory().available, left)

    def _children(self) -> int:
        sizes = [_guarded(_rss, child) for child in self._process.children(recursive=True)]
        return sum(size for size in sizes if size is not None)  # None: it has ended meanwhile


def _rss(process: psutil.Process) -> int:
    return process.memory_info().rss


def _guarded(read: Callable[..., Any], *arguments):
    try:
        return read(*arguments)
    except (psutil.Error, OSError):
        return None


# What is shown -------------------------------------------------------------------------------------------------------


def live(interval_seconds: float = 0.5, history: int = 240, *, gpu_index: int = 0) -> "Monitor":
    """Watch this machine while a cell runs: `with monitor.live() as m: ...`, then `m.summary()`.

    A picture is drawn twice a second at most where there is a notebook; when the block or the cell ends, a static one
    takes its place. In a terminal nothing is drawn. The arguments are `Sampler`'s.
    """
    return Monitor(interval_seconds, history, gpu_index=gpu_index)


class Monitor(Sampler):
    """A sampler that shows itself. What goes wrong while it draws stands in the picture's place and is raised at the
    end.
    """

    _widget = _handle = None  # of a notebook
    _drawn_seconds = float("-inf")

    def picture(self):
        """The latest samples as a matplotlib figure: memory, and utilisation."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 2.6), dpi=110, layout="constrained")
        for ax, (title, unit, lines) in zip(figure.subplots(1, 2), self._curves(), strict=True):
            for i, (label, points) in enumerate(lines.items()):
                style = (0, _DASHES[i]) if _DASHES[i] else "-"
                ax.plot(*zip(*points, strict=True), linestyle=style, color=plots.SERIES[i], label=label)
            if len(lines) > 1:
                ax.legend(frameon=False, fontsize=9)
            if not lines:
                ax.text(0.5, 0.5, "not available", ha="center", transform=ax.transAxes)
            ax.set_ylim(0, _top(unit, lines))
            ax.set_xlim(*self._span())
            ax.set_xlabel("time (s)")
            ax.set_title(f"{title} ({unit})", loc="left", fontsize=11)
            ax.spines[["top", "right"]].set_visible(False)
        return figure

    def description(self) -> str:
        """The picture in words."""
        parts = []
        for field, (label, unit) in self._figures.items():
            if field in self._totals:
                least, _, _, most = self._totals[field]
                parts.append(f"{label} {_text(least, unit)} to {_text(most, unit)}")
        return f"{self.name} during {plots.seconds_text(self.elapsed_seconds)}: {'; '.join(parts)}"

    def close(self) -> None:
        handle, self._handle = self._handle, None
        try:
            super().close()
            if handle:
                self._leave_picture(handle)
        except Exception as error:
            if handle:
                message = _message(error)
                _replace(handle, {"text/plain": message, "text/html": f"<pre>{html.escape(message)}</pre>"})
            raise
        finally:
            if self._widget:
                self._widget.close()

    def _leave_picture(self, handle) -> None:
        png, words = plots.png(self.picture()), self.description()
        # PNG too, for the report and for viewers that strip HTML.
        _replace(handle, {"text/html": plots.image_html(png, words), "image/png": png, "text/plain": words})

    def _show(self) -> None:
        if getattr(_shell(), "kernel", None):
            import ipywidgets
            from IPython.display import display

            self._widget = ipywidgets.HTML("The monitor starts ...")
            # Not display(widget): ipywidgets 7 then publishes it itself, without the id by which it is replaced.
            view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
            data = {"application/vnd.jupyter.widget-view+json": view, "text/plain": "the live monitor"}
            self._handle = display(data, raw=True, display_id=True)

    def _add(self, sample: Sample) -> None:
        super()._add(sample)
        if self._widget and sample.time_seconds - self._drawn_seconds >= REDRAW_SECONDS and not self._stop.is_set():
            self._drawn_seconds = sample.time_seconds
            try:
                self._widget.value = self._svg()
            except Exception as error:
                self._widget.value = f"<pre>{html.escape(_message(error))}</pre>"
                raise

    def _curves(self) -> list[tuple[str, str, dict[str, list[tuple[float, float]]]]]:
        """For each panel its title, its unit, and its lines as points (seconds, value in that unit)."""
        curves = []
        for title, panel in self._panels:
            lines, unit, scale = {}, self._figures[panel[0]][1], 1.0
            for field in panel:
                points = [(s.time_seconds, getattr(s, field)) for s in self.samples if getattr(s, field) is not None]
                if points:
                    lines[self._figures[field][0]] = points
            if unit == "B":
                most = max((value for points in lines.values() for _, value in points), default=0)
                scale, unit = (1e9, "GB") if most >= 2e9 else (1e6, "MB")
            lines = {label: [(t, value / scale) for t, value in points] for label, points in lines.items()}
            curves.append((title, unit, lines))
        return curves

    def _span(self) -> tuple[float, float]:
        """From where to where the time goes, in seconds."""
        return self.samples[0].time_seconds, self.samples[-1].time_seconds + 0.01

    def _svg(self) -> str:
        """The picture of this moment. The text takes the theme's colour, and 13 px is more than 9 pt."""
        panels = "".join(_panel(*curve, self._span()) for curve in self._curves())
        latest, shown = self.samples[-1], {field for _, panel in self._panels for field in panel}
        now = [
            f"{label} {_text(getattr(latest, field), unit)}"
            for field, (label, unit) in self._figures.items()
            if field not in shown and getattr(latest, field) is not None
        ]
        if latest.clock_reasons:
            now.append(f"clocks: {', '.join(latest.clock_reasons)}")
        text = html.escape(" · ".join([self.name, *now]))
        return (
            f"<div style='display:flex;flex-wrap:wrap;gap:8px'>{panels}</div>"
            f"<div style='font-size:13px;line-height:1.4'>{text}</div>"
        )


def _panel(title: str, unit: str, lines: dict[str, list[tuple[float, float]]], span: tuple[float, float]) -> str:
    """One panel as SVG, with the latest value of each line in words."""
    left, right, top, bottom, most = 46, 320, 58, 138, _top(unit, lines)
    across, up = (right - left) / (span[1] - span[0]), (bottom - top) / most
    now = {label: f"{label} {_digits(points[-1][1])} {unit}" for label, points in lines.items()}
    now = now or {title: "not available"}
    words = html.escape(f"{title}: {', '.join(now.values())}")
    marks = [
        f"<text x='4' y='14' font-weight='bold'>{html.escape(f'{title} ({unit})')}</text>",
        f"<path d='M{left} {top}V{bottom}H{right}' fill='none' stroke='currentColor' stroke-opacity='0.5'/>",
        f"<text x='{left - 4}' y='{top + 10}' text-anchor='end'>{_digits(most)}</text>",
        f"<text x='{left - 4}' y='{bottom}' text-anchor='end'>0</text>",
        f"<text x='{left}' y='{bottom + 16}'>{span[0]:.0f} s</text>",
        f"<text x='{right}' y='{bottom + 16}' text-anchor='end'>{span[1]:.0f} s</text>",
    ]
    for i, (label, text) in enumerate(now.items()):
        y, stroke = 31 + 16 * i, f"stroke='{plots.SERIES[i]}' stroke-width='2' stroke-dasharray='{_dashes(i)}'"
        marks.append(f"<path d='M{left} {y - 4}h26' {stroke}/>")
        marks.append(f"<text x='{left + 32}' y='{y}'>{html.escape(text)}</text>")
        places = (f"{left + (t - span[0]) * across:.1f},{bottom - v * up:.1f}" for t, v in lines.get(label, ()))
        marks.append(f"<polyline points='{' '.join(places)}' fill='none' {stroke}/>")
    return (
        f"<svg role='img' aria-label='{words}' width='330' height='158' style='max-width:100%;font-size:13px' "
        f"fill='currentColor'>{''.join(marks)}</svg>"
    )


def _digits(value: float) -> str:
    return f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def _dashes(i: int) -> str:
    return " ".join(map(str, _DASHES[i])) or "none"


def _top(unit: str, lines: dict[str, Sequence[tuple[float, float]]]) -> float:
    """Where a panel's axis ends."""
    if unit == "%":
        return 100.0
    return 1.15 * max((value for points in lines.values() for _, value in points), default=0) or 1.0


def _text(value: float | None, unit: str) -> str | None:
    if value is None or unit == "B":
        return None if value is None else plots.bytes_text(value)
    return f"{_digits(value)} {unit}"


def _message(error: Exception) -> str:
    return f"The monitor stopped: {type(error).__name__}: {error}"


def _replace(handle, data: dict[str, str]) -> None:
    handle.update(data, raw=True)
