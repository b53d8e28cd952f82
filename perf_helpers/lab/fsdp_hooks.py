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

from perf_helpers.records import Category, Phase


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that is divided among ranks; any other tensor is itself."""
    return getattr(tensor, "_local_tensor", tensor)


@contextlib.contextmanager
def noticed(tracker) -> Iterator[None]:
    """Inside this context a tracker is told of resized storages, and of what FSDP2 does meanwhile: what is made while
    weights are gathered, and while gradients are scattered, is for that. It is not told of what DTensor does on tensors
    without memory, to learn what an operation would make of the whole."""

    def resize(storage, size):
        plain_resize(storage, size)
        tracker.resized(storage)

    plain_resize = torch.UntypedStorage.resize_
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize))
        if torch.distributed.is_available():
            for owner, name, replace in _replacements(tracker):
                if plain := getattr(owner, name, None):  # a version of torch may call it otherwise
                    stack.enter_context(patch.object(owner, name, replace(plain)))
        yield


def _replacements(tracker) -> list[tuple[type, str, Callable[[Callable], Callable]]]:
    """Methods of torch, and what makes of each the one that tells the tracker."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def scattering(plain):
        def scatter(group, *unused):
            made = [getattr(each, "_unsharded_param", None) for each in group.fsdp_params]
            tracker.tag([weight.grad for weight in made if weight is not None], Category.GRADIENTS)
            return plain(group, *unused)

        return _during(tracker, Phase.REDUCER, scatter)

    gathering = functools.partial(_during, tracker, Phase.GATHER)
    return [
        (FSDPParamGroup, "unshard", gathering),
        (FSDPParamGroup, "wait_for_unshard", gathering),
        (FSDPParamGroup, "post_backward", scattering),
        (ShardingPropagator, "_propagate_tensor_meta_non_cached", _unseen),
    ]


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
