"""Run one evaluation, and save once, after the last step of a training that is measured or estimated.

The Trainer's own methods evaluate, save and load. In an estimate or a rehearsal, predictions have no values. There,
`unknown_values` lets the Trainer convert predictions to placeholder arrays.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

from trainmem.core.arguments import Arguments

_EVERY = ("eval_steps", "save_steps")
_EVALUATION = ("eval_strategy", "eval_on_start", "eval_delay", "load_best_model_at_end")


def evaluates(arguments: Arguments) -> bool:
    """Return whether a training evaluates at all."""
    return _strategy(arguments, "eval_strategy") != "no" or bool(arguments.get("eval_on_start"))


def _strategy(arguments: Arguments, name: str) -> str:
    chosen = arguments.get(name) or "no"
    return str(getattr(chosen, "value", chosen))


def once(arguments: Arguments, steps: int) -> Arguments:
    """Return the arguments changed so that a training of `steps` steps evaluates and saves only after its last step."""
    if not evaluates(arguments) and _strategy(arguments, "save_strategy") == "no":
        return arguments
    return arguments.without("eval_delay").replace(**dict.fromkeys(_EVERY, steps))


def never(arguments: Arguments) -> Arguments:
    """Return the arguments changed so that a training does not evaluate."""
    return arguments.without(*_EVALUATION) if evaluates(arguments) else arguments


def metrics(arguments: Arguments) -> Callable | None:
    """Return a `compute_metrics`, with which the Trainer keeps all predictions; None if only the loss is computed.

    Metrics are computed if `prediction_loss_only` is False or another argument needs them.
    """
    best = (arguments.get("metric_for_best_model") or "loss").removeprefix("eval_")
    needed = best != "loss" or bool(arguments.get("batch_eval_metrics"))
    if arguments.get("prediction_loss_only", not needed):
        return None

    def compute(predictions: Any, compute_result: bool = True) -> dict[str, float]:
        return {} if best == "loss" else {best: 0.0}

    return compute


@contextlib.contextmanager
def unknown_values(on_cpu: bool) -> Iterator[None]:
    """Let the Trainer convert predictions to placeholder arrays, which have the right shapes, but no values or memory.

    `on_cpu`: whether the predictions are on the CPU. If so, a placeholder keeps its prediction's tensor alive, because
    a real numpy array shares the memory of a CPU tensor.
    """
    from transformers import trainer_pt_utils

    joined, numpified = trainer_pt_utils.nested_concat, trainer_pt_utils.nested_numpify

    def numpify(tensors: Any) -> Any:
        if not hasattr(tensors, "untyped_storage"):
            return numpified(tensors)  # nested tensors: it calls this function for each
        is_bfloat16 = str(tensors.dtype) == "torch.bfloat16"  # numpy has no bfloat16: it becomes float32
        kind = "float32" if is_bfloat16 else str(tensors.dtype).removeprefix("torch.")
        array = _shaped(tensors.shape, kind)
        array.tensor = (tensors.float() if is_bfloat16 else tensors) if on_cpu else None
        return array

    def join(arrays: Any, more: Any, padding_index: int = -100) -> Any:
        if not isinstance(arrays, _array_class()):
            return joined(arrays, more, padding_index)
        widths = [max(pair) for pair in zip(arrays.shape[1:], more.shape[1:], strict=True)]
        return _shaped((len(arrays) + len(more), *widths), arrays.dtype)

    with (
        patch.object(trainer_pt_utils, "nested_numpify", numpify),
        patch.object(trainer_pt_utils, "nested_concat", join),
    ):
        yield


@functools.cache
def _array_class() -> type:
    import numpy as np  # here, so that commands that compute nothing start even if numpy is damaged

    class Array(np.ndarray):
        tensor: Any = None  # kept alive by the array

    return Array


def _shaped(shape: Iterable[int], dtype: Any) -> Any:
    import numpy as np

    return np.broadcast_to(np.ones((), dtype), tuple(shape)).view(_array_class())
