"""`offer` lets this process and later subprocesses import a package from the package's separate folder. If the package
is missing, `offer` returns a message that says how to install it.
"""

import sys

import pytest

from perf_helpers.lab import Lab
from trainmem.core import optional_packages


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(optional_packages, "FOLDER", tmp_path)
    folder = tmp_path / "some_extra-{}.{}".format(*sys.version_info)
    (folder / "some_extra").mkdir(parents=True)
    (folder / "some_extra" / "__init__.py").write_text("answer = 42\n")
    return folder


@pytest.mark.nightly
def test_what_lies_in_its_folder_is_offered_to_this_process_and_to_clean_ones(folder, tmp_path):
    assert optional_packages.offer("some_extra") is None
    assert sys.path[-1] == str(folder), "what is installed comes first"

    def ask(task):
        import importlib

        return importlib.import_module("some_extra").answer

    run = Lab("cpu", out=tmp_path / "out", lesson="tests").run(ask, "asked", measure=("none",))
    assert run.ok and run.value == 42, run.message


@pytest.mark.nightly
def test_what_is_offered_late_is_found_by_the_libraries_that_are_imported_again(folder, tmp_path):
    lab = Lab("cpu", out=tmp_path / "out", lesson="tests")
    servers = [lab.run(lambda task: __import__("os").getppid(), "before", measure=("none",)).value for _ in range(2)]
    assert optional_packages.offer("some_extra") is None
    servers.append(lab.run(lambda task: __import__("os").getppid(), "after", measure=("none",)).value)
    assert servers[0] == servers[1] != servers[2], "they look for their extras when they are imported"


def test_what_is_missing_is_reported_with_how_to_get_it(folder):
    before = [*sys.path]
    reported = optional_packages.offer("no_such_package")
    assert "no_such_package" in reported and "make build/no_such_package" in reported
    assert sys.path == before
    missing = optional_packages.missing("deepspeed")  # None where it is installed, or was offered
    assert missing is None or "no-build-isolation" in missing
    assert "no-build-isolation" not in reported, "only DeepSpeed is built from source"


def test_what_is_installed_is_left_as_it_is(folder):
    before = [*sys.path]
    assert optional_packages.offer("numpy") is None and sys.path == before
