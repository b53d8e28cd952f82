"""A training followed on fake tensors: every birth and death of a storage, with no bytes behind it.

The code that runs is the one that is measured, transformers' Trainer included: the data are real, and whatever touches
a weight is fake. What an operation allocates inside itself shows on no tensor: see `probe`.

Nothing here is to be called in a process that goes on to train: the hooks and patches are meant for a clean one.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _foreach_utils

from perf_helpers.lab import meters
from perf_helpers.lab.runs import CATEGORIES
from perf_helpers.lab.training import Experiment, Invalid, infer, train

# Positions and the orders of samples: what is made from them is looked at, by samplers and by the makers of masks.
_ALWAYS_REAL = (torch.ops.aten.randperm, torch.ops.aten.arange, torch.ops.aten.linspace)
_REAL_IN_FORWARD = (torch.ops.aten.ones, torch.ops.aten.zeros, torch.ops.aten.full)
_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)  # what an argument may be
_LARGE = 2**24  # elements of a real tensor from which on the results are fake


class Spec(NamedTuple):
    """A tensor among the arguments of an operation, without its content."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """An operation and its arguments, tensors as `Spec`: enough to run it again."""

    name: str  # packet, operation and overload, e.g. "aten.mm.default"
    leaves: tuple[Any, ...]
    structure: Any
    lists: bool  # it works on a list of tensors, as long as there are parameters
    made: int = 0  # bytes of its results

    @property
    def function(self):
        return functools.reduce(getattr, self.name.split("."), torch.ops)

    @property
    def is_view(self) -> bool:
        return self.function.is_view or self.name == "aten._unsafe_view.default"

    @property
    def key(self) -> tuple:
        """What the same operation in a deeper model has in common: lengths of vectors and of lists differ there."""
        shapes = [leaf.shape if len(leaf.shape) > 1 else len(leaf.shape) for leaf in self.leaves if type(leaf) is Spec]
        return (self.name,) if self.lists else (self.name, *shapes)

    @property
    def signature(self) -> tuple:
        return self.name, self.leaves, tuple(map(type, self.leaves))  # 1 == 1.0 == True

    @property
    def lengths(self) -> list[int]:
        """Lengths of tensors and numbers that may be lengths."""
        shapes = [leaf.shape if type(leaf) is Spec else (leaf,) for leaf in self.leaves]
        return [length for shape in shapes for length in shape if type(length) is int]

    @property
    def numbers(self) -> list[int]:
        """Every length, stride and whole number of it, and what it makes: all that differs from one size to another."""
        leaves = [
            (*leaf.shape, *leaf.stride) if type(leaf) is Spec else (leaf,) if type(leaf) is int else ()
            for leaf in self.leaves
        ]
        return [*itertools.chain(*leaves), self.made]

    def with_numbers(self, numbers: list[int]) -> "Call":
        """The call with other `numbers`."""
        rest, leaves = iter(numbers), []
        for leaf in self.leaves:
            if type(leaf) is Spec:
                shape, stride = (tuple(itertools.islice(rest, len(leaf.shape))) for _ in range(2))
                leaves.append(Spec(shape, stride, leaf.dtype))
            else:
                leaves.append(next(rest) if type(leaf) is int else leaf)
        return dataclasses.replace(self, leaves=tuple(leaves), made=next(rest))

    @property
    def bytes(self) -> int:
        """Of what it reads and makes."""
        return self.made + sum(leaf.bytes for leaf in self.leaves if type(leaf) is Spec)


def _flat(args, kwargs) -> tuple[list, tuple]:
    """Arguments of an operation one by one, and what `nested` needs: an operator's lists hold no lists."""
    leaves, lengths = [], []
    for value in itertools.chain(args, kwargs.values()):
        is_list = isinstance(value, list | tuple)
        lengths.append(len(value) if is_list else -1)
        leaves.extend(value) if is_list else leaves.append(value)
    return leaves, (len(args), tuple(kwargs), tuple(lengths))


def nested(leaves: list, structure: tuple) -> tuple[list, dict]:
    """The arguments that `_flat` took apart."""
    count, names, lengths = structure
    rest = iter(leaves)
    values = [next(rest) if length < 0 else list(itertools.islice(rest, length)) for length in lengths]
    return values[:count], dict(zip(names, values[count:], strict=True))


@dataclass(slots=True)
class Trace:
    """One training as arrays over its operations (axis 0) and the categories of `runs.CATEGORIES` (axis 1), in bytes.

    `live` is what lives when the operation has ended, `before` the total when it begins, `high` the highest total until
    the next one begins, `born` what the operation itself brought. `marks` is what lives at the last end of each phase,
    `last_step` the operations of the last training step as (first, last + 1).
    """

    calls: list[Call]
    phases: list[str]
    modules: list[str]
    live: np.ndarray
    before: np.ndarray
    high: np.ndarray
    born: np.ndarray
    marks: dict[str, np.ndarray]
    parameters: int
    last_step: tuple[int, int]
    reserved_bytes: int | None
    log: list[tuple[int, int, int]]  # (key of the block, its bytes, +1 born or -1 dead), from the model's birth on


@dataclass(frozen=True, slots=True)
class View:
    """A tensor on the memory of another one."""

    spec: Spec
    offset: int


class Results:
    """What operations make of fake tensors, so that one seen before need not be asked again, in another process either.

    `known` is {(operation, arguments): what it makes}: a Spec, a View of the first argument, a tuple or list of Specs,
    or None where it works in place. Left out is whatever is none of these.
    """

    def __init__(self, known: dict | None = None):
        self.known = dict(known or {})

    @staticmethod
    def key(call: Call, args) -> tuple:
        offset = args[0].storage_offset() if args and isinstance(args[0], torch.Tensor) else 0
        return *call.signature, call.structure, offset

    def get(self, key: tuple, function, args, mode: FakeTensorMode) -> tuple[Any] | None:
        """The result in a tuple; None if it is not known."""
        if key not in self.known:
            return None
        made = self.known[key]
        if made is None:
            return (args[0] if function._schema.returns else None,)
        if type(made) in (tuple, list):
            return (type(made)(part if part is None else _fake(part, mode) for part in made),)
        return (_fake(made, mode, args[0]),)

    def keep(self, key: tuple, function, args, result, tensors: list) -> None:
        """Keep a result, if the next one can be made of it."""
        if torch.Tag.inplace_view in function.tags or key[0].startswith(("aten.resize", "aten.set")):
            return
        if function._schema.is_mutable:
            on_fake = tensors and isinstance(tensors[0], FakeTensor)
            if on_fake and ((result is None and not function._schema.returns) or result is args[0]):
                self.known[key] = None
            return
        parts = result if type(result) in (tuple, list) else [result]
        made = [part if part is None else _made(part, tensors) for part in parts]
        if parts is result:
            if all(part is None or type(part) is Spec for part in made):
                self.known[key] = type(result)(made)
        elif made[0] and (type(made[0]) is Spec or args[0] is tensors[0]):
            self.known[key] = made[0]


def _made(result: Any, tensors: list) -> Spec | View | bool:
    """How to make such a tensor again; False where it neither fills memory of its own nor lies on the first one's."""
    if not isinstance(result, FakeTensor) or result.requires_grad:
        return False
    spec = Spec(tuple(result.shape), tuple(result.stride()), result.dtype)
    storage = result.untyped_storage()
    shared = [tensor.untyped_storage()._cdata == storage._cdata for tensor in tensors]
    if any(shared):
        return shared[0] and tensors[0].dtype is result.dtype and View(spec, result.storage_offset())
    last = sum((size - 1) * step for size, step in zip(result.shape, result.stride(), strict=True)) + 1
    return storage.nbytes() == last * result.itemsize * (result.numel() > 0) and spec


def _fake(made: Spec | View, mode: FakeTensorMode, base: torch.Tensor | None = None) -> FakeTensor:
    if type(made) is View:
        with torch._C._DisableTorchDispatch():
            plain = torch.as_strided(base, made.spec.shape, made.spec.stride, made.offset)
    else:
        plain = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
    fake = torch.Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=_HOST)
    fake.__dict__.update(_state(mode))
    return fake


@functools.cache
def _state(mode: FakeTensorMode) -> dict[str, Any]:
    """What every new fake tensor keeps in Python: to set it one by one takes longer than an operation."""
    return dict(FakeTensor(mode, torch.empty(0, device="meta"), _HOST).__dict__)


_HOST = torch.device("cpu")


class FakeTracker(meters.Tracker):
    """Follows a training whose weights are fake: an operation is carried out only where all its tensors are real.

    Args:
        results: what is known of operations; None: nothing is to be kept, as where operations are emulated.
    """

    def __init__(self, granularity: int = 1, follow_host: bool = True, results: Results | None = None):
        super().__init__(granularity)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.results = results
        self.follow_host = follow_host  # False: the device is another, and only what operations on it use lies there
        self.calls: list[tuple[int, Call]] = []  # (length of the log before it, call)
        self._any_known = False  # whether any fake tensor has a known value

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and the wrapper that skips takes its time at every call

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default:  # a question, asked several times for each operation
            return args[0].fake_device
        return self.watch(function, args, kwargs)

    def execute(self, function, args, kwargs):
        leaves, structure = _flat(args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        any_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if any_fake and not self.follow_host:
            for tensor in tensors:
                if not isinstance(tensor, FakeTensor) and tensor.dim():
                    self.sent(tensor)
        specs = tuple(
            Spec(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            else leaf
            if isinstance(leaf, _PLAIN)
            else None
            for leaf in leaves
        )
        lists = any(isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor) for value in args)
        call = Call(meters.name_of(function), specs, structure, lists)
        self.calls.append((len(self.log), call))
        if any_fake and function is torch.ops.aten._local_scalar_dense.default:
            # A number that was never computed. What the Trainer reads is a loss or a norm.
            kind = tensors[0].dtype
            usual = False if kind is torch.bool else 1.0 if kind.is_floating_point else 1
            return getattr(tensors[0], "everywhere", usual)
        small = not any_fake and all(tensor.numel() < _LARGE for tensor in tensors)
        if small and (tensors or self._makes_values(function, args)):
            return function(*args, **kwargs)
        result = self._faked(function, args, kwargs, call, tensors, any_fake)
        if self._any_known and function._schema.is_mutable:
            for tensor in tensors:
                tensor.__dict__.pop("everywhere", None)
        elif any_fake and isinstance(result, FakeTensor):
            value = _everywhere(call, leaves, self._any_known)
            if value is not None:
                result.everywhere, self._any_known = value, True
        return result

    def _faked(self, function, args, kwargs, call: Call, tensors: list, any_fake: bool):
        """What an operation makes of fake tensors, remembered where it can be."""
        known = self.results is not None and any_fake
        key = self.results.key(call, args) if known else None
        if known and (found := self.results.get(key, function, args, self.fake)):
            return found[0]
        try:
            with self.fake:
                result = _as_kernels_do(function, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise Invalid(
                f"what {call.name} makes in {self.modules.here() or 'the training'} depends on the values of its "
                "operands, and an estimate has none: it can only be measured"
            ) from None
        if known:
            self.results.keep(key, function, args, result, tensors)
        return result

    def _makes_values(self, function, args) -> bool:
        if function.overloadpacket in _REAL_IN_FORWARD:
            return self.phase == "forward" and np.prod(args[0], dtype=np.int64) < _LARGE
        # Numbers alone, as in torch.div(length, 2): what comes out may be the length of something.
        numbers = any("Tensor" in str(argument.type) for argument in function._schema.arguments)
        return numbers or function.overloadpacket in _ALWAYS_REAL

    def sent(self, tensor: torch.Tensor) -> None:
        """A real tensor goes to the device."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            self._follow(storage, "inputs", "copy to the device")

    def _see(self, tensor, function, args, kwargs):
        if self.follow_host or isinstance(tensor, FakeTensor):
            super()._see(tensor, function, args, kwargs)

    def _storage(self, tensor):
        try:
            return tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None


def follow(experiment: Experiment, tracker: FakeTracker | None = None) -> Trace:
    """Follow an experiment on fake tensors: two optimizer steps, two forward passes, or the user's function."""
    import cloudpickle

    tracker = tracker or FakeTracker()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="perf_helpers-"))
        stack.enter_context(_without_weights())
        stack.enter_context(_few_micro_batches())
        if experiment.processes > 1:
            stack.enter_context(_one_rank_of(experiment.processes))
        with meters.watched(tracker) as parameters:
            if experiment.function:
                cloudpickle.loads(experiment.function)(experiment.task)
            elif experiment.training:
                train(experiment, folder, steps=2, keep_losses=False)
            else:
                infer(experiment)
        counted = sum(p.numel() for p in parameters.values() if isinstance(p, torch.nn.Parameter))
    return _arrays(tracker, counted)


def _everywhere(call: Call, leaves: list, any_known: bool) -> Any:
    """The value that a result has everywhere, or None: tests for what is not finite find nothing, and what follows
    from such a test is known too."""
    name = call.name
    if name in _OF_FINITE:
        same, other = _OF_FINITE[name], leaves[1] if len(leaves) > 1 else None
        if name == "aten.isnan.default" or leaves[0] is other or (type(other) is float and math.isinf(other)):
            return same
    if not any_known or call.lists:
        return None
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    values = [getattr(tensor, "everywhere", None) for tensor in tensors]
    if None in values or not name.startswith(_OF_VALUES) or (name.startswith("aten.sum") and any(values)):
        return None
    args, kwargs = nested(
        [
            torch.full((1,) * leaf.dim(), leaf.everywhere, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ],
        call.structure,
    )
    with torch._C._DisableTorchDispatch():
        return call.function(*args, **kwargs).flatten()[0].item()


# Comparisons of a tensor with itself or with infinity, and what they say of one that is finite.
_OF_FINITE = {
    "aten.isnan.default": False,
    "aten.eq.Tensor": True,
    "aten.ne.Tensor": False,
    "aten.eq.Scalar": False,
    "aten.ne.Scalar": True,
}
_OF_VALUES = tuple(
    f"aten.{name}."
    for name in ("all", "any", "sum", "mul", "eq", "ne", "logical_not", "logical_or", "logical_and", "bitwise_not")
)


def _as_kernels_do(function, args, kwargs):
    """An operation on fake tensors, where fake results differ from those of the kernels."""
    if function is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
        # Its shapes are known for bfloat16 only.
        kind = args[0].dtype
        args = [a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        return function(*args, **kwargs).to(kind)
    result = function(*args, **kwargs)
    if function in _NORMS and args[_NORMS[function]] is not None:
        # The kernel keeps mean and deviation in the type of the weights, which autocast leaves in float32.
        out, *moments = result
        return out, *(moment.to(args[_NORMS[function]].dtype) for moment in moments)
    if function is torch.ops.aten.native_layer_norm_backward.default:
        # The kernel's result is contiguous whatever the order of its input.
        return tuple(part if part is None else part.contiguous() for part in result)
    return result


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Let modules be where they are, fake tensors cannot be swapped for others; and let lists of them be handled as
    lists of tensors are."""
    plain = torch.nn.Module.to
    torch.nn.Module.to = lambda module, *_, **__: module
    _foreach_utils._foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        torch.nn.Module.to = plain
        _foreach_utils._foreach_supported_types.remove(FakeTensor)


_NORMS = {torch.ops.aten.native_layer_norm.default: 2, torch.ops.aten.native_batch_norm.default: 1}  # where weights are


class _Replica(torch.nn.parallel.DistributedDataParallel):
    """A data-parallel model as far as memory goes: the reducer's buckets, a second set of gradients, and its maps."""

    def __init__(self, module, **_):
        torch.nn.Module.__init__(self)
        self.module = module
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buckets = [
            torch.empty(sum(p.numel() for p in trained if p.dtype is dtype), dtype=dtype)
            for dtype in dict.fromkeys(p.dtype for p in trained)
        ]
        self.used = torch.empty(2 * len(trained), dtype=torch.int32)  # which parameter was used, here and on the device

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def no_sync(self):
        return contextlib.nullcontext()


@contextlib.contextmanager
def _one_rank_of(ranks: int) -> Iterator[None]:
    """This process is rank 0 of a group whose other members exist in name only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    plain, torch.nn.parallel.DistributedDataParallel = torch.nn.parallel.DistributedDataParallel, _Replica
    try:
        yield
    finally:
        torch.nn.parallel.DistributedDataParallel = plain
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _few_micro_batches() -> Iterator[None]:
    """Of the micro-batches of a step only the first two and the last are followed: those between repeat the second."""
    from transformers import Trainer

    plain, state = Trainer.training_step, {}

    def training_step(trainer, model, inputs, *rest, **options):
        step, steps = trainer.state.global_step, trainer.current_gradient_accumulation_steps
        number = state[step] = state.get(step, -1) + 1
        if 2 <= number < steps - 1:
            return torch.zeros((), dtype=state["dtype"])
        loss = plain(trainer, model, inputs, *rest, **options)
        state["dtype"] = loss.dtype
        return loss

    Trainer.training_step = training_step
    try:
        yield
    finally:
        Trainer.training_step = plain


def _arrays(tracker: FakeTracker, parameters: int) -> Trace:
    place = {category: number for number, category in enumerate(CATEGORIES[:-1])}
    changes = np.zeros((len(tracker.log) + 1, len(place)), dtype=np.int64)
    for number, (block, sign) in enumerate(tracker.log, 1):
        changes[number, place[block.category]] = sign * block.bytes
    totals = changes.cumsum(axis=0)  # row n: after n entries of the log
    total = totals.sum(axis=1)
    first = next((operations for label, _, operations in tracker.marks if label == "start"), 0)
    begins = np.array([begin for begin, _ in tracker.calls[first:]] + [len(tracker.log)])
    ends = np.array([length for length, *_ in tracker.operations[first:]])
    high = np.array([total[a : b + 1].max() for a, b in itertools.pairwise(begins)])
    births = np.concatenate([[0], np.maximum(changes.sum(axis=1), 0)[1:].cumsum()])
    born = births[ends] - births[begins[:-1]]
    alike: dict[tuple, Call] = {}  # one object for calls that are equal, 1 and True told apart
    calls = []
    for (_, call), made in zip(tracker.calls[first:], born.tolist(), strict=True):
        key = *call.signature, made
        if key not in alike:
            alike[key] = dataclasses.replace(call, made=made)
        calls.append(alike[key])
    ends_of_steps = [operations for label, _, operations in tracker.marks if label == "step"]
    return Trace(
        calls=calls,
        phases=[phase for _, phase, *_ in tracker.operations[first:]],
        modules=[module for *_, module in tracker.operations[first:]],
        live=totals[ends],
        before=total[begins[:-1]],
        high=high,
        born=born,
        marks={label: totals[position] for label, position, _ in tracker.marks if label != "start"},
        parameters=parameters,
        last_step=(max(ends_of_steps[-2] - first, 0) if len(ends_of_steps) > 1 else 0, len(ends)),
        reserved_bytes=None,
        log=[(id(block), block.bytes, sign) for block, sign in tracker.log],
    )
