"""A lesson leaves no process behind. It is ok only if every cell ran and the results were written by this run."""

import json
from pathlib import Path

import nbformat
import psutil
import pytest
from toys import decision

from perf_helpers.course import lesson_process
from perf_helpers.course.lesson_process import judge


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
        (json.dumps(RECORD | {"claims": [{"id": "x", "verdict": "holds"}]}), "damaged"),
        ("[]", "damaged"),
    ],
)
def test_only_complete_results_of_the_lesson_itself_count(tmp_path, text, words):
    cell = nbformat.v4.new_code_cell("1", execution_count=1)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "a.ipynb")
    (tmp_path / "a.json").write_text(text)
    status, message, kept = judge("a", tmp_path, 0)
    assert words in message and status == ("failed" if words else "ok") and bool(kept) == (not words)


def test_a_lesson_has_to_decide_a_claim_but_for_a_rehearsal(tmp_path):
    for rehearsed, status in ((True, "ok"), (False, "failed")):
        nbformat.write(nbformat.v4.new_notebook(), tmp_path / "20_inference.ipynb")
        reported = {"lesson": "20_inference", "claims": [], "machine": {"rehearsed": rehearsed}}
        (tmp_path / "20_inference.json").write_text(json.dumps(RECORD | reported))
        assert judge("20_inference", tmp_path, 0).status == status


def test_a_cell_that_runs_for_long_is_reported_once_and_when_its_time_has_doubled(
    tmp_path, monkeypatch, capsys, copied
):
    target, clock = tmp_path / "05.ipynb", iter([0, 30, 60, 100, 125, 200, 300])
    monkeypatch.setattr(lesson_process, "time", copied(lesson_process.time, monotonic=lambda: next(clock)))
    watch = lesson_process._Watch(target)

    def running(identity):
        states = {"a": "completed", identity: "running"}
        cells = [
            {"id": key, "source": f"{key} = 1\nmore", "metadata": {"papermill": {"status": state}}}
            for key, state in states.items()
        ]
        target.write_text(json.dumps({"cells": cells}))

    running("slow")
    for _ in range(5):  # after 0, 30, 60, 100 and 125 s
        watch()
    running("next")
    watch()
    target.write_text("{")  # half written
    watch()
    reported = capsys.readouterr().err.split("\n")
    assert [line.strip() for line in reported if line] == [
        "running for 60 s in this cell: slow = 1",
        "running for 125 s in this cell: slow = 1",
    ]


def test_what_outlives_the_killed_kernel_is_ended_and_its_temporary_files_are_gone(ran):
    pid = int((ran[1] / "orphan.pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not Path((ran[1] / "left").read_text()).exists()
