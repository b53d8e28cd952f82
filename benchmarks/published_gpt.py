"""Trainings rebuilt as described in rasbt/LLMs-from-scratch, chapter 5, and pytorch's issue 95668, for published.py.

Each function takes the sizes of a row of published.toml, as in published_liger.py.
"""

import torch
from published_liger import made_in
from torch import nn


def one_linear() -> None:
    """Run a linear layer with one weight on one number, without a backward pass."""
    layer = nn.Linear(1, 1)
    layer(torch.randn(1, 1))


def gpt(
    batch: int = 8,
    mask: str = "kept",
    fused: bool = False,
    dtype: str = "float32",
    native: bool = False,
    flash: bool = False,
) -> None:
    """Train a GPT of 124M parameters with AdamW on 1024 tokens, as in chapter 5 of LLMs-from-scratch.

    There are two steps, an evaluation after each, and some generated tokens.

    Args:
        batch: samples per step.
        mask: "kept": each layer stores the causal mask in fp32; "made": each forward pass makes it.
        fused: use AdamW's fused form, otherwise its foreach form.
        dtype: type of the weights.
        native: use torch's LayerNorm and GELU, otherwise plain operations.
        flash: use torch's attention and one matmul for q, k and v; otherwise plain attention and three matmuls.
    """
    words, length, width, heads, layers, dropped = 50257, 1024, 768, 12, 12, 0.1

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

        def forward(self, rows):
            mean = rows.mean(dim=-1, keepdim=True)
            variance = rows.var(dim=-1, keepdim=True, unbiased=False)
            normed = (rows - mean) / torch.sqrt(variance + 1e-5)
            return self.scale * normed + self.shift

    class Gelu(nn.Module):
        def forward(self, rows):
            root = torch.sqrt(torch.tensor(2.0 / torch.pi, device="cpu"))
            return 0.5 * rows * (1 + torch.tanh(root * (rows + 0.044715 * torch.pow(rows, 3))))

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.out, self.dropout = nn.Linear(width, width), nn.Dropout(dropped)
            if mask == "kept":
                self.register_buffer("mask", torch.triu(torch.ones(length, length), diagonal=1))

        def forward(self, rows):
            size, count, _ = rows.shape
            parts = self.key(rows), self.value(rows), self.query(rows)
            keys, values, queries = (part.view(size, count, heads, -1).transpose(1, 2) for part in parts)
            scores = queries @ keys.transpose(2, 3)
            if mask == "kept":
                hidden = self.mask.bool()[:count, :count]
            else:
                hidden = torch.triu(torch.ones(count, count, dtype=torch.bool), diagonal=1)
            scores.masked_fill_(hidden, -torch.inf)
            shares = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
            shares = self.dropout(shares)
            found = (shares @ values).transpose(1, 2)
            return self.out(found.reshape(size, count, width))

    class Flash(nn.Module):
        def __init__(self):
            super().__init__()
            self.all, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

        def forward(self, rows):
            size, count, _ = rows.shape
            every = self.all(rows)
            every = every.view(size, count, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            queries, keys, values = every
            found = nn.functional.scaled_dot_product_attention(
                queries, keys, values, dropout_p=dropped if self.training else 0.0, is_causal=True
            )
            found = found.transpose(1, 2).contiguous().view(size, count, width)
            return self.out(found)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Flash() if flash else Attention()
            inner = nn.GELU(approximate="tanh") if native else Gelu()
            self.feed = nn.Sequential(nn.Linear(width, 4 * width), inner, nn.Linear(4 * width, width))
            self.norms = nn.ModuleList(nn.LayerNorm(width) if native else Norm() for _ in range(2))
            self.dropout = nn.Dropout(dropped)

        def forward(self, rows):
            for norm, part in zip(self.norms, (self.attention, self.feed), strict=True):
                rows = rows + self.dropout(part(norm(rows)))
            return rows

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
            self.dropout, self.blocks = nn.Dropout(dropped), nn.Sequential(*(Block() for _ in range(layers)))
            self.norm = nn.LayerNorm(width) if native else Norm()
            self.head = nn.Linear(width, words, bias=False)

        def forward(self, ids):
            found, places = self.words(ids), self.places(torch.arange(ids.shape[1]))
            rows = self.dropout(found + places)
            rows = self.blocks(rows)
            rows = self.norm(rows)
            return self.head(rows)

    def loss_of():
        ids = torch.randint(words, (batch, length))
        after = torch.randint(words, (batch, length))
        logits = model(ids)
        return nn.functional.cross_entropy(logits.flatten(0, 1), after.flatten())

    with made_in(getattr(torch, dtype)):
        model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=fused or None)
    for _ in range(2):
        model.train()
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                loss_of()
    ids = torch.randint(words, (1, 4))
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat((ids, torch.zeros_like(model(ids)[:, -1:, 0], dtype=ids.dtype)), dim=1)
