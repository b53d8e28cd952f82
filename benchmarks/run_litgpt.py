"""Run litgpt's command line, e.g. `run_litgpt.py finetune_lora ...`, as litgpt's published figures were measured.

Two things differ from `python -m litgpt`: adapters are not merged into the weights, which a host does in minutes after
the training; and each 4-bit layer keeps its input as long as the graph of its micro-batch exists, as in bitsandbytes
before 0.44.
"""

import runpy
import sys

import litgpt.scripts.merge_lora
from bitsandbytes.autograd._functions import MatMul4Bit

forward = MatMul4Bit.forward


def forward_that_keeps(context, tensor, *args):
    context.kept = tensor
    return forward(context, tensor, *args)


if __name__ == "__main__":
    MatMul4Bit.forward = staticmethod(forward_that_keeps)
    litgpt.scripts.merge_lora.merge_lora = lambda **_: None
    sys.argv[0] = "litgpt"
    runpy.run_module("litgpt", run_name="__main__")
