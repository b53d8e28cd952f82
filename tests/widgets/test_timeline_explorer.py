"""The timeline explorer on the kernel's side. Under ipywidgets 7.7.1 too, see test_frame.py."""

import pytest
from explored import run
from kernel import control, text

from perf_helpers import explorers
from perf_helpers.records import Run


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
