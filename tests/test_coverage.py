"""docs/coverage.md lists every statement of four documents: the guides of 2022 and 2023, the index of 2022 and 2024.

Each claim that the page names must exist, and the page must name each claim about these documents. A pure function
returns the problems of a page; the test on bad input plants one problem of each kind.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from perf_helpers.course import ledger

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "coverage.md").read_text("utf-8")
# Statements of each document, counted when the page was made of the documents: a row that gets lost is missed.
ROWS = {"2022 index": 23, "2022 guide": 165, "2024 index": 25, "2023 guide": 157}


def sections(page):
    """Return {document: rows of its table}; a row is [statement, ids of the claims that decide it, remark].

    `page`: the page's text.
    """
    found = {}
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        title, _, text = section.partition("\n")
        rows = [[cell.strip() for cell in row.split("|")] for row in re.findall(r"^\|(.*)\|$", text, re.M)[2:]]
        found[title.strip()] = rows
    return found


def problems(page, claims, counts):
    found, listed = [], sections(page)
    for document, rows in listed.items():
        if counts.get(document) != len(rows):
            found.append(f"{document}: {len(rows)} rows; {counts.get(document)} were counted")
        for row in rows:
            if len(row) != 3 or not row[0]:
                found.append(f"{document}: {row} has not three cells with a statement")
                continue
            statement, ids, more = row
            named, beside = (re.findall(r"`([\w-]+)`", cell) for cell in (ids, more))
            if re.sub(r"`[\w-]+`", "", ids).strip():
                found.append(f"{document}, {statement}: {ids} are not names of claims alone")
            found += [
                f"{document}, {statement}: {id} is not in the ledger" for id in [*named, *beside] if id not in claims
            ]
            if not named and not more:
                found.append(f"{document}, {statement}: neither a claim nor a reason")
            texts = [id for id in named if id in claims and claims[id].where == "text"]
            if named and len(texts) == len(named) and "*text*" not in more:
                found.append(f"{document}, {statement}: is text, and is not marked so")
        listed_ids = {id for row in rows for id in re.findall(r"`([\w-]+)`", row[1] if len(row) == 3 else "")}
        owned = {claim.id for claim in claims.values() if claim.guide.source == document}
        found += [f"{document}: its claim {id} stands nowhere" for id in sorted(owned - listed_ids)]
    found += [f"{document}: not on the page" for document in counts if document not in listed]
    return found


def test_every_statement_has_a_claim_a_text_or_a_reason_and_every_claim_its_place():
    assert problems(PAGE, ledger.load(), ROWS) == []


def claim(id, source="2022 index", where="any"):
    return SimpleNamespace(id=id, guide=SimpleNamespace(source=source), where=where)


CLAIMS = {each.id: each for each in (claim("a"), claim("b", "TPU page"), claim("t", where="text"))}
GOOD = """# Page

## 2022 index

| statement | claims | what else, or why not |
|---|---|---|
| It is fast | `a` `b` | |
| It is sold | `t` | *text* |
| It is nice | | a judgement |
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("`b`", "`c`", "c is not in the ledger"),
        ("a judgement", "as `d`", "d is not in the ledger"),
        ("`a` `b`", "`b`", "its claim a stands nowhere"),
        ("a judgement", "", "neither a claim nor a reason"),
        ("*text*", "", "is text, and is not marked so"),
        ("| It is nice | | a judgement |\n", "", "2 rows; 3 were counted"),
        ("`a` `b`", "`a` and b", "are not names of claims alone"),
        ("| It is fast | `a`", "| `a`", "has not three cells"),
        ("## 2022 index", "## 2022 indx", "2022 index: not on the page"),
    ],
)
def test_what_is_missing_or_wrong_is_reported(old, new, message):
    counts = {"2022 index": 3}
    assert problems(GOOD, CLAIMS, counts) == []
    assert old in GOOD
    assert any(message in problem for problem in problems(GOOD.replace(old, new), CLAIMS, counts))
