"""Set up rehearsals: torch's CUDA build in an environment of its own, and the compiled stub CUDA runtime.

Nothing is installed into the present environment. If the present environment has torch's CUDA build (the default wheel
for Linux), rehearsals use it; otherwise another environment is made in the user's cache folder.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

from trainmem.core import hardware, releases

SOURCES = Path(__file__).with_name("native")
COMPILERS = ("g++", "clang++", "c++")
UNANSWERED = "unanswered.txt"  # file beside the compiled library, see `doubts`


def problem() -> str | None:
    """Return why this system can never rehearse, whatever is installed; None if it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"a rehearsal needs Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    if not compiler():
        return f"a rehearsal needs a C++ compiler ({', '.join(COMPILERS)}), and none was found"
    return None


def compiler() -> str | None:
    """Return the path of a C++ compiler ($CXX, or one of `COMPILERS`); None if there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))), None)


def interpreter() -> Path | None:
    """Return the path of a Python whose torch is a CUDA build; None if there is none.

    It is this Python, or the Python of the environment that `set_up` makes.
    """
    if hardware.torch_build()[1]:
        return Path(sys.executable)
    python = environment() / "bin" / "python"
    return python if (environment() / "complete").exists() and python.exists() else None


def environment() -> Path:
    """Return the folder of the environment for rehearsals with this version of Python and this version of torch."""
    return cache() / f"python{sysconfig.get_python_version()}-torch{_torch_version()}"


def cache() -> Path:
    """Return the folder that holds environments and compiled libraries."""
    return hardware.cache_folder() / "rehearsal"


def set_up() -> Path:
    """Return the path of the Python that rehearses.

    If torch here is no CUDA build, the first call makes an environment with the same package versions (5 GB, minutes).

    Raises:
        RuntimeError: this system cannot rehearse, or pip failed; the message has the reason.
    """
    if why := problem():
        raise RuntimeError(why)
    if python := interpreter():
        if python != Path(sys.executable):
            _link_this_package(python)  # an earlier version linked it by another name
        return python
    folder = environment()
    print(f"Installing torch's CUDA build into {folder}: 5 GB, some minutes.", file=sys.stderr)
    venv.create(folder, clear=True, with_pip=True)
    python = folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *_packages()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "pip gave no reason").splitlines()[-1]
        raise RuntimeError(f"torch's CUDA build could not be installed ({last}): check the network and the disk")
    _link_this_package(python)
    (folder / "complete").touch()
    return python


def library(python: Path) -> Path:
    """Return the folder of the stub CUDA runtime that is compiled for the torch of the Python `python`.

    If the compiled runtime is missing or outdated, compile it.

    Raises:
        RuntimeError: CUDA's headers are missing, or the compiler failed; the message contains the compiler's message.
    """
    site = _site_packages(python)
    if not (headers := max(site.glob("nvidia/*/include/cuda_runtime_api.h"), default=None)):
        raise RuntimeError(f"CUDA's headers are missing in {site}/nvidia: install torch's CUDA build there")
    sources = sorted(path for path in SOURCES.rglob("*") if path.is_file())
    decisive = [Path(__file__), *sources, site / "torch" / "version.py"]
    state = hashlib.sha256(bytes(python) + b"".join(path.read_bytes() for path in decisive))
    folder = cache() / f"library-{state.hexdigest()[:12]}"
    if (folder / "libcuda.so.1").exists():
        return folder
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=cache()) as name:
        draft, linked = Path(name), _linked(site)
        (draft / "rest.cpp").write_text(_rest(linked, site, headers.with_name("cuda.h")))
        (draft / UNANSWERED).write_text("\n".join(unanswered(linked)))
        units = [draft / "rest.cpp", *(path for path in sources if path.suffix == ".cpp")]
        options = ["-std=c++17", "-O1", "-fPIC", "-w", "-shared", f"-I{SOURCES}", f"-I{headers.parent}"]
        options += [f"-DARCHITECTURES={_architectures(python)}"]
        command = [compiler(), *options, *units, "-o", draft / "librehearsal.so", "-ldl", "-lpthread"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the rehearsal's library cannot be compiled: {done.stderr.strip()[:2000]}")
        # One library under three names: preloaded, it answers programs that link CUDA; others load the two names.
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            (draft / name).symlink_to("librehearsal.so")
        tool = draft / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        tool.write_text(f"#!{python}\n{(SOURCES / 'nvidia_smi.py').read_text()}")
        tool.chmod(0o755)
        with contextlib.suppress(OSError):  # another process was faster
            draft.rename(folder)
    return folder


def doubts(python: Path, folder: Path) -> str:
    """Return sentences that say what may be wrong in a rehearsal; "" if nothing is in doubt.

    `python`: the Python whose torch is rehearsed; `folder`: folder of the stub CUDA runtime, see `library`.
    """
    version = re.search(
        r"__version__ = ['\"](.+?)['\"]", (_site_packages(python) / "torch" / "version.py").read_text()
    )[1]
    found = []
    if releases.is_untested_torch(version):
        newest = releases.NEWEST_TORCH
        found.append(f"torch {version} is untested with the rehearsal's stub CUDA runtime (newest tested: {newest})")
    if names := (folder / UNANSWERED).read_text().split():
        listed = ", ".join(names)
        found.append(f"the stub lacks functions of torch {version} that may copy or allocate memory: {listed}")
    return f"{'; '.join(found)}. Rehearsed memory may be wrong." if found else ""


def unanswered(linked: set[str]) -> list[str]:
    """Return the names of CUDA functions that may copy or allocate memory, but that a rehearsal does not answer.

    They are neither defined by the stub CUDA runtime nor listed in native/answers.toml. `linked`: the names to check.
    """
    answered = _written() | {*" ".join(_answers()["named"].values()).split()}
    return sorted(name for name in linked - answered if _MOVES.match(name) and name not in _answers()["harmless"])


# Names of functions of the CUDA runtime, the driver and NCCL that copy, allocate or communicate.
_MOVES = re.compile(
    r"(cuda|nccl|cu(?=Mem))(?!Comm|Get|.*(Attr|Info|Stats))\w*"
    r"([Aa]lloc|Memcpy|Memset|Copy|Gather|Scatter|Reduce|Broadcast|Bcast|Send|Recv|AlltoAll|Put)"
)


def _answers() -> dict:
    return tomllib.loads((SOURCES / "answers.toml").read_text())


def _written() -> set[str]:
    """Return the names of the CUDA functions that the stub CUDA runtime defines in its C++ files (native/*.cpp)."""
    return {
        name
        for file in SOURCES.glob("*.cpp")
        for name in re.findall(r"\b((?:cu|nccl|nvml|nvrtc)\w+) ?\(", file.read_text())
    }


def _linked(site: Path) -> set[str]:
    """Return the names of CUDA functions to which the libraries of torch and bitsandbytes in the folder `site` link."""
    names = set()
    for library in [*site.glob("torch/lib/*.so"), *site.glob("bitsandbytes/*cuda*.so")]:
        done = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True)
        names |= {*re.findall(r"\b(?:cu|nccl|nv)\w+", done.stdout)}
    return names


def _rest(linked: set[str], site: Path, header: Path) -> str:
    """Return C++ source of the functions that only return a status; native/answers.toml has the statuses.

    `linked`: see `_linked`; `site`: folder of the installed packages; `header`: path of cuda.h.
    """
    table, answers = _answers(), {}  # {function: status}
    for start, code in table["linked"].items():
        answers |= dict.fromkeys((name for name in linked if name.startswith(start)), code)
    assumed = answers.keys() & {*table["without_workspace"].split()}
    answers |= {name: f"unless_assumed({answers[name]})" for name in assumed}
    looked_up = re.findall(rb"nvml[A-Z]\w+", (site / "torch/lib/libc10_cuda.so").read_bytes())  # by dlsym
    answers |= dict.fromkeys(map(bytes.decode, looked_up), table["nvml"])
    text = header.read_text(errors="replace")  # declares the functions of the driver
    declared = re.findall(r"CUresult\s+CUDAAPI\s+(cu\w+)\s*\(", text)
    declared += [name for pair in re.findall(r"#define\s+(cu[A-Z]\w+)\s+(cu[A-Z]\w+)", text) for name in pair]
    answers |= dict.fromkeys(declared, table["driver"])
    for name in _written():  # the stub's own C++ files define these
        answers.pop(name, None)
    for code, names in table["named"].items():
        answers |= dict.fromkeys(names.split(), code)
    lines = (f'extern "C" int {name}() {{ return {code}; }}\n' for name, code in sorted(answers.items()))
    return "".join(['#include "device.h"\nusing namespace rehearsal;\n', *lines])


def _architectures(python: Path) -> str:
    """Return the compute capabilities that the torch of the Python `python` has kernels for, as "75,80,86"."""
    code = "import torch; print(torch._C._cuda_getArchFlags())"
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return ",".join(sorted(re.findall(r"sm_(\d+)", done.stdout), key=int))


def _packages() -> list[str]:
    """Return pip requirements for this environment's packages, pinned to their versions, e.g. "datasets==4.1.0"."""
    found = {each.name: hardware.version_of(each.name) for each in releases.requirements() if each.name != "torch"}
    # "===" excludes builds such as "2.9.0+cpu", so that pip chooses the default wheel, which is the CUDA build.
    return [f"torch==={_torch_version()}", *(f"{name}=={version}" for name, version in found.items() if version)]


def _torch_version() -> str:
    return importlib.metadata.version("torch").partition("+")[0]


def _link_this_package(python: Path) -> None:
    """Make this package importable by the Python `python`."""
    package = Path(__file__).resolve().parents[1]
    link = _site_packages(python) / package.name
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(package)


def _site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
