"""Replace parts of torch and transformers during a trace, so that they run on fake tensors.

Batches that would only repeat an earlier batch do not run. Enter the contexts of this module in the subprocess of
a trace (see `trace`).
"""

import collections
import contextlib
import copy
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from trainmem.estimate.operation_cache import View, fake, spec_of
from trainmem.records import Phase

if TYPE_CHECKING:
    from trainmem.estimate.trace import FakeTracker

_REPEATED = 32  # micro-batches of a step that are repeated on a GPU; later ones are skipped to save time


@contextlib.contextmanager
def matched() -> Iterator[None]:
    """Let detection models match objects with queries on fake tensors, in this context.

    In a real training, values decide which object is matched with which query, but not how many pairs there are. Here
    the first objects are matched with the first queries.
    """

    def assigned(plain, cost, *args, **kwargs):
        pairs = np.arange(min(cost.shape)) if isinstance(cost, FakeTensor) else None
        return plain(cost, *args, **kwargs) if pairs is None else (pairs, pairs.copy())

    name = "linear_sum_assignment"
    with contextlib.ExitStack() as stack:
        for module in [each for key, each in sys.modules.items() if key.startswith("transformers.")]:
            if plain := vars(module).get(name):
                stack.enter_context(patch.object(module, name, functools.partial(assigned, plain)))
        yield


@contextlib.contextmanager
def random_masks(tracker: "FakeTracker") -> Iterator[None]:
    """Let peft draw the masks of SHiRA and FRoD on fake tensors: chance decides which elements, but not how many.

    SHiRA draws r * (inputs + outputs) elements of a weight. FRoD draws among the elements outside a diagonal, and skips
    columns of zeros. The trace assumes that no weight has such columns, which holds for random and trained weights.
    """

    def of_weight(_, config, name, layer, *__, **___):
        return lambda mask: config.r * (layer.in_features + layer.out_features)

    counts = {
        ("shira", "ShiraModel", "_create_and_replace"): of_weight,
        ("frod", "FrodModel", "_init_frod_projections"): lambda *_: lambda mask: len(mask) - math.isqrt(len(mask)),
        ("frod.layer", "FrodLayer", "_calculate_frod_u_and_lambda"): lambda *_: len,
    }

    def drawing(plain, count):
        def call(*args, **options):
            with patch.object(tracker, "selected", count(*args, **options)):
                return plain(*args, **options)

        return call

    with contextlib.ExitStack() as stack:
        for (module, owner, name), count in counts.items():
            if kind := getattr(sys.modules.get(f"peft.tuners.{module}"), owner, None):  # an older peft lacks FRoD
                stack.enter_context(patch.object(kind, name, drawing(getattr(kind, name), count)))
        yield


@contextlib.contextmanager
def fake_parameters() -> Iterator[None]:
    """Let subclasses of `torch.nn.Parameter`, such as bitsandbytes', be made from fake tensors in this context.

    Such a parameter gets a class that inherits from both the subclass and `FakeTensor`. `copy.deepcopy` can copy fake
    tensors in this context.
    """
    plain = torch.Tensor._make_subclass

    @functools.cache
    def both(kind: type) -> type:
        return type(kind.__name__, (kind, FakeTensor), {})

    def make_subclass(kind, data, requires_grad=False, *args, **options):
        if not isinstance(data, FakeTensor) or not issubclass(kind, torch.nn.Parameter):
            return plain(kind, data, requires_grad, *args, **options)
        made = data.detach().requires_grad_(requires_grad)
        made.__class__ = both(kind)
        return made

    def copied(weight, memo):
        """Return a copy of a bitsandbytes weight, in place of the weight's `__deepcopy__`, which DoRA uses."""
        # The original would begin with an empty tensor that is not fake.
        names = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized", "module")
        kept = {name: getattr(weight, name) for name in names}
        state = copy.deepcopy(weight.quant_state)  # first, as bitsandbytes does
        return type(weight).__mro__[1](weight.data.clone(), quant_state=state, **kept)

    with patch.object(torch.Tensor, "_make_subclass", staticmethod(make_subclass)), contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(FakeTensor, "__deepcopy__", _deep_copy, create=True))
        if bitsandbytes := sys.modules.get("bitsandbytes"):
            stack.enter_context(patch.object(bitsandbytes.nn.Params4bit, "__deepcopy__", copied))
        for name in ("qbits", "tinygemm.qbits"):  # quanto compares a tensor's exact type
            if module := sys.modules.get(f"optimum.quanto.tensor.weights.{name}"):
                stack.enter_context(patch.object(module, "type", _plain_type, create=True))
        yield


def _deep_copy(tensor: FakeTensor, memo: dict) -> torch.Tensor:
    """Return a deep copy of a fake tensor; allocate what torch allocates for a real tensor's deep copy."""
    # torch's own would also copy the `FakeTensorMode`: views of the copy would then not share the copy's memory.
    if id(tensor) in memo or not tensor.is_leaf:
        return torch.Tensor.__deepcopy__(tensor, memo)  # the known copy, or an error
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(tensor.data.clone(memory_format=torch.preserve_format), tensor.requires_grad)
    elif tensor.is_sparse or tensor.fake_device.type == "meta":
        made = tensor.clone()
    else:
        # torch copies the whole storage, once for all tensors that share it, and sets an empty number on the copy. Here
        # nothing is set: torch's cache of fake results would keep the storage.
        with torch.no_grad():
            storage = tensor.untyped_storage()
            whole = storage._cdata, tensor.dtype
            if whole not in memo:
                memo[whole] = tensor.new_empty(storage.nbytes() // tensor.itemsize)
            tensor.new_empty(())
            made = fake(View(spec_of(tensor), tensor.storage_offset()), tensor.fake_mode, memo[whole])
            made.requires_grad_(tensor.requires_grad).grad = copy.deepcopy(tensor.grad, memo)
        others = {name: value for name, value in vars(tensor).items() if name not in vars(made)}
        vars(made).update(copy.deepcopy(others, memo))
    memo[id(tensor)] = made
    return made


def _plain_type(value) -> type:
    """Return the type of a value, but torch.Tensor for a fake tensor."""
    return torch.Tensor if type(value) is FakeTensor else type(value)


def fake_module_to(tracker: "FakeTracker") -> Callable:
    """Return a replacement of `Module.to` that casts weights in place; torch's `to` cannot replace fake weights."""

    def to(module, *args, **options):
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **options)
        for tensor in itertools.chain(module.parameters(), module.buffers()) if dtype or layout else ():
            how = {"dtype": dtype if tensor.is_floating_point() else None}
            if layout and tensor.dim() in (4, 5):
                how["memory_format"] = layout
            if how["dtype"] or "memory_format" in how:
                tensor.data = tensor.data.to(**how)
        if device is None:
            return module
        is_host = "cpu" in (each for each in (*args[:1], options.get("device")) if type(each) is str)
        return tracker.take_module_back(module) if is_host else tracker.send_module(module)

    return to


def fake_casts(tracker: "FakeTracker") -> Iterator[tuple[Any, str, Callable]]:
    """Yield (class, method name, replacement) for `Module` methods that move or cast weights, see `fake_module_to`."""
    to = fake_module_to(tracker)
    yield torch.nn.Module, "to", to
    for name in ("half", "bfloat16", "float", "double"):
        yield torch.nn.Module, name, functools.partialmethod(to, getattr(torch, name))
    yield torch.nn.Module, "type", to


def few_micro_batches(tracker: "FakeTracker", alike: bool) -> contextlib.AbstractContextManager:
    """Return a context in which only the first two and the last of a step's micro-batches are traced.

    The micro-batches between these do not run. For a CPU, they have no entries in the tracker's log of allocations and
    frees. For a GPU, the third to the 32nd (`_REPEATED`) get a repetition of the second micro-batch's log entries,
    because the allocator's free blocks may still change. From the 33rd on, they have no entries. A micro-batch with a
    new shape, e.g. at the data's end, always runs.

    Args:
        tracker: the tracker of the trace; its log gets the repeated entries.
        alike: whether micro-batches of one shape make equal log entries. The first micro-batch of a step is an
            exception, because it also makes the gradients. If True, a step's last micro-batch does not run either: the
            log entries of the second one are repeated for it. In later steps no micro-batch runs: the log entries of
            the first step are repeated. If the allocator's cache is emptied every n steps (`torch_empty_cache_steps`),
            the first n steps are traced, and later steps repeat their log entries.
    """
    from transformers import Trainer

    plain, counts, seen = Trainer.training_step, collections.defaultdict(itertools.count), {}

    def training_step(trainer, model, inputs, *rest, **options):
        step, last = trainer.state.global_step, trainer.current_gradient_accumulation_steps - 1
        number = next(counts[step])
        empties = trainer.args.torch_empty_cache_steps  # the cache is emptied once in this many steps
        when = (empties and step % empties,) if alike else (number == last, step)
        place = number > 0, *when, *(each.shape for each in tree_leaves(inputs) if isinstance(each, torch.Tensor))
        if place in seen:
            is_between = 1 < number < last
            is_left_out = is_between and not (tracker.places_modules and number < _REPEATED)
            again = None if is_left_out else tracker.repeated(seen[place])
            if again is not None:
                tracker.phase = Phase.AFTER_BACKWARD
                return again[0]
            if is_between:
                return torch.zeros((), dtype=seen[place][-1][0][1].dtype)
        begin = len(tracker.log), len(tracker.operations)
        learned = [weight for weight in model.parameters() if weight.requires_grad and weight.grad is None]
        loss = plain(trainer, model, inputs, *rest, **options)
        end = len(tracker.log), len(tracker.operations)
        made = [(None, loss), *((weight, weight.grad) for weight in learned if weight.grad is not None)]
        left = [(weight, spec_of(t), tracker.block(t)) for weight, t in made]
        seen[place] = begin, end, left
        return loss

    return patch.object(Trainer, "training_step", training_step)
