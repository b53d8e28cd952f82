"""Families of models: the data that each model class is trained on, and sizes that follow from images and audio."""

import importlib.util
import json

import numpy as np
import pytest

from trainmem.core import families, training
from trainmem.core.arguments import Arguments
from trainmem.core.outcomes import Invalid
from trainmem.core.task import Task

# Parameters of the published weights.
PUBLISHED = {
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "gemma-3-4b": 4_300_079_472,
    "smolvlm-256m": 256_484_928,
    "llava-1.5-7b": 7_063_427_072,
    "whisper-tiny": 37_760_640,
    "whisper-large-v2": 1_543_304_960,
    "wav2vec2-base": 94_396_320,
    "all-minilm-l6-v2": 22_713_216,
    "bge-small-en-v1.5": 33_360_000,
    "skywork-reward-llama-3.1-8b": 7_504_928_768,
}


@pytest.mark.parametrize(("model", "parameters"), PUBLISHED.items())
def test_presets_have_as_many_parameters_as_the_published_weights(model, parameters):
    assert Task(model).parameters() == parameters


@pytest.mark.parametrize(
    ("model", "size", "tokens"),
    [
        ("gemma-3-4b", None, 256),
        ("llava-1.5-7b", None, 576),
        ("smolvlm-256m", None, 64),
        ("smolvlm-256m", 2048, 17 * 64),
        ("qwen2.5-vl-3b", 448, 256),
        ("qwen2.5-vl-3b", 1000, 36 * 36),
    ],
)
def test_an_image_takes_the_tokens_that_its_size_makes(model, size, tokens):
    task = Task(model, image_size=size)
    assert families.image_tokens(task.build_config(), size) == tokens == task.shortest() - 2
    found = task.arrays(1)
    is_image = found["input_ids"] == task.build_config().image_token_id
    assert is_image.sum() == tokens and (found["labels"][is_image] == -100).all()


def test_a_size_that_a_tower_does_not_take_is_refused():
    with pytest.raises(ValueError, match=r"image_size=224.*336"):
        Task("llava-1.5-7b", image_size=224).arrays(1)
    with pytest.raises(ValueError, match=r"seq_len=100 .*258"):
        Task("gemma-3-4b", seq_len=100).arrays(1)


def test_an_image_text_model_trains_on_text_where_there_are_no_images():
    task = Task("gemma-3-4b", seq_len=16, image_size=0)
    assert task.family() == "causal" and {*task.arrays(1)} == {"input_ids", "labels"}


@pytest.mark.parametrize(
    ("name", "words"),
    [("CLIPModel", "CLIPModel"), ("BertForPreTraining", "BertForPreTraining"), ("T5EncoderModel", "T5EncoderModel")],
)
def test_another_class_is_never_taken_in_place_of_a_named_one(tmp_path, name, words):
    import transformers

    config = getattr(transformers, name).config_class()
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        Task(str(tmp_path)).model_class()


def test_a_configuration_of_whisper_is_trained_on_speech():
    from transformers import WhisperForConditionalGeneration

    task = Task("whisper-tiny", seq_len=8)
    assert task.model_class() is WhisperForConditionalGeneration and task.family() == "speech"
    assert task.arrays(1)["input_features"].shape == (1, 80, 3000)


def test_a_batch_of_detection_has_labels_in_a_list():
    task = Task("yolos-tiny", dataset_size=2)
    batch = task.collator()([task.dataset()[n] for n in range(2)])
    assert batch["pixel_values"].shape == (2, 3, 800, 1333)
    assert [{name: tuple(each.shape) for name, each in label.items()} for label in batch["labels"]] == [
        {"class_labels": (families.OBJECTS,), "boxes": (families.OBJECTS, 4)}
    ] * 2
    assert str(batch["labels"][0]["boxes"].dtype) == "torch.float32"


def test_a_classifier_of_two_stacks_has_one_end_token_in_each_example():
    task = Task("t5-small", seq_len=9, architecture="T5ForSequenceClassification")
    ids = task.arrays(5)["input_ids"]
    assert ((ids == 1).sum(1) == 1).all() and (ids[:, -1] == 1).all()
    ids = task.replace(lengths=(3, 9, 5)).arrays()["input_ids"]
    assert [int(np.argmax(row == 1)) for row in ids] == [2, 8, 4]


@pytest.mark.parametrize(("kind", "name"), [("glm", "GlmForCausalLM"), ("glm4", "Glm4ForSequenceClassification")])
def test_a_configuration_with_several_end_tokens_has_data(tmp_path, kind, name):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields = sizes | {"model_type": kind, "vocab_size": 300, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"eos_token_id": [4, 5, 6]}))
    assert Task(str(tmp_path), seq_len=16, architecture=name).arrays(4)["input_ids"].shape == (4, 16)


def test_fields_of_a_part_are_changed_one_by_one():
    task = Task("gemma-3-4b", config={"text_config": {"num_hidden_layers": 3}})
    text = task.replace(config={"text_config": {"head_dim": 64}}).build_config().text_config
    assert (text.num_hidden_layers, text.head_dim, text.hidden_size) == (3, 64, 2560)
    assert task.with_text(vocab_size=300_000).build_config().text_config.vocab_size == 300_000
    assert task.with_padded_vocabulary(1000).build_config().text_config.vocab_size == 263_000


def test_a_layer_that_is_counted_from_the_last_is_accepted(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llava", "vision_feature_layer": -2}')
    assert Task(str(file)).build_config().vision_feature_layer == -2


@pytest.mark.parametrize(("model", "name"), [("t5-small", "T5EncoderModel"), ("bert-tiny", "BertModel")])
def test_a_text_is_embedded_by_the_encoder_alone(model, name):
    assert Task(model, objective="contrastive").model_class().__name__ == name


def test_an_objective_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="contrastive, preference"):
        Task("bert-tiny", objective="triplet")


def test_detection_without_scipy_names_the_package(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "scipy" else found(name, *rest)
    )
    task, arguments = Task("yolos-tiny", dataset_size=2), Arguments({"per_device_train_batch_size": 1})
    with pytest.raises(Invalid, match=r"object detection needs scipy.*pip install scipy"):
        training.train(training.Experiment("d", task, arguments), str(tmp_path), 1)
