"""The record of benchmarks/published.py equals what the script makes of the published figures, and the estimate's
errors are as small as the pages say.
"""

import json
import statistics

import pytest
from scripts import script


@pytest.fixture(scope="module")
def published():
    return script("published")


@pytest.fixture(scope="module")
def facts(published):
    return published.rows()


@pytest.fixture(scope="module")
def report(published):
    return json.loads(published.RESULT.read_text(encoding="utf-8"))


def high(errors):
    """Return the 95th percentile of errors by nearest rank, i.e. one of the errors, without interpolation."""
    return sorted(errors)[-(-95 * len(errors) // 100) - 1]


def test_the_table_is_that_of_the_facts(facts, report):
    assert facts and [row.name for row in facts] == [row["name"] for row in report["table"]]
    assert len({row.name for row in facts}) == len(facts)
    for row, made in zip(facts, report["table"], strict=True):
        assert made["published"] == row.published
        assert all(made[key] == row.facts.get(key) for key in ("kind", "source", "gpu", "setup", "reason", "older"))
        assert made["error"] == pytest.approx(made["predicted"] / made["published"] - 1)


def test_every_row_says_whence_it_is_and_what_was_measured(facts):
    for row in facts:
        for key in ("source", "date", "gpu", "versions", "setup", "quantity", "kind"):
            assert row.facts[key], (row.name, key)
        assert row.facts["kind"] in ("layer", "training", "older")


def test_a_row_that_is_not_like_for_like_says_why(published, facts):
    assert all(row.facts["like_for_like"] or row.facts["reason"] for row in facts)
    apart = published.tomllib.loads(published.FACTS.read_text(encoding="utf-8"))["apart"]
    assert apart and all(each["what"] and each["source"] and each["reason"] for each in apart)


def test_rules_of_older_versions_are_never_like_for_like(facts):
    older = [row for row in facts if row.facts.get("older")]
    assert older and not any(row.facts["like_for_like"] for row in older)


@pytest.mark.parametrize("kind", ["all", "layer", "training"])
def test_like_for_like_the_median_error_is_within_a_fifth_of_a_per_cent(report, kind):
    alike = [row for row in report["table"] if row["like_for_like"] and kind in ("all", row["kind"])]
    errors = [abs(row["predicted"] / row["published"] - 1) for row in alike]
    assert len(errors) >= 15
    assert statistics.median(errors) <= 0.002
    assert high(errors) <= 0.01
    answer = report["like_for_like"][kind]
    assert answer["rows"] == len(errors) and answer["median"] == pytest.approx(statistics.median(errors))
    assert answer["percentile_95"] == pytest.approx(high(errors)) and answer["worst"] == pytest.approx(max(errors))


def test_the_guides_table_is_reproduced(report):
    rows = [row for row in report["table"] if row["name"].startswith("2023 guide")]
    assert len(rows) == 9
    assert {row["name"]: row["error"] for row in rows if abs(row["error"]) > 0.025} == {}
    assert all(row["older_rules_add"] is not None for row in rows)


def test_a_question_is_made_of_a_row(published, facts, tmp_path):
    layer = next(row for row in facts if row.name == "Liger-Kernel, cross_entropy: V 4096")
    assert layer.question["function"].keywords == {"B": 8, "T": 2048, "V": 4096}
    training = next(row for row in facts if row.name.startswith("fms-acceleration, Mistral-7B full"))
    assert training.task(tmp_path).parameters() == 7_241_732_096
    assert training.question["per_device_train_batch_size"] == 4 and training.changes == ("copied_logits",)


def test_every_loop_change_and_quantity_of_a_row_is_known(published, facts):
    for row in facts:
        assert row.facts["quantity"] in published.QUANTITIES and {*row.changes} <= published.CHANGES.keys(), row.name
        assert row.facts.get("loop", "gpt") in published.LOOPS, row.name
