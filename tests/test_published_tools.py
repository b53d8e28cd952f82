"""Tools compared with published measurements, results/published_tools.json: each measured figure equals that in its
source, each error follows from the tools' recorded answers, and the pages show both.
"""

import json
import statistics
import tomllib

import pytest
from scripts import BENCHMARKS, RESULTS, ROOT, script

MIB = 2**20
WHAT = {"allocated": "bytes", "reserved": "total_bytes"}


@pytest.fixture(scope="module")
def tools():
    return script("published_tools")


@pytest.fixture(scope="module")
def report():
    return json.loads((RESULTS / "published_tools.json").read_text(encoding="utf-8"))


def facts(name):
    return tomllib.loads((BENCHMARKS / f"{name}.toml").read_text(encoding="utf-8"))


def test_every_figure_is_that_of_its_source(report):
    sources = {}
    for each in facts("published")["set"]:
        if each["kind"] == "training":
            what = {"max allocated": "allocated", "reserved": "reserved"}[each["quantity"]]
            for figure in each["figures"]:
                size = f"per_device_train_batch_size {figure.get('per_device_train_batch_size')}"
                sources[f"{each['name']}: {figure.get('row', size)}"] = {what: round(figure["published"] * MIB)}
    for name, card in facts("published_lora")["trainings"].items():
        sources[name] = {"allocated": card["allocated"], "reserved": card["reserved_mib"] * MIB}
    sources |= facts("published_preflight")["trainings"]
    shown = {row["name"]: {what: row[what] for what in WHAT if what in row} for row in report["pairs"]}
    assert len(shown) == 43 and shown == sources


def test_recorded_answers_of_this_estimate_equal_its_record(report):
    published = {row["name"]: row for row in json.loads((RESULTS / "published.json").read_text("utf-8"))["table"]}
    lora = json.loads((RESULTS / "lora_t4_predictions_2.11.0.json").read_text("utf-8"))["rows"]
    rehearsed = {row["name"]: row for row in lora}
    for row in report["pairs"]:
        estimated, rehearsal = row["said"]["this estimate"], row["said"]["rehearsal"]
        if row["file"] == "published":
            what = next(what for figure, what in WHAT.items() if figure in row)
            assert estimated[what] == round(published[row["name"]]["predicted"] * MIB), row["name"]
            assert rehearsal[what] == round(published[row["name"]]["rehearsed"] * MIB), row["name"]
        elif row["file"] == "published_lora":
            assert rehearsal == {what: rehearsed[row["name"]][figure] for figure, what in WHAT.items()}
        else:
            assert set(rehearsal.values()) == {None}


def test_each_row_is_made_of_its_answers(report):
    assert len(report["table"]) == len(report["pairs"][0]["said"]) + 2
    for row in report["table"]:
        for figure, what in WHAT.items():
            pairs = [pair for pair in report["pairs"] if figure in pair and pair["file"] != row["left_out"]]
            answer = [(pair["said"][row["tool"]][what], pair[figure]) for pair in pairs]
            errors = [abs(size / truth - 1) for size, truth in answer if size is not None]
            found = row[figure]
            assert (found["answered"], found["asked"]) == (len(errors), len(answer)), row["tool"]
            if errors:
                assert found["median"] == pytest.approx(statistics.median(errors)), row["tool"]
                assert found["worst"] == pytest.approx(max(errors)), row["tool"]


def test_this_estimate_answers_every_row_and_has_the_smallest_median_error(report):
    estimates, *others = report["table"]
    for figure, requested in (("allocated", 37), ("reserved", 29)):
        assert estimates[figure]["answered"] == estimates[figure]["asked"] == requested
        assert estimates[figure]["median"] <= min(row[figure].get("median", 1) for row in others[2:])


def test_every_tool_that_can_be_queried_was(report, tools):
    assert {*tools.PUBLISHED_TOOLS.cases(None)} == {row["tool"] for row in report["table"]}
    assert all(row["version"] for row in report["table"])


def test_a_row_is_queried_as_it_was_trained(tools, tmp_path):
    found = {row.name: row for row in tools.rows()}
    assert len(found) == 43
    row = found["SmolLM2-135M, eager, 2 x 512"]
    requested = tools.question(row.training, tmp_path) | row.more
    reported = {
        name: requested[name] for name in ("size", "tokens", "precision", "mixed", "flash", "checkpointing", "card")
    }
    assert reported == dict(
        size=2, tokens=512, precision="fp16", mixed=False, flash=False, checkpointing=True, card="T4"
    )
    adapters = 30 * 32 * (2 * (576 + 576) + 2 * (576 + 192))  # layers, rank; q and o, k and v
    assert (requested["parameters"], requested["rank"], requested["trained"]) == (134_515_008, 32, adapters)
    assert found["bert, 8 x 256"].training.arguments["bf16"] and found["bert, 8 x 256"].more["trained"] == 109_482_240
    assert found["fms-acceleration, Mistral-7B LoRA: per_device_train_batch_size 4"].more["rank"] == 16
    flash = {row.name: "attn_implementation" not in row.training.arguments for row in found.values()}
    assert [name for name, is_flash in flash.items() if is_flash and "scratch" in name] == [
        "LLMs-from-scratch, GPT 124M: flash attention"
    ]


def test_the_pages_say_what_the_record_says(report):
    text = script("cuda_page").published_tools()
    for page in (RESULTS / "README.md", ROOT / "docs" / "estimate.md"):
        assert text in page.read_text(encoding="utf-8"), page
    lines = text.splitlines()
    for row in report["table"]:
        start = f"| {row['tool']} {row['version']}" + (
            f", without {row['left_out']}.toml |" if row["left_out"] else " |"
        )
        line = next(line for line in lines if line.startswith(start))
        for found in (row["allocated"], row["reserved"]):
            errors = [f"{found[name]:.2%}" if name in found else "none" for name in ("median", "worst")]
            assert " | ".join([f"{found['answered']} of {found['asked']}", *errors]) in line
        assert all(f"{count}: " in line for _, count in row["refused"])
    for figure, what in WHAT.items():
        off = {
            row["name"]: row["said"]["this estimate"][what] / row[figure] - 1
            for row in report["pairs"]
            if figure in row
        }
        name = max(off, key=lambda name: abs(off[name]))
        assert f"{off[name]:+.2%} of the {figure} memory ({name})" in text
    assert report["note"] in text and all(f"{name} ({reason})" in text for name, reason in report["not_run"].items())
