"""One rank of a data-parallel training, in a process that has no others."""

import contextlib
import os
import sys
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map_only

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


class Replica(torch.nn.parallel.DistributedDataParallel):
    """A data-parallel model as far as memory goes (torch/nn/parallel/distributed.py): what is sent at the start and,
    of buffers, before each forward, the reducer's buckets, which are a second set of gradients, and its map of what
    was used."""

    def __init__(self, module, find_unused_parameters=False, broadcast_buffers=True, **_):
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

    @contextlib.contextmanager
    def no_sync(self):
        before, self.syncs_gradients = self.syncs_gradients, False
        try:
            yield
        finally:
            self.syncs_gradients = before


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
