"""Apply CUDA's autocast rules under `torch.autocast("cpu")`: they decide the type in which each operator computes.

On CUDA each operator is on one list: it runs in 16 bits, in fp32, or in the widest type of its operands. The CPU has
other lists. `emulated` registers CUDA's rules for the CPU in torch's dispatcher. Like CUDA, it keeps the cast of a
weight until autocast ends. Source: ATen/autocast_mode.h (AT_FORALL_...) and ATen/autocast_mode.cpp (cached_cast).
"""

import contextlib
import functools
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from trainmem.core.outcomes import Invalid
from trainmem.estimate.allocator_settings import newest

_LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))  # operators of each list
# Norms without an argument for the result's type run as an overload that has one.
_NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}

Arguments = tuple[tuple, dict[str, Any]]  # the positional and the named arguments of an operator


@contextlib.contextmanager
def emulated(library: torch.library.Library) -> Iterator[None]:
    """Make `torch.autocast("cpu")` follow CUDA's rules in this context, and make a Trainer with fp16=True use autocast.

    Args:
        library: a `Library("aten", "IMPL")`, which receives the rules. The caller destroys it after this context.
    """
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    own = [[name for name in registered(key) if name.startswith("aten::")] for key in ("AutocastCUDA", "AutocastCPU")]
    cuda, cpu = ({name.removeprefix("aten::") for name in names} for names in own)  # torchvision registers some too
    casts, fallthrough = _Casts(), torch.library.fallthrough_kernel  # fallthrough: what the CPU casts and CUDA does not
    rules = casts.rules()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in sorted(cuda | cpu):
            rule = functools.partial(_ruled, rules.get(name, _no_rule), name) if name in cuda else fallthrough
            library.impl(name, rule, "AutocastCPU")
    clear = torch.clear_autocast_cache

    def clear_all(*args, **options):
        casts.kept.clear()
        clear(*args, **options)

    # `torch.autocast` calls `clear_all` when the outermost context ends.
    with patch.object(torch, "clear_autocast_cache", clear_all), _fp16_trainings_autocast(), _cuda_is_meant():
        yield


class _Casts:
    """Cast operands by CUDA's rules for autocast, see `rules`; the cast of a weight is kept until autocast ends."""

    def __init__(self):
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # {id of a weight: (weight, its cast)}

    def rules(self) -> dict[str, Callable[[str, tuple, dict], Arguments]]:
        """Return {operator: rule}; a rule is a function (operator's name, args, kwargs) -> (new args, new kwargs)."""
        lists = {
            "lower_precision": self._lower,
            "fp32": self._fp32,
            "fp32_result": _fp32_result,
            "widest": self._widest,
        }
        rules = {name: rule for which, rule in lists.items() for name in _LISTS[which].split()}
        return rules | dict.fromkeys(_NORMS, _fp32_norm) | {"binary_cross_entropy": _banned}

    def _lower(self, _, args, kwargs) -> Arguments:
        return self._cast((args, kwargs), torch.get_autocast_dtype("cpu"))

    def _fp32(self, _, args, kwargs) -> Arguments:
        return self._cast((args, kwargs), torch.float32)

    def _widest(self, _, args, kwargs) -> Arguments:
        wide = any(_is_cast(leaf) and leaf.dtype is torch.float32 for leaf in tree_leaves((args, kwargs)))
        return self._cast((args, kwargs), torch.float32 if wide else torch.get_autocast_dtype("cpu"))

    def _cast(self, arguments: Arguments, dtype: torch.dtype) -> Arguments:
        """Return the arguments with their tensors cast to `dtype`."""
        cast = functools.partial(tree_map, lambda leaf: self._cast_one(leaf, dtype) if _is_cast(leaf) else leaf)
        args, kwargs = arguments
        # torch's C++ code evaluates arguments from the last to the first; tensors of a list are cast in their order.
        options = {name: cast(value) for name, value in reversed(kwargs.items())}
        return tuple([cast(value) for value in reversed(args)][::-1]), options

    def _cast_one(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor cast to `dtype`; an fp32 weight is cast to 16 bits only once (torch: cached_cast)."""
        if tensor.dtype is dtype:
            return tensor
        is_weight = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        is_kept = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
        if not is_weight or dtype is not torch.get_autocast_dtype("cpu") or not is_kept:
            return tensor.to(dtype)
        if id(tensor) not in self.kept:
            self.kept[id(tensor)] = (tensor, tensor.to(dtype))
        return self.kept[id(tensor)][1]


def _is_cast(leaf: Any) -> bool:
    """Return whether autocast casts `leaf`: a tensor on the device, in floating point of at most 32 bits."""
    # A real (not fake) tensor without dimensions counts as a number on the host.
    if not isinstance(leaf, torch.Tensor) or not (isinstance(leaf, FakeTensor) or leaf.dim()):
        return False
    return leaf.is_floating_point() and leaf.dtype is not torch.float64


def _ruled(rule, name, *args, **kwargs):
    """Run the operator `name` with autocast off, on arguments that `rule` has converted, and return its result."""
    function = overload(_NORMS.get(name, name))
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(below):
        args, kwargs = rule(name, args, kwargs)
        result = function(*args, **kwargs)
    while args:  # free the last argument last, as C++ does
        args = args[1:]
    return result


def _fp32_result(name, args, kwargs) -> Arguments:
    """Return the arguments of a sum or product, with `dtype` fp32 unless the caller requested a type."""
    index = [argument.name for argument in overload(name)._schema.arguments].index("dtype")
    given = args[index] if len(args) > index else kwargs.get("dtype")
    if given is not None or not _is_cast(args[0]):
        return args, kwargs
    return args[:index], kwargs | {"dtype": torch.float32}


def _fp32_norm(name, args, kwargs) -> Arguments:
    """Return the arguments for a norm's overload that takes `dtype`, the type of the result (see `_NORMS`)."""
    defaults = [argument.default_value for argument in overload(name)._schema.arguments]
    dtype = torch.float32 if _is_cast(args[0]) else args[0].dtype
    return (*args, *defaults[len(args) :]), kwargs | {"dtype": dtype}


def _banned(name, *_):
    raise RuntimeError(f"{name} is not allowed under autocast on CUDA: use binary_cross_entropy_with_logits")


def _no_rule(name, *_):
    """Raise RuntimeError for an operator that is on none of CUDA's autocast lists."""
    # In a CUDA build of torch, `_cudnn_rnn` has this rule, too; torch never calls it with CPU tensors.
    remedy = f"use torch {newest()} or older"
    raise RuntimeError(f"the rule by which torch {torch.__version__} autocasts {name} on CUDA is unknown: {remedy}")


def _fp16_trainings_autocast() -> contextlib.AbstractContextManager:
    """Return a context in which accelerate, and so the Trainer, uses autocast and scales the loss under fp16=True."""
    from accelerate import Accelerator

    prepare = Accelerator.__init__

    @functools.wraps(prepare)
    def preparing(self, *args, **kwargs):
        prepare(self, *args, **kwargs)
        # Without a GPU, accelerate uses neither autocast nor a scaler.
        if self.mixed_precision == "fp16" and self.scaler is None:
            options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", **options)

    return patch.object(Accelerator, "__init__", preparing)


@contextlib.contextmanager
def _cuda_is_meant() -> Iterator[None]:
    """Make `torch.autocast("cuda")` and `torch.amp.GradScaler` work, which torch ignores on a machine without a GPU."""
    autocast, scaler = torch.amp.autocast, torch.amp.GradScaler
    plain, plain_scaler = autocast.__init__, scaler.__init__
    is_on, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def is_enabled(device_type="cuda", *args, **options):
        return is_on("cpu" if device_type == "cuda" else device_type, *args, **options)

    def enabled_dtype(device_type, *args, **options):
        return dtype_of("cpu" if device_type == "cuda" and is_on("cpu") else device_type, *args, **options)

    def init(self, device_type, dtype=None, *args, **kwargs):
        is_cuda = device_type == "cuda"
        dtype = torch.get_autocast_dtype("cuda") if is_cuda and dtype is None else dtype
        plain(self, "cpu" if is_cuda else device_type, dtype, *args, **kwargs)

    def init_scaler(self, device="cuda", *args, **kwargs):
        plain_scaler(self, "cpu" if device == "cuda" else device, *args, **kwargs)

    answers = patch.multiple(torch, is_autocast_enabled=is_enabled, get_autocast_dtype=enabled_dtype)
    with answers, patch.object(autocast, "__init__", init), patch.object(scaler, "__init__", init_scaler):
        yield


def overload(name: str) -> torch._ops.OpOverload:
    """Return an operator of aten by its name, e.g. "sum.dim_IntList"; "mm" is short for "mm.default"."""
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), which or "default")


SCALER_ERROR = (
    "this training fails: {why}. With fp16=True trainable weights must be in float32: give dtype='float32', or "
    "bf16=True instead of fp16=True"
)


NORM_ERROR = (
    "this training fails: on a CPU torch has no norm kernel for inputs in {} and weights in {}. Give "
    "dtype='float32', or leave bf16 out"
)


@contextlib.contextmanager
def scaler_failures() -> Iterator[None]:
    """Raise `Invalid`, with a remedy, in place of torch's ValueError that refuses to unscale gradients in fp16.

    The training would fail in the same way on a GPU.
    """
    try:
        yield
    except ValueError as error:
        if "unscale FP16" not in str(error):
            raise
        raise Invalid(SCALER_ERROR.format(why=str(error).rstrip("."))) from error
