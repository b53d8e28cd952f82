"""What was recorded of each claim: on which machine, when, with which libraries, and what it came to."""

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from perf_helpers.course.results import course_runs, decided_again
from trainmem.cards import named

RESULTS = Path(__file__).resolve().parents[1] / "results"
LIBRARIES = ("torch", "transformers", "accelerate", "bitsandbytes")


class Entry(NamedTuple):
    """One outcome of a claim."""

    machine: str  # with how it was measured, where it was not simply executed
    date: str
    libraries: str
    row: dict[str, Any]  # of the claim, as in results.json


@dataclass(frozen=True, slots=True)
class History:
    """All records.

    `now`: by claim, the newest of each machine, as (machine and date, row); `before`: by claim, all, oldest first.
    """

    now: dict[str, list[tuple[str, dict[str, Any]]]]
    before: dict[str, list[Entry]]
    machines: list[str]  # those of `now`
    executed: tuple[str, Path]  # the newest machine whose executed lessons are kept, in words, and their folder

    @classmethod
    def read(cls) -> "History":
        """What results/ has: course runs, rehearsed ones, and those of the library matrix."""
        runs = course_runs(RESULTS)
        newest = {data["file"].parent: data for data in runs}
        now, before, machines = defaultdict(list), defaultdict(list), []
        measured = ((data["machine"]["name"], data, data is newest[data["file"].parent]) for data in runs)
        for name, data, is_newest in itertools.chain(measured, _rehearsed()):
            if is_newest:
                machines.append(f"{name}, {data['date'][:10]}")
            for row in decided_again(data["claims"]):
                before[row["id"]].append(Entry(name, data["date"][:10], _told(data["versions"]), row))
                if is_newest:
                    now[row["id"]].append((machines[-1], row))
        for id, entry in _of_matrix():
            before[id].append(entry)
        for entries in before.values():
            entries.sort(key=lambda entry: entry.date)
        kept = [data for folder, data in newest.items() if (folder / "lessons").is_dir()]
        data = max(kept, key=lambda data: data["date"])
        libraries = ", ".join(f"{each} {data['versions'][each]}" for each in LIBRARIES[:2])
        executed = f"{data['machine']['name']}, {data['date'][:10]}, {libraries}", data["file"].parent / "lessons"
        return cls(now, before, machines, executed)


def _rehearsed():
    """(card, content, True) of the newest rehearsed course of each card that has one."""
    for folder in sorted(RESULTS.glob("rehearsed/*")):
        *_, path = sorted(folder.glob("*.json"))
        data = json.loads(path.read_text("utf-8"))
        if course := data["course"]:
            yield f"{named(data['card']).name}, rehearsed", course | {"versions": data["versions"]}, True


def _told(versions: dict[str, str]) -> str:
    """The libraries that bear on a claim, with their versions."""
    return ", ".join(f"{each} {versions[each]}" for each in LIBRARIES if versions.get(each))


def _of_matrix():
    """(claim, entry) of the library matrix."""
    matrix = json.loads((RESULTS / "matrix.json").read_text("utf-8"))
    for of in matrix["sets"]:
        libraries = _told(of["packages"])
        for id, sides in matrix["claims"].items():
            if row := sides.get(of["name"]):
                yield id, Entry(f"{matrix['machine']}, library matrix", of["date"][:10], libraries, row)
