"""Every lesson, executed by papermill under strict with the network cut off, and what its verdicts must be."""

import json
import os
import re
import shutil
import time
from datetime import date
from pathlib import Path

import pytest

from perf_helpers import claims
from perf_helpers.course import course
from perf_helpers.course.report import report
from perf_helpers.course.results import problems
from perf_helpers.lab.task import TINY

HERE = Path(__file__).parent
OUT = HERE.parent / "build" / "lessons"  # where test_browser.py opens them
LESSONS = [path.stem for path in course.find_lessons()]
# Seconds since the epoch after which no lesson begins, where time is limited (CI on a slow machine); 0: each does.
UNTIL = float(os.environ.get("LESSONS_UNTIL") or 0)


def _path_with(folder):
    return os.pathsep.join([str(HERE / folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _sabotage(monkeypatch, way):
    monkeypatch.setenv("PYTHONPATH", _path_with("sabotage"))
    monkeypatch.setenv("SABOTAGE", way)


HOW = {"profile": "cpu", "strict": True, "out": OUT, "timeout_per_lesson": 600}


def _until(end):
    """The course as far as the time goes. It begins with another lesson each day, so that none is always left out."""
    first, data = 7 * date.today().toordinal() % len(LESSONS), None
    for name in LESSONS[first:] + LESSONS[:first]:
        if data is not None and time.time() > end:
            break
        one = course.run_course([name], **HOW)
        data = one if data is None else data | {key: data[key] + one[key] for key in ("lessons", "claims", "runs")}
    data["lessons"].sort(key=lambda lesson: lesson["name"])
    (OUT / "results.json").write_text(json.dumps(data))
    report(OUT)
    return data


@pytest.fixture(scope="session")
def executed():
    shutil.rmtree(OUT, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", _path_with("offline"))
        patch.setenv("OFFLINE_ATTEMPTS", str(OUT / "attempts"))
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        data = _until(UNTIL) if UNTIL else course.run_course(**HOW)
    data["attempts"] = (OUT / "attempts").read_text() if (OUT / "attempts").exists() else ""
    return data


@pytest.mark.timeout(3000)  # the first one waits for all lessons
@pytest.mark.parametrize("name", LESSONS)
def test_the_lesson_runs_and_its_verdicts_are_the_expected_ones(executed, name):
    lesson = {lesson["name"]: lesson for lesson in executed["lessons"]}.get(name)
    if UNTIL and lesson is None:
        pytest.skip("the time was up: left to the night")
    assert lesson["status"] == "ok", lesson["message"]
    decided = {claim["id"]: claim for claim in executed["claims"] if claim["lesson"] == name}
    assert decided.keys() == {claim.id for claim in claims.load().values() if claim.lesson == name[:2]}
    for claim in decided.values():
        assert claim["as_expected"], claim
    assert {claim["verdict"] for claim in decided.values()} - {"not testable here"}


def test_the_course_is_ok_as_a_whole(executed):
    assert LESSONS and problems(executed) == []


def test_the_report_is_one_page_under_5_mb_that_opens_from_disk_and_links_every_executed_lesson(executed):
    page = (OUT / "index.html").read_text()
    assert len(page.encode()) < 5_000_000
    assert 'src="http' not in page and "<script" not in page
    for name in [lesson["name"] for lesson in executed["lessons"]]:
        assert f'href="{name}.html"' in page and (OUT / f"{name}.html").exists()


def test_no_lesson_tries_the_network(executed):
    assert executed["attempts"] == ""


def test_a_direction_reversed_in_the_ledger_changes_a_verdict(executed):
    """The measured values, decided once more with each claim turned around: no decided claim may come out the same."""
    ledger, turned = claims.load(), 0
    if UNTIL and not any(ledger[each["id"]].direction in ("below", "above") for each in executed["claims"]):
        pytest.skip("the time was up before a lesson with such a claim: left to the night")
    for decision in executed["claims"]:
        claim = ledger[decision["id"]]
        if decision["verdict"] not in ("holds", "refuted") or claim.direction not in ("below", "above"):
            continue
        reversed_claim = _reversed(claim)
        value = tuple(decision["interval"]) if decision["interval"] else decision["value"]
        assert claims.decide(reversed_claim, value, True) != decision["verdict"], claim.id
        turned += 1
    assert turned > (0 if UNTIL else 10)


def _reversed(claim):
    import dataclasses

    return dataclasses.replace(claim, direction={"below": "above", "above": "below"}[claim.direction], no_effect=None)


@pytest.mark.parametrize("strict, status", [(False, "ok"), (True, "failed")])
def test_a_lesson_outlives_its_estimate_unless_it_is_strict(tmp_path, monkeypatch, strict, status):
    _sabotage(monkeypatch, "refused_estimate")
    result = course.run_course(["00"], profile=TINY.name, strict=strict, out=tmp_path, timeout_per_lesson=600)
    (lesson,) = result["lessons"]
    executed = (tmp_path / "00_start_here.ipynb").read_text()
    assert lesson["status"] == status and "this version is not known" in executed
    assert ("no estimate: bert-tiny cannot be followed" in executed) != strict
    assert bool(result["claims"]) != strict


@pytest.mark.timeout(1500)
def test_a_lesson_outlives_its_comparisons_and_their_claims_are_not_testable(tmp_path, monkeypatch):
    _sabotage(monkeypatch, "failed_comparison")
    lessons = ["03", "06"]  # one that takes its intervals apart, one with a claim about speed
    result = course.run_course(lessons, profile=TINY.name, strict=False, out=tmp_path, timeout_per_lesson=600)
    assert [lesson["status"] for lesson in result["lessons"]] == ["ok", "ok"]
    costs = [claim for claim in result["claims"] if claim["id"].startswith("checkpointing-cost")]
    assert len(costs) == 2 and any(claim["value"] for claim in result["claims"]), "the others are decided"
    for cost in costs:
        assert (cost["verdict"], cost["value"], cost["as_expected"]) == ("not testable here", None, False)
    problem = "not testable here, expected holds or too small to tell"
    why = "speed not measured: .* in turns' timed out: no result within 0 s"
    for cost in costs:
        assert any(re.match(rf"{cost['id']}: {problem} \({why}", found) for found in problems(result))


def test_checkpointing_that_is_silently_ignored_fails_its_lesson(tmp_path, monkeypatch):
    _sabotage(monkeypatch, "ignored_checkpointing")
    result = course.run_course(["06"], profile="cpu", strict=True, out=tmp_path, timeout_per_lesson=600)
    assert problems(result)
    (lesson,) = result["lessons"]
    assert lesson["status"] == "failed"
