"""A training followed as on a GPU: which tensors lie on the device, and in which order its memory is asked for.

All tensors of an estimate say that they are on the "cpu". What lies on the device is told by what happens to it: a
module or a batch is sent there, and what an operation makes of tensors on the device lies there too.
"""

import contextlib
import itertools
import sys
from unittest.mock import patch

import torch
from accelerate.utils import memory
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from perf_helpers.estimate import kernels, quantized_kernels, trl_kernels
from perf_helpers.estimate.allocator_settings import Release, release
from perf_helpers.estimate.one_rank import DeviceName
from perf_helpers.estimate.operation_cache import OperationCache
from perf_helpers.estimate.trace import WEIGHT_OF_NORM, FakeTracker, to_of
from perf_helpers.lab import adapters
from perf_helpers.lab.tracker import name_of
from perf_helpers.lab.watcher import Block
from perf_helpers.records import Category, Phase

aten = torch.ops.aten
# Functions of torch that make a tensor of no other: on the host, unless they are told where.
_FACTORIES = {"zeros", "ones", "full", "arange", "tensor", "as_tensor", "eye", "linspace", "empty", "randint"}
_FACTORIES |= {"randperm", "rand", "randn", "scalar_tensor", "tril_indices", "triu_indices", "from_numpy", "stack"}

_ACTIVATIONS = {"relu_", "silu_", "gelu_", "elu_", "leaky_relu_", "hardswish_", "hardsigmoid_", "hardtanh_"}  # in place

_DEVICES = (torch.device, DeviceName)  # what means the device, and not the host: "cpu" in so many words does
_PAGED = 100_000  # elements from which on bitsandbytes pages a state (optim/optimizer.py: get_state_buffer)


class NotSent(Exception):
    """A user's loop computes, and has sent nothing to the device."""


class DeviceTracker(FakeTracker):
    """Follows what lies on a GPU.

    Args:
        capability: the GPU's compute capability.
        is_function: a user's loop is followed.
        from_the_start: whatever it makes is on the device, for it sends its model to none.
        rules: of torch's release; None: the installed one's.
    """

    places_modules = True

    def __init__(
        self,
        capability: tuple[int, int],
        is_function: bool = False,
        from_the_start: bool = True,
        cache: OperationCache | None = None,
        rules: Release | None = None,
    ):
        super().__init__(cache)
        self._rules = rules or release()
        self._is_function, self._from_the_start = is_function, is_function and from_the_start
        self._kernels = kernels.Kernels(capability, self.lies_on_device, self._rules)
        self.is_there = self._from_the_start  # whether anything was sent to the device
        self._is_elsewhere = False  # whether what is made just now lies neither there nor on the host
        self.is_told: bool | None = None  # to make its tensor there; of the factory that runs now, if one does
        self._adapts_on_host = False  # whether peft adds adapters to a base that is still on the host
        self._given_there = False  # whether it was given tensors
        self._on_device = False  # whether the present operation runs on the device
        self._overwritten: set[int] = set()  # elements of the views that an activation overwrote
        self._streams = {torch.cpu.current_stream(): 0}  # that were current when something was made, by number
        self._workspaces: set[tuple[bool, str]] = set()  # of autograd's thread (True) and of the one that called it

    def emulated(self, paged: bool = False) -> contextlib.AbstractContextManager:
        """Whatever sends something to a GPU is noticed inside this context. `paged`: an optimizer
        of bitsandbytes keeps its large states in memory of the host that the driver pages."""
        stack = contextlib.ExitStack()
        stack.enter_context(patch.object(torch.nn.Module, "to", to_of(self)))
        stack.enter_context(patch.object(torch.cuda, "empty_cache", self.cache_emptied))
        if self._is_function:
            stack.enter_context(trl_kernels.emulated())
        stack.enter_context(patch.multiple(memory, is_cuda_available=_yes, is_mps_available=_no))
        if bitsandbytes := sys.modules.get("bitsandbytes"):  # on a CPU it has other products, and repacks 4 bits
            stack.enter_context(patch.object(bitsandbytes, "matmul", _matmul_8bit))
            stack.enter_context(patch.object(bitsandbytes, "matmul_4bit", self._matmul_4bit(bitsandbytes.matmul_4bit)))
            stack.enter_context(patch.object(bitsandbytes.nn.modules, "has_avx512bf16", _no))
            whole = bitsandbytes.nn.Int8Params
            stack.enter_context(patch.object(whole, "to", _sent_once(whole.to)))
        stack.enter_context(patch.object(adapters, "adapted", self._adapted(adapters.adapted)))
        if peft := sys.modules.get("peft"):
            layer = peft.tuners.tuners_utils.BaseTunerLayer
            move = self._moved(layer._move_adapter_to_device_of_base_layer)
            stack.enter_context(patch.object(layer, "_move_adapter_to_device_of_base_layer", move))
        if paged:
            from bitsandbytes.optim.optimizer import Optimizer8bit

            stack.enter_context(patch.object(Optimizer8bit, "get_state_buffer", self._paged(Optimizer8bit)))
        stack.enter_context(_Placing(self))
        return stack

    def _matmul_4bit(self, plain):
        def matmul_4bit(*args, **kwargs):
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            with patch.object(self.cache, "within", dtype):
                return plain(*args, **kwargs)

        return matmul_4bit

    def _adapted(self, plain):
        """peft sends new adapters to the device of the base's weights: only a quantized base is on the GPU by then."""

        def adapted(*args, **kwargs):
            with patch.object(self, "_adapts_on_host", not self.is_there):
                return plain(*args, **kwargs)

        return adapted

    def _moved(self, plain):
        """Where peft sends a parameter to a quantized base's device, it makes one that learns: AdaLoRA's `ranknum`."""

        def move(layer, *args, **kwargs):
            plain(layer, *args, **kwargs)
            if self.lies_on_device(layer.get_base_layer().weight):
                for name in layer.other_param_names:
                    if isinstance(kept := getattr(layer, name, None), torch.nn.ParameterDict):
                        kept.requires_grad_(True)

        return move

    def _paged(self, kind: type):
        plain = kind.get_state_buffer

        def get_state_buffer(optimizer, weight, *args, **kwargs):
            with patch.object(self, "_is_elsewhere", optimizer.is_paged and weight.numel() >= _PAGED):
                return plain(optimizer, weight, *args, **kwargs)

        return get_state_buffer

    def sent_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Its parameters and buffers go to the device in the order of `Module._apply`."""
        if self._adapts_on_host:
            return module
        self.is_there = True
        for child in module.children():
            self.sent_module(child)
        for name, tensor in module._buffers.items():
            if tensor is not None and tensor._is_view() and not self.lies_on_device(tensor):
                with _disable_current_modes():  # the copy on the device is no part of anything
                    module._buffers[name] = tensor.clone()
        for tensor in itertools.chain(module._parameters.values(), module._buffers.values()):
            if tensor is not None:
                self.sent(tensor, Category.WEIGHTS)
        return module

    def sent(self, tensor: torch.Tensor, category: str = Category.INPUTS) -> None:
        """A tensor goes to the device, unless it is there."""
        storage = None if is_traceable_wrapper_subclass(tensor) else self._storage(tensor)
        self.is_there |= category == Category.WEIGHTS
        if storage is not None and storage._cdata not in self._blocks:
            self._follow(storage, category, "copy to the device")

    def lies_on_device(self, tensor: torch.Tensor) -> bool:
        storage = self._storage(tensor)
        return storage is not None and storage._cdata in self._blocks

    def _begin(self, tensors, any_fake):
        is_elsewhere = self._is_elsewhere or self.collates
        self._on_device = self.is_there and not is_elsewhere and self._runs_there(tensors, any_fake)
        if self._on_device and any_fake:
            for tensor in tensors:  # a real one that meets a fake one was copied; a number stays on the host
                if not isinstance(tensor, FakeTensor) and tensor.dim():
                    self.sent(tensor)

    def execute(self, function, args, kwargs):
        if function.overloadpacket.__name__ in _ACTIVATIONS and args[0]._is_view():
            self._overwritten.add(args[0].numel())
        elif function is aten.new_empty_strided.default and args[0].numel() in self._overwritten:
            self._copied_into_its_base(args[0])
        result = super().execute(function, args, kwargs)
        if self._on_device:
            if function.overloadpacket is aten.set_:
                self.sent(result)  # another storage than it had
            self._allocate(function, args, kwargs, result)
        return result

    def _copied_into_its_base(self, gradient: torch.Tensor) -> None:
        """The gradient of a view that was overwritten is copied into one of the view's base, and given back
        (AsStridedBackward0); under a dispatch mode autograd takes the view back instead, which copies nothing."""
        storage = self._storage(gradient)
        if storage is None or storage._cdata not in self._blocks or torch.is_grad_enabled():
            return
        block, reference = self._blocks[storage._cdata]
        copy = Block(block.bytes, block.category, "aten.new_zeros.default")
        self.log += [(copy, +1), (block, -1)]
        self._blocks[storage._cdata] = copy, reference

    def as_kernels_do(self, function, args, kwargs):
        if function.namespace == "bitsandbytes" and function._opname in quantized_kernels.OF_OUTLIERS:
            return quantized_kernels.without_outliers(function._opname, *args, **kwargs)
        result = super().as_kernels_do(function, args, kwargs)
        is_4bit = self.cache.within and function.namespace == "bitsandbytes"
        if is_4bit and self._kernels.multiplies(function, args, kwargs):  # torch does, inside, with autocast on
            return result.to(self.cache.within)
        if function is aten.log_sigmoid_forward.default:  # of its input alone the backward is made
            return result[0], result[1].new_empty(0)
        if function is aten._scaled_dot_product_efficient_attention.default and self._rules.seeds_on_device:
            return *result[:2], *(args[0].new_empty((), dtype=torch.int64) for _ in result[2:])
        if function is aten._scaled_dot_product_efficient_attention_backward.default:
            # Before 2.14 torch takes keys and values to have the queries' heads.
            alike = (torch.empty_permuted(each.shape, (0, 2, 1, 3), dtype=each.dtype) for each in args[2:4])
            return result[0], *alike, result[3]
        if function in WEIGHT_OF_NORM:  # mean and deviation are accumulated in fp32, and kept so
            return result[0], *(each.float() if each.dtype in kernels.HALF else each for each in result[1:])
        return result

    def _runs_there(self, given: list[torch.Tensor], any_fake: bool) -> bool:
        self._given_there = bool(given)
        if given:
            return any_fake or any(map(self.lies_on_device, given))
        if self._from_the_start:
            return True
        if self.is_told is not None:
            return self.is_told
        return self.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.GATHER, Phase.REDUCER)

    def _see(self, tensor, function, args, kwargs):
        pass  # `_allocate` did, in the order of the kernel

    def mark(self, label):
        if self._is_function and not self.is_there:
            raise NotSent
        super().mark(label)

    def tag(self, tensor, category, keep=()):
        self.is_there |= category == Category.WEIGHTS  # a model that computes is on the device, however it came there
        super().tag(tensor, category, keep)

    def _stream(self) -> int:
        return self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))

    def born(self, tensor, operation):
        pass  # random states and numbers that autograd keeps: the host's

    def _allocate(self, function, args, kwargs, result) -> None:
        """What the operation asks the allocator for, in its order."""
        held: list[Block] = []
        on_host = [*map(id, self._kernels.on_host(function, args, result))]
        in_place = function.overloadpacket.__name__.endswith("_")  # of a real tensor and a fake one a fake is returned
        any_there = not self._from_the_start or self._given_there or self.is_told
        for step in self._kernels.program(function, args, kwargs, result):
            if isinstance(step, torch.Tensor):
                if not in_place and (any_there or isinstance(step, FakeTensor)) and id(step) not in on_host:
                    super()._see(step, function, args, kwargs)
            elif isinstance(step, kernels.Free):
                self.log.append((held.pop(step.index), -1))
            else:
                held.append(self._hold(step, name_of(function)))
        for name, size in self._kernels.workspaces(function, args, kwargs):
            if not self._rules.keeps_workspaces:
                held.append(self._hold(size, name))
            elif (kept := (self.phase == Phase.BACKWARD, name)) not in self._workspaces:  # a thread's first
                self._workspaces.add(kept)
                self._hold(size, name)
        for block in reversed(held):
            self.log.append((block, -1))

    def _hold(self, size: int, operation: str) -> Block:
        block = Block(size, Category.INSIDE_OPERATIONS, operation)
        self.log.append((block, +1))
        return block


def _sent_once(plain):
    """`Int8Params.to`, which peft calls after it read a weight on the CPU, as fake ones say they are; the scales, which
    the layer has by then, were lost."""

    def to(weight, *args, **kwargs):
        return weight if weight.data.dtype is torch.int8 else plain(weight, *args, **kwargs)

    return to


def _yes(*_, **__) -> bool:
    return True


def _no(*_, **__) -> bool:
    return False


def _matmul_8bit(tensor, weight, out=None, state=None, threshold=0.0, bias=None, *_, **__):
    """`bitsandbytes.matmul` as on a GPU."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    state.threshold = threshold or state.threshold
    return MatMul8bitLt.apply(tensor, weight, out, bias, state)


class _Placing(TorchFunctionMode):
    """Notices where Python wants tensors to be."""

    def __init__(self, tracker: DeviceTracker):
        super().__init__()
        self._tracker = tracker

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if self._tracker.sends_weights and name == "to":  # weight by weight, and never the module
            self._tracker.is_there |= any(isinstance(each, _DEVICES) for each in (*args, *kwargs.values()))
        if not self._tracker.is_there:
            return function(*args, **kwargs)
        if name == "to":
            words = {*kwargs, *(["device"] if isinstance(args[1] if len(args) > 1 else None, _DEVICES) else [])}
            only_moves = "device" in words and words <= {"device", "non_blocking"} and len(args) < 3
            if only_moves and self._tracker.lies_on_device(args[0]):
                return args[0]  # it is there: "cpu" and "cpu:0" are one device here
            result = function(*args, **kwargs)
            if any(isinstance(each, (*_DEVICES, torch.Tensor)) for each in (*args[1:2], *kwargs.values())):
                self._tracker.sent(result, self._tracker._category(None, ()))
            return result
        if name not in _FACTORIES:
            return function(*args, **kwargs)
        is_device = isinstance(kwargs.get("device"), _DEVICES)  # "cpu" in so many words is the host
        with patch.object(self._tracker, "is_told", is_device):
            result = function(*args, **kwargs)
        if name in ("tensor", "as_tensor") and is_device:
            self._tracker.sent(result)
        return result
