"""The published tables compared with the estimate: allocated bytes in each category, and reserved bytes, are equal."""

import json
import os
import random
import shutil
import sys
from datetime import date
from pathlib import Path

import pytest
from test_events_js import answers

from trainmem import cards
from trainmem.core import optional_packages
from trainmem.core.task import Task
from trainmem.estimate import estimate

sys.path.append(str(Path(__file__).parents[2] / "website"))
import calculator_tables
from calculator_tables import OF_MAJOR, Recipe

TABLES = Path(__file__).parents[2] / "website" / "_static" / "tables"
INDEX = json.loads((TABLES / "index.json").read_text(encoding="utf-8"))
HERE = calculator_tables.versions()


def is_of_these_versions(place):
    """Return whether tables were made with the libraries installed here; `place`: of their versions in the index."""
    return all(version in (None, HERE[name]) for name, version in INDEX["versions"][place].items() if name != "peft")


KEYS = [(model, key) for model, about in INDEX["models"].items() for key in about["recipes"]]
PRESENT = [(model, key) for model, key in KEYS if is_of_these_versions(INDEX["models"][model]["recipes"][key])]
LARGEST_FIRST = sorted({model for model, _ in PRESENT}, key=lambda model: -INDEX["models"][model]["parameters"])
OF_KIND = {INDEX["models"][model]["config"]["model_type"]: model for model in LARGEST_FIRST}  # the smallest of each

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="no node: apt-get install nodejs")


def test_the_index_names_every_table_and_knows_the_cards():
    assert {f"{model}/{key}.json.gz" for model, key in KEYS} == {
        str(file.relative_to(TABLES)) for file in TABLES.rglob("*.gz") if "parts" in calculator_tables.read(file)
    }
    assert {card["key"]: (card["memory"], card["limit"]) for card in INDEX["cards"]} == {
        key: (card.memory_bytes, card.limit_bytes) for key, card in cards.CARDS.items()
    }


def compare(model, key, chance):
    """Compare a table of the site with the estimate, for a random micro-batch and length, and on a random card.

    Args:
        model: a model of the calculator.
        key: the recipe's key, as in the table's file name.
        chance: the random generator.
    """
    recipe, about = Recipe(*key.split(".")), INDEX["models"][model]
    if recipe.method == "lora" and (reason := optional_packages.offer("peft")):
        pytest.skip(reason)
    able = [each for each in INDEX["cards"] if recipe.kernels in ("any", OF_MAJOR.get(str(each["capability"][0])))]
    card, expandable = chance.choice(able), chance.random() < 0.3
    batch, length = int(about["most"] ** chance.random()), 128 * chance.randint(1, about["longest"] // 128)
    sizes = {"batch": batch, "length": length, "expandable": expandable}
    table = calculator_tables.read(TABLES / model / f"{key}.json.gz")
    given = {"recipe": table, "sizes": sizes, "card": card, "categories": len(INDEX["categories"])}
    (answer,) = answers([("memory", given)])
    samples = 4 * batch * int(recipe.accumulation)
    settings = "expandable_segments:True" * expandable
    options = {"card": card["key"], "allocator_settings": settings, "timeout": 900}
    traced = estimate(Task(model, length, samples), **options, **recipe.arguments(batch))
    names = "peakBytes", "reservedBytes", "parts", "operation", "phase"
    memory = traced.memory
    expected = memory.peak_bytes, memory.reserved_bytes, [*memory.breakdown.values()]
    expected += memory.peak_operation, memory.peak_phase
    assert tuple(answer[name] for name in names) == expected, f"{model} {key} {sizes} {card['key']}"


@pytest.mark.parametrize("kind", OF_KIND)
def test_a_published_table_of_each_kind_of_model_says_what_the_estimate_does(kind):
    model, chance = OF_KIND[kind], random.Random(kind)
    compare(model, chance.choice([key for name, key in PRESENT if name == model]), chance)


def tonight():
    """Return 20 of the tables, others each day, because all of them take hours; all, if $TABLES is "all"."""
    if os.environ.get("TABLES") == "all":
        return PRESENT
    return sorted(random.Random(date.today().toordinal()).sample(PRESENT, min(20, len(PRESENT))))


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "key"), tonight())
def test_a_published_table_says_what_the_estimate_does(model, key):
    chance = random.Random(f"{model} {key}")
    for _ in range(3):
        compare(model, key, chance)
