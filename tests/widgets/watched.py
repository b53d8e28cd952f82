"""What the tests of readings and monitor share."""

import threading
from types import SimpleNamespace

from machines import GOOD

GPU = GOOD.gpus[0]
FIGURES = {  # by query to NVML: the field, what NVML answers, and what is read from it
    "nvmlDeviceGetUtilizationRates": ("gpu_percent", SimpleNamespace(gpu=87), 87),
    "nvmlDeviceGetPowerUsage": ("power_watts", 412_500, 412.5),
    "nvmlDeviceGetTemperature": ("temperature_celsius", 61, 61),
    "nvmlDeviceGetCurrentClocksEventReasons": ("clock_reasons", 0x4, ("power limit (software)",)),
}


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "perf_helpers monitor"]
