"""Regressions planted in the libraries, and what the comparison with the night before says of each."""

import json
import subprocess
import sys

import pytest
from nights import NAME, night, sabotaged

from perf_helpers.course.changes import compare

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
    return night(tmp_path_factory.mktemp("usual"), speeds=True)


@pytest.mark.parametrize("sabotage", PLANTED)
def test_a_planted_regression_is_named_with_its_claim_or_run_and_its_category(usual, tmp_path, sabotage):
    found = compare(usual, night(tmp_path, sabotage))
    lines = [change["text"] for change in found.worse(("memory", "verdict"))]
    for words in PLANTED[sabotage]:
        assert any(all(word in line for word in words) for line in lines), (words, found.to_text())


def test_the_same_code_has_not_moved_by_a_byte(usual, tmp_path):
    found = compare(usual, night(tmp_path))
    assert [change for change in found.changes if change["axis"] != "speed"] == [], found.to_text()
    assert {run["lesson"] for run in usual["runs"]} == {NAME} and len(usual["runs"]) == 7
    assert any("7 runs of one name" in note for note in found.notes)


@pytest.mark.parametrize(("sabotage", "verb"), [("slow_step", "computes"), ("sleeping_step", "takes")])
def test_steps_that_take_40_percent_longer_are_worse(usual, sabotage, verb):
    """The steps are timed in a Python of their own: this one's fork server knows the libraries as they are."""
    with sabotaged(sabotage, slower=0.4):
        code = "import json; from perf_helpers.course import course; print(json.dumps(course.paces_of('cpu')))"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    slow = usual | {"paces": json.loads(done.stdout.splitlines()[-1])}
    told = [change["text"] for change in compare(usual, slow).worse(("speed",))]
    assert any(f"all recipes: a step {verb} 1." in text for text in told), compare(usual, slow).to_text()
    assert not compare(slow, usual).worse(("speed",)), "faster is not worse"
