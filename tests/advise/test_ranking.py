"""The order of recipes: what is measured, faster and cheaper comes first, and what only adds costs is left out."""

MB = 10**6


def test_a_recipe_that_only_adds_costs_is_left_out(ask, followed):
    (plain,) = ask(memory="64GB").recipes
    assert plain.costs == () and plain.arguments["per_device_train_batch_size"] == 64 and len(followed) == 2


def test_measured_comes_before_not_measured_and_the_faster_first(ask, pairs):
    options = {"memory": 420 * MB, "avoid": ["adamw_bnb_8bit"]}
    silent = ask(**options)
    assert [recipe.speed for recipe in silent.recipes] == [1.0, None, None]
    slow = ask(**options, runs=pairs(5.0, optim="adafactor"))
    assert [recipe.speed for recipe in slow.recipes] == [1.0, 0.5, None]
    fast = ask(**options, runs=pairs(20.0, optim="adafactor"))
    assert fast.recipes[0].name == "Adafactor, 16 x 4" and fast.recipes[1].speed == 0.5
    assert fast.recipes[0].why_not_next.startswith("Adafactor, 32 x 2 needs")


def test_what_all_recipes_share_makes_none_of_them_slower(ask, pairs):
    (recipe,) = ask(must={"optim": "adafactor"}, avoid=["checkpointing"], runs=pairs(5.0, optim="adafactor")).recipes
    assert recipe.speed == 1.0 and recipe.speed_source == ("the plain recipe: what the others are compared with",)
