"""Every page of the project is readable on a phone, a projector and a desktop, light and dark, by keyboard alone, and
by a screen reader as far as axe-core can tell. test_browser.py tests the outputs of notebooks.

The pages are made by the project's own code, from a recorded course run with many failures and long names.
"""

import copy
import json
from dataclasses import asdict
from pathlib import Path

import browser
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from toys import PNG

from perf_helpers import Lab, exercises, plots, widgets
from perf_helpers.compare import compare, history
from perf_helpers.course import claims, report
from perf_helpers.course.ledger import Verdict, load
from trainmem.records import CATEGORIES, Comparison, Memory, Ratio, Run

ROOT = Path(__file__).resolve().parents[1]
LONG = "a name of words and/of_none_" + "x" * 90
# The size of the window and how many pixels of the device one of its own takes: a phone; a projector of 1024 x 768 at
# 150 %; a desk.
SCREENS = {"phone": (360, 740, 3), "projector": (683, 512, 1.5), "desk": (1280, 900, 1)}
PAGES = ("course/index.html", "course/09_8bit_adam.html", "changes.html", "history.html")

pytestmark = [
    pytest.mark.skipif(
        not browser.chromium(), reason="no Chromium: apt-get install chromium, or name one in $CHROMIUM"
    ),
    pytest.mark.browser,
]


def recorded():
    """Return the newest recorded course run, cut to three lessons, with a failure, an unexpected verdict, and long
    names.
    """
    newest = max((ROOT / "results").glob("intel-*/*.json"), key=lambda path: path.name)
    data = json.loads(newest.read_text(encoding="utf-8"))
    kept = ("00_start_here", "04_batch_size", "09_8bit_adam")
    data |= {
        key: [row for row in data[key] if row.get("lesson", row.get("name")) in kept] for key in ("lessons", "claims")
    }
    data["runs"] = [run for run in data["runs"] if run["lesson"] in kept][:6]
    data["lessons"][1] |= {"status": "failed", "message": f"ValueError: {LONG}\nin a second line"}
    data["machine"] |= {"name": LONG, "gpus": [{"index": 0, "name": LONG, "memory_bytes": None, "driver": None}]}
    data["claims"] = data["claims"][:6] + data["claims"][-2:]
    for claim, verdict in zip(data["claims"], Verdict, strict=False):
        claim["verdict"] = verdict
    data["claims"][1] |= dict.fromkeys(("says", "quantity", "reason", "note", "id", "threshold"), LONG)
    data["claims"][1] |= {
        "as_expected": False,
        "predicted": [0.1, 0.4],
        "interval": [1e-9, 123456.789],
        "rehearsed": True,
    }
    return data


def a_run(name, peak):
    memory = Memory(peak, "counted", peak_phase="backward", breakdown=dict.fromkeys(CATEGORIES, peak // 12))
    return Run(name, "ok", "", memory=memory, task={"model": "bert-tiny"}, machine={}, id=name)


def outputs(monkeypatch):
    """Return one output, in a notebook's format, of every kind that a lesson shows."""
    reported = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: reported.append(data))
    lab = Lab("tiny", lesson="09_8bit_adam")
    exercises.question(lab, "why", f"Why {LONG}?", {LONG: LONG, "`weights`": "They stay."}, right=LONG)
    widgets.predict(lab, "peak", "The peak?", "MB", 0, 100)
    shown = [data["text/html"] for data in reported]
    plain = {
        "interval": None,
        "missing": None,
        "predicted": None,
        "predicted_from": None,
        "kind": "cpu",
        "profile": "cpu",
    }
    plain |= {"note": LONG, "rehearsed": False, "excused": False}
    decided = [claims.Decision(claim, Verdict.REFUTED, 0.5, **plain) for claim in [*load().values()][:2]]
    runs = a_run("vanilla", 12_000_000), a_run("accumulation and checkpointing", 24_000_000)
    for thing in (
        plots.table(runs, "Two runs"),
        plots.Table([f"column_{number}_of_many" for number in range(9)], [[*range(9)]], "A wide table"),
        Comparison(*runs, 2.0, Ratio.unknown("nothing was timed")),
        widgets.revealed(lab, "peak", 12.0),
        exercises.hint("first", f"then `{LONG}`"),
        exercises.wrong(LONG),
        exercises.right("yes"),
        *decided,
        claims.Scoreboard("The scoreboard", decided, [LONG]),
    ):
        shown.append(thing._repr_html_())
    made = [new_output("display_data", {"text/html": text, "text/plain": ""}) for text in shown]
    made += [new_output("stream", name=name, text=f"0.39 % of {LONG}\n") for name in ("stdout", "stderr")]
    coloured = "".join(f"\x1b[{code}m{code} \x1b[0m" for code in (*range(30, 38), "1;32", 43))  # as a traceback has it
    made += [
        new_output("error", ename="KeyError", evalue=LONG, traceback=[f"\x1b[0;31mKeyError\x1b[0m {coloured}: {LONG}"])
    ]
    return [*made, new_output("execute_result", {"image/png": PNG, "text/plain": "a picture"}, execution_count=2)]


def lesson(monkeypatch):
    """Return an executed notebook: prose, a table, a formula, long lines of code, outputs of every kind, and a folded
    cell.
    """
    text = (
        f"# Which `optimizer`?\n\nText with [a link](https://example.org), $x^2$ and {LONG}.\n\n| claim | measured |\n"
    )
    code = f"# a comment\nfor x in range(10) or not None:  # {LONG}\n    print(f'{{x}}', x ** 2, lambda: @x, 'text')"
    cells = [new_markdown_cell(f"{text}|---|---|\n| `{LONG}` | 12.5 |"), new_code_cell(code, execution_count=1)]
    cells += [
        new_markdown_cell("## What was seen"),
        new_code_cell(code, execution_count=2, outputs=outputs(monkeypatch)),
    ]
    folded = {"tags": ["solution"], "jupyter": {"source_hidden": True}}
    html = "<details><summary>The solution</summary><pre>the_solution = 42</pre></details>"  # as `sealed` shows it
    solution = new_output("display_data", {"text/html": html})
    cells += [
        new_markdown_cell("### An exercise"),
        new_code_cell("%%sealed solution:\nc2VhbGVk", execution_count=3, metadata=folded, outputs=[solution]),
    ]
    return new_notebook(cells=cells)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write every page that the project makes into a folder, and return it."""
    made = tmp_path_factory.mktemp("pages")
    new, old = recorded(), recorded()
    old |= {"date": "2026-01-01T00:00:00+00:00", "versions": old["versions"] | {"torch": "2.12.0"}}
    for claim, verdict in zip(old["claims"], reversed(Verdict), strict=False):
        claim |= {"verdict": verdict, "value": 0.25}
    for run in old["runs"]:
        if run["memory"]:
            run["memory"]["peak_bytes"] += 12
    new["baseline"] = asdict(compare.compare(copy.deepcopy(old), copy.deepcopy(new)))
    for name, data in (("old", old), ("course", new)):
        (made / name).mkdir()
        (made / name / "results.json").write_text(json.dumps(data))
    (made / "cut.json").write_text('{"schema": 1, "lessons": [')  # what the history could not read stands on its page
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERF_HELPERS_HOME", str(made / "home"))
        nbformat.write(lesson(patch), made / "course" / "09_8bit_adam.ipynb")
    report.report(made / "course")
    (made / "changes.html").write_text(compare.compare(made / "old", made / "course").to_html())
    history.write(made, made / "history.html")
    assert {str(path.relative_to(made)) for path in made.rglob("*.html")} == {*PAGES}
    return made


def opened(chromium, path, screen="phone", theme="light"):
    """Return a browser page of a file with all folded parts unfolded; nothing is fetched from the network.

    The page's security policy forbids scripts, including axe-core's, so it is switched off in this window.

    Args:
        chromium: the browser.
        path: path of the page's file.
        screen: a name in `SCREENS`.
        theme: "light" or "dark".
    """
    width, height, scale = SCREENS[screen]
    size = {"viewport": {"width": width, "height": height}, "device_scale_factor": scale}
    page = chromium.new_context(**size, color_scheme=theme, bypass_csp=True).new_page()
    page.route("http*://**/*", lambda route: route.abort())
    page.goto(path.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    return page


# What is wider than its box: cut off, or in a box that scrolls and that no Tab reaches. (Rows of tables never scroll.)
CUT = """() => [document.documentElement, ...document.querySelectorAll('body *')].filter(box => {
    const style = getComputedStyle(box);
    if (box.scrollWidth <= box.clientWidth + 1 || box.clientWidth < 2) return false;
    if (box === document.documentElement) return true;
    if (style.overflowX === 'visible' || !box.checkVisibility()) return false;
    const scrolls = ['auto', 'scroll'].includes(style.overflowX) && !style.display.startsWith('table-row');
    return !scrolls || box.tabIndex < 0;
}).map(box => `${box.className} ${box.scrollWidth} in ${box.clientWidth}: ${box.innerText.slice(0, 40)}`)"""
# Two lines of text that lie over each other, by more than what letters leave free above and below them.
OVERLAPPING = """() => {
    const lines = [], range = document.createRange();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node; node = walker.nextNode();) {
        const box = node.parentElement;
        if (!node.data.trim() || !box.checkVisibility() || box.closest('script, style, [style*=clip-path]')) continue;
        if ([box, ...parents(box)].some(each => getComputedStyle(each).clipPath !== 'none')) continue;
        range.selectNodeContents(node);
        for (const line of range.getClientRects()) if (line.width > 2) lines.push([line, node]);
    }
    function parents(box) { const all = []; while (box = box.parentElement) all.push(box); return all; }
    const found = [];
    lines.forEach(([a, first], number) => lines.slice(number + 1).forEach(([b, second]) => {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 3 && down > 0.4 * Math.min(a.height, b.height))
            found.push(`${first.data.trim().slice(0, 40)} | ${second.data.trim().slice(0, 40)}`);
    }));
    return found;
}"""
# Headers that do not say of what, and tables without a caption; markdown's tables are nbconvert's.
UNNAMED = """ours => [...document.querySelectorAll('th:not([scope])' + (ours ? ', table:not(:has(caption))' : ''))]
    .filter(part => !part.closest('.jp-RenderedMarkdown')).map(part => part.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_keeps_the_standard_and_nothing_on_it_is_cut_off(chromium, folder, name, screen, theme):
    page = opened(chromium, folder / name, screen, theme)
    try:
        assert page.evaluate(CUT) == [] and page.evaluate(OVERLAPPING) == []
        assert page.evaluate(UNNAMED, "09" not in name) == []
        assert browser.violations(page) == []
    finally:
        page.context.close()


STOPS = """() => [...document.querySelectorAll('a[href], summary, [tabindex="0"]')]
    .filter(part => part.checkVisibility())
    .map((part, number) => { part.dataset.stop = number; return part.outerHTML.slice(0, 80); })"""
FOCUSED = """() => { const part = document.activeElement, style = getComputedStyle(part);
    return [part.dataset.stop, style.outlineStyle, parseFloat(style.outlineWidth), style.clipPath]; }"""


@pytest.mark.parametrize("name", PAGES)
def test_tab_reaches_every_link_fold_and_box_in_order_and_shows_where_it_is(chromium, folder, name):
    page = opened(chromium, folder / name)
    stops = page.evaluate(STOPS)
    assert len(stops) >= {"changes.html": 0, "history.html": 1}.get(name, 10)
    for number, stop in enumerate(stops):
        page.keyboard.press("Tab")
        reached, outline, width, clipped = page.evaluate(FOCUSED)
        assert reached == str(number), f"after {number} steps, where {stop} is next"
        assert outline != "none" and width >= 2 and clipped == "none", f"not seen: {stop}"
    page.context.close()


def test_the_keyboard_skips_the_list_of_lessons_and_opens_a_fold(chromium, folder):
    page = opened(chromium, folder / PAGES[0])
    page.locator("a.skip").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('section').id") == "00_start_here"
    page.goto((folder / PAGES[1]).as_uri())
    assert page.get_by_text("%%sealed").count() == 0
    summary = page.locator("summary", has_text="The solution")
    assert not page.get_by_text("the_solution").is_visible(), "a solution is folded"
    summary.focus()
    page.keyboard.press("Enter")
    assert page.get_by_text("the_solution").is_visible()
    page.context.close()
