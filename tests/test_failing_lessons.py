"""A lesson whose experiments fail says so: each cell continues, or ends with the run's own status and message."""

import failing_lessons
import pytest
from failing_lessons import MESSAGE, SOURCES

from trainmem.unknown import RunFailed

# What these compute in the notebook itself takes a second or two, all of them together some ten.
QUICK = {"01", "03", "05", "10", "12", "13", "16", "17"}
GO_ON = {"22", "23", "24"}  # that end with `RunFailed` nowhere


@pytest.mark.parametrize(
    "source",
    [pytest.param(path, marks=[] if path.stem[:2] in QUICK else pytest.mark.nightly) for path in SOURCES],
    ids=lambda path: path.stem,
)
def test_each_cell_goes_on_or_says_how_its_run_failed(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed = failing_lessons.run(source, tmp_path)
    assert failing_lessons.problems(failed) == []
    answer = [str(error) for _, error in failed if isinstance(error, RunFailed)]
    assert (not answer) == (source.stem[:2] in GO_ON)
    assert all(f"timed out: {MESSAGE}" in text and "timeout=" in text for text in answer)


def test_a_lesson_that_trips_over_a_failed_run_is_found(tmp_path):
    source = tmp_path / "99_trips.py"
    cells = [
        '# %% tags=["parameters"]\nprofile = "auto"\nout = ""',
        "# %%\nfrom perf_helpers import Lab\n\nlab = Lab(profile, out=out)",
        '# %%\nimport torch\n\nrun = lab.run(print, measure="none")',
        "# %%\ntorch.testing.assert_close(run.value, [1.0])\nafter = 1",
        "# %%\nafter + 1",
        "# %%\nfirst, second = run.value",
    ]
    source.write_text("\n\n".join(cells))
    failed = failing_lessons.run(source, tmp_path)
    assert [(number, type(error)) for number, error in failed] == [(3, TypeError), (4, NameError), (5, RunFailed)]
    assert [problem.partition(":")[0] for problem in failing_lessons.problems(failed)] == ["cell 3"]
