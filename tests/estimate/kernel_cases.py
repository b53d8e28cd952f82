"""Operations whose memory has a rule of its own in `kernels`, and what torch 2.13's CUDA build was seen to ask its
allocator for (compute capability 8.0, rehearsed on 2026-11-22): bytes, negative where they are given back."""

import torch

aten = torch.ops.aten
F16, BF16, F32, I64, I32 = torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int32


def ordered(sizes):
    """Blocks that are given back one after the other by their sizes: it is all the same to an allocator."""
    found, freed = [], []
    for size in sizes:
        if size < 0:
            freed.append(size)
        else:
            found += [*sorted(freed), size]
            freed = []
    return found + sorted(freed)


def heads(dtype, count=4, length=200, size=64):
    return torch.zeros(2, count, length, size, dtype=dtype, device=place)


place = "cpu"  # where tensors are made: "cuda" in a rehearsal


def attention(name, dtype, groups=4, dropout=0.0):
    query, key, value = heads(dtype), heads(dtype, groups), heads(dtype, groups)
    if name == "flash":
        return lambda: aten._scaled_dot_product_flash_attention(query, key, value, dropout)
    return lambda: aten._scaled_dot_product_efficient_attention(query, key, value, None, True, dropout)


def flash_backward(groups=4):
    query, key, value = heads(BF16), heads(BF16, groups), heads(BF16, groups)
    out, logsumexp, first, second, longest, other, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        query, key, value
    )
    ours = (heads(BF16), query, key, value, out, logsumexp, first, second, longest, other, 0.0, False, seed, offset)
    return lambda: aten._scaled_dot_product_flash_attention_backward(*ours)


def efficient_backward(dtype):
    query, key, value = heads(dtype), heads(dtype), heads(dtype)
    out, logsumexp, seed, offset = aten._scaled_dot_product_efficient_attention(query, key, value, None, True)
    ours = (heads(dtype), query, key, value, None, out, logsumexp, seed, offset, 0.0, [True, True, True, False])
    return lambda: aten._scaled_dot_product_efficient_attention_backward(*ours)


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype, device=place)


def embedding_backward(count, weights, width):
    indices, gradient = zeros(count, dtype=I64), zeros(count, width)
    return lambda: aten.embedding_dense_backward(gradient, indices, weights, -1, False)


def put(count):
    tensor, index, values = zeros(512, 64), zeros(count, dtype=I64), zeros(count, 64)
    return lambda: aten._index_put_impl_(tensor, [index], values, True, True)


def summed(dims, *shape, dtype=F32, turn=None):
    tensor = zeros(*shape, dtype=dtype)
    tensor = tensor if turn is None else tensor.transpose(*turn)
    return lambda: tensor.sum(dims)


def norms():
    tensors = [zeros(size) for size in (10, 100_000, 300_000)]
    return lambda: aten._foreach_norm(tensors, 2)


def of_one(function, *shape, dtype=F32, **options):
    tensor = zeros(*shape, dtype=dtype)
    return lambda: function(tensor, **options)


def softmax_backward():
    gradient, output = zeros(4, 100, 64), zeros(4, 100, 64)
    return lambda: aten._softmax_backward_data(gradient, output, -1, F32)


def convolution_backward():
    gradient, image, weight = zeros(4, 14, 14, 768).permute(0, 3, 1, 2), zeros(4, 3, 224, 224), zeros(768, 3, 16, 16)
    rest = ([768], [16, 16], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
    return lambda: aten.convolution_backward(gradient, image, weight, *rest)


def group_norm_backward():
    gradient, image, mean, deviation, weight = zeros(2, 64, 100), zeros(2, 64, 100), zeros(2, 8), zeros(2, 8), zeros(64)
    rest = (2, 64, 100, 8, [True, True, True])
    return lambda: aten.native_group_norm_backward(gradient, image, mean, deviation, weight, *rest)


def index(dtype):
    tensor, positions = zeros(256), zeros(1000, dtype=dtype)
    return lambda: aten.index(tensor, [positions])


EMBEDDED = [24800, 24800, 24800, 55295, -55295, -24800]  # sorted
EMBEDDED += [256000, 24800, 8, 24800, 1279, -1279, -24800]  # the result, and which indices differ
EMBEDDED += [24800, 24800, 1279, -1279, 8, 27280, 109120, -109120, -27280, -8, -24800, -24800, -8, -24800, -24800]
EMBEDDED += [-24800]
FREED = [-204800, -204800, -524288, -8192, -204800, -204800]
CASES = {  # what is run, and what it asks for
    "flash": (lambda: attention("flash", BF16), [204800, 6400, 16, 8]),
    "flash with dropout": (lambda: attention("flash", BF16, dropout=0.1), [204800, 6400, 16, 8, 16, -16]),
    "flash, grouped": (lambda: attention("flash", BF16, groups=2), [204800, 6400, 16, 8]),
    "flash's backward": (
        flash_backward,
        [204800, 204800, 204800, 204800, 204800, 8192, 524288, -524288, -8192, -204800, -204800],
    ),
    "flash's backward, grouped": (
        lambda: flash_backward(2),
        [204800, 204800, 204800, 102400, 102400, 8192, 524288, 204800, 204800, *FREED],
    ),
    "efficient": (lambda: attention("efficient", F32), [409600, 7168]),
    "efficient's backward, fp32": (
        lambda: efficient_backward(F32),
        [409600, 409600, 409600, 409600, 409600, 6400, 6400, -6400, -409600, 524800, -6400, -524800, -409600],
    ),
    "efficient's backward, fp16": (
        lambda: efficient_backward(F16),
        [204800, 204800, 204800, 204800, 6400, 524800, -6400, -524800, -204800],
    ),
    "embedding's backward, few": (lambda: embedding_backward(3072, 8000, 8), [256000]),
    "embedding's backward, many": (lambda: embedding_backward(3100, 8000, 8), EMBEDDED),
    "values added by index, few": (
        lambda: put(1000),
        [8000, 8000, -8000, 8000, 8000, 8000, 1, -1, -8000, -8000, -8000, -8000],
    ),
    "values added by index, many": (
        lambda: put(4000),
        [32000, 32000, -32000, 32000, 32000, 32000, 70655, -70655, -32000, -32000, -32000, -32000],
    ),
    "sum of rows": (lambda: summed([0], 2048, 768), [3072, 12582912, 24, -24, -12582912]),
    "sum of rows, bf16": (lambda: summed([0], 2048, 768, dtype=BF16), [1536, 12582912, 24, -24, -12582912]),
    "sum of few rows": (lambda: summed([0], 777, 333), [1332]),
    "sum of columns": (lambda: summed([1], 4096, 50257), [16384]),
    "sum of long rows": (lambda: summed([1], 3, 1_000_000), [12, 1476, 12, -12, -1476]),
    "sum of all": (lambda: summed([0, 1], 2048, 30000), [4, 1876, 4, -4, -1876]),
    "sum of two dimensions": (lambda: summed([0, 1], 4, 512, 1024), [4096, 16777216, 32, -32, -16777216]),
    "sum of what is transposed": (
        lambda: summed([0, 1], 700, 300, 50, turn=(0, 1)),
        [200, 2764800, 8, -8, -2764800],
    ),
    "sum of booleans": (lambda: summed([0, 1], 4, 2048, dtype=torch.bool), [8, 65536, -65536]),
    "mean": (lambda: of_one(torch.mean, 2048, 768), [4, 768, 4, -4, -768]),
    "norm": (lambda: of_one(torch.linalg.vector_norm, 3_000_000), [4, 1468, 4, -4, -1468]),
    "norms": (norms, [60, 4, 4, 4, -60]),
    "running sum": (lambda: of_one(torch.cumsum, 4096, dtype=I64, dim=0), [32768, 1279, -1279]),
    "running sum of 32 bits": (
        lambda: of_one(torch.cumsum, 65536, dtype=I32, dim=0),
        [524288, 524288, 2303, -2303, -524288],
    ),
    "running sum of one row": (lambda: of_one(torch.cumsum, 1, 4096, dtype=I64, dim=-1), [32768, 1279, -1279]),
    "running sum of booleans": (lambda: of_one(torch.cumsum, 4, 256, dtype=torch.bool, dim=1), [8192, 8192, -8192]),
    "sort": (lambda: of_one(torch.sort, 8192, dtype=I64), [65536, 65536, 65536, 151039, -151039, -65536]),
    "softmax of rows that may be masked": (
        lambda: of_one(aten._safe_softmax, 2, 8, 200, 200, dim=-1),
        [2560000, 640000, 3200, 4, -4, -3200, -640000],
    ),
    "softmax's backward": (softmax_backward, [102400, 102400, -102400]),
    "convolution's backward": (convolution_backward, [2408448, 2359296, -2408448, 3072]),
    "group norm's backward": (
        group_norm_backward,
        [51200, 256, 256, 512, 512, 64, 64, 512, -64, -64, -512, -512, -512],
    ),
    "is it infinite": (lambda: of_one(torch.isinf, 1000), [4000, 1000, -4000]),
    "index of 32 bits": (lambda: index(I32), [8000, 4000, -8000]),
    "index": (lambda: index(I64), [4000]),
}
