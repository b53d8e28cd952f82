"""Checkpoints of fake tensors: they are described in memory, and their files are empty."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import safetensors.torch
import torch

from trainmem.estimate.operation_cache import fake
from trainmem.estimate.trace_records import Spec

if TYPE_CHECKING:
    from trainmem.estimate.trace import FakeTracker


@contextlib.contextmanager
def described(tracker: "FakeTracker") -> Iterator[None]:
    """Let libraries save and load fake tensors. What is loaded is on a CPU, where it counts if the training is there;
    peft loads adapters on the GPU that the training uses."""
    files: dict[str, dict[str, Spec]] = {}

    def save(tensors: dict[str, torch.Tensor], file: str | os.PathLike, metadata: Any = None) -> None:
        files[str(file)] = {name: Spec(tuple(t.shape), t.stride(), t.dtype) for name, t in tensors.items()}
        Path(file).write_bytes(_header(tensors, metadata))

    def load(file: str | os.PathLike, **_: Any) -> dict[str, torch.Tensor]:
        made = {name: fake(spec, tracker.fake) for name, spec in files[str(file)].items()}
        if not tracker.places_modules:  # all tensors are in the memory of the file
            size = os.path.getsize(file) + sum(spec.bytes for spec in files[str(file)].values())
            memory = fake(Spec((size,), (1,), torch.uint8), tracker.fake)
            tracker.made_outside(memory, "safetensors")
            for tensor in made.values():
                tensor.memory = memory
        return made

    def load_adapters(file: str | os.PathLike, **_: Any) -> dict[str, torch.Tensor]:
        made = load(file)
        for tensor in made.values() if tracker.places_modules else ():
            tracker.made_outside(tensor, "safetensors")
        return made

    def identity(tensor: torch.Tensor) -> tuple:
        return tensor.device, tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()

    def pickle(_: Any, file: str | os.PathLike, *args: Any, **__: Any) -> None:
        Path(file).touch()

    replaced = [
        ("transformers.modeling_utils", {"safe_save_file": save, "id_tensor_storage": identity}),
        ("safetensors.torch", {"load_file": load}),
        ("torch", {"save": pickle}),
        ("peft.peft_model", {"safe_save_file": save, "id_tensor_storage": identity}),
        ("peft.utils.save_and_load", {"safe_load_file": load_adapters}),
    ]
    with contextlib.ExitStack() as stack:
        for module, functions in replaced:
            for name, function in functions.items() if module in sys.modules else ():
                stack.enter_context(patch.object(sys.modules[module], name, function))
        yield


def _header(tensors: dict[str, torch.Tensor], metadata: Any) -> bytes:
    """Return what a file of safetensors begins with: its length, names and shapes, to a multiple of 8 bytes."""
    kinds = {kind: name for name, kind in safetensors.torch._TYPES.items()}
    about, offset = {"__metadata__": metadata} if metadata else {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda each: (-each[1].itemsize, each[0])):
        begin, offset = offset, offset + tensor.nbytes
        about[name] = {"dtype": kinds[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, offset]}
    text = json.dumps(about, separators=(",", ":")).encode()
    return bytes(8 + -(-len(text) // 8) * 8)
