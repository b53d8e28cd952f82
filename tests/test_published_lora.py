"""Predictions of LoRA trainings, made by benchmarks/published_lora.py, compared with a card's figures; and
their page.
"""

import pytest
from scripts import RESULTS, script

THREE = {"SmolLM2-135M, sdpa, 2 x 512", "Qwen2.5-1.5B, eager, 1 x 2048", "Qwen2.5-1.5B, sdpa, 1 x 2048"}


@pytest.fixture(scope="module")
def lora():
    return script("published_lora")


def test_the_seventeen_trainings_are_equal_to_the_card_by_torch_2_11(lora):
    record = lora.predictions()["2.11.0"]
    assert [row["name"] for row in record["rows"]] == [*lora.facts()["trainings"]]
    off = lora.compared(record)
    assert len(off) == 17 and {row["allocated"] for row in off} == {0}
    assert {row["name"]: row["reserved"] for row in off if row["reserved"]} == dict.fromkeys(THREE, 2**21)


def test_the_peak_of_a_step_is_that_of_one_of_its_phases(lora):
    for record in lora.predictions().values():
        for row in record["rows"]:
            assert row["loaded"] < row["allocated"] == max(row[name] for name in ("forward", "backward", "optimizer"))
            assert row["allocated"] <= row["reserved"]


def test_by_the_torch_that_the_source_names_rows_are_off(lora):
    """Predictions by the rules of torch 2.14, which the source names, must differ from the published figures.

    torch 2.11, whose rules fit, has a cuBLASLt workspace for each thread that runs matmuls with a bias. torch 2.14 has
    none, so that Qwen2.5 allocates 2 MiB less. It also puts the blocks of eager attention into other segments, which
    changes the reserved memory.
    """
    off = {row["name"]: row for row in lora.compared(lora.predictions()["2.14.0"])}
    assert off["Qwen2.5-1.5B, eager, 2 x 1024"]["allocated"] == -(2**21)
    eager = [row["reserved"] for name, row in off.items() if "eager" in name and "135M, eager, 2 x 512" not in name]
    assert eager and all(eager)


def test_the_models_have_the_sizes_of_their_names(lora):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    for name, sizes in lora.facts()["models"].items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes))
        found[name] = model.num_parameters()
    assert found == {
        "Qwen2.5-1.5B": 1_543_714_304,
        "SmolLM2-135M": 134_515_008,
        "SmolLM2-360M": 361_821_120,
        "SmolLM2-1.7B": 1_711_376_384,
        "TinyLlama-1.1B": 1_100_048_384,
    }


def test_the_page_of_results_shows_every_row(lora):
    text = lora.page()
    assert text in (RESULTS / "README.md").read_text(encoding="utf-8")
    assert "allocated **equal to the byte in 17 of 17**, reserved in 14" in text
    for name, card in lora.facts()["trainings"].items():
        assert f"| {name} | {card['allocated']:,} | equal |" in text
