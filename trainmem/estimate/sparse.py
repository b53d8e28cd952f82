"""Handle sparse tensors (COO) in a trace: make operations' results, and list the memory that CUDA's kernels request.

A sparse tensor has no storage of its own: its bytes are the bytes of its indices and values. Positions are assumed to
be distinct, as in peft's SHiRA and FRoD, so that coalescing keeps all elements.
In each rule `made` lists the operation's results on fake tensors. `attention_kernels` explains the requests (`Step`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trainmem.estimate.allocator import next_multiple
from trainmem.estimate.attention_kernels import CUB_BYTES, WORD, Free, Step, scan_bytes
from trainmem.estimate.trace_records import SparseSpec

aten = torch.ops.aten


def sparse_spec(tensor: torch.Tensor) -> SparseSpec:
    """Return the shape, number of stored elements and type of a sparse tensor."""
    return SparseSpec(tuple(tensor.shape), tensor._nnz(), tensor.dtype, tensor.is_coalesced())


def filled(function, args: tuple, result: FakeTensor) -> FakeTensor:
    """Return a sparse result with as many stored elements as the last sparse argument, e.g. the mask of `sparse_mask`.

    Args:
        function, args: the operator, and its positional arguments.
        result: the result of torch's own fake kernel, which has no stored elements.
    """
    source = next((each for each in reversed(args) if isinstance(each, torch.Tensor) and each.is_sparse), result)
    in_order = function is aten._coalesce.default or (source.is_coalesced() and function is not aten.t.default)
    # A stored element may be a row, as in an embedding's gradient.
    values = source._values().new_empty(source._values().shape, dtype=result.dtype)
    options = {"size": tuple(result.shape), "is_coalesced": in_order, "check_invariants": False}
    return torch.sparse_coo_tensor(source._indices().clone(), values, **options)


def _of_parts(made, _, __, ___, indices, values, **____) -> list[Step]:
    """Return no memory requests, because a sparse tensor made from indices and values shares their memory."""
    # torch's fake kernel copies indices that are not fake: the result must keep the given ones alive.
    made[0].made_from = indices, values
    return []


def _add(made, dense, other, *_, **__) -> list[Step]:
    """Return the memory requests of dense + sparse, in the kernel's order.

    Source: cuda/SparseCUDATensorMath.cu: add_out_dense_sparse_cuda.
    """
    if not (isinstance(other, torch.Tensor) and other.is_sparse):  # a batch norm adds the number 1 to its counter
        return made
    kind = torch.promote_types(dense.dtype, other.dtype)
    wide = [kind.itemsize * dense.numel()] * 2 if kind is not dense.dtype else []  # casts of both tensors
    # If the sparse tensor is not coalesced: an index for each stored element.
    return [*made, *wide, *([] if other.is_coalesced() else [WORD * other._nnz()])]


def _coalesce(made, tensor) -> list[Step]:
    """Return the memory requests of `coalesce`, in order (cuda/SparseCUDATensor.cu: _coalesce_sparse_cuda)."""
    # The kernel sorts a copy of the positions (`sort`), and then finds the distinct positions (`differ`).
    each = WORD * tensor._nnz()
    sort = 2 * next_multiple(each, CUB_BYTES) + next_multiple(WORD * (1 + -(-tensor._nnz() // 4352)), CUB_BYTES) + 255
    differ = scan_bytes(tensor._nnz(), 4096, 24)
    (result,) = made
    return [each, each, each, sort, Free(3), differ, Free(3), result._values(), result._indices()]


def _mask(made, tensor, mask) -> list[Step]:
    """Return the memory requests of `sparse_mask`, in the kernel's order.

    Source: native/sparse/SparseTensor.cpp: sparse_mask, SparseBinaryOpIntersectionCommon.h.
    """
    (result,), each = made, WORD * mask._nnz()
    if not tensor.is_sparse:  # multiplied by a mask of ones
        return [mask.dtype.itemsize, result._values().nbytes, result]
    # Buffers to find the mask's positions in the tensor.
    return [WORD * tensor._nnz(), each, 2 * each, WORD, Free(3), result]


def _transpose(made, tensor) -> list[Step]:
    """Return the memory requests of a transposition, in order (native/sparse/SparseTensorMath.cpp: transpose)."""
    if not tensor.is_sparse:
        return made
    return [made[0]._values(), made[0]._indices(), WORD * tensor._nnz()]  # a buffer to swap two rows of indices


RULES: dict[Any, Callable[..., list[Step]]] = {  # {operator packet: its rule}
    aten.add_: _add,
    aten._coalesce: _coalesce,
    aten._sparse_coo_tensor_with_dims_and_tensors: _of_parts,
    aten.sparse_mask: _mask,
    aten.t: _transpose,
}
