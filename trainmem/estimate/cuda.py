"""Make a training on fake CPU tensors take CUDA's decisions, for an estimate that needs no GPU.

On fake "cpu" tensors torch would choose the CPU's attention kernel, dropout and autocast lists. `emulated` makes torch
choose CUDA's. The memory beyond the tensors' own bytes, e.g. from rounding, is modelled in `allocator`. Each difference
between CUDA and the CPU has a name and a source in `cuda.toml`, and the estimate lists it as an assumption.
"""

import contextlib
import functools
import math
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trainmem.cards import DEFAULT_CAPABILITY
from trainmem.estimate import autocast
from trainmem.estimate.allocator_settings import Release, release
from trainmem.estimate.attention_kernels import HALF

PARTS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def assumptions() -> list[str]:
    """Return the assumptions of every estimate for CUDA, one sentence each."""
    return [
        "CUDA is modelled on torch's sources, and checked against torch's allocator in rehearsals and on an H100.",
        *(f"{name}: {text}." for name, text in PARTS.items()),
    ]


@contextlib.contextmanager
def emulated(compute_capability: tuple[int, int] = DEFAULT_CAPABILITY, rules: Release | None = None) -> Iterator[None]:
    """Make a training on fake "cpu" tensors take CUDA's decisions in this context.

    The operators of the whole process are replaced, so that C++ and Python callers get the replacements. Use
    `device.DeviceTracker` to count the device's memory.

    Args:
        compute_capability: compute capability of the GPU whose attention kernels are chosen.
        rules: the rules of a torch release, see `allocator_settings.release`; None: the installed release.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code would bypass the replacements
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        replacements: dict[str, Callable] = {
            "scaled_dot_product_attention": functools.partial(_attention, rules or release(), compute_capability),
            "dropout": _dropout,
            "linear": _linear,
            "one_hot": _one_hot,
            "lstm_cell": _lstm_cell,
            "gru_cell": _gru_cell,
            **dict.fromkeys(("ctc_loss.Tensor", "ctc_loss.IntList"), _ctc_loss),
            **{f"{name}.int": functools.partial(_softmax, name) for name in ("softmax", "log_softmax")},
        }
        for name, replacement in replacements.items():
            library.impl(name, replacement, "AutogradCPU")
        # With a kernel for the CPU, torch no longer replaces the fused norm by several operations.
        library.impl("_fused_rms_norm", _rms_norm, "CPU")
        stack.enter_context(autocast.emulated(library))
        stack.enter_context(_foreach_allowed())
        # Without these patches TrainingArguments refuses bf16 and tf32.
        stack.enter_context(patch("transformers.training_args.is_torch_bf16_gpu_available", lambda *_, **__: True))
        has_tf32 = compute_capability >= (8, 0)
        stack.enter_context(patch("transformers.training_args.is_torch_tf32_available", lambda *_, **__: has_tf32))
        if compute_capability < (8, 0):  # torch has no grouped matmuls there, and transformers falls back
            stack.enter_context(patch("transformers.integrations.moe._can_use_grouped_mm", lambda *_, **__: False))
        yield


def _dropout(tensor, p, train):
    """Return the result of dropout, with a mask of one byte per element as in CUDA's kernel."""
    if train and 0 < p < 1 and tensor.numel():
        return torch.ops.aten.native_dropout(tensor, p, train)[0]
    return tensor * 0 if train and p == 1 else tensor


def _softmax(name, tensor, dim, dtype=None):
    """Return softmax or log_softmax (`name`) along `dim`, in `dtype` or, if that is None, in the tensor's type."""
    kernel = getattr(torch.ops.aten, f"_{name}")
    if tensor.dtype is torch.float16 and dtype is torch.float32 and isinstance(tensor, FakeTensor):
        return kernel(tensor, dim, True)  # as on CUDA: one kernel, without a cast of the input
    return kernel(tensor if dtype is None else tensor.to(dtype), dim, False)


def _linear(tensor, weight, bias=None):
    """Return the result of `linear`, computed as torch does for real tensors, not as for fake ones."""
    if bias is None:
        return torch.matmul(tensor, weight.t())
    if tensor.dim() == 2:
        return torch.addmm(bias, tensor, weight.t())
    if tensor.is_contiguous():
        rows = torch.addmm(bias, tensor.reshape(-1, tensor.shape[-1]), weight.t())
        return rows.view(*tensor.shape[:-1], weight.shape[0])
    return torch.matmul(tensor, weight.t()).add_(bias)


def _one_hot(tensor, classes=-1):
    """Return the result of `one_hot`, scattered into zeros as torch does for real tensors, not for fake ones."""
    classes = int(tensor.max()) + 1 if classes == -1 else classes
    return tensor.new_zeros((*tensor.shape, classes)).scatter_(-1, tensor.unsqueeze(-1), 1)


def _lstm_cell(tensor, state, weight, hidden_weight, bias=None, hidden_bias=None):
    """Return the (output, cell state) that follows `state` in an LSTM: two matmuls, then one kernel, as on CUDA."""
    gates = torch.matmul(tensor, weight.t()), torch.matmul(state[0], hidden_weight.t())
    return torch.ops.aten._thnn_fused_lstm_cell(*gates, state[1], bias, hidden_bias)[:2]


def _gru_cell(tensor, output, weight, hidden_weight, bias=None, hidden_bias=None):
    """Return the output that follows `output` in a GRU: two matmuls, then one kernel, as on CUDA."""
    gates = torch.matmul(tensor, weight.t()), torch.matmul(output, hidden_weight.t())
    return torch.ops.aten._thnn_fused_gru_cell(*gates, output, bias, hidden_bias)[0]


def _ctc_loss(scores, targets, lengths, target_lengths, blank=0, reduction=1, zero_infinity=False):
    """Return CTC's loss; the arguments are those of torch's `ctc_loss`."""
    batch = scores if scores.dim() == 3 else scores.unsqueeze(1)
    losses = torch.ops.aten._ctc_loss(batch, targets, lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == math.inf, losses.new_zeros(()), losses)
    if reduction == 1:  # the lengths are copied to the device (native/LossCTC.cpp: get_clamped_target_length)
        is_fake = isinstance(losses, FakeTensor)
        sent = torch.empty_like(losses) if is_fake else torch.as_tensor(target_lengths).to(losses.dtype)
        sent = sent.clamp_min(1)
        return (losses / sent).mean()
    return losses.sum() if reduction == 2 else losses if scores.dim() == 3 else losses.squeeze(0)


def _rms_norm(tensor, shape, weight=None, eps=None):
    """Return (RMSNorm's result, reciprocal of the root mean square) over the last dimensions, of sizes `shape`."""
    wide = tensor.double() if tensor.dtype is torch.float64 else tensor.float()
    small = torch.finfo(wide.dtype).eps if eps is None else eps
    factors = wide.square().mean([*range(-len(shape), 0)], keepdim=True).add(small).rsqrt()
    return (wide * factors * (1 if weight is None else weight)).to(tensor.dtype).contiguous(), factors


@contextlib.contextmanager
def _foreach_allowed() -> Iterator[None]:
    """Make optimizers treat fake CPU tensors as on a GPU in this context: use foreach, allow `capturable=True`."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    names = "_get_foreach_kernels_supported_devices", "_get_capturable_supported_devices"
    with contextlib.ExitStack() as stack:
        for module in [each for name, each in sys.modules.items() if name.startswith("torch.optim.")]:
            for name in names:
                if plain := vars(module).get(name):
                    stack.enter_context(patch.object(module, name, _with_cpu(plain)))
        for module in (optimizer, _foreach_utils):  # both compare a tensor's exact type
            kinds = [*module._foreach_supported_types, FakeTensor]
            stack.enter_context(patch.object(module, "_foreach_supported_types", kinds))
        yield


def _with_cpu(devices: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Return a function that calls `devices`, and returns its list of kinds of devices with "cpu" added."""
    return lambda *args, **options: [*devices(*args, **options), "cpu"]


# ---- attention


def _attention(
    rules, capability, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Return the output of scaled_dot_product_attention by the kernel that torch selects on a GPU.

    `rules`: see `allocator_settings.release`; `query`, `key`, `value`: (batch, heads, length, head size), or no batch.
    """
    with_batch = _with_batch(rules, query, key, value, attn_mask)
    kernel = attention_kernel(rules, capability, *with_batch, dropout_p, is_causal, enable_gqa)
    if kernel == "math" or not isinstance(query, FakeTensor):  # a real tensor is computed on the CPU
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    output = _fused_attention(kernel, *with_batch, dropout_p, is_causal, scale)
    return output.squeeze(0) if query.dim() == 3 else output


def _fused_attention(kernel, query, key, value, attn_mask, dropout_p, is_causal, scale):
    """Return attention's output, computed by one of torch's fused kernels.

    `kernel`: "flash", "efficient" or "cudnn"; `query`, `key`, `value`: (batch, heads, length, head size).
    """
    aten = torch.ops.aten
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
            attn_mask = torch.nn.functional.pad(attn_mask, (0, 8 - length % 8))[..., :length]  # by 8 if none is missing
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    run = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
    return _first(run(query, key, value, attn_mask, keep_logsumexp, dropout_p, is_causal, scale=scale))


def _first(results):
    """Return the first of several results; free the others one by one, from second to last, as torch's C++ does."""
    first, results = results[0], results[1:]
    while results:
        results = results[1:]
    return first


def _additive(mask, dtype):
    """Return a boolean mask as numbers of type `dtype` to add to scores: 0 for True, minus infinity for False."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, *(mask.new_full((), value, dtype=dtype) for value in (0.0, -math.inf)))


def _plain_attention(query, key, value, mask, dropout, causal, scale, enable_gqa):
    """Return the output of scaled_dot_product_attention, computed without a fused kernel."""
    dtype = query.dtype
    mask = _additive(mask, dtype)
    if dtype in HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    wide = query, key, value  # noqa: F841, torch keeps them until the end
    root = math.sqrt(query.shape[-1] ** -0.5 if scale is None else scale)
    query = query * root
    if causal:
        mask = _additive(query.new_ones((query.shape[-2], key.shape[-2]), dtype=torch.bool).tril(), query.dtype)
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    weights = torch.matmul(query, key.transpose(-2, -1) * root)
    # The mask is added in place; torch's `_scaled_dot_product_attention_math` does so for real tensors only.
    weights = torch.ops.aten._safe_softmax(weights if mask is None else weights.add_(mask), -1)
    if dropout:
        weights = torch.dropout(weights, dropout, True)
    second = weights.to(dtype)  # noqa: F841, the kernel's second result, which the caller drops
    return torch.matmul(weights, value).to(dtype)


def attention_kernel(
    rules: Release,
    capability: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    enable_gqa: bool = False,
) -> str:
    """Return the attention kernel that torch selects: "cudnn", "flash", "efficient" or "math" (plain attention).

    Args:
        rules: the rules by which a torch release selects the kernel, see `allocator_settings.release`.
        capability: the GPU's compute capability.
        query, key, value: (batch, heads, length, head size), or without a batch, which fused kernels support since
            torch 2.14.
        mask, dropout, causal, enable_gqa: as in scaled_dot_product_attention.

    Source: ATen/native/transformers/cuda/sdp_utils.cpp, select_sdp_backend.
    """
    allowed = torch.backends.cuda
    *inputs, mask = _with_batch(rules, query, key, value, mask)
    query, key, value = inputs
    if any(tensor.dim() != 4 or not tensor.numel() for tensor in inputs):
        return "math"
    if len({tensor.shape[0] for tensor in inputs}) > 1 or (mask is not None and mask.stride(-1) != 1):
        return "math"
    dense = all(tensor.stride(-1) == 1 for tensor in inputs)
    half, trains = query.dtype in HALF, torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    if dense or query.shape[-1] == 1:
        if (
            allowed.cudnn_sdp_enabled()
            and capability[0] in (9, 10)
            and half
            and _heads_fit(rules, *inputs, enable_gqa, values_alike=False)
            and _fits_cudnn(rules, capability, *inputs, mask, dropout, trains)
        ):
            return "cudnn"
        if (
            allowed.flash_sdp_enabled()
            and capability >= (8, 0)
            and half
            and mask is None
            and _heads_fit(rules, *inputs, enable_gqa)
            and _fits_flash(capability, *inputs, dropout, causal, trains)
        ):
            return "flash"
    head, value_head, major = query.shape[-1], value.shape[-1], capability[0]
    alignment = 8 if half and major >= 7 else 4 if major >= 8 else 1
    if (
        allowed.mem_efficient_sdp_enabled()
        and dense
        and (query.dtype in (torch.float32, torch.float16) or (query.dtype is torch.bfloat16 and major >= 8))
        and head == key.shape[-1]
        and not (head % alignment or value_head % alignment)
        and not (major >= 8 and any(tensor.storage_offset() % alignment for tensor in inputs))
        and _heads_fit(rules, *inputs, enable_gqa and rules.groups_attention)
    ):
        return "efficient"
    return "math"


def _with_batch(rules: Release, query, key, value, mask):
    """Return (query, key, value, mask) with a batch of one added to tensors of shape (heads, length, head size)."""
    # torch adds the batch since 2.14 (`groups_attention`), before it selects a kernel.
    if not rules.groups_attention or any(tensor.dim() != 3 for tensor in (query, key, value)):
        return query, key, value, mask
    mask = mask.unsqueeze(0) if mask is not None and mask.dim() == 3 else mask
    return query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), mask


def _heads_fit(rules: Release, query, key, value, takes_groups: bool, values_alike: bool = True) -> bool:
    """Return whether a fused kernel supports the head counts of tensors (batch, heads, length, head size).

    `takes_groups`: query heads may share keys and values; `values_alike`: there must be as many value as key heads.
    """
    heads, keys, values = (tensor.shape[1] for tensor in (query, key, value))
    if takes_groups:
        return (keys == values or not values_alike) and not heads % keys
    return heads == keys == values or (rules.groups_attention and keys == values == 1)


def _fits_cudnn(rules: Release, capability, query, key, value, mask, dropout, trains) -> bool:
    head, value_head = query.shape[-1], value.shape[-1]
    sizes, limit = (head, value_head), 128
    if rules.groups_attention and (capability == (9, 0) or capability[0] == 10):
        limit = 256  # for more than 128 its backward supports few sizes (check_cudnn_d256_bprop_head_dim)
        if trains and max(sizes) > 128 and sizes not in ((192, 128), (256, 256)):
            return False
    elif capability == (9, 0):
        limit = 256
    elif capability[0] == 10 and sizes == (192, 128):
        limit = 192
    return (
        max(sizes) <= limit
        and not (head % 8 or value_head % 8)
        and not dropout * 16 % 1
        and key.shape[2] > 1
        and not (query.shape[2] == 1 and (dropout or (rules.torch == "2.14" and capability[0] == 10)))
        and (mask is None or _mask_fits_cudnn(mask, query, key))
    )


def _mask_fits_cudnn(mask, query, key) -> bool:
    shape = *query.shape[:3], key.shape[2]
    fits = all(have in (1, want) for have, want in zip(mask.shape[::-1], shape[::-1], strict=False))
    return fits and mask.dim() in (2, 4) and not mask.requires_grad


def _fits_flash(capability, query, key, value, dropout, causal, trains) -> bool:
    head = query.shape[-1]
    # The backward pass of the largest heads needs more shared memory than consumer GPUs have.
    is_small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    too_large = trains and is_small and head > 192 and (head <= 224 or dropout)
    return (
        head == key.shape[-1] == value.shape[-1] <= 256
        and not too_large
        and not (causal and query.shape[2] != key.shape[2])
    )


def _padded(tensor):
    """Return the tensor with its last dimension padded with zeros to a multiple of 8."""
    missing = -tensor.shape[-1] % 8
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
