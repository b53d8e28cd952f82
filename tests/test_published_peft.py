"""The record of benchmarks/published_peft.py follows from the published figures; each large error has a reason."""

import json

import pytest
from scripts import RESULTS, script


@pytest.fixture(scope="module")
def peft():
    return script("published_peft")


@pytest.fixture(scope="module")
def record(peft):
    return json.loads((RESULTS / peft.PEFT.record).read_text(encoding="utf-8"))


def test_the_record_is_that_of_the_facts(peft, record):
    facts = {row["row"]: row["published"] for row in peft.FACTS["rows"]}
    assert {row["name"]: row["published"] for row in record["rows"]} == facts
    assert all(row["error"] == pytest.approx(row["reserved"] / row["published"] - 1) for row in record["rows"])


def test_a_row_that_is_off_by_more_than_three_per_cent_says_why(peft, record):
    off = {row["name"] for row in record["rows"] if abs(row["error"]) > 0.03}
    assert off == {row["row"] for row in peft.FACTS["rows"] if "reason" in row} and len(off) < len(record["rows"]) / 3
