"""Explorers on the kernel's side: controls are moved, pictures follow, and what stands there without a front end. Under
ipywidgets 7.7.1 too, see test_widgets.py.
"""

import json
import threading
import time
from types import SimpleNamespace

import ipywidgets
import pytest
from kernel import alive, box, inside

from perf_helpers import explorers, hardware, widgets
from perf_helpers.estimate import estimate
from perf_helpers.estimate import surfaces as fits
from perf_helpers.lab.runs import CATEGORIES, Memory, Run, Timing
from perf_helpers.lab.store import Store
from perf_helpers.lab.task import PROFILES, Task
from perf_helpers.unknown import Unknown
from perf_helpers.widgets import drawings

TASK = Task("bert-tiny", seq_len=64)


@pytest.fixture
def lab(tmp_path):
    return SimpleNamespace(
        lesson="14",
        store=Store(tmp_path / "runs.jsonl"),
        task=TASK,
        runs=[],
        profile=PROFILES["cpu"],
        machine=hardware.Machine("a machine", "cpu", memory_bytes=30_000_000),
    )


@pytest.fixture(autouse=True)
def fresh_kernel():
    yield
    for where in list(widgets._shown):
        widgets._replace(where, SimpleNamespace(children=()))
    widgets._shown.clear()


def control(shown, name):
    return next(w for w in inside(box(shown), ipywidgets.DOMWidget) if getattr(w, "description", None) == name)


def text(shown):
    return "".join(widget.value for widget in inside(box(shown), ipywidgets.HTML))


def wait(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def series(*totals, activations=0):
    """A timeline of weights alone, two thirds forward."""
    empty = {name: [0] * len(totals) for name in CATEGORIES}
    phases = ["forward" if 3 * i < 2 * len(totals) else "backward" for i in range(len(totals))]
    named = {"phase": phases, "operation": ["aten.mm"] * len(totals), "module": ["layer.1"] * len(totals)}
    return named | empty | {"weights": list(totals)}


UNKNOWN = Timing(*[Unknown("a rehearsal")] * 5)  # as in a rehearsal


def run(name, peak, speed=None, **changes):
    memory = Memory(peak, "counted", "forward", "aten.mm", "layer.1", {"weights": peak}, timeline=series(1, peak, 2))
    timing = Timing(1.0, 0.0, 3, 1, speed) if speed else None
    values = {"arguments": {"optim": name}, "task": TASK.to_dict(), "machine": {"name": "a machine"}, "id": name}
    return Run(name, "ok", memory=memory, **(values | {"timing": timing} | changes))


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A folder in which the plain recipe of the task is known."""
    folder = tmp_path_factory.mktemp("home")
    found = fits.Fits(TASK, "cpu", folder=folder / "fits")
    found.prepare()
    found.learn(fits.Choice())
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


def test_a_model_that_is_new_is_traced_and_its_lengths_are_offered(lab, shown, tmp_path):
    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32}
    images = tmp_path / "config.json"
    images.write_text(json.dumps({"model_type": "vit"} | small))
    explorers.memory(lab)
    control(shown, "model").value = str(images)
    wait(lambda: control(shown, "length").disabled, 120)
    control(shown, "model").value = "bert-tinny"
    wait(lambda: "no preset" in text(shown) or "Hub" in text(shown), 120)
    control(shown, "model").value = "bert-tiny"
    wait(lambda: not control(shown, "length").disabled and "Tracing" not in text(shown), 120)


def test_run_again_it_leaves_no_second_widget_and_no_second_thread(lab, shown):
    explorers.memory(lab)
    first, count = box(shown).model_id, len(alive())
    control(shown, "optimizer").value = "SGD"
    wait(threads)
    explorers.memory(lab)
    assert first not in alive() and len(alive()) == count
    wait(lambda: not threads(), 120)


def test_without_a_front_end_there_is_a_picture_with_words(lab, shown):
    explorers.memory(lab)
    bundle = shown[-1]
    assert "<img" in bundle["text/html"] and 'alt="bert-tiny, micro-batch 4: weights' in bundle["text/html"]
    assert "peak at" in bundle["text/plain"]


def test_an_error_in_the_thread_is_shown(lab, shown, monkeypatch):
    explorers.memory(lab)

    def broken(_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(fits.Fits, "prepare", broken)
    control(shown, "model").value = "gpt2"
    (output,) = inside(box(shown), ipywidgets.Output)
    wait(lambda: output.outputs)
    assert output.outputs[0]["output_type"] == "error" and "no such thing" in output.outputs[0]["evalue"]


# ------------------------------------------------------------------------------------------------------------- timeline


def test_the_slider_moves_the_line_and_the_words(shown):
    explorers.timeline(run("vanilla", 100), run("other", 50))
    assert text(shown).count("peak 100 B") >= 1 and text(shown).count("<svg") == 2, "it starts at the peak"
    slider = control(shown, "moment")
    slider.value = 2
    assert "<td" in text(shown) and "backward" in text(shown) and ">2 B<" in text(shown)
    control(shown, "to the peak").click()
    assert slider.value == 1 and ">100 B<" in text(shown)
    control(shown, "below").value = ""
    assert text(shown).count("<svg") == 1
    assert shown[-1]["text/html"].count("<img") == 2 and "layer.1" in shown[-1]["text/plain"]


def test_a_timeline_needs_one():
    with pytest.raises(ValueError, match="measure"):
        explorers.timeline(Run("failed", "crashed"))


def test_two_timelines_are_on_one_scale():
    high, low = (drawings.timeline(series(1e8, peak, 1), 4e8) for peak in (4e8, 2e8))
    assert "white-space:nowrap;font-weight:bold;bottom:80.00%" in high
    assert "white-space:nowrap;font-weight:bold;bottom:40.00%" in low


# -------------------------------------------------------------------------------------------------------------- recipes


@pytest.fixture
def no_estimates(monkeypatch):
    monkeypatch.setattr(explorers, "estimates_so_far", list)


def test_the_best_of_both_and_the_arguments_of_the_one_selected(lab, shown, no_estimates):
    lab.runs = [run("big", 300, 9.0), run("small", 100, 4.0), run("worse", 200, 3.0), run("untimed", 50)]
    explorers.recipes(lab)
    select = control(shown, "recipe")
    lines = dict(select.options)
    assert [line.endswith("★") for line in lines] == [False, True, False, True], list(lines)
    assert "optim=&#x27;small&#x27;" in text(shown), "the smallest of the best comes first"
    select.value = 2
    assert "optim=&#x27;worse&#x27;" in text(shown)
    control(shown, "or MB").value = 150e-6
    assert len(select.options) == 2 and "Nothing" not in text(shown)
    control(shown, "or MB").value = 1e-6
    assert "Nothing fits" in text(shown)
    assert "<table" in shown[-1]["text/html"] and "samples/s" in shown[-1]["text/plain"]


def test_a_speed_that_nobody_knows_is_not_measured_neither_best_nor_0(lab, shown, no_estimates):
    lab.runs = [run("timed", 300, 9.0), run("rehearsed", 100, timing=UNKNOWN), run("untimed", 50)]
    explorers.recipes(lab)
    for plain in (shown[-1]["text/plain"], "\n".join(line for line, _ in control(shown, "recipe").options)):
        lines = {name: line for line in plain.split("\n") for name in ("rehearsed", "untimed") if f"{name} " in line}
        assert all("not measured" in line for line in lines.values()) and len(lines) == 2
        assert "unknown" not in plain
    assert [line.endswith("★") for line, _ in control(shown, "recipe").options] == [False, False, True]
    control(shown, "recipe").value = 1
    assert "optim=&#x27;rehearsed&#x27;" in text(shown)
    assert "best of both: timed 300 B; speed not measured: untimed 50 B, rehearsed 100 B" in text(shown)


def test_where_no_speed_is_known_the_recipes_are_shown_by_their_memory(lab, shown, no_estimates):
    lab.runs = [run("rehearsed", 100, timing=UNKNOWN), run("untimed", 50)]
    explorers.recipes(lab)
    assert "aria-label='Memory and speed; speed not measured: untimed 50 B, rehearsed 100 B'" in text(shown)
    assert "samples per second" not in text(shown) and "smaller and faster" not in text(shown)


def test_days_are_not_mixed(lab, shown, no_estimates):
    lab.runs = [run("today", 100, 5.0)]
    lab.store.append(run("today", 100, 5.0))
    lab.store.append(run("then", 80, 50.0, id="earlier", date="2025-01-02T03:04:05"))
    lab.store.append(run("elsewhere", 80, 50.0, id="other", date="2025-01-03", machine={"name": "another"}))
    explorers.recipes(lab)
    groups = control(shown, "runs of")
    assert [name for name in groups.options if name.startswith("2025")] == ["2025-01-02: bert-tiny"]
    assert groups.value == "this notebook: bert-tiny" and "then" not in text(shown)
    groups.value = "2025-01-02: bert-tiny"
    assert "then" in text(shown) and "today" not in text(shown)


def test_an_estimate_stands_beside_the_runs_without_a_speed(lab, shown):
    lab.runs = [run("small", 100, 4.0)]
    estimate(TASK, device="cpu", per_device_train_batch_size=4)
    explorers.recipes(lab)
    assert any(
        "bert-tiny (estimated)" in line and "not measured" in line for line in shown[-1]["text/plain"].split("\n")
    )


def test_recipes_need_a_run(lab, no_estimates):
    with pytest.raises(ValueError, match="no run"):
        explorers.recipes(lab)


# ------------------------------------------------------------------------------------------------------------- pictures


def test_every_picture_has_words_and_no_small_text():
    bar = drawings.bar({"weights": 10, "gradients": 30}, {"8 GB": 100})
    points = [drawings.Point("<a>", 10, 2.0, 0, True, True), drawings.Point("b", 20, None)]
    scatter = drawings.scatter(points, {"limit": 15}, ["counted"])
    timeline = drawings.timeline(series(10, 30, 20), 30, 1, "a & b")
    assert "aria-label='Peak 40 B: weights 10 B, gradients 30 B'" in bar
    for picture in (bar, scatter, timeline):
        assert "role='img'" in picture and "font-size:13px" in picture
    assert "<a>" not in scatter and "a &amp; b" in timeline


def test_a_point_without_a_speed_stands_apart_and_says_so():
    points = [drawings.Point("timed", 10, 2.0, 0, True), drawings.Point("not timed", 20, Unknown(), 0, False, True)]
    scatter = drawings.scatter(points, {}, ["counted"])
    plot, strip = scatter.split("background:rgba")
    assert "timed: 10 B, 2 samples/s" in plot and "not timed: 20 B" not in plot
    assert "speed not measured (ringed: not timed)</span>" in strip and strip.count("not timed") == 2
    assert "title='not timed: 20 B, speed not measured'" in strip
    assert "bottom:0.00%" not in strip and "bottom:nan" not in scatter
    assert "background:rgba" not in drawings.scatter(points[:1], {}, ["counted"]), "no strip where all are timed"


@pytest.mark.parametrize("total, end", [(5e9, 8.6e9), (9e9, 16e9), (1e6, 1e6)])
def test_a_bar_ends_after_the_next_larger_card_unless_that_is_far_off(total, end):
    bar = drawings.bar({"weights": total}, {"8": 8.6e9, "16": 16e9})
    assert f"width:{100 * total / (1.08 * end):.3f}%" in bar
