"""The thread that samples this machine, and what it keeps. `monitor` shows it.

It keeps itself under one percent of one core: a sample that costs more makes the next one wait.
"""

import atexit
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

from perf_helpers import plots
from perf_helpers.lab import hardware
from perf_helpers.texts import seconds_text
from perf_helpers.widgets import readings
from perf_helpers.widgets.frame import PLACES

SHARE = 0.006  # of one core's time that the thread may take
CLOSE_SECONDS = 20  # a broken driver can hold a query for ever; the cell must end
_PLACE = "sampler"  # there is one at most


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
        self.figures = readings.GPU_FIGURES if self.gpu else readings.HOST_FIGURES  # label and unit of each field read
        self.interval_seconds, self.history = interval_seconds, history
        self.samples: tuple[readings.Sample, ...] = ()  # the latest; replaced as a whole: readers need no lock
        self.count = 0  # of all samples
        self.cpu_seconds = 0.0  # processor time of the thread so far, drawing included
        self.elapsed_seconds = 0.0
        self._totals: dict[str, tuple[float, float, int, float]] = {}  # by field: least, sum, count, most
        self._reasons: Counter[str] = Counter()  # in how many samples each reason held the clocks
        self._error: Exception | None = None  # what ended the thread
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="perf_helpers monitor", daemon=True)
        self._cell_events = getattr(shell(), "events", None)  # they tell when a cell has ended
        PLACES.free(_PLACE)  # before this one is shown, so that the first one's picture comes first
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
        for field, (label, unit) in self.figures.items():
            least, total, count, most = self._totals.get(field, (None, None, 1, None))
            mean = None if total is None else total / count
            rows.append([label, *(readings.figure_text(value, unit) for value in (least, mean, most))])
        where = f"{self.name}: {self.count} samples in {seconds_text(self.elapsed_seconds)}"
        held = ", ".join(f"{reason} in {n / self.count:.0%}" for reason, n in self._reasons.most_common())
        return plots.Table(["figure", "min", "mean", "max"], rows, where + (f"; clocks: {held}" if held else ""))

    def _show(self) -> None:
        """Called before the thread starts. A sampler shows nothing: `monitor.Monitor` does."""

    def _work(self) -> None:
        """The thread: one sample at once, one at the end, and those between."""
        try:
            with readings.reader(self.gpu) as read:
                start, last = time.monotonic(), False
                while not last:
                    last = self._stop.is_set()
                    self._add(readings.Sample(time.monotonic() - start, **read()))
                    self.cpu_seconds, self.elapsed_seconds = time.thread_time(), time.monotonic() - start
                    self._stop.wait(max(self.interval_seconds, self.cpu_seconds / SHARE - self.elapsed_seconds))
        except Exception as error:
            self._error = error

    def _add(self, sample: readings.Sample) -> None:
        for field in self.figures:
            if (value := getattr(sample, field)) is not None:
                least, total, count, most = self._totals.get(field, (value, 0, 0, value))
                self._totals[field] = (min(least, value), total + value, count + 1, max(most, value))
        self._reasons.update(sample.clock_reasons or ())
        self.count += 1
        self.samples = (*self.samples, sample)[-self.history :]

    def _cell_ended(self, *_) -> None:
        self.close()

    def _forget_cell(self) -> None:
        if self._cell_events:
            with suppress(ValueError):  # it is not registered any more
                self._cell_events.unregister("post_run_cell", self._cell_ended)


atexit.register(PLACES.free, _PLACE)


def shell():
    """IPython's shell, where this process is one."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None
