"""Names that contain markup stay text in every output of a notebook and on every page, and no page runs a script."""

import html
import json
from dataclasses import asdict
from html.parser import HTMLParser

import browser
import pytest
import toys

from perf_helpers import Lab, plots
from perf_helpers.compare import compare, history
from perf_helpers.course import claims, report
from perf_helpers.plots import Table
from perf_helpers.sweep.sweep import Sweep
from perf_helpers.widgets import exercises, guesses, svg
from trainmem.advise.advice import Shown
from trainmem.records import CATEGORIES, Comparison, Memory, Ratio, Run

EVIL = {
    "tag": "<img src=x onerror=window.hit=1>",
    "script": "</script></title></style><script>window.hit=1</script>",
    "quotes": "\" onload=\"window.hit=1\" ' onmouseover='window.hit=1'",
    "newlines": "a\nb\r\n<svg onload=window.hit=1>\u2028",
    "formula": r"$\frac{$ <b> $x_1$ %s {{ 7 * 7 }} {% raw %}",
    "link": "javascript:window.hit=1",
    "long": "<u>" + "x" * 10_000,
}
PART = dict.fromkeys(CATEGORIES, 1)


class Elements(HTMLParser):
    """Collect the elements of a page's HTML with the names of their attributes in `found`, and the "javascript:"
    addresses in `scripts`.
    """

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, tuple(name for name, _ in attributes)))
        addresses = [value or "" for name, value in attributes if name.endswith(("href", "src", "action"))]
        self.scripts += [address for address in addresses if address.strip().lower().startswith("javascript:")]


def evil_run(name, peak=11):
    memory = Memory(peak, "counted", peak_phase=name, peak_operation=name, breakdown=PART)
    return Run(name, "ok", name, memory=memory, task={"model": name}, machine={"name": name}, id=name)


class Evil(Shown):
    def __init__(self, name):
        self._name = name

    def _parts(self):
        return self._name, Table([self._name], [[self._name]], self._name), self._name, [self._name]


SHOWN = {
    "table": lambda name: plots.table([evil_run(name)], name)._repr_html_(),
    "comparison": lambda name: Comparison(
        evil_run(name), Run(name, "crashed", name), 1.0, Ratio.unknown(name)
    )._repr_html_(),
    "two peaks": lambda name: Comparison(evil_run(name), evil_run(name), 1.0, Ratio.unknown(name))._repr_html_(),
    "sweep": lambda name: Sweep((evil_run(name),), frozenset([name]), name)._repr_html_(),
    "advice": lambda name: Evil(name)._repr_html_(),
    "scoreboard": lambda name: claims.Scoreboard(name, (), (name,))._repr_html_(),
    "feedback": lambda name: exercises.Feedback("wrong", f"{name} `{name}`")._repr_html_(),
    "hints": lambda name: exercises.hint(name, name)._repr_html_(),
    "bars": lambda name: guesses._bars_html({"your guess": 1.0, "measured": 2.0}, name[:200].replace("$", "")),
    "bar": lambda name: svg.bar(name, PART, {name: 20}),
    "svg table": lambda name: svg.table([name], [[name]]),
    "scatter": lambda name: svg.scatter([svg.Point(name, name, 5, 5.0)], None, {name: 6}),
    "panel": lambda name: svg.panel(name, name, [(0, 1.0)], (0, 1)),
}


@pytest.mark.parametrize("name", EVIL.values(), ids=EVIL)
@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
def test_what_a_notebook_shows_has_the_elements_of_a_plain_name(show, name):
    evil, plain = Elements(show(name)), Elements(show("plain"))
    assert evil.found == plain.found and not evil.scripts


@pytest.mark.parametrize("name", EVIL.values(), ids=EVIL)
def test_questions_and_guesses_escape(name, monkeypatch, tmp_path):
    monkeypatch.setenv("PERF_HELPERS_HOME", str(tmp_path))
    pages = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: pages.append(data["text/html"]))
    lab = Lab("tiny", lesson=name)
    for text in ("plain", name):
        exercises.question(lab, text, text, {text: text, "other": text}, right=text)
        guesses.predict(lab, text, text, text, 0, 1)
    before, after = (Elements("".join(pages[start : start + 2])) for start in (0, 2))
    assert len(pages) == 4 and after.found == before.found and not after.scripts


def results(name):
    """Return the results of a course run in which every text is `name`."""
    machine = {"name": name, "cpu_model": name, "system": name, "kind": "cpu", "cuda_reason": name, "gpus": []}
    texts = {"says": name, "quantity": name, "threshold": name, "reason": name, "note": name, "as_expected": False}
    guide = {"value": 0.5, "text": name, "hardware": name, "source": name}
    claim = toys.decision(
        name, "refuted", reference=guide, **{key: texts[key] for key in texts if key != "as_expected"}
    )
    lesson = {"name": "00_a", "status": name, "seconds": 1.0, "message": name}
    run = {"lesson": "00_a", **evil_run(name).to_dict()}
    data = {"schema": 1, "date": "2026-01-01T00:00:00", "machine": machine, "versions": {name: name, "torch": name}}
    data |= {"profile": name, "strict": False, "lessons": [lesson], "claims": [claim | {"as_expected": False}]}
    return data | {"runs": [run]}


@pytest.fixture(params=EVIL.values(), ids=EVIL)
def pages(request, tmp_path):
    """Return {"evil": paths, "plain": paths} of HTML files: the report, history and comparison of two course runs.

    In the "evil" runs every text is a malicious name.
    """
    made = {}
    for kind, name in (("evil", request.param), ("plain", "plain")):
        folder = tmp_path / kind
        folder.mkdir()
        old, new = results(name), results(name) | {"date": "2026-01-02T00:00:00"}
        new["runs"] = [{"lesson": "00_a", **evil_run(name, 12).to_dict()}]
        new["claims"] = [new["claims"][0] | {"verdict": "holds", "value": 0.7}]
        new["baseline"] = asdict(compare.compare(old, new))
        for place, data in (("old", old), ("new", new)):
            (folder / place).mkdir()
            (folder / place / "results.json").write_text(json.dumps(data))
        report.report(folder / "new")
        history.write(folder, folder / "history.html")
        (folder / "compare.html").write_text(compare.compare(old, new).to_html())
        made[kind] = [folder / "new" / "index.html", folder / "history.html", folder / "compare.html"]
    return made


def test_pages_have_the_elements_of_plain_names_and_forbid_scripts(pages):
    for evil, plain in zip(pages["evil"], pages["plain"], strict=True):
        text = evil.read_text(encoding="utf-8")
        found, expected = Elements(text), Elements(plain.read_text(encoding="utf-8"))
        assert found.found == expected.found and not found.scripts, evil
        assert ("meta", ("http-equiv", "content")) in found.found and "script" not in dict(found.found)


@pytest.mark.browser
@pytest.mark.skipif(not browser.chromium(), reason="no Chromium: apt-get install chromium, or name one in $CHROMIUM")
def test_a_browser_runs_no_script_of_a_name_not_even_one_that_was_not_escaped(pages, tmp_path):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser.chromium(), args=browser.FLAGS)
        page = opened.new_page()
        for path in pages["evil"]:
            for text in (path.read_text(encoding="utf-8"), html.unescape(path.read_text(encoding="utf-8"))):
                (tmp_path / "page.html").write_text(text, encoding="utf-8")
                page.goto((tmp_path / "page.html").as_uri())
                assert page.evaluate("window.hit") is None, path
        opened.close()


def test_results_whose_lesson_is_called_like_a_path_are_refused(tmp_path):
    """A lesson's name like "../out" is refused; otherwise the lesson's page would be written to the path that the name
    gives.
    """
    data = results("x") | {"lessons": [{"name": "../out", "status": "ok", "seconds": 1.0, "message": ""}]}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "results.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"a lesson is called '\.\./out'"):
        report.report(tmp_path / "in")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
