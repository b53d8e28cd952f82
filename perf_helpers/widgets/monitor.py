"""A live monitor: what the GPU does while a cell runs (NVML), or the CPU and memory where there is no GPU.

The live picture is an SVG of a few lines, for matplotlib takes a hundred times as long. It draws only the picture that
stays when the cell has ended. What both show, and in which units, is said once: `Monitor.panels`.
"""

import html
from typing import TYPE_CHECKING

from perf_helpers import plots
from perf_helpers.texts import bytes_unit, seconds_text
from perf_helpers.widgets import drawings, readings
from perf_helpers.widgets.frame import view
from perf_helpers.widgets.sampler import Sampler, shell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REDRAW_SECONDS = 0.5
GPU_PANELS = {"device memory used": ("device_used_bytes",), "GPU utilisation": ("gpu_percent",)}
HOST_PANELS = {
    "resident memory": ("own_rss_bytes", "children_rss_bytes"),
    "CPU utilisation, all cores": ("cpu_percent",),
}


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

    _widget = None  # of the live picture, in a notebook
    _display = None  # the handle of the output in which the pictures stand
    _drawn_seconds = float("-inf")  # when the live picture was drawn last, since the sampler started

    def panels(self) -> list[drawings.Panel]:
        """What is drawn: memory, and utilisation, over the latest samples."""
        span = self.samples[0].time_seconds, self.samples[-1].time_seconds + 0.01
        panels = []
        for title, fields in self._fields().items():
            most = max(getattr(sample, field) or 0 for sample in self.samples for field in fields)
            unit = self.figures[fields[0]][1]
            scale, unit = bytes_unit(most or 1e6) if unit == "B" else (1, unit)
            lines = {}
            for field in fields:
                values = [(sample.time_seconds, getattr(sample, field)) for sample in self.samples]
                if points := [(seconds, value / scale) for seconds, value in values if value is not None]:
                    lines[self.figures[field][0]] = points
            panels.append(drawings.Panel(title, unit, lines, span))
        return panels

    def picture(self) -> "Figure":
        """The panels as a matplotlib figure, the one that stays."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 2.6), dpi=110, layout="constrained")
        for ax, panel in zip(figure.subplots(1, 2), self.panels(), strict=True):
            styles = zip(panel.lines.items(), drawings.DASHES, plots.SERIES, strict=False)
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
        latest, shown = self.samples[-1], {field for fields in self._fields().values() for field in fields}
        now = [
            f"{label} {readings.figure_text(getattr(latest, field), unit)}"
            for field, (label, unit) in self.figures.items()
            if field not in shown and getattr(latest, field) is not None
        ]
        if latest.clock_reasons:
            now.append(f"clocks: {', '.join(latest.clock_reasons)}")
        pictures = "".join(map(drawings.panel, self.panels()))
        return (
            f"<div style='display:flex;flex-wrap:wrap;gap:8px'>{pictures}</div>"
            f"<div style='font-size:13px;line-height:1.4'>{html.escape(' · '.join([self.name, *now]))}</div>"
        )

    def description(self) -> str:
        """The picture that stays, in words."""
        rows = [row for row in self.summary().rows if "not measured" not in row]
        parts = "; ".join(f"{label} {least} to {most}" for label, least, _, most in rows)
        return f"{self.name} during {seconds_text(self.elapsed_seconds)}: {parts}"

    def close(self) -> None:
        display, self._display = self._display, None
        try:
            super().close()
            if display:
                png, words = plots.png(self.picture()), self.description()
                # PNG too, for the report and for viewers that strip HTML.
                bundle = {"text/html": plots.image_html(png, words), "image/png": png, "text/plain": words}
                display.update(bundle, raw=True)
        except Exception as error:
            if display:
                display.update({"text/plain": _message(error), "text/html": _message_html(error)}, raw=True)
            raise
        finally:
            if self._widget:
                self._widget.close()

    def _fields(self) -> dict[str, tuple[str, ...]]:
        """The fields of a sample that each panel draws, by its title."""
        return GPU_PANELS if self.gpu else HOST_PANELS

    def _show(self) -> None:
        if getattr(shell(), "kernel", None):
            import ipywidgets
            from IPython.display import display

            self._widget = ipywidgets.HTML("The monitor starts ...")
            # Not display(widget): ipywidgets 7 then publishes it itself, without the id by which it is replaced.
            self._display = display({"text/plain": "the live monitor"} | view(self._widget), raw=True, display_id=True)

    def _add(self, sample: readings.Sample) -> None:
        super()._add(sample)
        if self._widget and sample.time_seconds - self._drawn_seconds >= REDRAW_SECONDS and not self._stop.is_set():
            self._drawn_seconds = sample.time_seconds
            try:
                self._widget.value = self.live_html()
            except Exception as error:
                self._widget.value = _message_html(error)
                raise


def _message(error: Exception) -> str:
    return f"The monitor stopped: {type(error).__name__}: {error}"


def _message_html(error: Exception) -> str:
    return f"<pre>{html.escape(_message(error))}</pre>"
