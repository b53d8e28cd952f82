"""The advisor: a proposed recipe fits when it is trained, the next larger one does not; and the advice as text and
HTML.
"""

import dataclasses
import json
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from perf_helpers import Lab, cli
from trainmem.advise import advise, verify
from trainmem.cards import CARDS, CONTEXT_BYTES, CONTEXT_SOURCE
from trainmem.core import hardware
from trainmem.core.task import Task
from trainmem.records import Memory, Run, Store
from trainmem.rehearsal import build

MB = 10**6
ROOT = Path(__file__).resolve().parents[2]
cpu_only = pytest.mark.skipif(hardware.describe().kind != "cpu", reason="it trains on a CPU")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(out=tmp_path_factory.mktemp("lab"))


@pytest.fixture
def home(monkeypatch, tmp_path):
    """Let the user's cache folder be an empty folder, and return this folder."""
    monkeypatch.setenv("PERF_HELPERS_HOME", str(tmp_path))
    return tmp_path


# ---------------------------------------------------------------------------- against real trainings


@pytest.mark.nightly
@cpu_only
@pytest.mark.parametrize(("name", "precision"), [("machine", {}), ("native", {"bf16": True})], ids=["fp32", "bf16"])
def test_what_is_proposed_fits_when_it_is_trained_and_the_next_micro_batch_does_not(
    lab, task, request, name, precision
):
    only = {"optim": "adamw_torch_fused", "gradient_checkpointing": False} | precision
    machine = request.getfixturevalue(name)
    advice = advise(task, memory="14MB", effective_batch=8, must=only, runs=[], machine=machine, margin=0)
    (recipe,) = advice.recipes
    verified = verify(advice, lab)
    assert verified.found_bytes == recipe.needed_bytes <= 14 * MB
    assert verified.difference_bytes == 0 and recipe.headroom_bytes == 14 * MB - verified.found_bytes
    size = 2 * recipe.arguments["per_device_train_batch_size"]
    more = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
    beyond = lab.train("next", task=task, measure="memory", **recipe.arguments | more)
    assert beyond.peak_bytes > 14 * MB
    assert f", {size} x {8 // size} needs {beyond.peak_bytes / 1e6:.1f} MB" in recipe.why_not_next


def test_an_advice_is_not_verified_where_its_device_is_neither_there_nor_rehearsed(ask, monkeypatch):
    gpu = SimpleNamespace(machine=hardware.Machine("a GPU", "cuda", gpus=(hardware.Gpu(0, capability=(8, 0)),)))
    with pytest.raises(ValueError, match=r"for cpu, .*a GPU: verify it where it will run$"):
        verify(ask(memory="64GB"), gpu)
    monkeypatch.setattr(build, "problem", lambda: "no compiler")
    for capability in ((9, 0), (8, 6)):
        advice = ask(memory="64GB", device="cuda", compute_capability=capability)
        with pytest.raises(ValueError, match=r"verify it .*; no compiler"):
            verify(advice, gpu)


def test_a_rehearsal_has_the_memory_the_context_and_the_capability_of_the_advice(ask, monkeypatch):
    requested = []

    def rehearse(task, *, on, **options):
        requested.append((on, options))
        memory = Memory(options["per_device_train_batch_size"] * MB, "allocated")
        return Run("r", "ok", memory=memory, machine={"name": f"rehearsed {on.name}", "rehearsed": True})

    monkeypatch.setattr("trainmem.advise.advice.rehearse", rehearse)
    monkeypatch.setattr(build, "problem", lambda: None)
    options = {"device": "cuda", "compute_capability": (8, 6), "context_memory": "300MiB", "processes": 2}
    advice = ask(memory="4GB", **options)
    found = verify(advice, SimpleNamespace(machine=hardware.Machine("a CPU", "cpu")))
    ((on, options),) = requested
    assert (on.capability, on.memory_bytes, on.context_bytes, on.devices) == ((8, 6), 4 * 10**9, 300 * 2**20, 2)
    assert options == {"processes": 2, **advice.recipes[0].arguments}
    assert found.is_rehearsed and found.to_dict()["rehearsed"] and "on a rehearsed GPU of compute" in repr(found)
    assert found.found_bytes == 32 * MB and "measured" not in repr(found)


@pytest.mark.nightly
@pytest.mark.skipif(build.problem() or not build.interpreter(), reason="torch's CUDA build is not here")
def test_what_is_advised_for_a_gpu_takes_as_much_in_a_rehearsal(task, lab):
    only = {"optim": "sgd", "gradient_checkpointing": False, "bf16": True}
    options = {"device": "cuda", "compute_capability": (8, 0), "context_memory": 500 * MB, "runs": [], "margin": 0}
    found = verify(advise(task, memory="600MB", effective_batch=4, must=only, avoid=["accumulation"], **options), lab)
    assert found.run.ok and found.is_rehearsed is (lab.machine.kind == "cpu")
    assert found.difference_bytes == 0 < found.found_bytes


# ---------------------------------------------------------------------------- the records


def test_what_is_kept_for_the_context_is_what_published_messages_tell():
    messages = tomllib.loads((ROOT / "benchmarks" / "contexts.toml").read_text(encoding="utf-8"))["message"]
    alone = [each for each in messages if "besides" not in each]
    taken = [(each["in_use_gib"] - each["allocated_gib"]) * 1024 - each["reserved_mib"] for each in alone]
    enough = sum(mebibytes <= CONTEXT_BYTES / 2**20 for mebibytes in taken)
    assert len({each["source"] for each in messages}) == len(messages)
    reported = f"enough for {enough} of {len(taken)} .* took {min(taken):.0f} to {max(taken):.0f} MiB$"
    assert re.search(reported, CONTEXT_SOURCE) and enough / len(taken) > 0.75
    assert all(each["in_use_gib"] <= each["capacity_gib"] for each in messages)


def test_recorded_advice_kept_its_word_in_nearly_all_pairs_of_model_and_card():
    record = json.loads((ROOT / "results" / "advice.json").read_text(encoding="utf-8"))
    decided = [row for row in record["rows"] if "left_out" not in row]
    for row in decided:
        assert row["best"]["micro_batch"] < row["next"]["micro_batch"] <= row["effective_batch"]
        fits, is_refused = row["best"]["status"] == "ok", row["next"]["status"] == "out of memory"
        assert row["keeps_its_word"] == (fits and is_refused)
        assert fits or "CUDA out of memory" in row["best"]["message"]
    kept = sum(row["keeps_its_word"] for row in decided)
    assert record["summary"]["decided"] == len(decided) >= 40 and record["summary"]["keeps_its_word"] == kept
    assert kept / len(decided) >= 0.95
    assert record["summary"]["architectures"] >= 15 and len(record["summary"]["capabilities"]) >= 4
    assert all(record[name] for name in ("assumed_context_bytes", "machine", "versions", "date"))


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
        ({"processes": 3}, "effective_batch=64 .*processes=3"),
        ({"device": "tpu"}, "'cpu' or 'cuda'"),
        ({"device": "cuda", "context_memory": "lots"}, "context_memory='lots'"),
        ({"device": "cuda", "context_memory": -1}, "context_memory=-1"),
        ({"context_memory": "1GB"}, "a CPU has no CUDA context"),
    ],
)
def test_a_mistake_is_named(ask, followed, options, hint):
    with pytest.raises(ValueError, match=hint):
        ask(**options)
    assert not followed


@pytest.mark.parametrize(
    ("options", "context", "source"),
    [
        ({}, 530 * 2**20, "530 MiB .* messages"),
        ({"processes": 2}, 530 * 2**20, "NCCL's buffers"),
        ({"context_memory": "450MiB"}, 450 * 2**20, "450 MiB .*as given"),
        ({"context_memory": 0}, 0, "0 MiB .*as given"),
    ],
)
def test_what_is_kept_for_the_context_is_reported_and_is_not_the_allocators(ask, followed, options, context, source):
    advice = ask(memory=4 * 10**9, device="cuda", **options)
    assert advice.context_bytes == context and re.search(
        source, next(note for note in advice.notes if "CUDA context" in note)
    )
    assert {requested["device_memory"] for requested in followed} == {4 * 10**9 - context}
    for recipe in advice.recipes:
        assert recipe.needed_bytes == recipe.peak_bytes + context == 4 * 10**9 - recipe.headroom_bytes


def test_a_margin_is_left_free_and_named(ask, followed):
    advice = ask(margin=0.05)
    assert "5% of the memory, 50.0 MB" in advice.notes[1]
    assert min(recipe.headroom_bytes for recipe in advice.recipes) >= 50 * MB
    fewer = ask(margin=0.5)
    assert all(recipe.needed_bytes <= 500 * MB for recipe in fewer.recipes) and fewer.recipes != advice.recipes
    with pytest.raises(ValueError, match=r"margin=1: give a fraction"):
        ask(margin=1)


@pytest.mark.parametrize(
    ("options", "device", "capability", "assumed"),
    [
        ({"memory": "80GB"}, "cuda", (9, 0), "74.51 GiB"),
        ({"memory": "24GiB"}, "cuda", (9, 0), "24.00 GiB"),
        ({"memory": "80GB", "device": "cpu"}, "cpu", None, None),
        ({"memory": "7GB"}, "cpu", None, None),
        ({"memory": "7GB", "device": "cuda"}, "cuda", (9, 0), "compute capability 9.0"),
        ({"memory": None, "card": "T4"}, "cuda", (7, 5), None),
        ({"memory": "12GB", "card": "t4"}, "cuda", (7, 5), None),
        ({"memory": None, "card": "t4", "compute_capability": (8, 0)}, "cuda", (8, 0), None),
    ],
)
def test_who_names_a_card_or_its_memory_means_a_gpu(ask, followed, options, device, capability, assumed):
    advice = ask(**{"device": None} | options)
    assert (advice.device, advice.compute_capability) == (device, capability)
    reported = [note for note in advice.notes if note.startswith("Assumed")]
    assert (assumed is None and not reported) or assumed in reported[0]
    if options["memory"] is None:
        assert advice.memory_bytes == CARDS["t4"].memory_bytes
    assert ("--device" not in advice.notes[0]) and {each["device"] for each in followed} == {device}


def test_a_gpu_without_a_recorded_run_is_ranked_by_the_guides_or_not_at_all(ask, followed):
    sources = {source for recipe in ask(memory="4GB", device="cuda").recipes for source in recipe.speed_source}
    assert sources and all("not measured" in text or "plain recipe" in text for text in sources)
    assert not any("CPU" in text for text in sources)


def test_nothing_fits_where_the_context_takes_all(ask, followed):
    assert ask(memory="400MB", device="cuda").status == "nothing fits"
    assert {requested["device_memory"] for requested in followed} == {0}


def test_earlier_runs_are_read_without_making_a_lab(ask, pairs, home, monkeypatch):
    for run in pairs(5.0, gradient_checkpointing=True):
        Store(home / "runs.jsonl").append(run)
    monkeypatch.setattr("trainmem.advise.advice.Runner", None)
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
    """Let the command line find the fixture `machine` as the machine that it runs on."""
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
    assert found["verification"]["difference_bytes"] == 0 < found["verification"]["found_bytes"]


def test_the_command_ends_with_0_where_nothing_fits(followed, plain, monkeypatch, capsys):
    words = ["--memory", "150MB", "--effective-batch", "64", "--device", "cpu"]
    assert command(monkeypatch, *words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "nothing fits"
    assert command(monkeypatch, *words) == 0 and "nothing fits" in capsys.readouterr().out


def test_the_command_names_a_mistake_and_ends_with_2(monkeypatch, capsys):
    assert command(monkeypatch, "--memory", "lots", "--effective-batch", "2") == 2
    printed = capsys.readouterr()
    assert "'16GB'" in printed.err and not printed.out


# ---------------------------------------------------------------------------- lines beside the recipes

GPU = {"device": "cuda", "compute_capability": (8, 0)}


def lines_with(advice, word):
    return [note for note in advice.notes if word in note]


@pytest.mark.parametrize(
    ("kernels", "words"), [(("flash",), "flash kernel"), ((), "no fused kernel"), (("cuDNN", "flash"), "and flash")]
)
def test_attentions_kernel_is_reported(ask, attending, kernels, words):
    attending(*kernels)
    (line,) = lines_with(ask(), "Attention")
    assert words in line


def test_compiled_code_is_reported_once_it_was_measured_with_its_memory(ask, pairs):
    (line,) = lines_with(ask(runs=pairs(13.0, torch_compile=True)), "torch.compile")
    assert "cannot be estimated" in line, "the runs have no memory"

    def with_peak(run):
        peak = 120 if run.arguments.get("torch_compile") else 100
        return dataclasses.replace(run, memory=Memory(peak, "counted"))

    runs = [with_peak(run) for run in pairs(20.0, torch_compile=True)]
    (line,) = lines_with(ask(runs=runs), "torch.compile")
    assert "2.00" in line and "1.20 x the peak" in line and "3 pairs" in line
    (line,) = lines_with(ask(runs=runs[:2]), "torch.compile")
    assert "speed not measured" in line and "1.20 x the peak" in line, "one pair says nothing of speed"


def test_a_vocabulary_is_padded_where_a_product_is_as_wide_and_the_device_wants_multiples(ask):
    language, classifier = Task("gpt2", seq_len=32), Task("bert-tiny", seq_len=32)
    (line,) = lines_with(ask(task=language, **GPU), "vocabulary")
    assert "pad_to_multiple_of=64" in line and "50304" in line and "MB" in line
    (line,) = lines_with(ask(task=language, device="cuda", compute_capability=(7, 5)), "vocabulary")
    assert "pad_to_multiple_of=8" in line and "50264" in line
    assert not lines_with(ask(task=language), "vocabulary"), "a CPU"
    assert not lines_with(ask(task=classifier, **GPU), "vocabulary"), "it is looked up, not multiplied"
    assert not lines_with(ask(task=language.replace(config={"vocab_size": 50304}), **GPU), "vocabulary")


def test_a_length_is_padded_to_eight(ask):
    (line,) = lines_with(ask(task=Task("bert-tiny", seq_len=30), **GPU), "multiple of 8")
    assert "pad to 32" in line
    assert not lines_with(ask(task=Task("bert-tiny", seq_len=32), **GPU), "multiple of 8")


def test_plain_attention_and_unfused_adamw_are_for_who_asks(ask):
    names = {name for recipe in ask(memory=10**12, most=99).recipes for name in recipe.arguments.values()}
    assert not {"eager", "adamw_torch"} & names
    requested = ask(memory=10**12, must={"attn_implementation": "eager", "optim": "adamw_torch"})
    first = requested.recipes[0]
    assert first.arguments["attn_implementation"] == "eager" and first.arguments["optim"] == "adamw_torch"
    assert any("length x length" in cost for cost in first.costs)
    assert any("foreach" in cost for cost in first.costs)
