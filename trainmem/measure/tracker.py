"""Give each byte of a training a category (weights, gradients, activations, ...), for the meter and the estimate.

A storage gets its category in two places:

1. `Tracker` sees each operation. When an operation allocates a storage, the storage's category follows from the phase
   of the training: `Tracker._category_at_allocation`.
2. `TrainingHooks` finds out which phase begins or ends, and what storages are used for: weights at the first forward,
   gradients at the end of a backward, states at the end of an optimizer's step. Then it changes the category
   (`Tracker.tag`).

`watched` installs both for a training and removes them again. The memory meter uses them on real tensors, the estimate
on fake ones.
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

from trainmem.core import adapters
from trainmem.measure import in_place
from trainmem.measure.watcher import Block, Watcher
from trainmem.records import APART, BEGIN, TENSOR_CATEGORIES, Category, Phase

RESIZE = "storage.resize_"  # name of the operation that allocates a resized storage
WEIGHTS = (Category.WEIGHTS, Category.FROZEN_WEIGHTS, Category.QUANTIZED_WEIGHTS)
_SCALING = tuple(getattr(torch.ops.aten, name).Tensor for name in ("mul", "mul_", "div", "div_"))


class Tracker(Watcher, TorchDispatchMode):
    """Log each allocation and free of a tensor's storage, with a category.

    At its allocation a storage gets the category of the phase:

    - from the beginning of the model's forward to the beginning of backward, and while activation checkpointing repeats
      a forward during backward: an activation, or a weight copy if it is a cast of a weight
    - before a forward: an input
    - in DistributedDataParallel's reducer, and while FSDP2 scatters gradients: a gradient
    - while FSDP2 gathers weights: a weight copy
    - in an evaluation inside a module: an activation; between the modules: an input
    - otherwise (in backward, or in the optimizer's step): a temporary

    `TrainingHooks` changes the category of weights, gradients, optimizer states, keys and values that a cache keeps in
    inference, and predictions that an evaluation keeps.

    Args:
        granularity: bytes; the allocator rounds each storage up to a multiple of this number.
        device: type of the device whose memory is tracked, e.g. "cuda"; other storages, e.g. a batch on the host, are
            ignored.
    """

    def __init__(self, granularity: int = 1, device: str = "cpu"):
        Watcher.__init__(self)
        TorchDispatchMode.__init__(self)
        self.granularity, self.device = granularity, device
        self._blocks: dict[int, tuple[Block, weakref.ref]] = {}  # live storages by address
        self._scaled: weakref.ref | None = None  # the result of the last product or quotient with a number
        self._input_storages: set[int] | None = None  # of the present operation; None: not yet collected

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.watch(function, types, args, kwargs)

    def watch(self, function, types, args, kwargs):
        """Run an operation, track the storages of its results, and return the results.

        Without a tracker, autograd does some operations of the backward pass in place, e.g. sums of gradients. This
        method does them in place, too (see `in_place`). The arguments are those of `__torch_dispatch__`.
        """
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of tensors: it runs operations on those, which are tracked
        self._track_scaling_number()
        if self.phase == Phase.BACKWARD and function in in_place.FORMS:
            function = in_place.form(function, args, self._is_temporary)
        self._input_storages = None
        result = self.execute(function, args, kwargs or {})
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._track_result(tensor, function, args, kwargs)
        self.operations.append((len(self.log), self.phase, name_of(function), self.modules.here()))
        if function in _SCALING and torch.is_grad_enabled() and not isinstance(args[1], torch.Tensor):
            # Not a view that was changed in place: the next operation may write it, and reading `grad_fn` inside that
            # operation would deadlock.
            self._scaled = None if result._is_view() else weakref.ref(result)
        return result

    def _track_scaling_number(self):
        """Track the tensor that autograd keeps for backward after a tensor is multiplied or divided by a number."""
        if self._scaled is None:
            return
        result, self._scaled = self._scaled(), None
        number = getattr(getattr(result, "grad_fn", None), "_saved_other", None)
        if number is not None:  # a tensor that autograd made from the number: no operation returned it
            self.track_unlisted(number, "a number kept for backward")

    def execute(self, function, args, kwargs):
        return function(*args, **kwargs)

    def _is_temporary(self, tensor: torch.Tensor) -> bool:
        made = self.block(tensor)
        return made is not None and made.category == Category.TEMPORARIES

    def block(self, tensor: torch.Tensor) -> Block | None:
        """Return the `Block` of the tensor's storage (bytes, category, operation); None for an untracked storage."""
        storage = self._storage(tensor)
        found = self._blocks.get(storage._cdata) if storage is not None else None
        return found[0] if found else None

    def tag(self, tensor, category, keep=()):
        for leaf in parts(tree_iter(tensor)):
            block = self.block(leaf)
            if block is None and category in WEIGHTS and (storage := self._storage(leaf)) is not None:
                self._add_block(storage, category, "before")
            elif block is not None and block.category not in keep:
                block.category = category

    def mark(self, label):
        self._track_scaling_number()
        super().mark(label)

    def track_unlisted(self, tensor, operation):
        storage = self._storage(tensor)
        if storage is not None and storage._cdata not in self._blocks:
            self._add_block(storage, self._category_at_allocation(None, ()), operation)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Log that a storage was resized: its old memory is freed, and the new one is allocated."""
        block, reference = self._blocks.get(storage._cdata, (None, None))
        if block is not None:
            new = Block(self._size(storage), block.category, RESIZE, self._stream())
            self._blocks[storage._cdata] = new, reference
            self.log += [(each, sign) for each, sign in ((block, -1), (new, +1)) if each.bytes]
        elif storage.nbytes() and storage.device.type == self.device:
            self._add_block(storage, self._category_at_allocation(None, ()), RESIZE)
        self.operations.append((len(self.log), self.phase, RESIZE, self.modules.here()))

    def cloned(self, storage: torch.UntypedStorage, copied: torch.UntypedStorage) -> torch.UntypedStorage:
        """Track the copy of a storage if the storage is tracked, and return the copy."""
        if storage._cdata in self._blocks:
            self._add_block(copied, self._category_at_allocation(None, ()), "storage.clone")
        return copied

    def live(self, position: int) -> dict[str, int]:
        """Return {category: live bytes} after the first `position` entries of the log."""
        return next(self.live_at([position]))

    def live_at(self, positions: Iterable[int]) -> Iterator[dict[str, int]]:
        """Yield, for each number n in `positions`, {category: live bytes} after the first n entries of the log.

        `positions`: in ascending order.
        """
        total, entries, before = dict.fromkeys(TENSOR_CATEGORIES, 0), iter(self.log), 0
        for position in positions:
            for block, sign in itertools.islice(entries, position - before):
                total[block.category] += sign * block.bytes
            before = position
            yield dict(total)

    def _track_result(self, tensor, function, args, kwargs):
        if tensor.is_sparse:
            for part in parts([tensor]):
                Tracker._track_result(self, part, function, args, kwargs)
            return
        if tensor._is_zerotensor():
            return  # forward-mode derivatives make them: zeros without memory
        storage = self._storage(tensor)
        if storage is None or storage._cdata in self._blocks or not storage.nbytes():
            return
        if self._input_storages is None:  # once for all results, because a list operation has many
            values = (*args, *(kwargs or {}).values())
            leaves = (leaf for value in values for leaf in (value if isinstance(value, list | tuple) else (value,)))
            own = (self._storage(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
            self._input_storages = {storage._cdata for storage in own if storage is not None}
        is_new = function is torch.ops.aten.lift_fresh.default and storage.resizable()  # otherwise it is numpy's
        if is_new or storage._cdata not in self._input_storages:
            # Otherwise the allocator does not own the memory: numpy, a mapped file or another process does.
            self._add_block(storage, self._category_at_allocation(function, args), name_of(function))

    @property
    def moment(self) -> Phase:
        """The phase that decides the category of a storage that is allocated now.

        Outside an evaluation: the present phase. In an evaluation: `Phase.FORWARD` while a module runs, otherwise
        `Phase.BEFORE` (before a forward).
        """
        if self.phase != Phase.EVALUATION:
            return self.phase
        return Phase.FORWARD if self.modules.here() else Phase.BEFORE

    def _category_at_allocation(self, function, args) -> Category:
        """Return the category of a storage that an operation allocates now, by the rules listed in `Tracker`.

        `function`, `args`: the operation and its positional arguments; (None, ()): no operation.
        """
        if self.phase in (Phase.REDUCER, Phase.GATHER):
            return Category.GRADIENTS if self.phase == Phase.REDUCER else Category.WEIGHT_COPIES
        recorded = torch.is_grad_enabled() and self.phase in (Phase.FORWARD, Phase.AFTER_FORWARD, Phase.BACKWARD)
        if recorded or self.moment == Phase.FORWARD:
            if function is torch.ops.aten._to_copy.default:
                source = self.block(args[0])
                if source is not None and source.category in WEIGHTS:
                    return Category.WEIGHT_COPIES
            return Category.ACTIVATIONS
        return Category.INPUTS if self.moment in (Phase.SETUP, Phase.BEFORE) else Category.TEMPORARIES

    def _storage(self, tensor: torch.Tensor):
        """Return the tensor's storage; None if the tensor has no storage on the tracked device."""
        try:
            storage = local(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have no storage
            return None
        return storage if storage.device.type == self.device else None

    def _stream(self) -> int:
        """Return the number of the stream on which memory is allocated now."""
        return 0

    def _add_block(self, storage, category, operation):
        """Log that a storage is allocated by `operation` (a name), and arrange that its free is logged, too."""
        block = Block(self._size(storage), category, operation, self._stream())
        key, log, blocks = storage._cdata, self.log, self._blocks

        def freed(_):
            last = blocks.pop(key, (block,))[0]  # `resized` may have put another block in its place
            if last.bytes:
                log.append((last, -1))

        self._blocks[key] = (block, weakref.ref(storage, freed))
        log.append((block, +1))

    def _size(self, storage) -> int:
        """Return the storage's bytes, as the allocator rounds them."""
        return -(-storage.nbytes() // self.granularity) * self.granularity


class Parameters:
    """Hold the parameters of a training's models, without keeping them alive: a loop may train one model after another.

    Each entry is a parameter whose module ran forward, or that an optimizer has. A byte of 4-bit weights counts as two
    elements.
    """

    def __init__(self):
        self._alive: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by id
        self._most = 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([*self._alive.values()])

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        for each in parameters:
            self._alive[id(each)] = each
        self.counted()

    def counted(self) -> tuple[int, int]:
        """Return (number of elements of all weights, number of elements of trainable weights).

        Both numbers belong to the forward pass or optimizer's step at which the models had the most elements, because
        models may be freed later.
        """
        own = [each for each in self if isinstance(each, torch.nn.Parameter)]
        sizes = [math.prod(getattr(getattr(each, "quant_state", None), "shape", each.shape)) for each in own]
        found = sum(sizes), sum(size for size, each in zip(sizes, own, strict=True) if each.requires_grad)
        if found[0] >= self._most[0]:
            self._most = found
        return self._most


@functools.cache
def name_of(function) -> str:
    """Return an operator's name, e.g. "aten.mm.default"."""
    return str(function)


def parts(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among `values`, but replace each tensor made of tensors by the tensors in it.

    Tensors made of tensors are sparse, or quantized by torchao or quanto.
    """
    for each in values:
        if hasattr(each, "__tensor_flatten__"):
            yield from parts(getattr(each, name) for name in each.__tensor_flatten__()[0])
        elif isinstance(each, torch.Tensor) and each.is_sparse:
            with _disable_current_modes():  # this is no operation of the training
                own = each._indices(), each._values()
            yield from own
        elif isinstance(each, torch.Tensor):
            yield each


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor that is sharded across ranks, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


# ---- hooks


@contextlib.contextmanager
def watched(tracker: Watcher) -> Iterator[Parameters]:
    """Let a watcher observe the training inside this context; yield a `Parameters` object that the training fills.

    `tracker`: the watcher; a `Tracker` is also entered as a dispatch mode, to see each operation.

    `watched` works for any code that calls modules, `backward` and an optimizer's `step`: a Trainer, an Accelerate
    loop. All hooks and replacements of torch's functions are installed here, and removed at the end.
    """
    hooks = TrainingHooks(tracker)
    with contextlib.ExitStack() as stack:
        for handle in (
            torch.nn.modules.module.register_module_forward_pre_hook(hooks.before_forward),
            torch.nn.modules.module.register_module_forward_hook(hooks.after_forward, always_call=True),
            register_optimizer_step_pre_hook(hooks.before_step),
            register_optimizer_step_post_hook(hooks.after_step),
        ):
            stack.callback(handle.remove)
        for owner, name, replacement in _replacements(hooks):
            if plain := getattr(owner, name, None):  # other versions of torch may lack the method
                stack.enter_context(patch.object(owner, name, calling(replacement, plain)))
        if isinstance(tracker, TorchDispatchMode):
            stack.enter_context(tracker)
        yield hooks.parameters


def _replacements(hooks: "TrainingHooks") -> Iterator[tuple[Any, str, Callable]]:
    """Yield (module or class, name of its function, method of `hooks` to call instead) for each function to replace."""
    yield torch.autograd, "backward", hooks.backward
    for owner in (torch, torch.random):
        yield owner, "get_rng_state", hooks.get_rng_state
    trainer = sys.modules.get("transformers.trainer")
    for name, phase in _METHODS_APART.items() if trainer else ():
        yield trainer.Trainer, name, functools.partial(hooks.run_apart, phase)
    if not isinstance(hooks.tracker, TorchDispatchMode):
        return  # the others only change what a tracker logs
    yield torch.autograd, "grad", functools.partial(hooks.run_in, Phase.BACKWARD)
    yield torch.UntypedStorage, "resize_", hooks.resize
    yield torch.UntypedStorage, "clone", hooks.clone
    if trainer:
        yield trainer.EvalLoopContainer, "add", hooks.keep_predictions
    if caches := sys.modules.get("transformers.cache_utils"):
        yield caches.Cache, "update", hooks.update_cache
        yield caches.Cache, "reorder_cache", hooks.update_cache
    if not torch.distributed.is_available():
        return
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    # DistributedDataParallel allocates its buckets, a second set of gradients, when it is built and once more later.
    for name in ("__init__", "_pre_forward"):
        yield torch.nn.parallel.DistributedDataParallel, name, functools.partial(hooks.run_in, Phase.REDUCER)
    for name in ("unshard", "wait_for_unshard"):
        yield FSDPParamGroup, name, functools.partial(hooks.run_in, Phase.GATHER)
    yield FSDPParamGroup, "post_backward", hooks.scatter_gradients
    yield ShardingPropagator, "_propagate_tensor_meta_non_cached", hooks.run_untracked


# Methods of the Trainer that run outside of the steps.
_METHODS_APART = {
    "evaluate": Phase.EVALUATION,
    "_save_checkpoint": Phase.SAVING,
    "_load_best_model": Phase.LOADING,
}


def calling(replacement: Callable, plain: Callable) -> Callable:
    """Return a function that replaces `plain` and calls `replacement(plain, *args, **kwargs)`."""

    @functools.wraps(plain)
    def call(*args, **kwargs):
        return replacement(plain, *args, **kwargs)

    return call


class TrainingHooks:
    """Find a training's phases, weights, gradients and optimizer states, and report them to a watcher.

    Some methods are hooks that torch calls. Each other public method replaces a function of torch or transformers; the
    method gets the original function as `plain`, and calls it.

    `tracker`: the watcher that gets the reports. A `Watcher` keeps the phases only; a `Tracker` also keeps categories.
    """

    def __init__(self, tracker: Watcher):
        self.tracker = tracker
        self.parameters = Parameters()
        self._is_started = False  # whether a forward or a phase outside of the steps has begun
        self._forwards = 0  # depth of nested modules that run forward
        self._backwards = 0  # depth of nested backward passes: checkpointing starts one inside another

    def before_forward(self, module, _):
        self.tracker.modules.enter(module)
        if self._backwards:
            return  # checkpointing repeats a forward
        if not self._forwards:
            self._start()
            self._tag_weights(itertools.chain(module.parameters(), module.buffers()))
            for weight, kept in adapters.constants(module):
                self.tracker.tag([weight, *kept], Category.QUANTIZED_WEIGHTS)
            if self.tracker.phase not in APART:
                self.tracker.phase = Phase.FORWARD
        self._forwards += 1

    def after_forward(self, module, _, __):
        self.tracker.modules.leave()
        if self._backwards:
            return
        self._forwards -= 1
        if not self._forwards and self.tracker.phase not in APART:
            self.tracker.mark("forward")
            self.tracker.phase = Phase.AFTER_FORWARD

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            self.tracker.mark("start")

    def run_apart(self, phase: Phase, plain, *args, **kwargs):
        """Run `plain`, a method of the Trainer that evaluates, saves or loads, as a phase outside of the steps.

        The forward passes in this phase do not belong to a step.
        """
        if self.tracker.phase in APART:
            return plain(*args, **kwargs)  # nested: the evaluation of one of several data sets
        self._start()
        self.tracker.mark(f"{BEGIN}{phase}")
        try:
            return self.run_in(phase, plain, *args, **kwargs)
        finally:
            self.tracker.mark(phase.value)

    def keep_predictions(self, plain, container, *args, **kwargs):
        plain(container, *args, **kwargs)
        self.tracker.tag(container.tensors, Category.PREDICTIONS)

    def before_step(self, optimizer, *_):
        self._tag_weights(weight for group in optimizer.param_groups for weight in group["params"])
        self._tag_gradients()
        self.tracker.phase = Phase.STEP

    def after_step(self, optimizer, *_):
        kept = (*WEIGHTS, Category.GRADIENTS)
        self.tracker.tag([*optimizer.state.values()], Category.OPTIMIZER_STATES, keep=kept)
        self.tracker.mark("step")
        self.tracker.phase = Phase.BEFORE

    def backward(self, plain, *args, **kwargs):
        if not self._backwards:
            self.tracker.mark("forward")
            self.tracker.phase = Phase.BACKWARD
        self._backwards += 1
        self.tracker.modules.enter_backward()
        try:
            return plain(*args, **kwargs)
        finally:
            self._backwards -= 1
            self.tracker.modules.leave_backward()
            if not self._backwards:
                self._forwards = 0
                self._tag_gradients()
                self.tracker.mark("backward")
                self.tracker.phase = Phase.AFTER_BACKWARD

    def get_rng_state(self, plain, *args, **kwargs):
        """Return the random generator's state from `plain`, torch's `get_rng_state`, and track this tensor.

        No operation returns this tensor, so it must be tracked here. Activation checkpointing keeps one such tensor per
        checkpointed block, and saving the training's checkpoint makes one.
        """
        state = plain(*args, **kwargs)
        self.tracker.track_unlisted(state, "get_rng_state")
        return state

    def resize(self, plain, storage, *args, **kwargs):
        """Call `plain`, which resizes a storage, and log the change of its size.

        FSDP2 allocates and frees gathered weights by resizing their storages, and torch runs no operation for that.
        """
        resized = plain(storage, *args, **kwargs)
        self.tracker.resized(storage)
        return resized

    def clone(self, plain, storage, *args, **kwargs):
        """Call `plain`, a storage's method `clone`, and track the copy if the storage is tracked.

        `copy.deepcopy` calls `clone` for buffers and state dicts. The copy is the result of no operation, so a
        dispatch mode does not see it.
        """
        return self.tracker.cloned(storage, plain(storage, *args, **kwargs))

    def update_cache(self, plain, cache, *args, **kwargs):
        """Call `plain`, a cache's method `update` or `reorder_cache`, and return its result.

        In inference, also give the category `KEY_VALUE_CACHE` to the keys and values that the cache then holds. The
        arguments of `update` are keys, values and the layer's index.
        """
        kept = plain(cache, *args, **kwargs)
        if not torch.is_grad_enabled():
            for layer in cache.layers[args[2] :][:1] if len(args) > 2 else cache.layers:
                tensors = [getattr(layer, name, None) for name in ("keys", "values")]
                self.tracker.tag(tensors, Category.KEY_VALUE_CACHE)
        return kept

    def run_in(self, phase: Phase, plain, *args, **kwargs):
        with patch.object(self.tracker, "phase", phase):
            return plain(*args, **kwargs)

    def scatter_gradients(self, plain, group, *args, **kwargs):
        gathered = [getattr(each, "_unsharded_param", None) for each in group.fsdp_params]
        self.tracker.tag([weight.grad for weight in gathered if weight is not None], Category.GRADIENTS)
        return self.run_in(Phase.REDUCER, plain, group, *args, **kwargs)

    def run_untracked(self, plain, *args, **kwargs):
        """Call `plain`, a function of DTensor, without tracking its operations.

        `plain` only finds the shapes of results, by operations on tensors without memory.
        """
        with _disable_current_modes():
            return plain(*args, **kwargs)

    def _tag_weights(self, weights: Iterable[torch.Tensor]) -> None:
        weights = [*weights]
        any_trainable = any(weight.requires_grad for weight in weights)
        self.parameters.add(each for each in weights if isinstance(each, torch.nn.Parameter) or each.requires_grad)
        for weight in weights:
            is_frozen = any_trainable and isinstance(weight, torch.nn.Parameter) and not weight.requires_grad
            category = Category.FROZEN_WEIGHTS if is_frozen else Category.WEIGHTS
            self.tracker.tag(weight, category, keep=(Category.QUANTIZED_WEIGHTS,))

    def _tag_gradients(self) -> None:
        for parameter in self.parameters:
            if parameter.is_leaf and parameter.grad is not None:
                self.tracker.tag(parameter.grad, Category.GRADIENTS)
