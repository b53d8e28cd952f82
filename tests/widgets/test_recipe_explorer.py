"""The recipe explorer in the kernel. Also run under ipywidgets 7.7.1, see test_frame.py."""

import pytest
from explored import TASK, UNKNOWN, run
from kernel import control, text

from perf_helpers import explorers
from perf_helpers.widgets import recipe_explorer
from trainmem.estimate import estimate


@pytest.fixture
def no_estimates(monkeypatch):
    monkeypatch.setattr(recipe_explorer, "estimates_so_far", list)


def test_the_best_of_both_and_the_arguments_of_the_one_selected(lab, shown, no_estimates):
    lab.runs = [run("big", 300, 9.0), run("small", 100, 4.0), run("worse", 200, 3.0), run("untimed", 50)]
    explorers.recipes(lab)
    select = control(shown, "recipe")
    lines = dict(select.options)
    assert [line.endswith("★") for line in lines] == [False, True, False, True], list(lines)
    assert "optim=&#x27;small&#x27;" in text(shown), "the smallest of the best comes first"
    select.index = 2
    assert "optim=&#x27;worse&#x27;" in text(shown)
    control(shown, "or MB").value = 150e-6
    assert len(select.options) == 2 and "Nothing" not in text(shown)
    control(shown, "or MB").value = 1e-6
    assert "Nothing fits" in text(shown)
    assert "<table" in shown[-1]["text/html"] and "samples/s" in shown[-1]["text/plain"]


def test_a_speed_that_is_unknown_is_not_measured_neither_best_nor_0(lab, shown, no_estimates):
    lab.runs = [run("timed", 300, 9.0), run("rehearsed", 100, timing=UNKNOWN), run("untimed", 50)]
    explorers.recipes(lab)
    for plain in (shown[-1]["text/plain"], "\n".join(line for line, _ in control(shown, "recipe").options)):
        lines = {name: line for line in plain.split("\n") for name in ("rehearsed", "untimed") if f"{name} " in line}
        assert all("not measured" in line for line in lines.values()) and len(lines) == 2
        assert "unknown" not in plain
    assert [line.endswith("★") for line, _ in control(shown, "recipe").options] == [False, False, True]
    control(shown, "recipe").index = 1
    assert "optim=&#x27;rehearsed&#x27;" in text(shown)
    assert "best of both: timed 300 B; speed not measured: untimed 50 B, rehearsed 100 B" in text(shown)


def test_where_no_speed_is_known_the_recipes_are_shown_by_their_memory(lab, shown, no_estimates):
    lab.runs = [run("rehearsed", 100, timing=UNKNOWN), run("untimed", 50)]
    explorers.recipes(lab)
    assert 'aria-label="Memory and speed; speed not measured: untimed 50 B, rehearsed 100 B"' in text(shown)
    assert "samples per second" not in text(shown) and "smaller and faster" not in text(shown)


def test_an_unknown_memory_is_drawn_apart_and_fits_nowhere(lab, shown, no_estimates):
    lab.runs = [run("timed", None, 20.0), run("both", 300, 9.0), run("neither")]
    explorers.recipes(lab)
    lines = [line for line, _ in control(shown, "recipe").options]
    assert lines == ["300 B, 9 samples/s: both (counted) ★", "memory not measured, 20 samples/s: timed (timed only)"]
    assert "best of both: both 300 B; memory not measured: timed 20 samples/s" in text(shown)
    assert "not measured  20" in shown[-1]["text/plain"] and "neither" not in shown[-1]["text/plain"]
    control(shown, "recipe").index = 1
    assert "optim=&#x27;timed&#x27;" in text(shown)
    control(shown, "or MB").value = 1
    assert len(control(shown, "recipe").options) == 1


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


def test_runs_of_one_name_with_other_arguments_are_all_shown(lab, shown, no_estimates):
    lab.runs = [run("larger batch", size, 4.0, arguments={"optim": str(size)}) for size in (100, 200)]
    explorers.recipes(lab)
    assert len(control(shown, "recipe").options) == 2


@pytest.mark.nightly
def test_an_estimate_is_shown_beside_the_runs_without_a_speed(lab, shown):
    lab.runs = [run("small", 100, 4.0)]
    estimate(TASK, device="cpu", per_device_train_batch_size=4)
    explorers.recipes(lab)
    assert any(
        "bert-tiny (estimated)" in line and "not measured" in line for line in shown[-1]["text/plain"].split("\n")
    )


def test_recipes_need_a_run(lab, no_estimates):
    with pytest.raises(ValueError, match="no run"):
        explorers.recipes(lab)
