"""The claims of a lesson: each check is decided, and a claim that was not checked is reported."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from machines import GOOD

from perf_helpers.course import claims as module
from perf_helpers.course.ledger import WHERE, Verdict
from trainmem.core import hardware
from trainmem.records import Ratio
from trainmem.unknown import Unknown

HOLDS, SMALLER, REFUTED, TOO_SMALL, NOT_TESTABLE = Verdict
LEDGER = module.load()
THREE = ("workers-help", "workers-not-beyond", "pinned-memory")


@pytest.fixture(autouse=True)
def lesson_of_three_claims(monkeypatch):
    """Let lesson 12 have exactly three claims in these tests, however many the ledger gives it."""
    rows = {id: claim for id, claim in LEDGER.items() if claim.lesson != "12" or id in THREE}
    assert set(THREE) <= {id for id, claim in rows.items() if claim.lesson == "12"}
    monkeypatch.setattr(module, "load", lambda: rows)


class TestCheck:
    def test_a_number_gets_its_verdict(self, claims):
        decision = claims.check("accumulation-memory", 0.5, note="batch 16")
        assert (decision.verdict, decision.as_expected, decision.value) == (HOLDS, True, 0.5)
        assert (decision.interval, decision.note, decision.missing) == (None, "batch 16", None)

    def test_a_ratio_is_judged_by_its_whole_interval(self, claims):
        assert claims.check("checkpointing-cost", Ratio(0.8, 0.7, 0.85)).verdict is HOLDS
        decision = claims.check("checkpointing-cost", Ratio(0.8, 0.6, 0.9))
        assert (decision.verdict, decision.value, decision.interval) == (TOO_SMALL, 0.8, (0.6, 0.9))

    def test_a_refuted_claim_is_as_expected_only_if_the_ledger_expects_it(self, claims):
        assert claims.check("fp16-range", 65504).as_expected
        assert not claims.check("fp16-range", 65535).as_expected
        assert not claims.check("accumulation-memory", 2.0).as_expected

    def test_what_is_expected_depends_on_the_kind_of_machine(self, claims):
        assert claims.check("multi-tensor", Ratio(1.2, 0.9, 1.5)).as_expected
        claims.lab.machine.features.add("cuda")
        assert not claims.check("multi-tensor", Ratio(1.2, 0.9, 1.5)).as_expected

    @pytest.mark.parametrize("missing", [None, "needs patience"])
    @pytest.mark.parametrize("value", [None, 3.0])
    def test_without_its_machine_a_claim_is_not_testable_and_the_value_is_kept(self, claims, value, missing):
        decision = claims.check("tf32-faster", value, missing=missing)
        assert (decision.verdict, decision.as_expected, decision.value) == (NOT_TESTABLE, True, value)
        assert decision.missing == "needs sm80"

    def test_one_gpu_of_two_needed_is_as_expected(self, claims):
        claims.lab.machine.features |= {"cuda", "sm80"}
        decision = claims.check("ddp-beats-dp")
        assert (decision.verdict, decision.as_expected) == (NOT_TESTABLE, True)
        assert decision.expected == LEDGER["ddp-beats-dp"].expected["cuda"]

    def test_a_text_claim_is_never_asserted(self, claims):
        decision = claims.check("power-sockets")
        assert (decision.verdict, decision.as_expected) == (NOT_TESTABLE, True)

    def test_something_else_missing_is_as_expected_only_if_the_ledger_expects_it(self, claims):
        decision = claims.check("link-matters", missing="needs root to shape a link")
        assert (decision.verdict, decision.as_expected) == (NOT_TESTABLE, True)
        assert decision.missing == "needs root to shape a link"
        assert not claims.check("accumulation-memory", 0.5, missing="needs patience").as_expected

    @pytest.mark.parametrize(
        "value",
        [
            None,
            math.nan,
            True,
            "0.5",
            [0.5, 0.6],
            Ratio(1, 2, math.nan),
            Ratio(1, 2, 1),
            SimpleNamespace(value=1, low=None, high=None),
        ],
    )
    def test_what_is_no_measurement_is_refused_and_leaves_no_decision(self, claims, value):
        with pytest.raises(ValueError, match=r"'accumulation-memory'.*missing="):
            claims.check("accumulation-memory", value)
        assert not claims.decided

    def test_a_misspelt_id_gets_the_nearest_one(self, claims):
        with pytest.raises(ValueError, match="'accumulation-memory'"):
            claims.check("acumulation-memry", 0.5)

    def test_checking_again_replaces_the_earlier_decision(self, claims):
        claims.check("accumulation-memory", 0.5)
        claims.check("checkpointing-cost", 0.8)
        claims.check("accumulation-memory", 1.5)
        assert [(d.id, d.value) for d in claims.decided.values()] == [
            ("accumulation-memory", 1.5),
            ("checkpointing-cost", 0.8),
        ]

    @pytest.mark.parametrize(
        "value", [Ratio.unknown("timed out"), Unknown("timed out"), Ratio.unknown("timed out") / 2]
    )
    def test_what_is_unknown_is_not_testable_and_not_expected(self, claims, value):
        decision = claims.check("checkpointing-cost", value)
        assert (decision.verdict, decision.value, decision.interval) == (NOT_TESTABLE, None, None)
        assert decision.missing == "timed out" and not decision.as_expected
        assert claims.check("link-matters", value).as_expected, "the ledger lists that it may not be testable"
        assert json.loads(json.dumps(decision.to_dict(), allow_nan=False))["value"] is None

    @pytest.mark.parametrize(
        ("value", "predicted", "verdict", "as_expected"),
        [
            (Ratio(0.73, 0.69, 0.76), (0.6, 0.9), REFUTED, True),  # slow products: a true finding
            (Ratio(0.73, 0.69, 0.76), (1.1, 2.2), REFUTED, False),
            (Ratio(1.9, 1.7, 2.0), (1.1, 2.2), HOLDS, True),
            (Ratio(1.9, 1.7, 2.0), (0.6, 0.9), HOLDS, False),
            (Ratio(1.0, 0.95, 1.05), Ratio(1.0, 0.9, 1.1), TOO_SMALL, True),
            (1.3, (1.3, 1.3), HOLDS, True),
        ],
    )
    def test_what_is_predicted_is_expected_whatever_its_verdict(self, claims, value, predicted, verdict, as_expected):
        decision = claims.check("half-precision-faster-cpu", value, predicted=predicted)
        assert (decision.verdict, decision.as_expected, decision.expected) == (verdict, as_expected, ())
        again = json.loads(json.dumps(decision.to_dict(), allow_nan=False))
        assert again["predicted"] == list(decision.predicted) and "Amdahl" in again["predicted_from"]

    def test_a_prediction_that_failed_expects_nothing_and_says_why(self, claims):
        decision = claims.check("half-precision-faster-cpu", 1.5, predicted=Ratio.unknown("timed out"))
        assert (decision.verdict, decision.as_expected, decision.predicted) == (HOLDS, False, None)
        assert decision.predicted_from == "no prediction: timed out" and "expected a prediction" in decision.headline()
        claims.lab.machine.features.add("cuda")
        assert claims.check("table-half-speed", 1.5, predicted=Ratio.unknown("tf32 below")).as_expected, "by the ledger"

    @pytest.mark.parametrize(
        ("id", "predicted", "words"),
        [
            ("accumulation-cost", None, "predicted=.*from the seconds of passes"),
            ("accumulation-cost", (1.0, 0.9), "not a range"),
            ("accumulation-cost", (math.nan, 0.9), "not a range"),
            ("checkpointing-cost", (0.7, 0.9), "not `predicted` in the ledger"),
        ],
    )
    def test_a_prediction_is_required_if_the_ledger_has_one_and_nowhere_else(self, claims, id, predicted, words):
        with pytest.raises(ValueError, match=f"'{id}'.*{words}"):
            claims.check(id, 0.8, predicted=predicted)
        assert not claims.decided

    def test_what_is_unknown_does_not_hide_what_the_machine_lacks(self, claims):
        decision = claims.check("tf32-faster", Ratio.unknown("timed out"))
        assert (decision.missing, decision.as_expected) == ("needs sm80", True)

    def test_a_profile_of_gpus_may_expect_another_verdict(self, claims, monkeypatch):
        expected = {"cpu": (REFUTED,), "cuda": (HOLDS,), "t4": (SMALLER, TOO_SMALL)}
        monkeypatch.setattr(module, "load", lambda: {"one": replace(LEDGER["accumulation-memory"], expected=expected)})
        claims.lab.machine.features.add("cuda")
        for name in ("cpu", "t4", "gpu"):  # cpu: of a GPU that is given a CPU's sizes
            claims.lab.profile = SimpleNamespace(name=name)
            decision = claims.check("one", 0.95)
            verdicts = expected["t4" if name == "t4" else "cuda"]
            assert (decision.expected, decision.as_expected) == (verdicts, name == "t4"), name
        claims.lab.machine.features.remove("cuda")
        claims.lab.profile = SimpleNamespace(name="t4")
        assert claims.check("one", 0.95).expected == expected["cpu"]

    def test_the_machine_and_the_profile_are_the_labs(self):
        lab = SimpleNamespace(machine=GOOD, profile=SimpleNamespace(name="gpu"), lesson="07_mixed_precision")
        decision = module.Claims(lab).check("tf32-faster", 2.0)
        assert (decision.kind, decision.profile, decision.lesson) == ("cuda", "gpu", "07_mixed_precision")
        assert decision.verdict is not NOT_TESTABLE, "whatever this process has"

    @pytest.mark.parametrize("where", WHERE)
    def test_this_machine_answers_for_every_kind_of_need(self, where):
        met, lacking = hardware.supports(where)
        assert met is (lacking == "")
        assert not (where == "text" and met)


@pytest.fixture
def rehearsal(claims):
    """Let the machine of `claims` be a rehearsed GPU, i.e. a stub CUDA runtime that computes nothing."""
    claims.lab.machine.features |= {"cuda", "sm80"}
    claims.lab.machine.rehearsed = True


class TestRehearsal:
    def test_memory_is_decided_and_marked(self, claims, rehearsal):
        decision = claims.check("accumulation-memory", 0.5)
        assert (decision.verdict, decision.as_expected, decision.rehearsed) == (HOLDS, True, True)
        assert decision.headline() == "✓ holds (rehearsed)" and decision.to_dict()["rehearsed"] is True
        unexpected = claims.check("accumulation-memory", 1.5)
        assert not unexpected.as_expected and unexpected.headline().startswith("✗ refuted (rehearsed) (unexpected")

    @pytest.mark.parametrize("value", [0.9, Ratio(0.9, 0.8, 1.0), Unknown(), Ratio.unknown("x"), None, math.nan, "odd"])
    @pytest.mark.parametrize("id", ["accumulation-cost", "fp16-range"])
    def test_nothing_else_is_whatever_was_passed(self, claims, rehearsal, id, value):
        decision = claims.check(id, value)
        assert (decision.verdict, decision.as_expected, decision.value) == (NOT_TESTABLE, True, None)
        assert decision.missing.startswith("a rehearsal")
        assert decision.headline() == "– not testable here"

    @pytest.mark.parametrize("value", [Unknown("nothing was computed"), None])
    def test_memory_that_is_not_known_is_not_testable(self, claims, rehearsal, value):
        decision = claims.check("accumulation-memory", value)
        assert (decision.verdict, decision.as_expected) == (NOT_TESTABLE, True) and decision.missing

    def test_what_the_rehearsed_machine_lacks_comes_first(self, claims, rehearsal):
        assert claims.check("ddp-beats-dp", 2.0).missing == "needs gpus2"

    def test_a_lesson_of_it_passes_and_says_so_and_is_not_in_the_journal(self, claims, rehearsal, tmp_path, capsys):
        claims.check("workers-help", Ratio(0.5, 0.4, 0.6))
        claims.check("workers-not-beyond", Ratio(0.5, 0.4, 0.6))
        claims.check("pinned-memory", 0.1)
        finish(claims, strict=True)
        shown = capsys.readouterr().out
        assert "– 3 not testable here · a rehearsal: no kernel computed" in shown
        content = json.loads((tmp_path / "out/12_dataloader.json").read_text())
        assert all(claim["rehearsed"] for claim in content["claims"])
        assert not (tmp_path / "kept").exists()


def finish(claims, **fields):
    """Finish the lesson after changing fields of its lab.

    `claims`: the lesson's `Claims`; `fields`: {name: value} of the lab.
    """
    vars(claims.lab).update(fields)
    claims.finish()


@pytest.fixture
def passed(claims):
    """Check every claim of lesson 12 in `claims`, with values for which the verdict is as the ledger expects."""
    claims.check("workers-help", Ratio(2.0, 1.5, 2.6))
    claims.check("workers-not-beyond", 0.9)
    claims.check("pinned-memory")


class TestFinish:
    def test_the_file_holds_the_whole_lesson(self, claims, passed, tmp_path):
        run = SimpleNamespace(to_dict=lambda: {"name": "slow input", "losses": [math.nan]})
        finish(claims, strict=True, runs=[run])
        content = json.loads((tmp_path / "out/12_dataloader.json").read_text(encoding="utf-8"))
        date = content.pop("date")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", date)
        assert [run["name"] for run in content.pop("runs")] == ["slow input"]
        assert content == {
            "schema": 1,
            "lesson": "12_dataloader",
            "profile": "cpu",
            "machine": {"name": "Some CPU"},
            "versions": {"torch": "2.13.0"},
            "claims": [decision.to_dict() for decision in claims.decided.values()],
            "complete": True,
        }
        first = content["claims"][0]
        assert (first["verdict"], first["expected"]) == ("holds", ["holds", "too small to tell"])
        assert (first["value"], first["interval"], first["reference"]["source"]) == (2.0, [1.5, 2.6], "2023 guide")

    def test_a_lesson_is_judged_by_the_profile_that_it_ran(self, claims, monkeypatch, tmp_path, capsys):
        claims.lab.machine.features.add("cuda")
        one = replace(LEDGER["accumulation-memory"], id="one", lesson="14", reason="x" * 50)
        expected = {"cpu": (HOLDS,), "cuda": (HOLDS,), "t4": (SMALLER,)}
        monkeypatch.setattr(module, "load", lambda: {"one": replace(one, expected=expected)})
        claims.lab.lesson, claims.lab.strict = "14_all_together", True
        claims.lab.profile = SimpleNamespace(name="gpu")
        claims.check("one", 0.95)
        with pytest.raises(module.NotReproduced, match=r"one: smaller than promised.*holds"):
            claims.finish()
        claims.lab.profile = SimpleNamespace(name="t4")
        claims.check("one", 0.95)
        claims.finish()
        content = json.loads((tmp_path / "out/14_all_together.json").read_text())
        assert content["profile"] == "t4"
        assert [claim["as_expected"] for claim in content["claims"]] == [True]

    def test_a_comparison_that_failed_fails_a_strict_lesson_with_its_reason(self, claims, tmp_path):
        claims.check("workers-help", Ratio.unknown("speed not measured: timed out"))
        claims.check("workers-not-beyond", 1.0)
        claims.check("pinned-memory")
        finish(claims)
        with pytest.raises(module.NotReproduced, match=r"not testable here, expected holds .*timed out"):
            finish(claims, strict=True)

    def test_without_out_nothing_is_written(self, claims, passed, tmp_path):
        finish(claims, out="")
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]  # the learner's own journal

    def test_the_scoreboard_shows_every_claim_with_machine_and_version(self, claims, passed, tmp_path, capsys):
        finish(claims)
        shown = capsys.readouterr().out
        for part in ("Some CPU", "torch 2.13.0", "workers-help", "pinned-memory", "✓ 2 holds · – 1 not testable here"):
            assert part in shown
        assert "warning" not in shown

    @pytest.mark.parametrize(
        ("lesson", "checked", "problem"),
        [
            ("12_dataloader", {"workers-help": 0.5, "pinned-memory": None}, "workers-help: refuted, expected holds"),
            ("12_dataloader", {"workers-help": 2.0}, "pinned-memory: belongs to this lesson"),
            ("13_accelerate", {"accelerate-same": 1, "ddp-traffic": 1}, "ddp-traffic: belongs to lesson 15"),
            ("99_no_such_lesson", {}, "nothing was checked"),
            ("", {}, "nothing was checked"),
        ],
    )
    def test_a_strict_lesson_fails_where_another_is_warned(self, claims, tmp_path, capsys, lesson, checked, problem):
        for id, value in checked.items():
            claims.check(id, value)
        out = str(tmp_path) if lesson else ""
        finish(claims, lesson=lesson, out=out)
        assert f"warning: {problem}" in capsys.readouterr().out
        before = sorted(tmp_path.rglob("*.json"))
        for file in before:
            file.unlink()
        with pytest.raises(module.NotReproduced, match=re.escape(problem)):
            finish(claims, lesson=lesson, out=out, strict=True)
        assert sorted(tmp_path.rglob("*.json")) == before  # written all the same

    def test_a_second_lesson_in_a_kernel_is_not_charged_with_the_first_ones_claims(self, claims, passed, tmp_path):
        finish(claims, strict=True)
        second = module.Claims(SimpleNamespace(**vars(claims.lab) | {"lesson": "13_accelerate"}))
        second.check("accelerate-same", 1)
        second.finish()
        written = json.loads((tmp_path / "out/13_accelerate.json").read_text())
        assert [claim["id"] for claim in written["claims"]] == ["accelerate-same"]

    def test_a_lesson_that_is_run_again_replaces_its_decisions(self, claims, passed, tmp_path):
        finish(claims)
        claims.check("workers-help", Ratio(3.0, 2.5, 3.6))
        values = [("workers-help", 3.0), ("workers-not-beyond", 0.9), ("pinned-memory", None)]
        assert [(d.id, d.value) for d in claims.decided.values()] == values
        finish(claims, strict=True)
        again = json.loads((tmp_path / "out/12_dataloader.json").read_text())
        assert [(claim["id"], claim["value"]) for claim in again["claims"]] == values

    def test_results_need_a_lesson_to_be_filed_under(self, claims, passed, tmp_path):
        with pytest.raises(ValueError, match="Lab\\(lesson="):
            finish(claims, lesson="")

    def test_the_file_is_complete_before_it_takes_its_name(self, claims, passed, tmp_path, monkeypatch):
        order, really = [], {"fsync": os.fsync, "replace": os.replace}
        monkeypatch.setattr(module.learner_log, "keep", lambda *_, **__: None)  # another file

        def replace_seen(source, target):
            order.append("replace")
            assert os.path.dirname(source) == str(tmp_path / "out")
            assert json.loads(Path(source).read_text(encoding="utf-8"))["complete"]
            really["replace"](source, target)

        monkeypatch.setattr(os, "fsync", lambda file: order.append("fsync") or really["fsync"](file))
        monkeypatch.setattr(os, "replace", replace_seen)
        finish(claims)
        assert order == ["fsync", "replace"]

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_a_failed_write_leaves_the_old_file_and_no_other(self, claims, passed, tmp_path, monkeypatch, call):
        finish(claims)
        path = tmp_path / "out/12_dataloader.json"
        old = path.read_text(encoding="utf-8")

        def fail(*_):
            raise OSError("No space left on device")

        monkeypatch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space"):
            finish(claims, profile=SimpleNamespace(name="t4"))
        assert path.read_text(encoding="utf-8") == old
        assert os.listdir(path.parent) == [path.name]

    def test_what_json_cannot_hold_leaves_the_old_file(self, claims, passed, tmp_path):
        finish(claims)
        with pytest.raises(TypeError):
            finish(claims, runs=[SimpleNamespace(to_dict=lambda: {"value": object()})])
        assert json.loads((tmp_path / "out/12_dataloader.json").read_text(encoding="utf-8"))["complete"]


# ---- what a decision and a scoreboard show, in a terminal and in a notebook


def test_a_terminal_and_a_notebook_show_the_same_facts(claims):
    measured = {"predicted": (0.9, 1.2), "note": "<batch> & more"}
    decision = claims.check("accumulation-cost", Ratio(0.5, 0.4, 0.6), **measured)
    facts = [
        "✗ refuted: not reproduced on this machine",
        "unexpected: other measurements of this machine predict 0.9 to 1.2",
        f"0.9 to 1.2 on this machine: {LEDGER['accumulation-cost'].predicted}",
        decision.claim.threshold_text(),
    ]
    facts += [
        "0.5 (0.4 to 0.6)",
        decision.claim.says,
        decision.claim.quantity,
        "7.75 against 8.86 samples/s",
        "V100-SXM2 16 GB",
    ]
    assert [fact for fact in [*facts, "<batch> & more"] if fact not in repr(decision)] == []
    html = decision._repr_html_()
    assert [fact for fact in [*facts, "&lt;batch&gt; &amp; more"] if fact not in html] == []
    assert "<batch>" not in html


def test_a_finding_tells_why(claims):
    decision = claims.check("fp16-range", 65504)
    for shown in (repr(decision), decision._repr_html_()):
        assert "65,504" in shown and "65,535" in shown and "round to infinity" in shown
        assert "unexpected" not in shown


@pytest.mark.parametrize(
    ("id", "value", "sign"),
    [
        ("op-classes", 0.01, "✓"),
        ("op-classes", 0.5, "↓"),
        ("op-classes", 2, "✗"),
        ("op-classes", Ratio(0.5, 0.05, 2), "≈"),
        ("cooling", None, "–"),
    ],
)
def test_no_verdict_is_reported_by_colour_alone(claims, id, value, sign):
    decision = claims.check(id, value)
    assert decision.headline().startswith(f"{sign} {decision.verdict}")
    assert decision.headline().split(" (")[0] in decision._repr_html_()
    assert f'aria-label="{id}: {decision.verdict}"' in decision._repr_html_()


def test_colours_follow_the_theme(claims):
    html = claims.check("op-classes", 0.01)._repr_html_()
    colours = re.findall(r"(?:border[a-z-]*|color|background[a-z-]*):([^;\"]*)", html)
    assert colours and all(re.search(r"var\(--jp-[a-z0-9-]+, #[0-9a-f]+\)", colour) for colour in colours)


def test_nothing_measured_is_never_a_zero(claims):
    assert "not measured" in repr(claims.check("cooling")) and "not measured" not in repr(
        claims.check("ddp-in-step", 0)
    )


def test_the_scoreboard_in_html_escapes_and_has_a_row_a_claim(claims):
    claims.check("workers-help", Ratio(2.0, 1.5, 2.6))
    claims.check("pinned-memory")
    board = module.Scoreboard("A <b>", tuple(claims.decided.values()), ("x & y",))
    html = board._repr_html_()
    assert html.count("<tr>") == 3 and "A &lt;b&gt;" in html and "x &amp; y" in html
    assert "no claim was checked" in module.Scoreboard("A", (), ())._repr_html_()
