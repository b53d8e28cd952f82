"""Run litgpt's command line, e.g. `run_litgpt.py finetune_lora ...`, as litgpt's published figures were measured.

Two things differ from `python -m litgpt`: adapters are not merged into the weights, which a host does in minutes after
the training; and each 4-bit layer keeps its input until its backward pass, as in bitsandbytes before 0.44.
"""

import runpy
import sys

import litgpt.scripts.merge_lora
from bitsandbytes.autograd._functions import MatMul4Bit

forward, backward = MatMul4Bit.forward, MatMul4Bit.backward


def forward_that_keeps(context, tensor, *args):
    context.kept = tensor
    return forward(context, tensor, *args)


def backward_that_frees(context, gradient):
    found = backward(context, gradient)
    context.kept = None
    return found


if __name__ == "__main__":
    MatMul4Bit.forward, MatMul4Bit.backward = map(staticmethod, (forward_that_keeps, backward_that_frees))
    litgpt.scripts.merge_lora.merge_lora = lambda **_: None
    sys.argv[0] = "litgpt"
    runpy.run_module("litgpt", run_name="__main__")
