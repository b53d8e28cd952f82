"""Only text is read from a folder: a pickle in place of results is never loaded."""

import ast
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from perf_helpers.compare import compare, history
from perf_helpers.course import report, results
from perf_helpers.lab.lab import Lab
from perf_helpers.sweep.sweep import Plan
from trainmem.core.adapters import settings_of
from trainmem.core.task import Task
from trainmem.estimate.allocator_replay import place
from trainmem.records import Store

ROOT = Path(__file__).resolve().parents[1]
# Where bytes are unpickled: they come from a process that this one started, or go to it, and never from a file.
CHANNELS = {
    "trainmem/estimate/trace.py",
    "trainmem/measure/forked.py",
    "trainmem/measure/forkserver.py",
    "trainmem/core/training.py",
    "trainmem/measure/worker.py",
}
CHANNELS |= {"trainmem/rehearsal/rehearsal_process.py", "perf_helpers/sweep/dask_workers.py"}
CHANNELS |= {"trainmem/estimate/answers.py"}  # the user's own cache folder, which only this package writes
CHANNELS |= {"trainmem/estimate/facts.py"}  # a course's own temporary folder, which only its user can open


class Planted:
    """An object that creates the file `marker` when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.fixture
def planted(tmp_path):
    """Yield a folder in which every file that the package might read is a pickle that writes a file when it is loaded.

    Afterwards, check that none was loaded, and that loading one would have been noticed.
    """
    marker, folder = tmp_path / "was loaded", tmp_path / "planted"
    folder.mkdir()
    content = pickle.dumps(Planted(marker), protocol=0)  # in ASCII, so that it can be read as text too
    names = "results.json runs.jsonl 01_anatomy_of_memory.ipynb 01_anatomy_of_memory.json plan.toml snapshot.pickle"
    names += " runs.pkl cache.pickle pytorch_model.bin model.safetensors adapter_model.bin adapter_config.json"
    for name in names.split():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2}')
    with zipfile.ZipFile(folder / "optimizer.pt", "w") as archive:
        archive.writestr("archive/data.pkl", content)
    yield folder
    assert not marker.exists()
    pickle.loads((folder / "results.json").read_bytes()).close()
    assert marker.exists(), "a planted pickle would not have been seen"


@pytest.mark.parametrize(
    "read",
    [
        lambda folder: compare.compare(folder, folder),
        lambda folder: compare.compare(folder / "snapshot.pickle", folder / "optimizer.pt"),
        lambda folder: history.read(folder),
        lambda folder: report.report(folder),
        lambda folder: compare.run_nightly(folder / "out", folder, ("memory",), False, lessons=["00"]),
        lambda folder: results.recorded(folder.parent),
        lambda folder: Plan.read(folder / "plan.toml"),
        lambda folder: settings_of("peft", folder),
        lambda folder: settings_of("quantization_config", folder / "adapter_model.bin"),
    ],
)
def test_what_is_no_text_is_refused_and_not_loaded(read, planted):
    with pytest.raises(ValueError):
        read(planted)


def test_stores_and_caches_leave_a_pickle_alone(planted):
    with pytest.warns(UserWarning):
        assert Store(planted / "runs.jsonl").read() == []
    lab = Lab("tiny", out=planted, lesson="01_anatomy_of_memory")
    with pytest.warns(UserWarning):
        assert lab.store.read() == []
    assert place(planted / "snapshot.pickle").exists(), "a snapshot is written, whatever was there"
    Task(str(planted)).build_model(device="meta")


def calls(path):
    """Yield (library, {option: value}) of each call that loads a serialized object, in the module file `path`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "loads"):
            library = ast.unparse(node.func.value)
            if library in ("torch", "pickle", "cloudpickle", "joblib", "dill", "np", "numpy", "marshal", "shelve"):
                yield library, {word.arg: ast.unparse(word.value) for word in node.keywords}


def test_only_channels_between_own_processes_are_unpickled():
    found = set()
    for path in sorted([*(ROOT / "trainmem").rglob("*.py"), *(ROOT / "perf_helpers").rglob("*.py")]):
        for library, options in calls(path):
            assert library in ("pickle", "cloudpickle") or options.get("weights_only") == "True", path
            found.add(path.relative_to(ROOT).as_posix())
    assert found == CHANNELS


def test_torch_load_as_the_lessons_call_it_loads_weights_only(tmp_path):
    """The lessons pass no `weights_only`, and torch's default since 2.6 refuses everything but weights."""
    torch.save({"weights": Planted(tmp_path / "was loaded")}, tmp_path / "model.bin")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "model.bin")
    assert not (tmp_path / "was loaded").exists()
