"""A file results.json is checked when it is read, and every recorded file in results/ can be read."""

import json
from pathlib import Path

import pytest
from toys import decision, results

from perf_helpers.course.ledger import load
from perf_helpers.course.results import decided_again, load_results, recorded
from trainmem.records import Run

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"schema": 2}', json.dumps(results() | {"claims": [{}]})]
)
def test_a_damaged_results_file_is_refused(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match="run the course again"):
        load_results(tmp_path)
    with pytest.raises(ValueError, match=r"name a results\.json"):
        load_results(tmp_path / "absent.json")


def test_every_recorded_run_can_be_read_with_its_runs_and_its_claims():
    files = sorted(RESULTS.glob("*/*.json"))
    assert files
    for path in files:
        data = load_results(path)
        assert data["runs"]
        for kept in data["runs"]:
            run, memory, timing = Run.from_dict(kept), kept["memory"] or {}, kept["timing"] or {}
            assert (run.status, run.peak_bytes or None) == (kept["status"], memory.get("peak_bytes"))
            assert (run.step_seconds or None) == timing.get("step_seconds")
            assert "samples_per_step" not in run.arguments, "schema 1 of a run kept it there"
        decided = decided_again(data["claims"])
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
    assert [row["verdict"] for row in decided_again(rows)] == ["smaller than promised", "not testable here"]
    wide = then | {"interval": [0.5, 1.5]}
    assert decided_again([wide])[0]["verdict"] == "too small to tell"


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
