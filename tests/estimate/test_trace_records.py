"""Operations without their data: when two are equal, and how an operation is rebuilt."""

import torch

from trainmem.estimate.trace_records import Operation, Spec, flat, nested

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


def test_bytes_are_those_read_and_made_and_whole_numbers_may_be_lengths():
    one = Operation("aten.add.Tensor", (Spec((3, 4), (4, 1), F32), 4, True, None, 0.5), (5, (), (-1,) * 5), False, 96)
    assert (one.bytes, one.lengths) == (3 * 4 * 4 + 96, [3, 4, 4])
