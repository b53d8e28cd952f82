"""Pictures as HTML and SVG: their texts, the positions of elements, and that an unknown value is not drawn as 0."""

import re
from xml.etree import ElementTree

import pytest
from explored import series

from perf_helpers.plots import Timeline
from perf_helpers.widgets import svg
from trainmem.unknown import Unknown

TIMED = svg.Point("timed", "counted", 10, 2.0)
UNTIMED = svg.Point("not timed", "estimated", 20, Unknown())
UNSIZED = svg.Point("not sized", "timed only", None, 3.0)


def test_every_picture_has_words_and_no_small_text():
    bar = svg.bar("After forward", {"weights": 10, "gradients": 30, "inputs": 0}, {"8 GB": 100})
    points = [svg.Point("<a>", "counted", 10, 2.0), UNTIMED, UNSIZED]
    scatter = svg.scatter(points, points[0], {"limit": 15})
    timeline = svg.timeline(Timeline(series(10, 30, 20)), 30, 1, "a & b")
    assert 'aria-label="After forward 40 B: weights 10 B, gradients 30 B"' in bar
    for picture in (bar, scatter, timeline):
        assert 'role="img"' in picture and "font-size:13px" in picture
        ElementTree.fromstring(picture)  # whatever is opened is closed
    assert "<a>" not in scatter and "a &amp; b" in timeline


def test_two_timelines_are_on_one_scale():
    high, low = (svg.timeline(Timeline(series(1e8, peak, 1)), 4e8, 0, "") for peak in (4e8, 2e8))
    assert "bottom:80.00%;white-space:nowrap;font-weight:bold" in high
    assert "bottom:40.00%;white-space:nowrap;font-weight:bold" in low


def test_the_best_of_both_are_beaten_by_nothing_and_not_by_the_unknown():
    slow, large, worse = (svg.Point("", "", *values) for values in ((5, 1.0), (20, 3.0), (21, 2.9)))
    assert svg.best_of_both([large, slow, worse, TIMED, UNTIMED, UNSIZED]) == [slow, TIMED, large]


def strips(picture):
    """Return (strips, other boxes) of a picture. A box is a list: its whole text, then the titles of its points.

    The strips are beside the plot and show the recipes without a measured speed or memory. `picture`: the HTML of
    `svg.scatter`.
    """
    boxes = [each for each in ElementTree.fromstring(picture).iter() if "grid-row" in each.get("style", "")]
    apart = [each for each in boxes if "background" in each.get("style")]

    def texts(part):
        titles = [each.get("title") for each in part.iter() if each.get("title")]
        return [" ".join("".join(part.itertext()).split()), *titles]

    return [texts(each) for each in apart], [texts(each) for each in boxes if each not in apart]


def test_a_point_without_a_speed_is_drawn_apart_and_says_so():
    (strip,), (plot, *_) = strips(scatter := svg.scatter([TIMED, UNTIMED], UNTIMED, {}))
    assert plot[1:] == ["timed: 10 B, 2 samples/s"]
    assert strip == ["speed not measured (ringed: not timed)■", "not timed: 20 B, speed not measured"]
    assert 'aria-label="Memory and speed; best of both: timed 10 B; speed not measured: not timed 20 B"' in scatter
    assert strips(svg.scatter([TIMED], TIMED, {}))[0] == [], "no strip where all are timed"


def test_a_point_without_a_memory_is_drawn_apart_and_says_so():
    (strip,), (plot, *_) = strips(scatter := svg.scatter([TIMED, UNSIZED], UNSIZED, {"8": 12}))
    assert plot[1:] == ["timed: 10 B, 2 samples/s"]
    assert strip[0].endswith("memory not measured■ not sized")
    assert strip[1] == "not sized: memory not measured, 3 samples/s"
    assert "best of both: timed 10 B; memory not measured: not sized 3 samples/s" in scatter
    alone = svg.scatter([UNSIZED], UNSIZED, {"8": 12})
    assert "peak memory" not in alone and "smaller and faster" not in alone and "nan" not in alone


@pytest.mark.parametrize("points", [[TIMED, UNTIMED], [TIMED, UNSIZED], [UNTIMED], [UNSIZED]])
def test_a_missing_measurement_is_not_drawn_at_0(points):
    picture = svg.scatter(points, None, {})
    marks = re.findall(r'title="[^"]*" style="position:absolute;left:([^;]*);bottom:([^;]*)', picture)
    assert len(marks) == len(points)
    assert not {"0.00%", "nan%"} & {length for mark in marks for length in mark}


@pytest.mark.parametrize("total, end", [(5e9, 8.6e9), (9e9, 16e9), (1e6, 1e6)])
def test_a_bar_ends_after_the_next_larger_card_unless_that_is_far_off(total, end):
    bar = svg.bar("Peak", {"weights": total}, {"8": 8.6e9, "16": 16e9})
    assert f"width:{100 * total / (1.08 * end):.2f}%" in bar


def test_a_panel_is_svg_with_its_latest_value_in_words():
    panel = ElementTree.fromstring(svg.panel("memory", "GB", [(0, 1.5), (2, 2.5)], (0, 2)))
    assert panel.get("aria-label") == "memory: 2.5 GB"
    assert "font-size:13px" in panel.get("style") and int(panel.get("width")) < 400
    assert panel.get("fill") == "currentColor"
    places = [tuple(map(float, place.split(","))) for place in panel.find("polyline").get("points").split()]
    assert len(places) == 2 and all(46 <= x <= 320 and 42 <= y <= 122 for x, y in places)
    empty = svg.panel("utilization", "%", [], (0, 2))
    assert 'aria-label="utilization: not available"' in empty and 'points=""' in empty
