"""The search for recipes: the choices, the largest size that fits (found by few estimates), and advice if nothing
fits.
"""

import contextlib
import math
import random
import threading
import time
from unittest.mock import Mock

import pytest

from trainmem.advise import advice, search
from trainmem.core import hardware
from trainmem.core.task import Task
from trainmem.estimate import allocator_replay
from trainmem.estimate.trace_records import Label, Log

MB = 10**6


@pytest.mark.parametrize("memory", range(340, 1200, 60))
def test_every_recipe_takes_the_largest_micro_batch_that_fits(ask, followed, formula, memory):
    advice = ask(memory=memory * MB, most=99)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    assert advice.recipes
    for recipe in advice.recipes:
        names = {name: value for name, value in recipe.arguments.items() if "size" not in name and "steps" not in name}
        peaks = {n: formula(**names, per_device_train_batch_size=n, gradient_accumulation_steps=64 // n) for n in sizes}
        assert recipe.arguments["per_device_train_batch_size"] == max(n for n in sizes if peaks[n] <= memory * MB)
        assert recipe.needed_bytes == peaks[recipe.arguments["per_device_train_batch_size"]]
    assert 0 < len(followed) == advice.estimates <= 20


def test_one_micro_batch_may_fit_where_several_do_not(ask):
    """With several micro-batches, the gradients of one (100 MB) stay in memory during the forward pass of the next,
    whose activations take 8 MB per sample.
    """
    advice = ask(memory=404 * MB, effective_batch=4, must={"optim": "adamw_torch_fused"}, avoid=["checkpointing"])
    assert [recipe.arguments["gradient_accumulation_steps"] for recipe in advice.recipes] == [1]


@pytest.mark.parametrize("memory", [190, 210, 230, 260, 320, 400, 700])
def test_many_cores_look_ahead_and_find_the_same(ask, followed, monkeypatch, memory):
    alone = ask(memory=memory * MB)
    threads, by_formula = set(), advice.estimate

    def estimate(task, **options):
        threads.add(threading.current_thread())
        time.sleep(0.05)  # what was begun and is not needed any more is still under way at the end
        return by_formula(task, **options)

    monkeypatch.setattr(advice, "estimate", estimate)
    monkeypatch.setattr(hardware, "this_machine", lambda: hardware.Machine("", "cpu", cpu_cores=4))
    assert ask(memory=memory * MB) == alone
    assert len(threads) > 1


def test_the_best_recipe_so_far_is_reported_while_others_are_looked_at(ask, followed, monkeypatch):
    bar = Mock()
    monkeypatch.setattr(advice.progress, "bar", lambda *_, **__: contextlib.nullcontext(bar))
    names = [recipe.name for recipe in ask(memory=400 * MB).recipes]
    reported = [call.args[0] for call in bar.set_postfix_str.call_args_list]
    assert len(reported) == len(names) > 1 and reported[-1] == f"so far {names[0]}"
    assert bar.update.call_count == len(followed)


def looked_for(sizes, limit, first):
    """Search for the largest of `sizes` up to `limit`, beginning at `first`.

    Return the size that was found, and the sizes that were tried.
    """
    requested = []
    return search.largest_that_fits(sizes, lambda size: requested.append(size) or size <= limit, first), requested


def test_the_largest_size_that_fits_is_found_by_halves_wherever_it_begins():
    for sizes in ([1], [1, 2, 4, 8, 16, 32, 64], range(1, 257)):
        for limit in (0, *sizes):
            for first in (0, 1, 3, 50, 1000):
                found, requested = looked_for(sizes, limit, first)
                assert found == max((size for size in sizes if size <= limit), default=0)
                assert len(requested) == len(set(requested)) <= 3 + math.log2(len(sizes))


def test_what_fitted_in_a_similar_case_is_looked_at_before_its_neighbours():
    assert looked_for([1, 2, 4, 8, 16, 32], 4, first=4) == (4, [4, 8])


def test_a_training_is_too_large_for_a_card_just_where_it_would_reserve_more():
    """A replay of allocations gives `is_too_large` if and only if they reserve more bytes than the card has."""
    rng, label, outcomes = random.Random(3), Label("op", "activations", "forward", ""), set()
    for _ in range(300):
        alive, events, blocks = [], [], []
        for _ in range(rng.randrange(5, 80)):
            if alive and rng.random() < 0.45:
                events.append(~alive.pop(rng.randrange(len(alive))))
            else:
                alive.append(len(blocks))
                events.append(len(blocks))
                blocks.append((round(2 ** rng.uniform(5, 25)), label))
        log = Log(blocks, events, [("start", rng.randrange(len(events)))])
        free = allocator_replay.replayed(log).reserved_peak
        card = rng.randrange(free // 2, free + 2**22)
        found = allocator_replay.replayed(log, capacity=card)
        assert found.is_too_large == (found.reserved_peak > card)
        outcomes.add((found.is_too_large, found.reserved_peak < free))
    assert outcomes == {(True, False), (False, False), (False, True)}, "some fit because the cache is given back"


def test_advice_ends_when_its_time_is_up_and_says_what_was_not_looked_at(ask, monkeypatch):
    whole = ask(memory=450 * MB, most=99)
    monkeypatch.setattr(search, "seconds_left", lambda: 0.0)
    late = ask(memory=450 * MB, most=99)
    assert late.recipes == whole.recipes[:1] and late.estimates < whole.estimates
    assert any("time limit" in note and "not tried" in note for note in late.notes)


# ---- what is chosen among


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
        return {technique.name for technique in search.native_precisions(machine, kind, capability)}

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
        ({"avoid": ["chekpointing"]}, "avoid='chekpointing'.*Did you mean 'checkpointing'"),
        ({"avoid": ["zzz"]}, "Choose from 8-bit Adam, Adafactor, AdamW, LoRA, QLoRA, SGD, accumulation,"),
        ({"avoid": "checkpointing"}, "give a list"),
        ({"avoid": ["adamw_torch_fused", "adafactor", "8-bit Adam"]}, "optim: .*must"),
    ],
)
def test_a_wish_that_cannot_be_met_is_named(ask, followed, options, hint):
    with pytest.raises(ValueError, match=hint):
        ask(**options)
    assert not followed


# ---- where nothing fits


def test_where_nothing_fits_it_says_by_how_much_and_what_would(ask):
    advice = ask(memory=150 * MB, effective_batch=64)
    assert advice.status == "nothing fits" and advice.recipes == ()
    assert -advice.smallest.headroom_bytes == advice.smallest.needed_bytes - 150 * MB
    assert advice.smallest.needed_bytes == 201 * MB
    changes = {change.name: change for change in advice.changes}
    assert changes["sharding"].fits and changes["sharding"].text == "over 2 devices, at most 64 samples each at a time"
    assert changes["sharding"].needed_bytes == 201 * MB // 2 and changes["sharding"].assumption
    assert not changes["offload"].fits and changes["offload"].needed_bytes == 200 * MB
    assert changes["offload"].text == "optimizer states off the device: 1.0 MB on the host"
    assert not changes["fewer tokens"].fits
    assert "nothing fits" in repr(advice) and "51.0 MB over" in repr(advice)
    only = ask(memory=330 * MB, must={"optim": "adamw_torch_fused", "gradient_checkpointing": False})
    assert {change.name for change in only.changes if change.fits} == {"sharding", "offload"}


def test_where_samples_are_too_few_to_share_it_says_that_the_batch_grows(ask):
    (sharding,) = (change for change in ask(memory=30 * MB, effective_batch=2).changes if change.name == "sharding")
    assert not sharding.fits and "2 samples" in sharding.text


def test_a_shorter_sequence_is_the_longest_that_fits(ask):
    fixed = {"optim": "sgd", "gradient_checkpointing": False, "per_device_train_batch_size": 32}
    advice = ask(task=Task("bert-tiny", seq_len=256), memory=1163 * MB, must=fixed)
    change = next(change for change in advice.changes if change.name == "fewer tokens")
    assert change.text.startswith("seq_len=120 instead of 256") and change.needed_bytes == 1160 * MB


def test_where_no_length_fits_the_bytes_are_those_of_the_shortest_that_the_task_can_have(ask, monkeypatch):
    monkeypatch.setattr(Task, "shortest", lambda _: 9)  # e.g. 7 tokens of an image and two more
    changes = ask(memory=150 * MB, effective_batch=64).changes
    (text,) = (change.text for change in changes if change.name == "fewer tokens")
    assert text == "no length fits; the bytes are those of 16 tokens"
