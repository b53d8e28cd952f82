"""The rules of `kernels` against torch's own CUDA build: a torch that changes one of them turns a test red here."""

import sys
from pathlib import Path

import cloudpickle
import pytest

from perf_helpers import Lab
from perf_helpers.lab import processes
from perf_helpers.rehearsal import Rehearsal, build, card

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)

ESTIMATE = str(Path(__file__).parents[1] / "estimate")
sys.path.append(ESTIMATE)
import kernel_cases  # noqa: E402
import test_kernels  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def asked_of_torch(names):
    """A function for a clean process of a rehearsal: what each case asks torch's allocator for, {name: bytes}."""

    def work(_):
        import sys

        import torch

        sys.path.append(ESTIMATE)
        import kernel_cases

        kernel_cases.place = "cuda"
        found = {}
        for name in names:
            with torch.no_grad():
                run = kernel_cases.CASES[name][0]()
                torch.cuda.memory._record_memory_history(max_entries=10**6, context=None)
                made = run()
                entries = torch.cuda.memory._snapshot()["device_traces"][0]
                torch.cuda.memory._record_memory_history(enabled=None)
            del made
            live, sizes = {}, []
            for entry in entries:
                if entry["action"] == "alloc":
                    live[entry["addr"]] = entry["size"]
                    sizes.append(entry["size"])
                elif entry["action"] == "free_completed":
                    sizes.append(-live.pop(entry["addr"]))
            found[name] = sizes
        return found

    return work


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0)], ids=str)
def test_kernels_ask_for_what_the_rules_say(capability):
    names = [name for name in kernel_cases.CASES if "flash" not in name or capability >= (8, 0)]
    with Rehearsal(card(None, capability, "40GB")) as stage:
        run = Lab("gpu", executor=stage).run(asked_of_torch(names), measure="none")
    assert run.ok, run.message
    ours = processes.call(test_kernels.asked, names, capability, timeout=120)
    sizes = ({name: kernel_cases.ordered(each[name]) for name in names} for each in (ours, run.value))
    assert next(sizes) == next(sizes)
