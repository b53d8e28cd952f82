"""Configurations of models: read from files, checked, made, and what they say of the type of the weights."""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmem.texts import from_json, nearest_text, reading, shown, text_of


@dataclass(frozen=True)
class Weights:
    """The type of a model's weights, and who chose it. `str` says both: "weights in bfloat16 (config.json)"."""

    dtype: str  # e.g. "bfloat16"; of a quantized model that of the weights that are not quantized, as they are loaded
    source: str  # "config.json", "preset", "requested" ...
    quantization: dict[str, Any] | None = None  # fields of a `BitsAndBytesConfig`; None: not quantized
    quantized_by: str = ""  # as `source`

    @property
    def bits(self) -> int | None:
        """Bits of a quantized weight, 4 or 8; None: nothing is quantized."""
        return (4 if self.quantization.get("load_in_4bit") else 8) if self.quantization else None

    def __str__(self) -> str:
        loaded = f"in {self.dtype} ({self.source})"
        return (
            f"weights in {self.bits} bits ({self.quantized_by}), the rest loaded {loaded}"
            if self.bits
            else (f"weights {loaded}")
        )


# The most of a configuration's sizes, by what is in their names: ten times what there is. More would not end.
_MOST = {r"layers?$|blocks?$|depth": 1000, r"experts?$": 10_000, r"labels$": 2**20}
_MOST |= {r"size$|dim|heads?$|embd|channels|d_model|d_ff|inner|positions?$|embeddings$": 2**24}


def _check_sizes(where: str, fields: Mapping[str, Any]) -> None:
    """Raise ValueError at a size that no model has: before anything is made of it."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _check_sizes(where, value)
        most = next((most for words, most in _MOST.items() if re.search(words, str(name))), None)
        least = -1 if "position" in str(name) else 0  # XLNet's: no limit
        least = -1000 if "feature_layer" in str(name) else least  # counted from the last
        if most and isinstance(value, int | float) and not least <= value <= most:
            raise ValueError(f"{where}: {name}={shown(value)}: give a whole number from {least} to {most:,}")


def merged(fields: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a configuration with others in their place; its parts, e.g. text_config, are merged alike."""
    names = [name for name, value in own.items() if _are_parts(name, fields.get(name), value)]
    return {**fields, **own, **{name: merged(fields[name], own[name]) for name in names}}


def _are_parts(name: str, *values: Any) -> bool:
    return name.endswith("_config") and name != "quantization_config" and all(isinstance(v, Mapping) for v in values)


_OF_DTYPE = (
    "{where}: transformers cannot load weights in dtype={value}. Give float32, bfloat16 or float16, or leave it out"
)


def made(where: str, kind: str, fields: dict[str, Any]):
    """The configuration of a type of model. Raises ValueError, with the file or the argument that said so."""
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig

    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(
            f"{where}: model_type={shown(kind)} is not a valid value. {nearest_text(str(kind), CONFIG_MAPPING)}"
        )
    _check_sizes(where, fields)
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    if isinstance(dtype, str) and not hasattr(torch, dtype):
        raise ValueError(_OF_DTYPE.format(where=where, value=shown(dtype)))
    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:  # what its fields' values are not fit for shows in any kind of error
        raise ValueError(
            f"{where}: transformers rejects this {kind} configuration ({shown(str(error))}): correct it"
        ) from None


def dtype_of(
    config, dtype: Any, named: str, where: str, of_weights: Callable[[], Any], is_preset: bool
) -> tuple[Any, str]:
    """The torch.dtype in which `from_pretrained` loads a model, and who chose it: see `task.Task.weights`.

    Args:
        dtype: what is requested; None or "auto": nothing.
        named: who named the configuration's type. `where`: the configuration's own name.
        of_weights: asked for the type of the saved weights; None: there are none.
        is_preset: whether the configuration was written for the package, which looked at the published one.
    """
    import torch

    found, source = None if dtype == "auto" else dtype, "requested"
    if found is None and (found := config.dtype) is not None:
        found, source = found.get("", torch.float32) if isinstance(found, dict) else found, named
    if found is None:
        found, source = of_weights(), f"the type of the saved weights, {where} names none"
    if found is None:
        found, source = torch.float32, where if is_preset else f"{where} names none"
    name = str(found).removeprefix("torch.")
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point or kind.itemsize < 2:
        raise ValueError(_OF_DTYPE.format(where=source, value=shown(name)))
    return kind, source


def read_config(path: Path) -> dict[str, Any]:
    with reading(path, "JSON", "a config.json or its folder"):
        fields = from_json(text_of(path))
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(
            f"{path} is not a model configuration: it has no 'model_type'. Give a config.json or its folder"
        )
    return fields


def dtype_of_files(folder: Path):
    """The type by which `from_pretrained` loads a folder whose configuration names none: that of the first weight of
    floating point in its first file. None: the folder has no weights that can be read."""
    from transformers.modeling_utils import get_state_dict_dtype, load_state_dict

    for file in weights_files(folder)[:1]:
        with contextlib.suppress(Exception):  # a damaged file: whoever loads the model is informed by the library
            if file.suffix != ".json":
                return get_state_dict_dtype(load_state_dict(str(file), map_location="meta"))
            index = from_json(text_of(file))
            first = folder / min(index["weight_map"].values())
            stated = index["metadata"].get("dtype")
            return stated or get_state_dict_dtype(load_state_dict(str(first), map_location="meta"))
    return None


def weights_files(folder: Path) -> list[Path]:
    """Files of a folder from which `from_pretrained` may read the weights, or their index; the first is the one."""
    names = (f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json"))
    return [folder / name for name in names if (folder / name).is_file()]


@functools.cache
def hub_answers() -> bool:
    """Whether the Hub can be reached: asked once, for its own client tries for half a minute before it gives up."""
    import urllib.error
    import urllib.request

    from transformers.utils import hub

    if hub.is_offline_mode():
        return False
    try:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        asked = urllib.request.Request(endpoint, method="HEAD")
        urllib.request.urlopen(asked, timeout=3).close()
    except urllib.error.HTTPError:  # an answer all the same
        return True
    except (OSError, ValueError):
        return False
    return True
