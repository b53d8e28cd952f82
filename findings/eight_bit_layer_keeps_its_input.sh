#!/usr/bin/env bash
# The input of a frozen 8-bit layer of bitsandbytes stays in memory after `backward`, for as long as the loss exists.
#
# One would guess: a frozen linear layer needs no input for its backward pass, so the input is freed in the forward pass,
# as with torch's own layer and with bitsandbytes' 4-bit layer. At the latest, `backward` frees it with all else that
# autograd saved.
# What happens: the autograd function of the 8-bit layer keeps its input as an attribute of its context, not by
# `save_for_backward`. `backward` does not free attributes. Only the end of the graph does, when the last reference to the
# loss (or to the logits) is gone. A loop that keeps `loss` until its next forward pass has ended has two such inputs of
# each layer at once. The 4-bit layer did the same until bitsandbytes 0.43.
#
#     bash findings/eight_bit_layer_keeps_its_input.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6 bitsandbytes==0.50.2

cat > "$folder/show.py" <<'PYTHON'
import sys
import weakref

import bitsandbytes
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt

print(f"torch {torch.__version__}, bitsandbytes {bitsandbytes.__version__}")


def is_alive(layer):
    """Return whether the layer's input exists after forward, after backward, and after the loss is deleted."""
    hidden = torch.rand(64, 256, requires_grad=True) * 2
    loss, hidden = layer(hidden).sum(), weakref.ref(hidden)
    after = [hidden() is not None]
    loss.backward()
    after.append(hidden() is not None)
    del loss
    return [*after, hidden() is not None]


layers = {
    "torch's Linear, frozen": torch.nn.Linear(256, 256).requires_grad_(False),
    "torch's Linear, trained": torch.nn.Linear(256, 256),
    "Linear4bit": Linear4bit(256, 256, bias=False).to("cpu"),
    "Linear8bitLt": Linear8bitLt(256, 256, bias=False, has_fp16_weights=False).to("cpu"),
}
found = {name: is_alive(layer) for name, layer in layers.items()}
print("input of                 after forward, after backward, after `del loss`")
for name, alive in found.items():
    print(f"{name:24}", *(f"{'kept' if each else 'freed':15}" for each in alive))
expected = {
    "torch's Linear, frozen": [False, False, False],
    "torch's Linear, trained": [True, False, False],
    "Linear4bit": [False, False, False],
    "Linear8bitLt": [True, True, False],
}
sys.exit(0 if found == expected else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py"
