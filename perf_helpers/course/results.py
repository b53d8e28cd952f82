"""What a course run leaves in its folder: results.json read and compared, and its pages for people and for CI.

Notable: the pages are made from results.json and the executed notebooks alone, so `report` can make them again. A value
has moved only if it left the other run's interval; an exact count has no interval, and moves by more than rounding.
"""

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from perf_helpers.course.claims import Verdict
from perf_helpers.lab.store import write_whole
from perf_helpers.texts import number_text

SCHEMA = 1
VERDICTS = tuple(map(str, Verdict))
UNDECIDED = str(Verdict.NOT_TESTABLE)
ROUNDING = 0.001  # relative: less is a library's changed rounding, not a change of what is held
IDENTITY = ("name", "kind", "cpu_model", "cpu_cores", "gpus")  # of a machine: where these differ, so do the numbers
VOLATILE = {"memory_available_bytes", "shm_bytes", "free_bytes", "uuid", "index", "cuda_visible_devices"}


@dataclass(frozen=True, slots=True)
class Changes:
    """The difference of two course runs: `changes` are {kind, id, old, new, text}; the rest stands beside them."""

    old: str
    new: str
    warnings: list[str]
    differences: list[str]
    changes: list[dict]

    def to_dict(self) -> dict:
        return asdict(self)

    def to_text(self) -> str:
        lines = [f"old  {self.old}", f"new  {self.new}", *(f"warning: {warning}" for warning in self.warnings)]
        lines += [f"differs: {difference}" for difference in self.differences]
        return "\n".join([*lines, *([change["text"] for change in self.changes] or ["nothing changed"])])


def load_results(path) -> dict:
    """Read results.json (or that of a folder); ValueError says what is wrong with one that is damaged."""
    path = Path(path)
    path = path / "results.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"it has schema {data['schema']!r}, this version reads {SCHEMA}")
        fields = {
            "lessons": ("name", "status", "seconds", "message"),
            "claims": ("id", "lesson", "verdict", "as_expected", "value"),
        }
        for part, names in fields.items():
            [item[name] for item in data[part] for name in names]
        return data | {"date": str(data["date"]), "machine": dict(data["machine"]), "versions": dict(data["versions"])}
    except FileNotFoundError:
        raise ValueError(f"no results in {path}: name a results.json, or the folder that a course run wrote") from None
    except (ValueError, LookupError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not the results of a course ({what}): run the course again to get one") from None


def recorded(folder: str | Path) -> dict[str, dict]:
    """The newest measured course run of each machine that has a folder in `folder`, as <machine>/<date>.json.

    Returns:
        {the machine's folder: its results, with the file they were read from under "file"}. What was rehearsed is no
        measurement and left out.

    Raises:
        ValueError: a file that is not a course's results.
    """
    runs = [(path, load_results(path)) for path in sorted(Path(folder).glob("*/*.json"))]
    return {path.parent.name: data | {"file": path} for path, data in runs if not data["machine"].get("rehearsed")}


def problems(data) -> list[str]:
    """Return what keeps a run (the content of results.json) from being ok, one line each."""
    lines = [f"{x['name']} {x['status']}: {x['message']}" for x in data["lessons"] if x["status"] != "ok"]
    for claim in data["claims"]:
        if not claim["as_expected"]:
            line = f"{claim['id']}: {claim['verdict']}, expected {' or '.join(claim.get('expected') or ['nothing'])}"
            why = claim["verdict"] == UNDECIDED and claim.get("reason")
            lines.append(f"{line} ({why})" if why else line)
    if all(claim["verdict"] == UNDECIDED for claim in data["claims"]):
        lines.append("no claim was decided")
    return lines


def compare(old_results, new_results) -> Changes:
    """Name every verdict that changed and every value that moved beyond its noise, between two runs (dicts or paths).

    A value has moved if each lies outside the other's interval and they differ by more than 0.1 %: an exact count by
    that alone. ValueError for a damaged file.
    """
    old, new = (data if isinstance(data, dict) else load_results(data) for data in (old_results, new_results))
    changes = []

    def note(kind, name, before, after):
        text = f"{kind:11} {name}: {before or 'absent'} -> {after or 'absent'}"
        changes.append({"kind": kind, "id": name, "old": before, "new": after, "text": text})

    for kind, part, key, field in (("lesson", "lessons", "name", "status"), ("verdict", "claims", "id", "verdict")):
        before, after = ({item[key]: item for item in data[part]} for data in (old, new))
        for name in dict.fromkeys([*before, *after]):
            a, b = before.get(name), after.get(name)
            if not a or not b:
                note("disappeared" if a else "appeared", name, a and a[field], b and b[field])
                continue
            if a[field] != b[field]:
                note(kind, name, a[field], b[field])
            if part == "claims" and _moved(a, b):
                note("value", name, measured_text(a), measured_text(b))
    one, other = ({key: data["machine"].get(key) for key in IDENTITY} for data in (old, new))
    warnings = ["the machines differ: their numbers are not comparable"] if _differences(one, other) else []
    if old.get("profile") != new.get("profile"):
        warnings.append(f"the profiles differ ({old.get('profile')}, {new.get('profile')}): so do the sizes measured")
    return Changes(
        old=f"{old['date']} · {old['machine'].get('name')}",
        new=f"{new['date']} · {new['machine'].get('name')}",
        warnings=warnings,
        differences=_differences(old["machine"], new["machine"]) + _differences(old["versions"], new["versions"]),
        changes=changes,
    )


def _moved(old, new):
    a, b = old["value"], new["value"]
    if a is None or b is None:
        return a != b
    (low, high), (new_low, new_high) = old.get("interval") or (a, a), new.get("interval") or (b, b)
    return not low <= b <= high and not new_low <= a <= new_high and abs(a - b) > ROUNDING * max(abs(a), abs(b))


def _differences(old, new):
    old, new = _flat(old), _flat(new)
    return [f"{k}: {old.get(k)} -> {new.get(k)}" for k in dict.fromkeys([*old, *new]) if old.get(k) != new.get(k)]


def _flat(value, name=""):
    """Return {dotted name: value} of what lasts."""
    if not isinstance(value, dict | list | tuple):
        return {name: value}
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, x in pairs if key not in VOLATILE for k, v in _flat(x, f"{name}.{key}".strip(".")).items()}


def measured_text(claim: dict) -> str:
    """What a claim measured, with its interval if that has a width: "0.58 [0.55, 0.61]", or "not measured"."""
    low, high = claim.get("interval") or (None, None)
    return number_text(claim["value"]) + (f" [{number_text(low)}, {number_text(high)}]" if low != high else "")


def report(directory) -> Path:
    """Rebuild index.html, junit.xml and the lessons' pages from a folder's results.json and executed notebooks."""
    import jinja2

    directory = Path(directory)
    data = load_results(directory)
    write_whole(directory / "junit.xml", _junit(data))
    lessons = [lesson | _lesson_page(directory, lesson["name"]) for lesson in data["lessons"]]
    for lesson in lessons:
        lesson["claims"] = [claim for claim in data["claims"] if claim["lesson"] == lesson["name"]]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"measured": measured_text, "number": number_text}
    template = environment.from_string(_template("report"))
    count = Counter(claim["verdict"] for claim in data["claims"])
    facts = {"lessons": lessons, "problems": problems(data), "count": count, "verdicts": VERDICTS}
    write_whole(directory / "index.html", template.render(data | facts))
    return directory / "index.html"


def _lesson_page(directory, name):
    """Write a lesson's executed notebook as HTML; return its title, page and pictures [(PNG in base64, alt text)]."""
    import nbformat
    from nbconvert import HTMLExporter

    try:
        notebook = nbformat.read(directory / f"{name}.ipynb", as_version=4)
        _show_what_needs_no_kernel(notebook)
        exporter = HTMLExporter(raw_template=_template("lesson"))
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


def _show_what_needs_no_kernel(notebook):
    """Where an output is a widget and text, keep the text: on a page the widget could only be looked at."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text/html" in (data := output.get("data", {})):
                data.pop("application/vnd.jupyter.widget-view+json", None)


def _junit(data):
    """One test case a lesson and one a claim: what is not as expected fails, what is not testable here is skipped."""
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", name="perf-helpers course", timestamp=data["date"])

    def case(group, name, seconds, outcome, text):
        element = ElementTree.SubElement(suite, "testcase", classname=group, name=name, time=str(seconds))
        text = re.sub(r"\x1b\[[0-9;]*m|[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "", text)  # XML forbids
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


def _template(name):
    return Path(__file__).with_name(f"{name}.html.j2").read_text(encoding="utf-8")
