"""CUDA's behaviour on fake tensors: saved tensors, selected kernels, and the allocator's segments."""

import contextlib
import weakref

import pytest
import torch
from fake_leaves import fakes, leaf  # noqa: F401, the fixture is used by being here
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from trainmem.estimate import cuda
from trainmem.estimate.allocator_settings import release

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Seen(TorchDispatchMode):
    """Record the operators that run: `names` lists them in order, and `at_end` is {operator: bytes of the fake storages
    that are alive after its last run}.
    """

    def __init__(self):
        super().__init__()
        self.names, self.at_end, self.live, self.known = [], {}, 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        name = str(function).removeprefix("aten.").removesuffix(".default")
        if not name.startswith("prim."):  # a fake tensor asked for its device
            self.names.append(name)
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, FakeTensor) and (storage := tensor.untyped_storage())._cdata not in self.known:
                self.known[storage._cdata] = weakref.ref(storage, self.died(storage._cdata, storage.nbytes()))
                self.live += storage.nbytes()
        self.at_end[name] = self.live
        return result

    def died(self, key, size):
        def gone(_):
            del self.known[key]
            self.live -= size

        return gone


def saved(tensor):
    """Return {name: bytes of the storage} of the tensors that autograd saved for the operation that made `tensor`.

    The name is the end of autograd's attribute, e.g. "self" for `_saved_self`.
    """
    node = tensor.grad_fn
    names = [name for name in dir(node) if name.startswith("_saved_")]
    values = {name.removeprefix("_saved_"): getattr(node, name) for name in names}
    return {name: v.untyped_storage().nbytes() for name, v in values.items() if isinstance(v, torch.Tensor)}


def attend(dtype, mask=None, heads=(4, 4), head=64, length=100, capability=(8, 0), torch_version=None, **options):
    query, key, value = (leaf(2, count, length, head, dtype=dtype) for count in (heads[0], heads[1], heads[1]))
    with cuda.emulated(capability, release(torch_version)):
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def kernel(output):
    while True:
        name = output.grad_fn.name() if hasattr(output, "grad_fn") else output.name()
        for kind in ("Flash", "Efficient", "Cudnn"):
            if kind in name:
                return kind.lower()
        node = output.grad_fn if hasattr(output, "grad_fn") else output
        if "Slice" not in name:
            return "math"
        output = node.next_functions[0][0]


# ---- attention


def test_flash_saves_its_inputs_its_output_and_one_float_a_row():
    kept = saved(attend(BF16))
    one = 2 * 4 * 100 * 64 * 2
    assert {kept[name] for name in ("query", "key", "value", "output")} == {one}
    assert kept["logsumexp"] == 2 * 4 * 100 * 4


def test_memory_efficient_attention_rounds_its_rows_up_to_32():
    kept = saved(attend(F32))
    assert {kept[name] for name in ("query", "key", "value", "output")} == {2 * 4 * 100 * 64 * 4}
    assert kept["log_sumexp"] == 2 * 4 * 128 * 4


def test_a_boolean_mask_becomes_an_additive_one_padded_to_8_columns():
    mask = torch.ones(2, 1, 100, 100, dtype=torch.bool)
    output = attend(BF16, mask)
    assert kernel(output) == "efficient"
    assert saved(output)["attn_bias"] == 2 * 100 * 104 * 2


def test_a_bias_of_one_head_is_copied_into_8_columns_more():
    # As T5 makes it of one head: in steps of 1 in that of heads too, which torch does not take for aligned.
    bias = torch.ones(96, 96, 1).permute(2, 0, 1)[None]
    assert bias.stride(1) == bias.stride(3) == 1
    output = attend(F32, bias, heads=(1, 1), length=96)
    assert kernel(output) == "efficient"
    assert saved(output)["attn_bias"] == 96 * (96 + 8) * 4


def test_of_several_results_the_others_go_in_their_order():
    gone = []

    def results():
        made = tuple(torch.empty(number) for number in range(4))
        for each in made:
            weakref.finalize(each, gone.append, len(each))
        return made

    first = cuda._first(results())
    assert len(first) == 0 and gone == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": BF16}, "flash"),
        ({"dtype": F16, "head": 60}, "flash"),  # padded to 64
        ({"dtype": BF16, "head": 264}, "efficient"),
        ({"dtype": BF16, "heads": (4, 2), "enable_gqa": True}, "flash"),
        ({"dtype": F32, "heads": (4, 2), "enable_gqa": True, "torch_version": "2.13"}, "math"),
        ({"dtype": F32, "heads": (4, 2), "enable_gqa": True, "torch_version": "2.14"}, "efficient"),
        ({"dtype": F32, "head": 62}, "math"),  # not a multiple of 4
        ({"dtype": F16, "capability": (7, 5)}, "efficient"),
        ({"dtype": BF16, "capability": (7, 0)}, "math"),
        ({"dtype": BF16, "head": 224, "capability": (8, 6)}, "efficient"),  # 256 KiB of shared memory are lacking
        ({"dtype": BF16, "capability": (9, 0)}, "cudnn"),
        ({"dtype": BF16, "capability": (9, 0), "dropout_p": 0.1}, "flash"),
        ({"dtype": BF16, "capability": (9, 0), "head": 144, "torch_version": "2.13"}, "cudnn"),
        ({"dtype": BF16, "capability": (9, 0), "head": 144, "torch_version": "2.14"}, "flash"),
        ({"dtype": BF16, "capability": (10, 0), "head": 144}, "flash"),
        ({"dtype": BF16, "capability": (12, 0)}, "flash"),
    ],
)
def test_the_kernel_is_the_one_that_torch_would_take(options, expected):
    assert kernel(attend(**options)) == expected


def test_a_kernel_that_the_user_switched_off_is_not_taken():
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert kernel(attend(BF16)) == "efficient"


@pytest.mark.parametrize(("dtype", "head"), [(BF16, 64), (F16, 60), (F32, 64), (F32, 62)])
def test_attention_gives_gradients_of_its_inputs_shape_and_type(dtype, head):
    query, key, value = (leaf(2, 4, 100, head, dtype=dtype) for _ in range(3))
    with cuda.emulated():
        output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output.sum().backward()
    assert (output.shape, output.dtype) == (query.shape, dtype)
    assert [tensor.grad.shape for tensor in (query, key, value)] == [query.shape] * 3
    assert {tensor.grad.dtype for tensor in (query, key, value)} == {dtype}


# ---- other operators


def test_dropout_keeps_one_byte_an_element():
    tensor = leaf(10, 7)
    with cuda.emulated():
        kept = saved(functional.dropout(tensor, 0.1))
        assert functional.dropout(tensor, 0.1, training=False) is tensor
    assert kept == {"result1": 70}


def test_softmax_of_fp16_into_fp32_copies_nothing_else():
    tensor = leaf(10, 7, dtype=F16)
    with cuda.emulated(), Seen() as seen:
        output = functional.softmax(tensor, -1, dtype=F32)
        assert "_to_copy" not in seen.names
        functional.softmax(leaf(10, 7, dtype=BF16), -1, dtype=F32)
    assert "_to_copy" in seen.names
    output.sum().backward()
    assert tensor.grad.dtype == F16


@pytest.mark.parametrize(
    ("kind", "operator"), [(torch.optim.AdamW, "_foreach_addcdiv_"), (torch.optim.SGD, "_foreach_add_")]
)
def test_an_optimizer_takes_its_foreach_form(kind, operator):
    seen = {}
    for context in (contextlib.nullcontext, cuda.emulated):
        weights = [leaf(3), leaf(2)]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        with context(), Seen() as seen[context]:
            kind(weights).step()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
    assert any(name.startswith(operator) for name in seen[cuda.emulated].names)
    assert not any(name.startswith(operator) for name in seen[contextlib.nullcontext].names)
    assert any(name.startswith("_foreach_norm") for name in seen[cuda.emulated].names)


# ---- as a whole


def test_everything_is_as_before_after_it():
    def observe():
        x = leaf(2, 2, 4, 8)
        with torch.autocast("cpu", BF16), Seen() as seen:
            functional.dropout(functional.scaled_dot_product_attention(x, x, x), 0.5).softmax(-1).sum().backward()
            torch.optim.SGD([x]).step()
        return seen.names, torch.clear_autocast_cache, optimizer._foreach_supported_types

    before = observe()
    with pytest.raises(KeyError), cuda.emulated():
        inside = observe()
        raise KeyError
    assert observe() == before
    assert inside != before


def test_each_part_is_reported():
    reported = cuda.assumptions()
    assert "on an H100" in reported[0]
    assert len(reported) == 1 + len(cuda.PARTS) and [line for line in reported if "1 byte" in line]
