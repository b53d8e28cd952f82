"""Let the ranks of a rehearsed program exchange known values, because the stub of NCCL sends nothing."""

import functools

import torch

from trainmem.rehearsal.known_values import EXACT, LARGEST_SENT, Values, wait_for_readers


def install(mode: Values) -> None:
    """Let the ranks exchange known values in `all_gather`, `gather` and `scatter` of `torch.distributed`, and so also
    in the functions for objects that call them, such as `all_gather_object`. The stub of NCCL returns each rank's own
    values.
    """
    module = torch.distributed.distributed_c10d
    in_one = (
        "all_gather_single" if hasattr(module, "all_gather_single") else "all_gather_into_tensor"
    )  # since torch 2.15
    all_gather, single = module.all_gather, getattr(module, in_one)
    gather, scatter = module.gather, module.scatter

    @functools.wraps(all_gather)
    def gathered(tensor_list, tensor, group=None, async_op=False):
        work = all_gather(tensor_list, tensor, group, async_op)
        exchange_all(mode, tensor, tensor_list, sum(each.nbytes for each in tensor_list), group)
        return work

    @functools.wraps(single)
    def gathered_in_one(output_tensor, input_tensor, group=None, async_op=False):
        work = single(output_tensor, input_tensor, group, async_op)
        if input_tensor.numel():
            parts = output_tensor.flatten().split(input_tensor.numel())
            exchange_all(mode, input_tensor, [*parts], output_tensor.nbytes, group)
        return work

    @functools.wraps(gather)
    def gathered_by_one(tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
        work = gather(tensor, gather_list, dst, group, async_op, group_dst)
        size = tensor.nbytes * torch.distributed.get_world_size(group)
        exchange_all(mode, tensor, gather_list or [], size, group)
        return work

    @functools.wraps(scatter)
    def scattered(tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
        work = scatter(tensor, scatter_list, src, group, async_op, group_src)
        send_each(mode, tensor, scatter_list or [], group)
        return work

    replaced = {"all_gather": gathered, in_one: gathered_in_one, "gather": gathered_by_one, "scatter": scattered}
    for name, replacement in replaced.items():
        for owner in (module, torch.distributed):
            setattr(owner, name, replacement)


def exchange_all(mode: Values, given: torch.Tensor, received: list[torch.Tensor], size: int, group) -> None:
    """Send a tensor of whole numbers or booleans to all ranks of a group, and write what each rank sent into this
    rank's `received`. Call it after the stub's collective, on all ranks of the group.

    Collectives of objects, e.g. `all_gather_object`, need this exchange: they send objects as bytes, and these bytes
    differ between ranks. If the values of one rank are unknown, all of `received` are noted as unknown. Tensors of
    other types, and more than `LARGEST_SENT` bytes, are not exchanged.

    Args:
        mode: this process's `Values`.
        given: the tensor that this rank sends.
        received: one tensor per rank of the group, into which that rank's values are written; empty: this rank
            receives nothing.
        size: bytes that all ranks send together. It must be the same on all ranks.
        group: the group; None: all ranks.
    """
    group = group or torch.distributed.group.WORLD
    if given.dtype not in EXACT or size > LARGEST_SENT or group.rank() < 0:
        return
    store, key = mode.next_key(group, "exchange")
    store.set(f"{key} {group.rank()}", mode.packed(given))
    packed = [store.get(f"{key} {rank}") for rank in range(group.size())]  # waits for all, whether it receives or not
    for content, tensor in zip(packed, received, strict=False):
        mode.unpack(content if all(packed) else b"", tensor)
    wait_for_readers(store, key, group)


def send_each(mode: Values, received: torch.Tensor, given: list[torch.Tensor], group) -> None:
    """Send small tensors of whole numbers or booleans, one to each rank of a group.

    In a rehearsal NCCL is a stub whose `scatter` sends nothing. Call this function after it, on all ranks of `group`.

    Args:
        mode: this process's `Values`.
        received: the tensor into which the values for this rank are written.
        given: on the sending rank: one tensor per rank of the group, in the order of the ranks. On other ranks: empty.
        group: the group; None: all ranks.
    """
    group = group or torch.distributed.group.WORLD
    if received.dtype not in EXACT or received.nbytes * group.size() > LARGEST_SENT or group.rank() < 0:
        return
    store, key = mode.next_key(group, "scatter")
    for rank, tensor in enumerate(given):
        store.set(f"{key} {rank}", mode.packed(tensor))
    mode.unpack(store.get(f"{key} {group.rank()}"), received)
    wait_for_readers(store, key, group)
