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
    """A data-parallel model as far as memory goes (torch/nn/parallel/distributed.py): what is sent at the start, the
    reducer's buckets, which are a second set of gradients, and its map of what was used."""

    def __init__(self, module, find_unused_parameters=False, **_):
        torch.nn.Module.__init__(self)
        self.module, self.looks_for_unused = module, find_unused_parameters
        self.arrived: list[torch.nn.Parameter] = []  # in the first backward; their buckets are made anew in this order
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        every, sent = [*module.parameters(), *module.buffers()], []
        for bucket in _bucketed(every, [250 << 20]):  # what rank 0 sends to all, two at a time
            sent = [*sent[-1:], bucket]
        del bucket, sent
        limits = BUCKETS if find_unused_parameters else [sys.maxsize]
        self.buckets = [*_bucketed(trained, limits, backwards=True)]
        if find_unused_parameters:
            self.used = torch.empty(len(trained), dtype=torch.int32, device=trained[0].device)
        else:
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(self._arrive)

    def _arrive(self, parameter):
        if self.arrived is not None:
            self.arrived.append(parameter)

    def _pre_forward(self):
        if self.arrived and torch.is_grad_enabled():
            arrived, self.arrived = list(dict.fromkeys(self.arrived)), None
            self.buckets.clear()
            self.buckets = [*_bucketed(arrived, BUCKETS)]

    def forward(self, *args, **kwargs):
        """Where unused parameters are looked for, what the model returns passes a node of autograd that copies it."""
        self._pre_forward()
        output = self.module(*args, **kwargs)
        return tree_map_only(torch.Tensor, torch.clone, output) if self.looks_for_unused else output

    def no_sync(self):
        return contextlib.nullcontext()


def _bucketed(tensors: list[torch.Tensor], limits: list[int], backwards: bool = False) -> Iterator[torch.Tensor]:
    """A flat tensor for each bucket into which DistributedDataParallel puts these, or the last bucket first."""
    buckets, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits)
    for bucket in reversed(buckets) if backwards else buckets:
        first = tensors[bucket[0]]
        yield torch.empty(sum(tensors[index].numel() for index in bucket), dtype=first.dtype, device=first.device)
