#!/usr/bin/env bash
# `optim="stable_adamw", optim_args="kahan_sum=False,decouple_lr=False"` switches both on.
#
# One would guess: text in `optim_args` is parsed, as transformers does for `adamw_anyprecision` and its booleans.
# What happens: the text goes through bool(), and any text but the empty one is true. Decoupled weight decay then makes the decay
# of each step differ by the learning rate's factor, without a message.
#
#     bash findings/stable_adamw_reads_false_as_true.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 torch-optimi==0.3.3

cat > "$folder/show.py" <<'PYTHON'
import sys
import tempfile
from importlib.metadata import version

import torch
import transformers

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
print(f"torch {torch.__version__}, transformers {transformers.__version__}, torch-optimi {version('torch-optimi')}")
found = {}
for given in (None, "kahan_sum=False,decouple_lr=False", "kahan_sum=True,decouple_lr=True"):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with tempfile.TemporaryDirectory() as output:
        args = transformers.TrainingArguments(output, optim="stable_adamw", optim_args=given, use_cpu=True, report_to="none")
        _, settings = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
    found[given] = settings["kahan_sum"], settings["decouple_lr"]
    print(f"optim_args={given!r}: kahan_sum {found[given][0]}, decouple_lr {found[given][1]}")
off, on = found["kahan_sum=False,decouple_lr=False"], found["kahan_sum=True,decouple_lr=True"]
sys.exit(0 if off == on == (True, True) and found[None] == (None, False) else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py" 2>&1 | grep -v "\[transformers\]"
