"""Nightly runs from a shell: exit codes, page, JUnit file and JSON of `compare`, `history` and `course`."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from test_compare import MEMORY, a_run, moved_by
from test_compare_steps import paces, times
from toys import decision, finish, results, write_lesson

from perf_helpers import cli
from perf_helpers.compare import compare as comparison
from perf_helpers.compare.compare import compare
from perf_helpers.course import course


@pytest.fixture
def shell(monkeypatch, capsys):
    """Return a function (words of the command line) that runs a command in this process and returns (exit code,
    standard output, standard error).
    """

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["perf-helpers", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def nights(tmp_path):
    """Return a folder with results of course runs: usual.json, and files that differ from it.

    larger.json, smaller.json: one byte more, or less; broken.json: a claim is refuted that should hold; slower.json:
    steps take 1.5 times as long; damaged.json: not JSON.
    """
    usual = results(decision("a"), runs=[a_run()], paces=paces())
    kept = {
        "usual": usual,
        "larger": usual | {"runs": [a_run(moved_by("activations", 1))]},
        "smaller": usual | {"runs": [a_run(moved_by("activations", -1))]},
        "broken": results(decision("a", "refuted", expected=["holds"]), runs=[a_run()], paces=paces()),
        "slower": usual | {"paces": times(paces(), 1.5)},
    }
    for name, data in kept.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    (tmp_path / "damaged.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize(
    ("new", "fail_on", "code"),
    [
        ("usual", "memory,verdict,speed", 0),
        ("smaller", "memory,verdict,speed", 0),
        ("larger", "memory", 1),
        ("larger", "verdict, speed", 0),
        ("broken", "verdict", 1),
        ("broken", "memory,speed", 0),
        ("slower", "speed", 1),
        ("slower", "memory,verdict", 0),
        ("damaged", "memory", 2),
        ("absent", "memory", 2),
        ("usual", "memori", 2),
    ],
)
def test_the_exit_code_says_whether_it_is_worse(shell, nights, new, fail_on, code):
    done, _, errors = shell("compare", nights / "usual.json", nights / f"{new}.json", "--fail-on", fail_on)
    assert done == code
    assert ("Did you mean 'memory'?" in errors) == (fail_on == "memori")


def test_the_page_the_file_for_ci_and_the_json_say_the_same(shell, nights):
    page, cases = nights / "page.html", nights / "cases.xml"
    files = ("--html", page, "--junit", cases)
    code, out, _ = shell("compare", nights / "usual.json", nights / "larger.json", "--json", *files)
    (change,) = json.loads(out)["changes"]
    assert code == 1 and change["worse"] and "activations +1 B" in change["text"]
    suite = ElementTree.parse(cases).getroot()[0]
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["memory", "00_a/vanilla"] and suite.get("failures") == "2"
    html = page.read_text()
    assert "1 changed for the worse" in html and "activations +1 B" in html and "<script" not in html


def test_nothing_that_changed_is_reported_too(shell, nights):
    page = nights / "page.html"
    code, out, _ = shell("compare", nights / "usual.json", nights / "usual.json", "--html", page)
    assert code == 0 and out.splitlines()[-1] == "nothing changed"
    assert "Nothing changed" in page.read_text() and "same hardware, same versions" in page.read_text()


def test_the_history_of_a_folder(shell, nights):
    for number, name in enumerate(("usual", "larger")):
        data = json.loads((nights / f"{name}.json").read_text()) | {"date": f"2026-01-0{number + 1}"}
        (nights / "kept" / str(number)).mkdir(parents=True)
        (nights / "kept" / str(number) / "results.json").write_text(json.dumps(data))
    code, out, _ = shell("history", nights / "kept", "--out", nights / "history.html", "--json")
    (found,) = json.loads(out)["histories"]
    assert code == 0 and len(found["dates"]) == 2 and "1 of" in (nights / "history.html").read_text()
    changed = [line for line in found["lines"] if line["changes"]]
    assert [line["id"] for line in changed] == ["00_a/vanilla"] and changed[0]["points"][0][
        "value"
    ] == MEMORY.peak_bytes
    assert shell("history", nights / "nothing")[0] == 2


@pytest.mark.nightly
@pytest.mark.parametrize(("fail_on", "code"), [("memory,verdict,speed", 1), ("memory,speed", 0)])
def test_a_course_that_is_worse_than_its_baseline_fails(shell, tmp_path, monkeypatch, fail_on, code):
    write_lesson(tmp_path / "lessons", "00_a", finish("00_a", decision("a", "refuted", expected=["holds", "refuted"])))
    (tmp_path / "old.json").write_text(json.dumps(results(decision("a"))))
    monkeypatch.setattr(course, "LESSONS", tmp_path / "lessons")
    words = (
        "course",
        "--baseline",
        tmp_path / "old.json",
        "--out",
        tmp_path / "out",
        "--no-speeds",
        "--profile",
        "cpu",
    )
    done, _, errors = shell(*words, "--fail-on", fail_on)
    assert done == code and ("worse than the baseline: verdict" in errors) == bool(code)
    suite = ElementTree.parse(tmp_path / "out" / "junit.xml").getroot()[0]
    failed = [case.get("classname") for case in suite if case.find("failure") is not None]
    assert failed == (["compare", "compare.verdict"] if code else [])
    assert "with the baseline" in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.parametrize(
    ("claims", "lessons", "strict", "code"),
    [
        ([decision("a")], ["ok"], True, 0),
        ([decision("a", "refuted", expected=["holds"])], ["ok"], False, 0),
        ([decision("a", "refuted", expected=["holds"])], ["ok"], True, 1),
        ([decision("a")], ["ok", "crashed"], False, 1),
        ([decision("a", "not testable here")], ["ok"], False, 1),
    ],
)
def test_a_course_fails_for_an_unexpected_verdict_only_if_strict(
    shell, tmp_path, monkeypatch, claims, lessons, strict, code
):
    """Without --strict the exit code is 0 if every lesson ran, and unexpected verdicts are printed."""
    data = results(*claims, lessons=lessons)
    monkeypatch.setattr(comparison, "run_course", lambda *_, **__: data)
    done, _, errors = shell("course", "--out", tmp_path, "--no-speeds", *["--strict"] * strict)
    differs = any(not claim["as_expected"] for claim in claims)
    assert done == code and ("report these lines" in errors) == differs
    if differs:
        machine, versions, claim = [line.strip() for line in errors.splitlines()[1:]]
        assert machine.startswith("CPU, 2 cores") and "torch 2.13.0" in versions
        assert claim == "a: refuted, expected holds (measured 0.5)"


def test_a_damaged_baseline_is_refused_before_anything_runs(shell, nights):
    code, _, errors = shell("course", "--baseline", nights / "damaged.json", "--out", nights / "out")
    assert code == 2 and "not the results of a course" in errors and not (nights / "out").exists()


def test_the_pages_of_a_nightly_run_are_made_again_with_what_changed(shell, nights):
    data = json.loads((nights / "larger.json").read_text())
    found = compare(nights / "usual.json", data).to_dict()
    (nights / "results.json").write_text(json.dumps(data | {"baseline": found, "fail_on": ["memory"]}))
    assert shell("report", nights)[0] == 0
    page, suite = (nights / "index.html").read_text(), ElementTree.parse(nights / "junit.xml").getroot()[0]
    assert "with the baseline" in page and "activations +1 B" in page
    assert [case.get("name") for case in suite if case.find("failure") is not None] == ["memory", "00_a/vanilla"]
