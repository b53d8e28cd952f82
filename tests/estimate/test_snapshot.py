"""Estimates written as torch's memory snapshots: a snapshot has the estimate's figures, and torch's own tools read it.

tests/rehearsal/test_snapshot_rehearsed.py compares such snapshots with snapshots of rehearsals.
"""

import collections
import io
import pickle
import pickletools

import pytest
from typer.testing import CliRunner

from perf_helpers import cli
from trainmem.core.task import Task
from trainmem.estimate import estimate
from trainmem.estimate.allocator import MIB, CachingAllocator
from trainmem.estimate.allocator_replay import place, snapshot
from trainmem.estimate.trace_records import Label, Log
from trainmem.measure import processes
from trainmem.records import Category

SMALL = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 2000, "num_hidden_layers": 6}
TASK = Task("bert-tiny", seq_len=32, config=SMALL)
WEIGHT = Label("aten.empty.default", Category.WEIGHTS, "setup", "encoder.*")
# What the viewer's reader of pickles knows (pytorch's torch/utils/viz/MemoryViz.js, unpickle).
READABLE = {
    *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK"),
    *("MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP"),
    *("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return an estimate, the path of its snapshot file, and the content of the file."""
    file = tmp_path_factory.mktemp("snapshot") / "estimate.pickle"
    options = {"device": "cuda", "compute_capability": (8, 0), "per_device_train_batch_size": 2}
    return estimate(TASK, snapshot=file, **options), file, pickle.loads(file.read_bytes())


def allocations_and_frees(trace):
    """Return (address, requested bytes, +1 for an allocation or -1 for a free) of each event of a trace in torch's
    snapshot.
    """
    signs = {"alloc": 1, "free_completed": -1}
    return [(entry["addr"], entry["size"], signs[entry["action"]]) for entry in trace if entry["action"] in signs]


def test_the_trace_replayed_has_the_peak_of_the_estimate(exported):
    found, _, made = exported
    (trace,) = made["device_traces"]
    memory, live, number = CachingAllocator(), {}, 0
    first = made["external_annotations"][0]["time_us"]  # the peak counts from the first forward on
    for entry in trace:
        if entry["time_us"] == first:
            memory.reset_peaks()
        if entry["action"] == "alloc":
            number += 1
            live[entry["addr"]] = number
            memory.allocate(number, entry["size"])
        elif entry["action"] == "free_completed":
            memory.free(live.pop(entry["addr"]))
    assert (memory.peak_allocated_bytes, memory.peak_reserved_bytes) == (found.peak_bytes, found.memory.reserved_bytes)


def test_the_segments_are_what_is_reserved_and_hold_the_blocks_that_live(exported):
    found, _, made = exported
    segments, (trace,) = made["segments"], made["device_traces"]
    assert sum(segment["total_size"] for segment in segments) == found.memory.reserved_bytes
    assert sum(entry["size"] for entry in trace if entry["action"] == "segment_alloc") == found.memory.reserved_bytes
    live = collections.Counter()
    for address, size, sign in allocations_and_frees(trace):
        live[address, size] += sign
    blocks = [block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"]
    assert +live == collections.Counter((block["address"], block["requested_size"]) for block in blocks)
    assert sum(block["size"] for block in blocks) == list(found.memory.phases.values())[-1]
    for segment in segments:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        assert segment["frames"]


def test_blocks_say_what_they_are_where_the_viewer_shows_a_stack(exported):
    *_, made = exported
    entries = [entry for entry in made["device_traces"][0] if entry["action"] == "alloc"]
    stacks = [{frame["filename"]: frame["name"] for frame in entry["frames"]} for entry in entries]
    assert {stack["category"] for stack in stacks} >= {"weights", "gradients", "optimizer states", "activations"}
    assert any(stack["phase"] == "backward" and stack["operation"] == "aten.mm.default" for stack in stacks)
    assert any(stack.get("module", "").startswith("bert.encoder.layer.1.") for stack in stacks)
    assert {"weights", "unknown"} < {entry["category"] for entry in made["device_traces"][0]}
    assert all("estimated" in entry["user_metadata"] for entry in entries)
    spans = [(each["stage"], each["name"]) for each in made["external_annotations"]]
    assert [name for stage, name in spans if stage == "END"][-3:] == ["forward", "backward", "step"]


def test_torchs_own_tools_take_it(exported):
    from torch.cuda import _memory_viz

    found, file, made = exported
    assert f"total_reserved: {found.memory.reserved_bytes / MIB:.1f}MiB" in _memory_viz.segsum(made)
    trace = _memory_viz.trace(made)
    assert trace.count("cudaMalloc") == len(made["segments"]) and "oom" not in trace
    lines = io.StringIO(_memory_viz.memory(made, format_flamegraph=str))
    assert any(line.startswith("stream_0;active_allocated;category:0:weights;phase:0:setup;") for line in lines)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "add_local_files" in plot(pickle.loads(file.read_bytes()))


def test_the_viewer_can_read_the_file(exported):
    _, file, _ = exported
    codes = [(code.name, value) for code, value, _ in pickletools.genops(file.read_bytes())]
    assert codes[0] == ("PROTO", 4) and {name for name, _ in codes} <= READABLE


def test_where_there_is_no_room_it_ends_as_torchs_does():
    log = Log([(30 * MIB, WEIGHT), (12 * MIB, WEIGHT), (6 * MIB, WEIGHT)], [0, 1, 2], [("start", 1), ("step", 3)])
    (trace,) = snapshot(log, capacity=42 * MIB)["device_traces"]
    assert [entry["action"] for entry in trace] == ["segment_alloc", "alloc", "segment_alloc", "alloc", "oom"]
    assert (trace[-1]["size"], trace[-1]["device_free"]) == (6 * MIB, 0) and "addr" not in trace[-1]
    assert snapshot(log, capacity=42 * MIB)["external_annotations"] == []


def test_an_expandable_segment_is_mapped():
    made = snapshot(Log([(30 * MIB, WEIGHT)], [0], []), "expandable_segments:True")
    assert [entry["action"] for entry in made["device_traces"][0]] == ["segment_map", "alloc"]
    (segment,) = made["segments"]
    assert segment["is_expandable"] and segment["total_size"] == 40 * MIB and segment["frames"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "device='cuda'"),
        ({"device": "cuda", "snapshot": "no such folder/file"}, "a folder that can be written to"),
    ],
)
def test_a_snapshot_that_cannot_be_is_refused_before_anything_is_traced(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "call", lambda *_, **__: pytest.fail("something was followed"))
    with pytest.raises(ValueError, match=message):
        estimate(TASK, **{"snapshot": tmp_path / "file"} | options)


def test_a_folder_is_no_place(tmp_path):
    with pytest.raises(ValueError, match=r"snapshot=.*: give a file"):
        place(tmp_path)
    assert place(tmp_path / "file").is_absolute()


@pytest.mark.nightly
def test_the_command_line_writes_one(tmp_path):
    words = ["--model", "bert-tiny", "--seq-len", "16", "--device", "cuda", "--per_device_train_batch_size", "1"]
    done = CliRunner().invoke(cli.app, ["estimate", *words, "--snapshot", str(tmp_path / "file")])
    assert done.exit_code == 0, done.output
    assert pickle.loads((tmp_path / "file").read_bytes())["segments"]
