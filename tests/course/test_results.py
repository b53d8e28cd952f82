"""results.json is checked when it is read, each one that is recorded can be read, and two are compared beyond noise."""

import json
from pathlib import Path

import pytest
from toys import decision, results

from perf_helpers.course.ledger import load
from perf_helpers.course.results import compare, decided_anew, load_results, recorded
from perf_helpers.lab.runs import Run

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"schema": 2}', json.dumps(results() | {"claims": [{}]})]
)
def test_a_damaged_results_file_is_refused(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match="not the results of a course"):
        load_results(tmp_path)
    with pytest.raises(ValueError, match="no results in"):
        load_results(tmp_path / "absent.json")


def test_every_recorded_run_can_be_read_with_its_runs_and_its_claims():
    files = sorted(RESULTS.glob("*/*.json"))
    assert files
    for path in files:
        data = load_results(path)
        assert data["runs"]
        for kept in data["runs"]:
            run, memory, timing = Run.from_dict(kept), kept["memory"] or {}, kept["timing"] or {}
            assert (run.status, run.peak_bytes) == (kept["status"], memory.get("peak_bytes"))
            assert run.step_seconds == timing.get("step_seconds")
            assert "samples_per_step" not in run.arguments, "schema 1 of a run kept it there"
        decided = decided_anew(data["claims"])
        assert len(decided) > 10 and all(claim["quantity"] == load()[claim["id"]].quantity for claim in decided)


def test_what_was_recorded_is_decided_by_the_ledger_of_today():
    claim = load()["accumulation-memory"]
    then = decision(claim.id, "holds", value=0.95, interval=None) | {"quantity": claim.quantity}
    rows = [
        then,
        then | {"verdict": "not testable here"},
        then | {"quantity": "another"},
        then | {"id": "no-such-claim"},
    ]
    assert [row["verdict"] for row in decided_anew(rows)] == ["smaller than promised", "not testable here"]
    wide = then | {"interval": [0.5, 1.5]}
    assert decided_anew([wide])[0]["verdict"] == "too small to tell"


def test_values_of_another_quantity_are_not_compared():
    a, b = (results(decision("a", value=value) | {"quantity": text}) for value, text in ((1, "then"), (2, "now")))
    (change,) = compare(a, b).changes
    assert (change["kind"], change["old"], change["new"]) == ("quantity", "then", "now")


def test_the_newest_measured_run_of_each_machine_is_found(tmp_path):
    def keep(machine, date, **fields):
        path = tmp_path / machine / f"{date}.json"
        path.parent.mkdir(exist_ok=True)
        data = results(machine=machine)
        path.write_text(json.dumps(data | {"date": date, "machine": data["machine"] | fields}))
        return path

    keep("here", "2026-01-01"), keep("there", "2026-01-03")
    newest = keep("here", "2026-01-02")
    keep("here", "2026-01-04", rehearsed=True)
    keep("card", "2026-01-05", rehearsed=True)
    found = recorded(tmp_path)
    assert {name: data["date"] for name, data in found.items()} == {"here": "2026-01-02", "there": "2026-01-03"}
    assert found["here"]["file"] == newest


@pytest.mark.parametrize(
    ("old", "new", "moved"),
    [
        ((1.0, None), (1.0005, None), False),  # an exact count, by rounding
        ((1.0, None), (1.002, None), True),
        ((1.0, [0.9, 1.1]), (1.08, [1.0, 1.2]), False),
        ((1.0, [0.9, 1.1]), (1.15, [0.95, 1.3]), False),  # the old value is inside the new interval
        ((1.0, [0.9, 1.1]), (1.3, [1.2, 1.4]), True),
        ((1.0, [1.0, 1.0]), (1.0001, [1.0001, 1.0001]), False),
        ((1.0, None), (None, None), True),
        ((None, None), (None, None), False),
        ((0, None), (0, None), False),
        ((0, None), (3, None), True),
    ],
)
def test_a_value_has_moved_only_beyond_its_noise(old, new, moved):
    a, b = (results(decision("ratio", value=value, interval=interval)) for value, interval in (old, new))
    kinds = [change["kind"] for change in compare(a, b).changes]
    assert kinds == (["value"] if moved else [])


def test_compare_names_verdicts_lessons_and_claims_that_come_and_go():
    old = results(decision("a"), decision("gone"), lessons=["ok"])
    new = results(decision("a", "refuted"), decision("came"), lessons=["crashed"])
    changes = compare(old, new)
    assert [(change["kind"], change["id"]) for change in changes.changes] == [
        ("lesson", "00_a"),
        ("verdict", "a"),
        ("disappeared", "gone"),
        ("appeared", "came"),
    ]
    assert "a: holds -> refuted" in changes.to_text() and json.loads(json.dumps(changes.to_dict()))["changes"]
    assert not changes.warnings and not changes.differences


def test_compare_shows_other_versions_and_warns_of_another_machine_or_profile():
    same = compare(results(), results(torch="2.14.0"))
    assert same.differences == ["torch: 2.13.0 -> 2.14.0"] and not same.warnings
    assert "nothing changed" in same.to_text()
    other = compare(results(), results(machine="NVIDIA H200", profile="gpu"))
    assert any("machines differ" in warning for warning in other.warnings)
    assert any("profiles differ (cpu, gpu)" in warning for warning in other.warnings)
    assert "warning: the machines differ" in other.to_text() and "name: CPU, 2 cores -> NVIDIA H200" in other.to_text()
