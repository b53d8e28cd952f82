"""Which tensors are on the device, and from when on: a tensor on the host counts only after it is sent there."""

import contextlib
import os
import sys
import types
from types import SimpleNamespace
from unittest.mock import patch

import kernel_cases
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainmem.core.arguments import Arguments
from trainmem.core.outcomes import Invalid
from trainmem.core.task import Task
from trainmem.core.training import Experiment
from trainmem.estimate import cuda, peak_memory
from trainmem.estimate.allocator import workspace_bytes
from trainmem.estimate.allocator_settings import is_since, release
from trainmem.estimate.device import DeviceTracker
from trainmem.estimate.device_arguments import Placement
from trainmem.estimate.memory_estimate import Device
from trainmem.measure import processes
from trainmem.records import Category, Phase


@pytest.fixture
def tracker():
    return DeviceTracker((8, 0))


def sizes(tracker):
    return [sign * block.bytes for block, sign in tracker.log]


def test_a_module_goes_to_the_device_child_by_child_and_a_shared_weight_once(tracker):
    with tracker, tracker.emulated():
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5, bias=False))
        model.head = torch.nn.Parameter(torch.empty(7))
        model.tied = model[0].weight
        model.register_buffer("positions", torch.arange(6))
        assert sizes(tracker) == [], "what is made before lies on the host"
        model.to(torch.device("cpu"))
        assert sizes(tracker) == [48, 16, 80, 28, 48]
    assert {block.category for block, _ in tracker.log} == {Category.WEIGHTS}


def test_buffers_that_are_parts_of_one_tensor_are_copied_each_by_itself(tracker):
    with tracker, tracker.emulated():
        module = torch.nn.Module()
        for name, part in zip(("rows", "columns"), torch.arange(10).view(2, 5), strict=True):
            module.register_buffer(name, part, persistent=False)
        module.to(torch.device("cpu"))
        module.to(torch.device("cpu"))
        assert sizes(tracker) == [40, 40]
        assert module.rows.tolist() == [0, 1, 2, 3, 4] and module.columns.tolist() == [5, 6, 7, 8, 9]


def test_what_backward_makes_is_run_after_what_forward_made(tracker):
    """A GPU's backward passes run in a thread that numbers autograd's nodes from 0; nodes of high numbers run first."""
    order = []

    def noted(tensor, name):
        tensor.grad_fn.register_prehook(lambda _: order.append(name))
        return tensor

    with tracker.emulated():
        weight = torch.ones(3, requires_grad=True)
        assert all((weight * 2).requires_grad for _ in range(20))  # the numbers that forward has used
        before = noted(weight.sin(), "before")
        (gradient,) = torch.autograd.grad(before.sum(), weight, create_graph=True)
        total = noted(gradient, "in backward").sum() + noted(weight.cos(), "after").sum() + before.sum()
        order.clear()
        total.backward()
    assert order == ["after", "before", "in backward"]


@pytest.mark.parametrize("place", [Placement.HOST, Placement.DEVICE])
def test_the_layout_of_matrices_is_that_of_cusolver_on_the_device_and_of_lapack_on_the_host(tracker, place):
    """cuSOLVER stores the matrix `Vh` of an SVD by rows, LAPACK by columns. This matters for memory: from a matrix
    stored by rows, `contiguous` returns some rows without a copy, so they keep the whole matrix alive; from one stored
    by columns, it copies them.
    """
    tracker.weights = Placement.DEVICE
    with tracker.emulated(), tracker, patch.object(tracker, "_forced", place):
        matrix = torch.empty(8, 12)
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        vectors = torch.linalg.eig(matrix[:, :8])[1]
        kept = right[:2].contiguous().untyped_storage().nbytes()
    on_device = place is Placement.DEVICE
    assert left.stride() == (1, 8) and right.stride() == ((12, 1) if on_device else (1, 8))
    assert vectors.stride() == ((8, 1) if on_device else (1, 8))
    assert kept == 4 * 12 * (8 if on_device else 2)
    assert torch.linalg.svd(torch.ones(8, 12), full_matrices=False)[2].stride() == (1, 8), "LAPACK"


def test_a_tensor_counts_from_when_it_is_sent(tracker):
    with tracker, tracker.emulated():
        tracker.weights = Placement.DEVICE
        batch, number = torch.arange(16).view(4, 4), torch.tensor(2.0)
        placed = torch.zeros(8, device=torch.device("cpu"))
        placed * number
        assert sizes(tracker) == [32, 32, -32], "a number stays on the host, 'device=' says where a tensor is made"
        sent = batch.to(torch.device("cpu"))
        sent.to(torch.device("cpu"))
        assert sizes(tracker)[3:] == [128], "once"
        sent.sum()
        assert sizes(tracker)[4:] == [8, -8], "and what is made of it lies there too"
        torch.tensor([1.0, 2.0], device="cpu")
        assert len(tracker.log) == 6, "'cpu' in so many words is the host"
        batch.to(torch.device("cpu"))
        assert sizes(tracker)[6:] == [128, -128], "what stays on the host is copied each time"


def test_a_hook_of_a_gradient_sends_what_it_needs_each_time(tracker):
    with tracker, tracker.emulated():
        tracker.weights = Placement.DEVICE
        weight = torch.zeros(8, device=torch.device("cpu")).requires_grad_()
        mask, masked = torch.ones(8, dtype=torch.bool), []
        weight.register_hook(lambda gradient: masked.append(mask.to(gradient.device).shape))
        for _ in range(2):
            weight.sum().backward()
    copies = [sign for block, sign in tracker.log if block.bytes == 8 and block.operation == "copy to the device"]
    assert masked == 2 * [(8,)] and copies == [1, -1] * 2


def test_in_a_loop_of_ones_own_what_is_made_is_on_the_device():
    tracker = DeviceTracker((8, 0), is_function=True)
    with tracker, tracker.emulated():
        made = torch.randn(4, 8)
        positions = torch.arange(3)
        assert sizes(tracker) == [128], "real tensors are the host's until they meet others"
        made[positions]
        assert sizes(tracker)[1:] == [24, 96, -96]


def test_results_are_placed_by_the_weights_then_the_inputs_then_the_request_then_the_phase(tracker):
    with tracker:
        host, sent = torch.zeros(3), torch.zeros(4)
        tracker.send(sent)
        place = tracker._placement_of_results
        assert place([sent], True) is Placement.HOST, "the weights are on the host"
        tracker.weights = Placement.DEVICE
        assert (place([sent], False), place([host], False)) == (Placement.DEVICE, Placement.HOST)
        assert place([], False) is Placement.HOST, "before the first forward"
        tracker.phase = Phase.FORWARD
        assert place([], False) is Placement.DEVICE
        tracker._requested = Placement.HOST
        assert place([], False) is Placement.HOST
        tracker._forced = Placement.NEITHER
        assert place([sent], True) is Placement.NEITHER


def test_a_tensor_of_tensors_is_traced_by_what_it_is_made_of(tracker):
    from torch.testing._internal.two_tensor import TwoTensor

    with tracker, tracker.emulated():
        tracker.weights = Placement.DEVICE
        two = TwoTensor(*(torch.zeros(8, device=torch.device("cpu")) for _ in range(2)))
        first = len(tracker.log)
        made = two + 1  # noqa: F841
        assert sizes(tracker)[first:] == [32, 32]


def paged(tell):
    """Make a state of a paged optimizer for a large weight and one for a small weight.

    Return ([bytes of each block on the device], [number of elements of each state]). The large weight's state is paged,
    so it has no block on the device.

    `tell`: not used; `processes.call` passes it.
    """
    from bitsandbytes.optim.optimizer import Optimizer8bit

    tracker = DeviceTracker((8, 0))
    optimizer = SimpleNamespace(is_paged=True, _cpu_paged_warned=True)
    with tracker, tracker.emulated("paged_adamw_32bit"):
        tracker.weights = Placement.DEVICE
        large, small = torch.zeros(100_000), torch.zeros(99_999)
        first = len(tracker.log)
        kept = [Optimizer8bit.get_state_buffer(optimizer, each, torch.uint8) for each in (large, small)]
        return [block.bytes for block, _ in tracker.log[first:]], [each.numel() for each in kept]


def test_large_states_of_a_paged_optimizer_lie_elsewhere():
    made, kept = processes.call(paged, timeout=120)
    assert made == [99_999] and kept == [100_000, 99_999]


def of_gradients(function, tell=None):
    """Return the device's allocations and frees while `function` runs forward and backward, in the form of
    `kernel_cases.events`: bytes for an allocation, ~n for the free of the n-th block.

    Blocks of at most 5,000 bytes or at least 1,000,000 bytes are left out.

    Args:
        function: called with the fake tensors of a linear layer: input (8, 4, 64), weight (32, 64) and bias (32,).
        tell: not used; `processes.call` passes it.
    """
    tracker = DeviceTracker((8, 0))
    with cuda.emulated(), tracker, tracker.emulated():
        tracker.weights = Placement.DEVICE
        with tracker.fake:
            tensor = torch.empty(8, 4, 64, requires_grad=True)
            weight, bias = torch.empty(32, 64, requires_grad=True), torch.empty(32, requires_grad=True)
        tracker.phase = Phase.FORWARD
        first = len(tracker.log)
        output = function(tensor, weight, bias)
        tracker.phase = Phase.BACKWARD
        gradient = torch.ones_like(output)
        torch.autograd.grad(output, tensor, gradient)
        events = ((id(block), sign * block.bytes) for block, sign in tracker.log[first:] if block.bytes > 5000)
        return kernel_cases.events((which, size) for which, size in events if abs(size) < 10**6)


def overwritten(tensor, weight, bias):
    return torch.relu_(torch.nn.functional.linear(tensor, torch.cat([weight] * 4), torch.cat([bias] * 4)))


def test_the_gradient_of_a_view_that_was_overwritten_is_copied_first():
    weights, output, ones, copy, base, clone, of_relu = 32768, 16384, 16384, 16384, 16384, 16384, 16384
    events = processes.call(of_gradients, overwritten, timeout=120)
    assert [size for size in events if size > 0][:7] == [weights, output, ones, copy, base, clone, of_relu]


def of_a_turned_tensor(tensor, weight, bias):
    tensor, weight, bias = tensor.transpose(0, 1), torch.cat([weight] * 4), torch.cat([bias] * 4)
    return torch.nn.functional.linear(tensor, weight, bias)


def test_a_bias_is_added_in_place_to_a_product_of_what_is_turned():
    weights, output = 32768, 16384
    events = processes.call(of_gradients, of_a_turned_tensor, timeout=120)
    assert events.count(weights) == 1 and events.count(output) == 2, "the product and its gradient: no sum beside them"


def of_clamped(tensor, weight, bias):
    limit = bias.detach().sum()
    return torch.cat([tensor] * 4).clamp(-limit, limit)


def test_the_two_bounds_of_a_clamp_are_joined_in_place():
    events = processes.call(of_gradients, of_clamped, timeout=120)
    # Since torch 2.14 a bound that is met has half of the gradient, which takes four masks more (seen in rehearsals).
    masks = 6 if is_since("2.14", release()) else 2
    assert events.count(8192) == masks + 1, "the masks, and the gradient of one of four: no further mask"


def changes(follows_each, options, tell):
    """Trace two steps of a GPT-2 on CUDA, each of six micro-batches unless `options` sets their number.

    Args:
        follows_each: trace each micro-batch, instead of repeating the trace of one.
        options: further training arguments, and the task's `dataset_size`.
        tell: not used; `processes.call` passes it.

    Returns:
        blocks: (whether it is an allocation, bytes, label) of each event of the trace.
        marks: {moment: number of events before it}; a moment is "start" (the first forward pass begins) or the
            name of a phase (this phase ends for the last time).
        emptied: for each time that the cache is emptied, the number of events before it.
    """
    from trainmem.estimate import trace

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    arguments = Arguments({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6} | options)
    task = Task("gpt2", 12, arguments.get("dataset_size", 512), config={"n_embd": 8, "n_layer": 2, "n_head": 2})
    experiment = Experiment("mine", task, arguments.without("dataset_size"))
    plain = patch.object(trace, "few_micro_batches", lambda *_: contextlib.nullcontext())
    with plain if follows_each else contextlib.nullcontext():
        log = peak_memory.trace_of(experiment, Device("cuda", (8, 0))).log
    blocks = [(event >= 0, *log.blocks[event if event >= 0 else ~event]) for event in log.events]
    return blocks, dict(log.marks), log.emptied


OF_ACCUMULATION = (
    {},
    {"bf16": True, "gradient_checkpointing": True},
    {"gradient_accumulation_steps": 2},
    {"torch_empty_cache_steps": 1, "max_grad_norm": 0.0},
    {"torch_empty_cache_steps": 2},
    {"gradient_accumulation_steps": 1, "bf16": True, "optim": "adafactor"},
    {"gradient_accumulation_steps": 1, "fp16": True},
)


@pytest.mark.parametrize(
    "options",
    [{"dataset_size": 9}, *(pytest.param(each, marks=pytest.mark.nightly) for each in OF_ACCUMULATION)],
    ids=str,
)
@pytest.mark.nightly
def test_micro_batches_that_are_not_traced_ask_for_what_those_like_them_did(options):
    # What they leave of the allocator's free blocks decides whether a later one is cut: GPT-2, 4 x 512 tokens, 512 B.
    few, all_ = (processes.call(changes, each, options, timeout=300) for each in (False, True))
    assert few == all_


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return torch.tensor([number] * 4)


def padded(samples):
    """Return samples (1-D tensors of ids) padded to one length as by TRL's collators; the result is on the samples'
    device.
    """
    whole = torch.full((len(samples), 6), -100, dtype=torch.int64, device=samples[0].device)
    for row, sample in zip(whole, samples, strict=True):
        row[: len(sample)] = sample
    return whole


def test_what_a_collator_makes_lies_on_the_host_until_it_is_sent():
    tracker = DeviceTracker((8, 0), is_function=True)
    with tracker, tracker.emulated(), tracker.collating():
        tracker.weights = Placement.DEVICE
        batch = next(iter(torch.utils.data.DataLoader(Numbers(), 2, collate_fn=padded)))
        assert sizes(tracker) == []
        sent = batch.to(torch.device("cpu"))
        assert sizes(tracker) == [96] and sent.tolist() == [[0] * 4 + [-100] * 2, [1] * 4 + [-100] * 2]


def test_the_logarithm_of_a_sigmoid_keeps_its_input_alone():
    tracker = DeviceTracker((8, 0), is_function=True)
    with cuda.emulated((8, 0)), tracker, tracker.emulated():
        tracker.weights = Placement.DEVICE
        torch.nn.functional.logsigmoid(torch.randn(100, 3).requires_grad_())
    assert sizes(tracker).count(1200) == 2, "its input and its result; on a CPU a buffer too"


@pytest.fixture
def trl(monkeypatch):
    """Install a stub of the part of TRL 1.16 whose loss differs between a GPU and a CPU without Triton."""
    kernels, utils = (types.ModuleType(name) for name in ("trl.kernels.chunked_logprob", "trl.trainer.utils"))
    utils._use_triton = kernels._use_triton = lambda device: device.type == "cuda"
    utils._supports_trl_loss_kernel = lambda logits: logits.is_cuda
    kernels._addmm_fp32 = lambda acc, one, other: acc.addmm_(one.float(), other.float())
    kernels._forward_kernel = kernels._backward_kernel = lambda tile: tile.float().exp()
    for part in (kernels, utils):
        monkeypatch.setitem(sys.modules, part.__name__, part)
    return kernels, utils


def test_trls_loss_takes_the_way_of_a_gpu_and_its_kernels_no_memory(trl):
    kernels, utils = trl
    tracker, device, fake = DeviceTracker((8, 0), is_function=True), torch.device("cpu"), FakeTensorMode()
    with fake:  # the product of two kinds of numbers is a GPU's
        tile, weight, total = torch.ones(6, 4).bfloat16(), torch.ones(4, 8).bfloat16(), torch.zeros(6, 8)
    with cuda.emulated((8, 0)), fake, tracker, tracker.emulated():
        assert kernels._use_triton(device) and utils._use_triton(device)
        kernels._backward_kernel[(6, kernels.triton.cdiv(4, 1024))](tile)
        kernels._addmm_fp32(total, tile, weight)
        requested = sizes(tracker)
        kernels._addmm_fp32(total, tile.float(), weight.float())
    assert workspace_bytes((8, 0)) in requested, "a product"
    assert not {96, 128} & {*requested} and {96, 128} <= {*sizes(tracker)}, "no copies in fp32, and no other tile"
    assert not utils._use_triton(device) and kernels._forward_kernel(torch.ones(6, 4)).shape == (6, 4)


def test_a_loss_of_trls_whose_kernels_are_not_emulated_is_refused(trl):
    _, utils = trl
    tracker = DeviceTracker((8, 0), is_function=True)
    with tracker.emulated(), pytest.raises(Invalid, match=r"Triton.*rehearse"):
        assert utils.is_triton_available() and utils._fused_logprob_entropy is not None
        utils._supports_trl_loss_kernel(torch.ones(3))
    assert not utils._supports_trl_loss_kernel(torch.ones(3)), "outside nothing is refused"


def test_what_autocast_cast_last_goes_first():
    tracker = DeviceTracker((8, 0), is_function=True)
    with cuda.emulated((8, 0)), tracker, tracker.emulated(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        tracker.weights = Placement.DEVICE
        torch.mm(torch.randn(2, 300), torch.randn(300, 5))
    casts = [size for size in sizes(tracker) if abs(size) in (1200, 3000)]
    assert casts == [3000, 1200, -1200, -3000]


def test_autocast_casts_arguments_from_the_last_on_and_the_tensors_of_a_list_in_their_order():
    tracker = DeviceTracker((8, 0), is_function=True)
    with cuda.emulated((8, 0)), tracker, tracker.emulated(), torch.autocast("cpu", torch.bfloat16):
        tracker.weights = Placement.DEVICE
        rows, columns = torch.randn(2, 300, requires_grad=True), torch.randn(300, 5, requires_grad=True)
        torch.einsum("ij,jk->ik", rows, columns)
        torch.mm(rows * 1, columns * 1)
    assert [size for size in sizes(tracker) if size in (1200, 3000)][:2] == [1200, 3000]
    products = [size for size in sizes(tracker) if size in (1200, 3000)][2:]
    assert products[-2:] == [3000, 1200]
