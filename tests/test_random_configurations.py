"""The generator of random configurations, and its record, results/random.json."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import measure_random  # noqa: E402
from runner import read_record  # noqa: E402

RECORD = read_record(ROOT / "results" / "random.json")


def test_a_set_follows_from_its_seed_and_is_odd():
    some = [measure_random.random_training(number, 5) for number in range(260)]
    assert some == [measure_random.random_training(number, 5) for number in range(260)]
    assert some != [measure_random.random_training(number, 6) for number in range(260)]
    assert {one.architecture for one in some} == {*measure_random.KINDS}
    assert {1, 14} <= {one.config.get("num_hidden_layers") for one in some}
    assert {True, False} <= {one.config.get("tie_word_embeddings") for one in some}
    assert any(one.config["vocab_size"] % 2 for one in some) and any(one.seq_len % 2 for one in some)


def test_a_miss_is_shrunk_to_what_it_needs():
    def misses(one):
        return one.arguments.get("gradient_accumulation_steps", 1) > 1 and one.seq_len > 30

    one = next(one for one in (measure_random.random_training(number, 1) for number in range(200)) if misses(one))
    least = measure_random.shrink(one, misses)
    assert misses(least) and 30 < least.seq_len <= 61
    assert least.arguments.keys() == {"per_device_train_batch_size", "gradient_accumulation_steps"}
    assert not any(misses(other) for other in measure_random.simpler(least))
    assert measure_random.shrink(one, lambda other: True).seq_len == 1


def test_the_record_is_of_its_seed_and_counts_its_misses():
    rows = RECORD["rows"]
    for row in rows:
        one = measure_random.random_training(row["number"], RECORD["seed"])
        assert (row["config"], row["seq_len"], row["arguments"]) == (one.config, one.seq_len, one.arguments)
    assert RECORD["tried"] == sum("rehearsed" in row for row in rows) > 0
    assert RECORD["missed"] == sum("missed" in row for row in rows)
