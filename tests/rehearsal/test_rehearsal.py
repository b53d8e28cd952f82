"""Rehearsals, as far as they need neither torch's CUDA build nor a compiler: cards, what is missing, guarded cells."""

import ast
import json
import pickle
import subprocess
import sys
import weakref

import pytest

from perf_helpers import cli, doctor, hardware, rehearsal
from perf_helpers.rehearsal import build, lessons, rehearsal_process
from perf_helpers.rehearsal.rehearsal_process import variables_of
from perf_helpers.unknown import NeedsValues, Unknown


def test_a_command_of_the_users_own_has_no_snapshot(monkeypatch, capsys, tmp_path):
    words = ["rehearse", "--card", "t4", "--snapshot", str(tmp_path / "file"), "--", "python", "train.py"]
    monkeypatch.setattr(sys, "argv", ["perf-helpers", *words])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "--snapshot needs" in capsys.readouterr().err


def test_the_stand_in_reads_every_variable_of_a_card():
    native = "".join(path.read_text() for path in build.SOURCES.glob("*.[hc]*"))
    assert {name for name in variables_of(rehearsal.CARDS["t4"], "ledger") if f'"{name}"' not in native} == set()


def test_the_doctor_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(build.platform, "system", lambda: "Darwin")
    assert "needs Linux" in build.finding().text
    monkeypatch.undo()
    monkeypatch.setattr(build, "compiler", lambda: None)
    found = build.finding()
    assert "C++ compiler" in found.text and "g++" in found.remedy
    with pytest.raises(RuntimeError, match="C\\+\\+ compiler"):
        rehearsal.Rehearsal(rehearsal.CARDS["t4"])


def test_without_the_cuda_build_the_doctor_says_what_it_takes(monkeypatch, tmp_path):
    monkeypatch.setenv("PERF_HELPERS_HOME", str(tmp_path))
    monkeypatch.setattr(build, "problem", lambda: None)
    monkeypatch.setattr(hardware, "torch_build", lambda: ("2.13.0+cpu", False))
    assert build.interpreter() is None and "5 GB" in build.finding().text
    monkeypatch.setattr(hardware, "torch_build", lambda: ("2.13.0+cu130", True))
    assert str(build.interpreter()) == sys.executable and build.finding().level == "ok"


def test_an_environment_that_cannot_be_made_gives_pips_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("PERF_HELPERS_HOME", str(tmp_path))
    monkeypatch.setattr(build, "problem", lambda: None)
    monkeypatch.setattr(hardware, "torch_build", lambda: ("2.13.0+cpu", False))
    monkeypatch.setattr(build.venv, "create", lambda *_, **__: None)
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: one\nERROR: No space left on device\n")
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="No space left on device"):
        build.set_up()
    assert build.interpreter() is None


def test_the_environment_has_the_learners_packages_but_the_cuda_build():
    torch, *others = build._packages()
    assert torch.startswith("torch===") and "+" not in torch
    assert {"transformers", "matplotlib"} <= {line.partition("==")[0] for line in others}
    assert not any("pytest" in line for line in others)


# ---- a torch that nobody has tried with the stub


NEWER = {"cudaMemcpyBatchAsync", "ncclAllGatherV", "cuMemcpyBatchAsync", "cudaMallocHost", "cudaMemPoolCreateAlloc"}
AS_BEFORE = {"cudaMalloc", "cudaMemcpyAsync", "ncclAllGather", "ncclCommMemStats", "cudaMemGetInfo", "cublasSetMatrix"}


def test_a_function_that_copies_or_allocates_and_has_no_answer_is_named():
    assert build.unanswered(NEWER | AS_BEFORE) == sorted(NEWER - {"cudaMallocHost"})


def pretended(monkeypatch, tmp_path, version, names=()):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{version}'\n__all__ = []\n")
    (tmp_path / build.UNANSWERED).write_text("\n".join(names))
    monkeypatch.setattr(build, "_site_packages", lambda python: tmp_path)


@pytest.mark.parametrize(
    ("version", "names", "told"),
    [
        ("2.15.0+cu130", (), []),
        ("2.99.0a0+git", (), ["torch 2.99.0a0+git is untested", doctor.NEWEST_TORCH]),
        ("2.15.0", ("ncclAllGatherV",), ["copy or allocate memory: ncclAllGatherV"]),
        ("2.99.0", ("ncclAllGatherV",), ["torch 2.99.0 is untested", "ncclAllGatherV"]),
    ],
)
def test_a_rehearsal_says_whether_its_stub_matches_the_torch(monkeypatch, tmp_path, version, names, told):
    pretended(monkeypatch, tmp_path, version, names)
    found = build.doubts(tmp_path, tmp_path)
    assert bool(found) == bool(told) and all(words in found for words in told)


def test_a_rehearsal_by_a_torch_that_nobody_has_tried_warns_once(monkeypatch, tmp_path):
    pretended(monkeypatch, tmp_path, "2.99.0")
    monkeypatch.setattr(build, "set_up", lambda: tmp_path / "bin" / "python")
    monkeypatch.setattr(build, "library", lambda python: tmp_path)
    rehearsal_process._warn.cache_clear()
    with pytest.warns(UserWarning, match=r"torch 2\.99\.0 is untested") as warned:
        for _ in range(2):
            with rehearsal_process.command(rehearsal.CARDS["t4"]):
                pass
    assert len(warned) == 1


# ---- guarded cells


class Shell:
    """As much of IPython's shell as cells need."""

    def __init__(self):
        self.ast_transformers, self.user_ns = [], {}
        lessons.install(self)

    def run(self, source):
        tree = self.ast_transformers[0].visit(ast.parse(source))
        exec(compile(ast.fix_missing_locations(tree), "<cell>", "exec"), self.user_ns)


def test_a_statement_that_needs_values_is_left_out_and_told_and_the_rest_runs(capsys):
    shell = Shell()
    shell.user_ns["loss"] = Unknown("no values")
    shell.run("a = 1\nb = 2 if loss < 1 else 3\nc = a + 1\nprint(c, loss)\nprint(b + 1)\nif b > 2:\n    d = 1")
    assert shell.user_ns["c"] == 2
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"{lessons.TOLD} (line 2 of this cell: no values)",
        "2 unknown",
        "unknown",
        f"{lessons.TOLD} (line 6 of this cell: b could not be rehearsed)",
    ]


def test_an_expression_may_assign_and_what_it_yields_is_not_held(capsys):
    shell = Shell()
    shell.user_ns |= {"Model": type("Model", (), {}), "weakly": weakref.ref}
    shell.run("print(len(text := 'abc'))\nmodel = Model()\nseen = weakly(model)\nmodel\ndel model\nprint(text, seen())")
    assert capsys.readouterr().out == "3\nabc None\n"


def test_what_was_begun_is_unknown_too():
    shell = Shell()
    shell.user_ns["loss"] = Unknown("no values")
    shell.run("seen, table = [], {}\nfor i in range(3):\n    seen.append(i)\n    table[i] = loss > i\nx = seen[0]")
    assert isinstance(shell.user_ns["seen"], Unknown) and isinstance(shell.user_ns["table"], Unknown)
    assert isinstance(shell.user_ns["x"], Unknown)


@pytest.mark.parametrize("use", ["x.mean", "x()", "x[0]", "[*x]", "len(x)", "x < 1", "bool(x)", "int(x)", "x in x"])
def test_what_could_not_be_rehearsed_cannot_be_used(use):
    with pytest.raises(NeedsValues, match="x could not"):
        eval(use, {"x": lessons.Unassigned("x could not be rehearsed")})


def test_what_could_not_be_rehearsed_travels_to_clean_processes_as_such():
    x = pickle.loads(pickle.dumps(lessons.Unassigned("x could not be rehearsed")))
    with pytest.raises(NeedsValues):
        x["rate"]


def test_any_other_error_ends_the_cell():
    with pytest.raises(ZeroDivisionError):
        Shell().run("1 / 0")


def test_values_that_are_needed_deep_inside_are_found():
    def deep():
        try:
            raise NeedsValues("no values")
        except NeedsValues as error:
            raise RuntimeError("unexpected") from error

    with pytest.raises(RuntimeError) as caught:
        deep()
    assert isinstance(lessons.needs_values(caught.value), NeedsValues)
    assert lessons.needs_values(ValueError("other")) is None


def test_a_notebooks_statements_that_need_values_are_counted(tmp_path):
    text = [f"{lessons.TOLD} (line 3 of this cell: no values)\n", "something else\n"]
    cell = {"cell_type": "code", "execution_count": 7, "outputs": [{"output_type": "stream", "text": text}]}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [cell]}))
    assert lessons.left_out(tmp_path / "a.ipynb") == 1 and lessons.left_out(tmp_path / "b.ipynb") == 0


def test_the_core_rehearses_every_profile_and_two_devices():
    assert {machine.profile for machine in lessons.MACHINES if machine.core} == {"gpu", "t4"}
    assert any(machine.card.devices == 2 and machine.core == ("17",) for machine in lessons.MACHINES)
    assert {machine.card.capability for machine in lessons.MACHINES} == {(7, 5), (8, 0), (9, 0)}
