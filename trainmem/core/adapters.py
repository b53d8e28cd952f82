"""Adapters and quantization for a task's model: peft's adapters, and weights in few bits.

Adapters are described by peft's configurations and built by `get_peft_model`. Quantization is described by a
`quantization_config` and performed by transformers' quantizers for bitsandbytes, torchao and optimum-quanto. Only one
thing differs from real use: the weights are random, not loaded from a file.
"""

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from trainmem.texts import check_known, from_json, install_text, nearest_text, reading, shown, text_of

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
    """Return the fields of a library's configuration, given in any form that an argument accepts.

    Args:
        name: the argument, for messages, e.g. "peft".
        value: a mapping, the library's own configuration object, JSON, a JSON file, or a folder with peft's
            adapter_config.json.

    Raises:
        ValueError: `value` has another form, or its file cannot be read.
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


# Methods of quantization that `quantized` supports: {quant_method: (modules to import, name for pip)}. quanto's modules
# make constants when they are imported, which must be on the host: before weights are on a device.
_OF_QUANTO = ("", ".tensor.weights.marlin", ".tensor.weights.tinygemm")
METHODS = {
    "bitsandbytes": (("bitsandbytes",), "bitsandbytes"),
    "torchao": (("torchao.quantization",), "torchao"),
    "quanto": (tuple(f"optimum.quanto{name}" for name in _OF_QUANTO), "optimum-quanto"),
}
# Short names of `quant_type` for torchao's classes, which transformers takes as objects.
_OF_TORCHAO = {"int4": "Int4WeightOnlyConfig", "int8": "Int8WeightOnlyConfig", "float8": "Float8WeightOnlyConfig"}


def method_of(settings: Mapping[str, Any]) -> str:
    """Return the name of the quantization method in the fields of a quantization_config, e.g. "torchao".

    The method may be one that is not supported (not in `METHODS`). If no field names a method, return "bitsandbytes".
    """
    method = settings.get("quant_method", "bitsandbytes")
    return str(getattr(method, "value", method))


def import_method(settings: Mapping[str, Any]) -> None:
    """Import the package that quantizes.

    `settings`: fields of a quantization_config.

    Raises:
        ValueError: the package is missing; the message names it.
    """
    method = method_of(settings)
    modules, name = METHODS[method]
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        raise ValueError(install_text(name, f"quant_method={method!r}")) from error


def of_method(settings: Mapping[str, Any], where: str, methods: Iterable[str] = METHODS) -> dict[str, Any]:
    """Return the fields of a quantization_config without the name of its method.

    Args:
        settings: all fields of the quantization_config.
        where: the origin of the quantization_config, for the message, e.g. a model's name.
        methods: names of the accepted methods.

    Raises:
        ValueError: the method is not one of `methods`.
    """
    if (method := method_of(settings)) not in methods:
        also = " or a model that is not quantized" if where != "quantization_config" else ""
        raise ValueError(
            f"{where}: quant_method={shown(method)} is not supported. Give bitsandbytes (with load_in_4bit or "
            f"load_in_8bit), torchao or quanto as quantization_config{also and ',' + also}"
        )
    return {name: value for name, value in settings.items() if name[0] != "_" and name != "quant_method"}


def saved_quantization(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return those fields of a config.json's quantization_config that the installed transformers knows.

    Other fields are left out, because `from_pretrained` ignores them too.

    `where`: the origin of the quantization_config, for the message, e.g. a model's name.

    Raises:
        ValueError: the method is not bitsandbytes, the only method supported for saved weights.
    """
    from transformers import BitsAndBytesConfig

    known = inspect.signature(BitsAndBytesConfig).parameters
    return {name: value for name, value in of_method(settings, where, ["bitsandbytes"]).items() if name in known}


def quantized(model, settings: Mapping[str, Any], device: Any, trains: bool = False):
    """Quantize a model's linear layers on `device`, as `from_pretrained(quantization_config=)` does; return the model.

    Each weight moves to the device and is quantized there; weights that stay in full precision move last.

    Args:
        settings: fields of a quantization_config of transformers, see `METHODS`.
        trains: whether adapters will be trained on the model; then the method must allow training.

    Raises:
        ValueError: an unknown field, a value that transformers rejects, or a missing package.
    """
    import torch
    from transformers import __version__
    from transformers.quantizers import AutoHfQuantizer

    config, method = _config_of(settings), method_of(settings)
    if getattr(config, "load_in_4bit", False) and torch.device(device).type == "cpu":
        _boundaries(config.bnb_4bit_quant_type, torch.device(device))
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    if trains and not quantizer.is_trainable:
        raise ValueError(
            f"transformers {__version__} does not train adapters on {settings.get('quant_type')} of torchao: give "
            'int8 or float8, or int4 of quanto, e.g. {"quant_method": "quanto", "weights": "int4"}'
        )
    quantizer.validate_environment(device_map=None)
    whole = {name: parameter.data for name, parameter in model.named_parameters(remove_duplicate=False)}
    quantizer.preprocess_model(model, device_map=None)
    convert, quantized_layers = quantizer.get_quantize_ops().convert, set()
    for name in [*whole]:
        layer, _, last = name.rpartition(".")
        owner = model.get_submodule(layer)
        if quantizer.param_needs_quantization(model, name):
            weight = whole.pop(name)
            if method == "bitsandbytes":
                owner.weight = _in_few_bits(owner, weight, device)
            else:
                convert({name: [weight.to(device)]}, model=model, full_layer_name=name, missing_keys=set())
            del weight
            quantized_layers.add(layer)
        elif layer in quantized_layers and method != "torchao":  # a bias; torchao leaves the layer's own in place
            setattr(owner, last, torch.nn.Parameter(whole.pop(name).to(device), requires_grad=False))
    if not quantized_layers and method != "bitsandbytes":
        raise ValueError(
            f"quant_method={method!r} quantizes no layer of this model, because transformers passes only "
            "torch.nn.Linear to it (GPT-2's are Conv1D): give load_in_8bit or load_in_4bit"
        )
    del whole
    torch.nn.Module.to(model, device)
    model.hf_quantizer = quantizer
    return quantizer.postprocess_model(model)


def _config_of(settings: Mapping[str, Any]):
    """Return transformers' configuration object for the fields `settings` of a quantization_config.

    Raises:
        ValueError: an unknown field, a value that transformers rejects, or a missing package.
    """
    import transformers

    method, settings = method_of(settings), of_method(settings, "quantization_config")
    import_method(settings | {"quant_method": method})
    kind = {
        "bitsandbytes": transformers.BitsAndBytesConfig,
        "torchao": transformers.TorchAoConfig,
        "quanto": transformers.QuantoConfig,
    }[method]
    check_known("quantization_config", settings, list(inspect.signature(kind).parameters)[:-1])
    if method == "bitsandbytes" and not (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        raise ValueError("quantization_config has neither load_in_4bit nor load_in_8bit: set one of them to true")
    try:
        if method != "torchao":
            return kind(**settings)
        chosen = settings.pop("quant_type", "int8")
        if isinstance(chosen, str):
            library = sys.modules["torchao.quantization"]
            return kind(getattr(library, _OF_TORCHAO.get(chosen, chosen))(), **settings)
        return kind.from_dict(settings | {"quant_type": {"default": chosen.get("default", chosen)}})
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(f"quantization_config is not accepted by transformers ({error}): change it") from error


def _in_few_bits(layer, weight, device: Any):
    """Return a weight for a layer of bitsandbytes, quantized on `device` with at most one full-precision copy there."""
    from transformers.pytorch_utils import Conv1D

    weight = weight.T if issubclass(layer.source_cls, Conv1D) else weight  # GPT-2 stores it transposed
    fields = vars(layer.weight) | {"requires_grad": False, "CB": None, "SCB": None}
    return type(layer.weight)(weight, **fields).to(device)


def _boundaries(kind: str, device: Any) -> None:
    """Fill bitsandbytes' cache of boundaries for the 4-bit type `kind` ("nf4" or "fp4") before the meters start."""
    # Otherwise the first quantization on a CPU fills the cache, and the meters count its bytes.
    with contextlib.suppress(ImportError):
        from bitsandbytes.backends.default.ops import _get_4bit_quantize_bounds

        _get_4bit_quantize_bounds(kind, device)


def as_python(settings: Mapping[str, Any]) -> str:
    """Return a quantization_config as Python code to paste."""
    fields, method = of_method(settings, "quantization_config"), method_of(settings)
    if method != "torchao":
        return f"{'QuantoConfig' if method == 'quanto' else 'BitsAndBytesConfig'}(**{fields!r})"
    chosen = fields.pop("quant_type", "int8")
    kind = f"{_OF_TORCHAO.get(chosen, chosen)}()" if isinstance(chosen, str) else f"config_from_dict({chosen!r})"
    return f"TorchAoConfig({kind}, **{fields!r})"


def is_prepared(given: Mapping[str, Any], quantization: Mapping[str, Any]) -> bool:
    """Return whether to prepare a quantized model for training by peft's function `prepare_model_for_kbit_training`.

    The training argument of that name decides. Its default is True if adapters are added, except with quanto.

    Args:
        given: training arguments; only "peft" and "prepare_model_for_kbit_training" are read.
        quantization: fields of the quantization_config.
    """
    # The function cannot cast quanto's weights.
    by_default = given.get("peft") is not None and method_of(quantization) != "quanto"
    return bool(given.get("prepare_model_for_kbit_training", by_default))


def prepared(model, checkpointing: Mapping[str, Any] | None):
    """Return the model after `peft.prepare_model_for_kbit_training`.

    All weights are frozen, and weights that are not quantized are cast to fp32.

    `checkpointing`: the `gradient_checkpointing_kwargs` of activation checkpointing; None: no checkpointing.
    """
    prepare = importlib.import_module("peft").prepare_model_for_kbit_training
    return prepare(model, checkpointing is not None, dict(checkpointing or {}))


def adapted(model, settings: Mapping[str, Any], family: str, generates: bool = False):
    """Add adapters to a model and freeze all other weights, by `peft.get_peft_model`; return the resulting peft model.

    Args:
        settings: fields of a peft configuration, its kind ("peft_type"; default: LoRA), and optionally
            `autocast_adapter_dtype`, an argument of `get_peft_model` (True: adapters in 16 bits are cast to fp32).
        family: the data that the model takes, e.g. "causal", see `task.Task.family`.
        generates: whether the model will `generate`.

    Raises:
        ValueError: a kind or a field that peft does not know, a configuration that peft rejects for this model, a peft
            that is too old to run this kind with the installed transformers, or a missing package.
    """
    peft, settings = importlib.import_module("peft"), dict(settings)
    known = {kind.value: config for kind, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    name = settings.pop("peft_type", "LORA")
    name = str(getattr(name, "value", name)).upper()
    if name not in known:
        raise ValueError(f"peft: peft_type={name!r} is not a valid value. {nearest_text(name, known)}")
    autocast = settings.pop(_AUTOCAST, True)
    if not isinstance(autocast, bool):
        raise ValueError(f"peft: {_AUTOCAST}={shown(autocast)}: give true or false")
    check_known(f"peft ({name})", settings, [_AUTOCAST, *(field.name for field in fields(known[name]) if field.init)])
    if settings.get("task_type") is None and family in _TASK_TYPES:
        settings["task_type"] = _TASK_TYPES[family]
    _check_cache_is_known(peft, model, name, family, generates)
    try:
        return peft.get_peft_model(model, known[name](**settings), autocast_adapter_dtype=autocast)
    except ImportError as error:
        raise ValueError(f"{_missing_package(error)}: peft ({name}) needs it") from error
    except (TypeError, KeyError, AttributeError, AssertionError) as error:
        raise ValueError(f"peft ({name}) does not accept this configuration ({error}): change it") from error


_AUTOCAST = "autocast_adapter_dtype"


def _missing_package(error: ImportError) -> str:
    """Return the name of a missing package and how to install it, or the error's text if the error names no package."""
    quoted = re.search(r"['`]([\w-]+)['`]", str(error))
    name = getattr(error.__context__, "name", None) or error.name or (quoted and quoted[1])
    name = {"sklearn": "scikit-learn"}.get(name, name)
    return f"{name} is not installed (pip install {name})" if name else str(error)


def _check_cache_is_known(peft, model, name: str, family: str, generates: bool) -> None:
    """Raise ValueError if the installed peft is too old for the planned use of a learned prefix or prompt.

    `name`: peft's name of the kind of adapter, e.g. "PREFIX_TUNING"; `family`, `generates`: as in `adapted`.
    """
    import transformers
    from packaging.version import Version

    # transformers 5.24 renamed `past_key_values` to `cache`; peft 0.21 still uses the old name.
    needed = transformers.integrations.peft.MIN_PEFT_VERSION
    if Version(transformers.__version__) < Version("5.24") or Version(peft.__version__) >= Version(needed):
        return
    # Training of a generative model is allowed: there transformers still accepts the old name.
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
    """Freeze each parameter whose name contains one of the given parts.

    Args:
        names: the parts, separated by commas, e.g. "embed,layers.0.".

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
    """Yield (weight, list of its constants, e.g. scales and code books) of each quantized layer; all are tensors."""
    for layer in model.modules():
        weight = layer._parameters.get("weight")  # as an attribute, a parametrized weight would be computed
        if hasattr(weight, "__tensor_flatten__") and not hasattr(weight, "device_mesh"):  # FSDP2's have a mesh
            yield weight, []  # torchao's and quanto's are made of tensors
        elif kept := getattr(weight, "quant_state", None):
            second = getattr(kept, "state2", None)
            nested = (kept.offset, second.absmax, second.code) if second else ()
            yield weight, [kept.absmax, kept.code, *nested]
        elif hasattr(weight, "SCB") and (state := getattr(layer, "state", None)):
            yield weight, [each for each in (weight.CB, weight.SCB, state.CB, state.SCB) if each is not None]
