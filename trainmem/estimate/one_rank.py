"""One rank of a training that several share, in a process that has neither the others nor a GPU.

Covers DistributedDataParallel, FSDP2 as the Trainer's `fsdp` asks for it, and DeepSpeed's ZeRO: what each sends,
divides and gathers. Not covered: a network's buffers.
"""

import contextlib
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from trainmem.core.outcomes import Invalid

BUCKETS = [1 << 20, 25 << 20]  # bytes of the reducer's first bucket and of the others, at least


@contextlib.contextmanager
def one_rank_of(ranks: int) -> Iterator[None]:
    """This process is rank 0 of a group whose other members exist in name only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with patch.object(torch.nn.parallel, "DistributedDataParallel", Replica):
            yield
    finally:
        torch.distributed.destroy_process_group()
        if deepspeed := sys.modules.get("deepspeed"):  # which keeps the group, and the next training has another
            deepspeed.comm.comm.cdb = deepspeed.utils.groups._WORLD_GROUP = None


class Replica(torch.nn.parallel.DistributedDataParallel):
    """A data-parallel model as far as memory goes (torch/nn/parallel/distributed.py): what is sent at the start and,
    of buffers, before each forward, the reducer's buckets, which are a second set of gradients, and its map of what
    was used."""

    def __init__(self, module, *_, find_unused_parameters=False, broadcast_buffers=True, **__):
        torch.nn.Module.__init__(self)
        self.module, self.looks_for_unused = module, find_unused_parameters
        self.arrived: list[torch.nn.Parameter] = []  # in the first backward; their buckets are made anew in this order
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        _send([*module.parameters(), *module.buffers()])
        self.sends_buffers = broadcast_buffers and any(True for _ in module.buffers())
        self.syncs_gradients = self.syncs_buffers = True
        limits = BUCKETS if find_unused_parameters else [sys.maxsize]
        self.buckets = [*_bucketed(trained, limits, backwards=True)]
        if find_unused_parameters:
            self.used = torch.empty(len(trained), dtype=torch.int32, device=trained[0].device)
        else:
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(self._arrive)

    def _arrive(self, parameter):
        if self.arrived is not None and self.syncs_gradients:  # it looks at no others
            self.arrived.append(parameter)

    def _pre_forward(self):
        if self.arrived and torch.is_grad_enabled():
            arrived, self.arrived = list(dict.fromkeys(self.arrived)), None
            agreed = torch.empty(len(arrived) + 1, dtype=torch.int32, device=arrived[0].device)
            del agreed  # rank 0's order, sent to all
            self.buckets.clear()
            self.buckets = [*_bucketed(arrived, BUCKETS)]
        if self.sends_buffers and self.syncs_buffers:
            _send(list(self.module.buffers()))
        self.syncs_buffers = torch.is_grad_enabled() and self.syncs_gradients  # before the next forward

    def forward(self, *args, **kwargs):
        """Where unused parameters are looked for, what the model returns passes a node of autograd that copies it."""
        self._pre_forward()
        output = self.module(*args, **kwargs)
        return tree_map_only(torch.Tensor, torch.clone, output) if self.looks_for_unused else output

    def no_sync(self):
        return patch.object(self, "syncs_gradients", False)


def _send(tensors: list[torch.Tensor]) -> None:
    """What rank 0 sends to all: flat copies, two at a time (csrc/distributed/c10d/comm.cpp: broadcast_coalesced); a
    tensor that has no other of its type is sent as it is."""
    sent: list[torch.Tensor | None] = []
    for bucket in _bucketed(tensors, [250 << 20], shares_one=True):
        sent = [*sent[-1:], bucket]


def _bucketed(
    tensors: list[torch.Tensor], limits: list[int], backwards: bool = False, shares_one: bool = False
) -> Iterator[torch.Tensor | None]:
    """A flat tensor for each bucket into which DistributedDataParallel puts these, or the last bucket first.
    `shares_one`: None for a bucket of one."""
    buckets, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits)
    for bucket in reversed(buckets) if backwards else buckets:
        first, count = tensors[bucket[0]], sum(tensors[index].numel() for index in bucket)
        is_shared = shares_one and len(bucket) == 1
        yield None if is_shared else torch.empty(count, dtype=first.dtype, device=first.device)


# ---- FSDP2


@contextlib.contextmanager
def fsdp_taken_up(send: Callable[[torch.Tensor], None]) -> Iterator[None]:
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

    def move(parameters, buffers, *_, **__):
        for tensor in itertools.chain(parameters, buffers):
            if isinstance(tensor, FakeTensor):
                with _disable_current_modes(), tensor.fake_mode:
                    tensor.data = torch.empty_like(tensor)  # what was on the host stays there
                send(tensor)

    with (
        patch.object(AcceleratorState, "__init__", initialise),
        patch.object(_fsdp_init, "init_device_mesh", mesh),
        patch.object(_fsdp_init, "_move_states_to_device", move),
        # accelerate finds an optimizer's weights again by their addresses.
        patch.object(FakeTensor, "data_ptr", lambda tensor, *_, **__: tensor.untyped_storage()._cdata),
    ):
        yield


# ---- DeepSpeed


class DeviceName(str):
    """What DeepSpeed calls its device: torch takes it for the "cpu", where all tensors of an estimate lie, and whoever
    asks where a tensor is to lie can tell it from the host."""


@contextlib.contextmanager
def deepspeed_on_a_card(config: dict | str, empty_cache: Callable[[], None]) -> Iterator[None]:
    """Inside this context DeepSpeed decides as on a GPU that has room: it has streams, and waits for no operation.
    `empty_cache` is called where the allocator gives back what is free.

    Raises:
        Invalid: something is kept on the host, which is not told from the device here.
    """
    words = config if isinstance(config, dict) else json.loads(Path(config).read_text(encoding="utf-8"))
    for name in ("offload_optimizer", "offload_param"):
        if (words.get("zero_optimization", {}).get(name) or {}).get("device", "none") != "none":
            raise Invalid(
                f"{name}: memory that DeepSpeed keeps on the host cannot be estimated: rehearse it, or measure it"
            )
    accelerators, stages_1_and_2, stage_3 = (
        importlib.import_module(f"deepspeed.{name}")
        for name in ("accelerator", "runtime.zero.stage_1_and_2", "runtime.zero.stage3")
    )
    default = torch.cpu.current_stream()

    class Card(accelerators.cpu_accelerator.CPU_Accelerator):
        Stream, Event = torch.cpu.Stream, torch.cpu.Event
        stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)

        def device_name(self, device_index=None):
            return DeviceName("cpu")

        current_device_name = device_name

        def is_synchronized_device(self):
            return False

        def empty_cache(self):
            empty_cache()

        def available_memory(self, device_index=None):
            return 1 << 60  # else it makes its flat copy of the weights on the host

        def default_stream(self, device_index=None):
            return default

    def finding_none(kind):
        """It looks for numbers that are not finite, and finds none: gradients count as finite, no step is skipped."""
        look = kind.has_overflow

        def looked(*args, **kwargs):
            look(*args, **kwargs)
            return False

        return patch.object(kind, "has_overflow", looked)

    with (
        patch.object(accelerators.real_accelerator, "ds_accelerator", Card()),
        # A tensor that another stream uses is freed once that is done: here every operation is done at once.
        patch.object(torch.Tensor, "record_stream", lambda *_, **__: None),
        patch.object(torch.cpu.Stream, "synchronize", lambda *_, **__: None, create=True),
        finding_none(stages_1_and_2.DeepSpeedZeroOptimizer),
        finding_none(stage_3.DeepSpeedZeroOptimizer_Stage3),
    ):
        yield
