#!/usr/bin/env bash
# `GaLoreAdamW8bit` of galore-torch, as transformers' `optim="galore_adamw_8bit"` builds it, sets `max_unorm=100` and `skip_zeros=True`.
#
# One would guess: it is bitsandbytes' 8-bit AdamW on projected gradients, with the same settings as that one.
# What happens: it passes `percentile_clipping=100, block_wise=True` by position. bitsandbytes 0.50 has removed these two, so
# that the next two parameters get the values: `max_unorm`, which limits the update of each weight with states of 32 bits, and
# `skip_zeros`.
#
#     bash findings/galore_8bit_sets_max_unorm.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 bitsandbytes==0.50.2 galore-torch==1.0

cat > "$folder/show.py" <<'PYTHON'
import sys
import tempfile
from importlib.metadata import version

import transformers

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=100)
print(f"transformers {transformers.__version__},", end=" ")
print(f"galore-torch {version('galore-torch')}, bitsandbytes {version('bitsandbytes')}")


def settings(optim, **more):
    """The settings of bitsandbytes in the optimizer that the Trainer builds."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with tempfile.TemporaryDirectory() as output:
        args = transformers.TrainingArguments(output, optim=optim, use_cpu=True, report_to="none", **more)
        optimizer = transformers.Trainer(model=model, args=args).create_optimizer()
    return {name: getattr(optimizer.args, name) for name in ("max_unorm", "skip_zeros")}


plain, galore = settings("adamw_bnb_8bit"), settings("galore_adamw_8bit", optim_target_modules=["q_proj"])
print("adamw_bnb_8bit:", plain)
print("galore_adamw_8bit:", galore)
same = plain == {"max_unorm": 0.0, "skip_zeros": False} and galore == {"max_unorm": 100, "skip_zeros": True}
sys.exit(0 if same else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py" 2>&1 | grep -v "\[transformers\]"
