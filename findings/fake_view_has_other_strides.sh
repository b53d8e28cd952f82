#!/usr/bin/env bash
# For one sample, tokens viewed as an image have other strides on fake tensors than on real ones, and so has what a
# convolution makes of them: channels-last on fake tensors, contiguous on real ones.
#
# One would guess: fake tensors have the strides of real ones. They are made to tell layouts without computing.
# What happens: for a dimension of length 1 torch's real `view` and its fake one choose different strides, and this
# stride decides whether an image counts as channels-last. With two samples both agree. SegFormer and PVT v2 view tokens
# as images before each depthwise convolution.
#
#     bash findings/fake_view_has_other_strides.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import contextlib
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def strides(samples):
    """Return the strides of tokens viewed as an image, and of a depthwise convolution's result."""
    image = torch.zeros(samples, 16, 8).transpose(1, 2).view(samples, 8, 4, 4)
    return image.stride(), torch.conv2d(image, torch.zeros(8, 1, 3, 3), padding=1, groups=8).stride()


print(f"torch {torch.__version__}")
found = {}
for samples in (1, 2):
    for name, mode in (("real", contextlib.nullcontext()), ("fake", FakeTensorMode())):
        with mode, torch.no_grad():
            found[samples, name] = strides(samples)
        print(f"{samples} sample(s), {name}: image {found[samples, name][0]}, result {found[samples, name][1]}")
differ = [samples for samples in (1, 2) if found[samples, "real"] != found[samples, "fake"]]
sys.exit(0 if differ == [1] else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py"
