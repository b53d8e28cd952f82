"""The memory explorer on the kernel's side: controls are moved, the picture follows. Under ipywidgets 7.7.1 too, see
test_frame.py.
"""

import json
import threading
import time

import ipywidgets
import pytest
from explored import TASK
from kernel import alive, box, control, inside, text

from perf_helpers import Task, explorers
from perf_helpers.estimate import peak_model
from perf_helpers.records import Store


def wait(condition):
    end = time.monotonic() + 300  # a busy machine traces slowly
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A folder in which the plain recipe of the task is known."""
    folder = tmp_path_factory.mktemp("home")
    found = peak_model.Surfaces(TASK, "cpu", folder=folder / "fits")
    found.prepare()
    found.learn(peak_model.Choice())
    return folder


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "memory explorer"]


def test_a_move_is_answered_at_once_and_told_as_interpolated_until_it_is_traced(lab, shown, learnt):
    lab.store = Store(learnt / "runs.jsonl")
    explorers.memory(lab)
    assert "traced" in text(shown) and not threads(), "nothing runs before a control is moved"
    assert "this machine" in text(shown)
    before = text(shown)
    slider = control(shown, "micro-batch")
    slider.value = 8
    wait(lambda: text(shown) != before)
    wait(lambda: "interpolated" in text(shown) or "traced:" in text(shown))
    seconds = []
    for value in (128, 32, 16, 64):
        began = time.perf_counter()
        slider.value = value
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.15, "the fastest: what else the machine does only adds"
    assert "interpolated" in text(shown) and "is too small" in text(shown)
    wait(lambda: "</b> traced" in text(shown))


@pytest.mark.nightly
def test_a_model_that_is_new_is_traced_and_its_lengths_are_offered(lab, shown, tmp_path):
    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32}
    images = tmp_path / "config.json"
    images.write_text(json.dumps({"model_type": "vit"} | small))
    explorers.memory(lab)
    control(shown, "model").value = str(images)
    wait(lambda: control(shown, "length").disabled)
    control(shown, "model").value = "bert-tinny"
    wait(lambda: "no preset" in text(shown) or "Hub" in text(shown))
    control(shown, "model").value = "bert-tiny"
    wait(lambda: not control(shown, "length").disabled and "Tracing" not in text(shown))


def test_attentions_kernel_is_told_and_a_padded_vocabulary_is_another_model(lab, shown, monkeypatch):
    explorers.memory(lab, device="cuda")
    assert "Attention uses the" in text(shown)
    asked = []

    class Asked(peak_model.Surfaces):
        def __init__(self, task, *arguments, **options):
            asked.append(task)
            super().__init__(task, *arguments, **options)

    monkeypatch.setattr(peak_model, "Surfaces", Asked)
    control(shown, "vocabulary").value = 64
    wait(lambda: asked)
    assert asked[0].build_config().vocab_size % 64 == 0 and TASK.build_config().vocab_size % 64
    control(shown, "vocabulary").value = 1
    wait(lambda: len(asked) > 1)
    assert asked[1] == lab.task.replace(seq_len=None) or asked[1] == lab.task


@pytest.mark.nightly
def test_inference_has_controls_of_its_own_and_the_cache_in_its_picture(lab, shown, tmp_path):
    small = {"model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(small | {"num_key_value_heads": 3, "vocab_size": 64}))
    with pytest.raises(ValueError, match="choose 'training' or 'inference'"):
        explorers.memory(lab, of="answers")
    explorers.memory(lab, Task(str(tmp_path), seq_len=32), of="inference", device="cpu")
    offered = {name: control(shown, name).layout.display for name in ("optimizer", "beams", "new tokens", "weights")}
    assert offered == {"optimizer": "none", "beams": None, "new tokens": None, "weights": None}
    control(shown, "new tokens").value = 16
    wait(lambda: "</b> traced" in text(shown) and "key value cache" in text(shown))
    control(shown, "new tokens").value = 256
    wait(lambda: "</b> interpolated" in text(shown))
    control(shown, "memory of").value = "training"
    assert control(shown, "optimizer").layout.display is None and control(shown, "beams").layout.display == "none"
    wait(lambda: "gradients" in text(shown))


@pytest.mark.nightly
def test_run_again_it_leaves_no_second_widget_and_no_second_thread(lab, shown):
    explorers.memory(lab)
    first, count = box(shown).model_id, len(alive())
    control(shown, "optimizer").value = "SGD"
    wait(threads)
    explorers.memory(lab)
    assert first not in alive() and len(alive()) == count
    wait(lambda: not threads())


def test_without_a_front_end_there_is_a_picture_with_words(lab, shown):
    explorers.memory(lab)
    bundle = shown[-1]
    assert "<img" in bundle["text/html"] and 'alt="bert-tiny, micro-batch 4: weights' in bundle["text/html"]
    assert "estimated peak" in bundle["text/plain"]


def test_an_error_in_the_thread_is_shown(lab, shown, monkeypatch):
    explorers.memory(lab)

    def broken(_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(peak_model.Surfaces, "prepare", broken)
    control(shown, "model").value = "gpt2"
    (output,) = inside(box(shown), ipywidgets.Output)
    wait(lambda: output.outputs)
    assert output.outputs[0]["output_type"] == "error" and "no such thing" in output.outputs[0]["evalue"]
