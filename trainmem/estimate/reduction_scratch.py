"""Calculate the memory that a reduction takes on a GPU when several blocks of threads share one result.

The rules are those of torch 2.13 (ATen/native/cuda/Reduce.cuh: setReduceConfig), applied to sizes and strides. Every
torch wheel contains that header, so the rules of a newer torch can be compared.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_MOST_THREADS, _WARP = 512, 32  # threads per block, at most; threads per warp
_VECTOR = 4  # elements that a thread reads at once
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # values that each thread sums


@dataclass(frozen=True, slots=True)
class Processors:
    """Hold how many streaming multiprocessors a GPU has, and how many threads each runs at once."""

    count: int  # streaming multiprocessors
    threads: int  # of each


def processors(capability: tuple[int, int]) -> Processors:
    """Return the assumed number of multiprocessors of a GPU with a compute capability, and the threads of each.

    One GPU stands for each range. Below 8.0: T4; 8.0: A100; other 8.x: A10G; 9.x: H100; 10.x and 11.x: B200; from 12.0
    on: RTX 5090. Threads per multiprocessor: CUDA Programming Guide, "Technical Specifications per Compute Capability".
    """
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
    """Return the bytes of each buffer that reducing some dimensions of a tensor takes in addition to the result.

    The buffers hold partial results and counters; [] if no two blocks of threads share a result.

    Args:
        shape: the tensor's shape.
        stride: the tensor's strides, in elements.
        reduced: numbers of the dimensions that are reduced, from 0.
        gpu: the GPU's multiprocessors.
        accumulated_bytes: bytes of one accumulated number: 4 for floating point.
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
            # As wide as the length and all other strides allow; both numbers are powers of 2.
            vector = math.gcd(_VECTOR, outer[0][0], *(step for _, step in (*inner, *outer[1:])))
            width //= vector
    most = _MOST_THREADS // vector
    wide, high = (min(power_of_2(size), most) for size in (width, height))
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
    """Return `dims`, each (size, stride in elements), smallest stride first; contiguous neighbours are merged.

    Dimensions of size 1 are left out.
    """
    joined: list[tuple[int, int]] = []
    for size, step in sorted((dim for dim in dims if dim[0] != 1), key=lambda dim: dim[1]):
        if joined and joined[-1][0] * joined[-1][1] == step:
            joined[-1] = joined[-1][0] * size, joined[-1][1]
        else:
            joined.append((size, step))
    return joined


def power_of_2(number: int) -> int:
    """Return the largest power of 2 up to `number`, 1 for 0."""
    return 1 << (number.bit_length() - 1) if number else 1
