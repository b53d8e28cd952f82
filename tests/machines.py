"""Machines for tests, an NVML for their GPUs, a task that takes no time, and the result of a run of this task."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

from trainmem.core.hardware import PACKAGES, Gpu, Machine
from trainmem.core.task import Task
from trainmem.records import CATEGORIES, Memory, Run, Timing

TINY = Task("bert-tiny", seq_len=16, dataset_size=64)
RUN = Run(
    name="vanilla",
    status="ok",
    arguments={"bf16": True},
    memory=Memory(peak_bytes=10, kind="counted", breakdown=dict.fromkeys(CATEGORIES, 1), phases={"step": 3}),
    timing=Timing(0.5, 0.1, 2, 1, 8.0, (0.4, 0.6)),
    losses=(1.0, 0.5),
    value=[1, 2],
)

T4 = Gpu(0, "GPU-aaaa", "Tesla T4", 16_000_000_000, (7, 5), "580.1", 15_000_000_000)
H200 = Gpu(1, "GPU-bbbb", "NVIDIA H200", 150_000_000_000, (9, 0), "580.1", 147_000_000_000)
GOOD = Machine(
    name="NVIDIA H200",
    kind="cuda",
    cpu_model="AMD EPYC",
    cpu_cores=8,
    machine_cores=8,
    cpu_features=("avx2",),
    memory_bytes=64_000_000_000,
    memory_available_bytes=60_000_000_000,
    shm_bytes=8_000_000_000,
    gpus=(replace(H200, index=0),),
    torch_build="2.13.0+cu130",
)
PLAIN = replace(GOOD, name="AMD EPYC, 8 cores", kind="cpu", gpus=(), cuda_reason="this machine has no NVIDIA GPU")

INSTALLED = dict.fromkeys(PACKAGES, "1.0")


def fake_nvml(*gpus, refuse=(), init_error=None, slices=()):
    """Return a stub of pynvml for some GPUs, given as `hardware.Gpu`.

    Args:
        refuse: names of queries that raise.
        init_error: message with which nvmlInit raises; None: it succeeds.
        slices: MIG slices, which are found by their UUIDs but are not counted.
    """
    module = ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    by_uuid = {gpu.uuid: gpu for gpu in (*gpus, *slices)}

    def memory(gpu):
        used = gpu.memory_bytes - gpu.free_bytes
        return SimpleNamespace(total=gpu.memory_bytes, free=gpu.free_bytes, used=used)

    def start():
        if init_error:
            raise module.NVMLError(init_error)

    answers = {
        "nvmlInit": start,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"580.1",  # old bindings answer in bytes
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByUUID": lambda uuid: by_uuid[uuid],
        "nvmlDeviceGetMemoryInfo": memory,
    }

    def refused(*_):
        raise module.NVMLError("Not Supported")

    for name, answer in answers.items():
        setattr(module, name, refused if name in refuse else answer)
    return module
