#!/usr/bin/env bash
# M2M100 accepts sequences longer than `max_position_embeddings`: its table of positions grows and stays larger.
#
# One would guess: a longer sequence is refused, as models with learned positions refuse it, or costs memory in that pass only.
# What happens: the forward pass computes a longer table in place of the buffer, and later short sequences keep paying for it.
#
#     bash findings/sinusoidal_positions_grow.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0

cat > "$folder/show.py" <<'PYTHON'
import sys

import torch
import transformers

SIZES = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
             encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=100, max_position_embeddings=64)
print(f"torch {torch.__version__}, transformers {transformers.__version__}")
model = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**SIZES))
tables = lambda: [module.weights for name, module in model.named_modules() if name.endswith("embed_positions")]
rows = {}
rows["built"] = [len(table) for table in tables()]
for tokens in (64, 96, 32):
    ids = torch.full((1, tokens), 5)
    model(input_ids=ids, labels=ids)
    rows[tokens] = [len(table) for table in tables()]
print("max_position_embeddings: 64; rows of the encoder's and the decoder's table:")
for when, counts in rows.items():
    print(f"  {when if when == 'built' else f'after {when} tokens'}: {counts}")
kept = rows[32] == rows[96] > rows["built"] == rows[64]
sys.exit(0 if kept else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py" 2>&1 | grep -v "\[transformers\]"
