"""CUDA's autocast rules on fake tensors: the type of each operator's result, and the casts that are kept."""

import contextlib

import pytest
import torch
from fake_leaves import fakes, leaf  # noqa: F401, the fixture is used by being here
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from trainmem.estimate import autocast, cuda

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Casts(TorchDispatchMode):
    """Count in the attribute `count` how often `aten._to_copy` runs, i.e. tensors are cast to another type."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **kwargs or {})


def test_the_rules_of_autocast_are_those_that_this_torch_registers_for_cuda():
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    registered = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    rules = autocast._Casts().rules().keys()
    named = {name for name in registered if "dimname" in name.lower() or ".names_" in name}  # until torch 2.12
    called_by_no_model = {
        "_cudnn_rnn",  # of CUDA builds, and called on a GPU only
        "linalg_matrix_sqrth",  # since torch 2.14
    }
    assert registered - rules <= named | called_by_no_model
    assert rules - registered <= {"rms_norm"}  # since torch 2.12


def test_an_operator_without_a_rule_is_named_where_it_is_called_and_not_before(monkeypatch):
    monkeypatch.setitem(autocast._LISTS, "fp32", autocast._LISTS["fp32"].replace(" exp ", " "))
    with cuda.emulated(), torch.autocast("cpu", BF16):
        leaf(4).sin()
        with pytest.raises(RuntimeError, match=r"\bexp on CUDA .*use torch"):
            leaf(4).exp()


@pytest.mark.parametrize("half", [F16, BF16])
def test_autocast_gives_each_operator_the_type_that_it_has_on_cuda(half):
    x, weight = leaf(4, 8), leaf(8, 8)
    with unset_fake_temporarily():
        real = torch.zeros(4, 8)
    with cuda.emulated(), torch.autocast("cpu", half):
        low = functional.linear(x, weight)
        types = {
            "linear": low,
            "matmul": x @ weight,
            "gelu": functional.gelu(low),
            "softmax": low.softmax(-1),
            "layer_norm": functional.layer_norm(low, [8]),
            "sum": low.sum(),
            "norm": torch.ops.aten.norm.Scalar(low),
            "exp": low.exp(),
            "cat": torch.cat([low, x.to(half)]),
            "nll_loss": functional.nll_loss(low, torch.zeros(4, dtype=torch.long)),
            "addcmul, one of them wide": torch.addcmul(low, low, x),
            "attention": functional.scaled_dot_product_attention(*[x.view(1, 1, 4, 8)] * 3),
            "real, as an image is": functional.linear(real, weight),
            "double": x.double() @ weight.double(),
            "cumsum of integers": torch.zeros(3, dtype=torch.long).cumsum(0),
        }
        with pytest.raises(RuntimeError, match="with_logits"):
            functional.binary_cross_entropy(low, low)
    halves = {name for name, tensor in types.items() if tensor.dtype == half}
    assert halves == {"linear", "matmul", "gelu", "cat", "attention", "real, as an image is"}
    assert {types[name].dtype for name in types.keys() - halves} == {F32, torch.float64, torch.long}


def test_autocast_casts_a_weight_once_and_casts_its_gradient_back():
    x, weight = torch.empty(4, 8), leaf(8, 8)
    with cuda.emulated():
        for _ in range(2):
            with Casts() as seen, torch.autocast("cpu", F16):
                output = functional.linear(x, weight) + functional.linear(x, weight)
                output.backward(torch.empty_like(output))
            assert seen.count == 2 + 1 + 1  # x twice, the weight once; the gradient once
    assert weight.grad.dtype == F32


def test_a_trainer_with_fp16_autocasts():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = torch.nn.Linear(8, 8, bias=False)
    try:
        with cuda.emulated(), Casts() as seen:
            AcceleratorState._reset_state()
            Accelerator(mixed_precision="fp16", cpu=True).prepare_model(model, device_placement=False)(
                torch.empty(4, 8)
            )
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert seen.count == 3  # input, weight, and the output back to fp32


def test_who_queries_autocast_gets_cudas_answer():
    """While CUDA is emulated, code that asks torch whether autocast is on gets the answer for CUDA. peft's layers over
    quantized weights ask this, and cast their input if autocast is off.
    """
    own = torch.is_autocast_enabled
    with cuda.emulated():
        assert not torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is F16
        with torch.autocast("cuda", BF16):
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") is BF16
            with torch.autocast("cuda", enabled=False):
                assert not torch.is_autocast_enabled("cuda")
        assert not torch.is_autocast_enabled("cuda")
    assert torch.is_autocast_enabled is own


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True)])
def test_tf32_is_there_where_the_card_has_it(capability, has, tmp_path):
    from transformers import TrainingArguments

    with cuda.emulated(capability):
        refused = contextlib.nullcontext() if has else pytest.raises(ValueError, match="Ampere")
        with refused:
            TrainingArguments(tmp_path, tf32=True, use_cpu=True)
    torch.backends.cuda.matmul.allow_tf32 = False


def test_what_other_libraries_autocast_is_left_alone():
    """torchvision registers autocast rules of its own. If they were replaced, no training could be estimated for CUDA
    on Colab, which has torchvision.
    """
    with torch.library._scoped_library("elsewhere", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        for key in ("AutocastCUDA", "AutocastCPU"):
            library.impl("doubled", lambda x: x * 2, key)
        names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
        assert "elsewhere::doubled" in names, "it is not registered: this test would say nothing"
        with cuda.emulated(), torch.autocast("cuda", F16):
            assert functional.linear(torch.empty(4, 8), leaf(8, 8)).dtype is F16
