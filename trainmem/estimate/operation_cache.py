"""Cache the results of operations on fake tensors, because torch's own computation takes most of a trace's time."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from trainmem.core.outcomes import Invalid
from trainmem.estimate.sparse import sparse_spec
from trainmem.estimate.trace_records import Operation, Spec, Structure, nested
from trainmem.measure.tracker import name_of

IN_PLACE = "in place"  # the operation returns its first argument, or nothing
_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)  # arguments kept as they are


@dataclass(frozen=True, slots=True)
class View:
    """Hold shape, strides, type and offset of a result that shares the memory of the operation's first argument."""

    spec: Spec
    offset: int  # in elements


class OperationCache:
    """Cache what operations return on fake tensors, by their arguments.

    Computing these results takes most of the time of a trace, and the results depend only on the arguments. A result is
    kept if it can be rebuilt from `Spec`s (shape, strides, type), or from a `View` of the first argument.

    Args:
        known: {key of an operation and its arguments: how to rebuild the result}; may have other entries too, e.g. the
            operator workspaces of a `Probe` (see `operator_workspaces`). New results are added to this dictionary.
            None: start with an empty dictionary.
        device: the device whose kernels are assumed: "cpu", or e.g. "cuda, torch 2.15".
    """

    def __init__(self, known: dict[tuple, Any] | None = None, device: str = "cpu"):
        self.known = {} if known is None else known
        self._device = device
        self.on_host = False  # whether a GPU's training runs the operation on the host
        self.within: torch.dtype | None = None  # autocast's type, on which 4-bit matmuls also depend

    def result(self, operation: Operation, function, args: tuple, tensors: list, mode: FakeTensorMode, ask: Callable):
        """Return an operation's result on fake tensors: from the cache or, if the cache has none, from `ask`.

        Args:
            operation: the call as an `Operation`, whose signature is part of the cache's key.
            function, args: the operator, and its positional arguments.
            tensors: the tensors among its arguments.
            mode: the mode of new fake tensors.
            ask: function that runs the operation on the fake tensors; its result is then cached.
        """
        offset = args[0].storage_offset() if args and isinstance(args[0], torch.Tensor) else 0
        about = operation.structure, offset, self.on_host, self.within, torch.get_default_dtype()
        key = self._device, *operation.signature, *about
        made = self.known.get(key)
        if made is None:
            result = ask()
            self._keep(key, function, args, result, tensors)
            return result
        if made == IN_PLACE:  # not `is`: it may come from another process
            return args[0] if function._schema.returns else None
        if type(made) in (tuple, list):
            return type(made)(part if part is None else fake(part, mode) for part in made)
        return fake(made, mode, args[0])

    def _keep(self, key: tuple, function, args: tuple, result: Any, tensors: list[torch.Tensor]) -> None:
        """Store an operation's result under `key` if the result can be rebuilt later; arguments as in `result`."""
        if torch.Tag.inplace_view in function.tags or key[1].startswith(("aten.resize", "aten.set")):
            return
        if function._schema.is_mutable:
            on_fake = tensors and isinstance(tensors[0], FakeTensor)
            if on_fake and ((result is None and not function._schema.returns) or result is args[0]):
                self.known[key] = IN_PLACE
        elif type(result) in (tuple, list):
            made = type(result)(None if part is None else _made(part, tensors) for part in result)
            if all(part is None or type(new) is Spec for part, new in zip(result, made, strict=True)):
                self.known[key] = made
        else:
            made = _made(result, tensors)
            if type(made) is Spec or (type(made) is View and args[0] is tensors[0]):
                self.known[key] = made


def _made(result: Any, tensors: list[torch.Tensor]) -> Spec | View | None:
    """Return how to rebuild one value that an operation returned, or None if the value cannot be rebuilt.

    `tensors`: the tensors among the operation's arguments.
    """
    if not isinstance(result, FakeTensor) or result.requires_grad or result.fake_device.type == "meta":
        return None
    if result.is_sparse:
        return None
    spec = spec_of(result)
    storage = result.untyped_storage()
    shared = [tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors]
    if any(shared):
        on_first = shared[0] and tensors[0].dtype is result.dtype
        return View(spec, result.storage_offset()) if on_first else None
    last = sum((size - 1) * step for size, step in zip(result.shape, result.stride(), strict=True)) + 1
    fills = storage.nbytes() == last * result.itemsize * (result.numel() > 0)
    return spec if fills else None  # all of a storage of its own


def spec_of(tensor: torch.Tensor) -> Spec:
    """Return the shape, strides and type of a tensor."""
    return Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def fake(made: Spec | View, mode: FakeTensorMode, base: torch.Tensor | None = None) -> FakeTensor:
    """Return a fake tensor with the shape, strides and type of `made`; a view shares the memory of `base`.

    `mode`: the mode of the fake tensor.
    """
    if type(made) is View:
        with torch._C._DisableTorchDispatch():
            plain = torch.as_strided(base, made.spec.shape, made.spec.stride, made.offset)
    else:
        plain = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
    return _wrapped(plain, mode)


def _wrapped(plain: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    """Return a tensor of device "meta" as a fake tensor of device "cpu"."""
    tensor = torch.Tensor._make_subclass(
        FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=torch.device("cpu")
    )
    tensor.__dict__.update(_state(mode))
    return tensor


def own_result(mode: FakeTensorMode, function, *args, **kwargs) -> Any:
    """Return an operation's result on fake tensors if torch's fake kernel is missing or wrong; None: torch's is right.

    Args:
        mode: the mode of new fake tensors.
        function, args, kwargs: the operator and its arguments.

    Raises:
        DynamicOutputShapeException: values decide the shape of the result.
    """
    aten = torch.ops.aten
    if function is aten._efficientzerotensor.default:  # forward-mode derivatives: zeros without memory
        with _disable_current_modes():
            return _wrapped(torch._efficientzerotensor(*args, **kwargs | {"device": "meta"}), mode)
    if function.overloadpacket is aten._to_sparse and not args[0].is_sparse:  # torch's has no elements
        raise DynamicOutputShapeException(function)
    if function.overloadpacket is aten._ctc_loss and (states := states_of_ctc(*args[1:4])):
        return alignments(args[0], states)
    if function is aten._grouped_mm.default:
        return grouped_product(*args, **kwargs)
    is_sum = function is aten.add_.Tensor and isinstance(args[1], torch.Tensor)
    return args[0] if is_sum and args[1].is_sparse else None  # torch's would read the indices


def grouped_product(first, second, offsets=None, bias=None, out_dtype=None) -> torch.Tensor:
    """Return the fake result of `aten._grouped_mm`, for which torch supports fake tensors only in bfloat16.

    The rows of the result begin at multiples of 16 bytes. The arguments are those of the operation.

    Raises:
        Invalid: the rows of an operand do not begin at multiples of 16 bytes, as the kernel requires.
    """
    if any(max(each.stride()[-2:]) * each.itemsize % 16 for each in (first, second)):
        raise Invalid("grouped matmuls need strides that are multiples of 16 bytes: choose such sizes")
    groups = [len(offsets)] if first.dim() == second.dim() == 2 else [first.shape[0]] * (first.dim() == second.dim())
    rows, columns = first.shape[-2], second.shape[-1]
    unit = 16 // (out_dtype or first.dtype).itemsize
    step = -(-columns // unit) * unit
    shape = [*groups, rows, columns]
    return first.new_empty_strided(shape, [rows * step, step, 1][-len(shape) :], dtype=out_dtype or first.dtype)


def states_of_ctc(targets: torch.Tensor, _, lengths) -> int | None:
    """Return how many states CTC's loss aligns: 2 x (length of the longest transcript) + 1; None: unknown.

    `lengths`: the transcripts' lengths, a tensor or a list of numbers.
    """
    if isinstance(lengths, FakeTensor):  # assumed: the longest transcript fills a row of `targets`, if it has rows
        return 2 * targets.shape[1] + 1 if targets.dim() == 2 else None
    with _disable_current_modes():
        return 2 * int(torch.as_tensor(lengths).max()) + 1


def alignments(log_probabilities: torch.Tensor, states: int) -> tuple:
    """Return fake results of CTC's loss function: (losses, log-probabilities of alignments).

    The shapes are (batch,) and (batch, time steps, states). `log_probabilities`: (time steps, batch, classes).
    """
    steps, batch, _ = log_probabilities.shape
    return log_probabilities.new_empty(batch), log_probabilities.new_empty(batch, steps, states)


def viewed(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor's view with the strides that torch gives a real tensor's view.

    torch's fake kernel chooses other strides for dimensions of length 1. With those strides, torch would treat a batch
    of one sample as channels last in a convolution.
    """
    with _disable_current_modes():
        real = torch.empty_strided(tensor.shape, tensor.stride(), device="meta").view(view.shape)
    return torch.ops.aten.as_strided.default(tensor, real.shape, real.stride(), view.storage_offset())


# Losses whose kernels shrink the result to one number only after computing all elements, and keep that memory.
_LOSSES = ("binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss")
REDUCED_IN_PLACE = {getattr(torch.ops.aten, name).default for name in _LOSSES}
_LOSSES_BACKWARD = {getattr(torch.ops.aten, f"{name}_backward").default for name in _LOSSES[1:3]}
# The weight's argument number.
WEIGHT_OF_NORM = {
    torch.ops.aten.native_layer_norm.default: 2,
    torch.ops.aten.native_batch_norm.default: 1,
    torch.ops.aten.native_group_norm.default: 1,
}


def as_norms_do(function, args: tuple, result: Any) -> Any:
    """Return an operation's fake result; for a norm or its backward, with the real kernel's types and layouts.

    torch's fake kernels return other types for a norm's statistics and for the input gradient of group norm, and
    another layout for the gradients of layer norm.

    Args:
        function, args: the operator, which need not be a norm, and its positional arguments.
        result: the result of torch's fake kernel; it is returned unchanged if nothing has to be corrected.
    """
    weight = args[WEIGHT_OF_NORM[function]] if function in WEIGHT_OF_NORM else None
    if weight is not None:
        # The kernel keeps mean and deviation in the weights' type, which autocast leaves at float32.
        out, *statistics = result
        return out, *(each.to(weight.dtype) for each in statistics)
    if function is torch.ops.aten.native_group_norm_backward.default and result[0] is not None:
        # The kernel's gradient has its input's type, torch's fake one the type of the statistics.
        return result[0].to(args[1].dtype), *result[1:]
    # The kernel's result is contiguous whatever the layout of its input.
    if function in _LOSSES_BACKWARD:
        return result.contiguous()
    if function is torch.ops.aten.native_layer_norm_backward.default:
        return tuple(part if part is None else part.contiguous() for part in result)
    return result


def operation_of(function, args, leaves: list, structure: Structure) -> Operation:
    """Return an operator call as an `Operation`, in which tensors are replaced by their `Spec`s.

    Args:
        function, args: the operator, and its positional arguments.
        leaves: all arguments, positional and named, as one list; see `trace_records.flat`.
        structure: how the leaves are grouped into arguments, which `trace_records.flat` returns too.
    """
    kept = [
        (sparse_spec(leaf) if leaf.is_sparse else Spec(tuple(leaf.shape), leaf.stride(), leaf.dtype))
        if isinstance(leaf, torch.Tensor)
        else leaf
        if isinstance(leaf, _PLAIN)
        else None
        for leaf in leaves
    ]
    takes_list = any(isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor) for arg in args)
    return Operation(name_of(function), tuple(kept), structure, takes_list)


def by_position(function, args: tuple, selected: Callable[[torch.Tensor], int] | None = None) -> tuple[Callable, tuple]:
    """Return (operation, arguments) with each boolean mask replaced by the positions that it selects, as kernels do.

    The operation stays the same, but `masked_select` becomes `index`.

    Args:
        function: `aten.masked_select`, or an operation whose second argument is a list of indices, e.g. `aten.index`.
        args: the operation's positional arguments.
        selected: function of a mask, called for masks whose values are unknown (fake tensors); it returns how many
            elements the mask selects. None: such masks are not replaced.
    """
    if function is torch.ops.aten.masked_select.default:
        function, args = torch.ops.aten.index.Tensor, (args[0], [args[1].expand(args[0].shape)])
    indices = []
    for index in args[1]:
        is_mask = index is not None and index.dtype is torch.bool
        if is_mask and not isinstance(index, FakeTensor):
            indices += index.nonzero().unbind(1)
        elif is_mask and selected:
            count = selected(index)
            indices += [index.new_empty(count, dtype=torch.int64) for _ in index.shape]
        else:
            indices.append(index)
    return function, (args[0], indices, *args[2:])


@functools.lru_cache(maxsize=1)
def _state(mode: FakeTensorMode) -> dict[str, Any]:
    """Return the Python attributes of a new fake tensor, as {name: value}; `fake` copies them into each tensor."""
    # Setting the attributes one by one would take longer than running an operation.
    return dict(FakeTensor(mode, torch.empty(0, device="meta"), torch.device("cpu")).__dict__)


def uniform_value(operation: Operation, leaves: list, any_known: bool) -> float | int | bool | None:
    """Return the value that all elements of an operation's result have; None: unknown, or the elements differ.

    Tensors are assumed to be finite, so isnan(x) is False everywhere. Operations of `_UNIFORM_OPERATIONS` are computed
    on one element if, for each tensor among the arguments, all elements are known to be equal.

    Args:
        operation: the call as an `Operation`.
        leaves: the operation's arguments as one list, see `trace_records.flat`.
        any_known: whether there is a tensor among the arguments whose elements are known to be equal.
    """
    name = operation.name
    if name in _RESULT_IF_FINITE:
        of_finite, other = _RESULT_IF_FINITE[name], leaves[1] if len(leaves) > 1 else None
        if name == "aten.isnan.default" or leaves[0] is other or (type(other) is float and math.isinf(other)):
            return of_finite
    if not any_known or operation.takes_list:
        return None
    values = [getattr(leaf, "uniform", None) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    # A sum of zeros is zero; any other sum depends on the number of elements.
    if None in values or not name.startswith(_UNIFORM_OPERATIONS) or (name.startswith("aten.sum") and any(values)):
        return None
    leaves = [
        torch.full((1,) * leaf.dim(), leaf.uniform, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    args, kwargs = nested(leaves, operation.structure)
    with torch._C._DisableTorchDispatch():
        return operation.function(*args, **kwargs).flatten()[0].item()


# Comparisons of a tensor with itself or with infinity, and their results for a finite tensor.
_RESULT_IF_FINITE = {
    "aten.isnan.default": False,
    "aten.eq.Tensor": True,
    "aten.ne.Tensor": False,
    "aten.eq.Scalar": False,
    "aten.ne.Scalar": True,
}
# Operations whose result is uniform if their operands are.
_UNIFORM_OPERATIONS = tuple(
    f"aten.{name}."
    for name in ("all", "any", "sum", "mul", "eq", "ne", "logical_not", "logical_or", "logical_and", "bitwise_not")
)
