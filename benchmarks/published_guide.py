"""The guides of 2022 and 2023: how torch up to 1.10 and transformers of early 2022 differed, for published.py.

Each function changes a training, before its first step, like those of published_fms.py.
"""

import functools
import math

import torch
from torch.nn import functional


def adamw_hf(model, arguments):
    """Return transformers' own AdamW for a model, the Trainer's default until 4.29. It updates one parameter after the
    other, with one temporary tensor.

    `arguments`: the Trainer's `TrainingArguments`.
    """

    class AdamW(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    gradient, state = parameter.grad, self.state[parameter]
                    if not state:
                        state |= {"first": torch.zeros_like(parameter), "second": torch.zeros_like(parameter)}
                    state["first"].mul_(0.9).add_(gradient, alpha=0.1)
                    state["second"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                    width = state["second"].sqrt().add_(1e-8)
                    parameter.addcdiv_(state["first"], width, value=-group["lr"])

    return AdamW(model.parameters(), {"lr": arguments.learning_rate})


def adam_8bit(model, arguments):
    """Return bitsandbytes' 8-bit Adam for a model as the guides use it: embeddings have 8-bit states too.

    `arguments`: the Trainer's `TrainingArguments`.
    """
    import bitsandbytes

    return bitsandbytes.optim.Adam8bit(model.parameters(), lr=arguments.learning_rate)


def kept_gradients(model, arguments) -> None:
    """Let the optimizer zero a model's gradients and keep them between steps, as before torch 2.0 (`set_to_none`).

    `arguments` are not used.
    """
    model.zero_grad = functools.partial(model.zero_grad, set_to_none=False)


def kept_input_of_softmax(model, arguments) -> None:
    """Let softmax keep its input for backward in addition to its result, as before torch 1.11 (pytorch PR 65242).

    The arguments are not used.
    """

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(context, rows, dim):
            result = torch._softmax(rows, dim, False)
            context.save_for_backward(result, rows)
            context.dim = dim
            return result

        @staticmethod
        def backward(context, gradient):
            result, _ = context.saved_tensors
            return torch._softmax_backward_data(gradient, result, context.dim, result.dtype), None

    functional.softmax = lambda rows, dim, dtype=None, **_: Softmax.apply(
        rows if dtype is None else rows.to(dtype), dim
    )


def gelu_in_fp32(model, arguments) -> None:
    """Let autocast run a model's GELU in fp32, as before torch 1.10 (pytorch PR 59639).

    The input of the GELU, which is kept for backward, then has 32 bits. `arguments` are not used.
    """
    for module in model.modules():
        if type(module).__name__ == "GELUActivation":
            plain = module.forward
            module.forward = lambda rows, plain=plain: plain(
                rows.float() if torch.is_autocast_enabled(rows.device.type) else rows
            )


def attention_of_2022(model, arguments) -> None:
    """Let a BERT use its attention of 2022: divided scores, an fp32 mask added even without padding, softmax, dropout.

    `arguments` are not used.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
        mask = torch.zeros(query.shape[0], 1, 1, key.shape[2], device=query.device)
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / math.sqrt(query.shape[-1])
        scores = scores + mask
        shares = functional.softmax(scores, dim=-1)
        shares = functional.dropout(shares, p=dropout, training=module.training)
        found = torch.matmul(shares, value)
        return found.permute(0, 2, 1, 3).contiguous(), shares

    ALL_ATTENTION_FUNCTIONS.register("2022", attend)
    model.config._attn_implementation = "2022"


def no_workspace(model, arguments) -> None:
    """Let an estimate leave out cuBLAS's workspace, which torch up to 1.9 did not allocate; no effect on a rehearsal.

    The arguments are not used.
    """
    from trainmem.estimate import kernels

    kernels.multiplies = lambda function: False
