#!/usr/bin/env bash
# Under FakeTensorMode, a `copy.deepcopy` of a fake parameter belongs to another FakeTensorMode than the parameter.
#
# One would guess: the copy is like any other fake tensor of the mode: a transposed view of it shares its storage, so
# code that follows memory by storages sees one block. peft's `modules_to_save` copies modules in this way.
# What happens: the copy takes a deep copy of the tensor's attributes along, its mode among them. With
# `allow_non_fake_inputs=True` each view of the copy is converted to the present mode, and has a storage of its own.
#
#     bash findings/deep_copy_leaves_its_fake_mode.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import copy
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def shares(weight):
    """Return whether a transposed view of the weight has the weight's storage."""
    return weight.t().untyped_storage()._cdata == weight.untyped_storage()._cdata


print(f"torch {torch.__version__}")
with FakeTensorMode(allow_non_fake_inputs=True) as mode:
    made = torch.nn.Linear(8, 8).weight
    copied = copy.deepcopy(made)
    cloned = torch.nn.Parameter(made.detach().clone())
    found = [(weight.fake_mode is mode, shares(weight)) for weight in (made, cloned, copied)]
for name, (own, shared) in zip(("parameter", "its clone", "its deep copy"), found):
    print(f"{name:13} has the present mode: {own}; its view shares its storage: {shared}")
sys.exit(0 if found == [(True, True), (True, True), (False, False)] else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py"
