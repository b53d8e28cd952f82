"""The estimate: what it says, what it refuses, and how it gets from a few layers to all. Exactness has its own file."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from perf_helpers import cli, hardware
from perf_helpers.estimate import estimates as estimate
from perf_helpers.lab.lab import Lab
from perf_helpers.lab.runs import CATEGORIES
from perf_helpers.lab.task import Task

TINY = Task("bert-tiny", seq_len=24, config={"hidden_size": 32, "intermediate_size": 64, "vocab_size": 200})


def predicted(**options):
    return estimate.estimate(TINY, **{"device": "cpu", "per_device_train_batch_size": 2} | options)


def test_an_estimate_says_what_a_run_would_and_how_it_was_made():
    found = predicted(name="mine")
    assert found.name == "mine" and found.memory.kind == "estimated"
    assert (
        sum(found.memory.breakdown.values())
        == found.peak_bytes
        == max(sum(column) for column in zip(*(found.memory.timeline[c] for c in CATEGORIES), strict=True))
    )
    assert found.memory.parameters == TINY.parameters()
    assert set(found.memory.phases) == {"forward", "backward", "step"}
    assert found.traced == "every layer followed" and found.seconds > 0
    assert found.own_bytes < 2**30
    json.dumps(found.to_dict())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"optm": "sgd"}, "Did you mean 'optim'"),
        ({"optim": "adamw_torch_fsued"}, "Did you mean 'adamw_torch_fused'"),
        ({"per_device_train_batch_size": 0}, "at least 1"),
        ({"device": "gpu"}, "choose 'cpu' or 'cuda'"),
        ({"device": "cuda", "parts": ["attention", "magic"]}, "magic"),
    ],
)
def test_a_mistake_is_named_before_anything_is_followed(options, message, monkeypatch):
    monkeypatch.setattr(estimate.processes, "execute", lambda *_: pytest.fail("something was followed"))
    with pytest.raises(ValueError, match=message):
        predicted(**options)


def test_what_cannot_be_followed_is_refused_by_name():
    def lost(task):
        raise RuntimeError("no such kernel")

    with pytest.raises(ValueError, match=r"bert-tiny cannot be followed on fake tensors.*no such kernel"):
        estimate.estimate(TINY, device="cpu", function=lost)


def test_what_depends_on_values_is_refused_with_its_operation_and_module(tmp_path):
    fields = {"model_type": "switch_transformers", "vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 32}
    fields |= {"num_layers": 4, "num_decoder_layers": 4, "num_heads": 2, "num_experts": 3}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    task = Task(str(tmp_path), seq_len=8, dataset_size=8)
    with pytest.raises(ValueError, match=r"what aten\.nonzero\.default makes in .*mlp.experts depends on the values"):
        estimate.estimate(task, device="cpu")


def test_an_edited_configuration_is_another_model(tmp_path):
    file = tmp_path / "config.json"
    peaks = []
    for size in (32, 64):
        file.write_text(json.dumps({"model_type": "bert", "hidden_size": size, "num_attention_heads": 2}))
        peaks.append(estimate.estimate(Task(str(file), seq_len=8), device="cpu").peak_bytes)
    assert peaks[0] < peaks[1]


def test_a_loop_of_ones_own_is_followed_too():
    def loop(task):
        import torch

        model = task.build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            model(**task.batch(2)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    run = Lab("cpu").run(loop, task=TINY, measure=("memory",))
    assert estimate.estimate(TINY, device="cpu", function=loop).memory.breakdown == run.memory.breakdown


def test_the_second_question_is_answered_from_what_is_known(monkeypatch):
    first = predicted()
    monkeypatch.setattr(estimate.processes, "execute", lambda *_: pytest.fail("it was followed again"))
    assert predicted(name="again").memory == first.memory


def test_one_rank_of_two_is_within_a_thousandth():
    run = Lab("cpu").train("two", task=TINY, measure=("memory",), processes=2, per_device_train_batch_size=2)
    found = predicted(processes=2)
    # The lower one: now and then a rank holds an old bucket a moment longer (see test_lab).
    measured = min(rank["peak_bytes"] for rank in run.ranks)
    assert found.peak_bytes == pytest.approx(measured, rel=1e-3)
    assert any(text.startswith("DistributedDataParallel") for text in found.assumptions)


def test_sharding_divides_what_it_says_it_divides():
    whole, shared = predicted(), predicted(processes=4, fsdp="full_shard")
    for category in ("weights", "optimizer_states"):
        assert shared.memory.breakdown[category] == whole.memory.breakdown[category] // 4
    assert shared.memory.breakdown["activations"] == whole.memory.breakdown["activations"]
    assert any(text.startswith("sharding") for text in shared.assumptions)


def test_cuda_is_modelled_and_says_so():
    found = predicted(device="cuda", compute_capability=(8, 0))
    assert found.memory.reserved_bytes >= found.peak_bytes
    assert "not yet checked on a GPU" in found.assumptions[0]
    bare = predicted(device="cuda", compute_capability=(8, 0), parts=["rounding"])
    assert bare.peak_bytes < found.peak_bytes and bare.memory.reserved_bytes is None


class TestExtrapolation:
    """Trainings made by hand: each operation is (its key, live bytes when it ends)."""

    def training(self, *operations, phase="forward"):
        live = np.zeros((len(operations), len(CATEGORIES) - 1), dtype=np.int64)
        live[:, 3] = [size for _, size in operations]
        total = live.sum(axis=1)
        return SimpleNamespace(
            calls=[SimpleNamespace(key=key) for key, _ in operations],
            phases=[phase] * len(operations),
            live=live,
            before=total,
            high=total,
            born=total * 0,
        )

    def test_a_layer_more_adds_nothing_from_the_front_and_its_own_from_the_back(self):
        two = self.training(("embed", 1), ("a", 3), ("b", 5), ("a", 7), ("b", 9), ("head", 10))
        three = self.training(("embed", 1), ("a", 3), ("b", 5), ("a", 7), ("b", 9), ("a", 11), ("b", 13), ("head", 14))
        front, back = estimate.growth(two, three).ways
        assert dict(zip(front["places"].tolist(), front["high"].tolist(), strict=True))[1] == 0
        assert dict(zip(back["places"].tolist(), back["high"].tolist(), strict=True))[4] == 4
        assert {*front["places"].tolist(), *back["places"].tolist()} == set(range(6))

    def test_what_only_looks_alike_is_no_pair(self):
        """The head begins as a layer does; its bytes tell the difference."""
        two = self.training(("a", 2), ("b", 4), ("a", 6), ("b", 8), ("a", 100), ("head", 9))
        three = self.training(("a", 2), ("b", 4), ("a", 6), ("b", 8), ("a", 10), ("b", 12), ("a", 104), ("head", 13))
        front, back = estimate.growth(two, three).ways
        assert 4 not in front["places"]
        assert dict(zip(back["places"].tolist(), back["high"].tolist(), strict=True))[4] == 4

    def test_what_only_a_middle_layer_does_is_kept_for_the_first_and_the_last_of_them(self):
        two = self.training(("head", 10), ("a", 9), ("first", 8), ("end", 1), phase="backward")
        three = self.training(
            ("head", 12), ("a", 11), ("sum", 50), ("a", 9), ("first", 8), ("end", 1), phase="backward"
        )
        grown = estimate.growth(two, three)
        assert {name: places.tolist() for name, places in grown.between.items()} == {
            "places": [2],
            "before": [1],
            "after": [1],
        }
        first, last = estimate._of_middle_layers(0, [grown], [three], [3])
        assert (first["high"].tolist(), last["high"].tolist()) == ([54], [50]), "2 bytes for each layer still to come"

    def test_other_trainings_are_not_extrapolated(self):
        one = self.training(*((f"op {n}", n) for n in range(20)))
        other = self.training(*((f"another {n}", n) for n in range(22)))
        assert estimate.growth(one, other) is None
        assert estimate.growth(one, self.training(("op 1", 1), phase="backward")) is None


class TestCommandLine:
    def run(self, *words):
        return CliRunner().invoke(cli.app, ["estimate", "--model", "bert-tiny", "--seq-len", "24", *words])

    def test_json_holds_what_was_promised(self):
        result = self.run("--device", "cpu", "--per_device_train_batch_size", "2", "--json")
        assert result.exit_code == 0
        content = json.loads(result.stdout)
        for name in ("peak_bytes", "breakdown", "phases", "assumptions", "seconds", "arguments", "versions"):
            assert name in content
        assert sum(content["breakdown"].values()) == content["peak_bytes"]

    def test_text_names_the_assumptions(self):
        result = self.run("--device", "cuda", "--compute-capability", "8.0", "--inference")
        assert result.exit_code == 0 and "- rounding: " in result.stdout and "optimizer states" not in result.stdout

    def test_a_wrong_capability_is_explained(self):
        result = self.run("--device", "cuda", "--compute-capability", "ampere")
        assert isinstance(result.exception, ValueError) and "9.0" in str(result.exception)


def test_on_a_machine_with_a_gpu_its_own_capability_counts(monkeypatch):
    gpu = hardware.Gpu(0, name="NVIDIA A100", memory_bytes=80 * 2**30, capability=(8, 0))
    monkeypatch.setattr(hardware, "describe", lambda: hardware.Machine("NVIDIA A100", "cuda", gpus=(gpu,)))
    options = {"task": TINY, "per_device_train_batch_size": 2}
    here, there = (
        estimate.estimate(**options, **more) for more in ({}, {"device": "cuda", "compute_capability": (8, 0)})
    )
    assert here.device == "cuda" and here.memory == there.memory
    hopper = estimate.estimate(**options, compute_capability=(9, 0))
    assert hopper.peak_bytes > here.peak_bytes, "its workspace is larger"
