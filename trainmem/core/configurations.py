"""Read, check and merge the models' configurations for tasks, and find the type of a model's weights."""

import contextlib
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmem.texts import from_json, nearest_text, reading, shown, text_of


@dataclass(frozen=True)
class Weights:
    """Hold the type of a model's weights and who chose it; `str` gives e.g. "weights in bfloat16 (config.json)"."""

    dtype: str  # e.g. "bfloat16"; in a quantized model, the type of the weights that are not quantized
    source: str  # "config.json", "preset", "requested" ...
    quantization: dict[str, Any] | None = None  # fields of a quantization_config; None: not quantized
    quantized_by: str = ""  # who chose the quantization, as in `source`

    @property
    def bits(self) -> int | None:
        """Bits per quantized weight, e.g. 4 or 8; None if the model is not quantized."""
        if not self.quantization:
            return None
        kind = str(self.quantization.get("weights") or self.quantization.get("quant_type") or "")
        named = re.search(r"(?:int|float)(\d)", kind, re.IGNORECASE)
        return int(named[1]) if named else 4 if self.quantization.get("load_in_4bit") else 8

    def __str__(self) -> str:
        loaded = f"in {self.dtype} ({self.source})"
        return (
            f"weights in {self.bits} bits ({self.quantized_by}), the rest loaded {loaded}"
            if self.bits
            else (f"weights {loaded}")
        )


# Largest sizes by patterns of their names: ten times those of known models. Building larger ones would take for ever.
_MOST = {r"layers?$|blocks?$|depths?$": 1000, r"experts?$": 10_000, r"labels$": 2**20}
_MOST |= {r"size$|dim|heads?$|embd|channels|d_model|d_ff|inner|positions?$|embeddings$": 2**24}


def _check_sizes(where: str, fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a size in `fields` that is negative or far above any real model's.

    `where`: the origin of the fields, for the message, e.g. "config.json".
    """
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _check_sizes(where, value)
        most = next((most for words, most in _MOST.items() if re.search(words, str(name))), None)
        least = -1 if re.search("position|chunk", str(name)) else 0  # -1: no limit, as in XLNet and Phi-4-multimodal
        least = -1000 if "feature_layer" in str(name) else least  # counted from the last layer
        if most and isinstance(value, int | float) and not least <= value <= most:
            raise ValueError(f"{where}: {name}={shown(value)}: give a whole number from {least} to {most:,}")


def merged(fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's `fields` with those in `own` added, or put in place of fields with the same name.

    Nested parts such as text_config are merged field by field, not replaced.
    """
    names = [name for name, value in own.items() if _are_parts(name, fields.get(name), value)]
    return {**fields, **own, **{name: merged(fields[name], own[name]) for name in names}}


def _are_parts(name: str, *values: Any) -> bool:
    return name.endswith("_config") and name != "quantization_config" and all(isinstance(v, Mapping) for v in values)


_OF_DTYPE = (
    "{where}: transformers cannot load weights in dtype={value}. Give float32, bfloat16 or float16, or leave it out"
)


def made(where: str, kind: str, fields: dict[str, Any]):
    """Build the configuration of a model type from its fields.

    Args:
        where: the origin of the fields, for messages, e.g. "config.json".
        kind: the model type, e.g. "bert".

    Raises:
        ValueError: an unknown type, or fields that transformers rejects.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig

    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if "auto_map" in fields:
            raise ValueError(
                f"{where}: model_type={shown(kind)} has code of its own (auto_map), which is not run here. Write a "
                "program that loads it with trust_remote_code=True: perf-helpers rehearse --card NAME -- python FILE"
            )
        raise ValueError(
            f"{where}: model_type={shown(kind)} is not a valid value. {nearest_text(str(kind), CONFIG_MAPPING)}"
        )
    _check_sizes(where, fields)
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    if isinstance(dtype, str) and not hasattr(torch, dtype):
        raise ValueError(_OF_DTYPE.format(where=where, value=shown(dtype)))
    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:  # values that do not fit raise errors of any class
        raise ValueError(
            f"{where}: transformers rejects this {kind} configuration ({shown(str(error))}): correct it"
        ) from None


def torch_dtype(name: Any, source: str):
    """Return the torch.dtype called `name`, e.g. "bfloat16", in which weights can be loaded.

    `source`: who chose the type, for the message of the error.

    Raises:
        ValueError: `name` is not the name of a floating-point type of at least 16 bits.
    """
    import torch

    name = str(name).removeprefix("torch.")
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point or kind.itemsize < 2:
        raise ValueError(_OF_DTYPE.format(where=source, value=shown(name)))
    return kind


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json. transformers saves infinite floats as {"__float__": "Infinity"}.

    Raises:
        ValueError: the file cannot be read or is not a model configuration.
    """
    with reading(path, "JSON", "a config.json or its folder"):
        fields = from_json(text_of(path), lambda part: float(part["__float__"]) if [*part] == ["__float__"] else part)
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(
            f"{path} is not a model configuration: it has no 'model_type'. Give a config.json or its folder"
        )
    return fields


def dtype_of_files(folder: Path):
    """Return the torch.dtype of the first floating-point weight in the first file of weights in a folder.

    The result is None if the folder has no readable weights. `from_pretrained` loads weights in this type if the
    configuration names none.
    """
    from transformers.modeling_utils import get_state_dict_dtype, load_state_dict

    for file in weights_files(folder)[:1]:
        with contextlib.suppress(Exception):  # a damaged file: transformers reports it when the model is loaded
            if file.suffix != ".json":
                return get_state_dict_dtype(load_state_dict(str(file), map_location="meta"))
            index = from_json(text_of(file))
            first = folder / min(index["weight_map"].values())
            stated = index["metadata"].get("dtype")
            return stated or get_state_dict_dtype(load_state_dict(str(first), map_location="meta"))
    return None


def weights_files(folder: Path) -> list[Path]:
    """Return the files of weights, or their indexes, in the order in which `from_pretrained` looks for them."""
    names = (f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json"))
    return [folder / name for name in names if (folder / name).is_file()]


@functools.cache
def hub_answers() -> bool:
    """Return whether the Hub can be reached; checked once, because the Hub's client retries for half a minute."""
    import urllib.error
    import urllib.request

    from transformers.utils import hub

    if hub.is_offline_mode():
        return False
    try:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        request = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(request, timeout=3).close()
    except urllib.error.HTTPError:  # an error status is an answer, too
        return True
    except (OSError, ValueError):
        return False
    return True
