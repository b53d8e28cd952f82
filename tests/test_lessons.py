"""Run every lesson by papermill with the network cut off. Daily, each lesson runs at the smallest sizes, and must run
and decide its claims. Nightly, it runs at this machine's sizes in strict mode, and its verdicts must be the expected
ones.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from perf_helpers import claims
from perf_helpers.course import course
from perf_helpers.course.ledger import Verdict
from perf_helpers.course.results import problems
from trainmem.core.task import TINY

HERE = Path(__file__).parent
OUT = HERE.parent / "build" / "lessons"  # from here, or from build/smallest, test_browser.py opens them
LESSONS = [path.stem for path in course.find_lessons()]
# A lesson that differs from this commit also runs under strict each day, unless they are more than MOST_CHANGED.
SINCE, MOST_CHANGED = os.environ.get("SINCE") or "HEAD^", 3


def strictly(test):
    """Return the test, marked as nightly and as one that needs the machine for itself."""
    return pytest.mark.nightly(pytest.mark.timed(test))


def _path_with(folder):
    return os.pathsep.join([str(HERE / folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def _sabotage(monkeypatch, way):
    monkeypatch.setenv("PYTHONPATH", _path_with("sabotage"))
    monkeypatch.setenv("SABOTAGE", way)


def _offline(out, **options):
    """Run the course into the folder `out` without the network; return its results, with a field "attempts": the
    attempts to use the network, as text.

    `options`: further arguments of `run_course`.
    """
    shutil.rmtree(out, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", _path_with("offline"))
        patch.setenv("OFFLINE_ATTEMPTS", str(out / "attempts"))
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        data = course.run_course(out=out, timeout_per_lesson=600, **options)
    return data | {"attempts": (out / "attempts").read_text() if (out / "attempts").exists() else ""}


def _changed():
    """Return the names of lessons that differ from the git revision in $SINCE (default: HEAD^).

    Return [] if git does not find this revision.
    """
    command = ["git", "diff", "--name-only", SINCE, "--", "notebooks/*.ipynb"]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    names = {Path(line).stem for line in done.stdout.splitlines()}
    return [name for name in LESSONS if name in names]


@pytest.fixture(scope="session")
def smallest():
    return _offline(OUT.with_name("smallest"), profile=TINY.name, at_once=3)


@pytest.fixture(scope="session")
def executed():
    return _offline(OUT, profile="cpu", strict=True)


@pytest.mark.timeout(1800)  # the first one waits for all lessons
@pytest.mark.parametrize("name", LESSONS)
def test_every_cell_of_the_lesson_runs_and_every_claim_is_decided(smallest, name):
    (lesson,) = (lesson for lesson in smallest["lessons"] if lesson["name"] == name)
    assert lesson["status"] == "ok", lesson["message"]
    decided = {claim["id"] for claim in smallest["claims"] if claim["lesson"] == name}
    assert decided == {claim.id for claim in claims.load().values() if claim.lesson == name[:2]}


def test_claims_about_memory_have_the_verdicts_that_they_had(smallest):
    """A mistake in a lesson, e.g. an inverted quotient or the bytes of another run, changes a verdict, so this test
    fails.

    For a claim that is new, or whose verdict has changed for a good reason, copy the verdict from
    build/smallest/results.json to smallest_verdicts.json.
    """
    by_memory = [claim for claim in claims.load().values() if claim.decided_by == "memory"]
    counted = {claim.id for claim in by_memory if claim.lesson != "21"}  # its host memory is looked at, not counted
    found = {claim["id"]: claim["verdict"] for claim in smallest["claims"] if claim["id"] in counted}
    known = json.loads((HERE / "smallest_verdicts.json").read_text())
    lacking = {id for id, verdict in found.items() if verdict == Verdict.NOT_TESTABLE}  # a package, or /proc
    assert {id: found[id] for id in found.keys() - lacking} == {id: known[id] for id in known.keys() - lacking}


def test_no_lesson_tries_the_network_at_the_smallest_sizes(smallest):
    assert smallest["attempts"] == ""


@pytest.mark.timed
@pytest.mark.timeout(1800)
def test_the_lessons_that_changed_have_the_verdicts_expected(tmp_path):
    if not 0 < len(changed := _changed()) <= MOST_CHANGED:
        pytest.skip(f"{len(changed)} lessons changed since {SINCE}: strictly each night, and each day if they are few")
    data = course.run_course(changed, profile="cpu", strict=True, out=tmp_path, timeout_per_lesson=600)
    assert problems(data) == []


@strictly
@pytest.mark.timeout(3000)  # the first one waits for all lessons
@pytest.mark.parametrize("name", LESSONS)
def test_the_lesson_runs_and_its_verdicts_are_the_expected_ones(executed, name):
    (lesson,) = (lesson for lesson in executed["lessons"] if lesson["name"] == name)
    assert lesson["status"] == "ok", lesson["message"]
    decided = {claim["id"]: claim for claim in executed["claims"] if claim["lesson"] == name}
    assert decided.keys() == {claim.id for claim in claims.load().values() if claim.lesson == name[:2]}
    for claim in decided.values():
        assert claim["as_expected"], claim
    assert {claim["verdict"] for claim in decided.values()} - {"not testable here"}


@strictly
def test_the_course_is_ok_as_a_whole(executed):
    assert LESSONS and problems(executed) == []


@strictly
def test_the_report_is_one_page_under_5_mb_that_opens_from_disk_and_links_every_executed_lesson(executed):
    page = (OUT / "index.html").read_text()
    assert len(page.encode()) < 5_000_000
    assert 'src="http' not in page and "<script" not in page
    for name in [lesson["name"] for lesson in executed["lessons"]]:
        assert f'href="{name}.html"' in page and (OUT / f"{name}.html").exists()


@strictly
def test_no_lesson_tries_the_network(executed):
    assert executed["attempts"] == ""


@strictly
def test_a_direction_reversed_in_the_ledger_changes_a_verdict(executed):
    """Judge each claim again by its measured value, with its direction reversed: its verdict must be another one."""
    ledger, turned = claims.load(), 0
    for decision in executed["claims"]:
        claim = ledger[decision["id"]]
        if decision["verdict"] not in ("holds", "refuted") or claim.direction not in ("below", "above"):
            continue
        reversed_claim = _reversed(claim)
        value = tuple(decision["interval"]) if decision["interval"] else decision["value"]
        assert claims.decide(reversed_claim, value, True) != decision["verdict"], claim.id
        turned += 1
    assert turned > 10


def _reversed(claim):
    import dataclasses

    return dataclasses.replace(claim, direction={"below": "above", "above": "below"}[claim.direction], no_effect=None)


@strictly
@pytest.mark.parametrize("strict, status", [(False, "ok"), (True, "failed")])
def test_a_lesson_outlives_its_estimate_unless_it_is_strict(tmp_path, monkeypatch, strict, status):
    _sabotage(monkeypatch, "refused_estimate")
    result = course.run_course(["00"], profile=TINY.name, strict=strict, out=tmp_path, timeout_per_lesson=600)
    (lesson,) = result["lessons"]
    executed = (tmp_path / "00_start_here.ipynb").read_text()
    assert lesson["status"] == status and "this version is not known" in executed
    assert ("no estimate: bert-tiny failed while it was traced" in executed) != strict
    assert bool(result["claims"]) != strict


@strictly
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
    reason = "speed not measured: .* in turns' timed out: no result within 0 s"
    for cost in costs:
        assert any(re.match(rf"{cost['id']}: {problem} \({reason}", found) for found in problems(result))


@strictly
def test_checkpointing_that_is_silently_ignored_fails_its_lesson(tmp_path, monkeypatch):
    _sabotage(monkeypatch, "ignored_checkpointing")
    result = course.run_course(["06"], profile="cpu", strict=True, out=tmp_path, timeout_per_lesson=600)
    assert problems(result)
    (lesson,) = result["lessons"]
    assert lesson["status"] == "failed"
