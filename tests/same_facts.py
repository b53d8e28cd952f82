"""Compare the facts of two versions of a text file: numbers, links, code and claim ids.

    python tests/same_facts.py HEAD:docs/trust.md docs/trust.md
    python tests/same_facts.py v1:README.md README.md --allow 140 docs/words.md

OLD and NEW are paths, or REVISION:PATH as `git show` takes them. A fact that only one of the two has is printed with
the version that has it, unless `--allow` names the fact. Exit code 1 if a fact is printed. Run it after an edit that
should change the words alone. Order and repetition are not compared, so an exchanged pair of numbers is not
found.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

LEDGER = Path(__file__).resolve().parents[1] / "perf_helpers/course/claims.toml"
LINK = re.compile(
    r"\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)?)\)|\b(?:src|href)=\"([^\"]+)\"|(https?://[^\s\"'`<>()\[\]|]+)"
)
NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,:-]?\d+)*")  # also 1,800, 2.13.0, 2026-11-22 and 09:30
NAMES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
WORDS = {word: str(number) for number, word in enumerate(NAMES, 2)}  # "one" is more often a pronoun than a number


def facts(text: str, claim_ids: set[str]) -> dict[str, set[str]]:
    """Return {kind: facts}, of the kinds "number", "link", "code" and "claim", of a text in Markdown.

    `claim_ids`: the ids that count as claims.
    """
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    prose = re.sub(r"\n(?!\n)[ #]*", " ", prose)  # a code span may be wrapped
    links = {"".join(found).rstrip(".,;:") for found in LINK.findall(prose)}
    code = {
        re.split(" {2,}", line.strip())[0]  # what follows two blanks is a comment
        for block in fenced
        for line in block.splitlines()
        if line.strip()
    }
    code |= {span.strip() for span in re.findall(r"`([^`]+)`", prose)}
    words = re.sub(r"https?://[^\s\"'`<>()\[\]|]+|\]\([^()\s]+\)", " ", prose)
    numbers = {found.replace(",", "") for found in NUMBER.findall(words)}
    numbers |= {WORDS[word] for word in re.findall(r"[a-z]+", words.lower()) if word in WORDS}
    return {
        "link": links,
        "code": code,
        "number": numbers,
        "claim": claim_ids & {*re.findall(r"[\w-]+", prose)},
    }


def differences(old: str, new: str, claim_ids: set[str]) -> list[tuple[str, str, str]]:
    """Return (text, kind, fact) for each fact that only one of two texts has; text names this one: "old" or "new".

    `old`, `new`: the texts; `claim_ids`: ids of the claims; each occurrence of an id is a fact.
    """
    before, after = facts(old, claim_ids), facts(new, claim_ids)
    found = [("old", kind, fact) for kind in before for fact in sorted(before[kind] - after[kind])]
    return found + [("new", kind, fact) for kind in after for fact in sorted(after[kind] - before[kind])]


def read(source: str) -> str:
    """Return the text of `source`, a path or REVISION:PATH as `git show` takes it."""
    if Path(source).exists():
        return Path(source).read_text("utf-8")
    done = subprocess.run(["git", "show", source], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{source} is neither a file nor REVISION:PATH: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compare the facts of two versions of a text file.")
    parser.add_argument("old", help="path or REVISION:PATH, e.g. HEAD:docs/trust.md")
    parser.add_argument("new", help="path or REVISION:PATH, e.g. docs/trust.md")
    parser.add_argument("--allow", nargs="+", default=[], metavar="FACT", help="facts that may differ")
    options = parser.parse_args()
    ids = {claim["id"] for claim in tomllib.loads(LEDGER.read_text("utf-8"))["claim"]}
    found = [each for each in differences(read(options.old), read(options.new), ids) if each[2] not in options.allow]
    for version, kind, fact in found:
        print(f"only in {version}, {kind}: {fact}")
    sys.exit(bool(found))
