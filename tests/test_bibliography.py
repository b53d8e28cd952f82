"""The bibliography has a dated source for each fact that lessons and ledger cite, and no source that is not cited.

Each row of the bibliography quotes a few words from the place that cites the source: names, values or parts of links.
It quotes no sentences, so that a lesson can be rewritten. The check is a pure function that returns the problems it
found; the test on bad input plants one problem of each kind.
"""

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
URL = re.compile(r"https?://[^\s\"'`<>()\[\]|\\]+[^\s\"'`<>()\[\]|\\.,;:]")
NUMBER = re.compile(r"(?:#|\b[Ii]ssue |\bPR |\b[Pp]ull request )(\d{2,6})\b")  # of an issue or a pull request


def texts():
    """Return {place: text} of all texts that cite sources.

    A place is "lesson NN", "instructor" (notebooks/INSTRUCTOR.md), or "NN id" for a claim of lesson NN.
    """
    found = {f"lesson {path.name[:2]}": path.read_text() for path in (NOTEBOOKS / "src").glob("*.py")}
    found["instructor"] = (NOTEBOOKS / "INSTRUCTOR.md").read_text()
    for claim in tomllib.loads((ROOT / "perf_helpers/course/claims.toml").read_text())["claim"]:
        if f"lesson {claim['lesson']}" in found:
            found[f"{claim['lesson']} {claim['id']}"] = json.dumps(claim, ensure_ascii=False).replace('\\"', '"')
    return {place: re.sub(r"\s+", " ", re.sub(r"\n# ?", " ", text)) for place, text in found.items()}


def entries(page):
    """Yield (lesson, words, places, source, date) for each row of the tables in the bibliography's text.

    lesson: its number, e.g. "05".
    words: short texts that occur at the cited places.
    places: e.g. "lesson", or the id of a claim in the ledger.
    source, date: the cited source and its date, as Markdown.
    """
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        for row in re.findall(r"^\| (.*) \|$", section, re.M)[1:]:  # the first is the table's head
            words, places, source, date, _ = row.split(" | ")
            yield section[:2], re.findall(r"`([^`]+)`", words), places.split(", "), source, date


def is_phrase(word, sources):
    """Return whether a quoted text has more than three words and is not the name of a source in the ledger.

    `word`: the quoted text; `sources`: the sources' names in the ledger.
    """
    return word not in sources and sum(bool(re.search("[A-Za-z]{2}", part)) for part in word.split()) > 3


def problems(page, texts):
    listed, found = list(entries(page)), []
    urls, threads = {*URL.findall(page)}, {*NUMBER.findall(page), *re.findall(r"/(\d+)\b", page)}
    quoted = {(lesson, word) for lesson, words, *_ in listed for word in words}
    sources = {*re.findall(r'"source": "([^"]+)"', " ".join(texts.values()))}  # names in the ledger, of any length
    for place, text in texts.items():
        found += [f"{place}: {url} is not on the page" for url in {*URL.findall(text)} - urls]
        found += [f"{place}: thread {number} is not on the page" for number in {*NUMBER.findall(text)} - threads]
        for guide in re.findall(r'"source": "([^"]+)"', text):
            if (place[:2], guide) not in quoted:
                found.append(f"{place}: its source, {guide}, is not on the page for lesson {place[:2]}")
    for lesson, words, places, source, date in listed:
        name = f"lesson {lesson}, {words}"
        if f"lesson {lesson}" not in texts:
            found.append(f"{name}: there is no such lesson")
        if not re.search(r"\[.+\]\(https?://\S+\)", source) or not re.fullmatch(r"\d{4}-\d\d(-\d\d)?", date):
            found.append(f"{name}: it needs a source with a link, and a date")
        named = {"lesson": f"lesson {lesson}", "instructor": "instructor"}
        named = {place: named.get(place, f"{lesson} {place}") for place in places}
        found += [f"{name}: no place is called {place!r}" for place, full in named.items() if full not in texts]
        cited = [texts[full] for full in named.values() if full in texts]
        orphans = [word for word in words if not any(word.lower() in text.lower() for text in cited)]
        found += [f"{name}: {word!r} is a phrase, pin a name or a value" for word in words if is_phrase(word, sources)]
        if orphans or not words:
            found.append(f"{name}: orphaned, {orphans or 'no words'} in {places}")
    return found if listed else ["the page has no entries"]


def test_every_fact_taken_on_trust_has_a_source_and_no_source_is_left_over():
    assert problems((NOTEBOOKS / "BIBLIOGRAPHY.md").read_text(), texts()) == []


GOOD = {"lesson 01": "since 2.0 ([#92731](https://x.org/92731)).", "01 a": '{"guide": {"source": "2023 guide"}}'}
PAGE = """## 01 memory

| words | in | source | date | found |
|---|---|---|---|---|
| `since 2.0`, `2023 guide` | lesson, a | [PR](https://x.org/92731) | 2023-01 | so it is |
"""


@pytest.mark.parametrize(
    ("page", "cited", "message"),
    [
        (PAGE, {"lesson 02": "see https://x.org/planted."}, "https://x.org/planted is not on the page"),
        (PAGE, {"lesson 02": "(pytorch#12345)"}, "thread 12345"),
        (PAGE, {"01 b": '{"guide": {"source": "2022 guide"}}'}, "its source, 2022 guide"),
        (PAGE.replace("2023-01 ", "lately "), {}, "a date"),
        (PAGE.replace("## 01", "## 09"), {}, "no such lesson"),
        (PAGE.replace("since 2.0", "orphaned, ['since 3.0']"), {}, "orphaned, ['since 3.0']"),
        (PAGE.replace("lesson, a", "lesson, b"), {}, "no place is called 'b'"),
        (PAGE.replace("`since 2.0`", "`freed since torch 2.0 by default`"), {}, "is a phrase"),
        ("", {}, "no entries"),
    ],
)
def test_what_is_missing_undated_or_orphaned_is_reported(page, cited, message):
    assert problems(PAGE, GOOD) == []
    rewritten = {place: text.replace("since 2.0", "Since 2.0, gradients are freed") for place, text in GOOD.items()}
    assert problems(PAGE, rewritten) == []
    assert any(message in problem for problem in problems(page, GOOD | cited))
