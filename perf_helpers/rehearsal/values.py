"""The values that are known in a rehearsal, where no kernel computes.

Device memory is host memory there. So what is integer or boolean, small, and made of known values is computed for real:
by the same operation on the CPU, on the very memory of the device's tensors. Masks, positions, labels, counts and
lengths are then what they would be, and whoever decides by them decides as on a device. Floating point stays unknown,
but for single numbers that the host has written; a test for NaN or infinity finds none, which is the one assumption.

Who reads a value that is not known gets an `Unknown` where a float is asked for, and otherwise `NeedsValues`, at once.

A function mode, not a dispatch mode: it sees what Python calls and leaves alone what autograd does inside.
"""

import ctypes
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from perf_helpers.unknown import NeedsValues, Unknown

WHY = "a rehearsal computes no floating-point values"
EXACT = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
LARGEST, LARGEST_FLOAT = 1 << 22, 16  # numbers in a tensor that is computed
LARGE_WEIGHT = 1 << 20  # numbers in a host tensor that is not filled with random ones

_READS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__"}
_READS |= {"is_nonzero", "__contains__", "equal", "allclose", "__len__", "__iter__", "__repr__", "__format__"}
_HARMLESS = {"__len__", "__iter__"}  # in the list above for what they call
_SIZED_BY_VALUES = {"nonzero", "argwhere", "unique", "unique_consecutive", "unique_dim", "masked_select", "bincount"}
_SIZED_BY_VALUES |= {"repeat_interleave", "where", "one_hot", "_unique2"}
_FACTORIES = {"zeros", "ones", "full", "arange", "tensor", "as_tensor", "eye", "linspace", "randint", "randperm"}
_FACTORIES |= {"zeros_like", "ones_like", "full_like", "randint_like", "scalar_tensor", "tril_indices", "triu_indices"}
_FACTORIES |= {"new_zeros", "new_ones", "new_full", "new_tensor"}
_FINITE = {"isnan": False, "isinf": False, "isneginf": False, "isposinf": False, "isfinite": True}
_RANDOM_FILLS = {"normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_"}
_RANDOM_FILLS |= {"xavier_normal_", "orthogonal_", "bernoulli_"}
_OVERWRITES = {"copy_", "fill_", "zero_"}  # whatever lay there before
_CHANGES_NOTHING_KNOWN = {"_amp_foreach_non_finite_check_and_unscale_"}  # finds nothing that is not finite


class Values(TorchFunctionMode):
    """Follows which tensors hold known values; on while it is entered, in threads too (see `install`)."""

    def __init__(self):
        super().__init__()
        self._known = _Storages()  # device tensors are unknown unless they are in here
        self._unknown = _Storages()  # host tensors are known unless they are in here: copied from the device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__get__":
            return function(*args, **kwargs)
        given = [tensor for tensor in _tensors((args, kwargs)) if _is_plain(tensor)]
        if name in _RANDOM_FILLS and self._is_left_out(given):
            return given[0]
        on_device = any(tensor.is_cuda for tensor in given)
        if not on_device and not (self._unknown and any(map(self._is_unknown, given))):
            made = function(*args, **kwargs)
            if torch.cuda.is_initialized():
                self._note_arrivals(function, name, args, kwargs, given, made)
            return made
        if name in _READS and given:
            return self._read(function, name, args, kwargs, given)
        if name in _SIZED_BY_VALUES and _is_sized_by_values(name, args, kwargs):
            return self._sized_by_values(function, args, kwargs, given)
        if name in ("__getitem__", "__setitem__", "index_put_", "index_put"):
            args = self._without_masks(name, args)
        made = function(*args, **kwargs)
        self._note(function, name, args, kwargs, given, made)
        return made

    def _is_left_out(self, given: list[torch.Tensor]) -> bool:
        """Whether the host's weights are too many to be worth random values that nobody will see."""
        big = (
            len(given) == 1 and not given[0].is_cuda and given[0].numel() >= LARGE_WEIGHT and torch.cuda.is_available()
        )
        if big:
            self._unknown.add(given[0])
        return big

    def is_known(self, tensor: torch.Tensor) -> bool:
        return tensor in self._known if tensor.is_cuda else tensor not in self._unknown

    def _is_unknown(self, tensor: torch.Tensor) -> bool:
        return not self.is_known(tensor)

    # --- what is made

    def _note_arrivals(self, function, name, args, kwargs, given, made) -> None:
        """Nothing of the device's was given: what is on the device now was copied there, or made there of nothing."""
        for tensor in _tensors(made):
            if not (_is_plain(tensor) and tensor.is_cuda and _is_small(tensor)):
                continue
            copied = len(given) == 1 and given[0].shape == tensor.shape and self.is_known(given[0])
            if (copied or (name in _FACTORIES and not given)) and _compute(function, name, args, kwargs, [tensor]):
                self._known.add(tensor)

    def _note(self, function, name, args, kwargs, given, made) -> None:
        """Compute what can be computed, and note what is known of the results."""
        results = [tensor for tensor in _tensors(made) if _is_plain(tensor)]
        if name in _CHANGES_NOTHING_KNOWN or not (results or name == "__setitem__"):
            return
        old = {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [tensor for tensor in results if tensor.untyped_storage()._cdata not in old]
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or "out" in kwargs
        in_place = (in_place or name == "__setitem__") and name not in ("__invert__", "__index__")
        if name in _FINITE and len(fresh) == 1 and fresh[0].is_cuda and fresh[0].numel() <= LARGEST:
            self._fill(fresh[0], _FINITE[name])
            return
        if not fresh and not in_place:
            return  # views
        whole = name in _OVERWRITES and len(given[0].untyped_storage()) == given[0].nbytes
        sources = given[:0] if name in _FACTORIES else given[1:] if whole else given
        known = all(map(self.is_known, sources)) and all(_is_small(tensor) for tensor in [*given, *fresh])
        if known and _compute(function, name, args, kwargs, fresh):
            for tensor in [*fresh, *given[:whole]]:
                (self._known.add if tensor.is_cuda else self._unknown.discard)(tensor)
            return
        for tensor in fresh:
            if not tensor.is_cuda and not all(map(self.is_known, given)):
                self._unknown.add(tensor)
        several = name.startswith(("_foreach", "_fused")) or isinstance(function, torch._ops.OpOverload)
        if in_place or several:
            for tensor in given if several else [*_tensors(args[:1]), *_tensors(kwargs.get("out"))]:
                if _is_plain(tensor) and not (several and tensor.dtype in EXACT):
                    (self._known.discard if tensor.is_cuda else self._unknown.add)(tensor)

    # --- what is read

    def _read(self, function, name, args, kwargs, given):
        if name in _HARMLESS:
            return function(*args, **kwargs)
        if all(map(self.is_known, given)):  # on the CPU: what shows a tensor calculates with it
            with _out_of_sight():
                return function(*_on_cpu(args), **_on_cpu(kwargs))
        tensor = args[0]
        floating = tensor.dtype not in EXACT
        if name in ("__repr__", "__format__"):
            return f"tensor(unknown in a rehearsal, size={tuple(tensor.shape)}, dtype={tensor.dtype}, {tensor.device})"
        if floating and name == "item":
            return Unknown(WHY)
        if floating and name == "tolist":
            return _nested(tensor.shape)
        raise NeedsValues(WHY)

    def _sized_by_values(self, function, args, kwargs, given):
        """The size of the result is a matter of values: computed on the CPU, and taken to the device."""
        masks = [tensor for tensor in given if tensor.dtype in EXACT] or given
        if not all(map(self.is_known, masks)):
            raise NeedsValues(WHY)
        if not all(map(self.is_known, given)):  # floats, chosen by what is known
            if function.__name__ == "masked_select":
                return args[0][self._positions(args[1])]
            if function.__name__ == "repeat_interleave":
                return function(*args, **kwargs, output_size=int(_memory(masks[0]).sum()))
            raise NeedsValues(WHY)
        device = next((tensor.device for tensor in given if tensor.is_cuda), torch.device("cpu"))
        with _out_of_sight():
            made = function(*_on_cpu(args), **_on_cpu(kwargs))
        return _each(made, lambda tensor: self._arrive(tensor, device))

    def _arrive(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        there = tensor.to(device)
        if there.is_cuda and _is_small(there):
            self._fill(there, tensor)
        return there

    def _fill(self, tensor: torch.Tensor, value: torch.Tensor | bool) -> None:
        with _out_of_sight():
            _memory(tensor).copy_(torch.as_tensor(value))
        self._known.add(tensor)

    def _without_masks(self, name: str, args: tuple) -> tuple:
        """The arguments of an indexing with boolean masks as positions: how many there are is a matter of values."""
        indices = args[1] if isinstance(args[1], tuple | list) else (args[1],)
        masks = [
            i for i in indices if isinstance(i, torch.Tensor) and i.is_cuda and i.dtype in (torch.bool, torch.uint8)
        ]
        masks = [mask for mask in masks if mask.dim()]
        value = args[2] if len(args) > 2 else None
        if not masks or (name != "__getitem__" and (not isinstance(value, torch.Tensor) or value.numel() == 1)):
            return args  # the latter is a fill, which needs no count
        if not all(map(self.is_known, masks)):
            raise NeedsValues(WHY)
        positions: list[Any] = []
        for index in indices:
            is_mask = any(index is mask for mask in masks)
            positions += self._positions(index) if is_mask else [index]
        return (args[0], tuple(positions), *args[2:])

    def _positions(self, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _out_of_sight():
            found = _memory(mask).nonzero(as_tuple=True)
        return tuple(self._arrive(each, mask.device) for each in found)


class _Storages:
    """A set of tensors' storages that holds none of them alive."""

    def __init__(self):
        self._alive: dict[int, weakref.ref] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _, key=key: self._alive.pop(key, None))

    def discard(self, tensor: torch.Tensor) -> None:
        self._alive.pop(tensor.untyped_storage()._cdata, None)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._alive

    def __bool__(self) -> bool:
        return bool(self._alive)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)


def _each(values: Any, change) -> Any:
    if isinstance(values, torch.Tensor):
        return change(values)
    if isinstance(values, list | tuple):
        return type(values)(_each(value, change) for value in values)
    return {key: _each(value, change) for key, value in values.items()} if type(values) is dict else values


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether there is memory behind the tensor that holds its values: no fake, meta, sparse or functorch tensor."""
    if isinstance(tensor, torch._subclasses.FakeTensor) or tensor.is_meta or tensor.layout != torch.strided:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _is_sized_by_values(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether it is, of functions that also have forms whose result has a size of its own."""
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "one_hot":
        return (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) < 0
    if name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
        return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None
    return True


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (LARGEST if tensor.dtype in EXACT else LARGEST_FLOAT)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the CPU."""
    if not tensor.is_cuda:
        return tensor.detach()
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = torch.frombuffer((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _on_cpu(values: Any) -> Any:
    if isinstance(values, torch.device):
        return torch.device("cpu")
    if isinstance(values, str) and values.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(values, dict):
        changed = {key: _on_cpu(value) for key, value in values.items() if key != "pin_memory"}
        return changed | ({"device": "cpu"} if "device" in values else {})
    if isinstance(values, list | tuple) and not isinstance(values, torch.Size):
        return type(values)(map(_on_cpu, values)) if type(values) in (list, tuple) else values
    return _memory(values) if isinstance(values, torch.Tensor) and _is_plain(values) else values


def _compute(function, name: str, args, kwargs, fresh: list[torch.Tensor]) -> bool:
    """Do on the CPU what the device was asked for, in the memory of the results; False where that does not work."""
    try:
        with _out_of_sight():
            kwargs = _on_cpu(kwargs) | ({"device": "cpu"} if name in _FACTORIES else {})
            made = function(*_on_cpu(args), **kwargs)
            if fresh:
                made = [tensor for tensor in _tensors(made) if _is_plain(tensor)]
                for tensor, value in zip(fresh, made, strict=True):
                    _memory(tensor).copy_(value)
    except Exception:
        return False
    return True


class _out_of_sight:
    """Where no dispatch mode sees what is computed on the CPU, nor autograd."""

    def __enter__(self):
        self._modes = torch.utils._python_dispatch._disable_current_modes()
        self._modes.__enter__()
        self._grad = torch.no_grad()
        self._grad.__enter__()

    def __exit__(self, *error):
        self._grad.__exit__(*error)
        return self._modes.__exit__(*error)


def _nested(shape) -> Any:
    return [_nested(shape[1:]) for _ in range(shape[0])] if shape else Unknown(WHY)


def _refusing_unknowns(function):
    """The function, but for numbers that nobody knows among its arguments."""

    def look(values: Any) -> None:
        if isinstance(values, Unknown):
            raise NeedsValues(values.why)
        parts = values.values() if isinstance(values, dict) else values
        for part in parts if isinstance(values, dict | list | tuple) else ():
            look(part)

    @functools.wraps(function)
    def refusing(*args, **kwargs):
        look((args, kwargs))
        return function(*args, **kwargs)

    return refusing


def install() -> Values:
    """Follow values in this process from now on, in all its threads and in autograd's."""
    mode = Values()

    def entered(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            if mode in _get_current_function_mode_stack():
                return function(*args, **kwargs)
            with mode:
                return function(*args, **kwargs)

        return run

    # It looks numbers' types up in a table of its own.
    torch.testing.assert_close = _refusing_unknowns(torch.testing.assert_close)
    threading.Thread.run = entered(threading.Thread.run)
    # A mode is off while it handles a call, and `Tensor.backward` is one: what is recomputed inside should see it.
    torch.autograd.graph._engine_run_backward = entered(torch.autograd.graph._engine_run_backward)
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward
    mode.__enter__()
    return mode
