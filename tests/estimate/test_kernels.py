"""What CUDA's kernels ask for, by rules; `tests/rehearsal/test_kernels_rehearsed.py` asks torch's own CUDA build."""

import json
from pathlib import Path

import kernel_cases
import pytest
import torch

from perf_helpers.estimate import kernels
from perf_helpers.estimate.allocator_settings import release
from perf_helpers.estimate.device import DeviceTracker
from perf_helpers.lab import processes


def asked(names, capability, tell=None):
    """What each case asks for as it is followed, {name: events}; to be called in a clean process."""
    found = {}
    for name in names:
        tracker = DeviceTracker(capability)
        tracker.is_there = True
        with tracker, torch.no_grad():
            run = (kernel_cases.RUNS | kernel_cases.DRAWN)[name]()
            first = len(tracker.log)
            made = run()  # noqa: F841, its results live until the log is read
            found[name] = kernel_cases.events((id(block), sign * block.bytes) for block, sign in tracker.log[first:])
    return found


@pytest.fixture(scope="module")
def followed():
    return processes.call(asked, list(kernel_cases.RUNS), (8, 0), timeout=120)


@pytest.fixture(scope="module")
def seen():
    return json.loads(Path(__file__).with_name("kernels.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", kernel_cases.RUNS)
def test_a_kernel_asks_for_what_cuda_was_seen_to_ask_for(followed, seen, name):
    assert followed[name] == seen[name]


def test_the_first_product_of_each_thread_brings_a_workspace():
    tracker = DeviceTracker((8, 0))
    tracker.is_there = True
    with tracker, torch.no_grad():
        square = torch.zeros(64, 64)
        square @ square
        square @ square
        tracker.phase = "backward"
        square @ square
    held = [block.bytes for block, sign in tracker.log if sign > 0 and block.operation == "cuBLAS workspace"]
    assert held == [8_519_680] * 2 == [kernels.Kernels((8, 0)).workspace_bytes] * 2


LT = {
    "a bias": lambda rows, bias: torch.nn.functional.linear(rows, torch.zeros(64, 64), bias),
    "a bias, in one matrix": lambda rows, bias: torch.addmm(bias, rows[0], torch.zeros(64, 64)),
    "a bias, then GELU": lambda rows, bias: torch._addmm_activation(bias, rows[0], torch.zeros(64, 64), use_gelu=True),
}
NOT_LT = {
    "no bias": lambda rows, bias: torch.nn.functional.linear(rows, torch.zeros(64, 64)),
    "a matrix added": lambda rows, bias: torch.addmm(torch.zeros(2, 64), rows[0], torch.zeros(64, 64)),
    "one column": lambda rows, bias: torch.addmm(bias[:1], rows[0], torch.zeros(64, 1)),
    "twice the bias": lambda rows, bias: torch.addmm(bias, rows[0], torch.zeros(64, 64), beta=2),
}


@pytest.mark.parametrize(("torch_version", "own"), [("2.10", True), ("2.11", True), ("2.12", False), ("2.14", False)])
@pytest.mark.parametrize("name", LT | NOT_LT)
def test_cublaslt_has_a_workspace_of_its_own_up_to_torch_2_11(name, torch_version, own):
    tracker = DeviceTracker((7, 5), rules=release(torch_version))
    tracker.is_there = True
    with tracker, torch.no_grad():
        rows, bias = torch.zeros(3, 2, 64), torch.zeros(64)
        for phase in ("forward", "forward", "backward"):
            tracker.phase = phase
            (LT | NOT_LT)[name](rows, bias)
    held = [block.bytes for block, sign in tracker.log if sign > 0 and block.operation == "cuBLASLt workspace"]
    assert held == ([2**20] * 2 if own and name in LT else [])
