"""The pages of a course run, for people and for CI, made from the files in its folder."""

import json
import re
import shutil
from collections import Counter
from xml.etree import ElementTree

import nbformat
from bs4 import BeautifulSoup
from matplotlib.figure import Figure
from nbformat.v4 import new_output
from toys import PNG, STATUS

from perf_helpers import plots
from perf_helpers.course.report import lesson_page, report


def test_junit_has_a_case_for_each_lesson_and_claim(ran):
    result, out = ran
    suite = ElementTree.parse(out / "junit.xml").getroot().find("testsuite")
    outcome = {case.get("name"): {child.tag for child in case} for case in suite.iter("testcase")}
    assert outcome.keys() == STATUS.keys() | {claim["id"] for claim in result["claims"]}
    assert outcome["00_killed"] == {"error"} and outcome["01_raises"] == {"failure"}
    assert outcome["promise"] == {"failure"} and outcome["fast-link"] == {"skipped"}
    assert outcome["same-gradient"] == outcome["08_ok"] == {"system-out"}
    counts = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": len(outcome), "failures": 6, "errors": 1, "skipped": 2}


def test_the_page_shows_each_claim_and_needs_no_other_file(ran):
    result, out = ran
    page = (out / "index.html").read_text(encoding="utf-8")
    assert f"in {result['seconds'] / 60:.1f} minutes" in page, "of all lessons together, which ran side by side"
    for claim in result["claims"]:
        row = page.split(f'id="{claim["id"]}"')[1].split("</tr>")[0]
        assert claim["verdict"] in row and ("unexpected" in row) == (not claim["as_expected"])
    assert "divides by &lt;tokens&gt;" in page and "V100" in page and "0.45 to 0.55" in page
    assert f"base64,{PNG}" in page and 'alt="a &lt;plot&gt;"' in page and 'href="08_ok.html"' in page
    assert "<script" not in page and not re.search("https?:", page)
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src' in page.split("<style>")[0]


def test_the_page_shows_a_figure_with_its_alternative_text(ran, tmp_path):
    shown = plots.image_html(Figure(), "peak < 2 GB")
    executed = nbformat.read(ran[1] / "08_ok.ipynb", as_version=4)
    executed.cells[-1].outputs = [nbformat.v4.new_output("display_data", {"text/html": shown})]
    nbformat.write(executed, tmp_path / "08_ok.ipynb")
    pictures = lesson_page(tmp_path, "08_ok")["pictures"]
    assert pictures[-1] == (shown.split("base64,")[1].split('"')[0], "peak < 2 GB")


def test_each_sign_on_the_page_is_one_that_it_has(ran, tmp_path):
    data = json.loads((ran[1] / "results.json").read_text())
    data["machine"]["rehearsed"] = True  # which the page tells with a sign of its own
    (tmp_path / "results.json").write_text(json.dumps(data))
    page = report(tmp_path).read_text(encoding="utf-8")
    shown, known = (set(re.findall(f'<{part}"([^"]*)"', page)) for part in ("use href=", "symbol id="))
    assert {f"#{name}" for name in known} >= shown and len(shown) == 5


def test_the_numbers_at_its_head_are_those_of_its_rows(ran):
    result, out = ran
    page, verdicts = (out / "index.html").read_text(encoding="utf-8"), [c["verdict"] for c in result["claims"]]
    reported = {verdict: int(number) for number, verdict in re.findall(r"<b>(\d+)</b>.*? ([a-z ]+)</li>", page)}
    assert {verdict: number for verdict, number in reported.items() if number} == Counter(verdicts)
    decided = len(verdicts) - verdicts.count("not testable here")
    assert f"{verdicts.count('holds')} of {decided} claims hold" in page


def test_executed_lessons_are_pages_that_load_no_library_they_need(ran):
    page = (ran[1] / "08_ok.html").read_text(encoding="utf-8")
    assert PNG in page and "prefers-color-scheme: dark" in page
    may_scroll = BeautifulSoup(page, "html.parser").select(".jp-Cell-inputWrapper, .jp-OutputArea-output")
    assert len(may_scroll) > 5 and all(each["tabindex"] == "0" for each in may_scroll), "a keyboard must reach them"
    assert not [
        tag for tag in page.split("<script")[1:] if "src=" in tag.split(">")[0] and "async" not in tag.split(">")[0]
    ]


def test_a_picture_without_a_description_says_so(ran, tmp_path):
    shutil.copy(ran[1] / "results.json", tmp_path)
    executed = nbformat.read(ran[1] / "08_ok.ipynb", as_version=4)
    picture = new_output("display_data", {"image/png": PNG, "text/plain": "a figure"})
    next(cell for cell in executed.cells if cell.cell_type == "code").outputs.append(picture)
    nbformat.write(executed, tmp_path / "08_ok.ipynb")
    report(tmp_path)
    images = BeautifulSoup((tmp_path / "08_ok.html").read_text(encoding="utf-8"), "html.parser").select("img")
    assert {image["alt"] for image in images} == {"a <plot>", "no description"}


def test_what_is_folded_in_the_lesson_is_not_in_its_page(ran, tmp_path):
    shutil.copy(ran[1] / "results.json", tmp_path)
    executed = nbformat.read(ran[1] / "08_ok.ipynb", as_version=4)
    next(cell for cell in executed.cells if cell.cell_type == "code").metadata["jupyter"] = {"source_hidden": True}
    nbformat.write(executed, tmp_path / "08_ok.ipynb")
    report(tmp_path)
    shown = [
        (folder / "08_ok.html").read_text(encoding="utf-8").count('"jp-InputArea ') for folder in (ran[1], tmp_path)
    ]
    assert shown[0] - shown[1] == 1, "one cell fewer"


def test_report_makes_the_pages_again(ran, tmp_path):
    for name in ("results.json", "08_ok.ipynb", "00_killed.ipynb"):
        shutil.copy(ran[1] / name, tmp_path)
    (tmp_path / "00_killed.ipynb").write_text('{"cells": [')  # cut off; others are missing
    assert report(tmp_path) == tmp_path / "index.html"
    assert (tmp_path / "junit.xml").read_text() == (ran[1] / "junit.xml").read_text()
    assert (tmp_path / "08_ok.html").exists() and "small-peak" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_page_that_would_be_too_large_shows_fewer_pictures_and_links_the_rest(ran, tmp_path, monkeypatch):
    shutil.copytree(ran[1], tmp_path / "copy")
    whole = report(tmp_path / "copy").read_text()
    monkeypatch.setattr("perf_helpers.course.report.MOST_BYTES", len(whole.encode()) - 1)
    smaller = report(tmp_path / "copy").read_text()
    assert PNG in whole and PNG not in smaller and "1 more</a>" in smaller


def test_the_page_tells_a_failure_and_a_machine_that_differs_apart(ran, tmp_path):
    page = (ran[1] / "index.html").read_text(encoding="utf-8")
    failed, differs = page.split("Something failed")[1].split('id="differs"')
    assert "00_killed crashed" in failed and "promise: refuted" not in failed
    assert "promise: refuted, expected holds (measured 0.5)" in differs.split("</pre>")[0]
    data = json.loads((ran[1] / "results.json").read_text())
    data["lessons"] = [lesson for lesson in data["lessons"] if lesson["status"] == "ok"]
    data["claims"] = [claim | {"as_expected": True} for claim in data["claims"]]
    (tmp_path / "results.json").write_text(json.dumps(data))
    page = report(tmp_path).read_text(encoding="utf-8")
    assert "Every verdict is the expected one" in page and "Something failed" not in page and "differs from" not in page
