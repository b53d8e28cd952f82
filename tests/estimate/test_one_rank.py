"""One rank of a data-parallel training: the tensors that DistributedDataParallel sends, and its buckets."""

import weakref

import torch

from trainmem.estimate import one_rank
from trainmem.measure import processes


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(600, 1000), torch.nn.Linear(1000, 10)
        self.register_buffer("small", torch.ones(1000))
        self.register_buffer("large", torch.ones(600))
        self.register_buffer("number", torch.tensor(3))

    def forward(self, tensor):
        return self.last(self.first(tensor * self.large) * self.small)


def made(steps, tell=None, **options):
    """Return the sizes of the flat tensors that DistributedDataParallel makes in one of two ranks, as lists.

    The first list is for the wrapper's construction, and each further one for a step. A size is a number of elements.
    Tensors of one element are left out.

    Args:
        steps: names of the steps: "accumulate" runs under `no_sync`, any other name sends gradients.
        tell: not used; `processes.call` passes it.
        options: options of DistributedDataParallel.
    """
    found = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            if function is torch.ops.aten.empty.memory_format and result.numel() > 1:
                found[-1].append(result.numel())
            return result

    with one_rank.one_rank_of(2), Seen():
        found.append([])
        model = torch.nn.parallel.DistributedDataParallel(Scaled(), **options)
        del found[-1][:-5]  # the model's own
        for step in steps:
            found.append([])
            with model.no_sync() if step == "accumulate" else torch.enable_grad():
                model(torch.ones(2, 600)).sum().backward()
    return found


WEIGHTS = 600 * 1000 + 1000 + 1000 * 10 + 10
ALL = WEIGHTS + 1000 + 600  # the number is alone of its type: it is sent as it is


def test_buffers_are_sent_before_each_forward_and_buckets_follow_the_order_of_gradients():
    start, first, second, third = processes.call(made, ["step", "step", "step"], timeout=120)
    assert start[-2:] == [ALL, WEIGHTS]
    assert first == [1600]
    assert second[0] == 5 and sum(second[1:-1]) == WEIGHTS and second[-1] == 1600, "rank 0's order, buckets, buffers"
    assert third == [1600]


def test_while_gradients_accumulate_nothing_is_sent_and_no_order_is_learnt():
    steps = ["accumulate", "accumulate", "step", "step"]
    _, first, second, third, fourth = processes.call(made, steps, timeout=120)
    assert [first, second, third] == [[1600], [], []]
    assert fourth[0] == 5 and fourth[-1] == 1600


def test_buffers_stay_where_they_are_on_request():
    _, first = processes.call(lambda tell: made(["step"], broadcast_buffers=False), timeout=120)
    assert first == []


def test_at_most_two_flat_copies_exist_while_a_large_model_is_broadcast(monkeypatch):
    """The estimate must hold at most two flat copies of buckets at a time, because torch ends the older of two
    broadcasts before it copies another bucket.
    """
    made, living, real = [], [], torch.empty

    def empty(*size, **options):
        living.append(sum(copy() is not None for copy in made))
        made.append(weakref.ref(copy := real(*size, **options)))
        return copy

    weights = [real(160 << 20, dtype=torch.int8, device="meta") for _ in range(8)]  # two to a bucket
    monkeypatch.setattr(torch, "empty", empty)
    one_rank._send(weights)
    assert living == [0, 1, 1, 1] and not any(copy() is not None for copy in made)
