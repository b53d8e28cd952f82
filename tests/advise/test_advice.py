"""The advisor: what it proposes fits when it is trained, the next one does not, and how it shows itself."""

import json
import sys

import pytest

from perf_helpers import Lab, cli, hardware
from perf_helpers.advise import advise, verify
from perf_helpers.lab.store import Store

MB = 10**6
cpu_only = pytest.mark.skipif(hardware.describe().kind != "cpu", reason="it trains on a CPU")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(out=tmp_path_factory.mktemp("lab"))


@pytest.fixture
def home(monkeypatch, tmp_path):
    """The user's cache folder, empty."""
    monkeypatch.setenv("PERF_HELPERS_HOME", str(tmp_path))
    return tmp_path


# ---------------------------------------------------------------------------- against real trainings


@cpu_only
@pytest.mark.parametrize(("name", "precision"), [("machine", {}), ("native", {"bf16": True})], ids=["fp32", "bf16"])
def test_what_is_proposed_fits_when_it_is_trained_and_the_next_micro_batch_does_not(
    lab, task, request, name, precision
):
    only = {"optim": "adamw_torch_fused", "gradient_checkpointing": False} | precision
    machine = request.getfixturevalue(name)
    advice = advise(task, memory="14MB", effective_batch=8, must=only, runs=[], machine=machine)
    (recipe,) = advice.recipes
    verified = verify(advice, lab)
    assert verified.measured_bytes == recipe.needed_bytes <= 14 * MB
    assert verified.difference_bytes == 0 and recipe.headroom_bytes == 14 * MB - verified.measured_bytes
    size = 2 * recipe.arguments["per_device_train_batch_size"]
    more = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
    beyond = lab.train("next", task=task, measure="memory", **recipe.arguments | more)
    assert beyond.peak_bytes > 14 * MB
    assert f", {size} x {8 // size} needs {beyond.peak_bytes / 1e6:.1f} MB" in recipe.why_not_next


def test_an_advice_for_another_device_is_not_verified_here(ask, lab):
    other = {"cpu": "cuda", "cuda": "cpu"}[lab.machine.kind]
    with pytest.raises(ValueError, match="verify it where it will run"):
        verify(ask(memory="64GB", device=other), lab)


# ---------------------------------------------------------------------------- what is asked


@pytest.mark.parametrize("memory", ["16", "16 gigs", "16gb", "-1GB", "", "GB", 0, True, None, 16, float("nan"), "1kB"])
def test_memory_is_read_strictly(ask, memory):
    with pytest.raises(ValueError, match=r"memory=.*'16GB'"):
        ask(memory=memory)


def test_memory_in_its_units(ask):
    found = [ask(memory=text).memory_bytes for text in ("16GB", "16 GiB", "1500.5MB", 2_000_000_000, 3e9)]
    assert found == [16 * 10**9, 16 * 2**30, 1_500_500_000, 2_000_000_000, 3_000_000_000]


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"effective_batch": 0}, "effective_batch=0"),
        ({"most": True}, "most=True"),
        ({"processes": 3}, "does not divide"),
        ({"device": "tpu"}, "'cpu' or 'cuda'"),
    ],
)
def test_a_mistake_is_named(ask, followed, options, hint):
    with pytest.raises(ValueError, match=hint):
        ask(**options)
    assert not followed


def test_earlier_runs_are_read_without_making_a_lab(ask, pairs, home, monkeypatch):
    for run in pairs(5.0, gradient_checkpointing=True):
        Store(home / "runs.jsonl").append(run)
    monkeypatch.setattr("perf_helpers.advise.advice.Lab", None)
    advice = ask(memory=420 * MB, runs=None)
    assert {recipe.name: recipe.speed for recipe in advice.recipes}["checkpointing, AdamW, 64 x 1"] == 0.5


# ---------------------------------------------------------------------------- how it shows itself


def test_it_shows_itself_as_text_as_html_and_as_json(ask):
    advice = ask(memory=420 * MB, must={"dtype": "float32"})
    text, page = repr(advice), advice._repr_html_()
    assert "TrainingArguments(" in text and "from_pretrained(..., dtype='float32')" in text
    assert "<table>" in page and all(recipe.name in page for recipe in advice.recipes)
    data = json.loads(json.dumps(advice.to_dict()))
    assert data["status"] == "ok" and data["recipes"][0]["text"] == advice.recipes[0].text
    assert len(data["recipes"]) == len(advice.recipes) > 1


def test_where_nothing_fits_there_is_nothing_to_paste(ask):
    page = ask(memory=150 * MB)._repr_html_()
    assert "nothing fits" in page and "<table>" in page and "<pre" not in page


def test_what_is_to_be_pasted_is_python_that_transformers_takes(ask, tmp_path):
    from transformers import TrainingArguments

    for recipe in ask(memory=420 * MB).recipes:
        given = eval(recipe.text, {"TrainingArguments": dict})
        assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given).optim == recipe.arguments["optim"]


# ---------------------------------------------------------------------------- the command


@pytest.fixture
def plain(machine, home, monkeypatch):
    """The command line is on a machine of its own."""
    monkeypatch.setattr(hardware, "describe", lambda: machine)


def command(monkeypatch, *words):
    words = ["perf-helpers", "advise", "--model", "bert-tiny", "--seq_len", "16", *words]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


@cpu_only
def test_the_command_prints_one_json_object_and_verifies_it(plain, monkeypatch, capsys):
    words = ["--memory", "1GB", "--effective-batch", "2", "--must", "optim=sgd", "--avoid", "accumulation"]
    assert command(monkeypatch, *words, "--verify", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "ok" and found["recipes"][0]["arguments"]["optim"] == "sgd"
    assert found["verification"]["difference_bytes"] == 0 < found["verification"]["measured_bytes"]


def test_the_command_ends_with_0_where_nothing_fits(followed, plain, monkeypatch, capsys):
    words = ["--memory", "150MB", "--effective-batch", "64", "--device", "cpu"]
    assert command(monkeypatch, *words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "nothing fits"
    assert command(monkeypatch, *words) == 0 and "nothing fits" in capsys.readouterr().out


def test_the_command_names_a_mistake_and_ends_with_2(monkeypatch, capsys):
    assert command(monkeypatch, "--memory", "lots", "--effective-batch", "2") == 2
    printed = capsys.readouterr()
    assert "'16GB'" in printed.err and not printed.out
