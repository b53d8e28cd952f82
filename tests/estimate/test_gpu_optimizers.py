"""Optimizers of other packages, estimated for a GPU on a machine without one.

Estimated peaks equal those of rehearsals; optimizers that cannot be estimated are refused.
"""

import importlib.util

import pytest
import torch
from packaging.version import Version

from perf_helpers import Lab
from trainmem.core import optional_packages
from trainmem.core.task import Task
from trainmem.estimate import estimate

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8}
TASK = Task("bert-tiny", seq_len=32, dataset_size=16, config=SIZES | {"vocab_size": 8192})
# (allocated, reserved) bytes of torch's allocator in rehearsals of a T4, 2 samples, torch 2.15.0, transformers 5.24.0,
# bitsandbytes 0.50.2, torchao 0.18.0, torch-optimi 0.3.3, grokadamw 0.1.2, 2026-11-29.
REHEARSED = {
    "paged_ademamix_32bit": (54_856_192, 69_206_016),
    "paged_ademamix_8bit": (54_968_832, 69_206_016),
    "paged_adamw_32bit": (54_819_328, 69_206_016),
    "adamw_torch_4bit": (284_092_416, 331_350_016),
    "adamw_torch_8bit": (290_917_376, 335_544_320),
    "stable_adamw": (109_383_680, 115_343_360),
    "grokadamw": (138_498_048, 159_383_552),
    "lomo": (44_225_024, 48_234_496),
}
newer = pytest.mark.skipif(Version(torch.__version__) < Version("2.15"), reason="rehearsed with torch 2.15")


def on_t4(optim, **given):
    return estimate(TASK, card="t4", optim=optim, per_device_train_batch_size=2, torch_version="2.15", **given)


def installed(optim):
    if missing := optional_packages.missing_of_optimizer(optim):
        pytest.skip(missing)


@newer
@pytest.mark.parametrize("optim", REHEARSED)
def test_an_estimate_without_a_gpu_equals_the_rehearsal(optim):
    installed(optim)
    memory = on_t4(optim).memory
    assert (memory.peak_bytes, memory.reserved_bytes) == REHEARSED[optim]


@pytest.mark.parametrize(
    ("optim", "same"),
    [
        ("adamw_torch_xla", "adamw_torch"),
        ("adamw_torch_npu_fused", "adamw_torch_fused"),
        ("adamw_anyprecision", "adamw_torch"),
    ],
)
def test_an_optimizer_for_another_device_is_estimated_by_one_with_the_same_states(optim, same):
    if not optional_packages.missing_of_optimizer(optim):
        pytest.skip("its package is installed")
    found = on_t4(optim)
    assert found.memory.breakdown == on_t4(same).memory.breakdown
    assert any(optim in text and same in text for text in found.assumptions)


def test_the_states_of_torchao_are_counted_by_their_parts():
    installed("adamw_torch_8bit")
    states = {optim: on_t4(optim).memory.breakdown["optimizer_states"] for optim in ("adamw_torch", "adamw_torch_8bit")}
    assert states["adamw_torch"] / 4.1 < states["adamw_torch_8bit"] < states["adamw_torch"] / 3.8


@pytest.mark.parametrize("optim", ["galore_adamw_8bit", "galore_adamw_8bit_layerwise", "adalomo"])
def test_an_optimizer_that_calls_cuda_is_answered_with_its_assumptions(optim):
    installed(optim)
    targets = {"optim_target_modules": ["query", "value"]} if "galore" in optim else {}
    found = on_t4(optim, **targets)
    assert any(optim[:3] == text[:3].lower() for text in found.assumptions)
    assert found.memory.peak_bytes < on_t4("adamw_torch").memory.peak_bytes
    for run in (lambda: estimate(TASK, device="cpu", optim=optim, **targets), lambda: counted(optim, **targets)):
        with pytest.raises(ValueError, match=rf"{optim}.* needs a GPU"):
            run()


def counted(optim, **given):
    return Lab("cpu").train("one", task=TASK, measure="memory", optim=optim, **given)


@pytest.mark.parametrize("optim", ["rmsprop_bnb", "rmsprop_bnb_8bit"])
def test_rmsprop_of_bitsandbytes_fails_in_bfloat16_on_a_gpu(optim):
    with pytest.raises(ValueError, match=r"fails on a GPU.*rmsprop.*bfloat16.*float32"):
        on_t4(optim, dtype="bfloat16")
    assert on_t4(optim, bf16=True).peak_bytes


def test_an_optimizer_that_transformers_cannot_build_is_named():
    installed("galore_adafactor_layerwise")
    given = {"optim": "galore_adafactor_layerwise", "optim_target_modules": ["query"]}
    for run in (lambda: on_t4(**given), lambda: counted(**given)):
        with pytest.raises(ValueError, match=r"transformers .* cannot build optim='galore_adafactor_layerwise'"):
            run()


MISSING = {"galore_adamw": "galore-torch", "apollo_adamw_layerwise": "apollo-torch", "adalomo": "lomo-optim"}
MISSING |= {"stable_adamw": "torch-optimi", "schedule_free_sgd": "schedulefree", "adamw_torch_4bit": "torchao"}


@pytest.mark.parametrize("optim", MISSING)
def test_a_missing_package_is_named_first(optim, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    found = optional_packages.missing_of_optimizer(optim)
    assert found.startswith(f"Install {MISSING[optim]}: pip install {MISSING[optim]}") and optim in found


def test_a_missing_package_ends_estimate_and_measurement_alike():
    optim = next((each for each in MISSING if optional_packages.missing_of_optimizer(each)), None)
    if optim is None:
        pytest.skip("every package is installed")
    for run in (lambda: on_t4(optim), lambda: estimate(TASK, device="cpu", optim=optim), lambda: counted(optim)):
        with pytest.raises(ValueError, match=f"^Install {MISSING[optim]}"):
            run()


def test_every_optimizer_of_transformers_has_its_package_listed():
    """If a new optimizer comes from a package that is not a dependency, our list of packages must name the package."""
    from transformers.training_args import OptimizerNames

    of_dependencies = ("adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop")
    of_dependencies += ("lion", "ademamix", "paged", "adamw_bnb", "adamw_8bit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name, *_: None)
        unlisted = [each.value for each in OptimizerNames if not optional_packages.missing_of_optimizer(each.value)]
    assert [name for name in unlisted if not name.startswith(of_dependencies)] == []
