#!/usr/bin/env bash
# `TorchAoConfig(Int8WeightOnlyConfig())` leaves GPT-2 as it is: no weight is quantized, and nothing is logged.
#
# One would guess: the model is stored in 8 bits, as with `BitsAndBytesConfig(load_in_8bit=True)`, or there is a warning.
# What happens: transformers passes only torch.nn.Linear to torchao. GPT-2's layers are of transformers' own class, Conv1D;
# its one Linear, the head, is tied to the embedding, and left out too. The model still says that it is quantized.
#
#     bash findings/torchao_skips_gpt2.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 bitsandbytes==0.50.2 torchao==0.18.0

cat > "$folder/show.py" <<'PYTHON'
import sys
import tempfile
from importlib.metadata import version

import torch
import transformers
from torchao.quantization import Int8WeightOnlyConfig

print(f"torch {torch.__version__}, transformers {transformers.__version__},", end=" ")
print(f"bitsandbytes {version('bitsandbytes')}, torchao {version('torchao')}")


def quantized(config):
    """How many weights are stored in 8 bits, and whether the model says that it is quantized."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    weights = [*model.parameters()]
    count = sum(each.dtype is torch.int8 or hasattr(each, "__tensor_flatten__") for each in weights)
    return count, getattr(model, "is_quantized", False)


with tempfile.TemporaryDirectory() as folder:
    sizes = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128)
    transformers.GPT2LMHeadModel(sizes).save_pretrained(folder)
    by_torchao = quantized(transformers.TorchAoConfig(Int8WeightOnlyConfig()))
    by_bitsandbytes = quantized(transformers.BitsAndBytesConfig(load_in_8bit=True))
print("bitsandbytes: weights in 8 bits, is_quantized:", by_bitsandbytes)
print("torchao: weights in 8 bits, is_quantized:", by_torchao)
sys.exit(0 if by_torchao == (0, True) and by_bitsandbytes == (8, True) else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py" 2>&1 | grep -v "\[transformers\]\|Loading weights\|Writing model"
