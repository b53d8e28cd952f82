"""Stored answers equal traced ones, only the command line uses them, and any change that may affect an answer
invalidates it.
"""

import json
import os

import pytest
from typer.testing import CliRunner

from perf_helpers.cli import app
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.core.training import Experiment
from trainmem.estimate import answers, api, fresh_process
from trainmem.estimate.memory_estimate import Device

TINY = Task("bert-tiny", seq_len=16)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PERF_HELPERS_HOME", str(tmp_path))
    monkeypatch.delenv(answers.SWITCH)
    answers._surroundings.cache_clear()
    yield tmp_path / "answers"
    answers._surroundings.cache_clear()


def training(task=TINY, **given):
    return Experiment("a", task, Arguments(given))


def traces(monkeypatch, *questions):
    """Ask each question in a new command; return how many questions had no stored answer, so that a training was
    traced.

    `questions`: the arguments of each question, as a tuple.
    """
    count = [0]

    def call(*_, **__):
        count[0] += 1
        return f"answer {count[0]}"

    monkeypatch.setattr(fresh_process.processes, "call", call)
    for arguments in questions:
        answers._surroundings.cache_clear()
        with answers.stored():
            fresh_process.ask(training, *arguments, model="m", timeout=1)
    return count[0]


def test_a_repeated_question_is_traced_once_and_another_one_by_itself(monkeypatch):
    one, other = (training(bf16=True), Device("cuda")), (training(bf16=False), Device("cuda"))
    assert traces(monkeypatch, one, other, one, other) == 2
    assert traces(monkeypatch, (training(bf16=True), Device("cpu"))) == 1


def test_outside_of_commands_and_when_turned_off_nothing_is_stored(monkeypatch, folder):
    monkeypatch.setattr(fresh_process.processes, "call", lambda *_, **__: 1)
    fresh_process.ask(training, training(), model="m", timeout=1)
    monkeypatch.setenv(answers.SWITCH, "0")
    with answers.stored():
        fresh_process.ask(training, training(), model="m", timeout=1)
    assert not folder.exists()


def test_a_users_function_and_a_model_of_the_hub_are_traced_each_time(monkeypatch):
    own = (training().replace(function=b"pickled"), Device("cuda"))
    hub = (training(Task("someone/model")), Device("cuda"))
    assert traces(monkeypatch, own, own) == 2
    assert traces(monkeypatch, hub, hub) == 2


def edited_configuration(path, monkeypatch):
    config = path / "config.json"
    config.write_text(json.dumps(TINY.build_config().to_dict() | {"vocab_size": 300}))


def newer(path, monkeypatch):
    os.utime(path / "deepspeed.json", (1, 1))


def other_kernels(path, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


def installed_package(path, monkeypatch):
    site = path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))


@pytest.mark.parametrize("change", [edited_configuration, newer, other_kernels, installed_package])
def test_whatever_decides_an_answer_voids_it(monkeypatch, tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps(TINY.build_config().to_dict()))
    (tmp_path / "deepspeed.json").write_text("{}")
    question = (training(Task(str(tmp_path)), deepspeed=str(tmp_path / "deepspeed.json")), Device("cuda"))
    assert traces(monkeypatch, question, question) == 1
    change(tmp_path, monkeypatch)
    assert traces(monkeypatch, question) == 1


def test_a_damaged_answer_is_traced_again_and_old_ones_are_removed(monkeypatch, folder):
    question = training(), Device("cuda")
    assert traces(monkeypatch, question) == 1
    (file,) = folder.iterdir()
    file.write_bytes(b"\x80damaged")
    assert traces(monkeypatch, question, question) == 1
    monkeypatch.setattr(answers, "_MOST_FILES", 2)
    for tokens in (1, 2, 3):
        traces(monkeypatch, (training(Task("bert-tiny", seq_len=tokens)), Device("cuda")))
    assert len([*folder.iterdir()]) == 2


def test_the_command_prints_the_same_figures_and_that_they_were_stored(monkeypatch):
    words = ["estimate", "--model", "bert-tiny", "--seq-len", "16", "--card", "t4"]
    first = CliRunner().invoke(app, words)
    monkeypatch.setattr(api, "_made", {})  # as in another process
    second = CliRunner().invoke(app, words)
    assert first.exit_code == second.exit_code == 0
    assert "estimated in" in first.output and answers.SWITCH in second.output

    def figures(result):  # without the progress bar: it goes to stderr, and how often it is drawn depends on the time
        return [
            line for line in result.stdout.splitlines() if "estimated in" not in line and answers.SWITCH not in line
        ]

    assert figures(first) == figures(second)
