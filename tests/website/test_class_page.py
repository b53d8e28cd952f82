"""The class's page in a browser: results of 30 learners' files, refused files with reasons, use by keyboard, and
malicious files. The project's own code writes the files, and calculates the numbers that the page must show.
"""

import json
import random
import re
import shutil
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import browser
import pytest
from playwright.sync_api import expect
from test_accessibility import CUT, OVERLAPPING, UNNAMED

from perf_helpers import learner_log
from perf_helpers.course import claims, course, ledger, results
from perf_helpers.course.ledger import Verdict
from perf_helpers.course.lesson_process import Judgement
from trainmem.core import hardware
from trainmem.records import Store
from trainmem.texts import number_text

WEBSITE = Path(__file__).resolve().parents[2] / "website"
LESSON, OTHER = "05_gradient_accumulation", "01_anatomy_of_memory"
MACHINES = ("Intel Xeon, 2 cores", "AMD EPYC, 2 cores", "Arm, 8 cores")
LEARNERS = [f"learner {number:02}" for number in range(15)]
CUT_RESULTS, CUT_JOURNAL = LEARNERS[13:]  # whose file of that kind is damaged
WRONG = ["they fall to a quarter", "nobody knows"]

pytestmark = pytest.mark.skipif(
    not browser.chromium(), reason="no Chromium: apt-get install chromium, or name one in $CHROMIUM"
)


def write_journal(path, number):
    """Write a learner's journal of two lessons; some learners do not guess, guess late or twice, or are wrong by powers
    of ten.

    `path`: the file's path; `number`: the learner's number.
    """
    chance, store = random.Random(number), Store(path.with_name("runs.jsonl"))
    for lesson, key, unit, measured in ((LESSON, "peak", "%", 60.0), (OTHER, "largest", "MB", 1983.0)):
        lab = SimpleNamespace(lesson=lesson, store=store)
        if number % 5:
            learner_log.keep(lab, "guess", key, guess=1.0, unit=unit)
            guess = float(chance.randint(20, 100)) * (1 if unit == "%" else 10 ** chance.randint(0, 2))
            learner_log.keep(lab, "guess", key, guess=guess, unit=unit)
        counted = learner_log.counted_guess(learner_log.of(lab).read(), lesson, key)
        measured += number % 3
        learner_log.keep(lab, "revealed", key, guess=counted, measured=measured, estimate=None, unit=unit)
        if number % 5 == 0 and number % 2:
            learner_log.keep(lab, "guess", key, guess=measured, unit=unit)
        learner_log.keep(lab, "question", "speed", choice=None, right=None)
        for choice in chance.choices([*WRONG, WRONG[0], "they rise"], k=number % 3):
            learner_log.keep(lab, "question", "speed", choice=choice, right=choice == "they rise")
        for status in chance.choices(learner_log.STATUSES, k=1 + number % 2):
            learner_log.keep(lab, "exercise", "fit", status=status)
    learner_log.of(lab).path.rename(path)


def write_results(path, number, patch):
    """Write the results.json of a run of one lesson; the learner's number determines machine and verdicts.

    `path`: the file's path; `number`: the learner's number; `patch`: pytest's MonkeyPatch, with which stubs replace the
    run.
    """
    verdicts = Verdict.HOLDS, [*Verdict][number % 3], Verdict.NOT_TESTABLE if number else Verdict.HOLDS
    plain = dict.fromkeys(("interval", "missing", "predicted", "predicted_from"))
    plain |= {"note": "", "rehearsed": False, "excused": False, "kind": "cpu", "profile": "cpu", "lesson": LESSON}
    decisions = [claims.Decision(*pair, 0.5, **plain) for pair in zip(owned(), verdicts, strict=True)]
    rows = [decision.to_dict() for decision in decisions]
    machine = replace(hardware.describe(), name=MACHINES[number % 3])
    patch.setattr(course, "run_lesson", lambda *_: Judgement("ok", "", {"claims": rows}))
    patch.setattr(course, "report", lambda *_, **__: None)
    patch.setattr(course, "hardware", SimpleNamespace(describe=lambda: machine, versions=hardware.versions))
    course.run_course([LESSON], out=path.parent / "run")
    (path.parent / "run" / "results.json").rename(path)


def owned():
    """Return the first three claims of the lesson `LESSON`."""
    return [claim for claim in ledger.load().values() if claim.lesson == LESSON[:2]][:3]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with a journal and a results.json of each learner; two files are damaged."""
    folder = tmp_path_factory.mktemp("class")
    with pytest.MonkeyPatch.context() as patch:
        for number, learner in enumerate(LEARNERS):
            write_journal(folder / f"{learner}.jsonl", number)
            write_results(folder / f"{learner}.json", number, patch)
    whole = (folder / f"{CUT_RESULTS}.json").read_text()
    (folder / f"{CUT_RESULTS}.json").write_text(whole[: len(whole) // 2])
    (folder / f"{CUT_JOURNAL}.jsonl").write_bytes(bytes(range(1, 256)) * 40)
    return folder


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Serve the class page with its script and style, but without the site's layout around it; yield its address."""
    text = (WEBSITE / "class.md").read_text()
    content = f"<h1>A class</h1>{text[text.index('<link') :]}"
    style = "body{margin:1rem;font-family:sans-serif} [data-theme=dark] body{background:#14181e;color:#ced6dd}"
    head = f"<meta charset=utf-8><title>A class</title><meta name=viewport content='width=device-width'><style>{style}"
    html = f"<!doctype html><html lang=en><head>{head}</style></head><body><main>{content}</main></body></html>"

    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(WEBSITE / "_static", folder / "_static", ignore=shutil.ignore_patterns("tables"))
    (folder / "index.html").write_text(html, encoding="utf-8")
    with browser.served(folder) as address:
        yield address


@pytest.fixture
def page(chromium, address):
    """Yield the class's page in a browser, before any file is loaded; any later request or error of the page fails the
    test.
    """
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page, faults = context.new_page(), []
    page.goto(address)
    expect(page.locator("#class-state")).to_have_text("No file yet.")
    for event in ("request", "pageerror", "dialog"):
        page.on(event, lambda what, event=event: faults.append(f"{event}: {what}"))
    yield page
    context.close()
    assert [fault for fault in faults if "blob:" not in fault] == []


def drop(page, *paths, state):
    """Drop files or folders, given by their paths, on the page as a person does, and wait until the page shows the
    text `state`.
    """
    box = page.locator("#class-drop").bounding_box()
    data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
    session = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": box["x"] + 9, "y": box["y"] + 9, "data": data})
    expect(page.locator("#class-state")).to_have_text(state, timeout=30_000)


def drop_all(page, files):
    drop(page, *sorted(files.glob("learner*")), state=counted(28, 15, 2))


def counted(files, learners, refused=0, passed=0):
    file, learner = "file" if files == 1 else "files", "learner" if learners == 1 else "learners"
    text = f"{files} {file} of {learners} {learner} counted, {refused} refused, "
    return f"{text}{passed} other files in folders ignored."


def remarks(page):
    return page.locator("#class-remarks > ul > li").all_inner_texts()


def shown_rows(page, caption):
    """Return the rows of a table on the page as lists of texts.

    `page`: the browser page; `caption`: the table's caption.
    """
    rows = page.get_by_role("region", name=caption, exact=True).locator("tbody tr")
    return [row.locator("th, td").all_inner_texts() for row in rows.all()]


def journals(files):
    """Return {number of the learner: entries} of each journal in the folder `files` that is not damaged."""
    return {
        number: learner_log.Journal(files / f"{learner}.jsonl").read()
        for number, learner in enumerate(LEARNERS)
        if learner != CUT_JOURNAL
    }


def guess_lines(entries, lesson, key, unit):
    """Return the lines that the page must show about the learners' guesses at one quantity (`key`) of a lesson.

    `entries`: {number of the learner: entries of the learner's journal}; `unit`: unit of the guesses.
    """
    by_learner = [[entry for entry in one if (entry.lesson, entry.key) == (lesson, key)] for one in entries.values()]
    scored = [score for one in by_learner for score in learner_log.history(one)]
    late = sum(any(entry.kind == "guess" for entry in one) and not learner_log.history(one) for one in by_learner)
    measured = [entry.content["measured"] for one in by_learner for entry in one if entry.kind == "revealed"]
    guess, off = (statistics.median(getattr(score, name) for score in scored) for name in ("guess", "error"))
    ends = f"({number_text(min(measured))} to {number_text(max(measured))})"
    return [
        f"{len(scored)} guesses counted, of {len(by_learner)} learners; {late} came after the measurement",
        f"median guess {number_text(guess, unit)}; half were off by {100 * off:.0f} % or less",
        f"measured {number_text(statistics.median(measured), unit)} {ends} by {len(measured)} learners",
    ]


def test_30_files_are_counted_as_the_project_counts_them(page, files):
    assert len([*files.glob("learner*")]) == 30
    drop_all(page, files)
    assert remarks(page) == [
        f"{CUT_RESULTS}.json: refused: damaged: cut off, or no JSON",
        f"{CUT_JOURNAL}.jsonl: refused: damaged: no line can be read",
    ]
    entries = journals(files)
    figures = page.locator(".class-guess")
    for figure, (lesson, key, unit) in zip(
        figures.all(), [(OTHER, "largest", "MB"), (LESSON, "peak", "%")], strict=True
    ):
        assert figure.locator("h3").inner_text() == f"{lesson.replace('_', ' ')}: {key}"
        assert figure.locator("> ul > li").all_inner_texts() == guess_lines(entries, lesson, key, unit)
        scored = [score.guess for one in entries.values() for score in learner_log.history(one) if score.key == key]
        assert figure.locator("svg circle").count() == len(scored) > 5
        assert figure.locator("svg .measured").count() == len(entries)
        figure.locator("summary").click()
        rows = shown_rows(page, f"Numbers of {lesson.replace('_', ' ')}: {key}")
        answer = [(number_text(guess, unit), count) for guess, count in sorted(Counter(scored).items())]
        assert rows[: len(answer)] == [[f"guessed {guess}", str(count)] for guess, count in answer]
        assert Counter(row[0].split(": ")[0].removeprefix("measured, ") for row in rows[len(answer) :]) == Counter(
            [*MACHINES, "machine not known"]
        )
    progress = [learner_log.progress(one) for one in entries.values()]
    for number, lesson in enumerate((OTHER, LESSON)):
        first = [one[lesson].questions["speed"] for one in progress if one[lesson].questions["speed"] is not None]
        wrong = Counter()
        for one in entries.values():
            choices = [entry.content["choice"] for entry in one if (entry.kind, entry.lesson) == ("question", lesson)]
            wrong.update([choice for choice in choices[1:2] if choice in WRONG])
        assert shown_rows(page, "First answers")[number][1:] == [
            f"{sum(first)} of {len(first)}",
            "{} ({})".format(*wrong.most_common(1)[0]),
        ]
        best = Counter(one[lesson].exercises["fit"] for one in progress)
        assert shown_rows(page, "Best answers")[number][1:] == [
            f"{best['right']} of {len(entries)}",
            str(best["wrong"]),
            str(best["not attempted"]),
        ]


def test_verdicts_stand_by_machine_and_those_that_differ_come_first(page, files):
    drop_all(page, files)
    found = Counter()
    for number, learner in enumerate(LEARNERS):
        if learner != CUT_RESULTS:
            for claim in results.load_results(files / f"{learner}.json")["claims"]:
                found[claim["id"], MACHINES[number % 3], claim["verdict"]] += 1
    page.get_by_text("Claims on which none differ: 2").click()
    machines = sorted(MACHINES, key=lambda name: -sum(count for key, count in found.items() if key[1] == name))
    for caption, number in (
        ("Claims on which verdicts differ: 1", 1),
        ("Claims on which none differ", 0),
        ("Claims on which none differ", 2),
    ):
        claim = owned()[number]
        (row,) = [row for row in shown_rows(page, caption) if row[0].endswith(f": {claim.id})")]
        assert row[0].startswith(claim.says)
        for machine, cell in zip(machines, row[1:], strict=True):
            verdicts = {
                verdict: count for (id, name, verdict), count in found.items() if (id, name) == (claim.id, machine)
            }
            assert dict(re.findall(r"([a-z ]+?) (\d+)(?:, |$)", cell)) == {k: str(v) for k, v in verdicts.items()}
    assert len(shown_rows(page, "Claims on which verdicts differ: 1")) == 1


def test_one_lesson_is_shown_all_is_removed_and_a_saved_class_comes_back(page, files, tmp_path):
    drop_all(page, files)
    everything = page.locator("#class-results").inner_text()
    page.get_by_label("lesson").select_option(LESSON)
    assert page.locator(".class-guess h3").all_inner_texts() == [f"{LESSON.replace('_', ' ')}: peak"]
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as one file").click()
    download.value.save_as(tmp_path / "class.json")
    page.get_by_role("button", name="Remove all").click()
    expect(page.locator("#class-state")).to_have_text(counted(0, 0))
    assert page.locator("#class-results").inner_text() == "" and not page.locator("#class-controls").is_visible()
    drop(page, tmp_path / "class.json", state=counted(28, 15))
    assert page.locator("#class-results").inner_text() == everything
    drop(page, files / f"{LEARNERS[3]}.json", state=counted(28, 15))
    assert remarks(page) == [f"{LEARNERS[3]}.json: left out: the same file of {LEARNERS[3]} is here"]


def test_a_folder_is_searched_and_the_newest_file_of_a_learner_counts(page, files, tmp_path):
    """The newest file of a learner counts. But a journal without answers must not replace one with answers, even if it
    is newer: a command in a shell may have written it.
    """
    ann = tmp_path / "class" / "ann"
    ann.mkdir(parents=True)
    for name in ("results.json", "late.json"):
        (ann / name).write_bytes((files / f"{LEARNERS[1]}.json").read_bytes())
    for name in ("index.html", "runs.jsonl", "05_a.json"):
        (ann / name).write_text('{"task": {}}')
    (ann / "journal.jsonl").write_bytes((files / f"{LEARNERS[1]}.jsonl").read_bytes() + b"{cut\n")
    drop(page, tmp_path / "class", state=counted(3, 2, passed=3))
    assert remarks(page) == ["class/ann/journal.jsonl: damaged lines left out: 1"]

    newer = json.loads((ann / "results.json").read_text()) | {"date": "2999-01-01T00:00:00+00:00"}
    newer["machine"]["name"] = "a new machine"
    (tmp_path / "ann.json").write_text(json.dumps(newer))
    empty = SimpleNamespace(lesson=LESSON, store=Store(tmp_path / "runs.jsonl"))
    learner_log.keep(empty, "revealed", "peak", guess=None, measured=1.0, estimate=None, unit="%")
    learner_log.of(empty).path.rename(tmp_path / "ann.jsonl")
    drop(page, tmp_path / "ann.json", tmp_path / "ann.jsonl", state=counted(3, 2, passed=3))
    assert remarks(page)[1:] == [
        "ann.json: replaces an older file of ann",
        "ann.jsonl: left out: a newer file of ann is here",
    ]
    assert "a new machine" in page.locator("#class-results").inner_text()


HOSTILE = "<img src=x onerror=alert(1)>\"'</script><script>alert(1)</script>" + "n" * 10_000


def test_a_hostile_file_runs_nothing_breaks_nothing_and_is_refused_where_it_is_none(page, files, tmp_path):
    lab = SimpleNamespace(lesson=HOSTILE, store=Store(tmp_path / "runs.jsonl"))
    for guess in (1e-300, 1e300, float("nan"), 5.0):
        learner_log.keep(lab, "guess", "__proto__", guess=guess, unit=HOSTILE)
    learner_log.keep(lab, "question", HOSTILE, choice=HOSTILE, right=False)
    learner_log.keep(lab, "finished", claims={"__proto__": HOSTILE, HOSTILE: "holds"})
    learner_log.of(lab).path.rename(tmp_path / "<b>x.jsonl")
    data = json.loads((files / f"{LEARNERS[0]}.json").read_text())
    data["machine"]["name"] = data["claims"][0]["says"] = data["claims"][0]["verdict"] = HOSTILE
    data["runs"] = [float("nan"), float("-inf"), '"NaN\\']
    (tmp_path / "constructor.json").write_text(json.dumps(data))
    (tmp_path / "deep.json").write_text("[" * 1_000_000)
    (tmp_path / "endless.json").write_text('{"a": NaN, "b": "' + '\\"' * 1_000_000)
    (tmp_path / "long.jsonl").write_text("{}\n" * 5001)
    (tmp_path / "claims.json").write_text(json.dumps(data | {"claims": data["claims"] * 700}))
    (tmp_path / "text.txt").write_text("a text")
    with (tmp_path / "vast.json").open("wb") as file:
        file.truncate(50_000_000)
    drop(page, *sorted(tmp_path.glob("[!.]*.*")), state=counted(2, 2, refused=6))
    assert dict(line.split(": ", 1) for line in remarks(page)) == {
        "<b>x.jsonl": "damaged lines left out: 2",  # neither NaN nor 1e300 is a guess
        "claims.json": "refused: too large: more than 2000 claims",
        "deep.json": "refused: damaged: cut off, or no JSON",
        "endless.json": "refused: damaged: cut off, or no JSON",
        "long.jsonl": "refused: too large: more than 5000 lines",
        "text.txt": "refused: no journal, results.json or saved class",
        "vast.json": "refused: too large: 50 MB",
    }
    assert page.locator("#class :is(img, script, b)").count() == 0
    assert page.locator(".class-guess li.guess").inner_text() == "1 guess counted, of 1 learner"
    assert "<img src=x" in page.locator("#class-results").inner_text()
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate(CUT) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_keeps_the_standard_and_nothing_on_it_is_cut_off(page, files, width, theme):
    page.set_viewport_size({"width": width, "height": 740})
    page.evaluate("theme => { document.documentElement.dataset.theme = theme; }", theme)
    drop_all(page, files)
    page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    assert page.evaluate(CUT) == [] and page.evaluate(OVERLAPPING) == [] and page.evaluate(UNNAMED, True) == []
    assert browser.violations(page) == []


def test_it_can_be_used_by_keyboard_alone(page, files):
    def reach(selector):
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert style != "none", f"{selector}: where it is cannot be seen"
                return
        raise AssertionError(f"Tab does not reach {selector}")

    page.on("filechooser", lambda _: None)  # from here on none is opened, also where the browser is slow to hear of it
    reach("#class-files")
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files([files / f"{LEARNERS[1]}.json", files / f"{LEARNERS[1]}.jsonl"])
    expect(page.locator("#class-state")).to_have_text(counted(2, 1))
    reach("#class-folder")
    reach("#class-lesson")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".class-guess")).to_have_count(1)
    reach(".class-guess summary")
    page.keyboard.press("Enter")
    assert page.locator(".class-guess details table").is_visible()
    reach(".class-table")
    page.keyboard.press("Home")
    page.locator("#class-save").focus()
    reach("#class-remove")
    page.keyboard.press("Enter")
    expect(page.locator("#class-state")).to_have_text(counted(0, 0))
    assert page.evaluate("document.activeElement.id") == "class-files"
