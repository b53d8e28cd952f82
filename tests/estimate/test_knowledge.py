"""Facts about operations are stored for later processes: for the same versions and CPU, within limits."""

import json
import os
import threading

import pytest
import torch

from trainmem.core import hardware
from trainmem.estimate import knowledge
from trainmem.estimate.knowledge import IN_PLACE, Hidden, Knowledge, View
from trainmem.estimate.trace_records import Spec

SPEC = Spec((2, 3), (3, 1), torch.bfloat16)
FACTS = {
    ("cpu", "aten.mm.default", (SPEC, 1.0)): SPEC,
    ("cpu", "aten.mm.default", (SPEC, 1)): View(SPEC, 6),
    ("cpu", "aten.mm.default", (SPEC, True)): IN_PLACE,
    ("cuda, torch 2.15", "aten.topk.default", (SPEC, 1)): (SPEC, None),
    ("cuda, torch 2.15", "bitsandbytes.quantize_4bit.default", (SPEC, 1)): [SPEC, SPEC],
    (2, "aten.mm.default", (SPEC, 1)): Hidden(640, "measured", 0.25),
    (4, "aten.mm.default", (SPEC, 1)): Hidden(0, "line"),
}


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("PERF_HELPERS_HOME", str(tmp_path))
    return tmp_path


def learned(facts):
    known = Knowledge.load()
    known.learn(facts)
    known.save()
    return Knowledge.load()


def stored(home):
    return sorted((home / "operations").iterdir(), key=os.path.getmtime)


def test_a_later_process_finds_each_fact_as_it_was_and_no_other():
    known = learned(FACTS)
    assert {key: known.find(key) for key in FACTS} == FACTS
    assert known.find((2, "aten.mm.default", (SPEC, 1))).seconds == 0.25
    assert known.find(("cpu", "aten.mm.default", (SPEC, 2))) is None and not known.learned
    both = learned({("cpu", "aten.add.Tensor", ()): SPEC})
    assert {key: both.find(key) for key in FACTS} == FACTS, "what is added replaces nothing"


@pytest.mark.parametrize(
    "key, fact",
    [
        ((1, "aten.mm.default"), Hidden(10, "assumed")),  # a busy machine has less time for its own size
        ((1, "aten.mm.default"), Hidden(None, "unknown")),  # its process may have run out of memory
        (("cpu", "mine.mm.default"), SPEC),  # another operator by tomorrow
    ],
    ids=["assumed", "unknown", "own operator"],
)
def test_what_may_be_otherwise_next_time_is_not_stored(home, key, fact):
    assert learned({key: fact}).find(key) is None
    assert not (home / "operations").exists()


def other_release(monkeypatch):
    monkeypatch.setattr(hardware, "versions", lambda: {"transformers": "9.9"})


def other_code(monkeypatch):
    monkeypatch.setattr(knowledge, "_SOURCES", "edited")


def other_cpu(monkeypatch):
    monkeypatch.setattr(hardware, "read_cpu", lambda: ("another", ()))


def other_kernels(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")


@pytest.mark.parametrize("change", [other_release, other_code, other_cpu, other_kernels])
def test_facts_are_trusted_only_where_they_were_learned(monkeypatch, change):
    learned(FACTS)
    with monkeypatch.context() as patch:
        change(patch)
        known = learned({})
        assert all(known.find(key) is None for key in FACTS)
    assert all(map(Knowledge.load().find, FACTS))


@pytest.mark.parametrize(
    "text", ["", '{"ab', "[]", "null", "9", "[" * 10**5, "\0", '{"DIGEST": ["spec", 5, [], "float"]}', '{"DIGEST": 7}']
)
def test_a_damaged_file_counts_as_empty_and_is_replaced(home, text):
    learned(FACTS)
    (file,) = stored(home)
    key = next(iter(FACTS))
    file.write_text(text.replace("DIGEST", knowledge._digest(key)))
    assert Knowledge.load().find(key) is None
    assert learned(FACTS).find(key) == FACTS[key]


def test_beyond_its_limit_a_file_loses_its_older_half(home, monkeypatch):
    learned(FACTS)
    monkeypatch.setattr(knowledge, "MOST_BYTES", len(stored(home)[0].read_text()))
    latest = ("cpu", "aten.add.Tensor", ())
    known = learned({latest: SPEC})
    found = [key for key in FACTS if known.find(key)]
    assert known.find(latest) and found == [*FACTS][-len(found) :] and 0 < len(found) < len(FACTS)


def test_files_of_old_versions_are_removed(home, monkeypatch):
    for number in range(knowledge._MOST_FILES + 2):
        monkeypatch.setattr(knowledge, "_SOURCES", str(number))
        learned(FACTS)
        os.utime(knowledge._file(), (number, number))
    assert len(stored(home)) == knowledge._MOST_FILES
    assert Knowledge.load().find(next(iter(FACTS)))


def test_a_folder_that_cannot_be_written_to_is_no_failure(home):
    (home / "operations").write_text("a file")
    assert learned(FACTS).find(next(iter(FACTS))) is None


def test_whoever_reads_while_others_write_finds_a_whole_file(home):
    """A thread in place of the other process."""
    learned(FACTS)
    (file,), over = stored(home), threading.Event()

    def write():
        while not over.is_set():
            learned(FACTS)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            assert len(json.loads(file.read_text())) == len(FACTS)
    finally:
        over.set()
        writer.join()
