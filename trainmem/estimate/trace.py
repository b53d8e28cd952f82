"""Trace a training on fake tensors: log when each tensor's memory would be allocated and freed.

A trace runs the same code as a measurement, including transformers' Trainer. The data are real, and every tensor that
depends on a weight is fake. Operators' workspaces are not in the trace, because they are no tensors: see
`operator_workspaces`.

Call `follow` only in a fresh subprocess that trains nothing afterwards: it installs hooks and replaces functions.
"""

import contextlib
import dataclasses
import functools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils import fetch

from trainmem.core import evaluation
from trainmem.core.families import LISTED
from trainmem.core.outcomes import Invalid
from trainmem.core.training import Experiment, infer, train
from trainmem.estimate import beside_steps
from trainmem.estimate.allocator_settings import WORKSPACES
from trainmem.estimate.autocast import NORM_ERROR, SCALER_ERROR, scaler_failures
from trainmem.estimate.one_rank import deepspeed_on_a_card, fsdp_enabled, one_rank_of
from trainmem.estimate.operation_cache import (
    REDUCED_IN_PLACE,
    WEIGHT_OF_NORM,
    OperationCache,
    as_norms_do,
    by_position,
    fake,
    operation_of,
    own_result,
    uniform_value,
    viewed,
)
from trainmem.estimate.replacements import fake_casts, fake_parameters, few_micro_batches, matched, random_masks
from trainmem.estimate.routing import Routing
from trainmem.estimate.sparse import filled
from trainmem.estimate.trace_records import Label, Log, Operation, Trace, flat, highest
from trainmem.measure import forked
from trainmem.measure.tracker import RESIZE, Tracker, local, watched
from trainmem.measure.watcher import Block
from trainmem.records import CATEGORIES, TENSOR_CATEGORIES, Category, Phase, is_end

aten = torch.ops.aten

# Results that are always computed, because other code reads them: samplers read orders, makers of masks read positions.
_ALWAYS_REAL = (aten.randperm, aten.arange, aten.linspace)
_REAL_IN_FORWARD = (aten.ones, aten.zeros, aten.full)
# They take masks. If a mask is real, the number of elements that it selects is known.
_CHOOSE = {aten.index.Tensor, aten.masked_select.default, aten.index_put.default, aten._unsafe_index_put.default}
_CHOOSE |= {aten.index_put_.default, aten._index_put_impl_.default}
_NOT_KEPT = (aten.nonzero.default, aten._efficientzerotensor.default)
_LARGE = 2**24  # elements of a real tensor beyond which results are fake


class DependsOnValues(Invalid):
    """Raised if the result of an operation depends on values, which an estimate does not have."""


def follow(experiment: Experiment, tracker: "FakeTracker") -> Trace:
    """Trace an experiment on fake tensors and return its trace.

    The trace covers the user's function, two forward passes in inference, or the optimizer steps of a training:
    `steps_on_a_gpu` of the experiment on a GPU (usually three), otherwise `metered_steps` (usually two).
    `tracker`: logs the operations, and decides whether tensors are on a GPU.

    Raises:
        Invalid: the experiment cannot be built, or an operation's result depends on tensor values, which are unknown.
    """
    import cloudpickle

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="perf_helpers-", dir=forked.own_folder()))
        stack.enter_context(fake_parameters())
        stack.enter_context(tracker.collating())
        if not tracker.places_modules:
            for owner, name, replacement in fake_casts(tracker):
                stack.enter_context(patch.object(owner, name, replacement))
        # Make torch handle lists of fake tensors like lists of tensors.
        kinds = [*_foreach_utils._foreach_supported_types, FakeTensor]
        stack.enter_context(patch.object(_foreach_utils, "_foreach_supported_types", kinds))
        deepspeed = experiment.arguments.get("deepspeed")
        if not experiment.task.lengths:  # equal micro-batches repeat each other
            # On one GPU only: several ranks also send something after the last micro-batch.
            alike = tracker.places_modules and experiment.processes == 1 and not deepspeed
            stack.enter_context(few_micro_batches(tracker, alike))
        stack.enter_context(beside_steps.few_batches(tracker))
        if experiment.processes > 1 or deepspeed:
            stack.enter_context(one_rank_of(experiment.processes))
        if experiment.processes > 1 and experiment.arguments.get("fsdp"):
            stack.enter_context(fsdp_enabled(functools.partial(tracker.send, category=Category.WEIGHTS)))
        weights = experiment.weights
        stack.enter_context(matched())
        stack.enter_context(random_masks(tracker))
        tracker.checks_hold = not experiment.function and experiment.task.family() in LISTED
        tracker.sends_weights = bool(deepspeed or (weights and weights.quantization))
        if deepspeed:
            tracker.empties_weights = True
            if tracker.places_modules:
                stack.enter_context(deepspeed_on_a_card(deepspeed, tracker.cache_emptied))
        with watched(tracker) as parameters, scaler_failures():
            if experiment.function:
                with beside_steps.checkpoints(tracker):
                    cloudpickle.loads(experiment.function)(experiment.task)
            elif experiment.training:
                steps = experiment.steps_on_a_gpu if tracker.places_modules else experiment.metered_steps
                with evaluation.unknown_values(on_cpu=not tracker.places_modules), beside_steps.checkpoints(tracker):
                    train(experiment, folder, steps, keep_losses=False)
            else:
                infer(experiment)
        numbers = parameters.counted()
    return _traced(tracker, *numbers)


class FakeTracker(Tracker):
    """Track a training with fake weights: an operation is computed only if all its tensors are real.

    `cache`: known results of operations; new ones are added. None: an empty cache.
    """

    places_modules = False  # whether the tracker notices that a module is sent to a device
    sends_weights = False  # whether weights go to a device one by one, before any module does
    empties_weights = False  # whether a weight's data may become an empty tensor, as under DeepSpeed

    def __init__(self, cache: OperationCache | None = None):
        super().__init__()
        # Whether checks of all elements, e.g. of boxes, count as true, and whether unknown masks select all elements.
        self.checks_hold = False
        self.assumes_masks = False  # whether that was assumed of any mask
        self.recurs = False  # whether a recurrent layer ran
        self.selected: Callable[[torch.Tensor], int] | None = None  # counts what a mask drawn at random selects
        self.routing: Routing | None = None  # of tokens to experts; None: unknown, because values decide it
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.cache = cache or OperationCache()
        self.collates = False  # whether a data loader is gathering a batch, whose data are real and on the host
        self.emptied: list[int] = []  # lengths of the log at which the allocator's cache was emptied
        self.starts: list[tuple[int, Operation]] = []  # (length of the log before it, operation)
        self._any_uniform = False  # whether any fake tensor has a known value, see `uniform_value`

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and torch's wrapper for skipping takes time at every call

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default:  # torch queries it several times per operation
            return args[0].fake_device
        try:
            return self.watch(function, types, args, kwargs)  # nothing else: this runs at each operation
        except BaseException:  # the training's code may catch it: an operation without a result is not in the trace
            del self.starts[len(self.operations) :]
            raise

    def execute(self, function, args, kwargs):
        """Run an operation: compute it if none of its tensors is fake, otherwise return fake results.

        Raises:
            Invalid: a GPU has no kernel for the operation.
            DependsOnValues: values decide the shape of the result.
        """
        if function in _CHOOSE and (isinstance(args[0], FakeTensor) or self.checks_hold):
            function, args = by_position(function, args, self.selected or (self.checks_hold and self._all_elements))
        leaves, structure = flat(args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        any_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        self._begin(tensors, any_fake)
        operation = operation_of(function, args, leaves, structure)
        self.starts.append((len(self.log), operation))
        if any_fake and function is aten.equal.default and self.checks_hold:
            places = [(each.untyped_storage()._cdata, each.storage_offset(), each.shape) for each in tensors]
            return places[0] == places[1]
        # Not computed: the number is a loss or a norm. In inference mode `item` is an operation of its own.
        if any_fake and function in (aten._local_scalar_dense.default, aten.item.default):
            kind = tensors[0].dtype
            return getattr(tensors[0], "uniform", False if kind is torch.bool else 1.0 if kind.is_floating_point else 1)
        if not any_fake and self._is_computed(function, args, kwargs, tensors):
            if function.overloadpacket is aten.rand:
                function = aten.ones.default  # the number decides whether a layer is left out: none is
            result = function(*args, **kwargs)
            return result.zero_() if function is aten.empty.memory_format else result  # any values, but no random ones
        ask = functools.partial(self._fake_result, function, args, kwargs, operation)
        is_kept = any_fake or not tensors  # a real result may be shared, or changed in place
        # `selected` decides the size of positions; a `Spec` cannot describe sparse tensors.
        is_kept = is_kept and function not in _NOT_KEPT and not operation.takes_sparse
        result = self.cache.result(operation, function, args, tensors, self.fake, ask) if is_kept else ask()
        if any_fake and not isinstance(tensors[0], FakeTensor) and function.overloadpacket.__name__.endswith("_"):
            # Not torch's fake copy: the real tensor was written in place, and nothing was allocated.
            result = args[0] if function._schema.returns else None
        if self.routing and any_fake and function in (aten.topk.default, aten.argmax.default):
            result = self.routing.replaced(function, args, kwargs, result)
        if function is aten._amp_foreach_non_finite_check_and_unscale_.default:
            if self.places_modules and any(gradient.dtype is torch.bfloat16 for gradient in args[0]):
                raise Invalid(SCALER_ERROR.format(why="CUDA has no kernel that unscales gradients in bfloat16"))
            args[1].uniform, self._any_uniform = 0.0, True  # gradients count as finite: no step is skipped
        elif self._any_uniform and function._schema.is_mutable:
            for tensor in tensors:
                tensor.__dict__.pop("uniform", None)  # it may have been overwritten
        elif any_fake and isinstance(result, FakeTensor):
            value = uniform_value(operation, leaves, self._any_uniform)
            is_check = self.checks_hold and function in (aten.all.default, aten.any.default)
            # `_is_all_true` checks arguments, e.g. those of a distribution.
            if value is None and (is_check or function is aten._is_all_true.default):
                value = True
            if value is not None:
                result.uniform, self._any_uniform = value, True
        return result

    def resized(self, storage):
        self.starts.append((len(self.log), Operation(RESIZE, (storage.nbytes(),), (1, (), (-1,)), False)))
        super().resized(storage)

    def send_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the module: on a CPU nothing is sent; a subclass for GPUs sends the module to the device."""
        return module

    def take_module_back(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the module: on a CPU nothing is sent; a subclass for GPUs sends the module to the host."""
        return module

    def send(self, tensor: torch.Tensor, category: str = Category.INPUTS) -> None:
        """Do nothing, because on a CPU the host is the device; a subclass for GPUs logs the copy to the device."""

    def repeated(self, span: tuple) -> list[FakeTensor] | None:
        """Log a batch once more without running it; return new fake tensors like those that were live after the batch.

        The live tensors are the loss and the new gradients of a micro-batch, or the predictions of an evaluation's
        batch. The new gradients become the `grad` of their weights.

        Return None, and log nothing, in four cases in which a repetition would be wrong. (1) The batch left memory
        allocated that belongs neither to the live tensors nor to cuBLAS workspaces. (2) The batch freed memory that was
        allocated before the batch. (3) Two of the live tensors share memory. (4) The gradient of a weight is among the
        live tensors, but the weight already has a `grad`.

        Args:
            span: (start, end, live tensors) of the batch. `start` is (length of the log, number of operations) before
                the batch, `end` is the same pair after the batch. Each live tensor is given as (weight, the
                tensor's `Spec`, the tensor's `Block`). `weight` is None if the tensor is not a weight's gradient.
        """
        (start, first), (end, last), left = span
        entries, kept = self.log[start:end], {id(block) for *_, block in left}
        allocated, freed = ({id(block): block for block, sign in entries if sign == which} for which in (1, -1))
        workspaces = {key for key in allocated.keys() - freed.keys() - kept if allocated[key].operation in WORKSPACES}
        if allocated.keys() ^ freed.keys() ^ workspaces != kept or len(kept) < len(left):
            return None
        if any(owner.grad is not None for owner, *_ in left if owner is not None):
            return None
        twins, made = {}, []
        for owner, like, block in left:
            with _disable_current_modes():  # this is no operation of the training
                made.append(fake(like, self.fake))
            self._add_block(made[-1].untyped_storage(), block.category, block.operation)
            twins[id(block)] = self.log.pop()[0]
            twins[id(block)].bytes = block.bytes
            if owner is not None:
                owner.grad = made[-1]
        places = [len(self.log)]  # lengths of the log after each of the entries
        for block, sign in entries:
            if id(block) not in workspaces:
                if id(block) not in twins:
                    twins[id(block)] = Block(block.bytes, block.category, block.operation, block.stream)
                self.log.append((twins[id(block)], sign))
            places.append(len(self.log))
        self.starts += [(places[length - start], operation) for length, operation in self.starts[first:last]]
        self.operations += [(places[length - start], *about) for length, *about in self.operations[first:last]]
        ends = [(label, length, count) for label, length, count in self.marks if start < length <= end]
        self.marks += [
            (label, places[length - start], count - last + len(self.operations)) for label, length, count in ends
        ]
        self.emptied += [places[length - start] for length in self.emptied if start < length <= end]
        return made

    @contextlib.contextmanager
    def collating(self) -> Iterator[None]:
        """Return a context in which this tracker's flag `collates` is set whenever a data loader gathers a batch.

        Tensors made while the flag is set count as the batch's data: they are on the host, and small ones are real.
        """

        def noticed(plain):
            def gather(*args, **options):
                with patch.object(self, "collates", True):
                    return plain(*args, **options)

            return gather

        with contextlib.ExitStack() as stack:
            for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
                stack.enter_context(patch.object(kind, "fetch", noticed(kind.fetch)))
            yield

    def cache_emptied(self, *_, **__) -> None:
        if any(sign < 0 for _, sign in self.log):  # otherwise nothing is free: each Trainer empties it at its start
            self.emptied.append(len(self.log))

    def _begin(self, tensors: list[torch.Tensor], any_fake: bool) -> None:
        """Do nothing; a subclass may prepare for the operation that is about to run on these tensors.

        `any_fake`: whether one of the tensors is fake.
        """

    def _all_elements(self, mask: torch.Tensor) -> int:
        """Return the number of elements of a mask, and note that the mask was assumed to select all elements."""
        self.assumes_masks = True
        return mask.numel()

    def _is_computed(self, function, args, kwargs, tensors: list[torch.Tensor]) -> bool:
        """Return whether an operation without fake tensors is computed; if not, its results are fake."""
        if self.selected and function in (aten.randperm.default, aten.randperm.generator, aten.arange.default):
            return False  # large, and only their length counts
        if tensors:  # other code may read small results, e.g. position ids or a sort order
            return function.is_view or all(tensor.numel() <= _LARGE for tensor in tensors)
        if function is aten.empty.memory_format and not math.prod(args[0]) and not self.empties_weights:
            return True  # it will be set on a storage, e.g. when a number is copied
        if function.overloadpacket is aten.rand and math.prod(args[0]) == 1:
            return True  # for a decision, e.g. whether a layer is left out
        if function is aten.empty.memory_format and not args[0] and self.moment in (Phase.SETUP, Phase.BEFORE):
            return True  # for a seed, which a loader draws before a sampler draws its order
        in_forward = self.moment == Phase.FORWARD or self.modules.runs_forward  # also one that a checkpoint repeats
        if function is aten.scalar_tensor.default and in_forward:
            return True  # part of a mask, which other code reads
        # E.g. sizes of feature maps. Not int32: bitsandbytes unpacks weights into it.
        is_whole = function is aten.empty.memory_format and kwargs.get("dtype") is torch.int64
        if is_whole or function.overloadpacket in _REAL_IN_FORWARD:
            return (in_forward or self.collates) and np.prod(args[0], dtype=np.int64) <= _LARGE
        # Only numbers where tensors could be, e.g. torch.div(length, 2): the result may be the length of something.
        numbers_alone = any("Tensor" in str(argument.type) for argument in function._schema.arguments)
        return numbers_alone or function.overloadpacket in _ALWAYS_REAL

    def _fake_result(self, function, args, kwargs, operation: Operation):
        """Return torch's result of an operation on fake tensors.

        Raises:
            DependsOnValues: values decide the shape of the result.
        """
        try:
            with self.fake:
                return self.as_kernels_do(function, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise DependsOnValues(
                f"the result of {operation.name} in {self.modules.here() or 'the training'} depends on tensor values, "
                "which an estimate does not have: measure it instead"
            ) from None

    def as_kernels_do(self, function, args, kwargs):
        """Return an operation's result on fake tensors, corrected where torch differs from the device's kernels.

        Raises:
            Invalid: the kernel would refuse the types of its arguments.
        """
        if function is aten.nonzero.default and self.selected:
            return args[0].new_empty((self.selected(args[0]), args[0].dim()), dtype=torch.int64)
        if (result := own_result(self.fake, function, *args, **kwargs)) is not None:
            return result
        result = function(*args, **kwargs)
        if isinstance(result, FakeTensor) and result.is_sparse and not result._nnz():
            return filled(function, args, result)
        if function in (aten.view.default, aten._unsafe_view.default) and 1 in result.shape:
            return viewed(args[0], result)
        if function in REDUCED_IN_PLACE and not result.dim():
            return result.new_empty(max(1, torch.broadcast_shapes(*(each.shape for each in args[:2])).numel()))[0]
        weight = args[WEIGHT_OF_NORM[function]] if function in WEIGHT_OF_NORM else None
        is_refused = weight is not None and weight.dtype not in (args[0].dtype, torch.float32)
        if is_refused and not self.places_modules:
            raise Invalid(NORM_ERROR.format(*(str(each.dtype).removeprefix("torch.") for each in (args[0], weight))))
        return as_norms_do(function, args, result)

    def _storage(self, tensor):
        try:
            tensor = tensor if isinstance(tensor, FakeTensor) else local(tensor)
            if (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type == "meta":
                return None  # only a shape, without memory
            return tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses have none
            return None


# ---- the trace


def _traced(tracker: FakeTracker, parameters: int, trainable: int) -> Trace:
    """Return the tracker's records as a `Trace`, from the first forward pass on.

    `parameters`, `trainable`: the number of elements in all weights, and in the trained weights.
    """
    column = {category: number for number, category in enumerate(CATEGORIES)}
    changes = np.zeros((len(tracker.log) + 1, len(column)), dtype=np.int64)
    columns = [column[block.category] for block, _ in tracker.log]
    changes[np.arange(1, len(changes)), columns] = [sign * block.bytes for block, sign in tracker.log]
    live = changes.cumsum(axis=0)  # row n: bytes after n entries of the log
    total, live = live.sum(axis=1), live[:, : len(TENSOR_CATEGORIES)]
    grown = np.concatenate([[0], np.maximum(changes.sum(axis=1), 0)[1:].cumsum()])  # all bytes allocated by then
    first = next((operations for label, _, operations in tracker.marks if label == "start"), 0)
    begins = np.array([begin for begin, _ in tracker.starts[first:]] + [len(tracker.log)])
    ends = np.array([length for length, *_ in tracker.operations[first:]])
    made = grown[ends] - grown[begins[:-1]]
    ends_of_steps = [operations for label, _, operations in tracker.marks if label == "step"]
    apart = beside_steps.peaks(tracker.marks, total, begins, first)
    last = next((begin for *_, (begin, _) in apart if ends_of_steps and begin >= ends_of_steps[-1] - first), len(ends))
    return Trace(
        operations=[*_shared(zip((operation for _, operation in tracker.starts[first:]), made.tolist(), strict=True))],
        phases=[phase for _, phase, *_ in tracker.operations[first:]],
        modules=[module for *_, module in tracker.operations[first:]],
        live=live[ends],
        high=highest(total, begins),
        marks={label: live[length] for label, length, _ in tracker.marks if is_end(label)},
        parameters=parameters,
        trainable=trainable,
        last_step=(max(ends_of_steps[-2] - first, 0) if len(ends_of_steps) > 1 else 0, last),
        begins=begins,
        apart=apart,
        log=recorded(tracker) if tracker.places_modules else None,
        assumes_masks=tracker.assumes_masks,
        recurs=tracker.recurs,
    )


def recorded(tracker: FakeTracker) -> Log:
    """Return the tracker's allocations and frees as a `Log`.

    Frees after both the last allocation and the last mark (e.g. the end of a phase) are left out.
    """
    entries, marks = list(tracker.log), [(label, position) for label, position, _ in tracker.marks]
    makers = np.searchsorted([end for end, *_ in tracker.operations], np.arange(len(entries)), side="right").tolist()
    numbers: dict[int, int] = {}  # {id of a block: its number}
    labels: dict[tuple, Label] = {}  # equal labels become one object, so that little is sent between processes
    blocks, events, length = [], [], max((position for _, position in marks), default=0)
    for position, (block, sign) in enumerate(entries):
        if sign < 0:
            events.append(~numbers[id(block)])
            continue
        _, phase, _, module = tracker.operations[min(makers[position], len(tracker.operations) - 1)]
        label = block.operation, block.category, phase, module, block.stream
        numbers[id(block)] = len(blocks)
        events.append(len(blocks))
        blocks.append((block.bytes, labels.get(label) or labels.setdefault(label, Label(*label))))
        length = max(length, len(events))
    return Log(blocks, events[:length], marks, tuple(tracker.emptied))


def _shared(operations: Iterable[tuple[Operation, int]]) -> Iterator[Operation]:
    """Yield each operation with the bytes of its results in `made_bytes`; equal operations are one object."""
    known: dict[tuple, Operation] = {}  # equal operations share an object, to save memory
    again: dict[tuple[int, int], Operation] = {}  # for repeated micro-batches: hashing a whole operation takes time
    for operation, made_bytes in operations:
        which = id(operation), made_bytes
        if which not in again:
            key = *operation.signature, made_bytes
            again[which] = known.setdefault(key, dataclasses.replace(operation, made_bytes=made_bytes))
        yield again[which]
