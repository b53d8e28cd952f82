"""Make the section of results/README.md about the library matrix, from results/matrix.json.

A library set is a set of library versions. Each difference is listed with the two successive library sets between which
it appears.
"""

import re
import tomllib
from pathlib import Path

from tables import MIB, table, verdict

from perf_helpers.course.ledger import load

SETS = Path(__file__).with_name("matrix.toml")
LIBRARIES = ("torch", "transformers", "accelerate", "bitsandbytes", "datasets", "tokenizers", "numpy", "ipywidgets")


def section(record: dict) -> str:
    """Return results/README.md's section about a record of `benchmarks/matrix.py`, without the section's heading."""
    names = ("lessons " if len(record["lessons"]) > 1 else "lesson ") + ", ".join(n[:2] for n in record["lessons"])
    head = f"{record['what'].capitalize()}: {names}, profile {record['profile']}."
    about = f"{record['machine']}, Python {record['python']}, {record['date'][:10]}."
    parts = [f"{head} {about} {record['note']}".strip(), _sets(record), *_trouble(record), _claims(record)]
    return "\n\n".join([*parts, _memory(record), _rehearsed(record), *_causes(record)])


def changed(record: dict) -> set[str]:
    """Return the ids of claims, runs, lessons and rehearsed trainings that differ between two successive library sets.

    `record`: the content of results/matrix.json.
    """
    return {change["id"] for pair in record["between"] for change in pair["changes"] + (pair["rehearsed"] or [])}


def causes() -> list[dict]:
    """Return the known causes of differences between library sets, which people wrote into matrix.toml.

    Each is {"changes": [ids of the claims, runs and lessons that changed], "says": the cause in words}.
    """
    return tomllib.loads(SETS.read_text(encoding="utf-8")).get("cause", [])


def _causes(record: dict) -> list[str]:
    """Return the known causes of differences in the record (results/matrix.json) as Markdown; empty without causes."""
    lines = []
    for cause in causes():
        if names := [id.removeprefix("rehearsal/") for id in cause["changes"] if id in changed(record)]:
            lines.append(f"- {'; '.join(names)}: {cause['says']}")
    return ["Why, where it was found out:\n\n" + "\n".join(lines)] if lines else []


def _sets(record: dict) -> str:
    """Return a table with a column per library set of the record (results/matrix.json).

    Its lines: versions of libraries, number of lessons that ran, number of claims with an expected verdict, number of
    trainings whose rehearsal succeeded, date.
    """
    sets = record["sets"]
    rows = [["", *(row["what"] for row in sets)]]
    rows += [[name, *(row["packages"].get(name, "") for row in sets)] for name in LIBRARIES]
    rows.append(["packages in all", *(str(len(row["packages"]) or "") for row in sets)])
    rows.append(["lessons that ran", *(_lessons(row) for row in sets)])
    rows.append(["claims as expected", *(_expected(record, row["name"]) for row in sets)])
    rows.append(["trainings rehearsed", *(_trainings(record, row) for row in sets)])
    rows.append(["date", *(row["date"][:10] if row["status"] == "ok" else "" for row in sets)])
    return table(["", *(row["name"] for row in sets)], rows)


def _lessons(row: dict) -> str:
    if row["status"] != "ok":
        return row["status"]
    return f"{sum(lesson['status'] == 'ok' for lesson in row['lessons'].values())} of {len(row['lessons'])}"


def _expected(record: dict, name: str) -> str:
    text = [sides[name] for sides in record["claims"].values() if name in sides]
    return f"{sum(claim['as_expected'] for claim in text)} of {len(text)}" if text else ""


def _trainings(record: dict, row: dict) -> str:
    found = [sides[row["name"]] for sides in record["rehearsed"].values() if row["name"] in sides]
    return f"{sum('peak_bytes' in memory for memory in found)} of {len(found)}" if found else ""


def _trouble(record: dict) -> list[str]:
    """Return, as Markdown, a list of everything in the record (results/matrix.json) that did not run, with reasons.

    The list is empty if everything ran.
    """
    lines = []
    for row in record["sets"]:
        if row["status"] != "ok":
            lines.append(f"- **{row['name']}** {row['status']}: {row['message']}")
        if row["not_rehearsed"]:
            lines.append(f"- **{row['name']}** not rehearsed: {row['not_rehearsed']}")
        ended = {id: sides.get(row["name"], {}) for id, sides in record["rehearsed"].items()}
        for id, run in ended.items():
            if run.get("status"):
                lines.append(f"- **{row['name']}**, {id} {run['status']}: {run['message']}")
        failed = ((name, lesson) for name, lesson in row["lessons"].items() if lesson["status"] != "ok")
        lines += [
            f"- **{row['name']}**, lesson {name} {lesson['status']}: {lesson['message']}" for name, lesson in failed
        ]
    return ["\n".join(lines)] if lines else []


def _claims(record: dict) -> str:
    """Return the number of claims that are the same in all library sets, and a table of the other claims.

    A claim is the same if its verdict never changes from one set to the next, and its value only by rounding and noise.
    `record`: the content of results/matrix.json.
    """
    moved = changed(record) & record["claims"].keys()
    ledger, same = load(), len(record["claims"]) - len(moved)
    text = (
        f"{same} of {len(record['claims'])} claims have the same verdict, and the same value within its noise, in all."
    )
    if not moved:
        return text
    names, rows = [row["name"] for row in record["sets"]], []
    for id in sorted(moved, key=lambda id: (record["claims"][id]["lesson"], id)):
        sides = record["claims"][id]
        by = ledger[id].decided_by if id in ledger else ""
        rows.append(
            [sides["lesson"][:2], f"`{id}`", by or "", *(verdict(sides.get(name), "not run") for name in names)]
        )
    about = "The table has the others. A claim about time was timed once in each set, so it may differ by chance."
    return "\n\n".join([f"{text} {about}", table(["lesson", "claim", "decided by", *names], rows)])


def _memory(record: dict) -> str:
    """Return a table of the record's runs (results/matrix.json) whose memory differs between two library sets: bytes by
    category, and the operation at the peak.
    """
    compared, moved = record["runs"], _moved(record, "changes")
    if not moved:
        return f"Memory: no byte of {compared} runs differs between any two sets that ran." if compared else "No run."
    text = (
        f"Memory: {compared - len(record['memory'])} of {compared} runs take the same bytes in every set. The others:"
    )
    return "\n\n".join([text, table(["from", "to", "run", "what moved"], moved)])


def _rehearsed(record: dict) -> str:
    """Return tables of the record's rehearsed trainings (results/matrix.json): allocated and reserved MiB with each
    library set, and the differences between successive sets.
    """
    if not record["rehearsed"]:
        return "Rehearsed: no set has torch's CUDA build, or none could be rehearsed."
    names, rows = [row["name"] for row in record["sets"]], []
    for id, sides in record["rehearsed"].items():
        rows.append([id.partition("/")[2], *(_allocated(sides.get(name)) for name in names)])
    text = "Rehearsed, MiB that torch's own allocator allocates / reserves:"
    parts = [text, table(["training", *names], rows)]
    if moved := _moved(record, "rehearsed"):
        parts += ["Moved:", table(["from", "to", "training", "what moved"], moved)]
    else:
        parts.append("No byte of them differs between any two sets that were rehearsed.")
    return "\n\n".join(parts)


def _moved(record: dict, which: str) -> list[list[str]]:
    """Return rows [library set, next library set, runs, difference] for the runs whose memory or status changed.

    Runs with the same difference are joined in one row. A joined row omits the sizes and the operations at the peak;
    the record has them.

    `record`: the content of results/matrix.json; `which`: "changes" for runs of the lessons, "rehearsed" for rehearsed
    trainings.
    """
    groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for pair in record["between"]:
        for change in pair[which] or ():
            if change["kind"] in ("memory", "run"):
                text = change["text"].partition(f"{change['id']}: ")[2]
                bare = re.sub(r"[\d.,]+ \w+ -> [\d.,]+ \w+ |; at [^;]*?\((?:forward|backward|step)\)", "", text)
                name = change["id"].removeprefix("rehearsal/")
                groups.setdefault((pair["old"], pair["new"], bare), []).append((name, text))
    rows = []
    for (old, new, bare), found in groups.items():
        names = "; ".join(name for name, _ in found)
        rows.append([old, new, names, bare if len(found) > 1 else found[0][1]])
    return rows


def _allocated(memory: dict | None) -> str:
    if memory is None:
        return "not rehearsed"
    if "status" in memory:
        return memory["status"]
    return " / ".join(f"{memory[name] / MIB:,.2f}" for name in ("peak_bytes", "reserved_bytes"))
