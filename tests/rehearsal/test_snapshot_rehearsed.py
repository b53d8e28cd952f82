"""Snapshots of estimates compared with snapshots of rehearsals, which torch itself writes."""

import contextlib
import itertools
import pickle
import sys
from pathlib import Path

import cloudpickle
import pytest

from trainmem.core.task import Task
from trainmem.estimate import estimate
from trainmem.estimate.allocator import CachingAllocator, OutOfMemory
from trainmem.estimate.allocator_settings import Settings
from trainmem.rehearsal import CARDS, Rehearsal, build, card, rehearse

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)

cloudpickle.register_pickle_by_value(sys.modules[__name__])
TASK = Task("bert-tiny", seq_len=64)
RECIPE = {"per_device_train_batch_size": 4, "logging_nan_inf_filter": False}


def trace_of(file):
    (trace,) = pickle.loads(Path(file).read_bytes())["device_traces"]
    return trace


def sizes(trace):
    """Return (action, bytes) of each allocation and free of a trace, in order.

    The estimate's trace has an allocation and a free of 4 bytes for each sum of losses. They are left out, because a
    rehearsed Trainer adds to the sum in place.

    `trace`: the entries of a device in torch's snapshot.
    """
    entries = [entry for entry in trace if entry["action"] in ("alloc", "free_completed")]
    in_place = [("aten.add_.Tensor", 4)]
    return [
        (entry["action"], entry["size"])
        for entry in entries
        if not entry["frames"] or (entry["frames"][0]["name"], entry["size"]) not in in_place
    ]


def with_frees_sorted(events):
    """Return events, each (action, bytes), with the frees between two allocations sorted by size.

    The order of these frees may differ from run to run: autocast empties its cache in the order of a hash table.
    """
    runs = itertools.groupby(events, key=lambda event: event[0])
    return [event for action, run in runs for event in (run if action == "alloc" else sorted(run))]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("recipe", "arranged"),
    [({}, list), ({"bf16": True, "gradient_checkpointing": True, "optim": "sgd"}, with_frees_sorted)],
)
def test_a_rehearsal_and_an_estimate_allocate_and_free_the_same(tmp_path, recipe, arranged):
    run = rehearse(TASK, on="a100", snapshot=tmp_path / "rehearsed", **RECIPE, **recipe)
    answer = estimate(
        TASK, device="cuda", compute_capability=(8, 0), snapshot=tmp_path / "estimated", **RECIPE, **recipe
    )
    assert run.peak_bytes == answer.peak_bytes
    rehearsed, estimated = (sizes(trace_of(tmp_path / name)) for name in ("rehearsed", "estimated"))
    assert len(estimated) > 500
    shared = rehearsed[: len(estimated)]  # an estimate ends with the last step, a rehearsal after it
    assert arranged(shared) == arranged(estimated)
    frames = {frame["filename"] for entry in trace_of(tmp_path / "rehearsed") for frame in entry["frames"]}
    assert any(name.endswith("modeling_bert.py") for name in frames)


@pytest.mark.nightly
def test_what_does_not_fit_ends_with_it(tmp_path):
    small = card("t4", device_memory="600MB")
    run = rehearse(Task("bert-small", seq_len=128), on=small, snapshot=tmp_path / "full", per_device_train_batch_size=8)
    assert run.status == "out of memory"
    assert "oom" in [entry["action"] for entry in trace_of(tmp_path / "full")]


@pytest.mark.nightly
def test_of_several_ranks_the_first_writes_it(tmp_path):
    run = rehearse(TASK, on="a100", processes=2, snapshot=tmp_path / "ranks", **RECIPE)
    assert run.ok
    traces = pickle.loads((tmp_path / "ranks").read_bytes())["device_traces"]
    # Since torch 2.15 each device has an entry for the snapshot itself.
    assert [any(entry["action"] == "alloc" for entry in trace) for trace in traces] == [True, False]


def test_a_place_for_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"snapshot=.*: give a file"):
        Rehearsal(CARDS["a100"], tmp_path)


# ---- the double of the allocator tells the events that torch records


def events_of_both(random_trace, performed, text, seeds):
    """Return two lists of events for each random trace: those that torch records, those of the estimate's allocator.

    An event is (action, bytes, bytes that the device had left). The last is None unless the event is an out-of-memory
    error.

    Args:
        random_trace: makes a trace from a seed and the device's free bytes.
        performed: lets torch perform one event of a trace.
        text: the settings, as in PYTORCH_CUDA_ALLOC_CONF.
        seeds: one per trace.
    """
    import torch

    torch.empty(1, device="cuda")
    torch.cuda.empty_cache()
    capacity, _ = torch.cuda.mem_get_info()
    settings, found = Settings.parse(text), []
    for seed in seeds:
        torch.cuda.memory._record_memory_history(context=None, clear_history=True)
        live, events = {}, []

        def tell(action, place, size, events=events):
            events.append((action, size, place if action == "oom" else None))

        double = CachingAllocator(settings, capacity, on_event=tell)
        for event in random_trace(seed, capacity):
            performed(torch, live, event)
            if event is None:
                double.empty_cache()
            elif event[1]:
                with contextlib.suppress(OutOfMemory):
                    double.allocate(*event)
            else:
                double.free(event[0])
        (trace,) = torch.cuda.memory._snapshot()["device_traces"]
        recorded = [
            (entry["action"].replace("free_completed", "free"), entry["size"], entry.get("device_free"))
            for entry in trace
            if entry["action"] not in ("free_requested", "snapshot")
        ]
        found.append((recorded, events))
        live.clear()
        torch.cuda.empty_cache()
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("number", [10, 11, -1])
def test_the_allocator_reports_what_torch_records(measure, number, monkeypatch):
    room, text = measure.CONFIGURATIONS[number]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
    with Rehearsal(room) as stage:
        requested = measure.trace, measure.performed, text, [f"test-{seed}" for seed in range(12)]
        found = stage.submit(events_of_both, *requested).result()
    for recorded, events in found:
        assert events == recorded
    actions = {action for recorded, _ in found for action, *_ in recorded}
    mapped = {"segment_map", "segment_unmap"} if "expandable" in text else {"segment_alloc", "segment_free"}
    assert actions == {"alloc", "free", "oom", *mapped}
