"""Draw small model configurations of all architectures in architectures.toml from a seed, for generated trainings."""

import json
import random
import tomllib
from collections.abc import Callable
from pathlib import Path

from trainmem.core.task import Task

FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ARCHITECTURES, LARGE = FACTS["small"], FACTS["large"]
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
EXPERTS |= {"shared_expert_intermediate_size": 512}
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (9, 0))


def configuration(architecture: str, draw: random.Random) -> dict:
    """Return a random config.json, as a dict, of an architecture in architectures.toml.

    `draw`: the random generator.
    """
    given = dict(ARCHITECTURES[architecture])
    family = FAMILIES[given.pop("family")](draw) if "family" in given else {}
    return family | {name: drawn(value, draw) for name, value in given.items()}


def task_of(config: dict, seq_len: int | None, path: Path) -> Task:
    """Write a configuration to the file `path`; return its model's task of `seq_len` tokens (None: the default)."""
    path.write_text(json.dumps(config))
    return Task(str(path), seq_len=seq_len)


def drawn(value, draw: random.Random):
    if not isinstance(value, dict):
        return value
    return draw.choice(value["choice"]) if "choice" in value else draw.randint(*value["range"])


def _blocks(heads: int, width: int, draw: random.Random, most: int = 6) -> dict:
    layers = draw.randint(2, most)
    return {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers}


def _encoder(draw) -> dict:
    heads = draw.choice((2, 4, 8))
    sizes = _blocks(heads, heads * draw.choice((32, 64)), draw)
    sizes |= {"intermediate_size": 4 * sizes["hidden_size"], "vocab_size": draw.choice((2000, 9000, 30522, 50265))}
    return sizes | {"max_position_embeddings": 4200}


def _decoder(draw) -> dict:
    heads = draw.choice((4, 8, 16))
    sizes = _blocks(heads, heads * 64, draw) | {"intermediate_size": 8 * heads * 64 // 3 // 64 * 64}
    return sizes | {"vocab_size": draw.choice((4000, 32000, 50304)), "max_position_embeddings": 4200}


def _grouped(draw) -> dict:
    sizes = _decoder(draw)
    return sizes | {"num_key_value_heads": sizes["num_attention_heads"] // draw.choice((1, 2, 4))}


def _gpt2(draw) -> dict:
    heads = draw.choice((4, 8))
    sizes = {"n_embd": heads * 64, "n_head": heads, "n_layer": draw.randint(2, 6)}
    return sizes | {"n_positions": 4200, "vocab_size": draw.choice((8000, 50257))}


def _vision(draw) -> dict:
    heads = draw.choice((3, 4, 6))
    return _blocks(heads, heads * 64, draw, most=5) | {"intermediate_size": heads * 256, "image_size": 224}


def _two_stacks(draw, heads_of: tuple, layers_of: tuple, **more) -> dict:
    """Return the configuration of a model with an encoder and a decoder, of random sizes.

    Args:
        draw: the random generator.
        heads_of, layers_of: names of the fields that get the number of heads, and the number of layers.
        more: further fields of the configuration.
    """
    heads, layers = draw.choice((4, 8)), draw.randint(2, 4)
    sizes = {"d_model": heads * 64, "vocab_size": draw.choice((5000, 32128)), "max_position_embeddings": 4200}
    return sizes | dict.fromkeys(heads_of, heads) | dict.fromkeys(layers_of, layers) | more


def _t5(draw) -> dict:
    return _two_stacks(draw, ("num_heads",), ("num_layers", "num_decoder_layers"), d_ff=1024, d_kv=64)


def _bart(draw) -> dict:
    parts = ("encoder", "decoder")
    names = [tuple(f"{part}_{what}" for part in parts) for what in ("attention_heads", "layers", "ffn_dim")]
    return _two_stacks(draw, *names[:2], **dict.fromkeys(names[2], 1024))


FAMILIES: dict[str, Callable[[random.Random], dict]] = {
    "encoder": _encoder,
    "decoder": _decoder,
    "grouped decoder": _grouped,
    "mixture of experts": lambda draw: _grouped(draw) | EXPERTS,
    "gpt2": _gpt2,
    "vision": _vision,
    "t5": _t5,
    "bart": _bart,
}
