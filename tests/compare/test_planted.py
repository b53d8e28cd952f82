"""Regressions planted in the libraries are reported by the comparison with the previous nightly run."""

import pytest
from nights import NAME, night

from perf_helpers.compare.compare import compare

# What fails, and the words that must stand in a line for the worse: a claim or a run, and the category.
PLANTED = {
    "ignored_checkpointing": [("checkpointing-memory: holds -> refuted",), ("/checkpointing:", "activations +")],
    "fp32_states": [("adam8bit-memory: holds -> refuted",), ("/8-bit Adam:", "optimizer states +")],
    "summed_gradients": [("accumulation-same-gradient: holds -> refuted",)],
    "leaked_activation": [("/vanilla:", "after step", "activations +"), ("/8-bit Adam:", "activations +")],
    "plain_attention": [("sdpa-memory",), ("/vanilla:", "activations +", "at aten.")],
    "copied_batches": [("/vanilla:", "inputs +"), ("/accumulation:", "inputs +")],
}


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return night(tmp_path_factory.mktemp("usual"))


@pytest.mark.nightly
@pytest.mark.parametrize("sabotage", PLANTED)
def test_a_planted_regression_is_named_with_its_claim_or_run_and_its_category(usual, tmp_path, sabotage):
    found = compare(usual, night(tmp_path, sabotage))
    lines = [change["text"] for change in found.worse(("memory", "verdict"))]
    for words in PLANTED[sabotage]:
        assert any(all(word in line for word in words) for line in lines), (words, found.to_text())


@pytest.mark.nightly
def test_the_same_code_has_not_moved_by_a_byte(usual, tmp_path):
    found = compare(usual, night(tmp_path))
    assert [change for change in found.changes if change["axis"] != "speed"] == [], found.to_text()
    assert {run["lesson"] for run in usual["runs"]} == {NAME} and len(usual["runs"]) == 7
    assert any("7 runs of the same name" in note for note in found.notes)
