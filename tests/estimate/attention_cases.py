"""Calls of scaled_dot_product_attention drawn at random, and the kernel that each release of torch selects for them.

`attention_choices.json` has a letter for each call, by release and compute capability, as torch's CUDA builds choose in
rehearsals: "c" cuDNN, "f" flash, "e" memory-efficient, "m" math, "-" if torch refuses the call. `python
tests/rehearsal/test_attention_rehearsed.py` writes the letters for the installed release.
"""

import contextlib
import random
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

COUNT = 1800
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))
LETTERS = {"cudnn": "c", "flash": "f", "efficient": "e", "math": "m"}
SIZES = (
    1,
    4,
    8,
    20,
    33,
    36,
    40,
    56,
    64,
    64,
    65,
    72,
    80,
    96,
    100,
    128,
    128,
    136,
    160,
    192,
    200,
    224,
    248,
    256,
    264,
    320,
)
MASKS = ("bool2", "bool3", "bool4", "bool1", "turned", "float4", "float2", "learned", "padded", "row")


@dataclass(frozen=True)
class Call:
    """One call of scaled_dot_product_attention: sizes and layout of its tensors, and its options."""

    dtype: str
    batch: tuple[int, int]  # of queries, and of keys and values
    heads: tuple[int, int, int]  # of queries, keys and values
    size: tuple[int, int, int]
    length: tuple[int, int]
    mask: str | None
    dropout: float
    causal: bool
    enable_gqa: bool
    learned: str  # which tensors need gradients: letters of "qkv"; "" for inference
    layout: str
    has_batch: bool

    def tensors(self, device: str):
        """Return query, key, value and mask on a device."""
        dtype = getattr(torch, self.dtype)
        lengths = self.length[0], self.length[1], self.length[1]
        batches = self.batch[0], self.batch[1], self.batch[1]
        found = []
        for name, *shape in zip("qkv", batches, self.heads, lengths, self.size, strict=True):
            tensor = _laid_out(self.layout, *shape, dtype=dtype, device=device)
            found.append((tensor if self.has_batch else tensor[0]).requires_grad_(name in self.learned))
        return *found, self._mask(dtype, device)

    def _mask(self, dtype, device):
        (rows, columns), (batch, _), (heads, *_) = self.length, self.batch, self.heads
        if self.mask is None:
            return None

        def zeros(*shape, dtype=torch.bool):
            return torch.zeros(shape, dtype=dtype, device=device)

        made = {
            "bool2": lambda: zeros(rows, columns),
            "bool3": lambda: zeros(heads, rows, columns),
            "bool4": lambda: zeros(batch, 1, rows, columns),
            "bool1": lambda: zeros(1, 1, rows, columns),
            "turned": lambda: zeros(batch, 1, columns, rows).transpose(2, 3),
            "float4": lambda: zeros(batch, heads, rows, columns, dtype=dtype),
            "float2": lambda: zeros(rows, columns, dtype=dtype),
            "learned": lambda: zeros(1, heads, rows, columns, dtype=dtype).requires_grad_(),
            "padded": lambda: zeros(batch, 1, rows, columns + 16 - columns % 16, dtype=dtype)[..., :columns],
            "row": lambda: zeros(batch, 1, 1, columns, dtype=dtype),
        }[self.mask]()
        return made if self.has_batch or made.dim() < 4 else made[0]

    def options(self) -> dict:
        return {"dropout_p": self.dropout, "is_causal": self.causal, "enable_gqa": self.enable_gqa}

    def gradients(self):
        """Return the context for the call: `no_grad`, or one without effect if a tensor requires a gradient."""
        return contextlib.nullcontext() if self.learned else torch.no_grad()


def _laid_out(layout: str, batch: int, heads: int, length: int, size: int, **options):
    if layout == "turned":
        return torch.zeros(batch, length, heads, size, **options).transpose(1, 2)
    if layout == "shifted":
        return torch.zeros(batch * heads * length * size + 1, **options)[1:].view(batch, heads, length, size)
    if layout == "every second":
        return torch.zeros(batch, heads, length, 2 * size, **options)[..., ::2]
    if layout == "sliced":
        whole = torch.zeros(batch, length, heads * size + 8, **options)[..., 8:]
        return whole.view(batch, length, heads, size).transpose(1, 2)
    return torch.zeros(batch, heads, length, size, **options)


def call(draw: random.Random) -> Call:
    batch, heads, size, length = draw.choice((1, 2, 3)), draw.choice((1, 2, 4, 6, 8)), draw.choice(SIZES), None
    length = draw.choice((1, 2, 7, 64, 100, 128, 200))
    keys = draw.choice((heads, heads, 1, 2, heads // 2 or 1, 3))
    values = keys if draw.random() < 0.93 else draw.choice((1, 2, heads))
    of_values = size if draw.random() < 0.8 else draw.choice((64, 128, size // 2 or 1, 192, 256, size + 8))
    mask = draw.choice(MASKS) if draw.random() < 0.6 else None
    return Call(
        dtype=draw.choice(("float32", "float16", "bfloat16")),
        batch=(batch, batch if draw.random() < 0.96 else 1),
        heads=(heads, keys, values),
        size=(size, size if draw.random() < 0.98 else size + 8, of_values),
        length=(length, length if draw.random() < 0.7 else draw.choice((1, 3, 64, 130, 200))),
        mask=mask,
        dropout=draw.choice((0.0, 0.0, 0.0, 0.1, 0.125, 0.25, 0.3)),
        causal=mask is None and draw.random() < 0.4,
        enable_gqa=draw.random() < 0.5,
        learned=draw.choice(("", "q", "k", "v", "qkv", "qkv", "qkv")),
        layout=draw.choice(("plain", "plain", "turned", "turned", "shifted", "every second", "sliced")),
        has_batch=draw.random() < 0.87,
    )


def calls(count: int = COUNT, seed: int = 0) -> list[Call]:
    draw = random.Random(seed)
    return [call(draw) for _ in range(count)]


class Seen(TorchDispatchMode):
    """Record in `kernel` which attention kernel runs, e.g. "flash"."""

    def __init__(self):
        super().__init__()
        self.kernel = "math"

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name.startswith("_scaled_dot_product_"):
            self.kernel = name.removeprefix("_scaled_dot_product_").partition("_")[0]
        return function(*args, **kwargs or {})


def chosen(one: Call) -> str:
    """Make the call `one` of scaled_dot_product_attention on "cuda", and return the letter of the kernel that torch
    selects.
    """
    query, key, value, mask = one.tensors("cuda")
    try:
        with Seen() as seen, one.gradients():
            functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **one.options())
    except (RuntimeError, ValueError):
        return "-"
    return LETTERS[seen.kernel]
