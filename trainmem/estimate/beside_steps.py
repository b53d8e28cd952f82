"""Trace the Trainer's work outside training steps on fake tensors: evaluation batches and checkpoints."""

import collections
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from trainmem.estimate.operation_cache import fake, spec_of
from trainmem.estimate.trace_records import Spec
from trainmem.records import Category, stretches

if TYPE_CHECKING:
    from trainmem.estimate.trace import FakeTracker


_MADE = " "  # stands for a tensor that the operation made, in place of an input's name


def few_batches(tracker: "FakeTracker") -> contextlib.AbstractContextManager:
    """Return a context in which an evaluation traces two batches of each shape, and others only if necessary.

    For each later batch of a shape, the log entries of the last traced batch are repeated. These entries include new
    memory for the predictions, because the Trainer keeps the predictions of all batches. If such a repetition would
    be wrong (see `FakeTracker.repeated`), the batch is traced instead.
    """
    from transformers import Trainer

    plain, seen = Trainer.prediction_step, collections.defaultdict(list)

    def prediction_step(trainer, model, inputs, *rest, **options):
        given = {name: each for name, each in inputs.items() if isinstance(each, torch.Tensor)}
        known = seen[id(model), repr(rest), *((name, spec_of(each)) for name, each in given.items())]
        if len(known) > 1:
            span, structure, places = known[-1]
            if span and (made := tracker.repeated(span)) is not None:
                leaves = [made.pop(0) if place is _MADE else place and given[place].detach() for place in places]
                return tree_unflatten(leaves, structure)
        begin = len(tracker.log), len(tracker.operations)
        result = plain(trainer, model, inputs, *rest, **options)
        end = len(tracker.log), len(tracker.operations)
        leaves, structure = tree_flatten(result)
        own = {id(block) for block, sign in tracker.log[begin[0] : end[0]] if sign > 0}
        names = {(each.untyped_storage()._cdata, *spec_of(each)): name for name, each in given.items()}
        places, left = [], []  # labels are the batch's own tensors
        for leaf in leaves:
            if leaf is not None and id(block := tracker.block(leaf)) in own:
                left.append((None, spec_of(leaf), block))
                places.append(_MADE)
            else:
                places.append(leaf if leaf is None else names.get((leaf.untyped_storage()._cdata, *spec_of(leaf)), ""))
        span = None if "" in places else (begin, end, left)
        known.append((span, structure, places))
        return result

    return patch.object(Trainer, "prediction_step", prediction_step)


@contextlib.contextmanager
def checkpoints(tracker: "FakeTracker") -> Iterator[None]:
    """Replace functions that save and load, so that libraries can save and load fake tensors in this context.

    The new functions keep a tensor's `Spec` instead of the tensor.
    """
    files: dict[str, dict[str, Spec]] = {}

    def save(tensors: dict[str, torch.Tensor], file: str | os.PathLike, metadata: Any = None) -> None:
        files[str(file)] = {name: spec_of(t) for name, t in tensors.items()}
        Path(file).write_bytes(_header(tensors, metadata))

    plain, load_plain = torch.load, getattr(sys.modules.get("safetensors.torch"), "load_file", None)
    pickled: dict[Any, Any] = {}  # {file: the object, with the `Spec` of each tensor in place of the tensor}

    def load(file: str | os.PathLike, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
        if str(file) not in files:
            return load_plain(file, *args, **options)
        made = {name: fake(spec, tracker.fake) for name, spec in files[str(file)].items()}
        if not tracker.places_modules:  # without a GPU they are counted: all are in the memory of the file
            size = os.path.getsize(file) + sum(spec.bytes for spec in files[str(file)].values())
            memory = fake(Spec((size,), (1,), torch.uint8), tracker.fake)
            tracker.track_unlisted(memory, "safetensors")
            for tensor in made.values():
                tensor.memory = memory
        return made

    def load_adapters(file: str | os.PathLike, **_: Any) -> dict[str, torch.Tensor]:
        made = load(file)
        for tensor in made.values() if tracker.places_modules else ():
            tracker.send(tensor, Category.TEMPORARIES)  # peft loads adapters onto the GPU
        return made

    def identity(tensor: torch.Tensor) -> tuple:
        return tensor.device, tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()

    def pickle(saved: Any, file: Any, *args: Any, **__: Any) -> None:
        is_path = isinstance(file, str | os.PathLike)
        pickled[str(file) if is_path else file] = tree_map_only(torch.Tensor, spec_of, saved)
        if is_path:
            Path(file).touch()

    def unpickle(file: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        key = str(file) if isinstance(file, str | os.PathLike) else file
        if key not in pickled:
            return plain(file, map_location, *args, **options)

        def made(spec: Spec) -> torch.Tensor:
            tensor = fake(spec, tracker.fake)
            tracker.track_unlisted(tensor, "torch.load")
            if type(map_location) is not str or map_location != "cpu":  # torch loads onto the GPU
                tracker.send(tensor)
            return tensor

        return tree_map_only(Spec, made, pickled[key], is_leaf=lambda each: isinstance(each, Spec))

    replaced = [
        ("transformers.modeling_utils", {"safe_save_file": save, "id_tensor_storage": identity}),
        ("safetensors.torch", {"load_file": load}),
        ("torch", {"save": pickle, "load": unpickle}),
        ("peft.peft_model", {"safe_save_file": save, "id_tensor_storage": identity}),
        ("peft.utils.save_and_load", {"safe_load_file": load_adapters}),
    ]
    with contextlib.ExitStack() as stack:
        for module, functions in replaced:
            for name, function in functions.items() if module in sys.modules else ():
                stack.enter_context(patch.object(sys.modules[module], name, function))
        yield


def _header(tensors: dict[str, torch.Tensor], metadata: Any) -> bytes:
    """Return zeros in the size of a safetensors header (length, names, shapes), rounded up to a multiple of 8 bytes."""
    kinds = {kind: name for name, kind in sys.modules["safetensors.torch"]._TYPES.items()}
    about, offset = {"__metadata__": metadata} if metadata else {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda each: (-each[1].itemsize, each[0])):
        begin, offset = offset, offset + tensor.nbytes
        about[name] = {"dtype": kinds[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, offset]}
    text = json.dumps(about, separators=(",", ":")).encode()
    return bytes(8 + -(-len(text) // 8) * 8)


def peaks(marks: list[tuple[str, int, int]], totals: np.ndarray, begins: np.ndarray, first: int) -> tuple:
    """Return (phase, bytes at its start, peak bytes, operation at the peak, span) per evaluation, save and load.

    The bytes are live bytes. The operation at the peak is an index: 0 is the trace's first operation. The span is a
    pair of such indexes: of the phase's first operation, and of the first operation after the phase.

    Args:
        marks: the beginnings and ends of phases, each as (label, number of entries in the tracker's log so far, number
            of operations that the tracker has seen so far), see `Watcher.marks`.
        totals: (entries + 1,): live bytes before the first entry of the tracker's log and after each entry.
        begins: (operations + 1,): element i is the number of log entries before operation i of the trace, and the last
            element is the number of all entries.
        first: number of operations that the tracker saw before the trace's first operation; it is subtracted from the
            numbers of operations in `marks`.
    """
    found = []
    for phase, *borders in stretches(label for label, *_ in marks):
        (_, start, begin), (_, stop, end) = (marks[border] for border in borders)
        top = start + int(totals[start : stop + 1].argmax())
        operation = max(int(np.searchsorted(begins, top)) - 1, 0)
        found.append((phase, int(totals[start]), int(totals[top]), operation, (begin - first, end - first)))
    return tuple(found)
