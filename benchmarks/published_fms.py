"""foundation-model-stack/fms-acceleration: what its trainings did otherwise than today's libraries, for published.py.

A row of published.toml names the changes that its set-up needs. Each is made to the model, between its construction and
the Trainer's first step; one that brings an optimizer returns it. Rules of older versions are among them, each with the
version that ended it.
"""

import torch
from torch.nn import functional

# ---- adapters


def lora(model, arguments) -> None:
    """PEFT's LoRA, rank 16, dropout 0.1, on the projections of attention; adapters in fp32 whatever the weights are.

    As peft 0.13 (`autocast_adapter_dtype`): weights frozen, the adapter's input cast to fp32, its result added to the
    layer's; the embedding's result requires a gradient, so that checkpoints have one.
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
    """Cross-entropy of logits whose last position was cut off by a copy."""
    ahead = logits[..., :-1, :].contiguous()
    after = labels[..., 1:].contiguous()
    return functional.cross_entropy(ahead.view(-1, vocabulary), after.view(-1))


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
    kept = []
    for name, module in model.named_modules():
        if name.endswith(".c_attn"):
            # Gradients are on where a layer is computed again in the backward, which keeps nothing.
            module.register_forward_hook(
                lambda module, inputs, output: None if torch.is_grad_enabled() else kept.append(output)
            )
    model.register_forward_hook(lambda *_: kept.clear())
