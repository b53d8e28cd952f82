"""The explorer's quick answers against the estimate: between the points that were traced, and for other optimizers."""

import json

import pytest

from perf_helpers.estimate import estimate
from perf_helpers.estimate.peak_model import Choice, Inference, Surfaces, precisions
from perf_helpers.lab import processes
from perf_helpers.lab.task import Task

TASKS = {
    "bert-tiny": Task("bert-tiny"),
    "gpt2": Task("gpt2", config={"n_embd": 64, "n_layer": 3, "n_head": 2, "vocab_size": 500, "n_positions": 256}),
    "llama": Task(
        "llama-2-7b",
        config=dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            max_position_embeddings=300,
        ),
    ),
    "vit": Task(
        "vit-base", config={"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 64}
    ),
}
CHOICES = [
    Choice(),
    Choice("bf16", True, 4, "8-bit Adam", "eager"),
    Choice("bf16 weights", False, 2, "Adafactor"),
    Choice(accumulation=8, optimizer="SGD"),
]


@pytest.fixture(scope="module")
def known():
    """Function (task, device) -> its surfaces, which learn as they are asked."""
    found = {}

    def of(name, device="cpu"):
        if (name, device) not in found:
            found[name, device] = Surfaces(TASKS[name], device)
            found[name, device].prepare()
        return found[name, device]

    return of


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["bert-tiny", "gpt2", "vit"])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_between_the_traces_the_answer_is_the_estimate(known, name, choice):
    found = known(name)
    found.learn(choice)
    assert found.refusal(choice) is None and found.is_known(choice)
    for micro_batch, length in ((8, 128), (16, 64)):
        length = length if found.lengths else None
        quick = found.answer(choice, micro_batch, length)
        assert quick.how == "interpolated"
        task = TASKS[name].replace(seq_len=length, dataset_size=4 * micro_batch * choice.accumulation)
        said = estimate(task, device="cpu", **choice.arguments(micro_batch)).memory
        assert quick.peak_bytes == pytest.approx(said.peak_bytes, rel=1e-3)
        for category, size in said.breakdown.items():
            assert quick.breakdown[category] == pytest.approx(size, abs=2e-3 * said.peak_bytes), category
        assert quick.operation == said.peak_operation and quick.phase == said.peak_phase


@pytest.mark.nightly
def test_on_a_gpu_too(known):
    found, choice = known("bert-tiny", "cuda"), Choice("fp16", False, 2, "AdamW")
    found.learn(choice)
    quick = found.answer(choice, 4, 128)
    exact = found.trace(choice, 4, 128)
    assert (quick.how, exact.how) == ("interpolated", "traced")
    assert quick.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "way", [Inference(), Inference("fp32", 24), Inference("bf16", 24, 3), Inference("4 bits", 24, 1, "eager")], ids=str
)
def test_of_inference_too_with_the_cache_of_all_that_was_written(known, device, way):
    found = known("llama", device)
    found.learn(way)
    assert found.refusal(way) is None and found.is_known(way)
    size = 2 * 3 * 2 * 16 * (4 if way.weights == "fp32" else 2) * 6 * way.beams  # of one token's keys and values
    for length, near in ((4, 0.03), (128, 0.004)):  # the first is below what is offered: 200 kB in all
        quick, exact = found.answer(way, 6, length), found.trace(way, 6, length)
        assert (quick.how, exact.how) == ("interpolated", "traced")
        # What a CPU's kernels hide is known of the nearest size on offer, and a short one is below all.
        is_below = device == "cpu" and length < 32
        hidden = [each.breakdown["inside_operations"] for each in (quick, exact)] if is_below else [0]
        assert quick.peak_bytes == pytest.approx(exact.peak_bytes, abs=near * exact.peak_bytes + max(hidden))
        cache = exact.breakdown["key_value_cache"]
        if not is_below or quick.operation == exact.operation:  # else that of a product is as high, by what is hidden
            assert quick.breakdown["key_value_cache"] == pytest.approx(cache, rel=0.04), (
                "a GPU's blocks are of 512 bytes"
            )
        read = length if length > 100 or not way.new_tokens else length + way.new_tokens - 1
        # A layer's keys are there twice while they grow. A long prompt's own pass is the peak.
        assert read - 1 <= cache / size <= 7 / 6 * read + 1


def test_inference_is_refused_where_it_cannot_be(known, tmp_path):
    found, way = known("llama"), Inference("fp32", 16)
    found.learn(way)
    assert found.answer(way, 2, 284) and found.answer(way, 2, 285) is None
    assert found.refusal(way, 285) == "llama-2-7b has positions for 300 tokens, not for 285 + 16"
    found = known("bert-tiny")
    found.learn(way)
    assert "cannot generate" in found.refusal(way) and found.answer(way, 2, 32) is None
    assert not found.refusal(Inference())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": 32, "d_kv": 8, "num_layers": 1}))
    translator = Surfaces(Task(str(tmp_path)))
    translator.prepare()
    translator.learn(way)
    assert "encoder-decoder" in translator.refusal(way)


def test_a_point_that_was_traced_is_told_as_traced(known):
    found = known("bert-tiny")
    found.learn(Choice())
    assert found.answer(Choice(), 2, 32).how == "traced"
    assert found.answer(Choice(), 4, 64).how == "interpolated"
    found.trace(Choice(), 4, 64)
    assert found.answer(Choice(), 4, 64).how == "traced"


def test_what_is_known_is_there_in_the_next_session_and_starts_no_process(tmp_path, monkeypatch):
    first = Surfaces(TASKS["bert-tiny"], folder=tmp_path)
    first.prepare()
    first.learn(Choice())
    answer = first.answer(Choice(), 8, 128)
    monkeypatch.setattr(processes, "call", None)
    second = Surfaces(TASKS["bert-tiny"], folder=tmp_path)
    assert second.is_known(Choice()) and second.answer(Choice(), 8, 128) == answer
    assert not Surfaces(TASKS["gpt2"], folder=tmp_path).is_known(Choice()), "another model is not known by it"
    assert not Surfaces(TASKS["bert-tiny"], "cuda", folder=tmp_path).is_known(Choice())
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({"surfaces": 3}))
    assert not Surfaces(TASKS["bert-tiny"], folder=tmp_path).is_known(Choice()), (
        "a damaged file is one that is not there"
    )


def test_what_cannot_be_followed_is_told(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}))
    found = Surfaces(Task(str(path)))
    found.prepare()
    found.learn(Choice())
    assert "sdpa" in found.refusal(Choice()) or "scaled_dot_product_attention" in found.refusal(Choice())
    assert found.is_known(Choice()) and found.answer(Choice(), 4, 64) is None


def test_choices_begin_with_the_nearest_and_are_those_of_the_device():
    found = Surfaces(TASKS["bert-tiny"])
    first = Choice("bf16", True)
    order = first.near(found.device)
    assert order[0] == first and len(order) == len(set(order)) == 3 * 2 * 2 * 5 * 2
    assert {choice.kind for choice in order[:4]} == {first.kind}, "another optimizer is nearer than another pass"
    assert precisions("cuda") == ["fp32", "bf16", "fp16", "bf16 weights"]


@pytest.mark.nightly
@pytest.mark.parametrize("positions, lengths", [(20, (20,)), (70, (32, 64))])
def test_a_model_of_few_positions_is_fitted_too(positions, lengths):
    config = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99, "n_positions": positions}
    found = Surfaces(Task("gpt2", config=config))
    found.prepare()
    assert found.lengths == lengths
    found.learn(Choice())
    quick = found.answer(Choice(), 4, lengths[0])
    assert quick.how == "interpolated" and quick.peak_bytes == found.trace(Choice(), 4, lengths[0]).peak_bytes


def test_lengths_are_those_that_the_model_can_take(known):
    assert known("gpt2").lengths == (32, 64, 128, 256)
    assert known("vit").lengths == ()
    with pytest.raises(ValueError, match="bert-tinny"):
        Surfaces(Task("bert-tinny")).prepare()
