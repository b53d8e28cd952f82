"""results.json: what a course run leaves for machines, checked when it is read.

{"schema", "date", "machine", "versions", "profile", "strict", "lessons", "claims", "runs"}: `NEEDED` says what a lesson
has at least, and a claim, which is a row of `claims.Decision.to_dict`. A run is `Run.to_dict` with its lesson, for
`Run.from_dict` to read. A night (`perf_helpers.compare`) adds "paces", "fail_on" and "baseline".
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf_helpers.course.ledger import Verdict, decide, load
from trainmem.texts import number_text, shown

SCHEMA = 1  # of results.json; raise it with a reader for the older ones
AXES = ("memory", "verdict", "speed")  # in what a night can be worse than its baseline
NEEDED = {  # of each lesson and of each claim, at least
    "lessons": ("name", "status", "seconds", "message"),
    "claims": ("id", "lesson", "verdict", "as_expected", "value"),
}


def load_results(path: str | Path) -> dict[str, Any]:
    """Read results.json (or that of a folder).

    Raises:
        ValueError: there is none, or what is wrong with it.
    """
    path = Path(path)
    path = path / "results.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"its schema is {data['schema']!r}, but this version reads {SCHEMA}")
        for part, names in NEEDED.items():
            [item[name] for item in data[part] for name in names]
        if paths := [name for lesson in data["lessons"] if Path(name := lesson["name"]).name != name]:
            raise ValueError(f"a lesson is called {shown(paths[0])}")  # its pages are files of that name
        return data | {"date": str(data["date"]), "machine": dict(data["machine"]), "versions": dict(data["versions"])}
    except FileNotFoundError:
        raise ValueError(f"no results in {path}: name a results.json, or the folder of a course run") from None
    except (ValueError, LookupError, TypeError, OSError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not the results of a course ({what}): run the course again to get one") from None


def recorded(folder: str | Path) -> dict[str, dict[str, Any]]:
    """The newest of `course_runs` of each machine, by the name of its folder."""
    return {data["file"].parent.name: data for data in course_runs(folder)}


def course_runs(folder: str | Path) -> list[dict[str, Any]]:
    """Every measured course run in a folder, as <machine>/<date>.json, of each machine the oldest first, with the file
    under "file". What was rehearsed is left out. Raises ValueError where a file is not a course's results."""
    found = (load_results(path) | {"file": path} for path in sorted(Path(folder).glob("*/*.json")))
    return [data for data in found if not data["machine"].get("rehearsed")]


def decided_anew(claims: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims of a recorded run with the verdicts that today's ledger gives to what was measured then. One that asks
    for another quantity today is left out."""
    ledger, rows = load(), []
    for row in claims:
        if (claim := ledger.get(row["id"])) and row["quantity"] == claim.quantity:
            tested = row["verdict"] != Verdict.NOT_TESTABLE
            value = tuple(row["interval"]) if row.get("interval") else row["value"]
            rows.append(row | {"verdict": decide(claim, value, True) if tested else row["verdict"]})
    return rows


def failures(data: dict[str, Any]) -> list[str]:
    """What went wrong in a run (the content of results.json), whatever its verdicts are; one line each."""
    lines = [f"{x['name']} {x['status']}: {x['message']}" for x in data["lessons"] if x["status"] != "ok"]
    undecided = all(claim["verdict"] == Verdict.NOT_TESTABLE for claim in data["claims"])
    return [*lines, "no claim was decided"] if undecided else lines


def problems(data: dict[str, Any]) -> list[str]:
    """What keeps a run from being ok: its failures, and the verdicts that are not expected; one line each."""
    return failures(data) + unexpected(data["claims"])


def to_send(data: dict[str, Any]) -> list[str]:
    """The few lines that tell the authors how this machine differs from those they know; none where it does not."""
    lines, machine, versions = unexpected(data["claims"]), data["machine"], data["versions"]
    if not lines:
        return []
    features = " ".join(machine.get("cpu_features") or ["unknown"])
    cores = f"{machine.get('cpu_cores')} of {machine.get('machine_cores')} cores"
    about = [machine["name"], machine.get("cpu_model") or "", cores, features, machine.get("system") or ""]
    known = [f"{name} {version}" for name, version in versions.items() if version]
    return [" · ".join(filter(None, about)), " · ".join([data["date"], data["profile"], *known]), *lines]


def unexpected(claims: list[dict[str, Any]]) -> list[str]:
    """The rows of claims whose verdict the ledger does not expect, one line each."""
    lines = []
    for claim in claims:
        if not claim["as_expected"]:
            untested = claim["verdict"] == Verdict.NOT_TESTABLE
            expected = expectation_text(claim.get("expected"), None if untested else claim.get("predicted"))
            why = claim.get("reason") if untested else f"measured {measured_text(claim)}"
            lines.append(f"{claim['id']}: {claim['verdict']}, {expected}" + (f" ({why})" if why else ""))
    return lines


def expectation_text(verdicts: Sequence[str] | None, predicted: Sequence[float] | None) -> str:
    """What was expected of a claim: its verdicts, or the range that this machine's own measurements predict."""
    if predicted:
        return f"other measurements of this machine predict {interval_text(predicted)}"
    return f"expected {' or '.join(verdicts or ['a prediction'])}"


def interval_text(ends: Sequence[float]) -> str:
    """ "0.55 to 0.61"."""
    return " to ".join(map(number_text, ends))


def measured_text(claim: dict[str, Any]) -> str:
    """What a claim measured, with its interval if that has a width: "0.58 [0.55, 0.61]", or "not measured"."""
    low, high = claim.get("interval") or (None, None)
    return number_text(claim["value"]) + (f" [{number_text(low)}, {number_text(high)}]" if low != high else "")
