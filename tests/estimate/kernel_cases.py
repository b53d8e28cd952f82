"""Operations whose memory has a rule of its own in `kernels`.

`kernels.json` has the requests of each operation to the allocator of torch's CUDA builds, at compute capability 8.0
(rehearsed): the bytes of a block, or ~n if the n-th block is freed. They are listed under the first torch release with
these requests. `python tests/rehearsal/test_kernels_rehearsed.py` runs the operations under the installed release, and
adds the requests that differ from those of the release before.
"""

import functools
import itertools
import random

import torch

aten = torch.ops.aten
F16, BF16, F32, I64, I32 = torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int32


def ordered(events):
    """Return events with consecutive frees sorted by the numbers of the freed blocks.

    Their order makes no difference to an allocator.

    `events`: bytes for each allocation, ~n for each free of the n-th allocated block.
    """
    found, freed = [], []
    for event in [*events, 0]:
        if event < 0:
            freed.append(event)
        else:
            found += [*sorted(freed, reverse=True), event]
            freed = []
    return found[:-1]


def events(changes):
    """Return a list of events: bytes for each allocation, ~n for each free of the n-th allocated block.

    Frees of blocks that were allocated before the first event are left out.

    `changes`: (block, bytes) of each event; the bytes of a free are negative.
    """
    numbers, found, counter = {}, [], itertools.count()
    for which, size in changes:
        if size > 0:
            numbers[which] = next(counter)
            found.append(size)
        elif which in numbers:
            found.append(~numbers.pop(which))
    return ordered(found)


def heads(dtype, count=4, length=200, size=64):
    return torch.zeros(2, count, length, size, dtype=dtype, device=place)


place = "cpu"  # where tensors are made: "cuda" in a rehearsal


def attention(name, dtype, groups=4, dropout=0.0, size=64, lengths=(200, 200)):
    queries, keys = lengths
    query, key, value = heads(dtype, 4, queries, size), *(heads(dtype, groups, keys, size) for _ in range(2))
    if name == "flash":
        return lambda: aten._scaled_dot_product_flash_attention(query, key, value, dropout)
    return lambda: aten._scaled_dot_product_efficient_attention(query, key, value, None, True, dropout)


def flash_backward(groups=4, size=64):
    query, key, value = (heads(BF16, count, size=size) for count in (4, groups, groups))
    out, logsumexp, first, second, longest, other, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        query, key, value
    )
    rest = (query, key, value, out, logsumexp, first, second, longest, other, 0.0, False, seed, offset)
    arguments = (heads(BF16, size=size), *rest)
    return lambda: aten._scaled_dot_product_flash_attention_backward(*arguments)


def efficient_backward(dtype, size=64, groups=4, dropout=0.0):
    query, key, value = (heads(dtype, count, size=size) for count in (4, groups, groups))
    out, logsumexp, seed, offset = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, dropout)
    gradient = heads(dtype, size=size)
    arguments = (gradient, query, key, value, None, out, logsumexp, seed, offset, dropout, [True, True, True, False])
    return lambda: aten._scaled_dot_product_efficient_attention_backward(*arguments)


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype, device=place)


def embedding_backward(count, weights, width, dtype=F32):
    indices, gradient = zeros(count, dtype=I64), zeros(count, width, dtype=dtype)
    return lambda: aten.embedding_dense_backward(gradient, indices, weights, -1, False)


def put(count):
    tensor, index, values = zeros(512, 64), zeros(count, dtype=I64), zeros(count, 64)
    return lambda: aten._index_put_impl_(tensor, [index], values, True, True)


def summed(dims, *shape, dtype=F32, turn=None):
    tensor = zeros(*shape, dtype=dtype)
    tensor = tensor if turn is None else tensor.transpose(*turn)
    return lambda: tensor.sum(dims)


def norms(*sizes):
    tensors = [zeros(size) for size in sizes]
    return lambda: aten._foreach_norm(tensors, 2)


def matmul(function, *shapes, dtype=F32, **options):
    tensors = [zeros(*shape, dtype=dtype) for shape in shapes]
    return lambda: function(*tensors, **options)


def of_one(function, *shape, dtype=F32, **options):
    tensor = zeros(*shape, dtype=dtype)
    return lambda: function(tensor, **options)


def softmax_backward():
    gradient, output = zeros(4, 100, 64), zeros(4, 100, 64)
    return lambda: aten._softmax_backward_data(gradient, output, -1, F32)


def images(order, count=4, dtype=F32):
    """Return a tensor of zeros of shape (count, 32, 28, 28) and type `dtype`: images of 32 channels.

    `order`: its memory format, e.g. "channels_last", or "turned" for strides of no standard format.
    """
    if order == "turned":
        return zeros(count, 28, 32, 28, dtype=dtype).transpose(1, 2)
    return zeros(count, 32, 28, 28, dtype=dtype).contiguous(memory_format=getattr(torch, order))


def convolution(order, groups=1, side=3, dtype=F32):
    tensor, weight = images(order, dtype=dtype), zeros(32, 32 // groups, side, side, dtype=dtype)
    rest = (zeros(32, dtype=dtype), [1, 1], [side // 2] * 2, [1, 1], False, [0, 0], groups)
    return lambda: aten.convolution(tensor, weight, *rest)


def convolution_backward(order, groups=1, side=3, dtype=F32, gradient="contiguous_format"):
    gradient, tensor = images(gradient, dtype=dtype), images(order, dtype=dtype)
    weight = zeros(32, 32 // groups, side, side, dtype=dtype)
    rest = ([32], [1, 1], [side // 2] * 2, [1, 1], False, [0, 0], groups, [True, True, True])
    return lambda: aten.convolution_backward(gradient, tensor, weight, *rest)


def patches_backward():
    gradient, image, weight = zeros(4, 14, 14, 768).permute(0, 3, 1, 2), zeros(4, 3, 224, 224), zeros(768, 3, 16, 16)
    rest = ([768], [16, 16], [0, 0], [1, 1], False, [0, 0], 1, [False, True, True])
    return lambda: aten.convolution_backward(gradient, image, weight, *rest)


def turned(function, *shape, dtype=F32, **options):
    """Return a function without arguments that calls `function` on a tensor of zeros whose first two dimensions were
    swapped.

    Args:
        function: called with the tensor and `options`.
        shape: shape of the tensor before the swap.
        dtype: type of the tensor.
    """
    tensor = zeros(*shape, dtype=dtype).transpose(0, 1)
    return lambda: function(tensor, **options)


def layer_norm(tensor, gradient=None):
    width = tensor.shape[-1]
    weight = zeros(width)
    if gradient is None:
        return lambda: aten.native_layer_norm(tensor, [width], weight, weight, 1e-5)
    mean, deviation = (zeros(*tensor.shape[:-1], 1) for _ in range(2))
    rest = ([width], mean, deviation, weight, weight, [True, True, True])
    return lambda: aten.native_layer_norm_backward(gradient, tensor, *rest)


def group_norm(dtype=F32):
    tensor, weight = images("contiguous_format", 2, dtype), zeros(32, dtype=dtype)
    return lambda: aten.native_group_norm(tensor, weight, weight, 2, 32, 784, 8, 1e-5)


def batch_norm(rows, trains=True):
    tensor, weight = zeros(rows, 64), zeros(64)
    return lambda: aten.native_batch_norm(tensor, weight, weight, weight, weight, trains, 0.1, 1e-5)


def batch_norm_backward():
    gradient, tensor, weight = zeros(3000, 64), zeros(3000, 64), zeros(64)
    rest = (weight, weight, weight, weight, weight, True, 1e-5, [True, True, True])
    return lambda: aten.native_batch_norm_backward(gradient, tensor, *rest)


def image_norm(trains):
    """Return a batch norm of images in channels last and bfloat16, which torch's own kernel computes."""
    tensor, weight = images("channels_last", dtype=BF16), zeros(32)
    return lambda: aten.native_batch_norm(tensor, weight, weight, weight, weight, trains, 0.1, 1e-5)


def image_norm_backward(trains, *wanted):
    gradient, tensor, weight = images("channels_last", dtype=BF16), images("channels_last", dtype=BF16), zeros(32)
    rest = (weight, weight, weight, weight, weight, trains, 1e-5, list(wanted))
    return lambda: [*filter(torch.is_tensor, aten.native_batch_norm_backward(gradient, tensor, *rest))]


def distances_backward(p=1.0):
    first, second, distances = zeros(3, 40, 64), zeros(3, 50, 64), zeros(3, 40, 50)
    return lambda: aten._cdist_backward(distances, first, second, p, distances)


def scattered_means():
    tensor, index, source = zeros(100, 64), zeros(800, 64, dtype=I64), zeros(800, 64)
    return lambda: tensor.scatter_reduce(0, index, source, "mean")


def multinomial(count, replacement=False):
    chances = zeros(16, 3000) + 1
    return lambda: torch.multinomial(chances, count, replacement)


def expanded(function, *shape):
    """Return a function without arguments that multiplies one number, expanded to a matrix, by a matrix.

    `function`: the operator, aten.mm or aten.bmm; `shape`: the shape of the expanded number.
    """
    one, other = zeros(1), zeros(*shape[:-2], shape[-1], 64)
    return lambda: function(one.expand(shape), other)


def group_norm_backward():
    gradient, image, mean, deviation, weight = zeros(2, 64, 100), zeros(2, 64, 100), zeros(2, 8), zeros(2, 8), zeros(64)
    rest = (2, 64, 100, 8, [True, True, True])
    return lambda: aten.native_group_norm_backward(gradient, image, mean, deviation, weight, *rest)


def index(dtype):
    tensor, positions = zeros(256), zeros(1000, dtype=dtype)
    return lambda: aten.index(tensor, [positions])


def scattered(count, in_place=False):
    tensor, mask, source = zeros(count, 10), zeros(count, 10, dtype=torch.bool), zeros(count, 10)
    return lambda: (aten.masked_scatter_ if in_place else aten.masked_scatter)(tensor, mask, source)


def where(number):
    mask, tensor = zeros(1000, dtype=torch.bool), zeros(1000)
    return lambda: torch.where(mask, tensor, number)


def stored(dtype=F32, is_coalesced=False):
    """Return a sparse tensor of shape (512, 640) and type `dtype` with 3000 stored elements, coalesced or not."""
    positions = torch.stack(torch.unravel_index(torch.arange(3000), (512, 640))).to(place)
    values = torch.zeros(3000, dtype=dtype, device=place)
    return torch.sparse_coo_tensor(positions, values, (512, 640), is_coalesced=is_coalesced, check_invariants=False)


def sparse(run, dtype=F32, other=F32, is_coalesced=False):
    """Return a function without arguments that calls `run(dense, sparse)` on tensors of zeros on the device.

    Args:
        dtype: type of the dense tensor, of shape (512, 640).
        other: type of the sparse tensor.
        is_coalesced: whether the sparse tensor is coalesced.
    """
    dense, second = torch.zeros(512, 640, dtype=dtype, device=place), stored(other, is_coalesced)
    return lambda: run(dense, second)


def sparse_masked():
    first, mask = stored(is_coalesced=True), stored()
    return lambda: first.sparse_mask(mask)


def ctc_loss(is_backward=False, batch=4, steps=50):
    scores, targets = zeros(steps, batch, 32), zeros(6 * batch, dtype=I64)
    lengths = [torch.arange(batch, device=place) * 0 + length for length in (steps, 6)]  # of known values
    [each + zeros(batch, dtype=I64) for each in lengths]  # a trace sends them to the device
    rest = (targets, *lengths, 0)
    if not is_backward:
        return lambda: aten._ctc_loss(scores, *rest)
    arguments = (zeros(batch), scores, *rest[:3], zeros(batch), zeros(batch, steps, 13), 0)
    return lambda: aten._ctc_loss_backward(*arguments)


def cell(function, gates):
    """Return a function without arguments that runs the kernel of a recurrent cell with 96 units.

    `function`: the kernel of an LSTM's or a GRU's cell; `gates`: 4 for an LSTM, 3 for a GRU.
    """
    biases = [zeros(96 * gates) for _ in range(2)]
    parts = [zeros(20, 96 * gates), zeros(20, 96 * gates), zeros(20, 96)]
    return lambda: function(*parts, *biases)


def rms_norm_backward(gradient):
    tensor, factors, weight = zeros(*gradient.shape), zeros(*gradient.shape[:-1], 1), zeros(64)
    return lambda: aten._fused_rms_norm_backward(gradient, tensor, [64], factors, weight, [True, True])


def bags_backward(mode, count=20, rows=500):
    """Return a function without arguments that computes the gradient of the table of an embedding bag, for 50 bags.

    Args:
        mode: how the embeddings of a bag are combined: 0: sum, 1: mean, 2: maximum.
        count: embeddings per bag on average; all of them are in the last bag.
        rows: embeddings in the table.
    """
    table, indices, starts = zeros(rows, 64), zeros(50 * count, dtype=I64), zeros(50, dtype=I64)
    kept = aten._embedding_bag(table, indices, starts, False, mode)[1:]
    rest, gradient = (indices, starts, *kept, rows, False, mode, False, None), zeros(50, 64)
    return lambda: aten._embedding_bag_backward(gradient, *rest)


def depthwise_3d_backward():
    gradient, tensor, weight = zeros(2, 8, 9, 10, 11), zeros(2, 8, 9, 10, 11), zeros(8, 1, 3, 3, 3)
    rest = ([8], [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 8, [True, True, True])
    return lambda: aten.convolution_backward(gradient, tensor, weight, *rest)


PATCHES = {"kernel_size": [3, 3], "dilation": [1, 1], "padding": [0, 0], "stride": [1, 1]}
BOTH = (500, 300), (500, 300)  # a model's output and a target
LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
LOSSES += ("binary_cross_entropy_with_logits",)
ENLARGED = {"output_size": [32, 32], "input_size": [4, 8, 16, 16], "align_corners": True}
LATER = {  # rehearsed with torch 2.15 only
    "CTC loss": ctc_loss,
    "CTC loss, many": lambda: ctc_loss(batch=200),
    "CTC loss's backward": lambda: ctc_loss(True),
    "CTC loss's backward of long inputs": lambda: ctc_loss(True, steps=300),
    "a number, added in place": lambda: of_one(aten.add_, 8, other=1),
    **{name: functools.partial(matmul, getattr(aten, name), *BOTH) for name in LOSSES},
    "mse_loss, unreduced": lambda: matmul(aten.mse_loss, *BOTH, reduction=0),
    "huber_loss, unreduced": lambda: matmul(aten.huber_loss, *BOTH, reduction=0),
    "mse_loss of few": lambda: matmul(aten.mse_loss, (2, 3), (2, 3)),
    "mse_loss in bf16": lambda: matmul(aten.mse_loss, *BOTH, dtype=BF16),
    "logits' loss, unreduced": lambda: matmul(aten.binary_cross_entropy_with_logits, *BOTH, reduction=0),
    "logits' loss, weighted": lambda: matmul(aten.binary_cross_entropy_with_logits, *BOTH, (300,)),
    "logits' loss, weighted by class": lambda: matmul(
        lambda tensor, target, weight: aten.binary_cross_entropy_with_logits(tensor, target, None, weight),
        *(*BOTH, (300,)),
    ),
    "RMS norm's backward": lambda: rms_norm_backward(zeros(40, 50, 64)),
    "RMS norm's backward, turned": lambda: rms_norm_backward(zeros(50, 40, 64).transpose(0, 1)),
    "RMS norm's backward, many rows": lambda: rms_norm_backward(zeros(70_000, 64)),
    "layer norm's backward, many rows": lambda: layer_norm(zeros(70_000, 64), zeros(70_000, 64)),
    "layer norm's backward, many rows, turned": lambda: layer_norm(
        zeros(700, 100, 96).transpose(0, 1), zeros(700, 100, 96).transpose(0, 1)
    ),
    "LSTM's cell": lambda: cell(aten._thnn_fused_lstm_cell, 4),
    "GRU's cell": lambda: cell(aten._thnn_fused_gru_cell, 3),
    **{f"bags of mode {mode}, backward": functools.partial(bags_backward, mode) for mode in range(3)},
    "large bags, backward": lambda: bags_backward(1, 200),
    "large bags of few rows, backward": lambda: bags_backward(1, 200, 5),
    "logsumexp": lambda: of_one(torch.logsumexp, 200, 3000, dim=1),
    "logsumexp of columns, bf16": lambda: of_one(torch.logsumexp, 200, 3000, dim=0, dtype=BF16),
    "logsumexp of long rows": lambda: of_one(torch.logsumexp, 3, 1_000_000, dim=-1),
    "logsumexp of all, bf16": lambda: of_one(torch.logsumexp, 200, 3000, dim=(0, 1), dtype=BF16),
    "maximum of all, bf16": lambda: of_one(torch.amax, 500, 300, dtype=BF16, dim=(0, 1)),
    "deviation": lambda: of_one(torch.std, 500, 300),
    "variance of long rows": lambda: of_one(torch.var, 2, 300_000, dim=-1),
    "variance and mean": lambda: of_one(torch.var_mean, 500, 300, dtype=BF16),
    "product": lambda: of_one(torch.prod, 500, 300, dtype=BF16),
    "sort of rows": lambda: of_one(torch.sort, 30, 40, 50),
    "sort of columns": lambda: of_one(torch.sort, 30, 40, 50, dim=0),
    "patches": lambda: of_one(aten.im2col, 4, 8, 32, 34, **PATCHES),
    "patches of what is turned": lambda: turned(aten.im2col, 8, 4, 32, 34, **PATCHES),
    "patches, added": lambda: of_one(aten.col2im, 4, 72, 64, output_size=[10, 10], **PATCHES),
    "distances": lambda: matmul(aten._euclidean_dist, (3, 40, 64), (3, 50, 64)),
    "each channel's convolution of volumes, backward": depthwise_3d_backward,
    "batch norm of rows": lambda: batch_norm(3000),
    "batch norm of few rows": lambda: batch_norm(30),
    "batch norm's backward of rows": batch_norm_backward,
    "batch norm of images": lambda: image_norm(True),
    "frozen batch norm of images": lambda: image_norm(False),
    "batch norm's backward of images": lambda: image_norm_backward(True, True, True, True),
    "frozen batch norm's backward of images": lambda: image_norm_backward(False, True, True, True),
    "distances' backward": distances_backward,
    "unfold's backward": lambda: matmul(aten.unfold_backward, (2, 7, 4), input_sizes=[2, 16], dim=1, size=4, step=2),
    "power of a number": lambda: of_one(functools.partial(torch.pow, 2), 8, 5),
    "scattered means": scattered_means,
    "sort of long rows": lambda: of_one(torch.sort, 6, 5000),
    "sort of many long rows": lambda: of_one(torch.sort, 130, 5000),
    "sort of long columns": lambda: of_one(torch.sort, 5000, 6, dim=0),
    "sort of 16 bits": lambda: of_one(torch.sort, 5000, dtype=F16),
    "sort of 8 bits": lambda: of_one(torch.sort, 900_000, dtype=torch.uint8),
    "sort of very long rows": lambda: of_one(torch.sort, 100, 9000, dtype=torch.bool),
    "largest of few": lambda: of_one(torch.topk, 16, 600, k=3),
    "largest of long rows": lambda: of_one(torch.topk, 4, 30_000, k=10),
    "many largest of long rows": lambda: of_one(torch.topk, 4, 30_000, k=5000),
    "drawn, one each": lambda: multinomial(1),
    "drawn, several": lambda: multinomial(5),
    "drawn, several with replacement": lambda: multinomial(5, True),
    "running product": lambda: of_one(torch.cumprod, 100_000, dim=0),
    "enlarged, backward, turned": lambda: turned(aten.upsample_bilinear2d_backward, 8, 4, 32, 32, **ENLARGED),
    "enlarged by copies, backward, turned": lambda: turned(
        aten.upsample_nearest2d_backward, 8, 4, 32, 32, output_size=[32, 32], input_size=[4, 8, 16, 16]
    ),
    "matmul of what is expanded": lambda: expanded(aten.mm, 32, 1),
    "matmul of batches of what is expanded": lambda: expanded(aten.bmm, 4, 32, 10),
}
RUNS = {
    "sparse, added": lambda: sparse(aten.add_),
    "sparse, added, coalesced": lambda: sparse(aten.add_, is_coalesced=True),
    "sparse in fp32, added to bf16": lambda: sparse(aten.add_, BF16),
    "sparse mask": lambda: sparse(aten.sparse_mask, BF16, BF16),
    "sparse mask of a sparse tensor": sparse_masked,
    "sparse, transposed": lambda: sparse(lambda _, each: each.t()),
    "sparse, doubled": lambda: sparse(lambda _, each: each * 2.0, other=BF16),
    "flash": lambda: attention("flash", BF16),
    "flash with dropout": lambda: attention("flash", BF16, dropout=0.1),
    "flash, grouped": lambda: attention("flash", BF16, groups=2),
    "flash's backward": flash_backward,
    "flash's backward, grouped": lambda: flash_backward(2),
    "flash's backward, wide heads": lambda: flash_backward(size=144),
    "flash, keys in parts": lambda: attention("flash", BF16, lengths=(500, 600)),
    "flash, keys in parts, wide heads": lambda: attention("flash", BF16, lengths=(300, 700), size=168),
    "flash, one row": lambda: attention("flash", BF16, 2, lengths=(1, 900)),
    "flash, many rows": lambda: attention("flash", BF16, lengths=(2000, 2000)),
    "efficient": lambda: attention("efficient", F32),
    "efficient, heads of 136": lambda: attention("efficient", F16, size=136),
    "efficient, heads of 128": lambda: attention("efficient", F16, size=128),
    "efficient's backward, fp32": lambda: efficient_backward(F32),
    "efficient's backward, fp16": lambda: efficient_backward(F16),
    **{
        f"efficient's backward, {name}, heads of {size}": functools.partial(efficient_backward, dtype, size)
        for name, dtype in (("fp32", F32), ("fp16", F16))
        for size in (96, 104, 128, 136, 264)
    },
    "efficient with dropout": lambda: attention("efficient", F32, dropout=0.1),
    "efficient's backward, bf16, heads of 96, dropout": lambda: efficient_backward(BF16, 96, dropout=0.1),
    "matmul": lambda: matmul(torch.mm, (300, 64), (64, 500)),
    "matmul plus a bias": lambda: matmul(torch.addmm, (500,), (300, 64), (64, 500)),
    "matmul plus a row": lambda: matmul(torch.addmm, (1, 500), (300, 64), (64, 500)),
    "matmul plus a bias of one": lambda: matmul(torch.addmm, (1,), (300, 64), (64, 1)),
    "matmul plus twice a bias": lambda: matmul(torch.addmm, (500,), (300, 64), (64, 500), beta=2),
    "matmul plus a matrix": lambda: matmul(torch.addmm, (300, 500), (300, 64), (64, 500)),
    "matmul plus a matrix, bf16": lambda: matmul(torch.addmm, (300, 500), (300, 64), (64, 500), dtype=BF16),
    "matmul, bias, gelu": lambda: matmul(torch._addmm_activation, (500,), (300, 64), (64, 500), use_gelu=True),
    "matmul in place": lambda: matmul(torch.Tensor.addmm_, (300, 500), (300, 64), (64, 500)),
    "matmul with a vector": lambda: matmul(torch.mv, (300, 64), (64,)),
    "outer product": lambda: matmul(torch.mm, (300, 1), (1, 500)),
    "matmuls": lambda: matmul(torch.bmm, (6, 30, 64), (6, 64, 50)),
    "outer products": lambda: matmul(torch.bmm, (6, 30, 1), (6, 1, 50)),
    "matmuls plus a matrix": lambda: matmul(torch.baddbmm, (6, 30, 50), (6, 30, 64), (6, 64, 50)),
    "matmul of groups, bf16": lambda: matmul(aten._grouped_mm, (4, 64, 64), (4, 64, 64), dtype=BF16),
    "embedding's backward, few": lambda: embedding_backward(3072, 8000, 8),
    "embedding's backward, many": lambda: embedding_backward(3100, 8000, 8),
    "embedding's backward, few rows": lambda: embedding_backward(20_000, 100, 8),
    "embedding's backward, few rows, bf16": lambda: embedding_backward(20_000, 100, 8, BF16),
    "embedding's backward, as many rows as processors": lambda: embedding_backward(20_000, 432, 8),
    "values added by index, few": lambda: put(1000),
    "values added by index, many": lambda: put(4000),
    "sum of rows": lambda: summed([0], 2048, 768),
    "sum of rows, bf16": lambda: summed([0], 2048, 768, dtype=BF16),
    "sum of few rows": lambda: summed([0], 777, 333),
    "sum of columns": lambda: summed([1], 4096, 50257),
    "sum of long rows": lambda: summed([1], 3, 1_000_000),
    "sum of all": lambda: summed([0, 1], 2048, 30000),
    "sum of two dimensions": lambda: summed([0, 1], 4, 512, 1024),
    "sum of what is transposed": lambda: summed([0, 1], 700, 300, 50, turn=(0, 1)),
    "sum of booleans": lambda: summed([0, 1], 4, 2048, dtype=torch.bool),
    "mean": lambda: of_one(torch.mean, 2048, 768),
    "norm": lambda: of_one(torch.linalg.vector_norm, 3_000_000),
    "norms": lambda: norms(10, 100_000, 300_000),
    "norms of many": lambda: norms(*[30] * 150, 2_000_000),
    "running sum": lambda: of_one(torch.cumsum, 4096, dtype=I64, dim=0),
    "running sum of 32 bits": lambda: of_one(torch.cumsum, 65536, dtype=I32, dim=0),
    "running sum of one row": lambda: of_one(torch.cumsum, 1, 4096, dtype=I64, dim=-1),
    "running sum of booleans": lambda: of_one(torch.cumsum, 4, 256, dtype=torch.bool, dim=1),
    "sort": lambda: of_one(torch.sort, 8192, dtype=I64),
    "softmax of rows that may be masked": lambda: of_one(aten._safe_softmax, 2, 8, 200, 200, dim=-1),
    "softmax's backward": softmax_backward,
    "patches' backward": patches_backward,
    "group norm's backward": group_norm_backward,
    "is it infinite": lambda: of_one(torch.isinf, 1000),
    "one of two, of which one is a number": lambda: where(0.5),
    "scattered by a mask": lambda: scattered(102),
    "scattered by a mask, many, in place": lambda: scattered(50_000, True),
    "index of 32 bits": lambda: index(I32),
    "index": lambda: index(I64),
    "running sum of floats": lambda: of_one(torch.cumsum, 100_000, dim=0),
    "running sum of what is turned": lambda: turned(torch.cumsum, 40, 60, dim=0),
    "sort of 32 bits": lambda: of_one(torch.sort, 8192, dtype=I32),
    "convolution": lambda: convolution("contiguous_format"),
    "convolution, turned": lambda: convolution("turned"),
    "convolution, channels last": lambda: convolution("channels_last"),
    "convolution's backward": lambda: convolution_backward("contiguous_format"),
    "convolution's backward, turned": lambda: convolution_backward("turned"),
    "convolution's backward, channels last": lambda: convolution_backward("channels_last"),
    "each channel's convolution, backward": lambda: convolution_backward("turned", 32, 7),
    "each channel's convolution, backward, fp16": lambda: convolution_backward("turned", 32, 3, F16),
    "layer norm of what is turned": lambda: layer_norm(zeros(60, 4, 64).transpose(0, 1)),
    "layer norm's backward, turned": lambda: layer_norm(
        zeros(60, 4, 64).transpose(0, 1), zeros(60, 4, 64).transpose(0, 1)
    ),
    "group norm": group_norm,
    "group norm, fp16": lambda: group_norm(F16),
    "softmax of what is turned": lambda: turned(aten._softmax, 40, 60, dim=-1, half_to_float=False),
    "roll": lambda: of_one(torch.roll, 4, 28, 28, shifts=(3,), dims=(1,)),
    "roll of two dimensions, turned": lambda: turned(torch.roll, 4, 28, 28, shifts=(3, 3), dims=(1, 2)),
    "max pool of what is turned": lambda: turned(aten.max_pool2d_with_indices, 32, 4, 28, 28, kernel_size=[2, 2]),
} | LATER


# What a release before torch 2.14 refuses.
SINCE_2_14 = {
    f"efficient, grouped, {name}": functools.partial(attention, "efficient", dtype, groups)
    for name, dtype, groups in (("fp32", F32, 2), ("bf16", BF16, 1))
} | {
    f"efficient's backward, grouped, {name}, heads of {size}": functools.partial(
        efficient_backward, dtype, size, groups
    )
    for name, dtype, groups in (("fp32", F32, 2), ("fp16", F16, 1))
    for size in (64, 136)
}


def warmed_up():
    """Allocate the workspaces that torch before 2.15 keeps for each thread, so that no case's requests include them."""
    for bias in (zeros(8), zeros(8, 8)):
        torch.addmm(bias, zeros(8, 8), zeros(8, 8))


def drawn(count, seed=0):
    """Return {name: function without arguments} of embedding gradients, running sums and sorts with sizes drawn from a
    seed.

    There are `count` functions of each kind.
    """
    draw, found = random.Random(seed), {}
    for number in range(count):
        size, width = int(2 ** draw.uniform(11.7, 22)), draw.choice((1, 3, 8))
        rows, dtype = draw.choice((5, 129, 159, 319, 431, 527, 4000, 70_000)), draw.choice((F32, BF16))
        of_rows = size, rows, width, dtype
        found[f"embedding's backward {number} {of_rows}"] = lambda of_rows=of_rows: embedding_backward(*of_rows)
        kind = draw.choice((I64, I32, F32))
        of_type = {"dtype": kind, "dim": 0}
        found[f"running sum {number} {size} {kind}"] = lambda size=size, of=of_type: of_one(torch.cumsum, size, **of)
        found[f"sort {number} {size} {kind}"] = lambda size=size, of=of_type: of_one(torch.sort, size, **of)
    return found


DRAWN = drawn(12)  # what only torch itself can say
