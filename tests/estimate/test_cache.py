"""What operations make of fake tensors is the same from the cache as from torch."""

import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from perf_helpers.estimate.trace import FakeTracker, OperationCache

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
    caches, seen, asked = [OperationCache()], [], []
    for _ in range(2):
        tracker = FakeTracker(cache=OperationCache(pickle.loads(pickle.dumps(caches[-1].known))))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            x, w = torch.empty(2, 3, 8), torch.empty(8, 5)
        tracker.fake, ask = mode, tracker._fake_result
        tracker._fake_result = lambda *arguments, ask=ask: asked.append(len(caches)) or ask(*arguments)
        with tracker:
            seen.append(described(work(x, w)))
        seen[-1] += tuple((block.bytes, sign) for block, sign in tracker.log)
        caches.append(tracker.cache)
    assert seen[0] == seen[1]
    assert caches[1].known and caches[2].known == caches[1].known
    assert (asked.count(1) > 0, asked.count(2)) == (True, NOT_KEPT.get(work, 0)), "what is known is not asked again"


def test_views_of_what_was_never_followed_and_shared_results_are_not_kept():
    with FakeTensorMode() as mode:
        x, y = torch.empty(4), torch.empty(4)
    tracker = FakeTracker(cache=OperationCache())
    tracker.fake = mode
    with tracker:
        torch.ops.aten.set_.source_Tensor(x, y)
        x.unsqueeze_(0)
    assert tracker.cache.known == {}
