"""The memory that a reduction takes on a GPU when several blocks of threads share one result.

Computed from sizes and strides as torch 2.13 does (ATen/native/cuda/Reduce.cuh: setReduceConfig). The same header is in
every wheel, so that a newer torch can be compared.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_MOST_THREADS, _WARP = 512, 32  # of a block
_VECTOR = 4  # elements that a thread reads at once
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # that each thread sums


@dataclass(frozen=True, slots=True)
class Processors:
    """How many threads a GPU runs at once."""

    count: int  # streaming multiprocessors
    threads: int  # of each


def processors(capability: tuple[int, int]) -> Processors:
    """Return those of the GPU that represents its compute capability: T4, A100, A10, H100, B200, RTX 5090 (CUDA
    Programming Guide, "Technical Specifications per Compute Capability")."""
    if capability >= (12, 0):
        return Processors(170, 1536)
    if capability >= (9, 0):
        return Processors(148 if capability >= (10, 0) else 132, 2048)
    if capability == (8, 0):
        return Processors(108, 2048)
    return Processors(80, 1536) if capability > (8, 0) else Processors(40, 1024)


def scratch_bytes(
    shape: Sequence[int],
    stride: Sequence[int],
    reduced: Collection[int],
    gpu: Processors,
    accumulated_bytes: int = 4,
) -> list[int]:
    """The blocks that reducing the dimensions `reduced` of a tensor takes besides its result: partial results and a
    counter for each; [] where no result is shared.

    Args:
        stride: in elements.
        accumulated_bytes: of one number that is accumulated: 4 for floating point.
    """
    inner = _joined([(shape[d], stride[d]) for d in reduced])
    outer = _joined([(shape[d], stride[d]) for d in range(len(shape)) if d not in reduced])
    inputs, outputs = (math.prod(size for size, _ in dims) for dims in (inner, outer))
    if not inputs or not outputs:
        return []
    is_inner_fastest = not outer or (bool(inner) and inner[0][1] < outer[0][1])
    fastest = (inner or outer or [(1, 1)])[0][1] if is_inner_fastest else outer[0][1]
    width, height = (inputs, outputs) if is_inner_fastest else (outputs, inputs)
    vector = 1
    if fastest == 1:
        if is_inner_fastest and width >= 128 and len(inner) == 1:
            width //= _VECTOR
        elif not is_inner_fastest:
            # As wide as the length and all other strides allow: both numbers are powers of 2.
            vector = math.gcd(_VECTOR, outer[0][0], *(step for _, step in (*inner, *outer[1:])))
            width //= vector
    most = _MOST_THREADS // vector
    wide, high = (min(_power_of_2(size), most) for size in (width, height))
    block_height = min(high, most // min(wide, _WARP))
    block_width = min(wide, most // block_height)
    by_input, by_output = (block_width, 1) if is_inner_fastest else (1, block_width)
    splits = -(-inputs // by_input) >= min(block_height * 16, _MOST_VALUES)
    by_input, by_output = (by_input * block_height, by_output) if splits else (by_input, by_output * block_height)
    values = -(-inputs // by_input)
    grid = -(-(outputs // vector) // by_output)
    wanted = gpu.count * (gpu.threads // (block_width * block_height))
    if not splits or values < _MOST_VALUES or grid > wanted:
        return []
    shares = max(min(-(-wanted // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    if shares < 2:
        return []
    partial = accumulated_bytes * outputs * shares * (1 if is_inner_fastest else block_width * vector)
    return [partial, 4 * grid]


def _joined(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(size, stride) of these dimensions, the fastest first, those joined that lie behind each other."""
    joined: list[tuple[int, int]] = []
    for size, step in sorted((dim for dim in dims if dim[0] != 1), key=lambda dim: dim[1]):
        if joined and joined[-1][0] * joined[-1][1] == step:
            joined[-1] = joined[-1][0] * size, joined[-1][1]
        else:
            joined.append((size, step))
    return joined


def _power_of_2(number: int) -> int:
    """The largest power of 2 up to it."""
    return 1 << (number.bit_length() - 1) if number else 1
