"""Assume that a mixture of experts routes equally many tokens to each expert, or all tokens to the same experts."""

from enum import Enum

import torch

aten = torch.ops.aten


class Routing(Enum):
    """Name an assumption about which experts each token goes to; the real choice depends on unknown values."""

    BALANCED = "balanced"  # each expert gets equally many tokens
    ONE_SIDED = "one-sided"  # all tokens choose the same experts

    def replaced(self, function, args, kwargs, result):
        """Return the result of a router's choice of experts: the numbers of the experts are assumed, not computed.

        The result of `topk` is (scores, expert numbers), the result of `argmax` is expert numbers.

        Args:
            function: `aten.topk.default`, or an overload of `argmax`.
            args, kwargs: the arguments of `function`.
            result: what `function` returned on fake tensors; returned unchanged if the arguments name no dimension.
        """
        is_topk = function is aten.topk.default
        names = ("self", "k", "dim") if is_topk else ("self", "dim")
        given = dict(zip(names, args, strict=False)) | kwargs
        dim, choices = given.get("dim", -1 if is_topk else None), result[1] if is_topk else result
        if dim is None or not given["self"].dim():
            return result
        experts, each = given["self"].shape[dim], choices.shape[dim] if is_topk else 1
        numbers = torch.arange(choices.numel()) % (experts if self is Routing.BALANCED else each)
        if is_topk:
            last = choices.transpose(dim, -1).shape
            numbers = numbers.view(last).transpose(dim, -1).contiguous()
        numbers = numbers.view(choices.shape)
        return (result[0], numbers) if is_topk else numbers
