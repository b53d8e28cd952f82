"""How CUDA differs from the CPU in memory, for an estimate that is made without a GPU.

A training that is traced on fake "cpu" tensors takes the CPU's decisions: its attention kernel, its dropout, its lists
of autocast operators. `emulated` makes it take CUDA's, as they stand in torch's sources; what no tensor shows (the
allocator's segments, cuBLAS' workspaces, the context) is computed here too. Each difference is a part with a name, can
be left out, and is told as an assumption. Read in 2.13's headers and tables and, for C++ and CUDA code that a wheel
does not carry, in torch's main branch at several dates.
"""

import bisect
import contextlib
import functools
import math
import operator
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

KIB, MIB = 1024, 1024**2
HALF = (torch.float16, torch.bfloat16)

PARTS: dict[str, str] = {
    "attention": "scaled_dot_product_attention takes flash for 16-bit inputs without a mask, else the memory-efficient "
    "kernel, else plain arithmetic (ATen/native/transformers/cuda/sdp_utils.cpp, transformers/attention.cpp)",
    "cudnn_attention": "on compute capability 9 and 10 cuDNN's attention comes before flash, where head sizes are "
    "multiples of 8 up to 128 and dropout is a multiple of 1/16, as with cuDNN newer than 9.15 "
    "(sdp_utils.cpp: check_prefer_cudnn_attention, can_use_cudnn_attention)",
    "autocast": "autocast runs CUDA's lists of operators in 16 bits, in fp32 or in the widest type, and keeps each "
    "weight's cast until it ends, fp16=True included; the scalars of GradScaler are left out (ATen/autocast_mode.h)",
    "dropout": "dropout keeps a mask of 1 byte an element (ATen/native/Dropout.cpp: is_fused_kernel_acceptable)",
    "softmax": "softmax from fp16 to fp32 makes no fp32 copy of its input (ATen/native/SoftMax.cpp: softmax)",
    "scratch": "the backwards of attention and embeddings and the norm of many tensors use memory of their own while "
    "they run; cuDNN's attention as much as flash, for want of a source (flash_attn/flash_api.cpp: mha_bwd, "
    "mem_eff_attention/kernel_backward.h, cuda/EmbeddingBackwardKernel.cu, cuda/ForeachReduceOp.cu); that of "
    "convolutions, sorts, reductions and flash's forward is not counted",
    "foreach": "an optimizer that is told neither takes its foreach form (torch/optim/optimizer.py: "
    "_default_to_fused_or_foreach)",
    "host_data": "batches are made on the host, where the next one waits while the present one is on the device "
    "(accelerate/data_loader.py: DataLoaderShard)",
    "rounding": "each block is a multiple of 512 bytes (c10/core/AllocatorConfig.h: kMinBlockSize)",
    "segments": "the allocator takes segments of 2 MiB, 20 MiB or the request's multiple of 2 MiB, keeps them and puts "
    "each block into the smallest free one that holds it, expandable_segments being off "
    "(c10/cuda/CUDACachingAllocator.cpp)",
    "cublas_workspace": "cuBLAS keeps a workspace for each thread that multiplies, the forward's and autograd's, which "
    "cuBLASLt shares (ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize), CUBLAS_WORKSPACE_CONFIG being unset",
    "context": "the CUDA context is known for the V100 of the guide only, elsewhere it is taken from recorded runs "
    "(Model training anatomy, transformers' documentation)",
}
_EMULATED = ("attention", "autocast", "dropout", "softmax", "scratch", "foreach", "host_data")


def assumptions(parts: Collection[str] = tuple(PARTS)) -> list[str]:
    """What an estimate with these parts takes for granted, a sentence each.

    Raises:
        ValueError: there is no such part.
    """
    _check_names(parts)
    return [
        "CUDA is modelled from the sources of torch, not yet checked on a GPU.",
        *(f"{name}: {text}." for name, text in PARTS.items() if name in parts),
        *(f"{name}: left out, counted as on CPU or not at all." for name in PARTS if name not in parts),
    ]


def _check_names(parts: Collection[str]) -> None:
    if unknown := [name for name in parts if name not in PARTS]:
        wrong = parts if isinstance(parts, str) else ", ".join(unknown)
        raise ValueError(f"parts={wrong!r}: give a collection of names from {', '.join(PARTS)}")


# ---- what happens to tensors


@contextlib.contextmanager
def emulated(
    parts: Collection[str] = tuple(PARTS),
    *,
    compute_capability: tuple[int, int] = (9, 0),
    sent: Callable[[torch.Tensor], None] | None = None,
) -> Iterator[None]:
    """A training on fake "cpu" tensors inside this context behaves as it would on CUDA.

    Fake tensors stand for the device's memory, real ones for the host's until they are sent: who counts follows those.
    The operators of the whole process are replaced meanwhile, so that C++ and Python callers alike get them.

    Args:
        parts: names from `PARTS`; those that concern no tensor ("segments", ...) change nothing here.
        compute_capability: (major, minor) of the GPU; decides on the attention kernels.
        sent: called with each tensor of a batch when accelerate's data loader sends it to the device. It stays real, so
            that what a model reads from its data is right.

    Raises:
        ValueError: there is no such part.
        RuntimeError: this torch lacks a private name that a part needs.
    """
    _check_names(parts)
    with contextlib.ExitStack() as stack:
        chosen = [name for name in _EMULATED if name in parts]
        if chosen:
            library = stack.enter_context(_private("torch.library._scoped_library")("aten", "IMPL"))
        if "attention" in chosen:
            attention = _Attention(compute_capability, prefer_cudnn="cudnn_attention" in parts)
            library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
        if "dropout" in chosen:
            library.impl("dropout", _dropout, "AutogradCPU")
        if "softmax" in chosen:
            for name in ("softmax", "log_softmax"):
                library.impl(f"{name}.int", functools.partial(_softmax, name), "AutogradCPU")
        if "scratch" in chosen:
            for name, needed in _SCRATCH.items():
                library.impl(name, functools.partial(_with_scratch, _overload(name), needed), "AutogradCPU")
        if "autocast" in chosen:
            _Autocast().install(library, stack)
        if "foreach" in chosen:
            _allow_foreach(stack)
        if "host_data" in chosen and sent:
            _tell_sent(stack, sent)
        yield


def _private(path: str) -> Any:
    """A private name of torch, which another version may lack."""
    try:
        return operator.attrgetter(path.removeprefix("torch."))(torch)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no {path}, which the emulation of CUDA stands on: use torch 2.11 to 2.14"
        ) from None


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _dropout(tensor, p, train):
    if train and 0 < p < 1 and tensor.numel():
        return torch.ops.aten.native_dropout(tensor, p, train)[0]
    return tensor * 0 if train and p == 1 else tensor


def _softmax(name, tensor, dim, dtype=None):
    kernel = getattr(torch.ops.aten, f"_{name}")
    if tensor.dtype is torch.float16 and dtype is torch.float32 and isinstance(tensor, FakeTensor):
        return kernel(tensor, dim, True)
    return kernel(tensor if dtype is None else tensor.to(dtype), dim, False)


def _allow_foreach(stack):
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    devices = _private("torch.utils._foreach_utils._get_foreach_kernels_supported_devices")
    _replace(stack, optimizer, "_get_foreach_kernels_supported_devices", lambda: [*devices(), "cpu"])
    for module in (optimizer, _foreach_utils):  # they ask for a tensor's exact type
        _replace(stack, module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor])


def _tell_sent(stack, sent):
    from accelerate import data_loader
    from accelerate.utils import recursively_apply

    send = data_loader.send_to_device

    def tell(tensor):
        sent(tensor)
        return tensor

    def telling(*args, **kwargs):
        return recursively_apply(tell, send(*args, **kwargs))

    _replace(stack, data_loader, "send_to_device", telling)


# ---- attention


@dataclass(frozen=True)
class _Attention:
    """scaled_dot_product_attention as on a GPU of this compute capability."""

    capability: tuple[int, int]
    prefer_cudnn: bool

    def __call__(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        aten = torch.ops.aten
        kernel = self.choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        if kernel == "math" or not isinstance(query, FakeTensor):
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        if kernel == "flash":
            size = query.shape[-1]
            scale = size**-0.5 if scale is None else scale
            query, key, value = (_padded(tensor, 8) for tensor in (query, key, value))
            output = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
            return output if output.shape[-1] == size else output[..., :size]
        keep_logsumexp = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        if attn_mask is not None:
            attn_mask = _additive(attn_mask, query.dtype)
        if kernel == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, keep_logsumexp, dropout_p, is_causal, scale=scale
            )[0]
        if attn_mask is not None:
            if any(stride % 16 for stride in attn_mask.stride()[:-1]) or attn_mask.stride(-1) != 1:
                attn_mask = _padded(attn_mask, 16)[..., : attn_mask.shape[-1]]
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, keep_logsumexp, dropout_p, is_causal, scale=scale
        )[0]

    def choose(self, query, key, value, mask, dropout, causal, enable_gqa) -> str:
        """The kernel that `select_sdp_backend` would take: "cudnn", "flash", "efficient" or "math"."""
        inputs = (query, key, value)
        if any(tensor.dim() != 4 or not tensor.numel() or tensor.stride(-1) != 1 for tensor in inputs):
            return "math"
        same_heads = query.shape[1] == key.shape[1] == value.shape[1]
        if len({tensor.shape[0] for tensor in inputs}) > 1 or not (same_heads or enable_gqa):
            return "math"
        head, value_head, half = query.shape[-1], value.shape[-1], query.dtype in HALF
        allowed, (major, _) = torch.backends.cuda, self.capability
        if (
            self.prefer_cudnn
            and allowed.cudnn_sdp_enabled()
            and major in (9, 10)
            and half
            and max(head, value_head) <= 128
            and not (head % 8 or value_head % 8)
            and not dropout * 16 % 1
            and key.shape[2] > 1
            and not (dropout and query.shape[2] == 1)
        ):
            return "cudnn"
        trains = any(tensor.requires_grad for tensor in inputs)
        # Consumer GPUs lack the shared memory for the backward of the largest heads.
        too_large = trains and ((8, 6) <= self.capability <= (8, 9) or major == 12) and head > 192
        if (
            allowed.flash_sdp_enabled()
            and self.capability >= (8, 0)
            and half
            and mask is None
            and head == value_head == key.shape[-1] <= 256
            and not (too_large and (head <= 224 or dropout))
            and not (causal and query.shape[2] != key.shape[2])
        ):
            return "flash"
        alignment = 8 if half and major >= 7 else 4 if major >= 8 else 1
        if (
            allowed.mem_efficient_sdp_enabled()
            and (query.dtype in (torch.float32, torch.float16) or (query.dtype is torch.bfloat16 and major >= 8))
            and head == key.shape[-1]
            and not (head % alignment or value_head % alignment)
            and same_heads
        ):
            return "efficient"
        return "math"


def _padded(tensor, multiple):
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _additive(mask, dtype):
    if mask.dtype is not torch.bool:
        return mask
    return torch.where(mask.logical_not(), -math.inf, mask.new_zeros((), dtype=dtype))


# ---- memory that an operation uses while it runs


def _with_scratch(function, needed, *args, **kwargs):
    tensor = args[0][0] if isinstance(args[0], list | tuple) else args[0]
    scratch = tensor.new_empty(size, dtype=torch.uint8) if (size := needed(*args, **kwargs)) else None
    with _private("torch._C._AutoDispatchBelowAutograd")():
        result = function(*args, **kwargs)
    del scratch
    return result


def _flash_backward_bytes(_, query, key, value, *__, **___) -> int:
    """fp32 sums of dQ and of each row, and under grouped queries dK and dV for each query head."""
    batch, heads, length, head = query.shape
    rows = batch * heads * (-(-length // 128) * 128)
    wide = -(-head // 32) * 32 if head <= 192 else 256
    grouped = 0 if heads == key.shape[1] else 2 * batch * key.shape[2] * heads * head * query.element_size()
    return 4 * rows * (wide + 1) + grouped


def _efficient_backward_bytes(_, query, key, value, *__, **___) -> int:
    """Row sums, then tiles of dQ in fp32 with a header of 16 bytes each; in fp32 a product comes before the tiles."""
    batch, heads, length, head = query.shape
    side = 64 if head <= 64 else 128
    tiles = -(-length // side) * -(-head // side)
    rows = 4 * batch * heads * length
    product = 0 if query.dtype in HALF else rows * (value.shape[-1] + 2)
    return max(product, rows + batch * heads * tiles * (16 + 4 * side * side))


def _embedding_backward_bytes(gradient, indices, weights, padding, scale_by_frequency, **_) -> int:
    """Indices sorted, and a sum in fp32 for each run of up to 10 equal ones; few indices need neither."""
    count = indices.numel()
    if count <= 3072 and not scale_by_frequency:
        return 0
    runs = min(count, weights)
    sums = count // 10 + runs
    return indices.element_size() * (3 * count + 2 * runs + sums) + sums * gradient.shape[-1] * 4


def _norm_bytes(tensors, *_, **__) -> int:
    """A partial norm for each chunk of 65,536 elements, for all tensors as many as for the largest."""
    return 4 * len(tensors) * -(-max(tensor.numel() for tensor in tensors) // 65536)


_SCRATCH: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward_bytes,
    "_scaled_dot_product_cudnn_attention_backward": _flash_backward_bytes,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward_bytes,
    "embedding_dense_backward": _embedding_backward_bytes,
    "_foreach_norm.Scalar": _norm_bytes,
}


# ---- autocast


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# The lists of ATen/autocast_mode.h (AT_FORALL_...); what a version of torch does not register is not replaced.
_LOWER = _names(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
    """
)
_FP32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    """
)
_FP32_RESULT = _names(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)
_WIDEST = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """
)
_NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
_BANNED = ("binary_cross_entropy",)
_FALLTHROUGH = torch.library.fallthrough_kernel


class _Autocast:
    """CUDA's rules under `torch.autocast("cpu")`, at the place in the dispatcher where CUDA has them."""

    def __init__(self):
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a weight and its cast

    def install(self, library, stack) -> None:
        registered = _private("torch._C._dispatch_get_registrations_for_dispatch_key")
        cuda, cpu = (
            {name.removeprefix("aten::") for name in registered(key)} for key in ("AutocastCUDA", "AutocastCPU")
        )
        rules = dict.fromkeys(_LOWER, self._lower) | dict.fromkeys(_FP32, self._fp32)
        rules |= dict.fromkeys(_FP32_RESULT, _fp32_result) | dict.fromkeys(_WIDEST, self._widest)
        rules |= dict.fromkeys(_NORMS, _fp32_norm) | dict.fromkeys(_BANNED, _banned)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name in sorted(cuda | cpu):
                rule = functools.partial(_ruled, rules.get(name, _no_rule), name) if name in cuda else _FALLTHROUGH
                library.impl(name, rule, "AutocastCPU")
        clear = torch.clear_autocast_cache

        def clear_all():
            self._casts.clear()
            clear()

        _replace(stack, torch, "clear_autocast_cache", clear_all)  # `torch.autocast` calls it when the outermost ends
        stack.callback(self._casts.clear)
        _autocast_fp16_trainings(stack)

    def _lower(self, _, args, kwargs):
        return self._cast((args, kwargs), torch.get_autocast_dtype("cpu"))

    def _fp32(self, _, args, kwargs):
        return self._cast((args, kwargs), torch.float32)

    def _widest(self, _, args, kwargs):
        wide = any(_eligible(leaf) and leaf.dtype is torch.float32 for leaf in tree_leaves((args, kwargs)))
        return self._cast((args, kwargs), torch.float32 if wide else torch.get_autocast_dtype("cpu"))

    def _cast(self, arguments, dtype):
        return tree_map(lambda leaf: self._cast_one(leaf, dtype) if _eligible(leaf) else leaf, arguments)

    def _cast_one(self, tensor, dtype):
        """As `cached_cast`: the 16-bit cast of an fp32 weight is made once."""
        if tensor.dtype is dtype:
            return tensor
        weight = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not weight or dtype is not torch.get_autocast_dtype("cpu") or not torch.is_autocast_cache_enabled():
            return tensor.to(dtype)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = (tensor, tensor.to(dtype))
        return self._casts[id(tensor)][1]


def _ruled(rule, name, *args, **kwargs):
    """The operator with the arguments that the rule gives it, autocast being off inside of it."""
    function = _overload(_NORMS.get(name, name))
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with _private("torch._C._ExcludeDispatchKeyGuard")(below):
        args, kwargs = rule(name, args, kwargs)
        return function(*args, **kwargs)


def _eligible(leaf) -> bool:
    """Whether it lies on the device as a number of at most 32 bits; a real scalar is on the host."""
    if not isinstance(leaf, torch.Tensor) or not (isinstance(leaf, FakeTensor) or leaf.dim()):
        return False
    return leaf.is_floating_point() and leaf.dtype is not torch.float64


def _fp32_result(name, args, kwargs):
    place = [argument.name for argument in _overload(name)._schema.arguments].index("dtype")
    given = args[place] if len(args) > place else kwargs.get("dtype")
    if given is not None or not _eligible(args[0]):
        return args, kwargs
    return args[:place], kwargs | {"dtype": torch.float32}


def _fp32_norm(name, args, kwargs):
    defaults = [argument.default_value for argument in _overload(name)._schema.arguments]
    dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
    return (*args, *defaults[len(args) :]), kwargs | {"dtype": dtype}


def _no_rule(name, *_):
    """For an operator that no list names: only a CUDA build registers `_cudnn_rnn`, and only a GPU calls it."""
    raise RuntimeError(
        f"torch {torch.__version__} autocasts {name} on CUDA by a rule that is not known here: "
        "use torch 2.11 to 2.14, or leave the part 'autocast' out"
    )


def _banned(name, *_):
    raise RuntimeError(f"{name} is not allowed under autocast on CUDA: use binary_cross_entropy_with_logits")


def _autocast_fp16_trainings(stack):
    """Accelerate, and with it the Trainer, autocasts fp16=True on a GPU only."""
    from accelerate import Accelerator

    prepare = Accelerator.prepare_model

    @functools.wraps(prepare)
    def preparing(self, *args, **kwargs):
        before = self.native_amp
        self.native_amp = before or self.mixed_precision == "fp16"
        try:
            return prepare(self, *args, **kwargs)
        finally:
            self.native_amp = before  # else it looks for a GradScaler, of which nothing could be read here

    _replace(stack, Accelerator, "prepare_model", preparing)


# ---- the allocator


def rounded(size: int) -> int:
    """The bytes of the block that holds `size` bytes: at least 512 and a multiple of it; 0 takes none."""
    return -(-size // 512) * 512


def reserved_peak(log: Iterable[tuple[Hashable, int, int]]) -> int:
    """Bytes that the caching allocator has taken from the device after these births and deaths.

    Segments are kept once taken, so that the end is the peak: nothing empties the cache, and the device is large enough
    for the allocator never to do so itself.

    Args:
        log: (key, bytes, +1 at birth or -1 at death) in order, from the loading of the model on.
    """
    allocator = CachingAllocator()
    for key, size, sign in log:
        if sign > 0:
            allocator.allocate(key, size)
        else:
            allocator.free(key)
    return allocator.reserved_bytes


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    bytes: int
    pool: list[tuple[int, int, "_Block"]]  # where it goes when it is free
    free: bool = False
    before: "_Block | None" = None  # its neighbours in the segment
    after: "_Block | None" = None


class CachingAllocator:
    """The segments and blocks of torch's CUDA allocator for one stream (c10/cuda/CUDACachingAllocator.cpp: malloc,
    get_free_block, should_split, free_block), with its default settings.

    Of two equally large free blocks it takes the one at the lower address; a new segment is taken to have the highest.
    """

    def __init__(self):
        self.reserved_bytes = self.allocated_bytes = 0
        self._small: list[tuple[int, int, _Block]] = []  # the free blocks, by size and address
        self._large: list[tuple[int, int, _Block]] = []
        self._used: dict[Hashable, _Block] = {}

    def allocate(self, key: Hashable, size: int) -> None:
        """Place `size` bytes under the name `key`.

        Raises:
            ValueError: the key is in use.
        """
        if key in self._used:
            raise ValueError(f"key={key!r} is born twice: give each block a key of its own while it lives")
        size = rounded(size)
        if not size:
            return
        small = size <= MIB
        pool = self._small if small else self._large
        place = bisect.bisect_left(pool, (size,))
        if place < len(pool):
            block = pool.pop(place)[2]
        else:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            block = _Block(self.reserved_bytes, segment, pool)
            self.reserved_bytes += segment
        block.free = False
        rest = block.bytes - size
        if rest >= 512 if small else rest > MIB:
            after = _Block(block.address + size, rest, pool, before=block, after=block.after)
            if block.after:
                block.after.before = after
            block.after, block.bytes = after, size
            self._put_back(after)
        self.allocated_bytes += block.bytes
        self._used[key] = block

    def free(self, key: Hashable) -> None:
        """Give the block back, joined with its free neighbours. A key that holds no bytes is passed over."""
        block = self._used.pop(key, None)
        if block is None:
            return
        self.allocated_bytes -= block.bytes
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free:
                continue
            neighbour.pool.pop(bisect.bisect_left(neighbour.pool, (neighbour.bytes, neighbour.address)))
            block.bytes += neighbour.bytes
            if neighbour is block.before:
                block.address, block.before = neighbour.address, neighbour.before
                if block.before:
                    block.before.after = block
            else:
                block.after = neighbour.after
                if block.after:
                    block.after.before = block
        self._put_back(block)

    def _put_back(self, block):
        block.free = True
        bisect.insort(block.pool, (block.bytes, block.address, block))


# ---- what no tensor shows


def workspace_bytes(compute_capability: tuple[int, int], training: bool = True) -> int:
    """cuBLAS' workspaces, which the caching allocator holds from the first product on: 32 MiB on compute capability 9,
    10 and 12, else :4096:2:16:8, for each thread that multiplies; a training has two, the forward's and autograd's.
    """
    one = 32 * MIB if compute_capability[0] in (9, 10, 12) else (2 * 4096 + 8 * 16) * KIB
    return 2 * one if training else one


def context_bytes(compute_capability: tuple[int, int]) -> int | None:
    """The CUDA context as device-used memory outside of the allocator; None where nobody has published or measured it.

    It depends on driver, CUDA and the kernels loaded. The one figure known is 1343 MiB on a V100 in "Model training
    anatomy" of transformers' documentation, taken there with one segment of 2 MiB.
    """
    return 1341 * MIB if compute_capability == (7, 0) else None
