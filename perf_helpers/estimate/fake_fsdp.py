"""One rank of a training that the Trainer shards by FSDP2 on GPUs, in a process that has neither others nor a GPU."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def taken_up(send: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside this context accelerate takes the Trainer's `fsdp` up, as it does on GPUs only, and `send` is told each
    tensor that FSDP2 sends to the device before it is divided."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    plain, plain_mesh = AcceleratorState.__init__, _fsdp_init.init_device_mesh

    def initialise(state, *args, fsdp_plugin=None, **kwargs):
        plain(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            state.fsdp_plugin = fsdp_plugin
            if state._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state._mixed_precision)
        if getattr(state, "fsdp_plugin", None) is not None:  # whoever asks for the state again, too
            state.distributed_type = DistributedType.FSDP

    def mesh(*args, **kwargs):
        with _disable_current_modes():  # its table of ranks is the host's
            return plain_mesh(*args, **kwargs)

    def move(parameters, buffers, device):
        for tensor in itertools.chain(parameters, buffers):
            if isinstance(tensor, FakeTensor):
                with _disable_current_modes(), tensor.fake_mode:
                    tensor.data = torch.empty_like(tensor)  # what was on the host stays there
                send(tensor)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(AcceleratorState, "__init__", initialise))
        stack.enter_context(patch.object(_fsdp_init, "init_device_mesh", mesh))
        stack.enter_context(patch.object(_fsdp_init, "_move_states_to_device", move))
        # accelerate finds an optimizer's weights again by their addresses.
        stack.enter_context(patch.object(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata))
        yield
