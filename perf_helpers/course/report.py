"""The pages of a course run: index.html and one page a lesson for people, junit.xml for CI.

Notable: they are made from results.json and the executed notebooks alone, so they can be made again.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from perf_helpers.course.results import UNDECIDED, VERDICTS, load_results, measured_text, problems
from perf_helpers.course.templates import FOLDER, template
from perf_helpers.lab.store import write_whole

# What a terminal may print and XML forbids: colours, and characters that are none.
_NO_XML = re.compile(r"\x1b\[[0-9;]*m|[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def report(directory: str | Path) -> Path:
    """Make index.html, junit.xml and the lessons' pages from a folder's results.json and executed notebooks.

    Returns:
        The path of index.html.

    Raises:
        ValueError: no results.json in the folder, or a damaged one.
    """
    directory = Path(directory)
    data = load_results(directory)
    write_whole(directory / "junit.xml", _junit(data))
    lessons = [lesson | _lesson_page(directory, lesson["name"]) for lesson in data["lessons"]]
    for lesson in lessons:
        lesson["claims"] = [claim for claim in data["claims"] if claim["lesson"] == lesson["name"]]
    count = Counter(claim["verdict"] for claim in data["claims"])
    facts = {"lessons": lessons, "problems": problems(data), "count": count, "verdicts": VERDICTS}
    write_whole(directory / "index.html", template("report.html.j2").render(data | facts))
    return directory / "index.html"


def _lesson_page(directory: Path, name: str) -> dict[str, Any]:
    """Write a lesson's executed notebook as HTML; return its title, page and pictures [(PNG in base64, alt text)]."""
    import nbformat
    from nbconvert import HTMLExporter

    try:
        notebook = nbformat.read(directory / f"{name}.ipynb", as_version=4)
        _show_what_needs_no_kernel(notebook)
        exporter = HTMLExporter(raw_template=(FOLDER / "lesson.html.j2").read_text(encoding="utf-8"))
        html, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": name}})
    except (OSError, ValueError, LookupError, AttributeError):  # not there, or cut off when its lesson was killed
        return {"title": name, "page": None, "pictures": []}
    write_whole(directory / f"{name}.html", html)
    title, heading, pictures = "", name, []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (headings := re.findall(r"^#+ +(.+)$", cell.source, re.MULTILINE)):
            heading, title = headings[-1], title or headings[0]
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                pictures.append((png.replace("\n", ""), f"Picture of lesson {name}: {heading}"))
    return {"title": title or name, "page": f"{name}.html", "pictures": pictures}


def _show_what_needs_no_kernel(notebook) -> None:
    """Where an output is a widget and text, keep the text: on a page the widget could only be looked at."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text/html" in (data := output.get("data", {})):
                data.pop("application/vnd.jupyter.widget-view+json", None)


def _junit(data: dict[str, Any]) -> str:
    """One test case a lesson and one a claim: what is not as expected fails, what is not testable here is skipped."""
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", name="perf-helpers course", timestamp=data["date"])

    def case(group: str, name: str, seconds: float, outcome: str | None, text: str) -> None:
        element = ElementTree.SubElement(suite, "testcase", classname=group, name=name, time=str(seconds))
        text = _NO_XML.sub("", text)
        if outcome:
            ElementTree.SubElement(element, outcome, message=text)
        else:
            ElementTree.SubElement(element, "system-out").text = text

    for lesson in data["lessons"]:
        outcome = {"ok": None, "failed": "failure"}.get(lesson["status"], "error")
        case("lessons", lesson["name"], lesson["seconds"], outcome, f"{lesson['status']}: {lesson['message']}")
    for claim in data["claims"]:
        outcome = "skipped" if claim["verdict"] == UNDECIDED else None
        text = f"{claim['verdict']}: {measured_text(claim)} ({claim.get('quantity')}). {claim.get('reason') or ''}"
        case(claim["lesson"], claim["id"], 0, outcome if claim["as_expected"] else "failure", text)
    for attribute, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(len(list(suite.iter(tag)))))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"
