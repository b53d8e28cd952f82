"""Fixtures for the tests of the course."""

import json
from types import SimpleNamespace

import pytest
import toys

from perf_helpers import Claims
from perf_helpers.course import course
from perf_helpers.course.ledger import WHERE
from trainmem.core import hardware


class Machine:
    """A machine with exactly the hardware `features` that a test sets, so that the real hardware does not matter."""

    name, rehearsed = "Some CPU", False

    def __init__(self):
        self.features = {"any"}

    @property
    def kind(self):
        return "cuda" if "cuda" in self.features else "cpu"

    def to_dict(self):
        return {"name": self.name}


@pytest.fixture
def machine(monkeypatch):
    def supports(feature, machine):
        if feature not in WHERE:
            raise ValueError(feature)
        return (True, "") if feature in machine.features else (False, f"needs {feature}")

    monkeypatch.setattr(hardware, "supports", supports)
    return Machine()


@pytest.fixture
def claims(machine, tmp_path):
    """Return the `Claims` of lesson 12 on `machine`; a test may change `claims.lab`."""
    lab = {"lesson": "12_dataloader", "profile": SimpleNamespace(name="cpu"), "strict": False, "runs": []}
    lab |= {"machine": machine, "versions": {"torch": "2.13.0"}, "out": str(tmp_path / "out")}
    return Claims(SimpleNamespace(**lab, store=SimpleNamespace(path=tmp_path / "kept/runs.jsonl")))


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """Run one course of toy lessons; return the content of its results.json, and its folder."""
    lessons, out = tmp_path_factory.mktemp("lessons"), tmp_path_factory.mktemp("out")
    toys.write_all(lessons)
    left_by_an_earlier_run = {"lesson": "03_silent", "complete": True, "claims": [toys.decision("stale")], "runs": []}
    (out / "03_silent.json").write_text(json.dumps(left_by_an_earlier_run))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course, "LESSONS", lessons)
        return course.run_course(profile="cpu", strict=True, out=out, timeout_per_lesson=300), out
