"""The attention kernel that the estimate selects, by release of torch, compared with the choice of torch's
CUDA builds.
"""

import json
from pathlib import Path

import attention_cases
import pytest

from trainmem.estimate.allocator_settings import RELEASES, release
from trainmem.estimate.cuda import attention_kernel

CHOICES = json.loads(Path(__file__).with_name("attention_choices.json").read_text(encoding="utf-8"))


def selected(rules, capability, calls) -> str:
    """Return the kernels that the estimate selects, one letter per call: "c" cuDNN, "f" flash, "e" memory-efficient,
    "m" math.

    Args:
        rules: the rules of a torch release.
        capability: compute capability of the GPU.
        calls: the `attention_cases.Call` objects.
    """
    found = []
    for one in calls:
        with one.gradients():
            options = one.dropout, one.causal, one.enable_gqa
            found.append(attention_kernel(rules, capability, *one.tensors("meta"), *options))
    return "".join(map(attention_cases.LETTERS.__getitem__, found))


@pytest.fixture(scope="module")
def calls():
    return attention_cases.calls()


@pytest.mark.parametrize("capability", attention_cases.CAPABILITIES, ids=str)
@pytest.mark.parametrize("torch_version", CHOICES)
def test_attention_takes_the_kernel_that_torch_was_seen_to_take(torch_version, capability, calls):
    expected = CHOICES[torch_version]["{}.{}".format(*capability)]
    kernels = selected(release(torch_version), capability, calls)
    differ = [n for n, (own, other) in enumerate(zip(kernels, expected, strict=True)) if other not in ("-", own)]
    assert not differ, [(calls[n], kernels[n], expected[n]) for n in differ[:3]]


def test_the_newest_releases_are_recorded():
    assert [*RELEASES][-3:] == [*CHOICES][-3:]
    assert all(len(letters) == attention_cases.COUNT for each in CHOICES.values() for letters in each.values())
    assert CHOICES["2.13"] != CHOICES["2.14"] != CHOICES["2.15"]
