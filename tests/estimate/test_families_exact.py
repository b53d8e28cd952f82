"""Models of images and speech, nested configurations and mixtures of experts: the estimate on a CPU equals the lab's
count.
"""

import dataclasses
import json
import re
import warnings

import pytest

from perf_helpers import Lab
from trainmem.core.task import Task
from trainmem.estimate import estimate

_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_DECODER = _TEXT | {"num_key_value_heads": 1, "vocab_size": 300, "head_dim": 16}
_VISION = _TEXT | {"image_size": 64, "patch_size": 16}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_MARKS = {"image_token_id": 9, "video_token_id": 8, "vision_start_token_id": 7, "vision_end_token_id": 6}
_QWEN = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
_STACKS = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
_STACKS |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
_AUDIO = _TEXT | {"layerdrop": 0.0, "conv_dim": [32, 32], "conv_kernel": [10, 8], "conv_stride": [5, 64]}
_AUDIO |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_length": 4}
_LLAMA = {"model_type": "llama"} | _DECODER
_CLIP = {"model_type": "clip_vision_model"} | _VISION
_LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
_LINEAR |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}

# {name: (fields of a config.json, class, fields of the task)}
CASES = {
    "qwen2.5-vl": (
        {"model_type": "qwen2_5_vl", "text_config": _DECODER | _MROPE, "vision_config": _QWEN} | _MARKS,
        None,
        {"seq_len": 32, "image_size": 112},
    ),
    "whisper": (
        {"model_type": "whisper", "vocab_size": 300, "max_source_positions": 50, "num_mel_bins": 16}
        | {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1, "decoder_start_token_id": 3}
        | _STACKS,
        None,
        {"seq_len": 16},
    ),
    "gemma3": (
        {
            "model_type": "gemma3",
            "text_config": _DECODER,
            "vision_config": {"model_type": "siglip_vision_model"} | _VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 9,
        },
        None,
        {"seq_len": 32},
    ),
    "wav2vec2": ({"model_type": "wav2vec2"} | _AUDIO, "Wav2Vec2ForCTC", {"audio_seconds": 0.5}),
    "segformer": (
        {"model_type": "segformer", "depths": [1] * 4, "hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 16},
        "SegformerForSemanticSegmentation",
        {"image_size": 64},
    ),
    "yolos": (
        {"model_type": "yolos", "num_detection_tokens": 10} | _VISION | {"image_size": [64, 48]},
        "YolosForObjectDetection",
        {},
    ),
    "multiple choice": ({"model_type": "bert", "vocab_size": 300} | _TEXT, "BertForMultipleChoice", {"seq_len": 16}),
    "contrastive": ({"model_type": "bert", "vocab_size": 300} | _TEXT, None, {"objective": "contrastive"}),
    "preference": (_LLAMA, None, {"objective": "preference"}),
    # An image size, a vocabulary, labels and end tokens that nested or other fields give.
    "clip": (
        {"model_type": "clip", "vision_config": _VISION, "text_config": _TEXT | {"vocab_size": 300}},
        "CLIPForImageClassification",
        {},
    ),
    "bart classifies": ({"model_type": "bart", "vocab_size": 300} | _STACKS, "BartForSequenceClassification", {}),
    "llava": (
        {"model_type": "llava", "text_config": _LLAMA, "vision_config": _CLIP, "image_token_index": 9},
        None,
        {"seq_len": 32},
    ),
    "qwen3-vl": (
        {
            "model_type": "qwen3_vl",
            "text_config": _DECODER | _MROPE,
            "vision_config": _QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        }
        | _MARKS,
        None,
        {"seq_len": 32, "image_size": 96},
    ),
    "smolvlm": (
        {
            "model_type": "smolvlm",
            "text_config": _LLAMA,
            "vision_config": _VISION,
            "image_token_id": 9,
            "pad_token_id": 0,
        },
        None,
        {"seq_len": 32, "image_size": 128},
    ),
    "qwen3.5": (
        {
            "model_type": "qwen3_5",
            "text_config": _DECODER | _LINEAR,
            "vision_config": _QWEN | {"num_position_embeddings": 16},
        },
        "Qwen3_5ForCausalLM",
        {"seq_len": 32},
    ),
    # Its forward takes labels without naming them.
    "qwen3.5 classifies": (
        {"model_type": "qwen3_5"}
        | {"text_config": _DECODER | _LINEAR, "vision_config": _QWEN | {"num_position_embeddings": 16}},
        "Qwen3_5ForSequenceClassification",
        {},
    ),
    # Its matches are numpy's memory.
    "maskformer": (
        {
            "model_type": "maskformer",
            "backbone_config": {"model_type": "swin", "embed_dim": 16, "depths": [1] * 4, "num_heads": [2] * 4}
            | {"image_size": 64, "window_size": 2, "drop_path_rate": 0.0}
            | {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
            "decoder_config": {"model_type": "detr", "d_model": 32, "encoder_layers": 1, "decoder_layers": 2}
            | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 10}
            | {"decoder_ffn_dim": 32, "encoder_ffn_dim": 32},
            "fpn_feature_size": 32,
            "mask_feature_size": 32,
        },
        "MaskFormerForInstanceSegmentation",
        {"image_size": 64},
    ),
    "llama4": (
        {
            "model_type": "llama4",
            "text_config": _DECODER | {"intermediate_size_mlp": 64, "num_local_experts": 2},
            "vision_config": _VISION,
        },
        "Llama4ForCausalLM",
        {},
    ),
    "emu3": (
        {"model_type": "emu3", "text_config": _DECODER | {"pad_token_id": 0}, "vocabulary_map": {"<image>": 9}},
        "Emu3ForCausalLM",
        {},
    ),
    "m2m_100": (
        {"model_type": "m2m_100", "vocab_size": 300, "max_position_embeddings": 40, "pad_token_id": 9}
        | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
        | _STACKS,
        None,
        {"seq_len": 40},
    ),
    "longformer": (
        {"model_type": "longformer", "vocab_size": 300, "attention_window": 16, "max_position_embeddings": 80} | _TEXT,
        "LongformerForSequenceClassification",
        {"seq_len": 64},
    ),
}


@pytest.fixture
def both(tmp_path):
    """Return a function that trains a model on the CPU and returns (the memory that the lab counts, its `estimate`).

    The function's arguments: the fields of the model's configuration, the name of its class, {field: value} of the
    task, and training arguments.
    """

    def compare(fields, architecture, about, **given):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        task = dataclasses.replace(Task(str(path), 16, 16, architecture), **about)
        given = {"per_device_train_batch_size": 2} | given
        with warnings.catch_warnings(action="ignore"):
            run = Lab("cpu", out=tmp_path).train("t", task=task, measure="memory", **given)
        assert run.ok, run.message
        return run.memory, estimate(task, device="cpu", **given)

    return compare


NEED_SCIPY = {"yolos", "maskformer"}


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", CASES)
def test_a_family_is_exact(name, both):
    if name in NEED_SCIPY:
        pytest.importorskip("scipy", reason="matches predictions with objects")
    counted, estimated = both(*CASES[name])
    assert (estimated.peak_bytes, estimated.memory.breakdown) == (counted.peak_bytes, counted.breakdown)


@pytest.mark.nightly
def test_one_image_at_a_time_is_exact(both):
    """The estimate of a batch of one image is exact, although the strides of a dimension of length 1 decide in which
    memory layout the convolutions of Segformer compute.
    """
    counted, estimated = both(*CASES["segformer"], per_device_train_batch_size=1)
    assert (estimated.peak_bytes, estimated.memory.breakdown) == (counted.peak_bytes, counted.breakdown)


@pytest.mark.daily(1)
@pytest.mark.parametrize(("kind", "labels"), [("multi_label_classification", 3), ("regression", 3), (None, 1)])
def test_labels_are_floats_where_the_loss_is_of_several_labels_or_a_regression(kind, labels, both):
    fields = {
        "model_type": "bert",
        "vocab_size": 300,
        "problem_type": kind,
        "id2label": {n: str(n) for n in range(labels)},
    }
    unequal = {"seq_len": None, "dataset_size": 8, "lengths": (5, 9, 16, 3, 12, 8, 7, 11)}
    counted, estimated = both(fields | _TEXT, None, unequal, per_device_train_batch_size=4)
    assert (estimated.memory.phases, estimated.memory.breakdown) == (counted.phases, counted.breakdown)


@pytest.mark.parametrize("error", ["of the model", "of an operation"])
def test_a_training_that_fails_on_a_device_fails_in_the_estimate_in_the_same_line(error, tmp_path):
    fields, given = CASES["whisper"][0], {"label_smoothing_factor": 0.1}  # both make its decoder's inputs
    if error == "of an operation":
        fields, given = _LLAMA | {"num_key_value_heads": 3}, {}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    task = Task(str(path), 16, 16)
    run = Lab("cpu", out=tmp_path).train("t", task=task, measure="memory", **given)
    with pytest.raises(ValueError, match=rf" failed while .*\({re.escape(run.message)}\): .* measure` shows which"):
        estimate(task, device="cpu", **given)
    assert re.search(r"\(line \d+ of \w+\.py\)$", run.message)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("objective", "fields"),
    [
        (
            "contrastive",
            {"model_type": "t5", "vocab_size": 300, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2},
        ),
        ("preference", _LLAMA),
    ],
)
def test_an_objective_is_evaluated_and_its_best_model_loaded(objective, fields, both):
    given = dict.fromkeys(("eval_strategy", "save_strategy"), "epoch") | {"load_best_model_at_end": True}
    counted, estimated = both(fields, None, {"objective": objective}, **given)
    assert {"evaluation", "loading"} < counted.phases.keys()
    assert (estimated.memory.phases, estimated.memory.breakdown) == (counted.phases, counted.breakdown)


_ROUTED = {"vocab_size": 300, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURES = {
    "jetmoe": {"model_type": "jetmoe", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    | {"num_key_value_heads": 2, "kv_channels": 16}
    | _ROUTED,
    "switch_transformers": {"model_type": "switch_transformers", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2}
    | {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    | _ROUTED,
    "dbrx": {"model_type": "dbrx", "vocab_size": 300, "d_model": 32, "n_heads": 2, "n_layers": 2}
    | {"attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 10_000.0}}
    | {"ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}},
}


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_that_routes_by_values_has_an_answer_and_a_named_band(name, both):
    counted, estimated = both(MIXTURES[name], None, {})
    (text,) = [each for each in estimated.assumptions if each.startswith("experts")]
    assert "balanced" in text
    assert estimated.peak_bytes == pytest.approx(counted.peak_bytes, rel=0.03)
