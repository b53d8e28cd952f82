#!/usr/bin/env bash
# torch.utils.flop_counter.FlopCounterMode counts the products of a model, by the names of operations.
#
# One would guess: a count of floating-point operations depends on the model, not on the release of torch, and fused
# attention counts as much as the products that it is made of.
# What happens on a CPU: until torch 2.14 `scaled_dot_product_attention` counts 0 without a warning, since torch 2.15 it
# counts as its products do. So the same script says that the same model needs more FLOPs, and utilizations that are
# computed from the two releases cannot be compared. Grouped products (`torch._grouped_mm`, which transformers uses for
# mixtures of experts) count 0 in both.
#
#     bash findings/flop_counter_sees_cpu_attention.sh      # exits 1 if a release behaves in another way
#
# It needs Python 3.11 or newer and a package index. torch is downloaded twice, by default as a build with CUDA, which
# takes some GB each.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/show.py" <<'PYTHON'
import sys
import warnings

warnings.simplefilter("ignore")
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

heads = torch.randn(1, 2, 64, 16)
rows, experts = torch.randn(64, 32, dtype=torch.bfloat16), torch.randn(4, 32, 16, dtype=torch.bfloat16)
ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
WORK = {
    "attention by its products": lambda: (heads @ heads.mT).softmax(-1) @ heads,
    "attention, fused": lambda: scaled_dot_product_attention(heads, heads, heads),
    "experts one by one": lambda: [part @ each for part, each in zip(rows.split(16), experts)],
    "experts, grouped": lambda: torch._grouped_mm(rows, experts, offs=ends),
}
found = {}
for name, work in WORK.items():
    with FlopCounterMode(display=False) as counter:
        work()
    found[name] = counter.get_total_flops()
print(f"torch {torch.__version__}:", ", ".join(f"{name} {count:,}" for name, count in found.items()))
expected = [524288, int(sys.argv[1]), 65536, 0]
sys.exit(0 if list(found.values()) == expected else f"not as before; it was {expected}")
PYTHON

show() {  # a release, and the products that it is expected to count
    "${PYTHON:-python3}" -m venv --clear "$folder/venv"
    "$folder/venv/bin/python" -m pip install -q --disable-pip-version-check "$1"
    "$folder/venv/bin/python" "$folder/show.py" "$2"
}
show torch==2.14.1 0
show torch==2.15.0 524288
