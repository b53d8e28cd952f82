"""Read all recorded results of each claim: machine, date, library versions, value and verdict."""

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
    """One recorded result of a claim: machine, date, libraries, and the claim's row in the results."""

    machine: str  # with ", rehearsed" or ", library matrix" if it is not from a course run
    date: str
    libraries: str
    row: dict[str, Any]  # the claim's row, as in results.json


@dataclass(frozen=True, slots=True)
class History:
    """Hold the recorded results of the claims in two forms: each machine's newest, and those of all dates."""

    now: dict[str, list[tuple[str, dict[str, Any]]]]  # {claim id: newest (machine and date, row) of each machine}
    before: dict[str, list[Entry]]  # {claim id: all results, the oldest first}
    machines: list[str]  # all machines of `now`, with dates
    executed: tuple[str, Path]  # the machine (in words) and folder of the newest executed lessons

    @classmethod
    def read(cls) -> "History":
        """Read the results of all claims from results/: course runs, rehearsals, and the library matrix."""
        runs = course_runs(RESULTS)
        newest = {data["file"].parent: data for data in runs}
        now, before, machines = defaultdict(list), defaultdict(list), []
        measured = ((data["machine"]["name"], data, data is newest[data["file"].parent]) for data in runs)
        for name, data, is_newest in itertools.chain(measured, _rehearsed()):
            if is_newest:
                machines.append(f"{name}, {data['date'][:10]}")
            for row in decided_again(data["claims"]):
                before[row["id"]].append(Entry(name, data["date"][:10], _versions_text(data["versions"]), row))
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
    """Yield (card, content, True) of the newest rehearsed course run of each card; True marks it as rehearsed."""
    for folder in sorted(RESULTS.glob("rehearsed/*")):
        *_, path = sorted(folder.glob("*.json"))
        data = json.loads(path.read_text("utf-8"))
        if course := data["course"]:
            yield f"{named(data['card']).name}, rehearsed", course | {"versions": data["versions"]}, True


def _versions_text(versions: dict[str, str]) -> str:
    """Return, as text, the libraries that affect results with their versions; `versions` is {package: version}."""
    return ", ".join(f"{each} {versions[each]}" for each in LIBRARIES if versions.get(each))


def _of_matrix():
    """Yield (claim id, entry) for each result of a claim in the library matrix.

    An `Entry` has the machine, the date, the libraries and the result.
    """
    matrix = json.loads((RESULTS / "matrix.json").read_text("utf-8"))
    for of in matrix["sets"]:
        libraries = _versions_text(of["packages"])
        for id, sides in matrix["claims"].items():
            if row := sides.get(of["name"]):
                yield id, Entry(f"{matrix['machine']}, library matrix", of["date"][:10], libraries, row)
