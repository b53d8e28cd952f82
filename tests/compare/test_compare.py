"""Two course runs: changed verdicts, bytes, values and speeds, which changes are worse, and what is not compared."""

import dataclasses
import json

import pytest
from toys import decision, results

from perf_helpers.compare.compare import AXES, compare, is_beyond_noise
from perf_helpers.course.ledger import load
from trainmem.records import CATEGORIES, Memory, Run

MEMORY = Memory(
    peak_bytes=1000,
    kind="counted",
    peak_phase="backward",
    peak_operation="aten.mm.default",
    peak_module="bert.layer.0",
    breakdown=dict.fromkeys(CATEGORIES, 0) | {"weights": 400, "activations": 600},
    phases={"forward": 900, "step": 400},
    phase_breakdowns={
        "forward": dict.fromkeys(CATEGORIES, 0) | {"weights": 400, "activations": 500},
        "step": dict.fromkeys(CATEGORIES, 0) | {"weights": 400},
    },
)


def a_run(memory=MEMORY, name="vanilla", **fields):
    return {"lesson": "00_a"} | Run(name, "ok", memory=memory, **fields).to_dict()


def compared(old, new, **fields):
    """Return the changes that `compare` reports between two course runs.

    `old`, `new`: experiments of the older and of the newer course run, as dicts; `fields`: {name: value} to replace in
    the results of the newer course run.
    """
    return compare(results(runs=old), results(runs=new) | fields)


def moved_by(category, size, memory=MEMORY):
    parts = memory.breakdown | {category: memory.breakdown[category] + size}
    return dataclasses.replace(memory, peak_bytes=memory.peak_bytes + size, breakdown=parts)


def test_values_of_another_quantity_are_not_compared():
    a, b = (results(decision("a", value=value) | {"quantity": text}) for value, text in ((1, "then"), (2, "now")))
    (change,) = compare(a, b).changes
    assert (change["kind"], change["old"], change["new"]) == ("quantity", "then", "now")


def test_a_byte_that_moved_is_named_with_its_category_and_the_operation_at_the_peak():
    grown = dataclasses.replace(moved_by("activations", 1), peak_operation="aten.bmm.default")
    found = compared([a_run()], [a_run(grown)])
    (change,) = found.changes
    assert (change["kind"], change["axis"], change["id"], change["worse"]) == ("memory", "memory", "00_a/vanilla", True)
    assert "(+1 B): activations +1 B" in change["text"]
    assert "at aten.bmm.default of bert.layer.0 (backward), before at aten.mm.default" in change["text"]
    assert found.worse(("memory",)) and not found.worse(("speed", "verdict"))
    (back,) = compared([a_run(grown)], [a_run()]).changes
    assert back["worse"] is False


def test_bytes_that_change_places_are_reported_and_nobody_is_blamed():
    parts = MEMORY.breakdown | {"activations": 500, "temporaries": 100}
    (change,) = compared([a_run()], [a_run(dataclasses.replace(MEMORY, breakdown=parts))]).changes
    assert change["worse"] is None and "activations -100 B, temporaries +100 B" in change["text"]


def test_what_is_left_after_a_step_is_a_leak_also_below_the_peak():
    step = MEMORY.phase_breakdowns | {"step": MEMORY.phase_breakdowns["step"] | {"activations": 8}}
    leaking = dataclasses.replace(MEMORY, phases=MEMORY.phases | {"step": 408}, phase_breakdowns=step)
    (change,) = compared([a_run()], [a_run(leaking)]).changes
    assert change["worse"] and "after step 400 B -> 408 B (+8 B): activations +8 B" in change["text"]


def test_reserved_memory_counts_and_what_the_system_tells_does_not():
    on_cuda = dataclasses.replace(MEMORY, kind="allocated", reserved_bytes=2048, rss_bytes=10, device_used_bytes=10)
    other = dataclasses.replace(on_cuda, rss_bytes=20, device_used_bytes=30, context_bytes=5)
    assert not compared([a_run(on_cuda)], [a_run(other)]).changes
    (change,) = compared([a_run(on_cuda)], [a_run(dataclasses.replace(other, reserved_bytes=4096))]).changes
    assert change["worse"] and "reserved" in change["text"]


def test_runs_of_one_name_are_distinguished_by_their_number():
    twice = [a_run(), a_run(moved_by("gradients", 10))]
    assert not compared(twice, twice).changes
    (change,) = compared(twice, [a_run(), a_run(moved_by("gradients", 20))]).changes
    assert change["id"] == "00_a/vanilla (2)"


def test_another_experiment_of_one_name_is_not_compared_which_is_reported():
    other = a_run(moved_by("activations", 5), arguments={"bf16": True})
    found = compared([a_run()], [other])
    assert not found.changes and any("experiment" in note and "00_a/vanilla" in note for note in found.notes)


def test_a_run_that_fails_now_is_worse():
    failed = a_run(None) | {"status": "out of memory", "message": "tried to allocate"}
    (change,) = compared([a_run()], [failed]).changes
    assert change["kind"] == "run" and change["worse"] and "tried to allocate" in change["text"]


@pytest.mark.parametrize("what", ["machine", "profile"])
def test_on_other_hardware_no_bytes_and_no_seconds_are_compared_and_it_says_so(what):
    other = results(machine="another, 8 cores")["machine"]
    found = compared([a_run()], [a_run(moved_by("activations", 1))], **{what: other if what == "machine" else "t4"})
    assert not found.changes and any("differ" in warning and "bytes" in warning for warning in found.warnings)


def test_only_lessons_that_ran_in_both_are_compared():
    then = results(decision("a"), decision("b", lesson="01_b"))
    then["lessons"].append({"name": "01_b", "status": "ok", "seconds": 1, "message": ""})
    found = compare(then, results(decision("a")))
    assert not found.changes and any("old run" in note and "01_b" in note for note in found.notes)
    elsewhere = results()
    elsewhere["lessons"][0]["name"] = "02_c"
    with pytest.raises(ValueError, match=r"no lesson in common.*run the same lessons"):
        compare(then, elsewhere)


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
    assert any("profiles" in warning and "(cpu, gpu)" in warning for warning in other.warnings)
    assert "warning: the machines differ" in other.to_text() and "name: CPU, 2 cores -> NVIDIA H200" in other.to_text()


@pytest.mark.parametrize(
    ("decided_by", "old", "new", "worse"),
    [
        ("memory", "holds", "refuted", True),
        ("memory", "holds", "smaller than promised", True),
        ("memory", "refuted", "holds", False),
        ("time", "holds", "refuted", True),
        ("time", "holds", "too small to tell", None),  # where both are expected
        ("values", "holds", "refuted", True),
    ],
)
def test_a_verdict_is_worse_that_keeps_less_of_its_promise(decided_by, old, new, worse):
    claim = next(claim for claim in load().values() if claim.decided_by == decided_by)
    expected = ["holds", "too small to tell"]
    pair = [results(decision(claim.id, verdict, expected=expected)) for verdict in (old, new)]
    (change,) = compare(*pair).changes
    assert change["worse"] is worse


def test_a_claim_that_nobody_can_test_any_more_is_worse_unless_that_is_excused():
    lost = decision("a", "not testable here", value=None)
    for excused, worse in ((False, True), (True, None)):
        found = compare(results(decision("a")), results(lost | {"as_expected": excused}))
        assert next(change for change in found.changes if change["kind"] == "verdict")["worse"] is worse


def test_the_more_figures_are_looked_at_the_further_one_must_move():
    near, far = (1.0, [0.9, 1.1], 1.2, [1.1, 1.3]), (1.0, [0.9, 1.1], 1.5, [1.4, 1.6])
    assert is_beyond_noise(*near, number=1)
    assert not is_beyond_noise(*near, number=100) and is_beyond_noise(*far, number=100)


def test_what_is_worse_comes_first_and_is_marked():
    old, new = [a_run(), a_run(name="b")], [a_run(moved_by("weights", -1)), a_run(moved_by("weights", 1), name="b")]
    lines = compared(old, new).to_text().splitlines()
    assert lines[-2].startswith("WORSE  memory") and lines[-1].startswith("better memory")
    assert set(AXES) == {"memory", "verdict", "speed"}


def test_functions_of_a_lesson_that_was_rewritten_are_not_compared():
    def night(code, memory):
        data = results(runs=[a_run(memory, kind="function"), a_run(memory, "training")])
        data["lessons"][0]["code"] = code
        return data

    grown = moved_by("activations", 1)
    both = compare(night("one", MEMORY), night("one", grown))
    assert [change["id"] for change in both.changes] == ["00_a/vanilla", "00_a/training"]
    found = compare(night("one", MEMORY), night("two", grown))
    assert [change["id"] for change in found.changes] == ["00_a/training"]
    assert any("code changed" in note and "00_a" in note for note in found.notes)


@pytest.mark.parametrize(
    ("quantity", "old", "new", "worse"),
    [
        ("throughput with / without", 1.5, 1.2, True),
        ("throughput with / without", 1.2, 1.5, False),
        ("peak with / without", 0.5, 0.6, True),
        ("peak with / without", 0.6, 0.5, False),
        ("seconds of one / of the other", 1.2, 1.5, None),
    ],
)
def test_a_throughput_that_fell_and_a_peak_that_grew_are_worse(quantity, old, new, worse):
    claim = next(claim for claim in load().values() if claim.decided_by == "time")
    pair = [results(decision(claim.id, value=value) | {"quantity": quantity}) for value in (old, new)]
    (change,) = compare(*pair).changes
    assert (change["kind"], change["axis"], change["worse"]) == ("value", "speed", worse)
