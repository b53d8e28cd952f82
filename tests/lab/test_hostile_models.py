"""A malicious configuration is refused at once with one message, before a model is built; code in a configuration's
folder never runs.
"""

import json
import os
import re
import resource
from pathlib import Path

import pytest

from trainmem.core.adapters import settings_of
from trainmem.core.task import Task

BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32, "num_attention_heads": 2}
BERT |= {"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 100}


@pytest.fixture(autouse=True)
def offline_in_a_small_memory(monkeypatch):
    """Limit this process's memory, so that allocating as much as a hostile model file demands fails; also cut off the
    network.
    """
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    Task("bert-tiny").build_model(device="meta")  # what is imported once is none of theirs
    used = int(re.search(r"VmData:\s*(\d+)", Path("/proc/self/status").read_text())[1]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + (1 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limits)


def refusal(model, **options):
    with pytest.raises(ValueError) as refused:
        Task(str(model), **options).build_model(device="meta")
    assert len(str(refused.value)) < 800
    return str(refused.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000: give a whole number from 0 to 1,000"),
        ({"hidden_size": 10**9}, "hidden_size=1000000000: give a whole number"),
        ({"num_labels": 10**9}, "num_labels"),
        ({"text_config": {"hidden_size": 10**12}}, "hidden_size"),
        ({"hidden_size": -5}, "hidden_size=-5"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"vocab_size": 0}, "cannot build"),
        ({"pad_token_id": 10**9}, "Padding_idx"),
        ({"hidden_size": "many"}, "configuration"),
        ({"hidden_size": float("nan")}, "not JSON"),
        ({"hidden_size": [32]}, "configuration"),
        ({"num_hidden_layers": True}, "configuration"),
        ({"hidden_act": "nope"}, "nope"),
        ({"model_type": ["bert"]}, "model_type=['bert']"),
        ({"model_type": "berrt"}, "Did you mean 'bert'"),
        ({"self": 1}, "configuration"),
    ],
)
def test_a_size_or_a_type_that_no_model_has_is_refused_before_it_is_built(fields, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BERT | fields))
    assert words in refusal(tmp_path)


def test_what_is_given_for_a_preset_is_looked_at_too():
    assert "num_hidden_layers" in refusal("bert-tiny", config={"num_hidden_layers": 10**12})


def _loop(path):
    os.symlink(path.name, path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text('{"a":' * 10_000 + "1" + "}" * 10_000), "nested brackets"),
        (
            lambda path: path.write_bytes(b'{"model_type": "bert", "x": "' + b"y" * 100_000_000 + b'"}'),
            "16,777,216 bytes",
        ),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not JSON"),
        (_loop, "symbolic links"),
        (os.mkfifo, "not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a file"),
    ],
    ids=["deep", "100 MB", "no text", "loop", "pipe", "without end"],
)
def test_a_file_that_would_not_end_is_refused_unread(make, words, tmp_path):
    make(tmp_path / "config.json")
    assert words in refusal(tmp_path) and words in refusal(tmp_path / "config.json")
    for name in ("peft", "quantization_config"):
        with pytest.raises(ValueError, match=rf"^{name}=.*{words}"):
            settings_of(name, str(tmp_path / "config.json"))


@pytest.mark.parametrize("model_type", ["bert", "evil"])
def test_no_code_of_a_model_s_folder_is_run(model_type, tmp_path):
    marker = tmp_path / "was run"
    code = {"AutoConfig": "evil.Config", "AutoModelForMaskedLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(BERT | {"model_type": model_type, "auto_map": code}))
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: ...\nclass Model: ...\n")
    if model_type == "evil":
        assert "model_type='evil'" in refusal(tmp_path)
    else:
        assert type(Task(str(tmp_path)).build_model(device="meta")).__module__.startswith("transformers.")
    assert not marker.exists()


@pytest.mark.parametrize("model", ["x" * 5000, "a\0b", "a\0b.json", "../../etc/passwd", "http://[::1"])
def test_a_name_that_is_no_path_is_refused_in_words(model):
    assert "not a preset" in refusal(model) or "not JSON" in refusal(model)


def test_a_file_or_a_path_is_not_taken_for_a_name_on_the_hub(tmp_path, monkeypatch):
    """A path must not cause a request to the Hub, whether it is a folder, a file or missing; a file must be read."""
    monkeypatch.setattr("trainmem.core.configurations.hub_answers", lambda: pytest.fail("the Hub was asked"))
    folder = tmp_path / "mein Modell"
    folder.mkdir()
    (folder / "model.bin").write_bytes(b"\x80\x02")
    assert "Give a config.json or its folder" in refusal(folder), "weights only"
    assert "not JSON" in refusal(folder / "model.bin")
    assert "not on the Hub. Did you mean 'gpt2'" in refusal(tmp_path / "gpt2")


@pytest.mark.parametrize(
    ("name", "near"), [("meta-llama/Llama-3.1-8B", "'llama-3-8b'"), ("google/BERT-large", "'bert-large-uncased'")]
)
def test_a_name_that_cannot_be_fetched_gets_the_nearest_preset_and_another_way(name, near, monkeypatch):
    monkeypatch.setattr("trainmem.core.configurations.hub_answers", lambda: False)
    printed = refusal(name)
    assert "does not answer" in printed and near in printed and printed.endswith("config.json.")
