"""The memory explorer in the kernel: controls are moved, and the picture changes. Also run under ipywidgets 7.7.1, see
test_frame.py.
"""

import dataclasses
import json
import threading
import time
from types import SimpleNamespace

import ipywidgets
import pytest
from explored import TASK
from kernel import alive, box, control, inside, text

from perf_helpers import explorers
from perf_helpers.widgets import memory_explorer, svg
from trainmem.cards import SIZES
from trainmem.core.task import Task
from trainmem.estimate import MemoryEstimate, estimate
from trainmem.measure.forkserver import SERVER
from trainmem.records import Memory
from trainmem.texts import bytes_text

PLAIN = {"gradient_accumulation_steps": 1, "dtype": "float32", "optim": "adamw_torch_fused"}
PLAIN |= {"attn_implementation": "sdpa"}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = Task("llama-2-7b", seq_len=32, config=SMALL | {"num_key_value_heads": 4, "vocab_size": 64})


def wait(condition):
    end = time.monotonic() + 300  # a busy machine traces slowly
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "memory explorer"]


def is_grey(shown):
    return "opacity" in text(shown)


# ---- the answers


def sizes(found):
    """Return an estimate's memory without its timeline: two equal estimates may sample the timeline at different
    operations.
    """
    return dataclasses.replace(found.memory, timeline=None)


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "changes, arguments",
    [
        ({}, {}),
        ({"accumulation": 4, "micro_batch": 256}, {"gradient_accumulation_steps": 4}),
        ({"precision": "bf16", "checkpointing": True}, {"bf16": True, "gradient_checkpointing": True}),
        ({"precision": "bf16 weights", "optimizer": "Adafactor"}, {"dtype": "bfloat16", "optim": "adafactor"}),
        ({"seq_len": 100, "attention": "eager"}, {"attn_implementation": "eager"}),
    ],
)
def test_an_answer_is_the_estimate_itself(device, changes, arguments):
    values = memory_explorer._start(TASK, "training", device, 4) | changes
    size = values["micro_batch"]
    task = TASK.replace(seq_len=values["seq_len"], dataset_size=10_000)  # another key: it is traced, not looked up
    expected = estimate(task, device=device, per_device_train_batch_size=size, **PLAIN | arguments)
    assert sizes(memory_explorer.estimate_at(TASK, values)) == sizes(expected)


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_answer_for_inference_too_with_its_key_value_cache(device):
    values = memory_explorer._start(LLAMA, "inference", device, 2) | {"weights": "4 bits", "new_tokens": 16, "beams": 2}
    found = memory_explorer.estimate_at(LLAMA, values)
    writing = {"max_new_tokens": 16, "num_beams": 2, "dtype": "bfloat16", "load_in_4bit": True}
    options = {"device": device, "training": False, "attn_implementation": "sdpa"}
    assert sizes(found) == sizes(estimate(LLAMA, per_device_eval_batch_size=2, **options, **writing))
    assert found.memory.breakdown["key_value_cache"] > 0


def test_what_the_controls_ask_for(monkeypatch):
    requested = []
    monkeypatch.setattr(memory_explorer, "estimate", lambda task, **options: requested.append((task, options)))
    values = memory_explorer._start(TASK, "training", "cuda", 4)
    memory_explorer.estimate_at(TASK, values | {"vocabulary": 64}, (7, 5))
    memory_explorer.estimate_at(TASK, values | {"model": " vit-base ", "of": "inference", "beams": 4})
    (padded, training), (images, inference) = requested
    assert padded.build_config().vocab_size % 64 == 0 and TASK.build_config().vocab_size % 64
    assert training["compute_capability"] == (7, 5) and training["training"]
    assert (images.model, images.seq_len) == ("vit-base", None)
    assert inference == {
        "device": "cuda",
        "compute_capability": None,
        "training": False,
        "per_device_eval_batch_size": 4,
        "dtype": "float32",
        "attn_implementation": "sdpa",
    }, "beams count only if tokens are generated"


def test_on_a_cpu_there_is_no_fp16():
    assert memory_explorer._precisions("cuda") == ["fp32", "bf16", "fp16", "bf16 weights"]
    assert memory_explorer._precisions("cpu") == ["fp32", "bf16", "bf16 weights"]


# ---- the controls


@pytest.fixture
def traced(monkeypatch):
    """Return the list of micro-batches that were estimated, in order. A stub replaces the estimate: the peak in MB
    equals the micro-batch, and a micro-batch of 32 is refused.
    """
    requested = []

    def estimate_at_once(task, *, device, per_device_train_batch_size, **arguments):
        requested.append(per_device_train_batch_size)
        if per_device_train_batch_size == 32:
            raise ValueError("32 is <too> large: give less")
        peak = per_device_train_batch_size * 10**6
        memory = Memory(peak, "estimated", "forward", "aten.mm", "layer.1", {"weights": peak})
        return MemoryEstimate("an estimate", task.to_dict(), arguments, device, memory, (), 0.0, None)

    monkeypatch.setattr(memory_explorer, "estimate", estimate_at_once)
    return requested


def picture(size):
    """Return the HTML of the memory picture for the micro-batch `size`; its figures are those of `traced`, a stub
    estimate.
    """
    return svg.bar("Peak", {"weights": size * 10**6}, SIZES | {"this machine": 30_000_000})


def test_a_move_greys_the_picture_until_its_estimate_is_there(lab, shown):
    explorers.memory(lab)
    assert "</b> traced" in text(shown) and not threads(), "nothing runs before a control is moved"
    control(shown, "micro-batch").value = 64
    assert is_grey(shown) and "Tracing bert-tiny" in text(shown)
    wait(lambda: not is_grey(shown))
    memory = estimate(TASK, device="cpu", per_device_train_batch_size=64, **PLAIN).memory
    assert svg.bar("Peak", memory.breakdown, SIZES | {"this machine": 30_000_000}) in text(shown)
    assert f"<b>{bytes_text(memory.peak_bytes, binary=True)}</b> traced" in text(shown)
    assert "is too small" in text(shown)


def test_going_back_is_answered_from_the_visited_positions(lab, shown, traced):
    explorers.memory(lab)
    slider = control(shown, "micro-batch")
    slider.value = 8
    wait(lambda: not is_grey(shown))
    SERVER.measuring.add(-1)  # the thread waits from now on
    try:
        for value in (4, 8, 4):
            slider.value = value
            assert picture(value) in text(shown) and not is_grey(shown), "at once, by the front end's thread"
    finally:
        SERVER.measuring.discard(-1)
    assert traced == [4, 8]


def test_only_the_newest_position_is_traced_and_not_while_something_is_measured(lab, shown, traced, monkeypatch):
    waits = threading.Event()
    monkeypatch.setattr(memory_explorer, "time", SimpleNamespace(sleep=lambda _: (waits.set(), time.sleep(0.01))))
    explorers.memory(lab)
    slider = control(shown, "micro-batch")
    SERVER.measuring.add(-1)
    try:
        slider.value = 8
        assert waits.wait(300)
        for value in (16, 64, 128):
            slider.value = value
            assert is_grey(shown)
    finally:
        SERVER.measuring.discard(-1)
    wait(lambda: not is_grey(shown))
    assert traced == [4, 128] and picture(128) in text(shown)


def test_nothing_is_traced_until_the_controls_rest(lab, shown, traced, monkeypatch):
    monkeypatch.setattr(memory_explorer, "_REST_SECONDS", 3600)
    explorers.memory(lab)
    for value in (8, 16):
        control(shown, "micro-batch").value = value
    wait(threads)
    explorers.memory(lab)  # which closes the first
    wait(lambda: not threads())
    assert traced == [4, 4]


def test_what_is_moved_while_a_position_is_traced_is_not_drawn_over(lab, shown, traced, monkeypatch):
    started, go_on, quick = threading.Event(), threading.Event(), memory_explorer.estimate

    def estimate_slowly(task, **arguments):
        started.set()
        assert go_on.wait(300)
        return quick(task, **arguments)

    explorers.memory(lab)
    monkeypatch.setattr(memory_explorer, "estimate", estimate_slowly)
    slider = control(shown, "micro-batch")
    slider.value = 8
    assert started.wait(300)
    slider.value = 16
    slider.value = 4
    assert picture(4) in text(shown)
    slider.value = 64
    go_on.set()
    wait(lambda: not is_grey(shown))
    assert traced == [4, 8, 64] and picture(64) in text(shown)
    slider.value = 8
    assert picture(8) in text(shown), "what was passed is a visited position too"


def test_an_estimate_that_fails_is_shown_as_its_message(lab, shown, traced):
    explorers.memory(lab)
    slider = control(shown, "micro-batch")
    for _ in range(2):
        slider.value = 32
        wait(lambda: "✗ 32 is &lt;too&gt; large: give less" in text(shown))
        assert is_grey(shown)
        slider.value = 4
        assert picture(4) in text(shown) and "✗" not in text(shown)
    assert traced == [4, 32]


@pytest.mark.nightly
def test_another_model_is_traced_or_refused_and_images_have_no_length(lab, shown, tmp_path):
    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32}
    images = tmp_path / "config.json"
    images.write_text(json.dumps({"model_type": "vit"} | small))
    explorers.memory(lab)
    assert not control(shown, "length").disabled
    control(shown, "model").value = str(images)
    wait(lambda: not is_grey(shown))
    assert control(shown, "length").disabled
    control(shown, "model").value = "bert-tinny"
    wait(lambda: "no preset" in text(shown) or "Hub" in text(shown))
    control(shown, "model").value = "bert-tiny"
    assert not is_grey(shown) and not control(shown, "length").disabled
    control(shown, "length").value = 8192
    wait(lambda: "seq_len=8192 is too large" in text(shown))


@pytest.mark.nightly
def test_attentions_kernel_is_named_on_a_gpu(lab, shown):
    explorers.memory(lab, device="cuda")
    assert "Attention uses the" in text(shown)


@pytest.mark.nightly
def test_inference_has_controls_of_its_own_and_the_cache_in_its_picture(lab, shown):
    explorers.memory(lab, LLAMA, of="inference", device="cpu")
    offered = {name: control(shown, name).layout.display for name in ("optimizer", "beams", "new tokens", "weights")}
    assert offered == {"optimizer": "none", "beams": None, "new tokens": None, "weights": None}
    control(shown, "new tokens").value = 16
    wait(lambda: "</b> traced" in text(shown) and "key value cache" in text(shown))
    control(shown, "memory of").value = "training"
    assert control(shown, "optimizer").layout.display is None and control(shown, "beams").layout.display == "none"
    wait(lambda: "gradients" in text(shown))


def test_a_start_that_there_is_not_is_refused_before_anything_is_shown(lab, shown):
    for options, message in (
        ({"of": "answers"}, "choose 'training' or 'inference'"),
        ({"device": "tpu"}, "choose 'cpu' or 'cuda'"),
        ({"card": "t44"}, "'t4'"),
    ):
        with pytest.raises(ValueError, match=message):
            explorers.memory(lab, **options)
    assert not shown


# ---- the contract of the frame


def test_run_again_it_leaves_no_second_widget_and_no_thread(lab, shown, traced):
    explorers.memory(lab)
    first, count = box(shown).model_id, len(alive())
    control(shown, "micro-batch").value = 8
    wait(threads)
    explorers.memory(lab)
    assert first not in alive() and len(alive()) == count
    wait(lambda: not threads())


def test_without_a_front_end_there_is_a_picture_with_words(lab, shown):
    explorers.memory(lab)
    bundle = shown[-1]
    assert "<img" in bundle["text/html"] and 'alt="bert-tiny, micro-batch 4: weights' in bundle["text/html"]
    assert "estimated peak" in bundle["text/plain"]


def test_an_error_in_the_thread_is_shown_and_the_next_move_is_answered(lab, shown, traced, monkeypatch):
    explorers.memory(lab)

    def broken(*_, **__):
        raise RuntimeError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr(memory_explorer, "estimate", broken)
        control(shown, "micro-batch").value = 8
        (output,) = inside(box(shown), ipywidgets.Output)
        wait(lambda: output.outputs and not threads())
    assert output.outputs[0]["output_type"] == "error" and "no such thing" in output.outputs[0]["evalue"]
    control(shown, "micro-batch").value = 16
    wait(lambda: picture(16) in text(shown))
