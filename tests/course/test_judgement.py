"""What papermill leaves is read again: a lesson is ok only if all of it ran and its results are its own."""

import json

import nbformat
import pytest
from toys import decision

from perf_helpers.course.execution import judge


def test_a_killed_lesson_names_the_cell_it_hung_in(tmp_path):
    cell = nbformat.v4.new_code_cell("loop()  # for ever", metadata={"papermill": {"status": "running"}})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "a.ipynb")
    status, message, _ = judge("a", tmp_path, None, 60)
    assert (status, message) == ("timed out", "killed after 60 s in: loop()  # for ever")


RECORD = {"lesson": "a", "complete": True, "claims": [decision("x")], "runs": []}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps(RECORD), ""),
        (json.dumps(RECORD | {"complete": False}), "not complete"),
        (json.dumps(RECORD | {"lesson": "09_other"}), "that of 09_other"),
        (json.dumps(RECORD)[:-40], "damaged"),
        ("[]", "damaged"),
    ],
)
def test_only_complete_results_of_the_lesson_itself_count(tmp_path, text, words):
    cell = nbformat.v4.new_code_cell("1", execution_count=1)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "a.ipynb")
    (tmp_path / "a.json").write_text(text)
    status, message, kept = judge("a", tmp_path, 0)
    assert words in message and status == ("failed" if words else "ok") and bool(kept) == (not words)


def test_a_lesson_without_claims_of_its_own_need_not_decide_one(tmp_path):
    for name, status in (("20_inference", "ok"), ("21_other", "failed")):
        nbformat.write(nbformat.v4.new_notebook(), tmp_path / f"{name}.ipynb")
        (tmp_path / f"{name}.json").write_text(json.dumps(RECORD | {"lesson": name, "claims": []}))
        assert judge(name, tmp_path, 0).status == status
