#!/usr/bin/env bash
# FSDP2's mixed precision, `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`, without `reduce_dtype`.
#
# One would guess, as torch documented until 2.14: gradients are reduced in `param_dtype`, two bytes each.
# What happens since torch 2.15: they are reduced in the type of the parameters, here fp32. The same script sends twice
# the bytes for gradients, from a buffer of twice the size, and prints no warning. `reduce_dtype=torch.bfloat16` brings the old
# behaviour back. (accelerate and the Trainer name both types and are not concerned.)
#
#     bash findings/fsdp2_reduces_in_fp32.sh      # two processes on a CPU; exits 1 if a release behaves in another way
#
# It needs Python 3.11 or newer, Linux and a package index. torch is downloaded twice, by default as a build with CUDA,
# which takes some GB each.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/show.py" <<'PYTHON'
import sys
import warnings

warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """Notes what is given to a reduce-scatter."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "reduce_scatter" in str(function):
            (self.type, self.bytes) = (str(args[1].dtype), args[1].nbytes)
        return function(*args, **(kwargs or {}))


def rank(number, folder, expected):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with Sent() as sent:
        model(torch.randn(8, 64)).sum().backward()
    if number == 0:
        print(f"torch {torch.__version__}: 64 x 64 gradients are reduced in {sent.type}, {sent.bytes:,} bytes")
    dist.destroy_process_group()
    if sent.type != expected:
        raise SystemExit(f"not as before; it was {expected}")


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, tuple(sys.argv[1:]), nprocs=2)
PYTHON

show() {  # a release, and the dtype that it is expected to reduce gradients in
    "${PYTHON:-python3}" -m venv --clear "$folder/venv"
    "$folder/venv/bin/python" -m pip install -q --disable-pip-version-check "$1"
    rm -f "$folder/store"
    "$folder/venv/bin/python" "$folder/show.py" "$folder" "$2"
}
show torch==2.14.1 torch.bfloat16
show torch==2.15.0 torch.float32
