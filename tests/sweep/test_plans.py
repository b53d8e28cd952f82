"""Plans of sweeps: every combination is a row, and every mistake gives one line before anything runs."""

import re
from pathlib import Path

import pytest

from perf_helpers.sweep import Plan

TINY = {"model": "bert-tiny", "seq_len": 16}
GRID = {"optim": ["sgd", "adafactor"]}


def test_every_combination_is_a_row_and_further_rows_stand_as_they_are():
    plan = Plan.of(
        {
            "task": {"model": "bert-tiny"},
            "arguments": {"bf16": False},
            "grid": {"per_device_train_batch_size": [1, 2], "seq_len": [8, 16], "optim": ["sgd"]},
            "rows": [{"name": "large", "per_device_train_batch_size": 64, "bf16": True}],
        }
    )
    sizes = [(row.arguments.given.get("per_device_train_batch_size"), row.task.seq_len) for row in plan.rows]
    assert sizes == [(1, 8), (1, 16), (2, 8), (2, 16), (64, None)]
    assert plan.rows[1].name == "per_device_train_batch_size=1, seq_len=16", "what does not vary is not in the name"
    assert plan.rows[1].arguments.given == {"bf16": False, "per_device_train_batch_size": 1, "optim": "sgd"}
    assert plan.rows[4].name == "large" and plan.rows[4].arguments.given["bf16"] is True
    assert (plan.measure, plan.steps, plan.timeout) == (("memory", "time"), None, None)


def test_a_number_in_quotes_is_the_number():
    (row,) = Plan.of({"task": TINY, "rows": [{"per_device_train_batch_size": "4"}]}).rows
    assert row.arguments.given == {"per_device_train_batch_size": 4}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"task": TINY}, "give lists of values under [grid]"),
        ({"task": TINY, "gird": GRID}, "a plan has no 'gird'. Did you mean 'grid'"),
        ({"task": {"modle": "bert-tiny"}, "grid": GRID}, "[task] has no 'modle'. Did you mean 'model'"),
        ({"grid": GRID}, "[task] has no model: name one"),
        ({"task": {"model": "bert-tony"}, "grid": GRID}, "Did you mean 'bert-tiny'"),
        ({"task": {"model": 5}, "grid": GRID}, "model=5: give a text"),
        ({"task": "bert-tiny", "grid": GRID}, "write it as [task]"),
        ({"task": TINY | {"seq_len": 100_000}, "grid": GRID}, "positions for 512 tokens"),
        ({"task": TINY | {"architecture": "BertForNothing"}, "grid": GRID}, "no class 'BertForNothing'"),
        ({"task": TINY, "grid": {"optm": ["sgd"]}}, "[grid]: unknown training argument 'optm'. Did you mean 'optim'"),
        ({"task": TINY, "grid": {"optim": "sgd"}}, "e.g. optim = ['sgd']"),
        ({"task": TINY, "grid": {"optim": []}}, "give at least one value"),
        ({"task": TINY, "grid": {"optim": ["sgdd"]}}, "Did you mean 'sgd'"),
        ({"task": TINY, "grid": {"bf16": ["maybe"]}}, "bf16='maybe': give True or False"),
        ({"task": TINY, "grid": {"learning_rate": ["fast"]}}, "learning_rate='fast': give a number"),
        ({"task": TINY, "grid": {"per_device_train_batch_size": [0]}}, "at least 1"),
        ({"task": TINY, "grid": {"per_device_train_batch_size": [True]}}, "give a whole number"),
        ({"task": TINY, "grid": {"optim": [None]}}, "optim=None"),
        ({"task": TINY, "grid": {"steps": [3]}}, "give it at the top of the file"),
        ({"task": TINY, "grid": {"output_dir": ["x"]}}, "output_dir"),
        ({"task": TINY, "grid": {"config": [{}]}}, "move it to [task]"),
        ({"task": TINY, "arguments": {"seq_len": 8}, "grid": GRID}, "give it under [task]"),
        ({"task": TINY, "arguments": {"optim": "sgd"}, "grid": GRID}, "'optim' is set in another table too: keep one"),
        ({"task": TINY, "grid": {"seq_len": [8, 16]}}, "'seq_len' is set in another table too: keep one"),
        ({"task": TINY, "grid": {"max_steps": [*range(1, 102)], "seed": [*range(100)]}}, "10,100 combinations"),
        ({"task": TINY, "grid": {"optim": ["sgd", "sgd"]}}, "are the same training"),
        ({"task": TINY, "grid": GRID, "rows": [{"optim": "sgd"}]}, "are the same training"),
        ({"task": TINY, "rows": [{"name": "a"}, {"name": "b"}]}, "rows 'a' and 'b' are the same training"),
        ({"task": TINY, "rows": {"optim": "sgd"}}, "[[rows]]"),
        ({"task": TINY, "rows": [{"name": 4}]}, "name=4: give a text"),
        ({"task": TINY, "rows": [{"gradient_checkpointing": True, "activation_checkpointing": True}]}, "keep one"),
        ({"task": TINY, "grid": GRID, "measure": "speed"}, "choose 'memory', 'time' or both"),
        ({"task": TINY, "grid": GRID, "measure": []}, "choose 'memory', 'time' or both"),
        ({"task": TINY, "grid": GRID, "steps": 0}, "steps=0: give a whole number"),
        ({"task": TINY, "grid": GRID, "processes": True}, "processes=True: give a whole number"),
        ({"task": TINY, "grid": GRID, "timeout": -1}, "timeout=-1: give a number above 0"),
    ],
)
def test_a_mistake_is_refused_in_one_line_that_says_where(content, words, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        Plan.of(content)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[task", "plan.toml: not TOML (Expected"),
        (b"\xff", "plan.toml: not TOML ('utf-8'"),
        (b"[task]\nmodel = 'bert-tiny'\n[gird]", "plan.toml: a plan has no 'gird'"),
        (None, "plan.toml: cannot be read (No such file"),
    ],
)
def test_of_a_file_the_line_begins_with_its_name(tmp_path, content, words):
    path = tmp_path / "plan.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(words)):
        Plan.read(path)


def test_the_example_of_the_page_is_a_plan(tmp_path):
    page = Path(__file__).resolve().parents[2] / "docs" / "sweeps.md"
    (example,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    (tmp_path / "grid.toml").write_text(example)
    plan = Plan.read(tmp_path / "grid.toml")
    assert len(plan.rows) == 13 and plan.rows[-1].name == "the largest batch"
