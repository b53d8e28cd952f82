#!/usr/bin/env bash
# A fake tensor that is written into a real one leaves no trace: no error, no values, and what the operator returns is
# another tensor with a storage of its own.
#
# One would guess: FakeTensorMode refuses the write, or the real tensor becomes unknown, or at least the operator
# returns its first argument, as every operator in place does.
# What happens: with allow_non_fake_inputs=True the operator runs on a fake copy of the real tensor. The real one keeps
# its old values and is read with them later. A tool that counts storages sees the copy as a new allocation. BigBird
# writes parts of its attention into zeros like that.
#
#     bash findings/fake_write_into_a_real_tensor_is_lost.sh      # exits 1 if that changed
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Returned(TorchDispatchMode):
    """Note what each operator returns."""

    def __init__(self):
        super().__init__()
        self.results = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.results.append(operator(*args, **(kwargs or {})))
        return self.results[-1]


print(f"torch {torch.__version__}")
kept = []
for name in ("copy_", "add_", "mul_"):
    real, mode, seen = torch.full((4,), 7.0), FakeTensorMode(allow_non_fake_inputs=True), Returned()
    with mode:
        fake = torch.ones(4)
        with seen:
            getattr(real, name)(fake)
    (result,) = seen.results
    own = result.untyped_storage()._cdata != real.untyped_storage()._cdata
    print(f"{name}: the operator returned a {type(result).__name__} with its own storage: {own}; real: {real.tolist()}")
    kept.append(own and real.tolist() == [7.0] * 4)
sys.exit(0 if all(kept) else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py"
