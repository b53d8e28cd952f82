"""The estimate for the classes in transformers' registries, and its recorded results, results/architectures.json."""

import argparse
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import measure_architectures as architectures  # noqa: E402
from runner import RESULTS, read_record  # noqa: E402

from perf_helpers import Lab  # noqa: E402

SLICE = argparse.Namespace(count=10, first=-1)


@pytest.mark.skipif(not (RESULTS / architectures.RECORD).is_file(), reason="no record: run `make architectures`")
def test_every_recorded_class_is_equal_or_has_a_reason():
    record = read_record(RESULTS / architectures.RECORD)
    for row in record["rows"]:
        known = row.get("left_out") or row.get("assumed") or row["class"] in architectures.REASONS
        assert known or row["estimated"] == row["counted"], row["class"]
    off = record["summary"]["not_equal"]
    assert {*architectures.REASONS} & {row["class"] for row in record["rows"]} <= {*off}, "one has become equal"


def test_turns_pass_over_all_classes():
    every = [*architectures.classes()]
    turns = [architectures.chosen(argparse.Namespace(count=50, first=first)) for first in range(0, len(every), 50)]
    assert {name for names in turns for name in names} == {*every}


def test_a_shrunk_configuration_is_small_in_all_its_parts():
    fields = {"num_hidden_layers": 48, "vocab_size": 50_000, "image_token_id": 49_000, "encoder_layerdrop": 0.1}
    small = architectures.shrunk(fields | {"text_config": {"model_type": "llama", "hidden_size": 4096}}, 32)
    assert small["num_hidden_layers"] == 2 and small["vocab_size"] == 300 and small["image_token_id"] < 300
    assert small["text_config"]["hidden_size"] == 32 and small["encoder_layerdrop"] == 0


def test_sizes_that_depend_on_each_other_are_cut_together():
    fields = {"num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 192}
    fields |= {"qk_head_dim": 192, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "num_feat_extract_layers": 7}
    fields |= {"layer_types": ["a", "a", "a", "b", "a", "b"], "intermediate_size": [640] * 6, "conv_dim": [512] * 7}
    small = architectures.shrunk(fields | {"per_layer_config": {"01": {"head_dim": 512}, "05": {}}}, 32)
    assert small["num_key_value_heads"] == small["num_attention_heads"] == 4
    assert small["head_dim"] == small["qk_head_dim"] == 16
    assert (small["layer_types"], small["intermediate_size"]) == (["a", "b"], [64, 64])
    assert [*small["per_layer_config"]] == ["01"] and len(small["conv_dim"]) == small["num_feat_extract_layers"] == 7
    assert architectures.shrunk(fields | {"num_key_value_heads": 8}, 32)["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Wav2Vec2ForCTC", "wav2vec2"), ("DeepseekV3ForCausalLM", "deepseek_v3"), ("XmodForMaskedLM", "xmod")],
)
def test_a_class_of_a_type_that_needs_more_than_small_sizes_can_be_made(name, kind, tmp_path):
    for form, path in architectures.configurations(name, kind, tmp_path):
        task = architectures.task_of(path, name, architectures.classes()[name][1])
        assert form == "width 32" and task.parameters() < 5_000_000
        break


@pytest.mark.nightly
@pytest.mark.parametrize("place", range(SLICE.count))
def test_todays_classes_are_equal_or_have_a_reason(place, tmp_path):
    name = architectures.chosen(SLICE)[place]
    kind, _ = architectures.classes()[name]
    row = architectures.compared(Lab("cpu", out=tmp_path), name, kind, tmp_path)
    if reason := row.get("left_out"):
        pytest.skip(reason)
    assert row.get("assumed") or name in architectures.REASONS or row.get("estimated") == row["counted"], name


def test_the_record_says_why_classes_are_left_out():
    texts = ["Backbone requires the timm library", "turn a loss from the inputs", "You have to specify bbox", "k"]
    rows = [{"class": f"{number}", "left_out": f"width 32: {text}"} for number, text in enumerate(texts)]
    summary = architectures.conclude(rows, None)["summary"]
    assert (summary["tried"], summary["compared"]) == (4, 0)
    reasons = [*summary["left_out"]]
    assert [*summary["left_out"].values()] == [["0"], ["1"], ["2"], ["3"]]
    assert "package" in reasons[0] and "loss" in reasons[1]
