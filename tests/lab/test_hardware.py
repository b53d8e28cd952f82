"""The description of a machine, with fake drivers, cgroups and CPUs. No test needs a GPU or reads a clock."""

import ctypes
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from machines import GOOD, H200, INSTALLED, PLAIN, T4, fake_nvml

from perf_helpers import doctor
from trainmem.core import hardware
from trainmem.core.hardware import Gpu, Machine


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """Pretend a machine with torch's CUDA build but neither a GPU nor a CUDA driver; each test adds what it needs."""
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(init_error="NVML Shared Library Not Found"))
    monkeypatch.setattr(hardware, "ask_driver", lambda visible, order: (None, None))
    monkeypatch.setattr(hardware, "torch_build", lambda: ("2.13.0+cu130", True))
    yield


@pytest.fixture
def use(monkeypatch):
    """Return a function that adds GPUs to the machine.

    Args of the function: the GPUs that NVML reports; `driver`, the GPUs that CUDA shows (default: all of them); and
    `driver_reason`, why CUDA fails. Further arguments are passed to `fake_nvml`.
    """

    def install(*gpus, driver="all of them", driver_reason=None, **fake):
        if driver == "all of them":
            driver = [replace(gpu, index=i, driver=None, free_bytes=None) for i, gpu in enumerate(gpus)]
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*gpus, **fake))
        monkeypatch.setattr(hardware, "ask_driver", lambda visible, order: (driver, driver_reason))

    return install


# The machine as a whole


def test_importing_and_describing_load_neither_torch_nor_a_cuda_context():
    script = (
        "import sys, trainmem.core.hardware as h, perf_helpers.lab.doctor as d; early = 'pynvml' in sys.modules;"
        "machine = h.describe(); d.diagnose(machine); h.device_used_bytes();"
        "print(early, 'torch' in sys.modules, 'transformers' in sys.modules, machine.torch_build)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:3] == ["False"] * 3
    assert done.stdout.split()[3].startswith(importlib.metadata.version("torch").split("+")[0])


def test_this_machine_is_described_and_survives_json():
    machine = hardware.describe()
    assert machine.kind == "cpu" and machine.cuda_reason == "no NVIDIA driver was found (NVML Shared Library Not Found)"
    assert 1 <= machine.cpu_cores <= os.cpu_count()
    assert 0 < machine.memory_available_bytes <= machine.memory_bytes
    assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine


def test_a_cpu_whose_libraries_are_held_back_says_so_in_its_name(monkeypatch):
    for name in hardware.HELD_BY:
        monkeypatch.delenv(name, raising=False)
    free = hardware.describe()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    held = hardware.describe()
    assert free.held_to is None and held.name == f"{free.name}, held to AVX512_CORE"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert hardware.describe().held_to == "AVX512_CORE and avx2"
    assert held.slug.endswith("-held-to-avx512-core") and held.cpu_features == free.cpu_features, "flags say nothing"


def test_a_record_of_another_version_can_be_read():
    record = json.loads(json.dumps(GOOD.to_dict())) | {"colour": "blue"}
    del record["shm_bytes"]
    assert Machine.from_dict(record) == replace(GOOD, shm_bytes=None)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("AMD EPYC, 2 cores", "amd-epyc-2-cores"),
        ("2 x NVIDIA H200", "2-x-nvidia-h200"),
        ("NVIDIA A100 MIG 1g.5gb", "nvidia-a100-mig-1g-5gb"),
        ("../..", "machine"),
    ],
)
def test_slug_is_safe_as_a_folder(name, slug):
    assert replace(GOOD, name=name).slug == slug


def test_versions_name_what_is_missing_without_importing(monkeypatch):
    monkeypatch.setattr(hardware, "PACKAGES", ("torch", "no-such-package"))
    found = hardware.versions()
    assert found["no-such-package"] is None
    assert found["torch"] == importlib.metadata.version("torch") and found["python"].startswith("3.")


# NVML and CUDA


def test_gpus_come_in_cudas_order_with_what_nvml_knows_of_the_same_uuid(use):
    fastest_first = [Gpu(0, "GPU-bbbb", "H200 says CUDA", 150, (9, 0)), Gpu(1, "GPU-aaaa", "T4 says CUDA", 16, (7, 5))]
    use(T4, H200, driver=fastest_first)
    machine = hardware.describe()
    free = (H200.free_bytes, T4.free_bytes)
    assert machine.gpus == tuple(
        replace(gpu, driver="580.1", free_bytes=size) for gpu, size in zip(fastest_first, free, strict=True)
    )
    assert machine.name == "H200 says CUDA + T4 says CUDA" and machine.native_bf16 is True
    assert hardware.device_used_bytes(0) == H200.memory_bytes - H200.free_bytes
    assert hardware.device_used_bytes(1) == T4.memory_bytes - T4.free_bytes == 1_000_000_000
    assert hardware.device_used_bytes(2) is None


def test_several_equal_gpus_are_counted_in_the_name(use):
    use(H200, replace(H200, uuid="GPU-cccc"))
    assert hardware.describe().name == "2 x NVIDIA H200"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("nvmlDeviceGetMemoryInfo", "free_bytes"),
        ("nvmlDeviceGetHandleByUUID", "free_bytes"),
        ("nvmlSystemGetDriverVersion", "driver"),
        ("nvmlDeviceGetCount", None),
        ("nvmlShutdown", None),
    ],
)
def test_an_unsupported_query_costs_only_its_own_field(use, query, field):
    use(T4, refuse=[query])
    assert hardware.describe().gpus == (replace(T4, **{field: None} if field else {}),)


def test_a_mig_slice_is_the_gpu_that_cuda_shows(use, monkeypatch):
    slices = [replace(H200, uuid="MIG-1111", memory_bytes=18_000_000_000, free_bytes=17_000_000_000)]
    slices.append(replace(slices[0], uuid="MIG-2222", free_bytes=16_000_000_000))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2222")
    use(H200, slices=slices, driver=[Gpu(0, "GPU-2222", "NVIDIA H200", 18_000_000_000, (9, 0))])
    machine = hardware.describe()
    assert machine.gpus == (replace(slices[1], index=0),) and machine.visible_reason is None
    assert hardware.device_used_bytes() == 2_000_000_000


def test_gpus_without_cudas_library_are_no_gpus_and_named(use):
    use(T4, driver=None)
    machine = hardware.describe()
    assert (machine.kind, machine.gpus) == ("cpu", ()) and machine.cuda_reason.startswith("NVML counts 1 GPU(s), but")
    assert "nvidia-smi" in doctor.diagnose(machine, INSTALLED)[0].remedy


def test_cuda_is_queried_for_used_memory_only_where_it_already_runs(use, monkeypatch):
    use(T4, refuse=["nvmlDeviceGetMemoryInfo"])
    running = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 1, mem_get_info=lambda index: (3, 10))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=running))
    assert hardware.device_used_bytes() == 7
    assert hardware.device_used_bytes(1) is None
    running.is_initialized = lambda: False
    assert hardware.device_used_bytes() is None


def test_a_driver_mismatch_is_one_line_and_cuda_may_still_work(use):
    use(T4, init_error="RM has detected an NVML/RM version mismatch.", driver=None)
    machine = hardware.describe()
    assert machine.kind == "cpu" and machine.nvml_reason == "RM has detected an NVML/RM version mismatch"
    assert doctor.diagnose(machine, INSTALLED)[0].remedy.startswith("Restart the machine")
    use(T4, init_error="RM has detected an NVML/RM version mismatch.")
    machine = hardware.describe()
    assert machine.kind == "cuda" and machine.gpus == (replace(T4, driver=None, free_bytes=None),)
    (finding,) = [found for found in doctor.diagnose(machine, INSTALLED) if found.subject == "NVML"]
    assert finding.level == "warning" and finding.remedy.startswith("Restart the machine")


def test_a_missing_nvidia_ml_py_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # what Python takes for "not importable"
    machine = hardware.describe()
    assert machine.nvml_reason == "nvidia-ml-py is not installed"
    assert doctor.diagnose(machine, INSTALLED)[0].remedy == "pip install nvidia-ml-py"


def test_a_container_without_its_gpus_is_distinguished_from_a_machine_without(use, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: 580.1")
    assert "no GPU was given to this container" in hardware.describe().cuda_reason
    use()
    assert hardware.describe().cuda_reason == "this machine has no NVIDIA GPU"


def test_a_gpu_that_torch_cannot_use_is_named_with_the_remedy(use, monkeypatch):
    use(T4)
    monkeypatch.setattr(hardware, "torch_build", lambda: ("2.13.0+cpu", False))
    machine = hardware.describe()
    assert machine.kind == "cpu" and machine.gpus == (T4,) and "core" in machine.name
    finding = doctor.diagnose(machine, INSTALLED)[0]
    assert finding.level == "warning" and "pip uninstall -y torch" in finding.remedy
    assert "Tesla T4" in finding.text and "2.13.0+cpu is built without CUDA" in finding.text
    assert hardware.supports("cuda", machine) == (False, "needs an NVIDIA GPU (torch 2.13.0+cpu is built without CUDA)")


def test_torch_is_read_from_its_version_file_alone(monkeypatch, tmp_path):
    monkeypatch.undo()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch/version.py").write_text("__version__ = '2.99.0+cu130'\ncuda: str | None = '13.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert hardware.torch_build() == ("2.99.0+cu130", True)
    (tmp_path / "torch/version.py").write_text("__version__ = '2.99.0+cpu'\ncuda = None\n")
    assert hardware.torch_build() == ("2.99.0+cpu", False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert hardware.torch_build() == (None, False)


@pytest.mark.parametrize(
    ("value", "shown", "words"),
    [
        (None, 2, None),
        ("0", 1, None),
        ("1,0", 2, None),
        ("GPU-ab,GPU-aa", 2, None),
        ("", 0, "empty.*hides every GPU"),
        ("  ", 0, "empty"),
        ("-1", 0, "'-1'.*every GPU is hidden"),
        ("0,0", 0, "named twice.*every GPU is hidden"),
        ("0,-1,1", 1, "'-1'.*only the 1 before it can be used"),
        ("0,,1", 1, "''.*named twice"),
    ],
)
def test_what_cuda_visible_devices_hides_is_reported(value, shown, words):
    reason = hardware.hidden(value, shown)
    assert reason is None if words is None else re.search(words, reason)
    assert reason is None or "CUDA_VISIBLE_DEVICES" in reason


@pytest.mark.parametrize("value", ["", "-1", "abc", "0,0", "GPU-zz"])
def test_hidden_gpus_mean_the_cpu_with_the_reason_and_the_remedy(use, monkeypatch, value):
    use(T4, driver=[], driver_reason="the CUDA driver reports: no CUDA-capable device is detected (cuInit: 100)")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    machine = hardware.describe()
    assert machine.kind == "cpu" and machine.gpus == () and machine.cuda_visible_devices == value
    assert machine.cuda_reason == machine.visible_reason and "CUDA_VISIBLE_DEVICES" in machine.cuda_reason
    finding = doctor.diagnose(machine, INSTALLED)[0]
    assert finding.level == "warning" and "unset CUDA_VISIBLE_DEVICES" in finding.remedy


def test_a_list_that_ends_early_is_reported_and_the_rest_is_used(use, monkeypatch):
    use(T4, H200, driver=[replace(T4, driver=None, free_bytes=None)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,5")
    machine = hardware.describe()
    assert machine.gpus == (T4,) and "only the 1 before it" in machine.visible_reason


def run_driver_script(monkeypatch, capsys, cu_init=0):
    """Run in this process the script that normally asks the CUDA driver in a child process; return the script's JSON
    output as an object.

    A stub of libcuda has an H200 and a T4, fastest first. `cu_init`: error code that cuInit returns; `monkeypatch`,
    `capsys`: pytest's.
    """
    gpus = [(b"NVIDIA H200", 0xBB, 9, 0), (b"Tesla T4", 0xAA, 7, 5)]

    def write(reference, value):
        reference._obj.value = value
        return 0

    cuda = SimpleNamespace(
        cuInit=lambda flags: cu_init,
        cuGetErrorString=lambda code, text: write(text, b"no CUDA-capable device is detected"),
        cuDeviceGetCount=lambda count: write(count, len(gpus)),
        cuDeviceGet=lambda device, index: write(device, index),
        cuDeviceGetName=lambda name, size, device: setattr(name, "value", gpus[device][0]),
        cuDeviceGetUuid_v2=lambda key, device: ctypes.memset(key, gpus[device][1], 16) and None,
        cuDeviceTotalMem_v2=lambda total, device: write(total, 150 if device == 0 else 16),
        cuDeviceGetAttribute=lambda value, which, device: write(value, gpus[device][which - 73]),
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda library: cuda)
    monkeypatch.setattr(sys, "argv", ["-c", "libcuda.so.1"])
    exec(hardware.DRIVER_SCRIPT, {})
    return json.loads(capsys.readouterr().out)


def test_the_driver_is_queried_without_a_context(monkeypatch, capsys):
    h200, t4 = run_driver_script(monkeypatch, capsys)
    assert h200["uuid"] == "GPU-" + "-".join("b" * length for length in (8, 4, 4, 4, 12))
    assert (h200["index"], h200["name"], h200["memory_bytes"]) == (0, "NVIDIA H200", 150)
    assert (t4["index"], t4["name"], t4["capability"]) == (1, "Tesla T4", [7, 5])


def test_the_drivers_own_words_come_through(monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"no CUDA-capable device is detected \(cuInit: 100\)"):
        run_driver_script(monkeypatch, capsys, cu_init=100)


def test_a_driver_that_fails_in_the_child_leaves_a_reason(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(ctypes, "CDLL", lambda library: None)  # here it loads; the child meets what is really there
    monkeypatch.setattr(hardware, "DRIVER_SCRIPT", "import sys; sys.exit('no luck')")
    assert hardware.ask_driver.__wrapped__(None, None) == ([], "the CUDA driver reports: no luck")
    monkeypatch.setattr(hardware, "DRIVER_SCRIPT", """print('[{"index": 0, "uuid": "GPU-1", "capability": [9, 0]}]')""")
    assert hardware.ask_driver.__wrapped__(None, None) == ([Gpu(0, "GPU-1", capability=(9, 0))], None)


# What a claim may ask for


@pytest.mark.parametrize(
    ("feature", "machine", "missing"),
    [
        ("any", PLAIN, ""),
        ("cuda", GOOD, ""),
        ("cuda", PLAIN, "needs an NVIDIA GPU"),
        ("sm80", GOOD, ""),
        ("sm80", PLAIN, "needs an NVIDIA GPU"),
        ("sm80", replace(GOOD, gpus=(T4,)), "needs compute capability 8.0 or more, this is 7.5"),
        ("sm80", replace(GOOD, gpus=(Gpu(0),)), "needs compute capability 8.0 or more, this one's is unknown"),
        ("sm80", replace(PLAIN, cpu_features=("amx_bf16",)), "needs an NVIDIA GPU"),
        ("gpus2", replace(GOOD, gpus=(H200, T4)), ""),
        ("gpus2", GOOD, "needs two GPUs, this machine shows one"),
        ("gpus2", PLAIN, "needs an NVIDIA GPU"),
        ("text", GOOD, "nothing to measure"),
    ],
)
def test_supports_names_what_is_missing(feature, machine, missing):
    met, words = hardware.supports(feature, machine)
    assert met is (missing == "")
    assert missing in words and bool(words) is bool(missing)


def test_supports_rejects_an_unknown_feature():
    with pytest.raises(ValueError, match=r"'sm90'.*any, cuda, sm80"):
        hardware.supports("sm90", GOOD)


# The CPU and its limits

SAPPHIRE_RAPIDS = """processor	: 0
model name	: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
flags		: fpu sse2 avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8

processor	: 1
model name	: something else
flags		: fpu
"""
AVX2 = "processor : 0\nmodel name : AMD EPYC 7763 64-Core Processor\nflags : fpu sse2 avx2 avx512foo\n"
GRAVITON2 = "processor : 0\nFeatures : fp asimd fphp asimdhp\nCPU implementer : 0x41\nCPU part : 0xd0c\n"
GRAVITON3 = "processor : 0\nFeatures : fp asimd fphp asimdhp sve bf16\nCPU implementer : 0x41\nCPU part : 0xd40\n"
M2 = "machdep.cpu.brand_string: Apple M2\nhw.optional.arm.FEAT_BF16: 1\nhw.optional.arm.FEAT_FP16: 1\n"
M1 = "machdep.cpu.brand_string: Apple M1\nhw.optional.arm.FEAT_BF16: 0\nhw.optional.arm.FEAT_FP16: 1\n"


@pytest.mark.parametrize(
    ("text", "model", "features", "bf16"),
    [
        (
            SAPPHIRE_RAPIDS,
            "Intel Xeon Platinum 8481C",
            ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16"),
            True,
        ),
        (AVX2, "AMD EPYC 7763", ("avx2",), False),
        (GRAVITON2, "Neoverse-N1", ("asimdhp",), False),
        (GRAVITON3, "Neoverse-V1", ("bf16", "asimdhp"), True),
        (M2, "Apple M2", ("bf16", "asimdhp"), True),
        (M1, "Apple M1", ("asimdhp",), False),
        ("processor : 0\ncpu : POWER9\n", None, None, None),
        ("", None, None, None),
    ],
)
def test_cpu_is_read_as_far_as_it_tells(text, model, features, bf16):
    assert hardware.parse_cpu(text) == (model, features)
    assert replace(PLAIN, cpu_features=features).native_bf16 is bf16


def test_the_cpus_name_and_features_are_those_of_cpuinfo(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(SAPPHIRE_RAPIDS)
    machine = hardware.describe()
    assert "amx_bf16" in machine.cpu_features and machine.name.startswith("Intel Xeon Platinum 8481C, ")
    assert machine.shm_bytes is None


def write_files(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


V1_FREE = "9223372036854771712\n"
GIB = 2**30


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, None, None)),
        ({"proc/self/cgroup": "0::/\n"}, (None, None, None)),
        (  # v2 in a container; of the 3 GiB in use, 1 GiB is page cache
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {GIB}\n",
                "sys/fs/cgroup/cpu.max": "150000 100000\n",
            },
            (8 * GIB, 6 * GIB, 1.5),
        ),
        (  # v2: no limit of its own, but one above; the quota's period is not the usual one
            {
                "proc/self/cgroup": "0::/job/task\n",
                "sys/fs/cgroup/job/task/memory.max": "max\n",
                "sys/fs/cgroup/job/task/cpu.max": "max 100000\n",
                "sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/job/memory.current": f"{5 * GIB}\n",
                "sys/fs/cgroup/job/cpu.max": "100000 50000\n",
            },
            (4 * GIB, 0, 2.0),
        ),
        (  # v1, as seen from inside a container: the path named is the host's and does not exist here
            {
                "proc/self/cgroup": "9:name=systemd:/docker/12\n4:memory:/docker/12\n2:cpu,cpuacct:/docker/12\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            (2 * GIB, 2 * GIB - GIB // 2, 4.0),
        ),
        (  # v1 without limits
            {
                "proc/self/cgroup": "4:memory:/user\n1:cpu:/\n0::/\n",
                "sys/fs/cgroup/memory/user/memory.limit_in_bytes": V1_FREE,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_FREE,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            (None, None, None),
        ),
    ],
)
def test_cgroup_limits_of_both_versions(monkeypatch, tmp_path, files, expected):
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    write_files(tmp_path, files)
    assert hardware.cgroup_limits() == expected


def test_a_cgroups_limits_bound_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    write_files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1000000\n",
            "sys/fs/cgroup/memory.current": "400000\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
        },
    )
    machine = hardware.describe()
    assert (machine.memory_bytes, machine.memory_available_bytes) == (1_000_000, 600_000)
    assert (machine.cpu_cores, machine.cpu_quota, machine.machine_cores) == (1, 0.5, os.cpu_count())
