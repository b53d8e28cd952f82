"""The timeline explorer in the kernel. Also run under ipywidgets 7.7.1, see test_frame.py."""

import pytest
from explored import run, series
from kernel import control, text

from perf_helpers import explorers
from trainmem.records import Memory, Run


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


def test_the_line_tells_the_bytes_where_the_slider_is(shown):
    totals = [*range(10, 50), 100]
    memory = Memory(100, "counted", "backward", "aten.mm", "layer.1", {"weights": 100}, timeline=series(*totals))
    explorers.timeline(Run("long", "ok", memory=memory))
    for moment in (0, 17, 39):
        control(shown, "moment").value = moment
        assert f">{totals[moment]} B<" in text(shown)


def test_a_timeline_needs_one():
    with pytest.raises(ValueError, match="measure"):
        explorers.timeline(Run("timed", "ok"))
