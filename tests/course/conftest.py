"""What the tests of this room share."""

import json
from types import SimpleNamespace

import pytest
import toys

from perf_helpers import claims, hardware
from perf_helpers.course import course
from perf_helpers.course.ledger import WHERE


@pytest.fixture
def machine(monkeypatch):
    """A machine that has what its `features` say; no real hardware has a say in a test."""
    machine = SimpleNamespace(features={"any"})

    def supports(feature):
        if feature not in WHERE:
            raise ValueError(feature)
        return (True, "") if feature in machine.features else (False, f"needs {feature}")

    monkeypatch.setattr(hardware, "supports", supports)
    claims.DECIDED.clear()
    yield machine
    claims.DECIDED.clear()


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """One course of toy lessons, executed once: the result, and its folder."""
    lessons, out = tmp_path_factory.mktemp("lessons"), tmp_path_factory.mktemp("out")
    toys.write_all(lessons)
    left_by_an_earlier_run = {"lesson": "03_silent", "complete": True, "claims": [toys.decision("stale")], "runs": []}
    (out / "03_silent.json").write_text(json.dumps(left_by_an_earlier_run))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course, "LESSONS", lessons)
        return course.run_course(profile="cpu", strict=True, out=out, timeout_per_lesson=300), out
