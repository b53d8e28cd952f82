"""The calculator's page and the package calculate the same workspaces of kernels, and the same allocations and
frees.
"""

import json
import math
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from trainmem import cards
from trainmem.estimate import reduction_scratch

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="no node: apt-get install nodejs")

LENGTHS = [1, 2, 3, 8, 12, 64, 100, 128, 768, 4096, 16384, 131072]
CAPABILITIES = sorted({card.capability for card in cards.CARDS.values()})


def answers(questions):
    command = ["node", Path(__file__).with_name("events.mjs")]
    done = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def laid_out(chance, shape):
    """Return random strides for a tensor of this shape: contiguous, with permuted dimensions, or a slice of a wider
    tensor.

    `chance`: the random generator.
    """
    order = [*range(len(shape))]
    if chance.random() < 0.4:
        chance.shuffle(order)
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim] * chance.choice([1, 1, 1, 3])
    return strides


def test_a_reduction_takes_the_blocks_that_the_package_says():
    chance, questions, expected = random.Random(0), [], []
    for _ in range(20_000):
        shape = [chance.choice(LENGTHS) for _ in range(chance.randint(1, 4))]
        if math.prod(shape) > 2**40:
            continue
        stride, capability = laid_out(chance, shape), chance.choice(CAPABILITIES)
        dims, size = chance.sample(range(len(shape)), chance.randint(1, len(shape))), chance.choice([1, 4, 8])
        gpu = reduction_scratch.processors(capability)
        expected.append(reduction_scratch.scratch_bytes(shape, stride, dims, gpu, size))
        given = {"shape": shape, "stride": stride, "dims": dims, "bytes": size, "capability": capability}
        questions.append(("reduction", given))
    assert answers(questions) == expected
    assert sum(map(bool, expected)) > 2000, "many share their results"


def test_the_gradient_of_an_embedding_takes_the_blocks_that_the_package_says():
    import torch

    from trainmem.estimate.kernels import Free, Kernels

    chance, questions, expected = random.Random(0), [], []
    for _ in range(2000):
        count, weights = int(2 ** chance.uniform(6, 19)), chance.choice([2, 300, 512, 2000, 30522, 128256])
        width, half, capability = chance.choice([64, 768, 4096]), chance.random() < 0.5, chance.choice(CAPABILITIES)
        gradient = torch.empty(count, width, dtype=torch.bfloat16 if half else torch.float32, device="meta")
        indices = torch.empty(count, dtype=torch.int64, device="meta")
        kernel = torch.ops.aten.embedding_dense_backward.default
        steps = Kernels(capability).program(kernel, (gradient, indices, weights, -1, False), {}, gradient)
        names = {torch.Tensor: lambda _: "made", int: int, Free: lambda step: {"freed": step.index}}
        expected.append([names[type(step)](step) for step in steps])
        given = {"count": count, "weights": weights, "width": width, "half": half, "capability": capability}
        questions.append(("embedding", given))
    assert answers(questions) == expected
    assert len({len(steps) for steps in expected}) == 3, "few indices, many, and many of few rows in 16 bits"


def test_the_backward_of_a_layer_norm_takes_the_blocks_that_the_package_says():
    import torch

    from trainmem.estimate.kernels import Free, Kernels

    chance, questions, expected = random.Random(0), [], []
    kernel = torch.ops.aten.native_layer_norm_backward.default
    names = {torch.Tensor: lambda _: "made", int: int, Free: lambda step: {"freed": step.index}}
    for _ in range(2000):
        rows, width = int(2 ** chance.uniform(12, 19)), chance.choice([64, 128, 312, 768, 1024, 2048, 4096])
        kind, capability = chance.choice([torch.bfloat16, torch.float32]), chance.choice(CAPABILITIES)
        tensor = torch.empty(rows, width, dtype=kind, device="meta")
        gradient = tensor.new_empty(width, rows).T if chance.random() < 0.3 else tensor
        weights = [torch.empty(width, device="meta") for _ in range(chance.randint(0, 2))]
        args = gradient, tensor, [width], None, None, None, None, [True, True, True]
        steps = Kernels(capability).program(kernel, args, {}, [tensor, *weights])
        expected.append([names[type(step)](step) for step in steps])
        copies = [] if gradient is tensor else [gradient.nbytes]
        sizes = [each.nbytes for each in weights]
        given = {"rows": rows, "width": width, "sizes": sizes, "copies": copies, "capability": capability}
        questions.append(("norm backward", given))
    assert answers(questions) == expected
    assert sum("freed" in str(steps) for steps in expected) > 200, "many rows have buffers"
