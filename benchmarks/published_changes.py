"""What published trainings did otherwise than today's libraries do, for benchmarks/published.py.

A row of published.toml names the changes that its set-up needs; each is made to the model, between its construction and
the Trainer's first step, by `of`. Rules of older versions are among them, each with the version that ended it.
"""

import functools
import math
from collections.abc import Callable, Sequence


def of(names: Sequence[str], model, arguments):
    """Make these changes to a model; an optimizer where one of them brings it, else None: the Trainer makes its own.

    Raises:
        KeyError: there is no such change.
    """
    made = [CHANGES[name](model, arguments) for name in names]
    return next((optimizer for optimizer in made if optimizer is not None), None)


# ---- adapters


def lora(model, arguments) -> None:
    """PEFT's LoRA, rank 16, dropout 0.1, on the projections of attention; adapters in fp32 whatever the weights are.

    As peft 0.13 (`autocast_adapter_dtype`): weights frozen, the adapter's input cast to fp32, its result added to the
    layer's; the embedding's result requires a gradient, so that checkpoints have one.
    """
    import torch

    class Adapted(torch.nn.Module):
        def __init__(self, layer, rank: int = 16):
            super().__init__()
            self.layer = layer
            self.dropout = torch.nn.Dropout(0.1)
            device = layer.weight.device
            self.down = torch.nn.Linear(layer.in_features, rank, bias=False, dtype=torch.float32, device=device)
            self.up = torch.nn.Linear(rank, layer.out_features, bias=False, dtype=torch.float32, device=device)

        def forward(self, rows):
            result = self.layer(rows)
            kind = result.dtype
            rows = rows.to(self.down.weight.dtype)
            result = result + self.up(self.down(self.dropout(rows))) * 1.0
            return result.to(kind)

    model.requires_grad_(False)
    for module in [*model.modules()]:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            if isinstance(getattr(module, name, None), torch.nn.Linear):
                setattr(module, name, Adapted(getattr(module, name)))
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))


# ---- losses of causal language models


def _shifted(logits, labels, vocabulary: int):
    """Cross-entropy of logits whose last position was cut off by a copy."""
    from torch.nn.functional import cross_entropy

    ahead = logits[..., :-1, :].contiguous()
    after = labels[..., 1:].contiguous()
    return cross_entropy(ahead.view(-1, vocabulary), after.view(-1))


def copied_logits(model, arguments) -> None:
    """The loss of transformers 4.46 to 4.48: logits in fp32 beside those of 16 bits, and a copy without the last
    position; since 4.49 labels are shifted instead (loss/loss_utils.py)."""

    def loss(logits, labels, vocab_size, **_):
        logits = logits.float()
        return _shifted(logits, labels, vocab_size)

    model.loss_function = loss


def early_cast_logits(model, arguments) -> None:
    """The loss of transformers up to 4.45: logits go over to fp32, those of 16 bits are freed, and a copy without the
    last position."""
    head = model.get_output_embeddings()
    plain = head.forward
    head.forward = lambda rows: plain(rows).float()
    model.loss_function = lambda logits, labels, vocab_size, **_: _shifted(logits, labels, vocab_size)


def half_logits(model, arguments) -> None:
    """The loss of models that never cast their logits, as GPT-BigCode up to transformers 4.48: cross-entropy in 16 bits
    of a copy without the last position."""
    model.loss_function = lambda logits, labels, vocab_size, **_: _shifted(logits, labels, vocab_size)


def kept_keys(model, arguments) -> None:
    """GPT-BigCode up to transformers 4.48 keeps keys and values for a cache although layers are checkpointed: views of
    what gave queries too, which live until the model returns."""
    import torch

    kept = []
    for name, module in model.named_modules():
        if name.endswith(".c_attn"):
            # Gradients are on where a layer is computed again in the backward, which keeps nothing.
            module.register_forward_hook(
                lambda module, inputs, output: None if torch.is_grad_enabled() else kept.append(output)
            )
    model.register_forward_hook(lambda *_: kept.clear())


# ---- torch and transformers of the guides: torch up to 1.10, transformers of early 2022


def adamw_hf(model, arguments):
    """transformers' own AdamW, the Trainer's default until 4.29: parameter by parameter, one temporary of its size."""
    import torch

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
    """bitsandbytes' 8-bit Adam as the guides make it themselves: embeddings too keep states of 8 bits."""
    import bitsandbytes

    return bitsandbytes.optim.Adam8bit(model.parameters(), lr=arguments.learning_rate)


def kept_gradients(model, arguments) -> None:
    """Gradients are zeroed and kept between the steps, as before torch 2.0 (`set_to_none`)."""
    model.zero_grad = functools.partial(model.zero_grad, set_to_none=False)


def kept_input_of_softmax(model, arguments) -> None:
    """A softmax keeps its input for the backward as well as its result, as before torch 1.11 (pytorch PR 65242)."""
    import torch
    from torch.nn import functional

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
    """Autocast runs GELU in fp32, as before torch 1.10 (pytorch PR 59639): its input is kept in 32 bits."""
    import torch

    for module in model.modules():
        if type(module).__name__ == "GELUActivation":
            plain = module.forward
            module.forward = lambda rows, plain=plain: plain(
                rows.float() if torch.is_autocast_enabled(rows.device.type) else rows
            )


def attention_of_2022(model, arguments) -> None:
    """BERT's attention as it was: scores divided, a mask in fp32 added although nothing is padded, softmax, dropout."""
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
        mask = torch.zeros(query.shape[0], 1, 1, key.shape[2], device=query.device)
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / math.sqrt(query.shape[-1])
        scores = scores + mask
        shares = torch.nn.functional.softmax(scores, dim=-1)
        shares = torch.nn.functional.dropout(shares, p=dropout, training=module.training)
        found = torch.matmul(shares, value)
        return found.permute(0, 2, 1, 3).contiguous(), shares

    ALL_ATTENTION_FUNCTIONS.register("2022", attend)
    model.config._attn_implementation = "2022"


def no_workspace(model, arguments) -> None:
    """cuBLAS keeps no workspace of torch's allocator, as up to torch 1.9. Only an estimate can leave it out."""
    from perf_helpers.estimate import kernels

    kernels.multiplies = lambda function: False


CHANGES: dict[str, Callable] = {
    change.__name__: change
    for change in (
        lora,
        copied_logits,
        early_cast_logits,
        half_logits,
        kept_keys,
        adamw_hf,
        adam_8bit,
        kept_gradients,
        kept_input_of_softmax,
        gelu_in_fp32,
        attention_of_2022,
        no_workspace,
    )
}
