"""Check results/programs.json, the record of other projects' programs in a rehearsal."""

import json
from pathlib import Path

from scripts import script

RECORD = json.loads((Path(__file__).parents[1] / "results" / "programs.json").read_text(encoding="utf-8"))
ENDS = {row["name"]: row["status"] for row in RECORD["rows"]}


def test_each_program_is_recorded_and_at_least_twenty_come_to_their_end():
    assert ENDS.keys() == script("measure_programs").cases(None).keys()
    assert RECORD["finished"] == [*ENDS.values()].count("finished") >= 20


def test_what_does_not_come_to_its_end_says_why_and_where():
    for row in RECORD["rows"]:
        if row["status"] != "finished":
            assert row["message"], row["name"]
            assert ": " not in row.get("line", ""), f"{row['name']}: no line of another project's code is kept"


def test_programs_that_need_values_have_peaks_and_counted_answers():
    for name in ("run_clm", "run_glue", "trl_grpo", "litgpt_lora", "nanochat_base_train", "timm_train"):
        (row,) = (row for row in RECORD["rows"] if row["name"] == name)
        assert row["status"] == "finished" and row["peaks"][1] >= row["peaks"][0] > 0 and sum(row["answers"].values())
