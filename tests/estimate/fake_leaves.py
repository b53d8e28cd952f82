"""Import `fakes` into a module of tests so that all its tests use fake tensors, as an estimate does; `leaf` makes a
fake tensor that requires a gradient.
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
