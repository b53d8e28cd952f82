"""Show that estimates share facts about operations through a folder.

An estimate that finds facts of an earlier one returns the same result; values that were only assumed are not shared.
"""

import pytest

from trainmem.core.task import Task
from trainmem.estimate import api, estimate, facts
from trainmem.estimate.operator_workspaces import Hidden

TASK = Task("bert-tiny", seq_len=32, dataset_size=32)
KEY = "cpu", "aten.mm.default"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(facts.FOLDER, str(tmp_path))
    return tmp_path


def test_without_a_folder_nothing_is_shared(monkeypatch):
    monkeypatch.delenv(facts.FOLDER, raising=False)
    facts.share({KEY: "in place"})
    assert facts.load() == {}


def test_facts_of_libraries_are_shared_but_no_assumptions(folder):
    own, assumed = ("cpu", "mine.op.default"), ("cpu", "aten.sort.default")
    facts.share({KEY: Hidden(512, "line"), own: "in place", assumed: Hidden(512, "assumed")})
    assert facts.load() == {KEY: Hidden(512, "line")}
    facts.share({own: "in place"})
    assert len([*folder.rglob("*.pickle")]) == 1


def test_facts_of_other_variables_and_damaged_files_are_left_out(folder, monkeypatch):
    facts.share({KEY: "in place"})
    (file,) = folder.rglob("*.pickle")
    file.with_name("damaged.pickle").write_bytes(file.read_bytes()[:-3])
    assert facts.load() == {KEY: "in place"}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert facts.load() == {}


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.nightly), "cuda"])
def test_an_estimate_that_knows_all_operations_says_the_same_and_finds_out_nothing(folder, monkeypatch, device):
    def estimated():
        monkeypatch.setattr(api, "_made", {})  # this process estimates an equal question only once
        made = estimate(TASK, device=device, per_device_train_batch_size=4, bf16=True)
        return made.memory.to_dict(), made.assumptions

    monkeypatch.delenv(facts.FOLDER)
    alone = estimated()
    monkeypatch.setenv(facts.FOLDER, str(folder))
    first = estimated()
    found = {*folder.rglob("*.pickle")}
    again = estimated()
    assert alone == first == again
    assert found == {*folder.rglob("*.pickle")} != set()
