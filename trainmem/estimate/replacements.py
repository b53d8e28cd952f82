"""Replace parts of torch and transformers during a trace: they run on fake tensors, and equal batches are traced once.

To be entered in the subprocess of a trace (see `trace`).
"""

import collections
import contextlib
import copy
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from trainmem.estimate.operation_cache import spec_of
from trainmem.records import Phase

if TYPE_CHECKING:
    from trainmem.estimate.trace import FakeTracker

_REPEATED = 32  # micro-batches of a step: beyond these, time is saved


@contextlib.contextmanager
def matched() -> Iterator[None]:
    """Detection matches objects with queries by values, on the host; how many are matched does not depend on them."""

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
def fake_parameters() -> Iterator[None]:
    """Parameters of a class of their own, bitsandbytes', can be made of fake tensors: they are of both classes."""
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
        """DoRA copies a layer to read it; bitsandbytes would make the copy of an empty tensor that is not fake."""
        names = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized", "module")
        kept = {name: getattr(weight, name) for name in names}
        state = copy.deepcopy(weight.quant_state)  # first, as there
        return type(weight).__mro__[1](weight.data.clone(), quant_state=state, **kept)

    with patch.object(torch.Tensor, "_make_subclass", staticmethod(make_subclass)), contextlib.ExitStack() as stack:
        if bitsandbytes := sys.modules.get("bitsandbytes"):
            stack.enter_context(patch.object(bitsandbytes.nn.Params4bit, "__deepcopy__", copied))
        yield


def to_of(tracker: "FakeTracker") -> Callable:
    """`Module.to`: fake weights cannot be exchanged for others, so they stay the objects that they are."""

    def to(module, *args, **options):
        device, dtype, *_ = torch._C._nn._parse_to(*args, **options)
        for tensor in itertools.chain(module.parameters(), module.buffers()) if dtype else ():
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        return module if device is None else tracker.send_module(module)

    return to


def few_micro_batches(tracker: "FakeTracker", alike: bool) -> contextlib.AbstractContextManager:
    """Of a step's micro-batches only the first two and the last are followed: those between repeat the second, on a GPU
    with all that it asks the allocator for, whose free blocks may lie otherwise after each. Where all are `alike` but a
    step's first, which makes the gradients, so do the last and those of later steps, whose first repeats the first."""
    from transformers import Trainer

    plain, counts, seen = Trainer.training_step, collections.defaultdict(itertools.count), {}

    def training_step(trainer, model, inputs, *rest, **options):
        step, last = trainer.state.global_step, trainer.current_gradient_accumulation_steps - 1
        number = next(counts[step])
        empties = trainer.args.torch_empty_cache_steps  # the cache is emptied in one of so many steps
        place = (number > 0, empties and step % empties) if alike else (number > 0, number == last, step)
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
