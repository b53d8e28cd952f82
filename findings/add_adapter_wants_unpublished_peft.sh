#!/usr/bin/env bash
# transformers' own way to add an adapter, `model.add_adapter(LoraConfig(...))`, has a least version of peft.
# transformers 5.24.0 raised it to 0.22.0, and on 2026-11-28 the newest peft of the package index is 0.21.2.
#
# One would guess: a release asks for nothing that cannot be installed, or pip says that two packages do not fit.
# What happens: `pip check` is content, peft's own `get_peft_model` works, and `add_adapter` raises ValueError.
#
#     bash findings/add_adapter_wants_unpublished_peft.sh      # exits 1 if that changed
#
# It needs Python 3.11 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 peft==0.21.2 transformers==5.24.0
"$folder/venv/bin/python" -m pip check

cat > "$folder/show.py" <<'PYTHON'
import sys
import warnings

warnings.simplefilter("ignore")
import peft
import torch
import transformers

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
lora = peft.LoraConfig(target_modules=["q_proj"])
print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
try:
    model.add_adapter(lora)
    told = "taken"
except ValueError as error:
    told = str(error)
print("model.add_adapter:", told)
trained = sum(weight.requires_grad for weight in peft.get_peft_model(model, lora).parameters())
print("peft.get_peft_model:", trained, "matrices are trained")
sys.exit(0 if "0.22.0" in told and trained == 4 else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py" 2>&1 | grep -v "\[transformers\]"
