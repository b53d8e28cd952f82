"""One rank of a training that DeepSpeed shards (ZeRO) on GPUs, in a process that has neither others nor a GPU."""

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch

from perf_helpers.lab.outcomes import Invalid


class DeviceName(str):
    """What DeepSpeed calls its device: torch takes it for the "cpu", where all tensors of an estimate lie, and whoever
    asks where a tensor is to lie can tell it from the host."""


def _finding_none(look: Callable) -> Callable:
    """A search for numbers that are not finite, which finds none: gradients count as finite, and no step is skipped."""

    def looked(*args, **kwargs):
        look(*args, **kwargs)
        return False

    return looked


@contextlib.contextmanager
def on_a_card(config: dict | str, empty_cache: Callable[[], None]) -> Iterator[None]:
    """Inside this context DeepSpeed decides as on a GPU that has room: it has streams, and waits for no operation.
    `empty_cache` is called where the allocator gives back what is free.

    Raises:
        Invalid: something is kept on the host, which is not told from the device here.
    """
    words = config if isinstance(config, dict) else json.loads(Path(config).read_text(encoding="utf-8"))
    for name in ("offload_optimizer", "offload_param"):
        if (words.get("zero_optimization", {}).get(name) or {}).get("device", "none") != "none":
            raise Invalid(f"{name}: what DeepSpeed keeps on the host is not followed: rehearse it, or measure it")
    accelerators, stages_1_and_2, stage_3 = (
        importlib.import_module(f"deepspeed.{name}")
        for name in ("accelerator", "runtime.zero.stage_1_and_2", "runtime.zero.stage3")
    )
    default = torch.cpu.current_stream()

    class Card(accelerators.cpu_accelerator.CPU_Accelerator):
        Stream, Event = torch.cpu.Stream, torch.cpu.Event

        def device_name(self, device_index=None):
            return DeviceName("cpu")

        def current_device_name(self):
            return DeviceName("cpu")

        def is_synchronized_device(self):
            return False

        def empty_cache(self):
            empty_cache()

        def available_memory(self, device_index=None):
            return 1 << 60  # else it makes its flat copy of the weights on the host

        def stream(self, stream):
            return torch.cpu.stream(stream)

        def current_stream(self, device_index=None):
            return torch.cpu.current_stream()

        def default_stream(self, device_index=None):
            return default

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(accelerators.real_accelerator, "ds_accelerator", Card()))
        # A tensor that another stream uses is freed once that is done: here every operation is done at once.
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        for kind in (stages_1_and_2.DeepSpeedZeroOptimizer, stage_3.DeepSpeedZeroOptimizer_Stage3):
            stack.enter_context(patch.object(kind, "has_overflow", _finding_none(kind.has_overflow)))
        stack.enter_context(patch.object(torch.cpu.Stream, "synchronize", lambda stream: None, create=True))
        yield
