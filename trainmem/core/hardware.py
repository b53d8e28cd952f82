"""This machine's GPUs, CPU, limits and packages, found without importing torch or creating a CUDA context.

A child process queries the CUDA driver for the GPUs: in CUDA's order, and only the GPUs that CUDA_VISIBLE_DEVICES
shows. NVML adds the bytes that are free and in use, by UUID; each query of NVML may fail alone, because MIG, vGPU, WSL
and unified memory refuse some queries. Unknown values are None.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from trainmem.records import Record

ROOT = Path("/")  # parent of /proc, /sys and /dev
# Features that a claim may need of a machine, see `supports`.
FEATURES = ("any", "cuda", "sm80", "gpus2", "text")
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "bitsandbytes", "numpy")
PACKAGES += ("papermill", "ipywidgets", "jupyterlab")
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "bf16", "asimdhp")
CPU_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}
CPU_FP16 = {"avx512_fp16", "amx_fp16", "asimdhp"}
HELD_BY = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")  # variables that limit instructions
SYSCTL = {"avx2_0": "avx2", "avx512f": "avx512f", "arm.FEAT_BF16": "bf16", "arm.FEAT_FP16": "asimdhp"}
ARM_CORES = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}
# pynvml.nvmlMemory_v2: since driver R510 only this call's `used` excludes the driver's reserve, as all did before.
_MEMORY_V2 = 0x02000028

# Run in a process of its own: after cuInit a process can no longer fork children that use CUDA.
DRIVER_SCRIPT = """
import ctypes, json, sys, uuid
cuda, number, text, rows = ctypes.CDLL(sys.argv[1]), ctypes.c_int(), ctypes.c_char_p(), []
def call(name, *arguments):
    if code := getattr(cuda, name)(*arguments):
        cuda.cuGetErrorString(code, ctypes.byref(text))
        sys.exit(f"{(text.value or b'unknown error').decode()} ({name}: {code})")
    return number.value
call("cuInit", 0)
for index in range(call("cuDeviceGetCount", ctypes.byref(number))):
    name, key, total = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()
    device = call("cuDeviceGet", ctypes.byref(number), index)
    call("cuDeviceGetName", name, 256, device)
    call("cuDeviceGetUuid_v2" if hasattr(cuda, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid", key, device)
    call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
    capability = [call("cuDeviceGetAttribute", ctypes.byref(number), which, device) for which in (75, 76)]
    rows.append(dict(index=index, uuid=f"GPU-{uuid.UUID(bytes=bytes(key))}", name=name.value.decode(),
                     memory_bytes=total.value, capability=capability))
print(json.dumps(rows))
"""


@dataclass(frozen=True, slots=True)
class Gpu(Record):
    """Hold a GPU that CUDA shows: index, name, memory in bytes and compute capability, from the driver and NVML."""

    index: int  # in CUDA's order
    uuid: str | None = None  # "GPU-...", or "MIG-..." for a MIG slice
    name: str | None = None
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None  # compute capability: (9, 0) for an H100
    driver: str | None = None  # version
    free_bytes: int | None = None  # at the time of the query


@dataclass(frozen=True, slots=True)
class Machine(Record):
    """Hold a machine as this process may use it: CPU, GPUs, memory in bytes.

    A container's limits and CUDA_VISIBLE_DEVICES are taken into account.
    """

    name: str  # e.g. "AMD EPYC, 2 cores", "NVIDIA H200"
    kind: str  # "cuda" if experiments run on a GPU, else "cpu"
    system: str | None = None  # operating system, its release, the architecture
    python: str | None = None  # version
    cpu_model: str | None = None  # "AMD EPYC"
    cpu_cores: int | None = None  # usable ones, by affinity and cgroup quota
    cpu_features: tuple[str, ...] | None = None  # None: unknown
    memory_bytes: int | None = None  # of the machine, or the cgroup's limit if that is smaller
    memory_available_bytes: int | None = None  # at the time of the query
    shm_bytes: int | None = None  # free in /dev/shm
    gpus: tuple[Gpu, ...] = ()  # including those that this torch cannot use
    cuda_reason: str | None = None  # why there is no CUDA
    nvml_reason: str | None = None  # why NVML reports nothing
    cuda_visible_devices: str | None = None  # the variable
    torch_build: str | None = None  # version with its build: "2.13.0+cpu"
    cpu_quota: float | None = None  # CPU time that a cgroup allows, in cores
    machine_cores: int | None = None  # all cores, usable or not
    visible_reason: str | None = None  # what CUDA_VISIBLE_DEVICES hides, and why
    rehearsed: bool = False  # the GPU is a stub that computes nothing, see trainmem.rehearsal
    held_to: str | None = None  # limit on CPU instructions that the environment sets for libraries, e.g. "AVX512_CORE"

    @property
    def slug(self) -> str:
        """The machine's name as a folder's name: "amd-epyc-2-cores"."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "machine"

    @property
    def native_bf16(self) -> bool | None:
        """Whether the device has instructions for bf16 (emulation does not count); None: unknown.

        On a CPU, True does not mean that bf16 is fast: `roofline.products` measures its speed.
        """
        if self.kind == "cuda":
            return None if self.gpus[0].capability is None else self.gpus[0].capability >= (8, 0)
        return None if self.cpu_features is None else not CPU_BF16.isdisjoint(self.cpu_features)


def describe() -> Machine:
    """Describe this machine as it is now."""
    model, features = read_cpu()
    memory, (limit, left, quota) = psutil.virtual_memory(), cgroup_limits()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min(cores, max(1, int(quota or cores)))
    build, built_with_cuda = torch_build()
    gpus, nvml_reason, visible_reason, reason = find_gpus()
    if gpus and not built_with_cuda:
        reason = f"torch {build} is built without CUDA" if build else "torch is not installed"
    kind = "cpu" if reason else "cuda"
    names = Counter(gpu.name or "NVIDIA GPU" for gpu in gpus)
    name = " + ".join(f"{count} x {each}" if count > 1 else each for each, count in names.items())
    held_to = " and ".join(dict.fromkeys(os.environ[name] for name in HELD_BY if os.environ.get(name))) or None
    if reason:
        name = f"{model or platform.machine() or 'CPU'}, {cores} core{'s' * (cores > 1)}"
        name += f", held to {held_to}" if held_to else ""
    return Machine(
        name=name,
        kind=kind,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cpu_model=model,
        cpu_cores=cores,
        cpu_features=features,
        memory_bytes=least(memory.total, limit),
        memory_available_bytes=least(memory.available, left),
        shm_bytes=shutil.disk_usage(ROOT / "dev/shm").free if (ROOT / "dev/shm").is_dir() else None,
        gpus=gpus,
        cuda_reason=reason,
        nvml_reason=nvml_reason,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        torch_build=build,
        cpu_quota=quota,
        machine_cores=os.cpu_count(),
        visible_reason=visible_reason,
        rehearsed=is_rehearsal(),
        held_to=held_to,
    )


this_machine = functools.cache(describe)


def is_rehearsal() -> bool:
    """Return whether this process runs in a rehearsal, a dry run on a stub CUDA runtime (`trainmem.rehearsal`)."""
    return "REHEARSAL_CAPABILITY" in os.environ


def cache_folder() -> Path:
    """Return the folder for the user's files: $PERF_HELPERS_HOME, otherwise a folder in the user's cache folder."""
    home = os.environ.get("PERF_HELPERS_HOME")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "perf_helpers"


def versions() -> dict[str, str | None]:
    """Return {package: installed version} of the packages that decide results (`PACKAGES`), and of Python itself.

    The versions are read from metadata, without importing the packages. None: the package is not installed.
    """
    return {"python": platform.python_version()} | {package: version_of(package) for package in PACKAGES}


def version_of(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)


def supports(feature: str, machine: Machine | None = None) -> tuple[bool, str]:
    """Return (whether a machine has a feature, a text that says what is missing).

    The text is empty if nothing is missing. Each claim of the course names the feature that it needs.

    Args:
        feature: one of `FEATURES`, e.g. "cuda".
        machine: the machine; None: this one.

    Raises:
        ValueError: a feature that is not in `FEATURES`.
    """
    machine = machine or this_machine()
    cuda, no_cuda = machine.kind == "cuda", "needs an NVIDIA GPU"
    if not cuda and (machine.gpus or machine.visible_reason):
        no_cuda += f" ({machine.cuda_reason})"
    capability = machine.gpus[0].capability if cuda else None
    this = "this is {}.{}".format(*capability) if capability else "this one's is unknown"
    old = f"needs compute capability 8.0 or more, {this}" if cuda else no_cuda
    needs = {
        "any": (True, ""),
        "cuda": (cuda, no_cuda),
        "sm80": (bool(cuda and machine.native_bf16), old),
        "gpus2": (cuda and len(machine.gpus) > 1, "needs two GPUs, this machine shows one" if cuda else no_cuda),
        "text": (False, "nothing to measure: explained and sourced"),
    }
    if feature not in FEATURES:
        raise ValueError(f"feature={feature!r} is unknown: choose one of {', '.join(FEATURES)}")
    met, missing = needs[feature]
    return met, "" if met else missing


def device_used_bytes(gpu_index: int = 0) -> int | None:
    """Return the bytes in use on CUDA's GPU `gpu_index` by all processes, contexts included, as nvidia-smi shows them.

    NVML reports the bytes. Without NVML, CUDA reports them, but only if this process already uses CUDA: this function
    never starts CUDA. None: neither reports the bytes.
    """
    gpus, _ = ask_driver(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
    if gpu_index < len(gpus or ()):
        with nvml() as (ask, _):
            _, handle = _in_nvml(gpus[gpu_index], ask)
            memory = ask("nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2) or ask("nvmlDeviceGetMemoryInfo", handle)
        if memory:
            return memory.used
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized() and gpu_index < torch.cuda.device_count():
        free, total = torch.cuda.mem_get_info(gpu_index)
        return total - free
    return None


# GPUs ----------------------------------------------------------------------------------------------------------------


def find_gpus() -> tuple[tuple[Gpu, ...], str | None, str | None, str | None]:
    """Find the GPUs that CUDA shows.

    Returns:
        (the GPUs, why NVML reports nothing, what CUDA_VISIBLE_DEVICES hides, why there is no GPU); each text is None if
            it does not apply.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed, driver_reason = ask_driver(value, os.environ.get("CUDA_DEVICE_ORDER"))
    with nvml() as (ask, nvml_reason):
        count, version = ask("nvmlDeviceGetCount"), ask("nvmlSystemGetDriverVersion")
        gpus = ()
        for gpu in listed or ():
            uuid, handle = _in_nvml(gpu, ask)
            memory = handle and ask("nvmlDeviceGetMemoryInfo", handle)
            gpus += (replace(gpu, uuid=uuid, driver=version, free_bytes=memory and memory.free),)
    visible_reason = hidden(value, len(gpus)) if gpus or (count and listed is not None) else None
    if gpus:
        return gpus, nvml_reason, visible_reason, None
    if count:
        missing = f"NVML counts {count} GPU(s), but the CUDA driver's library is missing"
    elif not nvml_reason:
        missing = "this machine has no NVIDIA GPU"
    elif (ROOT / "proc/driver/nvidia/version").exists():
        missing = f"the host has an NVIDIA driver, but no GPU was given to this container ({nvml_reason})"
    else:
        found = "was found" if "Not Found" in nvml_reason or "installed" in nvml_reason else "works"
        missing = f"no NVIDIA driver {found} ({nvml_reason})"
    if driver_reason and value is not None:
        driver_reason += f" (CUDA_VISIBLE_DEVICES={value!r})"
    return (), nvml_reason, visible_reason, visible_reason or driver_reason or missing


def _in_nvml(gpu: Gpu, ask) -> tuple[str, Any]:
    """Return (UUID, NVML handle) of a GPU; the handle is None if NVML does not know the GPU.

    `ask`: the function that queries NVML, as yielded by `nvml`.
    """
    for uuid in (gpu.uuid, f"MIG-{gpu.uuid[4:]}"):  # CUDA shows a MIG slice as a GPU
        if handle := ask("nvmlDeviceGetHandleByUUID", uuid):
            return uuid, handle
    return gpu.uuid, None


def hidden(value: str | None, shown: int) -> str | None:
    """Return a text that names the entry at which CUDA stops reading CUDA_VISIBLE_DEVICES, and how many GPUs are left.

    Return None if the variable is not set, or if CUDA shows a GPU for each entry. The first invalid entry ends the
    list; a repeated entry hides all GPUs (CUDA Programming Guide, environment variables). GPUs that the variable does
    not list are not reported.

    Args:
        value: value of CUDA_VISIBLE_DEVICES; None: it is not set.
        shown: number of GPUs that CUDA shows under this value.
    """
    entries = (value or "").split(",")
    if value is None or shown >= len(entries):
        return None
    if not value.strip():
        return "CUDA_VISIBLE_DEVICES is set but empty, which hides every GPU"
    end = f"only the {shown} before it can be used" if shown else "every GPU is hidden"
    why = f"{entries[shown]!r} is not a GPU of this machine, or a GPU is named twice"
    return f"CUDA_VISIBLE_DEVICES={value!r}: {why}, so {end}"


@contextmanager
def nvml():
    """Yield (function that queries NVML, why NVML is not available); NVML is shut down at the end of this context.

    The function takes the name of one of pynvml's functions and its arguments, and returns the answer, or None if the
    query fails. Without NVML the function always returns None; with NVML the reason is None.
    """
    try:
        import pynvml  # of the package nvidia-ml-py

        pynvml.nvmlInit()
    except Exception as error:
        absent = isinstance(error, ImportError)
        yield (lambda *_: None), ("nvidia-ml-py is not installed" if absent else str(error).rstrip("."))
        return

    def ask(query: str, *arguments):
        try:
            answer = getattr(pynvml, query)(*arguments)
        except Exception:  # not only NVMLError: old bindings lack functions and broken drivers return nonsense
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    try:
        yield ask, None
    finally:
        ask("nvmlShutdown")


@functools.cache
def ask_driver(visible: str | None, order: str | None) -> tuple[list[Gpu] | None, str | None]:
    """Return (the GPUs in CUDA's order, why the CUDA driver failed).

    The reason is None if the driver did not fail. If it failed, there are no GPUs: []. Without a CUDA driver both are
    None. `visible` and `order` are the values of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
    """
    library = "libcuda.so.1"
    try:
        ctypes.CDLL(library)
        command = [sys.executable, "-I", "-S", "-c", DRIVER_SCRIPT, library]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError:
        return None, None
    except subprocess.TimeoutExpired:
        return [], "the CUDA driver gave no answer in 60 s"
    if done.returncode:
        return [], f"the CUDA driver reports: {(done.stderr.strip() or str(done.returncode)).splitlines()[-1]}"
    return [Gpu.from_dict(row) for row in json.loads(done.stdout)], None


def torch_build() -> tuple[str | None, bool]:
    """Return (torch's version, e.g. "2.13.0+cpu", whether it is built with CUDA), read without importing torch.

    (None, False): torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    file = spec and spec.origin and Path(spec.origin).with_name("version.py")
    if not file or not file.exists():  # a user's own file torch.py has no version.py beside it
        return None, False
    build = runpy.run_path(str(file))
    return build["__version__"], bool(build.get("cuda"))


# The CPU and its limits ----------------------------------------------------------------------------------------------


def read_cpu() -> tuple[str | None, tuple[str, ...] | None]:
    """Return (the CPU's short name, the features in `CPU_FEATURES` that it has); each is None if unknown."""
    if sys.platform == "darwin":
        command = ["sysctl", "machdep.cpu.brand_string", "hw.optional"]
        return parse_cpu(subprocess.run(command, capture_output=True, text=True).stdout)
    return parse_cpu(read(ROOT / "proc/cpuinfo"))


def parse_cpu(text: str) -> tuple[str | None, tuple[str, ...] | None]:
    """Return (the CPU's short name, the features in `CPU_FEATURES` that it has); each is None if `text` lacks it.

    `text`: the content of /proc/cpuinfo on x86 or Arm, or the output of macOS's sysctl. On Arm the text may have a part
    number instead of a name: `ARM_CORES` translates it.
    """
    facts: dict[str, str] = {}
    for key, _, value in (line.partition(":") for line in text.splitlines()):
        facts.setdefault(key.strip().removeprefix("hw.optional."), value.strip())
    arm = ARM_CORES.get(facts.get("CPU part", ""))
    model = facts.get("model name") or facts.get("machdep.cpu.brand_string") or arm or facts.get("Model") or ""
    short = " ".join(re.sub(r"(?i)\((r|tm)\)|@.*| with .*|\b\d+-core\b|\bcpu\b|\bprocessor\b", " ", model).split())
    if {"flags", "Features", *SYSCTL}.isdisjoint(facts):
        return short or None, None
    has = facts.get("flags", facts.get("Features", "")).split()
    has += [feature for key, feature in SYSCTL.items() if facts.get(key) == "1"]
    return short or None, tuple(feature for feature in CPU_FEATURES if feature in has)


def cgroup_limits() -> tuple[int | None, int | None, float | None]:
    """Return (memory limit in bytes, free bytes under this limit, CPU quota in cores) of this process.

    The values come from cgroup v1 or v2. Each is the smallest value of the process's cgroup and of all cgroups above
    it; None: no limit. Page cache that the kernel can drop ("inactive_file") counts as free.
    """
    limit = left = quota = None
    for line in read(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        v1 = {"memory", "cpu"}.intersection(controllers.split(","))
        for mount in v1 if controllers else ["."]:
            for level in (PurePosixPath(path), *PurePosixPath(path).parents):
                folder = ROOT / "sys/fs/cgroup" / mount / str(level).lstrip("/")
                cap = number(folder / "memory.max", folder / "memory.limit_in_bytes")
                used = number(folder / "memory.current", folder / "memory.usage_in_bytes") or 0
                stat = dict(line.split() for line in read(folder / "memory.stat").splitlines())
                cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))  # v1: with its children
                if cap is not None:
                    limit, left = least(limit, cap), least(left, max(0, cap - max(0, used - cache)))
                time = number(folder / "cpu.max", folder / "cpu.cfs_quota_us")
                period = number(folder / "cpu.cfs_period_us") or int((read(folder / "cpu.max").split() or [0])[-1])
                if time and period:
                    quota = least(quota, time / period)
    return limit, left, quota


def read(path: Path) -> str:
    """Return the text in a file, or "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(*paths: Path) -> int | None:
    """Return the first word of the first existing file in `paths` as a whole number.

    Return None if no file exists, or if the word means that there is no limit: "max", -1, or 2**63 in cgroup v1.
    """
    word = next((text.split()[0] for path in paths if (text := read(path))), "")
    return int(word) if word.isdigit() and int(word) < 2**60 else None


def least(*values):
    return min((value for value in values if value is not None), default=None)
