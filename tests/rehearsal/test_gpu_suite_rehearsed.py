"""Rehearse the GPU suite at tiny sizes; its memory figures come from torch's own CUDA allocator."""

import sys
from pathlib import Path

import pytest

from trainmem.records import Store
from trainmem.rehearsal import build

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu_page
import measure_gpu
from gpu_rows import StoredRow

import build as build_page


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Rehearse two parts of the suite, and as many trainings of the part "estimate" as begin within 25 seconds.

    Return the path of the file with their rows.
    """
    out = tmp_path_factory.mktemp("gpu")
    common = ["--tiny", "--rehearse", "a100", "--out", str(out)]
    assert measure_gpu.main([*common, "--part", "ten", "--part", "tf32"]) == 0
    assert measure_gpu.main([*common, "--part", "estimate", "--seconds", "25"]) in (0, 3)
    return out / "tiny-rehearsed-a100.jsonl"


@pytest.mark.nightly
def test_a_rehearsed_suite_has_bytes_and_no_times(report):
    data = gpu_page.content(Store(report, StoredRow).read())
    assert data["machine"]["rehearsed"] and data["machine"]["name"] == "rehearsed A100 80 GiB"
    rows = {(row["part"], row["name"]): row for row in data["rows"]}
    for (part, name), row in rows.items():
        if part == "ten" and " against " not in name:  # all ten of the guides', fp16 and 8-bit Adam too
            (run,) = row["runs"]
            assert row["status"] == "ok" and run["memory"]["kind"] == "allocated", name
            assert 0 < sum(run["memory"]["breakdown"].values()) == run["memory"]["peak_bytes"], name
            assert run["memory"]["peak_bytes"] <= run["memory"]["reserved_bytes"] and run["timing"] is None
    assert rows["tf32", "fp16 and tf32"]["status"] == "ok"
    assert sum(part == "ten" and bool(row["runs"]) for (part, _), row in rows.items()) == 10
    assert not [row["name"] for row in rows.values() if row["speed_ratio"] or (row["value"] and row["part"] == "tf32")]


@pytest.mark.nightly
def test_its_claims_are_decided_by_memory_alone(report):
    data = gpu_page.content(Store(report, StoredRow).read())
    claims = {claim["id"]: claim for claim in data["claims"]}
    peaks = {row["name"]: row["runs"][0]["memory"]["peak_bytes"] for row in data["rows"] if row["runs"]}
    share = peaks["Adafactor"] / peaks["vanilla"]
    assert claims["adafactor-memory"]["value"] == share < 1 and claims["adafactor-memory"]["rehearsed"]
    assert claims["fp16-faster"]["verdict"] == "not testable here" and "rehearsal" in claims["fp16-faster"]["missing"]


@pytest.mark.nightly
def test_the_estimate_is_what_torchs_allocator_says(report):
    rows = build_page.held_against({"suite": build_page.of_suite(gpu_page.content(Store(report, StoredRow).read()))})
    assert rows
    for row in rows:
        answer, counted = row["peak_bytes"]
        assert answer == counted, row["name"]
        assert row["reserved_bytes"][0] == pytest.approx(row["reserved_bytes"][1], rel=0.03), row["name"]


@pytest.mark.nightly
def test_it_is_refused_as_measured(report):
    with pytest.raises(ValueError, match="was rehearsed"):
        gpu_page.keep(report, report.parent)
