"""What one look at the machine tells: the GPU's figures from NVML, or those of the CPU and the memory from psutil.

A figure that the machine does not tell is None, never 0.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from perf_helpers.lab import hardware
from perf_helpers.texts import bytes_text, number_text

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

# The fields of `Sample` that a GPU tells, and those that a host tells, each with its label and its unit.
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


def figure_text(value: float | None, unit: str) -> str:
    """A figure as it is shown: in two digits or whole, for more would flicker."""
    return bytes_text(value) if unit == "B" else number_text(value, unit, digits=2)


def reasons(bitmask: int) -> list[str]:
    """NVML's reasons for the present clocks in words; empty where nothing holds them back."""
    set_bits = [bit for bit in range(bitmask.bit_length()) if bitmask >> bit & 1]
    return [REASONS[bit] if bit < len(REASONS) else f"unknown reason {1 << bit:#x}" for bit in set_bits]


@contextmanager
def reader(gpu: hardware.Gpu | None) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yield a function that reads the fields of one sample, but its time, from a GPU; None: from the host."""
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
    """The CPU's and the memory's figures, each query guarded."""

    def __init__(self):
        self._process = psutil.Process()
        self._limited = hardware.cgroup_limits()[1] is not None
        self._busy = None  # (busy, all) seconds of the cores at the sample before

    def read(self) -> dict[str, Any]:
        read, queries = {}, {"cpu_percent": self._cpu_percent, "memory_available_bytes": self._available}
        queries |= {"own_rss_bytes": lambda: self._process.memory_info().rss, "children_rss_bytes": self._children}
        for name, query in queries.items():
            read[name] = None
            with suppress(psutil.Error, OSError):
                read[name] = query()
        return read

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
        total = 0
        for child in self._process.children(recursive=True):
            with suppress(psutil.Error, OSError):  # it has ended meanwhile
                total += child.memory_info().rss
        return total
