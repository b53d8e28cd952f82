"""The search: the largest size that fits, by few looks, and what it makes of a family without looking."""

import itertools
import random

import pytest

from perf_helpers.advise import search
from perf_helpers.estimate import allocator_replay
from perf_helpers.estimate.event_log import Label, Log

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
    assert 0 < len(followed) == advice.estimates <= 16


def test_one_micro_batch_may_fit_where_several_do_not(ask):
    """Their gradients, 100 MB, wait during the next forward, whose activations take 8 MB a sample."""
    advice = ask(memory=404 * MB, effective_batch=4, must={"optim": "adamw_torch_fused"}, avoid=["checkpointing"])
    assert [recipe.arguments["gradient_accumulation_steps"] for recipe in advice.recipes] == [1]


def test_a_bend_in_the_peak_does_not_mislead_the_search():
    def bent(size):
        return max(1000, 20 * size + 100, 50 * size - 3000)

    def counted(size):
        asked.append(size)
        return bent(size)

    for limit in range(1000, 9000, 200):
        asked = []
        found = search.Search(range(1, 257), counted, limit).run()
        assert found == max(size for size in range(1, 257) if bent(size) <= limit)
        assert len(asked) < 12


def test_on_any_convex_curve_the_search_finds_the_largest_size_that_fits():
    rng = random.Random(1)
    for _ in range(300):
        lines = [(rng.uniform(0, 50), rng.uniform(0, 5000)) for _ in range(5)]
        sizes = range(1, rng.randrange(2, 300))
        needed = [round(max(slope * size + rest for slope, rest in lines)) for size in sizes]
        limit = rng.randrange(min(needed) - 100, max(needed) + 100)
        found = search.Search(sizes, lambda size, needed=needed: needed[size - 1], limit).run()
        assert found == sum(peak <= limit for peak in needed)


def test_what_is_reserved_decides_though_it_is_no_convex_function():
    """Up to a third more than is allocated is needed, and what does not fit is told with up to a half more."""
    rng = random.Random(2)
    for _ in range(300):
        lines = [(rng.uniform(0, 50), rng.uniform(0, 5000)) for _ in range(5)]
        sizes = range(1, rng.randrange(2, 300))
        least = [max(slope * size + rest for slope, rest in lines) for size in sizes]
        enough = [*itertools.accumulate((each * rng.uniform(1, 1.3) for each in least), max)]
        limit = rng.randrange(round(min(least)) - 100, round(max(least)) + 100)
        told = [min(limit, each * 1.1) if each <= limit else each * rng.uniform(1, 1.5) for each in enough]
        asked = search.Search(sizes, lambda n, told=told: told[n - 1], limit, lambda n, least=least: least[n - 1])
        assert asked.run() == sum(each <= limit for each in enough)
        assert len(asked.known) <= 12


def test_a_training_is_too_large_for_a_card_just_where_it_would_reserve_more():
    """So what is needed is more than there is just where the estimate says that it does not fit."""
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


def test_the_search_ends_whatever_it_is_told():
    rng = random.Random(0)
    for _ in range(500):
        sizes, asked = range(1, rng.randrange(2, 300)), []

        def anything(size, asked=asked):
            asked.append(size)
            return rng.randrange(1000)

        slope, outlier = rng.choice([None, 0, -3, 5]), rng.choice([None, sizes[-1]])
        model = None if slope is None else search.Search(sizes, anything, 0, known={1: 0, 2: slope})
        tried = search.Search(sizes, anything, rng.randrange(1000), model=model, outlier=outlier)
        found = tried.run(low=rng.choice([0, 0, 1]), first=rng.choice([None, 1]))
        assert 0 <= found <= len(sizes) and len(asked) == len(set(asked)) <= len(sizes)


def test_advice_ends_when_its_time_is_up_and_says_what_was_not_looked_at(ask, monkeypatch):
    whole = ask(memory=450 * MB, most=99)
    monkeypatch.setattr(search, "seconds_left", lambda: 0.0)
    late = ask(memory=450 * MB, most=99)
    assert late.recipes == whole.recipes[:1] and late.estimates < whole.estimates
    assert any("time was up" in note and "not looked at" in note for note in late.notes)
