"""The estimate for CUDA against torch's own allocator, over trainings of a set that is not the recorded one."""

import sys
from pathlib import Path

import cloudpickle
import pytest

from perf_helpers import Lab
from perf_helpers.rehearsal import Rehearsal, build, card

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import measure_cuda

cloudpickle.register_pickle_by_value(measure_cuda)
SEED = 20


@pytest.mark.parametrize("capability", measure_cuda.CAPABILITIES, ids=str)
def test_allocated_is_what_torchs_allocator_says(capability, tmp_path):
    found = []
    with Rehearsal(card(None, capability, measure_cuda.MEMORY)) as stage:
        lab = Lab("gpu", executor=stage)
        for number in range(400):
            one = measure_cuda.training(number, SEED)
            ordinary = one.processes == 1 and "torch_" not in one.arguments["optim"].removeprefix("adamw_torch_fused")
            if one.capability == capability and ordinary and len(found) < 4:
                row = measure_cuda.compare(lab, one, tmp_path)
                found += [row] if "rehearsed" in row else []
    assert len(found) == 4
    for row in found:
        assert row["estimated"]["allocated"] == row["rehearsed"]["allocated"], (row["architecture"], row["arguments"])
        assert row["estimated"]["reserved"] == pytest.approx(row["rehearsed"]["reserved"], rel=0.03)
