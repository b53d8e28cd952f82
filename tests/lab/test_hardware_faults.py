"""The description of a machine whose libraries fail: an NVML that refuses every query, a missing one, a CUDA driver
without devices. The faulty libraries are real shared libraries, called through the real bindings.
"""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from trainmem.core import hardware
from perf_helpers.lab.doctor import diagnose
machine = hardware.describe()
assert hardware.Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine
assert hardware.device_used_bytes() is None
texts = [f"{each.text} {each.remedy}" for each in diagnose(machine) if each.subject in ("GPU", "NVML")]
print(json.dumps([machine.kind, machine.cuda_reason, machine.nvml_reason, texts]))
"""


def described(**environment):
    """Describe this machine in a new process; return [kind of device, why no CUDA, why no NVML, the doctor's findings].

    The findings are texts about the GPU and NVML, with remedies. `environment`: variables to set in that process.
    """
    kept = {name: os.environ[name] for name in os.environ.keys() - {"CUDA_VISIBLE_DEVICES"}}
    words = [sys.executable, "-c", CODE, json.dumps(sys.path)]
    done = subprocess.run(words, env=kept | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Return a function that compiles two stub libraries: an NVML, and a CUDA driver without devices.

    The function's arguments: the error code that every NVML function returns, and {name of an NVML function: its error
    code} for exceptions. It returns the environment variables with which a process uses the stubs.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    pynvml = pytest.importorskip("pynvml")
    if not compiler or sys.platform != "linux":
        pytest.skip("needs a C compiler, on Linux")
    with open(pynvml.__file__) as file:
        names = sorted(set(re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"\)', file.read())) - {"nvmlErrorString"})

    def compile_library(folder, library, functions, head=""):
        source = folder / "source.c"
        source.write_text(head + "".join(f"int {name}() {{ return {code}; }}\n" for name, code in functions.items()))
        subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / library, source], check=True)

    def make(all_codes, **codes):
        folder = tmp_path_factory.mktemp("libraries")
        head = 'const char *nvmlErrorString(int code) { return "Unknown Error"; }\n'
        compile_library(folder, "libnvidia-ml.so.1", dict.fromkeys(names, all_codes) | codes, head)
        head = 'int cuGetErrorString(int code, const char **text) { *text = "no device"; return 0; }\n'
        compile_library(folder, "libcuda.so.1", {"cuInit": 100}, head)
        return {"LD_LIBRARY_PATH": str(folder)}

    return make


@pytest.mark.parametrize("value", [None, "", "-1", "abc", "0,0", "GPU-00000000", "MIG-00000000", "0,1", " ", "Ü"])
def test_whatever_cuda_visible_devices_says_a_machine_without_gpus_is_a_cpu_with_the_reason(value):
    kind, reason, nvml_reason, texts = described(**({} if value is None else {"CUDA_VISIBLE_DEVICES": value}))
    if kind == "cuda" or nvml_reason is None:
        pytest.skip("there are GPUs here")
    assert kind == "cpu" and nvml_reason in reason and len(texts) == 1 and reason in texts[0]


@pytest.mark.daily(2)
@pytest.mark.parametrize("value", [None, "", "-1", "abc", "0,0", "GPU-00000000", "MIG-00000000"])
def test_a_driver_that_shows_nothing_is_reported_with_what_cuda_visible_devices_says(libraries, value):
    made = libraries(3, nvmlInit_v2=0) | ({} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    kind, reason, _, texts = described(**made)
    assert (kind, "the CUDA driver reports: no device (cuInit: 100)" in reason) == ("cpu", True)
    assert value is None or f"CUDA_VISIBLE_DEVICES={value!r}" in reason
    assert reason in texts[0] and ("unset" in texts[0]) == (value is not None)


@pytest.mark.daily(1)
@pytest.mark.parametrize("code", [3, 9, 18, 999])
def test_an_nvml_that_answers_every_query_with_an_error_costs_nothing_but_its_answers(libraries, code):
    """If NVML refuses every query, the machine is described as a CPU, with the CUDA driver's error "no device".

    In a second run NVML's initialization fails, too; then one line must say why. `code`: NVML's error: 3 not supported,
    9 driver not loaded, 18 driver and library do not match, 999 unknown.
    """
    for made in (libraries(code, nvmlInit_v2=0, nvmlInitWithFlags=0), libraries(code)):
        kind, reason, nvml_reason, texts = described(**made)
        assert kind == "cpu" and "no device (cuInit: 100)" in reason and texts
    assert nvml_reason and "\n" not in nvml_reason, "at its initialisation: one line with the reason"
