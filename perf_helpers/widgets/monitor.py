"""A live monitor: what the GPU does while a cell runs (NVML), or the CPU and memory where there is no GPU.

One background thread takes a sample now and then and draws it. It keeps itself under one percent of one core: a sample
that costs more makes the next one wait. The live picture is therefore an SVG of a few lines, for matplotlib takes a
hundred times as long: it draws only the picture that stays when the cell has ended. What both show, and in which units,
is said once: `Monitor.panels`.
"""

import atexit
import html
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from perf_helpers import plots
from perf_helpers.lab import hardware
from perf_helpers.texts import bytes_unit, seconds_text
from perf_helpers.widgets import svg_drawings, system_stats
from perf_helpers.widgets.frame import PLACES, view

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARE = 0.006  # of one core's time that the thread may take
REDRAW_SECONDS = 0.5  # at least, from one live picture to the next
CLOSE_SECONDS = 20  # a broken driver can hold a query for ever; the cell must end
GPU_PANELS = {"device memory used": ("device_used_bytes",), "GPU utilisation": ("gpu_percent",)}  # fields by title
HOST_PANELS = {
    "resident memory": ("own_rss_bytes", "children_rss_bytes"),
    "CPU utilisation, all cores": ("cpu_percent",),
}
_PLACE = "monitor"  # there is one at most


class Monitor:
    """Watches this machine while a cell runs: `with monitor.live() as m: ...`, then `m.summary()`.

    A background thread samples it from now until the `with` block, the cell or Python ends: CUDA's GPU `gpu_index`
    where experiments run on one, else the host. There is one at most: starting another stops the first. A picture is
    drawn twice a second at most where there is a notebook, and a static one takes its place at the end; in a terminal
    nothing is drawn. What goes wrong while it draws stands in the picture's place and is raised at the end.

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
        self.figures = (
            system_stats.GPU_FIGURES if self.gpu else system_stats.HOST_FIGURES
        )  # label and unit of each field read
        self._fields = GPU_PANELS if self.gpu else HOST_PANELS  # those that are drawn, by the panel's title
        self.interval_seconds, self.history = interval_seconds, history
        self.samples: tuple[system_stats.Sample, ...] = ()  # the latest; replaced as a whole: readers need no lock
        self.count = 0  # of all samples
        self.cpu_seconds = 0.0  # processor time of the thread so far, drawing included
        self.elapsed_seconds = 0.0
        self._totals: dict[str, tuple[float, float, int, float]] = {}  # by field: least, sum, count, most
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
        """Stop the thread, wait for its end, and leave the picture that stays.

        Raises:
            RuntimeError: the thread does not end.
            Exception: what went wrong in the thread, once.
        """
        display, self._display = self._display, None
        try:
            self._end()
            if display:
                png, words = plots.png(self.picture()), self.description()
                # PNG too, for the report and for viewers that strip HTML.
                bundle = {"text/html": plots.image_html(png, words), "image/png": png, "text/plain": words}
                display.update(bundle, raw=True)
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
        for field, (label, unit) in self.figures.items():
            least, total, count, most = self._totals.get(field, (None, None, 1, None))
            mean = None if total is None else total / count
            rows.append([label, *(system_stats.figure_text(value, unit) for value in (least, mean, most))])
        where = f"{self.name}: {self.count} samples in {seconds_text(self.elapsed_seconds)}"
        held = ", ".join(f"{reason} in {n / self.count:.0%}" for reason, n in self._reasons.most_common())
        return plots.Table(["figure", "min", "mean", "max"], rows, where + (f"; clocks: {held}" if held else ""))

    def panels(self) -> list[svg_drawings.Panel]:
        """What is drawn: memory, and utilisation, over the latest samples."""
        span = self.samples[0].time_seconds, self.samples[-1].time_seconds + 0.01
        panels = []
        for title, fields in self._fields.items():
            most = max(getattr(sample, field) or 0 for sample in self.samples for field in fields)
            unit = self.figures[fields[0]][1]
            scale, unit = bytes_unit(most or 1e6) if unit == "B" else (1, unit)
            lines = {}
            for field in fields:
                values = [(sample.time_seconds, getattr(sample, field)) for sample in self.samples]
                if points := [(seconds, value / scale) for seconds, value in values if value is not None]:
                    lines[self.figures[field][0]] = points
            panels.append(svg_drawings.Panel(title, unit, lines, span))
        return panels

    def picture(self) -> "Figure":
        """The panels as a matplotlib figure, the one that stays."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 2.6), dpi=110, layout="constrained")
        for ax, panel in zip(figure.subplots(1, 2), self.panels(), strict=True):
            styles = zip(panel.lines.items(), svg_drawings.DASHES, plots.SERIES, strict=False)
            for (label, points), dashes, colour in styles:
                ax.plot(*zip(*points, strict=True), linestyle=(0, dashes) if dashes else "-", color=colour, label=label)
            if len(panel.lines) > 1:
                ax.legend(frameon=False, fontsize=9)
            if not panel.lines:
                ax.text(0.5, 0.5, "not available", ha="center", transform=ax.transAxes)
            ax.set(xlabel="time (s)", xlim=panel.span, ylim=(0, panel.top))
            ax.set_title(panel.heading, loc="left", fontsize=11)
            ax.spines[["top", "right"]].set_visible(False)
        return figure

    def live_html(self) -> str:
        """The panels as SVG, and the latest of all other figures in words."""
        latest, shown = self.samples[-1], {field for fields in self._fields.values() for field in fields}
        now = [
            f"{label} {system_stats.figure_text(getattr(latest, field), unit)}"
            for field, (label, unit) in self.figures.items()
            if field not in shown and getattr(latest, field) is not None
        ]
        if latest.clock_reasons:
            now.append(f"clocks: {', '.join(latest.clock_reasons)}")
        pictures = "".join(map(svg_drawings.panel, self.panels()))
        return (
            f"<div style='display:flex;flex-wrap:wrap;gap:8px'>{pictures}</div>"
            f"<div style='font-size:13px;line-height:1.4'>{html.escape(' · '.join([self.name, *now]))}</div>"
        )

    def description(self) -> str:
        """The picture that stays, in words."""
        rows = [row for row in self.summary().rows if "not measured" not in row]
        parts = "; ".join(f"{label} {least} to {most}" for label, least, _, most in rows)
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
            with system_stats.reader(self.gpu) as read:
                start, last = time.monotonic(), False
                while not last:
                    last = self._stop.is_set()
                    self._add(system_stats.Sample(time.monotonic() - start, **read()))
                    self.cpu_seconds, self.elapsed_seconds = time.thread_time(), time.monotonic() - start
                    self._stop.wait(max(self.interval_seconds, self.cpu_seconds / SHARE - self.elapsed_seconds))
        except Exception as error:
            self._error = error

    def _add(self, sample: system_stats.Sample) -> None:
        for field in self.figures:
            if (value := getattr(sample, field)) is not None:
                least, total, count, most = self._totals.get(field, (value, 0, 0, value))
                self._totals[field] = (min(least, value), total + value, count + 1, max(most, value))
        self._reasons.update(sample.clock_reasons or ())
        self.count += 1
        self.samples = (*self.samples, sample)[-self.history :]
        if self._widget and sample.time_seconds - self._drawn_seconds >= REDRAW_SECONDS and not self._stop.is_set():
            self._drawn_seconds = sample.time_seconds
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


def _failure(error: Exception) -> dict[str, str]:
    """What stands in the picture's place where there is none."""
    message = f"The monitor stopped: {type(error).__name__}: {error}"
    return {"text/plain": message, "text/html": f"<pre>{html.escape(message)}</pre>"}
