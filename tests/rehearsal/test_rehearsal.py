"""The parts of a rehearsal that need neither torch's CUDA build nor a compiler: cards, and messages about missing
parts.
"""

import subprocess
import sys

import pytest

from perf_helpers import cli, doctor
from trainmem import rehearsal
from trainmem.core import hardware, releases
from trainmem.rehearsal import build, rehearsal_process
from trainmem.rehearsal.rehearsal_process import variables_of


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
    assert "needs Linux" in doctor.about_rehearsal().text
    monkeypatch.undo()
    monkeypatch.setattr(build, "compiler", lambda: None)
    found = doctor.about_rehearsal()
    assert "C++ compiler" in found.text and "g++" in found.remedy
    with pytest.raises(RuntimeError, match="C\\+\\+ compiler"):
        rehearsal.Rehearsal(rehearsal.CARDS["t4"])


def test_without_the_cuda_build_the_doctor_says_what_it_takes(monkeypatch, tmp_path):
    monkeypatch.setenv("PERF_HELPERS_HOME", str(tmp_path))
    monkeypatch.setattr(build, "problem", lambda: None)
    monkeypatch.setattr(hardware, "torch_build", lambda: ("2.13.0+cpu", False))
    assert build.interpreter() is None and "5 GB" in doctor.about_rehearsal().text
    monkeypatch.setattr(hardware, "torch_build", lambda: ("2.13.0+cu130", True))
    assert str(build.interpreter()) == sys.executable and doctor.about_rehearsal().level == "ok"


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
    ("version", "names", "expected"),
    [
        ("2.15.0+cu130", (), []),
        ("2.99.0a0+git", (), ["torch 2.99.0a0+git is untested", releases.NEWEST_TORCH]),
        ("2.15.0", ("ncclAllGatherV",), ["copy or allocate memory: ncclAllGatherV"]),
        ("2.99.0", ("ncclAllGatherV",), ["torch 2.99.0 is untested", "ncclAllGatherV"]),
    ],
)
def test_a_rehearsal_says_whether_its_stub_matches_the_torch(monkeypatch, tmp_path, version, names, expected):
    pretended(monkeypatch, tmp_path, version, names)
    found = build.doubts(tmp_path, tmp_path)
    assert bool(found) == bool(expected) and all(words in found for words in expected)


def test_a_rehearsal_by_an_untested_torch_warns_once(monkeypatch, tmp_path):
    pretended(monkeypatch, tmp_path, "2.99.0")
    monkeypatch.setattr(build, "set_up", lambda: tmp_path / "bin" / "python")
    monkeypatch.setattr(build, "library", lambda python: tmp_path)
    rehearsal_process._warn.cache_clear()
    with pytest.warns(UserWarning, match=r"torch 2\.99\.0 is untested") as warned:
        for _ in range(2):
            with rehearsal_process.command(rehearsal.CARDS["t4"]):
                pass
    assert len(warned) == 1
