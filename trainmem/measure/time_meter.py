"""Time each optimizer step through torch's global hooks, so that the measured code needs no measuring code.

The time meter never runs at the same time as the memory meter.
"""

import functools
import statistics
import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainmem.records import Timing

_timed: dict[int, "TimeMeter"] = {}  # active meters by thread


class TimeMeter:
    """Time each optimizer step that runs in `with TimeMeter() as meter`; `meter.result` returns the times.

    The time of a step includes its work on the device. On CUDA the clock is the device's own events, so measuring does
    not synchronize the steps.

    Args:
        warmup_steps: steps left out at the start; at least 1, because the meter does not see the first step begin.
        on_step: called after each step with its number, outside of the timed interval. It may block, so that another
            experiment runs before the next step. None: not called.
    """

    def __init__(self, warmup_steps: int = 1, on_step: Callable[[int], None] | None = None):
        self.warmup_steps = max(1, warmup_steps)
        self.on_step = on_step
        self._steps: list[tuple[tuple, tuple]] = []  # readings of three clocks at the begin and the end of each step
        self._begin: tuple | None = None
        self._optimizer = None
        self._seen = 0

    def __enter__(self):
        if not _timed:  # interleaved experiments share one hook: torch iterates over its hooks while others start
            TimeMeter._hook = register_optimizer_step_post_hook(TimeMeter._after_step)
            TimeMeter._scaled = torch.amp.GradScaler.step
            torch.amp.GradScaler.step = _also_skipped(TimeMeter._scaled)
        _timed[threading.get_ident()] = self
        return self

    def __exit__(self, *_):
        del _timed[threading.get_ident()]
        if not _timed:
            TimeMeter._hook.remove()
            torch.amp.GradScaler.step = TimeMeter._scaled

    @staticmethod
    def _after_step(optimizer, *_):
        if meter := _timed.get(threading.get_ident()):
            # A loop may step several optimizers: the first one seen is the one that counts steps.
            meter._optimizer = meter._optimizer or weakref.ref(optimizer)
            if meter._optimizer() is optimizer:
                meter.stepped()

    def stepped(self) -> None:
        """Record the end of a step; called by the hook on optimizers, and in inference after each forward pass."""
        end = _now(), time.process_time(), _waited()
        if self._begin:
            self._steps.append((self._begin, end))
        self._seen += 1
        if self.on_step:
            self.on_step(self._seen)
        waited = _waited()  # read first: reading it takes time, which belongs to no step
        self._begin = _now(), time.process_time(), waited

    def result(self, samples_per_step: int | None = None) -> Timing | None:
        """Return the `Timing` of the steps after the warm-up; None if not one such step has ended.

        The `Timing` has the median and the spread of the steps' seconds, and the seconds of each step.

        `samples_per_step`: samples per step over all processes, for samples per second; None: not known.
        """
        steps = self._steps[self.warmup_steps - 1 :]
        if not steps:
            return None
        seconds = tuple(_elapsed(begin, end) for (begin, _, _), (end, _, _) in steps)
        median = statistics.median(seconds)
        quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (median,) * 3
        return Timing(
            step_seconds=median,
            spread_seconds=quartiles[2] - quartiles[0],
            steps=len(seconds),
            warmup_steps=self.warmup_steps,
            samples_per_second=samples_per_step / median if samples_per_step else None,
            all_seconds=seconds,
            all_cpu_seconds=tuple(end - begin for (_, begin, _), (_, end, _) in steps),
            all_waited_seconds=tuple(end - begin for (_, _, begin), (_, _, end) in steps if end is not None),
        )


def _also_skipped(step: Callable) -> Callable:
    """Wrap `step`, which is `GradScaler.step`, so that the meter also counts the steps that the scaler skips."""

    @functools.wraps(step)
    def reporting(scaler, optimizer, *arguments, **options):
        meter = _timed.get(threading.get_ident())
        seen = meter and meter._seen
        returned = step(scaler, optimizer, *arguments, **options)
        if meter and meter._seen == seen:  # gradients overflowed: the optimizer did not run, nor did its hooks
            TimeMeter._after_step(optimizer)
        return returned

    return reporting


def _now():
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _waited() -> float | None:
    """Return the seconds in which this thread was ready to run but had no core; None if they are not counted."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9  # counted by Linux's scheduler from the thread's start
    except (OSError, ValueError, IndexError):
        return None


def _elapsed(begin, end) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin if isinstance(begin, float) and isinstance(end, float) else float("nan")
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
