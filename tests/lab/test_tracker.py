"""The tracker on sharded weights, on real ranks and on a single one; on other threads; and on storages that are
resized.
"""

import pytest

from perf_helpers import Lab
from trainmem.core.task import Task
from trainmem.estimate import estimate
from trainmem.measure import processes

TASK = Task("bert-tiny", seq_len=16, config={"num_hidden_layers": 2, "vocab_size": 2001})  # an odd number of words


def fsdp(task, reshard=True):
    """Run three training steps of a task with FSDP2, which gathers each layer separately.

    `reshard`: whether a layer's weights are sharded again after its forward.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ranks, model = init_device_mesh("cpu", (dist.get_world_size(),)), task.build_model()
    for part in (*model.bert.encoder.layer, model):
        fully_shard(part, mesh=ranks, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(**task.batch(2)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab("cpu", out=tmp_path_factory.mktemp("out"), lesson="tests")


@pytest.fixture(scope="module")
def counted(lab):
    return [lab.run(fsdp, f"{turn}", task=TASK, processes=2, measure="memory") for turn in range(2)]


@pytest.mark.nightly
def test_a_rank_keeps_its_share_of_weights_gradients_and_states(counted):
    whole, parts = 4 * counted[0].memory.parameters, counted[0].memory.phase_breakdowns["step"]
    assert parts["weights"] == pytest.approx(whole / 2, rel=0.02)
    assert parts["optimizer_states"] == pytest.approx(whole, rel=0.02)
    assert counted[0].memory.phase_breakdowns["backward"]["gradients"] == pytest.approx(whole / 2, rel=0.02)


@pytest.mark.nightly
def test_gathered_weights_are_copies_and_are_given_back(counted):
    layer = 4 * sum(weight.numel() for weight in TASK.build_model().bert.encoder.layer[0].parameters())
    timeline, phases = counted[0].memory.timeline, counted[0].memory.phase_breakdowns
    assert max(timeline["weight_copies"]) >= 2 * layer, "gathered in one piece, then cut into its tensors"
    assert phases["backward"]["weight_copies"] == phases["step"]["weight_copies"] == 0


@pytest.mark.nightly
def test_counts_are_the_same_each_time(counted):
    first, second = counted
    assert first.memory.phase_breakdowns == second.memory.phase_breakdowns
    assert [rank["breakdown"] for rank in first.ranks] == [rank["breakdown"] for rank in second.ranks]
    uneven = first.ranks[0]["peak_bytes"] - first.ranks[1]["peak_bytes"]
    assert 0 <= uneven < 0.001 * first.peak_bytes, "the second rank has a word less"


@pytest.mark.nightly
@pytest.mark.parametrize("reshard", [True, False])
def test_one_rank_traced_is_what_ranks_count(lab, counted, reshard):
    def function(task):
        return fsdp(task, reshard)

    run = counted[0] if reshard else lab.run(function, "kept", task=TASK, processes=2, measure="memory")
    followed = estimate(TASK, function=function, processes=2, device="cpu")
    assert followed.peak_bytes == run.peak_bytes and followed.memory.breakdown == run.memory.breakdown
    assert followed.memory.phase_breakdowns == run.memory.phase_breakdowns


def given_back_by_another_thread(tell, ranks):
    """Run three steps in which another thread frees 4 MB; return the memory that the meter reports: (bytes at the end
    of a step, peak in bytes).

    `ranks`: number of ranks; for more than one, the meter counts tensors (`by_tensors`) instead of the allocator's
    events. `tell`: not used; `processes.call` passes it.
    """
    import threading

    import torch

    from trainmem.measure.memory_meter import MemoryMeter

    with MemoryMeter(by_tensors=ranks > 1) as meter:
        model = torch.nn.Linear(10, 10)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            held = [torch.ones(1000, 1000)]
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
            model(torch.ones(1, 10)).sum().backward()
            optimizer.step()
    return meter.result().phases["step"], meter.result().peak_bytes


def test_what_another_thread_gives_back_counts_no_longer():
    after, peak = processes.call(lambda tell: given_back_by_another_thread(tell, 2), timeout=120)
    assert after < 10_000 and 4_000_000 <= peak < 4_100_000


def test_a_storage_that_is_resized_counts_with_its_size():
    def live(tell):
        import torch

        from trainmem.measure.tracker import Tracker, watched

        sizes, tracker = [], Tracker()
        with watched(tracker):
            for size in (4000, 0, 0, 2000):
                if not sizes:
                    storage = torch.empty(1000).untyped_storage()
                storage.resize_(size)
                sizes.append(sum(tracker.live(len(tracker.log)).values()))
            del storage
            sizes.append(sum(tracker.live(len(tracker.log)).values()))
        return sizes

    assert processes.call(live, timeout=120) == [4000, 0, 0, 2000, 0]


def test_a_storage_gets_its_category_from_the_phase_and_then_from_what_it_is_for():
    def categories(tell):
        """Train a layer for one step under a `Tracker`; return (categories at allocation, categories after the step).

        The first is {number of elements of a storage: its category when it was allocated}. The second is a list: the
        categories of the weights, gradients, optimizer states, inputs and output after the step. `tell`: not used;
        `processes.call` passes it.
        """
        import torch

        from trainmem.measure.tracker import Tracker, watched

        first = {}

        class Noting(Tracker):
            def _add_block(self, storage, category, operation):
                first.setdefault(storage.nbytes() // 4, category)
                super()._add_block(storage, category, operation)

        tracker = Noting()
        with watched(tracker) as parameters:
            layer = torch.nn.Linear(5, 3, bias=False)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
            inputs = torch.ones(7, 5)
            output = layer(inputs)
            output.sum().backward()
            optimizer.step()
            (states,) = optimizer.state.values()
            tensors = [*parameters, layer.weight.grad, *states.values(), inputs, output]
            last = [str(tracker.block(each).category) for each in tensors]
        return {size: str(category) for size, category in first.items()}, last

    first, last = processes.call(categories, timeout=120)
    assert first == {15: "inputs", 35: "inputs", 21: "activations", 1: "activations"}
    assert last == ["weights", "gradients", "optimizer_states", "inputs", "activations"]
