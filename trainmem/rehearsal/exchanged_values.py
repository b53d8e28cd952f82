"""Let the ranks of a rehearsed program exchange known values, because the stub of NCCL sends nothing.

The ranks send each other small tensors with known values through torch's key-value store, and wait for each other at a
barrier. Objects are exchanged, too, e.g. by `all_gather_object`: torch sends them as tensors of bytes.

Each context manager below belongs to a collective, and takes the collective's own arguments, by torch's names for them.
It does its part before and after the stub's collective, on each rank that calls the collective.
"""

import collections
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed

from trainmem.rehearsal.device_memory import memory_of, out_of_sight
from trainmem.rehearsal.known_values import EXACT, LARGEST_FLOAT, Values

LARGEST_SENT = 1 << 20  # bytes of whole numbers or booleans that the ranks exchange in one collective
_sent = collections.Counter()  # group and kind of collective -> how many so far
_REDUCE = {  # from the values of all ranks, stacked
    "SUM": lambda values: values.sum(0),
    "AVG": lambda values: values.sum(0) / len(values),
    "PRODUCT": lambda values: values.prod(0),
    "MIN": lambda values: values.amin(0),
    "MAX": lambda values: values.amax(0),
}


def install(mode: Values) -> None:
    """Wrap collectives of `torch.distributed`, e.g. `all_gather`, so that they also exchange ranks' known values."""
    module, inside = distributed.distributed_c10d, threading.local()

    def exchanging(plain: Callable, exchange: Callable) -> Callable:
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def run(*args, **kwargs):
            given = signature.bind(*args, **kwargs).arguments
            is_again = getattr(inside, "is_on", False)  # torch calls it again, by its name, without the function mode
            if is_again or module._rank_not_in_group(given.get("group")):
                return plain(*args, **kwargs)
            inside.is_on = True
            try:
                with exchange(mode, **given):
                    return plain(*args, **kwargs)
            finally:
                inside.is_on = False

        return run

    exchanges = {"all_gather": _all_gather, "gather": _gather, "scatter": _scatter, "broadcast": _broadcast}
    exchanges |= {"all_reduce": _all_reduce, "barrier": _barrier}
    exchanges |= {"send": _send, "recv": _recv, "batch_isend_irecv": _send_and_receive}
    exchanges |= {name: _all_gather_in_one for name in ("all_gather_single", "all_gather_into_tensor")}
    for name, exchange in exchanges.items():
        if plain := getattr(module, name, None):  # all_gather_single: since torch 2.15
            for owner in (module, distributed):
                setattr(owner, name, exchanging(plain, exchange))


@contextlib.contextmanager
def _all_gather(mode: Values, tensor_list: list[Tensor], tensor: Tensor, group=None, **_) -> Iterator[None]:
    sent = _packed(mode, tensor)
    yield
    _receive(mode, tensor_list, _from_all(mode, tensor, sent, group))


@contextlib.contextmanager
def _all_gather_in_one(mode: Values, output_tensor: Tensor, input_tensor: Tensor, group=None, **_) -> Iterator[None]:
    sent = _packed(mode, input_tensor)
    yield
    if input_tensor.numel():
        parts = output_tensor.flatten().split(input_tensor.numel())
        _receive(mode, [*parts], _from_all(mode, input_tensor, sent, group))


@contextlib.contextmanager
def _gather(mode: Values, tensor: Tensor, gather_list: list[Tensor] | None = None, group=None, **_) -> Iterator[None]:
    sent = _packed(mode, tensor)
    yield
    _receive(mode, gather_list or [], _from_all(mode, tensor, sent, group))


@contextlib.contextmanager
def _scatter(mode: Values, tensor: Tensor, scatter_list: list[Tensor] | None = None, group=None, **_) -> Iterator[None]:
    group = group or distributed.group.WORLD
    sent = {rank: _packed(mode, each) for rank, each in enumerate(scatter_list or [])}
    yield
    if _is_sent(tensor, group.size()):
        _receive(mode, [tensor], _exchange(mode, group, "scatter", sent, [group.rank()]))


@contextlib.contextmanager
def _broadcast(mode: Values, tensor: Tensor, src=None, group=None, group_src=None, **_) -> Iterator[None]:
    """Send the source rank's known values to all ranks, around a call of `broadcast`, which runs at the `yield`.

    DeepSpeed, for example, checks that all ranks have the same values.
    """
    group = group or distributed.group.WORLD
    source = group_src if group_src is not None else distributed.get_group_rank(group, src or 0)
    sent = {source: _packed(mode, tensor)} if group.rank() == source else {}
    yield
    if _is_sent(tensor):
        _receive(mode, [tensor], _exchange(mode, group, "broadcast", sent, [source]))


@contextlib.contextmanager
def _all_reduce(mode: Values, tensor: Tensor, op=distributed.ReduceOp.SUM, group=None, **_) -> Iterator[None]:
    sent, reduced = _packed(mode, tensor), _REDUCE.get(getattr(op, "name", ""))
    yield
    packed = _from_all(mode, tensor, sent, group) if reduced else []
    if packed and all(packed):
        values = [torch.empty_like(tensor, device="cpu") for _ in packed]
        _receive(mode, values, packed)
        mode.fill(tensor, reduced(torch.stack(values)))
    elif packed or tensor.dtype not in EXACT:
        mode.mark(False, tensor)


@contextlib.contextmanager
def _barrier(mode: Values, group=None, **_) -> Iterator[None]:
    """Make all ranks wait for each other, e.g. so that no rank reads a file before another one has written it."""
    yield
    group = group or distributed.group.WORLD
    _exchange(mode, group, "barrier", {group.rank(): b"="}, [*range(group.size())])


@contextlib.contextmanager
def _send(mode: Values, tensor: Tensor, dst=None, group=None, tag=0, group_dst=None) -> Iterator[None]:
    _between_two(mode, tensor, group, group_dst, dst, is_sender=True)
    yield


@contextlib.contextmanager
def _recv(mode: Values, tensor: Tensor, src=None, group=None, tag=0, group_src=None) -> Iterator[None]:
    yield
    _between_two(mode, tensor, group, group_src, src, is_sender=False)


@contextlib.contextmanager
def _send_and_receive(mode: Values, p2p_op_list: list) -> Iterator[None]:
    """When this context ends, do all sends of `p2p_op_list`, then its receives."""
    yield
    for is_sender in (True, False):  # two ranks that receive first would wait for each other
        for each in (each for each in p2p_op_list if (each.op.__name__ == "isend") == is_sender):
            _between_two(mode, each.tensor, each.group, each.group_peer, None, is_sender)


def _between_two(mode: Values, tensor: Tensor, group, peer: int | None, rank: int | None, is_sender: bool) -> None:
    """Send a small tensor of whole numbers or booleans to another rank, or receive one from it.

    `peer`: the other rank's number in the group; `rank`: its number among all ranks, used if `peer` is None.
    """
    group = group or distributed.group.WORLD
    if peer is None and rank is not None:
        peer = distributed.get_group_rank(group, rank)
    if peer is None or tensor.dtype not in EXACT or tensor.nbytes > LARGEST_SENT:  # no peer: any rank
        return  # values stay unknown
    ends = (group.rank(), peer) if is_sender else (peer, group.rank())
    store, key = _next_key(group, "{} to {}".format(*ends))
    if is_sender:
        store.set(key, _packed(mode, tensor))
    else:
        _unpack(mode, store.get(key), tensor)


def _is_sent(tensor: Tensor, ranks: int = 1) -> bool:
    """Return whether `tensor` is small enough to be exchanged; `ranks`: how many such tensors are exchanged."""
    return (tensor.dtype in EXACT and tensor.nbytes * ranks <= LARGEST_SENT) or tensor.numel() <= LARGEST_FLOAT


def _from_all(mode: Values, tensor: Tensor, sent: bytes, group) -> list[bytes]:
    """Send this rank's values `sent` to a group; return all ranks' values, or [] if `tensor` is too large."""
    group = group or distributed.group.WORLD
    everyone = [*range(group.size())]
    return _exchange(mode, group, "all", {group.rank(): sent}, everyone) if _is_sent(tensor, len(everyone)) else []


def _receive(mode: Values, tensors: list[Tensor], packed: list[bytes]) -> None:
    """Write each item of `packed` (see `_packed`) into its tensor; if one item is b"", mark all tensors as unknown."""
    for content, tensor in zip(packed, tensors, strict=False):
        _unpack(mode, content if all(packed) else b"", tensor)


def _exchange(mode: Values, group, kind: str, sent: dict[int, bytes], wanted: list[int]) -> list[bytes]:
    """Put `sent`, {key: content}, into the ranks' store; return the contents of the keys `wanted` once all exist.

    All ranks of `group` call this function. `kind`: kind of collective; each kind has its own keys.
    """
    store, key = _next_key(group, kind)
    for each, content in sent.items():
        store.set(f"{key} {each}", content)
    found = [store.get(f"{key} {each}") for each in wanted]
    # Rank 0's process holds the store: if it ended now, the other ranks could no longer read.
    if distributed.get_rank() == 0:
        store.wait([f"{key} read {rank}" for rank in range(group.size()) if rank != group.rank()])
    else:
        store.set(f"{key} read {group.rank()}", b"1")
    return found


def _next_key(group, kind: str) -> tuple[Any, str]:
    """Return the ranks' key-value store, and a key for the group's next collective of this kind."""
    name = f"{group.group_name}, {kind}"
    _sent[name] += 1
    return distributed.distributed_c10d._get_default_store(), f"{name} {_sent[name]}"


def _packed(mode: Values, tensor: Tensor) -> bytes:
    """Return b"=" and a tensor's values as bytes; b"" if the values are unknown."""
    with out_of_sight():
        if not mode.is_known(tensor):
            return b""
        return b"=" + memory_of(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _unpack(mode: Values, content: bytes, tensor: Tensor) -> None:
    """Write the values in `content` (see `_packed`) into `tensor`, or mark `tensor` as unknown."""
    if len(content) == 1 + tensor.nbytes > 1:
        mode.fill(tensor, torch.frombuffer(bytearray(content[1:]), dtype=tensor.dtype).view(tensor.shape))
    elif tensor.numel():  # unknown, or of another size
        mode.mark(False, tensor)
