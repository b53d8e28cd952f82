"""The doctor: check a machine before a lesson runs there, and name a remedy for each problem."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainmem.core import hardware
from trainmem.core.hardware import CPU_FP16, PACKAGES, Machine, cache_folder, version_of, versions
from trainmem.core.releases import COURSE, DISTRIBUTION, NEWEST_TORCH, is_untested_torch, requirements
from trainmem.texts import bytes_text

LITTLE_BYTES, SMALL_SHM_BYTES, SMALL_DISK_BYTES = 4_000_000_000, 500_000_000, 1_000_000_000
LONG_TEMPORARY = 56  # 107 bytes of a socket's path, less a lesson's folder and "/pymp-xxxxxxxx/listener-xxxxxxxx"

# {words that a reason may contain: its remedy}; the first entry whose words occur in the reason is used.
REMEDIES = {
    "CUDA_VISIBLE_DEVICES": "Type `unset CUDA_VISIBLE_DEVICES` and start again.",
    "container": "Start the container with `docker run --gpus all ...`; the host needs the NVIDIA Container Toolkit.",
    "mismatch": "Restart the machine: its driver was updated while the old one was loaded.",
    "nvidia-ml-py": "pip install nvidia-ml-py",
    "without CUDA": "Run `pip uninstall -y torch`, then install the CUDA build that pytorch.org names for this system.",
    "not installed": "pip install torch",
    "Driver Not Loaded": "Run `nvidia-smi`. If it fails too, run `sudo modprobe nvidia` or reinstall the driver.",
    "CUDA driver": "Run `nvidia-smi`. If it works, restart the machine or container; otherwise reinstall the driver.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of the doctor: what was checked, how serious it is, and a remedy."""

    level: str  # "ok", "note", "warning" or "error"
    subject: str  # e.g. "GPU 0", "memory" or a package's name
    text: str  # one sentence
    remedy: str = ""  # the command to type or the step to take; empty if nothing is wrong


def diagnose(machine: Machine, installed: dict[str, str | None] | None = None) -> list[Finding]:
    """Return the findings about this machine.

    `installed`: package versions as `hardware.versions()` returns them; None: those installed here.
    """
    return [
        *_about_gpus(machine),
        *_about_precision(machine),
        *_about_host(machine),
        *_about_folders(),
        *_about_imports(),
        *_about_packages(versions() if installed is None else installed),
    ]


def about_rehearsal() -> Finding:
    """Return a finding on whether this machine can rehearse a training for a GPU that it lacks and, if not, why."""
    from trainmem.rehearsal import build  # imports torch, which may be broken

    if hardware.is_rehearsal():
        return Finding("note", "rehearsal", "The GPU is rehearsed: memory is exact, nothing is computed.")
    if reason := build.problem():
        install = "" if build.compiler() else "Run `apt install g++`, or install your system's C++ compiler."
        return Finding("note", "rehearsal", f"GPUs cannot be rehearsed: {reason}.", install)
    if build.interpreter() is None:
        text = "To rehearse GPUs, torch's CUDA build is needed: 5 GB, in a separate environment."
        return Finding("note", "rehearsal", text, "The first `perf-helpers rehearse` installs it.")
    return Finding("ok", "rehearsal", "`perf-helpers rehearse` can show the memory of a training on other GPUs.")


def is_supported() -> bool:
    """Return whether the installed packages are within the ranges of this project's dependencies."""
    return all(finding.level in ("ok", "note") for finding in _about_packages(versions()))


def _about_gpus(machine: Machine) -> Iterator[Finding]:
    def remedy(reason: str, otherwise: str) -> str:
        return next((fix for pattern, fix in REMEDIES.items() if pattern in reason), otherwise)

    if machine.cuda_reason:
        fix, unused = remedy(machine.cuda_reason, ""), ", ".join(gpu.name or "an NVIDIA GPU" for gpu in machine.gpus)
        text = f"Everything runs on the CPU{unused and f', though there is {unused}'}: {machine.cuda_reason}."
        elsewhere = "Nothing to repair. For claims about CUDA use a machine with an NVIDIA GPU, such as Colab's T4."
        yield Finding("warning" if fix else "note", "GPU", text, fix or elsewhere)
    elif machine.visible_reason:
        yield Finding("note", "GPU", f"{machine.visible_reason}.", REMEDIES["CUDA_VISIBLE_DEVICES"])
    silent = machine.nvml_reason
    if silent and (machine.gpus or (remedy(silent, "") and silent not in machine.cuda_reason)):
        text = f"NVML does not answer ({silent}): device-used memory can only be read through CUDA."
        yield Finding("warning", "NVML", text, remedy(silent, "Run `nvidia-smi`: it prints what is wrong."))
    for gpu in machine.gpus if machine.kind == "cuda" else ():
        subject, free = f"GPU {gpu.index}", _amount(gpu.free_bytes, binary=True)
        capability = "{}.{}".format(*gpu.capability) if gpu.capability else "unknown"
        text = (
            f"{gpu.name or 'an NVIDIA GPU'} with {_amount(gpu.memory_bytes, binary=True)} of memory, {free} of it free"
        )
        yield Finding("ok", subject, f"{text}; compute capability {capability}, driver {gpu.driver or 'unknown'}.")
        if gpu.free_bytes is not None and gpu.free_bytes < LITTLE_BYTES:
            text = f"Only {free} of its memory are free: other programs hold the rest."
            yield Finding("warning", subject, text, "`nvidia-smi` lists them; shut down notebooks that are done.")
        if "+cu13" in (machine.torch_build or "") and gpu.capability and gpu.capability < (7, 5):
            text = f"torch {machine.torch_build} has no kernels for this GPU: CUDA 13 needs capability 7.5 or more."
            yield Finding("error", subject, text, "Install torch built for CUDA 12.6, listed on pytorch.org.")
    if machine.kind == "cuda" and len(machine.gpus) > 1:
        text = f"{len(machine.gpus)} GPUs are visible, and a Trainer in one process uses them all (DataParallel)."
        remedy_of_many = "To use one GPU, type `export CUDA_VISIBLE_DEVICES=0`. Lesson 15 is about several."
        yield Finding("note", "GPUs", text, remedy_of_many)


def _about_precision(machine: Machine) -> Iterator[Finding]:
    native, on_gpu = machine.native_bf16, machine.kind == "cuda"
    if native:
        yield Finding("ok", "precision", f"bf16 is native on this {'GPU' if on_gpu else 'CPU'}.")
    elif native is None:
        yield Finding("note", "precision", "Whether bf16 is native here is unknown.", "Let lesson 07 measure it.")
    else:
        topic = "GPU has no native bf16 (compute capability 8.0): bf16" if on_gpu else "CPU has no bf16: fp16 and bf16"
        fp16 = on_gpu and machine.gpus[0].capability >= (7, 0)
        text = f"This {topic} operations are emulated: slower, with the same memory."
        yield Finding("note", "precision", text, "Use fp16=True, native here." if fp16 else "Train in fp32 here.")
    if not on_gpu and machine.cpu_features is not None and CPU_FP16.isdisjoint(machine.cpu_features):
        text = "This CPU has no instructions for fp16: a checkpoint that is loaded in fp16 runs very slowly."
        yield Finding(
            "note", "fp16", text, "Load it with dtype=torch.float32 or torch.bfloat16; lesson 19 measures it."
        )


def _about_host(machine: Machine) -> Iterator[Finding]:
    cores, everything, free = machine.cpu_cores, machine.machine_cores, machine.memory_available_bytes
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdigit() else everything
    if machine.cpu_quota and everything and machine.cpu_quota < min(everything, threads):
        allowed = f"{machine.cpu_quota:g} of {everything} cores"
        text = f"A cgroup allows the time of {allowed}, but torch starts {threads} threads, which are throttled."
        remedy = f"Type `export OMP_NUM_THREADS={cores}` before starting, or allow more (`docker run --cpus=8`)."
        yield Finding("warning", "CPU", text, remedy)
    elif given and cores and threads < cores:
        text = f"OMP_NUM_THREADS={given}: torch computes on {given} of {cores} cores."
        yield Finding("note", "CPU", text, "Type `unset OMP_NUM_THREADS` before starting, unless that is intended.")
    if cores == 1:
        text = "One core: DataLoader workers and parallel processes take turns on it and can show no speedup."
        yield Finding("warning", "CPU", text, "Use two cores or more for lessons 12, 15 and 19.")
    else:
        yield Finding("ok", "CPU", f"{machine.cpu_model or 'CPU'}: {cores} of {everything} cores are usable.")
    little = free is not None and free < LITTLE_BYTES
    remedy = "Close other programs, or allow more (`docker run --memory=8g`)." if little else ""
    text = f"{'Only ' if little else ''}{_amount(free)} of {_amount(machine.memory_bytes)} are free."
    yield Finding("warning" if little else "ok", "memory", text, remedy)
    if machine.shm_bytes is not None and machine.shm_bytes < SMALL_SHM_BYTES:
        text = f"/dev/shm has only {_amount(machine.shm_bytes)} free: DataLoader workers may crash (Bus error)."
        yield Finding("warning", "/dev/shm", text, "Start the container with `--shm-size=2g` or `--ipc=host`.")


def _about_folders() -> Iterator[Finding]:
    """Yield a finding for a folder (runs, temporary files) that is read-only, nearly full, or has too long a path."""
    runs_folder = ("PERF_HELPERS_HOME", cache_folder, "runs, guesses and progress are not saved")
    for name, find, lost in (runs_folder, ("TMPDIR", tempfile.gettempdir, "no experiment can run")):
        try:
            folder = Path(find()).absolute()
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            free = shutil.disk_usage(existing).free if os.access(existing, os.W_OK) else 0
        except FileNotFoundError:  # tempfile found no folder that it can write to
            existing, free = "Every folder for temporary files", 0
        if free < SMALL_DISK_BYTES:
            text = f"has only {_amount(free)} free:" if free else "cannot be written to:"
            remedy = f"Type `export {name}=FOLDER`, with a folder that has 1 GB free and that you may write to."
            yield Finding(
                "warning" if free or find is cache_folder else "error", name, f"{existing} {text} {lost}.", remedy
            )
        elif find is not cache_folder and len(os.fsencode(folder)) > LONG_TEMPORARY:
            text = f"{folder} is too long: DataLoader workers hang if a socket's path has more than 107 bytes."
            yield Finding(
                "warning", name, text, f"Type `export {name}=/tmp`, or a path of at most {LONG_TEMPORARY} bytes."
            )


def _about_imports() -> Iterator[Finding]:
    """Yield a finding per file imported in place of a library, and per library whose version changed after import."""
    for package in filter(version_of, PACKAGES):
        record, spec = importlib.metadata.distribution(package), importlib.util.find_spec(package)
        file, home = spec and spec.origin, Path(record.locate_file("")).absolute()
        loaded = getattr(sys.modules.get(package), "__version__", record.version)
        if home not in Path(file or "").parents and "editable" not in (record.read_text("direct_url.json") or ""):
            text = f"Python imports {file or 'nothing'} instead of the installed {package}."
            again = f"pip install --no-deps --force-reinstall {package}=={record.version}"
            yield Finding("error", package, text, "Rename it, or remove its folder from PYTHONPATH." if file else again)
        elif loaded.partition("+")[0] != record.version.partition("+")[0]:
            text = f"{package} {loaded} is loaded, but {record.version} has been installed since."
            yield Finding("error", package, text, "Restart the kernel (in the menu: Kernel, Restart).")
    for name in sorted({*sys.stdlib_module_names, *PACKAGES} - {"test"}):
        for file in (Path(f"{name}.py"), Path(name, "__init__.py")):
            if file.exists() and not file.resolve().is_relative_to(sys.prefix):
                text = f"A notebook in this folder imports {file} instead of the library {name}."
                yield Finding("warning", name, text, "Rename it, or start in another folder.")


def _about_packages(installed: dict[str, str | None]) -> Iterator[Finding]:
    ranges, of_course = {}, set()
    with suppress(ImportError):  # PackageNotFoundError: a checkout that is not installed has no version ranges
        needed = requirements()
        # nvidia-ml-py is left out: the findings about GPUs report it if it is missing.
        ranges = {each.name: each.specifier for each in needed if each.name != "nvidia-ml-py"}
        of_course = {each.name for each in needed if each.marker}
    for package in {**installed, **ranges}:
        version = installed[package] if package in installed else version_of(package)
        if version is None:
            needs = "8-bit Adam (lessons 09, 13 and 14)" if package == "bitsandbytes" else "lessons"
            text = f"{package} is not installed: {needs} cannot run."
            remedy = f"pip install '{DISTRIBUTION}[{COURSE}]'" if package in of_course else f"pip install {package}"
            yield Finding("error" if needs == "lessons" else "note", package, text, remedy)
        elif package in ranges and not ranges[package].contains(version, prereleases=True):
            text = f"{package} {version} is outside the tested range {ranges[package]}: verdicts may differ."
            yield Finding("warning", package, text, f'pip install "{package}{ranges[package]}"')
        elif package == "torch" and (package in ranges or is_untested_torch(version)):
            yield _about_torch(version, [each.version for each in ranges.get(package, ()) if each.operator == ">="])


def _about_torch(version: str, oldest: list[str]) -> Finding:
    """Return a finding on whether torch `version` is tested; `oldest` lists the oldest admitted version, if known."""
    tested = f"{' '.join([*oldest, 'to']) if oldest else 'up to'} {NEWEST_TORCH}"
    other = "To estimate CUDA memory of another release: `perf-helpers estimate --torch RELEASE`."
    if not is_untested_torch(version):
        return Finding("ok", "torch", f"torch {version} is a tested release (tested: {tested}). {other}")
    text = (
        f"torch {version} is untested (tested: {tested}). It is accepted; verdicts may differ, and CUDA memory follows"
    )
    install = f'To install a tested one: pip install "torch=={NEWEST_TORCH}.*"'
    return Finding("warning", "torch", f"{text} the rules of torch {NEWEST_TORCH}.", f"{install} {other}")


def _amount(size: int | None, binary: bool = False) -> str:
    return "an unknown amount" if size is None else bytes_text(size, binary)
