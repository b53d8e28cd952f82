"""What a decision and a scoreboard show, in a terminal and in a notebook."""

import re

import pytest

from perf_helpers import claims
from perf_helpers.course.decisions import Scoreboard
from perf_helpers.lab.runs import Ratio


def test_a_terminal_and_a_notebook_show_the_same_facts(machine):
    decision = claims.check("accumulation-cost", Ratio(0.5, 0.4, 0.6), note="<batch> & more")
    facts = [
        "✗ refuted: not reproduced on this machine",
        "the ledger expects: holds or too small to tell",
        "above 0.75",
    ]
    facts += [
        "0.5 (0.4 to 0.6)",
        decision.says,
        decision.quantity,
        "7.75 against 8.86 samples/s",
        "V100-SXM2 16 GB",
    ]
    assert [fact for fact in [*facts, "<batch> & more"] if fact not in repr(decision)] == []
    html = decision._repr_html_()
    assert [fact for fact in [*facts, "&lt;batch&gt; &amp; more"] if fact not in html] == []
    assert "<batch>" not in html


def test_a_finding_tells_why(machine):
    decision = claims.check("fp16-range", 65504)
    for shown in (repr(decision), decision._repr_html_()):
        assert "65,504" in shown and "65,535" in shown and "round to infinity" in shown
        assert "unexpected" not in shown


@pytest.mark.parametrize(
    ("id", "value", "sign"),
    [("op-classes", 0.01, "✓"), ("op-classes", 2, "✗"), ("op-classes", 0.5, "≈"), ("cooling", None, "–")],
)
def test_no_verdict_is_told_by_colour_alone(machine, id, value, sign):
    decision = claims.check(id, value)
    assert decision.headline().startswith(f"{sign} {decision.verdict}")
    assert decision.headline().split(" (")[0] in decision._repr_html_()
    assert f'aria-label="{id}: {decision.verdict}"' in decision._repr_html_()


def test_colours_follow_the_theme(machine):
    html = claims.check("op-classes", 0.01)._repr_html_()
    colours = re.findall(r"(?:border[a-z-]*|color|background[a-z-]*):([^;\"]*)", html)
    assert colours and all(re.search(r"var\(--jp-[a-z0-9-]+, #[0-9a-f]+\)", colour) for colour in colours)


def test_nothing_measured_is_never_a_zero(machine):
    assert "not measured" in repr(claims.check("cooling")) and "not measured" not in repr(
        claims.check("ddp-in-step", 0)
    )


def test_the_scoreboard_in_html_escapes_and_has_a_row_a_claim(machine):
    claims.check("workers-help", Ratio(2.0, 1.5, 2.6))
    claims.check("pinned-memory")
    board = Scoreboard("A <b>", tuple(claims.decisions()), ("x & y",))
    html = board._repr_html_()
    assert html.count("<tr>") == 3 and "A &lt;b&gt;" in html and "x &amp; y" in html
    assert "no claim was checked" in Scoreboard("A", (), ())._repr_html_()
