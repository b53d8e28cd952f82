"""The course run: toy lessons that fail in every known way, and the selection of lessons."""

import contextlib
import html
import json
import os
import re

import psutil
import pytest
from toys import STATUS, decision, results, write_lesson

from perf_helpers.course import course, lesson_process
from perf_helpers.course.results import problems
from trainmem.measure.forked import COURSE_SERVER


def test_a_profile_that_does_not_exist_starts_no_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(course, "run_lesson", lambda *_: pytest.fail("a kernel was started"))
    with pytest.raises(ValueError, match=r"profile='tpu': choose one of auto, cpu, t4, gpu"):
        course.run_course(["00"], profile="tpu", out=tmp_path)


@pytest.mark.parametrize("name", STATUS)
def test_each_way_to_fail_has_its_status_and_the_others_go_on(ran, name):
    statuses = {lesson["name"]: lesson["status"] for lesson in ran[0]["lessons"]}
    assert statuses[name] == STATUS[name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("00_killed", "the kernel died"),
        ("01_raises", "KeyError"),
        ("02_swallowed", "in a widget: ValueError: swallowed"),
        ("03_silent", "no 03_silent.json"),
        ("04_undecided", "decided no claim"),
        ("05_misspelt", "sets strict"),
        ("08_ok", ""),
    ],
)
def test_a_message_says_what_went_wrong(ran, name, words):
    messages = {lesson["name"]: lesson["message"] for lesson in ran[0]["lessons"]}
    assert words in messages[name] and bool(words) == bool(messages[name])


def test_problems_name_the_failed_lessons_and_the_unexpected_verdict(ran):
    lines = "\n".join(problems(ran[0]))
    assert "promise: refuted, expected holds" in lines
    assert all((name in lines) == (status != "ok") for name, status in STATUS.items())


def test_results_hold_the_machine_the_claims_and_the_runs(ran):
    result, out = ran
    data = json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)
    assert data == json.loads(json.dumps(result))
    assert data["schema"] == 1 and data["date"] and data["machine"]["name"] and data["versions"]["torch"]
    claims = {claim["id"]: claim for claim in data["claims"]}
    assert "kept" in claims and "never" not in claims
    assert claims["small-peak"]["lesson"] == "08_ok" and claims["small-peak"]["reference"]["hardware"] == "V100"
    assert claims["fast-link"]["reason"] == "needs two GPUs"
    assert {"lesson": "08_ok", "name": "cpu True", "status": "ok", "losses": ["NaN"]} in data["runs"]


@pytest.mark.parametrize(("at_once", "order"), [(1, ["03", "15", "16"]), (2, ["15", "16", "03"])])
def test_in_parallel_the_lessons_that_wait_most_begin_first(at_once, order, tmp_path, monkeypatch, capsys):
    """With `at_once` lessons at a time, they must begin in `order`; results must be in the order of their numbers.

    The function that the course calls last, `at_the_end`, must find the course's fork server in os.environ.
    """
    for number in ("03", "15", "16"):
        write_lesson(tmp_path / "lessons", f"{number}_toy", "")
    monkeypatch.setattr(course, "LESSONS", tmp_path / "lessons")
    monkeypatch.setattr(course, "run_lesson", lambda *_: ("ok", "", {}))
    monkeypatch.setattr(course.course_server, "shared", lambda *_: contextlib.nullcontext({COURSE_SERVER: "here"}))
    done = course.run_course(
        profile="cpu", out=tmp_path / "out", at_once=at_once, at_the_end=lambda name: [name, os.environ[COURSE_SERVER]]
    )
    numbered = sorted(re.findall(r"\[ (\d)/3\] (\d\d)_toy \.\.\.", capsys.readouterr().err))
    assert [number for _, number in numbered] == order
    assert [lesson["name"][:2] for lesson in done["lessons"]] == sorted(order)
    assert done["paces"] == ["cpu", "here"] and COURSE_SERVER not in os.environ


# The kernel forks: such a process carries no mark.
FORKS = """
import os, pathlib, sys, time
pathlib.Path(out, "imported").write_text(str("papermill" in sys.modules))
child = os.fork() or time.sleep(600)
pathlib.Path(out, "pids").write_text(f"{os.getpid()} {child}")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_nothing_outlives_a_lesson_whose_kernel_is_forked(end, tmp_path, monkeypatch):
    write_lesson(tmp_path / "lessons", "00_forks", FORKS + end)
    monkeypatch.setattr(course, "LESSONS", tmp_path / "lessons")
    course.run_course(out=tmp_path / "out", timeout_per_lesson=60)
    assert (tmp_path / "out" / "imported").read_text() == "True"
    assert all_end(tmp_path / "out" / "pids")


def all_end(file):
    """Return whether all processes whose ids are in a file end within some seconds."""
    for pid in file.read_text().split():
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(pid)).wait(10)
    return True


@pytest.mark.nightly
def test_a_lesson_that_hangs_is_killed_with_all_it_started_and_the_next_one_judged(tmp_path, monkeypatch, capsys):
    write_lesson(tmp_path / "lessons", "00_hangs", FORKS + "time.sleep(600)")
    write_lesson(tmp_path / "lessons", "01_next", parameters="nothing = 0")
    monkeypatch.setattr(course, "LESSONS", tmp_path / "lessons")
    result = course.run_course(out=tmp_path / "out", timeout_per_lesson=8)
    assert [lesson["status"] for lesson in result["lessons"]] == ["timed out", "failed"]
    assert "killed after 8 s" in result["lessons"][0]["message"]
    assert "no claim was decided" in problems(result)
    assert "[ 1/2] 00_hangs" in capsys.readouterr().err
    assert all_end(tmp_path / "out" / "pids")
    assert not [p.pid for p in psutil.process_iter() if marker_of(p).startswith(f"{os.getpid()}-")]


@pytest.mark.nightly
def test_a_lesson_that_needs_a_failed_run_ends_with_the_runs_own_status_and_message(tmp_path, monkeypatch):
    measure = "lab = Lab('tiny', timeout=1, out=out)\nrun = lab.run(sleep, 'own loop', measure='none')"
    cell = (
        f"import time\nfrom perf_helpers import Lab\ndef sleep(task):\n    time.sleep(600)\n{measure}\nsum(run.value)"
    )
    write_lesson(tmp_path / "lessons", "00_fails", cell)
    monkeypatch.setattr(course, "LESSONS", tmp_path / "lessons")
    (lesson,) = course.run_course(out=tmp_path / "out", timeout_per_lesson=120)["lessons"]
    message = "'own loop' timed out: no result within 1 s. Give it more seconds with timeout="
    assert lesson["status"] == "failed" and f", line 7: RunFailed: {message}" in lesson["message"]
    for name in ("index.html", "00_fails.html", "00_fails.log", "results.json"):
        assert message in html.unescape((tmp_path / "out" / name).read_text()), name


def marker_of(process):
    try:
        return process.environ().get(lesson_process.MARKER, "")
    except (psutil.Error, OSError):
        return ""


@pytest.fixture
def lessons(tmp_path, monkeypatch):
    for name in ("00_start_here", "05_gradient_accumulation"):
        write_lesson(tmp_path / "lessons", name)
    (tmp_path / "lessons" / "Untitled.ipynb").write_text("{}")
    monkeypatch.setattr(course, "LESSONS", tmp_path / "lessons")
    return course.LESSONS


@pytest.mark.parametrize(
    "name", ["05", "5", "05_gradient_accumulation", "gradient_accumulation", "{folder}/05_gradient_accumulation.ipynb"]
)
def test_a_lesson_is_found_by_number_name_or_path(lessons, name):
    assert course.find_lessons([name.format(folder=lessons)]) == [lessons / "05_gradient_accumulation.ipynb"]


def test_all_lessons_are_found_in_order_and_a_notebook_elsewhere_by_its_path(lessons, tmp_path):
    assert [path.stem for path in course.find_lessons()] == ["00_start_here", "05_gradient_accumulation"]
    write_lesson(tmp_path, "mine")
    assert course.find_lessons([tmp_path / "mine.ipynb"]) == [tmp_path / "mine.ipynb"]


def test_an_unknown_lesson_is_refused_with_the_nearest_and_an_empty_folder_too(lessons, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="Did you mean '05_gradient_accumulation'"):
        course.find_lessons(["gradient_acumulation"])
    with pytest.raises(ValueError, match="Choose from 00_start_here, 05_"):
        course.find_lessons(["99"])
    with pytest.raises(ValueError, match="no lessons"):
        monkeypatch.setattr(course, "LESSONS", tmp_path)
        course.find_lessons()


def test_lessons_are_not_overwritten(lessons):
    with pytest.raises(ValueError, match=r"--out .*name another folder"):
        course.run_course(out=lessons)


@pytest.mark.parametrize(
    ("claims", "ok"),
    [
        ([decision("a", "refuted")], True),
        ([decision("a", "too small to tell")], True),
        ([decision("a", "refuted", expected=["holds"])], False),
        ([decision("a", "not testable here")], False),
        ([], False),
    ],
)
def test_a_course_is_ok_if_verdicts_are_expected_and_one_is_decided(claims, ok):
    assert (problems(results(*claims, lessons=["ok"])) == []) is ok
