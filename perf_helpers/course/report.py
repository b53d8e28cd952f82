"""Make the pages of a course run: index.html and one page per lesson for people, junit.xml for CI.

The pages are made from results.json and the executed notebooks only, so they can be made again at any time.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

from perf_helpers.course.ledger import Verdict
from perf_helpers.course.results import AXES, failures, load_results, measured_text, to_send
from perf_helpers.templates import template
from trainmem.records import write_whole

MOST_BYTES = 5_000_000  # limit of index.html, which is mailed and archived
# A test case of junit.xml: class, name, seconds, outcome ("failure", "error", "skipped" or None), message.
Case = tuple[str, str, float, str | None, str]
# A figure, as `plots.image_html` shows it.
_FIGURE = re.compile(r'<img [^>]*alt="(?P<alt>[^"]*)" src="data:image/png;base64,(?P<png>[^"]+)">')
# The elements of a page that scroll if they are too wide, and that a keyboard must therefore reach.
_CELL = re.compile(r'<div (?=[^>]*class="(?:[\w-]+ )*jp-(?:Cell-inputWrapper|OutputArea-output)\b)')
# Characters that XML forbids but a terminal's output may contain: colour codes and control characters.
_NO_XML = re.compile(r"\x1b\[[0-9;]*m|[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def report(directory: str | Path, pages: Mapping[str, dict[str, Any]] | None = None) -> Path:
    """Make index.html, junit.xml and the lessons' pages of a course run; return the path of index.html.

    If results.json has a "baseline" (the changes since an earlier course run), the report lists these changes.

    Args:
        directory: folder with results.json and the executed notebooks.
        pages: {lesson: result of `lesson_page`} for the pages that exist already; None: no page exists.

    Raises:
        ValueError: results.json is missing or damaged.
    """
    directory = Path(directory)
    data = load_results(directory)
    baseline = data.get("baseline")
    changed = change_cases(baseline["changes"], data.get("fail_on", AXES)) if baseline else []
    write_whole(directory / "junit.xml", junit(data["date"], _cases(data) + changed))
    for lesson in data["lessons"]:
        lesson.update((pages or {}).get(lesson["name"]) or lesson_page(directory, lesson["name"]))
    count = Counter(claim["verdict"] for claim in data["claims"])
    facts = {"failures": failures(data), "to_send": to_send(data), "count": count, "verdicts": list(Verdict)}
    for shown in (4, 2, 1, 0):  # pictures per lesson; the executed lesson has them all
        page = template("course/report.html.j2").render(data | facts | {"shown": shown})
        if len(page.encode()) <= MOST_BYTES:
            break
    write_whole(directory / "index.html", page)
    return directory / "index.html"


def lesson_page(directory: Path, name: str) -> dict[str, Any]:
    """Write a lesson's executed notebook as HTML; return {"title", "page", "pictures": [(PNG in base64, alt text)]}.

    "page" is the HTML file's name in `directory`, the course run's folder; None if the notebook is missing or damaged.
    """
    import nbformat
    from nbconvert import HTMLExporter, TemplateExporter
    from nbconvert.filters import Highlight2HTML

    try:
        notebook = nbformat.read(directory / f"{name}.ipynb", as_version=4)
        text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        title = (re.findall(r"^#+ +(.+)$", text, re.MULTILINE) or [name])[0]
        shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
        for data in shown:
            if "text/html" in data:  # a static page shows the HTML, because widgets do not work there
                data.pop("application/vnd.jupyter.widget-view+json", None)
        figures = filter(None, (_FIGURE.fullmatch(data.get("text/html", "")) for data in shown))
        pictures = [(figure["png"], unescape(figure["alt"])) for figure in figures]
        layout = Path(__file__).with_name("lesson.html.j2").read_text(encoding="utf-8")
        # Outputs may be any HTML, so it protects nobody to clean text and code, which takes a third of the time.
        filters = {"clean_html": lambda text: text, "highlight_code": Highlight2HTML(pygments_lexer="ipython3")}
        exporter = HTMLExporter(raw_template=layout, filters=filters)
        # The exporter's own method would then parse the page only to add attributes: two thirds of the time.
        resources = exporter._init_resources({"metadata": {"name": name}})
        html, _ = TemplateExporter.from_notebook_node(exporter, notebook, resources)
    except (OSError, ValueError, LookupError, AttributeError):  # missing, or cut off when the lesson was killed
        return {"title": name, "page": None, "pictures": []}
    html = re.sub(r"<img (?![^>]*\balt=)", '<img alt="no description" ', _CELL.sub('<div tabindex="0" ', html))
    write_whole(directory / f"{name}.html", html)
    return {"title": title, "page": f"{name}.html", "pictures": pictures}


def _cases(data: dict[str, Any]) -> list[Case]:
    """Return the JUnit test cases of results.json (`data`), one per lesson and one per claim."""
    cases = []
    for lesson in data["lessons"]:
        outcome = {"ok": None, "failed": "failure"}.get(lesson["status"], "error")
        text = f"{lesson['status']}: {lesson['message']}"
        cases.append(("lessons", lesson["name"], lesson["seconds"], outcome, text))
    for claim in data["claims"]:
        outcome = "skipped" if claim["verdict"] == Verdict.NOT_TESTABLE else None
        text = f"{claim['verdict']}: {measured_text(claim)} ({claim.get('quantity')}). {claim.get('reason') or ''}"
        cases.append((claim["lesson"], claim["id"], 0, outcome if claim["as_expected"] else "failure", text))
    return cases


def change_cases(changes: Sequence[dict[str, Any]], fail_on: Iterable[str]) -> list[Case]:
    """Return the test cases of a comparison: one per axis ("memory", "verdict", "speed") and one per change.

    Args:
        changes: dictionaries with the fields of `compare.Change`.
        fail_on: the axes on which a change for the worse fails two test cases: that of the change and that of the axis.
    """
    cases = []
    for axis in AXES:
        selected = [change for change in changes if change["axis"] == axis]
        outcomes = ["failure" if change["worse"] and axis in fail_on else None for change in selected]
        text = f"{len(selected)} changed, {outcomes.count('failure')} for the worse"
        cases.append(("compare", axis, 0, "failure" if any(outcomes) else None, text))
        pairs = zip(selected, outcomes, strict=True)
        cases += [(f"compare.{axis}", change["id"], 0, outcome, change["text"]) for change, outcome in pairs]
    return cases


def junit(date: str, cases: Sequence[Case]) -> str:
    """Return test cases as JUnit XML, without characters that XML forbids.

    `date`: date of the course run, as ISO 8601; `cases`: a tuple (group, name, seconds, outcome,
    message) per test case; the outcome is "failure", "error" or "skipped", None if the case is ok.
    """
    count = Counter(outcome for *_, outcome, _ in cases)
    return _NO_XML.sub("", template("course/junit.xml.j2").render(date=date, cases=cases, count=count))
