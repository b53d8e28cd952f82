"""Operations without their data: what makes two alike, and how one is put together again."""

import torch

from perf_helpers.estimate.trace_records import Operation, Spec, flat, nested

F32 = torch.float32


def operation(*leaves):
    return Operation("aten.add.Tensor", leaves, (len(leaves), (), (-1,) * len(leaves)), takes_list=False)


def test_arguments_are_put_together_as_they_were():
    for args, kwargs in (((1, [2, 3], []), {"dim": [4], "out": None}), ((), {}), (([],), {"x": 5})):
        leaves, structure = flat(args, kwargs)
        assert not any(isinstance(leaf, list) for leaf in leaves)
        assert nested(leaves, structure) == ([*args], kwargs)


def test_numbers_of_other_types_are_other_arguments():
    assert operation(1) == operation(True) == operation(1.0)
    assert len({operation(value).signature for value in (1, True, 1.0)}) == 3


def test_other_numbers_make_the_operation_at_another_size():
    one = operation(Spec((3, 4), (4, 1), F32), 4, True, None, 0.5)
    assert one.numbers == [3, 4, 4, 1, 4, 0] and one.with_numbers(one.numbers) == one
    other = one.with_numbers([6, 8, 8, 1, 8, 96])
    assert other.leaves == (Spec((6, 8), (8, 1), F32), 8, True, None, 0.5)
    assert (one.bytes, other.made_bytes, other.bytes) == (48, 96, 6 * 8 * 4 + 96)
    assert one.lengths == [3, 4, 4]
