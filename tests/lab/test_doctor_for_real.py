"""Break an installation for real, and check the output of `perf-helpers doctor` in its own process."""

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import environments
import pytest

from trainmem.core import hardware

ROOT = Path(__file__).parents[2]
UNSET = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PERF_HELPERS_HOME", "TMPDIR")
COMMAND = ("-m", "perf_helpers.cli", "doctor")
LINE = re.compile(r"^ *(ok|note|warning|error)  (.*?): (.*)(?:\n {10}-> (.*))?", re.MULTILINE)
# A driver with one GPU, which it shows to whom CUDA_VISIBLE_DEVICES lets it.
DRIVER = """
#include <stdlib.h>
#include <string.h>
int cuGetErrorString(int code, const char **text) { *text = "no CUDA-capable device is detected"; return 0; }
int cuInit(int flags) { char *only = getenv("CUDA_VISIBLE_DEVICES"); return only && strcmp(only, "0") ? 100 : 0; }
int cuDeviceGetCount(int *count) { return !(*count = 1); }
int cuDeviceGet(int *device, int index) { return *device = index; }
int cuDeviceGetName(char *name, int length, int device) { return !strcpy(name, "Tesla T4"); }
int cuDeviceGetUuid_v2(char *uuid, int device) { return !memset(uuid, 7, 16); }
int cuDeviceTotalMem_v2(size_t *total, int device) { return !(*total = 16000000000); }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? 7 : 5; return 0; }
"""


def doctor(*python, shell="", folder=None, **environment):
    """Run the doctor in a new process; return its findings (level, subject, text, remedy) and its exit code.

    Args:
        python: the command of another Python, with its arguments; (): this Python.
        shell: shell code to run first, in the same process.
        folder: the working folder.
        environment: variables to set.
    """
    kept = {name: text for name, text in os.environ.items() if name not in UNSET}
    kept |= {"PYTHONPATH": str(ROOT)} | environment
    command = ["sh", "-ec", f'{shell}\nexec "$@"', "sh", *(python or (sys.executable, "-P", *COMMAND))]
    if "mount" in shell:
        command = ["unshare", "--mount", *command]
    done = subprocess.run(command, cwd=folder or ROOT, env=kept, capture_output=True, text=True)
    if "mount" in shell and re.search("(?i)permi|unshare", done.stderr):
        pytest.skip(f"a disk can only be mounted by root, and not in every container: {done.stderr}")
    found = LINE.findall(done.stdout)
    assert not done.stderr and len(found) > 4, done
    return found, done.returncode


def one(answer, level, subject, text):
    """Return the remedy of the only finding with this level, subject and text.

    The exit code is checked: it must be 1 if there is an error among the findings, otherwise 0.

    `answer`: what `doctor` returned; `level`: e.g. "error"; `text`: a part of the finding's text.
    """
    found, code = answer
    assert code == any(each[0] == "error" for each in found), answer
    remedies = [each[3] for each in found if each[:2] == (level, subject) and text in each[2]]
    assert len(remedies) == 1, found
    return remedies[0]


@pytest.fixture
def installed(tmp_path):
    """Return a function that makes a copy of this environment, without some packages or with other versions in their
    metadata, and returns the path of its Python.
    """
    return lambda without=(), **versions: environments.make(tmp_path / "venv", without, **versions)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or sys.platform != "linux" or hardware.torch_build()[1]:
        pytest.skip("needs a C compiler, on Linux, and a CPU build of torch")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)
    return {"LD_LIBRARY_PATH": str(folder)}


def test_as_it_is_nothing_keeps_lessons_from_running():
    found, code = doctor()
    assert code == 0 and {"ok"} <= {each[0] for each in found} <= {"ok", "note", "warning"}, found


# What is installed


def test_a_cpu_build_of_torch_beside_a_gpu(driver):
    remedy = one(doctor(**driver), "warning", "GPU", "runs on the CPU, though there is Tesla T4: torch 2")
    assert remedy.startswith("Run `pip uninstall -y torch`, then install the CUDA build")


@pytest.mark.parametrize(("package", "level", "code"), [("bitsandbytes", "note", 0), ("transformers", "error", 1)])
def test_a_package_that_is_missing(installed, package, level, code):
    answer = doctor(installed(without=[package]), "-P", *COMMAND)
    assert one(answer, level, package, "is not installed") == f"pip install {package}"
    assert answer[1] == code


@pytest.mark.parametrize("package", ["torch", "jinja2"])
def test_a_package_that_is_missing_though_the_doctor_has_no_use_for_it(installed, package):
    answer = doctor(installed(without=[package]), "-P", *COMMAND)
    assert one(answer, "error", package, "lessons cannot run") == f"pip install {package}"


def test_nvml_s_bindings_are_missing(installed):
    found, code = doctor(installed(without=["nvidia-ml-py"]), "-P", *COMMAND)
    reported = [
        each for each in found if "nvidia-ml-py is not installed" in each[2]
    ]  # with the GPU, or where there is none
    assert (
        code == 0
        and reported
        and {(each[0], each[3]) for each in reported} == {("warning", "pip install nvidia-ml-py")}
    )


def test_a_version_that_was_not_tested(installed):
    answer = doctor(installed(transformers="4.40.0"), "-P", *COMMAND)
    assert one(answer, "warning", "transformers", "4.40.0 is outside") == 'pip install "transformers<6,>=5.15"'


def test_an_installation_that_was_interrupted(installed):
    python = installed(without=["accelerate"])
    environments.record(python, "accelerate", "1.12.0")
    remedy = one(doctor(python, "-P", *COMMAND), "error", "accelerate", "nothing instead of the installed accelerate")
    assert remedy == "pip install --no-deps --force-reinstall accelerate==1.12.0"


def test_a_kernel_that_was_not_restarted_after_an_installation(installed):
    """If another version of a library is installed after its import, the doctor must advise to restart the kernel."""
    python = installed(numpy=importlib.metadata.version("numpy"))
    code = f"import sys, numpy; sys.path.append({str(ROOT / 'tests')!r}); import environments; "
    code += "environments.record(sys.executable, 'numpy', '2.0.0'); sys.argv = ['perf-helpers', 'doctor']; "
    answer = doctor(python, "-P", "-c", code + "from perf_helpers.cli import main; main()")
    assert one(answer, "error", "numpy", "2.0.0 has been installed since").startswith("Restart the kernel")


# What stands in the way of what is installed


def test_a_file_of_the_learners_that_is_called_like_a_library(tmp_path):
    for name in ("torch.py", "random.py", "lessons.py"):
        (tmp_path / name).touch()
    answer = doctor(folder=tmp_path)  # as the command is started, which does not look into the folder
    assert one(answer, "warning", "torch", "imports torch.py").startswith("Rename it")
    assert one(answer, "warning", "random", "imports random.py") and answer[1] == 0
    (tmp_path / "random.py").unlink()  # with which Python itself does not come far
    answer = doctor(sys.executable, *COMMAND, folder=tmp_path)  # as a notebook's kernel looks
    assert one(answer, "error", "torch", f"imports {tmp_path}/torch.py").startswith("Rename it")


def test_another_copy_of_a_library_comes_first(tmp_path):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").touch()
    answer = doctor(PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert "PYTHONPATH" in one(answer, "error", "numpy", f"imports {tmp_path}/numpy/__init__.py")


# The environment's variables


@pytest.mark.parametrize("value", ["", "1", "abc", "0,0"])
def test_cuda_visible_devices_hides_the_gpu(driver, value):
    remedy = one(doctor(**driver, CUDA_VISIBLE_DEVICES=value), "warning", "GPU", f"CUDA_VISIBLE_DEVICES={value!r}")
    assert remedy.startswith("Type `unset CUDA_VISIBLE_DEVICES`")


def test_a_launcher_left_one_thread():
    if hardware.describe().cpu_cores < 2:
        pytest.skip("one core")
    remedy = one(doctor(OMP_NUM_THREADS="1"), "note", "CPU", "OMP_NUM_THREADS=1: torch computes on 1 of ")
    assert "unset OMP_NUM_THREADS" in remedy


def test_there_is_no_compiler(tmp_path):
    (tmp_path / "sh").symlink_to(shutil.which("sh"))
    remedy = one(doctor(PATH=str(tmp_path)), "note", "rehearsal", "C++ compiler")
    assert "apt install g++" in remedy


# What the machine or the container gives


def cgroup(controller, v1, v2):
    """Return shell code that moves its process into a new cgroup with a limit.

    Args:
        controller: "memory" or "cpu".
        v1, v2: {file: content} of the limit, for each version of cgroups.
    """
    own = dict(line.split(":")[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    name = next((names for names in own if controller in names.split(",")), "")
    folder = Path("/sys/fs/cgroup", controller if name else ".", own.get(name, "/").strip("/"), f"doctor-{os.getpid()}")
    try:
        folder.mkdir()
        for file, limit in v1.items() if name else v2.items():
            (folder / file).write_text(limit)
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup can be made here: {error}")
    return folder, f"echo $$ > {folder}/cgroup.procs"


def test_a_container_with_little_time_of_the_cpu():
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one core")
    folder, enter = cgroup("cpu", {"cpu.cfs_quota_us": "120000"}, {"cpu.max": "120000 100000"})
    try:
        remedy = one(doctor(shell=enter), "warning", "CPU", f"allows the time of 1.2 of {os.cpu_count()} cores")
        assert "export OMP_NUM_THREADS=1" in remedy
        found, _ = doctor(shell=enter, OMP_NUM_THREADS="1")
        assert not [each for each in found if "throttled" in each[2]], "the remedy was taken"
    finally:
        folder.rmdir()


def test_a_container_with_little_memory():
    folder, enter = cgroup("memory", {"memory.limit_in_bytes": "1500000000"}, {"memory.max": "1500000000"})
    try:
        answer = doctor(shell=enter)
        assert "--memory=8g" in one(answer, "warning", "memory", "of 1.50 GB are free")
    finally:
        folder.rmdir()


def test_a_container_with_little_shared_memory():
    answer = doctor(shell="mount -t tmpfs -o size=64m none /dev/shm")
    assert "--shm-size=2g" in one(answer, "warning", "/dev/shm", "67.1 MB free")


def test_one_core():
    if not shutil.which("taskset"):
        pytest.skip("no taskset")
    core = min(os.sched_getaffinity(0))
    assert one(doctor(shell=f"taskset -cp {core} $$ > /dev/null"), "warning", "CPU", "One core").startswith("Use two")


# Folders


def test_a_home_that_cannot_be_written_to(disk, tmp_path):
    home = disk("1m", "ro")
    answer = doctor(HOME=str(home), XDG_CACHE_HOME=f"{home}/.cache")
    assert "export PERF_HELPERS_HOME=" in one(answer, "warning", "PERF_HELPERS_HOME", f"{home} cannot be written to")
    found, _ = doctor(HOME=str(home), PERF_HELPERS_HOME=str(tmp_path / "elsewhere"))
    assert not [each for each in found if "cannot be written to" in each[2]], "the remedy was taken"


def test_a_disk_that_is_nearly_full(disk):
    folder = disk("50m")
    remedy = one(doctor(TMPDIR=str(folder)), "warning", "TMPDIR", f"{folder} has only 52.4 MB free")
    assert remedy.startswith("Type `export TMPDIR=FOLDER`")


def test_a_folder_for_temporary_files_whose_name_is_too_long_for_sockets(tmp_path):
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    remedy = one(doctor(TMPDIR=str(folder)), "warning", "TMPDIR", f"{folder} is too long")
    assert "export TMPDIR=/tmp" in remedy and "56 bytes" in remedy


def test_no_folder_for_temporary_files_can_be_written_to():
    shell = (
        "for folder in /tmp /var/tmp; do mount --bind $folder $folder; mount -o remount,bind,ro $folder; done; cd /proc"
    )
    assert one(doctor(shell=shell), "error", "TMPDIR", "no experiment can run").startswith("Type `export TMPDIR=")
