"""Weights that are divided among ranks, and gathered for their turn: how a tracker learns what is which.

torch's FSDP2 keeps each rank's share as a DTensor, gathers a module's weights before its forward and its backward, and
gives them back after. Both is done by resizing storages, which no operation shows.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

from perf_helpers.lab.runs import Category, Phase


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that is divided among ranks; any other tensor is itself."""
    return getattr(tensor, "_local_tensor", tensor)


@contextlib.contextmanager
def noticed(tracker) -> Iterator[None]:
    """Inside this context a tracker is told of resized storages, and of what FSDP2 does meanwhile: what is made while
    weights are gathered, and while gradients are scattered, is for that. It is not told of what DTensor does on tensors
    without memory, to learn what an operation would make of the whole."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.tensor import _sharding_prop

    group = _fsdp_param_group.FSDPParamGroup
    plain_resize, plain_backward = torch.UntypedStorage.resize_, group.post_backward

    def resize(storage, size):
        plain_resize(storage, size)
        tracker.resized(storage)

    def scatter(self, *unused):
        made = [getattr(each, "_unsharded_param", None) for each in self.fsdp_params]
        tracker.tag([weight.grad for weight in made if weight is not None], Category.GRADIENTS)
        return plain_backward(self, *unused)

    phases = {"unshard": Phase.GATHER, "wait_for_unshard": Phase.GATHER}
    replaced = {name: _during(tracker, phase, getattr(group, name)) for name, phase in phases.items()}
    replaced["post_backward"] = _during(tracker, Phase.REDUCER, scatter)
    propagator = _sharding_prop.ShardingPropagator
    unseen = _unseen(propagator._propagate_tensor_meta_non_cached)
    with (
        patch.object(torch.UntypedStorage, "resize_", resize),
        patch.object(propagator, "_propagate_tensor_meta_non_cached", unseen),
        patch.multiple(group, **replaced),
    ):
        yield


def _unseen(function: Callable) -> Callable:
    """The function, with no dispatch mode on while it runs."""

    @functools.wraps(function)
    def running(*args, **kwargs) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return running


def _during(tracker, phase: Phase, function: Callable) -> Callable:
    """The function, with the tracker in that phase while it runs."""

    @functools.wraps(function)
    def running(*args, **kwargs) -> Any:
        before, tracker.phase = tracker.phase, phase
        try:
            return function(*args, **kwargs)
        finally:
            tracker.phase = before

    return running
