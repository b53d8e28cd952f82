"""A training followed: every tensor's storage from birth to death, with what it is for.

The rules by which a storage gets its category stand in `Tracker`. It works on real tensors, for the memory meter, and
on fake ones, for the estimate.
"""

import contextlib
import functools
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from perf_helpers.lab import adapters
from perf_helpers.lab.watcher import Block, Watcher
from perf_helpers.records import TENSOR_CATEGORIES, Category, Phase

# What autograd does in place, unless a dispatch mode is on: the sum of two gradients, and writing into fresh zeros.
_IN_PLACE = {
    torch.ops.aten.add.Tensor: torch.ops.aten.add_.Tensor,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.logical_and.default: torch.ops.aten.logical_and_.default,  # of clamp's two bounds
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter.value: torch.ops.aten.scatter_.value,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
}
RESIZE = "storage.resize_"  # stands for the operation that a resized storage's memory came from
WEIGHTS = (Category.WEIGHTS, Category.FROZEN_WEIGHTS, Category.QUANTIZED_WEIGHTS)
_SCALING = tuple(getattr(torch.ops.aten, name).Tensor for name in ("mul", "mul_", "div", "div_"))


class Tracker(Watcher, TorchDispatchMode):
    """Births and deaths of storages in the order of the operations, each with a category.

    The category follows from the phase in which a storage is born:

    - from a module's forward to its backward, also where checkpointing runs the forward again inside backward: an
      activation; if it is a cast of a weight, a weight copy
    - in backward: a temporary, unless it ends up as a parameter's gradient
    - in the optimizer's step: a temporary, unless it ends up in the optimizer's state
    - before a forward: an input
    - in DistributedDataParallel's reducer, and where FSDP2 scatters gradients: a gradient
    - where FSDP2 gathers weights: a weight copy
    - where no gradients are recorded and a cache keeps it: keys and values
    - else: a temporary

    Args:
        granularity: the allocator rounds each storage up to a multiple of these bytes.
        device: type of the device whose memory is followed; what lies elsewhere (a batch on the host, say) is not.
    """

    def __init__(self, granularity: int = 1, device: str = "cpu"):
        Watcher.__init__(self)
        TorchDispatchMode.__init__(self)
        self.granularity, self.device = granularity, device
        self._blocks: dict[int, tuple[Block, weakref.ref]] = {}
        self._scaled: weakref.ref | None = None
        # The storages of the present operation's arguments; None: not yet looked at.
        self._given: set[int] | None = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.watch(function, types, args, kwargs)

    def watch(self, function, types, args, kwargs):
        """Carry out an operation and follow what it makes."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of tensors: what it does with them is what is followed
        self._see_number()
        if function in _IN_PLACE and self.phase == Phase.BACKWARD and _in_place(function, *args[:2]):
            function = _IN_PLACE[function]
        self._given = None
        result = self.execute(function, args, kwargs or {})
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, function, args, kwargs)
        self.operations.append((len(self.log), self.phase, name_of(function), self.modules.here()))
        if function in _SCALING and torch.is_grad_enabled() and not isinstance(args[1], torch.Tensor):
            # A view that is changed in place: to ask for its history within the next operation, which may be the one
            # that writes it, would wait for ever.
            self._scaled = None if result._is_view() else weakref.ref(result)
        return result

    def _see_number(self):
        """Autograd keeps the number by which a tensor was multiplied, as a tensor that no operation returned."""
        if self._scaled is None:
            return
        result, self._scaled = self._scaled(), None
        number = getattr(getattr(result, "grad_fn", None), "_saved_other", None)
        if number is not None:
            self.born(number, "a number kept for backward")

    def execute(self, function, args, kwargs):
        return function(*args, **kwargs)

    def block(self, tensor: torch.Tensor) -> Block | None:
        """The block that holds the tensor's storage, if it is followed."""
        storage = self._storage(tensor)
        found = self._blocks.get(storage._cdata) if storage is not None else None
        return found[0] if found else None

    def tag(self, tensor, category, keep=()):
        for leaf in tree_iter(tensor):
            if isinstance(leaf, torch.Tensor):
                block = self.block(leaf)
                if block is None and category in WEIGHTS and (storage := self._storage(leaf)) is not None:
                    self._follow(storage, category, "before")
                elif block is not None and block.category not in keep:
                    block.category = category

    def mark(self, label):
        self._see_number()
        super().mark(label)

    def born(self, tensor, operation):
        storage = self._storage(tensor)
        if storage is not None and storage._cdata not in self._blocks:
            self._follow(storage, self._category(None, ()), operation)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size than before: its memory is another one."""
        block, reference = self._blocks.get(storage._cdata, (None, None))
        if block is not None:
            new = Block(self._size(storage), block.category, RESIZE, self._stream())
            self._blocks[storage._cdata] = new, reference
            self.log += [(each, sign) for each, sign in ((block, -1), (new, +1)) if each.bytes]
        elif storage.nbytes() and storage.device.type == self.device:
            self._follow(storage, self._category(None, ()), RESIZE)
        self.operations.append((len(self.log), self.phase, RESIZE, self.modules.here()))

    def live(self, position: int) -> dict[str, int]:
        """Bytes by category after the first `position` entries of the log."""
        total = dict.fromkeys(TENSOR_CATEGORIES, 0)
        for block, sign in itertools.islice(self.log, position):
            total[block.category] += sign * block.bytes
        return total

    def _see(self, tensor, function, args, kwargs):
        storage = self._storage(tensor)
        if storage is None or storage._cdata in self._blocks or not storage.nbytes():
            return
        if self._given is None:  # once for all results: an operation on a list of tensors makes as many
            values = (*args, *(kwargs or {}).values())
            leaves = (leaf for value in values for leaf in (value if isinstance(value, list | tuple) else (value,)))
            own = (self._storage(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
            self._given = {storage._cdata for storage in own if storage is not None}
        if function is torch.ops.aten.lift_fresh.default or storage._cdata not in self._given:
            # Else memory that is not the allocator's: numpy's, a mapped file's, another process's.
            self._follow(storage, self._category(function, args), name_of(function))

    def _category(self, function, args) -> str:
        if self.phase in (Phase.REDUCER, Phase.GATHER):
            return Category.GRADIENTS if self.phase == Phase.REDUCER else Category.WEIGHT_COPIES
        recorded = torch.is_grad_enabled() and self.phase in (Phase.FORWARD, Phase.AFTER_FORWARD, Phase.BACKWARD)
        if recorded or self.phase == Phase.FORWARD:
            if function is torch.ops.aten._to_copy.default:
                source = self.block(args[0])
                if source is not None and source.category in WEIGHTS:
                    return Category.WEIGHT_COPIES
            return Category.ACTIVATIONS
        return Category.INPUTS if self.phase in (Phase.SETUP, Phase.BEFORE) else Category.TEMPORARIES

    def _storage(self, tensor: torch.Tensor):
        try:
            storage = local(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have none
            return None
        return storage if storage.device.type == self.device else None

    def _stream(self) -> int:
        """The stream on which something is made just now."""
        return 0

    def _follow(self, storage, category, operation):
        block = Block(self._size(storage), category, operation, self._stream())
        key, log, blocks = storage._cdata, self.log, self._blocks

        def died(_):
            last = blocks.pop(key, (block,))[0]  # another block may stand for it by now, or none
            if last.bytes:
                log.append((last, -1))

        self._blocks[key] = (block, weakref.ref(storage, died))
        log.append((block, +1))

    def _size(self, storage) -> int:
        """Bytes, as the allocator rounds them."""
        return -(-storage.nbytes() // self.granularity) * self.granularity


def counted(parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
    """How many numbers these parameters are, and how many of them learn; of 4 bits two lie in one byte."""
    own = [each for each in parameters if isinstance(each, torch.nn.Parameter)]
    sizes = [math.prod(getattr(getattr(each, "quant_state", None), "shape", each.shape)) for each in own]
    return sum(sizes), sum(size for size, each in zip(sizes, own, strict=True) if each.requires_grad)


@functools.cache
def name_of(function) -> str:
    """An operator's name, e.g. "aten.mm.default"."""
    return str(function)


def _in_place(function, target: Any, other: Any) -> bool:
    """Whether autograd, unwatched, would do this in place.

    It does where it holds the only reference (`InputBuffer::accumulate`, and the formulas that ask for
    `areAnyTensorSubclassLike`, in torch's csrc/autograd), but never while a dispatch mode is on: the watched training
    would have a tensor more than the unwatched one.
    """
    if torch.is_grad_enabled() or not isinstance(target, torch.Tensor):
        return False
    if function is torch.ops.aten.add.Tensor:
        if not isinstance(other, torch.Tensor) or other.shape != target.shape:
            return False
        # Four: autograd's own reference, and three of this call. A checkpointed segment holds one more to its result's.
        if target._use_count() > 4:
            return False
    last = sum((length - 1) * step for length, step in zip(target.shape, target.stride(), strict=True))
    # Two: the target's own reference, and the one just asked for.
    return last + 1 == target.numel() and torch._C._storage_Use_Count(target.untyped_storage()._cdata) == 2


@contextlib.contextmanager
def watched(tracker: Watcher):
    """Follow a training with a watcher or a tracker: global hooks find phases, parameters, gradients and states.

    Works for any code that calls modules, `backward` and an optimizer's `step`: a Trainer, an Accelerate loop.
    """
    state = {"modules": 0, "backwards": 0}
    parameters: dict[int, torch.Tensor] = {}

    def before_forward(module, _):
        tracker.modules.enter(module)
        if state["backwards"]:
            return
        if not state["modules"]:
            if tracker.phase == Phase.SETUP:
                tracker.mark("start")
            tag_weights(itertools.chain(module.parameters(), module.buffers()))
            for weight, kept in adapters.constants(module):
                tracker.tag([weight, *kept], Category.QUANTIZED_WEIGHTS)
            tracker.phase = Phase.FORWARD
        state["modules"] += 1

    def after_forward(module, _, __):
        tracker.modules.leave()
        if state["backwards"]:
            return
        state["modules"] -= 1
        if not state["modules"]:
            tracker.mark("forward")
            tracker.phase = Phase.AFTER_FORWARD

    plain_backward, plain_rng_state = torch.autograd.backward, torch.get_rng_state

    def rng_state(
        *args, **kwargs
    ):  # checkpointing keeps one for each block; it is made below where operations are seen
        state = plain_rng_state(*args, **kwargs)
        tracker.born(state, "get_rng_state")
        return state

    def backward(*args, **kwargs):
        if not state["backwards"]:
            tracker.mark("forward")
            tracker.phase = Phase.BACKWARD
        state["backwards"] += 1
        tracker.modules.enter_backward()
        try:
            return plain_backward(*args, **kwargs)
        finally:
            state["backwards"] -= 1
            tracker.modules.leave_backward()
            if not state["backwards"]:
                state["modules"] = 0
                tag_gradients()
                tracker.mark("backward")
                tracker.phase = Phase.AFTER_BACKWARD

    def tag_weights(weights):
        weights = [*weights]
        learns = any(weight.requires_grad for weight in weights)
        for weight in weights:
            parameters[id(weight)] = weight
            is_frozen = learns and isinstance(weight, torch.nn.Parameter) and not weight.requires_grad
            tracker.tag(weight, Category.FROZEN_WEIGHTS if is_frozen else Category.WEIGHTS, keep=WEIGHTS[2:])

    def tag_gradients():
        for parameter in parameters.values():
            if parameter.grad is not None:
                tracker.tag(parameter.grad, Category.GRADIENTS)

    def before_step(optimizer, *_):
        tag_weights(weight for group in optimizer.param_groups for weight in group["params"])
        tag_gradients()
        tracker.phase = Phase.STEP

    def after_step(optimizer, *_):
        kept = (*WEIGHTS, Category.GRADIENTS)
        tracker.tag([*optimizer.state.values()], Category.OPTIMIZER_STATES, keep=kept)
        tracker.mark("step")
        tracker.phase = Phase.BEFORE

    with contextlib.ExitStack() as stack:
        for hook in (
            torch.nn.modules.module.register_module_forward_pre_hook(before_forward),
            torch.nn.modules.module.register_module_forward_hook(after_forward, always_call=True),
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
        ):
            stack.callback(hook.remove)
        stack.enter_context(patch.object(torch.autograd, "backward", backward))
        stack.enter_context(patch.object(torch, "get_rng_state", rng_state))
        if isinstance(tracker, TorchDispatchMode):
            for owner, name, replaced in _replacements(tracker):
                if plain := getattr(owner, name, None):  # a version of torch may call it otherwise
                    stack.enter_context(patch.object(owner, name, replaced(plain)))
            stack.enter_context(tracker)
        yield parameters


def _replacements(tracker: Tracker) -> Iterator[tuple[type, str, Callable[[Callable], Callable]]]:
    """Methods of the libraries, and what makes of each the one that tells the tracker.

    FSDP2 keeps a rank's share of the weights as a DTensor, gathers a module's weights before its forward and its
    backward, and gives them back after, by resizing storages, which no operation shows. The tracker is not told of what
    DTensor does on tensors without memory, to learn what an operation would make of the whole.
    """

    def resizing(plain):
        def resize(storage, *args, **options):
            resized = plain(storage, *args, **options)
            tracker.resized(storage)
            return resized

        return resize

    def keeping(plain):
        def keep(cache, *args, **options):  # `update` is given keys, values and the layer's number
            kept = plain(cache, *args, **options)
            if not torch.is_grad_enabled():
                for layer in cache.layers[args[2] :][:1] if len(args) > 2 else cache.layers:
                    tracker.tag([getattr(layer, name, None) for name in ("keys", "values")], Category.KEY_VALUE_CACHE)
            return kept

        return keep

    yield torch.UntypedStorage, "resize_", resizing
    if caches := sys.modules.get("transformers.cache_utils"):
        yield caches.Cache, "update", keeping
        yield caches.Cache, "reorder_cache", keeping
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    @contextlib.contextmanager
    def during(phase):
        with patch.object(tracker, "phase", phase):
            yield

    def scattering(plain):
        def scatter(group, *args, **options):
            made = [getattr(each, "_unsharded_param", None) for each in group.fsdp_params]
            tracker.tag([weight.grad for weight in made if weight is not None], Category.GRADIENTS)
            return plain(group, *args, **options)

        return during(Phase.REDUCER)(scatter)

    # It makes its buckets, a second set of gradients, when it is built and once more later.
    for name in ("__init__", "_pre_forward"):
        yield torch.nn.parallel.DistributedDataParallel, name, during(Phase.REDUCER)
    for name in ("unshard", "wait_for_unshard"):
        yield FSDPParamGroup, name, during(Phase.GATHER)
    yield FSDPParamGroup, "post_backward", scattering
    yield ShardingPropagator, "_propagate_tensor_meta_non_cached", _disable_current_modes()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that is divided among ranks; any other tensor is itself."""
    return getattr(tensor, "_local_tensor", tensor)
