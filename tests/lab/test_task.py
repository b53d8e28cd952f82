"""Tasks: any model that transformers can build, with matching data; and the choice of a profile for a machine."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from machines import GOOD, PLAIN, T4

from trainmem.core.task import PRESETS, PROFILES, TINY, Task, choose_profile

STANDARD = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 500,
}
IMAGES = {**STANDARD, "image_size": 32, "patch_size": 8}

# Numbers of parameters of the published weights.
PUBLISHED = {
    "distilgpt2": 81_912_576,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "pythia-70m": 70_426_624,
    "pythia-1b": 1_011_781_632,
    "gpt-neo-125m": 125_198_592,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1.4b": 1_414_647_808,
    "pythia-6.9b": 6_857_302_016,
    "bloom-560m": 559_214_592,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "codellama-7b": 6_738_546_688,
    "yi-6b": 6_061_035_520,
    "deepseek-coder-1.3b": 1_346_471_936,
    "deepseek-llm-7b": 6_910_365_696,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "tinyllama-1.1b": 1_100_048_384,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "stablelm-2-1.6b": 1_644_515_328,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
}


def configuration(folder, model_type, architecture, **fields):
    content = {"model_type": model_type, **fields} | ({"architectures": [architecture]} if architecture else {})
    (folder / "config.json").write_text(json.dumps(content))
    return Task(str(folder), seq_len=16, dataset_size=8)


@pytest.mark.parametrize(
    ("model_type", "architecture", "fields", "built"),
    [
        ("bert", None, STANDARD, "BertForSequenceClassification"),
        ("bert", "BertModel", STANDARD, "BertForSequenceClassification"),
        ("bert", "BertForMaskedLM", STANDARD, "BertForMaskedLM"),
        ("bert", "BertForTokenClassification", STANDARD, "BertForTokenClassification"),
        ("bert", "BertForQuestionAnswering", STANDARD, "BertForQuestionAnswering"),
        ("roberta", "RobertaForSequenceClassification", STANDARD, "RobertaForSequenceClassification"),
        ("llama", "LlamaForCausalLM", STANDARD, "LlamaForCausalLM"),
        ("llama", None, STANDARD, "LlamaForCausalLM"),
        ("llama", "LlamaForSequenceClassification", STANDARD, "LlamaForSequenceClassification"),
        ("mixtral", "MixtralForCausalLM", {**STANDARD, "num_key_value_heads": 2}, "MixtralForCausalLM"),
        (
            "t5",
            "T5ForConditionalGeneration",
            {"d_model": 32, "d_ff": 64, "num_layers": 1},
            "T5ForConditionalGeneration",
        ),
        (
            "vit",
            "ViTForImageClassification",
            {**STANDARD, "image_size": 32, "patch_size": 8},
            "ViTForImageClassification",
        ),
        ("vit", None, IMAGES, "ViTForImageClassification"),
        # Its configuration has no image size; XLNet's number of positions is -1.
        ("resnet", None, {"embedding_size": 8, "hidden_sizes": [16, 24]}, "ResNetForImageClassification"),
        ("xlnet", None, {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}, "XLNetLMHeadModel"),
    ],
)
def test_data_fits_the_model_that_a_configuration_names(tmp_path, model_type, architecture, fields, built):
    task = configuration(tmp_path, model_type, architecture, **fields)
    model = task.build_model()
    assert type(model).__name__ == built
    loss = model(**task.batch(2)).loss
    loss.backward()
    assert loss.isfinite()
    assert task.parameters() == sum(parameter.numel() for parameter in model.parameters())


# Parameters as published with the models (in millions, with the heads that the presets have).
@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("bert-base-uncased", 109.5),
        ("bert-large-uncased", 335.1),
        ("roberta-base", 124.6),
        ("gpt2", 124.4),
        ("gpt2-xl", 1557.6),
        ("t5-3b", 2851.6),
        ("llama-2-7b", 6738.4),
        ("llama-2-13b", 13015.9),
        ("llama-3-8b", 8030.3),
        ("llama-3-70b", 70553.7),
        ("llama-3.2-1b", 1235.8),
        ("llama-3.2-3b", 3212.7),
        ("llama-3.1-405b", 405853.4),
        ("mistral-7b", 7241.7),
        ("distilbert-base-uncased", 67.0),
        ("smollm2-135m", 134.5),
        ("smollm2-360m", 361.8),
        ("smollm2-1.7b", 1711.4),
        ("tinyllama-1.1b", 1100.0),
        ("qwen2.5-0.5b", 494.0),
        ("qwen2.5-1.5b", 1543.7),
        ("qwen2.5-3b", 3085.9),
        ("qwen2.5-7b", 7615.6),
        ("qwen3-0.6b", 596.0),
        ("qwen3-1.7b", 1720.6),
        ("qwen3-4b", 4022.5),
        ("qwen3-8b", 8190.7),
        ("qwen2.5-32b", 32763.9),
        ("mixtral-8x22b", 140620.6),
        ("qwen3-30b-a3b", 30532.1),
        ("gpt-oss-20b", 20914.8),
        ("gpt-oss-120b", 116829.2),
        ("mixtral-8x7b", 46702.8),
    ],
)
def test_presets_have_the_published_sizes(preset, millions):
    assert Task(preset).parameters() / 1e6 == pytest.approx(millions, abs=0.1)


def test_a_vocabulary_is_padded_as_the_library_pads_it():
    task = Task("gpt2", seq_len=8, config={"n_layer": 1, "n_embd": 12, "n_head": 2})
    model = task.build_model()
    model.resize_token_embeddings(pad_to_multiple_of=64)
    padded = task.with_padded_vocabulary(64)
    assert padded.config["vocab_size"] == model.config.vocab_size == 50304 and padded.config["n_layer"] == 1
    assert padded.parameters() == sum(weight.numel() for weight in model.parameters())
    assert task.with_padded_vocabulary(1) == task and padded.with_padded_vocabulary(8) == padded
    assert Task("llama-3-8b").with_padded_vocabulary(64) == Task("llama-3-8b"), "128,256 is a multiple already"
    images = Task("vit-base", config={"num_hidden_layers": 1})
    assert images.with_padded_vocabulary(64) == images


def test_every_preset_has_data():
    for preset in PRESETS:
        task = Task(preset)
        assert task.family() and (task.length() == 512 or task.family() in ("image-text", "speech", "ctc"))


@pytest.mark.parametrize(("model", "parameters"), PUBLISHED.items())
def test_presets_have_as_many_parameters_as_the_published_weights(model, parameters):
    assert Task(model).parameters() == parameters


def test_a_preset_may_say_null():
    assert Task("mistral-7b-v0.3").build_config().sliding_window is None
    assert Task("mistral-7b").build_config().sliding_window == 4096


def test_weights_and_data_follow_from_the_seed():
    first, second, other = (Task("bert-tiny", seq_len=8, seed=seed) for seed in (0, 0, 1))
    assert (first.arrays(4)["input_ids"] == second.arrays(4)["input_ids"]).all()
    assert (first.arrays(4)["input_ids"] != other.arrays(4)["input_ids"]).any()
    names = [
        model.state_dict()["bert.pooler.dense.weight"] for model in (t.build_model() for t in (first, second, other))
    ]
    assert names[0].equal(names[1]) and not names[0].equal(names[2])


@pytest.mark.nightly
def test_a_learnable_task_can_be_learnt():
    import torch

    task = Task("bert-tiny", seq_len=16, data="learnable", config={"hidden_dropout_prob": 0.0})
    torch.manual_seed(0)
    model, batch = task.build_model(), task.batch(256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(40):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 < losses[0]


def test_mistakes_name_what_is_wrong(tmp_path):
    for content, hint in (("{", "not JSON"), ("[]", "model_type"), ('{"hidden_size": 3}', "model_type")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=hint):
            Task(str(tmp_path)).build_config()
    with pytest.raises(ValueError, match="no class"):
        Task("bert-tiny", architecture="BertForEverything").model_class()
    with pytest.raises(ValueError, match="seq_len"):
        Task("bert-tiny").replace(sequence_length=3)


def test_the_profile_follows_from_the_machine():
    small, large, cpu = replace(GOOD, gpus=(T4,)), GOOD, PLAIN
    assert [choose_profile("auto", each).name for each in (cpu, small, large)] == ["cpu", "t4", "gpu"]
    assert choose_profile("gpu", cpu) is PROFILES["gpu"]
    with pytest.raises(ValueError, match="auto, cpu, t4, gpu"):
        choose_profile("laptop")


def test_the_profile_for_tests_is_the_smallest_and_no_learner_is_offered_it():
    assert choose_profile("tiny") is TINY and "tiny" not in PROFILES
    for profile in PROFILES.values():
        assert TINY.task.parameters() < profile.task.parameters() and TINY.task.seq_len < profile.task.seq_len
        assert TINY.steps < profile.steps and TINY.turns <= profile.turns and TINY.micro_batch <= profile.micro_batch
    with pytest.raises(ValueError, match=r"one of auto, cpu, t4, gpu$"):
        choose_profile("laptop")


def test_the_gpu_profile_is_the_guides_set_up():
    task = PROFILES["gpu"].task
    assert (task.model, task.dataset_size, task.seq_len, PROFILES["gpu"].micro_batch) == (
        "bert-large-uncased",
        512,
        512,
        4,
    )


def test_examples_of_unequal_lengths_are_padded_to_the_longest_of_a_batch():
    task = Task("gpt2", lengths=(3, 5, 2), pad_to_multiple_of=4, config={"vocab_size": 50})
    rows = [task.dataset()[i] for i in range(3)]
    assert [len(row["input_ids"]) for row in rows] == [3, 5, 2] and task.dataset_size == 3
    batch = task.collator()(rows[::2])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 4)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert batch["labels"][1].tolist() == [*rows[2]["labels"].tolist(), -100, -100]
    assert task.collator()(rows)["input_ids"].shape == (3, 8)


def test_labels_of_whole_examples_are_not_cut_or_padded_like_tokens():
    kind = {"problem_type": "multi_label_classification", "num_labels": 6}
    task = Task("bert-tiny", lengths=(3, 5, 2), config=kind, data="learnable")
    batch = task.collator()([task.dataset()[i] for i in range(3)])
    assert batch["labels"].shape == (3, 6) and batch["labels"].unique().tolist() == [0.0, 1.0]
    assert batch["labels"].tolist() == task.arrays()["labels"].tolist()


@pytest.mark.parametrize(("kind", "labels"), [("regression", 3), (None, 1)])
def test_a_regression_has_float_labels(kind, labels):
    task = Task("bert-tiny", seq_len=8, config={"problem_type": kind, "num_labels": labels})
    batch = task.batch(4)
    assert batch["labels"].shape == (4, labels) and batch["labels"].is_floating_point()
    assert task.build_model()(**batch).loss.isfinite()


def test_packed_examples_are_one_row_without_padding():
    task = Task("gpt2", lengths=(3, 5), packed=True, config={"vocab_size": 50})
    batch = task.collator()([task.dataset()[i] for i in range(2)])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]] and "attention_mask" not in batch


def test_lengths_that_are_none_are_refused():
    with pytest.raises(ValueError, match="lengths=0: give a whole number"):
        Task("gpt2", lengths=(3, 0))
    assert Task("gpt2").collator() is None, "the Trainer's own"


def test_what_the_advisor_asks_of_a_text_model_imports_no_model_code():
    """The advisor's questions about a text model import no model code. The import would take a second, and would load
    torch's compiler, whose library prints warnings when a command ends.
    """
    code = "from trainmem.core.task import Task; import sys; task = Task('bert-large')\n"
    code += "print(task.family(), task.weights().dtype, task.length(), 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sequence", "classification", "float32", "512", "False"]
