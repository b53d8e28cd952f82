"""List the memory requests of bitsandbytes' kernels for 8- and 4-bit weights on a GPU.

Source: bitsandbytes 0.50, backends/cuda/ops.py and backends/default/ops.py, which allocate all memory for the C++ code.
Whether a 4-bit matmul has its own kernel, or first dequantizes the whole matrix, is read from the source of the
installed version, because its module cannot be imported without CUDA.
"""

import ast
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

GPU = tuple[int, tuple[int, int]]  # (number of multiprocessors, compute capability)
OUTLIER_OPERATIONS = {"int8_vectorwise_quant", "int8_mixed_scaled_mm"}


def program(gpu: GPU, name: str, made: list[torch.Tensor], *args, **kwargs) -> tuple[list, list, bool]:
    """Return (arguments that must be contiguous, memory requests, whether the operation calls cuBLAS).

    The operation first copies each of these arguments that is not contiguous. It then makes the memory requests, in the
    order of the list. A request is either a tensor, for a result, or a number, for the bytes of a buffer. A buffer is
    held until the operation ends.

    Args:
        gpu: the modelled GPU.
        name: the operation, e.g. "quantize_4bit".
        made: what the operation returned on fake tensors.
        args, kwargs: the operation's arguments.
    """
    tensor = args[0]
    match name:
        case "gemm_4bit":
            return _product_of_4_bits(gpu, made, *args, **kwargs)
        case "quantize_4bit" | "quantize_blockwise":  # scales first
            return [tensor], [made[1], made[0]], False
        case "int8_vectorwise_quant":  # with a threshold it compares magnitudes, to find outliers
            looks = kwargs.get("threshold", args[1] if len(args) > 1 else 0.0) > 0
            return [], [made[1], made[0], *([tensor.nbytes, tensor.numel()] if looks else [])], False
        case "int8_vectorwise_dequant":  # times the scales first, then times 1 / 127
            return [], [made[0].nbytes, *made], False
        case "int8_scaled_mm" | "int8_mixed_scaled_mm":  # in 32 bits, then in fp16, then in the requested type
            result = made[0]
            half = [] if result.dtype is torch.float16 else [2 * result.numel()]
            return [], [4 * result.numel(), *half, result], False
    return [], made, False


def _product_of_4_bits(
    gpu: GPU, made, tensor, weight, shape, absmax, blocksize, quant_type, bias=None, absmax_8bit=None, *_, **__
):
    rows, width = tensor.numel() // tensor.shape[-1], tensor.shape[-1]
    if width % blocksize == 0 and _has_kernel(*gpu)(tensor.dtype, rows, shape[0], width):
        return [tensor], made, False
    scales = [] if absmax_8bit is None else [4 * absmax_8bit.numel()] * 2  # dequantized, then with their offset
    count, result = shape[0] * shape[1], made[0]
    casts = [result.itemsize * size for size in (0 if bias is None else bias.numel(), count, tensor.numel())]
    casts = casts if result.dtype is not tensor.dtype else []  # autocast's
    return [], [*scales, count * tensor.element_size(), *casts, *made], True


@functools.cache
def _has_kernel(multiprocessors: int, capability: tuple[int, int]) -> Callable[[torch.dtype, int, int, int], bool]:
    """Return a function (dtype, M, N, K): whether one kernel multiplies activations (M, K) by 4-bit weights (N, K)."""
    source = Path(importlib.util.find_spec("bitsandbytes").origin).parent / "backends" / "cuda" / "ops.py"
    names: dict[str, Any] = {"torch": torch, "functools": functools}
    names["_gpu_dispatch_props"] = lambda _: (multiprocessors, *capability)
    body = ast.parse(source.read_text(encoding="utf-8")).body
    choice, least, most = "_gemm_4bit_use_custom_cuda", "_GEMM_4BIT_CUSTOM_FLOOR_M", "_gemm_4bit_custom_max_m"
    of_cuda = [node.body for node in body if isinstance(node, ast.If) and most in ast.unparse(node)]
    for node in [*body, *(each for nodes in of_cuda for each in nodes)]:
        is_number = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (least, most)
        if is_number or getattr(node, "name", "") == choice:
            exec(compile(ast.Module([node], []), str(source), "exec"), names)
    return lambda dtype, rows, *sizes: rows <= names[most] and names[choice](0, dtype, rows, *sizes)


def without_outliers(name: str, tensor: torch.Tensor, *args, **kwargs) -> tuple:
    """Return the results of an LLM.int8 operation, on the assumption that no activation reaches the threshold.

    The list of outlier columns among the results is then empty.

    Args:
        name: "int8_vectorwise_quant", or "int8_mixed_scaled_mm", the matmul that handles outliers separately.
        tensor, args, kwargs: the operation's arguments.
    """
    operations, none = torch.ops.bitsandbytes, tensor.new_empty((0,), dtype=torch.int64)
    if name == "int8_vectorwise_quant":
        threshold = kwargs.get("threshold", args[0] if args else 0.0)
        return *operations.int8_vectorwise_quant.default(tensor)[:2], none if threshold else None
    codes, weight, *statistics = args[:4]
    bias = kwargs.get("bias", args[5] if len(args) > 5 else None)
    product = operations.int8_scaled_mm.default(codes, weight, *statistics, bias=bias, dtype=tensor.dtype)
    return product, none.to(tensor.dtype)
