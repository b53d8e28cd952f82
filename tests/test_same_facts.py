"""The script that compares the facts of two versions of a page."""

import subprocess
import sys
from pathlib import Path

import pytest
from same_facts import differences

ROOT = Path(__file__).resolve().parents[1]
OLD = "Of 1,800 words `a b` takes 0.5 s, see [x](y.md#z) and two more (accumulation-cost).\n\n```\nmake x  it\n```\n"
SAME = "See [another text](y.md#z):\n`a\nb` takes 0.5 s for 1800 words.\naccumulation-cost: 2.\n```bash\nmake x\n```\n"


def test_other_words_with_the_same_facts_do_not_differ():
    assert differences(OLD, SAME, {"accumulation-cost"}) == []


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("0.5", "0.6", "number"),
        ("1,800", "1,801", "number"),
        ("two", "three", "number"),
        ("y.md#z", "y.md#w", "link"),
        ("`a b`", "`a c`", "code"),
        ("make x", "make y", "code"),
        ("accumulation-cost", "accumulation-cast", "claim"),
    ],
)
def test_a_changed_fact_is_reported(old, new, kind):
    found = differences(OLD, OLD.replace(old, new), {"accumulation-cost"})
    assert found and {each[1] for each in found} == {kind}


def test_the_command_exits_with_1_unless_the_difference_is_allowed(tmp_path):
    old, new = tmp_path / "old.md", tmp_path / "new.md"
    old.write_text("3 rows")
    new.write_text("4 rows")
    command = [sys.executable, ROOT / "tests/same_facts.py", old, new]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "only in old, number: 3\nonly in new, number: 4\n"
    assert subprocess.run([*command, "--allow", "3", "4"], cwd=ROOT).returncode == 0
