"""The GPU, the figures and the threads that the tests of the monitor have in common."""

import threading
from types import SimpleNamespace

from machines import GOOD

GPU = GOOD.gpus[0]
FIGURES = {  # by query to NVML: the figure, what NVML answers, and what is read from it
    "nvmlDeviceGetUtilizationRates": ("GPU utilization", SimpleNamespace(gpu=87), 87),
    "nvmlDeviceGetPowerUsage": ("power", 412_500, 412.5),
    "nvmlDeviceGetClockInfo": ("clock of the cores", 1980, 1980),
}


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "perf_helpers monitor"]
