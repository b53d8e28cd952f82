#!/usr/bin/env bash
# `get_memory_footprint()` of a model quantized by quanto or torchao reports the size before quantization.
#
# One would guess: the method exists to show what quantization saves, and for bitsandbytes it does.
# What happens: it adds up numel x element size of the parameters. Those of quanto and torchao are tensor subclasses that
# present themselves with their old type and shape, so int8 weights count as 4 bytes each.
#
#     bash findings/footprint_of_quantized_weights.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 optimum-quanto==0.2.7 torchao==0.18.0

cat > "$folder/show.py" <<'PYTHON'
import sys
import tempfile
from importlib.metadata import version

import torch
import transformers

SIZES = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
print(f"torch {torch.__version__}, transformers {transformers.__version__},", end=" ")
print(f"optimum-quanto {version('optimum-quanto')}, torchao {version('torchao')}")


def stored(tensor):
    """The bytes in the storages of a tensor, those inside a subclass included."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(stored(getattr(tensor, name)) for name in names)
    return tensor.untyped_storage().nbytes()


def int8_of_torchao():
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


reported, held = {}, {}
with tempfile.TemporaryDirectory() as folder:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(folder)
    configs = {"none": None, "quanto int8": transformers.QuantoConfig(weights="int8"), "torchao int8": int8_of_torchao()}
    for name, config in configs.items():
        given = {"quantization_config": config} if config else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
        tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}.values()
        reported[name], held[name] = model.get_memory_footprint(), sum(map(stored, tensors))
        print(f"{name}: reported {reported[name]:,} bytes, stored {held[name]:,}")
others = [name for name in configs if name != "none"]
small = all(held[name] < held["none"] / 3 for name in others)
sys.exit(0 if small and all(reported[name] > 0.95 * reported["none"] for name in others) else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py" 2>&1 | grep -v "\[transformers\]\|Loading weights"
