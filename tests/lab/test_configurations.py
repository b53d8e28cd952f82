"""The type of a model's weights: a folder has the type in which `from_pretrained` loads it, a preset the type in which
the model was published. Messages name this type.
"""

import dataclasses
import json
import re
import sys

import pytest

from perf_helpers import Lab, cli
from trainmem import advise
from trainmem.core import adapters, hardware, optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.task import PRESETS, Task
from trainmem.core.training import Experiment
from trainmem.estimate import estimate
from trainmem.measure import worker

missing = optional_packages.offer("peft")
needs_peft = pytest.mark.skipif(missing is not None, reason=str(missing))
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 300}
T4 = {"card": "t4", "torch_version": "2.13"}
LORA = {"peft": {"r": 4}, "per_device_train_batch_size": 2}
PARTS = {"text_config": SIZES | {"head_dim": 16}, "mm_tokens_per_image": 4}
PARTS["vision_config"] = {name: SIZES[name] for name in list(SIZES)[:4]} | {"image_size": 28, "patch_size": 14}


def saved(folder, weights="float32", kind="Llama", config=SIZES, head="ForCausalLM", **changes):
    """Write a model folder as `save_pretrained` does, change fields of its config.json, and return the folder.

    Args:
        folder: the folder to write.
        weights: type of the weights.
        kind, head: the first and the last part of the class's name in transformers.
        config: fields of the configuration.
        changes: fields to change in the file; "gone" removes one.
    """
    import torch
    import transformers

    config = getattr(transformers, f"{kind}Config")(**config)
    model = getattr(transformers, f"{kind}{head}")(config)
    model.to(getattr(torch, weights)).save_pretrained(folder)
    return edited(folder, **changes)


def edited(folder, **changes):
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    for name, value in changes.items():
        *parts, last = name.split("__")
        inner = fields
        for part in parts:
            inner = inner[part]
        inner[last] = value
        if value == "gone":
            del inner[last]
    file.write_text(json.dumps(fields))
    return folder


def types(model):
    return {name: str(each.dtype) for name, each in model.named_parameters()}


# ---- the rule, against the library itself

CASES = {  # by what is edited: the type of the saved weights, and fields of config.json
    "as saved, bf16": ("bfloat16", {}),
    "as saved, fp16": ("float16", {}),
    "as saved, fp32": ("float32", {}),
    "none named, bf16 weights": ("bfloat16", {"dtype": "gone"}),
    "null, fp16 weights": ("float16", {"dtype": None}),
    "the older name": ("float32", {"dtype": "gone", "torch_dtype": "bfloat16"}),
    "both names": ("float32", {"dtype": "float16", "torch_dtype": "bfloat16"}),
    "edited by hand": ("bfloat16", {"dtype": "float32"}),
    "double": ("float32", {"dtype": "float64"}),
    "one type for all parts": ("float32", {"dtype": {"": "bfloat16"}}),
}


@pytest.mark.parametrize(("dtype", "changes"), CASES.values(), ids=list(CASES))
def test_a_folder_is_built_in_the_type_in_which_the_library_loads_it(tmp_path, dtype, changes):
    from transformers import AutoModelForCausalLM

    folder = saved(tmp_path, dtype, **changes)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    task = Task(str(folder), seq_len=16)
    assert types(task.build_model(device="meta")) == types(loaded)
    assert f"torch.{task.weights().dtype}" == str(loaded.dtype)


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_decide_where_the_configuration_names_no_type(tmp_path, sharded):
    """If config.json names no type, the type of the saved weights counts. If there are no weights either, the type is
    float32, as with `from_config`.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(tmp_path, **({"max_shard_size": "50kB"} if sharded else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    edited(tmp_path, dtype="gone")
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype is torch.bfloat16
    assert str(Task(str(tmp_path)).weights()) == (
        "weights in bfloat16 (the type of the saved weights, config.json names none)"
    )
    assert str(Task(str(tmp_path / "config.json")).weights()) == "weights in float32 (config.json names none)"


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16", "text_config__dtype": "bfloat16", "vision_config__dtype": "bfloat16"},
        {"dtype": "bfloat16", "text_config__dtype": "gone", "vision_config__dtype": "gone"},
        {"dtype": "gone", "text_config__dtype": "bfloat16", "vision_config__dtype": "bfloat16"},
    ],
    ids=["top", "top and parts differ", "top alone", "parts alone"],
)
def test_of_a_composite_configuration_the_part_that_the_class_takes_decides(tmp_path, changes):
    from transformers import AutoModelForImageTextToText, Gemma3ForCausalLM

    folder = saved(tmp_path, "float32", "Gemma3", PARTS, "ForConditionalGeneration", **changes)
    for kind, name in (
        (AutoModelForImageTextToText, "Gemma3ForConditionalGeneration"),
        (Gemma3ForCausalLM, "Gemma3ForCausalLM"),
    ):
        loaded = kind.from_pretrained(folder)
        task = Task(str(folder), architecture=name)
        assert f"torch.{task.weights().dtype}" == str(loaded.dtype), name
        assert types(task.build_model(device="meta")) == types(loaded), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parts_that_the_library_keeps_in_float32_are_kept(tmp_path, dtype):
    """If T5 is loaded in float16, transformers keeps the second matrix of each feed-forward block in float32, because
    the block's output may overflow; in bfloat16 it does not.
    """
    from transformers import AutoModelForSeq2SeqLM

    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 300}
    folder = saved(tmp_path, dtype, "T5", sizes, "ForConditionalGeneration")
    found = types(Task(str(folder)).build_model(device="meta"))
    assert found == types(AutoModelForSeq2SeqLM.from_pretrained(folder))
    assert ("torch.float32" in found.values()) == (dtype == "float16")


@pytest.mark.parametrize("dtype", ["auto", "torch.bfloat16", "int8", "float8_e4m3fn"])
def test_a_type_that_the_library_does_not_load_is_refused_with_those_that_it_does(tmp_path, dtype):
    from transformers import AutoModelForCausalLM

    folder = saved(tmp_path, dtype=dtype)
    with pytest.raises((AttributeError, ValueError, TypeError)):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=rf"config.json.*{re.escape(dtype)}.*float32, bfloat16 or float16"):
        Task(str(folder)).weights()


def test_what_is_requested_wins(tmp_path):
    task = Task(str(saved(tmp_path, "bfloat16")))
    assert str(task.weights()) == "weights in bfloat16 (config.json)"
    assert str(task.weights("auto")) == "weights in bfloat16 (config.json)"
    assert str(task.weights("float32")) == "weights in float32 (requested)"
    assert str(task.replace(config={"torch_dtype": "float16"}).weights()) == "weights in float16 (requested)"
    assert str(Task("llama-3-8b", config={"dtype": "float32"}).weights()) == "weights in float32 (requested)"


def test_a_folder_whose_weights_change_their_type_is_another_question(tmp_path):
    task = Task(str(saved(tmp_path, "bfloat16", dtype="gone")))
    before = task.identity()
    saved(tmp_path, "float32", dtype="gone")
    assert task.identity() != before


# ---- presets

# By the config.json, or where it names none by the weights, of the repository of that name on the Hub.
PUBLISHED = {
    "bfloat16": (
        "llama-3-8b llama-3-70b llama-3.2-1b llama-3.2-3b llama-3.1-405b llama-3.1-8b smollm2-135m smollm2-360m "
        "smollm2-1.7b tinyllama-1.1b codellama-7b yi-6b deepseek-coder-1.3b deepseek-llm-7b mistral-7b mistral-7b-v0.3 "
        "mistral-nemo-12b qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen2.5-14b qwen2.5-32b "
        "deepseek-r1-distill-qwen-1.5b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b mixtral-8x7b mixtral-8x22b "
        "qwen3-30b-a3b gpt-oss-20b gpt-oss-120b phi-3-mini phi-4 gemma-2b gemma-7b smollm3-3b qwen2.5-vl-3b "
        "qwen2.5-vl-7b gemma-3-4b smolvlm-256m skywork-reward-llama-3.1-8b skywork-reward-v2-qwen3-0.6b"
    ),
    "float16": (
        "llama-2-7b llama-2-13b opt-125m opt-350m opt-1.3b opt-6.7b pythia-70m pythia-160m pythia-410m pythia-1b "
        "pythia-1.4b pythia-6.9b bloom-560m phi-1.5 phi-2 stablelm-2-1.6b llava-1.5-7b"
    ),
    "float32": (
        "bert-tiny bert-small bert-base-uncased bert-large-uncased bert-base-cased bert-base-multilingual-cased "
        "minilm-l12-h384-uncased bert-base-chinese bert-large-cased scibert-scivocab-uncased minilm-l6-h384-uncased "
        "distilbert-base-uncased distilbert-base-cased distilbert-base-multilingual-cased roberta-base roberta-large "
        "distilroberta-base gpt2 gpt2-medium gpt2-large gpt2-xl distilgpt2 t5-small t5-base t5-3b vit-base "
        "xlm-roberta-base xlm-roberta-large camembert-base electra-base-discriminator electra-small-discriminator "
        "albert-base-v2 mpnet-base deberta-v3-base deberta-v3-small modernbert-base gemma-2-2b gemma-2-9b olmo-2-1b "
        "olmo-2-7b gpt-neo-125m whisper-tiny whisper-large-v2 wav2vec2-base wav2vec2-xls-r-300m segformer-b0 "
        "segformer-b1 yolos-tiny rtdetr-r50 all-minilm-l6-v2 bge-small-en-v1.5"
    ),
}


def test_every_preset_has_the_type_that_it_is_published_in():
    published = {name: dtype for dtype, names in PUBLISHED.items() for name in names.split()}
    assert published == {name: preset.get("dtype", "float32") for name, preset in PRESETS.items()}
    assert sum(len(names.split()) for names in PUBLISHED.values()) == len(PRESETS), "a name stands once"


@pytest.mark.parametrize("name", ["llama-3-8b", "phi-2", "bert-base-uncased", "t5-small"])
def test_a_preset_is_built_in_its_type(name):
    task = Task(name)
    dtype = PRESETS[name].get("dtype", "float32")
    assert set(types(task.build_model(device="meta")).values()) == {f"torch.{dtype}"}
    assert str(task.weights()) == f"weights in {dtype} (preset)"


# ---- folders that were saved quantized


@pytest.fixture(scope="module")
def quantized_folder(tmp_path_factory):
    """Return a function (bits) that returns a folder with a small Llama in bf16, saved in 4 or 8 bits."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    whole = saved(tmp_path_factory.mktemp("whole"), "bfloat16")

    def of(bits):
        quantization = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        quantization |= {"bnb_4bit_use_double_quant": True}
        config = BitsAndBytesConfig(**(quantization if bits == 4 else {"load_in_8bit": True}))
        folder = tmp_path_factory.mktemp(f"in {bits} bits")
        AutoModelForCausalLM.from_pretrained(whole, quantization_config=config).save_pretrained(folder)
        return folder

    return of


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab("cpu", out=tmp_path_factory.mktemp("lab"))


def kept_by(model):
    """Return the bytes of a model's weights, including the constants that quantized weights need; each storage counts
    once.

    The count uses none of this project's code.
    """
    import torch

    found = {}

    def count(value):
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif hasattr(value, "absmax"):  # a quant_state
            for each in (value.absmax, value.code, value.offset, value.state2):
                count(each)

    for module in model.modules():
        for weight in module.parameters(recurse=False):
            for value in (weight, getattr(weight, "quant_state", None), getattr(weight, "SCB", None)):
                count(value)
        for name in ("CB", "SCB"):
            count(getattr(getattr(module, "state", None), name, None))
    return sum(found.values())


@pytest.mark.nightly
def test_a_folder_saved_in_4_bits_is_loaded_in_4_bits(lab, quantized_folder):
    from transformers import AutoModelForCausalLM

    folder = quantized_folder(4)
    real = AutoModelForCausalLM.from_pretrained(folder)
    task = Task(str(folder), seq_len=16)
    assert str(task.weights()) == "weights in 4 bits (config.json), the rest loaded in bfloat16 (config.json)"
    given = {"per_device_eval_batch_size": 2}
    run, reported = lab.infer("i", task=task, **given), estimate(task, device="cpu", training=False, **given)
    assert run.ok, run.message
    built = adapters.quantized(task.build_model(), task.weights().quantization, "cpu")
    assert kept_by(built) == kept_by(real) and types(built) == types(real)
    assert built.get_memory_footprint() == real.get_memory_footprint()
    assert (reported.peak_bytes, reported.memory.breakdown) == (run.memory.peak_bytes, run.memory.breakdown)
    assert reported.weights == run.weights == str(task.weights())


@pytest.mark.nightly
@needs_peft
@pytest.mark.parametrize(
    ("bits", "given"),
    [
        (4, {}),
        (4, {"prepare_model_for_kbit_training": False}),
        (4, {"prepare_model_for_kbit_training": False, "bf16": True}),
        (4, {"gradient_checkpointing": True, "dtype": "float16"}),
        (8, {}),
        (8, {"prepare_model_for_kbit_training": False}),
    ],
    ids=str,
)
def test_lora_on_a_folder_saved_quantized_is_exact(lab, quantized_folder, bits, given):
    """The estimate for a folder that was saved quantized equals the measured memory. It is the same if the field
    `quantization_config` is removed from config.json and passed as the training argument of this name.
    """
    folder = quantized_folder(bits)
    task, given = Task(str(folder), seq_len=16), LORA | given
    run, reported = lab.train("t", task=task, measure=("memory",), **given), estimate(task, device="cpu", **given)
    assert run.ok, run.message
    assert (reported.peak_bytes, reported.memory.breakdown) == (run.memory.peak_bytes, run.memory.breakdown)
    file = json.loads((folder / "config.json").read_text())
    fields = {name: value for name, value in file.items() if name != "quantization_config"}
    whole = folder / "whole.json"
    whole.write_text(json.dumps(fields))
    requests = given | {"quantization_config": file["quantization_config"]}
    same = estimate(Task(str(whole), seq_len=16), device="cpu", **requests)
    assert same.memory.breakdown == reported.memory.breakdown
    assert run.memory.breakdown["quantized_weights"] > 0


@needs_peft
@pytest.mark.nightly
def test_the_advisor_gives_adapters_to_a_folder_saved_quantized(quantized_folder):
    advice = advise.advise(
        Task(str(quantized_folder(4)), seq_len=16), effective_batch=2, memory="2GB", device="cpu", most=1
    )
    assert "saved in 4 bits" in " ".join(advice.notes)
    assert advice.recipes and all("peft" in recipe.arguments for recipe in advice.recipes)
    assert "weights in 4 bits (config.json)" in repr(advice).splitlines()[0]


def test_without_adapters_a_folder_saved_quantized_does_not_learn(lab, quantized_folder):
    task = Task(str(quantized_folder(4)), seq_len=16)
    for ask in (lambda: estimate(task, device="cpu"), lambda: lab.train("t", task=task, measure=("memory",))):
        with pytest.raises(ValueError, match=r"4 bits.*config\.json.*adapters"):
            ask()


def test_another_method_of_quantization_is_refused_with_the_one_that_is_supported(tmp_path, lab):
    folder = saved(tmp_path, "bfloat16", quantization_config={"quant_method": "gptq", "bits": 4})
    asks = [
        lambda: estimate(Task(str(folder)), device="cpu"),
        lambda: lab.train("t", task=Task(str(folder)), measure=("memory",)),
        lambda: advise.advise(Task(str(folder)), effective_batch=2, memory="2GB"),
        lambda: estimate("bert-tiny", quantization_config={"quant_method": "hqq", "nbits": 4}, peft={"r": 2}),
    ]
    for ask in asks:
        with pytest.raises(ValueError, match=r"(gptq|hqq).*not supported.*bitsandbytes.*load_in_4bit or load_in_8bit"):
            ask()


# ---- what follows from the type


def test_a_training_in_bf16_weights_takes_half_the_bytes(tmp_path, lab):
    task = Task(str(saved(tmp_path, "bfloat16")), seq_len=16)
    halves, whole = (
        lab.train("t", task=task, measure=("memory",), optim="sgd", **more).memory.breakdown
        for more in ({}, {"dtype": "float32"})
    )
    assert whole["weights"] - halves["weights"] == 2 * task.parameters(), "of a table of angles nothing changes"


@pytest.mark.parametrize(("dtype", "reason"), [("bfloat16", "bfloat16"), ("float16", "FP16")])
@pytest.mark.nightly
def test_fp16_on_weights_of_16_bits_is_reported_as_the_training_s_failure(tmp_path, dtype, reason):
    """A training in fp16 with 16-bit weights fails on a GPU, and the estimate raises an error with the reason.
    Rehearsals with torch's CUDA builds 2.13 to 2.15 fail for the same reason. On a CPU the training runs, because the
    Trainer ignores fp16 there.
    """
    task = Task(str(saved(tmp_path, dtype)), seq_len=16)
    with pytest.raises(ValueError, match=rf"{reason}.*dtype='float32'"):
        estimate(task, **T4, fp16=True)
    assert estimate(task, **T4, fp16=True, dtype="float32").peak_bytes
    with pytest.warns(UserWarning, match="ignores fp16"):
        run = Lab("cpu").train("t", task=task, measure=("memory",), fp16=True)
    assert run.ok and estimate(task, device="cpu", fp16=True).peak_bytes == run.peak_bytes


@needs_peft
def test_adapters_in_float32_learn_by_fp16_on_a_base_in_bf16(tmp_path):
    assert estimate(Task(str(saved(tmp_path, "bfloat16")), seq_len=16), **T4, fp16=True, **LORA).peak_bytes


def test_a_model_is_refused_by_the_bytes_of_its_own_type(tmp_path, monkeypatch):
    task = Task(str(saved(tmp_path, "bfloat16")), seq_len=16)
    here = dataclasses.replace(hardware.describe(), memory_available_bytes=6 * task.parameters())
    monkeypatch.setattr(hardware, "describe", lambda: here)
    assert worker._refusal(Experiment("t", task, Arguments({"use_cpu": True}))) is None
    refused = worker._refusal(Experiment("t", task, Arguments({"use_cpu": True, "dtype": "float32"})))
    assert "weights and gradients alone" in refused
    inference = Experiment("t", task, Arguments({"use_cpu": True, "dtype": "float32"}), training=False)
    assert worker._refusal(inference) is None  # no gradients


@pytest.mark.nightly
def test_recipes_of_a_model_in_bf16_say_the_type_that_they_mean(tmp_path):
    """A recipe for a model saved in bf16 must name the type of its weights, because they would otherwise be loaded in
    bf16. The baseline of all techniques has float32 weights, and so has the technique "bf16" (autocast).
    """
    task = Task(str(saved(tmp_path, "bfloat16")), seq_len=16)
    advice = advise.advise(task, effective_batch=2, memory="8GB", device="cpu", most=99)
    types = {recipe.arguments["dtype"] for recipe in advice.recipes}
    assert types <= {"float32", "bfloat16"} and "float32" in types
    assert all(recipe.arguments["dtype"] == "float32" for recipe in advice.recipes if recipe.arguments.get("bf16"))
    assert "weights in bfloat16 (config.json)" in repr(advice).splitlines()[0]
    plain = advise.advise(Task("bert-tiny", seq_len=16), effective_batch=2, memory="8GB", device="cpu", most=1)
    assert "dtype" not in plain.recipes[0].arguments
    assert "weights in float32 (preset)" in repr(plain).splitlines()[0]


# ---- the first line


@pytest.fixture
def printed(monkeypatch, capsys):
    """Return a function (words) that runs a command and returns its standard output."""

    def run(words):
        monkeypatch.setattr(cli, "_STARTS_SUBPROCESSES", ())
        monkeypatch.setattr(sys, "argv", ["perf-helpers", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        reported = capsys.readouterr()
        assert not caught.value.code, reported.err
        return reported.out

    return run


COMMANDS = {
    "estimate": "estimate --device cpu",
    "measure": "measure --memory-only",
    "explain": "explain --device cpu --then --optim sgd",
    "advise": "advise --device cpu --memory 8GB --effective-batch 2",
}


@pytest.mark.daily(2)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_line_names_the_type_of_the_weights(tmp_path, command, printed):
    folder = saved(tmp_path, "bfloat16")
    name, *options = COMMANDS[command].split()
    options = [name, "--model", str(folder), "--seq-len", "16", *options]
    text = "weights in bfloat16 (config.json)"
    assert text in printed(options).splitlines()[0]
    found = json.loads(printed([*options[:5], "--json", *options[5:]]))
    assert (found["a"] if command == "explain" else found)["weights"] == text


@pytest.mark.nightly
def test_the_worst_batch_names_the_type_of_the_weights(tmp_path, printed):
    folder, lengths = saved(tmp_path, "bfloat16"), tmp_path / "lengths.txt"
    lengths.write_text("8 9 12 16 5 3 7 8")
    requests = ["estimate", "--device", "cpu", "--model", str(folder), "--lengths", str(lengths)]
    first = printed([*requests, "--per_device_train_batch_size", "2"]).splitlines()[0]
    assert "weights in bfloat16 (config.json)" in first


@pytest.mark.parametrize("kind", ["mamba2", "phi4_multimodal"])
def test_a_configuration_that_the_library_saved_is_read(tmp_path, kind):
    """Unusual values in config.json must be accepted: infinite numbers, a chunk size of -1, and a field "depth..."
    that is a number of channels, not of layers.
    """
    from transformers import CONFIG_MAPPING

    file = tmp_path / "config.json"
    file.write_text(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    config = Task(str(file)).build_config()
    assert config.model_type == kind
    if kind == "mamba2":
        assert [*config.time_step_limit] == [0.0, float("inf")]


def test_a_model_with_code_of_its_own_is_refused_with_what_to_do(tmp_path):
    fields = {"model_type": "my_model", "auto_map": {"AutoModelForCausalLM": "modeling_mine.MyModel"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"my_model.*code of its own.*perf-helpers rehearse"):
        Task(str(tmp_path)).build_config()
