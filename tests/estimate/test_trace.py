"""A training traced on fake tensors: which operations are computed and which are not, and the bytes at each
operation.
"""

import contextlib
import copy
import itertools
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from trainmem.core.outcomes import Invalid
from trainmem.core.task import Task
from trainmem.core.training import Experiment
from trainmem.estimate.operation_cache import OperationCache, grouped_product
from trainmem.estimate.trace import DependsOnValues, FakeTracker, follow, recorded
from trainmem.estimate.trace_records import Operation, Spec
from trainmem.measure.tracker import Tracker, watched
from trainmem.measure.watcher import Block
from trainmem.records import TENSOR_CATEGORIES, Phase

aten = torch.ops.aten


@pytest.fixture
def tracker():
    """Yield a `FakeTracker` that is on during the test."""
    tracker = FakeTracker()
    with tracker:
        yield tracker


def fake(*shape, dtype=torch.float32):
    return torch.empty((1, *shape), dtype=dtype)[0]  # a single number would be made, for seeds are drawn into such


def loop(task):
    """Run two steps of a linear layer with 3 x 5 weights on 7 samples; the task is not used."""
    layer = torch.nn.Linear(5, 3, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        layer(torch.ones(7, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def followed(function, **options):
    return follow(Experiment("mine", Task("bert-tiny"), function=cloudpickle.dumps(function)), FakeTracker(**options))


def test_the_bytes_at_each_operation_are_those_counted_by_hand():
    trace = followed(loop)
    weights, inputs = 4 * 15, 4 * 35
    product = next(i for i, each in enumerate(trace.operations) if each.name == "aten.mm.default")
    live = dict(zip(TENSOR_CATEGORIES, trace.live[product].tolist(), strict=True))
    assert live["weights"] == weights and live["inputs"] == inputs and live["activations"] == 4 * 7 * 3
    assert trace.operations[product].made_bytes == 4 * 7 * 3
    assert trace.parameters == 15
    last = dict(zip(TENSOR_CATEGORIES, trace.marks["step"].tolist(), strict=True))
    assert (last["gradients"], last["optimizer_states"]) == (weights, weights)
    first, end = trace.last_step
    assert end == len(trace.operations) and trace.phases[end - 1] in (Phase.STEP, Phase.BEFORE)
    assert Phase.FORWARD in trace.phases[first:end] and 0 < first < end


class Forgetful(OperationCache):
    def _keep(self, *_):
        pass


def test_deep_copies_have_memory_of_their_own_and_views_of_them_do_not():
    """Copied modules, buffers and state dicts take the bytes that are counted, also while old copies are freed."""

    def copies(task):
        layer = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200))
        layer.register_buffer("part", torch.zeros(900)[100:].view(20, 40).t())
        layer.register_buffer("same", layer.part)
        both = torch.nn.ModuleList([layer, copy.deepcopy(layer)])
        optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
        for _ in range(3):
            sum(each(torch.ones(7, 300)).sum() for each in both).backward()
            best = copy.deepcopy(both.state_dict()), copy.deepcopy(layer)
            optimizer.step()
            optimizer.zero_grad()
            assert best[1][0].weight.grad is None
            assert [*copy.deepcopy([layer.part] * 2)[1].stride()] == [1, 40]

    tracker, counted = FakeTracker(), Tracker()
    follow(Experiment("mine", Task("bert-tiny"), function=cloudpickle.dumps(copies)), tracker)
    with watched(counted):
        copies(None)
    peaks = [max(itertools.accumulate(sign * block.bytes for block, sign in each.log)) for each in (tracker, counted)]
    assert peaks[0] == peaks[1]
    ends = [[each.live(length) for label, length, _ in each.marks if label == "step"] for each in (tracker, counted)]
    assert ends[0] == ends[1]


def test_following_from_a_cache_gives_the_same_trace():
    plain, cache = followed(loop, cache=Forgetful()), OperationCache()
    first = followed(loop, cache=cache)
    known = dict(cache.known)
    again = followed(loop, cache=cache)
    assert known and cache.known == known
    for trace in (first, again):
        assert trace.operations == plain.operations and trace.phases == plain.phases
        assert (trace.live == plain.live).all() and (trace.high == plain.high).all()


def test_small_data_are_real_and_weights_are_fake(tracker):
    assert isinstance(fake(3), FakeTensor)
    assert torch.arange(5).tolist() == [0, 1, 2, 3, 4]
    assert sorted(torch.randperm(4).tolist()) == [0, 1, 2, 3]
    assert isinstance(torch.ones(3), FakeTensor)
    tracker.phase = Phase.FORWARD
    assert torch.ones(3).tolist() == [1, 1, 1], "a mask that a model makes may be looked at"
    assert isinstance(torch.ones(2**24 + 1), FakeTensor), "too many to be made"
    length = torch.arange(10).sum()
    assert torch.div(length, 2, rounding_mode="floor").item() == 22
    assert torch.add(20, 3).item() == 23, "numbers alone may be a length"


def test_a_number_that_was_never_computed_is_finite(tracker):
    loss = fake()
    assert loss.item() == 1.0 and fake(dtype=torch.long).item() == 1
    assert not torch.isnan(loss) and not torch.isinf(loss).any().item()
    gradient = fake(3, 4)
    assert torch.isnan(gradient).logical_not().all().item()
    assert torch.isnan(gradient).sum().item() == 0
    found = torch.isnan(gradient)
    found.logical_or_(fake(3, 4) > 0)
    assert found.any().item() is False, "what it is for a boolean that is not known"
    assert not hasattr(found, "uniform"), "it was overwritten"


def test_what_depends_on_values_is_refused_with_its_operation(tracker):
    with pytest.raises(Invalid, match=r"aten\.nonzero\.default in the training depends on"):
        fake(3).nonzero()


def test_an_operation_whose_failure_is_caught_is_not_in_the_trace():
    def failing(task):
        for number in (torch.zeros(()), torch.nn.Linear(5, 3).weight.sum()):  # real and fake
            with contextlib.suppress(IndexError, RuntimeError):  # as accelerate cuts an evaluation's last batch
                number[:3]
        del number
        loop(task)

    def failed(tracker):
        with tracker, contextlib.suppress(DependsOnValues):
            fake(3).nonzero()
        return len(tracker.starts), len(tracker.operations)

    plain, trace = followed(loop), followed(failing)
    first, end = plain.last_step
    at = slice(trace.last_step[1] - (end - first), trace.last_step[1])
    assert trace.operations[at] == plain.operations[first:end] and (trace.high[at] == plain.high[first:end]).all()
    starts, operations = failed(FakeTracker())
    assert starts == operations > 0


def test_what_was_replaced_to_follow_a_training_is_back_after_it():
    def state():
        from transformers import Trainer

        hooks = torch.nn.modules.module._global_forward_hooks
        kinds = torch.utils._foreach_utils._foreach_supported_types
        return torch.nn.Module.to, Trainer.training_step, torch.autograd.backward, len(hooks), list(kinds)

    before = state()
    with pytest.raises(ZeroDivisionError):
        followed(lambda task: 1 / 0)
    assert state() == before


def test_a_tracker_is_recorded_until_its_last_allocation_or_mark():
    one, other = (Block(size, "weights", "aten.empty") for size in (3, 5))
    log = recorded(
        SimpleNamespace(
            log=[(one, 1), (other, 1), (one, -1), (other, -1)],
            operations=[(1, "setup", "", ""), (3, "forward", "", "layers.1.mlp")],
            marks=[("start", 1, 1), ("forward", 3, 2)],
            emptied=[1],
        )
    )
    assert [size for size, _ in log.blocks] == [3, 5] and log.events == [0, 1, ~0]
    assert [label.phase + label.module for _, label in log.blocks] == ["setup", "forwardlayers.1.mlp"]
    assert log.marks == [("start", 1), ("forward", 3)] and log.emptied == (1,)


# ---- what operations make of fake tensors is the same from the cache as from torch

WORK = {
    "a new tensor": lambda x, w: x @ w,
    "a view": lambda x, w: x.view(6, 8)[2:, 1:].t(),
    "a view of a view": lambda x, w: x[1].view(-1)[3:] * 2,
    "several tensors": lambda x, w: torch.nn.functional.layer_norm(x, [8])[0].topk(2),
    "parts": lambda x, w: torch.split(x, 1, dim=1)[2] + 1,
    "in place": lambda x, w: x.clone().mul_(2).add_(1),
    "lists in place": lambda x, w: torch._foreach_add_([x.clone(), w.clone()], 1) or x,
    "broadcast": lambda x, w: x.sum(0, keepdim=True).expand(4, 3, 8) + 1,
    "transposed": lambda x, w: (x.transpose(0, 1) + 1).contiguous(),
    "resized": lambda x, w: (x + 1).resize_(3, 4),
}
NOT_KEPT = {WORK["parts"]: 1, WORK["resized"]: 1}  # operations that are asked each time: several views, other sizes


def described(result):
    result = result[0] if isinstance(result, tuple | list) else result
    storage = result.untyped_storage()
    return result.shape, result.stride(), result.storage_offset(), result.dtype, storage.nbytes(), type(result)


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_result_from_the_cache_is_the_one_that_torch_gives(work):
    caches, seen, requested = [OperationCache()], [], []
    for _ in range(2):
        tracker = FakeTracker(cache=OperationCache(dict(caches[-1].known)))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x, w = torch.empty(2, 3, 8), torch.empty(8, 5)
        tracker.fake, ask = mode, tracker._fake_result
        tracker._fake_result = lambda *arguments, ask=ask: requested.append(len(caches)) or ask(*arguments)
        with tracker:
            seen.append(described(work(x, w)))
        seen[-1] += tuple((block.bytes, sign) for block, sign in tracker.log)
        caches.append(tracker.cache)
    assert seen[0] == seen[1]
    assert caches[1].known and caches[2].known == caches[1].known
    repeated = requested.count(2), NOT_KEPT.get(work, 0)
    assert requested.count(1) and repeated[0] == repeated[1], "a known result is not requested again"


def test_views_of_what_was_never_traced_and_shared_results_are_not_kept():
    with FakeTensorMode() as mode:
        x, y = torch.empty(4), torch.empty(4)
    tracker = FakeTracker(cache=OperationCache())
    tracker.fake = mode
    with tracker:
        torch.ops.aten.set_.source_Tensor(x, y)
        x.unsqueeze_(0)
    assert tracker.cache.known == {}


GROUPED = {
    "rows of groups": lambda dtype, inner, outer: (ones(10, inner, dtype), ones(3, outer, inner, dtype).mT, ENDS),
    "columns of groups": lambda dtype, inner, outer: (ones(10, inner, dtype).t(), ones(10, outer, dtype), ENDS),
    "a product for each": lambda dtype, inner, outer: (
        ones(3, 10, inner, dtype),
        ones(3, outer, inner, dtype).mT,
        None,
    ),
}
ENDS = torch.tensor([3, 6, 10], dtype=torch.int32)


def ones(*shape_and_dtype):
    *shape, dtype = shape_and_dtype
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize("sizes", [(24, 37), (20, 40), (22, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", GROUPED)
def test_a_grouped_product_is_laid_out_as_torchs_own_and_refused_where_that_is(kind, dtype, sizes):
    first, second, ends = GROUPED[kind](dtype, *sizes)
    mode = FakeTensorMode()
    given = mode.from_tensor(first), mode.from_tensor(second), ends
    try:
        expected = torch._grouped_mm(first, second, offs=ends)
    except RuntimeError as error:
        assert "multiple of 16 bytes" in str(error)
        with pytest.raises(Invalid, match="multiples of 16 bytes"):
            grouped_product(*given)
        return
    made = grouped_product(*given)
    assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


def chosen(choose, mask):
    """Return the shapes of the result and of the gradient if elements of a fake tensor (4, 6, 5) are selected.

    `choose`: function (tensor, mask) that selects them; `mask`: its second argument.
    """
    with FakeTracker():
        numbers = fake(4, 6, 5).requires_grad_()
        result = choose(numbers, mask)
        result.sum().backward()
    return [*result.shape], [*numbers.grad.shape]


@pytest.mark.parametrize("true", [0, 1, 7])
def test_how_many_a_mask_chooses_is_known_where_its_values_are(true):
    mask = torch.arange(24).view(4, 6) < true
    assert chosen(lambda numbers, mask: numbers[mask], mask) == ([true, 5], [4, 6, 5])
    assert chosen(lambda numbers, mask: numbers.masked_select(mask[..., None]), mask) == ([5 * true], [4, 6, 5])
    whole = torch.ones(4, 6, 5, dtype=torch.bool)
    assert chosen(lambda numbers, mask: numbers.masked_scatter(mask, numbers * 2), whole) == ([4, 6, 5], [4, 6, 5])


def test_how_many_a_mask_chooses_is_not_guessed(tracker):
    with pytest.raises(Invalid, match=r"depends on .*: measure"):
        numbers = fake(4, 6)
        numbers[numbers > 0]


def test_detection_assumes_that_an_unknown_mask_chooses_all(tracker):
    """In object detection, a mask of unknown values is assumed to select all elements, and two tensors are assumed to
    be equal only if they share their memory. D-FINE's loss needs both: it checks whether boxes are in range, and
    compares outputs of the model's layers.
    """
    tracker.checks_hold = True
    numbers, others = fake(4, 6), fake(4, 6)
    known = numbers[torch.arange(24).view(4, 6) < 5]
    assert known.shape == (5,) and not tracker.assumes_masks
    assert numbers[numbers > 0].shape == (24,) and tracker.assumes_masks
    assert (numbers > 0).any() and torch.equal(numbers, numbers.view(4, 6)) and not torch.equal(numbers, others)


def test_whole_numbers_that_a_forward_fills_are_known(tracker):
    tracker.phase = Phase.FORWARD
    sizes = torch.empty((2, 2), dtype=torch.long)
    sizes[0, 0], sizes[0, 1], sizes[1, 0], sizes[1, 1] = 3, 4, 1, 2
    assert sizes.prod(1).sum() == 14
    assert not torch.empty(5, dtype=torch.long).any(), "otherwise it would differ from run to run"
    assert isinstance(torch.empty(5), FakeTensor)


def test_what_a_collator_fills_is_there_and_weights_are_not(tracker):
    def padded(samples):
        return torch.full((2, 3), 7), torch.zeros(4, dtype=torch.bool), torch.ones(2)

    with tracker.collating():
        batch = next(iter(torch.utils.data.DataLoader(range(8), 2, collate_fn=padded)))
    assert not any(isinstance(each, FakeTensor) for each in batch)
    assert isinstance(torch.zeros(4, 4), FakeTensor)


def test_under_autocast_a_product_of_4_bits_is_another_question():
    mode, cache = FakeTensorMode(), OperationCache(device="cuda")
    operation = Operation(
        "bitsandbytes.gemm_4bit.default", (Spec((2, 4), (4, 1), torch.float32),), (1, (), (-1,)), False
    )
    function, made = torch.ops.aten.relu.default, []
    with mode:
        tensor = torch.empty(2, 4)
        for cache.within in (None, torch.bfloat16, None, torch.bfloat16):
            ask = lambda: tensor.to(cache.within or torch.float32, copy=True)  # noqa: E731
            made.append(cache.result(operation, function, (tensor,), [tensor], mode, ask))
    assert [each.dtype for each in made] == [torch.float32, torch.bfloat16] * 2
    assert len(cache.known) == 2


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(20, 5), (1, 1)])
@pytest.mark.filterwarnings("ignore:reduction")
def test_a_loss_takes_the_memory_that_its_kernel_keeps(tracker, reduction, shape):
    names = ["binary_cross_entropy", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "mse_loss"]
    names += ["multilabel_soft_margin_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss"]

    def sizes(tensor, target):
        found = {}
        for name in names:
            loss = getattr(torch.nn.functional, name)(tensor, target, reduction=reduction)
            gradient, *_ = torch.autograd.grad(loss.sum(), tensor)
            found[name] = [each.untyped_storage().nbytes() for each in (loss, gradient)]
        return found

    kinds = torch.float32, torch.bfloat16
    with _disable_current_modes():
        real = [
            sizes(torch.rand(shape, dtype=kind, requires_grad=True), torch.rand(shape, dtype=kind)) for kind in kinds
        ]
    assert real == [sizes(fake(*shape, dtype=kind).requires_grad_(), fake(*shape, dtype=kind)) for kind in kinds]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_norm_of_16_bits_keeps_statistics_in_the_type_of_its_weights(tracker, kind):
    def types(tensor, weight):
        layer = aten.native_layer_norm(tensor, [4], weight, weight, 1e-5)
        batch = aten.native_batch_norm(tensor, weight, weight, None, None, True, 0.1, 1e-5)
        group = aten.native_group_norm(tensor, weight, weight, 2, 4, 4, 2, 1e-5)
        backward = aten.native_group_norm_backward(tensor, tensor, *group[1:], weight, 2, 4, 4, 2, [True] * 3)
        return [[(each.dtype, each.shape) for each in results] for results in (layer, batch, group, backward)]

    with _disable_current_modes():
        real = types(torch.ones(2, 4, 4, dtype=torch.bfloat16), torch.ones(4, dtype=kind))
    assert real == types(fake(2, 4, 4, dtype=torch.bfloat16), fake(4, dtype=kind))
