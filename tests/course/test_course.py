"""The course run: toy lessons that fail in every way seen, and what the reports say of them."""

import json
import os
import shutil
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import psutil
import pytest

from perf_helpers.course import course

PARAMETERS = 'profile = "auto"\nstrict = False\nout = ""'
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SHOW = f"import base64, IPython.display as d\nd.display(d.Image(base64.b64decode('{PNG}')))"
ORPHAN = """import os, pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(out, "orphan.pid").write_text(str(child.pid))
os.kill(os.getpid(), 9)"""
SWALLOWED = "import ipywidgets\nwith ipywidgets.Output():\n    raise ValueError('swallowed by a widget')"


def decision(id, verdict="holds", *, expected=None, **fields):
    expected = expected or [verdict]
    plain = {"id": id, "lesson": "00", "says": f"{id} says so", "quantity": "peak / peak", "threshold": "below 0.9"}
    plain |= {
        "verdict": verdict,
        "expected": expected,
        "as_expected": verdict in expected,
        "value": 0.5,
        "interval": None,
    }
    guide = {"value": 0.58, "text": "8681 against 14949 MB", "hardware": "V100", "source": "2023 guide"}
    return plain | {"guide": guide, "reason": None, "missing": None, "note": ""} | fields


def finish(name, *decisions, **fields):
    """The source of a last cell that writes what claims.finish writes."""
    record = {"schema": 1, "lesson": name, "claims": decisions, "complete": True} | fields
    runs = "record['runs'] = [{'name': f'{profile} {strict}', 'status': 'ok', 'losses': [float('nan')]}]"
    write = f"pathlib.Path(out, {name + '.json'!r}).write_text(json.dumps(record))"
    return f"import json, pathlib\nrecord = json.loads({json.dumps(record)!r})\n{runs}\n{write}"


def write_lesson(folder, name, *sources, parameters=PARAMETERS):
    cells = [nbformat.v4.new_markdown_cell(f"# Does {name} <work>?")]
    cells += [
        nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}),
        *map(nbformat.v4.new_code_cell, sources),
    ]
    folder.mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")


OK = (
    decision("small-peak", interval=[0.45, 0.55]),
    decision("same-gradient", "refuted", reason="the library divides by <tokens>"),
    decision("slower", "too small to tell"),
    decision("fast-link", "not testable here", value=None, missing="needs two GPUs"),
)
STATUS = {
    "00_killed": "crashed",
    "01_raises": "failed",
    "02_swallowed": "failed",
    "03_silent": "failed",
    "04_undecided": "failed",
    "05_misspelt": "failed",
    "07_unexpected": "ok",
    "08_ok": "ok",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One course of toy lessons, executed once: the result, and its folder."""
    lessons, out = tmp_path_factory.mktemp("lessons"), tmp_path_factory.mktemp("out")
    write_lesson(lessons, "00_killed", ORPHAN, finish("00_killed", decision("never")))
    write_lesson(
        lessons, "01_raises", finish("01_raises", decision("kept")), "raise KeyError('\\x1b[31mred\\x1b[0m & <b>')"
    )
    write_lesson(lessons, "02_swallowed", SWALLOWED, finish("02_swallowed", decision("green")))
    write_lesson(lessons, "03_silent", "1 + 1")
    write_lesson(
        lessons, "04_undecided", finish("04_undecided", decision("elsewhere", "not testable here", value=None))
    )
    write_lesson(lessons, "05_misspelt", "1 + 1", parameters=PARAMETERS.replace("strict", "strickt"))
    write_lesson(lessons, "07_unexpected", finish("07_unexpected", decision("promise", "refuted", expected=["holds"])))
    write_lesson(lessons, "08_ok", SHOW, finish("08_ok", *OK))
    left_by_an_earlier_run = {"lesson": "03_silent", "complete": True, "claims": [decision("stale")], "runs": []}
    (out / "03_silent.json").write_text(json.dumps(left_by_an_earlier_run))
    return course.run_course(profile="cpu", strict=True, out=out, notebooks_dir=lessons, timeout_per_lesson=300), out


def test_a_cell_that_runs_for_long_is_told_once_and_when_its_time_has_doubled(tmp_path, monkeypatch, capsys):
    target, clock = tmp_path / "05.ipynb", iter([0, 30, 60, 100, 125, 200, 300])
    monkeypatch.setattr(course.time, "monotonic", lambda: next(clock))
    watch = course._Watch(target)

    def running(identity):
        states = {"a": "completed", identity: "running"}
        cells = [
            {"id": key, "source": f"{key} = 1\nmore", "metadata": {"papermill": {"status": state}}}
            for key, state in states.items()
        ]
        target.write_text(json.dumps({"cells": cells}))

    running("slow")
    for _ in range(5):  # after 0, 30, 60, 100 and 125 s
        watch()
    running("next")
    watch()
    target.write_text("{")  # half written
    watch()
    told = capsys.readouterr().err.split("\n")
    assert [line.strip() for line in told if line] == ["for 60 s now in: slow = 1", "for 125 s now in: slow = 1"]


def test_a_profile_that_does_not_exist_starts_no_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(course, "_execute", lambda *_: pytest.fail("a kernel was started"))
    with pytest.raises(ValueError, match=r"profile='tpu': choose one of auto, cpu, t4, gpu"):
        course.run_course(["00"], profile="tpu", out=tmp_path)


@pytest.mark.parametrize("name", STATUS)
def test_each_way_to_fail_has_its_status_and_the_others_go_on(ran, name):
    statuses = {lesson["name"]: lesson["status"] for lesson in ran[0].data["lessons"]}
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
    messages = {lesson["name"]: lesson["message"] for lesson in ran[0].data["lessons"]}
    assert words in messages[name] and bool(words) == bool(messages[name])


def test_a_child_that_outlives_the_killed_kernel_is_ended(ran):
    pid = int((ran[1] / "orphan.pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_problems_name_the_failed_lessons_and_the_unexpected_verdict(ran):
    lines = "\n".join(ran[0].problems)
    assert not ran[0].ok
    assert "promise: refuted, expected holds" in lines
    assert all((name in lines) == (status != "ok") for name, status in STATUS.items())


def test_results_hold_the_machine_the_claims_and_the_runs(ran):
    result, out = ran
    data = json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)
    assert data == json.loads(json.dumps(result.data))
    assert data["schema"] == 1 and data["date"] and data["machine"]["name"] and data["versions"]["torch"]
    claims = {claim["id"]: claim for claim in data["claims"]}
    assert "kept" in claims and "never" not in claims
    assert claims["small-peak"]["lesson"] == "08_ok" and claims["small-peak"]["reference"]["hardware"] == "V100"
    assert claims["fast-link"]["reason"] == "needs two GPUs"
    assert {"lesson": "08_ok", "name": "cpu True", "status": "ok", "losses": ["NaN"]} in data["runs"]


def test_junit_has_a_case_for_each_lesson_and_claim(ran):
    result, out = ran
    suite = ElementTree.parse(out / "junit.xml").getroot().find("testsuite")
    outcome = {case.get("name"): {child.tag for child in case} for case in suite.iter("testcase")}
    assert outcome.keys() == STATUS.keys() | {claim["id"] for claim in result.data["claims"]}
    assert outcome["00_killed"] == {"error"} and outcome["01_raises"] == {"failure"}
    assert outcome["promise"] == {"failure"} and outcome["fast-link"] == {"skipped"}
    assert outcome["same-gradient"] == outcome["08_ok"] == {"system-out"}
    counts = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": len(outcome), "failures": 6, "errors": 1, "skipped": 2}


def test_the_page_shows_each_claim_and_stands_alone(ran):
    result, out = ran
    page = (out / "index.html").read_text(encoding="utf-8")
    for claim in result.data["claims"]:
        row = page.split(f'id="{claim["id"]}"')[1].split("</tr>")[0]
        assert claim["verdict"] in row and ("unexpected" in row) == (not claim["as_expected"])
    assert "divides by &lt;tokens&gt;" in page and "V100" in page and "0.45 to 0.55" in page
    assert f"base64,{PNG}" in page and 'alt="Picture of lesson 08_ok' in page and 'href="08_ok.html"' in page
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org", "")


def test_executed_lessons_are_pages_that_load_no_library_they_need(ran):
    page = (ran[1] / "08_ok.html").read_text(encoding="utf-8")
    assert PNG in page and "prefers-color-scheme: dark" in page
    assert not [
        tag for tag in page.split("<script")[1:] if "src=" in tag.split(">")[0] and "async" not in tag.split(">")[0]
    ]


def test_report_makes_the_pages_again(ran, tmp_path):
    for name in ("results.json", "08_ok.ipynb", "00_killed.ipynb"):
        shutil.copy(ran[1] / name, tmp_path)
    (tmp_path / "00_killed.ipynb").write_text('{"cells": [')  # cut off; others are missing
    assert course.report(tmp_path) == tmp_path / "index.html"
    assert (tmp_path / "junit.xml").read_text() == (ran[1] / "junit.xml").read_text()
    assert (tmp_path / "08_ok.html").exists() and "small-peak" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_lesson_that_hangs_is_killed_with_all_it_started_and_the_next_one_judged(tmp_path, capsys):
    write_lesson(tmp_path / "lessons", "00_hangs", "import time\ntime.sleep(600)")
    write_lesson(tmp_path / "lessons", "01_next", parameters="nothing = 0")
    result = course.run_course(out=tmp_path / "out", notebooks_dir=tmp_path / "lessons", timeout_per_lesson=8)
    assert [lesson["status"] for lesson in result.data["lessons"]] == ["timed out", "failed"]
    assert "killed after 8 s" in result.data["lessons"][0]["message"]
    assert not result.ok and "no claim was decided" in result.problems
    assert "[ 1/2] 00_hangs" in capsys.readouterr().err
    assert not [p.pid for p in psutil.process_iter() if marker_of(p).startswith(f"{os.getpid()}-")]


def marker_of(process):
    try:
        return process.environ().get(course.MARKER, "")
    except (psutil.Error, OSError):
        return ""


def test_a_killed_lesson_names_the_cell_it_hung_in(tmp_path):
    cell = nbformat.v4.new_code_cell("loop()  # for ever", metadata={"papermill": {"status": "running"}})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "a.ipynb")
    status, message, _ = course.judge("a", None, tmp_path / "a.ipynb", tmp_path / "a.json", tmp_path / "a.log", 60)
    assert (status, message) == ("timed out", "killed after 60 s in: loop()  # for ever")


RECORD = {"lesson": "a", "complete": True, "claims": [decision("x")], "runs": []}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps(RECORD), ""),
        (json.dumps(RECORD | {"complete": False}), "not complete"),
        (json.dumps(RECORD | {"lesson": "09_other"}), "that of 09_other"),
        (json.dumps(RECORD)[:-40], "damaged"),
        ("[]", "damaged"),
    ],
)
def test_only_complete_results_of_the_lesson_itself_count(tmp_path, text, words):
    cell = nbformat.v4.new_code_cell("1", execution_count=1)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "a.ipynb")
    (tmp_path / "a.json").write_text(text)
    status, message, kept = course.judge("a", 0, tmp_path / "a.ipynb", tmp_path / "a.json", tmp_path / "a.log")
    assert words in message and status == ("failed" if words else "ok") and bool(kept) == (not words)


def test_a_lesson_without_claims_of_its_own_need_not_decide_one(tmp_path):
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "a.ipynb")
    for name, status in (("20_inference", "ok"), ("21_other", "failed")):
        (tmp_path / "a.json").write_text(json.dumps(RECORD | {"lesson": name, "claims": []}))
        judged = course.judge(name, 0, tmp_path / "a.ipynb", tmp_path / "a.json", tmp_path / "a.log")
        assert judged[0] == status


@pytest.fixture
def lessons(tmp_path):
    for name in ("00_start_here", "05_gradient_accumulation"):
        write_lesson(tmp_path / "lessons", name)
    (tmp_path / "lessons" / "Untitled.ipynb").write_text("{}")
    return tmp_path / "lessons"


@pytest.mark.parametrize(
    "name", ["05", "5", "05_gradient_accumulation", "gradient_accumulation", "{folder}/05_gradient_accumulation.ipynb"]
)
def test_a_lesson_is_found_by_number_name_or_path(lessons, name):
    assert course.find_lessons([name.format(folder=lessons)], lessons) == [lessons / "05_gradient_accumulation.ipynb"]


def test_all_lessons_are_found_in_order_and_a_notebook_elsewhere_by_its_path(lessons, tmp_path):
    assert [path.stem for path in course.find_lessons(None, lessons)] == ["00_start_here", "05_gradient_accumulation"]
    write_lesson(tmp_path, "mine")
    assert course.find_lessons(tmp_path / "mine.ipynb", lessons) == [tmp_path / "mine.ipynb"]


def test_an_unknown_lesson_is_refused_with_the_nearest_and_an_empty_folder_too(lessons, tmp_path):
    with pytest.raises(ValueError, match="did you mean gradient_accumulation"):
        course.find_lessons(["gradient_acumulation"], lessons)
    with pytest.raises(ValueError, match="there are 00_start_here, 05_"):
        course.find_lessons(["99"], lessons)
    with pytest.raises(ValueError, match="no lessons"):
        course.find_lessons(None, tmp_path)


def test_lessons_are_not_overwritten_and_a_damaged_baseline_is_refused_before_anything_runs(lessons, tmp_path):
    with pytest.raises(ValueError, match="holds the lessons themselves"):
        course.run_course(out=lessons, notebooks_dir=lessons)
    (tmp_path / "old.json").write_text('{"schema": 1, "claims"')
    with pytest.raises(ValueError, match="not the results of a course"):
        course.run_course(out=tmp_path / "out", notebooks_dir=lessons, baseline=tmp_path / "old.json")
    assert not (tmp_path / "out").exists()


def results(*claims, lessons=(), machine="CPU, 2 cores", torch="2.13.0", **fields):
    lessons = [{"name": "00_a", "status": status, "seconds": 1, "message": ""} for status in lessons]
    machine = {"name": machine, "kind": "cpu", "gpus": [], "memory_available_bytes": hash(torch)}
    data = {"schema": 1, "date": "2026-01-01", "profile": "cpu", "machine": machine, "versions": {"torch": torch}}
    return data | {"lessons": lessons, "claims": list(claims), "runs": []} | fields


@pytest.mark.parametrize(
    ("old", "new", "moved"),
    [
        ((1.0, None), (1.0005, None), False),  # an exact count, by rounding
        ((1.0, None), (1.002, None), True),
        ((1.0, [0.9, 1.1]), (1.08, [1.0, 1.2]), False),
        ((1.0, [0.9, 1.1]), (1.15, [0.95, 1.3]), False),  # the old value is inside the new interval
        ((1.0, [0.9, 1.1]), (1.3, [1.2, 1.4]), True),
        ((1.0, [1.0, 1.0]), (1.0001, [1.0001, 1.0001]), False),
        ((1.0, None), (None, None), True),
        ((None, None), (None, None), False),
        ((0, None), (0, None), False),
        ((0, None), (3, None), True),
    ],
)
def test_a_value_has_moved_only_beyond_its_noise(old, new, moved):
    a, b = (results(decision("ratio", value=value, interval=interval)) for value, interval in (old, new))
    kinds = [change["kind"] for change in course.compare(a, b).changes]
    assert kinds == (["value"] if moved else [])


def test_compare_names_verdicts_lessons_and_claims_that_come_and_go():
    old = results(decision("a"), decision("gone"), lessons=["ok"])
    new = results(decision("a", "refuted"), decision("came"), lessons=["crashed"])
    changes = course.compare(old, new)
    assert [(change["kind"], change["id"]) for change in changes.changes] == [
        ("lesson", "00_a"),
        ("verdict", "a"),
        ("disappeared", "gone"),
        ("appeared", "came"),
    ]
    assert "a: holds -> refuted" in changes.to_text() and json.loads(json.dumps(changes.to_dict()))["changes"]
    assert not changes.warnings and not changes.differences


def test_compare_shows_other_versions_and_warns_of_another_machine_or_profile():
    same = course.compare(results(), results(torch="2.14.0"))
    assert same.differences == ["torch: 2.13.0 -> 2.14.0"] and not same.warnings
    assert "nothing changed" in same.to_text()
    other = course.compare(results(), results(machine="NVIDIA H200", profile="gpu"))
    assert any("machines differ" in warning for warning in other.warnings)
    assert any("profiles differ (cpu, gpu)" in warning for warning in other.warnings)
    assert "warning: the machines differ" in other.to_text() and "name: CPU, 2 cores -> NVIDIA H200" in other.to_text()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"schema": 2}', json.dumps(results() | {"claims": [{}]})]
)
def test_a_damaged_results_file_is_refused(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match="not the results of a course"):
        course.compare(tmp_path, results())
    with pytest.raises(ValueError, match="no results in"):
        course.compare(results(), Path(tmp_path, "absent.json"))


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
def test_a_course_is_ok_if_verdicts_are_expected_and_one_is_decided(tmp_path, claims, ok):
    assert course.CourseResult(tmp_path, results(*claims, lessons=["ok"])).ok is ok
