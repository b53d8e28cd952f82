"""Rehearse the guides' table on other cards, and keep the memory that torch's own allocator reports.

python benchmarks/rehearse.py                            the ten rows on an A100, an H100 and a T4
python benchmarks/rehearse.py --course build/rehearsal   also the memory claims of a rehearsed course
python benchmarks/build.py                               make the tables in docs/rehearsal.md and results/README.md

Each card has a file results/rehearsed/<card>/<date>.json, whose format differs from that of measured runs. Bytes are
exact; there are no times. The set-up is that of the guides: bert-large, 512 sequences of 512 tokens.
"""

import argparse
import sys
from pathlib import Path

import recipes
from runner import RESULTS, carry_modules, now, rehearsing, write_record

from perf_helpers.course import ledger
from perf_helpers.course.results import load_results
from trainmem.core import hardware
from trainmem.core.task import Task
from trainmem.records import Run
from trainmem.rehearsal import CARDS, Card

REHEARSED = RESULTS / "rehearsed"
carry_modules()
WANTED = ("a100", "h100", "t4")
TASK = Task("bert-large-uncased", seq_len=512, dataset_size=512)


def record(card: Card, course: Path | None = None) -> Path:
    """Rehearse the guides' ten recipes on a card, write results/rehearsed/<card>/<date>.json and return its path.

    `course`: folder of a course run that was rehearsed on the card; its claims are added to the file.

    Raises:
        RuntimeError: this machine cannot rehearse, or a recipe failed for another reason than memory.
        ValueError: the course is damaged, or was not rehearsed on that card.
    """
    rows = []
    with rehearsing(card) as lab:
        for name, (setup, megabytes) in recipes.ROWS.items():
            options = {"name": name, "task": TASK, "measure": "memory"}
            run = lab.run(setup, **options) if callable(setup) else lab.train(**options, **setup)
            rows.append(_row(run) | {"guide_mb": megabytes})
            print(f"{card.name}  {run}", file=sys.stderr, flush=True)
    content = {
        "rehearsed": True,
        "what": "memory by torch's own CUDA allocator on a stand-in for the GPU; nothing was computed, nothing timed",
        "card": card.name,
        "capability": card.capability,
        "memory_bytes": card.memory_bytes,
        "assumed_context_bytes": card.context_bytes,
        "host": hardware.describe().name,
        "versions": lab.versions,
        "date": now(),
        "task": TASK.to_dict(),
        "guide": recipes.GUIDE,
        "rows": rows,
        "course": course and decided(course, card),
    }
    target = REHEARSED / card.name.lower().replace(" ", "-") / f"{content['date'][:10]}.json"
    write_record(target, content)
    return target


def _row(run: Run) -> dict:
    """Return the record of a run: its name, arguments, status and message, and "peak_bytes", "reserved_bytes",
    "peak_phase" and "breakdown", which are None if the run did not fit in memory.

    Raises RuntimeError for any failure but out of memory.
    """
    if run.status not in ("ok", "out of memory"):
        raise RuntimeError(f"{run.name}: {run.status}, {run.message}")
    row = {"name": run.name, "arguments": run.arguments, "status": run.status, "message": run.message}
    fields = ("peak_bytes", "reserved_bytes", "peak_phase", "breakdown")
    return row | {name: getattr(run.memory, name) if run.memory else None for name in fields}


def decided(course: Path, card: Card) -> dict:
    """Return the claims about memory that a rehearsed course decided: {"profile", "date", "versions", "claims"}.

    Raises:
        ValueError: results.json is damaged, or the course was not rehearsed on this card.
    """
    data = load_results(course)
    if not data["machine"].get("rehearsed") or data["machine"]["name"] != f"rehearsed {card.name}":
        raise ValueError(f"{course} is a course of {data['machine']['name']}, not rehearsed on {card.name}")
    rows, undecided = ledger.load(), ledger.Verdict.NOT_TESTABLE
    found = [claim for claim in data["claims"] if rows[claim["id"]].decided_by == "memory"]
    fields = ("id", "lesson", "verdict", "as_expected", "value", "interval", "quantity", "note")
    taken = [{name: claim[name] for name in fields} for claim in found if claim["verdict"] != undecided]
    return {name: data[name] for name in ("profile", "date", "versions")} | {"claims": taken}


def main(arguments=None) -> int:
    """Rehearse the cards; return the exit code.

    `arguments`: words of the command line; None: `sys.argv[1:]`.
    """
    parser = argparse.ArgumentParser(description="Rehearse the guides' table on cards that are not here.")
    parser.add_argument("--cards", nargs="+", default=WANTED, choices=CARDS, metavar="CARD", help=", ".join(CARDS))
    parser.add_argument("--course", type=Path, metavar="DIR", help="folder that `make rehearse` has written")
    options = parser.parse_args(arguments)
    for name in options.cards:
        print(record(CARDS[name], options.course and options.course / name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
