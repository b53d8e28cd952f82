"""The rules for the memory requests of CUDA's kernels, compared with recorded requests of torch's CUDA builds.

`tests/rehearsal/test_kernels_rehearsed.py` compares the rules with the CUDA build that is installed for rehearsals.
"""

import json
from pathlib import Path

import kernel_cases
import pytest
import torch

from trainmem.estimate.allocator_settings import RELEASES, is_since, release
from trainmem.estimate.device import DeviceTracker
from trainmem.estimate.device_arguments import Placement
from trainmem.measure import processes


def requests(names, capability, torch_version=None, tell=None):
    """Trace cases, and return {case: its requests to the allocator}; call this in a fresh process.

    A request is the bytes of a block, or ~n if the n-th block is freed.

    Args:
        names: names of the cases.
        capability: compute capability of the GPU.
        torch_version: the release whose rules are used; None: the installed one.
        tell: not used; `processes.call` passes it.
    """
    found = {}
    for name in names:
        tracker = DeviceTracker(capability, rules=release(torch_version))
        tracker.weights = Placement.DEVICE
        with tracker, torch.no_grad():
            kernel_cases.warmed_up()
            run = (kernel_cases.RUNS | kernel_cases.SINCE_2_14 | kernel_cases.DRAWN)[name]()
            first = len(tracker.log)
            made = run()  # noqa: F841, its results live until the log is read
            found[name] = kernel_cases.events((id(block), sign * block.bytes) for block, sign in tracker.log[first:])
    return found


SEEN = json.loads(Path(__file__).with_name("kernels.json").read_text(encoding="utf-8"))
CHANGED = [each for each in RELEASES if any(each in case for case in SEEN.values())]


@pytest.fixture(scope="module", params=CHANGED)
def recorded_and_traced(request):
    """Return two dicts {case: requests to the allocator} for one torch release: the requests that were recorded under
    the release, and those that a trace has under the release's rules.
    """
    seen = {}
    for name, case in SEEN.items():
        for since, events in case.items():
            if is_since(since, release(request.param)):
                seen[name] = events
    return seen, processes.call(requests, list(seen), (8, 0), request.param, timeout=120)


@pytest.mark.parametrize("name", SEEN)
def test_a_kernel_asks_for_what_cuda_was_seen_to_ask_for(recorded_and_traced, name):
    seen, traced = recorded_and_traced
    if name in seen:
        assert traced[name] == seen[name]
    else:
        assert name in kernel_cases.SINCE_2_14.keys() | kernel_cases.LATER


def test_every_case_and_the_newest_release_are_recorded():
    assert SEEN.keys() == kernel_cases.RUNS.keys() | kernel_cases.SINCE_2_14.keys()
    assert CHANGED == ["2.13", "2.14", "2.15"]


def test_before_torch_2_15_the_first_matmul_of_each_thread_takes_a_workspace_and_keeps_it():
    tracker = DeviceTracker((8, 0), rules=release("2.14"))
    tracker.weights = Placement.DEVICE
    with tracker, torch.no_grad():
        square = torch.zeros(64, 64)
        square @ square
        square @ square
        tracker.phase = "backward"
        square @ square
    held = [block.bytes for block, sign in tracker.log if sign > 0 and block.operation == "cuBLAS workspace"]
    assert held == [8_519_680] * 2


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
    tracker.weights = Placement.DEVICE
    with tracker, torch.no_grad():
        rows, bias = torch.zeros(3, 2, 64), torch.zeros(64)
        for phase in ("forward", "forward", "backward"):
            tracker.phase = phase
            (LT | NOT_LT)[name](rows, bias)
    held = [block.bytes for block, sign in tracker.log if sign > 0 and block.operation == "cuBLASLt workspace"]
    assert held == ([2**20] * 2 if own and name in LT else [])
    assert sum(block.operation == "cuBLAS workspace" for block, sign in tracker.log if sign > 0) == 2


@pytest.mark.parametrize(("torch_version", "held"), [("2.11", [8_519_680, 2**20]), ("2.13", [2**20])])
def test_since_torch_2_12_a_workspace_of_its_own_is_all_that_cublaslt_takes(torch_version, held, monkeypatch):
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    tracker = DeviceTracker((7, 5), rules=release(torch_version))
    tracker.weights = Placement.DEVICE
    with tracker, torch.no_grad():
        LT["a bias"](torch.zeros(3, 2, 64), torch.zeros(64))
    assert [block.bytes for block, sign in tracker.log if sign > 0 and "workspace" in block.operation] == held


def held_workspaces(torch_version):
    """Return ([bytes of each workspace that is never freed], [bytes of each workspace that is freed]) in two calls of
    mm and two of addmm.

    `torch_version`: the release whose rules are used.
    """
    tracker = DeviceTracker((8, 0), rules=release(torch_version))
    tracker.weights = Placement.DEVICE
    with tracker, torch.no_grad():
        for _ in range(2):
            torch.mm(torch.zeros(8, 8), torch.zeros(8, 8))
            torch.addmm(torch.zeros(8), torch.zeros(8, 8), torch.zeros(8, 8))
    events = [(block, sign) for block, sign in tracker.log if "workspace" in block.operation]
    freed = {id(block) for block, sign in events if sign < 0}
    kept = [block.bytes for block, sign in events if sign > 0 and id(block) not in freed]
    return kept, [block.bytes for block, sign in events if sign < 0]


def test_since_torch_2_15_each_matmul_frees_its_workspace(monkeypatch):
    assert held_workspaces("2.14") == ([8_519_680], [])
    assert held_workspaces("2.15") == ([], [8_519_680, 2**20] * 2)
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert held_workspaces("2.15") == ([8_519_680], [])
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    assert held_workspaces("2.15") == ([8_519_680, 2**20], [])
