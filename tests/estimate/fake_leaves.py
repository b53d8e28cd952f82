"""Import `fakes` to use fake tensors in all tests of a module, as in an estimate; `fake` makes a fake tensor to
begin with.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

F32 = torch.float32


@pytest.fixture(autouse=True)
def fakes():
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def leaf(*shape, dtype=F32):
    return torch.empty(*shape, dtype=dtype, requires_grad=True)
