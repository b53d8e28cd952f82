#!/usr/bin/env bash
# `optim="galore_adamw"` of transformers' Trainer ignores `weight_decay`, `adam_beta1` and `adam_epsilon`.
#
# One would guess: GaLore is AdamW on projected gradients, so the Trainer's AdamW settings reach it, or it warns.
# What happens: the optimizer is built with the library's defaults, and nothing is logged. The same names work for adamw_torch.
#
#     bash findings/galore_drops_adam_settings.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 galore-torch==1.0

cat > "$folder/show.py" <<'PYTHON'
import sys
import tempfile
from importlib.metadata import version

import torch
import transformers

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
SETTINGS = {"weight_decay": 0.3, "adam_beta1": 0.5, "adam_epsilon": 1e-4}
print(f"torch {torch.__version__}, transformers {transformers.__version__}, galore-torch {version('galore-torch')}")


def groups(optim, **more):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with tempfile.TemporaryDirectory() as output:
        args = transformers.TrainingArguments(output, optim=optim, use_cpu=True, report_to="none", **SETTINGS, **more)
        optimizer = transformers.Trainer(model=model, args=args).create_optimizer()
    return [(group["weight_decay"], group["betas"][0], group["eps"]) for group in optimizer.param_groups]


plain, galore = groups("adamw_torch"), groups("galore_adamw", optim_target_modules=["q_proj", "k_proj"])
print("requested:", tuple(SETTINGS.values()))
print("adamw_torch (weight decay, beta 1, epsilon by group):", plain)
print("galore_adamw:", galore)
ignored = all((decay, beta, epsilon) == (0.0, 0.9, 1e-6) for decay, beta, epsilon in galore)
sys.exit(0 if (0.3, 0.5, 1e-4) in plain and ignored else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py" 2>&1 | grep -v "\[transformers\]"
