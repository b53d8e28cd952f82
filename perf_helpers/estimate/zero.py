"""One rank of a training that DeepSpeed shards (ZeRO) on GPUs, in a process that has neither others nor a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch


class DeviceName(str):
    """What DeepSpeed calls its device: torch takes it for the "cpu", where all tensors of an estimate lie, and whoever
    asks where a tensor is to lie can tell it from the host."""


@contextlib.contextmanager
def on_a_card(empty_cache: Callable[[], None]) -> Iterator[None]:
    """Inside this context DeepSpeed decides as on a GPU that has room: it has streams, and waits for no operation.
    `empty_cache` is called where the allocator gives back what is free."""
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    default = torch.cpu.current_stream()

    class Card(CPU_Accelerator):
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
        stack.enter_context(patch.object(real_accelerator, "ds_accelerator", Card()))
        # A tensor that another stream uses is freed once that is done: here every operation is done at once.
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None))
        stack.enter_context(patch.object(torch.cpu.Stream, "synchronize", lambda stream: None, create=True))
        yield
