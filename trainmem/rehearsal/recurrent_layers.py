"""Compute recurrent layers with torch's own kernels in a rehearsal, because cuDNN's memory is not known there."""

from collections import Counter
from collections.abc import Callable, Iterable

import torch

FUNCTIONS = {"lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn_flatten_weight"}  # by their names in torch


def without_cudnn(function: Callable, answers: Counter[str]) -> Callable:
    """Return a function that does the same as `function`, one of `FUNCTIONS`, but without cuDNN.

    If `function` is a layer, `without_cudnn` also adds 1 to the entry for recurrent layers in `answers`, the counter of
    what a rehearsal assumed. The returned function adds nothing. All `FUNCTIONS` are layers except
    `_cudnn_rnn_flatten_weight`, which moves a layer's weights into one block of memory.
    """
    if function is torch._cudnn_rnn_flatten_weight:
        return _flattened
    answers["recurrent layers computed by torch's own kernels, not cuDNN's"] += 1

    def run(*args, **kwargs):
        with torch.backends.cudnn.flags(enabled=False):
            return function(*args, **kwargs)

    return run


def _flattened(weights: Iterable[torch.Tensor], *_) -> torch.Tensor:
    """Move weights into one new block of memory, as cuDNN does for a recurrent layer, and return the block."""
    weights = [*weights]
    block = torch.cat([weight.flatten() for weight in weights])
    for weight, part in zip(weights, block.split([weight.numel() for weight in weights]), strict=True):
        weight.set_(part.view_as(weight))
    return block
