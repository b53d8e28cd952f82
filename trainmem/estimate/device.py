"""Track which tensors would be in a GPU's memory, and the order of its allocations, for estimates on CUDA.

All tensors of an estimate report the device "cpu". `DeviceTracker` records where each tensor would be on a machine with
a GPU (`Placement`): weights and batches are sent to the device, and operations on such tensors put results on the
device.
"""

import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import memory
from torch import _meta_registrations
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from trainmem.core import adapters
from trainmem.estimate import gpu_optimizers, kernels, quantized_kernels, trl_kernels, user_cuda
from trainmem.estimate.allocator_settings import Release, release
from trainmem.estimate.backward_order import BackwardOrder
from trainmem.estimate.convolution_kernels import runs_cudnn
from trainmem.estimate.device_arguments import DeviceArguments, Placement
from trainmem.estimate.operation_cache import OperationCache
from trainmem.estimate.replacements import fake_casts
from trainmem.estimate.trace import FakeTracker
from trainmem.measure.tracker import WEIGHTS, calling, name_of, parts
from trainmem.measure.watcher import Block
from trainmem.records import Category, Phase

aten = torch.ops.aten
# Phases that run on the device.
_DEVICE_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP, Phase.GATHER, Phase.REDUCER)

_ACTIVATIONS = {"relu_", "silu_", "gelu_", "elu_", "leaky_relu_", "hardswish_", "hardsigmoid_", "hardtanh_"}  # in place

_IN_PARTS = {
    aten._trilinear.default,
    aten.affine_grid_generator.default,
}  # no kernels, but sequences of other operations with a formula for backward


class NotSent(Exception):
    """Raised if a user's loop computes before it has sent its model to the device."""


class DeviceTracker(FakeTracker):
    """Track which tensors are on a GPU, and log the GPU's allocations and frees in the order in which CUDA makes them.

    Args:
        capability: the GPU's compute capability, e.g. (9, 0).
        is_function: whether the experiment is a function with the user's own training loop, not the Trainer's loop.
        from_the_start: whether all tensors of the user's loop are on the device from the start. This is for a loop that
            never sends its model to the device.
        cache: known results of operations; new ones are added. None: an empty cache.
        rules: the rules of a torch release, see `allocator_settings.release`; None: the installed release.
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
        self.fake.cache_enabled = False  # torch's own cache does not distinguish between host and device
        self._capability, self._rules = capability, rules or release()
        self._is_function, self._from_the_start = is_function, is_function and from_the_start
        self._places = is_function and not from_the_start  # whether the loop says where its tensors are
        self._kernels = kernels.Kernels(capability, self.is_on_device, self._rules, self._is_on_host)
        # Where the weights are. While they are on the host, so is everything else.
        self.weights = Placement.DEVICE if self._from_the_start else Placement.HOST
        self._requested: Placement | None = None  # by `device=` of the running factory function; None: none runs
        self._forced: Placement | None = None  # overrides all other rules for new tensors
        self._adapter_base: Placement | None = None  # where the base model is to which peft adds adapters now
        self._results = Placement.HOST  # of the present operation
        self._hosted: dict[int, weakref.ref] = {}  # fake storages that `_keep_on_host` noted, by address
        self._in_parts = False  # whether an operation of `_IN_PARTS` runs
        self.given: tuple = ()  # arguments of the torch function that runs
        self.packs = False  # whether a sequence is packed or unpacked, and its new lengths are computed
        self._has_inputs = False  # whether the present operation has tensors among its arguments
        self._overwritten: set[int] = set()  # numbers of elements of the views that an activation overwrote
        self._streams = {torch.cpu.current_stream(): 0}  # {stream that allocated: its number}
        self._workspaces: set[tuple[bool, str]] = set()  # (whether it is that of autograd's thread, its name)

    def emulated(self, optim: str = "") -> contextlib.AbstractContextManager:
        """Return a context in which code can send tensors and modules to a GPU that the machine need not have.

        The tracker then regards them as being on the GPU. `optim`: the name of the Trainer's optimizer.
        """
        stack = contextlib.ExitStack()
        if self._is_function:
            stack.enter_context(trl_kernels.emulated())
        for owner, name, replacement in self._replacements(optim):
            stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(patch.object(adapters, "adapted", calling(self._add_adapters, adapters.adapted)))
        mode = stack.enter_context(DeviceArguments(self))
        # torch takes the mode away while it calls a function, also for the hooks that this function calls.
        run = mode.entered(BackwardOrder().numbered(torch.autograd.graph._engine_run_backward))
        for module in (torch.autograd, torch.autograd.graph):
            stack.enter_context(patch.object(module, "_engine_run_backward", run))
        hooks = torch.autograd.graph.saved_tensors_hooks
        packed = calling(lambda plain, hooks, *both: plain(hooks, *map(mode.entered, both)), hooks.__init__)
        stack.enter_context(patch.object(hooks, "__init__", packed))
        stack.enter_context(patch.object(torch, "set_default_device", mode.set_default))
        return stack

    def _replacements(self, optim: str) -> Iterator[tuple[Any, str, Callable]]:
        """Yield (owner, name, replacement) for each library function that `emulated` replaces.

        `owner`: the module or class that holds the function; `optim`: the name of the Trainer's optimizer.
        """
        yield from fake_casts(self)
        yield torch.nn.Module, "cuda", lambda module, *_, **__: self.send_module(module)
        yield torch.nn.Module, "cpu", lambda module, *_, **__: self.take_module_back(module)
        yield torch.cuda, "empty_cache", self.cache_emptied
        if self._is_function:
            yield from user_cuda.replacements(self._capability)
        yield memory, "is_cuda_available", lambda *_, **__: True
        yield memory, "is_mps_available", lambda *_, **__: False
        # Some layouts depend on the device: cuSOLVER's `Vh` has rows, LAPACK's has columns (_linalg_svd in
        # ATen/native/BatchLinearAlgebra.cpp); also eigenvectors, `pixel_shuffle` of channels-last images.
        yield _meta_registrations, "device_hint", self._kind_of_results
        if bitsandbytes := sys.modules.get("bitsandbytes"):  # on a CPU it has other matmuls, and repacks 4-bit weights
            yield bitsandbytes, "matmul", _matmul_8bit
            yield bitsandbytes, "matmul_4bit", calling(self._matmul_4bit, bitsandbytes.matmul_4bit)
            yield bitsandbytes.nn.modules, "has_avx512bf16", lambda *_, **__: False
            yield bitsandbytes.nn.Int8Params, "to", calling(_send_8bit, bitsandbytes.nn.Int8Params.to)
        if peft := sys.modules.get("peft"):
            layer = peft.tuners.tuners_utils.BaseTunerLayer
            move = calling(self._move_adapter, layer._move_adapter_to_device_of_base_layer)
            yield layer, "_move_adapter_to_device_of_base_layer", move
        quanto = sys.modules.get("optimum.quanto.tensor.weights.qbits")
        if quanto and self._capability < (8, 0):  # a CPU has TinyGemm's layout of int4, these GPUs do not
            kind = quanto.WeightQBitsTensor
            yield kind, "create", staticmethod(lambda *args, **options: kind(*args, **options))
        yield from gpu_optimizers.replacements(self, optim)

    def _kind_of_results(self, *_, **__) -> str:
        return "cuda" if self._results is Placement.DEVICE else "cpu"

    def _matmul_4bit(self, plain, *args, **kwargs):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        with patch.object(self.cache, "within", dtype):
            return plain(*args, **kwargs)

    def _add_adapters(self, plain, *args, **kwargs):
        """Let peft's function `plain` add adapters on the device of the base model's weights."""
        # A quantized base model is on the GPU by then; other base models are still on the host.
        with patch.object(self, "_adapter_base", self.weights):
            return plain(*args, **kwargs)

    def _move_adapter(self, plain, layer, *args, **kwargs):
        """Let peft's function `plain` move the adapter of `layer` to the device of the base layer."""
        plain(layer, *args, **kwargs)
        weight = getattr(layer.get_base_layer(), "weight", None)  # SHADOW's base is a whole block: nothing moves
        if weight is not None and self.is_on_device(weight):
            for name in layer.other_param_names:
                if isinstance(kept := getattr(layer, name, None), torch.nn.ParameterDict):
                    kept.requires_grad_(True)  # AdaLoRA's `ranknum`: in a real move peft makes a trainable copy

    def placing(self, paged: bool) -> contextlib.AbstractContextManager:
        """Return a context in which new tensors, if `paged`, are in memory that the driver pages to the host."""
        return patch.object(self, "_forced", Placement.NEITHER if paged else None)

    def send_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Send a module's parameters and buffers to the device, in the order of `Module._apply`; return the module."""
        if self._adapter_base is Placement.HOST:
            return module  # an adapter stays on the host with its base model
        self.weights = Placement.DEVICE
        for child in module.children():
            self.send_module(child)
        for name, tensor in module._buffers.items():
            if tensor is not None and tensor._is_view() and not self.is_on_device(tensor):
                with _disable_current_modes():  # the copy on the device is a view of nothing
                    module._buffers[name] = tensor.clone()
        for tensor in itertools.chain(module._parameters.values(), module._buffers.values()):
            if tensor is not None:
                self.send(tensor, Category.WEIGHTS)
        return module

    def take_module_back(self, module: torch.nn.Module) -> torch.nn.Module:
        """Send a module's parameters, their gradients and its buffers to the host, and return the module."""
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            for each in (tensor, tensor.grad):
                storage = None if each is None else self._storage(each)
                if storage is not None and storage._cdata in self._blocks:
                    self.log.append((self._blocks.pop(storage._cdata)[0], -1))
        return module

    def send(self, tensor: torch.Tensor, category: str = Category.INPUTS) -> None:
        """Send a tensor to the device, unless it is there already.

        After the first weight has been sent, the whole model counts as being on the device. `category`: the category
        under which the tensor's memory is counted.
        """
        if tensor.is_sparse:
            for part in parts([tensor]):
                self.send(part, category)
            return
        storage = None if is_traceable_wrapper_subclass(tensor) else self._storage(tensor)
        if category == Category.WEIGHTS:
            self.weights = Placement.DEVICE
        if storage is not None and storage._cdata not in self._blocks:
            self._add_block(storage, category, "copy to the device")

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        if tensor.is_sparse:
            return all(map(self.is_on_device, parts([tensor])))
        storage = self._storage(tensor)
        return storage is not None and storage._cdata in self._blocks

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return self._places and not self.is_on_device(tensor)

    def _begin(self, tensors, any_fake):
        self._has_inputs = bool(tensors)
        self._results = self._placement_of_results(tensors, any_fake)
        self.cache.on_host = self._results is Placement.HOST
        if self._results is Placement.DEVICE and any_fake:
            for tensor in tensors:  # a real tensor used with a fake one was copied; a number stays on the host
                if not isinstance(tensor, FakeTensor) and tensor.dim() and not self._places:
                    self.send(tensor)

    def _placement_of_results(self, inputs: list[torch.Tensor], any_fake: bool) -> Placement:
        """Return where an operation with these inputs puts its results; `any_fake`: whether an input is fake."""
        if self._forced:
            return self._forced
        if self.weights is Placement.HOST or self.collates:
            return Placement.HOST
        if inputs:
            on_device = any(map(self.is_on_device, inputs)) or (any_fake and not self._is_hosted(inputs))
        elif self._requested and not self._from_the_start:
            return self._requested
        else:
            on_device = self._from_the_start or self.moment in _DEVICE_PHASES or self._is_given_device_tensors()
        return Placement.DEVICE if on_device else Placement.HOST

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self.packs and function is aten.empty.memory_format:
            return function(*args, **kwargs or {})  # lengths, on the host
        is_packing = function is aten._pack_padded_sequence.default and not isinstance(args[1], FakeTensor)
        if function in _IN_PARTS or is_packing:
            place = self._placement_of_results([*filter(torch.is_tensor, args)], any_fake=True)
            with self, patch.multiple(self, _in_parts=True, _forced=None if is_packing else place):
                return function.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs or {})
        if (self._in_parts or torch.is_inference_mode_enabled()) and _composite_key(function):
            with self:  # elsewhere torch has replaced the operation by its parts before the tracker sees it
                return function._op_dk(_composite_key(function), *args, **kwargs or {})
        return super().__torch_dispatch__(function, types, args, kwargs)

    def execute(self, function, args, kwargs):
        if function.overloadpacket.__name__ in _ACTIVATIONS and args[0]._is_view():
            self._overwritten.add(args[0].numel())
        elif function is aten.new_empty_strided.default and args[0].numel() in self._overwritten:
            self._copy_into_base(args[0])
        result = super().execute(function, args, kwargs)
        if self._hosted and self._results is Placement.HOST:
            self._keep_on_host(result)
        if self._results is Placement.DEVICE:
            if function.overloadpacket is aten.set_:
                self.send(result)  # it has another storage now
            self._run_kernel(function, args, kwargs, result)
        return result

    def _is_given_device_tensors(self) -> bool:
        """Return whether the running torch function has an argument on the device; if not `_places`, return False."""
        # Called if an operation has no tensor arguments, e.g. `full`, which `pad_sequence` calls in C++. If the loop
        # does not say where its tensors are (`_places`), the function's arguments do not matter.
        tensors = (each for each in tree_iter(self.given) if isinstance(each, torch.Tensor))
        return self._places and any(map(self.is_on_device, tensors))

    def _is_hosted(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether `_keep_on_host` noted each fake tensor in `tensors`; False if it noted no tensor at all."""
        if not self._hosted:
            return False
        storages = [self._storage(each) for each in tensors if isinstance(each, FakeTensor)]
        return all(each is not None and each._cdata in self._hosted for each in storages)

    def _keep_on_host(self, results: Any) -> None:
        """Note in `_hosted` that the fake tensors among the `results` of an operation are on the host."""
        for tensor in tree_iter(results):
            storage = self._storage(tensor) if isinstance(tensor, FakeTensor) else None
            if storage is not None and storage._cdata not in self._blocks:
                forget = functools.partial(lambda key, _: self._hosted.pop(key, None), storage._cdata)
                self._hosted[storage._cdata] = weakref.ref(storage, forget)

    def _copy_into_base(self, gradient: torch.Tensor) -> None:
        """Log a copy of `gradient`, which belongs to a view overwritten in place, and then the free of `gradient`."""
        storage = self._storage(gradient)
        if storage is None or storage._cdata not in self._blocks or torch.is_grad_enabled():
            return
        block, reference = self._blocks[storage._cdata]
        # AsStridedBackward0 makes the copy; under a dispatch mode (a trace) autograd repeats the view's operation.
        copy = Block(block.bytes, block.category, "aten.new_zeros.default")
        self.log += [(copy, +1), (block, -1)]
        self._blocks[storage._cdata] = copy, reference

    def as_kernels_do(self, function, args, kwargs):
        if function.namespace == "bitsandbytes" and function._opname in quantized_kernels.OUTLIER_OPERATIONS:
            return quantized_kernels.without_outliers(function._opname, *args, **kwargs)
        if function is aten._fused_rms_norm_backward.default:  # torch has no fake kernel for it
            like = zip(args[1:5:3], args[5], strict=True)  # the input and the weight
            return tuple(each.new_empty(each.shape) if wanted else None for each, wanted in like)
        result = super().as_kernels_do(function, args, kwargs)
        is_4bit = self.cache.within and function.namespace == "bitsandbytes"
        if is_4bit and self._kernels.multiplies(function, args, kwargs):  # torch's matmul inside runs under autocast
            return result.to(self.cache.within)
        if function is aten.col2im.default and args[0].numel() > result.numel():
            # The kernel shrinks the result from the size of its input, and so keeps that memory (cuda/Col2Im.cu).
            return args[0].new_empty(args[0].numel())[: result.numel()].view(result.shape)
        if function is aten.log_sigmoid_forward.default:  # CUDA's backward needs only the input
            return result[0], result[1].new_empty(0)
        if function is aten._scaled_dot_product_efficient_attention.default and self._rules.seeds_on_device:
            return *result[:2], *(args[0].new_empty((), dtype=torch.int64) for _ in result[2:])
        if function is aten._scaled_dot_product_efficient_attention_backward.default:
            # Before 2.14 torch assumes that keys and values have the queries' heads.
            alike = (torch.empty_permuted(each.shape, (0, 2, 1, 3), dtype=each.dtype) for each in args[2:4])
            return result[0], *alike, result[3]
        if function is aten.native_batch_norm_backward.default and result[0] is not None:
            layout = suggest_memory_format(args[1]) if args[7] else torch.contiguous_format
            return torch.empty_like(result[0], memory_format=layout), *result[1:]
        if function is aten.native_batch_norm.default and not args[5] and not runs_cudnn(*args[:6]):  # CUDA keeps them
            return result[0], *(args[0].new_empty(args[0].shape[1], dtype=torch.float32) for _ in result[1:])
        # CUDA accumulates and keeps mean and deviation in fp32, but group norm keeps them in its input's type.
        if function in (aten.native_layer_norm.default, aten.native_batch_norm.default):
            return result[0], *(each.float() if each.dtype in kernels.HALF else each for each in result[1:])
        return result

    def _track_result(self, tensor, function, args, kwargs):
        pass  # `_run_kernel` has done it, in the order of the kernel

    def mark(self, label):
        # A forward pass on the host may only find the shapes of layers.
        if self._is_function and self.weights is Placement.HOST and label not in ("start", Phase.FORWARD):
            raise NotSent
        super().mark(label)

    def tag(self, tensor, category, keep=()):
        if self._adapter_base is Placement.HOST:
            return  # peft computes with a base that has not been sent
        if self._places and category in WEIGHTS and not self.is_on_device(tensor):
            return  # a module of a loop that says where its modules are
        if category == Category.WEIGHTS:
            self.weights = Placement.DEVICE  # a model that computes is on the device, whatever sent it there
        super().tag(tensor, category, keep)

    def _stream(self) -> int:
        return self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))

    def track_unlisted(self, tensor, operation):
        pass  # random states and numbers that autograd keeps are on the host

    def _run_kernel(self, function, args, kwargs, result) -> None:
        """Log an operation's allocations and frees on the device, in the order in which the kernel makes them.

        `result`: the operator's result, of fake or real tensors.
        """
        held: list[Block] = []
        on_host = [*map(id, self._kernels.on_host(function, args, result))]
        # In a loop that never sends its model, factory functions make real tensors on the host, unless requested.
        real_count = not self._from_the_start or self._has_inputs or self._requested is Placement.DEVICE
        if not (real_count or any(isinstance(each, FakeTensor) for each in tree_iter(result))):
            return
        for step in self._kernels.program(function, args, kwargs, result):
            if isinstance(step, torch.Tensor):
                if (real_count or isinstance(step, FakeTensor)) and id(step) not in on_host:
                    super()._track_result(step, function, args, kwargs)
            elif isinstance(step, kernels.Free):
                self.log.append((held.pop(step.index), -1))
            else:
                held.append(self._hold(step, name_of(function)))
        for name, size in self._kernels.workspaces(function, args, kwargs):
            if not self._rules.keeps_workspaces:
                held.append(self._hold(size, name))
            elif (kept := (self.phase == Phase.BACKWARD, name)) not in self._workspaces:  # the thread's first matmul
                self._workspaces.add(kept)
                self._hold(size, name)
        for block in reversed(held):
            self.log.append((block, -1))

    def _hold(self, size: int, operation: str) -> Block:
        block = Block(size, Category.INSIDE_OPERATIONS, operation)
        self.log.append((block, +1))
        return block


@functools.cache
def _composite_key(function) -> torch._C.DispatchKey | None:
    """Return the dispatch key of the kernel that computes an operation by other operations, or None.

    For example, the kernel of `linear` calls a matmul.
    """
    has_kernel = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, function.name())
    keys = torch._C.DispatchKey
    if function.namespace != "aten" or has_kernel("CPU") or not has_kernel("CompositeImplicitAutograd"):
        return None
    # `cuda.py` replaces some operations under AutogradCPU.
    return keys.AutogradCPU if has_kernel("AutogradCPU") else keys.CompositeImplicitAutograd


def _send_8bit(plain, weight, *args, **kwargs):
    """Call `plain`, the method `Int8Params.to`, unless the weight is quantized already; return the weight."""
    # peft calls `to` if a weight reports "cpu", as each fake one does; `plain` would lose an 8-bit layer's scales.
    return weight if weight.data.dtype is torch.int8 else plain(weight, *args, **kwargs)


def _matmul_8bit(tensor, weight, out=None, state=None, threshold=0.0, bias=None, *_, **__):
    """Compute `bitsandbytes.matmul` by the path that it takes on a GPU; arguments and result are those of `matmul`."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    state.threshold = threshold or state.threshold
    return MatMul8bitLt.apply(tensor, weight, out, bias, state)
