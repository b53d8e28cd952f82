"""The rules of `kernels` compared with torch's own CUDA build: if a torch release changes the memory that a kernel
requests from the allocator, a test fails here.
"""

import json
import sys
from pathlib import Path

import cloudpickle
import pytest

from perf_helpers import Lab
from trainmem.estimate.allocator_settings import release
from trainmem.measure import processes
from trainmem.rehearsal import Rehearsal, build, card

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)

ESTIMATE = str(Path(__file__).parents[1] / "estimate")
sys.path.append(ESTIMATE)
import kernel_cases  # noqa: E402
import test_kernels  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def torch_requests(names):
    """Return a function to run in a fresh process of a rehearsal; it returns {case: events in torch's allocator, in the
    form of `kernel_cases.events`}.

    `names`: names of the cases, see `kernel_cases`.
    """

    def work(_):
        import sys

        import torch

        sys.path.append(ESTIMATE)
        import kernel_cases

        kernel_cases.place = "cuda"
        kernel_cases.warmed_up()
        found = {}
        for name in names:
            with torch.no_grad():
                run = (kernel_cases.RUNS | kernel_cases.SINCE_2_14 | kernel_cases.DRAWN)[name]()
                torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
                made = run()
                entries = torch.cuda.memory._snapshot()["device_traces"][0]
                torch.cuda.memory._record_memory_history(enabled=None)
            del made
            found[name] = kernel_cases.events(
                (entry["addr"], entry["size"] if entry["action"] == "alloc" else -entry["size"])
                for entry in entries
                if entry["action"] in ("alloc", "free_completed")
            )
        return found

    return work


def names_of(capability, cases=(*kernel_cases.RUNS, *kernel_cases.DRAWN)):
    """Return the names of the `cases` that the installed release can run on a GPU of this compute capability."""
    names = [*cases, *(kernel_cases.SINCE_2_14 if release().groups_attention else ())]
    return [name for name in names if capability >= (8, 0) or ("flash" not in name and "bf16" not in name)]


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)], ids=str)
def test_kernels_ask_for_what_the_rules_say(capability):
    names = names_of(capability)
    with Rehearsal(card(None, capability, "40GB")) as stage:
        run = Lab("gpu", executor=stage).run(torch_requests(names), measure="none")
    assert run.ok, run.message
    modelled = processes.call(test_kernels.requests, names, capability, timeout=120)
    assert modelled == run.value


def of_all_kinds(_):
    """Run a batch norm by cuDNN, a matmul by a Triton kernel, and an embedding's backward over many tokens; return the
    shapes of the results.
    """
    import torch

    images = torch.zeros(2, 8, 6, 6, device="cuda", requires_grad=True)
    torch.nn.BatchNorm2d(8).cuda()(images).sum().backward()
    column, row = torch.zeros(2, 32, 1, device="cuda"), torch.zeros(2, 1, 64, device="cuda")
    weight = torch.zeros(1000, 8, device="cuda", requires_grad=True)
    tokens = torch.zeros(5000, dtype=torch.int64, device="cuda")
    torch.nn.functional.embedding(tokens, weight).sum().backward()
    return [list(each.shape) for each in (images.grad, torch.bmm(column, row), weight.grad)]


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [(7, 0), (8, 9), (12, 0)], ids=str)
def test_kernels_of_all_kinds_are_answered(capability):
    with Rehearsal(card(None, capability, "40GB")) as stage:
        run = Lab("gpu", executor=stage).run(of_all_kinds, measure="none")
    assert run.ok, run.message
    assert run.value == [[2, 8, 6, 6], [2, 32, 64], [1000, 8]]


if __name__ == "__main__":  # adds to `tests/estimate/kernels.json` what the installed release changed
    with Rehearsal(card(None, (8, 0), "40GB")) as stage:
        names = names_of((8, 0), kernel_cases.RUNS)
        seen = Lab("gpu", executor=stage).run(torch_requests(names), measure="none").value
    record, newest = Path(ESTIMATE, "kernels.json"), release().torch
    known = json.loads(record.read_text(encoding="utf-8"))
    for name, events in seen.items():
        before = [since for since in known.setdefault(name, {}) if since < newest]
        if not before or known[name][before[-1]] != events:
            known[name][newest] = events
    lines = (f"{json.dumps(name)}: {json.dumps(events)}" for name, events in known.items())
    record.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
