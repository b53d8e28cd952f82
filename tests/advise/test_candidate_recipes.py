"""What is chosen among: what must be is, what is avoided is not, and a device's own precisions count."""

import pytest

from perf_helpers import hardware
from perf_helpers.advise.candidate_recipes import native_precisions

MB = 10**6


def test_what_must_be_is_and_what_is_avoided_is_not(ask, followed):
    advice = ask(memory=450 * MB, must={"optim": "sgd", "gradient_accumulation_steps": 4}, most=99)
    assert {recipe.arguments["optim"] for recipe in advice.recipes} == {"sgd"}
    assert {recipe.arguments["per_device_train_batch_size"] for recipe in advice.recipes} == {16}
    assert all("convergence" in " ".join(recipe.costs) for recipe in advice.recipes)
    advice = ask(memory=450 * MB, avoid=["gradient_checkpointing", "Adafactor", "accumulation"], most=99)
    assert not advice.recipes and len(followed) < 20
    assert advice.smallest.arguments == {
        "per_device_train_batch_size": 64, "gradient_accumulation_steps": 1, "optim": "adamw_bnb_8bit"
    }  # fmt: skip
    halves = ask(memory=450 * MB, processes=2)
    assert all(
        a["per_device_train_batch_size"] * a["gradient_accumulation_steps"] == 32
        for a in (recipe.arguments for recipe in halves.recipes)
    )


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_a_technique_is_known_by_either_name_of_its_argument(ask, name):
    advice = ask(memory=450 * MB, must={name: True}, most=99)
    assert advice.recipes and all("checkpointing" in recipe.name for recipe in advice.recipes)


def test_on_a_cpu_that_computes_in_bf16_recipes_with_it_are_proposed_too(ask, machine, native):
    plain, more = (ask(memory=450 * MB, most=99, machine=each) for each in (machine, native))
    lower = {recipe.name for recipe in more.recipes if "bf16" in recipe.name}
    assert lower and {recipe.name for recipe in plain.recipes} == {r.name for r in more.recipes} - lower
    assert not any(recipe.arguments.get("bf16") for recipe in plain.recipes)


def test_lower_precision_is_for_devices_that_compute_in_it():
    def names(kind, capability, **machine):
        machine = hardware.Machine("m", machine.pop("has", kind), **machine)
        return {technique.name for technique in native_precisions(machine, kind, capability)}

    assert names("cuda", (8, 0)) == {"bf16", "bf16 weights"} and names("cuda", (7, 5)) == {"fp16"}
    assert names("cpu", (9, 0), cpu_features=("avx2",)) == set()
    assert names("cpu", (9, 0), cpu_features=("amx_bf16",)) == {"bf16", "bf16 weights"}
    gpus = (hardware.Gpu(0, capability=(9, 0)),)
    assert names("cpu", (9, 0), has="cuda", gpus=gpus, cpu_features=("avx2",)) == set(), "a GPU tells nothing of a CPU"


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"must": {"optm": "sgd"}}, "optim"),
        ({"must": {"optim": "adafactr"}}, "adafactor"),
        ({"must": {"per_device_train_batch_size": 5}}, "64 samples"),
        ({"must": {"gradient_accumulation_steps": 2}, "avoid": ["accumulation"]}, "keep one"),
        ({"must": {"optim": "adafactor"}, "avoid": ["adafactor"]}, "keep one"),
        ({"avoid": ["chekpointing"]}, "'chekpointing' is no technique. Did you mean 'checkpointing'"),
        ({"avoid": ["zzz"]}, "Choose from 8-bit Adam, Adafactor, AdamW, SGD, accumulation,"),
        ({"avoid": "checkpointing"}, "list of names"),
        ({"avoid": ["adamw_torch_fused", "adafactor", "8-bit Adam"]}, "fix one with must"),
    ],
)
def test_a_wish_that_cannot_be_met_is_named(ask, followed, options, hint):
    with pytest.raises(ValueError, match=hint):
        ask(**options)
    assert not followed
