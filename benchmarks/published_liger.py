"""linkedin/Liger-Kernel, benchmark/scripts: the implementations in plain torch or transformers, for published.py.

Each loop takes the sizes of a row of published.toml, and makes its tensors on the device that published.py chose, so
that the loop can be measured, rehearsed or traced. The loops rebuild all that determines memory: when each tensor is
allocated and freed. A layer runs forward and backward several times; B, T, H, V are batch, tokens, hidden size and
vocabulary. Some loops allocate modules that they do not run, because Liger's scripts also allocate the modules of
Liger's own implementation.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional

ROUNDS = 3  # the first makes gradients, the second adds to them, the third checks that nothing grows
BF16 = {"dtype": torch.bfloat16}
GRADIENT = {"requires_grad": True}


@contextlib.contextmanager
def made_in(dtype: torch.dtype) -> Iterator[None]:
    """Create modules with weights of the type `dtype` while this context is open.

    This is needed with fake tensors, because a module made of them cannot be converted later.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _head(H: int, V: int) -> nn.Linear:
    """Return the linear head from hidden states (width H) to logits (V words), in bf16."""
    return nn.Linear(H, V, bias=False, **BF16)


def _losses(forward: Callable, keep: bool = False) -> None:
    """Run forward and backward of a loss several times.

    `forward`: returns the loss; `keep`: keep autograd's graph after backward, as Liger's benchmark does.
    """
    for _ in range(ROUNDS):
        loss = forward()
        loss.backward(retain_graph=keep)
        del loss


def _layers(forward: Callable, mode: str = "full", gradient=None) -> None:
    """Run forward and backward of a layer several times and keep its graph.

    Args:
        forward: returns the layer's result.
        mode: "full", "forward" only, or "backward" only, after one forward.
        gradient: gradient of the result; None: a new one each time, in the shape of the result.
    """
    if mode == "backward":
        made = forward()
        gradient = torch.randn_like(made)
        for _ in range(ROUNDS):
            made.backward(gradient, retain_graph=True)
        return
    for _ in range(ROUNDS):
        made = forward()
        if mode == "full":
            made.backward(torch.randn_like(made) if gradient is None else gradient, retain_graph=True)
        del made


# ---- losses


def cross_entropy(V: int, B: int, T: int) -> None:
    """Run the cross-entropy of fp32 logits of shape (B T, V), for B samples, T tokens and V words."""
    logits, labels = torch.randn(B * T, V, **GRADIENT), torch.randint(V, (B * T,))
    _losses(lambda: functional.cross_entropy(logits, labels))


def linear_cross_entropy(BT: int, H: int, V: int) -> None:
    """Run a linear head in bf16 and the cross-entropy of its logits; a second head is allocated but not run.

    `BT`, `H`, `V`: tokens of the whole batch, hidden size, words.
    """
    head, _spare = _head(H, V), _head(H, V)
    rows, labels = torch.randn(BT, H, **BF16, **GRADIENT), torch.randint(V, (BT,))
    _losses(lambda: functional.cross_entropy(head(rows), labels))


def _divergence(V: int, B: int, T: int, found_as: Callable, target_as: Callable, loss: Callable) -> None:
    """Run a loss of two fp32 distributions of shape (B T, V): the softmax or log-softmax of random numbers.

    Args:
        V, B, T: words, samples, tokens per sample.
        found_as, target_as: the softmax or log-softmax of each distribution.
        loss: function of both distributions.
    """
    found, target = torch.randn(B * T, V, **GRADIENT), torch.randn(B * T, V)
    found, target = found_as(found, -1), target_as(target, -1)
    _losses(lambda: loss(found, target), keep=True)


def kl_div(V: int, B: int, T: int) -> None:
    """Run the Kullback-Leibler divergence of fp32 log-probabilities of shape (B T, V): B samples, T tokens, V words."""
    _divergence(V, B, T, torch.log_softmax, torch.softmax, nn.KLDivLoss(reduction="batchmean"))


def _jsd(found, target):
    """Return the Jensen-Shannon divergence of two tensors of log-probabilities, `found` and `target`, in fp32."""
    found, target = found.float(), target.float()
    loss = nn.KLDivLoss(reduction="batchmean", log_target=True)
    mean = torch.lerp(torch.exp(target), torch.exp(found), 0.5)
    return 0.5 * loss(torch.log(mean), target) + 0.5 * loss(torch.log(mean), found)


def jsd(V: int, B: int, T: int) -> None:
    """Run the Jensen-Shannon divergence of fp32 log-probabilities of shape (B T, V): B samples, T tokens, V words."""
    _divergence(V, B, T, torch.log_softmax, torch.log_softmax, _jsd)


def tvd(V: int, B: int, T: int) -> None:
    """Run the total variation distance of fp32 probabilities of shape (B T, V): B samples, T tokens, V words."""

    def distance(found, target):
        return torch.sum(torch.abs(found - target) / 2.0) / found.shape[0]

    _divergence(V, B, T, torch.softmax, torch.softmax, distance)


def linear_jsd(BT: int, H: int, V: int) -> None:
    """Run two bf16 heads, a student's and a teacher's, and the Jensen-Shannon divergence of their softmax; train both.

    `BT`, `H`, `V`: tokens of the whole batch, hidden size, words.
    """
    student, teacher, *spare = (_head(H, V) for _ in range(4))
    for head in (student, teacher):  # the benchmark gives both sides the same new weights
        head.weight.data = torch.rand(V, H, **BF16)
    del spare
    seen, taught = torch.randn(BT, H, **BF16, **GRADIENT), torch.randn(BT, H, **BF16)

    def forward():
        found, target = student(seen), teacher(taught)
        found_log = torch.log_softmax(found / 1.0, dim=-1)
        target_log = torch.log_softmax(target / 1.0, dim=-1)
        return _jsd(found_log, target_log).to(torch.bfloat16)

    _losses(forward)


def preference(B: int, T: int, H: int, V: int) -> None:
    """Run what ORPO, CPO and SimPO compute: a bf16 head over B answers, of which the first half are the preferred ones.

    The logits are cast to fp32. The loss is the cross-entropy of the preferred half, minus a term that depends on how
    much the mean log-probability of each preferred answer exceeds that of its rejected answer. A second head is
    allocated but not run.

    `T`, `H`, `V`: tokens per answer, hidden size, words.
    """
    head, _spare = _head(H, V), _head(H, V)
    rows, labels = torch.randn(B, T, H, **BF16, **GRADIENT), torch.randint(V, (B, T))

    def log_probabilities(logits):
        mask = labels != -100
        targets = torch.where(labels == -100, 0, labels)
        each = torch.gather(logits.log_softmax(-1), dim=2, index=targets.unsqueeze(2)).squeeze(2)
        return (each * mask).sum(-1) / mask.sum(-1)

    def forward():
        halves = rows @ head.weight.t()
        logits = halves.float()
        loss = functional.cross_entropy(logits[: B // 2].view(-1, V), labels[: B // 2].view(-1))
        every = log_probabilities(logits)
        return loss - (0.1 * functional.logsigmoid(every[: B // 2] - every[B // 2 :])).mean()

    _losses(forward)


# ---- layers


def embedding(V: int, B: int, T: int, D: int) -> None:
    """Run an fp32 embedding of V words and width D on (B, T) tokens; a second embedding is allocated but not run."""
    table, _spare = nn.Embedding(V, D), nn.Embedding(V, D)
    ids = torch.randint(V, (B, T))
    _layers(lambda: table(ids))


def gated_mlp(B: int, T: int, H: int, inner: int, activation: str, mode: str = "full", tiles: int = 0) -> None:
    """Run transformers' LlamaMLP of width H and inner width `inner` in bf16, on an input of shape (B, T, H).

    Args:
        activation: name of the activation function in transformers.
        mode: "full", "forward" only, or "backward" only, after one forward.
        tiles: number of pieces that are recomputed in backward; 0: the layer runs in one piece.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    with made_in(torch.bfloat16):
        layer = LlamaMLP(LlamaConfig(hidden_size=H, intermediate_size=inner, hidden_act=activation))
    rows = torch.randn(B, T, H, **BF16, **GRADIENT)
    if mode == "forward":  # the benchmark ran a backward pass before, so autograd's thread has its workspace
        _head(8, 8)(torch.randn(8, 8, **BF16)).sum().backward()
    _layers(lambda: Tiled.apply(rows, layer, tiles) if tiles else layer(rows), mode)


class Tiled(torch.autograd.Function):
    """DeepSpeed's TiledMLP: forward keeps only the layer's input, and backward runs the layer again, tile by tile."""

    @staticmethod
    def forward(context, rows, layer, tiles):
        context.layer, context.tiles = layer, tiles
        context.save_for_backward(rows)
        with torch.no_grad():
            return torch.cat([layer(each) for each in torch.chunk(rows, tiles, dim=-2)], dim=-2)

    @staticmethod
    def backward(context, gradient):
        (rows,) = context.saved_tensors
        flat = rows.detach().view(-1, rows.shape[-1])
        given, made = gradient.view(-1, rows.shape[-1]), torch.zeros_like(flat)
        first = 0
        for each in torch.chunk(flat, context.tiles, dim=0):
            size = each.shape[0]
            each.requires_grad_(True)
            each.grad = made.narrow(0, first, size).view_as(each)
            with torch.enable_grad():
                result = context.layer(each)
            torch.autograd.backward(result, given.narrow(0, first, size).view_as(each))
            first += size
        return made.view(rows.shape), None, None


def _normed(make: Callable, *shape: int, **options) -> None:
    """Run a norm with fp32 weights on a random input; a second norm is allocated but not run.

    Args:
        make: returns the norm.
        shape, options: shape of the input, and further arguments of `torch.randn`, e.g. its dtype.
    """
    layer, _spare = make(), make()
    rows, gradient = torch.randn(shape, **options, **GRADIENT), torch.randn(shape, **options)
    _layers(lambda: layer(rows), gradient=gradient)


def layer_norm(M: int, N: int) -> None:
    """Run an fp32 LayerNorm on an input of shape (M, N)."""
    _normed(lambda: nn.LayerNorm(N, eps=1e-6), M, N)


def group_norm(M: int, C: int, H: int, each: int) -> None:
    """Run an fp32 GroupNorm on an input of shape (M, C, H) with `each` channels per group."""
    _normed(lambda: nn.GroupNorm(C // each, C, eps=1e-6), M, C, H)


def rms_norm(M: int, H: int) -> None:
    """Run a LlamaRMSNorm with fp32 weights on a bf16 input of shape (M, H)."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    _normed(lambda: LlamaRMSNorm(H), M, H, **BF16)


def add_rms_norm(M: int, H: int) -> None:
    """Add two fp32 tensors of shape (M, H) and run an RMSNorm on the sum; both results get a gradient.

    Three more weights are allocated but not used.
    """
    weight, *_spare = (nn.Parameter(torch.randn(H)) for _ in range(4))
    rows, residual = torch.randn(M, H, **GRADIENT), torch.randn(M, H, **GRADIENT)
    gradients = torch.randn(M, H), torch.randn(M, H)

    def forward(states, residual):
        states = states.to(torch.float32)
        residual = residual.to(torch.float32)
        states = states + residual
        residual = states
        variance = states.pow(2).mean(-1, keepdim=True)
        states = states * torch.rsqrt(variance + 1e-6)
        return weight * states.to(torch.float32), residual.to(torch.float32)

    for _ in range(ROUNDS):
        made = forward(rows, residual)
        torch.autograd.backward(made, gradients)
        del made


def rope(T: int, H: int, heads: int, key_heads: int) -> None:
    """Run transformers' rotary position embedding on bf16 queries and keys; torch.autograd.grad returns the gradients.

    Args:
        T, H: tokens, and the width of all query heads together.
        heads, key_heads: numbers of heads of queries and of keys.
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    size = H // heads
    queries = torch.randn(1, T, heads, size, **BF16, **GRADIENT).transpose(1, 2)
    keys = torch.randn(1, T, key_heads, size, **BF16, **GRADIENT).transpose(1, 2)
    gradients = torch.randn_like(queries), torch.randn_like(keys)
    frequencies, positions = torch.randn(size // 2), torch.randint(T, (1, T))

    # A matmul: for batches of one, torch 2.13 uses Triton for outer products, torch of 2024 did not.
    angles = (positions.float().t() @ frequencies[None, :])[None]
    angles = torch.cat((angles, angles), dim=-1)
    cosine, sine = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    del angles
    for _ in range(ROUNDS):
        turned = apply_rotary_pos_emb(queries, keys, cosine, sine)
        torch.autograd.grad(turned, (queries, keys), gradients, retain_graph=True)
        del turned


def neighborhood_attention(B: int, T: int, H: int, heads: int) -> None:
    """Run fp32 attention with `heads` heads by matmuls on an input of shape (B, T, H), with a mask made in each forward
    pass; a second layer is allocated but not run.
    """
    query_of, key_of, value_of, out_of, *_spare = (nn.Linear(H, H) for _ in range(8))
    rows, gradient = torch.randn(B, T, H, **GRADIENT), torch.randn(B, T, H)

    def forward():
        size = H // heads
        query, key, value = query_of(rows), key_of(rows), value_of(rows)
        query = query.view(B, T, heads, size).transpose(1, 2)
        key = key.view(B, T, heads, size).transpose(1, 2)
        value = value.view(B, T, heads, size).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(-2, -1)) * size**-0.5
        mask = torch.zeros(T, T, dtype=torch.bool)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        found = torch.matmul(weights, value)
        found = found.transpose(1, 2).contiguous().view(B, T, H)
        return out_of(found)

    _layers(forward, gradient=gradient)


def swiglu(T: int, B: int, inner: int) -> None:
    """Multiply SiLU of one half of a bf16 tensor (T, B, 2 x inner) by the other half, sum the product, run backward.

    Gradients are dropped before each run.
    """
    both = torch.randn(T, B, 2 * inner, **BF16, **GRADIENT)

    def halves():
        first, second = torch.chunk(both, 2, -1)
        return functional.silu(first) * second

    for _ in range(ROUNDS):
        both.grad = None
        made = halves()
        made.sum().backward()
        del made
