"""Trace one rank of a multi-GPU training in a process that has neither the other ranks nor a GPU.

Covers DistributedDataParallel, FSDP2 as the Trainer's `fsdp` configures it, and DeepSpeed's ZeRO: what each library
sends, shards and gathers. Not covered: the buffers of the communication library, e.g. NCCL.
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

BUCKETS = [1 << 20, 25 << 20]  # minimum bytes of the reducer's first bucket and of the others


@contextlib.contextmanager
def one_rank_of(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a fake process group of `ranks` ranks in this context."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with patch.object(torch.nn.parallel, "DistributedDataParallel", Replica):
            yield
    finally:
        torch.distributed.destroy_process_group()
        if deepspeed := sys.modules.get("deepspeed"):  # it keeps the group, but the next training has another one
            deepspeed.comm.comm.cdb = deepspeed.utils.groups._WORLD_GROUP = None


class Replica(torch.nn.parallel.DistributedDataParallel):
    """Allocate what DistributedDataParallel allocates on rank 0, without other processes.

    At the start, the module's parameters and buffers are copied into flat tensors, to be broadcast. Before a forward
    pass the buffers are copied in the same way, unless the previous forward pass ran without gradients or in `no_sync`.
    A replica holds the reducer's buckets, which are a second set of gradients, and with `find_unused_parameters` the
    reducer's map of used parameters. Source: torch/nn/parallel/distributed.py.
    """

    def __init__(self, module, *_, find_unused_parameters=False, broadcast_buffers=True, **__):
        torch.nn.Module.__init__(self)
        self.module, self.looks_for_unused = module, find_unused_parameters
        self.arrived: list[torch.nn.Parameter] = []  # in the first backward; the buckets are rebuilt in this order
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
        if self.arrived is not None and self.syncs_gradients:  # the reducer ignores passes without a sync
            self.arrived.append(parameter)

    def _pre_forward(self):
        if self.arrived and torch.is_grad_enabled():
            arrived, self.arrived = list(dict.fromkeys(self.arrived)), None
            agreed = torch.empty(len(arrived) + 1, dtype=torch.int32, device=arrived[0].device)
            del agreed  # rank 0 broadcasts its order
            self.buckets.clear()
            self.buckets = [*_bucketed(arrived, BUCKETS)]
        if self.sends_buffers and self.syncs_buffers:
            _send(list(self.module.buffers()))
        self.syncs_buffers = torch.is_grad_enabled() and self.syncs_gradients  # before the next forward

    def forward(self, *args, **kwargs):
        """Run the module and return its output.

        With `find_unused_parameters`, return a copy of the output, as DistributedDataParallel does.
        """
        self._pre_forward()
        output = self.module(*args, **kwargs)
        return tree_map_only(torch.Tensor, torch.clone, output) if self.looks_for_unused else output

    def no_sync(self):
        return patch.object(self, "syncs_gradients", False)


def _send(tensors: list[torch.Tensor]) -> None:
    """Allocate, one after another, the flat copies that rank 0 makes of the tensors that it broadcasts.

    The tensors are grouped into buckets, and each bucket is copied into one flat tensor. A tensor that is alone in its
    bucket is sent without a copy (csrc/distributed/c10d/comm.cpp: broadcast_coalesced).
    """
    for _ in _bucketed(tensors, [250 << 20], shares_one=True):
        pass  # at most two copies exist: the loop variable holds the previous one while the next is made


def _bucketed(
    tensors: list[torch.Tensor], limits: list[int], backwards: bool = False, shares_one: bool = False
) -> Iterator[torch.Tensor | None]:
    """Yield a new flat tensor for each bucket into which DistributedDataParallel puts the tensors.

    Args:
        limits: bytes of [the first bucket, each later bucket].
        backwards: whether to yield the buckets in reverse order, the last one first.
        shares_one: whether to yield None for a bucket of one tensor, which needs no copy.
    """
    buckets, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits)
    for bucket in reversed(buckets) if backwards else buckets:
        first, count = tensors[bucket[0]], sum(tensors[index].numel() for index in bucket)
        is_shared = shares_one and len(bucket) == 1
        yield None if is_shared else torch.empty(count, dtype=first.dtype, device=first.device)


# ---- FSDP2


@contextlib.contextmanager
def fsdp_enabled(send: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Make accelerate apply the Trainer's `fsdp` in this context; outside it, accelerate does so only on GPUs.

    `send`: called with each whole tensor when FSDP2 moves it to the device. FSDP2 shards the tensor only later.
    """
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
        if getattr(state, "fsdp_plugin", None) is not None:  # also for later `AcceleratorState` objects
            state.distributed_type = DistributedType.FSDP

    def mesh(*args, **kwargs):
        with _disable_current_modes():  # its table of ranks is on the host
            return plain_mesh(*args, **kwargs)

    def move(parameters, buffers, *_, **__):
        for tensor in itertools.chain(parameters, buffers):
            if isinstance(tensor, FakeTensor):
                with _disable_current_modes(), tensor.fake_mode:
                    tensor.data = torch.empty_like(tensor)  # the old memory stays on the host
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
    """Name the modelled GPU for DeepSpeed.

    The text is "cpu", so torch takes it for the CPU. `DeviceTracker` recognizes the class `DeviceName`, and treats the
    text as the GPU. A plain `str` "cpu" means the host.
    """


@contextlib.contextmanager
def deepspeed_on_a_card(config: dict | str, empty_cache: Callable[[], None]) -> Iterator[None]:
    """Make DeepSpeed choose the same code paths and buffers, in this context, as on a GPU with enough memory.

    In the context nothing waits for a stream.

    Args:
        config: DeepSpeed's configuration, or the path of a JSON file that contains it.
        empty_cache: called whenever DeepSpeed empties the allocator's cache.

    Raises:
        Invalid: the configuration offloads to the host, whose memory a trace cannot distinguish from the GPU's.
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
            return 1 << 60  # with less it would make its flat copy of the weights on the host

        def default_stream(self, device_index=None):
            return default

    def finding_none(kind):
        """Return a context in which DeepSpeed's optimizer class `kind` skips no step.

        The method `has_overflow` of the class still searches for infinite gradients, but returns False.
        """
        look = kind.has_overflow

        def looked(*args, **kwargs):
            look(*args, **kwargs)
            return False

        return patch.object(kind, "has_overflow", looked)

    with (
        patch.object(accelerators.real_accelerator, "ds_accelerator", Card()),
        # torch frees a tensor that another stream uses when that stream is done; here operations finish at once.
        patch.object(torch.Tensor, "record_stream", lambda *_, **__: None),
        patch.object(torch.cpu.Stream, "synchronize", lambda *_, **__: None, create=True),
        finding_none(stages_1_and_2.DeepSpeedZeroOptimizer),
        finding_none(stage_3.DeepSpeedZeroOptimizer_Stage3),
    ):
        yield
