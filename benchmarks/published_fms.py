"""foundation-model-stack/fms-acceleration: how its trainings differ from trainings of today, for published.py.

A row of published.toml names the changes that its set-up needs. Each function changes the model before the Trainer's
first step; a function that makes an optimizer returns the optimizer. If a function restores the behaviour of older
versions, its docstring names the version that ended this behaviour.
"""

import torch
from torch.nn import functional

# ---- adapters


def lora(model, arguments) -> None:
    """Add PEFT's LoRA of rank 16 with dropout 0.1 to the model's projections of attention; adapters are always in fp32.

    As in peft 0.13 (`autocast_adapter_dtype`): the model is frozen, the adapter's input is cast to fp32, and the
    adapter's result is added to the result of the layer. The embedding's result is made to require a gradient, because
    gradient checkpointing needs an input that requires a gradient. `arguments` are not used.
    """

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
    """Return the cross-entropy of a copy of the logits without their last position.

    Args:
        logits: (..., length, vocabulary).
        labels: (..., length); the first position is left out.
        vocabulary: number of words.
    """
    ahead = logits[..., :-1, :].contiguous()
    after = labels[..., 1:].contiguous()
    return functional.cross_entropy(ahead.view(-1, vocabulary), after.view(-1))


def copied_logits(model, arguments) -> None:
    """Let a model use the loss of transformers 4.46 to 4.48, which needs more memory for logits.

    The 16-bit logits stay in memory beside their fp32 copy, and the logits without the last position are one more copy.
    Since 4.49 labels are shifted instead (loss/loss_utils.py). `arguments` are not used.
    """

    def loss(logits, labels, vocab_size, **_):
        logits = logits.float()
        return _shifted(logits, labels, vocab_size)

    model.loss_function = loss


def early_cast_logits(model, arguments) -> None:
    """Let a model use the loss of transformers up to 4.45: logits are cast to fp32, 16-bit ones freed, the last
    position cut off.

    The cut makes a copy. `arguments` are not used.
    """
    head = model.get_output_embeddings()
    plain = head.forward
    head.forward = lambda rows: plain(rows).float()
    model.loss_function = lambda logits, labels, vocab_size, **_: _shifted(logits, labels, vocab_size)


def half_logits(model, arguments) -> None:
    """Let a model use the loss of models that never cast their logits, like GPT-BigCode up to transformers 4.48.

    It is the cross-entropy of a 16-bit copy of the logits without the last position. `arguments` are not used.
    """
    model.loss_function = lambda logits, labels, vocab_size, **_: _shifted(logits, labels, vocab_size)


def kept_keys(model, arguments) -> None:
    """Let a model keep keys and values for a cache although layers are checkpointed, like GPT-BigCode up to 4.48 of
    transformers.

    Keys and values are views of a tensor that also holds the queries, so this whole tensor lives until the model
    returns. `arguments` are not used.
    """
    outputs = []
    for name, module in model.named_modules():
        if name.endswith(".c_attn"):
            # Gradients are on while a layer is recomputed in backward, which keeps no cache.
            module.register_forward_hook(
                lambda module, inputs, output: None if torch.is_grad_enabled() else outputs.append(output)
            )
    model.register_forward_hook(lambda *_: outputs.clear())
