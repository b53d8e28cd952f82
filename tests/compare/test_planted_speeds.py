"""Steps that a planted regression makes longer are reported by the comparison with the previous nightly run.

These tests measure time, so nothing else may run at the same time: once, under other load, the steps without the
regression were slower than those with it.
"""

import json
import subprocess
import sys

import pytest
from nights import night, sabotaged

from perf_helpers.compare.compare import compare

pytestmark = [pytest.mark.nightly, pytest.mark.timed]


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return night(tmp_path_factory.mktemp("usual"), speeds=True)


@pytest.mark.parametrize("sabotage", ["slow_step", "sleeping_step"])
def test_steps_that_take_40_percent_longer_are_worse(usual, sabotage):
    """The steps are timed in a new Python, because this process's fork server has imported the libraries without the
    fault.
    """
    with sabotaged(sabotage, slower=0.4):
        code = "import json; from perf_helpers.compare import step_times as t; print(json.dumps(t.measure_here('cpu')))"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    slow = usual | {"paces": json.loads(done.stdout.splitlines()[-1])}
    listed = [change["text"] for change in compare(usual, slow).worse(("speed",))]
    assert any("all recipes: a step takes 1." in text for text in listed), compare(usual, slow).to_text()
    assert not compare(slow, usual).worse(("speed",)), "faster is not worse"
