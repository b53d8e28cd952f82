"""Explanations of the difference between two recipes: the listed parts add up exactly, the change of the peak by each
argument is a difference of estimates, and a warning appears for the right models, e.g. that experts stay unquantized.
"""

import json
import re

import pytest

from trainmem.core import optional_packages
from trainmem.core.task import Task
from trainmem.estimate import estimate
from trainmem.estimate.explanation import _priced, explain

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 300, "dtype": "float32"}
LLAMA = Task("llama-2-7b", seq_len=16, config=SMALL)
MIXTURE = Task("mixtral-8x7b", seq_len=16, config=SMALL | {"num_local_experts": 4})
IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = Task("vit-base", config=IMAGES | {"image_size": 32, "patch_size": 16})
BATCH = {"per_device_train_batch_size": 2}
LARGE = {"per_device_train_batch_size": 32}  # so that activations live at the peak
T4 = {"device": "cuda", "compute_capability": (7, 5)}
QLORA = BATCH | {"load_in_4bit": True, "dtype": "bfloat16"}


def adapters(**more):
    return {"peft": {"r": 4, "target_modules": ["q_proj", "v_proj"], **more}}


@pytest.fixture(scope="module", autouse=True)
def peft():
    if reason := optional_packages.offer("peft"):
        pytest.skip(reason)


@pytest.mark.nightly
@pytest.mark.parametrize("where", [{"device": "cpu"}, T4], ids=["cpu", "cuda"])
def test_all_sums_are_exact_and_the_peaks_are_those_of_estimates(where):
    a, b = LARGE, LARGE | {"gradient_checkpointing": True, "optim": "sgd"}
    found = explain(LLAMA, a, b, **where)
    peaks = [estimate(LLAMA, **where, **each).peak_bytes for each in (a, b)]
    assert [found.a.peak_bytes, found.b.peak_bytes] == peaks
    shown = found.to_dict()
    for part in (found.tensors, found.by_category(), dict(found.by_tensor(3))):
        assert [sum(column) for column in zip(*part.values(), strict=True)] == peaks
    assert len(found.by_tensor()) == 11 and len(shown["by_tensor"]) == 11 and len(found.by_tensor(3)) == 4
    assert sum(row["difference_bytes"] for row in shown["by_tensor"]) == peaks[1] - peaks[0]
    differences = [abs(after - before) for before, after in found.tensors.values()]
    assert differences == sorted(differences, reverse=True)
    between = estimate(LLAMA, **where, **a, gradient_checkpointing=True).peak_bytes
    alone = estimate(LLAMA, **where, **a, optim="sgd").peak_bytes
    expected = {"gradient_checkpointing": (between - peaks[0],) * 2, "optim": (peaks[1] - between, alone - peaks[0])}
    assert found.switches == expected and between < peaks[0] and peaks[1] < between
    by_category = dict.fromkeys(found.by_category(), 0)
    for (category, *_), (size, _) in found.tensors.items():
        by_category[category] += size
    assert by_category == {name: sizes[0] for name, sizes in found.by_category().items()}
    json.dumps(shown)


@pytest.mark.nightly
def test_a_tensor_has_its_line_in_the_models_code_and_its_parameters_name():
    found = explain(LLAMA, LARGE, LARGE | adapters(), device="cpu")
    states = {tensor: sizes for tensor, sizes in found.tensors.items() if tensor[0] == "optimizer_states"}
    (name, size), *_ = [(tensor, sizes[0]) for tensor, sizes in states.items() if "mlp.up_proj" in tensor[1]]
    assert name[1] == "model.layers.*.mlp.up_proj.weight" and size == 2 * 2 * 64 * 96 * 4  # of two layers, two moments
    assert name[3].startswith("transformers/models/llama/modeling_llama.py:")
    assert any("lora_A" in tensor[1] and not a and b for tensor, (a, b) in states.items())
    line = next(tensor[3] for tensor in found.tensors if tensor[1] == "model.layers.*.mlp" and "mul" in tensor[2])
    file, number = line.rsplit(":", 1)
    import transformers

    source = transformers.__path__[0].removesuffix("transformers") + file
    with open(source, encoding="utf-8") as lines:
        assert "self.act_fn(self.gate_proj(x)) * self.up_proj(x)" in lines.readlines()[int(number) - 1]
    weight = ("weights", "model.layers.*.self_attn.q_proj.weight", "")
    assert [sizes for tensor, sizes in found.tensors.items() if tensor[:3] == weight] == [(2 * 64 * 64 * 4,) * 2]
    assert not any(tensor[1].startswith("base_model") for tensor in found.tensors)
    (head,) = found.warnings["A"]
    assert re.search(r"a logit for each token .*: \d tensors of 32 x 16 x 300 at the peak", head)
    assert "the frozen weights are in fp32" in found.warnings["B"][0]


@pytest.mark.nightly
def test_experts_that_stay_whole_and_norms_that_are_cast_are_reported():
    found = explain(MIXTURE, BATCH | {"dtype": "bfloat16"} | adapters(), QLORA | adapters(), card="t4")
    adapters_of_a, adapters_of_b = found.warnings["A"], found.warnings["B"][2:3]
    assert adapters_of_a == adapters_of_b and adapters_of_a[0].startswith("peft casts these adapters to fp32")
    experts, head, _, cast = found.warnings["B"]
    sizes = 2 * 4 * 3 * 64 * 96 * 4, 300 * 64 * 4  # bytes: layers, experts, matrices; in fp32, for they were cast
    assert (
        experts.startswith("these experts are not quantized") and "model.layers.*.mlp.experts.gate_up_proj" in experts
    )
    assert experts.endswith(f"{sizes[0] / 1e3:.1f} kB") and head.endswith(f"lm_head.weight, {sizes[1] / 1e3:.1f} kB")
    assert cast.startswith("prepare_model_for_kbit_training cast") and "and" in cast
    assert "A" not in repr(found).splitlines()[-1][:3] and repr(found).splitlines()[-1].startswith("B: prepare")


@pytest.mark.nightly
def test_a_plain_model_has_no_experts_to_warn_of_and_copies_are_reported():
    whole = adapters(modules_to_save=["lm_head"])
    uncast = QLORA | {"prepare_model_for_kbit_training": False}
    found = explain(LLAMA, uncast | adapters(), uncast | whole, card="t4")
    texts = " ".join(found.warnings["A"])
    assert "linear layers are not quantized: lm_head.weight" in texts
    assert "experts" not in texts and "kbit_training" not in texts and "modules_to_save" not in texts
    (copies,) = [text for text in found.warnings["B"] if text.startswith("modules_to_save")]
    assert copies.endswith(f"{300 * 64 * 2 / 1e3:.1f} kB")


@pytest.mark.nightly
def test_checkpointing_through_which_no_gradient_flows_is_reported():
    again = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    frozen = BATCH | {"freeze": "embeddings"}  # of a text model transformers lets the embeddings' result require one
    found = explain(IMAGES, frozen, frozen | again, device="cpu")
    assert found.warnings["A"] == ()
    (idle,) = found.warnings["B"]
    assert idle.startswith("no gradient reaches these") and re.search(r"vit\.(encoder\.)?layers?\.\*\.", idle), idle
    assert "classifier" not in idle
    with pytest.raises(ValueError, match=r"no parameter gets a gradient: .*use_reentrant=False"):
        explain(IMAGES, BATCH | again | {"freeze": "embeddings,classifier,vit.layernorm"}, BATCH, device="cpu")


@pytest.mark.nightly
def test_a_tie_that_is_broken_and_weights_that_adapters_are_added_to_are_named():
    tied, half = LLAMA.replace(config={"tie_word_embeddings": True}), BATCH | {"dtype": "bfloat16"}
    broken = explain(tied, half | adapters(), half | adapters(modules_to_save=["lm_head"]), device="cpu")
    assert not any("tie" in text for text in broken.warnings["A"])
    assert [text for text in broken.warnings["B"] if "breaks the tie of head and embedding" in text]
    experts = half | adapters(target_parameters=["mlp.experts.gate_up_proj"])
    (text,) = [
        text for text in explain(MIXTURE, half, experts, device="cpu").warnings["B"] if "target_parameters" in text
    ]
    assert text.endswith(f"mlp.experts.gate_up_proj, {2 * 4 * 2 * 64 * 96 * 2 / 1e3:.1f} kB")


@pytest.mark.nightly
def test_an_evaluation_that_takes_the_most_is_explained():
    evaluated = BATCH | {"eval_strategy": "epoch", "prediction_loss_only": False, "optim": "sgd"}
    found = explain(LLAMA.replace(dataset_size=40, config={"vocab_size": 3000}), BATCH, evaluated, card="t4")
    assert not any("evaluation" in text for text in found.warnings["A"])
    (text,) = [text for text in found.warnings["B"] if text.startswith("evaluation takes more")]
    assert "8 samples" in text and "a step has 2" in text and "40 samples" in text and "eval_accumulation_steps" in text


def test_what_cannot_be_switched_alone_is_switched_with_the_next():
    peaks = {("fp16",): None, ("fp16", "bf16"): 60, ("bf16",): None, ("optim",): 90}
    found = _priced(["fp16", "bf16", "optim"], lambda names: peaks[tuple(names)], (100, 55))
    assert found == {"fp16, bf16": (-40, -40), "optim": (-5, -10)}
    names = [*"abcde"]
    many = _priced(names, lambda switched: 10 * len(switched), (0, 50))
    assert many == {"a": (10, 10)} | {name: (10, None) for name in names[1:]}


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (BATCH, dict(BATCH), "give b an argument"),
        (BATCH, BATCH | {"optim": "adamv"}, "optim='adamv'"),
        (BATCH, BATCH | {"torch_compile": True}, "torch_compile"),
    ],
)
def test_what_cannot_be_compared_is_reported_before_anything_is_traced(a, b, message):
    with pytest.raises(ValueError, match=message):
        explain(LLAMA, a, b, timeout=0.01)
