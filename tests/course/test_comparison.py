"""Two course runs held against each other: what is noise, and what has changed."""

import json

import pytest
from toys import decision, results

from perf_helpers.course.comparison import compare


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
