"""The table in results/cuda_tools.json agrees with the tools' answers, which are recorded beside it; and how
benchmarks/tools_pypi.py calls a tool, and reports a tool that cannot answer.
"""

import dataclasses
import json
import math
import os
import statistics
import sys
import time

import pytest
from scripts import RESULTS, script


@pytest.fixture(scope="module")
def report():
    return json.loads((RESULTS / "cuda_tools.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rehearsed():
    rows = json.loads((RESULTS / "cuda.json").read_text(encoding="utf-8"))["rows"]
    return {row["number"]: row for row in rows if "rehearsed" in row}


@pytest.fixture(scope="module")
def pypi():
    return script("tools_pypi")


def test_the_truth_is_that_of_the_rehearsals(report, rehearsed):
    assert len(report["pairs"]) >= 100
    for pair in report["pairs"]:
        truth = rehearsed[pair["number"]]["rehearsed"]
        assert (pair["allocated"], pair["reserved"]) == (truth["allocated"], truth["reserved"]), pair["number"]


def test_each_row_is_made_of_its_answers(report):
    for row in report["table"]:
        message = [(pair[row["tool"]], pair["allocated"]) for pair in report["pairs"]]
        errors = [abs(bytes_ / truth - 1) for bytes_, truth in message if bytes_ is not None]
        assert (row["asked"], row["answered"]) == (len(message), len(errors)), row["tool"]
        assert math.isclose(row["median_error"], statistics.median(errors)), row["tool"]
        assert math.isclose(row["worst_error"], max(errors)), row["tool"]
        assert row["median_seconds"] > 0 and row["most_own_bytes"] > 0 and row["claims"] and row["cannot_express"]


def test_the_estimate_answers_every_training_and_is_nearest(report):
    table = {row["tool"]: row for row in report["table"]}
    estimates = [table.pop(name) for name in list(table) if name.startswith("this estimate")]
    assert len(estimates) == 2
    for row in estimates:
        assert row["answered"] >= 0.95 * row["asked"] and row["median_error"] <= 0.001
        assert all(row["median_error"] < other["median_error"] for other in table.values())
        assert all(row["worst_error"] < other["worst_error"] for other in table.values())


def test_every_tool_that_can_be_queried_was(report, pypi):
    others = {*pypi.tools.ABOUT["published"]["tools"]}  # asked for published trainings only
    assert {*pypi.TOOLS} - others <= {row["tool"] for row in report["table"]}
    assert all(row["version"] for row in report["table"] if row["tool"] in pypi.TOOLS)


@pytest.fixture
def question(pypi):
    return pypi.Question(
        folder="",
        fields={"vocab_size": 100},
        parameters=1000,
        trained=1000,
        largest_layer=100,
        width=8,
        depth=2,
        heads=2,
        tokens=64,
        size=2,
        precision="bf16",
        mixed=True,
        optimizer="adamw_torch_fused",
        checkpointing=False,
        flash=True,
        card="T4",
    )


def test_a_tool_is_queried_by_its_name_for_an_optimizer_and_refuses_what_it_has_none_for(pypi, question):
    assert question.named("sgd", adamw="adam") == "adam" and question.named("adamw", "sgd") == "adamw"
    assert question.words(batch="size", context="length") == {"batch": 2, "context": 64}
    other = dataclasses.replace(question, optimizer="adafactor")
    message = pypi.answer(lambda one: one.named("sgd", adamw="adam"), other)
    assert message == {"refused": "cannot say the optimizer adafactor"}
    message = pypi.answer(lambda one: (one.length, 0), dataclasses.replace(question, tokens=None))
    assert message == {"refused": "cannot say images"}
    message = pypi.answer(pypi.deepspeed_zero2, dataclasses.replace(question, method="lora", rank=8, trained=10))
    assert message == {"refused": "cannot say LoRA"}


def test_an_answer_may_be_one_figure_or_name_the_context(pypi, question):
    names = ("bytes", "total_bytes", "context_bytes")
    for answer, figures in ((7, (7, 7, 0)), ((7, 9), (7, 9, 0)), ((7, 9, 1.5), (7, 9, 1))):
        message = pypi.answer(lambda one, answer=answer: answer, question)
        assert tuple(message[name] for name in names) == figures


def test_the_tools_that_can_say_lora_are_functions(pypi):
    assert {*pypi.tools.ABOUT["lora"]} <= {tool.__name__ for tool in pypi.TOOLS.values()}


@pytest.mark.parametrize(("mixed", "precision", "width"), [(True, "bf16", 4), (False, "bf16", 2), (False, "fp32", 4)])
def test_weights_are_as_wide_as_they_are_stored(question, mixed, precision, width):
    assert dataclasses.replace(question, mixed=mixed, precision=precision).weight_bytes == width


def test_an_answer_comes_from_a_process_of_its_own(pypi, question):
    held = bytearray(64 << 20)  # of this process; a forked one counts what it touches itself
    message = pypi.forked(lambda one: (one.parameters, os.getpid()), question)
    assert message["bytes"] == 1000 and message["total_bytes"] != os.getpid() and held[0] == 0
    assert 0 <= message["seconds"] < 5 and message["own_bytes"] > 1 << 20


def test_a_tool_that_raises_ends_or_hangs_gives_a_reason(pypi, question, monkeypatch):
    def raises(one):
        raise KeyError("no such\n  model")

    assert pypi.forked(raises, question) == {"refused": "KeyError: 'no such\\n model'"}
    assert pypi.forked(lambda one: sys.exit("no configuration"), question) == {
        "refused": "SystemExit: no configuration"
    }
    monkeypatch.setattr(pypi, "SECONDS", 1)
    assert pypi.forked(lambda one: time.sleep(30), question) == {"refused": "no answer in 1 seconds"}


def test_the_table_has_a_row_for_each_tool_and_what_was_not_run(report):
    text = script("cuda_page").cuda_tools()
    for row in report["table"]:
        line = next(line for line in text.splitlines() if line.startswith(f"| {row['tool']} {row['version']}".rstrip()))
        assert f"| {row['answered']} of {row['asked']} | {row['median_error']:.2%} |" in line
    assert all(f"{name} ({reason})" in text for name, reason in report["not_run"].items())
