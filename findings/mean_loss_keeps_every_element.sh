#!/usr/bin/env bash
# On a CPU the mean `mse_loss` of a million numbers is one number whose storage has 4 MB, for as long as the loss lives.
#
# One would guess: the storage of a loss without dimensions has 4 bytes, as that of `l1_loss` has. A list of losses kept
# for a plot would then be small.
# What happens: the kernel writes the loss of each element into a tensor, reduces this tensor in place, and returns it
# with the shape of one number. The memory of all elements stays. `smooth_l1_loss` and `binary_cross_entropy` do so too.
#
#     bash findings/mean_loss_keeps_every_element.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import sys

import torch
from torch.nn import functional

print(f"torch {torch.__version__}")
guess, target = torch.rand(1_000_000), torch.rand(1_000_000)
found = {}
for name in ("l1_loss", "huber_loss", "mse_loss", "smooth_l1_loss", "binary_cross_entropy"):
    loss = getattr(functional, name)(guess, target)
    found[name] = loss.untyped_storage().nbytes()
    print(f"{name:21} shape {tuple(loss.shape)}, bytes of its storage: {found[name]:>9,}")
kept = {name for name, size in found.items() if size == 4_000_000}
sys.exit(0 if kept == {"mse_loss", "smooth_l1_loss", "binary_cross_entropy"} else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py"
