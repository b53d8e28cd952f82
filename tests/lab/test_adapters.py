"""Trained and frozen parts of models with adapters: models that can be built, differences between kinds of adapters,
and refusals.
"""

import importlib.util
import json
import sys

import pytest
import torch
from packaging.version import Version

from perf_helpers import Lab, cli
from trainmem.core import adapters, arguments, optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.estimate import estimate

missing = optional_packages.offer("peft")
needs_peft = pytest.mark.skipif(missing is not None, reason=str(missing))
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
LLAMA = Task("llama-2-7b", seq_len=24, config=SIZES | {"vocab_size": 128, "dtype": "float32"})
GPT2 = Task("gpt2", seq_len=24, config={"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128})
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
LINEAR = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)  # numbers in the linear layers of LLAMA's blocks


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab("cpu", out=tmp_path_factory.mktemp("lab"))


def trained(lab, task=LLAMA, **given):
    run = lab.train("one", task=task, measure=("memory",), per_device_train_batch_size=2, **given)
    assert run.ok, run.message
    return run.memory


@needs_peft
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.nightly
def test_what_learns_is_what_lora_says(lab, rank):
    """LoRA trains two matrices for each of q and v, with AdamW's two states; everything else is kept frozen."""
    memory = trained(lab, peft={"r": rank, "target_modules": ["q_proj", "v_proj"]})
    numbers = 2 * rank * ((64 + 64) + (64 + 32))
    assert memory.trainable_parameters == numbers
    steps = memory.breakdown["optimizer_states"] - 8 * numbers
    assert 0 < steps < 8 * 4 * 4 + 1, "a step count for each of eight matrices"
    assert memory.phase_breakdowns["backward"]["gradients"] == 4 * numbers
    whole = 4 * (LINEAR + 2 * 128 * 64 + 5 * 64)
    assert memory.breakdown["frozen_weights"] == whole and memory.parameters == whole // 4 + numbers


@needs_peft
@pytest.mark.parametrize(("given", "bits", "blocks"), [(NF4, 4, 64), ({"load_in_8bit": True}, 8, None)], ids=["4", "8"])
@pytest.mark.nightly
def test_quantized_bytes_are_codes_and_their_constants(lab, given, bits, blocks):
    memory = trained(lab, quantization_config=given, peft={"r": 4}, dtype="bfloat16")
    rows = 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64)  # each has a scale of its own in 8 bits
    constants = 4 * LINEAR // blocks + 14 * 16 * 4 if blocks else 4 * rows  # and in 4 a code book of 16
    assert memory.breakdown["quantized_weights"] == LINEAR * bits // 8 + constants
    embeddings_and_norms = 4 * (2 * 128 * 64 + 5 * 64)  # in fp32: prepare_model_for_kbit_training
    assert memory.breakdown["frozen_weights"] == embeddings_and_norms


@needs_peft
@pytest.mark.nightly
def test_double_quantization_saves_what_its_paper_says(lab):
    """The scale of each group of 64 weights takes one byte instead of four. In addition, each group of 256 scales has
    a scale of four bytes, and each layer a code book of 256 numbers and an offset.
    """
    once, twice = (
        trained(lab, quantization_config=NF4 | {"bnb_4bit_use_double_quant": double}, peft={"r": 4}).breakdown
        for double in (False, True)
    )
    saved = once["quantized_weights"] - twice["quantized_weights"]
    scales, layers = LINEAR // 64, 14
    of_small_layers = sum(-(-size // 64 // 256) * 4 for size in 2 * [4096, 2048, 2048, 4096, 6144, 6144, 6144])
    assert saved == 3 * scales - of_small_layers - layers * (256 * 4 + 4), "and each layer has a code book of 256"


@pytest.mark.daily(2)
@needs_peft
@pytest.mark.parametrize(
    "given",
    [
        {"peft": {"r": 4, "use_dora": True, "target_modules": "all-linear"}, "bf16": True},
        {"peft": {"r": 4, "use_dora": True}, "load_in_4bit": True},
        {"peft": {"r": 4, "modules_to_save": ["lm_head"]}, "load_in_4bit": True, "gradient_checkpointing": True},
        {"peft": {"task_type": "CAUSAL_LM", "r": 4, "modules_to_save": ["lm_head", "embed_tokens"]}},
        {"peft": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 5}},
        {"peft": {"peft_type": "SHIRA", "r": 4, "random_seed": 3}},
        {"peft": {"peft_type": "CPT"} | {f"cpt_{name}": [1, 2] for name in ("token_ids", "mask", "tokens_type_mask")}},
        {"peft": {"r": 4, "monteclora_config": {}}},
        {"peft": {"peft_type": "FROD", "target_modules": ["q_proj", "v_proj"], "progressbar": False}},
        {"peft": {"r": 4}, "load_in_8bit": True, "optim": "paged_adamw_8bit"},
        {"peft": {"peft_type": "IA3"}},
        {"freeze": "embed,layers.0.", "optim": "adafactor"},
    ],
    ids=lambda given: str([*given.get("peft", given).values()][:2]),
)
def test_the_estimate_is_what_is_counted(lab, given):
    found = estimate(LLAMA, device="cpu", per_device_train_batch_size=2, **given).memory
    memory = trained(lab, **given)
    assert (found.peak_bytes, found.breakdown) == (memory.peak_bytes, memory.breakdown)
    assert found.trainable_parameters == memory.trainable_parameters < memory.parameters


@needs_peft
@pytest.mark.parametrize("kind", ["AdamW", "Adam8bit"])
@pytest.mark.nightly
def test_lora_plus_is_an_optimizer_with_a_second_rate(lab, kind):
    """LoRA+ has parameter groups with two learning rates. Parameter groups change the order and number of the
    optimizer's states; the estimate must have the same states as the optimizer in a run.
    """

    def plus(model, args):
        import bitsandbytes
        import torch
        from peft.optimizers import create_loraplus_optimizer

        of = torch.optim.AdamW if kind == "AdamW" else bitsandbytes.optim.Adam8bit
        made = create_loraplus_optimizer(model, of, lr=args.learning_rate, loraplus_lr_ratio=16.0)
        rates = {group["lr"] / args.learning_rate for group in made.param_groups if group["params"]}
        assert {round(rate, 9) for rate in rates} == {1, 16}
        return made

    given = {"peft": {"r": 16, "target_modules": "all-linear"}, "optimizer": plus}
    found = estimate(LLAMA, device="cpu", per_device_train_batch_size=2, **given).memory
    memory = trained(lab, **given)
    assert (found.peak_bytes, found.breakdown) == (memory.peak_bytes, memory.breakdown)
    assert found.breakdown["optimizer_states"] >= 2 * found.trainable_parameters


@needs_peft
def test_gpt2_keeps_its_weights_the_other_way_round(lab):
    """GPT-2's Conv1D stores weights transposed. Quantized, it becomes a linear layer with nearly the same results."""
    import torch

    whole = GPT2.build_model().eval()
    batch = GPT2.batch(2)
    expected = whole(**batch).logits
    quantized = adapters.quantized(GPT2.build_model(), NF4, "cpu").eval()
    assert type(quantized.transformer.h[0].mlp.c_fc).__name__ == "Linear4bit"
    off = (quantized(**batch).logits - expected).norm() / expected.norm()
    assert 0 < off < 0.15
    assert torch.equal(quantized.lm_head.weight, whole.lm_head.weight), "the head stays whole"


def test_frozen_layers_learn_nothing(lab):
    memory = trained(lab, freeze="layers.0.")
    assert memory.breakdown["frozen_weights"] == 4 * (LINEAR // 2 + 2 * 64)
    assert memory.trainable_parameters == memory.parameters - LINEAR // 2 - 2 * 64


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"peft": {"rank": 8}}, "no 'rank'"),
        ({"peft": {"peft_type": "LORAX"}}, "LORA"),
        ({"peft": {"autocast_adapter_dtyp": False}}, "autocast_adapter_dtype"),
        ({"peft": {"autocast_adapter_dtype": "no"}}, "autocast_adapter_dtype='no'.*true or false"),
        ({"quantization_config": {"load_in_4bits": True}, "peft": {"r": 2}}, "load_in_4bit"),
        ({"quantization_config": {"bnb_4bit_quant_type": "nf4"}, "peft": {"r": 2}}, "load_in_4bit nor load_in_8bit"),
        ({"freeze": "no such layer"}, "no such layer.*give a part of a name"),
        ({"load_in_4bit": True}, "peft="),
    ],
)
@needs_peft
def test_what_does_not_exist_is_refused_by_name(lab, given, words):
    with pytest.raises(ValueError, match=words):
        estimate(LLAMA, device="cpu", **given)
    with pytest.raises(ValueError, match=words):
        lab.train("refused", task=LLAMA, measure=("memory",), **given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"peft": "no_such_file.json"}, "peft='no_such_file.json'.*Give a JSON file"),
        ({"peft": "{r: 8}"}, "not JSON"),
        ({"peft": 8}, "give a mapping"),
        ({"load_in_4bit": "yes"}, "give True or False"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_8bit.*keep one"),
        ({"freeze": ["layers.0."]}, "freeze=.*give a text"),
    ],
)
def test_a_wrong_argument_is_one_message_before_anything_is_built(given, words):
    with pytest.raises(ValueError, match=words):
        Arguments.of(given)


@needs_peft
@pytest.mark.parametrize(
    ("module", "package", "settings"),
    [
        ("sklearn", "scikit-learn", {"peft_type": "ADAMSS", "r": 4}),
        ("scipy", "scipy", {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}),
    ],
)
def test_a_package_that_an_adapter_needs_is_named_first(monkeypatch, module, package, settings):
    monkeypatch.setitem(sys.modules, module, None)
    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == module else plain(name, *rest))
    with pytest.raises(ValueError, match=rf"^{package} is not installed \(pip install {package}\): peft"):
        adapters.adapted(LLAMA.build_model(), settings, LLAMA.family())


@needs_peft
def test_autocast_adapter_dtype_false_halves_adapters_of_16_bits(lab):
    """With peft's `autocast_adapter_dtype=False`, the adapters of a 16-bit model, and their gradients and AdamW states,
    take half the bytes.
    """
    given = {"dtype": "bfloat16", "peft": {"r": 4}}
    wide = estimate(LLAMA, device="cpu", per_device_train_batch_size=2, **given).memory
    given["peft"] |= {"autocast_adapter_dtype": False}
    narrow = estimate(LLAMA, device="cpu", per_device_train_batch_size=2, **given).memory
    memory = trained(lab, **given)
    assert (narrow.peak_bytes, narrow.breakdown) == (memory.peak_bytes, memory.breakdown)
    assert wide.breakdown["weights"] - narrow.breakdown["weights"] == 2 * narrow.trainable_parameters


def test_configurations_are_read_from_files_and_from_the_command_line(tmp_path):
    folder = tmp_path / "an adapter é"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 3}))
    (tmp_path / "lora.json").write_text(json.dumps({"r": 2}))
    assert Arguments.of({"peft": str(folder)}).adapters["peft"] == {"r": 3}
    read = arguments.parse(["--peft", str(tmp_path / "lora.json"), "--load_in_4bit", "--freeze", "embed"])
    assert read.adapters == {"peft": {"r": 2}, "load_in_4bit": True, "freeze": "embed"}
    assert read.quantization == {"load_in_4bit": True} and not read.training
    assert arguments.parse(["--peft", '{"r": 5}']).adapters["peft"] == {"r": 5}


@needs_peft
def test_the_command_line_offers_peft(tmp_path, monkeypatch, capsys):
    words = ["estimate", "--model", "bert-tiny", "--seq_len", "16", "--peft", '{"r": 2}', "--device", "cpu", "--json"]
    monkeypatch.setattr("sys.argv", ["perf-helpers", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    answer = json.loads(capsys.readouterr().out)
    assert answer["arguments"]["peft"] == {"r": 2} and 0 < answer["trainable_parameters"] < answer["parameters"] / 10


BERT = Task("bert-tiny", seq_len=24)
PREFIX, PROMPT, P = ({"peft_type": f"{kind}_TUNING", "num_virtual_tokens": 4} for kind in ("PREFIX", "PROMPT", "P"))
LOSES = [(BERT, PREFIX, False), (LLAMA, PREFIX, True), (LLAMA, PROMPT, True), (LLAMA, P, True)]
KEEPS = [(LLAMA, PREFIX, False), (LLAMA, PROMPT, False), (BERT, PROMPT, False), (BERT, {"r": 4}, False)]
KEEPS += [(LLAMA, {"r": 4}, True), (Task("t5-small", seq_len=8, config={"num_layers": 1, "d_model": 64}), PROMPT, True)]


@pytest.fixture
def old_peft(monkeypatch):
    """Pretend that peft 0.21.2 is installed beside transformers 5.24, which needs a newer peft."""
    import peft
    import transformers
    from transformers.integrations import peft as integration

    monkeypatch.setattr(peft, "__version__", "0.21.2")
    monkeypatch.setattr(transformers, "__version__", "5.24.0")
    monkeypatch.setattr(integration, "MIN_PEFT_VERSION", "0.22.0")


@needs_peft
@pytest.mark.parametrize(("task", "settings", "generates"), LOSES)
def test_an_old_peft_that_loses_the_prompt_is_named(old_peft, monkeypatch, task, settings, generates):
    with pytest.raises(ValueError, match=r"peft 0.21.2 .*transformers 5.24.0.*Install peft 0.22.0"):
        adapters.adapted(task.build_model(), settings, task.family(), generates)
    for release, needed in [("5.23.0", "0.20.0"), ("5.24.0", "0.21.2")]:
        monkeypatch.setattr("transformers.__version__", release)
        monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", needed)
        adapters.adapted(task.build_model(), settings, task.family(), generates)


@needs_peft
@pytest.mark.parametrize(("task", "settings", "generates"), KEEPS)
def test_an_old_peft_is_taken_where_it_is_right(old_peft, task, settings, generates):
    adapters.adapted(task.build_model(), settings, task.family(), generates)


# ---- torchao and quanto


WIDE = LLAMA.replace(config={"hidden_size": 256, "intermediate_size": 512})  # quanto makes groups of 128 weights
IN_WIDE = 2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512)
ROWS = 2 * (256 + 128 + 128 + 256 + 512 + 512 + 256)
# {configuration: bytes of its codes and constants, in float32}
OTHERS = {
    ("torchao", "int8"): IN_WIDE + 4 * ROWS + ROWS,  # a scale and a zero point per row
    ("torchao", "float8"): IN_WIDE + 4 * ROWS,
    ("quanto", "int8"): IN_WIDE + 4 * ROWS,
    ("quanto", "float8"): IN_WIDE + 4 * ROWS,
    ("quanto", "int4"): IN_WIDE // 2 + 2 * 4 * IN_WIDE // 128,  # a scale and a shift per group
}


def quantization(method, kind):
    return {"quant_method": method, {"torchao": "quant_type", "quanto": "weights"}[method]: kind}


def needs_method(method):
    try:
        adapters.import_method({"quant_method": method})
    except ValueError as error:
        pytest.skip(str(error))


@needs_peft
@pytest.mark.daily(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("method", "kind"), OTHERS, ids="-".join)
def test_bases_of_torchao_and_quanto_are_estimated_to_the_byte(lab, method, kind, dtype):
    needs_method(method)
    given = {"quantization_config": quantization(method, kind), "peft": {"r": 4}, "dtype": dtype}
    counted = trained(lab, task=WIDE, **given)
    found = estimate(WIDE, device="cpu", per_device_train_batch_size=2, **given)
    assert (found.peak_bytes, found.memory.breakdown) == (counted.peak_bytes, counted.breakdown)
    assert found.weights.startswith(f"weights in {kind[-1]} bits (quantization_config)")
    if dtype == "float32":
        assert counted.breakdown["quantized_weights"] == OTHERS[method, kind]
    assert counted.parameters - counted.trainable_parameters == WIDE.parameters()


# (allocated, reserved) bytes in rehearsals of a T4: torch 2.15.0, transformers 5.24.0, torchao 0.18.0, optimum-quanto
# 0.2.7, peft 0.21.2, 2026-11-29. int4 of quanto cannot be rehearsed: its kernel needs CUDA's compiler.
REHEARSED = {
    ("torchao", "int8", "float32"): (16_463_872, 29_360_128),
    ("torchao", "int8", "float16"): (13_423_104, 27_262_976),
    ("torchao", "float8", "float32"): (16_456_704, 31_457_280),
    ("torchao", "float8", "float16"): (13_408_768, 27_262_976),
    ("quanto", "int8", "float32"): (12_998_656, 27_262_976),
    ("quanto", "int8", "float16"): (11_679_232, 25_165_824),
}


@needs_peft
@pytest.mark.daily(2)
@pytest.mark.parametrize(("method", "kind", "dtype"), REHEARSED, ids="-".join)
def test_bases_of_torchao_and_quanto_on_a_card_equal_the_rehearsal(method, kind, dtype):
    needs_method(method)
    if Version(torch.__version__) < Version("2.15"):
        pytest.skip("rehearsed with torch 2.15")
    given = {"quantization_config": quantization(method, kind), "peft": {"r": 4}, "dtype": dtype}
    task = WIDE.replace(config={"vocab_size": 512}, dataset_size=16)
    found = estimate(task, card="t4", torch_version="2.15", per_device_train_batch_size=2, **given)
    assert (found.memory.peak_bytes, found.memory.reserved_bytes) == REHEARSED[method, kind, dtype]
    assert any("quanto" in text for text in found.assumptions) is (method == "quanto")


@needs_peft
def test_a_quantization_that_cannot_be_trained_is_refused_by_name():
    given = {"peft": {"r": 4}, "device": "cpu"}
    with pytest.raises(ValueError, match=r"'hqq' is not supported.*torchao or quanto"):
        estimate(WIDE, quantization_config={"quant_method": "hqq", "nbits": 4}, **given)
    needs_method("torchao")
    with pytest.raises(ValueError, match=r"does not train adapters on int4 of torchao.*quanto"):
        estimate(WIDE, quantization_config=quantization("torchao", "int4"), **given)
    with pytest.raises(ValueError, match=r"'torchao' quantizes no layer.*load_in_8bit"):
        estimate(GPT2, quantization_config=quantization("torchao", "int8"), **given)
    needs_method("quanto")
    with pytest.raises(ValueError, match=r"quanto cannot multiply weights in float32 under autocast.*bfloat16"):
        estimate(WIDE, quantization_config=quantization("quanto", "int8"), dtype="float32", bf16=True, **given)


@needs_peft
@pytest.mark.parametrize(("method", "name"), [("torchao", "torchao"), ("quanto", "optimum-quanto")])
def test_a_missing_package_for_quantization_is_named_first(method, name, monkeypatch):
    for module in adapters.METHODS[method][0]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=f"^Install {name}: pip install {name}"):
        adapters.import_method({"quant_method": method})


def test_a_configuration_is_python_to_paste():
    text = Arguments.of({"quantization_config": quantization("torchao", "int8"), "peft": {"r": 4}}).to_python()
    assert "TorchAoConfig(Int8WeightOnlyConfig()" in text and "prepare_model_for_kbit_training" in text
    text = Arguments.of({"quantization_config": quantization("quanto", "int4"), "peft": {"r": 4}}).to_python()
    assert "QuantoConfig(**{'weights': 'int4'})" in text and "prepare_model_for_kbit_training" not in text


def test_a_parametrized_weight_is_not_computed_in_the_search_for_quantized_ones():
    """The search must not read the attribute of a parametrized weight, because each read computes the weight.

    wav2vec 2.0 has such a weight.
    """
    import torch

    layer, computed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2)), []
    layer.parametrizations.weight[0].register_forward_hook(lambda *_: computed.append(1))
    assert [*adapters.constants(torch.nn.Sequential(layer))] == [] and not computed
    assert layer(torch.ones(3)).shape == (2,) and computed
