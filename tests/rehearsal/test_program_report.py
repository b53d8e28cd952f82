"""The report of a rehearsed program, made from the files of its processes; torch is not needed."""

import json
import zipfile

import pytest

from trainmem.rehearsal import CARDS, program_report
from trainmem.rehearsal.marked_files import MARK

GIB = 1 << 30
PROCESS = {
    "pid": 7,
    "rank": "1",
    "arguments": ["train.py"],
    "devices": 1,
    "steps": 3,
    "phases": {"set-up": [GIB, 2 * GIB], "backward pass": [3 * GIB, 4 * GIB]},
    "ended": True,
    "error": None,
    "answers": {},
    "saved": [],
}


def read(folder, code, *processes, assumes=False):
    for number, process in enumerate(processes):
        (folder / f"{number}.json").write_text(json.dumps(PROCESS | {"pid": number} | process))
    return program_report.read(folder, code, CARDS["a100"], assumes)


def error(kind):
    return {"kind": kind, "message": "NeedsValues: none", "line": "train.py, line 3, in main: if loss < best:"}


@pytest.mark.parametrize(
    ("kind", "code", "status", "exit_code"),
    [
        (None, 0, "finished", 0),
        ("needs values", 1, "needs values", 3),
        ("needs a library", 1, "needs a library", 3),
        ("out of memory", 1, "out of memory", 4),
        ("failed", 7, "failed", 7),
        (None, -9, "failed", 137),
        ("needs values", 0, "finished", 0),  # it went on by itself
    ],
)
def test_each_end_has_its_exit_code_and_the_peaks_are_there_whatever_the_end(tmp_path, kind, code, status, exit_code):
    run = read(tmp_path, code, {"error": kind and error(kind)})
    assert (run.status, run.exit_code) == (status, exit_code)
    text = repr(run)
    assert all(words in text for words in ("A100", "3.00 GiB allocated, 4.00 GiB reserved", "set-up", "3 optimizer"))
    assert ("train.py, line 3" in text) == bool(kind)
    assert ("--assume" in text) == status.startswith("needs")


@pytest.mark.parametrize(("assumes", "advised"), [(False, True), (True, False)])
def test_assuming_values_is_advised_only_if_they_were_not_assumed(tmp_path, assumes, advised):
    for kind, other in (("needs values", "leave this line out"), ("needs a library", "use another operation")):
        run = read(tmp_path, 1, {"error": error(kind)}, assumes=assumes)
        assert ("add --assume" in repr(run)) == advised and other in repr(run)


def test_a_program_that_fails_after_assumed_answers_says_that_they_may_be_the_cause(tmp_path):
    failed = {"error": error("failed"), "answers": {"comparisons of an assumed number, false": 3}}
    assert "an assumed answer may be the cause" in repr(read(tmp_path, 1, failed, assumes=True))
    assert "may be the cause" not in repr(read(tmp_path, 1, {"error": error("failed")}, assumes=True))


def test_two_ranks_that_wrote_one_file_without_values_have_it_removed_once(tmp_path):
    """If two ranks saved to one path, the report removes the saved file, and puts the user's file back at this path."""
    name, old = tmp_path / "model.pt", tmp_path / "model.pt.before-rehearsal"
    old.write_text("of the user")
    with zipfile.ZipFile(name, "w") as file:
        file.writestr(f"model/{MARK}", "1")
    of_each = {"opened": [str(name)], "undo": [[str(old), str(name)]]}
    read(tmp_path, 0, of_each, of_each)
    assert name.read_text() == "of the user" and not old.exists()


def test_an_interrupted_program_is_not_one_that_failed(tmp_path):
    (tmp_path / "0.json").write_text(json.dumps(PROCESS))
    run = program_report.read(tmp_path, -2, CARDS["a100"], False, interrupted=True)
    assert (run.status, run.exit_code) == ("interrupted", 130) and "stack is above" not in repr(run)


def test_the_rank_that_ran_out_of_memory_decides_over_those_that_followed(tmp_path):
    run = read(tmp_path, 1, {"error": error("failed")}, {"error": error("out of memory")}, {"ended": False})
    assert run.status == "out of memory" and "killed" in repr(run)


def test_an_error_of_the_compiler_names_the_way_around_it(tmp_path):
    run = read(tmp_path, 1, {"error": error("failed") | {"message": "InductorError: no kernel"}})
    assert "TORCH_COMPILE_DISABLE=1" in repr(run)


def test_a_program_that_wants_more_cards_is_given_the_option(tmp_path):
    run = read(tmp_path, 1, {"error": error("failed") | {"message": "CUDA error: invalid device ordinal"}})
    assert "--processes" in repr(run)


def test_assumed_answers_are_named(tmp_path):
    two = {"answers": {"floating-point values read, 1": 4}}, {"answers": {"floating-point values read, 1": 5}}
    text = repr(read(tmp_path, 0, *two, assumes=True))
    assert "floating-point values read, 1: 9" in text and "--assume" in text


def test_files_of_weights_without_values_are_removed(tmp_path):
    weights, older = tmp_path / "model.safetensors", tmp_path / "older.pt"
    weights.touch()
    older.with_suffix(".aside").touch()
    saved, undo = [str(weights), str(tmp_path / "gone.pt")], [[str(older.with_suffix(".aside")), str(older)]]
    run = read(tmp_path, 0, {"saved": saved, "undo": undo})
    assert not weights.exists() and older.exists()
    assert "removed" in repr(run) and f"put back, e.g. {older}" in repr(run)


def test_a_command_that_uses_no_card_says_so(tmp_path):
    assert "No process" in repr(read(tmp_path, 0))
