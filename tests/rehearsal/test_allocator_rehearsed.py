"""The double of torch's caching allocator against the allocator itself, in rehearsals: some of what
benchmarks/measure_allocator.py compares."""

import sys

import cloudpickle
import pytest

from perf_helpers.estimate.allocator_settings import RELEASES, Settings, release
from perf_helpers.lab import hardware
from perf_helpers.rehearsal import Rehearsal, build

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize("expandable", [False, True])
def test_a_nearly_full_card_is_counted_as_torch_counts_it(measure, expandable):
    """With several options at once, so that each rule takes part."""
    text = "garbage_collection_threshold:0.4,roundup_power2_divisions:[2:4,>:2],max_split_size_mb:48"
    text += f",large_segment_size_mb:26,expandable_segments:{expandable}"
    found = measure.rehearsed(measure.BARE, text, [f"test-{number}" for number in range(75)])
    assert found["traces"] == 75 and found["out_of_memory"] > 5 and found["mismatches"] == []


def test_default_settings_are_counted_as_torch_counts_them(measure):
    found = measure.rehearsed(measure.FULL, "", [f"test-{number}" for number in range(150)])
    assert found["traces"] == 150 and found["retries"] > 20 and found["mismatches"] == []


def test_a_double_with_another_rule_is_found_out(measure, monkeypatch):
    """The comparison can fail: 64 MiB instead of torch's 20 for a large segment."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "large_segment_size_mb:64")
    with Rehearsal(measure.ROOM) as stage:
        found = stage.submit(measure.compare, "", ["test-0", "test-1", "test-2", "test-3"]).result()
    assert found["mismatches"]


def test_the_rules_of_another_release_are_found_out(measure):
    """Free blocks of one size are frequent enough that the traces tell releases apart."""
    here, seeds = release(), [f"test-{number}" for number in range(40)]
    others = {each.ties: name for name, each in RELEASES.items() if each.ties != here.ties}
    with Rehearsal(measure.ROOM) as stage:
        found = {ties: stage.submit(measure.compare, "", seeds, name).result() for ties, name in others.items()}
        assert stage.submit(measure.compare, "", seeds).result()["mismatches"] == []
    assert len(others) == 2 and all(each["mismatches"] for each in found.values())


SAID = {
    "max_split_size_mb:20": True,
    "max_split_size_mb:19": False,
    "large_segment_size_mb:32,max_split_size_mb:20": False,
    "large_segment_size_mb:10": False,
    "max_non_split_rounding_mb:8": False,
    "garbage_collection_threshold:0.5": True,
    "per_process_memory_fraction:1.1": False,
    "roundup_power2_divisions:4": True,
    "roundup_power2_divisions:3": False,
    "roundup_power2_divisions:[256:1,512:0,>:8]": True,
    "roundup_power2_divisions:[3:2]": False,
    "expandable_segments:true": False,
    "throw_on_cudamalloc_oom:1": False,
    "pinned_num_register_threads:8 , backend:native": True,
    "max_split_size:20": False,
}


def accepted(text):
    import torch

    try:
        torch.cuda.memory._set_allocator_settings(text)
    except (ValueError, RuntimeError):
        return False
    return True


def test_settings_are_refused_where_torch_refuses_them(measure):
    def ours(text):
        try:
            return bool(Settings.parse(text))
        except ValueError:
            return False

    with Rehearsal(measure.ROOM) as stage:
        torch_says = stage.submit(lambda: {text: accepted(text) for text in SAID}).result()
    assert torch_says == SAID
    assert {text: ours(text) for text in SAID} == SAID


def test_a_record_stands_with_the_versions_that_rehearsed(measure):
    versions = sys.modules["runner"].stamp(rehearsed=True)["versions"]
    with Rehearsal(measure.ROOM) as stage:
        assert versions == stage.submit(hardware.versions).result() and versions["torch"]
