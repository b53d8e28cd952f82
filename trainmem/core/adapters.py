"""Adapters and quantization for a task's model: peft's adapters, and bitsandbytes' weights in 8 and 4 bits.

Both are described by the libraries' own configurations and built by the libraries' own code: `get_peft_model`, and the
quantizer with which transformers loads a model with a `BitsAndBytesConfig`. Only the weights are random instead of
loaded from a file.
"""

import contextlib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from trainmem.texts import check_known, from_json, nearest_text, reading, shown, text_of

# peft's names of tasks (peft.TaskType), by the family of `task.Task`.
_TASK_TYPES = {
    "causal": "CAUSAL_LM",
    "sequence to sequence": "SEQ_2_SEQ_LM",
    "sequence classification": "SEQ_CLS",
    "token classification": "TOKEN_CLS",
    "question answering": "QUESTION_ANS",
    "image-text": "CAUSAL_LM",
    "contrastive": "FEATURE_EXTRACTION",
    "preference": "SEQ_CLS",
}


def settings_of(name: str, value: Any) -> dict[str, Any]:
    """Return the fields of a library's configuration from an argument: a mapping, the library's own object, JSON, a
    JSON file, or a folder with peft's adapter_config.json.

    Raises:
        ValueError: anything else, or a file that cannot be read.
    """
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, str | Path):
        text, path = str(value), Path(value)
        with reading(f"{name}={shown(value)}", "JSON", "a JSON file or JSON"):
            if not text.lstrip().startswith("{"):
                text = text_of(path / "adapter_config.json" if path.is_dir() else path)
            value = from_json(text)
    if not isinstance(value, Mapping):
        raise ValueError(f'{name}={shown(value)}: give a mapping, JSON such as {{"r": 8}}, or a file that holds it')
    return dict(value)


def of_bitsandbytes(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of a quantization_config without the name of its method.

    Raises:
        ValueError: the method is not bitsandbytes; `where` names the place in the message.
    """
    method = settings.get("quant_method", "bitsandbytes")
    method = str(getattr(method, "value", method))
    if method != "bitsandbytes":
        raise ValueError(
            f"{where}: quant_method={shown(method)} is not supported. Give a quantization_config of bitsandbytes, with "
            "load_in_4bit or load_in_8bit, or a model that is not quantized"
        )
    return {name: value for name, value in settings.items() if name[0] != "_" and name != "quant_method"}


def saved_quantization(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of the quantization_config in a config.json, except those that the installed transformers does
    not know, as `from_pretrained` does. Raises ValueError as `of_bitsandbytes`."""
    from transformers import BitsAndBytesConfig

    known = inspect.signature(BitsAndBytesConfig).parameters
    return {name: value for name, value in of_bitsandbytes(settings, where).items() if name in known}


def quantized(model, settings: Mapping[str, Any], device: Any):
    """Quantize a model's linear layers to 8 or 4 bits on `device`, as `from_pretrained(quantization_config=)` does.

    Each weight moves to the device and is quantized there; weights that stay in full precision move last.

    Args:
        settings: fields of `transformers.BitsAndBytesConfig`.

    Raises:
        ValueError: an unknown field, or a value that transformers rejects.
    """
    import bitsandbytes
    import torch
    from transformers import BitsAndBytesConfig
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers import AutoHfQuantizer

    settings = of_bitsandbytes(settings, "quantization_config")
    check_known("quantization_config", settings, list(inspect.signature(BitsAndBytesConfig).parameters)[:-1])
    try:
        config = BitsAndBytesConfig(**settings)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"quantization_config is not accepted by transformers ({error}): change it") from error
    if not (config.load_in_4bit or config.load_in_8bit):
        raise ValueError("quantization_config has neither load_in_4bit nor load_in_8bit: set one of them to true")
    if config.load_in_4bit and torch.device(device).type == "cpu":
        _boundaries(config.bnb_4bit_quant_type, torch.device(device))
    quantizer = AutoHfQuantizer.from_config(config)
    whole = {name: parameter.data for name, parameter in model.named_parameters(remove_duplicate=False)}
    quantizer.preprocess_model(model, device_map=None)
    for name, layer in model.named_modules():
        if not isinstance(layer, bitsandbytes.nn.Linear4bit | bitsandbytes.nn.Linear8bitLt):
            continue
        weight, bias = whole.pop(f"{name}.weight"), whole.pop(f"{name}.bias", None)
        weight = weight.T if issubclass(layer.source_cls, Conv1D) else weight  # GPT-2 stores it transposed
        kind = type(layer.weight)
        layer.weight = kind(weight, **{**vars(layer.weight), "requires_grad": False, "CB": None, "SCB": None})
        del weight
        layer.weight = layer.weight.to(device)
        if bias is not None:
            layer.bias = torch.nn.Parameter(bias.to(device), requires_grad=False)
    del whole
    torch.nn.Module.to(model, device)
    model.hf_quantizer = quantizer
    return quantizer.postprocess_model(model)


def _boundaries(kind: str, device: Any) -> None:
    """Compute now what bitsandbytes caches at its first quantization on a CPU, so that meters see its allocation."""
    with contextlib.suppress(ImportError):
        from bitsandbytes.backends.default.ops import _get_4bit_quantize_bounds

        _get_4bit_quantize_bounds(kind, device)


def prepared(model, checkpointing: Mapping[str, Any] | None):
    """Call `peft.prepare_model_for_kbit_training`: freeze the model, and cast what is not quantized to fp32.

    `checkpointing`: arguments of activation checkpointing; None: no checkpointing."""
    prepare = importlib.import_module("peft").prepare_model_for_kbit_training
    return prepare(model, checkpointing is not None, dict(checkpointing or {}))


def adapted(model, settings: Mapping[str, Any], family: str, generates: bool = False):
    """Add adapters to a model and freeze the rest, by `peft.get_peft_model`.

    Args:
        settings: fields of a peft configuration, and its kind ("peft_type"; default: LoRA).
        family: which data the model takes, see `task.Task.family`.
        generates: whether the model will `generate`.

    Raises:
        ValueError: a kind or a field that peft does not know, a configuration that it rejects for this model, or a peft
            that is too old for this kind under the installed transformers.
    """
    peft, settings = importlib.import_module("peft"), dict(settings)
    known = {kind.value: config for kind, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    name = settings.pop("peft_type", "LORA")
    name = str(getattr(name, "value", name)).upper()
    if name not in known:
        raise ValueError(f"peft: peft_type={name!r} is not a valid value. {nearest_text(name, known)}")
    check_known(f"peft ({name})", settings, [field.name for field in fields(known[name]) if field.init])
    if settings.get("task_type") is None and family in _TASK_TYPES:
        settings["task_type"] = _TASK_TYPES[family]
    _check_cache_is_known(peft, model, name, family, generates)
    try:
        return peft.get_peft_model(model, known[name](**settings))
    except (TypeError, KeyError, AttributeError, AssertionError) as error:
        raise ValueError(f"peft ({name}) does not accept this configuration ({error}): change it") from error


def _check_cache_is_known(peft, model, name: str, family: str, generates: bool) -> None:
    """Refuse kinds that an older peft runs wrongly because transformers 5.24 renamed `past_key_values` to `cache`.

    peft 0.21 looks for the old name in the signatures of classifiers and in the arguments from `generate`. Training of
    generative models is correct: there it passes the old name, which transformers still accepts.

    Args:
        name: peft's name of the kind of adapter, e.g. "PREFIX_TUNING".

    Raises:
        ValueError: peft is older than transformers requires, and the kind needs the cache here.
    """
    import transformers
    from packaging.version import Version

    needed = transformers.integrations.peft.MIN_PEFT_VERSION
    if Version(transformers.__version__) < Version("5.24") or Version(peft.__version__) >= Version(needed):
        return
    if name in _IN_THE_CACHE:
        wrong = "generate() ignores the prefix" if generates else "peft rejects a prefix for this model"
        fails = generates or family in _CLASSIFIES
    else:
        wrong = "generate() puts the prompt before every token"
        fails = generates and name in _BEFORE_THE_TOKENS and not model.config.is_encoder_decoder
    if fails:
        raise ValueError(
            f"peft ({name}): peft {peft.__version__} is too old for transformers {transformers.__version__}, which "
            f"renamed past_key_values to cache, so that {wrong}. Install peft {needed} or newer, or 'transformers<5.24'"
        )


_CLASSIFIES = {"sequence classification", "token classification", "question answering", "preference"}  # families
_IN_THE_CACHE = {"PREFIX_TUNING", "CARTRIDGE"}  # kinds that learn keys and values
_BEFORE_THE_TOKENS = {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "CPT", "SHADOW"}


def freeze(model, names: str) -> None:
    """Freeze the parameters whose names contain one of the parts in `names`, which are separated by commas.

    Raises:
        ValueError: a part matches no parameter.
    """
    for part in filter(None, names.split(",")):
        found = [parameter for name, parameter in model.named_parameters() if part.strip() in name]
        if not found:
            raise ValueError(
                f"freeze={part!r} matches no parameter: give a part of a name, e.g. embeddings or layers.0."
            )
        for parameter in found:
            parameter.requires_grad_(False)


def constants(model) -> Iterator[tuple[Any, list[Any]]]:
    """Yield (weight, [its scales, code books, ...]) of each quantized layer; all are tensors."""
    for layer in model.modules():
        weight = layer._parameters.get("weight")  # as an attribute, a parametrized weight would be computed
        if kept := getattr(weight, "quant_state", None):
            second = getattr(kept, "state2", None)
            nested = (kept.offset, second.absmax, second.code) if second else ()
            yield weight, [kept.absmax, kept.code, *nested]
        elif hasattr(weight, "SCB") and (state := getattr(layer, "state", None)):
            yield weight, [each for each in (weight.CB, weight.SCB, state.CB, state.SCB) if each is not None]
