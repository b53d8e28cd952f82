"""linkedin/Liger-Kernel, benchmark/scripts: the sides that are plain torch or transformers, for published.py.

Each loop takes a task, which it ignores, and the sizes of a row of published.toml; it runs wherever the process runs,
be it measured, rehearsed or followed on fake tensors. What is rebuilt is what decides about memory: which tensors live
when. A layer runs forward and backward several times over; B, T, H, V are batch, tokens, hidden size and vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator

ROUNDS = 3  # the first makes gradients, the second adds to them, the third shows that nothing grows


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def made_in(dtype: str) -> Iterator[None]:
    """Modules made here are of that type, and on the device, at once: fake weights cannot be exchanged for others."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device()):
            yield
    finally:
        torch.set_default_dtype(before)


def _random(*shape: int, dtype: str = "float32", grad: bool = False):
    import torch

    return torch.randn(*shape, device=device(), dtype=getattr(torch, dtype), requires_grad=grad)


def _whole(below: int, *shape: int):
    import torch

    return torch.randint(below, shape, device=device())


def _linear(rows: int, columns: int, dtype: str = "bfloat16", bias: bool = False):
    import torch

    with made_in(dtype):
        return torch.nn.Linear(rows, columns, bias=bias)


def _losses(forward: Callable, keep: bool = False) -> None:
    """Forward and backward of a loss; `keep` the graph or not, as the benchmark does."""
    for _ in range(ROUNDS):
        loss = forward()
        loss.backward(retain_graph=keep)
        del loss


def _layers(forward: Callable, mode: str = "full", gradient=None) -> None:
    """Forward and backward of a layer, its graph kept.

    Args:
        mode: "full", "forward" alone, or "backward" alone, after one forward.
        gradient: of the result; None: made anew each time, in the shape of the result.
    """
    import torch

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


def cross_entropy(task, V: int, B: int, T: int) -> None:
    """Cross-entropy of fp32 logits."""
    from torch.nn.functional import cross_entropy

    logits, labels = _random(B * T, V, grad=True), _whole(V, B * T)
    _losses(lambda: cross_entropy(logits, labels))


def linear_cross_entropy(task, BT: int, H: int, V: int) -> None:
    """A linear head in bf16 and cross-entropy of its logits; a second head lies beside it, unused."""
    from torch.nn.functional import cross_entropy

    head, _spare = _linear(H, V), _linear(H, V)
    rows, labels = _random(BT, H, dtype="bfloat16", grad=True), _whole(V, BT)
    _losses(lambda: cross_entropy(head(rows), labels))


def _divergence(V: int, B: int, T: int, kinds: tuple[str, str], loss: Callable) -> None:
    """A loss of two fp32 distributions, each given as its `kind`: log_softmax or softmax."""
    found, target = _random(B * T, V, grad=True), _random(B * T, V)
    found, target = getattr(found, kinds[0])(-1), getattr(target, kinds[1])(-1)
    _losses(lambda: loss(found, target), keep=True)


def kl_div(task, V: int, B: int, T: int) -> None:
    """Kullback-Leibler divergence of fp32 log-probabilities."""
    import torch

    _divergence(V, B, T, ("log_softmax", "softmax"), torch.nn.KLDivLoss(reduction="batchmean"))


def _jsd(found, target, dtype: str = "float32"):
    """Jensen-Shannon divergence of log-probabilities, in fp32."""
    import torch

    found, target = found.float(), target.float()
    loss = torch.nn.KLDivLoss(reduction="batchmean", log_target=True)
    mean = torch.lerp(torch.exp(target), torch.exp(found), 0.5)
    return (0.5 * loss(torch.log(mean), target) + 0.5 * loss(torch.log(mean), found)).to(getattr(torch, dtype))


def jsd(task, V: int, B: int, T: int) -> None:
    """Jensen-Shannon divergence of fp32 log-probabilities."""
    _divergence(V, B, T, ("log_softmax", "log_softmax"), _jsd)


def tvd(task, V: int, B: int, T: int) -> None:
    """Total variation distance of fp32 probabilities."""
    import torch

    def distance(found, target):
        return torch.sum(torch.abs(found - target) / 2.0) / found.shape[0]

    _divergence(V, B, T, ("softmax", "softmax"), distance)


def linear_jsd(task, BT: int, H: int, V: int) -> None:
    """Two heads in bf16, a student's and a teacher's, both trained, and the divergence of their softmax."""
    import torch

    student, teacher, *spare = (_linear(H, V) for _ in range(4))
    for head in (student, teacher):  # the benchmark gives both sides the same new weights
        head.weight.data = torch.rand(V, H, device=device(), dtype=torch.bfloat16)
    del spare
    seen, taught = _random(BT, H, dtype="bfloat16", grad=True), _random(BT, H, dtype="bfloat16")

    def forward():
        found, target = student(seen), teacher(taught)
        found_log = torch.log_softmax(found / 1.0, dim=-1)
        target_log = torch.log_softmax(target / 1.0, dim=-1)
        return _jsd(found_log, target_log, "bfloat16")

    _losses(forward)


def preference(task, B: int, T: int, H: int, V: int) -> None:
    """A bf16 head, its logits in fp32, cross-entropy of the first half and log-probabilities of all: ORPO, CPO, SimPO.

    A second head lies beside it, unused.
    """
    import torch
    from torch.nn.functional import cross_entropy, logsigmoid

    head, _spare = _linear(H, V), _linear(H, V)
    rows, labels = _random(B, T, H, dtype="bfloat16", grad=True), _whole(V, B, T)

    def log_probabilities(logits):
        mask = labels != -100
        targets = torch.where(labels == -100, 0, labels)
        each = torch.gather(logits.log_softmax(-1), dim=2, index=targets.unsqueeze(2)).squeeze(2)
        return (each * mask).sum(-1) / mask.sum(-1)

    def forward():
        halves = rows @ head.weight.t()
        logits = halves.float()
        loss = cross_entropy(logits[: B // 2].view(-1, V), labels[: B // 2].view(-1))
        every = log_probabilities(logits)
        return loss - (0.1 * logsigmoid(every[: B // 2] - every[B // 2 :])).mean()

    _losses(forward)


# ---- layers


def embedding(task, V: int, B: int, T: int, D: int) -> None:
    """An fp32 embedding; a second one lies beside it, unused."""
    import torch

    with made_in("float32"):
        table, _spare = (torch.nn.Embedding(V, D) for _ in range(2))
    ids = _whole(V, B, T)
    _layers(lambda: table(ids))


def gated_mlp(task, B: int, T: int, H: int, inner: int, activation: str, mode: str = "full", tiles: int = 0) -> None:
    """transformers' LlamaMLP in bf16. `tiles`: in as many pieces, each computed again in the backward; 0: at once."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    with made_in("bfloat16"):
        layer = LlamaMLP(LlamaConfig(hidden_size=H, intermediate_size=inner, hidden_act=activation))
    rows = _random(B, T, H, dtype="bfloat16", grad=True)
    if mode == "forward":  # the benchmark's process has run backwards before: autograd's thread has its workspace
        (_linear(8, 8)(_random(8, 8, dtype="bfloat16"))).sum().backward()
    run = _tiled() if tiles else None
    _layers(lambda: run.apply(rows, layer, tiles) if run else layer(rows), mode)


def _tiled():
    """The autograd function of DeepSpeed's TiledMLP: the forward keeps its input alone."""
    import torch

    class Tiled(torch.autograd.Function):
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

    return Tiled


def _normed(make: Callable, *shape: int, dtype: str = "float32") -> None:
    """A norm with fp32 weights; a second one lies beside it, unused."""
    with made_in("float32"):
        layer, _spare = make(), make()
    rows, gradient = _random(*shape, dtype=dtype, grad=True), _random(*shape, dtype=dtype)
    _layers(lambda: layer(rows), gradient=gradient)


def layer_norm(task, M: int, N: int) -> None:
    """fp32 LayerNorm of (M, N)."""
    import torch

    _normed(lambda: torch.nn.LayerNorm(N, eps=1e-6), M, N)


def group_norm(task, M: int, C: int, H: int, each: int) -> None:
    """fp32 GroupNorm of (M, C, H) with `each` channels a group."""
    import torch

    _normed(lambda: torch.nn.GroupNorm(C // each, C, eps=1e-6), M, C, H)


def rms_norm(task, M: int, H: int) -> None:
    """LlamaRMSNorm of (M, H) in bf16 with fp32 weights."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    _normed(lambda: LlamaRMSNorm(H), M, H, dtype="bfloat16")


def add_rms_norm(task, M: int, H: int) -> None:
    """A residual added in fp32 and its RMSNorm, both results with a gradient; three more weights lie beside it."""
    import torch

    weight, *_spare = (torch.nn.Parameter(_random(H)) for _ in range(4))
    rows, residual = _random(M, H, grad=True), _random(M, H, grad=True)
    gradients = _random(M, H), _random(M, H)

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


def rope(task, T: int, H: int, heads: int, key_heads: int) -> None:
    """transformers' rotary positions of bf16 queries and keys, with gradients by torch.autograd.grad."""
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    size = H // heads
    queries = _random(1, T, heads, size, dtype="bfloat16", grad=True).transpose(1, 2)
    keys = _random(1, T, key_heads, size, dtype="bfloat16", grad=True).transpose(1, 2)
    gradients = torch.randn_like(queries), torch.randn_like(keys)
    frequencies, positions = _random(size // 2), _whole(T, 1, T)

    # A product of matrices: of batches of one, torch 2.13 leaves outer products to Triton, which 2024 did not.
    angles = (positions.float().t() @ frequencies[None, :])[None]
    angles = torch.cat((angles, angles), dim=-1)
    cosine, sine = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    del angles
    for _ in range(ROUNDS):
        turned = apply_rotary_pos_emb(queries, keys, cosine, sine)
        torch.autograd.grad(turned, (queries, keys), gradients, retain_graph=True)
        del turned


def neighborhood_attention(task, B: int, T: int, H: int, heads: int) -> None:
    """fp32 attention by matrix products under a mask made in each forward; a second layer's weights lie beside it."""
    import torch

    layers = [[_linear(H, H, "float32", bias=True) for _ in range(4)] for _ in range(2)]
    query_of, key_of, value_of, out_of = layers[0]
    rows, gradient = _random(B, T, H, grad=True), _random(B, T, H)

    def forward(rows):
        size = H // heads
        query, key, value = query_of(rows), key_of(rows), value_of(rows)
        query = query.view(B, T, heads, size).transpose(1, 2)
        key = key.view(B, T, heads, size).transpose(1, 2)
        value = value.view(B, T, heads, size).transpose(1, 2)
        scores = torch.matmul(query, key.transpose(-2, -1)) * size**-0.5
        mask = torch.zeros(T, T, dtype=torch.bool, device=rows.device)
        scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        found = torch.matmul(weights, value)
        found = found.transpose(1, 2).contiguous().view(B, T, H)
        return out_of(found)

    _layers(lambda: forward(rows), gradient=gradient)


def swiglu(task, T: int, B: int, inner: int) -> None:
    """SiLU of one half of a bf16 tensor times the other half, its sum, and the backward; gradients are forgotten."""
    import torch

    both = _random(T, B, 2 * inner, dtype="bfloat16", grad=True)

    def halves(both):
        first, second = torch.chunk(both, 2, -1)
        return torch.nn.functional.silu(first) * second

    for _ in range(ROUNDS):
        both.grad = None
        made = halves(both)
        made.sum().backward()
        del made
