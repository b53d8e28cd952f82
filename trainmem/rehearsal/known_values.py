"""Track which values are known in a rehearsal, where no kernel computes.

Device memory is host memory in a rehearsal. A small tensor of whole numbers or booleans that is made from known values
is therefore really computed: by the same operation on the CPU, in the memory of the device's tensor. Masks, positions,
labels, counts and lengths are then right, and code that depends on them takes the same branches as on a device.
Floating-point values are unknown, with two exceptions: small tensors that the host has written are known, and so is the
sign of a norm (not negative). The one assumption: a test for NaN or infinity finds none.

Code that reads an unknown value as a float gets an `Unknown`; other reads raise `NeedsValues`. With
`Values(assumes=True)` all these reads return an assumed value, so that the program reaches its end: floating-point
numbers are 1, comparisons are false, whole numbers are 0, and positions from sorting are in order. `Values` counts how
often it assumed a value.

`Values` is a function mode, not a dispatch mode: it sees calls from Python and does not affect autograd's own
operations.
"""

import collections
import math
import os
import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainmem.core.stack_dumps import is_library
from trainmem.rehearsal import recurrent_layers
from trainmem.rehearsal.device_memory import (
    FACTORIES,
    address_of,
    compute,
    memory_of,
    on_cpu,
    out_of_sight,
    tensors_of,
)
from trainmem.rehearsal.needed_libraries import explained, shaped
from trainmem.unknown import CHECKS, Assumed, NeedsLibrary, NeedsValues, Unknown, passing_answer

WHY = "a rehearsal computes no floating-point values"
LIBRARIES = "results of CUDA libraries, without their workspace"
ASSUMED = "assumed"  # instead of True: known, because it was assumed
MASKS = {torch.bool, torch.uint8}
EXACT = MASKS | {torch.int8, torch.int16, torch.int32, torch.int64}
LARGEST, LARGEST_FLOAT = 1 << 22, 256  # elements of a tensor that is computed: of a type in EXACT, of another type
LARGEST_COPIED = 4 << 20  # bytes of a block that the stub copies
LARGEST_SIGNED = 1 << 12  # elements of a tensor whose sign is tracked
LARGE_WEIGHT = 1 << 20  # elements of a host tensor that is not filled with random numbers

# Names of torch's functions: those that read values, those whose result's size depends on values, tests
# for non-finite values (with their answers), random initializers, and those that overwrite all values.
_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__"}
_READS |= {"is_nonzero", "__contains__", "equal", "allclose", "__repr__", "__format__"}
_COMPARES = {"__contains__", "equal", "allclose"}  # of these, those that allocate tensors on the way
_TRUTHS = {"__bool__", "is_nonzero", *_COMPARES}  # and those that answer a question
_SIZED_BY_VALUES = {"nonzero", "argwhere", "unique", "unique_consecutive", "unique_dim", "masked_select", "bincount"}
_SIZED_BY_VALUES |= {"repeat_interleave", "where", "one_hot", "_unique2"}
_OF_ONE_VALUE = {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
_IN_ORDER = {"topk": 2, "sort": 1, "argsort": 1, "multinomial": None}  # with the index of the argument `dim`
_CHOICES = {torch.bool, torch.int16, torch.int32, torch.int64}  # types of masks and positions, not of packed weights
_COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne", "less", "less_equal", "greater", "greater_equal", "not_equal"}
_FINITE = {"isnan": False, "isinf": False, "isneginf": False, "isposinf": False, "isfinite": True}
_RANDOM_FILLS = {"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_"}
_RANDOM_FILLS |= {"xavier_normal_", "orthogonal_", "bernoulli_"}
_OVERWRITES = {"copy_", "fill_", "zero_"}
# Functions whose results are never negative, and those whose results are not negative if no argument is.
_NORMS = {"norm", "vector_norm", "linalg_vector_norm", "abs", "square", "sqrt"}
_KEEP_SIGN = {"to", "float", "double", "half", "bfloat16", "cuda", "detach", "clone", "stack", "cat", "sum", "mean"}
_KEEP_SIGN |= {"max", "amax", "pow", "__pow__", "div", "true_divide", "__truediv__", "mul", "__mul__", "add", "__add__"}
_KEEP_SIGN |= {"where"}
_KEEP_POSITIONS = {"sparse_coo_tensor", "to", "cuda", "clone", "detach", "mul", "div", "float", "half", "double"}
_TAKES_TYPE = {"to", "type_as"}  # they may take device and type, but no values, from a second tensor


class Values(TorchFunctionMode):
    """Track which tensors have known values while this function mode is on.

    A small device tensor is computed on the CPU if the values from which it is made are known.

    Args:
        assumes: whether code that reads an unknown value gets an assumed value; otherwise the read raises `NeedsValues`
            or returns an `Unknown`.
    """

    def __init__(self, assumes: bool = False):
        super().__init__()
        self.assumes = assumes
        self.answers: collections.Counter[str] = collections.Counter()  # number of assumed answers, by kind
        # Storages with a note, by address, while they are alive: `is_known` (without a note: the host's values are, the
        # device's are not) and `is_norm`. Other storages are not kept: each Python object is a second reference, and
        # autograd adds to a gradient in place only if it holds the only one.
        self._storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        # Weights of embeddings with sparse gradients, and whether the token ids of the forward pass are known.
        self._embeddings: list[tuple[weakref.ref, int, bool]] = []
        # The targets that count in the last `cross_entropy`: with weights and label smoothing, it selects them.
        self._targets = torch.empty(0, dtype=torch.bool, device="cpu")

    def is_known(self, tensor: torch.Tensor) -> bool | str:
        """Return whether all values of a tensor are known; `ASSUMED` if they were assumed or made from such values."""
        return getattr(self._noted(tensor), "is_known", not tensor.is_cuda)

    def mark(self, known: bool | str, *tensors: torch.Tensor) -> None:
        """Note that all values of these tensors are known (True), assumed (`ASSUMED`) or unknown (False).

        While a CUDA graph is captured, tensors on a device are noted as unknown, whatever `known` is, because each
        replay of the graph changes them.
        """
        for tensor in tensors:
            is_known = not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()) and known
            if self.is_known(tensor) != is_known:
                self._remember(tensor).is_known = is_known

    def is_unknown_block(self, address: int) -> bool:
        """Return whether a storage that begins at this address is noted as unknown."""
        return not getattr(self._storages.get(address), "is_known", True)

    def note_copy(self, source: torch.UntypedStorage, copied: torch.UntypedStorage) -> None:
        """Note that the values of `copied` are unknown, if the values of `source` are unknown.

        `copied`: a storage on the host, into which the storage `source` was copied.
        """
        noted = self._storages.get(source.data_ptr())
        if not getattr(noted, "is_known", not source.is_cuda) and copied.data_ptr():
            self._storages[copied.data_ptr()] = copied
            copied.is_known = False

    def _noted(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """Return a tensor's storage, or None if this object has no note about this storage."""
        storage = self._storages.get(address_of(tensor))
        # A note may be about an earlier storage, which was freed and had the same address.
        return storage if storage is not None and storage._cdata == tensor.untyped_storage()._cdata else None

    def _remember(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = self._storages[address_of(tensor)] = tensor.untyped_storage()
        return storage

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = self._call(function, types, args, kwargs or {})
        if getattr(function, "__name__", "") in _KEEP_POSITIONS and getattr(made, "layout", None) == torch.sparse_coo:
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            positions = [each._indices() if each.layout == torch.sparse_coo else each for each in given]
            known = all(self.is_known(each) for each in positions if each.dtype == torch.int64)
            self.mark(known and made._nnz() * made.sparse_dim() <= LARGEST_COPIED // 8, made._indices())
        return made

    def note_sparse_gradients(self) -> None:
        """Note whether the positions in embeddings' sparse gradients are known. Call this after each backward pass.

        The positions are copies of the token ids of a lookup: known if these ids are known and few. A gradient summed
        over two lookups has more positions than a lookup has ids, and is skipped.
        """
        for weight, count, known in self._embeddings:
            gradient = getattr(weight(), "grad", None)
            if gradient is not None and gradient.is_sparse and gradient._nnz() == count:
                self.mark(known and count <= LARGEST_COPIED // 8, gradient._indices())
        self._embeddings.clear()

    def _call(self, function, types, args, kwargs):
        """Return a torch function's result, from torch or e.g. from `_read`; note which tensors have known values."""
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return function(*args, **kwargs)
        if name == "type" and (kind := args[1:] and _legacy_type(args[1])):  # `.to` does the same, and is tracked
            device = args[0].device if args[0].is_cuda else torch.device("cuda")
            return self.__torch_function__(torch.Tensor.to, types, (args[0], device, kind.dtype))
        leaves = tree_leaves((args, kwargs))
        given = tensors_of(leaves)  # the tensors among the arguments
        if name in ("embedding", "embedding_bag") and kwargs.get("sparse") and len(given) > 1 and given[1].is_cuda:
            self._embeddings.append((weakref.ref(given[1]), given[0].numel(), self.is_known(given[0])))
        if any(isinstance(leaf, Unknown) for leaf in leaves) and name not in _READS:
            made = function(*args, **kwargs)
            self.mark(False, *(tensors_of(made) or given[:1]))
            return made
        on_device = any(tensor.is_cuda for tensor in given)
        is_random = name in _RANDOM_FILLS and len(given) == 1 and given[0].numel() >= LARGE_WEIGHT
        if is_random and not on_device and torch.cuda.is_available():  # nothing will read the values of these weights
            self.mark(False, *given)
            return given[0]
        if not on_device and all(map(self.is_known, given)):
            made = function(*args, **kwargs)
            if torch.cuda.is_initialized():
                self._note_arrivals(function, name, args, kwargs, given, made)
            return made
        if name in _READS and given:
            return self._read(function, name, args, kwargs, given)
        if name in _SIZED_BY_VALUES and _is_sized_by_values(name, args, kwargs):
            return self._sized_by_values(function, args, kwargs, given)
        if name == "histc" and kwargs.get("min", 0) == kwargs.get("max", 0):  # it would take the bounds from the values
            kwargs = {**kwargs, "max": kwargs.get("min", 0) + 1}
        if self.assumes and on_device and name in recurrent_layers.FUNCTIONS and torch.backends.cudnn.enabled:
            function = recurrent_layers.without_cudnn(function, self.answers)
        if name == "cross_entropy" and self.is_known(args[1]):
            self._targets = memory_of(args[1]) != kwargs.get("ignore_index", -100)
        resized_known = name == "resize_" and self.is_known(given[0])
        made = self._run(function, args, kwargs, given)
        if name == "resize_":  # it keeps the values, maybe in another storage
            self.mark(resized_known, made)
        else:
            self._note_results(function, name, args, kwargs, given, made)
        return made

    def _run(self, function, args, kwargs, given):
        """Return the result of a function that may need a CUDA library, which a rehearsal does not support.

        Raises:
            NeedsLibrary: values are not assumed, a gradient will be needed, or the result's shape is not known.
        """
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            # The same error as its own cause, or as a variable here, would keep the tensors of an attempt that ran out
            # of memory: a program that tries again with less would find less free memory than on a card.
            if explained(error) is error:
                raise
            why = str(explained(error))
            if not self.assumes:
                raise explained(error) from error
        self.answers[LIBRARIES] += 1
        # First such error: from now on the stub runtime accepts cuFFT and cuSPARSE, as if without workspace.
        if "REHEARSAL_LIBRARIES" not in os.environ:
            os.environ["REHEARSAL_LIBRARIES"] = "1"
            return self._run(function, args, kwargs, given)
        if (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)) or not given:
            raise NeedsLibrary(why)
        return shaped(function, args, kwargs, why)  # each later error, e.g. of cuSOLVER: no values

    def _note_arrivals(self, function, name, args, kwargs, given, made) -> None:
        """Compute the small device tensors that a function made from host arguments, and note them as known."""
        for tensor in tensors_of(made):
            copied = len(given) == 1 and given[0].shape == tensor.shape  # such a call copies to the device
            known = tensor.is_cuda and is_small(tensor, name) and (copied or (name in FACTORIES and not given))
            if known and compute(function, args, kwargs, [tensor]):
                self.mark(True, tensor)

    def _note_results(self, function, name, args, kwargs, given, made) -> None:
        """Compute those results of an operation whose values can be known, and note which results are known."""
        results = tensors_of(made)
        if not results and name != "__setitem__":
            return
        old = {*map(address_of, given)}
        fresh = [tensor for tensor in results if address_of(tensor) not in old]
        if name in ("_pack_padded_sequence", "_pad_packed_sequence") and self.is_known(given[1]):
            fresh = [tensor for tensor in fresh if tensor.is_cuda]  # lengths on the host are made from lengths alone
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or "out" in kwargs
        in_place = (in_place or name == "__setitem__") and name not in ("__invert__", "__index__")
        if name in ("ge", "__ge__") and sys._getframe(3).f_globals.get("__name__") == "torch.nn.modules._functions":
            return self.fill(fresh[0], True)  # SyncBatchNorm: no rank has an empty batch
        if name in _FINITE and len(fresh) == 1 and fresh[0].is_cuda and fresh[0].numel() <= LARGEST:
            return self.fill(fresh[0], _FINITE[name])
        if name in ("lt", "__lt__") and len(given) == 1 and args[1] == 0 and self._has_no_sign(given):
            return self.fill(fresh[0], False)  # libraries test whether a norm is negative
        takes_other = name == "where" and len(args) == 3 and self._is_all_false(args[0])
        chosen = args[2] if takes_other else (args, kwargs)
        if name in _NORMS or (name in _KEEP_SIGN and given and self._has_no_sign(chosen)):
            for tensor in (each for each in fresh if each.numel() <= LARGEST_SIGNED):
                self._remember(tensor).is_norm = True
        elif in_place and given and getattr(self._noted(given[0]), "is_norm", False):
            self._noted(given[0]).is_norm = name == "masked_fill_" and self._is_all_false(args[1])
        if not fresh and not in_place:
            return  # views
        small = all(tensor.numel() <= LARGEST for tensor in given)
        small = small and all(is_small(tensor, name, given) for tensor in fresh)
        whole = small and name in _OVERWRITES and len(given[0].untyped_storage()) == given[0].nbytes
        sources = [] if name in FACTORIES else given[1:] if whole else given[:1] if name in _TAKES_TYPE else given
        found = {*map(self.is_known, sources)}
        if small and False not in found and compute(function, args, kwargs, fresh):
            return self.mark(ASSUMED if ASSUMED in found else True, *fresh, *given[: whole or in_place])
        if not all(map(self.is_known, given)):
            caller = sys._getframe(3).f_globals.get("__name__", "")
            fresh = [each for each in fresh if not (self.assumes and self._choose(name, args, kwargs, each, caller))]
            self.mark(False, *(tensor for tensor in fresh if not tensor.is_cuda))
        several = name.startswith(("_foreach", "_fused")) or isinstance(function, torch._ops.OpOverload)
        if several:
            self.mark(False, *(tensor for tensor in given if tensor.dtype not in EXACT))
        elif in_place:
            self.mark(False, *tensors_of((args[:1], kwargs.get("out"))))

    def _has_no_sign(self, given: Any) -> bool:
        """Return whether every tensor and number among the arguments `given` is known not to be negative."""
        numbers = [leaf for leaf in tree_leaves(given) if isinstance(leaf, int | float)]
        if any(isinstance(number, Unknown) or number < 0 for number in numbers):
            return False
        return all(map(self._is_not_negative, tensors_of(given)))

    def _is_not_negative(self, tensor: torch.Tensor) -> bool:
        if tensor.numel() > LARGEST_SIGNED or tensor.is_complex():
            return False
        if getattr(self._noted(tensor), "is_norm", False):
            return True
        with out_of_sight():
            return self.is_known(tensor) and bool((memory_of(tensor) >= 0).all())

    def _is_all_false(self, mask: torch.Tensor) -> bool:
        with out_of_sight():
            return self.is_known(mask) and not memory_of(mask).any()

    def _read(self, function, name, args, kwargs, given):
        is_truth = name in _TRUTHS or (name == "item" and args[0].dtype == torch.bool)
        is_open = is_truth and not all(self.is_known(tensor) is True for tensor in given)
        if is_open and (passing := self._passing(sys._getframe(3))) is not None:
            if name in _COMPARES:  # for its allocations
                function(*args, **kwargs)
            return passing
        if all(map(self.is_known, given)):  # on the CPU, because printing a tensor computes with it
            if name in _COMPARES:  # run it on the device first, for its allocations
                function(*args, **kwargs)
            return on_cpu(function, args, kwargs)
        tensor = args[0]
        if name in ("__repr__", "__format__"):
            return f"tensor(unknown in a rehearsal, size={tuple(tensor.shape)}, dtype={tensor.dtype}, {tensor.device})"
        if self.assumes:
            return self._answer(function, name, args, kwargs)
        if tensor.dtype not in EXACT and name in ("item", "tolist"):
            return _nested(() if name == "item" else tensor.shape)
        raise NeedsValues(WHY)

    def _passing(self, frame: FrameType) -> bool | None:
        """Return the truth value passing the check that `frame` makes now, and count the check; None: no check."""
        if not self.assumes and not is_library(frame.f_code.co_filename):  # a check of the program itself
            return None
        if (passing := passing_answer(frame)) is not None:
            self.answers[CHECKS] += 1
        return passing

    def _answer(self, function, name, args, kwargs):
        """Return the assumed result of a function that reads an unknown value; count the assumption in `answers`."""
        tensor, is_float = args[0], args[0].dtype not in EXACT
        if name in _COMPARES:
            self.answers["comparisons of tensors, false"] += 1
            function(*args, **kwargs)  # run it for its allocations
            return False
        self.answers["floating-point values read, 1" if is_float else "whole numbers and masks read, 0"] += 1
        if name not in ("numpy", "__array__"):
            read = on_cpu(function, args, kwargs, self._assumed)
            return tree_map_only(float, lambda _: Assumed(self.answers), read) if name in ("item", "tolist") else read
        if not tensor.is_cuda:  # for a device's tensor, torch's own error is right
            whole = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(tensor.untyped_storage())
            self.fill(whole, self._assumed(whole))
        return function(*args, **kwargs)

    def _assumed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's values on the CPU; if the values are unknown, 1 for floats and 0 for other types."""
        if self.is_known(tensor):
            return memory_of(tensor)
        return torch.full((), tensor.dtype not in EXACT, dtype=tensor.dtype, device="cpu").expand(tensor.shape)

    def _choose(self, name: str, args: tuple, kwargs: dict, made: torch.Tensor, caller: str) -> bool:
        """Write assumed values into the result `made` if it is a mask or positions; return whether this was done.

        `name`: the function's name, e.g. "topk"; `caller`: the name of the module that calls the function.
        """
        if made.dtype not in _CHOICES or not 0 < made.numel() <= LARGEST:
            return False
        chosen: torch.Tensor | int = 0  # False in a mask
        bound = args[1] if len(args) == 2 and name.strip("_") in _COMPARISONS else None
        if isinstance(bound, float) and math.isinf(bound):  # unknown numbers are finite
            self.fill(made, getattr(torch.tensor(1.0, device="cpu"), name)(bound))
            return True
        if name in _IN_ORDER and made.dim():  # it sorts or samples: positions 0, 1, 2 and so on
            place = _IN_ORDER[name]
            dim = kwargs.get("dim", args[place] if place and len(args) > place else -1)
            count = args[0].shape[dim] if args else made.shape[dim]
            chosen = (torch.arange(made.shape[dim], device="cpu") % count).view(
                [-1, *[1] * (made.dim() - 1 - dim % made.dim())]
            )
        kind = "masks of a comparison, false" if made.dtype == torch.bool else "positions chosen, the first"
        # The first tokens have special meanings, such as padding.
        if name in ("argmax", "multinomial") and caller == "transformers.generation.utils":
            chosen, kind = chosen + args[0].shape[-1] // 2, "tokens generated, one in the middle of the vocabulary"
        self.answers[kind] += 1
        self.fill(made, chosen, ASSUMED)
        return True

    def _sized_by_values(self, function, args, kwargs, given):
        """Return the result, on the arguments' device, of a function whose result size depends on values."""
        if all(map(self.is_known, given)):
            device = next(tensor.device for tensor in given if tensor.is_cuda)
            made = on_cpu(function, args, kwargs)
            return tree_map_only(torch.Tensor, lambda tensor: self._arrive(tensor, device), made)
        exact = [tensor for tensor in given if tensor.dtype in EXACT]
        if exact and all(map(self.is_known, exact)):  # floats, selected by known values
            if function.__name__ == "masked_select":
                made = function(*args, **kwargs)  # it calls `positions`
                self.mark(False, made)
                return made
            if function.__name__ == "repeat_interleave":
                return function(*args, **kwargs, output_size=int(memory_of(exact[0]).sum()))
        if not self.assumes:
            raise NeedsValues(WHY)
        self.answers["sizes that depend on values"] += 1
        device = next((tensor.device for tensor in given if tensor.is_cuda), torch.device("cpu"))
        made = on_cpu(function, args, kwargs, self._assumed)
        return tree_map_only(torch.Tensor, lambda tensor: self._arrive(tensor, device), made)

    def positions(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the positions of a mask's True elements, in place of `aten.nonzero` for device tensors.

        torch calls `aten.nonzero` whenever code indexes with a mask, also in the backward pass.

        Raises:
            NeedsValues: the values of the mask are unknown, and this object does not assume values (`assumes=False`).
        """
        caller = sys._getframe().f_back  # None in a thread of autograd
        if not self.is_known(mask) and caller is not None and caller.f_code.co_name == "cross_entropy":
            self.fill(mask, self._targets)
        if not self.is_known(mask):
            if not self.assumes:
                raise NeedsValues(WHY)
            self.answers["sizes that depend on values"] += 1
        with out_of_sight():
            positions = (self._assumed(mask) if self.assumes else memory_of(mask)).nonzero()
        return self._arrive(positions.t().contiguous(), mask.device).t()

    def _arrive(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        on_device = tensor.to(device)
        if is_small(on_device, "to"):
            self.fill(on_device, tensor)
        return on_device

    def fill(self, tensor: torch.Tensor, value: torch.Tensor | bool, known: bool | str = True) -> None:
        """Write values into the memory of a tensor, and note that they are known (True) or assumed (`ASSUMED`).

        `value`: a tensor of the same shape, or one value for all elements.
        """
        with out_of_sight():
            memory_of(tensor).copy_(torch.as_tensor(value, device="cpu"))
        self.mark(known, tensor)


def _legacy_type(kind: Any) -> Any | None:
    """Return the `LegacyType` that `kind` is or names (e.g. "torch.cuda.LongTensor"); None for any other `kind`."""
    if isinstance(kind, str) and kind.startswith("torch.cuda."):
        kind = getattr(torch.cuda, kind.rpartition(".")[2], None)
    return kind if hasattr(kind, "plain") else None


def _is_sized_by_values(name: str, args: tuple, kwargs: dict) -> bool:
    """Return whether this call of a function in `_SIZED_BY_VALUES` has a result whose size depends on values."""
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "one_hot":
        return (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) < 0
    if name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
        return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None
    return True


def is_small(tensor: torch.Tensor, made_by: str, given: Sequence[torch.Tensor] = ()) -> bool:
    """Return whether a tensor has few enough elements to be computed: `LARGEST`, or `LARGEST_FLOAT` for floats.

    `made_by`: name of the function that made the tensor; `given`: the tensors from which it was made.
    """
    # Floats may be a mask, too, if all have one value, or if they are made from whole numbers or booleans.
    is_mask = tensor.dtype in EXACT or made_by in _OF_ONE_VALUE or any(each.dtype in EXACT for each in given)
    return tensor.numel() <= (LARGEST if is_mask else LARGEST_FLOAT)


def _nested(shape: tuple[int, ...]) -> Any:
    """Return `Unknown` numbers in nested lists, as `tolist` would for a tensor of this shape."""
    return [_nested(shape[1:]) for _ in range(shape[0])] if shape else Unknown(WHY)
