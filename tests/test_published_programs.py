"""The record of benchmarks/published_programs.py follows from published figures; large differences have a reason."""

import json

import pytest
from scripts import RESULTS, script

from trainmem.rehearsal import CARDS


@pytest.fixture(scope="module")
def programs():
    return script("published_programs")


@pytest.fixture(scope="module")
def record(programs):
    return json.loads((RESULTS / programs.PROGRAMS.record).read_text(encoding="utf-8"))


def test_the_record_has_each_published_row_and_its_difference(programs, record):
    published = {name: row["published"] for name, (_, row) in programs.cases(None).items()}
    assert {row["name"]: row["published"] for row in record["rows"]} == published
    for row in record["rows"]:
        table, _ = programs.cases(None)[row["name"]]
        if "error" in row:
            expected = row[table["quantity"]] / row["published"] - 1
            assert row["error"] == pytest.approx(expected, abs=2e-4), row["name"]


def test_a_row_that_differs_says_why_and_no_other_does(programs, record):
    far = {
        row["name"]
        for row in record["rows"]
        if abs(row.get("error", 1)) > programs.FAR
        and (row["status"], row["published"]) != (programs.OUT_OF_MEMORY,) * 2
    }
    assert far == {name for name in programs.cases(None) if programs.because(name)}
    assert len(record["rows"]) - len(far) > len(record["rows"]) / 2


def test_the_cards_are_known(programs):
    assert {table["card"] for table, _ in programs.cases(None).values()} <= {*CARDS}
