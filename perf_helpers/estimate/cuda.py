"""How CUDA differs from the CPU in memory, for an estimate that is made without a GPU.

A training that is followed on fake "cpu" tensors takes the CPU's decisions: its attention kernel, its dropout, its
lists of autocast operators. `emulated` makes it take CUDA's, as they stand in torch's sources. What no tensor shows is
computed in `allocator`. Each difference has a name and is told as an assumption with its source (`cuda.toml`).
"""

import contextlib
import functools
import math
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from perf_helpers.cards import DEFAULT_CAPABILITY
from perf_helpers.estimate import autocast
from perf_helpers.estimate.kernels import HALF

PARTS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def assumptions() -> list[str]:
    """What an estimate for CUDA takes for granted, a sentence each."""
    return [
        "CUDA is modelled on torch's sources and checked against torch's own allocator in rehearsals, and on an H100.",
        *(f"{name}: {text}." for name, text in PARTS.items()),
    ]


@contextlib.contextmanager
def emulated(compute_capability: tuple[int, int] = DEFAULT_CAPABILITY) -> Iterator[None]:
    """A training on fake "cpu" tensors inside this context takes the decisions that it would take on CUDA.

    The operators of the whole process are replaced meanwhile, so that C++ and Python callers alike get them. Whoever
    counts the device's memory follows it with `device.DeviceTracker`. The attention kernels are those of a GPU of this
    compute capability.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # a compiler does not see what is emulated
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        replacements: dict[str, Callable] = {
            "scaled_dot_product_attention": functools.partial(_attention, compute_capability),
            "dropout": _dropout,
            "linear": _linear,
            **{f"{name}.int": functools.partial(_softmax, name) for name in ("softmax", "log_softmax")},
        }
        for name, replacement in replacements.items():
            library.impl(name, replacement, "AutogradCPU")
        stack.enter_context(autocast.emulated(library))
        stack.enter_context(_foreach_allowed())
        # Else a program's own arguments refuse bf16 and tf32.
        stack.enter_context(patch("transformers.training_args.is_torch_bf16_gpu_available", lambda *_, **__: True))
        has_tf32 = compute_capability >= (8, 0)
        stack.enter_context(patch("transformers.training_args.is_torch_tf32_available", lambda *_, **__: has_tf32))
        if compute_capability < (8, 0):  # torch has no grouped products there, and transformers falls back
            stack.enter_context(patch("transformers.integrations.moe._can_use_grouped_mm", lambda *_, **__: False))
        yield


def _dropout(tensor, p, train):
    """Dropout by the kernel that keeps a mask of one byte an element."""
    if train and 0 < p < 1 and tensor.numel():
        return torch.ops.aten.native_dropout(tensor, p, train)[0]
    return tensor * 0 if train and p == 1 else tensor


def _softmax(name, tensor, dim, dtype=None):
    """Softmax from fp16 to fp32 in one kernel, without a cast of its input before it."""
    kernel = getattr(torch.ops.aten, f"_{name}")
    if tensor.dtype is torch.float16 and dtype is torch.float32 and isinstance(tensor, FakeTensor):
        return kernel(tensor, dim, True)
    return kernel(tensor if dtype is None else tensor.to(dtype), dim, False)


def _linear(tensor, weight, bias=None):
    """As for tensors that are no subclass: there the bias is added in place to what is no single product."""
    if bias is None:
        return torch.matmul(tensor, weight.t())
    if tensor.dim() == 2:
        return torch.addmm(bias, tensor, weight.t())
    if tensor.is_contiguous():
        rows = torch.addmm(bias, tensor.reshape(-1, tensor.shape[-1]), weight.t())
        return rows.view(*tensor.shape[:-1], weight.shape[0])
    return torch.matmul(tensor, weight.t()).add_(bias)


@contextlib.contextmanager
def _foreach_allowed() -> Iterator[None]:
    """Optimizers take their foreach form for fake tensors "on the cpu" too."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    name = "_get_foreach_kernels_supported_devices"
    devices = getattr(_foreach_utils, name)
    with (
        patch.object(optimizer, name, lambda *args, **options: [*devices(*args, **options), "cpu"]),
        contextlib.ExitStack() as stack,
    ):
        for module in (optimizer, _foreach_utils):  # they ask for a tensor's exact type
            kinds = [*module._foreach_supported_types, FakeTensor]
            stack.enter_context(patch.object(module, "_foreach_supported_types", kinds))
        yield


# ---- attention


def _attention(
    capability, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """scaled_dot_product_attention as on a GPU of this compute capability."""
    aten = torch.ops.aten
    kernel = _attention_kernel(capability, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if kernel == "math" or not isinstance(query, FakeTensor):  # a real tensor is computed, and on the CPU
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if kernel == "flash":
        size = query.shape[-1]
        scale = size**-0.5 if scale is None else scale
        query, key, value = (_padded(tensor) for tensor in (query, key, value))
        output = _first(aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale))
        return output if output.shape[-1] == size else output[..., :size]
    keep_logsumexp = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    attn_mask = _additive(attn_mask, query.dtype)
    if kernel == "efficient" and attn_mask is not None:
        if any(stride % 8 for stride in attn_mask.stride()[:-1]) or attn_mask.stride(-1) != 1:
            length = attn_mask.shape[-1]
            attn_mask = torch.nn.functional.pad(attn_mask, (0, 8 - length % 8))[..., :length]  # 8 more where none lack
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    run = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
    return _first(run(query, key, value, attn_mask, keep_logsumexp, dropout_p, is_causal, scale=scale))


def _first(results):
    """The first of several results; the others go in their order, as C++ destroys them."""
    first, results = results[0], results[1:]
    while results:
        results = results[1:]
    return first


def _additive(mask, dtype):
    """The mask as it is added to scores: of a boolean one 0 where it is true, else minus infinity."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, *(mask.new_full((), value, dtype=dtype) for value in (0.0, -math.inf)))


def _plain_attention(query, key, value, mask, dropout, causal, scale, enable_gqa):
    """`_scaled_dot_product_attention_math` as for tensors that are no subclass: there the mask is added in place."""
    dtype = query.dtype
    mask = _additive(mask, dtype)
    if dtype in HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    wide = query, key, value  # noqa: F841, they live until the end
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    query = query * root
    if causal:
        mask = _additive(query.new_ones((query.shape[-2], key.shape[-2]), dtype=torch.bool).tril(), query.dtype)
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    weights = torch.matmul(query, key.transpose(-2, -1) * root)
    weights = torch.ops.aten._safe_softmax(weights if mask is None else weights.add_(mask), -1)
    if dropout:
        weights = torch.dropout(weights, dropout, True)
    second = weights.to(dtype)  # noqa: F841, the kernel's other result, which the caller drops
    return torch.matmul(weights, value).to(dtype)


def _attention_kernel(capability, query, key, value, mask, dropout, causal, enable_gqa) -> str:
    """The kernel that `select_sdp_backend` would take: "cudnn", "flash", "efficient" or "math"."""
    inputs = (query, key, value)
    if any(tensor.dim() != 4 or not tensor.numel() or tensor.stride(-1) != 1 for tensor in inputs):
        return "math"
    if mask is not None and mask.stride(-1) != 1:  # T5's bias of positions, while it writes
        return "math"
    same_heads = query.shape[1] == key.shape[1] == value.shape[1]
    if len({tensor.shape[0] for tensor in inputs}) > 1 or not (same_heads or enable_gqa):
        return "math"
    head, value_head, half = query.shape[-1], value.shape[-1], query.dtype in HALF
    allowed, (major, _) = torch.backends.cuda, capability
    if (
        allowed.cudnn_sdp_enabled()
        and major in (9, 10)
        and half
        and max(head, value_head) <= (256 if capability == (9, 0) else 128)
        and not (head % 8 or value_head % 8)
        and not dropout * 16 % 1
        and key.shape[2] > 1
        and not (dropout and query.shape[2] == 1)
        and not (mask is not None and mask.requires_grad)
    ):
        return "cudnn"
    trains = any(tensor.requires_grad for tensor in inputs)
    # Consumer GPUs lack the shared memory for the backward of the largest heads.
    too_large = trains and ((8, 6) <= capability <= (8, 9) or major == 12) and head > 192
    if (
        allowed.flash_sdp_enabled()
        and capability >= (8, 0)
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


def _padded(tensor):
    """The tensor with zeros behind its last dimension, up to a multiple of 8."""
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
