"""Read from the arguments of torch's functions on which device a training wants its tensors, for estimates on CUDA.

In an estimate for a GPU all tensors report the device "cpu", so their own device does not say where they would be.
`DeviceArguments` is a function mode: torch calls the mode instead of each of torch's functions. The mode looks for a
device among the arguments, e.g. in `tensor.to("cuda")` or `torch.zeros(3, device="cuda")`, and passes what it finds to
the tracker (`device.DeviceTracker`). The tracker records the `Placement` of each tensor.
"""

import contextlib
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from trainmem.estimate import user_cuda
from trainmem.estimate.one_rank import DeviceName

if TYPE_CHECKING:
    from trainmem.estimate.device import DeviceTracker

# Functions of torch that make a tensor from no other one: on the host, unless `device=` is given.
_FACTORIES = {"zeros", "ones", "full", "arange", "tensor", "as_tensor", "eye", "linspace", "empty", "randint"}
_FACTORIES |= {"randperm", "rand", "randn", "scalar_tensor", "tril_indices", "triu_indices", "from_numpy", "stack"}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}  # layers, which take many steps; a GPU's cells are torch's own
_PACKING = {"_pack_padded_sequence", "_pad_packed_sequence"}  # they read and make lengths on the host
_DEVICES = (torch.device, DeviceName)  # arguments that mean the device; the text "cpu" means the host


class Placement(Enum):
    """Name where a tensor is on a machine with a GPU: on the host, on the device, or in memory paged between both."""

    HOST = auto()
    DEVICE = auto()  # its bytes count
    NEITHER = auto()  # the driver pages it between the two


class DeviceArguments(TorchFunctionMode):
    """Make the tracker regard each tensor as being where a `device=` argument or a call of `to` or `cuda` puts it."""

    def __init__(self, tracker: "DeviceTracker"):
        super().__init__()
        self._tracker, self._default = tracker, None

    def set_default(self, device: Any) -> None:
        """Note whether the default device of new tensors is a GPU; this method replaces `torch.set_default_device`."""
        made = self._named(device)
        self._default = made if made is not device else None

    def _named(self, device: Any) -> Any:
        """Return `user_cuda.THE_DEVICE` if `device` names a GPU, otherwise `device`."""
        made = user_cuda.device_argument(device)
        # If the loop says where its tensors are, all of them count as being on the host until the loop names a GPU.
        if self._tracker._places and made is not device:
            self._tracker.weights = Placement.DEVICE
        return made

    def entered(self, plain: Callable) -> Callable:
        """Return a function that switches this mode on, unless the mode is on already, and calls `plain`."""

        def call(*args, **options):
            is_on = self in _get_current_function_mode_stack()
            with contextlib.nullcontext() if is_on else self:
                return plain(*args, **options)

        return call

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        self._tracker.packs = name in _PACKING
        self._tracker.recurs |= name in _RECURRENT
        if self._default and function in _device_constructors() and kwargs.get("device") is None:
            kwargs = kwargs | {"device": self._default}
        if "device" in kwargs:
            kwargs = kwargs | {"device": self._named(kwargs["device"])}
        if name == "to":
            return self._to(function, (*args[:1], *map(self._named, args[1:2]), *args[2:]), kwargs)
        if name == "cpu":
            return self._to(torch.Tensor.to, (args[0], "cpu"), {})
        if name == "cuda":
            return self._to(torch.Tensor.to, (args[0], self._named("cuda")), {})
        if name.endswith("_like") and kwargs.get("device") == "cpu":
            return self._on_host(function, args, kwargs)
        if name in _FACTORIES and self._tracker.weights is Placement.DEVICE:
            return self._make(function, args, kwargs)
        outer, self._tracker.given = self._tracker.given, args
        try:
            return function(*args, **kwargs)
        finally:
            self._tracker.given = outer

    def _on_host(self, function, args, kwargs):
        with patch.object(self._tracker, "_forced", Placement.HOST):
            result = function(*args, **kwargs)
        self._tracker._keep_on_host(result)
        return result

    def _to(self, function, args, kwargs):
        tracker = self._tracker
        if "cpu" in (each for each in (*args[1:2], kwargs.get("device")) if type(each) is str):  # no `DeviceName`
            if not tracker.is_on_device(args[0]):
                return function(*args, **kwargs)
            if not is_non_overlapping_and_dense_or_false(args[0]):  # copied on the device first
                tracker.log.append((tracker._hold(args[0].nbytes, "copy to the host"), -1))
            return self._on_host(torch.clone, args[:1], {})
        if tracker.sends_weights and any(isinstance(each, _DEVICES) for each in (*args, *kwargs.values())):
            tracker.weights = Placement.DEVICE  # weights are sent one by one, never the module
        if tracker.weights is Placement.HOST:
            return function(*args, **kwargs)
        words = {*kwargs, *(["device"] if isinstance(args[1] if len(args) > 1 else None, _DEVICES) else [])}
        only_moves = "device" in words and words <= {"device", "non_blocking"} and len(args) < 3
        if only_moves and tracker.is_on_device(args[0]):
            return args[0]  # already there: "cpu" and "cpu:0" are one device here
        result = function(*args, **kwargs)
        if any(isinstance(each, (*_DEVICES, torch.Tensor)) for each in (*args[1:2], *kwargs.values())):
            if result is args[0] and not tracker.is_on_device(result):  # the caller may keep its tensor, on the host
                if tracker._places:
                    result = torch.ops.aten._to_copy(result)
                else:
                    with _disable_current_modes():
                        result = result.clone()
            tracker.send(result, tracker._category_at_allocation(None, ()))
            if tracker._places and not (result.is_contiguous() or result.stride() == args[0].stride()):
                tracker.log.append((tracker._hold(result.nbytes, "copy to the device"), -1))  # strided there
        return result

    def _make(self, function, args, kwargs):
        requested = Placement.DEVICE if isinstance(kwargs.get("device"), _DEVICES) else Placement.HOST
        with patch.object(self._tracker, "_requested", requested):
            result = function(*args, **kwargs)
        if self._tracker._places and requested is Placement.HOST:
            self._tracker._keep_on_host(result)
        if function.__name__ in ("tensor", "as_tensor") and requested is Placement.DEVICE:
            self._tracker.send(result)
        return result
